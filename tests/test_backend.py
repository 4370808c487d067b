"""The backend and its host, with a plan made by hand: the rows ``mask`` keeps, the layers, put back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import gemopt
from gemopt import Recipe
from gemopt.backend import Host, LazyPadded, inner_compiler, load_pipeline, size_symbols

aten = torch.ops.aten
D = 8


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


class Layers(nn.Module):
    def __init__(self, n: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(n))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.body(x) * mask.unsqueeze(-1)


class Checkpointed(Layers):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().body, x, use_reentrant=False)


class HandPlan:
    """The plan of `Layers`; ``run_padded`` makes it choose the padded graph."""

    def __init__(self, captured: Any, break_packed: bool = False) -> None:
        self.run_padded = False
        self.last_reason = ""
        self.last_counts: dict[str, int] = {}
        names = captured.input_names
        x_at, mask_at = names.index("x"), names.index("mask")
        weights = [i for i, name in enumerate(names) if name.startswith("self.layers")]

        def prologue(*args: Any) -> tuple[torch.Tensor, ...]:
            flat = args[mask_at].reshape(-1)
            return flat.sum().reshape(1), flat.logical_not().argsort(stable=True)

        def packed(*args: Any) -> tuple[torch.Tensor, ...]:
            x, index = args[x_at], args[-1]
            b, l, d = x.shape
            h = x.reshape(b * l, d).index_select(0, index)
            for i in range(0, len(weights), 2):
                h = torch.relu(nn.functional.linear(h, args[weights[i]], args[weights[i + 1]]))
            if break_packed:
                h = h.view(3, -1)
            return (h.new_zeros(b * l, d).index_copy(0, index, h).reshape(b, l, d),)

        mode, env = captured.fake_mode, captured.fake_mode.shape_env
        with mode, env.ignore_fresh_unbacked_symbols():
            rows = env.create_unbacked_symint()
            torch._check(rows >= 0)
            self.extra_examples = [torch.empty(rows, dtype=torch.int64)]
        with mode:
            with torch.no_grad():
                self.prologue = make_fx(prologue, pre_dispatch=True)(*captured.example_inputs)
            inputs = [*captured.example_inputs, *self.extra_examples]
            if break_packed:
                self.packed = fx.symbolic_trace(lambda *args: (torch.ones(3) @ torch.ones(4),))
            else:
                self.packed = make_fx(packed, pre_dispatch=True)(*inputs)

    def admit(self, stats: list[int], tensors: list[torch.Tensor]) -> tuple | None:
        self.last_counts = {"rows": stats[0]}
        if self.run_padded:
            self.last_reason = "asked for"
            return None
        return (tensors[0][: stats[0]],)


class Planner:
    def __init__(self, **kwargs: Any) -> None:
        self.plans: list[HandPlan] = []
        self.kwargs = kwargs

    def __call__(self, captured: Any, recipe: Recipe, report: Any) -> HandPlan:
        self.plans.append(HandPlan(captured, **self.kwargs))
        return self.plans[-1]

    def run_padded(self, value: bool) -> None:
        for plan in self.plans:
            plan.run_padded = value


def check(compiled: Callable[..., Any], model: nn.Module, b: int, l: int, fill: float) -> None:
    """Outputs and gradients of one step equal eager's in fp64."""
    x = torch.randn(b, l, D, requires_grad=True)
    mask = torch.rand(b, l) < fill
    leaves = [x, *model.parameters()]
    out = compiled(x, mask)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    h = wide[0]
    for weight, bias in zip(wide[1::2], wide[2::2], strict=True):
        h = torch.relu(h @ weight.T + bias)
    expected = h * mask.unsqueeze(-1)
    expected_grads = torch.autograd.grad(expected.square().sum(), wide)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    for grad, reference in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.double(), reference, rtol=1e-4, atol=1e-5)


SHAPES = ((4, 4), (3, 5), (7, 2), (2, 9), (1, 4), (4, 1), (0, 4), (5, 5))
FILLS = (0.0, 0.5, 1.0)


@pytest.mark.slow
def test_inductor_trains_like_eager() -> None:
    planner, model = Planner(), Layers()
    compiled = gemopt.compile(model, recipe=Recipe(pipeline=planner, inner="inductor", strict=True))
    for run_padded in (False, True, False):
        planner.run_padded(run_padded)
        for b, l in SHAPES[:4]:
            for fill in FILLS:
                check(compiled, model, b, l, fill)
    assert len(planner.plans) == len(compiled.report) == 1


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_packed_and_padded_train_like_eager(inner: str) -> None:
    planner, model = Planner(), Layers()
    compiled = gemopt.compile(model, recipe=Recipe(pipeline=planner, inner=inner, strict=True))
    for run_padded in (False, True, False):
        planner.run_padded(run_padded)
        for b, l in SHAPES:
            for fill in FILLS:
                check(compiled, model, b, l, fill)
    assert len(planner.plans) == 3 and len(compiled.report) == 4  # sizes 0 and 1, nothing to plan for 0
    main = compiled.report[0]
    assert main.steps_packed == 30 and main.steps_padded == {"asked for": 15}
    assert set(main.last.values()) >= {5.0} and "rows" in main.last


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(2, 6), st.integers(2, 6), st.floats(0, 1), st.booleans())
def test_any_fill(b: int, l: int, fill: float, run_padded: bool) -> None:
    planner, model, compiled = _shared()
    planner.run_padded(run_padded)
    check(compiled, model, b, l, fill)
    assert len(planner.plans) == 1


