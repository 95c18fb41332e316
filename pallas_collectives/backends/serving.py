"""Serves a collective of lax's from a backend; lowerings and `explain` call this."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from pallas_collectives import _compat, catalogue, validation
from pallas_collectives.annotations import AnyMesh
from pallas_collectives.backends import canonical, choice, measured, slices, wire_choice
from pallas_collectives.backends.counters import (
    calling,
    lax_name,
    note,
    recorded,
    tried,
    uncounted,
)
from pallas_collectives.backends.plans import UNSERVABLE, How, Plan, WirePlan
from pallas_collectives.errors import DtypeError, UnservedError
from pallas_collectives.kernels.machinery import entry, launch
from pallas_collectives.topology import chips, placement
from pallas_collectives.tuning import overlaps

# lax's primitives that XLA compiles for GPUs and TPUs alone.
_NOT_ON_CPUS = ("pbroadcast", "pbroadcast_dynamic", "ragged_all_to_all")

# Under `check_vma=True` an array may be typed as a term of a sum over devices ("unreduced"). JAX
# lets nothing be added to such an array, but a kernel that sums it must.
_untyped_p = core.Primitive("pallas_untyped")
_untyped_p.def_abstract_eval(_compat.only_varying)
_compat.register(_untyped_p, lowering=lambda ctx, x: [x])


def lower(lax_p: core.Primitive, how: How, *args: jax.Array, **params: Any) -> jax.Array:
    """Runs a lax collective as `how` says, or lax's own if the backend cannot serve it.

    Raises:
      DtypeError, ReachError, SliceError: as `run`, where the backend or its algorithm was named.
    """
    return served(lax_p.name, how, functools.partial(_by_lax, lax_p), *args, **params)


def _by_lax(lax_p: core.Primitive, *args: jax.Array, **params: Any) -> Any:
    if lax_p.name in _NOT_ON_CPUS and placement.only_on_cpus():
        raise UnservedError(
            f"jax.lax.{lax_p.name.removesuffix('_dynamic')} on CPU devices",
            "XLA has none for CPUs, where only simulated kernels run it",
            "name backend='pallas'",
        )
    return lax_p.bind(*args, **params)


def served(
    op: str, how: How, by_lax: Callable[..., Any], *args: jax.Array, **params: Any
) -> jax.Array:
    """Runs the lax collective named `op` on the backend, or `by_lax` if that cannot serve it.

    All that it computes bears the collective's name in the compiled program, and so in profiles.
    """
    function = catalogue.primitives()[op][0].function_of(op)
    nbytes = args[0].size * args[0].dtype.itemsize
    with calling(function, nbytes), jax.named_scope(op):
        return _served(op, how, by_lax, *args, **params)


def _served(
    op: str, how: How, by_lax: Callable[..., Any], *args: jax.Array, **params: Any
) -> jax.Array:
    kept, beside, symbols = "", False, validation.symbols(args)
    if how.wire is not None and how.wire.optional and (how.beside or symbols):
        how = _without_idle_wire(op, how, *args, **params)
    if how.beside and not symbols:
        kept, beside = _kept(op, how, *args, **params)
    if kept:
        how = dataclasses.replace(how, backend="xla", fallback=kept)
    if how.backend != "xla":
        try:
            with tried():
                return run(op, how, *args, **params)
        except UNSERVABLE as error:
            if how.strict:
                raise
            how = dataclasses.replace(how, backend="xla", fallback=str(error))
    larger = catalogue.primitives()[op][0].larger_bytes
    turn = how.told_turn(larger(args[0].nbytes, params.get("axis_size", 1))) if beside else ""
    plan = Plan(op=op, backend="xla", why=how.fallback, turn=turn, beside=beside)
    if how.wire is not None or (how.order is not None and _adds(op)):
        result = run(op, how, *args, **params)  # raises what lax cannot mend, and then serves not
        note(plan)
        return result
    note(plan)
    with choice.meaning_lax():
        return by_lax(*args, **params)


def _without_idle_wire(op: str, how: How, *args: jax.Array, **params: Any) -> How:
    """The same, without a wire that may be left out and is: lax may keep the call then."""
    assert how.wire is not None
    plain, why = dataclasses.replace(how, wire=None), ""
    if symbols := validation.symbols(args):
        why = f"sizes are symbols: {symbols}"
    elif not wire_choice.packs(how, args[0].dtype):
        return how  # a cast, on any engine; or no wire for that dtype, as will be counted
    elif how.backend == "nccl":
        why, _ = _kept(op, plain, *args, **params)
    elif how.backend == "pallas":
        try:
            over = over_wire(op, how, *args, **params)
        except UNSERVABLE:
            return how  # who serves in its place keeps the wire
        if over is None:
            return plain
        why = "" if over.algorithm else over.why
    if why:
        wire_choice.note_left_out(catalogue.primitives()[op][0].name, how.wire, why)
    return plain if why else how


def _kept(op: str, how: How, *args: jax.Array, **params: Any) -> tuple[str, bool]:
    """Why lax keeps a collective whose step matters, and whether XLA runs it beside compute.

    "" where lax does not keep it, nor what is packed for a wire. Without scales it casts.
    """
    if wire_choice.packs(how, args[0].dtype):
        return "", False
    record, chip = catalogue.primitives()[op][0], chips.current()
    name, dtype = record.name, wire_choice.moved_dtype(how, args[0].dtype)
    brought = record.larger_bytes(args[0].size * dtype.itemsize, params.get("axis_size", 1))
    if how.backend == "nccl":
        why = overlaps.by_xla_on_gpus(name, brought, how.awaited)
        return why or overlaps.counted_by_xla_on_gpus(name, brought), bool(why)
    if why := overlaps.by_xla(name, chip):
        return why, True
    if how.awaited and (why := overlaps.of_tokens(name, brought, chip)):
        return why, False
    if name == "all_gather" and how.awaited is not None:
        return overlaps.for_its_reader(brought, dtype, chip), False
    if name == "all_reduce" and how.awaited and _adds(op):
        return overlaps.for_its_maker(brought, chip), False
    return "", False


def _adds(op: str) -> bool:
    collective, primitive = catalogue.primitives()[op]
    return collective.adds and primitive.reduction in ("", "sum")  # a broadcast has no order


def backend_module(name: str) -> Any:
    """The canonical functions of a backend; imported when one is needed first.

    Those of "xla" are for what lax's primitives alone do not do.
    """
    if name == "xla":
        from pallas_collectives.backends import xla

        return xla
    if name == "nccl":
        from pallas_collectives.backends import nccl

        return nccl
    from pallas_collectives.backends import pallas

    return pallas


def over_wire(op: str, how: How, *args: Any, **params: Any) -> WirePlan | None:
    """What becomes of a call's wire on the backend; None where nothing is sent. Runs nothing."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    with uncounted(), recorded() as plans:
        launch.effects(functools.partial(run, op, how, **params), *types)
    return next((plan for plan in plans if isinstance(plan, WirePlan)), None)


