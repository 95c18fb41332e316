"""A primitive of many operands and as many results, by the rules of one of its operands.

Each operand is batched, differentiated, known or dropped by itself, as if it had its own equation:
that one is mapped, varies or has a tangent does not matter to another.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import JaxprEqn
from jax.interpreters import ad

from pallas_collectives import _compat
from pallas_collectives._compat import Aval, Rule
from pallas_collectives.annotations import Dim, Tangent
from pallas_collectives.lowering import remat


def register(
    primitive: core.Primitive, one: core.Primitive, ours: Callable[[Rule, str], Rule]
) -> None:
    """Gives `primitive`, for each operand, the rules that `one` has, as `ours` changes them."""
    _compat.register(
        primitive,
        batch=ours(functools.partial(_batch, _compat.rule(one, "batch")), "batch"),
        partial_eval=functools.partial(_partial_eval, primitive),
        checkpoint=_checkpoint,
        dce=remat.dce_each,
    )
    if _compat.has_rule(one, "jvp"):
        _compat.register(
            primitive,
            jvp=functools.partial(_jvp, primitive),
            transpose=ours(
                functools.partial(_transpose, _compat.rule(one, "transpose")), "transpose"
            ),
        )


def abstract_eval(rule: Rule, *avals: Aval, **params: Any) -> tuple[Sequence[Any], frozenset[Any]]:
    """Types of the results, and the effects of all."""
    types, effects = zip(*(rule(aval, **params) for aval in avals), strict=True)
    return types, frozenset().union(*effects)


def _batch(
    rule: Rule, axis: Any, operands: Sequence[jax.Array], dims: Sequence[Dim], **params: Any
) -> tuple[Any, ...]:
    pairs = zip(operands, dims, strict=True)
    return tuple(zip(*(rule(axis, [x], [dim], **params) for x, dim in pairs), strict=True))


def _transpose(
    rule: Rule, cotangents: Sequence[Tangent], *operands: Any, **params: Any
) -> list[Any]:
    pairs = zip(cotangents, operands, strict=True)
    return [rule(cotangent, x, **params)[0] for cotangent, x in pairs]


def _jvp(
    primitive: core.Primitive,
    primals: Sequence[jax.Array],
    tangents: Sequence[Tangent],
    **params: Any,
) -> Any:
    """Binds the tangents that exist apart from the primals, which are known first."""
    results = primitive.bind(*primals, **params)
    params["how"] = params["how"].differentiated
    moving = [not isinstance(tangent, ad.Zero) for tangent in tangents]
    operands = list(itertools.compress(tangents, moving))
    moved = iter(primitive.bind(*operands, **params) if operands else ())
    return results, [
        next(moved) if moves else ad.Zero(jax.typeof(y).to_tangent_aval())
        for y, moves in zip(results, moving, strict=True)
    ]


def _partial_eval(primitive: core.Primitive, trace: Any, *operands: Any, **params: Any) -> Any:
    """Binds known operands now, and the others later."""
    known = [x.is_known() for x in operands]
    results = {}
    for now in set(known):
        part = [x for x, is_known in zip(operands, known, strict=True) if is_known == now]
        results[now] = iter(trace.default_process_primitive(primitive, part, params))
    return [next(results[is_known]) for is_known in known]


def _checkpoint(
    policy: Rule, unknown: Sequence[bool], at_hand: Sequence[bool], eqn: JaxprEqn
) -> Any:
    """Known operands now, the others later; all of them later, unless the policy saves results."""
    saved = _compat.saved(policy, eqn)
    now = remat.part(eqn, [not later for later in unknown])
    again = [not saved or later for later in unknown]
    later = remat.part(eqn, again)
    kept = remat.residuals(later, list(itertools.compress(at_hand, again))) if later else []
    return now, later, unknown, again, kept
