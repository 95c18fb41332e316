"""Blocks side by side along an axis, seen as an array with dimensions for the torus."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_collectives.annotations import DType
from pallas_collectives.kernels.machinery.blocks import LANES


@dataclasses.dataclass(frozen=True)
class View:
    """Arrays of blocks side by side along `axis`, seen as arrays with dimensions for the torus.

    A reshape that moves nothing. Blocks of columns become blocks of tiles first, as they lie in
    memory; nothing moves there either if their rows are whole tiles.

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
    def of(cls, shape: tuple[int, ...], axis: int, dtype: DType) -> "View":
        """The view of blocks of a shape along an axis."""
        if axis < len(shape) - 1:
            return cls(shape, axis, shape, axis)
        *before, rows, columns = shape
        high = 8 if rows % 8 == 0 else rows
        return cls(shape, axis, (*before, rows // high, columns // LANES, high, LANES), axis)

    def into(self, x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        """An array of as many blocks as `sizes` says, as it is seen."""
        if self.block != self.shape:
            *before, rows, _, high, lanes = self.block
            x = jnp.swapaxes(x.reshape(*before, rows, high, -1, lanes), -3, -2)
        return x.reshape(*self.block[: self.at], *sizes, *self.block[self.at :])

    def out_of(self, y: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        """The inverse of `into`."""
        if self.block != self.shape:
            *before, rows, _, high, lanes = self.block
            y = jnp.swapaxes(y.reshape(*before, rows, -1, high, lanes), -3, -2)
        shape = list(self.shape)
        shape[self.axis] *= math.prod(sizes)
        return y.reshape(shape)
