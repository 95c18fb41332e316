"""All-to-all: block p of every device goes to device p, and lies there in the order of senders.

Direct. Every device sends to all others at once, device p first to p+1, so that at no time two
begin with the same receiver. Large blocks go in chunks, receiver by receiver, so that the sends
share the links instead of queueing behind one another.

    send dev0       dev1       dev2       dev3       sender>receiver
    1    0>1        1>2        2>3        3>0
    2    0>2        1>3        2>0        3>1
    3    0>3        1>0        2>1        3>2

Ring. For chips and wires where only neighbours are wise. A block for a device d positions away
takes d hops, by the shorter side; on an even ring the opposite device's block goes half each way.
What every device passes to its right in each hop (to the left: the mirror image):

    hop  dev0       dev1       dev2       dev3       dev4       sender>receiver
    1    0>2 0>1    1>3 1>2    2>4 2>3    3>0 3>4    4>1 4>0
    2    4>1        0>2        1>3        2>4        3>0

A block that has further to go waits in a slot of its host (see `relay`). Blocks are cut into chunks
of 1 MiB where they can be, and the chunks follow one another without a pause: the slots do not grow
with the operand. On large rings the distances are served in batches, the farthest first.

Line. For wires whose closing hop runs back over all others, or cannot be used at all: every block
goes the one way that there is.

             hops        bytes per link and direction                   buffers
    direct   1           as the wires lie                               none
    ring     floor(n/2)  n^2/8 blocks (n even), (n^2-1)/8 (n odd)       at most 18 MiB
    line     n-1         n^2/4 blocks in the middle                     at most 16 MiB

The ring's buffers hold 4 * width + 2 chunks (two less on an odd ring), where `width` messages, one
or more, travel together each way; the line's 4 * (n-1), and its chunks are the smaller for it.
Where no dimension can be cut into that many whole tiles, chunks are larger, and with them the
buffers. A block that can be cut nowhere is one chunk; on an even ring the opposite device's then
goes to the right only, which adds n/4 blocks to the links that way.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Interpret, Number, Ref, Semaphore, dma_semaphores
from pallas_collectives.kernels.machinery import launch, relay, sync
from pallas_collectives.kernels.machinery.blocks import Blocks, Chunking
from pallas_collectives.kernels.machinery.relay import MAX_WIDTH, SLOT_BYTES
from pallas_collectives.kernels.machinery.sync import PushSemaphores
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import LEFT, RIGHT, Group, Ring

CHUNK_BYTES = 1 << 20
MAX_CHUNKS = 8  # of a block sent directly: enough for the links to interleave


class Scratch(NamedTuple):
    """What the ring's kernel takes beside its arrays."""

    relays: tuple[relay.Scratch | None, ...]  # for each schedule that relays
    copy_sem: Semaphore = dma_semaphores()  # own; started and waited for once
    # own; what leaves x_ref, n-1 blocks in all, drained at the end
    own_sem: Semaphore = dma_semaphores()
    # What comes to stay, n-1 blocks in all. One semaphore for all of them and both directions, as
    #   nothing of it is read before all has come.
    final_sem: Semaphore = dma_semaphores()


def direct(
    x: jax.Array,
    group: Group,
    *,
    split_axis: int,
    concat_axis: int,
    vmem: bool,
    interpret: Interpret,
) -> jax.Array:
    """Exchanges blocks, each device writing to all others.

    A block must be `sliceable` along either axis.
    """
    layout = _Layout.of(x, group.size, split_axis, concat_axis, halves=1, most=MAX_CHUNKS)
    return launch.call(
        functools.partial(_direct_kernel, layout=layout),
        group,
        x,
        out_shape=layout.result,
        scratch=PushSemaphores(),
        chunking=layout.source.chunking,
        barrier="everyone",
        name="all_to_all_direct",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=(group.size - 1) * layout.block_bytes,
    )


def ring(
    x: jax.Array,
    group: Group,
    *,
    split_axis: int,
    concat_axis: int,
    vmem: bool,
    interpret: Interpret,
) -> jax.Array:
    """Exchanges blocks over a ring; a block must be `sliceable` along either axis."""
    layout = _Layout.of(x, group.size, split_axis, concat_axis, halves=2)
    schedules = ring_schedules(layout.source.chunks, layout.block_bytes, group.size)
    return _passed_on(x, group, layout, schedules, on_line=False, vmem=vmem, interpret=interpret)


