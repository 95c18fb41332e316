"""Every kind of picture once, drawn from replays, with a line on what to see in it."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import pallas_collectives as pc
from benchmarks import plots, replay_rows, wired_rows
from benchmarks.cases import named
from benchmarks.rows import Stepped
from benchmarks.settings import FlagError, Settings
from benchmarks.steps import lanes
from pallas_collectives.replay import Machine, Report, bound, draw, replay, steps
from pallas_collectives.verify import page

_NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
_FRAMES = 16  # of a film


class Picture(NamedTuple):
    """A kind of picture.

    Attributes:
      name: the name of its file.
      kind: the function that draws it.
      see: what to see.
      put: draws it into a file.
    """

    name: str
    kind: str
    see: str
    put: Callable[[Path], object]


def page_of(folder: Path, stem: str) -> str:
    """The gallery in Markdown; its pictures are written into the folder, named after the stem.

    Raises:
      FlagError: the notebooks, whose pictures are among them, are not there.
    """
    lines = [
        "# Gallery",
        "",
        "Every kind of picture once. All times are modelled: what is drawn are replays.",
        "A colour means the same everywhere: a device and what comes from it has the device's; "
        "slate is compute, ochre a link and what is on it, grey a wait, crimson time that is lost. "
        "Dotted black lines are bounds.",
        "",
    ]
    for picture in pictures():
        file = folder / f"{stem}-{picture.name}"
        picture.put(file)
        shown = "" if file.suffix == ".html" else "!"
        lines += [f"## `{picture.kind}`", "", picture.see, ""]
        lines += [f"{shown}[{picture.kind}]({file.name})", ""]
    return "\n".join(lines)


def pictures() -> Iterator[Picture]:
    """All of them."""
    ring, grid = Machine.named("v6e:8", wraps=(True, False)), Machine.named("v5e:4x4")

    def along(x: jax.Array) -> jax.Array:
        return pc.all_gather(x, "x", tiled=True, backend="pallas")

    gather = replay(_over(along, ring), _rows(1), machine=ring, symmetric=False)
    pod = replay(_over(along, grid), _rows(16), machine=grid, symmetric=False)
    yield Picture(
        "sizes.png",
        "benchmarks --plot",
        "A collective's bandwidth and time against size, a line for each algorithm or pod. On the "
        "left of the time it is flat: latency. The dotted line is the bound: no line crosses it.",
        _against_size,
    )
    yield Picture(
        "wires.png",
        "benchmarks --wire --plot",
        "Time against error over narrower wires, each a point. The dotted line is the time without "
        "one: a wire there gains nothing.",
        _error_against_time,
    )
    yield Picture(
        "step.png",
        "benchmarks step --plot",
        "A model's step: the core's work, and beside it the gather. Crimson is what the core waits "
        "for: where the gather is longer than the product beside it.",
        _step,
    )
    yield Picture(
        "algorithms.png",
        "replay.draw.time_against_size",
        "Where two algorithms cross: below that size one is the faster, above it the other.",
        _algorithms,
    )
    yield Picture(
        "lanes.png",
        "replay.draw.gantt",
        "What each device waits for and copies, and what each link carries. Gaps in the links' "
        "rows are time in which a better schedule could send.",
        lambda path: draw.gantt(gather).savefig(path),
    )
    yield Picture(
        "links.png",
        "replay.draw.link_heat",
        "Which links are at work. A gather along one axis leaves those of the other dark: they are "
        "what a gather over both could use.",
        lambda path: draw.link_heat(pod).savefig(path),
    )
    yield Picture(
        "ring.gif",
        "replay.draw.ring_animation",
        "Copies on their way round, both ways, each in the colour of the device that sends it.",
        lambda path: draw.ring_animation(gather, frames=_FRAMES).save(path, writer="pillow"),
    )
    yield Picture(
        "verdict.html",
        "pallas_collectives verify --html",
        "A verdict as a page, with each mesh's time line; the pointer over a bar says what it is.",
        _verdict,
    )
    yield from _of_notebooks()


def _of_notebooks() -> Iterator[Picture]:
    if not _NOTEBOOKS.is_dir():
        rule = "it shows the notebooks' pictures too, and there is no folder notebooks/ here"
        raise FlagError("--gallery", rule, "run it from a clone")
    if str(_NOTEBOOKS) not in sys.path:
        sys.path.append(str(_NOTEBOOKS))
    drawn, films, lesson = map(importlib.import_module, ("pictures", "films", "lesson"))

    def saved(figure: Callable[[], Any]) -> Callable[[Path], object]:
        return lambda path: figure().savefig(path)

    def filmed(film: Callable[[], Any]) -> Callable[[Path], object]:
        return lambda path: path.write_bytes(film().data)

    n = 4
    whose = np.tile(np.arange(n), (n, 1))
    before = np.where(whose == whose.T, whose, -1)
    way: Any = {"backend": "pallas", "algorithm": "unidirectional"}
    # Rows for a block in one part.
    around = lesson.replayed(lambda x: pc.all_gather(x, "x", tiled=True, **way), n, (8, 128))
    summed = lesson.replayed(lambda x: pc.psum_scatter(x, "x", tiled=True, **way), 6, (48, 128))
    sent = lesson.replayed(lambda x: pc.ppermute(x, "x", [(0, 2), (2, 1)]), n, (512, 128))
    yield Picture(
        "grid.png",
        "notebooks: pictures.grid",
        "Who holds whose blocks: a row is a device, a colour the device that a block came from.",
        saved(lambda: drawn.grid({"before": before, "after": whose}, x="block")),
    )
    yield Picture(
        "copies.png",
        "notebooks: pictures.space_time",
        "Copies from line to line. Filled dot: all has left; hollow: all is there. They are two "
        "semaphores, on two devices, at two times.",
        saved(lambda: drawn.space_time(sent, "two copies between four devices")),
    )
    yield Picture(
        "slots.png",
        "notebooks: pictures.slots",
        "A slot is filled again only after its credit: no bar begins before the triangle that "
        "allows it.",
        saved(lambda: drawn.slots(summed, 1)),
    )
    yield Picture(
        "tour.png",
        "notebooks: pictures.tour",
        "A ring over chips: an arrow that bends is a hop over more than one link.",
        saved(lambda: _tour(drawn)),
    )
    yield Picture(
        "overlap.png",
        "notebooks: pictures.overlap",
        "A product and the gather before it, one after the other and in one kernel: below, the "
        "core works while the wire is at work above it.",
        saved(lambda: drawn.overlap(_products(lesson))),
    )
    yield Picture(
        "engines.png",
        "notebooks: pictures.lanes",
        "The same step as above, as a notebook draws it.",
        saved(lambda: drawn.lanes({"two products, and a gather beside the first": _course()})),
    )
    yield Picture(
        "gather.png",
        "notebooks: films.gather_film",
        "Each device's row fills; every step each link carries one block.",
        filmed(lambda: films.gather_film(around, 8, "one way round", frames=_FRAMES)),
    )
    yield Picture(
        "scatter.png",
        "notebooks: films.scatter_film",
        "A sum takes up a term on every device that it passes, and ends where its frame says.",
        filmed(lambda: films.scatter_film(summed, "reduce-scatter", frames=_FRAMES)),
    )
    square = Machine.named("v6e:3x3", wraps=(True, True))
    both = replay(
        _over(lambda x: pc.all_gather(x, ("x", "y"), tiled=True, algorithm="torus"), square),
        _rows(1),
        machine=square,
        symmetric=False,
    )
    yield Picture(
        "torus.png",
        "notebooks: films.torus_film",
        "Half of each block goes along x first, half along y: all links are at work at all times.",
        filmed(lambda: films.torus_film(both, (3, 3), 64, frames=_FRAMES)),
    )


def _tour(drawn: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4.5, 2.8), layout="constrained")
    by_number = [divmod(device, 4) for device in range(8)]
    drawn.tour(axes, by_number, "8 devices in the order of their numbers")
    return figure


def _products(lesson: Any) -> dict[str, tuple[Report, float]]:
    """A gather and then its product, and both as one kernel; with the time of what follows."""
    n, rows, depth, columns = 4, 512, 1024, 4096
    shapes = (rows, depth), (depth, columns)
    apart = lesson.replayed(lambda x, w: pc.all_gather(x, "x", tiled=True), n, *shapes)
    fused = lesson.replayed(
        lambda x, w: pc.all_gather_matmul(x, w, "x", algorithm="fused"), n, *shapes
    )
    product = 2 * n * rows * depth * columns / lesson.ring_of(n).generation.matrix_rate
    return {"gather, then multiply": (apart, product), "all_gather_matmul": (fused, 0.0)}


def _over(body: Callable[[Any], Any], machine: Machine) -> Callable[..., Any]:
    """What stands inside shard_map, on a mesh laid on a machine's torus as it is."""
    everywhere = PartitionSpec()
    mesh = machine.mesh(replay_rows.mesh_axes(machine))
    return jax.shard_map(
        body, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )


