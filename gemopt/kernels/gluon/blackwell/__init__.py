"""Warp-specialised attention for Blackwell (sm_100): products by tcgen05, accumulators in tensor memory.

Written against the compiler, not yet run on hardware: `GEMOPT_TIER=blackwell` asks for it, and without that a Blackwell GPU runs
the portable Triton kernels. `attention.refusal` says which calls it does not take.
"""
