"""`stretto show`: the summary of a run, a step's responses, a prompt's visits."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from stretto import show
from stretto.cli import run
from stretto.config import dump_toml, load_config
from stretto.errors import StrettoError
from stretto.records import FinishReason, Prompt, Rollout, State
from stretto.run_folder import RunFolder

STEPS, PROMPTS, SAMPLES = 20, 2, 3


def rollout(step: int, row: int, sample: int) -> Rollout:
    length = 3 + sample
    return Rollout(
        request_id=100 * step + 10 * row + sample,
        group_id=10 * step + row,
        prompt=Prompt(row, f"uid{row}-abc", 0, np.array([7, 8 + row]), {}),
        sample_index=sample,
        visit=step - 1,
        key=1,
        token_ids=np.arange(length) + 100 * step,
        logprobs=np.zeros(length),
        raw_logprobs=np.zeros(length),
        versions=np.full(length, step - 1),
        loss_mask=np.ones(length, dtype=bool),
        reward=float(sample > 0),
        finish_reason=FinishReason.LENGTH if sample == 2 else FinishReason.STOP,
        outcome=State.CONSUMED,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "one"
    with RunFolder.create(path, dump_toml(load_config(None, {"steps": 24}))) as run:
        run.append_metrics(
            {"step": 0, "eval/accuracy": 0.4, "eval/accuracy/low": 0.3, "eval/accuracy/high": 0.5}
        )
        for step in range(1, STEPS + 1):
            rollouts = [rollout(step, row, sample) for row in range(PROMPTS) for sample in range(SAMPLES)]
            run.log_step(step, rollouts, rollouts)
            run.append_metrics({"step": step, "reward/mean": step / 100, "time/total": 5.0})
    return path


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are shown as words `t7`; no model is loaded."""

    def decode(ids: Iterable[int]) -> str:
        return " ".join(f"t{i}" for i in ids)

    monkeypatch.setattr(show, "decoder", lambda path: decode)


def printed(path: Path, step: int | None = None, prompt: str | None = None, width: int = 100) -> str:
    out = io.StringIO()
    show.show(path, step, prompt, console=Console(file=out, width=width, highlight=False))
    return out.getvalue()


def test_a_narrow_terminal_gets_whole_columns_and_is_told_which_are_left_out(folder: Path) -> None:
    def titles(text: str) -> list[str]:
        return next(line for line in text.splitlines() if line.split()[:1] == ["step"]).split()

    whole = titles(printed(folder, width=show.PIPED))
    assert "left out" not in printed(folder, width=show.PIPED)
    narrow = printed(folder, width=18)
    assert titles(narrow) == ["step", "reward"]
    assert whole == ["step", "reward", "seconds"]
    assert all(len(line) <= 18 for line in narrow.splitlines())
    assert "left out, as the terminal is narrow: seconds" in " ".join(narrow.split())


def test_the_summary_is_complete_for_a_program(folder: Path) -> None:
    found = show.summary(folder)
    assert (found["steps"], found["total_steps"], found["checkpoints"]) == (STEPS, 24, [])
    assert len(found["metrics"]) == STEPS + 1


def test_the_summary_says_how_many_responses_had_no_reward(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", dump_toml(load_config(None, {"steps": 3}))) as run:
        run.append_metrics({"step": 1, "reward/mean": None, "reward/errors": 5, "reward/timeouts": 1})
        run.append_metrics({"step": 2, "reward/mean": 0.5, "reward/errors": 2})
        run.append_metrics({"step": 3, "reward/mean": 0.5})
    text = printed(tmp_path / "run")
    assert "8 responses had no usable reward; in 1 of 3 steps no response had one" in text


def test_the_summary_fits_a_screen(folder: Path) -> None:
    text = printed(folder)
    assert "0.010 to 0.200" in text
    assert "evaluation step 0: accuracy 40.0%" in text
    assert f"20 of 24 steps, goes on with: stretto resume {folder}" in text.replace("\n", " ").replace(
        "  ", " "
    )
    table = [line.split()[0] for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert table[0] == "1"
    assert str(STEPS) in table
    assert len(text.splitlines()) < 24


def test_a_step_shows_its_groups(folder: Path, words: None) -> None:
    text = printed(folder, step=2)
    assert "step 2 · prompt uid0-abc · visit 1 · mean reward 0.667" in text
    assert "t7 t8" in text
    assert "[2] 1.000  5 tokens (cut off by its limit)  t200 t201 t202 t203 t204" in text


def test_a_prompt_shows_every_visit(folder: Path, words: None) -> None:
    text = printed(folder, prompt="uid1")
    assert text.count("prompt uid1-abc") == STEPS
    assert "uid0" not in text
    assert text.splitlines()[1].split() == ["1", "0", "0.667", "66.7%", "4", "5"]


def test_long_texts_say_what_is_not_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "decoder", lambda path: lambda ids: "x" * 1000)
    assert "(840 characters) …" in printed(folder, step=1)
    assert "characters) …" not in printed(folder, step=1, prompt="uid1")


@pytest.mark.parametrize(
    ("step", "prompt", "message"),
    [
        (21, None, "no step 21; it has 1 to 20"),
        (None, "uid", "uid begins 2 prompts: uid0-abc, uid1-abc"),
        (None, "uid1-abd", 'no prompt uid1-abd; did you mean "uid1-abc"?'),
    ],
)
def test_what_is_not_there_is_said(folder: Path, step: int | None, prompt: str | None, message: str) -> None:
    with pytest.raises(StrettoError) as caught:
        show.rollouts(folder, step, prompt)
    assert message in str(caught.value)


def test_json_is_one_response_per_line(folder: Path, words: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(folder), "--step", "3", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == PROMPTS * SAMPLES
    assert (lines[1]["prompt"], lines[1]["reward"], lines[1]["versions"]) == ("t7 t8", 1.0, [2])
    assert run(["show", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == STEPS
