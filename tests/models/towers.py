"""Recommendation shapes: several histories, a candidate met by every token, per-sample terms, side data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import Block
from .registry import DIM, MAX_LEN, VOCAB, floats_and_lengths, floats_and_mask, ids_for, register, valid_mask


def _lengths_for(lengths: Tensor, max_len: int, generator: torch.Generator) -> Tensor:
    """Other lengths of the same batch, unrelated to the first."""
    return torch.randint(0, max_len + 1, lengths.shape, generator=generator)


class TargetAttention(nn.Module):
    """DIN: every history item meets the candidate in an MLP, then a masked softmax and a weighted sum."""

    def __init__(self, softmax: bool) -> None:
        super().__init__()
        self.items, self.softmax = nn.Embedding(VOCAB, DIM), softmax
        self.block = Block("matmul", "inf", True, 0.0)
        self.score = nn.Sequential(nn.Linear(4 * DIM, DIM), nn.Sigmoid(), nn.Linear(DIM, 1))
        self.head = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        valid = torch.arange(ids.size(1), device=ids.device)[None] < lengths[:, None]
        x, t = self.block(self.items(ids), valid, None), self.items(target)
        each = t[:, None, :].expand(-1, ids.size(1), -1)
        score = self.score(torch.cat([each, x, each - x, each * x], dim=-1)).squeeze(-1)
        if self.softmax:
            weight = torch.softmax(score.masked_fill(~valid, -1e9), dim=-1)
        else:
            weight = score * valid
        return self.head(torch.cat([(weight.unsqueeze(1) @ x).squeeze(1), t], dim=-1)).squeeze(-1)


def _ids_lengths_target(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    target = torch.randint(1, VOCAB, lengths.shape, generator=generator)
    return ids_for(lengths, max_len, generator), lengths.clone(), target


@register("rewritten", "per-sample candidate broadcast over tokens, sigmoid weights", "towers")
def din(seed: int):
    torch.manual_seed(seed)
    return TargetAttention(softmax=False), _ids_lengths_target


@register("rewritten", "per-sample candidate broadcast over tokens, softmax over tokens", "towers")
def din_softmax(seed: int):
    torch.manual_seed(seed)
    return TargetAttention(softmax=True), _ids_lengths_target


class SeveralHistories(nn.Module):
    """Two histories of their own lengths and padded sizes, pooled and mixed with dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(VOCAB, DIM, padding_idx=0), nn.Embedding(2 * MAX_LEN, DIM)
        self.clicks, self.views = Block("sdpa_bool", "inf", True, 0.0), Block("matmul", "1e9", False, 0.0)
        self.head = nn.Sequential(nn.Linear(2 * DIM + 3, DIM), nn.ReLU(), nn.Linear(DIM, 1))

    def _encode(self, block: Block, ids: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(ids.size(1), device=ids.device)[None] < lengths[:, None]
        x = block(self.items(ids) + self.positions(torch.arange(ids.size(1), device=ids.device)), valid, None)
        return (x * valid.unsqueeze(-1)).sum(1) / lengths.clamp(min=1).unsqueeze(-1)

    def forward(self, clicks: Tensor, click_lengths: Tensor, views: Tensor, view_lengths: Tensor, dense: Tensor) -> Tensor:
        a = self._encode(self.clicks, clicks, click_lengths)
        b = self._encode(self.views, views, view_lengths)
        return self.head(torch.cat([a, b, dense], dim=1)).squeeze(1)


def _several(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    other_len = max_len + 5
    other = _lengths_for(lengths, other_len, generator)
    dense = torch.randn(len(lengths), 3, generator=generator)
    return (
        ids_for(lengths, max_len, generator), lengths.clone(),
        ids_for(other, other_len, generator), other, dense,
    )  # fmt: skip


@register("rewritten", "two histories with different lengths and padded sizes", "towers")
def several_histories(seed: int):
    torch.manual_seed(seed)
    return SeveralHistories(), _several


class ConcatHistories(nn.Module):
    """Two padded histories joined along tokens: the mask is a cat of masks, with a hole between."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.kind = nn.Embedding(VOCAB, DIM), nn.Parameter(torch.randn(2, DIM) * 0.2)
        self.block = Block("matmul", "inf", True, 0.0)

    def forward(self, a: Tensor, a_lengths: Tensor, b: Tensor, b_lengths: Tensor) -> Tensor:
        x = torch.cat([self.items(a) + self.kind[0], self.items(b) + self.kind[1]], dim=1)
        steps = torch.arange(max(a.size(1), b.size(1)), device=a.device)
        valid = torch.cat([steps[: a.size(1)] < a_lengths[:, None], steps[: b.size(1)] < b_lengths[:, None]], dim=1)
        return self.block(x, valid, None).masked_fill(~valid[..., None], 0).sum(1)


def _two_ids(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    other = _lengths_for(lengths, max_len, generator)
    return ids_for(lengths, max_len, generator), lengths.clone(), ids_for(other, max_len, generator), other


@register("any", "two histories joined along tokens: holes in the middle", "towers", "holes")
def joined_histories(seed: int):
    torch.manual_seed(seed)
    return ConcatHistories(), _two_ids


class CandidateInSequence(nn.Module):
    """The candidate stands before the history as token 0 and is read off afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block("matmul", "1e9", True, 0.0) for _ in range(2))

    def forward(self, ids: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        x = torch.cat([self.items(target).unsqueeze(1), self.items(ids)], dim=1)
        valid = torch.arange(x.size(1), device=x.device)[None] < (lengths + 1)[:, None]
        for block in self.blocks:
            x = block(x, valid, None)
        return x[:, 0]


@register("any", "candidate as token 0, mask is length + 1", "towers")
def candidate_token(seed: int):
    torch.manual_seed(seed)
    return CandidateInSequence(), _ids_lengths_target


class FloatTokens(nn.Module):
    """Tokens come as floats (a TorchRec embedding, a vision tower); their padding is noise."""

    def __init__(self, attend: str = "matmul", fill: str = "inf") -> None:
        super().__init__()
        self.project, self.block = nn.Linear(DIM, DIM), Block(attend, fill, True, 0.0)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(tokens.size(1), device=tokens.device)[None] < lengths[:, None]
        x = self.block(self.project(tokens), valid, None)
        return torch.where(valid[..., None], x, torch.zeros((), dtype=x.dtype, device=x.device)).sum(1)


@register("rewritten", "float tokens with noise in their padding", "towers", "float_tokens")
def float_tokens(seed: int):
    torch.manual_seed(seed)
    return FloatTokens(), floats_and_lengths


@register("rewritten", "float tokens through SDPA", "towers", "float_tokens")
def float_tokens_sdpa(seed: int):
    torch.manual_seed(seed)
    return FloatTokens("sdpa_bool"), floats_and_lengths


class FloatTokensTimesMask(nn.Module):
    """Pools by `x * mask`: zero only while padding is finite, an assumption."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block("sdpa_bool", "inf", False, 0.0)

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        x = self.block(tokens, valid, None)
        return F.normalize((x * valid.unsqueeze(-1)).sum(1), dim=-1)


@register("rewritten", "float tokens pooled by multiplication", "towers", "float_tokens", "times_mask")
def float_tokens_times_mask(seed: int):
    torch.manual_seed(seed)
    return FloatTokensTimesMask(), floats_and_mask


class RatingsAndTimes(nn.Module):
    """Side information per event: a rating embedding, a time gap and a gate from the user vector."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.ratings = nn.Embedding(VOCAB, DIM), nn.Embedding(6, DIM)
        self.time, self.gate = nn.Linear(1, DIM), nn.Linear(4, DIM)
        self.block = Block("einsum", "finfo_min", True, 0.0)

    def forward(self, ids: Tensor, ratings: Tensor, gaps: Tensor, user: Tensor, valid: Tensor) -> Tensor:
        x = self.items(ids) + self.ratings(ratings) + self.time(gaps.unsqueeze(-1))
        x = x * torch.sigmoid(self.gate(user))[:, None, :]
        x = self.block(x, valid, None)
        return x.masked_fill(~valid[..., None], float("-inf")).amax(1)


def _side(lengths: Tensor, max_len: int, generator: torch.Generator) -> dict[str, Tensor]:
    valid = valid_mask(lengths, max_len)
    ratings = torch.randint(1, 6, valid.shape, generator=generator) * valid
    gaps = torch.rand(valid.shape, generator=generator) * valid
    user = torch.randn(len(lengths), 4, generator=generator)
    return {
        "ids": ids_for(lengths, max_len, generator),
        "ratings": ratings,
        "gaps": gaps,
        "user": user,
        "valid": valid,
    }


@register("rewritten", "side features per event, a user gate, max pooling by -inf", "towers")
def side_features(seed: int):
    torch.manual_seed(seed)
    return RatingsAndTimes(), _side
