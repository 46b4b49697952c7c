"""The history drafter's memory between two lives: a folder of Parquet files, or a Stretto run's log.

    DIR/  history.json                      the tokenizer that its token ids are of
          rank-0/rollouts-000012.parquet    responses, as in a run's log (`stretto.history.log`)
          rank-0/lock                       held by the process that writes there

Each engine writes to the first `rank-N` that nobody else writes to, and reads all: data-parallel ranks, replicas of a
trainer, servers side by side. Visits are numbered by the clock, so those of all of them have one order. Where the file
system has no locks all write to `rank-0`, each to files of names of its own: rollouts-000012-5d0a3fb2.parquet.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from stretto.atomic import TEMPORARY, disk_errors, remove_atomically, remove_leftovers, write_atomically
from stretto.errors import StrettoError
from stretto.history.log import read_answered, read_rollouts, write_rollouts
from stretto.lock import Lock
from stretto.records import Rollout

logger = logging.getLogger(__name__)

FORMAT = 1
SEGMENT = 256  # responses of a file,
SEGMENT_TOKENS = 1 << 21  # and of these together
UNWRITTEN = 8  # files that may wait for the disk
EVERY = 60.0  # seconds; what has ended is written at the latest then, with the next step
LARGEST = 1 << 30  # bytes of one rank's files; the oldest are removed
ANOTHER_RUN = 1 << 20  # subtracted from a run's visits: older than any of ours

Fingerprint = dict[str, Any]


def fingerprint(model_config: Any) -> Fingerprint:
    """What token ids mean to a model: the size of its vocabulary and a hash of its tokenizer's, if it has one."""
    return {
        "format": FORMAT,
        "vocabulary": int(model_config.get_vocab_size()),
        "tokenizer": None
        if model_config.skip_tokenizer_init
        else _tokenizer_hash(model_config.tokenizer, model_config.tokenizer_revision),
    }


def _tokenizer_hash(path: str, revision: str | None = None) -> str | None:
    from transformers import AutoTokenizer

    from stretto.model import vocabulary_hash

    try:
        vocabulary = AutoTokenizer.from_pretrained(path, revision=revision).get_vocab()
    except (OSError, ValueError, KeyError) as error:
        logger.warning("tokenizer %s cannot be compared with the history's: %s", path, error)
        return None
    return vocabulary_hash(vocabulary)


def _check(where: Path, theirs: Fingerprint, ours: Fingerprint) -> None:
    if theirs.get("format") != FORMAT:
        raise StrettoError(f"{where} is of format {theirs.get('format')}; this Stretto reads {FORMAT}")
    for what in ("tokenizer", "vocabulary"):
        a, b = theirs.get(what), ours[what]
        if a is not None and b is not None and a != b:
            raise StrettoError(
                f"{where} has the history of another {'tokenizer' if what == 'tokenizer' else 'model'} "
                f"({what} {a}, this model's is {b}): its token ids mean other text; name another folder"
            )


def _newest(files: Sequence[Path], window: int, vocabulary: int) -> Iterator[list[Rollout]]:
    """The responses of each prompt's newest `window` visits, file by file; damaged files are said and skipped."""
    visits: defaultdict[str, set[int]] = defaultdict(set)
    whole = []
    for file in files:
        try:
            answered = read_answered(file)
        except StrettoError as error:
            logger.warning("nothing is drafted from this part of the history: %s", error)
            continue
        whole.append(file)
        for one in answered:
            visits[one.uid].add(one.visit)
    kept = {uid: set(sorted(of_uid)[-window:]) for uid, of_uid in visits.items()}
    for file in whole:
        try:
            rollouts = [r for r in read_rollouts(file) if r.visit in kept[r.prompt.uid] and r.token_ids.size]
        except StrettoError as error:
            logger.warning("nothing is drafted from this part of the history: %s", error)
            continue
        largest = max((int(r.token_ids.max()) for r in rollouts), default=0)
        if largest >= vocabulary:
            raise StrettoError(
                f"{file} has the token id {largest}, but this model has {vocabulary} tokens: "
                "it is another model's history"
            )
        if rollouts:
            yield rollouts


def read_run(path: Path, ours: Fingerprint, window: int) -> Iterator[list[Rollout]]:
    """A Stretto run's responses, as visits older than any of this engine's.

    Raises StrettoError if it is no run, or one with another tokenizer.
    """
    from stretto.run_folder import RunFolder

    run = RunFolder.open(path)
    steps = run.checkpoint_steps()
    if steps and ours["tokenizer"] is not None:
        theirs = _tokenizer_hash(str(run.checkpoint_folder(steps[-1])))
        if theirs is not None and theirs != ours["tokenizer"]:
            raise StrettoError(f"warm_from: {path} is a run with another tokenizer than this model's")
    files = [run.log_file("consumed", step) for step in run.log_steps("consumed")]
    for rollouts in _newest(files, window, ours["vocabulary"]):
        for rollout in rollouts:
            rollout.visit -= ANOTHER_RUN
        yield rollouts


