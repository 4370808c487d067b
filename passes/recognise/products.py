"""The two products of an attention: queries with keys over features, weights with values over keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.accesses.contractions import contracts_pairs
from gemopt.graph.attention import Joined, Site, split_mask
from gemopt.graph.copies import compose, owned, through_copies
from gemopt.graph.facts import Analysis
from gemopt.graph.slots import Access, Exprs, Info, argument, is_tensor, op_name
from gemopt.passes.recognise.scores import check_fill, join_added, step_scores
from gemopt.passes.recognise.walk import NoMatch, Walk, slots_of
from gemopt.passes.recognise.weights import ACTIVATIONS, step_weights

_LONGEST_WALK = 40


@dataclass(frozen=True)
class Product:
    """``node`` contracts axes of two operands; ``added`` and the factors are those of baddbmm."""

    node: fx.Node
    operands: tuple[Access, Access]
    paired: bool = True  # every contracted axis is one of both operands, in one order
    added: Access | None = None
    alpha: float = 1.0
    beta: float = 1.0
    interior: tuple[fx.Node, ...] = ()


def product(node: fx.Node, known: Analysis) -> Product | None:
    """matmul and its kin, einsum of two operands, or ``(a * b).sum(dim)``."""
    if not is_tensor(node) or node not in known.infos:
        return None
    info = known.info(node)
    if info.kind == "contraction":
        if op_name(node) in ("aten.baddbmm", "aten.addmm"):
            a, b, added = info.accesses
            alpha, beta = (float(node.kwargs.get(x, 1)) for x in ("alpha", "beta"))  # type: ignore[arg-type]
            return Product(node, (a, b), added=added, alpha=alpha, beta=beta)
        return Product(node, info.accesses, contracts_pairs(node)) if len(info.accesses) == 2 else None  # type: ignore[arg-type]
    if op_name(node) != "aten.sum" or argument(node, "dtype") is not None:
        return None
    (summed,) = info.accesses
    inner = summed.operand
    if op_name(inner) != "aten.mul" or len(known.info(inner).accesses) != 2:
        return None
    gone = {i for i, e in enumerate(summed.exprs) if e is None}
    a, b = known.info(inner).accesses
    if not all(gone <= slots_of(x.exprs) for x in (a, b)) or not gone:
        return None
    left, right = (Access(x.operand, _over_sum(x, summed)) for x in (a, b))
    return Product(node, (left, right), interior=(inner,))


def _over_sum(access: Access, summed: Access) -> Exprs:
    return compose(access, summed.exprs)


def leads_to_product(node: fx.Node, known: Analysis) -> bool:
    """Whether element-wise steps, views and softmaxes lead back from ``node`` to a product of two computed tensors."""
    for n in behind(node, known):
        found = product(n, known)
        if found is not None and not any(is_weight(a.operand) for a in found.operands):
            return True
    return False


def leads_to_score_function(node: fx.Node, known: Analysis) -> bool:
    names = [op_name(n) for n in behind(node, known)]
    return any("softmax" in n or n == "aten.exp" or n in ACTIVATIONS for n in names)


def behind(node: fx.Node, known: Analysis) -> Iterator[fx.Node]:
    """What element-wise steps, views and softmaxes lead back to, products included, also from parts of the heads that are
    joined."""
    stack: list[fx.Node] = [node]
    seen: set[fx.Node] = set()
    while stack and len(seen) < _LONGEST_WALK:
        n = stack.pop()
        if n in seen or not is_tensor(n) or n not in known.infos or not n.meta["val"].dtype.is_floating_point:
            continue
        seen.add(n)
        yield n
        kind = known.info(n).kind
        if kind in ("cat", "stack"):
            paths = [_to_slice(a.operand, known) for a in known.operands(n)]
            if all(paths):
                yield from (x for path in paths for x in path)
                stack += [known.info(path[-1]).accesses[0].operand for path in paths]
        elif product(n, known) is None and (kind in ("pointwise", "view", "expand") or "softmax" in op_name(n)):
            stack += [a.operand for a in known.operands(n)]


def _to_slice(part: fx.Node, known: Analysis) -> list[fx.Node]:
    """From a part of the heads back to the slice that it is a function of; empty where it is none."""
    stack: list[fx.Node] = [part]
    seen: list[fx.Node] = []
    while stack and len(seen) < _LONGEST_WALK:
        n = stack.pop()
        seen.append(n)
        kind = known.info(n).kind
        if kind in ("slice", "select"):
            while known.info(n := known.info(n).accesses[0].operand).kind in ("slice", "select", "view"):
                seen.append(n)
            return seen
        if kind in ("pointwise", "view", "expand") or "softmax" in op_name(n):
            stack += [a.operand for a in known.operands(n) if a.operand not in seen]
    return []


def is_weight(node: fx.Node) -> bool:
    """A matrix that is an input as it is: what a layer multiplies with."""
    while op_name(node) in ("aten.t", "aten.transpose", "aten.mT", "aten.numpy_T"):
        node = node.all_input_nodes[0]
    return node.op in ("placeholder", "get_attr") and node.meta["val"].ndim == 2


# ---------------------------------------------------------------- the whole site


def explicit_site(out: fx.Node, known: Analysis) -> Site | None:
    """The attention that ends in the product ``out``; None where it is no attention, `NoMatch` where it nearly is one."""
    failure: NoMatch | None = None
    outer = product(out, known)
    assert outer is not None
    if outer.operands[0].operand is outer.operands[1].operand or not only_product(outer, known):
        return None
    for weights, values in (outer.operands, outer.operands[::-1]):
        if is_weight(values.operand) or not leads_to_product(weights.operand, known):
            continue
        sizes = known.info(weights.operand).sizes
        contracted = [i for i, e in enumerate(weights.exprs) if e is None]
        if not contracted and leads_to_score_function(weights.operand, known):
            failure = failure or NoMatch(
                out, "one key only: there is no axis of keys, and what remains is element by element"
            )
        if len(contracted) != 1:
            continue
        walk = Walk(known, weights.operand, tuple(t.slot(i) for i in range(len(sizes))), sizes, contracted[0])
        try:
            site = _site(walk, outer, weights, values)
        except NoMatch as error:
            if walk.score not in ("", "identity") or leads_to_score_function(weights.operand, known):
                failure = failure or error  # a product of three matrices is no candidate
            continue
        if site is not None:
            return site
    if failure is not None:
        raise failure
    return None


def only_product(outer: Product, known: Analysis) -> bool:
    """baddbmm onto zeros is a product too."""
    if outer.added is None:
        return True
    value = known.value(outer.added.operand)
    zero = outer.beta == 0 or (value is not None and t.constant_value(value) == 0)
    return zero and outer.alpha == 1


def _site(walk: Walk, outer: Product, weights: Access, values: Access) -> Site | None:
    known = walk.known
    while not walk.score:
        if product(walk.at, known) is not None:
            walk.score = "identity"
        elif not step_weights(walk):
            if op_name(walk.at) not in ("aten.add", "aten.sub"):
                return None
            walk.score = "identity"  # a bias on scores that nothing is applied to
    inner = product(walk.at, known)
    while inner is None:
        if not step_scores(walk):
            if leads_to_product(walk.at, known):
                raise NoMatch(walk.at, f"scores come from {op_name(walk.at) or walk.at.op}, which is not understood")
            return None
        inner = product(walk.at, known)
    _read_added(walk, inner)
    return _assemble(walk, inner, outer, weights, values)


def _read_added(walk: Walk, inner: Product) -> None:
    """baddbmm(x, q, k): the added tensor is a mask or a bias like any other."""
    if inner.added is None:
        return
    if inner.beta != 0:
        if walk.unknown_scale:
            raise NoMatch(inner.node, "a bias is scaled by a tensor together with the scores")
        join_added(walk, Joined(inner.added.operand, compose(inner.added, walk.exprs)), inner.beta)
    if inner.alpha == 0:
        raise NoMatch(inner.node, "scores are multiplied by zero")
    walk.scale *= inner.alpha


def _assemble(walk: Walk, inner: Product, outer: Product, weights: Access, values: Access) -> Site | None:
    known, key, out = walk.known, walk.key, outer.node
    sizes = walk.sizes
    q, k = _queries_and_keys(walk, inner, sizes)
    if q is None or k is None:
        return None
    out_slots, v_exprs = _result(outer, weights, values, known, key)
    if key not in (owned(v_exprs, sizes) or ()):
        raise NoMatch(out, "the values do not have the key axis, or are not plainly laid out")
    k_operand, k_exprs = through_copies(k.operand, k.exprs, known, sizes)
    v_operand, v_exprs = through_copies(values.operand, v_exprs, known, sizes)
    qs, ks, vs = (frozenset(owned(e, sizes) or ()) for e in (q.exprs, k_exprs, v_exprs))
    if qs | ks != set(range(len(sizes))):
        raise NoMatch(inner.node, "an axis of the scores comes from neither queries nor keys")
    if {s for s in out_slots if s is not None} != (qs | ks) - {key} or not vs <= qs | ks:
        raise NoMatch(out, "the result lacks an axis of the scores")
    if not (ks & vs) - {key}:
        if walk.score != "softmax":
            return None  # a product with weights that every sequence shares: a layer, not attention
        raise NoMatch(inner.node, "every sequence has the same keys and values")
    mask = _mask(walk, out)
    check_fill(out, known, walk.fill, [*walk.biases, *walk.lifted])
    query = _query_axis(qs - ks - vs, mask, key, sizes)
    parts = split_mask(mask, query, key)
    if walk.score == "identity" and parts.key == t.TRUE and parts.band.unbounded and parts.rest == t.TRUE:
        contracted = [n for e, n in zip(q.exprs, known.info(q.operand).sizes, strict=True) if e is None]
        if query is None or sizes[query].is_Integer or not all(n.is_Integer for n in (sizes[key], *contracted)):
            return None  # a product of three matrices; with a memory of known size for each sequence, it is this attention
    interior = (weights.operand, *walk.interior, *outer.interior, inner.node, *inner.interior)
    joined = [j.node for j in (*walk.biases, *walk.factors, *walk.q_factors)]
    _check_escapes(interior, out, {q.operand, k.operand, k_operand, values.operand, v_operand, *joined})
    return Site(
        out=out, q=q.operand, k=k_operand, v=v_operand, q_exprs=q.exprs, k_exprs=k_exprs, v_exprs=v_exprs,
        out_slots=out_slots, query=query, key=key, mask=mask, scale=walk.scale, dropout=walk.dropout, fill=walk.fill,
        spelling=f"{op_name(inner.node)} -> {walk.score} -> {op_name(out)}", score_dtype=inner.node.meta["val"].dtype,
        interior=tuple(dict.fromkeys(interior)), score=walk.score, by_head=walk.by_head, slope=walk.slope,
        post_scale=walk.post_scale, sizes=sizes,
        widths=widths(q.exprs, known.info(q.operand), out_slots, known.info(out)),
        biases=tuple(walk.biases), factors=tuple(walk.factors), q_factors=tuple(walk.q_factors),
    )  # fmt: skip


def _mask(walk: Walk, out: fx.Node) -> t.Term:
    if walk.score != "softmax":
        return t.and_(walk.mask, walk.weight_mask)
    extra = []
    for part in t.conjuncts(walk.weight_mask):
        if t.implies(walk.mask, part):
            continue  # those weights are 0 already
        if walk.key in part.slots:
            raise NoMatch(out, "weights are masked after the softmax, which does not renormalise them")
        extra.append(part)
    return t.and_(walk.mask, *extra)


def _queries_and_keys(
    walk: Walk, inner: Product, sizes: tuple[sympy.Expr, ...]
) -> tuple[Access, Access] | tuple[None, None]:
    node = inner.node
    operands = [Access(a.operand, compose(a, walk.exprs)) for a in inner.operands]
    if not inner.paired:
        raise NoMatch(node, "the operands do not contract the same axes in the same order")
    left, right = (owned(a.exprs, sizes) for a in operands)
    if left is None or right is None:
        raise NoMatch(node, "the operands of the product are not plainly laid out")
    if (walk.key in left) == (walk.key in right):
        if walk.score != "softmax":
            return None, None
        raise NoMatch(node, "the key axis does not come from exactly one operand of the product")
    if any(all(e is not None for e in a.exprs) for a in operands):
        raise NoMatch(node, "the product contracts nothing")
    k, q = (0, 1) if walk.key in left else (1, 0)
    return operands[q], operands[k]


def _result(
    outer: Product, weights: Access, values: Access, known: Analysis, key: int
) -> tuple[tuple[int | None, ...], Exprs]:
    """Score slot of every slot of the result, and the values' slots over the score slots."""
    out = outer.node
    if not outer.paired:
        raise NoMatch(out, "the operands do not contract the same axes in the same order")
    score_of: dict[int, int] = {}
    for s, expr in enumerate(weights.exprs):
        if expr is not None:
            if expr.op != "slot":
                raise NoMatch(out, "the weights are not plainly laid out")
            score_of[expr.args[0]] = s
    out_slots = tuple(score_of.get(j) for j in range(len(known.info(out).sizes)))
    features = {j for j, s in enumerate(out_slots) if s is None}
    exprs: list[t.Term | None] = []
    contracted = 0
    for expr in values.exprs:
        if expr is None:
            exprs.append(t.slot(key))
            contracted += 1
        elif expr.slots <= features:
            exprs.append(None)
        elif expr.slots & features:
            raise NoMatch(out, "the values are not plainly laid out")
        else:
            exprs.append(t.substitute(expr, {j: t.slot(score_of[j]) for j in expr.slots}))
    own = [e for e in values.exprs if e is not None and e.slots & features]
    if own != [t.slot(j) for j in sorted(features) if known.info(out).sizes[j] != 1]:
        raise NoMatch(out, "the features of the result are in another order than those of the values")
    if contracted != 1 or not features:
        raise NoMatch(out, "the product with the values contracts more than the key axis, or has no features left")
    return out_slots, tuple(exprs)


