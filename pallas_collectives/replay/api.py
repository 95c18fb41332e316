"""`replay`: from a function with Pallas TPU kernels to a report of what it does on a modelled
machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_collectives import _compat
from pallas_collectives.annotations import AnyMesh
from pallas_collectives.replay import rules, symmetry, trace_program
from pallas_collectives.replay.engine import Engine
from pallas_collectives.replay.live import LiveProgram
from pallas_collectives.replay.machine import Machine, MachineError
from pallas_collectives.replay.order import Order
from pallas_collectives.replay.program import Program, Start
from pallas_collectives.replay.races import find_races
from pallas_collectives.replay.report import Report, report
from pallas_collectives.replay.symmetry import Classes

_MANY_COPIES = 2000  # whose shares of the links take a second to work out


def replay(
    function: Callable[..., Any],
    *args: Any,
    machine: Machine | str,
    placement: np.ndarray | None = None,
    races: bool = False,
    symmetric: bool = True,
    quick: bool = False,
    grain: float = 0.0,
) -> Report:
    """Runs `function(*args)`'s Pallas TPU kernels on a modelled machine.

    Args:
      function: calls `jax.shard_map` over a mesh (abstract, ahead-of-time or real) with Pallas TPU
      kernels inside.
      *args: pytrees of `jax.ShapeDtypeStruct`, or numpy arrays where the kernel reads their
      contents (sizes, offsets).
      machine: the pod slice, `Machine.named(...)`, or its name alone.
      placement: which device of the machine each mesh position is on, row-major over the mesh:
        device numbers, chips row-major over the torus. By default from the mesh's devices where it
        has any, else positions in order.
      races: also look for races (see `races.py`), and for copies and signals to devices that may
        not have entered the kernel yet, on any schedule, not only the one replayed. Of a program
        that deadlocks, in what happens up to there.
      symmetric: step devices that behave identically once. The result is the same; False is for
        tests and for pictures of every device.
      quick: with more than some thousand copies on devices that all differ, leave out how they slow
        one another down. The time is then the least that it can be: `Report.least`.
      grain: seconds. What happens within so long is taken to happen at their end, so that copies
        that end one after another hold their links until the last has: rates are worked out less
        often, and the time errs to the long side, by some grains. Each is at most a hundredth of
        what has passed until then: small kernels before a large one hardly err. For many copies on
        many devices that all differ: a thousandth of the time that is expected is fine enough.

    Returns:
      A `Report`: time in seconds, link loads, waits, critical path, leftovers, deadlocks, races,
      and faults: what the hardware forbids (see `rules.py`).

    Raises:
      MachineError: an unknown machine, or a mesh that does not fit it.
      NoShardMap: no mesh to be found in the function.
      DataDependent: control flow or addresses depend on an argument given by shape only.

    Example:
      >>> pod = pc.replay.Machine.named("v5e:16")
      >>> P = jax.sharding.PartitionSpec
      >>> gather = jax.shard_map(
      ...     lambda x: pc.all_gather(x, "x", tiled=True, to="invarying"),
      ...     mesh=pod.mesh({"x": 16}), in_specs=P("x"), out_specs=P(),
      ... )
      >>> x = jax.ShapeDtypeStruct((16 * 1024, 1024), "float32")
      >>> report = pc.replay.replay(gather, x, machine=pod, races=True)
      >>> report.ok, f"{1e6 * report.time:.0f} us", report.kernels[0].name
      (True, '739 us', 'all_gather_bidirectional')
    """
    _compat.prepare()
    pod = machine if isinstance(machine, Machine) else Machine.named(machine)
    program, mesh = trace_program.trace(
        function,
        *args,
        generation=pod.generation,
        where=lambda mesh: pod.places(_placement(pod, mesh, placement)),
    )
    where = _placement(pod, mesh, placement)
    live = isinstance(program, LiveProgram)
    classes = (
        symmetry.refine(program, pod, where)
        if symmetric and not live
        else symmetry.discrete(program.n_devices, pod.n_links)
    )
    shared = not quick or live or _copies(program, classes) <= _MANY_COPIES
    engine = Engine(program, pod, where, classes, shared, grain)
    engine.run()
    faults = rules.find_faults(program, pod.generation, pod.places(where))
    if live:
        return report(
            engine, faults, None, "the kernel reads a semaphore: its course is a matter of time"
        )
    if not races:
        return report(engine, faults, None, "races=True does")
    order = Order(program)  # of all devices: those with equal times need not know the same
    faults += rules.find_early(order) + rules.find_kept(order)
    return report(engine, faults, find_races(order))


def _copies(program: Program, classes: Classes) -> int:
    """How many copies the devices that are stepped start."""
    stepped = np.zeros(program.n_devices, bool)
    stepped[classes.representatives] = True
    starts = (column for column in program.columns if isinstance(column, Start))
    return sum(int(stepped[column.lanes].sum()) for column in starts)


def _placement(machine: Machine, mesh: AnyMesh, given: np.ndarray | None) -> np.ndarray:
    """The device number of each position of a mesh."""
    devices = getattr(mesh, "devices", None) if isinstance(mesh, jax.sharding.Mesh) else None
    if given is not None:
        where = np.asarray(given)
    elif devices is not None and all(hasattr(d, "coords") for d in devices.flat):
        where = machine.placement_of(devices)
    else:
        where = machine.default_placement(mesh.size)
    if len(where) != mesh.size or len({*where.tolist()}) != mesh.size:
        raise MachineError(
            f"placement of {len(where)} positions for a mesh of {mesh.size}: "
            "want one device number each, all different"
        )
    for device in (where.min(), where.max()):
        if not 0 <= device < machine.n_devices:
            raise MachineError(f"placement on device {device}: {machine} has {machine.n_devices}")
    return where