def run(op: str, how: How, *args: jax.Array, **params: Any) -> jax.Array:
    """Runs the lax collective named `op` on the backend.

    Raises:
      DtypeError, ReachError, SliceError: the backend cannot take the dtype, or cannot write to the
        devices.
    """
    with choice.meaning_lax():
        return _run(op, how, *args, **params)


def _run(op: str, how: How, *args: jax.Array, **params: Any) -> jax.Array:
    module = backend_module(how.backend)
    collective, _ = catalogue.primitives()[op]
    if not hasattr(module, collective.name):
        raise UnservedError(
            f"{lax_name(collective.name)} by backend {how.backend!r}",
            "that backend has no function for it",
            "leave backend=None: lax then serves" if how.order is None else "leave order=None",
        )
    if args[0].dtype == jax.dtypes.float0:
        rule = "tangents of integers hold no bytes to send"
        raise DtypeError(f"{lax_name(collective.name)} of float0", rule, "leave backend=None")
    if how.backend != "xla" and (found := validation.symbols(args)):
        rule = "a kernel's sizes must be known, and with `jax.export` some may be symbols"
        raise UnservedError(f"{lax_name(collective.name)} of {found}", rule, "leave backend=None")
    operands = [_untyped(x) for x in args]
    within: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if how.backend == "pallas":
        within = entry.in_slices(functools.partial(slices.slices, axes=how.across))
        module = slices.InSlices(module)
    elif how.backend != "xla" and not how.strict:
        module = measured.Measured(module, how.backend)
    with within:
        return canonical.run(module, op, how, *operands, **params)


def _untyped(x: jax.Array) -> jax.Array:
    """x, typed as neither reduced nor unreduced."""
    kind = _compat.manual_type(x)
    return _untyped_p.bind(x) if kind.reduced or kind.unreduced else x


def effects(
    run: Callable[..., Any],
    operands: Sequence[Any],
    *,
    otherwise: Callable[..., Any] | None = None,
    **params: Any,
) -> frozenset[Any]:
    """The effects of run(*operands, **params): TPU interpret mode's or none. Traced once.

    Args:
      run: what is lowered. It reads nothing but its arguments, and what is in scope.
      operands: arrays or their types.
      otherwise: what is lowered in its place if no kernel serves; None to raise what run raises.
      params: theirs.
    """
    shapes = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands)
    scope = jax.sharding.get_abstract_mesh(), placement.in_scope()
    return _traced_effects(run, shapes, tuple(params.items()), otherwise, *scope)


@functools.lru_cache(maxsize=4096)
def _traced_effects(
    run: Callable[..., Any],
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    params: tuple[tuple[str, Any], ...],
    otherwise: Callable[..., Any] | None,
    mesh: AnyMesh,
    places: placement.Places | None,
) -> frozenset[Any]:
    del mesh, places  # part of the key: axis sizes, the chip and the order of rings are in scope
    with uncounted(), recorded(), placement.settled_later():  # by nobody else
        try:
            return launch.effects(functools.partial(run, **dict(params)), *shapes)
        except UNSERVABLE:
            if otherwise is None:
                raise
            return launch.effects(functools.partial(otherwise, **dict(params)), *shapes)
