"""The log of rollouts as Parquet: the source of truth from which index, lengths and ledger are rebuilt.

One file holds one step's rollouts, one row each; per-token columns are lists of equal length N. The row's own
text and data columns stay in the data set and are found again by `prompt_row`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stretto.atomic import write_atomically
from stretto.errors import StrettoError
from stretto.records import FinishReason, Prompt, Rollout, State

SCHEMA_VERSION = 1
_VERSION_KEY = b"stretto.log"

_LISTS: dict[str, npt.DTypeLike] = {
    "prompt_ids": np.int64,
    "token_ids": np.int64,
    "logprobs": np.float64,
    "raw_logprobs": np.float64,
    "versions": np.int64,
    "loss_mask": np.bool_,
}
_PER_TOKEN = tuple(name for name in _LISTS if name != "prompt_ids")


def _schema(logprob: pa.DataType) -> pa.Schema:
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
    return pa.schema(fields)


def write_rollouts(path: Path, rollouts: Iterable[Rollout], *, step: int, exact: bool = False) -> None:
    """Write the rollouts of optimiser step `step` to `path`, atomically.

    Log-probs are stored as float32, or as float64 if `exact`: those of unfinished responses must come back
    bit for bit. Raises StrettoError if the disk refuses, ValueError for a rollout whose per-token arrays
    differ in length.
    """
    rows = list(rollouts)
    schema = _schema(pa.float64() if exact else pa.float32())
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
        tokens = {name: _split(table.column(name), dtype) for name, dtype in _LISTS.items()}
        by_row = None if prompts is None else {prompt.row: prompt for prompt in prompts}
        return [
            _rollout(
                {name: values[i] for name, values in scalars.items()},
                {name: arrays[i] for name, arrays in tokens.items()},
                by_row,
                path,
            )
            for i in range(table.num_rows)
        ]


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
        elif field.name in _PER_TOKEN:
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
        stored = pa.array(values.astype(wanted.to_pandas_dtype()), type=wanted)  # rounding is meant here
    else:
        stored = pa.array(values).cast(wanted)
    return pa.ListArray.from_arrays(pa.array(offsets).cast(pa.int32()), stored, type=list_type)


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
    return Rollout(prompt=prompt, **fields)


def _read_table(path: Path) -> pa.Table:
    with _opened(path) as opened:
        file = pq.ParquetFile(opened, page_checksum_verification=True)
        _check_schema(path, file.schema_arrow)
        table = file.read()
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
    if not any(schema.equals(_schema(logprob)) for logprob in (pa.float32(), pa.float64())):
        raise StrettoError(f"{path} is damaged: its columns are not those of version {version} of the log")


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
