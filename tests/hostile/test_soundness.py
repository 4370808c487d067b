"""Dead rows are dead: nothing written into them is observed; two row sets are equal only if they must be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemopt.testing import strategies
from gemopt.testing.poison import poison

from ..models import CASES, select
from ..models.registry import ids_for, valid_mask
from .common import compiled, path, same, sequence_model, sweep

N = torch.tensor([3, 11, 0, 1, 7])


@pytest.mark.parametrize("case", select(tag="float_tokens"), ids=str)
def test_padding_of_float_inputs_is_not_observed(case):
    """NaN, infinities and 1e30 in the padding change nothing, bit for bit, where the step runs packed."""
    model, inputs = case.make(0)
    tokens, second = inputs(N, 11, torch.Generator().manual_seed(0))
    mask = valid_mask(N, 11)
    result = poison(model, (tokens.requires_grad_(), second), mask, compiled=compiled(model))
    assert result.ok, str(result)
    assert result.clean or not any(p == "packed" for p in result.paths), str(result)
    assert result.eager or case.name == "float_tokens_sdpa"


def test_a_neighbour_with_nan_stays_alone():
    """NaN inside one sequence reaches that sequence's output only."""
    model, inputs = CASES["float_tokens"].make(0)
    tokens, n = inputs(N, 11, torch.Generator().manual_seed(0))
    subject = compiled(model)
    clean = subject(tokens, n).detach()
    tokens = tokens.clone()
    tokens[1, 4] = math.nan
    out = subject(tokens, n).detach()
    others = torch.tensor([0, 2, 3, 4])
    assert torch.equal(out[others], clean[others]) and bool(out[1].isnan().any())


@pytest.mark.parametrize(
    ("pool", "causal", "layers"),
    [("last_gather", "tril", 2), ("last_index", "none", 1), ("last_one_hot", "none", 1), ("last_counted", "tril", 1)],
)
def test_mask_from_ids_and_row_from_lengths(pool, causal, layers):
    """`ids != 0` is not `position < length`: holes, ids shorter or longer than the length."""
    model = sequence_model(valid="ids_ne", pool=pool, causal=causal, fill="1e9", layers=layers)
    subject = compiled(model)
    g = torch.Generator().manual_seed(3)
    n = torch.tensor([4, 11, 2, 7, 1])
    ids = ids_for(n, 11, g)
    holes = ids * (torch.rand(ids.shape, generator=g) > 0.4)
    last_is_hole = ids.clone()
    last_is_hole[torch.arange(5), n - 1] = 0
    shorter, longer = ids_for(n.clamp(max=3), 11, g), ids_for(n + 2, 11, g)
    nothing = torch.zeros_like(ids)
    one_empty = ids.clone()
    one_empty[2] = 0
    paths = []
    for given_ids in (ids, holes, last_is_hole, shorter, longer[:, :11], one_empty, nothing):
        paths.append(path(same(model, (given_ids, n), subject)))
    assert all(p == "packed" or p.startswith("padded") or p == "" for p in paths)


def test_equal_sizes_are_not_equal_axes():
    """B = L = D = H·B and a weight of the padded size: no size identifies an axis."""
    model = sequence_model(fill="1e9", pool="last_gather", attend="merged_bmm")
    subject = compiled(model)
    for batch, length in ((16, 16), (5, 5), (24, 24), (8, 16), (40, 40)):
        g = torch.Generator().manual_seed(batch)
        n = torch.randint(1, length + 1, (batch,), generator=g)
        same(model, (ids_for(n, length, g), n), subject)


def test_lengths_of_another_batch_are_not_taken():
    """Two lengths vectors of the same shape: each history keeps its own."""
    model, inputs = CASES["several_histories"].make(0)
    subject = compiled(model)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        same(model, inputs(torch.randint(0, 12, (6,), generator=g), 11, g), subject)
    clicks, a, views, b, dense = inputs(torch.randint(0, 12, (6,)), 11, torch.Generator())
    same(model, (views[:, :11], b.clamp(max=11), clicks, a, dense), subject)


PROPERTY_MODELS = {
    "ids": {"valid": "ids_ne", "fill": "1e9", "pool": "mean"},
    "lengths": {"valid": "arange_lt", "fill": "1e9", "pool": "last_one_hot", "causal": "tril"},
    "two_sources": {"valid": "ids_ne", "fill": "finfo_min", "pool": "last_counted", "attend": "sdpa_float"},
}


@pytest.mark.parametrize("name", ["ids", *(pytest.param(n, marks=sweep) for n in PROPERTY_MODELS if n != "ids")])
def test_any_batch(name):
    """Hypothesis looks for a batch on which packed and eager differ."""
    model = sequence_model(**PROPERTY_MODELS[name])
    subject = compiled(model)

    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(strategies.padded_batches(max_len=9), st.booleans(), st.data())
    def check(batch, agreeing, data):
        lengths = batch.lengths
        if not agreeing:
            lengths = data.draw(strategies.lengths(batch=len(batch.lengths), max_len=9))
        if len(lengths):
            same(model, (batch.ids, lengths), subject)

    check()
    assert subject.report.steps_packed > 0
