"""What the notebooks share: devices, simulated and modelled, and ways to watch what goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import linecache
import logging
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pallas_collectives as pc
from pallas_collectives import _compat
from pallas_collectives.replay import Machine, Report, replay
from pallas_collectives.replay.program import Start, at
from pallas_collectives.replay.regions import box_of
from pallas_collectives.verify import Finding

# How all pictures look.
plt.rcParams.update({
    "figure.dpi": 80,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
})  # fmt: skip


def mesh(n: int) -> Mesh:
    """The first n devices, as the axis "x"."""
    if len(jax.devices()) < n:
        raise ValueError(f"{n} devices are needed: begin with pc.simulate(8), before any is used")
    return Mesh(np.array(jax.devices()[:n]), ("x",))


def per_device(fn: Callable[..., jax.Array], n: int) -> Callable[..., np.ndarray]:
    """fn on each of n devices: takes arrays of shape (n, ...), gives all results, stacked."""
    shard = jax.shard_map(
        lambda *args: fn(*(a[0] for a in args))[None],
        mesh=mesh(n),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    program = jax.jit(shard)
    return lambda *args: np.asarray(program(*args))


def ring_of(n: int) -> Machine:
    """A modelled machine: n chips in a ring, with v6e's links."""
    return Machine.named(f"v6e:{n}", wraps=(True, False))


def replayed(
    fn: Callable[..., jax.Array],
    n: int,
    *shapes: tuple[int, ...],
    machine: Machine | None = None,
    races: bool = False,
    alike: bool = False,
) -> Report:
    """What fn's kernels do on n modelled chips; the shapes are one device's, of float32.

    With `alike`, devices that behave alike are stepped once: quicker, for times and link loads.
    """
    machine = machine or ring_of(n)
    function = jax.shard_map(
        fn, mesh=machine.mesh({"x": n}), in_specs=P(), out_specs=P(), check_vma=False
    )
    operands = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    return replay(function, *operands, machine=machine, races=races, symmetric=alike)


