"""What must hold between the keys of a configuration; nothing needs to be loaded to know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.config import idle, vllm
from stretto.config.idle import OFF_POLICY
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.config.schedules import ScheduleConfig
    from stretto.config.sections import Config, DataConfig, DraftConfig, FleetConfig, RewardConfig

SOURCES = ("task", "path", "dataset")


def data(config: DataConfig) -> None:
    """At most one source, and something for a system prompt to be put into."""
    given = [f"data.{key}" for key in SOURCES if getattr(config, key) is not None]
    if len(given) > 1:
        raise StrettoError(
            f"{' and '.join(given)} are set, but prompts come from one source; unset the others: "
            f'{given[0]} = "none"'
        )
    if config.system_prompt is not None and config.chat_template is False:
        raise StrettoError("data.system_prompt needs a chat template, but data.chat_template = false")


def reward(config: RewardConfig) -> None:
    """One weight for each function. (Weights of functions given as objects are checked with those.)"""
    functions, weights = config.functions, config.weights
    if functions and weights is not None and len(weights) != len(functions):
        raise StrettoError(
            f"reward.weights has {len(weights)} entries for {len(functions)} reward.functions; "
            "give one each, or none"
        )


def draft(config: DraftConfig) -> None:
    """Each source once, nodes that fit into a tree, step times that rise: with free tokens every guess would pay."""
    twice = [source for source in config.sources if config.sources.count(source) > 1]
    if twice:
        raise StrettoError(f'draft.sources names "{twice[0]}" more than once; name each of them once')
    if config.budget in ("fixed", "length_class") and config.nodes > config.max_nodes:
        raise StrettoError(
            f"draft.nodes = {config.nodes} is more than draft.max_nodes = {config.max_nodes}, "
            "the most that is proposed"
        )
    times = config.step_ms
    if times is not None and times[-1] <= times[0]:
        raise StrettoError(
            f"draft.step_ms: a step of {1 << (len(times) - 1)} tokens takes {times[-1]} ms and one of a single "
            f"token {times[0]} ms; more tokens must take longer"
        )


USED_BY: dict[str, tuple[str, ...]] = {
    "unit": ("synchronous", "async", "sorted", "concurrency"),
    "max_staleness": OFF_POLICY,
    "off_policy_strategy": OFF_POLICY,
    "refresh_budget": OFF_POLICY,
    "running": ("async", "sorted", "histopipe", "elastic"),
    "max_concurrent": ("async",),
    "longest_first": ("synchronous", "async"),
    "load_prompts": ("sorted",),
    "post_hoc": ("sorted",),
    "bands": ("histopipe",),
    "tier": ("histopipe",),
    "token_cost": ("histopipe", "stream"),
    "outlier": ("histopipe",),
    "outlier_quantile": ("histopipe",),
    "outlier_factor": ("histopipe",),
    "outlier_share": ("histopipe",),
    "max_prompts_ratio": ("tail_batching",),
    "max_num_return_sequences": ("tail_batching",),
    "concurrency": ("concurrency",),
    "refill": ("concurrency",),
    "chunk_size": ("divided",),
    "long_share": ("stream",),
    "long_workers": ("stream",),
    "local_workers": ("elastic",),
    "window_floor": ("elastic",),
}
"""Knobs of schedules that not all of them have, and the kinds that do."""

TIMING = {
    "async": "which weights sample a token, and which responses an update sees,",
    "sorted": "which responses an update sees",
    "histopipe": "which weights sample a token",
    "tail_batching": "which responses an update sees",
    "concurrency": "which responses an update sees",
    "stream": "in which order gradients are added",
    "elastic": "which weights sample a token, and in which order gradients are added,",
}
"""What depends on when things happen, by the kinds where something does."""


def overlaps(config: ScheduleConfig) -> bool:
    """Whether responses may be generated while the learner is at an update."""
    return config.kind in ("async", "histopipe", "elastic") or (
        config.kind == "sorted" and config.max_staleness != 0
    )


def timing(config: ScheduleConfig, processes: bool) -> str:
    """What keeps a run from being the same another time: the beginning of a sentence; empty where nothing does."""
    in_step = config.kind in ("async", "histopipe") or (config.kind == "elastic" and config.local_workers > 0)
    in_step = in_step and config.max_staleness == 0 and config.tokens_per_update is None
    if config.kind in TIMING and (
        processes or not in_step
    ):  # else one engine does what it does in `synchronous`
        return TIMING[config.kind]
    if config.kind == "divided" and processes:
        return "which worker a token is computed on"
    if config.drop_zero_variance:
        return "what is computed beside a token, since replacements start when rewards come,"
    return ""


def schedule(config: ScheduleConfig) -> None:
    """No knob is set that the chosen kind has not; what belongs together is there."""
    for key, kinds in USED_BY.items():
        value, default = getattr(config, key), type(config).model_fields[key].default
        if value != default and config.kind not in kinds:
            raise StrettoError(
                f"schedule.{key} = {_toml(value)} does nothing with schedule.kind = {_toml(config.kind)}; "
                f"it is for {', '.join(kinds)}"
            )
    if config.off_policy_strategy == "paced" and config.kind != "async":
        raise StrettoError(
            'schedule.off_policy_strategy = "paced" is for schedule.kind = "async" only, whose admission is '
            f'paced; with {_toml(config.kind)} use "refresh", "wait" or "drop"'
        )
    if config.off_policy_strategy == "paced" and config.max_staleness is None:
        raise StrettoError(
            'schedule.off_policy_strategy = "paced" needs schedule.max_staleness to pace by; use 1'
        )
    if config.post_hoc and config.tokens_per_update is not None and config.max_staleness is not None:
        raise StrettoError(
            f"schedule.post_hoc with schedule.tokens_per_update and schedule.max_staleness = {config.max_staleness}: "
            "how many updates a load makes, and so how old its last one is, is not known before its lengths are; use "
            'schedule.max_staleness = "none"'
        )
    if (
        config.post_hoc
        and config.max_staleness is not None
        and config.max_staleness < config.load_prompts - 1
    ):
        raise StrettoError(
            f"schedule.post_hoc with schedule.max_staleness = {config.max_staleness}: the last of the "
            f"{config.load_prompts} updates of a load is {config.load_prompts - 1} steps behind; "
            "use that or none"
        )
    if config.drop_zero_variance and config.unit == "response":
        raise StrettoError(
            'schedule.drop_zero_variance with schedule.unit = "response": whether the rewards of a group are all '
            'equal is known when all of it has ended; use schedule.unit = "group"'
        )
    launched = config.max_num_return_sequences
    if launched is not None and launched < config.samples:
        raise StrettoError(
            f"schedule.max_num_return_sequences = {launched} is less than schedule.samples = {config.samples}, "
            "the responses that an update needs of each prompt"
        )


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else "none" if value is None else str(value)


def _check_baseline(config: Config) -> None:
    schedule, baseline = config.schedule, config.learner.baseline
    if baseline == "group" and schedule.unit == "response":
        raise StrettoError(
            'schedule.unit = "response" with learner.baseline = "group": an update may have only some responses '
            'to a prompt, so there is no group to compare with; use learner.baseline = "batch" or "history"'
        )
    if baseline == "group" and schedule.samples < 2:
        raise StrettoError(
            "schedule.samples = 1: an advantage is relative to the other responses to the prompt; "
            'use 2 or more, or learner.baseline = "batch"'
        )
    if baseline != "group" and schedule.kind in ("stream", "elastic"):
        raise StrettoError(
            f'learner.baseline = "{baseline}" with schedule.kind = "{schedule.kind}": groups are trained on as '
            'they finish, before the rest of the batch is known; use "group"'
        )
    if baseline != "group" and schedule.drop_zero_variance:
        raise StrettoError(
            f'schedule.drop_zero_variance with learner.baseline = "{baseline}": such groups have advantages there; '
            "use one of the two"
        )


def _check_learner(config: Config) -> None:
    """Processes that can be had where the learner is to be, and that can train what it is to train."""
    learner, lora = config.learner, config.model.lora
    if learner.place == "cluster" and config.fleet.kind != "ray":
        kind = config.fleet.kind
        raise StrettoError(f'learner.place = "cluster" is for fleet.kind = "ray", not "{kind}"; use "here"')
    if lora is not None and (learner.shards > 1 or learner.place == "cluster"):
        key = f"learner.shards = {learner.shards}" if learner.shards > 1 else 'learner.place = "cluster"'
        other = "learner.shards = 1" if learner.shards > 1 else '"here"'
        raise StrettoError(
            f"{key} with model.lora: adapters are trained in one process, the trainer's; use {other}"
        )


def run(config: Config) -> None:
    """What must hold across sections.

    Raises:
        StrettoError: the first thing that doesn't, with the keys, the reason, and what to set instead.
    """
    schedule, sampling, engine = config.schedule, config.sampling, config.engine
    _check_fleet(config.fleet)
    idle.run(config)
    if engine.kind == "vllm":
        vllm.run(config)
    _check_learner(config)
    if config.fleet.weights == "shared" and overlaps(schedule):
        kind = f'schedule.kind = "{schedule.kind}"'
        if schedule.kind == "sorted":
            kind += f" and schedule.max_staleness = {_toml(schedule.max_staleness)}"
        raise StrettoError(
            f'fleet.weights = "shared" with {kind}: the learner would change the weights that the engine is reading, '
            'since they overlap; use fleet.weights = "copy"'
        )
    if sampling.temperature == 0:
        raise StrettoError(
            "sampling.temperature = 0: all responses to a prompt would be the same and nothing be learned; "
            "train with a temperature above 0 (eval.temperature = 0 evaluates greedily)"
        )
    _check_baseline(config)
    if "" in sampling.stop:
        raise StrettoError(
            "sampling.stop has an empty text, which would end every response at its first token"
        )
    limit = schedule.max_concurrent
    if limit is not None and limit < schedule.samples:
        raise StrettoError(
            f"schedule.max_concurrent = {limit} is less than schedule.samples = {schedule.samples}: a group is "
            f"admitted whole, so none ever would be; use at least {schedule.samples}"
        )
    if config.deterministic and config.learner.old_logprobs == "behaviour":
        raise StrettoError(
            'learner.old_logprobs = "behaviour" with deterministic = true: the engine\'s log-probs change in '
            'their last bits with the batch; use "recompute", or deterministic = false'
        )
    _check_lengths(config, engine.max_model_len)


WEIGHTS = {"in_process": "shared", "processes": "file", "ray": "object"}
"""The way of weights to engines, by the fleet's kind."""


