"""Pipelines built like lax's collectives: gradients, also by NCCL, and the programs they make."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import harness
import jaxprs
import nccl_host
import pallas_collectives as pc

XLA = {"backend": "xla"}
gather = pc.pipelined_all_gather_and_consume
exchange = pc.pipelined_produce_and_all_to_all
add_up = functools.partial(exchange, reduce="sum")


def by_lax(name: str, x: jax.Array) -> jax.Array:
    """The collective that a pipeline named so is built like, with weights before it or after."""
    weights = jnp.arange(1.0, 1 + lax.axis_size("x"))[:, None, None]
    match name:
        case "gather":
            return jnp.sin(lax.all_gather(x[0], "x") * weights)
        case "exchange":
            return lax.all_to_all(jnp.sin(x * weights), "x", 0, 0)
    return lax.psum_scatter(jnp.sin(x * weights), "x")


def by_pipeline(name: str, x: jax.Array, **how: Any) -> jax.Array:
    weights = jnp.arange(1.0, 1 + lax.axis_size("x"))
    match name:
        case "gather":
            return gather(x[0], lambda b, source: jnp.sin(b * weights[source]), "x", **how)
        case "exchange":
            return exchange(lambda device: jnp.sin(x[device] * weights[device]), "x", **how)
    return add_up(lambda device: jnp.sin(x[device] * weights[device]), "x", **how)


NAMES = ["gather", "exchange", "sum"]


def derivatives(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> Any:
    """Forward, backward, twice in a checkpoint, and vmapped; of a loss with no constant ones.

    What a vmap does not map is mapped by none: forward mode with many tangents counts on that.
    """

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.cos(f(x)))

    twice = jnp.stack([x, 2 * x])
    return (
        jax.jvp(f, (x,), (x + 1,)),
        jax.grad(loss)(x),
        jax.grad(lambda x: jnp.vdot(jax.grad(jax.checkpoint(loss))(x), x))(x),
        jax.vmap(jax.grad(loss))(twice),
        jax.vmap(lambda t: jax.jvp(f, (x,), (t,)), out_axes=(None, 0))(twice),
    )


@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name: str, hops: str) -> None:
    n, check_vma = (4, True) if hops == "written out" else (5, False)
    x = np.random.default_rng(0).normal(size=(n, n, 2, 3)).astype(np.float32)
    on = harness.mesh(n)
    ours, of_lax = (
        harness.per_device(functools.partial(derivatives, f), on, check_vma=check_vma)(x)
        for f in (functools.partial(by_pipeline, name, **XLA), functools.partial(by_lax, name))
    )
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(of_lax), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_by_kernels(name: str) -> None:
    pc.reset_counts()
    x = np.random.default_rng(0).normal(size=(3, 3, 2, 3)).astype(np.float32)

    def gradient(f: Callable[[jax.Array], jax.Array]) -> np.ndarray:
        run = jax.grad(lambda x: jnp.sum(jnp.cos(f(x))))
        return np.asarray(harness.per_device(run, harness.mesh(3))(x))

    got = gradient(functools.partial(by_pipeline, name))
    assert {backend for _, backend, _ in pc.counts()} == {"pallas"}
    assert not pc.fallback_counts()
    want = gradient(functools.partial(by_lax, name))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# --- on GPUs, or on the wire that stands for NCCL -----------------------------------------------


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def nccl_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many devices; 2 on the wire: with one way round every call depends on the one before.

    CPU devices run calls that do not depend on each other in any order, a stream in one.
    """
    if request.param == "host":
        nccl_host.serve(monkeypatch)
        return 2
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    return min(4, jax.device_count())


@pytest.mark.parametrize("name", [*NAMES, "fused", "unfused"])
def test_nccl_gives_what_lax_gives(name: str, nccl_devices: int) -> None:
    n = nccl_devices

    def program(x: jax.Array, **how: Any) -> jax.Array:
        if name in NAMES:
            return by_pipeline(name, x, **how)
        y = pc.all_gather_matmul(x[0], x[1].T, "x", algorithm=name, **how)
        return pc.matmul_reduce_scatter(jnp.sin(y), x[1], "x", algorithm=name, **how)

    @jax.default_matmul_precision("highest")  # GPUs multiply by TensorFloat-32 else
    def run(**how: Any) -> Any:
        def shard(x: jax.Array) -> Any:
            return jax.value_and_grad(lambda x: jnp.sum(jnp.cos(program(x, **how))))(x)

        return harness.per_device(shard, harness.mesh(n))(harness.random((n, n, 6, 6), "float32"))

    pc.reset_counts()
    ours = run(backend="nccl")
    assert {backend for _, backend, _ in pc.counts()} == {"nccl"}
    for got, want in zip(ours, run(**XLA), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


# --- programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_programs_do_not_grow_with_the_ring(name: str) -> None:
    def permutations(n: int) -> int:
        mesh = jax.sharding.AbstractMesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = PartitionSpec("x")

        def program(x: jax.Array) -> jax.Array:
            return by_pipeline(name, x[:, :, None], **XLA).sum(0, keepdims=True)

        mapped = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec)
        x = jax.ShapeDtypeStruct((n * n, 2), "float32")
        return jaxprs.primitives_in(jax.make_jaxpr(mapped)(x))["pallas_ppermute"]

    assert permutations(8) == 7
    few, many = permutations(32), permutations(256)
    assert many == few + (2 * 3 if name == "exchange" else 0)  # 3 powers of two more either way
    assert many < 40


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_in_loops_and_conditions(name: str) -> None:
    def program(x: jax.Array) -> jax.Array:
        blocks = x.reshape(16, 8, 128)  # without a name lax's permutes serve, which XLA hides there
        return by_pipeline(name, blocks, backend="pallas").astype(jnp.float32).sum(0)

    pc.reset_counts()
    harness.compile_for_tpu(program, "v6e:4x4", (16 * 8, 128))
    assert {backend for _, backend, _ in pc.counts()} == {"pallas"}
    assert not pc.fallback_counts()
