"""What the hardware forbids a kernel, beside races and deadlocks: each rule yields `Fault`s.

* reach: copies and signals to devices that the chip does not route to;
* memory: more VMEM, SMEM or semaphores at a time than the chip has;
* leftover: a semaphore that is not 0 when its scope within a kernel ends;
* entry: a copy or signal to another device's memory or semaphores that it may not have yet;
* barrier: a barrier semaphore that a kernel does not leave as it found it, or has no id for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from pallas_collectives.replay import reasons
from pallas_collectives.replay.order import Event, Order
from pallas_collectives.replay.program import (
    Enter,
    Program,
    Signal,
    Start,
    Unscope,
    Wait,
    at,
    barrier_name,
)
from pallas_collectives.topology.chips import Chip
from pallas_collectives.topology.placement import Places
from pallas_collectives.topology.reach import reaches


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that a kernel does and the hardware forbids.

    Attributes:
      name: the name of the rule: 'reach', 'memory', 'leftover', 'entry' or 'barrier'.
      kernel: its name.
      line: `file:line (function)` of the instruction, or of the kernel's call.
      device: where it happens, a position in the mesh; the first, if there are several.
      step: the number of the instruction among all of the device's, from 1; 0: the whole kernel.
      what, rule, remedy: what was found, which rule it breaks, what to do instead.
      others: how many more devices or places break the rule at that line.
    """

    name: str
    kernel: str
    line: str
    device: int
    step: int
    what: str
    rule: str
    remedy: str
    others: int = 0

    def __str__(self) -> str:
        step = f", step {self.step}" if self.step else ""
        more = f" (and {self.others} more like it)" if self.others else ""
        return (
            f"device {self.device}{step}, at {self.line}: {self.what}{more}; "
            f"{self.rule}; {self.remedy}"
        )


def _one_per_line(faults: Iterable[Fault]) -> list[Fault]:
    """The first fault of each line, kernel and rule, with the number of the others."""
    first: dict[Any, Fault] = {}
    count: Counter[Any] = Counter()
    for fault in faults:
        key = (fault.name, fault.kernel, fault.line, fault.rule, fault.remedy)
        first.setdefault(key, fault)
        count[key] += 1 + fault.others
    return [dataclasses.replace(fault, others=count[key] - 1) for key, fault in first.items()]


def _step(program: Program, number: int, device: int) -> int:
    """How many of the first columns, up to `number`, a device has part in."""
    return sum(device in column.lanes for column in program.columns[: number + 1])


# Without an order -----------------------------------------------------------------------------


def find_faults(program: Program, generation: Chip, places: Places) -> list[Fault]:
    """What can be told without asking what semaphores guarantee: reach, memory, barriers' counts.

    Args:
      program: already stepped; one stepped live, to its end.
      generation: the generation of the machine.
      places: the places of the mesh's devices on it.
    """
    faults = [
        *_beyond_reach(program, generation, places),
        *_beyond_memory(program, generation),
        *_unbalanced(program),
    ]
    return _one_per_line(faults)


