"""A recorded run's costs, as a scenario that replays it: the step model fitted to its metrics and log.

Of each update the metrics hold the engine's steps, prefilled tokens and seconds; the log holds the responses, hence the
tokens decoded and the K/V entries read (a response of n tokens after a prompt of p reads the sum of p + i over its n
tokens). Seconds are regressed on these four by least squares with coefficients of at least 0; errors count relative to
the seconds, since a machine that is slow for a while is so by a factor. Sums over updates tell a step's price from its
tokens' badly: long updates have more of both. So each update gives a second equation, of its slots' busy seconds, in
which a step counts as often as it has requests in it (`engine/busy_*`; each request is taken to have the update's mean
tokens and K/V entries). How fast the machine was is in both, so their difference is without it and
counts `DRIFTLESS` times as much as their mean. Likewise the update's seconds on its tokens. What a run writes at its
boundaries counts with the update. How long a reward takes is what the last one of an update was waited for (the
timeline has it); the rest of the time between engine steps counts with them.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from stretto import metrics_file
from stretto.config import Config, ScheduleConfig, load_config
from stretto.errors import StrettoError
from stretto.history.log import read_rollouts
from stretto.records import FloatArray, Rollout

FEWEST = 5  # updates that a fit needs
DRIFTLESS = 4.0  # a machine's speed drifts by a tenth, what the difference of its equations leaves out by a few percent


def non_negative(columns: FloatArray, wanted: FloatArray) -> FloatArray:
    """argmin |columns x - wanted| over x >= 0, exactly: the best of all subsets of columns. (n, k), (n,) -> (k,)."""
    k = columns.shape[1]
    best, least = np.zeros(k), float(wanted @ wanted)
    for size in range(1, k + 1):
        for chosen in combinations(range(k), size):
            some = columns[:, chosen]
            found = np.linalg.lstsq(some, wanted, rcond=None)[0]
            error = float(((some @ found - wanted) ** 2).sum())
            if (found >= 0).all() and error < least * (1.0 - 1e-12):
                best, least = np.zeros(k), error
                best[list(chosen)] = found
    return best


def calibration(run: Path) -> dict[str, Any]:
    """Costs, drafts and latencies of a run, how well the fits explain it, and the share of the generating time that
    passed between engine steps.

    Raises StrettoError if the folder is no run, or has fewer than `FEWEST` updates.
    """
    updates = [line for line in metrics_file.read(run / "metrics.jsonl") if line["step"] > 0]
    if len(updates) < FEWEST:
        raise StrettoError(f"{run}: {len(updates)} updates; a calibration needs at least {FEWEST}")
    if "engine/steps" not in updates[0]:
        raise StrettoError(f"{run}: its metrics are without engine/steps: it was made by an older version")
    rows: list[list[float]] = []
    tokens_trained: list[float] = []
    visits: dict[int, list[tuple[float, float]]] = {}
    for line in updates:
        rollouts = read_rollouts(run / "rollouts" / f"step-{int(line['step']):06d}.parquet")
        tokens, read = _work(rollouts)
        rejected = line["spec/drafted"] - line["spec/accepted"]
        rows.append([line["engine/steps"], tokens + rejected, read, line["engine/prefill_tokens"]])
        tokens_trained.append(float(sum(r.prompt.token_ids.size + r.token_ids.size for r in rollouts)))
        length = line["spec/mean_acceptance_length"] or 1.0
        visit = int(np.median([r.visit for r in rollouts]))
        visits.setdefault(visit, []).append((length, line["spec/drafted"] * length / max(1.0, tokens)))
    columns = np.array(rows, np.float64)
    reward = _reward_seconds(run / "timeline.json")
    between = np.array([max(0.0, line["time/reward"] - reward) for line in updates])
    rollout = np.array([line["time/rollout"] for line in updates])
    working = np.array([line.get("engine/worker_seconds", line["time/rollout"]) for line in updates])
    seconds = working * np.divide(rollout + between, rollout, out=np.ones_like(rollout), where=rollout > 0)
    step = _step_cost(updates, columns, seconds)
    training = np.array([line["time/update"] + line["time/boundary"] for line in updates])
    base, per_token = non_negative(
        np.stack([np.ones(len(updates)), np.array(tokens_trained)], axis=1), training
    ).tolist()
    speeds = [float(np.mean([speed for speed, _ in visits[visit]])) for visit in sorted(visits)]
    return {
        "cost": {
            **dict(zip(("base", "per_token", "per_context", "per_prefill"), step.tolist(), strict=True)),
            "train_base": base,
            "train_per_token": per_token,
            "sync": float(np.mean([line["time/sync"] for line in updates])),
            "reward": reward,
        },
        "drafts": {
            "tokens_per_step": [max(1.0, speed) for speed in speeds],
            "nodes": float(np.mean([nodes for entries in visits.values() for _, nodes in entries])),
        },
        "updates": len(updates),
        "between_steps": float(between.sum() / (rollout + between).sum()),
        "relative_error": {
            "rollout": _relative(columns @ step, seconds),
            "update": _relative(base + per_token * np.array(tokens_trained), training),
        },
    }


def _step_cost(updates: list[dict[str, Any]], columns: FloatArray, seconds: FloatArray) -> FloatArray:
    """What a step, a token, a K/V entry and a prefilled token cost, (4,), from an update's `columns` (U, 4) of these
    and its engines' `seconds` (U,), with what passed between their steps.
    """
    known = seconds > 0.0
    if "engine/busy_squares" not in updates[0]:
        return non_negative(columns[known] / seconds[known, None], np.ones(int(known.sum())))
    known &= np.array([line["engine/decode_steps"] > 0 for line in updates])
    columns, seconds = columns[known], seconds[known]
    decoding, squares, prefill, busy, worked = (
        np.array([line[f"engine/{name}"] for line in updates], np.float64)[known]
        for name in (
            "decode_steps",
            "busy_squares",
            "busy_prefill_tokens",
            "busy_slot_seconds",
            "worker_seconds",
        )
    )
    weighted = columns * (squares / decoding)[:, None]
    weighted[:, 0], weighted[:, 3] = decoding, prefill
    by_step, by_slot = columns / seconds[:, None], weighted / (busy * seconds / worked)[:, None]
    both = np.concatenate([0.5 * (by_step + by_slot), DRIFTLESS * (by_step - by_slot)])
    return non_negative(both, np.repeat([1.0, 0.0], len(seconds)))


def _reward_seconds(timeline: Path) -> float:
    """Median seconds from an update's last response to its reward; 0 where no timeline tells."""
    lines = timeline.read_text("utf-8").splitlines() if timeline.exists() else []
    spans = [json.loads(line.rstrip(" ,")) for line in lines if '"waiting for rewards ' in line]
    return 1e-6 * float(np.median([span["dur"] for span in spans])) if spans else 0.0


