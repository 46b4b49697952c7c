"""The drafter: what an engine's requests will probably say next, from all sources, within a budget.

Responses begin with START in every source, so a match knows whether it goes back to a response's beginning.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np

from stretto.draft import SOURCES, Drafts, Verified
from stretto.draft.budget import Batch, Budget
from stretto.draft.calibration import Calibration
from stretto.draft.cost import CostModel
from stretto.draft.estimates import advance_prompts
from stretto.draft.tree import Matches, Rules, grow, room_for
from stretto.history.automaton import LivePool, find_text, match_live
from stretto.history.frozen import Arena, advance_all, freeze
from stretto.history.index import LARGEST_TOKEN, HistoryIndex
from stretto.records import IntArray, Request, Rollout, prompt_uid

START = LARGEST_TOKEN  # no tokenizer's
DEPTHS = 8  # depths that are counted one by one; the last with all below
IDLE_GROUPS = 64  # prompts kept for responses that have not begun yet
GENERATION = 200_000  # tokens


@dataclass(slots=True)
class _Group:
    """The prompt of one group."""

    automaton: int
    state: int  # the match of the whole prompt in itself, and its length
    length: int
    users: int = 0


@dataclass(slots=True)
class _Lengths:
    """Of the responses of a prompt's newest visit."""

    visit: int
    tokens: int = 0
    responses: int = 0


@dataclass(slots=True)
class _Counters:
    """What happened since `metrics` was last called."""

    begin_seconds: float = 0.0
    propose_seconds: float = 0.0
    observe_seconds: float = 0.0
    proposed: int = 0
    drafted: IntArray = field(default_factory=lambda: np.zeros(len(SOURCES), np.int64))
    accepted: IntArray = field(default_factory=lambda: np.zeros(len(SOURCES), np.int64))
    tested: IntArray = field(default_factory=lambda: np.zeros(DEPTHS + 1, np.int64))  # by depth, from 0
    passed: IntArray = field(default_factory=lambda: np.zeros(DEPTHS + 1, np.int64))

    def add(self, drafts: Drafts, verified: Verified) -> None:
        depth = np.minimum(drafts.depth, DEPTHS)
        self.drafted += np.bincount(drafts.sources, minlength=len(SOURCES))
        self.accepted += np.bincount(drafts.sources[verified.accepted], minlength=len(SOURCES))
        self.tested += np.bincount(depth[verified.reached], minlength=DEPTHS + 1)
        self.passed += np.bincount(depth[verified.accepted], minlength=DEPTHS + 1)

    def metrics(self) -> dict[str, float]:
        names = ("begin_seconds", "propose_seconds", "observe_seconds", "proposed")
        found = {f"spec/{name}": float(getattr(self, name)) for name in names}
        for index, source in enumerate(SOURCES):
            found[f"spec/drafted/{source}"] = float(self.drafted[index])
            found[f"spec/accepted/{source}"] = float(self.accepted[index])
        for depth in range(1, DEPTHS + 1):
            tested = int(self.tested[depth])
            found[f"spec/acceptance/{depth}"] = int(self.passed[depth]) / tested if tested else float("nan")
        return found


