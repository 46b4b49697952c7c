"""Recorded rollouts: responses of several checkpoints, or visits, to the same prompts, to be replayed.

Read from the log of a run (its folder), or from JSON lines, gzipped or not, one prompt and checkpoint each:

    {"dataset": "…", "checkpoint": "…", "prompt": "…", "samples": [{"text": "…", "score": 1.0}, …]}
    {"dataset": "…", "checkpoint": "…", "prompt_ids": […], "samples": [{"token_ids": […], "score": 1.0}, …]}

Checkpoints come in the order of training, and count as visits. Text needs a tokenizer and gets its end token.
Log-probs, alternatives and keys are known of a run's log only: log-probs of JSON lines are NaN, keys 0.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stretto.errors import StrettoError, nearest
from stretto.history.log import read_rollouts
from stretto.records import IntArray, Prompt, Rollout, State, prompt_uid

EXCERPT = Path(__file__).parent / "data" / "rollouts_algebra.jsonl.gz"
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Responses to be drafted from, and those to be drafted. All targets are of one visit, the history of others."""

    history: list[Rollout]
    targets: list[Rollout]
    names: tuple[str, str]  # of the history's visits, and of the targets'

    def thinned(self, count: int) -> Recorded:
        """The first groups that have `count` targets together, and their history."""
        groups = list(dict.fromkeys(r.group_id for r in self.targets))
        sizes = Counter(r.group_id for r in self.targets)
        enough = np.searchsorted(np.cumsum([sizes[group] for group in groups]), count) + 1
        kept = set(groups[:enough])
        targets = [r for r in self.targets if r.group_id in kept]
        answered = {r.prompt.uid for r in targets}
        return Recorded([r for r in self.history if r.prompt.uid in answered], targets, self.names)

    @property
    def logprobs_known(self) -> bool:
        """Of every response of the history, the behaviour log-probs."""
        return not any(np.isnan(r.logprobs).any() for r in self.history)

    @property
    def keys_known(self) -> bool:
        """Of every target, the key that its noise came from."""
        return all(r.key for r in self.targets)

    @property
    def noise_known(self) -> bool:
        """All that noise-aware drafting goes by: log-probs and alternatives of the history, keys of the targets."""
        return self.logprobs_known and self.keys_known and all(r.top is not None for r in self.history)

    @property
    def tokens(self) -> tuple[int, int]:
        """In the history, and in the targets."""
        history, targets = (sum(r.token_ids.size for r in rs) for rs in (self.history, self.targets))
        return history, targets


def read(
    path: Path, model: Path | None = None, history: str | None = None, target: str | None = None
) -> Recorded:
    """What is recorded in `path`: the responses of checkpoint `target` (default: the last) to prompts that `history`
    (default: all before the target) answered too.

    `model`: a folder with a tokenizer, for text. Raises StrettoError for files that are missing, damaged or of another
    form, checkpoints that do not exist and targets without history.
    """
    names, rollouts = _run(path) if path.is_dir() else _lines(path, model)
    for option, name in (("--history", history), ("--target", target)):
        if name is not None and name not in names:
            raise StrettoError(f'{path}: {option} "{name}" is not there; {nearest(name, names)}')
    last = names.index(target) if target is not None else len(names) - 1
    visits = [names.index(history)] if history is not None else list(range(last))
    before = [r for r in rollouts if r.visit in visits]
    known = {r.prompt.uid for r in before}
    targets = [r for r in rollouts if r.visit == last and r.prompt.uid in known and r.token_ids.size]
    if last in visits or not targets:
        raise StrettoError(
            f'{path}: nothing to replay: no response of "{names[last]}" has a history in another one'
        )
    answered = {r.prompt.uid for r in targets}
    shuffled = np.random.default_rng(0).permutation(1 + max(r.group_id for r in targets))
    targets.sort(key=lambda r: int(shuffled[r.group_id]))  # as training does; siblings stay together
    label = ", ".join(names[visit] for visit in visits)
    return Recorded([r for r in before if r.prompt.uid in answered], targets, (label, names[last]))


def _run(folder: Path) -> tuple[list[str], list[Rollout]]:
    """The finished training responses in a run's log; checkpoints are visits."""
    files = sorted(
        (folder / "rollouts").glob("step-*.parquet"), key=lambda file: int(file.stem.split("-")[1])
    )
    if not files:
        raise StrettoError(
            f"{folder}: no log of rollouts in there; a run's folder has rollouts/step-*.parquet"
        )
    ended = (State.FINISHED, State.SCORED, State.CONSUMED)
    rollouts = [r for file in files for r in read_rollouts(file) if r.outcome in ended]
    return [f"visit {visit}" for visit in range(1 + max((r.visit for r in rollouts), default=0))], rollouts


def _lines(path: Path, model: Path | None) -> tuple[list[str], list[Rollout]]:
    """The responses in a file of JSON lines; one group per prompt and checkpoint."""
    encode = _encoder(model) if model is not None else None
    names: list[str] = []
    groups: dict[tuple[str, int], int] = {}
    rollouts: list[Rollout] = []
    for number, line in enumerate(_text_lines(path), 1):
        try:
            entry = json.loads(line)
            if entry["checkpoint"] not in names:
                names.append(entry["checkpoint"])
            ids = _ids(entry, "prompt_ids", "prompt", encode, end=False)
            prompt = Prompt(number, prompt_uid(ids), 0, ids, {})
            visit = names.index(entry["checkpoint"])
            group = groups.setdefault((prompt.uid, visit), len(groups))
            for sample in entry["samples"]:
                tokens = _ids(sample, "token_ids", "text", encode, end=True)
                rollouts.append(_rollout(len(rollouts), group, prompt, visit, tokens, float(sample["score"])))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, StrettoError):
                raise StrettoError(f"{path}, line {number}: {error}") from error
            raise StrettoError(
                f"{path}, line {number}: not a line of recorded rollouts: {error!r}"
            ) from error
    if not names:
        raise StrettoError(f"{path}: empty")
    return names, rollouts


def _rollout(request: int, group: int, prompt: Prompt, visit: int, tokens: IntArray, score: float) -> Rollout:
    unknown = np.full(tokens.size, np.nan)
    return Rollout(
        request_id=request,
        group_id=group,
        prompt=prompt,
        sample_index=request,
        visit=visit,
        key=0,
        token_ids=tokens,
        logprobs=unknown,
        raw_logprobs=unknown,
        versions=np.full(tokens.size, visit),
        loss_mask=np.ones(tokens.size, np.bool_),
        reward=score,
    )


def _ids(entry: dict[str, Any], ids: str, text: str, encode: Encode | None, *, end: bool) -> IntArray:
    if ids in entry:
        return np.array(entry[ids], np.int64)
    if encode is None:
        raise StrettoError(f'"{text}" is text: --model names a folder with the tokenizer for it')
    tokens = encode(entry[text])
    return np.array(tokens if end else tokens[:-1], np.int64)


def _text_lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for line in file:
                yield line.decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StrettoError(f"cannot read {path}: {reason}") from error


def _encoder(model: Path) -> Encode:
    """Token ids of a text, and the end token."""
    file = model / "tokenizer.json"
    if not file.is_file():
        raise StrettoError(f"--model {model}: no tokenizer.json in there")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda text: [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
