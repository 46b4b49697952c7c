"""Which worker runs what, with which weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stretto.records import Event, Start, Updated, WorkerUp
from stretto.view import LedgerView


def spread_groups(view: LedgerView, ids: Iterable[int]) -> list[Start]:
    """Start requests group by group, each group on the worker with the least work per slot (ties: lower
    number).

    Siblings stay together because their worker then computes their prompt once.
    """
    load = {worker: view.num_running(worker) for worker in view.slots}
    by_group: dict[int, list[int]] = {}
    for request_id in ids:
        by_group.setdefault(view.group_of(request_id), []).append(request_id)
    starts: dict[int, list[int]] = {}
    for members in by_group.values():
        worker = min(load, key=lambda w: (load[w] / view.slots[w], w))
        load[worker] += len(members)
        starts.setdefault(worker, []).extend(members)
    return [Start(members, worker) for worker, members in starts.items()]


def publish_cause(events: Sequence[Event]) -> bool:
    """Whether weights should be published now: once per update, and once when a worker has come up."""
    return any(isinstance(event, (Updated, WorkerUp)) for event in events)
