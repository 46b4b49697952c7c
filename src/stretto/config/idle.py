"""Keys that another key makes idle: refused when set, since nobody sets what should do nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.config.schedules import ScheduleConfig
    from stretto.config.sections import Config

DRAFTING = ("fixed", "aimd", "length_class", "marginal", "goodput")
USED_WITH: dict[str, tuple[str, tuple[Any, ...]]] = {
    "reuse.refresh": ("reuse.kind", ("noise",)),
    "reuse.lenience": ("reuse.kind", ("prefix",)),
    "reuse.residual": ("reuse.kind", ("prefix",)),
    "engine.vllm": ("engine.kind", ("vllm",)),
    "draft.nodes": ("draft.budget", ("fixed", "length_class")),
    "draft.aimd": ("draft.budget", ("aimd",)),
    "draft.sources": ("draft.budget", DRAFTING),
    "draft.noise_aware": ("draft.budget", DRAFTING),
    "draft.max_nodes": ("draft.budget", DRAFTING),
    "fleet.restarts": ("fleet.kind", ("processes", "ray")),
    "fleet.patience": ("fleet.kind", ("processes", "ray")),
    "fleet.address": ("fleet.kind", ("ray",)),
    "fleet.gpus": ("fleet.kind", ("ray",)),
    "eval.every": ("eval.enabled", (True,)),
    "eval.split": ("eval.enabled", (True,)),
    "eval.path": ("eval.enabled", (True,)),
    "eval.limit": ("eval.enabled", (True,)),
    "eval.samples": ("eval.enabled", (True,)),
    "eval.temperature": ("eval.enabled", (True,)),
    "schedule.outlier_quantile": ("schedule.outlier", ("migrate", "defer")),
    "schedule.outlier_factor": ("schedule.outlier", ("migrate", "defer")),
    "schedule.outlier_share": ("schedule.outlier", ("migrate", "defer")),
    "schedule.max_num_gen_batches": ("schedule.drop_zero_variance", (True,)),
    "schedule.refresh_budget": ("schedule.off_policy_strategy", ("refresh",)),
}
"""Keys that do something only with certain values of another key of their section."""
RATIO = {"clip_low": False, "clip_high": False, "importance_cap": True}
"""Keys of `learner`, and whether they are for log-probs that the learner recomputes or for the engine's."""
ENDS_WHAT_IT_BEGINS = ("synchronous", "divided")
"""Kinds of schedules in which no response loses its tokens to begin again."""
OFF_POLICY = ("async", "sorted", "histopipe", "concurrency", "elastic")
"""Kinds in which staleness has the bound that is set, or none."""
OWN_WORKERS = {"stream": "long_workers", "elastic": "local_workers"}


def section(config: Any, name: str) -> None:
    """Raises StrettoError for a key of the section `name` that is not as by default and does nothing."""
    for key, (other, values) in USED_WITH.items():
        of, _, knob = key.partition(".")
        if of != name:
            continue
        value, chosen = getattr(config, knob), getattr(config, other.partition(".")[2])
        default = type(config).model_fields[knob].get_default(call_default_factory=True)
        if chosen not in values and value != default:
            raise StrettoError(
                f"{key} = {_toml(value)} does nothing with {other} = {_toml(chosen)}; it is for "
                f"{' or '.join(map(_toml, values))}: leave it at {_toml(default)}"
            )


def recomputed(deterministic: object, old_logprobs: object) -> bool:
    """Whether the learner recomputes the log-probs that the probability ratio starts from."""
    return old_logprobs == "recompute" or (old_logprobs == "auto" and deterministic is True)


def _ratio(config: Config) -> None:
    """Raises StrettoError for a clip of ratios that are all 1, or a cap of weights that there are none of."""
    recomputes = recomputed(config.deterministic, config.learner.old_logprobs)
    set_to = {"learner.old_logprobs": config.learner.old_logprobs, "deterministic": config.deterministic}
    by = " and ".join(f"{key} = {_toml(value)}" for key, value in set_to.items())
    if recomputes:
        why = "the learner recomputes log-probs, with which every probability ratio is 1"
        other = '"behaviour"' + (", with deterministic = false" if config.deterministic else "")
    else:
        why, other = "the ratio starts from the engine's log-probs: nothing is left to correct", '"recompute"'
    for name, used in RATIO.items():
        value, default = getattr(config.learner, name), type(config.learner).model_fields[name].default
        if used != recomputes and value != default:
            raise StrettoError(
                f"learner.{name} = {_toml(value)} does nothing with {by}: {why}; it is for {other}: leave it at "
                f"{_toml(default)}"
            )


def _dropped(config: Config) -> None:
    """Raises StrettoError where all that would be drafted is dropped tokens, and none ever are."""
    draft, schedule = config.draft, config.schedule
    if draft.budget == "none" or draft.sources != ["dropped"]:
        return
    by = f"schedule.kind = {_toml(schedule.kind)}"
    if schedule.kind not in ENDS_WHAT_IT_BEGINS:
        if schedule.off_policy_strategy in ("drop", "paced"):
            by = f"schedule.off_policy_strategy = {_toml(schedule.off_policy_strategy)}"
        elif schedule.kind in OFF_POLICY and schedule.max_staleness is None:
            by = 'schedule.max_staleness = "none"'
        else:
            return
    raise StrettoError(
        f'draft.sources = ["dropped"] does nothing with {by}: no response ever begins again, so nothing would be '
        'drafted; name other sources, such as "history", or set draft.budget = "none"'
    )


def _toml(value: object) -> str:
    return "none" if value is None else json.dumps(value)


def too_many_workers(config: ScheduleConfig, workers: int, key: str) -> str:
    """What is wrong where a schedule sets more workers apart than `key` says there are; else nothing."""
    knob = OWN_WORKERS.get(config.kind)
    wanted = getattr(config, knob) if knob else None
    if wanted is None or wanted <= workers:
        return ""
    return f"{knob} = {wanted}, but {key} = {workers}; use at most {workers}"


def run(config: Config) -> None:
    """Raises StrettoError for keys that do nothing in this run, or workers that are not there."""
    for name in dict.fromkeys(key.partition(".")[0] for key in USED_WITH):
        section(getattr(config, name), name)
    _ratio(config)
    _dropped(config)
    if said := too_many_workers(config.schedule, config.fleet.workers, "fleet.workers"):
        raise StrettoError(f"schedule.{said}")
