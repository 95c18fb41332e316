"""`step`: a model's step, compiled by the real TPU compiler: which collectives the core waits for.

Each program is compiled for each topology three times: with lax's collectives, under
`override_lax()`, and under `override_lax(everything=True)` ("forced"). XLA's scheduled program says
what runs beside what, and how many cycles the core's own work takes; how long a collective takes is
the replay's. So all times here are modelled, none is measured. No TPU is needed.

--program=package.module:function names a function of (devices, form) that returns a
`benchmarks.steps.programs.Program`: what one device runs, its arguments' shapes, and mesh axes.
"""

import itertools
from collections.abc import Sequence

from absl import flags

from benchmarks import compiled, devices, plots, results, settings, tables
from benchmarks import sweep as sweep  # which defines --json and --plot
from benchmarks.results import Results
from benchmarks.rows import Stepped
from benchmarks.settings import FlagError
from benchmarks.steps import compiling, lanes, learning, programs
from benchmarks.steps.programs import Form
from benchmarks.tables import Screen
from pallas_collectives.topology import chips

_SHARED = ("json", "plot")  # flags of `sweep`
for _flag in _SHARED:
    flags.declare_key_flag(_flag, flags.FLAGS)
_TOPOLOGY = flags.DEFINE_list(
    "topology",
    ["v4:2x2x2", "v5e:4x4", "v5p:2x2x2", "v6e:4x4", "tpu7x:2x2x1"],
    "TPUs to compile for without having them.",
)
_PROGRAM = flags.DEFINE_list(
    "program", ["fsdp_tensor"], "Built-in ones, or package.module:function."
)
_PASS = flags.DEFINE_list("pass", ["gradient"], "forward, gradient, or both with a comma.")
_LAYERS = flags.DEFINE_list("layers", ["scan"], "scan, unrolled, or both with a comma.")
_EACH = flags.DEFINE_bool("each", True, "Print each program's collectives.")
_LEARN = flags.DEFINE_bool(
    "learn", False, "Only learn anew what XLA overlaps, for the library's choice (overlaps.json)."
)


def main(argv: Sequence[str]) -> int:
    """Compiles what the flags ask for; 1 if something did not compile."""
    if argv[1:]:
        raise FlagError(f"argument {argv[1]!r}", "there are only flags", "see --help")
    if not compiled.is_available():
        raise FlagError("step", "libtpu is not installed", "`pip install -e '.[tpu]'`")
    where = [_topology(text) for text in _TOPOLOGY.value]
    for name in _PROGRAM.value:
        programs.named(name)
    forms = [
        Form(each == "gradient", layers == "unrolled")
        for each, layers in itertools.product(
            _named(_PASS.value, "pass", ("forward", "gradient")),
            _named(_LAYERS.value, "layers", ("scan", "unrolled")),
        )
    ]
    screen = Screen()
    if _LEARN.value:
        screen.say(learning.write(where))
        return 0
    json_file, plot = map(_checked, _SHARED)
    about = {"topologies": where, "programs": _PROGRAM.value, "forms": list(map(str, forms))}
    devices.prepare(1)
    kept = Results(screen, devices.environment(devices.make_mesh((1,))), about, json_file)
    tasks = compiling.plan(where, _PROGRAM.value, forms)
    kept.collect("steps", compiling.rows(tasks), len(tasks) * len(compiling.UNDER))
    kept.show("steps", "Modelled, not measured: XLA's cycles, and the replay of collectives.")
    rows = [row for row in kept.parts["steps"] if isinstance(row, Stepped)]
    if _EACH.value:
        for row in rows:
            _show(screen, row)
    if plot:
        lanes.save(plot, rows)
    return int(kept.failed)


def _checked(flag: str) -> str:
    """The path that --json or --plot names, checked."""
    path = str(flags.FLAGS[flag].value)
    if path and flag == "plot":
        plots.check_installed()
    return results.check_writable(path, f"--{flag}")


def _topology(text: str) -> str:
    name = settings.parse_topology(text, "--topology")
    if chips.slice_of(name) is None:
        rule = f"its generation is one of {', '.join(chips.BY_NAME)}"
        raise FlagError(f"--topology={name}", rule, "write it like v5e:4x4")
    return name


def _named(values: Sequence[str], flag: str, known: Sequence[str]) -> Sequence[str]:
    for value in values:
        if value not in known:
            raise FlagError(f"--{flag}={value}", f"it is one of {', '.join(known)}", "name one")
    return values


_HEADERS = (
    *("collective", "MiB", "devices", "by", "engine", "times"),
    *("us each", "exposed us", "kcycles beside", "of"),
)


def _show(screen: Screen, row: Stepped) -> None:
    if row.error:
        return
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
            f"{of['exposed_us']:.0f}",
            f"{of['beside'] / max(1, of['times']) / 1000:.0f}",
            of["beside_what"] or "-",
        )
        for of in row.collectives
    ]
    is_text = [name in ("collective", "by", "engine", "of") for name in _HEADERS]
    screen.say(tables.grid(_HEADERS, cells, is_text))
