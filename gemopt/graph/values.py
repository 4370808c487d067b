"""Values: the term of every index-like tensor (lengths, ids, arange, masks, two-valued float masks).

    input tensor               read(input, slots)            arange            start + step * slot
    comparison, and/or/not     predicate in normal form      a + b, a - b      linear, for int32 and int64
    masked_fill, where, tril   where(p, a, b)                views, expand     the operand's term, renamed
    anything else of integer or bool type that the prologue can compute: read(node, slots)

Terms of dtype narrower than int32 are read but never calculated with, because their arithmetic wraps. Floats are followed
only as ``where`` over constants: that is what additive masks are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import sympy
import torch
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.slots import Access, Info, argument, expr_of, forward, is_tensor, nodes_in, op_name
from gemopt.graph.terms import Term

_EXACT = (torch.int32, torch.int64)
_MAX_LEAF_ANCESTORS = 64
_WHOLE = 2.0**23  # float32 rounds no whole number up to here, and none further on to below it
_HEAVY = frozenset(
    "aten." + n for n in ["linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "embedding", "conv1d", "conv2d"]
)


class Values:
    """Computes terms node by node; `info` must be known for a node and its operands first."""

    def __init__(self, info: Callable[[fx.Node], Info], tainted: Collection[fx.Node] = ()) -> None:
        """``tainted``: nodes whose storage is written. The prologue runs before the graph and cannot compute from them."""
        self._info = info
        self._tainted = tainted
        self._terms: dict[fx.Node, Term | None] = {}
        self._representative: dict[Any, fx.Node] = {}
        self._keys: dict[fx.Node, Any] = {}
        self._numbers: dict[str, int] = {}
        self._told: frozenset[sympy.Symbol] | None = None
        self.leaf_nodes: dict[str, fx.Node] = {}

    def __getitem__(self, node: fx.Node) -> Term | None:
        return self._terms.get(node)

    def told(self, sizes: Iterable[sympy.Expr]) -> bool:
        """Whether the inputs tell these sizes; how many elements a mask selects they do not."""
        return all(s.free_symbols <= (self._told or frozenset()) for s in sizes)

    def visit(self, node: fx.Node) -> None:
        if self._told is None:
            self._told = _symbols_of(node.graph.find_nodes(op="placeholder"))
        value = self._term(node)
        if value is not None:
            value = held(value, node.meta["val"].dtype)
        self._terms[node] = value if value is not None else self._leaf(node)

    # ------------------------------------------------------------ formulas

    def _term(self, node: fx.Node) -> Term | None:
        name = op_name(node)
        handler = _TABLE.get(name)
        if handler is not None:
            return handler(self, node)
        info = self._info(node)
        if info.kind in ("view", "expand", "repeat", "select", "slice", "gather") and info.accesses:
            return self.through(info.accesses[0])
        return None

    def through(self, access: Access) -> Term | None:
        value = self[access.operand]
        return None if value is None else forward(value, access)

    def operand(self, node: fx.Node, position: int) -> Term | None:
        """Term of an argument of a pointwise node, over the node's slots; Python numbers are constants."""
        value = node.args[position]
        if not isinstance(value, fx.Node):
            return t.const(value) if isinstance(value, bool | int | float) else None
        if not is_tensor(value):
            return _scalar(value)
        tensors = [n for n in nodes_in(node.args, node.kwargs) if is_tensor(n)]
        access = self._info(node).accesses[tensors.index(value)]
        return self.through(access)

    # ------------------------------------------------------------ leaves

    def _leaf(self, node: fx.Node) -> Term | None:
        """An element of the tensor itself, where the prologue can compute that tensor."""
        dtype = node.meta["val"].dtype
        weights = dtype.is_floating_point and weights_rows(node)
        if (dtype.is_floating_point and not weights) or dtype.is_complex or not computable(node, self._tainted):
            return None
        if any(len(dim) > 1 for dim in self._info(node).dims) or not self.told(self._info(node).sizes):
            return None  # the prologue reads leaves dim by dim
        first = self._representative.setdefault(self._key(node), node)
        self.leaf_nodes[first.name] = first
        indices = [t.slot(i) for i in range(len(self._info(node).sizes))]
        element = t.read(first.name, indices, integer=dtype in _EXACT)
        return t.call("bool", element) if dtype == torch.bool else element

    def extents(self, leaf: str) -> list[sympy.Expr]:
        """Sizes of a leaf, in the order of its indices."""
        return [expr_of(s) for s in self.leaf_nodes[leaf].meta["val"].shape if expr_of(s) != 1]

    def _key(self, node: fx.Node) -> Any:
        """Two nodes with one key hold equal tensors: same pure op on operands with equal keys."""
        if node not in self._keys:
            if node.op != "call_function" or not _pure(node) or node in self._tainted:
                self._keys[node] = node.name
            else:
                keys = tuple(self._key(n) for n in nodes_in(node.args, node.kwargs))
                # A string where a node is: `t[i, :, j]` and `t[:, i, j]` differ in where the None is.
                shape = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: "node")  # type: ignore[arg-type,return-value]
                self._keys[node] = (node.target, repr(shape), keys)
        return self._keys[node]


