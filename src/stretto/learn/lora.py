"""Low-rank adapters (LoRA, 2106.09685) put into a model in place, by peft."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from stretto.config import LoraConfig
from stretto.errors import StrettoError, nearest

ADAPTER = "default"  # peft's name for the only one
PEFT_PREFIX = "base_model.model."  # of the names in a peft adapter file


def inject_lora(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Put trainable adapters into `model` and freeze everything else; at first they change no output.

    Adapters are float32 where the model is bfloat16. Their initial values depend on `seed` alone. They have no dropout:
    learner and engine must see the same policy.
    """
    peft_config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number works
        target_modules=config.target_modules,
        base_model_name_or_path=model.name_or_path,
    )
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        torch.manual_seed(seed)
        # GPT-2's transposed layers: peft sets the flag that it warns about.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        try:
            peft.inject_adapter_in_model(peft_config, model)
        except ValueError as error:
            leaves = {
                name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)
            }
            wanted = config.target_modules if isinstance(config.target_modules, list) else ["all-linear"]
            unknown = [name for name in wanted if name not in leaves] or wanted
            raise StrettoError(
                f'model.lora.target_modules: no layer of the model matches "{unknown[0]}"; '
                f"{nearest(unknown[0], leaves)}"
            ) from error


def merged_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's parameters under their plain names, adapters merged in; tied ones once, under the first name.

    Without adapters these are the parameters themselves, not copies.
    """
    merged: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if ".lora_" in f".{owner}.":
            continue
        layer_name, is_base, _ = owner.rpartition(".base_layer")
        if not is_base:
            merged[name] = parameter.detach()
            continue
        value = parameter.detach()
        if leaf == "weight":
            layer: Any = model.get_submodule(layer_name)
            with torch.no_grad():
                delta = layer.get_delta_weight(ADAPTER)
                # One rounding to the base's precision, after the sum.
                value = (value.to(delta.dtype) + delta).to(value.dtype)
        merged[f"{layer_name}.{leaf}"] = value
    return merged


@contextmanager
def adapters_disabled(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before `inject_lora`."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    switched = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, requires_grad in switched:  # peft's switch sets these too
            parameter.requires_grad_(requires_grad)


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, as `peft.PeftModel.from_pretrained` reads them."""
    config: Any = model.peft_config
    config[ADAPTER].save_pretrained(folder)
    tensors = {
        PEFT_PREFIX + name: t.contiguous() for name, t in peft.get_peft_model_state_dict(model).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Read what `save_adapter` wrote into the adapters that `model` has."""
    file = folder / "adapter_model.safetensors"
    if not file.exists():
        raise StrettoError(f"{file} is missing: was this checkpoint written without model.lora?")
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise StrettoError(f"{file} cannot be read: {error}") from error
    saved = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    own = {name: tuple(tensor.shape) for name, tensor in peft.get_peft_model_state_dict(model).items()}
    found = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if own != found:
        differing = min(name for name in own.keys() | found.keys() if own.get(name) != found.get(name))
        raise StrettoError(
            f"{file} has other adapters than model.lora asks for: {differing} is {found.get(differing)} there "
            f"and {own.get(differing)} here; resume with the same model.lora"
        )
    peft.set_peft_model_state_dict(model, saved)
