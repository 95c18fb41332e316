"""Verifies collectives on the devices and, on real ones, times them.

Time is device time, not dispatch: a chain of collectives runs inside one program, each waiting for
the one before through one row of 128 elements that it overwrites in its operand, and the time of a
chain of one is taken off. Simulated devices have no such time: how long the interpreter took is
kept under a name of its own.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_collectives
from benchmarks import devices
from benchmarks.cases import LANES, Case
from benchmarks.settings import FlagError, Settings
from pallas_collectives.backends.algorithms import ALGORITHMS
from pallas_collectives.errors import CollectiveError

SAMPLES = 9  # chains timed; their median is the time, the fastest and the slowest its spread


@dataclasses.dataclass(frozen=True)
class Row:
    """A collective verified and, where it says so, timed.

    Attributes:
      op: lax's name.
      algorithm: the backend's algorithm; None for its own choice.
      backend: "pallas", "nccl", or "xla" for `jax.lax` itself.
      size: bytes of the full array.
      count: see `cases`.
      type: dtype.
      devices: devices that take part in one collective.
      wrong: elements that differ from numpy's result or from lax's; None where it did not run.
      interpret_ms: wall time of the interpreter on simulated devices. No TPU's time.
      time_us: median device time of one collective; its least and greatest below.
      algbw: size / time, in GB/s.
      busbw: see `cases`, in GB/s.
      refused: why the collective cannot run so here: a clear error, as it should be.
      error: why it failed.
    """

    op: str
    algorithm: str | None
    backend: str
    size: int
    count: int
    type: str
    devices: int
    wrong: int | None = None
    interpret_ms: float | None = None
    time_us: float | None = None
    time_us_min: float | None = None
    time_us_max: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    refused: str = ""
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether something is wrong."""
        return bool(self.wrong or self.error)

    def __str__(self) -> str:
        return f"{self.op} {self.algorithm or ''} {self.backend}"


class Task(NamedTuple):
    """One row to be."""

    case: Case
    dtype: str
    size: int
    backend: str
    algorithm: str | None


def plan(settings: Settings) -> list[Task]:
    """The rows to measure, those that share operands one after another."""
    return [
        Task(case, dtype, size, backend, algorithm)
        for case, dtype, size in itertools.product(settings.cases, settings.dtypes, settings.sizes)
        for backend in settings.backends
        for algorithm in _algorithms(case, backend, settings.algorithms)
    ]


def _algorithms(case: Case, backend: str, named: tuple[str, ...]) -> tuple[str | None, ...]:
    if backend != "pallas":
        return (None,)
    offered = ALGORITHMS[case.op]
    return tuple(a for a in named if a.partition(":")[0] in offered) if named else offered


def rows(tasks: list[Task], settings: Settings, mesh: Mesh) -> Iterator[Row]:
    """Runs the tasks."""
    rng = np.random.default_rng(settings.seed)
    for (case, dtype, size), group in itertools.groupby(tasks, key=lambda task: task[:3]):
        problem = Problem(case, dtype, size, mesh, settings.axes, rng)
        for task in group:
            yield _row(problem, task, settings)


def _row(problem: "Problem", task: Task, settings: Settings) -> Row:
    base = Row(
        op=task.case.name,
        algorithm=task.algorithm,
        backend=task.backend,
        size=problem.nbytes,
        count=problem.count,
        type=task.dtype,
        devices=problem.n,
    )
    call = problem.call(task.backend, task.algorithm)
    try:
        program = problem.compile(call)
        start = time.perf_counter()
        result = jax.block_until_ready(program(problem.operands))
        seconds = time.perf_counter() - start
        wrong = problem.wrong(result)
        if devices.kind() == "simulated":
            in_interpreter = seconds * 1e3 if task.backend == "pallas" else None
            return dataclasses.replace(base, wrong=wrong, interpret_ms=in_interpreter)
        if wrong:
            return dataclasses.replace(base, wrong=wrong)
        times = problem.time(call, settings.warmup, settings.iters)
        return _timed(base, wrong, times, task.case.busbw(problem.n))
    except CollectiveError as error:
        return dataclasses.replace(base, refused=str(error))
    except Exception as error:  # a sweep goes on, and fails at its end
        pltpu.reset_tpu_interpret_mode_state()
        return dataclasses.replace(base, error=f"{type(error).__name__}: {error}")


def _timed(row: Row, wrong: int, seconds: list[float], busbw: float) -> Row:
    median = statistics.median(seconds)
    if median <= 0:
        note = "no longer than dispatch takes to vary: raise --iters"
        return dataclasses.replace(row, wrong=wrong, refused=note)
    return dataclasses.replace(
        row,
        wrong=wrong,
        time_us=median * 1e6,
        time_us_min=min(seconds) * 1e6,
        time_us_max=max(seconds) * 1e6,
        algbw=row.size / median / 1e9,
        busbw=row.size / median / 1e9 * busbw,
    )


