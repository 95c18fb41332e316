"""What a call asks for (`How`), and what serves it (`Plan`).

Two moments settle a call, because tracing does not know where the devices are. While it is
traced, `backends.choice` checks what the caller asks for, and writes these wishes and the backend
that they lead to into a `How`. While it is lowered the devices are known, and a plan is made:

    Plan           lax serves, or NCCL, which chooses its algorithms itself
    KernelPlan     one of our kernels; made by `backends.algorithms`, which chooses and launches it
    WirePlan       in what numbers a collective sends; made by `backends.wired`, beside the plans
                   of what moves them
    ProductPlan    a product with its collective; made by `overlap.fusion.decide`, while tracing
                   already, since derivatives depend on it, and confirmed while lowering

Whoever makes a plan hands it to `counters.note`; a kernel's when that is launched, with what the
kernel says of itself. Counters count that object, and `explain` prints it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_collectives.annotations import Interpret
from pallas_collectives.catalogue.records import Algorithm
from pallas_collectives.errors import (
    DtypeError,
    ReachError,
    SliceError,
    SlowerError,
    UnservedError,
    VmemError,
)
from pallas_collectives.kernels.machinery.blocks import Chunking
from pallas_collectives.wires import Wire

NAMES = ("pallas", "nccl", "xla")

# Of a call in a loop (`How.ahead`): another turn than its own may begin it; the turn before begins
# it, as for weights, also where turns go in pairs; the turn behind begins it, as for gradients.
MAY_BE_AHEAD, IS_AHEAD, IN_PAIRS, IS_BEHIND = "may be", "is", "in pairs", "behind"

# The collective that moves blocks, by what becomes of them.
MOVES = {"gather": "all_gather", "exchange": "all_to_all", "permute": "ppermute"}

# What a backend raises for a call that lax can serve in its place.
UNSERVABLE = (DtypeError, ReachError, SliceError, SlowerError, UnservedError, VmemError)


@dataclasses.dataclass(frozen=True)
class How:
    """What a call asks for; a parameter of its primitive and of its transpose's.

    Attributes:
      backend: one of `NAMES`.
      named: whether the caller named the backend, so that nothing else may serve.
      fallback: why lax serves a call whose backend was not named; "" where it does not.
      algorithm: the caller's choice, or None for the backend's own.
      precise: sums travel in float32 where the operand is a narrower float.
      order: "rank" where every element must be added in the order of the ranks; else None.
      interpret: False, or the `pltpu.InterpretParams` to simulate the TPU with.
      across: the mesh axes that lead to other slices; None to ask the devices (see `slices`).
      wire: the numbers that floats travel as, if narrower than they are (see `wires`).
      wire_backward: those of derivatives.
      once: over a wire, each term must be quantised once: draws and residues need that.
      mapped: how many leading dimensions are vmap's, of each row where rows are ragged; over a
        wire no group is of two elements.
      pieces: the sizes of the arrays that lie behind one another in a sum's operand, a bundle; over
        a wire no group is of two of them.
      beside: whether the step around the call matters: lax then serves what XLA runs beside
        compute, and a SparseCore what is worth it (see `tuning.overlaps`).
      awaited: whether products wait for the result at once, as for tokens, which were computed
        right before, and not for weights, nor for gradients of gathered ones: a SparseCore, which
        serves one at a time, is left free. None for a call outside of a step, or that is started.
      fuses: whether it may run in one kernel with a product, or beside it on GPUs, where that is
        quicker (see `lowering.fusing`).
      ahead: for a gather or scatter in a loop, `MAY_BE_AHEAD`, `IS_AHEAD`, `IN_PAIRS` or
        `IS_BEHIND` (see `lowering.ahead`); else "".
      for_products: whether it is known that products alone read the result.
    """

    backend: str
    named: bool = False
    fallback: str = ""
    algorithm: str | None = None
    precise: bool = False
    order: str | None = None
    interpret: Interpret = False
    across: tuple[str, ...] | None = None
    wire: Wire | None = None
    wire_backward: Wire | None = None
    once: bool = False
    mapped: int = 0
    pieces: tuple[int, ...] = ()
    beside: bool = False
    awaited: bool | None = None
    fuses: bool = False
    ahead: str = ""
    for_products: bool = False

    @property
    def strict(self) -> bool:
        """Whether the call must be served as it says, or not at all."""
        return self.named or self.algorithm is not None or self.precise

    @property
    def differentiated(self) -> "How":
        """Options of the call's derivatives: straight through, with a wire of their own.

        An exchange, unless it keeps an order, is a way of wires with scales alone.
        """
        back, algorithm = self.wire_backward, self.algorithm
        if algorithm == "exchange" and self.order is None and not (back and back.scaled):
            algorithm = None
        return dataclasses.replace(self, wire=back, algorithm=algorithm)

    def told_turn(self, kept: int) -> str:
        """Which turn of a loop begins it, and how many bytes more that keeps; "" if its own."""
        more = f", which keeps {kept / 2**20:.1f} MiB more"
        if self.ahead == IS_AHEAD:
            return f"a loop's turn asks for it for the next one{more}"
        if self.ahead == IN_PAIRS:
            return f"a loop's turn asks for it for the next one{more}, and a second turn's values"
        return f"a loop's turn leaves it to the next one{more}" if self.ahead == IS_BEHIND else ""

    @property
    def once_more_mapped(self) -> "How":
        """Options of the call under one more vmap."""
        return dataclasses.replace(self, mapped=self.mapped + 1)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An algorithm that could serve.

    Attributes:
      algorithm: its name.
      us: predicted microseconds; None where there is no prediction.
      latency_us: the part of it that remains for the smallest operands.
      source: whose prediction it is, "modelled ..." or "measured ..."; or why it has no prediction.
    """

    algorithm: str
    us: float | None
    latency_us: float | None
    source: str


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a collective, served in one step or in several with a plan each.

    Attributes:
      function: the first function of lax's that binds what was called: "psum" also of a pmean.
      nbytes: bytes of a device's operand, as the caller gave it; 0 if nothing is called.
    """

    function: str
    nbytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What serves one call, and why: made once, followed, counted and explained as it is.

    Attributes:
      op: the canonical collective, or the product; where lax serves, lax's collective.
      backend: one of `NAMES`.
      algorithm: its name, with the memory space behind it; None where the backend itself chooses.
      why: in a sentence; where lax serves, what no other backend can, and "" if lax was named.
      turn: as `How.told_turn` says.
      candidates: all algorithms that were compared, the fastest first; empty where the caller named
        this one.
      beside: whether lax serves because XLA runs the collective beside compute.
      nbytes: bytes of one device's operand, where a plan tells.
      call: which call it is for, written as the plan is noted; None if it is not a collective.
      chunking: in what pieces each of its kernels sends data, as that kernel said when it was
        launched; empty before, and where it launches none itself.
    """

    op: str
    backend: str
    algorithm: str | None = None
    why: str = ""
    turn: str = ""
    candidates: tuple[Candidate, ...] = ()
    beside: bool = False
    nbytes: int = 0
    call: Call | None = None
    chunking: tuple[Chunking, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelPlan(Plan):
    """A plan by which a kernel serves.

    Attributes:
      record: the record of its algorithm.
      vmem: whether operands and result are kept in VMEM while it runs.
      on_sparsecore: whether a SparseCore runs it, and not the TensorCore.
      engine_why: why the TensorCore runs it; "" if a SparseCore does.
      for_products: as in `How`.
      shape, nbytes: shape and bytes of one device's operand, as it is laid out for the kernel.
      devices: devices in the group.
      axes: the mesh axes that the group lies along.
      groups: the `axis_index_groups` that cut these axes, or None.
      chip: the TPU generation.
      torus: how the group lies on the links (see `tables.Entry`).
      wire: the wire for which the kernel packs; None where it sends what it is given.
    """

    record: Algorithm
    vmem: bool
    on_sparsecore: bool
    engine_why: str = ""
    for_products: bool = False
    shape: tuple[int, ...]
    nbytes: int
    devices: int
    axes: tuple[str, ...]
    chip: str
    torus: str
    wire: Wire | None = None
    groups: tuple[tuple[int, ...], ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WirePlan(Plan):
    """A plan for the numbers that a collective sends; those that move them have plans beside it.

    Its `algorithm` is the wire in words, or None where it is left out, and `why` says why.

    Attributes:
      wire: the one asked for.
      nbytes: bytes of one device's operand.
      sent: bytes as they travel, scales and padding included.
      passes_us: what XLA's passes take before and behind, on a TPU.
      way: the algorithm that packs in its kernel, or adds (see `backends.wire_ways`); "" if none.
      requantizes: whether sums are rounded at every hop.
      us, wired_us: predicted times without and with it, passes included; None where no table tells.
    """

    wire: Wire
    nbytes: int = 0
    sent: int = 0
    passes_us: float = 0.0
    way: str = ""
    requantizes: bool = False
    us: float | None = None
    wired_us: float | None = None


FUSED, PIPELINED, UNFUSED = "fused", "pipelined", "unfused"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductPlan(Plan):
    """A plan for a product and its collective.

    Its `algorithm` is `FUSED` (one kernel, or products beside copies between GPUs), `PIPELINED`
    (permutes and products of XLA) or `UNFUSED` (a collective and a product; the collective has a
    plan of its own).

    Attributes:
      bind: what binds the same, inside `jax.shard_map`; None before it is lowered.
      operands: the types of what that is called with.
    """

    bind: Callable[..., Any] | None = None
    operands: tuple[jax.ShapeDtypeStruct, ...] = ()
