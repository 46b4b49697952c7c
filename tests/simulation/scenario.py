"""From a seed to a world: a schedule with its knobs, a workload, workers that come and go, crashes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, get_args

from stretto.config import ScheduleConfig
from stretto.config.checks import USED_BY
from stretto.config.schedules import Kind
from stretto.engine.responses import uniform
from stretto.engine.simulated import StepCost

KINDS: tuple[Kind, ...] = get_args(Kind)
RESPONSES = 70  # that a scenario consumes, about: what keeps a seed under 0.1 s

Knob = Callable[[Random], Any]
KNOBS: Mapping[str, Knob] = {
    "prompts": lambda r: r.choice([1, 2, 3, 4, 6]),
    "samples": lambda r: r.choice([1, 2, 2, 3, 4]),
    "unit": lambda r: r.choice(["group", "group", "response"]),
    "max_staleness": lambda r: r.choice([0, 0, 1, 1, 2, 3, None]),
    "off_policy_strategy": lambda r: r.choice(["refresh", "refresh", "wait", "drop", "paced"]),
    "refresh_budget": lambda r: r.choice([None, None, 0, 1, 2, 5]),
    "running": lambda r: r.choice(["continue", "recompute"]),
    "max_concurrent": lambda r: r.choice([None, None, r.randint(4, 20)]),
    "drop_zero_variance": lambda r: r.random() < 0.25,
    "max_num_gen_batches": lambda r: None,  # a few small groups with equal rewards are no wonder here
    "tokens_per_update": lambda r: r.choice(
        [None, None, None, r.uniform(0.0, 2.5)]
    ),  # times the mean batch's
    "longest_first": lambda r: r.random() < 0.5,
    "load_prompts": lambda r: r.randint(1, 4),
    "post_hoc": lambda r: r.random() < 0.2,
    "bands": lambda r: r.choice([2, 3, 8]),
    "tier": lambda r: r.choice(["mirrored", "linear", "equal"]),
    "token_cost": lambda r: r.choice([0.0, 0.01, 1.0]),
    "outlier": lambda r: r.choice(["migrate", "defer", "none"]),
    "outlier_quantile": lambda r: r.choice([0.1, 0.5, 0.95]),
    "outlier_factor": lambda r: r.choice([1.0, 1.25]),
    "outlier_share": lambda r: r.choice([0.1, 0.5, 1.0]),
    "max_prompts_ratio": lambda r: r.choice([1.0, 1.25, 1.5, 2.0]),
    "max_num_return_sequences": lambda r: r.choice([None, r.randint(1, 8)]),
    "concurrency": lambda r: r.choice([None, r.randint(1, 24)]),
    "refill": lambda r: r.random() < 0.6,
    "chunk_size": lambda r: r.choice([1, 5, 20, 1024]),
    "long_share": lambda r: r.choice([0.05, 0.2, 0.7]),
    "long_workers": lambda r: r.choice([None, None, 1, 2]),
    "local_workers": lambda r: r.choice([0, 1, 1, 2]),
    "window_floor": lambda r: r.choice([0.0, 0.1, 1.0, 20.0]),
}
"""How each knob of `ScheduleConfig` is drawn; a schedule gets those that it has."""

Lengths = Literal["constant", "one", "uniform", "lognormal", "endless", "bimodal"]


@dataclass(frozen=True, slots=True)
class Workload:
    """How long responses (of a turn, in multi-turn tasks) are: a function of key, turn, and perhaps the weights."""

    kind: Lengths
    most: int  # `max_new_tokens`
    drifts: bool  # other weights, other length
    turns: int  # 1: no environment
    rows: int
    salt: int

    def length(self, key: int, turn_start: int, version: int) -> int:
        """How many tokens the response has in all when its turn ends; more than `most`: it would go on."""
        u = uniform(key ^ self.salt, turn_start + (version << 20 if self.drifts else 0))
        return turn_start + max(1, int(self._tokens(u)))

    def _tokens(self, u: float) -> float:
        """At the quantile `u`, in (0, 1)."""
        match self.kind:
            case "constant":
                return float(1 + self.salt % self.most)
            case "one":
                return 1
            case "uniform":
                return 1 + u * self.most
            case "lognormal":  # or nearly so
                return float(0.1 * self.most * (1 / u - 1) ** 0.7)
            case "endless":
                return 2 * self.most if u < 0.2 else 1 + u * 8
            case "bimodal":
                return self.most if u < 0.1 else self.most / 8

    def token(self, key: int, position: int, version: int) -> int:
        """The token there; one in eight depends on the weights."""
        mixed = (key * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F) & 0xFFFFFFFF
        return (mixed >> 8) % 5000 + (7919 * version if mixed % 8 == 0 else 0)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Workers, their slots and costs. Moments are in seconds since the beginning, or since a resume."""

    slots: tuple[int, ...]  # of each worker
    load_seconds: tuple[float, ...]
    cost: StepCost
    kv_tokens: int | None
    agreement: float
    speed: float
    colocated: int  # workers, the first ones, whose devices the trainer uses
    train_seconds: float
    report_seconds: float | None
    absent: float  # chance that a worker is late, and that it fails; it then comes back unless it is `mortal`
    mortal: bool
    horizon: float  # seconds within which all that happens


