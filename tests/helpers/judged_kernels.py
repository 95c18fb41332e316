"""Exchanges, hubs and sums, and what the machine forbids: kernels, sound and faulty (`judged`)."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import replay_kernels as kernels
from judged import case, everyone, hop, launch
from replay_kernels import DMA, barrier, neighbours, signal, wait

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


def hub(x: Any, n: int, *, fault: str = "") -> Any:
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


case("hub", hub)
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
