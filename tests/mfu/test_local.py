"""Peaks, local MFU of layers, and the end-to-end formula."""

import pytest
import torch
from torch import nn

from gemopt import mfu
from gemopt.mfu import local


def test_datasheet_by_name():
    def peak(name, dtype=torch.bfloat16):
        return mfu.datasheet_peak("cuda", dtype, name)

    assert peak("NVIDIA H200") == 989e12 and peak("NVIDIA H100 80GB HBM3") == 989e12
    assert peak("NVIDIA A100-SXM4-80GB") == 312e12 and peak("NVIDIA B200") == 2250e12
    assert peak("NVIDIA H100 PCIe") == 756e12 and peak("NVIDIA L4") == 121e12 and peak("NVIDIA L40S") == 362e12
    assert peak("NVIDIA H20") == 148e12
    assert peak("Some Other Device") is None and peak("NVIDIA H200", torch.int8) is None
    assert mfu.datasheet_peak("cpu", torch.float32) is None


def test_ceiling_is_a_rate():
    assert 1e7 < mfu.matmul_ceiling("cpu", torch.float32, size=64) < 1e15
    with pytest.raises(ValueError, match="size"):
        mfu.matmul_ceiling("cpu", torch.float32, size=-1)


def test_formulas():
    assert mfu.mfu(50.0, 0.5, 1000.0) == 0.1
    assert mfu.end_to_end(0.4, 0.75) == pytest.approx(0.3)
    for bad in ((1.0, 0.0, 1.0), (1.0, 1.0, 0.0), (-1.0, 1.0, 1.0)):
        with pytest.raises(ValueError, match="allowed"):
            mfu.mfu(*bad)
    with pytest.raises(ValueError, match="scaling_ratio"):
        mfu.end_to_end(0.4, 1.2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(self.a(x).relu())


def test_layers_are_timed_alone(monkeypatch):
    monkeypatch.setattr(
        local, "_time", lambda function, args, kwargs, device, repeats: 0.25 if args[0].shape[1] == 8 else 0.75
    )
    monkeypatch.setattr(local, "matmul_ceiling", lambda device, dtype: 1e6)
    torch._dynamo.reset()
    got = mfu.measure_layers(Model(), torch.randn(10, 8), layers=["a", "b"])
    assert [x.flops for x in got.layers] == [3 * 2 * 10 * 8 * 16, 3 * 2 * 10 * 16 * 4]
    assert got.peak is None and got.local() == (7680 + 3840) / 1.0 / 1e6, "the average is weighted by time"
    assert got.local(2e6) == got.local() / 2
    text = str(got)
    assert "a " in text and "all" in text and "1.2%" in text


def test_layers_are_really_run():
    torch._dynamo.reset()
    model = Model()
    got = mfu.measure_layers(model, torch.randn(10, 8), layers=["b"], repeats=2)
    assert got.seconds > 0 and model.b.weight.grad is not None
    with pytest.raises(ValueError, match="submodules"):
        mfu.measure_layers(model, torch.randn(2, 8), layers=["c"])
    with pytest.raises(ValueError, match="twice"):
        mfu.measure_layers(nn.Sequential(model), torch.randn(2, 8), layers=["0", "0.a"])
    unused = nn.ModuleDict({"x": nn.Linear(2, 2)})
    model.add_module("extra", unused)
    with pytest.raises(ValueError, match="not called"):
        mfu.measure_layers(model, torch.randn(2, 8), layers=["extra"])
