"""Attention of one dense group by explicit scores: any mask, window, positions, dropout, dtype and head sizes.

    S = scale * Q K^T            P = exp(S - lse) where visible, else 0        O = (P * drop) V
    dP = (dO V^T) * drop         dS = P * (dP - rowsum(dO * O))
    dQ = scale * dS K            dK = scale * dS^T Q                           dV = (P * drop)^T dO

`drop` is 0 or 1/(1-p). A row that sees no key has lse = -inf, O = 0 and no gradient. Queries run in blocks, so that the
scores of a block stay in the cache and the memory is linear in the length.
"""
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SCORES_PER_BLOCK = 1 << 20


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, all as dense group tensors.

    q_pos: int64 `[n or 1, Lq]`; k_pos: int64 `[n or 1, Lk]`; k_valid: bool `[n, Lk]` or None when no key is padding.
    """

    q_pos: Tensor
    k_pos: Tensor
    k_valid: Tensor | None
    causal: bool
    window: tuple[int, int]

    def block(self, a: int, b: int) -> Tensor | None:
        """bool `[n or 1, 1, b - a, Lk]`, True where visible; None when everything is."""
        q, k = self.q_pos[:, a:b, None], self.k_pos[:, None, :]
        left, right = self.window
        terms = [] if self.k_valid is None else [self.k_valid[:, None, :]]
        if self.causal:
            terms.append(k <= q)
        if left >= 0:
            terms.append(k >= q - left)
        if right >= 0:
            terms.append(k <= q + right)
        if not terms:
            return None
        seen = terms[0]
        for term in terms[1:]:
            seen = seen & term
        return seen.unsqueeze(1)


Dropout = Callable[[int, int], Tensor]  # (first, last query of the block) → 0 or 1/(1-p), `[n, H, b - a, Lk]`


def _blocks(lq: int, row_cost: int) -> Iterator[tuple[int, int]]:
    step = max(16, min(lq, SCORES_PER_BLOCK // max(row_cost, 1)))
    for a in range(0, lq, step):
        yield a, min(a + step, lq)


def _scores(q: Tensor, k: Tensor, mask: Mask, a: int, b: int, scale: float) -> tuple[Tensor, Tensor | None]:
    s = (q[:, :, a:b] * scale) @ k.transpose(-2, -1)
    seen = mask.block(a, b)
    if seen is not None:
        s = s.masked_fill_(~seen, float("-inf"))
    return s, seen


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
    """q `[n, H, Lq, D]`, k `[n, H, Lk, D]`, v `[n, H, Lk, Dv]` → out `[n, H, Lq, Dv]`, lse `[n, H, Lq]`."""
    n, heads, lq, _ = q.shape
    out, lse = q.new_empty((n, heads, lq, v.shape[-1])), q.new_empty((n, heads, lq))
    for a, b in _blocks(lq, n * heads * k.shape[2]):
        s, _ = _scores(q, k, mask, a, b, scale)
        block_lse = s.logsumexp(-1)
        p = s.sub_(block_lse.masked_fill(block_lse == float("-inf"), 0.0)[..., None]).exp_()
        if dropout is not None:
            p = p.mul_(dropout(a, b))
        out[:, :, a:b] = p @ v
        lse[:, :, a:b] = block_lse
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, scale: float,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; padding queries must come with `dout` 0."""
    n, heads, lq, _ = q.shape
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    delta = (dout * out).sum(-1)
    for a, b in _blocks(lq, n * heads * k.shape[2]):
        s, _ = _scores(q, k, mask, a, b, scale)
        p = s.sub_(lse[:, :, a:b, None]).exp_()
        do = dout[:, :, a:b]
        dp = do @ v.transpose(-2, -1)
        if dropout is None:
            dv += p.transpose(-2, -1) @ do
        else:
            drop = dropout(a, b)
            dp = dp.mul_(drop)
            dv += (p * drop).transpose(-2, -1) @ do
        ds = p.mul_(dp.sub_(delta[:, :, a:b, None])).mul_(scale)
        dq[:, :, a:b] = ds @ k
        dk += ds.transpose(-2, -1) @ q[:, :, a:b]
    return dq, dk, dv