_shared_state: list[Any] = []


def _shared() -> Any:
    if not _shared_state:
        planner, model = Planner(), Layers()
        recipe = Recipe(pipeline=planner, inner="aot_eager", strict=True)
        _shared_state.append((planner, model, gemopt.compile(model, recipe=recipe)))
    return _shared_state[0]


@pytest.mark.parametrize("kind", [Layers, Checkpointed])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_padded_graph_compiles_late_and_once(kind: type[Layers], autocast: bool) -> None:
    planner, model = Planner(), kind()
    recipe = Recipe(pipeline=planner, inner="aot_eager", strict=True)
    compiled = gemopt.compile(model, recipe=recipe, fullgraph=True)
    x, mask = torch.randn(3, 5, D), torch.rand(3, 5) < 0.5
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        packed = compiled(x, mask)
        graphs = counters["stats"]["unique_graphs"]
        planner.run_padded(True)
        padded, expected = compiled(x, mask), model(x, mask)
        for b, l in ((4, 4), (6, 3)):
            compiled(torch.randn(b, l, D), torch.ones(b, l, dtype=torch.bool)).sum().backward()
    assert padded.dtype == packed.dtype == expected.dtype
    torch.testing.assert_close(padded, expected)
    torch.testing.assert_close(packed, expected, rtol=0.05 if autocast else 1e-5, atol=0.05 if autocast else 1e-6)
    assert (graphs, counters["stats"]["unique_graphs"]) == (1, 2)
    assert len(planner.plans) == 1


def test_without_grad() -> None:
    planner, model = Planner(), Layers()
    compiled = gemopt.compile(model, recipe=Recipe(pipeline=planner, inner="aot_eager", strict=True))
    x, mask = torch.randn(3, 5, D), torch.rand(3, 5) < 0.5
    for run_padded in (False, True):
        planner.run_padded(run_padded)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                out = compiled(x, mask)
            assert not out.requires_grad
            torch.testing.assert_close(out, model(x, mask).detach())
    assert compiled.report[0].mode == "inference"


