"""Model FLOPs utilisation: the floating-point operations that real lengths need, over time and a stated peak.

count(model, *inputs)          FLOPs of one forward pass, by layer, at the lengths of these inputs
measure_layers(model, ...)     time of every layer alone, forward and backward: local MFU
datasheet_peak, matmul_ceiling the two denominators: what the vendor states, what a large product reaches
end_to_end(local, ratio)       E2E MFU = local MFU x scaling ratio
"""

from gemopt.mfu.counting import Count, Counter, count
from gemopt.mfu.local import LayerTime, Utilisation, end_to_end, measure_layers, mfu
from gemopt.mfu.peaks import DATASHEET, datasheet_peak, matmul_ceiling

__all__ = [
    "DATASHEET", "Count", "Counter", "LayerTime", "Utilisation", "count", "datasheet_peak", "end_to_end", "matmul_ceiling",
    "measure_layers", "mfu",
]  # fmt: skip
