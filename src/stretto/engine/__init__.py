"""Engines turn requests into tokens: one protocol, several implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stretto.draft import Drafts, Verified
from stretto.records import Event, IntArray, Request, Running
from stretto.weights import WeightsRef


class Drafter(Protocol):
    """Guesses what comes next in an engine's slots. Nothing about its guesses enters the tokens."""

    def begin(self, slot: int, request: Request) -> None:
        """The slot has a new request, perhaps one with tokens."""

    def end(self, slot: int, length: int | None) -> None:
        """The slot is free again. Its response has ended by itself with `length` tokens; None: it was stopped."""

    def propose(self, slots: IntArray, generated: IntArray, room: IntArray, tokens: int, most: int) -> Drafts:
        """Trees for `slots` (R,), whose responses have `generated` (R,) tokens and can take `room` (R,) more before
        their last. The step has `tokens` packed without drafts and takes up to `most` nodes more; a tree has at most
        `stretto.draft.MAX_NODES`.
        """

    def observe(self, slots: IntArray, drafts: Drafts, verified: Verified, token_ids: IntArray) -> None:
        """What `slots` (R,) emitted, `verified.emitted` tokens each of `token_ids` (T,), and what became of the drafts.

        Called for every step that samples, with or without drafts; before `end` for what ends.
        """


class Engine(Protocol):
    """One replica of the model with `slots` places; knows nothing of schedules.

    It queues what does not fit its slots, first come, first served. Commands return nothing: results are the
    events of the next `step`.
    """

    worker: int
    slots: int
    version: int

    @property
    def num_running(self) -> int:
        """Slots that are prefilling or decoding."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do something: a running or queued request, or an event to report."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, in this order."""

    def stop(self, ids: Sequence[int], attempts: Sequence[int]) -> None:
        """Let go of these requests; each is answered by `Stopped`. Unknown pairs are ignored."""

    def load(self, ref: WeightsRef, running: Running) -> None:
        """Take new weights before the next step, reading them where they are a `file`; answered by `Loaded` (and
        `Stopped` if running="stop").
        """

    def step(self) -> list[Event]:
        """One forward pass over what is running, after admitting what fits; its events in order."""

    def metrics(self) -> dict[str, float]:
        """Counters since the last call (steps, tokens, seconds by part), reset by it."""


MODEL_COUNTERS = (
    "steps", "decode_steps", "prefill_tokens", "decode_tokens", "drafted_tokens", "accepted_tokens",
    "reverified_tokens", "busy_squares", "busy_prefill_tokens", "busy_slot_seconds", "step_seconds", "model_seconds",
    "sampling_seconds", "reuse_kept_tokens", "reuse_tried", "reuse_whole",
)  # fmt: skip
"""What an engine with a model counts. `steps`; `decode_steps`: of one request each. Tokens: computed besides the
sampled ones, sampled, drafted, accepted, computed again. `busy_*`: a step's requests, prefilled tokens and seconds,
times its requests. Seconds; `reuse_*` as in `PrefixReuse.learn`.
"""
