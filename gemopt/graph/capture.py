"""Capture: the Dynamo graph, retraced to pre-dispatch ATen inside the Dynamo backend.

Why this level. A Dynamo graph is Python: ``q @ k``, ``torch.matmul`` and ``q.matmul`` are three targets, and
indices hide ``unsqueeze``. A joint graph is already differentiated and decomposed. In between, *pre-dispatch*
ATen has one spelling per operator, keeps composite operators whole (``aten.linear``, ``aten.matmul``,
``aten.softmax.int``, ``aten.layer_norm``), and is not yet differentiated: a rewrite to an operator with its
own backward is differentiated by autograd afterwards.

What the retrace keeps: the symbols of Dynamo's ShapeEnv (so that guards hold for the rewritten graph too),
source lines and module paths, autocast and grad-mode switches as ordered nodes, and the recompute tags of
checkpointed bodies.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.fx.traceback as fx_traceback
from torch._guards import TracingContext
from torch._higher_order_ops import wrap
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from gemopt.graph.fused import FUSED


class CaptureError(Exception):
    """The graph holds something that the pre-dispatch level cannot express; ``str(e)`` says what.

    Not a defect: the backend compiles such a graph as plain ``torch.compile`` would and reports a rejection.
    """


@dataclass
class Captured:
    """A pre-dispatch ATen graph and its inputs, in placeholder order.

    Attributes:
        gm: the graph. Every node has ``meta["val"]`` (a FakeTensor or SymInt; None for mode switches) and,
            where Dynamo knew them, ``stack_trace`` and ``nn_module_stack``. Nodes of checkpointed bodies have
            ``meta["recompute"]`` and ``meta["ac_graph_id"]``.
        example_inputs: FakeTensors of ``fake_mode`` and SymInts, one per placeholder; ``requires_grad`` is
            the caller's.
        input_names: user-level names: ``"ids"``, ``"self.embedding.weight"``; the placeholder's own if
            unknown.
        output_names: ``"output[0]"``, ... in the order of the graph's flat outputs.
        is_training_graph: grad mode was on and some input requires grad.
        fake_mode: the fake mode of the compilation; its ``shape_env`` owns the symbols.
        real_inputs: what Dynamo handed over: tensors with data, and SymInts. Read them, never write them.
        ambient_autocast: device type -> dtype, for each kind of device whose autocast was on around the call.
            No node says so; the metas have the dtypes it leads to.
        trained_by_output: for each output, as bits, the inputs that autograd reaches from it (`reached`). Taken before any
            rewrite, so that graph/gradients.py can tell what a rewrite lost.
    """

    gm: fx.GraphModule
    example_inputs: list[Any]
    input_names: list[str]
    output_names: list[str]
    is_training_graph: bool
    fake_mode: FakeTensorMode
    real_inputs: list[Any] = field(repr=False)
    ambient_autocast: dict[str, torch.dtype] = field(default_factory=dict)
    trained_by_output: list[int] = field(default_factory=list)


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """Retrace a Dynamo graph to pre-dispatch ATen. To be called inside a Dynamo backend.

    Args:
        gm: the graph Dynamo passes to a backend. It is not changed.
        example_inputs: the inputs Dynamo passes beside it: tensors with data and SymInts.

    Raises:
        CaptureError: the graph holds something this level cannot express (a higher-order operator other than
            activation checkpointing, a tensor subclass, a sparse or nested tensor, lifted module calls).
    """
    fake_mode = _fake_mode()
    _refuse_inexpressible(gm)
    fakes = [_to_fake(x, fake_mode) for x in example_inputs]
    with fx_traceback.preserve_node_meta(), fake_mode:
        run = lambda *args: _Retrace(gm).run(*args)  # noqa: E731
        retraced = make_fx(run, pre_dispatch=True)(*map(trace_copy, fakes))
    retraced.meta["ambient_grad"] = torch.is_grad_enabled()
    if regions(retraced)[retraced.graph.output_node()][0] != torch.is_grad_enabled():
        raise CaptureError("the graph ends in another grad mode than it begins in")
    return Captured(
        gm=retraced,
        example_inputs=fakes,
        input_names=_adopt_placeholders(retraced, gm),
        output_names=[f"output[{i}]" for i in range(len(outputs_of(retraced.graph)))],
        is_training_graph=trains(example_inputs),
        fake_mode=fake_mode,
        real_inputs=list(example_inputs),
        ambient_autocast=_ambient_autocast(example_inputs),
        trained_by_output=reached(retraced, fakes),
    )


def trains(inputs: Sequence[Any]) -> bool:
    """Whether grad mode is on and some input requires grad."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def regions(gm: fx.GraphModule) -> dict[fx.Node, tuple]:
    """The grad-mode and autocast region of every node of a captured graph.

    Returns:
        ``{node: (grad, autocast, ...)}``. Two nodes have equal tuples exactly if the same switches are in
        force at both. ``grad`` is the grad mode; each further entry is the argument tuple (device type,
        dtype, enabled, cache) of an autocast block that is open there, outermost first. Autocast around the
        call is in no tuple: it is the same for all. A switch itself has the region it leads to.
    """
    grad = gm.meta.get("ambient_grad", True)
    casts: list[fx.Node] = []
    result: dict[fx.Node, tuple] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            if node.target is torch._C._set_grad_enabled:
                grad = bool(node.args[0])
            elif node.target is _enter_autocast:
                casts.append(node)
            elif node.target is _exit_autocast:
                casts.remove(node.args[0])
        result[node] = (grad, *(cast.args for cast in casts))
    return result


