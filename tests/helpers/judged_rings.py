"""Rings, shifts, and calls one after the other: kernels, sound and faulty (`judged`)."""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import replay_kernels as kernels
from judged import case, hop, launch
from replay_kernels import DMA, REGULAR, barrier, neighbours, signal, wait

# Rings --------------------------------------------------------------------------------------------

for _fault, _finds, _devices in (
    (None, (), (2, 3, 4)),
    ("shared", ("race",), (3, 4)),
    ("no_barrier", ("race", "entry"), (2, 3, 4)),
    ("no_wait", ("race", "left over"), (2, 3, 4)),
    ("stuck", ("deadlock", "barrier"), (2, 3, 4)),
    ("left_over", ("left over", "barrier", "race", "entry"), (3, 4)),
    ("scratch", ("entry",), (2, 3, 4)),
):
    case(
        f"ring {_fault or ''}",
        lambda x, n, fault=_fault, **how: kernels.ring(x, n, fault=fault, **how),
        *_finds,
        devices=_devices,
    )
case("ring unrolled", lambda x, n, **how: kernels.ring(x, n, unrolled=True, **how))
case("ring as a grid", lambda x, n: kernels.gridded(x, n))
case("relay", lambda x, n, **how: kernels.relay(x, n, rounds=4, **how))
case(
    "relay without credits",
    lambda x, n, **how: kernels.relay(x, n, rounds=4, credits=False, **how),
    "race",
    devices=(3, 4),
)


def relay(x: Any, n: int, *, fault: str = "", **how: Any) -> Any:
    """Passes a block around through two slots. Faults: early (the credit is given before the slot
    has been sent on), generous (a credit too many to begin with), one_slot.
    """
    rounds = 4

    def kernel(x_ref: Any, o_ref: Any, slots: Any, send: Any, recv: Any, credit: Any) -> None:
        _, right, left = neighbours(n)
        barrier(left, right)
        pltpu.sync_copy(x_ref, slots.at[0])
        if fault == "generous":
            signal(credit, 1, device_id={"x": left})
        for i in range(rounds):
            here, there = (0, 0) if fault == "one_slot" else (i % 2, (i + 1) % 2)
            if i > 0:
                wait(credit, 1)
            if fault == "early" and i < rounds - 1:
                signal(credit, 1, device_id={"x": left})
            copy = hop(slots.at[here], slots.at[there], send, recv.at[there], right)
            copy.start()
            copy.wait()
            if fault != "early" and i < rounds - 1:
                signal(credit, 1, device_id={"x": left})
        pltpu.sync_copy(slots.at[0], o_ref)

    slots = pltpu.VMEM((2, *x.shape), x.dtype)
    return launch(kernel, x, slots, DMA, DMA((2,)), REGULAR, **how)


case("relay by hand", relay)
case(
    "relay, credit early", lambda x, n, **h: relay(x, n, fault="early", **h), "race", devices=(3, 4)
)
case(
    "relay, a credit too many",
    lambda x, n, **h: relay(x, n, fault="generous", **h),
    "race",
    "left over",
    devices=(3, 4),
)
case("relay in one slot", lambda x, n, **h: relay(x, n, fault="one_slot", **h), "race")


