"""Row sets with a capacity: packed tensors of a fixed size, with spare rows behind the rows that there are.

A packed size that changes from step to step is a symbol to the compiler: every kernel is written for any size, and no CUDA
graph can be replayed. With `Recipe(row_slack=...)` a row set has a capacity instead, the rows of the first batch and some
more; its packed tensors always have that many rows, and a step whose rows do not fit runs padded. Spare rows are sound
because

- they enter as copies of the set's first row (a set without rows has its step run padded), or as zeros out of an attention;
- they stay finite where that row does; behind an attention, and where rows of another set are filled up, every op that runs
  packed keeps finite numbers finite, forward and backward (`graph/finite.py`), else there are no capacities (`obstacle`);
- they leave nowhere: `unpack`, `segment_sum`, gathers and attention take no notice of them, a sum over all rows replaces
  them by zeros, a token loss ignores their labels. So their gradient is zero, and zero times finite is zero in whatever
  gradient is summed over rows.
"""

from __future__ import annotations

from torch import fx

from gemopt.graph.finite import keeps_finite
from gemopt.graph.layout import Layout

_GRANULE = 64  # rows: one tile of queries


def obstacle(layout: Layout) -> str:
    """Why the packed tensors of this graph can have no spare rows; empty if they can."""
    unlike: set[fx.Node] = set()  # packed tensors whose spare rows are unlike any other
    for node, info in layout.known.infos.items():
        if info.kind == "boolean_index":
            return f"{node.name} shows how many rows there are"
        if node not in layout.packed:
            continue
        behind = {o for o in layout.operands(node) if o in layout.packed and (o in unlike or _filled_up(o, node, layout))}
        if behind and not keeps_finite(node, behind, layout):
            return f"{node.name} may be infinite in spare rows"
        if behind or node in layout.sites:
            unlike.add(node)
    return ""


def _filled_up(operand: fx.Node, node: fx.Node, layout: Layout) -> bool:
    """Whether an operand is on fewer rows, and filled up (`Emitter.rows_of`)."""
    return layout.rows[operand].set is not layout.rows[node].set


def capacity(count: int, total: int, slack: float) -> int:
    """Rows to make room for: ``count`` of ``total`` there are now."""
    wanted = max(int(count * (1 + slack)), 1)
    return min(-(-wanted // _GRANULE) * _GRANULE, total)
