"""MovieLens-100K in the batch contract of schema.py: ratings as several event types, and features of all kinds.

The samples, their label (``ctr``: rated at least 4) and their splits by time are those of movielens.py, so that models of
both views can be compared. Everything that a sample holds lies strictly before its rating.

    events   liked, neutral, disliked: item, genre, year and rating of the movie, age
    sparse   user, age, gender, occupation; item, year, genres
    dense    how much and how well the user rated before, how often and how well the item was rated before, times
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from .batches import Batch
from .movielens import HISTORIES, SPLITS, MovieLens, history_bounds, load_movielens
from .schema import EventType, Schema, SparseFeature

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

EVENTS = ("liked", "neutral", "disliked")
FIELDS = ("item", "genre", "year", "rating")
DAY = 86400.0
PRIOR = 5.0  # ratings at the overall rate that are added to every count before a share is taken


@dataclass(frozen=True)
class EventHistory:
    """A flat list of events and for each sample the range ``[first, last)`` of it."""

    fields: dict[str, Ints]  # each [events]
    time: Ints  # [events], Unix seconds
    first: Ints  # [samples]
    last: Ints  # [samples]


@dataclass(frozen=True)
class EventSamples:
    """Samples of one period, for `BatchIterator`."""

    schema: Schema
    histories: dict[str, EventHistory]
    sparse: dict[str, Ints]
    dense: NDArray[np.float32]  # [samples, n_dense]
    label: NDArray[np.float32]
    time: Ints  # [samples]
    max_len: int

    def __len__(self) -> int:
        return len(self.label)

    def total_length(self) -> Ints:
        return np.sum([h.last - h.first for h in self.histories.values()], axis=0, dtype=np.int64)

    def fill(self) -> dict[str, float]:
        """Mean share of filled slots, by history."""
        return {name: float((h.last - h.first).mean()) / self.max_len for name, h in self.histories.items()}

    def collate(self, index: Any, pad_to: int | Literal["max", "batch"] = "max") -> Batch:
        """The samples ``index`` [B] as a batch of ``schema``; ``pad_to`` as for ``SampleSet.collate``."""
        index = np.asarray(index, dtype=np.int64)
        out: dict[str, NDArray[Any]] = {f"sparse_{name}": ids[index] for name, ids in self.sparse.items()}
        out |= {"dense": self.dense[index], "domain": np.zeros(len(index), np.int64), "label_ctr": self.label[index]}
        for name, history in self.histories.items():
            first, last = history.first[index], history.last[index]
            longest = max(int((last - first).max(initial=0)), 1)
            width = {"max": self.max_len, "batch": longest}.get(str(pad_to), pad_to)
            first = np.maximum(first, last - int(width))
            position = first[:, None] + np.arange(int(width))
            real = position < last[:, None]
            position = np.where(real, position, 0)
            for field, flat in history.fields.items():
                out[f"{name}_{field}"] = (flat[position] if len(flat) else np.zeros_like(position)) * real
            then = history.time[position] if len(history.time) else np.zeros_like(position)
            out[f"{name}_age"] = ((self.time[index][:, None] - then) * real).astype(np.float32)
            out[f"{name}_length"] = last - first
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in out.items()}


def load_event_samples(
    max_len: int = 200, events: tuple[str, ...] = EVENTS, min_history: int = 5
) -> dict[str, EventSamples]:
    """The samples of ``train``, ``valid`` and ``test``.

    Raises:
        ValueError: ``max_len`` is below 1, or ``events`` is no non-empty subset of liked, neutral, disliked, all.
        FileNotFoundError: the data set is not installed; the message names the command.
    """
    if max_len < 1:
        raise ValueError(f"max_len must be at least 1, got {max_len}")
    if not events or set(events) - set(HISTORIES):
        raise ValueError(f"events must be a non-empty subset of {HISTORIES}, got {events}")
    source = load_movielens()
    dense = dense_features(source)
    train = source.candidates("train", min_history)[0]
    mean, std = dense[train].mean(axis=0), dense[train].std(axis=0)
    standardised = ((dense - mean) / np.where(std > 0, std, 1)).astype(np.float32)
    return {split: _samples(source, split, max_len, events, min_history, standardised) for split in SPLITS}


def _samples(
    source: MovieLens, split: str, max_len: int, events: tuple[str, ...], min_history: int, dense: NDArray[np.float32]
) -> EventSamples:
    chosen, start, cut = source.candidates(split, min_history)
    user, item = source.event_user[chosen], source.event_item[chosen]
    histories = {}
    for name in events:
        kept = source.kept(name)
        items, last = source.event_item[kept], np.searchsorted(kept, cut)
        fields = {
            "item": items,
            "genre": source.item_genres[items, 0],
            "year": source.item_year[items],
            "rating": source.event_rating[kept],
        }
        first = np.maximum(np.searchsorted(kept, start), last - max_len)
        histories[name] = EventHistory(fields, source.event_time[kept], first.astype(np.int64), last.astype(np.int64))
    return EventSamples(
        schema=_schema(source, events, max_len, dense.shape[1]),
        histories=histories,
        sparse={
            "user": user,
            "age": source.user_age[user],
            "gender": source.user_gender[user],
            "occupation": source.user_occupation[user],
            "item": item,
            "year": source.item_year[item],
            "genres": source.item_genres[item],
        },
        dense=dense[chosen],
        label=(source.event_rating[chosen] >= 4).astype(np.float32),
        time=source.event_time[chosen],
        max_len=max_len,
    )


def dense_features(source: MovieLens) -> Floats:
    """[N, 8], for every event: log count and share of liked ratings before, of the user and of the item; log time since
    the user's first and latest rating, in days; the hour of the day on a circle."""
    time, liked = source.event_time, (source.event_rating >= 4).astype(np.float64)
    start, cut = history_bounds(source.event_user, time)
    by_user = _before(liked, start, cut)
    order = np.lexsort((time, source.event_item))
    item_start, item_cut = history_bounds(source.event_item[order], time[order])
    by_item = np.empty_like(by_user)
    by_item[order] = _before(liked[order], item_start, item_cut)
    none = cut == start
    since_first = np.where(none, 0, time - time[np.where(none, 0, start)]) / DAY
    since_last = np.where(none, 0, time - time[np.maximum(cut - 1, 0)]) / DAY
    angle = 2 * np.pi * (time % DAY) / DAY
    times = np.stack([np.log1p(since_first), np.log1p(since_last), np.sin(angle), np.cos(angle)], axis=1)
    return np.concatenate([by_user, by_item, times], axis=1)


