"""Features in another order, number or dim than the operands have them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .programs import Program, equal, pooled, valid


def weights(m: Program, h: Tensor, v: Tensor, score: str) -> Tensor:
    scores = m.q(h) @ m.k(h).mT
    return scores.masked_fill(~v[:, None], -1e9).softmax(-1) if score == "softmax" else scores.relu() * v[:, None]


@pytest.mark.parametrize("score", ["softmax", "relu"])
@pytest.mark.parametrize("result", ["bqhd", "bqdh", "bdqh", "bhqd"])
def test_einsum_orders_the_features_of_the_result(score, result):
    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        h, v = m.items(ids), valid(ids, n)
        out = torch.einsum(f"bqk,bkhd->{result}", weights(m, h, v, score), m.v(h).unflatten(-1, (2, 4)))
        return torch.einsum(f"{result},bq->bdh", out, v.to(out.dtype))

    equal(program)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("copied", ["expand", "repeat_interleave", "nothing"])
def test_features_permuted_behind_copied_heads(side, copied):
    def turned(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (2, 4))[:, None]
        x = x.expand(-1, 2, -1, -1, -1) if copied == "expand" else x.repeat_interleave(2, 1) if copied != "nothing" else x
        return x.transpose(-1, -2).flatten(-2)

    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        h, v = m.items(ids), valid(ids, n)
        q = torch.stack([m.q(h), m.out(h)], 1)
        k = turned(m.k(h)) if side == "keys" else m.k(h)[:, None].expand(-1, 2, -1, -1)
        values = turned(m.v(h)) if side == "values" else m.v(h)[:, None].expand(-1, 2, -1, -1)
        out = (q @ k.mT).masked_fill(~v[:, None, None], -1e9).softmax(-1) @ values
        return (out * v[:, None, :, None]).sum(2)

    equal(program)


@pytest.mark.parametrize("letters", ["blhd,bmhd->blm", "blhd,bmhd->bml"])
def test_einsum_broadcasts_a_contracted_axis(letters):
    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        h, v = m.items(ids), valid(ids, n)
        scores = torch.einsum(letters, m.q(h)[..., :4].unsqueeze(2), m.k(h).unflatten(-1, (2, 4)))
        scores = scores if letters.endswith("lm") else scores.mT
        return pooled(scores.masked_fill(~v[:, None], -1e9).softmax(-1) @ m.v(h), v)

    equal(program)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("features", [1, 4, 8])
def test_gather_of_some_features(masked, features):
    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        h = m.encoded(ids)
        h = h * valid(ids, n)[..., None] if masked else h
        at = (n - 1).clamp(min=0)[:, None, None].expand(-1, 1, features)
        return h.gather(1, at)

    equal(program)


@pytest.mark.parametrize("merge", ["stack", "cat", "one class"])
def test_classes_that_are_merged_dims(merge):
    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        h = m.encoded(ids)
        both = torch.stack([m.q(h), m.k(h)], -2).flatten(-2) if merge == "stack" else torch.cat([m.q(h), m.k(h)], -1)
        logits = both if merge != "one class" else h[..., :1]
        loss = F.cross_entropy(logits.transpose(1, 2), ids % logits.shape[-1], reduction="none")
        return (loss * valid(ids, n)).sum()

    equal(program)


def test_clamp_is_not_relu():
    """At a score of exactly 0 clamp passes the gradient: a projection of zeros trains in eager."""

    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        h, v = m.items(ids), valid(ids, n)
        return pooled(((m.q(h) * 0.0) @ m.k(h).mT).clamp(min=0) * v[:, None] @ m.v(h), v)

    equal(program)
