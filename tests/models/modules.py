"""Models built from PyTorch's own attention modules, whose masks are true where a key is *ignored*."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import DIM, FF, HEADS, MAX_LEN, VOCAB, Make, ids_and_lengths, ids_and_mask, register


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(VOCAB, DIM, padding_idx=0), nn.Embedding(MAX_LEN, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return self.items(ids) + self.positions.weight[: ids.size(1)]


def _pool(x: Tensor, valid: Tensor) -> Tensor:
    return (x * valid.unsqueeze(-1)).sum(1) / valid.sum(1, keepdim=True).clamp(min=1)


class MHAModel(nn.Module):
    """nn.MultiheadAttention with a key padding mask, batch first or length first."""

    def __init__(self, batch_first: bool, need_weights: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.embed = Embed()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
        self.norm, self.mlp = (
            nn.LayerNorm(DIM),
            nn.Sequential(nn.Linear(DIM, FF), nn.ReLU(), nn.Linear(FF, DIM)),
        )
        self.batch_first, self.need_weights, self.causal = batch_first, need_weights, causal

    def forward(self, ids: Tensor, valid: Tensor) -> Tensor:
        x = self.embed(ids)
        y = x if self.batch_first else x.transpose(0, 1)
        mask = None
        if self.causal:
            mask = torch.triu(torch.ones(ids.size(1), ids.size(1), dtype=torch.bool, device=ids.device), diagonal=1)
        y, _ = self.attention(y, y, y, key_padding_mask=~valid, need_weights=self.need_weights, attn_mask=mask)
        y = y if self.batch_first else y.transpose(0, 1)
        x = self.norm(x + y)
        return _pool(x + self.mlp(x), valid)


class EncoderModel(nn.Module):
    """nn.TransformerEncoder."""

    def __init__(
        self,
        norm_first: bool,
        batch_first: bool,
        activation: str = "relu",
        last: bool = False,
        layers: int = 1,
    ) -> None:
        super().__init__()
        self.embed = Embed()
        layer = nn.TransformerEncoderLayer(
            DIM, HEADS, FF, dropout=0.0, activation=activation, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.batch_first, self.last = batch_first, last

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(ids.size(1), device=ids.device)[None, :] >= lengths[:, None]
        x = self.embed(ids)
        if self.batch_first:
            x = self.encoder(x, src_key_padding_mask=padding)
        else:
            x = self.encoder(x.transpose(0, 1), src_key_padding_mask=padding).transpose(0, 1)
        if self.last:
            return x[torch.arange(len(x), device=x.device), lengths - 1]
        return _pool(x, ~padding)


class DecoderStyle(nn.Module):
    """nn.TransformerEncoderLayer with a generated float causal mask and a float padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.layer = nn.TransformerEncoderLayer(DIM, HEADS, FF, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        causal = torch.full((ids.size(1), ids.size(1)), float("-inf"), device=ids.device).triu(1)
        padding = torch.zeros(ids.shape, device=ids.device).masked_fill(ids == 0, float("-inf"))
        x = self.layer(self.embed(ids), src_mask=causal, src_key_padding_mask=padding)
        return x.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, x.size(-1)))[:, 0]


class CrossAttentionPool(nn.Module):
    """A few learned queries attend the history (PMA): shared by the batch, never padded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.seeds = Embed(), nn.Parameter(torch.randn(3, DIM) * 0.3)
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU())

    def forward(self, ids: Tensor, valid: Tensor) -> Tensor:
        x = self.mlp(self.embed(ids))
        queries = self.seeds.expand(x.size(0), -1, -1)
        return self.attention(queries, x, x, key_padding_mask=~valid, need_weights=False)[0].flatten(1)


def _file(name: str, make_module, inputs, *tags: str, why: str, expected="rewritten", training: bool = True) -> None:
    def make(seed: int):
        torch.manual_seed(seed)
        return make_module().train(training), inputs

    typed: Make = make
    register(expected, why, "modules", *tags, name=name)(typed)


_file("mha_batch_first", lambda: MHAModel(True), ids_and_mask, why="nn.MultiheadAttention, batch first")
_file("mha_length_first", lambda: MHAModel(False), ids_and_mask, why="nn.MultiheadAttention, [L, B, D]")
_file(
    "mha_weights",
    lambda: MHAModel(True, need_weights=True),
    ids_and_mask,
    why="need_weights takes the bmm branch",
)
_file(
    "mha_causal",
    lambda: MHAModel(True, causal=True),
    ids_and_mask,
    why="bool attn_mask and key padding merged",
)
for _norm_first in (False, True):
    for _batch_first in (False, True):
        for _training in (True, False):
            _file(
                f"encoder_{'pre' if _norm_first else 'post'}_{'bld' if _batch_first else 'lbd'}"
                f"_{'train' if _training else 'eval'}",
                lambda n=_norm_first, b=_batch_first: EncoderModel(n, b),
                ids_and_lengths,
                "encoder_layer",
                why="nn.TransformerEncoder",
                training=_training,
            )
_file(
    "encoder_gelu_last",
    lambda: EncoderModel(True, True, "gelu", last=True, layers=2),
    ids_and_lengths,
    "encoder_layer",
    why="nn.TransformerEncoder, last item",
)
_file(
    "encoder_float_masks",
    DecoderStyle,
    ids_and_lengths,
    "encoder_layer",
    "two_sources",
    expected="any",
    why="float causal and padding masks, mask from ids, row from lengths",
)
_file("pma", CrossAttentionPool, ids_and_mask, why="shared queries over a padded history")


class FunctionalMHA(nn.Module):
    """F.multi_head_attention_forward called by hand with separate projections of Q, K and V."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(DIM, DIM) * 0.2) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(3 * DIM))

    def forward(self, ids: Tensor, valid: Tensor) -> Tensor:
        x = self.embed(ids).transpose(0, 1)
        y, _ = F.multi_head_attention_forward(
            x, x, x, DIM, HEADS, None, self.bias, None, None, False, 0.0, self.w[3], None,
            key_padding_mask=~valid, need_weights=False, use_separate_proj_weight=True,
            q_proj_weight=self.w[0], k_proj_weight=self.w[1], v_proj_weight=self.w[2],
        )  # fmt: skip
        return _pool((x + y).transpose(0, 1), valid)


_file("functional_mha", FunctionalMHA, ids_and_mask, why="separate projection weights")
