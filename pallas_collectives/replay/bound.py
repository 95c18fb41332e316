"""What no kernel can beat: the least time of a collective on a machine, from cuts of its torus and
from distance.

Bytes: for each slab of the torus (an interval of one torus axis, all of the others) and each single
chip, what must come in from outside divided by what its links carry. For every group with k members
inside and m outside:

    all_gather      m shards               each outside shard comes in at least once
    reduce_scatter  k blocks               each inside member needs what the outside adds to its own
                    m blocks going out     and the other way round
    all_to_all      k·m blocks
    all_reduce      both, added up         2(n-1)/n of the array (Patarasuk and Yuan, 2009)

Latency: one hop for the barrier without which no device may write to another, then the greatest
distance in a group, and a DMA's own latency: once where a DMA may go to any device, at every hop
where it reaches only so far (v5e).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from pallas_collectives.replay.machine import Machine

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclasses.dataclass(frozen=True)
class Bound:
    """A collective's least time in seconds: on the wire, and in latency."""

    wire: float
    latency: float

    @property
    def time(self) -> float:
        return self.wire + self.latency


def bound(op: str, machine: Machine, groups: np.ndarray, shard_bytes: float) -> Bound:
    """The bound of `op` over `groups` (an array of device numbers, one row a group, all at the same
    time).

    `shard_bytes`: the smaller of each device's input and output: all_gather's input,
    reduce_scatter's output; for all_to_all and all_reduce one n-th of the input. Raises ValueError
    for an unknown op.
    """
    if op not in OPS:
        raise ValueError(f"op {op!r}: bounds are known for {', '.join(OPS)}")
    parts = ("reduce_scatter", "all_gather") if op == "all_reduce" else (op,)
    wire = sum(_wire(part, machine, groups, shard_bytes) for part in parts)
    g = machine.generation
    n = groups.shape[1]
    pairs = np.array(list(itertools.combinations(range(n), 2)))
    pairs = pairs[:: max(1, len(pairs) // 4096)]
    hops = machine.distance(groups[0][pairs[:, 0]], groups[0][pairs[:, 1]]).max() if n > 1 else 0.0
    dmas = 1 if g.reaches_all else hops
    latency = (
        g.launch_cost + g.hop_latency + len(parts) * (hops * g.hop_latency + dmas * g.dma_latency)
    )
    return Bound(wire, latency)


def _wire(op: str, machine: Machine, groups: np.ndarray, shard_bytes: float) -> float:
    g = machine.generation
    link = g.link_bandwidth * g.link_efficiency
    worst = 0.0
    n = groups.shape[1]
    for inside, links in _cuts(machine):
        if not links:
            continue
        k = inside[groups].sum(axis=1)
        m = n - k
        crossing = {
            "all_gather": (k > 0) * m,
            "reduce_scatter": (k > 0) * (m > 0) * np.maximum(k, m),
            "all_to_all": k * m,
        }
        worst = max(worst, float(crossing[op].sum()) * shard_bytes / (links * link))
    return worst


def _cuts(machine: Machine) -> Iterator[tuple[np.ndarray, int]]:
    """(which devices are inside, links that lead in) of slabs and of single chips."""
    chips = np.arange(machine.n_chips)
    coordinates = np.unravel_index(chips, machine.shape)
    per_chip = machine.generation.devices_per_chip
    for axis, (n, wrap) in enumerate(zip(machine.shape, machine.wraps, strict=True)):
        section = machine.n_chips // n
        for length in range(1, n):
            for start in range(1 if wrap else n - length + 1):
                inside = (coordinates[axis] >= start) & (coordinates[axis] < start + length)
                sides = 2 if wrap else int(start > 0) + int(start + length < n)
                yield np.repeat(inside, per_chip), sides * section
    for chip in {0, machine.n_chips // 2}:  # a corner and, where there is one, an inner chip
        here = np.unravel_index(chip, machine.shape)
        links = sum(
            2 if wrap else int(c > 0) + int(c < n - 1)
            for c, n, wrap in zip(here, machine.shape, machine.wraps, strict=True)
            if n > 1
        )
        yield np.repeat(chips == chip, per_chip), links
