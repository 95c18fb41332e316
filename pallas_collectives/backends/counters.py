"""Counts of what has served: backends and algorithms, lax in their place, fused products."""

import collections
import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

from absl import logging

from pallas_collectives import catalogue
from pallas_collectives.backends.plans import FUSED, Call, Plan, ProductPlan, WirePlan

_Noted = TypeVar("_Noted", bound=Plan)

_counts: collections.Counter[tuple[str, str, str | None]] = collections.Counter()


_fallbacks: collections.Counter[str] = collections.Counter()


_fusions: collections.Counter[tuple[str, str, str]] = collections.Counter()


_wires: collections.Counter[tuple[str, str, str]] = collections.Counter()


_counts_lock = threading.Lock()


_counting = contextvars.ContextVar("counting", default=True)


_made: contextvars.ContextVar[list[Plan] | None] = contextvars.ContextVar("made", default=None)
_tried: contextvars.ContextVar[list[Plan] | None] = contextvars.ContextVar("tried", default=None)


_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar("call", default=None)


_built: contextvars.ContextVar[list[Plan] | None] = contextvars.ContextVar("built", default=None)


def counts() -> dict[tuple[str, str, str | None], int]:
    """How often each (collective, backend, algorithm) was built into a program.

    Since `reset_counts`. A program built once and run often counts once, as do small arrays of a
    tree that are reduced together. Collectives have the catalogue's names: "all_reduce" is psum,
    pmean, pmax and pmin, and "reduce_scatter" psum_scatter; where lax serves, its primitives'.

    Example:
      >>> pc.reset_counts()
      >>> pc.counts()
      {}
    """
    return dict(_counts)


def fallback_counts() -> dict[str, int]:
    """How often a call without a named backend went to lax, by reason, since `reset_counts`.

    Example:
      >>> pc.reset_counts()
      >>> pc.fallback_counts()
      {}
    """
    return dict(_fallbacks)


def fusion_counts() -> dict[tuple[str, str, str], int]:
    """How often each (fused product, way, reason) was built into a program, since `reset_counts`.

    The way is "fused" (one kernel), "pipelined" (permutes and products of XLA) or "unfused" (a
    collective and a product). The reason is "" for "fused". Backward passes count as well.

    Example:
      >>> pc.reset_counts()
      >>> pc.fusion_counts()
      {}
    """
    return dict(_fusions)


def wire_counts() -> dict[tuple[str, str, str], int]:
    """How often each (collective, wire, reason) was built into a program, since `reset_counts`.

    The wire is "" where it was left out, and the reason says why; else the reason is "".

    Example:
      >>> pc.reset_counts()
      >>> pc.wire_counts()
      {}
    """
    return dict(_wires)


def reset_counts() -> None:
    """Sets all counters to zero.

    Example:
      >>> pc.reset_counts()
    """
    _counts.clear()
    _fallbacks.clear()
    _fusions.clear()
    _wires.clear()


@contextlib.contextmanager
def calling(function: str, nbytes: int = 0) -> Iterator[None]:
    """Within this context plans are those of one call of lax's function; the outermost counts."""
    token = _call.set(_call.get() or Call(function, nbytes))
    try:
        yield
    finally:
        _call.reset(token)


def lax_name(op: str, call: Call | None = None) -> str:
    """lax's name of a canonical collective, by which a call of it, the present one, names it."""
    record, call = catalogue.COLLECTIVES.get(op), call or _call.get()
    if record is None:
        return op
    if call is not None and call.function in record.functions:
        return call.function
    return next(iter(record.functions))


def note(plan: Plan) -> None:
    """Counts a plan that is being followed, and hands it to `recorded`."""
    plan = dataclasses.replace(plan, call=_call.get())
    if (plans := _made.get()) is not None:
        plans.append(plan)
    if _counting.get():
        _count(plan)


def _count(plan: Plan) -> None:
    if (waiting := _tried.get()) is not None:
        waiting.append(plan)
        return
    if (built := _built.get()) is not None:
        built.append(plan)
    if isinstance(plan, ProductPlan):
        reason = "" if plan.algorithm == FUSED else plan.why
        with _counts_lock:
            _fusions[plan.op, str(plan.algorithm), reason] += 1
        return
    if isinstance(plan, WirePlan):
        with _counts_lock:
            _wires[plan.op, plan.algorithm or "", plan.why] += 1
        return
    fallback = plan.backend == "xla" and plan.why
    with _counts_lock:
        _counts[plan.op, plan.backend, plan.algorithm] += 1
        _fallbacks.update([fallback] if fallback else [])
        first = fallback and _fallbacks[fallback] == 1
    if first:
        logging.warning("pallas_collectives: lax serves this collective, because %s", fallback)


def whole_first(plans: Iterable[_Noted]) -> list[_Noted]:
    """A call's plans, the one that serves all of it before those of its steps, which end sooner."""

    def is_step(plan: Plan) -> bool:
        return plan.call is None or plan.op != catalogue.functions()[plan.call.function].name

    return sorted(plans, key=is_step)


@contextlib.contextmanager
def recorded(*, built: bool = False) -> Iterator[list[Plan]]:
    """The plans that are followed within this context, in their order.

    With `built` only those of programs that are being built, and no traces that ask what would be;
    a context around this one records them as well.
    """
    plans: list[Plan] = []
    kept = _built if built else _made
    outer = kept.get() if built else None
    token = kept.set(plans)
    try:
        yield plans
    finally:
        kept.reset(token)
        if outer is not None:
            outer.extend(plans)


@contextlib.contextmanager
def tried() -> Iterator[None]:
    """Plans that are noted within this context count at its end, and not if it raises."""
    plans: list[Plan] = []
    token = _tried.set(plans)
    try:
        yield
    finally:
        _tried.reset(token)
    for plan in plans:
        _count(plan)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Within this context nothing is counted: the trace only asks what a lowering would do."""
    token = _counting.set(False)
    try:
        yield
    finally:
        _counting.reset(token)
