"""What the links cost: signals to and fro, and blocks to partners on one axis and on several.

Devices are paired; the two of a pair send to each other at once, so each link carries what one
device (or the devices of one chip) sends, each way, and lines are as good as rings.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.probes.rig import DIE, LANES, TILE, Probe, Rig, probe
from pallas_collectives.annotations import Copy, Ref, Semaphore

IN_FLIGHT = 2  # blocks of a stream towards each partner
_PING_ID = 8  # barrier semaphores: streams have 1 to 7, one for each set of axes, 0 for the die


def _meet(partners: Sequence[Any], me: jax.Array) -> None:
    """Returns when all partners have entered this kernel."""
    semaphore = pltpu.get_barrier_semaphore()
    for partner in partners:

        @pl.when(partner != me)
        def _(partner: jax.Array = partner) -> None:
            pl.semaphore_signal(semaphore, 1, device_id={"x": partner})
            pl.semaphore_wait(semaphore, 1)


def ping(rig: Rig, axis: int, distance: int) -> Probe:
    """One of a pair signals, the other answers: a repetition is once to and fro."""

    def kernel(count_ref: Ref, peers_ref: Ref, x_ref: Ref, o_ref: Ref, sem: Semaphore) -> None:
        me = lax.axis_index("x")
        partner = peers_ref[me]
        _meet([partner], me)

        def say() -> None:
            pl.semaphore_signal(sem, 1, device_id={"x": partner})

        def hear() -> None:
            pl.semaphore_wait(sem, 1)

        def repeat(*acts: Callable[[], None]) -> None:
            def once(_: object, __: object) -> None:
                for act in acts:
                    act()

            lax.fori_loop(0, count_ref[0], once, None)

        pl.when(me < partner)(lambda: repeat(say, hear))
        pl.when(me > partner)(lambda: repeat(hear, say))
        pltpu.sync_copy(x_ref, o_ref)

    g = rig.machine.generation
    return probe(
        rig,
        f"ping_{distance}_along_{'xyz'[axis]}",
        kernel,
        rows=TILE,
        expected=lambda count, x: x,
        guess=2 * (g.issue_cost + distance * g.hop_latency),
        scratch=[pltpu.SemaphoreType.REGULAR],
        peers=rig.partners(axis, distance),
        barrier=_PING_ID + axis,
    )


def stream(
    rig: Rig,
    axes: Sequence[int],
    *,
    in_flight: int = IN_FLIGHT,
    rows: int = 0,
    slots: int | None = None,
    barrier: int | None = None,
) -> Probe:
    """Sends blocks to the partners along all `axes` at once, `in_flight` towards each.

    A block goes into the slot of its number, of twice as many slots as are in flight. A device
    sends block i when it has received block i - in_flight of that partner, who had by then received
    this one's block i - 2 in_flight: a slot is written to again only when it had arrived.
    """
    slots = slots or 2 * in_flight
    rows = rows or rig.block_bytes // (LANES * 4)
    size, n_axes = rig.size, len(axes)

    def kernel(
        count_ref: Ref,
        peers_ref: Ref,
        x_ref: Ref,
        o_ref: Ref,
        send_sem: Semaphore,
        recv_sem: Semaphore,
    ) -> None:
        me = lax.axis_index("x")
        partners = [peers_ref[a * size + me] for a in range(n_axes)]
        _meet(partners, me)

        def copy(a: int, i: Any) -> Copy:
            slot = lax.rem(i, slots)
            at = pl.ds(pl.multiple_of((a * slots + slot) * rows, TILE), rows)
            return pltpu.make_async_remote_copy(
                x_ref,
                o_ref.at[at],
                send_sem.at[a * slots + slot],
                recv_sem.at[a * slots + slot],
                device_id={"x": partners[a]},
            )

        def each(act: Callable[[int], None]) -> None:
            for a in range(n_axes):

                @pl.when(partners[a] != me)
                def _(a: int = a) -> None:
                    act(a)

        def start(i: Any) -> None:
            each(lambda a: copy(a, i).start())

        def finish(i: Any) -> None:
            each(lambda a: copy(a, i).wait())

        for i in range(in_flight):
            start(i)

        def once(i: Any, _: object) -> None:
            finish(i)
            start(i + in_flight)

        lax.fori_loop(0, count_ref[0], once, None)
        for i in range(in_flight):
            finish(count_ref[0] + i)

    peers = np.stack([rig.partners(axis) for axis in axes])

    def expected(count: int, x: np.ndarray) -> np.ndarray:
        """NaN where nothing was written: those slots are not looked at."""
        o = np.full((size, n_axes, slots, *x.shape[1:]), np.nan, np.float32)
        for a in range(n_axes):
            paired = np.nonzero(peers[a] != np.arange(size))[0]
            used = min(count + in_flight, slots)
            o[paired, a, :used] = x[peers[a][paired]][:, None]
        return o.reshape(size, -1, LANES)

    g = rig.machine.generation
    which = "die" if DIE in axes else "".join("xyz"[axis] for axis in axes)
    return probe(
        rig,
        f"stream_{which}_{in_flight}_of_{rows}",
        kernel,
        rows=rows,
        out_rows=n_axes * slots * rows,
        expected=expected,
        guess=rows * LANES * 4 / g.link_bandwidth + (g.dma_latency + g.hop_latency) / in_flight,
        scratch=[pltpu.SemaphoreType.DMA((n_axes * slots,))] * 2,
        peers=peers,
        barrier=sum(1 << axis for axis in axes if axis != DIE) if barrier is None else barrier,
    )
