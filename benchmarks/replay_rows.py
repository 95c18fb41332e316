"""Replays collectives on modelled pods: `python -m benchmarks --replay=v5e:16x16`.

The kernels' own DMA programs run on the model of `pallas_collectives.replay`; nothing is measured.
The modelled time is held against the least that any schedule takes (`replay.bound`): in all, and on
the busiest link alone.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

import pallas_collectives
from benchmarks.cases import LANES, Case, chosen
from benchmarks.rows import Replayed
from benchmarks.settings import AXES, Settings
from pallas_collectives.backends import counters
from pallas_collectives.backends.plans import KernelPlan, Plan
from pallas_collectives.errors import CollectiveError
from pallas_collectives.replay import Machine, Report, bound, replay
from pallas_collectives.topology import chips
from pallas_collectives.wires import Wire


@dataclasses.dataclass(frozen=True)
class Task:
    """One row to be."""

    machine: Machine
    case: Case
    dtype: str
    size: int
    algorithm: str | None
    axes: tuple[str, ...]


def plan(
    machines: Sequence[str],
    cases: Sequence[Case],
    sizes: Sequence[int],
    dtypes: Sequence[str] = ("float32",),
    algorithms: Sequence[str] = (),
    axes: tuple[str, ...] = ("x",),
) -> list[Task]:
    """The rows to replay; without `algorithms` the library chooses.

    Args:
      machines: names as `Machine.named` takes them.
      cases: the collectives.
      sizes: sizes of the full array, in bytes; rounded down to whole rows of 128 elements a device.
      dtypes: names.
      algorithms: names, alone or with ":vmem" behind them.
      axes: torus axes to communicate over, of x, y and z.

    Raises:
      MachineError: a name that is not a pod's.
    """
    pods = [Machine.named(name) for name in machines]
    return [
        Task(pod, case, dtype, size, algorithm, axes)
        for pod, case, dtype, size in itertools.product(pods, cases, dtypes, sizes)
        for algorithm in chosen(case, algorithms)
    ]


def wanted(of: Settings) -> list[Task]:
    """The rows that settings ask for."""
    return plan(of.pods, of.cases, of.sizes, of.dtypes, of.algorithms, of.axes)


def rows(tasks: Sequence[Task], *, races: bool = False) -> Iterator[Replayed]:
    """Replays the tasks; with `races` each is also checked for races on any schedule."""
    for task in tasks:
        yield _row(task, races)


def mesh_axes(machine: Machine) -> dict[str, int]:
    """A mesh laid on the torus as it is: its axes, and the two devices of a chip where it has
    two.
    """
    axes = {name: n for name, n in zip(AXES, machine.shape, strict=False) if n > 1}
    if machine.generation.devices_per_chip > 1:
        axes["core"] = machine.generation.devices_per_chip
    return axes


def run(
    task: Task,
    *,
    races: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
    wire: Wire | None = None,
) -> Report:
    """The replay of one task.

    Args:
      task: the task.
      races: also look for races.
      wire: the narrower numbers that it sends.
      mesh: a mesh of devices on the machine; by default its torus as it is.

    Raises:
      CollectiveError: the collective cannot run so there.
    """
    mesh = mesh or task.machine.mesh(mesh_axes(task.machine))
    n = _members(task, dict(mesh.shape))
    axis = task.axes if len(task.axes) > 1 else task.axes[0]

    def body(x: jax.Array) -> jax.Array:
        how = {"backend": "pallas", "algorithm": task.algorithm, **({"wire": wire} if wire else {})}
        return task.case.call(pallas_collectives, x, axis, **how)

    everywhere = PartitionSpec()
    function = jax.shard_map(
        body, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    operand = jax.ShapeDtypeStruct(task.case.operand(n, _row_count(task, n)), task.dtype)
    return replay(function, operand, machine=task.machine, races=races)


def machine_of(mesh: Mesh) -> Machine | None:
    """The slice of a pod that TPU devices make up; None where the model does not know it."""
    devices = mesh.devices.flat
    chip = chips.listed(devices[0].device_kind)
    if chip is None or not hasattr(devices[0], "coords"):
        return None
    coords = np.array([device.coords for device in devices])
    if coords.min(axis=0).any():  # a part of a slice, cut out of its midst
        return None
    shape = (coords.max(axis=0) + 1)[: chip.dims]
    return Machine.named(f"{chip.name}:{'x'.join(map(str, shape))}")


def _members(task: Task, sizes: dict[str, int]) -> int:
    unknown = [name for name in task.axes if name not in sizes]
    if unknown:
        raise CollectiveError(
            f"axis {unknown[0]!r}",
            f"{task.machine} has axes {', '.join(sizes)}",
            "name one of them, or several with commas",
        )
    return int(np.prod([sizes[name] for name in task.axes]))


def _row_count(task: Task, n: int) -> int:
    return max(1, task.size // (n * LANES * jnp.dtype(task.dtype).itemsize))


def _row(task: Task, races: bool) -> Replayed:
    base = Replayed(
        machine=str(task.machine),
        op=task.case.name,
        algorithm=task.algorithm,
        size=task.size,
        count=0,
        type=task.dtype,
        over=",".join(task.axes) if len(task.axes) > 1 else "",
    )
    try:
        sizes = mesh_axes(task.machine)
        n = _members(task, sizes)
        per_block = _row_count(task, n) * LANES
        nbytes = n * per_block * jnp.dtype(task.dtype).itemsize
        count = per_block * (n if task.case.whole else 1)
        base = dataclasses.replace(base, size=nbytes, count=count, devices=n)
        pallas_collectives.reset_counts()
        with counters.recorded() as plans:
            report = run(task, races=races)
    except CollectiveError as error:
        return dataclasses.replace(base, refused=str(error))
    except Exception as error:  # a sweep goes on, and fails at its end
        return dataclasses.replace(base, error=f"{type(error).__name__}: {error}")
    sent: float | np.ndarray = nbytes / n
    if task.case.rows_sent is not None:
        source, target = np.ogrid[:n, :n]
        rows = per_block // LANES
        sent = sent * task.case.rows_sent(source, target, n, rows) / rows
    best = bound(task.case.op, task.machine, _groups(task, sizes), sent)
    return dataclasses.replace(
        base,
        kernel=_kernel_names(report),
        served=_algorithm(task.case.op, plans),
        time_us=report.time * 1e6,
        algbw=nbytes / report.time / 1e9,
        busbw=nbytes / report.time / 1e9 * task.case.busbw(n),
        bound_us=best.time * 1e6,
        of_bound=100 * best.time / report.time,
        of_wire=100 * best.wire / report.time,
        faults=_faults(report),
    )


def _groups(task: Task, sizes: dict[str, int]) -> np.ndarray:
    """The devices of each group, one row a group."""
    names = list(sizes)
    devices = np.arange(int(np.prod(list(sizes.values())))).reshape(tuple(sizes.values()))
    order = [i for i, name in enumerate(names) if name not in task.axes]
    order += [names.index(name) for name in task.axes]
    return devices.transpose(order).reshape(-1, _members(task, sizes))


def _kernel_names(report: Report) -> str:
    return "+".join(dict.fromkeys(kernel.name for kernel in report.kernels)) or "no kernel"


def _algorithm(op: str, plans: Sequence[Plan]) -> str:
    """The algorithm that served a collective: of several plans, the last was followed."""
    names = [p.record.name for p in plans if isinstance(p, KernelPlan) and p.op == op]
    return names[-1] if names else ""


def _faults(report: Report) -> str:
    return "; ".join(map(str, report.findings[:3]))
