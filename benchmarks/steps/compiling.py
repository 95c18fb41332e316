"""Compiles steps for TPUs that are not there: under lax, under `override_lax`, and forced.

As `benchmarks.compiled`, in a process of its own.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_collectives
from benchmarks import compiled
from benchmarks.rows import Stepped
from benchmarks.settings import FlagError
from benchmarks.steps import bound, packing, programs, schedule, timeline
from benchmarks.steps import wires as step_wires
from benchmarks.steps.programs import Form, Program
from pallas_collectives import catalogue, wires
from pallas_collectives.backends import counters
from pallas_collectives.replay import Machine

# Whose collectives a step has.
UNDER: dict[str, Callable[[], Any]] = {
    "lax": lambda: pallas_collectives.use_backend("xla"),  # which `experts` heeds
    "override": pallas_collectives.override_lax,
    "forced": lambda: pallas_collectives.override_lax(everything=True),
}
WIRES = wires.DTYPES  # and over a narrower wire, wherever that is taken


class Task(NamedTuple):
    """One program on one topology; a row for each of `under`, of `UNDER` and `WIRES`."""

    topology: str
    program: str
    gradient: bool
    unrolled: bool
    under: Sequence[str] = tuple(UNDER)

    @property
    def form(self) -> Form:
        """How the program is run."""
        return Form(self.gradient, self.unrolled)


def plan(
    topologies: Sequence[str], names: Sequence[str], forms: Sequence[Form], under: Sequence[str]
) -> list[Task]:
    """The programs to compile."""
    product = itertools.product(topologies, names, forms)
    return [Task(where, name, form.gradient, form.unrolled, under) for where, name, form in product]


def rows(tasks: Sequence[Task]) -> Iterator[Stepped]:
    """Compiles in another process; its rows as they come.

    Raises:
      CompilerError: that process failed.
      FlagError: what `check` raises.
    """
    return (Stepped(**row) for row in compiled.elsewhere("benchmarks.steps.compiling", tasks))


def _answers(given: list[Any]) -> Iterator[dict[str, Any]]:
    tasks = [Task(*task) for task in given]
    check(tasks)
    yield from map(dataclasses.asdict, itertools.chain.from_iterable(map(rows_of, tasks)))


def check(tasks: Sequence[Task]) -> None:
    """Checks topologies and programs before anything is compiled.

    Raises:
      FlagError: the compiler has no such topology, or a program refuses its devices.
    """
    for task in tasks:
        programs.check(task.program, devices_of(task.topology).size, task.form)


@functools.cache
def devices_of(topology: str) -> np.ndarray:
    """The devices of a topology, as the compiler shows them.

    Raises:
      FlagError: it has no such topology.
    """
    # As JAX has them on TPUs: else libtpu shows each of a v4's two cores as a device.
    as_chips = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **as_chips)
    except jax.errors.JaxRuntimeError as error:
        said = " ".join(str(error).split())
        rule = f"it must be a slice that the TPU compiler has, which says {said}"
        raise FlagError(f"--topology={topology}", rule, "name another, such as v5e:4x4") from None
    return np.array(found.devices)


def rows_of(task: Task) -> Iterator[Stepped]:
    """A row for each of the task's `under`; equal programs are compiled and replayed once."""
    done: dict[str, dict[str, Any]] = {}  # program -> its figures
    for under in task.under:
        row = Stepped(
            op=f"{task.program}, {task.form}", topology=task.topology, under=under, type="bfloat16"
        )
        try:
            devices = devices_of(task.topology)
            program = programs.named(task.program)(devices.size, task.form)
            with counters.recorded(built=True) as plans:
                lowered = lower(program, devices, under)
            text = lowered.as_text()
            if text not in done:
                done[text] = _figures(task, program, devices, lowered.compile(), plans)
            yield dataclasses.replace(row, devices=devices.size, **done[text])
        except Exception as error:  # the other rows are wanted all the same
            yield dataclasses.replace(row, error=f"{type(error).__name__}: {error}")


def mesh_of(program: Program, devices: np.ndarray) -> Mesh:
    """The mesh that a program runs on."""
    return Mesh(devices.reshape(tuple(program.axes.values())), tuple(program.axes))


def lower(program: Program, devices: np.ndarray, under: str) -> Any:
    """The program lowered for these devices, under one of `UNDER` or `WIRES`."""
    mesh = mesh_of(program, devices)
    spec = PartitionSpec(tuple(program.axes))

    def shard(*args: Any) -> Any:
        return jax.tree.map(lambda y: y[None], program.step(*jax.tree.map(lambda x: x[0], args)))

    mapped = jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    args = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(
            (devices.size, *s.shape), s.dtype, sharding=NamedSharding(mesh, spec)
        ),
        program.args,
    )
    with UNDER.get(under, functools.partial(_over, under))():
        return jax.jit(mapped).lower(*args)


def _over(wire: str) -> Any:
    """All of lax's functions that take a wire over this one, and derivatives that take one."""
    functions = (f for f in catalogue.functions() if hasattr(lax, f))
    takes = {f: inspect.signature(getattr(pallas_collectives, f)).parameters for f in functions}

    def everywhere(argument: str) -> dict[str, str]:
        return {f: wire for f, names in takes.items() if argument in names}

    return pallas_collectives.override_lax(
        wire=everywhere("wire"), wire_backward=everywhere("wire_backward")
    )


def _figures(
    task: Task, program: Program, devices: np.ndarray, compiled_: Any, plans: list[Any]
) -> dict[str, Any]:
    machine = Machine.named(task.topology)
    placement = machine.placement_of(devices)
    what_of = step_wires.programs(machine, placement, program.axes, plans)
    text = compiled_.as_text()
    events = packing.marked(schedule.events(text, timeline.cycles_of(machine)), text)
    line = timeline.run(events, machine, placement, what_of)
    collectives = line.served.values()
    under_way = sum(served.times * served.each_us for served in collectives)
    must_wait = bound.exposed(
        events,
        schedule.needs(text),
        lambda c: line.served[c.name].each_us,
        machine.generation.clock * timeline.US,
    )
    return {
        "compute_us": line.compute_us,
        "waits_us": line.waits_us,
        "packing_us": line.packing_us,
        "exposed_us": line.exposed_us,
        "hidden_us": line.hidden_us,
        "hideable_us": under_way - must_wait,
        "time_us": line.step_us,
        "temp": compiled_.memory_analysis().temp_size_in_bytes,
        "collectives": [dataclasses.asdict(served) for served in collectives],
        "spans": [dataclasses.astuple(span) for span in line.spans],
    }


if __name__ == "__main__":
    compiled.answer(_answers)
