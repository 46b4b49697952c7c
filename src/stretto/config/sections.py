"""The tree of a run's configuration. The text under a field is its documentation, in `--help` too."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from stretto.config import checks
from stretto.config.base import Section
from stretto.config.schedules import ScheduleConfig


class LoraConfig(Section):
    """Low-rank adapters (peft) are trained instead of the whole model."""

    rank: int = Field(default=16, ge=1)
    """Rank of the update of each matrix."""
    alpha: float = Field(default=32.0, gt=0.0)
    """The update is scaled by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the adapted layers, or "all-linear"."""


class ModelConfig(Section):
    """The policy: a Hugging Face causal LM."""

    path: str = "demo"
    """A folder, a hub name, or "demo": the warm-started model that ships with the package."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: str | None = None
    """A folder or hub name; none: the model's own."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of weights and computation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA when there, else CPU."""
    lora: LoraConfig | None = None
    """Set any of its keys to train adapters; none: full fine-tuning."""


class DataConfig(Section):
    """Where prompts come from: exactly one of task, path and dataset."""

    task: str | None = None
    """"knights", "gym:NAME" (reasoning-gym), "package.module:Object" or "file.py:Object"."""
    path: str | None = None
    """A JSONL or Parquet file."""
    dataset: str | None = None
    """A Hugging Face `datasets` name."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task's constructor or to `load_dataset`."""
    split: str = "train"
    """The rows that are trained on."""
    prompt_column: str = "prompt"
    """Text, or a list of chat messages."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows."""
    shuffle: bool = True
    """A new order each epoch, drawn from the seed."""
    system_prompt: str | None = None
    """A system message before each prompt; needs a chat template."""
    chat_template: bool | None = None
    """Whether to apply the tokenizer's; none: when it has one."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longer prompts are handled as `long_prompts` says; none: what the context allows."""
    long_prompts: Literal["error", "skip"] = "error"
    """skip: left out, said once with their count."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.data(self)
        return self


class RewardConfig(Section):
    """What a response is worth: the weighted sum of its functions."""

    functions: list[str] = Field(default_factory=list)
    """"task" (its own verifier), "exact", "numeric", "math", "module:function", "file.py:function"; empty: "task"."""
    weights: list[float] | None = None
    """One for each function; none: 1 each."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the functions that take them, such as answer_column for the built-in ones."""
    workers: int = Field(default=1, ge=1)
    """Processes that score."""
    timeout: float = Field(default=30.0, gt=0.0, le=1e6)
    """Seconds for one call; its process is killed after that."""
    on_error: Literal["stop", "exclude"] = "exclude"
    """exclude: a response without a usable reward is left out of the update, and counted."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.reward(self)
        return self


class SamplingConfig(Section):
    """How training responses are drawn."""

    temperature: float = Field(default=1.0, ge=0.0)
    """0 is argmax: for evaluation only."""
    top_k: int = Field(default=0, ge=0)
    """Only the k most probable tokens; 0: off."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """The smallest set of tokens that reaches this probability; 1: off."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Only tokens at least this likely relative to the most probable one; 0: off."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Of a whole response."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Besides the tokenizer's end-of-sequence token and those in the model's generation_config.json."""


class EngineConfig(Section):
    """What turns requests into tokens."""

    kind: Literal["embedded", "vllm"] = "embedded"
    """embedded: Stretto's own, in torch; vllm: vLLM (extra `vllm`), docs/vllm.md."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Slots: responses generated at a time."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Tokens of a prompt and its response; none: what the run can need."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """In one step; longer prompts are prefilled in chunks."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vllm: more arguments of its engine, by vLLM's own names, such as tensor_parallel_size."""


DraftSource = Literal["history", "siblings", "prompt", "dropped"]


