"""A run drafts from histories of its own and of other runs, and is the same run without."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from stretto import evaluation
from stretto.alternatives import Alternatives
from stretto.assemble import read_inputs, step_costs
from stretto.config import Config, DataConfig, dump_toml, load_config
from stretto.drafting import (
    ANOTHER_RUN,
    Earlier,
    Newest,
    find_earlier,
    make_previous,
    restore_histories,
    with_step_ms,
)
from stretto.engine.embedded import EmbeddedEngine
from stretto.engines import make_engine
from stretto.errors import StrettoError
from stretto.history.log import read_rollouts, write_rollouts
from stretto.model import load_model
from stretto.observe.progress import SilentReporter
from stretto.records import Rollout
from stretto.run_folder import RunFolder
from stretto.trainer import Trainer
from tests.draft.engine import drafter as a_drafter
from tests.draft.engine import rollout as a_rollout
from tests.models import swap_tokens
from tests.test_trainer import assert_same_run, metrics, small


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Trainer(small(tmp_path_factory.mktemp("runs"), "undisturbed")).run().folder


@pytest.mark.parametrize("budget", ["none", "fixed", "aimd", "length_class", "marginal"])
def test_the_run_is_the_same_with_any_drafts_and_with_none(
    budget: str, undisturbed: Path, tmp_path: Path
) -> None:
    other = Trainer(small(tmp_path, budget, **{"draft.budget": budget})).run().folder
    assert_same_run(undisturbed, other)
    drafted = [line["spec/drafted"] for line in metrics(other)]
    assert any(drafted) == (budget != "none")


def test_history_is_warm_from_another_runs_log(undisturbed: Path, tmp_path: Path) -> None:
    cold = {"draft.sources": ["history"], "steps": 1}
    assert metrics(Trainer(small(tmp_path, "cold", **cold)).run().folder)[0]["spec/drafted"] == 0
    warm = {**cold, "history.warm_from": str(undisturbed)}
    line = metrics(Trainer(small(tmp_path, "warm", **warm)).run().folder)[0]
    assert line["spec/accepted"] > 0.5 * line["spec/drafted"] > 0  # the same prompts, weights and keys
    other = small(tmp_path, "other", **warm).model_copy(update={"data": DataConfig()})
    with pytest.raises(StrettoError, match=r"history\.warm_from: none of the 18 responses in"):
        Trainer(other, data=[{"prompt": "Ann says Bo is a knave ."}]).run()
    config = small(tmp_path, "vocabulary", **warm)
    with pytest.raises(StrettoError, match=r"history\.warm_from: .* but this model has 10 tokens"):
        find_earlier(config, replace(read_inputs(config), vocabulary=10))
    nonsense = small(tmp_path, "nonsense", **{**cold, "history.warm_from": str(tmp_path / "nothing")})
    with pytest.raises(StrettoError, match=r"history\.warm_from: .*nothing is not a run folder"):
        Trainer(nonsense).run()
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "nonsense").exists()


def with_other_tokens(run: Path, folder: Path) -> Path:
    """A copy of the run, with an alternative in its log that the model has not."""
    shutil.copytree(run, folder, symlinks=True)
    log = folder / "consumed/step-000002.parquet"
    rollouts = read_rollouts(log)
    top = rollouts[0].top
    assert top is not None
    rollouts[0].top = Alternatives(
        np.where(top.token_ids == top.token_ids[0, 0], 9999, top.token_ids), top.logprobs
    )
    write_rollouts(log, rollouts, step=2)
    return folder


def with_another_tokenizer(run: Path, folder: Path) -> Path:
    """A copy of the run, two of whose tokens have changed places."""
    shutil.copytree(run, folder, symlinks=True)
    swap_tokens(folder / "checkpoints/step-000003/tokenizer.json")
    return folder


def test_another_tokenizers_or_models_log_is_refused_and_a_resumed_run_goes_on_without(
    undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = read_inputs(small(tmp_path, "warm"))
    for other, message in (
        (with_other_tokens(undisturbed, tmp_path / "tokens"), "tokens has the token id 9999, but"),
        (with_another_tokenizer(undisturbed, tmp_path / "words"), "step-000003 has another tokenizer than"),
        (tmp_path / "deleted", "deleted is not a run folder"),
    ):
        config = small(tmp_path, "warm", **{"history.warm_from": str(other)})
        with pytest.raises(StrettoError, match=rf"history\.warm_from: .*{message}"):
            find_earlier(config, inputs)
        assert find_earlier(config, inputs, resuming=True) is None
        assert message in caplog.messages[-1]
    config = small(tmp_path, "warm", **{"history.warm_from": str(undisturbed)})
    found = find_earlier(config, inputs)
    assert found is not None
    assert [len(rollouts) for rollouts in found] == [6, 6, 6]
    assert {r.visit for rollouts in found for r in rollouts} == {-ANOTHER_RUN}


def damage(log: Path, name: str) -> None:
    """Change the last byte of one column in a file of the log."""
    row_group = pq.read_metadata(log).row_group(0)
    columns = [row_group.column(i) for i in range(row_group.num_columns)]
    column = next(c for c in columns if c.path_in_schema.split(".")[0] == name)
    begin = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    content = bytearray(log.read_bytes())
    content[begin + column.total_compressed_size - 1] ^= 255
    log.write_bytes(content)


class Histories:
    """A run's log and what it remembers while it writes it."""

    def __init__(self, folder: Path, window: int) -> None:
        settings = {"reuse.kind": "prefix", "history.window": window}
        self.config = small(folder, "run", **settings)
        self.folder = RunFolder.create(folder / "run", "")
        self.drafter, self.previous = a_drafter(), make_previous(self.config)
        assert self.previous is not None
        self.drafter.index._window = window
        self.step = 0

    def consume(self, rollouts: list[Rollout]) -> None:
        assert self.previous is not None
        self.step += 1
        self.folder.log_step(self.step, rollouts, rollouts)
        self.drafter.remember(rollouts)
        self.previous.remember(rollouts)

    def restored(self) -> Histories:
        other = object.__new__(Histories)
        other.config, other.folder, other.step = self.config, self.folder, self.step
        other.drafter, other.previous = a_drafter(), make_previous(self.config)
        other.drafter.index._window = self.config.history.window
        restore_histories(self.config, self.folder, self.step, other.drafter, other.previous)
        return other

    def known(self) -> tuple[Any, Any]:
        assert self.previous is not None
        texts = {
            uid: {v: [t.tokens.tolist() for t in texts] for v, texts in history.visits.items()}
            for uid, history in self.drafter.index._histories.items()
        }
        said = {sample: (s.visit, s.token_ids.tolist()) for sample, s in self.previous._newest.items()}
        return texts, said


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_remembered_is_the_same_restored_whatever_was_discarded_or_came_late(
    seed: int, window: int, tmp_path: Path
) -> None:
    """Three rows of two samples, one visit in three steps; some visits are given up, some samples end late."""
    random = np.random.default_rng(seed)
    late: list[Rollout] = []
    live = Histories(tmp_path, window)
    for step in range(12):
        row, visit = step % 3, step // 3
        batch, late = late, []
        if random.random() < 0.6:
            for sample in range(2):
                tokens = random.integers(0, 9, 4).tolist()
                said = replace(a_rollout(tokens, visit, prompt=(row, 7)), sample_index=sample)
                (late if random.random() < 0.4 else batch).append(said)
        live.consume(batch)
    assert live.restored().known() == live.known()


