"""The frozen records a report is made of. They hold plain data and formulas, no tensors and no graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import sympy

Formula: TypeAlias = "sympy.Expr | int | float | str"

COST_TERMS = ("flops_before", "flops_after", "bytes_before", "bytes_after")


@dataclass(frozen=True)
class Rewrite:
    """One change that was made.

    Args:
        site: the part of the model, as its author names it (``layers.0.attn``).
        rule: the rule that matched (``softmax-attention``).
        kernel: the op it became (``jagged_attention``), or ``None`` where no kernel stands for it.
        source: ``file:line`` of the user's code.
        before: what stood there, in one line.
        after: what stands there now, in one line.
        assumptions: what has to hold at run time; cheap ones are checked each step, a broken one runs padded.
        exactness: how the results relate (``exact``, ``same up to rounding``, ``same distribution``).
        verified: the rewrite was compared with the original on generated inputs: passed, failed, or not.
        reason: why it is worth it, and why it is legal.
    """

    site: str
    rule: str
    kernel: str | None = None
    source: str = ""
    before: str = ""
    after: str = ""
    assumptions: tuple[str, ...] = ()
    exactness: str = ""
    verified: bool | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "assumptions": list(self.assumptions)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rewrite:
        return cls(**{**data, "assumptions": tuple(data.get("assumptions", ()))})


@dataclass(frozen=True)
class Rejection:
    """One site that was looked at and left alone.

    Args:
        site: the part of the model, as its author names it.
        rule: the rule that would have applied.
        source: ``file:line`` of the user's code.
        reason: what is missing or in the way.
        hint: what the user can change, empty where there is nothing.
        node: the name of the graph node at fault.
    """

    site: str
    rule: str
    source: str = ""
    reason: str = ""
    hint: str = ""
    node: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rejection:
        return cls(**data)


class Change(NamedTuple):
    """An amount (FLOPs or bytes of one step) before and after the rewrites."""

    before: float
    after: float

    @property
    def saved(self) -> float:
        """The amount that is gone; negative where the rewritten graph needs more."""
        return self.before - self.after

    @property
    def ratio(self) -> float:
        """``before / after``: 2.0 means half is left. 1.0 if both are zero, infinite if nothing is left."""
        if self.after:
            return self.before / self.after
        return 1.0 if not self.before else float("inf")

    def __add__(self, other: object) -> Change:  # type: ignore[override]
        if not isinstance(other, Change):
            return NotImplemented
        return Change(self.before + other.before, self.after + other.after)


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of one step as sympy expressions, and what their symbols mean.

    Symbols are found by name, so a formula that went through JSON evaluates like the original.

    Args:
        flops_before, flops_after: floating point operations (a multiply-add is two).
        bytes_before, bytes_after: bytes read and written, counting each operand of each op once.
        symbols: name -> meaning, e.g. ``{"B": "batch size", "T": "valid positions"}``.
    """

    flops_before: Any = 0
    flops_after: Any = 0
    bytes_before: Any = 0
    bytes_after: Any = 0
    symbols: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        flops_before: Formula = 0,
        flops_after: Formula = 0,
        bytes_before: Formula = 0,
        bytes_after: Formula = 0,
        symbols: Mapping[str, str] | None = None,
    ) -> Cost:
        """Build from sympy expressions, numbers or strings (a string may use the names in ``symbols``)."""
        import sympy

        symbols = dict(symbols or {})
        names = {name: sympy.Symbol(name) for name in symbols}
        terms = [sympy.sympify(term, locals=names) for term in (flops_before, flops_after, bytes_before, bytes_after)]
        for symbol in sorted({str(s) for term in terms for s in term.free_symbols}):
            symbols.setdefault(symbol, "")
        return cls(**dict(zip(COST_TERMS, terms, strict=True)), symbols=symbols)

    def missing(self, values: Mapping[str, float]) -> list[str]:
        """Symbols the formulas use and ``values`` lacks."""
        used = {str(s) for name in COST_TERMS for s in getattr(getattr(self, name), "free_symbols", ())}
        return sorted(used - set(values))

    def flops(self, values: Mapping[str, float]) -> Change:
        """FLOPs before and after at the given symbol values. Raises ValueError when a symbol has no value."""
        return Change(self._at("flops_before", values), self._at("flops_after", values))

    def bytes(self, values: Mapping[str, float]) -> Change:
        """Bytes before and after at the given symbol values. Raises ValueError when a symbol has no value."""
        return Change(self._at("bytes_before", values), self._at("bytes_after", values))

    def _at(self, name: str, values: Mapping[str, float]) -> float:
        import sympy

        term = sympy.sympify(getattr(self, name))
        absent = sorted(str(s) for s in term.free_symbols if str(s) not in values)
        if absent:
            raise ValueError(f"cost {name} needs values for {absent}; given: {sorted(values)}")
        return float(term.subs({s: values[str(s)] for s in term.free_symbols}))

    def to_dict(self) -> dict[str, Any]:
        return {**{name: str(getattr(self, name)) for name in COST_TERMS}, "symbols": dict(self.symbols)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cost:
        return cls.of(**{name: data[name] for name in COST_TERMS}, symbols=data.get("symbols"))
