"""One rank's part of a learner that several processes share: FSDP2 over weights, gradients and optimizer state.

Every rank gets the whole batch, computes its share of the micro-batches, and takes part in every sum; so the update is
that of one process, up to the order of summation (in bfloat16 up to the rounding of each rank's sums, which one process
keeps in float32). torch.distributed, slow to import, is imported by those who have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

T = TypeVar("T")


class Shards:
    """The process group of a sharded learner, which torch.distributed has been told of, as one rank sees it."""

    def __init__(self, device: torch.device) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._device = device
        self._mesh = init_device_mesh(device.type, (self.count,))

    def shard(self, scorer: nn.Module, layers: Sequence[str]) -> None:
        """Divide the parameters of `scorer` among the ranks, in place. Modules of the classes named `layers` are
        gathered one at a time when they compute, all others for the whole pass.

        Gradients are summed over ranks, not averaged: the loss is divided by the whole batch's size already.
        """
        from torch.distributed.fsdp import FSDPModule, fully_shard

        inner = [module for module in scorer.modules() if type(module).__name__ in layers]
        # Divided again after each forward pass: one without a backward would leave the outermost part whole, and later
        # ones would compute with, and checkpoints hold, what it was before the step.
        for module in (*inner, scorer):
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
        for module in scorer.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                # Else torch multiplies by that factor within the sum (below float64), which gloo cannot.
                module.set_force_sum_reduction_for_comms(True)

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All of these tensors, one after the other put together and taken to rank 0's CPU; elsewhere none is kept."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            one = whole(tensor.detach())
            if self.rank == 0:
                found[name] = one.cpu()
        return found

    def share(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """The items of this rank, and whether they count. All ranks get as many, since they gather weights together:
        who has one less computes another's, which doesn't count.
        """
        rounds = -(-len(items) // self.count)
        places = [self.rank + self.count * i for i in range(rounds)]
        return [(items[min(place, len(items) - 1)], place < len(items)) for place in places]

    def sum(self, array: Any) -> Any:
        """The sum over ranks of a numpy array, which has the same shape on all."""
        import torch.distributed as dist

        tensor = torch.from_numpy(array.astype("float64")).to(self._device)
        dist.all_reduce(tensor)
        return tensor.cpu().numpy().astype(array.dtype)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, put together from all ranks if it is divided: all of them must ask."""
    found: torch.Tensor = tensor.full_tensor() if _divided(tensor) else tensor
    return found


def divided_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The whole `tensor` as this rank has `other`: a part of it where that is divided."""
    tensor = tensor.to(other.device)
    if _divided(other):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor, other.device_mesh, other.placements)
    return tensor


def _divided(tensor: Any) -> TypeGuard[Any]:
    """Whether it is a DTensor."""
    return hasattr(tensor, "full_tensor")