class DraftConfig(Section):
    """Speculative decoding: tokens are guessed and verified in one step; tokens stay the same, rounding aside."""

    budget: Literal["none", "fixed", "aimd", "length_class", "marginal", "goodput"] = "goodput"
    """Which guesses are verified; goodput: what makes the most expected tokens per second; none: plain decoding."""
    sources: list[DraftSource] = Field(default_factory=lambda: list(get_args(DraftSource)), min_length=1)
    """Earlier visits' responses, those in flight, the prompt's own text, the response's own dropped tokens."""
    nodes: int = Field(default=8, ge=1, le=64)
    """fixed: guesses per request and step; length_class: of the longest class."""
    max_nodes: int = Field(default=16, ge=1, le=64)
    """Guesses per request and step at most."""
    aimd: Literal["additive", "multiplicative"] = "additive"
    """aimd: RhymeRL's paper, 2 nodes more or back to 2; or its code, twice as many or half."""
    noise_aware: bool = True
    """Use the noise that will decide, which keyed sampling knows beforehand."""
    step_ms: list[Annotated[float, Field(gt=0.0)]] | None = Field(default=None, min_length=2)
    """Milliseconds of an engine step with 1, 2, 4 ... tokens; none: measured when the run begins, and kept with it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.draft(self)
        return self


class HistoryConfig(Section):
    """What is kept of earlier responses."""

    window: int = Field(default=2, ge=1)
    """Visits of each prompt."""
    weight: Literal["count", "reward", "recency", "probability"] = "probability"
    """What makes a continuation likely: how often it was taken, by good responses, lately; or its probability then."""
    alternatives: int = Field(default=8, ge=0, le=32)
    """The most probable tokens that are kept of every place, in the log too: noise decides anew among them."""
    max_gib: float = Field(default=4.0, ge=1e-3)
    """Memory; prompts that were not visited for longest are forgotten first."""
    warm_from: str | None = Field(default=None, min_length=1)
    """The folder of another run over the same prompts, whose log is read first."""


class ReuseConfig(Section):
    """Drawing a visit's responses from what an earlier one was drawn from. Not exact: see docs/drafting.md."""

    kind: Literal["none", "noise", "prefix"] = "none"
    """noise: a sample keeps its noise over visits; prefix: it begins as at the last one, while that is likely still."""
    refresh: float = Field(default=0.1, gt=0.0, le=1.0)
    """noise: probability that a sample's noise is drawn anew at a visit."""
    lenience: float = Field(default=1.6487, ge=0.0)
    """prefix: a token is kept with probability min(1, lenience * p_new / p_old); 1: vanilla; SPEC-RL: e^0.5."""
    residual: bool = False
    """prefix: after a rejection, draw from what the policy has and the old one had not, as far as that is known."""


