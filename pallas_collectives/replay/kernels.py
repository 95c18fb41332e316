"""Steps a `pallas_call`: its buffers, its grid, and the block copies that Pallas itself makes
around the body. A kernel on a SparseCore has no grid, and all its operands are in HBM.

Operands left in HBM (`memory_space=ANY` or HBM) are handed to the kernel as they are. Operands in
VMEM are copied in before the body and out after it; over a grid, blocks are double-buffered: the
next block is fetched while the body runs, as Pallas' own pipeline does. These copies are marked
implicit: interpret mode performs them outside its DMAs.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from pallas_collectives.replay import jaxprs, names
from pallas_collectives.replay.program import Enter, Kernel, Leave, Start, Wait
from pallas_collectives.replay.stepper import Step, Stepper
from pallas_collectives.replay.values import UNKNOWN
from pallas_collectives.replay.views import View, dense_dims


class _Blocked:
    """An operand that reaches the kernel as blocks in VMEM: where it lies in HBM, its slots, and
    which block is in which.
    """

    def __init__(self, stepper: Stepper, key: Any, mapping: Any, name: str, is_output: bool):
        self.mapping = mapping
        self.is_output = is_output
        shape, dims = mapping.array_aval.shape, jaxprs.block_dims(mapping)
        self.block = tuple(min(size, n) for (size, _), n in zip(dims, shape, strict=True))
        self.squeezed = tuple(squeezed for _, squeezed in dims)
        self.array = stepper.allocate((*key, "array"), mapping.array_aval, name, "hbm")
        n_slots = 1 if self.block == tuple(shape) else 2
        slots = self.block if n_slots == 1 else (n_slots, *self.block)
        block_aval = mapping.array_aval.update(shape=slots)
        self.slots = stepper.allocate((*key, "block"), block_aval, f"{name} block", "vmem")
        self.semaphores = stepper.allocate(
            (*key, "sem"), mapping.array_aval.update(shape=(2,)), f"{name} copy", "semaphore_mem"
        )
        self.n_slots = n_slots
        self.visits = 0  # blocks begun
        self.current: tuple[int, ...] | None = None
        self.fresh = False  # fetched but not yet awaited

    def index(
        self, stepper: Stepper, point: tuple[int, ...], scalars: list[Any]
    ) -> tuple[int, ...]:
        every = np.arange(stepper.n_devices)
        out = stepper.run(self.mapping.index_map_jaxpr, [*point, *scalars], every)
        if any(i is UNKNOWN or isinstance(i, np.ndarray) for i in out):
            raise jaxprs.UnsupportedEquation(
                "replay does not know block index maps that differ by device or depend on data"
            )
        return tuple(int(i) for i in out)

    def slot(self, visit: int) -> View:
        view = self.slots
        offset = (visit % self.n_slots) * math.prod(self.block) * view.itemsize
        return View(view.buffer, offset, dense_dims(self.block, view.itemsize), view.itemsize)

    def kernel_view(self, visit: int) -> View:
        view = self.slot(visit)
        kept = tuple(d for d, s in zip(view.dims, self.squeezed, strict=True) if not s)
        return View(view.buffer, view.base, kept, view.itemsize)

    def in_array(self, index: tuple[int, ...]) -> View:
        view = self.array
        base, dims = 0, []
        for i, size, (n, stride) in zip(index, self.block, view.dims, strict=True):
            base += i * size * stride
            dims.append((min(size, n - i * size), stride))
        return View(view.buffer, base, tuple(dims), view.itemsize)

    def semaphore(self, visit: int) -> int:
        return self.semaphores.buffer.id + visit % self.n_slots


def compile_kernel(stepper: Stepper, eqn: Any, ins: list[int], outs: list[int]) -> Step:
    """The step of a `pallas_call` equation, or of a kernel's on a SparseCore."""
    mapping = jaxprs.kernel_call(eqn)
    if any(not isinstance(n, int) for n in mapping.grid):
        raise jaxprs.UnsupportedEquation("replay does not know kernels with a dynamic grid")

    def step(env: list[Any], lanes: np.ndarray) -> None:
        if len(lanes) != stepper.n_devices and stepper.read_semaphore is None:
            raise jaxprs.UnsupportedEquation("replay wants every device to call every kernel")
        _Call(stepper, eqn, [env[i] for i in ins], lanes).run()
        for o in outs:
            env[o] = UNKNOWN

    return step


