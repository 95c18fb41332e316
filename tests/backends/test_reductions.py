"""How sums are laid out for kernels: as they lie, padded, or left to lax where a step matters."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives.backends.pallas import reductions
from pallas_collectives.kernels.machinery.blocks import LANES, sublanes

ODD = (504, 1000)  # neither whole rows nor whole columns, of bfloat16


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=2),
    st.lists(st.integers(0, 300), min_size=1, max_size=2),
    st.integers(1, 8),
    st.sampled_from(["float32", "bfloat16", "int8"]),
)
def test_any_operand_becomes_whole_tiles_and_back(
    lead: list[int], last: list[int], n: int, dtype: str
) -> None:
    shape = (*lead, *last)
    x = jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 100, dtype)
    blocks = reductions._in_blocks(x, n)
    assert len(blocks) == n and blocks.shape[1] % sublanes(x.dtype) == 0
    assert blocks.shape[2] % LANES == 0
    plan: Any = type("Plan", (), {"on_sparsecore": False})
    back = reductions._out_of_blocks(blocks, shape, plan)
    assert back.shape == shape
    np.testing.assert_array_equal(np.asarray(back, np.float32), np.asarray(x, np.float32))


@pytest.mark.parametrize(
    "shape, axis",
    # What a block is flattened to has the shape that it would be padded to as it lies.
    [((128, 120), 0), ((4, 30, 128), 0), ((2, 60, 128), 1), ((2, 64, 120), 0), ((60, 256), 1)],
)
def test_scattered_blocks_are_flattened_and_cut_back(shape: tuple[int, ...], axis: int) -> None:
    x = harness.random((2, *shape), jnp.float32)

    def program(x: jax.Array) -> jax.Array:
        return pc.psum_scatter(x, "x", scatter_dimension=axis, tiled=True, backend="pallas")

    got = harness.per_device(program, harness.mesh(2))(x)
    want = np.split(x[0] + x[1], 2, axis=axis)
    np.testing.assert_array_equal(np.asarray(got), np.stack(want))


@pytest.mark.parametrize("wire", [None, "int8"])
def test_sums_whose_columns_are_nearly_a_tile(wire: str | None) -> None:
    x = harness.random((2, 512, 120), jnp.float32)
    how: Any = {"backend": "pallas", "algorithm": "bidirectional", "wire": wire}

    def program(x: jax.Array) -> jax.Array:
        return pc.psum_scatter(x, "x", tiled=True, **how)

    got = np.asarray(harness.per_device(program, harness.mesh(2))(x)).reshape(512, 120)
    np.testing.assert_allclose(got, x[0] + x[1], atol=0.04 if wire else 0)


@pytest.mark.parametrize(
    "call, shape, replaced",
    [
        (lambda x: lax.psum(x, "x"), ODD, False),
        (lambda x: lax.pmax(x, "x"), ODD, False),
        (lambda x: lax.psum(x, "x"), (512, 1024), True),
        (lambda x: lax.psum(x, "x"), (7, 7, 3, 64), True),  # small
        (lambda x: lax.psum(x, "x"), (8192, 64), False),  # whole tiles if flattened
        (lambda x: lax.psum(x, "x"), (1 << 20,), True),
        (lambda x: lax.psum_scatter(x, "x", tiled=True), ODD, False),
        (lambda x: lax.psum_scatter(x, "x", tiled=True), (512, 1024), True),
        (lambda x: lax.psum_scatter(x, "x", tiled=True), ((1 << 20) + 12,), True),
        (lambda x: lax.all_to_all(x, "x", 2, 1, tiled=True), (2, 512, 8, 80), False),
        (lambda x: lax.all_to_all(x, "x", 2, 1, tiled=True), (2, 512, 8, 128), True),
    ],
)
def test_a_step_leaves_what_would_be_padded_to_lax(
    call: Any, shape: tuple[int, ...], replaced: bool
) -> None:
    x = harness.random((4, *shape), jnp.bfloat16)
    program = harness.per_device(call, harness.mesh(4))
    want = np.asarray(program(x), np.float32)
    with pc.override_lax():
        got = np.asarray(harness.per_device(call, harness.mesh(4))(x), np.float32)
    report = pc.override_report()
    assert (len(report.replaced), len(report.left)) == (replaced, not replaced)
    assert replaced or "kernels take whole tiles" in report.left[0].why
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)


def test_who_asks_for_kernels_has_them() -> None:
    x = harness.random((2, *ODD), jnp.float32)

    def program(x: jax.Array) -> jax.Array:
        return lax.psum(x, "x")

    with pc.override_lax(everything=True):
        got = harness.per_device(program, harness.mesh(2))(x)
    assert len(pc.override_report().replaced) == 1
    np.testing.assert_array_equal(np.asarray(got)[0], x[0] + x[1])


@pytest.mark.full
def test_rows_are_padded_as_they_lie() -> None:
    """No pass flattens them: by the compiler's cycles padding and cutting take two copies' time."""
    pytest.importorskip("libtpu")
    on = harness.tpu_mesh("v5e:2x2", {"x": 4})

    def cycles(rows: int) -> int:
        x = jax.ShapeDtypeStruct((rows, 768), "bfloat16", sharding=jax.NamedSharding(on, P()))
        mapped = jax.shard_map(
            lambda x: pc.psum(x, "x"), mesh=on, in_specs=P(), out_specs=P(), check_vma=False
        )
        text = jax.jit(mapped).lower(x).compile().as_text()
        return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))

    of_copy = 152_000 / 8192 * 768 / 1024  # of a row on v5e
    assert 0 < cycles(8201) - cycles(8192) < 4 * of_copy * 8201
