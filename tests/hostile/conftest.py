from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Models of a few hundred parameters lose more to waking threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No test profits or suffers from another one's compiled graphs."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
