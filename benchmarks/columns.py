"""The columns of every table, on a terminal and in Markdown: headers and cells."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.rows import (
    Asked,
    Compiled,
    Measured,
    Probed,
    Ran,
    Replayed,
    Row,
    Soaked,
    Stepped,
    Wired,
)
from pallas_collectives import catalogue
from pallas_collectives.topology.chips import MIB

_NUMBER = 9  # characters of most numbers
_NAMES = {
    "op": max(map(len, catalogue.functions())),
    "algorithm": max(len(name) for names in catalogue.ALGORITHMS.values() for name in names),
    "machine": len("tpu7x:4x4x4"),
    "topology": len("tpu7x:2x2x1"),
    "type": len("bfloat16"),
}


class Column(NamedTuple):
    """A header, and what stands below it for a row."""

    header: str
    cell: Callable[[Any], str]
    is_text: bool = False  # to the left, where numbers go to the right
    widest: int = 0  # what it is known to hold, in characters

    @property
    def width(self) -> int:
        """What to leave for it before its cells are known."""
        return max(len(self.header), self.widest, 0 if self.is_text else _NUMBER)


def of(rows: Sequence[Row]) -> tuple[Column, ...]:
    """The columns for the rows of one part."""
    match rows[0]:
        case Measured():
            return _measured([row for row in rows if isinstance(row, Measured)])
        case Wired():
            return _WIRED
        case Soaked():
            return _SOAKED
        case Compiled():
            return _COMPILED
        case Stepped():
            return _STEPPED
        case Ran():
            return _RAN
        case Replayed():
            return _REPLAYED
        case Probed():
            return _PROBED
        case Asked():
            return _ASKED
    raise AssertionError(rows[0])


def few(rows: Sequence[Row]) -> tuple[Column, ...]:
    """The columns that matter most, for 80 columns of text; of some parts all."""
    match rows[0]:
        case Measured():
            timed = any(row.time_us for row in rows if isinstance(row, Measured))
            return (*_FEW, *(_FEW_TIMES if timed else ()), _WRONG)
        case Compiled():
            return tuple(c for c in _COMPILED if c.header in _FEW_COMPILED)
        case Replayed():
            wire = _number("% wire", "of_wire")
            pod, op = _text("pod", "machine"), _text("op", "op")
            return (pod, op, _SERVED, _BYTES, _number("model us", "time_us", 1), wire, _SOUND)
    return of(rows)


def _text(header: str, name: str) -> Column:
    cell = lambda row: str(getattr(row, name) or "-")  # noqa: E731
    return Column(header, cell, is_text=True, widest=_NAMES.get(name, 0))


def _number(header: str, name: str, digits: int = 0) -> Column:
    def cell(row: Any) -> str:
        value = getattr(row, name)
        return "-" if value is None else f"{value:.{digits}f}"

    return Column(header, cell)


def _mib(header: str, name: str) -> Column:
    return Column(header, lambda row: "-" if row.reason else f"{getattr(row, name) / MIB:.1f}")


def _not_compiled(row: Any) -> str:
    return "refused" if row.refused else "error"


def _wrong(row: Any) -> str:
    if row.error:
        return "error"
    if row.refused and row.wrong is None:
        return "refused"
    return "-" if row.wrong is None else str(row.wrong)


def _spread(row: Any) -> str:
    if row.time_us_min is None:
        return "-"
    return f"{row.time_us_min:.1f}-{row.time_us_max:.1f}"


def against_lax(rows: Sequence[Measured]) -> Column:
    """How many times lax's time ours is faster by: 2.00x is half the time."""
    times = {_call(row): row.time_us for row in rows if row.backend == "xla"}

    def cell(row: Measured) -> str:
        by_lax = times.get(_call(row))
        if row.backend == "xla" or not by_lax or not row.time_us:
            return "-"
        return f"{by_lax / row.time_us:.2f}x"

    return Column("vs lax", cell)


def _call(row: Measured) -> tuple[Any, ...]:
    return (row.op, row.type, row.devices, row.size)


def _measured(rows: Sequence[Measured]) -> tuple[Column, ...]:
    """Simulated devices have no times to show; what is not known of any row takes no column."""
    call = (*_CALL, _text("over", "over")) if any(row.over for row in rows) else _CALL
    if not any(row.time_us for row in rows):
        ran = any(row.interpret_ms for row in rows)
        return (*call, *((_number("interp ms", "interpret_ms"),) if ran else ()), _WRONG)
    extra = []
    if any(row.model_us for row in rows):
        extra = [_number("model us", "model_us", 1), Column("% of model", _of_model)]
    if any(row.backend == "xla" and row.time_us for row in rows):
        extra.append(against_lax(rows))
    times = (_number("time(us)", "time_us", 1), Column("min-max", _spread))
    return (*call, *times, *_RATES, _number("% of peak", "of_peak"), *extra, _WRONG)


def _of_model(row: Any) -> str:
    if row.model_us is None or row.time_us is None:
        return "-"
    return f"{100 * row.time_us / row.model_us:.0f}"


