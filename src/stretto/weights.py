"""Weights on their way from the learner to the engines: published once, pulled by each worker."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """Names one version of the policy's weights.

    `shared`: the engine already holds the learner's own tensors; nothing moves, the version changes. Legal only
    where generation and update cannot overlap. `copy`: `tensors`, which nobody changes any more, are copied into the
    engine's own module.
    """

    version: int
    kind: Literal["shared", "copy"]
    tensors: Mapping[str, torch.Tensor]

    @property
    def fingerprint(self) -> str:
        """Of the weights as they are now; reads them all."""
        return fingerprint(self.tensors)


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names, shapes, dtypes and values; equal iff the weights are equal, bit for bit."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
