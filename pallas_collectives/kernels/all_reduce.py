"""All-reduce: every device ends with the sum (max, min) of everyone's operand, bit for bit alike.

Ring. A reduce-scatter, which leaves each device its block of the sum, and an all-gather of these,
in one kernel with no barrier between: a device that has finished its own block sends it on at once,
into places of its neighbours' results that their reduce-scatter does not touch:

    step  dev0    dev1    dev2    dev3
    0     [11]    [11]    [11]    [11]       terms in the sums under way to a device's own block,
    1     [33]    [33]    [33]    [33]       in two chunks (see reduce_scatter)
    2     [44]    [44]    [44]    [44]
    3     [01.3]  [012.]  [.123]  [0.23]     blocks of the sum present (see all_gather)
    4     [0123]  [0123]  [0123]  [0123]

             steps         bytes sent per link and direction    scratch
    ring     2 floor(n/2)  (n-1)/n of the operand               6/n of the operand: see
                                                                `reduce_scatter`

Blocks are n equal parts of the operand; see `reduce_scatter` for the order of additions, and
`all_reduce_line` for devices whose first and last share no link, and `one_hop` for small operands.
"""

import functools
from typing import Any, NamedTuple

import jax

from pallas_collectives.annotations import Interpret, Ref
from pallas_collectives.kernels import all_gather, reduce_scatter
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import launch, sparsecore
from pallas_collectives.kernels.machinery.blocks import Blocks
from pallas_collectives.kernels.torus import reduce_scatter as torus
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Group, Ring, Stream


class Scratch(NamedTuple):
    """What the ring's kernel takes beside its arrays."""

    scatter: reduce_scatter.Scratch
    gather: channels.Semaphores  # see all_gather.pass_on


def ring(
    x: jax.Array,
    group: Group,
    *,
    op: str,
    bidirectional: bool,
    vmem: bool,
    interpret: Interpret,
    **packed: Any,
) -> jax.Array:
    """Reduces x, of shape (n, whole tiles), over the group.

    On a SparseCore it is two kernels: vector subcores scatter the sum, the scalar one gathers it.
    `packed` is a `codec` for what travels: see `torus.reduce_scatter.all_reduce`.
    """
    if packed:
        return _in_sections(x, group, op=op, vmem=vmem, interpret=interpret, **packed)
    if sparsecore.is_wanted():
        how: Any = {"bidirectional": bidirectional, "vmem": False, "interpret": interpret}
        block = reduce_scatter.ring(x, group, axis=0, op=op, **how)
        return all_gather.ring(block, group, axis=0, **how)
    shape = (1, *x.shape[1:])
    blocks = Blocks.of(shape, 0, x.dtype, reduce_scatter.chunks_of(shape, x.dtype, vmem))
    streams = groups.streams(group.size, bidirectional=bidirectional, chunks=blocks.chunks)
    if bidirectional and reduce_scatter.waits_in_vmem(
        group, blocks, x.dtype, vmem=vmem, line=False
    ):
        return _in_sections(x, group, op=op, vmem=vmem, interpret=interpret)
    return launch.call(
        functools.partial(_ring_kernel, blocks=blocks, streams=streams, op=op, vmem=vmem),
        group,
        x,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch=Scratch(
            reduce_scatter.Scratch.of(streams, blocks, x.dtype), all_gather.semaphores(streams)
        ),
        barrier="neighbours",
        name="all_reduce_ring",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=2 * x.nbytes * (group.size - 1) // group.size,
        chunking=blocks.chunking,
    )


def _in_sections(x: jax.Array, group: Group, **options: Any) -> jax.Array:
    """Reduces x in VMEM, section by section, as over a torus of one axis."""
    alone = reduce_scatter.one_axis(group, line=False)
    return torus.all_reduce(x, alone, name="all_reduce_ring", **options)


def _ring_kernel(
    ring: Ring,
    x_ref: Ref,  # n blocks: HBM or VMEM
    o_ref: Ref,  # n blocks: HBM or VMEM
    scratch: Scratch,
    *,
    blocks: Blocks,
    streams: tuple[Stream, ...],
    op: str,
    vmem: bool,
) -> None:
    # A neighbour may be gathering while we still reduce: what it writes here, other blocks of o_ref
    # than our own, nobody reads or writes in the reduce-scatter.
    cut: Any = {"blocks": blocks, "streams": streams}
    own_ref = blocks.at(o_ref, ring.me)
    with jax.named_scope("reduce_scatter"):
        how: Any = {"op": op, "vmem": vmem, **cut}
        reduce_scatter.add_on_the_way(ring, x_ref, own_ref, scratch.scatter, **how)
    with jax.named_scope("all_gather"):
        all_gather.pass_on(ring, own_ref, o_ref, scratch.gather, **cut)
