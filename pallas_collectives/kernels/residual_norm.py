"""A sum over devices, added to a residual and normalised by rows, in one kernel.

    new    = residual + psum(x)
    normed = new / sqrt(mean of new**2 along a row + eps) * weight

Operands are gathered into VMEM as `all_reduce_gather` gathers them, and each device adds and
normalises a few rows at a time as they lie there. So of all arrays only x, residual and weight are
read from HBM, and only the two results written.

                    steps             bytes sent per link and direction    scratch
    ring            floor(n/2)        (n-1)/2 operands                     n + 4 operands of VMEM

Rounding. The sum is added in the order of the ranks in float32 and rounded to x's dtype, new to the
residual's, normed to x's: each once, where the three written apart round.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_collectives.annotations import Interpret, Ref
from pallas_collectives.kernels import all_reduce_gather
from pallas_collectives.kernels.machinery.combine import combined
from pallas_collectives.topology.groups import Group


def psum_residual_rmsnorm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    group: Group,
    *,
    high: int,
    eps: float,
    columns: int,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:
    """(normed, new), in VMEM.

    Args:
      x: (steps * high, wide), whole tiles: `high` rows at a time; or, if a row is longer than
        `wide`, one row at a time, as so many tiles.
      residual: as x.
      weight: float32 (1, wide) or, of a row in tiles, (high, wide).
      group: the devices.
      high: see x.
      eps: added to a row's mean square.
      columns: how many a row has; what is padded to whole tiles is 0.
      interpret: see `launch.call`.
    """

    def after(stack_ref: Ref, *refs: Ref) -> None:
        for_each_step(stack_ref, *refs, high=high, eps=eps, columns=columns)

    normed, new = all_reduce_gather.gathered(
        after,
        group,
        x,
        residual,
        weight,
        out_shapes=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(residual.shape, residual.dtype),
        ),
        name="psum_residual_rmsnorm",
        interpret=interpret,
        vmem=True,
    )
    return normed, new


def for_each_step(
    stack_ref: Ref,  # (n, steps * high, wide): VMEM; or several dimensions for n
    residual_ref: Ref,  # (steps * high, wide): VMEM
    weight_ref: Ref,  # (1, wide) or (high, wide): VMEM
    normed_ref: Ref,  # (steps * high, wide): VMEM
    new_ref: Ref,  # (steps * high, wide): VMEM
    *,
    high: int,
    eps: float,
    columns: int,
) -> None:
    """Adds and normalises the rows of one step after the other."""
    lines, wide = residual_ref.shape
    ranks = tuple(pl.ds(0, n) for n in stack_ref.shape[:-2])

    def one(step: jax.Array, _: None) -> None:
        at = pl.ds(pl.multiple_of(step * high, high), high)
        total = combined("sum", stack_ref.at[(*ranks, at)], (high, wide))
        new = added(residual_ref[at], total.astype(normed_ref.dtype))
        new_ref[at] = new
        normed = normalised(new, weight_ref[...], eps, columns)
        normed_ref[at] = normed.astype(normed_ref.dtype)

    lax.fori_loop(0, lines // high, one, None)


def added(residual: jax.Array, total: jax.Array) -> jax.Array:
    """The new residual."""
    return (residual.astype(jnp.float32) + total.astype(jnp.float32)).astype(residual.dtype)


def normalised(new: jax.Array, weight: jax.Array, eps: float, columns: int) -> jax.Array:
    """Rows of so many columns by their root mean square, times a weight; in float32.

    They lie along the last dimension, or along the last two as one row does that is as long.
    """
    wide = new.astype(jnp.float32)
    weight = lax.expand_dims(weight, range(new.ndim - weight.ndim))
    along = -1 if columns <= new.shape[-1] else (-2, -1)
    mean = jnp.sum(wide * wide, axis=along, keepdims=True) * (1 / columns)
    return wide * lax.rsqrt(mean + eps) * weight.astype(jnp.float32)
