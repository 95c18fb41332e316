"""New communicators are connected for all that may be asked of them; over a wire of host memory."""

import collections
import ctypes
import itertools
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import nccl_host
import nccl_wire
import pallas_collectives as pc
from benchmarks.cases import CASES
from pallas_collectives import catalogue, nccl
from pallas_collectives.nccl import connection, cuda, group
from pallas_collectives.nccl.communicator import Messages, exchange

N = 4


@pytest.fixture
def wire(monkeypatch):
    nccl_host.serve(monkeypatch)
    return group._options["runtime"].library.bindings


def one_process(n=N, **options):
    (runtime,) = nccl_host.runtimes()
    devices = [nccl_host.Device(i, 0, i) for i in range(n)]
    return group.create(devices, runtime=runtime, **options)


def test_a_group_comes_connected_for_every_function():
    made = one_process(watchdog=20)
    wire = made.runtime.library.bindings
    everything = {"all_gather", "all_reduce", "reduce_scatter", "broadcast", "allto_all"}
    for communicator in made.communicators.values():
        assert wire.connected[communicator.handle] == everything
        assert communicator.board.read().begun == 0, "the watchdog counts the user's calls alone"
    assert set(wire.calls) == {"all_to_all"}, "the others are planned, not made"
    made.close()


@pytest.mark.parametrize(
    "uses, runs",
    [(["collectives"], {"all_gather"}), (["messages"], {"all_to_all"}), ((), set())],
)
def test_a_group_comes_connected_for_what_it_is_used_for(uses, runs):
    made = one_process(uses=uses)
    wire = made.runtime.library.bindings
    summed = {"all_gather", "all_reduce", "reduce_scatter", "broadcast"}
    wanted = set().union(*({"messages": {"allto_all"}, "collectives": summed}[use] for use in uses))
    for communicator in made.communicators.values():
        assert wire.connected.get(communicator.handle, set()) == wanted
    assert set(wire.calls) == runs
    made.close()


def test_a_group_of_an_unknown_use_is_refused():
    with pytest.raises(ValueError, match=r"unknown uses \['sums'\]: they are collectives, mes"):
        one_process(uses=["sums"])


def test_a_rank_alone_has_nobody_to_connect_to():
    made = one_process(1)
    assert not made.runtime.library.bindings.connected
    made.close()


def test_every_size_is_asked_for_in_small_steps():
    class Noted:
        rank, size = 0, N

        def __getattr__(self, name):
            def call(send, recv, count, dtype, *rest):
                width = np.dtype(dtype).itemsize * (1 if name in ("all_reduce", "broadcast") else N)
                asked.append((name, dtype, count * width))

            return call

    asked = []
    for call in connection._collectives(Noted(), 0, 0):
        for size in connection._SIZES:
            call(size)
    sizes = collections.defaultdict(list)
    for name, dtype, size in asked:
        sizes[name, dtype].append(size)
    assert set(sizes) == {
        ("broadcast", "int8"), ("all_gather", "int8"), ("all_reduce", "int8"),
        ("all_reduce", "bfloat16"), ("reduce_scatter", "int8"), ("reduce_scatter", "bfloat16"),
    }  # fmt: skip
    for of_a_kind in sizes.values():
        assert of_a_kind[0] <= 2 * N and of_a_kind[-1] > 2**37
        for a, b in itertools.pairwise(s for s in of_a_kind if s >= 8 * N):
            assert a <= b <= 1.5 * a


def call(case):
    """A program of one collective by NCCL, and its operand."""
    x = harness.random((N, *case.operand(N, 8)), "float32")
    run = harness.per_device(lambda a: case.call(pc, a, "x", backend="nccl"), harness.mesh(N))
    return run, x


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_first_call_may_be_captured(wire, case):
    program, x = call(case)
    compiled = program.lower(x).compile()
    wire.capturing = True
    np.testing.assert_array_equal(compiled(x), case.reference(x))


def test_exchanges_between_any_two_ranks_may_be_captured():
    made = one_process()
    made.runtime.library.bindings.capturing = True
    x, y = np.arange(N * N, dtype=np.int32).reshape(N, N), np.zeros((N, N), np.int32)
    exchange(
        [
            Messages(
                c,
                [(x[r, p:].ctypes.data, 1, p) for p in range(N) if p != r],
                [(y[r, p:].ctypes.data, 1, p) for p in range(N) if p != r],
                0,
            )
            for r, c in made.communicators.items()
        ],
        "int32",
        "everyone to everyone",
    )
    np.testing.assert_array_equal(y, np.where(np.eye(N, dtype=bool), 0, x.T))
    made.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_unconnected_it_fails_says_why_and_a_group_made_anew_does_it(wire, case, monkeypatch):
    program, x = call(case)
    with monkeypatch.context() as without:
        without.setattr(connection, "connect", lambda *_: None)
        compiled = program.lower(x).compile()
    wire.capturing = True
    use = "collectives" if catalogue.COLLECTIVES[case.op].phases else "messages"
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(compiled(x))
    for part in (
        "CallError: nccl", "returned 3: internal error; NCCL's latest warning: failed to peer",
        f"of {N} of group '{use}' of devices [0, 1, 2, 3]", "NCCL_RUNTIME_CONNECT=0",
        "xla_gpu_enable_command_buffer", "jax.clear_caches()",
    ):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(jax.errors.JaxRuntimeError, match="an earlier call failed: nccl"):
        jax.block_until_ready(compiled(x))
    (broken,) = group._groups.values()
    with pytest.raises(nccl.CommunicatorError, match="an earlier call failed: nccl"), broken:
        pass
    assert len(wire.aborted) == N, "what cannot go on is not waited for"
    wire.capturing = False
    jax.clear_caches()
    jax.block_until_ready(program(jnp.asarray(x)))
    assert list(group._groups.values()) != [broken]