def _beyond_reach(program: Program, generation: Chip, places: Places) -> Iterator[Fault]:
    if generation.reaches_all:
        return

    @functools.cache
    def reached(source: int, goal: int) -> bool:
        return source == goal or reaches(
            generation, places.torus, places.at[source], places.at[goal]
        )

    n_devices = program.n_devices // program.cores
    patterns: dict[tuple[int, bytes], list[tuple[int, int]]] = {}  # who does not reach whom
    first: dict[tuple[str, str, type], tuple[int, Any, tuple[int, int]]] = {}
    count: Counter[tuple[str, str, type]] = Counter()
    for k, column in enumerate(program.columns):
        if not isinstance(column, (Start, Signal)) or column.target is None or column.implicit:
            continue
        target = column.target
        key = (id(target) if isinstance(target, np.ndarray) else target, column.lanes.tobytes())
        if key not in patterns:
            targets = np.broadcast_to(target, column.lanes.shape).tolist()
            pairs = zip(column.lanes.tolist(), targets, strict=True)
            chips_of = ((a % n_devices, b % n_devices) for a, b in pairs)
            patterns[key] = [pair for pair in chips_of if not reached(*pair)]
        if patterns[key]:
            where = (column.source.kernel, column.source.line, type(column))
            first.setdefault(where, (k, column, patterns[key][0]))
            count[where] += len(patterns[key])
    for where, (k, column, (source, goal)) in first.items():
        here, there = (places.at[device][: generation.dims] for device in (source, goal))
        what = "a copy" if isinstance(column, Start) else "a signal"
        yield Fault(
            "reach",
            column.source.kernel,
            column.source.line,
            source,
            _step(program, k, source),
            f"{what} from chip {here} to device {goal} on chip {there}",
            f"{generation.name} routes only to chips that differ in one coordinate, by a power of "
            "two, the shorter way round where that axis closes",
            "go there by hops that it routes, or place the mesh so that these are neighbours",
            count[where] - 1,
        )


_MEMORIES = {
    "vmem": ("VMEM", "keep operands in HBM and bring them in by tiles, or make the tiles smaller"),
    "smem": ("SMEM", "keep small tables there only, of rank 1: a row of any other takes 512 bytes"),
    "semaphore_mem": (
        "semaphores",
        "let steps share semaphores, in turn, once what was sent before has been waited for",
    ),
}


def _beyond_memory(program: Program, generation: Chip) -> Iterator[Fault]:
    limits = {
        "vmem": generation.vmem_bytes,
        "smem": generation.smem_bytes,
        "semaphore_mem": generation.semaphores,
    }
    for kernel in program.kernels:
        for space, limit in limits.items():
            peak = kernel.held.peaks[space]
            if peak.amount <= limit:
                continue
            name, remedy = _MEMORIES[space]
            unit = "" if space == "semaphore_mem" else "bytes of "
            yield Fault(
                "memory",
                kernel.name,
                peak.line,
                0,
                0,
                f"{kernel.name} holds {peak.amount:,} {unit}{name} at a time",
                f"a core of {generation.name} has {limit:,}",
                remedy,
                program.n_devices - 1,
            )


def _unbalanced(program: Program) -> Iterator[Fault]:
    """Barrier semaphores to which a kernel's own signals and waits do not add up to 0."""
    kernel = np.zeros(program.n_devices, int)
    sums: dict[tuple[int, int], np.ndarray] = {}  # (kernel, semaphore): added, taken per device
    last: dict[tuple[int, int], tuple[int, Any]] = {}  # the last wait there, or else signal
    for k, column in enumerate(program.columns):
        lanes = column.lanes
        if isinstance(column, Enter):
            kernel[lanes] = column.kernel
        if not isinstance(column, (Signal, Wait)):
            continue
        sem = int(at(column.sem, 0))  # a barrier semaphore is the same one on all
        if program.semaphores[sem].kernel:
            continue
        key = int(kernel[lanes[0]]), sem
        added, taken = sums.setdefault(key, np.zeros((2, program.n_devices), int))
        if isinstance(column, Signal):
            goal = lanes if column.target is None else np.broadcast_to(column.target, lanes.shape)
            np.add.at(added, goal, column.value)
            last.setdefault(key, (k, column))
        elif not column.keeps:
            taken[lanes] += column.value
            last[key] = k, column
    for (number, sem), (added, taken) in sums.items():
        if program.semaphores[sem].name == barrier_name(None):
            k, column = last[number, sem]
            yield Fault(
                "barrier",
                program.kernels[number - 1].name,
                column.source.line,
                int(column.lanes[0]),
                _step(program, k, int(column.lanes[0])),
                "the kernel uses a barrier semaphore, and has no collective id",
                "the id says which semaphore it is: without one JAX compiles no such kernel",
                "give the call compiler_params=pltpu.CompilerParams(collective_id=0)",
            )
        for wrong, effect, remedy in ((added > taken, *_LEFT), (added < taken, *_MISSING)):
            devices = np.nonzero(wrong)[0].tolist()
            if not devices:
                continue
            (device, *others), (k, column) = devices, last[number, sem]
            yield Fault(
                "barrier",
                program.kernels[number - 1].name,
                column.source.line,
                device,
                _step(program, k, device),
                f"{program.semaphores[sem].name} is signalled {added[device]} times there, and "
                f"{taken[device]} are waited for: {effect}",
                "a barrier semaphore outlives the kernel and is 0 when all devices have left it",
                remedy,
                len(others),
            )


