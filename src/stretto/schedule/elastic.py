"""`elastic` (RLBoost, 2510.19225): workers come and go, and the trainer's own devices help for a while.

A worker that comes up pulls the newest weights and begins, without a barrier. What ran on a worker that is lost goes on
elsewhere from the tokens received. The first `local_workers` are the trainer's own devices: they generate in a window
at the beginning of a step only, are then stopped with their tokens kept, and train on the groups that are ready, part
by part, while the others (remote) generate the rest. Without a remote worker there is no window.
The window adapts so that neither side waits for the other (the authors' code, not their paper): after each step it
shrinks by a third of the difference if the trainer waited less than the remote workers, else it grows by it; at least
`window_floor` seconds. The best window is remembered by the number of remote workers: where throughput falls the window
moves a fifth of the way there, where their number has changed four fifths.

Harvest unit: `prompts` whole groups (or as many as have `tokens_per_update`), of which the learner gets some before, as
parts: it adds up gradients and steps once. The update waits for the longest response of its groups. With
`max_staleness` 0 it is on-policy: nothing is begun before the step; otherwise workers begin on the next batches.
What is dropped: what the ledger's gate refreshes or drops; under `drop_zero_variance` groups whose rewards are all
equal, which are replaced. Offers the same tokens at `max_staleness` 0, else the same distribution; windows read the
clock. Favours no response at 0, short ones in early updates else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.config import ScheduleConfig
from stretto.gate import Gate
from stretto.records import (
    Admit,
    Decision,
    Discard,
    Event,
    Finished,
    Harvest,
    Publish,
    State,
    Stop,
    Updated,
    Wake,
)
from stretto.schedule.batches import ZeroVariance, members_of, oldest_groups
from stretto.schedule.placement import FreeSlots, behind, fill, publish_cause
from stretto.view import LedgerView

PARTS = 8  # in which the learner gets an update, about


class Elastic:
    """Knobs: `prompts`, `samples`, `local_workers`, `window_floor`, `max_staleness`, `off_policy_strategy`,
    `refresh_budget`, `running`, `drop_zero_variance`, `tokens_per_update`.
    """

    overlaps = True

    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config
        self.zero_variance = ZeroVariance(config)
        self.free = FreeSlots()
        self.window = Window(config.window_floor)
        self.ahead = 1 if config.max_staleness is None else config.max_staleness  # batches
        self._taken = [0, 0]  # groups and tokens of the update at hand that the learner has
        self._gate = Gate()  # for whom it made the update wait

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        self.free.watch(events)
        if not view.slots:
            return []
        decisions: list[Decision] = []
        if publish_cause(events):
            old = behind(view)
            decisions += [Publish(old, self.config.running)] if old else []
        decisions += self._windows(view, events)
        useless = self.zero_variance.useless(view, events)
        if useless:
            decisions.append(Discard(members_of(view, useless), "zero_variance"))
        gone = len(useless)
        before = self._taken[0]
        harvest = self._harvest(view, useless)
        if harvest is not None:
            decisions.append(harvest)
            if harvest.final:
                return [*self._stop_local(view), *decisions]
            gone += self._taken[0] - before
        if not (view.updating and self.ahead == 0):
            room = self.free.room(view, newest=True)
            if not self._local_open(view):
                room = {worker: slots for worker, slots in room.items() if not self._is_local(view, worker)}
            decisions += fill(view, view.waiting, room)
        return decisions + self._admit(view, gone)

    # ---- windows --------------------------------------------------------------------------------------------

    def _is_local(self, view: LedgerView, worker: int) -> bool:
        return view.places[worker] < self.config.local_workers

    def _remote(self, view: LedgerView) -> int:
        return sum(not self._is_local(view, worker) for worker in view.slots)

    def _local_open(self, view: LedgerView) -> bool:
        """Whether the trainer's devices generate now."""
        return not view.updating and (view.now < self.window.closes or not self._remote(view))

    def _windows(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        """Open and close the window."""
        updated = next((event for event in events if isinstance(event, Updated)), None)
        for event in events:
            if isinstance(event, Finished):
                self.window.generated = view.now
        if updated is not None:
            self.window.adapt(view.now, self._remote(view), updated.metrics.get("time/trainer"))
        if updated is not None or not self.window.opened:
            return [Wake(self.window.open(view.now))] if self.config.local_workers else []
        return [] if self._local_open(view) else self._stop_local(view)

    def _stop_local(self, view: LedgerView) -> list[Decision]:
        local = [worker for worker in view.slots if self._is_local(view, worker)]
        running = [i for worker in local for i in view.running(worker)]
        return [Stop(running, keep=True)] if running else []

    # ---- batches --------------------------------------------------------------------------------------------

    def _harvest(self, view: LedgerView, useless: Sequence[int]) -> Harvest | None:
        """The groups that are ready, when they end the update, or are enough for a part and the trainer is free."""
        if view.updating or not view.ready_groups or self._waits(view):
            return None
        wanted, (groups, tokens) = self.config.tokens_per_update, self._taken
        chosen: list[int] = []
        final = False
        for group in oldest_groups(view):
            if group in useless:
                continue
            chosen.append(group)
            groups += 1
            tokens += int(view.lengths_of(view.members(group)).sum())
            final = groups >= self.config.prompts if wanted is None else tokens >= wanted
            if final:
                break
        ids = members_of(view, chosen)
        if final:
            self._gate = view.gate(ids)
            if self._gate.blocked:
                return None
            self._taken = [0, 0]
            self.window.harvested(view.now, tokens)
            return Harvest(ids)
        if self._local_open(view) or len(chosen) < max(1, self.config.prompts // PARTS):
            return None
        self._taken = [groups, tokens]
        return Harvest(ids, final=False)

    def _waits(self, view: LedgerView) -> bool:
        """Whether the gate makes the update wait for somebody."""
        self._gate.blocked = [i for i in self._gate.blocked if view.state(i) < State.SCORED]
        return bool(self._gate.blocked)

    def _admit(self, view: LedgerView, gone: int) -> list[Decision]:
        """Up to `ahead` batches besides the one at hand; where only tokens are missing, another one. `gone` groups that
        are ready count no more.
        """
        config, alive = self.config, len(view.alive_groups) - gone
        missing = (self.ahead + 1 - view.updating) * config.prompts - alive - self._taken[0]
        if missing <= 0 and alive == len(view.ready_groups) - gone and not view.updating:
            missing = config.prompts if config.tokens_per_update is not None and not self._waits(view) else 0
        return [Admit(missing, config.samples)] if missing > 0 else []

    # ---- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.window.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        window = self.window
        return {
            "schedule/window_seconds": window.seconds,
            "schedule/trainer_bubble": window.trainer_bubble,
            "schedule/remote_bubble": window.remote_bubble,
        }


class Window:
    """How long the trainer's own devices generate in a step, in seconds."""

    def __init__(self, floor: float) -> None:
        self.floor = self.seconds = floor
        self.opened = False
        self.closes = 0.0
        self.generated = 0.0  # when the last response has ended
        self.trainer_bubble = self.remote_bubble = 0.0  # of the last step
        self._began = 0.0
        self._harvested = (0.0, 0)  # when, how many tokens
        self._remote = 0
        self._best: dict[int, tuple[float, float]] = {}  # by remote workers: tokens per second, window

    def open(self, now: float) -> float:
        """A step begins; returns when the window closes."""
        self.opened, self._began = True, now
        self.closes = now + self.seconds
        return self.closes

    def harvested(self, now: float, tokens: int) -> None:
        """The update has what it needs."""
        self._harvested = (now, tokens)

    def adapt(self, now: float, remote: int, trained: float | None) -> None:
        """A step has ended, in which the trainer worked for `trained` seconds (None: since the final harvest)."""
        step = now - self._began
        harvested, tokens = self._harvested
        if not self.opened or step <= 0 or harvested < self._began:
            return
        busy = now - harvested if trained is None else trained
        self.trainer_bubble = max(0.0, step - self.seconds - busy)
        self.remote_bubble = max(0.0, now - max(self.generated, self._began))
        used, throughput = self.seconds, tokens / step
        self.seconds = max(self.floor, used + (self.trainer_bubble - self.remote_bubble) / 3)
        rate, best = self._best.get(remote, (0.0, self.seconds))
        if remote != self._remote:
            self.seconds = 0.2 * self.seconds + 0.8 * best
        elif throughput < rate:
            self.seconds = 0.8 * self.seconds + 0.2 * best
        if throughput > rate:
            self._best[remote] = (throughput, used)
        self._remote = remote

    def state_dict(self) -> dict[str, Any]:
        best = [[remote, *values] for remote, values in self._best.items()]
        return {"seconds": self.seconds, "remote": self._remote, "best": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seconds, self._remote = state["seconds"], state["remote"]
        self._best = {remote: (rate, window) for remote, rate, window in state["best"]}
