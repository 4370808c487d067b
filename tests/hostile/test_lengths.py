"""Lengths as they should not be: the result is eager's, or the error is."""

from __future__ import annotations

import pytest
import torch

from ..models.registry import VOCAB, valid_mask
from .common import batch_of, compiled, gradients, path, same, sequence_model

HOSTILE = {
    "some empty": [0, 5, 0, 11, 1, 0],
    "neighbour of a full row": [11, 0, 11, 0, 11],
    "all of length one": [1, 1, 1, 1],
    "all full": [11, 11, 11],
    "one long": [1, 1, 11, 1, 1, 1, 1],
    "longer than the padded size": [4, 30, 11, 12],
    "negative": [5, -1, 3, -7, -30],
    "all empty": [0, 0, 0],
}


@pytest.mark.parametrize("pool", ["mean", "last_index", "max"])
def test_hostile_lengths(pool):
    """-1e9 keeps eager defined for empty rows, so that every value is compared."""
    model = sequence_model(pool=pool, fill="1e9", causal="tril")
    subject = compiled(model)
    packed = []
    for name, lengths in HOSTILE.items():
        raises = pool == "last_index" and name in ("longer than the padded size", "negative")
        result = same(model, batch_of(lengths), subject, may_raise=raises)
        packed.append(path(result))
    assert "packed" in packed, "no step ran packed, so the test shows nothing"


def test_a_step_that_saves_less_than_asked_for_runs_padded():
    """Of 44 positions 22 real: half of the work would be saved; 4 real: nine tenths and more."""
    half, tenth = batch_of([5, 6, 5, 6]), batch_of([1, 1, 1, 1])
    for share, expected in ((0.4, "packed"), (0.75, "padded: packing does not pay at this fill")):
        model = sequence_model()
        subject = compiled(model, min_saving=share)
        assert [path(same(model, batch, subject)) for batch in (half, tenth)] == [expected, "packed"]


@pytest.mark.parametrize("lengths", [[7], [1], [0], []], ids=["one", "one token", "one empty", "empty batch"])
def test_batches_of_one_and_none(lengths):
    same(sequence_model(fill="1e9"), batch_of(lengths))


@pytest.mark.parametrize("padded", [1, 0])
def test_padded_size_one_and_none(padded):
    same(sequence_model(fill="1e9"), batch_of([min(1, padded), 0, min(1, padded)], max_len=padded))


def test_float_lengths():
    """A mask from float lengths is legal PyTorch: half a token counts as one."""
    model = sequence_model(fill="1e9", valid="arange_lt")
    ids, n = batch_of([3, 11, 0, 7])
    for dtype in (torch.float32, torch.float64):
        same(model, (ids, n.to(dtype) - 0.5))


def test_int32_lengths():
    ids, n = batch_of([3, 11, 2, 7])
    same(sequence_model(pool="last_one_hot", fill="1e9", valid="arange_lt"), (ids, n.to(torch.int32)))


@pytest.mark.parametrize("valid", ["ids_ne", "arange_lt"])
def test_holes_and_left_padding(valid):
    """A mask with holes, and one that is false first: ranks, not offset + position."""
    model = sequence_model(fill="1e9", valid=valid, pool="mean", causal="tril")
    subject = compiled(model)
    ids, n = batch_of([3, 11, 6, 1, 9], seed=2)
    g = torch.Generator().manual_seed(5)
    holes = ids * (torch.rand(ids.shape, generator=g) > 0.4)
    for given in (holes, ids.flip(1), torch.zeros_like(ids)):
        same(model, (given, n), subject)


def test_empty_sequences_leave_the_others_alone():
    """With -inf an empty sequence is NaN in eager and poisons every gradient. Packed, its row is 0 and the
    gradients are those of the batch without it."""
    model = sequence_model(fill="inf", pool="mean")
    subject = compiled(model)
    ids, n = batch_of([0, 5, 0, 11, 1, 0])
    full = n > 0
    weights = torch.randn(len(n), 16)
    out = subject(ids, n)
    (out * weights)[full].sum().backward()
    assert subject.report.steps_packed == 1
    assert torch.equal(out[~full], torch.zeros_like(out[~full]))
    mine = gradients(model)
    model.zero_grad()
    expected = model(ids[full], n[full])
    (expected * weights[full]).sum().backward()
    torch.testing.assert_close(out[full], expected)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_empty_rows_as_eager_has_them():
    """`empty_rows="eager"` keeps NaN where eager has it: the first row of an empty sequence is read."""
    model = sequence_model(fill="inf", pool="first")
    subject = compiled(model, empty_rows="eager")
    ids, n = batch_of([0, 5, 11, 1])
    assert torch.equal(subject(ids, n).isnan(), model(ids, n).isnan())
    assert any("empty_rows" in r.reason + r.hint for r in subject.report.rejections)


def test_a_sequence_does_not_depend_on_its_batch():
    model = sequence_model(fill="inf", pool="last_gather", layers=2)
    subject = compiled(model)
    ids, n = batch_of([4, 11, 1, 7, 2])
    together = subject(ids, n)
    other = torch.randint(1, VOCAB, ids.shape) * valid_mask(n, ids.size(1))
    other[3] = ids[3]
    torch.testing.assert_close(subject(other, n)[3], together[3], rtol=0, atol=1e-6)


def test_bad_index_raises_as_in_eager():
    """gather at length - 1 raises for an empty sequence in eager: a neighbour's row is no answer."""
    model = sequence_model(pool="last_gather", fill="1e9")
    subject = compiled(model)
    ids, n = batch_of([4, 0, 11])
    with pytest.raises((RuntimeError, IndexError)):
        model(ids, n)
    with pytest.raises((RuntimeError, IndexError)):
        subject(ids, n)
    ids, n = batch_of([4, 2, 11])
    same(model, (ids, n), subject)
