"""What tests on real GPUs need."""

import jax
import pytest


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """All GPUs of this process, two or more; without them the test is skipped."""
    found = jax.devices()
    if found[0].platform != "gpu" or len(found) < 2:
        pytest.skip("needs two GPUs")
    return found
