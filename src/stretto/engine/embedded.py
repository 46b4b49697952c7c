"""The embedded engine: continuous batching of packed tokens through a Hugging Face model, on torch.

A step packs the tokens that its running requests have but have not computed: one for each that is decoding, a piece
of the prompt for those that begin, all of a resumed response, in one row (1, T) without padding. Whoever has all its
tokens computed then samples the next one. How many tokens a request brings to a step is its own affair.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stretto import model as policy
from stretto import sampling, sampling_torch
from stretto.draft import MAX_NODES, Drafts, join
from stretto.engine import MODEL_COUNTERS, Drafter, attention, linear, packing, verify
from stretto.engine.reuse import PrefixReuse, Ruling
from stretto.engine.slots import PromptRows, Slots, plan, refuse_unfit, response_limit
from stretto.engine.stop_strings import StopStrings
from stretto.errors import StrettoError
from stretto.records import (
    BoolArray,
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
from stretto.sampling import Sampled
from stretto.weights import WeightsRef, read_weights

# Parameters, and parameters times tokens, below which a second thread does not speed torch's operations up.
SMALL_MODEL, SMALL_STEP = 10_000_000, 500_000_000
AHEAD = 1 << 16
"""Logits up to which the tokens of all nodes are drawn in one call: a call costs as much as 30,000 of them."""


class EmbeddedEngine:
    """One replica of `model` with `max_num_seqs` slots; see `stretto.engine.Engine` for the protocol.

    `tokenizer` is needed for stop strings only. `clock` returns seconds and is read for `metrics` alone. `drafter`
    proposes tokens for verification, which change the speed and nothing else. `alternatives`: how many of the most
    probable tokens are reported at every place.
    Raises `StrettoError` if `max_model_len` is beyond the model's own context.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        worker: int,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        clock: Callable[[], float] | None = None,
        drafter: Drafter | None = None,
        alternatives: int = 0,
    ) -> None:
        config = model.config
        context = config.max_position_embeddings
        if max_model_len > context:
            raise StrettoError(
                f"engine.max_model_len is {max_model_len}, but the model's context has {context} tokens"
            )
        self.worker, self.slots, self.version = worker, max_num_seqs, 0
        self._model, self._tokenizer = model, tokenizer
        self._max_model_len, self._max_num_batched_tokens = max_model_len, max_num_batched_tokens
        self._clock = clock or (lambda: 0.0)
        self._drafter, self._alternatives = drafter, alternatives
        heads = config.num_attention_heads
        self._key_values = attention.key_values(
            layers=config.num_hidden_layers,
            rows=2 * max_num_seqs,  # one per slot, and as many for prompts
            length=max_model_len + (MAX_NODES if drafter else 0),
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype,
            device=model.device,
        )
        embeddings: Any = model.get_input_embeddings()
        self._vocabulary = int(embeddings.weight.shape[0])
        self._columns = Slots(max_num_seqs, max_model_len, self._vocabulary)
        self._reuse = PrefixReuse()
        self._prompts = PromptRows(first=max_num_seqs, count=max_num_seqs)
        # by (id, attempt), first come first
        self._waiting: OrderedDict[tuple[int, int], Request] = OrderedDict()
        self._slot_of: dict[tuple[int, int], int] = {}
        self._running: IntArray = np.zeros(0, np.int64)  # slots, in order of admission
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._stop_strings: dict[int, StopStrings] = {}  # by slot
        self._events: list[Event] = []  # answers to commands, for the next step
        self._counters: dict[str, float] = {}
        self._parameters = sum(p.numel() for p in model.parameters())
        self.metrics()
        if model.device.type == "cpu":
            sampling.compile_kernels()
            attention.compile_kernels(model.dtype)
            linear.compile_kernels()
        packing.compile_kernels()
        verify.compile_kernels()

    @property
    def num_running(self) -> int:
        return int(self._running.size)

    @property
    def has_work(self) -> bool:
        return bool(self._running.size or self._waiting or self._events)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises `StrettoError`, with none of them queued, if one can't be run."""
        names = [(request.id, request.attempt) for request in requests]
        seen: set[tuple[int, int]] = set()
        for request, name in zip(requests, names, strict=True):
            if name in self._waiting or name in self._slot_of or name in seen:
                raise StrettoError(f"request {request.id} (attempt {request.attempt}) is here already")
            seen.add(name)
            refuse_unfit(request, self._max_model_len, self._vocabulary, self._tokenizer is not None)
        for request, name in zip(requests, names, strict=True):
            if request.prompt_ids.size + request.token_ids.size >= response_limit(
                request, self._max_model_len
            ):
                self._events.append(Finished(self.worker, *name, FinishReason.LENGTH))
            else:
                self._waiting[name] = request

    def stop(self, ids: Sequence[int], attempts: Sequence[int]) -> None:
        for id, attempt in zip(ids, attempts, strict=True):
            name = (int(id), int(attempt))
            if name in self._slot_of:
                self._release(self._slot_of[name])
            elif self._waiting.pop(name, None) is None:
                continue
            self._events.append(Stopped(self.worker, *name))

    def load(self, ref: WeightsRef, running: Running) -> None:
        """Take new weights; raises `StrettoError`, with nothing changed, if a tensor does not fit the model, or a file
        is not what was published.

        Tensors that `ref` leaves out (frozen ones) keep their values.
        """
        if ref.kind == "file":
            ref = read_weights(ref)
        if ref.kind == "copy":
            policy.copy_tensors(ref.tensors, self._model, f"weights of version {ref.version}")
        self.version = ref.version
        if running == "stop":
            columns = self._columns
            self.stop(columns.id[self._running].tolist(), columns.attempt[self._running].tolist())
        elif running == "recompute":
            again = self._columns.computed[self._running] - self._columns.prompt_length[self._running]
            self._counters["reverified_tokens"] += int(np.maximum(again, 0).sum())
            self._columns.computed[self._running] = 0
            self._prompts.computed[:] = 0
        self._prompts.drop()
        self._events.append(Loaded(self.worker, ref.version))

    def step(self) -> list[Event]:
        began = self._clock()
        self._admit()
        answers, self._events = self._events, []
        columns = self._columns
        slots, counts = plan(columns, self._prompts, self._running, self._max_num_batched_tokens)
        if not slots.size:
            return answers
        busy = self._running.size
        drafts = self._draft(slots, counts)
        hidden = self._forward(slots, counts, drafts)
        columns.computed[slots] += counts
        kept = np.minimum(columns.computed[slots], columns.shared[slots])
        self._prompts.computed[columns.shared_row[slots]] = kept
        ready = columns.computed[slots] == columns.length[slots]
        events: list[Event] = []
        if ready.any():
            total = counts + drafts.counts
            begins = np.cumsum(total) - total
            # each one's newest token in the packed row, and its tree
            sampled = np.arange(len(hidden)) - np.repeat(begins + counts - 1, total) >= 0
            sampled &= np.repeat(ready, total)
            drafts.counts = drafts.counts[ready]
            rows = hidden if sampled.all() else hidden[torch.from_numpy(sampled)]
            events = self._sample(slots[ready], rows, drafts)
        self._count(int(counts.sum()) - int(ready.sum()), int(busy), self._clock() - began)
        return events + answers

    def metrics(self) -> dict[str, float]:
        """`MODEL_COUNTERS`, since the last call."""
        counted, self._counters = self._counters, dict.fromkeys(MODEL_COUNTERS, 0.0)
        return counted

    def _admit(self) -> None:
        """Give free slots to waiting requests, first come, first served."""
        admitted: list[int] = []
        while self._free and self._waiting:
            name, request = self._waiting.popitem(last=False)
            slot = self._free.pop()
            self._columns.fill(slot, request, self._prompts.take(request.prompt_ids))
            self._slot_of[name] = slot
            self._counters["reverified_tokens"] += request.token_ids.size
            how = request.sampling
            if how.stop:
                assert self._tokenizer is not None
                turn = request.token_ids[request.turn_start :].tolist()
                self._stop_strings[slot] = StopStrings(self._tokenizer, how.stop, turn)
            admitted.append(slot)
            self._reuse.begin(slot, request)
            if self._drafter is not None:
                self._drafter.begin(slot, request)
        if admitted:
            self._running = np.concatenate([self._running, np.array(admitted, np.int64)])

    def _release(self, slot: int, length: int | None = None) -> None:
        """Take the slot from its request, whose response has ended with `length` tokens; None: it was stopped."""
        columns = self._columns
        del self._slot_of[int(columns.id[slot]), int(columns.attempt[slot])]
        self._stop_strings.pop(slot, None)
        self._reuse.end(slot)
        if self._drafter is not None:
            self._drafter.end(slot, length)
        self._prompts.release(int(columns.shared_row[slot]))
        self._running = self._running[self._running != slot]
        self._free.append(slot)

    def _draft(self, slots: IntArray, counts: IntArray) -> Drafts:
        """Trees behind those of `slots` that will have computed all their tokens; for the others, none."""
        columns = self._columns
        ready = columns.computed[slots] + counts == columns.length[slots]
        batch, packed = slots[ready], int(counts.sum())
        # The response's last token needs no successor.
        room = columns.limit[batch] - columns.length[batch] - 1
        generated = columns.length[batch] - columns.prompt_length[batch]
        most = self._max_num_batched_tokens - packed
        drafts = self._reuse.paths(batch, generated, room, most)
        if self._drafter is not None and batch.size:
            tried = drafts.token_ids.size
            room[self._reuse.held(batch)] = 0
            trees = self._drafter.propose(batch, generated, room, packed + tried, most - tried)
            if trees.token_ids.size:
                verify.refuse_unfit(trees, room, most - tried)
            drafts = join(trees, drafts)[0] if tried else trees
        all_counts = np.zeros(slots.size, np.int64)
        all_counts[ready] = drafts.counts
        drafts.counts = all_counts
        return drafts

    def _forward(self, slots: IntArray, counts: IntArray, drafts: Drafts) -> torch.Tensor:
        """Last hidden states (T, hidden) of the next `counts` tokens of `slots`, each with its tree behind it."""
        began = self._clock()
        packed, token_ids, position = packing.pack(self._columns, slots, counts, drafts)
        device = self._model.device
        if self._model.training:  # a learner may have left the shared module so, with LoRA's dropout on
            self._model.eval()
        with torch.inference_mode(), self._threads(token_ids.size):
            self._key_values.pack(packed)
            hidden = policy.hidden_states(
                self._model,
                torch.from_numpy(token_ids).to(device),
                torch.from_numpy(position).to(device),
                self._key_values,
            )
        self._counters["model_seconds"] += self._clock() - began
        return hidden

    @contextmanager
    def _threads(self, tokens: int) -> Iterator[None]:
        """For the model: one thread where more would only be in the attention's way; own kernels for few tokens."""
        threads = torch.get_num_threads()
        if self._parameters > SMALL_MODEL and self._model.device.type == "cpu" and tokens <= linear.MOST:
            with linear.FewTokens(threads):
                yield
            return
        if threads == 1 or self._parameters > SMALL_MODEL or self._parameters * tokens > SMALL_STEP:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _sample(self, slots: IntArray, hidden: torch.Tensor, drafts: Drafts) -> list[Event]:
        """Draw the next tokens of `slots` (R,) from the hidden states (R + nodes, hidden) of each one's newest token
        and its tree behind it; end what ends.
        """
        began = self._clock()
        columns = self._columns
        with torch.inference_mode(), self._threads(hidden.shape[0]):
            logits = policy.logits(self._model, hidden)
        self._counters["model_seconds"] += self._clock() - began
        began = self._clock()
        position = columns.length[slots] - columns.prompt_length[slots]
        stopped = np.zeros(slots.size, np.bool_)
        ruling = self._reuse.rule(columns, slots, drafts.counts, logits)

        def draw(rows: IntArray, which: IntArray, depth: IntArray) -> Sampled:
            chosen, plain = slots[which], rows.size == len(logits)
            drawn = sampling_torch.sample(
                logits if plain else logits[torch.from_numpy(rows)],
                columns.key[chosen],
                position[which] + depth,
                columns.sampling[chosen],
                self._alternatives,
            )
            if ruling is not None:
                ruling.apply(drawn, rows)
            return drawn

        def end(which: IntArray, token_ids: IntArray) -> BoolArray:
            chosen = slots[which]
            columns.append(chosen, token_ids)
            stopped[which] = self._stopped(chosen, token_ids)
            return np.asarray(stopped[which] | (columns.length[chosen] >= columns.limit[chosen]))

        walk = verify.Walk(drafts)
        walk.go(draw, end, ahead=logits.numel() <= AHEAD)
        self._counters["sampling_seconds"] += self._clock() - began
        events: list[Event] = [self._emit(slots, walk, ruling)]
        for place in np.flatnonzero(walk.ended).tolist():
            slot = int(slots[place])
            name = (int(columns.id[slot]), int(columns.attempt[slot]))
            if columns.chunked[slot] and not stopped[place]:
                events.append(Stopped(self.worker, *name))
                self._release(slot)
                continue
            reason = FinishReason.STOP if stopped[place] else FinishReason.LENGTH
            events.append(Finished(self.worker, *name, reason))
            self._release(slot, int(columns.length[slot] - columns.prompt_length[slot]))
        return events

    def _stopped(self, slots: IntArray, token_ids: IntArray) -> BoolArray:
        """Whether these tokens (R,) end their turns: by a stop token, or by completing a stop string."""
        columns = self._columns
        stopped = columns.stops[columns.stop_set[slots], token_ids]
        if self._stop_strings:
            for place, slot in enumerate(slots.tolist()):
                if slot in self._stop_strings and not stopped[place]:
                    stopped[place] = self._stop_strings[slot].found_after(int(token_ids[place]))
        return np.asarray(stopped)

    def _emit(self, slots: IntArray, walk: verify.Walk, ruling: Ruling | None) -> Progress:
        """Keep the accepted nodes' keys and values, in line; the drafter learns what was emitted."""
        columns, counters = self._columns, self._counters
        token_ids, logprobs, raw_logprobs = walk.columns()
        which, source, target = walk.moves()
        if which.size:
            row = slots[which]
            behind = columns.length[row] - walk.emitted[which] - columns.shared[row]
            self._key_values.move(row, behind + source, behind + target)
        columns.computed[slots] += walk.accepted
        drafts, verified, accepted = walk.drafts, walk.verified(), walk.accepted
        if ruling is not None:
            accepted = np.where(ruling.tried > 0, 0, accepted)
            drafts, verified = ruling.others(drafts, verified)
            for name, count in self._reuse.learn(slots, ruling, walk.emitted, walk.ended).items():
                counters[name] += count
        if self._drafter is not None:
            self._drafter.observe(slots, drafts, verified, token_ids)
        counters["drafted_tokens"] += drafts.token_ids.size
        counters["accepted_tokens"] += int(accepted.sum())
        counters["decode_tokens"] += token_ids.size
        counters["decode_steps"] += slots.size
        return Progress(
            worker=self.worker,
            ids=columns.id[slots],
            attempts=columns.attempt[slots],
            counts=walk.emitted,
            version=self.version,
            token_ids=token_ids,
            logprobs=logprobs,
            raw_logprobs=raw_logprobs,
            drafted=drafts.counts,
            accepted=accepted,
            top=walk.top() if self._alternatives else None,
        )

    def _count(self, prefilled: int, busy: int, seconds: float) -> None:
        self._counters["steps"] += 1
        self._counters["busy_squares"] += busy * busy
        self._counters["busy_prefill_tokens"] += busy * prefilled
        self._counters["prefill_tokens"] += prefilled
        self._counters["step_seconds"] += seconds
        self._counters["busy_slot_seconds"] += busy * seconds
