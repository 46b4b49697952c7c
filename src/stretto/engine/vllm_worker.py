"""What Stretto puts into vLLM's workers: keyed sampling and verification, and weights loaded in place.

vLLM calls this module by name (`worker_extension_cls`, and a drafter class that drafts nothing), in the process that
holds the model: the engine's own, or each of its tensor-parallel workers. Nothing of vLLM is changed; the model
runner of this engine is given another sampler, as docs/decisions/0008-vllm.md explains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from stretto import sampling_torch
from stretto.alternatives import Alternatives
from stretto.draft import Drafts
from stretto.engine import verify
from stretto.records import BoolArray, FloatArray, IntArray
from stretto.sampling import Sampled, SamplingColumns
from stretto.weights import WeightsRef, read_weights

ARGUMENT = "stretto"
"""Key of a request's `Keyed` in vLLM's `SamplingParams.extra_args`."""
AHEAD = 1 << 16
"""Logits up to which the tokens of all drafted places are drawn in one call, on a CPU."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """How a request is drawn."""

    ticket: int  # what the engine knows the request by
    key: int  # unsigned 64 bit
    begin: int  # tokens of the response that came with the request: vLLM takes them for a part of the prompt
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stops: frozenset[int]  # tokens after which nothing is drawn


@dataclass(slots=True)
class Drawn:
    """What a step drew: tokens of R requests, T in all, request after request."""

    tickets: IntArray  # (R,)
    counts: IntArray  # (R,)
    drafted: IntArray  # (R,) tokens that were put to the test
    token_ids: IntArray  # (T,)
    logprobs: FloatArray  # (T,), under the distribution sampled from
    raw_logprobs: FloatArray  # (T,), with the temperature only
    top: Alternatives  # at the T places
    seconds: float  # that drawing took


class NoDrafts:
    """vLLM's proposer: it proposes nothing. What is drafted, Stretto's engine hands to the scheduler."""

    def __init__(self, vllm_config: Any) -> None:
        del vllm_config

    def load_model(self, *_: Any, **__: Any) -> None: ...

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class Draw:
    """Draws by key, for the rows of the model runner's batch; keeps what it drew until it is asked for."""

    def __init__(self, runner: Any, alternatives: int) -> None:
        self._runner, self._alternatives = runner, alternatives
        self.drawn: Drawn | None = None

    def __call__(self, logits: torch.Tensor, counts: IntArray, token_ids: IntArray) -> verify.Walk:
        """Verify paths of `counts` (R,) drafted `token_ids` (N,) by `logits` (R + N, V), request after request."""
        began = time.monotonic()
        states = [self._runner.requests[id] for id in self._runner.input_batch.req_ids[: counts.size]]
        keyed: list[Keyed] = [state.sampling_params.extra_args[ARGUMENT] for state in states]
        keys = np.array([each.key for each in keyed], np.uint64)
        made = np.array(
            [each.begin + len(state.output_token_ids) for each, state in zip(keyed, states, strict=True)],
            np.int64,
        )
        how = SamplingColumns(
            np.array([each.temperature for each in keyed], np.float64),
            np.array([each.top_k for each in keyed], np.int64),
            np.array([each.top_p for each in keyed], np.float64),
            np.array([each.min_p for each in keyed], np.float64),
        )

        def draw(rows: IntArray, which: IntArray, depth: IntArray) -> Sampled:
            chosen = logits if rows.size == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]
            position = made[which] + depth
            return sampling_torch.sample(chosen, keys[which], position, how[which], self._alternatives)

        def end(which: IntArray, drawn: IntArray) -> BoolArray:
            pairs = zip(which.tolist(), drawn.tolist(), strict=True)
            return np.array([token in keyed[i].stops for i, token in pairs], np.bool_)

        walk = verify.Walk(_paths(counts, token_ids))
        walk.go(draw, end, ahead=logits.device.type != "cpu" or logits.numel() <= AHEAD)
        tickets = np.array([each.ticket for each in keyed], np.int64)
        drawn = walk.columns()
        self.drawn = Drawn(tickets, walk.emitted, counts, *drawn, walk.top(), time.monotonic() - began)
        return walk


def _paths(counts: IntArray, token_ids: IntArray) -> Drafts:
    depth = np.arange(token_ids.size) - np.repeat(np.cumsum(counts) - counts, counts)
    nothing = np.zeros(token_ids.size)
    return Drafts(counts, token_ids, depth - 1, depth + 1, nothing, nothing.astype(np.int8))


class KeyedSampler(Sampler):  # type: ignore[misc]
    """In the place of vLLM's sampler: one token for each row."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self._draw = draw

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *_: Any, **__: Any) -> Any:
        del sampling_metadata
        nothing = np.zeros(len(logits), np.int64)
        walk = self._draw(logits, nothing, nothing[:0])
        token_ids = torch.from_numpy(walk.columns()[0]).to(logits.device, torch.int32)
        return SamplerOutput(sampled_token_ids=token_ids[:, None], logprobs_tensors=None)


class KeyedVerifier(RejectionSampler):  # type: ignore[misc]
    """In the place of vLLM's rejection sampler: verification is equality with what plain decoding draws."""

    def __init__(self, sampler: KeyedSampler, draw: Draw) -> None:
        super().__init__(sampler)
        self._draw = draw

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        del draft_probs, sampling_metadata
        counts = np.array(metadata.num_draft_tokens, np.int64)
        walk = self._draw(logits, counts, metadata.draft_token_ids.cpu().numpy().astype(np.int64))
        rows = np.full((counts.size, int(counts.max()) + 1), -1, np.int32)
        column = np.arange(rows.shape[1])[None, :] < walk.emitted[:, None]
        rows[column] = walk.columns()[0]
        sampled = torch.from_numpy(rows).to(logits.device)
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=None)


class WorkerExtension:
    """Methods that the engine calls in every worker of its vLLM (`LLMEngine.collective_rpc`)."""

    model_runner: Any
    rank: int

    def stretto_prepare(self, alternatives: int) -> None:
        """Draw by key from now on. Raises RuntimeError if this vLLM's runner isn't what Stretto knows."""
        runner = self.model_runner
        batch = getattr(runner, "input_batch", None)
        if not isinstance(getattr(runner, "sampler", None), Sampler) or not hasattr(batch, "req_ids"):
            raise RuntimeError("this vLLM's model runner samples in another way than Stretto knows")
        # It warns of modules without weights of their own, at every update.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        self._stretto_draw = Draw(runner, alternatives)
        runner.sampler = KeyedSampler(self._stretto_draw)
        if hasattr(runner, "rejection_sampler"):
            runner.rejection_sampler = KeyedVerifier(runner.sampler, self._stretto_draw)

    def stretto_drawn(self) -> Drawn | None:
        """What the last step drew, once. All ranks draw the same, so only the first has an answer."""
        drawn, self._stretto_draw.drawn = self._stretto_draw.drawn, None
        return drawn if self.rank == 0 else None

    def stretto_load(
        self, version: int, tensors: Mapping[str, torch.Tensor], location: str, digest: str
    ) -> None:
        """Take these weights, or those of the file at `location`. Raises StrettoError for a file that isn't as
        published.
        """
        if location:
            tensors = read_weights(WeightsRef(version, "file", location=location, digest=digest)).tensors
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                # Where it shares the embeddings' weights it has no tensor of its own to be reloaded, but the build for
                # CPUs computes with a packed copy.
                module.quant_method.process_weights_after_loading(module)