class _Call:
    """One call of a kernel, on all devices."""

    def __init__(self, stepper: Stepper, eqn: Any, args: list[Any], lanes: np.ndarray):
        self.stepper, self.eqn, self.lanes = stepper, eqn, lanes
        self.mapping = jaxprs.kernel_call(eqn)
        name = jaxprs.pallas_name(eqn)
        stepper.kernel_number += 1
        stepper.kernel = self.kernel = Kernel(name, jaxprs.where(eqn))
        stepper.kernels.append(self.kernel)
        stepper.collective_id = jaxprs.collective_id(eqn)
        self.kernel.on_sparsecore = self.mapping.on_sparsecore
        launch, source = stepper.launch_cost, stepper.source(eqn)
        stepper.emit(Enter(lanes, launch, source, stepper.kernel_number))
        self.blocked: list[_Blocked] = []
        self.refs: list[
            Any
        ] = []  # the kernel's operands; a `_Blocked` stands for its current block
        self._bind(args)

    def _bind(self, args: list[Any]) -> None:
        stepper, mapping = self.stepper, self.mapping
        jaxpr, _ = jaxprs.open_jaxpr(mapping.jaxpr)
        n_index = mapping.num_index_operands
        n_blocks = mapping.num_inputs + mapping.num_outputs
        aliases = mapping.aliases
        held, ref_names = [], names.of_refs(jaxpr)
        for i, var in enumerate(jaxpr.invars):
            key = ("kernel", stepper.kernel_number, i)
            name = ref_names[i] or f"operand{i}"
            space = jaxprs.memory_space(var.aval)
            block = i - n_index
            output = block - mapping.num_inputs
            aliased = self.refs[aliases[output]] if output in aliases else None
            if space == "vmem" and 0 <= block < n_blocks:
                operand = _Blocked(stepper, key, mapping.block_mappings[block], name, output >= 0)
                if isinstance(aliased, _Blocked):
                    operand.array = aliased.array
                self.blocked.append(operand)
                self.refs.append(operand)
            elif aliased is not None:
                self.refs.append(aliased)
            else:
                view = stepper.allocate(key, var.aval, name)
                self.refs.append(view)
                if space == "smem" and i < n_index + mapping.num_inputs:
                    stepper.store_smem(view, args[i], self.lanes)
                elif mapping.on_sparsecore and i < mapping.num_inputs:
                    stepper.contents[view.buffer.id] = args[i]
            ref = self.refs[-1]
            if i >= n_index + n_blocks and space == "hbm":
                self.kernel.hbm_scratch_bytes += ref.buffer.nbytes
            if ref is not aliased:
                held.append((ref.slots if isinstance(ref, _Blocked) else ref).buffer)
        self.kernel.held.take(held, self.kernel.line)

    def run(self) -> None:
        stepper = self.stepper
        grid = self.mapping.grid
        points = list(itertools.product(*(range(n) for n in grid)))
        scalars = self.refs[: self.mapping.num_index_operands]
        indices = [[b.index(stepper, p, scalars) for b in self.blocked] for p in points]
        for number, point in enumerate(points):
            for k, operand in enumerate(self.blocked):
                self._enter(operand, indices[number][k])
            for k, operand in enumerate(self.blocked):
                following = indices[number + 1][k] if number + 1 < len(points) else None
                self._prefetch(operand, following)
            for operand in self.blocked:
                self._await_block(operand)
            stepper.grid = tuple(zip(point, grid, strict=True))
            args = [
                r.kernel_view(r.visits - 1) if isinstance(r, _Blocked) else r for r in self.refs
            ]
            stepper.run(self.mapping.jaxpr, args, self.lanes)
            for k, operand in enumerate(self.blocked):
                following = indices[number + 1][k] if number + 1 < len(points) else None
                self._leave(operand, following)
        for operand in self.blocked:
            self._drain(operand)
        busy, source = stepper.take_busy(), stepper.source(self.eqn)
        stepper.emit(Leave(self.lanes, busy, source, stepper.kernel_number))
        stepper.kernel = None

    # A block's life: fetched (by the step before, or on entry), awaited, used, written back when
    # the index moves on.

    def _enter(self, operand: _Blocked, index: tuple[int, ...]) -> None:
        if operand.current == index:
            return
        if not operand.is_output and operand.current is None:
            self._copy(operand, index, operand.visits, outwards=False)
        if operand.is_output and operand.visits >= operand.n_slots:
            self._wait(operand, operand.visits)  # the slot's last block must have left it
        operand.current = index
        operand.visits += 1
        operand.fresh = not operand.is_output

    def _prefetch(self, operand: _Blocked, following: tuple[int, ...] | None) -> None:
        if operand.is_output or following is None or following == operand.current:
            return
        self._copy(operand, following, operand.visits, outwards=False)

    def _await_block(self, operand: _Blocked) -> None:
        if not operand.is_output and operand.fresh:
            self._wait(operand, operand.visits - 1)
            operand.fresh = False

    def _leave(self, operand: _Blocked, following: tuple[int, ...] | None) -> None:
        if operand.is_output and following != operand.current:
            assert operand.current is not None
            self._copy(operand, operand.current, operand.visits - 1, outwards=True)

    def _drain(self, operand: _Blocked) -> None:
        if operand.is_output:
            for visit in range(max(0, operand.visits - operand.n_slots), operand.visits):
                self._wait(operand, visit)

    def _copy(
        self, operand: _Blocked, index: tuple[int, ...], visit: int, *, outwards: bool
    ) -> None:
        inner, outer = operand.slot(visit), operand.in_array(index)
        src, dst = (inner, outer) if outwards else (outer, inner)
        busy, source = self.stepper.take_busy(), self.stepper.source(self.eqn)
        sem = operand.semaphore(visit)
        nbytes = inner.nbytes
        self.stepper.emit(
            Start(self.lanes, busy, source, src, dst, None, None, sem, nbytes, implicit=True)
        )

    def _wait(self, operand: _Blocked, visit: int) -> None:
        busy, source = self.stepper.take_busy(), self.stepper.source(self.eqn)
        sem = operand.semaphore(visit)
        nbytes = operand.slot(visit).nbytes
        self.stepper.emit(Wait(self.lanes, busy, source, sem, nbytes, is_dma=True, implicit=True))
