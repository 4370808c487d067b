"""Peak rates: what the datasheet states for a device, and what a large matrix product reaches on it."""

from __future__ import annotations

import time

import torch

# Dense TFLOP/s by part of the device's name: vendors' datasheets, tensor cores, without sparsity. A name that holds several
# keys takes the first. fp32 is TF32's rate where torch is allowed to use it, and the vector units' otherwise.
DATASHEET: dict[str, dict[str, float]] = {
    "GB200": {"bf16": 2500, "tf32": 1250, "fp32": 80},
    "B300": {"bf16": 2250, "tf32": 1125, "fp32": 75},
    "B200": {"bf16": 2250, "tf32": 1125, "fp32": 75},
    "H100 PCIe": {"bf16": 756, "tf32": 378, "fp32": 51},
    "H100 NVL": {"bf16": 835, "tf32": 418, "fp32": 60},
    "GH200": {"bf16": 989, "tf32": 494, "fp32": 67},
    "H200": {"bf16": 989, "tf32": 494, "fp32": 67},
    "H100": {"bf16": 989, "tf32": 494, "fp32": 67},
    "H800": {"bf16": 989, "tf32": 494, "fp32": 67},
    "H20": {"bf16": 148, "tf32": 74, "fp32": 44},
    "A100": {"bf16": 312, "tf32": 156, "fp32": 19.5},
    "A800": {"bf16": 312, "tf32": 156, "fp32": 19.5},
    "A10G": {"bf16": 70, "tf32": 35, "fp32": 31},
    "L40S": {"bf16": 362, "tf32": 183, "fp32": 92},
    "L4": {"bf16": 121, "tf32": 60, "fp32": 30},
    "MI300X": {"bf16": 1307, "tf32": 654, "fp32": 163},
}


def datasheet_peak(device: str | torch.device, dtype: torch.dtype, name: str | None = None) -> float | None:
    """FLOP/s that the datasheet of a device states for dense products; None for devices that are not in the table.

    ``name`` overrides what the driver calls the device. float16 counts as bfloat16.
    """
    if name is None:
        if torch.device(device).type != "cuda" or not torch.cuda.is_available():
            return None
        name = torch.cuda.get_device_name(device)
    rates = next((rates for key, rates in DATASHEET.items() if key in name), None)
    kind = {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float32: "tf32" if _tf32() else "fp32"}.get(dtype)
    return None if rates is None or kind is None else rates[kind] * 1e12


def _tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def matmul_ceiling(device: str | torch.device, dtype: torch.dtype, size: int | None = None, repeats: int = 5) -> float:
    """FLOP/s of the fastest of ``repeats`` products of two square matrices (8,192 wide on a GPU, 512 on a CPU).

    What a kernel can at best reach on this machine now, below the datasheet where power or clocks limit it.
    """
    cuda = torch.device(device).type == "cuda"
    size = size or (8192 if cuda else 512)
    if size < 1 or repeats < 1:
        raise ValueError(f"size and repeats must be at least 1, got {size} and {repeats}")
    a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(repeats + 1):  # the first one warms up
        began = time.perf_counter()
        a @ b
        if cuda:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        best = min(best, seconds)
    return 2.0 * size**3 / best
