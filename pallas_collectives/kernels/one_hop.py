"""Sums in one hop: every device pushes its terms to those who add them. For small operands.

Reduce-scatter pushes to each device its own block, and all-reduce to every device the whole
operand. What has come is added in the order of the devices, in float32 (integers in 32 bits), and
rounded once: the same bits on every run, and in an all-reduce on every device.

                      steps    bytes sent per link and direction    scratch
    reduce_scatter    1        as the wires lie                     n blocks
    all_reduce        1        as the wires lie                     n operands
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_collectives.annotations import Interpret, Ref, buffer
from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.blocks import Blocks, block_shape
from pallas_collectives.kernels.machinery.combine import combine_stack, stack_bytes
from pallas_collectives.kernels.machinery.sync import PushSemaphores
from pallas_collectives.topology.groups import Group, Ring


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays."""

    stack_ref: Ref  # (n, one result): HBM or VMEM; layer p is written by device p
    push: PushSemaphores


def reduce_scatter(
    x: jax.Array, group: Group, *, axis: int, op: str, vmem: bool, interpret: Interpret
) -> jax.Array:
    """Reduces x over the group and leaves each device its block along `axis`.

    Blocks must be `sliceable` along `axis` and whole tiles in their last two dimensions.
    """
    shape = block_shape(x.shape, axis, group.size)
    blocks = Blocks.of(shape, axis, x.dtype)
    name = "reduce_scatter_direct"
    return _launch(x, group, shape, blocks.at, op, name, vmem=vmem, interpret=interpret)


def all_reduce(
    x: jax.Array, group: Group, *, op: str, vmem: bool, interpret: Interpret
) -> jax.Array:
    """Reduces x, whose last two dimensions are whole tiles, over the group."""
    name = "all_reduce_one_shot"
    how: Any = {"vmem": vmem, "interpret": interpret}
    return _launch(x, group, x.shape, lambda x_ref, _: x_ref, op, name, **how)


def _launch(
    x: jax.Array,
    group: Group,
    shape: tuple[int, ...],
    term: Callable[[Ref, Any], Ref],
    op: str,
    name: str,
    *,
    vmem: bool,
    interpret: Interpret,
) -> jax.Array:
    """Runs the kernel that leaves a result of a shape; for `term` see there."""
    result = jax.ShapeDtypeStruct(shape, x.dtype)
    return launch.call(
        functools.partial(_kernel, term=term, op=op, vmem=vmem),
        group,
        x,
        out_shape=result,
        scratch=Scratch(buffer((group.size, *shape), x.dtype), PushSemaphores()),
        barrier="everyone",
        name=name,
        interpret=interpret,
        vmem=vmem,
        wire_bytes=(group.size - 1) * result.size * x.dtype.itemsize,
        pipeline_bytes=0 if vmem else stack_bytes(result, group.size),
    )


def _kernel(
    ring: Ring,
    x_ref: Ref,  # own operand: HBM or VMEM
    o_ref: Ref,  # result: HBM or VMEM
    scratch: Scratch,
    *,
    term: Callable[[Ref, Any], Ref],  # (x_ref, position): our term of that device's result
    op: str,
    vmem: bool,
) -> None:
    own_layer = scratch.stack_ref.at[ring.me]
    sync.push_to_everyone(
        ring, lambda owner, _: term(x_ref, owner), lambda _: own_layer, scratch.push
    )
    with jax.named_scope("combine"):
        combine_stack(op, o_ref, scratch.stack_ref, vmem=vmem)
