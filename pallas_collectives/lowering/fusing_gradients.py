"""Weights' gradients in one kernel with the scatter that sums them over devices.

    d = psum_scatter(x.T @ y)     x: (..., K), y: (..., N), d: a block of (K, N)

A gradient sums over tokens, which are the rows of what a weight was multiplied with and of its
product's cotangent. `matmul_reduce_scatter` reads the one that is scattered as it lies, and turns
its tiles as it multiplies them. What is scattered along the columns of the gradient comes out of
the kernel as rows, and XLA turns that block.

It is for scatters that would stop the core: where a SparseCore adds, or XLA itself, beside
products, both stay apart.
"""

from collections.abc import Sequence
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


def fused(steps: Sequence[Step], scatter: Step, results: Sequence[Any]) -> list[Step] | None:
    """A turn with a gradient's product and scatter in one kernel; None where that is no quicker.

    Args:
      steps: in the program's order.
      scatter: one of them.
      results: what the turn hands on.
    """
    flow, eqn = Dataflow(steps), scatter.eqn
    assert eqn is not None
    how: How = eqn.params["how"]
    others = eqn.params.get("axis_index_groups") or not eqn.params.get("tiled", True)
    made = _made_by(flow, scatter.reads[0], {*numbers(results)})
    if not made or not how.fuses or how.wire or others:
        return None
    product, along = made[-1].eqn, eqn.params["scatter_dimension"]
    assert product is not None
    types = types_of(product)
    k = (along + len(made) - 1) % 2  # which operand has as its columns what is scattered
    where = False, how, eqn.params["axis_name"], 0, (types[k],), (types[1 - k],)
    pair = Pair(*where, types[2].dtype, False, product.params["precision"], turned=True)
    kernel = fusing.kernel_of(eqn, pair)
    if kernel is None or kernel.saves <= 0:
        return None
    reads, invars = ((of[k], of[1 - k]) for of in (made[-1].reads, product.invars))
    whole = eqn.replace(invars=[*invars], **kernel.bound)
    by = [Step(whole, reads, scatter.writes, scatter.within)]
    if along == 1:
        turning, part = _turning(types_of(eqn)[-1], eqn), 1 + max(flow.makers)
        whole = whole.replace(outvars=turning.invars)
        by = [
            Step(whole, reads, (part,), scatter.within),
            Step(turning, (part,), scatter.writes, scatter.within),
        ]
    flow.replace([scatter, *made], by)
    return flow.in_order()


def _made_by(flow: Dataflow, gradient: Any, results: set[int]) -> list[Step]:
    """What turns a gradient, if anything does, and the product that makes it.

    Empty where it is made otherwise, or where something else reads it.
    """
    found: list[Step] = []
    value = gradient
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
