"""Shared by the tests of parts: modules in fp64, sequences with holes of garbage, gradients."""

import torch
from torch import Tensor, nn

LENGTHS = [5, 0, 1, 7]


def f64(module: nn.Module) -> nn.Module:
    return module.double().eval()


def sequence(width: int, d: int, lengths: list[int] = LENGTHS, garbage: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """``s`` [B, width, d] in fp64, the same events whatever the width, ``garbage`` in padding; and its mask."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(len(lengths), 64, d, generator=g, dtype=torch.float64)[:, :width]
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return torch.where(mask[..., None], rows, garbage), mask


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
