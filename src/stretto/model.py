"""The policy as everyone sees it: tokenizer, module, and a forward pass whose attention the caller brings.

Engine and learner run the same unmodified Hugging Face module over packed tokens; what differs is how a token
finds the keys and values of its own sequence. That is an `Attend` object, handed through the model's forward
keyword arguments to one attention function registered with transformers. The model's configuration is never
edited, so one module serves several callers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import AttentionInterface
from transformers.utils import GENERATION_CONFIG_NAME

from stretto.config import ModelConfig
from stretto.errors import StrettoError

FAMILIES = ("gemma", "gpt2", "llama", "qwen2", "qwen3")
"""Values of `model_type` that are tested against the plain model."""

SMOLLM2 = "SmolLM2-135M-Instruct"
"""The model of examples/gsm8k_smollm2.toml."""

ATTENTION = "stretto"
"""Name of our attention function in transformers' registry."""

# These rescale their frequencies by the longest position of the *batch*, so that a sequence's logits would
# depend on what happens to run beside it.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_DEMO = Path(__file__).parent / "demo" / "model"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class Attend(Protocol):
    """Attention over packed tokens: T tokens of any number of sequences, in one row.

    `query` is (1, H, T, D), `key` and `value` are (1, Hkv, T, D) with H a multiple of Hkv, positions already
    encoded; `scale` multiplies the scores. Returns (1, T, H, D). Called once per layer, in order.
    """

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor: ...


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    attend: Attend | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The signature is transformers'; everything is decided by the `attend` that came down with the call."""
    if attend is None:
        raise StrettoError(
            f'attn_implementation="{ATTENTION}" needs an `attend` argument: run the model through '
            "stretto.model.hidden_states, or load it with another attn_implementation"
        )
    layer: Any = module.layer_idx
    return attend(layer, query, key, value, scaling), None


# No mask function is registered under this name: transformers then builds no mask at all.
AttentionInterface.register(ATTENTION, _attention)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or the one named by `config.tokenizer`.

    A pad token is not needed: nothing is ever padded. Raises `StrettoError` if it cannot be loaded or has no
    end-of-sequence token, without which no response could end by itself.
    """
    path = location(config.tokenizer or config.path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, revision=config.revision)
    except (OSError, ValueError, KeyError) as error:
        raise StrettoError(_not_loaded("tokenizer", path, error)) from error
    if tokenizer.eos_token_id is None:
        raise StrettoError(
            f'tokenizer "{path}" has no end-of-sequence token, so responses could never end: set "eos_token" in '
            "its tokenizer_config.json, or name another tokenizer with model.tokenizer"
        )
    return tokenizer


def end_tokens(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> tuple[int, ...]:
    """Ids of the tokens that end a response: the tokenizer's end of sequence, and what else the generation_config.json
    of the model names, if it has one, among its `vocabulary` tokens: chat models may end a turn with another.

    Raises `StrettoError` if that file cannot be had or read: responses would not end where they should.
    """
    file = _generation_config(config)
    named = _named_ends(file) if file is not None else []
    ids = (tokenizer.eos_token_id, *(token for token in named if 0 <= token < vocabulary))
    return tuple(dict.fromkeys(map(int, ids)))


def _generation_config(config: ModelConfig) -> Path | None:
    """The model's generation_config.json, fetched where need be; None if it has none."""
    path = location(config.path)
    if Path(path).is_dir():
        file = Path(path) / GENERATION_CONFIG_NAME
        return file if file.exists() else None
    try:
        return Path(hf_hub_download(path, GENERATION_CONFIG_NAME, revision=config.revision))
    except LocalEntryNotFoundError as error:  # neither in the cache nor to be asked for
        known = try_to_load_from_cache(path, GENERATION_CONFIG_NAME, revision=config.revision)
        if (
            is_offline_mode() or known is not None
        ):  # what was fetched is all there is, or that there is none is noted
            return None
        raise StrettoError(_not_loaded(GENERATION_CONFIG_NAME, path, error)) from error
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StrettoError(_not_loaded(GENERATION_CONFIG_NAME, path, error)) from error


def _named_ends(file: Path) -> list[int]:
    """What a generation_config.json has as `eos_token_id`. Raises StrettoError if it cannot be read or is no id."""
    try:
        body = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise StrettoError(
            f"{file} cannot be read, and it may name tokens that end a response: {error}"
        ) from error
    found = body.get("eos_token_id") if isinstance(body, dict) else body
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not isinstance(body, dict) or not all(type(token) is int for token in ids):
        raise StrettoError(f"{file}: eos_token_id is {found!r}: expected a token id or a list of them")
    return ids


