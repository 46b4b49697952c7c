"""What a rollout function reads from TRL's `GRPOTrainer`, and what it refuses there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from transformers import PreTrainedModel, ProcessorMixin

from stretto.errors import StrettoError, nearest
from stretto.model import ATTENTION, check_supported
from stretto.records import SamplingParams

T = TypeVar("T")

OLDEST = (1, 16)
PRIVATE = ("_tokenize_prompts", "_log_metric", "generation_kwargs")
"""Of the trainer: not promised by TRL, and without another way to what they do."""
USED = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "eos_token_id")
"""Keys of a generation configuration that decide what is drawn."""
WITHOUT_EFFECT = ("pad_token_id", "bos_token_id", "cache_implementation", "use_cache", "disable_compile")
"""Keys about things that the embedded engine does not have: padding, transformers' caches."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "repetition_penalty": (None, 1.0),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
}
"""Values with which a key changes nothing."""


def refuse_unsupported(trainer: Any) -> None:
    """Raise StrettoError if this trainer's responses could not be drawn as it would draw them."""
    try:
        installed = version("trl")
    except PackageNotFoundError:
        raise StrettoError(
            "HistoryRollout is for TRL's GRPOTrainer, and trl is not installed: pip install '.[trl]' in a clone of "
            "Stretto"
        ) from None
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST:  # of "1.17rc1" too
        raise StrettoError(f"HistoryRollout needs trl {'.'.join(map(str, OLDEST))} or newer, not {installed}")
    if trainer.use_vllm:
        raise StrettoError(
            "GRPOConfig.use_vllm = True: then vLLM generates, and Stretto's drafter goes into vLLM (docs/trl.md); "
            "HistoryRollout is for use_vllm = False"
        )
    missing = [name for name in PRIVATE if not hasattr(trainer, name)]
    if missing:
        raise StrettoError(
            f"trl {installed}: its GRPOTrainer has no {' and no '.join(missing)}, by which HistoryRollout tokenises, "
            "generates and logs as it does: pip install 'trl==1.16.0', or a newer Stretto"
        )
    if trainer.tools or getattr(trainer, "environment_factories", None):
        raise StrettoError(
            "GRPOTrainer(tools=..., environment_factory=...): HistoryRollout generates single turns and calls no "
            "tools; train without rollout_func"
        )
    if isinstance(trainer.processing_class, ProcessorMixin):
        raise StrettoError(
            f"processing_class {type(trainer.processing_class).__name__}: HistoryRollout takes text only; pass "
            "a tokenizer"
        )
    deepspeed = trainer.accelerator.state.deepspeed_plugin
    if trainer.is_fsdp_enabled or (deepspeed is not None and deepspeed.zero_stage == 3):
        sharding = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed ZeRO 3"
        raise StrettoError(
            f"{sharding} cuts the weights into pieces, but HistoryRollout generates with the trainer's own model: "
            "train in one process, or with DDP"
        )
    active = getattr(trainer.model, "active_peft_config", None)
    if active is not None and active.is_prompt_learning:
        raise StrettoError(
            f"peft_config {type(active).__name__} puts virtual tokens before the prompt, which HistoryRollout does "
            "not; adapters inside the layers, such as LoRA, are supported"
        )
    model = policy(trainer)
    check_supported(model.config, model.name_or_path or type(model).__name__)
    sampling_params(trainer)


def policy(trainer: Any) -> PreTrainedModel:
    """The model itself, with adapters in its layers where there are any; no wrapper around it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def sampling_params(trainer: Any) -> SamplingParams:
    """How the trainer's responses are drawn: `GRPOConfig`, with its `generation_kwargs` on top.

    Raises StrettoError for whatever else is asked for there.
    """
    asked: dict[str, Any] = trainer.generation_kwargs
    known = (*USED, *WITHOUT_EFFECT, *NEUTRAL)
    for name, value in asked.items():
        if name not in known:
            raise StrettoError(
                f"generation_kwargs: {name} = {value!r} is not supported by HistoryRollout; {nearest(name, known)}"
            )
        if name in NEUTRAL and value not in NEUTRAL[name]:
            where = "GRPOConfig" if name == "repetition_penalty" else "generation_kwargs"
            raise StrettoError(
                f"{where}: {name} = {value!r} is not supported by HistoryRollout; leave it at {NEUTRAL[name][-1]!r}"
            )
    if asked["max_new_tokens"] is None:
        raise StrettoError(
            "GRPOConfig: max_completion_length = None: HistoryRollout needs a number of tokens"
        )
    if not asked["temperature"] > 0.0:
        raise StrettoError(f"GRPOConfig: temperature = {asked['temperature']!r}: expected a number above 0")
    stop = asked["eos_token_id"]
    return SamplingParams(
        temperature=float(asked["temperature"]),
        top_k=int(asked["top_k"] or 0),
        top_p=1.0 if asked["top_p"] is None else float(asked["top_p"]),
        min_p=float(asked["min_p"] or 0.0),
        max_new_tokens=int(asked["max_new_tokens"]),
        stop_token_ids=(stop,) if isinstance(stop, int) else tuple(dict.fromkeys(stop)),
    )


def token_ids(trainer: Any, prompts: Sequence[Any]) -> list[list[int]]:
    """The tokens of prompts, text or lists of messages, as this trainer tokenises them for its own generation.

    Raises StrettoError for messages with images.
    """
    found, images, _ = trainer._tokenize_prompts(list(prompts))
    if images is not None:
        raise StrettoError("prompts with images: HistoryRollout takes text only")
    return [list(ids) for ids in found]


def gathered(trainer: Any, items: list[T]) -> list[T]:
    """The items of all processes, in order; each calls this at the same time."""
    if trainer.accelerator.num_processes == 1:
        return items
    from accelerate.utils import gather_object

    found: list[T] = gather_object(items)
    return found


@contextmanager
def borrowed(model: PreTrainedModel) -> Iterator[None]:
    """For a while, `model` is in evaluation mode and has our attention; afterwards it is as it was found.

    Its weights stay where they are. The trainer's own passes need the attention and the modes that it has set, so both
    are given back whatever happens meanwhile. (Only the attention's arguments can be chosen per call: which one is
    called, transformers' layers look up in the configuration. A model that we load has ours from the beginning.)
    """
    config: Any = model.config
    attention = config._attn_implementation
    training = [module for module in model.modules() if module.training]
    config._attn_implementation = ATTENTION
    model.eval()
    try:
        yield
    finally:
        config._attn_implementation = attention
        for module in training:
            module.training = True
