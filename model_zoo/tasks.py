"""What the training command can train: a model by name, its data, and the logits of a batch.

Two kinds of models. Those of ``zoo.py`` (and the ``bias`` baseline) read batches of data/schema.py, any data set, and give
the logits of several tasks. ``gem_small`` and ``sasrec`` are the small single-task models of the demo; they read MovieLens
through movielens.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import zoo
from .bias import Bias
from .data import load_movielens
from .data.batches import Batch, SampleSet
from .data.sources import MOVIELENS_MAX_LEN, IndexedSource, Source, batches_by_length, open_source
from .evaluation import Evaluation, evaluate_batches
from .gem_small import GEMSmall, GEMSmallConfig
from .sasrec import SASRec, SASRecConfig

Mode = Literal["eager", "compile", "gemopt"]
MODELS = ("gem_small", "sasrec")  # of one task
MODES = ("eager", "compile", "gemopt")
DATA = ("movielens",)


@dataclass(frozen=True)
class Workload:
    """A model and what it trains on. ``labels`` maps each task to the batch's key of its label."""

    module: nn.Module
    source: Source
    labels: dict[str, str]
    histories: tuple[str, ...]
    forward: Callable[[Callable[..., Any], Batch], dict[str, Tensor]]

    def logits(self, function: Callable[..., Any], batch: Batch) -> dict[str, Tensor]:
        """Logits [B] of every task; ``function`` is the module, or it compiled."""
        return self.forward(function, batch)

    def loss(self, logits: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Mean log loss over samples and tasks, in float32 whatever the model runs in."""
        return torch.stack(
            [F.binary_cross_entropy_with_logits(logits[t].float(), batch[key]) for t, key in self.labels.items()]
        ).mean()

    def evaluate(self, split: str, device: str, limit: int | None = None) -> Evaluation:
        """By the plain module in eager mode: the numbers of all modes come from the same arithmetic, and no second
        graph is compiled."""
        self.module.eval()
        batches = self.source.held_out(split, limit=limit)
        return evaluate_batches(lambda batch: self.logits(self.module, batch), batches, self.labels, device)

    def padding_share(self, batch: Batch) -> float:
        """Share of the event slots of a batch that hold no event."""
        return share_of_padding(self.histories, batch)


def make_workload(
    model: str, data: str, config: str | None = None, max_len: int | None = None, samples: int | None = None,
    seed: int = 0, dropout: float | None = None, pooling: str = "mean",
) -> Workload:  # fmt: skip
    """Open the data and initialise the model (from torch's random state: seed it before)."""
    if single_task(model, config):
        check_name("data", data, DATA)
        return _single_task_workload(model, MOVIELENS_MAX_LEN if max_len is None else max_len, dropout, pooling)
    check_name("model", model, all_models())
    source = open_source(data, max_len, samples)
    torch.manual_seed(seed)  # opening data draws nothing, but who knows what a reader imports
    if model == "bias":
        module: nn.Module = Bias(source.schema)
    else:
        overrides = {} if dropout is None else {"dropout": dropout}
        module = zoo.build(model, source.schema, config or "small", **overrides)
    return Workload(
        module=module,
        source=source,
        labels={task: f"label_{task}" for task in source.schema.tasks},
        histories=tuple(source.schema.events),
        forward=lambda function, batch: function(batch),
    )


def all_models() -> tuple[str, ...]:
    """Every model that can be trained."""
    return tuple(dict.fromkeys((*MODELS, "bias", *zoo.MODELS)))


def single_task(model: str, config: str | None) -> bool:
    """Whether a name means a model of the demo: where the zoo has one of that name too, ``--config`` asks for the zoo's."""
    return model in MODELS and (config is None or model not in zoo.MODELS)


# ---------------------------------------------------------------- the single-task models


def _single_task_workload(model: str, max_len: int, dropout: float | None, pooling: str) -> Workload:
    samples, vocabulary = load_samples("movielens", model, max_len)
    return Workload(
        module=build_model(model, vocabulary, max_len, 0.1 if dropout is None else dropout, pooling),
        source=_SingleTaskSource(samples),
        labels={"click": "label"},
        histories=histories(model),
        forward=lambda function, batch: {"click": click_logits(model, function, batch)},
    )


class _SingleTaskSource(IndexedSource):
    """Batches of movielens.py, which have no schema."""

    def __init__(self, samples: dict[str, SampleSet]) -> None:
        super().__init__(samples, schema=None)  # type: ignore[arg-type]


def histories(model: str) -> tuple[str, ...]:
    """The event histories a single-task model reads."""
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
    """A freshly initialised single-task model; the seed is the caller's (``torch.manual_seed``)."""
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


def evaluate_model(name: str, module: nn.Module, samples: SampleSet, device: str = "cpu", limit: int | None = None) -> Any:
    """Metrics of a single-task model on samples (the first ``limit``), in eager mode."""
    module.eval()

    def logits(batch: Batch) -> dict[str, Tensor]:
        return {"click": click_logits(name, module, batch)}

    batches: Iterator[Batch] = batches_by_length(samples, limit=limit)
    return evaluate_batches(logits, batches, {"click": "label"}, device).first


# ---------------------------------------------------------------- shared


def compiled(module: nn.Module, mode: str, /, dynamic: bool | None = None, **options: Any) -> Callable[..., Tensor]:
    """``module`` as it is, under ``torch.compile``, or under ``gemopt.compile``; parameters are shared.

    ``options`` are those of either.
    """
    check_name("mode", mode, MODES)
    if mode == "eager":
        return module
    if mode == "compile":
        return torch.compile(module, dynamic=dynamic, **options)
    import gemopt  # only here: the models and their training do not depend on it

    return gemopt.compile(module, dynamic=dynamic, **options)


def padding_share(model: str, batch: Batch) -> float:
    """Share of the event slots of a batch of a single-task model that hold no event."""
    return share_of_padding(histories(model), batch)


def share_of_padding(names: tuple[str, ...], batch: Batch) -> float:
    """Share of the event slots of a batch that hold no event."""
    keys = [f"{name}_age" if f"{name}_age" in batch else f"{name}_item" for name in names]
    slots = sum(batch[key].numel() for key in keys)
    events = sum(int(batch[f"{name}_length"].sum()) for name in names)
    return 1 - events / max(slots, 1)


def check_name(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """ValueError naming the argument unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
