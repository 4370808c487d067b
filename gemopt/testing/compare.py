"""Is a tensor as good as eager's? Errors against fp64, and a readable account of what differs.

    RMS(x - ref) <= ratio * RMS(eager - ref) + ulps * ulp(RMS(ref))

with ratio 2 and 4 ulps: the contract of the project. RMS, not maximum, because the order of a reduction moves
single elements. Eager's error can be near zero by luck, above all where a gradient is zero in exact
arithmetic (the bias of K) or has few elements; a tensor that fails is looked at again with the largest error
of eager runs whose inputs and parameters are moved by one rounding (Monte Carlo arithmetic: Stott Parker,
1997), twice that for tensors of few elements and for fp64. Elements where fp64 is NaN are not compared and
are counted; infinities have to be equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    ratio: float = 2.0
    ulps: float = 4.0


@dataclass
class Comparison:
    """One tensor of one case. Errors are RMS and maximum against fp64; `problem` is empty if it is as good as
    eager's.
    """

    name: str
    problem: str = ""
    compared: int = 0
    skipped: int = 0
    rms: float = 0.0
    rms_eager: float = 0.0
    maximum: float = 0.0
    bound: float = 0.0
    size: float = 0.0  # RMS of fp64's values
    by_noise: bool = False
    detail: str = ""

    @property
    def ratio(self) -> float:
        """RMS error over the bound: at most 1 where the contract holds."""
        return self.rms / self.bound if self.bound else (0.0 if self.rms == 0 else math.inf)

    @property
    def is_rounding(self) -> bool:
        """Whether what differs is an error above its bound, and not a shape, a dtype, an integer or a NaN."""
        return self.problem.startswith("RMS error")


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt()) if tensor.numel() else 0.0


def ulp(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring floats of `dtype` at `value`."""
    if not value or not math.isfinite(value):
        return float(torch.finfo(dtype).tiny)
    return float(torch.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(value))


def compare(
    name: str, new: Tensor | None, eager: Tensor | None, reference: Tensor | None, tolerance: Tolerance
) -> Comparison:
    """Compare `new` with `eager` (same dtype) by their errors against `reference` (fp64)."""
    if eager is None or new is None or reference is None:
        return Comparison(name, _presence(new, eager))
    problem = _metadata(new, eager)
    if problem:
        return Comparison(name, problem)
    if not eager.is_floating_point():
        wrong = int((new != eager).sum())
        return Comparison(name, f"{wrong} of {new.numel()} values differ" if wrong else "", compared=new.numel())
    return _floats(name, new.detach(), eager.detach(), reference.detach(), tolerance)


def _presence(new: Tensor | None, eager: Tensor | None) -> str:
    if (new is None) == (eager is None):
        return ""
    present, absent = ("gemopt", "eager") if eager is None else ("eager", "gemopt")
    return f"{present} has a tensor here, {absent} has None"


def _metadata(new: Tensor, eager: Tensor) -> str:
    if new.shape != eager.shape:
        return f"shape {tuple(new.shape)} for eager's {tuple(eager.shape)}"
    if new.dtype != eager.dtype:
        return f"dtype {new.dtype} for eager's {eager.dtype}"
    if new.device != eager.device:
        return f"device {new.device} for eager's {eager.device}"
    if new.requires_grad != eager.requires_grad:
        return f"requires_grad {new.requires_grad} for eager's {eager.requires_grad}"
    if new.numel() and _strides(new) != _strides(eager):
        return f"stride {new.stride()} for eager's {eager.stride()}"
    return ""


def _strides(tensor: Tensor) -> list[int]:
    """Strides of the axes where they mean something."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


def _floats(name: str, new: Tensor, eager: Tensor, reference: Tensor, tolerance: Tolerance) -> Comparison:
    mine, theirs, exact = new.double(), eager.double(), reference.double()
    infinite = exact.isinf() & (theirs == exact)
    usable = exact.isfinite() & theirs.isfinite()
    out = Comparison(name, compared=int(usable.sum() + infinite.sum()))
    out.skipped = new.numel() - out.compared
    error = torch.where(usable, mine - exact, 0.0)
    out.rms_eager = _masked_rms(theirs - exact, usable)
    out.size = _masked_rms(exact, usable)
    out.bound = tolerance.ratio * out.rms_eager + tolerance.ulps * ulp(out.size, eager.dtype)
    out.rms = _masked_rms(error, usable)
    out.maximum = float(error.abs().max()) if error.numel() else 0.0
    wrong_inf = infinite & (mine != exact)
    if bool((usable & ~mine.isfinite()).any()):
        out.problem = f"{int((usable & ~mine.isfinite()).sum())} values are not finite where eager's are"
        out.rms = math.inf
    elif bool(wrong_inf.any()):
        out.problem = f"{int(wrong_inf.sum())} infinities of eager's are missing"
    elif out.rms > out.bound:
        out.problem = f"RMS error {out.rms:.3g}, allowed {out.bound:.3g} (eager's is {out.rms_eager:.3g})"
    if out.problem:
        out.detail = _detail(mine, theirs, exact, usable | infinite)
    return out


def _masked_rms(tensor: Tensor, where: Tensor) -> float:
    count = int(where.sum())
    return float((torch.where(where, tensor, 0.0).square().sum() / count).sqrt()) if count else 0.0


def _detail(mine: Tensor, theirs: Tensor, exact: Tensor, compared: Tensor) -> str:
    """The worst element, the rows that differ, and where NaNs are."""
    error = torch.where(compared, (mine - exact).abs(), 0.0).nan_to_num(nan=math.inf)
    flat = int(error.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))
    lines = [
        f"worst at {index}: gemopt {float(mine[index]):.6g}, eager {float(theirs[index]):.6g}, "
        f"fp64 {float(exact[index]):.6g}"
    ]
    lines += _rows(error, torch.where(compared, (theirs - exact).abs(), 0.0))
    lost = [f"{label} {int(t.isnan().sum())}" for label, t in (("gemopt", mine), ("eager", theirs), ("fp64", exact))]
    if not all(text.endswith(" 0") for text in lost):
        lines.append("NaN: " + ", ".join(lost) + f" of {exact.numel()}")
    return "\n".join(lines)


def _rows(error: Tensor, usual: Tensor) -> list[str]:
    """Which rows are off by much more than eager's are: `[i]`, or `[i, j]` where the tensor has three
    axes.
    """
    if error.dim() < 2:
        return []
    depth = 2 if error.dim() >= 3 else 1
    by_row = error.flatten(depth).amax(-1)
    level = max(8 * float(usual.max()), float(by_row[by_row.isfinite()].max()) / 100 if by_row.isfinite().any() else 0)
    bad = (by_row > level).nonzero().tolist()
    if not bad or len(bad) == by_row.numel():
        return ["every row differs"] if bad else []
    shown = ", ".join("[" + ", ".join(map(str, row)) + "]" for row in bad[:12])
    return [f"{len(bad)} of {by_row.numel()} rows differ: {shown}{', …' if len(bad) > 12 else ''}"]
