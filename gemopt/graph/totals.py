"""Row counts that need not be read: the host says how many rows there will be, and the device confirms it afterwards.

A packed size has to be known to the host before the packed graph can be launched, and a count of mask elements is known to
the device. Some counts follow from what the host holds already:

    the mask of a jagged input        T, the size of its values      if the lengths are true: >= 0, <= L, their sum T
    `pos == length - 1` per sequence  B, the number of sequences     if no sequence is empty
    every position                    B * L                          always

The conditions are data. So the host *expects* these counts: it copies ``stats`` to pinned memory without waiting, fills the
indices for the expected counts, launches the packed forward, and only then looks at the copy, which the device has made long
since. Where a bit or a count is not as expected, the result is thrown away and the step is decided again from the true
figures. Indices are clamped, so that a wrong expectation computes nonsense and reads nothing out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor

from gemopt.graph import terms as t
from gemopt.graph.rowsets import RowSet
from gemopt.graph.terms import Term


@dataclass(frozen=True)
class Total:
    """The mask, over ``sizes``, of a jagged input with ``count`` rows; ``text`` is how the report names that number.

    With ``whole``, it should hold ``count`` times; else it speaks of some of the rows.
    """

    mask: Term
    sizes: tuple[sympy.Expr, ...]
    count: sympy.Expr
    text: str
    whole: bool = True


def expected_count(s: RowSet, totals: Sequence[Total]) -> tuple[sympy.Expr, str] | None:
    """How many rows a set should have, as a size of the inputs; None where nothing says so."""
    if s.full:
        return sympy.prod(s.sizes), "every position"
    for total in totals:
        if total.whole and total.mask == s.predicate and total.sizes == s.sizes:
            return total.count, total.text
    if s.predicate.op == "eq0" and abs(t.as_linear(s.predicate.args[0])[0].get(t.slot(s.token), 0)) == 1:
        return sympy.prod(s.sizes[:-1]), "one for each sequence"
    return None


class Later:
    """A tensor of figures on its way to the host."""

    def __init__(self, figures: Tensor) -> None:
        self._host, self._event = figures, None
        if figures.is_cuda:
            self._host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._host.copy_(figures, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[int]:
        """Wait for that copy alone, not for what was launched after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