def test_a_visit_of_long_ago_is_found_behind_steps_of_which_nothing_is_needed(tmp_path: Path) -> None:
    """Row 0 was discarded at the visits since; row 1 was answered again and again."""
    live = Histories(tmp_path, 1)
    live.consume([a_rollout([1, 2, 3], 0, prompt=(0, 7))])
    for visit in range(6):
        live.consume([a_rollout([4, visit], visit, prompt=(1, 7))])
    texts, said = live.restored().known()
    assert sorted(tokens for _, tokens in said.values()) == [[1, 2, 3], [4, 5]]
    assert len(texts) == 2


def test_a_damaged_step_is_refused_where_prefixes_come_from_it_and_only_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = Histories(tmp_path, 1)
    for visit in (0, 1):
        live.consume([a_rollout([1, 2, visit], visit)])
    for step in (1, 2):
        log = live.folder.log_file("consumed", step)
        whole = log.read_bytes()
        damage(log, "token_ids")
        if step == 1:  # the second visit took its place
            assert live.restored().known() == live.known()
            log.write_bytes(whole)
            continue
        with pytest.raises(
            StrettoError, match=r'(?s)step-000002.*reuse\.kind = "prefix" takes responses from there'
        ):
            live.restored()
        restore_histories(live.config, live.folder, 2, live.drafter, None)
        assert "nothing is drafted from step 2" in caplog.text


