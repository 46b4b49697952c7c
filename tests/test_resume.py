"""What a run goes on from: its own steps, tokenizer, prompts and stop tokens, wherever their files lie by then."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stretto.config import DataConfig, dump_toml, load_config
from stretto.errors import StrettoError
from stretto.history.log import read_rollouts
from stretto.model import location
from stretto.recorder import Recorder
from stretto.records import FinishReason
from stretto.run_folder import RunFolder
from stretto.trainer import Trainer
from tests.models import swap_tokens
from tests.test_trainer import REWARDS, ROOT, Messages, assert_same_run, small


def test_a_resumed_run_does_not_end_before_where_it_goes_on(tmp_path: Path) -> None:
    config = small(tmp_path, "made", steps=9)
    with RunFolder.create(tmp_path / "made", dump_toml(config)) as folder:
        for step in (2, 4, 6):
            folder.checkpoint_folder(step).mkdir()
    saved = (tmp_path / "made" / "config.toml").read_bytes()
    refused: list[tuple[dict[str, Any], int | None, str]] = [
        ({"steps": 5}, None, r"steps = 5: the run has made 6; use at least 6, or --step 4 to go back$"),
        ({"steps": 1}, None, r"steps = 1: the run has made 6; use at least 6$"),
        ({"steps": 3}, 4, r"steps = 3: it would go on from 4; use at least 4, or --step 2 to go back$"),
    ]
    for changes, at, said in refused:
        with pytest.raises(StrettoError, match=said):
            Trainer.resume(tmp_path / "made", changes, step=at)
    assert (tmp_path / "made" / "config.toml").read_bytes() == saved
    assert Trainer.resume(tmp_path / "made", {"steps": 6}).config.steps == 6
    assert Trainer.resume(tmp_path / "made", {"steps": 4}, step=4).config.steps == 4


def test_resume_with_other_data_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    config = small(tmp_path, "data").model_copy(update={"data": DataConfig()})
    rows = [{"prompt": f"Ann says Bo is a knave . {i}"} for i in range(3)]
    folder = Trainer(config, data=rows).run().folder
    before = sorted(p.relative_to(folder) for p in folder.rglob("*"))
    with pytest.raises(StrettoError, match="not those that the run was begun with .* row 2 .* is not there$"):
        Trainer.resume(folder, step=2, data=rows[:2]).run()
    assert sorted(p.relative_to(folder) for p in folder.rglob("*")) == before


def test_a_run_whose_files_were_moved_goes_on_from_where_they_are(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(location("demo"), old / "model")
    shutil.copy(REWARDS, old / "mine.py")
    lines = (ROOT / "examples/own_reward/puzzles.jsonl").read_text().splitlines()[:4]
    (old / "rows.jsonl").write_text("\n".join(lines))

    def files(folder: Path) -> dict[str, Any]:
        where = {"data.path": "rows.jsonl", "model.path": "model"}
        named = {key: str(folder / name) for key, name in where.items()}
        return {**named, "reward.functions": [f"{folder / 'mine.py'}:vowels"]}

    whole = Trainer(small(tmp_path, "whole", **files(old))).run().folder
    folder = Trainer(small(tmp_path, "moved", steps=2, **files(old))).run().folder
    old.rename(new)
    before = sorted(p.relative_to(folder) for p in folder.rglob("*"))
    other = {**files(new), "data.path": str(tmp_path / "other.jsonl"), "steps": 3}
    for rows, said in (
        (
            [lines[1], lines[0], *lines[2:]],
            r"the prompt of row 0 .* was 'Puzzle : Hal .*' and is 'Puzzle : Fay",
        ),
        ([*lines, lines[0]], "another number or order of rows that were not answered yet"),
    ):
        (tmp_path / "other.jsonl").write_text("\n".join(rows))
        with pytest.raises(StrettoError, match=said):
            Trainer.resume(folder, other).run()
    swapped = shutil.copytree(new / "model", tmp_path / "words")
    swap_tokens(swapped / "tokenizer.json")
    with pytest.raises(StrettoError, match="step-000002 has another tokenizer than this run"):
        Trainer.resume(folder, {**files(new), "model.path": str(swapped), "steps": 3}).run()
    assert sorted(p.relative_to(folder) for p in folder.rglob("*")) == before
    Trainer.resume(folder, {**files(new), "steps": 3}).run()
    assert_same_run(whole, folder)
    assert load_config(folder / "config.toml").data.path == str(new / "rows.jsonl")


def test_a_response_ends_at_every_token_that_the_model_says_ends_one(tmp_path: Path) -> None:
    """generation_config.json of a chat model names more of them than its tokenizer."""
    model = tmp_path / "model"
    shutil.copytree(location("demo"), model)
    changes: dict[str, Any] = {"model.path": str(model), "steps": 1, "eval.enabled": True, "eval.limit": 4}

    def responses(name: str) -> list[tuple[list[int], FinishReason]]:
        folder = Trainer(small(tmp_path, name, **changes)).run().folder
        return [
            (rollout.token_ids.tolist(), rollout.finish_reason)
            for rollout in read_rollouts(folder / "consumed/step-000001.parquet")
        ]

    plain = responses("plain")
    file = model / "generation_config.json"
    known = json.loads(file.read_text())
    said = Counter(token for tokens, _ in plain for token in tokens if token != known["eos_token_id"])
    ((end, _),) = said.most_common(1)
    file.write_text(json.dumps({**known, "eos_token_id": [known["eos_token_id"], end, 10**6]}))
    expected = [
        (tokens[: tokens.index(end) + 1], FinishReason.STOP) if end in tokens else (tokens, reason)
        for tokens, reason in plain
    ]
    assert expected != plain
    assert responses("ends") == expected


def chat_model(folder: Path, ends: int | list[int] | None) -> Path:
    """The demo's model, whose generation_config.json names these tokens; None: it has none."""
    shutil.copytree(location("demo"), folder)
    file = folder / "generation_config.json"
    if ends is None:
        file.unlink()
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": ends}))
    return folder


