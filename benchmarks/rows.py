"""The records of a run: one dataclass for each of its parts."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What every record says of one collective.

    Attributes:
      op: lax's name.
      algorithm: None for the backend's own choice.
      type: dtype.
      devices: devices that take part in one collective.
      refused: why the collective cannot run so here: a clear error, as it should be.
      error: why it failed.
    """

    op: str
    algorithm: str | None = None
    type: str
    devices: int | None = None
    refused: str = ""
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether something is wrong."""
        return bool(self.error)

    @property
    def reason(self) -> str:
        """Why it did not run, or what was found amiss; "" if it ran and all is right."""
        return self.error or self.refused

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from the other rows of its part, and finds it again in another run."""
        return (self.op, self.algorithm, self.type, self.devices)

    def __str__(self) -> str:
        return f"{self.op} {self.algorithm or ''}".strip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Row):
    """A collective verified and, where it says so, timed.

    Attributes:
      backend: "pallas", "nccl", or "xla" for `jax.lax` itself.
      size: bytes of the full array.
      count: see `cases`.
      wrong: elements that differ from numpy's result or from lax's; None where that was not seen.
      interpret_ms: wall time of the interpreter on simulated devices. No TPU's time.
      time_us: median device time of one collective; its least and greatest below.
      algbw: size / time, in GB/s.
      busbw: see `cases`, in GB/s.
      of_peak: busbw in percent of what the wires of a device carry; None where that is not known.
      model_us: what `replay` predicts, where it was asked.
      over: the mesh and its axes, where a run has several.
    """

    backend: str
    size: int
    count: int
    wrong: int | None = None
    interpret_ms: float | None = None
    time_us: float | None = None
    time_us_min: float | None = None
    time_us_max: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    of_peak: float | None = None
    model_us: float | None = None
    over: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.error)

    @property
    def key(self) -> tuple[Any, ...]:
        return (*super().key, self.backend, self.size, self.over)

    def __str__(self) -> str:
        return f"{super().__str__()} {self.backend}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled(Row):
    """A collective compiled by us and by lax for a TPU.

    Attributes:
      topology: libtpu's name.
      op: lax's name, and what is special about the call.
      size: bytes of the full array.
      asked: the algorithm that was asked for; "" where the library chose.
      algorithm: those that serve; "xla" where a call was left to lax.
      temp: bytes of our program beyond its arguments and results; the collective's operand and
        result are among them where they do not fit VMEM.
      ops: what our program holds beside producer and consumer.
      lax_temp: as temp, for lax's.
      lax_ops: as ops, for lax's.
    """

    topology: str
    size: int = 256 << 20
    asked: str = ""
    temp: int | None = None
    ops: str = ""
    lax_temp: int | None = None
    lax_ops: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.topology, self.op, self.type, self.size, self.asked)

    def __str__(self) -> str:
        return f"{self.op} {self.asked}".strip() + f" for {self.topology}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stepped(Row):
    """A model's step, compiled for a TPU; its time is modelled (see `steps.timeline`).

    Attributes:
      op: the program, and how it is run.
      topology: libtpu's name.
      under: whose collectives: "lax", "override", "forced" or a wire, as "int8".
      compute_us: the core's own work, by XLA's estimate.
      waits_us: what the core waits for collectives.
      packing_us: what it computes for collectives alone (see `steps.packing`).
      exposed_us: both: what collectives cost the core.
      hidden_us: what collectives take beside the core's own work.
      hideable_us: what they could at the most, by the program's data dependencies (see
        `steps.bound`).
      time_us: the step: compute and exposed.
      temp: bytes of the program beyond its arguments and results.
      collectives: each, as `steps.timeline.Served`.
      spans: the time line, as `steps.timeline.Span`.
    """

    topology: str
    under: str
    compute_us: float | None = None
    waits_us: float | None = None
    packing_us: float | None = None
    exposed_us: float | None = None
    hidden_us: float | None = None
    hideable_us: float | None = None
    time_us: float | None = None
    temp: int | None = None
    collectives: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    spans: list[Any] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.topology, self.op, self.under)

    def __str__(self) -> str:
        return f"{self.op} for {self.topology} under {self.under}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran(Row):
    """A model's step, run on the devices there are.

    Attributes:
      op: the program, and how it is run.
      under: whose collectives: "lax", "override" or a wire, as "int8".
      time_us, time_us_min, time_us_max: times of one step, by the clock: median, fastest, slowest.
      compute_us, exposed_us, hidden_us: times of one step, by the profiler, of the median device
        (see `steps.exposed`).
    """

    under: str
    time_us: float | None = None
    time_us_min: float | None = None
    time_us_max: float | None = None
    compute_us: float | None = None
    exposed_us: float | None = None
    hidden_us: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.op, self.under, self.devices)

    def __str__(self) -> str:
        return f"{self.op} under {self.under}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayed(Row):
    """A collective replayed on the model of a pod.

    Attributes:
      machine: the pod, as "v5e:16x16".
      kernel: the kernels that ran.
      served: by which algorithm, if the library chose.
      size: bytes of the full array.
      count: see `cases`.
      time_us: modelled time of one call, by itself.
      algbw: size / time, in GB/s.
      busbw: see `cases`, in GB/s.
      bound_us: the least time that any schedule takes (see `replay.bound`).
      of_bound: bound_us / time_us, in percent.
      of_wire: the least time on the busiest link alone / time_us, in percent.
      over: the mesh axes, where they are several.
      faults: deadlocks, semaphores left over and races, where looked for; "" if none.
    """

    machine: str
    kernel: str = ""
    served: str = ""
    size: int
    count: int
    time_us: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    bound_us: float | None = None
    of_bound: float | None = None
    of_wire: float | None = None
    over: str = ""
    faults: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error or self.faults)

    @property
    def reason(self) -> str:
        return super().reason or self.faults

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.machine, *super().key, self.size, self.over)

    def __str__(self) -> str:
        return f"{super().__str__()} on {self.machine}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wired(Row):
    """A collective over a wire of narrower numbers, or without one.

    Attributes:
      where: the pod, or the devices and the backend.
      wire: "none" without one.
      size: bytes of the full array.
      time_us: measured, or on a pod modelled, XLA's passes included.
      passes_us: XLA's passes' part of them; None where they are measured with the rest.
      of_plain: time in percent of that without a wire.
      of_bytes: bytes on the wire in percent of those without one.
      off: the largest error of any number, in percent of the result's largest number.
    """

    where: str
    wire: str
    size: int
    time_us: float | None = None
    passes_us: float | None = None
    of_plain: float | None = None
    of_bytes: float | None = None
    off: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.where, self.wire, *super().key, self.size)

    def __str__(self) -> str:
        return f"{self.op} by wire {self.wire} on {self.where}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Soaked(Row):
    """A program of many collectives, one after another without a pause, run again and again.

    Attributes:
      op: the collectives in their order, with their algorithms.
      runs: how often it ran, each time on what the last left.
      calls: collectives in all.
      seconds: wall time of the runs, the interpreter's on simulated devices.
      wrong: elements at the end that differ from numpy's.
    """

    runs: int = 0
    calls: int = 0
    seconds: float | None = None
    wrong: int | None = None

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probed(Row):
    """A figure of the model of a pod, measured (see `probes.estimates`).

    Attributes:
      op: its name, as `replay.Generation` has it where it does.
      machine: the slice.
      unit: the unit of both figures.
      assumed: the model's figure; None if it has no such figure.
      measured: None where it could not be.
      how: in a few words.
    """

    machine: str
    unit: str = ""
    assumed: float | None = None
    measured: float | None = None
    how: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.machine, self.op)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked(Row):
    """What a TPU does, where that is no figure (see `probes.spaces` and `probes.risky`).

    Attributes:
      op: the question.
      over: what it is about.
      size: bytes of a device's operand.
      answer: in words.
      wrong: elements that differ from what must be there; None where that is the answer.
    """

    over: str = ""
    size: int = 0
    answer: str = ""
    wrong: int | None = None

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.error)

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.op, self.over, self.size)

    def __str__(self) -> str:
        return f"{self.op} {self.over}".strip()


# Part of a run -> its records, and what a page calls them.
PARTS: dict[str, tuple[type[Row], str]] = {
    "figures": (Probed, "Figures of the model: assumed and measured"),
    "spaces": (Asked, "Data in the memories that XLA chooses"),
    "conformance": (Measured, "Conformance"),
    "soak": (Soaked, "Soak: mixed collectives back to back"),
    "measured": (Measured, "Measured"),
    "wires": (Wired, "Over narrower wires: modelled on pods, measured on devices"),
    "compiled": (Compiled, "Compiled for TPUs that are not there"),
    "steps": (Stepped, "A model's step: modelled, not measured"),
    "ran": (Ran, "A model's step: measured"),
    "replayed": (Replayed, "Modelled, not measured"),
    "small": (Replayed, "Small blocks: modelled, not measured"),
    "several": (Replayed, "Over several axes: modelled, not measured"),
    "asked": (Asked, "Barrier semaphores, and what a remote DMA and a signal reach"),
}
