"""The rows of `step` that the README's table shows: `--save` keeps them, `readme` reads them."""

import itertools
import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.rows import Stepped
from benchmarks.steps import timeline
from benchmarks.steps.programs import BUILT_IN, Form
from benchmarks.tables import grid
from pallas_collectives.topology import chips

PATH = Path(__file__).with_name("kept.json")
_FIGURES = ("compute_us", "exposed_us", "hidden_us", "time_us")
_MISSING = "–"

Kept = dict[str, dict[str, Any]]


def load() -> Kept:
    """Figures of a row, and the compiler's version, by "topology, program, form, under"."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}


def save(rows: Iterable[Stepped]) -> None:
    """Keeps the figures of rows that compiled, in the place of those that were kept of them."""
    kept, compiler = load(), metadata.version("libtpu")
    for row in rows:
        if not row.failed:
            figures = {name: round(getattr(row, name), 1) for name in _FIGURES}
            kept[", ".join(row.key)] = {"libtpu": compiler, **figures}
    lines = ",\n ".join(f"{json.dumps(key)}: {json.dumps(kept[key])}" for key in sorted(kept))
    PATH.write_text(f"{{{lines}}}\n", encoding="utf-8")


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
    compilers = ", ".join(sorted({row["libtpu"] for row in kept.values()}))
    headers = (f"libtpu {compilers}", *(f"`{program}`" for program in BUILT_IN))
    return grid(headers, cells, (True,) * len(headers))


def _both(kept: Kept, step: str) -> str:
    found = [kept.get(f"{step}, {under}") for under in ("lax", "override")]
    texts = [f"{of['time_us'] / 1e3:.1f} ({of['exposed_us'] / 1e3:.1f})" for of in found if of]
    return " → ".join(texts) if len(texts) == len(found) else _MISSING