def test_a_rank_that_fails_to_connect_ends_creation_for_all_at_once(monkeypatch):
    def fail(communicator, uses):
        if communicator.rank == 2:
            raise nccl.CallError("ncclGroupSimulateEnd", 2, "a cable was pulled")
        while not communicator.unusable:  # as NCCL, which waits for the peer until it is aborted
            time.sleep(0.01)

    monkeypatch.setattr(connection, "connect", fail)
    (runtime,) = nccl_host.runtimes()
    devices = [nccl_host.Device(i, 0, i) for i in range(N)]
    begin = time.monotonic()
    with pytest.raises(nccl.CallError, match="a cable was pulled"):
        group.create(devices, runtime=runtime, timeout=60)
    assert time.monotonic() - begin < 5
    assert len(runtime.library.bindings.aborted) >= 1


def test_one_that_takes_too_long_to_connect_is_given_up_and_aborted(monkeypatch):
    monkeypatch.setattr(connection, "connect", lambda *_: time.sleep(2))
    (runtime,) = nccl_host.runtimes()
    devices = [nccl_host.Device(i, 0, i) for i in range(N)]
    with pytest.raises(nccl.RendezvousError, match=r"NCCL did not connect them within 0\.5 s"):
        group.create(devices, runtime=runtime, timeout=0.5)
    assert len(runtime.library.bindings.aborted) == N


def test_what_creating_does_on_gpus_it_does_in_new_threads_that_captures_leave_alone(monkeypatch):
    where = []

    def noted(function):
        def note(*args, **kwargs):
            free = threading.get_ident() in made_on.driver.outside
            where.append((function.__name__, free, threading.get_ident() != here))
            return function(*args, **kwargs)

        return note

    (made_on,), here = nccl_host.runtimes(), threading.get_ident()
    for name in ("init_rank", "board"):
        monkeypatch.setattr(nccl_host.Runtime, name, noted(getattr(nccl_host.Runtime, name)))
    monkeypatch.setattr(connection, "connect", noted(connection.connect))
    devices = [nccl_host.Device(i, 0, i) for i in range(N)]
    with group.create(devices, runtime=made_on, watchdog=20):
        assert collections.Counter(where) == {
            (name, True, True): N for name in ("init_rank", "connect", "board")
        }


def test_a_thread_is_outside_captures_for_as_long_as_it_asks():
    modes, driver = [], cuda.Driver.__new__(cuda.Driver)  # there is none here

    def call(name, mode):
        assert name == "cuThreadExchangeStreamCaptureMode"
        modes.append(mode._obj.value)
        mode._obj.value = 0  # the mode before: CUDA's global one

    driver._call = call
    with pytest.raises(ZeroDivisionError), driver.outside_captures():
        assert modes == [2]
        1 / 0  # noqa: B018
    assert modes == [2, 0]


def test_an_event_is_looked_at_and_destroyed_outside_captures():
    """Also by a thread beside one that captures, and on whatever thread garbage is collected."""
    modes, driver = [0], cuda.Driver.__new__(cuda.Driver)

    def exchange(name, mode):
        modes[0], mode._obj.value = mode._obj.value, modes[0]

    def noted(handle):
        modes.append(modes[0])
        return 0

    driver._call = exchange
    driver._lib = types.SimpleNamespace(cuEventQuery=noted, cuEventDestroy_v2=noted)
    event = cuda.Event(driver, ctypes.c_void_p(1))
    assert event.done()
    del event
    assert modes == [0, 2, 2]


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_group_ends_outside_captures(end, monkeypatch):
    """A watchdog aborts whatever this process captures meanwhile."""
    made, outside = one_process(), []
    driver = made.runtime.driver
    for name in ("comm_destroy", "comm_abort"):
        monkeypatch.setattr(
            made.runtime.library.bindings,
            name,
            lambda comm: outside.append(threading.get_ident() in driver.outside),
        )
    getattr(made, end)()
    assert outside == [True] * N


def test_what_the_environment_leaves_no_algorithm_for_is_left_to_its_caller(monkeypatch, wire):
    """NCCL_ALGO=tree, say, serves all_reduce alone."""
    end = wire.group_simulate_end

    def end_of_trees():
        me = threading.get_ident()
        if {name for _, name in wire._planned[me]} != {"all_reduce"}:
            wire._planned[me].clear()
            end()
            raise nccl_wire.WireError(5)
        end()

    monkeypatch.setattr(wire, "group_simulate_end", end_of_trees)
    devices = [nccl_host.Device(i, 0, i) for i in range(N)]
    with group.create(devices, runtime=group._options["runtime"]) as made:
        for communicator in made.communicators.values():
            assert wire.connected[communicator.handle] == {"all_reduce", "allto_all"}


def test_a_plan_that_fails_leaves_no_group_open():
    made = one_process()
    communicator = made.communicators[0]

    def refuse():
        raise nccl_wire.WireError(5)

    with pytest.raises(nccl_wire.WireError):
        communicator.plan(refuse)
    assert not made.runtime.library.bindings._grouped
    made.close()
