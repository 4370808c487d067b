"""Every configuration of the selection table compiles for sm_90 within its limits of spills and shared memory.

No GPU is needed (see gemopt/kernels/gluon/aot.py). A C75xx warning means that ptxas serialises wgmma products. Always every
kernel is compiled with all head dims, score functions and masks; all rows, and these in all combinations, under
GEMOPT_TEST_SWEEP=1.
"""

import importlib.util
import os
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs compiled triton", allow_module_level=True)

from gemopt.kernels.gluon import aot, launch, scores, table
from gemopt.kernels.gluon import blocks as hopper_blocks
from gemopt.kernels.gluon.backward import attention_backward
from gemopt.kernels.gluon.forward import attention_forward
from gemopt.kernels.gluon.fused import attention_backward_fused
from gemopt.kernels.spec import AttentionSpec
from gemopt.kernels.triton import block_attention as blocks
from gemopt.kernels.triton.tiles import TileList
from tests.hostile.common import sweep

SHARED_MEMORY = 232_448  # bytes a program may use on sm_90
# Bytes of spill stores and loads together, all roles. The fused backward keeps 128 accumulators beside two score tiles; its
# mask adds to that, and so does the forward's at head_dim 256 (40). Measured, it is still the fastest form there. The query
# side spills under a window with softmax, and is faster than without the shares that make it spill.
SPILLS = {"forward": 64, "split": 64, "query_side": 64, "key_side": 320, "fused": 1024, "owner": 1024, "ordered": 1024}
KERNELS = {
    "forward": attention_forward,
    "split": attention_forward,
    "query_side": attention_backward,
    "key_side": attention_backward,
    "fused": attention_backward_fused,
    "owner": attention_backward_fused,
    "ordered": attention_backward_fused,
}


