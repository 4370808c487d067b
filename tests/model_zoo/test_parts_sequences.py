"""Sequence-side parts against loops over samples and events in fp64; padding and its contents change nothing."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gemopt.model_zoo.parts.hstu import HSTUBlock
from gemopt.model_zoo.parts.interformer import SequenceSummary, recent
from gemopt.model_zoo.parts.pooling import PMA
from gemopt.model_zoo.parts.rotary import DAY, Rotary, Rotation, rotate
from gemopt.model_zoo.parts.seed_pooling import SeedPooling
from gemopt.model_zoo.parts.self_attention import SelfAttention, visible, visible_pairs

from .parts_common import LENGTHS, close, f64, randn, sequence

D, HEADS = 8, 2
DH = D // HEADS
ATTENTIONS = [{}, {"window": 0}, {"window": 2}, {"block": 3}, {"causal": True}, {"window": 1, "causal": True}]


def sees(i: int, j: int, window=None, block=None, causal=False) -> bool:
    near = window is None or abs(i - j) <= window
    return near and (block is None or i // block == j // block) and (not causal or j <= i)


def softmax_attention(q, k, v, rule) -> torch.Tensor:
    """[n, H, dh] each; by a loop over queries."""
    out = torch.zeros_like(q)
    for i in range(q.shape[0]):
        keys = [j for j in range(k.shape[0]) if rule(i, j)]
        for h in range(q.shape[1]):
            w = torch.softmax(torch.stack([q[i, h] @ k[j, h] / math.sqrt(q.shape[2]) for j in keys]), 0)
            out[i, h] = sum(w[n] * v[j, h] for n, j in enumerate(keys))
    return out


@pytest.mark.parametrize("options", ATTENTIONS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_self_attention(options, turned):
    torch.manual_seed(0)
    part = f64(SelfAttention(D, HEADS, rotate_values=turned, **options))
    s, mask = sequence(9, D)
    angles = randn(len(LENGTHS), 9, DH // 2) if turned else None
    out = part(s, mask, rotation_by(angles) if turned else None)
    for b, n in enumerate(LENGTHS):
        x = s[b, :n]
        x = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
        q, k, v = (t.view(n, HEADS, DH) for t in (x @ part.qkv.weight.T).split(D, -1))
        if turned:
            q, k, v = (turn(t, angles[b, :n]) for t in (q, k, v))
        h = softmax_attention(q, k, v, lambda i, j: sees(i, j, **options))
        close(out[b, :n], x_plus(s[b, :n], h, part.out.weight))


def x_plus(s, h, weight):
    return s + h.flatten(-2) @ weight.T


def rotation_by(angles):
    return Rotation(angles.cos(), angles.sin())


def turn(x, angles):
    """Interleaved pairs as complex numbers: multiplication by exp(i angle)."""
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


@pytest.mark.parametrize("window", [None, 2])
def test_hstu_block(window):
    torch.manual_seed(0)
    part = f64(HSTUBlock(D, HEADS, max_len=9, window=window))
    s, mask = sequence(9, D)
    angles = randn(len(LENGTHS), 9, DH // 2)
    out = part(s, mask, rotation_by(angles))
    for b, n in enumerate(LENGTHS):
        x = s[b, :n]
        u, q, k, v = F.silu(part.uqkv(part.norm(x))).split(D, -1)
        q, k, v = (t.reshape(n, HEADS, DH) for t in (q, k, v))
        q, k = turn(q, angles[b, :n]), turn(k, angles[b, :n])
        y = torch.zeros_like(q)
        for i in range(n):
            for j in range(n):
                if sees(i, j, window, causal=True):
                    y[i] += F.silu((q[i] * k[j]).sum(-1, keepdim=True) / math.sqrt(DH)) / 9 * v[j]
        close(out[b, :n], x + part.out(part.attended_norm(y.flatten(-2)) * u))


@pytest.mark.parametrize("norm", [False, True])
def test_pma(norm):
    torch.manual_seed(0)
    part = f64(PMA(3, D, HEADS, norm=norm))
    s, mask = sequence(9, D)
    out = part(s, mask)
    q = part.q(part.norm(part.queries)).view(3, HEADS, DH)
    for b, n in enumerate(LENGTHS):
        if n == 0:
            assert not out[b].any()
            continue
        k, v = (f(s[b, :n]).view(n, HEADS, DH) for f in (part.k, part.v))
        close(out[b], part.out(softmax_attention(q, k, v, lambda i, j: True).flatten(-2)))


def test_seed_pooling():
    part = f64(SeedPooling(D, HEADS, n_seeds=5, n_tokens=2, rank=3))
    s, mask = sequence(9, D)
    out, seeds = part(s, mask), part.attend(s, mask)
    for b in range(len(LENGTHS)):
        close(out[b], sum(part.compress.z[i].T @ seeds[b] @ part.compress.w[i] for i in range(3)))
    with pytest.raises(ValueError, match="n_seeds"):
        SeedPooling(D, HEADS, n_seeds=2, n_tokens=3)


def test_recent_and_sequence_summary():
    s, mask = sequence(9, D)
    length = torch.tensor(LENGTHS)
    out = recent(s, mask, length, 3)
    for b, n in enumerate(LENGTHS):
        for k in range(3):
            close(out[b, k], s[b, n - 1 - k] if k < n else torch.zeros(D, dtype=torch.float64))
    part = f64(SequenceSummary(D, HEADS, n_cls=2, n_pma=1, n_recent=2))
    length = length.clamp(min=2)
    mask = torch.arange(9) < length[:, None]
    expected = torch.cat([s[:, :2] * mask[:, :2, None], part.pma(s, mask), recent(s, mask, length, 2)], 1)
    close(part(s, length, mask), part.gate(expected))
    assert part.n_tokens == expected.shape[1]


# ---------------------------------------------------------------- rotary angles


def test_rotation_is_relative_and_keeps_lengths():
    rotary = Rotary(6)
    age = torch.zeros(1, 12, dtype=torch.float64)
    q, k = randn(1, 1, 1, 6).expand(1, 12, 1, 6), randn(1, 1, 1, 6, seed=2).expand(1, 12, 1, 6)
    turned_q, turned_k = rotate(q, rotary(age)), rotate(k, rotary(age))
    close(turned_q.norm(dim=-1), q.norm(dim=-1))
    scores = torch.einsum("bihd,bjhd->ij", turned_q, turned_k)
    for shift in range(-5, 6):
        diagonal = scores.diagonal(shift)
        close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(scores[0, 1], scores[0, 2])


def test_angles():
    rotary = Rotary(4)
    age = torch.tensor([[0.0, 3 * DAY, 1e9]], dtype=torch.float64)
    tau = torch.log(1 + age / DAY)
    for t in range(3):
        for i, (theta, phi) in enumerate(((1.0, 1.0), (1e-2, 1e-1))):
            torch.testing.assert_close(rotary.angles(age)[0, t, i], t * theta + tau[0, t] * phi, rtol=1e-9, atol=1e-9)
    close(Rotary(4, time=False).angles(age)[0, :, 0], torch.arange(3.0).double())
    close(rotary(age).cos, rotary.angles(age).cos())
    assert Rotary(4).to(torch.bfloat16)(age.bfloat16()).cos.dtype == torch.float32
    with pytest.raises(ValueError, match="head_dim"):
        Rotary(3)


@given(st.integers(1, 12), st.integers(0, 5), st.integers(1, 5), st.booleans(), st.lists(st.integers(0, 12), min_size=1))
@settings(max_examples=60, deadline=None)
def test_visible(width, window, block, causal, lengths):
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    full = visible(torch.ones(1, width, dtype=torch.bool), window, block, causal)
    assert visible_pairs(width, window, block, causal) == full.expand(1, 1, width, width).sum()
    for options in ({"window": window}, {"block": block}, {}):
        allowed = visible(mask, causal=causal, **options)[:, 0].expand(-1, width, -1)
        for b, n in enumerate(lengths[:3]):
            for i in range(width):
                for j in range(width):
                    assert bool(allowed[b, i, j]) == (j < n and sees(i, j, causal=causal, **options))


# ---------------------------------------------------------------- padding


def parts():
    torch.manual_seed(0)
    found = [SelfAttention(D, HEADS, **options) for options in ATTENTIONS]
    found += [HSTUBlock(D, HEADS, 64), HSTUBlock(D, HEADS, 64, window=2)]
    return [f64(p) for p in (*found, PMA(3, D, HEADS), SeedPooling(D, HEADS, 4, 2, 2), SequenceSummary(D, HEADS))]


def run(part, s, mask, lengths):
    return part(s, torch.tensor(lengths), mask) if isinstance(part, SequenceSummary) else part(s, mask)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(9, 20), st.sampled_from([0.0, 7.0, -1e4]))
@settings(max_examples=25, deadline=None)
def test_padding_and_neighbours_change_nothing(lengths, width, garbage):
    narrow, wide = sequence(9, D, lengths), sequence(width, D, lengths, garbage)
    alive = narrow[1]
    for part in parts():
        a, b = run(part, *narrow, lengths), run(part, *wide, lengths)
        alone = run(part, narrow[0][:1, : max(lengths[0], 1)], narrow[1][:1, : max(lengths[0], 1)], lengths[:1])
        if a.shape[1] == 9 and isinstance(part, (SelfAttention, HSTUBlock)):
            a, b = a[alive], b[:, :9][alive]
            alone = alone[0, : lengths[0]]
            torch.testing.assert_close(a[: lengths[0]], alone, rtol=1e-9, atol=1e-11)
        else:
            torch.testing.assert_close(a[0], alone[0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11)


def test_histories_without_events_are_finite_with_finite_gradients():
    for part in parts():
        s, mask = sequence(5, D, [0, 0])
        s.requires_grad_()
        out = run(part, s, mask, [0, 0])
        assert out.isfinite().all()
        if not isinstance(part, (SelfAttention, HSTUBlock)):
            assert not out.any() or isinstance(part, SequenceSummary)
        out.sum().backward()
        assert s.grad.isfinite().all() and all(p.grad is None or p.grad.isfinite().all() for p in part.parameters())


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="n_heads"):
        SelfAttention(8, 3)
    with pytest.raises(ValueError, match="window"):
        SelfAttention(8, 2, window=-1)
    with pytest.raises(ValueError, match="block"):
        SelfAttention(8, 2, block=0)
    with pytest.raises(ValueError, match="max_len"):
        HSTUBlock(8, 2, 0)
    with pytest.raises(ValueError, match="n_queries"):
        PMA(0, 8, 2)
