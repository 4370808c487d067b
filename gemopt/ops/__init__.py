"""Custom ops on packed sequences: `[T, ...]` rows plus `[B + 1]` offsets.

| op | |
|---|---|
| `pack`, `unpack` | padded rows to packed rows and back |
| `segment_sum` | one sum per sequence |
| `jagged_attention` | softmax attention inside each sequence |
| `gdpa` | the same with an activation in place of the softmax |
| `block_attention` | softmax attention inside blocks of each sequence |
| `pffn` | gdpa between its two norms, with both residuals |

All are functional, have fakes for compilation with symbolic sizes, and explicit backward ops.
"""

from gemopt.ops.attention import jagged_attention
from gemopt.ops.block_attention import block_attention
from gemopt.ops.gdpa import gdpa
from gemopt.ops.packing import pack, unpack
from gemopt.ops.pffn import pffn
from gemopt.ops.segments import segment_sum

__all__ = ["block_attention", "gdpa", "jagged_attention", "pack", "pffn", "segment_sum", "unpack"]