def exchanged(sent: np.ndarray, width: int = 8192) -> Report:
    """What a ragged exchange of sent[from, to] rows of so many float32 does, on a ring of chips."""
    n, machine, own = len(sent), ring_of(len(sent)), P("x")
    starts, lands = np.cumsum(sent, 1) - sent, np.cumsum(sent, 0) - sent
    tables = (t.astype(np.int32).reshape(-1) for t in (starts, sent, lands, sent.T))
    function = jax.shard_map(
        lambda *args: pc.ragged_all_to_all(*args, axis_name="x", algorithm="direct"),
        mesh=machine.mesh({"x": n}),
        in_specs=(P(), P(), own, own, own, own),
        out_specs=P(),
        check_vma=False,
    )
    rows = (int(sent.sum(axis).max()) for axis in (1, 0))
    arrays = (jax.ShapeDtypeStruct((count, width // 128, 128), np.float32) for count in rows)
    return replay(function, *arrays, *tables, machine=machine)


@dataclasses.dataclass(frozen=True)
class Copy:
    """One remote copy of a replay. Times in seconds.

    Attributes:
      source, target: devices.
      begins: when it was started; `first`: when its first byte went.
      leaves: when all of it has left: the send semaphore is signalled.
      arrives: when all of it is there: the receive semaphore is signalled.
      reads, writes: the boxes of the buffers, a (start, size) for each dimension.
      scope: the kernel's phase that started it.
    """

    source: int
    target: int
    begins: float
    first: float
    leaves: float
    arrives: float
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    scope: str


def copies(report: Report) -> list[Copy]:
    """The remote copies of a replay, by start time."""
    found = []
    for core, message, target, lane in _sent(report):
        column = message.column
        if isinstance(column, Start):
            times = message.issued, message.began, message.left, message.arrived
            boxes = box_of(column.src, lane), box_of(column.dst, lane)
            found.append(Copy(core.device, target, *times, *boxes, column.source.scope))
    return sorted(found, key=lambda copy: (copy.begins, copy.source))


def signals(report: Report) -> list[tuple[int, int, float, float]]:
    """(source, target, sent, arrived) of every signal from one device to another."""
    return [
        (core.device, target, message.issued, message.arrived)
        for core, message, target, _ in _sent(report)
        if not isinstance(message.column, Start)
    ]


def _sent(report: Report) -> Iterator[tuple[Any, Any, int, int]]:
    """(core, message, target, the core's place in the message's column) of what goes elsewhere."""
    for core in report.engine.cores:
        for message in core.messages:
            if message.column.target is not None:
                lane = int(np.searchsorted(message.column.lanes, core.device))
                yield core, message, int(at(message.column.target, lane)), lane


# Breaking things -------------------------------------------------------------------------------


def adversary(mode: str = "on_wait", *, detect_races: bool = True) -> Any:
    """The simulator, as unkind as it may be: "on_wait" runs each copy as late as it can.

    A race is reported and the kernel goes on, so that its answer can be seen.
    """
    known = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
    going_on = {"on_race": "warn"} if "on_race" in known else {}
    return pltpu.InterpretParams(dma_execution_mode=mode, detect_races=detect_races, **going_on)


def late(x: jax.Array, device: int, seconds: float = 0.2) -> jax.Array:
    """x, which one device of axis "x" gets later than the others."""

    def hold(position: Any, value: Any) -> Any:
        time.sleep(seconds * (int(position) == device))
        return value

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(hold, shape, jax.lax.axis_index("x"), x)


def changed(fn: Callable[..., jax.Array], old: str, new: str = "") -> Callable[..., jax.Array]:
    """fn with a piece of its source replaced; with nothing new, without the line that holds it."""
    source = textwrap.dedent(inspect.getsource(fn))
    if source.count(old) != 1:
        raise ValueError(f"{old!r} is {source.count(old)} times in {fn.__name__}, not once")
    lines = source.splitlines(keepends=True)
    kept = [line.replace(old, new) for line in lines if new or old not in line]
    file, text = f"{fn.__name__}, changed", "".join(kept)
    linecache.cache[file] = (len(text), None, kept, file)  # for messages that show the line
    names = {**fn.__globals__, **inspect.getclosurevars(fn).nonlocals}
    exec(compile(text, file, "exec"), names)
    return names[fn.__name__]


def say(finding: Finding) -> None:
    """What is wrong, why, and what would mend it."""
    said = f"{finding.rule}: {finding.what}"
    for label, text in (("", said), ("  why:  ", finding.why), ("  mend: ", finding.remedy)):
        print(textwrap.fill(text, 116, initial_indent=label, subsequent_indent=" " * len(label)))


def run(
    fn: Callable[..., jax.Array],
    operands: np.ndarray,
    want: np.ndarray,
    *,
    late_device: int | None = None,
    **how: Any,
) -> Outcome:
    """fn, which takes `interpret`, in the simulator; one device may begin later than the others."""

    def program(x: jax.Array) -> jax.Array:
        x = x if late_device is None else late(x, late_device)
        return fn(x, interpret=adversary(**how))

    outcome = watch(lambda: per_device(program, len(operands))(operands))
    print(outcome.say(want))
    return outcome


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: its result, if it had one, how many races were reported, and what failed."""

    result: np.ndarray | None
    races: int
    error: str

    def wrong(self, want: np.ndarray) -> float:
        """The share of elements that are wrong; 1 without a result."""
        return 1.0 if self.result is None else float(np.mean(self.result != want))

    def say(self, want: np.ndarray) -> str:
        """One line."""
        races = f"{self.races} races reported" if self.races else "no race"
        if self.error:
            return f"{races}, no result: {self.error}"
        share = self.wrong(want)
        return f"{races}, " + (f"{share:.0%} of the answer is wrong" if share else "right answer")


def watch(run: Callable[[], np.ndarray]) -> Outcome:
    """Runs something that may race or fail, and keeps quiet but for the outcome."""
    printed, logged, result, error = io.StringIO(), _Log(), None, ""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), logged.open():
        try:
            result = run()
        except Exception as failure:
            error = _reason(failure)
    _compat.forget_simulated_failures()
    races = printed.getvalue().count("RACE DETECTED") + logged.races
    return Outcome(result, races, error)


class _Log(logging.Handler):
    """Counts the races that JAX logs (from 0.11 on; before, it prints them)."""

    races = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.races += "RACE DETECTED" in record.getMessage()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        root = logging.getLogger()
        others, root.handlers = root.handlers, [self]
        try:
            yield
        finally:
            root.handlers = others


# What the simulator raises where a device is written to that has nothing there.
_NOBODY_HOME = re.compile(r"KeyError: \(?'(hbm|vmem|smem)")


def _reason(failure: Exception) -> str:
    """The innermost exception in an error message, or words for one without a message."""
    if _NOBODY_HOME.search(f"{type(failure).__name__}: {failure}"):
        return "it stops at a copy to a device that has not entered the kernel yet"
    lines = [
        line for line in str(failure).splitlines() if re.match(r"\w+(Error|Exception): ", line)
    ]
    return lines[-1] if lines else f"{type(failure).__name__}: {failure}"
