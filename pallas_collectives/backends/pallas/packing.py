"""Dtypes and shapes that a TPU's DMA engine cannot address, as ones that it can.

A collective that only moves data may move any bits of the same size. Aligned shapes of DMA-able
dtypes pass through untouched; all else costs a pass over the array before, and one after.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_collectives.backends import counters
from pallas_collectives.backends.plans import How
from pallas_collectives.errors import SlowerError
from pallas_collectives.kernels.machinery.blocks import LANES, sublanes

# Smaller operands may be padded in any step; and so may a bundle of sums (`lowering.bundles`).
_SMALL, _BUNDLE = 64 << 10, 1 << 20

# One-byte floats that the TPU compiler takes for no kernel's operand.
_UNTAKEN = ("float8_e3m4", "float8_e4m3", "float8_e4m3fnuz", "float8_e5m2fnuz")


def check_in_place(op: str, x: jax.Array, how: How, in_place: bool) -> None:
    """Leaves what kernels cannot read as it lies to lax, which can, where all of a step counts.

    That is under `override_lax` (`How.beside`). By `step` for v5e:4x4, us: a `psum` of (1000, 1000)
    bfloat16 112 by lax and 300 by a kernel, a `psum_scatter` of (4000, 1000) 212 and 356, an
    `all_to_all` of heads of 80 410 and 719. Flat complex numbers, two rows here, go to lax as well.

    Args:
      op: the canonical collective.
      x: what kernels would be given.
      how: how the collective is served.
      in_place: whether they would read it as it lies.

    Raises:
      SlowerError: they would not.
    """
    if in_place or not how.beside or x.nbytes <= (_BUNDLE if x.ndim < 2 else _SMALL):
        return
    raise SlowerError(
        f"{counters.lax_name(op)} of {x.nbytes} bytes",
        "kernels take whole tiles, and XLA would pad or move it before and behind them",
        f"make blocks multiples of {LANES} columns and of {sublanes(x.dtype)} rows",
    )


def pack(x: jax.Array) -> tuple[jax.Array, int]:
    """x in a dtype that DMAs move, and how many leading dimensions (0 or 1) that added.

    bool and some floats of one byte travel as uint8, float16 as bfloat16 bits, and complex and
    64-bit numbers as two arrays side by side in a new leading dimension.
    """
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8), 0
    if x.dtype.name in _UNTAKEN:
        return lax.bitcast_convert_type(x, jnp.uint8), 0
    if x.dtype == jnp.float16:
        return lax.bitcast_convert_type(x, jnp.bfloat16), 0
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts, added = pack(jnp.stack([x.real, x.imag]))
        return (parts.reshape(2 * len(parts), *x.shape), 1) if added else (parts, 1)
    if x.dtype.itemsize == 8:
        # No bitcast to pairs: XLA aborts the process on that of a constant (CPUs, JAX 0.12).
        bits = lax.bitcast_convert_type(x, jnp.uint64)
        return jnp.stack([bits.astype(jnp.uint32), (bits >> 32).astype(jnp.uint32)]), 1
    return x, 0


def unpack(y: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The inverse of `pack`, for an array of any shape behind the added dimension."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return y.astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real_dtype = jnp.finfo(dtype).dtype
        if real_dtype.itemsize == 8:
            y = unpack(y.reshape(2, 2, *y.shape[1:]), real_dtype)
        return lax.complex(y[0], y[1])
    if dtype.itemsize == 8:
        low, high = y.astype(jnp.uint64)
        return lax.bitcast_convert_type(low | (high << 32), dtype)
    return y if y.dtype == dtype else lax.bitcast_convert_type(y, dtype)


def rows_of(x: jax.Array) -> jax.Array:
    """x packed, as rows that DMAs can begin at: whole lanes in three dimensions or more.

    Arrays of three or more dimensions whose last is whole lanes stay as they are; the rows of
    others are padded to whole lanes, in one pass.
    """
    packed, added = pack(x)
    rows = jnp.moveaxis(packed, 0, 1) if added else packed
    if rows.ndim > 2 and rows.shape[-1] % LANES == 0:
        return rows
    flat = rows.reshape(len(rows), -1)
    return jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % LANES))).reshape(len(flat), -1, LANES)


def from_rows(rows: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `rows_of`, for as many rows as there are of what is otherwise like `like`."""
    packed = jax.eval_shape(lambda x: pack(x)[0], like).shape
    added = len(packed) > like.ndim
    row = (packed[0], *packed[2:]) if added else packed[1:]
    y = rows.reshape(len(rows), -1)[:, : math.prod(row)].reshape(len(rows), *row)
    return unpack(jnp.moveaxis(y, 1, 0) if added else y, like.dtype)
