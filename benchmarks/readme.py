"""`readme`: the tables of README and benchmarks/README, from the library's and stored results.

Results lie beside this file, as `--json` writes them. After a change to kernels or to the choice of
algorithms, what is replayed and compiled (readme.json) is brought up to date by

    python -m benchmarks readme --recompute      # minutes

and what is measured (readme_gpus.json), on a host with GPUs and a process for each, by

    python -m benchmarks --collective=all_gather,psum_scatter,psum,all_to_all,ppermute \\
        --backend=nccl,xla --sizes=4K:256M:4x --iters=200 --json=benchmarks/readme_gpus.json
"""

import dataclasses
import difflib
import inspect
import itertools
import math
import operator
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags

import pallas_collectives
from benchmarks import compiled, devices, fused, replay_rows, results
from benchmarks.cases import CASES, Case, named
from benchmarks.results import Results, Saved
from benchmarks.rows import Compiled, Measured, Replayed
from benchmarks.settings import FlagError, Settings, check_no_arguments
from benchmarks.steps import keeping
from benchmarks.tables import Screen, grid
from pallas_collectives import catalogue
from pallas_collectives.__main__ import first_sentence
from pallas_collectives.backends import nccl
from pallas_collectives.replay import Machine, calibration
from pallas_collectives.topology import chips

_FOLDER = Path(__file__).resolve().parent
PAGES = (_FOLDER.parent / "README.md", _FOLDER / "README.md")
STORED = Path(__file__).with_name("readme.json")
GPUS = Path(__file__).with_name("readme_gpus.json")

_RECOMPUTE = flags.DEFINE_bool("recompute", False, "Replay and compile anew, for readme.json.")
_ONLY_CHECK = flags.DEFINE_bool("only_check", False, "Write nothing; 1 if a table is out of date.")

TOPOLOGIES = ("v4:2x2x1", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")
PODS = ("v5e:4x4", "v5e:16x16", "v5p:4x4x4", "v6e:4x4", "7x:4x4x4")
BLOCKS = (8 << 10, 4 << 20)  # bytes
# Pods with the axes that are communicated over, for small blocks and for several axes at once.
SMALL = (("v5e:16x16", "x"), ("v5e:8x8", "x"), ("v5p:16x4x4", "x"), ("7x:16x4x4", "x"))
SMALL_BLOCKS = (1 << 10, 4 << 10, 16 << 10, 64 << 10)
SEVERAL = (
    *(("v5e:4x4", "x,y"), ("v5e:16x16", "x,y"), ("v6e:4x4", "x,y")),
    *(("v5p:4x4x4", "x,y"), ("v5p:4x4x4", "x,y,z"), ("7x:4x4x4", "x,y")),
)
SEVERAL_BLOCKS = (8 << 10, 1 << 20)
PARTS = (("small", SMALL, SMALL_BLOCKS), ("several", SEVERAL, SEVERAL_BLOCKS))
# A choice, for lack of room: what most models call.
SHOWN = ("all_gather", "psum_scatter", "psum", "all_to_all")
MOST_EXCHANGING = 16  # devices; a replay of more that all send to all takes minutes
GPU_BLOCKS = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
NOT_RECOMPUTED = "(not recomputed)"  # of a collective that is newer than the stored rows
_DTYPE = "float32"


def main(argv: Sequence[str]) -> int:
    """Writes the tables into the pages, or says which are out of date."""
    check_no_arguments(argv)
    if _RECOMPUTE.value:
        recompute(Screen())
    before = [page.read_text() for page in PAGES]
    after = rendered(before, results.load(str(STORED)))
    for page, old, new in zip(PAGES, before, after, strict=True):
        if _ONLY_CHECK.value:
            for line in difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm=""):
                print(line)
        elif new != old:
            results.write(str(page), operator.methodcaller("write", new))
    changed = "out of date" if _ONLY_CHECK.value else "written anew"
    print(f"{len(TABLES)} tables, {'all current' if after == before else changed}")
    if any(NOT_RECOMPUTED in page for page in after):
        print(f"{NOT_RECOMPUTED}: python -m benchmarks readme --recompute replays these")
    return int(_ONLY_CHECK.value and after != before)


