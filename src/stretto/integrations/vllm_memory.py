"""What a drafter in vLLM must not lose: requests in flight, what has ended, and the folder that both go to.

It knows nothing of the drafter in vLLM's engine, so that it is there when that has gone, to be written.
"""

from __future__ import annotations

import weakref
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from stretto.draft.drafter import HistoryDrafter
from stretto.integrations.vllm_folder import HistoryFolder
from stretto.integrations.vllm_history import OnlineHistory
from stretto.integrations.vllm_rewards import Rewards
from stretto.integrations.vllm_rows import Left, New, Rows
from stretto.records import Rollout, prompt_uid


class Memory:
    """Responses on their way from `rows` to `drafter`'s history and to `folder`, until it is closed."""

    def __init__(
        self,
        rows: Rows,
        drafter: HistoryDrafter,
        folder: HistoryFolder | None,
        rewards: Rewards | None,
        first_visit: int,
        most_bytes: int,
    ) -> None:
        """The last three as `OnlineHistory` has them."""
        self._rows, self._folder, self._rewards = rows, folder, rewards
        self._drafter: HistoryDrafter | None = drafter
        self._uids = [""] * rows.length.size  # by slot
        self._history: OnlineHistory | None = OnlineHistory(self._remember, rewards, first_visit, most_bytes)
        self._at_exit: Finalize | None = None

    def keep_beyond(self, owner: Any) -> None:
        """Close when `owner` has gone, as where an engine is deleted, or at the process's end."""
        weakref.finalize(owner, self.close).atexit = False
        # Unlike atexit's, these are called in a forked worker's end too.
        self._at_exit = Finalize(None, self.close, exitpriority=1)

    def step(self) -> None:
        """To be called in every step."""
        if self._history is not None:
            self._history.step()
        if self._folder is not None:
            self._folder.step()

    def began(self, new: New, uid: str) -> None:
        """A request of the prompt `uid` is in its slot now."""
        if self._history is not None:
            self._history.began(uid, None if new.back is None else new.back.serial)
        self._uids[new.slot] = uid

    def left(self, left: Left) -> None:
        """A request is in no slot any more."""
        if self._history is not None:
            self._history.ended(self._uids[left.slot], left.serial, left.tokens, left.prompt, left.stopped)

    def close(self) -> None:
        """What is known, and what requests in flight have said, goes to the folder, if there is one.

        Whatever the engine was at: a signal may end the process in the middle of a step.
        """
        history, self._history = self._history, None
        if history is None:
            return
        self._drafter = None
        try:
            for slot in self._rows.running:
                said, size, uid = self._rows.said(slot)[0], int(self._rows.prompt[slot]), self._uids[slot]
                if uid == prompt_uid(said[:size].astype(np.int64)):  # else its beginning was not heard of yet
                    history.ended(uid, -1 - slot, said, size)
            history.flush()
        finally:
            if self._folder is not None:
                self._folder.close()
                self._folder = None
            if self._rewards is not None:
                self._rewards.close()
            if self._at_exit is not None:
                self._at_exit.cancel()

    def _remember(self, rollouts: list[Rollout]) -> None:
        if self._drafter is not None:
            self._drafter.remember(rollouts)
        if self._folder is not None:
            self._folder.append(rollouts)
