"""The kernels of `wire_passes`: what they do with a step of a grid.

Of some blocks a step's numbers, (blocks, rows, columns), and what they are packed as, (blocks,
rows, 128), are in VMEM.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives import noise, tiles, wires
from pallas_collectives.annotations import DTypeLike, Number, Ref
from pallas_collectives.kernels.machinery.combine import OPS
from pallas_collectives.kernels.wire_format import Format, Place
from pallas_collectives.tiles import LANES, SUBLANES

_LEAST_NORMAL = np.int32(0x00800000)


def _each(kernel: Callable[..., None]) -> Callable[..., None]:
    """A kernel of one block's refs, of several blocks at a time."""

    @functools.wraps(kernel)
    def of_all(from_ref: Ref, to_ref: Ref, **options: Any) -> None:
        def one(block: Number, _: None) -> None:
            kernel(from_ref.at[block], to_ref.at[block], **options)

        lax.fori_loop(0, from_ref.shape[0], one, None)

    return of_all


@_each
def pack(numbers_ref: Ref, packed_ref: Ref, format: Format, dtype: DTypeLike) -> None:
    _pack_block(numbers_ref, packed_ref, format, dtype)


def _pack_block(
    numbers_ref: Ref,
    packed_ref: Ref,
    format: Format,
    dtype: DTypeLike,
    drawing: Callable[[Place, Number], jax.Array] | None = None,
) -> None:
    """drawing: the noise of a unit in the order of the wire, to round at random."""

    def read(place: Place, unit: Number) -> jax.Array:
        """In the order of the wire: (numbers / 128, 128)."""
        numbers = numbers_ref[place.unit(unit)]
        ordered = numbers.T if format.turned else jnp.concatenate(_tiles(numbers, 1), 0)
        return wires.overflown(ordered, dtype).astype(jnp.float32)

    def write(place: Place, unit: Number, numbers: jax.Array, inverses: jax.Array) -> None:
        drawn = drawing and drawing(place, unit)
        values = wires.rounded(numbers, inverses, format.wire, drawn)
        packed_ref[place.packed(unit)] = pltpu.bitcast(values, jnp.int32)

    def of_turned(place: Place) -> jax.Array:
        rows = [jnp.zeros((1, LANES), jnp.float32)] * SUBLANES
        for unit in range(format.units):
            numbers = read(place, unit)
            bits = jnp.max(wires.magnitudes(numbers), axis=0, keepdims=True)
            rows[unit] = wires.scales_of(bits, format.wire)
            write(place, unit, numbers, wires.inverse(rows[unit]))
        return jnp.concatenate(rows, 0)

    def of_others(place: Place) -> jax.Array:
        bits = lax.bitcast_convert_type(_largest(place, read), jnp.int32)
        scales = wires.scales_of(bits, format.wire)

        def one(unit: Number, inverses: jax.Array) -> None:
            write(place, unit, read(place, unit), inverses)

        _each_unit(wires.inverse(scales), format, one)
        return scales

    def chunk(number: Number, _: None) -> None:
        place = Place(format, number)
        scales = of_turned(place) if format.turned else of_others(place)
        packed_ref[place.scales] = lax.bitcast_convert_type(scales, jnp.int32)

    lax.fori_loop(0, format.chunks, chunk, None)


@_each
def unpack(packed_ref: Ref, out_ref: Ref, format: Format) -> None:
    def take(place: Place, unit: Number, numbers: jax.Array) -> None:
        arrived = wires.saturated(numbers, out_ref.dtype)
        out_ref[place.unit(unit)] = _in_block(arrived, format)

    _each_read(packed_ref, format, take)


def lost(*refs: Ref, format: Format) -> None:
    *blocks, out_ref, packed_ref = refs  # the last: one block as it travels
    dtype = out_ref.dtype

    def one(block: Number, _: None) -> None:
        own_ref, given_ref = blocks[0].at[block], blocks[-1].at[block]

        def take(place: Place, unit: Number, numbers: jax.Array) -> None:
            arrived = _in_block(wires.saturated(numbers, dtype, jnp.float32), format)
            own = own_ref[place.unit(unit)].astype(jnp.float32)
            out_ref[block, *place.unit(unit)] = (own - arrived).astype(dtype)

        _pack_block(given_ref, packed_ref, format, dtype)
        _each_read(packed_ref, format, take)

    lax.fori_loop(0, out_ref.shape[0], one, None)


