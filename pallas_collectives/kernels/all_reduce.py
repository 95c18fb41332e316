"""All-reduce: every device ends with the sum (max, min) of everyone's operand, bit for bit alike.

Ring. A reduce-scatter, which leaves each device its block of the sum, and an all-gather of these,
in one kernel with no barrier between: a device that has finished its own block sends it on at once,
into places of its neighbours' results that their reduce-scatter does not touch:

    step  dev0    dev1    dev2    dev3
    0     [11]    [11]    [11]    [11]       terms in the sums under way to a device's own block,
    1     [33]    [33]    [33]    [33]       in two parts (see reduce_scatter)
    2     [44]    [44]    [44]    [44]
    3     [01.3]  [012.]  [.123]  [0.23]     blocks of the sum present (see all_gather)
    4     [0123]  [0123]  [0123]  [0123]

Line. The same on devices whose first and last share no link.

One shot. Every device pushes its operand to every other, and each adds all n in the same order.

             steps         bytes sent per link and direction    scratch
    ring     2 floor(n/2)  (n-1)/n of the operand               6/n of the operand, 2 MiB VMEM
    line     2(n-1)        at most 2(n-1)/n of the operand      as the ring
    one_shot 1             as the wires lie                     n operands

Blocks are n equal parts of the operand; see `reduce_scatter` for the order of additions.
"""

import functools
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import all_gather, launch, reduce_scatter, sync, topology
from pallas_collectives.kernels.blocks import Blocks
from pallas_collectives.kernels.combine import combine_stack
from pallas_collectives.kernels.topology import Group, Lane, Ring


def ring(
    x: jax.Array, group: Group, *, op: str, bidirectional: bool, vmem: bool, interpret: Any
) -> jax.Array:
    """Reduces x, of shape (n, whole tiles), over the group."""
    blocks = _blocks(x, vmem)
    lanes = topology.lanes(group.size, bidirectional=bidirectional, parts=blocks.parts)
    return _launch(x, group, blocks, lanes, on_line=False, op=op, vmem=vmem, interpret=interpret)


def line(x: jax.Array, group: Group, *, op: str, vmem: bool, interpret: Any) -> jax.Array:
    """Reduces x over a line, as `ring`."""
    blocks = _blocks(x, vmem)
    lanes = topology.line_lanes(group.size, blocks.parts)
    return _launch(x, group, blocks, lanes, on_line=True, op=op, vmem=vmem, interpret=interpret)


def _blocks(x: jax.Array, vmem: bool) -> Blocks:
    shape = (1, *x.shape[1:])
    return Blocks.of(shape, 0, x.dtype, reduce_scatter.parts_of(shape, x.dtype, vmem))


def _launch(
    x: jax.Array,
    group: Group,
    blocks: Blocks,
    lanes: tuple[Lane, ...],
    *,
    on_line: bool,
    op: str,
    vmem: bool,
    interpret: Any,
) -> jax.Array:
    return launch.call(
        functools.partial(
            _ring_kernel, blocks=blocks, lanes=lanes, on_line=on_line, op=op, vmem=vmem
        ),
        group,
        x,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        buffers=[reduce_scatter.lane_slots(lanes, blocks, x.dtype)],
        scratch_shapes=[
            *reduce_scatter.lane_semaphores(lanes),
            *all_gather.lane_semaphores(lanes),
        ],
        barrier="line" if on_line else "neighbours",
        name="all_reduce_line" if on_line else "all_reduce_ring",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=2 * x.nbytes * (group.size - 1) // group.size,
    )


def one_shot(x: jax.Array, group: Group, *, op: str, vmem: bool, interpret: Any) -> jax.Array:
    """Reduces x, whose last two dimensions are whole tiles, over the group."""
    return launch.call(
        functools.partial(_one_shot_kernel, op=op, vmem=vmem),
        group,
        x,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        buffers=[jax.ShapeDtypeStruct((group.size, *x.shape), x.dtype)],
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 3,
        barrier="everyone",
        name="all_reduce_one_shot",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=(group.size - 1) * x.nbytes,
    )


def _ring_kernel(
    ring: Ring,
    x_ref: Any,  # n blocks: HBM or VMEM
    o_ref: Any,  # n blocks: HBM or VMEM
    slots_ref: Any,  # these four: see reduce_scatter.add_on_the_way
    send_sems: Any,
    recv_sems: Any,
    credit_sems: Any,
    *gather_semaphores: Any,  # see all_gather.pass_on
    blocks: Blocks,
    lanes: tuple[Lane, ...],
    on_line: bool,
    op: str,
    vmem: bool,
) -> None:
    # A neighbour may be gathering while we still reduce: what it writes here, other blocks of o_ref
    # than our own, nobody reads or writes in the reduce-scatter.
    if on_line:
        sync.barrier_along_line(ring)
        reduce, gather = reduce_scatter.add_along, all_gather.pass_along
    else:
        sync.barrier_with_neighbours(ring)
        reduce, gather = reduce_scatter.add_on_the_way, all_gather.pass_on
    own_ref = blocks.at(o_ref, ring.me)
    scratch = (slots_ref, send_sems, recv_sems, credit_sems)
    with jax.named_scope("reduce_scatter"):
        reduce(ring, x_ref, own_ref, *scratch, blocks=blocks, lanes=lanes, op=op, vmem=vmem)
    with jax.named_scope("all_gather"):
        gather(ring, own_ref, o_ref, *gather_semaphores, blocks=blocks, lanes=lanes)


def _one_shot_kernel(
    ring: Ring,
    x_ref: Any,  # own operand: HBM or VMEM
    o_ref: Any,  # result: HBM or VMEM
    stack_ref: Any,  # (n, operand): HBM or VMEM; layer p is written by device p
    copy_sem: Any,  # own; started and waited for once
    send_sem: Any,  # own; n-1 sends of the operand
    recv_sem: Any,  # n-1 operands, one from each other device
    *,
    op: str,
    vmem: bool,
) -> None:
    sync.barrier_with_everyone(ring)
    own_layer = stack_ref.at[ring.me]
    sync.push_to_everyone(ring, x_ref, own_layer, copy_sem, send_sem, recv_sem)
    with jax.named_scope("combine"):
        combine_stack(op, o_ref, stack_ref, vmem=vmem)
