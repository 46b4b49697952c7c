"""What came of a simulated run. Numerators and denominators are summed, ratios never averaged (docs/simulate.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.simulate.world import SimulatedWorld, Update


def figures(
    world: SimulatedWorld, *, warmup: int, gpus_per_worker: int, trainer_gpus: int, gpus: int
) -> dict[str, Any]:
    """The run's figures from the harvest of update `warmup` (0: from its beginning) to the last harvest.

    Slots are available unless their device trains or their worker is absent; devices are busy in generation, training
    and sync. Discarded tokens were generated and given up, without those that came back from their draft; re-verified
    ones were computed again in one pass.
    """
    updates = world.updates[warmup:]
    began = world.updates[warmup - 1].harvested if warmup else 0.0
    seconds = updates[-1].harvested - began
    trained = _trained(world, began, updates[-1].harvested)

    def total(name: str) -> float:
        return sum(update.counters.get(name, 0.0) for update in updates)

    busy = gpus_per_worker * (total("step_seconds") + total("sync_seconds")) + trainer_gpus * trained
    responses, tokens = sum(u.responses for u in updates), sum(u.tokens for u in updates)
    return {
        "steps": len(updates),
        "seconds": seconds,
        "step_seconds": seconds / len(updates),
        "responses": responses,
        "tokens": tokens,
        "useful_tokens_per_s": tokens / seconds,
        "generated_tokens_per_s": total("decode_tokens") / seconds,
        "discarded_tokens_per_s": (total("ledger/discarded_tokens") - total("reverified_kept")) / seconds,
        "reverified_tokens_per_s": total("reverified_tokens") / seconds,
        "slot_idle": _idle(total("busy_slot_seconds"), total("available_slot_seconds")),
        "device_idle": _idle(busy, gpus * seconds),
        "staleness_mean": sum(u.staleness_sum for u in updates) / max(1, responses),
        "staleness_max": max(u.staleness_max for u in updates),
        "refreshes": total("ledger/refreshes"),
        "preemptions": total("preemptions"),
        "engine_steps": total("steps"),
        "updates": [_update(update, before) for update, before in _pairs(world.updates)],
    }


def _trained(world: SimulatedWorld, began: float, ended: float) -> float:
    return sum(max(0.0, min(until, ended) - max(since, began)) for since, until in world.trainings)


def _idle(busy: float, available: float) -> float:
    return 1.0 - busy / available if available > 0 else 0.0


def _pairs(updates: Sequence[Update]) -> list[tuple[Update, float]]:
    return list(zip(updates, [0.0, *(u.harvested for u in updates)], strict=False))


def _update(update: Update, before: float) -> dict[str, float]:
    counters = update.counters
    return {
        "harvested": update.harvested,
        "seconds": update.harvested - before,
        "trained": update.trained,
        "responses": update.responses,
        "tokens": update.tokens,
        "discarded_tokens": counters.get("ledger/discarded_tokens", 0.0),
        "slot_idle": _idle(counters["busy_slot_seconds"], counters["available_slot_seconds"]),
        "staleness_mean": update.staleness_sum / max(1, update.responses),
        "staleness_max": update.staleness_max,
        "engine_steps": counters["steps"],
    }
