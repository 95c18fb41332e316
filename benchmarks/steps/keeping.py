"""The rows of `step` that tables of the READMEs show: `--save` keeps them, `readme` reads them."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from benchmarks import results
from benchmarks.rows import Stepped
from benchmarks.steps import timeline
from benchmarks.steps.programs import BUILT_IN, Form
from benchmarks.tables import grid
from pallas_collectives.topology import chips

PATH = Path(__file__).with_name("kept.json")
_MISSING = "–"


@dataclasses.dataclass(frozen=True)
class Figures:
    """What is kept of a row: the compiler's version, and microseconds."""

    libtpu: str
    time_us: float
    waits_us: float
    packing_us: float

    @classmethod
    def of(cls, row: Stepped) -> "Figures":
        """Those of a row that this compiler has made."""
        names = [field.name for field in dataclasses.fields(cls)[1:]]
        return cls(metadata.version("libtpu"), *(round(getattr(row, name), 1) for name in names))


Kept = dict[str, Figures]


def load() -> Kept:
    """Figures of rows by "topology, program, form, under".

    Raises:
      FlagError: the file does not hold such figures.
    """
    with results.reading(PATH, results.AS_COMMITTED):
        kept = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
        return {key: Figures(**figures) for key, figures in kept.items()}


def check() -> None:
    """Raises FlagError if rows cannot be kept, before minutes of compiling are lost to it."""
    load()
    results.check_writable(str(PATH), "--save to ")


def saved(rows: Iterator[Stepped]) -> Iterator[Stepped]:
    """The rows; each that compiled is kept as it comes, in the place of the one that was kept."""
    for row in rows:
        if not row.failed:
            _save(load() | {", ".join(row.key): Figures.of(row)})
        yield row


def _save(kept: Kept) -> None:
    lines = [f"{json.dumps(key)}: {json.dumps(vars(kept[key]))}" for key in sorted(kept)]
    results.write(str(PATH), lambda file: file.write("{" + ",\n ".join(lines) + "}\n"))


def table(kept: Kept) -> str:
    """Milliseconds of a step, and those for which the core waits: by lax, and under ours."""

    def texts(topology: str, form: Form) -> Iterator[str]:
        for program in BUILT_IN:
            found = _both(kept, f"{topology}, {program}, {form}")
            times = (f"{_ms(of.time_us)} ({_ms(of.waits_us)})" for of in found)
            yield " → ".join(times) or _MISSING

    return _by_topology(kept, [f"`{program}`" for program in BUILT_IN], texts)


_PARTS: dict[str, Callable[[Figures], float]] = {
    "compute": lambda of: of.time_us - of.waits_us - of.packing_us,
    "waits": lambda of: of.waits_us,
    "packing": lambda of: of.packing_us,
    "exposed": lambda of: of.waits_us + of.packing_us,
}


def parts(kept: Kept, program: str) -> str:
    """Milliseconds of a program's compute, waits and packing: by lax, and under ours."""

    def texts(topology: str, form: Form) -> Iterator[str]:
        found = _both(kept, f"{topology}, {program}, {form}")
        for part in _PARTS.values():
            yield " → ".join(_ms(part(of)) for of in found) or _MISSING

    return _by_topology(kept, list(_PARTS), texts)


# Columns of tables that compare ways, and the program and the collectives of each.
Columns = dict[str, tuple[str, str]]
_OF_HALVES = "benchmarks.steps.two_batches:"
HALVES: Columns = {
    "lax": ("tensor", "lax"),
    "`override_lax()`": ("tensor", "override"),
    "two halves": (f"{_OF_HALVES}tensor", "override"),
    "two halves, four layers in a turn": (f"{_OF_HALVES}tensor_at_once", "override"),
}
NARROW: Columns = {
    "`tensor`, lax": ("tensor", "lax"),
    "ours": ("tensor", "override"),
    "int8": ("tensor", "int8"),
    "int8, two halves": (f"{_OF_HALVES}tensor", "int8"),
    "`fsdp_tensor`, lax": ("fsdp_tensor", "lax"),
    "ours ": ("fsdp_tensor", "override"),
    "int8 ": ("fsdp_tensor", "int8"),
}


def ways(kept: Kept, columns: Columns) -> str:
    """Milliseconds of a program, and its waits, in several ways, of which lax's is the first.

    Topologies for which a column of its own is kept.
    """

    def texts(topology: str, form: Form) -> Iterator[str]:
        first: Figures | None = None
        for program, under in columns.values():
            of = kept.get(f"{topology}, {program}, {form}, {under}")
            first = of if under == "lax" else first
            same = of and first and of.libtpu == first.libtpu  # two compilers' do not compare
            yield f"{_ms(of.time_us)} ({_ms(of.waits_us)})" if of and same else _MISSING

    own = {*columns.values()} - {*itertools.product(BUILT_IN, ("lax", "override"))}
    where = set()
    for key in kept:
        topology, program, *_, under = key.split(", ")
        if (program, under) in own:
            where.add(topology)
    there = {key: of for key, of in kept.items() if key.partition(", ")[0] in where}
    return _by_topology(there, [*columns], texts)


_FORMS = tuple(Form(gradient, unrolled=False) for gradient in (False, True))


def _by_topology(
    kept: Kept, headers: Sequence[str], texts: Callable[[str, Form], Iterator[str]]
) -> str:
    order = list(chips.BY_NAME)
    where = {key.partition(",")[0] for key in kept}
    topologies = sorted(where, key=lambda name: order.index(timeline.chip_of(name).name))
    cells = []
    for topology, form in itertools.product(topologies, _FORMS):
        name = f"{topology}, {'gradient' if form.gradient else 'forward'}"
        cells.append((name, *texts(topology, form)))
    compilers = ", ".join(sorted({row.libtpu for row in kept.values()}))
    return grid((f"libtpu {compilers}", *headers), cells, (True,) * (1 + len(headers)))


def _both(kept: Kept, step: str) -> list[Figures]:
    """A step's figures by lax and under ours, by one compiler; else none."""
    keys = [f"{step}, {under}" for under in ("lax", "override")]
    found = [kept[key] for key in keys if key in kept]
    return found if len(found) == len(keys) and len({of.libtpu for of in found}) == 1 else []


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f}"
