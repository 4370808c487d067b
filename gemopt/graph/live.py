"""Live rows, backward: which elements of every tensor can influence anything observed.

    demand(x) = or over readers y of  backward(need(y), access of x in y)        lattice: False < predicates < True
    need(x)   = demand(x) and not fact(x).where

A row under a fact is a constant: nothing has to be computed for it, and whoever wants it gets the constant. That one rule
covers masked sums, masked fills, products with a mask and unreduced losses; refinements are needed only for ops that look
at an operand in some rows alone:

    where(c, x, y)          x where c, y where not c
    attention               keys and values where the key mask holds; queries where the output is wanted
    cross entropy, reduced  rows whose target is not ignored
    x[mask]                 rows where the mask holds

Index-like tensors (integers, booleans, float masks whose value is known) are always live as a whole: they are small, and a
fact must hold of the padded tensor too, whose masking op reads its mask in the very rows that the fact declares constant.

Demands join by ``or``. A demand for single positions (``pos == length - 1``) that meets a mask is *assumed* to lie inside
it; the assumption is recorded, becomes a bit of the prologue, and where it fails the padded graph runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.accesses.contractions import contracts_pairs, is_extremum
from gemopt.graph.attention import Site, score_slots
from gemopt.graph.facts import Analysis, ignored_targets
from gemopt.graph.mutation import has_side_effect
from gemopt.graph.prologue import writable
from gemopt.graph.slots import Access, argument, backward, is_tensor, op_name
from gemopt.graph.terms import Term


@dataclass(frozen=True)
class Subset:
    """``small`` implies ``big`` for every index of a tensor with these slot sizes; checked by the prologue."""

    small: Term
    big: Term
    sizes: tuple[sympy.Expr, ...]
    reason: str

    def __str__(self) -> str:
        return f"{t.render(self.small)} only where {t.render(self.big)} ({self.reason})"


class Live:
    """Demands of every tensor node, given the attention sites of the graph and what its outputs ask for."""

    def __init__(
        self,
        graph: fx.Graph,
        known: Analysis,
        sites: Iterable[Site],
        outputs: dict[fx.Node, Term] | None = None,
        masks: Callable[[], Mapping[fx.Node, frozenset[Term]]] = dict,
    ) -> None:
        """``masks`` gives the masks that speak of a tensor's rows (graph/governing.py), should a gather ask for them."""
        self.known = known
        self._masks = masks
        self.sites = {site.out: site for site in sites}
        self.assumptions: list[Subset] = []
        self.readers: dict[fx.Node, list[tuple[fx.Node, Term]]] = defaultdict(list)
        self._demand: dict[fx.Node, Term] = {}
        for node in reversed(graph.nodes):
            self._visit(node, outputs or {})

    def demand(self, node: fx.Node) -> Term:
        return self._demand.get(node, t.FALSE)

    def need(self, node: fx.Node) -> Term:
        """The rows of ``node`` that have to be computed."""
        demand = self.demand(node)
        if node not in self.known.facts or self.known.value(node) is not None:
            return demand
        return _without(demand, self.known.facts[node].where)

    # ------------------------------------------------------------ the walk

    def _visit(self, node: fx.Node, outputs: dict[fx.Node, Term]) -> None:
        if node.op == "output":
            for x in node.all_input_nodes:
                self._ask(x, outputs.get(x, t.TRUE), node)
        elif is_tensor(node) and self.known.info(node).kind == "like":
            return
        elif not is_tensor(node):
            # Mode switches, sizes and multi-result ops: whatever tensor they read is live as a whole. Sizes read none.
            if not op_name(node).startswith("aten.sym_") and not (node.users and all(map(is_extremum, node.users))):
                for x in node.all_input_nodes:
                    self._ask(x, t.TRUE, node)
        elif node in self.sites:
            self._attention(self.sites[node], self.need(node))
        else:
            need = self.need(node)
            if has_side_effect(node):
                need = t.TRUE
            for access in self.known.operands(node):
                self._ask(access.operand, self._contribution(node, access, need), node)

    def _contribution(self, node: fx.Node, access: Access, need: Term) -> Term:
        name, sizes = op_name(node), self.known.info(node).sizes
        if need == t.FALSE:
            return t.FALSE
        if name == "aten.where" and len(node.args) == 3 and access.operand is not node.args[0]:
            condition = self.known.values.operand(node, 0)
            if condition is not None and node.args[1] is not node.args[2]:
                chosen = t.truth(condition) if access.operand is node.args[1] else t.not_(t.truth(condition))
                need = t.and_(need, chosen)
        if self.known.info(node).kind == "boolean_index" and access is self.known.operands(node)[0]:
            mask = self.known.value(self.known.operands(node)[1].operand)
            return t.TRUE if mask is None else t.truth(mask)  # the mask's slots are the first of x
        if self.known.info(node).kind == "loss" and argument(node, "reduction") != 0:
            rows = self.loss_rows(node, access)
            if rows is not None:
                return rows
        rows = backward(need, access, sizes, self.known.info(access.operand).sizes)
        if self.known.info(node).kind == "gather" and rows == t.TRUE and access is self.known.operands(node)[0]:
            return self._gathered(node, access)
        if self.known.info(node).kind == "contraction" and contracts_pairs(node):
            rows = t.and_(rows, t.not_(self._multiplied_by_zero(node, access)))
        return rows

    def _gathered(self, node: fx.Node, access: Access) -> Term:
        """Rows at positions that are data: assumed to lie inside the one mask that speaks of the tensor, if there is one."""
        masks = self._masks().get(access.operand, frozenset())
        if len(masks) != 1:
            return t.TRUE
        (mask,) = masks
        if any(access.exprs[s] is None for s in mask.slots):
            return t.TRUE
        there = t.substitute(mask, {s: access.exprs[s] for s in mask.slots})  # type: ignore[misc]
        if there == t.FALSE or not writable(there):
            return t.TRUE
        reason = f"rows gathered from {access.operand.name}"
        self.assumptions.append(Subset(t.TRUE, there, self.known.info(node).sizes, reason))
        return mask

    def _multiplied_by_zero(self, node: fx.Node, access: Access) -> Term:
        """Over the operand's slots: the elements that a product of two multiplies with zeros alone (pooling by a mask)."""
        others = [a for a in self.known.operands(node) if a is not access]
        contracted = [i for i, e in enumerate(access.exprs) if e is None]
        if len(others) != 1 or len(contracted) != 1:
            return t.FALSE
        (other,) = others
        fact = self.known.facts.get(other.operand)
        value = self.known.value(other.operand)
        zero = fact.where if fact is not None and fact.value == 0 else t.FALSE if value is None else t.not_(t.truth(value))
        own = {e.args[0]: i for i, e in enumerate(access.exprs) if e is not None and e.op == "slot"}
        renamed: dict[int, Term] = {}
        for i, e in enumerate(other.exprs):
            if e is None:
                renamed[i] = t.slot(contracted[0])
            elif e.op == "slot" and e.args[0] in own:
                renamed[i] = t.slot(own[e.args[0]])
        if sum(e is None for e in other.exprs) != 1 or not zero.slots <= set(renamed):
            return t.FALSE
        return t.substitute(zero, renamed)

    def loss_rows(self, node: fx.Node, access: Access) -> Term | None:
        """Over the operand's slots: the rows of a reduced token loss that are not ignored."""
        x, target = node.args[0], node.args[1]
        assert isinstance(x, fx.Node) and isinstance(target, fx.Node)
        ignored = ignored_targets(node, self.known)
        labels, logits = self.known.info(target), self.known.info(x)
        if ignored is None or access.operand not in (x, target) or x is target:
            return None
        if access.operand is target:
            return t.not_(ignored)
        rows = [logits.dim_slots()[0], *logits.dim_slots()[2:]]
        renamed: dict[int, Term] = {}
        for own, other in zip(labels.dim_slots(), rows, strict=True):
            if len(own) != len(other):
                return None
            renamed.update({a: t.slot(b) for a, b in zip(own, other, strict=True)})
        return t.not_(t.substitute(ignored, renamed))

    def _attention(self, site: Site, need: Term) -> None:
        if need == t.FALSE:
            return
        wanted = self.wanted(site, need)
        if not self._sees_all_keys(site) and self.sees_a_key(site) and site.query is not None:
            itself = self._seen_by_itself(site)
            if not t.implies(wanted, itself):
                self.assumptions.append(Subset(wanted, itself, site.sizes, "queries that are read see a key"))
        self._ask(site.q, _renamed(wanted, site.q_exprs), site.out)
        keys = self.visible_keys(site, wanted)
        self._ask(site.k, _renamed(keys, site.k_exprs), site.out)
        self._ask(site.v, _renamed(keys, site.v_exprs), site.out)
        for bias in site.biases:
            self._ask(bias.node, _renamed(t.and_(wanted, keys), bias.exprs), site.out)
        for factor in (*site.factors, *site.q_factors):
            self._ask(factor.node, _renamed(wanted, factor.exprs), site.out)

    def wanted(self, site: Site, need: Term | None = None) -> Term:
        """Over score slots: the queries whose result is needed."""
        need = self.need(site.out) if need is None else need
        over_scores = {j: t.slot(s) for j, s in enumerate(site.out_slots) if s is not None}
        return t.substitute(t.project(need, frozenset(over_scores)), over_scores)

    def sees_a_key(self, site: Site) -> bool:
        """Whether every query that is read sees a key, unless its sequence is empty: all keys of the sequence, or itself.

        The weights of a query without keys are not zero on hidden keys (they are uniform under a finite fill), so a site
        for which this does not hold says nothing about what is live.
        """
        parts, wanted = site.parts, self.wanted(site)
        if self._sees_all_keys(site):
            return True
        if site.query is None:
            return parts.rest == t.TRUE
        itself = self._seen_by_itself(site)
        return t.implies(wanted, itself) or (
            wanted != t.TRUE and writable(wanted) and writable(itself) and not self.never_itself(site)
        )

    def never_itself(self, site: Site) -> bool:
        """Whether the mask hides its own position from every query that is read (only earlier keys, say)."""
        return site.query is not None and t.and_(self.wanted(site), self._seen_by_itself(site)) == t.FALSE

    def _sees_all_keys(self, site: Site) -> bool:
        """All keys of the sequence, or a score function for which seeing none is nothing special."""
        parts = site.parts
        return site.score != "softmax" or (
            parts.band.unbounded and parts.block is None and parts.rest == t.TRUE and parts.query == t.TRUE
        )

    def _seen_by_itself(self, site: Site) -> Term:
        """Over score slots: the queries that see the key at their own position, if there is one."""
        parts, query, key = site.parts, site.query, site.key
        if query is None:
            return t.FALSE
        seen = t.substitute(t.and_(parts.key, parts.query, parts.rest), {key: t.slot(query)})
        if site.sizes[query] == site.sizes[key]:
            return seen
        return t.and_(seen, t.le(t.slot(query), t.size(site.sizes[key] - 1)))

    def visible_keys(self, site: Site, wanted: Term) -> Term:
        """Over score slots: the keys that a wanted query may see."""
        parts = site.parts
        if parts.key != t.TRUE:
            return parts.key
        return _up_to(wanted, site.query, site.key) if parts.band.causal and site.query is not None else t.TRUE

    def _ask(self, node: fx.Node, rows: Term, reader: fx.Node) -> None:
        if rows == t.FALSE or not is_tensor(node):
            return
        if not node.meta["val"].dtype.is_floating_point or self.known.value(node) is not None:
            rows = t.TRUE
        rows = without_ranges(rows)
        self.readers[node].append((reader, rows))
        self._demand[node] = self._join(node, self.demand(node), rows)

    def _join(self, node: fx.Node, a: Term, b: Term) -> Term:
        joined = without_ranges(t.or_(a, b))
        parts = t.disjuncts(joined)
        masks = [p for p in parts if not is_point(p)]
        points = [p for p in parts if is_point(p)]
        if not points or not masks or joined == t.TRUE:
            return joined
        mask = t.or_(*masks)
        outside = [p for p in points if self._beyond(p, mask)]
        for point in points:
            if point in outside:
                continue
            subset = Subset(point, mask, self.known.info(node).sizes, f"rows gathered from {node.name}")
            if subset not in self.assumptions:
                self.assumptions.append(subset)
        return t.or_(mask, *outside)

    def _beyond(self, point: Term, mask: Term) -> bool:
        """Whether a point lies outside the mask, or past the end of every tensor that the mask reads: a candidate that is
        kept before or behind the history."""
        if t.and_(point, mask) == t.FALSE:
            return True
        at = next((c for c in t.conjuncts(point) if c.op == "eq0" and _fixes_slot(c) and not c.leaves), None)
        if at is None or len(at.slots) != 1:
            return False
        (slot,) = at.slots
        parts, constant = t.as_linear(at.args[0])
        sign = -parts.pop(t.slot(slot))
        if any(x.op != "size" for x in parts):
            return False
        position = sign * (sum((x.args[0] * k for x, k in parts.items()), sympy.Integer(0)) + constant)
        if t.substitute(mask, {slot: t.size(position)}) == t.FALSE:
            return True
        ends = [end for leaf, axis in t.reads_at(mask, slot) for end in self.known.values.extents(leaf)[axis : axis + 1]]
        return bool(ends) and all((position - end).is_nonnegative for end in ends)


