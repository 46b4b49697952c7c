from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.alternatives import Alternatives
from stretto.bench.arctic import ArcticDrafter, arctic
from stretto.bench.draft import ALL, BestPath, bars, by_weight, main, ours
from stretto.bench.draft_matrix import REPLACED, SHORT, Cell, geometric_means, matrix, step_cost, workload
from stretto.bench.draft_noise import KNOWLEDGE, by_noise
from stretto.bench.draft_speed import (
    ALTERNATIVES,
    GROUP,
    LIVE,
    SAMPLES,
    Race,
    fill,
    new_drafter,
    speed,
    synthesised,
    with_alternatives,
)
from stretto.bench.recorded import EXCERPT, Recorded, read
from stretto.bench.replay import replay
from stretto.draft.budget import Batch, Fixed, NoDrafts
from stretto.errors import StrettoError
from stretto.history.log import write_rollouts
from stretto.records import Prompt, Rollout, State, prompt_uid
from stretto.sampling import gumbel
from tests.draft.trees import forest

BATCH = Batch(np.arange(2), np.zeros(2, np.int64), 2)


@pytest.fixture(scope="module")
def excerpt() -> Recorded:
    return read(EXCERPT).thinned(24)


def test_best_path_keeps_first_children_only() -> None:
    # Nodes of the first tree: 0 and 2 below the root, 1 and 3 below 0, 4 below 1; of the second: 0, then 1 below it.
    drafts = forest([[(-1, 60), (0, 50), (-1, 40), (0, 30), (1, 20)], [(-1, 60), (0, 50)]])
    assert BestPath(8).choose(drafts, BATCH).tolist() == [True, True, False, False, True, True, True]
    assert BestPath(1).choose(drafts, BATCH).tolist() == [True, False, False, False, False, True, False]


