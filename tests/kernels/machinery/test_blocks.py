"""How arrays are cut, and how dtypes are packed for DMAs."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import harness
import pallas_collectives as pc
from pallas_collectives import replay
from pallas_collectives.backends.pallas import packing
from pallas_collectives.kernels.machinery import combine
from pallas_collectives.kernels.machinery.blocks import Blocks, sliceable, sublanes


@pytest.mark.parametrize(
    "size, axis, ndim, dtype, free",
    [
        (8, 0, 2, "float32", True),
        (4, 0, 2, "float32", False),
        (8, 0, 2, "bfloat16", False),
        (16, 0, 2, "bfloat16", True),
        (32, 0, 2, "int8", True),
        (128, 1, 2, "float32", True),
        (64, 1, 2, "float32", False),
        (1, 0, 3, "int8", True),
        (1024, 0, 1, "float32", False),
    ],
)
def test_what_falls_on_tile_boundaries(
    size: int, axis: int, ndim: int, dtype: str, free: bool
) -> None:
    assert sliceable(size, axis, ndim, dtype) is free


@pytest.mark.parametrize(
    "shape, most, cut, chunks",
    [
        ((8, 128), 4, 0, 1),
        ((16, 128), 4, 0, 2),
        ((64, 128), 4, 0, 4),
        ((8, 256), 4, 1, 2),
        ((2, 3, 5), 4, 0, 2),
        ((3, 5), 4, 0, 1),
        ((200, 128), 8, 0, 5),
        ((160, 128), 8, 0, 4),
        ((96, 128), 8, 0, 6),
        ((24, 128), 4, 0, 3),
        ((88, 128), 8, 0, 1),
    ],
)
def test_blocks_are_cut_where_that_is_free(
    shape: tuple[int, ...], most: int, cut: int, chunks: int
) -> None:
    blocks = Blocks.of(shape, 0, jnp.float32, most)
    assert (blocks.cut, blocks.chunks) == (cut, chunks)
    assert np.prod(blocks.chunk_shape) * chunks == np.prod(shape)


@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_packing_is_undone_bit_for_bit(dtype: str) -> None:
    want = harness.random((3, 5), dtype)
    with jax.enable_x64(True):
        x = jnp.asarray(want)
        packed, added = packing.pack(x)
        assert packed.ndim == x.ndim + added
        assert packed.dtype.itemsize <= 4
        assert packed.dtype not in (jnp.bool_, jnp.float16, jnp.complex64)
        y = packing.unpack(packed, x.dtype)
    assert y.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(y), want)


@hypothesis.given(
    st.tuples(st.integers(1, 4), st.integers(1, 5000), st.integers(1, 64)),
    st.sampled_from(["float32", "bfloat16", "int8"]),
)
def test_tiles_cut_a_shape_evenly_into_whole_tiles(size: tuple[int, int, int], dtype: str) -> None:
    layers, tall, wide = size
    rows = sublanes(dtype)
    shape = (layers, tall * rows, wide * 128)
    tile = combine.tile_shape(shape, dtype, combine.TILE_BYTES)
    assert all(extent % t == 0 for extent, t in zip(shape, tile, strict=True))
    assert tile[-2] % rows == 0 and tile[-1] % 128 == 0
    assert np.prod(tile) * jnp.dtype(dtype).itemsize <= combine.TILE_BYTES


@hypothesis.given(
    st.tuples(st.integers(1, 3), st.integers(1, 3000), st.integers(1, 300)),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.sampled_from([combine.TILE_BYTES, combine.TILE_BYTES // 6]),
)
@hypothesis.example((1, 251, 1), "float32", combine.TILE_BYTES)
@hypothesis.example((1, 251, 257), "float32", combine.TILE_BYTES)
def test_what_nothing_divides_is_added_in_tiles_that_are_not_small(
    size: tuple[int, int, int], dtype: str, limit: int
) -> None:
    layers, tall, wide = size
    shape = (layers, tall * sublanes(dtype), wide * 128)
    seen, itemsize = np.zeros((tall, wide), int), jnp.dtype(dtype).itemsize
    for rows, columns in combine.even_spans(shape, dtype, limit):
        assert rows.start % sublanes(dtype) == columns.start % 128 == 0
        part = (layers, rows.size, columns.size)
        tile = combine.tile_shape(part, dtype, limit)
        small = np.prod(tile) * itemsize < min(limit, rows.size * columns.size * itemsize) / 8
        assert not small, (part, tile)
        at = [
            slice(span.start // unit, (span.start + span.size) // unit)
            for span, unit in zip((rows, columns), (sublanes(dtype), 128), strict=True)
        ]
        seen[tuple(at)] += 1
    np.testing.assert_array_equal(seen, 1)


def test_a_prime_number_of_tiles_takes_no_longer_to_add() -> None:
    machine = replay.Machine.named("v5p:4x1x1")
    run = jax.shard_map(
        lambda x: pc.psum(x, "x", backend="pallas", algorithm="ring"),
        mesh=machine.mesh({"x": 4}),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    even, prime = (
        replay.replay(run, jax.ShapeDtypeStruct((4 * tiles * 8, 128), "float32"), machine=machine)
        for tiles in (256, 251)
    )
    assert prime.time < 1.1 * even.time  # 2.6 times in tiles of one


def test_a_prime_number_of_tiles_is_added_right() -> None:
    x = harness.random((2, 2 * 67 * 8, 128), "float32")
    run = harness.per_device(
        lambda x: pc.psum(x, "x", algorithm="ring"), harness.mesh(2), check_vma=False
    )
    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES["on_wait"]):
        got = np.asarray(run(x))
    np.testing.assert_array_equal(got, np.broadcast_to(x[0] + x[1], x.shape))
