"""Kernels that exchange, sound and faulty, and what is to be found in each on any schedule.

Each takes one block of rows and the number of devices on the axis x. `finds` are the kinds of
findings: none for a sound kernel. On up to four devices all schedules are searched, too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import replay_kernels as kernels
from replay_kernels import DMA, REGULAR, barrier, neighbours, signal, wait


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and its verdict.

    Attributes:
      name: of the kernel, and of its fault.
      body: (x, n) -> what one device returns.
      finds: kinds of findings; empty for a sound kernel.
      devices: on how many it is judged.
      machine: the generation.
    """

    name: str
    body: Callable[..., Any]
    finds: frozenset[str]
    devices: tuple[int, ...] = (2, 3, 4)
    machine: str = "v5p"


CASES: list[Case] = []


def case(name: str, body: Any, *finds: str, devices: Any = (2, 3, 4), **fields: Any) -> None:
    CASES.append(Case(name, body, frozenset(finds), devices, **fields))


def hop(src: Any, dst: Any, send: Any, recv: Any, to: Any) -> Any:
    return pltpu.make_async_remote_copy(src, dst, send, recv, device_id={"x": to})


def launch(kernel: Any, x: Any, *scratch: Any, out: Any = None, number: int = 0, **how: Any) -> Any:
    """A kernel of one operand and one result in HBM."""
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(out or x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=list(scratch),
        compiler_params=pltpu.CompilerParams(collective_id=number, has_side_effects=True),
        **how,
    )(x)


def everyone(n: int) -> list[Any]:
    me = lax.axis_index("x")
    return [lax.rem(me + i, n) for i in range(1, n)]


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


# All to all ---------------------------------------------------------------------------------------


def exchange(x: Any, n: int, *, meets: str = "everyone", due: int = -1, fault: str = "") -> Any:
    """Sends every other device a row block of x, all on one receive semaphore. Faults: early (what
    has come is read after the first of it), shared (one place for all).
    """
    rows = x.shape[0] // n

    def kernel(x_ref: Any, o_ref: Any, landing: Any, send: Any, recv: Any) -> None:
        me = lax.axis_index("x")
        _, right, left = neighbours(n)
        barrier(*(everyone(n) if meets == "everyone" else (left, right)))
        place = 0 if fault == "shared" else me
        for to in everyone(n):
            hop(x_ref.at[pl.ds(to * rows, rows)], landing.at[place], send, recv, to).start()
        for k in range(n - 1 if due < 0 else due):
            pltpu.make_async_copy(landing.at[0], landing.at[0], recv).wait()
            if fault == "early" and k == 0:
                pltpu.sync_copy(landing, o_ref)
        for _ in range(n - 1):
            pltpu.make_async_copy(landing.at[0], landing.at[0], send).wait()
        if fault != "early":
            pltpu.sync_copy(landing, o_ref)

    out = (n, rows, 128)
    return launch(kernel, x, pltpu.HBM(out, x.dtype), DMA, DMA, out=out)


case("all to all", exchange)
case(
    "all to all after a barrier of neighbours",
    lambda x, n: exchange(x, n, meets="neighbours"),
    "race",
    "entry",
    devices=(4, 5),
)
case("all to all, read early", lambda x, n: exchange(x, n, fault="early"), "race", devices=(3, 4))
case("all to all into one place", lambda x, n: exchange(x, n, fault="shared"), "race", devices=(3,))
case(
    "all to all, one not awaited",
    lambda x, n: exchange(x, n, due=n - 2),
    "race",
    "left over",
    devices=(2, 3),
)
case("all to all, one too many awaited", lambda x, n: exchange(x, n, due=n), "deadlock")


# Parts, hubs, counts ------------------------------------------------------------------------------

_PARTS = {
    "parts": ((1, 1), (2,), 1, 2, ()),
    "parts, the first awaited": ((1, 1), (1, 1), 1, 1, ("race",)),
    "parts, the larger awaited": ((1, 2), (2, 1), 1, 1, ("race",)),
    "parts, all awaited by bytes": ((2, 1), (1, 2), 2, 3, ()),
    "parts, one awaited": ((2,), (1, 1), 1, 1, ("race",)),
}
for _name, (_sizes, _waits, _after, _reads, _finds) in _PARTS.items():
    case(
        _name,
        lambda x, n, s=_sizes, w=_waits, a=_after, r=_reads: kernels.parts(
            x, n, sizes=s, waits=w, reads_after=a, reads=r
        ),
        *_finds,
        devices=(2,),
    )
