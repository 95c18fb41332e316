"""`lax.optimization_barrier`, value by value: in types, derivatives, and what nobody reads.

XLA computes nothing behind a barrier before all that it takes is there, which is how a program says
what is to run beside what. JAX's own has drawbacks there: up to JAX 0.10 all its results vary over
every mesh axis that any operand varies over, so under `check_vma` what a loop carries on would
change its type; and while one result is read, it keeps all operands, also in what `jax.checkpoint`
computes again.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad

from pallas_collectives import _compat
from pallas_collectives.lowering import remat

_barrier_p = core.Primitive("optimization_barrier")
_barrier_p.multiple_results = True
_barrier_p.def_abstract_eval(lambda *avals: avals)
_barrier_p.def_impl(lambda *values: jax.lax.optimization_barrier(values))


def barrier(values: Sequence[Any]) -> list[Any]:
    """The same values, each there once all of them are."""
    _compat.prepare()
    results: list[Any] = _barrier_p.bind(*values)
    return results


def _of_nonzero(values: Sequence[Any]) -> list[Any]:
    there = [value for value in values if not isinstance(value, ad.Zero)]
    behind = iter(barrier(there) if there else ())
    return [value if isinstance(value, ad.Zero) else next(behind) for value in values]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return barrier(primals), _of_nonzero(tangents)


def _transpose(cotangents: Sequence[Any], *_: Any) -> list[Any]:
    return _of_nonzero(cotangents)


_compat.register(
    _barrier_p,
    lowering=lambda ctx, *args: _compat.lowering(jax.lax.optimization_barrier_p)(ctx, *args),
    jvp=_jvp,
    transpose=_transpose,
    batch_alone=lambda values, places: (barrier(values), places),
    dce=remat.dce_each,
)
