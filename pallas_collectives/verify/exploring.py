"""Runs a kernel in JAX's interpreter under many schedules: for kernels that the replay cannot
follow, and to see with values what it found.

A run is one schedule. The interpreter performs each copy as late as it may, newest first
("on_wait"), or at once ("eager"), keeps vector clocks and reports races; here one device after the
other is held back as well, before it enters and before it waits, so that others run ahead of it.
That finds less than the judge does, which asks for all schedules: a barrier that is missing shows
only if a device comes late by enough.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives import _compat, simulation
from pallas_collectives.annotations import AnyMesh
from pallas_collectives.topology import placement
from pallas_collectives.verify import asked, judge, programs
from pallas_collectives.verify.asked import AskError, Axes
from pallas_collectives.verify.verdict import FAULTY, Verdict

MODES = ("on_wait", "eager")
_HELD = 8  # of a late device's waits: so many come late


class _Schedules(pltpu.InterpretParams):
    """One set of parameters for all schedules: JAX asks for the mode when a kernel starts, so a
    program is compiled once.
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def choose(self, mode: str) -> None:
        vars(self)["dma_execution_mode"] = mode


class _Late:
    """Which device is held back, if any is."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.choose(None)

    def choose(self, device: int | None) -> None:
        self._device, self._waits = device, _HELD

    def enter(self, device: int) -> None:
        if device == self._device:
            time.sleep(self._seconds)

    def wait(self, device: int) -> None:
        if device == self._device and self._waits:
            self._waits -= 1
            time.sleep(self._seconds)


@dataclasses.dataclass(frozen=True)
class Run:
    """One schedule and how it ended. `late`: the device held back; `wrong`: "" if it went well."""

    axes: Axes
    mode: str
    late: int | None
    wrong: str

    def __str__(self) -> str:
        held = "" if self.late is None else f", device {self.late} late"
        return f"{math.prod(self.axes.values())} devices, {self.mode}{held}: {self.wrong or 'fine'}"


@dataclasses.dataclass(frozen=True)
class Exploration:
    """What the judge said, and every run."""

    verdict: Verdict
    runs: tuple[Run, ...]

    @property
    def ok(self) -> bool:
        """No fault in any run, and none that the judge has found."""
        return self.verdict.status != FAULTY and not any(run.wrong for run in self.runs)

    def __str__(self) -> str:
        bad = [run for run in self.runs if run.wrong]
        lines = [str(run) for run in bad[:8]]
        if len(bad) > 8:
            lines.append(f"and {len(bad) - 8} more")
        head = f"{len(self.runs)} schedules run, {len(bad)} with a fault"
        return "\n".join([str(self.verdict), "", head, *(f"  {line}" for line in lines)])


@placement.no_mesh()
def explore(
    function: Callable[..., Any] | str,
    *args: Any,
    mesh: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None,
    devices: int | Iterable[int] | None = None,
    axis_names: Sequence[str] = ("x",),
    inside: bool | None = None,
    expected: Any = None,
    late: int = 3,
    seconds: float = 0.1,
    timeout: float = 60.0,
) -> Exploration:
    """Judges `function(*args)`, and runs it on simulated devices under schedule after schedule.

    Results of all schedules must agree, bit for bit, with each other and with `expected`.

    Args:
      function, *args, mesh, devices, axis_names, inside: as for `check`; 2 and 4 devices by
        default. Operands given by type are made up: of floats small whole numbers, of others zeros.
        One device's are different on each.
      expected: the result; of a function of one device those of all, stacked. None: not compared.
      late: so many devices are held back, one after the other: before they enter, where it is the
        function of one device, and before each of their first waits.
      seconds: for so long each time.
      timeout: seconds for one run. What takes longer counts as a deadlock, and no more is run: the
        simulated devices of this process are then held up for good, and its end may be an abort.

    Raises:
      AskError: too few simulated devices (`simulate(n)` makes them), or as `check`.

    Example:
      >>> def kernel(block):  # what stands inside shard_map
      ...     return pc.all_gather(block, "x", tiled=True)
      >>> found = pc.verify.explore(kernel, "f32[8,128]", devices=2, late=0)
      >>> found.ok
      True
    """
    target = asked.named(function) if isinstance(function, str) else function
    asked_for = asked.meshes(mesh, devices if mesh or devices else (2, 4), axis_names)
    for axes in asked_for:
        _require_devices(math.prod(axes.values()))
    verdict = judge.check(target, *args, mesh=asked_for, inside=inside)
    runs: list[Run] = []
    for case in verdict.cases:
        if case.report is not None and case.report.stuck:
            runs.append(Run(case.axes, "not run", None, "it never ends, as the judge found"))
            continue
        for run in _runs(target, args, case.axes, inside, expected, late, seconds, timeout):
            runs.append(run)
            if _HUNG in run.wrong:
                return Exploration(verdict, tuple(runs))
    return Exploration(verdict, tuple(runs))


_HUNG = "did not end within"


def _require_devices(n: int) -> None:
    if jax.device_count() < n:
        raise AskError(
            f"{n} devices",
            f"JAX has started with {jax.device_count()}",
            f"call pallas_collectives.simulate({n}) before anything else uses JAX",
        )
    if obstacle := simulation.obstacle():
        raise AskError(f"{n} simulated devices", "they could wait for ever", obstacle)


def _runs(
    function: Callable[..., Any],
    args: Sequence[Any],
    axes: Axes,
    inside: bool | None,
    expected: Any,
    late: int,
    seconds: float,
    timeout: float,
) -> Iterator[Run]:
    n = math.prod(axes.values())
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    grid = np.array(jax.devices()[:n]).reshape(tuple(axes.values()))
    on = jax.sharding.Mesh(grid, tuple(axes), axis_types=auto)
    schedules = _Schedules(detect_races=True)
    held = _Late(seconds)
    with (
        pltpu.force_tpu_interpret_mode(schedules),
        _compat.watched_simulation(held.wait) as failures,  # a core is numbered as its device
    ):
        program = programs.over_mesh(function, asked.arguments(args, n), on, axes, inside)
        operands = [_made_up(arg, n if program.inside else None) for arg in program.args]
        run = jax.jit(_stacked(function, on, held) if program.inside else program.function)
        want = expected
        for device in (None, *range(min(late, n))):
            for mode in MODES:
                schedules.choose(mode)
                held.choose(device)
                got, wrong = _ran(lambda: run(*operands), schedules, failures, timeout)
                if not wrong and want is not None:
                    wrong = _differs(got, want)
                elif not wrong:
                    want = got
                yield Run(axes, mode, device, wrong)


def _stacked(function: Callable[..., Any], mesh: AnyMesh, held: _Late) -> Callable[..., Any]:
    """The function of one device over operands of all, stacked; one device gets its own late."""
    names = tuple(mesh.axis_names)
    spec = jax.sharding.PartitionSpec(names)

    def hold(position: jax.Array, value: jax.Array) -> jax.Array:
        held.enter(int(position))
        return value

    def body(*args: Any) -> Any:
        own = jax.tree.map(lambda a: a[0], args)
        position = jax.lax.axis_index(names)
        leaves, tree = jax.tree.flatten(own)
        if leaves:
            shape = jax.ShapeDtypeStruct(leaves[0].shape, leaves[0].dtype)
            leaves[0] = jax.pure_callback(hold, shape, position, leaves[0])
        return jax.tree.map(lambda a: a[None], function(*jax.tree.unflatten(tree, leaves)))

    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _made_up(arg: Any, stacked: int | None) -> Any:
    """An operand, where only its type is given; `stacked` one for each of so many devices."""
    rng = np.random.default_rng(0)

    def value(leaf: Any) -> np.ndarray:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            array = np.asarray(leaf)
            return array if stacked is None else np.broadcast_to(array, (stacked, *array.shape))
        shape = leaf.shape if stacked is None else (stacked, *leaf.shape)
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            return np.zeros(shape, leaf.dtype)
        return rng.integers(-8, 8, shape).astype(leaf.dtype)

    return jax.tree.map(value, arg)


def _ran(
    run: Callable[[], Any], schedules: _Schedules, failures: list[Exception], timeout: float
) -> tuple[Any, str]:
    """(result, what went wrong) of a run, which may never end; the first of `failures` tells."""
    ended: list[tuple[Any, str]] = []
    failures.clear()

    def attempt() -> None:
        try:
            with pltpu.force_tpu_interpret_mode(schedules):  # of this thread
                got = jax.tree.map(np.asarray, run())
            ended.append((got, "a race is reported" if _compat.races_reported() else ""))
        except Exception as error:
            ended.append((None, _reason(failures[0] if failures else error)))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout)
    if not ended:
        return None, f"{_HUNG} {timeout:g} s: a deadlock, or a long kernel (timeout=)"
    _compat.forget_simulated_failures()
    return ended[0]


def _reason(error: Exception) -> str:
    if known := _compat.simulated_failure(error):
        return known
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if "Error" in line or "Exception" in line]
    return f"{type(error).__name__}: {(lines or text.splitlines() or [''])[-1][:200]}"


def _differs(got: Any, want: Any) -> str:
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    share = [np.mean(a != np.asarray(b)) if np.shape(a) == np.shape(b) else 1.0 for a, b in pairs]
    worst = max(share, default=0.0)
    return f"{worst:.0%} of the result is wrong or differs from other schedules" if worst else ""