_DETACHING = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
_AS_ANOTHER = ("expand_as", "view_as", "reshape_as", "type_as")


def outputs_of(graph: fx.Graph) -> list[Any]:
    """What the graph returns, one entry each."""
    (outputs,) = graph.output_node().args
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def reached(gm: fx.GraphModule, inputs: Sequence[Any], values: Mapping[fx.Node, Any] | None = None) -> list[int]:
    """For each output the trained inputs that autograd reaches from it: bit j is input j.

    ``values`` are those of the nodes; without it, their metas. An estimate: every argument counts but those that lend a
    shape or a dtype, and a write counts for the result of the op, not for later reads of the tensor that it wrote.
    """
    region = regions(gm)
    bits: dict[fx.Node, int] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    for j, (node, x) in enumerate(zip(placeholders, inputs, strict=False)):
        bits[node] = int(isinstance(x, torch.Tensor) and x.requires_grad) << j
    for node in gm.graph.nodes:
        if node.op == "call_function":
            value = node.meta.get("val") if values is None else values.get(node)
            through = region[node][0] and node.target not in _DETACHING and _is_floating(value)
            bits[node] = 0
            for x in _differentiated(node) if through else ():
                bits[node] |= bits.get(x, 0)
    return [bits.get(n, 0) if isinstance(n, fx.Node) else 0 for n in outputs_of(gm.graph)]


def _differentiated(node: fx.Node) -> Sequence[fx.Node]:
    """The arguments of an op, without those that lend a shape or a dtype alone."""
    name = getattr(node.target, "_opname", "")
    if name.endswith("_like") or name.startswith("new_"):
        return ()
    return node.all_input_nodes[:1] if name in _AS_ANOTHER else node.all_input_nodes


def _is_floating(value: Any) -> bool:
    parts = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(p, torch.Tensor) and (p.is_floating_point() or p.is_complex()) for p in parts)


# ---------------------------------------------------------------------------------------------- inputs


def _fake_mode() -> FakeTensorMode:
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise RuntimeError("capture() must be called inside a Dynamo backend: there is no tracing context")
    return context.fake_mode


