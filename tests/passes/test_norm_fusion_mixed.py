"""Norm fusion under autocast: norms and residuals in fp32 around an attention in 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gemopt
from tests.hostile.common import sweep
from tests.passes import test_norm_fusion as plain
from tests.passes.test_norm_fusion import WIDTH, fused, inputs, jittered, reasons, rms, step

aten = torch.ops.aten
BF16 = torch.bfloat16
#: What CUDA's autocast runs in fp32 and the CPU's does not, among what these blocks call.
FP32_ON_CUDA = {
    "layer_norm": aten.layer_norm.default,
    "rms_norm": aten.rms_norm.default,
    "pow.Tensor_Scalar": aten.pow.Tensor_Scalar,
    "rsqrt": aten.rsqrt.default,
}


@pytest.fixture
def as_on_cuda() -> Iterator[None]:
    """The CPU's autocast with the list of CUDA's."""
    library = torch.library.Library("aten", "IMPL")
    for name, op in FP32_ON_CUDA.items():
        library.impl(name, _in_fp32(op), "AutocastCPU")
    with torch.autocast("cpu", BF16):
        assert F.layer_norm(torch.ones(2, 2, dtype=BF16), [2]).dtype == torch.float32
    yield
    library._destroy()


def test_the_list_is_cudas() -> None:
    """As far as torch can say without a GPU: by fake tensors."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    try:
        with FakeTensorMode():
            x = torch.empty(2, 4, device="cuda", dtype=BF16)
            made = [F.layer_norm(x, [4]), x.pow(2), x.rsqrt()]
            assert [y.dtype for y in made] == [torch.float32] * 3
            if torch.__version__ >= "2.13":  # torch 2.11 leaves it in the dtype of its input
                assert F.rms_norm(x, [4]).dtype == torch.float32
            assert (x @ x.mT).dtype == F.gelu(x).dtype == BF16
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)


def _in_fp32(op: Any) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def widened(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.dtype in (BF16, torch.float16) else x

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*map(widened, args), **{k: widened(x) for k, x in kwargs.items()})

    return run


class Model(plain.Model):
    """With a linear layer before the blocks if the stream is ``low``: what these read is in bf16 then."""

    def __init__(self, stream: str, blocks: int, **parts: Any) -> None:
        super().__init__(blocks, **parts)
        self.first = nn.Linear(WIDTH, WIDTH) if stream == "low" else nn.Identity()

    def forward(self, ids: Tensor, context: Tensor) -> Tensor:
        x = self.first(self.table(ids))
        for block in self.blocks:
            x = block(x, context)
        valid = (ids != 0)[..., None]
        return (x * valid).float().sum(1) / valid.sum(1).clamp(min=1)


def check(
    stream: str = "fp32", blocks: int = 1, compiler: str = "eager", verify: bool = False, casts: bool = False,
    device: str = "cpu", **parts: Any,
) -> Any:  # fmt: skip
    """Compare with eager in fp64 under the bounds of eager's autocast, forward and backward, and return the report.

    casts: the parts have some, which are left out in fp64.
    """
    torch._dynamo.reset()
    model, args = Model(stream, blocks, **parts), inputs()
    twin = Model(stream, blocks) if casts else copy.deepcopy(model)
    exact = step(twin.double(), args[0], args[1].double())
    fast = gemopt.compile(model, recipe=gemopt.Recipe(inner=compiler, min_saving=0.0, strict=True, verify=verify))
    model, args = model.to(device), tuple(x.to(device) for x in args)  # the same parameters for `fast`
    with torch.autocast(device, BF16):
        got, eager = ([x.cpu() for x in step(f, *args)] for f in (fast, model))
    for x, low, want in zip(got, eager, exact, strict=True):
        error, bound = (x - want).norm(), 2 * (low - want).norm() + 4 * torch.finfo(torch.float32).eps * want.norm()
        assert error <= bound, f"{error:.3g} exceeds {bound:.3g}"
    return fast.report


def mixed(report: Any) -> int:
    return sum(r.rule == "norm fusion" and "16 bits" in r.after for r in report.rewrites)


class _Llama(nn.Module):
    """RMSNorm as language models write it, with casts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, g: Tensor) -> Tensor:
        wide = g.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(g) * self.weight


SPELLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"ln": jittered(nn.LayerNorm(WIDTH)), "rms": jittered(nn.RMSNorm(WIDTH, eps=1e-5))},
    "casts by hand": {
        "ln": lambda x: F.layer_norm(x.float(), [WIDTH]),
        "inner": lambda o, ln: ln + o.float(),
        "outer": lambda y, x, g: y.float() + x.float(),
    },
    "rsqrt": plain.SPELLINGS["rsqrt"],
    "divided": plain.SPELLINGS["divided"],
    "llama": {"rms": _Llama()},
}
QUICK = {("casts by hand", "low"), ("weights", "low"), ("llama", "fp32")}

MISSES: dict[str, tuple[dict[str, Any], str | None]] = {
    "residual rounded": ({"inner": lambda o, ln: o + ln.to(BF16)}, None),
    "ln rounded for all": ({"ln": lambda x: F.layer_norm(x, [WIDTH]).to(BF16).float()}, None),
    "sum rounded": ({"rms": lambda g: rms(g.to(BF16))}, None),
    "result rounded": ({"rms": lambda g: rms(g).to(BF16)}, None),
    "outer residual rounded": ({"outer": lambda y, x, g: y + x.to(BF16)}, None),
    "sum in fp64": ({"inner": lambda o, ln: o.double() + ln.double()}, "mixes dtypes"),
    "rounded in fp16": ({"ln": lambda x: F.layer_norm(x, [WIDTH]).to(torch.float16)}, None),
}
QUICK_MISSES = ("residual rounded", "outer residual rounded", "sum in fp64")


def test_under_the_cpus_autocast() -> None:
    """A stream in fp32 keeps its norms in fp32; one in bf16 is a block of one dtype."""
    assert mixed(check(blocks=2, compiler="aot_eager")) == 2
    report = check("low")
    assert fused(report) == 1 and mixed(report) == 0


@pytest.mark.usefixtures("as_on_cuda")
def test_under_cudas_autocast() -> None:
    """The first block reads bf16, and fp32 is what it gives the second."""
    assert mixed(check("low", blocks=2, compiler="aot_eager")) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("stream", ["fp32", "low"])
def test_on_a_gpu(stream: str) -> None:
    assert mixed(check(stream, blocks=2, compiler="aot_eager", device="cuda")) == 2


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    ("name", "stream"),
    [
        pytest.param(name, stream, marks=() if (name, stream) in QUICK else sweep)
        for name in SPELLINGS
        for stream in ("fp32", "low")
    ],
)
def test_spellings(name: str, stream: str) -> None:
    report = check(stream, casts="casts" in name, **SPELLINGS[name])
    assert mixed(report) == 1 and not reasons(report), report


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK_MISSES else sweep) for n in MISSES])
def test_near_miss_stays(name: str) -> None:
    parts, reason = MISSES[name]
    torch._dynamo.reset()
    with torch.autocast("cpu", BF16):
        report = gemopt.explain(Model("fp32", 1, **parts), *inputs())
    assert "gdpa" in report.graph("unpad") and fused(report) == 0
    assert (not reasons(report)) if reason is None else all(reason in r for r in reasons(report)), reasons(report)


@sweep
def test_verified() -> None:
    report = check(verify=True)
    assert [r.verified for r in report.rewrites if r.rule == "norm fusion"] == [True]