def vocabulary_hash(vocabulary: Mapping[str, int]) -> str:
    """Of a tokenizer's `get_vocab()`: what token ids mean."""
    return blake2b(json.dumps(sorted(vocabulary.items())).encode(), digest_size=16).hexdigest()


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """The model's own configuration, without its weights. Raises `StrettoError` if missing or not supported."""
    path = location(config.path)
    try:
        model_config: PretrainedConfig = AutoConfig.from_pretrained(path, revision=config.revision)
    except (OSError, ValueError, KeyError) as error:
        raise StrettoError(_not_loaded("model", path, error)) from error
    check_supported(model_config, path)
    return model_config


def load_model(config: ModelConfig) -> PreTrainedModel:
    """The policy in evaluation mode, on its device, in `config.dtype`, with our attention; without LoRA layers.

    Reads safetensors only. Dropout is switched off for good: engine and learner must see the same policy.
    Raises `StrettoError` for what is missing or not supported, before any weights are read.
    """
    path = location(config.path)
    device = resolve_device(config.device)
    model_config = load_model_config(config)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config,
            revision=config.revision,
            dtype=getattr(torch, config.dtype),
            attn_implementation=ATTENTION,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise StrettoError(_not_loaded("model", path, error)) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise StrettoError(
            f'model "{path}": {len(missing)} weights are missing: {", ".join(missing[:3])} ...'
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    policy: PreTrainedModel = model.to(device).eval()
    return policy


def resolve_device(name: str) -> torch.device:
    """The device for "auto" (CUDA when there, else CPU), "cpu" or "cuda"; `StrettoError` if it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise StrettoError('model.device is "cuda", but torch finds no CUDA device here: use "cpu" or "auto"')
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def check_supported(config: PretrainedConfig, path: str) -> None:
    """Raise `StrettoError` if packed tokens with our attention would not compute what the model means."""
    family = getattr(config, "model_type", "")
    if family not in FAMILIES:
        raise StrettoError(
            f'model "{path}" is of the family "{family}", which is not supported; '
            f"supported: {', '.join(FAMILIES)}"
        )

    def refuse(what: str) -> None:
        raise StrettoError(
            f'model "{path}" (family "{family}") uses {what}, which is not supported; '
            "supported is full causal attention over unquantized weights"
        )

    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        refuse("cross-attention")
    if getattr(config, "use_bidirectional_attention", False):
        refuse("bidirectional attention")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other:
        refuse(f"layers of type {', '.join(other)}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _BATCH_DEPENDENT_ROPE:
        refuse(f'"{rope}" position scaling (it depends on the whole batch)')
    if getattr(config, "quantization_config", None) is not None:
        refuse("quantized weights")


def hidden_states(
    model: PreTrainedModel, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
) -> torch.Tensor:
    """Last hidden states (T, hidden) of packed `token_ids` (T,) at `positions` (T,); no output layer.

    Works under autograd and with LoRA layers injected into the module.
    """
    embeddings = model.get_input_embeddings()(token_ids[None])
    output = model.base_model(
        inputs_embeds=embeddings, position_ids=positions[None], use_cache=False, attend=attend
    )
    states: torch.Tensor = output.last_hidden_state[0]
    return states


def logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Next-token logits (..., vocabulary) of `hidden` (..., hidden), in the model's dtype."""
    output_layer: Any = model.get_output_embeddings()
    scores: torch.Tensor = output_layer(hidden)
    return scores


def copy_tensors(tensors: Mapping[str, torch.Tensor], model: PreTrainedModel, name: str) -> None:
    """Copy parameters by name into `model`. Raises `StrettoError`, with nothing copied, if one does not fit."""
    own = dict(model.named_parameters())
    for key, tensor in tensors.items():
        if key not in own or own[key].shape != tensor.shape:
            has = tuple(own[key].shape) if key in own else "no such tensor"
            raise StrettoError(
                f"{name}: {key} {tuple(tensor.shape)} does not fit, the engine's model has {has}"
            )
    with torch.no_grad():
        for key, tensor in tensors.items():
            own[key].copy_(tensor)


def location(path: str) -> str:
    return str(_DEMO) if path == "demo" else path


def _not_loaded(what: str, path: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    detail = " ".join(lines[:3]) or type(error).__name__  # the reason is often not in the first one
    if Path(path).exists():
        return f'the {what} in "{path}" could not be loaded: {detail}'
    if _HUB_NAME.fullmatch(path):
        return (
            f'there is no folder "{path}", and the {what} "{path}" could not be fetched from the Hugging Face '
            f"hub (no such name, or the hub could not be reached): {detail}"
        )
    return f'{what}: there is no folder "{path}"{_fetched_by(path)}'


def _fetched_by(path: str) -> str:
    """How to get a model that the repository's examples name, and that cannot lie in it."""
    return "; `make smollm2` in the repository makes it" if Path(path).name == SMOLLM2 else ""