def _ambient_autocast(inputs: Sequence[Any]) -> dict[str, torch.dtype]:
    devices = {x.device.type for x in inputs if isinstance(x, torch.Tensor)} | {"cpu", "cuda"}
    usable = [d for d in sorted(devices) if torch.amp.is_autocast_available(d)]
    return {d: torch.get_autocast_dtype(d) for d in usable if torch.is_autocast_enabled(d)}


def _to_fake(x: Any, fake_mode: FakeTensorMode) -> Any:
    """The FakeTensor that AOTAutograd would make of ``x``: same mode, same symbols as in Dynamo's guards."""
    if not isinstance(x, torch.Tensor) or (isinstance(x, FakeTensor) and x.fake_mode is fake_mode):
        return x
    context = TracingContext.try_get()
    symbolic = context.tensor_to_context.get(x) if context is not None else None
    source = symbolic.tensor_source if symbolic is not None else None
    return fake_mode.from_tensor(x, symbolic_context=symbolic, source=source, trace=False)


def trace_copy(x: Any) -> Any:
    """An alias of a fake input with an autograd history of its own; a leaf where the input is one.

    ``from_tensor`` memoises: an in-place operator run on the memoised fake itself would leave a ``grad_fn``
    on the very object that the inner compiler receives as a leaf afterwards.
    """
    if not isinstance(x, torch.Tensor):
        return x
    if getattr(x, "item_memo", None) is not None:  # a wrapped Python float: the memo is its symbol
        return x
    try:
        if x.requires_grad and not x.is_leaf:  # may be written in place, as a leaf may not
            with torch.enable_grad():
                return _Computed.apply(x.detach(), x.new_empty((), requires_grad=True))
    except RuntimeError as error:
        # A view that eager does not write either, one of several or made by a custom Function: a leaf does as well.
        if "modified inplace" not in str(error):
            raise
    return x.detach().requires_grad_(x.requires_grad)


class _Computed(torch.autograd.Function):
    """``x`` itself, storage and all, as the result of some operator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x


def _refuse_inexpressible(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "call_module":
            raise CaptureError(f"the graph calls module {node.target!r} instead of holding its operators")
        if "_functorch" in (getattr(node.target, "__module__", None) or ""):
            raise CaptureError("the graph differentiates or maps a function inside (torch.func)")
        if node.op == "get_attr" and isinstance(value, torch.Tensor):
            raise CaptureError(f"the graph holds tensor attribute {node.target!r} that is not an input")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        if value.layout is not torch.strided or value.is_nested:
            raise CaptureError(f"input {_input_name(node)!r} is not a dense strided tensor: {value.layout}")
        if is_traceable_wrapper_subclass(value):
            raise CaptureError(f"input {_input_name(node)!r} is a tensor subclass: {type(value).__name__}")


def _adopt_placeholders(retraced: fx.GraphModule, gm: fx.GraphModule) -> list[str]:
    """Give the retraced placeholders Dynamo's sources and readable names; return the user-level names."""
    names = []
    theirs = gm.graph.find_nodes(op="placeholder")
    for mine, other in zip(retraced.graph.find_nodes(op="placeholder"), theirs, strict=True):
        adopt_placeholder(mine, other)
        names.append(_input_name(other))
        identifier = re.sub(r"\W+", "_", names[-1]).strip("_")
        mine._rename(identifier if identifier[:1].isalpha() else f"input_{identifier}")
        mine.target = mine.name
    retraced.recompile()
    return names


def adopt_placeholder(mine: fx.Node, other: fx.Node | None) -> None:
    """Copy what AOTAutograd reads from Dynamo's placeholders: guard source, mark of a static input."""
    mine._dynamo_source = getattr(other, "_dynamo_source", None)  # type: ignore[attr-defined]
    if other is not None and "tensor_dict" in other.meta:
        mine.meta["tensor_dict"] = other.meta["tensor_dict"]


