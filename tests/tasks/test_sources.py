from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stretto.config import DataConfig, EvalConfig, RewardConfig
from stretto.errors import StrettoError
from stretto.tasks.rewards import Scorer
from stretto.tasks.sources import Data, load_data, reward_spec
from tests.tasks.two_turn import TwoTurn

TWO_TURN = "tests.tasks.two_turn:TwoTurn"


def load(source: Any = None, *, evaluation: dict[str, Any] | None = None, **data: Any) -> Data:
    return load_data(DataConfig(**data), EvalConfig(**(evaluation or {})), source)


def jsonl(path: Path, *lines: str | bytes) -> str:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return str(path)


def split_rows(split: str, size: int = 2) -> list[dict[str, Any]]:
    return [{"prompt": f"{split} {i}"} for i in range(size)]


def rows_of(size: int = 2) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}"} for i in range(size)]


def refuse(split: str) -> list[dict[str, Any]]:
    raise RuntimeError("no rows today")


def break_off(split: str) -> Iterator[dict[str, Any]]:
    yield {"prompt": "first"}
    raise RuntimeError("no more rows")


def test_the_built_in_task() -> None:
    found = load(task="knights", args={"size": 5, "test_size": 3, "seed": 1})
    assert (len(found.train), len(found.test), found.name) == (5, 3, "knights")
    assert found.task.score("answer " + found.train[0]["answer"], found.train[0]) == 1.0


def test_a_class_a_function_with_splits_and_one_without() -> None:
    task = load(task=TWO_TURN, args={"size": 3})
    assert (len(task.train), len(task.test)) == (3, 3)
    both = load(task="tests.tasks.test_sources:split_rows", args={"size": 1})
    assert (both.train, both.test, both.task) == ([{"prompt": "train 0"}], [{"prompt": "test 0"}], None)
    one = load(task="tests.tasks.test_sources:rows_of")
    assert (len(one.train), list(one.test)) == (2, [])


@pytest.mark.parametrize("source", [rows_of(), iter(rows_of()), {"train": rows_of(), "test": []}, rows_of])
def test_python_objects_as_rows(source: Any) -> None:
    assert load(source).train == rows_of()


def test_python_objects_as_tasks() -> None:
    assert load(TwoTurn(3)).columns == ("prompt", "number")
    assert len(load(TwoTurn, args={"size": 2}).train) == 2


def test_a_python_object_beside_a_configured_source_is_refused() -> None:
    with pytest.raises(StrettoError, match=r"data.task: the data were also given as a Python object"):
        load(rows_of(), task="knights")
    with pytest.raises(StrettoError, match=r"data.args: list is an object already made, which takes no size"):
        load(rows_of(), args={"size": 3})


def test_limits() -> None:
    found = load(TwoTurn(5), limit=2, evaluation={"limit": 3})
    assert (len(found.train), len(found.test)) == (2, 3)


def test_jsonl_with_held_out_rows(tmp_path: Path) -> None:
    train = jsonl(
        tmp_path / "train.jsonl", '{"prompt": "a", "answer": "1"}', "", '{"prompt": "ä", "x": null}', ""
    )
    test = jsonl(tmp_path / "test.jsonl", b'\xef\xbb\xbf{"prompt": "b"}\r')
    found = load(path=train, evaluation={"path": test})
    assert found.train == [{"prompt": "a", "answer": "1"}, {"prompt": "ä", "x": None}]
    assert found.test == [{"prompt": "b"}]
    assert found.columns == ("prompt", "answer", "x")
    assert load(path=train, evaluation={"path": test, "enabled": False}).test == []


