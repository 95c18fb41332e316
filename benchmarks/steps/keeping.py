"""The rows of `step` that the README's table shows: `--save` keeps them, `readme` reads them."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
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
    compute_us: float
    exposed_us: float
    hidden_us: float
    time_us: float

    @classmethod
    def of(cls, row: Stepped) -> "Figures":
        """Those of a row that this compiler has made."""
        names = [field.name for field in dataclasses.fields(cls)[1:]]
        return cls(metadata.version("libtpu"), *(round(getattr(row, name), 1) for name in names))


Kept = dict[str, Figures]


def load() -> Kept:
    """Figures of rows by "topology, program, form, under".

    Raises:
      FlagError: the file holds no such figures.
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
    order = list(chips.BY_NAME)
    where = {key.partition(",")[0] for key in kept}
    topologies = sorted(where, key=lambda name: order.index(timeline.chip_of(name).name))
    cells = []
    for topology, gradient in itertools.product(topologies, (False, True)):
        form = Form(gradient, unrolled=False)
        texts = (_both(kept, f"{topology}, {program}, {form}") for program in BUILT_IN)
        cells.append((f"{topology}, {'gradient' if gradient else 'forward'}", *texts))
    compilers = ", ".join(sorted({row.libtpu for row in kept.values()}))
    headers = (f"libtpu {compilers}", *(f"`{program}`" for program in BUILT_IN))
    return grid(headers, cells, (True,) * len(headers))


def _both(kept: Kept, step: str) -> str:
    keys = [f"{step}, {under}" for under in ("lax", "override")]
    found = [kept[key] for key in keys if key in kept]
    if len(found) < len(keys) or len({of.libtpu for of in found}) > 1:
        return _MISSING
    return " → ".join(f"{of.time_us / 1e3:.1f} ({of.exposed_us / 1e3:.1f})" for of in found)
