"""A run's drafting besides the engine: what it costs, and where its histories come from."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from transformers import PreTrainedModel

from stretto.assemble import Inputs, drafts, measure_steps, needs_step_ms
from stretto.checkpoints import Checkpoint
from stretto.config import Config
from stretto.errors import StrettoError
from stretto.fleet import Drafting
from stretto.history.lengths import LengthHistory
from stretto.history.log import read_ended, read_rollouts
from stretto.history.previous import PreviousVisits
from stretto.observe.progress import Reporter
from stretto.records import Rollout
from stretto.run_folder import RunFolder

logger = logging.getLogger(__name__)

ANOTHER_RUN = 1 << 20  # subtracted from its visits: older than any of this one's


def with_step_ms(config: Config, model: PreTrainedModel, max_model_len: int, reporter: Reporter) -> Config:
    """With `draft.step_ms` measured, where the budget weighs costs and they are not given."""
    if not needs_step_ms(config):
        return config
    reporter.message("measuring the engine's steps, which decides how much is drafted")
    found = measure_steps(config, model, max_model_len, time.perf_counter)
    if found is None:
        reporter.message("responses are too short to measure the engine's steps: nothing is drafted")
        update: dict[str, object] = {"budget": "none"}
    else:
        update = {"step_ms": found}
    return config.model_copy(update={"draft": config.draft.model_copy(update=update)})


def read_earlier(config: Config, inputs: Inputs) -> list[Rollout]:
    """The responses of `history.warm_from` to the prompts of this run.

    Raises StrettoError if it is no run, answers none of these prompts, or has tokens that this model has not.
    """
    path = config.history.warm_from
    if path is None or not drafts(config):
        return []
    try:
        run = RunFolder.open(Path(path))
        rollouts = [
            r for step in run.log_steps("consumed") for r in read_rollouts(run.log_file("consumed", step))
        ]
    except StrettoError as error:
        raise StrettoError(f"history.warm_from: {error}") from error
    ours = {prompt.uid for prompt in inputs.train}
    known = [rollout for rollout in rollouts if rollout.prompt.uid in ours]
    if not known:
        raise StrettoError(
            f"history.warm_from: none of the {len(rollouts)} responses in {path} answers one of these prompts "
            "(other data, another tokenizer, or another chat template)"
        )
    largest = max((int(rollout.token_ids.max()) for rollout in known if rollout.token_ids.size), default=0)
    if largest >= inputs.vocabulary:
        raise StrettoError(
            f"history.warm_from: {path} has the token id {largest}, but this model has {inputs.vocabulary} tokens: "
            "it is another model's run"
        )
    for rollout in known:
        rollout.visit -= ANOTHER_RUN
    return known


def make_previous(config: Config) -> PreviousVisits | None:
    """What prefix reuse takes responses from, where the configuration asks for it."""
    reuse = config.reuse
    if reuse.kind != "prefix":
        return None
    return PreviousVisits(seed=config.seed, lenience=reuse.lenience, residual=reuse.residual)


def read_recent(config: Config, folder: RunFolder, step: int, epoch: int) -> list[list[Rollout]]:
    """The responses of the newest visits in the log, step by step up to `step`.

    A damaged log is said and left out where it costs speed; with prefix reuse it would change tokens, and StrettoError
    is raised.
    """
    oldest = epoch - config.history.window
    logs: list[list[Rollout]] = []
    for number in range(step, 0, -1):
        try:
            rollouts = read_rollouts(folder.log_file("consumed", number))
        except StrettoError as error:
            if config.reuse.kind == "prefix":
                raise StrettoError(f'{error}\nreuse.kind = "prefix" takes responses from there') from error
            logger.warning("nothing is drafted from step %d: %s", number, str(error).partition("\n")[0])
            continue
        logs.append([rollout for rollout in rollouts if rollout.visit >= oldest])
        if not logs[-1]:
            break
    return logs[::-1]


def restore_drafter(
    drafter: Drafting, config: Config, checkpoint: Checkpoint, recent: list[list[Rollout]]
) -> None:
    """The drafter as it was at the checkpoint: what it had learned, and its histories from the log."""
    state = checkpoint.state.get("draft")  # None: nothing was drafted until then
    if state is not None:
        drafter.load_state_dict(state, budget=state["budget_kind"] == config.draft.budget)
    for rollouts in recent:
        drafter.remember(rollouts)


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
