"""Sums whose parts travel as numbers of one byte: packed, added and unpacked in VMEM.

A plain array has whole tiles, of `ROWS` rows and `group` columns. Packed, each tile is 128 groups
of consecutive numbers of a row (see `wires`), a scale for each:

    numbers    `group` rows of 128 bytes a tile, as int32 (32 rows a tile, or 64); turned, so that
               what was a row is a column
    scales     behind all numbers: a row of 128 float32 a tile, whose bits are int32 too

So numbers and scales are one buffer, which one DMA moves: the rows that there are, though VMEM has
whole tiles of 8 of them. `Codec.combine` adds plain arrays and
packed ones in float32, and leaves the sum plain or packs it; `Codec.unpack` is for what has come.

Turned, a group lies below its scale. So a row of scales goes with every row of numbers, and the
largest of 128 groups is a maximum of rows: neither takes a step along lanes, which vector units are
slow at. What costs such steps is to turn a tile, once for each plain array that a packed one meets.

What is packed on every hop of a ring is rounded on every hop. A sum of n terms is packed n - 1
times: as the first term alone, as the first two, and so on; its owner adds the last term unrounded.
With h_k half a step of the number's group in the sum of k terms as it is sent, the result is within
h_1 + ... + h_(n-1) of the exact sum, and what float32 rounds off; where sums come from both sides,
of the h of either side. Half a step is that of `wires.error_bound`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Index, Number, Ref
from pallas_collectives.kernels.machinery.blocks import LANES
from pallas_collectives.topology.groups import unraveled
from pallas_collectives.wires import LEAST_SCALE, TO_INTEGER, Wire

ROWS = 128  # of a tile: as many groups as a row of lanes holds scales
MOST_TILES = 8  # of a chunk: by the replay half as many are no quicker, and cost the core more
# What a sum that stays within a kernel is kept as: float32, its bits as this, each tile turned as a
# packed one is. So it is turned once, and not for each packed sum that it meets.
TURNED = jnp.uint32
# Tiles that the compiler does side by side: their conversions wait for one another's sums along
# lanes, and with four the units have a fifth less idle time than with two.
SIDE_BY_SIDE = (4, 2, 1)


@dataclasses.dataclass(frozen=True)
class Codec:
    """How the sums of a kernel travel.

    Attributes:
      wire: with scales, of groups of 128 or 256, rounded to nearest.
      beyond: a group with a number of this magnitude has scale NaN, as if that were inf.
    """

    wire: Wire
    beyond: float = math.inf

    @property
    def within_hops(self) -> "Codec":
        """The same for sums that are not whole yet: others may bring them back within bounds."""
        return dataclasses.replace(self, beyond=math.inf)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile; plain arrays are whole ones."""
        return ROWS, int(self.wire.group)

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """The shape of a packed array, of int32, whose plain shape is given."""
        tiles = math.prod(shape) // math.prod(self.tile)
        assert tiles * math.prod(self.tile) == math.prod(shape), f"{shape} in tiles {self.tile}"
        return tiles * (self._words + 1), LANES

    def packed_bytes(self, numbers: int) -> int:
        """Bytes of so many numbers, padded to whole tiles, packed."""
        rows, columns = self.tile
        return 4 * math.prod(self.packed_shape((-(-numbers // (rows * columns)) * rows, columns)))

    def combine(self, *sums: tuple[Any, ...]) -> None:
        """For each (out, *in) of `sums`: out = in[0] + in[1] + ..., in this order, in float32.

        Refs are plain, packed or `TURNED`, as their dtypes tell, and lie in VMEM. `out` may be one
        of `in`. What is turned has the shape of what is plain.
        """
        for out, *terms in sums:
            self._over_tiles(out, terms, lambda *terms: functools.reduce(jnp.add, terms))

    def unpack(self, out: Ref, packed: Ref) -> None:
        """out = packed; what would round up beyond the dtype of `out` is its largest number."""
        limit = np.float32(jnp.finfo(out.dtype).max)
        if self.wire.scales == "power of two":  # up to twice as large as it need be
            self._over_tiles(out, [packed], lambda numbers: jnp.clip(numbers, -limit, limit))
            return
        most = np.nextafter(limit / np.float32(self.wire.largest), np.float32(0))
        # Beyond by what float32 rounds off at the most.
        self._over_tiles(out, [packed], lambda numbers: numbers, most)

    def _over_tiles(
        self,
        out: Ref,
        terms: Sequence[Ref],
        make: Callable[..., Any],
        most: np.float32 | None = None,
    ) -> None:
        """out = make(*terms), a tile's numbers at a time; scales that are read are `most` or less.

        That costs next to nothing, and comparing numbers as much as unpacking them.
        """
        plain = next(ref for ref in (out, *terms) if not self._is_packed(ref))
        tiles = math.prod(plain.shape) // math.prod(self.tile)
        # Turned if what is written is, or all that is read; a term is turned in its own dtype.
        turned = not self._is_plain(out) or not any(map(self._is_plain, terms))

        def one(number: jax.Array) -> None:
            read = [self._read(ref, number, tiles, turned, most) for ref in terms]
            self._write(out, number, tiles, turned, make(*read))

        def several(turn: jax.Array, _: None) -> None:
            for k in range(each):
                one(turn * each + k)

        each = next(k for k in SIDE_BY_SIDE if tiles % k == 0)
        lax.fori_loop(0, tiles // each, several, None)

    def _is_packed(self, ref: Ref) -> bool:
        return ref.dtype == jnp.int32

    def _is_plain(self, ref: Ref) -> bool:
        return ref.dtype not in (jnp.int32, TURNED)

    def _read(
        self, ref: Ref, number: jax.Array, tiles: int, turned: bool, most: np.float32 | None
    ) -> jax.Array:
        """A tile's numbers in float32: (group, ROWS) if they are to be turned, else its inverse."""
        if not self._is_packed(ref):
            numbers = ref[self._at(ref, number)].reshape(self.tile)
            if ref.dtype == TURNED:
                numbers = lax.bitcast_convert_type(self._halves(numbers, 1, 0), jnp.float32)
                return numbers if turned else numbers.T
            return (numbers.T if turned else numbers).astype(jnp.float32)
        scales = lax.bitcast_convert_type(ref[self._scales(number, tiles), :], jnp.float32)
        if most is not None:
            scales = jnp.where(scales > most, most, scales)
        numbers = pltpu.bitcast(ref[self._numbers(number), :], jnp.dtype(self.wire.dtype))
        numbers = numbers.astype(jnp.float32) * scales
        return numbers if turned else numbers.T

    def _write(
        self, ref: Ref, number: jax.Array, tiles: int, turned: bool, total: jax.Array
    ) -> None:
        if not self._is_packed(ref):
            at = self._at(ref, number)
            if ref.dtype == TURNED:
                kept = self._halves(lax.bitcast_convert_type(total, TURNED), 0, 1)
            else:
                narrow = total.astype(ref.dtype)
                kept = narrow.T if turned else narrow
            ref[at] = kept.reshape(ref.at[at].shape)
            return
        largest = _largest(total)
        steps = self._steps(largest)
        scales = jnp.where(largest == 0, 0.0, steps)
        scales = jnp.where(largest < np.float32(self.beyond), scales, jnp.nan)
        ref[self._scales(number, tiles), :] = lax.bitcast_convert_type(scales, jnp.int32)
        scaled = total * (1 / steps)
        if self.wire.dtype == "int8":
            narrow = lax.bitcast_convert_type(scaled + TO_INTEGER, jnp.int32).astype(jnp.int8)
        else:
            narrow = scaled.astype(self.wire.dtype)
        ref[self._numbers(number), :] = pltpu.bitcast(narrow, jnp.int32)

    def _halves(self, numbers: jax.Array, cut: int, joined: int) -> jax.Array:
        """A tile's parts of 128 along one dimension, side by side along the other."""
        return jnp.concatenate(jnp.split(numbers, self.tile[1] // LANES, cut), joined)

    def _steps(self, largest: jax.Array) -> jax.Array:
        """Scales of groups with these largest magnitudes, which are finite and not all zeros."""
        steps = jnp.maximum(largest * np.float32(1 / self.wire.largest), LEAST_SCALE)
        if self.wire.scales != "power of two":
            return steps
        bits = lax.bitcast_convert_type(steps, jnp.int32)
        rounded = (bits + np.int32(0x007FFFFF)) & np.int32(0x7F800000)
        return lax.bitcast_convert_type(rounded, jnp.float32)

    # Where a tile's parts are.

    @property
    def _words(self) -> int:
        """Rows of a tile's numbers."""
        return ROWS * self.tile[1] // (4 * LANES)

    def _numbers(self, number: jax.Array) -> Index:
        """Rows of its numbers."""
        return pl.ds(pl.multiple_of(number * self._words, self._words), self._words)

    def _scales(self, number: jax.Array, tiles: int) -> Index:
        return pl.ds(tiles * self._words + number, 1)

    def _at(self, ref: Ref, number: jax.Array) -> tuple[Any, ...]:
        """The index of a tile in a plain array, row-major."""
        return Chunks(ref.shape, (*(1 for _ in ref.shape[:-2]), *self.tile)).spans(number)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How a plain block is cut into chunks of whole tiles of a codec's.

    Attributes:
      block: its shape.
      shape: the shape of a chunk.
    """

    block: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, block: tuple[int, ...], codec: Codec, most: int = MOST_TILES) -> "Chunks":
        """Chunks of as many tiles as go, up to `most`."""
        tile = (*(1 for _ in block[:-2]), *codec.tile)
        parts = [
            [k for k in range(1, most + 1) if size // each % k == 0]
            for size, each in zip(block, tile, strict=True)
        ]
        counts = max(
            (each for each in itertools.product(*parts) if math.prod(each) <= most),
            key=lambda each: (math.prod(each), each[::-1]),
        )
        return cls(block, tuple(k * size for k, size in zip(counts, tile, strict=True)))

    @property
    def count(self) -> int:
        """How many a block has."""
        return math.prod(self.block) // math.prod(self.shape)

    def at(self, ref: Ref, number: Number, block: Number = 0, axis: int = 0) -> Ref:
        """A chunk of block number `block` of an array of blocks side by side along an axis."""
        return ref.at[self.spans(number, block, axis)]

    def spans(self, number: Number, block: Number = 0, axis: int = 0) -> tuple[Any, ...]:
        """Its index in that array; chunks of a block are numbered row-major."""
        counts = [size // each for size, each in zip(self.block, self.shape, strict=True)]
        places = unraveled(number, counts)
        places[axis] += block * counts[axis]
        return tuple(
            pl.ds(pl.multiple_of(place * each, each), each)
            for place, each in zip(places, self.shape, strict=True)
        )


def _largest(total: jax.Array) -> jax.Array:
    """(group, ROWS) -> (1, ROWS): the largest magnitude of each column; NaN where one is NaN.

    As integers, magnitudes stand in the same order, and NaN beyond inf.
    """
    magnitude = lax.bitcast_convert_type(total, jnp.int32) & np.int32(0x7FFFFFFF)
    return lax.bitcast_convert_type(jnp.max(magnitude, axis=0, keepdims=True), jnp.float32)
