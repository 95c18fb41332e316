"""An array's blocks along an axis as a new first dimension, and back."""

import jax
import jax.numpy as jnp


def blocks(x: jax.Array, axis: int, n: int) -> jax.Array:
    """(..., n * s, ...) -> (n, ..., s, ...)."""
    shape = x.shape
    cut = x.reshape(*shape[:axis], n, shape[axis] // n, *shape[axis + 1 :])
    return jnp.moveaxis(cut, axis, 0)


def side_by_side(stack: jax.Array, axis: int) -> jax.Array:
    """(n, ..., s, ...) -> (..., n * s, ...)."""
    n, *shape = stack.shape
    moved = jnp.moveaxis(stack, 0, axis)
    return moved.reshape(*shape[:axis], n * shape[axis], *shape[axis + 1 :])
