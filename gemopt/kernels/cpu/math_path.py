"""Attention of one dense group by explicit scores: any mask, window, positions, dropout, dtype and head sizes.

    S = scale * Q K^T + bias     P = exp(S - lse) where visible, else 0        O = r (keep P) V
    dP = r keep (dO V^T)         dS = P * (dP - rowsum(dO * O))
    dQ = scale * dS K            dK = scale * dS^T Q                           dV = r (keep P)^T dO

and dbias = dS, summed over what shares an element of it. `keep` is the dropout mask and r = 1/(1-p). A row that sees no
key has O = 0 and no gradient. Queries run in blocks, so that the scores of a block stay in the cache and memory is linear
in the length; under plain causality a block meets only the keys up to its last query.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gemopt.kernels.cpu.tables import Table

SCORES_PER_BLOCK = 1 << 17
NEVER = float("-inf")


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, all as dense group tensors.

    q_pos: int64 `[n or 1, Lq]`; k_pos: int64 `[n or 1, Lk]`; k_valid: bool `[n, Lk]` or None when no key is padding.
    by_row: positions are row numbers from both starts. table: a mask given as a tensor.
    """

    q_pos: Tensor
    k_pos: Tensor
    k_valid: Tensor | None
    causal: bool
    window: tuple[int, int]
    by_row: bool
    table: Table | None = None

    def reach(self, last: int) -> int:
        """How many keys the queries before `last` can see at most."""
        keys = self.k_pos.shape[1]
        return min(last, keys) if self.causal and self.by_row else keys

    def block(self, a: int, b: int, keys: int) -> Tensor | None:
        """bool `[n or 1, 1 or H, b - a, keys]`: which of the first `keys` keys are visible; None when all are."""
        q, k = self.q_pos[:, a:b, None], self.k_pos[:, None, :keys]
        left, right = self.window
        terms = [] if self.k_valid is None else [self.k_valid[:, None, :keys]]
        if self.causal:
            terms.append(k <= q)
        if left >= 0:
            terms.append(k >= q - left)
        if right >= 0:
            terms.append(k <= q + right)
        terms = [term.unsqueeze(1) for term in terms]
        if self.table is not None:
            terms.append(self.table.block(a, b, keys))
        if not terms:
            return None
        seen = terms[0]
        for term in terms[1:]:
            seen = seen & term
        return seen.expand(-1, -1, b - a, keys)


@dataclass(frozen=True)
class Dropout:
    """keep(a, b, keys): bool `[n, H, b - a, keys]`, which weights of queries a..b survive; they count `multiplier`."""

    keep: Callable[[int, int, int], Tensor]
    multiplier: float


def blocks(lq: int, row_cost: int) -> Iterator[tuple[int, int]]:
    step = max(16, min(lq, SCORES_PER_BLOCK // max(row_cost, 1)))
    for a in range(0, lq, step):
        yield a, min(a + step, lq)


def scores(q: Tensor, k: Tensor, mask: Mask, bias: Table | None, a: int, b: int, hidden: float) -> Tensor:
    """Scores of queries that carry the scale already, `hidden` where a key is not visible."""
    keys = mask.reach(b)
    s = q[:, :, a:b] @ k[:, :, :keys].transpose(-2, -1)
    if bias is not None:
        s.add_(bias.block(a, b, keys))
    seen = mask.block(a, b, keys)
    return s if seen is None else s.masked_fill_(~seen, hidden)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Table | None, scale: float, dropout: Dropout | None
) -> tuple[Tensor, Tensor]:
    """q `[n, H, Lq, D]`, k `[n, H, Lk, D]`, v `[n, H, Lk, Dv]` → out `[n, H, Lq, Dv]`, lse `[n, H, Lq]`."""
    n, heads, lq, _ = q.shape
    out, lse = q.new_empty((n, heads, lq, v.shape[-1])), q.new_empty((n, heads, lq))
    q = q * scale
    for a, b in blocks(lq, n * heads * k.shape[2]):
        s = scores(q, k, mask, bias, a, b, NEVER)
        keys = s.shape[-1]
        top = s.amax(-1, keepdim=True)
        top.masked_fill_(top == NEVER, 0.0)
        p = s.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        lse[:, :, a:b] = (total.log() + top).squeeze(-1)
        total.masked_fill_(total == 0, 1.0)
        if dropout is not None:
            p.mul_(dropout.keep(a, b, keys))
            total.div_(dropout.multiplier)  # by 0 for p = 1: out is then 0 / inf
        torch.div(p @ v[:, :, :keys], total, out=out[:, :, a:b])
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    mask: Mask,
    bias: Table | None,
    scale: float,
    dropout: Dropout | None,
    dbias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; padding queries must come with `dout` 0. Adds the gradient of the bias to `dbias`."""
    n, heads, lq, _ = q.shape
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    q = q * scale
    lse = lse.masked_fill(lse == NEVER, 0.0).unsqueeze(-1)
    for a, b in blocks(lq, n * heads * k.shape[2]):
        p = scores(q, k, mask, bias, a, b, NEVER).sub_(lse[:, :, a:b]).exp_()
        total = p.sum(-1, keepdim=True)  # 1, but for the rounding of lse, which grows with the scores
        p.div_(total.masked_fill_(total == 0, 1.0))
        keys = p.shape[-1]
        do = dout[:, :, a:b]
        dp = do @ v[:, :, :keys].transpose(-2, -1)
        weights = p
        if dropout is not None:
            keep = dropout.keep(a, b, keys)
            dp.mul_(keep).mul_(dropout.multiplier)
            weights = (p * keep).mul_(dropout.multiplier)
        dv[:, :, :keys] += weights.transpose(-2, -1) @ do
        # Eager's own order: where one key is visible the difference is exactly 0, which do · out would round.
        weighted = p * dp
        ds = weighted.sub_(p.mul_(weighted.sum(-1, keepdim=True)))
        if bias is not None and dbias is not None:
            bias.add(dbias, a, b, ds)
        torch.mul(ds @ k[:, :, :keys], scale, out=dq[:, :, a:b])
        dk[:, :, :keys] += ds.transpose(-2, -1) @ q[:, :, a:b]
    return dq, dk, dv
