"""Rows into token ids, and the endless stream of prompts that training draws from."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.config import DataConfig
from stretto.errors import StrettoError
from stretto.records import IntArray, Prompt, prompt_uid
from stretto.tasks import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    max_model_len: int,
    name: str = "the data",
    place: Callable[[int], str] | None = None,
) -> list[Prompt]:
    """The prompts of `rows`, in order. A prompt must leave room for one token in the context.

    Chat templates: `config.chat_template` None uses the tokenizer's where it has one; text is then one user message.
    Without it, text is tokenised as it is, with the special tokens that the tokenizer adds by itself. Rows with equal
    token ids are legal: `occurrence` tells them apart. `name` and `place(row)` say in messages what is meant.

    Raises:
        StrettoError: an empty prompt; a prompt too long (unless `config.long_prompts` is "skip"); a chat template
            that is needed and not there.
    """
    template = uses_template(tokenizer, config)
    where = place or (lambda index: f"row {index} of {name} (from 0)")
    texts = [
        render(row[config.prompt_column], tokenizer, config, template, where(i)) for i, row in enumerate(rows)
    ]
    encoded = tokenizer(texts, add_special_tokens=not template)["input_ids"] if texts else []
    limit = max_model_len - 1
    if config.max_prompt_tokens is not None:
        limit = min(limit, config.max_prompt_tokens)
    prompts: list[Prompt] = []
    seen: Counter[str] = Counter()
    skipped: list[int] = []
    for index, (row, ids) in enumerate(zip(rows, encoded, strict=True)):
        if not ids:
            raise StrettoError(f"data: {where(index)}: the prompt is empty: it has no tokens")
        if len(ids) > limit:
            if config.long_prompts == "error":
                raise StrettoError(too_long(where(index), len(ids), max_model_len, config))
            skipped.append(index)
            continue
        token_ids = np.asarray(ids, np.int64)
        uid = prompt_uid(token_ids)
        prompts.append(Prompt(index, uid, seen[uid], token_ids, row))
        seen[uid] += 1
    report(prompts, seen, [where(index) for index in skipped], limit, name)
    return prompts


def too_long(place: str, length: int, max_model_len: int, config: DataConfig) -> str:
    if config.max_prompt_tokens is not None and config.max_prompt_tokens < max_model_len:
        allowed = f"data.max_prompt_tokens allows {config.max_prompt_tokens}"
    else:
        allowed = f"a context of {max_model_len} allows {max_model_len - 1} (one token is for the response)"
    return (
        f"data: {place}: the prompt has {length} tokens, {allowed}; "
        'data.long_prompts = "skip" leaves such rows out'
    )


def report(
    prompts: Sequence[Prompt], seen: Counter[str], skipped: Sequence[str], limit: int, name: str
) -> None:
    """Say once what is unusual about the prompts."""
    if skipped:
        if not prompts:
            raise StrettoError(f"data: every prompt of {name} is longer than {limit} tokens")
        logger.warning(
            "%s: %d prompts longer than %d tokens are left out, the first: %s",
            name,
            len(skipped),
            limit,
            skipped[0],
        )
    repeated = len(prompts) - len(seen)
    if repeated:
        logger.warning(
            "%s: %d rows repeat an earlier row's prompt; each is answered by itself", name, repeated
        )


def uses_template(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> bool:
    has_one = bool(getattr(tokenizer, "chat_template", None))
    if config.chat_template and not has_one:
        raise StrettoError("data.chat_template: the tokenizer has none; use data.chat_template = false")
    template = has_one if config.chat_template is None else config.chat_template
    if config.system_prompt is not None and not template:
        raise StrettoError("data.system_prompt: needs a chat template, which the tokenizer does not have")
    return template


def render(
    prompt: str | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    template: bool,
    place: str,
) -> str:
    """The text of one prompt, up to where the response begins.

    Messages that end in the assistant's are continued; otherwise the assistant's turn is opened.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if not any(message["content"].strip() for message in messages):
        raise StrettoError(f"data: {place}: the prompt is empty")
    for message in messages:
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            raise StrettoError(
                f"data: {place}: the prompt is no text: half a surrogate pair at character {error.start}"
            ) from error
    if not template:
        if not isinstance(prompt, str):
            raise StrettoError(
                f"data: {place}: chat messages need a chat template, which is off or not there"
            )
        return prompt
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise StrettoError(f"data.system_prompt: {place} has a system message of its own")
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    begun = messages[-1]["role"] == "assistant"
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not begun, continue_final_message=begun
            )
        )
    except Exception as error:
        raise StrettoError(f"data: {place}: the chat template refuses it: {error}") from error


class PromptStream:
    """All prompts, over and over: a new order in each epoch, which depends on (seed, epoch) alone.

    The visit number of a row is the epoch, since each epoch has every row once.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise StrettoError("data: no prompts")
        self.prompts = list(prompts)
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.cursor = 0
        self.order = self.permutation(0)

    def permutation(self, epoch: int) -> IntArray:
        """The order of an epoch, (len(prompts),). Sorts raw Philox output, which no version of numpy may change."""
        if not self.shuffle:
            return np.arange(len(self.prompts), dtype=np.int64)
        words = np.array([self.seed & (2**64 - 1), epoch], np.uint64)
        draws = np.random.Philox(key=words).random_raw(len(self.prompts))
        return np.argsort(draws, kind="stable").astype(np.int64)

    def next(self, count: int) -> list[tuple[Prompt, int]]:
        """The next `count` prompts with their visit numbers (from 0), across epochs where need be."""
        taken: list[tuple[Prompt, int]] = []
        while len(taken) < count:
            if self.cursor == len(self.prompts):
                self.epoch, self.cursor = self.epoch + 1, 0
                self.order = self.permutation(self.epoch)
            stop = min(len(self.prompts), self.cursor + count - len(taken))
            taken += [(self.prompts[i], self.epoch) for i in self.order[self.cursor : stop]]
            self.cursor = stop
        return taken

    def fingerprint(self) -> str:
        """A hash of the prompts in order."""
        return hashlib.blake2b("".join(p.uid for p in self.prompts).encode(), digest_size=16).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "cursor": self.cursor, "prompts": self.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, with the prompts of its `fingerprint`, state["prompts"]."""
        self.epoch, self.cursor = int(state["epoch"]), int(state["cursor"])
        self.order = self.permutation(self.epoch)

    def metrics(self) -> dict[str, float]:
        """`epoch`: how often the data has been gone through, with its fraction."""
        return {"epoch": self.epoch + self.cursor / len(self.prompts)}
