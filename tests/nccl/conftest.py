"""What tests on real GPUs need."""

import jax
import pytest

import shared_gpu


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """All GPUs of this process, two or more; without them the test is skipped."""
    found = jax.devices()
    if found[0].platform != "gpu" or len(found) < 2:
        pytest.skip("needs two GPUs")
    return found


@pytest.fixture(scope="session")
def ranks() -> int:
    """Processes with a GPU each, or with one GPU that they share: two or more."""
    count = shared_gpu.ranks()
    if count < 2:
        pytest.skip("needs two GPUs, or one and SHARED_GPU=2")
    return count
