"""The least time of a collective on a machine: a time that no schedule beats.

Wire. What the busiest link must carry, from two arguments; the larger counts.

Cuts. A slab of the torus (an interval of one torus axis, all of the others), a chip, or one of its
dies has k members of a group inside and m outside. Where devices differ in what they send, boxes
count too: one chip or two neighbours of some axes, all of the others. What must cross, divided by
what the cut's links carry:

    all_gather      m shards come in          each outside shard, at least once
    reduce_scatter  max(k, m) blocks          k sums come in for those inside, m go out
    all_reduce      the operand, each way     each side needs the other's sum of every element
    all_to_all      k·m blocks come in
    ppermute, ragged_all_to_all               what those outside send to those inside, or get

Transfers. Devices with equal positions along some torus axes count as one place, and a group lies
on q places. Each transfer between places loads one link of those axes, and they share the load at
best evenly:

    all_gather      q-1 transfers of each shard        the other places have it from somewhere
    reduce_scatter  q-1 of each block                  every other place's term sets out once
    all_reduce      2(q-1) of each element             see below

An all_reduce needs 2(q-1) transfers: look at the first place to know an element's sum. Each of
the other q-1 has sent something on which that sum rests. Each of them then still has to receive
what completes its own, and no transfer does both. (Patarasuk and Yuan, 2009, for rings.)

Where each device sends others something of their own, links are also weighed: all that lead one way
along a torus axis by 1, those that lead back by w, the others by nothing. What goes from one place
to another adds to the loads of links, so weighed, no less than it does on the lightest way; and
they carry no more, so weighed, than their bandwidths. With w = 1 that counts hops; with w = 1/(n-1)
it is the bound of a ring shift: on 16, one sixteenth could go the long way round.

Latency. Before a device writes to another it must have heard that the other has entered the
kernel. So the greatest distance D in a group takes 2 D hops and one DMA, or D + 1 hops with a relay
and one DMA more; on v5e as many DMAs as D has powers of two.

Time. No link carries data before one hop (that signal) and a DMA's latency have passed, and its
last byte lands a hop after it was sent. So the time is at least

    launch + hop + DMA + wire + hop        and        launch + latency

whichever is more. The two are not added: hops may pass while other bytes are on the wire.
`tests/replay/test_replay_bound.py` searches schedules on machines of 2 to 6 chips and finds none
quicker.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from pallas_collectives.catalogue import COLLECTIVES
from pallas_collectives.replay.machine import Machine


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a collective takes at least, in seconds.

    Attributes:
      wire: transmission on the busiest link.
      latency: signals, hops and DMAs of the farthest pair, with the launch.
      time: the whole call, by either.
    """

    wire: float
    latency: float
    time: float


def bound(op: str, machine: Machine, groups: np.ndarray, shard_bytes: float | np.ndarray) -> Bound:
    """The bound of `op` over `groups` (an array of device numbers, one row a group, all at the same
    time).

    `shard_bytes`: the smaller of each device's input and output: all_gather's input,
    reduce_scatter's output; for all_to_all and all_reduce one n-th of the input. For ppermute and
    ragged_all_to_all an (n, n) array: what each position of a group sends to each. Raises
    ValueError for an unknown op.

    Example:
      >>> ring = pc.replay.Machine.named("v5e:16")
      >>> least = pc.replay.bound("all_gather", ring, np.arange(16)[None], 4 << 20)
      >>> f"{1e6 * least.time:.0f} us"
      '739 us'
    """
    if op not in COLLECTIVES:
        raise ValueError(f"op {op!r}: bounds are known for {', '.join(COLLECTIVES)}")
    g, n = machine.generation, groups.shape[1]
    sent = np.broadcast_to(shard_bytes, (n, n)) * (1 - np.eye(n))
    if phases := COLLECTIVES[op].phases:
        size, meet = float(shard_bytes), np.ones((n, n))
        shared, transferred = (
            least(phases, machine, groups, size) for least in (_shared, _transferred)
        )
        wire = max(shared, transferred)
    else:
        meet = sent if np.ndim(shard_bytes) else np.ones((n, n))
        wire = max(_sent_across(machine, groups, sent), _sent_along(machine, groups, sent))
    latency = g.launch_cost + _farthest(machine, groups, meet * (1 - np.eye(n)))
    first_and_last = 2 * g.hop_latency + g.dma_latency
    return Bound(
        wire, latency, max(latency, g.launch_cost + first_and_last + wire if wire else 0.0)
    )


