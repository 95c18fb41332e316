"""Passes over memory by kernels: the bits of `wires`, in which format, and what they cost."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from packed_rows import WIRES, numbers, on_one
from pallas_collectives import wires
from pallas_collectives.backends.plans import How
from pallas_collectives.kernels import wire_passes
from pallas_collectives.kernels.wire_format import Format
from pallas_collectives.lowering import quantized
from pallas_collectives.wires import Wire

SHAPES = [
    (2, 128, 1024),  # turned, of one step
    (1, 32, 5120),  # several chunks side by side
    (2, 3, 32, 1024),  # of three dimensions
    (3, 8, 4096),  # half a tile of bfloat16
    (1, 1024, 384),
    (2, 40, 4096),
    (2, 131072),
]


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_draws_have_the_bits_of_passes_of_xla(
    shape: tuple[int, ...], dtype: Any, wire: Wire
) -> None:
    x, words = numbers(shape, dtype), jnp.array([123456789, -987654321], jnp.int32)

    def by_both(x: jax.Array, words: jax.Array) -> Any:
        ways = How("pallas", interpret=True), How("xla")
        return [quantized.drawn(x, words, wire, how).astype(jnp.float32) for how in ways]

    got, want = on_one(by_both, x, words)
    np.testing.assert_array_equal(got, want)
    nearest = jax.jit(functools.partial(wires.as_sent, wire=wire))(x)
    assert (np.asarray(got) != np.asarray(nearest)).mean() > 0.01


@pytest.mark.parametrize("wire", [Wire("int8", group=256), Wire("float8_e5m2")], ids=str)
def test_draws_know_their_place_in_every_step(wire: Wire) -> None:
    """Steps go along blocks, rows and columns."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(3, 1024, 1536)).astype(np.float32))
    format = Format.of(x.shape[1:], x.dtype, wire)
    assert format and 3 // format.together(3) > 1 and math.prod(format.grid) > 1
    assert wire.group == 128 or min(format.grid) > 1
    words = jnp.array([5, -6], jnp.int32)

    def by_both(x: jax.Array, words: jax.Array) -> Any:
        ways = How("pallas", interpret=True), How("xla")
        return [quantized.drawn(x, words, wire, how) for how in ways]

    np.testing.assert_array_equal(*on_one(by_both, x, words))


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_those_of_passes_of_xla(
    shape: tuple[int, ...], dtype: Any, wire: Wire
) -> None:
    x = numbers(shape, dtype)
    format = Format.of(shape[1:], x.dtype, wire)
    if format is None:
        assert shape in ((1, 1024, 384), (2, 131072)), "which have no such groups"
        return
    limit = float(jnp.finfo(dtype).max)

    def by_kernels(x: jax.Array) -> Any:
        packed = wire_passes.pack(x, format, x.dtype, interpret=True)
        assert packed.nbytes == len(x) * format.nbytes
        come = wire_passes.unpack(packed, format, x.dtype, interpret=True)
        total = wire_passes.added(packed, format, x.dtype, jnp.float32, interpret=True)
        return come.reshape(x.shape), total.reshape(x.shape[1:])

    def by_passes(x: jax.Array) -> Any:
        flat = x.reshape(len(x), -1, int(wire.group)) if x.ndim == 2 else x
        values, scales = wires.quantize(flat, wire)
        terms = [jnp.clip(t, -limit, limit) for t in wires.dequantize(values, scales)]
        come = wires.dequantize(values, scales, x.dtype)
        return come.reshape(x.shape), sum(terms[1:], terms[0]).reshape(x.shape[1:])

    for want, got in zip(jax.jit(by_passes)(x), on_one(by_kernels, x), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(
            np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8)
        )


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("shape", [(2, 64, 512), (1, 32, 5120), (3, 2, 64, 1024)], ids=str)
def test_values_and_scales_are_those_of_passes_of_xla(shape: tuple[int, ...], wire: Wire) -> None:
    x, how = numbers(shape, jnp.bfloat16), How("pallas", interpret=True)
    got = on_one(lambda x: quantized._moved(x, wire, how, lambda packed: packed), x, vma=True)
    for a, b in zip(got, jax.jit(functools.partial(wires.quantize, wire=wire))(x), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 12)),
    st.sampled_from(WIRES),
    st.sampled_from(["bfloat16", "float32"]),
)
def test_any_shape(sizes: tuple[int, int, int], wire: Wire, dtype: Any) -> None:
    """A block has a format of few more bytes than its numbers, or none."""
    k, rows, columns = sizes
    shape = (k, 8 * rows, 128 * columns)
    format = Format.of(shape[1:], dtype, wire)
    least = wires.packed_bytes(shape[1:], wire)
    if format is None:
        assert columns % 4 or rows * columns < 64 or (dtype == "bfloat16" and rows % 2), shape
        return
    assert format.nbytes <= max(least, 5 * shape[1] * shape[2] // 4)
    x, how = numbers((k, max(1 << 14, shape[1] * shape[2])), dtype), How("pallas", interpret=True)
    x = x[:, : shape[1] * shape[2]].reshape(shape)
    for instead in ((), (2 * x,)):
        got = on_one(lambda *xs: quantized._lost(*xs, wire=wire, how=how), x, *instead, vma=True)
        want = quantized._lost(x, *instead, wire=wire, how=How("xla"))
        np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (got, want)))


