"""Waiting for other devices: entry barriers and remote copies.

Two rules make every kernel here safe, whatever the devices' speeds:

* Nobody writes to a device that has not entered the same kernel: each kernel begins with a barrier
  among all pairs that write to each other.
* A wait on a semaphore can be satisfied only by the signal it is meant for: two transfers that may
  be in flight at once towards the same device have a semaphore each.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels.topology import LEFT, RIGHT, Ring


def barrier_with_neighbours(*rings: Ring) -> None:
    """Returns when both neighbours on each ring have entered this kernel.

    The barrier semaphore outlives the kernel: both neighbours on each of r rings add 1, the wait
    takes 2r. A neighbour may already be in its next call of this id. It got there only by finishing
    this one, for which it needed a block of every device, also of those that we still wait for,
    which they send after their own wait; so its second signal cannot stand in for another's first.
    A kernel that can finish without hearing from everyone must be launched with `entry.WIDE`.
    """
    if all(ring.entered for ring in rings):
        return
    semaphore = pltpu.get_barrier_semaphore()
    with jax.named_scope("barrier"):
        for ring in rings:
            for direction in (RIGHT, LEFT):
                pl.semaphore_signal(semaphore, 1, device_id=ring.peer(direction))
        pl.semaphore_wait(semaphore, 2 * len(rings))


def barrier_along_line(ring: Ring) -> None:
    """Returns when the neighbours on a line have entered this kernel; those at its ends have one.

    As `barrier_with_neighbours`: each neighbour adds 1, the wait takes as many as there are, and
    none can finish this call, and signal for its next, before it has had a block of ours.
    """
    if ring.entered:
        return
    semaphore = pltpu.get_barrier_semaphore()
    has_right, has_left = ring.place < ring.size - 1, ring.place > 0
    with jax.named_scope("barrier"):
        for direction, there in ((RIGHT, has_right), (LEFT, has_left)):

            @pl.when(there)
            def _(direction: int = direction) -> None:
                pl.semaphore_signal(semaphore, 1, device_id=ring.peer(direction))

        pl.semaphore_wait(semaphore, has_right.astype(np.int32) + has_left.astype(np.int32))


def barrier_with_everyone(ring: Ring) -> None:
    """Returns when every device of the ring has entered this kernel.

    Each of the other n-1 devices adds 1, the wait takes n-1, it ends at 0. Safe between calls
    whatever the kernel does: while one device has not entered call k, nobody passes its barrier,
    so nobody has signalled more than k times, and k(n-1) signals cannot have come from n-2 devices.
    """
    if ring.entered:
        return
    semaphore = pltpu.get_barrier_semaphore()
    with jax.named_scope("barrier"):
        for_each(1, ring.size, lambda d: pl.semaphore_signal(semaphore, 1, device_id=ring.peer(d)))
        pl.semaphore_wait(semaphore, ring.size - 1)


def barrier_with(ring: Ring, peers_ref: Any, semaphore: Any) -> None:
    """Returns when all peers, so many and then their positions in SMEM, have entered this kernel.

    Each adds 1. It is safe where none leaves the kernel before all of its own peers have passed
    this barrier: else a second signal of one could stand in for another's first.
    """
    with jax.named_scope("barrier"):
        signal_all(ring, peers_ref, semaphore)
        pl.semaphore_wait(semaphore, peers_ref[0])


def signal_all(ring: Ring, peers_ref: Any, semaphore: Any) -> None:
    """Adds 1 to a semaphore of each of the peers, as `barrier_with` has them."""

    def signal(i: Any) -> None:
        pl.semaphore_signal(semaphore, 1, device_id=ring.device_id(peers_ref[1 + i]))

    for_each(0, peers_ref[0], signal)


def remote_copy(source: Any, target: Any, send_sem: Any, recv_sem: Any, device_id: Any) -> None:
    """Starts a copy into `target` on another device.

    `send_sem` here counts the bytes that have left `source`, which may then be overwritten;
    `recv_sem` there counts the bytes that have arrived in `target`.
    """
    pltpu.make_async_remote_copy(source, target, send_sem, recv_sem, device_id=device_id).start()


def push_to_everyone(
    ring: Ring, source: Any, target: Any, copy_sem: Any, send_sem: Any, recv_sem: Any
) -> None:
    """Copies `source` into `target` on every device of the ring, and waits for what comes.

    `source` is one ref, or a function from a device's position to the ref that it is to have, all
    of one shape. `target` differs by sender. One receive semaphore serves all n-1 arrivals, as
    nothing is read before the last. Each device begins with its right neighbour: no two begin with
    the same.
    """
    source_for = source if callable(source) else lambda _: source

    def push(distance: Any) -> None:
        owner = ring.block(distance)
        remote_copy(source_for(owner), target, send_sem, recv_sem, ring.device_id(owner))

    with jax.named_scope("push"):
        for_each(1, ring.size, push)
        own_copy = pltpu.make_async_copy(source_for(ring.me), target, copy_sem)
        own_copy.start()
    with jax.named_scope("drain"):
        wait(recv_sem, target, times=ring.size - 1)
        wait(send_sem, target, times=ring.size - 1)
        own_copy.wait()


def wait(semaphore: Any, ref: Any, times: Any = 1) -> None:
    """Waits on a DMA semaphore for as many bytes as `ref` holds, `times` times over."""
    for_each(0, times, lambda _: pltpu.make_async_copy(ref, ref, semaphore).wait())


def for_each(start: int, stop: Any, body: Callable[[Any], None]) -> None:
    """body(start) ... body(stop - 1), as a loop: the code does not grow with the ring."""
    lax.fori_loop(start, stop, lambda i, _: body(i), None)
