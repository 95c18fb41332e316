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

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Interpret, Ref, Semaphore, dma_semaphores
from pallas_collectives.kernels.machinery import entry, launch, sync
from pallas_collectives.topology.groups import Group, Ring

Pairs = tuple[tuple[int, int], ...]


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays: two semaphores."""

    send_sem: Semaphore = dma_semaphores()  # own; x_ref has left, or been copied: once, or never
    # Our source signals it once, if we have one other than ourselves.
    recv_sem: Semaphore = dma_semaphores()


def direct(
    x: jax.Array, group: Group, *, perm: Pairs, everyone: bool, vmem: bool, interpret: Interpret
) -> jax.Array:
    """Sends x along `perm`'s (source, target) pairs of positions; each position once in either.

    A source waits for `everyone` within its reach to have entered the kernel; or for its target
    alone, of a permutation that is an `entry.shift_of`.
    """
    return launched(
        _kernel,
        x,
        group,
        perm=perm,
        everyone=everyone,
        scratch=Scratch(),
        name="ppermute_everyone" if everyone else "ppermute_partners",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=x.nbytes,
    )


def launched(
    kernel: Callable[..., None],
    x: jax.Array,
    group: Group,
    *,
    perm: Pairs,
    everyone: bool,
    **options: Any,
) -> jax.Array:
    """What a kernel makes of x that takes everyone's partners, x, a result like it, and scratch."""
    barrier = entry.WIDE if everyone else entry.shift_of(perm, group)
    assert barrier is not None, "partners are for shifts (`algorithms.choose`)"
    blanks = (jnp.zeros_like(x),) if len(perm) < group.size else ()
    return launch.call(
        kernel,
        group,
        x,
        *blanks,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scalars=(jnp.asarray(_partners(group.size, perm)),),
        barrier=barrier,
        input_output_aliases={1: 0} if blanks else None,
        **options,
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
    partners_ref: Ref,  # (2n,): SMEM: see sync.partners
    x_ref: Ref,  # HBM or VMEM
    o_ref: Ref,  # like x_ref; full of zeros, if not all are targets
    scratch: Scratch,
) -> None:
    target, source = sync.partners(ring, partners_ref)
    sends, receives, stays = target >= 0, source >= 0, partners_ref[ring.me] == ring.me
    send_sem, recv_sem = scratch
    with jax.named_scope("copy"):
        pl.when(sends)(
            lambda: sync.remote_copy(x_ref, o_ref, send_sem, recv_sem, ring.device_id(target))
        )
        pl.when(stays)(lambda: pltpu.make_async_copy(x_ref, o_ref, send_sem).start())
    with jax.named_scope("drain"):
        pl.when(receives)(lambda: sync.wait(recv_sem, o_ref))
        pl.when(sends | stays)(lambda: sync.wait(send_sem, x_ref))
