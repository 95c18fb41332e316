"""All-to-all over all axes of a torus at once; see `exchange` for who sends what when.

             steps                           bytes per link and direction      scratch
    torus    jumps of the longest routes,    n_a N / 8 on a ring of n_a,       16 MiB at most
             of all axes together            n_a N / 4 on a line, in its midst

N are the bytes of the operand; each axis carries that, whatever the others do. On v5e 16 x 16 a
chunk takes 6 steps, and a link 2 N.

Parcels are one piece of the operand, of the result, and of all between, where its blocks lie along
the dimension along which they are to lie. Else those of a last phase come to their places one by
one, as do all of devices that are not numbered as they lie.

Scratch: for each order of the axes and each phase but the last a place for all blocks' chunks that
have come, and for each phase slots for parcels on their way, for `Course.window` chunks of each.
Chunks are so small that all of it is 16 MiB, where blocks can be cut as finely: on v5e 16 x 16 at
the least 25 blocks' tiles for each device, 25 MiB of float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_collectives.annotations import DType, Interpret, Number, Ref, Semaphore, span
from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.blocks import LANES, Blocks
from pallas_collectives.kernels.torus import devices
from pallas_collectives.kernels.torus.course import SCRATCH_BYTES, Course, Semaphores
from pallas_collectives.kernels.torus.exchange import Exchange, Move
from pallas_collectives.topology.groups import Group, Ring, unraveled

# Chunks, where scratch allows for fewer: enough for their steps to overlap, in parcels that links
# take longer for than for the way. By the replay of v5e.
CHUNKS_PER_ORDER = 8
PARCEL_BYTES = 64 << 10


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays."""

    # for each order, for each phase but the last: (window, all blocks' chunks): HBM or VMEM;
    #   written by those along the phase's axis
    held: list[list[Any]]
    # for each order and phase: (window, slots, a parcel's chunks): HBM or VMEM; written by peers;
    #   None where no parcel waits on its way
    on_way: list[list[Any]]
    semaphores: Semaphores


def all_axes(
    x: jax.Array,
    group: Group,
    *,
    split_axis: int,
    concat_axis: int,
    vmem: bool,
    interpret: Interpret,
) -> jax.Array:
    """Exchanges blocks over all axes; a block must be `sliceable` along either axis."""
    axes = devices.axes_of(group)
    block = list(x.shape)
    block[split_axis] //= group.size
    plan = ExchangePlan.of(axes, View.of(tuple(block), split_axis, concat_axis), x.dtype)
    sizes = devices.field_sizes(axes)
    y = launch.call(
        functools.partial(_kernel, plan=plan),
        group,
        plan.view.into(x, sizes),
        axes=axes,
        scalars=[jnp.asarray(plan.course.table, jnp.int32), *devices.tables(axes)],
        out_shape=jax.ShapeDtypeStruct(plan.view.field(concat_axis, sizes), x.dtype),
        scratch=plan.scratch(x.dtype),
        chunking=plan.blocks.chunking,
        barrier="jumps on a torus",
        name="all_to_all_torus",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=x.nbytes * len(axes),
    )
    return plan.view.out_of(y)


