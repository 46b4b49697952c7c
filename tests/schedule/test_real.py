"""Every schedule trains a real model, in float64: with two processes of engines, and in one process.

The processes are started once and lent to one run after the other: starting them takes longer than the runs.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import stretto.run
from stretto.assemble import build_worker
from stretto.checkpoints import read_checkpoint
from stretto.config import Config, ModelConfig, load_config
from stretto.config.checks import USED_BY
from stretto.config.schedules import Kind
from stretto.engine.embedded import EmbeddedEngine
from stretto.fleet.channel import Published
from stretto.fleet.messages import Build
from stretto.fleet.process import ProcessFleet
from stretto.fleet.workers import WorkerFleet
from stretto.history.log import read_rollouts
from stretto.model import load_model
from stretto.records import (
    Event,
    Loaded,
    Progress,
    Request,
    Rollout,
    Running,
    SamplingParams,
    State,
    WorkerUp,
)
from stretto.schedule import ledger_options
from stretto.trainer import Trainer
from stretto.weights import WeightFiles, WeightsRef
from tests.invariants import check_progress
from tests.models import tiny_model
from tests.rewards import vowels
from tests.test_trainer import CONTRACT, metrics

ROWS = [{"prompt": "Ann says Bo is a knave . " * (1 + i % 3) + str(i)} for i in range(8)]
STEPS, PROMPTS, SAMPLES, SLOTS, LIMIT = 4, 2, 3, 3, 40  # slots of each engine
STOP = list(range(5, 371, 12))
KNOBS: dict[str, Any] = {
    "load_prompts": 2,
    "bands": 2,
    "chunk_size": 8,
    "concurrency": 9,
    "window_floor": 0.01,
}
LOADS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != "concurrency")
"""Kinds that at `max_staleness` 0 train on the rows in the order in which they come, or a load of them at once."""
AT_0 = [(kind, 0) for kind in get_args(Kind)]
ALL = [*AT_0, *((kind, 1) for kind in USED_BY["max_staleness"]), ("concurrency", None)]

Key = tuple[str, int, int, int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=384, max_position_embeddings=256, eos_token_id=1).save_pretrained(path)
    return path


def config_of(model: Path, folder: Path, kind: str, **changes: Any) -> Config:
    """Without the knobs that the kind has not."""
    knobs = KNOBS | {name: changes.pop(name) for name in list(changes) if name in USED_BY}
    settings: dict[str, Any] = {
        "runs": str(folder),
        "name": kind,
        "steps": STEPS,
        "threads": 1,
        "model": {"path": str(model), "tokenizer": "demo", "dtype": "float64"},
        "sampling": {"max_new_tokens": LIMIT, "stop_token_ids": STOP},
        "schedule": {"kind": kind, "prompts": PROMPTS, "samples": SAMPLES},
        "engine": {"max_num_seqs": SLOTS},
        "draft": {"budget": "none"},
        "learner": {"learning_rate": 0.03},
        "checkpoint": {"every": 1, "keep": 99},
        "eval": {"enabled": False},
    }
    settings["schedule"] |= {name: value for name, value in knobs.items() if kind in USED_BY[name]}
    return load_config(settings, changes)


def train(config: Config) -> Path:
    return Trainer(config, data=ROWS, reward=vowels).run().folder


def consumed(folder: Path) -> list[list[Rollout]]:
    """What each update was made of."""
    return [read_rollouts(path) for path in sorted((folder / "consumed").glob("*.parquet"))]


def name(rollout: Rollout) -> Key:
    return rollout.prompt.uid, rollout.prompt.occurrence, rollout.visit, rollout.sample_index


# ---- two processes ----------------------------------------------------------------------------------------


class Lent:
    """A fleet for the length of a run, and `files` for its weights: nothing runs at its beginning, and all weights are
    the first.
    """

    def __init__(self, fleet: WorkerFleet, first: Mapping[str, torch.Tensor], files: Published) -> None:
        self.fleet = fleet
        self.submitted: list[tuple[int, int, int]] = []
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        fleet._post = inbox.put
        fleet.wait_until_ready()
        fleet._files = files
        fleet.load(WeightsRef(0, "copy", first), list(fleet._workers), "continue")
        loaded: set[int] = set()
        while loaded < set(fleet._workers):
            event = inbox.get(timeout=60)
            loaded |= {event.worker} if isinstance(event, Loaded) else set()
        fleet.metrics()

    def begin(self, post: Callable[[Event], None]) -> Lent:
        self.fleet._post = post
        return self

    def start(self) -> None:
        for worker in self.fleet._workers.values():
            assert worker.ready is not None
            self.fleet._post(WorkerUp(worker.number, worker.ready.slots, 0))

    def submit(self, worker: int, requests: Sequence[Request]) -> None:
        self.submitted += [(worker, request.id, request.attempt) for request in requests]
        self.fleet.submit(worker, requests)

    def stop(self, worker: int, ids: Sequence[int], attempts: Sequence[int]) -> None:
        self.fleet.stop(worker, ids, attempts)

    def load(self, ref: WeightsRef, workers: Sequence[int], running: Running) -> None:
        self.fleet.load(ref, workers, running)

    def expecting(self) -> bool:
        return self.fleet.expecting()

    def metrics(self) -> dict[str, float]:
        return self.fleet.metrics()

    def close(self) -> None:
        self.fleet._post = lambda event: None
        for worker, id, attempt in self.submitted:
            self.fleet.stop(worker, [id], [attempt])


Train = Callable[[str, int | None], Path]


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Gives the folder of a run by kind and max_staleness, made once, on two processes."""
    folder = tmp_path_factory.mktemp("runs")

    def make(build: Build) -> ProcessFleet:
        return ProcessFleet(build, lambda event: None, workers=2, scratch=folder / "weights", restarts=0)

    names = itertools.count()
    yield from lending(
        "processes", make, lambda: WeightFiles(folder / f"weights-{next(names)}"), model, folder
    )


