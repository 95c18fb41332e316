"""Two pipelines of hops and work inside a kernel: each hides the wire behind what the core does.

`gather_and_consume`: an all-gather in which every chunk of a block is consumed as it arrives,
while the chunks behind it are on the wire. On a ring of 4, with two chunks a block (' a half):

    step  receives and sends on            consumes meanwhile
    0     own > <                          own
    1     from the left, from the right    those two
    2     opposite ' from either side      the opposite

What came is sent on at once, or behind more of the own chunks (`Pace`).

`produce_and_scatter`: the same backwards. A device produces its term of a block just before the
hop that carries the block's sum, adds what has come, and sends it; the wire moves one sum while the
term of the next is being produced. The own block's term comes last:

    step  produces                         sends
    0     opposite ' for either side       those
    1     right's, left's                  with what came
    2     own                              -, adds what came from both sides

Both go both ways round (`groups.streams`): bytes and hops are those of `all_gather` and
`reduce_scatter`. The wire is hidden wherever a chunk takes longer to consume or produce than to
send; the other way round the work is hidden, but for one chunk's.

There is one call of `consume`, and one or two of `produce`, in the kernel's code: steps, chunks
and streams are loops, and whether a stream has anything to do is the trip count of a loop within.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import DType, Number, Ref, Semaphore, Step, buffer
from pallas_collectives.kernels import adding
from pallas_collectives.kernels.adding import SLOTS
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.kernels.machinery.blocks import Blocks
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Ring, Stream, wrap_step

WINDOW = 8  # receive semaphores of a chunk on a stream in a gather: 16 chunks leave room for them
ON_WIRE = 2  # messages under way each way round a ring, where a gather waits for the wire


class Streams:
    """The streams of a ring, by a number known only in the kernel."""

    def __init__(self, ring: Ring, streams: tuple[Stream, ...]) -> None:
        self.ring = ring
        self.count = len(streams)
        self.chunks = streams[0].chunks
        self.hops = max(stream.hops for stream in streams)
        self.near = streams[0].near  # hops of every chunk, on each stream
        self._streams = streams

    def of(self, stream: Number, value: Callable[[Stream], int]) -> Any:
        """A stream's value."""
        values = [value(each) for each in self._streams]
        return values[0] if len(set(values)) == 1 else jnp.where(stream == 0, *values)

    def hops_of(self, stream: Number, chunk: Number) -> Any:
        """How many hops a chunk travels on a stream."""
        start, stop = self.of(stream, lambda s: s.far[0]), self.of(stream, lambda s: s.far[1])
        is_far = (start <= chunk) & (chunk < stop)
        return self.of(stream, lambda each: each.near) + _as_int(is_far)

    def downstream(self, stream: Number, chunk: Number, distance: Number) -> Any:
        """The position `distance` hops downstream; negative: upstream, from where blocks come."""
        return self.ring_of(chunk).block(self._direction(stream) * distance)

    def ring_of(self, chunk: Number) -> Ring:
        """The ring that a chunk goes round: of two, each has half of those of either side."""
        if not self.ring.several:
            return self.ring
        return self.ring.of_number(ring_number(chunk, self.chunks))

    def channel(
        self,
        semaphores: channels.Semaphores,
        stream: Number,
        chunk: Number,
        slots: tuple[Ref, tuple[Number, ...]] | None = None,
    ) -> Channel:
        """That of a chunk on a stream."""
        index = stream, chunk
        return Channel(
            self.ring_of(chunk),
            self._direction(stream),
            semaphores,
            index,
            arrivals=self.hops_of(stream, chunk),
            longest=self.hops,
            slots=slots,
        )

    def for_each(self, active: Callable[[Number], Any], body: Callable[[Number], None]) -> None:
        """body(stream) for every stream that is active; where any is, the last or the first is."""
        first, last = (_as_int(active(i)) for i in (0, self.count - 1))
        stop = first if self.count == 1 else self.count - 1 + last
        lax.fori_loop(1 - first, stop, lambda stream, _: body(stream), None)

    def in_turn(self, index: Any) -> Any:
        """The chunk at an index in the order in which chunks are seen to.

        The opposite device's chunks come from either side: one from here, one from there.
        """
        half = self.chunks // 2
        if self.chunks < 2 or self._streams[0].far[1] in (0, self.chunks):
            return index
        return lax.div(index, np.int32(2)) + lax.rem(index, np.int32(2)) * half

    def furthest(self, stream: Number, index: Number) -> Any:
        """A stream's chunk at an index: those of the opposite device go before all others."""
        return lax.rem(self.of(stream, lambda each: each.far[0]) + index, np.int32(self.chunks))

    def _direction(self, stream: Number) -> Any:
        return self.of(stream, lambda each: each.direction)


