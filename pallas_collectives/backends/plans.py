"""What serves a call: `How`, settled while tracing, and the `Plan` that a lowering makes of it."""

import dataclasses
from typing import Any

from pallas_collectives.errors import (
    DtypeError,
    ReachError,
    SliceError,
    SlowerError,
    UnservedError,
)

NAMES = ("pallas", "nccl", "xla")


# What a backend raises for a call that lax can serve in its place.
UNSERVABLE = (DtypeError, ReachError, SliceError, SlowerError, UnservedError)


@dataclasses.dataclass(frozen=True)
class How:
    """What is settled of a call while tracing; a parameter of its primitive and its transpose's.

    What serves in the end is a `Plan`, made while lowering, when the devices are known.

    Attributes:
      backend: one of `NAMES`.
      named: whether the caller named the backend, so that nothing else may serve.
      fallback: why lax serves a call whose backend was not named; "" where it does not.
      algorithm: the caller's choice, or None for the backend's own.
      precise: sums travel in float32 where the operand is a narrower float.
      order: "rank" where every element is to be added in the order of the ranks; else None.
      interpret: False, or the `pltpu.InterpretParams` to simulate the TPU with.
      across: the mesh axes that lead to other slices; None to ask the devices (see `slices`).
    """

    backend: str
    named: bool = False
    fallback: str = ""
    algorithm: str | None = None
    precise: bool = False
    order: str | None = None
    interpret: Any = False
    across: tuple[str, ...] | None = None

    @property
    def strict(self) -> bool:
        """Whether the call must be served as it says, or not at all."""
        return self.named or self.algorithm is not None or self.precise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What serves one collective, and why: made once, followed, counted and explained as it is.

    Attributes:
      op: the canonical collective; where lax serves, lax's.
      backend: one of `NAMES`.
      algorithm: its name, with the memory space behind it; None where the backend itself chooses.
      why: in a sentence; where lax serves, what no other backend can, and "" if lax was named.
    """

    op: str
    backend: str
    algorithm: str | None = None
    why: str = ""
