"""When what vLLM's requests said becomes history: visits of prompts, told apart by what is in flight.

Nobody says which requests are one group or epoch. A visit of a prompt is what was generated for it until none of its
requests was in flight and there were at least VISIT responses: a group, or several small ones. Where requests of one
prompt overlap all the time, as on a server, it is LARGEST_VISIT responses. Nor does anybody say why a request has left
the batch. After a stop token it has ended; others may have been preempted, and wait a while for the rest.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from stretto.integrations.vllm_rewards import Rewards
from stretto.integrations.vllm_rows import TokenArray
from stretto.records import Prompt, Rollout, State

logger = logging.getLogger(__name__)

VISIT = 8  # responses, at least, and after
LARGEST_VISIT = 64  # of them the next one begins, whatever is in flight
MOST_WAITING = 64  # responses of one prompt that wait for rewards; beyond, the VISIT oldest wait no longer
MOST_PROMPTS = 1 << 16  # whose visits are told apart
REST = 1024  # steps that a response which ended at no stop token waits for more of it
LISTEN = 16  # responses that end between two looks for new rewards
AT_ONCE = 2  # prompts whose rewards are given to their responses in one step
EPOCH = 1_577_836_800  # 2020, in the clock's seconds: visits are numbered from there, in 32 bits


@dataclass(slots=True)
class _Response:
    """One that has ended and is not history yet."""

    text: TokenArray  # (P + N,), with its prompt
    prompt: int  # P
    visit: int
    whole: bool  # nothing more of it is waited for
    reward: float = math.nan

    @property
    def token_ids(self) -> TokenArray:
        return self.text[self.prompt :]


@dataclass(slots=True)
class _Visits:
    visit: int  # the newest
    responses: int = 0  # of that
    running: int = 0
    waiting: dict[int, _Response] = field(default_factory=dict)  # by serial number


class OnlineHistory:
    """Hands finished responses to `remember`, visit by visit, once no sibling is in flight or enough have ended.

    With `rewards`, responses wait for theirs, at the longest until the prompt is visited again. What waits takes
    `most_bytes` at most: beyond, what has waited longest becomes history as it is.
    """

    def __init__(
        self,
        remember: Callable[[list[Rollout]], None],
        rewards: Rewards | None = None,
        first_visit: int = 0,
        most_bytes: int = 1 << 29,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`first_visit`: the newest that is known; `clock`: seconds since 1970, by which visits of engines that share
        a folder are ordered.
        """
        self._remember, self._rewards, self._first, self._clock = remember, rewards, first_visit, clock
        self._prompts: OrderedDict[str, _Visits] = OrderedDict()  # by uid, the one used longest ago first
        self._waiting: OrderedDict[str, None] = OrderedDict()  # uids with responses that wait, longest first
        self._bytes, self._most_bytes = 0, most_bytes  # of these responses
        self._partial: deque[tuple[int, str, int]] = deque()  # step until which it waits, uid, serial
        self._steps = 0
        self._graded: OrderedDict[str, None] = OrderedDict()  # uids of these that rewards have come for
        self._unheard = 0  # responses that ended since the last look for rewards

    def began(self, uid: str, back: int | None = None) -> None:
        """A request of this prompt is in flight, and no new one if `back` is the serial number that it left under:
        then what it said is no response yet.
        """
        prompt = self._prompts.get(uid)
        if prompt is None:
            prompt = self._prompts[uid] = _Visits(self._visit_after(self._first))
            self._forget()
        self._prompts.move_to_end(uid)
        if back is not None:
            self._take_back(uid, back)
        elif not prompt.running:
            self._listen()
            self._flush(uid)
        if back is None and prompt.responses >= (LARGEST_VISIT if prompt.running else VISIT):
            prompt.visit, prompt.responses = self._visit_after(prompt.visit), 0
        prompt.running += 1

    def ended(self, uid: str, serial: int, text: TokenArray, prompt_size: int, whole: bool = True) -> None:
        """It has left the batch with this text (P + N,), of which `prompt_size` tokens are its prompt's.

        Unless it is `whole`, there may be more to come.
        """
        prompt = self._prompts[uid]
        prompt.running -= 1
        prompt.responses += 1
        response = prompt.waiting[serial] = _Response(text, prompt_size, prompt.visit, whole)
        self._waiting.setdefault(uid)
        self._bytes += text.nbytes
        if not whole:
            self._partial.append((self._steps + REST, uid, serial))
        if self._rewards is not None:
            response.reward = self._rewards.take(uid, response.token_ids)
            self._unheard += 1
            if self._unheard >= LISTEN:
                self._listen()
        self._settle(uid)
        while self._bytes > self._most_bytes:
            self._flush(next(iter(self._waiting)))

    def step(self) -> None:
        """Once per step: what has waited for its rest long enough is taken as it is; a few rewards are given out."""
        self._steps += 1
        for _ in range(min(AT_ONCE, len(self._graded))):
            uid = next(iter(self._graded))
            self._grade(uid)
            self._settle(uid)
        while self._partial and self._partial[0][0] <= self._steps:
            _, uid, serial = self._partial.popleft()
            prompt = self._prompts.get(uid)
            if prompt is not None and serial in prompt.waiting:
                prompt.waiting[serial].whole = True
                self._settle(uid)

    def flush(self) -> None:
        """Everything that has ended becomes history."""
        self._listen()
        for uid in list(self._waiting):
            self._flush(uid)

    def _take_back(self, uid: str, serial: int) -> None:
        prompt = self._prompts[uid]
        if (response := prompt.waiting.pop(serial, None)) is not None:
            prompt.responses -= response.visit == prompt.visit
            self._bytes -= response.text.nbytes
            if not prompt.waiting:
                del self._waiting[uid]
                self._graded.pop(uid, None)

    def _settle(self, uid: str) -> None:
        """What need not wait any more becomes history."""
        prompt = self._prompts[uid]
        ready = [
            serial
            for serial, response in prompt.waiting.items()
            if response.whole and (self._rewards is None or not math.isnan(response.reward))
        ]
        if len(prompt.waiting) >= MOST_WAITING + VISIT:
            self._flush(uid, list(islice(prompt.waiting, VISIT)))
        elif ready and (not prompt.running or len(ready) >= VISIT):
            self._flush(uid, ready)

    def _flush(self, uid: str, serials: list[int] | None = None) -> None:
        """These responses become history, or all that wait."""
        prompt = self._prompts[uid]
        if not prompt.waiting:
            return
        self._grade(uid)
        serials = list(prompt.waiting) if serials is None else serials
        responses = [(serial, prompt.waiting.pop(serial)) for serial in serials]
        self._bytes -= sum(response.text.nbytes for _, response in responses)
        if not prompt.waiting:
            del self._waiting[uid]
        self._remember([_rollout(uid, serial, response) for serial, response in responses])

    def _listen(self) -> None:
        """Rewards that have come are known; they are given out prompt by prompt, lest a step takes long."""
        self._unheard = 0
        if self._rewards is None:
            return
        for uid in self._rewards.read():
            if uid in self._waiting:
                self._graded.setdefault(uid)
        self._rewards.trim(self._graded)

    def _grade(self, uid: str) -> None:
        """Rewards of this prompt that have come go to the responses that wait for them."""
        if self._rewards is None or uid not in self._graded:
            return
        del self._graded[uid]
        for response in self._prompts[uid].waiting.values():
            if math.isnan(response.reward):
                response.reward = self._rewards.take(uid, response.token_ids)

    def _visit_after(self, visit: int) -> int:
        """The number of a visit that begins now, after another one."""
        return max(visit + 1, int(self._clock()) - EPOCH)

    def _forget(self) -> None:
        while len(self._prompts) > MOST_PROMPTS:
            uid = next((uid for uid, prompt in self._prompts.items() if not prompt.running), None)
            if uid is None:
                return
            self._flush(uid)
            del self._prompts[uid]


def _rollout(uid: str, serial: int, response: _Response) -> Rollout:
    token_ids = response.token_ids.astype(np.int64)
    unknown = np.full(token_ids.size, math.nan)  # vLLM tells a drafter no probabilities
    return Rollout(
        request_id=serial,
        group_id=response.visit,
        prompt=Prompt(-1, uid, 0, response.text[: response.prompt].astype(np.int64), {}),
        sample_index=0,
        visit=response.visit,
        key=0,
        token_ids=token_ids,
        logprobs=unknown,
        raw_logprobs=unknown,
        versions=np.zeros(token_ids.size, np.int64),
        loss_mask=np.ones(token_ids.size, np.bool_),
        reward=response.reward,
        outcome=State.FINISHED,
    )
