"""A verdict as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from pallas_collectives.verify.findings import RULES
from pallas_collectives.verify.judge import FAULTY, SOUND, UNJUDGED, Case, Verdict

_SHOWN = 8  # findings
_HEADS = {SOUND: "SOUND", FAULTY: "NOT SOUND", UNJUDGED: "CANNOT BE JUDGED"}


def of(verdict: Verdict) -> str:
    """The verdict, case by case, then each finding once."""
    return "\n".join(_lines(verdict))


def _lines(verdict: Verdict) -> Iterator[str]:
    yield f"{verdict.name}, {verdict.taken_as}; operands {verdict.operands or 'none'}"
    width = max(len(_where(case)) for case in verdict.cases)
    for case in verdict.cases:
        yield f"  {_where(case):<{width}}  {_status(case)}"
        yield from (f"  {'':<{width}}  {c.generation}: {c.said}" for c in case.compilations)
    yield ""
    found = verdict.findings
    for number, finding in enumerate(found[:_SHOWN], 1):
        cases = [case for case in verdict.cases if finding.key in {f.key for f in case.findings}]
        yield f"{number}. on {', '.join(map(_mesh, cases))} (drawn: {_mesh(cases[0])})"
        yield from finding.text()
        yield ""
    if len(found) > _SHOWN:
        yield f"and {len(found) - _SHOWN} more; --json has all of them"
        yield ""
    yield f"{_HEADS[verdict.status]}: {_conclusion(verdict)}"


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
    return f"{case.devices} devices, {_mesh(case)} on {case.machine}"


def _mesh(case: Case) -> str:
    return ",".join(f"{name}={size}" for name, size in case.axes.items())


def _status(case: Case) -> str:
    parts = [_HEADS[case.status]]
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
    out = [f"modelled {report.time * 1e6:.1f} µs" + (" to the deadlock" * bool(report.stuck))]
    if carried:
        out.append(f"busiest link {name} {carried / 1e6:.3g} MB, {busy:.0%} of the time")
    return out