def widths(q_exprs: Exprs, q: Info, out_slots: tuple[int | None, ...], out: Info) -> sympy.Expr:
    """head_dim of queries plus that of values."""
    query = sympy.prod([n for e, n in zip(q_exprs, q.sizes, strict=True) if e is None])
    return query + sympy.prod([n for s, n in zip(out_slots, out.sizes, strict=True) if s is None])


def _query_axis(own: frozenset[int], mask: t.Term, key: int, sizes: tuple[sympy.Expr, ...]) -> int | None:
    """Of the axes that queries alone have, the one that the mask relates to keys, else one of unknown size, else the last;
    the others are heads that share their keys."""
    if not own:
        return None
    related = {s for part in t.conjuncts(mask) if key in part.slots for s in part.slots & own}
    by_mask = {s for part in t.conjuncts(mask) for s in part.slots & own}
    symbolic = {s for s in own if not sizes[s].is_Integer}
    for choice in (related, by_mask, symbolic):
        if choice:
            return max(choice)
    return max(own)


def _check_escapes(interior: tuple[fx.Node, ...], out: fx.Node, operands: set[fx.Node]) -> None:
    """Nothing inside may be read from outside, nor by what the attention reads: the padded scores would have to be computed
    all the same."""
    inside = set(interior)
    for node in interior:
        for user in node.users:
            escaped = None if user is out else _escape(user, inside, operands)
            if escaped is not None:
                raise NoMatch(
                    escaped, f"an intermediate of the attention ({node.name}) is used elsewhere",
                    "do not return or reuse scores or weights (need_weights=False)",
                )  # fmt: skip


def _escape(user: fx.Node, inside: set[fx.Node], operands: set[fx.Node]) -> fx.Node | None:
    """``user`` if a value leaves ``inside`` through it for good, or comes back as one of ``operands``; a side path that
    returns otherwise (a row maximum) is part of the attention."""
    stack, seen = [user], set()
    while stack:
        n = stack.pop()
        if n in operands:
            return user
        if n in inside or n in seen:
            continue
        seen.add(n)
        if n.op == "output" or len(seen) > _LONGEST_WALK:
            return user
        stack += n.users
    return None
