"""`certify`: what an owner of TPUs or GPUs runs first. One report to send back, and its JSON.

1. conformance: every collective, algorithm and memory space against numpy and lax, in several
   dtypes, with whole tiles and without, on every axis of several meshes;
2. soak: mixed collectives back to back, thousands of them;
3. sweep: every algorithm timed beside lax, and on TPUs beside what the model predicts.

Where there is neither TPU nor GPU, the first two run on simulated devices and the model predicts.
"""

import dataclasses
import importlib.util
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from jax.sharding import Mesh

from benchmarks import (
    devices,
    interrupt,
    measure,
    plots,
    replay_rows,
    report,
    results,
    selection,
    soak,
    sweep,
)
from benchmarks.cases import CASES, LANES
from benchmarks.results import Results, Saved
from benchmarks.rows import Measured
from benchmarks.settings import AXES, FlagError, Settings
from benchmarks.tables import Screen
from pallas_collectives.catalogue import ALGORITHMS

flags.adopt_module_key_flags(selection)
_OUT = flags.DEFINE_string("certificate", "certificate", "Writes NAME.md and NAME.json.")
_SOAK = flags.DEFINE_integer("soak", 10, "Programs of mixed collectives.", lower_bound=1)

_DTYPES = {"simulated": ("float32",), "real": ("float32", "bfloat16", "int8", "uint32")}
_SIZES = {"simulated": "16K", "tpu": "64K:64M:32x", "gpu": "64K:64M:32x"}
_LARGE = 4 << 20  # bytes, on real devices, beside sizes of a few rows


class Effort(NamedTuple):
    """How much to soak: programs at the most, runs of each, collectives in one."""

    programs: int
    runs: int
    length: int


REAL, SIMULATED = Effort(1000, 100, 12), Effort(1, 2, 5)


def main(argv: Sequence[str]) -> int:
    """Runs all of it; the exit status says whether all was right."""
    if argv[1:]:
        raise FlagError(f"argument {argv[1]!r}", "there are only flags", "see --help")
    for name in ("json", "csv", "plot", "resume"):
        if flags.FLAGS[name].present:
            rule = "all of a certificate is written to NAME.md and NAME.json"
            raise FlagError(f"--{name}", rule, "name it with --certificate=NAME")
    results.check_writable(f"{_OUT.value}.json", "--certificate")
    wanted = selection.chosen(_SIZES, dtypes=("float32",))
    if devices.kind() != "simulated" and "xla" not in wanted.backends:
        wanted = dataclasses.replace(wanted, backends=("xla", *wanted.backends))
    mesh, screen = devices.make_mesh(wanted.mesh), Screen(quiet=not devices.speaks())
    about = devices.environment(mesh)
    file = f"{_OUT.value}.json" if devices.speaks() else ""
    kept = Results(screen, about, wanted.named(), file)
    screen.say(plan(wanted))
    try:
        _run(kept, wanted, mesh)
    except KeyboardInterrupt:
        return interrupt.STATUS
    if devices.speaks():
        _write(kept, about)
    screen.say(f"\n{kept.verdict}; written: {_OUT.value}.md, {_OUT.value}.json")
    return int(kept.failed)


def plan(wanted: Settings) -> str:
    """What is run here; without TPUs and GPUs also what would be there."""
    algorithms = sum(len(ALGORITHMS[case.op]) for case in wanted.cases)
    count = f"{len(wanted.cases)} collectives in {algorithms} algorithms"
    if devices.kind() != "simulated":
        return f"Conformance of {count}, a soak, and a sweep."
    return (
        f"There is neither TPU nor GPU here. On them this command runs\n"
        f"  conformance of {count}, in HBM and in VMEM, in {', '.join(_DTYPES['real'])};\n"
        f"  a soak of {_SOAK.value} programs, {REAL.runs * REAL.length} collectives each;\n"
        f"  a sweep of {_SIZES['tpu']}, timed beside lax, and on TPUs beside the model.\n"
        "Here: conformance and soak on simulated devices, and what the model predicts for pods."
    )


