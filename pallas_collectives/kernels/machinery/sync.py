"""Waiting for other devices: entry barriers and remote copies.

Two rules make every kernel here safe, whatever the devices' speeds:

* Nobody writes to a device that has not entered the same kernel: before each kernel the launcher
  runs a barrier among all pairs that write to each other.
* A wait on a semaphore can be satisfied only by the signal it is meant for: two transfers that may
  be in flight at once towards the same device have a semaphore each (see `channel`), or all that
  come are waited for together.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import DeviceId, Number, Ref, Semaphore, dma_semaphores
from pallas_collectives.topology.groups import LEFT, RIGHT, Ring, wrap

Meanwhile = Callable[[], None]


def nothing() -> None:
    """What is done between a barrier's signals and its wait, by default."""


def enter(
    barrier: str,
    rings: Sequence[Ring],
    scalar_refs: Sequence[Ref],
    meanwhile: Meanwhile = nothing,
) -> None:
    """Runs the entry barrier of this name; for `entry.WIDE` see there.

    `meanwhile` runs when all signals are on their way: it must not touch what others write to.
    """
    match barrier:
        case "neighbours":
            barrier_with_neighbours(*rings[0].all_of_core(), meanwhile=meanwhile)
        case "neighbours on a torus":
            barrier_on_torus(*rings, meanwhile=meanwhile)
        case "line":
            barrier_along_line(rings[0], meanwhile=meanwhile)
        case "everyone":
            barrier_with_everyone(rings[0], meanwhile=meanwhile)
        case "jumps on a torus" | "shift right" | "shift left" if not scalar_refs:
            raise AssertionError(
                f"barrier {barrier!r} without scalars: the first one must say who writes to whom; "
                "give launch.call scalars=, as kernels/ppermute.py or kernels/torus/all_to_all.py"
            )
        case "jumps on a torus":
            barrier_with_jumps(rings, scalar_refs[0], meanwhile=meanwhile)
        case "shift right" | "shift left":
            barrier_with_partners(rings[0], scalar_refs[0], meanwhile=meanwhile)
        case name:
            raise AssertionError(
                f"no barrier {name!r}: there are neighbours, line, everyone, shift right, shift "
                "left, and neighbours or jumps on a torus; name the one of the record's reach"
            )


def barrier_with_neighbours(*rings: Ring, meanwhile: Meanwhile = nothing) -> None:
    """Returns when both neighbours on each ring have entered this kernel.

    The barrier semaphore outlives the kernel: both neighbours on each of r rings add 1, the wait
    takes 2r. A neighbour may already be in its next call of this id. It got there only by finishing
    this one, for which it needed a block of every device, also of those that we still wait for,
    which they send after their own wait; so its second signal cannot stand in for another's first.
    A kernel that can finish without hearing from everyone must be launched with `entry.WIDE`.
    """
    _barrier([(ring, False) for ring in rings], meanwhile)


def barrier_along_line(ring: Ring, *, meanwhile: Meanwhile) -> None:
    """Returns when the neighbours on a line have entered this kernel; those at its ends have one.

    As `barrier_with_neighbours`: each neighbour adds 1, the wait takes as many as there are, and
    none can finish this call, and signal for its next, before it has had a block of ours.
    """
    _barrier([(ring, True)], meanwhile)


def barrier_on_torus(*rings: Ring, meanwhile: Meanwhile = nothing) -> None:
    """Returns when the neighbours along each axis of a torus have entered: rings, and lines."""
    _barrier([(ring, ring.line) for ring in rings], meanwhile)


def _barrier(rings: Sequence[tuple[Ring, bool]], meanwhile: Meanwhile) -> None:
    """Signals both neighbours on each ring, those that there are on a line, and waits for them."""
    semaphore = pltpu.get_barrier_semaphore()
    expected: Any = 0
    with jax.named_scope("barrier"):
        for ring, is_line in rings:
            ends = {RIGHT: ring.place < ring.size - 1, LEFT: ring.place > 0}
            for direction, there in ends.items():
                to = functools.partial(signal, ring, semaphore, ring.peer(direction))
                if is_line:
                    pl.when(there)(to)
                    expected += there.astype(np.int32)
                else:
                    to()
                    expected += 1
        meanwhile()
        pl.semaphore_wait(semaphore, expected)


