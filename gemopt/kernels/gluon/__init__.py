"""Warp-specialised attention for Hopper (sm_90; `blackwell` has sm_100), written in Gluon, Triton's explicit-layout language.

One warp copies tiles with the tensor memory accelerator (TMA); two or three warpgroups multiply and apply the score
function. A program takes tiles from a list ordered longest first (`kernels/triton/tiles.py`), so 132 programs finish together whatever
the lengths are. `attention.refusal` says which calls these kernels do not take; everything else runs on the portable Triton tier.
"""
