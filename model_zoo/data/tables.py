"""Your own data: Parquet or CSV tables with list columns, described by a small JSON file.

    {
      "splits": {"train": ["day=1/*.parquet", "day=2/*.parquet"], "valid": ["day=3/*.parquet"], "test": ["day=4/*.parquet"]},
      "dense": ["price", "ctr_7d"],
      "sparse": {"user": {"column": "user_id", "n_ids": 100001}, "tags": {"n_ids": 51, "max_ids": 4}},
      "events": {"click": {"max_len": 200, "age": "click_age", "fields": {"item": {"column": "items", "n_ids": 50001}}}},
      "labels": {"ctr": "clicked"},
      "domain": {"column": "app", "n_domains": 3},
      "tables": {"click_item": "item"}
    }

A column is named like its feature (``<event>_<field>`` and ``<event>_age`` for events) unless ``column`` says otherwise.
Multi-valued features and event fields are list columns, oldest event first; in CSV, a list is numbers separated by spaces.
Ids are whole numbers from 1 on; 0 and missing values mean padding, an id that is too large is an error. ``age`` is seconds
from the event to the request; without it ages are 0. Files of a split are read in order of their names, and a row group (of
Parquet, or ``CSV_ROWS`` lines) at a time, so that memory holds a few batches.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .batches import Batch
from .schema import EventType, Schema, SparseFeature

CSV_ROWS = 4096
MAPPING = "gemopt.json"  # the name of the mapping in a folder of tables


@dataclass(frozen=True)
class Mapped:
    """The columns of a mapping. ``events`` has for each event its fields' columns and the column of ages."""

    splits: dict[str, list[str]]
    dense: list[str]
    sparse: dict[str, str]
    events: dict[str, tuple[dict[str, str], str | None]]
    labels: dict[str, str]
    domain: str | None
    schema: Schema

    @property
    def columns(self) -> list[str]:
        """All columns to read."""
        names = [*self.dense, *self.sparse.values(), *self.labels.values()]
        for fields, age in self.events.values():
            names += [*fields.values(), *([age] if age else [])]
        return list(dict.fromkeys([*names, *([self.domain] if self.domain else [])]))


def read_mapping(description: Mapping[str, Any], max_len: int | None = None) -> Mapped:
    """Check a mapping and make its `Schema`. ``max_len`` cuts all histories.

    Raises:
        ValueError: an entry is missing, unknown or of the wrong form; the message names it.
    """
    allowed = {"splits", "dense", "sparse", "events", "labels", "domain", "tables"}
    unknown = set(description) - allowed
    if unknown or not description.get("splits", {}).get("train") or not description.get("labels"):
        raise ValueError(f"mapping: got {sorted(description)}; allowed: {sorted(allowed)}, with splits.train and labels")
    sparse, sparse_columns = {}, {}
    for name, entry in description.get("sparse", {}).items():
        sparse[name] = SparseFeature(_size(entry, f"sparse.{name}", "n_ids"), int(entry.get("max_ids", 1)))
        sparse_columns[name] = str(entry.get("column", name))
    events, event_columns = {}, {}
    for name, entry in description.get("events", {}).items():
        longest = _size(entry, f"events.{name}", "max_len")
        fields = entry.get("fields", {})
        if not fields:
            raise ValueError(f"mapping: events.{name} needs fields, got {entry}")
        sizes = {field: _size(e, f"events.{name}.{field}", "n_ids") for field, e in fields.items()}
        events[name] = EventType(sizes, longest if max_len is None else min(longest, max_len))
        columns = {field: str(e.get("column", f"{name}_{field}")) for field, e in fields.items()}
        event_columns[name] = (columns, entry.get("age"))
    domain = description.get("domain")
    schema = Schema(
        n_dense=len(description.get("dense", [])),
        sparse=sparse,
        events=events,
        tasks=tuple(description["labels"]),
        n_domains=_size(domain, "domain", "n_domains") if domain else 1,
        tables=dict(description.get("tables", {})),
    )
    return Mapped(
        splits={split: list(globs) for split, globs in description["splits"].items()},
        dense=list(description.get("dense", [])),
        sparse=sparse_columns,
        events=event_columns,
        labels={task: str(column) for task, column in description["labels"].items()},
        domain=str(domain["column"]) if domain else None,
        schema=schema,
    )


def _size(entry: Any, where: str, name: str) -> int:
    value = entry.get(name) if isinstance(entry, Mapping) else None
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"mapping: {where} needs {name}, a whole number of at least 1; got {entry!r}")
    return value


