"""Which box of a sharded array goes from which device to which: pure arithmetic.

A box is a rectangular part of the global array, ((start, stop), ...) over its dimensions. The plan
is a function of the shape and the two shardings alone, so every process computes the same one.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

D = TypeVar("D", bound=Hashable)
Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Piece(Generic[D]):
    """One box that device `target` needs and gets from device `source`, which may be itself."""

    source: D
    target: D
    box: Box


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of an index as `Sharding.devices_indices_map` gives it."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def size(box: Box) -> int:
    """The number of elements in a box."""
    elements = 1
    for start, stop in box:
        elements *= max(0, stop - start)
    return elements


def overlap(a: Box, b: Box) -> Box | None:
    """The box in both, or None where they share no element."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if size(both) else None


def within(box: Box, outer: Box) -> Box:
    """`box` counted from the first element of `outer`, which contains it."""
    return tuple((start - o, stop - o) for (start, stop), (o, _) in zip(box, outer, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def plan(sources: Mapping[D, Box], targets: Mapping[D, Box]) -> list[Piece[D]]:
    """The pieces that bring every target its box, each element of it exactly once.

    sources, targets: the box that each device has, and that each needs. Where several devices hold
    a source box, a target that holds it itself copies it; otherwise the holder that has the least
    to send so far sends it, so that replicas share the work.
    """
    holders: dict[Box, list[D]] = {}
    for device, box in sources.items():
        holders.setdefault(box, []).append(device)
    load = dict.fromkeys(sources, 0)
    pieces = []
    for target, needed in targets.items():
        for box, devices in holders.items():
            part = overlap(box, needed)
            if part is None:
                continue
            if target in devices:
                source = target
            else:
                source = min(devices, key=load.__getitem__)
                load[source] += size(part)
            pieces.append(Piece(source, target, part))
    return pieces
