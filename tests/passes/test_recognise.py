"""Recognition by what is computed: every site, evaluated from its own fields, gives the numbers that eager gives.

The spellings that must be found are compared with eager through the site; so are the near misses, where finding nothing
is right and finding a site that means something else is not. All run with sizes that differ and with equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gemopt.graph.attention import Site
from gemopt.passes.canonicalise import canonicalise
from gemopt.passes.recognise import Miss, recognise

from ..graph.oracle import Traced, analyse, capture, static
from ..graph.sites import attend, mask_of

INF = math.inf


@dataclass(frozen=True)
class Sizes:
    batch: int
    queries: int
    keys: int
    heads: int
    width: int


DIFFERENT = Sizes(2, 5, 6, 3, 4)
SQUARE = Sizes(2, 5, 5, 3, 4)  # self attention: as many queries as keys
EQUAL = Sizes(4, 4, 4, 4, 4)


class In:
    """q, k, v `[B, L, H, d]`, lengths, ids and a mask over keys."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, n: Tensor, ids: Tensor, m: Tensor) -> None:
        self.q, self.k, self.v, self.n, self.ids, self.m = q, k, v, n, ids, m
        self.batch, self.queries, self.heads, self.width = q.shape
        self.keys = k.shape[1]
        self.valid = torch.arange(self.keys) < n[:, None]

    def by_head(self) -> tuple[Tensor, Tensor, Tensor]:
        """`[B, H, L, d]` each."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)

    def merged(self) -> tuple[Tensor, Tensor, Tensor]:
        """`[B * H, L, d]` each."""
        return tuple(x.reshape(-1, x.size(2), self.width) for x in self.by_head())  # type: ignore[return-value]

    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """One head of width H * d: `[B, L, H * d]`."""
        return self.q.flatten(2), self.k.flatten(2), self.v.flatten(2)

    def length_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """As in nn.MultiheadAttention: `[L, B, H * d]` to `[B * H, L, d]`."""
        found = []
        for x in self.flat():
            x = x.transpose(0, 1).contiguous()
            found.append(x.view(x.size(0), x.size(1) * self.heads, self.width).transpose(0, 1))
        return tuple(found)  # type: ignore[return-value]

    @property
    def scores(self) -> Tensor:
        q, k, _ = self.by_head()
        return q @ k.mT

    def causal(self) -> Tensor:
        return torch.ones(self.queries, self.keys, dtype=torch.bool).tril()

    def key_mask(self) -> Tensor:
        """`[B, 1, 1, S]`."""
        return self.m[:, None, None]


def make(sizes: Sizes, seed: int = 0, symbolic: bool = False) -> tuple[Tensor, ...]:
    """The inputs; with plain numbers for sizes, equal ones cannot be told apart, and traces are quick."""
    g = torch.Generator().manual_seed(seed)

    def normal(length: int) -> Tensor:
        return torch.randn(sizes.batch, length, sizes.heads, sizes.width, generator=g, dtype=torch.float64)

    n = torch.randint(1, sizes.keys + 1, (sizes.batch,), generator=g)
    ids = torch.randint(0, 3, (sizes.batch, sizes.keys), generator=g)
    m = torch.rand(sizes.batch, sizes.keys, generator=g) > 0.4
    ids[:, 0], m[:, 0] = 1, True
    made = normal(sizes.queries), normal(sizes.keys), normal(sizes.keys), n, ids, m
    return made if symbolic else tuple(map(static, made))


def found(fn: Callable[[In], Any], sizes: Sizes, symbolic: bool = False) -> tuple[Traced, list[Site], list[Miss]]:
    inputs = make(sizes, symbolic=symbolic)
    gm = capture(lambda *args: fn(In(*args)), *inputs)
    canonicalise(gm)
    run = analyse(gm, *inputs)
    sites, misses = recognise(gm.graph, run.known)
    for site in sites:
        check_site(run, site)
    return run, sites, misses


def check_site(run: Traced, site: Site) -> None:
    """Numbers first: then that the record is complete, as everything after recognition takes it to be."""
    real = run.values[site.out]
    meant = attend(run, site, run.values)
    seen = mask_of(run, site).any(site.key)
    kept = [s for s in range(seen.ndim + 1) if s != site.key]  # score slot of each dim of `seen`
    shape = [seen.shape[kept.index(s)] if s is not None else 1 for s in site.out_slots]
    order = [kept.index(s) for s in site.out_slots if s is not None]
    assert sorted(order) == list(range(seen.ndim)), f"the result lacks an axis of the scores: {site.out_slots}"
    seen = seen.permute(order).reshape(shape).expand(run.slot_sizes(site.out)).reshape(real.shape)
    assert bool(seen.any())
    torch.testing.assert_close(meant[seen], real[seen].to(meant.dtype), rtol=1e-6, atol=1e-6, msg=lambda m: f"{site}\n{m}")
    batch = set(kept) - {site.query}
    tokens = {s for s in (site.query, site.key) if s is not None}
    for exprs, own_token in ((site.q_exprs, site.query), (site.k_exprs, site.key), (site.v_exprs, site.key)):
        own = {s for e in exprs if e is not None for s in e.slots}
        assert own <= {own_token, *batch} and (own_token is None or own_token in own), f"{exprs}: not batch axes and a token"
    assert tokens.isdisjoint(batch) and site.query in (*site.out_slots, None) and site.key not in site.out_slots


Spelling = Callable[[In], Tensor]


def _fill(i: In, scores: Tensor, keep: Tensor | None = None) -> Tensor:
    return scores.masked_fill(~(i.key_mask() if keep is None else keep), -INF)


def _finish(i: In, scores: Tensor) -> Tensor:
    return scores.softmax(-1) @ i.by_head()[2]


def matmul(i: In) -> Tensor:
    return _finish(i, _fill(i, i.scores / math.sqrt(i.width)))


def key_first(i: In) -> Tensor:
    """Scores transposed: keys are rows, the softmax runs over rows."""
    q, k, v = i.by_head()
    weights = (k @ q.mT * 0.5).masked_fill(~i.m[:, None, :, None], -1e9).softmax(-2)
    return weights.transpose(2, 3) @ v


def einsum_heads_last(i: In) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bqkh", i.q, i.k) * 0.3
    return torch.einsum("bqkh,bkhd->bhqd", scores.masked_fill(~i.m[:, None, :, None], -INF).softmax(2), i.v)


def einsum_key_first(i: In) -> Tensor:
    scores = torch.einsum("bkhd,bqhd->hkbq", i.k, i.q)
    weights = scores.masked_fill(~i.m.t()[None, :, :, None], -INF).softmax(1)
    return torch.einsum("hkbq,bkhd->qbhd", weights, i.v)


def merged_bmm(i: In) -> Tensor:
    q, k, v = i.merged()
    keep = i.m[:, None, :].expand(-1, i.queries, -1).repeat_interleave(i.heads, 0)
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).masked_fill(~keep, -INF).softmax(-1), v)


def merged_expand(i: In) -> Tensor:
    """The mask of nn.MultiheadAttention: `[B, 1, 1, S]` expanded over heads and merged."""
    q, k, v = i.length_first()
    mask = torch.zeros(i.batch, i.keys, dtype=q.dtype).masked_fill_(~i.m, -INF)
    mask = mask.view(-1, 1, 1, i.keys).expand(-1, i.heads, -1, -1).reshape(-1, 1, i.keys)
    out = torch.bmm(torch.baddbmm(mask, q * 0.5, k.transpose(-2, -1)).softmax(-1), v)
    return out.transpose(0, 1).contiguous().view(i.queries * i.batch, -1)


def views_between(i: In) -> Tensor:
    """Merged for the product, split for the mask, merged again for the values."""
    q, k, v = i.merged()
    scores = torch.bmm(q, k.mT).view(i.batch, i.heads, i.queries, i.keys)
    weights = _fill(i, scores).softmax(-1).view(-1, i.queries, i.keys)
    return torch.bmm(weights, v).view(i.batch, i.heads, i.queries, i.width)


def grouped(i: In) -> Tensor:
    """Keys and values of one head shared by all, by expansion."""
    q, k, v = i.by_head()
    k, v = (x[:, :1].expand(-1, i.heads, -1, -1) for x in (k, v))
    return _fill(i, q @ k.mT).softmax(-1) @ v


FOUND: dict[str, Spelling] = {
    "matmul": matmul,
    "k_permuted": lambda i: _finish(i, _fill(i, i.by_head()[0] @ i.k.permute(0, 2, 3, 1))),
    "key_first": key_first,
    "one_head": lambda i: torch.bmm(
        torch.bmm(i.q.flatten(2), i.k.flatten(2).mT).masked_fill(~i.m[:, None], -INF).softmax(2), i.v.flatten(2)),
    "narrow_values": lambda i: _fill(i, i.scores).softmax(-1) @ i.by_head()[2][..., :2],
    "no_mask": lambda i: _finish(i, i.scores),
    "einsum": lambda i: torch.einsum(
        "bhqk,bkhd->bqhd", _fill(i, torch.einsum("bqhd,bkhd->bhqk", i.q, i.k)).softmax(-1), i.v),
    "einsum_spaced": lambda i: torch.einsum(
        "a c i j, a j c e -> a i c e", _fill(i, torch.einsum("x l h d, x m h d -> x h l m", i.q, i.k)).softmax(3), i.v),
    "einsum_heads_last": einsum_heads_last,
    "einsum_key_first": einsum_key_first,
    "einsum_two_features": lambda i: torch.einsum(
        "bqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqk", i.q, i.k).masked_fill(~i.m[:, None], -INF).softmax(-1), i.v),
    "einsum_values_first": lambda i: torch.einsum("bkhd,bhqk->bqhd", i.v, _fill(i, i.scores).softmax(-1)),
    "merged_bmm": merged_bmm,
    "merged_expand": merged_expand,
    "views_between": views_between,
    "grouped": grouped,
    "length_first": lambda i: torch.bmm(
        torch.bmm(i.length_first()[0], i.length_first()[1].mT).softmax(-1), i.length_first()[2]),
    "scale_on_q": lambda i: (_fill(i, (i.by_head()[0] * 0.7) @ i.by_head()[1].mT)).softmax(-1) @ i.by_head()[2],
    "scale_on_k": lambda i: (_fill(i, i.by_head()[0] @ (i.by_head()[1] / 3).mT)).softmax(-1) @ i.by_head()[2],
    "scale_many": lambda i: _finish(i, _fill(i, 2 * (i.scores * 0.25) / 3 * torch.full((), 0.5))),
    "scale_negative": lambda i: _finish(i, _fill(i, i.scores * -0.5)),
    "scale_after_fill": lambda i: _finish(i, i.scores.masked_fill(~i.key_mask(), -1e9) * 0.125),
    "fill_1e9": lambda i: _finish(i, i.scores.masked_fill(i.key_mask() == 0, -1e9)),
    "fill_1e4": lambda i: _finish(i, i.scores.masked_fill(~i.key_mask(), -1e4)),
    "fill_min": lambda i: _finish(i, i.scores.masked_fill(~i.key_mask(), torch.finfo(torch.float64).min)),
    "where": lambda i: _finish(i, torch.where(i.key_mask(), i.scores, -INF)),
    "where_turned": lambda i: _finish(i, torch.where(~i.key_mask(), torch.full_like(i.scores, -1e9), i.scores)),
    "additive": lambda i: _finish(i, i.scores + (1.0 - i.key_mask().double()) * -1e9),
    "additive_left": lambda i: _finish(i, (i.key_mask().double() - 1) * 1e9 + i.scores),
    "additive_inf": lambda i: _finish(i, i.scores + torch.zeros_like(i.scores[:1]).masked_fill(~i.key_mask(), -INF)),
    "additive_two": lambda i: _finish(
        i, i.scores + (1.0 - i.key_mask().double()) * -1e9 + (1.0 - i.valid[:, None, None].double()) * -1e9),
    "additive_sum": lambda i: _finish(
        i, i.scores + ((1.0 - i.key_mask().double()) * -1e9 + (~i.valid[:, None, None]).double() * -1e9)),
    "two_fills": lambda i: _finish(
        i, i.scores.masked_fill(~i.key_mask(), -INF).masked_fill(~i.valid[:, None, None], -1e9)),
    "fill_and_additive": lambda i: _finish(
        i, i.scores.masked_fill(~i.key_mask(), -1e9) + torch.where(i.valid[:, None, None], 0.0, -1e9)),
    "mask_lengths": lambda i: _finish(i, _fill(i, i.scores, i.valid[:, None, None])),
    "mask_ids": lambda i: _finish(i, _fill(i, i.scores, (i.ids != 0)[:, None, None])),
    "mask_product": lambda i: _finish(i, _fill(i, i.scores, (i.ids != 0)[:, None, None] & i.causal())),
    "mask_causal": lambda i: _finish(i, _fill(i, i.scores, i.causal())),
    "mask_window": lambda i: _finish(i, _fill(i, i.scores, i.causal().triu(-1) & i.valid[:, None, None].logical_or(i.causal()))),  # noqa: E501
    "mask_band": lambda i: _finish(
        i, _fill(i, i.scores, (torch.arange(i.keys) - torch.arange(i.queries)[:, None]).abs() <= 2)),
    "mask_outer": lambda i: _finish(i, _fill(i, i.scores, (i.m[:, :, None] & i.m[:, None])[:, None, :i.queries])),
    "mask_per_head": lambda i: _finish(
        i, _fill(i, i.scores, i.key_mask() | (torch.arange(i.heads) == 1)[:, None, None])),
    "mask_of_every_kind": lambda i: _finish(
        i, _fill(i, i.scores, i.causal()).masked_fill((i.ids == 0)[:, None, None], -1e9)
        + (1 - i.valid[:, None, None].double()) * -1e9),
    "float32_softmax": lambda i: _fill(i, i.scores).softmax(-1, torch.float32).double() @ i.by_head()[2],
    "float32_cast": lambda i: _fill(i, i.scores.float()).softmax(-1).type_as(i.v) @ i.by_head()[2],
    "dropout_off": lambda i: F.dropout(_fill(i, i.scores).softmax(-1), 0.3, training=False) @ i.by_head()[2],
    "contiguous": lambda i: _fill(i, i.scores).softmax(-1).contiguous().clone() @ i.by_head()[2].contiguous(),
    "sdpa": lambda i: F.scaled_dot_product_attention(*i.by_head(), attn_mask=i.key_mask()),
    "sdpa_float": lambda i: F.scaled_dot_product_attention(
        *i.by_head(), attn_mask=torch.where(i.key_mask(), 0.0, -INF).double().expand(-1, -1, i.queries, -1)),
    "sdpa_causal": lambda i: F.scaled_dot_product_attention(*i.by_head(), is_causal=True),
    "sdpa_scale": lambda i: F.scaled_dot_product_attention(*i.by_head(), scale=0.3),
    "sdpa_merged": lambda i: F.scaled_dot_product_attention(*i.merged()),
    "sdpa_one_head": lambda i: F.scaled_dot_product_attention(*i.flat(), attn_mask=i.m[:, None]),
    "sdpa_wide_mask": lambda i: F.scaled_dot_product_attention(
        *i.by_head(), attn_mask=(i.key_mask() & i.causal()).expand(-1, i.heads, -1, -1)),
}  # fmt: skip

SELF_ONLY = {"mask_outer"}
#: These are one site in principle, but recognition may leave them alone.
MAY_MISS = {"scale_many", "mask_window", "additive_inf"}
SYMBOLIC = [
    "matmul", "key_first", "einsum_key_first", "merged_bmm", "merged_expand", "views_between", "mask_of_every_kind",
    "sdpa_wide_mask",
]  # fmt: skip


def _one_site(name: str, sizes: Sizes, symbolic: bool) -> None:
    if name in SELF_ONLY and sizes is DIFFERENT:
        sizes = SQUARE
    _, sites, misses = found(FOUND[name], sizes, symbolic)
    assert len(sites) == 1 or name in MAY_MISS, misses


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    for sizes in (DIFFERENT, EQUAL):
        _one_site(name, sizes, symbolic=False)


@pytest.mark.parametrize("name", SYMBOLIC)
def test_found_with_symbolic_sizes(name):
    _one_site(name, DIFFERENT, symbolic=True)


def test_each_layer_is_a_site():
    def fn(i: In) -> Tensor:
        for _ in range(2):
            i.q = matmul(i).transpose(1, 2)
        return i.q

    _, sites, misses = found(fn, DIFFERENT)
    assert len(sites) == 2 and not misses


# ---------------------------------------------------------------- near misses


def _both(weights: Tensor, i: In) -> tuple[Tensor, ...]:
    return weights @ i.by_head()[2], weights


NEAR: dict[str, Callable[[In], Any]] = {
    "k_not_transposed": lambda i: _finish(i, i.by_head()[0] @ i.by_head()[1]),
    "k_permuted_wrongly": lambda i: _finish(i, i.by_head()[0] @ i.k.permute(0, 2, 1, 3)),
    "k_head_and_batch_swapped": lambda i: _finish(i, i.by_head()[0] @ i.k.permute(2, 0, 3, 1)),
    "softmax_over_queries": lambda i: i.scores.softmax(-2) @ i.by_head()[2],
    "softmax_over_heads": lambda i: i.scores.softmax(1) @ i.by_head()[2],
    "softmax_over_batch": lambda i: i.scores.softmax(0) @ i.by_head()[2],
    "softmax_over_two": lambda i: i.scores.flatten(2).softmax(-1).view_as(i.scores) @ i.by_head()[2],
    "softmax_twice": lambda i: i.scores.softmax(-1).softmax(-1) @ i.by_head()[2],
    "log_softmax": lambda i: i.scores.log_softmax(-1) @ i.by_head()[2],
    "weights_transposed": lambda i: i.scores.softmax(-1).mT @ i.by_head()[2],
    "mask_after_softmax": lambda i: (i.scores.softmax(-1) * i.key_mask()) @ i.by_head()[2],
    "fill_after_softmax": lambda i: i.scores.softmax(-1).masked_fill(~i.key_mask(), 0.0) @ i.by_head()[2],
    "weights_returned": lambda i: _both(_fill(i, i.scores).softmax(-1), i),
    "weights_used_twice": lambda i: (lambda p: p @ (p @ i.by_head()[2]))(i.scores.softmax(-1)),
    "weights_for_two_values": lambda i: (lambda p: p @ i.by_head()[2] + p @ i.by_head()[1])(i.scores.softmax(-1)),
    "weights_squared": lambda i: (lambda p: p @ p)(i.scores.softmax(-1)),
    "weights_detached": lambda i: i.scores.softmax(-1).detach() @ i.by_head()[2],
    "scores_returned": lambda i: (lambda s: (_finish(i, s), s))(_fill(i, i.scores)),
    "raw_scores_returned": lambda i: (lambda s: (_finish(i, _fill(i, s)), s))(i.scores),
    "scores_detached": lambda i: _finish(i, i.scores.detach()),
    "scores_without_grad_of_max": lambda i: _finish(i, i.scores - i.scores.amax(-1, keepdim=True)),
    "scale_per_element": lambda i: _finish(i, i.scores * i.scores.abs()),
    "scale_per_head": lambda i: _finish(i, i.scores * i.v[0, 0, :, :1, None]),
    "scale_per_head_known": lambda i: _finish(i, i.scores * torch.where(torch.arange(i.heads) == 1, 2.0, 1.0)[:, None, None]),  # noqa: E501
    "scale_by_lengths": lambda i: _finish(i, i.scores / i.n[:, None, None, None]),
    "scale_zero": lambda i: _finish(i, i.scores * 0),
    "scale_inverted": lambda i: _finish(i, 2.0 / i.scores),
    "scale_rounded": lambda i: _finish(i, torch.div(i.scores, 0.5, rounding_mode="floor")),
    "scale_negative_of_inf": lambda i: _finish(i, (i.scores + torch.where(i.key_mask(), 0.0, -INF)) * -1.0),
    "scale_negative_of_finite": lambda i: _finish(i, i.scores.masked_fill(~i.key_mask(), -1e9) * -1.0),
    "scale_small_of_finite": lambda i: _finish(i, i.scores.masked_fill(~i.key_mask(), -1e4) * 1e-4),
    "additive_negative_of_inf": lambda i: _finish(i, -(i.scores + torch.where(i.key_mask(), 0.0, -INF))),
    "sub_mask": lambda i: _finish(i, i.scores - torch.where(i.key_mask(), 0.0, -1e9)),
    "mask_minus_scores": lambda i: _finish(i, torch.where(i.key_mask(), 0.0, -1e9) - i.scores),
    "add_alpha": lambda i: _finish(i, torch.add(i.scores, torch.where(i.key_mask(), 0.0, -1e9), alpha=-1)),
    "additive_product": lambda i: _finish(i, i.scores * torch.where(i.key_mask(), 1.0, -1e9)),
    "fill_small": lambda i: _finish(i, i.scores.masked_fill(~i.key_mask(), -3.0)),
    "fill_positive": lambda i: _finish(i, i.scores.masked_fill(~i.key_mask(), 1e9)),
    "fill_data": lambda i: _finish(i, i.scores.masked_fill(~i.key_mask(), i.v[0, 0, 0, 0])),
    "fill_two_levels": lambda i: _finish(i, i.scores.masked_fill(~i.key_mask(), -1e4).masked_fill(i.causal(), -2.0)),
    "additive_small": lambda i: _finish(i, i.scores + (1.0 - i.key_mask().double()) * -5.0),
    "additive_everywhere": lambda i: _finish(i, i.scores + torch.where(i.key_mask(), 1.0, -1e9)),
    "additive_both_small": lambda i: _finish(
        i, i.scores + (1.0 - i.key_mask().double()) * -6e3 + (1.0 - i.valid[:, None, None].double()) * -6e3),
    "bias_of_positions": lambda i: _finish(
        i, i.scores - (torch.arange(i.keys) - torch.arange(i.queries)[:, None]).abs().double()),
    "bias_learned": lambda i: _finish(i, _fill(i, i.scores) + i.v[:1, :1, :, :1].transpose(1, 2)),
    "relu_of_scores": lambda i: _finish(i, _fill(i, i.scores.relu())),
    "capped_scores": lambda i: _finish(i, _fill(i, 5 * torch.tanh(i.scores / 5))),
    "clamped_scores": lambda i: _finish(i, i.scores.clamp(-1, 1)),
    "shifted_mask": lambda i: _finish(i, _fill(i, i.scores, i.key_mask().roll(1, -1))),
    "mask_of_neighbour": lambda i: _finish(i, _fill(i, i.scores, i.key_mask().flip(0))),
    "mask_broadcast_to_queries": lambda i: torch.bmm(
        torch.bmm(i.q.flatten(2), i.k.flatten(2).mT).masked_fill(~i.m, -INF).softmax(-1), i.v.flatten(2)),
    "mask_of_queries": lambda i: _finish(i, i.scores.masked_fill(~i.m[:, None, :i.queries, None], -1e9)),
    "window_off_by_one": lambda i: _finish(i, _fill(i, i.scores, torch.ones(i.queries, i.keys, dtype=torch.bool).tril(1))),
    "strictly_causal": lambda i: _finish(
        i, i.scores.masked_fill(torch.ones(i.queries, i.keys, dtype=torch.bool).triu(0) & i.key_mask(), -1e9)),
    "bottom_right_causal": lambda i: _finish(
        i, _fill(i, i.scores, torch.ones(i.queries, i.keys, dtype=torch.bool).tril(1))),
    "values_of_neighbour": lambda i: _fill(i, i.scores).softmax(-1) @ i.by_head()[2].flip(0),
    "values_head_and_batch_swapped": lambda i: _fill(i, i.scores).softmax(-1) @ i.v.permute(2, 0, 1, 3),
    "values_width_and_length_swapped": lambda i: _fill(i, i.scores).softmax(-1) @ i.v.permute(0, 2, 3, 1),
    "values_shared_by_batch": lambda i: _fill(i, i.scores).softmax(-1) @ i.by_head()[2][:1],
    "values_shared_by_heads": lambda i: _fill(i, i.scores).softmax(-1) @ i.by_head()[2][:, :1],
    "keys_shared_by_batch": lambda i: _finish(i, _fill(i, i.by_head()[0] @ i.by_head()[1][:1].mT)),
    "keys_shared_by_heads": lambda i: _finish(i, _fill(i, i.by_head()[0] @ i.by_head()[1][:, :1].mT)),
    "queries_shared_by_batch": lambda i: _finish(i, _fill(i, i.by_head()[0][:1] @ i.by_head()[1].mT)),
    "one_query": lambda i: _finish(i, _fill(i, i.by_head()[0][:, :, :1] @ i.by_head()[1].mT)),
    "values_one_less": lambda i: i.scores[..., 1:].softmax(-1) @ i.by_head()[2][:, :, 1:],
    "einsum_sums_apart": lambda i: torch.einsum(
        "bqk,bkhd->bqhd", torch.einsum("bqhd,bkxy->bqk", i.q, i.k).softmax(-1), i.v),
    "einsum_sums_one_apart": lambda i: torch.einsum(
        "bqk,bkhd->bqhd", torch.einsum("bqhd,bkhe->bqk", i.q, i.k).softmax(-1), i.v),
    "einsum_features_crossed": lambda i: torch.einsum(
        "bqk,bkhd->bqhd", torch.einsum("bqhd,bkdh->bqk", i.q, i.k).softmax(-1), i.v),
    "einsum_values_apart": lambda i: torch.einsum("bhqk,bjhd->bqhd", i.scores.softmax(-1), i.v),
    "einsum_out_without_queries": lambda i: torch.einsum("bhqk,bkhd->bhd", _fill(i, i.scores).softmax(-1), i.v),
    "einsum_out_without_heads": lambda i: torch.einsum("bhqk,bkhd->bqd", _fill(i, i.scores).softmax(-1), i.v),
    "einsum_values_without_heads": lambda i: torch.einsum("bhqk,bkd->bqhd", _fill(i, i.scores).softmax(-1), i.v[:, :, 0]),
    "einsum_values_with_queries": lambda i: torch.einsum(
        "bhqk,bkhd->bhqkd", _fill(i, i.scores).softmax(-1), i.v).sum(3),
    "einsum_heads_crossed": lambda i: torch.einsum("bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->hbqk", i.q, i.k).softmax(-1), i.v),  # noqa: E501
    "baddbmm_beta": lambda i: torch.bmm(torch.baddbmm(
        torch.where(i.m[:, None], 0.0, -1e9).double(), i.flat()[0], i.flat()[1].mT, beta=-1).softmax(-1), i.flat()[2]),
    "baddbmm_alpha": lambda i: torch.bmm(torch.baddbmm(
        torch.where(i.m[:, None], 0.0, -1e9).double(), i.flat()[0], i.flat()[1].mT, alpha=0.3).softmax(-1), i.flat()[2]),
    "baddbmm_data": lambda i: torch.bmm(torch.baddbmm(
        i.flat()[1][:, :1, :1], i.flat()[0], i.flat()[1].mT).softmax(-1), i.flat()[2]),
    "product_of_same": lambda i: (i.by_head()[0] @ i.by_head()[0].mT).softmax(-1) @ i.by_head()[0],
    "linear_scores": lambda i: F.linear(i.flat()[0], i.flat()[1][0]).softmax(-1) @ i.flat()[2],
    "pooling": lambda i: (i.flat()[1].sum(-1).masked_fill(~i.m, -INF).softmax(-1)[:, None] @ i.flat()[2]).squeeze(1),
    "sdpa_grouped": lambda i: F.scaled_dot_product_attention(
        i.by_head()[0], i.by_head()[1][:, :1], i.by_head()[2][:, :1], enable_gqa=True),
    "sdpa_data_mask": lambda i: F.scaled_dot_product_attention(*i.by_head(), attn_mask=i.scores * 0.1),
    "sdpa_small_mask": lambda i: F.scaled_dot_product_attention(
        *i.by_head(), attn_mask=torch.where(i.key_mask(), 0.0, -2.0).double()),
    "sdpa_shared_keys": lambda i: F.scaled_dot_product_attention(i.by_head()[0], i.by_head()[1][:1], i.by_head()[2]),
    "sdpa_mask_of_queries": lambda i: F.scaled_dot_product_attention(
        *i.by_head(), attn_mask=i.m[:, None, :i.queries, None] | i.key_mask()),
    "weights_in_values": lambda i: (lambda w, v: (w[..., None] * (v + w.sum((-1, -2), keepdim=True))[:, :, None]).sum(-2))(
        _fill(i, i.scores).softmax(-1), i.by_head()[2]),
    "weights_in_queries": lambda i: (lambda q, s: ((q * s.amax(-1, keepdim=True)) @ i.by_head()[1].mT + s).softmax(-1)
                                     @ i.by_head()[2])(i.by_head()[0], _fill(i, i.scores).softmax(-1)),
    "weights_over_their_largest": lambda i: (lambda w: (w / w.amax(-1, keepdim=True)) @ i.by_head()[2])(
        i.scores.sigmoid() * i.key_mask()),
    "rounded_to_integers": lambda i: _finish(i, i.scores.long().double()),
    "rounded_weights": lambda i: ((i.scores.long().double() * (i.by_head()[0] @ i.by_head()[1].mT).sum(-1, keepdim=True))
                                  * i.key_mask()) @ i.by_head()[2],
    "dropout_on_scores": lambda i: _finish(i, F.dropout(i.scores, 0.5, training=True)),
    "window_by_data": lambda i: _finish(i, _fill(i, i.scores, torch.arange(i.keys) <= i.n[:, None, None, None])),
}  # fmt: skip


#: No record of this kind can express them, or their gradient or other readers would be lost.
NEVER = [
    "softmax_over_queries", "softmax_over_heads", "softmax_over_batch", "softmax_twice", "log_softmax",
    "mask_after_softmax", "fill_after_softmax", "weights_returned", "weights_used_twice", "weights_for_two_values",
    "weights_detached", "scores_returned", "raw_scores_returned", "scores_detached", "scale_per_element",
    "scale_rounded", "scale_negative_of_inf", "fill_small", "fill_positive", "capped_scores",
    "einsum_sums_apart", "einsum_features_crossed", "einsum_values_apart", "einsum_out_without_queries", "pooling",
    "dropout_on_scores", "weights_in_values", "weights_over_their_largest", "rounded_to_integers", "rounded_weights",
]  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name):
    """Run with equal sizes, where nothing but the axes themselves tells them apart, and with different ones."""
    for sizes in (EQUAL, DIFFERENT):
        try:
            NEAR[name](In(*make(sizes)))
        except (RuntimeError, IndexError):
            continue  # does not fit these sizes
        _, sites, _ = found(NEAR[name], sizes)
        assert not sites or name not in NEVER


def test_misses_have_a_reason_and_a_node():
    for name in ("weights_returned", "fill_small", "capped_scores", "scale_per_element"):
        run, sites, misses = found(NEAR[name], DIFFERENT)
        assert not sites and len(misses) == 1, name
        assert misses[0].reason and misses[0].node in run.graph.nodes


def test_dropout_is_a_rate():
    _run, sites, _ = found(lambda i: F.dropout(_fill(i, i.scores).softmax(-1), 0.0, True) @ i.by_head()[2], DIFFERENT)
    assert sites[0].dropout == 0
    inputs = make(DIFFERENT)
    gm = capture(lambda *a: F.dropout(In(*a).scores.softmax(-1), 0.3, training=True) @ In(*a).by_head()[2], *inputs)
    canonicalise(gm)
    sites, _ = recognise(gm.graph, analyse(gm, *inputs).known)
    assert [s.dropout for s in sites] == [0.3]


def test_one_key_is_refused_by_name():
    """A memory of one key has no axis of keys: nothing to find, but not to be passed over in silence."""

    def over_one_key(x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.einsum("bqd,bkd->bqk", x, key).softmax(-1) @ value

    inputs = (torch.randn(3, 5, 4), torch.randn(3, 1, 4), torch.randn(3, 1, 6))
    gm = capture(over_one_key, *inputs)
    canonicalise(gm)
    sites, misses = recognise(gm.graph, analyse(gm, *inputs).known)
    assert not sites and len(misses) == 1 and "one key" in misses[0].reason


def _two_fills(i: In, known_fill: float, data_fill: float) -> Tensor:
    """A mask of lengths, and one of the data, which gemopt cannot follow, added like a bias."""
    keep = i.scores[:, 0, 0] > 0
    scores = i.scores.masked_fill(~i.valid[:, None, None], known_fill)
    return (scores + torch.zeros_like(keep, dtype=i.q.dtype).masked_fill(~keep, data_fill)[:, None, None]).softmax(-1)


@pytest.mark.parametrize(
    ("known_fill", "data_fill", "refused"), [(-1e9, -1e9, True), (-INF, -1e9, False), (-1e9, -2.0, False)]
)
def test_a_fill_beside_a_mask_of_data_is_refused(known_fill, data_fill, refused):
    """Where the data hides all that the lengths leave, both are as low, and eager shares the weight out."""
    inputs = make(DIFFERENT)
    gm = capture(lambda *a: _two_fills(In(*a), known_fill, data_fill) @ In(*a).by_head()[2], *inputs)
    canonicalise(gm)
    sites, misses = recognise(gm.graph, analyse(gm, *inputs).known)
    assert len(sites) == (not refused) and all(s.biases for s in sites)
    assert ["as low" in m.reason for m in misses] == [True] * refused
