"""What `HistoryRollout` refuses, before anything is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="make test-trl")


from stretto.errors import StrettoError
from stretto.integrations.trl import HistoryRollout
from tests.integrations.trl_runs import DRAFTED, prepare, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (
                {"repetition_penalty": 1.1},
                r"GRPOConfig: repetition_penalty = 1.1 is not supported .*leave it at 1.0",
            ),
            ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs: num_beams = 2 is not supported"),
            (
                {"generation_kwargs": {"typical_p": 0.5}},
                'typical_p = 0.5 is not supported .*did you mean "top_p"',
            ),
            ({"max_completion_length": None}, "max_completion_length = None: HistoryRollout needs a number"),
            ({"generation_kwargs": {"temperature": 0.0}}, "temperature = 0.0: expected a number above 0"),
        ],
        ids=str,
    )
    def test_of_generation_arguments(self, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
        ran = prepare(tmp_path, HistoryRollout(DRAFTED), **settings)
        with pytest.raises(StrettoError, match=message):
            ran.trainer.train()

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"draft": {"nodess": 3}}, "draft.nodess: unknown key"),
            ({"draft.nodes": 3}, "draft.nodes = 3 does nothing with draft.budget"),
            (
                {"sampling.temperature": 0.5},
                "sampling.temperature is not for this; it takes keys of draft, engine",
            ),
            ({"history": {"warm_from": "runs/x"}}, "history.warm_from: use history_dir"),
            ({"engine": {"kind": "vllm"}}, "engine.kind: it generates with the trainer's own model"),
            (
                {"engine.vllm.dtype": "float32"},
                "engine.vllm.dtype: it generates with the trainer's own model",
            ),
            ({"engine.max_num_seqs": 0}, "engine.max_num_seqs = 0: expected"),
        ],
        ids=str,
    )
    def test_of_keys(self, config: dict[str, Any], message: str) -> None:
        with pytest.raises(StrettoError, match=message):
            HistoryRollout(config)

    def test_of_a_trl_without_the_names_that_are_needed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran = prepare(tmp_path, HistoryRollout(DRAFTED))
        monkeypatch.delattr(type(ran.trainer), "_log_metric")
        with pytest.raises(StrettoError, match=r"has no _log_metric, .*pip install 'trl==1\.16\.0'"):
            ran.trainer.train()

    def test_of_a_model_family(self, tmp_path: Path) -> None:
        ran = prepare(tmp_path, HistoryRollout(DRAFTED))
        ran.trainer.model.config.model_type = "mamba"
        with pytest.raises(StrettoError, match='is of the family "mamba", which is not supported'):
            ran.trainer.train()

    def test_of_a_second_trainer(self, tmp_path: Path) -> None:
        rollout = HistoryRollout(DRAFTED)
        run(tmp_path / "a", rollout, max_steps=1)
        with pytest.raises(StrettoError, match="one HistoryRollout serves one trainer"):
            run(tmp_path / "b", rollout, max_steps=1)

    def test_of_rewards_that_nobody_tells(self, tmp_path: Path) -> None:
        with pytest.raises(StrettoError, match=r"reward_funcs=rollout.rewards\(reward_funcs\)"):
            run(tmp_path, HistoryRollout({**DRAFTED, "history.weight": "reward"}))

    def test_of_prompts_that_are_too_long(self, tmp_path: Path) -> None:
        ran = prepare(tmp_path, HistoryRollout({**DRAFTED, "engine.max_model_len": 16}))
        with pytest.raises(StrettoError, match=r"a prompt has \d+ tokens, .* engine.max_model_len is 16"):
            ran.trainer.train()

    def test_of_prompts_that_do_not_come_in_runs(self, tmp_path: Path) -> None:
        ran = prepare(tmp_path, HistoryRollout(DRAFTED))
        ran.trainer.model.train()
        texts = [row["prompt"] for row in ran.trainer.train_dataset]
        with pytest.raises(StrettoError, match=r"prompts 0 to 3 of this round, of 8, are 4 different ones"):
            ran.trainer.rollout_func(texts, ran.trainer)
