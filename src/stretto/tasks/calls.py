"""Calling a user's function: in its form, whatever it raises, and for several samples at once."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from stretto.tasks import Row
from stretto.tasks.imports import last_line

T = TypeVar("T")
Form = Literal["row", "trl", "verl"]


class SplitBatch(Exception):
    """A call for several samples failed; to be repeated for each of them alone."""


@dataclass(frozen=True)
class Failure:
    """Why there is no usable value."""

    status: Literal["error", "timeout", "invalid"]
    message: str


@dataclass(frozen=True)
class Sample:
    """What is scored: the text after the prompt, its token ids, and the row that the prompt came from."""

    completion: str
    token_ids: Sequence[int]
    row: Row


def guarded(name: str, call: Callable[[], T]) -> T | Failure:
    """The value of `call()`, or a `Failure` with what it raised, SystemExit and the like included."""
    pid = os.getpid()
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 -- user code may raise anything, and must not end the worker
        return Failure("error", f"{name} raised {last_line(error)}")
    finally:
        if os.getpid() != pid:
            os._exit(0)  # the user's function forked: its child must not go on as a second worker


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its form; `accepted` are the keywords that it takes, None for any."""

    name: str
    function: Callable[..., Any]
    form: Form
    accepted: frozenset[str] | None
    constants: Mapping[str, Any]
    prompt_column: str = "prompt"
    runner: asyncio.Runner = field(
        default_factory=asyncio.Runner, compare=False
    )  # one loop, so clients can stay open

    @property
    def batched(self) -> bool:
        """Whether it gets several samples in one call: lists in TRL's form, concurrently if it is async."""
        call = getattr(self.function, "__call__", None)  # noqa: B004 -- an object whose __call__ is async
        return self.form == "trl" or any(map(inspect.iscoroutinefunction, (self.function, call)))

    def values(self, samples: Sequence[Sample]) -> Sequence[Any]:
        """What it returns for each sample, unchecked, or a `Failure`.

        Raises:
            SplitBatch: the call failed and was for more than one sample.
        """
        call = self.call_together if self.form == "trl" else self.call_each
        values = guarded(self.name, lambda: call(samples))
        if not isinstance(values, Failure):
            return values
        if len(samples) > 1:
            raise SplitBatch(values.message)
        return [values]

    def call_together(self, samples: Sequence[Sample]) -> Sequence[Any]:
        chat = [isinstance(sample.row.get(self.prompt_column), list) for sample in samples]
        texts = [sample.completion for sample in samples]
        columns = dict.fromkeys(key for sample in samples for key in sample.row)
        arguments: dict[str, Any] = {key: [sample.row.get(key) for sample in samples] for key in columns}
        for key in ("prompt", "completion"):  # TRL passes them in the plural only
            arguments.pop(key, None)
        arguments |= {
            "prompts": [sample.row.get(self.prompt_column) for sample in samples],
            "completions": [
                [{"role": "assistant", "content": text}] if is_chat else text
                for text, is_chat in zip(texts, chat, strict=True)
            ],
            "completion_ids": [list(sample.token_ids) for sample in samples],
        }
        values = self.function(**self.accept(arguments), **self.constants)
        if inspect.isawaitable(values):
            values = self.runner.run(awaited(values))
        size = len(values) if hasattr(values, "__len__") and not isinstance(values, str | Mapping) else None
        if size != len(samples):
            count = "no list" if size is None else f"{size} rewards"
            failure = Failure("invalid", f"{self.name} returned {count} for {len(samples)} completions")
            return [failure] * len(samples)  # alone, a single reward would look right
        return list(values)

    def call_each(self, samples: Sequence[Sample]) -> Sequence[Any]:
        calls = [self.call_one(sample) for sample in samples]
        if any(map(inspect.isawaitable, calls)):
            return self.runner.run(gathered(self.name, calls))
        return calls

    def call_one(self, sample: Sample) -> Any:
        if self.form == "row":
            return self.function(sample.completion, sample.row, **self.constants)
        row = sample.row
        known = {
            "data_source": row.get("data_source", ""),
            "solution_str": sample.completion,
            "ground_truth": ground_truth(row),
            "extra_info": row.get("extra_info") or {},
        }
        return self.function(**self.accept(known), **self.constants)

    def accept(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        taken = {key: value for key, value in arguments.items() if key not in self.constants}
        return taken if self.accepted is None else {k: v for k, v in taken.items() if k in self.accepted}


def ground_truth(row: Row) -> Any:
    """Where verl's data keeps it, or else the column `ground_truth` or `answer`."""
    nested = row.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    return row["ground_truth"] if "ground_truth" in row else row.get("answer")


async def awaited(value: Awaitable[T]) -> T:
    return await value


async def gathered(name: str, calls: Sequence[Any]) -> list[Any]:
    """The values of `calls`, awaited together; a `Failure` for each that raised."""
    values = await asyncio.gather(*calls, return_exceptions=True)
    return [
        Failure("error", f"{name} raised {last_line(value)}") if isinstance(value, BaseException) else value
        for value in values
    ]
