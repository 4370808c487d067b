"""The Dynamo backend: capture, pipeline, and the host that runs packed or padded.

    Dynamo graph ── capture ── pipeline ──┬── None: the Dynamo graph itself goes to the inner compiler
                                          └── Plan: prologue, packed graph; the padded graph when first needed
                                          (at once, where Dynamo cannot trace it again)

At run time the prologue computes the packed size and the assumption bits, the host reads them in one
transfer, and ``Plan.admit`` decides. Where the packed size is the size of an input, the host does not wait for
that transfer: it launches first and looks at the figures afterwards. The padded graph is the user's own,
compiled as plain ``torch.compile`` would.
"""

from __future__ import annotations

import copy
import importlib.metadata
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._dynamo.source import ConstantSource
from torch.fx._lazy_graph_module import _LazyGraphModule

from gemopt import dynamo
from gemopt.graph.capture import Captured, CaptureError, adopt_placeholder, capture, trains
from gemopt.graph.totals import Later
from gemopt.recipe import Recipe

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

# A torch that has it can trace the autocast switches of a graph that Dynamo wrote.
_TRACES_AUTOCAST = hasattr(torch.amp.autocast_mode, "_UnmanagedAutocast")
PLAIN = "the graph runs as under torch.compile"


def inner_compiler(
    kind: str,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = True,
    name: str | None = None,
) -> Compiler:
    """The inner compiler ``kind`` with torch.compile's other arguments, mapped as torch.compile maps them.

    Raises:
        ValueError: mode and options are both given, or one is given for a compiler that takes none.
    """
    if mode is not None and options is not None:
        raise ValueError(f"mode, options: got {mode!r} and {options!r}; allowed: one of them")
    if kind == "inductor":
        mode = mode or (None if options else "default")
        return torch._TorchCompileInductorWrapper(mode, options, dynamic, *([name] if name else []))
    if options or mode not in (None, "default"):
        raise ValueError(f'mode, options: got {mode!r}, {options!r}; allowed with inner="inductor" only')
    return lookup_backend(kind)


def load_pipeline(name: str) -> Callable[..., Any]:
    """The pipeline called ``name`` in the entry point group ``gemopt.pipelines``.

    Raises:
        ValueError: there is none of that name; the message lists those there are.
    """
    points = {point.name: point for point in importlib.metadata.entry_points(group="gemopt.pipelines")}
    if name in points:
        return points[name].load()
    if name == "default":  # a plain checkout has no metadata
        from gemopt.passes import default_pipeline

        return default_pipeline
    raise ValueError(f"pipeline: got {name!r}; allowed: a callable or one of {sorted({'default', *points})}")


class CompileError(RuntimeError):
    """An internal error under ``strict=True``. A type of its own, because Dynamo turns some errors of a
    backend (those
    of fake tensors) into a graph break."""


class GemoptBackend:
    """A backend for ``torch.compile``: ``backend(gm, example_inputs) -> callable``.

    Two backends are never equal, so that each compiled model has a report of its own.

    Args:
        recipe: what to do.
        report: a :class:`gemopt.Report`; gets one GraphReport for every graph Dynamo hands over.
        inner: compiles the rewritten graph, and the graph as it is where nothing is rewritten.
        dynamic: what the frames are compiled with.
    """

    compiler_name = "gemopt"

    def __init__(
        self,
        recipe: Recipe,
        report: Any,
        inner: Compiler,
        *,
        dynamic: bool | None = True,
    ) -> None:
        self.recipe = recipe
        self.report = report
        self.dynamic = dynamic
        self.inner = inner
        self.pipeline = load_pipeline(recipe.pipeline) if isinstance(recipe.pipeline, str) else recipe.pipeline

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report = self.new_report(example_inputs)
        dynamo.share_fakes(gm)
        planned = self.plan(gm, example_inputs, report)
        if planned is None:
            return self.inner(gm, example_inputs)
        try:
            return self._compile_plan(gm, *planned, report)
        except (RestartAnalysis, SkipFrame):
            raise  # Dynamo's own control flow
        except Exception as error:
            self._degrade(error, report)
            return self.inner(gm, example_inputs)

    def new_report(self, example_inputs: Sequence[Any]) -> Any:
        """A GraphReport for the graph at hand."""
        return self.report.new_graph(mode="train" if trains(example_inputs) else "inference")

    def get_compiler_config(self) -> Any:
        """What ``compiled.get_compiler_config()`` shows: the inner compiler's configuration."""
        get = getattr(self.inner, "get_compiler_config", None)
        return get() if get is not None else None

    def reset(self) -> None:
        """Called by ``torch.compiler.reset()``."""
        getattr(self.inner, "reset", lambda: None)()

    def plan(self, gm: fx.GraphModule, example_inputs: list[Any], report: Any) -> tuple[Captured, Any] | None:
        """Capture and pipeline; None (and a reason in the report) where the graph runs as it is."""
        try:
            captured = capture(gm, example_inputs)
            if _is_empty(captured):
                report.nothing("an input has no elements")
                return None
            plan = self.pipeline(captured, self.recipe, report)
        except CaptureError as error:
            report.reject("graph", "capture", reason=str(error), hint=PLAIN)
            return None
        except Exception as error:
            self._degrade(error, report)
            return None
        return None if plan is None else (captured, plan)

    def _degrade(self, error: Exception, report: Any) -> None:
        """An internal error: raise it under strict, else record it, warn, and let the graph run as it is."""
        if self.recipe.strict:
            reason = traceback.format_exception_only(error)[-1].strip()
            raise CompileError(f"gemopt: {reason} ({_where(error)})") from error  # Dynamo cuts the traceback off
        reason = f"{_first_line(error)} ({_where(error)})"
        report.discard_rewrites()
        report.reject("graph", "internal error", reason=reason, hint=f"{PLAIN}; strict=True raises this error")
        warnings.warn(f"gemopt: internal error, {PLAIN}: {reason}", RuntimeWarning, stacklevel=2)

    def _compile_plan(self, gm: fx.GraphModule, captured: Captured, plan: Any, report: Any) -> Callable[..., Any]:
        prologue = self._compile_prologue(captured, plan)
        adopt(plan.packed, gm)
        plan.vouches = not _replays(self.inner)
        packed = _for_packed(self.inner, plan)(plan.packed, [*captured.example_inputs, *plan.extra_examples])
        padded = LazyPadded(gm, self.inner, self.dynamic) if _retraceable(gm) else self.inner(gm, captured.real_inputs)
        return Host(prologue, packed, padded, plan, report, size_symbols(captured))

    def _compile_prologue(self, captured: Captured, plan: Any) -> Callable[..., Any]:
        if self.recipe.inner != "inductor":
            return plan.prologue.forward
        with torch.no_grad():
            # Default mode whatever the user's: under CUDA graphs the next prologue would overwrite the
            # indices that this step's backward still reads.
            return inner_compiler("inductor")(plan.prologue, list(captured.example_inputs))


