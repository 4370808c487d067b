"""torch.nn's own: MultiheadAttention, TransformerEncoder and Decoder layers, Transformer, with the losses people put on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recsys import _shake
from .registry import Built, ids, labels, register, valid

VOCAB, DIM, HEADS = 53, 24, 3


class _Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, DIM, padding_idx=0)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 40, dropout=0.0, **{"batch_first": True, **options})
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, causal: bool = False) -> Tensor:
        x, padding = self.table(tokens), tokens == 0
        first = self.encoder.layers[0].self_attn.batch_first
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]) if causal else None
        padding = torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, -torch.inf) if causal else padding
        out = self.encoder(x if first else x.transpose(0, 1), mask=mask, src_key_padding_mask=padding, is_causal=causal)
        return out if first else out.transpose(0, 1)


def _encoder(kind: str, **options: Any) -> Built:
    torch.manual_seed(0)
    model = _Encoder(**options)
    _shake(model)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = model(tokens, causal=kind == "causal")
        if kind == "hidden":
            return hidden
        if kind == "mean":
            mask = (tokens != 0).unsqueeze(-1)
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            return F.cross_entropy(model.head(pooled), targets[:, 0].clamp(min=0))
        return F.cross_entropy(model.head(hidden).flatten(0, 1), targets.flatten())

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        return ids(lengths, max_len, g, VOCAB), labels(valid(lengths, max_len), g, VOCAB)

    return Built(step, inputs, kind != "eval")


register("torch", "TransformerEncoder, token loss", 2, name="nn-encoder")(lambda: _encoder("tokens"))
register("torch", "TransformerEncoder, causal", 2, name="nn-encoder-causal", quick=True)(lambda: _encoder("causal"))
register("torch", "TransformerEncoder, norm first, sequence first", 2, name="nn-encoder-prenorm")(
    lambda: _encoder("tokens", norm_first=True, batch_first=False)
)
register("torch", "TransformerEncoder, masked mean", 2, name="nn-encoder-mean")(lambda: _encoder("mean"))
register("torch", "TransformerEncoder, eval", 2, name="nn-encoder-eval", grad=False)(lambda: _encoder("eval"))
register("torch", "TransformerEncoder, hidden states", 2, name="nn-encoder-hidden", reads="all")(lambda: _encoder("hidden"))


def _transformer(causal_hint: bool | None) -> Built:
    torch.manual_seed(0)
    table, head = nn.Embedding(VOCAB, DIM, padding_idx=0), nn.Linear(DIM, VOCAB)
    model = nn.Transformer(DIM, HEADS, 2, 2, 40, dropout=0.0, batch_first=True)
    _shake(nn.ModuleList([table, head, model]))

    def step(source: Tensor, target: Tensor, targets: Tensor) -> Tensor:
        causal = torch.triu(torch.ones(target.shape[1], target.shape[1], dtype=torch.bool), 1)
        hidden = model(
            table(source), table(target), tgt_mask=causal, src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target == 0, memory_key_padding_mask=source == 0, tgt_is_causal=causal_hint,
        )  # fmt: skip
        return F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), ignore_index=0)

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        answer, width = (lengths + 1) // 2, max(1, max_len - 4)
        return (ids(lengths, max_len, g, VOCAB), ids(answer, width, g, VOCAB), ids(answer, width, g, VOCAB))

    return Built(step, inputs)


register("torch", "Transformer", 6, name="nn-transformer")(lambda: _transformer(True))
# Without the hint nn.Transformer reads the mask back to find out: Dynamo breaks the graph there, and runs torch.nn's own
# frames eagerly.
register(
    "torch", "Transformer, tgt_is_causal left out", 6, name="nn-transformer-break", reads="all",
    note="Dynamo breaks the graph where torch.nn reads the mask back; its own frames then run eagerly, under any backend",
)(lambda: _transformer(None))  # fmt: skip


@register("torch", "MultiheadAttention, weights returned", 1, name="nn-mha-weights", quick=True, reads="all")
def _weights() -> Built:
    torch.manual_seed(0)
    table, model = nn.Embedding(VOCAB, DIM, padding_idx=0), nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    _shake(nn.ModuleList([table, model]))

    def step(tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = table(tokens)
        return model(x, x, x, key_padding_mask=tokens == 0)

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        return (ids(lengths, max_len, g, VOCAB),)

    return Built(step, inputs)


@register("torch", "MultiheadAttention, target attention", 1, name="nn-mha-target")
def _target() -> Built:
    torch.manual_seed(0)
    table, model = nn.Embedding(VOCAB, DIM, padding_idx=0), nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    head = nn.Linear(DIM, 1)
    _shake(nn.ModuleList([table, model, head]))

    def step(tokens: Tensor, target: Tensor, click: Tensor) -> Tensor:
        x, query = table(tokens), table(target).unsqueeze(1)
        interest = model(query, x, x, key_padding_mask=tokens == 0, need_weights=False)[0].squeeze(1)
        return F.binary_cross_entropy_with_logits(head(interest).squeeze(1), click)

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        size = (len(lengths),)
        click = torch.randint(0, 2, size, generator=g).float()
        return ids(lengths, max_len, g, VOCAB), torch.randint(1, VOCAB, size, generator=g), click

    return Built(step, inputs)
