"""What a wire does to numbers on a TPU beside a collective, each in one pass over memory.

XLA quantises in passes of its own, and lays values and scales side by side in others; by the
compiler's cycles that takes ten times as long as HBM does. Here tiles are read, and written where
they travel, in the order in which they lie:

    pack     (k, ...) -> int32 (k, tiles, 8, 128)
    unpack   the inverse, in a dtype
    added    the sum of the blocks that come, in their order

Values and scales are those of `wires`, bit by bit; `wire_format` says where they are. Blocks of too
few numbers, or of no whole tiles, are for XLA's passes (`Format.of`), and so is float16, which
kernels do not know.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives import wires
from pallas_collectives.annotations import DTypeLike, Index, Interpret, Number, Ref
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.kernels.wire_format import Format, Place
from pallas_collectives.tiles import LANES, SUBLANES


def pack(blocks: jax.Array, format: Format, dtype: DTypeLike, *, interpret: Interpret) -> jax.Array:
    """Blocks as they travel: int32 (k, tiles, 8, 128).

    Args:
      blocks: (k, ...).
      format: the blocks' format.
      dtype: what overflows in it is sent as inf.
      interpret: False to compile.
    """
    k = len(blocks)
    packed = launch.apart(
        functools.partial(_pack_kernel, format=format, dtype=dtype),
        blocks.reshape(k, *format.block),
        grid=(k, *format.grid),
        in_specs=[_numbers(format)],
        out_specs=_packed(format),
        out_shape=jax.ShapeDtypeStruct((k, format.tiles * SUBLANES, LANES), jnp.int32),
        compiler_params=_parallel(3),
        name="wire_pack",
        seconds=format.seconds_to_pack(k, blocks.dtype.itemsize),
        interpret=interpret,
    )
    return packed.reshape(k, -1, SUBLANES, LANES)


def unpack(come: jax.Array, format: Format, dtype: DTypeLike, *, interpret: Interpret) -> jax.Array:
    """(n, rows, columns) in a dtype: the blocks that have come."""
    n = len(come)
    return launch.apart(
        functools.partial(_unpack_kernel, format=format),
        come.reshape(n, -1, LANES),
        grid=(n, *format.grid),
        in_specs=[_packed(format)],
        out_specs=_numbers(format),
        out_shape=jax.ShapeDtypeStruct((n, *format.block), dtype),
        compiler_params=_parallel(3),
        name="wire_unpack",
        seconds=format.seconds_to_unpack(n, jnp.dtype(dtype).itemsize),
        interpret=interpret,
    )


def values(come: jax.Array, format: Format, *, interpret: Interpret) -> jax.Array:
    """(n, rows, columns) in the wire's dtype: the values of the blocks that have come."""
    n = len(come)
    return launch.apart(
        functools.partial(_values_kernel, format=format),
        come.reshape(n, -1, LANES),
        grid=(n, *format.grid),
        in_specs=[_packed(format)],
        out_specs=_numbers(format),
        out_shape=jax.ShapeDtypeStruct((n, *format.block), format.wire.dtype),
        compiler_params=_parallel(3),
        name="wire_values",
        seconds=format.seconds_to_unpack(n, 1),
        interpret=interpret,
    )


def added(
    come: jax.Array, format: Format, terms: DTypeLike, dtype: DTypeLike, *, interpret: Interpret
) -> jax.Array:
    """(rows, columns) in a dtype: the first block plus the second, plus the third, in float32.

    terms: the dtype of the terms, none of which has a larger number.
    """
    n, along = len(come), format.grid[1]
    rows = format.chunks * format.chunk_rows
    return launch.apart(
        functools.partial(_add_kernel, format=format, terms=terms),
        come.reshape(n, -1, LANES),
        grid=(*format.grid, n),
        in_specs=[pl.BlockSpec((None, rows, LANES), lambda r, c, b: (b, r * along + c, 0))],
        out_specs=pl.BlockSpec(format.step, lambda r, c, b: (r, c)),
        out_shape=jax.ShapeDtypeStruct(format.block, dtype),
        scratch_shapes=[pltpu.VMEM(format.step, jnp.float32)],
        compiler_params=_parallel(2),
        name="wire_add",
        seconds=format.seconds_to_unpack(n, jnp.dtype(dtype).itemsize),
        interpret=interpret,
    )


def _parallel(dimensions: int) -> pltpu.CompilerParams:
    """So many of the grid's three can be shared by a device's cores."""
    semantics: Any = ("parallel",) * dimensions + ("arbitrary",) * (3 - dimensions)
    return pltpu.CompilerParams(dimension_semantics=semantics)


def _numbers(format: Format) -> pl.BlockSpec:
    return pl.BlockSpec((None, *format.step), lambda b, r, c: (b, r, c))


def _packed(format: Format) -> pl.BlockSpec:
    rows, along = format.chunks * format.chunk_rows, format.grid[1]
    return pl.BlockSpec((None, rows, LANES), lambda b, r, c: (b, r * along + c, 0))


# Kernels. A step's numbers, (rows, columns), and what they are packed as, (rows, 128), are in VMEM.


