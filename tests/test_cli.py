"""The command line: help without torch, clear errors, and what each command hands to the library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import stretto
from stretto.cli import BENCHMARKS, run
from stretto.config import Config, dump_toml, load_config
from stretto.config.keys import KEYS
from stretto.run_folder import RunFolder


class Library:
    """Stands in for `stretto.trainer`: remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.result = SimpleNamespace(interrupted=False)
        self.raises: BaseException | None = None

    def module(self) -> ModuleType:
        library = self

        class Trainer:
            def __init__(self, config: Config, *, reporter: object) -> None:
                library.asked.append(("train", config))

            @classmethod
            def resume(cls, folder: Path, changes: object, *, step: int | None, reporter: object) -> Trainer:
                library.asked.append(("resume", (folder, changes, step)))
                return cls.__new__(cls)

            def run(self) -> object:
                if library.raises is not None:
                    raise library.raises
                return library.result

        def evaluate(
            config: Config, *, run: Path | None, checkpoint: str, reporter: object
        ) -> dict[str, Any]:
            library.asked.append(("eval", (config, run, checkpoint)))
            return {
                "eval/accuracy": 0.5,
                "eval/accuracy/low": 0.4,
                "eval/accuracy/high": 0.6,
                "eval/prompts": 90,
                "eval/response_length/mean": float("nan"),
            }

        module = ModuleType("stretto.trainer")
        vars(module).update({"Trainer": Trainer, "evaluate": evaluate})
        return module


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setitem(sys.modules, "stretto.trainer", library.module())
    return library


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "one"
    RunFolder.create(folder, dump_toml(load_config(None, {"eval.limit": 7}))).close()
    return folder


