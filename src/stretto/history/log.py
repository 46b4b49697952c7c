"""The log of rollouts as Parquet: the source of truth from which index, lengths and ledger are rebuilt.

One file holds one step's rollouts, one row each; per-token columns are lists of equal length N. Where the most
probable tokens of every place are kept, two more columns hold them, K of each: before compression 8 K bytes a token.
The row's own text and data columns stay in the data set and are found again by `prompt_row`. A response that was
scored, and then sent back because the weights had moved, is in the file of either step: it is logged each time that it
is scored, and its length counts each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stretto.alternatives import Alternatives
from stretto.atomic import write_atomically
from stretto.errors import StrettoError
from stretto.history.lengths import Ended
from stretto.records import FinishReason, Prompt, Rollout, State

SCHEMA_VERSION = 3  # 1: without alternatives and what became of dropped tokens; 2: without decode_steps
_VERSION_KEY = b"stretto.log"

_LISTS: dict[str, npt.DTypeLike] = {
    "prompt_ids": np.int64,
    "token_ids": np.int64,
    "logprobs": np.float64,
    "raw_logprobs": np.float64,
    "versions": np.int64,
    "loss_mask": np.bool_,
    "draft_ids": np.int64,
}
_PER_TOKEN = tuple(name for name in _LISTS if name not in ("prompt_ids", "draft_ids"))
_TOP_IDS, _TOP_LOGPROBS = "top_ids", "top_logprobs"


def _schema(logprob: pa.DataType, alternatives: int = 0, version: int = SCHEMA_VERSION) -> pa.Schema:
    fields: list[tuple[str, pa.DataType]] = [
        ("request_id", pa.int64()),
        ("group_id", pa.int64()),
        ("step", pa.int32()),  # the optimiser step that the file belongs to
        ("round", pa.int32()),  # the trainer's version at admission: the round of generation it was drawn in
        ("visit", pa.int32()),
        ("prompt_uid", pa.string()),
        ("occurrence", pa.int32()),
        ("prompt_row", pa.int64()),
        ("sample_index", pa.int32()),
        ("key", pa.uint64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(logprob)),
        ("raw_logprobs", pa.list_(logprob)),
        ("versions", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("turn_start", pa.int32()),
        ("turn", pa.int32()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("reward_status", pa.string()),
        ("finish_reason", pa.string()),
        ("outcome", pa.string()),  # the ledger's state, in lower case
        ("worker", pa.int32()),
        ("attempt", pa.int32()),
        ("admitted_step", pa.int32()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("drafted", pa.int64()),
        ("accepted", pa.int64()),
    ]
    if version > 1:
        fields.append(("discard_reason", pa.string()))
        fields.append(("refreshes", pa.int32()))  # times that its tokens were dropped and generated again,
        fields.append(("draft_ids", pa.list_(pa.int32())))  # and those dropped last
    if version > 2:
        fields.append(("decode_steps", pa.int32()))
    if alternatives:
        fields.append((_TOP_IDS, pa.list_(pa.list_(pa.int32(), alternatives))))
        fields.append((_TOP_LOGPROBS, pa.list_(pa.list_(pa.float32(), alternatives))))
    return pa.schema(fields)


def write_rollouts(path: Path, rollouts: Iterable[Rollout], *, step: int, exact: bool = False) -> None:
    """Write the rollouts of optimiser step `step` to `path`, atomically.

    Log-probs are stored as float32, or as float64 if `exact`: those of unfinished responses must come back
    bit for bit. Raises StrettoError if the disk refuses, ValueError for a rollout whose per-token arrays
    differ in length.
    """
    rows = list(rollouts)
    alternatives = max((r.top.width for r in rows if r.top is not None), default=0)
    schema = _schema(pa.float64() if exact else pa.float32(), alternatives)
    columns = _columns(rows, step, schema)
    metadata = {_VERSION_KEY: str(SCHEMA_VERSION).encode()}
    table = pa.Table.from_pydict(columns, schema=schema.with_metadata(metadata))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    write_atomically(path, sink.getvalue().to_pybytes())


def read_rollouts(path: Path, prompts: Sequence[Prompt] | None = None) -> list[Rollout]:
    """The rollouts in the file `path`, in the order in which they were written.

    With `prompts`, each rollout gets its own data row, found by `Prompt.row` and checked by uid and
    occurrence; without, a Prompt with the stored token ids and no data. Raises StrettoError if the file is
    missing, damaged, of a newer version, or from other data than `prompts`.
    """
    with _damage(path):
        table = _read_table(path)
        scalars = {
            field.name: table.column(field.name).to_pylist()
            for field in table.schema
            if not pa.types.is_list(field.type)
        }
        top = _split_alternatives(table)
        tokens = {
            name: _split(table.column(name), dtype)
            for name, dtype in _LISTS.items()
            if name in table.column_names
        }
        by_row = None if prompts is None else {prompt.row: prompt for prompt in prompts}
        return [
            _rollout(
                {name: values[i] for name, values in scalars.items()},
                {name: arrays[i] for name, arrays in tokens.items()},
                top[i],
                by_row,
                path,
            )
            for i in range(table.num_rows)
        ]


def read_ended(path: Path) -> list[Ended]:
    """How long those rollouts in the file `path` became that have ended, without their other columns.

    Raises StrettoError as `read_rollouts` does.
    """
    names = ["prompt_row", "prompt_uid", "occurrence", "visit", "finish_reason"]
    with _damage(path):
        table = _read_table(path, [*names, "prompt_ids", "token_ids"])
        rows = zip(*(table.column(name).to_pylist() for name in names), strict=True)
        prompts = _split(table.column("prompt_ids"), np.int64)
        lengths = pc.list_value_length(table.column("token_ids")).to_pylist()
        return [
            Ended(Prompt(row, uid, occurrence, ids, {}), visit, length, reason == FinishReason.LENGTH)
            for (row, uid, occurrence, visit, reason), ids, length in zip(rows, prompts, lengths, strict=True)
            if reason != FinishReason.NONE
        ]


class Answered(NamedTuple):
    """What a response is one to: the visit of a prompt's row, and the sample of that."""

    uid: str
    occurrence: int
    sample_index: int
    visit: int


