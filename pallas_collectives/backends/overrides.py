"""What `override_lax` did: told once as a context ends, and kept as data."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator

import jax
from absl import logging

from pallas_collectives.backends import counters
from pallas_collectives.backends.algorithms import KernelPlan
from pallas_collectives.backends.plans import Plan, WirePlan
from pallas_collectives.tuning import overlaps


@dataclasses.dataclass(frozen=True)
class Line:
    """Calls of one collective that were served alike.

    Attributes:
      op: the canonical collective; lax's name of it where lax served.
      by: "pallas" or "nccl", with the algorithm behind it; "lax".
      why: in a sentence.
      times: how often it was built; equal calls in one program are built once.
      nbytes: of a device's operands, in all; 0 where that is not known.
      before_us: modelled microseconds for which lax's would stop the core, in all: as long as ours
        takes alone, or 0 where XLA runs it beside compute. None where there is no figure.
      after_us: the same of what serves: 0 on a SparseCore, as far as there is compute beside it.
    """

    op: str
    by: str
    why: str
    times: int
    nbytes: int
    before_us: float | None
    after_us: float | None


@dataclasses.dataclass(frozen=True)
class OnWire:
    """Calls of one collective for which `wire=` asked for narrower numbers, and that fared alike.

    Attributes:
      op: the canonical collective; what moves the numbers has a `Line` of its own.
      wire: the one asked for, in words.
      why: why it is left out; "" where it is used.
      times: how often it was built.
      nbytes: of a device's operands, in all.
      sent: of these, as they travel; 0 where the wire is left out.
    """

    op: str
    wire: str
    why: str
    times: int
    nbytes: int
    sent: int

    def __str__(self) -> str:
        if self.why:
            return f"{self.times} x {self.op} without its wire {self.wire}: {self.why}"
        share = f"{self.sent} bytes in place of {self.nbytes}"
        return f"{self.times} x {self.op} over wire {self.wire}: {share}"


@dataclasses.dataclass(frozen=True)
class OverrideReport:
    """What became of the collectives of programs that were built in one context.

    Attributes:
      replaced: those that ours serve.
      left: those that lax serves.
      programs: how many programs were built.
      kept: the functions that `only=` and `keep=` left to lax; their calls are not noted.
      wires: what became of the wires that `wire=` names.

    Example:
      >>> with pc.override_lax():
      ...     pass
      >>> report = pc.override_report()
      >>> report.replaced, report.left, report.programs
      ((), (), 0)
      >>> print(report)
      override_lax: programs built: 0, collectives in them: 0
    """

    replaced: tuple[Line, ...] = ()
    left: tuple[Line, ...] = ()
    programs: int = 0
    kept: tuple[str, ...] = ()
    wires: tuple[OnWire, ...] = ()

    def __str__(self) -> str:
        kept = f"; only= and keep= leave to lax: {', '.join(self.kept)}" if self.kept else ""
        if not self.replaced and not self.left:
            return f"override_lax: programs built: {self.programs}, collectives in them: 0{kept}"
        lines = [
            f"override_lax: {_count(self.replaced)} replaced, {_count(self.left)} left to lax{kept}"
        ]
        for line in (*self.replaced, *self.left):
            stops = f", stops the core {_us(line.before_us)} -> {_us(line.after_us)} us (modelled)"
            stops = "" if line.before_us is None else stops
            lines.append(f"  {line.times} x {line.op} by {line.by}{stops}: {line.why}")
        lines += [f"  {line}" for line in self.wires]
        return "\n".join(lines)


def _us(us: float | None) -> str:
    return "?" if us is None else f"{us:.0f}"


def _count(lines: tuple[Line, ...]) -> int:
    return sum(line.times for line in lines)


_last = OverrideReport()
_ever_replaced = False
_told: set[str] = set()

_programs = threading.local()  # how many this thread has lowered


def _lowered(event: str, *_: object, **__: object) -> None:
    if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
        _programs.number = getattr(_programs, "number", 0) + 1


jax.monitoring.register_event_duration_secs_listener(_lowered)


def override_report() -> OverrideReport:
    """What the last `override_lax` that ended did, to programs that were built within it.

    What `overridden` does is counted, by `counts` and `fallback_counts`, and not told here.

    Calls of functions that were compiled before are not in it: nothing is built for them.

    Example:
      >>> with pc.override_lax():
      ...     pass
      >>> type(pc.override_report()).__name__
      'OverrideReport'
    """
    return _last


@contextlib.contextmanager
def told(kept: Iterable[str]) -> Iterator[None]:
    """Within this context what is built is noted; at its end it is told, each news once.

    A context in which programs were built without any collective of ours is warned of, unless one
    before has replaced some: then a program that is there already may hold them. Nor is it where
    functions were left to lax by name, `kept`.
    """
    global _last, _ever_replaced
    before = getattr(_programs, "number", 0)
    with counters.recorded(built=True) as plans:
        yield
    report = _report(plans, getattr(_programs, "number", 0) - before)
    report = _last = dataclasses.replace(report, kept=tuple(sorted(kept)))
    _ever_replaced = _ever_replaced or bool(report.replaced)
    text = str(report)
    if text in _told:
        return
    if report.replaced or report.left:
        _told.add(text)
        logging.info("pallas_collectives: %s", text)
    elif report.programs and not report.kept and not _ever_replaced and jax.device_count() > 1:
        _told.add(text)
        logging.warning(
            "pallas_collectives: override_lax has replaced nothing: %d programs were built in its "
            "context, and none has a collective that was called by its name in jax.lax. Under "
            "jax.jit with shardings XLA makes the collectives: call them in jax.shard_map. Names "
            "that were bound before, as by `from jax.lax import psum`, are lax's still: use "
            "pallas_collectives.overridden",
            report.programs,
        )


def _report(plans: list[Plan], programs: int) -> OverrideReport:
    alike: dict[tuple[bool, str, str, str], list[Plan]] = {}
    on_wires: dict[tuple[str, str, str], list[WirePlan]] = {}
    for plan in plans:
        if isinstance(plan, WirePlan):
            on_wires.setdefault((plan.op, str(plan.wire), plan.why), []).append(plan)
            continue
        ours = plan.backend != "xla"
        by = " ".join(filter(None, (plan.backend, plan.algorithm))) if ours else "lax"
        key = ours, plan.op, by, plan.why or "it was asked for by name"
        alike.setdefault(key, []).append(plan)

    def lines(of_ours: bool) -> tuple[Line, ...]:
        return tuple(
            Line(op, by, why, len(same), sum(map(_nbytes, same)), *_exposed(same))
            for (ours, op, by, why), same in alike.items()
            if ours == of_ours
        )

    told = tuple(
        OnWire(*key, len(same), sum(p.nbytes for p in same), sum(p.sent for p in same))
        for key, same in on_wires.items()
    )
    return OverrideReport(lines(True), lines(False), programs, wires=told)


def _nbytes(plan: Plan) -> int:
    return plan.nbytes if isinstance(plan, KernelPlan) else 0


def _exposed(plans: Iterable[Plan]) -> tuple[float | None, float | None]:
    """For how long the core would have been stopped, and is; of each None without a figure."""
    before = after = 0.0
    for plan in plans:
        if plan.beside:
            continue
        us = plan.candidates[0].us if plan.candidates else None
        if us is None:
            return None, None
        kernel = plan if isinstance(plan, KernelPlan) else None
        before += 0.0 if kernel and overlaps.engine(kernel.op, kernel.chip) else us
        after += 0.0 if kernel and kernel.on_sparsecore else us
    return before, after