@dataclass(frozen=True, slots=True)
class Scenario:
    """A world. `crashes` are numbers of events after which all is thrown away and resumed from the last boundary."""

    seed: int
    config: ScheduleConfig
    workload: Workload
    cluster: Cluster
    tokens: bool  # whether engines report tokens, or leap without
    reward_seconds: float
    reward_tail: bool  # whether some rewards take much longer
    reward_errors: float  # chance of no usable reward
    equal_rewards: float  # chance that a group's rewards are all equal
    updates: int
    crashes: tuple[int, ...]
    eager: bool  # whether the learner has the new weights before it says so
    busy_seconds: float  # at most; for so long after an event the controller is busy, then all comes together

    def changes(self) -> dict[str, Any]:
        """The schedule's knobs that are not at their defaults."""
        return self.config.model_dump(exclude_defaults=True) | {"kind": self.config.kind}


def draw(seed: int) -> Scenario:
    """The scenario of this seed, the same on every machine."""
    random = Random(seed)
    cluster = _cluster(random)
    tokens = random.random() < 0.5
    turns = random.choice([1, 1, 1, 2, 3]) if tokens else 1
    kinds = get_args(Lengths)
    most = random.choice([1, 8, 30, 60]) if tokens else random.choice([1, 8, 60, 300])
    workload = Workload(
        kind=random.choice(kinds),
        most=most,
        drifts=random.random() < 0.3,
        turns=turns,
        rows=random.choice([1, 2, 5, 40, 1000]),
        salt=random.getrandbits(48),
    )
    config = _config(random, workload)
    size = config.prompts * config.samples
    updates = max(2, min(10, RESPONSES // size))
    crashes = sorted(random.randint(1, 45 * updates) for _ in range(random.choice([0, 1, 1, 2])))
    return Scenario(
        seed=seed,
        config=config,
        workload=workload,
        cluster=cluster,
        tokens=tokens,
        reward_seconds=random.choice([0.0, 0.05, 3.0]),
        reward_tail=random.random() < 0.3,
        reward_errors=random.choice([0.0, 0.0, 0.2]),
        equal_rewards=random.choice([0.0, 0.3, 0.6]),
        updates=updates,
        crashes=tuple(crashes),
        eager=random.random() < 0.5,
        busy_seconds=random.choice([0.0, 0.0, 0.2, 2.0, 10.0]),
    )


def _config(random: Random, workload: Workload) -> ScheduleConfig:
    mean = sum(min(workload.length(key, 0, 0), workload.most) for key in range(20)) / 20
    kind = random.choice(KINDS)
    while True:
        knobs = {name: knob(random) for name, knob in KNOBS.items() if kind in USED_BY.get(name, (kind,))}
        if knobs["drop_zero_variance"]:
            knobs["samples"] += 1  # a single reward never differs
        if knobs.get("max_concurrent") is not None:
            knobs["max_concurrent"] += knobs[
                "samples"
            ]  # fewer let no group in, which a whole `Config` refuses
        if knobs["tokens_per_update"] is not None:
            size = knobs["prompts"] * knobs["samples"]
            knobs["tokens_per_update"] = max(1, int(knobs["tokens_per_update"] * size * mean))
        try:
            return ScheduleConfig(kind=kind, **knobs)
        except ValueError:
            continue  # a combination that is refused


def _cluster(random: Random) -> Cluster:
    workers = random.choice([1, 1, 2, 3, 4])
    same = random.randint(1, 8)
    slots = [same if random.random() < 0.7 else random.randint(1, 8) for _ in range(workers)]
    load = random.choice([0.0, 0.0, 0.5, 5.0])
    cost = StepCost(0.1, random.choice([0.0, 0.01]), random.choice([0.0, 1e-4]), random.choice([0.0, 1e-3]))
    return Cluster(
        slots=tuple(slots),
        load_seconds=tuple(load * random.random() for _ in range(workers)),
        cost=cost,
        kv_tokens=random.choice([None, None, random.randint(20, 1000)]),
        agreement=random.choice([0.0, 0.5, 0.97, 1.0]),
        speed=random.choice([1.0, 1.0, 1.0, 2.5]),
        colocated=random.choice([0, 0, workers]),
        train_seconds=random.choice([0.0, 1.0, 10.0]),
        report_seconds=random.choice([None, None, 1.0, 5.0]),
        absent=random.choice([0.0, 0.0, 0.5, 0.9]),
        mortal=random.random() < 0.3,
        horizon=random.choice([2.0, 10.0, 50.0]),
    )
