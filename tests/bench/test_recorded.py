from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.bench.recorded import EXCERPT, read
from stretto.errors import StrettoError
from stretto.history.log import write_rollouts
from stretto.records import State

DEMO_MODEL = Path(__file__).parents[2] / "src" / "stretto" / "demo" / "model"


def line(checkpoint: str, prompt: list[int], *samples: list[int]) -> dict[str, Any]:
    answers = [{"token_ids": tokens, "score": 1.0} for tokens in samples]
    return {"dataset": "d", "checkpoint": checkpoint, "prompt_ids": prompt, "samples": answers}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    text = "".join(json.dumps(entry) + "\n" for entry in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


THREE = (
    line("a", [1], [10, 11], [12]),
    line("a", [2], [20]),
    line("b", [1], [13]),
    line("c", [1], [14, 15], []),
    line("c", [3], [30]),
)


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_targets_are_the_last_checkpoint_s_answers_to_prompts_with_history(tmp_path: Path, name: str) -> None:
    found = read(write(tmp_path / name, *THREE))
    assert found.names == ("a, b", "c")
    assert [r.token_ids.tolist() for r in found.targets] == [
        [14, 15]
    ]  # prompt 3 is new, an empty answer nothing
    assert [r.token_ids.tolist() for r in found.history] == [[10, 11], [12], [13]]
    assert [r.visit for r in found.history] == [0, 0, 1]
    assert found.tokens == (4, 2)
    assert (found.logprobs_known, found.keys_known) == (False, False)


def test_checkpoints_can_be_chosen(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", *THREE)
    found = read(path, history="a", target="b")
    assert found.names == ("a", "b")
    assert [r.token_ids.tolist() for r in found.history + found.targets] == [[10, 11], [12], [13]]
    with pytest.raises(StrettoError, match='--target "bb" is not there; did you mean "b"'):
        read(path, target="bb")
    with pytest.raises(StrettoError, match='no response of "b" has a history'):
        read(path, history="b", target="b")
    with pytest.raises(StrettoError, match='no response of "a" has a history'):
        read(path, target="a")


def test_thinning_keeps_whole_groups(tmp_path: Path) -> None:
    lines = [line(name, [prompt], [prompt, 1], [prompt, 2]) for name in "ab" for prompt in range(5)]
    found = read(write(tmp_path / "r.jsonl", *lines))
    some = found.thinned(3)
    assert some.targets == found.targets[:4]
    assert {r.prompt.uid for r in some.history} == {r.prompt.uid for r in some.targets}
    assert len(some.history) == 4
    assert found.thinned(1_000).targets == found.targets


def test_text_is_tokenised_with_its_end(tmp_path: Path) -> None:
    entries = [
        {"dataset": "d", "checkpoint": name, "prompt": "1+1", "samples": [{"text": "2", "score": 0}]}
        for name in "ab"
    ]
    path = write(tmp_path / "r.jsonl", *entries)
    with pytest.raises(StrettoError, match=r'r.jsonl, line 1: "prompt" is text: --model'):
        read(path)
    with pytest.raises(StrettoError, match=r"nowhere: no tokenizer.json"):
        read(path, tmp_path / "nowhere")
    (target,) = read(path, DEMO_MODEL).targets
    assert target.token_ids.size == 2
    assert target.prompt.token_ids.size == 3


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"cannot read .*none.jsonl: No such file"):
        read(tmp_path / "none.jsonl")
    whole = write(tmp_path / "whole.jsonl.gz", *THREE).read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-9])
    with pytest.raises(StrettoError, match=r"cannot read .*cut.jsonl.gz"):
        read(tmp_path / "cut.jsonl.gz")
    (tmp_path / "text.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(StrettoError, match=r"cannot read .*text.jsonl.gz"):
        read(tmp_path / "text.jsonl.gz")
    with pytest.raises(StrettoError, match=r"other.jsonl, line 2: not a line of recorded rollouts.*samples"):
        read(write(tmp_path / "other.jsonl", THREE[0], {"checkpoint": "a", "prompt_ids": [1]}))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(StrettoError, match=r"empty.jsonl: empty"):
        read(tmp_path / "empty.jsonl")
    with pytest.raises(StrettoError, match="no log of rollouts"):
        read(tmp_path)


def test_a_run_s_log_is_read_by_visits(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    found = read(
        write(tmp_path / "r.jsonl", line("a", [1], [10, 11]), line("b", [1], [12]), line("b", [1], [13]))
    )
    logged = [
        replace(r, key=7, outcome=State.CONSUMED, logprobs=np.full(r.token_ids.size, -0.5))
        for r in [*found.history, *found.targets]
    ]
    logged[-1].outcome = State.DISCARDED
    write_rollouts(tmp_path / "rollouts" / "step-000002.parquet", logged[1:], step=2)
    write_rollouts(tmp_path / "rollouts" / "step-000001.parquet", logged[:1], step=1)
    run = read(tmp_path)
    assert run.names == ("visit 0", "visit 1")
    assert [r.token_ids.tolist() for r in run.history + run.targets] == [[10, 11], [12]]
    assert (run.logprobs_known, run.keys_known) == (True, True)


def test_excerpt_is_what_its_note_says() -> None:
    found = read(EXCERPT)
    assert found.names == ("base", "rl_games_500")
    assert len({r.prompt.uid for r in found.targets}) == 526
    assert sum(found.tokens) == pytest.approx(657_000, abs=1_000)
    assert EXCERPT.stat().st_size < 300_000
    groups = [r.group_id for r in found.targets]
    assert (
        sum(a != b for a, b in zip(groups, groups[1:], strict=False)) == len(set(groups)) - 1
    )  # siblings together
