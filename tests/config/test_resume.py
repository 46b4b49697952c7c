"""What a resumed run may change of its configuration."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.config import check_resumable, load_config, resume_warnings
from stretto.errors import StrettoError

FILES: dict[str, Any] = {
    "data.path": "/old/rows.jsonl",
    "model.path": "/old/model",
    "model.tokenizer": "/old/tokenizer",
    "reward.functions": ["exact", "/old/mine.py:score"],
}


def test_a_resumed_run_may_change_only_what_does_not_make_it_another() -> None:
    saved = load_config()
    check_resumable(saved, load_config(None, {"steps": 99, "checkpoint.keep": 7, "eval.every": 3}))
    with pytest.raises(StrettoError, match=r"learner\.eps = 1e-06 \(the run has 1e-08\)") as caught:
        check_resumable(saved, load_config(None, {"steps": 99, "learner.eps": 1e-6, "seed": 3}))
    assert "seed = 3 (the run has 0)" in str(caught.value)
    assert "steps, checkpoint, eval, draft, history, fleet, learner.shards, learner.place, track" in str(
        caught.value
    )


def test_a_resumed_run_may_find_its_files_elsewhere() -> None:
    saved = load_config({}, FILES)
    moved = {
        key: [f.replace("/old", "/new") for f in v] if isinstance(v, list) else v.replace("/old", "/new")
        for key, v in FILES.items()
    }
    check_resumable(saved, load_config({}, moved))
    task = {"data": {"task": "/old/mine.py:Task", "args": {"size": 5}}}
    moved_task = load_config(task, {"data.task": "/new/mine.py:Task"}, saved=True)
    assert moved_task.data.args == {"size": 5}
    check_resumable(load_config(task), moved_task)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"reward.functions": ["exact", "/new/mine.py:other"]}),
        ({}, {"reward.functions": ["/old/mine.py:score"]}),
        ({}, {"reward.functions": ["numeric", "/old/mine.py:score"]}),
        ({}, {"model.tokenizer": None}),
        ({}, {"data.path": None, "data.task": "knights"}),
        ({"data.path": None, "data.task": "knights"}, {"data.path": None, "data.task": "/new/mine.py:Task"}),
    ],
)
def test_another_file_is_not_one_that_was_moved(before: dict[str, Any], after: dict[str, Any]) -> None:
    with pytest.raises(StrettoError, match="a resumed run keeps its configuration: ") as caught:
        check_resumable(load_config({}, {**FILES, **before}), load_config({}, {**FILES, **after}))
    for key in after:
        if after[key] is not None or key == "model.tokenizer":
            assert f"{key} = " in str(caught.value)


def test_threads_may_change_where_no_sum_is_promised() -> None:
    free = {"deterministic": False}
    check_resumable(load_config({}, {**free, "threads": 4}), load_config({}, {**free, "threads": 2}))
    with pytest.raises(StrettoError, match="With deterministic = true threads stay, since the order of sums"):
        check_resumable(load_config({}, {"threads": 4}), load_config({}, {"threads": 2}))


def test_what_is_read_from_a_moved_model_is_said() -> None:
    assert resume_warnings(load_config({}), ["model.path"]) == []
    for key, value, said in (
        ("learner.kl_coef", 0.1, "what the KL is to"),
        ("model.lora.rank", 4, "what adapters are added to"),
    ):
        (warning,) = resume_warnings(load_config({}, {key: value}), ["model.path"])
        assert said in warning


def test_what_is_not_compared_of_moved_files_is_said() -> None:
    for key in ("reward.functions", "data.task", "data.path"):
        (warning,) = resume_warnings(load_config({}), [key, "checkpoint.every"])
        assert warning.startswith(f"{key} changed: prompts are compared")
    (both,) = resume_warnings(load_config({}), ["data.path", "reward.functions"])
    assert both.startswith("data.path, reward.functions changed: ")