def rendered(pages: Sequence[str], saved: Saved) -> list[str]:
    """The pages with their tables between markers made anew.

    Raises:
      FlagError: a marker of an unknown table, or a table without markers.
    """
    seen = []

    def table(match: re.Match[str]) -> str:
        seen.append(match["name"])
        if match["name"] not in TABLES:
            rule = f"the tables are {', '.join(TABLES)}"
            raise FlagError(f"table {match['name']!r} in a README.md", rule, "name one of them")
        return f"{match['begin']}\n{TABLES[match['name']](saved)}\n{match['end']}"

    after = [_MARKED.sub(table, page) for page in pages]
    if missing := sorted(set(TABLES) - set(seen)):
        rule = "each table stands between markers"
        remedy = f"write <!-- table: {missing[0]} --> and <!-- end of table --> where it belongs"
        raise FlagError(f"no README.md has {', '.join(missing)}", rule, remedy)
    return after


_MARKED = re.compile(
    r"(?P<begin><!-- table: (?P<name>\w+)[^>]*-->)\n(?:.*?\n)??(?P<end><!-- end of table -->)",
    re.DOTALL,
)


def algorithms(_: Saved) -> str:
    """Collectives, algorithms and backends."""
    cells = []
    for record in catalogue.COLLECTIVES.values():
        functions = ", ".join(f"`{name}`" for name in record.functions)
        on_gpus = "yes" if hasattr(nccl, record.name) else "by lax"
        for i, algorithm in enumerate(record.algorithms):
            first, last = ("", "") if i else (functions, on_gpus)
            cells.append((first, f"`{algorithm.name}`", algorithm.sent, algorithm.steps, last))
    headers = ("function", "`algorithm=` on TPUs", "bytes per link and direction", "steps", "NCCL")
    return grid(headers, cells, (True,) * 5)


def tasks(pod: str, cases: Sequence[Case] = CASES) -> Iterator[replay_rows.Task]:
    """What is replayed on one pod, over its first axis."""
    (task, *_) = replay_rows.plan([pod], cases, [1])
    n = task.machine.shape[0]
    for case, block in itertools.product(cases, BLOCKS):
        yield from replay_rows.plan([pod], [case], [block * n], (_DTYPE,))


def tasks_over(
    pods: Sequence[tuple[str, str]], blocks: Sequence[int]
) -> Iterator[replay_rows.Task]:
    """What is replayed on pods over axes; of a psum an operand is as large as others' blocks."""
    for (pod, over), case, block in itertools.product(pods, named(*SHOWN), blocks):
        axes = tuple(over.split(","))
        (task, *_) = replay_rows.plan([pod], [case], [1], axes=axes)
        sizes = replay_rows.mesh_axes(task.machine)
        n = math.prod(sizes[axis] for axis in axes)
        if n <= MOST_EXCHANGING or catalogue.COLLECTIVES[case.op].phases:
            full = block * (1 if case.whole and pods is SMALL else n)
            yield from replay_rows.plan([pod], [case], [full], (_DTYPE,), axes=axes)


def small(saved: Saved) -> str:
    """Microseconds of small blocks, and the least of any schedule."""
    rows: list[Replayed] = saved.parts["small"]
    cells = []
    for pod, case in itertools.product([pod for pod, _ in SMALL], named(*SHOWN)):
        found = [row for row in rows if (row.machine, row.op) == (pod, case.name)]
        first = f"{pod}, {found[0].devices}" if case.name == SHOWN[0] else ""
        texts = [f"{row.time_us:.1f} ({row.bound_us:.1f})" for row in found]
        if case.whole:  # of less than a row for each device there is no replay
            pairs = zip(found, SMALL_BLOCKS, texts, strict=True)
            texts = [text if row.size == block else "–" for row, block, text in pairs]
        cells.append((first, _in_words(case), *texts))
    sizes = (f"{block >> 10} KiB" for block in SMALL_BLOCKS)
    headers = ("pod, devices on x", "", *sizes)
    return grid(headers, cells, (True,) * len(headers))


