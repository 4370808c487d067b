"""``scaled_dot_product_attention``: a site that is spelled as one."""

from __future__ import annotations

import sympy
import torch
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.attention import Joined, Site
from gemopt.graph.copies import owned, through_copies
from gemopt.graph.facts import HIDING_FILL, Analysis
from gemopt.graph.slots import Exprs, Info, NotUnderstood, argument, broadcast, op_name
from gemopt.graph.terms import Term
from gemopt.passes.recognise.added import over_scores, read_added
from gemopt.passes.recognise.products import widths
from gemopt.passes.recognise.scores import check_fill
from gemopt.passes.recognise.walk import MASK_HINT, NoMatch


def fused_site(node: fx.Node, known: Analysis) -> Site:
    """The site of a call; `NoMatch` where an argument is not understood."""
    q, k, v = node.args[:3]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    info = known.info(node)
    if info.kind != "attention":
        raise NoMatch(node, "the operands' axes are not understood")
    qi, ki, vi = known.info(q), known.info(k), known.info(v)
    if len(qi.dims[-2]) > 1 or not len(ki.dims[-2]) == len(vi.dims[-2]) == 1:
        raise NoMatch(node, "one key only, or a merged token axis")
    batch = info.dims[:-2]
    count = sum(map(len, batch))
    scores = Info((*batch, qi.dims[-2], ki.dims[-2]))
    sizes = scores.sizes
    key = len(sizes) - 1

    def over_scores(operand: Info, token: int) -> Exprs:
        try:
            leading = broadcast([Info(operand.dims[:-2]), Info(batch)], [sympy.prod(d) for d in batch])[1][0]
        except NotUnderstood as error:
            raise NoMatch(node, str(error)) from error
        tokens = tuple(t.slot(token) for _ in operand.dims[-2])
        return (*leading, *tokens, *((None,) * len(operand.dims[-1])))

    q_exprs = over_scores(qi, count)
    k, k_exprs = through_copies(k, over_scores(ki, key), known, sizes)
    v, v_exprs = through_copies(v, over_scores(vi, key), known, sizes)
    qs, ks, vs = (owned(e, sizes) for e in (q_exprs, k_exprs, v_exprs))
    if qs is None or ks is None or vs is None:
        raise NoMatch(node, "the operands' heads are merged in different ways")
    if not (set(ks) & set(vs)) - {key}:
        raise NoMatch(node, "every sequence has the same keys and values")
    mask, fill, biases = _mask(node, known, scores)
    if argument(node, "is_causal", False):
        row = t.slot(count) if qi.dims[-2] else t.const(0)
        mask = t.and_(mask, t.le(t.slot(key), row))
    out_slots = (*range(key), *((None,) * len(info.dims[-1])))
    own = count if qi.dims[-2] else None
    return Site(
        out=node, q=q, k=k, v=v, q_exprs=q_exprs, k_exprs=k_exprs, v_exprs=v_exprs,
        out_slots=out_slots, query=own, key=key, mask=mask,
        scale=_scale(node, q), dropout=float(argument(node, "dropout_p", 0.0)), fill=fill, spelling=op_name(node),
        score_dtype=node.meta["val"].dtype, sizes=sizes, biases=biases,
        widths=widths(q_exprs, qi, out_slots, info),
    )  # fmt: skip


def _scale(node: fx.Node, q: fx.Node) -> float:
    scale, width = argument(node, "scale"), q.meta["val"].shape[-1]
    if scale is None and not isinstance(width, int):
        raise NoMatch(node, "head_dim is not known at compile time")
    return float(width**-0.5 if scale is None else scale)


def _mask(node: fx.Node, known: Analysis, scores: Info) -> tuple[Term, float, tuple[Joined, ...]]:
    """The predicate of ``attn_mask``, its fill, and, where it is no mask of 0 and large negative numbers, the bias it is."""
    mask = argument(node, "attn_mask")
    if mask is None:
        return t.TRUE, -float("inf"), ()
    try:
        exprs = broadcast([known.info(mask), scores], [sympy.prod(d) for d in scores.dims])[1][0]
    except NotUnderstood as error:
        raise NoMatch(node, f"the mask: {error}") from error
    term = over_scores(known, mask, exprs)
    if mask.meta["val"].dtype == torch.bool:
        if term is None:
            raise NoMatch(node, "the mask is not an expression of the graph's inputs that gemopt can follow", MASK_HINT)
        return t.truth(term), -float("inf"), ()
    read = read_added(known, mask, exprs, HIDING_FILL)
    for _, own in read.biases:
        if owned(own, scores.sizes) is None or any(e is None for e in own):
            raise NoMatch(node, "the float mask is neither a mask of 0 and large negative numbers nor a bias", MASK_HINT)
    biases = tuple(Joined(n, own) for n, own in read.biases)
    check_fill(node, known, read.fill, biases)
    return read.allowed, read.fill, biases
