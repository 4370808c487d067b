"""Sum of consecutive rows on the CPU, through the embedding-bag kernel: rows are the table, a sequence is a bag.

That kernel is vectorised over features, parallel over bags and accumulates bf16 and fp16 in fp32.
"""
import torch
from torch import Tensor


def segment_sum_cpu(values: Tensor, offsets: Tensor) -> Tensor:
    """values `[T, ...]`, offsets `[B + 1]` → `[B, ...]`; rows after `offsets[-1]` count for nothing."""
    rows = offsets.shape[0] - 1
    out_shape = (rows, *values.shape[1:])
    if rows == 0 or values.numel() == 0:
        return values.new_zeros(out_shape)
    flat = values.reshape(values.shape[0], -1).contiguous()
    index = torch.arange(values.shape[0], dtype=torch.int64, device=values.device)
    bags = torch.ops.aten._embedding_bag_forward_only(
        flat, index, offsets.to(torch.int64), False, 0, False, None, True)[0]
    return bags.reshape(out_shape)