def _symbols_of(inputs: Iterable[fx.Node]) -> frozenset[sympy.Symbol]:
    """The symbols in the sizes of the inputs."""
    values = [p.meta.get("val") for p in inputs]
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    return frozenset().union(*(expr_of(s).free_symbols for s in sizes if isinstance(s, torch.SymInt)))


def weights_rows(node: fx.Node) -> bool:
    """A float input ``[batch, length]``, both of unknown size: what loaders make of masks."""
    value = node.meta["val"]
    unknown = value.ndim == 2 and all(isinstance(s, torch.SymInt) and not s.node.expr.is_number for s in value.shape)
    return node.op == "placeholder" and unknown and not value.requires_grad


def computable(node: fx.Node, tainted: Collection[fx.Node] = ()) -> bool:
    """Whether the prologue may compute this node: pure, cheap, and nothing it reads is trained or written in place."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if len(seen) > _MAX_LEAF_ANCESTORS or not _pure(n) or op_name(n) in _HEAVY or n in tainted:
            return False
        value = n.meta.get("val")
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return False
        stack += n.all_input_nodes
    return True


def _pure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
    return getattr(target, "__module__", "") in ("_operator", "operator", "math", "torch")


def _scalar(node: fx.Node) -> Term | None:
    """A SymInt node as a size."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return t.size(value.node.shape_env.replace(value.node.expr))
    return t.const(value) if isinstance(value, int | float | bool) else None


# ---------------------------------------------------------------- one function per op


Rule = Callable[[Values, fx.Node], "Term | None"]


def _arange(_: Values, node: fx.Node) -> Term | None:
    if node.meta["val"].dtype not in _EXACT:
        return None
    overload = getattr(node.target, "_overloadname", "")
    start: Any = 0 if overload == "default" else node.args[0]
    step: Any = 1
    if overload == "start_step" and len(node.args) > 2:
        step = node.args[2]
    first = _scalar(start) if isinstance(start, fx.Node) else t.const(start) if isinstance(start, int) else None
    if first is None or not isinstance(step, int):
        return None
    extent = node.meta["val"].shape[0]
    if isinstance(extent, int) and extent == 1:
        return first
    return t.add(first, t.scale(t.slot(0), step))


def _eye(values: Values, node: fx.Node) -> Term | None:
    dims = values._info(node).dim_slots()
    row, column = (t.slot(s[0]) if s else t.const(0) for s in dims)
    dtype = node.meta["val"].dtype
    return convert(t.eq(row, column), torch.bool, dtype)


def _constant(value: float | None, position: int = 0) -> Rule:
    def rule(_: Values, node: fx.Node) -> Term | None:
        number = value if value is not None else argument(node, "fill_value")
        if not isinstance(number, bool | int | float):
            return None
        dtype = node.meta["val"].dtype
        if dtype == torch.bool:
            return t.const(bool(number))
        return t.const(float(number)) if dtype.is_floating_point else t.const(int(number))

    return rule


def _compared(values: Values, node: fx.Node) -> tuple[Term, Term] | None:
    """The operands of a comparison, their constants as held by the dtype in which torch compares; None where that dtype
    would round more than constants."""
    a, b = values.operand(node, 0), values.operand(node, 1)
    if a is None or b is None:
        return None
    dtype = _common_dtype(node)
    if not dtype.is_floating_point:
        return a, b
    x_held, y_held = held(a, dtype), held(b, dtype)
    for x, other in ((a, y_held), (b, x_held)):
        if x.op == "add":
            return None  # of floats: its sum is rounded once more
        if x.integer and t.constant_value(x) is None:
            number = None if other is None else t.constant_value(other)
            if number is None or abs(number) >= _WHOLE:
                return None
    return None if x_held is None or y_held is None else (x_held, y_held)


def _common_dtype(node: fx.Node) -> torch.dtype:
    """In which the two arguments of a pointwise op meet."""
    given = [x.meta["val"] if isinstance(x, fx.Node) else x for x in node.args[:2]]
    plain = [1 if isinstance(x, torch.SymInt) else 1.0 if isinstance(x, torch.SymFloat) else x for x in given]
    return torch.result_type(*plain)  # type: ignore[arg-type]


