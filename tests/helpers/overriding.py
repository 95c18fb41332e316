"""Functions under `override_lax`: on simulated devices, and lowered for TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives import collectives

NAMES = sorted(vars(collectives.LAX))


def untouched() -> bool:
    return all(getattr(jax.lax, name) is getattr(collectives.LAX, name) for name in NAMES)


def doubled_sum(x: jax.Array) -> jax.Array:
    return 2 * jax.lax.psum(x, "x")


def run(fn: Any = doubled_sum) -> np.ndarray:
    x = harness.random((2, 8, 128), "float32")
    return np.asarray(harness.per_device(fn, harness.mesh(2))(x))


def build(topology: str, **options: Any) -> pc.OverrideReport:
    """A gather, a scatter and a permute, with gradients, under `override_lax` for TPUs."""
    pytest.importorskip("libtpu")
    on = harness.tpu_mesh(topology, {"x": len(harness._topology(topology).devices)})
    n = on.size

    def loss(x: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(x, "x", tiled=True)
        part = jax.lax.psum_scatter(jnp.sin(whole).astype("float32"), "x", tiled=True)
        return jnp.sum(jax.lax.ppermute(part, "x", [(d, (d + 1) % n) for d in range(n)]) ** 2)

    spec = P("x")
    run = jax.shard_map(jax.grad(loss), mesh=on, in_specs=spec, out_specs=spec, check_vma=False)
    sharding = jax.NamedSharding(on, spec)
    x = jax.ShapeDtypeStruct((n * 2048, 1024), "bfloat16", sharding=sharding)
    with pc.override_lax(**options):
        jax.jit(run).lower(x)
    return pc.override_report()
