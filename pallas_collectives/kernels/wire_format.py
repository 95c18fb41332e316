"""How blocks travel over a wire with scales, where kernels make the passes beside a collective.

Of a block, seen as rows and columns,

    a unit    is 128 rows and as many columns as a group has. It is turned: what was a row is a
              column of 128 bytes or 256, so that neither the largest number of a group nor its
              scale takes a step along lanes. Groups that are rows, and blocks of other sizes, have
              units of 8, 16 or 32 rows that are not turned; their tiles, of 128 columns, come one
              below another
    a chunk   is the units of some rows and columns, and behind them a tile of their scales: a row
              has those of a unit that is turned; else a lane has those of 8 rows of a group
    a step    is some chunks: what a grid reads and writes at a time; of several blocks, if they
              are small

so that scales are a 33rd of a chunk that fills its tile of them. Where groups are a tile's width a
block is seen as its tiles, one below another, as it lies in memory.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_collectives import wires
from pallas_collectives.annotations import DTypeLike, Index, Number, span
from pallas_collectives.kernels.torus.views import View
from pallas_collectives.tiles import LANES, SUBLANES
from pallas_collectives.topology import chips
from pallas_collectives.wires import Wire

_TILE = SUBLANES * LANES  # words
_HEIGHTS = (32, 16, 8)  # of a unit
_MOST = 1 << 19  # numbers of a step: with float32, two of them and what is packed take 6 MiB


class Format(NamedTuple):
    """How a block travels.

    Attributes:
      wire: with scales.
      block: its rows and columns.
      unit: rows and columns of a unit.
      chunk: rows and columns of a chunk.
      step: rows and columns of a step: some chunks along one of them.
      view: how a block of the caller's is seen so; None for a reshape.
    """

    wire: Wire
    block: tuple[int, int]
    unit: tuple[int, int]
    chunk: tuple[int, int]
    step: tuple[int, int]
    view: View | None = None

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: DTypeLike, wire: Wire, *, values: bool = False
    ) -> "Format | None":
        """The format of blocks of a shape and dtype; None where kernels do not serve them.

        values: whether `wire_passes.values` is asked for, of whole tiles of one-byte numbers.
        """
        if not wire.scaled or jnp.dtype(dtype).name == "float16" or not math.prod(shape):
            return None
        return _format(wire.fixed, tuple(shape), jnp.dtype(dtype).itemsize, values)

    @property
    def parts(self) -> int:
        """Tiles along a group; 0 for groups that are rows."""
        return self.wire.group // LANES if isinstance(self.wire.group, int) else 0

    @property
    def turned(self) -> bool:
        """Whether units are."""
        return self.unit[0] == LANES

    @property
    def across(self) -> int:
        """Units of a chunk side by side."""
        return self.chunk[1] // self.unit[1]

    @property
    def units(self) -> int:
        """Units of a chunk."""
        return math.prod(self.chunk) // math.prod(self.unit)

    @property
    def lanes(self) -> int:
        """Lanes of a unit's scales."""
        high, wide = self.unit
        return high // SUBLANES * (wide // LANES // self.parts if self.parts else 1)

    @property
    def unit_rows(self) -> int:
        """Rows of a unit's values on the wire, of 128 words."""
        return math.prod(self.unit) // (4 * LANES)

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk on the wire."""
        return self.units * self.unit_rows + SUBLANES

    @property
    def chunks(self) -> int:
        """Chunks of a step."""
        return math.prod(self.step) // math.prod(self.chunk)

    def together(self, blocks: int) -> int:
        """How many of so many blocks the grid does at a time, if steps are small: one of each."""
        return _divisors(blocks, max(1, _MOST // math.prod(self.step)))[-1]

    @property
    def grid(self) -> tuple[int, int]:
        """Steps of a block along rows and columns."""
        return self.block[0] // self.step[0], self.block[1] // self.step[1]

    def seen(self, blocks: jax.Array) -> jax.Array:
        """Blocks of the caller's, (k, ...), as rows and columns."""
        if self.view is None:
            return blocks.reshape(-1, *self.block)
        return self.view.into(blocks.reshape(-1, self.view.shape[-1]), (len(blocks),))

    def unseen(self, blocks: jax.Array) -> jax.Array:
        """The inverse, in two dimensions."""
        if self.view is None:
            return blocks.reshape(-1, self.block[1])
        return self.view.out_of(blocks, (len(blocks),))

    def scales(self, come: jax.Array) -> jax.Array:
        """The scales of blocks that have come beside `values`, (n, rows, groups)."""
        (high, wide), (down, along) = self.unit, self.grid
        more = (self.chunks, 1) if self.step[1] == self.chunk[1] else (1, self.chunks)
        steps = come.reshape(len(come), -1, LANES)[
            :, : down * along * self.chunks * self.chunk_rows
        ]
        tiles = steps.reshape(len(come), down, along, *more, -1, LANES)[..., -SUBLANES:, :]
        tiles = tiles[..., : self.units // (1 if self.parts else self.across) * self.lanes]
        across = self.across if self.parts else 1
        groups = wide // LANES // self.parts if self.parts else 1
        apart = tiles.reshape(*tiles.shape[:-1], -1, across, groups, high // SUBLANES)
        # block, step, step, chunk, chunk, row of 8, row of units, unit, group, eighth
        ordered = jnp.transpose(apart, (0, 1, 3, 6, 9, 5, 2, 4, 7, 8))
        scales = lax.bitcast_convert_type(ordered, jnp.float32)
        return scales.reshape(len(come), self.block[0], -1)

    @property
    def tiles(self) -> int:
        """Tiles of a block on the wire: with some padding, so that kernels can cut it evenly."""
        tiles = math.prod(self.grid) * self.chunks * self.chunk_rows // SUBLANES
        whole = 2 << (tiles // 256).bit_length()
        return -(-tiles // whole) * whole

    @property
    def nbytes(self) -> int:
        """Bytes of a block on the wire."""
        return 4 * _TILE * self.tiles

    def seconds_to_pack(self, blocks: int, itemsize: int) -> float:
        """What `pack` takes for so many blocks on the chip here.

        The operations of a number are fitted to the loops that the compiler makes of these kernels,
        to a tenth, or up to a third more.
        """
        return self._seconds(blocks, itemsize, self.nbytes, self._to_pack(itemsize))

    def seconds_to_unpack(self, blocks: int, itemsize: int) -> float:
        """As `seconds_to_pack`; `added` takes as long."""
        return self._seconds(blocks, itemsize, self.nbytes, self._to_unpack(itemsize))

    def seconds_to_lose(self, blocks: int, itemsize: int, arrays: int) -> float:
        """As `seconds_to_pack`: what `lost` takes of so many arrays."""
        operations = self._to_pack(itemsize) + self._to_unpack(itemsize)
        return self._seconds(blocks, (arrays + 1) * itemsize, 0, operations)

    def seconds_to_draw(self, blocks: int, itemsize: int) -> float:
        """As `seconds_to_pack`: what `drawn` takes; v4 multiplies no integers, and takes twice."""
        noise = 24 if self.wire.dtype == "int8" else 32
        operations = self._to_pack(itemsize) + self._to_unpack(itemsize) + noise
        return self._seconds(blocks, 2 * itemsize, 0, operations)

    def _to_pack(self, itemsize: int) -> float:
        _, narrow = chips.current().narrowed[self.wire.dtype]
        return narrow + self._operations(itemsize, 12, 23, 20)

    def _to_unpack(self, itemsize: int) -> float:
        widen, _ = chips.current().narrowed[self.wire.dtype]
        return widen + self._operations(itemsize, 4.5, 11, 12)

    def _operations(self, itemsize: int, turned: float, else_: float, along_lanes: float) -> float:
        if self.turned:
            return turned + chips.current().turned[itemsize > 2]
        return else_ + (along_lanes if self.parts == 1 else 0)

    def _seconds(self, blocks: int, itemsize: int, packed: int, operations: float) -> float:
        """Seconds, of so many bytes and operations of a number, and bytes of a packed block."""
        chip, numbers = chips.current(), blocks * math.prod(self.block)
        in_hbm = (numbers * itemsize + blocks * packed) / chip.hbm_bandwidth
        in_core = numbers * operations / chip.vector_rate
        steps = blocks // self.together(blocks) * math.prod(self.grid)
        turns = -(-steps // chip.cores)  # the first waits for what comes, and the last for nothing
        longest = max(in_hbm, in_core / steps * turns + in_hbm / steps)
        return chip.launch_cost + 2 * chip.dma_latency + longest


@functools.cache
def _format(wire: Wire, shape: tuple[int, ...], itemsize: int, values: bool) -> Format | None:
    by_rows = wire.group == "row"
    group = LANES if by_rows else int(wire.group)
    if len(shape) == 1 and not by_rows:
        shape = (shape[0] // group, group) if shape[0] % group == 0 else shape
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if rows % SUBLANES or shape[-2] % SUBLANES:
        return None
    view = None if by_rows or values or group > LANES else View.of_lanes((rows, columns), 0)
    seen = view.block if view else (rows, columns)
    if not by_rows and not values and seen[0] % LANES == seen[1] % group == 0:
        found = _cut(wire, (seen[0], seen[1]), (LANES, group), itemsize)
        found = found and found._replace(view=view)
    else:
        units = ((high, max(4 * _TILE // high, group)) for high in _HEIGHTS[: 1 if values else 3])
        unit = next((u for u in units if rows % u[0] == columns % u[1] == 0), None)
        found = unit and _cut(wire, (rows, columns), unit, itemsize)
    most = max(wires.packed_bytes(shape, wire), 5 * rows * columns // 4)
    return found if found and found.nbytes <= most else None


def _cut(wire: Wire, block: tuple[int, int], unit: tuple[int, int], itemsize: int) -> Format | None:
    """A block in chunks and steps: the largest that fit; None where not even a unit does."""
    (rows, columns), (high, wide) = block, unit
    by_rows, turned = wire.group == "row", high == LANES
    # Else a unit is half a tile as it lies, and begins a step: rows within one begin at whole ones.
    down = _divisors(rows // high) if high * itemsize >= 4 * SUBLANES else [1]
    along = [columns // wide] if by_rows else _divisors(columns // wide)
    # Numbers whose scales a tile holds: of a row of it, or of a lane.
    scaled = (
        SUBLANES * high * wide
        if turned
        else LANES * SUBLANES * (columns if by_rows else int(wire.group))
    )
    able = [
        (r * high, c * wide)
        for r in down
        for c in along
        if r * c * high * wide <= min(_MOST, scaled)
    ]
    if not able:
        return None
    chunk = max(able, key=lambda chunk: (math.prod(chunk), chunk[1]))
    more = _MOST // math.prod(chunk)
    if chunk[1] < columns:
        step = chunk[0], chunk[1] * _divisors(columns // chunk[1], more)[-1]
    else:
        step = chunk[0] * _divisors(rows // chunk[0] if len(down) > 1 else 1, more)[-1], columns
    return Format(wire, block, unit, chunk, step)


def _divisors(n: int, most: int | None = None) -> list[int]:
    return [k for k in range(1, min(n, most or n) + 1) if n % k == 0]


class Place(NamedTuple):
    """Where a chunk's parts are in a step."""

    format: Format
    chunk: Number

    def unit(self, number: Number) -> tuple[Index, Index]:
        """The rows and columns of a unit's numbers."""
        high, wide = self.format.unit
        row, column = self.begins(number)
        return _at(row, high), _at(column, wide)

    def begins(self, number: Number) -> tuple[Number, Number]:
        """The first of these rows and columns."""
        (high, wide), (rows, columns) = self.format.unit, self.format.chunk
        row, column = (f(number, self.format.across) for f in (lax.div, lax.rem))
        row, column = row * high, column * wide
        if self.format.step[1] > columns:
            return row, column + self.chunk * columns
        return row + self.chunk * rows, column

    def packed(self, number: Number) -> Index:
        """The rows of a unit's values."""
        return self._rows(number * self.format.unit_rows, self.format.unit_rows)

    def in_step(self, number: Number) -> Index:
        """The rows of a unit's numbers where all of a step are in the order of the wire."""
        each = math.prod(self.format.unit) // LANES
        return _at((self.chunk * self.format.units + number) * each, each)

    @property
    def scales(self) -> Index:
        """The rows of the tile of scales."""
        return self._rows(self.format.chunk_rows - SUBLANES, SUBLANES)

    def _rows(self, first: Number, count: int) -> Index:
        begin = self.chunk * self.format.chunk_rows + first
        return _at(begin, count, SUBLANES)


def _at(begin: Number, size: int, whole: int = 0) -> Index:
    return span(pl.multiple_of(jnp.asarray(begin), whole or size), size)
