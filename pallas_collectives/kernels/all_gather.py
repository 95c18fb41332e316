"""All-gather: every device ends with the blocks of all, in order.

Ring. Each device passes on, at every step, the block that the step before brought it:

    step  dev0    dev1    dev2    dev3      blocks present (unidirectional, to the right)
    0     [0...]  [.1..]  [..2.]  [...3]
    1     [0..3]  [01..]  [.12.]  [..23]
    2     [0.23]  [01.3]  [012.]  [.123]
    3     [0123]  [0123]  [0123]  [0123]

The bidirectional ring does so both ways at once; on an even ring the opposite device's block comes
half by half from both sides, in the last step:

    step  dev0    dev1    dev2    dev3      blocks present (bidirectional; ' one half)
    0     [0...]  [.1..]  [..2.]  [...3]
    1     [01.3]  [012.]  [.123]  [0.23]
    2     [0123]  [0123]  [0123]  [0123]

Line. As the ring both ways, on devices whose first and last share no link: everybody passes on
to the right what comes from the left, and to the left what comes from the right.

    step  dev0    dev1    dev2    dev3      blocks present (line)
    0     [0...]  [.1..]  [..2.]  [...3]
    1     [01..]  [012.]  [.123]  [..23]
    2     [012.]  [0123]  [0123]  [.123]
    3     [0123]  [0123]  [0123]  [0123]

Direct. Every device pushes its block to every other at once: one hop, for small blocks.

             steps      bytes sent per link and direction   scratch
    ring     n-1        (n-1) blocks to the right, 0 left   none
    both     floor(n/2) (n-1)/2 blocks                      none
    line     n-1        at most n-1 blocks                  none
    direct   1          as the wires lie                    none

The operand and the result may lie in VMEM; else there is nothing in it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Interpret, Number, Ref, Semaphore, Step, dma_semaphores
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.blocks import Blocks, Chunking, whole_shape
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.kernels.machinery.sync import PushSemaphores
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Group, Ring, Stream

# Receive semaphores per stream, of `chips.Chip.kernel_semaphores`. A fast neighbour may be so many
# steps ahead without waiting for us.
WINDOW = 16

# A block goes in chunks of whole tiles: while one is passed on, others are on the wire. Eight were
# best, or within 3% of it, for blocks of 32 KiB to 2 MiB by the replay of v5e and v5p.
MOST_CHUNKS = 8


class Way(NamedTuple):
    """A way to gather, for a launcher."""

    kernel: Callable[..., None]  # of (ring, block, gathered blocks, scratch)
    scratch: Any  # what the kernel takes beside its arrays
    barrier: str
    chunking: Chunking


class Scratch(NamedTuple):
    """What the ring's kernel takes beside its arrays."""

    copy_sem: Semaphore  # own; started and waited for once
    semaphores: channels.Semaphores  # (streams, chunks): see pass_on


def ring(
    x: jax.Array,
    group: Group,
    *,
    axis: int,
    bidirectional: bool,
    vmem: bool,
    interpret: Interpret,
    most_chunks: int = MOST_CHUNKS,
) -> jax.Array:
    """Gathers x along `axis` over a ring; `axis` must be `sliceable` for x's shape."""
    blocks = Blocks.of(x.shape, axis, x.dtype, most_chunks)
    streams = groups.streams(group.size, bidirectional=bidirectional, chunks=blocks.chunks)
    name = f"all_gather_{'bidirectional' if bidirectional else 'unidirectional'}"
    way = _by_hops(blocks, streams)
    return _launch(*way, x, group, axis, name=name, vmem=vmem, interpret=interpret)


def line(x: jax.Array, group: Group, *, axis: int, vmem: bool, interpret: Interpret) -> jax.Array:
    """Gathers x along `axis` over a line, as `ring`."""
    blocks = Blocks.of(x.shape, axis, x.dtype, MOST_CHUNKS)
    way = _by_hops(blocks, groups.line_streams(group.size, blocks.chunks))
    options: dict[str, Any] = {"vmem": vmem, "interpret": interpret}
    return _launch(*way, x, group, axis, name="all_gather_line", **options)


def way(x: jax.Array, group: Group) -> Way:
    """How a group gathers x along its first dimension: both ways round, or along a line."""
    blocks = Blocks.of(x.shape, 0, x.dtype, MOST_CHUNKS)
    both_ways = functools.partial(groups.streams, bidirectional=True)
    of_group = groups.line_streams if group.line else both_ways
    return _by_hops(blocks, of_group(group.size, chunks=blocks.chunks))


def direct(x: jax.Array, group: Group, *, axis: int, vmem: bool, interpret: Interpret) -> jax.Array:
    """Gathers x along `axis`, each device writing to all others."""
    kernel = functools.partial(_direct_kernel, blocks=Blocks.of(x.shape, axis, x.dtype))
    pushed = Way(kernel, PushSemaphores(), "everyone", launch.WHOLE)
    options: dict[str, Any] = {"vmem": vmem, "interpret": interpret}
    return _launch(*pushed, x, group, axis, name="all_gather_direct", **options)


