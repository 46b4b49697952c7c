"""Which prompts come and how long their responses are: from a distribution, a trace of lengths, or a recorded run.

With a distribution, lengths have its marginal exactly and are tied together by normal scores (a Gaussian copula):
z = sqrt(share) z_prompt + sqrt(1 - share) z_response, length = quantile(Phi(z)). `share` is how much of the variation
belongs to the prompt, `stability` how much of the prompt's part stays from visit to visit. z_response is a function of
the response's key, so that a restarted response has the same length, as with keyed sampling.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import erf, inf, nan, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.columns import unknown_ids
from stretto.engine.responses import uniform, uniforms
from stretto.errors import StrettoError
from stretto.records import FloatArray, IntArray, Prompt, Rollout

NORMAL = NormalDist()
OUTPUT_COLUMNS = ("output_length", "output_tokens", "GeneratedTokens", "response_length", "length")
SQRT2 = sqrt(2.0)
CELLS = 8192  # of the table of quantiles
_STUCK = 1 << 40  # tokens: only the limit ends such a response


class Quantiles:
    """A distribution of lengths as a table: the length at (i + 1/2) / CELLS."""

    def __init__(self, table: IntArray) -> None:
        self.table: list[int] = table.tolist()

    @classmethod
    def lognormal(cls, median: float, sigma: float) -> Quantiles:
        """Lengths whose logarithm is normal."""
        z = [NORMAL.inv_cdf((i + 0.5) / CELLS) for i in range(CELLS)]
        return cls(_whole(np.round(median * np.exp(sigma * np.array(z)))))

    @classmethod
    def weighted(cls, lengths: Sequence[float], weights: Sequence[float] | None = None) -> Quantiles:
        """An empirical distribution. Raises StrettoError if it has no weight."""
        values = np.asarray(lengths, np.float64)
        shares = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
        if not len(values) or not shares.sum() > 0:
            raise StrettoError("no lengths: the distribution is empty")
        order = np.argsort(values, kind="stable")
        upto = np.cumsum(shares[order]) / shares.sum()
        at = np.searchsorted(upto, (np.arange(CELLS) + 0.5) / CELLS)
        return cls(_whole(values[order][np.minimum(at, len(values) - 1)]))

    def __call__(self, score: float) -> int:
        """The length at a normal score."""
        return self.table[int(0.5 * (1.0 + erf(score / SQRT2)) * (CELLS - 1e-9))]

    def scaled(self, factor: float) -> Quantiles:
        """All lengths times `factor`."""
        return Quantiles(_whole(np.round(factor * np.array(self.table))))


def _whole(lengths: FloatArray) -> IntArray:
    """At least one token, and beyond any limit no more than what never ends."""
    return np.clip(lengths, 1, _STUCK).astype(np.int64)


def read_trace(path: Path) -> Quantiles:
    """Lengths of a trace: .jsonl or .csv, may be gzipped. A line has one response's length, or a histogram
    {length: probability} with the rate at which its client sends (`mean_rate_per_s`).

    Raises StrettoError: no such file, a row without a length or with one that is no number of at least 0, or no rows.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise StrettoError(f"{path}: cannot be read: {error}") from None
    rows: Iterable[Mapping[str, Any]]
    rows = csv.DictReader(io.StringIO(text)) if ".csv" in path.suffixes else _json_lines(text, path)
    values: list[float] = []
    weights: list[float] = []
    for number, row in enumerate(rows, start=1):
        where = f"{path}: row {number}"
        if not isinstance(row, dict):
            raise StrettoError(
                f"{where}: {row!r} is no object with one of the keys {', '.join(OUTPUT_COLUMNS)}"
            )
        column = next((c for c in OUTPUT_COLUMNS if c in row), None)
        if column is None:
            raise StrettoError(
                f"{where} has none of the columns {', '.join(OUTPUT_COLUMNS)}; it has {', '.join(map(str, row))}"
            )
        found = row[column]
        if isinstance(found, dict):
            rate = _amount(row.get("mean_rate_per_s", 1.0), f"{where}: mean_rate_per_s")
            values += [_amount(length, f"{where}: a length in {column}") for length in found]
            weights += [rate * _amount(share, f"{where}: a share in {column}") for share in found.values()]
        else:
            values.append(_amount(found, f"{where}: {column}"))
            weights.append(1.0)
    if not sum(weights) > 0:
        raise StrettoError(f"{path}: no lengths: it has {'only weights of 0' if weights else 'no rows'}")
    return Quantiles.weighted(values, weights)


