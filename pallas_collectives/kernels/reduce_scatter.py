"""Reduce-scatter: device p ends with the sum (max, min) of everyone's block p.

The all-gather backwards. The sum of a block sets out at the device furthest from its owner and on
its way takes up one term at each device, which adds its own before it passes the sum on. Both ways
round, the owner gets two sums, one from each side, and adds them to its own term:

    step  dev0  dev1  dev2  dev3      terms in the sums under way to a device, its own included,
    0     [11]  [11]  [11]  [11]      for both chunks of its block (bidirectional)
    1     [33]  [33]  [33]  [33]
    2     [44]  [44]  [44]  [44]

On a line, whose first and last share no link, sums set out at its ends, the furthest owner's
first, so that both sides' reach their owners in the last step.

Direct. Every device pushes its term of each block to the block's owner, who adds them up: one hop,
for small blocks.

                     steps       bytes sent per link and direction    scratch
    unidirectional   n-1         (n-1) blocks to the right, 0 left    3 blocks
    bidirectional    floor(n/2)  (n-1)/2 blocks                       6 blocks, 16 MiB at the most
    line             n-1         at most n-1 blocks                   6 blocks, 16 MiB at the most
    direct           1           as the wires lie                     n blocks

The scratch of a ring, three blocks for each direction however many devices there are, lies in HBM,
with at most 2 MiB of VMEM for the tiles being added; or all in VMEM, where the operands are. A
block goes in chunks: while one is being added the others are on the wire. If six
blocks are more than 16 MiB, they go by section by section, in VMEM, as over a torus of one axis:
each half n-1 hops one way round (`torus.reduce_scatter`), which takes no longer for such blocks.

Order and rounding. The sum is own + (from the left) + (from the right), each side's own sum ordered
along the ring; `direct` adds in the order of the devices: the same on every run. Within a device
terms are added in float32 (integers in 32 bits); what goes on the wire is rounded to the operand's
dtype once per hop.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_collectives.annotations import DType, Interpret, Ref, buffer
from pallas_collectives.kernels.adding import SLOTS, Scratch, add_on_the_way
from pallas_collectives.kernels.machinery import launch, sparsecore, sync
from pallas_collectives.kernels.machinery.blocks import Blocks
from pallas_collectives.kernels.machinery.combine import combine_stack
from pallas_collectives.kernels.machinery.sync import PushSemaphores
from pallas_collectives.kernels.torus import reduce_scatter as torus
from pallas_collectives.kernels.torus import sections
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Group, Ring, Stream

# A block of k * k * UNIT_BYTES goes in k chunks, up to eight: by the replay no other rule did
# better on all of v5e, v5p, v6e and 7x at 192 KiB to 16 MiB. Where it is added in VMEM it goes in
# four, or five where it cannot be quartered.
UNIT_BYTES = 64 << 10
MOST_CHUNKS = 8
MOST_CHUNKS_IN_VMEM = 5
CHUNKS_OF_A_SUBCORE = 2  # with five semaphores each, both ways; v5p's have 27


class DirectScratch(NamedTuple):
    """What a kernel takes that adds what all have pushed to it."""

    stack_ref: Ref  # (n, one block): HBM or VMEM; layer p is written by device p
    push: PushSemaphores


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
    how: Any = {"vmem": vmem, "interpret": interpret}
    if packed:
        return in_sections(x, group, axis=axis, op=op, line=False, name=name, **how, **packed)
    if sparsecore.is_wanted():
        return _by_subcores(x, group, axis, streams_of, op, name, interpret)
    blocks = _blocks(x, group, axis, vmem)
    streams = streams_of(chunks=blocks.chunks)
    if bidirectional and goes_in_sections(blocks, x.dtype, vmem):
        return in_sections(x, group, axis=axis, op=op, line=False, name=name, **how)
    return _by_hops(x, group, blocks, streams, op, name, **how)


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
    how: Any = {"vmem": vmem, "interpret": interpret}
    name, streams_of = "reduce_scatter_line", functools.partial(groups.line_streams, group.size)
    if packed:
        return in_sections(x, group, axis=axis, op=op, line=True, name=name, **how, **packed)
    if sparsecore.is_wanted():
        return _by_subcores(x, group, axis, streams_of, op, name, interpret)
    blocks = _blocks(x, group, axis, vmem)
    streams = streams_of(chunks=blocks.chunks)
    if goes_in_sections(blocks, x.dtype, vmem):
        return in_sections(x, group, axis=axis, op=op, line=True, name=name, **how)
    return _by_hops(x, group, blocks, streams, op, name, **how)


def direct(
    x: jax.Array, group: Group, *, axis: int, op: str, vmem: bool, interpret: Interpret
) -> jax.Array:
    """Reduces x with one hop a term, as `ring`."""
    blocks = Blocks.of(_block_shape(x, group, axis), axis, x.dtype)
    stack = buffer((group.size, *blocks.shape), x.dtype)
    return _launch(
        functools.partial(_direct_kernel, blocks=blocks, op=op, vmem=vmem),
        x,
        group,
        blocks,
        scratch=DirectScratch(stack, PushSemaphores()),
        barrier="everyone",
        name="reduce_scatter_direct",
        interpret=interpret,
        vmem=vmem,
    )


def goes_in_sections(blocks: Blocks, dtype: DType, vmem: bool) -> bool:
    """Whether what both directions' slots take of HBM would be more than scratch may be."""
    return not vmem and 2 * SLOTS * blocks.nbytes(dtype) > sections.SCRATCH_BYTES


