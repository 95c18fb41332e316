"""Noise for rounding at random: the same bits in kernels and by XLA.

It is a hash of a number's place and of two words of a key, which takes a fifth of the operations of
jax.random's threefry, and need be no more: roundings are to be without bias and independent. The
hash is lowbias32 (C. Wellons, "Prospecting for hash functions", 2018), twice.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives import tiles


def of(words: Any, shape: tuple[int, ...]) -> jax.Array:
    """Noise for an array of a shape, of two or more dimensions."""
    columns = shape[-1]
    flat = math.prod(shape[:-1]), columns
    row, column = (lax.broadcasted_iota(jnp.int32, flat, axis) for axis in range(2))
    if tiles.are_whole(shape):
        return at(words, tiles.number(row, column, columns)).reshape(shape)
    return at(words, row * columns + column).reshape(shape)


def at(words: Any, place: jax.Array) -> jax.Array:
    """Uniform float32 in [0, 1), one for each place, an int32."""
    bits = _mixed(_mixed(place ^ words[0]) ^ words[1])
    return lax.shift_right_logical(bits, np.int32(8)).astype(jnp.float32) * np.float32(2.0**-24)


def _mixed(bits: jax.Array) -> jax.Array:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        bits = (bits ^ lax.shift_right_logical(bits, np.int32(shift))) * np.int32(factor)
    return bits ^ lax.shift_right_logical(bits, np.int32(16))
