"""What a response is worth: reward functions in three forms, made into one scorer.

A reward function is named in `reward.functions`:

    task                        the task's own verifier (the default)
    exact, numeric, math        the verifiers of `stretto.tasks.verifiers`, against `answer_column`
    package.module:function     the user's own, also
    path/to/file.py:function

or given to the library as a callable. Its form is recognised by the names of its parameters:

    f(completion, row) -> float                                            as `Task.score`
    f(completions, **columns) -> list[float]                               TRL's
    f(data_source, solution_str, ground_truth, extra_info) -> float|dict   verl's

each of them plain or `async`. In TRL's form `prompts`, `completion_ids` and every column of the data are passed
by name, as lists, and completions are message lists where the prompt is one. In verl's, the ground truth is
`reward_model["ground_truth"]`, or the column `ground_truth` or `answer`; a dict's further numbers are kept as
parts. `reward.args` go to the functions that have parameters of those names.

None means that the function does not apply to a row: the others decide; if none applies, the reward is invalid.
TRL's and async functions get several completions in one call, whichever were waiting: what they return for one
must not depend on the others.

This module runs in the worker processes too, so it imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import StrettoError, nearest
from stretto.tasks import verifiers
from stretto.tasks.calls import Failure, Form, RewardFunction, Sample, SplitBatch

BUILT_IN: Mapping[str, Callable[..., float]] = {
    "exact": verifiers.exact,
    "numeric": verifiers.numeric,
    "math": verifiers.math,
}
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
GROUND_TRUTH_COLUMNS = ("reward_model", "ground_truth", "answer")


@dataclass(frozen=True)
class RewardSpec:
    """What reward workers build their scorer from; checked as far as that needs no import of user code."""

    task: Any = None  # a `Task`, or None where the data has no verifier of its own
    functions: tuple[str | Callable[..., Any], ...] = ("task",)
    weights: tuple[float, ...] = ()  # (): 1 each
    args: Mapping[str, Any] = field(default_factory=dict)
    prompt_column: str = "prompt"
    columns: tuple[str, ...] = ()  # of the data

    def __post_init__(self) -> None:
        names = [f for f in self.functions if isinstance(f, str)]
        for name in names:
            if ":" not in name and name != "task" and name not in BUILT_IN:
                hint = nearest(name, ["task", *BUILT_IN])
                raise StrettoError(
                    f"reward.functions: {name!r} is neither built in ({hint}) nor module:function"
                )
        if "task" in names and not hasattr(self.task, "score"):
            raise StrettoError(
                "reward.functions: the data has no verifier of its own; name a reward function, "
                f"such as {', '.join(map(repr, BUILT_IN))} or 'package.module:function' (a run whose function was "
                "given in Python goes on with stretto.Trainer.resume(folder, reward=...))"
            )
        if self.weights and len(self.weights) != len(self.functions):
            raise StrettoError(
                f"reward.weights: {len(self.weights)} weights for {len(self.functions)} reward functions"
            )
        if not all(math.isfinite(weight) for weight in self.weights):
            raise StrettoError(f"reward.weights: must be finite, got {list(self.weights)}")
        answer = self.args.get("answer_column", "answer")
        if any(name in BUILT_IN for name in names) and answer not in self.columns:
            raise StrettoError(
                f"reward.args.answer_column: the data has no column {answer!r}; {nearest(str(answer), self.columns)}"
            )


@dataclass(frozen=True)
class Score:
    """The reward of one sample; NaN unless `status` is "ok". `parts`: by function, before weighting."""

    reward: float
    status: str = "ok"
    parts: Mapping[str, float] = field(default_factory=dict)
    message: str = ""


class Scorer:
    """The weighted sum of reward functions. Lives in a worker process.

    Raises:
        StrettoError: a function cannot be imported, or its parameters fit no form or not the data.
    """

    def __init__(self, spec: RewardSpec) -> None:
        self.functions: list[RewardFunction] = []
        for given in spec.functions:
            name, function = resolve(given, spec)
            taken = sum(f.name.partition("#")[0] == name for f in self.functions)
            name = f"{name}#{taken + 1}" if taken else name
            self.functions.append(recognise(name, function, spec, trusted=given == "task"))
        self.weights = spec.weights or (1.0,) * len(self.functions)
        for key in spec.args:
            if not any(key in f.constants for f in self.functions):
                if key in spec.columns:
                    raise StrettoError(
                        f"reward.args.{key}: the data have a column of this name; rename one of them"
                    )
                known = {p for f in self.functions for p in inspect.signature(f.function).parameters}
                raise StrettoError(f"reward.args.{key}: no reward function takes it; {nearest(key, known)}")

    @property
    def batched(self) -> bool:
        """Whether several samples in one call are worth it."""
        return any(function.batched for function in self.functions)

    def score(self, samples: Sequence[Sample], announce: Callable[[str], None]) -> list[Score]:
        """The scores of `samples`, in order; `announce` is called with a function's name before it runs.

        Raises:
            SplitBatch: a call for several samples failed, so that none of them is to blame alone.
        """
        columns: list[Sequence[Any]] = []
        for function in self.functions:
            announce(function.name)
            columns.append(function.values(samples))
        return [self.combine(values) for values in zip(*columns, strict=True)]

    def combine(self, values: Sequence[Any]) -> Score:
        parts: dict[str, float] = {}
        total = 0.0
        for function, weight, value in zip(self.functions, self.weights, values, strict=True):
            number = as_number(value, function.name)
            if isinstance(number, Failure):
                return Score(math.nan, number.status, parts, number.message)
            if number is None:
                continue
            total += weight * number
            parts[function.name] = number
            if isinstance(value, Mapping):
                parts |= {
                    f"{function.name}.{k}": float(v) for k, v in value.items() if k != "score" and is_real(v)
                }
        if not parts:
            return Score(math.nan, "invalid", parts, "every reward function returned None for this row")
        return Score(total, "ok", parts)


def is_real(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def as_number(value: Any, name: str) -> float | Failure | None:
    """What a function returned for one sample, as a finite number; None where it does not apply."""
    if value is None or isinstance(value, Failure):
        return value
    if isinstance(value, Mapping):
        if "score" not in value:
            return Failure("invalid", f"{name} returned a dict without 'score': {shown(value)}")
        value = value["score"]
    if not hasattr(value, "__float__"):
        return Failure("invalid", f"{name} returned {shown(value)}, which is not a number")
    try:
        number = float(value)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ) as error:  # arrays, huge integers, torch tensors
        return Failure("invalid", f"{name} returned {shown(value)}, which is not one number: {error}")
    if not math.isfinite(number):
        return Failure("invalid", f"{name} returned {number}")
    return number


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def resolve(given: str | Callable[..., Any], spec: RewardSpec) -> tuple[str, Callable[..., Any]]:
    """A reward function and its short name."""
    if not isinstance(given, str):
        return str(getattr(given, "__name__", type(given).__name__)), given
    if given == "task":
        return "task", spec.task.score
    if given in BUILT_IN:
        if given == "math" and importlib.util.find_spec("math_verify") is None:
            raise StrettoError(
                'the reward "math" needs math-verify: pip install ".[math]" in a clone of Stretto'
            )
        return given, BUILT_IN[given]
    from stretto.tasks.imports import load_object

    function = load_object(given, "reward.functions")
    if not callable(function):
        raise StrettoError(f"reward.functions: {given} is a {type(function).__name__}, not a function")
    return given.rpartition(":")[2].rpartition(".")[2], function


def recognise(name: str, function: Callable[..., Any], spec: RewardSpec, *, trusted: bool) -> RewardFunction:
    """The function with its form, from its signature; `trusted` (a task's verifier) is of the row form."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise StrettoError(f"reward.functions: {name} has no signature to recognise its form by") from error
    names = list(parameters)
    form: Form
    if trusted or names[:2] == ["completion", "row"]:
        form, supplied = "row", names[:2]
    elif "completions" in names:
        form, supplied = "trl", [*TRL_ARGUMENTS, *spec.columns]
    elif "solution_str" in names:
        form, supplied = "verl", list(VERL_ARGUMENTS)
        if "ground_truth" in names and not set(GROUND_TRUTH_COLUMNS) & set(spec.columns):
            raise StrettoError(
                f"reward.functions: {name} needs a ground truth, but the data has none of the columns "
                f"{', '.join(GROUND_TRUTH_COLUMNS)}; it has {', '.join(spec.columns)}"
            )
    else:
        raise StrettoError(
            f"reward.functions: {name}{inspect.signature(function)} is of no known form: f(completion, row), "
            "f(completions, **columns) as in TRL, or f(data_source, solution_str, ground_truth, extra_info) as in verl"
        )
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    constants = {k: v for k, v in spec.args.items() if k not in supplied and (takes_any or k in parameters)}
    for parameter in parameters.values():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and parameter.name not in supplied and parameter.name not in constants:
            raise StrettoError(
                f"reward.functions: {name} needs {parameter.name!r}, which is neither a column of the data nor in "
                f"reward.args; {nearest(parameter.name, supplied)}"
            )
    accepted = None if takes_any else frozenset(names)
    return RewardFunction(name, function, form, accepted, constants, spec.prompt_column)


__all__ = ["BUILT_IN", "Failure", "RewardSpec", "Sample", "Score", "Scorer", "SplitBatch"]
