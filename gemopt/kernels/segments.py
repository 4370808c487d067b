"""Sum of consecutive rows through PyTorch's embedding bag, on any device: rows are the table, a sequence is a bag.

That kernel adds the rows of a bag in order, so it is deterministic; it is vectorised over features, parallel over bags,
and accumulates bf16 and fp16 in fp32. Bytes: every row once.
"""

import torch
from torch import Tensor


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """values `[T, ...]`, offsets `[B + 1]` → `[B, ...]`; rows after `offsets[-1]` count for nothing."""
    out_shape = (offsets.shape[0] - 1, *values.shape[1:])
    rows = values.shape[0]
    if values.device.type == "cpu" and offsets.shape[0]:
        rows = min(rows, int(offsets[-1]))  # the bag kernel for the CPU wants every row to be in a bag
    if out_shape[0] == 0 or rows == 0 or values.numel() == 0:
        return values.new_zeros(out_shape)
    flat = values[:rows].reshape(rows, -1).contiguous()
    index = torch.arange(rows, dtype=torch.int64, device=values.device)
    bags = torch.ops.aten._embedding_bag_forward_only(flat, index, offsets.to(torch.int64), False, 0, False, None, True)[0]
    return bags.reshape(out_shape)