def _compare(make: Callable[[Term, Term], Term], numbers: Callable[[Any, Any], bool]) -> Rule:
    def rule(values: Values, node: fx.Node) -> Term | None:
        operands = _compared(values, node)
        if operands is None:
            return None
        a, b = operands
        if a.op == "where" or b.op == "where":  # a mask as numbers against a threshold
            chosen = lift(numbers, a, b)
            if chosen is not None:
                return t.truth(chosen)
        return make(_number(a), _number(b))

    return rule


def _number(x: Term) -> Term:
    """A predicate that takes part in arithmetic counts as 1 or 0."""
    return t.call("where", x, t.const(1), t.const(0), integer=True) if t.is_predicate(x) else x


def _eq(negate: bool) -> Rule:
    def rule(values: Values, node: fx.Node) -> Term | None:
        operands = _compared(values, node)
        if operands is None:
            return None
        a, b = operands
        for x, y in ((a, b), (b, a)):  # mask == 0, mask == True
            value = t.constant_value(y)
            if t.is_predicate(x) and value is not None and value in (0, 1):
                return t.not_(x) if bool(value) == negate else x
        if a.op == "where" or b.op == "where":
            chosen = lift(operator.ne if negate else operator.eq, a, b)
            if chosen is not None:
                return t.truth(chosen)
        return (t.ne if negate else t.eq)(_number(a), _number(b))

    return rule


def _logic(make: Callable[..., Term]) -> Rule:
    def rule(values: Values, node: fx.Node) -> Term | None:
        if node.meta["val"].dtype != torch.bool:
            return None
        parts = [values.operand(node, i) for i in range(len(node.args))]
        if any(p is None for p in parts):
            return None
        return make(*(t.truth(p) for p in parts if p is not None))

    return rule


def _arithmetic(exact: Callable[[Term, Term], Term | None], number: Callable[[Any, Any], Any]) -> Rule:
    def rule(values: Values, node: fx.Node) -> Term | None:
        dtype = node.meta["val"].dtype
        a, b = values.operand(node, 0), values.operand(node, 1)
        if a is None or b is None or argument(node, "alpha", 1) != 1 or argument(node, "rounding_mode") is not None:
            return None
        if dtype == torch.bool:
            if exact not in (t.mul, t.add):
                return None
            return (t.and_ if exact is t.mul else t.or_)(t.truth(a), t.truth(b))
        lifted = lift(number, a, b)
        if lifted is not None:
            return lifted
        if exact is not t.add and a.leaves and b.leaves:
            return None  # the difference of two data may wrap, and looks like a comparison of the two
        if dtype in _EXACT and a.integer and b.integer:
            return exact(a, b)
        if exact is t.add and dtype.is_floating_point and _is_choice(a) and _is_choice(b):
            return t.call("add", *sorted((a, b), key=lambda x: x.key))  # two additive masks
        return None

    return rule


def _is_choice(x: Term) -> bool:
    return x.op == "where" or (x.op == "add" and all(_is_choice(a) for a in x.args))


def lift(function: Callable[[Any, Any], Any], a: Term, b: Term) -> Term | None:
    """Apply a scalar function to constants, or inside the branches of ``where`` over constants."""
    a, b = _branches(a), _branches(b)
    if a.op == b.op == "where" and _constant_branches(a) and _constant_branches(b):
        return choose(a.args[0], lift(function, a.args[1], b), lift(function, a.args[2], b))
    x, y = t.constant_value(a), t.constant_value(b)
    if x is not None and y is not None:
        try:
            return t.const(function(x, y))
        except (ZeroDivisionError, OverflowError, ValueError):
            return None
    if a.op == "where" and y is not None:
        return choose(a.args[0], lift(function, a.args[1], b), lift(function, a.args[2], b))
    if b.op == "where" and x is not None:
        return choose(b.args[0], lift(function, a, b.args[1]), lift(function, a, b.args[2]))
    return None


def _constant_branches(x: Term) -> bool:
    return all(t.constant_value(a) is not None or (a.op == "where" and _constant_branches(a)) for a in x.args[1:])


def _branches(x: Term) -> Term:
    value = t.constant_value(x)
    if t.is_predicate(x) and value is None:
        return t.call("where", x, t.const(1), t.const(0))
    return t.const(int(value)) if isinstance(value, bool) else x


