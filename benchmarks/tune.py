"""Writes the table of times by which algorithms are chosen: `python -m benchmarks tune`.

On a TPU VM or a host with GPUs it measures the candidates there, and writes a table for these chips
and this JAX version (`pallas_collectives.tuning.tables`). The library takes it from the environment
variable PALLAS_COLLECTIVES_TUNING or from `pallas_collectives.tuning.use_table`.

On a machine with neither nothing can be measured, and the library goes by the table that comes with
it. `--model` makes that one anew: kernels replayed on modelled pods.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from benchmarks import devices, interrupt, measure, replay_rows
from benchmarks.cases import CASES, Case
from benchmarks.results import check_writable
from benchmarks.rows import Measured
from benchmarks.settings import MOST_RUNS, FlagError, Settings
from pallas_collectives import catalogue
from pallas_collectives.backends import canonical, counters, fastest
from pallas_collectives.backends.plans import WirePlan
from pallas_collectives.catalogue.records import (
    JUMPS,
    LINE,
    NEIGHBOURS,
    ON_SEVERAL,
    RING,
    TORUS,
    Collective,
)
from pallas_collectives.errors import (
    AlgorithmError,
    CollectiveError,
    VmemError,
    WireError,
)
from pallas_collectives.replay import GENERATIONS, Generation, Machine, MachineError
from pallas_collectives.topology import chips, placement
from pallas_collectives.tuning import tables
from pallas_collectives.tuning.tables import PACKED, Entry, Table
from pallas_collectives.wires import Wire

# Groups that are modelled, over one axis and over several: how they lie, and of how many devices.
_ON_ONE_AXIS = (("line", (2, 3, 4, 8)), ("ring", (4, 8, 16)))
_SMALL = ("2x2 grid", "2x4 grid")
_ON_TWO = (*_SMALL, "4x4 grid", "4x16 cylinder", "8x16 cylinder", "16x16 torus")
_ON_THREE = (
    *_SMALL,
    *("4x4 torus", "8x8 torus", "2x2x2 grid", "2x2x4 grid", "4x4x4 torus", "4x4x8 torus"),
)
# The two devices of a chip are one more axis; over the others both do the same, each with its own.
_ON_FOUR = (
    *(*_SMALL, "2x2x2 grid", "2x2x4 grid", "2x2x2x2 grid", "2x4x4x4 torus"),
    *("4x4 torus", "4x4x4 torus"),
)
# Bytes of one block; of an all-reduce, which is cut into blocks, of the operand.
BLOCK_BYTES = (4 << 10, 32 << 10, 256 << 10, 2 << 20)
# Packed sums of 4 MiB along an axis would be 25% off on the line through 2 and 16: they are cut
# differently. Of several axes 2 and 4 take as long, so that the line through 4 would be too steep.
OPERAND_BYTES = (*BLOCK_BYTES, 4 << 20, 16 << 20, 64 << 20)
# Of what each device has something of its own in for each other, so much is modelled at the most:
# the time of more is on the line through the last two.
MOST_OPERAND_BYTES = 128 << 20
# In VMEM some more is modelled than is chosen there (`choice.VMEM_UP_TO_BYTES`).
MOST_IN_VMEM = 8 << 20
# Bytes of the full array, where they are measured.
FULL_BYTES = tuple(64 << 10 << 3 * i for i in range(5))
DTYPE = "float32"
WIRE = "int8"  # of what is packed; where float8 takes longer, `wire_ways.seconds_to_pack` says so


def main(argv: Sequence[str]) -> int:
    """Runs what the arguments ask for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", action="store_true", help="replay on modelled pods instead")
    parser.add_argument(
        "--add", action="store_true", help="with --model: replay only what the file lacks"
    )
    parser.add_argument(
        "--renew",
        metavar="NAME",
        help="with --add: replay anew, besides, a collective, an algorithm, or what is 'packed'",
    )
    parser.add_argument(
        "--machine", type=Path, help="with --model: a machine file, for its generation and figures"
    )
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--iters", type=int, help="collectives in one timed chain; 20 by default")
    wanted = parser.parse_args(argv)
    if why := _without_sense(wanted):
        parser.error(why)
    try:
        if wanted.model:
            measured_on = Machine.load(wanted.machine).generation if wanted.machine else None
            path = wanted.out or tables.MODELLED
            known = tables.load(path) if wanted.add else None
            if known and wanted.renew:
                known = without(known, wanted.renew)
            _write(modelled(known, measured_on), path)
            return 0
        return _measure(wanted.out, wanted.iters or 20)
    except (CollectiveError, MachineError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return interrupt.STATUS


def _without_sense(wanted: argparse.Namespace) -> str:
    """What is wrong with the arguments: value, rule and remedy; "" if nothing is."""
    if wanted.out is not None:
        try:
            check_writable(str(wanted.out), "--out")
        except FlagError as error:
            return str(error)
    if wanted.iters is not None and not 1 <= wanted.iters <= MOST_RUNS:
        return f"--iters={wanted.iters}: a chain has 1 to {MOST_RUNS} collectives; name as many"
    if wanted.iters is not None and wanted.model:
        return "--iters: a model measures nothing; leave out this or --model"
    if wanted.add and not wanted.model:
        return "--add: what is measured is measured anew; leave it out, or add --model"
    if wanted.renew and not wanted.add:
        return "--renew: without --add all is replayed; leave it out, or add --add"
    if wanted.machine and not wanted.model:
        return "--machine: times are measured on the chips that are here; add --model"
    if wanted.machine and not wanted.out:
        return "--machine: the package's own table has no place for it; name an --out"
    return ""


# Modelled ---------------------------------------------------------------------------------------


def modelled(known: Table | None = None, measured_on: Generation | None = None) -> Table:
    """What `replay` says of every candidate on every TPU generation, or on that one alone whose
    figures were measured; what is known stays.
    """
    entries: list[Entry] = []
    on = GENERATIONS if measured_on is None else (measured_on.name,)
    of_all = [(chip, torus, n) for chip in on for torus, n in groups(chip)]
    for number, (chip, torus, n) in enumerate(of_all, 1):
        which = f"{number} of {len(of_all)}: {chip}, a {torus} of {n}"
        print(f"replaying {which}", file=sys.stderr, flush=True)
        entries += model(chip, torus, n, known=known, measured_on=measured_on)
    about = "Modelled, not measured: kernels replayed (pallas_collectives.replay), float32."
    if measured_on:
        about += " The chip's figures were measured."
    return _table("modelled", about, entries)


def without(table: Table, name: str) -> Table:
    """A table that lacks the times of a collective, of an algorithm, or of what is `PACKED`.

    Raises:
      CollectiveError: no times are of that name.
    """
    kept = {
        key: dataclasses.replace(
            entry,
            us={
                way: times
                for way, times in entry.us.items()
                if entry.op != name and name not in (way, *way.split(":"))
            },
        )
        for key, entry in table.entries.items()
    }
    if kept == table.entries:
        what, rule = f"--renew={name}", f"{table.path} has no times of that name"
        raise CollectiveError(what, rule, "name a collective or an algorithm as `explain` does")
    return dataclasses.replace(table, entries=kept)


def groups(chip: str) -> list[tuple[str, int]]:
    """The groups that are modelled on a chip."""
    generation = GENERATIONS[chip]
    tori = {2: _ON_TWO, 3: _ON_THREE, 4: _ON_FOUR}[
        generation.dims + generation.devices_per_chip - 1
    ]
    several = [(torus, math.prod(tables.sizes_and_word(torus)[0])) for torus in tori]
    return [(torus, n) for torus, sizes in _ON_ONE_AXIS for n in sizes] + several


def machine_of(chip: str, torus: str, n: int) -> tuple[Machine, tuple[str, ...]]:
    """The pod on which a group is modelled, all of it, and the mesh axes of the group."""
    generation = GENERATIONS[chip]
    sizes, word = tables.sizes_and_word(torus)
    if not sizes:
        rest = (False,) * (generation.dims - 1)
        return Machine.named(f"{chip}:{n}", (torus == "ring", *rest)), ("x",)
    dies = sizes[0] == generation.devices_per_chip == 2
    sizes = sizes[dies:]
    closing = tuple(word == "torus" and size > 2 for size in sizes)
    rest = (False,) * (generation.dims - len(sizes))
    wraps = None if word == "cylinder" else closing + rest
    machine = Machine.named(f"{chip}:{'x'.join(map(str, sizes))}", wraps)
    return machine, tuple(a for a in replay_rows.mesh_axes(machine) if dies or a != "core")


def model(
    chip: str,
    torus: str,
    n: int,
    ops: Iterable[str] | None = None,
    known: Table | None = None,
    measured_on: Generation | None = None,
) -> Iterator[Entry]:
    """The modelled times of collectives over one group, while others like it do the same.

    Args:
      chip: the TPU generation.
      torus: how it lies on the links (see `tables.Entry`).
      n: devices in the group.
      ops: the collectives; all by default.
      known: times to take as they are.
      measured_on: the chip, if not with the figures that are assumed.
    """
    machine, axes = machine_of(chip, torus, n)
    if measured_on:
        machine = dataclasses.replace(machine, generation=measured_on)
    for case in CASES:
        record = catalogue.COLLECTIVES[case.op]
        if not record.timed or (ops is not None and case.op not in ops):
            continue
        sizes: tuple[int, ...] = OPERAND_BYTES if record.is_cut else BLOCK_BYTES
        if torus not in tables.ONE_AXIS:  # the time of more is on the line through the last two
            sizes = tuple(size for size in sizes if size not in (4 << 20, 64 << 20))
        if record.of_blocks and not record.phases:
            sizes = tuple(size for size in sizes if n * size <= MOST_OPERAND_BYTES)
        there = known and known.entries.get((case.op, chip, torus, n))
        found: dict[str, dict[int, float | None]] = {}
        if there:
            found = {name: dict(zip(there.bytes, us, strict=True)) for name, us in there.us.items()}
        fit = {a.name for a in record.algorithms if a.reach in _modelled(record, chip, torus, n)}
        names = (*candidates(case.op, torus), *packed(case.op, torus))
        as_written = dict.fromkeys((*found, *names))
        offered = [name for name in as_written if name in names and name.partition(":")[0] in fit]
        us = {}
        for name in offered:
            times = dict(found.get(name, {}))
            for size in sizes:
                if size not in times:
                    times[size] = _replayed(machine, axes, case, name, size, n)
            us[name] = tuple(times[size] for size in sizes)
        us = {name: times for name, times in us.items() if any(times)}
        if us:
            yield Entry(case.op, chip, torus, n, sizes, us)


def _modelled(record: Collective, chip: str, torus: str, n: int) -> set[object]:
    """What algorithms of a collective reach that are modelled.

    Of more than a few devices on several axes those of all axes at once alone; what has no such way
    goes on from fewer devices.
    """
    reaches: set[object] = {algorithm.reach for algorithm in record.algorithms}
    if torus in tables.ONE_AXIS:
        return reaches
    at_once = reaches if n <= fastest.FEW_DEVICES else reaches & {JUMPS, TORUS, NEIGHBOURS}
    return at_once - fastest.outrun(chips.BY_NAME[chip])


def candidates(op: str, torus: str) -> tuple[str, ...]:
    """The algorithms of a collective, for sums also with operands in VMEM (see `tuning.choice`).

    A line's algorithms leave a ring's closing links idle; a torus' are for several axes, where one
    direction of a ring alone is never the fastest.
    """
    lies = torus if torus in tables.ONE_AXIS else ON_SEVERAL
    return tuple(
        algorithm.name + space
        for algorithm in catalogue.COLLECTIVES[op].algorithms
        if lies in algorithm.lies
        for space in (("", ":vmem") if algorithm.in_vmem else ("",))
    )


def packed(op: str, torus: str) -> tuple[str, ...]:
    """Those whose kernels pack, as a modelled table names them: those that go as devices lie."""
    along = {"line": LINE, "ring": RING}.get(torus, TORUS)
    able = (a for a in catalogue.COLLECTIVES[op].algorithms if a.packed)
    return tuple(f"{a.name}:{PACKED}" for a in able if a.one_hop or a.reach is along)


def _replayed(
    machine: Machine, axes: tuple[str, ...], case: Case, algorithm: str, block: int, n: int
) -> float | None:
    """Modelled microseconds, None where the algorithm cannot run or would not be chosen."""
    size = block if case.whole else block * n
    name, _, space = algorithm.partition(":")
    if space == PACKED:
        return _replayed_packed(replay_rows.Task(machine, case, "bfloat16", size, name, axes))
    if algorithm.endswith(":vmem") and size > MOST_IN_VMEM:
        return None
    task = replay_rows.Task(machine, case, DTYPE, size, algorithm, axes)
    try:
        return _rounded(replay_rows.run(task).time * 1e6)
    except (AlgorithmError, VmemError):
        return None


def _replayed_packed(task: replay_rows.Task) -> float | None:
    """The same over a wire, None where its kernel cannot pack so few numbers."""
    try:
        with counters.recorded() as plans:
            report = replay_rows.run(task, wire=Wire(WIRE))
    except (AlgorithmError, VmemError, WireError):
        return None
    # The last says what was replayed: the first is made before it is known which axes are lines.
    *_, way = (plan.way for plan in plans if isinstance(plan, WirePlan))
    return _rounded(report.time * 1e6) if way == task.algorithm else None


# Measured ---------------------------------------------------------------------------------------


def _measure(out: Path | None, iters: int) -> int:
    devices.prepare(8)
    if devices.kind() == "simulated":
        print(
            "Nothing can be measured here: there are neither TPUs nor GPUs. The library chooses by "
            f"the modelled table that comes with it, {tables.MODELLED}; --model makes it anew."
        )
        return 1
    if jax.device_count() < 2:
        rule = "it times collectives, and JAX finds one device"
        raise FlagError("tune", rule, "run it where there are several")
    rows: list[tuple[Measured, str]] = []
    mesh = devices.make_mesh((1, len(jax.devices())))
    for n in group_sizes(mesh.size):
        mesh = devices.make_mesh((n, mesh.size // n))
        torus = torus_of(mesh)
        for row in measure.rows(*_tasks(mesh, torus, iters), mesh):
            print(f"{row} of {row.size} bytes on {n}: {row.reason or row.time_us}", flush=True)
            rows.append((row, torus))
    if not devices.speaks():
        return 0
    name = chip_name(mesh)
    table = measured(rows, name)
    path = out or Path(f"tuning-{name.replace(' ', '-')}-jax{jax.__version__}.json")
    _write(table, path)
    print(f"To use it: PALLAS_COLLECTIVES_TUNING={path.resolve()}")
    return int(any(row.failed for row, _ in rows))


def group_sizes(n: int) -> list[int]:
    """The sizes of equal groups that n devices can be cut into, n itself among them."""
    return [k for k in range(2, n + 1) if n % k == 0]


def chip_name(mesh: Mesh) -> str:
    """What the library calls the devices of a mesh."""
    device = mesh.devices.flat[0]
    return (
        chips.of_kind(device.device_kind).name if device.platform == "tpu" else device.device_kind
    )


def torus_of(mesh: Mesh) -> str:
    """How the library sees groups over axis "x" of a mesh."""
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        placement.scope(placement.of_mesh(mesh)),
    ):
        group = placement.arranged(canonical.group_of("x"))
        return fastest.torus_of(group, chips.current())


def _tasks(mesh: Mesh, torus: str, iters: int) -> tuple[list[measure.Task], Settings]:
    backend, *others = devices.backends(devices.kind())
    cases = tuple(case for case in CASES if catalogue.COLLECTIVES[case.op].timed)
    n = mesh.shape["x"]
    wanted = Settings(cases=cases, mesh=tuple(mesh.shape.values()), iters=iters)
    names: dict[str, tuple[tuple[str, str | None], ...]] = {
        case.op: tuple((backend, name) for name in candidates(case.op, torus))
        if backend == "pallas"
        else tuple((name, None) for name in (backend, *others))
        for case in cases
    }
    return [
        measure.Task(case, DTYPE, size, by, name)
        for case in cases
        for size in FULL_BYTES
        if size >= 4096 * n
        for by, name in names[case.op]
    ], wanted


def measured(rows: Iterable[tuple[Measured, str]], chip: str) -> Table:
    """The table of rows, each with the torus of its group; wrong or refused ones have no time."""
    found: dict[tuple[str, str, int], dict[str, dict[int, float | None]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    by_name = {case.name: case for case in CASES}
    for row, torus in rows:
        case, n = by_name[row.op], row.devices or 0
        block = row.size if case.whole else row.size // n
        us = None if row.failed or row.time_us is None else _rounded(row.time_us)
        found[case.op, torus, n][row.algorithm or row.backend][block] = us
    entries = []
    for (op, torus, n), by_algorithm in found.items():
        sizes = tuple(sorted(set().union(*by_algorithm.values())))
        us_of = {name: tuple(map(t.get, sizes)) for name, t in by_algorithm.items()}
        timed = {name: times for name, times in us_of.items() if any(times)}
        if timed:
            entries.append(Entry(op, chip, torus, n, sizes, timed))
    about = f"Measured by `python -m benchmarks tune`: medians of chains, {DTYPE}."
    return _table("measured", about, entries)


def _rounded(us: float) -> float:
    return float(f"{us:.3g}")


def _table(kind: str, about: str, entries: Sequence[Entry]) -> Table:
    keyed = {entry.key: entry for entry in entries}
    return Table("", kind, jax.__version__, about, keyed)


def _write(table: Table, path: Path) -> None:
    text = tables.dump(table)
    tables.parse(json.loads(text), str(path))  # nothing is written that could not be read
    path.write_text(text, encoding="utf-8")
    print(f"{len(table.entries)} entries ({table.kind}) written to {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
