"""Barrier ids, as a function of a call alone, and the barrier for calls that nothing else fits.

A kernel's `collective_id` names the barrier semaphore on which devices learn that others have
entered it. XLA gives each name of a program a semaphore of its own: libtpu 0.0.42 and 0.0.50 take
any int32, and have 36 semaphores for a program, less one for each kind of group of XLA's own
collectives (for v4, v5e, v5p, v6e and 7x; what is beyond shares one, `"barrier_type":"GLOBAL"`).
JAX's documentation speaks of 20 to 30.

There is one id for each set of mesh axes, whatever the collective, the algorithm, the dtype or the
order of the axes: a mesh of four axes has 15, one of three 7. Eight more, on four axes, are for
shifts along one axis (`partners`, below; over several axes, by that name only). So no program on a
mesh of up to four axes needs more than 23, however many collectives, groups and permutations it
has, and no history enters: processes agree on every id, whatever else each has traced. Nor do
programs add up: a sweep, a soak and `certify` need what one of their programs does, on meshes of at
most three axes: 13, and 8 more for named shifts over several.

Why calls over the same axes may share an id. Let S be the devices that the axes join. They all make
the same calls over S in the same order; in call j device d is signalled once by each of its c_j
peers, and waits for c_j. Every call is of one of two kinds:

    N   no device leaves it before all of S have entered it: it needs a block of each, or waits for
        a signal of each.
    L   no device leaves it before all that it can signal in S have passed its barrier (`WIDE` on
        chips that reach only some, and in slices; they tell each other on a semaphore of the
        kernel's own).

Claim: a device that passes the barrier of call j has peers that have entered call j. To pass it, it
has taken c_1 + ... + c_j signals in all. If a peer has not entered call j, calls up to j have sent
it at most one less, so one is from call j+1 or later; let q be its sender. If j is of kind N, q
left j after all of S had entered it: the peer too, a contradiction. If j is of kind L, q can reach
d, as it signals d, so it left j after d had passed j's barrier: again a contradiction.

Devices of another slice take no part in any of this: where the axes join several, S is those of one
slice. A barrier among all of S costs a signal from each to each: by the replay groups of 4 on a v6e
axis of 256 take 28 us for 4 KiB, where a barrier of their own would make that 12.

Kernels on a SparseCore run beside those of the TensorCore, in no order with them, so j would not
number the same call on every device: they have ids of their own, as many again. Among themselves
they are in one order. XLA starts them in the order of the program, which all devices share, and one
queue serves a device's SparseCore calls: the next begins when the last has ended, also where the
TensorCore has started both before it waits for either. So the claim above holds for them by itself.
Nor can the two engines wait for each other in a circle. Let every launch, and every wait of the
TensorCore for a SparseCore's call to end, be an event of the program, in its order: a kernel waits
only for kernels of the same event on other devices, and these for earlier events.

A kernel on both cores of a device has a barrier semaphore on each. Cores of a number signal one
another alone, and each is in every such call, in the same order: the claim holds for them by
themselves. Kernels of one core are calls of the first cores.

What must not share one, then, are calls over different sets of devices: other axes, and also
`axis_index_groups` or the pairs of a permutation, whose devices need nothing of the rest of S.
These take part by `WIDE`: a barrier among all of S, whatever devices exchange data after it.

    pattern                            waits for                          id
    ring, line, torus, fused, direct   its own peers                      of the set of axes
    index groups, ragged rings,        all of S, or all of it in the      of the set of axes
      permutations but shifts            same slice and within reach
    shifts (`partners`)                its target                         of the axis and the shift
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Interpret, Ref
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.topology import chips, placement, reach, ring_orders
from pallas_collectives.topology.groups import Group, Ring

# A barrier among all devices that a group's axes join, before the kernel; its own is left out.
WIDE = "wide"
# Where ids begin: of the TensorCore's kernels and of a SparseCore's, compiled and simulated.
# Interpret mode's are below 1 << 15, and its kernels count their own from 2000 on.
_FIRST = {False: (0, 1 << 29), True: (1 << 14, 3 << 13)}
# Int32 holds a bit for so many divisors, beside the kinds of barrier.
_MOST_DIVISORS = 26


def barrier_id(
    barrier: str, group: Group, interpret: Interpret, on_sparsecore: bool = False
) -> int:
    """The collective id of a call.

    Args:
      barrier: "shift right" or "shift left" for the barriers of `partners`; all others share one.
      group: its axes count, in any order, and how they cut the mesh in scope into sets of devices.
      interpret: not False for simulated devices, whose interpreter has ids of its own.
      on_sparsecore: whether a SparseCore runs the kernel.
    """
    kind = {"shift right": 1, "shift left": 2}.get(barrier, 0)
    mesh = jax.sharding.get_abstract_mesh().shape or dict(zip(group.axes, group.sizes, strict=True))
    return _FIRST[bool(interpret)][on_sparsecore] + 4 * _set_of_axes(group.axes, mesh) + kind


def _set_of_axes(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
    """A number for how axes cut a mesh's devices into sets: the same in whatever mesh of them.

    Written as a bit for each divisor of their number, in ascending order: 1 where the axes begin or
    end to be among `axes`, going from the minor axis to the major. On 8 devices, whose divisors are
    1, 2, 4 (8 tells nothing): both axes of 2 x 4 are 001, as the one axis of 8; the inner 101, the
    outer 100.
    """
    devices, stride, among, ends = math.prod(mesh.values()), 1, False, []
    for axis, size in reversed(tuple(mesh.items())):
        if size > 1:
            if (axis in axes) != among:
                ends.append(stride)
                among = not among
            stride *= size
    divisors = [d for d in range(1, devices) if devices % d == 0]
    if len(divisors) > _MOST_DIVISORS:  # as good as never two sets of a program have one hash
        return zlib.crc32(repr(ends).encode()) >> 32 - _MOST_DIVISORS
    return sum(1 << divisors.index(end) for end in ends)


def shift_of(perm: Sequence[tuple[int, int]], group: Group) -> str | None:
    """The barrier of `partners`: "shift right" or "shift left"; None for another permutation.

    Also where some devices send nothing, or keep what they have.
    """
    if group.index_groups is not None:
        return None
    shifts = {(target - source) % group.size for source, target in perm} - {0}
    if shifts <= {1}:
        return "shift right"
    return "shift left" if shifts == {group.size - 1} else None


@dataclasses.dataclass(frozen=True)
class Entry:
    """The entry barrier of a call, as the launcher runs it.

    Attributes:
      barrier: the call's own, for `sync.enter`.
      group: its devices.
      among: with `entry.WIDE`, or for index groups, the devices that take part whatever the call's
        own barrier is: all that the axes join, or all of each slice; else None.
      peers: where not all of `among` can signal one another: for each device those that it can, as
        `_reached` has them; else None.
    """

    barrier: str
    group: Group
    among: Group | None
    peers: np.ndarray | None

    @classmethod
    def of(cls, barrier: str, group: Group) -> "Entry":
        """That of a call which names a barrier."""
        if barrier != WIDE and group.index_groups is None:
            return cls(barrier, group, None, None)
        chip, slices, everyone = chips.current(), _slices(group), Group(group.axes, group.sizes)
        if reach.everywhere(chip) and len(slices) == 1:
            return cls(barrier, group, everyone, None)
        if reach.everywhere(chip) and len(set(map(len, slices))) == 1:
            among = dataclasses.replace(everyone, index_groups=slices)
            return cls(barrier, group, among, None)
        torus, rows = placement.lying(everyone, chip)
        peers = _reached(chip, torus, tuple(map(tuple, rows)), slices)
        return cls(barrier, group, everyone, peers)

    @property
    def table(self) -> list[jax.Array | np.ndarray]:
        """What goes to scalar memory: the own row of `peers`, or of slices; nothing if there are
        none.
        """
        if self.among is None:
            return []
        if self.peers is None:
            members = self.among.members()
            return [] if members is None else [members]
        me = lax.axis_index(self.group.axes)
        return [lax.dynamic_index_in_dim(jnp.asarray(self.peers), me, keepdims=False)]

    @property
    def semaphores(self) -> list[Any]:
        """What to allocate: the count of peers that have passed the barrier."""
        return [] if self.peers is None else [pltpu.SemaphoreType.REGULAR]

    def enter(
        self,
        rings: Sequence[Ring],
        scalar_refs: Sequence[Ref],
        table_refs: Sequence[Ref],
        semaphore_refs: Sequence[Ref],
        meanwhile: sync.Meanwhile = sync.nothing,
    ) -> None:
        """Returns when all devices that matter have entered the kernel; `meanwhile` as in sync."""
        if self.among is None:
            sync.enter(self.barrier, rings, scalar_refs, meanwhile)
        elif self.peers is None:
            table_ref = table_refs[0] if self.among.index_groups else None
            sync.barrier_with_everyone(Ring(self.among, table_ref), meanwhile=meanwhile)
        else:
            among, semaphore = Ring(self.among), pltpu.get_barrier_semaphore()
            sync.barrier_with(among, table_refs[0], semaphore, meanwhile=meanwhile)
            sync.signal_all(among, table_refs[0], semaphore_refs[0])

    def leave(self, table_refs: Sequence[Ref], semaphore_refs: Sequence[Ref]) -> None:
        """Returns when the kernel may end: all within reach have passed its barrier."""
        if self.peers is not None:
            pl.semaphore_wait(semaphore_refs[0], table_refs[0][0])


# The slice of each device of a group, as numbers over its axes; see `in_slices`.
SliceOf = Callable[[Group], np.ndarray]
_slice_of: contextvars.ContextVar[SliceOf | None] = contextvars.ContextVar("slices", default=None)


@contextlib.contextmanager
def in_slices(slice_of: SliceOf) -> Iterator[None]:
    """Within this context devices lie in several slices. Kernels stay within one each, and so do
    their barriers: no signal reaches another slice.
    """
    token = _slice_of.set(slice_of)
    try:
        yield
    finally:
        _slice_of.reset(token)


def _slices(group: Group) -> tuple[tuple[int, ...], ...]:
    """The numbers, over a group's axes, of the devices that each slice has."""
    slice_of = _slice_of.get()
    everyone = Group(group.axes, group.sizes)
    numbers = np.zeros(group.sizes, int) if slice_of is None else slice_of(everyone)
    members: dict[int, list[int]] = {}
    for device, number in enumerate(numbers.reshape(-1).tolist()):
        members.setdefault(number, []).append(device)
    return tuple(map(tuple, members.values()))


@functools.lru_cache(maxsize=64)
def _reached(
    chip: chips.Chip,
    torus: ring_orders.Torus,
    rows: tuple[tuple[ring_orders.Place, ...], ...],
    slices: tuple[tuple[int, ...], ...],
) -> np.ndarray:
    """For each device the number of those that it can signal, then theirs.

    Those of its slice within its reach; of groups side by side, those that are so in all.
    """
    found = {
        a: [b for b in members if b != a and reach.all_reach(chip, torus, rows, [(a, b)])]
        for members in slices
        for a in members
    }
    table = np.zeros((len(found), 1 + max(map(len, found.values()))), np.int32)
    for device, peers in found.items():
        table[device, : 1 + len(peers)] = (len(peers), *peers)
    return table
