"""All-reduce by gathering: every device gets everyone's operand, and adds them up by itself.

A reduce-scatter and an all-gather cross the group twice. A gather crosses it once, with n times the
bytes: so small operands arrive sooner. They go as blocks of `all_gather` do, both ways round a
ring, along a line, or over all axes of a torus at once:

    step  dev0    dev1    dev2    dev3
    0     [0...]  [.1..]  [..2.]  [...3]     operands present (see all_gather)
    1     [01.3]  [012.]  [.123]  [0.23]
    2     [0123]  [0123]  [0123]  [0123]     then each device adds all four

             steps             bytes sent per link and direction    scratch
    ring     floor(n/2)        (n-1)/2 operands                     n operands
    line     n-1               at most n-1 operands                 n operands
    torus    sum of n_a // 2   (n-1)/(2d) operands, on d axes       n operands

Order and rounding. Every element is added in the order of the ranks, the first to the second, then
the third, in float32 (integers in 32 bits), and rounded once. So its bits depend neither on its
place in the operand nor on the way that the operands have come.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from pallas_collectives.annotations import Interpret, Ref, buffer
from pallas_collectives.errors import AlgorithmError
from pallas_collectives.kernels import all_gather
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.kernels.machinery.combine import combine_stack, stack_bytes
from pallas_collectives.kernels.torus import all_gather as torus_gather
from pallas_collectives.kernels.torus import devices
from pallas_collectives.kernels.torus.views import View
from pallas_collectives.topology import placement, reach
from pallas_collectives.topology.groups import Group, Ring

_MOST_BYTES = 1 << 31  # of all operands


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays."""

    stack_ref: Ref  # all operands, row-major in the order of the ranks: HBM or VMEM; see `gather`
    gather: Any  # what the gather takes


def gather(x: jax.Array, group: Group, *, op: str, vmem: bool, interpret: Interpret) -> jax.Array:
    """Reduces x, whose last two dimensions are whole tiles, over the group."""

    def after(stack_ref: Ref, o_ref: Ref) -> None:
        combine_stack(op, o_ref, stack_ref, vmem=vmem)

    (total,) = gathered(
        after,
        group,
        x,
        out_shapes=(jax.ShapeDtypeStruct(x.shape, x.dtype),),
        name="all_reduce_gather",
        interpret=interpret,
        vmem=vmem,
        pipeline_bytes=0 if vmem else stack_bytes(x, group.size),
    )
    return total


def gathered(
    after: Callable[..., None], group: Group, x: jax.Array, *others: jax.Array, **options: Any
) -> tuple[jax.Array, ...]:
    """Gathers x from all devices into scratch, then goes on with it, in one kernel.

    Args:
      after: called with the gathered operands, (n, *x.shape) or with several dimensions in the
        place of the first, then `others` and the results.
      group: the devices.
      x: the own operand; its last two dimensions are whole tiles.
      *others: operands that stay on this device.
      **options: as `launch.call_many`'s.
    """
    if group.size * x.nbytes >= _MOST_BYTES:
        raise AlgorithmError(
            f"a gather of {group.size} operands of {x.nbytes >> 20} MiB",
            "the TPU compiler counts bytes of what is added up in 32 bits",
            "leave the algorithm to 'auto', which takes it for small operands alone",
        )
    block = x[None]
    if placement.nearest(group) is reach.torus:
        axes, view = devices.axes_of(group), View.of(block.shape, 0)
        plan, tables = torus_gather.plan_of(axes, view, x.dtype), devices.tables(axes)
        block, stack = view.into(block, (1,) * len(axes)), plan.shape(devices.field_sizes(axes))
        way = torus_gather.way(plan)
    else:
        axes, tables, stack = (), [], (group.size, *x.shape)
        way = all_gather.way(block, group)
    return launch.call_many(
        functools.partial(_kernel, gather=way.kernel, after=after, tables=len(tables)),
        group,
        block,
        *others,
        scratch=Scratch(buffer(stack, x.dtype), way.scratch),
        axes=axes,
        scalars=tables,
        barrier=way.barrier,
        chunking=dataclasses.replace(way.chunking, of="the operand"),
        wire_bytes=(group.size - 1) * x.nbytes,
        **options,
    )


def _kernel(
    rings: Ring | Sequence[Ring],  # the group's, or those along the axes of a torus
    *refs: Any,  # see below
    gather: Callable[..., None],
    after: Callable[..., None],
    tables: int,
) -> None:
    numbers, (x_ref, *others_and_results, scratch) = refs[:tables], refs[tables:]
    # numbers: `torus.devices.tables` (SMEM)
    # x_ref: own operand: HBM or VMEM
    # others_and_results: what `after` takes besides: HBM or VMEM
    # scratch: a Scratch
    gather(rings, *numbers, x_ref, scratch.stack_ref, scratch.gather)
    with jax.named_scope("combine"):
        after(scratch.stack_ref, *others_and_results)