def read_answered(path: Path) -> list[Answered]:
    """Of the rollouts in the file `path`, in order, without their other columns.

    Raises StrettoError as `read_rollouts` does.
    """
    names = ["prompt_uid", "occurrence", "sample_index", "visit"]
    with _damage(path):
        table = _read_table(path, names)
        columns = (table.column(name).to_pylist() for name in names)
        return [Answered(*row) for row in zip(*columns, strict=True)]


def check_log(path: Path) -> None:
    """Raise StrettoError if the file `path` is missing, cut off or not a log.

    Only its ends are looked at; the checksums of its pages are checked when it is read.
    """
    with _damage(path), _opened(path) as file:
        _check_schema(path, pq.read_schema(file))


def _columns(rows: list[Rollout], step: int, schema: pa.Schema) -> dict[str, pa.Array]:
    """Every column of the schema as an Arrow array, in row order."""
    for r in rows:
        lengths = {name: len(getattr(r, name)) for name in _PER_TOKEN}
        if r.top is not None:
            lengths |= {_TOP_IDS: len(r.top.token_ids), _TOP_LOGPROBS: len(r.top.logprobs)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"request {r.request_id}: per-token arrays of different lengths: {lengths}")
    values: dict[str, list[Any]] = {
        "step": [step] * len(rows),
        "round": [r.admitted_step for r in rows],
        "prompt_uid": [r.prompt.uid for r in rows],
        "occurrence": [r.prompt.occurrence for r in rows],
        "prompt_row": [r.prompt.row for r in rows],
        "reward_parts": [list(r.reward_parts.items()) for r in rows],
        "finish_reason": [r.finish_reason.value for r in rows],
        "outcome": [r.outcome.name.lower() for r in rows],
    }
    columns: dict[str, pa.Array] = {}
    for field in schema:
        if field.name == "prompt_ids":
            columns[field.name] = _join([r.prompt.token_ids for r in rows], field.type)
        elif field.name in (_TOP_IDS, _TOP_LOGPROBS):
            columns[field.name] = _join_alternatives(rows, field)
        elif field.name in _LISTS:
            columns[field.name] = _join([getattr(r, field.name) for r in rows], field.type)
        else:
            column = values[field.name] if field.name in values else [getattr(r, field.name) for r in rows]
            columns[field.name] = pa.array(column, type=field.type)
    return columns


def _join(arrays: list[npt.NDArray[Any]], list_type: pa.DataType) -> pa.ListArray:
    """One list column from per-row arrays; integers that do not fit the stored type raise ArrowInvalid."""
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
    wanted = list_type.value_type
    if pa.types.is_floating(wanted):
        # Not by `to_pandas_dtype`, for which Arrow 18 needs pandas.
        dtype = np.float64 if pa.types.is_float64(wanted) else np.float32
        stored = pa.array(values.astype(dtype), type=wanted)  # rounding is meant here
    else:
        stored = pa.array(values).cast(wanted)
    return pa.ListArray.from_arrays(pa.array(offsets).cast(pa.int32()), stored, type=list_type)


