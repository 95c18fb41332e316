"""What the catalogue's records hold of a collective, an algorithm, and a primitive of lax's.

Bytes and blocks are those of `tuning.choice`; `n` is the number of devices in the group.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from pallas_collectives.examples import Example, Plainly
from pallas_collectives.topology.groups import Group
from pallas_collectives.topology.placement import nearest
from pallas_collectives.topology.reach import (
    Pairs,
    Pattern,
    alone,
    everyone,
    jumps,
    line,
    ring,
    torus,
)


def _neighbours(group: Group) -> Pairs:
    return nearest(group)(group)


# Who writes to whom or signals whom: what a chip must reach.
RING = ring  # neighbours, the first and the last too
LINE = line  # neighbours, but for the first and the last
TORUS = torus  # neighbours along each axis of the torus
NEIGHBOURS = _neighbours  # on the torus, the line or the ring, as the group lies
JUMPS = jumps  # devices at distances of 1, 2, 4, ... along each axis of the torus
EVERYONE = everyone
PARTNERS = alone  # the pairs of a permutation, which a call names
_PATTERNS = (RING, LINE, TORUS, NEIGHBOURS, JUMPS, EVERYONE, PARTNERS)

# How a group lies on the links.
ON_RING, ON_LINE, ON_SEVERAL = "ring", "line", "several axes"
_ANYWHERE = (ON_RING, ON_LINE, ON_SEVERAL)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A launcher by the name of its module in `kernels`, which is imported when it is called.

    Attributes:
      module: a module of `kernels`.
      function: its launcher.
      fixed: arguments that make this algorithm of it.
    """

    module: str
    function: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, *operands: Any, **options: Any) -> Any:
        name = f"pallas_collectives.kernels.{self.module}"
        what = f"Kernel({self.module!r}, {self.function!r}) of the catalogue"
        try:
            launcher = getattr(importlib.import_module(name), self.function, None)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            rule = f"there is no module {name}"
            raise TypeError(f"{what}: {rule}; name a file of kernels/") from None
        if launcher is None:
            raise TypeError(f"{what}: {name} has no such function; name the kernel's launcher")
        return launcher(*operands, **self.fixed, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One way to run a collective on TPUs.

    Attributes:
      name: what `algorithm=` calls it.
      launcher: (*operands, group, **options, vmem, interpret) -> result, with the operands and
        options that the collective's canonical function lays out for all of its algorithms.
      reach: who writes to whom or signals whom: what a chip must reach. The launcher names the
        barrier among these devices.
      sent: bytes that a link carries in one direction, in words.
      steps: how many there are, in words.
      lies: the placements of a group on which this algorithm is worth timing.
      in_vmem: (bytes of a block, n) -> bytes that are kept in VMEM with ":vmem". None if that gains
        nothing, and is done only on request.
      in_order: it adds every element in the order of the ranks, and rounds once.
      by_subcores: what it adds can be added by a SparseCore's vector subcores.
      packed: what launches it where numbers travel as one byte, packed in the kernel: it takes a
        `codec` besides. True if that is `launcher` itself, False if it has no such form. Sums are
        rounded at every hop.
      takes_whole: it takes the operand as one array of whole tiles, not as n blocks of them.
      takes_everyones: it takes the tables of all devices, not only this device's.
      tables: how many numbers it keeps in scalar memory for each slice and device of a group, if
        more than it is given.
      shifts_alone: of permutations it serves those by one position alone.
      most_devices: the largest group that it serves; None for any.
      first_from: bytes of a block from which, on several axes of a torus, it is preferred to those
        listed before it, if there are no times to tell; None if it never is.
    """

    name: str
    launcher: Callable[..., Any]
    reach: Pattern
    sent: str
    steps: str
    lies: tuple[str, ...] = _ANYWHERE
    in_vmem: Callable[[int, int], int] | None = None
    in_order: bool = False
    by_subcores: bool = False
    packed: Callable[..., Any] | bool = False
    takes_whole: bool = False
    takes_everyones: bool = False
    tables: Callable[[Group], int] = lambda _: 0
    most_devices: int | None = None
    shifts_alone: bool = False
    first_from: int | None = None

    def __post_init__(self) -> None:
        if self.reach not in _PATTERNS:
            names = "RING, LINE, TORUS, NEIGHBOURS, JUMPS, EVERYONE and PARTNERS"
            raise TypeError(
                f"reach={self.reach!r} of {self.name}: it must be one of {names} of records"
            )

    def rank(self, lies: str, block_bytes: int) -> int:
        """Where no times tell, the algorithm of least rank serves; of equals the first listed."""
        if self.first_from and block_bytes >= self.first_from and lies == ON_SEVERAL:
            return 0
        return 1 if lies in self.lies else 2

    @property
    def one_hop(self) -> bool:
        """Whether everything goes straight to the device that it is for."""
        return self.reach in (EVERYONE, PARTNERS)


@dataclasses.dataclass(frozen=True)
class Primitive:
    """A primitive of lax's that a collective serves.

    Attributes:
      name: lax's.
      by: the function of `backends.canonical` that turns lax's parameters into ours; "" if they are
        ours already.
      reduction: "sum", "max" or "min" for those that reduce elementwise, whose twins take many
        operands: the leaves of a tree.
    """

    name: str
    by: str = ""
    reduction: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective: what it is called, what serves it, and how it is numbered.

    Attributes:
      name: the canonical name, which each backend's function has.
      functions: public name -> the primitive that it binds, and how to bind that plainly; lax's
        name for the collective comes first.
      primitives: those that it serves.
      algorithms: the first is preferred among equals.
      example: a call, and what must come of it.
      of_blocks: whether the operand is n blocks; else it is one.
      is_cut: whether the operand, though one block in tables of times, is cut into n.
      phases: what its traffic is made of: "gather", "scatter" or both; empty if each device sends
        something else to each other.
      adds: whether it sums what devices give (or takes their maximum): the one place that says so.
      ordered_steps: collectives of which, with additions between them, a sum in the order of the
        ranks can be made (`backends.ordered`); empty if its own algorithms alone add so.
      timed: whether tables have its times; they do not if these depend on values.
    """

    name: str
    functions: Mapping[str, tuple[str, Plainly]]
    primitives: tuple[Primitive, ...]
    algorithms: tuple[Algorithm, ...]
    example: Example
    of_blocks: bool = False
    is_cut: bool = False
    phases: tuple[str, ...] = ()
    adds: bool = False
    ordered_steps: tuple[str, ...] = ()
    timed: bool = True

    @property
    def sums_everywhere(self) -> bool:
        """Whether it adds, and everyone gets the whole sum."""
        return self.adds and "gather" in self.phases

    def result_bytes(self, nbytes: int, n: int) -> int:
        """Bytes of one device's result, of an operand of so many."""
        if self.phases == ("gather",):
            return nbytes * n
        return nbytes // n if self.phases == ("scatter",) else nbytes

    def larger_bytes(self, nbytes: int, n: int) -> int:
        """Bytes of an operand of so many or of its result, whichever are more."""
        return max(nbytes, self.result_bytes(nbytes, n))

    def block_bytes(self, nbytes: int, n: int) -> int:
        """Bytes of one block of an operand, as tables of times count them."""
        return nbytes // n if self.of_blocks else nbytes

    def function_of(self, primitive: str) -> str:
        """The first function of lax's that binds a primitive, or its like under `check_vma`."""
        kinds = {p.name: (p.by, p.reduction) for p in self.primitives}
        bound = ((name, kinds[by]) for name, (by, _) in self.functions.items())
        return next(name for name, kind in bound if kind == kinds[primitive])

    def algorithm(self, name: str) -> Algorithm | None:
        """The algorithm of a name, with or without a memory space behind it; None if unknown."""
        base = name.partition(":")[0]
        return next((a for a in self.algorithms if a.name == base), None)
