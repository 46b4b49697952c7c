"""When what vLLM's requests said becomes history: visits of prompts, told apart by what is in flight.

Nobody says which requests are one group or epoch. A visit of a prompt is what was generated for it until none of its
requests was in flight and there were at least VISIT responses: a group, or several small ones.
"""

from __future__ import annotations

import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stretto.atomic import append_synced
from stretto.errors import StrettoError
from stretto.records import IntArray, Prompt, Rollout, State, prompt_uid

logger = logging.getLogger(__name__)

VISIT = 8  # responses
MOST_WAITING = 64  # responses of one prompt that wait for rewards
MOST_PROMPTS = 1 << 16  # whose visits are told apart
MOST_REWARDS = 1 << 14  # prompts whose rewards came before their responses


@dataclass(slots=True)
class _Visits:
    visit: int  # the newest
    responses: int = 0  # of that
    running: int = 0
    waiting: dict[int, Rollout] = field(default_factory=dict)  # by serial number: not history yet


class OnlineHistory:
    """Hands finished responses to `remember`, visit by visit, once no sibling is in flight or enough have ended.

    With `rewards`, responses wait for theirs, at the longest until the prompt is visited again.
    """

    def __init__(
        self, remember: Callable[[list[Rollout]], None], rewards: Rewards | None = None, first_visit: int = 0
    ) -> None:
        self._remember, self._rewards, self._visit = remember, rewards, first_visit
        self._prompts: OrderedDict[str, _Visits] = OrderedDict()  # by uid, the one used longest ago first

    def began(self, uid: str) -> None:
        """A request of this prompt is in flight."""
        prompt = self._prompts.get(uid)
        if prompt is None:
            prompt = self._prompts[uid] = _Visits(self._next_visit())
            self._forget()
        self._prompts.move_to_end(uid)
        if not prompt.running:
            self._flush(prompt)
            if prompt.responses >= VISIT:
                prompt.visit, prompt.responses = self._next_visit(), 0
        prompt.running += 1

    def ended(self, uid: str, serial: int, prompt_ids: IntArray, token_ids: IntArray) -> None:
        """It has left the batch, having said `token_ids` (N,)."""
        prompt = self._prompts[uid]
        prompt.running -= 1
        prompt.waiting[serial] = _rollout(uid, serial, prompt.visit, prompt_ids, token_ids)
        prompt.responses += 1
        if self._rewards is None:
            if not prompt.running or len(prompt.waiting) >= VISIT:
                self._flush(prompt)
        elif len(prompt.waiting) >= MOST_WAITING:
            self._flush(prompt)

    def back(self, uid: str, serial: int) -> None:
        """A request that had left goes on: what it said is no response yet."""
        prompt = self._prompts.get(uid)
        if prompt is not None and prompt.waiting.pop(serial, None) is not None:
            prompt.responses -= 1

    def flush(self) -> None:
        """Everything that has ended becomes history."""
        for prompt in self._prompts.values():
            self._flush(prompt)

    def _flush(self, prompt: _Visits) -> None:
        if not prompt.waiting:
            return
        rollouts = list(prompt.waiting.values())
        prompt.waiting.clear()
        if self._rewards is not None:
            self._rewards.read()
            for rollout in rollouts:
                rollout.reward = self._rewards.take(rollout.prompt.uid, rollout.token_ids)
        self._remember(rollouts)

    def _next_visit(self) -> int:
        self._visit += 1
        return self._visit

    def _forget(self) -> None:
        while len(self._prompts) > MOST_PROMPTS:
            uid = next((uid for uid, prompt in self._prompts.items() if not prompt.running), None)
            if uid is None:
                return
            self._flush(self._prompts.pop(uid))


def _rollout(uid: str, serial: int, visit: int, prompt_ids: IntArray, token_ids: IntArray) -> Rollout:
    unknown = np.full(token_ids.size, math.nan)  # vLLM tells a drafter no probabilities
    return Rollout(
        request_id=serial,
        group_id=visit,
        prompt=Prompt(-1, uid, 0, prompt_ids, {}),
        sample_index=0,
        visit=visit,
        key=0,
        token_ids=token_ids,
        logprobs=unknown,
        raw_logprobs=unknown,
        versions=np.zeros(token_ids.size, np.int64),
        loss_mask=np.ones(token_ids.size, np.bool_),
        outcome=State.FINISHED,
    )


def _hash(token_ids: IntArray) -> str:
    return blake2b(token_ids.astype("<i8").tobytes(), digest_size=16).hexdigest()


def append_reward(path: Path, prompt_ids: IntArray, token_ids: IntArray, reward: float) -> None:
    """Report a response's reward to the drafters that read the file `path`, in whatever process they are.

    One line is appended in one write. Raises StrettoError if the disk refuses.
    """
    row = {
        "prompt": prompt_uid(prompt_ids),
        "tokens": token_ids.size,
        "response": _hash(token_ids),
        "reward": float(reward),
    }
    append_synced(path, f"{json.dumps(row)}\n".encode())


class _Reward(NamedTuple):
    tokens: int
    response: str  # hash
    value: float


class Rewards:
    """The rewards that are appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        """Raises StrettoError where there is a folder, or no folder to put a file in."""
        if path.is_dir() or not path.parent.is_dir():
            what = "is a folder" if path.is_dir() else f"cannot be a file: there is no folder {path.parent}"
            raise StrettoError(f"rewards: {path} {what}; name the file that rewards are appended to")
        self.path = path
        self._at = path.stat().st_size if path.exists() else 0
        self._rest = b""  # of a line that is not whole yet
        self._known: OrderedDict[str, list[_Reward]] = OrderedDict()  # by prompt uid
        self._said = False

    def take(self, uid: str, token_ids: IntArray) -> float:
        """The reward of a response to the prompt `uid`; nan where none was reported.

        vLLM's rows hold what was accepted behind a limit of new tokens too: the response may be shorter.
        """
        known = self._known.get(uid, [])
        for reward in known:
            if reward.tokens <= token_ids.size and reward.response == _hash(token_ids[: reward.tokens]):
                known.remove(reward)
                return reward.value
        return math.nan

    def read(self) -> None:
        """Take in what was appended since; lines that are no rewards are said once and skipped."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._at:  # another file by now
                    self._at, self._rest = 0, b""
                file.seek(self._at)
                new = file.read()
        except OSError:
            return  # nothing was reported yet
        self._at += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            try:
                row = json.loads(line)
                reward = _Reward(int(row["tokens"]), str(row["response"]), float(row["reward"]))
                known = self._known.setdefault(str(row["prompt"]), [])
                known.append(reward)
                del known[:-MOST_WAITING]
            except (ValueError, TypeError, KeyError):
                if not self._said:
                    logger.warning("%s: no reward: %r; such lines are skipped", self.path, line[:80])
                    self._said = True
        while len(self._known) > MOST_REWARDS:
            self._known.popitem(last=False)
