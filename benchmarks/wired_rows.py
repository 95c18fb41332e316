"""Time beside error over narrower wires: `python -m benchmarks --wire=int8,float8_e4m3fn`.

Each collective runs without a wire and over each one, on the devices there are, and on modelled
pods. A modelled time is that of the kernels by the replay, and of XLA's passes before and behind by
its cycles. Errors are the largest of any number, in percent of the largest number of the result.
On devices they are those of the results; for pods those of as many terms of normal numbers.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import devices, replay_rows, timing
from benchmarks.cases import Case
from benchmarks.problem import Problem
from benchmarks.rows import Wired
from benchmarks.settings import Settings
from pallas_collectives import catalogue, wires
from pallas_collectives.backends import counters
from pallas_collectives.backends.plans import WirePlan
from pallas_collectives.errors import CollectiveError
from pallas_collectives.wires import Wire

_NUMBERS = 1 << 13  # of each term from which a pod's errors are taken


class Task(NamedTuple):
    """A collective of a dtype and a size by a backend, or on a pod, over each wire."""

    case: Case
    dtype: str
    size: int
    backend: str = "pallas"
    pod: str = ""


def plan(settings: Settings) -> list[Task]:
    """What is measured on the devices there are, or replayed."""
    sums_and_moves = [case for case in settings.cases if case.lax_everywhere]
    if settings.pods:
        return [
            Task(case, dtype, size, pod=pod)
            for pod in settings.pods
            for case in sums_and_moves
            for dtype in settings.dtypes
            for size in settings.sizes
        ]
    return [
        Task(case, dtype, size, backend)
        for case in sums_and_moves
        for dtype in settings.dtypes
        for size in settings.sizes
        for backend in settings.backends
    ]


def rows(tasks: Sequence[Task], settings: Settings, mesh: Mesh) -> Iterator[Wired]:
    """A row without a wire for each task, and then one for each wire."""
    rng = np.random.default_rng(settings.seed)
    for task in tasks:
        run = _replayed if task.pod else _measured
        plain: Wired | None = None
        for wire in (None, *map(Wire, settings.wires)):
            row = _row(task, wire)
            try:
                row = run(task, row, wire, settings, mesh, rng)
            except CollectiveError as error:
                row = dataclasses.replace(row, refused=str(error))
            except Exception as error:  # a sweep goes on, and fails at its end
                row = dataclasses.replace(row, error=f"{type(error).__name__}: {error}")
            if plain is not None and plain.time_us and row.time_us:
                row = dataclasses.replace(row, of_plain=100 * row.time_us / plain.time_us)
            plain = plain or row
            yield row


def _row(task: Task, wire: Wire | None) -> Wired:
    where = task.pod or f"{devices.kind()} {task.backend}"
    return Wired(
        op=task.case.name, type=task.dtype, size=task.size, where=where, wire=str(wire or "none")
    )


def _sent(plans: Sequence[object]) -> tuple[float, float]:
    """Bytes on the wire in percent, and the seconds of XLA's passes on a modelled chip."""
    used = [plan for plan in plans if isinstance(plan, WirePlan) and plan.algorithm]
    return (100 * used[0].sent / used[0].nbytes, used[0].passes_us) if used else (100.0, 0.0)


def _replayed(
    task: Task,
    row: Wired,
    wire: Wire | None,
    settings: Settings,
    mesh: Mesh,
    rng: np.random.Generator,
) -> Wired:
    what = [task.pod], [task.case], [task.size], [task.dtype]
    (one,) = replay_rows.plan(*what, axes=settings.axes)
    with counters.recorded() as plans:
        report = replay_rows.run(one, wire=wire)
    share, passes_us = _sent(plans)
    requantizes = any(isinstance(p, WirePlan) and p.requantizes for p in plans)
    n = int(np.prod([replay_rows.mesh_axes(one.machine)[axis] for axis in settings.axes]))
    return dataclasses.replace(
        row,
        devices=n,
        time_us=report.time * 1e6 + passes_us,
        passes_us=passes_us,
        of_bytes=share,
        off=_drawn_error(task, wire, n, rng, by_hops=requantizes),
    )


def _drawn_error(
    task: Task, wire: Wire | None, n: int, rng: np.random.Generator, *, by_hops: bool
) -> float:
    """The error of a result of n terms of normal numbers if it adds them, else of one term.

    With `by_hops` a sum is quantised at each hop, and not each term once.
    """
    terms = rng.standard_normal((n if task.case.adds else 1, _NUMBERS)).astype(task.dtype)
    x = jnp.asarray(terms)
    sent = x if wire is None else wires.as_sent(x, wire)
    total = sent.astype(jnp.float32).sum(axis=0)
    if wire is not None and by_hops:
        total = functools.reduce(
            lambda so_far, term: wires.as_sent(so_far, wire) + term, x.astype(jnp.float32)
        )
    if wire is not None and catalogue.COLLECTIVES[task.case.op].sums_everywhere:
        total = wires.as_sent(total, wire)
    exact = terms.astype(np.float64).sum(axis=0)
    return float(100 * np.abs(np.asarray(total) - exact).max() / np.abs(exact).max())


def _measured(
    task: Task,
    row: Wired,
    wire: Wire | None,
    settings: Settings,
    mesh: Mesh,
    rng: np.random.Generator,
) -> Wired:
    problem = Problem(task.case, task.dtype, task.size, mesh, settings.axes, rng)
    call = problem.call(task.backend, None, wire=wire)
    with counters.recorded() as plans:
        program = problem.compile(call)
    row = dataclasses.replace(
        row,
        devices=problem.n,
        size=problem.nbytes,
        of_bytes=_sent(plans)[0],
        off=100 * problem.off_by(program(problem.operands)),
    )
    if devices.kind() == "simulated":
        return row
    seconds = timing.device_seconds(problem, call, settings.warmup, settings.iters)
    return dataclasses.replace(row, time_us=timing.median(seconds) * 1e6)
