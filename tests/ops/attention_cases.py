"""The jagged attention matrix: cases, inputs and the comparison with the fp64 reference, for every device and kernel."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gemopt.ops import block_attention, gdpa, jagged_attention, reference

GRADS = ("dq", "dk", "dv", "dbias")
OPS = {
    "jagged_attention": (jagged_attention, reference.jagged_attention),
    "gdpa": (gdpa, reference.gdpa),
    "block_attention": (block_attention, reference.block_attention),
}


@dataclass(frozen=True)
class Case:
    """One call. `positions` draws random ones; `seed` goes with dropout; `spare` rows follow the last offset.

    shared: the queries serve every sequence; `q_lens` is then their number, once for each sequence.
    bias, mask: which dims of `[B, H, Lq, Lk]` the drawn table has, the others being 1; "" draws none. An "x" among them
    expands the dims that are 1 to their full size instead.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...] | None = None  # None: the queries' (self attention)
    heads: int = 2
    kv_heads: int = 2
    d: int = 16
    dv: int | None = None
    spare: int = 0
    positions: str = ""  # "", "q", "k", "both", "same"
    offsets_dtype: torch.dtype = torch.int64
    bias: str = ""
    mask: str = ""
    shared: bool = False
    op: str = "jagged_attention"
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
    "causal window, more keys": Case((5, 9), (30, 12), kwargs={"window": (3, -1), "causal": True}),
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
    "bias": Case((5, 1, 16, 33), bias="BHQK"),
    "bias shared, causal": Case((5, 1, 0, 16, 33), bias="HQK", kwargs={"causal": True}),
    "bias shared by heads": Case((5, 20), (9, 17), bias="BQK", heads=4, kv_heads=2),
    "bias of keys": Case((5, 20, 3), (9, 17, 0), bias="BHK", spare=2),
    "bias of queries, expanded": Case((5, 20), bias="HQx", dv=8, kwargs={"window": (3, 2)}),
    "bias, bottom right": Case((5, 20), (9, 30), bias="HQK", kwargs={"causal": True, "causal_align": "bottom_right"}),
    "bias, positions": Case((14, 9, 1), (16, 12, 3), bias="HQK", positions="both", kwargs={"causal": True}),
    "bias, positions of keys": Case((14, 9, 1), (16, 12, 3), bias="BQK", positions="k"),
    "bias, single query": Case((1, 1, 0), (7, 20, 4), bias="BHQK", positions="q"),
    "bias, dropout": Case((5, 20, 3), bias="QK", heads=4, kv_heads=1, kwargs={"dropout_p": 0.3}),
    "mask": Case((5, 1, 16, 33), mask="BHQK"),
    "mask of keys": Case((5, 20, 3), (9, 17, 0), mask="BK", kwargs={"causal": True}),
    "mask, expanded": Case((5, 20), (9, 17), mask="QKx", kwargs={"window": (3, -1)}),
    "mask, positions": Case((14, 9, 1), (16, 12, 3), mask="BHQK", positions="both"),
    "mask and bias, single query": Case((1, 1), (7, 20), mask="HQK", bias="HK", kwargs={"dropout_p": 0.2}),
    "mask and bias, long": Case((150, 7, 131), mask="HQK", bias="HQK", kwargs={"causal": True}),
    "shared": Case((6,) * 4, (5, 0, 1, 33), shared=True),
    "shared, one sequence": Case((9,), (20,), shared=True, kwargs={"scale": 0.3}),
    "shared, one query, GQA": Case((1,) * 3, (7, 20, 0), heads=6, kv_heads=2, dv=8, shared=True),
    "shared, spare keys, window": Case((40,) * 3, (50, 0, 70), spare=3, shared=True, kwargs={"window": (9, 2)}),
    "shared, bottom right": Case((4,) * 3, (9, 2, 30), shared=True, kwargs={"causal": True, "causal_align": "bottom_right"}),
    "shared, positions": Case((14,) * 2, (16, 3), positions="both", shared=True, kwargs={"causal": True}),
    "shared, bias, mask, dropout": Case(
        (5,) * 3, (9, 0, 17), bias="HQK", mask="BK", shared=True, heads=4, kv_heads=2, kwargs={"dropout_p": 0.3}
    ),
    "shared, bias of sequences, positions": Case((5,) * 2, (9, 17), bias="BQK", positions="q", shared=True),
    "shared, no keys": Case((3, 3), (0, 0), shared=True, offsets_dtype=torch.int32),
    "shared, no sequence": Case((), shared=True),
    "shared, gdpa": Case((6,) * 3, (5, 0, 33), dv=8, shared=True, op="gdpa", kwargs={"activation": "sigmoid"}),
    "shared, gdpa, per head": Case(
        (3,) * 3, (9, 17, 2), bias="BHK", shared=True, op="gdpa", kwargs={"activation": ["gelu", "silu"], "dropout_p": 0.2}
    ),
    "gdpa": Case((5, 1, 16, 33), op="gdpa", kwargs={"activation": "gelu"}),
    "gdpa, causal, both scales": Case(
        (5, 1, 0, 33), op="gdpa", kwargs={"activation": "silu", "scale": 0.4, "post_scale": 0.1, "causal": True}
    ),
    "gdpa, dense keys": Case((20, 9, 0, 33), (8,) * 4, op="gdpa", kwargs={"activation": "gelu_tanh"}),
    "gdpa, sigmoid, padding": Case((20, 9, 3), (7, 30, 11), op="gdpa", spare=2, kwargs={"activation": "sigmoid"}),
    "gdpa, per head": Case(
        (5, 20), (9, 17), heads=4, kv_heads=2, op="gdpa", kwargs={"activation": ["gelu", "relu", "sigmoid", "gelu"]}
    ),
    "gdpa, window, bottom right": Case(
        (20, 9, 4), (7, 30, 11), op="gdpa",
        kwargs={"activation": "hardswish", "window": (2, 1), "causal_align": "bottom_right"},
    ),
    "gdpa, positions, bias, mask": Case(
        (14, 9, 1), (16, 12, 3), op="gdpa", positions="both", bias="HQK", mask="BQK",
        kwargs={"activation": "sigmoid", "causal": True, "scale": 0.5},
    ),
    "gdpa, single query, bias": Case((1, 0, 1), (7, 3, 20), op="gdpa", bias="BHK", kwargs={"activation": "leaky_relu"}),
    "gdpa, dropout": Case((5, 20, 0, 3), dv=8, op="gdpa", kwargs={"activation": "relu2", "dropout_p": 0.3}),
    "gdpa, long": Case((150, 7), (140, 200), op="gdpa", kwargs={"activation": "identity", "post_scale": 0.01}),
    "block": Case((5, 1, 16, 0, 33, 8), op="block_attention", kwargs={"block_size": 8}),
    "block, causal": Case((5, 1, 16, 0, 33), heads=4, kv_heads=2, spare=3, op="block_attention",
                          kwargs={"block_size": 16, "causal": True, "scale": 0.3}),
    "block of one": Case((3, 0, 2), op="block_attention", kwargs={"block_size": 1}),
    "block, empty": Case((0, 0), op="block_attention", kwargs={"block_size": 4}),
    "block, no sequence": Case((), op="block_attention", kwargs={"block_size": 4}),
    "block larger than all": Case((30, 7), op="block_attention", offsets_dtype=torch.int32, kwargs={"block_size": 64}),
}  # fmt: skip


