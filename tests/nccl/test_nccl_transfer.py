"""send_or_recv over a wire of host memory, against jax.device_put."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import nccl_host
from pallas_collectives import nccl
from pallas_collectives.nccl import group, transfer
from pallas_collectives.nccl.errors import CommunicatorError


@pytest.fixture
def runtime():
    (runtime,) = nccl_host.runtimes()
    yield runtime
    group._groups.clear()
    transfer._streams.clear()
    transfer._pending.clear()


def sharding(devices, shape, spec):
    if spec is None:
        return SingleDeviceSharding(jax.devices()[devices[0]])
    mesh = Mesh(np.array(jax.devices())[list(devices)].reshape(shape), ("x", "y")[: len(shape)])
    return NamedSharding(mesh, spec)


FOUR, OTHER_FOUR, TWO = range(4), range(4, 8), range(6, 8)
# The array's shape; of source and target the devices, the mesh's shape and the spec.
CASES = {
    "equal shardings, other devices": (
        (8, 6), (FOUR, (4,), P("x")), (OTHER_FOUR, (4,), P("x"))),
    "4 to 2": ((8, 6), (FOUR, (4,), P("x")), (TWO, (2,), P("x"))),
    "2 to 4": ((8, 6), (TWO, (2,), P("x")), (FOUR, (4,), P("x"))),
    "rows to columns": (
        (8, 12), (FOUR, (4,), P("x")), (OTHER_FOUR, (4,), P(None, "x"))),
    "rows to columns on the same devices": (
        (8, 12), (FOUR, (4,), P("x")), (FOUR, (4,), P(None, "x"))),
    "other order of the same devices": (
        (8, 3), (FOUR, (4,), P("x")), ([2, 0, 3, 1], (4,), P("x"))),
    "2×2 to 3 of 6 rows": (
        (6, 4), (FOUR, (2, 2), P("x", "y")), ([1, 5, 7], (3,), P("x"))),
    "replicated to sharded": (
        (8, 6), (FOUR, (4,), P()), (OTHER_FOUR, (4,), P("x"))),
    "sharded to replicated": (
        (8, 6), (FOUR, (2, 2), P("y")), (OTHER_FOUR, (4,), P())),
    "one device to all": (
        (8,), ([3], (), None), (range(8), (8,), P("x"))),
    "a scalar": ((), (FOUR, (4,), P()), (OTHER_FOUR, (4,), P())),
    "nothing": ((0, 4), (FOUR, (4,), P(None, "x")), (TWO, (2,), P())),
}  # fmt: skip


def case(name):
    shape, source, target = CASES[name]
    return shape, sharding(*source), sharding(*target)


@pytest.mark.parametrize("name", CASES)
def test_moves_between_shardings(name, runtime):
    shape, source, target = case(name)
    host = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    handle = nccl.send_or_recv(jax.device_put(host, source), target, runtime=runtime)
    handle.wait(timeout=10)
    y = handle.array()
    assert y.sharding == target and y.dtype == np.float32
    np.testing.assert_array_equal(y, host)
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(shard.data, host[shard.index])


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "int16", "uint32", "float16", "bfloat16", "float32", "float8_e4m3fn",
     "float8_e5m2", "complex64"],
)  # fmt: skip
def test_every_dtype_arrives_bit_for_bit(dtype, runtime):
    _, source, target = case("rows to columns")
    host = np.random.default_rng(0).integers(0, 2, (8, 12)).astype(jnp.dtype(dtype))
    y = nccl.send_or_recv(jax.device_put(host, source), target, runtime=runtime).array()
    assert y.dtype == jnp.dtype(dtype)
    assert np.asarray(y).tobytes() == host.tobytes()


def test_only_overlapping_boxes_travel_and_own_data_does_not(runtime):
    shape, source, target = case("rows to columns on the same devices")
    nccl.send_or_recv(jax.device_put(np.zeros(shape), source), target, runtime=runtime)
    calls = runtime.library.bindings.calls
    assert (calls["send"], calls["recv"]) == (12, 12)  # 16 boxes, of which 4 stay where they are


def test_a_second_transfer_uses_the_first_ones_group_and_streams(runtime):
    shape, source, target = case("4 to 2")
    x = jax.device_put(np.ones(shape), source)
    for _ in range(3):
        nccl.send_or_recv(x, target, runtime=runtime)
    (over,) = group._groups.values()
    assert len(transfer._streams[over]) == 6
    assert len(transfer._pending) == 1, "transfers that are over are forgotten"


class Pending:
    """A transfer that two threads look at together, if they can."""

    def __init__(self, over, looking):
        self.over, self.looking = over, looking

    def _over(self):
        with contextlib.suppress(threading.BrokenBarrierError):
            self.looking.wait(0.5)
        return self.over


def test_two_threads_forget_no_transfer_that_is_under_way(runtime):
    shape, source, target = case("4 to 2")
    x = jax.device_put(np.ones(shape), source)

    def move(name):
        nccl.send_or_recv(x, target, name=name, runtime=runtime)

    move("one")
    move("two")
    transfer._pending.clear()
    under_way = Pending(False, threading.Barrier(1))
    transfer._pending.extend([Pending(True, threading.Barrier(2)), under_way])
    assert nccl_host.in_threads(lambda: move("one"), lambda: move("two")) == [None, None]
    assert transfer._pending[0] is under_way


def test_the_source_survives_and_a_result_can_be_used_again(runtime):
    shape, source, target = case("equal shardings, other devices")
    host = np.arange(48, dtype=np.float32).reshape(shape)
    x = jax.device_put(host, source)
    y = nccl.send_or_recv(x, target, runtime=runtime).array()
    back = nccl.send_or_recv(jax.jit(lambda a: a + 1)(y), source, runtime=runtime).array()
    np.testing.assert_array_equal(back, host + 1)
    np.testing.assert_array_equal(x, host)


def test_send_and_recv_are_for_processes_that_do_one_of_both(runtime):
    shape, source, target = case("4 to 2")
    x = jax.device_put(np.ones(shape), source)
    with pytest.raises(ValueError, match=r"receives as well \(its devices \[6, 7\]\)"):
        nccl.send(x, target, runtime=runtime)
    with pytest.raises(ValueError, match=r"sends as well \(its devices \[0, 1, 2, 3\]\)"):
        nccl.recv(jax.ShapeDtypeStruct(shape, "float32"), target, source, runtime=runtime)


SHAPE = jax.ShapeDtypeStruct((8, 6), "float32")
SIX_BITS = jax.ShapeDtypeStruct((8, 6), jnp.float6_e3m2fn)  # there is no array of them on CPUs
SEVEN = jax.ShapeDtypeStruct((7, 6), "float32")
MISFITS = {
    "a shape alone": (lambda x, s, t: (SHAPE, t), ValueError, "give src_sharding"),
    "another source": (lambda x, s, t: (x, t, t), ValueError, "leave it out"),
    "no array here": (
        lambda x, s, t: (SHAPE, t, s),
        TypeError,
        "x must be the array",
    ),
    "an odd shape": (lambda x, s, t: (SEVEN, t, s), ValueError, "source sharding does not fit"),
    "memory of the host": (
        lambda x, s, t: (x, t.with_memory_kind("pinned_host")),
        ValueError,
        "NCCL moves",
    ),
    "four bits": (lambda x, s, t: (x.astype("int4"), t), TypeError, "not whole bytes"),
    "six bits": (lambda x, s, t: (SIX_BITS, t, s), TypeError, "cannot move float6_e3m2fn"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent(misfit, runtime):
    change, error, message = MISFITS[misfit]
    shape, source, target = case("4 to 2")
    x = jax.device_put(np.ones(shape, np.float32), source)
    with pytest.raises(error, match=message):
        nccl.send_or_recv(*change(x, source, target), runtime=runtime)
    assert not {"send", "recv"} & set(runtime.library.bindings.calls)


def test_after_an_abort_the_handle_raises_and_the_next_transfer_works(runtime):
    shape, source, target = case("4 to 2")
    x = jax.device_put(np.ones(shape), source)
    handle = nccl.send_or_recv(x, target, runtime=runtime)
    next(iter(group._groups.values())).abort()
    for use in (handle.wait, handle.array, handle.done):
        with pytest.raises(CommunicatorError, match=r"group 'transfer' .* was aborted"):
            use()
    y = nccl.send_or_recv(x, target, runtime=runtime).array()
    np.testing.assert_array_equal(y, np.ones(shape))
