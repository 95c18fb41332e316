"""A stepped program: per device, the sequence of copies, signals, waits and core work that a kernel
performs.

Instructions are held as columns: one entry for all the devices (lanes) that perform it at the same
point of the program, a field being a plain int where it is the same on all of them and an array
where it differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

from pallas_collectives.replay.lines import Line
from pallas_collectives.replay.memory import Held
from pallas_collectives.replay.values import Lanes
from pallas_collectives.replay.views import Buffer, View

# Memories that all cores of a chip share.
SHARED = frozenset({"hbm", "vmem_shared"})


def barrier_name(collective_id: int | None) -> str:
    """What the barrier semaphore of a kernel with this id is called."""
    return f"barrier[collective_id={collective_id}]"


@dataclasses.dataclass
class Source:
    """Where an instruction comes from: the user's line, its `jax.named_scope`, and its kernel.

    `place` is the line with the whole path.
    """

    line: str
    scope: str
    kernel: str
    place: Line | None = None


@dataclasses.dataclass
class Instruction:
    """What every column has. `lanes` is sorted; `busy` is the core's own work before it, in
    seconds.
    """

    lanes: np.ndarray
    busy: float
    source: Source


@dataclasses.dataclass
class Start(Instruction):
    """A DMA is started: `src` here, `dst` on device `target`. `implicit`: made by Pallas itself
    (block copies).
    """

    src: View
    dst: View
    target: Lanes | None  # device, int or per lane; None for a copy within the device
    src_sem: Lanes | None  # semaphore here, signalled with the bytes read, or None
    dst_sem: Lanes | None  # semaphore on `target`, signalled with the bytes written
    nbytes: Lanes
    implicit: bool = False


@dataclasses.dataclass
class Signal(Instruction):
    """`value` is added to semaphore `sem` of device `target`."""

    sem: Lanes
    target: Lanes | None
    value: Lanes
    implicit: bool = False


@dataclasses.dataclass
class Wait(Instruction):
    """The core waits until `sem` here is at least `value`, then takes that off (unless `keeps`)."""

    sem: Lanes
    value: Lanes
    is_dma: bool
    keeps: bool = False
    implicit: bool = False


@dataclasses.dataclass
class Access(Instruction):
    """The core itself reads or writes `view`."""

    view: View
    writes: bool


@dataclasses.dataclass
class Unscope(Instruction):
    """A scope within a kernel ends; `others` are of scopes that may have the same memory."""

    own: list[Buffer]
    others: list[Buffer]

    @property
    def memory(self) -> list[Buffer]:
        """What may be somebody else's from here on, or was until here."""
        spaces = {buffer.space for buffer in self.own}
        return [*self.own, *(buffer for buffer in self.others if buffer.space in spaces)]


@dataclasses.dataclass
class Read(Instruction):
    """The core reads a semaphore's value (only in programs that are stepped live)."""

    sem: Lanes


@dataclasses.dataclass
class Enter(Instruction):
    """The core enters kernel `kernel` (a number from 1): from here on its buffers and semaphores
    may be touched.
    """

    kernel: int


@dataclasses.dataclass
class Leave(Instruction):
    """The core leaves kernel `kernel`: its buffers are freed or read, its semaphores must be 0."""

    kernel: int


@dataclasses.dataclass
class CoreWork(Instruction):
    """The core works for `busy` and nothing else happens."""


@dataclasses.dataclass(frozen=True)
class Semaphore:
    """One semaphore on each device. `kernel`: the number of the kernel it belongs to; 0 for barrier
    semaphores.
    """

    name: str
    kernel: int


@dataclasses.dataclass
class Kernel:
    """One kernel of the program. Bytes are per device; `line`: where it is called;
    `results`: the numbers of the buffers that hold what it returns.
    """

    name: str
    line: str = ""
    results: tuple[int, ...] = ()
    hbm_scratch_bytes: int = 0
    on_sparsecore: bool = False
    held: Held = dataclasses.field(default_factory=Held)
    scopes: tuple[int, ...] = ()  # that it is in, the innermost last
    # Those that it was in -> what others have had in memory since
    left: dict[tuple[int, ...], list[Buffer]] = dataclasses.field(default_factory=dict)

    @property
    def vmem_bytes(self) -> int:
        """Peak VMEM."""
        return self.held.peaks["vmem"].amount


@dataclasses.dataclass
class Program:
    """All instructions of all devices, in program order per device.

    `cores`: on each chip, of those that run kernels; each has a stream of instructions. Core c of
    device d counts as device `d + c * n`, n being the mesh's devices: all of these have number
    c = 0, and their first cores run everything but kernels on meshes of cores.
    """

    n_devices: int
    columns: list[Any]
    buffers: list[Buffer]
    semaphores: list[Semaphore]
    kernels: list[Kernel]
    unmodelled: dict[str, int]  # equations outside kernels that are not timed, by primitive
    cores: int = 1

    def home(self, device: int, buffer: Buffer) -> int:
        """Whose memory a buffer lies in: the cores of a chip share what is in HBM."""
        return int(home(device, buffer, self.n_devices // self.cores))

    def of_device(self, device: int) -> Iterator[tuple[int, int, Any]]:
        """(column number, the device's position in it, column) of each of `device`'s
        instructions.
        """
        for k, column in enumerate(self.columns):
            if len(column.lanes) == self.n_devices:
                yield k, device, column
                continue
            position = int(np.searchsorted(column.lanes, device))
            if position < len(column.lanes) and column.lanes[position] == device:
                yield k, position, column


_Lane = TypeVar("_Lane", int, np.ndarray)


def home(lane: _Lane, buffer: Buffer, n_devices: int) -> _Lane:
    """The core, of one or an array of them, whose memory a buffer lies in."""
    return lane % n_devices if buffer.space in SHARED else lane


def at(field: Lanes | None, position: int) -> Any:
    """A column's field on the lane at `position`."""
    return field[position].item() if isinstance(field, np.ndarray) else field
