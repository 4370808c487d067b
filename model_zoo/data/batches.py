"""Padded batches from flat arrays, and an iterator over them that can stop and go on.

A history is a range of a flat event list, so a padded batch is one gather per feature: no loop over samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Batch = dict[str, Tensor]
Order = Literal["file", "shuffled", "by_length"]


class Samples(Protocol):
    """A numbered set of samples: what `BatchIterator` needs."""

    def __len__(self) -> int: ...

    def collate(self, index: Any, pad_to: int | Literal["max", "batch"] = "max") -> Batch: ...

    def total_length(self) -> Ints: ...


@dataclass(frozen=True)
class History:
    """Events of one kind in a flat list, and the range ``[first, last)`` of it that each sample sees."""

    item: Ints  # [events]
    genre: Ints  # [events]
    time: Ints  # [events], Unix seconds
    first: Ints  # [samples]
    last: Ints  # [samples]

    @property
    def length(self) -> Ints:
        return self.last - self.first


@dataclass(frozen=True)
class SampleSet:
    """Samples of one split; ``collate`` turns a list of sample numbers into a padded batch."""

    histories: dict[str, History]
    features: dict[str, Ints]  # each [samples, ...]
    label: NDArray[np.float32]  # [samples]
    time: Ints  # [samples], when the candidate was rated
    max_len: int
    n_gaps: int

    def __len__(self) -> int:
        return len(self.label)

    def total_length(self) -> Ints:
        """[samples]: events over all histories."""
        return np.sum([h.length for h in self.histories.values()], axis=0, dtype=np.int64)

    def fill(self) -> dict[str, float]:
        """Share of real events among the slots of a batch padded to ``max_len``, by history."""
        return {name: float(h.length.mean()) / self.max_len for name, h in self.histories.items()}

    def collate(self, index: Ints, pad_to: int | Literal["max", "batch"] = "max") -> Batch:
        """Right-padded tensors for the samples ``index`` [B].

        ``pad_to`` is the padded length L: a number (histories keep their most recent L events), ``"max"`` for
        the set's ``max_len``, or ``"batch"`` for each history's own longest in this batch (at least 1).

        Keys: every name in ``features`` [B, ...] int64; ``label`` [B] float32; and for each history h
        ``h_item``, ``h_genre``, ``h_gap`` [B, L] int64 with 0 as padding, and ``h_length`` [B] int64.
        """
        index = np.asarray(index, dtype=np.int64)
        batch = {name: torch.from_numpy(values[index]) for name, values in self.features.items()}
        batch["label"] = torch.from_numpy(self.label[index])
        for name, history in self.histories.items():
            first, last = history.first[index], history.last[index]
            if pad_to == "batch":
                width = max(int((last - first).max(initial=0)), 1)
            else:
                width = self.max_len if pad_to == "max" else int(pad_to)
            first = np.maximum(first, last - width)
            for key, values in self._padded(history, first, last, width, self.time[index]).items():
                batch[f"{name}_{key}"] = torch.from_numpy(values)
        return batch

    def _padded(self, history: History, first: Ints, last: Ints, width: int, now: Ints) -> dict[str, Ints]:
        position = first[:, None] + np.arange(width)
        real = position < last[:, None]
        position = np.where(real, position, 0)
        out: dict[str, Ints] = {"length": last - first}
        for key in ("item", "genre"):
            flat: Ints = getattr(history, key)
            out[key] = flat[position] * real if len(flat) else np.zeros_like(position)
        then = history.time[position] if len(history.time) else np.zeros_like(position)
        out["gap"] = time_gap_bucket(now[:, None] - then, self.n_gaps) * real
        return out


def time_gap_bucket(seconds: Ints, n_gaps: int) -> Ints:
    """1 + floor(log2(1 + seconds)), at most ``n_gaps - 1``; ages of events are heavy-tailed."""
    # frexp's exponent is floor(log2(x)) + 1 for x >= 1, exact where log2 would round
    _, exponent = np.frexp((1 + np.maximum(seconds, 0)).astype(np.float64))
    return np.clip(exponent.astype(np.int64), 1, n_gaps - 1)


class BatchIterator:
    """Batches of a set of samples, epoch after epoch, in an order fixed by ``seed``.

    ``order``: ``"file"``; ``"shuffled"`` anew each epoch; ``"by_length"``: samples sorted by total length and
    cut into batches, the batches shuffled (what one does to save padding without a compiler).
    ``state_dict`` and ``load_state_dict`` continue exactly at the next batch. Iterating gives the rest of the
    current epoch and then stops, so that ``for batch in it`` is one epoch.

    Process ``rank`` of ``world_size`` takes every ``world_size``-th batch of the same plan; what is left over at the end
    of an epoch is dropped, so that all take the same number of steps. All agree on ``state_dict``.

    ``workers`` threads make batches ahead of time; which batches come, and in what order, does not depend on them.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        *,
        order: Order = "shuffled",
        seed: int = 0,
        pad_to: int | Literal["max", "batch"] = "max",
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if order not in ("file", "shuffled", "by_length"):
            raise ValueError(f"order must be 'file', 'shuffled' or 'by_length', got {order!r}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got {rank} of {world_size}")
        if len(samples) == 0 or (drop_last and len(samples) < batch_size):
            raise ValueError(f"samples holds {len(samples)} samples, too few for a batch of {batch_size}")
        self.samples, self.batch_size, self.order, self.seed = samples, batch_size, order, seed
        self.pad_to, self.drop_last = pad_to, drop_last
        self.rank, self.world_size, self.workers = rank, world_size, workers
        if len(self) == 0:
            raise ValueError(
                f"samples holds {len(samples)} samples, too few for a batch of {batch_size} on each of {world_size}"
            )
        self.epoch = 0
        self.position = 0  # batches of this epoch already given
        self._plan: tuple[int, list[Ints]] | None = None

    def __len__(self) -> int:
        """Batches per epoch and process."""
        return self._planned() // self.world_size

    def _planned(self) -> int:
        """Batches per epoch over all processes."""
        full, rest = divmod(len(self.samples), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._ahead() if self.workers else map(self._batch, range(self.position, len(self))):
            self.position += 1  # counts what was given, not what was made ahead
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def _batch(self, number: int) -> Batch:
        """The ``number``-th batch of this epoch and process."""
        return self.samples.collate(self._batches()[number * self.world_size + self.rank], self.pad_to)

    def _ahead(self) -> Iterator[Batch]:
        """The rest of the epoch, two batches a worker in the making."""
        self._batches()  # the plan, before threads ask for it
        with ThreadPoolExecutor(self.workers) as pool:
            coming: deque[Future[Batch]] = deque()
            try:
                for number in range(self.position, len(self)):
                    coming.append(pool.submit(self._batch, number))
                    if len(coming) > 2 * self.workers:
                        yield coming.popleft().result()
                while coming:
                    yield coming.popleft().result()
            finally:  # a consumer that stops early waits for no more than what is being made
                pool.shutdown(wait=True, cancel_futures=True)

    def endless(self) -> Iterator[Batch]:
        """Epoch after epoch, for training by steps."""
        while True:
            yield from self

    def _batches(self) -> list[Ints]:
        if self._plan is None or self._plan[0] != self.epoch:
            self._plan = (self.epoch, self._make_plan())
        return self._plan[1]

    def _make_plan(self) -> list[Ints]:
        generator = np.random.default_rng([self.seed, self.epoch])
        n = len(self.samples)
        index = np.arange(n)
        if self.order != "file":
            index = generator.permutation(n)
        if self.order == "by_length":
            index = index[np.argsort(self.samples.total_length()[index], kind="stable")]
        batches = [index[i : i + self.batch_size] for i in range(0, n, self.batch_size)][: self._planned()]
        if self.order == "by_length":
            batches = [batches[i] for i in generator.permutation(len(batches))]
        return batches

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state belongs to other samples, another batch size, order or seed."""
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise ValueError(f"state has {name}={state.get(name)!r}, this iterator has {mine!r}")
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "samples": len(self.samples),
            "batch_size": self.batch_size,
            "order": self.order,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "world_size": self.world_size,
        }
