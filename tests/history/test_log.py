"""The log gives back exactly what was written, to Stretto and to any Parquet reader, or says what is wrong."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stretto.alternatives import Alternatives
from stretto.errors import StrettoError
from stretto.history.log import SCHEMA_VERSION, check_log, read_rollouts, write_rollouts
from stretto.records import FinishReason, Prompt, Rollout, State

CONTRACT = {
    *("request_id", "group_id", "step", "round", "visit", "prompt_uid", "occurrence", "sample_index"),
    *(
        "prompt_ids",
        "token_ids",
        "logprobs",
        "raw_logprobs",
        "versions",
        "loss_mask",
        "reward",
        "reward_parts",
    ),
    *("reward_status", "finish_reason", "outcome", "worker", "attempt", "started_at", "finished_at"),
    *("drafted", "accepted", "decode_steps", "prompt_row", "key", "turn_start", "turn", "admitted_step"),
}

INT32 = st.integers(0, 2**31 - 1)
INT64 = st.integers(0, 2**63 - 1)
NUMBERS = st.floats(width=64)  # NaN and infinities too


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    n = draw(st.integers(0, 5))

    def array(dtype: type, elements: st.SearchStrategy[float]) -> np.ndarray:
        return draw(hnp.arrays(dtype, n, elements=elements))

    prompt_ids = draw(hnp.arrays(np.int64, st.integers(0, 4), elements=INT32))
    prompt = Prompt(draw(INT64), draw(st.text()), draw(INT32), prompt_ids, {"answer": "42"})
    return Rollout(
        request_id=draw(INT64),
        group_id=draw(INT64),
        prompt=prompt,
        sample_index=draw(INT32),
        visit=draw(INT32),
        key=draw(st.integers(0, 2**64 - 1)),
        token_ids=array(np.int64, INT32),
        logprobs=array(np.float64, NUMBERS),
        raw_logprobs=array(np.float64, NUMBERS),
        versions=array(np.int64, INT32),
        loss_mask=array(np.bool_, st.booleans()),
        turn_start=draw(INT32),
        turn=draw(INT32),
        reward=draw(NUMBERS),
        reward_parts=draw(st.dictionaries(st.text(), NUMBERS, max_size=3)),
        reward_status=draw(st.sampled_from(["ok", "error", "timeout", "invalid"])),
        finish_reason=draw(st.sampled_from(FinishReason)),
        outcome=draw(st.sampled_from(State)),
        worker=draw(st.integers(-1, 2**31 - 1)),
        attempt=draw(INT32),
        admitted_step=draw(INT32),
        started_at=draw(NUMBERS),
        finished_at=draw(NUMBERS),
        drafted=draw(INT64),
        accepted=draw(INT64),
        decode_steps=draw(INT32),
    )


def one(request_id: int = 7, tokens: int = 3) -> Rollout:
    """A rollout of a few tokens whose log-probs are not float32 numbers."""
    return Rollout(
        request_id=request_id,
        group_id=1,
        prompt=Prompt(5, "uid5", 0, np.array([1, 2]), {}),
        sample_index=request_id % 8,
        visit=2,
        key=2**64 - 1,
        token_ids=np.arange(tokens),
        logprobs=np.full(tokens, -0.1),
        raw_logprobs=np.full(tokens, -0.2),
        versions=np.zeros(tokens, np.int64),
        loss_mask=np.ones(tokens, np.bool_),
        reward_parts={"accuracy": 1.0},
        outcome=State.CONSUMED,
        admitted_step=3,
    )


def assert_same_alternatives(a: Alternatives | None, b: Alternatives | None) -> None:
    """Padding aside: what is known of no place of a rollout may come back as unknown at every place."""
    for x, y in ((a, b), (b, a)):
        if x is None:
            assert y is None or (y.token_ids == -1).all()
            continue
        width = min(x.width, y.width if y is not None else 0)
        assert (x.token_ids[:, width:] == -1).all()
        assert np.isneginf(x.logprobs[:, width:]).all()
        if y is not None:
            np.testing.assert_array_equal(x.token_ids[:, :width], y.token_ids[:, :width])
            np.testing.assert_array_equal(x.logprobs[:, :width], y.logprobs[:, :width])
            assert x.token_ids.dtype == np.int32
            assert x.logprobs.dtype == np.float32


def assert_same(a: Rollout, b: Rollout) -> None:
    """Equal in every field, bit for bit, array dtypes included; NaN equals NaN."""
    for field in dataclasses.fields(Rollout):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name == "prompt":
            assert (x.row, x.uid, x.occurrence) == (y.row, y.uid, y.occurrence)
            np.testing.assert_array_equal(x.token_ids, y.token_ids)
        elif isinstance(x, np.ndarray):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y, err_msg=field.name)
        elif field.name == "top":
            assert_same_alternatives(x, y)
        elif field.name == "reward_parts":
            assert list(x) == list(y)
            np.testing.assert_array_equal(list(x.values()), list(y.values()))
        else:
            assert type(x) is type(y)
            assert x == y or (x != x and y != y), field.name


@given(st.lists(rollouts(), max_size=4))
@settings(max_examples=40)
def test_what_is_in_flight_comes_back_bit_for_bit(written: list[Rollout]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step-000001.parquet")
        write_rollouts(path, written, step=1, exact=True)
        read = read_rollouts(path)
    assert len(read) == len(written)
    for a, b in zip(written, read, strict=True):
        assert_same(a, b)


def test_finished_rollouts_keep_their_logprobs_as_float32(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rollouts(path, iter([one()]), step=1)
    (read,) = read_rollouts(path)
    np.testing.assert_array_equal(read.logprobs, np.full(3, np.float64(np.float32(-0.1))))
    np.testing.assert_array_equal(read.raw_logprobs, np.full(3, np.float64(np.float32(-0.2))))
    assert read.logprobs.dtype == np.float64


def test_any_parquet_reader_sees_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rollouts(path, [one(7), one(8, tokens=0)], step=12)
    table = pq.read_table(path)  # without Stretto
    assert set(table.column_names) >= CONTRACT
    row = table.slice(0, 1).to_pylist()[0]
    assert (row["step"], row["round"], row["prompt_row"], row["key"]) == (12, 3, 5, 2**64 - 1)
    assert (row["token_ids"], row["prompt_ids"], row["outcome"]) == ([0, 1, 2], [1, 2], "consumed")
    assert row["reward_parts"] == [("accuracy", 1.0)]
    assert table.schema.field("token_ids").type == pa.list_(pa.int32())


def test_every_field_of_a_rollout_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rollouts(path, [], step=1)
    stored = set(pq.read_schema(path).names)
    assert {f.name for f in dataclasses.fields(Rollout)} - {"prompt", "top"} <= stored
    assert read_rollouts(path) == []
    write_rollouts(path, [with_alternatives(7, width=2)], step=1)
    assert {"top_ids", "top_logprobs"} <= set(pq.read_schema(path).names)


def with_alternatives(request_id: int, width: int, tokens: int = 3) -> Rollout:
    rollout = one(request_id, tokens)
    ids = np.arange(tokens * width, dtype=np.int32).reshape(tokens, width)
    rollout.top = Alternatives(ids, -(0.1 + ids).astype(np.float32))
    return rollout


@pytest.mark.parametrize("exact", [False, True])
def test_alternatives_come_back_whatever_their_number(tmp_path: Path, exact: bool) -> None:
    path = tmp_path / "a.parquet"
    written = [with_alternatives(1, 8), one(2), with_alternatives(3, 2), with_alternatives(4, 8, tokens=0)]
    write_rollouts(path, written, step=1, exact=exact)
    check_log(path)
    for a, b in zip(written, read_rollouts(path), strict=True):
        assert_same_alternatives(a.top, b.top)
    assert pq.read_table(path).to_pylist()[0]["top_ids"][1] == list(range(8, 16))  # without Stretto


def test_logs_without_alternatives_have_no_column_of_them(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rollouts(path, [one()], step=1)
    assert not {"top_ids", "top_logprobs"} & set(pq.read_schema(path).names)
    assert read_rollouts(path)[0].top is None


def test_alternatives_of_another_length_are_refused(tmp_path: Path) -> None:
    bad = with_alternatives(7, 2)
    assert bad.top is not None
    bad.top = bad.top[:2]
    with pytest.raises(ValueError, match=r"request 7.*'top_ids': 2"):
        write_rollouts(tmp_path / "a.parquet", [bad], step=1)


def test_data_rows_come_back_by_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rollouts(path, [one()], step=1)
    assert read_rollouts(path)[0].prompt.data == {}
    row = Prompt(5, "uid5", 0, np.array([1, 2]), {"answer": "42"})
    other = Prompt(4, "uid4", 0, np.array([1]), {})
    assert read_rollouts(path, [other, row])[0].prompt is row


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([Prompt(5, "changed", 0, np.array([1, 2]), {})], "has prompt changed#0 there"),
        ([Prompt(5, "uid5", 1, np.array([1, 2]), {})], "has prompt uid5#1 there"),
        ([], "has no such row"),
    ],
)
def test_other_data_is_refused(tmp_path: Path, prompts: list[Prompt], said: str) -> None:
    path = tmp_path / "a.parquet"
    write_rollouts(path, [one()], step=1)
    with pytest.raises(StrettoError, match=said) as error:
        read_rollouts(path, prompts)
    assert str(path) in str(error.value)
    assert "row 5" in str(error.value)


def test_arrays_of_different_lengths_are_refused(tmp_path: Path) -> None:
    bad = one()
    bad.versions = bad.versions[:2]
    with pytest.raises(ValueError, match=r"request 7.*'versions': 2"):
        write_rollouts(tmp_path / "a.parquet", [bad], step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_token_id_that_does_not_fit_is_refused_not_wrapped(tmp_path: Path) -> None:
    bad = one()
    bad.token_ids = bad.token_ids + 2**31
    with pytest.raises(ValueError, match="2147483648"):
        write_rollouts(tmp_path / "a.parquet", [bad], step=1)


def test_the_same_rollouts_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_rollouts(tmp_path / name, [one(), one(8)], step=1)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_older_log_is_read_without_what_it_does_not_say(tmp_path: Path) -> None:
    path, rollout = tmp_path / "step-1.parquet", one()
    rollout.drafted, rollout.accepted, rollout.decode_steps = 4, 2, 1
    write_rollouts(path, [rollout], step=1)
    table = pq.read_table(path).drop_columns(["decode_steps"])
    pq.write_table(table.replace_schema_metadata({"stretto.log": "2"}), path)
    check_log(path)
    (found,) = read_rollouts(path)
    assert (found.drafted, found.accepted, found.decode_steps) == (4, 2, 0)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rollouts(path, [one()], step=1)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"stretto.log": str(SCHEMA_VERSION + 1)}), path)
    for reader in (read_rollouts, check_log):
        with pytest.raises(
            StrettoError, match=rf"version {SCHEMA_VERSION + 1} .*reads up to {SCHEMA_VERSION}:"
        ):
            reader(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for reader in (read_rollouts, check_log):
        with pytest.raises(StrettoError, match=r"a\.parquet.*No such file"):
            reader(path)
    pq.write_table(pa.table({"text": ["not a rollout"]}), path)
    for reader in (read_rollouts, check_log):
        with pytest.raises(StrettoError, match="not a log of rollouts"):
            reader(path)
    write_rollouts(path, [one()], step=1)
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["versions"]), path)
    for reader in (read_rollouts, check_log):
        with pytest.raises(StrettoError, match="columns are not those of version"):
            reader(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("log") / "a.parquet"
    write_rollouts(path, [one(i, tokens=40) for i in range(16)], step=1)
    return path.read_bytes()


def test_a_file_cut_off_anywhere_is_found_out(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        for reader in (read_rollouts, check_log):
            with pytest.raises(StrettoError, match=r"a\.parquet is damaged or cut off"):
                reader(path)


@given(data=st.data())
@settings(max_examples=100)
def test_a_changed_byte_is_found_out_or_harmless(whole: bytes, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.integers(1, 255))
    damaged = bytearray(whole)
    damaged[position] ^= change
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.parquet")
        path.write_bytes(whole)
        right = read_rollouts(path)
        path.write_bytes(damaged)
        try:
            read = read_rollouts(path)
        except StrettoError:
            return
        for a, b in zip(right, read, strict=True):  # statistics, the writer's name: nothing that is read
            assert_same(a, b)
