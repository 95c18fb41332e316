"""Products with their collective as pipelines of permutes and XLA's products.

See `array_pipelines`. Operands fit: `products` has checked them, and `fusion.decide` that products
of the axis are blocks of the result.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_collectives import validation
from pallas_collectives.annotations import DTypeLike
from pallas_collectives.overlap.array_pipelines import (
    pipelined_all_gather_and_consume,
    pipelined_produce_and_all_to_all,
)
from pallas_collectives.validation import AxisName


def pipelined_all_gather_matmul(
    x_shard: jax.Array,
    ws: Any,
    axis_name: AxisName,
    *,
    gather_axis: int = 0,
    return_gathered: bool = False,
    preferred_element_type: DTypeLike | None = None,
    backend: str | None = None,
) -> Any:
    """all_gather(x_shard, axis=gather_axis, tiled=True) @ w, each shard multiplied as it arrives.

    Args:
      x_shard: (..., K), of two dimensions or more.
      ws: (K, N), or a pytree of such arrays, multiplied from one gather.
      axis_name: see `pipelined_all_gather_and_consume`.
      gather_axis: the dimension to gather along; any but the last, which is contracted.
      return_gathered: return (products, the gathered x).
      preferred_element_type: as `jnp.matmul`'s.
      backend: see `pipelined_all_gather_and_consume`.

    Returns:
      The products, (..., N), in ws' structure.

    A weight's gradient is added up shard by shard, in float32 if the weight is narrower.

    Raises what `pipelined_all_gather_and_consume` raises.
    """
    uses = jax.tree.map(_used_often, ws)

    def consume(block: jax.Array, _: jax.Array) -> Any:
        def product(w: Callable[[], jax.Array]) -> jax.Array:
            return jnp.matmul(block, w(), preferred_element_type=preferred_element_type)

        products = jax.tree.map(product, uses)
        return (products, block) if return_gathered else products

    return pipelined_all_gather_and_consume(
        x_shard,
        consume,
        axis_name,
        axis=gather_axis,
        tiled=True,
        backend=backend,
    )


def pipelined_matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    axis_name: AxisName,
    *,
    scatter_axis: int = 0,
    reduce: str = "sum",
    precise: bool = False,
    preferred_element_type: DTypeLike | None = None,
    backend: str | None = None,
) -> jax.Array:
    """psum_scatter(x @ w, tiled=True), each block's product computed just before its hop.

    Args:
      x: (..., K): this device's columns of the left operand, of two dimensions or more.
      w: (K, N): its rows of the right one.
      axis_name: see `pipelined_produce_and_all_to_all`, n devices together.
      scatter_axis: the dimension of the product that is cut into n blocks.
      reduce: "sum", or "mean" for floats.
      precise: let sums of floats narrower than 32 bits travel as float32.
      preferred_element_type: dtype of the result; None as `jnp.matmul`'s.
      backend: see `pipelined_produce_and_all_to_all`.

    Returns:
      This device's block of the sum over devices.

    Products of floats are added in float32, and sums are rounded once per hop to the result's
    dtype, or with `precise` once at the end.

    Raises what `pipelined_produce_and_all_to_all` raises.
    """
    axis, devices = scatter_axis % x.ndim, validation.size_of(axis_name)
    to = jnp.dtype(preferred_element_type or jnp.result_type(x, w))
    floats = jnp.issubdtype(to, jnp.floating)
    wide = jnp.promote_types(to, jnp.float32) if floats else to
    columns = axis == x.ndim - 1
    size = (w.shape[1] if columns else x.shape[axis]) // devices
    whole = _used_often(x if columns else w)

    def produce(destination: jax.Array) -> jax.Array:
        def block(of: jax.Array, axis: int) -> jax.Array:
            return lax.dynamic_slice_in_dim(of, destination * size, size, axis)

        left, right = (whole(), block(w, 1)) if columns else (block(x, axis), whole())
        return jnp.matmul(left, right, preferred_element_type=wide)

    total = pipelined_produce_and_all_to_all(
        produce,
        axis_name,
        reduce="sum",
        wire_dtype=(wide if precise else to) if floats else None,
        backend=backend,
    )
    return (total / devices if reduce == "mean" else total).astype(to)


def _used_often(w: jax.Array) -> Callable[[], jax.Array]:
    """w for each use; its gradients from them are added in float32, if w is of narrower floats.

    It is widened once and narrowed for each use, so that gradients are widened before they are
    added. In values the two cancel, and XLA drops them.
    """
    if not jnp.issubdtype(w.dtype, jnp.floating) or w.dtype.itemsize >= 4:
        return lambda: w
    wide = jnp.asarray(w, jnp.float32)
    return lambda: wide.astype(w.dtype)
