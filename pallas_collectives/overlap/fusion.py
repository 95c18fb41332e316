"""Whether a product and its collective run as one: where they can, and where it pays.

`decide` is the one place that says so: it makes the frozen `Fusion` of a call, which is followed,
and counted (`fusion_counts`). It is asked anew wherever a product is bound, so the backward
pass of a fused product may be unfused. Where devices turn out, while a program is lowered, to lie
where no kernel can serve, that is one more question to it (`as_devices_lie`).

Model, per device, of blocks passed both ways round a ring of n, each with its share of the product:

    wire      (n-1)/2 blocks over a link
    unfused   wire + the products by all of the device's cores at full rate
    fused     the longer of the wire and the products, by the one core that a kernel runs on; the
              shorter for the one part of a block that nothing hides; and two DMAs' latency a part

Rates are those of `replay.machine`. So fusing loses where blocks are small, and on chips of two
cores a device (v4, v5p) where the products take much longer than the wire.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_collectives.backends import algorithms, canonical, counters, slices
from pallas_collectives.backends.pallas import products
from pallas_collectives.backends.pallas.products import GATHER, SCATTER, Spec
from pallas_collectives.backends.plans import UNSERVABLE
from pallas_collectives.errors import AlgorithmError, ReachError, SliceError, VmemError
from pallas_collectives.kernels import collective_matmul
from pallas_collectives.kernels.machinery import product
from pallas_collectives.topology import chips, placement
from pallas_collectives.topology.groups import Group


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How a product and its collective run.

    Attributes:
      op: `GATHER` or `SCATTER`.
      way: "fused" (one kernel), "pipelined" (permutes and products of XLA) or "unfused" (a
        collective and a product).
      why: the reason for any way but one kernel.
    """

    op: str
    way: str
    why: str = ""

    def count(self) -> None:
        """Notes that it is being built."""
        counters.count_fusion(self.op, self.way, self.why)


def decide(op: str, xs: Sequence[Any], ws: Sequence[Any], spec: Spec) -> Fusion:
    """How the products of xs and ws are to run with their collective.

    Args:
      op: `GATHER` or `SCATTER`.
      xs: the left-hand sides, or their types; one but in the derivative of `SCATTER`.
      ws: the right-hand sides, or their types.
      spec: see there.

    Raises:
      AlgorithmError: "fused" was asked for by name, and cannot be.
    """
    how = spec.how
    if spec.wish == "unfused":
        return Fusion(op, "unfused", "it was asked for")
    if op == SCATTER and how.order is not None:
        return refused(op, spec, f"on its way round the ring it adds in no order={how.order!r}")
    if how.backend != "pallas":
        why = how.fallback or f"backend {how.backend!r} has no kernels"
        if spec.wish == "fused":
            return _pipelined(op, xs[0].ndim, spec, why)
        return Fusion(op, "unfused", why)
    reason = _obstacle(op, xs, ws, spec)
    return refused(op, spec, reason) if reason else Fusion(op, "fused")


def refused(op: str, spec: Spec, reason: str) -> Fusion:
    """What takes the place of a kernel that cannot serve, or need not.

    Raises:
      AlgorithmError: it was asked for by name.
    """
    if spec.wish == "fused":
        remedy = "leave algorithm=None to have both run apart"
        raise AlgorithmError(f"algorithm='fused' for {op}", reason, remedy)
    return Fusion(op, "unfused", reason)


def as_devices_lie(op: str, spec: Spec) -> Fusion:
    """What `decide` says of the devices alone, once they are known.

    Raises:
      AlgorithmError: "fused" was asked for by name, and the devices lie so that no kernel serves.
      SliceError: they lie in slices in a way that no steps serve.
    """
    group = canonical.group_of(spec.axis_name)
    if slices.split(group, slices.slices(group, spec.how.across)) is not None:
        return refused(op, spec, "the devices lie in several slices")
    try:
        algorithms.check_ring(op, placement.arranged(group))
    except ReachError as error:
        return refused(op, spec, str(error))
    return Fusion(op, "fused")


def _pipelined(op: str, ndim: int, spec: Spec, why: str) -> Fusion:
    obstacle = ""
    if spec.size == 1:
        obstacle = "there is one device"
    elif spec.axis == ndim - 1:
        obstacle = "the axis is the last, along which products are not cut into blocks"
    elif spec.how.order is not None:
        obstacle = f"a pipeline, backward too, adds in no order={spec.how.order!r}"
    elif spec.precision is not None:
        obstacle = f"pipelined products know no precision={spec.precision!r}"
    return refused(op, spec, obstacle) if obstacle else Fusion(op, "pipelined", why)


def _obstacle(op: str, xs: Sequence[Any], ws: Sequence[Any], spec: Spec) -> str:
    """Why no kernel is to serve; "" if one is."""
    x_shape = (*xs[0].shape[:-1], sum(x.shape[-1] for x in xs))
    if spec.axis == len(x_shape) - 1:
        end = "gathered" if op == GATHER else "scattered"
        what = (
            "contracted one, of which every product needs all" if op == GATHER else "weights' own"
        )
        return f"the {end} axis is the {what}"
    if spec.size == 1:
        return "there is one device"
    dtypes = [w.dtype for w in ws]
    sizes = [size for operand in (*xs, *ws) for size in operand.shape]
    mixed = {x.dtype for x in xs} if len(xs) > 1 else set()
    if len(mixed) > 1 or (len(xs) > 1 and len(set(dtypes)) > 1):
        return "pairs of operands are of different dtypes"
    found = obstacle(xs[0].dtype, dtypes, spec.out_dtype, spec.precision, sizes)
    if found:
        return found
    group = canonical.group_of(spec.axis_name)
    try:
        if slices.split(group, slices.slices(group, spec.how.across)) is not None:
            return "the devices lie in several slices"
        plan, wire = products.plan(op, x_shape, xs[0].dtype, ws, spec)
        operands = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*xs, *ws))
        products.effects(op, spec, operands)
    except (SliceError, VmemError, *UNSERVABLE) as error:
        return str(error)
    if spec.wish:
        return ""
    modelled = cost(op, plan, group, wire)
    if modelled.fused < modelled.unfused:
        return ""
    return "by the model of the chip it takes longer in one kernel"


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
    if products.one_precision(precision) not in (
        None,
        lax.Precision.DEFAULT,
        lax.Precision.HIGHEST,
    ):
        return f"the kernels know no precision={precision!r}"
    if 0 in sizes:
        return "an operand is empty"
    return ""


def cost(op: str, plan: collective_matmul.Plan, group: Group, wire_dtype: Any) -> Cost:
    """What a product and its collective take, fused and apart.

    Args:
      op: `GATHER` or `SCATTER`.
      plan: of the products of one block.
      group: the devices.
      wire_dtype: of what travels.
    """
    rates, n = product.generation(chips.current().name), group.size
    batch, rows, depth = plan.blocks.shape
    gathers = op == GATHER
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
