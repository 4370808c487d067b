"""Interchangeable parts of a padded sequence model, each in the spellings found in the wild.

A model is five choices: where the validity mask comes from, how causality is written, how the mask reaches
the scores, how QK and PV are contracted, and how the sequence becomes one vector. `SequenceModel` puts any
choice together, so that a property test can draw all five.

Shapes: B sequences, L padded length, D features, H heads, d = D / H. `keep` masks are true where attention is
allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import DIM, FF, HEADS, MAX_LEN, VOCAB

# --- validity: (ids [B, L], lengths [B]) -> bool [B, L]

VALID: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "arange_lt": lambda ids, n: torch.arange(ids.size(1), device=ids.device)[None, :] < n[:, None],
    "lengths_gt": lambda ids, n: n.unsqueeze(-1) > torch.arange(ids.shape[1], device=ids.device),
    "not_ge": lambda ids, n: ~(torch.arange(ids.shape[1], device=ids.device).unsqueeze(0) >= n.unsqueeze(1)),
    "le_minus_one": lambda ids, n: torch.arange(ids.shape[1], device=ids.device) <= (n - 1).view(-1, 1),
    "expand_lt": lambda ids, n: (
        torch.arange(ids.size(1), device=ids.device).expand(ids.size(0), -1) < n.view(-1, 1).expand(-1, ids.size(1))
    ),
    "ids_ne": lambda ids, n: ids != 0,
    "ids_gt": lambda ids, n: ids > 0,
    "ids_bool": lambda ids, n: ids.bool(),
    "ids_not_eq": lambda ids, n: torch.logical_not(ids.eq(0)),
    "ids_float_gt": lambda ids, n: (ids != 0).float() > 0.5,
}

# --- causality: L -> bool [L, L], true where key <= query

CAUSAL: dict[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda x: None,
    "tril": lambda x: torch.tril(torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device)),
    "not_triu": lambda x: ~torch.triu(torch.ones(x.size(1), x.size(1), device=x.device), diagonal=1).bool(),
    "triu_eq_0": lambda x: torch.triu(torch.ones((x.size(1), x.size(1)), device=x.device), diagonal=1) == 0,
    "arange": lambda x: (
        torch.arange(x.size(1), device=x.device)[:, None] >= torch.arange(x.size(1), device=x.device)[None, :]
    ),
}

# --- fill: (scores, keep broadcastable to scores) -> masked scores


def _fill_inplace(scores: Tensor, keep: Tensor) -> Tensor:
    scores = scores + 0.0
    scores.masked_fill_(keep.logical_not(), float("-inf"))
    return scores


FILL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "inf": lambda s, keep: s.masked_fill(~keep, float("-inf")),
    "finfo_min": lambda s, keep: s.masked_fill(~keep, torch.finfo(s.dtype).min),
    "1e9": lambda s, keep: s.masked_fill(keep == 0, -1e9),
    "where_inf": lambda s, keep: torch.where(keep, s, torch.full((), float("-inf"), dtype=s.dtype, device=s.device)),
    "where_1e9": lambda s, keep: torch.where(keep, s, torch.ones_like(s) * (-(2**32) + 1.0)),
    "additive_1e4": lambda s, keep: s + (1.0 - keep.to(s.dtype)) * -10000.0,
    "additive_finfo": lambda s, keep: s + (1.0 - keep.to(s.dtype)) * torch.finfo(s.dtype).min,
    "additive_inf": lambda s, keep: s + torch.zeros_like(keep, dtype=s.dtype).masked_fill(~keep, float("-inf")),
    "inplace": _fill_inplace,
}
Fill = Callable[[Tensor, Tensor], Tensor]

# --- attention: (q, k, v [B, L, D], valid [B, L], causal [L, L] | None, fill) -> [B, L, D]


def _keep4(valid: Tensor, causal: Tensor | None) -> Tensor:
    keep = valid[:, None, None, :]
    return keep if causal is None else keep & causal


def _split(x: Tensor) -> Tensor:
    return x.view(x.size(0), x.size(1), HEADS, x.size(2) // HEADS).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().view(x.size(0), x.size(2), x.size(1) * x.size(3))


def attend_matmul(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, causal: Tensor | None, fill: Fill) -> Tensor:
    """The Annotated Transformer's spelling, heads as a fourth axis."""
    q, k, v = _split(q), _split(k), _split(v)
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    return _merge(torch.matmul(torch.softmax(fill(scores, _keep4(valid, causal)), dim=-1), v))