class TableSource:
    """The splits of a set of tables (`Source` of sources.py)."""

    def __init__(self, folder: Path, mapped: Mapped) -> None:
        self.folder, self.mapped, self.schema = folder, mapped, mapped.schema
        self._rows: dict[str, int] = {}

    def files(self, split: str) -> list[Path]:
        """In order of their names. Raises FileNotFoundError for a split without files, ValueError for an unknown one."""
        if split not in self.mapped.splits:
            raise ValueError(f"split must be one of {tuple(self.mapped.splits)}, got {split!r}")
        found = sorted({path for pattern in self.mapped.splits[split] for path in self.folder.glob(pattern)})
        if not found:
            raise FileNotFoundError(f"splits.{split}: no file in {self.folder} matches {self.mapped.splits[split]}")
        return found

    def train(self, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, workers: int = 0) -> TableStream:
        """Batches in the order of the files, which is that of time. ``seed`` and ``workers`` change nothing."""
        return TableStream(self, "train", batch_size, rank, world_size)

    def held_out(self, split: str, batch_size: int = 256, limit: int | None = None) -> Iterator[Batch]:
        left = limit
        for batch in TableStream(self, split, batch_size, drop_last=False):
            if left is not None:
                batch = {k: v[:left] for k, v in batch.items()}
                left -= len(next(iter(batch.values())))
            yield batch
            if left == 0:
                return

    def steps_per_epoch(self, batch_size: int) -> int:
        return self.rows("train") // batch_size

    def rows(self, split: str) -> int:
        if split not in self._rows:
            self._rows[split] = sum(rows for path in self.files(split) for rows in _group_sizes(path))
        return self._rows[split]

    def describe(self) -> str:
        return f"{self.rows('train'):,} training samples in {len(self.files('train'))} files of {self.folder}"


class TableStream:
    """Batches of one split, read by row groups. Iterating gives the rest of the epoch; ``endless`` goes on.

    Process ``rank`` of ``world_size`` takes every ``world_size``-th batch, and all take equally many. ``state_dict`` holds
    the epoch and the number of batches given; a resumed stream skips whole row groups to get there.
    """

    def __init__(
        self, source: TableSource, split: str, batch_size: int, rank: int = 0, world_size: int = 1, drop_last: bool = True
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got {rank} of {world_size}")
        self._source, self._split, self._rank = source, split, rank
        self.batch_size, self.world_size, self._drop_last = batch_size, world_size, drop_last
        self.epoch = self.position = 0
        self._rows = source.rows(split)
        if len(self) == 0:
            raise ValueError(f"{split} holds {self._rows} rows, too few for {world_size} batches of {batch_size}")

    def __len__(self) -> int:
        """Batches per epoch and process."""
        full, rest = divmod(self._rows, self.batch_size)
        return (full + (rest > 0 and not self._drop_last)) // self.world_size

    def __iter__(self) -> Iterator[Batch]:
        first = self.position
        for number in range(first, len(self)):
            if number == first:
                reader = _Reader(self._source.files(self._split), self._source.mapped.columns)
            start = (number * self.world_size + self._rank) * self.batch_size
            table = reader.rows(start, min(start + self.batch_size, self._rows))
            self.position += 1
            yield to_batch(table, self._source.mapped)
        self.epoch, self.position = self.epoch + 1, 0

    def endless(self) -> Iterator[Batch]:
        while True:
            yield from self

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state belongs to other data, another batch size or number of processes."""
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise ValueError(f"state has {name}={state.get(name)!r}, this stream has {mine!r}")
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"rows": self._rows, "batch_size": self.batch_size, "world_size": self.world_size}


class _Reader:
    """Rows by number, from files read forward; the row groups that the last request touched are kept."""

    def __init__(self, files: Sequence[Path], columns: list[str]) -> None:
        self._columns = columns
        self._groups: list[tuple[int, int, Path, int]] = []  # first row, end, file, number in the file
        at = 0
        for path in files:
            for number, rows in enumerate(_group_sizes(path)):
                self._groups.append((at, at + rows, path, number))
                at += rows
        self._kept: dict[tuple[Path, int], Any] = {}

    def rows(self, start: int, end: int) -> Any:
        import pyarrow as pa

        parts, used = [], {}
        for first, last, path, number in self._groups:
            if first < end and last > start:
                table = self._kept.get((path, number))
                if table is None:
                    table = _read_group(path, number, self._columns)
                used[path, number] = table
                lower = max(start - first, 0)
                parts.append(table.slice(lower, min(end, last) - first - lower))
        self._kept = used
        return pa.concat_tables(parts, promote_options="permissive")


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() in (".csv", ".tsv")


def _group_sizes(path: Path) -> list[int]:
    if _is_csv(path):
        return [rows for _, rows in _csv_groups(path)]
    meta = _arrow("parquet").ParquetFile(path).metadata
    return [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]


def _read_group(path: Path, number: int, columns: list[str]) -> Any:
    missing_from = f"mapping: {path.name} has no column"
    if not _is_csv(path):
        file = _arrow("parquet").ParquetFile(path)
        absent = [c for c in columns if c not in file.schema_arrow.names]
        if absent:
            raise ValueError(f"{missing_from} {absent}; it has {file.schema_arrow.names}")
        return file.read_row_group(number, columns=columns)
    return _read_csv_group(path, number, columns, missing_from)


@lru_cache(maxsize=1024)
def _csv_groups(path: Path) -> tuple[tuple[int, int], ...]:
    """(byte at which it starts, rows) of every group of ``CSV_ROWS`` lines. One line is one row."""
    groups: list[list[int]] = []
    with open(path, "rb") as file:
        at = len(file.readline())
        for number, line in enumerate(file):
            if number % CSV_ROWS == 0:
                groups.append([at, 0])
            groups[-1][1] += 1
            at += len(line)
    return tuple((start, rows) for start, rows in groups)


def _read_csv_group(path: Path, number: int, columns: list[str], missing_from: str) -> Any:
    import pyarrow as pa

    start, count = _csv_groups(path)[number]
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with open(path, "rb") as file:
        (names,) = csv.reader([file.readline().decode("utf-8")], delimiter=delimiter)
        absent = [c for c in columns if c not in names]
        if absent:
            raise ValueError(f"{missing_from} {absent}; it has {names}")
        file.seek(start)
        lines = [line.decode("utf-8") for line in itertools.islice(file, count)]
    rows = list(csv.DictReader(lines, names, delimiter=delimiter))
    return pa.table({c: [[float(x) for x in (row[c] or "").split()] for row in rows] for c in columns})


def _arrow(module: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise ImportError("data: reading tables needs pyarrow; pip install 'gemopt[data]'") from error


def to_batch(table: Any, mapped: Mapped) -> Batch:
    """A pyarrow table as a padded batch of the mapping's schema."""
    schema, size = mapped.schema, table.num_rows
    dense = [_column(table, c, 1, np.float32)[0][:, 0] for c in mapped.dense]
    out: dict[str, NDArray[Any]] = {"dense": np.stack(dense, 1) if dense else np.zeros((size, 0), np.float32)}
    for name, column in mapped.sparse.items():
        feature = schema.sparse[name]
        ids = _ids(table, column, feature.max_ids, feature.n_ids)[0]
        out[f"sparse_{name}"] = ids[:, 0] if feature.max_ids == 1 else ids
    for name, (fields, age) in mapped.events.items():
        event, lengths = schema.events[name], {}
        for field, column in fields.items():
            out[f"{name}_{field}"], lengths[column] = _ids(table, column, event.max_len, event.fields[field], last=True)
        if age:
            out[f"{name}_age"], lengths[age] = _column(table, age, event.max_len, np.float32, last=True)
        else:
            out[f"{name}_age"] = np.zeros((size, event.max_len), np.float32)
        first = next(iter(lengths.values()))
        unequal = [c for c, n in lengths.items() if not np.array_equal(n, first)]
        if unequal:
            raise ValueError(f"columns {unequal} of event {name} have lists of other lengths than {next(iter(lengths))}")
        out[f"{name}_length"] = first
    domain = _ids(table, mapped.domain, 1, schema.n_domains)[0][:, 0] if mapped.domain else np.zeros(size, np.int64)
    out["domain"] = domain
    for task, column in mapped.labels.items():
        label = _column(table, column, 1, np.float32)[0][:, 0]
        if not np.isin(label, (0.0, 1.0)).all():
            raise ValueError(f"labels.{task}: column {column} must hold 0 and 1, got {np.unique(label)[:5]}")
        out[f"label_{task}"] = label
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in out.items()}


