"""Norm fusion: spellings of the block that become one op, near misses that stay, and equal numbers in both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemopt
from tests.hostile.common import sweep

HEADS, HEAD_DIM, KEYS = 2, 8, 5
WIDTH = HEADS * HEAD_DIM


def rms(g: Tensor, eps: float = 1e-5) -> Tensor:
    return F.rms_norm(g, [WIDTH], eps=eps)


class Block(nn.Module):
    """A PFFN of fixed form whose parts a test replaces: ``parts`` maps a name to a function in place of the default."""

    def __init__(self, **parts: Callable[..., Any]) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(6, KEYS * WIDTH), nn.Linear(6, KEYS * WIDTH)
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.parts = parts
        self.norms = nn.ModuleList(p for p in parts.values() if isinstance(p, nn.Module))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        b, n, _ = x.shape
        part = self.parts.get
        ln = part("ln", lambda x: F.layer_norm(x, [WIDTH]))(x)
        q = ln.view(b, n, HEADS, HEAD_DIM)
        k, v = (f(context).view(b, KEYS, HEADS, HEAD_DIM) for f in (self.keys, self.values))
        scores = part("act", F.gelu)(torch.einsum("bihd,bjhd->bhij", q, k) * 0.3)
        o = torch.einsum("bhij,bjhd->bihd", scores, v).reshape(b, n, WIDTH)
        g = part("inner", lambda o, ln: o + ln)(o, ln)
        y = part("rms", rms)(g)
        return part("outer", lambda y, x, g: y + x)(y, x, g)


class Model(nn.Module):
    """Embedding, blocks, mean over the valid items."""

    def __init__(self, blocks: int = 1, **parts: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(Block(**parts) for _ in range(blocks))

    def forward(self, ids: Tensor, context: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, context)
        valid = (ids != 0)[..., None]
        return (x * valid).sum(1) / valid.sum(1).clamp(min=1)


def inputs(lengths: tuple[int, ...] = (3, 12, 0, 7, 1, 9)) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 30, (len(lengths), 12), generator=gen)
    ids[torch.arange(12) >= torch.tensor(lengths)[:, None]] = 0
    return ids, torch.randn(len(lengths), 6, generator=gen)


def step(model: Any, *args: Tensor) -> list[Tensor]:
    """Output, then gradients of the parameters."""
    model.zero_grad()
    out = model(*args)
    out.square().sum().backward()
    return [out.detach().double(), *(p.grad.double().clone() for p in model.parameters() if p.grad is not None)]


def check(recipe: gemopt.Recipe | None = None, blocks: int = 1, **parts: Any) -> Any:
    """Compare with eager in fp64, forward and backward, and return the report."""
    torch._dynamo.reset()
    model, args = Model(blocks, **parts), inputs()
    fast = gemopt.compile(model, recipe=recipe or gemopt.Recipe(inner="eager", min_saving=0.0, strict=True))
    got, eager = step(fast, *args), step(model, *args)
    exact = step(copy.deepcopy(model).double(), args[0], args[1].double())
    for x, low, want in zip(got, eager, exact, strict=True):
        error, bound = (x - want).norm(), 2 * (low - want).norm() + 4 * torch.finfo(torch.float32).eps * want.norm()
        assert error <= bound, f"{error:.3g} exceeds {bound:.3g}"
    return fast.report


def fused(report: Any) -> int:
    return sum(r.rule == "norm fusion" for r in report.rewrites)


def reasons(report: Any) -> list[str]:
    return [r.reason for r in report.rejections if r.rule == "norm fusion"]


def jittered(norm: nn.Module) -> nn.Module:
    """With weights that are not all one."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(torch.randn(p.shape, generator=generator) / 3)
    return norm


class _Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, [WIDTH], None, self.bias)


