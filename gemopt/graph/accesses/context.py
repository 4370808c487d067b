"""What the handlers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import fx

from gemopt.graph.slots import (
    Info,
)
from gemopt.graph.terms import Term


class Context(Protocol):
    """What a handler may ask about operands: their dims, and the value of integer ones."""

    def info(self, node: fx.Node) -> Info: ...
    def value(self, node: fx.Node) -> Term | None: ...


Handler = Callable[[fx.Node, Context], Info]
