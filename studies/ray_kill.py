"""SIGKILL workers of a Ray fleet at random moments, and check what each run has trained on.

    python -m studies.ray_kill [--moments 50] [--runs FOLDER]

Runs of seconds in float64, every schedule in turn, on two Ray workers, of which one is killed at a drawn moment of the
undisturbed run's time. Then: everything admitted has ended once or is under way; each response has as many log-probs,
versions and mask entries as tokens; under `synchronous` the tokens are those of the undisturbed run, and under
every schedule each trained token is what an engine that knows nothing else says after the tokens before it, under its
recorded version and key. Finished cases are kept in the folder's `cases.jsonl`; called again, the study goes on
with the missing ones. Exit status 1 if any case fails. Needs Ray: `pip install '.[ray]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np

from stretto.assemble import read_inputs, sampling_params
from stretto.checkpoints import read_checkpoint
from stretto.config import Config, ModelConfig, load_config
from stretto.config.schedules import Kind
from stretto.engine.embedded import EmbeddedEngine
from stretto.fleet.ray_cluster import ray_for
from stretto.history.log import read_rollouts
from stretto.model import load_model
from stretto.observe.progress import SilentReporter
from stretto.records import Progress, Request, Rollout, SamplingParams, State
from stretto.trainer import Trainer
from studies.cells import steps_of

SETTINGS: dict[str, Any] = {
    "steps": 4,
    "threads": 1,
    "deterministic": False,
    "model.dtype": "float64",
    "sampling.max_new_tokens": 128,
    "engine.max_num_seqs": 6,
    "schedule.prompts": 4,
    "schedule.samples": 4,
    "draft.budget": "none",
    "learner.learning_rate": 1e-3,
    "eval.enabled": False,
    "checkpoint.every": 1,
    "checkpoint.keep": 99,
    "fleet.kind": "ray",
    "fleet.workers": 2,
    "fleet.threads": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "sorted": {"schedule.load_prompts": 2},
    "histopipe": {"schedule.bands": 2},
    "divided": {"schedule.chunk_size": 16},
    "elastic": {"schedule.window_floor": 0.1},
}
ROOM = 2  # CPUs of the study's Ray: a lost worker's place is kept for its successor


def configured(kind: str, runs: Path, name: str, changes: Mapping[str, Any] = {}) -> Config:
    own = {**SETTINGS, **OWN.get(kind, {}), **changes}
    return load_config("demo", {**own, "schedule.kind": kind, "runs": str(runs), "name": name})


@contextmanager
def a_ray() -> Iterator[None]:
    """For all runs of the study."""
    with ray_for(
        load_config("demo", {key: SETTINGS[key] for key in SETTINGS if key.startswith("fleet.")}), ROOM
    ):
        yield


def workers() -> list[int]:
    """Processes of actors with engines on this process's own Ray."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    lines = [line.split(None, 2) for line in listed.stdout.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, *_ in lines}
    engines = [int(pid) for pid, _, *args in lines if args and args[0].startswith("ray::EngineActor")]
    return [pid for pid in engines if parents.get(parents[pid]) == os.getpid()]


class Killer(SilentReporter):
    """Kills one of the workers `after` so many seconds of generating; None: nobody.

    `stalled` are the seconds until tokens came again.
    """

    def __init__(self, after: float | None, draw: random.Random) -> None:
        self._after, self._draw = after, draw
        self._began: float | None = None
        self._killed: float | None = None
        self._tokens = 0
        self.seconds = 0.0
        self.stalled: float | None = None

    def rollout(self, done: int, total: int, tokens: int) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now
            if self._after is not None:
                threading.Timer(self._after, self._kill).start()
        self.seconds = now - self._began
        if self._killed is not None and self.stalled is None and tokens != self._tokens:
            self.stalled = now - self._killed
        self._tokens = tokens

    def _kill(self) -> None:
        there = workers()
        if there:
            os.kill(self._draw.choice(sorted(there)), signal.SIGKILL)
            self._killed = time.monotonic()


def run(config: Config, after: float | None, seed: int) -> tuple[Path, Killer]:
    killer = Killer(after, random.Random(seed))
    return Trainer(config, reporter=killer).run().folder, killer


def consumed(folder: Path) -> list[list[Rollout]]:
    return [read_rollouts(path) for path in sorted((folder / "consumed").glob("*.parquet"))]


def tokens(folder: Path) -> list[dict[tuple[str, int, int, int], list[int]]]:
    """Of each update, by the names of its responses."""
    return [
        {(r.prompt.uid, r.prompt.occurrence, r.visit, r.sample_index): r.token_ids.tolist() for r in update}
        for update in consumed(folder)
    ]