case("hub", lambda x, n: kernels.hub(x, n))
case("counts", lambda x, n: kernels.counting(x, 2, 2))
case(
    "counts, one left", lambda x, n: kernels.counting(x, 3, 2), "left over", "barrier", devices=(2,)
)
case(
    "counts, one missing",
    lambda x, n: kernels.counting(x, 1, 2),
    "deadlock",
    "barrier",
    devices=(2,),
)


def hub(x: Any, n: int, *, fault: str) -> Any:
    """Everyone tells device 0 that it is there, and sends it a block when it answers. Faults: eager
    (it is not asked), crossed (it waits for the blocks before it answers).
    """

    def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
        me = lax.axis_index("x")
        sem = pltpu.get_barrier_semaphore()

        @pl.when(me > 0)
        def _() -> None:
            signal(sem, 1, device_id={"x": 0})
            if fault != "eager":
                wait(sem, 1)
            copy = hop(x_ref, o_ref.at[me], send, recv, 0)
            copy.start()
            copy.wait_send()

        @pl.when(me == 0)
        def _() -> None:
            wait(sem, n - 1)
            come = o_ref.at[pl.ds(1, n - 1)]
            if fault == "crossed":
                pltpu.make_async_copy(come, come, recv).wait()
            for d in range(1, n) if fault != "eager" else ():
                signal(sem, 1, device_id={"x": d})
            if fault != "crossed":
                pltpu.make_async_copy(come, come, recv).wait()

    return launch(kernel, x, DMA, DMA, out=(n, *x.shape))


case("hub, not asked", lambda x, n: hub(x, n, fault="eager"), "race", "entry")
case("hub, waits for what it must allow", lambda x, n: hub(x, n, fault="crossed"), "deadlock")


# Sums, and what the core does ---------------------------------------------------------------------


def summed(x: Any, n: int, *, fault: str = "", **how: Any) -> Any:
    """Adds what comes from the left, in VMEM. Faults: early (added before it has come), in_place
    (what is being sent is overwritten), unsent (the send is not awaited).
    """

    def kernel(x_ref: Any, o_ref: Any, own: Any, come: Any, send: Any, recv: Any) -> None:
        _, right, left = neighbours(n)
        barrier(left, right)
        pltpu.sync_copy(x_ref, own)
        copy = hop(own, come, send, recv, right)
        copy.start()
        if fault == "early":
            own_sum = come[...] + come[...]
            copy.wait()
            come[...] = own_sum
        elif fault == "in_place":
            copy.wait_recv()
            own[...] = own[...] + come[...]
            copy.wait_send()
        elif fault == "unsent":
            copy.wait_recv()
            come[...] = own[...] + come[...]
        else:
            copy.wait()
            come[...] = own[...] + come[...]
        pltpu.sync_copy(come, o_ref)

    vmem = pltpu.VMEM(x.shape, x.dtype)
    return launch(kernel, x, vmem, vmem, DMA, DMA, **how)


case("sum", summed)
case("sum before it has come", lambda x, n, **how: summed(x, n, fault="early", **how), "race")
case("sum over what is sent", lambda x, n, **how: summed(x, n, fault="in_place", **how), "race")
case(
    "sum, send not awaited",
    lambda x, n, **how: summed(x, n, fault="unsent", **how),
    "race",
    "left over",
)
case("sum by tiles", lambda x, n: kernels.summed(x, n))
case("uneven", lambda x, n, **how: kernels.uneven(x, n, **how))
case("doubled", lambda x, n, **how: kernels.doubled(x, **how), devices=(2,))


# What the machine forbids -------------------------------------------------------------------------


def _outside(x: Any, n: int) -> Any:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        row = lax.axis_index("x") * x.shape[0]
        pltpu.sync_copy(x_ref.at[pl.ds(row, 8)], o_ref.at[pl.ds(0, 8)])

    return launch(kernel, x)


def _nobody(x: Any, n: int) -> Any:
    def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
        me = lax.axis_index("x")
        copy = hop(x_ref, o_ref, send, recv, me + 1)
        copy.start()
        copy.wait()

    return launch(kernel, x, DMA, DMA)


case("a slice outside", _outside, "bounds")
case("a device that is not there", _nobody, "bounds")
case(
    "VMEM that no core has",
    lambda x, n: kernels.holding(x, pltpu.VMEM((1 << 20, 128), jnp.float32)),
    "memory",
    devices=(2,),
)
case("ends of a line", lambda x, n: kernels.shift(x, n), "reach", devices=(4,), machine="v5e")
