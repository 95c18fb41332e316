"""`step`: a model's step, compiled by the real TPU compiler: which collectives the core waits for.

Each program is compiled for each topology three times: with lax's collectives, under
`override_lax()`, and under `override_lax(everything=True)` ("forced"); --under names some of these,
and wires, as int8, over which functions then send where `override_lax(wire=...)` takes it.
XLA's scheduled program says what runs beside what, and how many cycles the core's own work takes; a
replay of the whole step says what collectives take. All these times are modelled, not measured. No
TPU is needed.

"Exposed" is what collectives cost the core: it "waits" for them, and its "packing" is what it
computes for them alone, to fill, lay out and move their buffers and to reckon their tables, by one
rule for lax's and ours (`steps.packing`). "Hidden" is what they take beside the rest of its work.

"Hideable" is the most of it that the core's work could hide in any order of the program, by its
data dependencies (`steps.bound`): what is awaited at once has nothing beside it.

On TPUs and GPUs the programs also run, under all of --under but "forced": the time of a step by the
clock, and what is exposed by the profiler.

By default one program is compiled for one topology, which takes about a minute; a line at the end
says what is left out. A gradient's program takes a minute or more for each of --under.

--program=package.module:function names a function of (devices, form) that returns a
`benchmarks.steps.programs.Program`: what one device runs, its arguments' shapes, and mesh axes.
"""

import itertools
from collections.abc import Sequence

import jax
from absl import flags

from benchmarks import compiled, devices, plots, results, settings, tables
from benchmarks import fused as fused  # which defines --save
from benchmarks import sweep as sweep  # which defines --json and --plot
from benchmarks.results import Results
from benchmarks.rows import Stepped
from benchmarks.settings import FlagError
from benchmarks.steps import compiling, keeping, lanes, learning, programs, running
from benchmarks.steps.programs import Form
from benchmarks.tables import Screen

_FILES = ("json", "plot")
for _flag in (*_FILES, "save"):
    flags.declare_key_flag(_flag, flags.FLAGS)
flags.FLAGS["plot"].help = (  # sweep's own is of other pictures
    "PNG of each program's time line as lanes: the core's work and waits, and what runs beside it."
)
_TOPOLOGIES = ("v4:2x2x2", "v5e:4x4", "v5p:2x2x2", "v6e:4x4", "tpu7x:2x2x1")
_PASSES, _LAYOUTS = ("forward", "gradient"), ("scan", "unrolled")
_TOPOLOGY = flags.DEFINE_list(
    "topology", ["v6e:2x2"], f"TPUs to compile for without having them: {', '.join(_TOPOLOGIES)}..."
)
_PROGRAM = flags.DEFINE_list(
    "program",
    ["fsdp"],
    f"Built-in ones ({', '.join(programs.BUILT_IN)}), or package.module:function.",
)
_PASS = flags.DEFINE_list("pass", ["forward"], "forward, gradient, or both with a comma.")
_LAYERS = flags.DEFINE_list("layers", ["scan"], "scan, unrolled, or both with a comma.")
_UNDER = flags.DEFINE_list(
    "under",
    list(compiling.UNDER),
    f"Whose collectives: {', '.join(compiling.UNDER)}; or a wire: {', '.join(compiling.WIRES)}.",
)
_EACH = flags.DEFINE_bool("each", True, "Print each program's collectives.")
_LEARN = flags.DEFINE_bool(
    "learn", False, "Only learn anew what XLA overlaps, for the library's choice (overlaps.json)."
)


