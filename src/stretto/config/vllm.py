"""What must hold where vLLM generates; no vLLM is needed to know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from stretto.config.sections import Config

OWNED = {
    "model": "model.path",
    "model_weights": "model.path",
    "hf_config_path": "model.path",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
    "tokenizer_revision": "model.revision",
    "dtype": "model.dtype",
    "seed": "seed",
    "max_num_seqs": "engine.max_num_seqs",
    "max_model_len": "engine.max_model_len",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "speculative_config": "draft.budget, draft.max_nodes and the like",
    "spec_method": "draft.budget",
    "spec_model": "draft.sources",
    "spec_tokens": "draft.max_nodes",
    "data_parallel_size": "fleet.workers",
    "enable_lora": "model.lora, which is merged into the weights that vLLM gets",
}
"""Arguments of vLLM's engine that Stretto sets, and the keys that they are set by."""
FIXED = (
    "async_scheduling",
    "diffusion_config",
    "disable_log_stats",
    "distributed_executor_backend",
    "enable_batch_sharded_sampling",
    "hf_overrides",
    "ignore_patterns",
    "logits_processors",
    "logprobs_mode",
    "model_class_overrides",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "quantization",
    "quantization_config",
    "scheduler_cls",
    "skip_tokenizer_init",
    "stream_interval",
    "use_tqdm_on_load",
    "watermark_config",
    "worker_cls",
    "worker_extension_cls",
)
"""Those that cannot be chosen, since sampling, stepping and loading weights depend on them."""
ONLY: dict[str, tuple[tuple[str, ...], str]] = {
    "runner": (("auto", "generate"), "Stretto has vLLM generate"),
    "convert": (("auto", "none"), "Stretto has vLLM generate, which a model that is converted does not"),
    "load_format": (
        ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "pt", "npcache"),
        "the first responses come from the weights that vLLM loads, which must be those of model.path that the "
        "learner trains",
    ),
}
"""Those of which only some values leave vLLM what Stretto takes it for: the values, and why."""


def run(config: Config) -> None:
    """Raises StrettoError for what vLLM cannot do, and for arguments of it that Stretto sets."""
    for name in config.engine.vllm:
        if name in OWNED:
            raise StrettoError(f"engine.vllm.{name}: this is set by {OWNED[name]}")
        if name in FIXED:
            raise StrettoError(
                f"engine.vllm.{name}: this cannot be chosen: how Stretto samples, steps and loads weights depends on it"
            )
    _check_values(config.engine.vllm)
    _check_numbers(config.engine.vllm)
    size = config.engine.vllm.get("tensor_parallel_size", 1)
    if config.fleet.kind == "ray" and size != 1:
        raise StrettoError(
            f'engine.vllm.tensor_parallel_size = {size} with fleet.kind = "ray": a Ray worker has one GPU at most; use '
            'fleet.kind = "processes", or 1'
        )
    if config.model.dtype == "float64":
        raise StrettoError('model.dtype = "float64" with engine.kind = "vllm": use "float32" or "bfloat16"')
    if config.fleet.weights == "shared":
        raise StrettoError(
            'fleet.weights = "shared" with engine.kind = "vllm": vLLM has weights of its own; use "auto"'
        )
    if config.reuse.kind == "prefix":
        raise StrettoError(
            'reuse.kind = "prefix" with engine.kind = "vllm": vLLM has no prefix reuse; use "noise" or "none", or '
            'engine.kind = "embedded"'
        )


def _check_values(arguments: Mapping[str, object]) -> None:
    """Raises StrettoError for a value with which vLLM would be another thing, or generate from other weights."""
    for name, (values, why) in ONLY.items():
        value = arguments.get(name, values[0])
        if value not in values:
            near = (
                nearest(value, values, most=len(values)) if isinstance(value, str) else f"use {values[0]!r}"
            )
            raise StrettoError(f"engine.vllm.{name} = {value!r}: {why}; {near}")


def _check_numbers(arguments: Mapping[str, object]) -> None:
    """Raises StrettoError for values of those arguments that Stretto itself reckons with."""
    size, share = arguments.get("tensor_parallel_size", 1), arguments.get("gpu_memory_utilization", 1.0)
    if type(size) is not int or size < 1:  # True is none
        raise StrettoError(
            f"engine.vllm.tensor_parallel_size = {size!r}: expected a whole number of GPUs, at least 1"
        )
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0.0 < share <= 1.0:
        raise StrettoError(
            f"engine.vllm.gpu_memory_utilization = {share!r}: expected a share of a GPU, above 0 and at most 1"
        )


def warnings(config: Config) -> list[str]:
    """What is legal with vLLM but may surprise."""
    if config.engine.kind == "vllm" and config.deterministic:
        return [
            'deterministic = true with engine.kind = "vllm": vLLM decides the last bits of what it computes, so '
            "the run need not be the same bit for bit another time"
        ]
    return []