def _check_fleet(config: FleetConfig) -> None:
    """Weights that reach the engines, and keys that mean something where they run."""
    own = WEIGHTS[config.kind]
    if config.kind != "in_process":
        if config.weights in ("shared", "copy"):
            raise StrettoError(
                f'fleet.weights = "{config.weights}" with fleet.kind = "{config.kind}": another process does not see '
                f'the trainer\'s memory; use fleet.weights = "{own}", or "auto"'
            )
        if config.weights not in ("auto", own):
            raise StrettoError(
                f'fleet.weights = "{config.weights}" with fleet.kind = "{config.kind}": its workers pull weights by '
                f'"{own}"; use that, or "auto"'
            )
        return
    if config.weights in ("file", "object"):
        raise StrettoError(
            f'fleet.weights = "{config.weights}" with fleet.kind = "in_process": the engine is where the weights are; '
            'use "auto", or fleet.kind = "processes"'
        )
    if config.workers > 1:
        raise StrettoError(
            f'fleet.workers = {config.workers} with fleet.kind = "in_process": engines of one process take turns, so '
            'more of them are no faster; use fleet.kind = "processes"'
        )
    if config.threads is not None:
        raise StrettoError(
            f'fleet.threads = {config.threads} with fleet.kind = "in_process": the engine has the trainer\'s threads, '
            'which are set by threads; use that, or fleet.kind = "processes"'
        )


