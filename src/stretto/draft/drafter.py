"""The drafter: what an engine's requests will probably say next, from all sources, within a budget.

Responses begin with START in every source, so a match knows whether it goes back to a response's beginning.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from stretto.alternatives import Alternatives
from stretto.draft import SOURCES, Drafts, Verified, join, no_drafts
from stretto.draft.budget import Batch, Budget
from stretto.draft.calibration import Calibration
from stretto.draft.compile import compile_kernels
from stretto.draft.counters import Counters
from stretto.draft.dropped import DROPPED, DroppedWork
from stretto.draft.follow import Said, follow, follow_history, grow_at, nowhere
from stretto.draft.mean_lengths import MeanLengths
from stretto.draft.openings import Openings
from stretto.draft.pauses import Pauses
from stretto.draft.tree import Rules, room_for
from stretto.errors import StrettoError
from stretto.history.automaton import LivePool, Pool, find_text, match_live
from stretto.history.frozen import Frozen
from stretto.history.index import LARGEST_TOKEN, HistoryIndex, Response
from stretto.records import IntArray, Request, Rollout, prompt_uid
from stretto.tally import Tally, total

logger = logging.getLogger(__name__)

START = LARGEST_TOKEN  # no tokenizer's
IDLE_GROUPS = 64  # prompts kept for responses that have not begun yet
GENERATION = 200_000  # tokens


@dataclass(slots=True)
class _Group:
    """The prompt of one group."""

    automaton: int
    state: int  # the match of the whole prompt in itself, and its length
    length: int
    users: int = 0


class HistoryDrafter:
    """A `stretto.engine.Drafter`. One per engine; `index` may serve several, one after the other.

    Everything is by slot: where each request is in its prompt's history, among the responses in flight, and in its
    prompt. The source "siblings" is one automaton over all responses in flight, those of the request's group and its
    own among them. Requests that begin after it took in `generation` tokens go to a new one, and it is closed when its
    last request has ended. The newest is closed when responses become history while none is in flight, as between the
    steps of a synchronous schedule: a resumed run has none either, and so drafts alike.
    `clock` returns seconds and is read for `metrics` alone. `wait`: histories that are being built are waited for, so
    that drafts do not depend on timing. `pause`: while no node is worth checking, sources are asked at every `pause`th
    step at least, see `Pauses`. Without `branches` every tree is a path.
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
        branches: bool = True,
        wait: bool = True,
        pause: int = 1,
        generation: int = GENERATION,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        def column(value: int = 0) -> IntArray:
            return np.full(slots, value, np.int64)

        self.index, self.budget = index, budget
        self.calibration = Calibration()
        self._sources = frozenset(sources)
        self._rules = Rules(max_nodes, noise_aware, probabilities, branches)
        self._pauses = Pauses(pause)
        self._generation, self._clock = generation, clock
        self._pool = LivePool()
        self._groups: OrderedDict[int, _Group] = OrderedDict()  # the one used longest ago first
        self._request_group = column(-1)
        self._key = np.zeros(slots, np.uint64)
        self._openings = Openings(index, slots, wait)
        self._at = nowhere(slots)  # by slot
        self._arena = index.arrays()  # as `_at.state_base` and `edge_base` have it
        self._newest = -1  # of the automata of responses in flight
        self._users: Counter[int] = Counter()  # of each of them
        self._dropped = DroppedWork(slots)
        self._grown = room_for(slots, max_nodes)
        self._late: list[Said] = []  # of the steps since the sources were last asked
        self._nothing = Said(column()[:0], column()[:0], column()[:0])
        self._raw, self._rows = np.zeros(0), column()[:0]  # of the last proposal's nodes
        self._lengths = MeanLengths()
        self._counters = Counters()
        compile_kernels()

    # ---- the engine's side ----------------------------------------------------------------------------

    def begin(self, slot: int, request: Request) -> None:
        began = self._clock()
        self._catch_up()
        self._pauses.begin()
        uid = prompt_uid(request.prompt_ids)
        tokens = np.concatenate([[START], request.token_ids]).astype(np.int64)
        if "history" in self._sources:
            self._openings.begin(slot, uid, tokens)
        group = self._group(request)
        group.users += 1
        self._request_group[slot], self._key[slot] = request.group, request.key
        at = self._at
        # A response goes on from its prompt, in which there is no START.
        at.prompt[slot], at.prompt_state[slot], at.prompt_length[slot] = (
            group.automaton,
            group.state,
            group.length,
        )
        if request.token_ids.size:
            count = np.array([request.token_ids.size])  # in its prompt; the responses in flight: below
            follow(self._frozen(), self._pool.arrays, at, Said(np.array([slot]), count, tokens[1:]))
        dropped = request.draft_ids if "dropped" in self._sources else tokens[:0]
        if dropped.size:
            self._dropped.begin(slot, request)
        if "siblings" in self._sources:
            self._join(slot, tokens, dropped)
        self.budget.begin(slot, self._lengths.mean(uid))
        self._counters.begin_seconds += self._clock() - began

    def end(self, slot: int, length: int | None) -> None:
        began = self._clock()
        self._catch_up()
        if length is not None:
            self.budget.end(slot, length)
        self._openings.end(slot)
        if self._at.group[slot] >= 0:
            self._leave(slot)
        self._at.state_base[slot] = self._at.prompt[slot] = -1
        self._dropped.end(slot)
        name = int(self._request_group[slot])
        self._groups[name].users -= 1
        self._groups.move_to_end(name)
        self._request_group[slot] = -1
        idle = [group for group, entry in self._groups.items() if not entry.users]
        for group in idle[: max(0, len(idle) - IDLE_GROUPS)]:
            automaton = self._groups.pop(group).automaton
            if automaton >= 0:
                self._pool.close(automaton)
        self._counters.end_seconds += self._clock() - began

    def propose(self, slots: IntArray, generated: IntArray, room: IntArray, tokens: int, most: int) -> Drafts:
        began = self._clock()
        if self._openings.due:  # in a pause, too: they may end it
            self._catch_up()
            self._open_histories()
        dropped, drops = None, self._dropped.any
        if not self._pauses.ask(needed=drops):
            self._raw, self._rows = self._grown.raw[:0], self._grown.rows[:0]
            return no_drafts(slots.size)
        if drops:
            dropped = self._dropped.paths(slots, room, self.calibration.table, self.budget.floor)
            room = np.where(dropped[0].counts > 0, 0, room)
        said = self._said()
        counts, nodes = grow_at(
            self._frozen(),
            self._room_for(said),
            self._at,
            said,
            self._key,
            slots,
            generated,
            room,
            self.calibration.table,
            self._rules,
            self.budget.floor,
            self._grown,
        )
        grown = self._grown
        drafts = Drafts(
            counts,
            grown.token_ids[:nodes],
            grown.parents[:nodes],
            grown.depth[:nodes],
            grown.estimates[:nodes],
            grown.sources[:nodes].astype(np.int8),
        )
        raw, rows = grown.raw[:nodes], grown.rows[:nodes]
        if dropped is not None:
            paths, certain = dropped
            drafts, order = join(drafts, paths)
            raw = np.concatenate([raw, certain])[order]
            rows = np.concatenate([rows, np.full(certain.size, DROPPED)])[order]
            nodes += certain.size
        keep = self.budget.choose(drafts, Batch(slots, generated, tokens))
        kept = int(np.count_nonzero(keep))
        if kept > most:
            best = np.argsort(np.where(keep, -drafts.estimates, 1.0), kind="stable")[: max(most, 0)]
            keep = np.zeros(nodes, np.bool_)
            keep[best] = True
        self._raw, self._rows = raw[keep], rows[keep]
        drafts = drafts.select(keep) if kept else no_drafts(slots.size)
        self._pauses.found(kept)
        self._counters.proposed += nodes
        self._counters.propose_seconds += self._clock() - began
        return drafts

    def observe(self, slots: IntArray, drafts: Drafts, verified: Verified, token_ids: IntArray) -> None:
        began = self._clock()
        reached, accepted = verified.reached, verified.accepted
        nodes = drafts.token_ids.size
        # Where none of the step's requests could be proposed for, `propose` was not called and what it left is older.
        raw, rows = (self._raw, self._rows) if nodes else (self._raw[:0], self._rows[:0])
        self.calibration.learn(raw, rows, drafts.depth, reached, accepted)
        if nodes:
            self._counters.add(drafts, verified)
        self.budget.learn(drafts, verified, slots)
        if self._dropped.any:
            self._dropped.follow(slots, verified.emitted, token_ids)
        self._late.append(Said(slots, verified.emitted, token_ids))
        self._openings.said(slots, verified.emitted, token_ids)
        self._counters.observe_seconds += self._clock() - began

    # ---- the run's side -------------------------------------------------------------------------------

    def remember(self, rollouts: Iterable[Rollout]) -> None:
        """Finished responses become history; their automata are built in the background."""

        def place(rollout: Rollout) -> tuple[str, int]:
            return rollout.prompt.uid, rollout.visit

        uids = []
        for (uid, visit), members in groupby(sorted(rollouts, key=place), place):
            responses = [
                Response(
                    np.concatenate([[START], r.token_ids]).astype(np.int64),
                    np.concatenate([[0.0], r.logprobs]),
                    r.reward,
                    _behind_start(r.top),
                )
                for r in members
            ]
            self.index.add(uid, visit, responses)
            self._lengths.add(uid, visit, [response.token_ids.size - 1 for response in responses])
            uids.append(uid)
        self.index.prepare(uids)
        self._pauses.renew()
        if self._newest >= 0 and not self._users[self._newest]:
            self._pool.close(self._newest)
            self._newest = -1

    def settle(self) -> None:
        """Wait until all histories are built, with this thread's help: before an engine begins, which would wait."""
        self.index.wait_for_all()

    def state_dict(self) -> dict[str, Any]:
        """What was learned from verification; histories are rebuilt from the log by `remember`.

        What responses said that have ended, while others are still in flight, is in neither.
        """
        return {
            "calibration": self.calibration.state_dict(),
            "budget": self.budget.state_dict(),
            "pauses": self._pauses.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, budget: bool = True) -> None:
        """`budget`: the state is of a budget of the same kind, and that is loaded too.

        Of another version's calibration nothing is taken, which is said.
        """
        try:
            self.calibration.load_state_dict(state["calibration"])
        except StrettoError as error:
            logger.warning("what drafts are worth is learnt anew: %s", error)
        self._pauses.load_state_dict(state.get("pauses", {}))  # checkpoints of before do not have it
        if budget:
            self.budget.load_state_dict(state["budget"])

    def counts(self) -> Tally:
        """Under `spec/`, since the last call: what each source proposed and what of it was accepted, acceptance by
        depth of the nodes that were put to the test, seconds; and sizes now, of index and automata in flight.
        """
        found, self._counters = self._counters.counts(), Counters()
        index, live = self.index.counts(), Tally(self._pool.metrics())
        parts = index.named("spec/index/"), live.named("spec/live/")
        return total([found, *parts, self.budget.counts(), self.calibration.counts()])

    def metrics(self) -> dict[str, float]:
        """`counts`, as they are shown."""
        return self.counts().figures()

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

    def _join(self, slot: int, tokens: IntArray, dropped: IntArray) -> None:
        """A response that says `tokens` so far is in flight in `slot`, one that has said `dropped` before."""
        pool, newest = self._pool, self._newest
        if newest < 0 or pool.arrays.counts[pool.root(newest)] > self._generation:
            self._newest = pool.open()
            if newest >= 0 and not self._users[newest]:
                pool.close(newest)
            newest = self._newest
        self._users[newest] += 1
        self._at.group[slot] = newest
        text = np.concatenate([[START], dropped]).astype(np.int64)
        root = np.array([pool.root(newest)])
        if dropped.size and find_text(pool.arrays, newest, text) < 0:
            pool.extend(np.array([newest]), root.copy(), np.array([text.size]), text)
        found = find_text(pool.arrays, newest, tokens) if tokens.size > 1 else -1
        if found < 0:  # not resumed, or where what it said before is not known
            pool.extend(np.array([newest]), root, np.array([tokens.size]), tokens)
            found = int(root[0])
        self._at.last[slot] = found

    def _leave(self, slot: int) -> None:
        """The response in `slot` is no longer in flight; what it said is forgotten with its generation."""
        handle = int(self._at.group[slot])
        self._at.group[slot] = -1
        self._users[handle] -= 1
        if not self._users[handle]:
            del self._users[handle]
            if handle != self._newest:
                self._pool.close(handle)

    def _open_histories(self) -> None:
        """Of requests that began, as far as one step should wait for it."""
        began = self._clock()
        opened = self._openings.open()
        self._counters.waited(self._clock() - began)
        at = self._at
        if opened:
            slots = np.array([slot for slot, _ in opened])
            texts = [text for _, text in opened]
            at.state_base[slots], at.edge_base[slots] = self.index.bases(self._openings.handles[slots])
            at.state[slots] = at.length[slots] = 0
            counts = np.array([text.size for text in texts])
            follow_history(self._frozen(), at, Said(slots, counts, np.concatenate(texts)))

    def _frozen(self) -> Frozen:
        """The arena of histories in use; where it is a new one, everything in it has moved."""
        arrays = self.index.arrays()
        if arrays is not self._arena:
            self._arena = arrays
            self._at.state_base[:], self._at.edge_base[:] = self.index.bases(self._openings.handles)
        return arrays

    def _catch_up(self) -> None:
        """Follow what was said since the sources were last asked: before it changes who is in flight, and where."""
        if self._late:
            said = self._said()
            follow(self._frozen(), self._room_for(said), self._at, said)

    def _said(self) -> Said:
        """What was said since the last call, to be followed now: all at once, for a call costs more than its tokens."""
        late, self._late = self._late, []
        if len(late) == 1:
            return late[0]
        return Said(*map(np.concatenate, zip(*late, strict=True))) if late else self._nothing

    def _room_for(self, said: Said) -> Pool:
        """The responses in flight, with room for new tokens."""
        return self._pool.reserve(said.tokens.size if "siblings" in self._sources else 0)


def _behind_start(top: Alternatives | None) -> Alternatives | None:
    """The alternatives at a response's places, START in front."""
    if top is None:
        return None
    start = Alternatives.none(1, top.width)
    return Alternatives(
        np.concatenate([start.token_ids, top.token_ids]), np.concatenate([start.logprobs, top.logprobs])
    )