def _first_line(error: Exception) -> str:
    """``KeyError: 'x'``; what torch adds to an error below that (the node, the stack, where to look) is left out."""
    text = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {text[0].strip()}" if text else name


def _where(error: Exception) -> str:
    """``gemopt/graph/rowsets.py:90 in of``: the innermost line of gemopt's that an error went through, else of any code."""
    package = Path(__file__).resolve().parent
    frames = traceback.extract_tb(error.__traceback__)
    roots = (package, (package / "passes").resolve())
    for frame in reversed(frames):
        path = Path(frame.filename).resolve()
        for root in roots:
            if path.is_relative_to(root):
                return f"{path.relative_to(root.parent)}:{frame.lineno} in {frame.name}"
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "no traceback"


def _for_packed(inner: Compiler, plan: Any) -> Compiler:
    """`inner` for a graph whose row counts are no numbers.

    The inductor of torch 2.11 merges the two reductions of a norm's backward (a third faster on an H200), and then fails to
    choose how finely to split them. The choice made here is by its own rule, from the counts that are likely.
    """
    if not isinstance(inner, torch._TorchCompileInductorWrapper):
        return inner
    parts = max(getattr(plan, "likely_rows", ()), default=0) // _INDUCTOR_PARTS
    split = min(max(1 << max(parts.bit_length() - 1, 0), 16), 128)
    inner = copy.copy(inner)
    inner.config = {"triton.mix_order_reduction_split_size": split, **inner.config}
    return inner


def _replays(inner: Compiler) -> bool:
    """Whether what `inner` compiles runs as CUDA graphs."""
    from torch._inductor import config

    return bool(getattr(inner, "config", {}).get("triton.cudagraphs", config.triton.cudagraphs))


def _is_empty(captured: Captured) -> bool:
    """Whether Dynamo specialised some size to 0: there is nothing to pack, and inductor refuses."""
    return any(
        isinstance(x, torch.Tensor) and any(type(s) is int and s == 0 for s in x.shape) for x in captured.example_inputs
    )


def adopt(gm: fx.GraphModule, dynamo_gm: fx.GraphModule) -> None:
    """Make ``gm`` known to AOTAutograd as a graph of Dynamo's: compile id, sources, static inputs."""
    theirs = dynamo_gm.graph.find_nodes(op="placeholder")
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        adopt_placeholder(node, theirs[i] if i < len(theirs) else None)
    for key in ("dynamo_compile_id", "dynamo_flat_name_to_original_fqn"):
        if key in dynamo_gm.meta:
            gm.meta[key] = dynamo_gm.meta[key]
    # Literals of the user's code (`torch.tensor(1.0)`, `x[i] = 1`) are buffers of the retraced graph.
    constants = (*gm.named_parameters(), *gm.named_buffers())
    gm._param_name_to_source = {name: ConstantSource(name) for name, _ in constants}  # type: ignore[assignment]


_INDUCTOR_PARTS = 1056  # parts of a split reduction, eight for each multiprocessor of an H100 or H200
_READS_AFTER_A_MISS = 100


