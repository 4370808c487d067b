"""Define a custom op that costs a compiled graph one dispatch.

`torch.library.custom_op` sends every call through Python four times (autograd, its wrapper, two redispatches), also where
a compiled graph calls it, in which autograd has nothing to do (ARCHITECTURE.md has the cost). Here an op is two:

    gemopt::<name>_<hash>           what graphs are written with; its autograd kernel decides whether a gradient is needed
    gemopt::<name>_kernel_<hash>    the kernels, known to nobody above autograd; what AOTAutograd finds when it traces

so that compiled code calls the second one, whose cost is one dispatch. In place of the second there may be an operator that
compilers know (`through`), where only the gradient is to be another.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from gemopt.ops.naming import NAMESPACE, op_name

_LIBRARY: Final = torch.library.Library(NAMESPACE, "FRAGMENT")


class Op:
    """An op without side effects. Calling it runs it; `overload` is what stands in graphs."""

    def __init__(
        self, base: str, schema: str, run: Callable[..., Any], through: torch._ops.OpOverload | None = None
    ) -> None:
        self.base = base
        self.overload = _define(base, schema)
        self.kernel = through or _define(f"{base}_kernel", schema)
        self._own = [self.overload] if through else [self.overload, self.kernel]
        self.__doc__ = run.__doc__
        self.autograd(_not_differentiable(base), None)
        if through is None:
            _LIBRARY.impl(self.kernel._schema.name, run, "CompositeExplicitAutograd")
        _LIBRARY.impl(self.overload._schema.name, self._run, "CompositeExplicitAutograd")
        _LIBRARY.impl(self.overload._schema.name, self._dispatch, "Autograd")

    def __call__(self, *args: Any) -> Any:
        return self.overload(*args)

    def fake(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: `fn` gives results of the right shapes, dtypes and strides, without values."""
        for op in self._own:
            torch.library.register_fake(op._schema.name, fn, lib=_LIBRARY)
        return fn

    def autograd(self, backward: Callable[..., Any], setup: Callable[..., None] | None) -> None:
        """backward(ctx, *grads) gives a gradient or None for every argument; setup(ctx, inputs, output) saves for it."""
        kernel = self.kernel

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                with torch._C._AutoDispatchBelowAutograd():
                    output = kernel(*args)
                    if setup is not None:
                        setup(ctx, args, output)
                    return output

        Differentiable.backward = staticmethod(backward)  # type: ignore[assignment]
        Differentiable.__name__ = Differentiable.__qualname__ = self.base
        self._differentiable = Differentiable

    def _run(self, *args: Any) -> Any:
        return self.kernel(*args)

    def _dispatch(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return self._differentiable.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return self.kernel(*args)


def _define(base: str, schema: str) -> torch._ops.OpOverload:
    name = op_name(base).removeprefix(f"{NAMESPACE}::")
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    return getattr(getattr(torch.ops, NAMESPACE), name).default  # type: ignore[no-any-return]


def _not_differentiable(base: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise RuntimeError(f"gemopt::{base} has no gradient")

    return backward


def op(base: str, schema: str, through: torch._ops.OpOverload | None = None) -> Callable[[Callable[..., Any]], Op]:
    """Decorator that makes an `Op` of the function that runs it; `through` computes the same from the same arguments."""
    return lambda run: Op(base, schema, run, through)
