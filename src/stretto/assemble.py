"""From a configuration to parts: what training and evaluation put together in the same way."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from stretto.config import Config
from stretto.draft import Drafts, Verified
from stretto.draft.budget import make_budget
from stretto.draft.cost import CostModel
from stretto.draft.drafter import HistoryDrafter
from stretto.engine import Drafter, Engine
from stretto.engine.embedded import EmbeddedEngine
from stretto.engine.vllm import VllmEngine
from stretto.engines import beside_the_model, make_separate_engine, make_vllm_engine, worker_environment
from stretto.errors import StrettoError
from stretto.fleet.drafter import FleetDrafter
from stretto.fleet.process import ProcessFleet
from stretto.fleet.workers import WorkerFleet
from stretto.history.index import HistoryIndex
from stretto.learn.sharded import Places
from stretto.model import end_tokens, load_model_config, load_tokenizer
from stretto.records import Event, IntArray, Prompt, Request, SamplingParams
from stretto.schedule import make_schedule
from stretto.tasks.prompts import tokenize_rows
from stretto.tasks.sources import Data, load_data

PER_NODE = 1.5e-6
"""Seconds that growing and following a drafted node takes, measured on two x86-64 cores."""
PER_DRAFT = 6e-4
"""Seconds that packing, walking and keeping trees adds to a step that has any, measured on two x86-64 cores."""
ASKING, LITTLE, LONGEST_PAUSE = 2.5e-4, 0.004, 16
"""Seconds that looking for nodes takes; the share of a step that this may take where none has been found for long; and
how many steps apart it is done at most.
"""


@dataclass(slots=True)
class Inputs:
    """What a run reads before it loads a model: everything that bad input can be found in."""

    tokenizer: PreTrainedTokenizerBase
    data: Data
    train: list[Prompt]
    test: list[Prompt]
    max_model_len: int
    vocabulary: int  # token ids of the model
    ends: tuple[int, ...]  # of these, what ends a response
    warnings: list[str]


def available_cores() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def settle_process(config: Config) -> None:
    """Torch's threads as configured (`deterministic` needs their number fixed, since sums depend on it), and none of
    transformers' own progress bars, which would tear ours.
    """
    torch.set_num_threads(config.threads or available_cores())
    transformers_logging.disable_progress_bar()


def read_inputs(config: Config, source: Any = None) -> Inputs:
    """Tokenizer, rows and prompts, checked. Raises StrettoError for what is wrong with any of them."""
    tokenizer = load_tokenizer(config.model)
    model_config = load_model_config(config.model)
    context = _context(config, model_config)
    data = load_data(config.data, config.eval, source)
    limit = config.engine.max_model_len or context
    train = tokenize_rows(
        data.train, tokenizer, config.data, max_model_len=limit, name=data.name, place=data.place
    )
    held_out = f"{data.name} (held out)"
    test = tokenize_rows(
        data.test, tokenizer, config.data, max_model_len=limit, name=held_out, place=data.test_place
    )
    _check_vocabulary(config, model_config, tokenizer, (*train, *test))
    needed = max(len(p.token_ids) for p in (*train, *test)) + config.sampling.max_new_tokens
    warnings = []
    if needed > limit:
        warnings.append(
            f"the longest prompt and sampling.max_new_tokens = {config.sampling.max_new_tokens} make {needed} tokens, "
            f"but the context has {limit}: responses to long prompts end there"
        )
    vocabulary = int(model_config.vocab_size)
    ends = end_tokens(config.model, tokenizer, vocabulary)
    return Inputs(tokenizer, data, train, test, min(needed, limit), vocabulary, ends, warnings)


def _check_vocabulary(
    config: Config,
    model_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
) -> None:
    """Raise StrettoError for a token id that the model doesn't have."""
    size = model_config.vocab_size
    largest = max((int(p.token_ids.max()) for p in prompts), default=0)
    if max(largest, int(tokenizer.eos_token_id)) >= size:
        raise StrettoError(
            f"the tokenizer of {config.model.tokenizer or config.model.path} gives token id "
            f"{max(largest, int(tokenizer.eos_token_id))}, but the model {config.model.path} has {size} tokens; "
            "name its own with model.tokenizer"
        )
    for token in config.sampling.stop_token_ids:
        if token >= size:
            raise StrettoError(
                f"sampling.stop_token_ids: {token} is no token of the model {config.model.path}: it has 0 to {size - 1}"
            )


def _context(config: Config, model_config: PretrainedConfig) -> int:
    """The model's longest sequence, in tokens. Raises StrettoError if the configuration asks for a longer one."""
    context: int = model_config.max_position_embeddings
    wanted = config.engine.max_model_len
    if wanted is not None and wanted > context:
        raise StrettoError(
            f"engine.max_model_len = {wanted}: the model {config.model.path} has a context of {context} tokens"
        )
    return context


