"""Groups made while a CUDA graph is captured, and what a call that fails says.

python -m pytest -m gpu tests/nccl/test_nccl_capture.py
"""

import concurrent.futures
import contextlib
import ctypes
import functools

import jax
import numpy as np
import pytest

import harness
import nccl_gpu
import pallas_collectives as pc
from pallas_collectives import nccl
from pallas_collectives.nccl import cuda, dtypes

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def capturing(mode):
    """A stream that this thread captures meanwhile; the capture must come to a good end.

    mode: 0 is CUDA's global one, in which no thread may do what is unsafe; 1 that of XLA's.
    """
    driver = cuda.driver()
    stream, graph = ctypes.c_void_p(driver.new_stream(0)), ctypes.c_void_p()
    with driver.device(0):
        driver._call("cuStreamBeginCapture_v2", stream, mode)
        try:
            yield stream.value
        finally:
            driver._call("cuStreamEndCapture", stream, ctypes.byref(graph))
            driver._call("cuGraphDestroy", graph)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("where", ["another thread", "the thread that captures"])
@pytest.mark.parametrize("watchdog", [None, 10])
def test_a_group_may_be_made_while_a_stream_is_captured(devices, mode, where, watchdog):
    name = f"made while {mode} {where} {watchdog}"
    make = functools.partial(nccl.create, devices, name=name, timeout=60, watchdog=watchdog)
    with capturing(mode):
        if where == "another thread":
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                group = pool.submit(make).result()
        else:
            group = make()
    with group:
        nccl_gpu.gather(group)


def test_a_call_that_nccl_refuses_is_told_and_harms_nothing(devices, monkeypatch):
    """Outside of graphs."""
    n = len(devices)
    with nccl.create(devices, name="refused", timeout=60) as group:
        x = {r: np.ones(4, np.float32) for r in group.communicators}
        y = dict.fromkeys(group.communicators, ((4,), "float32"))
        with monkeypatch.context() as patch, pytest.raises(nccl.CallError) as error:
            patch.setattr(dtypes, "reduced", lambda dtype, op: (99, 1, 0))  # no ncclDataType_t
            nccl_gpu.Work(
                group, x, y, lambda c, a, b, s: c.all_reduce(a, b, 4, "float32", "sum", s)
            )
        told = str(error.value)
        print(told)
        assert told.startswith("ncclAllReduce returned 4: invalid argument")
        assert f"of {n} of group 'refused' of devices" in told
        assert "NCCL's latest warning: " in told
        assert "NCCL has done nothing of this call" in told
        nccl_gpu.gather(group)


def test_an_exchange_and_a_gather_are_captured_together():
    """For each of the two NCCL would register the same memory."""
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    n, size = jax.device_count(), 1 << 21
    mesh = harness.mesh(n)
    total = functools.partial(pc.psum, axis_name="x", wire="int8", backend="nccl")
    run = harness.per_device(total, mesh)
    x = np.random.default_rng(0).standard_normal((n, size)).astype(np.float32)
    want = x.sum(0)
    for _ in range(10):  # the first runs are not captured
        got = np.asarray(run(x))
        assert np.abs(got - want).max() < 0.1