def problems(folder: Path, config: Config) -> list[str]:
    """What is wrong with what a run has left."""
    found = []
    updates = consumed(folder)
    logged = [r for path in sorted((folder / "rollouts").glob("*.parquet")) for r in read_rollouts(path)]
    step = len(updates)
    flying = read_rollouts(folder / f"in_flight/step-{step:06d}.parquet")
    ended = [r for update in updates for r in update]
    discarded = [r for r in logged if r.outcome == State.DISCARDED]
    ids = sorted(r.request_id for r in (*ended, *discarded, *flying))
    admitted = read_checkpoint((folder / "latest").resolve())[0].state["ledger"]["next_id"]
    if ids != list(range(admitted)):
        found.append(
            f"{admitted} responses were admitted, {len(ids)} are accounted for, {len(set(ids))} of them once"
        )
    for rollout in (*logged, *flying):
        columns = (rollout.logprobs, rollout.raw_logprobs, rollout.versions, rollout.loss_mask)
        if {column.size for column in columns} != {rollout.token_ids.size}:
            found.append(f"response {rollout.request_id}: columns of different lengths")
    sizes, expected = [len(update) for update in updates], batches(folder, config)
    if sizes != expected:
        found.append(f"updates of {sizes} responses instead of {expected}")
    return found + differing(folder, config, ended)


def batches(folder: Path, config: Config) -> list[int]:
    """Responses of each update: of `prompts` groups, less the outliers that `histopipe` defers to the next one."""
    deferred = [int(line.get("schedule/deferred", 0)) for line in steps_of(folder)]
    deferred += [0] * (config.steps - len(deferred))
    groups = [
        config.schedule.prompts + before - now for before, now in zip([0, *deferred], deferred, strict=False)
    ]
    return [count * config.schedule.samples for count in groups]


def differing(folder: Path, config: Config, rollouts: Sequence[Rollout]) -> list[str]:
    """Responses with tokens that their recorded weights do not say again."""
    inputs = read_inputs(config)
    how = sampling_params(config, inputs.ends)
    found = []
    for version in sorted({int(v) for r in rollouts for v in r.versions}):
        path = str(folder / f"checkpoints/step-{version:06d}") if version else config.model.path
        model = ModelConfig(path=path, tokenizer="demo", dtype="float64")
        parts = [(r, *span(r, version)) for r in rollouts if (r.versions == version).any()]
        again = said_again(model, parts, how, inputs.max_model_len)
        found += [
            f"response {r.request_id}: tokens {start} to {end} are not those of version {version}"
            for (r, start, end), said in zip(parts, again, strict=True)
            if said[: end - start] != r.token_ids[start:end].tolist()
        ]
    return found


def span(rollout: Rollout, version: int) -> tuple[int, int]:
    """Where the tokens of this version are: versions never fall."""
    first, last = np.searchsorted(rollout.versions, [version, version + 1])
    return int(first), int(last)


def said_again(
    model: ModelConfig, parts: Sequence[tuple[Rollout, int, int]], how: SamplingParams, length: int
) -> list[list[int]]:
    """What an engine says after the tokens before `start`, under the response's key."""
    engine = EmbeddedEngine(
        load_model(model), None, worker=0, max_num_seqs=8, max_model_len=length, max_num_batched_tokens=512
    )
    engine.submit(
        [
            Request(i, 1, i, r.prompt.token_ids, r.token_ids[:start], 0, r.key, how)
            for i, (r, start, _) in enumerate(parts)
        ]
    )
    said: list[list[int]] = [[] for _ in parts]
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Progress):
                assert event.token_ids is not None
                ends = np.cumsum(event.counts)
                for id, end, count in zip(event.ids, ends, event.counts, strict=True):
                    said[id] += event.token_ids[end - count : end].tolist()
    return said


def case(
    kind: str, seed: int, runs: Path, undisturbed: tuple[Path, float], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """A run of `kind` with a worker killed at a moment drawn from `seed`."""
    reference, seconds = undisturbed
    after = random.Random(seed).uniform(0.0, seconds)
    config = configured(kind, runs, f"{kind}-{seed}", changes)
    folder, killer = run(config, after, seed)
    wrong = problems(folder, config)
    if kind == "synchronous" and tokens(folder) != tokens(reference):
        wrong.append("other tokens than in the undisturbed run")
    shutil.rmtree(folder)
    return {"kind": kind, "seed": seed, "after": after, "stalled": killer.stalled, "problems": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--runs", type=Path, default=Path("studies/results/ray_kill"))
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    log = options.runs / "cases.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    references: dict[str, tuple[Path, float]] = {}
    with a_ray():
        for seed in range(options.moments):
            if any(d["seed"] == seed for d in done):
                continue
            kind = get_args(Kind)[seed % len(get_args(Kind))]
            if kind not in references:
                shutil.rmtree(options.runs / kind, ignore_errors=True)
                folder, killer = run(configured(kind, options.runs, kind, {}), None, 0)
                references[kind] = (folder, killer.seconds)
            shutil.rmtree(options.runs / f"{kind}-{seed}", ignore_errors=True)
            done.append(case(kind, seed, options.runs, references[kind], {}))
            with log.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            last = done[-1]
            print(
                f"{kind}, seed {seed}, after {last['after']:.2f} s: {last['problems'] or 'nothing lost'}",
                flush=True,
            )
    bad = [d for d in done if d["problems"]]
    stalls = sorted(d["stalled"] for d in done if d["stalled"] is not None)
    print(
        f"{len(done) - len(bad)} of {len(done)} runs lost and repeated nothing; {len(stalls)} were killed while they "
        f"generated; tokens came again after {stalls[len(stalls) // 2] if stalls else 0:.2f} s (median), "
        f"{stalls[-1] if stalls else 0:.2f} s at most"
    )
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
