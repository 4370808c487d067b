"""Public models, unmodified: what a case is, and the batches they are fed.

A case builds one model of a package at a tiny size, with dropout at 0 in its configuration, and a *step*: a function of
one padded batch that returns the package's own loss (or, for the cases that must be refused, what the model returns).
The step is what is compiled, so that the loss says which rows are read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Step = Callable[..., Any]
Inputs = Callable[[Tensor, int, torch.Generator], Any]

#: No two sizes of a model are equal, so that equal sizes never stand in for equal axes by luck.
BATCH, MAX_LEN = 6, 11
#: "given" comes last: the report shows the costs of the last step.
LENGTHS = ("ones", "full", "skewed", "given")


@dataclass(frozen=True)
class Built:
    """A step, what draws its batches, and the modules it trains (tensors of the step's closure)."""

    step: Step
    inputs: Inputs
    train: bool = True


@dataclass(frozen=True)
class PublicCase:
    """One public model and what the compiler owes it.

    Attributes:
        name: of the case, unique.
        package: the import that must be there.
        model: how its authors call it.
        make: builds it.
        sites: attentions in the model's code: two products around a score function.
        pools: sums weighted by the scores of an MLP, as in DIN.
        reads: which rows the step observes: ``"some"`` (padding is dead) or ``"all"`` (padding is observed, or the step is
            not one graph).
        grad: whether forward and backward are compared, or the forward without grad.
        quick: in the selection that runs by default.
        lengths: cases of `gemopt.testing.CASES`.
        owed: sites and pools that have to be rewritten; all of them where only some rows are read.
        note: what a reader of the table should know.
    """

    name: str
    package: str
    model: str
    make: Callable[[], Built]
    sites: int
    pools: int = 0
    reads: Literal["some", "all"] = "some"
    grad: bool = True
    quick: bool = False
    lengths: tuple[str, ...] = LENGTHS
    owed: int = -1
    note: str = ""

    def __post_init__(self) -> None:
        if self.owed < 0:
            object.__setattr__(self, "owed", self.sites + self.pools if self.reads == "some" else 0)

    def __str__(self) -> str:
        return self.name

    def missing(self) -> str:
        """Why the case cannot run here, or empty."""
        absent = [m for m in (self.package, *_ALSO.get(self.package, ())) if not importlib.util.find_spec(m)]
        return f"{absent[0]} is not installed (make setup-public)" if absent else ""


# RecBole alone is there for its data set; its models need what it imports.
_ALSO = {"recbole": ("colorlog", "colorama")}

CASES: dict[str, PublicCase] = {}


def register(
    package: str, model: str, sites: int, *, name: str, **options: Any
) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Decorator that files a builder under a name that may be used once only."""

    def add(make: Callable[[], Built]) -> Callable[[], Built]:
        file(PublicCase(name, package, model, make, sites, **options))
        return make

    return add


def file(case: PublicCase) -> None:
    if case.name in CASES:
        raise ValueError(f"two public cases are called {case.name!r}")
    CASES[case.name] = case


# ---------------------------------------------------------------- batches


def valid(lengths: Tensor, max_len: int) -> Tensor:
    """Bool `[B, max_len]`, true at the first `lengths` positions."""
    return torch.arange(max_len)[None, :] < lengths[:, None]


def ids(lengths: Tensor, max_len: int, generator: torch.Generator, vocabulary: int, pad: int = 0, first: int = 3) -> Tensor:
    """Ids `[B, max_len]` in first..vocabulary-1, `pad` where invalid."""
    drawn = torch.randint(first, vocabulary, (len(lengths), max_len), generator=generator)
    return drawn.masked_fill(~valid(lengths, max_len), pad)


def labels(at: Tensor, generator: torch.Generator, vocabulary: int, ignore: int = -100) -> Tensor:
    """Targets `[B, L]` in 1..vocabulary-1 where `at` is true, `ignore` elsewhere."""
    return torch.randint(1, vocabulary, at.shape, generator=generator).masked_fill(~at, ignore)
