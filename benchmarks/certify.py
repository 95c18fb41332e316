"""`certify`: what an owner of TPUs or GPUs runs first. One report to send back, and its JSON.

1. figures, on TPUs: what the model of a pod assumes, each measured by a small kernel (`probes`);
   and whether data arrive whole in the memories that XLA chooses;
2. conformance: every collective, algorithm and memory space against numpy and lax, in several
   dtypes, with whole tiles and without, on every axis of several meshes;
3. soak: mixed collectives back to back, thousands of them;
4. sweep: every algorithm timed beside lax, and on TPUs beside what the model predicts;
5. what could hang a TPU, in a process of its own: which devices a DMA reaches, barrier ids.

NAME.md is the report, NAME.json its rows, and NAME.machine.json the pod with its measured figures,
for `--replay=`, `tune --model --machine=` and `replay.Machine.load`.

Where there is neither TPU nor GPU, all but the sweep run on simulated devices, and the model
predicts.
"""

import dataclasses
import importlib.util
import itertools
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
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
from benchmarks.probes import estimates, parts, rigs, risky, spaces
from benchmarks.probes.rig import Rig
from benchmarks.results import Results, Saved
from benchmarks.rows import Asked, Measured, Probed
from benchmarks.settings import AXES, FlagError, Settings, check_no_arguments
from benchmarks.tables import Screen
from pallas_collectives import multihost
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.replay import Machine

flags.adopt_module_key_flags(selection)
flags.declare_key_flag("resume")  # sweep's
_OUT = flags.DEFINE_string("certificate", "certificate", "Writes NAME.md and NAME.json.")
_SOAK = flags.DEFINE_integer("soak", 10, "Programs of mixed collectives.", 1, 100_000)

_MINUTES = flags.DEFINE_float(
    "minutes", 15, "No row begins after so many; --resume goes on.", 0, 24 * 60
)
_STAGE = flags.DEFINE_enum("stage", "all", ["all", "safe"], "safe: all but what could hang a TPU.")

_DTYPES = {"simulated": ("float32",), "real": ("float32", "bfloat16", "int8", "uint32")}
_SIZES = {"simulated": "16K", "tpu": "64K:64M:32x", "gpu": "64K:64M:32x"}
_LARGE = 4 << 20  # bytes, on real devices, beside sizes of a few rows


_FOR_RISKS = 3.0  # minutes, of all
_PATIENCE = 90.0  # seconds for a question that could hang, and for JAX to start


class Effort(NamedTuple):
    """How much to soak: programs at the most, runs of each, collectives in one."""

    programs: int
    runs: int
    length: int


REAL, SIMULATED = Effort(1000, 100, 12), Effort(1, 2, 5)


def main(argv: Sequence[str]) -> int:
    """Runs all of it; the exit status says whether all was right."""
    check_no_arguments(argv)
    results.check_writable(f"{_OUT.value}.json", "--certificate")
    until = time.monotonic() + 60 * _MINUTES.value
    if _STAGE.value == "all" and not flags.FLAGS.resume:
        Path(f"{_OUT.value}.json").unlink(missing_ok=True)  # an earlier run's
    if _STAGE.value == "safe" or not devices.may_be_tpus():
        status = _safe(until)
    else:
        status = _safe_elsewhere()
    if _STAGE.value == "safe" or status == interrupt.STATUS:
        return status
    return _asked(until) or status


def _safe_elsewhere() -> int:
    """All but what could hang, in a process that leaves the TPU free at its end."""
    minutes = max(_MINUTES.value - _FOR_RISKS, _MINUTES.value / 2)
    command = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
    before = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the other, which ends
    try:
        return subprocess.call([*command, "--stage=safe", f"--minutes={minutes}"])
    finally:
        signal.signal(signal.SIGINT, before)


def _safe(until: float) -> int:
    wanted = selection.chosen(_SIZES, dtypes=("float32",))
    if devices.kind() != "simulated" and "xla" not in wanted.backends:
        wanted = dataclasses.replace(wanted, backends=("xla", *wanted.backends))
    mesh, screen = devices.make_mesh(wanted.mesh), Screen(quiet=not devices.speaks())
    about = devices.environment(mesh)
    file = f"{_OUT.value}.json" if devices.speaks() else ""
    kept = Results(screen, about, wanted.named(), file, resume=flags.FLAGS.resume)
    screen.say(plan(wanted))
    try:
        left = _run(kept, wanted, mesh, until)
    except KeyboardInterrupt:
        screen.say("Interrupted. The same command with --resume goes on.")
        return interrupt.STATUS
    if left:
        screen.say(f"\nTime is up, {left} rows are left: the same command with --resume goes on.")
    if devices.speaks():
        _write(kept, about)
    screen.say(f"\n{kept.verdict}; written: {_OUT.value}.md, {_OUT.value}.json")
    return int(kept.failed)


