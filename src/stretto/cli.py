"""The command line, written on the library. What a command does is imported inside it: help needs no torch."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter

from stretto import __version__
from stretto.cli_help import with_keys
from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from stretto.config import Config
    from stretto.run import RunResult

BENCHMARKS = ("engine", "linear", "bookkeeping", "draft", "rollout", "inflight", "simulation", "ray", "vllm")
CHECKPOINTS = ("initial", "latest", "best")

app = App(
    name="stretto",
    help="RL post-training of language models that turns its own history into speed.",
    version=__version__,
    default_parameter=Parameter(negative=()),
    suppress_keyboard_interrupt=False,
)


def main(argv: Sequence[str] | None = None) -> None:
    """The `stretto` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without Unicode shows "?" rather than ending a run
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one command; returns its exit status: 2 for bad input, 130 when interrupted, 141 for a closed pipe."""
    try:
        status = app(
            list(argv),
            print_error=False,
            exit_on_error=False,
            help_on_error=False,
            result_action="return_value",
        )
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where an error can still be said
    except (StrettoError, CycloptsError) as error:
        _print_error(str(error), as_json="--json" in argv)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        if error.filename is None and error.errno == errno.ENOSPC:
            _drop_output()
            _print_error(f"cannot write standard output: {error.strerror}", as_json=False)
            return 2
        raise
    return status if isinstance(status, int) else 0


def _drop_output() -> None:
    """Python would complain once more when it flushes standard output at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(text: str, *, as_json: bool) -> None:
    if as_json:
        print(dumps({"error": text}))
        return
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), (text, "red")), soft_wrap=True)


# ---- help -----------------------------------------------------------------------------------------------


FLAG_WITH_KEYS = Parameter(group=Group("Options", help_formatter=with_keys), show_default=False)
FLAG = Parameter(group=Group("Options"), show_default=False)
OPTION = Parameter(group=Group("Options"))
WORDS = Parameter(allow_leading_hyphen=True, show=False)


# ---- commands -------------------------------------------------------------------------------------------


@app.command(
    usage="Usage: stretto train [CONFIG.toml | PRESET] [--KEY VALUE ...] [--dry-run] [--json]", sort_key=1
)
def train(
    *words: Annotated[str, WORDS],
    dry_run: Annotated[bool, FLAG_WITH_KEYS] = False,
    json: Annotated[bool, FLAG_WITH_KEYS] = False,
) -> int:
    """Train a model. Without arguments: the demo, on a CPU, in minutes.

    CONFIG.toml or the name of a preset comes first; any key below may follow. Without either, keys that name a model
    or prompts lie over the defaults, any others over the demo. A list is given in TOML or by repeating its option,
    and "none" unsets a key. The run goes to a new folder in `runs`.

    Args:
        *words: The file or preset, and keys.
        dry_run: Check the configuration and print it as resolved; do nothing else.
        json: One JSON object per line and event.
    """
    from stretto.config import dump_toml, require_source, warnings
    from stretto.observe.progress import open_reporter

    source, config = _configured(words)
    require_source(config)
    if dry_run:
        for warning in warnings(config):
            print(f"warning: {warning}", file=sys.stderr)
        print(_line(config.model_dump(mode="json")) if json else dump_toml(config), end="\n" if json else "")
        return 0
    from stretto.trainer import Trainer

    if config.name is None and source:
        config = config.model_copy(update={"name": f"{source}-{time.strftime('%Y%m%d-%H%M%S')}"})
    return _status(Trainer(config, reporter=open_reporter(as_json=json)).run())


