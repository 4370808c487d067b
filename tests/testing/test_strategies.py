"""The strategies reach the awkward cases, and their batches agree with themselves."""

from __future__ import annotations

import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from gemopt.testing import strategies

quick = settings(max_examples=40, deadline=None)


@quick
@given(strategies.padded_batches(max_len=strategies.sizes(1, 9), dim=3))
def test_padded_batches_are_consistent(batch):
    assert torch.equal(batch.ids != 0, batch.mask)
    assert torch.equal(batch.mask.sum(1), batch.lengths)
    assert batch.tokens.shape == (*batch.mask.shape, 3)


@quick
@given(strategies.lengths(max_len=7))
def test_lengths_in_range(n):
    assert n.dtype == torch.int64 and ((n >= 0) & (n <= 7)).all()


@quick
@given(st.data())
def test_lengths_of_a_fixed_batch(data):
    assert len(data.draw(strategies.lengths(batch=5, max_len=4))) == 5


@quick
@given(strategies.batches(lambda n, max_len, g: (n, max_len), smallest=2, max_len=6))
def test_batches_call_the_maker(pair):
    n, max_len = pair
    assert 2 <= max_len <= 6 and bool((n <= max_len).all())


def test_the_awkward_ones_are_reached():
    masks = strategies.masks(max_len=5)
    wanted = {
        "empty batch": lambda m: m.size(0) == 0,
        "all padding": lambda m: m.size(0) > 1 and not m.any(),
        "no padding": lambda m: m.size(0) > 1 and bool(m.all()),
        "a hole": lambda m: bool((~m[:, :-1] & m[:, 1:]).any()),
        "a zero between": lambda m: m.size(0) > 2 and bool(m[0].any() and not m[1].any() and m[2].any()),
    }
    for condition in wanted.values():
        find(masks, condition, settings=settings(max_examples=2000, database=None))