def lending(
    kind_of_fleet: str,
    make: Callable[[Build], WorkerFleet],
    files: Callable[[], Published],
    model: Path,
    folder: Path,
) -> Iterator[Train]:
    """One fleet of two workers, lent to every run."""
    first = {n: p.detach().clone() for n, p in load_model(of(model)).named_parameters()}
    two = {"fleet.kind": kind_of_fleet, "fleet.workers": 2, "fleet.threads": 1}
    any_kind = config_of(model, folder, "synchronous", **two)
    fleet = make(partial(build_worker, any_kind, 128))
    made: dict[tuple[str, int | None], Path] = {}

    def run(kind: str, staleness: int | None) -> Path:
        if (kind, staleness) not in made:
            lent = Lent(fleet, first, files())
            config = config_of(model, folder / str(staleness), kind, max_staleness=staleness, **two)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    stretto.run,
                    "make_worker_fleet",
                    lambda config, length, post, scratch: (lent.begin(post), None),
                )
                made[kind, staleness] = train(config)
        return made[kind, staleness]

    try:
        yield run
    finally:
        fleet.close()


def of(path: Path) -> ModelConfig:
    return ModelConfig(path=str(path), tokenizer="demo", dtype="float64")


@pytest.mark.parametrize(("kind", "staleness"), ALL)
def test_trains_with_correct_records(kind: str, staleness: int | None, trained: Train) -> None:
    check_records(kind, trained(kind, staleness))


def check_records(kind: str, folder: Path) -> None:
    config = load_config(folder / "config.toml")
    bound = ledger_options(config.schedule)["max_staleness"]
    updates = consumed(folder)
    assert [len(update) for update in updates] == [PROMPTS * SAMPLES] * STEPS
    for version, update in enumerate(updates):
        for rollout in update:
            check_record(rollout)
            assert rollout.outcome == State.CONSUMED
            assert max(rollout.versions) <= version
            assert bound is None or min(rollout.versions) >= version - bound
        groups = {rollout.group_id for rollout in update}
        assert all(sum(r.group_id == group for r in update) == SAMPLES for group in groups)
    logged = [r for path in sorted((folder / "rollouts").glob("*.parquet")) for r in read_rollouts(path)]
    flying = read_rollouts(folder / f"in_flight/step-{STEPS:06d}.parquet")
    for rollout in logged + flying:
        check_record(rollout)
    # Everything that was admitted has ended once, or is still under way.
    ended = [r for update in updates for r in update]
    discarded = [r for r in logged if r.outcome == State.DISCARDED]
    ids = sorted(r.request_id for r in ended + discarded + flying)
    state = read_checkpoint((folder / "latest").resolve())[0].state
    assert ids == list(range(state["ledger"]["next_id"]))
    assert {r.discard_reason for r in discarded} <= ({"overlaunch"} if kind == "tail_batching" else set())
    assert {r.request_id for r in ended} <= {r.request_id for r in logged}
    assert {r.worker for r in ended} == {0, 1}
    assert len({name(r) for r in ended}) == len(ended)


def check_record(rollout: Rollout) -> None:
    n = rollout.token_ids.size
    columns = (rollout.logprobs, rollout.raw_logprobs, rollout.versions, rollout.loss_mask)
    assert [column.size for column in columns] == [n] * 4
    assert (rollout.logprobs <= 0).all()
    assert (np.diff(rollout.versions) >= 0).all()
    assert n <= LIMIT
    if rollout.outcome == State.CONSUMED:
        assert n
        assert rollout.loss_mask.all()
        assert n == LIMIT or rollout.token_ids[-1] in (1, *STOP)
        assert rollout.reward_status == "ok"
        assert np.isfinite(rollout.reward)


