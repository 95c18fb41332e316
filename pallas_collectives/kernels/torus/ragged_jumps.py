"""Ragged all-to-all over all axes of a torus at once; see `exchange` for who sends what when.

Slices go in chunks of rows. A chunk has the rows of that number of every device's slices for every
other; of a parcel, each slice's rows that there are go by themselves, so that empty slices cost
nothing on the wire. Each device has the tables of all, so it knows what comes and where it goes.

             steps                                bytes sent per device       tables in SMEM
    torus    jumps of the longest routes, of      the rows sent, and all      2 n^2 * slices
             all axes together, for each chunk    that it relays

Scratch: as `all_to_all`'s, with a chunk of every slice in place of blocks' chunks. Chunks are as
large as makes that 16 MiB, but at least one row.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives.annotations import DType, Interpret, Number, Ref, Semaphore, span
from pallas_collectives.kernels import ragged_all_to_all as ragged
from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.entry import WIDE
from pallas_collectives.kernels.torus import devices
from pallas_collectives.kernels.torus.course import SCRATCH_BYTES, Course, Semaphores
from pallas_collectives.kernels.torus.exchange import Exchange, Move
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Group, Ring


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays and tables."""

    # for each order, for each phase but the last: (window, n, *chunk): HBM or VMEM; written by
    #   those along the phase's axis
    held: list[list[Any]]
    # for each order and phase: (window, slots, n of other axes, *chunk): HBM or VMEM; written by
    #   peers; None where nothing waits on its way
    on_way: list[list[Any]]
    semaphores: Semaphores


