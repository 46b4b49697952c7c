"""From a scenario to the worlds that it describes."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np

from stretto.engine.responses import Span
from stretto.engine.simulated import StepCost
from stretto.errors import StrettoError
from stretto.simulate.cost import Costs, preset
from stretto.simulate.scenario import Candidate, ClusterSection, CostSection, Scenario
from stretto.simulate.workload import Drawn, Quantiles, Recorded, Workload, read_trace
from stretto.simulate.world import Cluster, Drafting, SimulatedWorld

NUMBERS = ("base", "per_token", "per_context", "per_prefill", "train_base", "train_per_token", "sync")
SHIPPED = "reasoning"
MOST_FAILURES = 1_000_000
HORIZON = 30 * 24 * 3600.0  # seconds for which random failures are drawn


def costs_of(section: CostSection, cluster: ClusterSection) -> Costs:
    """The preset's costs with the given numbers in their places.

    Raises StrettoError where neither says what something costs.
    """
    given = {name: getattr(section, name) for name in NUMBERS if getattr(section, name) is not None}
    if section.preset is not None:
        costs = preset(section.preset, cluster.tp, cluster.training_gpus)
    else:
        missing = [f"cost.{name}" for name in NUMBERS if name not in given]
        if missing:
            raise StrettoError(f"cost.preset is not set, so {', '.join(missing)} must be given")
        costs = Costs(StepCost(), 0.0, 0.0, 0.0, None)
    step = {
        name: given.pop(name) for name in ("base", "per_token", "per_context", "per_prefill") if name in given
    }
    if section.kv_tokens is not None:
        given["kv_tokens"] = section.kv_tokens
    return replace(costs, step=replace(costs.step, **step), **given)


def workload_of(scenario: Scenario) -> Workload:
    """A fresh workload: every candidate gets the same one. Raises StrettoError for files that cannot be read."""
    section = scenario.workload
    if section.run is not None:
        return Recorded(scenario.folder / section.run)
    if section.lognormal is not None:
        quantiles = Quantiles.lognormal(section.lognormal[0], section.lognormal[1])
    elif section.histogram is not None:
        quantiles = Quantiles.weighted([t for t, _ in section.histogram], [w for _, w in section.histogram])
    else:
        quantiles = read_trace(_trace(scenario.folder, str(section.trace)))
    return Drawn(
        quantiles.scaled(section.scale) if section.scale != 1.0 else quantiles,
        rows=section.rows,
        prompt_tokens=section.prompt_tokens,
        share=section.prompt_share,
        stability=section.stability,
        stuck=section.stuck,
        cap=section.max_new_tokens,
        seed=scenario.run.seed,
    )


def _trace(folder: Path, name: str) -> Path:
    if name == SHIPPED:
        return Path(str(resources.files("stretto.simulate") / "scenarios" / "reasoning_lengths.jsonl"))
    return folder / name


def cluster_of(section: ClusterSection, cost: CostSection, seed: int) -> Cluster:
    """A cluster, its random failures drawn. Raises StrettoError where they are too many."""
    arrivals = [(when, int(worker)) for when, worker in section.arrivals]
    failures = [(when, int(worker)) for when, worker in section.failures]
    if section.failure_every is not None:
        expected = section.workers * HORIZON / (section.failure_every + section.repair_seconds)
        if expected > MOST_FAILURES:
            least = section.workers * HORIZON / MOST_FAILURES - section.repair_seconds
            raise StrettoError(
                f"cluster.failure_every = {section.failure_every:g} with repair_seconds = {section.repair_seconds:g}: "
                f"about {expected:.3g} failures of {section.workers} workers in 30 days; at most {MOST_FAILURES:,} are "
                f"simulated: use at least failure_every = {math.ceil(least)}"
            )
        random = np.random.default_rng([seed, 1])
        for worker in range(section.workers):
            now = random.exponential(section.failure_every)
            while now < HORIZON:
                failures.append((now, worker))
                arrivals.append((now + section.repair_seconds, worker))
                now += section.repair_seconds + random.exponential(section.failure_every)
    return Cluster(
        workers=section.workers,
        slots=section.slots,
        shared=section.shared,
        reward_seconds=cost.reward,
        reward_sigma=cost.reward_sigma,
        report_seconds=section.report_seconds,
        arrivals=arrivals,
        failures=failures,
    )


def world_of(scenario: Scenario, candidate: Candidate, spans: list[Span] | None = None) -> SimulatedWorld:
    """The world in which one of the scenario's schedules runs."""
    costs = costs_of(scenario.cost, candidate.cluster)
    longest = scenario.workload.max_new_tokens + scenario.workload.prompt_tokens
    if costs.kv_tokens is not None and costs.kv_tokens < longest:
        raise StrettoError(
            f"cost.kv_tokens: a worker holds {costs.kv_tokens} K/V entries, but workload.max_new_tokens and "
            f"prompt_tokens make {longest}; use more GPUs per worker (cluster.tp), or shorter responses"
        )
    drafts, earlier = scenario.drafts, scenario.workload.history
    speeds = drafts.tokens_per_step[min(earlier, len(drafts.tokens_per_step) - 1) :]
    workload = workload_of(scenario)
    world = SimulatedWorld(
        candidate.config,
        workload,
        cluster_of(candidate.cluster, scenario.cost, scenario.run.seed),
        costs,
        max_new_tokens=scenario.workload.max_new_tokens,
        seed=scenario.run.seed,
        drafting=Drafting(speeds, drafts.nodes) if candidate.drafts else None,
        agreement=scenario.cost.agreement,
        redraw=candidate.redraw,
        spans=spans,
    )
    for visit in range(earlier):
        world.lengths.observe(workload.earlier(candidate.config.samples, visit - earlier))
    return world