def _asked(until: float) -> int:
    """What could hang a TPU; then machine and report. In this process no JAX starts on TPUs."""
    file = f"{_OUT.value}.json"
    if not Path(file).exists():  # another host writes it
        return 0
    saved, screen = results.load(file), Screen()
    kept = Results(screen, saved.environment, saved.settings, file, resume=True)
    figures = [row for row in kept.parts.get("figures", []) if isinstance(row, Probed)]
    if not figures:
        return 0
    simulated = saved.environment["platform"] == "simulated"
    if time.monotonic() < until:
        command = [sys.executable, "-m", "benchmarks.probes.risky"]
        command += [f"--simulate={saved.environment['devices']}"] if simulated else []
        draft = Path(f"{_OUT.value}.asked").resolve()
        answers = [row for row in kept.parts.pop("asked", []) if not row.error]
        if answers:  # errors are of a process that could not ask; this one may
            kept.parts["asked"] = answers
        rows = risky.watched(command, draft, _PATIENCE, until, len(answers))
        number = len(risky.questions(rigs.modelled(_machine(figures))))
        title = "\nBarrier semaphores, and what a remote DMA and a signal reach"
        try:
            kept.collect("asked", rows, number, title)
        except KeyboardInterrupt:
            return interrupt.STATUS
        _drop_if_empty(kept, "asked")
    asked = [row for row in kept.parts.get("asked", []) if isinstance(row, Asked)]
    measured = parts.machine(figures, [] if simulated else asked)
    note = f"{saved.environment['chip']}, {saved.environment['platform']}: certify's figures"
    measured.save(f"{_OUT.value}.machine.json", note)
    _write(kept, saved.environment)
    screen.say(f"{parts.summary(asked)}\n\n{kept.verdict}; written: {_OUT.value}.machine.json, too")
    return int(kept.failed)


def _machine(figures: Sequence[Probed]) -> Machine:
    return Machine.named(figures[0].machine)


def plan(wanted: Settings) -> str:
    """What is run here; without TPUs and GPUs also what would be there."""
    algorithms = sum(len(ALGORITHMS[case.op]) for case in wanted.cases)
    count = f"{len(wanted.cases)} collectives in {algorithms} algorithms"
    if devices.kind() != "simulated":
        return f"Conformance of {count}, a soak, and a sweep."
    return (
        f"There is neither TPU nor GPU here. On them this command runs\n"
        f"  on TPUs, the probes of what the model of a pod assumes;\n"
        f"  conformance of {count}, in HBM and in VMEM, in {', '.join(_DTYPES['real'])};\n"
        f"  a soak of {_SOAK.value} programs, {REAL.runs * REAL.length} collectives each;\n"
        f"  a sweep of {_SIZES['tpu']}, timed beside lax, and on TPUs beside the model.\n"
        "Here: the probes' data, conformance and soak on simulated devices, and what the model "
        "predicts for pods."
    )


def _run(kept: Results, wanted: Settings, mesh: Mesh, until: float) -> int:
    """Collects every part; returns how many rows there was no time for."""
    left = 0

    def collect(part: str, rows: Iterator[Any], total: int, title: str) -> None:
        nonlocal left
        if _is_time(until):
            kept.collect(part, _in_time(rows, until), total, title)
            if time.monotonic() >= until:
                _drop_if_empty(kept, part)
        left += total - kept.kept(part)

    kind = devices.kind()
    rig = _rig(mesh, kept)
    if rig:
        if kept.kept("figures") < estimates.count(rig):  # one needs those before it
            kept.parts.pop("figures", None)
            title = parts.SIMULATED if rig.interpret else parts.MEASURED
            collect("figures", parts.figures(rig), estimates.count(rig), title)
        number = len(spaces.programs(rig)) * len(spaces.sizes(rig))
        rows: Iterator[Any] = spaces.rows(rig, kept.kept("spaces"))
        collect("spaces", rows, number, "\nData in the memories that XLA chooses")
    runs = list(conformance(wanted, kind))
    total = sum(len(measure.plan(settings)) for settings in runs)
    collect("conformance", _conforming(runs, kept.kept("conformance")), total, "\nConformance")
    effort = SIMULATED if kind == "simulated" else REAL
    number = min(_SOAK.value, effort.programs)
    rows = soak.rows(wanted, mesh, number, effort.runs, effort.length, kept.kept("soak"))
    collect("soak", rows, number, "\nSoak: mixed collectives back to back")
    if kind == "simulated":
        on_pods = replay_rows.wanted(sweep.on_pods(wanted))
        rows = replay_rows.rows(on_pods[kept.kept("replayed") :])
        collect("replayed", rows, len(on_pods), "\nModelled, not measured")
        return left
    tasks = measure.plan(wanted)
    rows = predicted(measure.rows(tasks[kept.kept("measured") :], wanted, mesh), wanted, mesh)
    collect("measured", rows, len(tasks), "\nMeasured, beside lax and, on TPUs, the model")
    return left


def _rig(mesh: Mesh, kept: Results) -> Rig | None:
    """Where the probes run; None, and why is said, where they do not."""
    if devices.kind() == "gpu":
        return None
    if jax.process_count() > 1:
        kept.say("The model's figures are measured on slices of one host only.")
        return None
    try:
        return rigs.here(mesh.size)
    except FlagError as error:
        kept.say(f"The model's figures are not measured: {error}")
        return None


def _drop_if_empty(kept: Results, part: str) -> None:
    """Drops a part that had no time: left empty, it would say that nothing of it could run."""
    if not kept.kept(part):
        kept.parts.pop(part, None)


def _is_time(until: float) -> bool:
    """Whether it is before `until`, by the first process' clock: none begins a row alone."""
    is_time = time.monotonic() < until
    if jax.process_count() > 1:
        is_time = bool(multihost.broadcast_one_to_all(np.array(is_time)))
    return is_time


def _in_time(rows: Iterator[Any], until: float) -> Iterator[Any]:
    """Rows as long as there is time to begin one."""
    while _is_time(until):
        try:
            row = next(rows)
        except StopIteration:
            return
        yield row


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


def _conforming(runs: Sequence[Settings], done: int) -> Iterator[Measured]:
    """The rows of all runs but the first, which are `done`."""
    for settings in runs:
        tasks = measure.plan(settings)
        tasks, done = tasks[done:], max(0, done - len(tasks))
        if not tasks:
            continue
        over = f"{','.join(settings.axes)} of {'x'.join(map(str, settings.mesh))}"
        mesh = devices.make_mesh(settings.mesh)
        for row in measure.rows(tasks, settings, mesh):
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
