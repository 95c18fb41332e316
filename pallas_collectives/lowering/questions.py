"""What is asked of one equation: whether it computes, exchanges or sums, and what that takes.

What a turn's steps say of themselves (`turns.Step`) they ask here.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat, catalogue, validation
from pallas_collectives._compat import Aval
from pallas_collectives.backends import wire_choice
from pallas_collectives.backends.plans import MAY_BE_AHEAD, How
from pallas_collectives.topology import chips

# What runs another program in its place, by the parameter that holds it.
_CALLS = {
    **dict.fromkeys(("jit", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}

PRODUCT = "dot_general"
CONVERT = "convert_element_type"
LOOP = "scan"

# Products in one kernel with their collective.
FUSED = "pallas_all_gather_matmul", "pallas_matmul_reduce_scatter"

# What may take long, though it is no such product: kernels, and products of other kinds.
OPAQUE = frozenset(
    {
        *("pallas_call", "core_map", "ffi_call", "pure_callback", "io_callback"),
        *FUSED,
        *("ragged_dot_general", "conv_general_dilated", "fft", "sort"),
    }
)

# All that may take long.
COMPUTES = OPAQUE | {PRODUCT}

# What writes a slice; XLA makes the first of the second, too, where it can.
UPDATES = frozenset({"dynamic_update_slice", "scatter"})

# Sums for all devices.
PSUMS = "pallas_psum", "pallas_psum_invariant"

# Collectives of tokens between products.
_EXCHANGES = "all_gather", "reduce_scatter", "all_reduce"


def program_of(eqn: JaxprEqn) -> core.ClosedJaxpr | None:
    """The program that an equation runs in its place, closed; None for all others."""
    inner = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
    if isinstance(inner, core.ClosedJaxpr) or inner is None:  # from JAX 0.12 on all are
        return inner
    return core.ClosedJaxpr(inner, ())


def holds(eqn: JaxprEqn, wanted: Callable[[str], bool]) -> bool:
    """Whether an equation's primitive, or that of one within it, is wanted, by name."""
    inner = (e for jaxpr in _compat.jaxprs_of(eqn) for e in jaxpr.eqns)
    return wanted(eqn.primitive.name) or any(holds(e, wanted) for e in inner)


def exchanges(eqn: JaxprEqn) -> bool:
    """Whether an equation or one within it is a collective, lax's or ours."""
    known = catalogue.primitives()
    return holds(eqn, lambda name: name.removeprefix("pallas_") in known)