def line(
    x: jax.Array,
    group: Group,
    *,
    split_axis: int,
    concat_axis: int,
    vmem: bool,
    interpret: Interpret,
) -> jax.Array:
    """Exchanges blocks over a line of at most `catalogue.LONGEST_LINE` devices, as `ring`."""
    chunk = min(CHUNK_BYTES, relay.line_message_bytes(group.size))
    layout = _Layout.of(x, group.size, split_axis, concat_axis, halves=1, chunk_bytes=chunk)
    farthest = group.size - 1
    schedules = (Schedule((RIGHT, LEFT), 1, farthest, farthest, layout.source.chunks),)
    return _passed_on(x, group, layout, schedules, on_line=True, vmem=vmem, interpret=interpret)


def _passed_on(
    x: jax.Array,
    group: Group,
    layout: "_Layout",
    schedules: tuple["Schedule", ...],
    *,
    on_line: bool,
    vmem: bool,
    interpret: Interpret,
) -> jax.Array:
    relays = tuple(
        relay.Scratch.of(schedule, schedule.cut(layout.source).chunk_shape, x.dtype)
        if schedule.relays
        else None
        for schedule in schedules
    )
    return launch.call(
        functools.partial(_ring_kernel, layout=layout, schedules=schedules, on_line=on_line),
        group,
        x,
        out_shape=layout.result,
        scratch=Scratch(relays),
        chunking=Chunking(schedules[0].cuts),  # of one for the opposite device half goes each way
        barrier="line" if on_line else "neighbours",
        name="all_to_all_line" if on_line else "all_to_all_ring",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=group.size**2 // 4 * layout.block_bytes,
    )


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where block p lies in the operand (`source`) and in the result (`target`): of one shape."""

    source: Blocks
    target: Blocks
    result: jax.ShapeDtypeStruct
    block_bytes: int

    @classmethod
    def of(
        cls,
        x: jax.Array,
        n: int,
        split_axis: int,
        concat_axis: int,
        *,
        halves: int,
        chunk_bytes: int = CHUNK_BYTES,
        most: int = 1 << 30,
    ) -> "_Layout":
        """Blocks in so many `halves` of `chunk_bytes` each, `most` at the most, if they can be."""
        block = list(x.shape)
        block[split_axis] //= n
        block_bytes = x.nbytes // n
        chunks = min(most, halves * -(-block_bytes // chunk_bytes))
        source = Blocks.of(tuple(block), split_axis, x.dtype, chunks)
        target = dataclasses.replace(source, axis=concat_axis)
        block[concat_axis] *= n
        return cls(source, target, jax.ShapeDtypeStruct(tuple(block), x.dtype), block_bytes)


@dataclasses.dataclass(frozen=True)
class Schedule(relay.Schedule):
    """Attributes besides:
    cuts: message `number` of a direction is one of so many equal cuts of a block: that of its
      number; if `halved`, of cuts 2 * number and 2 * number + 1 each direction has one.
    halved: each direction carries its half of a chunk.
    """

    cuts: int
    halved: bool = False

    def cut(self, blocks: Blocks) -> Blocks:
        """Blocks whose chunks are messages."""
        return dataclasses.replace(blocks, chunks=self.cuts)

    def message(self, blocks: Blocks, ref: Ref, block: Number, message: "Message") -> Ref:
        """What travels of a block as one message."""
        number, way = message.number, message.way
        return self.cut(blocks).at(ref, block, 2 * number + way if self.halved else number)


def ring_schedules(halves: int, block_bytes: int, n: int) -> tuple[Schedule, ...]:
    """That of all distances that have a shorter side, then one of n/2 if n is even.

    `halves` of a block of so many bytes: of messages, two and two, if they are even.
    """
    halved = halves % 2 == 0
    chunks = halves // 2 if halved else halves
    farthest = (n - 1) // 2
    fitting = SLOT_BYTES * chunks // (4 * block_bytes)
    width = max(1, min(farthest, fitting, MAX_WIDTH))
    schedules = []
    if farthest:
        schedules.append(Schedule((RIGHT, LEFT), 1, farthest, width, chunks))
    if n % 2 == 0:
        directions = (RIGHT, LEFT) if halved else (RIGHT,)
        schedules.append(Schedule(directions, n // 2, n // 2, 1, halves, halved))
    return tuple(schedules)


def _direct_kernel(
    ring: Ring,
    x_ref: Ref,  # n blocks along the split axis: HBM or VMEM
    o_ref: Ref,  # n blocks along the concat axis: HBM or VMEM
    scratch: PushSemaphores,
    *,
    layout: _Layout,
) -> None:
    sync.push_to_everyone(
        ring,
        lambda owner, chunk: layout.source.at(x_ref, owner, chunk),
        lambda chunk: layout.target.at(o_ref, ring.me, chunk),
        scratch,
        layout.source.chunks,
        in_positions=True,
    )


def _ring_kernel(
    ring: Ring,
    x_ref: Ref,  # n blocks along the split axis: HBM or VMEM
    o_ref: Ref,  # n blocks along the concat axis: HBM or VMEM
    scratch: Scratch,
    *,
    layout: _Layout,
    schedules: tuple[Schedule, ...],
    on_line: bool,
) -> None:
    own_place = layout.target.at(o_ref, ring.me)
    own_block = layout.source.at(x_ref, ring.me)
    own_copy = pltpu.make_async_copy(own_block, own_place, scratch.copy_sem)
    own_copy.start()

    class Plain(Ends):
        def leave(self, message: Message) -> tuple[Ref, Semaphore]:
            part = message.schedule.message(layout.source, x_ref, message.receiver(ring), message)
            return part, scratch.own_sem

        def arrive(self, message: Message) -> tuple[Ref, Semaphore]:
            part = message.schedule.message(layout.target, o_ref, message.sender(ring), message)
            return part, scratch.final_sem

    pass_on(ring, schedules, scratch.relays, Plain(), on_line=on_line)
    with jax.named_scope("drain"):
        sync.wait(scratch.final_sem, own_place, times=ring.size - 1)
        sync.wait(scratch.own_sem, own_place, times=ring.size - 1)
        own_copy.wait()


class Message(NamedTuple):
    """One of those that a device sends on, as it makes a hop."""

    schedule: Schedule
    number: Number  # its round
    way: int  # of the schedule's directions
    hop: Number
    distance: Number  # from its sender to its receiver

    def receiver(self, ring: Ring) -> Any:
        """The block that it is, if we send it first."""
        return ring.block(self.schedule.directions[self.way] * self.distance)

    def sender(self, ring: Ring) -> Any:
        """Whose it is, seen by us, who make its hop."""
        return ring.block(-self.schedule.directions[self.way] * (self.hop - 1))


class Ends:
    """Where messages come from, and where they end."""

    def leave(self, message: Message) -> tuple[Ref, Semaphore]:
        """Our own, and what counts that it has left."""
        raise NotImplementedError

    def arrive(self, message: Message) -> tuple[Ref, Semaphore]:
        """Its place downstream, where it ends with this hop, and what counts that it is there."""
        raise NotImplementedError

    def after(self, message: Message) -> None:
        """Called when we have started a message's last hop."""


