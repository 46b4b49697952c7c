"""From a configuration to an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stretto.config import Config
from stretto.engine import Drafter, Engine
from stretto.engine.embedded import EmbeddedEngine
from stretto.engine.vllm import VllmEngine
from stretto.engine.vllm_arguments import check_names, require_vllm
from stretto.errors import StrettoError
from stretto.model import load_model, load_model_config, location, resolve_device, visible_gpus

SHARE = "gpu_memory_utilization"


def check_engine(config: Config) -> None:
    """Raise StrettoError if the engine that the configuration names cannot be had, or `engine.vllm` has a name that
    vLLM has not; before anything is loaded.
    """
    if config.engine.kind == "vllm":
        require_vllm()
        check_names(config.engine.vllm)
        _check_memory(config)


def _check_memory(config: Config) -> None:
    """Raise StrettoError if an engine shares its GPU and takes nearly all of it, which is vLLM's default."""
    if SHARE in config.engine.vllm or resolve_device(config.model.device).type != "cuda":
        return
    gpus = len(visible_gpus())
    who = shares_gpus(config, gpus)
    if who:
        raise StrettoError(
            f"engine.vllm.{SHARE} is not set, but {who} share GPUs ({gpus} here), and vLLM takes 0.92 of each by "
            f"default: set what one engine may take, such as {SHARE} = 0.4 under [engine.vllm], or give engines GPUs "
            "of their own (docs/vllm.md)"
        )


def beside_the_model(config: Config) -> dict[str, float]:
    """What a vLLM engine in this process may take of the GPU on which the learner's model is; nothing on a CPU."""
    if resolve_device(config.model.device).type != "cuda":
        return {}
    free, all_of_it = torch.cuda.mem_get_info()
    return {SHARE: min(float(config.engine.vllm.get(SHARE, 1.0)), round(0.9 * free / all_of_it, 3))}


def shares_gpus(config: Config, gpus: int) -> str:
    """Who shares one of this machine's `gpus` with a vLLM engine; empty: nobody."""
    fleet, learner = config.fleet, config.learner
    if fleet.kind == "in_process":
        return "vLLM and the learner"
    each = float(_vllm_gpus(config))
    if fleet.kind == "ray":
        if fleet.gpus is None and fleet.address is None and learner.place == "cluster":
            # The learner's processes reserve theirs; of the others each worker has one, or a part of one.
            return "workers" if fleet.workers > max(1, gpus - learner.shards) else ""
        each = 1.0 if fleet.gpus is None else fleet.gpus
        if 0.0 < each <= 0.5:
            return "workers"
        # In a Ray of the run's own are the learner's GPUs, too, where the others are too few.
        both_reserve = fleet.gpus is not None and learner.place == "cluster"
        if fleet.address is not None or each == 0.0 or both_reserve:
            return ""
    engines = fleet.workers * each
    return "workers and the learner" if gpus < engines + learner.shards else ""


def worker_environment(config: Config, place: int) -> dict[str, str]:
    """What tells the worker process at `place` which GPUs are its own, where vLLM generates on GPUs."""
    if config.engine.kind != "vllm" or resolve_device(config.model.device).type != "cuda":
        return {}
    share = gpu_share(visible_gpus(), place, config.fleet.workers, _vllm_gpus(config), config.learner.shards)
    return {"CUDA_VISIBLE_DEVICES": ",".join(share)}


def _vllm_gpus(config: Config) -> int:
    """That one engine needs."""
    return int(config.engine.vllm.get("tensor_parallel_size", 1))


def gpu_share(devices: Sequence[str], place: int, workers: int, size: int, learner: int = 1) -> list[str]:
    """The `size` of `devices` for the worker at `place`. The first `learner` are left to the learner where there are
    enough; where there are not enough for all workers, they share.

    Raises StrettoError if a single worker needs more than there are.
    """
    if size > len(devices):
        raise StrettoError(
            f"engine.vllm.tensor_parallel_size = {size}: there are {len(devices)} GPUs; use at most that many"
        )
    free = devices[learner:] if len(devices) >= workers * size + learner else devices
    shares = len(free) // size
    begin = place % shares * size
    return list(free[begin : begin + size])


def make_separate_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase | None,
    max_model_len: int,
    clock: Callable[[], float],
    drafter: Drafter | None = None,
    worker: int = 0,
) -> Engine:
    """An engine of the configured kind, with weights of its own: those of `model.path`."""
    if config.engine.kind == "vllm":
        return make_vllm_engine(config, tokenizer, max_model_len, clock, drafter, worker)
    return make_engine(config, load_model(config.model), tokenizer, max_model_len, clock, drafter, worker)


def make_engine(
    config: Config,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    max_model_len: int,
    clock: Callable[[], float],
    drafter: Drafter | None = None,
    worker: int = 0,
) -> EmbeddedEngine:
    """An embedded engine around `model`; `clock` is the runtime's. Only stop strings need the tokenizer."""
    return EmbeddedEngine(
        model,
        tokenizer,
        worker=worker,
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        clock=clock,
        drafter=drafter,
        alternatives=config.history.alternatives,
    )


def make_vllm_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase | None,
    max_model_len: int,
    clock: Callable[[], float],
    drafter: Drafter | None = None,
    worker: int = 0,
) -> VllmEngine:
    """A vLLM engine. Raises StrettoError where there is no vLLM, or for what is wrong with `engine.vllm`."""
    return VllmEngine(
        location(config.model.path),
        load_model_config(config.model),
        tokenizer,
        worker=worker,
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        dtype=config.model.dtype,
        revision=config.model.revision,
        seed=config.seed,
        arguments=config.engine.vllm,
        clock=clock,
        drafter=drafter,
        max_draft=config.draft.max_nodes,
        alternatives=config.history.alternatives,
    )
