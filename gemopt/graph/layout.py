"""Layout: which tensors are stored packed, as a minimum cut.

A node is *packable* on a row set if its needed rows are one, its op has a packed form, and it reads every row axis of its
operands locally. Packed, it does a fraction ``fill`` of its work; every edge between a packed and a padded node costs a
pack or an unpack. The cheapest assignment is an s-t minimum cut:

    source -> n   paid where n runs padded          work(n)
    n -> sink     paid where n runs packed          fill * work(n)
    n -> operand  packing the operand, where n is packed and it is not
    operand -> n  infinite: what can run packed behind a packed tensor does

so a lone pointwise op between padded neighbours stays padded, and a region with a matrix product in it does not. The last
rule is one of soundness: the dead rows of an unpacked tensor are filled with zeros, and ``1 / 0`` would turn them into
infinities that a later product with a mask does not remove. Readers that cannot run packed mix rows and meet only zeros.
Work is in byte equivalents per row (bytes moved plus FLOPs / 16, the balance of a CPU or GPU core to within a factor of
four, which is all the decision needs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import networkx as nx
import sympy
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.attention import Site, same_block, score_slots
from gemopt.graph.finite import overflowing
from gemopt.graph.live import Live, is_point
from gemopt.graph.prologue import writable
from gemopt.graph.rowsets import Rows, RowSet, RowSets
from gemopt.graph.slots import Access, Info, argument, is_tensor, op_name, shape_of
from gemopt.graph.terms import Term
from gemopt.graph.units import plain_slots

_FILL = 0.5
_FLOPS_PER_BYTE = 16.0
_UNKNOWN_SIZE = 64
# Kinds of readers that take a packed operand although their result has no row axes (graph/sinks.py).
_ABSORBING = frozenset(("reduction", "gather", "select", "loss", "boolean_index"))
_ROW_KINDS = frozenset(
    ["pointwise", "view", "expand", "linear", "contraction", "mixing", "embedding"]
    + ["select", "slice", "cat", "stack", "reduction", "loss"]
)


@dataclass(frozen=True)
class Side:
    """Queries or keys of an attention: a row set, and the score slot of each of its axes (None: a single token)."""

    set: RowSet
    axes: tuple[int | None, ...]


@dataclass(frozen=True)
class Sides:
    """Both sides, grouped into the same sequences, or into the same blocks of ``block`` positions of each. ``dense`` is what
    of the mask the row sets, the blocks and the band do not say."""

    queries: Side
    keys: Side
    dense: Term = t.TRUE
    block: int | None = None


class Layout:
    """Row sets of packable nodes, and the nodes that the cut decides to pack."""

    def __init__(self, live: Live, sites: Iterable[Site], choose: Callable[[Layout], set[fx.Node]] | None = None) -> None:
        self.live, self.known = live, live.known
        self.sets = RowSets(self.known.values.told)
        self.rows: dict[fx.Node, Rows] = {}
        self.sides: dict[fx.Node, Sides] = {}
        self.sites = {s.out: s for s in sites}
        self.refused: dict[fx.Node, str] = {}
        for site in self.sites.values():
            self._site(site)
        for node, info in self.known.infos.items():
            if node not in self.rows and node not in self.sites:
                rows = self._rows(node, info)
                if rows is not None:
                    self.rows[node] = rows
        choose = choose or Layout.cut
        self.packed: set[fx.Node] = self.closed(choose(self))
        while overflow := overflowing(self):
            for node in overflow:
                del self.rows[node]
                if self.sides.pop(node, None) is not None:
                    self.refused[node] = "an op behind it may overflow in rows that nobody needs"
            self.packed = self.closed(choose(self))

    # ------------------------------------------------------------ candidates

    def _rows(self, node: fx.Node, info: Info) -> Rows | None:
        if info.kind not in _ROW_KINDS or not info.accesses:
            return None
        need = self.live.need(node)
        if need in (t.TRUE, t.FALSE) or not writable(need) or not (need.leaves or is_point(need)):
            return None  # a shape alone (a triangle, a slice) leaves nothing to gain
        fact = self.known.facts.get(node)
        if fact is not None and math.isinf(fact.value) and not t.implies(t.not_(need), fact.where):
            return None  # unpacked, its dead rows would be infinite where eager's are not, and inf - inf is NaN
        rows = self.sets.of(need, info.sizes, also=sequences_of(need, info.sizes))
        if rows is None or not all(local(a, rows.slots) for a in info.accesses):
            return None
        if info.kind == "pointwise" and any(None in a.exprs for a in info.accesses):
            return None  # [B * L] in one piece beside [B, L] merged: every row reads one position, but no term says which
        if not any(reads_all(a, rows.slots) for a in info.accesses):
            # Nothing it reads has rows: an expanded table. Packing it would only copy.
            return None if info.kind != "pointwise" else rows
        return rows if _packed_form(node, info, rows) else None

    def _site(self, site: Site) -> None:
        """Queries and keys of an attention: each side packed on a row set, or whole."""
        need = self.live.need(site.out)
        if need == t.FALSE:
            self.refused[site.out] = "nothing reads the result"
            return
        wanted, parts = self.live.wanted(site), site.parts
        visible = self.live.visible_keys(site, wanted)
        # Softmax: `Live` has made it an assumption that wanted queries are not masked, where that is not certain.
        hidden = t.TRUE if t.implies(wanted, parts.query) or site.score == "softmax" else parts.query
        rows, keys = self._query_rows(site, need), self._key_side(site, visible)
        if rows is not None and keys is not None and self._query_side(site, rows).axes[:-1] != keys.axes[:-1]:
            keys = None
        # Self attention all of whose rows are observed: the padding cannot go, and packing the keys alone gains little.
        observed = rows is None and need == t.TRUE and site.query is not None
        if observed and site.sizes[site.query] == site.sizes[site.key]:  # type: ignore[index]
            keys = None
        if rows is None and keys is None:
            self.refused[site.out] = self._why_whole(site, need, visible)
            return
        dense = t.and_(parts.rest, hidden, parts.key if keys is None else t.TRUE)
        block = parts.block
        if block is not None and (rows is None or keys is None or dense != t.TRUE or not _one_grid(site)):
            assert site.query is not None
            dense, block = t.and_(dense, same_block(site.query, site.key, block)), None
        if not writable(dense):
            self.refused[site.out] = f"the mask has a part that cannot be computed beforehand: {t.render(dense)}"
            return
        queries = self._query_side(site, rows) if rows is not None else None
        sequences = (queries or keys).axes[:-1]  # type: ignore[union-attr]
        heads = site.batch - set(sequences)
        if site.by_head and not (site.by_head.slot in heads and all(site.sizes[h].is_Integer for h in heads)):
            self.refused[site.out] = "activations differ by head, and so do the live rows"
            return
        self.sides[site.out] = Sides(
            queries or self._whole(site, sequences, site.query), keys or self._whole(site, sequences, site.key), dense, block
        )
        if rows is not None:
            self.rows[site.out] = rows

    def _query_rows(self, site: Site, need: Term) -> Rows | None:
        """The rows of the result, where they are a set of (sequence, query) pairs."""
        if site.query is None or need == t.TRUE or not writable(need):
            return None
        sizes = self.known.info(site.out).sizes
        rows = self.sets.of(need, sizes, site.out_slots.index(site.query), sequences_of(need, sizes))
        return rows if rows is not None and all(site.out_slots[s] is not None for s in rows.slots) else None

    def _query_side(self, site: Site, rows: Rows) -> Side:
        return Side(rows.set, tuple(site.out_slots[s] for s in rows.slots))

    def _key_side(self, site: Site, visible: Term) -> Side | None:
        """The rows of keys and values, where they are a set of (sequence, key) pairs."""
        slots = score_slots(site.k_exprs)
        if visible == t.TRUE or not writable(visible) or not visible.slots <= set(slots):
            return None
        over_k = t.substitute(visible, {s: t.slot(i) for s, i in slots.items()})
        rows = self.sets.of(over_k, self.known.info(site.k).sizes, slots[site.key])
        if rows is None:
            return None
        score_of = {i: s for s, i in slots.items()}
        axes = tuple(score_of[i] for i in rows.slots)
        return Side(rows.set, axes) if set(axes) <= set(score_slots(site.v_exprs)) else None

    def _whole(self, site: Site, sequences: tuple[int | None, ...], token: int | None) -> Side:
        sizes = [site.sizes[s] for s in sequences if s is not None]
        sizes.append(sympy.Integer(1) if token is None else site.sizes[token])
        return Side(self.sets.full(sizes), (*sequences, token))

    def _why_whole(self, site: Site, need: Term, visible: Term) -> str:
        if need == t.TRUE:
            return f"every row of the queries{' and keys' if visible == t.TRUE else ''} is live"
        return f"the live rows are not a set of (sequence, position) pairs: {t.render(need)}, keys {t.render(visible)}"

    def attended(self, out: fx.Node) -> bool:
        """Whether an attention runs on packed rows."""
        site = self.sites.get(out)
        if site is None or out not in self.sides:
            return False
        return out in self.packed or (out not in self.rows and not self.packed.isdisjoint((site.k, site.v)))

    # ------------------------------------------------------------ the cut

    def closed(self, chosen: set[fx.Node]) -> set[fx.Node]:
        """The packable ones among these nodes, with every packable node that reads a packed one."""
        packed = chosen & self.rows.keys()
        for node in self.known.infos:  # in graph order
            if node in self.rows and any(operand in packed for operand in self.operands(node)):
                packed.add(node)
        return packed

    def cut(self) -> set[fx.Node]:
        """The cheapest set of nodes to pack. Any other closed subset of `rows` is right too, only slower."""
        inside = {n for out in self.sides for n in self.sites[out].interior}  # gone once the attention is rewritten
        network = nx.DiGraph()
        network.add_node("packed")
        network.add_node("padded")
        for node in self.rows:
            work = self.work(node)
            network.add_edge("packed", node, capacity=work)
            network.add_edge(node, "padded", capacity=_FILL * work)
        for node in self.rows:
            for operand in set(self.operands(node)):
                cost = self._bytes(operand, self._row_slots(node, operand))
                if operand in self.rows:
                    network.add_edge(operand, node)
                    network.add_edge(node, operand, capacity=_FILL * cost)
                elif _has_rows(self.known.info(node), operand, self.rows[node]):
                    network.add_edge(node, "padded", capacity=network[node]["padded"]["capacity"] + _FILL * cost)
            if any(u not in self.rows and not self._absorbs(node, u) for u in node.users if u not in inside):
                extra = self._bytes(node, self.rows[node].slots)
                network[node]["padded"]["capacity"] += extra
        if not self.rows:
            return set()
        _, (packed, _) = nx.minimum_cut(network, "packed", "padded")
        return {n for n in packed if isinstance(n, fx.Node)}

    def _absorbs(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether a padded reader takes the packed tensor as it is (a sum over tokens, a gather, a loss, an attention)."""
        if user in self.sides:
            return True
        return user.op == "call_function" and user in self.known.infos and self.known.info(user).kind in _ABSORBING

    def operands(self, node: fx.Node) -> list[fx.Node]:
        site = self.sites.get(node)
        if site:
            return [site.q, site.k, site.v, *(j.node for j in site.joined if is_tensor(j.node))]
        return [a.operand for a in self.known.operands(node)]

    def work(self, node: fx.Node) -> float:
        """Byte equivalents per row."""
        info = self.known.info(node)
        rows = self.rows[node]
        moved = self._bytes(node, rows.slots) + sum(self._bytes(o, self._row_slots(node, o)) for o in self.operands(node))
        if info.kind in ("view", "expand"):
            moved = 0.01
        flops = 0.0
        if info.kind in ("linear", "contraction"):
            first = info.accesses[0]
            contracted = [n for e, n in zip(first.exprs, self.known.info(first.operand).sizes, strict=True) if e is None]
            flops = 2.0 * math.prod(map(_number, contracted)) * _row_elements(info, rows.slots)
        if node in self.sites:
            flops = 4.0 * _UNKNOWN_SIZE * _row_elements(info, rows.slots)
        return moved + flops / _FLOPS_PER_BYTE

    def _bytes(self, node: fx.Node, row_slots: Collection[int]) -> float:
        """Of one row of a tensor, whose slots ``row_slots`` the row number stands for."""
        return _row_elements(self.known.info(node), row_slots) * node.meta["val"].element_size()

    def _row_slots(self, node: fx.Node, operand: fx.Node) -> set[int]:
        """The slots of an operand that are row axes of ``node``."""
        site = self.sites.get(node)
        if site is None:
            access = self.known.info(node).access(operand)
            plain = {} if access is None else plain_slots(access)
            return {plain[s] for s in self.rows[node].slots if s in plain}
        side = self.sides[node].keys if operand in (site.k, site.v) else self.sides[node].queries
        for x, exprs in ((site.k, site.k_exprs), (site.v, site.v_exprs), (site.q, site.q_exprs)):
            if operand is x:
                own = score_slots(exprs)
                return {own[a] for a in side.axes if a in own}
        return set()


