"""History-drafted generation for TRL's `GRPOTrainer`, by two lines in a script that trains without vLLM:

    from stretto.integrations.trl import HistoryRollout
    trainer = GRPOTrainer(..., rollout_func=HistoryRollout())

Data, trainer, loss and arguments stay as they are; docs/trl.md says what is the same and what is not.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from stretto.assemble import make_drafter, measure_steps, needs_step_ms
from stretto.config import Config, load_config
from stretto.draft.drafter import HistoryDrafter
from stretto.engine.embedded import EmbeddedEngine
from stretto.errors import StrettoError, nearest
from stretto.integrations.trl_history import HistoryFolder
from stretto.integrations.trl_responses import Response, generate
from stretto.integrations.trl_rewards import RewardWatch
from stretto.integrations.trl_trainer import (
    borrowed,
    gathered,
    policy,
    refuse_unsupported,
    sampling_params,
    token_ids,
)
from stretto.observe.metrics import drafting_seconds
from stretto.records import IntArray, Prompt, Purpose, Request, Rollout, SamplingParams, State, prompt_uid
from stretto.sampling import request_key

logger = logging.getLogger(__name__)

SECTIONS = ("draft", "engine", "history")
"""Of Stretto's configuration, what is not TRL's to decide."""
NOT_HERE = {
    "engine.kind": "it generates with the trainer's own model, by the embedded engine",
    "engine.vllm": "it generates with the trainer's own model, by the embedded engine",
    "history.warm_from": "use history_dir, which is read when a script begins",
}
EVALUATION = -1  # in place of the optimiser step
NOTHING = np.zeros(0, np.int64)


class HistoryRollout:
    """A `rollout_func` that drafts responses from what the same prompts were answered before; one for each trainer.

    The responses are those that its own plain decoding would draw (in float64; in float32 up to rounding): noise is a
    function of `GRPOConfig.seed`, the prompt, its place among its `num_generations`, the optimiser step, the position
    and the token. Evaluations draw the same noise each time, and are not remembered.

    Of several processes each generates its own responses, and remembers those of all.
    """

    def __init__(
        self, config: Mapping[str, Any] | None = None, *, history_dir: str | Path | None = None
    ) -> None:
        """`config`: keys of the sections `draft`, `history` and `engine` (docs/config.md), nested or dotted.
        `history_dir`: a folder that keeps the history for when the script is started again; None: it is forgotten.

        Raises StrettoError for keys that are unknown or not for this.
        """
        self._config = _configuration(config or {})
        self._history_dir = None if history_dir is None else Path(history_dir)
        self._folder: HistoryFolder | None = None
        self._drafter: HistoryDrafter | None = None
        self._trainer: Any = None
        self._round = 0  # of generation for training: the visit of what is generated
        self._step = EVALUATION  # the optimiser step that is next
        self._seen: Counter[str] = Counter()  # how often prompts have been answered in it
        self._groups = 0  # of requests, so far
        self._pending: list[Rollout] = []  # generated, and not remembered yet
        self._rewards = RewardWatch()

    # ---- TRL's side -----------------------------------------------------------------------------------

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """A completion for each of `prompts` (B): `prompt_ids`, `completion_ids` and `logprobs`, B lists each.

        The log-probs are those of the distribution that tokens were drawn from. Raises StrettoError, on its first
        call, for what is not supported.
        """
        first = self._trainer is not trainer
        if first:
            self._refuse(trainer)
        prompt_ids = [np.asarray(ids, np.int64) for ids in token_ids(trainer, prompts)]
        how, training = sampling_params(trainer), bool(trainer.model.training)
        max_model_len = self._max_model_len(trainer, prompt_ids, how)
        if first:
            self._begin(trainer, max_model_len)
        self._remember()  # what waited for rewards
        requests, places = self._requests(prompt_ids, how, training)
        responses = self._generate(requests, max_model_len, training)
        self._rewards.expect(0, self._remember)
        if training:
            self._pending = [self._rollout(*one) for one in zip(requests, places, responses, strict=True)]
            if not self._rewards.watches:
                self._remember()
            elif trainer.accelerator.num_processes == 1:
                self._rewards.expect(len(requests), self._remember)
            else:  # each is told its own at its own time, so that they meet when they generate again
                self._rewards.expect(len(requests), lambda: None)
        return {
            "prompt_ids": [ids.tolist() for ids in prompt_ids],
            "completion_ids": [response.token_ids.tolist() for response in responses],
            "logprobs": [response.logprobs.tolist() for response in responses],
        }

    def rewards(self, reward_funcs: Any) -> Any:
        """`reward_funcs` as `GRPOTrainer` takes them, so that the history also learns what they say.

        Their values pass unchanged. Reward models, given as such or by name, are left as they are: the history then
        knows the functions' share of the reward. Call it once.
        """
        return self._rewards.wrap(reward_funcs)

    # ---- inside ---------------------------------------------------------------------------------------

    def _refuse(self, trainer: Any) -> None:
        if self._trainer is not None:
            raise StrettoError("one HistoryRollout serves one trainer: make another one for the second")
        refuse_unsupported(trainer)
        if self._config.history.weight == "reward" and not self._rewards.watches:
            raise StrettoError(
                'history.weight = "reward" needs the rewards: reward_funcs=rollout.rewards(reward_funcs)'
            )

    def _begin(self, trainer: Any, max_model_len: int) -> None:
        """Measure what the engine's steps cost, if drafting depends on it, and read the history that is there."""
        model = policy(trainer)
        config = self._config
        if needs_step_ms(config):
            with borrowed(model), trainer.accelerator.autocast():
                found = measure_steps(config, model, max_model_len, time.perf_counter)
            if found is None:
                logger.warning("responses are too short to measure the engine's steps: nothing is drafted")
            change = {"budget": "none"} if found is None else {"step_ms": found}
            config = config.model_copy(update={"draft": config.draft.model_copy(update=change)})
        self._drafter = make_drafter(config, time.perf_counter)
        if self._history_dir is not None:
            history = config.history
            max_bytes = int(history.max_gib * 2**30)
            self._folder = HistoryFolder(
                self._history_dir,
                trainer.processing_class.get_vocab(),
                window=history.window,
                max_bytes=max_bytes,
                writes=trainer.accelerator.is_main_process,
            )
            for rollouts in self._folder.load(int(model.config.vocab_size)):
                if self._drafter is not None:
                    self._drafter.remember(rollouts)
            self._round = self._folder.next_round
        elif trainer.state.global_step and self._drafter is not None:
            logger.warning(
                "resumed without history_dir: nothing is drafted from history before a prompt comes again"
            )
        self._trainer = trainer
        trainer.add_callback(_Boundaries(self._seen.clear, self._remember, self._end))

    def _max_model_len(self, trainer: Any, prompt_ids: Sequence[IntArray], how: SamplingParams) -> int:
        """Tokens that the longest of these prompts and its response can have."""
        context = int(policy(trainer).config.max_position_embeddings)
        limit = min(self._config.engine.max_model_len or context, context)
        longest = max(ids.size for ids in prompt_ids)
        if longest >= limit:
            raise StrettoError(
                f"a prompt has {longest} tokens, which leaves no room for a response: the model's context has {context}"
                + (f", and engine.max_model_len is {limit}" if limit < context else "")
            )
        return min(limit, longest + how.max_new_tokens)

    def _requests(
        self, prompt_ids: Sequence[IntArray], how: SamplingParams, training: bool
    ) -> tuple[list[Request], list[tuple[Prompt, int]]]:
        """Requests for these prompts; and of each its prompt and its place among those to it.

        Prompts come repeated `num_generations` times in a row, over all processes; TRL gives them no names. One that
        comes again in the same optimiser step, as where two rows have the same text, counts as its next occurrence.
        """
        trainer = self._trainer
        uids = [prompt_uid(ids) for ids in prompt_ids]
        everyone = gathered(trainer, [(self._round, uids)])
        self._round = max(round for round, _ in everyone)
        together = [uid for _, some in everyone for uid in some]
        first = sum(len(some) for _, some in everyone[: trainer.accelerator.process_index])
        samples = trainer.num_generations if training else trainer.num_generations_eval
        if training:
            _refuse_uneven(together, samples)
        step = trainer.state.global_step if training else EVALUATION
        if step != self._step:
            self._step = step
            self._seen.clear()
        numbers = []
        for uid in together:
            numbers.append(divmod(self._seen[uid], samples))
            self._seen[uid] += 1
        groups = {uid: self._groups + i for i, uid in enumerate(dict.fromkeys(uids))}
        self._groups += len(groups)
        purpose, seed = (Purpose.TRAIN if training else Purpose.EVAL), trainer.args.seed
        requests, places = [], []
        mine = zip(uids, prompt_ids, numbers[first : first + len(uids)], strict=True)
        for id, (uid, ids, (occurrence, sample)) in enumerate(mine):
            key = request_key(seed, purpose, uid, occurrence, sample, max(step, 0))
            requests.append(Request(id, 0, groups[uid], ids, NOTHING, 0, key, how))
            places.append((Prompt(-1, uid, occurrence, ids, {}), sample))
        return requests, places

    def _generate(self, requests: Sequence[Request], max_model_len: int, training: bool) -> list[Response]:
        """Their responses, by the trainer's model as it is now."""
        trainer, config, drafter = self._trainer, self._config, self._drafter
        model = policy(trainer)
        began = time.perf_counter()
        with borrowed(model), trainer.accelerator.autocast():
            engine = EmbeddedEngine(
                model,
                None,
                worker=0,
                max_num_seqs=min(config.engine.max_num_seqs, len(requests)),
                max_model_len=max_model_len,
                max_num_batched_tokens=config.engine.max_num_batched_tokens,
                clock=time.perf_counter,
                drafter=drafter,
                alternatives=config.history.alternatives if training and drafter is not None else 0,
            )
            responses = generate(engine, requests)
        self._log(engine.metrics(), time.perf_counter() - began)
        return responses

    def _log(self, engine: Mapping[str, float], seconds: float) -> None:
        """Into the trainer's log, as its reward functions do by `log_metric`: means over processes and rounds."""
        found = {"tokens_per_step": engine["decode_tokens"] / engine["decode_steps"]}
        drafting = 0.0
        if self._drafter is not None:
            spec = self._drafter.metrics()
            drafting = drafting_seconds(spec)
            found["index_seconds"] = spec["spec/index/build_seconds"]
            found["history_mib"] = spec["spec/index/bytes"] / 2**20
            if engine["drafted_tokens"]:
                found["acceptance"] = engine["accepted_tokens"] / engine["drafted_tokens"]
        found |= {"drafting_seconds": drafting, "engine_seconds": seconds - drafting}
        for name, value in found.items():
            self._trainer._log_metric(f"stretto/{name}", value)

    def _rollout(self, request: Request, place: tuple[Prompt, int], response: Response) -> Rollout:
        prompt, sample = place
        count = response.token_ids.size
        return Rollout(
            request_id=request.id,
            group_id=request.group,
            prompt=prompt,
            sample_index=sample,
            visit=self._round,
            key=request.key,
            token_ids=response.token_ids,
            logprobs=response.logprobs,
            raw_logprobs=response.raw_logprobs,
            versions=np.full(count, max(self._step, 0)),
            loss_mask=np.ones(count, np.bool_),
            finish_reason=response.finish_reason,
            outcome=State.CONSUMED,
            admitted_step=max(self._step, 0),
            drafted=response.drafted,
            accepted=response.accepted,
            decode_steps=response.decode_steps,
            top=response.top,
        )

    # ---- what is remembered ---------------------------------------------------------------------------

    def _remember(self) -> None:
        """What is pending becomes history, everyone's. Where there are several, all processes come here together."""
        if not self._pending:
            return
        mine, self._pending = self._pending, []
        self._rewards.give(mine, self._trainer.reward_weights.tolist())
        rollouts = gathered(self._trainer, mine)
        if self._drafter is not None:
            self._drafter.remember(rollouts)
        if self._folder is not None and self._trainer.accelerator.is_main_process:
            self._folder.write(rollouts, self._round)
        self._round += 1

    def _end(self) -> None:
        self._remember()
        if self._folder is not None:
            self._folder.release()


