"""Norm fusion: the personalised feed-forward block with its norms as one op (gemopt.ops.pffn).

    ln = LayerNorm(q);   g = gdpa(ln, K, V) + ln;   out = RMSNorm(g) + q

It runs on a graph that the unpad pass has written, where an attention is one call of `gemopt.ops.gdpa` on `[T, H, D]`. The
block is read backwards from its last addition. Legal because

- both norms run over all features of a row (`normalized_shape` has H·D elements) and nothing else happens to a row between
  its parts: reshapes that keep the row axis in front keep a row's features in their order, casts to a wider dtype their
  values;
- q, the residual and what LayerNorm reads are the same tensor, and so are gdpa's queries and what is added to its result;
- nothing else reads ln, g or the tensors between: they are gone from the rewritten graph;
- all of it lies in one region of autocast and grad mode, and is recomputed together or not at all;
- norms and sums have one dtype. The attention has it too, or is what autocast makes of it: 16 bits beside norms in fp32, ln
  being rounded for its queries and for nothing else. q is in fp32 or in the 16 bits then (a CUDA autocast runs norms in fp32
  whatever they read, a CPU autocast in the dtype of what they read).

An RMSNorm is `aten.rms_norm`, or x / sqrt(mean x² + eps) written out; either norm may have elementwise weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from gemopt import ops
from gemopt.graph.capture import Captured, regions
from gemopt.graph.plan import Plan
from gemopt.graph.slots import argument
from gemopt.graph.verify import verify_plan
from gemopt.passes.narrate import source_of
from gemopt.passes.unpad import fakes_of

aten = torch.ops.aten

_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_CASTS = (aten._to_copy.default, aten.to.dtype)
_LOW = (torch.bfloat16, torch.float16)
Values = Mapping[fx.Node, Any]  # what every node gives, as fakes
_PLAIN_GDPA = {"activation", "scale", "post_scale"}


@dataclass(frozen=True)
class Norm:
    """A norm of the rows of ``x`` over ``width`` features (None: over its ``axis``, which must be the last).

    ``eps`` None is the machine epsilon that torch takes (RMSNorm only).
    """

    x: fx.Node
    width: int | None
    eps: float | None
    interior: tuple[fx.Node, ...]
    axis: int = -1
    weight: fx.Node | None = None
    bias: fx.Node | None = None


@dataclass(frozen=True)
class Block:
    """What a match found; ``interior`` are the nodes that go, from LayerNorm to ``out``."""

    out: fx.Node
    gdpa: fx.Node
    inner: fx.Node  # g, the sum of attention and ln
    layer_norm: Norm
    rms_norm: Norm
    interior: tuple[fx.Node, ...]

    @property
    def ln(self) -> fx.Node:
        return self.layer_norm.interior[0]

    def q(self, values: Values) -> fx.Node:
        """What LayerNorm reads and the last addition adds. Read anew: the block before may have been rewritten."""
        read: fx.Node = self.ln.args[0]  # type: ignore[assignment]
        root = _through(read, values)[0]
        if _mixed(self, values) and values[root].dtype in (values[self.gdpa].dtype, values[self.ln].dtype):
            return root  # type: ignore[no-any-return]
        return _behind_reshapes(read)

    @property
    def weights(self) -> dict[str, fx.Node | None]:
        """By the names of pffn's arguments."""
        layer = self.layer_norm
        return {"ln_weight": layer.weight, "ln_bias": layer.bias, "rms_weight": self.rms_norm.weight}


@dataclass(frozen=True)
class Near:
    """A block but for one thing."""

    node: fx.Node
    reason: str
    hint: str = ""


_AFTER = {
    False: "pffn: one op, norms and residuals in its kernels",
    True: "pffn: one op, norms and residuals in fp32, the attention in 16 bits",
}  # by whether the attention has a dtype of its own