def test_a_log_is_read_one_step_at_a_time_and_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Histories(tmp_path, 2)
    for visit in range(5):
        live.consume([a_rollout([1, visit], visit)])
    read: list[str] = []

    def counted(path: Path) -> list[Rollout]:
        read.append(path.stem)
        return read_rollouts(path)

    monkeypatch.setattr("stretto.drafting.read_rollouts", counted)
    live.restored()
    assert read == ["step-000004", "step-000005"]
    newest = Newest(2)
    for step in range(1, 6):
        newest.add(a_rollout([]).prompt.uid, step - 1, step)
    steps = iter(Earlier(live.folder, newest))
    assert [r.visit for r in next(steps)] == [3 - ANOTHER_RUN]
    assert len(read) == 3


def test_a_resumed_run_drafts_as_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    settings = {"data.limit": 2, "learner.learning_rate": 3e-3}
    whole = Trainer(small(tmp_path, "whole", **settings)).run().folder
    halves = Trainer(small(tmp_path, "halves", **{**settings, "steps": 2})).run().folder
    Trainer.resume(halves, {"steps": 3}).run()
    assert_same_run(whole, halves)
    names = [
        f"spec/{what}{of}"
        for what in ("drafted", "accepted")
        for of in ("", "/history", "/siblings", "/prompt")
    ]
    a, b = ([{name: line[name] for name in names} for line in metrics(run)] for run in (whole, halves))
    assert a == b
    assert all(a[-1][f"spec/drafted/{source}"] for source in ("history", "siblings"))


def test_a_resumed_run_is_warm_as_well(undisturbed: Path, tmp_path: Path) -> None:
    warm = {"draft.sources": ["history"], "history.warm_from": str(undisturbed)}
    whole = Trainer(small(tmp_path, "whole", **warm)).run().folder
    halves = Trainer(small(tmp_path, "halves", **{**warm, "steps": 1})).run().folder
    Trainer.resume(halves, {"steps": 3}).run()
    drafted = [line["spec/drafted"] for line in metrics(whole)]
    assert [line["spec/drafted"] for line in metrics(halves)] == drafted
    assert all(drafted)


def test_a_damaged_log_costs_drafts_and_nothing_else(
    undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Trainer(small(tmp_path, "damaged", steps=2, **{"checkpoint.keep": 1})).run().folder
    log = folder / "consumed/step-000001.parquet"
    content = bytearray(log.read_bytes())
    content[len(content) // 3] ^= 255
    log.write_bytes(content)
    Trainer.resume(folder, {"steps": 3}).run()
    assert "nothing is drafted from step 1" in caplog.text
    for name in ("model.safetensors", "optimizer/state.safetensors"):
        assert (undisturbed / "latest" / name).read_bytes() == (folder / "latest" / name).read_bytes()


def test_where_nothing_can_be_measured_the_run_can_be_opened_again(tmp_path: Path) -> None:
    changes = {"draft.step_ms": None, "draft.sources": ["history"], "draft.noise_aware": False}
    config = small(tmp_path, "tiny", **changes)
    settled = with_step_ms(config, load_model(config.model), 20, SilentReporter())
    assert settled.draft.budget == "none"
    (tmp_path / "config.toml").write_text(dump_toml(settled))
    assert load_config(tmp_path / "config.toml") == settled


def test_steps_cost_more_with_more_tokens_whatever_was_measured() -> None:
    assert step_costs([[0.001, 0.003, 0.002], [0.002, 0.003, 0.004], [0.001, 0.004, 0.008]]) == [
        1.0,
        3.0,
        4.0,
    ]
    flat = step_costs([[0.0201, 0.02, 0.0199]] * 3)
    assert flat[0] == flat[1] == 20.1 < flat[2] < 20.2


def test_steps_are_measured_where_the_budget_weighs_them(tmp_path: Path) -> None:
    changes = {"draft.step_ms": None, "sampling.max_new_tokens": 40}
    folder = Trainer(small(tmp_path, "measured", **changes)).run().folder
    measured = load_config(folder / "config.toml").draft.step_ms
    assert measured is not None
    assert 0 < measured[0] < measured[-1]
    short = Trainer(small(tmp_path, "short", **{**changes, "engine.max_model_len": 70, "steps": 1}))
    assert load_config(short.run().folder / "config.toml").draft.step_ms is not None


def test_evaluations_ask_for_no_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(config: Config, *arguments: Any) -> EmbeddedEngine:
        asked.append(config.history.alternatives)
        return make_engine(config, *arguments)

    monkeypatch.setattr(evaluation, "make_engine", spy)
    config = small(tmp_path, "evaluated", steps=1, **{"eval.enabled": True, "eval.limit": 2})
    folder = Trainer(config).run().folder
    assert asked == [0, 0]  # before and after
    assert read_rollouts(folder / "consumed/step-000001.parquet")[0].top is not None
