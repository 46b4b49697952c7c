"""Whole runs on the model that ships with the package, a few short responses each."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import stretto
from stretto.config import Config, load_config
from stretto.errors import StrettoError
from stretto.history.log import read_rollouts
from stretto.observe.progress import SilentReporter
from stretto.records import State
from stretto.run import RunResult
from stretto.trainer import Trainer, train
from tests.models import tiny_model
from tests.rewards import brief, failing
from tests.tasks.two_turn import TwoTurn

CONTRACT = """step version epoch reward/mean response_length/mean response_length/p50 response_length/p99
response_length/max time/rollout time/reward time/update time/sync time/total throughput/useful_tokens_per_s
rollout/bubble_ratio rollout/discarded_tokens rollout/reverified_tokens spec/drafted spec/accepted
spec/mean_acceptance_length off_policy/staleness_mean off_policy/staleness_max off_policy/ratio_mean
off_policy/clip_fraction off_policy/logprob_mismatch policy/loss policy/kl policy/entropy policy/grad_norm""".split()

ROOT = Path(__file__).parent.parent
REWARDS = Path(__file__).parent / "rewards.py"


def small(folder: Path, name: str, **changes: Any) -> Config:
    """The demo, cut down to seconds."""
    settings: dict[str, Any] = {
        "runs": str(folder),
        "name": name,
        "steps": 3,
        "threads": 1,
        "sampling.max_new_tokens": 24,
        "schedule.prompts": 2,
        "schedule.samples": 3,
        "engine.max_num_seqs": 4,
        "draft.step_ms": [1.0, 1.1, 1.2, 1.4, 1.8],  # drafting pays
        "reward.functions": [f"{REWARDS}:vowels"],
        "checkpoint.every": 1,
        "eval.enabled": False,
    }
    return load_config("demo", {**settings, **changes})


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def what_is_learned(folder: Path) -> tuple[list[float | None], list[list[int]]]:
    """Rewards by step and all tokens, in order."""
    tokens = [
        rollout.token_ids.tolist()
        for file in sorted((folder / "consumed").glob("*.parquet"))
        for rollout in read_rollouts(file)
    ]
    return [line.get("reward/mean") for line in metrics(folder)], tokens


def assert_same_run(a: Path, b: Path) -> None:
    assert what_is_learned(a) == what_is_learned(b)
    for name in ("model.safetensors", "optimizer/state.safetensors"):
        assert (a / "latest" / name).read_bytes() == (b / "latest" / name).read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Trainer(small(tmp_path_factory.mktemp("runs"), "undisturbed")).run().folder


def test_a_run_leaves_what_the_contract_says(undisturbed: Path) -> None:
    lines = metrics(undisturbed)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert set(CONTRACT) <= set(lines[0])
    assert all(line["off_policy/staleness_max"] == 0 for line in lines)
    assert all(line["off_policy/logprob_mismatch"] < 1e-4 for line in lines)
    assert load_config(undisturbed / "config.toml").steps == 3
    for kind in ("rollouts", "consumed"):
        assert len(list((undisturbed / kind).glob("*.parquet"))) == 3
    assert {r.outcome for r in read_rollouts(undisturbed / "consumed/step-000001.parquet")} == {
        State.CONSUMED
    }
    assert (undisturbed / "timeline.json").read_text().startswith("[")
    before, after = (
        load_file(f / "model.safetensors") for f in sorted((undisturbed / "checkpoints").iterdir())[-2:]
    )
    assert any(not before[name].equal(after[name]) for name in before)


def test_every_response_says_how_it_was_drafted(tmp_path: Path) -> None:
    folder = Trainer(small(tmp_path, "drafted", **{"data.limit": 2})).run().folder
    for step, line in enumerate(metrics(folder), start=1):
        rollouts = read_rollouts(folder / f"rollouts/step-{step:06d}.parquet")
        names = {
            "drafted": "spec/drafted",
            "accepted": "spec/accepted",
            "decode_steps": "engine/decode_steps",
        }
        assert {name: sum(getattr(r, name) for r in rollouts) for name in names} == {
            name: line[key] for name, key in names.items()
        }
        length = line[f"spec/visit/{step}/mean_acceptance_length"]  # a step is a visit
        assert length == line["spec/mean_acceptance_length"]
        assert 0.0 < line["spec/time_share"] < 1.0
    assert line["spec/visit/3/acceptance"] == line["spec/accepted"] / line["spec/drafted"] > 0.5


def test_every_metric_is_described(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"eval.enabled": True, "eval.limit": 1, "data.limit": 2}
    changes |= {
        "reuse.kind": "prefix",
        "learner.kl_coef": 0.1,
        "reward.functions": ["task", f"{REWARDS}:vowels"],
    }
    lines = metrics(Trainer(small(tmp_path, "described", **changes)).run().folder)
    names = {name for line in lines for name in line}
    for folder in ("schedule", "learn"):  # what only other schedules, or learners in processes, have
        for module in (ROOT / "src/stretto" / folder).glob("*.py"):
            names |= set(re.findall(r'"((?:schedule|policy|off_policy|time)/\w+)"', module.read_text()))
    page = (ROOT / "docs/runs.md").read_text().partition("## Metrics")[2].partition("## Rollouts")[0]
    described = [
        _pattern(name)
        for cell in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`(.+?)`", cell)
    ]
    assert len(names) > 100
    assert "schedule/chunks" in names
    assert "time/trainer" in names
    assert sorted(name for name in names if not any(re.fullmatch(p, name) for p in described)) == []


def _pattern(name: str) -> str:
    """What names of metrics a name in the page stands for: `a/{b,c}`, `a/{1..8}`, `a/NAME`, `a/*`."""
    parts = re.split(r"(\{.*?\}|\*|\b[A-Z]+\b)", name)
    for i, part in enumerate(parts):
        if ".." in part:
            parts[i] = r"\d+"
        elif part.startswith("{"):
            parts[i] = f"({part[1:-1].replace(',', '|')})"
        elif part == "*":
            parts[i] = ".+"
        elif part.isupper():
            parts[i] = r"[\w.#]+"
    return "".join(parts)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(undisturbed: Path, tmp_path: Path) -> None:
    again = Trainer(small(tmp_path, "again")).run().folder
    assert_same_run(undisturbed, again)
    other = Trainer(small(tmp_path, "other", seed=1)).run().folder
    assert what_is_learned(undisturbed)[1] != what_is_learned(other)[1]


def test_a_run_that_is_resumed_is_the_run_that_was_not_stopped(undisturbed: Path, tmp_path: Path) -> None:
    folder = Trainer(small(tmp_path, "halves", steps=2)).run().folder
    Trainer.resume(folder, {"steps": 3}).run()
    assert_same_run(undisturbed, folder)
    assert load_config(folder / "config.toml").steps == 3  # interrupted again, it goes on to there


class KillAt(SilentReporter):
    """Sends its own process a signal when step `step` has been made, or while the next one is generated."""

    def __init__(self, step: int, number: signal.Signals, inside: bool) -> None:
        self._step, self._number, self._inside, self._armed = step, number, inside, False

    def step(self, metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == self._step:
            self._armed = self._inside
            if not self._inside:
                os.kill(os.getpid(), self._number)

    def rollout(self, done: int, total: int, tokens: int) -> None:
        if self._armed and done >= 2:
            self._armed = False
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("inside", [False, True])
def test_a_signal_leaves_a_folder_from_which_the_same_run_goes_on(
    number: signal.Signals, inside: bool, undisturbed: Path, tmp_path: Path
) -> None:
    config = small(tmp_path, "signalled", **{"checkpoint.every": 10})
    result = Trainer(config, reporter=KillAt(1, number, inside)).run()
    assert (result.interrupted, result.steps) == (True, 1)
    assert (result.folder / "checkpoints/step-000001").is_dir()
    assert not Trainer.resume(result.folder).run().interrupted
    assert_same_run(undisturbed, result.folder)


def test_a_run_stopped_before_its_first_step_starts_from_the_beginning(
    undisturbed: Path, tmp_path: Path
) -> None:
    reporter = KillAt(-1, signal.SIGTERM, inside=True)
    reporter._armed = True
    result = Trainer(small(tmp_path, "early"), reporter=reporter).run()
    assert (result.interrupted, result.steps) == (True, 0)
    Trainer.resume(result.folder).run()
    assert_same_run(undisturbed, result.folder)


def test_a_folder_that_exists_is_not_touched(undisturbed: Path) -> None:
    before = sorted(p.name for p in undisturbed.rglob("*"))
    config = small(undisturbed.parent, "undisturbed", **{"model.path": "no/such/model"})
    with pytest.raises(StrettoError, match="exists already; continue it with `stretto resume"):
        Trainer(config).run()
    assert sorted(p.name for p in undisturbed.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.lora.target_modules": ["nowhere"]}, "no layer of the model matches"),
        (
            {"sampling.stop_token_ids": [10**6]},
            "sampling.stop_token_ids: 1000000 is no token of the model demo",
        ),
    ],
)
def test_a_run_that_cannot_begin_leaves_nothing(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(StrettoError, match=message):
        Trainer(small(tmp_path, "impossible", **changes)).run()
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    changes = {"model.path": str(tmp_path / "model"), "model.tokenizer": "demo"}
    with pytest.raises(StrettoError, match="the tokenizer of demo gives token id"):
        Trainer(small(tmp_path, "mixed", **changes)).run()


def test_resume_refuses_to_become_another_run(undisturbed: Path) -> None:
    with pytest.raises(StrettoError, match=r"learner\.learning_rate"):
        Trainer.resume(undisturbed, {"learner.learning_rate": 1.0})


class Messages(SilentReporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def test_what_is_no_reward_is_refused() -> None:
    with pytest.raises(StrettoError, match="reward is 5: expected a function"):
        train(data=[{"prompt": "?"}], reward=5)  # type: ignore[arg-type]


def test_async_trains_with_weights_of_its_own_and_reports_its_staleness(tmp_path: Path) -> None:
    changes = {"schedule.kind": "async", "schedule.max_staleness": 2, "deterministic": False, "steps": 5}
    result = Trainer(small(tmp_path, "async", **changes)).run()
    lines = metrics(result.folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["off_policy/staleness_max"] == 0
    assert max(line["off_policy/staleness_max"] for line in lines) >= 1
    logged = read_rollouts(result.folder / "in_flight/step-000005.parquet")
    assert {r.outcome for r in logged} <= {State.RUNNING, State.PENDING, State.SCORED, State.FINISHED}


def test_an_async_run_resumes_with_what_was_in_flight(tmp_path: Path) -> None:
    changes = {"schedule.kind": "async", "schedule.max_staleness": 2, "deterministic": False}
    folder = Trainer(small(tmp_path, "async", **changes)).run().folder
    flying = read_rollouts(folder / "in_flight/step-000003.parquet")
    assert any(len(r.token_ids) for r in flying)
    Trainer.resume(folder, {"steps": 5}).run()
    consumed = {
        r.request_id: r for n in (4, 5) for r in read_rollouts(folder / f"consumed/step-{n:06d}.parquet")
    }
    carried = [r for r in flying if r.request_id in consumed and len(r.token_ids)]
    assert carried
    for rollout in carried:  # what a response had at the checkpoint is its beginning now
        tokens = consumed[rollout.request_id].token_ids.tolist()
        assert tokens[: len(rollout.token_ids)] == rollout.token_ids.tolist()


def test_turns_are_trained_on_without_the_environments_words(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"data.task": None, "reward.functions": [], "steps": 1}
    changes["sampling.max_new_tokens"] = 200
    config = small(tmp_path, "turns", **changes)
    result = Trainer(config, data=TwoTurn()).run()
    rollouts = read_rollouts(result.folder / "consumed/step-000001.parquet")
    spoken = [r for r in rollouts if not r.loss_mask.all()]
    assert spoken
    for rollout in spoken:
        assert rollout.turn == 1
        observed = rollout.token_ids[~rollout.loss_mask]
        assert (rollout.logprobs[~rollout.loss_mask] == 0).all()
        assert len(observed) > 0


def test_a_failing_reward_is_counted_and_left_out_or_ends_the_run(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"reward.functions": [], "steps": 1}
    result = Trainer(small(tmp_path, "excluded", **changes), reward=failing).run()
    (line,) = metrics(result.folder)
    assert (line["reward/errors"], line["reward/mean"], line["policy/empty_update"]) == (6, None, 1.0)
    stopping = small(tmp_path, "stopping", **changes, **{"reward.on_error": "stop"})
    with pytest.raises(StrettoError, match="no such luck"):
        Trainer(stopping, reward=failing).run()


def test_the_library_trains_on_rows_and_a_function(tmp_path: Path) -> None:
    rows = [{"prompt": f"A says B is a knave . {i}"} for i in range(4)]
    result: RunResult = stretto.train(
        model="demo",
        data=rows,
        reward=brief,
        config={
            "runs": str(tmp_path),
            "name": "library",
            "steps": 1,
            "threads": 1,
            "sampling": {"max_new_tokens": 8},
            "schedule": {"prompts": 2, "samples": 2},
        },
    )
    assert metrics(result.folder)[0]["reward/mean"] > 0
