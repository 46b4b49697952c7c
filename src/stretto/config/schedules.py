"""Which schedule, and its knobs, by the names that the field has for them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.config import checks
from stretto.config.base import Section

Kind = Literal[
    "synchronous",
    "async",
    "sorted",
    "histopipe",
    "tail_batching",
    "concurrency",
    "divided",
    "stream",
    "elastic",
]


class ScheduleConfig(Section):
    """Who runs when, and what closes an update batch."""

    kind: Kind = "synchronous"
    """The policy; docs/schedules.md describes them."""
    prompts: int = Field(default=16, ge=1)
    """In an update batch."""
    samples: int = Field(default=8, ge=1)
    """Responses to each prompt (G)."""
    unit: Literal["group", "response"] = "group"
    """What an update takes: whole groups, or single responses, which need a learner.baseline of another kind."""
    max_staleness: int | None = Field(default=1, ge=0)
    """Optimiser steps that a response may be behind when it is trained on (eta); none: any."""
    off_policy_strategy: Literal["refresh", "wait", "drop", "paced"] = "refresh"
    """What would get too old is generated again, waited for, or dropped; paced (async only): its admission is paced."""
    refresh_budget: int | None = Field(default=None, ge=0)
    """How often a response may be generated again before the update waits for it; none: 2, with sorted any number."""
    running: Literal["continue", "recompute"] = "recompute"
    """What running responses do with their K/V when new weights come."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Responses in flight; none: what pacing allows."""
    drop_zero_variance: bool = False
    """Give up groups whose rewards are all equal, and fill their places (DAPO's dynamic sampling)."""
    max_num_gen_batches: int | None = Field(default=10, ge=1)
    """drop_zero_variance: after so many times `prompts` such groups without an update the run ends; none: never."""
    tokens_per_update: int | None = Field(default=None, ge=1)
    """An update takes as many groups as have about so many tokens (C3PO), instead of `prompts`; none: `prompts`."""
    longest_first: bool = False
    """Start the responses that are predicted to be the longest first."""
    load_prompts: int = Field(default=4, ge=1)
    """sorted: prompts that are taken in together, in multiples of `prompts`."""
    post_hoc: bool = False
    """sorted: generate a whole load, then sort it into updates; for comparison."""
    bands: int = Field(default=8, ge=2)
    """histopipe: classes of predicted length."""
    tier: Literal["mirrored", "linear", "equal"] = "mirrored"
    """histopipe: a long and a short band's times add up to the same; linear: as published; equal: bands of one size."""
    token_cost: float = Field(default=0.01, ge=0.0)
    """histopipe, stream: what a token adds to the time of an engine step, relative to a step's fixed part."""
    outlier: Literal["migrate", "defer", "none"] = "migrate"
    """histopipe: what becomes of responses that are much longer than predicted."""
    outlier_quantile: float = Field(default=0.95, gt=0.0, lt=1.0)
    """histopipe: of the prompt's earlier lengths, beyond which one may be an outlier."""
    outlier_factor: float = Field(default=1.25, ge=1.0)
    """histopipe: times that quantile."""
    outlier_share: float = Field(default=0.1, gt=0.0, le=1.0)
    """histopipe: only among the last of a band to end."""
    max_prompts_ratio: float = Field(default=1.25, ge=1.0)
    """tail_batching: prompts launched in a short round, relative to `prompts`."""
    max_num_return_sequences: int | None = Field(default=None, ge=1)
    """tail_batching: responses launched for each of them; none: 1.25 times `samples`."""
    concurrency: int | None = Field(default=None, ge=1)
    """concurrency: responses in flight; none: as many as there are slots."""
    refill: bool = True
    """concurrency: each response that ends lets in the next (CoPRIS); false: only updates let in new ones (APRIL)."""
    chunk_size: int = Field(default=1024, ge=1)
    """divided: new tokens after which a response may go on elsewhere."""
    long_share: float = Field(default=0.2, gt=0.0, lt=1.0)
    """stream: share of the responses, by predicted length, that have workers of their own."""
    long_workers: int | None = Field(default=None, ge=1)
    """stream: how many workers; none: what gives both sides the same predicted time."""
    local_workers: int = Field(default=1, ge=0)
    """elastic: how many workers, the first ones, are the trainer's own devices and generate in a window only."""
    window_floor: float = Field(default=5.0, ge=0.0)
    """elastic: seconds for which the trainer's own devices generate at least."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.schedule(self)
        return self
