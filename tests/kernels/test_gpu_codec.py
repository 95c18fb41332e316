"""Kernels of one pass on GPUs: the bits of `wires`, and what Triton is given."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from pallas_collectives import wires
from pallas_collectives.kernels import gpu_codec
from pallas_collectives.wires import Wire

NOBODY = jnp.full(1, -1, jnp.int32)
SHAPES = [
    ((3, 2, 16, 128), jnp.float32),
    ((2, 16384), jnp.bfloat16),
    ((1, 32, 256), jnp.float16),
]


def blocks_of(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Numbers of all sizes, with groups of zeros and subnormal numbers, and with NaN and inf."""
    rng = np.random.default_rng(0)
    x = (
        rng.normal(size=(shape[0], np.prod(shape[1:])))
        * np.exp(4 * rng.normal(size=shape[0]))[:, None]
    )
    x[:, :256] = 0
    x[0, 300], x[0, 700] = np.nan, -np.inf
    x[0, 1024:1152] *= 1e-42
    x[0, 1152:1280] = np.sign(x[0, 1152:1280]) * float(jnp.finfo(dtype).max)
    with np.errstate(over="ignore"):
        return jnp.asarray(x.astype(np.float32).astype(dtype)).reshape(shape)


@pytest.mark.parametrize("group", [128, 256])
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape, dtype", SHAPES)
def test_the_bits_are_those_of_passes_of_xla(
    shape: tuple[int, ...], dtype: Any, name: str, group: int
) -> None:
    if shape[-1] % group:
        assert not gpu_codec.serves(shape, Wire(name, group=group), shape[0])
        return
    wire, x, block = Wire(name, group=group), blocks_of(shape, dtype), (math.prod(shape[1:]),)
    assert gpu_codec.serves(shape, wire, shape[0])
    limit = float(jnp.finfo(dtype).max)

    def by_passes(x: jax.Array) -> Any:
        packed = wires.pack(*wires.quantize(x.reshape(-1, *block), wire))  # in kernels' order
        values, scales = wires.unpack(packed, block, wire)
        terms = [
            jnp.clip(wires.dequantize(v, s), -limit, limit)
            for v, s in zip(values, scales, strict=True)
        ]
        return packed, wires.dequantize(values, scales, dtype), sum(terms[1:], terms[0])

    def in_one(x: jax.Array) -> Any:
        format = gpu_codec.Format(wire, x[0].size, True)
        packed = gpu_codec.pack(format, x, NOBODY)
        return (
            packed,
            gpu_codec.unpack(format, dtype, packed, x, NOBODY),
            gpu_codec.added(format, jnp.float32, packed, x, NOBODY),
        )

    for want, got in zip(jax.jit(by_passes)(x), jax.jit(in_one)(x), strict=True):
        if got.dtype == jnp.int8:  # without padding
            want = want.reshape(len(x), -1)[:, : got.shape[1]]
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(
            np.asarray(got).view(np.uint8).reshape(-1), np.asarray(want).view(np.uint8).reshape(-1)
        )


