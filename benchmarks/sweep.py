"""The command without a name: verify, time, compile or replay every collective."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from absl import flags
from jax.sharding import Mesh

from benchmarks import (
    baseline,
    columns,
    compiled,
    devices,
    interrupt,
    measure,
    plots,
    replay_rows,
    results,
    selection,
    settings,
    wired_rows,
)
from benchmarks.results import Results
from benchmarks.settings import FlagError, Settings
from benchmarks.tables import Screen
from pallas_collectives.replay import Machine, MachineError

flags.adopt_module_key_flags(selection)
_COMPILE_FOR = flags.DEFINE_list(
    "compile_for",
    None,
    "TPUs to compile for without having them; empty for none. By default v5e:2x4 and v5p:2x2x2, "
    "with --all and on real devices one of each generation.",
)
_REPLAY = flags.DEFINE_list(
    "replay",
    None,
    "Pods, as v5e:16x16, or files of them that certify has written, on whose model to replay the "
    "kernels instead of measuring. By default, where TPUs are simulated, one of each generation "
    "after the rest; --replay= for none.",
)
_ALL = flags.DEFINE_bool(
    "all", False, "Where TPUs are simulated: larger sizes as well, and every TPU to compile for."
)
_JSON = flags.DEFINE_string("json", "", "File for the results, kept up to date while they come.")
_CSV = flags.DEFINE_string("csv", "", "File for what was measured, or replayed, likewise.")
_PLOT = flags.DEFINE_string(
    "plot", "", "PNG for bandwidth and time against size; with --wire for error against time."
)
_WIRE = flags.DEFINE_list(
    "wire",
    [],
    "Numbers to send floats as, as int8,float8_e4m3fn: time and error beside those without, of "
    "bfloat16 by default, measured, or replayed with --replay.",
)
_RESUME = flags.DEFINE_bool("resume", False, "Keep the rows that --json's file has, and go on.")

_NOT_OVER_WIRES = ("algorithm", "check", "chain", "trace", "compile_for")
_FEW_TO_COMPILE_FOR = ["v5e:2x4", "v5p:2x2x2"]
_TO_COMPILE_FOR = ["v4:2x2x1", *_FEW_TO_COMPILE_FOR, "v6e:2x4", "tpu7x:2x2x1"]
_SIZES = {
    "simulated": "8K",
    "tpu": "8K:256M:2x",
    "gpu": "8K:256M:2x",
    "replay": "64K:64M:32x",
}
# Above so many minutes a run warns. A simulated row takes roughly 2 s, and 1 s more for each 16 MiB
# times devices: so it was for all kernels together, up to 8 MiB on 2 and 8 devices on two cores.
_LONG_MINUTES = 10
# What is replayed by default: blocks of 4 MiB on an axis of 4.
ONE_POD_EACH: dict[str, Any] = {
    "pods": ("v4:4x4x4", "v5e:4x4", "v5p:4x4x4", "v6e:4x4", "tpu7x:4x4x4"),
    "sizes": (16 << 20,),
}


def main(argv: Sequence[str]) -> int:
    """Runs what the flags ask for; the exit status says whether all was right."""
    if argv[1:]:
        raise FlagError(
            f"argument {argv[1]!r}", "there is no command or flag of that name", "see --help"
        )
    wanted = _settings()
    return _run(wanted, Screen(quiet=not devices.speaks()))


def _settings() -> Settings:
    for flag in (_JSON, _CSV, _PLOT):
        results.check_writable(flag.value, f"--{flag.name}")
    if _RESUME.value and not _JSON.value:
        raise FlagError(
            "--resume", "rows are kept from --json's file", "name it, as in the first run"
        )
    if _COMPILE_FOR.value and flags.FLAGS["compile_for"].present and not compiled.is_available():
        raise compiled.CompilerError(f"--compile_for: {compiled.INSTALL}")
    pods = tuple(map(_pod, _REPLAY.value or []))
    named = tuple(settings.parse_slice(t, "--compile_for") for t in _COMPILE_FOR.value or [])
    if pods and _COMPILE_FOR.value and flags.FLAGS["compile_for"].present:
        rule = "a replay compiles nothing"
        raise FlagError("--compile_for", rule, "leave out this or --replay")
    sizes = {**_SIZES, "simulated": "8K:512K:64x"} if _ALL.value else _SIZES
    wanted = selection.chosen(sizes, pods, ("bfloat16",) if _WIRE.value else ("float32",))
    narrow = settings.check_wires(_WIRE.value, wanted.dtypes)
    simulated = devices.kind() == "simulated" and not pods
    for name in _NOT_OVER_WIRES if _WIRE.value else ():
        if flags.FLAGS[name].value not in ([], flags.FLAGS[name].default):
            rule = "rows over wires are those of the library's choice, checked and in chains"
            raise FlagError(f"--{name} with --wire", rule, "leave one of them out")
    if _ALL.value and not simulated:
        raise FlagError("--all", "elsewhere than on simulated devices all is run", "leave it out")
    by_default = _FEW_TO_COMPILE_FOR if simulated and not _ALL.value else _TO_COMPILE_FOR
    topologies = named if _COMPILE_FOR.value is not None else tuple(by_default)
    for pod in pods:
        settings.check_axes_of(wanted.axes, replay_rows.mesh_axes(Machine.named(pod)), pod)
    if simulated:
        _check_simulable(wanted)
    if _PLOT.value:
        if simulated:
            rule = "simulated devices have no times to plot"
            raise FlagError("--plot", rule, "plot a model's, with --replay=v5e:4x4 or another pod")
        plots.check_installed()
    return dataclasses.replace(wanted, topologies=topologies, wires=narrow)


def _check_simulable(wanted: Settings) -> None:
    """Refuses sizes whose rows would each take longer than a run may without a warning."""
    most = _LONG_MINUTES * 60 // 5 * (16 << 20) // math.prod(wanted.mesh)
    if max(wanted.sizes) > most:
        rule = f"the interpreter takes minutes a row above {most >> 20} MiB on these devices"
        raise FlagError(
            f"--sizes with {max(wanted.sizes)}", rule, "name less, or a pod with --replay"
        )


def _pod(text: str) -> str:
    try:
        if text.endswith(".json"):
            Machine.load(text)
            return text
        return str(Machine.named(settings.parse_topology(text, "--replay")))
    except MachineError as error:
        raise FlagError("--replay", str(error), "write it like v5e:16x16 or v5p:4x4x4") from None


def _run(wanted: Settings, screen: Screen) -> int:
    mesh = devices.make_mesh(wanted.mesh)
    files = (_JSON.value, _CSV.value) if devices.speaks() else ("", "")
    environment = devices.environment(mesh)
    kept = Results(screen, environment, wanted.named(), *files, resume=_RESUME.value)
    try:
        if wanted.wires:
            _over_wires(kept, wanted, mesh)
        elif wanted.pods:
            _replay(kept, screen, wanted)
        else:
            _measure(kept, screen, wanted, mesh)
            _compile(kept, screen, wanted)
            if _REPLAY.value is None and devices.kind() == "simulated":
                _replay(kept, screen, on_pods(wanted))
                if not _ALL.value:
                    screen.say("\n--all runs larger sizes, and compiles for each generation.")
    except KeyboardInterrupt:
        if _JSON.value:
            screen.say(f"Interrupted. The same command with --resume goes on from {_JSON.value}.")
        return interrupt.STATUS
    if _PLOT.value and devices.speaks() and not plots.save(_PLOT.value, kept.parts, environment):
        screen.say(f"No row has a time, so {_PLOT.value} is not drawn.")
    screen.say()
    screen.say(kept.verdict)
    return int(kept.failed)


def on_pods(wanted: Settings) -> Settings:
    """One pod of each generation that has the axes, with the sizes that flags name."""
    sizes = wanted.sizes if selection.sizes_are_named() else ONE_POD_EACH["sizes"]
    pods = tuple(
        pod
        for pod in ONE_POD_EACH["pods"]
        if set(wanted.axes) <= set(replay_rows.mesh_axes(Machine.named(pod)))
    )
    return dataclasses.replace(wanted, pods=pods, sizes=sizes)


def _over_wires(kept: Results, wanted: Settings, mesh: Mesh) -> None:
    """Time beside error, over each wire and without."""
    tasks = wired_rows.plan(wanted)
    each, done = 1 + len(wanted.wires), kept.kept("wires")
    title = (
        "Over narrower wires. On pods: modelled, kernels by replay, XLA's passes by its cycles.\n"
        "% off: the largest error of any number, in percent of the result's largest."
    )
    rows = wired_rows.rows(tasks[done // each :], wanted, mesh)
    kept.collect("wires", itertools.islice(rows, done % each, None), each * len(tasks), title)


def _measure(kept: Results, screen: Screen, wanted: Settings, mesh: Mesh) -> None:
    """Verifies on the devices there are, and times real ones."""
    kind, chip = devices.kind(), mesh.devices.flat[0].device_kind
    shape = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    title = f"Measured: {mesh.size} x {chip}, mesh {shape}, over {','.join(wanted.axes)}"
    if kind == "simulated":
        title = (
            f"Simulated: {mesh.size} TPU devices in interpret mode, mesh {shape}, over "
            f"{','.join(wanted.axes)}. interp ms: the interpreter's time here, not a TPU's."
        )
    tasks = measure.plan(wanted)
    done = kept.kept("measured")
    minutes = sum(2 + mesh.size * task.size / (16 << 20) for task in tasks[done:]) / 60
    if kind == "simulated" and minutes > _LONG_MINUTES:
        screen.say(
            f"Simulating these {len(tasks) - done} rows takes something like {minutes:.0f} "
            "minutes; name fewer --sizes, --collective or --algorithm, or --devices=2, for less."
        )
    kept.collect("measured", measure.rows(tasks[done:], wanted, mesh), len(tasks), title)
    if wanted.check:
        screen.say(
            "size: bytes of the full array, all devices' blocks; count: elements of one block, of "
            "psum and ppermute of the operand.\n"
            "#wrong: elements that differ from numpy's result or from jax.lax's."
        )
    if kind != "simulated":
        time = "device time in a chain inside one program" if wanted.chain else "with dispatch"
        screen.say(f"time: {time}, median of {measure.timing.SAMPLES}.")
    if "xla" in wanted.backends and (options := devices.lax_options(mesh)):
        screen.say(f"lax's are compiled with {baseline.named(options)}.")


def _compile(kept: Results, screen: Screen, wanted: Settings) -> None:
    """Compiles for TPUs that are not there."""
    if not wanted.topologies or not devices.speaks():
        return
    screen.say()
    left = "" if compiled.is_available() else compiled.INSTALL
    if len(wanted.axes) > 1:
        left = "that is done over one axis, and --axis names several"
    if left:
        screen.say(f"Not compiled for TPUs that are not there: {left}.")
        return
    size = max(wanted.sizes) if selection.sizes_are_named() else compiled.SIZE
    title = (
        f"Compiled for TPUs that are not there, {columns.nbytes(size)} on one axis, ours and "
        "lax's between a producer and a consumer.\ntemp: memory beyond arguments and results; "
        f"program: what stands there besides the two.\n"
        f"lax's are compiled with {baseline.named(baseline.options('tpu', 'TPU v5e'))} on v5e, "
        "and elsewhere with those that are not for all-gathers."
    )
    tasks = compiled.plan(wanted, size)
    with contextlib.closing(compiled.rows(tasks[kept.kept("compiled") :])) as rows:
        kept.collect("compiled", rows, len(tasks), title)


def _replay(kept: Results, screen: Screen, wanted: Settings) -> None:
    """Runs the kernels' own DMA programs on modelled pods."""
    if not devices.speaks():
        return
    screen.say()
    tasks = replay_rows.wanted(wanted)
    title = (
        "Modelled, not measured: the kernels' own DMA programs on a model of the pod.\n"
        "bound: no schedule takes less. % of wire: the least time on the busiest link alone.\n"
        "sound: no deadlock, no count left over. Below 1 MiB times are good to 45%: they rest on\n"
        "launch, hop and DMA costs that nobody has measured alone."
    )
    rows = replay_rows.rows(tasks[kept.kept("replayed") :])
    kept.collect("replayed", rows, len(tasks), title)