def ring_number(chunk: Number, chunks: int) -> Any:
    """Of a core's two rings, the one that a chunk of so many goes round.

    In the order of `Streams.in_turn` 0, 1, 1, 0, ...: and half of those that come from either side.
    """
    half = chunks // 2
    return wrap_step(chunk + _as_int(chunk >= half) * (half + 1), 2) if half else 0


def _as_int(flag: Any) -> Any:
    return int(flag) if isinstance(flag, bool) else flag.astype(np.int32)


class Pace(NamedTuple):
    """When messages set out in a gather: own chunks in turn, then those of others as they came.

    Those on a wire together share it, and all come late; so the wire is to have the next when it
    is done with one. It carries as many while one chunk is consumed as `ratio` says, and others'
    messages come as fast as ours go. Where the wire takes longer, those that came wait behind own
    chunks, which are then not the last to arrive; where consuming does, none waits.
    """

    ahead: int  # messages that set out besides
    ratio: int = 16  # in sixteenths: the time to consume a chunk, in times of that on the wire
    on_wire: int = ON_WIRE  # messages under way each way, where it waits for the wire

    @classmethod
    def of(cls, consume: float, wire: float, rings: int = 1) -> "Pace":
        """From the seconds that a chunk takes to be consumed, and one after another on the wire."""
        return cls(rings, max(1, min(16 * 64, round(16 * consume / wire))), ON_WIRE * rings)

    def out(self, turn: Number, chunks: int, one_way: int) -> Any:
        """How many are out when the chunk of a turn is consumed; at turns below `chunks`, an own.

        From then on each turn is that of a message that came, one from either side. Messages from
        `one_way` on go to one side only, and take half the turns' time.
        """
        came = turn + 1 - chunks
        consumed = jnp.where(came > 0, chunks + 2 * came, turn + 1)
        by_time = self.ahead + (consumed * self.ratio + 15) // 16
        by_wire = came + self.on_wire
        by_wire += jnp.clip(by_wire - one_way, 0, self.on_wire)
        return jnp.minimum(jnp.maximum(by_time, by_wire), jnp.maximum(chunks, turn + 1))


class GatherScratch(NamedTuple):
    """What `gather_and_consume` takes beside its arrays."""

    copy_sems: Semaphore  # (chunks,): own; one copy each, waited for when the chunk is consumed
    semaphores: channels.Semaphores  # (streams, chunks); all sends of a chunk drain at the end

    @classmethod
    def of(cls, streams: tuple[Stream, ...]) -> "GatherScratch":
        """What to allocate."""
        index = len(streams), streams[0].chunks
        window = min(WINDOW, max(stream.hops for stream in streams))
        copies = pltpu.SemaphoreType.DMA((streams[0].chunks,))
        return cls(copies, channels.Semaphores.of(*index, window=window))


