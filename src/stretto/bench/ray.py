"""Ray workers measured with the learner idle: throughput against other fleets, and who waits under which schedule.

Throughput: every fleet answers the same prompts under the same keys, update after update, in pairs whose order changes;
engines have one thread each, wherever they are, and `--slots` slots: where all of an update's responses begin at once,
the longest one is its time, however many workers there are. Idle slots: lengths are drawn with a long tail, each prompt
having its own, and the weights stay; the ratio is over windows of two steps, busy and available slot seconds summed.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stretto.assemble import available_cores, build_worker, make_worker_fleet, read_inputs
from stretto.bench.pairs import Ratio, alternate, count, require_idle
from stretto.buffer import Ledger
from stretto.config import Config, load_config
from stretto.controller import Controller
from stretto.fleet import Fleet
from stretto.fleet.in_process import InProcessFleet
from stretto.fleet.ray_cluster import ray_for
from stretto.history.lengths import LengthHistory
from stretto.records import (
    Prompt,
    Request,
    Rollout,
    Running,
    SamplingParams,
    Scored,
    UpdateBatch,
    Updated,
)
from stretto.runtime import LiveRuntime
from stretto.schedule import ledger_options, make_schedule
from stretto.weights import WeightsRef

SIDES = {
    "ray-2": {"fleet.kind": "ray", "fleet.workers": 2},
    "ray-1": {"fleet.kind": "ray", "fleet.workers": 1},
    "processes-2": {"fleet.kind": "processes", "fleet.workers": 2},
    "in_process": {},
}
PARTS = ("throughput", "idle")
OTHERS = ("ray-1", "processes-2", "in_process")
"""What two Ray workers are compared with."""
SPREAD, NOISE = 0.9, 0.3
"""Of log lengths: between prompts, and between the responses to one. Together 0.95, as ServeGen publishes it of
DeepSeek-R1 (0.97); a tenth of the variance is within a prompt, as in responses of a Qwen2.5-3B after RL on games.
"""


class LongTailed:
    """A fleet whose responses end at drawn lengths (lognormal, `median` tokens), at most the run's limit."""

    def __init__(self, fleet: Fleet, median: float) -> None:
        self._fleet, self._median = fleet, median

    def submit(self, worker: int, requests: Sequence[Request]) -> None:
        self._fleet.submit(worker, [self._ended(request) for request in requests])

    def _ended(self, request: Request) -> Request:
        own = np.random.default_rng(request.prompt_ids.tolist()).normal(0.0, SPREAD)
        log = own + np.random.default_rng(request.key).normal(0.0, NOISE)
        length = int(np.clip(self._median * np.exp(log), 1, request.sampling.max_new_tokens))
        return replace(request, sampling=replace(request.sampling, max_new_tokens=length))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)