@pytest.mark.parametrize(
    "shape, dtype, wire",
    [
        ((12, 4096), "float32", Wire("int8")),  # no whole tiles
        ((16, 1000), "float32", Wire("int8")),
        ((16, 1024), "float16", Wire("int8")),
        ((8, 512), "bfloat16", Wire("int8")),  # scales would take as much as values
        ((4096,), "float32", Wire("int8", group="row")),  # one scale for all
        ((8, 1 << 20), "float32", Wire("int8", group="row")),  # more than VMEM has room for
        ((0, 1024), "float32", Wire("int8")),
        ((16, 1024), "float32", Wire("bfloat16")),
    ],
)
def test_what_is_left_to_passes_of_xla(shape: tuple[int, ...], dtype: Any, wire: Wire) -> None:
    assert Format.of(shape, dtype, wire) is None


@pytest.mark.full
def test_groups_of_subnormal_numbers_have_the_scales_of_passes_of_xla() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 64, 512)) * 1e-41, jnp.float32)
    how = How("pallas", interpret=True)
    for wire in WIRES:
        _, scales = on_one(lambda x, wire=wire: quantized._moved(x, wire, how, jnp.array), x)
        np.testing.assert_array_equal(scales, wires.quantize(x, wire)[1])
        assert (scales > 0).all()


def test_scales_of_other_groups_are_noticed() -> None:
    """So that the tests above can fail."""
    x, wire = numbers((2, 128, 1024), "float32"), Wire("int8")
    format = Format.of(x.shape[1:], x.dtype, wire)
    assert format

    def program(x: jax.Array) -> Any:
        packed = wire_passes.pack(x, format, x.dtype, interpret=True)
        tile = packed[:, -1] if format.tiles % 2 else packed[:, -2]
        faulty = packed.at[:, -1 if format.tiles % 2 else -2].set(jnp.roll(tile, 1, -1))
        return [wire_passes.unpack(y, format, x.dtype, interpret=True) for y in (packed, faulty)]

    right, wrong = on_one(program, x)
    assert (np.asarray(right) != np.asarray(wrong)).any()


@pytest.mark.full
@pytest.mark.parametrize("generation", sorted(harness.GENERATIONS))
def test_whole_programs_compile_for_tpus(generation: str) -> None:
    """All kernels, of all formats, in a program with a gradient in a scan, and under vmap."""
    pytest.importorskip("libtpu")
    on = harness.tpu_mesh(harness.GENERATIONS[generation], {"x": 8})
    residue: Any = {"wire": "int8", "return_residue": True}

    def program(x: jax.Array) -> Any:
        def loss(x: jax.Array) -> Any:
            def turn(x: jax.Array, _: None) -> Any:
                shared = pc.all_gather(x, "x", tiled=True, wire=Wire("int8", group="row"))
                return x + pc.psum_scatter(shared * 2, "x", tiled=True, wire="float8_e5m2"), None

            y, _ = jax.lax.scan(jax.checkpoint(turn), x, length=2)
            return (y.astype(jnp.float32) ** 2).sum()

        each = jax.vmap(lambda x: pc.all_gather(x, "x", wire="int8", dequantize=False))
        apart = each(x.reshape(2, -1, x.shape[-1]))
        few = pc.psum(x[:8], "x", wire="int8", algorithm="exchange")
        flat = pc.psum(x.reshape(-1)[: 2**17], "x", **residue)
        key = jax.random.key(x[0, 0].astype(jnp.int32))

        def drawn(x: jax.Array, number: jax.Array) -> jax.Array:
            wire = Wire("int8", rounding="stochastic", key=jax.random.fold_in(key, number))
            return pc.psum(x, "x", wire=wire)

        draws = jax.vmap(drawn)(x.reshape(2, -1, x.shape[-1]), jnp.arange(2))
        return jax.grad(loss)(x), pc.psum(x, "x", **residue), few, apart, flat, draws

    for dtype in ("bfloat16", "float32", "float16"):  # the last is for XLA's passes
        x = jax.ShapeDtypeStruct((1024, 4096), dtype, sharding=jax.NamedSharding(on, P("x")))
        mapped = jax.shard_map(program, mesh=on, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        text = jax.jit(mapped).lower(x).compile().as_text()
        names = set(re.findall(r"(wire_\w+)/pallas_call", text))
        kernels = {f"wire_{name}" for name in ("pack", "unpack", "add", "values", "lost", "drawn")}
        assert names == (set() if dtype == "float16" else kernels)


@pytest.mark.parametrize("op", ["pack", "sum"])
def test_passes_run_where_simulated_kernels_are_forced(op: str) -> None:
    """They send nothing: no simulation of DMAs, whose effects a pass does not have."""
    wire, x = Wire("int8"), numbers((2, 32, 1024), "float32")
    format = Format.of(x.shape[1:], x.dtype, wire)
    assert format is not None

    def passed(x: jax.Array) -> jax.Array:
        packed = wire_passes.pack(x, format, x.dtype, interpret=True)
        if op == "pack":
            return wire_passes.unpack(packed, format, x.dtype, interpret=True)
        return wire_passes.added(packed, format, x.dtype, x.dtype, op=op, interpret=True)

    want = on_one(passed, x)
    with pltpu.force_tpu_interpret_mode(harness.EITHER):
        np.testing.assert_array_equal(on_one(passed, x), want)