class TestExcerpt:
    def test_drafting_shortens_it_and_no_drafts_do_not(self, excerpt: Recorded) -> None:
        plain = replay(ours(excerpt, NoDrafts(), 4), excerpt.targets, 8)
        assert (plain.tokens_per_step, plain.drafted) == (1.0, 0)
        drafted = replay(ours(excerpt, Fixed(16), 16), excerpt.targets, 8)
        assert drafted.tokens == plain.tokens
        assert drafted.tokens_per_step > 1.3

    def test_more_nodes_and_more_sources_accept_more(self, excerpt: Recorded) -> None:
        def tokens_per_step(nodes: int, *sources: str) -> float:
            return replay(
                ours(excerpt, Fixed(nodes), nodes, sources=sources), excerpt.targets, 8
            ).tokens_per_step

        assert tokens_per_step(16, "history") > tokens_per_step(2, "history")
        assert tokens_per_step(16, "history", "siblings") > tokens_per_step(16, "history")

    def test_weights_that_need_log_probs_visits_or_keys_are_left_out(self, excerpt: Recorded) -> None:
        rows = by_weight(excerpt.thinned(3))
        assert [(row["weight"], row["noise_aware"]) for row in rows] == [("count", False), ("reward", False)]

    def test_prints_one_object(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--targets", "6", "--parts", "acceptance", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["history"], found["target"], found["targets"]) == ("base", "rl_games_500", 6)
        assert len(found["sources"]) == 15
        assert all(row["tokens_per_step"] >= 1 for row in found["sources"] + found["weights"])

    def test_prints_tables(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--targets", "3", "--parts", "budgets"]) == 0
        printed = capsys.readouterr().out
        assert "batch 64  goodput" in printed
        assert "batch  8  aimd, multiplicative" in printed
        assert "batch  1  none" in printed


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The log of a run whose every token was drawn from three, evenly, by its key: at two visits."""
    ids, logprobs = np.array([10, 11, 12]), np.full(3, np.log(1 / 3))
    prompt = Prompt(0, prompt_uid(np.array([1])), 0, np.array([1]), {})
    (tmp_path / "rollouts").mkdir()
    for visit in range(2):
        rollouts = []
        for sample in range(8):
            key = 1 + 8 * visit + sample
            noise = gumbel(np.array([key], np.uint64), np.arange(30)[:, None], ids)
            tokens = ids[noise.argmax(axis=1)]
            top = Alternatives(
                np.tile(ids, (30, 1)).astype(np.int32), np.tile(logprobs, (30, 1)).astype(np.float32)
            )
            same = np.full(30, logprobs[0])
            rollouts.append(
                Rollout(
                    key,
                    visit,
                    prompt,
                    sample,
                    visit,
                    key,
                    tokens,
                    same,
                    same,
                    np.zeros(30, np.int64),
                    np.ones(30, np.bool_),
                    outcome=State.CONSUMED,
                    top=top,
                )
            )
        write_rollouts(tmp_path / "rollouts" / f"step-00000{visit + 1}.parquet", rollouts, step=visit + 1)
    return tmp_path


class TestNoise:
    def test_who_knows_noise_and_alternatives_is_right_where_counts_guess(self, run_folder: Path) -> None:
        recorded = read(run_folder)
        assert recorded.noise_known
        rows = by_noise(recorded, 8, (("history",),))
        found = {(row["known"], row["nodes"]): row["tokens_per_step"] for row in rows}
        assert len(found) == 9
        for nodes in (1, 4, 16):
            counts, noise, both = (found[known.name, nodes] for known in KNOWLEDGE)
            assert 1.0 < counts < both
            assert noise < both
        assert found["noise, with alternatives", 1] > 1.8  # two tokens a step are the most
        assert {row["nodes"]: row["limit"] for row in rows}[1] == 2.0

    def test_is_printed_for_a_run_and_left_out_where_nothing_is_known(
        self, run_folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--rollouts", str(run_folder), "--parts", "noise"]) == 0
        assert "noise, with alternatives" in capsys.readouterr().out
        assert main(["--targets", "3", "--parts", "noise"]) == 0
        assert "noise" not in capsys.readouterr().out


class TestMatrix:
    def test_cells_are_what_they_are_called(self, excerpt: Recorded) -> None:
        short = workload(excerpt, Cell(1, "short", "low"))
        assert max(r.token_ids.size for r in short.targets) == SHORT
        assert short.history == excerpt.thinned(4).history
        high = workload(excerpt, Cell(1, "long-tailed", "high"))
        assert [r.token_ids.size for r in high.history] == [r.token_ids.size for r in high.targets]
        changed = np.concatenate(
            [h.token_ids != t.token_ids for h, t in zip(high.history, high.targets, strict=True)]
        )
        assert 0 < changed.mean() < 2 * REPLACED

    def test_is_the_same_every_time_and_speedups_are_against_no_drafts(self, excerpt: Recorded) -> None:
        rows = matrix(excerpt.thinned(3), batches=(1,))
        assert rows == matrix(excerpt.thinned(3), batches=(1,))
        assert [(row["lengths"], row["acceptance"]) for row in rows] == [
            ("short", "low"), ("short", "high"), ("long-tailed", "low"), ("long-tailed", "high")
        ]  # fmt: skip
        for row in rows:
            assert row["speedups"]["none"] == 1.0
            assert row["speedups"][row["best_fixed"]] == max(
                value for name, value in row["speedups"].items() if name == "none" or name.startswith("fixed")
            )
        assert all(row["speedups"]["goodput"] > 1.5 for row in rows if row["acceptance"] == "high")
        assert geometric_means(rows)["none"] == 1.0

    def test_step_cost_is_the_stated_curve(self) -> None:
        assert step_cost().seconds(np.array([1, 64, 544])).tolist() == pytest.approx([0.084, 0.240, 1.154])


class TestSpeed:
    def test_histories_have_the_size_asked_for(self, excerpt: Recorded) -> None:
        history, targets = synthesised(excerpt, 20_000)
        made = sum(r.token_ids.size for r in history)
        assert 20_000 <= made < 20_000 + SAMPLES * 2_100
        prompts = [r.prompt.uid for r in history]
        assert all(prompts.count(uid) == SAMPLES for uid in set(prompts))
        assert len(set(prompts)) == len({r.prompt.row for r in history})
        assert len(targets) == LIVE
        assert {r.prompt.uid for r in targets} <= set(prompts)
        assert len({r.group_id for r in targets}) == min(LIVE // GROUP, len(set(prompts)))

    def test_race_takes_all_requests_on_step_by_step(self, excerpt: Recorded) -> None:
        history, targets = synthesised(excerpt, 5_000)
        drafter = new_drafter()
        rates, none = fill(drafter, None, history)
        assert rates
        assert none == []
        race = Race(drafter, None, targets)
        times = race.blocks(20)
        assert times[:, :2].min() > 0
        assert times[:, 2:].max() == 0
        assert race.steps == 20
        assert 0 < race.proposed[0] <= 20 * LIVE * 10
        assert race.begun >= LIVE


def test_the_default_drafter_is_measured_beside_the_one_by_counts(excerpt: Recorded) -> None:
    history, _ = synthesised(excerpt, 3_000)
    tops = [rollout.top for rollout in with_alternatives(history)]
    assert all(top is not None and top.width == ALTERNATIVES for top in tops)
    found = speed(excerpt, 3_000, 1)
    assert found["default"].keys() == found["ours"].keys()
    assert (
        found["default"]["bytes_per_token"] > found["ours"]["bytes_per_token"] + 4 + 6
    )  # a probability, and rows


def test_bars_that_are_not_met_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value, status in ((0.5, 0), (1.6, 1)):
        grown = {"growth": {"few": 1, "many": 2, "ratio": {"median": value}}}
        monkeypatch.setattr("stretto.bench.draft.measure", lambda options, recorded, grown=grown: grown)
        assert main(["--targets", "3", "--parts", "budgets", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["bars"][0]["met"] == (status == 0)


def test_bars_say_what_is_met() -> None:
    found: dict[str, Any] = {
        "sources": [{"sources": ALL, "tree": "16 nodes", "tokens_per_step": 3.0}],
        "path of 16": {"tokens_per_step": 1.9},
        "arctic": [
            {"nodes": 16, "shape": "path", "caches": "one", "limits": "vLLM's", "tokens_per_step": 2.0},
            {"nodes": 16, "shape": "tree", "caches": "one", "limits": "vLLM's", "tokens_per_step": 9.0},
        ],
        "growth": {"few": 1, "many": 2, "ratio": {"median": 1.2}},
        "matrix": [
            {"speedups": {"none": 1.0, "fixed 4": 2.0, "goodput": 2.2}, "of_best_fixed": 1.1},
            {"speedups": {"none": 1.0, "fixed 4": 1.0, "goodput": 0.9}, "of_best_fixed": 0.9},
        ],
    }
    assert [met for _, _, _, met in bars(found)] == [False, True, True, False, False]
    values = [value for _, value, _, _ in bars(found)]
    assert values == pytest.approx([0.95, 1.5, 1.2, 0.9, (2.2 * 0.9 / 2.0) ** 0.5])


@pytest.mark.skipif(arctic() is not None, reason="arctic_inference is installed")
def test_arctic_where_it_is_not_installed() -> None:
    with pytest.raises(StrettoError, match="pip install"):
        ArcticDrafter(nodes=8)


@pytest.mark.skipif(arctic() is None, reason="arctic_inference is not installed")
@pytest.mark.parametrize("per_prompt", [False, True])
@pytest.mark.parametrize("tree", [False, True])
def test_arctic_drafts_the_same_targets(excerpt: Recorded, per_prompt: bool, tree: bool) -> None:
    drafter = ArcticDrafter(nodes=8, per_prompt=per_prompt, tree=tree)
    drafter.remember(excerpt.history)
    found = replay(drafter, excerpt.targets, 8)
    assert found.tokens == sum(r.token_ids.size for r in excerpt.targets)
    assert found.tokens_per_step > 1.3
    assert drafter.nbytes > 0