GOOD = '{"prompt": "a"}'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((GOOD, '{"prompt": "a",}'), r"x.jsonl, line 2: malformed JSON at column"),
        ((GOOD, "", GOOD, "{"), r"x.jsonl, line 4: malformed JSON"),
        ((GOOD, b'{"prompt": "\xff"}'), r"x.jsonl, line 2: not UTF-8 \(byte 13"),
        ((GOOD, '["a"]'), r"x.jsonl, line 2: a list, where a JSON object"),
        (('{"prompt": "a", "prompt": "b"}',), r"x.jsonl, line 1: the key 'prompt' is there twice"),
        (("[" * 200_000,), r"x.jsonl, line 1: "),
        (("", ""), "x.jsonl has no rows"),
        (
            (GOOD, "", '{"promt": "a", "answer": 1}'),
            "line 3 of .*no column 'prompt' .it has promt, answer.*\"promt\"",
        ),
        ((GOOD, '{"prompt": 3}'), "line 2 of .*x.jsonl: 'prompt' is a int, neither text nor messages"),
        (('{"prompt": [{"role": "user"}]}',), "is no chat message"),
        (('{"prompt": ["a"]}',), "is no chat message"),
    ],
)
def test_bad_jsonl(tmp_path: Path, lines: tuple[str | bytes, ...], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        load(path=jsonl(tmp_path / "x.jsonl", *lines))


def test_parquet(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    rows = [{"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "1"}}]
    pq.write_table(pa.Table.from_pylist(rows), file)
    assert load(path=str(file)).train == rows
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), file)
    with pytest.raises(StrettoError, match="x.parquet has no rows"):
        load(path=str(file))
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(StrettoError, match="x.parquet is not a readable Parquet file"):
        load(path=str(file))


def test_missing_files_and_suffixes(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", GOOD)
    with pytest.raises(
        StrettoError, match=r'data.path: .*trian.jsonl does not exist; did you mean "train.jsonl"'
    ):
        load(path=str(tmp_path / "trian.jsonl"))
    with pytest.raises(StrettoError, match=r"ends in '.csv'; known: .jsonl, .ndjson, .parquet"):
        load(path=str(tmp_path / "x.csv"))
    with pytest.raises(StrettoError, match=r"eval.path: .*test.jsonl does not exist"):
        load(rows_of(), evaluation={"path": str(tmp_path / "test.jsonl")})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "one of data.task, data.path and data.dataset must name the prompts"),
        ({"task": "knight"}, "there is no task 'knight'; did you mean \"knights\""),
        ({"task": "knights", "args": {"sise": 3}}, 'data.args.sise: knights takes no such .* "size"'),
        (
            {"task": "knights", "args": {"people_weights": {}}},
            "making knights failed: ValueError: people_weights",
        ),
        ({"task": "nowhere_at_all:Task"}, "data.task: there is no module 'nowhere_at_all'"),
        ({"task": "tests.tasks.two_turn:TwoTurns"}, "has no 'TwoTurns'; did you mean \"TwoTurn\""),
        ({"task": "tests.tasks.test_sources:GOOD"}, "is a str, where rows .* belong"),
        ({"task": "tests.tasks.test_sources:refuse"}, r"rows\('train'\) raised RuntimeError: no rows today"),
        (
            {"task": "tests.tasks.test_sources:break_off"},
            r"rows\('train'\) raised RuntimeError: no more rows",
        ),
        ({"task": TWO_TURN, "split": "dev"}, r"rows\('dev'\) raised KeyError"),
        (
            {"task": "tests.tasks.test_sources:rows_of", "split": "dev"},
            "has no split 'dev'; choose from: train",
        ),
        ({"task": "tests.tasks.test_sources:rows_of", "args": {"size": 0}}, "has no rows"),
        ({"path": "x.jsonl", "split": "dev"}, "data.split: a file has none"),
    ],
)
def test_bad_sources(given: dict[str, Any], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        load(**given)


def test_hugging_face_datasets(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    files = {"train": jsonl(tmp_path / "a.jsonl", GOOD, GOOD)}
    found = load(dataset="json", args={"data_files": files, "cache_dir": str(tmp_path / "cache")})
    assert (found.train, list(found.test)) == ([{"prompt": "a"}] * 2, [])
    with pytest.raises(
        StrettoError, match=r"data.split: loading 'json', split 'dev', failed: .*Unknown split"
    ):
        load(dataset="json", split="dev", args={"data_files": files, "cache_dir": str(tmp_path / "cache")})


def test_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    found = load(task="gym:leg_counting", args={"size": 4, "test_size": 2, "seed": 3})
    assert (len(found.train), len(found.test)) == (4, 2)
    scorer = Scorer(reward_spec(RewardConfig(), found))
    row = found.train[0]
    for completion in (row["answer"], f"so <answer>{row['answer']}</answer>"):
        assert scorer.functions[0].function(completion, row) == 1.0
    with pytest.raises(StrettoError, match="no data set 'leg_countin'; did you mean \"leg_counting\""):
        load(task="gym:leg_countin")
    with pytest.raises(StrettoError, match="gym:leg_counting refuses"):
        load(task="gym:leg_counting", args={"sise": 3})


def test_gsm8k_needs_no_class_of_its_own(tmp_path: Path) -> None:
    row = json.dumps({"question": "2+2?", "answer": "It is <<2+2=4>>4. #### 4"})
    data = load(path=jsonl(tmp_path / "gsm8k.jsonl", row), prompt_column="question")
    spec = reward_spec(RewardConfig(functions=["numeric"]), data)
    assert Scorer(spec).functions[0].function("so 4 apples", data.train[0]) == 1.0
    with pytest.raises(StrettoError, match="no verifier of its own"):
        reward_spec(RewardConfig(), data)


def test_functions_from_the_library_replace_the_configured_ones() -> None:
    reward: Callable[..., float] = lambda completion, row: 1.0  # noqa: E731 -- a callable like any other
    data = load(rows_of())
    assert reward_spec(RewardConfig(), data, [reward]).functions == (reward,)
    with pytest.raises(StrettoError, match="also given as Python objects"):
        reward_spec(RewardConfig(functions=["exact"]), data, [reward])
