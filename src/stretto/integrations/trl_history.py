"""The history of a TRL run on disk: the responses of each round of generation, a file each, in the log's own format."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stretto.atomic import remove_leftovers, write_atomically
from stretto.drafting import Newest
from stretto.errors import StrettoError
from stretto.history.log import read_answered, read_rollouts, write_rollouts
from stretto.lock import Lock
from stretto.model import vocabulary_hash
from stretto.records import Rollout

logger = logging.getLogger(__name__)

PATTERN = "round-*.parquet"
_LOCKS: dict[Path, Lock] = {}
"""Of this process's writers, by folder: who begins again there, as in a notebook after an interruption, takes over,
whether the one before is still there or not.
"""


class HistoryFolder:
    """Files of the rounds whose responses belong to the newest `window` visits of a prompt, `max_bytes` of them.

    Over that the oldest goes first. Rounds go on counting over restarts, so that a script that is started again, from
    a checkpoint or anew, drafts from what the folder has.
    """

    def __init__(
        self, path: Path, vocabulary: Mapping[str, int], *, window: int, max_bytes: int, writes: bool
    ) -> None:
        """Make the folder, if it is not there. `vocabulary`: the tokenizer's; `writes`: False in all processes but one.

        Raises StrettoError if that is not possible, the folder is another tokenizer's, or another process writes there.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StrettoError(f"history_dir: {path} cannot be made: {error}") from error
        self.path, self._key, self._max_bytes = path, path.resolve(), max_bytes
        self._newest = Newest(window)
        self.next_round = 0
        self._failed = False
        if writes and (before := _LOCKS.pop(self._key, None)) is not None:
            before.release()
        self._lock = self._acquire() if writes else None
        try:
            if self._lock is not None and self._lock.held:
                remove_leftovers(path)
            _check_tokenizer(path / "history.json", vocabulary_hash(vocabulary), writes)
        except BaseException:
            self.release()
            raise
        self._there = set(self._rounds())  # that this one knows of

    def load(self, vocabulary: int) -> Iterator[list[Rollout]]:
        """The responses that are to be remembered, one round at a time, oldest first.

        What cannot be read is left out, which is said: it costs speed only. Raises StrettoError for token ids of
        `vocabulary` and above: the folder is another model's.
        """
        rounds = self._rounds()
        self.next_round = max(rounds, default=-1) + 1
        for number in sorted(rounds):
            try:
                for answered in read_answered(rounds[number]):
                    self._newest.add(answered.uid, answered.visit, number)
            except StrettoError as error:
                logger.warning("nothing is drafted from %s: %s", rounds[number], error)
        for number in sorted(self._newest.steps()):
            try:
                rollouts = read_rollouts(rounds[number])
            except StrettoError as error:
                logger.warning("nothing is drafted from %s: %s", rounds[number], error)
                continue
            kept = [r for r in rollouts if self._newest.has(r.prompt.uid, r.visit)]
            largest = max((int(r.token_ids.max()) for r in kept if r.token_ids.size), default=0)
            if largest >= vocabulary:
                raise StrettoError(
                    f"history_dir: {rounds[number]} has the token id {largest}, but this model has {vocabulary} "
                    "tokens: it is another model's history; name another folder"
                )
            yield kept

    def write(self, rollouts: Sequence[Rollout], round: int) -> None:
        """Keep a round's responses, and remove the files that nothing will be read from any more.

        Where the disk refuses, that is said once, and costs nothing but the history of a later start.
        """
        try:
            self._write(rollouts, round)
        except (StrettoError, OSError) as error:
            if not self._failed:
                logger.warning("history_dir: responses are not kept for a later start: %s", error)
            self._failed = True

    def release(self) -> None:
        """Let others write, until this one does again."""
        if self._holds:
            _LOCKS.pop(self._key).release()
        self._lock = None

    @property
    def _holds(self) -> bool:
        return self._lock is not None and _LOCKS.get(self._key) is self._lock

    def _acquire(self) -> Lock:
        lock = _LOCKS[self._key] = Lock(self.path / "lock")
        return lock

    def _write(self, rollouts: Sequence[Rollout], round: int) -> None:
        if not self._holds:
            self._lock = self._acquire()
        if self._rounds().keys() - self._there:
            self.release()
            raise StrettoError(
                f"another script has written to {self.path} since: begin again with a new HistoryRollout"
            )
        self._there.add(round)
        write_rollouts(self._file(round), rollouts, step=round)
        for rollout in rollouts:
            self._newest.add(rollout.prompt.uid, rollout.visit, round)
        needed, rounds, size = self._newest.steps(), self._rounds(), 0
        for number in sorted(rounds, reverse=True):
            size += rounds[number].stat().st_size
            if number != round and (number not in needed or size > self._max_bytes):
                rounds[number].unlink(missing_ok=True)

    def _file(self, round: int) -> Path:
        return self.path / f"round-{round:06}.parquet"

    def _rounds(self) -> dict[int, Path]:
        """By number, the files that are there."""
        found = {}
        for path in self.path.glob(PATTERN):
            number = path.stem.removeprefix("round-")
            if number.isdecimal():
                found[int(number)] = path
        return found


def _check_tokenizer(note: Path, ours: str, writes: bool) -> None:
    """Raise StrettoError if `note` names another tokenizer; a folder that has none gets it."""
    try:
        found = json.loads(note.read_bytes())
        theirs = found["tokenizer"]
    except FileNotFoundError:
        if writes:
            write_atomically(note, json.dumps({"tokenizer": ours}).encode())
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StrettoError(f"history_dir: {note} is damaged: {error}; name another folder") from error
    if theirs != ours:
        raise StrettoError(
            f"history_dir: {note.parent} has the history of another tokenizer ({theirs}, this model's is {ours}): its "
            "token ids mean other text; name another folder"
        )
