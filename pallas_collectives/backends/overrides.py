"""What `override_lax` did: told once as a context ends, and kept as data."""

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
from pallas_collectives.backends.algorithms import KernelPlan
from pallas_collectives.backends.plans import Plan, ProductPlan, WirePlan
from pallas_collectives.topology import chips
from pallas_collectives.tuning import choice, overlaps


@dataclasses.dataclass(frozen=True)
class Line:
    """Calls of one collective that were served alike.

    Attributes:
      op: the first of lax's functions that binds what was called: "psum" also of a pmean. Of calls
        in one kernel with products "all_gather_matmul" or "matmul_reduce_scatter".
      by: "pallas" or "nccl", with the algorithm behind it; "lax". Of a call in several steps, as by
        an exchange over a wire, those of all.
      why: in a sentence.
      times: how many calls were built; equal ones in one program are built once, and one in a loop
        is one.
      nbytes: bytes of a device's operands, in all; 0 where that is not known.
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
      op: as of `Line`, which says what moves the numbers.
      wire: the one asked for, in words.
      why: why it is left out; "" where it is used.
      times: how often it was built.
      nbytes: bytes of a device's operands, in all.
      sent: bytes as they travel; 0 where the wire is left out.
    """

    op: str
    wire: str
    why: str
    times: int
    nbytes: int
    sent: int

    def __str__(self) -> str:
        if self.why:
            without = f"{self.times} x {self.op} without its wire {self.wire}"
            return f"{without}{_each(self.times)}: {self.why}"
        share = f"{self.sent} bytes in place of {self.nbytes}{_in_all(self.times)}"
        return f"{self.times} x {self.op} over wire {self.wire}: {share}"


@dataclasses.dataclass(frozen=True)
class OverrideReport:
    """What became of the collectives of programs that were built in one context.

    Attributes:
      replaced: those that ours serve.
      left: those that lax serves.
      programs: how many programs were built.
      kept: the functions that were called, also by derivatives, and that `only=` or `keep=` left to
        lax; these calls are not counted.
      wires: what became of the wires that `wire=` names.
      unused: functions named in `wire=` that no program called.
      unreached: lax's functions that were called all the same, by names bound before or by JAX
        itself.
      chip: the chip with whose times kernels were chosen; "" where none was.
      ended: whether it is of a context; False before the first one has ended.

    Example:
      >>> with pc.override_lax():
      ...     pass
      >>> report = pc.override_report()
      >>> report.replaced, report.left, report.programs
      ((), (), 0)
      >>> print(report)
      override_lax: no program was built: each was compiled before, or is called outside the `with`
    """

    replaced: tuple[Line, ...] = ()
    left: tuple[Line, ...] = ()
    programs: int = 0
    kept: tuple[str, ...] = ()
    wires: tuple[OnWire, ...] = ()
    unused: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    chip: str = ""
    ended: bool = True

    def __str__(self) -> str:
        lines = [f"override_lax: {self._summary()}"]
        simulated = self.chip == chips.SIMULATED.name
        for line in (found := (*self.replaced, *self.left)):
            nbytes = f" of {line.nbytes} bytes{_in_all(line.times)}" if line.nbytes else ""
            stops = "" if simulated else _stops(line)
            served = f"  {line.times} x {line.op}{nbytes} by {line.by}{stops}"
            lines.append(f"{served}{_each(line.times)}: {line.why}")
        lines += [f"  {line}" for line in self.wires]
        lines += [f"  wire= for {name} was unused: no {name} was built" for name in self.unused]
        if self.kept:
            names = ", ".join(self.kept)
            lines.append(f"  left to lax by only= or keep=, and not counted: {names}")
        if self.unreached:
            how = "by a name bound before (`from jax.lax import psum`), or by JAX in a derivative"
            names = f"{', '.join(self.unreached)}, {how}"
            remedy = "use pallas_collectives.overridden, of the gradient"
            lines.append(f"  called, but out of reach: {names}: {remedy}")
        if found:
            stands = f"{choice.STAND_IN}, which stands for simulated devices"
            whose = f"; modelled times are of {stands if simulated else self.chip}"
            times = f", with the time of one turn{whose}" if self.chip else ""
            lines.append(f"  a call in a loop counts once{times}")
        return "\n".join(lines)

    def _summary(self) -> str:
        """How many calls became what; or why nothing is told."""
        if not self.ended:
            return "no context has ended yet: ask after the `with`"
        if self.replaced or self.left or self.kept or self.unreached:
            return f"{_count(self.replaced)} replaced, {_count(self.left)} left to lax"
        if not self.programs:
            return "no program was built: each was compiled before, or is called outside the `with`"
        return (
            f"programs built: {self.programs}, calls in them that it replaces: none. Programs that "
            "were compiled before are not built again; under jax.jit with shardings XLA makes the "
            "collectives: call them in jax.shard_map"
        )


def _each(times: int) -> str:
    return "; each" if times > 1 else ""


def _in_all(times: int) -> str:
    return " in all" if times > 1 else ""


def _stops(line: Line) -> str:
    """For how long it stops the core, in words; "" without a figure."""
    if line.before_us is None or line.after_us is None:
        return ""
    before, after = f"{line.before_us:.0f}", f"{line.after_us:.0f}"
    us = f"us{_in_all(line.times)}"
    if before != after:
        return f", stops the core {before} -> {after} {us} (modelled)"
    if not line.after_us:
        return ", does not stop the core (modelled)"
    return f", stops the core for {after} {us}, as long as lax's (modelled)"


def _count(lines: tuple[Line, ...]) -> int:
    return sum(line.times for line in lines)


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
    """Within this context what is built is noted; at its end it is told, each news once.

    Calls that it did not reach are warned of where it found no others. Programs without calls are
    until a context has replaced some, as one compiled before may hold these. The functions of
    `wired` have a wire.
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
        OnWire(*key, len(same), sum(p.nbytes for p in same), sum(p.sent for p in same))
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
    why = f"it moves what wire {packed} packs" if packed else steps[0].why
    return ours, name, " and ".join(dict.fromkeys(by)), why or "it was asked for by name"


def _by(plan: Plan, op: str) -> str:
    if plan.backend == "xla":
        return "lax"
    return " ".join(filter(None, (plan.backend, op, plan.algorithm)))


def _nbytes(steps: list[Plan]) -> int:
    return steps[0].nbytes if isinstance(steps[0], KernelPlan) else 0


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
