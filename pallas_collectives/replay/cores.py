"""Steps kernels on meshes of cores (`pl.kernel`, `core_map`): TensorCores, and SparseCores' scalar
and vector subcores.

Each core has instructions and memory of its own; all of a chip share what lies in HBM. They enter a
kernel together and leave it together, as they are launched and awaited together: the first core
is told by all others that they are there, and tells them. What a device's first core does before
and after is what the program does outside the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives.replay import jaxprs, kernels, meetings, names
from pallas_collectives.replay.devices import CoreMesh
from pallas_collectives.replay.program import Enter, Kernel, Leave
from pallas_collectives.replay.stepper import Step, Stepper
from pallas_collectives.replay.values import UNKNOWN, take
from pallas_collectives.replay.views import View


def compile_kernel(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    """The step of a kernel on one mesh of cores or several."""

    def step(env: list[Any], lanes: np.ndarray) -> None:
        if stepper.devices.cores:
            raise jaxprs.UnsupportedEquation("replay does not know cores within cores", eqn)
        begun = kernels.begin(stepper, eqn, lanes)
        results = _Call(stepper, eqn, [env[i] for i in ins], lanes, begun).run()
        for o, result in zip(outs, results, strict=True):
            env[o] = result

    return step


class _Call:
    """One call of a kernel on all cores of its meshes."""

    def __init__(
        self, stepper: Stepper, eqn: JaxprEqn, args: list[Any], lanes: np.ndarray, kernel: Kernel
    ):
        self.stepper, self.eqn, self.kernel = stepper, eqn, kernel
        self.args, self.first = args, lanes  # of the first cores, as outside the kernel
        self.bodies: list[tuple[CoreMesh, Any]] = []
        count = 0
        for axes, jaxpr in jaxprs.core_meshes(eqn):
            self.bodies.append((CoreMesh(count, axes), jaxpr))
            count += math.prod(axes.values())
        devices = stepper.devices
        if count > devices.n_cores:
            if stepper.read_semaphore is not None:
                raise jaxprs.UnsupportedEquation(
                    "replay does not know semaphores that are read in programs on several cores",
                    eqn,
                )
            devices.n_cores = count
        self.every = (lanes + devices.n_devices * np.arange(count)[:, None]).reshape(-1)
        self.others = self.every[len(lanes) :]

    def run(self) -> list[Any]:
        stepper, eqn = self.stepper, self.eqn
        source, number = stepper.source(eqn), stepper.kernel_number
        stepper.emit(Enter(self.every, stepper.launch_cost, source, number))
        stepper.devices.cores = tuple(mesh for mesh, _ in self.bodies)
        if len(self.others):
            meetings.gather(stepper, eqn, self.first, self.others)
        meetings.on_entry(stepper, eqn, self.first)
        if len(self.others):
            meetings.release(stepper, eqn, self.first, self.others)
        operands, results = self._shared()
        for mesh, jaxpr in self.bodies:
            at = self.every[mesh.holds(self.every // stepper.n_devices)]
            self._run(mesh, jaxpr, at, [*operands, *results])
        stepper.devices.cores = ()
        self.kernel.results = tuple(ref.buffer.id for ref in results)
        if len(self.others):
            stepper.emit(Leave(self.others, 0.0, source, number))
            # No core is in the next kernel, and signals there, before all have left this one.
            meetings.gather(stepper, eqn, self.first, self.others)
            meetings.release(stepper, eqn, self.first, self.others)
        goes_on = kernels.leave(stepper, eqn, self.first, operands, results)
        return [r if goes_on else UNKNOWN for r in results]

    def _shared(self) -> tuple[list[Any], list[Any]]:
        """The refs of operands and results, which lie in HBM unless their types say otherwise."""
        jaxpr, _ = jaxprs.open_jaxpr(self.bodies[0][1])
        avals = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
        ref_names = _names(jaxpr)
        aliases = {o: i for i, o in dict(self.eqn.params.get("input_output_aliases", {})).items()}
        n_in, n_out = len(self.args), len(self.eqn.outvars)
        refs: list[Any] = []
        same: dict[int, View] = {}  # refs that the program made outside, by their buffer
        for i, aval in enumerate(avals[: n_in + n_out]):
            given = self.args[i] if i < n_in else UNKNOWN
            if i - n_in in aliases:
                refs.append(refs[aliases[i - n_in]])
            elif isinstance(given, View) and given.buffer.kernel:
                refs.append(given)  # from a kernel that goes on
            elif isinstance(given, View) and given.buffer.id in same:
                refs.append(same[given.buffer.id])
            elif not hasattr(aval, "inner_aval"):  # a number that the body has captured
                refs.append(take(given, self.every % self.stepper.n_devices))
            else:
                name = ref_names[i]
                if isinstance(given, View) and name.startswith(("args[", "operand")):  # captured
                    name = given.buffer.name
                refs.append(self._allocated(i, aval, name, shared=True))
                self.stepper.follow(refs[-1], aval, given, self.first)
                if isinstance(given, View):
                    same[given.buffer.id] = refs[-1]
        return refs[:n_in], refs[n_in:]

    def _run(
        self,
        mesh: CoreMesh,
        closed: core.Jaxpr | core.ClosedJaxpr,
        lanes: np.ndarray,
        shared: list[Any],
    ) -> None:
        jaxpr, _ = jaxprs.open_jaxpr(closed)
        avals = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
        ref_names = _names(jaxpr)
        scratch = [
            self._scratch(mesh, i, avals[i], ref_names[i]) for i in range(len(shared), len(avals))
        ]
        refs = [*shared, *scratch]
        n_constants = len(jaxpr.constvars)
        self.stepper.flush_busy(self.eqn, lanes)
        self.stepper.run(closed, refs[n_constants:], lanes, refs[:n_constants])
        self.stepper.flush_busy(self.eqn, lanes)

    def _scratch(self, mesh: CoreMesh, i: int, aval: Any, name: str) -> View:
        """What each core has of its own: of a named mesh, the same to all that name it."""
        axes = jaxprs.cores_of(aval)
        if axes is None:
            return self._allocated((mesh.first, i), aval, name)
        view = self._allocated(("named", i), aval, name)
        (home,) = (mesh for mesh, _ in self.bodies if mesh.axes == axes)
        self.stepper.homes[view.buffer.space, view.buffer.id] = home
        return view

    def _allocated(self, key: Hashable, aval: Any, name: str, shared: bool = False) -> View:
        space = jaxprs.memory_space(aval)
        if shared and space == "vmem" and not isinstance(key, tuple):
            space = "hbm" if getattr(aval, "memory_space", None) is None else space
        stepper = self.stepper
        view = stepper.allocate(("core", stepper.kernel_number, key), aval, name, space)
        self.kernel.held.take([view.buffer], self.kernel.line)
        return view


def _names(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> list[str]:
    """What the author calls the refs that a body has captured, and those that it takes."""
    captured, taken = len(jaxpr.constvars), names.of_refs(jaxpr)
    known = [""] * captured + taken
    return [name or f"operand{i}" for i, name in enumerate(known)]


def compile_barrier(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    """The barrier of all vector subcores of a SparseCore: those that differ in the last axis."""

    def step(env: list[Any], lanes: np.ndarray) -> None:
        number = lanes // stepper.n_devices
        (mesh,) = (m for m in stepper.devices.cores if m.holds(number).all())
        together = list(mesh.axes.values())[-1]
        core = (number - mesh.first) // together
        if len(lanes) != mesh.size * stepper.n_devices:
            raise jaxprs.UnsupportedEquation("replay wants all subcores at a barrier", eqn)
        for which in np.unique(core):
            inside = lanes[core == which]
            first, others = inside[: stepper.n_devices], inside[stepper.n_devices :]
            if len(others):
                meetings.gather(stepper, eqn, first, others)
                meetings.release(stepper, eqn, first, others)

    return step
