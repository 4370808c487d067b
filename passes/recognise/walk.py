"""The state of the walk from the weights back to the scores, and the steps that both halves share."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.attention import LEAK, ByHead, Joined
from gemopt.graph.copies import compose, owned
from gemopt.graph.facts import Analysis
from gemopt.graph.slots import Access, Exprs, is_tensor, nodes_in, op_name
from gemopt.graph.terms import Term

CASTS = ("aten.to", "aten._to_copy", "aten.clone", "aten.contiguous", "aten.alias", "aten.type_as")
VIEWS = ("view", "expand")


@dataclass(frozen=True)
class Miss:
    """A candidate that is not rewritten: the node where the match ended, and why."""

    node: fx.Node
    reason: str
    hint: str = ""


class NoMatch(Exception):
    """The walk ended at a node that an attention does not contain."""

    def __init__(self, node: fx.Node, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.miss = Miss(node, reason, hint)


def is_transparent(node: fx.Node, known: Analysis) -> bool:
    """A view, copy or cast: the numbers are the same but for the rounding of floats."""
    if known.info(node).kind in VIEWS:
        return True
    return op_name(node) in CASTS and node.meta["val"].dtype.is_floating_point


# (condition, what is kept, the fill, whether it is kept where the condition holds): positions of arguments.
Masking = tuple[int, int, int, bool]


def maskings(node: fx.Node) -> tuple[Masking, ...]:
    """How ``masked_fill`` and ``where`` may be read as a tensor that a mask fills; empty for another op."""
    if op_name(node) == "aten.masked_fill":
        return ((1, 0, 2, False),)
    if op_name(node) == "aten.where" and len(node.args) == 3:
        return ((0, 1, 2, True), (0, 2, 1, False))
    return ()


MASK_HINT = "build the mask from lengths, ids or a boolean input inside the compiled function"


@dataclass
class Walk:
    """Where the walk stands: node ``at``, its slots over the score slots, and what was read on the way."""

    known: Analysis
    at: fx.Node
    exprs: Exprs
    sizes: tuple[sympy.Expr, ...]  # of the score slots
    key: int
    score: str = ""  # "" until the score function is met
    by_head: ByHead | None = None  # where heads have score functions of their own
    slope: float = LEAK  # of a leaky_relu
    mask: Term = t.TRUE
    weight_mask: Term = t.TRUE  # conjuncts met after the score function
    scale: float = 1.0
    post_scale: float = 1.0
    fill: float = -float("inf")
    dropout: float = 0.0
    unknown_scale: bool = False  # scaled by a tensor: fills further back have no known size
    biases: list[Joined] = field(default_factory=list)
    lifted: list[Joined] = field(default_factory=list)  # added to scores below a finite fill, and the same for all keys
    factors: list[Joined] = field(default_factory=list)
    q_factors: list[Joined] = field(default_factory=list)
    interior: list[fx.Node] = field(default_factory=list)

    @property
    def scores(self) -> tuple[str, ...]:
        """Every score function that was met."""
        return (self.score,) if self.by_head is None else self.by_head.names

    def move(self, access: Access) -> None:
        """Step to an operand."""
        if self.at is not access.operand:
            self.interior.append(self.at)
        self.exprs = compose(access, self.exprs)
        self.at = access.operand

    def pass_through(self) -> None:
        """Step to the operand of an op that mixes an axis but keeps the shape (a softmax)."""
        self.interior.append(self.at)
        self.at = self.known.info(self.at).accesses[0].operand

    def access_of(self, position: int) -> Access | None:
        """The access of a tensor argument of the current node."""
        tensors = [n for n in nodes_in(self.at.args, self.at.kwargs) if is_tensor(n)]
        value = self.at.args[position]
        if not isinstance(value, fx.Node) or not is_tensor(value):
            return None
        return self.known.info(self.at).accesses[tensors.index(value)]

    def term_of(self, position: int) -> Term | None:
        """The value of an argument of the current node, over the score slots."""
        return self.renamed(self.known.values.operand(self.at, position))

    def renamed(self, term: Term | None) -> Term | None:
        return renamed(term, self.exprs)

    def number_of(self, position: int) -> float | None:
        """A constant argument, given as a number or as a tensor that holds one."""
        value = self.at.args[position]
        if isinstance(value, bool):
            return None
        if isinstance(value, int | float):
            return float(value)
        term = self.term_of(position)
        number = None if term is None else t.constant_value(term)
        return None if number is None else float(number)

    def joined(self, position: int, **how: float | bool) -> Joined | None:
        """A tensor argument of the current node as something that joins scores or weights; None if it is mixed in."""
        access = self.access_of(position)
        if access is None:
            value = self.at.args[position]
            size = isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.SymInt)
            return Joined(value, (), **how) if size else None  # type: ignore[arg-type]
        exprs = compose(access, self.exprs)
        if any(e is None for e in exprs) or owned(exprs, self.sizes) is None:
            return None
        return Joined(access.operand, exprs, **how)  # type: ignore[arg-type]

    def step_pointwise_view(self) -> bool:
        """Views, casts and copies change nothing but the layout."""
        info, name = self.known.info(self.at), op_name(self.at)
        if name == "aten.detach":
            raise NoMatch(self.at, "a part of the attention is detached from the graph")
        if name in CASTS and not self.at.meta["val"].dtype.is_floating_point:
            raise NoMatch(self.at, "a part of the attention is rounded to integers")
        if info.kind in VIEWS or name in CASTS:
            self.move(info.accesses[0])
            return True
        return False


def renamed(term: Term | None, exprs: Exprs) -> Term | None:
    """A term over a node's slots over the score slots, given the node's own; None where it speaks of a contracted one."""
    if term is None or any(exprs[s] is None for s in term.slots):
        return None
    return t.substitute(term, {s: exprs[s] for s in term.slots})  # type: ignore[misc]


def slots_of(exprs: Exprs) -> frozenset[int]:
    return frozenset().union(*(e.slots for e in exprs if e is not None))


def is_binary(value: Term) -> bool:
    """A term that is 0 or 1 everywhere."""
    if t.is_predicate(value):
        return True
    return value.op == "where" and {t.constant_value(a) for a in value.args[1:]} <= {0, 1}