def test_a_run_goes_on_with_its_stop_tokens_or_not_at_all(tmp_path: Path) -> None:
    """Without them responses would run past their ends to the limit, and nobody would be told."""
    own = json.loads((Path(location("demo")) / "generation_config.json").read_text())["eos_token_id"]
    model = chat_model(tmp_path / "model", [own, 7])
    config = small(tmp_path, "chat", **{"model.path": str(model), "steps": 1})
    folder = Trainer(config).run().folder
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}
    for name, ends, shown in (
        ("less", None, rf"{own} \('.+'\)\. "),
        ("other", [own, 9], r".*, 9 \('.+'\)\. "),
    ):
        copy = chat_model(tmp_path / name, ends)
        said = (
            rf"/{name}: this run's responses end at {own} \('.+'\), 7 \('.+'\), but .* would end at {shown}"
        )
        with pytest.raises(StrettoError, match=said + rf'.*"eos_token_id": \[{own}, 7\]'):
            Trainer.resume(folder, {"model.path": str(copy), "steps": 2}).run()
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"} == before
    same = chat_model(tmp_path / "same", [7, own])
    assert Trainer.resume(folder, {"model.path": str(same), "steps": 2}).run().steps == 2


@pytest.mark.parametrize(("ends", "known"), [(None, True), (7, False)])
def test_stop_tokens_that_a_checkpoint_does_not_name_are_those_that_it_can_only_have_had(
    ends: int | None, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions did not note them, and the first knew the tokenizer's only."""
    boundary = Recorder._boundary

    def as_before(self: Recorder, step: int, owed: dict[str, Any] | None) -> Any:
        made = boundary(self, step, owed)
        del made.state["ends"]
        return made

    path = str(chat_model(tmp_path / "model", ends)) if ends is not None else "demo"
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "_boundary", as_before)
        folder = Trainer(small(tmp_path, "old", **{"model.path": path, "steps": 1})).run().folder
    if known:
        more = chat_model(tmp_path / "more", 9)
        with pytest.raises(StrettoError, match=r"this run's responses end at .*, 9 \("):
            Trainer.resume(folder, {"model.path": str(more), "steps": 2}).run()
    reporter = Messages()
    Trainer.resume(folder, {"steps": 2}, reporter=reporter).run()
    said = [text for text in reporter.texts if "ended this run's responses until now is not known" in text]
    assert len(said) == (0 if known else 1)
    assert all(", 7 (" in text for text in said)
    again = Messages()
    Trainer.resume(folder, {"steps": 3}, reporter=again).run()
    assert not any("is not known" in text for text in again.texts)  # from then on they are noted
