"""The model behind a per-call attention equals the plain model; what it can't be is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from peft import LoraConfig, inject_adapter_in_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from stretto.config import ModelConfig
from stretto.errors import StrettoError
from stretto.model import (
    FAMILIES,
    SMOLLM2,
    check_supported,
    end_tokens,
    hidden_states,
    load_model,
    load_tokenizer,
    logits,
    resolve_device,
)
from tests.models import VOCABULARY, tiny_config, tiny_model


def causal(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention over one sequence."""
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def ids(count: int) -> torch.Tensor:
    return torch.arange(count) * 7 % VOCABULARY


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_the_plain_model(family: str) -> None:
    plain = tiny_model(family, attention="sdpa")
    ours = tiny_model(family)
    token_ids = ids(20)
    with torch.no_grad():
        expected = plain(token_ids[None], use_cache=False).logits[0]
        found = logits(ours, hidden_states(ours, token_ids, torch.arange(20), causal))
    assert found.dtype == torch.float64
    assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_and_positions_are_the_callers_affair(family: str) -> None:
    model = tiny_model(family)

    def two_sequences(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        halves = [slice(0, 6), slice(6, 15)]
        parts = [causal(layer, query[:, :, s], key[:, :, s], value[:, :, s], scale) for s in halves]
        return torch.cat(parts, dim=1)

    token_ids = ids(15)
    positions = torch.cat([torch.arange(6), torch.arange(9)])
    with torch.no_grad():
        packed = hidden_states(model, token_ids, positions, two_sequences)
        first = hidden_states(model, token_ids[:6], torch.arange(6), causal)
        second = hidden_states(model, token_ids[6:], torch.arange(9), causal)
    assert (packed - torch.cat([first, second])).abs().max() < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_every_parameter_and_lora_layers_work(family: str) -> None:
    model = tiny_model(family)
    plain = tiny_model(family, attention="sdpa")
    token_ids = ids(12)
    logits(model, hidden_states(model, token_ids, torch.arange(12), causal)).logsumexp(-1).sum().backward()
    plain(token_ids[None], use_cache=False).logits.logsumexp(-1).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12), name

    config = LoraConfig(
        r=2, target_modules="all-linear", init_lora_weights=False, fan_in_fan_out=family == "gpt2"
    )
    for module in (model, plain):
        torch.manual_seed(1)
        inject_adapter_in_model(config, module)
        module.double()
    before = plain(token_ids[None], use_cache=False).logits[0]
    found = logits(model, hidden_states(model, token_ids, torch.arange(12), causal))
    assert (found - before).abs().max() < 1e-12
    model.zero_grad()
    found.sum().backward()
    assert any(p.grad is not None for n, p in model.named_parameters() if "lora" in n)


def test_the_model_refuses_to_run_without_an_attention() -> None:
    with pytest.raises(StrettoError, match=r"stretto\.model\.hidden_states"):
        tiny_model("llama")(ids(3)[None])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_loaded_as_it_was(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(path=str(tmp_path), dtype="float64", device="cpu"))
    assert not loaded.training
    for (name, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert load_model(ModelConfig(path=str(tmp_path), dtype="bfloat16", device="cpu")).dtype == torch.bfloat16


def test_dropout_is_off_even_in_training_mode(tmp_path: Path) -> None:
    tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path), device="cpu")).train()
    with torch.no_grad():
        first, second = (hidden_states(model, ids(8), torch.arange(8), causal) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_attention",
        ),
        ("gpt2", {"add_cross_attention": True}, "cross-attention"),
        ("gemma", {"use_bidirectional_attention": True}, "bidirectional"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantized"),
    ],
)
def test_what_packed_attention_cannot_compute_is_refused(
    family: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(StrettoError, match=message) as error:
        check_supported(tiny_config(family, **changes), "some/path")
    assert family in str(error.value)
    assert "some/path" in str(error.value)


def test_other_families_are_refused_before_any_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2"}))  # soft-capped scores
    with pytest.raises(StrettoError, match=r"gemma2.*supported: gemma, gpt2, llama, qwen2, qwen3"):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


def test_missing_places_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    nowhere = str(tmp_path / "nowhere")
    for load in (load_model, load_tokenizer):
        with pytest.raises(StrettoError, match=r"no folder .*nowhere"):
            load(ModelConfig(path=nowhere, device="cpu"))
        with pytest.raises(
            StrettoError, match=r"no folder .*SmolLM2.*; `make smollm2` in the repository makes"
        ):
            load(ModelConfig(path=str(tmp_path / SMOLLM2), device="cpu"))
        with pytest.raises(StrettoError, match=r"no-owner/no-model.*hub"):
            load(ModelConfig(path="no-owner/no-model", device="cpu"))
        with pytest.raises(StrettoError, match="could not be loaded"):
            load(ModelConfig(path=str(tmp_path), device="cpu"))


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(StrettoError, match=r"model\.norm\.weight"):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    for content in (file.read_bytes()[:-100], b"no weights" * 100, b""):
        file.write_bytes(content)
        with pytest.raises(StrettoError, match=re.escape(f'the model in "{tmp_path}" could not be loaded')):
            load_model(ModelConfig(path=str(tmp_path)))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(StrettoError, match="safetensors"):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


def word_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"<end>": 0, "a": 1, "?": 2}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", **special)


