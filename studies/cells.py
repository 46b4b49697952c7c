"""What studies of training share: arms times seeds, each a demo run whose figures are kept; resumed where they stop."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Cell = dict[str, Any]


def train(run: Path, words: Sequence[str]) -> None:
    """Bring a demo run to its end; one that was broken off goes on."""
    command = [sys.executable, "-m", "stretto"]
    if (run / "config.toml").exists():
        command += ["resume", str(run)]
    else:
        command += ["train", "demo", *words, "--runs", str(run.parent), "--name", run.name]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run_cells(
    results: Path,
    arms: Mapping[str, Sequence[str]],
    seeds: int,
    keys: Sequence[str],
    measure: Callable[[Path], Cell],
) -> list[Cell]:
    """Train each of `arms` (name -> words) from each seed with further `keys`; what `measure` found, with arm and seed.

    A cell's figures are in `results/cells/`, and its run is removed. Ends the program at once if one there had others.
    """
    (results / "cells").mkdir(parents=True, exist_ok=True)
    for file in sorted((results / "cells").glob("*.json")):
        if json.loads(file.read_text()).get("keys") != list(keys):
            raise SystemExit(f"{file} was run with other keys: remove it, or use another --results")
    cells: list[Cell] = []
    for seed in range(seeds):
        for arm, words in arms.items():
            name = f"{''.join(c if c.isalnum() else '-' for c in arm)}-{seed}"
            file = results / "cells" / f"{name}.json"
            if not file.exists():
                run = results / "runs" / name
                train(run, [*keys, "--seed", str(seed), *words])
                cell = {"arm": arm, "seed": seed, "keys": list(keys), **measure(run)}
                file.write_text(json.dumps(cell, indent=1) + "\n")
                shutil.rmtree(run)
                print(f"{arm}, seed {seed}: done", flush=True)
            cells.append(json.loads(file.read_text()))
    return cells


def steps_of(run: Path) -> list[Cell]:
    """A run's metrics, of its optimiser steps only."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "time/rollout" in line]


def last_accuracy(run: Path) -> float | None:
    """Held-out, by the last evaluation."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [float(line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    return found[-1] if found else None


def table(cells: Sequence[Cell], columns: Mapping[str, tuple[str, int]], first: str) -> str:
    """Markdown: a row for each arm; `columns` figure -> title, digits; means over seeds with the least and largest."""
    rows = [[first, *(title for title, _ in columns.values())], ["---", *["---:"] * len(columns)]]
    for arm in dict.fromkeys(cell["arm"] for cell in cells):
        found = [cell for cell in cells if cell["arm"] == arm]
        rows.append(
            [arm, *(spread([c[name] for c in found], digits) for name, (_, digits) in columns.items())]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def spread(values: Iterable[float | None], digits: int) -> str:
    """Mean (least to largest) of what is known."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    text = f"{np.mean(known):,.{digits}f}"
    return f"{text} ({min(known):,.{digits}f} to {max(known):,.{digits}f})" if len(known) > 1 else text


def mean(values: Iterator[float]) -> float:
    """Of nothing: NaN."""
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else math.nan
