"""What a program does outside of its loops, lowered as a turn of a loop is.

XLA starts gathers as early as their operands are there, so none needs to be asked for ahead. But as
in a loop (`lowering.ahead`), lax keeps what products would hide next to nothing of, and barriers
keep sums of gradients under way beside products. The last sum has no product behind it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from pallas_collectives import _compat
from pallas_collectives.lowering import placed, questions
from pallas_collectives.lowering.ahead import rewritten
from pallas_collectives.lowering.loops import Loop

# A program that another runs in its place, all of it.
_body_p = core.Primitive("pallas_body")
_body_p.multiple_results = True


@functools.cache
def register() -> None:
    """Has what stands in `jax.shard_map` lowered so."""
    by_jax = _compat.lowering(_compat.shard_map_p)

    def lowering(
        ctx: mlir.LoweringRuleContext, *args: ir.Value, jaxpr: core.Jaxpr, **params: Any
    ) -> Sequence[ir.Value]:
        if not ctx.dim_var_values and questions.holds_any(core.ClosedJaxpr(jaxpr, ())):
            jaxpr = _as_one(jaxpr)
        return by_jax(ctx, *args, jaxpr=jaxpr, **params)

    _compat.register(_compat.shard_map_p, lowering=lowering)
    _compat.register(_body_p, lowering=_lowered)


def _as_one(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The same as one equation, so that it is lowered where its mesh and axes are known."""
    variables = [v for v in jaxpr.outvars if isinstance(v, core.Var)]
    given = {*jaxpr.invars}
    made = [v for v in dict.fromkeys(variables) if v not in given]
    closed = core.ClosedJaxpr(jaxpr.replace(outvars=made), ())
    with jax.sharding.use_abstract_mesh(jaxpr.eqns[0].ctx.cur_abstract_mesh):
        params = {"closed": closed}
        eqn = core.new_jaxpr_eqn(jaxpr.invars, made, _body_p, params, jaxpr.effects)
    return jaxpr.replace(eqns=[eqn])


def _lowered(
    ctx: mlir.LoweringRuleContext, *args: ir.Value, closed: core.ClosedJaxpr
) -> Sequence[ir.Value]:
    with placed.devices_known(ctx):
        found = rewritten(Loop.once(closed))
    run = found.once if found else core.jaxpr_as_fun(closed)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *args)
