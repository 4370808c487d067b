"""Embedding tables against a loop over ids, and TorchRec against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemopt.model_zoo.data.schema import EventType, Schema, SparseFeature
from gemopt.model_zoo.example import example_batch, example_schema
from gemopt.model_zoo.parts import embeddings
from gemopt.model_zoo.parts.embeddings import EmbeddingTables, table_sizes

SCHEMA = example_schema(n_events=2, max_len=6, n_sparse=4, n_ids=9)
LENGTHS = {"event0": [0, 6, 1], "event1": [3, 0, 2]}
needs_torchrec = pytest.mark.skipif(not embeddings.torchrec_available(), reason="needs torchrec")


def looped(tables: EmbeddingTables, batch: dict, pooling: str) -> dict:
    """Every vector by a loop over samples and ids; keys are (name,) or (event, field)."""
    weights, out = tables.weights(), {}
    for name in SCHEMA.sparse:
        table, rows = weights[SCHEMA.tables.get(name, name)], []
        for ids in batch[f"sparse_{name}"].reshape(len(batch["domain"]), -1):
            found = [table[i] for i in ids.tolist() if i != 0]
            total = sum(found, torch.zeros(tables.dim))
            rows.append(total / max(len(found), 1) if pooling == "mean" else total)
        out[(name,)] = torch.stack(rows)
    for event, kind in SCHEMA.events.items():
        for field in kind.fields:
            table = weights[SCHEMA.tables.get(f"{event}_{field}", f"{event}_{field}")]
            ids, length = batch[f"{event}_{field}"], batch[f"{event}_length"]
            out[event, field] = torch.stack(
                [
                    torch.stack([table[i] if t < n and i else torch.zeros(tables.dim) for t, i in enumerate(row.tolist())])
                    for row, n in zip(ids, length.tolist(), strict=True)
                ]
            )
    return out


def flat(embedded: embeddings.Embedded) -> dict:
    out = {(name,): x for name, x in embedded.features.items()}
    return out | {(e, f): x for e, fields in embedded.events.items() for f, x in fields.items()}


@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("backend", ["torch", pytest.param("torchrec", marks=needs_torchrec)])
def test_lookup_equals_a_loop(backend, pooling):
    tables = EmbeddingTables(SCHEMA, 4, backend, pooling)
    batch = example_batch(SCHEMA, lengths=LENGTHS)
    batch["event0_item"][1, 2] = 0  # a missing id inside a history
    actual, expected = flat(tables(batch)), looped(tables, batch, pooling)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-6, atol=1e-7, msg=str(key))


@needs_torchrec
@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_torchrec_equals_torch_with_gradients(pooling):
    batch = example_batch(SCHEMA, lengths={"event0": [2, 6, 0, 1], "event1": [0, 0, 0, 0]}, seed=3)
    results = []
    for backend in ("torch", "torchrec"):
        tables = EmbeddingTables(SCHEMA, 4, backend, pooling)
        with torch.no_grad():
            for number, weight in enumerate(tables.weights().values()):
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
                weight[0] = 0
        found = flat(tables(batch))
        sum((x * torch.arange(x.numel()).view(x.shape)).sum() for x in found.values()).backward()
        results.append((found, {name: w.grad for name, w in tables.weights().items()}))
    (a, a_grads), (b, b_grads) = results
    assert a.keys() == b.keys() and a_grads.keys() == b_grads.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-6, atol=1e-7)
    for name, grad in a_grads.items():
        torch.testing.assert_close(b_grads[name][1:], grad[1:], rtol=1e-5, atol=1e-5)
        assert not grad[0].any() and not b_grads[name][0].any(), "the padding id learns"


def test_shared_tables_are_one_parameter():
    tables = EmbeddingTables(SCHEMA, 4)
    assert set(tables.weights()) == {"item", "tags", "f2", "f3", "category"}
    assert len(list(tables.parameters())) == 5


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(6, 9))
@settings(max_examples=20, deadline=None)
def test_ids_past_the_length_do_not_matter(lengths, garbage):
    tables = EmbeddingTables(SCHEMA, 3)
    batch = example_batch(SCHEMA, lengths={"event0": lengths, "event1": lengths[::-1]})
    expected = flat(tables(batch))
    dead = torch.arange(6) >= batch["event0_length"][:, None]
    batch["event0_item"] = torch.where(dead, min(garbage, 8), batch["event0_item"])
    for key, value in flat(tables(batch)).items():
        assert torch.equal(value, expected[key]), key


def test_bad_arguments_are_named():
    for options, named in (({"backend": "fbgemm"}, "backend"), ({"pooling": "max"}, "pooling"), ({"dim": 0}, "dim")):
        with pytest.raises(ValueError, match=named):
            EmbeddingTables(**{"schema": SCHEMA, "dim": 4, **options})
    with pytest.raises(ValueError, match=r"h_item.*7 ids.*9"):
        table_sizes(Schema(0, {"item": SparseFeature(9)}, {"h": EventType({"item": 7}, 4)}, tables={"h_item": "item"}))