def _by_hops(blocks: Blocks, streams: tuple[Stream, ...]) -> Way:
    return Way(
        functools.partial(_ring_kernel, blocks=blocks, streams=streams),
        Scratch(dma_semaphores(), semaphores(streams)),
        groups.barrier_of(streams),
        blocks.chunking,
    )


def _launch(
    kernel: Callable[..., None],
    scratch: Any,
    barrier: str,
    chunking: Chunking,
    x: jax.Array,
    group: Group,
    axis: int,
    **options: Any,
) -> jax.Array:
    """Gathers in a way."""
    shape = whole_shape(x.shape, axis, group.size)
    return launch.call(
        kernel,
        group,
        x,
        scratch=scratch,
        barrier=barrier,
        chunking=chunking,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        wire_bytes=(group.size - 1) * x.nbytes,
        **options,
    )


def semaphores(streams: tuple[Stream, ...]) -> channels.Semaphores:
    """The channels that `pass_on` takes."""
    window = min(WINDOW, max(stream.hops for stream in streams))
    return channels.Semaphores.of(len(streams), streams[0].chunks, window=window)


def _ring_kernel(
    ring: Ring,
    x_ref: Ref,  # one block: HBM or VMEM
    o_ref: Ref,  # n blocks: HBM or VMEM
    scratch: Scratch,
    *,
    blocks: Blocks,
    streams: tuple[Stream, ...],
) -> None:
    own_copy = pltpu.make_async_copy(x_ref, blocks.at(o_ref, ring.me), scratch.copy_sem)
    pass_on(
        ring,
        x_ref,
        o_ref,
        scratch.semaphores,
        blocks=blocks,
        streams=streams,
        meanwhile=own_copy.start,
    )
    own_copy.wait()


def pass_on(
    ring: Ring,
    x_ref: Ref,  # own block, from which the first sends leave
    o_ref: Ref,  # n blocks; those of the others are filled
    semaphores: channels.Semaphores,  # (streams, chunks); all sends of a chunk drain at the end
    *,
    blocks: Blocks,
    streams: tuple[Stream, ...],
    meanwhile: Callable[[], None] = lambda: None,  # runs when the first sends are under way
) -> None:
    """Sends the own block along its streams and passes on what arrives, until all is there.

    Message k of a chunk's channel comes from the device k + 1 hops upstream, which we send on as
    message k + 1; our own is message 0. On a ring as many are sent as come. On a line what comes is
    what lies behind us, and what has come to the last device stays there.

    Nothing is written twice, so a neighbour that is ahead of us does no harm to what we read.
    """
    on_line, behind = streams[0].line, [stream.behind(ring) for stream in streams]
    # Whether we send at all, and whether the last that comes stays here.
    sends = [b < ring.size - 1 if on_line else True for b in behind]
    keeps = [b == ring.size - 1 if on_line else True for b in behind]

    def place(number: Number, i: int, chunk: Number) -> Ref:
        """Where we keep message `number` of those that we send."""
        return blocks.at(o_ref, ring.block(-streams[i].direction * number), chunk)

    def arrivals(i: int, chunk: Number) -> Number:
        return behind[i] if on_line else streams[i].hops_of(chunk)

    def channel_of(i: int, chunk: Number) -> Channel:
        stream, index = streams[i], (i, chunk)
        return Channel(ring, stream.direction, semaphores, index, arrivals(*index), stream.hops)

    def send_own(_: object, i: int, chunk: Number) -> None:
        own, target = blocks.at(x_ref, chunk=chunk), place(0, i, chunk)
        groups.only_if(sends[i], lambda: channel_of(i, chunk).send(own, target, 0))

    def receive(number: Number, i: int, chunk: Number) -> None:
        arriving = channel_of(i, chunk)
        arriving.receive(number, place(number + 1, i, chunk))
        arriving.release(number)

    def send_on(step: Step, i: int, chunk: Number) -> None:
        receive(step - 1, i, chunk)
        block = place(step, i, chunk)
        channel_of(i, chunk).send(block, block, step)

    def forward(step: Step, i: int, chunk: Number) -> None:
        comes = step <= behind[i] if on_line else True
        groups.only_if(comes & sends[i], lambda: send_on(step, i, chunk))
        if on_line:
            groups.only_if(comes & keeps[i], lambda: receive(step - 1, i, chunk))

    def drain(_: object, i: int, chunk: Number) -> None:
        count = arrivals(i, chunk)
        groups.only_if(keeps[i], lambda: receive(count - 1, i, chunk))
        sent = jnp.where(sends[i], count + 1, 0) if on_line else count
        channel_of(i, chunk).wait_sent(blocks.at(x_ref, chunk=chunk), times=sent)

    with jax.named_scope("own_block"):
        groups.for_each_chunk(streams, send_own)
        meanwhile()
    with jax.named_scope("forward"):
        groups.for_each_step(streams, forward, start=1)
    with jax.named_scope("drain"):
        groups.for_each_chunk(streams, drain)


def _direct_kernel(
    ring: Ring,
    x_ref: Ref,  # one block: HBM or VMEM
    o_ref: Ref,  # n blocks: HBM or VMEM
    scratch: PushSemaphores,
    *,
    blocks: Blocks,
) -> None:
    sync.push_to_everyone(ring, lambda *_: x_ref, lambda _: blocks.at(o_ref, ring.me), scratch)
