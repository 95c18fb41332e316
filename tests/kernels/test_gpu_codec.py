"""Kernels of one pass on GPUs: the bits of `wires`, and what Triton is given."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from pallas_collectives import wires
from pallas_collectives.kernels import gpu_codec
from pallas_collectives.wires import Wire

SHAPES = [
    ((3, 2, 16, 128), jnp.float32),
    ((2, 16384), jnp.bfloat16),
    ((1, 32, 256), jnp.float16),
]


def blocks_of(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Of all sizes, among them groups of zeros, of subnormal numbers, with NaN and with inf."""
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
        assert not gpu_codec.serves(shape, Wire(name, group=group))
        return
    wire, x, block = Wire(name, group=group), blocks_of(shape, dtype), shape[1:]
    assert gpu_codec.serves(shape, wire)
    limit = float(jnp.finfo(dtype).max)

    def by_passes(x: jax.Array) -> Any:
        packed = wires.pack(*wires.quantize(x, wire))
        values, scales = wires.unpack(packed, block, wire)
        terms = [
            jnp.clip(wires.dequantize(v, s), -limit, limit)
            for v, s in zip(values, scales, strict=True)
        ]
        return packed, wires.dequantize(values, scales, dtype), sum(terms[1:], terms[0])

    def in_one(x: jax.Array) -> Any:
        packed = gpu_codec.pack(x, wire, True)
        return (
            packed,
            gpu_codec.unpack(packed, block, wire, dtype, True),
            gpu_codec.added(packed, block, wire, dtype, jnp.float32, True),
        )

    for want, got in zip(jax.jit(by_passes)(x), jax.jit(in_one)(x), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(
            np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8)
        )


def test_a_sum_beyond_its_dtype_is_inf_and_a_term_is_not() -> None:
    wire, most = Wire("int8"), float(jnp.finfo(jnp.float16).max)
    packed = gpu_codec.pack(jnp.full((2, 1024), most, jnp.float16), wire, True)
    added = gpu_codec.added(packed, (1024,), wire, jnp.float16, jnp.float16, True)
    assert np.isinf(np.asarray(added)).all()
    alone = gpu_codec.unpack(packed, (1024,), wire, jnp.float16, True)
    assert (np.asarray(alone) == most).all()


def test_a_scale_of_another_group_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above can fail."""
    wire, x = Wire("int8"), blocks_of((2, 16384), jnp.float32)
    parts = gpu_codec._parts
    packed = gpu_codec.pack(x, wire, True)

    def turned(*given: Any) -> Any:
        values, scales = parts(*given)
        return values, jnp.roll(scales, 1, axis=1)

    want = gpu_codec.unpack(packed, x.shape[1:], wire, x.dtype, True)
    monkeypatch.setattr(gpu_codec, "_parts", turned)
    got = gpu_codec.unpack(packed, x.shape[1:], wire, x.dtype, True)
    assert (np.asarray(got) != np.asarray(want)).any()


@pytest.mark.parametrize(
    "shape, wire",
    [
        ((2, 1000), Wire("int8")),  # groups that are not whole
        ((2, 4 * 128), Wire("int8")),  # too few
        ((2, 1024), Wire("int8", group="row")),
        ((2, 1024), Wire("int8", scales="power of two")),
        ((2, 1024), Wire("bfloat16")),
        ((1 << 12, 1 << 19), Wire("int8")),  # offsets of more than 32 bits
    ],
)
def test_the_rest_is_for_passes_of_xla(shape: tuple[int, ...], wire: Wire) -> None:
    assert not gpu_codec.serves(shape, wire)


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
def test_triton_takes_them(name: str) -> None:
    """Three blocks: no array in a kernel may have a size that is no power of two."""
    wire, shape = Wire(name), (3, 4096)
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, platform="gpu")
    packed = jax.ShapeDtypeStruct((3, wires.packed_bytes(shape[1:], wire) // 128, 128), jnp.int8)
    programs = (
        (lambda x: gpu_codec.pack(x, wire, False), jax.ShapeDtypeStruct(shape, jnp.bfloat16)),
        (lambda p: gpu_codec.unpack(p, (4096,), wire, jnp.bfloat16, False), packed),
        (lambda p: gpu_codec.added(p, (4096,), wire, jnp.float32, jnp.bfloat16, False), packed),
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("z",), abstract_device=device)):
        for program, operand in programs:
            lowered = jax.jit(program).trace(operand).lower(lowering_platforms=("cuda",))
            assert lowered.as_text().count("__gpu$xla.gpu.triton") == 1
