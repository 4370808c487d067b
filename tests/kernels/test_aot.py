"""The Triton kernels compile ahead of time for sm_90 and sm_100 without register spills, for sm_100 with tcgen05.

No GPU is needed: Triton emits PTX for any target, and the ptxas in its wheel reports registers and spills. The table
holds the variants whose tiles were chosen for this; a new tile size in `config` has to pass here. With a bias and a mask
64 bytes are let pass. A C75xx warning means that ptxas serialises products; on sm_100 all products of 16 bits have to be
tcgen05's. GEMOPT_TEST_SWEEP=1 compiles the whole table for both targets, other runs each row of ALWAYS for one.
"""

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs compiled kernels", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gemopt.kernels.spec import AttentionSpec
from gemopt.kernels.triton import configs
from gemopt.kernels.triton.attention_backward import attention_backward_kv, attention_backward_q, attention_delta
from gemopt.kernels.triton.attention_backward_bias import attention_backward_bias
from gemopt.kernels.triton.attention_forward import attention_forward
from gemopt.kernels.triton.mixed_norms import (
    mixed_column_sums,
    mixed_layer_norm_backward,
    mixed_rms_backward,
    mixed_rms_forward,
)
from tests.hostile.common import sweep

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KERNELS = {
    "forward": attention_forward,
    "backward_kv": attention_backward_kv,
    "backward_q": attention_backward_q,
    "backward_bias": attention_backward_bias,
}

# (head_dim of q and k, of v, dtype, variant)
TABLE = [
    (64, 64, torch.bfloat16, "causal"),
    (64, 64, torch.bfloat16, "everything"),
    (64, 128, torch.float16, "window"),
    (128, 128, torch.bfloat16, "plain"),
    (128, 128, torch.bfloat16, "everything"),
    (256, 256, torch.bfloat16, "everything"),
    (128, 128, torch.float32, "causal"),
    (64, 64, torch.bfloat16, "gelu"),
    (128, 128, torch.bfloat16, "gelu"),
    (256, 256, torch.bfloat16, "gelu"),
    (64, 64, torch.bfloat16, "tables"),
    (128, 128, torch.bfloat16, "tables"),
    (128, 128, torch.bfloat16, "mixed, tables"),
]
# Every variant, head dim and dtype at least once, every kernel for both targets.
ALWAYS = {
    (64, 64, torch.bfloat16, "causal"): 100,
    (64, 64, torch.bfloat16, "everything"): 90,
    (64, 128, torch.float16, "window"): 100,
    (128, 128, torch.bfloat16, "plain"): 90,
    (256, 256, torch.bfloat16, "everything"): 90,
    (128, 128, torch.float32, "causal"): 90,
    (256, 256, torch.bfloat16, "gelu"): 100,
    (128, 128, torch.bfloat16, "tables"): 100,
    (128, 128, torch.bfloat16, "mixed, tables"): 90,
}
HEADS = 4
BIAS_OPTIONS = {"ONE_ROW": False, "ONE_COL": False, "ALL_HEADS": True}


def spec_of(variant: str) -> AttentionSpec:
    some = torch.zeros(1, dtype=torch.int64)
    everything, tables = variant == "everything", "tables" in variant
    table = torch.zeros(1, 1, 1, 1) if tables else None
    activations = {"gelu": ("gelu",), "mixed, tables": ("gelu", "silu", "gelu", "relu")}
    return AttentionSpec(
        some,
        some,
        1,
        1,
        1.0,
        variant in ("causal", "everything"),
        False,
        (8, -1) if variant == "window" else (-1, -1),
        some if everything else None,
        some if everything else None,
        0.1 if everything else 0.0,
        some if everything else None,
        table,
        table,
        activations.get(variant, ("softmax",)),
    )


