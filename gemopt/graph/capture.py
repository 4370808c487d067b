"""Capture: the Dynamo graph, retraced to pre-dispatch ATen inside the Dynamo backend.

Why this level. A Dynamo graph is Python: ``q @ k``, ``torch.matmul`` and ``q.matmul`` are three targets, and indices hide
``unsqueeze``. A joint graph is already differentiated and decomposed. In between, *pre-dispatch* ATen has one spelling per
operator, keeps composite operators whole (``aten.linear``, ``aten.matmul``, ``aten.softmax.int``, ``aten.layer_norm``), and
is not yet differentiated: a rewrite to an operator with its own backward is differentiated by autograd afterwards.

What the retrace keeps: the symbols of Dynamo's ShapeEnv (so that guards hold for the rewritten graph too), source lines
and module paths, autocast and grad-mode switches as ordered nodes, and the recompute tags of checkpointed bodies.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.fx.traceback as fx_traceback
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast, _UnmanagedAutocast
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class CaptureError(Exception):
    """The graph holds something that the pre-dispatch level cannot express; ``str(e)`` says what.

    Not a defect: the backend compiles such a graph as plain ``torch.compile`` would and reports a rejection.
    """


@dataclass
class Captured:
    """A pre-dispatch ATen graph and its inputs, in placeholder order.

    Attributes:
        gm: the graph. Every node has ``meta["val"]`` (a FakeTensor, SymInt, or None for mode switches) and, where Dynamo
            knew them, ``stack_trace`` and ``nn_module_stack``. Nodes of checkpointed bodies have ``meta["recompute"]``
            and ``meta["ac_graph_id"]``.
        example_inputs: FakeTensors of ``fake_mode`` and SymInts, one per placeholder; ``requires_grad`` is the caller's.
        input_names: user-level names: ``"ids"``, ``"self.embedding.weight"``; the placeholder's own where unknown.
        output_names: ``"output[0]"``, ... in the order of the graph's flat outputs.
        is_training_graph: grad mode was on and some input requires grad.
        fake_mode: the fake mode of the compilation; its ``shape_env`` owns the symbols.
        real_inputs: what Dynamo handed over: tensors with data, and SymInts. Read them, never write them.
    """

    gm: fx.GraphModule
    example_inputs: list[Any]
    input_names: list[str]
    output_names: list[str]
    is_training_graph: bool
    fake_mode: FakeTensorMode
    real_inputs: list[Any] = field(repr=False)


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """Retrace a Dynamo graph to pre-dispatch ATen. Call it inside a Dynamo backend, before the inner compiler.

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
        retraced = make_fx(lambda *args: _Retrace(gm).run(*args), pre_dispatch=True)(*map(_trace_copy, fakes))
    names = _adopt_placeholders(retraced, gm)
    training = torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs
    )
    outputs = retraced.graph.output_node().args[0]
    count = len(outputs) if isinstance(outputs, (tuple, list)) else 1
    return Captured(
        gm=retraced,
        example_inputs=fakes,
        input_names=names,
        output_names=[f"output[{i}]" for i in range(count)],
        is_training_graph=training,
        fake_mode=fake_mode,
        real_inputs=list(example_inputs),
    )


def regions(gm: fx.GraphModule) -> dict[fx.Node, tuple]:
    """The autocast and grad-mode region of every node.

    Returns:
        ``{node: (grad, autocast, ...)}``. Two nodes have equal tuples exactly if the same switches are in force at both.
        ``grad`` is True, False, or None for the mode the graph was called in; each further entry is the argument tuple of
        an autocast block that is open there, outermost first. A switch belongs to the region it opens or closes into.
    """
    grad: bool | None = None
    casts: list[tuple[fx.Node, tuple]] = []
    result: dict[fx.Node, tuple] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            if node.target is torch._C._set_grad_enabled:
                grad = bool(node.args[0])
            elif node.target is _enter_autocast:
                casts.append((node, tuple(map(str, node.args))))
            elif node.target is _exit_autocast:
                casts = [c for c in casts if c[0] is not node.args[0]]
        result[node] = (grad, *(args for _, args in casts))
    return result


# ---------------------------------------------------------------------------------------------------- inputs


