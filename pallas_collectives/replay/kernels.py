"""Steps a `pallas_call`: its buffers, its grid, and the block copies that Pallas itself makes
around the body. A kernel on a SparseCore has no grid, and all its operands are in HBM.

Operands left in HBM (`memory_space=ANY` or HBM) are handed to the kernel as they are. Operands in
VMEM, and parts of those in SMEM, are copied in before the body and out after it; over a grid,
blocks are double-buffered: the next block is fetched while the body runs, as Pallas' own pipeline
does. These copies are marked implicit: interpret mode performs them outside its DMAs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from pallas_collectives.replay import jaxprs, meetings, names
from pallas_collectives.replay.program import Enter, Kernel, Leave, Start, Wait
from pallas_collectives.replay.stepper import Step, Stepper
from pallas_collectives.replay.values import UNKNOWN
from pallas_collectives.replay.views import DataDependent, View, dense_dims

# The index of a block on each dimension of its array, or on each device: per lane where it differs.
Index = tuple[Any, ...]


class _Blocked:
    """An operand that reaches the kernel as blocks in VMEM or SMEM: where it lies in HBM, its
    slots, and which block is in which.
    """

    def __init__(
        self,
        stepper: Stepper,
        key: tuple[Any, ...],
        mapping: Any,
        name: str,
        space: str,
        is_output: bool,
    ):
        self.mapping = mapping
        self.is_output = is_output
        shape, self.dims = mapping.array_aval.shape, jaxprs.block_dims(mapping)
        self.block = tuple(min(dim.size, n) for dim, n in zip(self.dims, shape, strict=True))
        self.array = stepper.allocate((*key, "array"), mapping.array_aval, name, "hbm")
        n_slots = 1 if self.block == tuple(shape) else jaxprs.buffer_count(mapping)
        slots = self.block if n_slots == 1 else (n_slots, *self.block)
        block_aval = mapping.array_aval.update(shape=slots)
        self.slots = stepper.allocate((*key, "block"), block_aval, f"{name} block", space)
        self.semaphores = stepper.allocate(
            (*key, "sem"),
            mapping.array_aval.update(shape=(max(n_slots, 2),)),
            f"{name} copy",
            "semaphore_mem",
        )
        self.n_slots = n_slots
        self.begin()

    def begin(self) -> None:
        """No block has been used yet."""
        self.visits = 0  # blocks begun
        self.current: tuple[int, ...] | None = None
        self.fresh = False  # fetched but not yet awaited

    def index(
        self, stepper: Stepper, point: tuple[int, ...], scalars: list[Any], lanes: np.ndarray
    ) -> Index:
        out = stepper.run(self.mapping.index_map_jaxpr, [*point, *scalars], lanes)
        if any(i is UNKNOWN for i in out):
            raise DataDependent("a block's index")
        return tuple(i if isinstance(i, np.ndarray) else int(i) for i in out)

    def slot(self, visit: int) -> View:
        view = self.slots
        offset = (visit % self.n_slots) * math.prod(self.block) * view.itemsize
        return View(view.buffer, offset, dense_dims(self.block, view.itemsize), view.itemsize)

    def kernel_view(self, visit: int) -> View:
        view = self.slot(visit)
        kept = tuple(d for d, dim in zip(view.dims, self.dims, strict=True) if not dim.squeezed)
        return View(view.buffer, view.base, kept, view.itemsize)

    def in_array(self, index: tuple[int, ...]) -> View:
        view = self.array
        base, dims = 0, []
        for i, size, dim, (n, stride) in zip(index, self.block, self.dims, view.dims, strict=True):
            start = i if dim.by_element else i * size
            if not 0 <= start < max(n, 1):
                raise IndexError(f"block {i} begins at {start} of {n} of {view.buffer.name}")
            base += start * stride
            dims.append((min(size, n - start), stride))
        return View(view.buffer, base, tuple(dims), view.itemsize)

    def semaphore(self, visit: int) -> int:
        return self.semaphores.buffer.id + visit % self.n_slots


def _is_cut(mapping: Any) -> bool:
    """Whether an operand's blocks are parts of it."""
    shape = mapping.array_aval.shape
    sizes = (dim.size for dim in jaxprs.block_dims(mapping))
    return any(size < n for size, n in zip(sizes, shape, strict=True))


