"""Discrete-event simulation of a stepped program on a machine: cores, copies in flight, semaphores.

Each core runs its instructions in order. Starting a DMA or signalling costs the core `issue_cost`;
a DMA's first byte moves `dma_latency` later; its bytes flow at the rate `network.py` gives them;
the send semaphore is signalled when the last byte has left, the receive semaphore one hop latency
per link after that. A signal arrives one hop latency per link later.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_collectives.replay.machine import Machine
from pallas_collectives.replay.network import PICOSECOND, Flow, Network
from pallas_collectives.replay.program import Program, Read, Signal, Start, Wait, at
from pallas_collectives.replay.symmetry import Classes
from pallas_collectives.replay.values import Lanes

_FINE = 0.01  # a grain is no more than so much of what has passed: small kernels come first


@dataclasses.dataclass(eq=False, slots=True)
class Message:
    """A DMA or a signal under way. Times in seconds."""

    core: Core  # who issued it
    column: Any
    nbytes: float
    issued: float
    deliveries: list[tuple[Core, int, int]]  # (core, semaphore, amount) at its end
    hops: float
    uses: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    src_sem: int | None = None
    began: float = math.nan  # first byte
    left: float = math.nan  # last byte out
    arrived: float = math.nan


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """A core was held up in a wait."""

    column: Any
    sem: int
    value: int
    began: float
    ended: float = math.nan
    cause: Message | None = None  # the arrival that released it


@dataclasses.dataclass(eq=False, slots=True)
class Core:
    """One modelled device (standing for its class)."""

    device: int
    stream: Any  # generator of (column number, position, column)
    time: float = 0.0
    following: tuple[int, int, Any] | None = None  # handed over by a live stream after a read
    pending: tuple[int, int, Any] | None = None  # to be done at `time`, its work counted already
    waiting: Block | None = None
    keeps: bool = False
    done: bool = False
    semaphores: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    blocks: list[Block] = dataclasses.field(default_factory=list)
    messages: list[Message] = dataclasses.field(default_factory=list)
    finished: int = 0  # instructions

    def next_entry(self) -> tuple[int, int, Any] | None:
        entry, self.following = self.following, None
        return entry or next(self.stream, None)


class Engine:
    """Runs `program` on `machine`; afterwards `cores`, `network.carried` and `time` hold what
    happened.
    """

    def __init__(
        self,
        program: Program,
        machine: Machine,
        placement: np.ndarray,
        classes: Classes,
        shared: bool = True,
        grain: float = 0.0,
    ):
        """`shared`: copies slow one another down; else each goes as if it were alone. `grain`: what
        happens within so many seconds happens at their end; within less at the beginning.
        """
        self.program, self.machine = program, machine
        self.placement = np.tile(placement, program.cores)
        self.classes, self.shared, self.grain = classes, shared, grain
        n_classes, n_links = len(classes.representatives), len(classes.link_count)
        self._memories = {"hbm": n_links, "vmem": n_links + n_classes}
        links = np.zeros(n_links)
        links[classes.of_link] = machine.link_capacity
        hbm = np.full(n_classes, machine.generation.hbm_bandwidth)
        vmem = np.full(n_classes, machine.generation.vmem_bandwidth)
        self.network = Network(np.concatenate([links, hbm, vmem]), shared)
        self.cores = [Core(int(d), program.of_device(int(d))) for d in classes.representatives]
        self.now = 0.0
        self._events: list[tuple[float, int, int, Any, tuple[Any, ...]]] = []
        self._sequence = 0
        self._paths: dict[Any, tuple[list[tuple[int, float]], float]] = {}
        self._routes: dict[tuple[int, int], tuple[list[int], float]] = {}
        self._senders: dict[tuple[int, int, int], list[int]] = {}

    @property
    def time(self) -> float:
        """When the last core reached its end, or stopped for good."""
        return max(core.time for core in self.cores)

    def run(self) -> None:
        for core in self.cores:
            self._at(0.0, 1, self._advance, core)
        while self._events:
            begins = self._events[0][0]
            self.now = now = begins + min(self.grain, begins * _FINE)
            while self._events and self._events[0][0] <= now + PICOSECOND:
                _, _, _, action, args = heapq.heappop(self._events)
                action(*args)
            if self.network.dirty:
                for flow in self.network.resolve(now):
                    self._at(flow.next_end, 0, self._copies_end, flow, flow.version)

    def _at(self, time: float, priority: int, action: Callable[..., None], *args: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time, priority, self._sequence, action, args))

    # A core ---------------------------------------------------------------------------------------

    def _advance(self, core: Core) -> None:
        issue = self.machine.generation.issue_cost
        while True:
            entry = core.pending or core.next_entry()
            if entry is None:
                core.done = True
                return
            number, position, column = entry
            if core.pending is None:
                core.time += column.busy
            core.pending = None
            if isinstance(column, Start):
                core.time += issue
                self._start(core, position, column)
            elif isinstance(column, Signal):
                core.time += issue
                self._signal(core, position, column)
            elif isinstance(column, (Wait, Read)):
                if core.time > self.now + PICOSECOND:  # semaphores are known up to now only
                    core.pending = entry
                    self._at(core.time, 1, self._advance, core)
                    return
                sem = at(column.sem, position)
                if isinstance(column, Read):
                    core.time += issue  # polling takes time: a loop of reads moves on
                    core.following = self._answer(core, core.semaphores[sem])
                elif not self._pass(core, column, sem, at(column.value, position)):
                    return
            core.finished = number + 1

    def _answer(self, core: Core, value: int) -> tuple[int, int, Any] | None:
        try:
            return core.stream.send(value)
        except StopIteration:
            core.stream = iter(())
            return None

    def _pass(self, core: Core, column: Wait, sem: int, value: int) -> bool:
        """Takes `value` off the semaphore if it is there; otherwise the core is held up."""
        if core.semaphores[sem] >= value:
            if not column.keeps:
                core.semaphores[sem] -= value
            return True
        core.waiting = Block(column, sem, value, core.time)
        core.keeps = column.keeps
        return False

    def _deliver(self, core: Core, sem: int, amount: int, message: Message) -> None:
        core.semaphores[sem] += amount
        block = core.waiting
        if block is None or block.sem != sem or core.semaphores[sem] < block.value:
            return
        if not core.keeps:
            core.semaphores[sem] -= block.value
        block.ended, block.cause = self.now, message
        core.blocks.append(block)
        core.waiting = None
        core.time = self.now
        self._advance(core)

    # Messages -------------------------------------------------------------------------------------

    def _signal(self, core: Core, position: int, column: Signal) -> None:
        value = at(column.value, position)
        target = at(column.target, position)
        if target is None:
            deliveries, hops = [(core, at(column.sem, position), value)], 0.0
        else:
            receivers = self._receivers(core, position, column, column.sem)
            deliveries = [(c, s, value) for c, s in receivers]
            _, hops = self._route(core.device, target, column)
        message = Message(core, column, 0.0, core.time, deliveries, hops)
        message.left = core.time
        core.messages.append(message)
        self._at(core.time + hops * self.machine.generation.hop_latency, 0, self._arrive, message)

    def _start(self, core: Core, position: int, column: Start) -> None:
        nbytes = int(at(column.nbytes, position))
        target = at(column.target, position)
        if target is None or target == core.device:
            target = core.device
            deliveries = [(core, at(column.dst_sem, position), nbytes)]
        else:
            receivers = self._receivers(core, position, column, column.dst_sem)
            deliveries = [(c, s, nbytes) for c, s in receivers]
        spaces = (column.src.buffer.space, column.dst.buffer.space)
        uses, hops = self._crossed(core.device, target, spaces, column)
        message = Message(core, column, nbytes, core.time, deliveries, hops, uses)
        message.src_sem = None if column.src_sem is None else at(column.src_sem, position)
        core.messages.append(message)
        self._at(core.time + self.machine.generation.dma_latency, 0, self._copy_begins, message)

    def _route(self, device: int, target: int, column: Any) -> tuple[list[int], float]:
        """The links from device to target, and how many hops they are."""
        key = (device, target)
        if key not in self._routes:
            lanes, targets = column.lanes, np.broadcast_to(column.target, column.lanes.shape)
            if len(self.cores) < self.program.n_devices:  # most of the others are never asked for
                lanes, targets = np.array([device]), np.array([target])
            src, dst = self.placement[lanes], self.placement[targets]
            links = np.array(self.machine.routes(src, dst)).reshape(-1, len(lanes))
            hops = self.machine.distance(src, dst)
            for k, pair in enumerate(zip(lanes.tolist(), targets.tolist(), strict=True)):
                crossed = links[:, k]
                self._routes[pair] = crossed[crossed >= 0].tolist(), float(hops[k])
        return self._routes[key]

    def _crossed(
        self, device: int, target: int, spaces: tuple[str, str], column: Start
    ) -> tuple[list[tuple[int, float]], float]:
        """(resource, how many of this class' copies one of its like carries) of a copy, and its
        hops.
        """
        key = (device, target, spaces)
        cached = self._paths.get(key)
        if cached is not None:
            return cached
        of_device, count = self.classes.of_device, self.classes.device_count
        here = int(of_device[device])
        uses: dict[int, float] = defaultdict(float)
        hops = 0.0
        if target != device:
            links, hops = self._route(device, target, column)
            for link in links:
                of_link = int(self.classes.of_link[link])
                uses[of_link] += count[here] / self.classes.link_count[of_link]
        chips = self.program.n_devices // self.program.cores
        for space, lane in ((spaces[0], device), (spaces[1], target)):
            if space in self._memories:  # cores of a device share what is in HBM
                of_class = int(of_device[lane % chips if space == "hbm" else lane])
                uses[self._memories[space] + of_class] += count[here] / count[of_class]
        self._paths[key] = (list(uses.items()), hops)
        return self._paths[key]

    def _copy_begins(self, message: Message) -> None:
        message.began = self.now
        if message.nbytes:
            self.network.add(message, message.nbytes, message.uses, self.now)
        else:
            self._sent(message)

    def _copies_end(self, flow: Flow, version: int) -> None:
        if version == flow.version:
            flow.version += 1
            for message in self.network.ended(flow, self.now):
                self._sent(message)

    def _sent(self, message: Message) -> None:
        message.left = self.now
        latency = message.hops * self.machine.generation.hop_latency
        if message.src_sem is not None:
            self._deliver(message.core, message.src_sem, int(message.nbytes), message)
        self._at(self.now + latency, 0, self._arrive, message)

    def _arrive(self, message: Message) -> None:
        message.arrived = self.now
        for core, sem, amount in message.deliveries:
            self._deliver(core, sem, amount, message)

    def _receivers(
        self, core: Core, position: int, column: Signal | Start, sems: Lanes | None
    ) -> list[tuple[Core, int]]:
        """Which modelled cores an instruction of the core's class reaches, on which of their
        semaphores.

        Devices of a class reach devices of one class, each the same number: what this core's
        representative of them receives comes from some senders of the core's class.
        """
        of_device = self.classes.of_device
        receiver = self.cores[of_device[at(column.target, position)]]
        if len(self.cores) == self.program.n_devices:
            return [(receiver, at(sems, position))]
        key = (core.device, id(column.target), len(column.lanes))
        senders = self._senders.get(key)
        if senders is None:
            lanes = column.lanes
            targets = np.broadcast_to(np.asarray(column.target), lanes.shape)
            alike = of_device[lanes] == of_device[core.device]
            senders = np.nonzero((targets == receiver.device) & alike)[0].tolist()
            if len(lanes) == self.program.n_devices:
                self._senders[key] = senders
        return [(receiver, at(sems, p)) for p in senders]