class Host:
    """What Dynamo's generated code calls: prologue, one read, then the packed graph or the padded one.

    Attributes:
        ahead: launch the packed graph before the read where the plan expects its sizes (graph/totals.py); None:
            where the figures are on an accelerator, since elsewhere a read costs nothing.
        unread_steps: how many steps ran without waiting for a read.
    """

    ahead: bool | None = None

    def __init__(
        self,
        prologue: Callable[..., Any],
        packed: Callable[..., Any],
        padded: Callable[..., Any],
        plan: Any,
        report: Any,
        sizes: Sequence[tuple[str, int, int | None]] = (),
    ) -> None:
        self._prologue = prologue
        self._packed = packed
        self._padded = padded
        self._plan = plan
        self._report = report
        self._sizes = sizes
        self._expects = bool(getattr(plan, "expected", None))
        self._reads_due = 0
        self.unread_steps = 0

    def __call__(self, *args: Any) -> Any:
        with torch.no_grad():
            stats, *tensors = self._prologue(*args)
        if self._expects:
            done, result, figures = self._run_ahead(args, stats, tensors)
            if done:
                return result
        else:
            figures = stats.tolist()  # the only device-to-host read of the step
        extra = self._decide(args, figures, tensors)
        if extra is None:
            self._report.count_step(False, self._plan.last_reason)
            return self._padded(*args)
        self._report.count_step(True)
        return self._packed(*args, *extra)

    def admit(self, args: Sequence[Any]) -> Sequence[Any] | None:
        """Run the prologue, tell the report the sizes seen, and let the plan decide."""
        with torch.no_grad():
            stats, *tensors = self._prologue(*args)
        return self._decide(args, stats.tolist(), tensors)

    def _decide(self, args: Sequence[Any], figures: list[int], tensors: Sequence[Any]) -> Sequence[Any] | None:
        with torch.no_grad():
            extra = self._plan.admit(figures, tensors)
        self._saw(args)
        return extra

    def _saw(self, args: Sequence[Any]) -> None:
        seen = {name: args[i] if dim is None else args[i].shape[dim] for name, i, dim in self._sizes}
        self._report.saw({**seen, **getattr(self._plan, "last_counts", {})})

    def _run_ahead(self, args: Sequence[Any], stats: Any, tensors: Sequence[Any]) -> tuple[bool, Any, list[int]]:
        """Launch for the sizes expected, then look at the figures: whether they confirm it, the result, the figures.

        After a miss the next steps read first: lengths that are cut once will be cut again.
        """
        ahead = stats.is_cuda if self.ahead is None else self.ahead
        if self._reads_due or not ahead:
            self._reads_due = max(0, self._reads_due - 1)
            return False, None, stats.tolist()
        with torch.no_grad():
            later, extra = Later(stats), self._plan.expect(tensors)
        if extra is None:
            return False, None, later.read()
        result, error = None, None
        try:
            result = self._packed(*args, *extra)
        except Exception as raised:
            error = raised
        figures = later.read()
        if not self._plan.confirm(figures, tensors):
            self._reads_due = _READS_AFTER_A_MISS
            return False, None, figures
        if error is not None:
            raise error
        self.unread_steps += 1
        self._saw(args)
        self._report.count_step(True)
        return True, result, figures


def size_symbols(captured: Captured) -> list[tuple[str, int, int | None]]:
    """Where to read each size symbol: (symbol, placeholder, dim), dim None for a SymInt itself."""
    found: dict[str, tuple[str, int, int | None]] = {}
    for i, x in enumerate(captured.example_inputs):
        sizes = enumerate(x.shape) if isinstance(x, torch.Tensor) else ((None, x),)
        for dim, size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                name = str(size.node.expr)
                if name not in found or dim is None:
                    found[name] = (name, i, dim)
    return list(found.values())


def _retraceable(gm: fx.GraphModule) -> bool:
    """Whether Dynamo can trace the graph again: torch 2.11 cannot if it switches autocast."""
    return _TRACES_AUTOCAST or not any(n.target is torch.amp.autocast_mode._enter_autocast for n in gm.graph.nodes)


class LazyPadded:
    """The user's graph as plain torch.compile would run it, compiled when a step first needs it.

    Many runs never do. It is compiled by a torch.compile of its own, not by calling the inner compiler late:
    the shape guards of the frame are closed by then, and those that the inner compiler adds would be lost.
    """

    def __init__(self, gm: fx.GraphModule, inner: Compiler, dynamic: bool | None) -> None:
        self._gm = gm
        self._inner = inner
        self._dynamic = dynamic
        self._lock = threading.Lock()
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        compiled = self._compiled
        if compiled is None:
            with self._lock:
                if self._compiled is None:
                    _LazyGraphModule.force_recompile(self._gm)  # else Dynamo traces how its code is generated
                    self._compiled = dynamo.optimize(self._gm.forward, self._inner, dynamic=self._dynamic)
                compiled = self._compiled
        with dynamo.default_stance():  # "fail_on_recompile" around the call is about the user's frames
            return compiled(*args)
