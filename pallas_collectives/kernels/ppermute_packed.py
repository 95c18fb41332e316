"""Permute of arrays that travel packed: each chunk is packed, sent, and unpacked as it comes.

As `ppermute`, with one DMA for each chunk. Of one device, with chunks a, b, c, ...:

    turn           0    1    2    3    4    5
    from HBM       a b  c    d    e    f    g
    packed, sent   a    b    c    d    e    f
    unpacked       .    .    .    .    a    b        what comes, on its way to the result

             hops  bytes on the wire   scratch
    permute  1     x, packed           3 MiB VMEM

Of HBM that takes a read for each byte of the operand and a write for each byte of the result. What
stays on its device is packed and unpacked as well, so that all results are rounded alike.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import (
    Copy,
    DType,
    Interpret,
    Number,
    Ref,
    Semaphore,
    dma_semaphores,
)
from pallas_collectives.kernels import ppermute
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.kernels.machinery.blocks import Chunking
from pallas_collectives.kernels.machinery.channel import Channel, Semaphores
from pallas_collectives.kernels.machinery.codec import Chunks, Codec
from pallas_collectives.kernels.ppermute import Pairs
from pallas_collectives.topology.groups import RIGHT, Group, Ring, only_if, wrap_step

# Chunks that are sent before the first that comes is waited for: enough to be on their way along a
# line of 8, by the replay of v6e.
AHEAD = 4
SENDING = AHEAD + 1  # places for packed chunks that leave
# Places for those that come. Turn t sends chunk t to the place of chunk t - WINDOW, which the
# target lets go of in its turn t - WINDOW + AHEAD: so its word has some turns to come back, too.
WINDOW = AHEAD + 6


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays."""

    plain: Ref  # (2, chunk): VMEM: ours, on their way from HBM
    packed: Ref  # (SENDING, packed chunk): VMEM: ours, on their way to the target
    come: Ref  # (WINDOW, packed chunk): VMEM: written by our source
    result: Ref  # (2, chunk): VMEM: unpacked, on their way to HBM
    plain_sems: Semaphore  # (2): own
    result_sems: Semaphore  # (2): own
    semaphores: Semaphores  # of the channel from our source and to our target

    @classmethod
    def of(cls, chunks: Chunks, dtype: DType, codec: Codec) -> "Scratch":
        """What to allocate."""
        plain = pltpu.VMEM((2, *chunks.shape), dtype)
        packed = codec.packed_shape(chunks.shape)
        return cls(
            plain,
            pltpu.VMEM((SENDING, *packed), jnp.int32),
            pltpu.VMEM((WINDOW, *packed), jnp.int32),
            plain,
            dma_semaphores(2),
            dma_semaphores(2),
            Semaphores.of(window=WINDOW, sent=(SENDING,)),
        )


def sent_bytes(shape: tuple[int, int], codec: Codec) -> int:
    """Bytes of an array on the wire, scales included."""
    chunks = Chunks.of(shape, codec)
    return 4 * chunks.count * math.prod(codec.packed_shape(chunks.shape))


def direct(
    x: jax.Array,
    group: Group,
    *,
    perm: Pairs,
    everyone: bool,
    codec: Codec,
    interpret: Interpret,
) -> jax.Array:
    """Sends x (rows, columns), whole tiles of the codec's, as `ppermute.direct` does."""
    chunks = Chunks.of((x.shape[0], x.shape[1]), codec)
    return ppermute.launched(
        functools.partial(_kernel, chunks=chunks, codec=codec),
        x,
        group,
        perm=perm,
        everyone=everyone,
        scratch=Scratch.of(chunks, x.dtype, codec),
        chunking=Chunking(chunks.count),
        name=f"ppermute_packed_{'everyone' if everyone else 'partners'}",
        interpret=interpret,
        wire_bytes=sent_bytes((x.shape[0], x.shape[1]), codec),
    )


def _kernel(
    ring: Ring,
    partners_ref: Ref,  # (2n,): SMEM: see sync.partners
    x_ref: Ref,  # HBM
    o_ref: Ref,  # like x_ref; full of zeros, if not all are targets
    s: Scratch,
    *,
    chunks: Chunks,
    codec: Codec,
) -> None:
    target, source = partners = sync.partners(ring, partners_ref)
    stays = partners_ref[ring.me] == ring.me
    sends, receives = (target >= 0) | stays, (source >= 0) | stays
    count = chunks.count
    chunks_to_come = lax.select(source >= 0, np.int32(count), np.int32(0))

    def channel(number: Number) -> Channel:
        return Channel(
            ring,
            RIGHT,
            s.semaphores,
            (),
            arrivals=chunks_to_come,
            longest=count,
            slots=(s.come, ()),
            sent=s.semaphores.sent.at[wrap_step(number, SENDING)],
            partners=partners,
        )

    def bring(number: Number) -> Copy:
        part, place = chunks.at(x_ref, number), wrap_step(number, 2)
        return pltpu.make_async_copy(part, s.plain.at[place], s.plain_sems.at[place])

    def keep(number: Number) -> Copy:
        part, place = chunks.at(o_ref, number), wrap_step(number, 2)
        return pltpu.make_async_copy(s.result.at[place], part, s.result_sems.at[place])

    def end_send(number: Number) -> None:
        packed = s.packed.at[wrap_step(number, SENDING)]
        only_if(target >= 0, lambda: channel(number).wait_sent(packed))

    def send(number: Number) -> None:
        """Packs a chunk and sends it; the next but one sets out from HBM."""
        packed, goes = s.packed.at[wrap_step(number, SENDING)], channel(number)
        bring(number).wait()
        only_if(number >= SENDING, lambda: end_send(number - SENDING))
        codec.combine((packed, s.plain.at[wrap_step(number, 2)]))
        only_if(number + 2 < count, lambda: bring(number + 2).start())
        only_if(target >= 0, lambda: goes.send(packed, goes.slot(number), number))
        only_if(stays, lambda: goes.deliver(packed, number))

    def receive(number: Number) -> None:
        """Waits for a chunk, unpacks it, and starts to copy it to the result."""
        comes = channel(number)
        come = comes.slot(number)
        comes.receive(number, come)
        only_if(number >= 2, lambda: keep(number - 2).wait())
        codec.unpack(s.result.at[wrap_step(number, 2)], come)
        comes.release(number)
        keep(number).start()

    def turn(number: Number) -> None:
        only_if(sends & (number < count), lambda: send(number))
        only_if(receives & (number >= AHEAD), lambda: receive(number - AHEAD))

    # All devices take turns alike. In turn t one waits for what its source sends in turn t - AHEAD,
    # and for what its target lets go of in turn t - WINDOW + AHEAD: none waits for ever.
    with jax.named_scope("copy"):
        first = min(2, count)
        only_if(sends, lambda: sync.for_each(0, first, lambda number: bring(number).start()))
        sync.for_each(0, count + AHEAD, turn)
    with jax.named_scope("drain"):
        only_if(sends, lambda: sync.for_each(max(0, count - SENDING), count, end_send))
        last = max(0, count - 2)
        only_if(receives, lambda: sync.for_each(last, count, lambda number: keep(number).wait()))
