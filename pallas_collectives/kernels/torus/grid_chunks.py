"""Chunks of an operand on a grid: how it is cut, and whose column each of them has.

Arithmetic alone; `all_reduce_grid` says what happens to them.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_collectives.annotations import DType, Flag, Number, Ref
from pallas_collectives.kernels.machinery.blocks import LANES, sublanes
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import LEFT, RIGHT, Group, Ring, wrap_step

# Ticks between a device's turn with a chunk and the next device's, on a line alone too: as long as
# a chunk's time on the wire and the latency of a hop together, so that nobody waits for what is
# only just arriving.
SKEW = 4

# What a link carries in about 1.5 us: both parts of a chunk. By the replay of v5e smaller ones cost
# the core more time than the wire; while larger ones fill the grid, and drain, links idle.
PAIR_SECONDS = 1.5e-6

# On larger grids, as 8 x 8, a chunk is on its way so long that sections (`timetable`) are quicker.
MOST_TICKS = 72


@dataclasses.dataclass(frozen=True)
class Cut:
    """How an operand of rows and columns is cut into chunks, each of two parts.

    Attributes:
      heights: rows of the part that goes along the first axis first, and of the other one.
      width: columns of both.
      across: chunks side by side.
      count: chunks in all.
    """

    heights: tuple[int, int]
    width: int
    across: int
    count: int

    @classmethod
    def of(
        cls, sizes: tuple[int, int], shape: tuple[int, int], dtype: DType, wanted: float
    ) -> "Cut | None":
        """Chunks of about `wanted` bytes on a grid of these sizes; None if tiles do not allow it.

        A share f that goes along the first axis first loads its links with f + (1-f) / n_b, those
        of the other axis with (1-f) + f / n_a.
        """
        (rows, columns), high = shape, sublanes(dtype)
        along, across = (1 - 1 / n for n in sizes)
        share = across / (along + across)
        found = []
        for units in (2, 4, 8, 16, 32, 64):
            first = round(share * units)
            for lanes in range(LANES, columns + 1, LANES):
                nbytes = units * high * lanes * jnp.dtype(dtype).itemsize
                fits = rows % (units * high) == 0 and columns % lanes == 0
                if fits and 0 < first < units and wanted / 2 <= nbytes <= 2 * wanted:
                    uneven = abs(first / units - share)
                    off = abs(math.log2(nbytes / wanted))
                    found.append((uneven + 0.1 * off, -lanes, units, first))
        if not found:
            return None
        _, lanes, units, first = min(found)
        heights = (first * high, (units - first) * high)
        across = columns // -lanes
        return cls(heights, -lanes, across, rows // (units * high) * across)

    def at(self, ref: Ref, part: int, chunk: Number) -> Ref:
        """One part of a chunk."""
        row, column = lax.div(chunk, jnp.int32(self.across)), wrap_step(chunk, self.across)
        start = row * sum(self.heights) + part * self.heights[0]
        high = math.gcd(*self.heights)
        return ref.at[
            pl.ds(pl.multiple_of(start, high), self.heights[part]),
            pl.ds(pl.multiple_of(column * self.width, self.width), self.width),
        ]


def ticks(sizes: tuple[int, int]) -> int:
    """Ticks from the one in which a chunk sets out to the one in which it is everywhere."""
    along, across = sizes
    return SKEW * 2 * (along - 1 + across // 2)


def cut_of(axes: Sequence[Group], shape: tuple[int, ...], dtype: DType) -> Cut | None:
    """How an operand of blocks of rows and columns is cut; None if sections serve it better.

    That is where some axis closes to a ring, or chunks are fewer than the ticks of one.
    """
    lines = [axis.line or (axis.size == 2 and not axis.chip) for axis in axes]
    if len(axes) != 2 or not all(lines) or not any(axis.line for axis in axes):
        return None
    sizes = axes[0].size, axes[1].size
    longest, flat = max(ticks(sizes), ticks(sizes[::-1])), (math.prod(shape[:-1]), shape[-1])
    cut = Cut.of(sizes, flat, dtype, PAIR_SECONDS * chips.current().link_bandwidth)
    return cut if cut and longest <= min(MOST_TICKS, cut.count) else None


class Row:
    """Chunks as a device of a row sees them: chunk c has the column of place c modulo their number.

    A side of us is 0, the left, from where things go RIGHT; or 1, the right.
    """

    def __init__(self, ring: Ring, count: int) -> None:
        """`count` chunks in all."""
        self._size, self._count = ring.size, count
        self._place, self._last = ring.place, ring.size - 1

    def has(self, chunk: Number) -> Flag:
        """Whether there is a chunk of this number."""
        return (chunk >= 0) & (chunk < self._count)

    def is_ours(self, chunk: Number) -> jax.Array:
        """Whether our column is the chunk's."""
        return self._column(chunk) == self._place

    def ahead(self, side: Number, chunk: Number) -> jax.Array:
        """How far its column lies ahead of what comes from a side; negative: behind us."""
        return direction(side) * (self._column(chunk) - self._place)

    def behind(self, side: Number) -> jax.Array:
        """Devices on a side of us."""
        return jnp.where(side == 0, self._place, self._last - self._place)

    def is_last(self, side: Number) -> jax.Array:
        """Whether nobody is ahead of what comes from a side."""
        return self.behind(side) == self._last

    def round(self, chunk: Number) -> jax.Array:
        """How many chunks of its column came before it."""
        return lax.div(lax.max(chunk, 0), jnp.int32(self._size))

    def number(self, side: Number, chunk: Number, further: int = 0) -> jax.Array:
        """Its number among those that go past us from a side; or past a device `further` on."""
        behind, column = self.behind(side) + further, self._column(chunk)
        before = jnp.where(side == 0, column - behind - 1, column)
        return self.round(chunk) * (self._last - behind) + before

    @property
    def own(self) -> jax.Array:
        """How many chunks have our column."""
        return self._between(self._place, self._place + 1)

    def past(self, side: Number) -> jax.Array:
        """How many have a column ahead of what comes from a side."""
        right, left = self._between(self._place + 1, self._size), self._between(0, self._place)
        return jnp.where(side == 0, right, left)

    def _column(self, chunk: Number) -> jax.Array:
        return wrap_step(lax.max(chunk, 0), self._size)

    def _between(self, start: Number, stop: Number) -> jax.Array:
        rounds, rest = divmod(self._count, self._size)
        return rounds * (stop - start) + jnp.clip(rest - start, 0, stop - start)


def direction(side: Number) -> Number:
    """Which way goes what comes from a side."""
    return RIGHT - (RIGHT - LEFT) * side
