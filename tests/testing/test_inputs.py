"""Example batches: what each tensor is found to be, and that drawn batches agree with themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gemopt.testing.inputs import ExampleSource, as_batch
from gemopt.testing.lengths import CASES, draw_lengths


def source(example, forward, names=None):
    class Model(nn.Module):
        pass

    Model.forward = forward
    return ExampleSource(as_batch(example), Model(), names, draw_lengths)


def example(batch=6, length=9, seed=0):
    g = torch.Generator().manual_seed(seed)
    n = torch.randint(1, length, (batch,), generator=g)
    mask = torch.arange(length) < n[:, None]
    ids = torch.randint(1, 50, (batch, length), generator=g) * mask
    return ids, n, mask


def generator():
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize("case", CASES)
def test_lengths_ids_mask_and_tokens_stay_consistent(case):
    ids, n, mask = example()
    tokens = torch.randn(6, 9, 4) * mask[..., None]
    drawn = source((ids, n, mask, ~mask, tokens), lambda self, ids, n, valid, padding, tokens: None).make(case, generator())
    new_ids, lengths, valid, padding, new_tokens = drawn.args
    assert torch.equal(valid, ~padding)
    assert torch.equal(new_ids != 0, valid)
    assert torch.equal((new_tokens != 0).any(-1), valid)
    if case != "holes":
        assert torch.equal(valid.sum(1), lengths)
        assert torch.equal(valid, torch.arange(9) < lengths[:, None])
    else:
        assert bool((valid.sum(1) < lengths).any())
    expected = {"empty_batch": 0, "one_sequence": 1}.get(case, 6)
    assert len(lengths) == expected == len(new_ids)


def test_given_is_the_example_itself():
    ids, n, _ = example()
    batch = source((ids, n), lambda self, ids, n: None).make("given", generator())
    assert batch.args[0] is ids and batch.args[1] is n


def test_cases_have_their_lengths():
    ids, n, _ = example()
    s = source({"ids": ids, "lengths": n}, lambda self, ids, lengths: None)
    lengths = {case: s.make(case, generator()).kwargs["lengths"] for case in CASES}
    assert (lengths["zeros"] == 0).any() and (lengths["zeros"] > 0).any()
    assert lengths["zeros"][0] == 0 and lengths["zeros"][-1] == 0
    assert (lengths["ones"] == 1).all() and (lengths["full"] == 9).all() and (lengths["all_padding"] == 0).all()
    assert (lengths["skewed"] == 9).sum() >= 1 and (lengths["skewed"] == 1).sum() >= 4
    assert len(lengths["empty_batch"]) == 0 and len(lengths["one_sequence"]) == 1


def test_ids_alone_imply_the_padding():
    ids, _, _ = example()
    s = source((ids,), lambda self, ids: None)
    assert [h.lengths for h in s.histories] == [None]
    assert (s.make("full", generator()).args[0] != 0).all()
    assert (s.make("ones", generator()).args[0] != 0).sum(1).eq(1).all()


def test_left_padding_stays_left():
    ids, _, mask = example()
    s = source((ids.flip(1), mask.flip(1)), lambda self, ids, mask: None)
    new_ids, new_mask = s.make("skewed", generator()).args
    assert torch.equal(new_ids != 0, new_mask) and new_mask[:, -1].all() and not new_mask[:, 0].all()


def test_two_histories_keep_their_own_lengths():
    clicks, n, _ = example(length=9)
    views, m, _ = example(length=14, seed=3)
    dense, label = torch.randn(6, 3), torch.randint(0, 2, (6,))
    s = source(
        (clicks, n, views, m, dense, label),
        lambda self, clicks, click_lengths, views, view_lengths, dense, label: None,
    )
    assert [(h.lengths, h.max_len, list(h.members)) for h in s.histories] == [(1, 9, [0]), (3, 14, [2])]
    a, an, b, bn, d, y = s.make("zeros", generator()).args
    assert torch.equal((a != 0).sum(1), an) and torch.equal((b != 0).sum(1), bn) and not torch.equal(an, bn)
    assert torch.equal(d, dense) and torch.equal(y, label)


def test_two_histories_of_one_size_are_told_apart_by_their_contents():
    clicks, n, _ = example()
    views, m, _ = example(seed=3)
    s = source((m, clicks, n, views), lambda self, b, clicks, a, views: None)
    m2, clicks2, n2, views2 = s.make("skewed", generator()).args
    assert torch.equal((clicks2 != 0).sum(1), n2) and torch.equal((views2 != 0).sum(1), m2)


def test_a_feature_of_each_sample_is_no_length():
    ids, n, _ = example()
    target = torch.full((6,), 3)
    s = source((ids, n, target), lambda self, ids, lengths, target: None)
    assert torch.equal(s.make("full", generator()).args[2], target)
    assert any("target" in note for note in s.notes)
    named = source((ids, target), lambda self, ids, k: None, names=["k"])
    assert torch.equal(named.make("full", generator()).args[1], torch.full((6,), 9))


def test_broadcast_and_float_masks():
    ids, _, mask = example()
    s = source((ids, mask[:, None, None, :], mask.float()), lambda self, ids, mask4, weights: None)
    new_ids, mask4, weights = s.make("skewed", generator()).args
    assert mask4.shape == (6, 1, 1, 9) and torch.equal(mask4[:, 0, 0], new_ids != 0)
    assert weights.dtype == torch.float32 and torch.equal(weights != 0, new_ids != 0)


def test_requires_grad_and_strides_survive():
    _, n, mask = example()
    tokens = torch.randn(9, 6, 4).transpose(0, 1).requires_grad_()
    s = source((tokens, n, mask), lambda self, tokens, lengths, mask: None)
    new = s.make("ones", generator()).args[0]
    assert new.requires_grad and new.is_leaf and new.stride() == tokens.stride()


@settings(max_examples=60, deadline=None)
@given(case=st.sampled_from(CASES), batch=st.integers(0, 9), length=st.integers(1, 20), seed=st.integers(0, 999))
def test_drawn_lengths_are_in_range(case, batch, length, seed):
    n = draw_lengths(case, batch, length, torch.Generator().manual_seed(seed))
    assert n.dtype == torch.int64 and bool((n >= 0).all()) and bool((n <= length).all())
    assert len(n) == {"empty_batch": 0, "one_sequence": 1}.get(case, batch)


def test_unknown_case():
    with pytest.raises(ValueError, match="cases: got 'some'; allowed: given"):
        draw_lengths("some", 3, 4, generator())