_SOURCE_STEPS = (
    (re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]"), r".\1"),
    (re.compile(r"\b[LG]\['([^']+)'\]"), r"\1"),
    (re.compile(r"\['([A-Za-z_]\w*)'\]"), r".\1"),
)


def _input_name(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return node.name
    name = source.name if isinstance(source.name, str) else source.name()  # a method in older versions
    for pattern, replacement in _SOURCE_STEPS:
        name = pattern.sub(replacement, name)
    return name or node.name


# ---------------------------------------------------------------------------------------------- the retrace


class _Retrace(PropagateUnbackedSymInts):
    """Runs a Dynamo graph under ``make_fx``; does by hand what does not retrace by itself."""

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target is _enter_autocast:
            # Calling it under make_fx only writes the node. Entering the context also writes it, and puts
            # autocast in force, so that the metas of the operators inside show the dtypes they will have.
            mode = torch.autocast(*args)
            mode.__enter__()
            torch.set_autocast_cache_enabled(False)  # the cache would keep casts of fake weights
            return mode
        if target is _exit_autocast:
            args[0].__exit__(None, None, None)
            return None
        if isinstance(target, torch._ops.HigherOrderOperator):
            if target is torch.ops.higher_order.tag_activation_checkpoint:
                return _CheckpointBody(args[0]).run(*args[1:])  # kwargs are checkpoint's own settings
            raise CaptureError(f"the graph holds higher-order operator {target.name()!r}")
        if target in FUSED:
            return FUSED[target](*args, **kwargs)
        return super().call_function(target, args, kwargs)


class _CheckpointBody(_Retrace):
    """Inlines a checkpointed body and tags its operators as AOTAutograd does when it traces into one.

    The partitioner recomputes in the backward what carries ``recompute`` (a policy) and ``ac_graph_id``
    (which body). A selective policy speaks of the operators below this level: an operator that decomposes
    into several is saved if the policy saves one of them.
    """

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__(body)
        self._graph_id = next(wrap.uid)
        self._policy_fn = _selective_policy(body)

    def run_node(self, n: fx.Node) -> Any:
        graph = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
        before = len(graph.nodes)
        with _Policies(self._policy_fn) as policies:
            result = super().run_node(n)
        for node in itertools.islice(reversed(graph.nodes), len(graph.nodes) - before):
            if node.op == "call_function" and "ac_graph_id" not in node.meta:  # the innermost body wins
                node.meta["ac_graph_id"] = self._graph_id
                node.meta["recompute"] = policies.strongest()
        return result


def _selective_policy(body: fx.GraphModule) -> Callable[..., Any] | None:
    context_fn = body.meta.get("_checkpoint_context_fn")
    if context_fn is None:
        return None
    forward_context, _ = context_fn()
    policy_fn = getattr(forward_context, "policy_fn", None)
    if policy_fn is None:
        kind = type(forward_context).__name__
        raise CaptureError(f"checkpoint with a context_fn that is not a selective policy: {kind}")
    return policy_fn


class _Policies(TorchDispatchMode):
    """Asks a selective-checkpoint policy about every operator run inside."""

    _SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

    def __init__(self, policy_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self._policy_fn = policy_fn
        self._seen: list[CheckpointPolicy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._policy_fn is not None and func not in SAC_IGNORED_OPS:
            context = SelectiveCheckpointContext(is_recompute=False)
            context.op_output = out
            policy = self._policy_fn(context, func, *args, **(kwargs or {}))
            if isinstance(policy, bool):
                policy = CheckpointPolicy.MUST_SAVE if policy else CheckpointPolicy.PREFER_RECOMPUTE
            self._seen.append(policy)
        return out

    def strongest(self) -> CheckpointPolicy:
        for policy in (*self._SAVE, CheckpointPolicy.MUST_RECOMPUTE):
            if policy in self._seen:
                return policy
        return CheckpointPolicy.PREFER_RECOMPUTE