def offsets_of(lens: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    return pad(torch.tensor(lens, dtype=torch.int64).cumsum(0), (1, 0)).to(dtype)


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    kwargs: dict[str, Any]  # everything else the op takes


def draw(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """fp64 values that `dtype` represents exactly, on the CPU."""
    gen = torch.Generator().manual_seed(seed)
    rows_q, rows_k = sum(case.q_lens) + case.spare, sum(case.key_lens) + case.spare
    rows_out = rows_q
    if case.shared:
        rows_q, rows_out = (case.q_lens or (3,))[0], sum(case.q_lens)
    dv = case.d if case.dv is None else case.dv

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype).double()

    def positions(rows: int) -> Tensor:
        return torch.randint(0, 20, (rows,), generator=gen)

    def table(axes: str) -> Tensor:
        longest = [20 if case.positions else 0] * 2
        full = (len(case.q_lens), case.heads, *map(max, longest, (max_q, max_k)))
        drawn = normal(*(n if axis in axes else 1 for axis, n in zip("BHQK", full, strict=True)))
        return drawn.expand(full) if "x" in axes else drawn

    kwargs = dict(case.kwargs)
    max_q, max_k = max(case.q_lens, default=0), max(case.key_lens, default=0)
    q_offsets, k_offsets = (offsets_of(lens, case.offsets_dtype) for lens in (case.q_lens, case.key_lens))
    if case.op == "block_attention":
        kwargs.update(offsets=q_offsets, max_seqlen=max_q)
    else:
        kwargs.update(q_offsets=None if case.shared else q_offsets, k_offsets=k_offsets, max_q=max_q, max_k=max_k)
    if case.bias:
        kwargs["bias"] = table(case.bias)
    if case.mask:
        kwargs["mask"] = table(case.mask) > -0.5
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
        normal(rows_out, case.heads, dv),
        kwargs,
    )


def run(function: Any, inputs: Inputs, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """out, dq, dk, dv and, with a bias, dbias on the CPU in fp64."""
    q, k, v = (x.to(device, dtype).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    kwargs = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.kwargs.items()}
    leaves = [q, k, v]
    if "bias" in kwargs:
        kwargs["bias"] = kwargs["bias"].to(dtype).requires_grad_()
        leaves.append(kwargs["bias"])
    out = function(q, k, v, **kwargs)
    grads = torch.autograd.grad(out, leaves, inputs.dout.to(device, dtype))
    assert out.dtype == dtype and all(g.dtype == dtype for g in grads)
    return dict(zip(("out", *GRADS), (x.detach().cpu().double() for x in (out, *grads)), strict=False))


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
    """The op against its reference, forward and backward."""
    inputs = draw(case, dtype, seed)
    op, eager_op = OPS[case.op]
    exact = run(eager_op, inputs, torch.float64)
    eager = run(eager_op, inputs, dtype)
    assert_close(run(op, inputs, dtype, device), eager, exact, dtype, slack)