def choose(p: Term, a: Term | None, b: Term | None) -> Term | None:
    if a is None or b is None:
        return None
    if p == t.TRUE or a == b:
        return a
    if p == t.FALSE:
        return b
    if p.op == "not":
        return t.call("where", p.args[0], b, a)
    return t.call("where", p, a, b, integer=a.integer and b.integer)


def _cast(values: Values, node: fx.Node) -> Term | None:
    tensors = [n for n in nodes_in(node.args, node.kwargs) if is_tensor(n)]
    value = values.operand(node, 0) if tensors else None
    if value is None:
        return None
    return convert(value, tensors[0].meta["val"].dtype, node.meta["val"].dtype)


def convert(value: Term, source: torch.dtype, target: torch.dtype) -> Term | None:
    if source == target:
        return value
    if target == torch.bool:
        return t.truth(value)
    if t.is_predicate(value):
        one, zero = (t.const(1.0), t.const(0.0)) if target.is_floating_point else (t.const(1), t.const(0))
        return choose(value, one, zero)
    if value.op == "where":
        return choose(value.args[0], convert(value.args[1], source, target), convert(value.args[2], source, target))
    if t.constant_value(value) is not None:
        return held(value, target)
    return value if source in _EXACT and target == torch.int64 else None


def rounded(number: float, dtype: torch.dtype) -> float:
    """A number as a tensor of a floating dtype holds it."""
    return torch.tensor(number, dtype=torch.float64).to(dtype).item()


def held(value: Term, dtype: torch.dtype) -> Term | None:
    """The term with its constants as a tensor of that dtype holds them: rounded, truncated, wrapped."""
    if value.op == "where" and not t.is_predicate(value):
        return choose(value.args[0], held(value.args[1], dtype), held(value.args[2], dtype))
    number = t.constant_value(value)
    if number is None:
        return value
    if dtype.is_floating_point:
        return t.const(rounded(float(number), dtype))
    if not math.isfinite(number) or abs(number) >= 2**63:
        return None
    return t.const(torch.tensor(int(number)).to(dtype).item())


def _where(values: Values, node: fx.Node) -> Term | None:
    if len(node.args) != 3:
        return None
    p, a, b = (values.operand(node, i) for i in range(3))
    if p is None or a is None or b is None:
        return None
    return _select_value(node, t.truth(p), a, b)


def _masked_fill(values: Values, node: fx.Node) -> Term | None:
    x, p, v = values.operand(node, 0), values.operand(node, 1), values.operand(node, 2)
    if x is None or p is None or v is None:
        return None
    return _select_value(node, t.truth(p), v, x)


def _select_value(node: fx.Node, p: Term, a: Term, b: Term) -> Term | None:
    dtype = node.meta["val"].dtype
    if dtype == torch.bool:
        return t.or_(t.and_(p, t.truth(a)), t.and_(t.not_(p), t.truth(b)))
    if dtype.is_floating_point:
        parts = [_float(a), _float(b)]
        return None if None in parts else choose(p, *parts)
    return choose(p, _number(a), _number(b))


def _float(x: Term) -> Term | None:
    value = t.constant_value(x)
    if value is not None:
        return t.const(float(value))
    return x if _is_choice(x) else None


def _triangle(lower: bool) -> Rule:
    def rule(values: Values, node: fx.Node) -> Term | None:
        x = values.operand(node, 0)
        diagonal = argument(node, "diagonal", 0)
        slots = values._info(node).dim_slots()
        if x is None or not isinstance(diagonal, int) or any(len(s) > 1 for s in slots[-2:]):
            return None
        row, column = (t.slot(s[0]) if s else t.const(0) for s in slots[-2:])
        limit = t.add(row, t.const(diagonal))
        keep = t.le(column, limit) if lower else t.le(limit, column)
        dtype = node.meta["val"].dtype
        if dtype == torch.bool:
            return t.and_(keep, t.truth(x))
        number = _float(x) if dtype.is_floating_point else _number(x)
        zero = t.const(0.0) if dtype.is_floating_point else t.const(0)
        return None if number is None else choose(keep, number, zero)

    return rule


def _clamp(values: Values, node: fx.Node) -> Term | None:
    value = values.operand(node, 0)
    low, high = argument(node, "min"), argument(node, "max")
    if value is None or not value.integer or node.meta["val"].dtype not in _EXACT:
        return None
    bounds = [None if b is None else _bound(b) for b in (low, high)]
    if (low is not None and bounds[0] is None) or (high is not None and bounds[1] is None):
        return None
    return t.call("clamp", value, *bounds, integer=True)