def without_ranges(p: Term) -> Term:
    """``p`` without bounds by numbers on an axis of which it says nothing else, where it speaks of other axes too.

    q, k and v are slices of one projection, and nothing is gained by telling their features apart.
    """
    told = frozenset().union(*(c.slots for part in t.disjuncts(p) for c in t.conjuncts(part) if not _is_range(c)))
    if not told:
        return p
    parts = [[c for c in t.conjuncts(part) if not _is_range(c) or c.slots & told] for part in t.disjuncts(p)]
    return t.or_(*(t.and_(*kept) for kept in parts))


def _is_range(p: Term) -> bool:
    """``slot <= number`` or ``number <= slot``."""
    return p.op == "le0" and all(x.op == "slot" for x in t.as_linear(p.args[0])[0]) and len(p.slots) == 1


def is_point(p: Term) -> bool:
    """A predicate that fixes one slot to a value: ``pos == length - 1``."""
    return any(c.op == "eq0" and _fixes_slot(c) for c in t.conjuncts(p))


def _fixes_slot(p: Term) -> bool:
    parts, _ = t.as_linear(p.args[0])
    return any(x.op == "slot" and abs(k) == 1 for x, k in parts.items())


def _without(p: Term, where: Term) -> Term:
    return p if where == t.FALSE else t.and_(p, t.not_(where))


def _renamed(p: Term, exprs: Sequence[Term | None]) -> Term:
    """A predicate over score slots as one over an operand's slots."""
    inverse = {s: t.slot(i) for s, i in score_slots(tuple(exprs)).items()}
    return t.substitute(t.project(p, frozenset(inverse)), inverse)


def _up_to(wanted: Term, query: int, key: int) -> Term:
    """Keys at or before some wanted query, where that is again a simple predicate; else True."""
    parts: list[Term] = []
    for part in t.conjuncts(wanted):
        if query not in part.slots:
            parts.append(part)
            continue
        if part.op not in ("le0", "eq0"):
            return t.TRUE
        coefficients, _ = t.as_linear(part.args[0])
        k = coefficients.get(t.slot(query), 0)
        if abs(k) != 1 or (part.op == "le0" and k != 1) or any(query in x.slots for x in coefficients if x != t.slot(query)):
            return t.TRUE
        expression = t.scale(part.args[0], k)  # query - e
        bound = t.substitute(expression, {query: t.slot(key)})
        parts.append(t.le(bound, t.const(0)))
    return t.and_(*parts)
