"""What kernels are held against: bytes on the busiest link of the best algorithm, plus hops.

Its two terms, below, are each the least that is possible; their sum is the time of an algorithm
that is best in both and has the one after the other. Hops on which other bytes are already under
way cost nothing more: a kernel may pass the sum by some of them, but neither term alone.

Bytes: for each slab of the torus (an interval of one torus axis, all of the others) and each single
chip, what must come in from outside divided by what its links carry. For every group with k members
inside and m outside:

    all_gather      m shards               each outside shard comes in at least once
    reduce_scatter  k blocks               each inside member needs what the outside adds to its own
                    m blocks going out     and the other way round
    all_to_all      k·m blocks
    all_reduce      both, added up         2(n-1)/n of the array (Patarasuk and Yuan, 2009)
    ppermute, ragged_all_to_all            what those outside send to those inside

Where each device sends others something of their own, links are also weighed: all that lead one way
along a torus axis by 1, those that lead back by w, the others by nothing. What goes from one place
to another adds to the loads of links, so weighed, no less than it does on the lightest way; and
they carry no more, so weighed, than their bandwidths. With w = 1 that counts hops; with w = 1/(n-1)
it is the bound of a ring shift, of which a sixteenth part could go the long way round 16.

Latency: one hop for the barrier without which no device may write to another, then the greatest
distance in a group, and a DMA's own latency: once where a DMA may go to any device, at every hop
where it reaches only so far (v5e).
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
    """A collective's least seconds on the wire, its least in latency, and `time`, both."""

    wire: float
    latency: float

    @property
    def time(self) -> float:
        return self.wire + self.latency


def bound(op: str, machine: Machine, groups: np.ndarray, shard_bytes: float | np.ndarray) -> Bound:
    """The bound of `op` over `groups` (an array of device numbers, one row a group, all at the same
    time).

    `shard_bytes`: the smaller of each device's input and output: all_gather's input,
    reduce_scatter's output; for all_to_all and all_reduce one n-th of the input. For ppermute and
    ragged_all_to_all an (n, n) array: what each position of a group sends to each. Raises
    ValueError for an unknown op.
    """
    if op not in COLLECTIVES:
        raise ValueError(f"op {op!r}: bounds are known for {', '.join(COLLECTIVES)}")
    g, n = machine.generation, groups.shape[1]
    sent = np.broadcast_to(shard_bytes, (n, n)) * (1 - np.eye(n))
    parts = COLLECTIVES[op].phases
    if parts:
        wire = sum(_shared(part, machine, groups, float(shard_bytes)) for part in parts)
        meet = np.ones((n, n))
    else:
        parts, meet = (op,), sent if np.ndim(shard_bytes) else np.ones((n, n))
        wire = max(_sent_across(machine, groups, sent), _sent_along(machine, groups, sent))
    pairs = np.argwhere(meet * (1 - np.eye(n)))
    pairs = pairs[:: max(1, len(pairs) // 4096)]
    ends = groups[0][pairs]
    hops = machine.distance(ends[:, 0], ends[:, 1]).max() if len(pairs) else 0.0
    dmas = 1 if g.reaches_all else hops
    latency = (
        g.launch_cost + g.hop_latency + len(parts) * (hops * g.hop_latency + dmas * g.dma_latency)
    )
    return Bound(wire, latency)


def _link(machine: Machine) -> float:
    return machine.generation.link_bandwidth * machine.generation.link_efficiency


def _shared(phase: str, machine: Machine, groups: np.ndarray, shard_bytes: float) -> float:
    """The most that a cut's links carry, in seconds, where what is sent is for many."""
    worst = 0.0
    for inside, links in _cuts(machine):
        k = inside[groups].sum(axis=1)
        m = groups.shape[1] - k
        # A reduction goes in for the k members inside, and out for the m others.
        crossing = (k > 0) * (m if phase == "gather" else (m > 0) * np.maximum(k, m))
        worst = max(worst, float(crossing.sum()) * shard_bytes / (links * _link(machine)))
    return worst


def _sent_across(machine: Machine, groups: np.ndarray, sent: np.ndarray) -> float:
    """The most that a cut's links carry, in seconds, of what each position sends to each."""
    worst = 0.0
    for inside, links in _cuts(machine, alike=False):
        here = inside[groups].astype(float)
        crossing = np.einsum("gi,ij,gj->", 1 - here, sent, here, optimize=True)
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


def _cuts(machine: Machine, *, alike: bool = True) -> Iterator[tuple[np.ndarray, int]]:
    """(which devices are inside, links that lead in) of slabs and of single chips.

    Where all devices do `alike`, of slabs round a torus axis that differ only in where they begin,
    one will do.
    """
    chips = np.arange(machine.n_chips)
    coordinates = np.unravel_index(chips, machine.shape)
    per_chip = machine.generation.devices_per_chip
    for axis, (n, wrap) in enumerate(zip(machine.shape, machine.wraps, strict=True)):
        section = machine.n_chips // n
        for length in range(1, n):
            for start in range((1 if alike else n) if wrap else n - length + 1):
                inside = (coordinates[axis] - start) % n < length
                sides = 2 if wrap else int(start > 0) + int(start + length < n)
                yield np.repeat(inside, per_chip), sides * section
    for chip in {0, machine.n_chips // 2}:  # a corner and, where there is one, an inner chip
        here = np.unravel_index(chip, machine.shape)
        links = sum(
            2 if wrap else int(c > 0) + int(c < n - 1)
            for c, n, wrap in zip(here, machine.shape, machine.wraps, strict=True)
            if n > 1
        )
        if links:
            yield np.repeat(chips == chip, per_chip), links