def _work(rollouts: list[Rollout]) -> tuple[float, float]:
    """Tokens decoded and K/V entries read."""
    lengths = np.array([r.token_ids.size for r in rollouts], np.float64)
    prompts = np.array([r.prompt.token_ids.size for r in rollouts], np.float64)
    return float(lengths.sum()), float((lengths * prompts + 0.5 * lengths * (lengths + 1.0)).sum())


def _relative(predicted: FloatArray, seen: FloatArray) -> float:
    """Mean absolute error over the mean."""
    return float(np.abs(predicted - seen).mean() / seen.mean())


def scenario_of(run: Path, measured: dict[str, Any]) -> str:
    """A scenario (TOML) that replays the run's prompts and lengths at the costs measured."""
    config = load_config(run / "config.toml", saved=True)
    error = measured["relative_error"]
    tree = {
        "run": {"steps": measured["updates"], "warmup": 0, "seed": config.seed},
        "cluster": {"workers": _workers(config), "slots": config.engine.max_num_seqs, "trainer": "colocated"},
        "cost": {name: float(f"{value:.6g}") for name, value in measured["cost"].items()},
        "workload": {"run": str(run.resolve()), "max_new_tokens": config.sampling.max_new_tokens},
        "drafts": measured["drafts"],
    }
    schedule = {
        "name": config.schedule.kind,
        "drafts": config.draft.budget != "none",
        **_changed(config.schedule),
    }
    said = (
        f"# Costs of {run.name}, fitted to {measured['updates']} updates; mean errors: rollout {error['rollout']:.1%}, "
        f"update {error['update']:.1%}.\n"
    )
    return f"{said}{tomli_w.dumps(tree)}\n[[schedule]]\n{tomli_w.dumps(schedule)}"


def _workers(config: Config) -> int:
    return config.fleet.workers if config.fleet.kind != "in_process" else 1


def _changed(config: ScheduleConfig) -> dict[str, Any]:
    """The keys that are not as by default, and those that say how large an update is."""
    changed = config.model_dump(exclude_defaults=True)
    named = {"kind": config.kind, "prompts": config.prompts, "samples": config.samples, **changed}
    return {key: "none" if value is None else value for key, value in named.items()}
