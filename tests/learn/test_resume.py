from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from stretto.config import LoraConfig
from stretto.errors import StrettoError
from stretto.learn.attention import PackedCausalAttention
from stretto.learn.learner import Learner
from stretto.learn.lora import merged_weights
from stretto.model import hidden_states
from tests.learn.rollouts import learner, random_batch
from tests.models import tiny_model

SETTINGS: dict[str, Any] = {
    "learning_rate": 0.02,
    "lr_schedule": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "kl_coef": 0.1,
    "total_steps": 6,
}
LORA = LoraConfig(rank=3, alpha=6.0)


def steps(made: Learner, first: int, last: int) -> list[dict[str, float]]:
    return [dict(made.update(random_batch(step, version=step)).metrics) for step in range(first, last)]


def outputs(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(9)
    attend = PackedCausalAttention([ids.numpy()], 9, torch.device("cpu"))
    with torch.no_grad():
        return hidden_states(model, ids, ids, attend)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lora", [None, LORA])
def test_resumed_training_is_the_same_bit_for_bit(
    tmp_path: Path, family: str, dtype: torch.dtype, lora: LoraConfig | None
) -> None:
    def fresh() -> Learner:
        return learner(tiny_model(family, dtype=dtype), lora=lora, **SETTINGS)

    whole = fresh()
    steps(whole, 0, 2)
    whole.save(tmp_path)
    after = steps(whole, 2, 5)

    resumed = fresh()
    resumed.load(tmp_path)
    assert resumed.version == 2
    assert steps(resumed, 2, 5) == after
    assert resumed.publish().fingerprint == whole.publish().fingerprint


def test_saved_before_the_first_step(tmp_path: Path) -> None:
    made = learner(tiny_model("llama"), **SETTINGS)
    made.save(tmp_path)
    other = learner(tiny_model("llama", seed=1), **SETTINGS | {"kl_coef": 0.0})
    other.load(tmp_path)
    assert other.version == 0
    assert other.publish().fingerprint == made.publish().fingerprint


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_checkpoint_is_a_hugging_face_model(tmp_path: Path, lora: LoraConfig | None) -> None:
    made = learner(tiny_model("qwen2"), lora=lora, **SETTINGS)
    steps(made, 0, 2)
    made.save(tmp_path)
    auto: Any = AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="stretto")
    torch.testing.assert_close(outputs(loaded), outputs(made.model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_the_adapter_is_peft_s(tmp_path: Path, family: str) -> None:
    made = learner(tiny_model(family), lora=LORA, **SETTINGS)
    steps(made, 0, 2)
    made.save(tmp_path)
    adapted = peft.PeftModel.from_pretrained(tiny_model(family), str(tmp_path / "adapter"))
    base: Any = adapted.get_base_model()
    found = outputs(base)
    torch.testing.assert_close(found, outputs(made.model), rtol=0, atol=1e-12)
    assert not torch.allclose(found, outputs(tiny_model(family)), atol=1e-3)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma"])
def test_lora_changes_adapters_only(family: str) -> None:
    made = learner(tiny_model(family), lora=LORA, **SETTINGS)
    assert torch.equal(outputs(made.model), outputs(tiny_model(family)))
    before = {name: p.clone() for name, p in made.model.named_parameters()}
    steps(made, 0, 2)
    changed = {name for name, p in made.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".lora_" in name}


@pytest.mark.parametrize("lora", [None, LORA])
def test_copies_are_whole_and_stay_as_they_were(lora: LoraConfig | None) -> None:
    made = learner(tiny_model("qwen2"), lora=lora, weights="copy", **SETTINGS)
    steps(made, 0, 2)
    ref = made.publish()
    assert (ref.version, ref.kind) == (2, "copy")
    expected = outputs(made.model)
    steps(made, 2, 3)
    engine = tiny_model("qwen2")
    own = dict(engine.named_parameters())
    assert own.keys() == ref.tensors.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(ref.tensors[name])
    torch.testing.assert_close(outputs(engine), expected, rtol=0, atol=1e-6)


def test_shared_weights_move_nothing() -> None:
    made = learner(tiny_model("llama"), **SETTINGS)
    first = made.publish()
    before = first.fingerprint
    steps(made, 0, 1)
    own = dict(made.model.named_parameters())
    assert all(tensor.data_ptr() == own[name].data_ptr() for name, tensor in first.tensors.items())
    assert first.fingerprint != before


def test_initial_adapters_depend_on_the_seed_alone() -> None:
    def adapters(seed: int) -> str:
        torch.rand(seed + 1)
        return learner(tiny_model("llama"), lora=LORA, seed=seed, **SETTINGS).publish().fingerprint

    assert adapters(1) == adapters(1) != adapters(2)


def test_making_adapters_leaves_the_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    learner(tiny_model("llama"), lora=LORA, **SETTINGS)
    assert torch.equal(torch.rand(1), expected)


def test_merged_weights_of_a_plain_model_are_its_own() -> None:
    model = tiny_model("llama")
    merged = merged_weights(model)
    assert {name: t.data_ptr() for name, t in merged.items()} == {
        name: p.data_ptr() for name, p in model.named_parameters()
    }


# ---- refusals -----------------------------------------------------------------------------------------------


def test_unknown_target_modules_are_refused_with_the_nearest() -> None:
    with pytest.raises(StrettoError, match=r'model\.lora\.target_modules: .*"qproj"; did you mean "q_proj"'):
        learner(tiny_model("llama"), lora=LoraConfig(target_modules=["qproj"]), **SETTINGS)


def test_other_adapters_are_refused(tmp_path: Path) -> None:
    learner(tiny_model("llama"), lora=LORA, **SETTINGS).save(tmp_path)
    with pytest.raises(StrettoError, match=r"other adapters .* \(3, \d+\) there and \(4, \d+\) here"):
        learner(tiny_model("llama"), lora=LoraConfig(rank=4), **SETTINGS).load(tmp_path)


def test_a_checkpoint_without_adapters_is_refused(tmp_path: Path) -> None:
    learner(tiny_model("llama"), **SETTINGS).save(tmp_path)
    with pytest.raises(StrettoError, match=r"adapter_model\.safetensors is missing"):
        learner(tiny_model("llama"), lora=LORA, **SETTINGS).load(tmp_path)


def test_another_model_is_refused(tmp_path: Path) -> None:
    learner(tiny_model("llama"), **SETTINGS).save(tmp_path)
    with pytest.raises(
        StrettoError, match=r"holds another model: .*k_proj.bias is missing there and \(16,\)"
    ):
        learner(tiny_model("qwen2"), **SETTINGS).load(tmp_path)


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"format": 2}', '{"format": 9, "version": 1, "optimizer_steps": 1}']
)
def test_damaged_state_is_refused(tmp_path: Path, content: str | None) -> None:
    made = learner(tiny_model("llama"), **SETTINGS)
    made.save(tmp_path)
    file = tmp_path / "learner.json"
    assert json.loads(file.read_text())["version"] == 0
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(StrettoError, match=r"learner\.json"):
        made.load(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_damaged_moments_are_refused(tmp_path: Path, damage: str) -> None:
    made = learner(tiny_model("llama"), **SETTINGS)
    steps(made, 0, 1)
    made.save(tmp_path)
    file = tmp_path / "optimizer/state.safetensors"
    content = file.read_bytes()
    file.unlink()
    if damage == "cut off":
        file.write_bytes(content[: len(content) // 2])
    with pytest.raises(StrettoError, match=r"state\.safetensors cannot be read"):
        made.load(tmp_path)
