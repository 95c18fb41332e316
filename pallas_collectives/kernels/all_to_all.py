"""All-to-all: block p of every device goes to device p, and lies there in the order of senders.

Direct. Every device sends to all others at once, device p first to p+1, so that at no time two
begin with the same receiver. Large blocks go in pieces, receiver by receiver, so that the sends
share the links instead of queueing behind one another.

Ring. For chips and wires where only neighbours are wise. A block for a device d positions away
takes d hops, by the shorter side; on an even ring the opposite device's block goes half each way.
What every device passes to its right in each hop (to the left: the mirror image):

    hop  dev0       dev1       dev2       dev3       dev4       sender>receiver
    1    0>2 0>1    1>3 1>2    2>4 2>3    3>0 3>4    4>1 4>0
    2    4>1        0>2        1>3        2>4        3>0

A block that has further to go waits in a slot of its host and is sent on from there. A slot is
written again only under a credit, which the host gives once the block has left. Blocks are cut into
chunks of 1 MiB where they can be, and the chunks follow one another without a pause: the slots do
not grow with the operand. On large rings the distances are served in waves, the farthest first.

             hops        bytes per link and direction                   buffers
    direct   1           as the wires lie                               none
    ring     floor(n/2)  n^2/8 blocks (n even), (n^2-1)/8 (n odd)       at most 18 MiB

The buffers hold 4 * width + 2 chunks (two less on an odd ring), where `width` messages, one or
more, travel together each way. Where no dimension can be cut into that many whole tiles, chunks are
larger, and with them the buffers. A block that can be cut nowhere is one chunk; on an even ring the
opposite device's then goes to the right only, which adds n/4 blocks to the links that way.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import launch, sync
from pallas_collectives.kernels.blocks import Blocks, sliceable
from pallas_collectives.kernels.topology import LEFT, RIGHT, Group, Ring, wrap

CHUNK_BYTES = 1 << 20
SLOT_BYTES = 16 << 20
MAX_WIDTH = 16  # a message on its way takes four semaphores per direction; a core has hundreds
MAX_PIECES = 8  # of a block sent directly: enough for the links to interleave


def direct(
    x: jax.Array, group: Group, *, split_axis: int, concat_axis: int, vmem: bool, interpret: Any
) -> jax.Array:
    """Exchanges blocks, each device writing to all others.

    A block must be `sliceable` along either axis.
    """
    layout = _Layout.of(x, group.size, split_axis, concat_axis)
    wanted = min(MAX_PIECES, -(-layout.block_bytes // CHUNK_BYTES))
    pieces = _Pieces.of(layout.source.shape, x.dtype, wanted)
    return launch.call(
        functools.partial(_direct_kernel, layout=layout, pieces=pieces),
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
    layout = _Layout.of(x, group.size, split_axis, concat_axis)
    trains = _trains(layout, group.size, x.dtype)
    relaying = [train for train in trains if train.relays]
    return launch.call(
        functools.partial(_ring_kernel, layout=layout, trains=trains),
        group,
        x,
        out_shape=layout.result,
        buffers=[
            jax.ShapeDtypeStruct((*train.slots, *train.pieces.shape), x.dtype) for train in relaying
        ],
        scratch_shapes=[
            *[pltpu.SemaphoreType.DMA] * 3,
            *(semaphores for train in relaying for semaphores in train.semaphores),
        ],
        barrier="neighbours",
        name="all_to_all_ring",
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
    def of(cls, x: jax.Array, n: int, split_axis: int, concat_axis: int) -> "_Layout":
        block = list(x.shape)
        block[split_axis] //= n
        source = Blocks.of(tuple(block), split_axis, x.dtype)
        target = Blocks.of(tuple(block), concat_axis, x.dtype)
        block[concat_axis] *= n
        result = jax.ShapeDtypeStruct(tuple(block), x.dtype)
        return cls(source, target, result, source.nbytes(x.dtype))


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """A block cut into `count` equal pieces along `dim`."""

    block: tuple[int, ...]
    dim: int
    count: int

    @classmethod
    def of(cls, block: tuple[int, ...], dtype: Any, wanted: int) -> "_Pieces":
        """A power of two of pieces: `wanted` or a few more, or as many as tiles allow."""

        def most(dim: int) -> int:
            count, size = 1, block[dim]
            while count < wanted and size % 2 == 0 and sliceable(size // 2, dim, len(block), dtype):
                count, size = 2 * count, size // 2
            return count

        dim = max(range(len(block)), key=most)
        return cls(block, dim, most(dim))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one piece."""
        size = self.block[self.dim] // self.count
        return (*self.block[: self.dim], size, *self.block[self.dim + 1 :])

    def at(self, block_ref: Any, index: Any) -> Any:
        """One piece of a block."""
        if self.count == 1:
            return block_ref
        size = self.shape[self.dim]
        start = index * size if isinstance(index, int) else pl.multiple_of(index * size, size)
        return block_ref.at[(slice(None),) * self.dim + (pl.ds(start, size),)]


