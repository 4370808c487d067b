"""The jagged attention matrix: cases, inputs and the comparison with the fp64 reference, for every device and kernel."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gemopt.ops import jagged_attention, reference

GRADS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One call. `positions` draws random ones; `seed` goes with dropout; `spare` rows follow the last offset."""

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...] | None = None  # None: the queries' (self attention)
    heads: int = 2
    kv_heads: int = 2
    d: int = 16
    dv: int | None = None
    spare: int = 0
    positions: str = ""  # "", "q", "k", "both", "same"
    offsets_dtype: torch.dtype = torch.int64
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def key_lens(self) -> tuple[int, ...]:
        return self.q_lens if self.k_lens is None else self.k_lens


CASES: dict[str, Case] = {
    "plain": Case((5, 1, 16, 33)),
    "causal": Case((5, 1, 16, 33), kwargs={"causal": True}),
    "one sequence": Case((40,), kwargs={"causal": True}),
    "equal lengths": Case((24, 24, 24), kwargs={"causal": True}),
    "zeros and ones": Case((0, 1, 0, 7, 1, 0), kwargs={"causal": True}),
    "queries without keys": Case((3, 4, 0, 2), (0, 5, 3, 1)),
    "all empty": Case((0, 0, 0), kwargs={"causal": True}),
    "empty batch": Case(()),
    "no queries": Case((0, 0), (3, 2)),
    "no keys": Case((3, 2), (0, 0)),
    "spare rows": Case((4, 9), (6, 2), spare=3),
    "cross": Case((5, 20, 3, 31), (17, 4, 40, 31)),
    "cross causal top left": Case((5, 20, 3, 31), (17, 4, 40, 31), kwargs={"causal": True}),
    "cross causal bottom right": Case(
        (5, 20, 3, 31), (17, 4, 40, 31), kwargs={"causal": True, "causal_align": "bottom_right"}
    ),
    "self causal bottom right": Case((5, 20), kwargs={"causal": True, "causal_align": "bottom_right"}),
    "window": Case((20, 9, 33), kwargs={"window": (3, 2)}),
    "window left": Case((20, 9, 33), kwargs={"window": (4, -1)}),
    "window right": Case((20, 9, 33), kwargs={"window": (-1, 1)}),
    "window zero": Case((20, 9, 33), kwargs={"window": (0, 0)}),
    "causal window": Case((20, 9, 33), kwargs={"window": (5, 3), "causal": True}),
    "window, cross, bottom right": Case((20, 9, 4), (7, 30, 11), kwargs={"window": (2, 1), "causal_align": "bottom_right"}),
    "positions q": Case((4, 9, 1), (6, 12, 3), positions="q", kwargs={"causal": True}),
    "positions k": Case((4, 9, 1), (6, 12, 3), positions="k", kwargs={"causal": True}),
    "positions both": Case((14, 9, 1), (16, 12, 3), positions="both", kwargs={"causal": True}),
    "positions same": Case((14, 9, 1), positions="same", kwargs={"causal": True}),
    "positions window": Case((14, 9, 1), (16, 12, 3), positions="both", kwargs={"window": (6, 4)}),
    "positions unused": Case((14, 9, 1), positions="both"),
    "single query": Case((1, 1, 1), (7, 33, 1)),
    "single query, holes": Case((1, 0, 1, 1), (7, 3, 0, 20)),
    "single query, positions": Case((1, 0, 1, 1), (7, 3, 5, 20), positions="both", kwargs={"causal": True}),
    "single query, bottom right": Case(
        (1, 1), (7, 20), kwargs={"causal": True, "causal_align": "bottom_right", "window": (3, -1)}
    ),
    "single query, window right": Case((1, 1), (7, 20), positions="q", kwargs={"causal": True, "window": (-1, 2)}),
    "single query, GQA": Case((1, 1, 1), (7, 20, 4), heads=6, kv_heads=2, dv=8),
    "single query, dropout": Case((1, 0, 1), (7, 3, 20), kwargs={"dropout_p": 0.4}),
    "GQA": Case((5, 20), (9, 17), heads=6, kv_heads=2, kwargs={"causal": True}),
    "GQA one key head": Case((5, 20), heads=3, kv_heads=1),
    "wide values": Case((5, 20), (9, 17), d=16, dv=32),
    "narrow values": Case((5, 20), (9, 17), d=32, dv=8, heads=4, kv_heads=2, kwargs={"causal": True}),
    "odd head_dim": Case((5, 20), d=24, kwargs={"causal": True}),
    "head_dim 64": Case((70, 5), d=64, kwargs={"causal": True}),
    "scale": Case((5, 20), kwargs={"scale": 0.7}),
    "dropout": Case((5, 20, 0, 3), kwargs={"dropout_p": 0.3}),
    "dropout causal GQA": Case((5, 20, 3), heads=4, kv_heads=2, kwargs={"dropout_p": 0.5, "causal": True}),
    "dropout 1": Case((5, 20), kwargs={"dropout_p": 1.0}),
    "int32 offsets": Case((5, 0, 20), offsets_dtype=torch.int32, kwargs={"causal": True}),
    "long": Case((150, 7, 131), kwargs={"causal": True}),
    "long, not causal": Case((150, 7), (140, 200)),
    "long window": Case((150, 200), kwargs={"window": (20, 0)}),
}


