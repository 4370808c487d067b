"""Which mask governs a padded output.

The key mask of an attention speaks of the rows of its keys. Where keys come from the same tensor as queries, that mask
travels forward, slot by slot, to everything computed row by row from it. An output that exactly one mask reaches is
governed by it: with ``padded_outputs="zero"`` its dead rows may become zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.attention import Site
from gemopt.graph.facts import Analysis
from gemopt.graph.live import Live
from gemopt.graph.slots import forward, is_tensor
from gemopt.graph.terms import Term


def governing_masks(
    graph: fx.Graph, known: Analysis, sites: Sequence[Site], wanted: Any, output_names: Sequence[str]
) -> dict[fx.Node, Term]:
    """Outputs to be restricted, with the predicate of the rows they keep."""
    (output,) = [n for n in graph.nodes if n.op == "output"]
    flat: list[fx.Node] = []
    fx.node.map_arg(output.args, lambda n: flat.append(n) or n)
    candidates = _candidates(graph, known, sites, flat)
    result: dict[fx.Node, Term] = {}
    for node, name in zip(flat, output_names, strict=False):
        chosen = wanted.get(name) if isinstance(wanted, Mapping) else wanted
        if chosen == "zero" and len(candidates.get(node, ())) == 1:
            result[node] = next(iter(candidates[node]))
    return result


def _candidates(
    graph: fx.Graph, known: Analysis, sites: Sequence[Site], outputs: Sequence[fx.Node]
) -> dict[fx.Node, frozenset[Term]]:
    """Masks that reach each tensor, from the demands that attention keys make on their sources."""
    keys_only = Live(graph, known, sites, dict.fromkeys(outputs, t.TRUE))
    masks: dict[fx.Node, frozenset[Term]] = {}
    by_out = {s.out: s for s in sites}
    for node in graph.nodes:
        if not is_tensor(node):
            continue
        found: set[Term] = set()
        for reader, rows in keys_only.readers.get(node, ()):
            if reader in by_out and rows != t.TRUE and len(rows.slots) >= 2:
                found.add(rows)
        for access in known.operands(node):
            for mask in masks.get(access.operand, ()):
                moved = forward(mask, access)
                if moved is not None:
                    found.add(moved)
        if node in by_out:
            found = _through(by_out[node], masks)
        if found:
            masks[node] = frozenset(found)
    return masks


def _through(site: Site, masks: Mapping[fx.Node, frozenset[Term]]) -> set[Term]:
    """Self attention: the rows of the result are the rows of the queries."""
    slot_of = {s: j for j, s in enumerate(site.out_slots) if s is not None}
    found: set[Term] = set()
    for mask in masks.get(site.q, ()):
        moved = {i: t.slot(slot_of[e.args[0]]) for i, e in enumerate(site.q_exprs) if e is not None and e.args[0] in slot_of}
        if mask.slots <= set(moved):
            found.add(t.substitute(mask, moved))
    return found
