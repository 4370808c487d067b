"""Embedding tables: every id of a batch becomes a vector of one width.

    feature f of sample b:             e_f[b]    = pool_i table[f][ids[b, i]]      sum or mean over its real ids
    field c of event t of history h:   e_hc[b,t] = table[h, c][ids[b, t]]

Features that the schema gives the same table name share a table. Id 0 is padding: it gives the zero vector and gets no
gradient. Two backends compute the same numbers: ``torch`` (nn.Embedding on the padded ids) and ``torchrec``
(EmbeddingBagCollection and EmbeddingCollection over KeyedJaggedTensors, which TorchRec can shard).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.schema import Schema

BACKENDS = ("torch", "torchrec", "auto")
POOLINGS = ("sum", "mean")


class Embedded(NamedTuple):
    """``features[name]`` [B, dim]; ``events[history][field]`` [B, L, dim], zero where the id is 0 or past the length."""

    features: dict[str, Tensor]
    events: dict[str, dict[str, Tensor]]


def table_sizes(schema: Schema) -> dict[str, int]:
    """Rows of every table. Raises ValueError if two features share a table and disagree on its size."""
    sizes: dict[str, int] = {}
    wanted = {name: feature.n_ids for name, feature in schema.sparse.items()}
    wanted |= {f"{e}_{f}": n for e, event in schema.events.items() for f, n in event.fields.items()}
    for name, n_ids in wanted.items():
        table = table_of(schema, name)
        if sizes.setdefault(table, n_ids) != n_ids:
            raise ValueError(f"schema.tables: {name!r} has {n_ids} ids, others of table {table!r} have {sizes[table]}")
    return sizes


def table_of(schema: Schema, name: str) -> str:
    """Table of a feature or of an ``<event>_<field>``."""
    return schema.tables.get(name, name)


def real(length: Tensor, ids: Tensor) -> Tensor:
    """[B, L] bool, True at events: position < length."""
    return torch.arange(ids.shape[1], device=ids.device) < length[:, None]


class EmbeddingTables(nn.Module):
    """``forward(batch)`` gives :class:`Embedded`; see the module's docstring.

    Args:
        dim: width of all tables.
        backend: "torch", "torchrec", or "auto": TorchRec where it is installed.
        pooling: "sum" or "mean", over the ids of a multi-valued feature; without ids the result is 0.
    """

    def __init__(self, schema: Schema, dim: int, backend: str = "torch", pooling: str = "mean") -> None:
        super().__init__()
        if backend not in BACKENDS:
            raise ValueError(f"backend: got {backend!r}; allowed: {', '.join(BACKENDS)}")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling: got {pooling!r}; allowed: {', '.join(POOLINGS)}")
        if dim < 1:
            raise ValueError(f"dim: got {dim}; allowed: 1 or more")
        if backend == "auto":
            backend = "torchrec" if torchrec_available() else "torch"
        self.backend, self.dim = backend, dim
        lookup = TorchRecLookup if backend == "torchrec" else TorchLookup
        self.lookup: nn.Module = lookup(schema, dim, pooling)
        for weight in self.weights().values():
            nn.init.normal_(weight, std=dim**-0.5)
            with torch.no_grad():
                weight[0].zero_()

    def weights(self) -> dict[str, nn.Parameter]:
        """Table name to its parameter [n_ids, dim], the same names in both backends."""
        return self.lookup.weights()  # type: ignore[operator]

    def forward(self, batch: dict[str, Tensor]) -> Embedded:
        return self.lookup(batch)


class TorchLookup(nn.Module):
    """One nn.Embedding per table, on padded ids."""

    def __init__(self, schema: Schema, dim: int, pooling: str) -> None:
        super().__init__()
        self.schema, self.pooling = schema, pooling
        self.tables = nn.ModuleDict({t: nn.Embedding(n, dim, padding_idx=0) for t, n in table_sizes(schema).items()})

    def weights(self) -> dict[str, nn.Parameter]:
        return {name: table.weight for name, table in self.tables.items()}  # type: ignore[misc]

    def forward(self, batch: dict[str, Tensor]) -> Embedded:
        features = {name: self.feature(name, batch[f"sparse_{name}"]) for name in self.schema.sparse}
        events = {
            e: {f: self.field(e, f, batch) for f in event.fields} for e, event in self.schema.events.items()
        }  # fmt: skip
        return Embedded(features, events)

    def feature(self, name: str, ids: Tensor) -> Tensor:
        table = self.tables[table_of(self.schema, name)]
        if ids.dim() == 1:
            return table(ids)
        return F.embedding_bag(ids, table.weight, mode=self.pooling, padding_idx=0)  # type: ignore[arg-type]

    def field(self, event: str, field: str, batch: dict[str, Tensor]) -> Tensor:
        ids = batch[f"{event}_{field}"]
        embedded = self.tables[table_of(self.schema, f"{event}_{field}")](ids)
        return embedded * real(batch[f"{event}_length"], ids).unsqueeze(-1)


# ---------------------------------------------------------------- TorchRec


def torchrec_available() -> bool:
    try:
        import torchrec  # noqa: F401
    except ImportError:
        return False
    return True


class TorchRecLookup(nn.Module):
    """EmbeddingCollection for tables that events use, EmbeddingBagCollection for the others.

    TorchRec cannot share one table between the two, so a feature that uses an event's table is looked up by the
    EmbeddingCollection too and pooled here.
    """

    def __init__(self, schema: Schema, dim: int, pooling: str) -> None:
        super().__init__()
        try:
            import torchrec
        except ImportError as error:
            raise ImportError("backend: 'torchrec' needs the package torchrec; allowed without it: 'torch'") from error
        self.schema, self.pooling, self.dim = schema, pooling, dim
        fields = [f"{e}_{f}" for e, event in schema.events.items() for f in event.fields]
        of_events = {table_of(schema, name) for name in fields}
        self.bagged = [name for name in schema.sparse if table_of(schema, name) not in of_events]
        self.pooled_here = [name for name in schema.sparse if table_of(schema, name) in of_events]
        sizes = table_sizes(schema)
        self.bags: Any = None
        self.plain: Any = None
        if self.bagged:
            kind = getattr(torchrec.PoolingType, pooling.upper())
            bag_configs = [
                torchrec.EmbeddingBagConfig(
                    name=table, embedding_dim=dim, num_embeddings=sizes[table], pooling=kind,
                    feature_names=[f"sparse_{n}" for n in self.bagged if table_of(schema, n) == table],
                ) for table in _unique(table_of(schema, n) for n in self.bagged)
            ]  # fmt: skip
            self.bags = torchrec.EmbeddingBagCollection(tables=bag_configs)
        if fields:
            keys = {name: name for name in fields} | {f"sparse_{n}": n for n in self.pooled_here}
            configs = [
                torchrec.EmbeddingConfig(
                    name=table, embedding_dim=dim, num_embeddings=sizes[table],
                    feature_names=[key for key, n in keys.items() if table_of(schema, n) == table],
                ) for table in _unique(table_of(schema, n) for n in keys.values())
            ]  # fmt: skip
            self.plain = torchrec.EmbeddingCollection(tables=configs)

    def weights(self) -> dict[str, nn.Parameter]:
        found: dict[str, nn.Parameter] = {}
        if self.bags is not None:
            found |= {name: bag.weight for name, bag in self.bags.embedding_bags.items()}
        if self.plain is not None:
            found |= {name: table.weight for name, table in self.plain.embeddings.items()}
        return {name: found[name] for name in table_sizes(self.schema)}

    def forward(self, batch: dict[str, Tensor]) -> Embedded:
        features: dict[str, Tensor] = {}
        if self.bags is not None:
            ids = {f"sparse_{name}": batch[f"sparse_{name}"] for name in self.bagged}
            pooled = self.bags(keyed_jagged({key: _column(x) for key, x in ids.items()}, {})).to_dict()
            features |= {name: pooled[f"sparse_{name}"] for name in self.bagged}
        if self.plain is None:
            return Embedded(features, {})
        events = {e: {f: batch[f"{e}_{f}"] for f in event.fields} for e, event in self.schema.events.items()}
        ids = {f"{e}_{f}": x for e, fields in events.items() for f, x in fields.items()}
        lengths = {f"{e}_{f}": batch[f"{e}_length"] for e, fields in events.items() for f in fields}
        ids |= {f"sparse_{name}": _column(batch[f"sparse_{name}"]) for name in self.pooled_here}
        jagged = self.plain(keyed_jagged(ids, lengths))
        for name in self.pooled_here:
            features[name] = self._pool(jagged[f"sparse_{name}"], ids[f"sparse_{name}"])
        found = {
            e: {f: self._padded(jagged[f"{e}_{f}"], x) for f, x in fields.items()} for e, fields in events.items()
        }  # fmt: skip
        return Embedded(features, found)

    def _padded(self, jagged: Any, ids: Tensor) -> Tensor:
        """[B, L, dim]. Row 0 of a TorchRec table is an ordinary row, so that ids 0 inside a history are zeroed here."""
        padded = torch.ops.fbgemm.jagged_to_padded_dense(jagged.values(), [jagged.offsets()], [ids.shape[1]], 0.0)
        return padded * (ids != 0).unsqueeze(-1)

    def _pool(self, jagged: Any, ids: Tensor) -> Tensor:
        summed = torch.ops.fbgemm.jagged_to_padded_dense(jagged.values(), [jagged.offsets()], [ids.shape[1]], 0.0).sum(1)
        return summed / (ids != 0).sum(1, keepdim=True).clamp(min=1) if self.pooling == "mean" else summed


def keyed_jagged(ids: dict[str, Tensor], lengths: dict[str, Tensor]) -> Any:
    """KeyedJaggedTensor of padded ids [B, L]: the first ``lengths[key]`` of each row, or the ids that are not 0."""
    from torchrec import KeyedJaggedTensor

    masks = {k: real(lengths[k], x) if k in lengths else x != 0 for k, x in ids.items()}
    values = torch.cat([x[masks[k]] for k, x in ids.items()])
    counts = torch.cat([masks[k].sum(1) for k in ids])
    return KeyedJaggedTensor(keys=list(ids), values=values, lengths=counts)


def _column(ids: Tensor) -> Tensor:
    return ids.unsqueeze(1) if ids.dim() == 1 else ids


def _unique(names: Any) -> list[str]:
    return list(dict.fromkeys(names))