def _amount(value: object, what: str) -> float:
    """A number of a trace. Raises StrettoError for anything but a finite one of at least 0."""
    try:
        amount = nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        amount = nan
    if not 0.0 <= amount < inf:
        raise StrettoError(f"{what} = {value!r}: expected a finite number of at least 0")
    return amount


def _json_lines(text: str, path: Path) -> Iterable[Mapping[str, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise StrettoError(f"{path}:{number}: not valid JSON: {error}") from None


class Drawn:
    """Prompts 0, 1, 2 ... of `rows`, again and again, with lengths from a distribution.

    Args:
        stuck: share of responses that do not end before their limit.
        cap: the limit of new tokens.
    """

    def __init__(
        self,
        quantiles: Quantiles,
        *,
        rows: int,
        prompt_tokens: int = 0,
        share: float = 0.5,
        stability: float = 1.0,
        stuck: float = 0.0,
        cap: int = _STUCK,
        seed: int = 0,
    ) -> None:
        self.quantiles, self.cap = quantiles, cap
        self.rows, self.share, self.stability, self.stuck = rows, share, stability, stuck
        self.prompt_ids = np.zeros(prompt_tokens, np.int64)
        self.random = np.random.default_rng(seed)
        self.own = self.random.standard_normal(rows)  # z_prompt, its lasting part
        self.easy: list[float] = self.random.random(rows).tolist()
        self.scores: list[float] = []  # group -> sqrt(share) z_prompt
        self.visits: list[int] = []  # group -> visit
        self.prompts = [Prompt(row, f"{row:x}", 0, self.prompt_ids, {}) for row in range(rows)]
        self._rest = sqrt(1.0 - share)

    def next(self, count: int) -> list[tuple[Prompt, int]]:
        """The next groups, in the order in which the ledger numbers them."""
        first = len(self.scores)
        rows = np.arange(first, first + count) % self.rows
        fresh = self.random.standard_normal(count)
        z = sqrt(self.stability) * self.own[rows] + sqrt(1.0 - self.stability) * fresh
        self.scores += (sqrt(self.share) * z).tolist()
        visits = [(first + i) // self.rows for i in range(count)]
        self.visits += visits
        return [(self.prompts[row], visit) for row, visit in zip(rows.tolist(), visits, strict=True)]

    def foresee(self, groups: Sequence[int], keys: npt.NDArray[np.uint64]) -> tuple[list[int], list[float]]:
        """`length` and `reward` of each response; many at once cost a fourth."""
        scores, rest, table, inverse = self.scores, self._rest, self.quantiles.table, NORMAL.inv_cdf
        z = [scores[g] + rest * inverse(u) for g, u in zip(groups, uniforms(keys, 0), strict=True)]
        lengths = [table[int(0.5 * (1.0 + erf(score / SQRT2)) * (CELLS - 1e-9))] for score in z]
        if self.stuck:
            ends = [u >= self.stuck for u in uniforms(keys, 1)]
            lengths = [length if end else _STUCK for length, end in zip(lengths, ends, strict=True)]
        easy, rows = self.easy, self.rows
        rewards = [1.0 if u < easy[g % rows] else 0.0 for g, u in zip(groups, uniforms(keys, 2), strict=True)]
        return lengths, rewards

    def length(self, group: int, key: int) -> int:
        """The whole response's."""
        if self.stuck and uniform(key, 1) < self.stuck:
            return _STUCK
        z = self.scores[group] + self._rest * NORMAL.inv_cdf(uniform(key, 0))
        return self.quantiles(z)

    def visit(self, group: int) -> int:
        """Which visit of its row a group is."""
        return self.visits[group]

    def drafts(self, key: int) -> tuple[float, float] | None:
        """Not known: the scenario says how many tokens a step gives."""
        del key
        return None

    def earlier(self, samples: int, visit: int) -> Iterator[Rollout]:
        """Every prompt's responses at a visit before the first (negative)."""
        fresh = self.random.standard_normal((self.rows, 1 + samples))
        z = sqrt(self.stability) * self.own + sqrt(1.0 - self.stability) * fresh[:, 0]
        scores = sqrt(self.share) * z[:, None] + self._rest * fresh[:, 1:]
        for prompt, row in zip(self.prompts, scores.tolist(), strict=True):
            for i, score in enumerate(row):
                yield _ended(prompt, i, visit, min(self.quantiles(score), self.cap))

    def reward(self, group: int, key: int) -> float:
        """0 or 1."""
        return 1.0 if uniform(key, 2) < self.easy[group % self.rows] else 0.0


class Recorded:
    """The prompts of a recorded run in its order, each response as long as it was.

    A response that the run did not make (a later visit, more samples, another seed) is as long as one of its prompt's,
    which its key chooses. What was unfinished when it was given up, or at the newest
    checkpoint, is at least as long as it was then.
    """

    def __init__(self, run: Path) -> None:
        from stretto.history.log import read_rollouts

        files = sorted((run / "rollouts").glob("*.parquet"))
        if not files:
            raise StrettoError(f"{run}: no run with a log: rollouts/ has no files")
        self.by_key: dict[int, int] = {}
        self.by_row: dict[int, list[int]] = {}
        self.rewards: dict[int, float] = {}
        self.drafted: dict[int, tuple[float, float]] = {}
        self.unfinished: dict[int, int] = {}
        groups: dict[int, tuple[Prompt, int]] = {}
        newest = sorted((run / "in_flight").glob("*.parquet"))[-1:]
        for rollout in (r for file in [*files, *newest] for r in read_rollouts(file)):
            groups[rollout.group_id] = (rollout.prompt, rollout.visit)
            tokens = len(rollout.token_ids)
            if not rollout.finish_reason:
                self.unfinished[rollout.key] = max(tokens, len(rollout.draft_ids))
                continue
            self.by_key[rollout.key] = tokens
            self.by_row.setdefault(rollout.prompt.row, []).append(tokens)
            self.rewards[rollout.key] = rollout.reward
            # Older logs have no steps; one more where a response ended with a drafted token.
            steps = rollout.decode_steps or max(1, tokens - rollout.accepted)
            # A simulated response's first step gives one token.
            self.drafted[rollout.key] = max(1.0, (tokens - 1) / max(1, steps - 1)), rollout.drafted / steps
        self.order = [groups[group] for group in sorted(groups)]
        self.rows = len({prompt.row for prompt, _ in self.order})
        self.taken: list[tuple[Prompt, int]] = []

    def next(self, count: int) -> list[tuple[Prompt, int]]:
        """The next groups; after the run's last the first again, as later visits."""
        first, size = len(self.taken), len(self.order)
        most = 1 + max(visit for _, visit in self.order)
        for i in range(first, first + count):
            prompt, visit = self.order[i % size]
            self.taken.append((prompt, visit + most * (i // size)))
        return self.taken[first:]

    def foresee(self, groups: Sequence[int], keys: npt.NDArray[np.uint64]) -> tuple[list[int], list[float]]:
        """`length` and `reward` of each response."""
        each = list(zip(groups, keys.tolist(), strict=True))
        return [self.length(*one) for one in each], [self.reward(*one) for one in each]

    def length(self, group: int, key: int) -> int:
        """The whole response's."""
        known = self.by_key.get(key)
        if known is not None:
            return known
        had = self.unfinished.get(key, 0)
        lengths = [n for n in self.by_row.get(self.taken[group][0].row, []) if n > had]
        # With nothing to go by, as long again.
        return lengths[int(uniform(key, 0) * len(lengths))] if lengths else max(1, 2 * had)

    def visit(self, group: int) -> int:
        """Which visit of its row a group is."""
        return self.taken[group][1]

    def drafts(self, key: int) -> tuple[float, float] | None:
        """Tokens and nodes per step that the response had; None for one that the run did not make."""
        return self.drafted.get(key)

    def earlier(self, samples: int, visit: int) -> Iterator[Rollout]:
        """Every prompt's responses at a visit before the first, as long as recorded ones."""
        prompts = {prompt.row: prompt for prompt, _ in self.order}
        for row, lengths in self.by_row.items():
            for i in range(samples):
                yield _ended(prompts[row], i, visit, lengths[i % len(lengths)])

    def reward(self, group: int, key: int) -> float:
        """As recorded; 0 for a response that was not."""
        del group
        return self.rewards.get(key, 0.0)


def _ended(prompt: Prompt, sample_index: int, visit: int, tokens: int) -> Rollout:
    """A response of which only the length is known."""
    ids = unknown_ids(tokens)
    zeros = np.broadcast_to(0.0, (tokens,))
    return Rollout(
        -1, -1, prompt, sample_index, visit, 0, ids, zeros, zeros, ids, np.broadcast_to(True, (tokens,))
    )


Workload = Drawn | Recorded
