"""Faults of vLLM's CPU builds, worked around where they are.

Speculative decoding expands each request's temperature and top-p to its drafted tokens. The CPU build's kernel for that
(`vllm.utils.cpu_triton_utils._expand_kernel_impl`, seen in 0.32.0; vLLM's issue 55005) works on a copy where these are
floats and never copies back, so tokens are drawn at whatever temperature was in the memory before. Only a test of the
distribution shows it. Installed by the entry point `stretto` of the group `vllm.general_plugins`, before any worker
starts, and by the drafter.

Another, that no worker starts where numba has been imported, is `stretto.engine.vllm_arguments.answer_for_llvmlite`'s.
"""

from __future__ import annotations

import logging
from typing import Any

from stretto.engine.vllm_arguments import answer_for_llvmlite

logger = logging.getLogger(__name__)


def install() -> None:
    """Do nothing unless this is a CPU build with these faults; may be called any number of times."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON:
        return
    answer_for_llvmlite()
    try:
        from vllm.utils import cpu_triton_utils
    except ImportError:  # a version without these kernels
        return
    current_platform.import_kernels()
    theirs = getattr(cpu_triton_utils, "_expand_kernel_impl", None)
    if theirs is None or theirs is expand or expands(theirs):
        return
    cpu_triton_utils._expand_kernel_impl = expand  # what vLLM registers when a worker starts
    from vllm.v1.sample import rejection_sampler

    registered = rejection_sampler.expand_kernel
    if (
        getattr(registered, "_impl", None) is theirs
    ):  # it has: the package is on the path but was never installed
        registered._impl = expand
    logger.info("vLLM's CPU kernel that expands temperatures to drafted tokens is wrong: replaced")


def expands(kernel: Any) -> bool:
    """Whether a kernel does on a small case what it should."""
    import torch

    given, ends = torch.tensor([0.5, 0.0, 1.5]), torch.tensor([2, 3, 5], dtype=torch.int32)
    found = torch.full((5,), -1.0)
    try:
        kernel(found, given, ends, 0, 1, MAX_NUM_TOKENS=2)
    except (RuntimeError, AttributeError, TypeError):
        return False
    return found.tolist() == [0.5, 0.5, 1.0, 1.5, 1.5]


def expand(
    output: Any,
    input_val: Any,
    cu_num_tokens: Any,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """`output` (N,): each of `input_val` (R,) as often as it has tokens, `replace_from` replaced.

    `cu_num_tokens` (R,) counts the tokens up to and with each request's.
    """
    import torch

    del MAX_NUM_TOKENS
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(torch.repeat_interleave(values, counts.long()))
