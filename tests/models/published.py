"""Spellings met in published packages, each cut down to what makes it hard."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import DIM, HEADS, MAX_LEN, VOCAB, Inputs, ids_for, register, valid_mask


def _ids_and_float_mask(extra: int) -> Inputs:
    """Ids ``[B, max_len + extra]`` (the extra ones are candidates) and the mask of the history as floats."""

    def inputs(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = ids_for(lengths, max_len, generator)
        candidates = torch.randint(1, VOCAB, (len(lengths), extra), generator=generator)
        return torch.cat([ids, candidates], 1), valid_mask(lengths, max_len).float()

    return inputs


class FloatMaskPooling(nn.Module):
    """DIN as FuxiCTR trains it: the loader's mask is a float, and the candidate is the last id of the row."""

    def __init__(self, candidate_behind: bool) -> None:
        super().__init__()
        self.candidate_behind = candidate_behind
        self.items = nn.Embedding(VOCAB, DIM)
        self.weigh = nn.Sequential(nn.Linear(2 * DIM, DIM), nn.ReLU(), nn.Linear(DIM, 1))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.items(ids)
        history, target = (x[:, :-1], x[:, -1]) if self.candidate_behind else (x, self.items.weight[1].expand(len(x), -1))
        pairs = torch.cat([history, target.unsqueeze(1).expand_as(history)], -1)
        weights = self.weigh(pairs).squeeze(-1) * mask.float()
        return (weights.unsqueeze(-1) * history).sum(1) + target


@register("rewritten", "a float input that weights rows is a mask where it is 0", name="float_mask_pooling")
def _float_mask(seed: int) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(seed)
    return FloatMaskPooling(False), _ids_and_float_mask(0)


@register("rewritten", "a candidate kept behind the history is not part of its mask", name="candidate_behind_history")
def _behind(seed: int) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(seed)
    return FloatMaskPooling(True), _ids_and_float_mask(1)


class MaskedBias(nn.Module):
    """T5 on SDPA: one learned relative bias, masked once, is the ``attn_mask`` of every layer."""

    def __init__(self, fill: str) -> None:
        super().__init__()
        self.fill = fill
        self.items, self.relative = nn.Embedding(VOCAB, DIM), nn.Embedding(2 * MAX_LEN, HEADS)
        self.layers = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        valid, length = ids != 0, ids.size(1)
        position = torch.arange(length, device=ids.device)
        bias = self.relative(position[None, :] - position[:, None] + MAX_LEN).permute(2, 0, 1)[None]
        least = torch.finfo(bias.dtype).min
        if self.fill == "where":
            bias = torch.where(valid[:, None, None, :], bias, torch.tensor(least))
        else:
            bias = bias.masked_fill(~valid[:, None, None, :], least)
        x = self.items(ids)
        for layer in self.layers:
            q, k, v = layer(x).view(*ids.shape, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        return (x * valid[..., None]).sum(1)


def _ids_alone(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor]:
    return (ids_for(lengths, max_len, generator),)


@register("rewritten", "a bias masked by where is a mask and a bias", name="masked_bias_where")
def _masked_where(seed: int) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(seed)
    return MaskedBias("where"), _ids_alone


@register("rewritten", "a bias masked by masked_fill is a mask and a bias", name="masked_bias_fill")
def _masked_fill(seed: int) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(seed)
    return MaskedBias("masked_fill"), _ids_alone


class WrittenView(nn.Module):
    """The original SASRec's feed-forward: the residual is added in place to a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(VOCAB, DIM)
        self.inner, self.outer = nn.Conv1d(DIM, DIM, 1), nn.Conv1d(DIM, DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.items(ids)
        y = self.outer(self.inner(x.transpose(-1, -2)).relu()).transpose(-1, -2)
        y += x
        y *= (ids != 0)[..., None]
        return y.sum(1)


@register("rewritten", "an in-place sum into a view of a local tensor is a sum", name="written_view")
def _written(seed: int) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(seed)
    return WrittenView(), _ids_alone


class ScaledAdditiveMask(nn.Module):
    """A mask of -1e4 and a relative bias are added before the scores are scaled by 1 / sqrt(head_dim)."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.relative, self.qkv = nn.Embedding(VOCAB, DIM), nn.Embedding(2 * MAX_LEN, 1), nn.Linear(DIM, 3 * DIM)

    def forward(self, ids: Tensor) -> Tensor:
        valid, position = ids != 0, torch.arange(ids.size(1), device=ids.device)
        x = self.items(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        scores = scores + self.relative(position[:, None] - position[None, :] + MAX_LEN).squeeze(-1)
        scores = (scores + torch.where(valid[:, None, :], 0.0, -1e4)) / DIM**0.5
        return ((x + scores.softmax(-1) @ v) * valid[..., None]).sum(1)


@register("rewritten", "a mask of -1e4 hides scores after a scale too", name="scaled_additive_mask")
def _scaled(seed: int) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(seed)
    return ScaledAdditiveMask(), _ids_alone


class BatchOfItsOwn(nn.Module):
    """nn.MultiheadAttention over a second history whose batch size torch does not know to be the first's; the last
    event of the first is picked by a one-hot product."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.attend = nn.Embedding(VOCAB, DIM), nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, ids: Tensor, lengths: Tensor, other: Tensor) -> Tensor:
        x, y = self.items(ids), self.items(other)
        out = x + self.attend(x, y, y, key_padding_mask=other == 0, need_weights=False)[0]
        pick = torch.arange(ids.size(1), device=ids.device) == (lengths - 1)[:, None]
        return (out * pick.to(out.dtype).unsqueeze(-1)).sum(1)


def _two_histories(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    other = ids_for(lengths.flip(0).clamp(min=1), max_len, generator)
    return ids_for(lengths, max_len, generator), lengths.clone(), other


@register("rewritten", "sizes that a view proves equal are one", name="batch_of_its_own")
def _own_batch(seed: int) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(seed)
    return BatchOfItsOwn(), _two_histories
