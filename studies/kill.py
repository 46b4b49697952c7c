"""Kill a training run everywhere, resume it, and compare it with the undisturbed one, bit for bit.

    python studies/kill.py [--moments 20] [--runs FOLDER]

The run is a short configuration of the demo. It is killed with SIGKILL at moments drawn over its whole life, once
inside each kind of write, and stopped with SIGTERM at drawn moments. Each victim is resumed until it ends; its final
weights, rewards and tokens must equal the undisturbed run's. Finished cases are kept in the folder's `cases.jsonl`;
called again, the study goes on with the missing ones. Exit status 1 if any case differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

SETTINGS = [
    "--steps", "12", "--schedule.prompts", "4", "--schedule.samples", "4", "--sampling.max_new_tokens", "256",
    "--eval.enabled", "false", "--checkpoint.every", "2", "--checkpoint.keep", "2", "--threads", "1",
]  # fmt: skip
WRITES = {
    "metrics": "metrics.jsonl",
    "rollouts": "rollouts/",
    "consumed": "consumed/",
    "in_flight": "in_flight/",
    "weights": "model.safetensors",
    "optimizer": "optimizer/state.safetensors",
    "state": "trainer_state.json",
    "timeline": "timeline.json",
}
OPERATIONS = {"replace": "replace", "rename": "rename", "link": "symlink", "prune": "unlink"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "stretto", *words]


def start(run: Path, settings: list[str] = SETTINGS) -> list[str]:
    return command("train", "demo", *settings, "--runs", str(run.parent), "--name", run.name)


def outcome(run: Path) -> dict[str, Any]:
    """What must not differ: final weights and optimiser, rewards of every step, tokens of every response."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    columns = ["request_id", "token_ids", "reward", "visit", "sample_index", "prompt_uid"]
    return {
        "weights": (run / "latest" / "model.safetensors").read_bytes(),
        "optimizer": (run / "latest" / "optimizer/state.safetensors").read_bytes(),
        "rewards": [line["reward/mean"] for line in lines],
        "rollouts": [pq.read_table(f, columns=columns) for f in sorted((run / "rollouts").glob("*.parquet"))],
        "consumed": [pq.read_table(f, columns=columns) for f in sorted((run / "consumed").glob("*.parquet"))],
    }


def compare(run: Path, reference: Path) -> list[str]:
    """The names of what differs."""
    ours, theirs = outcome(run), outcome(reference)
    return [name for name, value in theirs.items() if ours[name] != value]


def resume(run: Path, settings: list[str] = SETTINGS) -> None:
    """Bring a killed run to its end; one that was killed before it had a folder is begun again."""
    exists = (run / "config.toml").exists()
    words = command("resume", str(run)) if exists else start(run, settings)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def at_moment(run: Path, seconds: float, number: signal.Signals, settings: list[str] = SETTINGS) -> str:
    """Start a run and send it a signal after so many seconds; returns how far it had come.

    A run that has ended before is begun anew and interrupted earlier.
    """
    while True:
        process = subprocess.Popen(start(run, settings), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            process.wait()
            break
        shutil.rmtree(run)
        seconds *= 0.7
    metrics = run / "metrics.jsonl"
    made = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    return f"after {seconds:.1f} s, {made} steps made"


def inside_write(run: Path, kind: str, settings: list[str] = SETTINGS) -> str:
    """Start a run that kills itself inside a write of this kind."""
    words = [sys.executable, __file__, "--victim", kind, *start(run, settings)[3:]]
    died = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    if died.returncode != -signal.SIGKILL:
        raise SystemExit(f"the run was to die inside a write of {kind} but ended with {died.returncode}")
    return f"inside {kind}"


def tear(path: str) -> None:
    """Leave of the newest write to a file its first half: of a new file, or of the last line of one that grows."""
    content = Path(path).read_bytes()
    start = content.rstrip(b"\n").rfind(b"\n") + 1 if path.endswith((".jsonl", "timeline.json")) else 0
    os.truncate(path, (start + len(content)) // 2)


def be_victim(kind: str, words: list[str]) -> None:
    """Run the command line with the os module laid with a trap: the third such write tears the file and kills."""
    paths: dict[int, str] = {}
    seen = 0

    def die_if_third(path: str) -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            if kind in WRITES and os.path.isfile(path):
                tear(path)
            os.kill(os.getpid(), signal.SIGKILL)

    really_open, really_sync = os.open, os.fsync

    def opened(path: Any, flags: int, *args: Any, **keywords: Any) -> int:
        descriptor = really_open(path, flags, *args, **keywords)
        paths[descriptor] = os.fspath(path) if isinstance(path, (str, Path)) else str(path)
        return descriptor

    def synced(descriptor: int) -> None:
        path = paths.get(descriptor, "")
        if WRITES.get(kind, "nothing") in path and not os.path.isdir(path):
            die_if_third(path)
        really_sync(descriptor)

    os.open, os.fsync = opened, synced  # type: ignore[assignment]
    if kind in OPERATIONS:
        name = OPERATIONS[kind]
        operation: Callable[..., Any] = getattr(os, name)

        def trapped(*args: Any, **keywords: Any) -> Any:
            result = operation(*args, **keywords)
            die_if_third("")
            return result

        setattr(os, name, trapped)
    from stretto.cli import run

    raise SystemExit(run(words))


def main() -> None:
    if sys.argv[1:2] == ["--victim"]:
        be_victim(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=20, help="SIGKILLs at drawn moments")
    parser.add_argument("--terms", type=int, default=5, help="SIGTERMs at drawn moments")
    parser.add_argument("--runs", type=Path, default=Path("studies/results/kill"))
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    reference = options.runs / "undisturbed"
    clock = options.runs / "seconds.txt"
    if not clock.exists():
        shutil.rmtree(reference, ignore_errors=True)
        began = time.monotonic()
        subprocess.run(start(reference), check=True, stdout=subprocess.DEVNULL)
        clock.write_text(f"{time.monotonic() - began:.1f}\n")
    seconds = float(clock.read_text())
    draw = random.Random(0)
    cases: dict[str, Callable[[Path], str]] = {}
    for i, kind in enumerate([signal.SIGKILL] * options.moments + [signal.SIGTERM] * options.terms):
        moment = draw.uniform(0.0, seconds)
        cases[f"{kind.name}-{i:02d}"] = lambda run, m=moment, k=kind: at_moment(run, m, k)  # type: ignore[misc]
    for kind_of_write in (*WRITES, *OPERATIONS):
        cases[f"write-{kind_of_write}"] = lambda run, k=kind_of_write: inside_write(run, k)  # type: ignore[misc]
    log = options.runs / "cases.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for name, case in cases.items():
        if any(d["case"] == name for d in done):
            continue
        run = options.runs / name
        shutil.rmtree(run, ignore_errors=True)
        where = case(run)
        resume(run)
        found = {"case": name, "where": where, "differs": compare(run, reference)}
        done.append(found)
        with log.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{name}: {where}: {found['differs'] or 'identical'}", flush=True)
        shutil.rmtree(run)
    bad = [d for d in done if d["differs"]]
    print(
        f"{len(done) - len(bad)} of {len(done)} killed runs ended identical to the undisturbed one ({seconds:.0f} s)"
    )
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
