"""What the tests with a real vLLM share: the CPU build in this process, and a model of a few tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stretto.integrations.vllm_fixes import install

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

DRAFTER = "stretto.integrations.vllm.HistoryDrafter"
DRAFTS = 4  # num_speculative_tokens


def tiny_model(folder: Path) -> Path:
    """A random Qwen2 of 13 tokens whose distributions are neither flat nor sharp; no tokenizer, no stop token."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=13,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def make_llm(model: Path, settings: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """vLLM in this process; `settings` None: without the drafter."""
    from vllm import LLM

    install()  # vLLM does so where Stretto is installed
    own: dict[str, Any] = {}
    if settings is not None:
        own = {
            "speculative_config": {
                "method": "custom_class",
                "model": DRAFTER,
                "num_speculative_tokens": DRAFTS,
            },
            "additional_config": {"stretto": settings},
        }
    return LLM(
        str(model),
        **{
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 96,
            "max_num_seqs": 64,
            "disable_log_stats": False,
            "enable_prefix_caching": False,
            **own,
            **arguments,
        },
    )


def drafter_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter


def counters(llm: Any) -> dict[str, int]:
    """vLLM's own: drafts, drafted and accepted tokens."""
    found = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name in ("drafts", "draft_tokens", "accepted_tokens"):
            found[name] = int(metric.value)
    return found


def answers(llm: Any, prompts: list[list[int]], **sampling: Any) -> list[tuple[int, ...]]:
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(detokenize=False, **sampling),
        use_tqdm=False,
    )
    return [tuple(output.outputs[0].token_ids) for output in outputs]