class FleetConfig(Section):
    """Where engines run."""

    kind: Literal["in_process", "processes", "ray"] = "in_process"
    """in_process: one engine in the trainer's process; processes: each in one of its own; ray: on a Ray cluster."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Engines, each with engine.max_num_seqs slots. ray: as many at most; those that find room join, also later."""
    address: str | None = Field(default=None, min_length=1)
    """ray: of a cluster, "auto" on one of its machines, or "HOST:6379"; none: a Ray is started here for the run."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """processes, ray: torch's in each, the CPUs it reserves; none: cores divided by workers (with an address, 1)."""
    gpus: float | None = Field(default=None, ge=0.0)
    """ray: GPUs that each worker reserves; none: one, where there are any (of a Ray started here, or a part of one)."""
    restarts: int = Field(default=3, ge=0)
    """processes, ray: how often another one is started in a lost one's place."""
    patience: float = Field(default=600.0, ge=1.0)
    """processes, ray: seconds of silence, loading too, after which one that has something to do is killed as lost."""
    weights: Literal["auto", "shared", "copy", "file", "object"] = "auto"
    """shared: the learner's own; copy: a second model; file: on disk; object: in Ray's store; auto: the cheapest."""


Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class LearnerConfig(Section):
    """GRPO and its relatives, by AdamW."""

    learning_rate: float = Field(default=1e-6, ge=0.0)
    """The peak; full fine-tuning of real models takes about 1e-6, LoRA 1e-5."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; linear and cosine end at 0 with the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps of linear warm-up."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """AdamW's."""
    eps: float = Field(default=1e-8, gt=0.0)
    """AdamW's."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """AdamW's."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are scaled down to this norm."""
    clip_low: float = Field(default=0.2, ge=0.0)
    """The probability ratio is clipped below 1 - clip_low; with behaviour only, since recompute makes it 1."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """And above 1 + clip_high; with behaviour only."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """KL to the initial policy, k3 estimator; 0: no reference model is kept."""
    entropy_coef: float = 0.0
    """Entropy bonus."""
    loss_normalization: Literal["token", "sequence", "constant"] = "token"
    """token: DAPO; sequence: GRPO; constant: Dr. GRPO."""
    baseline: Literal["group", "batch", "history"] = "group"
    """A reward is compared with the group's mean, the batch's (REINFORCE++), or the prompt's at earlier visits."""
    advantage_normalization: bool = True
    """Divide by the standard deviation: the group's, or the batch's where that or the history is the baseline."""
    old_logprobs: Literal["auto", "behaviour", "recompute"] = "auto"
    """behaviour: the engine's; recompute: the learner's; auto: recompute if deterministic."""
    importance_cap: float | None = Field(default=2.0, gt=0.0)
    """Truncated importance sampling from the engine's to the learner's log-probs; with recompute only."""
    tokens_per_micro_batch: int = Field(default=8192, ge=1)
    """Packed tokens in one forward and backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations: less memory, more time."""
    shards: int = Field(default=1, ge=1, le=1024)
    """Processes that divide weights, optimizer state and work (FSDP2), each with its own GPU where there are any."""
    place: Literal["here", "cluster"] = "here"
    """cluster: with fleet.kind = "ray", on one of its machines; the run folder must have the same path there."""


class CheckpointConfig(Section):
    """What is saved besides the logs."""

    every: int = Field(default=10, ge=1)
    """Optimiser steps."""
    keep: int = Field(default=2, ge=1)
    """The newest ones; the best by evaluation is kept besides."""


class EvalConfig(Section):
    """Accuracy on held-out rows."""

    every: int = Field(default=0, ge=0)
    """Optimiser steps; 0: only before the first and after the last step."""
    enabled: bool = True
    """false: never."""
    split: str = "test"
    """The held-out rows."""
    path: str | None = None
    """A file of held-out rows; none: the data source's own split."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows."""
    samples: int = Field(default=1, ge=1)
    """Responses to each prompt."""
    temperature: float | None = Field(default=None, ge=0.0)
    """none: as in training."""


class TrackConfig(Section):
    """Where metrics go besides metrics.jsonl."""

    trackers: list[Literal["tensorboard", "trackio", "wandb", "mlflow"]] = Field(default_factory=list)
    """Any of them (extra `trackers`)."""
    project: str = "stretto"
    """The project's name there."""


class Config(Section):
    """A whole run. `stretto train --dry-run` prints it resolved."""

    name: str | None = Field(default=None, pattern=r"^[\w][\w.+-]*$")
    """The run folder's name; none: the preset's or file's name, if any, and the time."""
    runs: str = "runs"
    """The folder of run folders, relative to the current one."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of everything that is drawn."""
    deterministic: bool = True
    """Same run, bit for bit, where the schedule allows it: docs/schedules.md."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """torch's; none: all cores."""
    steps: int = Field(default=100, ge=1)
    """Optimiser steps."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    draft: DraftConfig = Field(default_factory=DraftConfig)
    history: HistoryConfig = Field(default_factory=HistoryConfig)
    reuse: ReuseConfig = Field(default_factory=ReuseConfig)
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    track: TrackConfig = Field(default_factory=TrackConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.run(self)
        return self