def _before(liked: Floats, start: Ints, cut: Ints) -> Floats:
    """[N, 2]: log(1 + n) and the share of ones among the n entries ``[start, cut)``, drawn to one half."""
    total = np.r_[0.0, np.cumsum(liked)]
    count = (cut - start).astype(np.float64)
    share = (total[cut] - total[start] + PRIOR * 0.5) / (count + PRIOR)
    return np.stack([np.log1p(count), share], axis=1)


def _schema(source: MovieLens, events: tuple[str, ...], max_len: int, n_dense: int) -> Schema:
    sizes = source.vocabulary
    fields = {"item": sizes["item_id"], "genre": sizes["genre"], "year": sizes["item_year"], "rating": 6}
    shared = {f"{event}_{field}": field for event in events for field in FIELDS}
    return Schema(
        n_dense=n_dense,
        sparse={
            "user": SparseFeature(sizes["user_id"]),
            "age": SparseFeature(sizes["user_age"]),
            "gender": SparseFeature(sizes["user_gender"]),
            "occupation": SparseFeature(sizes["user_occupation"]),
            "item": SparseFeature(sizes["item_id"]),
            "year": SparseFeature(sizes["item_year"]),
            "genres": SparseFeature(sizes["genre"], max_ids=source.item_genres.shape[1]),
        },
        events={event: EventType(dict(fields), max_len) for event in events},
        tasks=("ctr",),
        tables={"item": "item", "year": "year", "genres": "genre"} | shared,
    )
