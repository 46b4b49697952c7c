"""What usually comes next: per prompt, a suffix automaton over the responses of its last visits.

The index keeps the responses of each prompt's newest `window` visits and builds from them, off the critical path, a
frozen automaton (`stretto.history.frozen`). While a prompt's requests run, its automaton lies in an arena, where one
kernel call serves requests of all prompts. Drafts from it change nothing about what is sampled, so an automaton that
is not ready yet, or no longer the newest, costs time and never correctness.

An occurrence, a token of a stored response, weighs w * x:

    count        w = 1, x = 1
    reward       w = exp(clip(a, -2, 2)), a = (r - mean) / std over the rewards of the visit's responses, x = 1;
                 a = 0 where the std is 0 or the response has no finite reward
    recency      w = 0.5 ** (newest visit - visit), x = 1
    probability  w = 1, x = the token's behaviour probability; the mean is weight / count

RhymeRL (2508.18588) prefers branches by the rewards of their responses without saying how they are aggregated; the
exponential of the normalised reward keeps every weight positive, so negative rewards and groups that all failed need
no case of their own, and it is at most 7.4 times another's either way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Literal, NamedTuple, get_args

import numpy as np

from stretto.alternatives import Alternatives
from stretto.errors import StrettoError, nearest
from stretto.history.automaton import TokenArray, WeightArray
from stretto.history.frozen import Arena, Frozen, freeze
from stretto.history.mixtures import Rows, join_rows, rows_of
from stretto.records import FloatArray, IntArray
from stretto.tally import Tally

Weight = Literal["count", "reward", "recency", "probability"]


class Response(NamedTuple):
    """One finished response."""

    token_ids: IntArray  # (N,)
    logprobs: FloatArray  # (N,), the behaviour log-probs
    reward: float  # nan where there is none
    top: Alternatives | None = None  # at the N places, where they are known


LARGEST_TOKEN = 2**31 - 1
LARGEST_ADVANTAGE = 2.0
ARENA_SHARE = 4  # of the memory bound, one part is reserved for automata in use, which then need not move
GIBIBYTE = 1 << 30
LARGEST_RESERVE = 1 << 28  # bytes, of that


@dataclass(frozen=True, slots=True)
class _Text:
    """One stored response."""

    tokens: TokenArray
    probabilities: WeightArray | None  # of its tokens; only where they are the weight
    reward: float
    rows: Rows | None  # what its tokens were drawn from; only where alternatives are used

    @property
    def nbytes(self) -> int:
        kept = (self.tokens, self.probabilities, self.rows)
        return sum(array.nbytes for array in kept if array is not None)


@dataclass(slots=True)
class _History:
    """One prompt's responses by visit, and the automaton over them."""

    visits: dict[int, list[_Text]] = field(default_factory=dict)
    revision: int = 0  # of the index, when the responses last changed
    automaton: Frozen | None = None
    built: int = -1  # revision that the automaton is made of
    handle: int = -1  # of that automaton in the arena
    pins: int = 0  # handles of any age that are open


@dataclass(slots=True)
class _Open:
    uid: str
    pins: int


Visits = list[tuple[int, list[_Text]]]
Built = tuple[Frozen, float]  # and the seconds it took
Jobs = SimpleQueue[tuple["Future[Built]", Callable[[], Built]] | None]


