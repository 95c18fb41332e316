"""Blocks side by side along an axis, seen as an array with dimensions for the torus."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_collectives.tiles import LANES, SUBLANES


@dataclasses.dataclass(frozen=True)
class View:
    """Arrays of blocks side by side along `axis`, seen as arrays with dimensions for the torus.

    A reshape that moves nothing. Blocks of columns become blocks of tiles first, as they lie in
    memory; nothing moves there either if their rows are whole tiles. So can blocks of rows, to be
    cut between any two tiles: a row of tiles may be too wide.

    Attributes:
      shape: one block as it is.
      axis: the dimension along which blocks lie; they are `sliceable` along it.
      block: one block as it is seen.
      at: the dimension of that before which those of the torus stand.
    """

    shape: tuple[int, ...]
    axis: int
    block: tuple[int, ...]
    at: int

    @classmethod
    def of(cls, shape: tuple[int, ...], axis: int) -> "View":
        """The view of blocks of a shape along an axis."""
        if axis < len(shape) - 1:
            return cls(shape, axis, shape, axis)
        *before, rows, columns = shape
        high = _high(rows)
        return cls(shape, axis, (*before, rows // high, columns // LANES, high, LANES), axis)

    @classmethod
    def of_tiles(cls, shape: tuple[int, ...], axis: int) -> "View | None":
        """The view of blocks of rows as tiles in a row; None where they are not whole tiles."""
        if axis == len(shape) - 1 or shape[-2] % SUBLANES or shape[-1] % LANES:
            return None
        tiles = math.prod(shape[axis:]) // (SUBLANES * LANES)
        return cls(shape, axis, (*shape[:axis], tiles, SUBLANES, LANES), axis)

    @classmethod
    def of_lanes(cls, shape: tuple[int, ...], axis: int) -> "View | None":
        """As above, with the rows of all tiles in one dimension: rows of a tile's width."""
        if cls.of_tiles(shape, axis) is None:
            return None
        return cls(shape, axis, (*shape[:axis], math.prod(shape[axis:]) // LANES, LANES), axis)

    def into(self, x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        """An array of as many blocks as `sizes` says, as it is seen."""
        if self.block != self.shape:
            *before, rows, columns = x.shape
            high = _high(rows)
            x = lax.optimization_barrier(x)  # or XLA lays out the product that made x for the swap
            apart = x.reshape(*before, rows // high, high, columns // LANES, LANES)
            x = jnp.swapaxes(apart, -3, -2)
        return x.reshape(*self.block[: self.at], *sizes, *self.block[self.at :])

    def out_of(self, y: jax.Array, sizes: tuple[int, ...], *, pinned: bool = False) -> jax.Array:
        """The inverse of `into`.

        pinned: XLA is told the layout: it would swap rows in memory where a backward pass reads
          packed numbers twice. `jax.export` then asks to allow "LayoutConstraint", as a kernel.
        """
        shape = list(self.shape)
        shape[self.axis] *= math.prod(sizes)
        if self.block != self.shape:
            *before, rows, columns = shape
            high = _high(rows)
            tiles = y.reshape(*before, rows // high, columns // LANES, high, LANES)
            y = jnp.swapaxes(tiles, -3, -2)
            if pinned:
                return _as_they_lie(y).reshape(shape)
            y = lax.optimization_barrier(y.reshape(shape))  # or a backward pass copies sums, twice
        return y.reshape(shape)


def _as_they_lie(rows: jax.Array) -> jax.Array:
    """Rows across tiles, (..., tiles, rows, columns of tiles, lanes), each tile in one place."""
    *before, of_tiles, of_columns, lanes = range(rows.ndim)
    return with_layout_constraint(rows, Layout((*before, of_columns, of_tiles, lanes)))


def _high(rows: int) -> int:
    """Rows of what is taken for a tile in HBM, whatever the dtype."""
    return SUBLANES if rows % SUBLANES == 0 else rows
