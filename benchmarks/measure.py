"""Verifies collectives on the devices and, on real ones, times them.

Simulated devices have no times: how long the interpreter took is kept under a name of its own.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from benchmarks import devices, peaks, timing
from benchmarks.cases import Case, chosen
from benchmarks.problem import Problem
from benchmarks.rows import Measured, Soaked
from benchmarks.settings import Settings
from pallas_collectives import multihost
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import CollectiveError

Checked = TypeVar("Checked", Measured, Soaked)


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
    return chosen(case, named or ALGORITHMS[case.op])


def rows(tasks: Sequence[Task], settings: Settings, mesh: Mesh) -> Iterator[Measured]:
    """Runs the tasks."""
    rng = np.random.default_rng(settings.seed)
    simulated = devices.kind() == "simulated"
    peak = None if simulated else peaks.of_group(mesh, settings.axes)
    for (case, dtype, size), group in itertools.groupby(tasks, key=lambda task: task[:3]):
        problem = Problem(case, dtype, size, mesh, settings.axes, rng)
        for task in group:
            row = Measured(
                op=case.name,
                algorithm=task.algorithm,
                backend=task.backend,
                size=problem.nbytes,
                count=problem.count,
                type=dtype,
                devices=problem.n,
            )
            if simulated or settings.check:
                row = _attempt(_verified, row, problem, settings)
            if settings.timed and not simulated and not row.wrong and not row.reason:
                row = _attempt(_timed, row, problem, settings)
                row = with_rates(row, case.busbw(problem.n), peak)
            yield row


def _attempt(
    step: Callable[[Measured, Problem, Settings], Measured],
    row: Measured,
    problem: Problem,
    settings: Settings,
) -> Measured:
    """A row after a step; refused or failed if that raises: the sweep goes on."""
    try:
        row = step(row, problem, settings)
    except CollectiveError as error:
        row = dataclasses.replace(row, refused=str(error))
    except Exception as error:
        pltpu.reset_tpu_interpret_mode_state()
        row = dataclasses.replace(row, error=f"{type(error).__name__}: {error}")
    return agreed(row) if jax.process_count() > 1 else row


def agreed(row: Checked) -> Checked:
    """What all processes make of a row: none goes on with one that failed on another."""
    mine = np.array([row.wrong or 0, bool(row.error), bool(row.refused)], np.int32)
    all_ = np.asarray(multihost.process_allgather(mine))
    wrong = None if row.wrong is None else int(all_[:, 0].sum())
    error, refused = row.error, row.refused
    if all_[:, 1].any() and not error:
        error = f"it failed on process {int(np.argmax(all_[:, 1]))}, which says why"
    if all_[:, 2].any() and not refused:
        refused = f"process {int(np.argmax(all_[:, 2]))} refuses it"
    return dataclasses.replace(row, wrong=wrong, error=error, refused=refused)


def _verified(row: Measured, problem: Problem, settings: Settings) -> Measured:
    by_xla, simulated = row.backend == "xla", devices.kind() == "simulated"
    program = problem.compile(problem.call(row.backend, row.algorithm), by_xla=by_xla)
    with timing.traced(settings.trace if simulated else "", f"{row} {row.type} {row.size}"):
        start = time.perf_counter()
        result = jax.block_until_ready(program(problem.operands))
        seconds = time.perf_counter() - start
    return dataclasses.replace(
        row,
        wrong=problem.wrong(result) if settings.check else None,
        interpret_ms=seconds * 1e3 if simulated and row.backend == "pallas" else None,
    )


def _timed(row: Measured, problem: Problem, settings: Settings) -> Measured:
    call, by_xla = problem.call(row.backend, row.algorithm), row.backend == "xla"
    clock = timing.device_seconds if settings.chain else timing.dispatched_seconds
    with timing.traced(settings.trace, f"{row} {row.type} {row.size}"):
        seconds = clock(problem, call, settings.warmup, settings.iters, by_xla=by_xla)
    median, least, greatest = (of(seconds) * 1e6 for of in (timing.median, min, max))
    return dataclasses.replace(row, time_us=median, time_us_min=least, time_us_max=greatest)


def with_rates(row: Measured, busbw: float, peak: float | None) -> Measured:
    """A row with the bandwidths that follow from its time.

    Args:
      row: a row.
      busbw: busbw / algbw.
      peak: what `of_peak` is a share of, in GB/s, if it is known.
    """
    if row.time_us is None:
        return row
    algbw = row.size / row.time_us / 1e3
    of_peak = 100 * algbw * busbw / peak if peak else None
    return dataclasses.replace(row, algbw=algbw, busbw=algbw * busbw, of_peak=of_peak)
