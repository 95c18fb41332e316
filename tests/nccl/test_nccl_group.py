"""Groups and communicators over a wire of host memory: ops, dtypes, life and death."""

import functools
import time

import ml_dtypes
import numpy as np
import pytest

import nccl_host
from nccl_host import Device, in_threads
from pallas_collectives.nccl import group
from pallas_collectives.nccl.communicator import Messages, exchange
from pallas_collectives.nccl.errors import CallError, CommunicatorError, RendezvousError

N = 4
DTYPES = [
    "bool", "int8", "uint8", "int16", "int32", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
]  # fmt: skip
REDUCIBLE = [d for d in DTYPES if d not in ("bool", "int16")]


def one_process(**options):
    """A group of N devices of one process."""
    (runtime,) = nccl_host.runtimes()
    devices = [Device(i, 0, i) for i in range(N)]
    return group.create(devices, runtime=runtime, **options)


def on_all(group_, function):
    """`function(communicator)` of every rank at once; its results, or the first exception."""
    results = in_threads(*(functools.partial(function, c) for c in group_.communicators.values()))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def values(dtype, *shape, seed=0):
    numbers = np.random.default_rng(seed).integers(0, 2, shape)  # sums that fp8 can hold
    return numbers.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def address(array):
    return array.ctypes.data


@pytest.mark.parametrize("dtype", DTYPES)
def test_moving_ops_move_every_dtype(dtype):
    x = values(dtype, N, N, 3)
    gathered, swapped = np.zeros((N, N, N, 3), x.dtype), np.zeros_like(x)
    sent = np.zeros((N, N, 3), x.dtype)

    def run(c):
        r = c.rank
        c.all_gather(address(x[r]), address(gathered[r]), N * 3, dtype, 0)
        c.all_to_all(address(x[r]), address(swapped[r]), 3, dtype, 0)
        c.broadcast(address(x[r]), address(sent[r]), N * 3, dtype, 2, 0)

    with one_process() as g:
        on_all(g, run)
    for r in range(N):
        np.testing.assert_array_equal(gathered[r], x)
        np.testing.assert_array_equal(swapped[r], x[:, r])
        np.testing.assert_array_equal(sent[r], x[2])


@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_reducing_ops_reduce_every_dtype(dtype):
    x = values(dtype, N, N * 3)
    total = x.astype(np.complex64 if "complex" in dtype else np.float32).sum(0).astype(x.dtype)
    everywhere, scattered, at_root = np.zeros_like(x), np.zeros((N, 3), x.dtype), np.zeros_like(x)

    def run(c):
        r = c.rank
        c.all_reduce(address(x[r]), address(everywhere[r]), N * 3, dtype, "sum", 0)
        c.reduce_scatter(address(x[r]), address(scattered[r]), 3, dtype, "sum", 0)
        c.reduce(address(x[r]), address(at_root[r]), N * 3, dtype, "sum", 1, 0)

    with one_process() as g:
        on_all(g, run)
    for r in range(N):
        np.testing.assert_array_equal(everywhere[r], total)
    np.testing.assert_array_equal(scattered.reshape(-1), total)
    np.testing.assert_array_equal(at_root[1], total)


def test_exchange_matches_messages_in_order_between_all_ranks_of_a_thread():
    x, y = values("int32", N, 2, 3), np.zeros((N, 2, 3), np.int32)
    with one_process() as g:
        exchange(
            [
                Messages(
                    c,
                    [(address(x[r, k]), 3, (r + 1) % N) for k in range(2)],
                    [(address(y[r, k]), 3, (r - 1) % N) for k in range(2)],
                    0,
                )
                for r, c in g.communicators.items()
            ],
            "int32",
            "a ring step",
        )
    np.testing.assert_array_equal(y, np.roll(x, 1, axis=0))


def test_a_rank_that_is_not_there_is_refused_before_anything_is_sent():
    with one_process() as g:
        g.runtime.library.bindings.calls.clear()
        c = g.communicators[0]
        with pytest.raises(ValueError, match=r"rank 4 is not in group 'default'.*0 to 3"):
            exchange([Messages(c, [(0, 1, N)], [], 0)], "int32", "x")
        with pytest.raises(ValueError, match="rank -1"):
            c.broadcast(0, 0, 1, "int32", -1, 0)
        assert not g.runtime.library.bindings.calls


