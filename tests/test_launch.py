"""VMEM, decided at launch."""

import jax
import numpy as np
import pytest

import harness
import pallas_collectives
from pallas_collectives.errors import VmemError


def test_more_vmem_than_the_chip_has_is_refused_while_tracing() -> None:
    def gather(x: jax.Array) -> jax.Array:
        return pallas_collectives.all_gather(x, "x", algorithm="bidirectional:vmem")

    x = np.zeros((4, 8192, 1024), np.float32)  # 32 MiB a device
    with pytest.raises(VmemError, match=r"160.0 MiB of VMEM: .* has 128 MiB; leave the operands"):
        jax.eval_shape(harness.per_device(gather, harness.mesh(4), jit=False), x)
