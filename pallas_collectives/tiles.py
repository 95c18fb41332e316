"""Arrays in the order of TPU tiles, 8 rows of 128 numbers, as XLA has them in memory.

Passes of XLA that keep this order move no number for it; by the compiler's cycles what quantises
rows in any other takes 7 to 17 times as long on v5e.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

SUBLANES, LANES = 8, 128


def are_whole(shape: tuple[int, ...]) -> bool:
    """Whether an array's last two dimensions are whole tiles."""
    able = len(shape) > 1 and shape[-2] % SUBLANES == shape[-1] % LANES == 0
    return able and math.prod(shape) > 0


def in_tiles(x: jax.Array) -> jax.Array:
    """(..., rows, columns) -> (..., rows / 8, columns / 128, 8, 128)."""
    *lead, rows, columns = x.shape
    apart = x.reshape(*lead, rows // SUBLANES, SUBLANES, columns // LANES, LANES)
    return jnp.swapaxes(apart, -2, -3)


def in_rows(x: jax.Array) -> jax.Array:
    """The inverse of `in_tiles`."""
    *lead, rows, columns, _, _ = x.shape
    return jnp.swapaxes(x, -2, -3).reshape(*lead, rows * SUBLANES, columns * LANES)


def number(row: Any, column: Any, columns: int) -> Any:
    """The place, in the order of tiles, of what is in a row and column of whole tiles."""
    down, along = (size.bit_length() - 1 for size in (SUBLANES, LANES))
    tile = (row >> down) * (columns >> along) + (column >> along)
    return (((tile << down) + (row & SUBLANES - 1)) << along) + (column & LANES - 1)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How rows are cut into groups: (..., rows, count, size), the last one padded with zeros.

    Where groups and arrays are whole tiles it is in their order, (..., rows / 8, count, size / 128,
    8, 128).

    Attributes:
      shape: of the array.
      count: groups of a row.
      size: numbers of a group.
    """

    shape: tuple[int, ...]
    count: int
    size: int

    @property
    def tiled(self) -> bool:
        """Whether it is in the order of tiles."""
        fits = self.count * self.size == self.shape[-1] and self.size % LANES == 0
        return fits and are_whole(self.shape)

    @property
    def axes(self) -> tuple[int, ...]:
        """Those of a group's numbers."""
        return (-3, -1) if self.tiled else (-1,)

    def groups(self, x: jax.Array) -> jax.Array:
        """The array's groups."""
        if self.tiled:
            apart = in_tiles(x)
            return apart.reshape(*apart.shape[:-3], self.count, -1, SUBLANES, LANES)
        padding = [(0, 0)] * (x.ndim - 1) + [(0, self.count * self.size - x.shape[-1])]
        return jnp.pad(x, padding).reshape(*x.shape[:-1], self.count, self.size)

    def whole(self, groups: jax.Array) -> jax.Array:
        """The array of these groups."""
        if self.tiled:
            return in_rows(groups.reshape(*groups.shape[:-4], -1, SUBLANES, LANES))
        padded = groups.reshape(*self.shape[:-1], self.count * self.size)
        return padded[..., : self.shape[-1]]

    def by_group(self, scales: jax.Array) -> jax.Array:
        """One number for each group, (..., rows, count), in the order of the groups."""
        if not self.tiled:
            return scales
        *lead, rows, count = scales.shape
        return jnp.swapaxes(scales.reshape(*lead, rows // SUBLANES, SUBLANES, count), -1, -2)

    def by_row(self, scales: jax.Array) -> jax.Array:
        """The inverse of `by_group`."""
        if not self.tiled:
            return scales
        return jnp.swapaxes(scales, -1, -2).reshape(*self.shape[:-1], self.count)
