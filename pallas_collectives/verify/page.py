"""A verdict as one HTML page: findings, and each mesh's time line as SVG lanes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from pallas_collectives.replay import timeline
from pallas_collectives.replay.report import Report
from pallas_collectives.replay.timeline import Interval
from pallas_collectives.verify.verdict import HEADS, Verdict, mesh_said, status_said

_LABELS, _DRAWN, _ROW = 260, 900, 18  # widths in pixels, and the height of a row
_DEVICES, _LINKS = 12, 8  # shown of each time line

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1240px;padding:0 1em}
pre{background:#f6f6f4;padding:.8em;overflow-x:auto;font-size:13px;line-height:1.3}
h1{font-size:1.4em}h2{font-size:1.15em;margin-top:2em}
td,th{padding:.2em .9em .2em 0;text-align:left}
.sound{color:#186a2b}.faulty{color:#b01818}.unjudged{color:#8a5a00}
svg text{font:12px system-ui,sans-serif;fill:#333}
"""


def of(verdict: Verdict) -> str:
    """The page; it needs nothing besides itself."""
    title = f"{verdict.name}: {HEADS[verdict.status].lower()}"
    body = "\n".join(_body(verdict))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _body(verdict: Verdict) -> Iterator[str]:
    yield f"<h1>{escape(verdict.name)}: {HEADS[verdict.status].lower()}</h1>"
    yield f"<p>{escape(verdict.taken_as)}; operands {escape(verdict.operands or 'none')}</p>"
    yield "<table><tr><th>mesh</th><th>machine</th><th>verdict</th></tr>"
    for case in verdict.cases:
        kind = case.status.split()[-1] if case.status in ("sound", "faulty") else "unjudged"
        said = "; ".join(
            [status_said(case), *(f"{c.generation}: {c.said}" for c in case.compilations)]
        )
        yield (
            f"<tr><td>{escape(mesh_said(case))}</td><td>{escape(str(case.machine))}</td>"
            f'<td class="{kind}">{escape(said)}</td></tr>'
        )
    yield "</table>"
    for number, finding in enumerate(verdict.findings, 1):
        first, *rest = finding.text()
        yield f"<h2>{number}. {escape(first)}</h2>"
        yield f"<pre>{escape(chr(10).join(rest))}</pre>"
    for case in verdict.cases:
        if case.report is not None and case.report.kernels:
            where = f"{mesh_said(case)} on {case.machine}"
            yield f"<h2>Time line, {escape(where)} (modelled)</h2>"
            yield _lanes(case.report)


def _lanes(report: Report) -> str:
    folded, links = timeline.lanes(report)
    rows = [row for lane in folded[:_DEVICES] for row in lane.labelled()]
    rows += [(name, "link", spans) for name, spans in links[:_LINKS]]
    end = max((span.end for _, _, spans in rows for span in spans), default=0) or 1.0
    height = _ROW * (len(rows) + 2)
    out = [f'<svg viewBox="0 0 {_LABELS + _DRAWN} {height}" width="100%" role="img">']
    for number, (label, kind, spans) in enumerate(rows):
        y = number * _ROW
        out.append(f'<text x="{_LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        out += [_bar(span, kind, y, end) for span in spans]
    y = len(rows) * _ROW + 12
    step = 10 ** math.floor(math.log10(end))
    for tick in range(int(end / step) + 1):
        x = _LABELS + _DRAWN * tick * step / end
        out.append(f'<text x="{x:.1f}" y="{y}">{tick * step * 1e6:.3g} µs</text>')
    out.append("</svg>")
    hidden = [
        f"{len(x) - n} more {what}"
        for x, n, what in ((folded, _DEVICES, "kinds of device"), (links, _LINKS, "links"))
        if len(x) > n
    ]
    return "".join(out) + (f"<p>and {' and '.join(hidden)}</p>" if hidden else "")


def _bar(span: Interval, kind: str, y: int, end: float) -> str:
    x, width = _LABELS + _DRAWN * span.start / end, _DRAWN * (span.end - span.start) / end
    detail = "; ".join(f"{key} {value}" for key, value in span.detail.items() if value)
    said = f"{span.name}, {(span.end - span.start) * 1e6:.2f} µs: {detail}"
    return (
        f'<rect x="{x:.1f}" y="{y + 2}" width="{max(width, 0.6):.1f}" height="{_ROW - 5}" '
        f'fill="{timeline.colour(kind, span.name)}"><title>{escape(said)}</title></rect>'
    )
