"""A generated program: source text with a module ``Model`` and a function ``inputs``, and how it came about."""

from __future__ import annotations

import hashlib
import linecache
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

HEADER = """import math

import torch
import torch.nn.functional as F
from torch import nn
"""
FOOTER = """
if __name__ == "__main__":
    torch.manual_seed(0)
    given = inputs(torch.tensor({lengths}), {max_len}, torch.Generator().manual_seed(0))
    print(Model()(**given))
"""


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        source: Python text that runs by itself; it defines ``Model`` (an ``nn.Module`` without arguments) and
            ``inputs(lengths [B], max_len, generator, holes=False) -> dict`` of its keyword arguments.
        axes: the decisions that led to it.
        positive: every attention in it can be computed on live rows alone, and these are fewer than all.
        sites: attentions in it.
        max_len, batch: sizes of the first batch; ``fixed`` forbids other lengths.
        shortest: smallest length of a sequence that eager defines well enough to compare.
        undefined_empty: the result of an empty sequence is an average of padding in eager (all keys masked, finite fill).
        margin: lengths stay this much below ``max_len``.
        holes: the mask need not be a prefix.
        autocast: ambient autocast dtype of the call.
        dtype: what the model and its float inputs are converted to.
    """

    source: str
    axes: Mapping[str, str] = field(default_factory=dict)
    positive: bool = True
    sites: int = 1
    max_len: int = 7
    batch: int = 5
    fixed: bool = False
    shortest: int = 0
    undefined_empty: bool = False
    margin: int = 0
    holes: bool = False
    autocast: torch.dtype | None = None
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """Twelve digits that tell programs apart by their text."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:12]

    def module(self) -> types.ModuleType:
        """The text as a module. Its lines are known to ``linecache``, so that tracebacks and reports show them."""
        filename = f"<program {self.name}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        module = types.ModuleType(f"program_{self.name}")
        exec(compile(self.source, filename, "exec"), module.__dict__)
        return module

    def build(self, seed: int = 0) -> tuple[nn.Module, Callable[..., dict[str, Any]]]:
        """A model with seeded parameters, all of them away from zero, and its input maker."""
        module = self.module()
        torch.manual_seed(seed)
        model: nn.Module = module.Model()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 2:  # biases and gains start as zeros and ones, which hide mistakes
                    parameter.add_(0.2 * torch.randn_like(parameter))
        if self.axes.get("mode") == "eval":
            model.eval()
        return model.to(self.dtype), lambda *a, **k: self._converted(module.inputs(*a, **k))

    def _converted(self, given: dict[str, Any]) -> dict[str, Any]:
        def convert(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.detach().to(self.dtype).requires_grad_(value.requires_grad)
            return value

        return {name: convert(value) for name, value in given.items()}

    def exact(self) -> Program:
        """The same program in fp64 throughout: where it is rewritten, nothing but the rounding is another."""
        source = self.source
        for wide, narrow in (
            ('torch.autocast("cpu", enabled=False)', 'torch.autocast("cpu", dtype=torch.bfloat16)'),
            (".double()", ".float()"),
            ("torch.float64", "torch.float32"),
        ):
            source = source.replace(narrow, wide)
        source = re.sub(r"finfo\(\w+\.dtype\)", "finfo(torch.float32)", source)  # fp64's least is no float to `torch.where`
        return replace(self, source=source, autocast=None, dtype=torch.float64)

    def __str__(self) -> str:
        decisions = "\n".join(f"# {axis}: {value}" for axis, value in self.axes.items())
        return f"{decisions}\n{self.source}"


class Draft:
    """Lines of a program under construction.

    Attributes:
        block_init, block: ``__init__`` and ``forward`` of the class ``Block``, which holds the attention.
        model_init, model: those of ``Model``.
        make: lines of ``inputs``.
        given: inputs in the order of ``Model.forward``'s arguments.
        passed: names that every block receives besides ``x``.
        hooks: lines that go in at a named point of the block; ``{s}`` stands for the tensor made there.
    """

    def __init__(self) -> None:
        self.block_init: list[str] = []
        self.block: list[str] = []
        self.model_init: list[str] = []
        self.model: list[str] = []
        self.make: list[str] = []
        self.given: list[str] = []
        self.passed: list[str] = []
        self.settings: dict[str, Any] = {}
        self.hooks: dict[str, list[str]] = {}
        self._count: dict[str, int] = {}

    def give(self, name: str, *lines: str) -> str:
        """An input of the model, made by ``lines``."""
        if name not in self.given:
            self.given.append(name)
            self.make += lines
        return name

    def passing(self, name: str) -> str:
        """A name of ``Model.forward`` that the block needs too."""
        if name not in self.passed:
            self.passed.append(name)
        return name

    def fresh(self, stem: str) -> str:
        """``stem``, ``stem2``, ``stem3`` ..."""
        self._count[stem] = self._count.get(stem, 0) + 1
        return stem if self._count[stem] == 1 else f"{stem}{self._count[stem]}"

    def at(self, point: str, s: str = "") -> None:
        """Write the hooks of a point."""
        self.block += [line.replace("{s}", s) for line in self.hooks.get(point, ())]

    def text(self, layers: int, tokens: str, after: list[str]) -> str:
        """The whole source: ``layers`` blocks over ``tokens``, then the lines ``after``."""
        context = ", ".join(self.passed)
        call = f"x = layer(x{', ' + context if context else ''})"
        first = [*self.model, f"x = {tokens}", f"for layer in self.layers:\n    {call}", *after]
        layer_init = [*self.model_init, f"self.layers = nn.ModuleList(Block() for _ in range({layers}))"]
        block = _class("Block", self.block_init, ["x", *self.passed], self.block)
        model = _class("Model", layer_init, self.given, first)
        make = ["batch = lengths.numel()", *self.make, "return dict(" + ", ".join(f"{n}={n}" for n in self.given) + ")"]
        maker = "def inputs(lengths, max_len, generator, holes=False):\n" + _indented(make, 1)
        low, high = self.settings.get("shortest", 0), self.settings.get("max_len", 7) - self.settings.get("margin", 0)
        shown = [high, max(low, 1), min(max(low, 3), high)]
        footer = FOOTER.format(lengths=shown, max_len=self.settings.get("max_len", 7))
        return "\n\n".join([HEADER, block, model, maker, footer.lstrip("\n")])


def _class(name: str, init: list[str], arguments: list[str], forward: list[str]) -> str:
    head = f"class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    body = _indented(forward, 2)
    return head + _indented(init, 2) + f"\n\n    def forward(self, {', '.join(arguments)}):\n" + body + "\n"


def _indented(lines: list[str], depth: int) -> str:
    text = "\n".join(lines)
    return re.sub(r"^(?=.)", "    " * depth, text, flags=re.M)
