"""Pipelined products: values and gradients against numpy and lax, overlap on TPUs, refusals."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import harness
import pallas_collectives as pc
from pallas_collectives.errors import CollectiveError, DtypeError
from pallas_collectives.overlap import array_products

XLA = {"backend": "xla"}

PRODUCTS = [
    ("float32", None, "float32", 1e-5),
    ("bfloat16", None, "bfloat16", 2e-2),
    ("bfloat16", "float32", "float32", 1e-5),
    ("int8", "int32", "int32", 0),
    ("float8_e4m3fn", "float32", "float32", 1e-5),
]


def close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64),
        want,
        rtol=tolerance,
        atol=tolerance * np.abs(want).max(),
    )


def normal(dtype: str, *shape: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=shape)
    return (x * 8 if "int" in dtype else x).astype(jnp.dtype(dtype))


@pytest.mark.parametrize(("dtype", "preferred", "to", "tolerance"), PRODUCTS)
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_all_gather_matmul(
    axis: int, dtype: str, preferred: str | None, to: str, tolerance: float
) -> None:
    n = 3 if axis else 4
    x = normal(dtype, n, 2, 5, 7, seed=0)
    ws = {"up": normal(dtype, n, 7, 4, seed=1), "down": normal(dtype, n, 7, 2, seed=2)}

    def program(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        return array_products.pipelined_all_gather_matmul(
            x, {"up": up, "down": down}, "x", gather_axis=axis, return_gathered=True,
            preferred_element_type=preferred, **XLA,
        )  # fmt: skip

    products, gathered = harness.per_device(program, harness.mesh(n))(x, ws["up"], ws["down"])
    whole = np.concatenate(list(x), axis)
    np.testing.assert_array_equal(gathered, [whole] * n)
    for name, w in ws.items():
        assert products[name].dtype == jnp.dtype(to)
        want = np.stack([whole.astype(np.float64) @ w[d].astype(np.float64) for d in range(n)])
        close(products[name], want, tolerance)


@pytest.mark.parametrize(("dtype", "preferred", "to", "tolerance"), PRODUCTS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_matmul_reduce_scatter(
    axis: int, dtype: str, preferred: str | None, to: str, tolerance: float
) -> None:
    n = 4 if axis else 3
    x, w = normal(dtype, n, n, 2 * n, 5, seed=0), normal(dtype, n, 5, 3 * n, seed=1)

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return array_products.pipelined_matmul_reduce_scatter(
            x, w, "x", scatter_axis=axis, preferred_element_type=preferred, **XLA
        )

    got = harness.per_device(program, harness.mesh(n))(x, w)
    assert got.dtype == jnp.dtype(to)
    whole = np.einsum("dabk,dkc->abc", x.astype(np.float64), w.astype(np.float64))
    close(got, np.stack(np.split(whole, n, axis)), tolerance)


def test_means_and_precise_sums_of_products() -> None:
    n = 4
    x, w = normal("bfloat16", n, n, 8, seed=0), normal("bfloat16", n, 8, 64, seed=1)

    def program(x: jax.Array, w: jax.Array) -> Any:
        run = functools.partial(array_products.pipelined_matmul_reduce_scatter, x, w, "x", **XLA)
        return run(), run(precise=True), run(reduce="mean", precise=True)

    plain, precise, mean = harness.per_device(program, harness.mesh(n))(x, w)
    whole = np.einsum("dak,dkc->ac", x.astype(np.float64), w.astype(np.float64))[:, None]
    close(precise, whole, 2**-8)
    assert np.abs(plain - whole).max() > np.abs(precise - whole).max()
    np.testing.assert_array_equal(mean, precise / 4)


def test_gradients_of_products_are_laxs() -> None:
    n = 4
    x, w = normal("float32", n, n, 6, seed=0), normal("float32", n, 6, n, seed=1)

    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.sin(array_products.pipelined_all_gather_matmul(x, w, "x", **XLA))
        return array_products.pipelined_matmul_reduce_scatter(y, w.T, "x", **XLA)

    def of_lax(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.sin(lax.all_gather(x, "x", tiled=True) @ w)
        return lax.psum_scatter(y @ w.T, "x", tiled=True)

    def gradients(f: Callable[..., jax.Array]) -> Any:
        run = jax.grad(lambda *xw: jnp.sum(jnp.cos(f(*xw))), (0, 1))
        return harness.per_device(run, harness.mesh(n))(x, w)

    for got, want in zip(gradients(ours), gradients(of_lax), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_gradients_of_narrow_weights_are_added_in_float32() -> None:
    n = 8
    x, w = normal("bfloat16", n, n, 6, seed=0), normal("bfloat16", n, 6, n, seed=1)
    cotangent = jnp.asarray(normal("bfloat16", n, n, seed=2))

    def ours(x: jax.Array, w: jax.Array) -> Any:
        _, of_gather = jax.vjp(
            lambda w: array_products.pipelined_all_gather_matmul(x[:1], w, "x", **XLA), w
        )
        _, of_scatter = jax.vjp(
            lambda w: array_products.pipelined_matmul_reduce_scatter(x, w, "x", **XLA), w
        )
        return of_gather(cotangent), of_scatter(cotangent[:1])

    def exact(x: np.ndarray, w: np.ndarray) -> Any:
        wide = np.asarray(cotangent, np.float64)
        return (
            np.stack([x[:, 0].T.astype(np.float64) @ wide] * n),
            x.swapaxes(1, 2).astype(np.float64) @ np.stack([np.repeat(wide[:1], n, 0)] * n),
        )

    got = harness.per_device(ours, harness.mesh(n), check_vma=False)(x, w)
    for (gradient,), want in zip(got, exact(x, w), strict=True):
        close(gradient, want, 2**-8)


# --- what the TPU compiler makes of them --------------------------------------------------------

_OP = re.compile(r"= [^\n]*? (collective-permute-(?:start|done)|copy|fusion)\(([^\n]*)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?(%[^\s(]+) [^\n]*\{\n(.*?)^\}", re.M | re.S)


def compiled_for(topology: str, program: Callable[..., Any], *shapes: Any) -> list[list[str]]:
    """For each computation with permutes: its permutes, products and copies, in order."""
    devices = np.array(harness._topology(topology).devices)
    on, spec = Mesh(devices, ("x",)), PartitionSpec("x")

    def shard(*args: jax.Array) -> jax.Array:
        return program(*(a[0] for a in args))[None]

    mapped = jax.shard_map(shard, mesh=on, in_specs=spec, out_specs=spec, check_vma=False)
    sharding = NamedSharding(on, spec)
    xs = [jax.ShapeDtypeStruct((devices.size, *s), jnp.bfloat16, sharding=sharding) for s in shapes]
    computations = dict(_COMPUTATION.findall(jax.jit(mapped).lower(*xs).compile().as_text()))

    def name(op: str, rest: str) -> str:
        called = re.search(r"calls=(%[^\s,]+)", rest)
        product = called and " convolution(" in computations[called[1]]
        return "product" if product else op.removeprefix("collective-permute-")

    found = ([name(*op) for op in _OP.findall(body)] for body in computations.values())
    return [[op for op in ops if op != "fusion"] for ops in found if "start" in ops]


def overlapped(ops: list[str]) -> int:
    """Products between the start of a permute and the end of one."""
    under_way, products = 0, 0
    for op in ops:
        under_way += {"start": 1, "done": -1}.get(op, 0)
        products += op == "product" and under_way > 0
    return products


PRODUCTS_ON_TPU = {
    "all_gather": (array_products.pipelined_all_gather_matmul, (256, 1024), (1024, 512)),
    "reduce_scatter": (
        array_products.pipelined_matmul_reduce_scatter,
        (4096, 256),
        (256, 1024),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS_ON_TPU)
def test_laxs_permutes_fly_while_a_tpu_multiplies(name: str) -> None:
    function, *shapes = PRODUCTS_ON_TPU[name]
    program = functools.partial(function, axis_name="x", **XLA)
    (written_out,) = compiled_for("v5p:2x2x1", program, *shapes)  # 4 devices
    assert written_out.count("start") == 3
    assert overlapped(written_out) >= 2
    computations = compiled_for("v5e:4x4", program, *shapes)  # 16
    outside, in_loop = sorted(computations, key=lambda ops: ops.count("start"))
    assert overlapped(in_loop) >= 2 and overlapped(outside) >= 2
    assert in_loop.count("copy") <= in_loop.count("start") / 4  # of single hops, each is copied


def test_products_that_cannot_be_are_refused_before_a_pipeline_is_made() -> None:
    multiply = functools.partial(pc.all_gather_matmul, algorithm="fused", **XLA)
    scatter = functools.partial(pc.matmul_reduce_scatter, algorithm="fused", **XLA)
    w = jnp.ones((4, 5))
    for wrong in (jnp.ones((5, 4)), jnp.ones(4), jnp.ones((2, 4, 5))):
        shapes = "operands of shapes"
        harness.fails(CollectiveError, shapes, lambda x, b=wrong: multiply(x, [w, b], "x"))
        harness.fails(CollectiveError, shapes, lambda x, w=wrong: scatter(x, w, "x"))
    harness.fails(CollectiveError, "gather_axis=3", lambda x: multiply(x, w, "x", gather_axis=3))
    several = "of size 5: it must be a multiple of the 3"
    harness.fails(CollectiveError, several, lambda x: scatter(x, w, "x", scatter_axis=-1))
    harness.fails(CollectiveError, "reduce='max'", lambda x: scatter(x, w, "x", reduce="max"))
    whole = functools.partial(scatter, w=w.astype("int8"), axis_name="x", reduce="mean")
    harness.fails(DtypeError, "mean", lambda x: whole(x.astype("int8")))