def barrier_with_everyone(ring: Ring, *, meanwhile: Meanwhile = nothing) -> None:
    """Returns when every device of the ring has entered this kernel.

    Each of the other n-1 devices adds 1, the wait takes n-1, it ends at 0. Safe between calls
    whatever the kernel does: while one device has not entered call k, nobody passes its barrier,
    so nobody has signalled more than k times, and k(n-1) signals cannot have come from n-2 devices.
    """
    semaphore = pltpu.get_barrier_semaphore()
    with jax.named_scope("barrier"):
        for_each(1, ring.size, lambda d: pl.semaphore_signal(semaphore, 1, device_id=ring.peer(d)))
        meanwhile()
        pl.semaphore_wait(semaphore, ring.size - 1)


def barrier_with_jumps(rings: Sequence[Ring], jumps_ref: Ref, *, meanwhile: Meanwhile) -> None:
    """Returns when the devices at some distances along each ring have entered this kernel.

    As `barrier_with_neighbours`: each adds 1, the wait takes as many as there are, and none can
    finish this call before it has had a block of ours.

    `jumps_ref`: in SMEM, for each ring their number, then the distances, either way; on a line
    those that lead beyond its ends join nobody.
    """
    semaphore = pltpu.get_barrier_semaphore()
    with jax.named_scope("barrier"):
        start: Any = 0
        peers: Any = 0
        for ring in rings:

            def signal(i: Any, peers: Any, ring: Ring = ring, start: Any = start) -> Any:
                jump = jumps_ref[start + 1 + i]
                there = ring.place + jump
                joins: Any = np.int32(1)
                if ring.line:
                    joins = ((there >= 0) & (there < ring.size)).astype(np.int32)

                def one(_: Any) -> None:
                    pl.semaphore_signal(semaphore, 1, device_id=ring.peer(jump))

                for_each(0, joins, one)
                return peers + joins

            peers += lax.fori_loop(0, jumps_ref[start], signal, np.int32(0))
            start += 1 + jumps_ref[start]
        meanwhile()
        pl.semaphore_wait(semaphore, peers)


def barrier_with_partners(ring: Ring, partners_ref: Ref, *, meanwhile: Meanwhile = nothing) -> None:
    """Returns when our target, if we have one, has entered this kernel.

    Each target adds 1 at its source, which takes 1: it ends at 0. This barrier's id belongs to the
    shifts of one axis in one direction, so a device is signalled by the same device, the next one
    along, in every call that uses the id and in which it sends: once in each. Its k-th wait
    therefore ends only after that device's k-th signal, from the same call, however many calls
    either is ahead: no signal of another device or of another call can stand in for it. (Shared
    between other permutations, the id could bring us a signal of the next call's target before that
    of this one's.)
    """
    semaphore = pltpu.get_barrier_semaphore()
    target, source = partners(ring, partners_ref)
    with jax.named_scope("ready"):
        pl.when(source >= 0)(
            lambda: pl.semaphore_signal(semaphore, 1, device_id=ring.device_id(source))
        )
        meanwhile()
        pl.when(target >= 0)(lambda: pl.semaphore_wait(semaphore, 1))


def barrier_with(ring: Ring, peers_ref: Ref, semaphore: Semaphore, *, meanwhile: Meanwhile) -> None:
    """Returns when all peers, so many and then their positions in SMEM, have entered this kernel.

    Each adds 1. It is safe where none leaves the kernel before all of its own peers have passed
    this barrier: else a second signal of one could stand in for another's first.
    """
    with jax.named_scope("barrier"):
        signal_all(ring, peers_ref, semaphore)
        meanwhile()
        pl.semaphore_wait(semaphore, peers_ref[0])


def signal_all(ring: Ring, peers_ref: Ref, semaphore: Semaphore) -> None:
    """Adds 1 to a semaphore of each of the peers, as `barrier_with` has them."""

    def signal(i: Number) -> None:
        pl.semaphore_signal(semaphore, 1, device_id=ring.device_id(peers_ref[1 + i]))

    for_each(0, peers_ref[0], signal)