def gather_and_consume(
    ring: Ring,
    x_ref: Ref,  # own block: HBM
    gathered_ref: Ref,  # n blocks: HBM; all are filled
    scratch: GatherScratch,
    *,
    consume: Callable[[Number, Number], None],
    blocks: Blocks,
    streams: tuple[Stream, ...],
    prepare: Callable[[], None] = lambda: None,  # runs when the first sends are under way
    pace: Pace | None = None,  # by default half of the own chunks first, then one with each
) -> None:
    """Gathers all blocks, and calls consume(block, chunk) for each chunk that is in its place.

    Messages are those of `all_gather.pass_on`. Upstream may be steps ahead while we still consume;
    nothing in `gathered_ref` is written twice, so it cannot write over what is being consumed.
    """
    moving = Streams(ring, streams)
    chunks = moving.chunks
    size = np.int32(chunks)

    def channel(stream: Number, chunk: Number) -> Channel:
        return moving.channel(scratch.semaphores, stream, chunk)

    def place(number: Number, stream: Number, chunk: Number) -> Any:
        """Where we keep message `number` of those that we send."""
        return blocks.at(gathered_ref, moving.downstream(stream, chunk, -number), chunk)

    def own_copy(chunk: Number) -> Any:
        source, target = blocks.at(x_ref, chunk=chunk), blocks.at(gathered_ref, ring.me, chunk)
        return pltpu.make_async_copy(source, target, scratch.copy_sems.at[chunk])

    def set_out(message: Number) -> None:
        step, chunk = lax.div(message, size), moving.in_turn(lax.rem(message, size))

        def from_(source: Callable[[Any], Any]) -> None:
            def send(stream: Number) -> None:
                block = place(step, stream, chunk)
                channel(stream, chunk).send(source(block), block, step)

            moving.for_each(lambda stream: step < moving.hops_of(stream, chunk), send)

        groups.only_if(step == 0, lambda: from_(lambda _: blocks.at(x_ref, chunk=chunk)))
        groups.only_if(step > 0, lambda: from_(lambda block: block))

    own_pace = pace or Pace(ahead=max(1, chunks // 2))
    first = min(chunks, own_pace.ahead)

    def set_out_in_time(turn: Number) -> None:
        out = functools.partial(own_pace.out, chunks=chunks, one_way=moving.near * chunks)
        sync.for_each(jnp.where(turn == 0, first, out(turn - 1)), out(turn), set_out)

    def see_to_own(index: Number) -> None:
        own_copy(moving.in_turn(index)).wait()
        following = jnp.minimum(index + 1, chunks - 1)
        groups.only_if(index + 1 < chunks, lambda: own_copy(moving.in_turn(following)).start())

    def see_to(step: Step, index: Any) -> None:
        chunk = moving.in_turn(index)

        def arrives(stream: Number) -> Any:
            return (step > 0) & (step <= moving.hops_of(stream, chunk))

        def receive(stream: Number) -> None:
            coming = channel(stream, chunk)
            coming.receive(step - 1, place(step, stream, chunk))
            coming.release(step - 1)

        moving.for_each(arrives, receive)
        set_out_in_time(step * size + index)
        groups.only_if(step == 0, lambda: see_to_own(index))
        moving.for_each(
            lambda stream: arrives(stream) | ((step == 0) & (stream == 0)),
            lambda stream: consume(moving.downstream(stream, chunk, -step), chunk),
        )

    def drain(chunk: Number) -> None:
        own = blocks.at(x_ref, chunk=chunk)
        sync.for_each(
            0,
            moving.count,
            lambda stream: channel(stream, chunk).wait_sent(own, moving.hops_of(stream, chunk)),
        )

    with jax.named_scope("own_block"):
        sync.for_each(0, first, set_out)
        own_copy(moving.in_turn(np.int32(0))).start()
        prepare()
    with jax.named_scope("consume"):
        _for_each_chunk(moving, moving.hops + 1, see_to)
    with jax.named_scope("drain"):
        sync.for_each(0, moving.chunks, drain)


def scatter_scratch(streams: tuple[Stream, ...], blocks: Blocks, dtype: DType) -> adding.Scratch:
    """What to allocate for `produce_and_scatter`: a slot more than sums that arrive, to set out.

    Semaphores are each core's own; slots of all chunks lie in HBM, which cores share.
    """
    index = len(streams), streams[0].chunks
    slots = len(streams), blocks.chunks, SLOTS + 1, *blocks.chunk_shape
    semaphores = channels.Semaphores.of(*index, window=SLOTS)
    return adding.Scratch(buffer(slots, dtype), semaphores)


def produce_and_scatter(
    ring: Ring,
    o_ref: Ref,  # own block of the result: HBM
    scratch: adding.Scratch,  # see scatter_scratch: HBM
    *,
    produce: Callable[..., None],
    finish: Callable[..., None],
    blocks: Blocks,
    streams: tuple[Stream, ...],
    furthest_first: bool = False,
) -> None:
    """Sends each block's sum towards its owner, producing our terms on the way.

    produce(block, chunk, sum_ref, adds) adds our term to the sum in `sum_ref` if `adds`, and else
    puts it there. finish(chunk, target_ref, *sum_refs) writes the sum of our own term and of what
    has come.

    furthest_first: the opposite device's chunks set out before all others, and are back in time
    where the wire takes less than producing. Where it takes longer, they would fill it with sums
    that all come late.

    Messages are those of `adding.add_on_the_way` round a ring. Terms of step 0 set out from
    a slot that nobody else writes to. A chunk has one send under way at a time.
    """
    moving = Streams(ring, streams)

    def slots_of(stream: Number, chunk: Number) -> tuple[Ref, tuple[Number, ...]]:
        return scratch.slots_ref, (stream, blocks.first + chunk)

    def channel_of(stream: Number, chunk: Number) -> Channel:
        return moving.channel(scratch.semaphores, stream, chunk, slots_of(stream, chunk))

    def forward(step: Step, stream: Number, chunk: Number) -> None:
        channel, hops = channel_of(stream, chunk), moving.hops_of(stream, chunk)

        def take_over() -> None:
            summed = channel.slot(step - 1)
            channel.receive(step - 1, summed)
            channel.wait_sent(summed)  # at step - 1, for we have waited for those before it
            channel.release(step - 2)

        groups.only_if(step > 0, take_over)
        where = jnp.where(step == 0, SLOTS, wrap_step(jnp.maximum(step - 1, 0), SLOTS))
        slots_ref, index = slots_of(stream, chunk)
        held = slots_ref.at[(*index, where)]
        produce(moving.downstream(stream, chunk, hops - step), chunk, held, step > 0)
        channel.send(held, channel.slot(step), step)

    def see_to(step: Step, index: Any) -> None:
        def chunk(stream: Number) -> Any:
            return moving.furthest(stream, index) if furthest_first else moving.in_turn(index)

        moving.for_each(
            lambda stream: step < moving.hops_of(stream, chunk(stream)),
            lambda stream: forward(step, stream, chunk(stream)),
        )

    def finish_chunk(index: Number) -> None:
        chunk = moving.in_turn(index)
        target = blocks.at(o_ref, chunk=chunk)

        def last(stream: Number) -> Any:
            channel = channel_of(stream, chunk)
            arrived = channel.slot(channel.arrivals - 1)
            channel.receive(channel.arrivals - 1, arrived)
            return arrived

        if all(stream.near for stream in streams):
            finish(chunk, target, *(last(stream) for stream in range(moving.count)))
        else:  # two devices: each chunk comes on one stream
            moving.for_each(
                lambda stream: moving.hops_of(stream, chunk) > 0,
                lambda stream: finish(chunk, target, last(stream)),
            )

    def drain(chunk: Number) -> None:
        def sent(stream: Number) -> None:
            channel = channel_of(stream, chunk)
            channel.wait_sent(channel.slot(0))

        moving.for_each(lambda stream: moving.hops_of(stream, chunk) > 0, sent)

    with jax.named_scope("produce"):
        _for_each_chunk(moving, moving.hops, see_to)
    with jax.named_scope("finish"):
        sync.for_each(0, moving.chunks, finish_chunk)
        sync.for_each(0, moving.chunks, drain)


def _for_each_chunk(moving: Streams, steps: int, body: Callable[[Number, Number], None]) -> None:
    """body(step, index of a chunk), step by step."""
    sync.for_each(0, steps, lambda step: sync.for_each(0, moving.chunks, lambda i: body(step, i)))
