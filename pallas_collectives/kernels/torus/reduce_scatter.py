"""Reduce-scatter and all-reduce over all axes of a torus at once; see `shares` for when who sends.

The all-gather backwards: a stream goes through the axes in the opposite order. In each phase it
reduces, along that axis, the pieces that the gather's phase moves: first all blocks of the operand,
1/n_a of them for each device along the axis; then what it has got of these, and so on down to its
own block. All-reduce goes on with the all-gather, with no barrier between: a stream whose own part
is finished sends it on at once, into places that nobody's reduction touches.

                     steps              bytes sent per link and direction
    reduce_scatter   sum of n_a // 2    (n-1)/(2d) blocks
    all_reduce       2 (sum of n_a // 2) (n-1)/d blocks

Scratch: `sections.SCRATCH_BYTES` of VMEM at the most, whatever the operand, or more where sums are
packed. An operand for which that is too little goes by in sections (`timetable`), all phases at
once, each with another section: what the phases of a section load links with unevenly, on a line,
or between the devices of a chip, others make up for. Round a ring a section goes one way alone
(`Shares.halfway`). A reduction on a line loads its links with 3, 2, 1 blocks one way, a gather with
1, 2, 3; together that is the least there is.

Order and rounding. A sum is built up along one axis after the other: own + (from the left) + (from
the right), each side's own sum ordered along the ring or line; where a stream goes one way own +
(from upstream). It is the same on every run. Within a device terms are added in float32 (integers
in 32 bits); each hop rounds once to the operand's dtype.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Copy, DType, Interpret, Number, Ref, Semaphore
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.blocks import block_shape
from pallas_collectives.kernels.machinery.codec import Codec
from pallas_collectives.kernels.torus import (
    all_gather,
    all_reduce_grid,
    devices,
    grid_chunks,
    packed_gather,
    scatter,
    sections,
    timetable,
)
from pallas_collectives.kernels.torus.devices import Field
from pallas_collectives.kernels.torus.scatter import Scatter
from pallas_collectives.kernels.torus.shares import Shares
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import Group, Ring, only_if

_ARRIVALS = 128  # semaphores for those of a gather on lines


class ScatterScratch(NamedTuple):
    """What the reduce-scatter's kernel takes beside its arrays."""

    scatter: scatter.Scratch
    copy_sems: Semaphore  # (streams): own; the own block's way from VMEM into the result

    @classmethod
    def of(cls, plan: Shares, dtype: DType, **how: Any) -> "ScatterScratch":
        """What to allocate; `how` as `scatter.Scratch.of` has it."""
        return cls(scatter.Scratch.of(plan, dtype, **how), all_gather.copy_semaphores(plan))


class ReduceScratch(NamedTuple):
    """What the all-reduce's kernel takes beside its arrays."""

    scatter: scatter.Scratch
    copy_sems: Semaphore  # (streams): own; the own block's way from VMEM into the result
    gather: list[channels.Semaphores]  # see all_gather.Gather

    @classmethod
    def of(cls, plan: Shares, dtype: DType, **how: Any) -> "ReduceScratch":
        """What to allocate, as above."""
        scattering = ScatterScratch.of(plan, dtype, **how)
        return cls(*scattering, all_gather.semaphores(plan, most=_ARRIVALS))


class PackedScratch(NamedTuple):
    """What the all-reduce's kernel takes beside its arrays where blocks travel packed."""

    scatter: scatter.Scratch
    gather: packed_gather.Scratch

    @classmethod
    def of(cls, plan: Shares, dtype: DType, *, codec: Codec) -> "PackedScratch":
        """What to allocate, as above."""
        scattering = scatter.Scratch.of(plan, dtype, vmem=False, codec=codec)
        return cls(scattering, packed_gather.Scratch.of(plan, dtype, codec))


