"""Drafts from earlier responses for any user of vLLM, without patching it.

    llm = LLM(..., speculative_config={"method": "custom_class",
                                       "model": "stretto.integrations.vllm.HistoryDrafter",
                                       "num_speculative_tokens": 16})

Prompts that come again are answered much as before. Their responses are learnt as they finish, those in flight as they
are said, and what followed the same text then is the draft now. vLLM verifies it by its own rejection sampling, so
what is drafted changes how fast tokens come and not their distribution. Settings: `stretto.integrations.vllm_settings`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto.draft import MAX_NODES, Drafts, Verified, no_drafts
from stretto.draft.budget import make_budget
from stretto.draft.drafter import HistoryDrafter as TreeDrafter
from stretto.draft.paths import judge
from stretto.history.index import GIBIBYTE, HistoryIndex
from stretto.integrations.vllm_cost import StepTimes
from stretto.integrations.vllm_fixes import install
from stretto.integrations.vllm_folder import HistoryFolder, fingerprint, read_run
from stretto.integrations.vllm_memory import Memory
from stretto.integrations.vllm_rewards import Graded, Rewards, append_rewards
from stretto.integrations.vllm_rows import New, Rows, Step, TokenArray
from stretto.integrations.vllm_settings import read_settings
from stretto.records import Request, SamplingParams, prompt_uid

logger = logging.getLogger(__name__)

PLAIN_EVERY = 64  # steps: one without drafts, so that their price stays known
WAITING_SHARE = (
    4  # of the history's memory, this part as much again is for responses that are not history yet
)
PAUSE = 16  # steps, of which one is drafted for while nothing is worth it


def reward(path: str | Path, prompt_token_ids: Sequence[int], token_ids: Sequence[int], value: float) -> None:
    """Report the reward of a response, so that drafts follow the good ones (setting `weight = "reward"`).

    `path` is the file that the setting `rewards` names; drafters in any process read it. Both id sequences are as
    vLLM returned them (`RequestOutput.prompt_token_ids`, `CompletionOutput.token_ids`). Raises StrettoError if the disk
    refuses.
    """
    rewards(path, [(prompt_token_ids, token_ids, value)])


def rewards(path: str | Path, graded: Iterable[tuple[Sequence[int], Sequence[int], float]]) -> None:
    """Report those of many at once: prompt's ids, response's ids, reward. The disk is waited for once."""
    append_rewards(
        Path(path),
        (
            Graded(np.asarray(prompt, np.int64), np.asarray(response, np.int64), value)
            for prompt, response, value in graded
        ),
    )


class HistoryDrafter:
    """vLLM's custom proposer (`speculative_config.method = "custom_class"`). One per engine.

    Raises StrettoError for wrong settings and for a history of another tokenizer; vLLM shows it when it starts.
    """

    def __init__(self, vllm_config: Any) -> None:
        install()
        settings = read_settings(vllm_config.additional_config)
        self._config = vllm_config
        scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
        self._longest = int(vllm_config.model_config.max_model_len)
        self._slots = int(scheduler.max_num_seqs)
        self._most = int(scheduler.max_num_batched_tokens)
        self._depth = min(MAX_NODES, int(vllm_config.speculative_config.num_speculative_tokens))
        self.cost = StepTimes()
        self._drafter = TreeDrafter(
            HistoryIndex(
                window=settings.window, weight=settings.weight, max_bytes=int(settings.max_gib * GIBIBYTE)
            ),
            make_budget(settings.budget, self.cost, self._depth),
            slots=self._slots,
            sources=settings.sources,
            max_nodes=self._depth,
            noise_aware=False,
            probabilities=False,
            branches=False,
            pause=PAUSE,
            clock=time.perf_counter,
        )
        self._rows = Rows(self._slots, self._longest, _stop_ids(vllm_config.model_config))
        self._proposed = (np.zeros(0, np.int64), no_drafts(0))  # slots, and what was drafted for them
        self._began = math.nan  # seconds, when the last call did; nan: its step cannot be measured
        self._steps = 0
        self._memory: Memory | None = None
        # Drafts of one rank of a tensor-parallel group are used.
        if parallel.rank % parallel.tensor_parallel_size == 0:
            heard = Rewards(Path(settings.rewards)) if settings.rewards is not None else None
            folder, newest = self._read(settings.history, settings.warm_from, settings.window)
            most = int(settings.max_gib * GIBIBYTE / WAITING_SHARE)
            self._memory = Memory(self._rows, self._drafter, folder, heard, newest, most)
            self._memory.keep_beyond(self)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: vLLM calls it with its model."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: TokenArray,
        token_ids_cpu: TokenArray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for the rows of vLLM's batch, called after every step in which something was sampled.

        `sampled_token_ids`: for each row, what was sampled, empty while it is prefilled; `token_ids_cpu` (rows,
        max_model_len) int32: prompts and responses, of which `num_tokens_no_spec` (rows,) count.
        """
        del slot_mappings
        if self._memory is None:
            return [[] for _ in sampled_token_ids]
        began = time.perf_counter()
        self._memory.step()
        counts = np.fromiter(map(len, sampled_token_ids), np.int64, len(sampled_token_ids))
        step = self._rows.follow(counts, num_tokens_no_spec, token_ids_cpu)
        self._learn(step, began, clean=not step.new and bool((counts > 0).all()))
        for left in step.left:
            self._drafter.end(left.slot, left.tokens.size - left.prompt if left.stopped else None)
            self._memory.left(left)
        for new in step.new:
            self._begin(new, self._memory)
        found = self._draft(step)
        self._began = began
        return found

    def close(self) -> None:
        """What is known goes to its folder, if there is one; called at the engine's and the process's end as well."""
        if self._memory is not None:
            self._memory.close()

    def metrics(self) -> dict[str, float]:
        """The drafter's figures since the last call, under `spec/`; vLLM counts drafts and acceptance by itself."""
        return self._drafter.metrics()

    # ---- inside ---------------------------------------------------------------------------------------

    def _read(
        self, history: str | None, warm_from: str | None, window: int
    ) -> tuple[HistoryFolder | None, int]:
        """Take in what is known from before; the history's folder, and the number of its newest visit."""
        if history is None and warm_from is None:
            return None, 0
        known = fingerprint(self._config.model_config)
        if warm_from is not None:
            for rollouts in read_run(Path(warm_from), known, window):
                self._drafter.remember(rollouts)
        if history is None:
            return None, 0
        folder, newest = HistoryFolder(Path(history), known), 0
        try:
            for rollouts in folder.read(window):
                self._drafter.remember(rollouts)
                newest = max(newest, *(rollout.visit for rollout in rollouts))
        except BaseException:
            folder.close()
            raise
        return folder, newest

    def _learn(self, step: Step, began: float, clean: bool) -> None:
        """What became of the last drafts, and how long that took."""
        slots, drafts = self._proposed
        if not slots.size:
            return
        rows = self._rows
        gone = np.zeros(slots.size, np.bool_)
        if step.left:
            gone = np.isin(slots, [left.slot for left in step.left])
        begins = rows.last[slots]
        emitted = np.where(gone, 0, rows.length[slots] - begins)
        begins += slots * rows.texts.shape[1]
        texts = rows.texts.reshape(-1)
        reached, accepted, tokens = judge(drafts.counts, drafts.token_ids, begins, emitted, texts)
        self._drafter.observe(slots, drafts, Verified(reached, accepted, emitted), tokens)
        if clean:
            self.cost.observe(slots.size, drafts.token_ids.size, began - self._began)

    def _begin(self, new: New, memory: Memory) -> None:
        text = self._rows.texts[new.slot, : self._rows.length[new.slot]].astype(np.int64)
        prompt, response = text[: new.prompt], text[new.prompt :]
        uid = prompt_uid(prompt)
        memory.began(new, uid)
        group = int(uid[:15], 16)  # siblings share what the drafter keeps of their prompt
        self._drafter.begin(new.slot, Request(0, 0, group, prompt, response, 0, 0, SamplingParams()))

    def _draft(self, step: Step) -> list[list[int]]:
        rows, slots = self._rows, step.slots[step.slots >= 0]
        generated = rows.length[slots] - rows.prompt[slots]
        room = np.clip(self._longest - 1 - rows.length[slots], 0, self._depth)
        room[rows.stopped[slots]] = 0
        self._steps += 1
        most = 0 if self._steps % PLAIN_EVERY == 0 else self._most - slots.size
        drafts: Drafts = no_drafts(slots.size)
        if slots.size:
            self.cost.at(slots.size)
            drafts = self._drafter.propose(slots, generated, room, slots.size, most)
        self._proposed = slots, drafts
        found: list[list[int]] = [[] for _ in range(step.slots.size)]
        if drafts.token_ids.size:
            ends = np.cumsum(drafts.counts)
            tokens = drafts.token_ids.tolist()
            for row, count, end in zip(
                np.flatnonzero(step.slots >= 0).tolist(), drafts.counts.tolist(), ends.tolist(), strict=True
            ):
                found[row] = tokens[end - count : end]
        return found


def _stop_ids(model_config: Any) -> set[int]:
    """The ids that end a response unless a request says otherwise."""
    # Of a model of several modalities only the language model's part may have them.
    parts = (model_config.hf_config, model_config.hf_text_config)
    known = [getattr(part, "eos_token_id", None) for part in parts]
    known.append(model_config.try_get_generation_config().get("eos_token_id"))
    found: set[int] = set()
    for ids in known:
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return found