def all_axes(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    all_sizes: jax.Array,
    all_places: jax.Array,
    group: Group,
    *,
    vmem: bool,
    interpret: Interpret,
) -> jax.Array:
    """As `ragged_all_to_all.ring`, over all axes."""
    axes = devices.axes_of(group)
    course, n = Course.of(axes), group.size
    row_bytes = operand.nbytes // len(operand)
    most = min(len(operand), len(output))
    fitting = int(SCRATCH_BYTES / (course.scratch * n * row_bytes)) if course.scratch else most
    chunk = min(most, max(1, min(fitting, ragged.CHUNK_BYTES // row_bytes)))
    chunks = -(-jnp.clip(all_sizes.max(), 0, most) // chunk)
    table = jnp.asarray(course.table, jnp.int32)
    return launch.call(
        functools.partial(_kernel, course=course, chunk=chunk, slices=len(all_sizes) // n**2),
        group,
        operand,
        output,
        axes=axes,
        out_shape=jax.ShapeDtypeStruct(output.shape, output.dtype),
        scalars=(
            *(table, chunks.reshape(1), input_offsets, all_sizes, all_places),
            *devices.tables(axes),
        ),
        scratch=_scratch(course, (chunk, *operand.shape[1:]), operand.dtype),
        chunking=ragged.chunking(most, chunk),
        barrier=WIDE,  # a device may neither send nor receive, and end at once
        name="ragged_all_to_all_torus",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=operand.nbytes * len(axes),
        input_output_aliases={1: 0},
    )


def _scratch(course: Course, chunk: tuple[int, ...], dtype: DType) -> Scratch:
    n = math.prod(course.sizes)

    def slots(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((course.window, *shape, *chunk), dtype)

    def on_way(axis: int) -> jax.ShapeDtypeStruct | None:
        along = course.axes[axis]
        return slots(along.slots, n // along.n) if along.slots else None

    held = [[slots(n) for _ in order[1:]] for order in course.orders]
    return Scratch(held, [list(map(on_way, order)) for order in course.orders], course.semaphores)


def _kernel(
    rings: Sequence[Ring],  # along each axis
    table_ref: Ref,  # Course.table: SMEM, as the next four
    chunks_ref: Ref,  # (1,): chunks of the largest slice of all
    input_offsets_ref: Ref,  # (n * slices,)
    sizes_ref: Ref,  # (n * n * slices,): rows of each sender's slices, by receiver
    places_ref: Ref,  # (n * n * slices,): where they begin there
    *refs: Any,  # see below
    course: Course,
    chunk: int,
    slices: int,
) -> None:
    *numbers, x_ref, o_ref, scratch = refs
    # numbers: `devices.tables`
    # x_ref: (rows, ...): HBM or VMEM
    # o_ref: (rows', ...): HBM or VMEM; rows that nobody sends to are as they were
    # scratch: a Scratch
    tables = Tables(chunk, slices, input_offsets_ref, sizes_ref, places_ref, *numbers)
    rows = Rows(course, [ring.block(0) for ring in rings], tables, x_ref, o_ref, scratch)
    Exchange(course, rings, table_ref, scratch.semaphores, rows).run(chunks_ref[0] * slices)


@dataclasses.dataclass(frozen=True)
class Tables:
    """What everyone sends, in chunks of so many rows."""

    chunk: int
    slices: int
    input_offsets_ref: Ref
    sizes_ref: Ref
    places_ref: Ref
    numbers_ref: Ref | None = None  # see `devices.Field`


@dataclasses.dataclass(frozen=True)
class Rows:
    """An `exchange.Cargo`: the rows that there are of everyone's slices."""

    course: Course
    me: Sequence[Any]  # our place along each axis
    tables: Tables
    x_ref: Ref
    o_ref: Ref
    scratch: Scratch

    def pairs(self, move: Move, body: Callable[[Ref, Ref], None]) -> None:
        def one(sender: list[Any], receiver: list[Any], held: list[Any], j: Number) -> None:
            i, size, begin, rows = self._slice(move, sender, receiver)
            count: Number = rows
            first: Number = 0
            there: Number = 0
            if move.at is not None:
                source = self._on_way(move, move.at, j)
            elif move.phase:
                source = self._held(move, move.phase - 1, held, move.goal)
            else:
                source = self.x_ref
                mine = self._number(receiver) * self.tables.slices + self._which(move)[0]
                first = ragged.start(source, self.tables.input_offsets_ref[mine], size) + begin
            if move.to is not None:
                target = self._on_way(move, move.to, j)
            elif move.phase + 1 < len(self.course.axes):
                target = self._held(move, move.phase, held, move.origin)
            else:
                target = self.o_ref
                there = ragged.start(target, self.tables.places_ref[i], size) + begin
            body(source.at[span(first, count)], target.at[span(there, count)])

        self._for_each(move, one)

    def wait(self, semaphore: Semaphore, move: Move) -> None:
        def one(sender: list[Any], receiver: list[Any], held: list[Any], j: Number) -> None:
            rows: Number = self._slice(move, sender, receiver)[-1]
            sync.wait(semaphore, self.o_ref.at[span(0, rows)])

        self._for_each(move, one)

    def _for_each(self, move: Move, body: Callable[..., None]) -> None:
        """body(sender, receiver, place in what is held, number) for a parcel's slices with rows."""
        sizes, order = self.course.sizes, self.course.orders[move.order]
        others = [axis for axis in range(len(sizes)) if axis != move.axis]

        def one(j: Number) -> None:
            held: list[Any] = list(self.me)
            place = groups.unraveled(j, [sizes[axis] for axis in others])
            for axis, number in zip(others, place, strict=True):
                held[axis] = number
            # Along axes that are behind, what is held lies by senders; along others by receivers.
            behind = order[: move.phase]
            sender = [held[k] if k in behind else self.me[k] for k in range(len(sizes))]
            receiver = [self.me[k] if k in behind else held[k] for k in range(len(sizes))]
            sender[move.axis], receiver[move.axis] = move.origin, move.goal
            *_, count = self._slice(move, sender, receiver)
            groups.only_if(count > 0, functools.partial(body, sender, receiver, held, j))

        sync.for_each(0, math.prod(sizes[axis] for axis in others), one)

    def _which(self, move: Move) -> tuple[Number, Number]:
        """Which of a pair's slices a chunk belongs to, and the chunk's number there."""
        slices = np.int32(self.tables.slices)
        return lax.rem(move.chunk, slices), lax.div(move.chunk, slices)

    def _slice(
        self, move: Move, sender: Sequence[Any], receiver: Sequence[Any]
    ) -> tuple[Number, Number, Number, Number]:
        """A slice's number in the tables, its rows; where a chunk begins there, and its rows."""
        n, chunk = math.prod(self.course.sizes), np.int32(self.tables.chunk)
        number, part = self._which(move)
        i = (self._number(sender) * n + self._number(receiver)) * self.tables.slices + number
        most = min(self.x_ref.shape[0], self.o_ref.shape[0])
        size = ragged.clipped(self.tables.sizes_ref[i], most)
        begin = part * chunk
        return i, size, begin, lax.clamp(np.int32(0), size - begin, chunk)

    def _number(self, place: Sequence[Any]) -> Number:
        """The number of the device at a place."""
        flat: Number = self._flat(range(len(place)), place)
        return flat if self.tables.numbers_ref is None else self.tables.numbers_ref[flat]

    def _flat(self, axes: Sequence[int], place: Sequence[Any]) -> Number:
        flat: Number = 0
        for axis in axes:
            flat = flat * self.course.sizes[axis] + place[axis]
        return flat

    def _held(self, move: Move, phase: int, held: Sequence[Any], number: Number) -> Ref:
        place = [*held[: move.axis], number, *held[move.axis + 1 :]]
        at = self._flat(range(len(place)), place)
        return self.scratch.held[move.order][phase].at[move.slot, at]

    def _on_way(self, move: Move, slot: Number, j: Number) -> Ref:
        return self.scratch.on_way[move.order][move.phase].at[move.slot, slot, j]