class _Boundaries(TrainerCallback):
    """Tells a rollout function what the trainer does between its calls."""

    def __init__(
        self, evaluated: Callable[[], None], saving: Callable[[], None], ended: Callable[[], None]
    ) -> None:
        self._evaluated, self._saving, self._ended = evaluated, saving, ended

    def on_evaluate(self, *args: Any, **state: Any) -> None:
        self._evaluated()

    def on_save(self, *args: Any, **state: Any) -> None:
        self._saving()

    def on_train_end(self, *args: Any, **state: Any) -> None:
        self._ended()


def _configuration(config: Mapping[str, Any]) -> Config:
    """The sections that are Stretto's, the others at their defaults. Raises StrettoError for other keys."""
    for key, value in config.items():
        for name in [f"{key}.{inner}" for inner in value] if isinstance(value, Mapping) else [key]:
            section = name.partition(".")[0]
            if section not in SECTIONS:
                raise StrettoError(
                    f"HistoryRollout(config=...): {name} is not for this; it takes keys of {', '.join(SECTIONS)}, and "
                    f"the rest is GRPOConfig's; {nearest(section, SECTIONS)}"
                )
            for other, why in NOT_HERE.items():
                if f"{name}.".startswith(f"{other}."):
                    raise StrettoError(f"HistoryRollout(config=...): {name}: {why}")
    return load_config({"sampling": {"max_new_tokens": 1}}, config)  # the real number is the trainer's


def _refuse_uneven(uids: Sequence[str], samples: int) -> None:
    """Raise StrettoError if prompts do not come in runs of `samples`: then a completion has no place in its group."""
    runs = [uids[i : i + samples] for i in range(0, len(uids), samples)]
    for i, run in enumerate(runs):
        if len(run) != samples or len(set(run)) > 1:
            raise StrettoError(
                f"prompts {i * samples} to {i * samples + len(run) - 1} of this round, of {len(uids)}, are "
                f"{len(set(run))} different ones: HistoryRollout expects each {samples} times in a row "
                "(num_generations), as trl 1.16 hands them over"
            )