class HistoryDrafter:
    """A `stretto.engine.Drafter`. One per engine; `index` may serve several, one after the other.

    Everything is by slot: where each request is in its prompt's history, among the responses in flight, and in its
    prompt. The source "siblings" is one automaton over all responses in flight, those of the request's group and its
    own among them. Requests that begin after it took in `generation` tokens go to a new one, and it is closed when its
    last request has ended. `clock` returns seconds and is read for `metrics` alone. `wait`: histories that are being
    built are waited for, so that drafts do not depend on timing.
    """

    def __init__(
        self,
        index: HistoryIndex,
        budget: Budget,
        *,
        slots: int,
        sources: Collection[str] = SOURCES,
        max_nodes: int = 16,
        noise_aware: bool = True,
        probabilities: bool = True,
        wait: bool = True,
        generation: int = GENERATION,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        def column(value: int = 0) -> IntArray:
            return np.full(slots, value, np.int64)

        self.index, self.budget = index, budget
        self.calibration = Calibration()
        self._sources = frozenset(sources)
        self._rules = Rules(max_nodes, noise_aware, probabilities)
        self._wait, self._generation, self._clock = wait, generation, clock
        self._pool = LivePool()
        self._groups: OrderedDict[int, _Group] = OrderedDict()  # the one used longest ago first
        self._request_group = column(-1)
        self._key = np.zeros(slots, np.uint64)
        self._handle, self._state, self._length = column(-1), column(), column()
        self._newest = -1  # of the automata of responses in flight
        self._users: Counter[int] = Counter()  # of each of them
        self._siblings, self._last = column(-1), column()
        self._prompt, self._prompt_state, self._prompt_length = column(-1), column(), column()
        self._grown = room_for(slots, max_nodes)
        self._raw, self._rows = np.zeros(0), column()[:0]  # of the last proposal's nodes
        self._lengths: dict[str, _Lengths] = {}  # by prompt uid
        self._counters = _Counters()
        compile_kernels()

    # ---- the engine's side ----------------------------------------------------------------------------

    def begin(self, slot: int, request: Request) -> None:
        began = self._clock()
        uid = prompt_uid(request.prompt_ids)
        if "history" in self._sources:
            if self._wait:
                self.index.wait([uid])
            self._handle[slot] = self.index.open(uid)
        self._state[slot] = self._length[slot] = 0
        self._key[slot] = request.key
        group = self._group(request)
        group.users += 1
        self._request_group[slot] = request.group
        self._prompt[slot] = group.automaton
        tokens = np.concatenate([[START], request.token_ids]).astype(np.int64)
        one = np.array([slot])
        self._follow(one, np.ones(1, np.int64), tokens[:1])
        # A response goes on from its prompt, in which there is no START.
        self._prompt_state[slot], self._prompt_length[slot] = group.state, group.length
        self._follow(one, np.array([tokens.size - 1]), tokens[1:])
        if "siblings" in self._sources:
            self._join(slot, tokens)
        lengths = self._lengths.get(uid)
        self.budget.begin(slot, lengths.tokens / lengths.responses if lengths else None)
        self._counters.begin_seconds += self._clock() - began

    def end(self, slot: int, length: int | None) -> None:
        if length is not None:
            self.budget.end(slot, length)
        if self._handle[slot] >= 0:
            self.index.close(int(self._handle[slot]))
            self._handle[slot] = -1
        if self._siblings[slot] >= 0:
            self._leave(slot)
        name = int(self._request_group[slot])
        self._groups[name].users -= 1
        self._groups.move_to_end(name)
        self._request_group[slot] = -1
        idle = [group for group, entry in self._groups.items() if not entry.users]
        for group in idle[: max(0, len(idle) - IDLE_GROUPS)]:
            automaton = self._groups.pop(group).automaton
            if automaton >= 0:
                self._pool.close(automaton)

    def propose(self, slots: IntArray, generated: IntArray, room: IntArray, tokens: int, most: int) -> Drafts:
        began = self._clock()
        counts = grow(
            self.index.arrays(),
            self._pool.arrays,
            self._matches(slots),
            self._key[slots],
            generated,
            room,
            self.calibration.table,
            self._rules,
            self.budget.floor,
            self._grown,
        )
        nodes = int(counts.sum())
        grown = self._grown
        drafts = Drafts(
            counts,
            grown.token_ids[:nodes],
            grown.parents[:nodes],
            grown.depth[:nodes],
            grown.estimates[:nodes],
            grown.sources[:nodes].astype(np.int8),
        )
        keep = self.budget.choose(drafts, Batch(slots, generated, tokens))
        if np.count_nonzero(keep) > most:
            best = np.argsort(np.where(keep, -drafts.estimates, 1.0), kind="stable")[: max(most, 0)]
            keep = np.zeros(nodes, np.bool_)
            keep[best] = True
        self._raw, self._rows = grown.raw[:nodes][keep], grown.rows[:nodes][keep]
        drafts = drafts.select(keep)
        self._counters.proposed += nodes
        self._counters.propose_seconds += self._clock() - began
        return drafts

    def observe(self, slots: IntArray, drafts: Drafts, verified: Verified, token_ids: IntArray) -> None:
        began = self._clock()
        if drafts.token_ids.size:
            reached, accepted = verified.reached, verified.accepted
            self.calibration.learn(self._raw, self._rows, drafts.depth, reached, accepted)
            self._counters.add(drafts, verified)
        self.budget.learn(drafts, verified, slots)
        self._follow(slots, verified.emitted, token_ids)
        if "siblings" in self._sources:
            self._say(slots, verified.emitted, token_ids)
        self._counters.observe_seconds += self._clock() - began

    # ---- the run's side -------------------------------------------------------------------------------

    def remember(self, rollouts: Iterable[Rollout]) -> None:
        """Finished responses become history; their automata are built in the background."""

        def place(rollout: Rollout) -> tuple[str, int]:
            return rollout.prompt.uid, rollout.visit

        uids = []
        for (uid, visit), members in groupby(sorted(rollouts, key=place), place):
            responses = [
                (
                    np.concatenate([[START], r.token_ids]).astype(np.int64),
                    np.concatenate([[0.0], r.logprobs]),
                    r.reward,
                )
                for r in members
            ]
            self.index.add(uid, visit, responses)
            lengths = self._lengths.setdefault(uid, _Lengths(visit))
            if visit > lengths.visit:
                lengths = self._lengths[uid] = _Lengths(visit)
            if visit == lengths.visit:
                lengths.tokens += sum(tokens.size - 1 for tokens, _, _ in responses)
                lengths.responses += len(responses)
            uids.append(uid)
        self.index.prepare(uids)

    def state_dict(self) -> dict[str, Any]:
        """What was learned from verification; histories are rebuilt from the log by `remember`."""
        return {"calibration": self.calibration.state_dict(), "budget": self.budget.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, budget: bool = True) -> None:
        """`budget`: the state is of a budget of the same kind, and that is loaded too."""
        self.calibration.load_state_dict(state["calibration"])
        if budget:
            self.budget.load_state_dict(state["budget"])

    def metrics(self) -> dict[str, float]:
        """Under `spec/`, since the last call: what each source proposed and what of it was accepted, acceptance by
        depth of the nodes that were put to the test, seconds; and sizes now, of the index
        and of the automata in flight.
        """
        found, self._counters = self._counters.metrics(), _Counters()
        found |= {f"spec/index/{name}": value for name, value in self.index.metrics().items()}
        found |= {f"spec/live/{name}": value for name, value in self._pool.metrics().items()}
        return found | self.budget.metrics() | self.calibration.metrics()

    # ---- inside ---------------------------------------------------------------------------------------

    def _group(self, request: Request) -> _Group:
        if request.group in self._groups:
            self._groups.move_to_end(request.group)
            return self._groups[request.group]
        pool = self._pool
        prompt, state, length = -1, 0, 0
        if "prompt" in self._sources:
            prompt = pool.open()
            last = np.array([pool.root(prompt)])
            size = request.prompt_ids.size
            pool.extend(np.array([prompt]), last, np.array([size]), request.prompt_ids.astype(np.int64))
            state = match_live(pool.arrays, int(last[0]))
            length = int(pool.arrays.length[state])
        group = self._groups[request.group] = _Group(prompt, state, length)
        return group

    def _join(self, slot: int, tokens: IntArray) -> None:
        """A response that says `tokens` so far is in flight in `slot`."""
        pool, newest = self._pool, self._newest
        if newest < 0 or pool.arrays.counts[pool.root(newest)] > self._generation:
            self._newest = pool.open()
            if newest >= 0 and not self._users[newest]:
                pool.close(newest)
            newest = self._newest
        self._users[newest] += 1
        self._siblings[slot] = newest
        found = find_text(pool.arrays, newest, tokens)
        if tokens.size > 1 and found >= 0:  # resumed: what it said before is there
            self._last[slot] = found
        else:
            self._last[slot] = pool.root(newest)
            self._say(np.array([slot]), np.array([tokens.size]), tokens)

    def _leave(self, slot: int) -> None:
        """The response in `slot` is no longer in flight; what it said is forgotten with its generation."""
        handle = int(self._siblings[slot])
        self._siblings[slot] = -1
        self._users[handle] -= 1
        if not self._users[handle]:
            del self._users[handle]
            if handle != self._newest:
                self._pool.close(handle)

    def _say(self, slots: IntArray, counts: IntArray, tokens: IntArray) -> None:
        """Add the new tokens of the requests in `slots` (R,) to the responses in flight."""
        last = self._last[slots]
        self._pool.extend(self._siblings[slots], last, counts, tokens)
        self._last[slots] = last

    def _matches(self, slots: IntArray) -> Matches:
        return Matches(
            *self.index.bases(self._handle[slots]),
            self._state[slots],
            self._length[slots],
            self._siblings[slots],
            self._last[slots],
            self._prompt[slots],
            self._prompt_state[slots],
            self._prompt_length[slots],
        )

    def _follow(self, slots: IntArray, counts: IntArray, tokens: IntArray) -> None:
        """Take the requests in `slots` (R,) over their new tokens, in the sources that these do not change."""
        if "history" in self._sources:
            state, length = self._state[slots], self._length[slots]
            bases = self.index.bases(self._handle[slots])
            advance_all(self.index.arrays(), bases, state, length, counts, tokens)
            self._state[slots], self._length[slots] = state, length
        if "prompt" in self._sources:
            state, length = self._prompt_state[slots], self._prompt_length[slots]
            advance_prompts(self._pool.arrays, self._prompt[slots], state, length, counts, tokens)
            self._prompt_state[slots], self._prompt_length[slots] = state, length


@cache
def compile_kernels() -> None:
    """Compile, or load from numba's cache, everything that drafting calls: at set-up, so that no step has to."""
    one, text = np.zeros(1, np.int64), np.array([START, 0, 1, 0, 2], np.int64)
    size = np.array([text.size])
    pool = LivePool()
    group, last = np.array([pool.open()]), np.zeros(1, np.int64)
    last[0] = pool.root(int(group[0]))
    pool.extend(group, last, size, text)
    find_text(pool.arrays, int(group[0]), text)
    state, length = np.array([match_live(pool.arrays, int(last[0]))]), one.copy()
    advance_prompts(pool.arrays, group, state, length, one, text[:0])
    arena = Arena(weighted=True)
    arena.add(freeze(text.astype(np.int32), np.array([0, text.size]), np.ones(text.size)))
    bases, place, matched = arena.bases(one), one.copy(), one.copy()
    advance_all(arena.arrays, bases, place, matched, size, text)
    calibration, grown = Calibration(), room_for(1, 2)
    matches = Matches(*bases, place, matched, group, last, group, state, length)
    rules = Rules(2, True, True)
    key = np.zeros(1, np.uint64)
    grow(arena.arrays, pool.arrays, matches, key, one, one + 2, calibration.table, rules, 0.0, grown)
    calibration.learn(grown.raw, grown.rows, grown.depth, grown.rows == 0, grown.rows == 0)
    cost = CostModel()
    cost.fit([(1, 1.0), (2, 1.0)])
    cost.seconds(one)
    pool.close(int(group[0]))