def tensors(d: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    return [torch.zeros(256, 2, d, dtype=dtype) for _ in range(count)]


def arguments(kernel: str, config: dict[str, Any], d: int, call: launch.Call, dtype: torch.dtype) -> dict[str, Any]:
    """A launch of `kernel`, with tensors of the CPU."""
    q, k, v, dout = tensors(d, dtype, 4)
    floats = torch.zeros(256, 2, d)
    tiles = TileList(torch.zeros(8, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 128)
    if kernel in ("forward", "split"):
        partial = torch.zeros(3, 256, 2, d) if kernel == "split" else None
        return launch.forward_arguments(q, k, v, dout, floats, tiles, call, launch.ForwardConfig(**config), partial)
    cfg = launch.SideConfig(**config)
    if kernel in ("fused", "owner", "ordered"):
        dq = q if kernel == "owner" else None
        floats = torch.zeros(4, 256, 2, d) if kernel == "ordered" else floats
        return launch.fused_arguments((k, v), (q, dout), (k, v), floats, dq, floats, tiles, call, cfg)
    key_side = kernel == "key_side"
    x, y = ((k, v), (q, dout)) if key_side else ((q, dout), (k, v))
    return launch.side_arguments(x, y, x, floats, tiles, call, cfg, key_side)


def cases() -> list[Any]:
    """Table rows × head dims × (plain, causal window), each with the heaviest score function it is for.

    The first of every kernel with a mask, for softmax and for an activation, runs always; of split keys, which differ from
    the forward in where a result goes, the first alone.
    """
    found = []
    seen: set[tuple[Any, ...]] = set()
    for i, row in enumerate(table.rows()):
        kernel = row["kernel"]
        if kernel in ("backward", "block_backward"):
            continue
        for d in sorted(row["head_dim"], reverse=True):
            for softmax in [row["softmax"]] if "softmax" in row else [True, False]:
                for band in [row["band"]] if "band" in row else [True, False]:
                    name = f"{i}-{kernel}-{d}-{'softmax' if softmax else 'gelu'}{'-band' if band else ''}"
                    # One compile each of the kernels, and of the mask and softmax that share a kernel's registers.
                    shown = {(kernel, softmax)} if band else set()
                    shown = {(kernel,)} if kernel == "split" else shown
                    marks = pytest.mark.slow if shown - seen else sweep
                    seen |= shown
                    found.append(pytest.param(row, d, softmax, band, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("row", "d", "softmax", "band"), cases())
def test_configuration_compiles(row: dict[str, Any], d: int, softmax: bool, band: bool) -> None:
    code = 0 if softmax else scores.code("gelu", torch.bfloat16)
    call = launch.Call(code, 0.1, left=3 if band else -1, right=0 if band else -1, bottom_right=band)
    kernel = row["kernel"]
    found = aot.compile_kernel(KERNELS[kernel], arguments(kernel, row["config"], d, call, torch.bfloat16))
    assert found.spilled <= SPILLS[kernel], f"{found.spilled} bytes spilled"
    assert found.shared <= SHARED_MEMORY
    assert not found.warnings, found.warnings
    assert "wgmma.mma_async" in found.ptx and "setmaxnreg" in found.ptx


@sweep
def test_a_serialised_product_is_seen() -> None:
    """The gate can fail: 256 streamed keys leave too few registers."""
    config = {"parts": 2, "keys": 256, "stages": 1, "q_stages": 1}
    call = launch.Call(scores.code("gelu", torch.bfloat16), 0.1)
    found = aot.compile_kernel(attention_forward, arguments("forward", config, 128, call, torch.bfloat16))
    assert found.spilled > SPILLS["forward"] or found.warnings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("softmax", "band"),
    [pytest.param(*case, marks=sweep) for case in ((True, True), (False, False), (True, False), (False, True))],
)
def test_ordered_form_of_shared_queries_compiles(softmax: bool, band: bool) -> None:
    row = next(r for r in table.rows() if r["kernel"] == "fused" and r.get("softmax", softmax) == softmax)
    code = 0 if softmax else scores.code("gelu", torch.bfloat16)
    call = launch.Call(code, 0.1, left=3 if band else -1, right=0 if band else -1, bottom_right=band, shared_q=True)
    found = aot.compile_kernel(KERNELS["ordered"], arguments("ordered", row["config"], 128, call, torch.bfloat16))
    assert found.spilled <= SPILLS["ordered"] and found.shared <= SHARED_MEMORY and not found.warnings


@pytest.mark.slow
@sweep
@pytest.mark.parametrize("kernel", ["forward", "fused", "query_side", "key_side"])
def test_shared_queries_compile(kernel: str) -> None:
    row = next(r for r in table.rows() if r["kernel"] == kernel and 128 in r["head_dim"])
    call = launch.Call(0, 0.1, shared_q=True)
    found = aot.compile_kernel(KERNELS[kernel], arguments(kernel, row["config"], 128, call, torch.bfloat16))
    assert found.spilled <= SPILLS[kernel] and found.shared <= SHARED_MEMORY and not found.warnings


def test_form_of_the_gradient_of_shared_queries() -> None:
    for longest in (64, 2048):
        for softmax in (True, False):
            shape = table.Shape(128, softmax, False, 192, longest)
            assert table.backward_form(shape, False, True, shared=True) == "fused"
            assert table.backward_form(shape, True, True, few=True, shared=True) == "ordered"
            assert table.backward_form(shape, True, True, shared=True) == "two"
    assert table.backward_form(table.Shape(128, True, False, 32, 16384), True, False, few=True) == "ordered"


def test_table_gives_every_kernel_a_configuration() -> None:
    for d in (32, 64, 128):
        for softmax in (True, False):
            for band in (True, False):
                for longest in (1, 64, 192, 2048):
                    shape = table.Shape(d, softmax, band, longest, longest)
                    assert table.forward_config(shape) is not None
                    assert table.backward_form(shape, True, False) == "two"
                    for kernel in ("query_side", "key_side", "fused"):
                        assert table.side_config(kernel, shape) is not None


def test_table_refuses_other_head_dims() -> None:
    shape = table.Shape(40, True, False, 64, 64)
    assert table.forward_config(shape) is None
    assert table.backward_form(shape, False, False) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "capability"), [(64, 100), (128, 90), *(pytest.param(*c, marks=sweep) for c in [(64, 90), (128, 100)])]
)
@pytest.mark.parametrize("kernel", [blocks.block_forward, blocks.block_backward], ids=lambda k: k.__name__)
def test_block_kernels_do_not_spill(kernel: Any, d: int, capability: int) -> None:
    values: dict[str, Any] = dict.fromkeys(kernel.arg_names, 128)
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            values[name] = torch.zeros(16, dtype=torch.bfloat16)
    values |= {name: torch.zeros(8, dtype=torch.int32) for name in ("tiles_ptr", "count_ptr")}
    values |= {"lse_ptr": torch.zeros(8), "scale_log2": 0.1, "num_warps": 4}
    values |= {"D": d, "DV": d, "BLOCK_D": d, "BLOCK_DV": d, "ROWS": 64, "CAUSAL": True, "SHARED": False}
    if "scale" in values:
        values["scale"] = 0.1
        if d > 64:
            values["maxnreg"] = 168  # as launched
    found = aot.compile_kernel(kernel, values, capability)
    assert found.spilled <= (256 if "maxnreg" in values else 0), f"{found.spilled} bytes spilled"


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", hopper_blocks.HEAD_DIMS)
def test_hopper_block_backward_compiles(d: int, causal: bool) -> None:
    offsets = torch.tensor([0, 256])
    spec = AttentionSpec(
        offsets, offsets, 256, 256, 0.1, causal, False, (-1, -1), None, None, 0.0, None, block_size=64
    )  # fmt: skip
    q, k, v, dout, *grads = tensors(d, torch.bfloat16, 7)
    tiles = (torch.zeros(8, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    call = hopper_blocks.backward_arguments(dout, q, k, v, torch.zeros(256, 2), tuple(grads), spec, *tiles)
    found = aot.compile_kernel(hopper_blocks.block_backward, call)
    assert found.spilled == 0 and found.shared <= SHARED_MEMORY and not found.warnings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("softmax", "add"),  # an activation, with and without the residual of a feed-forward: what the table has it for
    [(False, True), *(pytest.param(*case, marks=sweep) for case in ((False, False), (True, True), (True, False)))],
)
def test_owner_form_compiles(softmax: bool, add: bool) -> None:
    """The backward that owns whole sequences, with the configurations of the fused one."""
    row = next(r for r in table.rows() if r["kernel"] == "fused" and r.get("softmax", softmax) == softmax)
    call = launch.Call(0 if softmax else scores.code("gelu", torch.bfloat16), 0.1, add_q=add)
    found = aot.compile_kernel(KERNELS["owner"], arguments("owner", row["config"], 128, call, torch.bfloat16))
    assert found.spilled <= SPILLS["owner"] and found.shared <= SHARED_MEMORY and not found.warnings
