"""One main graph for all batch sizes and lengths from 2 on; sizes 0 and 1 may cost one each."""

from __future__ import annotations

import random

import pytest
import torch
from torch._dynamo.utils import counters

from ..models import CASES
from .common import compiled


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ["causal_tril", "several_histories", "encoder_pre_bld_train", "loss_ignore_index"])
def test_a_hundred_batches_cost_one_graph(name):
    model, inputs = CASES[name].make(0)
    subject = compiled(model)
    counters.clear()
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    sizes = [(7, 7), (16, 16), *((rng.randint(2, 24), rng.randint(2, 30)) for _ in range(98))]
    for batch, length in sizes:
        lengths = torch.randint(1, length + 1, (batch,), generator=generator)
        lengths[0] = 1
        subject(*inputs(lengths, length, generator)).sum().backward()
    report = subject.report
    steps = report.steps_packed + sum(report.steps_padded.values())
    padded_graph = 1 if report.steps_padded else 0
    assert steps == 100 and len(report) == 1
    assert graphs() <= 1 + padded_graph, f"{graphs()} graphs for 100 batches"
    assert report.steps_packed > 60


def test_sizes_zero_and_one_cost_one_graph_each():
    model, inputs = CASES["fill_1e9"].make(0)
    subject = compiled(model)
    counters.clear()
    generator = torch.Generator().manual_seed(0)

    def step(batch, length):
        lengths = torch.full((batch,), max(1, length // 2))
        subject(*inputs(lengths, length, generator)).sum().backward()

    step(6, 9)
    base = graphs()
    allowed = base
    for batch, length in ((1, 9), (0, 9), (6, 1)):
        step(batch, length)
        allowed += 2  # the packed and the padded graph of that size
        assert graphs() <= allowed, (batch, length)
    seen = graphs()
    for batch, length in ((1, 12), (1, 5), (0, 4), (9, 1), (8, 8), (3, 30)):
        step(batch, length)
    assert graphs() <= seen, "a size seen before was compiled again"
