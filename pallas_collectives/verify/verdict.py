"""The verdict on a function, mesh by mesh, and how it reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from pallas_collectives.replay.lines import Line
from pallas_collectives.replay.machine import Machine
from pallas_collectives.replay.report import Report
from pallas_collectives.verify.compiled import Compilation
from pallas_collectives.verify.findings import RULES, Finding

SOUND, FAULTY, UNJUDGED = "sound", "faulty", "cannot be judged"
EXIT = {SOUND: 0, FAULTY: 1, UNJUDGED: 2}
_SHOWN = 8  # findings
HEADS = {SOUND: "SOUND", FAULTY: "NOT SOUND", UNJUDGED: "CANNOT BE JUDGED"}


@dataclasses.dataclass(frozen=True)
class Case:
    """The verdict on one mesh.

    Attributes:
      axes: the axes of the mesh, name to size.
      machine: that it was replayed on.
      findings: what is wrong.
      unjudged: why there is no verdict, with the primitive and the line; "" if there is one.
      line: that one.
      report: the report of the replay; None if nothing was replayed.
      compilations: what the TPU compiler said, by generation.
    """

    axes: dict[str, int]
    machine: Machine
    findings: tuple[Finding, ...] = ()
    unjudged: str = ""
    line: Line | None = None
    report: Report | None = None
    compilations: tuple[Compilation, ...] = ()

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def status(self) -> str:
        """`SOUND`, `FAULTY` or `UNJUDGED`; a program that the compiler refuses is faulty."""
        if self.findings or any(c.ok is False for c in self.compilations):
            return FAULTY
        return UNJUDGED if self.unjudged else SOUND


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a function, by mesh. `taken_as`: how its operands were understood."""

    name: str
    taken_as: str
    operands: str
    cases: tuple[Case, ...]

    @property
    def status(self) -> str:
        """`FAULTY` if any mesh is, else `UNJUDGED` if any is, else `SOUND`."""
        states = {case.status for case in self.cases}
        return next((s for s in (FAULTY, UNJUDGED) if s in states), SOUND)

    @property
    def ok(self) -> bool:
        """Whether all that was asked for was judged, and is sound."""
        return self.status == SOUND

    @property
    def findings(self) -> list[Finding]:
        """Every finding, once, from the smallest mesh that shows it."""
        first: dict[Any, Finding] = {}
        for case in self.cases:
            for finding in case.findings:
                first.setdefault(finding.key, finding)
        return list(first.values())

    def __str__(self) -> str:
        return "\n".join(_lines(self))


# As text for people ----------------------------------------------------------------------------


def _lines(verdict: Verdict) -> Iterator[str]:
    yield f"{verdict.name}, {verdict.taken_as}; operands {verdict.operands or 'none'}"
    width = max(len(_where(case)) for case in verdict.cases)
    for case in verdict.cases:
        yield f"  {_where(case):<{width}}  {status_said(case)}"
        yield from (f"  {'':<{width}}  {c.generation}: {c.said}" for c in case.compilations)
    yield ""
    found = verdict.findings
    for number, finding in enumerate(found[:_SHOWN], 1):
        cases = [case for case in verdict.cases if finding.key in {f.key for f in case.findings}]
        shown = f"shown: {mesh_said(cases[0])}{_numbering(cases[0])}"
        yield f"{number}. on {', '.join(map(mesh_said, cases))} ({shown})"
        yield from finding.text()
        yield ""
    if len(found) > _SHOWN:
        yield f"and {len(found) - _SHOWN} more; --json has all of them"
        yield ""
    yield f"{HEADS[verdict.status]}: {_conclusion(verdict)}"


def _numbering(case: Case) -> str:
    """How devices of a mesh of several axes, and cores, are numbered."""
    *others, last = case.axes
    said = f"; devices are numbered row-major, {last} the fastest" if others else ""
    cores = case.report.engine.program.cores if case.report else 1
    n = case.devices
    for core in range(1, cores):
        said += f"; core {core} of devices 0 to {n - 1} counts as {core * n} to {core * n + n - 1}"
    return said


def _conclusion(verdict: Verdict) -> str:
    if verdict.status == SOUND:
        rules = [rule for rule in RULES if rule not in ("early-read", "entry")]
        return f"no {', '.join(rules[:-1])} or {rules[-1]} fault on any schedule of the model"
    if verdict.status == UNJUDGED:
        reasons = dict.fromkeys(case.unjudged for case in verdict.cases if case.unjudged)
        return "; ".join(reasons)
    asked = [c for case in verdict.cases for c in case.compilations]
    refused = sorted({c.generation for c in asked if c.ok is False})
    count = len(verdict.findings)
    parts = [f"{count} finding{'s' * (count > 1)}"] if count else []
    parts += [f"the compiler refuses it for {', '.join(refused)}"] if refused else []
    return "; ".join(parts) + (". Each shows on a schedule that this model allows" if count else "")


def _where(case: Case) -> str:
    plural = "s" * (case.devices > 1)
    return f"{case.devices} device{plural}, {mesh_said(case)} on {case.machine}"


def mesh_said(case: Case) -> str:
    return ",".join(f"{name}={size}" for name, size in case.axes.items())


def status_said(case: Case) -> str:
    parts = [HEADS[case.status]]
    if case.findings:
        count = len(case.findings)
        parts[0] += f", {count} finding{'s' * (count > 1)}"
    if case.unjudged:
        return f"{parts[0]}: {case.unjudged}"
    if case.report is not None:
        parts += _figures(case)
    return "; ".join(parts)


def _figures(case: Case) -> list[str]:
    report = case.report
    assert report is not None
    name, carried, busy = report.busiest_link
    least = "at least " * report.least
    out = [
        f"modelled {least}{report.time * 1e6:.1f} µs" + (" to the deadlock" * bool(report.stuck))
    ]
    if carried:
        out.append(f"busiest link {name} {carried / 1e6:.3g} MB, {busy:.0%} of the time")
    return out