def test_without_a_plan_the_inner_compiler_gets_dynamos_own_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    given_: list[Any] = []
    real: list[Any] = []

    def inner(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        given_.append((gm, inputs))
        return gm.forward

    def pipeline(captured: Any, recipe: Recipe, report: Any) -> None:
        real.extend(captured.real_inputs)

    compiled = gemopt.compile(Layers(), recipe=Recipe(pipeline=pipeline, inner="eager", strict=True))
    backend = torch._dynamo.eval_frame.innermost_backend(compiled.dynamo_ctx.callback)
    backend.inner = inner
    compiled(torch.randn(3, 5, D), torch.ones(3, 5, dtype=torch.bool))
    ((gm, inputs),) = given_
    assert any(node.target is torch.relu for node in gm.graph.nodes)  # Dynamo's level, not ATen
    assert all(a is b for a, b in zip(inputs, real, strict=True))


def test_a_packed_graph_that_does_not_compile_degrades_loudly() -> None:
    model, args = Layers(), (torch.randn(3, 5, D), torch.ones(3, 5, dtype=torch.bool))
    compiled = gemopt.compile(model, recipe=Recipe(pipeline=Planner(break_packed=True), inner="aot_eager"))
    with pytest.warns(RuntimeWarning, match="internal error"):
        torch.testing.assert_close(compiled(*args), model(*args))
    assert [r.rule for r in compiled.report.rejections] == ["internal error"]
    strict = gemopt.compile(model, recipe=Recipe(pipeline=Planner(break_packed=True), inner="aot_eager", strict=True))
    with pytest.raises(Exception, match="gemopt: RuntimeError"):
        strict(*args)


def test_explain_evaluates_the_prologue_once() -> None:
    planner = Planner()
    mask = torch.arange(5)[None] < torch.tensor([5, 0, 2])[:, None]
    report = gemopt.explain(Layers(), torch.randn(3, 5, D), mask, recipe=Recipe(pipeline=planner))
    assert planner.plans[0].last_counts == {"rows": 7}
    assert report[0].last["rows"] == 7 and {3.0, 5.0} <= set(report[0].last.values())
    assert report.steps_packed == 0 and report.steps_padded == {}


# ------------------------------------------------------------------------------------------------ the parts


class Recorder:
    """A report and a plan in one, for the host alone."""

    last_reason = "because"

    def __init__(self, extra: tuple | None) -> None:
        self.extra = extra
        self.log: list[Any] = []

    def admit(self, stats: list[int], tensors: list[Any]) -> tuple | None:
        self.log.append(("admit", stats, tensors, torch.is_grad_enabled()))
        return self.extra

    def saw(self, values: dict[str, float]) -> None:
        self.log.append(("saw", values))

    def count_step(self, packed: bool, reason: str | None = None) -> None:
        self.log.append(("step", packed, reason))


class OneRead:
    reads = 0

    def tolist(self) -> list[int]:
        self.reads += 1
        return [4, 1]


@pytest.mark.parametrize("extra", [("e",), None])
def test_the_host_reads_once(extra: tuple | None) -> None:
    stats, both = OneRead(), Recorder(extra)
    host = Host(
        prologue=lambda *args: (stats, "t"),
        packed=lambda *args: ("packed", args),
        padded=lambda *args: ("padded", args),
        plan=both,
        report=both,
        sizes=[("s0", 0, None), ("s1", 1, 0)],
    )
    x = torch.ones(6)
    result = host(2, x)
    assert stats.reads == 1
    assert result == (("packed", (2, x, "e")) if extra else ("padded", (2, x)))
    assert both.log[0] == ("admit", [4, 1], ["t"], False)
    assert both.log[1] == ("saw", {"s0": 2, "s1": 6})
    assert both.log[2] == ("step", bool(extra), None if extra else "because")


def test_host_overhead() -> None:
    report = gemopt.Report().new_graph()
    plan = Recorder(())
    plan.admit = lambda stats, tensors: ()  # type: ignore[method-assign]
    stats = torch.tensor([3, 1])
    host = Host(lambda *a: (stats,), lambda *a: a, lambda *a: a, plan, report, [("s0", 0, 0), ("s1", 0, 1)])
    x = torch.ones(3, 4)
    best = min(_seconds(host, x) for _ in range(20))
    assert best < 60e-6, f"{best * 1e6:.1f} us a call"


def _seconds(fn: Callable[..., Any], *args: Any, repeat: int = 100) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        fn(*args)
    return (time.perf_counter() - start) / repeat


def test_threads_share_one_padded_graph() -> None:
    compilations: list[Any] = []

    def inner(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        compilations.append(gm)
        return gm.forward

    padded = LazyPadded(fx.symbolic_trace(lambda x: x.sin() * 2), inner, True)
    results: list[torch.Tensor] = []
    xs = [torch.randn(n, 3) for n in (2, 3, 4, 5)]
    threads = [threading.Thread(target=lambda x=x: results.append((x, padded(x)))) for x in xs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for x, y in results:
        torch.testing.assert_close(y, x.sin() * 2)
    before = len(compilations)
    padded(torch.randn(9, 3))
    assert len(compilations) == before <= 4


def test_size_symbols() -> None:
    seen: list[Any] = []

    def pipeline(captured: Any, recipe: Recipe, report: Any) -> None:
        seen.append(captured)

    recipe = Recipe(pipeline=pipeline, inner="eager", strict=True)
    gemopt.compile(lambda x, n: x[:, : x.shape[1] // 2] * n, recipe=recipe)(torch.randn(4, 4), 7)
    (captured,) = seen
    found = size_symbols(captured)
    sizes = [s for x in captured.example_inputs for s in (x.shape if isinstance(x, torch.Tensor) else (x,))]
    assert {name for name, _, _ in found} == {str(s) for s in sizes if isinstance(s, torch.SymInt)}
    assert len({name for name, _, _ in found}) == len(found) >= 2


def test_inner_compilers() -> None:
    assert inner_compiler("inductor", "max-autotune").config["max_autotune"] is True  # type: ignore[attr-defined]
    assert inner_compiler("inductor", None, {"fallback_random": True}).config == {"fallback_random": True}  # type: ignore[attr-defined]
    assert inner_compiler("inductor").compiler_name == "inductor"  # type: ignore[attr-defined]
    for kind in ("eager", "aot_eager"):
        assert callable(inner_compiler(kind))
    with pytest.raises(ValueError, match="mode, options"):
        inner_compiler("eager", "max-autotune")


def test_pipelines_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def own(captured: Any, recipe: Recipe, report: Any) -> None:
        return None

    class Point:
        name = "own"

        @staticmethod
        def load() -> Any:
            return own

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Point] if "pipelines" in group else [])
    assert load_pipeline("own") is own
    from gemopt.passes import default_pipeline

    assert load_pipeline("default") is default_pipeline
    with pytest.raises(ValueError, match=r"pipeline: got 'other'; allowed: .*'default', 'own'"):
        load_pipeline("other")
