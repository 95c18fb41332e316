"""Kernels that quantise on a GPU: the bits of `wires`, and nothing behind the last group."""

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nccl_kernels
from pallas_collectives import wires
from pallas_collectives.nccl import codec, cuda
from pallas_collectives.nccl.codec import Kernel
from pallas_collectives.wires import Wire

FLOATS = ("float32", "bfloat16", "float16")
WIRES = ("int8", "float8_e4m3fn", "float8_e5m2")
GROUPS = (
    24  # of a block; of 128 numbers they leave a part of the last block of threads without work
)


def numbers(dtype: str, group: int, seed: int) -> np.ndarray:
    """Of all sizes: groups of zeros, of subnormal and of the largest numbers, with NaN and inf."""
    rng, kind = np.random.default_rng(seed), jnp.dtype(dtype)
    x = rng.normal(size=(GROUPS, group)) * np.exp(4 * rng.normal(size=(GROUPS, 1)))
    x[0], x[1] = 0, -0.0
    x[2] *= 1e-42
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
    to = np.zeros(x.size + 4 * GROUPS, np.int8)
    run("send", dtype, dtype, of, x.ctypes.data, to.ctypes.data)
    np.testing.assert_array_equal(bits(to[: x.size].view(values.dtype)), bits(values.reshape(-1)))
    np.testing.assert_array_equal(to[x.size :].view(np.float32), scales.reshape(-1))
    come = np.zeros_like(x)
    run("read", dtype, dtype, of, to.ctypes.data, come.ctypes.data)
    want = wires.dequantize(jnp.asarray(values), jnp.asarray(scales), x.dtype)
    np.testing.assert_array_equal(bits(come), bits(want))


def run(kind: str, dtype: str, result: str, wire: Wire, *addresses: int) -> None:
    """The reference, on all groups."""
    handle = nccl_kernels.load(Kernel(kind, dtype, result, wire.dtype, int(wire.group)).name)
    nccl_kernels.run(handle, *addresses, GROUPS)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [128, 256])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", [codec.SEND, codec.READ, codec.KEEP, codec.ADD])
def test_kernels_have_the_bits_of_the_reference(
    kind: str, dtype: str, wire: str, group: int
) -> None:
    """ADD: of three ranks, of which this is the second."""
    result = {"bfloat16": "float32", "float32": "bfloat16"}.get(dtype, dtype)
    x, kernel = numbers(dtype, group, 1), Kernel(kind, dtype, result, wire, group)
    nbytes = x.size + 4 * GROUPS
    come = np.zeros((3, nbytes), np.int8)
    for rank in range(3):
        run(
            "send",
            dtype,
            result,
            Wire(wire, group=group),
            *at(numbers(dtype, group, rank), come[rank]),
        )
    to = np.full(
        nbytes if kind == codec.SEND else (x.size + 8) * jnp.dtype(result).itemsize, 7, np.int8
    )
    given = {codec.READ: (come[1], to), codec.ADD: (x, come, nbytes, 1, 3, to)}.get(kind, (x, to))
    want = to.copy()
    nccl_kernels.run(
        nccl_kernels.load(kernel.name), *at(*(want if a is to else a for a in given)), GROUPS
    )
    got = on_gpu(kernel, to, *given)
    if kind != codec.SEND:
        got, want = got.view(jnp.dtype(result)), want.view(jnp.dtype(result))
    np.testing.assert_array_equal(bits(got), bits(want))


def at(*given: Any) -> list[int]:
    """Arrays' addresses."""
    return [a.ctypes.data if isinstance(a, np.ndarray) else a for a in given]


def on_gpu(kernel: Kernel, to: np.ndarray, *given: Any) -> np.ndarray:
    """What a kernel leaves in `to`, by two blocks of threads."""
    driver, device = cuda.driver(), jax.local_devices()[0]
    arrays = [
        jax.device_put(a.reshape(-1).view(np.int8), device) if isinstance(a, np.ndarray) else a
        for a in given
    ]
    jax.block_until_ready(arrays)
    addresses = [a.unsafe_buffer_pointer() if isinstance(a, jax.Array) else a for a in arrays]
    (place,) = (i for i, a in enumerate(given) if a is to)
    loaded, stream = codec.prepared(driver, 0, kernel), driver.new_stream(0)
    with driver.device(0):
        words = map(ctypes.c_uint64, (*addresses, GROUPS))
        driver.launch(loaded, stream, *words, blocks=2, threads=codec.THREADS)
        return np.frombuffer(driver.copy_to_host(addresses[place], to.nbytes, stream), np.int8)
