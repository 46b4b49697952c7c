"""What usually comes next: per prompt, a suffix automaton over the responses of its last visits.

The index keeps the responses of each prompt's newest `window` visits and builds from them, off the critical path, a
frozen automaton (`stretto.history.frozen`). While a prompt's requests run, its automaton lies in an arena, where one
kernel call serves requests of all prompts. Drafts from it change nothing about what is sampled, so an automaton that
is not ready yet, or no longer the newest, costs time and never correctness.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

import numpy as np

from stretto.alternatives import Alternatives
from stretto.errors import StrettoError, nearest
from stretto.history.builds import Builder, Built, Text, Visits, Weight, largest_bytes
from stretto.history.frozen import Arena, Frozen
from stretto.history.mixtures import rows_of
from stretto.records import FloatArray, IntArray
from stretto.tally import Tally

logger = logging.getLogger(__name__)


class Response(NamedTuple):
    """One finished response."""

    token_ids: IntArray  # (N,)
    logprobs: FloatArray  # (N,), the behaviour log-probs
    reward: float  # nan where there is none
    top: Alternatives | None = None  # at the N places, where they are known


LARGEST_TOKEN = 2**31 - 1
ARENA_SHARE = 4  # of the memory bound, one part is reserved for automata in use, which then need not move
GIBIBYTE = 1 << 30
LARGEST_RESERVE = 1 << 28  # bytes, of that


@dataclass(slots=True)
class _History:
    """One prompt's responses by visit, and the automaton over them."""

    visits: dict[int, list[Text]] = field(default_factory=dict)
    revision: int = 0  # of the index, when the responses last changed
    automaton: Frozen | None = None
    built: int = -1  # revision that the automaton is made of
    awaited: int = -1  # revision that was last waited for
    promised: int = 0  # bytes that the build under way makes at most
    handle: int = -1  # of that automaton in the arena
    pins: int = 0  # handles of any age that are open


class _Job(NamedTuple):
    future: Future[Built]
    visits: Visits


@dataclass(slots=True)
class _Open:
    uid: str
    pins: int