@dataclasses.dataclass(frozen=True)
class _Train:
    """Messages that go round a ring in a fixed order, the same in each of `directions`.

    Attributes:
      directions: which ways.
      nearest, farthest: the distances served. For each chunk there is a message per distance.
      width: how many distances are served together.
      chunks: how many parts of a block go one after the other.
      pieces: message `chunk` of lane i is piece `chunk`; if `halved`, piece 2 * chunk + i.
      halved: each direction carries its half of a chunk.
    """

    directions: tuple[int, ...]
    nearest: int
    farthest: int
    width: int
    chunks: int
    pieces: _Pieces
    halved: bool = False

    @property
    def relays(self) -> int:
        """How many messages each device takes in, in each direction, to send them on."""
        hops_before_last = range(self.nearest - 1, self.farthest)
        return self.chunks * sum(hops_before_last)

    @property
    def slots(self) -> tuple[int, int]:
        """Slots: (directions, slots each). Half of them fill while the other half empties."""
        return len(self.directions), 2 * self.width

    @property
    def semaphores(self) -> tuple[Any, Any, Any]:
        """The semaphores of its `_Slots`."""
        dma = pltpu.SemaphoreType.DMA(self.slots)
        return dma, dma, pltpu.SemaphoreType.REGULAR(self.slots[:1])

    @property
    def waves(self) -> int:
        """How many times `width` distances it takes to serve all."""
        return -(-(self.farthest - self.nearest + 1) // self.width)

    def message(self, block_ref: Any, chunk: Any, lane: int) -> Any:
        """The part of a block that travels as one message."""
        return self.pieces.at(block_ref, 2 * chunk + lane if self.halved else chunk)


def _trains(layout: _Layout, n: int, dtype: Any) -> tuple[_Train, ...]:
    """The train for all distances that have a shorter side, then one for n/2 if n is even."""
    block = layout.source.shape
    pieces = _Pieces.of(block, dtype, 2 * -(-layout.block_bytes // CHUNK_BYTES))
    halved = pieces.count > 1
    chunks = pieces.count // 2 if halved else 1
    whole = _Pieces(block, pieces.dim, chunks)
    farthest = (n - 1) // 2
    fitting = SLOT_BYTES * chunks // (4 * layout.block_bytes)
    width = max(1, min(farthest, fitting, MAX_WIDTH))
    trains = []
    if farthest:
        trains.append(_Train((RIGHT, LEFT), 1, farthest, width, chunks, whole))
    if n % 2 == 0:
        directions = (RIGHT, LEFT) if halved else (RIGHT,)
        trains.append(_Train(directions, n // 2, n // 2, 1, chunks, pieces, halved))
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
    pieces: _Pieces,
) -> None:
    # One receive semaphore serves all: nothing is read before every block has arrived.
    n = ring.size
    own_place = layout.target.at(o_ref, ring.me)

    def push(piece: Any, distance: Any) -> None:
        receiver = wrap(ring.me + distance, n)
        source = pieces.at(layout.source.at(x_ref, receiver), piece)
        target = pieces.at(own_place, piece)
        sync.remote_copy(source, target, send_sem, recv_sem, ring.device_id(receiver))

    sync.barrier_with_everyone(ring)
    with jax.named_scope("push"):
        sync.for_each(
            0, pieces.count, lambda piece: sync.for_each(1, n, functools.partial(push, piece))
        )
        own_block = layout.source.at(x_ref, ring.me)
        own_copy = pltpu.make_async_copy(own_block, own_place, copy_sem)
        own_copy.start()
    with jax.named_scope("drain"):
        sync.wait(recv_sem, own_place, times=n - 1)
        sync.wait(send_sem, own_block, times=n - 1)
        own_copy.wait()


class _Slots:
    """The slots in which messages of one train wait, here and at our neighbours.

    Messages are numbered in the order in which they come, which is that in which they are sent on,
    and the same on every device; number k lies in slot k modulo their number, 2 * width.
    """

    def __init__(
        self,
        ring: Ring,
        train: _Train,
        slots_ref: Any,  # (directions, slots, *message): written by the neighbour upstream
        # (directions, slots): own; a message has left its slot
        send_sems: Any,
        # (directions, slots): a message has come into its slot. Each slot has its own: the
        #   neighbour upstream may have two on their way, and the later could pass for the earlier.
        recv_sems: Any,
        # (directions,): signalled by the neighbour downstream when it has emptied the slot that is
        #   filled next. Slots are emptied in the order in which they are filled, so k credits mean
        #   that the first k are free, whichever signal came first. The last get none: ends at 0.
        credit_sems: Any,
    ) -> None:
        self._ring, self._train = ring, train
        self._slots_ref, self._send_sems, self._recv_sems = slots_ref, send_sems, recv_sems
        self._credit_sems = credit_sems

    def free(self, lane: int, number: Any) -> tuple[Any, Any]:
        """Where our message `number` goes at our neighbour downstream, as soon as it may.

        Without the wait we could be a whole round of slots ahead of that neighbour, and write over
        a message that it has not sent on.
        """
        credit_sem = self._credit_sems.at[lane]
        pl.when(number >= self._train.slots[1])(lambda: pl.semaphore_wait(credit_sem, 1))
        at = self._at(lane, number)
        return self._slots_ref.at[at], self._recv_sems.at[at]

    def arrived(self, lane: int, number: Any) -> tuple[Any, Any]:
        """Where message `number` lies, once it is here; gives a credit for one that has left."""
        upstream = self._ring.peer(-self._train.directions[lane])
        left = number - self._train.width

        @pl.when(left >= 0)
        def _() -> None:
            self.wait_until_left(lane, left)
            pl.when(left + self._train.slots[1] < self._train.relays)(
                lambda: pl.semaphore_signal(self._credit_sems.at[lane], 1, device_id=upstream)
            )

        at = self._at(lane, number)
        sync.wait(self._recv_sems.at[at], self._slots_ref.at[at])
        return self._slots_ref.at[at], self._send_sems.at[at]

    def wait_until_left(self, lane: int, number: Any) -> None:
        """Returns when message `number` has left its slot."""
        at = self._at(lane, number)
        sync.wait(self._send_sems.at[at], self._slots_ref.at[at])

    def _at(self, lane: int, number: Any) -> tuple[int, Any]:
        return lane, lax.rem(number, np.int32(self._train.slots[1]))


def _ring_kernel(
    ring: Ring,
    x_ref: Any,  # n blocks along the split axis: HBM or VMEM
    o_ref: Any,  # n blocks along the concat axis: HBM or VMEM
    *scratch: Any,  # slots for each train that relays, the three below, semaphores for its slots
    layout: _Layout,
    trains: tuple[_Train, ...],
) -> None:
    relaying = [train for train in trains if train.relays]
    buffers, scratch = scratch[: len(relaying)], scratch[len(relaying) :]
    copy_sem, own_sem, final_sem, *slot_sems = scratch
    # copy_sem: own; started and waited for once
    # own_sem: own; what leaves x_ref, n-1 blocks in all, drained at the end
    # final_sem: what comes to stay, n-1 blocks in all. One semaphore for all of them and both
    #   directions, as nothing of it is read before all has come.
    slots = {
        train: _Slots(ring, train, buffers[i], *slot_sems[3 * i : 3 * i + 3])
        for i, train in enumerate(relaying)
    }

    def move(
        train: _Train, chunk: Any, hop: Any, distance: Any, counts: Any, first: bool, last: bool
    ) -> Any:
        """One hop of the message for a distance; `counts` are those relayed and forwarded."""
        # No device waits for ever. All make the same moves in the same order, and what one waits
        # for in a move, its neighbours have sent or given before that move, or give in it before
        # they wait themselves. For no more than `width` messages lie in slots at a time: message
        # k may take the slot of message k - 2 * width once k - width is being sent on (`arrived`),
        # and that is before, or in, the move that sends k.
        relayed, forwarded = counts
        for lane, direction in enumerate(train.directions):
            if first:
                block = layout.source.at(x_ref, wrap(ring.me + direction * distance, ring.size))
                source, send_sem = train.message(block, chunk, lane), own_sem
            else:
                source, send_sem = slots[train].arrived(lane, forwarded)
            if last:
                sender = wrap(ring.me - direction * (hop - 1), ring.size)
                block = layout.target.at(o_ref, sender)
                target, recv_sem = train.message(block, chunk, lane), final_sem
            else:
                target, recv_sem = slots[train].free(lane, relayed)
            sync.remote_copy(source, target, send_sem, recv_sem, ring.peer(direction))
        return relayed + np.int32(not last), forwarded + np.int32(not first)

    def hop_of_wave(
        train: _Train, chunk: Any, high: Any, hop: Any, counts: Any, first: bool
    ) -> Any:
        """One hop of the messages for distances high, high - 1, ...: `width` of them, or fewer."""
        low = lax.max(high - np.int32(train.width), np.int32(train.nearest - 1))
        if train.relays:
            counts = lax.fori_loop(
                np.int32(0),
                high - lax.max(low, hop),
                lambda i, c: move(train, chunk, hop, high - i, c, first, last=False),
                counts,
            )
        elif not first:
            return counts
        return lax.fori_loop(  # the message that is there with this hop, if the wave has one
            lax.max(low + 1, hop),
            lax.min(high, hop) + 1,
            lambda distance, c: move(train, chunk, hop, distance, c, first, last=True),
            counts,
        )

    def wave(chunk: Any, highs: list[Any], counts: list[Any]) -> list[Any]:
        """The whole way of one wave of each train."""

        def hop_of_all(hop: Any, counts: list[Any], first: bool) -> list[Any]:
            return [
                hop_of_wave(train, chunk, high, hop, c, first)
                for train, high, c in zip(trains, highs, counts, strict=False)
            ]

        counts = hop_of_all(np.int32(1), counts, True)
        forward = functools.partial(hop_of_all, first=False)
        return lax.fori_loop(np.int32(2), highs[-1] + 1, forward, counts)

    def pass_chunk(chunk: Any, counts: list[Any]) -> list[Any]:
        near, farthest = trains[0], [np.int32(train.farthest) for train in trains]
        counts = wave(chunk, farthest, counts)
        near_counts = lax.fori_loop(
            np.int32(1),
            np.int32(near.waves),
            lambda i, c: wave(chunk, [farthest[0] - i * np.int32(near.width)], c),
            counts[:1],
        )
        return [*near_counts, *counts[1:]]

    sync.barrier_with_neighbours(ring)
    own_place = layout.target.at(o_ref, ring.me)
    own_copy = pltpu.make_async_copy(layout.source.at(x_ref, ring.me), own_place, copy_sem)
    own_copy.start()
    with jax.named_scope("pass_on"):
        start = [(np.int32(0), np.int32(0))] * len(trains)
        lax.fori_loop(np.int32(0), np.int32(trains[0].chunks), pass_chunk, start)
    with jax.named_scope("drain"):
        for train in relaying:
            last_ones = max(0, train.relays - train.width), train.relays
            for lane in range(len(train.directions)):
                sync.for_each(*last_ones, functools.partial(slots[train].wait_until_left, lane))
        sync.wait(final_sem, own_place, times=ring.size - 1)
        sync.wait(own_sem, own_place, times=ring.size - 1)
        own_copy.wait()