def _fake_mode() -> FakeTensorMode:
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise RuntimeError("capture() must be called inside a Dynamo backend: there is no tracing context")
    return context.fake_mode


def _to_fake(x: Any, fake_mode: FakeTensorMode) -> Any:
    """The FakeTensor that AOTAutograd would make of ``x``: same mode, same symbols as in Dynamo's guards."""
    if not isinstance(x, torch.Tensor):
        return x
    context = TracingContext.try_get()
    symbolic = context.tensor_to_context.get(x) if context is not None else None
    source = symbolic.tensor_source if symbolic is not None else None
    return fake_mode.from_tensor(x, symbolic_context=symbolic, source=source, trace=False)


def _trace_copy(x: Any) -> Any:
    """An alias of a fake input with an autograd history of its own.

    ``from_tensor`` memoises: an in-place operator run on the memoised fake itself would leave a ``grad_fn`` on the very
    object that the inner compiler receives as a leaf afterwards.
    """
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def _refuse_inexpressible(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "call_module":
            raise CaptureError(f"the graph calls module {node.target!r} instead of holding its operators")
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
        name = _input_name(other)
        names.append(name)
        identifier = re.sub(r"\W+", "_", name).strip("_") or other.name
        if not identifier[0].isalpha():
            identifier = f"input_{identifier}"
        mine._rename(identifier)
        mine.target = mine.name
    retraced.recompile()
    return names


def adopt_placeholder(mine: fx.Node, other: fx.Node | None) -> None:
    """Copy what AOTAutograd reads from Dynamo's placeholders: source (guards) and static-input marks (CUDA graphs)."""
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
    name = source.name if isinstance(source.name, str) else source.name()  # a method up to torch 2.11
    for pattern, replacement in _SOURCE_STEPS:
        name = pattern.sub(replacement, name)
    return name or node.name


# ---------------------------------------------------------------------------------------------------- the retrace


class _Retrace(PropagateUnbackedSymInts):
    """Runs a Dynamo graph under ``make_fx``; the two things that do not retrace by themselves are done by hand."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self._open_autocasts: dict[Any, _UnmanagedAutocast] = {}

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target is _enter_autocast:
            return self._enter_autocast(args)
        if target is _exit_autocast:
            args[0].__exit__(None, None, None)  # emits the _exit_autocast node
            return None
        if isinstance(target, torch._ops.HigherOrderOperator):
            if target is torch.ops.higher_order.tag_activation_checkpoint:
                return self._inline_checkpoint(*args, **kwargs)
            raise CaptureError(f"the graph holds higher-order operator {target.name()!r}")
        return super().call_function(target, args, kwargs)

    @staticmethod
    def _enter_autocast(args: tuple) -> _UnmanagedAutocast:
        # Calling _enter_autocast under make_fx only writes the node. Entering the context also writes it, and puts
        # autocast in force, so that the metas of the operators inside show the dtypes they will really have.
        mode = _UnmanagedAutocast(*args)
        mode.__enter__()
        torch.set_autocast_cache_enabled(False)  # else the cache would keep casts of fake weights
        return mode

    def _inline_checkpoint(self, body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return _CheckpointBody(body).run(*args)


class _CheckpointBody(_Retrace):
    """Inlines a checkpointed body and tags its operators as AOTAutograd's own handling of the operator would.

    The partitioner recomputes in the backward what carries ``recompute`` and ``ac_graph_id``.
    """

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__(body)
        from torch._higher_order_ops.wrap import uid

        self._graph_id = next(uid)

    def run_node(self, n: fx.Node) -> Any:
        with _new_nodes() as new:
            result = super().run_node(n)
        from torch.utils.checkpoint import CheckpointPolicy

        for node in new:
            if node.op == "call_function" and "ac_graph_id" not in node.meta:
                node.meta["ac_graph_id"] = self._graph_id
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        return result


@contextmanager
def _new_nodes() -> Iterator[list[fx.Node]]:
    """A list that holds, at exit, the nodes the current ``make_fx`` wrote inside the block."""
    mode = get_proxy_mode()
    assert mode is not None
    graph = mode.tracer.graph
    before = len(graph.nodes)
    new: list[fx.Node] = []
    yield new
    new.extend(itertools.islice(reversed(graph.nodes), len(graph.nodes) - before))