def _join_alternatives(rows: list[Rollout], field: pa.Field) -> pa.ListArray:
    """One of the two columns of alternatives; where a row has fewer of them, or none, -1 and -inf."""
    width = field.type.value_type.list_size
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(r.token_ids) for r in rows], out=offsets[1:])
    whole = Alternatives.none(int(offsets[-1]), width)
    for r, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
        if r.top is not None:
            whole.token_ids[start:end, : r.top.width] = r.top.token_ids
            whole.logprobs[start:end, : r.top.width] = r.top.logprobs
    values = whole.token_ids if field.name == _TOP_IDS else whole.logprobs
    places = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), width)
    return pa.ListArray.from_arrays(pa.array(offsets), places, type=field.type)


def _split_alternatives(table: pa.Table) -> list[Alternatives | None]:
    """Of each row; None in a log without them."""
    if _TOP_IDS not in table.column_names or not table.num_rows:
        return [None] * table.num_rows
    width = _width(table.schema)
    ids, logprobs = (pa.concat_arrays(table.column(name).chunks) for name in (_TOP_IDS, _TOP_LOGPROBS))
    if not ids.offsets.equals(logprobs.offsets):
        raise ValueError(f"{_TOP_IDS} and {_TOP_LOGPROBS} are of different lengths")
    whole = Alternatives(
        *(lists.values.values.to_numpy(zero_copy_only=False).reshape(-1, width) for lists in (ids, logprobs))
    )
    return [whole[start:end] for start, end in pairwise(ids.offsets.to_numpy())]


def _split(column: pa.ChunkedArray, dtype: npt.DTypeLike) -> list[npt.NDArray[Any]]:
    """The per-row arrays of a list column, as views of one array."""
    if len(column) == 0:
        return []
    lists = pa.concat_arrays(column.chunks)
    values = lists.values.to_numpy(zero_copy_only=False).astype(dtype)
    offsets = lists.offsets.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets)]


def _rollout(
    row: dict[str, Any],
    tokens: dict[str, npt.NDArray[Any]],
    top: Alternatives | None,
    by_row: Mapping[int, Prompt] | None,
    path: Path,
) -> Rollout:
    prompt_ids = tokens.pop("prompt_ids")
    uid, occurrence, index = row.pop("prompt_uid"), row.pop("occurrence"), row.pop("prompt_row")
    del row["step"], row["round"]  # known from the file's name and from `admitted_step`
    if by_row is None:
        prompt = Prompt(index, uid, occurrence, prompt_ids, {})
    else:
        found = by_row.get(index)
        if found is None or (found.uid, found.occurrence) != (uid, occurrence):
            has = "has no such row" if found is None else f"has prompt {found.uid}#{found.occurrence} there"
            raise StrettoError(
                f"{path}: request {row['request_id']} answers prompt {uid}#{occurrence} in row {index}, but "
                f"the data {has}; use the data and tokenizer that the run was started with"
            )
        prompt = found
    fields: dict[str, Any] = {**row, **tokens}
    fields["reward_parts"] = dict(row["reward_parts"])
    fields["finish_reason"] = FinishReason(row["finish_reason"])
    fields["outcome"] = State[row["outcome"].upper()]
    return Rollout(prompt=prompt, top=top, **fields)


def _read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    with _opened(path) as opened:
        file = pq.ParquetFile(opened, page_checksum_verification=True)
        _check_schema(path, file.schema_arrow)
        table = file.read(columns)
    table.validate(full=True)
    return table


def _check_schema(path: Path, schema: pa.Schema) -> None:
    metadata = schema.metadata or {}
    version = metadata.get(_VERSION_KEY, b"").decode(errors="replace")
    if not version.isdigit():
        raise StrettoError(f"{path} is Parquet, but not a log of rollouts that Stretto wrote")
    if int(version) > SCHEMA_VERSION:
        raise StrettoError(
            f"{path} has version {version} of the log's schema; this Stretto reads up to {SCHEMA_VERSION}: "
            "read it with the newer one that wrote it"
        )
    width = _width(schema)
    kinds = [_schema(logprob, width, int(version)) for logprob in (pa.float32(), pa.float64())]
    if not any(schema.equals(kind) for kind in kinds):
        raise StrettoError(f"{path} is damaged: its columns are not those of version {version} of the log")


def _width(schema: pa.Schema) -> int:
    """Alternatives of each place; 0 where there are none, or not as we write them."""
    if _TOP_IDS not in schema.names:
        return 0
    places = getattr(schema.field(_TOP_IDS).type, "value_type", None)
    return int(getattr(places, "list_size", 0))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed by the `with` below
    except OSError as error:
        raise StrettoError(f"cannot read {path}: {error.strerror}") from error
    with file:
        yield file


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn every way in which reading a damaged Parquet file fails into a StrettoError naming it."""
    try:
        yield
    except StrettoError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise StrettoError(f"{path} is damaged or cut off: {error}") from error
