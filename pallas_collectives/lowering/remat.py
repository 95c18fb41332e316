"""Rules by which jax.checkpoint and dead code elimination treat our primitives as lax's.

A simulated kernel runs as ordered host callbacks, whose effect JAX would keep and save whatever the
policy. But a collective may be replayed and dropped, since all devices run the same program. So
these rules go by the policy and by who reads the results. Programs keep the same residuals in
simulation, on TPUs and with lax.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat

Policy = Callable[..., Any]
Flags = Sequence[bool]  # one for each operand, or for each result


def register(primitive: core.Primitive) -> None:
    """Gives both rules to a primitive each of whose results needs all operands."""
    _compat.register(primitive, checkpoint=_checkpoint, dce=_dce)


def residuals(eqn: JaxprEqn, at_hand: Flags) -> list[Any]:
    """The operands that are still to be kept for an equation of the backward pass."""
    pairs = zip(eqn.invars, at_hand, strict=True)
    return [x for x, there in pairs if not there and not isinstance(x, core.Literal)]


def _checkpoint(policy: Policy, unknown: Flags, at_hand: Flags, eqn: JaxprEqn) -> Any:
    """(now, later, which results are known later only, which are there later, residuals)."""
    n = len(eqn.outvars)
    if any(unknown):
        return None, eqn, [True] * n, [True] * n, residuals(eqn, at_hand)
    if _compat.saved(policy, eqn):
        return eqn, None, [False] * n, [False] * n, []
    return eqn, eqn, [False] * n, [True] * n, residuals(eqn, at_hand)


def _dce(used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Drops an equation whose results nobody reads. JAX 0.12 gives one more argument before it."""
    eqn = rest[-1]
    return [any(used)] * len(eqn.invars), eqn if any(used) else None


def dce_each(used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    """The same where each result needs an operand of its own: drops those that nobody reads."""
    return used, part(rest[-1], used)


def part(eqn: JaxprEqn, wanted: Sequence[bool]) -> JaxprEqn | None:
    """The equation of the wanted operands alone; None if no operand is wanted."""
    invars = list(itertools.compress(eqn.invars, wanted))
    outvars = list(itertools.compress(eqn.outvars, wanted))
    return eqn.replace(invars=invars, outvars=outvars) if invars else None
