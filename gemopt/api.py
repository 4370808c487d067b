"""The public entry points: :func:`compile` and :func:`explain`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.eval_frame import OptimizedModule

from gemopt import dynamo
from gemopt.backend import GemoptBackend, inner_compiler
from gemopt.dry_run import explain
from gemopt.recipe import Recipe

if TYPE_CHECKING:
    from gemopt.report import Report

__all__ = ["CompiledModule", "compile", "explain"]


class CompiledModule(OptimizedModule):
    """What :func:`compile` makes of a module: torch's ``OptimizedModule`` with a report.

    Parameters, buffers, ``state_dict`` (keys as under ``torch.compile``), hooks, ``train``/``eval`` and
    attributes are those of the model inside. A copy or a pickle is compiled anew, with the same settings and
    an empty report.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # inside an outer torch.compile: be traced through
            return self._modules["_orig_mod"](*args, **kwargs)  # type: ignore[misc]
        return super().__call__(*args, **kwargs)

    def __bool__(self) -> bool:  # OptimizedModule has a __len__ that raises, and so no truth value
        return bool(self._orig_mod)

    @property
    def report(self) -> Report:
        """What was done to the graphs compiled so far."""
        return self.__dict__["_gemopt_report"]

    def __reduce__(self) -> tuple[Any, ...]:
        return _compile_with, (self._orig_mod, self.__dict__["_gemopt_settings"])


def compile(
    model: Callable[..., Any] | None = None,
    *,
    recipe: Recipe | str | Mapping[str, Any] | None = None,
    inner: str | None = None,
    strict: bool | None = None,
    padded_outputs: str | Mapping[str, str] | None = None,
    empty_rows: str | None = None,
    verify: bool | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    disable: bool = False,
    **torch_options: Any,
) -> Any:
    """``torch.compile`` that trains padded sequence models packed: same call shape, same kind of result.

    Args:
        model: a module, or a function (a whole training step, its loss and backward inside or outside).
            Without it, returns a decorator.
        recipe: a :class:`gemopt.Recipe`, a precision name, or a dict of its fields.
        inner, strict, padded_outputs, empty_rows, verify: fields of the recipe, set here for short.
        fullgraph: raise where Dynamo would break the graph.
        dynamic: dynamic shapes; None means True, so that one graph serves all batch sizes and lengths from 2
        on. mode, options: of inductor, as for ``torch.compile``.
        disable: return the model as it is.
        torch_options: further options of this torch's ``torch.compile``, such as ``recompile_limit``.
            ``name`` is also the report's title.

    Returns:
        For a module a :class:`CompiledModule`, for a function a function. Both have ``.report``, a
        :class:`gemopt.Report` that grows as graphs are compiled and run.

    Raises:
        TypeError, ValueError: an argument is not allowed; the message names it and says what is.
    """
    if "backend" in torch_options:
        raise TypeError(f"backend: got {torch_options['backend']!r}; gemopt is the backend, inner= picks the compiler")
    settings: dict[str, Any] = {
        "recipe": Recipe.of(
            recipe,
            inner=inner,
            strict=strict,
            padded_outputs=padded_outputs,
            empty_rows=empty_rows,
            verify=verify,
        ),
        "fullgraph": fullgraph,
        "dynamic": dynamic,
        "mode": mode,
        "options": options,
        **torch_options,
    }
    if model is None:
        return lambda model: model if disable else _compile_with(model, settings)
    return model if disable else _compile_with(model, settings)


def _compile_with(model: Any, settings: dict[str, Any]) -> Any:
    if not callable(model):
        raise TypeError(f"model: got {type(model).__name__}; allowed: a module or a function")
    from gemopt.report import Report

    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    torch_options = dict(settings)
    recipe, mode = torch_options.pop("recipe"), torch_options.pop("mode")
    options, fullgraph = dict(torch_options.pop("options") or {}), torch_options.pop("fullgraph")
    if options.pop("use_aoti", False):
        raise ValueError("options: got use_aoti; gemopt compiles at run time only")
    if torch_options["dynamic"] is None and torch_options.get("shapes_spec") is None:
        torch_options["dynamic"] = True
    guard_filter_fn = options.pop("guard_filter_fn", None)
    name = torch_options.pop("name", None)
    report = Report(name or getattr(model, "__name__", type(model).__name__))
    inner = inner_compiler(recipe.inner, mode, options or None, torch_options["dynamic"], name)
    backend = GemoptBackend(recipe, report, inner, dynamic=torch_options["dynamic"])
    compiled = dynamo.optimize(model, backend, nopython=fullgraph, guard_filter_fn=guard_filter_fn, **torch_options)
    if isinstance(compiled, OptimizedModule):
        compiled.__class__ = CompiledModule
        # Into the instance's own dict: OptimizedModule would hand other attributes on to the model.
        compiled.__dict__.update(_gemopt_report=report, _gemopt_settings=settings)
    elif compiled is not model:  # the model itself where Dynamo is disabled
        compiled.report, compiled._gemopt_settings = report, settings
    return compiled