def offsets_of(lens: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    return pad(torch.tensor(lens, dtype=torch.int64).cumsum(0), (1, 0)).to(dtype)


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    kwargs: dict[str, Any]  # everything else jagged_attention takes


def draw(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """fp64 values that `dtype` represents exactly, on the CPU."""
    gen = torch.Generator().manual_seed(seed)
    rows_q, rows_k = sum(case.q_lens) + case.spare, sum(case.key_lens) + case.spare
    dv = case.d if case.dv is None else case.dv

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype).double()

    def positions(rows: int) -> Tensor:
        return torch.randint(0, 20, (rows,), generator=gen)

    kwargs = dict(case.kwargs)
    kwargs.update(
        q_offsets=offsets_of(case.q_lens, case.offsets_dtype),
        k_offsets=offsets_of(case.key_lens, case.offsets_dtype),
        max_q=max(case.q_lens, default=0),
        max_k=max(case.key_lens, default=0),
    )
    if case.positions in ("q", "both"):
        kwargs["q_positions"] = positions(rows_q)
    if case.positions in ("k", "both"):
        kwargs["k_positions"] = positions(rows_k).to(torch.int32)
    if case.positions == "same":  # ascending with holes, as the ranks of a mask
        ascending = torch.cat([torch.randperm(2 * n, generator=gen)[:n].sort().values for n in case.q_lens])
        kwargs.update(q_positions=ascending, k_positions=ascending.clone())
    if "dropout_p" in kwargs:
        kwargs["seed"] = torch.tensor(0x1234_5678_9ABC_DEF + seed)
    return Inputs(
        normal(rows_q, case.heads, case.d),
        normal(rows_k, case.kv_heads, case.d),
        normal(rows_k, case.kv_heads, dv),
        normal(rows_q, case.heads, dv),
        kwargs,
    )


def run(function: Any, inputs: Inputs, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """out, dq, dk, dv on the CPU in fp64."""
    q, k, v = (x.to(device, dtype).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    kwargs = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.kwargs.items()}
    out = function(q, k, v, **kwargs)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout.to(device, dtype))
    assert out.dtype == dtype and all(g.dtype == dtype for g in grads)
    return dict(zip(("out", *GRADS), (x.detach().cpu().double() for x in (out, *grads)), strict=True))


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def assert_close(
    actual: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype, slack: float = 2.0
) -> None:
    """RMS error at most `slack` times eager's in the same dtype, plus 4 ulp of the tensor's RMS.

    Gradients of q and k are differences of terms of the size of the (unit normal) inputs, which bounds the ulp below.
    """
    eps = torch.finfo(dtype).eps
    ulps = 64 if dtype == torch.float64 else 4  # in fp64 the reference is no more exact than the kernel
    for name, want in exact.items():
        got = actual[name]
        assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        assert got.isfinite().all(), f"{name}: not finite at {(~got.isfinite()).nonzero()[:3].tolist()}"
        error, bound = rms(got - want), slack * rms(eager[name] - want) + ulps * eps * max(rms(want), 0.25)
        assert error <= bound, f"{name}: RMS error {error:.3g} exceeds {bound:.3g} (RMS {rms(want):.3g})"


def check(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0, slack: float = 2.0) -> None:
    """jagged_attention against the reference, forward and backward."""
    inputs = draw(case, dtype, seed)
    exact = run(reference.jagged_attention, inputs, torch.float64)
    eager = run(reference.jagged_attention, inputs, dtype)
    assert_close(run(jagged_attention, inputs, dtype, device), eager, exact, dtype, slack)