class _Written(nn.Module):
    """RMSNorm as language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, g: Tensor) -> Tensor:
        return self.weight * (g * torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + 1e-6))


SPELLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "swapped sums": {"inner": lambda o, ln: ln + o, "outer": lambda y, x, g: x + y},
    "default eps": {"rms": lambda g: F.rms_norm(g, [WIDTH])},
    "other eps": {"ln": lambda x: F.layer_norm(x, [WIDTH], eps=1e-3), "rms": lambda g: rms(g, 1e-2)},
    "rsqrt": {"rms": lambda g: g * torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + 1e-5)},
    "divided": {"rms": lambda g: g / torch.sqrt((g * g).mean(-1, keepdim=True) + 1e-5)},
    "power": {"rms": lambda g: (g.square().mean(-1, keepdim=True) + 1e-5) ** -0.5 * g},
    "reciprocal": {"rms": lambda g: g * (g.pow(2).mean(-1, True) + 1e-5).sqrt().reciprocal()},
    "modules": {"ln": nn.LayerNorm(WIDTH, elementwise_affine=False), "rms": nn.RMSNorm(WIDTH, elementwise_affine=False)},
    "relu": {"act": F.relu},
    "weights": {"ln": jittered(nn.LayerNorm(WIDTH)), "rms": jittered(nn.RMSNorm(WIDTH))},
    "bias alone": {"ln": _Biased()},
    "weight written out": {"rms": _Written()},
    "norms of the heads": {
        "ln": lambda x: F.layer_norm(x.view(*x.shape[:2], HEADS, HEAD_DIM), [HEADS, HEAD_DIM]).flatten(2),
    },
}

# What is not the block, and a part of the reason given, if one is.
MISSES: dict[str, tuple[dict[str, Any], str | None]] = {
    "no inner residual": ({"inner": lambda o, ln: o}, None),
    "inner residual twice": ({"inner": lambda o, ln: o + ln + ln}, None),
    "inner residual scaled": ({"inner": lambda o, ln: torch.add(o, ln, alpha=2)}, None),
    "outer residual scaled": ({"outer": lambda y, x, g: torch.add(y, x, alpha=0.5)}, None),
    "outer residual of g": ({"outer": lambda y, x, g: y + g}, None),
    "difference": ({"inner": lambda o, ln: o - ln}, None),
    "no norm of the result": ({"rms": lambda g: g}, None),
    "layer norm of the result": ({"rms": lambda g: F.layer_norm(g, [WIDTH])}, None),
    "g is read elsewhere": ({"outer": lambda y, x, g: y + x + 0.1 * g}, None),
    "g is read elsewhere, root": ({**SPELLINGS["rsqrt"], "outer": lambda y, x, g: y + x + 0.1 * g}, "read elsewhere"),
    "norm by head": (
        {"rms": lambda g: F.rms_norm(g.view(*g.shape[:2], HEADS, HEAD_DIM), [HEAD_DIM], eps=1e-5).flatten(2)},
        "8 features",
    ),
    "layer norm by head": (
        {"ln": lambda x: F.layer_norm(x.view(*x.shape[:2], HEADS, HEAD_DIM), [HEAD_DIM]).flatten(2)},
        "8 features",
    ),
    "mean of another axis": ({"rms": lambda g: g * torch.rsqrt(g.pow(2).mean((1, 2), keepdim=True) + 1e-5)}, None),
    "cube": ({"rms": lambda g: g * torch.rsqrt(g.abs().pow(3).mean(-1, keepdim=True) + 1e-5)}, None),
    "root of the root": ({"rms": lambda g: g * (g.pow(2).mean(-1, keepdim=True) + 1e-5) ** -0.25}, None),
    "ratio upside down": ({"rms": lambda g: torch.sqrt(g.pow(2).mean(-1, keepdim=True) + 1e-5) / (g.abs() + 1)}, None),
    "gate": ({"rms": lambda g: g * torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + 1e-5) * g.sigmoid()}, "read elsewhere"),
    "weight of a row": (
        {
            "rms": lambda g: (
                g * torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + 1e-5) * torch.arange(1, g.shape[1] + 1)[:, None]
            )
        },
        "not a weight",
    ),
    "dropout": ({"act": lambda s: F.dropout(F.gelu(s), 0.0)}, None),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_block_becomes_one_op(name: str) -> None:
    report = check(**SPELLINGS[name])
    assert fused(report) == 1, report
    assert not reasons(report)


@sweep
def test_a_chain_of_blocks_under_autograd() -> None:
    """The second block reads what the first has become."""
    recipe = gemopt.Recipe(inner="aot_eager", min_saving=0.0, strict=True)
    assert fused(check(recipe, blocks=2)) == 2
    assert fused(check(recipe, blocks=2, **SPELLINGS["weights"])) == 2


@pytest.mark.parametrize("name", MISSES)
def test_near_miss_stays(name: str) -> None:
    parts, reason = MISSES[name]
    report = check(**parts)
    if name == "dropout":  # p = 0 is no dropout
        assert fused(report) == 1
        return
    assert fused(report) == 0
    assert (reason is None and not reasons(report)) or all(str(reason) in r for r in reasons(report)), reasons(report)
    assert reason is None or len(reasons(report)) == 1


def test_region_border_stays() -> None:
    def outer(y: Tensor, x: Tensor, g: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return y + x

    report = check(outer=outer)
    assert fused(report) == 0 and all("autocast" in r for r in reasons(report)), reasons(report)


def test_verified() -> None:
    report = check(recipe=gemopt.Recipe(inner="eager", min_saving=0.0, strict=True, verify=True))
    assert [r.verified for r in report.rewrites if r.rule == "norm fusion"] == [True]


def test_a_difference_is_found_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemopt.passes import norm_fusion

    monkeypatch.setattr(norm_fusion, "_layer_norm", _other_eps(norm_fusion._layer_norm))
    report = check(recipe=gemopt.Recipe(inner="eager", min_saving=0.0, strict=True, verify=True))
    assert fused(report) == 0 and all("differs" in r for r in reasons(report)) and len(reasons(report)) == 1


def _other_eps(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        found = original(*args)
        return found and replace(found, eps=0.5)

    return wrong
