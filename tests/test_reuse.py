"""A run that keeps prefixes of the last visit's responses: the same under drafts and restarts, off where it is off."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from stretto.config import load_config
from stretto.config.checks import warnings
from stretto.errors import StrettoError
from stretto.history.log import read_rollouts
from stretto.trainer import Trainer
from studies import reuse as study
from studies.cells import table
from tests.test_drafting import damage
from tests.test_trainer import assert_same_run, metrics, small

PREFIX: dict[str, Any] = {"reuse.kind": "prefix", "data.limit": 2, "learner.learning_rate": 3e-3}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Trainer(small(tmp_path_factory.mktemp("runs"), "undisturbed", **PREFIX)).run().folder


def test_from_the_second_visit_on_prefixes_are_kept(undisturbed: Path) -> None:
    lines = metrics(undisturbed)
    assert lines[0]["reuse/kept_tokens"] == 0
    assert lines[0]["reuse/skip_ratio"] is None
    for step in (2, 3):
        before, after = (
            read_rollouts(undisturbed / f"consumed/step-{s:06}.parquet") for s in (step - 1, step)
        )
        names = [{(r.prompt.row, r.sample_index): r.token_ids.tolist() for r in rs} for rs in (before, after)]
        shared = [common(names[0][name], tokens) for name, tokens in names[1].items()]
        line = lines[step - 1]
        assert 0 < line["reuse/kept_tokens"] <= sum(shared)
        assert line["reuse/mean_kept"] == line["reuse/kept_tokens"] / len(shared)
        assert 0 <= line["reuse/skip_ratio"] < 1


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_drafts_change_nothing(undisturbed: Path, tmp_path: Path) -> None:
    plain = Trainer(small(tmp_path, "plain", **PREFIX, **{"draft.budget": "none"})).run().folder
    assert_same_run(undisturbed, plain)
    for a, b in zip(metrics(undisturbed), metrics(plain), strict=True):
        assert [a[f"reuse/{name}"] for name in ("kept_tokens", "skip_ratio", "mean_kept")] == [
            b[f"reuse/{name}"] for name in ("kept_tokens", "skip_ratio", "mean_kept")
        ]


def test_a_resumed_run_is_the_same(undisturbed: Path, tmp_path: Path) -> None:
    halves = Trainer(small(tmp_path, "halves", **{**PREFIX, "steps": 2})).run().folder
    Trainer.resume(halves, {"steps": 3}).run()
    assert_same_run(undisturbed, halves)


def test_without_lenience_and_with_endless_lenience(tmp_path: Path) -> None:
    none = Trainer(small(tmp_path, "none", **{**PREFIX, "reuse.kind": "none"})).run().folder
    nothing = Trainer(small(tmp_path, "nothing", **PREFIX, **{"reuse.lenience": 0.0})).run().folder
    assert_same_run(none, nothing)
    endless = {**PREFIX, "reuse.lenience": 1e300, "reuse.residual": True}
    everything = Trainer(small(tmp_path, "everything", **endless)).run().folder
    first, *later = (
        [
            r.token_ids.tolist()
            for r in sorted(read_rollouts(file), key=lambda r: (r.prompt.row, r.sample_index))
        ]
        for file in sorted((everything / "consumed").glob("*.parquet"))
    )
    assert later == [first, first]
    assert [line["reuse/skip_ratio"] for line in metrics(everything)] == [None, 1.0, 1.0]


def test_a_damaged_log_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(undisturbed, folder, symlinks=True)
    log = folder / "consumed/step-000001.parquet"
    damage(log, "prompt_uid")  # it cannot be told whose responses are in there
    with pytest.raises(
        StrettoError, match=r'(?s)step-000001.*reuse\.kind = "prefix" takes responses from there'
    ):
        Trainer.resume(folder, {"steps": 4}).run()


def test_bad_settings_and_warnings(tmp_path: Path) -> None:
    for value in (-0.1, math.inf, math.nan):
        with pytest.raises(StrettoError, match=r"reuse\.lenience"):
            small(tmp_path, "bad", **{"reuse.lenience": value})
    assert any("not fresh draws" in said for said in warnings(small(tmp_path, "prefix", **PREFIX)))
    assert not any("reuse" in said for said in warnings(load_config("demo", {})))
    bare = small(tmp_path, "bare", **PREFIX, **{"reuse.residual": True, "history.alternatives": 0})
    assert any("history.alternatives = 0" in said for said in warnings(bare))


class TestStudy:
    def test_figures_of_a_run(self, undisturbed: Path) -> None:
        found = study.measure(undisturbed)
        lines = metrics(undisturbed)
        assert found["updates"] == 3
        assert found["kept_share"] == pytest.approx(
            sum(line["reuse/kept_tokens"] for line in lines)
            / (found["sampled_tokens"] / (1 - found["kept_share"]))
        )
        assert (
            found["reward"] == lines[-1]["reward/mean"]
        )  # two rows are one update: the last visit is the last
        assert found["entropy"] == lines[-1]["policy/entropy"]
        assert found["accuracy"] is None

    def test_diversity(self) -> None:
        found = study.diversity([[[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], [[1, 2, 3, 4], [2, 3, 4, 5], [9]]])
        assert found["distinct_responses"] == pytest.approx((1 / 2 + 1) / 2)
        assert found["distinct_4grams"] == pytest.approx((2 / 4 + 1) / 2)

    def test_table(self) -> None:
        figures = {name: 1.0 for name in study.COLUMNS if name != "speed"}
        cells = [
            {**figures, "arm": mode, "seed": seed, "rollout_seconds": seconds, "accuracy": accuracy}
            for mode, seed, seconds, accuracy in (
                ("exact", 0, 8.0, 0.5),
                ("exact", 1, 6.0, 0.7),
                ("prefix, lenience 1", 0, 4.0, None),
                ("prefix, lenience 1", 1, 2.0, None),
            )
        ]
        head, _, exact, prefix = table(study.with_speed(cells), study.COLUMNS, "mode").splitlines()
        titles = head.split(" | ")
        assert exact.split(" | ")[1] == "1.00 (1.00 to 1.00)"
        assert prefix.split(" | ")[1:3] == ["2.50 (2.00 to 3.00)", "3.0 (2.0 to 4.0)"]
        place = titles.index("held-out accuracy")
        assert (exact.split(" | ")[place], prefix.split(" | ")[place]) == ("0.600 (0.500 to 0.700)", "")

    def test_cells_are_not_run_again(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        figures = {name: 1.0 for name in study.COLUMNS if name != "speed"}
        (tmp_path / "cells").mkdir()

        def keep(seed: int, keys: list[str]) -> None:
            cell = {**figures, "arm": "exact", "seed": seed, "keys": keys}
            (tmp_path / f"cells/exact-{seed}.json").write_text(json.dumps(cell))

        keep(0, [])
        words = ["--results", str(tmp_path), "--modes", "exact"]
        study.main([*words, "--seeds", "1"])
        assert (tmp_path / "table.md").read_text() == capsys.readouterr().out
        keep(1, ["--steps", "1"])
        with pytest.raises(SystemExit, match=r"exact-1\.json was run with other keys"):
            study.main([*words, "--seeds", "2"])
