"""A byte-level tokenizer made in memory, for text that is split over tokens in every way."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, a few of several bytes, one of which ends within a character, and a special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("s", "t"), ("st", "o"), ("sto", "p"), ("o", "p"), ("Ġ", "Ã"), ("e", "e")]
    tokens = ["<end>", *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


TOKENIZER = byte_tokenizer()


def decode(ids: Sequence[int]) -> str:
    """The whole text of `ids`, special tokens included."""
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_id(token: str) -> int:
    """The id of a token by its spelling in the vocabulary."""
    found = TOKENIZER.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found