def _bound(b: Any) -> Term | None:
    if isinstance(b, int) and not isinstance(b, bool):
        return t.const(b)
    return _scalar(b) if isinstance(b, fx.Node) and not is_tensor(b) else None


def _same(values: Values, node: fx.Node) -> Term | None:
    return values.operand(node, 0)


def _not(values: Values, node: fx.Node) -> Term | None:
    value = values.operand(node, 0)
    if value is None or (op_name(node) == "aten.bitwise_not" and node.meta["val"].dtype != torch.bool):
        return None
    return t.not_(t.truth(value))


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Rule:
    """A function of a mask as numbers: ``log(mask)`` is 0 and -inf."""

    def rule(values: Values, node: fx.Node) -> Term | None:
        value = values.operand(node, 0)
        dtype = node.meta["val"].dtype
        return None if value is None else lift(lambda a, _: function(torch.tensor(a, dtype=dtype)).item(), value, t.const(0))

    return rule


def _neg(values: Values, node: fx.Node) -> Term | None:
    value = values.operand(node, 0)
    if value is None:
        return None
    lifted = lift(lambda a, _: -a, value, t.const(0))
    if lifted is not None:
        return lifted
    return t.scale(value, -1) if node.meta["val"].dtype in _EXACT and value.integer else None


def _floor_divided(values: Values, node: fx.Node) -> Term | None:
    """``x // n`` by a positive number, rounded down."""
    value, divisor = values.operand(node, 0), values.operand(node, 1)
    if value is None or divisor is None or not value.integer or node.meta["val"].dtype not in _EXACT:
        return None
    number = t.constant_value(divisor)
    if op_name(node) == "aten.div" and argument(node, "rounding_mode") != "floor":
        return None
    return t.call("floordiv", value, number, integer=True) if type(number) is int and number > 0 else None


def _division(values: Values, node: fx.Node) -> Term | None:
    if argument(node, "rounding_mode") is not None:
        return _floor_divided(values, node)
    return _arithmetic(lambda a, b: None, lambda a, b: a / b)(values, node)


def _abs(values: Values, node: fx.Node) -> Term | None:
    value = values.operand(node, 0)
    if value is None or not value.integer or value.leaves or node.meta["val"].dtype not in _EXACT:
        return None  # of data: the least integer is its own absolute value
    return t.call("abs", value, integer=True)


def _table() -> dict[str, Rule]:
    def gt(a: Term, b: Term) -> Term:
        return t.lt(b, a)

    def ge(a: Term, b: Term) -> Term:
        return t.le(b, a)

    def xor(a: Term, b: Term) -> Term:
        return t.or_(t.and_(a, t.not_(b)), t.and_(t.not_(a), b))

    groups: list[tuple[str, Rule]] = [
        ("arange", _arange),
        ("eye", _eye),
        ("zeros zeros_like new_zeros", _constant(0)),
        ("ones ones_like new_ones", _constant(1)),
        ("full full_like new_full scalar_tensor", _constant(None)),
        ("lt less", _compare(t.lt, operator.lt)),
        ("le less_equal", _compare(t.le, operator.le)),
        ("gt greater", _compare(gt, operator.gt)),
        ("ge greater_equal", _compare(ge, operator.ge)),
        ("eq", _eq(False)),
        ("ne not_equal", _eq(True)),
        ("logical_and bitwise_and __and__", _logic(t.and_)),
        ("logical_or bitwise_or __or__", _logic(t.or_)),
        ("logical_xor bitwise_xor __xor__", _logic(xor)),
        ("logical_not bitwise_not", _not),
        ("add", _arithmetic(t.add, lambda a, b: a + b)),
        ("sub", _arithmetic(t.sub, lambda a, b: a - b)),
        ("rsub", _arithmetic(lambda a, b: t.sub(b, a), lambda a, b: b - a)),
        ("mul", _arithmetic(t.mul, lambda a, b: math.nan if 0 in (a, b) and math.inf in (abs(a), abs(b)) else a * b)),
        ("div", _division),
        ("floor_divide __floordiv__", _floor_divided),
        ("neg", _neg),
        ("log", _unary(torch.log)),
        ("exp", _unary(torch.exp)),
        ("abs", _abs),
        ("to _to_copy type_as", _cast),
        ("where", _where),
        ("masked_fill", _masked_fill),
        ("tril", _triangle(True)),
        ("triu", _triangle(False)),
        ("clamp clip clamp_min clamp_max", _clamp),
        ("clone detach alias contiguous", _same),
    ]
    return {f"aten.{name}": rule for names, rule in groups for name in names.split()}


_TABLE: dict[str, Rule] = _table()