def pass_on(
    ring: Ring,
    schedules: tuple[Schedule, ...],
    relays: tuple[relay.Scratch | None, ...],
    ends: Ends,
    *,
    on_line: bool = False,
) -> None:
    """Brings all messages of some schedules to their receivers.

    What has left its sender and what has come to stay is not waited for.
    """
    pairs = zip(schedules, relays, strict=True)
    slots = {s: relay.Slots(ring, s, its) for s, its in pairs if its is not None}

    def move(
        schedule: Schedule,
        number: Number,
        hop: Number,
        distance: Number,
        counts: Any,
        first: bool,
        last: bool,
    ) -> Any:
        """One hop of the message for a distance; `counts`: for each way, relayed and forwarded."""

        def one_way(way: int, direction: int, relayed: Number, forwarded: Number) -> None:
            message = Message(schedule, number, way, hop, distance)
            if first:
                source, sent = ends.leave(message)
            else:
                source, sent = slots[schedule].arrived(way, forwarded)
            if last:
                target, come = ends.arrive(message)
                sync.remote_copy(source, target, sent, come, ring.peer(direction))
                ends.after(message)
            else:
                slots[schedule].send(way, relayed, source, sent)

        after = []
        for way, (relayed, forwarded) in enumerate(counts):
            direction, one = schedule.directions[way], np.int32(1)
            go = functools.partial(one_way, way, direction, relayed, forwarded)
            if on_line:  # its sender, and its receiver, are there
                there = relay.on_line(ring, direction, hop, distance)
                groups.only_if(there, go)
                one = there.astype(np.int32)
            else:
                go()
            after.append((relayed + one * (not last), forwarded + one * (not first)))
        return tuple(after)

    rounds = np.int32(schedules[0].cuts // (1 + schedules[0].halved))
    with jax.named_scope("pass_on"):
        zero = (np.int32(0), np.int32(0))
        counts: list[Any] = [(zero,) * len(schedule.directions) for schedule in schedules]
        counts = relay.for_each_move(schedules, rounds, move, counts)
    with jax.named_scope("drain"):
        for schedule, of_ways in zip(schedules, counts, strict=True):
            for way, (relayed, forwarded) in enumerate(of_ways):
                if schedule in slots:
                    slots[schedule].drain(way, relayed, forwarded)
