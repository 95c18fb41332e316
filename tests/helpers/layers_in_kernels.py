"""Layers whose products can run in one kernel with tokens' exchanges, on devices and for TPUs."""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives import _compat

N, WIDTH, HIDDEN = 2, 128, 256
Arrays = dict[str, Any]
Layer = Callable[[jax.Array, Arrays], jax.Array]
FUSED = {
    "gathers": ("all_gather_matmul", "fused", ""),
    "scatters": ("matmul_reduce_scatter", "fused", ""),
}


def gathered(x: jax.Array, dimension: int = 1) -> jax.Array:
    return lax.all_gather(jnp.tanh(x), "x", axis=dimension, tiled=True)


def scattered(y: jax.Array, dimension: int = 1) -> jax.Array:
    return lax.psum_scatter(y, "x", scatter_dimension=dimension, tiled=True)


def one(x: jax.Array, w: Arrays) -> jax.Array:
    return x + scattered(jnp.tanh(gathered(x) @ w["up"]) @ w["down"])


def in_full(x: jax.Array, w: Arrays) -> jax.Array:
    """Hidden units over the devices, and all tokens on each."""
    return x + lax.psum(jnp.tanh(x @ w["up"]) @ w["down"], "x")


def weights(dtype: Any) -> Arrays:
    sizes = {"up": (WIDTH, HIDDEN), "gate": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    rng = np.random.default_rng(1)
    scaled = {k: rng.standard_normal((2, *s)) / np.sqrt(s[0]) for k, s in sizes.items()}
    return jax.tree.map(lambda w: w.astype(dtype), scaled)


def forward(layer: Layer, *, scan: bool) -> Callable[..., jax.Array]:
    def run(x: jax.Array, w: Arrays) -> jax.Array:
        if scan:
            return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]
        for i in range(2):
            x = layer(x, jax.tree.map(operator.itemgetter(i), w))
        return x

    return run


def loss(run: Callable[..., jax.Array], x: jax.Array, w: Arrays) -> jax.Array:
    return jnp.sum(run(x, w).astype(jnp.float32) ** 2)


def on_devices(
    program: Callable[..., Any], dtype: Any = "float32", *, check_vma: bool = False
) -> Any:
    """What a program makes of x and weights on the devices, jitted anew."""
    x = np.random.default_rng(0).standard_normal((2 * N, 8 * N, WIDTH)).astype(dtype)
    w = weights(dtype)
    spec = P(None, "x")

    def each(x: jax.Array, w: Arrays) -> Any:
        found = program(x, w)
        return jax.tree.map(lambda y: _compat.as_varying(y, ["x"])[None], found)

    mapped = jax.shard_map(
        each, mesh=harness.mesh(N), in_specs=(spec, P()), out_specs=P("x"), check_vma=check_vma
    )
    found = jax.jit(mapped)(x, w)
    return jax.tree.map(lambda y: np.asarray(y, np.float32), found)


@contextlib.contextmanager
def counted(**how: Any) -> Iterator[dict[str, int]]:
    """Within `override_lax`; how many kernels of either kind were built, at its end."""
    found: dict[str, int] = {}
    pc.reset_counts()
    with pc.override_lax(**how):
        yield found
    found.update({kind: pc.fusion_counts().get(key, 0) for kind, key in FUSED.items()})


def close(got: Any, want: Any, dtype: Any = "float32") -> None:
    some = 2e-5 if dtype == "float32" else 4e-2
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=some, atol=some * float(np.max(np.abs(b))))


def like_laxs(program: Callable[..., Any], *, check_vma: bool = False) -> dict[str, int]:
    """How many kernels of either kind are built for a program, which gives what it does by lax."""
    want = on_devices(program, check_vma=check_vma)
    with counted() as kernels:
        got = on_devices(program, check_vma=check_vma)
    close(got, want)
    return kernels


def lowered(topology: str, program: Callable[..., Any], *, rows: int = 2048, **how: Any) -> Any:
    """A program of x, twice so many rows, and the weights of large layers, for TPUs."""
    pytest.importorskip("libtpu")
    devices = len(harness._topology(topology).devices)
    on = harness.tpu_mesh(topology, {"x": devices})
    mapped = jax.shard_map(
        program, mesh=on, in_specs=(P(None, "x"), P()), out_specs=P(None, "x"), check_vma=False
    )
    width = 16384 // devices
    sizes = {"up": (4, 4096, width), "down": (4, width, 4096)}

    def typed(shape: tuple[int, ...], spec: P) -> Any:
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.NamedSharding(on, spec))

    x = typed((2, rows, 4096), P(None, "x"))
    pc.reset_counts()
    with pc.override_lax(**how):
        return jax.jit(mapped).lower(x, {k: typed(shape, P()) for k, shape in sizes.items()})
