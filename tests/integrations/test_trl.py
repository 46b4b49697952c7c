"""TRL's `GRPOTrainer` with our rollout function: drafts change nothing, and nothing of the trainer's is changed."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="make test-trl")

from peft import LoraConfig
from transformers import TrainerCallback

from stretto.errors import StrettoError
from stretto.integrations.trl import HistoryRollout
from stretto.integrations.trl_history import HistoryFolder
from tests.integrations.trl_runs import DRAFTED, Ran, brief, prepare, right, run

PLAIN = {"draft.budget": "none"}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def assert_same(a: Ran, b: Ran) -> None:
    assert a.completions() == b.completions()
    assert a.logged("reward") == b.logged("reward")
    assert a.logged("loss") == b.logged("loss")
    left, right = a.weights(), b.weights()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run without drafts, all settings at their defaults."""
    return run(tmp_path_factory.mktemp("plain"), HistoryRollout(PLAIN))


class TestDrafting:
    @pytest.mark.parametrize(
        "settings",
        [
            {
                "gradient_checkpointing": False,
                "steps_per_generation": 2,
                "per_device_train_batch_size": 8,
                "max_steps": 8,
            },
            {
                "temperature": 0.8,
                "top_p": 0.9,
                "top_k": 20,
                "min_p": 0.01,
                "num_iterations": 2,
                "max_steps": 8,
            },
            {"bf16": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
        ],
        ids=["two-steps-a-generation", "truncated", "autocast"],
    )
    def test_changes_neither_completions_nor_rewards_nor_weights(
        self, tmp_path: Path, settings: dict[str, Any]
    ) -> None:
        plain = run(tmp_path / "plain", HistoryRollout(PLAIN), **settings)
        drafted = run(tmp_path / "drafted", HistoryRollout(DRAFTED), **settings)
        if settings.get("bf16"):  # rounding may flip a token: it is not float64
            assert len(drafted.completions()) == len(plain.completions())
        else:
            assert_same(plain, drafted)
        steps = drafted.logged("stretto/tokens_per_step")
        assert set(plain.logged("stretto/tokens_per_step")) == {1.0}
        assert steps[-1] > 1.5  # the later visits are drafted from the first

    def test_by_default_and_with_rewards_that_weigh_the_history(self, tmp_path: Path, plain: Ran) -> None:
        rollout = HistoryRollout({"history": {"weight": "reward"}})
        assert_same(plain, run(tmp_path / "drafted", rollout, rewards=rollout.rewards))

    def test_of_lora_adapters(self, tmp_path: Path) -> None:
        lora = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)}
        plain = run(tmp_path / "plain", HistoryRollout(PLAIN), trainer=lora, learning_rate=1e-2)
        drafted = run(tmp_path / "drafted", HistoryRollout(DRAFTED), trainer=lora, learning_rate=1e-2)
        assert_same(plain, drafted)
        moved = [w for name, w in drafted.weights().items() if "lora_B" in name]
        assert all(bool(w.abs().max() > 0) for w in moved)

    def test_of_conversations_as_trl_puts_them_into_the_chat_template(
        self, tmp_path: Path, plain: Ran
    ) -> None:
        # The template adds nothing: the prompts' tokens are those of the text.
        assert_same(plain, run(tmp_path, HistoryRollout(DRAFTED), chat=True))


