from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import run as stretto
from stretto.engine.responses import Span
from stretto.simulate.chart import page, trace
from stretto.simulate.command import run_candidate, simulate
from stretto.simulate.scenario import Scenario, parse_scenario

COST = {
    "base": 0.01, "per_token": 0.001, "per_context": 0.0, "per_prefill": 0.0,
    "train_base": 5.0, "train_per_token": 0.001, "sync": 2.0,
}  # fmt: skip
SYNCHRONOUS = {"kind": "synchronous", "prompts": 4, "samples": 2}
ASYNC = {"kind": "async", "prompts": 4, "samples": 2, "max_staleness": 1}


def scenario(*schedules: dict[str, Any], **sections: dict[str, Any]) -> Scenario:
    tree: dict[str, Any] = {
        "run": {"steps": 4, "warmup": 0},
        "cluster": {"workers": 2, "slots": 4},
        "cost": COST,
        "workload": {"histogram": [[50.0, 1.0]], "max_new_tokens": 100, "prompt_tokens": 0, "rows": 16},
        "schedule": list(schedules or [SYNCHRONOUS]),
    }
    return parse_scenario(tree | {name: tree.get(name, {}) | keys for name, keys in sections.items()}, Path())


def figures(*schedules: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    built = scenario(*schedules, **sections)
    return run_candidate(built, built.candidates[0])[0]


def test_a_run_without_chance_is_what_one_works_out() -> None:
    """Eight responses of 50 tokens in eight slots: 50 steps of 10 + 4 ms, 5.4 s of training, 2 s of sync."""
    found = figures()
    rollout, training, sync = 50 * 0.014, 5.0 + 8 * 50 * 0.001, 2.0
    assert [u["seconds"] for u in found["updates"]] == pytest.approx(
        [rollout, *3 * [training + sync + rollout]]
    )
    assert (found["responses"], found["tokens"]) == (32, 1600)
    assert found["seconds"] == pytest.approx(4 * rollout + 3 * (training + sync))
    assert found["useful_tokens_per_s"] == pytest.approx(1600 / found["seconds"])
    # While the colocated trainer works no slot is there; during the sync they are, and do nothing.
    assert found["slot_idle"] == pytest.approx(1 - 4 * rollout / (4 * rollout + 3 * sync))
    assert found["device_idle"] == pytest.approx(0.0, abs=1e-9)
    assert (found["staleness_mean"], found["staleness_max"]) == (0.0, 0)


def test_a_separate_trainers_devices_count_and_slots_wait_for_it() -> None:
    found = figures(cluster={"workers": 2, "slots": 4, "trainer": "separate", "trainer_gpus": 6})
    rollout, training, sync = 50 * 0.014, 5.4, 2.0
    assert found["slot_idle"] == pytest.approx(1 - 4 * rollout / found["seconds"])
    busy = 2 * (4 * rollout + 3 * sync) + 6 * 3 * training
    assert found["device_idle"] == pytest.approx(1 - busy / (8 * found["seconds"]))


def test_a_trainer_on_some_of_the_workers_stops_those_only() -> None:
    cluster = {"workers": 2, "slots": 4, "trainer": "colocated", "shared_workers": 1}
    found = figures(cluster=cluster)
    rollout, training, sync = 50 * 0.014, 5.4, 2.0
    available = 2 * found["seconds"] - 3 * training
    assert found["slot_idle"] == pytest.approx(1 - 8 * rollout / available)
    busy = 2 * (4 * rollout + 3 * sync) + 3 * training
    assert found["device_idle"] == pytest.approx(1 - busy / (2 * found["seconds"]))


def test_the_warm_up_is_left_out() -> None:
    found = figures(run={"steps": 4, "warmup": 2})
    assert (found["steps"], found["responses"]) == (2, 16)
    assert found["step_seconds"] == pytest.approx(0.7 + 5.4 + 2.0)


def test_overlapping_is_faster_and_stale() -> None:
    cluster = {"workers": 2, "slots": 4, "trainer": "separate", "trainer_gpus": 2}
    workload = {"histogram": [[50.0, 0.8], [400.0, 0.2]], "max_new_tokens": 400}
    built = scenario(SYNCHRONOUS, ASYNC, cluster=cluster, workload=workload, run={"steps": 10})
    results = simulate(built, lambda _: None)
    assert results["async"]["useful_tokens_per_s"] > 1.2 * results["synchronous"]["useful_tokens_per_s"]
    assert 0 < results["async"]["staleness_max"] <= 1


def test_dropped_tokens_come_back_as_drafts_unless_redrawn() -> None:
    workload = {"histogram": [[20.0, 0.9], [300.0, 0.1]], "max_new_tokens": 1000}
    cost = {"agreement": 1.0, "train_base": 0.1, "train_per_token": 0.0, "sync": 0.0}
    both = [ASYNC | {"name": name, "redraw": name == "redrawn"} for name in ("refreshed", "redrawn")]
    cluster = {"workers": 1, "slots": 16, "trainer": "separate", "trainer_gpus": 1}
    results = simulate(
        scenario(*both, workload=workload, cost=cost, cluster=cluster, run={"steps": 60}), lambda _: None
    )
    assert results["refreshed"]["refreshes"] > 0
    assert results["refreshed"]["reverified_tokens_per_s"] > 0
    assert results["refreshed"]["discarded_tokens_per_s"] < 0.1 * results["redrawn"]["discarded_tokens_per_s"]
    assert results["refreshed"]["tokens"] > results["redrawn"]["tokens"]  # of as many responses


def test_what_is_redrawn_gets_another_length_so_short_responses_win() -> None:
    """Refreshed responses keep their lengths: a load's tokens are the workload's. Redrawn ones are rather short."""
    sorted_ = {
        "kind": "sorted",
        "prompts": 8,
        "samples": 1,
        "unit": "response",
        "max_staleness": 0,
        "load_prompts": 8,
    }
    workload = {"lognormal": [100.0, 1.0], "histogram": "none", "max_new_tokens": 2000, "rows": 64}
    cost = {"train_base": 0.0, "train_per_token": 0.0, "sync": 0.0}
    built = scenario(
        {"kind": "synchronous", "prompts": 8, "samples": 1},
        sorted_,
        sorted_ | {"name": "redrawn", "redraw": True},
        workload=workload, cost=cost, run={"steps": 8}, cluster={"workers": 1, "slots": 32},
    )  # fmt: skip
    results = simulate(built, lambda _: None)
    assert results["sorted"]["tokens"] == results["synchronous"]["tokens"]
    assert results["redrawn"]["tokens"] < 0.8 * results["sorted"]["tokens"]
    assert results["redrawn"]["reverified_tokens_per_s"] == 0 < results["sorted"]["reverified_tokens_per_s"]


def test_drafts_are_faster_from_the_visit_on_that_has_them() -> None:
    drafts = {"tokens_per_step": [1.0, 2.0], "nodes": 0.0}
    plain = figures(SYNCHRONOUS, workload={"rows": 4}, drafts=drafts)
    drafted = figures(SYNCHRONOUS | {"drafts": True}, workload={"rows": 4}, drafts=drafts)
    assert drafted["updates"][0]["engine_steps"] == plain["updates"][0]["engine_steps"]
    # The first step gives one token of 50, the others two.
    assert drafted["updates"][1]["engine_steps"] == plain["updates"][1]["engine_steps"] * 26 / 50
    known = figures(SYNCHRONOUS | {"drafts": True}, workload={"rows": 4, "history": 1}, drafts=drafts)
    assert known["updates"][0]["engine_steps"] == drafted["updates"][1]["engine_steps"]


def test_rewards_take_their_time() -> None:
    found = figures(cost={"reward": 3.0})
    assert found["updates"][0]["seconds"] == pytest.approx(0.7 + 3.0)
    spread = figures(cost={"reward": 3.0, "reward_sigma": 0.5})
    assert spread["updates"][0]["seconds"] > 3.7


def test_a_worker_that_fails_and_comes_back_loses_nothing() -> None:
    found = figures(cluster={"failures": [[0.2, 1]], "arrivals": [[30.0, 1]]})
    assert (found["responses"], found["tokens"]) == (32, 1600)
    # Its four responses had 15 tokens; the other worker makes the rest after its own.
    assert found["updates"][0]["seconds"] == pytest.approx(0.7 + 35 * 0.014)


def test_the_same_seed_gives_the_same_figures() -> None:
    workload = {"lognormal": [60.0, 1.0], "histogram": "none"}
    first, second, other = (
        figures(ASYNC, workload=workload, run={"steps": 4, "seed": seed})["updates"] for seed in (3, 3, 4)
    )
    assert first == second
    assert first != other


class TestCharts:
    def test_a_trace_has_every_response_and_update(self) -> None:
        spans = [Span(1, 2, 0.5, 2.0, 7, 30, "stop")]
        events = json.loads(trace(spans, [(2.0, 3.0)]))
        shown = [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
        assert shown == [("update 0", 1_000_000, 0, 2e6, 1e6), ("request 7", 1, 2, 0.5e6, 1.5e6)]

    def test_a_page_holds_the_spans_and_fetches_nothing(self) -> None:
        text = page("a <title>", [("one</script>", [Span(0, 1, 0.0, 1.0, 5, 9, "length")], [(1.0, 2.0)], 4)])
        assert "a &lt;title&gt;" in text
        assert not re.search(r"(src|href)\s*=|https?:", text)
        assert text.count("</script>") == 1
        (chart,) = json.loads(re.search(r"const DATA = (.*);\n", text)[1])  # type: ignore[index]
        assert chart["spans"] == [[0, 1, 0.0, 1.0, 5, 9, "length"]]


class TestCommand:
    def write(self, folder: Path) -> Path:
        path = folder / "s.toml"
        path.write_text(
            "[run]\nsteps = 2\n[cluster]\nworkers = 1\nslots = 8\n[cost]\npreset = '7b-h100'\n"
            "[workload]\nhistogram = [[30.0, 1.0]]\n[[schedule]]\nname = 'a/b'\nprompts = 2\nsamples = 2\n"
        )
        return path

    def test_prints_a_table_and_writes_charts(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert stretto(["simulate", str(self.write(tmp_path)), "--charts", str(tmp_path / "c")]) == 0
        assert "a/b" in capsys.readouterr().out
        assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["a_b.trace.json", "gantt.html"]
        assert len(json.loads((tmp_path / "c" / "a_b.trace.json").read_text())) > 8

    def test_prints_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert stretto(["simulate", str(self.write(tmp_path)), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["a/b"]
        assert found["responses"] == 4
        assert found["simulation_us_per_response"] > 0

    def test_says_what_is_wrong(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert stretto(["simulate", str(tmp_path / "no.toml"), "--json"]) == 2
        assert "no.toml" in json.loads(capsys.readouterr().out)["error"]
        assert stretto(["simulate", "x.toml", "--calibrate", str(tmp_path), "--json"]) == 2
