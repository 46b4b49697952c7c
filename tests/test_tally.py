from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stretto.tally import Tally, total

names = st.sampled_from("abc")
counts = st.integers(0, 1 << 20).map(float)
tallies = st.builds(
    Tally,
    st.dictionaries(names, counts),
    st.dictionaries(names, st.tuples(counts, counts)),
    st.dictionaries(names, counts),
)


@given(st.lists(tallies, max_size=5))
def test_the_total_does_not_depend_on_who_is_added_to_whom(parts: list[Tally]) -> None:
    whole = total(parts)
    middle = len(parts) // 2
    assert total([total(parts[:middle]), total(parts[middle:])]) == whole
    assert total(parts[::-1]) == whole


@given(st.lists(tallies, min_size=1, max_size=5))
def test_it_is_what_the_parts_say_together(parts: list[Tally]) -> None:
    whole = total(parts)
    for name, value in whole.sums.items():
        assert value == sum(part.sums.get(name, 0.0) for part in parts)
    for name, (above, below) in whole.ratios.items():
        assert above == sum(part.ratios[name][0] for part in parts if name in part.ratios)
        assert below == sum(part.ratios[name][1] for part in parts if name in part.ratios)
    for name, value in whole.largest.items():
        assert value == max(part.largest[name] for part in parts if name in part.largest)


def test_adding_changes_one_side_only() -> None:
    part = Tally({"a": 1.0}, {"b": (1.0, 2.0)}, {"c": 3.0})
    whole = total([part, part])
    assert part == Tally({"a": 1.0}, {"b": (1.0, 2.0)}, {"c": 3.0})
    assert whole.named("x/").figures() == {"x/a": 2.0, "x/b": 0.5, "x/c": 3.0}
