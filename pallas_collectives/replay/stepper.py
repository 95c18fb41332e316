"""Steps a program's jaxpr once for all devices: integers and control flow are evaluated, array data
is not.

Every equation is compiled once to a closure over slots of an environment. A conditional whose
predicate differs between devices runs each branch on the devices that take it; a loop whose trip
count differs drops devices as they finish. Nothing here depends on time, except a semaphore's value
(`semaphore_read`): programs that read one are stepped live, one device at a time, by `live.py`,
which supplies `read_semaphore`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives.annotations import AnyMesh
from pallas_collectives.replay import jaxprs, operations, values
from pallas_collectives.replay.contents import Contents
from pallas_collectives.replay.devices import CoreMesh, Devices
from pallas_collectives.replay.lines import Lines
from pallas_collectives.replay.operations import Operation
from pallas_collectives.replay.program import (
    Access,
    CoreWork,
    Instruction,
    Kernel,
    Program,
    Read,
    Semaphore,
    Signal,
    Source,
    Start,
    Wait,
)
from pallas_collectives.replay.values import UNKNOWN, Known, Lanes
from pallas_collectives.replay.views import Buffer, DataDependent, View, element_size
from pallas_collectives.topology.chips import Chip

Step = Callable[[list[Any], np.ndarray], None]


@dataclasses.dataclass(frozen=True)
class Block:
    """A compiled jaxpr: an environment to copy, where its captured and own inputs go, its steps,
    its outputs.
    """

    template: list[Any]
    constants: list[int]
    inputs: list[int]
    steps: list[Step]
    outputs: list[int]


class Stepper:
    """Evaluates jaxprs on lanes of devices and collects the instructions they perform."""

    def __init__(
        self,
        mesh: AnyMesh,
        generation: Chip,
        compile_equation: Callable[..., Step | None],
        emit: Callable[[Any], None] | None = None,
        read_semaphore: Callable[[Any], int] | None = None,
    ):
        self.mesh = mesh
        axes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        self.devices = Devices(axes)
        self.n_devices = self.devices.n_devices
        self.generation = generation
        self.compile_equation = compile_equation
        self.columns: list[Any] = []
        self.emit = emit or self.columns.append
        self.read_semaphore = read_semaphore
        self.buffers: list[Buffer] = []
        self.semaphores: list[Semaphore] = []
        self.kernels: list[Kernel] = []
        self.unmodelled: Counter[str] = Counter()
        self.inside = False  # shard_map, and not what is around it
        self.kernel: Kernel | None = None  # the kernel being stepped; None outside kernels
        self.kernel_number = 0  # how many kernels were begun: each call has buffers of its own
        self.collective_id: int | None = None
        # (program id, number of programs) per grid axis
        self.grid: tuple[tuple[int, int], ...] = ()
        self.homes: dict[tuple[str, int], CoreMesh] = {}  # of memory that names a mesh of cores
        self.contents = Contents(self.n_devices)
        self.unfinished: dict[int, set[int]] = {}  # kernels, by a semaphore that they handed on
        self._allocated: dict[Any, Buffer] = {}
        self._lock: Any = contextlib.nullcontext()
        self._blocks: dict[int, tuple[Any, Block]] = {}
        self._sources: dict[int, tuple[Any, Source]] = {}
        self._lines = Lines()
        self._busy = 0.0
        # Work of units that go beside loads since the last DMA or semaphore, by unit; and all other
        # work since then that instructions have been charged with
        self._of_units: defaultdict[str, float] = defaultdict(float)
        self._beside = 0.0

    def program(self) -> Program:
        """What has been stepped. Scalar memory that no copy touches, nothing can race with."""
        starts = [column for column in self.columns if isinstance(column, Start)]
        copied = {view.buffer.id for start in starts for view in (start.src, start.dst)}
        return Program(
            self.devices.n_lanes,
            [c for c in self.columns if not _is_scalar(c) or c.view.buffer.id in copied],
            self.buffers,
            self.semaphores,
            self.kernels,
            dict(self.unmodelled),
            self.devices.n_cores,
        )

    # Running --------------------------------------------------------------------------------------

    def run(
        self,
        jaxpr: core.Jaxpr | core.ClosedJaxpr,
        args: list[Any],
        lanes: np.ndarray,
        constants: Sequence[Any] = (),
    ) -> list[Any]:
        """Steps `jaxpr` (open or closed) on the devices `lanes`; returns its outputs.

        `constants`: what an open jaxpr has captured, refs for example.
        """
        block = self.block(jaxpr)
        env = block.template.copy()
        for slot, value in zip(block.constants, constants, strict=False):
            env[slot] = value
        for slot, arg in zip(block.inputs, args, strict=True):
            env[slot] = arg
        for step in block.steps:
            step(env, lanes)
        return [env[slot] for slot in block.outputs]

    def block(self, jaxpr: core.Jaxpr | core.ClosedJaxpr) -> Block:
        cached = self._blocks.get(id(jaxpr))
        if cached is None:
            cached = (jaxpr, self._compile(jaxpr))  # holds the jaxpr: its id stays its own
            self._blocks[id(jaxpr)] = cached
        return cached[1]

    def _compile(self, closed: core.Jaxpr | core.ClosedJaxpr) -> Block:
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        self._lines.enter(jaxpr)
        template: list[Any] = []
        slots: dict[Any, int] = {}

        def new_slot(value: Any) -> int:
            template.append(value)
            return len(template) - 1

        def operand(var: core.Var | core.Literal) -> int:
            if isinstance(var, core.Literal):
                return new_slot(values.constant(var.val, var.aval))
            return slots[var]

        for i, var in enumerate(jaxpr.constvars):
            slots[var] = new_slot(values.constant(consts[i], var.aval) if consts else None)
        for var in jaxpr.invars:
            slots[var] = new_slot(None)
        steps = []
        for eqn in jaxpr.eqns:
            ins = [operand(v) for v in eqn.invars]
            outs = []
            for v in eqn.outvars:
                slots[v] = new_slot(None)
                outs.append(slots[v])
            step = self.compile_equation(self, eqn, ins, outs)
            if step is not None:
                steps.append(step)
        return Block(
            template,
            [slots[v] for v in jaxpr.constvars],
            [slots[v] for v in jaxpr.invars],
            steps,
            [operand(v) for v in jaxpr.outvars],
        )

    # What equations ask for -----------------------------------------------------------------------

    def work(self, seconds: float) -> None:
        """The core computes for `seconds` before its next instruction."""
        if self.kernel is not None:
            self._busy += seconds

    def multiply(self, seconds: float) -> None:
        """The matrix unit computes for `seconds`, beside the core's loads, stores and other work
        between two DMAs or semaphores: a bundle of instructions has a place for each.
        """
        self._go_beside("matrix unit", seconds)

    def compute(self, seconds: float) -> None:
        """The core's vector unit computes for `seconds`: on a vector subcore beside its loads."""
        if self.on_sparsecore:
            self._go_beside("vector unit", seconds)
        else:
            self.work(seconds)

    def _go_beside(self, unit: str, seconds: float) -> None:
        if self.kernel is not None:
            self._of_units[unit] += seconds

    def take_busy(self, *, waits: bool = True) -> float:
        """The work since the last instruction; with `waits` until other units are done, too."""
        busy, self._busy = self._busy, 0.0
        self._beside += busy
        if waits:
            busy += max(0.0, max(self._of_units.values(), default=0.0) - self._beside)
            self._of_units.clear()
            self._beside = 0.0
        return busy

    def flush_busy(self, eqn: JaxprEqn, lanes: np.ndarray) -> None:
        """Ends the work counted so far on these lanes, before the set of lanes changes."""
        if self._busy or any(self._of_units.values()):
            self.emit(CoreWork(lanes, self.take_busy(), self.source(eqn)))

    def source(self, eqn: JaxprEqn) -> Source:
        cached = self._sources.get(id(eqn))
        if cached is None:
            name = self.kernel.name if self.kernel else ""
            place = self._lines.of(eqn)
            cached = (eqn, Source(str(place), jaxprs.scope(eqn), name, place))
            self._sources[id(eqn)] = cached
        return cached[1]

    @property
    def launch_cost(self) -> float:
        """From the call of the kernel to its first instruction, and from its last back."""
        at_all = self.generation
        return at_all.sparsecore_launch_cost if self.on_sparsecore else at_all.launch_cost

    @property
    def vector_rate(self) -> float:
        """Elementwise operations a second."""
        at_all = self.generation
        on_subcore = at_all.subcore_rate * at_all.subcore_operations
        return on_subcore if self.on_sparsecore else at_all.vector_rate

    @property
    def vmem_bandwidth(self) -> float:
        """Bytes a second that are loaded or stored."""
        at_all = self.generation
        return 4 * at_all.subcore_rate if self.on_sparsecore else at_all.vmem_bandwidth

    @property
    def on_sparsecore(self) -> bool:
        """Whether the kernel being stepped runs on a SparseCore."""
        return self.kernel is not None and self.kernel.on_sparsecore

    def _issue(self) -> None:
        """A SparseCore takes longer to start a DMA or to signal: what it takes more."""
        if self.on_sparsecore:
            self.work(self.generation.sparsecore_issue_cost - self.generation.issue_cost)

    def share_memory(self, other: Stepper, lock: threading.Lock) -> None:
        """Allocates from `other`'s buffers and semaphores: live devices must agree on their
        numbers.
        """
        self.buffers, self.semaphores = other.buffers, other.semaphores
        self._allocated, self.contents, self._lock = other._allocated, other.contents, lock

    # Memory ---------------------------------------------------------------------------------------

    def allocate(
        self, key: tuple[Any, ...], aval: Any, name: str, space: str | None = None
    ) -> View:
        """The buffer or semaphores of `key`: the same on every device and at every visit, as on the
        machine.
        """
        with self._lock:
            if key not in self._allocated:
                self._allocated[key] = self._new_buffer(key, aval, name, space)
            return self._allocated[key].view()

    def _new_buffer(self, key: tuple[Any, ...], aval: Any, name: str, space: str | None) -> Buffer:
        space = space or jaxprs.memory_space(aval)
        shape = tuple(aval.shape)
        if space == "semaphore_mem":
            owner = 0 if key[0] == "barrier" else self.kernel_number
            first = len(self.semaphores)
            names = [name + (str(list(i)) if i else "") for i in np.ndindex(*shape)]
            self.semaphores.extend(Semaphore(n, owner) for n in names)
            return Buffer(first, name, space, shape, 1, owner)
        number = len(self.buffers)
        buffer = Buffer(number, name, space, shape, element_size(aval), self.kernel_number)
        self.buffers.append(buffer)
        table = space == "hbm" or (space == "vmem" and len(shape) == 1)
        table &= aval.dtype == np.int32 and self.contents.may_hold(shape)
        if space == "smem" or table:
            self.contents.hold(buffer, aval.dtype, self.devices.n_lanes)
        return buffer

    def follow(self, view: View, aval: Any, value: Any, lanes: np.ndarray) -> None:
        """Keeps the contents of an operand in mind if they are known: tables, sizes, offsets."""
        small = self.contents.may_hold(view.buffer.shape)
        if small and isinstance(value, Known) and value.values.dtype.kind in "iub":
            with self._lock:
                self.contents.hold(view.buffer, aval.dtype, self.devices.n_lanes)
        self.contents.store(view, value, lanes)

    def view(self, view: operations.RefView, operands: list[Any]) -> View:
        """A ref operand's view with its transforms applied."""

        def read(item: Any) -> Lanes:
            return operands[item.index] if isinstance(item, operations.Slot) else item

        if isinstance(view.ref, operations.Select):
            which = read(view.ref.index)
            if which is UNKNOWN:
                raise DataDependent("which ref is selected")
            out = self.view(view.ref.refs[int(which)], operands)
        else:
            out = operands[view.ref.index]
        for transform in view.transforms:
            out = out.transformed(transform, read)
        return out

    def semaphore(self, view: operations.RefView, operands: list[Any]) -> Lanes:
        """The number (or one per lane) of the semaphore that a view names."""
        at = self.view(view, operands)
        return at.buffer.id + at.base

    # DMAs and semaphores --------------------------------------------------------------------------

    def perform(self, eqn: JaxprEqn, op: Operation, operands: list[Any], lanes: np.ndarray) -> Any:
        """Performs one operation of `jaxprs`; returns the loaded value of loads and reads."""

        def value(item: Any) -> Any:
            out = operands[item.index] if isinstance(item, operations.Slot) else item
            if out is UNKNOWN:
                raise DataDependent("a semaphore's value")
            return out

        source = self.source(eqn)
        match op:
            case operations.DmaStart():
                device_id = operations.read_tree(op.device_id, operands)
                home = None if device_id is None else self._home(op.dst_sem, operands)
                target = self.devices.target(device_id, op.logical, lanes, None, home)
                src, dst = self.view(op.src, operands), self.view(op.dst, operands)
                self._issue()
                src_sem = None if op.src_sem is None else self.semaphore(op.src_sem, operands)
                self.contents.copy(src, dst, lanes, target)
                self.emit(
                    Start(
                        lanes,
                        self.take_busy(),
                        source,
                        src,
                        dst,
                        target,
                        src_sem,
                        self.semaphore(op.dst_sem, operands),
                        src.nbytes,
                    )
                )
            case operations.DmaWait():
                sem = self.semaphore(op.sem, operands)
                nbytes = self.view(op.sized_by, operands).nbytes
                self.emit(Wait(lanes, self.take_busy(), source, sem, nbytes, is_dma=True))
            case operations.Signal():
                device_id, core = (
                    operations.read_tree(i, operands) for i in (op.device_id, op.core)
                )
                home = self._home(op.sem, operands)
                device = self.devices.target(device_id, op.logical, lanes, core, home)
                sem = self.semaphore(op.sem, operands)
                amount = value(op.value)
                self._issue()
                self.emit(Signal(lanes, self.take_busy(), source, sem, device, amount))
            case operations.Wait():
                sem = self.semaphore(op.sem, operands)
                keeps = not value(op.decrement)
                amount = value(op.value)
                self.emit(Wait(lanes, self.take_busy(), source, sem, amount, False, keeps))
            case operations.Read():
                return self._read(source, self.semaphore(op.sem, operands), lanes)
            case operations.Access():
                return self._access(source, op, operands, lanes)
        return None

    def _home(self, view: operations.RefView, operands: list[Any]) -> CoreMesh | None:
        buffer = self.view(view, operands).buffer
        return self.homes.get((buffer.space, buffer.id))

    def _read(self, source: Source, sem: Lanes, lanes: np.ndarray) -> int:
        assert self.read_semaphore is not None, "programs that read semaphores are stepped live"
        self.emit(Read(lanes, self.take_busy(), source, sem))
        return self.read_semaphore(sem)

    def _access(
        self, source: Source, op: operations.Access, operands: list[Any], lanes: np.ndarray
    ) -> Any:
        view = self.view(op.view, operands)
        if view.buffer.space == "smem":
            self.emit(Access(lanes, 0.0, source, view, op.writes))
            loaded = self.contents.load(view, lanes)
            if op.writes:
                self.contents.store(view, operands[op.value.index], lanes)
            return loaded
        nbytes = view.nbytes
        if not isinstance(nbytes, np.ndarray):
            seconds = nbytes / self.vmem_bandwidth
            if self.on_sparsecore and op.writes:
                self._go_beside("stores", seconds)
            else:
                self.work(seconds)
        self.emit(Access(lanes, self.take_busy(waits=False), source, view, op.writes))
        loaded = self.contents.load(view, lanes)
        if op.writes:
            self.contents.store(view, UNKNOWN, lanes)
        return loaded


def _is_scalar(column: Instruction) -> bool:
    return isinstance(column, Access) and column.view.buffer.space == "smem"
