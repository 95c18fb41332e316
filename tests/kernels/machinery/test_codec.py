"""Sums that stay in a kernel, turned as packed ones are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import harness
from pallas_collectives.kernels.machinery.codec import TURNED, Codec
from pallas_collectives.wires import Wire


@pytest.mark.parametrize("group", [128, 256])
def test_turned_sums_meet_packed_and_plain_ones(group: int) -> None:
    """(packed x + y), turned; that + packed z, plain: as in two phases of a torus' sum."""
    codec, shape = Codec(Wire("int8", group=group)), (2, 128, 2 * group)
    x, y, z = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)

    def body(x: Any, y: Any, z: Any, out: Any, packed: Any, turned: Any) -> None:
        codec.combine((packed, x))
        codec.combine((turned, y, packed))
        codec.combine((packed, turned))
        codec.combine((packed, packed, turned))  # twice the sum
        codec.combine((turned, z, packed))
        codec.combine((packed, z))
        codec.combine((out, turned, packed))

    vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    got = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        in_specs=[vmem] * 3,
        out_specs=vmem,
        scratch_shapes=[
            pltpu.VMEM(codec.packed_shape(shape), jnp.int32),
            pltpu.VMEM(shape, TURNED),
        ],
        interpret=harness.ADVERSARIES["eager"],
    )(x, y, z)
    want = 2 * (x + y + z)
    assert 0 < np.abs(np.asarray(got) - want).max() < 0.03 * np.abs(want).max()
