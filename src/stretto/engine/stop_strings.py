"""Stop strings: found in the text token by token, however characters and strings are split over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # how a decoder shows the first bytes of a character whose last bytes are still to come


class StopStrings:
    """Says after each token whether the text since the turn began contains one of the strings.

    Decoding a token depends on its neighbours, and decoding everything again would take quadratic time, so the
    text of the last few tokens is decoded: from `_begin` on, of which all before `_end` has been seen whole. Special
    tokens count as their text, so that a stop string may name one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], turn: Sequence[int]) -> None:
        """`turn`: the tokens that the turn has so far; no stop string is in them."""
        self._tokenizer: Any = tokenizer
        self._stop = tuple(stop)
        self._overlap = max(len(string) for string in stop) - 1
        self._ids: list[int] = []
        self._begin = self._end = 0
        self._tail = ""  # the last characters seen whole, as many as a string found next may begin in
        for token_id in turn:
            self.found_after(token_id)

    def found_after(self, token_id: int) -> bool:
        """Take one more token; True if a stop string is in the text now."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._begin : self._end])
        new = self._decode(self._ids[self._begin :])[len(known) :]
        text = self._tail + new
        if new and not new.endswith(UNFINISHED):
            self._begin, self._end = self._end, len(self._ids)
            self._tail = text[-self._overlap :] if self._overlap else ""
        return any(string in text for string in self._stop)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
