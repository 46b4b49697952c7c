"""The vLLM engine: the same protocol, keys and tokens as the embedded one's, computed by vLLM.

vLLM schedules, keeps keys and values and runs the model; it is stepped in this process. What is drawn from its logits
is drawn by Stretto (`stretto.engine.vllm_worker`), so the same seed gives the same tokens, drafting or not, as far as
the logits are the same: to float32's rounding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from stretto.alternatives import Alternatives
from stretto.engine import MODEL_COUNTERS, Drafter
from stretto.engine.slots import refuse_unfit, response_limit
from stretto.engine.stop_strings import StopStrings
from stretto.engine.vllm_arguments import build, engine_arguments, one_thread, require_vllm
from stretto.engine.vllm_slots import NOTHING, Proposal, VllmSlot, propose
from stretto.errors import StrettoError
from stretto.records import (
    Event,
    Finished,
    FinishReason,
    IntArray,
    Loaded,
    Progress,
    Request,
    Running,
    Stopped,
)
from stretto.weights import WeightsRef, weight_shapes

OWN = "stretto.engine.vllm_worker"


class VllmEngine:
    """One replica in vLLM with `max_num_seqs` slots; see `stretto.engine.Engine` for the protocol.

    `path` names the model as vLLM loads it, `model_config` is its configuration; `arguments` are the user's, by
    vLLM's names. `max_draft`: tokens that `drafter` may have verified per request and step; its drafts must be
    paths. The rest is as in `stretto.engine.embedded.EmbeddedEngine`.
    Raises `StrettoError` if there is no vLLM that Stretto knows, or it refuses an argument.
    """

    def __init__(
        self,
        path: str,
        model_config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        worker: int,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        dtype: str = "float32",
        revision: str | None = None,
        seed: int = 0,
        arguments: Mapping[str, Any] | None = None,
        clock: Callable[[], float] | None = None,
        drafter: Drafter | None = None,
        max_draft: int = 16,
        alternatives: int = 0,
    ) -> None:
        require_vllm()
        self.worker, self.slots, self.version = worker, max_num_seqs, 0
        self._tokenizer, self._drafter, self._alternatives = tokenizer, drafter, alternatives
        self._max_model_len, self._max_num_batched_tokens = max_model_len, max_num_batched_tokens
        self._max_draft = max_draft
        self._clock = clock or (lambda: 0.0)
        self._vocabulary = int(model_config.vocab_size)
        self._shapes = _shapes(model_config)
        owned: dict[str, Any] = {
            "model": path,
            "revision": revision,
            "dtype": dtype,
            "seed": seed % 2**32,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max(max_num_batched_tokens, max_num_seqs),
            "skip_tokenizer_init": True,
            "async_scheduling": False,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "worker_extension_cls": f"{OWN}.WorkerExtension",
        }
        if int((arguments or {}).get("tensor_parallel_size", 1)) > 1:
            owned["distributed_executor_backend"] = "mp"  # vLLM itself would ask Ray, where there is one
        if drafter is not None:
            owned["speculative_config"] = {
                "method": "custom_class",
                "model": f"{OWN}.NoDrafts",
                "num_speculative_tokens": max_draft,
            }
        self._llm = build(engine_arguments(arguments or {}, owned))
        self._llm.collective_rpc("stretto_prepare", args=(alternatives,))
        self._waiting: OrderedDict[tuple[int, int], Request] = OrderedDict()
        self._slot_of: dict[tuple[int, int], VllmSlot] = {}  # in order of admission
        self._tickets: dict[int, VllmSlot] = {}
        self._begun = self._loads = 0  # requests, weights
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._events: list[Event] = []  # answers to commands, for the next step
        self._counters: dict[str, float] = {}
        self.metrics()

    @property
    def num_running(self) -> int:
        return len(self._slot_of)

    @property
    def has_work(self) -> bool:
        return bool(self._slot_of or self._waiting or self._events)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises `StrettoError`, with none of them queued, if one can't be run."""
        names = [(request.id, request.attempt) for request in requests]
        seen: set[tuple[int, int]] = set()
        for request, name in zip(requests, names, strict=True):
            if name in self._waiting or name in self._slot_of or name in seen:
                raise StrettoError(f"request {request.id} (attempt {request.attempt}) is here already")
            if request.reuse is not None:
                raise StrettoError(f"request {request.id}: the vLLM engine has no prefix reuse")
            seen.add(name)
            refuse_unfit(request, self._max_model_len, self._vocabulary, self._tokenizer is not None)
        for request, name in zip(requests, names, strict=True):
            length = request.prompt_ids.size + request.token_ids.size
            if length >= response_limit(request, self._max_model_len):
                self._events.append(Finished(self.worker, *name, FinishReason.LENGTH))
            else:
                self._waiting[name] = request

    def stop(self, ids: Sequence[int], attempts: Sequence[int]) -> None:
        for id, attempt in zip(ids, attempts, strict=True):
            name = (int(id), int(attempt))
            if name in self._slot_of:
                self._abort(self._slot_of[name])
                self._release(self._slot_of[name])
            elif self._waiting.pop(name, None) is None:
                continue
            self._events.append(Stopped(self.worker, *name))

    def load(self, ref: WeightsRef, running: Running) -> None:
        """Take new weights; raises `StrettoError`, with nothing changed, if they are not this model's tensors."""
        if ref.kind == "shared":
            raise StrettoError(
                'the vLLM engine has its own weights: fleet.weights = "shared" cannot reach them'
            )
        self._refuse_others(ref)
        tensors = {name: tensor.detach() for name, tensor in ref.tensors.items()}
        with one_thread():
            self._llm.collective_rpc("stretto_load", args=(ref.version, tensors, ref.location, ref.digest))
        self.version = ref.version
        if running == "stop":
            names = list(self._slot_of)
            self.stop([id for id, _ in names], [attempt for _, attempt in names])
        elif running == "recompute":
            for slot in self._slot_of.values():
                self._counters["reverified_tokens"] += slot.generated
                slot.ready = False
            self._llm.reset_prefix_cache(reset_running_requests=True)
        # What requests that go on hold cannot be dropped; others' prompts must not find it.
        self._loads += 1
        if not self._slot_of:
            self._llm.reset_prefix_cache()
        self._events.append(Loaded(self.worker, ref.version))

    def step(self) -> list[Event]:
        began = self._clock()
        self._admit()
        answers, self._events = self._events, []
        if not self._slot_of:
            return answers
        busy, prefilled = len(self._slot_of), self._counters["prefill_tokens"]
        proposal = self._draft()
        model = self._clock()
        outputs, drawn = self._forward()
        self._counters["model_seconds"] += self._clock() - model
        events: list[Event] = []
        for slot in self._slot_of.values():
            slot.ready = False
        if outputs:
            self._counters["model_seconds"] -= drawn.seconds
            self._counters["sampling_seconds"] += drawn.seconds
            events = self._take(outputs, drawn, proposal)
        self._counters["steps"] += 1
        self._counters["busy_squares"] += busy * busy
        self._counters["busy_prefill_tokens"] += busy * (self._counters["prefill_tokens"] - prefilled)
        self._counters["step_seconds"] += self._clock() - began
        self._counters["busy_slot_seconds"] += busy * (self._clock() - began)
        return events + answers

    def metrics(self) -> dict[str, float]:
        """`MODEL_COUNTERS`, since the last call. `model_seconds` are those of vLLM's step less `sampling_seconds`."""
        counted, self._counters = self._counters, dict.fromkeys(MODEL_COUNTERS, 0.0)
        return counted

    def close(self) -> None:
        """Give vLLM's memory back. Nothing can be done with it any more."""
        self._llm.engine_core.shutdown()

    # ---- weights ------------------------------------------------------------------------------------------

    def _refuse_others(self, ref: WeightsRef) -> None:
        """vLLM fuses matrices and keeps what it is not given of one undefined, so all of them must be there."""
        given = weight_shapes(ref)
        for name in sorted(given.keys() | self._shapes.keys()):
            if given.get(name) != self._shapes.get(name):
                has = self._shapes.get(name, "no such tensor")
                raise StrettoError(
                    f"weights of version {ref.version}: {name} {given.get(name, 'is missing and')} does not fit, the "
                    f"engine's model has {has}"
                )

    # ---- requests -----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give free slots to waiting requests, first come, first served."""
        while self._free and self._waiting:
            name, request = self._waiting.popitem(last=False)
            length = int(request.prompt_ids.size + request.token_ids.size)
            whole = response_limit(request, self._max_model_len)
            limit = whole if request.max_new is None else min(whole, length + request.max_new)
            strings = None
            if request.sampling.stop:
                assert self._tokenizer is not None
                turn = request.token_ids[request.turn_start :].tolist()
                strings = StopStrings(self._tokenizer, request.sampling.stop, turn)
            number = self._free.pop()
            generated = int(request.token_ids.size)
            ticket, self._begun = self._begun, self._begun + 1
            vllm_id = self._add(ticket, request, limit - length)
            slot = VllmSlot(number, request, ticket, vllm_id, generated, limit, limit < whole, strings)
            self._slot_of[name] = self._tickets[ticket] = slot
            self._counters["reverified_tokens"] += generated
            if self._drafter is not None:
                self._drafter.begin(number, request)

    def _add(self, ticket: int, request: Request, max_tokens: int) -> str:
        """Hand the request to vLLM, the tokens that it has as a part of the prompt; vLLM's name for it."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        from stretto.engine.vllm_worker import ARGUMENT, Keyed

        how = request.sampling
        keyed = Keyed(
            ticket,
            request.key,
            int(request.token_ids.size),
            how.temperature,
            how.top_k,
            how.top_p,
            how.min_p,
            frozenset(how.stop_token_ids),
        )
        # Greedy by vLLM's own account: then it prepares nothing for a random choice.
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={ARGUMENT: keyed},
        )
        token_ids = np.concatenate([request.prompt_ids, request.token_ids]).tolist()
        prompt = TokensPrompt(prompt_token_ids=token_ids, cache_salt=str(self._loads))
        return str(self._llm.add_request(str(ticket), prompt, params))

    def _abort(self, slot: VllmSlot) -> None:
        self._llm.abort_request([slot.vllm_id], internal=True)

    def _release(self, slot: VllmSlot, length: int | None = None) -> None:
        """Take the slot from its request, whose response has ended with `length` tokens; None: it was stopped."""
        del self._slot_of[slot.name]
        del self._tickets[slot.ticket]
        self._free.append(slot.number)
        if self._drafter is not None:
            self._drafter.end(slot.number, length)

    # ---- a step -------------------------------------------------------------------------------------------

    def _draft(self) -> Proposal:
        """Hand vLLM's scheduler what the drafter proposes."""
        ready = [slot for slot in self._slot_of.values() if slot.ready]
        if self._drafter is None or not ready:
            return NOTHING
        from vllm.v1.outputs import DraftTokenIds

        running = len(self._slot_of)
        most = max(0, self._max_num_batched_tokens - running)
        proposal = propose(self._drafter, ready, running, most)
        self._llm.engine_core.engine_core.scheduler.update_draft_token_ids(
            DraftTokenIds([slot.vllm_id for slot in ready], proposal.token_ids(self._max_draft))
        )
        return proposal

    def _forward(self) -> tuple[list[Any], Any]:
        """vLLM's outputs of one step, and what was drawn in it."""
        with one_thread():
            try:
                outputs = self._llm.step()
            except torch.OutOfMemoryError as error:
                raise StrettoError(
                    "vLLM is out of memory: use a smaller engine.vllm.gpu_memory_utilization, engine.max_num_seqs or "
                    f"engine.max_num_batched_tokens ({str(error).splitlines()[0]})"
                ) from error
            return outputs, self._llm.collective_rpc("stretto_drawn")[0]

    def _take(self, outputs: Sequence[Any], drawn: Any, proposal: Proposal) -> list[Event]:
        """The step's events; end what ends. The drafter learns what was emitted."""
        cached = {int(output.request_id): output.num_cached_tokens or 0 for output in outputs}
        starts = np.cumsum(drawn.counts) - drawn.counts
        rows = [row for row, ticket in enumerate(drawn.tickets.tolist()) if ticket in cached]
        slots = [self._tickets[int(drawn.tickets[row])] for row in rows]
        counts, reasons = [], []
        for row, slot in zip(rows, slots, strict=True):
            begin = int(starts[row])
            count, reason = self._advance(slot, drawn.token_ids[begin : begin + int(drawn.counts[row])])
            counts.append(count)
            reasons.append(reason)
            if slot.generated == slot.request.token_ids.size + count:
                length = slot.request.prompt_ids.size + slot.request.token_ids.size
                self._counters["prefill_tokens"] += int(length) - cached[slot.ticket] - 1
        emitted = np.array(counts, np.int64)
        places = np.concatenate(
            [np.arange(starts[r], starts[r] + c) for r, c in zip(rows, counts, strict=True)]
        )
        drafted, accepted = drawn.drafted[rows], emitted - 1
        if self._drafter is not None:
            numbers = np.array([slot.number for slot in slots])
            proposal.learn(self._drafter, numbers, emitted, drawn.token_ids[places])
        self._counters["drafted_tokens"] += int(drafted.sum())
        self._counters["accepted_tokens"] += int(accepted.sum())
        self._counters["decode_tokens"] += int(emitted.sum())
        self._counters["decode_steps"] += emitted.size
        top = Alternatives(drawn.top.token_ids[places], drawn.top.logprobs[places])
        events: list[Event] = [
            Progress(
                worker=self.worker,
                ids=np.array([slot.request.id for slot in slots]),
                attempts=np.array([slot.request.attempt for slot in slots]),
                counts=emitted,
                version=self.version,
                token_ids=drawn.token_ids[places],
                logprobs=drawn.logprobs[places],
                raw_logprobs=drawn.raw_logprobs[places],
                drafted=drafted,
                accepted=accepted,
                top=top if self._alternatives else None,
            )
        ]
        done = {int(output.request_id) for output in outputs if output.finished}
        for slot, reason in zip(slots, reasons, strict=True):
            slot.ready = True
            if reason is None:
                continue
            if slot.ticket not in done:
                self._abort(slot)
            if slot.chunked and reason == FinishReason.LENGTH:
                events.append(Stopped(self.worker, *slot.name))
                self._release(slot)
            else:
                events.append(Finished(self.worker, *slot.name, reason))
                self._release(slot, slot.generated)
        return events

    def _advance(self, slot: VllmSlot, token_ids: IntArray) -> tuple[int, FinishReason | None]:
        """How many of these tokens belong to the response, and why it ends with them, if it does."""
        for count, token in enumerate(token_ids.tolist(), start=1):
            slot.generated += 1
            found = token in slot.request.sampling.stop_token_ids
            if slot.stop_strings is not None and not found:
                found = slot.stop_strings.found_after(token)
            if found:
                return count, FinishReason.STOP
            if slot.room < 0:
                return count, FinishReason.LENGTH
        return token_ids.size, None


def _shapes(model_config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that the model has, as the learner publishes them."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(model_config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
