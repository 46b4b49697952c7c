"""A run's drafting besides the engine: what it costs, and where its histories come from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedModel

from stretto.assemble import Inputs, drafts, measure_steps, needs_step_ms
from stretto.checkpoints import Checkpoint
from stretto.config import Config, DraftConfig
from stretto.errors import StrettoError
from stretto.fleet import Drafting
from stretto.history.lengths import LengthHistory
from stretto.history.log import read_answered, read_ended, read_rollouts
from stretto.history.previous import PreviousVisits
from stretto.observe.progress import Reporter
from stretto.records import Rollout
from stretto.resume import check_tokenizer
from stretto.run_folder import RunFolder

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANOTHER_RUN = 1 << 20  # subtracted from its visits: older than any of this one's


def with_step_ms(config: Config, model: PreTrainedModel, max_model_len: int, reporter: Reporter) -> Config:
    """With `draft.step_ms` measured, where the budget weighs costs and they are not given."""
    if not needs_step_ms(config):
        return config
    reporter.message("measuring the engine's steps, which decides how much is drafted")
    found = measure_steps(config, model, max_model_len, time.perf_counter)
    if found is None:
        reporter.message("responses are too short to measure the engine's steps: nothing is drafted")
        nothing = DraftConfig(budget="none")  # beside which sources and the like stand at their defaults
        update: dict[str, object] = {
            name: getattr(nothing, name)
            for name in ("budget", "nodes", "max_nodes", "sources", "noise_aware")
        }
    else:
        update = {"step_ms": found}
    return config.model_copy(update={"draft": config.draft.model_copy(update=update)})


class Newest:
    """By prompt, or by sample: the newest `window` visits in a log, and the steps whose files have them."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._steps: dict[Hashable, dict[int, set[int]]] = {}  # by key and visit

    def add(self, key: Hashable, visit: int, step: int) -> None:
        """The file of `step` has a response of that visit."""
        visits = self._steps.setdefault(key, {})
        visits.setdefault(visit, set()).add(step)
        if len(visits) > self._window:
            del visits[min(visits)]

    def has(self, key: Hashable, visit: int) -> bool:
        """Whether the visit is one of the newest."""
        return visit in self._steps.get(key, ())

    def steps(self) -> set[int]:
        """All that have to be read."""
        return {step for visits in self._steps.values() for steps in visits.values() for step in steps}


@dataclass(frozen=True, slots=True)
class Earlier:
    """Another run's responses to this one's prompts: where they are. They are read, and held, one step at a time."""

    run: RunFolder
    newest: Newest  # by prompt uid

    def __iter__(self) -> Iterator[list[Rollout]]:
        """Step by step, older than all visits of this run. Raises StrettoError for a damaged file."""
        for step in sorted(self.newest.steps()):
            rollouts = read_rollouts(self.run.log_file("consumed", step))
            kept = [r for r in rollouts if self.newest.has(r.prompt.uid, r.visit)]
            for rollout in kept:
                rollout.visit -= ANOTHER_RUN
            yield kept


def find_earlier(config: Config, inputs: Inputs, *, resuming: bool = False) -> Earlier | None:
    """The responses of `history.warm_from` to the prompts of this run, read once to see that they can be used.

    Raises StrettoError if it is no run, has another tokenizer, answers none of these prompts, or has tokens that this
    model has not. Where a run is resumed this is only said: it costs speed, and the run has begun.
    """
    path = config.history.warm_from
    if path is None or not drafts(config):
        return None
    try:
        run = RunFolder.open(Path(path))
        if steps := run.checkpoint_steps():
            check_tokenizer(run.checkpoint_folder(steps[-1]), inputs)
        earlier = Earlier(run, _answers_to(run, inputs, config.history.window))
        _check_tokens(earlier, inputs)
    except StrettoError as error:
        if not resuming:
            raise StrettoError(f"history.warm_from: {error}") from error
        logger.warning("nothing is drafted from history.warm_from: %s", error)
        return None
    return earlier


