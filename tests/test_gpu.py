"""The whole path on a GPU: packed training steps through inductor and Triton against fp64 eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gemopt
from gemopt.model_zoo.sasrec import SASRec, SASRecConfig

pytestmark = pytest.mark.gpu


def batch(lengths: list[int], max_len: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = torch.tensor(lengths)
    ids = torch.randint(1, 100, (len(lengths), max_len), generator=generator) * (torch.arange(max_len) < n[:, None])
    return ids.cuda(), n.cuda()


def step(run: nn.Module, owner: nn.Module, inputs: tuple[Tensor, Tensor], autocast: bool = False) -> list[Tensor]:
    owner.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        out = run(*inputs)
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in owner.parameters() if p.grad is not None)]


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("attention", ["softmax", "sdpa"])
@pytest.mark.parametrize("autocast", [False, True])
def test_training_steps_are_as_good_as_eager(pooling: str, attention: str, autocast: bool) -> None:
    torch.manual_seed(0)
    config = SASRecConfig(n_items=100, max_len=96, pooling=pooling, attention=attention)  # type: ignore[arg-type]
    model = SASRec(config).cuda()
    other, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fast = gemopt.compile(other, strict=True)
    for seed, (lengths, max_len) in enumerate((([3, 80, 17, 41], 96), ([1, 2, 64, 9, 30], 64), ([5, 7, 0, 22], 40))):
        inputs = batch(lengths, max_len, seed)
        ours, theirs = step(fast, other, inputs, autocast), step(model, model, inputs, autocast)
        reference = step(exact, exact, inputs)
        noise = max(rms(a.double() - r) for a, r in zip(theirs, reference, strict=True))
        for a, b, r in zip(ours, theirs, reference, strict=True):
            allowed = 2 * rms(b.double() - r) + 4 * torch.finfo(b.dtype).eps * rms(r) + 0.1 * noise
            assert rms(a.double() - r) <= allowed, (seed, a.shape)
    assert fast.report.steps_packed == 3, fast.report.steps_padded


def test_one_host_read_a_step() -> None:
    model = SASRec(SASRecConfig(n_items=100, max_len=96, pooling="mean")).cuda()
    fast = gemopt.compile(model, strict=True)
    inputs = batch([3, 80, 17, 41], 96, 0)
    for _ in range(3):
        fast(*inputs).sum().backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fast(*inputs).sum().backward()
    copies = [e for e in profile.events() if e.name in ("aten::_local_scalar_dense", "aten::item", "aten::nonzero")]
    assert not copies, [e.name for e in copies]
    reads = [e for e in profile.events() if e.name in ("cudaStreamSynchronize", "aten::to") and "cpu" in str(e)]
    assert len([e for e in profile.events() if e.name == "cudaStreamSynchronize"]) <= 1, reads


class JaggedReader(nn.Module):
    """Rows that arrive jagged, made padded, attended under their mask and averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 1)

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        x = torch.ops.aten._jagged_to_padded_dense_forward(values, [offsets], [96], 0.0)
        lengths = offsets.diff()
        mask = torch.arange(96, device=x.device) < lengths[:, None]
        q, k, v = (y.unflatten(-1, (2, 32)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None, None, :]).transpose(1, 2).flatten(2)
        return self.out((y * mask[..., None]).sum(1) / lengths.clamp(min=1)[:, None])


def test_no_host_read_where_the_rows_are_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any synchronising call raises here; the same step with a read does, which shows that the check can fail."""
    torch.manual_seed(0)
    model = JaggedReader().cuda()
    exact = copy.deepcopy(model).double()
    fast = gemopt.compile(model, strict=True, dynamic=True)

    def inputs(lengths: list[int]) -> tuple[Tensor, Tensor]:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        return torch.randn(sum(lengths), 64).cuda(), offsets.cuda()

    def close(given: tuple[Tensor, Tensor]) -> None:
        ours, theirs = step(fast, model, given), step(exact, exact, (given[0].double(), given[1]))
        torch.testing.assert_close([x.double() for x in ours], theirs, rtol=2e-3, atol=2e-3)

    close(inputs([3, 80, 17, 41]))  # compiles
    given = inputs([30, 8, 0, 96, 11])
    fast(*given).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fast(*given).sum().backward()
        monkeypatch.setattr(gemopt.backend.Host, "ahead", False)
        with pytest.raises(RuntimeError, match="synchroniz"):
            fast(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(gemopt.backend.Host, "ahead", None)
    close(given)
    close(inputs([100, 8, 120]))  # longer than the padded size: found out, and right
    assert fast.report.steps_packed >= 3, str(fast.report)
