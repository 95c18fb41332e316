"""What `override_lax` does, noted while programs are built, and told once as a context ends."""

import contextlib
import contextvars
import dataclasses
import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
from absl import logging

from pallas_collectives import catalogue
from pallas_collectives.backends import counters
from pallas_collectives.backends.plans import KernelPlan, Plan, ProductPlan, WirePlan
from pallas_collectives.backends.report import Line, OnWire, OverrideReport
from pallas_collectives.tuning import overlaps

_last = OverrideReport(ended=False)
_ever_replaced = False
_told: set[str] = set()


class _Called(NamedTuple):
    """Names of lax's functions whose calls stay lax's: kept ones, and those out of reach."""

    kept: set[str]
    unreached: set[str]


_called: contextvars.ContextVar[_Called | None] = contextvars.ContextVar("called", default=None)

_programs = threading.local()  # how many this thread has lowered


def _lowered(event: str, *_: object, **__: object) -> None:
    if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
        _programs.number = getattr(_programs, "number", 0) + 1


jax.monitoring.register_event_duration_secs_listener(_lowered)


def override_report() -> OverrideReport:
    """What the last `override_lax` that ended did, to programs that were built within it.

    `overridden` is not reported here; see `counts` and `fallback_counts`.

    Calls of functions that were compiled before are not in it: nothing is built for them.

    Example:
      >>> with pc.override_lax():
      ...     pass
      >>> type(pc.override_report()).__name__
      'OverrideReport'
    """
    return _last


def note_kept(name: str) -> None:
    """Notes a call, by name, of a function that lax keeps."""
    if (called := _called.get()) is not None:
        called.kept.add(name)


def note_unreached(name: str) -> None:
    """Notes that lax's primitive of a function is bound, where ours should be."""
    if (called := _called.get()) is not None:
        called.unreached.add(name)


@contextlib.contextmanager
def told(wired: Iterable[str]) -> Iterator[None]:
    """Within this context what is built is noted, and at its end reported, on exceptions too.

    Each news is told once. Calls that it did not reach are warned of where it found no others.
    Programs without calls are until a context has replaced some, as one compiled before may hold
    these. The functions of `wired` have a wire.
    """
    global _last, _ever_replaced
    before, outer, called = getattr(_programs, "number", 0), _called.get(), _Called(set(), set())
    token = _called.set(called)
    try:
        with counters.recorded(built=True) as plans:
            yield
    finally:
        _called.reset(token)
        if outer is not None:
            outer.unreached.update(called.unreached)
        report = _report(plans, getattr(_programs, "number", 0) - before)
        unused = tuple(sorted(name for name in wired if _bound(name) not in _with_wires(plans)))
        kept = tuple(sorted(called.kept))  # lax's primitives are bound for these, too
        unreached = tuple(sorted(called.unreached - {*map(_bound, kept)}))
        report = _last = dataclasses.replace(report, kept=kept, unused=unused, unreached=unreached)
    _ever_replaced = _ever_replaced or bool(report.replaced)
    found, text = report.replaced or report.left, str(report)
    if text in _told and (found or not unreached):
        return
    _told.add(text)
    nothing = report.programs and not found and not kept and not _ever_replaced
    if (nothing or (unreached and not found)) and jax.device_count() > 1:
        logging.warning("pallas_collectives: %s", text)
    elif found:
        logging.info("pallas_collectives: %s", text)


def _bound(name: str) -> str:
    """The function that a call of lax's `name` is told by: "psum" of "pmean"."""
    name = name.removesuffix("_start")
    record = catalogue.functions()[name]
    return record.function_of(record.functions[name][0])


def _with_wires(plans: Iterable[Plan]) -> set[str]:
    """The functions whose calls asked for a wire."""
    return {plan.call.function for plan in plans if plan.call and isinstance(plan, WirePlan)}


def _report(plans: list[Plan], programs: int) -> OverrideReport:
    calls: dict[int, list[Plan]] = {}
    for plan in plans:
        calls.setdefault(id(plan.call or plan), []).append(plan)
    alike: dict[tuple[bool, str, str, str], list[list[Plan]]] = {}
    on_wires: dict[tuple[str, str, str], list[WirePlan]] = {}
    for call in calls.values():
        over = [plan for plan in call if isinstance(plan, WirePlan)]
        for plan in over:
            on_wires.setdefault((_named(plan), str(plan.wire), plan.why), []).append(plan)
        if steps := [plan for plan in call if not isinstance(plan, WirePlan)]:
            packed = next((str(plan.wire) for plan in over if plan.algorithm), "")
            steps = counters.whole_first(steps)
            alike.setdefault(_served(steps, packed), []).append(steps)

    def lines(of_ours: bool) -> tuple[Line, ...]:
        return tuple(
            Line(op, by, why, len(same), sum(map(_nbytes, same)), *_exposed(itertools.chain(*same)))
            for (ours, op, by, why), same in alike.items()
            if ours == of_ours
        )

    told = tuple(
        OnWire(*key, len(same), sum(map(_given, same)), sum(p.sent for p in same))
        for key, same in on_wires.items()
    )
    on = " and ".join(sorted({plan.chip for plan in plans if isinstance(plan, KernelPlan)}))
    return OverrideReport(lines(True), lines(False), programs, wires=told, chip=on)


def _named(plan: Plan) -> str:
    return plan.call.function if plan.call else plan.op


def _served(steps: list[Plan], packed: str) -> tuple[bool, str, str, str]:
    """Whether ours serve a call, its name, what serves it, and why."""
    ours, name = any(plan.backend != "xla" for plan in steps), _named(steps[0])
    by = (_by(plan, plan.op if len(steps) > 1 else "") for plan in steps)
    why = "" if packed and ours else steps[0].why
    moves = f"it moves what wire {packed} packs" if packed else ""
    said = "; ".join(filter(None, (why, moves, steps[0].turn)))
    return ours, name, " and ".join(dict.fromkeys(by)), said or "it was asked for by name"


def _by(plan: Plan, op: str) -> str:
    if plan.backend == "xla":
        return "lax"
    return " ".join(filter(None, (plan.backend, op, plan.algorithm)))


def _nbytes(steps: list[Plan]) -> int:
    """A call's own bytes, and not as they are laid out for the kernel that serves it."""
    call = steps[0].call
    return call.nbytes if call and isinstance(steps[0], KernelPlan) else 0


def _given(plan: WirePlan) -> int:
    """Bytes of what a wire was asked for: the call's own where it is left out."""
    return plan.nbytes or (plan.call.nbytes if plan.call else 0)


def _exposed(plans: Iterable[Plan]) -> tuple[float | None, float | None]:
    """For how long the core would have been stopped, and is; of each None without a figure."""
    before = after = 0.0
    for plan in plans:
        if plan.beside:
            continue
        if isinstance(plan, ProductPlan):  # its time is mostly that of the product
            return None, None
        us = plan.candidates[0].us if plan.candidates else None
        if us is None:
            return None, None
        kernel = plan if isinstance(plan, KernelPlan) else None
        before += 0.0 if kernel and overlaps.engine(kernel.op, kernel.chip) else us
        after += 0.0 if kernel and kernel.on_sparsecore else us
    return before, after
