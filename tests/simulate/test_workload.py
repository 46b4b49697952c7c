from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stretto.errors import StrettoError
from stretto.history.log import write_rollouts
from stretto.records import FinishReason, Prompt, Rollout, State
from stretto.simulate.workload import Drawn, Quantiles, Recorded, read_trace


class TestDistribution:
    def test_lognormal_has_its_median_and_spread(self) -> None:
        table = np.log(Quantiles.lognormal(1000.0, 0.7).table)
        assert np.median(table) == pytest.approx(np.log(1000.0), abs=0.01)
        assert table.std() == pytest.approx(0.7, rel=0.01)

    def test_empirical_keeps_shares(self) -> None:
        table = Quantiles.weighted([10, 20, 500], [0.5, 0.4, 0.1]).table
        shares = [table.count(length) / len(table) for length in (10, 20, 500)]
        assert shares == pytest.approx([0.5, 0.4, 0.1], abs=2 / len(table))

    def test_scaled(self) -> None:
        assert Quantiles.weighted([10.0]).scaled(2.5)(0.0) == 25

    def test_nothing_is_refused(self) -> None:
        with pytest.raises(StrettoError, match="no lengths"):
            Quantiles.weighted([])


def drawn(**values: float) -> Drawn:
    return Drawn(Quantiles.lognormal(1000.0, 1.0), rows=400, seed=1, **values)  # type: ignore[arg-type]


def logs(workload: Drawn, visits: int, samples: int) -> np.ndarray:
    """Log lengths (visits, rows, samples)."""
    workload.next(visits * workload.rows)
    lengths = [
        [workload.length(group, 1 + i + samples * group) for i in range(samples)]
        for group in range(visits * workload.rows)
    ]
    return np.log(np.array(lengths, np.float64)).reshape(visits, workload.rows, samples)


