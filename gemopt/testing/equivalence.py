"""`assert_equivalent`: a compiled model against eager, outputs and all gradients, over generated lengths."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemopt.testing.checker import Checker
from gemopt.testing.compare import Tolerance
from gemopt.testing.distribution import compare_distributions
from gemopt.testing.inputs import CallableSource, ExampleSource, LengthsDraw, as_batch
from gemopt.testing.lengths import CASES, draw_lengths
from gemopt.testing.result import EquivalenceResult, raise_if_bad
from gemopt.testing.runs import State, modules_of, no_dropout

DEFAULT_CASES = ("given", "zeros", "ones", "full", "skewed", "empty_batch")


def assert_equivalent(
    model: Callable[..., Any],
    inputs: Any,
    *,
    lengths: str | Sequence[str] | LengthsDraw = "auto",
    loss: Callable[[Any], Tensor] | None = None,
    recipe: Any = None,
    inner: str = "aot_eager",
    compiled: Callable[..., Any] | None = None,
    cases: Sequence[str] = DEFAULT_CASES,
    seed: int = 0,
    train: bool | None = None,
    dropout: str = "off",
    autocast: torch.dtype | None = None,
    batch_size: int = 7,
    max_len: int = 13,
    ratio: float = 2.0,
    ulps: float = 4.0,
    runs: int = 128,
) -> EquivalenceResult:
    """Compare `gemopt.compile(model)` with eager: outputs, gradients of parameters and float inputs, buffers.

    Every tensor's RMS error against an fp64 run of eager may be `ratio` times eager's own RMS error in the
    same dtype plus `ulps` units in the last place of the tensor's RMS; shape, dtype, device, stride and
    requires_grad are eager's. Values that fp64 eager leaves undefined (NaN) are counted and left out.

    Args:
        model: a module, or a function; the modules a function closes over are found.
        inputs: one example batch (a tuple of arguments or a dict of keyword arguments), or a callable
            `inputs(lengths [B], max_len, generator) -> arguments` that makes a batch.
        lengths: which arguments are lengths: `"auto"`, their names, or a callable
            `(case, batch, max_len, generator) -> lengths [B]` that replaces the built-in draws.
        loss: `loss(output) -> scalar`, what to differentiate. By default every output has a fixed random
            cotangent.
        recipe, inner: for `gemopt.compile`. Without a recipe packing is forced at every fill and errors of
            passes are raised (`Recipe(min_saving=0, strict=True)`), so that the rewritten graph is what is
            tested.
        compiled: what to compare, instead of `gemopt.compile(model)`; it shares the model's parameters.
        cases: any of `gemopt.testing.CASES`.
        seed: for lengths, contents, cotangents.
        train: mode of the model's modules during the comparison; None leaves it.
        dropout: `"off"` sets dropout modules to 0; `"distribution"` keeps them and compares means and second
            moments of every tensor over `runs` seeds by z-tests.
        autocast: ambient autocast dtype of the eager and compiled runs.
        batch_size, max_len: for batches from a callable.

    Returns:
        EquivalenceResult; `print` it for one line a case.

    Raises:
        EquivalenceError: a tensor differs, only one of the two raises, or nothing could be compared. The
            message names case, tensor, errors, the worst element with its three values, the rows that differ
            and the report.
        TypeError, ValueError: an argument is not one of the above.
    """
    _check_arguments(cases, dropout, train, runs)
    state = State(modules_of(model))
    with _mode(state.modules, train), contextlib.ExitStack() as stack:
        if dropout == "off":
            stack.enter_context(no_dropout(state.modules))
        subject = compiled if compiled is not None else compile_for_test(model, recipe, inner)
        source = _source(inputs, model, lengths, batch_size, max_len)
        checker = Checker(model, subject, state, loss, seed, autocast, Tolerance(ratio, ulps))
        result = EquivalenceResult(notes=source.notes, report=getattr(subject, "report", None))
        try:
            for case in cases:
                generator = torch.Generator().manual_seed(seed)
                batch = source.make(case, generator)
                if dropout == "distribution":
                    result.cases.append(compare_distributions(checker, case, batch, runs))
                else:
                    result.cases.append(checker.check(case, batch))
        finally:
            state.restore()
    raise_if_bad(result)
    return result


def _check_arguments(cases: Sequence[str], dropout: str, train: bool | None, runs: int) -> None:
    if isinstance(cases, str):
        raise TypeError(f"cases: got the string {cases!r}; allowed: a tuple of names")
    for case in cases:
        if case not in CASES:
            raise ValueError(f"cases: got {case!r}; allowed: {', '.join(CASES)}")
    if dropout not in ("off", "distribution"):
        raise ValueError(f"dropout: got {dropout!r}; allowed: 'off', 'distribution'")
    if train not in (None, True, False):
        raise ValueError(f"train: got {train!r}; allowed: True, False, None")
    if runs < 16:
        raise ValueError(f"runs: got {runs}; allowed: 16 or more, a z-test needs them")


def compile_for_test(model: Callable[..., Any], recipe: Any, inner: str) -> Callable[..., Any]:
    import gemopt

    if recipe is None:
        recipe = gemopt.Recipe(min_saving=0.0, strict=True)
    return gemopt.compile(model, recipe=recipe, inner=inner)


def _source(
    inputs: Any, model: Callable[..., Any], lengths: Any, batch_size: int, max_len: int
) -> CallableSource | ExampleSource:
    draw: LengthsDraw = lengths if callable(lengths) else draw_lengths
    if callable(inputs):
        return CallableSource(inputs, batch_size, max_len, draw)
    named = isinstance(lengths, (str, list, tuple)) and all(isinstance(n, str) for n in lengths)
    if not (callable(lengths) or named):
        raise TypeError(f"lengths: got {lengths!r}; allowed: 'auto', argument names, a callable")
    names = None if callable(lengths) or lengths == "auto" else [lengths] if isinstance(lengths, str) else lengths
    return ExampleSource(as_batch(inputs), model, names, draw)


@contextlib.contextmanager
def _mode(modules: Sequence[nn.Module], train: bool | None) -> Iterator[None]:
    before = [(m, m.training) for root in modules for m in root.modules()]
    try:
        for m, was in before:
            m.training = was if train is None else train
        yield
    finally:
        for m, was in before:
            m.training = was
