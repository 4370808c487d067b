"""Which kernel runs an op: by the device of its first tensor, its capability and the call.

Three tiers: the CPU's, the portable Triton kernels, and the Gluon kernels for compute capability 9.0, which take the
calls that `gemopt.kernels.gluon.attention.refusal` has no objection to. `GEMOPT_TIER=portable` leaves the last out.
Those for compute capability 10.0 (`gemopt.kernels.gluon.blackwell`) have not run on hardware yet and are used only under
`GEMOPT_TIER=blackwell`.

`GEMOPT_FORCE_TRITON=1` sends CPU tensors to the Triton kernels; with `TRITON_INTERPRET=1` these then run under Triton's
interpreter, which is how the kernels are tested without a GPU.
"""

from collections.abc import Callable

from torch import Tensor

from gemopt.kernels.cpu import attention as cpu
from gemopt.kernels.spec import AttentionSpec
from gemopt.kernels.tiers import is_blackwell, is_hopper, use_triton

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


def attention_kernels(q: Tensor) -> tuple[Forward, Backward]:
    """Forward and backward of attention for the device of `q`.

    forward(q, k, v, spec) -> out, lse                    lse `[Tq, H]`, or `[0, H]` unless the weights are a softmax
    backward(dout, q, k, v, out, lse, spec, bias_grad) -> dq, dk, dv, dbias or None (in any dtype)
    """
    if not use_triton(q):
        return cpu.forward, cpu.backward
    return _forward, _backward


def _forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    # Imported here: triton is absent on some CPU installs, and Gluon is of use on one kind of device.
    from gemopt.kernels.triton import block_attention as blocks
    from gemopt.kernels.triton import jagged_attention as portable

    if spec.block_size and blocks.refusal(q, k, v, spec) is None:
        return blocks.forward(q, k, v, spec)
    if is_hopper(q):
        from gemopt.kernels.gluon import attention as hopper

        if hopper.refusal(q, k, v, spec) is None:
            return hopper.forward(q, k, v, spec)
    if is_blackwell(q):
        from gemopt.kernels.gluon.blackwell import attention as blackwell

        if blackwell.refusal(q, k, v, spec) is None:
            return blackwell.forward(q, k, v, spec)
    return portable.forward(q, k, v, spec)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    spec: AttentionSpec,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    from gemopt.kernels.triton import block_attention as blocks
    from gemopt.kernels.triton import jagged_attention as portable

    if spec.block_size and lse is not None and blocks.refusal(q, k, v, spec) is None:
        if is_hopper(q):
            from gemopt.kernels.gluon import blocks as hopper_blocks

            if hopper_blocks.refusal(q, k, v, spec) is None:
                return *hopper_blocks.backward(dout, q, k, v, lse, spec), None
        return *blocks.backward(dout, q, k, v, lse, spec), None
    if is_hopper(q) and not bias_grad:
        from gemopt.kernels.gluon import attention as hopper

        if hopper.refusal(q, k, v, spec, backward=True) is None:
            return *hopper.backward(dout, q, k, v, out, lse, spec), None
    if is_blackwell(q) and not bias_grad:
        from gemopt.kernels.gluon.blackwell import attention as blackwell

        if blackwell.refusal(q, k, v, spec) is None:
            return *blackwell.backward(dout, q, k, v, out, lse, spec), None
    return portable.backward(dout, q, k, v, out, lse, spec, bias_grad)
