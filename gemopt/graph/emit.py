"""Writing the packed graph.

A packed tensor is stored as ``[T, *rest]``: one leading dim for the rows of its row set, then the dims of the original in
their order with the row axes taken out (a dim that was nothing but row axes vanishes; ``[B, H, L, d]`` is ``[T, H, d]``,
``[B*H, L, d]`` too). Every op is written again in its original place, so autocast, grad-mode and checkpoint regions stay
what they were; what it reads is fetched in the layout it needs:

    all row axes     the packed tensor, repacked if it is stored on another set, or packed now if it is stored padded
    one row axis     per-sample or positional terms, gathered by the row's coordinate
    none             as it is

Readers that do not run packed get an `unpack` whose fill is the tensor's fact (0 if the other rows are dead).
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils.checkpoint import CheckpointPolicy

from gemopt import ops
from gemopt.graph import terms as t
from gemopt.graph.attend import attend
from gemopt.graph.extras import Extras
from gemopt.graph.layout import Layout, reads_all
from gemopt.graph.mutation import has_side_effect
from gemopt.graph.prologue import Sizes, copy_inputs
from gemopt.graph.rowsets import Rows, RowSet
from gemopt.graph.sinks import absorb, token_loss
from gemopt.graph.slots import Access, Info, argument, expr_of, is_tensor, op_name, shape_of
from gemopt.graph.terms import Term
from gemopt.graph.units import Unit, all_units, kept_dims, kept_units, plain_slots
from gemopt.ops.embedding import embedding

aten = torch.ops.aten

# On a CPU these cost more than reading what they gave, so a backward that needs it should not compute it again: fused with
# what leads to them (powers, logarithms), angles of a rotary encoding took ten milliseconds where the forward took two.
_SAVED_ON_CPU = (aten.cos.default, aten.sin.default)
_CARRIED_META = ("stack_trace", "nn_module_stack", "recompute", "ac_graph_id", "custom", "seq_nr", "source_fn_stack")


class Emitter:
    """Builds the packed graph of a captured graph under a layout; ``spare``: row sets have capacities (graph/spare.py)."""

    def __init__(self, gm: fx.GraphModule, layout: Layout, regions: dict[fx.Node, Any], spare: bool = False) -> None:
        self.gm, self.layout, self.known, self.live = gm, layout, layout.known, layout.live
        self.graph, env = copy_inputs(gm.graph)
        self.sizes = Sizes(self.graph, list(env.values()))
        self.spare = spare
        self.extras = Extras(self.graph, list(env.values())[-1], spare)
        self.regions = regions
        self.env: dict[fx.Node, fx.Node] = env  # padded form
        self.phys: dict[fx.Node, fx.Node] = {}  # packed form
        self._converted: dict[Any, fx.Node] = {}
        self.absorbed: set[fx.Node] = set()  # padded results of packed operands, and views of them: strides may be others
        self.masks: list[Term] = []  # predicates that the packed graph computes
        self._at: fx.Node | None = None

    # ------------------------------------------------------------ driver

    def run(self) -> fx.GraphModule:
        for node in self.gm.graph.nodes:
            self._at = node
            if node.op == "placeholder":
                continue
            if node.op == "output":
                self._output(node)
            elif node in self.layout.packed:
                self.phys[node] = self._packed(node)
            elif self.layout.attended(node):
                self.env[node] = attend(self, self.layout.sites[node])
                self.absorbed.add(node)
            else:
                absorbed = absorb(self, node)
                self.env[node] = absorbed if absorbed is not None else self._copy(node)
                if absorbed is not None or self._views_made_here(node):
                    self.absorbed.add(node)
        placeholders_first(self.graph)
        self.graph.eliminate_dead_code(_must_stay)
        self.graph.lint()
        return fx.GraphModule(self.gm, self.graph, "Packed")

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        assert self._at is not None
        node.meta.update({k: self._at.meta[k] for k in _CARRIED_META if k in self._at.meta})
        if target in _SAVED_ON_CPU and "recompute" not in node.meta and self._at.meta["val"].device.type == "cpu":
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return node

    def _views_made_here(self, node: fx.Node) -> bool:
        if not is_tensor(node) or self.known.info(node).kind not in ("view", "expand", "select", "slice"):
            return False
        return any(a.operand in self.absorbed or a.operand in self.phys for a in self.known.operands(node))

    def _copy(self, node: fx.Node) -> fx.Node:
        if is_tensor(node) and self.known.info(node).kind == "like" and not free_unbacked_symbols(node.meta["val"]):
            return self._filled(node, [self.sizes[e] for e in shape_of(node)])
        fx.node.map_arg((node.args, node.kwargs), self.padded)
        copied = self.graph.node_copy(node, self.padded)
        if copied.target is aten.view.default:  # an unpacked operand may have other strides than the original
            copied.target = aten.reshape.default
        return copied

    def _output(self, node: fx.Node) -> None:
        args = fx.node.map_arg(node.args, self._as_original)
        self.graph.output(args[0])

    def _as_original(self, node: fx.Node) -> fx.Node:
        """An output with the strides eager gives it."""
        made_here = node in self.phys or node in self.absorbed
        result = self.padded(node)
        if made_here and is_tensor(node) and not is_dense(node.meta["val"]):
            return self._strided(node, result)
        if made_here and is_tensor(node) and not node.meta["val"].is_contiguous():
            value = node.meta["val"]
            order = stride_order(value)
            inverse = [order.index(d) for d in range(value.ndim)]
            result = self.call(aten.permute.default, result, order)
            result = self.call(aten.clone.default, result, memory_format=torch.contiguous_format)
            return self.call(aten.permute.default, result, inverse)
        if made_here:
            return self.call(aten.contiguous.default, result)
        return result

    def _strided(self, node: fx.Node, result: fx.Node) -> fx.Node:
        """A view with gaps (``x[:, 0]``) or expanded dims in eager: the same strides over a storage of its own."""
        value = node.meta["val"]
        expanded = [d for d, k in enumerate(value.stride()) if expr_of(k) == 0]
        for d in expanded:
            result = self.call(aten.slice.Tensor, result, d, 0, 1)
        shape = [1 if d in expanded else n for d, n in enumerate(value.shape)]
        size = [self.sizes[expr_of(n)] for n in shape]
        stride = [self.sizes[expr_of(n)] for n in value.stride()]
        span = 1 + sum((expr_of(n) - 1) * expr_of(k) for n, k in zip(shape, value.stride(), strict=True))
        base = self.call(aten.new_zeros.default, result, [self.sizes[sympy.expand(span)]])
        filled = self.call(aten.as_strided_scatter.default, base, result, size, stride)
        viewed = self.call(aten.as_strided.default, filled, size, stride)
        full = [-1 if d not in expanded else self.sizes[expr_of(n)] for d, n in enumerate(value.shape)]
        return self.call(aten.expand.default, viewed, full) if expanded else viewed

    # ------------------------------------------------------------ fetching

    def _key(self, *parts: Any) -> Any:
        """Conversions are shared within one grad-mode, autocast and checkpoint region only."""
        assert self._at is not None
        return (*parts, self.regions.get(self._at), self._at.meta.get("ac_graph_id"))

    def _cached(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        if any(isinstance(x, fx.Node) and x in self.known.tainted for x in key):
            return make()  # its value depends on when it is read
        if key not in self._converted:
            self._converted[key] = make()
        return self._converted[key]

    def padded(self, node: fx.Node) -> fx.Node:
        if node in self.phys:
            return self._cached(self._key("padded", node), lambda: self._unpack(node))
        return self.env[node]

    def rows_of(self, x: fx.Node, slots: tuple[int, ...], s: RowSet) -> fx.Node:
        """``[T_s, *rest]`` of a tensor whose slots ``slots`` are the row axes of ``s``."""
        return self._cached(self._key("rows", x, slots, s), lambda: self._rows_of(x, slots, s))

    def _rows_of(self, x: fx.Node, slots: tuple[int, ...], s: RowSet) -> fx.Node:
        own = self.layout.rows.get(x)
        if x in self.phys and own is not None and own.slots == slots:
            if own.set is s:
                return self.phys[x]
            if t.implies(s.predicate, own.set.predicate):
                return self.call(ops.pack, self.phys[x], self.extras.repack(own.set, s))
            if t.implies(own.set.predicate, s.predicate):  # a branch of `where`: the rest is under a fact, or not read
                count = self.call(aten.sym_size.int, self.extras.index(s), 0)
                return self.call(ops.unpack, self.phys[x], self.extras.repack(s, own.set), count, self._fill_of(x))
        info = self.known.info(x)
        units = kept_units(info, slots)
        front = self.arrange(self.padded(x), all_units(info), [*slots, *units], info)
        flat = self.reshape(front, [-1, *self._kept_sizes(info, slots)])
        return self.call(ops.pack, flat, self.extras.index(s))

    def axis_of(self, x: fx.Node, slot: int, axis: int, s: RowSet) -> fx.Node:
        """``[T_s, *rest]`` of a tensor that has one of the row axes: gathered by coordinate."""

        def make() -> fx.Node:
            info = self.known.info(x)
            front = self.arrange(self.padded(x), all_units(info), [slot, *kept_units(info, [slot])], info)
            front = self.reshape(front, [self.sizes[info.sizes[slot]], *self._kept_sizes(info, [slot])])
            return self.call(aten.index_select.default, front, 0, self.extras.axis(s, axis))

        return self._cached(self._key("axis", x, slot, axis, s), make)

    def fetch(self, access: Access, rows: Rows) -> tuple[fx.Node, list[int], bool]:
        """An operand in the layout of ``rows``: the tensor, the operand's dims it still has, whether it has rows."""
        x, plain = access.operand, plain_slots(access)
        slots = [plain.get(s) for s in rows.slots]
        info = self.known.info(x)
        present = [i for i, s in enumerate(slots) if s is not None]
        if len(present) == len(slots):
            own = tuple(s for s in slots if s is not None)
            return self.rows_of(x, own, rows.set), kept_dims(info, own), True
        if present:
            slot = slots[present[0]]
            assert slot is not None
            return self.axis_of(x, slot, present[0], rows.set), kept_dims(info, [slot]), True
        return self.padded(x), list(range(len(info.dims))), False

    def _filled(self, node: fx.Node, shape: list[Any]) -> fx.Node:
        """A constant tensor of ``node``'s dtype (zeros_like, ones_like, full_like) in another shape."""
        value = node.meta["val"]
        number = {"aten.zeros_like": 0, "aten.ones_like": 1}.get(op_name(node), argument(node, "fill_value"))
        number = self.env[number] if isinstance(number, fx.Node) else number
        return self.call(aten.full.default, shape, number, dtype=value.dtype, device=value.device)

    def aligned(self, access: Access, node: fx.Node, rows: Rows) -> fx.Node:
        """An operand of a broadcasting op, reshaped so that it lines up with the packed result."""
        operand = self.known.info(access.operand)
        if operand.kind == "like" and reads_all(access, rows.slots):
            count = self.call(aten.sym_size.int, self.extras.index(rows.set), 0)
            row_slots = tuple(plain_slots(access)[s] for s in rows.slots)
            return self._filled(access.operand, [count, *self._kept_sizes(operand, row_slots)])
        if access.operand.meta["val"].ndim == 0:
            return self.padded(access.operand)  # a number has no say in the dtype of the result; with a dim it would have
        tensor, kept, has_rows = self.fetch(access, rows)
        x_info, info = self.known.info(access.operand), self.known.info(node)
        shift = len(info.dims) - len(x_info.dims)
        wanted = kept_dims(info, rows.slots)
        if [d - shift for d in wanted] == kept:
            return tensor
        shape: list[Any] = []
        for d in wanted:
            own = d - shift
            shape.append(self._dim_size(x_info, own, rows, access) if own in kept else 1)
        if not has_rows:
            while shape and shape[0] == 1 and len(shape) > 1:
                shape = shape[1:]
            return self.reshape(tensor, shape or [1])  # a dim it had, it keeps: without one it has no say in the dtype
        return self.reshape(tensor, [-1, *shape])

    def _dim_size(self, info: Info, dim: int, rows: Rows, access: Access) -> fx.Node | int:
        gone = {i for s, i in plain_slots(access).items() if s in rows.slots}
        own = [info.sizes[s] for s in info.dim_slots()[dim] if s not in gone]
        return self.sizes[sympy.prod(own)]

    # ------------------------------------------------------------ shapes

    def _kept_sizes(self, info: Info, slots: Sequence[int]) -> list[fx.Node | int]:
        gone = set(slots)
        dim_slots = info.dim_slots()
        return [
            self.sizes[sympy.prod([info.sizes[s] for s in dim_slots[d] if s not in gone])] for d in kept_dims(info, slots)
        ]

    def reshape(self, tensor: fx.Node, shape: list[Any]) -> fx.Node:
        return self.call(aten.reshape.default, tensor, shape)

    def arrange(self, tensor: fx.Node, have: list[Unit], want: list[Unit], info: Info) -> fx.Node:
        """Split ``tensor`` into units (if any dim is merged) and order them as ``want``."""
        if len(have) != len(info.dims):
            tensor = self.reshape(tensor, [self._unit_size(u, info) for u in have])
        order = [have.index(u) for u in want]
        if order != list(range(len(order))):
            tensor = self.call(aten.permute.default, tensor, order)
        return tensor

    def _unit_size(self, unit: Unit, info: Info) -> fx.Node | int:
        return 1 if isinstance(unit, tuple) else self.sizes[info.sizes[unit]]

    def spread(self, tensor: fx.Node, have: list[Unit], node: fx.Node) -> fx.Node:
        """``tensor`` with one or more leading merged units, as ``node`` is shaped: units split, ordered, merged."""
        info = self.known.info(node)
        tensor = self.reshape(tensor, [self._unit_size(u, info) for u in have])
        want = [u for u in all_units(info) if u in have]
        order = [have.index(u) for u in want]
        if order != list(range(len(order))):
            tensor = self.call(aten.permute.default, tensor, order)
        if len(want) != len(info.dims) or any(len(d) > 1 for d in info.dims):
            tensor = self.reshape(tensor, [self.sizes[e] for e in shape_of(node)])
        return tensor

    def _unpack(self, node: fx.Node) -> fx.Node:
        rows, info = self.layout.rows[node], self.known.info(node)
        count = self.sizes[sympy.prod(rows.set.sizes)]
        flat = self.call(ops.unpack, self.phys[node], self.extras.index(rows.set), count, self._fill_of(node))
        return self.spread(flat, [*rows.slots, *kept_units(info, rows.slots)], node)

    def _fill_of(self, node: fx.Node) -> float:
        """What stands in the rows that are not packed: the fact's value; 0 where nothing reads them."""
        fact = self.known.facts.get(node)
        return fact.value if fact is not None else 0.0

    # ------------------------------------------------------------ packed forms

    def _packed(self, node: fx.Node) -> fx.Node:
        if node in self.layout.sites:
            return attend(self, self.layout.sites[node])
        info, rows = self.known.info(node), self.layout.rows[node]
        form: Callable[[fx.Node, Info, Rows], fx.Node] = getattr(self, f"_packed_{info.kind}")
        return form(node, info, rows)

    def _packed_pointwise(self, node: fx.Node, info: Info, rows: Rows) -> fx.Node:
        shown = self._shows_through(node, info, rows)
        if shown is not None:
            return self.aligned(shown, node, rows)
        if op_name(node) == "aten.dropout":
            return self._dropout(node, rows)
        if op_name(node) == "aten.log_sigmoid":  # its derivative asks whether the packed size is 0
            x = self.call(aten.neg.default, self.aligned(info.accesses[0], node, rows))
            result = self.call(aten.neg.default, self.call(aten.softplus.default, x, 1, _SOFTPLUS_THRESHOLD))
            return self.call(aten.to.dtype, result, node.meta["val"].dtype)
        accesses = iter(info.accesses)

        def operand(n: fx.Node) -> fx.Node:
            return self.aligned(next(accesses), node, rows) if is_tensor(n) else self.env[n]

        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), operand)
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
        return self.call(node.target, *args, **kwargs)

    def _dropout(self, node: fx.Node, rows: Rows) -> fx.Node:
        """Written out over ``rand`` of the packed shape: aten.dropout asks whether its input is empty and rand_like whether
        a size is 1, which a packed size cannot answer at compile time."""
        x = self.aligned(self.known.operands(node)[0], node, rows)
        p, training = node.args[1], node.args[2]
        if not training or p == 0:
            return x
        assert isinstance(p, float | int)
        if p == 1:
            return self.call(aten.mul.Tensor, x, 0.0)
        value = node.meta["val"]
        count = self.call(aten.sym_size.int, self.extras.index(rows.set), 0)
        shape = [count, *self._kept_sizes(self.known.info(node), rows.slots)]
        drawn = self.call(aten.rand.default, shape, dtype=torch.float32, device=value.device)
        kept = self.call(aten.ge.Scalar, drawn, p)
        scaled = self.call(aten.mul.Tensor, x, 1.0 / (1.0 - p))
        return self.call(aten.where.ScalarOther, kept, scaled, 0.0)

    def _shows_through(self, node: fx.Node, info: Info, rows: Rows) -> Access | None:
        """The operand a masking op returns unchanged on these rows (``x * mask`` where the mask holds)."""
        inside = t.substitute(rows.set.predicate, {i: t.slot(s) for i, s in enumerate(rows.slots)})
        name = op_name(node)
        kept: Access | None = None
        if name == "aten.masked_fill":
            mask = self.known.values.operand(node, 1)
            if mask is not None and not isinstance(node.args[2], fx.Node) and t.implies(inside, t.not_(t.truth(mask))):
                kept = info.accesses[0]
        if name == "aten.mul" and len(info.accesses) == 2:
            for i in (0, 1):
                value = self.known.values.through(info.accesses[1 - i])
                if value is not None and _zero_or_one(value) and t.implies(inside, t.truth(value)):
                    kept = info.accesses[i]
        if kept is None or kept.operand.meta["val"].dtype != node.meta["val"].dtype:
            return None
        return kept if len(plain_slots(kept)) == len(info.sizes) else None

    def _packed_view(self, node: fx.Node, info: Info, rows: Rows) -> fx.Node:
        access = info.accesses[0]
        tensor, kept, _ = self.fetch(access, rows)
        x_info = self.known.info(access.operand)
        if op_name(node) in _PERMUTES:
            order = _dim_order(x_info, info, access)
            target = [1 + kept.index(order[d]) for d in kept_dims(info, rows.slots)]
            if target == list(range(1, 1 + len(target))):
                return tensor
            return self.call(aten.permute.default, tensor, [0, *target])
        old = [x_info.dims[d] for d in kept]
        new = [info.dims[d] for d in kept_dims(info, rows.slots)]
        gone = set(rows.slots)
        if old == new and not any(set(info.dim_slots()[d]) & gone for d in kept_dims(info, rows.slots)):
            return tensor
        return self.reshape(tensor, [-1, *self._kept_sizes(info, rows.slots)])

    def _packed_expand(self, node: fx.Node, info: Info, rows: Rows) -> fx.Node:
        tensor = self.aligned(info.accesses[0], node, rows)
        sizes = self._kept_sizes(info, rows.slots)
        have = self.known.info(info.accesses[0].operand)
        shift = len(info.dims) - len(have.dims)
        grows = any(info.dims[d] and (d < shift or not have.dims[d - shift]) for d in kept_dims(info, rows.slots))
        return self.call(aten.expand.default, tensor, [-1, *sizes]) if grows else tensor

    def _packed_linear(self, node: fx.Node, info: Info, rows: Rows) -> fx.Node:
        x, _, _ = self.fetch(info.accesses[0], rows)
        rest = fx.node.map_arg(node.args[1:], self.padded)
        return self.call(node.target, x, *rest, **fx.node.map_arg(dict(node.kwargs), self.padded))

    def _packed_contraction(self, node: fx.Node, info: Info, rows: Rows) -> fx.Node:
        x, kept, _ = self.fetch(info.accesses[0], rows)
        if op_name(node) == "aten.einsum":
            return self._packed_einsum(node, info, rows, x, kept)
        if op_name(node) == "aten.addmm":
            added, weight = self.padded(node.args[0]), self.padded(node.args[2])  # type: ignore[arg-type]
            return self.call(node.target, added, x, weight, **node.kwargs)
        return self.call(aten.matmul.default, x, self.padded(node.args[1]))  # type: ignore[arg-type]

    def _packed_einsum(self, node: fx.Node, info: Info, rows: Rows, x: fx.Node, kept: list[int]) -> fx.Node:
        """The letters of the row axes give way to one letter in front."""
        words, output = str(node.args[0]).replace(" ", "").split("->")
        first, *others = words.split(",")
        lead = next(c for c in string.ascii_letters if c not in words + output)
        equation = ",".join([lead + "".join(first[d] for d in kept), *others])
        result = lead + "".join(output[d] for d in kept_dims(info, rows.slots))
        rest = [self.padded(a.operand) for a in info.accesses[1:]]
        return self.call(node.target, f"{equation}->{result}", [x, *rest])

    def _packed_mixing(self, node: fx.Node, info: Info, rows: Rows) -> fx.Node:
        x, kept, _ = self.fetch(info.accesses[0], rows)
        rest = list(fx.node.map_arg(node.args[1:], self.padded))
        kwargs = fx.node.map_arg(dict(node.kwargs), self.padded)
        if op_name(node) == "aten.flip":
            return self.call(node.target, x, [1 + kept.index(d % len(info.dims)) for d in argument(node, "dims")])
        if op_name(node) not in ("aten.layer_norm", "aten.rms_norm"):
            dim = argument(node, "dim") % len(info.dims)
            return self._with_dim(node, x, 1 + kept.index(dim))
        return self.call(node.target, x, *rest, **kwargs)

    def _with_dim(self, node: fx.Node, x: fx.Node, dim: Any, **changed: Any) -> fx.Node:
        """The same call on ``x`` with another ``dim`` argument."""
        assert isinstance(node.target, torch._ops.OpOverload)
        args, kwargs = [x], {}
        for i, a in enumerate(node.target._schema.arguments[1:], start=1):
            given = i < len(node.args) or a.name in node.kwargs
            value = dim if a.name == "dim" else changed.get(a.name, argument(node, a.name))
            if not given and a.name != "dim":
                continue
            value = fx.node.map_arg(value, self.padded)
            if a.kwarg_only or len(args) != i:
                kwargs[a.name] = value
            else:
                args.append(value)
        return self.call(node.target, *args, **kwargs)

    def _packed_reduction(self, node: fx.Node, info: Info, rows: Rows) -> fx.Node:
        x, kept, _ = self.fetch(info.accesses[0], rows)
        ndim = len(self.known.info(info.accesses[0].operand).dims)
        dim = argument(node, "dim")
        listed = [dim] if isinstance(dim, int) else list(dim or [])
        moved = [1 + kept.index(d % ndim) for d in listed]
        if op_name(node) == "aten.logsumexp":
            return self._logsumexp(x, moved, node)
        return self._with_dim(node, x, moved[0] if isinstance(dim, int) else moved)

    def _logsumexp(self, x: fx.Node, dims: list[int], node: fx.Node) -> fx.Node:
        """``aten.logsumexp`` written out, equal at infinities too: aten's derivative asks whether the packed size is 0."""
        call, keep, limit = self.call, bool(argument(node, "keepdim", False)), float("inf")
        top = call(aten.amax.default, call(aten.detach.default, x), dims, True)
        top = call(aten.masked_fill.Scalar, top, call(aten.eq.Scalar, call(aten.abs.default, top), limit), 0.0)
        total = call(aten.sum.dim_IntList, call(aten.exp.default, call(aten.sub.Tensor, x, top)), dims, True)
        empty = call(aten.eq.Scalar, total, 0)
        result = call(aten.add.Tensor, call(aten.log.default, call(aten.masked_fill.Scalar, total, empty, 1.0)), top)
        result = call(aten.masked_fill.Scalar, result, empty, -limit)
        result = result if keep else call(aten.squeeze.dims, result, dims)
        return call(aten.to.dtype, result, node.meta["val"].dtype)  # autocast computes some of these in fp32

    def _packed_embedding(self, node: fx.Node, info: Info, rows: Rows) -> fx.Node:
        ids, _, _ = self.fetch(info.accesses[1], rows)
        weight, *rest = fx.node.map_arg((node.args[0], *node.args[2:]), self.padded)
        if node.meta["val"].device.type == "cpu":
            return self.call(embedding, weight, ids, argument(node, "padding_idx", -1))
        return self.call(node.target, weight, ids, *rest, **node.kwargs)

    def _packed_select(self, node: fx.Node, info: Info, rows: Rows) -> fx.Node:
        x, kept, _ = self.fetch(info.accesses[0], rows)
        dim = int(argument(node, "dim")) % len(self.known.info(info.accesses[0].operand).dims)
        return self._with_dim(node, x, 1 + kept.index(dim))

    _packed_slice = _packed_select

    def _packed_cat(self, node: fx.Node, info: Info, rows: Rows) -> fx.Node:
        dim = argument(node, "dim") % len(info.dims)
        parts = [self.fetch(a, rows)[0] for a in info.accesses]  # cat does not broadcast: a part must have its rows
        return self.call(node.target, parts, 1 + kept_dims(info, rows.slots).index(dim))

    def _packed_stack(self, node: fx.Node, info: Info, rows: Rows) -> fx.Node:
        dim = argument(node, "dim") % len(info.dims)
        parts = [self.fetch(a, rows)[0] for a in info.accesses]
        return self.call(node.target, parts, 1 + kept_dims(info, rows.slots).index(dim))

    def _packed_loss(self, node: fx.Node, info: Info, rows: Rows) -> fx.Node:
        plain = plain_slots(info.accesses[0])
        out = token_loss(self, node, Rows(rows.set, tuple(plain[s] for s in rows.slots)))
        assert out is not None  # `Layout` packs only losses whose rows are exactly the row axes
        return out