def _farthest(machine: Machine, groups: np.ndarray, meet: np.ndarray) -> float:
    """Seconds until the slowest of the pairs that `meet` in the first group can have done so."""
    g = machine.generation
    pairs = np.argwhere(meet)
    pairs = pairs[:: max(1, len(pairs) // 4096)]
    if not len(pairs):
        return 0.0
    sources, targets = groups[0][pairs].T
    hops = machine.distance(sources, targets)
    dmas = np.ones(len(pairs)) if g.reaches_all else _dmas(machine, sources, targets)
    # A relay may be the other die of the chip, half a hop away.
    nearest = np.minimum(hops, 0.5 if g.devices_per_chip > 1 else 1.0)
    relayed = (nearest + hops) * g.hop_latency + np.maximum(2, dmas) * g.dma_latency
    straight = 2 * hops * g.hop_latency + g.dma_latency
    return float(np.where(dmas > 1, relayed, np.minimum(straight, relayed)).max())


def _dmas(machine: Machine, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The fewest DMAs from each source to its target, along one axis each, by powers of two."""
    per_chip = machine.generation.devices_per_chip
    here, there = (np.unravel_index(ends // per_chip, machine.shape) for ends in (sources, targets))
    total = np.zeros(len(sources))
    for a, b, n, wrap in zip(here, there, machine.shape, machine.wraps, strict=True):
        apart = abs(a - b)
        total += np.minimum(_POWERS[apart], _POWERS[n - apart] if wrap else np.inf)
    return total


# How many powers of two, added or taken away, make up each number: the ones of n XOR 3n.
_POWERS = np.array([(n ^ 3 * n).bit_count() for n in range(1025)], dtype=float)


def _link(machine: Machine) -> float:
    return machine.generation.link_bandwidth * machine.generation.link_efficiency


_SHORT = 2  # chips that boxes are wide, at the most, where they do not span all of an axis
Phases = tuple[str, ...]  # of "scatter" and "gather"


def _shared(phases: Phases, machine: Machine, groups: np.ndarray, shard_bytes: float) -> float:
    """The most that a cut's links carry, in seconds, where what is sent is for many."""
    worst, n = 0.0, groups.shape[1]
    for inside, links in _cuts(machine):
        k = inside[groups].sum(axis=1)
        m = n - k
        crossing = {
            ("gather",): (k > 0) * m,
            ("scatter",): (k > 0) * (m > 0) * np.maximum(k, m),
            ("scatter", "gather"): (k > 0) * (m > 0) * n,
        }[phases]
        worst = max(worst, float(crossing.sum()) * shard_bytes / (links * _link(machine)))
    return worst


def _transferred(phases: Phases, machine: Machine, groups: np.ndarray, shard_bytes: float) -> float:
    """The least load of links that share all transfers evenly, in seconds."""
    at = np.unravel_index(groups // machine.generation.devices_per_chip, machine.shape)
    links = [
        2 * (machine.n_chips if wrap else machine.n_chips * (n - 1) // n)
        for n, wrap in zip(machine.shape, machine.wraps, strict=True)
    ]
    long = [axis for axis, n in enumerate(machine.shape) if n > 1]
    worst = 0.0
    for count in range(1, len(long) + 1):
        for axes in itertools.combinations(long, count):
            place = np.ravel_multi_index(
                [at[axis] for axis in axes], [machine.shape[axis] for axis in axes]
            )
            ordered = np.sort(place, axis=1)
            others = (ordered[:, 1:] != ordered[:, :-1]).sum()  # q - 1, of all groups
            carried = float(others) * len(phases) * groups.shape[1] * shard_bytes
            worst = max(worst, carried / (sum(links[axis] for axis in axes) * _link(machine)))
    return worst


def _sent_across(machine: Machine, groups: np.ndarray, sent: np.ndarray) -> float:
    """The most that a cut's links carry, in seconds, of what each position sends to each."""
    worst = 0.0
    for inside, links in _boxes(machine):
        here = inside[groups].astype(float)
        into, out = (1 - here) @ sent, here @ sent
        crossing = max((into * here).sum(), (out * (1 - here)).sum())
        worst = max(worst, float(crossing) / (links * _link(machine)))
    return worst


def _sent_along(machine: Machine, groups: np.ndarray, sent: np.ndarray) -> float:
    """The same from links weighed by their direction along one torus axis."""
    worst = 0.0
    at = np.unravel_index(groups // machine.generation.devices_per_chip, machine.shape)
    for place, n, wrap in zip(at, machine.shape, machine.wraps, strict=True):
        if n == 1:
            continue
        links = machine.n_chips if wrap else machine.n_chips * (n - 1) // n
        steps = place[:, None, :] - place[:, :, None]
        for ahead, back in itertools.product((steps, -steps), (1.0, 1 / (n - 1))):
            if wrap:
                lightest = np.minimum(ahead % n, back * (-ahead % n))
            else:
                lightest = np.where(ahead > 0, ahead, -back * ahead)
            load = float((lightest * sent).sum())
            worst = max(worst, load / (links * (1 + back) * _link(machine)))
    return worst


def _cuts(machine: Machine) -> Iterator[tuple[np.ndarray, float]]:
    """(which devices are inside, links that lead in) of slabs, of single chips and of their dies.

    All devices do alike: of slabs round a torus axis that differ only in where they begin, one will
    do, and of chips one at an end and one that is not.
    """
    chips = np.arange(machine.n_chips)
    coordinates = np.unravel_index(chips, machine.shape)
    for axis, (n, wrap) in enumerate(zip(machine.shape, machine.wraps, strict=True)):
        for start, length in itertools.product(range(1 if wrap else n), range(1, n)):
            if start + length <= n:
                inside = (coordinates[axis] >= start) & (coordinates[axis] < start + length)
                links = _sides(start, length, n, wrap) * machine.n_chips // n
                yield np.repeat(inside, machine.generation.devices_per_chip), links
    # A corner and, where there is one, an inner chip.
    for chip in {0, machine.n_chips // 2}:
        if links := _links_of(machine, chip):
            yield np.repeat(chips == chip, machine.generation.devices_per_chip), links
        yield from _dies(machine, chip)


def _sides(start: int, length: int, n: int, wrap: bool) -> int:
    """By how many sides an interval of a torus axis can be entered."""
    return 2 if wrap else int(start > 0) + int(start + length < n)


def _links_of(machine: Machine, chip: int) -> int:
    """By how many links of the torus a chip can be entered."""
    axes = zip(np.unravel_index(chip, machine.shape), machine.shape, machine.wraps, strict=True)
    return sum(_sides(int(start), 1, n, wrap) for start, n, wrap in axes if n > 1)


def _dies(machine: Machine, chip: int) -> Iterator[tuple[np.ndarray, float]]:
    """As `_cuts`, of each die of a chip: the other one's link leads in, and all of the chip's."""
    per_chip = machine.generation.devices_per_chip
    if per_chip > 1:
        links = _links_of(machine, chip) + machine.generation.die_bandwidth / _link(machine)
        for device in range(chip * per_chip, (chip + 1) * per_chip):
            yield np.arange(machine.n_devices) == device, links


def _boxes(machine: Machine) -> Iterator[tuple[np.ndarray, float]]:
    """(which devices are inside, links that lead in) where devices differ in what they send.

    Of slabs, of boxes of one chip or two along some axes and all of others, and of chips' dies.
    """
    coordinates = np.unravel_index(np.arange(machine.n_chips), machine.shape)
    intervals = []
    for place, n, wrap in zip(coordinates, machine.shape, machine.wraps, strict=True):
        found = [(place >= 0, n, 0)]
        for start, length in itertools.product(range(n), range(1, n)):
            if wrap or start + length <= n:
                inside = (place - start) % n < length
                found.append((inside, length, _sides(start, length, n, wrap)))
        intervals.append(found)
    for box in itertools.product(*intervals):
        cut = [length for _, length, sides in box if sides]
        if len(cut) == 1 or (cut and max(cut) <= _SHORT):
            inside = np.all([inside for inside, *_ in box], axis=0)
            links = sum(sides * inside.sum() / length for _, length, sides in box)
            yield np.repeat(inside, machine.generation.devices_per_chip), links
    for chip in range(machine.n_chips):
        yield from _dies(machine, chip)