def test_several_processes_with_several_devices_each_and_two_groups_over_the_same():
    runtimes = nccl_host.runtimes(2)
    devices = [Device(i, i // 2, i % 2) for i in range(4)]
    x, y = values("float32", 4, 3), np.zeros((4, 4, 3), np.float32)

    def process(p):
        def gather(c):
            c.all_gather(address(x[c.rank]), address(y[c.rank]), 3, "float32", 0)

        with (
            group.create(devices, name="one", runtime=runtimes[p], timeout=10) as one,
            group.create(devices, name="two", runtime=runtimes[p], timeout=10) as two,
        ):
            assert sorted(one.communicators) == [2 * p, 2 * p + 1]
            for g in (one, two):
                on_all(g, gather)
            return {c.handle for g in (one, two) for c in g.communicators.values()}

    handles = in_threads(lambda: process(0), lambda: process(1))
    assert all(isinstance(h, set) for h in handles), handles
    assert len(handles[0] | handles[1]) == 8
    for r in range(4):
        np.testing.assert_array_equal(y[r], x)


def test_the_order_of_devices_is_the_order_of_ranks():
    (runtime,) = nccl_host.runtimes()
    devices = [Device(i, 0, i) for i in (2, 0, 3, 1)]
    with group.create(devices, runtime=runtime) as g:
        assert [g.communicators[r].ordinal for r in range(4)] == [2, 0, 3, 1]
        assert g.rank(devices[0]) == 0


def test_devices_that_cannot_form_a_group():
    (runtime,) = nccl_host.runtimes()
    here, there = Device(0, 0, 0), Device(1, 1, 0)
    for devices in ([], [here, here], [there]):
        with pytest.raises(ValueError, match="distinct devices, and one of this process's"):
            group.create(devices, runtime=runtime)
    with pytest.raises(ValueError, match="watchdog=0 must be"):
        group.create([here], watchdog=0, runtime=runtime)


def test_a_process_that_does_not_come_is_named_in_time():
    runtimes = nccl_host.runtimes(2)
    devices = [Device(i, i, 0) for i in range(2)]
    begin = time.monotonic()
    with pytest.raises(RendezvousError, match=r"processes \[1\] did not come"):
        group.create(devices, runtime=runtimes[0], timeout=0.5)
    assert time.monotonic() - begin < 3


def test_closed_is_closed_and_get_makes_a_new_one():
    (runtime,) = nccl_host.runtimes()
    devices = [Device(i, 0, i) for i in range(2)]
    first = group.get(devices, name="again", runtime=runtime)
    assert group.get(devices, name="again", runtime=runtime) is first
    first.close()
    first.close()
    assert len(runtime.library.bindings.destroyed) == 2
    with pytest.raises(CommunicatorError, match=r"group 'again' of devices.*is closed"):
        first.communicators[0].all_gather(0, 0, 1, "int8", 0)
    second = group.get(devices, name="again", runtime=runtime)
    assert second is not first and second.usable
    second.close()


@pytest.mark.parametrize("new", [False, True])
def test_check_forgets_the_group_that_it_aborted_and_no_other(new, monkeypatch):
    """Another thread has forgotten it meanwhile, and perhaps made a new one."""
    (runtime,) = nccl_host.runtimes()
    get = functools.partial(group.get, [Device(0, 0, 0)], name="meanwhile", runtime=runtime)
    monkeypatch.setattr(group, "_groups", {})
    first, made = get(), []
    first.abort()

    def meanwhile():
        monkeypatch.delattr(first, "abort")  # from here on it is the class's
        group.check()
        made.extend([get()] if new else [])

    monkeypatch.setattr(first, "abort", meanwhile, raising=False)
    group.check()
    assert list(group._groups.values()) == made
    for g in made:
        g.close()


def test_a_group_is_made_while_another_waits_for_a_process():
    (runtime, _) = nccl_host.runtimes(2)
    with_other = functools.partial(
        group.get, [Device(0, 0, 0), Device(1, 1, 0)], name="waits", runtime=runtime, timeout=2
    )

    def alone():
        time.sleep(0.2)
        begin = time.monotonic()
        group.get([Device(2, 0, 2)], name="alone", runtime=runtime).close()
        return time.monotonic() - begin

    waited, seconds = in_threads(with_other, alone)
    assert isinstance(waited, RendezvousError) and seconds < 1


def test_use_after_abort_raises_and_wakes_who_waits():
    g = one_process()
    x = np.zeros((N, N), np.int32)

    def lonely():
        g.communicators[0].all_gather(address(x[0]), address(x), 1, "int32", 0)

    def abort():
        time.sleep(0.2)
        g.abort()

    waiting, _ = in_threads(lonely, abort)
    assert isinstance(waiting, CommunicatorError) and "was aborted" in str(waiting)
    assert sorted(g.runtime.library.bindings.aborted) == sorted(
        c.handle for c in g.communicators.values()
    )
    with pytest.raises(CommunicatorError, match="was aborted"):
        lonely()
    with pytest.raises(CommunicatorError, match="was aborted"):
        g.check()


def test_an_error_inside_with_aborts_instead_of_waiting():
    with pytest.raises(ZeroDivisionError), one_process() as g:
        1 / 0  # noqa: B018
    assert len(g.runtime.library.bindings.aborted) == N
    assert not g.runtime.library.bindings.destroyed


def test_ncclls_own_failure_is_an_exception_with_its_text():
    g = one_process()
    g.runtime.library.bindings.aborted.append(g.communicators[0].handle)
    with pytest.raises(CallError, match="ncclAllGather returned 5: invalid usage"):
        g.communicators[0].all_gather(0, 0, 0, "int8", 0)


def test_a_close_that_cannot_end_says_what_holds_it(monkeypatch):
    g = one_process()
    monkeypatch.setattr(g.runtime.library.bindings, "comm_destroy", lambda comm: time.sleep(2))
    with pytest.raises(CommunicatorError, match=r"could not be closed in 0\.1 s.*CUDA graph"):
        g.close(timeout=0.1)
