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

from pallas_collectives.annotations import Copy, DType, Flag, Number, Ref, Semaphore, Step, buffer
from pallas_collectives.kernels import reduce_scatter
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.kernels.machinery.blocks import Blocks
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.kernels.reduce_scatter import SLOTS
from pallas_collectives.kernels.streams import Streams
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Ring, Stream, wrap_step

WINDOW = 8  # receive semaphores of a chunk on a stream in a gather: 16 chunks leave room for them
ON_WIRE = 2  # messages under way each way round a ring, where a gather waits for the wire


class Pace(NamedTuple):
    """When messages set out in a gather: own chunks in turn, then those of others as they came.

    Those on a wire together share it, and all come late; so the wire is to have the next when it
    is done with one. It carries as many while one chunk is consumed as `ratio` says, and others'
    messages come as fast as ours go. Where the wire takes longer, those that came wait behind own
    chunks, which are then not the last to arrive, and each ring has a message more to go on with;
    where consuming does, none waits, and the first to come has the wire to itself.
    """

    ahead: int  # messages that set out besides
    ratio: int = 16  # in sixteenths: the time to consume a chunk, in times of that on the wire
    on_wire: int = ON_WIRE  # messages under way each way, where it waits for the wire

    @classmethod
    def of(cls, consume: float, wire: float, rings: int, wire_lags: bool) -> "Pace":
        """From the seconds that a chunk takes to be consumed, and one after another on the wire.

        wire_lags: whether the wire takes longer, all in all.
        """
        ratio = max(1, min(16 * 64, round(16 * consume / wire)))
        return cls(rings if wire_lags else rings - 1, ratio, ON_WIRE * rings)

    def out(self, turn: Number, chunks: int, one_way: int) -> Number:
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
    consume: Callable[..., None],
    fetch: Callable[[Number, Number, Any], None] | None = None,
    blocks: Blocks,
    streams: tuple[Stream, ...],
    prepare: Callable[[], None] = lambda: None,  # runs when the first sends are under way
    pace: Pace | None = None,  # by default half of the own chunks first, then one with each
) -> None:
    """Gathers all blocks, and calls consume(block, chunk) for each chunk that is in its place.

    Where there is a `fetch`: consume(block, chunk, own, follow) calls follow() before it is done,
    which waits for the next chunk and calls fetch(block, chunk, own) for that. Own chunks are then
    to be taken from `x_ref`.

    Messages are those of `all_gather.pass_on`. Upstream may be steps ahead while we still consume;
    nothing in `gathered_ref` is written twice, so it cannot write over what is being consumed.

    A chunk is waited for while the one before it is consumed, never earlier. Upstream does not wait
    for us meanwhile: it sends the chunk of turn t + 1 in its own turn t - 1 or before (`Pace.out`).
    """
    moving = Streams(ring, streams)
    chunks = moving.chunks
    size, turns = np.int32(chunks), (moving.hops + 1) * chunks

    def channel(stream: Number, chunk: Number) -> Channel:
        return moving.channel(scratch.semaphores, stream, chunk)

    def place(number: Number, stream: Number, chunk: Number) -> Ref:
        """Where we keep message `number` of those that we send."""
        return blocks.at(gathered_ref, moving.downstream(stream, chunk, -number), chunk)

    def own_copy(chunk: Number) -> Copy:
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
        if fetch is None:
            own_copy(moving.in_turn(index)).wait()
        following = jnp.minimum(index + 1, chunks - 1)
        groups.only_if(index + 1 < chunks, lambda: own_copy(moving.in_turn(following)).start())

    def arrives(step: Step, chunk: Number, stream: Number) -> Any:
        return (step > 0) & (step <= moving.hops_of(stream, chunk))

    def is_consumed(step: Step, chunk: Number, stream: Number) -> Any:
        return arrives(step, chunk, stream) | ((step == 0) & (stream == 0))

    def fetch_on(step: Step, chunk: Number, stream: Number) -> None:
        if fetch is not None:
            fetch(moving.downstream(stream, chunk, -step), chunk, step == 0)

    def make_ready(turn: Number) -> None:
        step, index = lax.div(turn, size), lax.rem(turn, size)
        chunk = moving.in_turn(index)

        def receive(stream: Number) -> None:
            coming = channel(stream, chunk)
            coming.receive(step - 1, place(step, stream, chunk))
            coming.release(step - 1)

        moving.for_each(functools.partial(arrives, step, chunk), receive)
        set_out_in_time(turn)
        groups.only_if(step == 0, lambda: see_to_own(index))
        fetch_on(step, chunk, moving.first(functools.partial(is_consumed, step, chunk)))

    def see_to(turn: Number) -> None:
        step = lax.div(turn, size)
        chunk = moving.in_turn(lax.rem(turn, size))
        active = functools.partial(is_consumed, step, chunk)

        def consume_on(stream: Number) -> None:
            block, another = moving.downstream(stream, chunk, -step), moving.follows(stream, active)

            def follow() -> None:
                groups.only_if(another, lambda: fetch_on(step, chunk, 1))
                groups.only_if(~another & (turn + 1 < turns), lambda: make_ready(turn + 1))

            if fetch is None:
                consume(block, chunk)
                follow()
            else:
                consume(block, chunk, step == 0, follow)

        moving.for_each(active, consume_on)

    def drain(chunk: Number) -> None:
        own = blocks.at(x_ref, chunk=chunk)
        if fetch is not None:
            own_copy(chunk).wait()
        sync.for_each(
            0,
            moving.count,
            lambda stream: channel(stream, chunk).wait_sent(own, moving.hops_of(stream, chunk)),
        )

    with jax.named_scope("own_block"):
        sync.for_each(0, first, set_out)
        own_copy(moving.in_turn(np.int32(0))).start()
        prepare()
        make_ready(np.int32(0))
    with jax.named_scope("consume"):
        sync.for_each(0, turns, see_to)
    with jax.named_scope("drain"):
        sync.for_each(0, moving.chunks, drain)


