"""Rows that a mask made constant, read one by one: by position, by a loss, by a mask. No packed row holds them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemopt.testing import assert_equivalent
from tests.hostile.common import SWEEPING, compiled, sweep

D, IDS, MAX_LEN, CLASSES = 6, 20, 7, 5
CASES = ("zeros", "skewed", "full") if SWEEPING else ("zeros", "skewed")

Masker = Callable[[Tensor, Tensor], Tensor]
Reader = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

MASKERS: dict[str, Masker] = {
    "times": lambda h, v: h * v[..., None],
    "fill 0": lambda h, v: h.masked_fill(~v[..., None], 0.0),
    "fill 3": lambda h, v: h.masked_fill(~v[..., None], 3.0),
    "where": lambda h, v: torch.where(v[..., None], h, -2.0),
}


def rows(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0])


# (h [B, L, D], valid [B, L], lengths [B], positions [B] that are data and within the padded length)
READERS: dict[str, Reader] = {
    "last item": lambda h, v, n, p: h[rows(h), n - 1],
    "last item or first": lambda h, v, n, p: h[rows(h), (n - 1).clamp(min=0)],
    "first": lambda h, v, n, p: h[:, 0],
    "last position": lambda h, v, n, p: h[:, -1],
    "position 3": lambda h, v, n, p: h.select(1, 3),
    "positions of data": lambda h, v, n, p: h[rows(h), p],
    "one past the end": lambda h, v, n, p: h[rows(h), n.clamp(max=h.shape[1] - 1)],
    "gather": lambda h, v, n, p: h.gather(1, p[:, None, None].expand(-1, 1, h.shape[-1])),
    "two gathers": lambda h, v, n, p: h.gather(1, torch.stack([p, (p + 2) % h.shape[1]], 1)[..., None].expand(-1, 2, D)),
    "take along": lambda h, v, n, p: torch.take_along_dim(h, p[:, None, None], 1),
    "index_select": lambda h, v, n, p: h.index_select(1, torch.tensor([0, 4])),
    "narrow": lambda h, v, n, p: h.narrow(1, 2, 3),
    "stride": lambda h, v, n, p: h[:, ::2],
    "one mask": lambda h, v, n, p: h[v],
    "another mask": lambda h, v, n, p: h[torch.arange(h.shape[1]) < p[:, None]],
    "sum": lambda h, v, n, p: h.sum(1),
    "largest": lambda h, v, n, p: h.amax(1),
    "flat rows": lambda h, v, n, p: h.flatten(0, 1)[rows(h) * h.shape[1] + p],
    "product with a row": lambda h, v, n, p: torch.einsum("bld,bd->bl", h, h[rows(h), p]),
}
BESIDE_A_SUM = ("last item", "first", "last position", "positions of data", "two gathers", "another mask")
QUICK = {("times", reader, True) for reader in READERS} | {("times", reader, False) for reader in BESIDE_A_SUM}
QUICK |= {(masker, reader, True) for masker in MASKERS for reader in ("last item", "gather")}


class Read(nn.Module):
    """``alone``: nothing else reads the masked tensor, so that its live rows are the positions alone."""

    def __init__(self, masker: Masker, reader: Reader, alone: bool) -> None:
        super().__init__()
        self.masker, self.reader, self.alone = masker, reader, alone
        self.items, self.up, self.down = nn.Embedding(IDS, D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)

    def forward(self, ids: Tensor, lengths: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        h = self.masker(self.down(F.gelu(self.up(self.items(ids)))), valid)
        read = self.reader(h, valid, lengths, positions)
        return (read,) if self.alone else (read, h.sum(1))


def inputs(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    ids = torch.randint(1, IDS, (len(lengths), max_len), generator=generator)
    return ids, lengths, torch.randint(0, max_len, (len(lengths),), generator=generator)


@pytest.mark.parametrize(
    ("masker", "reader", "alone"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [sweep])
        for case in itertools.product(MASKERS, READERS, (True, False))
    ],
)
def test_positions(masker, reader, alone):
    model = Read(MASKERS[masker], READERS[reader], alone)
    assert_equivalent(model, inputs, max_len=MAX_LEN, cases=CASES, compiled=compiled(model))


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "mean": lambda x, y, v: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "sum": lambda x, y, v: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "ignored": lambda x, y, v: F.cross_entropy(x.transpose(1, 2), y, ignore_index=0),
    "ignored padding": lambda x, y, v: F.cross_entropy(x.transpose(1, 2), y.masked_fill(~v, -100)),
    "each": lambda x, y, v: F.cross_entropy(x.transpose(1, 2), y, reduction="none").sum(1),
    "smooth": lambda x, y, v: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1, ignore_index=1),
    "nll": lambda x, y, v: F.nll_loss(x.log_softmax(-1).transpose(1, 2), y, ignore_index=2),
    "bce": lambda x, y, v: F.binary_cross_entropy_with_logits(x[..., 0], (y > 2).to(x)),
    "mse": lambda x, y, v: F.mse_loss(x[..., 0], y.to(x)),
}


class Scored(nn.Module):
    def __init__(self, masker: Masker, loss: Loss) -> None:
        super().__init__()
        self.masker, self.loss = masker, loss
        self.items, self.head = nn.Embedding(IDS, D), nn.Linear(D, CLASSES)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        return self.loss(self.masker(self.head(F.relu(self.items(ids))), valid), labels, valid)


def labelled(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    ids = torch.randint(1, IDS, (len(lengths), max_len), generator=generator)
    return ids, lengths, torch.randint(0, CLASSES, ids.shape, generator=generator)


@pytest.mark.parametrize(
    ("masker", "loss"),
    [
        pytest.param(m, x, marks=[] if m == "times" or (m, x) == ("where", "mean") else [sweep])
        for m in MASKERS
        for x in LOSSES
    ],
)
def test_losses(masker, loss):
    """Logits that a mask made constant count like any others where their targets do."""
    model = Scored(MASKERS[masker], LOSSES[loss])
    assert_equivalent(model, labelled, max_len=MAX_LEN, cases=CASES, compiled=compiled(model))
