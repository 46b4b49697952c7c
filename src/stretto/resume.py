"""What a run must find as it was when it goes on from a checkpoint: its tokenizer, prompts and stop tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from stretto.assemble import Inputs
from stretto.checkpoints import Checkpoint
from stretto.config import ModelConfig
from stretto.errors import StrettoError
from stretto.history.log import read_ended
from stretto.model import end_tokens, load_tokenizer
from stretto.records import Prompt
from stretto.run_folder import RunFolder


def check_tokenizer(checkpoint: Path, inputs: Inputs) -> None:
    """Raise StrettoError if the folder's tokenizer gives tokens other ids than this run's."""
    if load_tokenizer(ModelConfig(path=str(checkpoint))).get_vocab() != inputs.tokenizer.get_vocab():
        raise StrettoError(f"{checkpoint} has another tokenizer than this run (model.path, model.tokenizer)")


def check_prompts(checkpoint: Checkpoint, fingerprint: str, inputs: Inputs, folder: RunFolder) -> None:
    """Raise StrettoError, naming the first row that differs, if the data are others than the run was begun with.

    `fingerprint` is `PromptStream.fingerprint` of this run's.
    """
    if checkpoint.state["prompts"]["prompts"] == fingerprint:
        return
    said = "another number or order of rows that were not answered yet"
    found = _first_other_prompt(folder, checkpoint.step, inputs.train)
    if found is not None:
        was, now = (
            repr(inputs.tokenizer.decode(prompt.token_ids)[:80]) if prompt is not None else "not there"
            for prompt in found
        )
        said = f"the prompt of row {found[0].row} (from 0) was {was} and is {now}"
    raise StrettoError(
        f"data: the prompts are not those that the run was begun with (other rows or tokenizer): {said}"
    )


def check_ends(checkpoint: Checkpoint, inputs: Inputs, path: str) -> str:
    """Raise StrettoError if responses would end at other tokens than until the checkpoint; `path` is `model.path`.

    Checkpoints of earlier versions do not name these tokens: they were the tokenizer's alone, or also those of the
    model's generation_config.json, of which a checkpoint has a copy. Where that makes a difference the run goes on, and
    what to say about it is returned; else nothing.
    """
    stored: Sequence[int] | None = checkpoint.state.get("ends")
    if stored is None:
        model = ModelConfig(path=str(checkpoint.folder))
        named = end_tokens(model, load_tokenizer(model), inputs.vocabulary)
        if len(named) > 1:
            return (
                "which tokens ended this run's responses until now is not known, since the version of Stretto that "
                f"began it did not note them; from here on they are {_shown(inputs.ends, inputs.tokenizer)}"
            )
        stored = named
    if set(stored) == set(inputs.ends):
        return ""
    raise StrettoError(
        f"model.path = {path}: this run's responses end at {_shown(stored, inputs.tokenizer)}, but with this model "
        f"and tokenizer they would end at {_shown(inputs.ends, inputs.tokenizer)}. Resume with a --model.path whose "
        f'generation_config.json has "eos_token_id": {list(stored)}, and whose tokenizer ends a text with token '
        f"{stored[0]}"
    )


def _shown(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return ", ".join(f"{token} ({tokenizer.convert_ids_to_tokens(token)!r})" for token in tokens)


def _first_other_prompt(
    folder: RunFolder, step: int, prompts: Sequence[Prompt]
) -> tuple[Prompt, Prompt | None] | None:
    """Of the prompts that ended responses up to `step` answer, the first by row that `prompts` has not there, and what
    it has; None if it has all of them.
    """
    ours = {prompt.row: prompt for prompt in prompts}
    others: dict[int, Prompt] = {}
    for number in range(1, step + 1):
        with suppress(StrettoError):  # a damaged file is not what this is about
            for old in (ended.prompt for ended in read_ended(folder.log_file("rollouts", number))):
                if old.row not in ours or ours[old.row].uid != old.uid:
                    others[old.row] = old
    if not others:
        return None
    first = others[min(others)]
    return first, ours.get(first.row)