class HistoryFolder:
    """One engine's part of the folder, written by a thread, and everybody's, read once."""

    def __init__(self, path: Path, ours: Fingerprint) -> None:
        """Creates what is not there. Raises StrettoError if the folder has other things in it or another tokenizer's
        history.
        """
        self.path, self._vocabulary = path, int(ours["vocabulary"])
        note = path / "history.json"
        if path.exists() and not path.is_dir():
            raise StrettoError(f"history: {path} is a file; name a folder, which need not be there yet")
        # Another engine that starts now puts the note there first; until it is whole it has another name.
        there = _names_in(path)
        if note.name not in there and any(not name.startswith(TEMPORARY) for name in there):
            raise StrettoError(f"history: {path} is there and no history's folder (it has no history.json)")
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        if note.exists():
            _check(note, _read_note(note), ours)
        else:
            write_atomically(note, json.dumps(ours, indent=1).encode())
        self._mine, self._lock = _first_free(path)
        self._suffix = "" if self._lock.held else f"-{secrets.token_hex(4)}"
        if self._lock.held:
            remove_leftovers(self._mine)
        self._next = max((_number(file) for file in self._files(self._mine)), default=0) + 1
        self._waiting: list[Rollout] = []
        self._tokens = 0  # of these
        self._written = time.monotonic()
        self._thread = ThreadPoolExecutor(1, "history-folder")
        self._unwritten: deque[Future[None]] = deque()
        self._failed = False

    def read(self, window: int) -> Iterator[list[Rollout]]:
        """The responses of each prompt's newest `window` visits, of all ranks."""
        ranks = sorted(folder for folder in self.path.glob("rank-*") if folder.is_dir())
        files = [file for folder in ranks for file in self._files(folder)]
        return _newest(files, window, self._vocabulary)

    def append(self, rollouts: Sequence[Rollout]) -> None:
        """Keep these; they are written a file at a time, in the background."""
        self._waiting.extend(rollouts)
        self._tokens += sum(rollout.token_ids.size for rollout in rollouts)
        if len(self._waiting) >= SEGMENT or self._tokens >= SEGMENT_TOKENS:
            self._write()

    def step(self) -> None:
        """To be called now and then: what waits is not kept waiting for a file's worth."""
        if self._waiting and time.monotonic() - self._written > EVERY:
            self._write()

    def close(self) -> None:
        """Write what is left, here: at a process's end threads take no more work. Let others write."""
        with suppress(RuntimeError):  # in the thread itself, where the collector may call this
            self._thread.shutdown()
        if self._waiting:
            self._put(*self._segment())
        self._lock.release()

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        return sorted(folder.glob("rollouts-*.parquet"))

    def _write(self) -> None:
        segment = self._segment()
        while self._unwritten and self._unwritten[0].done():
            self._unwritten.popleft()
        if len(self._unwritten) >= UNWRITTEN:
            self._say("the disk takes too long")
            return
        try:
            self._unwritten.append(self._thread.submit(self._put, *segment))
        except RuntimeError:  # the process is about to end
            self._put(*segment)

    def _segment(self) -> tuple[Path, list[Rollout], int]:
        """The next file: its path, what belongs in it, and its number."""
        segment = self._mine / f"rollouts-{self._next:06}{self._suffix}.parquet", self._waiting, self._next
        self._waiting, self._tokens, self._written = [], 0, time.monotonic()
        self._next += 1
        return segment

    def _put(self, path: Path, rollouts: list[Rollout], number: int) -> None:
        """In the thread: write a file, and remove the oldest where there are too many."""
        try:
            write_rollouts(path, rollouts, step=number)
            files = self._files(self._mine)
            sizes = [file.stat().st_size for file in files]
            while sum(sizes) > LARGEST and len(files) > 1:
                remove_atomically(files.pop(0))
                sizes.pop(0)
        except Exception as error:  # noqa: BLE001 -- nobody asks what became of it
            self._say(error)

    def _say(self, why: object) -> None:
        if not self._failed:
            logger.warning("the history is not kept: %s", why)
        self._failed = True


def _first_free(path: Path) -> tuple[Path, Lock]:
    """The first of the folder's `rank-N` that nobody writes to, and the lock on it."""
    for rank in count():
        mine = path / f"rank-{rank}"
        with disk_errors(mine):
            mine.mkdir(exist_ok=True)
        try:
            return mine, Lock(mine / "lock")
        except StrettoError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
    raise AssertionError("unreachable")


def _names_in(folder: Path) -> set[str]:
    """What is in a folder, which need not be there."""
    try:
        return {entry.name for entry in folder.iterdir()}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise StrettoError(f"history: {folder} cannot be read: {error.strerror}") from error


def _read_note(note: Path) -> Fingerprint:
    try:
        found = json.loads(note.read_bytes())
    except (OSError, ValueError) as error:
        raise StrettoError(f"history: {note} is damaged: {error}; name another folder") from error
    if not isinstance(found, dict):
        raise StrettoError(f"history: {note} is damaged: no object; name another folder")
    return found


def _number(file: Path) -> int:
    digits = file.stem.split("-")[1]
    return int(digits) if digits.isdigit() else 0
