"""Rows over a wire, each by itself: what goes to whom depends on values, as in ragged exchanges.

A row goes as rows of 128 words: first its values, a word having those of four tiles of 128 columns,
and then its scales, a lane having one. In memory these are one behind another, in whatever place a
row is. As in `wire_passes`, kernels make it of numbers in one pass, and numbers of it in another,
with the bits of `wires`:

    pack      (rows, columns) -> int32 (rows, some, 1, 128)
    blank     rows that say that none has come
    unpack    the inverse of `pack`, onto rows that stay where none has come
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives import wires
from pallas_collectives.annotations import DTypeLike, Index, Interpret, Number, Ref, span
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.kernels.wire_bodies import largest_in_rows
from pallas_collectives.tiles import LANES
from pallas_collectives.topology import chips
from pallas_collectives.wires import Wire

NONE_CAME = np.int32(-1)  # in place of scales, of which none has these bits
_HEIGHT = 16  # rows at a time: a tile of two-byte numbers, and two of four
_BYTES = 4  # of a word
_MOST = 1 << 18  # numbers of a step
_WIDEST = 1 << 14  # columns of which a kernel's scratch holds some rows


class Rows(NamedTuple):
    """How blocks of rows travel.

    Attributes:
      wire: with scales.
      each: rows of a block.
      columns: numbers of a row.
    """

    wire: Wire
    each: int
    columns: int

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: DTypeLike, wire: Wire) -> "Rows | None":
        """The format of blocks (..., columns) of a dtype; None where kernels do not serve them.

        A block is what one index of a ragged operand brings: a row, or under vmap one of each
        element.
        """
        columns = shape[-1]
        whole = columns % (_BYTES * LANES) == 0 and 0 < columns <= _WIDEST
        if not wire.scaled or jnp.dtype(dtype).name == "float16" or not whole:
            return None
        rows = cls(wire.fixed, math.prod(shape[:-1]), columns)
        return rows if rows.nbytes < math.prod(shape) * jnp.dtype(dtype).itemsize else None

    @property
    def words(self) -> int:
        """Rows of 128 words that a row's values are."""
        return self.columns // (_BYTES * LANES)

    @property
    def parts(self) -> int:
        """Tiles along a group."""
        return self.columns // LANES // wires.groups_of(self.columns, self.wire)

    @property
    def shape(self) -> tuple[int, int, int]:
        """A row on the wire; no more than 128 groups."""
        return self.words + 1, 1, LANES

    @property
    def nbytes(self) -> int:
        """Bytes of a block on the wire."""
        return _BYTES * self.each * math.prod(self.shape)

    @property
    def ordered(self) -> Any:
        """Scratch for some rows' numbers, those of four tiles one behind another, as in words."""
        return pltpu.VMEM((self.words, _BYTES * _HEIGHT, LANES), jnp.float32)

    def step(self, rows: int) -> int:
        """How many of so many rows the grid does at a time."""
        most = max(1, _MOST // self.columns // _HEIGHT)
        return _HEIGHT * min(most, -(-rows // _HEIGHT))

    def seconds_to_pack(self, blocks: int, itemsize: int) -> float:
        """What `pack` takes for so many blocks on the chip here.

        The operations of a number are fitted to the loops that the compiler makes of these kernels,
        to an eighth; those of v4 take a third more.
        """
        _, narrow = chips.current().narrowed[self.wire.dtype]
        return self._seconds(blocks, itemsize, narrow + (34 if self.parts == 1 else 24))

    def seconds_to_unpack(self, blocks: int, itemsize: int) -> float:
        """As `seconds_to_pack`; rows that stay are read besides."""
        widen, _ = chips.current().narrowed[self.wire.dtype]
        return self._seconds(blocks, 2 * itemsize, widen + (20 if self.parts == 1 else 11))

    def seconds_to_fill(self, blocks: int) -> float:
        """What `blank` takes."""
        return self._seconds(blocks, 0, 0)

    def _seconds(self, blocks: int, itemsize: int, operations: float) -> float:
        chip, numbers = chips.current(), blocks * self.each * self.columns
        in_hbm = (numbers * itemsize + blocks * self.nbytes) / chip.hbm_bandwidth
        in_core = numbers * operations / (chip.vector_rate * chip.cores)
        return chip.launch_cost + 2 * chip.dma_latency + max(in_hbm, in_core)


def pack(x: jax.Array, format: Rows, *, interpret: Interpret) -> jax.Array:
    """Rows (rows, columns) as they travel: int32 (rows, some, 1, 128)."""
    return _launched(
        functools.partial(_pack_kernel, format=format),
        x,
        result=jax.ShapeDtypeStruct((len(x), *format.shape), jnp.int32),
        name="wire_pack_rows",
        scratch=[format.ordered] * 2,
        seconds=format.seconds_to_pack(len(x) // format.each, x.dtype.itemsize),
        format=format,
        interpret=interpret,
    )


def unpack(come: jax.Array, onto: jax.Array, format: Rows, *, interpret: Interpret) -> jax.Array:
    """The rows that have come, and those of `onto`, (rows, columns), where none has."""
    return _launched(
        functools.partial(_unpack_kernel, format=format),
        come,
        onto,
        result=jax.ShapeDtypeStruct(onto.shape, onto.dtype),
        name="wire_unpack_rows",
        scratch=[format.ordered, pltpu.VMEM((_HEIGHT, LANES), jnp.int32)],
        seconds=format.seconds_to_unpack(len(onto) // format.each, onto.dtype.itemsize),
        format=format,
        interpret=interpret,
    )


def blank(rows: int, format: Rows, *, interpret: Interpret) -> jax.Array:
    """As `pack`, but no row has come, and values are any. XLA fills such rows one by one."""
    return _launched(
        functools.partial(_blank_kernel, format=format),
        result=jax.ShapeDtypeStruct((rows, *format.shape), jnp.int32),
        name="wire_blank_rows",
        seconds=format.seconds_to_fill(rows // format.each),
        format=format,
        interpret=interpret,
    )


def _launched(
    kernel: Callable[..., None],
    *operands: jax.Array,
    result: jax.ShapeDtypeStruct,
    name: str,
    scratch: Sequence[Any] = (),
    seconds: float,
    format: Rows,
    interpret: Interpret,
) -> jax.Array:
    rows = format.step(len(result))

    def some(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return pl.BlockSpec((rows, *x.shape[1:]), lambda r: (r, *[0] * (len(x.shape) - 1)))

    return launch.apart(
        kernel,
        *operands,
        grid=(pl.cdiv(len(result), rows),),
        in_specs=[*map(some, operands)],
        out_specs=some(result),
        out_shape=result,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name=name,
        seconds=seconds,
        interpret=interpret,
    )


# Kernels. Of some rows the numbers, (rows, columns), and what they are packed as, (rows, some, 1,
# 128), are in VMEM.


def _pack_kernel(
    numbers_ref: Ref, packed_ref: Ref, ordered_ref: Ref, inverses_ref: Ref, format: Rows
) -> None:
    lane = lax.broadcasted_iota(jnp.int32, (_HEIGHT, LANES), 1)

    def some(turn: Number, _: None) -> None:
        rows = _rows(turn)

        def read(tile: int) -> jax.Array:
            return numbers_ref[rows, span(tile * LANES, LANES)].astype(jnp.float32)

        found = jnp.zeros((_HEIGHT, LANES), jnp.float32)
        for group in range(format.columns // LANES // format.parts):
            tiles = range(group * format.parts, (group + 1) * format.parts)
            bits = functools.reduce(jnp.maximum, (wires.magnitudes(read(tile)) for tile in tiles))
            found = jnp.where(lane == group, largest_in_rows(bits), found)
        scales = wires.scales_of(lax.bitcast_convert_type(found, jnp.int32), format.wire)
        inverses = wires.inverse(scales)
        for word in range(format.words):
            for place in range(_BYTES):
                tile = word * _BYTES + place
                ordered_ref.at[word][_of_tile(place)] = read(tile)
                inverses_ref.at[word][_of_tile(place)] = _of_group(inverses, tile, format)
            values = wires.rounded(ordered_ref[word], inverses_ref[word], format.wire)
            packed_ref[rows, word] = pltpu.bitcast(values, jnp.int32)[:, None]
        packed_ref[rows, format.words] = lax.bitcast_convert_type(scales, jnp.int32)[:, None]

    lax.fori_loop(0, numbers_ref.shape[0] // _HEIGHT, some, None)


def _blank_kernel(packed_ref: Ref, format: Rows) -> None:
    packed_ref[:, format.words] = jnp.full((packed_ref.shape[0], 1, LANES), NONE_CAME)


def _unpack_kernel(
    packed_ref: Ref, onto_ref: Ref, out_ref: Ref, ordered_ref: Ref, bits_ref: Ref, format: Rows
) -> None:
    def some(turn: Number, _: None) -> None:
        rows = _rows(turn)
        bits_ref[...] = packed_ref[rows, format.words].reshape(_HEIGHT, LANES)
        bits = bits_ref[...]  # in the usual order of registers: as it is read, a row has its own
        scales, came = lax.bitcast_convert_type(bits, jnp.float32), bits[:, :1] != NONE_CAME
        for word in range(format.words):
            packed = packed_ref[rows, word].reshape(_HEIGHT, LANES)
            values = pltpu.bitcast(packed, jnp.dtype(format.wire.dtype))
            ordered_ref[word] = values.astype(jnp.float32)
            for place in range(_BYTES):
                tile = word * _BYTES + place
                numbers = ordered_ref.at[word][_of_tile(place)] * _of_group(scales, tile, format)
                at = rows, span(tile * LANES, LANES)
                arrived = wires.saturated(numbers, out_ref.dtype)
                out_ref[at] = jnp.where(came, arrived, onto_ref[at])

    lax.fori_loop(0, out_ref.shape[0] // _HEIGHT, some, None)


def _rows(turn: Number) -> Index:
    return span(pl.multiple_of(jnp.asarray(turn * _HEIGHT), _HEIGHT), _HEIGHT)


def _of_tile(place: int) -> Index:
    """Where in scratch the rows of one of a word's four tiles are."""
    return pl.ds(place, _HEIGHT, _BYTES)


def _of_group(scales: jax.Array, tile: int, format: Rows) -> jax.Array:
    """Those of a tile's rows, in all lanes."""
    group = tile // format.parts
    return jnp.broadcast_to(scales[:, group : group + 1], scales.shape)