# ---- help -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [["--help"], *([name, "--help"] for name in ("train", "resume", "eval", "show", "doctor", "bench"))],
)
def test_help_needs_no_torch(words: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['stretto', *{words!r}]\n"
        "from stretto.cli import run\nstatus = run(sys.argv[1:])\n"
        "heavy = [m for m in ('torch', 'transformers', 'numba', 'pyarrow') if m in sys.modules]\n"
        "print('HEAVY', heavy, status)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "Usage: stretto" in out
    assert out.strip().endswith("HEAVY [] 0")


def test_help_of_train_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for name in KEYS:
        assert f"--{name}" in out


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "stretto", "--version"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.strip() == stretto.__version__


# ---- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], 'Unknown command "trian". Did you mean "train"?'),
        (["train", "--stesp", "4"], '--stesp: unknown key; did you mean "steps"?'),
        (["train", "a.toml", "b.toml"], '"b.toml": one TOML file or preset at most'),
        (["train", "demoo"], 'demoo: no such file or preset; did you mean "demo"?'),
        (["train", "--data.task", "none"], "no prompts: set one of data.task"),
        (
            ["eval", "org/model"],
            "org/model is no run, nor a checkpoint in one; to evaluate a model, say on what",
        ),
        (["eval", "org/model", "--eval.limit", "3"], "--config CONFIG.toml or PRESET"),
        (["resume"], "RUN"),
        (["resume", "runs/x", "--step", "x"], "step"),
        (["resume", "runs/x", "20"], '"20": expected an option such as --steps 20'),
        (["eval", "model", "--checkpoint", "lates"], '--checkpoint "lates": did you mean "latest"?'),
        (["show", "nowhere/run"], "nowhere/run is not a run folder"),
        (["simulate", "--calibrate", "nowhere/run"], "nowhere/run is not a run folder"),
        (["bench", "engin"], 'no benchmark "engin"; did you mean "engine"?'),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    library: Library, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert (captured.out, library.asked) == ("", [])
    assert run([*words, "--json"]) == 2
    assert message in json.loads(capsys.readouterr().out)["error"] or words[0] == "trian"


def test_an_unexpected_exception_keeps_its_traceback(library: Library) -> None:
    library.raises = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        run(["train"])


def test_interruptions_have_their_status(library: Library) -> None:
    library.result = SimpleNamespace(interrupted=True)
    assert run(["train"]) == 130
    library.raises = KeyboardInterrupt()
    assert run(["train"]) == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_full_standard_output_is_said() -> None:
    for words in (["--help"], ["train", "--dry-run"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "stretto", *words],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert (done.returncode, done.stderr) == (
            2,
            "error: cannot write standard output: No space left on device\n",
        )


def test_an_encoding_without_the_characters_ends_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "train", "--help"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0


def test_a_closed_pipe_ends_quietly() -> None:
    command = f"{sys.executable} -m stretto train --help | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


# ---- train ----------------------------------------------------------------------------------------------


def test_train_without_arguments_is_the_demo(library: Library) -> None:
    assert run(["train"]) == 0
    [(_, config)] = library.asked
    assert config.name.startswith("demo-")
    assert config.model_copy(update={"name": None}) == load_config("demo")


def test_ones_own_model_and_data_are_not_the_demos(library: Library) -> None:
    assert run(["train", "--model.path", "org/model", "--data.path", "rows.jsonl", "--steps", "3"]) == 0
    [(_, config)] = library.asked
    rest = {"model.path": "org/model", "data.path": "rows.jsonl", "steps": 3}
    assert (config.name, config) == (None, load_config({}, rest))
    assert run(["train", "--steps", "3"]) == 0
    assert library.asked[1][1].name.startswith("demo-")
    assert library.asked[1][1].checkpoint == load_config("demo").checkpoint


def test_train_takes_a_file_and_keys(library: Library, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[data]\ntask = "knights"\n')
    assert run(["train", str(path), "--steps", "3", "--learner.learning-rate=1e-5", "--json"]) == 0
    [(_, config)] = library.asked
    assert (config.steps, config.learner.learning_rate) == (3, 1e-5)
    assert config.name.startswith("mine-")


def test_a_file_called_config_is_named_after_its_folder(library: Library, tmp_path: Path) -> None:
    (tmp_path / "puzzles").mkdir()
    path = tmp_path / "puzzles" / "config.toml"
    path.write_text('[data]\ntask = "knights"\n')
    run(["train", str(path)])
    assert library.asked[0][1].name.startswith("puzzles-")


def test_a_given_name_is_kept(library: Library) -> None:
    run(["train", "--name", "mine"])
    assert library.asked[0][1].name == "mine"


def test_a_dry_run_prints_the_configuration_and_does_nothing(
    library: Library, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "--dry-run", "--steps", "3", "--sampling.top_k", "5"]) == 0
    captured = capsys.readouterr()
    assert tomllib.loads(captured.out)["steps"] == 3
    assert captured.err.startswith("warning: sampling.top_k = 5")
    assert run(["train", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["task"] == "knights"
    assert library.asked == []


# ---- resume and eval ------------------------------------------------------------------------------------


def test_resume_hands_over_the_changes(library: Library) -> None:
    assert run(["resume", "runs/x", "--steps", "40", "--step", "12", "--eval.every", "none"]) == 0
    assert library.asked == [("resume", (Path("runs/x"), {"steps": 40, "eval.every": "none"}, 12))]


def test_eval_of_a_run_uses_its_configuration(
    library: Library, a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["eval", str(a_run), "--eval.samples", "2", "--checkpoint", "step-12"]) == 0
    [(_, (config, folder, checkpoint))] = library.asked
    assert (config.eval.limit, config.eval.samples, folder, checkpoint) == (7, 2, a_run, "step-12")
    assert "accuracy 50.0% (95% interval 40.0% to 60.0%, 90 prompts)" in capsys.readouterr().out
    assert run(["eval", str(a_run), "--config", "demo"]) == 2


def test_eval_evaluates_a_run_that_trains_without(library: Library, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "silent"
    RunFolder.create(folder, dump_toml(load_config(None, {"eval.enabled": False}))).close()
    assert run(["eval", str(folder), "--eval.limit", "3"]) == 0
    [(_, (config, _, _))] = library.asked
    assert (config.eval.enabled, config.eval.limit) == (True, 3)


def test_eval_of_a_checkpoint_uses_its_runs_configuration(library: Library, a_run: Path) -> None:
    (a_run / "checkpoints" / "step-000012").mkdir()
    (a_run / "latest").symlink_to(Path("checkpoints") / "step-000012")
    for target in ("checkpoints/step-000012", "latest"):
        assert run(["eval", str(a_run / target)]) == 0
        _, (config, folder, checkpoint) = library.asked[-1]
        assert (config.eval.limit, folder, checkpoint) == (7, a_run.resolve(), "step-000012")
        assert run(["eval", str(a_run / target), "--checkpoint", "best"]) == 2
        assert run(["eval", str(a_run / target), "--config", "demo"]) == 2
    assert len(library.asked) == 2
    (a_run / "config.toml").unlink()  # now it is a model like any other
    assert run(["eval", str(a_run / "latest")]) == 2


def test_eval_of_a_model_says_on_what(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "org/model", "--config", "demo", "--json"]) == 0
    [(_, (config, folder, checkpoint))] = library.asked
    assert (config.model.path, config.data.task, folder, checkpoint) == (
        "org/model",
        "knights",
        None,
        "latest",
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["eval/accuracy"], found["eval/response_length/mean"]) == (
        "org/model",
        0.5,
        None,
    )
    assert run(["eval", "org/model", "--data.task", "knights"]) == 0
    config = library.asked[1][1][0]
    assert config == load_config({}, {"model.path": "org/model", "data.task": "knights"})


# ---- bench ----------------------------------------------------------------------------------------------


def test_the_help_of_bench_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert [name for name in BENCHMARKS if f'"{name}"' not in said] == []


def test_bench_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def main(words: list[str]) -> int:
        asked.append(words)
        return 3

    for name in BENCHMARKS:
        module = ModuleType(f"stretto.bench.{name}")
        vars(module)["main"] = main
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert run(["bench", "engine", "--pairs", "3", "--help"]) == 3
    assert asked == [["--pairs", "3", "--help"]]