def compile_kernel(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    """The step of a `pallas_call` equation."""

    def step(env: list[Any], lanes: np.ndarray) -> None:
        begun = begin(stepper, eqn, lanes)
        results = _Call(stepper, eqn, [env[i] for i in ins], lanes, begun).run()
        for o, result in zip(outs, results, strict=True):
            env[o] = result

    return step


def begin(stepper: Stepper, eqn: JaxprEqn, lanes: np.ndarray) -> Kernel:
    """The kernel that an equation calls; from here on its steps are what is stepped."""
    if len(lanes) != stepper.n_devices and stepper.read_semaphore is None:
        raise jaxprs.UnsupportedEquation("replay wants every device to call every kernel", eqn)
    kernel = Kernel(jaxprs.pallas_name(eqn), jaxprs.where(eqn))
    kernel.on_sparsecore = jaxprs.on_sparsecore(eqn)
    stepper.kernel_number += 1
    stepper.kernel = kernel
    stepper.kernels.append(kernel)
    stepper.collective_id = jaxprs.collective_id(eqn)
    return kernel


def leave(
    stepper: Stepper, eqn: JaxprEqn, lanes: np.ndarray, operands: list[Any], results: list[Any]
) -> bool:
    """Leaves the kernel that is stepped, or says that it goes on in the next.

    A kernel with semaphores among its results hands its copies on: it ends with the kernel that
    takes them as operands, and until then its memory is in use.
    """
    numbers = {stepper.kernel_number}
    for semaphore in _semaphores(operands):
        numbers |= stepper.unfinished.pop(semaphore, set())
    stepper.kernel = None
    for semaphore in _semaphores(results):
        stepper.unfinished[semaphore] = numbers
    if _semaphores(results):
        return True
    for number in sorted(numbers, reverse=True):
        stepper.emit(Leave(lanes, stepper.take_busy(), stepper.source(eqn), number))
    return False


def _semaphores(refs: list[Any]) -> list[int]:
    buffers = [ref.buffer for ref in refs if isinstance(ref, View)]
    return [buffer.id for buffer in buffers if buffer.space == "semaphore_mem"]


def _alike(
    lanes: np.ndarray, values: tuple[Any, ...]
) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """(lanes, values) of the lanes that have the same values, each an int or one per lane."""
    if not any(isinstance(v, np.ndarray) for v in values):
        yield lanes, tuple(int(v) for v in values)
        return
    table = np.stack([np.broadcast_to(np.asarray(v), lanes.shape) for v in values], axis=1)
    for row in np.unique(table, axis=0):
        yield lanes[(table == row).all(axis=1)], tuple(row.tolist())


class _Call:
    """One call of a kernel, on all devices."""

    def __init__(
        self, stepper: Stepper, eqn: JaxprEqn, args: list[Any], lanes: np.ndarray, kernel: Kernel
    ):
        self.stepper, self.eqn, self.lanes, self.kernel = stepper, eqn, lanes, kernel
        self.mapping = eqn.params["grid_mapping"]
        sizes = iter(args)
        grid = tuple(n if isinstance(n, int) else next(sizes) for n in self.mapping.grid)
        args = list(sizes)
        if any(n is UNKNOWN for n in grid):
            raise DataDependent("the size of a grid")
        self.grid: Index = grid
        launch, source = stepper.launch_cost, stepper.source(eqn)
        stepper.emit(Enter(lanes, launch, source, stepper.kernel_number))
        meetings.on_entry(stepper, eqn, lanes)
        self.blocked: list[_Blocked] = []
        self.refs: list[
            Any
        ] = []  # the kernel's operands; a `_Blocked` stands for its current block
        self._bind(args)

    def _bind(self, args: list[Any]) -> None:
        stepper, mapping = self.stepper, self.mapping
        jaxpr, _ = jaxprs.open_jaxpr(self.eqn.params["jaxpr"])
        n_index = mapping.num_index_operands
        n_blocks = mapping.num_inputs + mapping.num_outputs
        aliases = {o: i for i, o in self.eqn.params["input_output_aliases"]}
        held, ref_names = [], names.of_refs(jaxpr)
        for i, var in enumerate(jaxpr.invars):
            key = ("kernel", stepper.kernel_number, i)
            name = ref_names[i] or f"operand{i}"
            space = jaxprs.memory_space(var.aval)
            block = i - n_index
            output = block - mapping.num_inputs
            aliased = self.refs[aliases[output]] if output in aliases else None
            given = args[i] if i < n_index + mapping.num_inputs else UNKNOWN
            if isinstance(given, View):  # from a kernel that goes on, its semaphores with it
                self.refs.append(given)
                continue
            blocks = mapping.block_mappings[block] if 0 <= block < n_blocks else None
            if blocks and (space == "vmem" or (space == "smem" and _is_cut(blocks))):
                operand = _Blocked(stepper, key, blocks, name, space, output >= 0)
                if space == "smem":
                    stepper.follow(operand.array, blocks.array_aval, given, self.lanes)
                if isinstance(aliased, _Blocked):
                    operand.array = aliased.array
                self.blocked.append(operand)
                self.refs.append(operand)
            elif aliased is not None:
                self.refs.append(aliased)
            else:
                view = stepper.allocate(key, var.aval, name)
                self.refs.append(view)
                if space in ("smem", "hbm") and i < n_index + mapping.num_inputs:
                    stepper.follow(view, var.aval, given, self.lanes)
            ref = self.refs[-1]
            if i >= n_index + n_blocks and space == "hbm":
                self.kernel.hbm_scratch_bytes += ref.buffer.nbytes
            if ref is not aliased:
                held.append((ref.slots if isinstance(ref, _Blocked) else ref).buffer)
        self.kernel.held.take(held, self.kernel.line)

    def run(self) -> list[Any]:
        """Steps the kernel; returns its results: refs of what it may not be done with."""
        stepper, n_index = self.stepper, self.mapping.num_index_operands
        for lanes, grid, indices in self._groups():
            for operand in self.blocked:
                operand.begin()
            if len(lanes) < len(self.lanes):
                stepper.flush_busy(self.eqn, lanes)
            self._run(lanes, grid, indices)
        inputs = n_index + self.mapping.num_inputs
        results = self.refs[inputs : inputs + self.mapping.num_outputs]
        self.kernel.results = tuple(
            (ref.array if isinstance(ref, _Blocked) else ref).buffer.id for ref in results
        )
        goes_on = leave(stepper, self.eqn, self.lanes, self.refs[:inputs], results)
        return [r if goes_on and isinstance(r, View) else UNKNOWN for r in results]

    def _groups(self) -> Iterator[tuple[np.ndarray, tuple[int, ...], list[list[Index]]]]:
        """(lanes, grid, per point and operand the block's index) of devices that go through the
        same blocks.
        """
        scalars = self.refs[: self.mapping.num_index_operands]
        for lanes, grid in _alike(self.lanes, self.grid):
            points = list(itertools.product(*(range(n) for n in grid)))
            indices = [
                [b.index(self.stepper, p, scalars, lanes) for b in self.blocked] for p in points
            ]
            flat = tuple(i for row in indices for index in row for i in index)
            for same, values in _alike(lanes, flat):
                each = iter(values)
                yield same, grid, [[tuple(next(each) for _ in i) for i in row] for row in indices]

    def _run(self, lanes: np.ndarray, grid: tuple[int, ...], indices: list[list[Index]]) -> None:
        stepper, self.at = self.stepper, lanes
        points = itertools.product(*(range(n) for n in grid))
        for number, point in enumerate(points):
            last = number + 1 == len(indices)
            following: list[Any] = [None] * len(self.blocked) if last else indices[number + 1]
            for operand, index in zip(self.blocked, indices[number], strict=True):
                self._enter(operand, index)
            for operand, index in zip(self.blocked, following, strict=True):
                self._prefetch(operand, index)
            for operand in self.blocked:
                self._await_block(operand)
            stepper.grid = tuple(zip(point, grid, strict=True))
            args = [
                r.kernel_view(r.visits - 1) if isinstance(r, _Blocked) else r for r in self.refs
            ]
            stepper.run(self.eqn.params["jaxpr"], args, lanes)
            for operand, index in zip(self.blocked, following, strict=True):
                self._leave(operand, index)
        for operand in self.blocked:
            self._drain(operand)

    # A block's life: fetched (by the step before, or on entry), awaited, used, written back when
    # the index moves on.

    def _enter(self, operand: _Blocked, index: tuple[int, ...]) -> None:
        if operand.current == index:
            return
        if not operand.is_output and (operand.current is None or operand.n_slots == 1):
            self._copy(operand, index, operand.visits, outwards=False)
        if operand.is_output and operand.visits >= operand.n_slots:
            self._wait(operand, operand.visits)  # the slot's last block must have left it
        operand.current = index
        operand.visits += 1
        operand.fresh = not operand.is_output

    def _prefetch(self, operand: _Blocked, following: tuple[int, ...] | None) -> None:
        if operand.is_output or following is None or following == operand.current:
            return
        if operand.n_slots == 1:
            return  # no place for it before this one has been used
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
        self.stepper.contents.copy(src, dst, self.at, None)
        self.stepper.emit(
            Start(self.at, busy, source, src, dst, None, None, sem, nbytes, implicit=True)
        )

    def _wait(self, operand: _Blocked, visit: int) -> None:
        busy, source = self.stepper.take_busy(), self.stepper.source(self.eqn)
        sem = operand.semaphore(visit)
        nbytes = operand.slot(visit).nbytes
        self.stepper.emit(Wait(self.at, busy, source, sem, nbytes, is_dma=True, implicit=True))
