"""Weights' gradients in one kernel with the scatter that sums them over devices.

    d = psum_scatter(x.T @ y)     x: (..., K), y: (..., N), d: a block of (K, N)

A gradient sums over tokens, which are the rows of what a weight was multiplied with and of its
product's cotangent. `matmul_reduce_scatter` reads the one that is scattered as it lies, and turns
its tiles as it multiplies them. What is scattered along the columns of the gradient comes out of
the kernel as rows, and XLA turns that block.

It is for scatters that would stop the core: where a SparseCore adds, or XLA itself, beside
products, both stay apart.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from pallas_collectives._compat import Aval
from pallas_collectives.backends.plans import How
from pallas_collectives.lowering import fusing
from pallas_collectives.lowering.dataflow import Dataflow
from pallas_collectives.lowering.fusing import Pair, types_of
from pallas_collectives.lowering.turns import Step, numbers
from pallas_collectives.topology import chips


def fused(
    steps: Sequence[Step], scatters: Iterable[Step], results: Sequence[Any], spare: float
) -> list[Step] | None:
    """A turn with gradients' products and scatters in kernels; None where that is no quicker.

    Args:
      steps: in the program's order.
      scatters: some of them.
      results: what the turn hands on.
      spare: seconds of products that need hide nothing.
    """
    flow, found, chip = Dataflow(steps), False, chips.current()
    for scatter in scatters:
        made = _made_by(flow, scatter, {*numbers(results)})
        seconds = made[-1].seconds(chip) if made else math.inf
        if seconds <= spare and (kernel := _kernel(flow, scatter, made)):
            flow.replace([scatter, *made], kernel)
            found, spare = True, spare - seconds
    return flow.in_order() if found else None


def _kernel(flow: Dataflow, scatter: Step, made: Sequence[Step]) -> list[Step]:
    """The kernel in place of a scatter and what made its gradient; empty where none is quicker."""
    eqn = scatter.eqn
    assert eqn is not None
    how: How = eqn.params["how"]
    product, along = made[-1].eqn, eqn.params["scatter_dimension"]
    assert product is not None
    types = types_of(product)
    k = (along + len(made) - 1) % 2  # which operand has as its columns what is scattered
    where = False, how, eqn.params["axis_name"], 0, (types[k],), (types[1 - k],)
    pair = Pair(*where, types[2].dtype, False, product.params["precision"], turned=True)
    kernel = fusing.kernel_of(eqn, pair)
    if kernel is None or kernel.saves <= 0:
        return []
    reads, invars = ((of[k], of[1 - k]) for of in (made[-1].reads, product.invars))
    whole = eqn.replace(invars=[*invars], **kernel.bound)
    if along == 0:
        return [Step(whole, reads, scatter.writes, scatter.within)]
    turning, part = _turning(types_of(eqn)[-1], eqn), 1 + max(flow.makers)
    return [
        Step(whole.replace(outvars=turning.invars), reads, (part,), scatter.within),
        Step(turning, (part,), scatter.writes, scatter.within),
    ]


def _made_by(flow: Dataflow, scatter: Step, results: set[int]) -> list[Step]:
    """What turns a scatter's gradient, if anything does, and the product that makes it.

    Empty where it is made otherwise, where something else reads it, and where no kernel scatters
    so.
    """
    assert scatter.eqn is not None
    params, found = scatter.eqn.params, list[Step]()
    if "scatter_dimension" not in params:  # a sum for all devices
        return []
    if params.get("axis_index_groups") or not params.get("tiled", True):
        return []
    if not params["how"].fuses or params["how"].wire:
        return []
    value = scatter.reads[0]
    while len(flow.readers([value])) == 1 and value not in results:
        step = flow.makers.get(value)
        if step is None or step.eqn is None:
            return []
        found.append(step)
        if _sums_rows(step):
            return found
        if len(found) > 1 or step.eqn.params.get("permutation") != (1, 0):
            return []
        value = step.reads[0]
    return []


def _sums_rows(step: Step) -> bool:
    """Whether it multiplies two arrays, and sums over all their dimensions but the last."""
    if step.eqn is None or not step.is_product:
        return False
    left, right, _ = types_of(step.eqn)
    summed, batches = step.eqn.params["dimension_numbers"]
    rows = [tuple(range(x.ndim - 1)) for x in (left, right)]
    return left.ndim > 1 and not any(batches) and [*map(tuple, summed)] == rows


def _turning(kind: Aval, like: JaxprEqn) -> JaxprEqn:
    """The equation that turns a matrix, and so makes one of a type, where another stands."""
    with like.ctx.manager:
        turned = jax.ShapeDtypeStruct(kind.shape[::-1], kind.dtype)
        (eqn,) = jax.make_jaxpr(jnp.transpose)(turned).jaxpr.eqns
    return eqn.replace(ctx=like.ctx)
