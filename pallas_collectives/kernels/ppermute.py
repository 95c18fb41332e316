"""Permute: each source sends its array to one target. The smallest kernel: read it first.

One DMA from each source straight to its target, over however many links lie between. A device that
is nobody's target returns zeros. With the pairs 0>2, 2>1 and 3>3 of four devices:

    phase   dev0    dev1    dev2    dev3
    ready   .       1>2     2>0     .         a target tells its source that it may write
    copy    0>2     .       2>1     3>3       source>target; 3>3 is a local copy
    result  0       [2]     [0]     [3]       0: zeros, [p]: device p's array

                 hops  bytes on the wire   waits before it writes for    permutations
    partners     1     x                   its target                    shifts by 1
    everyone     1     x                   every device within reach     all

Neither needs scratch. Where some device is nobody's target, every result begins as zeros: one pass
over local memory, which XLA may place anywhere before.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import entry, launch, sync
from pallas_collectives.kernels.topology import Group, Ring

Pairs = tuple[tuple[int, int], ...]


def direct(
    x: jax.Array, group: Group, *, perm: Pairs, everyone: bool, vmem: bool, interpret: Any
) -> jax.Array:
    """Sends x along `perm`'s (source, target) pairs of positions; each position once in either.

    A source waits for `everyone` within its reach to have entered the kernel; or for its target
    alone, of a permutation that is an `entry.shift_of`.
    """
    blanks = (jnp.zeros_like(x),) if len(perm) < group.size else ()
    return launch.call(
        functools.partial(_kernel, everyone=everyone),
        group,
        x,
        *blanks,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scalars=(jnp.asarray(_partners(group.size, perm)),),
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
        barrier=entry.WIDE if everyone else entry.shift_of(perm, group),
        name="ppermute_everyone" if everyone else "ppermute_partners",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=x.nbytes,
        input_output_aliases={1: 0} if blanks else None,
    )


def _partners(n: int, perm: Pairs) -> np.ndarray:
    """The target of each device, then the source of each; -1 for none."""
    partners = np.full(2 * n, -1, np.int32)
    for source, target in perm:
        partners[source] = target
        partners[n + target] = source
    return partners


def _kernel(
    ring: Ring,
    partners_ref: Any,  # (2n,): SMEM: everyone's target, then everyone's source; -1 for none
    x_ref: Any,  # HBM or VMEM
    *refs: Any,  # the buffer of o_ref full of zeros, if not all are targets; then as below
    everyone: bool,
) -> None:
    o_ref, send_sem, recv_sem = refs[-3:]
    # o_ref: like x_ref
    # send_sem: own; x_ref has left, by wire or as a local copy: once, or never
    # recv_sem: our source signals once, if we have one other than ourselves
    target, source = partners_ref[ring.me], partners_ref[ring.size + ring.me]
    stays = target == ring.me
    sends = (target >= 0) & ~stays
    receives = (source >= 0) & ~stays

    if not everyone:
        _barrier_with_partners(ring, sends, receives, source)
    with jax.named_scope("copy"):
        pl.when(sends)(
            lambda: sync.remote_copy(x_ref, o_ref, send_sem, recv_sem, ring.device_id(target))
        )
        pl.when(stays)(lambda: pltpu.make_async_copy(x_ref, o_ref, send_sem).start())
    with jax.named_scope("drain"):
        pl.when(receives)(lambda: sync.wait(recv_sem, o_ref))
        pl.when(sends | stays)(lambda: sync.wait(send_sem, x_ref))


def _barrier_with_partners(ring: Ring, sends: Any, receives: Any, source: Any) -> None:
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
    with jax.named_scope("ready"):
        pl.when(receives)(
            lambda: pl.semaphore_signal(semaphore, 1, device_id=ring.device_id(source))
        )
        pl.when(sends)(lambda: pl.semaphore_wait(semaphore, 1))
