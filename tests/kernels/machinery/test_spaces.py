"""Operands and results of one element, which XLA passes in registers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import harness
import pallas_collectives
from pallas_collectives.errors import CollectiveError
from pallas_collectives.kernels.machinery import launch, spaces
from pallas_collectives.topology.groups import Group


@pytest.mark.parametrize(
    "shape, dtype", [((), "float32"), ((1,), "bool"), ((1, 1, 1), "bfloat16"), ((), "complex64")]
)
def test_one_element_goes_among_others(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: str
) -> None:
    """XLA passes one element in a register; what goes through DMAs is an array."""
    taken: list[Any] = []

    def operand(array: jax.Array) -> jax.Array:
        taken.append(array)
        return array

    monkeypatch.setattr(spaces, "operand", operand)
    x = harness.random((4, *shape), dtype)
    pairs = [(0, 2), (2, 1), (3, 3)]

    def program(module: Any, x: jax.Array) -> list[jax.Array]:
        return [
            module.all_gather(x, "x"),
            *([module.all_gather(x, "x", axis=x.ndim - 1, tiled=True)] if x.ndim else []),
            module.ppermute(x, "x", pairs),
            module.psum(x, "x"),
        ]

    run = harness.per_device(functools.partial(program, pallas_collectives), harness.mesh(4))
    want = harness.per_device(functools.partial(program, jax.lax), harness.mesh(4))
    for got, expected in zip(run(x), want(x), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert taken
    assert all(operand.size > 1 for operand in taken)


def test_a_kernel_of_one_element_is_refused() -> None:
    def program(x: jax.Array) -> jax.Array:
        return launch.call(
            lambda *refs: None,
            Group(("x",), (3,)),
            x,
            out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
            scratch=(),
            barrier="everyone",
            name="nothing",
            interpret=pltpu.InterpretParams(),
        )

    with pytest.raises(CollectiveError, match=r"shape \(1, 1\) for nothing: one element.*widened"):
        jax.eval_shape(
            harness.per_device(program, harness.mesh(3), jit=False), np.zeros((3, 1, 1), "f")
        )


def test_one_element_beside_rows_is_what_a_body_reads() -> None:
    """Bodies see operands as they are given, whatever goes through DMAs in their place."""
    x = harness.random((2, 16, 128), "float32")
    one = np.full((1, 1), 3, np.float32)

    def program(x: jax.Array) -> list[jax.Array]:
        def scaled(x: Any, by: Any, y: Any) -> None:
            assert by.shape == one.shape
            y[...] = x[...] * by[...]

        out = jax.ShapeDtypeStruct((16, 128), x.dtype)
        half = jax.ShapeDtypeStruct((8, 128), x.dtype)
        kept = [jnp.asarray(one)]
        return [
            pallas_collectives.gather_and_consume(x, scaled, "x", out=out, operands=kept),
            pallas_collectives.produce_and_scatter(x, scaled, "x", out=half, operands=kept),
        ]

    gathered, scattered = harness.per_device(program, harness.mesh(2))(x)
    np.testing.assert_array_equal(gathered, [3 * x.reshape(32, 128)] * 2)
    np.testing.assert_array_equal(scattered, 3 * x.sum(0).reshape(2, 8, 128))