def drawn(
    words_ref: Ref,  # (2,) of the key, in SMEM
    numbers_ref: Ref,
    out_ref: Ref,
    packed_ref: Ref,  # one block as it travels
    format: Format,
) -> None:
    words, first = (words_ref[0], words_ref[1]), pl.program_id(0) * out_ref.shape[0]
    down, along = (pl.program_id(axis) * format.step[axis - 1] for axis in (1, 2))

    def one(block: Number, _: None) -> None:
        def drawing(place: Place, unit: Number) -> jax.Array:
            row, column = place.begins(unit)
            row += down + (first + block) * format.block[0]
            return noise.at(words, _numbers_of(row, column + along, format))

        def take(place: Place, unit: Number, numbers: jax.Array) -> None:
            arrived = wires.saturated(numbers, out_ref.dtype)
            out_ref[block, *place.unit(unit)] = _in_block(arrived, format)

        _pack_block(numbers_ref.at[block], packed_ref, format, out_ref.dtype, drawing)
        _each_read(packed_ref, format, take)

    lax.fori_loop(0, out_ref.shape[0], one, None)


def _numbers_of(row: Number, column: Number, format: Format) -> jax.Array:
    """The places, in the order of tiles, of a unit's numbers in the order of the wire.

    A unit begins with a tile, so that places within it are added to that of the tile.
    """
    (high, wide), columns = format.unit, format.block[1]
    shape = (wide, high) if format.turned else (high, LANES)
    rows, lanes = (lax.broadcasted_iota(jnp.int32, shape, axis ^ format.turned) for axis in (0, 1))
    parts = range(0, LANES if format.turned else wide, LANES)
    within = [tiles.number(rows, lanes + first, columns) for first in parts]
    return jnp.concatenate(within, 0) + tiles.number(row, column, columns)


@_each
def values(packed_ref: Ref, out_ref: Ref, format: Format) -> None:
    def move(place: Place, unit: Number) -> None:
        stacked = pltpu.bitcast(packed_ref[place.packed(unit)], jnp.dtype(format.wire.dtype))
        out_ref[place.unit(unit)] = _in_block(stacked, format)

    _each_place(format, move)


def add(
    packed_ref: Ref,
    out_ref: Ref,
    total_ref: Ref,  # float32 (numbers / 128, 128), in the order of the wire: the sum so far
    format: Format,
    terms: DTypeLike,
    op: str,
) -> None:
    several = packed_ref.shape[0]
    first = pl.program_id(2) * several

    def one(block: Number, _: None) -> None:
        number = first + block

        def take(place: Place, unit: Number, numbers: jax.Array) -> None:
            term, at = wires.saturated(numbers, terms, jnp.float32), place.in_step(unit)
            total_ref[at] = jnp.where(number == 0, term, OPS[op](total_ref[at], term))

        _each_read(packed_ref.at[block], format, take)

    lax.fori_loop(0, several, one, None)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        def move(place: Place, unit: Number) -> None:
            total = total_ref[place.in_step(unit)].astype(out_ref.dtype)
            out_ref[place.unit(unit)] = _in_block(total, format)

        _each_place(format, move)