# Above it softplus returns its argument: 20, the default, is 1e-10 off in fp64; exp(-40) is below the rounding of 40.
_SOFTPLUS_THRESHOLD = 40

_PERMUTES = frozenset(
    "aten." + n
    for n in [
        "permute",
        "transpose",
        "swapaxes",
        "swapdims",
        "t",
        "numpy_T",
        "mT",
        "adjoint",
        "matrix_H",
        "mH",
        "movedim",
        "moveaxis",
    ]
)


def _dim_order(x: Info, out: Info, access: Access) -> list[int]:
    """Operand dim of each result dim of a permutation (dims of size 1 keep their relative order)."""
    owner = {s: d for d, slots in enumerate(x.dim_slots()) for s in slots}
    by_result = {s: owner[i] for s, i in plain_slots(access).items()}
    ones = iter([d for d, dim in enumerate(x.dims) if not dim])
    return [by_result[slots[0]] if slots else next(ones) for slots in out.dim_slots()]


def _zero_or_one(value: Term) -> bool:
    if t.is_predicate(value):
        return True
    return value.op == "where" and {t.constant_value(a) for a in value.args[1:]} <= {0, 1}


def is_dense(value: torch.Tensor) -> bool:
    """Whether the elements fill their storage span, in some order of dims."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    order = stride_order(value)
    expected: Any = 1
    for d in reversed(order):
        if not statically_known_true(value.shape[d] == 1) and not statically_known_true(value.stride(d) == expected):
            return False
        expected = expected * value.shape[d]
    return True


def stride_order(value: torch.Tensor) -> list[int]:
    """The dims from the outermost (largest stride) to the innermost."""
    return sorted(range(value.ndim), key=lambda d: _stride_rank(value, d))


def _stride_rank(value: torch.Tensor, d: int) -> tuple[float, int]:
    """Sort key that puts the outermost dim (largest stride) first, without guarding on symbols."""
    stride = value.stride(d)
    inner = sum(_certainly_at_least(value.stride(e), stride) for e in range(value.ndim) if e != d)
    return inner, d


def _certainly_at_least(a: Any, b: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a >= b))


def _must_stay(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return has_side_effect(node)
    module = getattr(node.target, "__module__", "") or ""
    return node.op == "call_function" and not module.startswith(("gemopt", "_operator", "operator", "math"))


def placeholders_first(graph: fx.Graph) -> None:
    first = next(n for n in graph.nodes if n.op != "placeholder")
    late = False
    for node in list(graph.nodes):
        if node is first:
            late = True
        elif late and node.op == "placeholder":
            first.prepend(node)
