"""Attentions that share a relation or see past the end of their keys: masks read in the place that they are meant for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gemopt.testing import assert_equivalent
from tests.hostile.common import compiled

D, IDS, MAX_LEN, KEYS = 6, 20, 7, 4
CASES = ("zeros", "skewed")


class TwoReadings(nn.Module):
    """A directed relation ``[L, L]``, read once as queries by keys and once as keys by queries."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.items = order, nn.Embedding(IDS, D)
        self.first, self.second = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)
        ring = torch.arange(MAX_LEN)
        self.register_buffer("relation", (ring[:, None] * 5 + ring * 3) % 4 < 2)

    def attend(self, h: Tensor, qkv: nn.Linear, queries_first: bool, valid: Tensor) -> Tensor:
        q, k, v = qkv(h).chunk(3, -1)
        seen = self.relation[: h.shape[1], : h.shape[1]] | torch.eye(h.shape[1], dtype=torch.bool)
        if queries_first:
            scores = torch.einsum("bqd,bkd->bqk", q, k).masked_fill(~(seen & valid[:, None]), -torch.inf)
            return torch.einsum("bqk,bkd->bqd", scores.softmax(2).nan_to_num(), v)
        scores = torch.einsum("bqd,bkd->bkq", q, k).masked_fill(~(seen & valid[:, :, None]), -torch.inf)
        return torch.einsum("bkq,bkd->bqd", scores.softmax(1).nan_to_num(), v)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        h = self.items(ids)
        for qkv, order in zip((self.first, self.second), self.order, strict=True):
            h = h + self.attend(h, qkv, order == "q", valid)
        return (h * valid[..., None]).sum(1)


def inputs(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randint(1, IDS, (len(lengths), max_len), generator=generator), lengths


@pytest.mark.parametrize("order", ["qk", "kq", "qq"])
def test_one_relation_read_both_ways(order):
    model = TwoReadings(order)
    assert_equivalent(model, inputs, max_len=MAX_LEN, cases=CASES, compiled=compiled(model))


class MoreQueriesThanKeys(nn.Module):
    """Queries at positions where there is no key: their own is none that they could see."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.items, self.qkv = nn.Embedding(IDS, D), nn.Linear(D, 3 * D)

    def seen(self, queries: int, keys: int, n_keys: Tensor, padding: Tensor) -> Tensor:
        i, j = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
        valid = (j < n_keys[:, None])[:, None]
        return {
            "window": (i - j).abs() <= 2,
            "causal window": (j <= i) & (j >= i - 3),
            "blocks": i // 2 == j // 2,
            "window of valid keys": ((i - j).abs() <= 2) & valid,
            "window beside a mask": ((i - j).abs() <= 2) & ~padding[:, None],
            "one to one": i == j,
        }[self.spelling]

    def forward(self, ids: Tensor, lengths: Tensor, keys: Tensor, n_keys: Tensor, padding: Tensor) -> Tensor:
        q = self.qkv(self.items(ids))[..., :D]
        _, k, v = self.qkv(self.items(keys)).chunk(3, -1)
        hidden = ~self.seen(ids.shape[1], keys.shape[1], n_keys, padding)
        weights = (q @ k.mT).masked_fill(hidden, -1e9).softmax(-1)
        return ((weights @ v) * (torch.arange(ids.shape[1]) < lengths[:, None])[..., None]).sum(1)


def crossed(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    batch = len(lengths)
    n_keys = torch.randint(1, KEYS + 1, (batch,), generator=generator)
    ids = torch.randint(1, IDS, (batch, max_len), generator=generator)
    keys = torch.randint(1, IDS, (batch, KEYS), generator=generator)
    return ids, lengths, keys, n_keys, torch.arange(KEYS) >= n_keys[:, None]


SPELLINGS = ("window", "causal window", "blocks", "window of valid keys", "window beside a mask", "one to one")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_queries_past_the_last_key(spelling):
    """Under a finite fill eager shares their weight out among all keys."""
    model = MoreQueriesThanKeys(spelling)
    assert_equivalent(model, crossed, max_len=MAX_LEN, cases=CASES, lengths=["lengths"], compiled=compiled(model))
