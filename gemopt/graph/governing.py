"""Which mask governs a padded output.

The key mask of an attention speaks of the rows of its keys. Where keys come from the same tensor as queries, that mask
travels forward, slot by slot, to everything computed row by row from it. An output that exactly one mask reaches is
governed by it: with ``padded_outputs="zero"`` its dead rows may become zeros.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.attention import Site, score_slots
from gemopt.graph.facts import Analysis
from gemopt.graph.live import without_ranges
from gemopt.graph.slots import backward, forward, is_tensor, nodes_in
from gemopt.graph.terms import Term


def governing_masks(
    graph: fx.Graph, known: Analysis, sites: Sequence[Site], wanted: Any, output_names: Sequence[str]
) -> dict[fx.Node, Term]:
    """Outputs to be restricted, with the predicate of the rows they keep."""
    (output,) = [n for n in graph.nodes if n.op == "output"]
    flat = nodes_in(output.args)
    candidates = candidate_masks(graph, known, sites)
    result: dict[fx.Node, Term] = {}
    for node, name in zip(flat, output_names, strict=False):
        chosen = wanted.get(name) if isinstance(wanted, Mapping) else wanted
        if chosen == "zero" and len(candidates.get(node, ())) == 1:
            result[node] = next(iter(candidates[node]))
    return result


def candidate_masks(graph: fx.Graph, known: Analysis, sites: Sequence[Site]) -> dict[fx.Node, frozenset[Term]]:
    """Masks that reach each tensor: from keys back to what they are made of, and from there forward."""
    masks: dict[fx.Node, set[Term]] = defaultdict(set)
    by_out = {s.out: s for s in sites}
    for site in sites:
        slot_of = {s: t.slot(i) for s, i in score_slots(site.k_exprs).items()}
        mask = site.parts.key
        if len(mask.slots) >= 2 and mask.slots <= set(slot_of):
            masks[site.k].add(t.substitute(mask, slot_of))
    for node in reversed(graph.nodes):
        if not is_tensor(node) or node in by_out:
            continue
        for mask in masks.get(node, set()).copy():
            for access in known.operands(node):
                moved = without_ranges(backward(mask, access, known.info(node).sizes, known.info(access.operand).sizes))
                if len(moved.slots) == len(mask.slots):
                    masks[access.operand].add(moved)
    for node in graph.nodes:
        if not is_tensor(node):
            continue
        if node in by_out:
            masks[node] = _through(by_out[node], masks)
            continue
        for access in known.operands(node):
            for mask in masks.get(access.operand, ()):
                carried = forward(mask, access)
                if carried is not None:
                    masks[node].add(carried)
    return {n: frozenset(m) for n, m in masks.items() if m}


def _through(site: Site, masks: Mapping[fx.Node, set[Term]]) -> set[Term]:
    """Self attention: the rows of the result are the rows of the queries."""
    slot_of = {s: j for j, s in enumerate(site.out_slots) if s is not None}
    found: set[Term] = set()
    for mask in masks.get(site.q, ()):
        moved = {i: t.slot(slot_of[s]) for s, i in score_slots(site.q_exprs).items() if s in slot_of}
        if mask.slots <= set(moved):
            found.add(t.substitute(mask, moved))
    return found