class TestCompletions:
    def test_have_the_log_probs_that_the_model_gives_them(self, tmp_path: Path) -> None:
        ran = prepare(tmp_path, HistoryRollout(DRAFTED), temperature=0.7)
        before = ran.weights()
        ran.trainer.train()
        _, first = ran.calls[0]
        model = ran.trainer.model.eval()
        model.load_state_dict(before, strict=False)
        for prompt, completion, logprobs in zip(*first.values(), strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.7
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
            assert torch.allclose(expected, torch.tensor(logprobs, dtype=torch.float64), atol=1e-9)

    def test_are_siblings_in_runs_and_differ(self, tmp_path: Path) -> None:
        ran = run(tmp_path, HistoryRollout(DRAFTED))
        for _, output in ran.calls:
            prompts = [tuple(ids) for ids in output["prompt_ids"]]
            assert [prompts[i : i + 4] for i in range(0, 16, 4)] == [[p] * 4 for p in prompts[::4]]
        asked = Counter(tuple(ids) for _, output in ran.calls for ids in output["prompt_ids"])
        assert sorted(asked.values()) == [8] * 8  # four steps of four prompts: two visits
        groups = [tuple(map(tuple, said[i : i + 4])) for said in ran.completions() for i in range(0, 16, 4)]
        assert sum(len(set(group)) > 1 for group in groups) > len(groups) // 2
        assert len(set(groups)) > 12  # and visits do not repeat each other

    def test_end_with_a_stop_token_or_their_length(self, tmp_path: Path) -> None:
        ran = run(tmp_path, HistoryRollout(DRAFTED), max_steps=2)
        stops = set(ran.trainer.eos_token_ids)
        said = [ids for round in ran.completions() for ids in round]
        assert any(ids[-1] in stops for ids in said)
        assert all(len(ids) == 24 or ids[-1] in stops for ids in said)
        assert not any(stops & set(ids[:-1]) for ids in said)


class TestEvaluation:
    def test_is_the_same_with_drafts_and_draws_the_same_noise_each_time(self, tmp_path: Path) -> None:
        settings: dict[str, Any] = {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "per_device_eval_batch_size": 4,
            "num_generations_eval": 2,
            "max_steps": 4,
        }
        plain = run(tmp_path / "plain", HistoryRollout(PLAIN), **settings)
        drafted = run(tmp_path / "drafted", HistoryRollout(DRAFTED), **settings)
        assert_same(plain, drafted)
        assert plain.completions(training=False) == drafted.completions(training=False)
        assert len(plain.completions(training=False)) == 4  # two evaluations of two batches
        assert plain.logged("eval_reward") == drafted.logged("eval_reward")
        assert drafted.logged("eval_stretto/tokens_per_step")
        without = run(tmp_path / "without", HistoryRollout(DRAFTED), max_steps=4)
        assert without.completions() == drafted.completions()
        index = [r.rollout._drafter.index.metrics()["tokens"] for r in (without, drafted)]  # type: ignore[union-attr]
        assert index[0] == index[1]  # not remembered
        drafted.trainer.evaluate()
        drafted.trainer.evaluate()
        *_, a, b, c, d = drafted.completions(training=False)
        assert [a, b] == [c, d]


class TestTrainer:
    def test_finds_its_model_as_it_was(self, tmp_path: Path) -> None:
        ran = prepare(tmp_path, HistoryRollout(DRAFTED))
        model = ran.trainer.model
        model.train()
        frozen = model.model.layers[1]
        frozen.eval()  # modes may differ from module to module
        model.gradient_checkpointing_enable()
        modes = {name: module.training for name, module in model.named_modules()}
        attention, weights = model.config._attn_implementation, ran.weights()
        prompts = [row["prompt"] for row in ran.trainer.train_dataset for _ in range(4)]
        ran.trainer.rollout_func(prompts, ran.trainer)
        assert {name: module.training for name, module in model.named_modules()} == modes
        assert model.config._attn_implementation == attention
        assert model.is_gradient_checkpointing
        assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
        assert all(p.requires_grad and p.grad is None for p in model.parameters())

    def test_finds_it_so_too_where_generation_fails(self, tmp_path: Path) -> None:
        ran = prepare(tmp_path, HistoryRollout(DRAFTED))
        model, prompts = ran.trainer.model.train(), [ran.trainer.train_dataset[0]["prompt"]] * 4
        ran.trainer.rollout_func(prompts, ran.trainer)
        failing = model.model.layers[1].register_forward_hook(_fail)
        with pytest.raises(RuntimeError, match="out of order"):
            ran.trainer.rollout_func(prompts, ran.trainer)
        failing.remove()
        assert model.training
        assert model.config._attn_implementation == "sdpa"
        ran.trainer.rollout_func(prompts, ran.trainer)

    def test_logs_engine_and_drafting_apart(self, tmp_path: Path) -> None:
        ran = run(tmp_path, HistoryRollout(DRAFTED), max_steps=3)
        for name in ("engine_seconds", "drafting_seconds", "index_seconds", "tokens_per_step", "history_mib"):
            assert len(ran.logged(f"stretto/{name}")) == 3
        assert all(0 < share <= 1 for share in ran.logged("stretto/acceptance"))


class TestRewards:
    def test_reach_the_history_and_pass_unchanged(self, tmp_path: Path) -> None:
        async def waits(completions: list[str], **columns: Any) -> list[float | None]:
            return [None if i % 2 else 0.5 for i in range(len(completions))]

        rollout = HistoryRollout(DRAFTED, history_dir=tmp_path / "history")
        ran = prepare(
            tmp_path,
            rollout,
            rewards=lambda functions: rollout.rewards([*functions, waits]),
            reward_weights=[1.0, 2.0, 3.0],
            max_steps=2,
        )
        assert ran.trainer.reward_func_names == ["right", "brief", "waits"]
        ran.trainer.train()
        from stretto.history.log import read_rollouts

        kept = [read_rollouts(path) for path in sorted((tmp_path / "history").glob("*.parquet"))]
        assert len(kept) == 2
        for step, rollouts in enumerate(kept):
            parts = [
                r.reward_parts["right"] + 2 * r.reward_parts["brief"] + 3 * r.reward_parts.get("waits", 0.0)
                for r in rollouts
            ]
            assert [r.reward for r in rollouts] == pytest.approx(parts)
            assert sum(parts) / 16 == pytest.approx(ran.logged("reward")[step], abs=1e-5)
            assert [r.reward_parts.get("waits") for r in rollouts] == [0.5, None] * 8

    def test_are_watched_once(self) -> None:
        rollout = HistoryRollout()
        assert rollout.rewards(right).__name__ == "right"
        with pytest.raises(StrettoError, match="called before"):
            rollout.rewards([brief])

    @pytest.mark.parametrize("none", [(right, brief), {"right": right}, [right, None], 1.0])
    def test_of_what_is_no_function_are_refused(self, none: Any) -> None:
        rollout = HistoryRollout()
        with pytest.raises(StrettoError, match="is no reward function; give it one, or a list"):
            rollout.rewards(none)
        assert rollout.rewards([right])

    def test_of_completions_that_no_function_has_an_opinion_on_are_unknown(self, tmp_path: Path) -> None:
        def silent(completions: list[str], **columns: Any) -> list[float | None]:
            return [None] * len(completions)

        def generated(completions: list[str], **columns: Any) -> Any:
            return (None if i < 8 else 0.5 for i in range(len(completions)))

        settings = DRAFTED | {"history.weight": "reward"}
        rollout = HistoryRollout(settings, history_dir=tmp_path / "history")
        ran = run(tmp_path, rollout, rewards=lambda _: rollout.rewards([silent, generated]), max_steps=3)
        assert len(ran.logged("reward")) == 3
        from stretto.history.log import read_rollouts

        for path in sorted((tmp_path / "history").glob("*.parquet")):
            kept = [r.reward for r in read_rollouts(path)]
            assert kept == pytest.approx([math.nan] * 8 + [0.5] * 8, nan_ok=True)

    @pytest.mark.parametrize(("wrong", "said"), [(None, "not iterable"), ([1.0], "returned 1 rewards")])
    def test_of_a_function_that_gives_no_rewards_the_trainer_speaks(
        self, wrong: Any, said: str, tmp_path: Path
    ) -> None:
        rollout = HistoryRollout(DRAFTED)
        ran = prepare(tmp_path, rollout, rewards=lambda _: rollout.rewards(lambda completions, **_: wrong))
        with pytest.raises((TypeError, ValueError), match=said):
            ran.trainer.train()


class _Stop(TrainerCallback):
    """Ends training after the step whose number it has."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self._step


class TestResume:
    def test_goes_on_as_it_would_have(self, tmp_path: Path) -> None:
        settings: dict[str, Any] = {
            "save_strategy": "steps",
            "save_steps": 1,
            "max_steps": 6,
            "shuffle_dataset": False,
        }
        # (shuffled, TRL begins a resumed run with the order of the first epoch)
        through = run(tmp_path / "through", HistoryRollout(DRAFTED), **settings)
        stopped = prepare(tmp_path / "run", HistoryRollout(DRAFTED, history_dir=tmp_path / "h"), **settings)
        stopped.trainer.add_callback(_Stop(3))
        stopped.trainer.train()
        rollout = HistoryRollout(DRAFTED, history_dir=tmp_path / "h")
        resumed = prepare(tmp_path / "run", rollout, **settings)
        resumed.trainer.train(resume_from_checkpoint=True)
        assert stopped.completions() + resumed.completions() == through.completions()
        left, whole = resumed.weights(), through.weights()
        assert all(torch.equal(left[name], whole[name]) for name in left)
        assert resumed.logged("stretto/tokens_per_step")[-3] > 1.5  # drafted from what was before

    def test_keeps_the_newest_visits_only(self, tmp_path: Path) -> None:
        config = {**DRAFTED, "history.window": 1}
        run(tmp_path, HistoryRollout(config, history_dir=tmp_path / "h"), max_steps=6)
        assert sorted(path.name for path in (tmp_path / "h").glob("*.parquet")) == [
            "round-000004.parquet",
            "round-000005.parquet",
        ]

    def test_is_kept_where_nothing_is_drafted(self, tmp_path: Path) -> None:
        """A script that is started again with drafts has them from its first step."""
        run(tmp_path / "a", HistoryRollout(PLAIN, history_dir=tmp_path / "h"), max_steps=2)
        ran = run(tmp_path / "b", HistoryRollout(DRAFTED, history_dir=tmp_path / "h"), max_steps=1)
        assert ran.logged("stretto/tokens_per_step")[0] > 1.5

    def test_leaves_out_what_is_damaged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        run(tmp_path / "a", HistoryRollout(DRAFTED, history_dir=tmp_path / "h"), max_steps=2)
        (tmp_path / "h" / "round-000001.parquet").write_bytes(b"not a table")
        ran = run(tmp_path / "b", HistoryRollout(DRAFTED, history_dir=tmp_path / "h"), max_steps=1)
        assert "nothing is drafted from" in caplog.text
        assert ran.logged("stretto/tokens_per_step")[0] > 1.5

    def test_a_full_disk_is_said_once_and_ends_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        history = tmp_path / "h"
        for number in range(8):  # nothing can be put in a folder's place
            (history / f"round-{number:06}.parquet" / "taken").mkdir(parents=True)
        folder = HistoryFolder(history, {"a": 0}, window=1, max_bytes=1 << 20, writes=True)
        for number in range(2):
            folder.write([], number)
        assert caplog.text.count("responses are not kept for a later start") == 1

    def test_belongs_to_one_script_at_a_time(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        history = tmp_path / "h"
        code = (
            "import sys; from pathlib import Path; from stretto.lock import Lock; "
            "lock = Lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
        )
        history.mkdir()
        command = [sys.executable, "-c", code, str(history / "lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            ran = prepare(tmp_path / "a", HistoryRollout(DRAFTED, history_dir=history))
            with pytest.raises(StrettoError, match=f"is being written by process {other.pid}"):
                ran.trainer.train()
            other.communicate()
        first = HistoryFolder(history, {"a": 0}, window=1, max_bytes=1 << 20, writes=True)
        second = HistoryFolder(history, {"a": 0}, window=1, max_bytes=1 << 20, writes=True)
        second.write([], 0)
        first.write([], 1)  # the one that came later has it
        assert [path.name for path in history.glob("*.parquet")] == ["round-000000.parquet"]
        assert "responses are not kept" in caplog.text

    def test_refuses_another_tokenizers_history(self, tmp_path: Path) -> None:
        HistoryFolder(tmp_path, {"a": 0, "b": 1}, window=1, max_bytes=1, writes=True).release()
        HistoryFolder(tmp_path, {"b": 1, "a": 0}, window=1, max_bytes=1, writes=False)
        with pytest.raises(StrettoError, match="has the history of another tokenizer"):
            HistoryFolder(tmp_path, {"a": 1, "b": 0}, window=1, max_bytes=1, writes=False)

    def test_refuses_another_models_history(self, tmp_path: Path) -> None:
        run(tmp_path / "a", HistoryRollout(DRAFTED, history_dir=tmp_path / "h"), max_steps=2)
        ran = prepare(tmp_path / "b", HistoryRollout(DRAFTED, history_dir=tmp_path / "h"))
        ran.trainer.model.config.vocab_size = 20
        with pytest.raises(StrettoError, match=r"has the token id \d+, but this model has 20 tokens"):
            ran.trainer.train()


def _fail(*_: Any) -> None:
    raise RuntimeError("out of order")
