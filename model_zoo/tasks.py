"""What the training command can train: a model by name, its data, and the click logits of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .data import load_movielens
from .data.batches import Batch, SampleSet
from .gem_small import GEMSmall, GEMSmallConfig
from .sasrec import SASRec, SASRecConfig

Mode = Literal["eager", "compile", "gemopt"]
MODELS = ("gem_small", "sasrec")
MODES = ("eager", "compile", "gemopt")
DATA = ("movielens",)


def histories(model: str) -> tuple[str, ...]:
    """The event histories a model reads."""
    return ("all",) if model == "sasrec" else ("liked", "neutral", "disliked")


def load_samples(data: str, model: str, max_len: int) -> tuple[dict[str, SampleSet], dict[str, int]]:
    """The samples of each split, and the sizes of the id spaces."""
    check_name("data", data, DATA)
    source = load_movielens()
    splits = ("train", "valid", "test")
    return {s: source.samples(s, max_len, histories(model)) for s in splits}, source.vocabulary


def build_model(
    model: str, vocabulary: dict[str, int], max_len: int, dropout: float, pooling: Any, n_layers: int = 2
) -> nn.Module:
    """A freshly initialised model; the seed is the caller's (``torch.manual_seed``)."""
    check_name("model", model, MODELS)
    options: dict[str, Any] = {"max_len": max_len, "dropout": dropout, "pooling": pooling, "n_layers": n_layers}
    if model == "sasrec":
        return SASRec(SASRecConfig(vocabulary["item_id"], **options))
    return GEMSmall(GEMSmallConfig(vocabulary, histories(model), **options))


def click_logits(model: str, module: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Logits [B] that the candidate is liked; SASRec scores every item, and the candidate's score counts."""
    if model == "sasrec":
        scores = module(batch["all_item"], batch["all_length"])
        return scores.gather(1, batch["item_id"][:, None]).squeeze(1)
    return module(batch)


def compiled(module: nn.Module, mode: str, dynamic: bool | None = None) -> Callable[..., Tensor]:
    """``module`` as it is, under ``torch.compile``, or under ``gemopt.compile``; parameters are shared."""
    check_name("mode", mode, MODES)
    if mode == "eager":
        return module
    if mode == "compile":
        return torch.compile(module, dynamic=dynamic)
    import gemopt  # only here: the models and their training do not depend on it

    return gemopt.compile(module, dynamic=dynamic)


def padding_share(model: str, batch: Batch) -> float:
    """Share of the event slots of a batch that hold no event."""
    names = histories(model)
    slots = sum(batch[f"{name}_item"].numel() for name in names)
    events = sum(int(batch[f"{name}_length"].sum()) for name in names)
    return 1 - events / max(slots, 1)


def check_name(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """ValueError naming the argument unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
