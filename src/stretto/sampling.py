"""Keyed sampling: the token is a pure function of logits, key and position.

The noise of token id v at position i of a response is g = h(key, i, v); the token is the Gumbel-max choice
argmax_v(logit_v / T + g_v) over the processed distribution (Gumbel 1954; Maddison et al. 2014), ties to the lower
id. So a response depends on its weights and its key, and on nothing that ran beside it or before it.

Processing follows vLLM's order: temperature, min-p, top-k, top-p. Everything is decided in float64. This
module knows numpy and numba only; the same choice for logits on a GPU is in `stretto.sampling_torch`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from stretto.alternatives import Alternatives, LogprobArray, TokenArray
from stretto.errors import StrettoError
from stretto.records import FloatArray, IntArray, Purpose

KeyArray = npt.NDArray[np.uint64]
AnyFloatArray = npt.NDArray[np.floating[Any]]
F = TypeVar("F", bound=Callable[..., Any])

# splitmix64 (Steele, Lea and Flood 2014): its increment, and the multipliers of its mixing function.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
TWO_TO_64 = 2.0**64
_encode = json.JSONEncoder(separators=(",", ":")).encode
LARGEST_UNIFORM = 1.0 - 2.0**-53  # so that log1p(-w) stays finite
BLOCK = 1 << 17  # weights held at a time: 1 MiB


def kernels_digest(package: Path) -> str:
    """A hash (16 hexadecimal digits) of the package's files that have kernels."""
    found = blake2b(digest_size=8)
    for file in sorted(package.rglob("*.py")):
        source = file.read_bytes()
        if b"@kernel(" in source:
            found.update(source)
    return found.hexdigest()


@cache
def _cache_folder() -> str:
    """Where compiled kernels are kept; "": where numba chooses, since the package's own folder can't be written.

    numba compiles anew what is in a file that has changed, but not its callers in other files, into which it was
    inlined, with its constants: these would go on with arrays of the sizes of before.
    """
    package = Path(__file__).parent
    folder = Path(numba.config.CACHE_DIR or package / "__pycache__") / f"kernels-{kernels_digest(package)}"  # type: ignore[attr-defined]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return ""
    return str(folder) if os.access(folder, os.W_OK) else ""


def kernel(*, parallel: bool = False, inline: bool = False) -> Callable[[F], F]:
    """`numba.njit` without the GIL, compiled once per machine where a cache folder can be written.

    Where none can (a read-only installation without a home folder), every process compiles for itself.
    `inline`: into its callers, for a small function of many arrays: handing them over would take longer than its work.
    Never with `fastmath`: it lets the compiler order sums as it likes, and a kernel just compiled then differs in its
    last bits from the same one loaded from the cache. A resumed run would not be the run that was stopped.
    """
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "parallel": parallel,
        "forceinline": inline,
    }

    def compile_lazily(function: F) -> F:
        chosen = numba.config.CACHE_DIR  # type: ignore[attr-defined]
        numba.config.CACHE_DIR = _cache_folder() or chosen  # type: ignore[attr-defined]
        try:
            compiled: F = numba.njit(cache=True, **options)(function)
        except RuntimeError:
            compiled = numba.njit(**options)(function)
        finally:
            numba.config.CACHE_DIR = chosen  # type: ignore[attr-defined]
        return compiled

    return compile_lazily


def request_key(
    seed: int,
    purpose: Purpose,
    prompt_uid: str,
    occurrence: int,
    sample_index: int,
    visit: int,
    attempt_key: int = 0,
    refresh: float = 1.0,
) -> int:
    """The key of one response, unsigned 64 bit: BLAKE2b of all that may tell responses apart.

    `attempt_key` changes only by a recorded decision to draw again, never by restart or resume. With a `refresh`
    below 1 the noise of an earlier visit is used again, until this sample's is drawn anew with that probability.
    """
    while visit > 0 and refresh < 1.0:
        drawn = request_key(seed, Purpose.REFRESH, prompt_uid, occurrence, sample_index, visit)
        if drawn < refresh * TWO_TO_64:
            break
        visit -= 1
    numbers = [int(number) for number in (seed, occurrence, sample_index, visit, attempt_key)]
    return _hashed(_encode([str(purpose), prompt_uid, *numbers]))  # quoted: unambiguous