@pytest.mark.parametrize("name", ["int8", "float8_e5m2"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_what_stays_has_the_bits_of_what_comes(blocks: int, name: str) -> None:
    """Three devices; the second packs another block for each, or one for all."""
    wire, x = Wire(name), blocks_of((3, 64 * 128), jnp.bfloat16)
    own, sent = jnp.ones(1, jnp.int32), x if blocks == 3 else x[1:2]
    format = gpu_codec.Format(wire, x[0].size, True)

    def program(x: jax.Array) -> Any:
        packed = gpu_codec.pack(format, x, NOBODY)
        come = packed.at[1].set(-1)  # NaN, if anyone looked at it
        alone = gpu_codec.pack(format, sent, own if blocks == 3 else NOBODY)
        for k in {0, 2} if blocks == 3 else ():
            come = come.at[k].set(alone[k])
        arrived = gpu_codec.unpack(format, x.dtype, come, sent, own).reshape(x.shape)
        total = gpu_codec.added(format, x.dtype, come, sent, own)
        return arrived, total, gpu_codec.added(format, x.dtype, packed, x, NOBODY)

    arrived, total, of_all = (a.astype(jnp.float32) for a in jax.jit(program)(x))
    np.testing.assert_array_equal(arrived, wires.as_sent(x, wire).astype(jnp.float32))
    np.testing.assert_array_equal(total, of_all)


def test_a_sum_beyond_its_dtype_is_inf_and_a_term_is_not() -> None:
    most = float(jnp.finfo(jnp.float16).max)
    x = jnp.full((2, 1024), most, jnp.float16)
    format = gpu_codec.Format(Wire("int8"), x[0].size, True)
    packed = gpu_codec.pack(format, x, NOBODY)
    added = gpu_codec.added(format, jnp.float16, packed, x, NOBODY)
    assert np.isinf(np.asarray(added)).all()
    alone = gpu_codec.unpack(format, jnp.float16, packed, x, NOBODY)
    assert (np.asarray(alone) == most).all()


def test_a_scale_of_another_group_is_noticed() -> None:
    """So that the tests above can fail."""
    x = blocks_of((2, 16384), jnp.float32)
    format = gpu_codec.Format(Wire("int8"), x[0].size, True)
    packed = gpu_codec.pack(format, x, NOBODY)
    want = gpu_codec.unpack(format, x.dtype, packed, x, NOBODY)
    turned = jnp.concatenate([packed[:, :16384], jnp.roll(packed[:, 16384:], 4, 1)], 1)
    got = gpu_codec.unpack(format, x.dtype, turned, x, NOBODY)
    assert (np.asarray(got) != np.asarray(want)).any()


@pytest.mark.parametrize(
    "shape, wire, come",
    [
        ((2, 1000), Wire("int8"), 2),  # groups that are not whole
        ((2, 4 * 128), Wire("int8"), 2),  # too few
        ((2, 1024), Wire("int8", group="row"), 2),
        ((2, 1024), Wire("int8", scales="power of two"), 2),
        ((2, 1024), Wire("bfloat16"), 2),
        # Packed bytes of more than 31 bits: what leaves; what comes; with the scales alone.
        ((1 << 12, 1 << 19), Wire("int8"), 1 << 12),
        ((1, 1 << 28), Wire("int8"), 8),
        ((1, (1 << 28) - (1 << 20)), Wire("int8"), 8),
    ],
)
def test_the_rest_is_for_passes_of_xla(shape: tuple[int, ...], wire: Wire, come: int) -> None:
    assert not gpu_codec.serves(shape, wire, come)


def test_blocks_are_served_up_to_31_bits_of_packed_bytes() -> None:
    assert gpu_codec.serves((1, 1 << 28), Wire("int8"), 7)


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
def test_triton_takes_them(name: str) -> None:
    """Three blocks: no array in a kernel may have a size that is no power of two."""
    shape = (3, 64 * 128)
    format = gpu_codec.Format(Wire(name), 64 * 128, False)
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, platform="gpu")
    x, come, word = (
        jax.ShapeDtypeStruct(*each)
        for each in ((shape, jnp.bfloat16), ((3, format.nbytes), jnp.int8), ((1,), jnp.int32))
    )
    programs: Any = (
        (functools.partial(gpu_codec.pack, format), (x, word)),
        (functools.partial(gpu_codec.unpack, format, jnp.bfloat16), (come, x, word)),
        (functools.partial(gpu_codec.added, format, jnp.bfloat16), (come, x, word)),
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("z",), abstract_device=device)):
        for program, operands in programs:
            lowered = jax.jit(program).trace(*operands).lower(lowering_platforms=("cuda",))
            assert lowered.as_text().count("__gpu$xla.gpu.triton") == 1