def reduce_scatter(
    x: jax.Array,
    group: Group,
    *,
    axis: int,
    op: str,
    vmem: bool,
    interpret: Interpret,
    name: str = "reduce_scatter_torus",
    codec: Codec | None = None,
    result: DType | None = None,
) -> jax.Array:
    """Reduces x over the group and leaves each device its block along `axis`.

    Blocks must be `sliceable` along `axis` and whole tiles in their last two dimensions: of the
    `codec`, if sums are to travel packed; their groups of devices lie along one axis, and the
    `result` may be of another dtype. `name` is what profilers show.
    """
    left = jnp.dtype(result or x.dtype)
    axes = devices.axes_of(group)
    shape = block_shape(x.shape, axis, group.size)
    of = functools.partial(ScatterScratch.of, dtype=x.dtype, vmem=vmem, codec=codec, left=left)
    how: dict[str, Any] = {"there_and_back": False, "vmem": vmem, "codec": codec}
    how["cores"] = launch.cores(interpret) if codec else 1
    view, plan = sections.seen_and_cut(axes, shape, axis, x.dtype, of, **how)
    ones = (1,) * len(axes)
    y = launch.call(
        functools.partial(_scatter_kernel, plan=plan, op=op, vmem=vmem, codec=codec),
        group,
        view.into(x, devices.field_sizes(axes)),
        axes=axes,
        scalars=devices.tables(axes),
        out_shape=jax.ShapeDtypeStruct(plan.shape(ones), left),
        scratch=of(plan),
        barrier="neighbours on a torus",
        prepare=functools.partial(_prepare, plan=plan, codec=codec) if codec else None,
        name=f"{name}_packed" if codec else name,
        interpret=interpret,
        vmem=vmem,
        wire_bytes=x.nbytes * (group.size - 1) // group.size,
        cores=plan.cores,
        chunking=plan.chunking,
    )
    return view.out_of(y, ones)


def all_reduce(
    x: jax.Array,
    group: Group,
    *,
    op: str,
    vmem: bool,
    interpret: Interpret,
    name: str = "all_reduce_torus",
    codec: Codec | None = None,
) -> jax.Array:
    """Reduces x, of shape (n, whole tiles), over the group; `name` and `codec` as above."""
    axes = devices.axes_of(group)
    cut = None if vmem or codec else grid_chunks.cut_of(axes, x.shape, x.dtype)
    if cut:
        return all_reduce_grid.grid(x, group, axes, cut, op=op, interpret=interpret, name=name)
    of: Callable[[Shares], Any] = functools.partial(ReduceScratch.of, dtype=x.dtype, vmem=vmem)
    kernel: Callable[..., None] = functools.partial(_reduce_kernel, op=op, vmem=vmem)
    if codec:
        of = functools.partial(PackedScratch.of, dtype=x.dtype, codec=codec)
        kernel = functools.partial(_packed_kernel, codec=codec)
    how: dict[str, Any] = {"there_and_back": True, "vmem": vmem, "codec": codec}
    how["cores"] = launch.cores(interpret) if codec else 1
    view, plan = sections.seen_and_cut(axes, x.shape[1:], 0, x.dtype, of, **how)
    sizes = devices.field_sizes(axes)
    y = launch.call(
        functools.partial(kernel, plan=plan),
        group,
        view.into(x.reshape(-1, *x.shape[2:]), sizes),
        axes=axes,
        scalars=devices.tables(axes),
        out_shape=jax.ShapeDtypeStruct(plan.shape(sizes), x.dtype),
        scratch=of(plan),
        barrier="neighbours on a torus",
        prepare=functools.partial(_prepare, plan=plan, codec=codec) if codec else None,
        name=f"{name}_packed" if codec else name,
        interpret=interpret,
        vmem=vmem,
        wire_bytes=2 * x.nbytes * (group.size - 1) // group.size,
        cores=plan.cores,
        chunking=plan.chunking,
    )
    return view.out_of(y, sizes).reshape(x.shape)


def fits_packed(
    group: Group, block: tuple[int, ...], axis: int, dtype: DType, codec: Codec, *, back: bool
) -> bool:
    """Whether sums of blocks of a shape along an axis can travel packed; `back` for `all_reduce`.

    They can if blocks are whole tiles of the codec's, and the scratch leaves VMEM room: pieces of
    what several axes have met may be too large.
    """
    if sections.of_whole_tiles(block, axis, codec) is None:
        return False
    of: Any = functools.partial(ScatterScratch.of, vmem=False, left=dtype)
    of = functools.partial(PackedScratch.of if back else of, dtype=dtype, codec=codec)
    how: dict[str, Any] = {
        "there_and_back": back,
        "vmem": False,
        "codec": codec,
        "cores": chips.cores(),
    }
    axes = devices.axes_of(group)
    _, plan = sections.seen_and_cut(axes, block, axis, dtype, of, **how)
    return sections.vmem_bytes(of(plan)) <= sections.most_vmem(len(axes))