def both_ways(x: Any, n: int, *, shared: bool, **how: Any) -> Any:
    """Half of x to either side; each half has a semaphore for what has come, or they share it."""

    def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
        _, right, left = neighbours(n)
        barrier(left, right)
        rows = x.shape[0] // 2
        copies = []
        for k, to in enumerate((right, left)):
            part = pl.ds(k * rows, rows)
            come = recv.at[0 if shared else k]
            copies.append(hop(x_ref.at[part], o_ref.at[part], send.at[k], come, to))
            copies[-1].start()
        copies[0].wait()
        pltpu.sync_copy(o_ref.at[pl.ds(0, rows)], o_ref.at[pl.ds(2 * rows, rows)])
        copies[1].wait()

    return launch(kernel, x, DMA((2,)), DMA((2,)), out=(3 * x.shape[0] // 2, 128), **how)


case("both ways", lambda x, n, **how: both_ways(x, n, shared=False, **how))
case("both ways on one semaphore", lambda x, n, **h: both_ways(x, n, shared=True, **h), "race")


# Shifts, and calls one after the other ------------------------------------------------------------

for _entry in ("double", "everyone"):
    for _times in (1, 2):
        case(
            f"shift {_entry} x{_times}",
            lambda x, n, e=_entry, t=_times: _again(lambda y: kernels.shift(y, n, entry=e), x, t),
        )
case("shift once", lambda x, n: kernels.shift(x, n, entry="once"))
case(
    "shift once x3, where all are neighbours of a neighbour",
    lambda x, n: _again(lambda y: kernels.shift(y, n, entry="once"), x, 3),
    devices=(3, 4),
)
case(
    "shift once x3",
    lambda x, n: _again(lambda y: kernels.shift(y, n, entry="once"), x, 3),
    "race",
    "entry",
    devices=(5, 8),
)
case(
    "shift by two, neighbours' barrier",
    lambda x, n: shifted(x, n, by=2, meets=1),
    "race",
    "entry",
    devices=(4, 5),
)
case("shift by two, its own barrier", lambda x, n: shifted(x, n, by=2, meets=2), devices=(3, 5))
case(
    "shift in a scan",
    lambda x, n: lax.scan(lambda c, _: (kernels.shift(c, n), None), x, None, length=2)[0],
)


def _again(body: Any, x: Any, times: int) -> Any:
    for _ in range(times):
        x = body(x)
    return x


def shifted(x: Any, n: int, *, by: int, meets: int, fault: str = "") -> Any:
    """Sends x so far to the right after a barrier with those that are `meets` away. Faults: reads
    (what has come before it is waited for), reuses (writes what is still being sent), backwards
    (the wait for what comes is before the send), unmet (one device leaves the barrier out).
    """

    def kernel(x_ref: Any, o_ref: Any, buffer: Any, send: Any, recv: Any) -> None:
        me = lax.axis_index("x")
        peers = lax.rem(me + meets, n), lax.rem(me + n - meets, n)
        if fault == "unmet":
            pl.when(me > 0)(lambda: barrier(*peers))
        else:
            barrier(*peers)
        pltpu.sync_copy(x_ref, buffer.at[0])
        copy = hop(buffer.at[0], buffer.at[1], send, recv, lax.rem(me + by, n))
        if fault == "backwards":
            copy.wait_recv()
        copy.start()
        if fault == "reuses":
            pltpu.sync_copy(x_ref, buffer.at[0])
        if fault == "reads":
            pltpu.sync_copy(buffer.at[1], o_ref)
        copy.wait_send()
        if fault != "backwards":
            copy.wait_recv()
        if fault != "reads":
            pltpu.sync_copy(buffer.at[1], o_ref)

    return launch(kernel, x, pltpu.VMEM((2, *x.shape), x.dtype), DMA, DMA)


for _fault, _finds in (
    ("reads", ("race",)),
    ("reuses", ("race",)),
    ("backwards", ("deadlock",)),
):
    case(f"shift {_fault}", lambda x, n, f=_fault: shifted(x, n, by=1, meets=1, fault=f), *_finds)
case(
    "shift, one leaves the barrier out",
    lambda x, n: shifted(x, n, by=1, meets=1, fault="unmet"),
    "deadlock",
    "barrier",
    "race",
    "entry",
    devices=(3, 4),
)


def two_kernels(x: Any, n: int, *, numbers: tuple[int, int], left_over: bool = False) -> Any:
    """Two kernels, one after the other, with barrier semaphores of these ids. The first may leave a
    signal behind, by which the second's barrier ends early.
    """

    def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any, *, last: bool) -> None:
        _, right, left = neighbours(n)
        barrier(left, right)
        if left_over and not last:
            signal(pltpu.get_barrier_semaphore(), 1, device_id={"x": right})
        copy = hop(x_ref, o_ref, send, recv, right)
        copy.start()
        copy.wait()

    def call(x: Any, last: bool) -> Any:
        def body(*refs: Any) -> None:
            kernel(*refs, last=last)

        return launch(body, x, DMA, DMA, number=numbers[last])

    return call(call(x, False), True)


case("two kernels, two ids", lambda x, n: two_kernels(x, n, numbers=(0, 1)))
case("two kernels, one id", lambda x, n: two_kernels(x, n, numbers=(0, 0)))
case(
    "two kernels, a signal left for the second",
    lambda x, n: two_kernels(x, n, numbers=(0, 0), left_over=True),
    "left over",
    "barrier",
    "race",
    "entry",
    devices=(3, 4),
)
