"""Whether a product and its collective run as one: where they can, and where it pays.

`decide` is the one place that says so. It makes the `ProductPlan` of a call while that is traced;
the call carries the plan to its lowering. There `as_devices_lie` confirms it, or has both run apart
if no kernel serves devices so placed. What it returns is followed, counted (`fusion_counts`) and
printed by `explain`. A backward pass binds products of its own, each with its own plan.

Model, per device, of blocks passed both ways round a ring of n, each with its share of the product:

    wire      (n-1)/2 blocks over a link
    unfused   the wire, or what the table says of the collective if that is less, and the products
              by XLA: at `XLA_SHARE` of the peak rate, or HBM's for all operands
    fused     the longer of the two, what nothing hides at the ends, and DMAs' latency for each
              chunk (`matmul_plan.ProductTiling.seconds`)

Rates are those of `topology.chips`. So fusing loses if blocks are small. On chips with two cores a
device (v4, v5p) both run the kernel, if the rows of a block can be halved. GPUs have a model of
their own (`nccl_products.seconds`), and `as_gpus_reach` in place of `as_devices_lie`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike

from pallas_collectives.annotations import DTypeLike
from pallas_collectives.backends import canonical, fastest, nccl_products, serving, slices
from pallas_collectives.backends.pallas import products
from pallas_collectives.backends.pallas.products import GATHER, SCATTER, Spec
from pallas_collectives.backends.plans import (
    FUSED,
    PIPELINED,
    UNFUSED,
    UNSERVABLE,
    Candidate,
    ProductPlan,
)
from pallas_collectives.errors import AlgorithmError, ReachError
from pallas_collectives.kernels import matmul_plan
from pallas_collectives.kernels.machinery.blocks import LANES
from pallas_collectives.kernels.machinery.product import Problem
from pallas_collectives.topology import chips, placement
from pallas_collectives.topology.groups import Group

# Of the matrix units' peak rate, what XLA's own products attain: by the TPU compiler's estimates
# for 31 large ones of bfloat16 0.47 to 0.98 of it, half of them 0.9 and more
# (`benchmarks/xla_products.json`).
XLA_SHARE = 0.9


class Cost(NamedTuple):
    """Modelled seconds of a product and its collective."""

    fused: float
    unfused: float


def decide(op: str, xs: Sequence[Any], ws: Sequence[Any], spec: Spec) -> ProductPlan:
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
    if spec.wish == UNFUSED:
        return _plan(op, spec, UNFUSED, "it was asked for")
    if how.wire is not None or how.wire_backward is not None:
        return refused(op, spec, "over a wire the collective and the product run apart")
    if op == SCATTER and how.order is not None:
        return refused(op, spec, f"on its way round the ring it adds in no order={how.order!r}")
    if how.backend == "nccl" and not nccl_products.obstacle(op, xs, ws, spec):
        return _on_gpus(op, spec, nccl_products.work(op, xs, ws, spec))
    if how.backend != "pallas":
        why = how.fallback or f"backend {how.backend!r} has no kernels"
        if how.backend == "nccl":
            why = nccl_products.obstacle(op, xs, ws, spec)
        if spec.wish == FUSED:
            return _pipelined(op, xs[0].ndim, spec, why)
        return _plan(op, spec, UNFUSED, why)
    group = canonical.group_of(spec.axis_name)
    if reason := _operands_obstacle(op, xs, ws, spec) or slices.obstacle(group, how.across):
        return refused(op, spec, reason)
    x_shape = (*xs[0].shape[:-1], sum(x.shape[-1] for x in xs))
    operands = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*xs, *ws))
    try:
        group = products.on_wires(group)
        plan, block_bytes = products.plan(op, x_shape, xs[0].dtype, ws, spec, group)
        serving.effects(products.kernel, operands, op=op, spec=spec)
    except UNSERVABLE as error:
        return refused(op, spec, str(error))
    if spec.wish:
        return _plan(op, spec, FUSED, "it was asked for")
    modelled = cost(op, plan, spec, group, block_bytes, operands if len(xs) > 1 else ())
    return _faster(op, spec, modelled, "in one kernel")


def _on_gpus(op: str, spec: Spec, work: nccl_products.ProductWork) -> ProductPlan:
    """The plan of a product that GPUs can multiply beside copies."""
    if spec.wish:
        return _plan(op, spec, FUSED, "it was asked for")
    return _faster(op, spec, Cost(*nccl_products.seconds(work)), "beside each other")


def as_gpus_reach(plan: ProductPlan, obstacle: str, spec: Spec) -> ProductPlan:
    """The plan of a product to be fused, or another if GPUs cannot reach each other's memory.

    Raises:
      AlgorithmError: "fused" was asked for by name.
    """
    return refused(plan.op, spec, obstacle) if obstacle else plan


def _faster(op: str, spec: Spec, modelled: Cost, fused: str) -> ProductPlan:
    """The plan that takes less time by the model, with the times of both; fused: in words."""
    times = {FUSED: modelled.fused * 1e6, UNFUSED: modelled.unfused * 1e6}
    source = "modelled by the rates of the chip"
    candidates = tuple(
        Candidate(algorithm, us, None, source)
        for algorithm, us in sorted(times.items(), key=lambda item: item[1])
    )
    if modelled.fused < modelled.unfused:
        why = f"modelled {times[FUSED]:.1f} us {fused} against {times[UNFUSED]:.1f} us apart"
        return _plan(op, spec, FUSED, why, candidates)
    why = f"by the model of the chip it takes longer {fused}"
    return _plan(op, spec, UNFUSED, why, candidates)


def _plan(
    op: str, spec: Spec, algorithm: str, why: str, candidates: tuple[Candidate, ...] = ()
) -> ProductPlan:
    settled: dict[str, Any] = {"algorithm": algorithm, "why": why, "candidates": candidates}
    return ProductPlan(op=op, backend=spec.how.backend, **settled)


def refused(op: str, spec: Spec, reason: str) -> ProductPlan:
    """The plan if no kernel can serve, or need not.

    Raises:
      AlgorithmError: it was asked for by name.
    """
    if spec.wish == FUSED:
        remedy = "leave algorithm=None to have both run apart"
        raise AlgorithmError(f"algorithm='fused' for {op}", reason, remedy)
    return _plan(op, spec, UNFUSED, reason)


def as_devices_lie(plan: ProductPlan, spec: Spec) -> ProductPlan:
    """The plan of a product to be fused, or another if no kernel serves devices so placed.

    Raises:
      AlgorithmError: "fused" was asked for by name, and no kernel serves devices so placed.
    """
    group = canonical.group_of(spec.axis_name)
    if reason := slices.obstacle(group, spec.how.across) or placement.elsewhere(spec.how.interpret):
        return refused(plan.op, spec, reason)
    try:
        placement.check_ring(plan.op, placement.arranged(group))
    except ReachError as error:
        return refused(plan.op, spec, str(error))
    return plan


def _pipelined(op: str, ndim: int, spec: Spec, why: str) -> ProductPlan:
    obstacle = ""
    if spec.size == 1:
        obstacle = "there is one device"
    elif spec.axis == ndim - 1:
        obstacle = "the axis is the last, along which products are not cut into blocks"
    elif spec.how.order is not None:
        obstacle = f"a pipeline, backward too, adds in no order={spec.how.order!r}"
    elif spec.precision is not None:
        obstacle = f"pipelined products do not support precision={spec.precision!r}"
    return refused(op, spec, obstacle) if obstacle else _plan(op, spec, PIPELINED, why)


def _operands_obstacle(op: str, xs: Sequence[Any], ws: Sequence[Any], spec: Spec) -> str:
    """Why no kernel serves operands of such shapes and dtypes; "" if one does."""
    if spec.axis == xs[0].ndim - 1:
        end = "gathered" if op == GATHER else "scattered"
        what = (
            "contracted one, and every product needs all of it" if op == GATHER else "weights' own"
        )
        return f"the {end} axis is the {what}"
    if spec.size == 1:
        return "there is one device"
    dtypes = [w.dtype for w in ws]
    if spec.turned:
        rows, depth = products.rows_and_depth(xs[0].shape)
        if rows % (spec.size * LANES) or depth % LANES or ws[0].shape[-1] % LANES:
            return f"a turned product of {rows} rows, {depth} deep, is not of whole lanes"
    if len(xs) > 1 and max(len({x.dtype for x in xs}), len(set(dtypes))) > 1:
        return "pairs of operands are of different dtypes"
    sizes = [size for operand in (*xs, *ws) for size in operand.shape]
    return obstacle(xs[0].dtype, dtypes, spec.out_dtype, spec.precision, sizes)


MULTIPLIED = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
_WIDE_ONLY = ("v4",)  # their matrix units take no 8-bit operands
_MIXED = ("float32", "bfloat16")


def obstacle(
    x_dtype: DTypeLike,
    w_dtypes: Sequence[Any],
    out_dtype: DTypeLike,
    precision: PrecisionLike,
    sizes: Sequence[int],
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
        return f"{chip}'s matrix unit does not take {min(names)}"
    if jnp.issubdtype(out_dtype, jnp.integer) != integers or jnp.dtype(out_dtype).itemsize > 4:
        return f"products of {x_dtype} are not added up in {out_dtype}"
    if products.one_precision(precision) not in (
        None,
        lax.Precision.DEFAULT,
        lax.Precision.HIGHEST,
    ):
        return f"the kernels do not support precision={precision!r}"
    if 0 in sizes:
        return "an operand is empty"
    return ""


def cost(
    op: str,
    plan: matmul_plan.ProductTiling,
    spec: Spec,
    group: Group,
    block_bytes: int,
    joined: Sequence[jax.ShapeDtypeStruct] = (),
) -> Cost:
    """The seconds of a product and its collective, fused and apart.

    Args:
      op: `GATHER` or `SCATTER`.
      plan: the plan of the products of one block.
      spec: see there.
      group: the devices, in the order of the kernel's rings.
      block_bytes: bytes of a block on the wire.
      joined: operands that are first laid side by side, in a pass of their own.
    """
    products = group.size * plan.cores * plan.chunks
    product = sum(_xla_seconds(problem, products) for problem in plan.problems)
    passed = 2 * sum(x.size * x.dtype.itemsize for x in joined) / chips.current().hbm_bandwidth
    fused = plan.seconds(group, block_bytes) + passed
    return Cost(fused, _alone(op, spec, group, block_bytes) + product)


def _alone(op: str, spec: Spec, group: Group, block_bytes: int) -> float:
    """What the collective takes on the core: over several axes of a torus less than round a ring.

    It is the table's time, which has in it what every launch takes, the kernel's own, too: so it is
    no more than the wire's, as `fused`.
    """
    collective, blocks = ("all_gather", 1) if op == GATHER else ("reduce_scatter", group.size)
    how = dataclasses.replace(spec.how, algorithm=None, beside=False)
    in_mesh = canonical.group_of(spec.axis_name)
    found = fastest.decided(collective, how, blocks * block_bytes, in_mesh)
    wire = matmul_plan.wire_seconds(group, block_bytes)
    if not found or found.us is None or chips.current() is chips.SIMULATED:
        return wire  # of a simulated device the table has another chip's times
    return min(wire, found.us * 1e-6 * matmul_plan.sharing(group))


def _xla_seconds(problem: Problem, chunks: int) -> float:
    """What a product of so many chunks takes by XLA, on all cores of a device."""
    p, chip = problem, chips.current()
    rows = chunks * p.batch * p.rows
    traffic = rows * (p.depth * p.x_dtype.itemsize + p.columns * p.out_dtype.itemsize)
    traffic += p.depth * p.columns * p.w_dtype.itemsize
    return max(chunks * p.flops / (chip.matrix_rate * XLA_SHARE), traffic / chip.hbm_bandwidth)