def _run(kept: Results, wanted: Settings, mesh: Mesh) -> None:
    kind = devices.kind()
    runs = list(conformance(wanted, kind))
    total = sum(len(measure.plan(settings)) for settings in runs)
    kept.collect("conformance", _conforming(runs), total)
    kept.show("conformance", "\nConformance")
    effort = SIMULATED if kind == "simulated" else REAL
    number = min(_SOAK.value, effort.programs)
    kept.collect("soak", soak.rows(wanted, mesh, number, effort.runs, effort.length), number)
    kept.show("soak", "\nSoak: mixed collectives back to back")
    if kind == "simulated":
        pods = sweep.ONE_POD_EACH
        on_pods = replay_rows.plan(pods["pods"], wanted.cases, pods["sizes"])
        kept.collect("replayed", replay_rows.rows(on_pods), len(on_pods))
        kept.show("replayed", "\nModelled, not measured")
        return
    tasks = measure.plan(wanted)
    rows = predicted(measure.rows(tasks, wanted, mesh), wanted, mesh)
    kept.collect("measured", rows, len(tasks))
    kept.show("measured", "\nMeasured, beside lax and, on TPUs, the model")


def conformance(wanted: Settings, kind: str) -> Iterator[Settings]:
    """What to verify; on real devices also on the axes of a mesh of two, and in larger blocks."""
    real = kind != "simulated"
    dtypes = wanted.dtypes if wanted.dtypes != ("float32",) else _DTYPES["real" if real else kind]
    names = wanted.algorithms or tuple(dict.fromkeys(itertools.chain(*ALGORITHMS.values())))
    spaces = ("",) if wanted.algorithms else ("", ":vmem")
    common = dataclasses.replace(
        wanted,
        algorithms=tuple(name + space for name in names for space in spaces),
        backends=tuple(backend for backend in wanted.backends if backend != "xla"),
        dtypes=dtypes,
        timed=False,
        check=True,
    )
    for mesh, axes in _meshes(wanted) if real else [(wanted.mesh, wanted.axes)]:
        n = math.prod(size for name, size in zip(AXES, mesh, strict=False) if name in axes)
        row = n * LANES * 4  # 128 elements of 4 bytes in each block
        sizes = (5 * row, 32 * row, _LARGE) if real else (5 * row,)
        yield dataclasses.replace(common, mesh=mesh, axes=axes, sizes=sizes)


def _meshes(wanted: Settings) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    yield wanted.mesh, wanted.axes
    n = wanted.mesh[0]
    if len(wanted.mesh) == 1 and n >= 4 and n % 2 == 0:
        for axes in (("x",), ("y",), ("x", "y"), ("y", "x")):
            yield (2, n // 2), axes


def _conforming(runs: Sequence[Settings]) -> Iterator[Measured]:
    for settings in runs:
        over = f"{','.join(settings.axes)} of {'x'.join(map(str, settings.mesh))}"
        mesh = devices.make_mesh(settings.mesh)
        for row in measure.rows(measure.plan(settings), settings, mesh):
            yield dataclasses.replace(row, over=over)


def predicted(rows: Iterator[Measured], wanted: Settings, mesh: Mesh) -> Iterator[Measured]:
    """Rows with what the model says of them, where they are kernels on TPUs that it knows."""
    machine = replay_rows.machine_of(mesh) if devices.kind() == "tpu" else None
    cases = {case.name: case for case in CASES}
    for row in rows:
        if machine and row.backend == "pallas" and not row.reason:
            task = replay_rows.Task(
                machine, cases[row.op], row.type, row.size, row.algorithm, wanted.axes
            )
            seconds = replay_rows.run(task, mesh=mesh).time
            row = dataclasses.replace(row, model_us=seconds * 1e6)
        yield row


def _write(kept: Results, about: dict[str, Any]) -> None:
    text = report.page("Certificate", Saved(about, {}, kept.parts))
    text = f"{text}\n**{kept.verdict}**\n"
    if importlib.util.find_spec("matplotlib"):
        picture = Path(f"{_OUT.value}.png")
        if plots.save(str(picture), kept.parts, about):
            text += f"\n![bandwidth and time against size]({picture.name})\n"
    results.write(f"{_OUT.value}.md", lambda file: file.write(text))