def scatter_scratch(
    streams: tuple[Stream, ...], blocks: Blocks, dtype: DType, cores: int = 1
) -> reduce_scatter.Scratch:
    """What to allocate for `produce_and_scatter`: a slot more than sums that arrive, to set out.

    Semaphores are each core's own; slots of all cores lie in HBM, which they share.
    """
    index = len(streams), blocks.chunks
    slots = cores, *index, SLOTS + 1, *blocks.chunk_shape
    semaphores = channels.Semaphores.of(*index, window=SLOTS)
    return reduce_scatter.Scratch(buffer(slots, dtype), semaphores)


def produce_and_scatter(
    ring: Ring,
    o_ref: Ref,  # own block of the result: HBM
    scratch: reduce_scatter.Scratch,  # see scatter_scratch: HBM
    *,
    produce: Callable[..., None],
    finish: Callable[..., None],
    fetch: Callable[..., None] | None = None,
    blocks: Blocks,
    streams: tuple[Stream, ...],
    furthest_first: bool = False,
) -> None:
    """Sends each block's sum towards its owner, producing our terms on the way.

    produce(block, chunk, sum_ref, adds) adds our term to the sum in `sum_ref` if `adds`, and else
    puts it there. finish(chunk, target_ref, *sum_refs) writes the sum of our own term and of what
    has come.

    Where there is a `fetch`, both take `follow` besides, and call follow() before they are done.
    That calls fetch(block, chunk) for what is produced next. It waits for nothing: the sum that the
    next term is added to may not have come.

    furthest_first: the opposite device's chunks set out before all others, and are back in time
    where the wire takes less than producing. Where it takes longer, they would fill it with sums
    that all come late.

    Messages are those of `reduce_scatter.add_on_the_way` round a ring. Terms of step 0 set out from
    a slot that nobody else writes to. A chunk has one send under way at a time.
    """
    moving = Streams(ring, streams)
    size, any_far = np.int32(moving.chunks), any(stream.far_chunks for stream in streams)
    at_once = max(s.far_chunks for s in streams) if furthest_first else moving.chunks * any_far
    turns = moving.near * moving.chunks + at_once  # those behind have nothing to send

    def slots_of(stream: Number, chunk: Number) -> tuple[Ref, tuple[Number, ...]]:
        return scratch.slots_ref, (0 if ring.core is None else ring.core, stream, chunk)

    def channel_of(stream: Number, chunk: Number) -> Channel:
        return moving.channel(scratch.semaphores, stream, chunk, slots_of(stream, chunk))

    def chunk_of(turn: Number, stream: Number) -> Number:
        index = lax.rem(turn, size)
        return moving.furthest(stream, index) if furthest_first else moving.in_turn(index)

    def sends(turn: Number, stream: Number) -> Flag:
        return lax.div(turn, size) < moving.hops_of(stream, chunk_of(turn, stream))

    def part_of(turn: Number, stream: Number) -> tuple[Any, Any]:
        """The block and chunk for which a term is produced."""
        step, chunk = lax.div(turn, size), chunk_of(turn, stream)
        return moving.downstream(stream, chunk, moving.hops_of(stream, chunk) - step), chunk

    def fetch_first(turn: Number) -> None:
        """Fetches what the first stream that sends at a turn needs."""
        if fetch is not None:
            fetch(*part_of(turn, moving.first(functools.partial(sends, turn))))

    def fetch_own(index: Number) -> None:
        if fetch is not None:
            fetch(ring.me, moving.in_turn(index))

    def forward(turn: Number, stream: Number) -> None:
        step, (block, chunk) = lax.div(turn, size), part_of(turn, stream)
        channel = channel_of(stream, chunk)

        def take_over() -> None:
            summed = channel.slot(step - 1)
            channel.receive(step - 1, summed)
            channel.wait_sent(summed)  # at step - 1, for we have waited for those before it
            channel.release(step - 2)

        def follow() -> None:
            assert fetch is not None
            another = moving.follows(stream, functools.partial(sends, turn))
            is_last, then = turn + 1 == turns, jnp.minimum(turn + 1, turns - 1)
            groups.only_if(another, lambda: fetch(*part_of(turn, 1)))
            groups.only_if(~another & ~is_last, lambda: fetch_first(then))
            groups.only_if(~another & is_last, lambda: fetch_own(np.int32(0)))

        groups.only_if(step > 0, take_over)
        where = jnp.where(step == 0, SLOTS, wrap_step(jnp.maximum(step - 1, 0), SLOTS))
        slots_ref, index = slots_of(stream, chunk)
        held = slots_ref.at[(*index, where)]
        produce(block, chunk, held, step > 0, *([] if fetch is None else [follow]))
        channel.send(held, channel.slot(step), step)

    def finish_chunk(index: Number) -> None:
        chunk = moving.in_turn(index)
        target = blocks.at(o_ref, chunk=chunk)

        def last(stream: Number) -> Ref:
            channel = channel_of(stream, chunk)
            arrived = channel.slot(channel.arrivals - 1)
            channel.receive(channel.arrivals - 1, arrived)
            return arrived

        def follow() -> None:
            following = jnp.minimum(index + 1, size - 1)
            groups.only_if(index + 1 < size, lambda: fetch_own(following))

        then = [] if fetch is None else [follow]
        if all(stream.near for stream in streams):
            finish(chunk, target, *(last(stream) for stream in range(moving.count)), *then)
        else:  # two devices: each chunk comes on one stream
            moving.for_each(
                lambda stream: moving.hops_of(stream, chunk) > 0,
                lambda stream: finish(chunk, target, last(stream), *then),
            )

    def drain(chunk: Number) -> None:
        def sent(stream: Number) -> None:
            channel = channel_of(stream, chunk)
            channel.wait_sent(channel.slot(0))

        moving.for_each(lambda stream: moving.hops_of(stream, chunk) > 0, sent)

    def see_to(turn: Number) -> None:
        moving.for_each(functools.partial(sends, turn), functools.partial(forward, turn))

    with jax.named_scope("produce"):
        fetch_first(np.int32(0))
        sync.for_each(0, turns, see_to)
    with jax.named_scope("finish"):
        sync.for_each(0, moving.chunks, finish_chunk)
        sync.for_each(0, moving.chunks, drain)