def _answers_to(run: RunFolder, inputs: Inputs, window: int) -> Newest:
    ours, newest, responses = {prompt.uid for prompt in inputs.train}, Newest(window), 0
    for step in run.log_steps("consumed"):
        for answered in read_answered(run.log_file("consumed", step)):
            responses += 1
            if answered.uid in ours:
                newest.add(answered.uid, answered.visit, step)
    if not newest.steps():
        raise StrettoError(
            f"none of the {responses} responses in {run.path} answers one of these prompts "
            "(other data, another tokenizer, or another chat template)"
        )
    return newest


def _check_tokens(earlier: Earlier, inputs: Inputs) -> None:
    for rollout in chain.from_iterable(earlier):
        top = rollout.top.token_ids if rollout.top is not None else rollout.token_ids[:0]
        largest = max((int(ids.max()) for ids in (rollout.token_ids, top) if ids.size), default=0)
        if largest >= inputs.vocabulary:
            raise StrettoError(
                f"{earlier.run.path} has the token id {largest}, but this model has {inputs.vocabulary} tokens: "
                "it is another model's run"
            )


def make_previous(config: Config) -> PreviousVisits | None:
    """What prefix reuse takes responses from, where the configuration asks for it."""
    reuse = config.reuse
    if reuse.kind != "prefix":
        return None
    return PreviousVisits(seed=config.seed, lenience=reuse.lenience, residual=reuse.residual)


def restore_drafter(drafter: Drafting, config: Config, checkpoint: Checkpoint) -> None:
    """What it had learned at the checkpoint."""
    state = checkpoint.state.get("draft")  # None: nothing was drafted until then
    if state is not None:
        drafter.load_state_dict(state, budget=state["budget_kind"] == config.draft.budget)


def restore_histories(
    config: Config, folder: RunFolder, step: int, drafter: Drafting | None, previous: PreviousVisits | None
) -> None:
    """Have both remember what they knew after `step`, from the log. It is read, and held, one step at a time.

    A prompt's newest visits may be long ago, where it was discarded since, and a sample's newest response older than
    its prompt's. A damaged file is said and left out where it costs speed only, be it that prompts have no history
    until they are answered again; where prefix reuse would draw other tokens, StrettoError is raised.
    """
    prompts, samples = Newest(config.history.window), Newest(1)
    every = range(1, step + 1)
    for number, answers in _each(read_answered, folder, every, every if previous is not None else ()):
        for uid, occurrence, sample, visit in answers:
            prompts.add(uid, visit, number)
            samples.add((uid, occurrence, sample), visit, number)
    exact = samples.steps() if previous is not None else set()
    needed = exact | prompts.steps() if drafter is not None else exact
    for _, rollouts in _each(read_rollouts, folder, sorted(needed), exact):
        if drafter is not None:
            drafter.remember([r for r in rollouts if prompts.has(r.prompt.uid, r.visit)])
        if previous is not None:
            previous.remember(rollouts)


def _each(
    read: Callable[[Path], list[T]], folder: RunFolder, steps: Iterable[int], exact: Container[int]
) -> Iterator[tuple[int, list[T]]]:
    """What `read` finds in the log of each step; those of `exact` must not be missing."""
    for number in steps:
        try:
            found = read(folder.log_file("consumed", number))
        except StrettoError as error:
            if number in exact:
                raise StrettoError(f'{error}\nreuse.kind = "prefix" takes responses from there') from error
            logger.warning("nothing is drafted from step %d: %s", number, str(error).partition("\n")[0])
        else:
            yield number, found


def restore_lengths(lengths: LengthHistory, folder: RunFolder, step: int) -> None:
    """What had been observed up to `step`, from the log; of a damaged file nothing, which is said."""
    for number in range(1, step + 1):
        try:
            ended = read_ended(folder.log_file("rollouts", number))
        except StrettoError as error:
            logger.warning("no lengths are known from step %d: %s", number, str(error).partition("\n")[0])
            continue
        lengths.observe_lengths(ended)
    lengths.metrics()  # those of the steps before have been written