def attend_scale_first(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, causal: Tensor | None, fill: Fill) -> Tensor:
    """Scale on Q before the product, `@`, permuted K, Softmax module."""
    batch, length, dim = q.shape
    q = (q * (dim // HEADS) ** -0.5).reshape(batch, length, HEADS, -1).permute(0, 2, 1, 3)
    k = k.reshape(batch, length, HEADS, -1).permute(0, 2, 3, 1)
    v = v.reshape(batch, length, HEADS, -1).permute(0, 2, 1, 3)
    probs = nn.Softmax(dim=-1)(fill(q @ k, _keep4(valid, causal)))
    return (probs @ v).permute(0, 2, 1, 3).flatten(2)


def attend_single_bmm(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, causal: Tensor | None, fill: Fill) -> Tensor:
    """One head, three axes, `bmm`."""
    keep = valid[:, None, :] if causal is None else valid[:, None, :] & causal[None]
    scores = torch.bmm(q, k.transpose(1, 2)) / q.size(-1) ** 0.5
    return torch.bmm(F.softmax(fill(scores, keep), dim=2), v)


def attend_merged_bmm(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, causal: Tensor | None, fill: Fill) -> Tensor:
    """Heads merged in the batch axis, `[B * H, L, d]`, the mask repeated per head."""
    batch, length, dim = q.shape
    q, k, v = (
        x.view(batch, length, HEADS, dim // HEADS).transpose(1, 2).reshape(batch * HEADS, length, dim // HEADS)
        for x in (q, k, v)
    )
    keep = valid.unsqueeze(1).expand(-1, length, -1)
    keep = keep if causal is None else keep & causal
    keep = keep.repeat_interleave(HEADS, dim=0)
    scores = torch.bmm(q, k.transpose(1, 2)) * (dim // HEADS) ** -0.5
    out = torch.bmm(torch.softmax(fill(scores, keep), -1), v)
    return out.view(batch, HEADS, length, dim // HEADS).transpose(1, 2).reshape(batch, length, dim)


def attend_cat_heads(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, causal: Tensor | None, fill: Fill) -> Tensor:
    """SASRec's TensorFlow heritage: split on features, cat on batch, mask tiled, cat back."""
    width = q.size(-1) // HEADS
    q, k, v = (torch.cat(torch.split(x, width, dim=2), dim=0) for x in (q, k, v))
    keep = valid.repeat(HEADS, 1)[:, None, :]
    keep = keep if causal is None else keep & causal
    probs = torch.softmax(fill(torch.matmul(q, k.transpose(1, 2)) / width**0.5, keep), dim=-1)
    return torch.cat(torch.chunk(torch.matmul(probs, v), HEADS, dim=0), dim=2)


def attend_einsum(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, causal: Tensor | None, fill: Fill) -> Tensor:
    batch, length, dim = q.shape
    q, k, v = (x.view(batch, length, HEADS, dim // HEADS) for x in (q, k, v))
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) / math.sqrt(dim // HEADS)
    probs = fill(scores, _keep4(valid, causal)).softmax(-1)
    return torch.einsum("bhlm,bmhd->blhd", probs, v).reshape(batch, length, dim)


def attend_mul_sum(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, causal: Tensor | None, fill: Fill) -> Tensor:
    """The contraction as broadcast multiply and sum, as small research code does."""
    keep = valid[:, None, :] if causal is None else valid[:, None, :] & causal
    scores = (q[:, :, None, :] * k[:, None, :, :]).sum(-1) / q.size(-1) ** 0.5
    return (torch.softmax(fill(scores, keep), -1)[..., None] * v[:, None]).sum(2)


def attend_exp_sum(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, causal: Tensor | None, fill: Fill) -> Tensor:
    """Softmax by hand: exp of the shifted scores, zero where masked, divided by the sum plus epsilon."""
    keep = _keep4(valid, causal)
    q, k, v = _split(q), _split(k), _split(v)
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    scores = scores - scores.masked_fill(~keep, -1e9).amax(-1, keepdim=True).detach()
    weights = scores.clamp(max=0).exp() * keep
    return _merge((weights / (weights.sum(-1, keepdim=True) + 1e-9)) @ v)


def attend_sdpa_bool(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, causal: Tensor | None, fill: Fill) -> Tensor:
    keep = _keep4(valid, causal)
    return _merge(F.scaled_dot_product_attention(_split(q), _split(k), _split(v), attn_mask=keep))


def attend_sdpa_float(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, causal: Tensor | None, fill: Fill) -> Tensor:
    keep = _keep4(valid, causal).expand(-1, 1, q.size(1), -1)
    bias = fill(torch.zeros(keep.shape, dtype=q.dtype, device=q.device), keep)
    return _merge(F.scaled_dot_product_attention(_split(q), _split(k), _split(v), attn_mask=bias))


def attend_sdpa_is_causal(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, causal: Tensor | None, fill: Fill) -> Tensor:
    """No padding mask: a right-padded causal model needs none, no valid query sees a padded key."""
    return _merge(F.scaled_dot_product_attention(_split(q), _split(k), _split(v), is_causal=True))


ATTEND = {
    "matmul": attend_matmul,
    "scale_first": attend_scale_first,
    "single_bmm": attend_single_bmm,
    "merged_bmm": attend_merged_bmm,
    "cat_heads": attend_cat_heads,
    "einsum": attend_einsum,
    "mul_sum": attend_mul_sum,
    "exp_sum": attend_exp_sum,
    "sdpa_bool": attend_sdpa_bool,
    "sdpa_float": attend_sdpa_float,
    "sdpa_is_causal": attend_sdpa_is_causal,
}

# --- pooling: (hidden [B, L, D], valid [B, L], lengths [B]) -> [B, D]


def pool_last_gather(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """RecBole's `gather_indexes(output, item_seq_len - 1)`."""
    index = (lengths - 1).view(-1, 1, 1).expand(-1, -1, x.size(2))
    return x.gather(dim=1, index=index).squeeze(1)


def pool_last_index(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    return x[torch.arange(x.size(0), device=x.device), lengths - 1]


def pool_last_one_hot(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    hot = torch.arange(x.size(1), device=x.device)[None, :] == (lengths - 1)[:, None]
    return (x * hot.unsqueeze(-1)).sum(dim=1)


def pool_last_counted(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """The last position counted from the mask itself: with holes it is not the last valid one."""
    last = valid.sum(1).clamp(min=1) - 1
    return x[torch.arange(x.size(0), device=x.device), last]


def pool_mean(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    m = valid.unsqueeze(-1).to(x.dtype)
    return (x * m).sum(1) / m.sum(1).clamp(min=1.0)


def pool_mean_lengths(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """Divides by the length as given, so an empty sequence is 0 / 0."""
    return x.masked_fill(~valid[..., None], 0.0).sum(1) / lengths[:, None]


def pool_sum_where(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(valid.unsqueeze(2), x, torch.zeros_like(x)).sum(1)


def pool_sum_bmm(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """The masked sum as a matrix product with the mask."""
    return torch.bmm(valid.to(x.dtype).unsqueeze(1), x).squeeze(1)


def pool_max(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    return x.masked_fill(~valid.unsqueeze(-1), -1e9).max(dim=1).values


def pool_first(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """The CLS position."""
    return x[:, 0]


def pool_boolean_index(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """Valid tokens only, `[T, D]`, as a token-level loss wants them (an unbacked size)."""
    return x[valid]


def pool_plain_mean(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """A bug that is common in real code: the mean over padding too. Every row is live."""
    return x.mean(dim=1)


def pool_none(x: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """Returns the padded hidden states: every row is observed."""
    return x


POOL = {
    "last_gather": pool_last_gather,
    "last_index": pool_last_index,
    "last_one_hot": pool_last_one_hot,
    "last_counted": pool_last_counted,
    "mean": pool_mean,
    "mean_lengths": pool_mean_lengths,
    "sum_where": pool_sum_where,
    "sum_bmm": pool_sum_bmm,
    "max": pool_max,
    "first": pool_first,
    "plain_mean": pool_plain_mean,
    "none": pool_none,
}

# --- the model


class Block(nn.Module):
    """One transformer layer. `pre_norm` picks x + f(norm(x)) over norm(x + f(x))."""

    def __init__(self, attend: str, fill: str, pre_norm: bool, dropout: float) -> None:
        super().__init__()
        self.attend, self.fill, self.pre_norm = ATTEND[attend], FILL[fill], pre_norm
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, FF), nn.Linear(FF, DIM)
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.drop = nn.Dropout(dropout)

    def _attention(self, x: Tensor, valid: Tensor, causal: Tensor | None) -> Tensor:
        return self.drop(self.o(self.attend(self.q(x), self.k(x), self.v(x), valid, causal, self.fill)))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x))))

    def forward(self, x: Tensor, valid: Tensor, causal: Tensor | None) -> Tensor:
        if self.pre_norm:
            x = x + self._attention(self.norm1(x), valid, causal)
            return x + self._mlp(self.norm2(x))
        x = self.norm1(x + self._attention(x, valid, causal))
        return self.norm2(x + self._mlp(x))


class SequenceModel(nn.Module):
    """ids [B, L], lengths [B] -> `[B, D]` (or what the pooling gives)."""

    def __init__(
        self,
        *,
        valid: str = "arange_lt",
        causal: str = "none",
        fill: str = "inf",
        attend: str = "matmul",
        pool: str = "mean",
        position: str = "learned",
        pre_norm: bool = True,
        layers: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.items = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.position = position
        if position == "learned":
            self.positions = nn.Embedding(MAX_LEN, DIM)
        elif position == "parameter":
            self.pos_table = nn.Parameter(torch.randn(1, MAX_LEN, DIM) * 0.1)
        elif position == "sinusoidal":
            self.register_buffer("pe", sinusoids(MAX_LEN, DIM)[None], persistent=False)
        self.valid, self.causal, self.pool = VALID[valid], CAUSAL[causal], POOL[pool]
        self.layers = nn.ModuleList(Block(attend, fill, pre_norm, dropout) for _ in range(layers))
        self.norm, self.drop = nn.LayerNorm(DIM), nn.Dropout(dropout)

    def embed(self, ids: Tensor) -> Tensor:
        x = self.items(ids)
        if self.position == "learned":
            return x + self.positions(torch.arange(ids.size(1), device=ids.device))
        if self.position == "parameter":
            return x * DIM**0.5 + self.pos_table[:, : ids.size(1)]
        if self.position == "sinusoidal":
            return x + self.pe[:, : x.size(1)]
        return x

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.drop(self.embed(ids))
        valid, causal = self.valid(ids, lengths), self.causal(ids)
        for layer in self.layers:
            x = layer(x, valid, causal)
        return self.pool(self.norm(x), valid, lengths)


def sinusoids(length: int, dim: int) -> Tensor:
    """`[length, dim]` of "Attention is all you need", section 3.5."""
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).reshape(length, dim)