class Problem:
    """A case at one size: random operands on the devices, and what must come out."""

    def __init__(
        self,
        case: Case,
        dtype: str,
        size: int,
        mesh: Mesh,
        axes: tuple[str, ...],
        rng: np.random.Generator,
    ) -> None:
        """Of `size` bytes or up to a row of 128 elements for each device less, as nccl-tests.

        Raises:
          FlagError: less than such a row for each device.
        """
        self.case, self._mesh, self._axes = case, mesh, axes
        self.n = int(np.prod([mesh.shape[axis] for axis in axes]))
        smallest = self.n * LANES * jnp.dtype(dtype).itemsize
        if size < smallest:
            rule = f"{self.n} devices with {LANES} elements of {dtype} each need {smallest} bytes"
            raise FlagError(f"--sizes with {size}", rule, "begin with a larger size")
        rows = size // smallest
        self.nbytes = rows * smallest
        self.count = rows * LANES * (self.n if case.whole else 1)
        shape = (mesh.size, *case.operand(self.n, rows))
        self._values = _random(shape, dtype, self.n if case.adds else 0, rng)
        self._spec = PartitionSpec(mesh.axis_names)
        self.operands = jax.device_put(self._values, NamedSharding(mesh, self._spec))

    def call(self, backend: str, algorithm: str | None) -> Callable[[jax.Array], jax.Array]:
        """The collective on one device's operand."""
        if backend == "xla":
            return lambda x: self.case.call(lax, x, self._axes)
        how = {"backend": backend, "algorithm": algorithm}
        return lambda x: self.case.call(pallas_collectives, x, self._axes, **how)

    def compile(self, fn: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        """A program that runs fn on every device's operand."""
        mapped = jax.shard_map(
            lambda x: fn(x[0])[None],
            mesh=self._mesh,
            in_specs=self._spec,
            out_specs=self._spec,
            check_vma=False,
        )
        return jax.jit(mapped).lower(self.operands).compile()

    def wrong(self, result: jax.Array) -> int:
        """How many elements of a result differ from numpy's or, where lax runs here, from lax's."""
        wrong = 0
        for number, shard in enumerate(result.addressable_shards):
            got = np.asarray(shard.data)[0]
            expected = self._by_numpy[shard.index[0].start or 0]
            differs = _differs(got, expected.astype(got.dtype))
            if self._by_lax is not None:
                by_lax = self._by_lax.addressable_shards[number].data
                differs = differs | _differs(got, np.asarray(by_lax)[0])
            wrong += int(np.sum(differs))
        return wrong

    @functools.cached_property
    def _by_lax(self) -> jax.Array | None:
        if devices.kind() == "simulated" and not self.case.lax_on_cpu:
            return None
        return self.compile(self.call("xla", None))(self.operands)

    @functools.cached_property
    def _by_numpy(self) -> dict[int, np.ndarray]:
        """Device number -> result."""
        names = self._mesh.axis_names
        numbers = np.arange(self._mesh.size).reshape(tuple(self._mesh.shape.values()))
        first = [names.index(axis) for axis in self._axes]
        groups = np.moveaxis(numbers, first, range(len(first))).reshape(self.n, -1).T
        return {
            device: result
            for members in groups.tolist()
            for device, result in zip(
                members, self.case.reference(self._values[members]), strict=True
            )
        }

    def time(self, call: Callable[[jax.Array], jax.Array], warmup: int, iters: int) -> list[float]:
        """Device seconds of one collective, several times over."""

        def chain(length: int) -> Callable[[jax.Array], jax.Array]:
            def link(_: Any, x: jax.Array) -> jax.Array:
                row = call(x)[:1, :1].astype(x.dtype)
                return lax.dynamic_update_slice(x, row, (0, 0, 0))

            return self.compile(lambda x: lax.fori_loop(0, length, link, x))

        one, many = chain(1), chain(1 + iters)
        x = self.operands

        def clock(program: Callable[[jax.Array], jax.Array]) -> float:
            nonlocal x
            start = time.perf_counter()
            x = jax.block_until_ready(program(x))
            return time.perf_counter() - start

        for _ in range(warmup):
            clock(one), clock(many)
        dispatch = statistics.median(clock(one) for _ in range(SAMPLES))
        return [(clock(many) - dispatch) / iters for _ in range(SAMPLES)]


def _differs(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    if got.dtype != want.dtype or got.shape != want.shape:
        return np.ones(got.shape, bool)
    return got != want


def _random(
    shape: tuple[int, ...], dtype: str, summands: int, rng: np.random.Generator
) -> np.ndarray:
    """Random values; whole numbers whose sum over `summands` devices is exact, if that is given."""
    to, limit = jnp.dtype(dtype), 100
    if to == jnp.bool_:
        return rng.integers(0, 2, shape, np.int8).astype(to)
    if summands and jnp.issubdtype(to, jnp.floating):
        exact_up_to = 2 ** (jnp.finfo(to).nmant + 1)
        limit = max(1, min(limit, exact_up_to // summands))
    return rng.integers(-limit, limit + 1, shape, np.int8).astype(to)
