"""From a configuration to an engine."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stretto.config import Config
from stretto.engine import Drafter, Engine
from stretto.engine.embedded import EmbeddedEngine
from stretto.engine.vllm import VllmEngine
from stretto.engine.vllm_arguments import check_names, require_vllm
from stretto.model import load_model, load_model_config, location


def check_engine(config: Config) -> None:
    """Raise StrettoError if the engine that the configuration names cannot be had, or `engine.vllm` has a name that
    vLLM has not; before anything is loaded.
    """
    if config.engine.kind == "vllm":
        require_vllm()
        check_names(config.engine.vllm)


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
