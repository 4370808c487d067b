"""The public entry points: :func:`compile` and :func:`explain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

from gemopt import dynamo
from gemopt.backend import GemoptBackend
from gemopt.recipe import Recipe


class CompiledModule(OptimizedModule):
    """What :func:`compile` makes of a module: torch's OptimizedModule with a report."""

    @property
    def report(self) -> Any:
        """The :class:`gemopt.Report` of everything compiled so far for this module."""
        backend = innermost_backend(self.dynamo_ctx.callback)
        return backend.report


def compile(
    model: Callable[..., Any] | None = None,
    *,
    recipe: Any = None,
    inner: str | None = None,
    strict: bool | None = None,
    padded_outputs: Any = None,
    empty_rows: str | None = None,
    verify: bool | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    disable: bool = False,
) -> Any:
    """``torch.compile`` that trains padded sequence models packed: same call shape, same result."""
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
        "disable": disable,
    }
    if model is None:
        return lambda model: compile(model, **settings)
    if disable:
        return model
    from gemopt.report import Report

    backend = GemoptBackend(
        settings["recipe"], Report(), mode=mode, options=options, dynamic=True if dynamic is None else dynamic
    )
    compiled = dynamo.optimize(model, backend, nopython=fullgraph, dynamic=backend.dynamic)
    if isinstance(compiled, OptimizedModule):
        compiled.__class__ = CompiledModule
    elif isinstance(compiled, torch.nn.Module) is False:
        compiled.report = backend.report
    return compiled
