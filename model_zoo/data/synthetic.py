"""Endless synthetic click data of the published shape, with a planted signal and a known best normalised entropy.

The shape follows what is public of Meta's GEM and Kunlun (arXiv:2602.10016): ten and more event types, heavy-tailed
histories up to thousands of events, hundreds of sparse features, several domains and tasks.

The signal of one sample, candidate of category c, in domain d:

    m_e   = sum_j exp(-age_j / tau_e) [category_j = c] / sum_j exp(-age_j / tau_e)      over the events j of type e
    logit = bias_d + gate(segment, d) * sum_e s_e tanh(3 m_e)                           history x candidate x user
            + <z(segment), z'(category)> + <z(device), z'(hour)>                        low-rank crosses of features
            + quality(item) + 0.7 sin(2 x_0) + 0.5 x_1 x_2                              candidate and dense features
    p(ctr) = noise + (1 - 2 noise) sigmoid(logit),        p(cvr) = p(ctr) sigmoid(conversion logit)

The labels are drawn with these probabilities, which depend on nothing that a model does not see: no model can do better
than ``p`` itself, and its normalised entropy is E[H(p)] / H(E[p]) (`Synthetic.best_ne`).

Sample i depends on the seed and i alone (hashing.py). The index is the time: a later split is a later range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from . import hashing as h
from .batches import Batch
from .schema import EventType, Schema, SparseFeature

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

TASKS = ("ctr", "cvr")
HOUR = 3600.0
SPLIT_STRIDE = 10**9  # samples of validation and test start here and at twice this


@dataclass(frozen=True)
class SyntheticConfig:
    """Sizes. ``fill`` is the mean length of a history over ``max_len``: about so for ``heavy`` (log-normal, cut at
    ``max_len``, one in ten empty), exact for ``uniform`` (from ``(2 fill - 1) max_len`` or 1 up to the maximum that gives
    the mean, the distribution in which jagged attention kernels are usually measured). ``noise`` is the share of labels
    that are flipped."""

    n_events: int = 4
    max_len: int = 64
    fill: float = 0.3
    lengths: Literal["heavy", "uniform"] = "heavy"
    n_sparse: int = 12
    n_dense: int = 8
    n_users: int = 1000
    n_items: int = 512
    n_categories: int = 16
    n_domains: int = 3
    noise: float = 0.05

    def __post_init__(self) -> None:
        least = {"n_events": 1, "max_len": 1, "n_sparse": 7, "n_dense": 4, "n_users": 1, "n_categories": 2, "n_domains": 1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {getattr(self, name)}")
        if self.n_items < self.n_categories:
            raise ValueError(f"n_items must be at least n_categories = {self.n_categories}, got {self.n_items}")
        if self.lengths not in ("heavy", "uniform"):
            raise ValueError(f"lengths must be 'heavy' or 'uniform', got {self.lengths!r}")
        if not 0 < self.fill <= 1:
            raise ValueError(f"fill must be in (0, 1], got {self.fill}")
        if not 0 <= self.noise < 0.5:
            raise ValueError(f"noise must be in [0, 0.5), got {self.noise}")

    @classmethod
    def size(cls, name: str, **overrides: Any) -> SyntheticConfig:
        """One of ``SIZES``, with fields replaced."""
        if name not in SIZES:
            raise ValueError(f"the size of synthetic data must be one of {tuple(SIZES)}, got {name!r}")
        return replace(SIZES[name], **overrides)


SIZES: dict[str, SyntheticConfig] = {
    "tiny": SyntheticConfig(n_events=3, max_len=24, n_sparse=7, n_dense=4, n_users=64, n_items=64, n_categories=8),
    "small": SyntheticConfig(),
    "base": SyntheticConfig(10, 512, 0.3, "heavy", 64, 32, 100_000, 100_000, 64, 3),
    "large": SyntheticConfig(12, 2048, 0.3, "heavy", 300, 64, 1_000_000, 1_000_000, 256, 3),
}


class Synthetic:
    """The data set of one configuration and seed: ``schema``, batches of any sample indices, and what is best."""

    def __init__(self, config: SyntheticConfig | None = None, seed: int = 0) -> None:
        self.config, self.seed = config or SyntheticConfig(), seed
        self.events = tuple(f"event{e}" for e in range(self.config.n_events))
        self.schema = self._schema()

    def split(self, name: str, n: int) -> SyntheticSamples:
        """The first ``n`` samples of ``train``, ``valid`` or ``test``; later splits are later in time."""
        starts = {"train": 0, "valid": SPLIT_STRIDE, "test": 2 * SPLIT_STRIDE}
        if name not in starts:
            raise ValueError(f"split must be one of {tuple(starts)}, got {name!r}")
        if not 1 <= n <= SPLIT_STRIDE:
            raise ValueError(f"n must be in [1, {SPLIT_STRIDE}], got {n}")
        return SyntheticSamples(self, starts[name], n)

    def lengths(self, index: Ints) -> dict[str, Ints]:
        """Events of every history [B]."""
        return {name: self._length(e, np.asarray(index)) for e, name in enumerate(self.events)}

    def batch(self, index: Ints, pad_to: int | Literal["max", "batch"] = "max") -> Batch:
        """The samples ``index`` [B] as a batch of ``schema`` (schema.py).

        ``pad_to``: the padded length of histories, which keep their most recent events; ``"max"`` for ``max_len``,
        ``"batch"`` for each history's own longest, at least 1.
        """
        drawn = self._draw(index)
        context = drawn.context
        out: dict[str, NDArray[Any]] = {f"sparse_{name}": ids for name, ids in context.sparse.items()}
        out |= {"dense": context.dense.astype(np.float32), "domain": context.domain}
        for name, length, history in zip(self.events, drawn.lengths, drawn.histories, strict=True):
            longest = history["age"].shape[1]
            width = {"max": self.config.max_len, "batch": longest}.get(str(pad_to), pad_to)
            kept = np.minimum(length, int(width))
            rank = kept[:, None] - 1 - np.arange(int(width))  # 0 is the most recent event
            at = np.clip(rank, 0, longest - 1)
            for field, values in history.items():
                padded = np.take_along_axis(values, at, axis=1) * (rank >= 0)
                out[f"{name}_{field}"] = padded.astype(np.float32) if field == "age" else padded
            out[f"{name}_length"] = kept
        for task, labels in self._labels(drawn).items():
            out[f"label_{task}"] = labels
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in out.items()}

    # -- what is true ------------------------------------------------------------------------------
    def probabilities(self, index: Ints) -> dict[str, Floats]:
        """The probability [B] of every label being 1, given all that a model sees."""
        return self._probabilities(self._draw(index))

    def labels(self, index: Ints) -> dict[str, NDArray[np.float32]]:
        """0 or 1 [B] for every task. A conversion is a click first."""
        return self._labels(self._draw(index))

    def best_ne(self, index: Ints) -> dict[str, float]:
        """The expected normalised entropy of the true probabilities, by task, over the samples ``index``."""
        return {task: float(entropy(p).mean() / entropy(p.mean())) for task, p in self.probabilities(index).items()}

    def _probabilities(self, drawn: _Draw) -> dict[str, Floats]:
        context, config = drawn.context, self.config
        matches = np.stack([self._match(e, drawn) for e in range(config.n_events)])
        signs = np.where(np.arange(config.n_events) % 3 == 2, -1.0, 1.0) * 3.0 / np.sqrt(config.n_events)
        taste = (signs[:, None] * np.tanh(3 * matches)).sum(axis=0)
        gate = 0.4 + 1.2 * h.uniform(self.seed, "gate", context.segment, context.domain)
        x = context.dense
        logit = (
            -1.2
            + 0.6 * h.normal(self.seed, "domain bias", context.domain)
            + gate * taste
            + self._cross("segment", context.segment, "category", context.category)
            + self._cross("device", context.sparse["device"], "hour", context.sparse["hour"])
            + 0.3 * h.normal(self.seed, "quality", context.item)
            + 0.7 * np.sin(2 * x[:, 0])
            + 0.5 * x[:, 1] * x[:, 2]
        )
        click = config.noise + (1 - 2 * config.noise) * sigmoid(logit)
        buy = sigmoid(0.8 * x[:, 3] + 0.8 * h.normal(self.seed, "price", context.category) + 2 * matches[0] - 0.8)
        return {"ctr": click, "cvr": click * buy}

    def _labels(self, drawn: _Draw) -> dict[str, NDArray[np.float32]]:
        threshold = h.uniform(self.seed, "label", drawn.index)
        return {task: (threshold < p).astype(np.float32) for task, p in self._probabilities(drawn).items()}

    # -- how samples come about --------------------------------------------------------------------
    def _draw(self, index: Ints) -> _Draw:
        index = np.asarray(index, dtype=np.int64)
        context, lengths, histories = self._context(index), [], []
        for e in range(self.config.n_events):
            lengths.append(self._length(e, index))
            histories.append(self._history(e, index, context, max(int(lengths[-1].max(initial=0)), 1)))
        return _Draw(index, context, lengths, histories)

    def _context(self, index: Ints) -> _Context:
        """Everything of a sample but its histories. Ids start at 1."""
        c, seed = self.config, self.seed
        user = h.zipf(seed, "user", c.n_users, index)
        # three interests of the user; the first is the recent one
        interests = h.integers(seed, "interest", c.n_categories, user[:, None], np.arange(3))
        chosen = np.take_along_axis(interests, h.integers(seed, "which", 3, index)[:, None], axis=1)[:, 0]
        random = h.integers(seed, "candidate", c.n_categories, index)
        category = np.where(h.uniform(seed, "relevant", index) < 0.5, chosen, random)
        item = self._item_of(category, "candidate item", index)
        segment = h.integers(seed, "segment", 8, user)
        sparse = {
            "user": user + 1,
            "segment": segment + 1,
            "item": item + 1,
            "category": category + 1,
            "device": h.integers(seed, "device", 4, index) + 1,
            "hour": h.integers(seed, "hour", 24, index) + 1,
            "tags": self._tags(item),
        }
        for name, feature in self._fillers().items():  # of no consequence: a model has to find out
            sparse[name] = h.zipf(seed, name, feature.n_ids - 1, index) + 1
        dense = h.normal(seed, "dense", index[:, None], np.arange(c.n_dense))
        domain = h.integers(seed, "domain", c.n_domains, index)
        return _Context(sparse, dense, domain, interests, segment, item, category)

    def _item_of(self, category: Ints, stream: str, *indices: Any) -> Ints:
        """A popular item of the category: items of category c are c, c + C, c + 2 C, ..."""
        count = self.config.n_items // self.config.n_categories
        return category + self.config.n_categories * h.zipf(self.seed, stream, count, *indices)

    def _tags(self, item: Ints) -> Ints:
        """[B, 4]: one to four tags of the item."""
        tags = h.integers(self.seed, "tag", 50, item[:, None], np.arange(4)) + 1
        return tags * (np.arange(4) <= h.integers(self.seed, "n tags", 4, item)[:, None])

    def _length(self, e: int, index: Ints) -> Ints:
        c = self.config
        if c.lengths == "uniform":
            low = max(1, round((2 * c.fill - 1) * c.max_len))
            high = c.max_len if c.fill >= 0.5 else max(1, round(2 * c.fill * c.max_len))
            return low + h.integers(self.seed, "length", high - low + 1, index, e)
        drawn = c.fill * c.max_len / 0.9 * np.exp(h.normal(self.seed, "length", index, e) - 0.5)
        length = np.minimum(np.ceil(drawn), c.max_len).astype(np.int64)
        return length * (h.uniform(self.seed, "empty", index, e) >= 0.1)

    def _history(self, e: int, index: Ints, context: _Context, width: int) -> dict[str, Ints | Floats]:
        """The ``width`` most recent events of type e, most recent first, [B, width] each."""
        c, seed, row = self.config, self.seed, index[:, None]
        rank = np.arange(width)
        gaps = np.exp(1.5 * h.normal(seed, "gap", row, e, rank)) * HOUR
        age = np.cumsum(gaps, axis=1)
        which = 1 + h.integers(seed, "old interest", 2, row, e, rank)
        which = np.where((age < self._tau(e)) & (h.uniform(seed, "recent", row, e, rank) < 0.7), 0, which)
        interest = np.take_along_axis(context.interests, which, axis=1)
        noise = h.integers(seed, "event category", c.n_categories, row, e, rank)
        category = np.where(h.uniform(seed, "on topic", row, e, rank) < 0.6, interest, noise)
        item = self._item_of(category, "event item", row, e, rank)
        surface = h.integers(seed, "surface", 8, row, e, rank)
        return {"item": item + 1, "category": category + 1, "surface": surface + 1, "age": age}

    def _match(self, e: int, drawn: _Draw) -> Floats:
        """m_e of the formula above; 0 for an empty history."""
        history = drawn.histories[e]
        real = np.arange(history["age"].shape[1]) < drawn.lengths[e][:, None]
        weight = np.exp(-history["age"] / self._tau(e)) * real
        total = weight.sum(axis=1)
        same = (weight * (history["category"] == drawn.context.category[:, None] + 1)).sum(axis=1)
        return np.where(total > 0, same / np.where(total > 0, total, 1), 0.0)

    def _tau(self, e: int) -> float:
        """How long events of a type matter, in seconds: from half a day to several days."""
        return 12 * HOUR * (1 + e % 4)

    def _cross(self, left: str, a: Ints, right: str, b: Ints) -> Floats:
        """A bilinear form of rank 2 of two ids, of unit variance times 0.7."""
        rank = np.arange(2)
        x = h.normal(self.seed, f"cross {left}", a[:, None], rank)
        y = h.normal(self.seed, f"cross {right}", b[:, None], rank)
        return 0.7 * (x * y).sum(axis=1) / np.sqrt(2)

    def _fillers(self) -> dict[str, SparseFeature]:
        """Features beyond the seven that mean something, of 10 to 10,000 ids."""
        names = [f"extra{i:03d}" for i in range(self.config.n_sparse - 7)]
        return {name: SparseFeature(1 + 10 ** (1 + i % 4)) for i, name in enumerate(names)}

    def _schema(self) -> Schema:
        c = self.config
        sparse = {
            "user": SparseFeature(c.n_users + 1),
            "segment": SparseFeature(9),
            "item": SparseFeature(c.n_items + 1),
            "category": SparseFeature(c.n_categories + 1),
            "device": SparseFeature(5),
            "hour": SparseFeature(25),
            "tags": SparseFeature(51, max_ids=4),
            **self._fillers(),
        }
        fields = {"item": c.n_items + 1, "category": c.n_categories + 1, "surface": 9}
        shared = {f"{event}_{field}": field for event in self.events for field in ("item", "category", "surface")}
        return Schema(
            n_dense=c.n_dense,
            sparse=sparse,
            events={event: EventType(dict(fields), c.max_len) for event in self.events},
            tasks=TASKS,
            n_domains=c.n_domains,
            tables={"item": "item", "category": "category"} | shared,
        )


@dataclass(frozen=True)
class _Context:
    sparse: dict[str, Ints]
    dense: Floats
    domain: Ints
    interests: Ints  # [B, 3]
    segment: Ints
    item: Ints
    category: Ints


@dataclass(frozen=True)
class _Draw:
    """Samples before padding: ``histories`` have their most recent event first, [B, longest] per field."""

    index: Ints
    context: _Context
    lengths: list[Ints]
    histories: list[dict[str, Any]]


@dataclass(frozen=True)
class SyntheticSamples:
    """``n`` consecutive samples, as a sample set for `BatchIterator`."""

    source: Synthetic
    start: int
    n: int

    @property
    def schema(self) -> Schema:
        return self.source.schema

    @property
    def max_len(self) -> int:
        return self.source.config.max_len

    def __len__(self) -> int:
        return self.n

    def collate(self, index: Any, pad_to: int | Literal["max", "batch"] = "max") -> Batch:
        """The samples ``index`` [B] of this range as a padded batch."""
        return self.source.batch(self.start + np.asarray(index, dtype=np.int64), pad_to)

    def total_length(self) -> Ints:
        """[n]: events over all histories."""
        lengths = self.source.lengths(self.start + np.arange(self.n))
        return np.sum(list(lengths.values()), axis=0, dtype=np.int64)

    def fill(self, among: int = 4096) -> Mapping[str, float]:
        """Mean share of filled slots by history, from the first ``among`` samples."""
        lengths = self.source.lengths(self.start + np.arange(min(self.n, among)))
        return {name: float(values.mean()) / self.max_len for name, values in lengths.items()}

    def best_ne(self) -> dict[str, float]:
        """What no model can beat on these samples, in expectation over their labels."""
        starts = range(0, self.n, 1024)
        p = [self.source.probabilities(self.start + np.arange(a, min(a + 1024, self.n))) for a in starts]
        joined = {task: np.concatenate([x[task] for x in p]) for task in TASKS}
        return {task: float(entropy(x).mean() / entropy(x.mean())) for task, x in joined.items()}


def sigmoid(x: Floats) -> Floats:
    return np.exp(-np.logaddexp(0.0, -x))


def entropy(p: Any) -> Any:
    """Nats of a coin with this probability of heads; 0 at 0 and 1."""
    p = np.asarray(p, dtype=np.float64)
    return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0) - np.where(
        p < 1, (1 - p) * np.log1p(-np.where(p < 1, p, 0)), 0
    )