class Partners(NamedTuple):
    """The positions of the device that we send to and of the one that sends to us.

    Negative where no such device exists.
    """

    target: Any
    source: Any


def partners(ring: Ring, partners_ref: Ref) -> Partners:
    """Our target and our source; we ourselves are neither.

    `partners_ref`: (2n,) in SMEM, everyone's target, then everyone's source; negative for none.
    """
    found = partners_ref[ring.me], partners_ref[ring.size + ring.me]
    return Partners(*(lax.select(p == ring.me, np.int32(-1), p) for p in found))


def signal(ring: Ring, semaphore: Semaphore, device_id: DeviceId) -> None:
    """Adds 1 to a semaphore of another device: of the core that has our number."""
    pl.semaphore_signal(semaphore, 1, device_id=device_id, core_index=ring.core)


def remote_copy(
    source: Ref, target: Ref, send_sem: Semaphore, recv_sem: Semaphore, device_id: DeviceId
) -> None:
    """Starts a copy into `target` on another device.

    Semaphores there, and memory that cores do not share, are those of the core of our number.
    `send_sem` here counts the bytes that have left `source`, which may then be overwritten;
    `recv_sem` there counts the bytes that have arrived in `target`.
    """
    pltpu.make_async_remote_copy(source, target, send_sem, recv_sem, device_id=device_id).start()


class PushSemaphores(NamedTuple):
    """What `push_to_everyone` takes: `PushSemaphores()` to allocate, refs inside a kernel."""

    copy: Semaphore = dma_semaphores()  # own; the copy from ourselves, waited for once
    sent: Semaphore = dma_semaphores()  # own; the bytes of n-1 targets
    arrived: Semaphore = dma_semaphores()  # the bytes of n-1 targets, one from each other device


def push_to_everyone(
    ring: Ring,
    source: Callable[[Number, Number | None], Ref],
    target: Callable[[Number | None], Ref],
    semaphores: PushSemaphores,
    chunks: int = 1,
    in_positions: bool = False,
) -> None:
    """Copies something to every device of the ring, and waits for what comes.

    `source(owner, chunk)` is what the device at a position is to have, all of one shape;
    `target(chunk)`, a place that differs by sender, is where it is to have it. For the chunk None
    they are all chunks. One semaphore serves all n-1 arrivals, as nothing is read before the last.
    Each device begins with its right neighbour, or with the next position if `in_positions`: no two
    begin with the same.
    """

    def push(chunk: Number, distance: Number) -> None:
        owner = wrap(ring.me + distance, ring.size) if in_positions else ring.block(distance)
        here, there = source(owner, chunk), target(chunk)
        remote_copy(here, there, semaphores.sent, semaphores.arrived, ring.device_id(owner))

    with jax.named_scope("push"):
        for_each(0, chunks, lambda chunk: for_each(1, ring.size, lambda d: push(chunk, d)))
        own_copy = pltpu.make_async_copy(source(ring.me, None), target(None), semaphores.copy)
        own_copy.start()
    with jax.named_scope("drain"):
        wait(semaphores.arrived, target(None), times=ring.size - 1)
        wait(semaphores.sent, target(None), times=ring.size - 1)
        own_copy.wait()


def started(
    sources: Sequence[Ref], targets: Sequence[Ref], semaphores: Sequence[Semaphore]
) -> Callable[[], None]:
    """Starts copies on this device; what is returned waits for all of them."""
    copies = list(map(pltpu.make_async_copy, sources, targets, semaphores))
    for copy in copies:
        copy.start()

    def wait_for_all() -> None:
        for copy in copies:
            copy.wait()

    return wait_for_all


def wait(semaphore: Semaphore, ref: Ref, times: Number = 1) -> None:
    """Waits on a DMA semaphore for as many bytes as `ref` holds, `times` times over."""
    for_each(0, times, lambda _: pltpu.make_async_copy(ref, ref, semaphore).wait())


def for_each(start: Any, stop: Any, body: Callable[[Any], None]) -> None:
    """body(start) ... body(stop - 1), as a loop: the code does not grow with the ring."""
    lax.fori_loop(start, stop, lambda i, _: body(i), None)