@dataclass
class Loop:
    """The real loop, around a learner that has nothing to do: each update ends as it begins, and moves no weights."""

    config: Config
    prompts: list[Prompt]
    runtime: LiveRuntime = field(default_factory=LiveRuntime)
    harvests: list[tuple[float, int, float]] = field(default_factory=list)  # when, tokens, busy slot seconds

    def __post_init__(self) -> None:
        schedule = self.config.schedule
        self.lengths = LengthHistory()
        how = SamplingParams(max_new_tokens=self.config.sampling.max_new_tokens)
        self.ledger = Ledger(how, now=self.runtime.now, **ledger_options(schedule))
        self.schedule = make_schedule(schedule, self.lengths)
        self.fleet: Any = None
        self._controller: Controller | None = None
        self._taken = 0

    def serve(self, fleet: Any) -> None:
        """Wait until the fleet's workers are up."""
        self.fleet = fleet
        if isinstance(fleet, InProcessFleet):
            self.runtime.local = fleet
        else:
            self.runtime.expecting = fleet.expecting
            fleet.wait_until_ready()
        us: Any = self
        self._controller = Controller(self.runtime, self.ledger, self.schedule, us, us, us, us, us)
        fleet.start()

    def run(self, steps: int) -> float:
        """So many updates more; seconds per token from their beginning to the last one's harvest."""
        assert self._controller is not None
        began, first = self.runtime.now(), len(self.harvests)
        if self.harvests:
            self.runtime.post(Updated(self.ledger.version + 1))
        self._controller.run(lambda: len(self.harvests) == first + steps)
        last = self.harvests[first:]
        return (last[-1][0] - began) / sum(tokens for _, tokens, _ in last)

    # ---- the parts that the controller asks: fleet, prompts, rewards, learner, observer -------------------

    def start(self) -> None: ...

    def submit(self, *what: Any) -> None:
        if len(what) == 2:  # to a worker
            self.fleet.submit(*what)
            return
        rollouts: Sequence[Rollout] = what[0]
        self.lengths.observe(rollouts)
        for rollout in rollouts:
            self.runtime.post(Scored(rollout.request_id, rollout.attempt, 1.0))

    def stop(self, worker: int, ids: Sequence[int], attempts: Sequence[int]) -> None:
        self.fleet.stop(worker, ids, attempts)

    def load(self, ref: WeightsRef, workers: Sequence[int], running: Running) -> None:
        self.fleet.load(ref, workers, running)

    def next(self, count: int) -> list[tuple[Prompt, int]]:
        places = range(self._taken, self._taken + count)
        self._taken += count
        return [(self.prompts[i % len(self.prompts)], i // len(self.prompts)) for i in places]

    def harvested(self, batch: UpdateBatch) -> None:
        tokens = sum(rollout.token_ids.size for rollout in batch.rollouts)
        now = self.runtime.now()
        self.harvests.append((now, tokens, self.fleet.metrics()["busy_slot_seconds"]))

    def begin(self, batch: UpdateBatch) -> None:
        if self.schedule.overlaps:
            self.runtime.post(Updated(batch.version + 1))

    def publish(self) -> WeightsRef:
        return WeightsRef(self.ledger.version, "copy", {})

    def updated(self, event: Updated) -> None: ...

    def publishing(self) -> None: ...

    def published(self) -> None: ...


@contextmanager
def fleet_for(config: Config, length: int, loop: Loop, scratch: Path) -> Iterator[Any]:
    """The fleet that `config` names, without drafts; one in this process has one thread too."""
    fleet: Any
    if config.fleet.kind == "in_process":
        one = config.model_copy(update={"fleet": config.fleet.model_copy(update={"threads": 1})})
        fleet = InProcessFleet([build_worker(one, length, 0)[0]], loop.runtime.post)
    else:
        fleet = make_worker_fleet(config, length, loop.runtime.post, scratch)[0]
    try:
        yield fleet
    finally:
        fleet.close()


class Bench:
    """Settings and prompts of both measurements."""

    def __init__(self, source: str, words: Sequence[str], prompts: int) -> None:
        self.source = source
        self.words = ["--draft.budget=none", "--eval.enabled=false", *words]
        self.config = self.of(**SIDES["ray-2"])
        inputs = read_inputs(self.config)
        self.prompts, self.length = inputs.train[:prompts], inputs.max_model_len

    def of(self, **keys: Any) -> Config:
        """The run's configuration with these keys."""
        threads = ["--fleet.threads=1"] if "fleet.kind" in keys else []
        return load_config(
            self.source, [*self.words, *threads, *(f"--{key}={value}" for key, value in keys.items())]
        )

    def throughput(self, pairs: int, slots: int, scratch: Path) -> dict[str, Any]:
        """Two Ray workers against each of `OTHERS`: how often as many tokens per second."""
        return {other: asdict(self._pair(other, pairs, slots, scratch / other)) for other in OTHERS}

    def _pair(self, other: str, pairs: int, slots: int, scratch: Path) -> Ratio:
        keys = {"engine.max_num_seqs": slots}
        loops = [Loop(self.of(**SIDES[side], **keys), self.prompts) for side in ("ray-2", other)]
        with (
            fleet_for(loops[0].config, self.length, loops[0], scratch / "a") as first,
            fleet_for(loops[1].config, self.length, loops[1], scratch / "b") as second,
        ):
            for loop, fleet in zip(loops, (first, second), strict=True):
                loop.serve(fleet)
            a, b = alternate(lambda: loops[0].run(1), lambda: loops[1].run(1), pairs)
        return Ratio.of([theirs / ours for ours, theirs in zip(a, b, strict=True)])

    def idle(self, steps: int, repeats: int, median: float, scratch: Path) -> dict[str, Any]:
        """The two-step slot idle ratio of `synchronous` and `histopipe`, and how often the one's is the other's."""
        ratios: dict[str, list[float]] = {"synchronous": [], "histopipe": []}
        for repeat in range(repeats):
            for kind in ratios if repeat % 2 == 0 else reversed(ratios):
                loop = Loop(self.of(**SIDES["ray-2"], **{"schedule.kind": kind}), self.prompts)
                with fleet_for(loop.config, self.length, loop, scratch) as fleet:
                    loop.serve(LongTailed(fleet, median))
                    for _ in range(1 if loop.schedule.overlaps else steps):
                        loop.run(steps if loop.schedule.overlaps else 1)
                ratios[kind].append(self._idle_of(loop))
        paired = zip(ratios["synchronous"], ratios["histopipe"], strict=True)
        return {**ratios, "ratio": asdict(Ratio.of([a / b for a, b in paired]))}

    def _idle_of(self, loop: Loop) -> float:
        """Over windows of two steps, after the first visit of the prompts, which predicts the lengths."""
        first = -(-len(self.prompts) // loop.config.schedule.prompts)
        windows = loop.harvests[first:]
        windows = windows[: len(windows) // 2 * 2]
        began = loop.harvests[first - 1][0]
        slots = loop.config.engine.max_num_seqs * loop.config.fleet.workers
        return 1.0 - sum(busy for _, _, busy in windows) / (slots * (windows[-1][0] - began))


def main(argv: Sequence[str] = ()) -> int:
    """Prints a table, or with --json one object."""
    parser = argparse.ArgumentParser(prog="stretto bench ray", description=__doc__)
    parser.add_argument("--config", default="demo", help="a TOML file or a preset")
    parser.add_argument("--pairs", type=count, default=10)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    parser.add_argument("--slots", type=count, default=16, help="of a worker whose throughput is measured")
    parser.add_argument("--prompts", type=count, default=64, help="rows, which the steps go round")
    parser.add_argument("--steps", type=count, default=12, help="of a run whose idle slots are measured")
    parser.add_argument("--repeats", type=count, default=5, help="of these runs")
    parser.add_argument("--median", type=float, default=40.0, help="tokens of a response there")
    parser.add_argument("--busy", action="store_true", help="measure although others use the machine")
    parser.add_argument("--json", action="store_true")
    options, words = parser.parse_known_args(argv)
    torch.set_num_threads(1)
    bench = Bench(options.config, words, options.prompts)
    others = require_idle(limit=float("inf") if options.busy else 0.2)
    began = time.monotonic()
    most = bench.of(**{**SIDES["ray-2"], "fleet.workers": 3})  # of a pair
    with ray_for(most, available_cores()), tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        if "throughput" in options.parts:
            found["throughput"] = bench.throughput(options.pairs, options.slots, Path(folder))
        if "idle" in options.parts:
            found["idle"] = bench.idle(options.steps, options.repeats, options.median, Path(folder) / "idle")
    machine = (
        f"{platform.machine()}, Ray {metadata.version('ray')}, torch {torch.__version__}, others {others:.0%}"
    )
    if options.json:
        print(json.dumps({"config": options.config, "machine": machine, **found}))
        return 0
    print(f"{options.config}, {' '.join(words) or 'as it is'}; {machine}; {time.monotonic() - began:.0f} s")
    for other, ratio in found.get("throughput", {}).items():
        print(f"2 Ray workers against {other}: {Ratio(**ratio)} the tokens per second")
    if idle := found.get("idle"):
        for kind in ("synchronous", "histopipe"):
            print(f"{kind}: two-step slot idle ratio {np.median(idle[kind]):.3f} of {options.repeats} runs")
        print(f"synchronous' over histopipe's: {Ratio(**idle['ratio'])}")
    return 0
