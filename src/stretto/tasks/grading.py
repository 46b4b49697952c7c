"""From finished responses to jobs for the reward workers, and their answers back into the inbox."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from stretto.errors import StrettoError
from stretto.records import Event, Rollout, Scored, State
from stretto.tasks.workers import Job, RewardWorkers, TurnJob


class Grader:
    """Answers every response submitted by one `Scored`, every turn by one `Observed`, through `post`.

    With `stop_on_error`, `submit` raises StrettoError once a reward has failed; otherwise the response goes on
    without a reward, which the ledger counts.
    """

    def __init__(
        self,
        workers: RewardWorkers,
        tokenizer: PreTrainedTokenizerBase,
        post: Callable[[Event], None],
        *,
        stop_on_error: bool = False,
    ) -> None:
        self._workers = workers
        self._tokenizer = tokenizer
        self._post = post
        self._stop_on_error = stop_on_error
        self._failure: Scored | None = None
        self._lock = threading.Lock()
        self.outstanding = 0  # submitted and not answered yet

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        if self._failure is not None:
            raise StrettoError(
                f"the reward of response {self._failure.id} failed ({self._failure.status}): "
                f'{self._failure.message}; reward.on_error = "exclude" would go on without it'
            )
        if not rollouts:
            return
        with self._lock:
            self.outstanding += len(rollouts)
        turns = [r for r in rollouts if r.outcome == State.WAITING]
        ended = [r for r in rollouts if r.outcome != State.WAITING]
        if turns:
            self._workers.submit_turns(
                [TurnJob(r.request_id, self._text(r), r.prompt.data, r.turn, r.attempt) for r in turns],
                self._answer,
            )
        self._workers.submit(
            [Job(r.request_id, self._text(r), r.token_ids, r.prompt.data, r.attempt) for r in ended],
            self._answer,
        )

    def _text(self, rollout: Rollout) -> str:
        return str(
            self._tokenizer.decode(
                rollout.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _answer(self, event: Event) -> None:
        """Called from the workers' threads."""
        if self._stop_on_error and isinstance(event, Scored) and event.status != "ok":
            self._failure = event
        # Post first: the runtime takes "nothing outstanding and an empty inbox" for a stand-still.
        self._post(event)
        with self._lock:
            self.outstanding -= 1
