"""All-to-all: block p of every device goes to device p, and lies there in the order of senders.

Direct. Every device sends to all others at once, device p first to p+1, so that at no time two
begin with the same receiver. Large blocks go in parts, receiver by receiver, so that the sends
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
with the operand. On large rings the distances are served in waves, the farthest first.

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
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import launch, relay, sync, topology
from pallas_collectives.kernels.blocks import Blocks
from pallas_collectives.kernels.topology import LEFT, RIGHT, Group, Ring, wrap

CHUNK_BYTES = 1 << 20
SLOT_BYTES = 16 << 20
MAX_WIDTH = 16  # a message on its way takes four semaphores per direction; a core has hundreds
MAX_PARTS = 8  # of a block sent directly: enough for the links to interleave


def direct(
    x: jax.Array, group: Group, *, split_axis: int, concat_axis: int, vmem: bool, interpret: Any
) -> jax.Array:
    """Exchanges blocks, each device writing to all others.

    A block must be `sliceable` along either axis.
    """
    layout = _Layout.of(x, group.size, split_axis, concat_axis, chunk_parts=1, most=MAX_PARTS)
    return launch.call(
        functools.partial(_direct_kernel, layout=layout),
        group,
        x,
        out_shape=layout.result,
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 3,
        barrier="everyone",
        name="all_to_all_direct",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=(group.size - 1) * layout.block_bytes,
    )


def ring(
    x: jax.Array, group: Group, *, split_axis: int, concat_axis: int, vmem: bool, interpret: Any
) -> jax.Array:
    """Exchanges blocks over a ring; a block must be `sliceable` along either axis."""
    layout = _Layout.of(x, group.size, split_axis, concat_axis, chunk_parts=2)
    trains = _trains(layout, group.size)
    return _passed_on(x, group, layout, trains, on_line=False, vmem=vmem, interpret=interpret)


def line(
    x: jax.Array, group: Group, *, split_axis: int, concat_axis: int, vmem: bool, interpret: Any
) -> jax.Array:
    """Exchanges blocks over a line of at most `catalogue.LONGEST_LINE` devices, as `ring`."""
    chunk = min(CHUNK_BYTES, relay.line_message_bytes(group.size))
    layout = _Layout.of(x, group.size, split_axis, concat_axis, chunk_parts=1, chunk_bytes=chunk)
    farthest = group.size - 1
    trains = (_Train((RIGHT, LEFT), 1, farthest, farthest, layout.source.parts),)
    return _passed_on(x, group, layout, trains, on_line=True, vmem=vmem, interpret=interpret)


def _passed_on(
    x: jax.Array,
    group: Group,
    layout: "_Layout",
    trains: tuple["_Train", ...],
    *,
    on_line: bool,
    vmem: bool,
    interpret: Any,
) -> jax.Array:
    relaying = [train for train in trains if train.relays]
    return launch.call(
        functools.partial(_ring_kernel, layout=layout, trains=trains, on_line=on_line),
        group,
        x,
        out_shape=layout.result,
        buffers=[
            jax.ShapeDtypeStruct((*train.slots, *train.cut(layout.source).part_shape), x.dtype)
            for train in relaying
        ],
        scratch_shapes=[
            *[pltpu.SemaphoreType.DMA] * 3,
            *(semaphores for train in relaying for semaphores in train.semaphores),
        ],
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
        chunk_parts: int,
        chunk_bytes: int = CHUNK_BYTES,
        most: int = 1 << 30,
    ) -> "_Layout":
        """Blocks in `chunk_parts` parts for each chunk, but no more than `most`, if they can be."""
        block = list(x.shape)
        block[split_axis] //= n
        block_bytes = x.nbytes // n
        parts = min(most, chunk_parts * -(-block_bytes // chunk_bytes))
        source = Blocks.of(tuple(block), split_axis, x.dtype, parts)
        target = dataclasses.replace(source, axis=concat_axis)
        block[concat_axis] *= n
        return cls(source, target, jax.ShapeDtypeStruct(tuple(block), x.dtype), block_bytes)


@dataclasses.dataclass(frozen=True)
class _Train(relay.Train):
    """Attributes besides:
    parts: message `chunk` of lane i is part `chunk` of so many; if `halved`, part 2 * chunk + i.
    halved: each direction carries its half of a chunk.
    """

    parts: int
    halved: bool = False

    def cut(self, blocks: Blocks) -> Blocks:
        """Blocks whose parts are messages."""
        return dataclasses.replace(blocks, parts=self.parts)

    def message(self, blocks: Blocks, ref: Any, block: Any, chunk: Any, lane: int) -> Any:
        """The part of a block that travels as one message."""
        return self.cut(blocks).at(ref, block, 2 * chunk + lane if self.halved else chunk)


def _trains(layout: _Layout, n: int) -> tuple[_Train, ...]:
    """The train for all distances that have a shorter side, then one for n/2 if n is even."""
    parts = layout.source.parts
    halved = parts % 2 == 0
    chunks = parts // 2 if halved else parts
    farthest = (n - 1) // 2
    fitting = SLOT_BYTES * chunks // (4 * layout.block_bytes)
    width = max(1, min(farthest, fitting, MAX_WIDTH))
    trains = []
    if farthest:
        trains.append(_Train((RIGHT, LEFT), 1, farthest, width, chunks))
    if n % 2 == 0:
        directions = (RIGHT, LEFT) if halved else (RIGHT,)
        trains.append(_Train(directions, n // 2, n // 2, 1, parts, halved))
    return tuple(trains)


def _direct_kernel(
    ring: Ring,
    x_ref: Any,  # n blocks along the split axis: HBM or VMEM
    o_ref: Any,  # n blocks along the concat axis: HBM or VMEM
    copy_sem: Any,  # own; started and waited for once
    send_sem: Any,  # own; the bytes of n-1 blocks
    recv_sem: Any,  # the bytes of n-1 blocks, one from each other device
    *,
    layout: _Layout,
) -> None:
    # One receive semaphore serves all: nothing is read before every block has arrived.
    n = ring.size
    own_place = layout.target.at(o_ref, ring.me)

    def push(part: Any, distance: Any) -> None:
        receiver = wrap(ring.me + distance, n)
        source = layout.source.at(x_ref, receiver, part)
        target = layout.target.at(o_ref, ring.me, part)
        sync.remote_copy(source, target, send_sem, recv_sem, ring.device_id(receiver))

    sync.barrier_with_everyone(ring)
    with jax.named_scope("push"):
        sync.for_each(
            0,
            layout.source.parts,
            lambda part: sync.for_each(1, n, functools.partial(push, part)),
        )
        own_block = layout.source.at(x_ref, ring.me)
        own_copy = pltpu.make_async_copy(own_block, own_place, copy_sem)
        own_copy.start()
    with jax.named_scope("drain"):
        sync.wait(recv_sem, own_place, times=n - 1)
        sync.wait(send_sem, own_block, times=n - 1)
        own_copy.wait()


def _ring_kernel(
    ring: Ring,
    x_ref: Any,  # n blocks along the split axis: HBM or VMEM
    o_ref: Any,  # n blocks along the concat axis: HBM or VMEM
    *scratch: Any,  # slots for each train that relays, the three below, semaphores for its slots
    layout: _Layout,
    trains: tuple[_Train, ...],
    on_line: bool,
) -> None:
    relaying = [train for train in trains if train.relays]
    buffers, scratch = scratch[: len(relaying)], scratch[len(relaying) :]
    copy_sem, own_sem, final_sem, *slot_sems = scratch
    # copy_sem: own; started and waited for once
    # own_sem: own; what leaves x_ref, n-1 blocks in all, drained at the end
    # final_sem: what comes to stay, n-1 blocks in all. One semaphore for all of them and both
    #   directions, as nothing of it is read before all has come.
    slots = {
        train: relay.Slots(ring, train, buffers[i], *slot_sems[3 * i : 3 * i + 3])
        for i, train in enumerate(relaying)
    }

    def move(
        train: _Train, chunk: Any, hop: Any, distance: Any, counts: Any, first: bool, last: bool
    ) -> Any:
        """One hop of the message for a distance; `counts`: for each lane, relayed and forwarded."""

        def pass_on(lane: int, direction: int, relayed: Any, forwarded: Any) -> None:
            if first:
                receiver = ring.block(direction * distance)
                source = train.message(layout.source, x_ref, receiver, chunk, lane)
                send_sem = own_sem
            else:
                source, send_sem = slots[train].arrived(lane, forwarded)
            if last:
                sender = ring.block(-direction * (hop - 1))
                target = train.message(layout.target, o_ref, sender, chunk, lane)
                recv_sem = final_sem
            else:
                target, recv_sem = slots[train].free(lane, relayed)
            sync.remote_copy(source, target, send_sem, recv_sem, ring.peer(direction))

        after = []
        for lane, (relayed, forwarded) in enumerate(counts):
            direction, one = train.directions[lane], np.int32(1)
            go = functools.partial(pass_on, lane, direction, relayed, forwarded)
            if on_line:  # its sender, and its receiver, are there
                there = relay.on_line(ring, direction, hop, distance)
                topology.only_if(there, go)
                one = there.astype(np.int32)
            else:
                go()
            after.append((relayed + one * (not last), forwarded + one * (not first)))
        return tuple(after)

    if on_line:
        sync.barrier_along_line(ring)
    else:
        sync.barrier_with_neighbours(ring)
    own_place = layout.target.at(o_ref, ring.me)
    own_copy = pltpu.make_async_copy(layout.source.at(x_ref, ring.me), own_place, copy_sem)
    own_copy.start()
    chunks = np.int32(trains[0].parts // (1 + trains[0].halved))
    with jax.named_scope("pass_on"):
        zero = (np.int32(0), np.int32(0))
        counts: list[Any] = [(zero,) * len(train.directions) for train in trains]
        counts = relay.for_each_move(trains, chunks, move, counts)
    with jax.named_scope("drain"):
        for train, of_lanes in zip(trains, counts, strict=True):
            if train.relays:
                for lane, (relayed, forwarded) in enumerate(of_lanes):
                    slots[train].drain(lane, relayed, forwarded)
        sync.wait(final_sem, own_place, times=ring.size - 1)
        sync.wait(own_sem, own_place, times=ring.size - 1)
        own_copy.wait()
