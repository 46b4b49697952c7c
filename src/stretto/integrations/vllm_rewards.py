"""Rewards on their way to the drafter in vLLM, from any process: lines of a file that they are appended to."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Collection, Iterable
from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from stretto.atomic import append_lines
from stretto.draft import MAX_NODES
from stretto.errors import StrettoError
from stretto.integrations.vllm_rows import TokenArray
from stretto.records import IntArray, prompt_uid

logger = logging.getLogger(__name__)

MOST_REWARDS = 1 << 14  # prompts with rewards that no response was found for yet,
MOST_REWARDS_EACH = (
    128  # and of these rewards for each: twice the responses of one prompt that wait for theirs
)
END = 256  # bytes of a file of rewards: more than a line has, and a response's hash is in each


def _hash(token_ids: IntArray | TokenArray) -> str:
    return blake2b(token_ids.astype("<i8").tobytes(), digest_size=16).hexdigest()


def _prefix_hashes(token_ids: TokenArray, sizes: Collection[int]) -> dict[int, str]:
    """`_hash` of the first so many tokens, for each of `sizes`; the tokens are gone through once."""
    content, at, hashes = token_ids.astype("<i8").tobytes(), 0, {}
    digest = blake2b(digest_size=16)
    for size in sorted(sizes):
        digest.update(content[8 * at : 8 * size])
        hashes[size], at = digest.hexdigest(), size
    return hashes


class Graded(NamedTuple):
    """A response and its reward."""

    prompt_ids: IntArray  # (P,)
    token_ids: IntArray  # (N,)
    reward: float


def append_rewards(path: Path, graded: Iterable[Graded]) -> None:
    """Report responses' rewards to the drafters that read the file `path`, in whatever process they are.

    A line for each is appended, all in one write. Raises StrettoError if the disk refuses.
    """
    rows = [
        {
            "prompt": prompt_uid(one.prompt_ids),
            "tokens": one.token_ids.size,
            "response": _hash(one.token_ids),
            "reward": float(one.reward),
        }
        for one in graded
    ]
    append_lines(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


class _Reward(NamedTuple):
    tokens: int
    response: str  # hash
    value: float


class Rewards:
    """The rewards that are appended to a file from now on; also to another one that takes its place, or to the same one
    emptied.
    """

    def __init__(self, path: Path) -> None:
        """Raises StrettoError where there is a folder, or no folder to put a file in."""
        what = "" if os.path.isdir(path.parent) else f"cannot be a file: there is no folder {path.parent}"
        if what or os.path.isdir(path):
            raise StrettoError(
                f"rewards: {path} {what or 'is a folder'}; name the file that rewards are appended to"
            )
        self.path = path
        self._file: BinaryIO | None = (
            None  # as it was found last: kept open, to be read to its end when another comes
        )
        self._at = 0
        self._rest = b""  # of a line that is not whole yet
        self._end = b""  # the last bytes that were read, by which a file is known again
        with suppress(OSError):
            self._file = path.open("rb")
            self._at = self._file.seek(0, SEEK_END)
            self._file.seek(max(0, self._at - END))
            self._end = self._file.read(END)
        self._known: OrderedDict[str, list[_Reward]] = OrderedDict()  # by prompt uid; of no response so far
        self._said = self._lost = self._anew = self._unread = False

    def take(self, uid: str, token_ids: TokenArray) -> float:
        """The reward of a response to the prompt `uid`, which is then no more known; nan where none was reported.

        vLLM's rows hold what was accepted behind a limit of new tokens too: the response may be shorter, by no more
        than is drafted.
        """
        known = self._known.get(uid, [])
        size = token_ids.size
        hashes = _prefix_hashes(token_ids, {r.tokens for r in known if 0 <= size - r.tokens <= MAX_NODES})
        for reward in known:
            if hashes.get(reward.tokens) == reward.response:
                known.remove(reward)
                if not known:
                    del self._known[uid]
                return reward.value
        return math.nan

    def read(self) -> list[str]:
        """Take in what was appended since, and whose it is: prompts' uids, each once.

        Lines that are no rewards are said once and skipped.
        """
        heard: dict[str, None] = {}
        for row in self._parsed(self._new_lines()):
            try:
                reward = _Reward(int(row["tokens"]), str(row["response"]), float(row["reward"]))
                uid = str(row["prompt"])
            except (ValueError, TypeError, KeyError):
                self._say(row)
                continue
            known = self._known.setdefault(uid, [])
            known.append(reward)
            self._lose(len(known) - MOST_REWARDS_EACH)
            del known[:-MOST_REWARDS_EACH]
            heard.setdefault(uid)
        return list(heard)

    def _new_lines(self) -> list[bytes]:
        """The lines that are whole since the last call."""
        lines: list[bytes] = []
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return (
                lines  # nothing was reported yet, or it has gone: its last lines are read when another comes
            )
        except OSError as error:
            if not self._unread:
                logger.warning("%s: rewards cannot be read: %s", self.path, error.strerror)
            self._unread = True
            return lines
        before, self._file = self._file, file
        with suppress(OSError):
            if before is not None:
                with before:
                    if not os.path.sameopenfile(before.fileno(), file.fileno()):
                        lines = self._rest_of(before)
                        self._begin_anew("was replaced")
            lines += self._rest_of(file)
        return lines

    def _rest_of(self, file: BinaryIO) -> list[bytes]:
        """Its whole lines behind what was read of it; all of it, if that is not there any more."""
        file.seek(self._at - len(self._end))
        if file.read(len(self._end)) != self._end:
            self._begin_anew("was emptied or written anew")
        file.seek(self._at)
        new = file.read()
        self._at += len(new)
        self._end = (self._end + new)[-END:]
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [line for line in lines if line]  # two writers at once may both have ended a torn one

    def _begin_anew(self, what: str) -> None:
        """The file is another one now, or has other things in it: all of it is new."""
        self._at, self._end, self._rest = 0, b"", b""
        if not self._anew:
            logger.warning("%s: %s; rewards are read from its beginning", self.path, what)
        self._anew = True

    def _parsed(self, lines: list[bytes]) -> list[Any]:
        """What is in the lines, as one JSON text if it is one: line by line takes ten times as long."""
        try:
            return list(json.loads(b"[" + b",".join(lines) + b"]"))
        except ValueError:
            rows = []
            for line in lines:
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    self._say(line[:80])
            return rows

    def _say(self, what: object) -> None:
        if not self._said:
            logger.warning("%s: no reward: %r; such lines are skipped", self.path, what)
            self._said = True

    def _lose(self, count: int) -> None:
        if count > 0 and not self._lost:
            logger.warning(
                "%s: rewards for which no response waits here are forgotten: other engines that read the file said "
                "these responses, or the rewards came too late, or their token ids are not those that vLLM returned",
                self.path,
            )
            self._lost = True

    def trim(self, keep: Collection[str]) -> None:
        """Forget the oldest rewards that no response was found for, where they are too many; none of `keep`'s."""
        if (excess := len(self._known) - len(keep) - MOST_REWARDS) > 0:
            self._lose(excess)
            for uid in list(islice((uid for uid in self._known if uid not in keep), excess)):
                del self._known[uid]

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
