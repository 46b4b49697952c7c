"""What the learner's files in a checkpoint hold, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from stretto.errors import StrettoError
from stretto.learn.shards import divided_like

FORMAT = 2


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """A safetensors file's contents. Raises StrettoError if it cannot be read."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise StrettoError(f"{file} cannot be read: {error}") from error


def read_state(file: Path) -> dict[str, Any]:
    """The learner's counters. Raises StrettoError if they are missing or of another format."""
    try:
        body = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise StrettoError(f"{file} cannot be read: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else None
        raise StrettoError(f"{file} has format {found}; this Stretto reads {FORMAT}")
    for key in ("version", "optimizer_steps"):
        if not isinstance(body.get(key), int):
            raise StrettoError(f"{file}: {key} is {body.get(key)!r} and not a number")
    return body


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Copy the weights in `folder` into `model`, bit for bit."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= read_tensors(file)
    own = dict(model.named_parameters())
    differing = [n for n in own.keys() | found.keys() if _kind(own, n) != _kind(found, n)]
    if differing:
        name = min(differing)
        raise StrettoError(
            f"{folder} holds another model: {name} is {_kind(found, name)} there and {_kind(own, name)} here"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(divided_like(found[name], parameter))


def _kind(tensors: Mapping[str, torch.Tensor], name: str) -> str:
    return f"{tuple(tensors[name].shape)} {tensors[name].dtype}" if name in tensors else "missing"