def _prepare(*refs: Any, plan: Shares, codec: Codec) -> Callable[[], None]:
    rings, *numbers, x_ref, _, scratch = refs
    plan = plan.on(rings[0].core)
    how: Any = {"op": "sum", "target": None, "codec": codec}
    Scatter(plan, rings, Field(plan, x_ref, *numbers), scratch.scatter, **how).fetch_first()
    return lambda: None  # waited for where they are packed


def _scatter_kernel(
    rings: Sequence[Ring],  # along each axis
    *refs: Any,  # see below
    plan: Shares,
    op: str,
    vmem: bool,
    codec: Codec | None,
) -> None:
    plan, (*numbers, x_ref, o_ref, scratch) = plan.on(rings[0].core), refs
    # numbers: `devices.tables`
    # x_ref: all blocks: HBM or VMEM
    # o_ref: one block, with dimensions of 1 for the torus: HBM or VMEM
    # scratch: a ScatterScratch
    operand, own = Field(plan, x_ref, *numbers), [0] * len(rings)

    def in_result(b: int, section: Number, stream: Number) -> Ref:
        return plan.piece(o_ref, own, plan.bundles[b], section, stream)

    def copy(b: int, section: Number, stream: Number) -> Copy:
        here, there = stage.own(b, section, stream), in_result(b, section, stream)
        return pltpu.make_async_copy(here, there, scratch.copy_sems.at[plan.stream(b, stream)])

    def finish(b: int, section: Number, stream: Number, add: Callable[[Any], None]) -> None:
        if vmem:
            add(in_result(b, section, stream))
            return
        only_if(section > 0, functools.partial(end_copy, b, stream))  # of the one before
        add(stage.own(b, section, stream))
        copy(b, section, stream).start()

    def end_copy(b: int, stream: Number) -> None:
        copy(b, 0, stream).wait()

    stage = Scatter(plan, rings, operand, scratch.scatter, op=op, target=finish, codec=codec)
    timetable.run(plan, (stage, plan.phases[::-1]))
    if not vmem:
        for b, bundle in enumerate(plan.bundles):
            sync.for_each(0, bundle.streams, functools.partial(end_copy, b))


def _reduce_kernel(
    rings: Sequence[Ring],  # along each axis
    *refs: Any,  # see below
    plan: Shares,
    op: str,
    vmem: bool,
) -> None:
    *numbers, x_ref, o_ref, scratch = refs
    # numbers: `devices.tables`
    # x_ref: all blocks: HBM or VMEM
    # o_ref: all blocks: HBM or VMEM
    # scratch: a ReduceScratch
    # A neighbour may be gathering while we still reduce: what it writes here, other blocks of o_ref
    # than our own, nobody reads or writes in the reduction.
    operand, result = Field(plan, x_ref, *numbers), Field(plan, o_ref, *numbers)

    def finish(b: int, section: Number, stream: Number, add: Callable[[Any], None]) -> None:
        if vmem:
            place, bundle = [ring.me for ring in rings], plan.bundles[b]
            result.for_each_piece(place, bundle, section, stream, lambda piece, _: add(piece))
        else:
            add(stage.own(b, section, stream))

    stage = Scatter(plan, rings, operand, scratch.scatter, op=op, target=finish)
    own = None if vmem else (stage.own, scratch.copy_sems)
    gather = all_gather.Gather(plan, rings, result, scratch.gather, own=own)
    timetable.run(plan, (stage, plan.phases[::-1]), (gather, plan.phases))


def _packed_kernel(
    rings: Sequence[Ring],  # along each axis
    *refs: Any,  # see below
    plan: Shares,
    codec: Codec,
) -> None:
    plan, (*numbers, x_ref, o_ref, scratch) = plan.on(rings[0].core), refs
    # numbers: `devices.tables`
    # x_ref: all blocks: HBM
    # o_ref: all blocks: HBM; nobody else writes to it
    # scratch: a PackedScratch
    operand, result = Field(plan, x_ref, *numbers), Field(plan, o_ref, *numbers)
    gather = packed_gather.PackedGather(plan, rings, result, scratch.gather, codec)

    def finish(b: int, section: Number, stream: Number, add: Callable[[Any], None]) -> None:
        add(gather.own(b, section, stream))

    how: dict[str, Any] = {"op": "sum", "target": finish, "codec": codec.within_hops, "last": codec}
    stage = Scatter(plan, rings, operand, scratch.scatter, **how)
    timetable.run(plan, (stage, plan.phases[::-1]), (gather, plan.phases))
    gather.drain()
