"""Recognise attention by what it computes.

Every attention ends in a product that contracts the key axis: weights times values. From the weights the walk goes back
over the *score slots*, first through what happens to weights (dropout, masks, normalisation), then through the score
function (a softmax however spelled, an activation, or nothing), then through what happens to scores (scales, masks, biases),
until it meets the product that contracts a feature axis: queries and keys, told apart by which of them owns the key axis.
Axes are slots, carried by accesses, so matmul, bmm, einsum, ``mul().sum()``, merged batch-and-head dims and any layout of K
are one case, and a permutation that contracts the wrong axis is not a match.

Every candidate ends as a `Site` or as a `Miss` that names the node where the match ended, and the reason.
"""

from __future__ import annotations

from torch import fx

from gemopt.graph.attention import Site
from gemopt.graph.facts import Analysis
from gemopt.graph.slots import is_tensor, op_name
from gemopt.passes.recognise.fused import fused_site
from gemopt.passes.recognise.products import explicit_site, product
from gemopt.passes.recognise.walk import Miss, NoMatch

__all__ = ["Miss", "recognise"]


def recognise(graph: fx.Graph, known: Analysis) -> tuple[list[Site], list[Miss]]:
    """All attentions of a graph, and the candidates that are not one."""
    sites: list[Site] = []
    misses: list[Miss] = []
    for node in graph.nodes:
        try:
            site = _site(node, known)
        except NoMatch as failure:
            misses.append(failure.miss)
            continue
        if site is not None:
            sites.append(site)
    return _without_overlap(sites), misses


def _site(node: fx.Node, known: Analysis) -> Site | None:
    if op_name(node) == "aten.scaled_dot_product_attention":
        return fused_site(node, known)
    if not is_tensor(node) or product(node, known) is None:
        return None
    return explicit_site(node, known)


def _without_overlap(sites: list[Site]) -> list[Site]:
    """A product of three can be read as attention in two ways; the first one found is kept."""
    taken: set[fx.Node] = set()
    kept = []
    for site in sites:
        nodes = {site.out, *site.interior}
        if not nodes & taken:
            kept.append(site)
            taken |= nodes
    return kept
