"""Mixed collectives back to back: the calls that a model makes, without a pause between them.

A program holds a random sequence of collectives. What each returns is added to the operand of the
next, in whole numbers that wrap round: one wrong element anywhere stays wrong to the end, and numpy
goes the same way beside it.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_collectives
from benchmarks.cases import LANES, Case
from benchmarks.measure import Task, agreed, plan
from benchmarks.rows import Soaked
from benchmarks.settings import Settings
from pallas_collectives.errors import CollectiveError

DTYPE = np.int32
ROWS = 16  # of 128 elements in a block


class Program(NamedTuple):
    """Collectives in their order."""

    steps: tuple[Task, ...]

    def __str__(self) -> str:
        return ", ".join(f"{step.case.name} {step.algorithm or ''}".strip() for step in self.steps)


def programs(settings: Settings, mesh: Mesh, length: int) -> Iterator[Program]:
    """Random programs without end, of this many collectives, those that run here."""
    runs = [task for task in _tasks(settings) if _is_served(task, mesh)]
    rng = np.random.default_rng(settings.seed)
    while runs:
        yield Program(tuple(runs[i] for i in rng.integers(0, len(runs), length)))


def _tasks(settings: Settings) -> list[Task]:
    ours = tuple(backend for backend in settings.backends if backend != "xla")
    once = dataclasses.replace(settings, dtypes=(np.dtype(DTYPE).name,), sizes=(1,), backends=ours)
    return plan(once)


def _is_served(task: Task, mesh: Mesh) -> bool:
    """Whether a collective is not refused here, as some algorithms are on some chips."""
    try:
        _lowered(Program((task,)), mesh)
    except CollectiveError:
        return False
    return True


def rows(
    settings: Settings, mesh: Mesh, number: int, runs: int, length: int, first: int = 0
) -> Iterator[Soaked]:
    """Soaks with this many programs of `length` collectives, each run `runs` times; of these, the
    first are left out.
    """
    chosen = enumerate(itertools.islice(programs(settings, mesh, length), number))
    for i, program in itertools.islice(chosen, first, None):
        row = _row(program, mesh, runs, settings.seed + i)
        yield agreed(row) if jax.process_count() > 1 else row


def _row(program: Program, mesh: Mesh, runs: int, seed: int) -> Soaked:
    base = Soaked(op=str(program), type=np.dtype(DTYPE).name, devices=mesh.size)
    try:
        x = _operands(mesh.size, seed)
        step = _lowered(program, mesh).compile()
        y = jax.device_put(x, _sharding(mesh))
        start = time.perf_counter()
        for _ in range(runs):
            y = step(y)
        jax.block_until_ready(y)
        took = time.perf_counter() - start
        for _ in range(runs):
            x = _by_numpy(program, x)
        return dataclasses.replace(
            base, runs=runs, calls=runs * len(program.steps), seconds=took, wrong=_wrong(y, x)
        )
    except Exception as error:  # the next program may tell more
        pltpu.reset_tpu_interpret_mode_state()
        return dataclasses.replace(base, error=f"{type(error).__name__}: {error}")


def _operands(n: int, seed: int) -> np.ndarray:
    shape = (n, n, ROWS, LANES)
    return np.random.default_rng(seed).integers(-(2**31), 2**31, shape, np.int64).astype(DTYPE)


def _sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def _lowered(program: Program, mesh: Mesh) -> jax.stages.Lowered:
    spec = PartitionSpec(mesh.axis_names)

    def body(x: jax.Array) -> jax.Array:
        x = x[0]
        for task in program.steps:
            how = {"backend": task.backend, "algorithm": task.algorithm}
            operand = _operand(task.case, x)
            x = x + task.case.call(pallas_collectives, operand, mesh.axis_names, **how)
        return x[None]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    n = mesh.size
    x = jax.ShapeDtypeStruct((n, n, ROWS, LANES), DTYPE, sharding=_sharding(mesh))
    return jax.jit(mapped).lower(x)


def _operand(case: Case, x: jax.Array) -> jax.Array:
    """The blocks of x that a collective takes: one, or all."""
    return x[: case.operand(len(x), ROWS)[0]]


def _by_numpy(program: Program, xs: np.ndarray) -> np.ndarray:
    for task in program.steps:
        taken = task.case.operand(len(xs), ROWS)[0]
        result = task.case.reference(xs[:, :taken]).astype(np.int64)
        xs = (xs + result).astype(DTYPE)  # wraps round, as on the device
    return xs


def _wrong(result: jax.Array, expected: np.ndarray) -> int:
    """Elements that differ, on the devices of this process."""
    shards = result.addressable_shards
    return sum(int(np.sum(np.asarray(s.data) != expected[s.index])) for s in shards)