def test_a_tokenizer_needs_an_end_but_no_padding(tmp_path: Path) -> None:
    word_tokenizer(eos_token="<end>").save_pretrained(tmp_path / "good")
    tokenizer = load_tokenizer(ModelConfig(path="unused", tokenizer=str(tmp_path / "good")))
    assert tokenizer.eos_token_id == 0
    assert tokenizer.pad_token_id is None
    word_tokenizer().save_pretrained(tmp_path / "endless")
    with pytest.raises(StrettoError, match=r"endless.*end-of-sequence"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "endless")))


def test_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    if torch.cuda.is_available():
        assert resolve_device("auto").type == "cuda"
    else:
        assert resolve_device("auto").type == "cpu"
        with pytest.raises(StrettoError, match="no CUDA device"):
            resolve_device("cuda")


def test_tokens_that_end_a_response_are_the_tokenizers_and_the_models(tmp_path: Path) -> None:
    config = ModelConfig(path=str(tmp_path), tokenizer="demo")
    tokenizer = load_tokenizer(config)
    own = tokenizer.eos_token_id
    assert end_tokens(config, tokenizer, 300) == (own,)
    for named, ends in ((7, (own, 7)), ([own, 9, -1, 7, 300], (own, 9, 7)), (-1, (own,)), (None, (own,))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert end_tokens(config, tokenizer, 300) == ends


def test_a_damaged_file_is_not_one_that_names_no_ends(tmp_path: Path) -> None:
    config = ModelConfig(path=str(tmp_path), tokenizer="demo")
    tokenizer = load_tokenizer(config)
    for content, said in (
        ('{"eos_token_id": [1, 2', "cannot be read, and it may name tokens that end a response"),
        ('{"eos_token_id": "<end>"}', "eos_token_id is '<end>': expected a token id or a list of them"),
        ("[1, 2]", r"eos_token_id is \[1, 2\]: expected"),
    ):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(StrettoError, match=said) as caught:
            end_tokens(config, tokenizer, 300)
        assert str(caught.value).startswith(str(tmp_path / "generation_config.json"))


def test_a_look_up_that_fails_is_not_one_that_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "cached.json"
    named.write_text('{"eos_token_id": 7}')
    config = ModelConfig(path="owner/model", tokenizer="demo")
    tokenizer = load_tokenizer(config)
    own = tokenizer.eos_token_id

    def ends(found: str | Exception, known: object = None, offline: bool = False) -> tuple[int, ...]:
        def download(*asked: object, **how: object) -> str:
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr("stretto.model.hf_hub_download", download)
        monkeypatch.setattr("stretto.model.try_to_load_from_cache", lambda *asked, **how: known)
        monkeypatch.setattr("stretto.model.is_offline_mode", lambda: offline)
        return end_tokens(config, tokenizer, 300)

    assert ends(str(named)) == (own, 7)
    assert ends(EntryNotFoundError("no such file there")) == (own,)
    unreachable = LocalEntryNotFoundError("no connection")
    assert ends(unreachable, offline=True) == (own,)
    assert ends(unreachable, known=object()) == (own,)  # that there is none was noted
    for error in (unreachable, OSError("disk full")):
        with pytest.raises(
            StrettoError, match=r'the generation_config\.json "owner/model" could not be fetched'
        ):
            ends(error)
