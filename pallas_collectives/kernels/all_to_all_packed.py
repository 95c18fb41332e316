"""All-to-all of blocks that travel packed: each chunk is packed, sent, and unpacked as it comes.

As `all_to_all.direct`, in rounds: in each a device sends a chunk to every other one. Of device 0 of
three, with chunks a, b, ... of each block, and two chunks on their way:

    turn           0     1     2     3     4     5
    packed, sent   a>1   a>2   a>0   b>1   b>2   b>0      chunk>receiver
    unpacked       .     .     2>a   1>a   0>a   2>b      sender>chunk, on its way to the result

             hops  bytes per link and direction   scratch
    direct   1     as the wires lie, packed       2n + 32 packed chunks or so, at most 48 MiB VMEM

Of HBM that takes a read for each byte of the operand and a write for each byte of the result. The
own block is packed and unpacked as well, so that all numbers are rounded alike.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.blocks import Chunking, block_shape, whole_shape
from pallas_collectives.kernels.machinery.channel import Channel, Semaphores
from pallas_collectives.kernels.machinery.codec import MOST_TILES, Chunks, Codec
from pallas_collectives.kernels.machinery.sync import Partners
from pallas_collectives.kernels.torus.devices import axes_of
from pallas_collectives.kernels.torus.sections import semaphores, vmem_bytes
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import Group, Ring, only_if, wrap, wrap_step

SCRATCH_BYTES = 48 << 20
# Chunks that are sent before the first that comes is waited for: enough to load the links, and so
# few that they come one after the other, and not all at the end. By the replay: with 16 4 MiB along
# an axis of 7x and v6e take 2% and 3% longer, and with 12 64 MiB over two axes of v5p 2%.
AHEAD, AHEAD_ON_SEVERAL_AXES = 12, 16
UNDER_WAY = 3  # chunks that come from HBM, or go there
EARLY = 1  # chunks that are packed while the barrier waits for others


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays."""

    plain: Ref  # (UNDER_WAY, chunk): VMEM: ours, on their way from HBM
    packed: Ref  # (ahead + 1, packed chunk): VMEM: ours, on their way to their receivers
    come: Ref  # (n, window, packed chunk): VMEM: by the sender's distance, who writes to its slots
    result: Ref  # (UNDER_WAY, chunk): VMEM: unpacked, on their way to HBM
    plain_sems: Semaphore  # (UNDER_WAY): own
    result_sems: Semaphore  # (UNDER_WAY): own
    semaphores: Semaphores  # of n channels: to the device at each distance; messages are rounds

    @classmethod
    def of(
        cls,
        chunks: Chunks,
        n: int,
        dtype: DType,
        codec: Codec,
        ahead: int = AHEAD_ON_SEVERAL_AXES,
    ) -> "Scratch":
        """What to allocate, with so many chunks sent ahead; by default the most."""
        # A chunk takes the slot of the one `window` rounds before it, which its receiver unpacks
        # `ahead` turns after it was sent: so the credit has a round or more to come back.
        window = min(1 + -(-ahead // n), chunks.count)
        plain = pltpu.VMEM((UNDER_WAY, *chunks.shape), dtype)
        packed = codec.packed_shape(chunks.shape)
        return cls(
            plain,
            pltpu.VMEM((ahead + 1, *packed), jnp.int32),
            pltpu.VMEM((n, window, *packed), jnp.int32),
            plain,
            dma_semaphores(UNDER_WAY),
            dma_semaphores(UNDER_WAY),
            Semaphores.of(n, window=window, sent=(ahead + 1,), credits=window < chunks.count),
        )


def _chunks(block: tuple[int, ...], n: int, dtype: DType, codec: Codec) -> Chunks | None:
    """The largest chunks for which the chip has memory and semaphores; None if it has not."""
    chip = chips.current()
    room = min(SCRATCH_BYTES, 3 * chip.vmem_bytes // 4)
    for most in range(MOST_TILES, 0, -1):
        chunks = Chunks.of(block, codec, most)
        scratch = Scratch.of(chunks, n, dtype, codec)
        if vmem_bytes(scratch) <= room and semaphores(scratch) <= chip.kernel_semaphores:
            return chunks
    return None


def sent_bytes(block: tuple[int, ...], n: int, dtype: DType, codec: Codec) -> int:
    """Bytes of an operand of n blocks as they travel, scales included; 0 if it cannot.

    It cannot where the chip has too little VMEM or too few semaphores for so many devices.
    """
    chunks = _chunks(block, n, dtype, codec)
    return 4 * n * chunks.count * math.prod(codec.packed_shape(chunks.shape)) if chunks else 0


def direct(
    x: jax.Array,
    group: Group,
    *,
    split_axis: int,
    concat_axis: int,
    codec: Codec,
    interpret: Interpret,
) -> jax.Array:
    """Exchanges blocks of whole tiles of the codec's, as `all_to_all.direct` does."""
    n = group.size
    block = block_shape(x.shape, split_axis, n)
    chunks = _chunks(block, n, x.dtype, codec)
    assert chunks is not None, "`sent_bytes` says so"
    how = {"chunks": chunks, "codec": codec, "split": split_axis, "concat": concat_axis}
    ahead = AHEAD if len(axes_of(group)) == 1 else AHEAD_ON_SEVERAL_AXES
    return launch.call(
        functools.partial(_kernel, **how),
        group,
        x,
        out_shape=jax.ShapeDtypeStruct(whole_shape(block, concat_axis, n), x.dtype),
        scratch=Scratch.of(chunks, n, x.dtype, codec, ahead),
        barrier="everyone",
        prepare=functools.partial(_prepare, **how),
        name="all_to_all_packed",
        interpret=interpret,
        chunking=Chunking(chunks.count),
        wire_bytes=(n - 1) * sent_bytes(block, n, x.dtype, codec) // n,
    )


def _prepare(*refs: Any, **how: Any) -> Callable[[], None]:
    end = _End(*refs, **how)
    sync.for_each(0, min(UNDER_WAY, end.count), lambda number: end.bring(number).start())
    sync.for_each(0, min(EARLY, end.count), end.pack)
    return lambda: None  # the others are waited for where they are packed


def _kernel(
    *refs: Any,  # the first fields of an `_End`; the first chunks are on their way (`_prepare`)
    **how: Any,  # the others
) -> None:
    end = _End(*refs, **how)
    count, ahead = end.count, end.sending - 1

    def turn(number: Number) -> None:
        only_if(number < count, lambda: end.send(number))
        only_if(number >= ahead, lambda: end.receive(number - ahead))

    # All devices take turns alike. In turn t one waits for what others send in turn t - ahead, and
    # for what they let go of before turn t: none waits for ever.
    with jax.named_scope("exchange"):
        sync.for_each(0, count + ahead, turn)
    with jax.named_scope("drain"):
        sync.for_each(max(0, count - end.sending), count, end.wait_until_left)
        sync.for_each(max(0, count - UNDER_WAY), count, lambda number: end.keep(number).wait())


@dataclasses.dataclass(frozen=True)
class _End:
    """What a device sends and receives: chunks of all blocks, numbered as they are sent.

    Those that come have the same numbers, as their senders' distances are our receivers'.
    """

    ring: Ring
    x_ref: Ref  # n blocks along the split axis: HBM
    o_ref: Ref  # n blocks along the concat axis: HBM
    s: Scratch
    _: dataclasses.KW_ONLY
    chunks: Chunks
    codec: Codec
    split: int
    concat: int

    @property
    def count(self) -> int:
        """How many chunks we send, the own ones among them."""
        return self.ring.size * self.chunks.count

    @property
    def sending(self) -> int:
        """Places for packed chunks that leave."""
        return int(self.s.packed.shape[0])

    def pack(self, number: Number) -> None:
        """Packs a chunk; the next but two sets out from HBM."""
        packed = self.s.packed.at[wrap_step(number, self.sending)]
        self.bring(number).wait()
        earlier = number - self.sending
        only_if(earlier >= 0, lambda: self.wait_until_left(earlier))
        self.codec.combine((packed, self.s.plain.at[wrap_step(number, UNDER_WAY)]))
        follows = number + UNDER_WAY < self.count
        only_if(follows, lambda: self.bring(number + UNDER_WAY).start())

    def send(self, number: Number) -> None:
        """Packs a chunk, unless that is done, and sends it."""
        turn, distance = self._of(number)
        packed, channel = self.s.packed.at[wrap_step(number, self.sending)], self._channel(number)
        only_if(number >= EARLY, lambda: self.pack(number))
        only_if(distance > 0, lambda: channel.send(packed, channel.slot(turn), turn))
        only_if(distance == 0, lambda: channel.deliver(packed, turn))

    def receive(self, number: Number) -> None:
        """Waits for a chunk, unpacks it, and starts to copy it to the result."""
        (turn, distance), channel = self._of(number), self._channel(number)
        come = channel.slot(turn)
        channel.receive(turn, come)
        only_if(number >= UNDER_WAY, lambda: self.keep(number - UNDER_WAY).wait())
        self.codec.unpack(self.s.result.at[wrap_step(number, UNDER_WAY)], come)
        only_if(distance > 0, lambda: channel.release(turn))
        self.keep(number).start()

    def bring(self, number: Number) -> Copy:
        """The copy of a chunk from HBM."""
        turn, distance = self._of(number)
        place, receiver = wrap_step(number, UNDER_WAY), self._position(distance)
        part = self.chunks.at(self.x_ref, turn, receiver, self.split)
        return pltpu.make_async_copy(part, self.s.plain.at[place], self.s.plain_sems.at[place])

    def keep(self, number: Number) -> Copy:
        """The copy of a chunk that has come to HBM."""
        turn, distance = self._of(number)
        place, sender = wrap_step(number, UNDER_WAY), self._position(-distance)
        part = self.chunks.at(self.o_ref, turn, sender, self.concat)
        return pltpu.make_async_copy(self.s.result.at[place], part, self.s.result_sems.at[place])

    def wait_until_left(self, number: Number) -> None:
        """Waits until a chunk has left its place. We have received our own one ourselves."""
        packed, away = self.s.packed.at[wrap_step(number, self.sending)], self._of(number)[1] > 0
        only_if(away, lambda: self._channel(number).wait_sent(packed))

    def _channel(self, number: Number) -> Channel:
        """To a chunk's receiver, and from the sender as far behind us."""
        _, distance = self._of(number)
        return Channel(
            self.ring,
            distance,
            self.s.semaphores,
            (distance,),
            arrivals=self.chunks.count,
            longest=self.chunks.count,
            slots=(self.s.come, (distance,)),
            sent=self.s.semaphores.sent.at[wrap_step(number, self.sending)],
            partners=Partners(self._position(distance), self._position(-distance)),
        )

    def _of(self, number: Number) -> tuple[Any, Any]:
        """The round of a chunk, and how many positions further it goes: all n in each round."""
        n = self.ring.size
        position = number + n // 2  # so that the own chunk is neither first nor last
        return lax.div(number, np.int32(n)), lax.rem(position * _stride(n), np.int32(n))

    def _position(self, offset: Number) -> Number:
        return wrap(self.ring.me + offset, self.ring.size)


def _stride(n: int) -> int:
    """By how much more each chunk goes further than the one before, modulo n.

    Next to the golden section of n, so that chunks that follow one another take other links: on
    v5p 4 x 4 16 MiB of bfloat16 take 63 us, with a stride of 1 68.
    """
    apart = (k for k in range(1, n) if math.gcd(k, n) == 1)
    return min(apart, key=lambda k: abs(k - 0.382 * n))