_LEFT = (
    "the next kernel of that id counts the rest as its own",
    "wait for all that is signalled in the same kernel",
)
_MISSING = (
    "it waits for signals of the next kernel of that id",
    "wait for no more than is signalled in the same kernel",
)


# By the order that semaphores guarantee ---------------------------------------------------------


def find_early(order: Order) -> list[Fault]:
    """Copies and signals to semaphores of other devices that may not have entered yet.

    A kernel's own semaphores and memory are another program's before it is entered. Only barrier
    semaphores are there at all times.
    """
    return _one_per_line(_early(order))


def _early(order: Order) -> Iterator[Fault]:
    entries = order.entries()
    told: dict[str, tuple[str, str]] = {}
    for event in order.events:
        column = event.column
        if not isinstance(column, (Signal, Start)) or event.target == event.device:
            continue
        is_copy = isinstance(column, Start)
        number = column.dst_sem if isinstance(column, Start) else column.sem
        semaphore = order.program.semaphores[at(number, event.position)]
        entry = entries.get((event.target, semaphore.kernel))
        if not semaphore.kernel:
            continue
        if entry is not None and (
            order.knows(event, (entry.device, entry.count)) or not order.possible(entry, event)
        ):
            continue
        yield _too_early(order, event, semaphore.name, "a copy" if is_copy else "a signal", told)


def find_kept(order: Order) -> list[Fault]:
    """Semaphores that may not be 0 when a scope ends that has them, or may share them."""
    return _one_per_line(_kept(order)) if order.finished else []


def _kept(order: Order) -> Iterator[Fault]:
    for event in order.events:
        held = event.column.memory if isinstance(event.column, Unscope) else ()
        for buffer in held:
            size = math.prod(buffer.shape) if buffer.space == "semaphore_mem" else 0
            for number in range(buffer.id, buffer.id + size):
                if line := order.left_over(event, number):
                    yield _not_zero(order.program.semaphores[number].name, line, event)


def _not_zero(semaphore: str, line: str, event: Event) -> Fault:
    source = event.column.source
    return Fault(
        "leftover",
        source.kernel,
        source.line,
        event.device,
        event.count,
        f"{semaphore} of device {event.device} can hold what is added at {line} when the scope "
        f"of {event.column.own[0].name} ends",
        "a scope's semaphores must be 0 then: they may be those of scopes before and after it",
        "wait in its own scope for what is added, and add it there only, or let the semaphore be "
        "one of the kernel's scratch_shapes",
    )


def _too_early(
    order: Order, event: Event, sem: str, what: str, told: dict[str, tuple[str, str]]
) -> Fault:
    source = event.column.source
    if source.line not in told:  # the search for the reason is worth it once a line
        told[source.line] = reasons.not_entered(order, event, event.target)
    why, remedy = told[source.line]
    return Fault(
        "entry",
        source.kernel,
        source.line,
        event.device,
        event.count,
        f"{what} to {sem} of device {event.target}: {why}",
        "a kernel's semaphores and memory are another program's until it is entered; barrier "
        "semaphores alone are there at all times",
        remedy,
    )
