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

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_collectives.kernels import all_reduce_gather
from pallas_collectives.kernels.machinery.blocks import sublanes
from pallas_collectives.kernels.machinery.combine import combined
from pallas_collectives.topology.groups import Group


def psum_residual_rmsnorm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    group: Group,
    *,
    eps: float,
    columns: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """(normed, new), in VMEM.

    Args:
      x: (rows, D), whole tiles of both dtypes.
      residual: (rows, D).
      weight: float32 (1, D).
      group: the devices.
      eps: added to a row's mean square.
      columns: the true D, of whose padding all is 0.
      interpret: see `launch.call`.
    """

    def after(stack_ref: Any, *refs: Any) -> None:
        for_each_row_tile(x.dtype, residual.dtype, stack_ref, *refs, eps=eps, columns=columns)

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


def for_each_row_tile(
    x_dtype: Any,
    residual_dtype: Any,
    stack_ref: Any,  # (n, rows, D): VMEM; or several dimensions for n
    residual_ref: Any,  # (rows, D): VMEM
    weight_ref: Any,  # (1, D): VMEM
    normed_ref: Any,  # (rows, D): VMEM
    new_ref: Any,  # (rows, D): VMEM
    *,
    eps: float,
    columns: int,
) -> None:
    """Adds and normalises so many rows at a time as make one row of tiles of either dtype."""
    rows, depth = residual_ref.shape
    high = max(sublanes(x_dtype), sublanes(residual_dtype))

    def one(number: Any, _: None) -> None:
        at = pl.ds(pl.multiple_of(number * high, high), high)
        layers = stack_ref.at[(*(pl.ds(0, n) for n in stack_ref.shape[:-2]), at)]
        total = combined("sum", layers, (high, depth)).astype(x_dtype)
        new = added(residual_ref[at, :], total)
        new_ref[at, :] = new
        normed_ref[at, :] = normalised(new, weight_ref[...], eps, columns).astype(x_dtype)

    lax.fori_loop(0, rows // high, one, None)


def added(residual: jax.Array, total: jax.Array) -> jax.Array:
    """The new residual."""
    return (residual.astype(jnp.float32) + total.astype(jnp.float32)).astype(residual.dtype)


def normalised(new: jax.Array, weight: jax.Array, eps: float, columns: int) -> jax.Array:
    """Rows by their root mean square over so many columns, times a weight; in float32."""
    wide = new.astype(jnp.float32)
    mean = jnp.sum(wide * wide, axis=-1, keepdims=True) * (1 / columns)
    return wide * lax.rsqrt(mean + eps) * weight.astype(jnp.float32)