def main(argv: Sequence[str]) -> int:
    """Compiles what the flags ask for; 1 if something did not compile."""
    settings.check_no_arguments(argv)
    compiles = compiled.is_available()
    where = [settings.parse_slice(text, "--topology") for text in _TOPOLOGY.value]
    for name in _PROGRAM.value:
        programs.named(name)
    forms = [
        Form(each == "gradient", layers == "unrolled")
        for each, layers in itertools.product(
            _named(_PASS.value, "pass", _PASSES), _named(_LAYERS.value, "layers", _LAYOUTS)
        )
    ]
    under = _named(_UNDER.value, "under", (*compiling.UNDER, *compiling.WIRES))
    screen = Screen()
    if _LEARN.value:
        _need_compiler(compiles)
        screen.say(learning.write(where))
        return 0
    json_file, plot = map(_checked, _FILES)
    if flags.FLAGS.save:
        _need_compiler(compiles)
        keeping.check()
    about = {"topologies": where, "programs": _PROGRAM.value, "forms": list(map(str, forms))}
    devices.prepare(1)
    runs = devices.kind() != "simulated"
    if not runs or flags.FLAGS["topology"].present or plot:
        _need_compiler(compiles)
    mesh = devices.make_mesh((jax.device_count() if runs else 1,))
    kept = Results(screen, devices.environment(mesh), about, json_file)
    unders = [each for each in under if each != "forced"]  # which devices need not run
    if runs and unders:
        count = len(_PROGRAM.value) * len(forms) * len(unders)
        for name, form in itertools.product(_PROGRAM.value, forms):
            programs.check(name, jax.device_count(), form)
        title = "Measured: a step by the clock, and what is exposed by the profiler."
        kept.collect("ran", running.rows(_PROGRAM.value, forms, unders), count, title)
    if compiles:
        _compile(screen, kept, compiling.plan(where, _PROGRAM.value, forms, under), plot)
    if left := _left_out(where):
        screen.say(f"Left out: {left}.")
    return int(kept.failed)


def _need_compiler(is_there: bool) -> None:
    if not is_there:
        raise FlagError("step", "libtpu is not installed", "`pip install -e '.[tpu]'`")


def _compile(screen: Screen, kept: Results, tasks: Sequence[compiling.Task], plot: str) -> None:
    title = "Modelled, not measured: XLA's cycles, and the replay of collectives."
    made = compiling.rows(tasks)
    made = keeping.saved(made) if flags.FLAGS.save else made
    kept.collect("steps", made, sum(len(task.under) for task in tasks), title)
    rows = [row for row in kept.parts["steps"] if isinstance(row, Stepped)]
    there = [row for row in rows if not row.error]
    if there:
        screen.say(_LEGEND)
    if there and _EACH.value:
        for row in there:
            _show(screen, row)
        screen.say(_LEGEND_OF_EACH)
    if plot:
        lanes.save(plot, rows)


def _left_out(where: Sequence[str]) -> str:
    """What flags would add to what was asked for."""
    whole = (
        ("topology", where, _TOPOLOGIES),
        ("program", _PROGRAM.value, tuple(programs.BUILT_IN)),
        ("pass", _PASS.value, _PASSES),
        ("layers", _LAYERS.value, _LAYOUTS),
        ("under", _UNDER.value, tuple(compiling.UNDER)),
    )
    missing = [(name, [v for v in known if v not in asked]) for name, asked, known in whole]
    return "; ".join(f"--{name}={','.join(values)}" for name, values in missing if values)


def _checked(flag: str) -> str:
    """The path that --json or --plot names, checked."""
    path = str(flags.FLAGS[flag].value)
    if path and flag == "plot":
        plots.check_installed()
    return results.check_writable(path, f"--{flag}")


def _named(values: Sequence[str], flag: str, known: Sequence[str]) -> Sequence[str]:
    for value in values:
        if value not in known:
            raise FlagError(
                f"--{flag}={value}", f"it must be one of {', '.join(known)}", "name one"
            )
    return values


_LEGEND = """\
under: override is override_lax(), forced is override_lax(everything=True).
exposed: waits and packing, which is work for collectives alone; hideable: the most to be hidden.
beside compute: how many calls run while the core does other work, of how many."""
_LEGEND_OF_EACH = """\
us each: one call; waits us: the core's wait for all of them together.
kcycles beside: the core's work during one call, in thousands of cycles; of: the longest of it."""
_HEADERS = (
    *("collective", "MiB", "devices", "by", "engine", "times"),
    *("us each", "waits us", "kcycles beside", "of"),
)


def _show(screen: Screen, row: Stepped) -> None:
    screen.say()
    screen.say(f"{row.topology}, {row.op}, {row.under}:")
    cells = [
        (
            of["op"],
            f"{of['nbytes'] / 2**20:.2f}",
            str(of["devices"] or "-"),
            of["by"],
            of["engine"],
            str(of["times"]),
            f"{of['each_us']:.0f}",
            f"{of['waits_us']:.0f}",
            f"{of['beside'] / max(1, of['times']) / 1000:.0f}",
            of["beside_what"] or "-",
        )
        for of in row.collectives
    ]
    is_text = [name in ("collective", "by", "engine", "of") for name in _HEADERS]
    screen.say(tables.grid(_HEADERS, cells, is_text))