def _one_grid(site: Site) -> bool:
    """Whether blocks can be sequences of their own: queries and keys have as many, and no bias is told by position."""
    return site.query is not None and site.sizes[site.query] == site.sizes[site.key] and not site.biases


def sequences_of(need: Term, sizes: tuple[sympy.Expr, ...]) -> set[int]:
    """The other axis of unknown size, where a need speaks of positions alone (``x[:, -1]``) and there is one."""
    others = {s for s, n in enumerate(sizes) if s not in need.slots and not n.is_Integer}
    return others if len(need.slots) == 1 and len(others) == 1 else set()


def _number(size: sympy.Expr) -> int:
    return int(size) if size.is_Integer else _UNKNOWN_SIZE


def _row_elements(info: Info, row_slots: Collection[int]) -> float:
    """Elements per row, as far as they are known."""
    return math.prod(_number(n) for s, n in enumerate(info.sizes) if s not in row_slots)


def _has_rows(info: Info, operand: fx.Node, rows: Rows) -> bool:
    access = info.access(operand)
    return access is not None and reads_all(access, rows.slots)


def reads_all(access: Access, slots: tuple[int, ...]) -> bool:
    return set(slots) <= set(plain_slots(access))


def local(access: Access, slots: tuple[int, ...]) -> bool:
    """Every mention of a row axis in the access is plain, and rows come complete, one axis at a time, or not at all."""
    mentioned = {s for e in access.exprs if e is not None and e.op != "slot" for s in e.slots}
    if mentioned & set(slots):
        return False
    found = set(plain_slots(access)) & set(slots)
    return len(found) in (0, 1, len(slots))