def sampling_params(config: Config, ends: Sequence[int], temperature: float | None = None) -> SamplingParams:
    """How responses are drawn; `temperature` None is training's. The tokens `ends` (`Inputs.ends`) always stop."""
    s = config.sampling
    return SamplingParams(
        temperature=s.temperature if temperature is None else temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        max_new_tokens=s.max_new_tokens,
        stop_token_ids=tuple(dict.fromkeys((*ends, *s.stop_token_ids))),
        stop=tuple(s.stop),
    )


def measure_steps(
    config: Config, model: PreTrainedModel, max_model_len: int, clock: Callable[[], float]
) -> list[float] | None:
    """Milliseconds of a decoding step of 1, 2, 4 ... tokens, as `draft.step_ms` has them; None if responses are too
    short to measure.

    Up to the engine's slots every token is another request's, as without drafts; beyond, each brings a path of nodes.
    """
    warm_up, steps, longest = 3, 4, 16  # the first steps compute the prompt, which all share
    context = min(64, max_model_len - warm_up - steps - longest)
    if context < 1:
        return None
    slots = 1 << (min(64, config.engine.max_num_seqs).bit_length() - 1)
    counts = [2**i for i in range(9) if 2**i <= slots * longest]

    def step(engine: Engine, requests: int) -> float:
        how, nothing = SamplingParams(max_new_tokens=warm_up + steps * longest), np.zeros(0, np.int64)
        prompt = np.zeros(context, np.int64)
        engine.submit([Request(i, 0, 0, prompt, nothing, 0, i, how) for i in range(requests)])
        for _ in range(warm_up):
            engine.step()
        began = clock()
        for _ in range(steps):
            engine.step()
        return (clock() - began) / steps

    def embedded(count: int) -> float:
        requests = min(count, slots)
        engine = EmbeddedEngine(
            model,
            None,
            worker=0,
            max_num_seqs=slots,
            max_model_len=max_model_len,
            max_num_batched_tokens=count + context,
            drafter=_Path(count // requests - 1),
        )
        return step(engine, requests)

    if config.engine.kind == "vllm":
        path = _Path(0)
        with _vllm_for_measuring(config, max_model_len, path, longest) as engine:

            def in_vllm(count: int) -> float:
                requests = min(count, slots)
                path.nodes = count // requests - 1
                seconds = step(engine, requests)
                engine.stop(range(requests), [0] * requests)
                engine.step()
                return seconds

            return step_costs([[in_vllm(count) for count in counts] for _ in range(3)])
    with _threads(config.fleet.threads):
        return step_costs([[embedded(count) for count in counts] for _ in range(3)])


@contextmanager
def _vllm_for_measuring(
    config: Config, max_model_len: int, drafter: Drafter, longest: int
) -> Iterator[VllmEngine]:
    """A vLLM engine that is closed in the end: a run's own comes later, perhaps in other processes."""
    draft = config.draft.model_copy(update={"max_nodes": longest})
    arguments = {**config.engine.vllm, **beside_the_model(config)}
    changed = {"draft": draft, "engine": config.engine.model_copy(update={"vllm": arguments})}
    engine = make_vllm_engine(config.model_copy(update=changed), None, max_model_len, time.monotonic, drafter)
    try:
        yield engine
    finally:
        engine.close()


def step_costs(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Milliseconds of steps of 1, 2, 4 ... tokens from seconds measured in several rounds: medians that never fall.

    Where memory's speed decides, 256 tokens take as long as one; what is left between them is noise, and the last is
    put a thousandth above the first, since what tokens cost must have a direction.
    """
    medians = np.maximum.accumulate([1e3 * median(column) for column in zip(*rounds, strict=True)])
    medians[-1] = max(medians[-1], 1.001 * medians[0] + 1e-4)
    return [round(float(ms), 4) for ms in medians]


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    """Give torch as many threads for a while; None: those that it has."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Path:
    """A drafter whose guesses are paths of `nodes` nodes, always wrong."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def begin(self, slot: int, request: Request) -> None: ...

    def end(self, slot: int, length: int | None) -> None: ...

    def propose(self, slots: IntArray, generated: IntArray, room: IntArray, tokens: int, most: int) -> Drafts:
        each = np.minimum(self.nodes, np.minimum(room, most // slots.size))
        depth = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        nothing = np.zeros(depth.size)
        return Drafts(each, nothing.astype(np.int64), depth - 1, depth + 1, nothing, nothing.astype(np.int8))

    def observe(self, slots: IntArray, drafts: Drafts, verified: Verified, token_ids: IntArray) -> None: ...


def drafts(config: Config) -> bool:
    """Whether anything is drafted."""
    return config.draft.budget != "none"


def needs_step_ms(config: Config) -> bool:
    """Whether the budget weighs costs that have not been measured."""
    return config.draft.budget in ("goodput", "marginal") and config.draft.step_ms is None


def make_drafter(config: Config, clock: Callable[[], float]) -> HistoryDrafter | None:
    """The drafter that the configuration names, if any; `draft.step_ms` must be set where its budget weighs costs."""
    draft, history = config.draft, config.history
    if not drafts(config):
        return None
    cost, pause = None, 1
    if draft.step_ms is not None:
        pause = min(LONGEST_PAUSE, math.ceil(ASKING / (LITTLE * draft.step_ms[0] / 1e3)))
        cost = CostModel(PER_NODE, PER_DRAFT)
        cost.fit([(2**i, ms / 1e3) for i, ms in enumerate(draft.step_ms)])
    index = HistoryIndex(
        window=history.window,
        weight=history.weight,
        alternatives=draft.noise_aware and history.alternatives > 0,
        max_bytes=int(history.max_gib * 2**30),
        clock=clock,
    )
    return HistoryDrafter(
        index,
        make_budget(draft.budget, cost, draft.nodes, draft.aimd),
        slots=config.engine.max_num_seqs,
        sources=draft.sources,
        max_nodes=draft.max_nodes,
        branches=config.engine.kind != "vllm",  # which verifies paths
        noise_aware=draft.noise_aware,
        probabilities=history.weight == "probability",
        wait=config.deterministic,
        pause=pause,
        clock=clock,
    )


def generates_beside(config: Config) -> bool:
    """Whether engines are at work on this machine while the learner is, so that they share the cores."""
    here = config.fleet.kind == "processes" or (config.fleet.kind == "ray" and config.fleet.address is None)
    return here and make_schedule(config.schedule).overlaps


def with_threads(config: Config) -> Config:
    """With `threads` set: all cores, or a worker's share. They stay with the run, since sums depend on it."""
    if config.threads is not None:
        return config
    shares = config.fleet.workers + 1 if generates_beside(config) else 1
    return config.model_copy(update={"threads": max(1, available_cores() // shares)})


def with_fleet_threads(config: Config) -> Config:
    """With `fleet.threads` set, where there are processes to have them: like `threads`, it stays with the run."""
    fleet = config.fleet
    if fleet.kind == "in_process" or fleet.threads is not None:
        return config
    learner = (config.threads or 0) if generates_beside(config) else 0
    # What machines a cluster has is not known here.
    threads = 1 if fleet.address is not None else max(1, (available_cores() - learner) // fleet.workers)
    return config.model_copy(update={"fleet": fleet.model_copy(update={"threads": threads})})


def with_fleet_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of a saved configuration: other workers do not inherit `fleet.threads`, which their number decided."""
    others = {"fleet.kind", "fleet.workers", "fleet.address"} & changes.keys()
    return {"fleet.threads": None, **changes} if others else dict(changes)


def build_worker(config: Config, max_model_len: int, worker: int) -> tuple[Engine, HistoryDrafter | None]:
    """The engine of a fleet's process, called there, with the weights that the run began with, and its drafter."""
    settle_process(config.model_copy(update={"threads": config.fleet.threads}))
    tokenizer = load_tokenizer(config.model) if config.sampling.stop else None
    drafter = make_drafter(config, time.monotonic)
    return make_separate_engine(config, tokenizer, max_model_len, time.monotonic, drafter, worker), drafter


def make_worker_fleet(
    config: Config, max_model_len: int, post: Callable[[Event], None], scratch: Path
) -> tuple[WorkerFleet, FleetDrafter | None]:
    """Workers that begin to load at once; `fleet.threads` and `draft.step_ms` must be set as in `make_drafter`, and Ray
    be there for those on Ray. `scratch` is for weights of processes here.

    Each keeps the history of all prompts, and so does the fleet for workers to come; together they keep to
    `history.max_gib`.
    """
    history = config.history
    share = history.model_copy(update={"max_gib": history.max_gib / (config.fleet.workers + 1)})
    build = partial(build_worker, config.model_copy(update={"history": share}), max_model_len)
    settings: dict[str, Any] = {
        "workers": config.fleet.workers,
        "restarts": config.fleet.restarts,
        "patience": config.fleet.patience,
        "window": history.window,
        "history_bytes": int(share.max_gib * 2**30),
    }
    fleet: WorkerFleet
    if config.fleet.kind == "ray":
        from stretto.fleet.ray import RayFleet, gpus_of

        cpus = float(config.fleet.threads or 1)
        fleet = RayFleet(build, post, cpus=cpus, gpus=gpus_of(config), **settings)
    else:
        fleet = ProcessFleet(
            build, post, scratch=scratch, environment=partial(worker_environment, config), **settings
        )
    return fleet, FleetDrafter(fleet) if drafts(config) else None


def learner_places(config: Config) -> Places:
    """Room for the learner's processes on the Ray cluster, which must have been connected to."""
    from stretto.fleet.ray import RayRanks, learner_gpus

    shards = config.learner.shards
    cpus = max(1, (config.threads or shards) // shards)
    return RayRanks(shards, float(cpus), learner_gpus(config), config.fleet.patience)