@app.command(usage="Usage: stretto resume RUN [--step N] [--KEY VALUE ...] [--json]", sort_key=2)
def resume(
    run: Path,
    /,
    *words: Annotated[str, WORDS],
    step: Annotated[int | None, OPTION] = None,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Continue a run from its newest checkpoint; if nothing is changed, the result is the undisturbed run's.

    steps, learner.shards, learner.place and the sections checkpoint, eval, draft, history, fleet and track may be
    changed by their keys (--steps, --checkpoint.every, ...; stretto train --help lists them), and --data.path,
    --model.path and --reward.functions may say where files have been moved. Any other change would make it another
    run: refused.

    Args:
        run: The run's folder.
        *words: Keys.
        step: Go back to this checkpoint and train from there again; later ones are removed.
        json: One JSON object per line and event.
    """
    from stretto.config import parse_options
    from stretto.observe.progress import open_reporter

    changes = parse_options(words)
    from stretto.trainer import Trainer

    return _status(Trainer.resume(run, changes, step=step, reporter=open_reporter(as_json=json)).run())


@app.command(
    usage="Usage: stretto eval RUN|MODEL [--checkpoint NAME] [--config CONFIG.toml] [--KEY VALUE ...] [--json]",
    sort_key=3,
)
def eval(
    target: str,
    /,
    *words: Annotated[str, WORDS],
    checkpoint: Annotated[str | None, OPTION] = None,
    config: Annotated[str | None, OPTION] = None,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Evaluate a run's checkpoint, or a model, on held-out rows: accuracy with its 95% interval.

    A run is evaluated as it evaluates itself, so its own figures come out again. Keys of the configuration may be
    changed (--eval.limit 100; stretto train --help lists them).

    Args:
        target: A run's folder, one of its checkpoints, or a model's folder or hub name.
        *words: Keys.
        checkpoint: Of a run: initial, latest (unless set), best or step-N.
        config: For a model: a TOML file or preset that says what to evaluate on.
        json: Print one JSON object.
    """
    from stretto.config import default_source, load_config, require_source
    from stretto.observe.progress import SilentReporter, evaluation_text, open_reporter

    run, which = _run_of(target, checkpoint)
    if not any(word.startswith("--eval.enabled") for word in words):
        words = (*words, "--eval.enabled=true")  # also where training goes without
    if run is not None:
        if config is not None:
            raise StrettoError(
                "--config is for a model; a run has its configuration: change its keys instead"
            )
        resolved = load_config(run / "config.toml", words, saved=True)
    elif config is None and default_source(words) == "demo":
        raise StrettoError(
            f"{target} is no run, nor a checkpoint in one; to evaluate a model, say on what, and how it is prompted: "
            "--config CONFIG.toml or PRESET"
        )
    else:
        resolved = load_config(config or {}, [f"--model.path={target}", *words])
    require_source(resolved)
    from stretto.trainer import evaluate

    reporter = SilentReporter() if json else open_reporter()
    found = evaluate(resolved, run=run, checkpoint=which, reporter=reporter)
    print(_line({"target": target, **found}) if json else f"{target}: {evaluation_text(found)}")
    return 0


@app.command(usage="Usage: stretto show RUN [--step N] [--prompt UID] [--json]", sort_key=4)
def show(
    run: Path,
    /,
    *,
    step: Annotated[int | None, OPTION] = None,
    prompt: Annotated[str | None, OPTION] = None,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Show a run: its steps, evaluations and checkpoints; what a step was made of; a prompt's visits.

    Args:
        run: The run's folder.
        step: The responses of this optimiser step and their rewards.
        prompt: The responses to this prompt (its uid, or how it begins) at every step, whole.
        json: One JSON object; with --step or --prompt, one per line and response.
    """
    from rich.console import Console

    from stretto import show as shown

    if not json:
        width = None if sys.stdout.isatty() else shown.PIPED
        shown.show(run, step, prompt, console=Console(highlight=False, width=width))
    elif step is None and prompt is None:
        print(_line(shown.summary(run)))
    else:
        decode = shown.decoder(run)
        for number, rollout in shown.rollouts(run, step, prompt):
            print(_line(shown.rollout_record(number, rollout, decode)))
    return 0


@app.command(usage="Usage: stretto doctor [--json]", sort_key=5)
def doctor(*, json: Annotated[bool, FLAG] = False) -> int:
    """Look whether this installation can do its work, and say what to do where it cannot.

    Args:
        json: Print one JSON object.
    """
    from rich.console import Console

    from stretto.doctor import as_table, examine

    checks = examine(Path("runs"))
    if json:
        print(_line({"checks": [check.as_json() for check in checks]}))
    else:
        Console(highlight=False).print(as_table(checks))
    return 2 if any(check.level == "error" for check in checks) else 0


@app.command(
    usage="Usage: stretto simulate [SCENARIO.toml] [--charts FOLDER] [--calibrate RUN] [--json]", sort_key=6
)
def simulate(
    scenario: Path | None = None,
    /,
    *,
    charts: Annotated[Path | None, OPTION] = None,
    calibrate: Annotated[Path | None, OPTION] = None,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Compare schedules in a simulated cluster: step time, tokens per second, idle slots and devices, staleness.

    The controller, ledger and schedules are the ones that train; engines, rewards and the learner are simulated.

    Args:
        scenario: A TOML file; without it, the example that ships with the package.
        charts: Write a Perfetto trace of each schedule and a Gantt chart of all to this folder.
        calibrate: Measure the costs of a recorded run instead, and print them as a scenario that replays it.
        json: Print one JSON object.
    """
    from stretto.simulate import command

    if calibrate is not None:
        if scenario is not None or charts is not None:
            raise StrettoError("--calibrate RUN makes a scenario; it takes no other argument")
        from stretto.run_folder import RunFolder
        from stretto.simulate.calibrate import calibration, scenario_of

        RunFolder.open(calibrate)  # says what is there instead
        measured = calibration(calibrate)
        print(_line(measured) if json else scenario_of(calibrate, measured), end="\n" if json else "")
        return 0
    from rich.console import Console

    from stretto.simulate.scenario import load_scenario

    quiet = json or not sys.stderr.isatty()
    told = (lambda _: None) if quiet else (lambda name: print(f"simulating {name}", file=sys.stderr))
    results = command.simulate(load_scenario(scenario), told, charts)
    if json:
        print(_line(results))
    else:
        Console(highlight=False).print(command.as_table(results))
    return 0


@app.command(usage="Usage: stretto bench NAME [OPTIONS]", sort_key=7, help_flags=[])
def bench(
    name: Annotated[str, Parameter(allow_leading_hyphen=True)], /, *words: Annotated[str, WORDS]
) -> int:
    """Measure the speed of a part on this machine. `stretto bench NAME --help` lists its options.

    Args:
        name: "engine", "linear", "bookkeeping", "draft", "rollout", "inflight", "simulation", "ray" or
            "vllm".
        *words: The benchmark's own options.
    """
    if name in ("-h", "--help"):
        app.help_print(["bench"])
        return 0
    if name not in BENCHMARKS:
        raise StrettoError(f'no benchmark "{name}"; {nearest(name, BENCHMARKS)}')
    status = importlib.import_module(f"stretto.bench.{name}").main(list(words))
    return status if isinstance(status, int) else 0


# ---- shared by commands ---------------------------------------------------------------------------------


def _configured(words: Sequence[str]) -> tuple[str, Config]:
    """The source's short name, empty without one, and the configuration that the words of `train` ask for."""
    from stretto.config import default_source, load_config, split_words

    plain, options = split_words(words)
    if len(plain) > 1:
        raise StrettoError(f'"{plain[1]}": one TOML file or preset at most, and options such as --steps 20')
    source = plain[0] if plain else default_source(options)
    return _short_name(source) if isinstance(source, str) else "", load_config(source, options)


def _short_name(source: str) -> str:
    """A run's name without its time: what the file is called, or its folder if that says nothing."""
    path = Path(source)
    return path.resolve().parent.name if path.name == "config.toml" else path.stem


def _run_of(target: str, checkpoint: str | None) -> tuple[Path | None, str]:
    """The run that `target` is, or is a checkpoint of, and which checkpoint is meant; no run for a model."""
    from stretto.checkpoints import run_of

    name = checkpoint or "latest"
    if name not in CHECKPOINTS and not re.fullmatch(r"step-\d+", name):
        raise StrettoError(f'--checkpoint "{name}": {nearest(name, (*CHECKPOINTS, "step-N"))}')
    if (Path(target) / "config.toml").is_file():
        return Path(target), name
    run = run_of(Path(target))
    if run is not None and checkpoint is not None:
        raise StrettoError(f"{target} is a checkpoint itself: --checkpoint is for a run's folder")
    return run, name if run is None else Path(target).resolve().name


def _line(content: Mapping[str, Any]) -> str:
    from stretto.metrics_file import plain

    return dumps(plain(content))


def _status(result: RunResult) -> int:
    return 130 if result.interrupted else 0
