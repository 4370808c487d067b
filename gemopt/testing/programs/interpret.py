"""The rewriter without Dynamo: trace a model to pre-dispatch ATen, run the pipeline, interpret the packed graph.

Dynamo and an inner compiler take most of the seconds of a compilation and have tests of their own. What is traced here is
what ``gemopt.graph.capture`` makes of Dynamo's graph: the same operators over symbolic sizes, every size of an input but 0
and 1 a symbol of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gemopt.graph.capture import Captured, _ambient_autocast, reached
from gemopt.recipe import Recipe
from gemopt.report import Report


class Interpreted:
    """Runs ``model(**kwargs)`` packed wherever the plan's assumptions hold, and as it is elsewhere.

    Traced at the first call; with ``static`` for the sizes of that call only, and anew for others. ``report`` is filled as
    ``gemopt.compile`` would.
    """

    def __init__(self, model: nn.Module, pipeline: Any, recipe: Recipe, static: bool = False) -> None:
        self.model, self.pipeline, self.recipe, self.static = model, pipeline, recipe, static
        self.report = Report(type(model).__name__)
        self.captured: Captured | None = None
        self.plan: Any = None

    def __call__(self, **kwargs: Any) -> Any:
        state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        leaves, spec = pytree.tree_flatten((state, kwargs))
        if self.captured is None or not self._fits(leaves):
            self._trace(leaves, spec)
        graph = self.report[-1]
        if self.plan is None:
            return self.model(**kwargs)
        with torch.no_grad():
            stats, *tensors = self.plan.prologue(*leaves)
            extra = self.plan.admit(stats.tolist(), tensors)
        if extra is None:
            graph.count_step(False, self.plan.last_reason)
            return self.model(**kwargs)
        graph.count_step(True)
        return pytree.tree_unflatten(list(self.plan.packed(*leaves, *extra)), self._out_spec)

    def _fits(self, leaves: list[Any]) -> bool:
        """Whether the sizes satisfy what the trace assumed of them; Dynamo would compile again where they do not."""
        assert self.captured is not None
        if self.static:
            known = self.captured.example_inputs
            return all(list(x.shape) == list(y.shape) for x, y in zip(known, leaves, strict=True) if isinstance(x, Tensor))
        env = self.captured.fake_mode.shape_env
        return bool(
            env is not None and env.evaluate_guards_for_args(self.captured.example_inputs, leaves, ignore_static=False)
        )

    def _trace(self, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), static_shapes=False)
        fakes = [_fake(x, mode, ConstantSource(f"leaf{i}"), self.static) for i, x in enumerate(leaves)]

        def function(*flat: Any) -> list[Any]:
            state, kwargs = pytree.tree_unflatten(list(flat), spec)
            result = torch.func.functional_call(self.model, state, (), kwargs)
            made, self._out_spec = pytree.tree_flatten(result)
            return made

        cache = torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(False)  # it would keep casts of fake weights
            with mode:
                traced = make_fx(function, pre_dispatch=True)(*[_alias(x) for x in fakes])
        finally:
            torch.set_autocast_cache_enabled(cache)
        traced.meta["ambient_grad"] = True
        names = [n.name for n in traced.graph.find_nodes(op="placeholder")]
        outputs = [f"output[{i}]" for i in range(self._out_spec.num_leaves)]
        casts, trained = _ambient_autocast(leaves), reached(traced, fakes)
        self.captured = Captured(traced, fakes, names, outputs, True, mode, list(leaves), casts, trained)
        self.plan = self.pipeline(self.captured, self.recipe, self.report.new_graph(mode="train"))

    @property
    def graph(self) -> fx.Graph | None:
        """The traced graph."""
        return self.captured.gm.graph if self.captured is not None else None


def _fake(x: Any, mode: FakeTensorMode, source: ConstantSource, static: bool) -> Any:
    if not isinstance(x, Tensor):
        return x
    dynamic = not static and not isinstance(x, nn.Parameter) and x.dim() > 0
    sizes = [DimDynamic.DYNAMIC if dynamic and n > 1 else DimDynamic.STATIC for n in x.shape]
    return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes), source=source)


def _alias(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