class HistoryIndex:
    """Responses by prompt and visit, and automata over them. For one calling thread.

    A failure of the building thread is raised by the next call of `add`, `prepare`, `wait` or `open`.
    """

    def __init__(
        self,
        *,
        window: int = 2,
        weight: Weight = "count",
        alternatives: bool = False,
        max_bytes: int = 4 * GIBIBYTE,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`window`: visits kept per prompt, at least 1. `alternatives`: what tokens were drawn from is kept too.
        `max_bytes` bounds the arrays of responses and automata.

        Over it, the prompt whose responses came in longest ago loses its oldest visit, and so on; prompts with an
        open handle lose nothing, so the bound may be exceeded by what is in use. `clock`: seconds, for `metrics`.
        """
        if weight not in get_args(Weight):
            raise StrettoError(f"history.weight: {weight!r} is unknown; {nearest(weight, get_args(Weight))}")
        if window < 1 or max_bytes < 1:
            raise StrettoError(f"history: window ({window}) and max_bytes ({max_bytes}) must be at least 1")
        self._window = window
        self._weight: Weight = weight
        self._max_bytes = max_bytes
        self._clock = clock
        self._histories: dict[str, _History] = {}  # the one that longest had no new responses first
        reserve = min(max_bytes // ARENA_SHARE, LARGEST_RESERVE)
        self._alternatives = alternatives
        self._arena = Arena(weighted=weight != "count", mixed=alternatives, reserve=reserve)
        self._open: dict[int, _Open] = {}
        self._jobs: dict[tuple[str, int], Future[Built]] = {}  # by uid and revision
        self._queue: Jobs | None = None
        self._revision = 0
        self._text_bytes = 0
        self._automaton_bytes = 0
        self._since: dict[str, float] = _zeros()

    # ---- responses ------------------------------------------------------------------------------------

    def add(self, uid: str, visit: int, responses: Sequence[Response]) -> None:
        """Store finished responses of prompt `uid` and forget its visits before the newest `window`.

        A visit may come in several pieces, and visits in any order; responses of a visit that is already out of the
        window are not stored. Raises StrettoError for token ids outside 0 .. 2**31 - 1 and, where probabilities are
        the weight, for log-probs that are missing or not numbers.
        """
        self._collect()
        texts = [self._text(uid, visit, i, response) for i, response in enumerate(responses)]
        history = self._histories.pop(uid, None) or _History()
        kept = sorted({*history.visits, visit})[-self._window :]
        if texts and visit in kept:
            history.visits.setdefault(visit, []).extend(texts)
            self._text_bytes += sum(text.nbytes for text in texts)
            for old in history.visits.keys() - set(kept):
                self._text_bytes -= sum(text.nbytes for text in history.visits.pop(old))
            self._changed(history)
        if history.visits:
            self._histories[uid] = history
        self._keep_within_bounds()

    def _text(self, uid: str, visit: int, place: int, response: Response) -> _Text:
        tokens, logprobs, reward, top = response
        where = f"history of prompt {uid}, visit {visit}, response {place}"
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= LARGEST_TOKEN:
            bad = tokens[(tokens < 0) | (tokens > LARGEST_TOKEN)][0]
            raise StrettoError(f"{where}: token id {bad} is not in 0 .. {LARGEST_TOKEN}")
        probabilities = None
        if self._weight == "probability" or self._alternatives:
            if len(logprobs) != len(tokens):
                raise StrettoError(f"{where}: {len(tokens)} tokens, but {len(logprobs)} log-probs")
            if np.isnan(logprobs).any() or (logprobs > 0).any():
                raise StrettoError(
                    f'{where}: a log-prob is NaN or above 0; weight = "count" without alternatives needs none'
                )
        # Rounded first, as they are in the log: histories must be the same live and rebuilt from it.
        known = np.exp(logprobs.astype(np.float32))
        probabilities = known if self._weight == "probability" else None
        kept = tokens.astype(np.int32)
        rows = rows_of(kept, known, top) if self._alternatives else None
        return _Text(kept, probabilities, float(reward), rows)

    def _changed(self, history: _History) -> None:
        self._revision += 1
        history.revision = self._revision

    def _keep_within_bounds(self) -> None:
        rebuilt: dict[str, _History] = {}  # what lost a visit of those that an automaton was wanted of
        while self._text_bytes + self._automaton_bytes + self._arena.nbytes > self._max_bytes:
            uid = next((uid for uid, history in self._histories.items() if not history.pins), None)
            if uid is None:
                break
            history = self._histories[uid]
            if history.automaton is not None or (uid, history.revision) in self._jobs:
                rebuilt[uid] = history
            self._text_bytes -= sum(text.nbytes for text in history.visits.pop(min(history.visits)))
            self._since["dropped_visits"] += 1
            self._replace(history, None)
            self._changed(history)
            history.built = history.revision - 1  # builds under way still contain that visit
            if not history.visits:
                del self._histories[uid]
                rebuilt.pop(uid, None)
                self._since["dropped_prompts"] += 1
        for uid, history in rebuilt.items():
            self._submit(uid, history)

    # ---- automata -------------------------------------------------------------------------------------

    def prepare(self, uids: Iterable[str]) -> None:
        """Build the automata of these prompts that are missing or out of date, in the background.

        Prompts without responses have none.
        """
        self._collect()
        for uid in uids:
            history = self._histories.get(uid)
            if history is not None and history.built != history.revision:
                self._submit(uid, history)

    def wait(self, uids: Iterable[str]) -> None:
        """`prepare`, and return when these prompts' automata are up to date.

        Those that the thread has not come to are built here, so that nobody waits for other prompts' builds.
        """
        wanted = set(uids)
        self.prepare(wanted)
        while jobs := [job for job in self._jobs if job[0] in wanted]:
            uid, revision = jobs[-1]  # the thread comes to it last
            if self._jobs[uid, revision].cancel():
                del self._jobs[uid, revision]
                history = self._histories.get(uid)
                if history is not None and history.revision == revision:
                    self._adopt(uid, revision, _build(self._weight, _visits(history), self._clock))
                    self._keep_within_bounds()
            else:
                wait([self._jobs[uid, revision]])
                self._collect()

    def _submit(self, uid: str, history: _History) -> None:
        """Have the thread build this prompt's automaton, unless it is about to."""
        if (uid, history.revision) in self._jobs:
            return
        if self._queue is None:
            self._queue = SimpleQueue()
            Thread(target=_work, args=(self._queue,), name="history-index", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        future: Future[Built] = Future()
        self._jobs[uid, history.revision] = future
        self._queue.put((future, _job(self._weight, _visits(history), self._clock)))

    def open(self, uid: str) -> int:
        """A handle of the prompt's newest automaton that is ready, pinned until `close`; -1 if there is none.

        Requests of one prompt share it. `open` and `close` move what lies in the arena: read `arrays` and `bases`
        anew after either. States keep their numbers.
        """
        self._collect()
        history = self._histories.get(uid)
        if history is None or history.automaton is None or not len(history.automaton.token):
            return -1
        if history.handle < 0:
            history.handle = self._arena.add(history.automaton)
            self._open[history.handle] = _Open(uid, 0)
        self._open[history.handle].pins += 1
        history.pins += 1
        handle = history.handle
        self._keep_within_bounds()
        return handle

    def close(self, handle: int) -> None:
        """Give a handle back, once for each `open`; KeyError if it is not open."""
        opened = self._open[handle]
        opened.pins -= 1
        history = self._histories[opened.uid]
        history.pins -= 1
        if not opened.pins:
            del self._open[handle]
            self._arena.remove(handle)
            if history.handle == handle:
                history.handle = -1

    def arrays(self) -> Frozen:
        """The arena's arrays: link, length, first, counts, weight, token, target."""
        return self._arena.arrays

    def bases(self, handles: IntArray) -> tuple[IntArray, IntArray]:
        """Where in the arrays the states and the edges of each handle begin, (R,) each; -1 for a handle of -1."""
        return self._arena.bases(handles)

    def counts(self) -> Tally:
        """Sizes now; since the last call, seconds and tokens of builds, visits and prompts dropped for memory.

        `bytes` are all arrays; `bytes_per_token` those of the automata, for each token that they were built from.
        """
        histories = self._histories.values()
        texts = [text for history in histories for visit in history.visits.values() for text in visit]
        automata = [h.automaton for h in histories if h.automaton is not None]
        built_from = sum(int(automaton.counts[0]) for automaton in automata)
        since, self._since = self._since, _zeros()
        sizes: dict[str, float] = {
            "prompts": len(self._histories),
            "tokens": sum(len(text.tokens) for text in texts),
            "states": sum(automaton.states for automaton in automata),
            "bytes": self._text_bytes + self._automaton_bytes + self._arena.nbytes,
        }
        return Tally(sizes | since, {"bytes_per_token": (self._automaton_bytes, built_from)})

    def metrics(self) -> dict[str, float]:
        """`counts`, as they are shown."""
        return self.counts().figures()

    def _collect(self) -> None:
        """Adopt what the thread has built; raise its oldest failure, leaving further ones to the next call."""
        for (uid, revision), future in list(self._jobs.items()):
            if future.done():
                del self._jobs[uid, revision]
                self._adopt(uid, revision, future.result())
                self._keep_within_bounds()

    def _adopt(self, uid: str, revision: int, built: Built) -> None:
        frozen, seconds = built
        self._since["build_seconds"] += seconds
        self._since["built_tokens"] += int(frozen.counts[0])
        history = self._histories.get(uid)
        if history is not None and history.built < revision:
            self._replace(history, frozen)
            history.built = revision

    def _replace(self, history: _History, automaton: Frozen | None) -> None:
        self._automaton_bytes -= history.automaton.nbytes if history.automaton is not None else 0
        self._automaton_bytes += automaton.nbytes if automaton is not None else 0
        history.automaton = automaton
        history.handle = -1  # an older automaton that is open stays in the arena until it is closed


def _zeros() -> dict[str, float]:
    return dict.fromkeys(("build_seconds", "built_tokens", "dropped_visits", "dropped_prompts"), 0)


def _visits(history: _History) -> Visits:
    """A copy that `add` does not change."""
    return [(visit, list(texts)) for visit, texts in sorted(history.visits.items())]


def _job(weight: Weight, visits: Visits, clock: Callable[[], float]) -> Callable[[], Built]:
    return lambda: _build(weight, visits, clock)


def _work(jobs: Jobs) -> None:
    """The building thread: knows the queue only, so that an index nobody uses any more can go."""
    while (job := jobs.get()) is not None:
        future, build = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(build())
        except Exception as error:  # noqa: BLE001 -- raised again in `HistoryIndex._collect`
            future.set_exception(error)


def _build(weight: Weight, visits: Visits, clock: Callable[[], float]) -> Built:
    started = clock()
    texts = [text for _, visit in visits for text in visit]
    tokens = np.concatenate([text.tokens for text in texts])
    offsets = np.cumsum([0, *(len(text.tokens) for text in texts)])
    rows = [text.rows for text in texts if text.rows is not None]
    frozen = freeze(tokens, offsets, _values(weight, visits), join_rows(rows) if rows else None)
    return frozen, clock() - started


def _values(weight: Weight, visits: Visits) -> FloatArray | None:
    """What each token of the visits' responses weighs, (N,); None if each weighs 1."""
    if weight == "count":
        return None
    texts = [text for _, visit in visits for text in visit]
    if weight == "probability":
        known = [text.probabilities for text in texts if text.probabilities is not None]
        return np.concatenate(known).astype(np.float64)
    newest = visits[-1][0]
    if weight == "recency":
        each = [0.5 ** (newest - visit) for visit, kept in visits for _ in kept]
    else:
        each = [w for _, kept in visits for w in reward_weights([t.reward for t in kept]).tolist()]
    return np.repeat(np.array(each), [len(text.tokens) for text in texts])


def reward_weights(rewards: Sequence[float]) -> FloatArray:
    """exp of the normalised reward, cut at +-2, of each response of a visit; (K,). 1 where there is none."""
    values = np.array(rewards, np.float64)
    finite = np.isfinite(values)
    advantages = np.zeros(len(values))
    if finite.any() and (std := values[finite].std()) > 0:
        advantages[finite] = (values[finite] - values[finite].mean()) / std
    return np.exp(np.clip(advantages, -LARGEST_ADVANTAGE, LARGEST_ADVANTAGE))
