"""Stop strings against the plain definition: the first token after which the whole text contains one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.stop_strings import StopStrings
from tests.engine.byte_tokenizer import TOKENIZER, decode, token_id

IDS = {text: token_id(text) for text in ("s", "t", "o", "p", "st", "op", "stop", "ee", "<end>")}
BYTES = {b: token_id(a) for b, a in ((0xC3, "Ã"), (0xA9, "©"), (0xE2, "â"), (0x82, "Ĥ"), (0xAC, "¬"))}
ALL_IDS = [
    *IDS.values(),
    *BYTES.values(),
    token_id("ĠÃ"),
    token_id("Ġ"),
]


def first_by_definition(ids: list[int], stop: list[str]) -> int | None:
    for end in range(1, len(ids) + 1):
        if any(string in decode(ids[:end]) for string in stop):
            return end
    return None


def first_found(ids: list[int], stop: list[str], known: int = 0) -> int | None:
    strings = StopStrings(TOKENIZER, stop, ids[:known])
    for end in range(known + 1, len(ids) + 1):
        if strings.found_after(ids[end - 1]):
            return end
    return None


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from(ALL_IDS), max_size=24),
    st.lists(
        st.sampled_from(["stop", "op", "ste", "é", "€", "p€s", " é", "e", "<end>s", "eees"]),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 24),
)
def test_found_at_the_first_possible_token_also_when_resumed(
    ids: list[int], stop: list[str], known: int
) -> None:
    expected = first_by_definition(ids, stop)
    assert first_found(ids, stop) == expected
    before = min(known, len(ids) if expected is None else expected - 1)
    assert first_found(ids, stop, known=before) == expected


@pytest.mark.parametrize("split", [["s", "t", "o", "p"], ["st", "op"], ["stop"]])
def test_a_string_over_several_tokens(split: list[str]) -> None:
    ids = [IDS["ee"], *(IDS[part] for part in split), IDS["s"]]
    assert first_found(ids, ["stop"]) == 1 + len(split)


def test_a_character_over_several_tokens() -> None:
    euro = [BYTES[0xE2], BYTES[0x82], BYTES[0xAC]]
    assert first_found([IDS["s"], *euro, IDS["s"]], ["€"]) == 4
    assert first_found([IDS["s"], *euro[:2], IDS["s"]], ["€"]) is None


def test_a_string_before_an_unfinished_character() -> None:
    space_and_half = token_id("ĠÃ")
    assert first_found([IDS["s"], space_and_half], ["s "]) == 2