def _rows(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((64 * count, 1024), np.float32)


def _against_size(path: Path) -> None:
    cases = named("all_gather")
    tasks = replay_rows.plan(["v5e:4x4", "v5p:4x4x4"], cases, [16 << 10, 256 << 10, 4 << 20])
    plots.save(str(path), {"replayed": list(replay_rows.rows(tasks))}, {})


def _error_against_time(path: Path) -> None:
    cases = named("psum_scatter")
    pods, sizes = ("v5e:16", "v6e:4x4"), (4 << 20,)
    wires = ("int8", "float8_e4m3fn")
    asked = Settings(cases, dtypes=("bfloat16",), wires=wires, pods=pods, sizes=sizes)
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    plots.save(str(path), {"wired": list(wired_rows.rows(wired_rows.plan(asked), asked, mesh))}, {})


def _algorithms(path: Path) -> None:
    ring = Machine.named("v5p:8x1x1", wraps=(True, False, False))
    sizes = [4 << 10, 64 << 10, 1 << 20]

    def seconds(algorithm: str, size: int) -> float:
        total = _over(lambda x: pc.psum(x, "x", backend="pallas", algorithm=algorithm), ring)
        operand = jax.ShapeDtypeStruct((size // 512, 128), np.float32)
        return replay(total, operand, machine=ring).time

    times = {name: [seconds(name, size) for size in sizes] for name in ("ring", "one_shot")}
    least = [bound("all_reduce", ring, np.arange(8)[None], size / 8).time for size in sizes]
    draw.time_against_size(
        sizes, times, least, "Small sums of 8 x v5p: one shot. Large ones: the ring"
    ).savefig(path)


def _course() -> steps.Course:
    """Two products of a step, and the gather of the second one's weights beside the first."""
    pod = Machine.named("v6e:4x4")
    places = pod.default_placement(16)
    function = _over(lambda x: pc.all_gather(x, ("x", "y"), tiled=True, backend="pallas"), pod)
    weights = jax.ShapeDtypeStruct((2048, 1024), np.float32)
    gather = steps.program(function, weights, machine=pod, placement=places)
    parts: list[steps.Part] = [
        steps.Launch("gather", "gather", "SparseCore", gather),
        steps.Compute("first product", 4e-4),
        steps.Await("gather"),
        steps.Compute("second product", 4e-4),
    ]
    return steps.run(parts, pod, places)


def _step(path: Path) -> None:
    course = _course()
    kinds = {steps.Compute: "compute", steps.Await: "exposed", steps.Launch: "collective"}
    spans = [
        (s.engine, kinds[type(course.parts[s.part])], "", 1e6 * s.begin, 1e6 * s.end)
        for s in course.spans
    ]
    waits = sum(end - begin for _, kind, _, begin, end in spans if kind == "exposed")
    row = Stepped(
        op="two products", topology="v6e:4x4", under="override", type="float32",
        time_us=1e6 * course.time, exposed_us=waits, spans=spans,
    )  # fmt: skip
    lanes.save(str(path), [row])


def _verdict(path: Path) -> None:
    def gather(block: jax.Array) -> jax.Array:
        return pc.all_gather(block, "x", tiled=True)

    path.write_text(page.of(pc.verify.check(gather, "f32[64,128]", devices=(2, 4))))