def _largest(place: Place, read: Callable[[Place, Number], jax.Array]) -> jax.Array:
    """The largest magnitudes of a chunk's groups, where their scales are to be."""
    format = place.format
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)

    def put(found: jax.Array, bits: jax.Array, first: Number) -> jax.Array:
        most = largest_in_rows(bits)
        for k in range(len(most) // SUBLANES):
            rows = most[k * SUBLANES : (k + 1) * SUBLANES]
            found = jnp.where(lane == first + k, rows, found)
        return found

    def of_groups(unit: Number, found: jax.Array) -> jax.Array:
        parts = _tiles(read(place, unit), 0, format.unit[0])
        groups = (parts[k : k + format.parts] for k in range(0, len(parts), format.parts))
        return put(found, jnp.concatenate([*map(_most, groups)], 0), unit * format.lanes)

    def of_rows(row: Number, found: jax.Array) -> jax.Array:
        def most(column: Number, so_far: jax.Array) -> jax.Array:
            numbers = read(place, row * format.across + column)
            return jnp.maximum(so_far, _most(_tiles(numbers, 0, format.unit[0])))

        bits = jnp.zeros((format.unit[0], LANES), jnp.int32)
        bits = lax.fori_loop(0, format.across, most, bits, unroll=_together(format.across))
        return put(found, bits, row * format.lanes)

    found = jnp.zeros((SUBLANES, LANES), jnp.float32)
    if format.parts:
        return lax.fori_loop(0, format.units, of_groups, found, unroll=_together(format.units))
    return lax.fori_loop(0, format.units // format.across, of_rows, found)


def largest_in_rows(bits: jax.Array) -> jax.Array:
    """float32 (rows, 1): the largest of `magnitudes`, at least the least normal number if any.

    Units compare floats along lanes, and may take subnormal ones for 0; so their scales are the
    same as of that number.
    """
    normal = jnp.where(bits == 0, 0, jnp.maximum(bits, _LEAST_NORMAL))
    return jnp.max(lax.bitcast_convert_type(normal, jnp.float32), axis=1, keepdims=True)


def _most(parts: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.maximum, map(wires.magnitudes, parts))


def _tiles(numbers: jax.Array, axis: int, each: int = LANES) -> list[jax.Array]:
    """Parts of so many rows or columns."""
    return jnp.split(numbers, numbers.shape[axis] // each, axis)


def _in_block(numbers: jax.Array, format: Format) -> jax.Array:
    """A unit in the order of the wire, as it is in its block."""
    if format.turned:
        return numbers.T
    return jnp.concatenate(_tiles(numbers, 0, format.unit[0]), 1)


def _each_place(format: Format, do: Callable[[Place, Number], None]) -> None:
    """Calls do(place, unit) of each unit of a step."""

    def chunk(number: Number, _: None) -> None:
        def one(unit: Number, _: None) -> None:
            do(Place(format, number), unit)

        lax.fori_loop(0, format.units, one, None, unroll=_together(format.units))

    lax.fori_loop(0, format.chunks, chunk, None)


def _each_read(
    packed_ref: Ref, format: Format, take: Callable[[Place, Number, jax.Array], None]
) -> None:
    """Calls take(place, unit, numbers) of each unit of a step: float32, in the wire's order."""

    def chunk(number: Number, _: None) -> None:
        place = Place(format, number)
        scales = lax.bitcast_convert_type(packed_ref[place.scales], jnp.float32)

        def one(unit: Number, scales: jax.Array) -> None:
            values = pltpu.bitcast(packed_ref[place.packed(unit)], jnp.dtype(format.wire.dtype))
            take(place, unit, values.astype(jnp.float32) * scales)

        _each_unit(scales, format, one)

    lax.fori_loop(0, format.chunks, chunk, None)


def _each_unit(
    scales: jax.Array, format: Format, take: Callable[[Number, jax.Array], None]
) -> None:
    """Calls take(number, scales) of each unit of a chunk: (1, 128) or (rows, 1) of its numbers."""
    if format.turned:
        for unit in range(format.units):
            take(unit, scales[unit : unit + 1])
        return
    lanes = format.unit[0] // SUBLANES  # of a tile's rows

    def of(first: Number, count: int) -> list[jax.Array]:
        """Those of units from a lane on."""
        turned = pltpu.roll(scales, lax.rem(LANES - first, LANES), 1)

        def rows(k: int) -> jax.Array:
            return jnp.concatenate([turned[:, j : j + 1] for j in range(k, k + lanes)], 0)

        alike = format.parts or format.unit[1] // LANES  # tiles
        groups = range(0, format.lanes, lanes)
        return [
            jnp.concatenate([rows(k * format.lanes + j) for j in groups for _ in range(alike)], 0)
            for k in range(count)
        ]

    together = _together(format.units if format.parts else format.across)

    def several(turn: Number, _: None) -> None:
        for k, found in enumerate(of(turn * together * format.lanes, together)):
            take(turn * together + k, found)

    def row(number: Number, _: None) -> None:
        (found,) = of(number * format.lanes, 1)
        found = jnp.broadcast_to(found, (len(found), LANES))

        def one(column: Number, _: None) -> None:
            take(number * format.across + column, found)

        lax.fori_loop(0, format.across, one, None, unroll=together)

    if format.parts:
        lax.fori_loop(0, format.units // together, several, None)
    else:
        lax.fori_loop(0, format.units // format.across, row, None)


def _together(turns: int) -> int:
    """How many of so many turns the compiler does side by side: they wait for units of theirs."""
    return next(k for k in (8, 4, 2, 1) if turns % k == 0)
