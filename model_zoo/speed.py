"""Useful FLOP/s of a training run: the FLOPs that its real events need, over the time of a step and a stated peak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .data.batches import Batch

if TYPE_CHECKING:
    from .tasks import Workload


class Speed:
    """Counts the useful FLOPs of batches of one workload; peaks are looked up and measured once.

    The FLOPs are those of the padded model's graph at the real lengths (``gemopt.mfu``), whatever mode trains: a mode that
    computes padding too gets no credit for it. Forward and backward are three times the forward pass, recomputation is not
    counted.
    """

    def __init__(self, work: Workload, device: str, precision: str) -> None:
        from gemopt import mfu  # only here: the models and their training do not depend on it

        self._device, self._bf16 = device, precision == "bf16"
        dtype = torch.bfloat16 if self._bf16 else torch.float32
        self._count = mfu.Counter(lambda batch: work.logits(work.module, batch))
        self._module = work.module
        self.datasheet = mfu.datasheet_peak(device, dtype)
        self.ceiling = mfu.matmul_ceiling(device, dtype)

    def describe(self) -> str:
        """Both denominators of MFU, in words."""
        sheet = "none known for this device" if self.datasheet is None else f"{self.datasheet / 1e12:,.0f} TFLOP/s"
        return f"peak: datasheet {sheet}; a large matrix product reaches {self.ceiling / 1e12:,.3g} TFLOP/s"

    def of_step(self, batch: Batch, seconds: float) -> dict[str, float]:
        """``useful_tflops``: TFLOP/s of a training step on this batch that took so long. ``mfu``: over the datasheet's peak,
        where there is one. ``mfu_of_matmul``: over the measured rate of large matrix products."""
        training = self._module.training
        with torch.no_grad(), torch.autocast(torch.device(self._device).type, torch.bfloat16, enabled=self._bf16):
            flops = 3 * self._count(batch).flops
        self._module.train(training)
        rate = flops / seconds
        found: dict[str, Any] = {"useful_tflops": rate / 1e12, "mfu_of_matmul": rate / self.ceiling}
        if self.datasheet is not None:
            found["mfu"] = rate / self.datasheet
        return found