def fuse_norms(captured: Captured, plan: Plan, recipe: Any, report: Any) -> bool:
    """Rewrite every block of the packed graph, in place. Returns whether there was one."""
    gm = plan.packed
    if not gm.graph.find_nodes(op="call_function", target=ops.gdpa):
        return False
    values = fakes_of(captured, plan)
    found = list(blocks(gm, values))
    for near in (b for b in found if isinstance(b, Near)):
        _reject(report, near)
    whole = [b for b in found if isinstance(b, Block)]
    if not whole:
        return False
    before = fx.Graph()
    before.output(before.graph_copy(gm.graph, {}))
    fused: list[tuple[Block, str]] = []
    for block in whole:
        reason = _shape_reason(block, values)
        if reason:
            _reject(report, Near(block.out, reason))
        else:
            fused.append((block, _AFTER[_mixed(block, values)]))
            rewrite(gm, block, values)
    gm.graph.lint()
    gm.recompile()
    verified = _verified(captured, plan) if recipe.verify and fused else None
    if verified is False:
        gm.graph = before
        for block, _ in fused:
            _reject(report, Near(block.out, "the fused block differs from the original on generated inputs"))
        return False
    for block, after in fused:
        report.rewrite(
            site=block.out.name, rule="norm fusion", kernel="pffn", source=source_of(block.out),
            before="layer_norm, gdpa, add, rms_norm, add", after=after,
            exactness="rounding", reason="nothing else reads the tensors between", verified=verified,
        )  # fmt: skip
    return bool(fused)


def _reject(report: Any, near: Near) -> None:
    report.reject(
        near.node.name, "norm fusion", source=source_of(near.node), node=near.node.name, reason=near.reason, hint=near.hint
    )


def _verified(captured: Captured, plan: Plan) -> bool | None:
    compared, mismatches = verify_plan(captured, plan)
    return None if not compared else not mismatches


def _shape_reason(block: Block, values: Values) -> str | None:
    """Why widths, dtypes or the row axis do not fit; None if they do."""
    source = block.q(values)
    queries, q, out = (values[n] for n in (block.gdpa.args[0], source, block.out))  # type: ignore[index]
    _, heads, head_dim = queries.shape
    if not all(isinstance(n, int) for x in (queries, q, out) for n in x.shape[1:]):
        return "the number of features of a row is not known"
    for name, norm in (("LayerNorm", block.layer_norm), ("RMSNorm", block.rms_norm)):
        if norm.axis not in (-1, values[norm.x].ndim - 1):
            return f"{name} runs over another axis than the last"
        width = values[norm.x].shape[-1] if norm.width is None else norm.width
        for weight in (norm.weight, norm.bias):
            sizes = [] if weight is None else list(values[weight].shape)
            known = all(isinstance(n, int) for n in sizes)
            if weight is not None and not (known and math.prod(sizes) == width and (norm.width or sizes[-1] == width)):
                return f"{name} is multiplied by something that is not a weight for each of its features"
        if width != heads * head_dim:
            return f"{name} runs over {width} features, the attention has {heads} heads of {head_dim}"
    if any(math.prod(values[n].shape[1:]) != heads * head_dim for n in (source, block.out)):
        return "the residual has leading axes besides the rows"
    if values[block.gdpa.args[2]].shape[2] != head_dim:  # type: ignore[index]
        return "the values have another head_dim than the queries"
    return _dtype_reason(block, values)


def _dtype_reason(block: Block, values: Values) -> str | None:
    """Why dtypes do not fit; None if they do. Casts inside the block are exact, or round ln for the queries: `_through`."""
    norm, low = values[block.ln].dtype, values[block.gdpa].dtype
    attention = {values[n].dtype for n in (block.gdpa, *block.gdpa.args[:3])}  # type: ignore[index, misc]
    sums = {values[n].dtype for n in (block.ln, block.inner, *block.rms_norm.interior, block.out)}
    weights = {values[n].dtype for n in block.weights.values() if n is not None}
    source = values[block.q(values)].dtype
    fits = low == norm or _mixed(block, values)
    if fits and attention == {low} and sums == {norm} and source in {norm, low} and weights <= {norm, low, *_beside(low)}:
        return None
    found = attention | sums | weights | {source}
    return f"the block mixes dtypes: {', '.join(sorted(map(str, found)))}"