def _pack_kernel(numbers_ref: Ref, packed_ref: Ref, format: Format, dtype: DTypeLike) -> None:
    def read(at: tuple[Index, Index]) -> list[jax.Array]:
        numbers = wires.overflown(numbers_ref[at], dtype).astype(jnp.float32)
        return [numbers[:, k : k + LANES] for k in range(0, numbers.shape[1], LANES)]

    def chunk(number: Number, _: None) -> None:
        place = Place(format, number)
        scales = wires.scales_of(_largest(place, read), format.wire)
        packed_ref[place.scales] = lax.bitcast_convert_type(scales, jnp.int32)

        def one(unit: Number, inverses: jax.Array) -> None:
            numbers = jnp.concatenate(read(place.unit(unit)), 0)
            values = wires.rounded(numbers, inverses, format.wire)
            packed_ref[place.packed(unit)] = pltpu.bitcast(values, jnp.int32)

        _each_unit(wires.inverse(scales), format, one)

    lax.fori_loop(0, format.chunks, chunk, None)


def _unpack_kernel(packed_ref: Ref, out_ref: Ref, format: Format) -> None:
    def take(at: tuple[Index, Index], numbers: jax.Array) -> None:
        out_ref[at] = wires.saturated(numbers, out_ref.dtype)

    _each_read(packed_ref, format, take)


def _values_kernel(packed_ref: Ref, out_ref: Ref, format: Format) -> None:
    def chunk(number: Number, _: None) -> None:
        place = Place(format, number)

        def one(unit: Number, _: None) -> None:
            stacked = pltpu.bitcast(packed_ref[place.packed(unit)], jnp.dtype(format.wire.dtype))
            out_ref[place.unit(unit)] = _beside(stacked, format)

        lax.fori_loop(0, format.units, one, None, unroll=_together(format.units))

    lax.fori_loop(0, format.chunks, chunk, None)


def _add_kernel(
    packed_ref: Ref,
    out_ref: Ref,
    total_ref: Ref,  # float32, as the step's numbers: the sum so far
    format: Format,
    terms: DTypeLike,
) -> None:
    number = pl.program_id(2)

    def take(at: tuple[Index, Index], numbers: jax.Array) -> None:
        term = wires.saturated(numbers, terms, jnp.float32)
        total_ref[at] = jnp.where(number == 0, term, total_ref[at] + term)

    _each_read(packed_ref, format, take)

    @pl.when(number == pl.num_programs(2) - 1)
    def _() -> None:
        out_ref[...] = total_ref[...].astype(out_ref.dtype)


def _largest(place: Place, read: Callable[[tuple[Index, Index]], list[jax.Array]]) -> jax.Array:
    """The largest magnitudes of a chunk's groups, where their scales are to be."""
    format = place.format
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)

    def put(found: jax.Array, bits: jax.Array, first: Number) -> jax.Array:
        most = jnp.max(lax.bitcast_convert_type(bits, jnp.float32), axis=1, keepdims=True)
        for k in range(len(most) // SUBLANES):
            rows = most[k * SUBLANES : (k + 1) * SUBLANES]
            found = jnp.where(lane == first + k, rows, found)
        return found

    def of_groups(unit: Number, found: jax.Array) -> jax.Array:
        tiles = read(place.unit(unit))
        groups = (tiles[k : k + format.parts] for k in range(0, len(tiles), format.parts))
        return put(found, jnp.concatenate([*map(_most, groups)], 0), unit * format.lanes)

    def of_rows(row: Number, found: jax.Array) -> jax.Array:
        def most(column: Number, so_far: jax.Array) -> jax.Array:
            tiles = read(place.unit(row * format.across + column))
            return jnp.maximum(so_far, _most(tiles))

        bits = jnp.zeros((format.unit[0], LANES), jnp.int32)
        bits = lax.fori_loop(0, format.across, most, bits, unroll=_together(format.across))
        return put(found, bits, row * format.lanes)

    found = jnp.zeros((SUBLANES, LANES), jnp.float32)
    if format.parts:
        return lax.fori_loop(0, format.units, of_groups, found, unroll=_together(format.units))
    return lax.fori_loop(0, format.units // format.across, of_rows, found)


def _most(tiles: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.maximum, map(wires.magnitudes, tiles))


def _each_read(
    packed_ref: Ref, format: Format, take: Callable[[tuple[Index, Index], jax.Array], None]
) -> None:
    """Calls take(at, numbers), in float32, of each unit of a step."""

    def chunk(number: Number, _: None) -> None:
        place = Place(format, number)
        scales = lax.bitcast_convert_type(packed_ref[place.scales], jnp.float32)

        def one(unit: Number, scales: jax.Array) -> None:
            values = pltpu.bitcast(packed_ref[place.packed(unit)], jnp.dtype(format.wire.dtype))
            stacked = values.astype(jnp.float32) * scales
            take(place.unit(unit), _beside(stacked, format))

        _each_unit(scales, format, one)

    lax.fori_loop(0, format.chunks, chunk, None)


def _beside(stacked: jax.Array, format: Format) -> jax.Array:
    """A unit whose tiles are one below another, as it is in its block."""
    high = format.unit[0]
    return jnp.concatenate([stacked[k : k + high] for k in range(0, len(stacked), high)], 1)


def _each_unit(
    scales: jax.Array, format: Format, take: Callable[[Number, jax.Array], None]
) -> None:
    """Calls take(number, scales) of each unit of a chunk: (rows, 1) of its rows, tiles stacked."""
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