def in_sections(x: jax.Array, group: Group, *, line: bool, **options: Any) -> jax.Array:
    """Reduces x in VMEM, section by section, as over a torus of one axis."""
    return torus.reduce_scatter(x, one_axis(group, line=line), **options)


def one_axis(group: Group, *, line: bool) -> Group:
    """A group as a torus of one axis."""
    return dataclasses.replace(group, torus=(), line=line)


def _block_shape(x: jax.Array, group: Group, axis: int) -> tuple[int, ...]:
    return (*x.shape[:axis], x.shape[axis] // group.size, *x.shape[axis + 1 :])


def _blocks(x: jax.Array, group: Group, axis: int, vmem: bool) -> Blocks:
    shape = _block_shape(x, group, axis)
    return Blocks.of(shape, axis, x.dtype, chunks_of(shape, x.dtype, vmem))


def _by_hops(
    x: jax.Array,
    group: Group,
    blocks: Blocks,
    streams: tuple[Stream, ...],
    op: str,
    name: str,
    *,
    vmem: bool,
    interpret: Interpret,
) -> jax.Array:
    return _launch(
        functools.partial(add_on_the_way, blocks=blocks, streams=streams, op=op, vmem=vmem),
        x,
        group,
        blocks,
        scratch=Scratch.of(streams, blocks, x.dtype),
        barrier=groups.barrier_of(streams),
        name=name,
        interpret=interpret,
        vmem=vmem,
    )


def _by_subcores(
    x: jax.Array,
    group: Group,
    axis: int,
    streams_of: Callable[..., tuple[Stream, ...]],
    op: str,
    name: str,
    interpret: Interpret,
) -> jax.Array:
    """As `_by_hops`, on the vector subcores of a SparseCore: each has its share of every block.

    Their shares are rings side by side, which have nothing to do with each other but the barrier.
    Slots are in HBM, of blocks of any size: 3 blocks one way round, 6 both ways.
    """
    shape, sharing = _block_shape(x, group, axis), sparsecore.shares(interpret)
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
    )
    size = math.prod(shape)
    return y.reshape(shape) if y.size == size else y.reshape(-1)[:size].reshape(shape)


def _launch(
    kernel: Callable[..., None], x: jax.Array, group: Group, blocks: Blocks, **options: Any
) -> jax.Array:
    """Runs a kernel of (ring, operand, own block of the result, scratch)."""
    return launch.call(
        kernel,
        group,
        x,
        out_shape=jax.ShapeDtypeStruct(blocks.shape, x.dtype),
        wire_bytes=x.nbytes * (group.size - 1) // group.size,
        **options,
    )


def chunks_of(shape: tuple[int, ...], dtype: DType, vmem: bool) -> int:
    """In how many chunks a block is to travel, so that adding one hides behind sending the others.

    What is left to add when the last one arrives is not hidden: more chunks, less of that, until a
    chunk is so small that starting its DMAs takes as long.
    """
    if vmem:
        return MOST_CHUNKS_IN_VMEM
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    return max(1, min(MOST_CHUNKS, math.isqrt(nbytes // UNIT_BYTES)))


def _direct_kernel(
    ring: Ring,
    x_ref: Ref,  # n blocks: HBM or VMEM
    o_ref: Ref,  # one block: HBM or VMEM
    scratch: DirectScratch,
    *,
    blocks: Blocks,
    op: str,
    vmem: bool,
) -> None:
    own_layer = scratch.stack_ref.at[ring.me]
    sync.push_to_everyone(
        ring, lambda owner, _: blocks.at(x_ref, owner), lambda _: own_layer, scratch.push
    )
    with jax.named_scope("combine"):
        combine_stack(op, o_ref, scratch.stack_ref, vmem=vmem)
