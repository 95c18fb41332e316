"""Kernels that quantise on a GPU: the bits of `wires`, and nothing behind the last group."""

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nccl_kernels
from pallas_collectives import wires
from pallas_collectives.nccl import codec, cuda
from pallas_collectives.nccl.codec import Kernel
from pallas_collectives.nccl.rows import Row, table_of
from pallas_collectives.wires import Wire

FLOATS = ("float32", "bfloat16", "float16")
WIRES = ("int8", "float8_e4m3fn", "float8_e5m2")
GROUPS = 152  # of a block: three or five tiles, the last of which leaves threads without work


def numbers(dtype: str, group: int, seed: int) -> np.ndarray:
    """Numbers of all sizes: groups of zeros, of subnormal and largest ones, with NaN and inf."""
    rng, kind = np.random.default_rng(seed), jnp.dtype(dtype)
    x = rng.normal(size=(GROUPS, group)) * np.exp(4 * rng.normal(size=(GROUPS, 1)))
    x[0], x[1] = 0, -0.0
    x[2] = 1e-44 * rng.normal(size=group)
    x[3] = np.sign(x[3]) * float(jnp.finfo(kind).max)
    x[4, 3], x[5, 7], x[6, 0] = np.nan, np.inf, -np.inf
    x[7] = max(
        float(jnp.finfo(kind).smallest_subnormal), 2.0**-126
    )  # XLA's CPUs flush smaller ones
    x[8] = np.arange(group) / 2  # halfway between two integers
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(kind)


def bits(a: Any) -> np.ndarray:
    """NaN is NaN, whatever its bits."""
    a = np.asarray(a)
    nan = np.isnan(a.astype(np.float32)) if a.dtype != np.int8 else np.zeros(a.shape, bool)
    return np.where(nan, -1, a.view(f"u{a.dtype.itemsize}").astype(np.int64))


@pytest.mark.parametrize("group", [128, 256])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_reference_has_the_bits_of_wires(dtype: str, wire: str, group: int) -> None:
    x, of = numbers(dtype, group, 0), Wire(wire, group=group)
    values, scales = (np.asarray(a) for a in wires.quantize(jnp.asarray(x), of))
    to, come = np.zeros(x.size + 4 * GROUPS, np.int8), np.zeros_like(x)
    reference(Kernel(codec.SEND, dtype, dtype, wire, group), [Row(0, 0)], x, to)
    np.testing.assert_array_equal(bits(to[: x.size].view(values.dtype)), bits(values.reshape(-1)))
    np.testing.assert_array_equal(to[x.size :].view(np.float32), scales.reshape(-1))
    reference(Kernel(codec.READ, dtype, dtype, wire, group), [Row(0, 0)], to, come)
    want = wires.dequantize(jnp.asarray(values), jnp.asarray(scales), x.dtype)
    np.testing.assert_array_equal(bits(come), bits(want))


def reference(kernel: Kernel, rows: list[Row], source: np.ndarray, target: np.ndarray) -> None:
    """The reference, on all groups."""
    table = np.frombuffer(table_of(rows), np.uint8)
    addresses = (a.ctypes.data for a in (source, target, table))
    nccl_kernels.run(nccl_kernels.load(kernel.name), *addresses, len(rows), GROUPS)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [128, 256])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "kind", [codec.SEND, codec.READ, codec.KEEP, codec.ADD, codec.RELAY, codec.TAKE]
)
def test_kernels_have_the_bits_of_the_reference(
    kind: str, dtype: str, wire: str, group: int
) -> None:
    """Three blocks trade places; terms of sums are of three ranks, and this is the second."""
    result = {"bfloat16": "float32", "float32": "bfloat16"}.get(dtype, dtype)
    kernel = Kernel(kind, dtype, result, wire, group)
    x = np.stack([numbers(dtype, group, rank) for rank in range(3)])
    packed, plain = x[0].size + 4 * GROUPS, x[0].size * jnp.dtype(result).itemsize
    come = np.zeros((5, packed), np.int8)  # from each rank, and to the others
    for block, sent in zip(x, come, strict=False):
        reference(Kernel(codec.SEND, dtype, result, wire, group), [Row(0, 0)], block, sent)
    source, each = (come, packed) if kind == codec.READ else (x, x[0].nbytes)
    each_to = packed if kind == codec.SEND else plain
    to = np.full(3 * each_to + 32, 7, np.int8)

    def row(i: int, come: int) -> tuple[int, int]:
        if not kernel.adds:
            return i * each, (i + 1) % 3 * each_to
        return (0, 0) if i == 1 else (come + i * packed, come + (3 + i // 2) * packed)

    def rows(come: int, words: int) -> list[Row]:
        """Each takes word i, and gives word 3 + i, if the kernel takes or gives any."""
        takes = [words + 4 * i if kind in (codec.SEND, codec.TAKE) else 0 for i in range(3)]
        gives = [
            words + 4 * (3 + i) if kind not in (codec.KEEP, codec.TAKE) else 0 for i in range(3)
        ]
        return [Row(*row(i, come), takes[i], gives[i]) for i in range(3)]

    words = np.array([1] * 3 + [0] * 3, np.uint32)
    arrays = (x[1] if kernel.adds else source), come, to, words
    left = launched(kernel, rows, *arrays)
    reference(kernel, rows(come.ctypes.data, words.ctypes.data), arrays[0], to)
    as_read = np.int8 if kind == codec.SEND else jnp.dtype(result)
    np.testing.assert_array_equal(bits(left[2].view(as_read)), bits(to.view(as_read)))
    np.testing.assert_array_equal(left[1].reshape(come.shape), come)
    np.testing.assert_array_equal(left[3].view(np.uint32), words)


def launched(
    kernel: Kernel, rows: Callable[[int, int], list[Row]], *arrays: np.ndarray
) -> list[np.ndarray]:
    """What two blocks of a kernel's leave in source, come, target and words."""
    driver, device = cuda.driver(), jax.local_devices()[0]

    def on_gpu(a: np.ndarray) -> jax.Array:
        return jax.device_put(a.reshape(-1).view(np.int8), device).block_until_ready()

    given = [on_gpu(a) for a in arrays]
    source, come, target, words = (a.unsafe_buffer_pointer() for a in given)
    table = rows(come, words)
    at = on_gpu(np.frombuffer(table_of(table), np.int8))
    numbers = source, target, at.unsafe_buffer_pointer(), len(table), GROUPS
    loaded, stream = codec.prepared(driver, 0, kernel), driver.new_stream(0)
    with driver.device(0):
        driver.launch(
            loaded,
            stream,
            *map(ctypes.c_uint64, numbers),
            blocks=1 if kernel.kind == codec.TAKE else 2,
            threads=codec.THREADS,
        )
        return [
            np.frombuffer(driver.copy_to_host(a.unsafe_buffer_pointer(), a.nbytes, stream), np.int8)
            for a in given
        ]
