"""One engine per process, wherever the processes are: the fleet of more than one worker."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.errors import StrettoError
from stretto.fleet.channel import Hosts, Message, ProcessLost
from stretto.fleet.figures import Totals
from stretto.fleet.member import Member
from stretto.fleet.messages import (
    Build,
    Command,
    DrafterState,
    Failed,
    Figures,
    Load,
    Past,
    Ready,
    Reply,
    Report,
    Restore,
    Setup,
    Stepped,
    Stop,
    Submit,
)
from stretto.fleet.pasts import Pasts, messages
from stretto.records import Event, Loaded, Request, Rollout, Running, WorkerDown, WorkerUp
from stretto.tally import Tally
from stretto.weights import WeightsRef

logger = logging.getLogger(__name__)

POLL = 0.5  # seconds between looks whether a silent worker is stuck


class WorkerFleet:
    """`workers` processes that `hosts` starts, each with an engine that `build(number)` makes there; they load at once,
    in parallel. One that has to wait until its cluster has room keeps nobody waiting, and joins when it is up.

    Commands become messages, which a worker takes between two of its steps; a `submit` is one message, so what it
    starts begins in one step. A thread for each process posts what it says to the inbox.

    A process that dies (its channel ends) is `WorkerDown`: what it had reported is kept, what ran there goes on
    elsewhere. Another one is started in its place, up to `restarts` times; then the fleet goes on without it. So it is
    with one that is stuck: that owes something and has said nothing for `patience` seconds; it is killed. An exception
    in a worker would come again in its successor: `expecting` raises it.

    For drafters of workers to come, the responses of the newest `window` visits of each prompt are kept, in at most
    `history_bytes`.
    """

    def __init__(
        self,
        build: Build,
        post: Callable[[Event], None],
        hosts: Hosts,
        *,
        workers: int,
        restarts: int = 3,
        patience: float = 600.0,
        window: int = 1,
        history_bytes: int = 1 << 30,
    ) -> None:
        self._build, self._post, self._hosts = build, post, hosts
        self._restarts, self._patience = restarts, patience
        self._files = hosts.weights
        self._changed = threading.Condition()  # guards all that follows
        self._workers: dict[int, Member] = {}  # by number, those that live
        self._next = 0
        self._places = set(range(workers))  # those that have not been given up
        self._started = self._closing = False
        self._failure: StrettoError | None = None
        self._totals = Totals()
        self._states: dict[int, Restore] = {}  # place -> what its drafter was last known to have learned
        self._pasts = Pasts(window, history_bytes)
        self._last_words = ""
        self._threads: list[threading.Thread] = []
        try:
            for place in range(workers):  # numbered as their places
                self._listen_to(self._spawn(place))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise StrettoError(
                    f"fleet.workers = {workers}: a process cannot be started: {error}"
                ) from error
            raise

    # ---- commands -------------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        """Until every worker is ready, given up, or waiting for room while others are ready.

        Raises StrettoError if one has failed, or none is left.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._settled())
        self.expecting()

    def start(self) -> None:
        """When all are ready, report them in order: a schedule then meets all at once, whoever was first.

        Raises StrettoError if one has failed, or none is left.
        """
        self.wait_until_ready()
        with self._changed:
            self._started = True
            for worker in self._workers.values():
                self._announce(worker)

    def submit(self, worker: int, requests: Sequence[Request]) -> None:
        self._command(Submit(list(requests)), [worker])

    def stop(self, worker: int, ids: Sequence[int], attempts: Sequence[int]) -> None:
        self._command(Stop(list(ids), list(attempts)), [worker])

    def load(self, ref: WeightsRef, workers: Sequence[int], running: Running) -> None:
        written = self._files.write(ref)
        with self._changed:
            alive = [worker for worker in workers if worker in self._workers]
            self._files.publish(written, alive)
        self._command(Load(written, running), alive)

    def expecting(self) -> bool:
        """Whether a worker owes an event.

        Raises StrettoError if what is owed will never come: a worker has failed, or none is left.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if not self._places:
                raise StrettoError(
                    f"no worker is left, after fleet.restarts = {self._restarts} restarts of each; "
                    f"the last one {self._last_words}"
                )
            workers = self._workers.values()
            replacing = len(workers) < len(self._places)
            return replacing or any(w.owes for w in workers) or not any(w.up for w in workers)

    def metrics(self) -> dict[str, float]:
        """Engine counters since the last call, summed over workers; but `step_seconds` are those of the place that
        computed longest, since they work side by side, and `worker_seconds` those of all. Waits until each worker
        has ended its step.
        """
        self.report(Report(state=False))
        with self._changed:
            return self._totals.take_engine()

    def close(self) -> None:
        """Kill the processes and remove the weights."""
        with self._changed:
            self._closing = True
            workers = list(self._workers.values())
        for worker in workers:
            worker.process.kill()
        for thread in self._threads:
            thread.join()
        self._hosts.close()

    # ---- drafting; see FleetDrafter ---------------------------------------------------------------------

    def report(self, what: Report) -> None:
        """Have every worker that is up report, and wait for it."""
        with self._changed:
            asked = [worker for worker in self._workers.values() if worker.up]
            for worker in asked:
                worker.asked += 1
        self._command(what, [worker.number for worker in asked])
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or all(w.lost or w.reported == w.asked for w in asked)
            )

    def remember(self, rollouts: Sequence[Rollout]) -> None:
        """Send finished responses to all workers, and keep them for those to come: it is not known who will answer
        their prompts at the next visit.
        """
        pasts = [Past.of(rollout) for rollout in rollouts]
        packed = list(messages(pasts))
        with self._changed:
            self._pasts.add(pasts)
            know = [worker for worker in self._workers.values() if worker.up]
            for worker in self._workers.values():
                if worker.missed is not None:
                    worker.missed += packed
        for worker in know:
            self._send(worker, packed)

    def drafter_states(self) -> list[Mapping[str, Any]]:
        """Of the drafter of each place, as it is now."""
        self.report(Report(state=True))
        with self._changed:
            return [known.state for _, known in sorted(self._states.items())]

    def restore_drafters(self, states: Sequence[Mapping[str, Any]], budget: bool) -> None:
        """Have the drafter of place i go on from the i-th state, or from the first where there are not so many."""
        with self._changed:
            workers = list(self._workers.values())
            for place in self._places:
                self._states[place] = Restore(states[place if place < len(states) else 0], budget)
        for worker in workers:
            self._command(self._states[worker.place], [worker.number])

    def take_drafter_counts(self) -> Tally:
        """Those that came with the last reports."""
        with self._changed:
            return self._totals.take_drafter()

    # ---- talking ----------------------------------------------------------------------------------------

    def _command(self, command: Command, workers: Sequence[int]) -> None:
        """To those of `workers` that live: the ledger will hear, or has heard, of the others' end."""
        message = self._hosts.pack(command)
        with self._changed:
            living = [self._workers[number] for number in workers if number in self._workers]
        for worker in living:
            self._send(worker, [message])

    def _send(self, worker: Member, packed: Sequence[Message]) -> None:
        """Not with the lock held, unless it is little: who takes its time must not keep others' events waiting."""
        with self._changed:
            worker.sent += len(packed)
        for message in packed:
            worker.process.send(message)

    def _spawn(self, place: int) -> Member | None:
        """A process for `place`, told what its predecessor had learned; None: the fleet is closing. Raises OSError."""
        with self._changed:
            if self._closing:
                return None
            number, self._next = self._next, self._next + 1

            def show(line: str) -> None:
                logger.info("worker %d: %s", number, line)

            worker = self._workers[number] = Member(number, place, self._hosts.start(place, show))
            setup = pickle.dumps(Setup(self._build, number), pickle.HIGHEST_PROTOCOL)
            worker.process.send(setup)  # before anybody else finds it, and little
            if place in self._states:
                self._send(worker, [self._hosts.pack(self._states[place])])
            return worker

    def _bring_up(self, worker: Member) -> None:
        """Tell a worker that is ready of all responses that the others know of, those that come in meanwhile too."""
        with self._changed:
            pasts, worker.missed = self._pasts.all(), []
        for message in messages(pasts):
            self._send(worker, [message])
        while not worker.up:
            with self._changed:
                missed, worker.missed = worker.missed or [], []
                if not missed:
                    worker.up, worker.missed = True, None
                    self._announce(worker)
                    self._changed.notify_all()
            self._send(worker, missed)

    def _announce(self, worker: Member) -> None:
        if self._started and worker.ready is not None and worker.up and not worker.announced:
            worker.announced = True
            self._post(WorkerUp(worker.number, worker.ready.slots, worker.ready.version, worker.place))

    def _settled(self) -> bool:
        """Whether every place has a worker that is up, or that waits while others are up, or has been given up."""
        workers = self._workers.values()
        settled = {worker.place for worker in workers if worker.up or worker.waiting} == self._places
        return settled and (not self._places or any(worker.up for worker in workers))

    # ---- a thread for each place ------------------------------------------------------------------------

    def _listen_to(self, worker: Member | None) -> None:
        thread = threading.Thread(target=self._serve, args=(worker,), name="fleet", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, worker: Member | None) -> None:
        try:
            self._serve_place(worker)
        except Exception as error:  # noqa: BLE001 -- whatever it is, without this thread nobody would say it
            said = f"a worker cannot be reached, or started again: {error!r}"
            with self._changed:
                self._failure = error if isinstance(error, StrettoError) else StrettoError(said)
                self._changed.notify_all()

    def _serve_place(self, worker: Member | None) -> None:
        """Listen to a worker, and to those that come in its place, until the last of them is gone."""
        restarts = 0
        while worker is not None:
            end = self._listen(worker)
            with self._changed:
                again = restarts < self._restarts and self._failure is None and not self._closing
                self._lose(worker, end, restarts if again else None)
            worker.process.close()
            restarts += 1
            worker = self._spawn(worker.place) if again else None

    def _lose(self, worker: Member, end: str, restarts: int | None) -> None:
        """Enter that it is gone; `restarts` says how often one was started in its place, None that none will be."""
        del self._workers[worker.number]
        worker.lost = True
        self._files.taken(worker.number)
        if restarts is None:
            self._places.discard(worker.place)
            self._hosts.leave(worker.place)
        if not self._closing:
            self._last_words = end
            if self._failure is None:
                then = (
                    "it is not replaced: the run goes on without it"
                    if restarts is None
                    else f"another one is started in its place (restart {restarts + 1} of {self._restarts})"
                )
                logger.warning(
                    "worker %d (%s) %s; what it ran goes on elsewhere from the tokens received; %s",
                    worker.number,
                    worker.process.name,
                    end,
                    then,
                )
            if worker.announced:
                self._post(WorkerDown(worker.number))
        self._changed.notify_all()

    def _listen(self, worker: Member) -> str:
        """Take in what it says until it ends, or is stuck and killed; returns how it ended."""
        silent = 0.0  # seconds, as they were waited here: this process may have been held itself
        while True:
            try:
                payload = worker.process.receive(POLL)
            except ProcessLost as lost:
                return str(lost)
            if payload is None:
                self._look(worker)
                with self._changed:
                    silent = silent + POLL if worker.owes else 0.0
                    if self._closing:
                        return "was killed"
                if silent > self._patience:
                    worker.process.kill()
                    return f"was killed, having said nothing for fleet.patience = {self._patience:g} seconds"
                continue
            silent = 0.0
            reply: Reply = pickle.loads(payload)  # noqa: S301 -- from our own child
            with self._changed:
                self._take(worker, reply)
                self._changed.notify_all()
            if isinstance(reply, Ready):
                self._bring_up(worker)

    def _look(self, worker: Member) -> None:
        """Whether a worker that says nothing has its place yet. That nobody has one is an error after a while."""
        waits = "" if worker.up else worker.process.waits()
        with self._changed:
            if waits and not worker.waiting:
                logger.warning("worker %d waits for %s; it joins when it has it", worker.number, waits)
            worker.waited = worker.waited + POLL if waits else 0.0
            worker.waiting = bool(waits)
            idle = not any(each.up or each.owes for each in self._workers.values())
            if worker.waited > self._patience and idle and self._failure is None:
                self._failure = StrettoError(
                    f"no worker is up, and none has got its place within fleet.patience = {self._patience:g} seconds: "
                    f"each waits for {waits}"
                )
            self._changed.notify_all()

    def _take(self, worker: Member, reply: Reply) -> None:
        match reply:
            case Ready():
                worker.ready = reply
            case Stepped():
                for event in reply.events:
                    if isinstance(event, Loaded):
                        self._files.taken(worker.number, event.version)
                    # Posted first: the runtime takes "nothing expected and an empty inbox" for a stand-still.
                    self._post(event)
                worker.handled, worker.busy = reply.handled, reply.busy
            case Figures():
                worker.reported += 1
                self._totals.add(worker.place, reply)
            case DrafterState():
                worker.reported += 1
                if reply.state:
                    self._states[worker.place] = Restore(reply.state, budget=True)
            case Failed() if self._failure is None:
                self._failure = StrettoError(f"worker {worker.number} failed: {reply.message}")
