"""The second visit of a few prompts with drafts and without, by the number of responses in flight.

The first visit's responses, drawn by the same model, are the history. Both sides' engines step in turns, each
step timed by itself: a machine whose speed drifts from second to second is as fast for the one as for the other. The
bound beside each ratio is what the tokens per step would give if drafting and verifying cost nothing but the step's own
price.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from stretto.assemble import (
    Inputs,
    drafts,
    make_drafter,
    measure_steps,
    read_inputs,
    sampling_params,
)
from stretto.bench.pairs import Ratio, count, require_idle
from stretto.bench.rollout import status
from stretto.config import Config, load_config
from stretto.draft.drafter import HistoryDrafter
from stretto.engine.embedded import EmbeddedEngine
from stretto.engines import make_engine
from stretto.errors import StrettoError
from stretto.model import load_model
from stretto.observe.metrics import drafting_seconds
from stretto.records import Progress, Prompt, Purpose, Request, Rollout
from stretto.sampling import request_key

Answers = dict[int, tuple[list[int], list[float]]]
"""Token ids and log-probs by request id."""


@dataclass(slots=True)
class Side:
    """An engine at work."""

    engine: EmbeddedEngine
    answers: Answers
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the process

    def step(self) -> None:
        began, began_cpu = time.perf_counter(), time.process_time()
        events = self.engine.step()
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.process_time() - began_cpu
        for event in events:
            if isinstance(event, Progress):
                assert event.token_ids is not None
                assert event.logprobs is not None
                ends = np.cumsum(event.counts)
                for id, begin, end in zip(event.ids.tolist(), ends - event.counts, ends, strict=True):
                    self.answers[id][0].extend(event.token_ids[begin:end].tolist())
                    self.answers[id][1].extend(event.logprobs[begin:end].tolist())


def finish(sides: Sequence[Side]) -> None:
    """All answers of all sides, which step in turns, first one and then another first."""
    turn = 0
    while any(side.engine.has_work for side in sides):
        turn += 1
        for side in sides if turn % 2 else reversed(sides):
            if side.engine.has_work:
                side.step()


class Bench:
    """Model, prompts and settings of one comparison."""

    def __init__(self, config: Config, prompts: int, samples: int) -> None:
        torch.set_num_threads(config.threads or torch.get_num_threads())
        self.inputs: Inputs = read_inputs(config)
        self.model: PreTrainedModel = load_model(config.model)
        step_ms = config.draft.step_ms or measure_steps(
            config, self.model, self.inputs.max_model_len, time.perf_counter
        )
        self.config = config.model_copy(
            update={"draft": config.draft.model_copy(update={"step_ms": step_ms})}
        )
        self.prompts, self.samples = self.inputs.train[:prompts], samples
        self.how = sampling_params(self.config, self.inputs.ends)

    def requests(self, visit: int) -> list[Request]:
        """Of all prompts, sample after sample."""
        nothing = np.zeros(0, np.int64)
        return [
            Request(
                id=group * self.samples + sample,
                attempt=visit,
                group=group,
                prompt_ids=prompt.token_ids,
                token_ids=nothing,
                turn_start=0,
                key=request_key(
                    self.config.seed, Purpose.TRAIN, prompt.uid, prompt.occurrence, sample, visit
                ),
                sampling=self.how,
            )
            for group, prompt in enumerate(self.prompts)
            for sample in range(self.samples)
        ]

    def side(self, requests: Sequence[Request], slots: int, drafter: HistoryDrafter | None) -> Side:
        """An engine that is to answer `requests`, `slots` at a time."""
        engine_config = self.config.engine.model_copy(update={"max_num_seqs": slots})
        config = self.config.model_copy(update={"engine": engine_config})
        length, clock = self.inputs.max_model_len, time.perf_counter
        engine = make_engine(config, self.model, self.inputs.tokenizer, length, clock, drafter)
        key_values: Any = engine._key_values
        for tensor in (*key_values.keys, *key_values.values):
            tensor.zero_()  # a run's engine has its memory since its first step
        engine.submit(requests)
        return Side(engine, {request.id: ([], []) for request in requests})

    def drafter(self, slots: int, history: Sequence[Rollout]) -> HistoryDrafter:
        """With the first visit's responses as its history; its seconds are those of its threads' CPU time."""
        config = self.config.model_copy(
            update={"engine": self.config.engine.model_copy(update={"max_num_seqs": slots})}
        )
        drafter = make_drafter(config, time.thread_time)
        assert drafter is not None
        drafter.remember(history)
        drafter.index.wait([prompt.uid for prompt in self.prompts])
        return drafter


def rollout(prompt: Prompt, answer: tuple[list[int], list[float]]) -> Rollout:
    """A finished response of visit 0, with what history needs."""
    count = len(answer[0])
    return Rollout(
        request_id=0,
        group_id=0,
        prompt=prompt,
        sample_index=0,
        visit=0,
        key=0,
        token_ids=np.array(answer[0], np.int64),
        logprobs=np.array(answer[1]),
        raw_logprobs=np.array(answer[1]),
        versions=np.zeros(count, np.int64),
        loss_mask=np.ones(count, np.bool_),
    )


def compare(bench: Bench, history: Sequence[Rollout], slots: int, count: int, pairs: int) -> dict[str, Any]:
    """A row: `count` responses of the second visit, `slots` at a time."""
    every = bench.requests(1)
    requests = every[:: max(1, len(every) // count)][:count]  # over all prompts
    ratios, lengths, accepted, drafting, bounds = [], [], [], [], []
    step_ms = np.array(bench.config.draft.step_ms)
    same = 0
    for pair in range(pairs + 1):
        drafter = bench.drafter(slots, history)
        plain, drafted = bench.side(requests, slots, None), bench.side(requests, slots, drafter)
        finish([plain, drafted] if pair % 2 else [drafted, plain])
        same = sum(plain.answers[id][0] == drafted.answers[id][0] for id in plain.answers)
        if pair == 0:
            continue  # the first pair warms up
        counted, told = drafted.engine.metrics(), drafter.metrics()
        ratios.append(plain.seconds / drafted.seconds)
        lengths.append(counted["decode_tokens"] / counted["decode_steps"])
        accepted.append(counted["accepted_tokens"] / max(1.0, counted["drafted_tokens"]))
        spent = drafting_seconds(told)
        # The history was built before, of more responses than ran now: its part for as many.
        spent += told["spec/index/build_seconds"] * len(requests) / len(history)
        drafting.append(spent / drafted.cpu_seconds)
        without = plain.engine.metrics()
        packed = (counted["decode_steps"] + counted["drafted_tokens"]) / counted["steps"]
        price = np.interp(
            [without["decode_steps"] / without["steps"], packed], 2.0 ** np.arange(step_ms.size), step_ms
        )
        bounds.append(without["steps"] * price[0] / (counted["steps"] * price[1]))
    return {
        "in_flight": slots,
        "responses": len(requests),
        "same_responses": same,
        "ratio": asdict(Ratio.of(ratios)),
        "bound": float(np.median(bounds)),
        "tokens_per_step": float(np.median(lengths)),
        "accepted_share": float(np.median(accepted)),
        "draft_cpu_share": float(np.median(drafting)),
    }


def main(argv: Sequence[str] = ()) -> int:
    """Prints a table, or with --json one object; 1 where drafts changed a response."""
    parser = argparse.ArgumentParser(prog="stretto bench inflight", description=__doc__)
    parser.add_argument("--config", default="demo", help="a TOML file or a preset")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt, in the first visit")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 2, 8, 64])
    parser.add_argument("--responses", type=int, default=4, help="of the second visit, for each in flight")
    parser.add_argument("--pairs", type=count, default=5)
    parser.add_argument("--useless", action="store_true", help="give each prompt the history of another")
    parser.add_argument("--busy", action="store_true", help="measure although others use the machine")
    parser.add_argument("--json", action="store_true")
    options, keys = parser.parse_known_args(argv)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    config = load_config(options.config, keys)
    if not drafts(config):
        raise StrettoError(
            'bench inflight: draft.budget = "none" drafts nothing, so there is nothing to compare'
        )
    bench = Bench(config, options.prompts, options.samples)
    if options.useless and len(bench.prompts) < 2:
        raise StrettoError(
            "bench inflight: --useless gives each prompt another's history: it needs two or more"
        )
    others = require_idle(limit=float("inf") if options.busy else 0.2)
    first = bench.requests(0)
    visited = bench.side(first, bench.config.engine.max_num_seqs, None)
    finish([visited])
    shift = 1 if options.useless else 0
    history = [
        rollout(bench.prompts[(request.group + shift) % len(bench.prompts)], visited.answers[request.id])
        for request in first
    ]
    rows = [
        compare(bench, history, slots, min(len(first), max(slots, options.responses * slots)), options.pairs)
        for slots in options.in_flight
    ]
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, others {others:.0%}"
    if options.json:
        print(json.dumps({"config": options.config, "machine": machine, "rows": rows}))
        return status(rows)
    print(f"{options.config}, {' '.join(keys) or 'as it is'}; {machine}")
    for row in rows:
        print(
            f"{row['in_flight']:3d} in flight  {Ratio(**row['ratio'])}  bound {row['bound']:.2f}x  "
            f"tokens per step {row['tokens_per_step']:.2f}  accepted {row['accepted_share']:.0%}  "
            f"drafting CPU share {row['draft_cpu_share']:.1%}  "
            f"same responses {row['same_responses']} of {row['responses']}"
        )
    return status(rows)
