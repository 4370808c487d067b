"""Where batches of the contract in schema.py come from: one interface for all data sets, and the names that open them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .batches import Batch, BatchIterator, Samples
from .movielens_events import load_event_samples
from .schema import Schema
from .synthetic import SIZES, Synthetic, SyntheticConfig

SPLITS = ("train", "valid", "test")
MOVIELENS_MAX_LEN = 200
HELD_OUT = 8192  # samples of the synthetic validation and test periods


class BatchStream(Protocol):
    """Training batches without end; ``state_dict`` goes on at the next one."""

    epoch: int

    def endless(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Source(Protocol):
    """A data set, split by time."""

    schema: Schema

    def train(self, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, workers: int = 0) -> BatchStream: ...

    def held_out(self, split: str, batch_size: int = 256, limit: int | None = None) -> Iterator[Batch]:
        """The samples of a split once, or its first ``limit``, in batches of similar lengths or in file order."""
        ...

    def steps_per_epoch(self, batch_size: int) -> int: ...

    def describe(self) -> str: ...


class IndexedSource:
    """Splits whose samples are numbered: MovieLens and the synthetic set."""

    def __init__(self, samples: Mapping[str, Any], schema: Schema, order: Any = "shuffled") -> None:
        self.samples, self.schema, self.order = dict(samples), schema, order

    def train(self, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, workers: int = 0) -> BatchIterator:
        # The last, smaller batch of an epoch is dropped: every step then has the same number of samples.
        return BatchIterator(
            self.samples["train"], batch_size, order=self.order, seed=seed, drop_last=True, rank=rank,
            world_size=world_size, workers=workers,
        )  # fmt: skip

    def held_out(self, split: str, batch_size: int = 256, limit: int | None = None) -> Iterator[Batch]:
        return batches_by_length(self.samples[split], batch_size, limit)

    def steps_per_epoch(self, batch_size: int) -> int:
        return len(self.samples["train"]) // batch_size

    def describe(self) -> str:
        samples = self.samples["train"]
        filled = ", ".join(f"{name} {share:.0%}" for name, share in samples.fill().items())
        return f"{len(samples):,} training samples; share of {samples.max_len} slots filled: {filled}"


def batches_by_length(samples: Samples, batch_size: int = 256, limit: int | None = None) -> Iterator[Batch]:
    """The first ``limit`` samples, sorted by length and padded to their own maximum: fast, and it changes no result."""
    order = np.argsort(samples.total_length()[:limit], kind="stable")
    for start in range(0, len(order), batch_size):
        yield samples.collate(order[start : start + batch_size], "batch")


def open_source(data: str, max_len: int | None = None, samples: int | None = None, seed: int = 0) -> Source:
    """Open a data set by name.

    Args:
        data: ``movielens``; ``synthetic`` or ``synthetic:SIZE`` (tiny, small, base, large); or the folder or the mapping
            file of a set of tables (tables.py).
        max_len: longest history, None for the data's own (200 for MovieLens).
        samples: of the synthetic training period, None for 1,000,000.
        seed: of the synthetic data.

    Raises:
        ValueError: no such name; the message says what is allowed.
        FileNotFoundError: the data is not there.
    """
    name, _, size = data.partition(":")
    if name == "movielens" and not size:
        splits = load_event_samples(MOVIELENS_MAX_LEN if max_len is None else max_len)
        return IndexedSource(splits, splits["train"].schema)
    if name == "synthetic":
        overrides = {} if max_len is None else {"max_len": max_len}
        source = Synthetic(SyntheticConfig.size(size or "small", **overrides), seed)
        counts = {"train": 1_000_000 if samples is None else samples, "valid": HELD_OUT, "test": HELD_OUT}
        drawn = {split: source.split(split, n) for split, n in counts.items()}
        return IndexedSource(drawn, source.schema, order="file")  # already random, and the order is that of time
    if Path(data).exists():
        from .tables import open_tables

        return open_tables(data, max_len)
    sizes = ", ".join(f"synthetic:{s}" for s in SIZES)
    raise ValueError(f"data must be movielens, synthetic, {sizes} or the path of tables, got {data!r}")
