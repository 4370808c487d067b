"""gemopt.compile behaves as torch.compile does, and keeps its own settings to itself."""

from __future__ import annotations

import copy
import functools
import io
import threading
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx.experimental._config as shape_config
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

import gemopt
from gemopt import Recipe, Report
from gemopt.api import CompiledModule
from gemopt.backend import CompileError

D = 8


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


class Watching:
    """A pipeline that plans nothing and remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, captured: Any, recipe: Recipe, report: Any) -> None:
        self.seen.append(captured)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.bn = nn.BatchNorm1d(D)
        self.drop = nn.Dropout(0.5)
        self.scale = D**-0.5
        self.calls = 0

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]
        h = self.linear(x) * self.scale
        h = self.drop(self.bn(h.transpose(1, 2)).transpose(1, 2))
        return (h * mask[..., None]).sum(1)


def batch(b: int, l: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(b, l, D), torch.randint(0, l + 1, (b,))


def plain(pipeline: Any = None, **fields: Any) -> Recipe:
    return Recipe(pipeline=pipeline or Watching(), inner="eager", strict=True, **fields)


# ------------------------------------------------------------------------------------------------ as
# torch.compile


def test_state_dict_attributes_and_modes() -> None:
    model = Model()
    ours, theirs = gemopt.compile(model, recipe=plain()), torch.compile(model, backend="eager")
    assert isinstance(ours, CompiledModule) and isinstance(ours, nn.Module)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert ours.linear is model.linear and ours.scale == model.scale
    ours.scale = 3.0
    assert model.scale == 3.0
    assert ours.eval() is ours and not model.training and not ours.training
    ours.train()
    assert model.training
    ours.load_state_dict({k: torch.zeros_like(v) for k, v in theirs.state_dict().items()})
    assert not model.linear.weight.any()
    for name in ("report", "_gemopt_report", "_gemopt_settings"):
        assert not hasattr(model, name)
    assert isinstance(ours.report, Report)
    assert ours and bool(gemopt.compile(nn.Sequential(), recipe=plain())) == bool(nn.Sequential())


def test_training_step_equals_eager() -> None:
    expected, model = Model(), Model()
    model.load_state_dict(expected.state_dict())
    compiled = gemopt.compile(model, recipe=plain())
    compiled.drop.p = expected.drop.p = 0.0
    for b, l in ((4, 4), (3, 7), (7, 3)):
        args = batch(b, l)
        for m in (expected, compiled):
            m.zero_grad()
            m(*args).square().sum().backward()
        for a, b_ in zip(expected.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b_.grad)
        torch.testing.assert_close(expected.bn.running_mean, model.bn.running_mean)
    compiled.eval(), expected.eval()
    torch.testing.assert_close(compiled(*args), expected(*args))


def test_functions_decorators_and_keywords() -> None:
    @gemopt.compile(recipe=plain())
    def double(x: torch.Tensor, *, by: float = 2.0) -> dict[str, torch.Tensor]:
        """Doubles."""
        return {"y": x * by}

    x = torch.randn(3)
    assert torch.equal(double(x)["y"], x * 2)
    assert torch.equal(double(x, by=3.0)["y"], x * 3)
    assert double.__name__ == "double" and double.__doc__ == "Doubles."
    assert isinstance(double.report, Report) and len(double.report) == 2


def test_a_whole_step_as_a_function() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x, lengths).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = gemopt.compile(step, recipe=plain())
    args = batch(4, 6)
    losses = [compiled(*args).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert compiled.report.graphs[0].mode == "train"


def test_hooks_run_as_under_torch_compile() -> None:
    calls: dict[str, list[str]] = {"gemopt": [], "torch": []}
    for name, compiler in (
        ("gemopt", functools.partial(gemopt.compile, recipe=plain())),
        ("torch", functools.partial(torch.compile, backend="eager")),
    ):
        torch.compiler.reset()
        model = Model()
        compiled = compiler(model)
        model.register_forward_pre_hook(lambda *_, log=calls[name]: log.append("model"))
        compiled.register_forward_hook(lambda *_, log=calls[name]: log.append("compiled"))
        compiled(*batch(3, 4))
    assert calls["gemopt"] == calls["torch"] and calls["gemopt"]


def test_copy_and_pickle() -> None:
    model = Model().eval()
    compiled = gemopt.compile(model, recipe=Recipe(inner="eager", pipeline="default"))
    args = batch(3, 4)
    expected = model(*args)
    shallow, deep = copy.copy(compiled), copy.deepcopy(compiled)
    assert shallow._orig_mod is model and deep._orig_mod is not model
    buffer = io.BytesIO()
    torch.save(compiled, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (shallow, deep, loaded):
        assert isinstance(other, CompiledModule) and other.report is not compiled.report
        assert other.__dict__["_gemopt_settings"]["recipe"] == compiled.__dict__["_gemopt_settings"]["recipe"]
    with torch.no_grad():
        deep.linear.weight.zero_()
    assert model.linear.weight.any()
    torch.testing.assert_close(shallow(*args), expected)


def test_disable_and_twice() -> None:
    model = Model()
    assert gemopt.compile(model, disable=True) is model
    assert gemopt.compile(disable=True)(model) is model
    again = gemopt.compile(gemopt.compile(model, recipe=plain()), recipe=plain())
    assert isinstance(again, CompiledModule) and again._orig_mod is model


def test_fullgraph_and_graph_breaks() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    watch, x = Watching(), torch.randn(3)
    compiled = gemopt.compile(breaks, recipe=plain(watch))
    torch.testing.assert_close(compiled(x), x.sin().cos())
    assert len(watch.seen) == len(compiled.report) == 2
    with pytest.raises(torch._dynamo.exc.Unsupported):
        gemopt.compile(breaks, recipe=plain(), fullgraph=True)(x)


def test_inside_an_outer_compile() -> None:
    model = gemopt.compile(nn.Linear(D, D), recipe=plain())
    outer = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)
    x = torch.randn(3, D)
    torch.testing.assert_close(outer(x), model._orig_mod(x) + 1)
    assert len(model.report) == 0  # it was traced through


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"backend": "inductor"}, TypeError, "backend: got 'inductor'"),
        ({"inner": "tvm"}, ValueError, "inner: got 'tvm'; allowed: 'inductor', 'aot_eager', 'eager'"),
        ({"empty_rows": "nan"}, ValueError, "empty_rows: got 'nan'"),
        ({"padded_outputs": "drop"}, ValueError, "padded_outputs: got 'drop'"),
        ({"recipe": 3}, TypeError, "recipe: got 3"),
        ({"recipe": {"colour": 1}}, TypeError, "no field 'colour'"),
        ({"mode": "max-autotune", "options": {"max_autotune": True}}, ValueError, "mode, options: got"),
        ({"mode": "max-autotune", "inner": "eager"}, ValueError, "inductor"),
        ({"options": {"use_aoti": True}}, ValueError, "use_aoti"),
        ({"nonsense": 3}, TypeError, "nonsense: got 3"),
        ({"recipe": {"pipeline": "nowhere"}}, ValueError, "pipeline: got 'nowhere'; allowed: .*default"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gemopt.compile(Model(), **kwargs)


def test_bad_model() -> None:
    with pytest.raises(TypeError, match="model: got int"):
        gemopt.compile(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model: got int"):
        gemopt.explain(3)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ recipe


def test_recipe_of() -> None:
    assert Recipe.of(None) == Recipe.of("keep") == Recipe.of({}) == Recipe()
    assert Recipe.of("bf16").precision == "bf16"
    assert Recipe.of(Recipe(inner="eager"), verify=True, strict=None) == Recipe(inner="eager", verify=True)
    assert Recipe.of({"inner": "eager"}, inner="aot_eager").inner == "aot_eager"
    assert Recipe.of(Recipe(strict=True), strict=False).strict is False
    assert Recipe(disabled=["fuse_norms"]).disabled == ("fuse_norms",)  # type: ignore[arg-type]
    assert Recipe(disabled=("their_own",), pipeline=lambda *a: None).disabled == ("their_own",)
    with pytest.raises(ValueError, match=r"disabled: got .*fuse_norms"):
        Recipe(disabled=("norms",))


@given(st.one_of(st.floats(allow_nan=True), st.integers(), st.booleans(), st.none(), st.text()))
def test_min_saving_is_a_share(value: Any) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
    if good:
        assert Recipe(min_saving=value).min_saving == value
    else:
        with pytest.raises(ValueError, match="min_saving: got"):
            Recipe(min_saving=value)


# ------------------------------------------------------------------------------------------------ no
# recompiles


@pytest.mark.parametrize(
    ("first", "allowed"), [((5, 5), 1), ((4, 7), 1), ((1, 6), 2), ((6, 1), 2), ((1, 1), 2), ((0, 5), 2)]
)
def test_one_graph_whatever_the_first_batch(first: tuple[int, int], allowed: int) -> None:
    watch, model = Watching(), Model().eval()
    compiled = gemopt.compile(model, recipe=plain(watch))
    for b, l in (first, (5, 5), (2, 9), (9, 2), (3, 4), (2, 2), (128, 200), first):
        args = batch(b, l)
        torch.testing.assert_close(compiled(*args), model(*args))
    assert len(compiled.report) == allowed
    assert len(watch.seen) == allowed - (0 in first)  # nothing to plan without elements


def test_a_float_that_changes_does_not_compile_for_ever() -> None:
    watch = Watching()
    compiled = gemopt.compile(lambda x, t: x / t, recipe=plain(watch))
    x = torch.randn(4)
    for i in range(1, 30):
        torch.testing.assert_close(compiled(x, i / 10), x / (i / 10))
    assert len(watch.seen) <= 6


def test_settings_are_scoped() -> None:
    during: list[tuple[bool, bool]] = []

    def pipeline(captured: Any, recipe: Recipe, report: Any) -> None:
        during.append((shape_config.use_duck_shape, torch._dynamo.config.specialize_float))

    before = (shape_config.use_duck_shape, torch._dynamo.config.specialize_float)
    compiled = gemopt.compile(Model(), recipe=plain(pipeline))
    compiled(*batch(4, 4))
    assert during == [(False, True)]
    assert (shape_config.use_duck_shape, torch._dynamo.config.specialize_float) == before == (True, False)
    graphs: list[Any] = []
    square = torch.compile(lambda x: x * 2, backend=lambda gm, _: graphs.append(gm) or gm.forward, dynamic=True)
    square(torch.randn(4, 4))
    placeholders = graphs[0].graph.find_nodes(op="placeholder")
    assert len(placeholders) == 2  # one symbol for both sizes: others keep duck shaping


def test_more_instances_than_the_recompile_limit() -> None:
    args = batch(3, 4)
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=3):
        for _ in range(5):
            model, watch = Model().eval(), Watching()
            compiled = gemopt.compile(model, recipe=plain(watch))
            torch.testing.assert_close(compiled(*args), model(*args))
            assert len(watch.seen) == 1


def test_reset_compiles_again() -> None:
    watch, model = Watching(), Model().eval()
    compiled = gemopt.compile(model, recipe=plain(watch))
    args = batch(3, 4)
    for _ in range(2):
        compiled(*args)
    torch.compiler.reset()
    torch.testing.assert_close(compiled(*args), model(*args))
    assert len(watch.seen) == 2


def test_threads() -> None:
    models = [Model().eval() for _ in range(4)]
    compiled = [gemopt.compile(m, recipe=plain()) for m in models]
    plain_torch = torch.compile(lambda x: x.sin() + 1, backend="eager", dynamic=True)
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for b, l in ((4, 4), (3, 5)):
                args = batch(b, l)
                for m, c in ((models[i], compiled[i]), (models[0], compiled[0])):
                    torch.testing.assert_close(c(*args), m(*args))
                torch.testing.assert_close(plain_torch(args[0]), args[0].sin() + 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    # Threads that meet at the first call of one function may each compile it, as under torch.compile.
    assert [len(c.report) for c in compiled[1:]] == [1, 1, 1] and 1 <= len(compiled[0].report) <= 4
    assert shape_config.use_duck_shape and not torch._dynamo.config.specialize_float


# ------------------------------------------------------------------------------------------------ degrade
# loudly


def broken(captured: Any, recipe: Recipe, report: Any) -> None:
    report.rewrite("layer", "rule")
    raise KeyError("the pass is broken")


def test_an_internal_error_degrades_loudly() -> None:
    model, args = Model().eval(), batch(3, 4)
    compiled = gemopt.compile(model, recipe=Recipe(pipeline=broken, inner="eager"))
    with pytest.warns(RuntimeWarning, match="the pass is broken"):
        torch.testing.assert_close(compiled(*args), model(*args))
    (rejection,) = compiled.report.rejections
    assert rejection.rule == "internal error" and "KeyError: 'the pass is broken'" in rejection.reason
    assert compiled.report.rewrites == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(*args)  # warned once, when it compiled


def test_an_internal_error_raises_under_strict() -> None:
    compiled = gemopt.compile(Model(), recipe=Recipe(pipeline=broken, inner="eager"), strict=True)
    with pytest.raises(Exception, match="the pass is broken") as info:
        compiled(*batch(3, 4))
    assert CompileError.__name__ in repr(info.value) or isinstance(info.value.inner_exception, CompileError)


def test_a_boundary_is_a_rejection_without_noise() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    compiled = gemopt.compile(fn, recipe=plain())
    x = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        torch.testing.assert_close(compiled(x), x.sin())
    (rejection,) = compiled.report.rejections
    assert rejection.rule == "capture" and "cond" in rejection.reason


# ------------------------------------------------------------------------------------------------ explain


def test_explain_leaves_no_trace() -> None:
    class Counting(Model):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = x
            out = super().forward(x, lengths)
            torch._dynamo.graph_break()
            return out

    model = Counting()
    args = batch(3, 4)
    model(*args).sum().backward()
    grads = [p.grad for p in model.parameters()]
    state = copy.deepcopy(model.state_dict())
    rng, keys = torch.get_rng_state(), set(vars(model))
    watch = Watching()
    report = gemopt.explain(model, *args, recipe=plain(watch))
    assert len(report) == len(watch.seen) >= 1
    assert torch.equal(rng, torch.get_rng_state())
    assert set(vars(model)) == keys and model.calls == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))


def test_explain_a_whole_step() -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        loss = model(x, lengths).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    args = batch(4, 6)
    step(*args)  # gradients and optimizer state exist
    state = copy.deepcopy(model.state_dict())
    grads = [p.grad.clone() for p in model.parameters()]
    report = gemopt.explain(step, *args, recipe=plain())
    assert report.graphs[0].mode == "train"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=0, atol=0)


def test_explain_uses_the_recipe_of_a_compiled_model() -> None:
    watch = Watching()
    compiled = gemopt.compile(Model(), recipe=plain(watch))
    gemopt.explain(compiled, *batch(3, 4))
    assert len(watch.seen) == 1 and len(compiled.report) == 0
    function = gemopt.compile(lambda x: x * 2, recipe=plain(watch))
    gemopt.explain(function, torch.randn(3))
    assert len(watch.seen) == 2


def test_explain_refuses_lazy_parameters() -> None:
    with pytest.raises(ValueError, match="lazy"):
        gemopt.explain(nn.LazyLinear(3), torch.randn(2, 3))
