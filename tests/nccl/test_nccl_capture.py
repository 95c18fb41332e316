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
from pallas_collectives.nccl import cuda, dtypes, ffi

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


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_group_may_end_and_events_pass_while_a_stream_is_captured(devices, mode, end):
    group = nccl.create(devices, name=f"ends {mode} {end}", timeout=60, watchdog=10)
    nccl_gpu.gather(group)
    driver = cuda.driver()
    stream = driver.new_stream(0)
    events = [driver.record(0, stream)]

    def beside():
        while not events[0].done():
            pass
        events.clear()
        getattr(group, end)()

    with capturing(mode), concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(beside).result()


def test_a_call_that_nccl_refuses_is_told_and_harms_nothing(devices, monkeypatch):
    """Outside of graphs."""
    n = len(devices)
    with nccl.create(devices, name="refused", timeout=60) as group:
        x = {r: np.ones(4, np.float32) for r in group.communicators}
        y = dict.fromkeys(group.communicators, ((4,), "float32"))
        with monkeypatch.context() as patch, pytest.raises(nccl.CallError) as error:
            patch.setattr(dtypes, "reduced", lambda dtype, op: (99, 1, 0))  # no ncclDataType_t
            nccl_gpu.UnderWay(
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


@pytest.mark.parametrize("under", ["scan", "remat and gradient"])
def test_wires_are_captured_in_a_program_and_have_the_bits_of_passes(under):
    """Every collective over a wire, in one layer; run as often as XLA takes to make its graphs."""
    n = jax.device_count()
    if jax.default_backend() != "gpu" or n < 2:
        pytest.skip("needs two GPUs")
    mesh, wires = harness.mesh(n), {"wire": "int8", "wire_backward": "int8"}

    def layer(x, _, **how):
        apart = jax.lax.optimization_barrier  # or XLA rounds a product and a sum at once

        def call(name, x, **given):
            return apart(getattr(pc, name)(apart(x), axis_name="x", **wires, **given, **how))

        y = call("all_to_all", x, split_axis=0, concat_axis=0, tiled=True)
        y += call("ppermute", y, perm=[(i, (i + 1) % n) for i in range(n)])
        part = call("psum_scatter", y, tiled=True)
        return call("all_gather", part, tiled=True) / n + call("psum", x) / n, None

    def program(x, **how):
        step = functools.partial(layer, **how)
        if under == "scan":
            return jax.lax.scan(step, x, None, length=3)[0]

        def loss(x):
            y = jax.lax.scan(jax.checkpoint(step), x, None, length=3)[0]
            return (y**2).sum()

        return jax.grad(loss)(x)

    x = np.random.default_rng(0).standard_normal((n, 8 * n, 512)).astype(np.float32)
    ours, by_xla = (
        harness.per_device(functools.partial(program, backend=b), mesh) for b in ("nccl", "xla")
    )
    want = np.asarray(by_xla(x))
    before = ffi.counters.python
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(ours(x)), want)
    assert ffi.counters.python == before
