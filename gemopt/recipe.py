"""What the user asks of the compiler: one frozen value, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

_PRECISIONS = ("keep", "bf16")
_INNER = ("inductor", "aot_eager", "eager")
_EMPTY_ROWS = ("zero", "eager")
PASSES = ("pointwise_convolutions", "jagged_inputs", "unpad", "fuse_norms")  # those that may be left out


@dataclass(frozen=True)
class Recipe:
    """The settings of one :func:`gemopt.compile`.

    Attributes:
        precision: ``"keep"`` leaves every dtype as the model has it. ``"bf16"`` is a name for the same: the
            model's own autocast decides (reserved for precision passes).
        inner: compiler of the rewritten graph: ``"inductor"``, ``"aot_eager"`` or ``"eager"``.
        padded_outputs: ``None`` keeps every row of every output. ``"zero"`` allows the rows of an output that
            its one governing mask excludes to be zero, with no gradient. ``{name: "zero"}`` allows it for the
            outputs named.
        empty_rows: a row whose keys are all masked is NaN or uniform in eager. ``"zero"`` gives 0 with zero
            gradient; ``"eager"`` refuses the rewrites that would.
        verify: check each rewrite at compile time against eager in fp64 on generated inputs.
        strict: raise on an internal error of a pass, instead of compiling the graph as it is.
        min_saving: smallest share of the floating-point operations that packing must save in a step, in [0,
            1). Below it the step runs padded, and below about 17 % it does so anyway: a packed operation is
            taken to cost a fifth more.
        row_slack: ``None`` packs exactly the rows of each step, whose number is then a symbol to the compiler.
            A number gives packed tensors a fixed size, that of the first batch and this share more: the
            packed graph has constant sizes (it compiles sooner, is launched without waiting for the counts,
            and runs under ``mode="reduce-overhead"``), and a batch with more rows runs padded. Needs
            ``dynamic=False`` and batches of one size. ``3 / sqrt(batch)`` is ample where lengths are drawn
            anew for each batch.
        pipeline: name in the entry point group ``gemopt.pipelines``, or a callable
            ``(Captured, Recipe, GraphReport) -> Plan | None``.
        disabled: names of passes to leave out: ``"pointwise_convolutions"``, ``"jagged_inputs"``, ``"unpad"``,
            ``"fuse_norms"``; of another pipeline, whatever that understands.
    """

    precision: str = "keep"
    inner: str = "inductor"
    padded_outputs: str | Mapping[str, str] | None = None
    empty_rows: str = "zero"
    verify: bool = False
    strict: bool = False
    min_saving: float = 0.1
    row_slack: float | None = None
    pipeline: str | Callable[..., Any] = "default"
    disabled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _one_of("precision", self.precision, _PRECISIONS)
        _one_of("inner", self.inner, _INNER)
        _one_of("empty_rows", self.empty_rows, _EMPTY_ROWS)
        for name in ("verify", "strict"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        self._check_padded_outputs()
        saving = self.min_saving
        _check(
            isinstance(saving, (int, float)) and not isinstance(saving, bool) and 0 <= saving < 1,
            "min_saving",
            saving,
            "a number in [0, 1)",
        )
        slack = self.row_slack
        number = isinstance(slack, (int, float)) and not isinstance(slack, bool)
        _check(slack is None or (number and 0 <= slack < float("inf")), "row_slack", slack, "None or a number from 0")  # type: ignore[operator]
        pipeline = self.pipeline
        _check(
            (isinstance(pipeline, str) and pipeline != "") or callable(pipeline),
            "pipeline",
            pipeline,
            "the name of a gemopt.pipelines entry point or a callable",
        )
        disabled = self.disabled
        _check(
            isinstance(disabled, (tuple, list)) and all(isinstance(name, str) for name in disabled),
            "disabled",
            disabled,
            "a tuple of pass names",
        )
        if pipeline == "default":
            _check(set(disabled) <= set(PASSES), "disabled", disabled, f"names of {', '.join(PASSES)}")
        object.__setattr__(self, "disabled", tuple(disabled))

    def _check_padded_outputs(self) -> None:
        value = self.padded_outputs
        allowed = 'None, "zero", or a dict from output name to "zero"'
        if isinstance(value, Mapping):
            _check(
                all(isinstance(k, str) and v == "zero" for k, v in value.items()),
                "padded_outputs",
                value,
                allowed,
            )
            object.__setattr__(self, "padded_outputs", dict(value))
        else:
            _check(value is None or value == "zero", "padded_outputs", value, allowed)

    @classmethod
    def of(cls, value: str | Recipe | Mapping[str, Any] | None = None, **overrides: Any) -> Recipe:
        """The recipe meant by ``value``: a precision name, a Recipe, a dict of fields, or None for the
        defaults.

        ``overrides`` are fields; one that is None keeps what ``value`` says.

        Raises:
            TypeError: ``value`` is none of these, or a field does not exist.
            ValueError: a field has a value that is not allowed.
        """
        known = [f.name for f in fields(cls)]
        overrides = {k: v for k, v in overrides.items() if v is not None}
        for name in (*overrides, *(value if isinstance(value, Mapping) else ())):
            if name not in known:
                raise TypeError(f"recipe: no field {name!r}; fields are {', '.join(known)}")
        if value is None:
            return cls(**overrides)
        if isinstance(value, cls):
            return replace(value, **overrides)
        if isinstance(value, str):
            return cls(**{"precision": value, **overrides})
        if isinstance(value, Mapping):
            return cls(**{**value, **overrides})
        raise TypeError(f"recipe: got {value!r}; allowed are a Recipe, one of {_PRECISIONS}, a dict of fields, or None")


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name}: got {value!r}; allowed: {allowed}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    _check(isinstance(value, str) and value in allowed, name, value, ", ".join(map(repr, allowed)))