class HistoryIndex:
    """Responses by prompt and visit, and automata over them. For one calling thread.

    A prompt whose automaton cannot be built is left without one, which is said once.
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
        open handle lose nothing, so the bound may be exceeded by what is in use. What is lost does not depend on how
        fast the thread builds: where that would decide, builds are waited for. What a build needs while it is under
        way comes on top, about 100 bytes for each of the prompt's tokens. `clock`: seconds, for `metrics`.
        """
        if weight not in get_args(Weight):
            raise StrettoError(f"history.weight: {weight!r} is unknown; {nearest(weight, get_args(Weight))}")
        if window < 1 or max_bytes < 1:
            raise StrettoError(f"history: window ({window}) and max_bytes ({max_bytes}) must be at least 1")
        self._window = window
        self._weight: Weight = weight
        self._max_bytes = max_bytes
        self._builder = Builder(weight, clock)
        self._histories: dict[str, _History] = {}  # the one that longest had no new responses first
        reserve = min(max_bytes // ARENA_SHARE, LARGEST_RESERVE)
        self._alternatives = alternatives
        self._arena = Arena(weighted=weight != "count", mixed=alternatives, reserve=reserve)
        self._open: dict[int, _Open] = {}
        self._jobs: dict[tuple[str, int], _Job] = {}  # by uid and revision
        self._shortened: dict[
            str, None
        ] = {}  # prompts that lost a visit; had an automaton and will have another
        self._revision = 0
        self._failed = False  # a build, which has been said
        self._text_bytes = 0
        self._automaton_bytes = 0
        self._promised_bytes = 0
        self._since: dict[str, float] = _zeros()

    # ---- responses ------------------------------------------------------------------------------------

    def add(self, uid: str, visit: int, responses: Sequence[Response]) -> None:
        """Store finished responses of prompt `uid` and forget its visits before the newest `window`.

        A visit may come in several pieces, and visits in any order; responses of a visit that is already out of the
        window are not stored. Raises StrettoError for token ids outside 0 .. 2**31 - 1 and, where probabilities or
        alternatives are used, for log-probs that are missing or not numbers and alternatives of other places.
        """
        self._collect()
        texts = [self._text(uid, visit, i, response) for i, response in enumerate(responses)]
        history = self._histories.pop(uid, None) or _History(built=self._revision)
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

    def _text(self, uid: str, visit: int, place: int, response: Response) -> Text:
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
        if self._alternatives and top is not None and len(top.token_ids) != len(tokens):
            raise StrettoError(
                f"{where}: {len(tokens)} tokens, but alternatives at {len(top.token_ids)} places"
            )
        # Rounded first, as they are in the log: histories must be the same live and rebuilt from it.
        known = np.exp(logprobs.astype(np.float32))
        probabilities = known if self._weight == "probability" else None
        kept = tokens.astype(np.int32)
        rows = rows_of(kept, known, top) if self._alternatives else None
        return Text(kept, probabilities, float(reward), rows)

    def _changed(self, history: _History) -> None:
        self._revision += 1
        history.revision = self._revision

    def _keep_within_bounds(self) -> None:
        """Drop what is too much.

        Called where the same calls come whatever the thread has built; and what is decided is the same, too.
        """
        while self._too_much(sum(self._largest(self._histories[uid]) for uid in self._shortened)):
            uid = next((uid for uid, history in self._histories.items() if not history.pins), None)
            if uid is None:
                break
            history = self._histories[uid]
            if history.automaton is not None or history.promised:
                self._shortened[uid] = None
            self._text_bytes -= sum(text.nbytes for text in history.visits.pop(min(history.visits)))
            self._since["dropped_visits"] += 1
            self._replace(history, None)
            self._changed(history)
            history.built = history.revision - 1  # builds under way still contain that visit
            if not history.visits:
                del self._histories[uid]
                self._shortened.pop(uid, None)
                self._since["dropped_prompts"] += 1

    def _too_much(self, more: int) -> bool:
        """Whether responses and automata, those under way and `more` bytes exceed the bound."""
        known = self._text_bytes + self._arena.nbytes
        if known > self._max_bytes:
            return True
        if known + self._automaton_bytes + self._promised_bytes + more <= self._max_bytes:
            return False
        self._finish(lambda uid: True)
        return self._nbytes + more > self._max_bytes

    @property
    def _nbytes(self) -> int:
        return self._text_bytes + self._automaton_bytes + self._arena.nbytes

    def _largest(self, history: _History) -> int:
        tokens = sum(len(text.tokens) for texts in history.visits.values() for text in texts)
        return largest_bytes(tokens, self._weight, self._alternatives)

    # ---- automata -------------------------------------------------------------------------------------

    def prepare(self, uids: Iterable[str]) -> None:
        """Build the automata of these prompts that are missing or out of date, in the background, and those of prompts
        that have lost a visit since.

        Prompts without responses have none.
        """
        self._collect()
        shortened, self._shortened = self._shortened, {}
        for uid in (*shortened, *uids):
            history = self._histories.get(uid)
            if history is not None and history.built != history.revision:
                self._submit(uid, history)

    def wait(self, uids: Iterable[str]) -> None:
        """`prepare`, and return when these prompts' automata are up to date.

        Those that the thread has not come to are built here, so that nobody waits for other prompts' builds.
        """
        histories = {uid: history for uid in uids if (history := self._histories.get(uid)) is not None}
        wanted = {uid for uid, history in histories.items() if history.awaited != history.revision}
        if not wanted:  # the common case, a group's second request
            return
        self.prepare(wanted)
        self._finish(wanted.__contains__)
        for uid in wanted:
            histories[uid].awaited = histories[uid].revision
        self._keep_within_bounds()

    def wait_for_all(self) -> None:
        """Return when all builds that were asked for are done, the last ones of them here."""
        self._finish(lambda uid: True)

    def _finish(self, wanted: Callable[[str], bool]) -> None:
        """Adopt the automata that are being built of the wanted prompts."""
        while jobs := [job for job in self._jobs if wanted(job[0])]:
            uid, revision = jobs[-1]  # the thread comes to it last
            future, visits = self._jobs[uid, revision]
            if future.cancel():
                del self._jobs[uid, revision]
                history = self._histories.get(uid)
                if history is not None and history.built < revision:
                    here: Future[Built] = Future()
                    try:
                        here.set_result(self._builder.build(visits))
                    except Exception as error:  # noqa: BLE001 -- said in `_adopt`
                        here.set_exception(error)
                    self._adopt(uid, revision, here)
            else:
                wait([future])
                self._collect()

    def _submit(self, uid: str, history: _History) -> None:
        """Have the thread build this prompt's automaton, unless it is about to."""
        if (uid, history.revision) not in self._jobs:
            # Copies, since `add` adds to the lists.
            visits = [(visit, list(texts)) for visit, texts in sorted(history.visits.items())]
            self._jobs[uid, history.revision] = _Job(self._builder.submit(visits), visits)
            self._promise(history, self._largest(history))

    def _promise(self, history: _History, largest: int) -> None:
        self._promised_bytes += largest - history.promised
        history.promised = largest

    def opening(self, uid: str) -> int:
        """Bytes that `open` would copy now."""
        history = self._histories.get(uid)
        if history is None or history.automaton is None or history.handle >= 0:
            return 0
        return history.automaton.nbytes

    def open(self, uid: str) -> int:
        """A handle of the prompt's newest automaton that is ready, pinned until `close`; -1 if there is none.

        Requests of one prompt share it. `open` and `close` move what lies in the arena: read `arrays` and `bases`
        anew after either. States keep their numbers.
        """
        self._collect()
        history = self._histories.get(uid)
        if history is None or history.automaton is None or not len(history.automaton.token):
            return -1
        before = self._arena.nbytes
        if history.handle < 0:
            history.handle = self._arena.add(history.automaton)
            self._open[history.handle] = _Open(uid, 0)
        self._open[history.handle].pins += 1
        history.pins += 1
        handle = history.handle
        if self._arena.nbytes > before:
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
            "bytes": self._nbytes,
        }
        return Tally(sizes | since, {"bytes_per_token": (self._automaton_bytes, built_from)})

    def metrics(self) -> dict[str, float]:
        """`counts`, as they are shown."""
        return self.counts().figures()

    def _collect(self) -> None:
        """Adopt what the thread has built."""
        for (uid, revision), (future, _) in list(self._jobs.items()):
            if future.done():
                del self._jobs[uid, revision]
                self._adopt(uid, revision, future)

    def _adopt(self, uid: str, revision: int, future: Future[Built]) -> None:
        history = self._histories.get(uid)
        current = history is not None and history.built < revision
        if history is not None and history.revision == revision:
            self._promise(history, 0)
        if error := future.exception():
            if not self._failed:
                logger.warning(
                    "no drafts from what prompt %s said before: %s: %s", uid, type(error).__name__, error
                )
                self._failed = True
            frozen = None
        else:
            frozen, seconds = future.result()
            self._since["build_seconds"] += seconds
            self._since["built_tokens"] += int(frozen.counts[0])
        if history is not None and current:
            self._replace(history, frozen)
            history.built = revision

    def _replace(self, history: _History, automaton: Frozen | None) -> None:
        self._automaton_bytes -= history.automaton.nbytes if history.automaton is not None else 0
        self._automaton_bytes += automaton.nbytes if automaton is not None else 0
        history.automaton = automaton
        if automaton is None:
            self._promise(history, 0)
        history.handle = -1  # an older automaton that is open stays in the arena until it is closed


def _zeros() -> dict[str, float]:
    return dict.fromkeys(("build_seconds", "built_tokens", "dropped_visits", "dropped_prompts"), 0)
