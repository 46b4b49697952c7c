from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.learn.advantages import group_advantages

NAN = float("nan")


def advantages(rewards: list[float], groups: list[int], *, normalize: bool = True) -> list[float]:
    values = group_advantages(np.array(rewards), np.array(groups), normalize=normalize)
    return [float(value) for value in values]


def test_formula() -> None:
    assert advantages([1, 0, 0, 1], [0, 0, 0, 0]) == [1, -1, -1, 1]
    assert advantages([1, 0, 0, 1], [0, 0, 0, 0], normalize=False) == [0.5, -0.5, -0.5, 0.5]


def test_groups_may_be_interleaved() -> None:
    assert advantages([3, 10, 1, 30], [7, 2, 7, 2], normalize=False) == [1, -10, -1, 10]


def test_equal_rewards_and_single_rollouts_get_nothing() -> None:
    # The mean of three 0.1 is not 0.1.
    assert advantages([0.1, 0.1, 0.1, 5.0], [0, 0, 0, 1]) == [0, 0, 0, 0]


def test_excluded_rollouts_do_not_count() -> None:
    assert advantages([1, NAN, 0, NAN], [0, 0, 0, 0]) == [1, 0, -1, 0]
    assert advantages([1, NAN, NAN], [0, 0, 1]) == [0, 0, 0]


def test_infinite_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        advantages([1, float("inf")], [0, 0])


@pytest.mark.parametrize("normalize", [True, False])
def test_rewards_beyond_what_a_number_holds_are_refused(normalize: bool) -> None:
    with pytest.raises(StrettoError, match=r"rewards between -1e\+308 and 1.7e\+308 in one group"):
        advantages([-1e308, 1.7e308, 1.7e308], [0, 0, 0], normalize=normalize)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.one_of(st.just(NAN), st.integers(-100, 100).map(float))),
        min_size=1,
        max_size=30,
    )
)
def test_each_group_is_centred_and_scaled(rows: list[tuple[int, float]]) -> None:
    groups, rewards = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    values = group_advantages(rewards, groups, normalize=True)
    for group in set(groups.tolist()):
        own = values[(groups == group) & ~np.isnan(rewards)]
        assert abs(own.sum()) < 1e-9
        assert not own.any() or abs((own**2).mean() - 1) < 1e-9
    assert not values[np.isnan(rewards)].any()
