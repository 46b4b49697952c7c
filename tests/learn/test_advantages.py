from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.learn.advantages import PromptMeans, batch_advantages, group_advantages
from stretto.records import Prompt

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


def of_batch(rewards: list[float], baseline: list[float], *, normalize: bool = False) -> list[float]:
    values = batch_advantages(np.array(rewards), np.array(baseline), normalize=normalize)
    return [float(value) for value in values]


def test_batch_wise_normalisation_needs_no_groups() -> None:
    assert of_batch([3, 1, 1, 3], [NAN] * 4) == [1, -1, -1, 1]
    assert of_batch([4, 0, 0, 4], [NAN] * 4, normalize=True) == [1, -1, -1, 1]
    assert of_batch([0.1] * 3, [NAN] * 3, normalize=True) == [0, 0, 0]


def test_a_prompts_own_baseline_where_there_is_one_and_the_batch_mean_where_there_is_none() -> None:
    assert of_batch([1, 0, 2], [0.5, NAN, 2.0]) == [0.5, -1.0, 0.0]
    scaled = np.array(of_batch([1, 0, 2], [0.5, NAN, 2.0], normalize=True))
    assert scaled == pytest.approx(np.array([0.5, -1.0, 0.0]) / np.std([0.5, -1.0, 0.0]))


def test_excluded_rollouts_enter_no_mean() -> None:
    assert of_batch([1, NAN, 3], [NAN, 0.0, NAN]) == [-1, 0, 1]
    assert of_batch([NAN], [NAN], normalize=True) == [0]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), max_size=40),
    st.integers(0, 40),
)
def test_prompt_means_are_of_earlier_visits_only(seen: list[tuple[int, float]], restored_at: int) -> None:
    prompt = Prompt(0, "a", 0, np.zeros(1, np.int64), {})
    seen = sorted(seen, key=lambda entry: entry[0])
    means = PromptMeans()
    for i, (visit, reward) in enumerate(seen):
        earlier = [r for v, r in seen[:i] if v < visit]
        expected = sum(earlier) / len(earlier) if earlier else NAN
        assert means.before(prompt, visit) == pytest.approx(expected, nan_ok=True)
        means.observe(prompt, visit, reward)
        if i == restored_at:
            copy = PromptMeans()
            copy.load_state_dict(means.state_dict())
            means = copy
    other = Prompt(1, "a", 1, np.zeros(1, np.int64), {})
    assert np.isnan(means.before(other, 9))
