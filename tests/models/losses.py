"""Whole steps with their loss: the loss is the reader that says which rows are live."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import SequenceModel
from .registry import DIM, VOCAB, ids_for, register, valid_mask


def next_items(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """ids, lengths and the next item at every position, zero at padding."""
    labels = torch.randint(1, VOCAB, (len(lengths), max_len), generator=generator) * valid_mask(lengths, max_len)
    return ids_for(lengths, max_len, generator), lengths.clone(), labels


class NextItem(nn.Module):
    """Causal next-item training; `kind` picks how padding leaves the loss."""

    def __init__(self, kind: str, **choices: object) -> None:
        super().__init__()
        self.body = SequenceModel(causal="tril", pool="none", **choices)  # type: ignore[arg-type]
        self.kind = kind

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        x = self.body(ids, lengths)
        logits = x @ self.body.items.weight.t()
        if self.kind == "ignore_index":
            return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), ignore_index=0)
        if self.kind == "ignore_index_transposed":
            return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=0, reduction="sum")
        if self.kind == "times_mask":
            each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
            mask = (labels != 0).to(each.dtype)
            return (each * mask).sum() / mask.sum().clamp(min=1)
        if self.kind == "boolean_index":
            keep = labels != 0
            return F.cross_entropy(logits[keep], labels[keep], reduction="sum")
        if self.kind == "log_softmax_gather":
            each = -F.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            return torch.where(labels > 0, each, torch.zeros_like(each)).sum()
        positive = (x * self.body.items(labels)).sum(-1)
        negative = (x * self.body.items(labels.flip(0))).sum(-1)
        valid = labels != 0
        loss = F.binary_cross_entropy_with_logits(positive, torch.ones_like(positive), reduction="none")
        loss = loss + F.binary_cross_entropy_with_logits(negative, torch.zeros_like(negative), reduction="none")
        return (loss * valid).sum() / valid.sum().clamp(min=1)


def _file(kind: str, expected, why: str, *tags: str, **choices: object) -> None:
    def make(seed: int):
        torch.manual_seed(seed)
        return NextItem(kind, **choices), next_items

    register(expected, why, "losses", *tags, name=f"loss_{kind}")(make)


_file("ignore_index", "rewritten", "cross entropy with ignore_index, tied weights", "tied")
_file("ignore_index_transposed", "rewritten", "logits [B, V, L], summed", "tied")
_file("times_mask", "rewritten", "per-token loss times mask", "tied")
_file("boolean_index", "any", "valid tokens by boolean index (an unbacked size)", "tied", "unbacked")
_file("log_softmax_gather", "rewritten", "log_softmax and gather by hand", "tied")
_file(
    "bce",
    "rewritten",
    "SASRec's BCE over valid items with negatives from the batch",
    "tied",
    attend="sdpa_bool",
)


class Pretraining(nn.Module):
    """A masked-item loss on some positions plus the padded hidden states as a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = SequenceModel(pool="none")

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(ids, lengths)
        loss = F.cross_entropy((x @ self.body.items.weight.t()).flatten(0, 1), labels.flatten(), ignore_index=0)
        return loss, x


@register("refused", "loss masked, but the hidden states are returned as well", "losses", "refused", "tied")
def loss_and_hidden(seed: int):
    torch.manual_seed(seed)
    return Pretraining(), next_items


class DetachedHidden(Pretraining):
    """The hidden states leave the graph detached: still observed."""

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        loss, hidden = super().forward(ids, lengths, labels)
        return {"loss": loss, "hidden": hidden.detach()}


@register("refused", "detached hidden states are observed too", "losses", "refused", "tied")
def loss_and_detached_hidden(seed: int):
    torch.manual_seed(seed)
    return DetachedHidden(), next_items


class ClickLoss(nn.Module):
    """Sequence to one click probability, the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = SequenceModel(pool="last_gather", causal="tril"), nn.Linear(DIM, 1)

    def forward(self, ids: Tensor, lengths: Tensor, click: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.head(self.body(ids, lengths)).squeeze(-1), click)


def _clicks(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    click = (torch.rand(len(lengths), generator=generator) < 0.3).float()
    return ids_for(lengths, max_len, generator), lengths.clone(), click


@register("rewritten", "click loss over the last item", "losses")
def loss_click(seed: int):
    torch.manual_seed(seed)
    return ClickLoss(), _clicks
