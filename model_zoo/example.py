"""A schema and random batches of the shape that models expect, for tests, figures and first tries."""

from __future__ import annotations

import torch
from torch import Tensor

from .data.schema import EventType, Schema, SparseFeature

DAY = 86_400


def example_schema(
    n_events: int = 2, max_len: int = 16, n_sparse: int = 3, n_ids: int = 50, n_dense: int = 4, n_domains: int = 2
) -> Schema:
    """``n_events`` histories with an item and a category each; ``n_sparse`` features, of which the first is the candidate
    item, from the events' table, and the second has up to three ids; two tasks."""
    names = ["item", "tags", *(f"f{i}" for i in range(2, n_sparse))][:n_sparse]
    sparse = {name: SparseFeature(n_ids, 3 if name == "tags" else 1) for name in names}
    events = {f"event{i}": EventType({"item": n_ids, "category": 10}, max_len) for i in range(n_events)}
    tables = {name: "item" for name in ("item", *(f"{e}_item" for e in events)) if name in sparse or name not in names}
    tables |= {f"{e}_category": "category" for e in events}
    return Schema(n_dense, sparse, events, ("ctr", "cvr"), n_domains, tables)


def example_batch(
    schema: Schema,
    batch_size: int = 4,
    fill: float = 0.5,
    seed: int = 0,
    lengths: dict[str, list[int]] | None = None,
    widths: dict[str, int] | None = None,
) -> dict[str, Tensor]:
    """A random batch as in data/schema.py.

    Args:
        fill: mean length as a share of ``max_len``; lengths are uniform around it, and 0 is among them below 0.5.
        lengths: lengths of a history, instead of random ones. widths: padded length of a history, its ``max_len``
            where it is not named.
    """
    if not 0 <= fill <= 1:
        raise ValueError(f"fill: got {fill}; allowed: 0 to 1")
    g = torch.Generator().manual_seed(seed)
    b = batch_size if not lengths else len(next(iter(lengths.values())))
    batch = {
        "dense": torch.randn(b, schema.n_dense, generator=g),
        "domain": torch.randint(0, schema.n_domains, (b,), generator=g),
    }
    for name, feature in schema.sparse.items():
        shape = (b,) if feature.max_ids == 1 else (b, feature.max_ids)
        batch[f"sparse_{name}"] = torch.randint(0, feature.n_ids, shape, generator=g)
    for name, event in schema.events.items():
        longest = event.max_len
        length = torch.randint(_shortest(longest, fill), _longest(longest, fill) + 1, (b,), generator=g)
        if lengths and name in lengths:
            length = torch.tensor(lengths[name])
        width = (widths or {}).get(name, longest)
        inside = torch.arange(width) < length[:, None]
        for field, n_ids in event.fields.items():
            ids = torch.randint(1, n_ids, (b, longest), generator=g)  # drawn at full width: widths only cut
            batch[f"{name}_{field}"] = ids[:, :width] * inside
        gaps = torch.rand(b, longest, generator=g) * DAY
        batch[f"{name}_age"] = gaps.flip(1).cumsum(1).flip(1)[:, :width] * inside
        batch[f"{name}_length"] = length
    for task in schema.tasks:
        batch[f"label_{task}"] = torch.randint(0, 2, (b,), generator=g).float()
    return batch


def _shortest(longest: int, fill: float) -> int:
    return max(0, round((2 * fill - 1) * longest))


def _longest(longest: int, fill: float) -> int:
    return min(longest, round(2 * fill * longest))
