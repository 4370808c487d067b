import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Models of a few hundred parameters lose more to waking threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