def _times_weights(node: fx.Node, info: Info) -> bool:
    """``x @ W`` with one matrix for all rows, in any spelling that can be written with one leading dim."""
    name = op_name(node)
    if name == "aten.einsum":
        return True
    if name not in ("aten.matmul", "aten.mm", "aten.addmm"):
        return False
    position = 2 if name == "aten.addmm" else 1
    weight = node.args[position]
    return isinstance(weight, fx.Node) and len(shape_of(weight)) <= 2


# Their derivatives ask whether the packed size is 0, which nobody knows at compile time.
_ASKING = frozenset(("aten.prod", "aten.cumprod", "aten.cumsum", "aten.logcumsumexp"))


def _packed_form(node: fx.Node, info: Info, rows: Rows) -> bool:
    """Whether the emitter can run this op with the row axes replaced by one leading dim."""
    name = op_name(node)
    row_slots = set(rows.slots)
    first = info.accesses[0] if info.kind != "embedding" else info.accesses[1]
    if name in _ASKING or (info.kind == "contraction" and not _times_weights(node, info)):
        return False
    if info.kind in ("view", "expand", "linear", "contraction", "mixing", "embedding", "select", "slice", "reduction"):
        if info.kind != "expand" and not reads_all(first, rows.slots):
            return False
        others = [a for a in info.accesses if a is not first]
        if any(set(plain_slots(a)) & row_slots for a in others):
            return False
    if info.kind == "loss":  # `sinks.token_loss` takes one class slot only
        return set(rows.slots) == set(range(len(info.sizes))) and len(info.accesses[0].exprs) == len(info.sizes) + 1
    if info.kind in ("slice", "cat"):
        shape = info.dim_slots()
        if row_slots & set(shape[argument(node, "dim") % len(shape)]):
            return False  # it cuts or lengthens the rows themselves
    if info.kind in ("cat", "stack"):
        return all(set(plain_slots(a)) & row_slots for a in info.accesses)
    return name != "aten.unflatten" or bool(info.dims)