@dataclasses.dataclass(frozen=True)
class View:
    """Blocks side by side along an axis, seen with dimensions for the torus there.

    Reshapes that move nothing: where either axis is the last, blocks are seen as the tiles that
    they are in memory.

    Attributes:
      shape: the shape of a block.
      block: its shape as it is seen.
      split: along which axis the operand's blocks lie: before it stand the torus' dimensions.
      concat: likewise the result's.
    """

    shape: tuple[int, ...]
    block: tuple[int, ...]
    split: int
    concat: int

    @classmethod
    def of(cls, shape: tuple[int, ...], split: int, concat: int) -> "View":
        """That of blocks of a shape, `sliceable` along both axes."""
        if len(shape) - 1 not in (split, concat):
            return cls(shape, shape, split, concat)
        *before, rows, columns = shape
        high = 8 if rows % 8 == 0 else rows
        return cls(shape, (*before, rows // high, columns // LANES, high, LANES), split, concat)

    def field(self, axis: int, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of as many blocks as `sizes` says, along an axis, as they are seen."""
        return (*self.block[:axis], *sizes, *self.block[axis:])

    def into(self, x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        """The operand as it is seen."""
        if self.block != self.shape:
            *before, rows, columns = x.shape
            high = self.block[-2]
            x = x.reshape(*before, rows // high, high, columns // LANES, LANES)
            x = jnp.swapaxes(x, -3, -2)
        return x.reshape(self.field(self.split, sizes))

    def out_of(self, y: jax.Array) -> jax.Array:
        """The result as it is."""
        n = y.size // math.prod(self.shape)
        shape, seen = list(self.shape), list(self.block)
        shape[self.concat] *= n
        seen[self.concat] *= n
        y = y.reshape(seen)
        return (y if self.block == self.shape else jnp.swapaxes(y, -3, -2)).reshape(shape)


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """How blocks lie and are cut, and which way their chunks go."""

    view: View
    blocks: Blocks  # as they are seen, and in how many chunks
    course: Course

    @classmethod
    def of(cls, axes: Sequence[Group], view: View, dtype: DType) -> "ExchangePlan":
        """That for blocks on the axes of a torus."""
        course = Course.of(axes)
        n = math.prod(course.sizes)
        total = n * math.prod(view.block) * jnp.dtype(dtype).itemsize
        least = math.ceil(total * course.scratch / SCRATCH_BYTES)
        parcels = total // (max(course.sizes) * PARCEL_BYTES)
        wanted = max(1, least, min(parcels, CHUNKS_PER_ORDER * len(axes)))
        blocks = Blocks.of(view.block, 0, dtype, wanted)
        return cls(view, blocks, course.cut(blocks.chunks))

    def scratch(self, dtype: DType) -> Scratch:
        """What to allocate."""
        sizes, window = self.course.sizes, self.course.window
        chunk = dataclasses.replace(self.view, block=self.blocks.chunk_shape)

        def slots(*shape: int, of: Sequence[int]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((window, *shape, *chunk.field(self.view.split, of)), dtype)

        def on_way(axis: int) -> jax.ShapeDtypeStruct | None:
            count = self.course.axes[axis].slots
            parcel = (*sizes[:axis], 1, *sizes[axis + 1 :])
            return slots(count, of=parcel) if count else None

        orders = self.course.orders
        held = [[slots(of=sizes) for _ in order[1:]] for order in orders]
        return Scratch(held, [list(map(on_way, order)) for order in orders], self.course.semaphores)


def _kernel(
    rings: Sequence[Ring],  # along each axis
    table_ref: Ref,  # Course.table: SMEM
    *refs: Any,  # see below
    plan: ExchangePlan,
) -> None:
    *numbers, x_ref, o_ref, scratch = refs
    # numbers: `devices.tables`
    # x_ref: all blocks, with dimensions for the torus: HBM or VMEM
    # o_ref: likewise
    # scratch: a Scratch
    parcels = Parcels(plan, x_ref, o_ref, scratch, *numbers)
    Exchange(plan.course, rings, table_ref, scratch.semaphores, parcels).run(plan.blocks.chunks)


@dataclasses.dataclass(frozen=True)
class Part:
    """Some blocks, or chunks of them, in an array.

    Attributes:
      ref: the array: HBM or VMEM.
      at: before which dimension of a block those of the torus stand.
      number: the parcel's number along its axis.
      chunk: which one of whole blocks; None where the array has but one of each.
      numbers_ref: the blocks' numbers, where they lie in that order (see `devices.Field`).
    """

    ref: Ref
    at: int
    number: Number
    chunk: Number | None = None
    numbers_ref: Ref | None = None


@dataclasses.dataclass(frozen=True)
class Parcels:
    """An `exchange.Cargo`: some blocks' chunks."""

    plan: ExchangePlan
    x_ref: Ref
    o_ref: Ref
    scratch: Scratch
    numbers_ref: Ref | None = None

    def pairs(self, move: Move, body: Callable[[Ref, Ref], None]) -> None:
        source, target = self._source(move), self._target(move)
        numbered = source.numbers_ref is not None or target.numbers_ref is not None
        if source.at == target.at and not numbered:
            body(self._parcel(source, move.axis), self._parcel(target, move.axis))
            return
        sizes = self.plan.course.sizes
        others = [axis for axis in range(len(sizes)) if axis != move.axis]

        def one(j: Number) -> None:
            place: list[Any] = [0] * len(sizes)
            at = unraveled(j, [sizes[axis] for axis in others])
            for axis, number in zip(others, at, strict=True):
                place[axis] = number
            body(self._block(source, move.axis, place), self._block(target, move.axis, place))

        sync.for_each(0, math.prod(sizes[axis] for axis in others), one)

    def wait(self, semaphore: Semaphore, move: Move) -> None:
        sizes = self.plan.course.sizes
        some = Part(self.x_ref, self.plan.view.split, 0, 0, self.numbers_ref)
        if self.numbers_ref is None:
            sync.wait(semaphore, self._parcel(some, move.axis))
            return
        one = self._block(some, move.axis, [0] * len(sizes))
        sync.wait(semaphore, one, times=math.prod(sizes) // sizes[move.axis])

    def _source(self, move: Move) -> Part:
        if move.at is not None:
            return self._on_way(move, move.at)
        if move.phase == 0:
            split = self.plan.view.split
            return Part(self.x_ref, split, move.goal, move.chunk, self.numbers_ref)
        return self._held(move, move.phase - 1, move.goal)

    def _target(self, move: Move) -> Part:
        if move.to is not None:
            return self._on_way(move, move.to)
        if move.phase + 1 == len(self.plan.course.axes):
            concat = self.plan.view.concat
            return Part(self.o_ref, concat, move.origin, move.chunk, self.numbers_ref)
        return self._held(move, move.phase, move.origin)

    def _on_way(self, move: Move, slot: Number) -> Part:
        slots_ref = self.scratch.on_way[move.order][move.phase]
        return Part(slots_ref.at[move.slot, slot], self.plan.view.split, 0)

    def _held(self, move: Move, phase: int, number: Number) -> Part:
        held_ref = self.scratch.held[move.order][phase]
        return Part(held_ref.at[move.slot], self.plan.view.split, number)

    def _parcel(self, part: Part, axis: int) -> Ref:
        """All blocks of a parcel, as one piece."""
        index: list[Any] = [pl.ds(0, n) for n in self.plan.course.sizes]
        number: Number = part.number
        index[axis] = span(number, 1)
        return self._at(part, index)

    def _block(self, part: Part, axis: int, place: Sequence[Any]) -> Ref:
        """One block of a parcel, without dimensions for the torus."""
        index = [*place[:axis], part.number, *place[axis + 1 :]]
        if part.numbers_ref is not None:
            flat: Number = 0
            for size, number in zip(self.plan.course.sizes, index, strict=True):
                flat = flat * size + number
            index = [part.numbers_ref[flat], *(0 for _ in index[1:])]
        return self._at(part, index)

    def _at(self, part: Part, index: Sequence[Any]) -> Ref:
        cut, shape = self.plan.blocks.cut, self.plan.blocks.chunk_shape
        dims: list[Any] = [pl.ds(0, size) for size in shape]
        if part.chunk is not None and self.plan.blocks.chunks > 1:
            start: Any = part.chunk * shape[cut]
            aligned = start if isinstance(start, int) else pl.multiple_of(start, shape[cut])
            dims[cut] = pl.ds(aligned, shape[cut])
        return part.ref.at[(*dims[: part.at], *index, *dims[part.at :])]
