"""Kernels behind `gemopt.ops`: `cpu` (grouped dense batches) and `triton`."""
