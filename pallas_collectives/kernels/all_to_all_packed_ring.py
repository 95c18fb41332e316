"""All-to-all of blocks that travel packed round a ring, passed on by neighbours.

As `all_to_all.ring`: a block for a device d positions away takes d hops, by the shorter side, and
the opposite device's goes half each way. It is packed before its first hop, passed on as it is, and
unpacked while others are on the wire. What a device does in each hop, on each of its ways:

    hop 1      packs and sends a message for each distance; of the round before, it unpacks what
               came from farthest away; it packs and unpacks its own
    hop h > 1  passes messages on, and unpacks what came from h - 1 positions away

             hops        bytes per link and direction   scratch
    ring     floor(n/2)  n^2/8 packed blocks            n packed messages of VMEM; of HBM, slots as
                                                        `all_to_all.ring`, and n packed blocks

Of HBM that takes a read for each byte of the operand, a write for each of the result, and two of
each for a packed byte that is passed on or comes to stay.

Each message that comes to stay has a semaphore, of which there are so many: on 16 devices there is
room for 256 MiB a device, and larger operands are packed before the kernel (`_cut`).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import (
    Copy,
    DType,
    Interpret,
    Number,
    Ref,
    Semaphore,
    buffer,
    dma_semaphores,
)
from pallas_collectives.kernels.all_to_all import Ends, Message, Schedule, pass_on, ring_schedules
from pallas_collectives.kernels.machinery import launch, relay, sync
from pallas_collectives.kernels.machinery.blocks import Chunking, block_shape, whole_shape
from pallas_collectives.kernels.machinery.codec import Chunks, Codec
from pallas_collectives.kernels.torus.sections import semaphores, vmem_bytes
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import Group, Ring, only_if

MOST_TILES = 16  # of a chunk: two are a message, as long as `all_to_all.CHUNK_BYTES` of bfloat16
WAYS = 2


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays. Messages are of `parts` chunks, two or one."""

    relays: tuple[relay.Scratch | None, ...]  # for each schedule that relays
    packed: Ref  # (ways, n/2, parts, packed chunk): VMEM: own, before the first hop
    packed_sems: Semaphore  # (ways, n/2): own; it has left
    come_ref: Ref  # (n, chunks, packed chunk): HBM: what comes to stay, by its sender
    come_sems: Semaphore  # (rounds, ways, n/2): that of each distance is there
    # For each way: what comes from HBM, plain and packed, what was unpacked, and their semaphores
    plain: Ref  # (ways, parts, chunk): VMEM
    read: Ref  # (ways, parts, packed chunk): VMEM
    result: Ref  # (ways, parts, chunk): VMEM
    sems: Semaphore  # (3, ways, parts): own

    @classmethod
    def of(
        cls, chunks: Chunks, schedules: tuple[Schedule, ...], n: int, dtype: DType, codec: Codec
    ) -> "Scratch":
        """What to allocate."""
        packed, half = codec.packed_shape(chunks.shape), n // 2
        parts = [chunks.count // schedule.cuts for schedule in schedules]
        plain = pltpu.VMEM((WAYS, parts[0], *chunks.shape), dtype)
        return cls(
            tuple(
                relay.Scratch.of(schedule, (each, *packed), jnp.dtype(jnp.int32))
                if schedule.relays
                else None
                for schedule, each in zip(schedules, parts, strict=True)
            ),
            pltpu.VMEM((WAYS, half, parts[0], *packed), jnp.int32),
            dma_semaphores(WAYS, half),
            buffer((n, chunks.count, *packed), jnp.int32),
            dma_semaphores(schedules[0].cuts, WAYS, half),
            plain,
            pltpu.VMEM((WAYS, parts[0], *packed), jnp.int32),
            plain,
            dma_semaphores(3, WAYS, parts[0]),
        )


class _Cut(NamedTuple):
    """How blocks are cut, and in which messages they go."""

    chunks: Chunks
    schedules: tuple[Schedule, ...]


def _cut(block: tuple[int, ...], n: int, dtype: DType, codec: Codec) -> _Cut | None:
    """The largest chunks for which there is room; None without room, or if all are too coarse.

    To the opposite device half of a message goes each way. All distances are one batch: else what
    comes from h - 1 positions away may be sent after hop h.
    """
    chip = chips.current()
    if n < 3:
        return None
    for most in range(MOST_TILES, 0, -1):
        chunks = Chunks.of(block, codec, most)
        if n % 2 == 0 and chunks.count % 2:
            continue
        sent = 4 * chunks.count * math.prod(codec.packed_shape(chunks.shape))
        schedules = ring_schedules(chunks.count, sent, n)
        scratch = Scratch.of(chunks, schedules, n, dtype, codec)
        fits = 4 * vmem_bytes(scratch) <= 3 * chip.vmem_bytes
        enough = semaphores(scratch) <= chip.kernel_semaphores
        if fits and enough and schedules[0].batches == 1:
            return _Cut(chunks, schedules)
    return None


def sent_bytes(block: tuple[int, ...], n: int, dtype: DType, codec: Codec) -> int:
    """Bytes of an operand of n blocks as they travel, scales included; 0 if they cannot."""
    return n * codec.packed_bytes(math.prod(block)) if _cut(block, n, dtype, codec) else 0


def ring(
    x: jax.Array,
    group: Group,
    *,
    split_axis: int,
    concat_axis: int,
    codec: Codec,
    interpret: Interpret,
) -> jax.Array:
    """Exchanges blocks of whole tiles of the codec's, as `all_to_all.ring` does."""
    n = group.size
    block = block_shape(x.shape, split_axis, n)
    cut = _cut(block, n, x.dtype, codec)
    assert cut is not None, "`sent_bytes` says so"
    how: dict[str, Any] = {"cut": cut, "codec": codec, "split": split_axis, "concat": concat_axis}
    return launch.call(
        functools.partial(_kernel, **how),
        group,
        x,
        out_shape=jax.ShapeDtypeStruct(whole_shape(block, concat_axis, n), x.dtype),
        scratch=Scratch.of(*cut, n, x.dtype, codec),
        barrier="neighbours",
        name="all_to_all_packed_ring",
        interpret=interpret,
        chunking=Chunking(cut.schedules[0].cuts),
        wire_bytes=n**2 // 4 * codec.packed_bytes(math.prod(block)),
    )


def _kernel(ring: Ring, x_ref: Ref, o_ref: Ref, scratch: Scratch, **how: Any) -> None:
    # x_ref: n blocks along the split axis: HBM
    # o_ref: n blocks along the concat axis: HBM
    ends = _Packed(ring, x_ref, o_ref, scratch, **how)
    pass_on(ring, ends.cut.schedules, scratch.relays, ends)
    with jax.named_scope("drain"):
        ends.drain()


class _Packed(Ends):
    """Packs messages that leave, and unpacks those that have come.

    What comes to stay has a place and a semaphore of its own. Waiting for it holds nobody up for
    ever: all make the same moves in the same order, and it was sent in an earlier one.
    """

    def __init__(
        self,
        ring: Ring,
        x_ref: Ref,
        o_ref: Ref,
        scratch: Scratch,
        *,
        cut: _Cut,
        codec: Codec,
        split: int,
        concat: int,
    ) -> None:
        self.cut, self._ring, self._s, self._codec = cut, ring, scratch, codec
        self._x_ref, self._o_ref, self._split, self._concat = x_ref, o_ref, split, concat

    def leave(self, message: Message) -> tuple[Ref, Semaphore]:
        parts, at = self._parts(message.schedule), (message.way, message.distance - 1)
        packed, left = self._s.packed.at[(*at, pl.ds(0, parts))], self._s.packed_sems.at[at]
        only_if(message.number > 0, lambda: sync.wait(left, packed))  # the round before
        self._pack(message, message.receiver(self._ring), packed)
        return packed, left

    def arrive(self, message: Message) -> tuple[Ref, Semaphore]:
        return self._come(message, message.sender(self._ring))

    def after(self, message: Message) -> None:
        near, *opposite = self.cut.schedules
        schedule, number, way, hop, _ = message
        if schedule is not near:
            self._unpack(Message(near, number, way, hop, near.farthest))
            return
        if isinstance(hop, np.integer):  # the first; what was farthest is here by now
            last = opposite[0] if opposite else near
            earlier = Message(last, number - 1, way, hop, last.farthest)
            only_if(number > 0, lambda: self._unpack(earlier))
            if way == 0:
                self._keep_own(message)
            return
        self._unpack(message._replace(distance=hop - 1))

    def drain(self) -> None:
        """What has come in the last hop is unpacked, and all is in its place."""
        near, last = self.cut.schedules[0], self.cut.schedules[-1]
        for way in range(WAYS):
            self._unpack(Message(last, np.int32(near.cuts - 1), way, 1, np.int32(last.farthest)))
        for way in range(WAYS):
            for schedule in self.cut.schedules:
                packed = self._s.packed.at[way, 0, pl.ds(0, self._parts(schedule))]
                for distance in range(schedule.nearest, schedule.farthest + 1):
                    sync.wait(self._s.packed_sems.at[way, distance - 1], packed)
            for part in range(self._parts(near)):
                self._end_copy(way, part)

    def _parts(self, schedule: Schedule) -> int:
        """Chunks of a message."""
        return self.cut.chunks.count // schedule.cuts

    def _chunk(self, message: Message, part: int) -> Any:
        """Which of a block's chunks a part of a message is."""
        number = message.number
        if message.schedule.halved:
            return 2 * number + message.way
        return self._parts(message.schedule) * number + part

    def _come(self, message: Message, sender: Number) -> tuple[Ref, Semaphore]:
        """Where a message comes to stay, and the semaphore that counts it."""
        parts = self._parts(message.schedule)
        place = self._s.come_ref.at[sender, pl.ds(self._chunk(message, 0), parts)]
        return place, self._s.come_sems.at[message.number, message.way, message.distance - 1]

    def _pack(self, message: Message, receiver: Number, packed: Ref) -> None:
        way, parts = message.way, range(self._parts(message.schedule))

        def bring(part: int) -> Copy:
            chunk = self._chunk(message, part)
            here = self.cut.chunks.at(self._x_ref, chunk, receiver, self._split)
            return pltpu.make_async_copy(
                here, self._s.plain.at[way, part], self._s.sems.at[0, way, part]
            )

        for part in parts:
            bring(part).start()
        for part in parts:
            bring(part).wait()
            self._codec.combine((packed.at[part], self._s.plain.at[way, part]))

    def _unpack(self, message: Message) -> None:
        """Waits for what has come from so far away, unpacks it and starts to copy it."""
        way, parts = message.way, range(self._parts(message.schedule))
        sender = self._ring.block(-message.schedule.directions[way] * message.distance)
        come, arrived = self._come(message, sender)
        sync.wait(arrived, come)

        def bring(part: int) -> Copy:
            return pltpu.make_async_copy(
                come.at[part], self._s.read.at[way, part], self._s.sems.at[1, way, part]
            )

        for part in parts:
            bring(part).start()
        for part in parts:
            bring(part).wait()
            self._keep(message, part, self._s.read.at[way, part], sender)

    def _keep_own(self, message: Message) -> None:
        """Packs a message of our own block, and unpacks it: so all numbers are rounded alike."""
        read = self._s.read.at[message.way]
        self._pack(message, self._ring.me, read)
        for part in range(self._parts(message.schedule)):
            self._keep(message, part, read.at[part], self._ring.me, own=True)

    def _keep(
        self, message: Message, part: int, packed: Ref, sender: Number, own: bool = False
    ) -> None:
        """Unpacks a chunk, and starts to copy it to the result."""
        number, way = message.number, message.way
        # The own one is the first of all on its way, else what comes from next to us.
        earlier = number > 0 if own else (number > 0) | (message.distance > 1) | (way == 0)
        only_if(earlier, functools.partial(self._end_copy, way, part))
        result = self._s.result.at[way, part]
        self._codec.unpack(result, packed)
        there = self.cut.chunks.at(self._o_ref, self._chunk(message, part), sender, self._concat)
        pltpu.make_async_copy(result, there, self._s.sems.at[2, way, part]).start()

    def _end_copy(self, way: int, part: int) -> None:
        """Waits until what was unpacked there is in the result."""
        sync.wait(self._s.sems.at[2, way, part], self._s.result.at[way, part])
