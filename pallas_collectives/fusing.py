"""Whether a product and its collective run as one kernel: where they can, and where it pays.

Model, per device, of blocks passed both ways round a ring of n, each with its share of the product:

    wire      (n-1)/2 blocks over a link
    unfused   wire + the products by all of the device's cores at full rate
    fused     the longer of the wire and the products, by the one core that a kernel runs on; the
              shorter for the one part of a block that nothing hides; and two DMAs' latency a part

Rates are those of `replay.machine`. So fusing loses where blocks are small, and on chips of two
cores a device (v4, v5p) where the products take much longer than the wire.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_collectives import chips
from pallas_collectives.kernels import collective_matmul, product
from pallas_collectives.kernels.topology import Group

MULTIPLIED = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
_WIDE_ONLY = ("v4",)  # their matrix units take no 8-bit operands
_MIXED = ("float32", "bfloat16")


class Cost(NamedTuple):
    """Modelled seconds of a product and its collective."""

    fused: float
    unfused: float


def obstacle(
    x_dtype: Any, w_dtypes: Sequence[Any], out_dtype: Any, precision: Any, sizes: Sequence[int]
) -> str:
    """Why no kernel multiplies such operands; "" if one does."""
    names = {jnp.dtype(dtype).name for dtype in (x_dtype, *w_dtypes)}
    chip = chips.current().name
    integers = jnp.issubdtype(x_dtype, jnp.integer)
    if unknown := sorted(names - set(MULTIPLIED)):
        return f"the kernels multiply {', '.join(MULTIPLIED)}, and an operand is of {unknown[0]}"
    if len(names) > 1 and not names <= set(_MIXED):
        return f"operands are of different dtypes, {' and '.join(sorted(names))}"
    if chip in _WIDE_ONLY and not names <= set(_MIXED):
        return f"{chip}'s matrix unit takes no {min(names)}"
    if jnp.issubdtype(out_dtype, jnp.integer) != integers or jnp.dtype(out_dtype).itemsize > 4:
        return f"products of {x_dtype} are not added up in {out_dtype}"
    if _precision(precision) not in (None, lax.Precision.DEFAULT, lax.Precision.HIGHEST):
        return f"the kernels know no precision={precision!r}"
    if 0 in sizes:
        return "an operand is empty"
    return ""


def cost(op: str, plan: collective_matmul.Plan, group: Group, wire_dtype: Any) -> Cost:
    """What a product and its collective take, fused and apart.

    Args:
      op: "all_gather_matmul" or "matmul_reduce_scatter".
      plan: of the products of one block.
      group: the devices.
      wire_dtype: of what travels.
    """
    rates, n = product.generation(chips.current().name), group.size
    batch, rows, depth = plan.blocks.shape
    gathers = op == "all_gather_matmul"
    columns = depth if gathers else plan.problems[0].columns
    block = batch * rows * columns * jnp.dtype(wire_dtype).itemsize
    links = rates.link_bandwidth * rates.link_efficiency / (2 if group.line else 1)
    hops = (n // 2) * (rates.hop_latency + rates.dma_latency)
    wire = (n - 1) / 2 * block / links + hops
    by_kernel = n * plan.seconds_per_block
    by_all_cores = by_kernel / rates.cores
    last = min(wire / max(1, n // 2), by_kernel / n) / plan.blocks.chunks
    starts = 2 * rates.dma_latency * n * plan.blocks.chunks
    return Cost(max(wire, by_kernel) + last + starts, wire + by_all_cores)


def _precision(precision: Any) -> Any:
    """One precision for both operands; as given if it is none that is known here."""
    if isinstance(precision, tuple) and len(set(precision)) == 1:
        return _precision(precision[0])
    names = {"default": lax.Precision.DEFAULT, "highest": lax.Precision.HIGHEST}
    return names.get(precision, precision) if isinstance(precision, str) else precision


def settled_precision(precision: Any) -> Any:
    """The precision that a kernel is to multiply with, JAX's default included."""
    chosen = _precision(precision)
    return (
        _precision(jax.config.values["jax_default_matmul_precision"]) if chosen is None else chosen
    )
