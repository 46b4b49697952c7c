"""Where rows come from: a task by name, a Python object, a file, a Hugging Face data set.

`load_data` reads the configured source once, checks every row's prompt, and returns plain dicts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.config import DataConfig, EvalConfig, RewardConfig
from stretto.errors import StrettoError, nearest
from stretto.tasks import Row
from stretto.tasks.files import read_rows
from stretto.tasks.imports import last_line, load_object
from stretto.tasks.rewards import RewardSpec

BUILT_IN = {"knights": "stretto.tasks.knights:KnightsAndKnaves"}


@dataclass(frozen=True)
class Data:
    """Rows to train on, held-out rows (none, where the source has none), and the task that verifies them."""

    name: str  # for messages and the report
    train: Sequence[Row]
    test: Sequence[Row]
    task: Any = None  # a `Task` or `MultiTurnTask`; None: the data has no verifier of its own
    prompt_column: str = "prompt"
    place: Callable[[int], str] | None = None  # of a row to train on, for messages
    test_place: Callable[[int], str] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of the training and held-out rows, in order of appearance."""
        return tuple(dict.fromkeys(name for rows in (self.train, self.test) for row in rows for name in row))


def load_data(data: DataConfig, evaluation: EvalConfig, source: Any = None) -> Data:
    """The rows that the configuration names; `source` (the library's `data=`) stands in for `data.task`.

    A `source` is rows (a list of dicts, a Hugging Face `Dataset`), a task, or a class or function that makes one.

    Raises:
        StrettoError: no source or several, or it cannot be loaded, has no rows, or a row has no usable prompt.
    """
    named = [key for key in ("task", "path", "dataset") if getattr(data, key) is not None]
    if source is not None and named:
        raise StrettoError(f"data.{named[0]}: the data were also given as a Python object; drop one of them")
    if source is None and not named:
        raise StrettoError("data: one of data.task, data.path and data.dataset must name the prompts")
    task = None if source is None and data.task is None else make_task(data, source)
    name = str(data.path or data.dataset or data.task or type(source).__name__)
    train, test = read_train(data, task, name), read_test(data, evaluation, task, name)
    if not train.rows:
        raise StrettoError(f"data: {train.name} has no rows")
    kept = train.rows[: data.limit], test.rows[: evaluation.limit]
    for rows, found in zip(kept, (train, test), strict=True):
        check_prompts(rows, data.prompt_column, found.place)
    verifier = task if hasattr(task, "score") else None
    return Data(name, *kept, verifier, data.prompt_column, train.place, test.place)


def read_train(data: DataConfig, task: Any, name: str) -> Found:
    if data.path is not None:
        if data.args or data.split != "train":
            raise StrettoError(
                f"data.{'args' if data.args else 'split'}: a file has none; data.path is {data.path}"
            )
        return from_file(data.path, "data.path")
    if data.dataset is not None:
        return from_hub(data, data.split, "data.split")
    return from_task(task, data.split, name, "data.split")


def read_test(data: DataConfig, evaluation: EvalConfig, task: Any, name: str) -> Found:
    """The held-out rows: those of `eval.path`, or of the source's split `eval.split`, where it has one."""
    if not evaluation.enabled:
        return Found([], "held-out rows")
    if evaluation.path is not None:
        return from_file(evaluation.path, "eval.path")
    if data.dataset is not None:
        return from_hub(data, evaluation.split, "eval.split", optional=True)
    if task is not None:
        return from_task(task, evaluation.split, name, "eval.split", optional=True)
    return Found([], "held-out rows")


def reward_spec(
    reward: RewardConfig, data: Data, functions: Sequence[str | Callable[..., Any]] | None = None
) -> RewardSpec:
    """What reward workers score with; `functions` (the library's `reward=`) stand in for `reward.functions`.

    Raises:
        StrettoError: unknown names, weights that do not fit, no verifier, a missing answer column.
    """
    if functions and reward.functions:
        raise StrettoError(
            "reward.functions: reward functions were also given as Python objects; drop one of them"
        )
    return RewardSpec(
        task=data.task,
        functions=tuple(functions or reward.functions or ("task",)),
        weights=tuple(reward.weights or ()),
        args=reward.args,
        prompt_column=data.prompt_column,
        columns=data.columns,
    )


@dataclass(frozen=True)
class Found:
    """Rows of one source; `place(i)` names row i in messages."""

    rows: list[Row]
    name: str
    at: Callable[[int], str] | None = None

    def place(self, index: int) -> str:
        return self.at(index) if self.at else f"row {index} of {self.name} (from 0)"


def from_file(path: str, key: str) -> Found:
    rows, place = read_rows(Path(path), key)
    return Found(list(rows), path, place)


