from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stretto.errors import StrettoError
from stretto.tasks.calls import RewardFunction, Sample
from stretto.tasks.rewards import RewardSpec, Score, Scorer

COLUMNS = ("prompt", "answer", "level")


def spec(*functions: str | Callable[..., Any], **options: Any) -> RewardSpec:
    return RewardSpec(functions=functions, **{"columns": COLUMNS, **options})


def score(given: RewardSpec, *completions: str, **row: Any) -> list[Score]:
    samples = [Sample(c, [1, 2], {"prompt": "p", "answer": "4", "level": 3, **row}) for c in completions]
    return Scorer(given).score(samples, lambda name: None)


def form(function: Callable[..., Any], **options: Any) -> RewardFunction:
    return Scorer(spec(function, **options)).functions[0]


def row_form(completion: str, row: Any) -> float:
    return 1.0


def trl_form(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


async def async_trl_form(completions: Sequence[str], **kwargs: Any) -> list[float]:
    return [float(len(c)) for c in completions]


def verl_form(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 1.0


async def async_verl_form(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


class Verifier:
    def score(self, text: str, data: Any) -> float:
        return float(text == data["answer"])

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[float]:
        return [0.5] * len(completions)


@pytest.mark.parametrize(
    ("function", "expected", "batched"),
    [
        (row_form, "row", False),
        (trl_form, "trl", True),
        (async_trl_form, "trl", True),
        (verl_form, "verl", False),
        (async_verl_form, "verl", True),
        (Verifier(), "trl", True),
        (functools.partial(trl_form, extra=1), "trl", True),
        (lambda completions, **_: [1.0] * len(completions), "trl", True),
    ],
)
def test_the_form_is_recognised_by_the_signature(function: Any, expected: str, batched: bool) -> None:
    found = form(function)
    assert (found.form, found.batched) == (expected, batched)
    assert [s.status for s in score(spec(function), "4", "5")[: 2 if batched else 1]] == ["ok"] * (
        1 + batched
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda text: 1.0, r"is of no known form: f\(completion, row\), f\(completions"),
        (
            lambda completions, anser: [1.0],
            "needs 'anser', which is neither a column .* did you mean \"answer\"",
        ),
        (lambda completions, trainer_state: [1.0], "needs 'trainer_state'"),
        (lambda solution_str, ground_truth, judge: 1.0, "needs 'judge'"),
    ],
)
def test_a_signature_that_does_not_fit_is_refused(function: Any, message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        Scorer(spec(function))


def test_verl_needs_a_ground_truth_column() -> None:
    with pytest.raises(StrettoError, match="none of the columns reward_model, ground_truth, answer"):
        Scorer(spec(verl_form, columns=("prompt", "solution")))


def test_trl_gets_what_trl_passes() -> None:
    seen: dict[str, Any] = {}

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        seen.update(kwargs, completions=completions)
        return [0.0] * len(completions)

    score(spec(reward), "a", "b")
    assert seen == {
        "completions": ["a", "b"],
        "prompts": ["p", "p"],
        "completion_ids": [[1, 2], [1, 2]],
        "answer": ["4", "4"],
        "level": [3, 3],
    }
    chat = [{"role": "user", "content": "p"}]
    score(spec(reward), "a", prompt=chat)
    assert seen["completions"] == [[{"role": "assistant", "content": "a"}]]
    assert seen["prompts"] == [chat]


def test_rows_with_different_columns_give_none_in_trl_s_lists() -> None:
    seen: list[Any] = []

    def reward(completions: Any, hint: Any) -> list[float]:
        seen.extend(hint)
        return [0.0] * len(completions)

    samples = [Sample("a", [], {"prompt": "p", "hint": "h"}), Sample("b", [], {"prompt": "p"})]
    Scorer(spec(reward, columns=("prompt", "hint"))).score(samples, lambda name: None)
    assert seen == ["h", None]


@pytest.mark.parametrize(
    "row",
    [
        {
            "data_source": "gsm8k",
            "reward_model": {"style": "rule", "ground_truth": "9"},
            "extra_info": {"index": 1},
        },
        {"data_source": "gsm8k", "ground_truth": "9", "extra_info": {"index": 1}},
        {"data_source": "gsm8k", "answer": "9", "extra_info": {"index": 1}},
    ],
)
def test_verl_gets_what_verl_passes(row: dict[str, Any]) -> None:
    seen: list[Any] = []

    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any
    ) -> dict[str, Any]:
        seen.extend([data_source, solution_str, ground_truth, extra_info])
        return {"score": 0.5, "acc": True, "pred": "text", "bad": math.nan}

    (found,) = Scorer(spec(compute_score, columns=tuple(row))).score(
        [Sample("8", [], row)], lambda name: None
    )
    assert seen == ["gsm8k", "8", "9", {"index": 1}]
    assert found == Score(0.5, "ok", {"compute_score": 0.5, "compute_score.acc": 1.0})


def test_weights_and_none() -> None:
    given = spec(
        lambda completion, row: 2.0,
        lambda completions, **_: [None if c == "b" else 1.0 for c in completions],
        weights=(0.5, 10.0),
    )
    first, second = score(given, "a")[0], score(given, "b")[0]
    assert first == Score(11.0, "ok", {"<lambda>": 2.0, "<lambda>#2": 1.0})
    assert second == Score(1.0, "ok", {"<lambda>": 2.0})
    (neither,) = score(spec(lambda completion, row: None), "a")
    assert neither.status == "invalid"
    assert math.isnan(neither.reward)


@pytest.mark.parametrize(
    "value", [True, 1, np.float32(1.0), np.int64(1), np.bool_(True), np.array(1.0), Fraction(1)]
)
def test_numbers_of_all_kinds(value: Any) -> None:
    assert score(spec(lambda completion, row: value), "a")[0].reward == 1.0


@pytest.mark.parametrize(
    "value", ["1", b"1", [1.0], {}, {"acc": 1.0}, {"score": math.inf}, object(), np.ones(2), 1j]
)
def test_what_is_no_number_is_invalid(value: Any) -> None:
    (found,) = score(spec(lambda completion, row: value), "a")
    assert found.status == "invalid"
    assert math.isnan(found.reward)
    assert "<lambda> returned" in found.message


@pytest.mark.parametrize("value", [1.0, [1.0], [1.0] * 3, "ab", None, {"a": 1.0, "b": 1.0}])
def test_a_wrong_count_is_invalid_for_all_of_the_batch(value: Any) -> None:
    found = score(spec(lambda completions, **_: value), "a", "b")
    assert [score.status for score in found] == ["invalid"] * 2
    assert "for 2 completions" in found[0].message


def test_tensors_and_arrays_count_as_lists() -> None:
    assert [s.reward for s in score(spec(lambda completions, **_: np.array([1.0, 2.0])), "a", "b")] == [
        1.0,
        2.0,
    ]


def test_one_bad_value_in_a_batch_spoils_only_itself() -> None:
    found = score(spec(lambda completions, **_: [1.0, math.nan, "x", None]), "a", "b", "c", "d")
    assert [s.status for s in found] == ["ok", "invalid", "invalid", "invalid"]


def test_the_task_s_verifier_is_the_default_and_can_be_mixed() -> None:
    assert score(RewardSpec(task=Verifier(), columns=COLUMNS), "4")[0].parts == {"task": 1.0}
    mixed = spec("task", "exact", row_form, task=Verifier(), weights=(1.0, 2.0, 4.0))
    assert score(mixed, "4")[0].reward == 7.0
    assert score(mixed, "5")[0].reward == 4.0


def test_arguments_go_to_the_functions_that_take_them() -> None:
    def scaled(completion: str, row: Any, *, scale: float = 1.0) -> float:
        return scale

    given = spec(scaled, "exact", args={"scale": 3.0, "answer_column": "level"})
    assert score(given, "3")[0].parts == {"scaled": 3.0, "exact": 1.0}
    with pytest.raises(
        StrettoError, match=r'reward.args.scal: no reward function takes it; did you mean "scale"'
    ):
        Scorer(spec(scaled, args={"scal": 1.0}))
    with pytest.raises(StrettoError, match=r"reward.args.answer: the data have a column of this name"):
        Scorer(spec(trl_form, args={"answer": 1.0}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"functions": ("numberic",)}, "'numberic' is neither built in .*\"numeric\""),
        ({"functions": ("task",)}, "no verifier of its own"),
        ({"functions": ("exact",), "weights": (1.0, 2.0)}, "2 weights for 1 reward functions"),
        ({"functions": ("exact",), "weights": (math.nan,)}, "must be finite"),
        (
            {"functions": ("exact",), "columns": ("prompt", "answers")},
            "no column 'answer'; did you mean \"answers\"",
        ),
    ],
)
def test_a_bad_configuration_is_refused_before_any_import(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        RewardSpec(**{"columns": COLUMNS, **options})