def _in_words(case: Case) -> str:
    return f"{case.name}, {'operand' if case.whole else 'block'} of"


def several(saved: Saved) -> str:
    """Microseconds and the least of small blocks, the share of the wire's time of large ones."""
    rows: list[Replayed] = saved.parts["several"]
    cells = []
    for pod, over in SEVERAL:
        here = [row for row in rows if (row.machine, row.over) == (pod, over)]
        texts = (_small_and_large(*(row for row in here if row.op == name)) for name in SHOWN)
        cells.append((f"{pod} {over}, {here[0].devices}", *texts))
    headers = ("pod, axes, devices", *SHOWN)
    return grid(headers, cells, (True,) * len(headers))


def _small_and_large(small: Replayed | None = None, large: Replayed | None = None) -> str:
    if small is None or large is None:
        return "–"
    if small.refused:
        return "lax's"
    return f"{small.time_us:.1f} ({small.bound_us:.1f}); {large.of_wire:.0f}%"


def replayed(saved: Saved) -> str:
    """Microseconds and the least of small blocks, the share of the wire's time of large ones; or
    that lax serves.
    """
    rows: list[Replayed] = saved.parts["replayed"]
    cells = []
    for pod in PODS:
        of_pod = [row for row in rows if row.machine == pod]
        found = {(row.op, row.size // (row.devices or 1)): row for row in of_pod}
        of_case = ([found.get((case.name, block)) for block in BLOCKS] for case in CASES)
        texts = (_small_and_large(*two) if all(two) else NOT_RECOMPUTED for two in of_case)
        cells.append((f"{pod}, {of_pod[0].devices}", *texts))
    headers = ("pod, devices on the axis", *(case.name for case in CASES))
    return grid(headers, cells, (True,) * len(headers))


def compiled_beside_lax(saved: Saved) -> str:
    """Ours and lax's programs and their memory, with the TPUs where these differ."""
    rows: list[Compiled] = saved.parts["compiled"]
    cells = []
    for op in dict.fromkeys(row.op for row in rows):
        of_op = [row for row in rows if row.op == op]
        ours = _grouped(of_op, lambda row: row.ops or "error")
        by_lax = _grouped(of_op, lambda row: row.lax_ops or "error")
        cells.append((op, ours, by_lax, _grouped(of_op, _memory)))
    return grid(("collective", "ours", "lax's", "MiB, ours / lax's"), cells, (True,) * 4)


def _memory(row: Compiled) -> str:
    if row.temp is None or row.lax_temp is None:
        return "error"
    return f"{row.temp / (1 << 20):.0f} / {row.lax_temp / (1 << 20):.0f}"


def _grouped(rows: Sequence[Compiled], text: Callable[[Compiled], str]) -> str:
    """What is said of all TPUs alike; or each text with the TPUs that it is said of."""
    chips: dict[str, list[str]] = {}
    for row in rows:
        chips.setdefault(text(row), []).append(row.topology.partition(":")[0].removeprefix("tpu"))
    if len(chips) == 1:
        return next(iter(chips))
    return "; ".join(f"{said} ({', '.join(names)})" for said, names in chips.items())


def measured(_: Saved) -> str:
    """Microseconds of NCCL called by us and of lax's, on GPUs."""
    saved = results.load(str(GPUS))
    rows: list[Measured] = saved.parts["measured"]
    us = {(row.op, row.count * 4, row.backend): row.time_us for row in rows}
    cells = [
        (
            _in_words(case),
            *(
                f"{us[case.name, block, 'nccl']:.0f} / {us[case.name, block, 'xla']:.0f}"
                for block in GPU_BLOCKS
            ),
        )
        for case in named(*dict.fromkeys(row.op for row in rows))
    ]
    about, versions = saved.environment, saved.environment["versions"]
    where = f"{about['devices']} × {about['chip']}, JAX {versions['jax']}, NCCL {versions['nccl']}"
    sizes = (
        f"{block >> 10} KiB" if block < 1 << 20 else f"{block >> 20} MiB" for block in GPU_BLOCKS
    )
    return grid((where, *sizes), cells, (True,) * (1 + len(GPU_BLOCKS)))


def published(_: Saved) -> str:
    """How near the model comes to published times, which of them it was fitted to, and how far
    small messages move with what is assumed.
    """
    errors = {point: point.replayed() / point.measured - 1 for point in calibration.POINTS}
    fitted = [point for point in errors if point.fits]
    series = {(point.source, point.machine) for point in fitted}
    between = [p for p in errors if not p.fits and (p.source, p.machine) in series]
    copied = [point for point in errors if point.by_xla]

    def said(points: Sequence[calibration.Point], text: Callable[[calibration.Point], str]) -> str:
        return "; ".join(f"{point.what} on {point.machine}{text(point)}" for point in points)

    nearer, further = _with_latencies(0.5), _with_latencies(1.5)
    text = (
        f"The model is held against {len(errors)} published times "
        "(`python -m pallas_collectives.replay.calibration`), all of all-gathers, on v5e and 7x "
        f"alone. {len(fitted)} of them fix one constant each: "
        f"{said(fitted, lambda p: f' ({p.fits})')}. {len(between)} lie between fitted points of "
        "their series, and the model meets them within "
        f"{max(abs(errors[p]) for p in between):.1%}: {said(between, lambda p: '')}. {len(copied)} "
        "include the copy that XLA's all-gather makes, which the model adds; the model is off by: "
        f"{said(copied, lambda p: f', {errors[p]:+.0%}')}. **Small messages are good to ±45%**: "
        "the latencies of hops and DMAs are assumed, and all launch costs but one. With all three "
        f"halved, an all-gather of 8 KiB on 16 v5e takes {1 - nearer:.0%} less time; with all "
        f"three half as long again, {further - 1:.0%} more. One more measurement would settle it: "
        "that all-gather of 8 KiB on 4 and on 16 devices of one ring. The two differ by six hops, "
        "each with its DMA; the rest is the launch. `certify` measures both on a TPU."
    )
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def _with_latencies(scale: float) -> float:
    """What a small all-gather takes with all latencies so many times as long, of what it does."""
    pod = "v5e:16x16"
    task = next(tasks(pod, named("all_gather")))
    names = ("hop_latency", "dma_latency", "launch_cost")
    assumed = {name: scale * getattr(task.machine.generation, name) for name in names}
    other = dataclasses.replace(task, machine=Machine.named(pod, **assumed))
    return replay_rows.run(other).time / replay_rows.run(task).time


def products(_: Saved) -> str:
    """What fused products hide, and how many times the longer of product and collective they take.

    From the rows that `python -m benchmarks fused --save` has kept.
    """
    order, shapes = list(chips.BY_NAME), [*map(fused.shape_of, fused.SHAPES)]
    rows = sorted(
        (row for row in fused.saved() if row.shape in shapes),
        key=lambda row: (order.index(row.where.partition(":")[0]), row.where, row.op),
    )
    cells = []
    for where, op in dict.fromkeys((row.where, row.op) for row in rows):
        found = {row.shape: row for row in rows if (row.where, row.op) == (where, op)}
        texts = (_hidden(found[shape]) if shape in found else "–" for shape in shapes)
        cells.append((where if op == fused.OPS[0] else "", op, *texts))
    headers = ("pod, axes", "", *("×".join(map(str, shape)) for shape in shapes))
    return grid(headers, cells, (True,) * len(headers))


def _hidden(row: fused.Row) -> str:
    return f"{100 * row.overlap:.0f}%; {row.fused / row.longer:.2f}"


# How many times as fast as XLA's tpu-inference's all_gather_matmul was on v6e-8, by M x N x K of
# all devices (published; measured).
PUBLISHED = {(2048, 51200, 5120): 1.53, (2048, 57344, 8192): 1.19, (4096, 51200, 5120): 1.09}
_PUBLISHED_ON = "v6e:2x4 x,y"


def published_products(_: Saved) -> str:
    """Gathers and products of published sizes, from the rows that `fused --save` has kept."""
    kept = {(row.where, row.op, row.shape): row for row in fused.saved()}
    cells = []
    for (rows, columns, depth), times in PUBLISHED.items():
        row = kept[_PUBLISHED_ON, fused.OPS[0], (rows // 8, depth, columns // 8)]
        apart, best = row.product + row.collective, min(row.fused, row.product + row.collective)
        size = f"{rows}×{columns}×{depth}"
        cells.append((size, f"{times:.2f}", f"{apart / best:.2f}", f"{row.least / best:.0%}"))
    headers = ("M × N × K", "published", "ours, modelled", "ours: share of the least time")
    return grid(headers, cells, (True,) * len(headers))


def steps(_: Saved) -> str:
    """Milliseconds of steps, from the rows that `python -m benchmarks step --save` has kept."""
    return keeping.table(keeping.load())


def packing(_: Saved) -> str:
    """What of those of `experts` is compute, and what its collectives cost."""
    return keeping.parts(keeping.load(), "experts")


def halves(_: Saved) -> str:
    """What of `tensor` two halves of its batch hide."""
    return keeping.ways(keeping.load(), keeping.HALVES)


def narrow(_: Saved) -> str:
    """What steps take over an int8 wire."""
    return keeping.ways(keeping.load(), keeping.NARROW)


def names(_: Saved) -> str:
    """The public names, a line each, linked to their source."""
    root, cells = Path(pallas_collectives.__file__).parents[1], []
    for name in pallas_collectives.PUBLIC:
        found = getattr(pallas_collectives, name)
        file = Path(inspect.getsourcefile(inspect.unwrap(found)) or "").relative_to(root)
        path = file.parent if file.name == "__init__.py" else file
        cells.append((f"[`{name}`]({path.as_posix()})", first_sentence(found)))
    return grid(("name", "what it is"), cells, (True, True))


TABLES: dict[str, Callable[[Saved], str]] = {
    "algorithms": algorithms,
    "published": published_products,
    "names": names,
    "replayed": replayed,
    "small": small,
    "several": several,
    "calibration": published,
    "compiled": compiled_beside_lax,
    "measured": measured,
    "products": products,
    "steps": steps,
    "packing": packing,
    "halves": halves,
    "narrow": narrow,
}


def recompute(screen: Screen) -> None:
    """Replays and compiles for readme.json.

    Raises:
      CompilerError: libtpu is not installed, or failed.
    """
    if not compiled.is_available():
        raise compiled.CompilerError(compiled.INSTALL)
    devices.prepare(2)
    about: dict[str, Any] = devices.environment(devices.make_mesh((2,)))
    draft = f"{STORED}.new"  # what is stored stays until all is there
    kept = Results(screen, about, {}, draft)
    on_pods = [task for pod in PODS for task in tasks(pod)]
    kept.collect("replayed", replay_rows.rows(on_pods), len(on_pods))
    for part, pods, blocks in PARTS:
        of_part = [*tasks_over(pods, blocks)]
        kept.collect(part, replay_rows.rows(of_part), len(of_part))
    wanted = Settings(tuple(CASES), dtypes=(_DTYPE,), topologies=TOPOLOGIES)
    for_tpus = compiled.plan(wanted)
    kept.collect("compiled", compiled.rows(for_tpus), len(for_tpus))
    os.replace(draft, STORED)
    screen.say(kept.verdict)
