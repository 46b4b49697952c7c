"""Reporters: JSON lines, plain lines, and the live view at any width."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from stretto.config import load_config
from stretto.observe.live import LiveReporter, cells_of, sparkline
from stretto.observe.progress import (
    Eta,
    JsonReporter,
    PlainReporter,
    Reporter,
    SilentReporter,
    duration,
    open_reporter,
    time_split,
)

STEP: dict[str, Any] = {
    "step": 1,
    "reward/mean": 0.4567,
    "response_length/mean": 131.4,
    "response_length/p50": 90.0,
    "response_length/p99": 480.0,
    "response_length/max": 512.0,
    "throughput/useful_tokens_per_s": 4211.3,
    "rollout/bubble_ratio": 0.312,
    "spec/mean_acceptance_length": math.nan,
    "time/rollout": 3.0,
    "time/reward": 0.0,
    "time/update": 1.0,
    "time/sync": 0.0,
    "time/total": 4.0,
}
EVALUATION = {
    "eval/accuracy": 0.4123,
    "eval/accuracy/low": 0.365,
    "eval/accuracy/high": 0.46,
    "eval/prompts": 400,
    "eval/response_length/mean": 130.0,
    "eval/response_length/p99": 480.0,
    "eval/reward/timeouts": 2,
}


def play(reporter: Reporter, steps: int = 3) -> None:
    reporter.start(load_config(), 24, "runs/demo-1")
    reporter.evaluation("step 0", EVALUATION)
    for step in range(1, steps + 1):
        reporter.rollout(77, 128, 9000)
        reporter.step({**STEP, "step": step})
    reporter.message("a message")
    reporter.rollout(77, 128, 9000)


def test_json_is_one_object_per_line_without_nan() -> None:
    stream = io.StringIO()
    reporter = JsonReporter(stream)
    play(reporter)
    reporter.close()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == [
        "start",
        "evaluation",
        "step",
        "step",
        "step",
        "message",
        "end",
    ]
    assert lines[0]["config"]["data"]["task"] == "knights"
    assert (lines[2]["reward/mean"], lines[2]["spec/mean_acceptance_length"]) == (0.4567, None)


def test_plain_is_one_line_per_step() -> None:
    stream = io.StringIO()
    play(PlainReporter(stream))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("runs/demo-1 · demo · knights · 24 steps")
    assert lines[1] == (
        "evaluation step 0: accuracy 41.2% (95% interval 36.5% to 46.0%, 400 prompts)  length 130 (p99 480)  "
        "2 responses without a reward"
    )
    assert lines[2] == (
        "step  1/24  reward 0.457  length 131 (p99 480)  4,211 tokens/s  "
        "4.0 s (rollout 75%  reward 0%  update 25%  sync 0%)  eta 1:32"
    )
    assert lines[5] == "a message"


def test_responses_without_a_reward_are_shown_at_every_step_that_has_any() -> None:
    reporter = PlainReporter(io.StringIO())
    reporter.start(load_config(), 3)
    reporter.step({**STEP, "reward/mean": math.nan, "reward/errors": 5, "reward/timeouts": 1})
    assert "reward –  (6 responses without)  length" in reporter._stream.getvalue()  # type: ignore[attr-defined]


def test_what_drafts_brought_is_shown_where_there_were_any() -> None:
    step = {**STEP, "spec/drafted": 200, "spec/accepted": 150, "spec/mean_acceptance_length": 2.345}
    step |= {"spec/time_share": 0.043, "spec/accepted/siblings": 30, "spec/accepted/history": 120}
    step |= {"spec/accepted/prompt": 0}
    plain, live, drawn = PlainReporter(io.StringIO()), LiveReporter(io.StringIO(), width=100), io.StringIO()
    for reporter in (plain, live):
        reporter.start(load_config(), 3)
        reporter.step(step)
    Console(file=drawn, width=100).print(live.render())
    live.close()
    gave = "2.35 tokens at a time, drafting 4% of the rollout"
    said = f"4,211 tokens/s  (75.0% of drafts right, {gave})  4.0 s"
    assert said in plain._stream.getvalue()  # type: ignore[attr-defined]
    (line,) = [line for line in drawn.getvalue().splitlines() if line.startswith("drafts")]
    assert line.split(maxsplit=2)[1:] == ["75.0%", f"{gave}  history 80%  siblings 20%"]


def test_a_run_without_drafts_shows_none() -> None:
    live, drawn = LiveReporter(io.StringIO(), width=100), io.StringIO()
    live.start(load_config(), 3)
    live.step({**STEP, "spec/drafted": 0, "spec/accepted": 0})
    Console(file=drawn, width=100).print(live.render())
    live.close()
    assert "tokens/s" in drawn.getvalue()
    assert "draft" not in drawn.getvalue()


def test_missing_figures_are_dashes() -> None:
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    reporter.start(load_config(), 3)
    reporter.step({"step": 1, "reward/mean": math.nan})
    assert "reward –  length – (p99 –)" in stream.getvalue()


def test_the_stream_decides() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(open_reporter(stream=io.StringIO()), PlainReporter)
    assert isinstance(open_reporter(stream=Terminal()), LiveReporter)
    assert isinstance(open_reporter(as_json=True, stream=Terminal()), JsonReporter)


def test_silence() -> None:
    reporter = SilentReporter()
    play(reporter)
    reporter.close()


@pytest.mark.parametrize("width", [10, 20, 34, 60, 80, 100, 200])
def test_the_live_view_fits_any_width(width: int) -> None:
    reporter = LiveReporter(io.StringIO(), width=width)
    play(reporter)
    drawn = io.StringIO()
    Console(file=drawn, width=width, force_terminal=False).print(reporter.render())
    reporter.close()
    lines = drawn.getvalue().splitlines()
    assert max(cell_len(line) for line in lines) <= width
    assert len(lines) <= 14  # nothing wraps


def test_the_live_view_says_what_matters() -> None:
    reporter = LiveReporter(io.StringIO(), width=100)
    play(reporter, steps=8)
    drawn = io.StringIO()
    Console(file=drawn, width=100).print(reporter.render())
    reporter.close()
    text = drawn.getvalue()
    for expected in (
        "8/24",
        "eta 1:04",
        "77/128",
        "9,000 tokens",
        "0.457",
        "4,211",
        "slots idle 31%",
        "rollout 75%",
    ):
        assert expected in text
    steps = [line.split()[0] for line in text.splitlines()[-5:]]
    assert steps == ["4", "5", "6", "7", "8"]


def test_an_evaluation_by_itself_shows_no_steps() -> None:
    stream = io.StringIO()
    reporter = LiveReporter(stream, width=80)
    reporter.rollout(3, 400, 77)
    drawn = io.StringIO()
    Console(file=drawn, width=80).print(reporter.render())
    reporter.close()
    assert "3/400" in drawn.getvalue()
    assert "step" not in drawn.getvalue()


@given(st.lists(st.floats(-1e6, 1e6), max_size=60), st.integers(1, 40))
def test_a_curve_is_as_wide_as_there_is_room(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_a_curve_goes_from_low_to_high() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1, 5, 5], 2) == "▁█"
    assert sparkline([3.0, 3.0], 9) == "▄▄"


@given(st.lists(st.floats(0, 100), min_size=4, max_size=4))
def test_time_shares_add_up_and_fill_the_bar(seconds: list[float]) -> None:
    shares = time_split(
        {
            f"time/{name}": value
            for name, value in zip(("rollout", "reward", "update", "sync"), seconds, strict=True)
        }
    )
    if sum(seconds) == 0:
        assert shares == {}
        return
    assert sum(shares.values()) == pytest.approx(1)
    assert sum(cells_of(shares, 20).values()) == 20


def test_the_remaining_time_follows_the_last_steps() -> None:
    eta = Eta()
    assert eta.seconds(3) is None
    for total in [10.0] + [2.0] * 20:
        eta.add({"time/total": total})
    assert eta.seconds(10) == pytest.approx(20, rel=0.01)


def test_durations_are_short() -> None:
    assert [duration(s) for s in (None, 7, 72, 7509.4)] == ["–", "0:07", "1:12", "2:05:09"]
