"""A sum as two steps of a turn: the scattered sum, and the gather of its blocks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat
from pallas_collectives._compat import Aval
from pallas_collectives.backends.plans import How
from pallas_collectives.lowering import primitives
from pallas_collectives.lowering.turns import Step


def in_two(total: Step, axis: int, part: int, rows: int = 0) -> tuple[Step, Step]:
    """The scatter and the gather that give what a psum gives, of one operand over all devices.

    Neither has the wire or the algorithm of the psum.

    Args:
      total: the psum.
      axis: the dimension that is scattered and gathered, a multiple of the devices.
      part: the number of what goes from one to the other.
      rows: the gather brings so many sums at once, stacked; by default one.
    """
    eqn = total.eqn
    assert eqn is not None
    axes = eqn.params["axes"]
    # Over the axes' devices a psum's result is the same, and where types say so a gather's too.
    same = {"to": "invarying"} if eqn.primitive.name.endswith("_invariant") else {}
    how = dataclasses.replace(
        eqn.params["how"], wire=None, wire_backward=None, algorithm=None, once=False
    )

    def scattered(x: jax.Array) -> Any:
        return primitives.LAX.psum_scatter(x, axes, scatter_dimension=axis, tiled=True)

    def gathered(x: jax.Array) -> Any:
        stack = jnp.broadcast_to(x, (rows, *x.shape)) if rows else x
        return primitives.LAX.all_gather(
            stack, axes, axis=axis + 1 if rows else axis, tiled=True, **same
        )

    with eqn.ctx.manager:
        scatter = _equation(how, scattered, _compat.type_of(eqn.invars[0]))
        how = dataclasses.replace(how, awaited=None) if rows else how
        gather = _equation(how, gathered, _compat.type_of(scatter.outvars[0]))
    return (
        Step(scatter.replace(ctx=eqn.ctx), total.reads, (part,), total.within),
        Step(gather.replace(ctx=eqn.ctx), (part,), total.writes, total.within),
    )


def _equation(how: How, by_lax: Callable[[jax.Array], Any], kind: Aval) -> JaxprEqn:
    """The last of what a function computes, one of lax's collectives, by our primitive for it."""
    closed = jax.make_jaxpr(lambda x: primitives.with_twins(how, by_lax, x))(kind)
    return closed.jaxpr.eqns[-1]
