"""Extra inputs of the packed graph: row indices and what follows from them.

    index(S)       int64 [T]     flat (sequence, position) index of every row, ascending
    axis(S, i)     int64 [T]     its coordinate on row axis i
    sequence(S)    int64 [T]     its sequence number (n for spare rows)
    offsets(S)     int64 [n+1]   first row of every sequence
    regular(S)     int64 [n+1]   the same where every position is a row: 0, L, 2 L, …
    blocks(S, w)   int64 [m+1]   first row of every block of w positions of every sequence
    repack(S, R)   int64 [T_R]   number in S of every row of R
    gather(S, ..)  int64 [U]     number in S of the positions a gather reads, -1 outside S

Each kind that the packed graph asks for becomes a placeholder; `Plan` fills them at run time.

With a capacity, T is the number of rows that fit and the rows after the last one are *spare* (graph/spare.py): as an index
they are the number of padded rows, which `pack` and `unpack` take for no row.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from torch import fx

from gemopt.graph.rowsets import RowSet
from gemopt.graph.terms import Term


@dataclass(frozen=True)
class Extra:
    """One extra input: ``kind`` as in the module's table, over row set ``set``; ``axis`` is its number (i, w)."""

    kind: str
    set: RowSet
    axis: int = 0
    target: RowSet | None = None
    positions: tuple[Term, ...] = ()
    sizes: tuple[sympy.Expr, ...] = ()

    @property
    def name(self) -> str:
        parts = [self.set.name, self.kind]
        if self.kind in ("axis", "blocks"):
            parts.append(str(self.axis))
        if self.target is not None:
            parts.append(self.target.name)
        return "_".join(parts)


class Extras:
    """The extra placeholders of a graph under construction, in the order they were first asked for.

    ``spare``: the packed tensors may have spare rows, whose coordinates are some row's and whose sequence is none.
    """

    def __init__(self, graph: fx.Graph, after: fx.Node, spare: bool = False) -> None:
        self._graph, self._after, self._spare = graph, after, spare
        self.nodes: dict[Extra, fx.Node] = {}

    def __getitem__(self, extra: Extra) -> fx.Node:
        if extra not in self.nodes:
            with self._graph.inserting_after(self._after):
                taken = sum(e.name == extra.name for e in self.nodes)
                name = f"{extra.name}_{taken}" if taken else extra.name
                self._after = self.nodes[extra] = self._graph.placeholder(name)
        return self.nodes[extra]

    def index(self, s: RowSet) -> fx.Node:
        return self[Extra("index", s)]

    def axis(self, s: RowSet, i: int) -> fx.Node:
        return self[Extra("axis", s, axis=i)]

    def sequence(self, s: RowSet) -> fx.Node:
        return self.axis(s, 0) if len(s.sizes) == 2 and not self._spare else self[Extra("sequence", s)]

    def offsets(self, s: RowSet) -> fx.Node:
        return self[Extra("offsets", s)]

    def regular(self, s: RowSet) -> fx.Node:
        return self[Extra("regular", s)]

    def blocks(self, s: RowSet, width: int) -> fx.Node:
        return self[Extra("blocks", s, axis=width)]

    def repack(self, s: RowSet, target: RowSet) -> fx.Node:
        return self[Extra("repack", s, target=target)]

    def gather(self, s: RowSet, positions: tuple[Term, ...], sizes: tuple[sympy.Expr, ...]) -> fx.Node:
        return self[Extra("gather", s, positions=positions, sizes=sizes)]