@pytest.mark.parametrize(("kind", "staleness"), ALL)
def test_its_figures_make_sense(kind: str, staleness: int | None, trained: Train) -> None:
    folder = trained(kind, staleness)
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    bound = ledger_options(load_config(folder / "config.toml").schedule)["max_staleness"]
    for line in lines:
        assert set(CONTRACT) <= set(line)
        times = {key: value for key, value in line.items() if key.startswith("time/")}
        assert all(value >= 0 for value in times.values()), times
        # A worker reports at the end of an engine's step, which in so short a window is some of it.
        assert -0.5 <= line["rollout/bubble_ratio"] <= 1, line["rollout/bubble_ratio"]
        assert (
            line["off_policy/logprob_mismatch"] is None
            or line["off_policy/logprob_mismatch"] < 1e-9
            or bound != 0
        )
        assert bound is None or line["off_policy/staleness_max"] <= bound
        counts = {
            key: value for key, value in line.items() if key.startswith(("rollout/", "engine/", "reward/re"))
        }
        del counts["rollout/bubble_ratio"]
        assert not {key: value for key, value in counts.items() if not value >= 0}


@pytest.mark.parametrize(("kind", "staleness"), AT_0)
def test_consumed_on_policy_responses_are_those_of_their_weights(
    kind: str, staleness: int, model: Path, trained: Train
) -> None:
    folder = trained(kind, staleness)
    check_on_policy(folder, model)
    updates = consumed(folder)
    if kind in ("sorted", "tail_batching"):
        assert sum(rollout.refreshes for update in updates for rollout in update) > 0


def check_on_policy(folder: Path, model: Path) -> None:
    updates = consumed(folder)
    for version, update in enumerate(updates):
        weights = folder / f"checkpoints/step-{version:06d}" if version else model
        for rollout, again in zip(update, regenerated(weights, update), strict=True):
            assert rollout.token_ids.tolist() == again[0]
            assert rollout.logprobs == pytest.approx(again[1], rel=1e-6)  # logged as float32
    first, last = (
        regenerated(weights, updates[0]) for weights in (model, folder / f"checkpoints/step-{STEPS:06d}")
    )
    assert any(a[0] != b[0] for a, b in zip(first, last, strict=True))  # the weights have moved


def regenerated(weights: Path, rollouts: Sequence[Rollout]) -> list[tuple[list[int], list[float]]]:
    """What an engine that knows nothing else says to these prompts under these keys, and its log-probs."""
    engine = EmbeddedEngine(
        load_model(of(weights)), None, worker=0, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=64
    )
    how = SamplingParams(max_new_tokens=LIMIT, stop_token_ids=(1, *STOP))
    nothing = np.zeros(0, np.int64)
    engine.submit(
        [Request(i, 1, i, r.prompt.token_ids, nothing, 0, r.key, how) for i, r in enumerate(rollouts)]
    )
    said: list[tuple[list[int], list[float]]] = [([], []) for _ in rollouts]
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Progress):
                check_progress(event)
                assert event.token_ids is not None
                assert event.logprobs is not None
                ends = np.cumsum(event.counts).tolist()
                for id, end, count in zip(event.ids.tolist(), ends, event.counts.tolist(), strict=True):
                    said[id][0].extend(event.token_ids[end - count : end].tolist())
                    said[id][1].extend(event.logprobs[end - count : end].tolist())
    return said


# ---- one process, learning rate 0 -------------------------------------------------------------------------


def answers(model: Path, folder: Path, kind: str, **changes: Any) -> dict[Key, list[int]]:
    """All that was consumed under weights that stay."""
    config = config_of(model, folder, kind, **{"learner.learning_rate": 0.0, "max_staleness": 0, **changes})
    return {name(r): r.token_ids.tolist() for update in consumed(train(config)) for r in update}


@pytest.fixture(scope="module")
def synchronous(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Key, list[int]]:
    """More samples and more prompts than the others: their keys do not depend on how many there are."""
    folder = tmp_path_factory.mktemp("synchronous")
    return answers(model, folder, "synchronous", **{"schedule.samples": 4, "steps": STEPS + 2})


@pytest.mark.parametrize("kind", LOADS)
def test_at_learning_rate_0_a_load_is_that_of_synchronous(
    kind: str, model: Path, synchronous: dict[Key, list[int]], tmp_path: Path
) -> None:
    found = answers(model, tmp_path, kind, load_prompts=STEPS)
    assert len(found) == STEPS * PROMPTS * SAMPLES
    assert found == {key: synchronous[key] for key in found}
    first_visit = {key for key in synchronous if key[2] == 0 and key[3] < SAMPLES}
    if (
        kind != "tail_batching"
    ):  # it keeps the first of its samples, and other prompts wait for their long round
        assert set(found) == first_visit
    assert len({len(tokens) for tokens in found.values()}) > 5