def signature_of(kernel: Any, dtype: torch.dtype, constexprs: dict[str, Any]) -> dict[str, str]:
    """Types of the run-time arguments, by their names."""
    signature = {}
    for name in kernel.arg_names:
        if name in constexprs:
            signature[name] = "constexpr"
        elif name in ("lse_ptr", "delta_ptr", "dbias_ptr"):
            signature[name] = "*fp32"
        elif name in ("q_offsets_ptr", "k_offsets_ptr", "q_pos_ptr", "k_pos_ptr", "seed_ptr"):
            signature[name] = "*i64"
        elif name == "mask_ptr":
            signature[name] = "*u8"
        elif name.endswith("_ptr"):
            signature[name] = f"*{NAMES[dtype]}"
        elif name in ("grad_scale", "score_scale", "post_scale", "multiplier"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
    return signature


SHARED_MEMORY = 232_448  # bytes a program may use
COLUMNS = 512  # of tensor memory


def spilled_bytes(
    kernel: Any,
    dtype: torch.dtype,
    constexprs: dict[str, Any],
    capability: int,
    folder: Path,
    warps: int = 4,
    stages: int = 1,
    wide: tuple[str, ...] = (),
) -> tuple[int, str]:
    """Bytes of spill stores and loads, and what ptxas said. `folder` has the kernel's PTX afterwards.

    wide: arguments that are fp32, whatever the dtype.
    """
    signature = signature_of(kernel, dtype, constexprs)
    for name in (n for n in wide if n in signature):
        signature[name] = "*fp32" if name.endswith("_ptr") else "fp32"
    aligned = [
        i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name.endswith("_stride")
    ]  # head_dim is a multiple of 16 in the table
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=constexprs, attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages}
    )
    assert compiled.metadata.shared <= SHARED_MEMORY and compiled.metadata.tmem_size <= COLUMNS
    ptx = folder / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = tools / ("ptxas-blackwell" if capability >= 100 and (tools / "ptxas-blackwell").exists() else "ptxas")
    report = subprocess.run(
        [ptxas, "-v", f"-arch=sm_{capability}a", ptx, "-o", os.devnull], check=True, capture_output=True, text=True
    ).stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert spills, report
    return sum(map(int, spills)), report


def cases() -> list[Any]:
    return [
        pytest.param(
            row,
            capability,
            id=f"{row[0]}-{row[1]}-{NAMES[row[2]]}-{row[3]}-{capability}",
            marks=pytest.mark.slow if ALWAYS.get(row) == capability else sweep,
        )
        for row in TABLE
        for capability in (90, 100)
    ]


@pytest.mark.parametrize(("row", "capability"), cases())
def test_attention_does_not_spill(row: tuple, capability: int, tmp_path: Path) -> None:
    d, dv, dtype, variant = row
    spec = spec_of(variant)
    cfg = configs.config(max(d, dv), dtype, configs.is_heavy(spec), blackwell=capability == 100)
    for name, kernel in KERNELS.items():
        if name == "backward_bias" and spec.bias is None:
            continue
        blocks: configs.Blocks = getattr(cfg, name)
        constexprs = configs.constants(HEADS, d, dv, spec, blocks, dtype)
        constexprs.update(
            {
                "forward": {"SPLIT": False},
                "backward_q": {"ADD_DBIAS": spec.bias is not None},
                "backward_bias": BIAS_OPTIONS,
            }.get(name, {})
        )
        spilled, report = spilled_bytes(kernel, dtype, constexprs, capability, tmp_path, blocks.warps, blocks.stages)
        assert spilled <= (64 if spec.bias is not None else 0), f"{name}: {report}"
        assert not re.search(r"C75\d\d", report), f"{name}: {report}"
        if capability == 100 and dtype != torch.float32:
            ptx = (tmp_path / "kernel.ptx").read_text()
            assert "tcgen05.mma" in ptx and "mma.sync" not in ptx, f"{name}: products are not tcgen05's"


@pytest.mark.parametrize("capability", [90, 100])
def test_delta_does_not_spill(capability: int, tmp_path: Path) -> None:
    constexprs = {"DV": 128, "BLOCK_DV": 128, "BLOCK_Q": 64}
    spilled, report = spilled_bytes(attention_delta, torch.bfloat16, constexprs, capability, tmp_path)
    assert spilled == 0, report


@pytest.mark.parametrize("columns", [384, pytest.param(512, marks=sweep), pytest.param(8192, marks=sweep)])
def test_mixed_norms_do_not_spill(columns: int, tmp_path: Path) -> None:
    """With all weights; a and dlow in bf16, the stream in fp32."""
    block = triton.next_power_of_2(columns)
    flags = {"WEIGHT": True, "BIAS": True, "RMS_WEIGHT": True, "N": columns}
    wide = ("q_ptr", "dq_ptr", "out_ptr", "dout_ptr", "stats_ptr", "rms_stats_ptr", "sums_ptr", "eps")
    wide += ("weight_ptr", "bias_ptr", "rms_weight_ptr")
    for kernel in (mixed_rms_forward, mixed_rms_backward, mixed_layer_norm_backward, mixed_column_sums):
        rows = {"BLOCK_N": block, "ROWS": max(1, 4096 // block)}
        tile = {"BLOCK": 256, "ROWS": 16} if kernel is mixed_column_sums else rows
        spilled, report = spilled_bytes(kernel, torch.bfloat16, {**flags, **tile}, 90, tmp_path, 8, 1, wide)
        assert spilled == 0, f"{kernel.__name__}: {report}"
