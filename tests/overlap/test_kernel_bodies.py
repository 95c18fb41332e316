"""Kernel bodies inside a collective, as users write them: values, errors, what they refuse."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import pallas_collectives as pc
from pallas_collectives import errors
from products import N, gathered, per_device, scattered


class _Rows(NamedTuple):
    scaled: Any
    squares: Any


def test_gather_and_consume_with_a_kernel_body() -> None:
    """Scaled rows, and their sums of squares, from bfloat16 rows that arrive."""
    n = 3
    x, scale = harness.random((n, 64, 128), "bfloat16"), harness.random((n, 1, 128), "float32", 1)

    def body(x: Any, scale: Any, scaled: Any, squares: Any) -> None:
        wide = x[...].astype(jnp.float32)
        scaled[...] = wide * scale[...]
        squares[...] = jnp.broadcast_to((wide * wide).sum(axis=1, keepdims=True), squares.shape)

    def run(x: jax.Array, scale: jax.Array) -> Any:
        outs = _Rows(*[jax.ShapeDtypeStruct((64, 128), jnp.float32)] * 2)
        options: dict[str, Any] = {"out": outs, "operands": [scale], "return_gathered": True}
        return pc.gather_and_consume(x, body, "x", tile=16, **options)

    scaled, squares, whole = per_device(run, x, scale, n=n)
    want = gathered(x, 0)
    wide = want.astype(np.float32)
    np.testing.assert_array_equal(whole, want)
    np.testing.assert_array_equal(scaled, wide * scale)
    np.testing.assert_array_equal(squares[..., 0], (wide * wide).sum(axis=-1))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_produce_and_scatter_with_a_kernel_body(reduce: str) -> None:
    """Products of int8 rows with int8 weights, scaled in float32."""
    n = 4
    x, w = harness.random((n, n * 32, 128), "int8"), harness.random((n, 128, 128), "int8", 1)

    def body(x: Any, w: Any, term: Any) -> None:
        total = jnp.dot(x[...], w[...], preferred_element_type=jnp.int32)
        term[...] = total.astype(jnp.float32) * 0.5

    def run(x: jax.Array, w: jax.Array) -> Any:
        out = jax.ShapeDtypeStruct((32, 128), jnp.float32)
        return pc.produce_and_scatter(x, body, "x", out=out, operands=[w], reduce=reduce)

    (got,) = per_device(run, x, w, n=n)
    want = scattered(x, w, 0) * 0.5
    np.testing.assert_array_equal(got, want / n if reduce == "mean" else want)


@pytest.mark.parametrize("generation", ["v4", "v5e", "7x"])
def test_kernel_bodies_compile(generation: str) -> None:
    def halve(x: Any, y: Any) -> None:
        y[...] = (x[...].astype(jnp.float32) * 0.5).astype(y.dtype)

    def widen(x: Any, term: Any) -> None:
        term[...] = x[...].astype(jnp.float32)

    def run(x: jax.Array) -> Any:
        out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        whole = pc.gather_and_consume(x, halve, "x", out=out)
        return pc.produce_and_scatter(
            whole, widen, "x", out=jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
        )

    compiled = functools.partial(
        harness.compile_for_tpu,
        run,
        harness.GENERATIONS[generation],
        (2048, 1024),
        dtype=jnp.bfloat16,
    )
    if generation == "v5e":  # it is not known while tracing how the ring could go within its reach
        with pytest.raises(errors.ReachError, match="gather_and_consume over 8 devices"):
            compiled()
        return
    assert compiled().ops.count("custom-call") == 2


@pytest.mark.parametrize(
    "change, error",
    [
        ({"tile": 12}, "divides a block's"),
        ({"tile": 8.0}, "divides a block's"),
        ({"out": []}, "a shape and a dtype"),
        ({"out": (16, 128)}, "a shape and a dtype"),
        ({"out": jax.ShapeDtypeStruct((32, 128), jnp.float32)}, "as many rows"),
        ({"operands": [np.ones(128, np.float32)]}, "two dimensions"),
        ({"out": jax.ShapeDtypeStruct((16, 100), jnp.float32)}, "whole tiles"),
        ({"backend": "xla"}, "kernel bodies"),
    ],
)
def test_pipelines_refuse_what_they_cannot_cut(change: dict[str, Any], error: str) -> None:
    x = harness.random((N, 16, 128), "float32")
    options: dict[str, Any] = {"out": jax.ShapeDtypeStruct((16, 128), jnp.float32), **change}
    backend = options.pop("backend", None)

    def run(x: jax.Array) -> Any:
        return pc.gather_and_consume(x, lambda x, *_: None, "x", **options)

    with pytest.raises(errors.CollectiveError, match=error), pc.use_backend(backend):
        per_device(run, x)


def copy(x: Any, y: Any) -> None:
    y[...] = x[...].astype(y.dtype)


@pytest.mark.parametrize(
    "body, error",
    [
        (lambda x, y: x[...], "it returns something"),
        (lambda x, y: y.set(x[...]), r"tiles float32\[16, 128\], bfloat16\[16, 128\].*dtype"),
        (lambda x, y: y.set(x[:8].astype(y.dtype)), "Invalid shape"),
        (lambda x: None, "positional argument"),
    ],
)
def test_a_body_that_does_not_fit_its_tiles_is_named(body: Any, error: str) -> None:
    x, out = harness.random((N, 16, 128), "float32"), jax.ShapeDtypeStruct((16, 128), jnp.bfloat16)
    with pytest.raises(errors.CollectiveError, match=error):
        per_device(lambda x: pc.gather_and_consume(x, body, "x", out=out, tile=16), x)


@pytest.mark.parametrize("transform", ["derivative", "vmap"])
@pytest.mark.parametrize("gathers", [True, False])
def test_kernel_bodies_are_not_transformed(transform: str, gathers: bool) -> None:
    x = harness.random((N, 16, 128), "float32")

    def call(x: jax.Array) -> jax.Array:
        pipeline = pc.gather_and_consume if gathers else pc.produce_and_scatter
        rows = 16 if gathers else 16 // N
        out = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
        return jax.jit(lambda x: pipeline(x, copy, "x", out=out))(x)

    def run(x: jax.Array) -> jax.Array:
        if transform == "vmap":
            return jax.vmap(call)(jnp.stack([x, x]))
        return jax.grad(lambda x: call(x).sum())(x)

    name = "gather_and_consume" if gathers else "produce_and_scatter"
    with pytest.raises(
        errors.CollectiveError, match=rf"{transform} of {name}.*(custom_vjp|lax.map)"
    ):
        per_device(run, x)


@pytest.mark.full
def test_a_pair_of_bodies_in_a_custom_vjp() -> None:
    """What the error of a derivative tells one to write."""
    x = harness.random((N, 16, 128), "float32")
    out = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    gather = jax.custom_vjp(lambda x: pc.gather_and_consume(x, copy, "x", out=out))
    gather.defvjp(
        lambda x: (gather(x), None),
        lambda _, ct: (pc.produce_and_scatter(ct, copy, "x", out=out),),
    )
    (got,) = per_device(jax.grad(lambda x: (gather(x) ** 2).sum()), x)
    np.testing.assert_array_equal(got, 2 * N * x)
