"""Reduce-scatter: device p ends with the sum (max, min) of everyone's block p.

The all-gather backwards. The sum of a block sets out at the device furthest from its owner and on
its way takes up one term at each device, which adds its own before it passes the sum on. Both ways
round, the owner gets two sums, one from each side, and adds them to its own term:

    step  dev0  dev1  dev2  dev3      terms in the sums under way to a device, its own included,
    0     [11]  [11]  [11]  [11]      for both chunks of its block (bidirectional)
    1     [33]  [33]  [33]  [33]
    2     [44]  [44]  [44]  [44]

On a line, whose first and last share no link, sums set out at its ends, the furthest owner's
first, so that both sides' reach their owners in the last step. For small blocks see `one_hop`.

                     steps       bytes sent per link and direction    scratch
    unidirectional   n-1         (n-1) blocks to the right, 0 left    3 blocks
    bidirectional    floor(n/2)  (n-1)/2 blocks                       6 blocks, 16 MiB at the most
    line             n-1         at most n-1 blocks                   6 blocks, 16 MiB at the most

The scratch is three blocks for each direction, however many devices there are. Both ways round a
ring of three or more it lies in VMEM, as over a torus of one axis (`torus.reduce_scatter`); if it
would be more than 16 MiB, blocks go by in sections, each half n-1 hops one way round, and so they
do along a line. Else, and on SparseCores, it lies where the operands do, with at most 2 MiB of VMEM
for the tiles being added. A block goes in chunks: while one is being added the others are on the
wire.

Order and rounding. The sum is own + (from the left) + (from the right), each side's own sum ordered
along the ring: the same on every run. Within a device terms are added in float32 (integers in 32
bits); what goes on the wire is rounded to the operand's dtype once per hop.
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
from jax.experimental import pallas as pl

from pallas_collectives.annotations import DType, Interpret, Number, Ref, Step, buffer
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import launch, sparsecore
from pallas_collectives.kernels.machinery.blocks import Blocks, Chunking, block_shape
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.kernels.machinery.combine import combine
from pallas_collectives.kernels.torus import reduce_scatter as torus
from pallas_collectives.kernels.torus import sections
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Group, Ring, Stream

# Slots per stream for sums that arrive. One is being added to and sent on from, one is being
# received into; the third lets upstream start before our send from the first has ended.
SLOTS = 3

# Sends of a stream under way at a time. More would share the wire: all chunks would come late and
# together, and be added when the last is there, instead of each while the next comes.
IN_FLIGHT = 3

# A block of k * k * UNIT_BYTES goes in k chunks, up to eight: by the replay no other rule did
# better on all of v5e, v5p, v6e and 7x at 192 KiB to 16 MiB. Where it is added in VMEM it goes in
# four, or five where it cannot be quartered.
UNIT_BYTES = 64 << 10
MOST_CHUNKS = 8
MOST_CHUNKS_IN_VMEM = 5
CHUNKS_OF_A_SUBCORE = 2  # with five semaphores each, both ways; v5p's have 27


class Scratch(NamedTuple):
    """What `add_on_the_way` takes beside its arrays."""

    slots_ref: Ref  # (streams, chunks, SLOTS, one chunk): HBM or VMEM; written by upstream
    semaphores: channels.Semaphores  # (streams, chunks)

    @classmethod
    def of(cls, streams: tuple[Stream, ...], blocks: Blocks, dtype: DType) -> "Scratch":
        """What to allocate."""
        index = len(streams), blocks.chunks
        slots = buffer((*index, SLOTS, *blocks.chunk_shape), dtype)
        return cls(slots, channels.Semaphores.of(*index, window=SLOTS))


def ring(
    x: jax.Array,
    group: Group,
    *,
    axis: int,
    op: str,
    bidirectional: bool,
    vmem: bool,
    interpret: Interpret,
    **packed: Any,
) -> jax.Array:
    """Reduces x over the group and leaves each device its block along `axis`.

    Blocks must be `sliceable` along `axis` and whole tiles in their last two dimensions. `packed`
    is a `codec` for what travels, and the `result`'s dtype: see `torus.reduce_scatter`.
    """
    name = f"reduce_scatter_{'bidirectional' if bidirectional else 'unidirectional'}"
    streams_of = functools.partial(groups.streams, group.size, bidirectional=bidirectional)
    how: Any = {"vmem": vmem, "interpret": interpret, **packed}
    return _along(x, group, streams_of, axis=axis, op=op, name=name, line=False, **how)


def line(
    x: jax.Array,
    group: Group,
    *,
    axis: int,
    op: str,
    vmem: bool,
    interpret: Interpret,
    **packed: Any,
) -> jax.Array:
    """Reduces x over a line, as `ring`."""
    streams_of, name = functools.partial(groups.line_streams, group.size), "reduce_scatter_line"
    how: Any = {"vmem": vmem, "interpret": interpret, **packed}
    return _along(x, group, streams_of, axis=axis, op=op, name=name, line=True, **how)


def _along(
    x: jax.Array,
    group: Group,
    streams_of: Callable[..., tuple[Stream, ...]],
    *,
    axis: int,
    op: str,
    name: str,
    line: bool,
    vmem: bool,
    interpret: Interpret,
    **packed: Any,
) -> jax.Array:
    how: Any = {"name": name, "vmem": vmem, "interpret": interpret}
    if packed:
        return in_sections(x, group, line=line, axis=axis, op=op, **how, **packed)
    if sparsecore.is_wanted():
        return _by_subcores(x, group, axis, streams_of, op, name, interpret)
    shape = block_shape(x.shape, axis, group.size)
    blocks = Blocks.of(shape, axis, x.dtype, chunks_of(shape, x.dtype, vmem))
    streams = streams_of(chunks=blocks.chunks)
    if len(streams) > 1 and waits_in_vmem(group, blocks, x.dtype, vmem=vmem, line=line):
        return in_sections(x, group, line=line, axis=axis, op=op, **how)
    return launch.call(
        functools.partial(add_on_the_way, blocks=blocks, streams=streams, op=op, vmem=vmem),
        group,
        x,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        scratch=Scratch.of(streams, blocks, x.dtype),
        barrier=groups.barrier_of(streams),
        wire_bytes=x.nbytes * (group.size - 1) // group.size,
        chunking=blocks.chunking,
        **how,
    )


def waits_in_vmem(group: Group, blocks: Blocks, dtype: DType, *, vmem: bool, line: bool) -> bool:
    """Whether sums of operands in HBM wait in VMEM, and not in HBM, too.

    Round a ring that is quicker: by the replay of 16 v6e 2 MiB take 22 us so, for 36, and 16 MiB
    100 for 121. Along a line it is so where slots would take more of HBM than scratch may.
    """
    many = 2 * SLOTS * blocks.nbytes(dtype) > sections.SCRATCH_BYTES
    return not vmem and (many or (group.size > 2 and not line))


def in_sections(x: jax.Array, group: Group, *, line: bool, **options: Any) -> jax.Array:
    """Reduces x in VMEM, section by section, as over a torus of one axis."""
    return torus.reduce_scatter(x, one_axis(group, line=line), **options)


def one_axis(group: Group, *, line: bool) -> Group:
    """A group as a torus of one axis."""
    return dataclasses.replace(group, torus=(), line=line)


def _by_subcores(
    x: jax.Array,
    group: Group,
    axis: int,
    streams_of: Callable[..., tuple[Stream, ...]],
    op: str,
    name: str,
    interpret: Interpret,
) -> jax.Array:
    """As `_along`, on the vector subcores of a SparseCore: each has its share of every block.

    Their shares are rings side by side, which have nothing to do with each other but the barrier.
    Slots are in HBM, of blocks of any size: 3 blocks one way round, 6 both ways.
    """
    shape, sharing = block_shape(x.shape, axis, group.size), sparsecore.shares(interpret)
    operand = sparsecore.cut(x, axis, group.size, sharing)
    share = (1, *operand.shape[2:])
    blocks = Blocks.of(share, 0, x.dtype, CHUNKS_OF_A_SUBCORE)
    streams = streams_of(chunks=blocks.chunks)
    scratch = Scratch.of(streams, blocks, x.dtype)
    slots = scratch.slots_ref
    y = launch.call(
        functools.partial(add_on_the_way, blocks=blocks, streams=streams, op=op, vmem=False),
        group,
        operand,
        out_shape=jax.ShapeDtypeStruct((1, *operand.shape[1:]), x.dtype),
        scratch=scratch._replace(slots_ref=buffer((sharing, *slots.shape), x.dtype)),
        barrier=groups.barrier_of(streams),
        name=name,
        interpret=interpret,
        sharing=sharing,
        wire_bytes=x.nbytes * (group.size - 1) // group.size,
        chunking=Chunking(sharing * blocks.chunks),
    )
    size = math.prod(shape)
    return y.reshape(shape) if y.size == size else y.reshape(-1)[:size].reshape(shape)


def chunks_of(shape: tuple[int, ...], dtype: DType, vmem: bool) -> int:
    """In how many chunks a block is to travel, so that adding one hides behind sending the others.

    What is left to add when the last one arrives is not hidden: more chunks, less of that, until a
    chunk is so small that starting its DMAs takes as long.
    """
    if vmem:
        return MOST_CHUNKS_IN_VMEM
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    return max(1, min(MOST_CHUNKS, math.isqrt(nbytes // UNIT_BYTES)))


def add_on_the_way(
    ring: Ring,
    x_ref: Ref,  # n blocks: HBM or VMEM
    o_ref: Ref,  # the own block of the result: HBM or VMEM
    scratch: Scratch,
    *,
    blocks: Blocks,
    streams: tuple[Stream, ...],
    op: str,
    vmem: bool,
) -> None:
    """Sends each block's sum towards its owner, adding the own term, and finishes the own block.

    On a ring we send, of each chunk, our own term of the furthest block as message 0, and as
    message k our term added to what message k - 1 has brought.

    On a line messages number the owners, the furthest first: a sum that comes as message k goes on
    as message k, in the step that comes as many after as there are devices behind us. So what we do
    in one step, for owners on either side, arrives together, and our own block's sums come from
    both sides in the last.

    Upstream may be ahead of us, and its message k + SLOTS goes to the slot from which we send on
    what message k brought. So a slot is released when that send has ended, and not before.
    """
    on_line = streams[0].line
    behind, ahead = ([s.behind(ring) for s in streams], [s.ahead(ring) for s in streams])

    def channel_of(i: int, chunk: Number) -> Channel:
        stream, index = streams[i], (i, chunk)
        comes = ahead[i] + 1 if on_line else stream.hops_of(chunk)
        return Channel(
            ring,
            stream.direction,
            scratch.semaphores,
            index,
            arrivals=comes,
            longest=stream.hops,
            slots=(scratch.slots_ref, index),
        )

    def wait_sent(i: int, chunk: Number) -> None:
        channel = channel_of(i, chunk)
        channel.wait_sent(channel.slot(0))

    turns = [_Turns(s, functools.partial(wait_sent, i)) for i, s in enumerate(streams)]

    def own_term(number: Number, i: int, chunk: Number) -> Any:
        """Our term of the sum that we send as this message."""
        furthest = ahead[i] if on_line else streams[i].hops_of(chunk)
        return blocks.at(x_ref, ring.block(streams[i].direction * (furthest - number)), chunk)

    def set_out(number: Number, i: int, chunk: Number) -> None:
        channel = channel_of(i, chunk)
        turns[i].end_earlier(number, chunk)
        channel.send(own_term(number, i, chunk), channel.slot(number), number)

    def add(number: Number, i: int, chunk: Number) -> None:
        channel, come = channel_of(i, chunk), number if on_line else number - 1
        summed = channel.slot(come)
        channel.receive(come, summed)
        combine(op, (summed, own_term(number, i, chunk), summed), vmem=vmem)
        turns[i].end_earlier(number, chunk)  # that of this chunk too, from the slot before
        channel.release(come - 1)
        channel.send(summed, channel.slot(number), number)

    def begin(_: Any, i: int, chunk: Number) -> None:
        sets_out = behind[i] == 0 if on_line else True
        groups.only_if(sets_out, lambda: set_out(np.int32(0), i, chunk))

    def forward(step: Step, i: int, chunk: Number) -> None:
        if not on_line:
            add(step, i, chunk)
            return
        number = step - behind[i]
        groups.only_if(behind[i] == 0, lambda: set_out(number, i, chunk))
        groups.only_if((behind[i] > 0) & (number >= 0), lambda: add(number, i, chunk))

    def last_sum(i: int, chunk: Number, comes: Any) -> Any:
        """Where the last sum of our own block's chunk is on a stream, once it has come."""
        channel = channel_of(i, chunk)
        number = channel.arrivals - 1
        groups.only_if(comes, lambda: channel.receive(number, channel.slot(number)))
        return channel.slot(number)

    def with_own(chunk: Number, *sums: Any) -> tuple[Any, ...]:
        """What `combine` makes our own block's chunk of: our term, and what has come."""
        return blocks.at(o_ref, chunk=chunk), blocks.at(x_ref, ring.me, chunk), *sums

    def finish_one(chunk: Number) -> None:
        """At a line's end, and between two devices: what comes, in one message of one stream."""
        here = [b > 0 if on_line else streams[i].hops_of(chunk) > 0 for i, b in enumerate(behind)]
        sums = [last_sum(i, chunk, comes) for i, comes in enumerate(here)]
        alone = with_own(chunk, scratch.slots_ref.at[here[1].astype(np.int32), chunk, 0])
        add = functools.partial(combine, op, vmem=vmem)
        if not on_line:
            add(alone)
            return
        groups.only_if(here[0] & here[1], lambda: add(with_own(chunk, *sums)))
        groups.only_if(~(here[0] & here[1]), lambda: add(alone))

    paired = 2 * streams[0].far_chunks == blocks.chunks
    rounds = streams[0].far_chunks if paired else blocks.chunks

    def finish(turn: Number, _: None) -> None:
        """Our own block's chunk; with it that which comes last on the other stream, if any does."""
        chosen = (turn, turn + rounds)[: blocks.chunks // rounds]
        if on_line or (len(streams) > 1 and not streams[0].near):
            for chunk in chosen:
                finish_one(chunk)
            return
        each = range(len(streams))
        sums = [with_own(chunk, *(last_sum(i, chunk, True) for i in each)) for chunk in chosen]
        combine(op, *sums, vmem=vmem)

    with jax.named_scope("own_terms"):
        groups.for_each_chunk(streams, begin)
    with jax.named_scope("forward"):
        groups.for_each_step(streams, forward, start=1)
    with jax.named_scope("finish"):
        lax.fori_loop(0, rounds, finish, None)
        for i in range(len(streams)):
            groups.only_if(ahead[i] > 0 if on_line else True, turns[i].end_last)


class _Turns:
    """The sends of a stream, at most IN_FLIGHT of them under way at a time.

    They take turns, chunk by chunk and step by step. Before one starts, that IN_FLIGHT turns
    earlier has ended, and with it all before that: also the same chunk's of the step before, as
    IN_FLIGHT counts at most for a step's chunks.
    """

    def __init__(self, stream: Stream, wait_sent: Callable[[Any], None]) -> None:
        self._stream, self._wait_sent = stream, wait_sent  # a chunk's oldest send has ended
        self._in_flight = min(IN_FLIGHT, stream.chunks)

    def end_earlier(self, number: Number, chunk: Number) -> None:
        """Waits, before a chunk's message is sent, for the send that must have ended by then."""
        turn = self._stream.turn(chunk)

        @pl.when((turn >= self._in_flight) | (number >= 1))
        def _() -> None:  # turns below 0 are those of the step before
            self._wait_sent(self._stream.chunk(turn - self._in_flight))

    def end_last(self) -> None:
        """Waits for the sends that no later one has waited for."""
        stream = self._stream
        count = stream.near * stream.chunks + stream.far_chunks
        for back in range(1, 1 + min(self._in_flight, count)):
            self._wait_sent(stream.chunk(stream.far_chunks - back))