def from_hub(data: DataConfig, split: str, key: str, *, optional: bool = False) -> Found:
    """A split of a Hugging Face data set; `optional`: no rows where it has no such split."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise StrettoError(
            'data.dataset: needs Hugging Face datasets: pip install ".[datasets]" in a clone of Stretto'
        ) from error
    try:
        rows = load_dataset(data.dataset, split=split, **data.args)
    except Exception as error:
        if optional and isinstance(error, ValueError) and "Unknown split" in str(error):
            return Found([], f"{data.dataset}, {split}")
        raise StrettoError(
            f"{key}: loading {data.dataset!r}, split {split!r}, failed: {last_line(error)}"
        ) from error
    return plain_rows(rows, f"{data.dataset}, split {split!r}")


def from_task(task: Any, split: str, name: str, key: str, *, optional: bool = False) -> Found:
    """`task.rows(split)`; `optional`: no rows where plain rows have no such split."""
    if isinstance(task, Splits) and split not in task.splits:
        if optional:
            return Found([], f"{name}, {split}")
        raise StrettoError(f"{key}: {name} has no split {split!r}; {nearest(split, task.splits)}")
    try:
        return plain_rows(task.rows(split), f"{name}, split {split!r}")
    except StrettoError:
        raise
    except Exception as error:
        hint = "; without held-out rows it must return [], or set eval.enabled = false" if optional else ""
        raise StrettoError(f"{key}: {name}: rows({split!r}) raised {last_line(error)}{hint}") from error


def plain_rows(rows: Any, name: str) -> Found:
    """Dicts out of any iterable of mappings."""
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise StrettoError(f"data: {name} is a {type(rows).__name__}, where rows (a list of dicts) belong")
    found: list[Row] = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise StrettoError(f"data: row {index} of {name} is a {type(row).__name__}, not a dict")
        found.append(dict(row))
    return Found(found, name)


@dataclass(frozen=True)
class Splits:
    """Rows without a verifier, by split."""

    splits: Mapping[str, Any]

    def rows(self, split: str) -> Any:
        return self.splits[split]


@dataclass(frozen=True)
class RowsFunction:
    """A function `f(split, ...)` that returns rows."""

    function: Callable[..., Any]
    args: Mapping[str, Any]

    def rows(self, split: str) -> Any:
        return self.function(split=split, **self.args)


def make_task(data: DataConfig, source: Any) -> Any:
    """An object with `rows(split)`, from what `data.task` names or `source` is, with `data.args`."""
    name = data.task or type(source).__name__
    if name.startswith("gym:"):
        from stretto.tasks.gym import GymTask

        return call(GymTask, {"name": name.removeprefix("gym:"), **data.args}, name)
    if data.task is not None:
        if ":" not in data.task and data.task not in BUILT_IN:
            hint = nearest(data.task, [*BUILT_IN, "gym:NAME", "package.module:Object"])
            raise StrettoError(f"data.task: there is no task {data.task!r}; {hint}")
        source = load_object(BUILT_IN.get(data.task, data.task), "data.task")
    if isinstance(source, type) or (callable(source) and not hasattr(source, "rows")):
        if not isinstance(source, type) and "split" in inspect.signature(source).parameters:
            return RowsFunction(source, data.args)
        source = call(source, data.args, name)
    elif data.args:
        raise StrettoError(
            f"data.args: {name} is an object already made, which takes no {', '.join(data.args)}"
        )
    if hasattr(source, "rows"):
        return source
    return Splits(source if isinstance(source, Mapping) else {"train": source})


def call(function: Any, args: Mapping[str, Any], name: str) -> Any:
    """`function(**args)`, arguments that it does not take named."""
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in args:
            if key not in parameters:
                raise StrettoError(
                    f"data.args.{key}: {name} takes no such argument; {nearest(key, parameters)}"
                )
    try:
        return function(**args)
    except StrettoError:
        raise
    except Exception as error:
        raise StrettoError(f"data.task: making {name} failed: {last_line(error)}") from error


def check_prompts(rows: Sequence[Row], column: str, place: Callable[[int], str]) -> None:
    """Every row must have a prompt: text, or a list of chat messages.

    Raises:
        StrettoError: names the row, and the nearest column where there is none of that name.
    """
    for index, row in enumerate(rows):
        if column not in row:
            there = f"it has {', '.join(map(str, row)) or 'none'}"
            raise StrettoError(
                f"data.prompt_column: {place(index)} has no column {column!r} ({there}); {nearest(column, row)}"
            )
        prompt = row[column]
        if isinstance(prompt, str):
            continue
        if not isinstance(prompt, list):
            raise StrettoError(
                f"data.prompt_column: {place(index)}: {column!r} is a {type(prompt).__name__}, "
                "neither text nor messages"
            )
        for message in prompt:
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(k), str) for k in ("role", "content")
            ):
                raise StrettoError(
                    f"data.prompt_column: {place(index)}: {message!r} is no chat message: "
                    "it needs a text 'role' and a text 'content'"
                )