def seconds(eqn: JaxprEqn, chip: chips.Chip) -> float:
    """What an equation's products take at the least, in those of loops as often as these turn."""
    if eqn.primitive.name == PRODUCT:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        types = [_compat.type_of(v) for v in (*eqn.invars, *eqn.outvars)]
        flops = 2.0 * types[-1].size * math.prod(types[0].shape[d] for d in contracted)
        nbytes = sum(map(_nbytes, types))
        return max(flops / chip.matrix_rate, nbytes / chip.hbm_bandwidth)
    if eqn.primitive.name in FUSED:
        xs, outs = ([_compat.type_of(v) for v in vs] for vs in (eqn.invars, eqn.outvars))
        if eqn.primitive.name == FUSED[0]:  # x, weights; gathered x, products
            flops = sum(2.0 * out.size * xs[0].shape[-1] for out in outs[1:])
        else:  # xs, weights; the sum's block
            flops = sum(2.0 * x.size * outs[0].shape[-1] for x in xs[: len(xs) // 2])
        return flops / chip.matrix_rate
    if eqn.primitive.name in OPAQUE:
        return 0.0
    each = sum(seconds(e, chip) for jaxpr in _compat.jaxprs_of(eqn) for e in jaxpr.eqns)
    return each * eqn.params["length"] if eqn.primitive.name == LOOP else each


def _nbytes(aval: Aval) -> int:
    return int(aval.size * aval.dtype.itemsize)


def asked_ahead(eqn: JaxprEqn) -> How | None:
    """See `turns.Step.how`."""
    return _wishes(eqn, "all_gather")


def _wishes(eqn: JaxprEqn, collective: str) -> How | None:
    """What a collective that may be moved to another turn asks for; None for all others."""
    if eqn.primitive.name not in twins_of(collective):
        return None
    how: How = eqn.params["how"]
    return how if how.ahead == MAY_BE_AHEAD and not how.awaited else None


def sums(eqn: JaxprEqn) -> bool:
    """See `turns.Step.sums`."""
    scatters = _wishes(eqn, "reduce_scatter") is not None
    return scatters or (totals(eqn) and not eqn.params["how"].awaited and len(eqn.invars) == 1)


def totals(eqn: JaxprEqn) -> bool:
    """See `turns.Step.totals`."""
    if eqn.primitive.name not in PSUMS:
        return False
    how: How = eqn.params["how"]
    return how.ahead == MAY_BE_AHEAD and _by_name(eqn) and how.wire is None


def adds(eqn: JaxprEqn) -> bool:
    """See `turns.Step.adds`."""
    adding = twins_of("reduce_scatter") | {*PSUMS}
    if eqn.primitive.name not in adding or not eqn.params.get("tiled", True):
        return False
    how: How = eqn.params["how"]
    return how.beside and how.backend == "pallas" and how.wire is None


def awaited(eqn: JaxprEqn) -> bool:
    """See `turns.Step.awaited`."""
    if len(eqn.invars) != 1 or not any(eqn.primitive.name in twins_of(op) for op in _EXCHANGES):
        return False
    how: How = eqn.params["how"]
    able = how.ahead == MAY_BE_AHEAD and _by_name(eqn) and wire_choice.gives_way(how)
    return able and how.awaited is True


def fuses(eqn: JaxprEqn) -> bool:
    """See `turns.Step.fuses`."""
    if not any(eqn.primitive.name in twins_of(op) for op in _EXCHANGES):
        return False
    how: How = eqn.params["how"]
    able = how.fuses and _by_name(eqn) and wire_choice.gives_way(how)
    return able and how.awaited is True


def _by_name(eqn: JaxprEqn) -> bool:
    """Whether all axes are the mesh's; numbers are dimensions that vmap made."""
    axes = tuple(eqn.params.get("axes", ()))
    return validation.named(axes) == axes


@functools.cache
def twins_of(collective: str) -> frozenset[str]:
    """The names of our primitives for a collective; of those that reduce, sums alone."""
    known = catalogue.primitives().items()
    return frozenset(
        f"pallas_{name}"
        for name, (record, primitive) in known
        if record.name == collective and primitive.reduction in ("", "sum")
    )


def collective_of(eqn: JaxprEqn) -> str:
    """The collective that one of `_EXCHANGES` is."""
    return next(op for op in _EXCHANGES if eqn.primitive.name in twins_of(op))


def holds_any(closed: core.ClosedJaxpr) -> bool:
    """Whether a turn has collectives that another turn may begin, or that this one may reorder.

    Or that may run with a product.
    """
    return any(
        asked_ahead(eqn)
        or sums(eqn)
        or totals(eqn)
        or awaited(eqn)
        or fuses(eqn)
        or (x is not None and holds_any(x))
        for eqn, x in ((eqn, program_of(eqn)) for eqn in closed.jaxpr.eqns)
    )


def asked_for(closed: core.ClosedJaxpr) -> list[bool]:
    """Which operands of a program those gathers bring that may be asked for ahead."""
    wanted: set[Any] = set()
    for eqn in reversed(closed.jaxpr.eqns):
        operands = [v for v in eqn.invars if isinstance(v, core.Var)]
        inner = program_of(eqn)
        if inner is not None:
            pairs = zip(eqn.invars, asked_for(inner), strict=True)
            wanted |= {v for v, asked in pairs if asked and isinstance(v, core.Var)}
        elif asked_ahead(eqn) or (eqn.primitive.name in _compat.PARTS and wanted & {*eqn.outvars}):
            wanted |= {*operands}
    return [v in wanted for v in closed.jaxpr.invars]