def _mixed(block: Block, values: Values) -> bool:
    """Whether the attention has 16 bits beside norms in fp32."""
    return values[block.ln].dtype == torch.float32 and values[block.gdpa].dtype in _LOW


def _beside(low: torch.dtype) -> tuple[torch.dtype, ...]:
    """Dtypes that weights of norms may have besides that of the block."""
    return (torch.float32,) if low in _LOW else ()


# ---------------------------------------------------------------- matching


def blocks(gm: fx.GraphModule, values: Values) -> Iterator[Block | Near]:
    """Every block, and what looks like one up to its last condition."""
    region = regions(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is ops.gdpa:
            found = _from_attention(node, values)
            if isinstance(found, Block):
                found = _whole(found, region)
            if found is not None:
                yield found


def _from_attention(gdpa: fx.Node, values: Values) -> Block | Near | None:
    """Follow a gdpa to the end of its block; None where what surrounds it is no PFFN."""
    layer, steps = _through(gdpa.args[0], values)
    if isinstance(layer, fx.Node) and layer.target in _CASTS:  # the one cast that may round
        if values[layer].dtype != values[gdpa].dtype or values[layer].device != values[gdpa].device:
            return None
        before, more = _through(layer.args[0], values)
        layer, steps = before, [*more, layer, *steps]
    first = _layer_norm(layer, values)
    if first is None:
        return None
    steps.append(gdpa)
    inner = _sum_with(gdpa, layer, steps, values)
    second = None if inner is None else _rms_norm(inner, steps, values)
    if inner is None or second is None:
        return None
    out = _sum_with(second.interior[-1], first.x, steps, values)
    if out is None:
        return None
    near = _refusal(gdpa, out, first, second)
    return near or Block(out, gdpa, inner, first, second, (layer, *steps))


def _refusal(gdpa: fx.Node, out: fx.Node, first: Norm, second: Norm) -> Near | None:
    if first.eps is None or first.eps <= 0 or (second.eps is not None and second.eps <= 0):
        return Near(out, f"the norms of the block have eps {first.eps} and {second.eps}; both must be positive")
    if gdpa.args[3] is None:
        return Near(out, "the queries of the block are the same for all sequences")
    if set(gdpa.kwargs) - _PLAIN_GDPA:
        extra = ", ".join(sorted(set(gdpa.kwargs) - _PLAIN_GDPA))
        return Near(out, f"the attention of the block has {extra}")
    if not isinstance(gdpa.kwargs["activation"], str):
        return Near(out, "the attention of the block has activations by head")
    return None


def _whole(block: Block, region: dict[fx.Node, Any]) -> Block | Near:
    """The block, if nothing outside reads its inside and it is one region."""
    inside = set(block.interior)
    for node in block.interior:
        if node is not block.out and any(user not in inside for user in node.users):
            return Near(block.out, f"{node.name}, inside the block, is read elsewhere")
    if len({region.get(n) for n in block.interior}) > 1:
        return Near(block.out, "the block spans a change of grad mode or autocast")
    if len({(n.meta.get("ac_graph_id"), str(n.meta.get("recompute"))) for n in block.interior}) > 1:
        return Near(block.out, "the block spans the border of a checkpoint")
    return block


def _through(node: Any, values: Values) -> tuple[Any, list[fx.Node]]:
    """The tensor whose values ``node`` has in their order, and the reshapes and exact casts between, first to last."""
    passed: list[fx.Node] = []
    while isinstance(node, fx.Node) and (node.target in _RESHAPES or _is_exact_cast(node, values)):
        passed.insert(0, node)
        node = node.args[0]
    return node, passed


def _behind_reshapes(node: fx.Node) -> fx.Node:
    while node.target in _RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_exact_cast(node: fx.Node, values: Values) -> bool:
    """Whether a node changes no more than the dtype, to one that holds all values of the old one."""
    if node.target not in _CASTS:
        return False
    before, after = values[node.args[0]], values[node]  # type: ignore[index]
    floating = before.dtype.is_floating_point and before.device == after.device
    return floating and torch.promote_types(before.dtype, after.dtype) == after.dtype


def _reader(node: fx.Node, steps: list[fx.Node], values: Values) -> fx.Node | None:
    """The one reader of ``node`` behind its reshapes and exact casts, which join ``steps``; None if there are several."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in _RESHAPES and not _is_exact_cast(user, values):
            return user
        steps.append(user)
        node = user
    return None


def _sum_with(node: fx.Node, other: fx.Node, steps: list[fx.Node], values: Values) -> fx.Node | None:
    """The addition of ``other`` that reads ``node``, perhaps reshaped or widened; it and what is between join ``steps``."""
    reader = _reader(node, steps, values)
    if reader is None or reader.target is not aten.add.Tensor or argument(reader, "alpha") != 1:
        return None
    tails = [_through(a, values) for a in reader.args[:2]]
    if {t[0] for t in tails} != {node, other} or len(tails) != 2:
        return None
    if other.target is aten.layer_norm.default:  # the other sums are with q, which stays
        steps += [n for tail, passed in tails if tail is other for n in passed if n not in steps]
    steps.append(reader)
    return reader


def _layer_norm(node: Any, values: Values) -> Norm | None:
    if not isinstance(node, fx.Node) or node.target is not aten.layer_norm.default:
        return None
    x, _ = _through(node.args[0], values)
    width = _product(node.args[1])
    if width is None:
        return None
    return Norm(x, width, float(argument(node, "eps")), (node,), -1, argument(node, "weight"), argument(node, "bias"))


def _rms_norm(x: fx.Node, steps: list[fx.Node], values: Values) -> Norm | None:
    """An RMSNorm of ``x``; its nodes join ``steps``."""
    passed: list[fx.Node] = []
    node = _reader(x, passed, values)
    if node is not None and node.target is aten.rms_norm.default:
        width, eps = _product(node.args[1]), argument(node, "eps")
        eps = None if eps is None else float(eps)
        norm = None if width is None else Norm(x, width, eps, (*passed, node), -1, argument(node, "weight"))
    else:
        norm = _written_rms_norm(x, values)
    steps += norm.interior if norm is not None else ()
    return norm


def _product(sizes: Any) -> int | None:
    return math.prod(sizes) if all(isinstance(s, int) for s in sizes) else None


def _written_rms_norm(x: fx.Node, values: Values) -> Norm | None:
    """``x / sqrt(mean(x², -1, keepdim) + eps)`` in its usual spellings, of x or of its widened copy."""
    widened: list[fx.Node] = []
    while len(x.users) == 1 and _is_exact_cast(next(iter(x.users)), values):
        x = next(iter(x.users))
        widened.append(x)
    for user in x.users:
        if user.target not in (aten.mul.Tensor, aten.div.Tensor):
            continue
        divided = user.target is aten.div.Tensor
        a, b = user.args[:2]
        root = b if a is x else a if b is x and not divided else None
        found = _root_mean_square(root, x, inverse=not divided) if isinstance(root, fx.Node) else None
        if found is not None:
            return _weighted(Norm(x, None, found[0], (*widened, *found[2], user), found[1]), values)
    return None


def _weighted(norm: Norm, values: Values) -> Norm:
    """The norm with the weight that its result is multiplied by, if it is (that it is one is seen from its shape)."""
    steps: list[fx.Node] = []
    reader = _reader(norm.interior[-1], steps, values)
    if reader is None or reader.target is not aten.mul.Tensor or any(n.target in _RESHAPES for n in steps):
        return norm
    others = [a for a in reader.args if a is not (*norm.interior, *steps)[-1]]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return norm
    return replace(norm, interior=(*norm.interior, *steps, reader), weight=others[0])


def _root_mean_square(node: fx.Node, x: fx.Node, inverse: bool) -> tuple[float, int, list[fx.Node]] | None:
    """eps and axis of ``sqrt(mean(x²) + eps)``, or of its inverse, and the nodes on the way."""
    path = [node]
    if inverse and node.target is aten.reciprocal.default:
        node, inverse = node.args[0], False  # type: ignore[assignment]
        path.append(node)
    power = -0.5 if inverse else 0.5
    root = aten.rsqrt.default if inverse else aten.sqrt.default
    if node.target is not root and not (node.target is aten.pow.Tensor_Scalar and node.args[1] == power):
        return None
    plus = node.args[0]
    if not isinstance(plus, fx.Node) or plus.target not in (aten.add.Tensor, aten.add.Scalar):
        return None
    mean, eps = plus.args[0], plus.args[1]
    if not isinstance(mean, fx.Node) or not isinstance(eps, float) or argument(plus, "alpha", 1) != 1:
        return None
    square = mean.args[0]
    if mean.target is not aten.mean.dim or len(mean.args[1]) != 1 or not argument(mean, "keepdim"):  # type: ignore[arg-type]
        return None
    if argument(mean, "dtype") is not None or not isinstance(square, fx.Node) or not _is_square(square, x):
        return None
    return eps, mean.args[1][0], [square, mean, plus, *reversed(path)]  # type: ignore[index, return-value]


def _is_square(node: fx.Node, x: fx.Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return node.args[0] is x and bool(node.args[1] == 2)
    return (node.target is aten.mul.Tensor and node.args[0] is x and node.args[1] is x) or (
        node.target is aten.square.default and node.args[0] is x
    )


# ---------------------------------------------------------------- rewriting


def rewrite(gm: fx.GraphModule, block: Block, values: dict[fx.Node, Any]) -> None:
    """Put one call of `pffn` in the place of ``block.out`` and erase the rest of the block."""
    graph, gdpa, out = gm.graph, block.gdpa, block.out
    queries, *rest = gdpa.args
    heads, head_dim = values[queries].shape[1:]  # type: ignore[index]
    source = block.q(values)
    kwargs = {**gdpa.kwargs, "eps": block.layer_norm.eps, "rms_eps": block.rms_norm.eps}
    if values[source].dtype != values[out].dtype:
        kwargs["dtype"] = values[out].dtype
    new = []
    with graph.inserting_before(out):
        q = source
        if values[q].ndim != 3 or values[q].shape[1] != heads:
            q = graph.call_function(aten.reshape.default, (q, [-1, heads, head_dim]))
            new.append(q)
        for name, weight in block.weights.items():
            if weight is not None:
                kwargs[name] = graph.call_function(aten.reshape.default, (weight, [heads * head_dim]))
        fused = graph.call_function(ops.pffn, (q, *rest), kwargs)
        new.append(fused)
        if values[out].ndim != 3 or values[out].shape[1] != heads:
            new.append(graph.call_function(aten.reshape.default, (fused, [-1, *values[out].shape[1:]])))
    for node in new:
        node.meta.update({k: v for k, v in out.meta.items() if k != "val"})
    values[q] = values[queries].to(values[source].dtype)  # type: ignore[index]
    values[fused] = values[queries].to(values[out].dtype)  # type: ignore[index]
    values[new[-1]] = values[out]
    out.replace_all_uses_with(new[-1])
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in sorted(set(block.interior), key=order.__getitem__, reverse=True):
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.target in (*_RESHAPES, *_CASTS) and not node.users:
            graph.erase_node(node)