def request_keys(
    seed: int, purpose: Purpose, prompt_uid: str, occurrence: int, samples: int, visit: int, refresh: float
) -> list[int]:
    """`request_key` of the samples 0 .. `samples` - 1 of a group."""
    if visit > 0 and refresh < 1.0:
        what = (seed, purpose, prompt_uid, occurrence)
        return [request_key(*what, i, visit, refresh=refresh) for i in range(samples)]
    head = _encode([str(purpose), prompt_uid, int(seed), int(occurrence)])[:-1]
    begun, rest = _hash(head), f",{int(visit)},0]"
    digests = bytearray()
    for i in range(samples):
        key = begun.copy()
        key.update(f",{i}{rest}".encode())
        digests += key.digest()
    keys: list[int] = np.frombuffer(digests, "<u8").tolist()
    return keys


def _hash(encoded: str) -> blake2b:
    return blake2b(encoded.encode(), digest_size=8, person=b"stretto.key.1")


def _hashed(encoded: str) -> int:
    return int.from_bytes(_hash(encoded).digest(), "little")


@dataclass(slots=True)
class SamplingColumns:
    """How each of R rows is drawn: `SamplingParams` as columns, all of shape (R,)."""

    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray

    def __getitem__(self, rows: IntArray) -> SamplingColumns:
        return SamplingColumns(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(slots=True)
class Sampled:
    """One token for each of R rows, with float64 log-probs, and the K most probable tokens of each.

    At temperature 0 the processed distribution is a single point, so `logprobs` is 0, and `raw_logprobs`
    is taken at temperature 1.
    """

    token_ids: IntArray  # (R,)
    logprobs: FloatArray  # (R,), under the processed distribution, the one sampled from
    raw_logprobs: FloatArray  # (R,), with the temperature only
    top: Alternatives

    def __getitem__(self, rows: IntArray) -> Sampled:
        top = Alternatives(self.top.token_ids[rows], self.top.logprobs[rows])
        return Sampled(self.token_ids[rows], self.logprobs[rows], self.raw_logprobs[rows], top)


def sample(
    logits: AnyFloatArray, keys: KeyArray, positions: IntArray, how: SamplingColumns, alternatives: int = 0
) -> Sampled:
    """Draw one token per row of `logits` (R, V), float32 or float64, with each row's own key and position.

    `alternatives`: how many of the most probable tokens to report of each row, the drawn one perhaps among them.
    Raises `StrettoError` if a row holds a NaN or has no finite maximum: any token would be a lie.
    """
    logits = np.ascontiguousarray(logits)
    count, vocabulary = logits.shape
    top = Alternatives.none(count, alternatives)
    sampled = Sampled(np.empty(count, np.int64), np.empty(count), np.empty(count), top)
    truncated = (how.top_k > 0) | (how.top_p < 1.0) | (how.min_p > 0.0)
    block = max(1, min(count, BLOCK // vocabulary))  # rows whose weights stay in the processor's cache
    weights, totals = np.empty((block, vocabulary)), np.empty((2, block))
    for start in range(0, count, block):
        rows = np.arange(start, min(start + block, count))
        _weigh(logits, how.temperature, rows, weights, totals)
        cut = np.flatnonzero(truncated[rows])
        if cut.size:
            weights[cut], totals[1, cut] = truncate(weights[cut], how[rows[cut]])
        _race(
            logits, how.temperature, keys, positions, rows, weights, totals,
            sampled.token_ids, sampled.logprobs, sampled.raw_logprobs,
        )  # fmt: skip
        if alternatives:
            _most_probable(how.temperature, rows, weights, totals, top.token_ids, top.logprobs)
    refuse_broken(sampled.token_ids)
    return sampled


def truncate(weights: FloatArray, how: SamplingColumns) -> tuple[FloatArray, FloatArray]:
    """`weights` (R, V), largest 1 in each row, with 0 for what min-p, top-k, top-p drop; and each row's new sum (R,).

    The order is by weight, downwards, then by id, upwards. A set's mass is the cumulative float64 sum in that order.
    """
    weights = np.where(weights < how.min_p[:, None], 0.0, weights)
    vocabulary = weights.shape[1]
    descending = np.sort(weights, axis=1)[:, ::-1]
    mass = np.cumsum(descending, axis=1)
    count = np.where(how.top_k > 0, np.minimum(how.top_k, vocabulary), vocabulary)
    goal = how.top_p * np.take_along_axis(mass, count[:, None] - 1, axis=1)[:, 0]
    nucleus = np.sum(mass < goal[:, None], axis=1) + 1  # the smallest set that reaches top_p
    count = np.where(how.top_p < 1.0, np.minimum(count, nucleus), count)
    last = count[:, None] - 1
    threshold = np.take_along_axis(descending, last, axis=1)
    equal = weights == threshold
    room = count - np.sum(weights > threshold, axis=1)
    kept = (weights > threshold) | (equal & (np.cumsum(equal, axis=1) <= room[:, None]))
    return np.where(kept, weights, 0.0), np.take_along_axis(mass, last, axis=1)[:, 0]


def refuse_broken(token_ids: IntArray) -> None:
    """Raise `StrettoError` if any of `token_ids` (R,) is -1, the mark of a row without a usable maximum."""
    broken = np.flatnonzero(token_ids < 0)
    if broken.size:
        raise StrettoError(
            f"the model's logits are NaN or infinite in {broken.size} of {token_ids.size} rows: its weights are "
            "broken (a learning rate that is too high, or a number format that is too small)"
        )


def gumbel(keys: KeyArray, positions: IntArray, token_ids: IntArray) -> FloatArray:
    """The noise g of given token ids, float64; the arguments broadcast against each other."""
    shaped = np.broadcast_arrays(keys, positions, token_ids)
    out = np.empty(shaped[0].shape)
    flat = [np.ascontiguousarray(array).ravel() for array in shaped]
    _gumbel(flat[0], flat[1], flat[2], out.ravel())
    return out


def compile_kernels() -> None:
    """Compile, or load from numba's cache, everything above: at set-up, so that no step has to."""
    keys, positions = np.zeros(1, np.uint64), np.zeros(1, np.int64)
    how = SamplingColumns(np.ones(1), np.zeros(1, np.int64), np.ones(1), np.zeros(1))
    for dtype in (np.float32, np.float64):
        sample(np.zeros((1, 2), dtype), keys, positions, how, alternatives=1)
    gumbel(keys, positions, positions)


@kernel()
def _mix(state: np.uint64) -> np.uint64:
    """splitmix64's mixing function."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(MIX_1)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(MIX_2)
    return state ^ (state >> np.uint64(31))


@kernel()
def _stream(key: np.uint64, position: int) -> np.uint64:
    """State of the splitmix64 stream of (key, position): itself output `position` of the stream of `key`."""
    return _mix(key + np.uint64(position + 1) * np.uint64(GOLDEN_GAMMA))


@kernel()
def _uniform(stream: np.uint64, token_id: int) -> float:
    """w in (0, 1) from output `token_id` of the stream; fully precise near 0, where the largest noise comes from."""
    hashed = _mix(stream + np.uint64(token_id + 1) * np.uint64(GOLDEN_GAMMA))
    return min((np.float64(hashed) + 0.5) / TWO_TO_64, LARGEST_UNIFORM)


@kernel()
def _noise(uniform: float) -> float:
    """Standard Gumbel from w: E = -log(1 - w) is a standard exponential, g = -log E."""
    return -math.log(-math.log1p(-uniform))


@kernel()
def exponential_of(key: np.uint64, position: int, token_id: int) -> float:
    """The standard exponential variable E that the noise g = -log E of a token is made of, for kernels."""
    return -math.log1p(-_uniform(_stream(key, position), token_id))


@kernel()
def _gumbel(keys: KeyArray, positions: IntArray, token_ids: IntArray, out: FloatArray) -> None:
    for i in range(out.size):
        out[i] = -math.log(exponential_of(keys[i], positions[i], token_ids[i]))


@kernel()
def _weigh(
    logits: AnyFloatArray, temperature: FloatArray, rows: IntArray, weights: FloatArray, totals: FloatArray
) -> None:
    """weights[i] = exp((logits - largest) / temperature) of rows[i], and its sum, twice; NaN marks a broken row.

    At temperature 0 the sums are: at temperature 1, and 1.
    """
    for i in range(rows.size):
        scores = logits[rows[i]]
        largest = -math.inf
        for v in range(scores.size):
            largest = max(largest, np.float64(scores[v]))
        divisor = temperature[rows[i]]
        divisor = divisor if divisor > 0.0 else 1.0
        total = 0.0
        for v in range(scores.size):
            weights[i, v] = math.exp((scores[v] - largest) / divisor)  # NaN where the row has NaN or +inf
            total += weights[i, v]
        totals[0, i] = total
        totals[1, i] = total if temperature[rows[i]] > 0.0 else 1.0


@kernel()
def _race(
    logits: AnyFloatArray,
    temperature: FloatArray,
    keys: KeyArray,
    positions: IntArray,
    rows: IntArray,
    weights: FloatArray,
    totals: FloatArray,
    token_ids: IntArray,
    logprobs: FloatArray,
    raw_logprobs: FloatArray,
) -> None:
    """argmax over v of logits[v] / temperature + g_v, among weights[v] > 0; -1 marks a broken row.

    v can only win while its exponential E_v < weights[v] / lead, where lead is the same quotient of the best so far,
    and E_v >= w_v always: so w_v, an integer hash, excludes all but a few ids before any logarithm is taken.
    """
    for i in range(rows.size):
        row = rows[i]
        if not math.isfinite(totals[0, i]):
            token_ids[row] = -1
            continue
        scores = logits[row]
        first = int(np.argmax(scores))  # ties to the lower id
        token = first
        divisor = temperature[row]
        if divisor > 0.0:
            stream = _stream(keys[row], positions[row])
            best = scores[first] / divisor + _noise(_uniform(stream, first))
            lead = math.exp(best - scores[first] / divisor)
            for v in range(scores.size):
                uniform = _uniform(stream, v)
                if uniform * lead <= weights[i, v] * (1.0 + 1e-9):  # the margin covers both sides' rounding
                    score = scores[v] / divisor + _noise(uniform)
                    if score > best or (score == best and v < token):
                        token, best = v, score
                        lead = math.exp(best - scores[first] / divisor)
        gap = (np.float64(scores[token]) - scores[first]) / (divisor if divisor > 0.0 else 1.0)
        token_ids[row] = token
        logprobs[row] = gap - math.log(totals[1, i]) if divisor > 0.0 else 0.0
        raw_logprobs[row] = gap - math.log(totals[0, i])


@kernel()
def _most_probable(
    temperature: FloatArray,
    rows: IntArray,
    weights: FloatArray,
    totals: FloatArray,
    token_ids: TokenArray,
    logprobs: LogprobArray,
) -> None:
    """The `token_ids` (R, K) of the largest weights above 0 of rows[i], falling, and their log-probs; ties to the lower
    id. At temperature 0 it is the token that is drawn.
    """
    largest = np.empty(token_ids.shape[1])
    for i in range(rows.size):
        most = largest.size if temperature[rows[i]] > 0.0 else 1
        ids, count, least = token_ids[rows[i]], 0, 0.0
        for v in range(weights.shape[1]):
            weight = weights[i, v]
            if weight > least:
                place = min(count, most - 1)
                count = place + 1
                while place > 0 and largest[place - 1] < weight:
                    largest[place], ids[place] = largest[place - 1], ids[place - 1]
                    place -= 1
                largest[place], ids[place] = weight, v
                if count == most:
                    least = largest[most - 1]
        for place in range(count):
            p = largest[place] / totals[1, i] if temperature[rows[i]] > 0.0 else 1.0
            logprobs[rows[i], place] = math.log(p)
