"""Tiny random models of every supported family, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 31


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """Two layers, hidden 16, four heads on two key/value heads (GPT-2: on four), a head size of its own."""
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.4}
    settings |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    if family == "gpt2":
        settings |= {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128}
    else:
        settings |= {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
        }
    build: Any = CONFIG_MAPPING[family]
    config: PretrainedConfig = build(**settings | changes)
    return config


def tiny_model(
    family: str,
    *,
    attention: str = "stretto",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **changes: Any,
) -> PreTrainedModel:
    """Random weights from `seed`, the same for every `attention`; large enough that logits differ clearly."""
    import stretto.model  # noqa: F401  (registers the attention)

    state = torch.get_rng_state()
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    model: Any = AutoModelForCausalLM
    model = model.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0.0, 0.2)
    torch.set_rng_state(state)
    built: PreTrainedModel = model.to(dtype).eval()
    return built


def swap_tokens(tokenizer: Path) -> None:
    """Let the last two tokens of a tokenizer.json change places."""
    found = json.loads(tokenizer.read_text())
    vocabulary = found["model"]["vocab"]
    a, b = list(vocabulary)[-2:]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    tokenizer.write_text(json.dumps(found))
