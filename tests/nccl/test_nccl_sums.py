"""Kernels of sums on a GPU: each element rounded once, and none behind the last."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_collectives.nccl import cuda, sums


@pytest.mark.gpu
@pytest.mark.parametrize("words", [1, 255, 256, 1000])
@pytest.mark.parametrize("name", sums.ADDED)
def test_sums_are_rounded_once(name: str, words: int) -> None:
    dtype, driver = jnp.dtype(name), cuda.driver()
    count = sums.WORD // dtype.itemsize * words
    draw = np.random.default_rng(words).standard_normal
    x, y = (draw(2 * count).astype(np.float32).astype(dtype) for _ in range(2))
    x[:4] = np.inf, -np.inf, np.nan, -0.0
    y[4:8] = jnp.finfo(dtype).smallest_subnormal
    want = np.where(np.arange(2 * count) < count, x.astype(np.float64) + y.astype(np.float64), y)
    given = [jax.device_put(a, jax.local_devices()[0]) for a in (x, y)]
    jax.block_until_ready(given)
    addresses = [a.unsafe_buffer_pointer() for a in given]
    kernel, stream = sums.prepared(driver, 0, name), driver.new_stream(0)
    blocks = -(-words // sums.THREADS)
    arguments = map(ctypes.c_uint64, (*addresses, words))
    with driver.device(0):
        driver.launch(kernel, stream, *arguments, blocks=blocks, threads=sums.THREADS)
        got = driver.copy_to_host(addresses[1], y.nbytes, stream)
    got, want = (a.astype(np.float32) for a in (np.frombuffer(got, dtype), want.astype(dtype)))
    np.testing.assert_array_equal(got, want)