class TestDrawn:
    def test_variance_is_split_between_prompt_and_response(self) -> None:
        """Intraclass correlation over 400 prompts x 20: standard error about 0.025, so 4 of them."""
        found = logs(drawn(share=0.6), 1, 20)[0]
        within = found.var(axis=1, ddof=1).mean()
        between = found.mean(axis=1).var(ddof=1) - within / 20
        assert between / (between + within) == pytest.approx(0.6, abs=0.1)

    @pytest.mark.parametrize(
        ("stability", "least", "most"), [(1.0, 0.97, 1.0), (0.5, 0.35, 0.65), (0.0, -0.2, 0.2)]
    )
    def test_prompts_keep_their_place_over_visits(self, stability: float, least: float, most: float) -> None:
        """Correlation of the prompts' means: 0.5 has a standard error of 0.04 over 400 prompts."""
        means = logs(drawn(share=0.9, stability=stability), 2, 10).mean(axis=2)
        assert least <= np.corrcoef(means)[0, 1] <= most

    def test_a_length_is_its_keys(self) -> None:
        workload = drawn()
        workload.next(3)
        assert workload.length(1, 77) == workload.length(1, 77)
        assert len({workload.length(1, key) for key in range(20)}) > 10

    def test_many_at_once_are_as_one_by_one(self) -> None:
        workload = drawn(stuck=0.1)
        workload.next(500)
        groups = [i // 4 for i in range(2000)]
        keys = np.random.default_rng(0).integers(0, 1 << 64, 2000, np.uint64)
        each = list(zip(groups, keys.tolist(), strict=True))
        assert workload.foresee(groups, keys) == (
            [workload.length(*one) for one in each],
            [workload.reward(*one) for one in each],
        )

    def test_visits_are_counted(self) -> None:
        workload = drawn()
        pairs = workload.next(900)
        assert [pairs[i][1] for i in (0, 399, 400, 899)] == [0, 0, 1, 2]
        assert (workload.visit(0), workload.visit(899)) == (0, 2)

    def test_some_are_stuck(self) -> None:
        """Binomial(2000, 0.1): sd 13."""
        workload = drawn(stuck=0.1)
        workload.next(1)
        stuck = sum(workload.length(0, key) > 10**9 for key in range(2000))
        assert 200 - 60 < stuck < 200 + 60

    def test_earlier_visits_are_like_later_ones(self) -> None:
        workload = drawn(share=0.9)
        earlier = list(workload.earlier(4, -1))
        assert len(earlier) == 1600
        assert {r.visit for r in earlier} == {-1}
        before = np.log([r.token_ids.size for r in earlier]).reshape(400, 4).mean(axis=1)
        after = logs(workload, 1, 4)[0].mean(axis=1)
        assert np.corrcoef(before, after)[0, 1] > 0.9


class TestTrace:
    def test_one_length_a_line(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl.gz"
        path.write_bytes(gzip.compress(b'{"output_length": 5}\n\n{"output_length": 9}\n'))
        assert set(read_trace(path).table) == {5, 9}

    def test_histograms_weighted_by_rate(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        lines = [
            {"mean_rate_per_s": 3.0, "output_tokens": {"5": 1.0}},
            {"mean_rate_per_s": 1.0, "output_tokens": {"9": 1.0}},
        ]
        path.write_text("\n".join(json.dumps(line) for line in lines))
        table = read_trace(path).table
        assert table.count(5) / len(table) == pytest.approx(0.75, abs=0.001)

    def test_columns(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,44\n")
        assert set(read_trace(path).table) == {44}

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('{"words": 3}', "row 1 has none of the columns"),
            ("{", "not valid JSON"),
            ("", "no lengths: it has no rows"),
            ('{"length": 3}\n-5', "row 2: -5 is no object"),
            ('{"length": -5}', "row 1: length = -5: expected a finite number of at least 0"),
            ('{"length": NaN}', "row 1: length = nan"),
            ('{"length": 1e999}', "row 1: length = inf"),
            ('{"length": [3]}', r"row 1: length = \[3\]"),
            ('{"length": true}', "row 1: length = True"),
            ('{"output_tokens": {"x": 1.0}}', "row 1: a length in output_tokens = 'x'"),
            ('{"output_tokens": {"5": -1.0}}', "row 1: a share in output_tokens = -1.0"),
            ('{"output_tokens": {"5": 1.0}, "mean_rate_per_s": "x"}', "row 1: mean_rate_per_s = 'x'"),
            ('{"output_tokens": {"5": 0.0}}', "no lengths: it has only weights of 0"),
        ],
    )
    def test_what_is_no_trace(self, tmp_path: Path, text: str, said: str) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(text)
        with pytest.raises(StrettoError, match=f"{path}:.*{said}"):
            read_trace(path)
        with pytest.raises(StrettoError, match="cannot be read"):
            read_trace(tmp_path / "other.jsonl")

    @pytest.mark.parametrize("cell", ["abc", "nan", "-1", ""])
    def test_a_cell_that_is_no_length(self, tmp_path: Path, cell: str) -> None:
        path = tmp_path / "t.csv"
        path.write_text(f"length,other\n7,1\n{cell},1\n")
        with pytest.raises(StrettoError, match=f"row 2: length = '{cell}': expected a finite number"):
            read_trace(path)

    def test_a_torn_archive(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl.gz"
        path.write_bytes(gzip.compress(b'{"length": 5}\n' * 50)[:12] + b"\xff" * 30)
        with pytest.raises(StrettoError, match="cannot be read"):
            read_trace(path)

    def test_lengths_beyond_any_limit_stay_whole_numbers(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text('{"length": 1e300}')
        assert min(read_trace(path).table) > 1 << 30
        assert min(Quantiles.lognormal(1e200, 20.0).scaled(1e6).table) > 1 << 30


class TestRecorded:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        (tmp_path / "rollouts").mkdir()
        rollouts = [self.rollout(row, sample) for row in (3, 5) for sample in (0, 1)]
        write_rollouts(tmp_path / "rollouts" / "step-000001.parquet", rollouts, step=1)
        return tmp_path

    def rollout(self, row: int, sample: int) -> Rollout:
        tokens = 10 * row + sample
        ids = np.zeros(tokens, np.int64)
        zeros, mask = np.zeros(tokens), np.ones(tokens, np.bool_)
        prompt = Prompt(row, f"{row:032x}", 0, np.array([row]), {})
        key = 100 * row + sample
        return Rollout(
            key, row, prompt, sample, 0, key, ids, zeros, zeros, ids, mask,
            reward=float(sample), finish_reason=FinishReason.STOP, outcome=State.CONSUMED,
        )  # fmt: skip

    def test_replays_the_runs_prompts_and_lengths(self, run: Path) -> None:
        workload = Recorded(run)
        assert [(p.row, visit) for p, visit in workload.next(3)] == [(3, 0), (5, 0), (3, 1)]
        assert workload.length(1, 501) == 51
        assert workload.reward(5, 501) == 1.0

    def test_what_the_run_did_not_make_is_like_what_it_made(self, run: Path) -> None:
        workload = Recorded(run)
        workload.next(2)
        assert {workload.length(0, key) for key in range(1000, 1050)} == {30, 31}

    def test_a_response_has_the_tokens_per_step_that_it_had(self, run: Path) -> None:
        drafted = self.rollout(7, 0)
        drafted.accepted, drafted.drafted = 42, 56  # of 70 tokens: 28 steps
        counted = self.rollout(8, 0)
        counted.accepted, counted.drafted, counted.decode_steps = (
            41,
            80,
            40,
        )  # the last of 80 tokens was drafted
        write_rollouts(run / "rollouts" / "step-000002.parquet", [drafted, counted], step=2)
        workload = Recorded(run)
        found = [workload.drafts(key) for key in (700, 800, 300, 999)]
        assert found == [
            (pytest.approx(69 / 27), 2.0),
            (pytest.approx(79 / 39), 2.0),
            (1.0, 0.0),
            None,
        ]  # after the first one's single token

    def test_what_was_unfinished_is_longer_than_it_was(self, run: Path) -> None:
        (run / "in_flight").mkdir()
        some, more = self.rollout(3, 0), self.rollout(9, 0)
        given_up, some.key, more.key = self.rollout(3, 1), 31, 32
        given_up.key, given_up.token_ids = 33, given_up.token_ids[:30]
        for rollout in (some, more, given_up):
            rollout.finish_reason = FinishReason.NONE
        for number, rollouts in ((1, [self.rollout(8, 0)]), (2, [some, more, self.rollout(5, 1)])):
            write_rollouts(run / "in_flight" / f"step-00000{number}.parquet", rollouts, step=number)
        given_up = replace(
            given_up,
            **{
                name: getattr(given_up, name)[:30]
                for name in ("logprobs", "raw_logprobs", "versions", "loss_mask")
            },
        )
        write_rollouts(run / "rollouts" / "step-000002.parquet", [given_up], step=2)
        workload = Recorded(run)
        assert [p.row for p, _ in workload.next(3)] == [3, 5, 9]  # also those with nothing finished
        assert [workload.length(0, 31), workload.length(2, 32)] == [31, 180]
        assert workload.length(0, 33) == 31
        assert workload.length(1, 501) == 51  # finished

    def test_earlier_visits(self, run: Path) -> None:
        assert [r.token_ids.size for r in Recorded(run).earlier(2, -1)] == [30, 31, 50, 51]

    def test_a_folder_that_is_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(StrettoError, match="no run with a log"):
            Recorded(tmp_path / "nowhere")