def _ids(table: Any, column: str, width: int, n_ids: int, last: bool = False) -> tuple[NDArray[Any], NDArray[np.int64]]:
    ids, length = _column(table, column, width, np.int64, last)
    if ids.size and (ids.min() < 0 or ids.max() >= n_ids):
        raise ValueError(f"column {column}: ids must be in [0, {n_ids}), got {ids.min()} to {ids.max()}")
    return ids, length


def _column(table: Any, column: str, width: int, dtype: Any, last: bool = False) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """A column of numbers or lists as [B, width], padded with 0 on the right, and the lengths [B] (at most ``width``).

    Longer lists keep their first values, or with ``last`` their last. Missing values are 0, missing lists empty.
    """
    import pyarrow as pa

    array = table.column(column).combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        values = np.asarray(array.fill_null(0)).astype(dtype)
        return values[:, None], np.ones(len(values), np.int64)
    flat = np.asarray(array.flatten().fill_null(0)).astype(dtype)
    whole = np.asarray(array.value_lengths().fill_null(0)).astype(np.int64)
    ends = np.cumsum(whole)
    length = np.minimum(whole, width)
    first = ends - length if last else ends - whole
    position = first[:, None] + np.arange(width)
    real = np.arange(width) < length[:, None]
    values = flat[np.where(real, position, 0)] if len(flat) else np.zeros(position.shape, dtype)
    return (values * real).astype(dtype), length


def open_tables(path: str, max_len: int | None = None) -> TableSource:
    """A folder with a mapping called ``gemopt.json``, or the path of a mapping whose folder holds the tables."""
    given = Path(path)
    file = given / MAPPING if given.is_dir() else given
    if not file.is_file():
        raise FileNotFoundError(f"data: no mapping at {file}; it describes the columns (see model_zoo/data/tables.py)")
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"data: {file} is not JSON: {error}") from error
    return TableSource(file.parent, read_mapping(description, max_len))
