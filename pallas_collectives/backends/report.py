"""What became of the collectives of programs that were built under `override_lax`, in words."""

import dataclasses

from pallas_collectives.topology import chips
from pallas_collectives.tuning import choice


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
      nbytes: bytes of a device's operands, in all; 0 where that is not known.
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
            nbytes = f" of {self.nbytes} bytes{_in_all(self.times)}" if self.nbytes else ""
            without = f"{self.times} x {self.op}{nbytes} without its wire {self.wire}"
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
        lines += [f"  wire= for {name} was unused: no call has this name" for name in self.unused]
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
            f"programs built: {self.programs}, calls in them that it replaces: none. Calls over "
            "one device, or of nothing, need no kernel; programs that were compiled before are not "
            "built again; under jax.jit with shardings XLA makes the collectives, and "
            "jax.experimental.custom_partitioning knows no mesh: call them in jax.shard_map"
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