def nbytes(size: int) -> str:
    """A size as --sizes takes it: 256M."""
    units = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"))
    unit, name = next((u for u in units if size % u[0] == 0), (1, ""))
    return f"{size // unit}{name}"


_BYTES = Column("size", lambda row: nbytes(row.size))
_FEW = (
    _text("op", "op"),
    Column("algorithm", lambda row: row.algorithm or row.backend, is_text=True),
    _BYTES,
)
_FEW_TIMES = (
    _number("us", "time_us", 1),
    _number("busbw", "busbw", 1),
    _number("% peak", "of_peak"),
)
_FEW_COMPILED = ("topology", "op", "temp MiB", "lax temp", "program")
_WHAT = (_text("op", "op"), _text("algorithm", "algorithm"))
_SIZE = (
    _number("size", "size"),
    _number("count", "count"),
    _text("type", "type"),
    _number("devices", "devices"),
)
_CALL = (*_WHAT, _text("backend", "backend"), *_SIZE)
_RATES = (_number("algbw(GB/s)", "algbw", 2), _number("busbw(GB/s)", "busbw", 2))
_WRONG = Column("#wrong", _wrong)
_COMPILED = (
    _text("topology", "topology"),
    *_WHAT,
    _text("type", "type"),
    _number("devices", "devices"),
    _mib("temp MiB", "temp"),
    _mib("lax temp", "lax_temp"),
    Column("program", lambda row: row.ops or _not_compiled(row), is_text=True, widest=12),
    Column("lax program", lambda row: row.lax_ops or _not_compiled(row), is_text=True),
)
_STEPPED = (
    _text("topology", "topology"),
    _text("step", "op"),
    _text("under", "under"),
    _number("compute us", "compute_us"),
    _number("waits us", "waits_us"),
    _number("packing us", "packing_us"),
    _number("exposed us", "exposed_us"),
    _number("hidden us", "hidden_us"),
    _number("hideable us", "hideable_us"),
    _number("step us", "time_us"),
    _mib("temp MiB", "temp"),
    Column("beside compute", lambda row: _beside(row)),
)
_RAN = (
    _text("step", "op"),
    _text("under", "under"),
    _number("devices", "devices"),
    _number("time(us)", "time_us"),
    Column("min-max", _spread),
    _number("compute us", "compute_us"),
    _number("exposed us", "exposed_us"),
    _number("hidden us", "hidden_us"),
)
_SOAKED = (
    _text("collectives", "op"),
    _text("type", "type"),
    _number("devices", "devices"),
    _number("runs", "runs"),
    _number("calls", "calls"),
    _number("seconds", "seconds", 3),
    _WRONG,
)
_WIRED = (
    _text("where", "where"),
    _text("op", "op"),
    _text("wire", "wire"),
    _number("size", "size"),
    _text("type", "type"),
    _number("devices", "devices"),
    _number("time us", "time_us", 1),
    _number("passes", "passes_us", 1),
    _number("% of plain", "of_plain"),
    _number("% bytes", "of_bytes", 1),
    _number("% off", "off", 3),
    Column("ran", lambda row: "refused" if row.refused else "ERROR" if row.failed else "ok"),
)
_SERVED = Column(
    "algorithm",
    lambda row: row.algorithm or row.served or row.kernel or "-",
    is_text=True,
    widest=_NAMES["algorithm"],
)
_SOUND = Column("sound", lambda row: "refused" if row.refused else "FAULT" if row.failed else "ok")
_REPLAYED = (
    _text("pod", "machine"),
    _text("op", "op"),
    _SERVED,
    *_SIZE,
    _number("model us", "time_us", 1),
    *_RATES,
    _number("bound us", "bound_us", 1),
    _number("% of bound", "of_bound"),
    _number("% of wire", "of_wire"),
    _SOUND,
)


def _beside(row: Any) -> str:
    """How many collectives run beside compute, of how many."""
    apart = sum(of["times"] for of in row.collectives if of["engine"] != "core" and of["beside"])
    return f"{apart} of {sum(of['times'] for of in row.collectives)}"


_UNITS = {"B/s": (1e-9, "GB/s"), "s": (1e6, "us"), "1/s": (1e-12, "T/s"), "B": (2**-10, "KiB")}


def _figure(header: str, name: str) -> Column:
    def cell(row: Any) -> str:
        value = getattr(row, name)
        scale, unit = _UNITS.get(row.unit, (1.0, row.unit))
        return "-" if value is None else f"{value * scale:.4g} {unit}".strip()

    return Column(header, cell)


def _off(row: Any) -> str:
    if not row.assumed or row.measured is None:
        return "-"
    return f"{100 * (row.measured / row.assumed - 1):+.1f}%"


_PROBED = (
    _text("pod", "machine"),
    _text("figure", "op"),
    _figure("assumed", "assumed"),
    _figure("measured", "measured"),
    Column("off by", _off),
    _text("how", "how"),
)
_ASKED = (
    _text("question", "op"),
    _text("over", "over"),
    _number("size", "size"),
    _text("answer", "answer"),
    _WRONG,
)
