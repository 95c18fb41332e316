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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels.topology import LEFT, RIGHT, Ring


def barrier_with_neighbours(ring: Ring) -> None:
    """Returns when both neighbours have entered this kernel.

    The barrier semaphore outlives the kernel: both neighbours add 1, the wait takes 2.
    A neighbour may already be in its next call of this id. It got there only by finishing this
    one, for which it needed a block of ours, which we send after this wait; so its second
    signal cannot stand in for the other neighbour's first. A kernel that can finish without
    hearing from everyone must use `barrier_with_everyone`.
    """
    semaphore = pltpu.get_barrier_semaphore()
    with jax.named_scope("barrier"):
        for direction in (RIGHT, LEFT):
            pl.semaphore_signal(semaphore, 1, device_id=ring.peer(direction))
        pl.semaphore_wait(semaphore, 2)


def barrier_with_everyone(ring: Ring) -> None:
    """Returns when every device of the ring has entered this kernel.

    Each of the other n-1 devices adds 1, the wait takes n-1, it ends at 0. Safe between calls
    whatever the kernel does: while one device has not entered call k, nobody passes its barrier,
    so nobody has signalled more than k times, and k(n-1) signals cannot have come from n-2 devices.
    """
    semaphore = pltpu.get_barrier_semaphore()
    with jax.named_scope("barrier"):
        for_each(1, ring.size, lambda d: pl.semaphore_signal(semaphore, 1, device_id=ring.peer(d)))
        pl.semaphore_wait(semaphore, ring.size - 1)


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

    `target` differs by sender. One receive semaphore serves all n-1 arrivals, as nothing is read
    before the last. Each device begins with its right neighbour: no two begin with the same.
    """
    with jax.named_scope("push"):
        for_each(
            1,
            ring.size,
            lambda d: remote_copy(source, target, send_sem, recv_sem, ring.peer(d)),
        )
        own_copy = pltpu.make_async_copy(source, target, copy_sem)
        own_copy.start()
    with jax.named_scope("drain"):
        wait(recv_sem, source, times=ring.size - 1)
        wait(send_sem, source, times=ring.size - 1)
        own_copy.wait()


def wait(semaphore: Any, ref: Any, times: int = 1) -> None:
    """Waits on a DMA semaphore for as many bytes as `ref` holds, `times` times over."""
    for_each(0, times, lambda _: pltpu.make_async_copy(ref, ref, semaphore).wait())


def for_each(start: int, stop: int, body: Callable[[Any], None]) -> None:
    """body(start) ... body(stop - 1), as a loop: the code does not grow with the ring."""
    lax.fori_loop(start, stop, lambda i, _: body(i), None)