def _check_lengths(config: Config, context: int | None) -> None:
    if context is None:
        return
    if config.sampling.max_new_tokens >= context:
        raise StrettoError(
            f"sampling.max_new_tokens = {config.sampling.max_new_tokens} leaves no room for a prompt in "
            f"engine.max_model_len = {context}; use at most {context - 1}"
        )
    longest = config.data.max_prompt_tokens
    if longest is not None and longest + config.sampling.max_new_tokens > context:
        raise StrettoError(
            f"data.max_prompt_tokens = {longest} and sampling.max_new_tokens = "
            f"{config.sampling.max_new_tokens} together exceed engine.max_model_len = {context}"
        )


def require_source(config: Config) -> None:
    """For a run that is given no data as an object.

    Raises:
        StrettoError: the configuration names no source of prompts.
    """
    if all(getattr(config.data, key) is None for key in SOURCES):
        raise StrettoError(
            'no prompts: set one of data.task (such as "knights"), data.path or data.dataset (a run whose rows were '
            "given in Python goes on with stretto.Trainer.resume(folder, data=...))"
        )


def _reuse_warnings(config: Config) -> list[str]:
    reuse = config.reuse
    said = []
    if reuse.kind != "none":
        said.append(
            f'reuse.kind = "{reuse.kind}": samples are not fresh draws from the second visit on; training explores '
            "less"
        )
    if reuse.kind == "prefix" and reuse.residual and config.history.alternatives == 0:
        said.append(
            "reuse.residual = true with history.alternatives = 0: only the drawn token of the old distribution is "
            "known; with 8 alternatives the residual is nearly exact"
        )
    return said


def warnings(config: Config) -> list[str]:
    """What is legal but may surprise, a sentence each; said once when a run starts."""
    said = []
    sampling = config.sampling
    truncation = [
        f"sampling.{key} = {value}"
        for key, value, off in (
            ("top_k", sampling.top_k, 0),
            ("top_p", sampling.top_p, 1.0),
            ("min_p", sampling.min_p, 0.0),
        )
        if value != off
    ]
    if truncation:
        said.append(
            f"{', '.join(truncation)}: responses come from a truncated distribution, while the learner's is the "
            "full softmax"
        )
    if config.history.warm_from is not None and config.draft.budget == "none":
        said.append('history.warm_from is not read: draft.budget = "none" drafts nothing')
    said += _reuse_warnings(config) + vllm.warnings(config)
    depends = timing(config.schedule, config.fleet.kind != "in_process")
    if config.deterministic and depends:
        dropping = " and schedule.drop_zero_variance" if config.schedule.drop_zero_variance else ""
        said.append(
            f'deterministic = true with schedule.kind = "{config.schedule.kind}"{dropping}: not the same run bit for '
            f'bit another time: {depends} depends on timing. Runs are repeated by schedule.kind = "synchronous", and '
            'with fleet.kind = "in_process" by "divided", both without schedule.drop_zero_variance'
        )
    if config.learner.lr_schedule != "constant" and config.learner.warmup_steps >= config.steps:
        said.append(
            f"learner.warmup_steps = {config.learner.warmup_steps} of {config.steps} steps: "
            "the peak is never reached"
        )
    return said
