"""Verifies, times, compiles or replays every collective: `python -m benchmarks`."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags, logging
from jax.sharding import Mesh

from benchmarks import compiled, devices, interrupt, measure, replay_rows, settings
from benchmarks.report import COMPILED, REPLAYED, SIMULATED, TIMED, Report
from benchmarks.settings import FlagError, Settings
from pallas_collectives.replay import MachineError

_COLLECTIVE = flags.DEFINE_list("collective", [], "Collectives, by lax's names; all by default.")
_ALGORITHM = flags.DEFINE_list("algorithm", [], "Algorithms of the kernels; all by default.")
_BACKEND = flags.DEFINE_list(
    "backend", [], "pallas, nccl, or xla for jax.lax itself; by default what the platform has."
)
_DTYPE = flags.DEFINE_list("dtype", ["float32"], "Element types, by JAX's names.")
_SIZES = flags.DEFINE_string(
    "sizes",
    None,
    "Bytes of the full array: SIZE, or FIRST:LAST:STEP with a STEP like 2x, or 8K to add. "
    "By default 8K:256M:2x; 8K:512K:64x on simulated devices, 64K:64M:32x in a replay.",
)
_MESH = flags.DEFINE_string("mesh", None, "Axis sizes, as 4x2; by default all devices on one.")
_AXIS = flags.DEFINE_string("axis", "x", "Mesh axes to communicate over, of x, y and z, as x,y.")
_DEVICES = flags.DEFINE_integer(
    "devices", 8, "TPU devices to simulate where there are no real ones.", lower_bound=2
)
_WARMUP = flags.DEFINE_integer("warmup", 2, "Untimed runs before the timed.", lower_bound=0)
_ITERS = flags.DEFINE_integer("iters", 20, "Collectives in one timed chain.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the random operands.", lower_bound=0)
_COMPILE_FOR = flags.DEFINE_list(
    "compile_for",
    ["v4:2x2x1", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"],
    "TPUs to compile for without having them; empty for none.",
)
_REPLAY = flags.DEFINE_list(
    "replay",
    None,
    "Pods, as v5e:16x16, on whose model to replay the kernels instead of measuring. By default, "
    "where TPUs are simulated, one of each generation after the rest; --replay= for none.",
)
_JSON = flags.DEFINE_string("json", "", "File for the results, kept up to date while they come.")
_CSV = flags.DEFINE_string("csv", "", "File for what was measured, likewise.")

# What is replayed by default: blocks of 4 MiB on an axis of 4.
ONE_POD_EACH: dict[str, Any] = {
    "pods": ("v4:4x4x4", "v5e:4x4", "v5p:4x4x4", "v6e:4x4", "tpu7x:4x4x4"),
    "sizes": (16 << 20,),
    "axes": ("x",),
    "algorithms": (),
}


def main(argv: Sequence[str]) -> int:
    """Runs what the flags ask for; the exit status says whether all was right."""
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        if argv[1:]:
            raise FlagError(f"argument {argv[1]!r}", "there are only flags", "see --help")
        return _run(_settings())
    except FlagError as error:
        print(error, file=sys.stderr)
        return 2


def _settings() -> Settings:
    """The flags, checked against each other and against the devices there are."""
    mesh = settings.parse_mesh(_MESH.value) if _MESH.value else ()
    devices.prepare(math.prod(mesh) if mesh else _DEVICES.value)
    mesh = mesh or (len(jax.devices()),)
    kind = devices.kind()
    cases = settings.choose_cases(_COLLECTIVE.value)
    pods = _REPLAY.value or []
    match pods, kind:
        case [], "simulated":
            sizes = "8K:512K:64x"
        case [], _:
            sizes = "8K:256M:2x"
        case _:
            sizes = "64K:64M:32x"
    return Settings(
        cases=cases,
        algorithms=settings.check_algorithms(_ALGORITHM.value, cases),
        backends=settings.check_backends(_BACKEND.value) or devices.backends(kind),
        dtypes=tuple(map(settings.parse_dtype, _DTYPE.value)),
        sizes=settings.parse_sizes(_SIZES.value or sizes),
        mesh=mesh,
        axes=settings.parse_axis(_AXIS.value, settings.AXES if pods else mesh),
        warmup=_WARMUP.value,
        iters=_ITERS.value,
        seed=_SEED.value,
        topologies=tuple(settings.parse_topology(t, "--compile_for") for t in _COMPILE_FOR.value),
        pods=tuple(settings.parse_topology(pod, "--replay") for pod in pods),
    )


def _run(wanted: Settings) -> int:
    mesh = devices.make_mesh(wanted.mesh)
    report = Report(devices.environment(mesh), _JSON.value, _CSV.value)
    try:
        if wanted.pods:
            _replay(report, wanted)
        else:
            _measure(report, wanted, mesh)
            _compile(report, wanted)
            if _REPLAY.value is None and devices.kind() == "simulated":
                _replay(report, dataclasses.replace(wanted, **ONE_POD_EACH))
    except KeyboardInterrupt:
        return interrupt.STATUS
    except compiled.CompilerError as error:
        print(error, file=sys.stderr)
        return 1
    return int(report.failed)


def _measure(report: Report, wanted: Settings, mesh: Mesh) -> None:
    """Verifies on the devices there are, and times real ones."""
    chip = mesh.devices.flat[0].device_kind
    shape = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    title = f"Measured: {mesh.size} x {chip}, mesh {shape}, over {','.join(wanted.axes)}"
    columns = TIMED
    if devices.kind() == "simulated":
        title = (
            f"Simulated: {mesh.size} TPU devices in interpret mode, mesh {shape}, over "
            f"{','.join(wanted.axes)}. interp ms: the interpreter's time here, not a TPU's."
        )
        columns = SIMULATED
    tasks = measure.plan(wanted)
    try:
        report.collect("measured", measure.rows(tasks, wanted, mesh), len(tasks))
    finally:
        report.show("measured", title, columns)
    report.say("#wrong: elements that differ from numpy's result or from jax.lax's.")


def _compile(report: Report, wanted: Settings) -> None:
    """Compiles for TPUs that are not there."""
    if not wanted.topologies:
        return
    report.say()
    if not compiled.is_available():
        report.say(compiled.INSTALL)
        return
    title = (
        f"Compiled for TPUs that are not there, {compiled.SIZE >> 20} MiB on one axis, ours and "
        "lax's between a producer and a consumer.\ntemp: memory beyond arguments and results; "
        "program: what stands there besides the two."
    )
    try:
        report.collect("compiled", compiled.rows(wanted), compiled.count(wanted))
    finally:
        report.show("compiled", title, COMPILED)


def _replay(report: Report, wanted: Settings) -> None:
    """Runs the kernels' own DMA programs on modelled pods."""
    report.say()
    try:
        tasks = replay_rows.plan(
            wanted.pods, wanted.cases, wanted.sizes, wanted.dtypes, wanted.algorithms, wanted.axes
        )
    except MachineError as error:
        raise FlagError("--replay", str(error), "write it like v5e:16x16 or v5p:4x4x4") from None
    title = (
        "Modelled, not measured: the kernels' own DMA programs on a model of the pod.\n"
        "% of bound: the least time that links and distances allow, against the time."
    )
    try:
        report.collect("replayed", replay_rows.rows(tasks), len(tasks))
    finally:
        report.show("replayed", title, REPLAYED)


if __name__ == "__main__":
    app.run(main)
