"""A verdict for programs: JSON, and SARIF 2.1.0 for code review."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pallas_collectives.replay.lines import Line
from pallas_collectives.verify.findings import RULES, Finding, Place
from pallas_collectives.verify.verdict import EXIT, UNJUDGED, Case, Verdict, mesh_said

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_UNJUDGED_RULE = "unjudged"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """All of it. Times in seconds, sizes in bytes."""
    return {
        "function": verdict.name,
        "taken_as": verdict.taken_as,
        "operands": verdict.operands,
        "status": verdict.status,
        "exit": EXIT[verdict.status],
        "cases": [_case(case) for case in verdict.cases],
    }


def _case(case: Case) -> dict[str, Any]:
    out: dict[str, Any] = {
        "mesh": case.axes,
        "machine": str(case.machine),
        "status": case.status,
        "findings": [_finding(finding) for finding in case.findings],
    }
    if case.unjudged:
        out["unjudged"] = {"reason": case.unjudged, "line": _line(case.line)}
    if case.compilations:
        out["compiled"] = {c.generation: {"ok": c.ok, "said": c.said} for c in case.compilations}
    report = case.report
    if report is not None:
        name, carried, busy = report.busiest_link
        out["modelled"] = {
            "seconds": report.time,
            "busiest_link": {"name": name, "bytes": carried, "busy": busy},
            "vmem_bytes": report.vmem_bytes,
            "hbm_scratch_bytes": report.hbm_scratch_bytes,
            "kernels": [kernel.name for kernel in report.kernels],
        }
    return out


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "what": finding.what,
        "places": [{"line": _line(p.line), "does": p.text} for p in finding.places],
        "why": finding.why,
        "remedy": finding.remedy,
        "schedule": finding.drawing.splitlines(),
        "more_like_it": finding.alike,
    }


def _line(line: Line | None) -> dict[str, Any] | None:
    if line is None:
        return None
    return {"path": line.path, "number": line.number, "function": line.function}


def as_sarif(verdict: Verdict, version: str) -> dict[str, Any]:
    """A SARIF log of one run: a result for each finding, and one where there is no verdict."""
    rules = {**RULES, _UNJUDGED_RULE: "a kernel that could not be judged"}
    numbers = {rule: number for number, rule in enumerate(rules)}
    results = [_result(finding, numbers) for finding in verdict.findings]
    results += [_no_verdict(case, numbers) for case in verdict.cases if case.status == UNJUDGED]
    driver = {
        "name": "pallas_collectives verify",
        "version": version,
        "rules": [
            {"id": rule, "shortDescription": {"text": said}, "helpUri": _HELP}
            for rule, said in rules.items()
        ],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": verdict.status != UNJUDGED}],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


_HELP = "https://jax.readthedocs.io/en/latest/pallas/tpu/distributed.html"


def _result(finding: Finding, numbers: dict[str, int]) -> dict[str, Any]:
    message = f"{finding.what}. Why: {finding.why}. Mend: {finding.remedy}."
    if finding.drawing:
        message += f"\n\nA schedule that shows it:\n{finding.drawing}"
    out = {
        "ruleId": finding.rule,
        "ruleIndex": numbers[finding.rule],
        "level": "error",
        "message": {"text": message},
        "locations": [_location(place) for place in finding.places[:1] if place.line],
    }
    related = [
        {"id": number, **_location(place), "message": {"text": place.text}}
        for number, place in enumerate(finding.places[1:], 1)
        if place.line
    ]
    return {**out, "relatedLocations": related} if related else out


def _no_verdict(case: Case, numbers: dict[str, int]) -> dict[str, Any]:
    place = Place(case.line, "") if case.line else None
    return {
        "ruleId": _UNJUDGED_RULE,
        "ruleIndex": numbers[_UNJUDGED_RULE],
        "level": "warning",
        "message": {"text": f"on {mesh_said(case)}: {case.unjudged}"},
        "locations": [_location(place)] if place else [],
    }


def _location(place: Place) -> dict[str, Any]:
    assert place.line is not None
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": _uri(place.line.path)},
            "region": {"startLine": max(1, place.line.number)},
        }
    }


def _uri(path: str) -> str:
    """A path from the folder that one is in, where it lies below that; reviews want it so."""
    relative = os.path.relpath(path)
    if relative.startswith(os.pardir):
        return Path(path).resolve().as_uri()
    return quote(Path(relative).as_posix())
