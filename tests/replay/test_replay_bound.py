"""The least times that replays are held against: no schedule beats them."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from pallas_collectives.replay import Machine, bound
from pallas_collectives.replay.bound import _POWERS


def _rows(machine: Machine) -> np.ndarray:
    """Groups along the first torus axis."""
    return np.moveaxis(np.arange(machine.n_chips).reshape(machine.shape), 0, -1).reshape(
        -1, machine.shape[0]
    )


def _link(machine: Machine) -> float:
    return machine.generation.link_bandwidth * machine.generation.link_efficiency


@pytest.mark.parametrize(
    ("op", "shards"),
    [("all_gather", 15 / 2), ("reduce_scatter", 15 / 2), ("all_reduce", 15), ("all_to_all", 32)],
)
def test_bounds_on_a_ring(op: str, shards: float) -> None:
    machine = Machine.named("v5e:16x16")
    least = bound(op, machine, _rows(machine), 1e6)
    assert least.wire == pytest.approx(shards * 1e6 / _link(machine))


@pytest.mark.parametrize(("op", "shards"), [("all_gather", 3), ("all_to_all", 4)])
def test_bounds_on_a_line(op: str, shards: float) -> None:
    machine = Machine.named("v5e:4x4")
    assert bound(op, machine, _rows(machine), 1e6).wire == pytest.approx(
        shards * 1e6 / _link(machine)
    )


@pytest.mark.parametrize(("name", "share"), [("v5e:16x16", 15 / 16), ("v5e:8x8", 1)])
@pytest.mark.parametrize("direction", [1, -1])
def test_bounds_on_permutations(name: str, share: float, direction: int) -> None:
    """A shift by one: on a ring a part of it may go the long way round, the other way."""
    machine = Machine.named(name)
    n = machine.shape[0]
    shift = 1e6 * np.roll(np.eye(n), direction, axis=1)
    if not machine.wraps[0]:
        shift[0, -1] = shift[-1, 0] = 0
    least = bound("ppermute", machine, _rows(machine), shift)
    assert least.wire == pytest.approx(share * 1e6 / _link(machine))
    far = bound("ppermute", machine, _rows(machine), 1e6 * np.roll(np.eye(n), n // 2, axis=1))
    assert far.latency > least.latency


def test_bounds_on_ragged_exchanges() -> None:
    machine = Machine.named("v5e:16x16")
    n = 16
    even = bound("ragged_all_to_all", machine, _rows(machine), np.full((n, n), 1e6))
    assert even == bound("all_to_all", machine, _rows(machine), 1e6)
    to_one = np.zeros((n, n))
    to_one[:, 3] = 1e6
    # Both links of each ring that lead to that device carry what the other fifteen send.
    skewed = bound("ragged_all_to_all", machine, _rows(machine), to_one)
    assert skewed.wire == pytest.approx(15 / 2 * 1e6 / _link(machine))
    nothing = bound("ragged_all_to_all", machine, _rows(machine), np.zeros((n, n)))
    assert nothing.wire == 0


def test_bound_on_all_axes_of_a_torus_counts_all_links() -> None:
    machine = Machine.named("v5p:4x4x4")
    everyone = np.arange(64)[None]
    assert bound("all_gather", machine, everyone, 1e6).wire == pytest.approx(
        63e6 / (6 * _link(machine))
    )
    with pytest.raises(ValueError, match="gather_all"):
        bound("gather_all", machine, everyone, 1e6)


def test_latency_bound_counts_the_farthest_pair() -> None:
    machine = Machine.named("v5p:8x8x8")
    g = machine.generation
    rest = g.launch_cost + g.dma_latency
    least = bound("all_gather", machine, np.arange(512)[None], 0.0)
    # A signal over one hop to a relay there, then 12 hops; and the relay's DMA.
    assert least.latency == pytest.approx(rest + 13 * g.hop_latency + g.dma_latency)
    assert least.time == least.latency


def test_latency_bound_of_neighbours_and_of_a_chips_two_dies() -> None:
    pair = np.array([[0, 1]])
    for name, hops in (("v5p:2x2x2", 1.0), ("7x:1x1x1", 0.5)):
        machine = Machine.named(name)
        g = machine.generation
        least = bound("ppermute", machine, pair, np.array([[0, 1.0], [0, 0]])).latency
        assert least == pytest.approx(g.launch_cost + 2 * hops * g.hop_latency + g.dma_latency)


def test_dmas_of_v5e_go_by_powers_of_two() -> None:
    assert _POWERS[[1, 2, 3, 5, 7, 8, 11, 15]].tolist() == [1, 1, 2, 2, 2, 1, 3, 2]
    machine = Machine.named("v5e:16x16")
    g = machine.generation
    least = bound("all_gather", machine, _rows(machine), 0.0).latency
    # 8 hops in one DMA, or 7 in two (8 back by 1): the first signal goes one hop to a relay.
    assert least == pytest.approx(g.launch_cost + 9 * g.hop_latency + 2 * g.dma_latency)


def test_the_least_time_has_a_hop_before_and_a_hop_after_the_wire() -> None:
    machine = Machine.named("v5e:16x16")
    g, least = machine.generation, bound("all_gather", machine, _rows(machine), 1e6)
    around = g.launch_cost + 2 * g.hop_latency + g.dma_latency
    assert least.time == pytest.approx(around + least.wire)


# Against searches ---------------------------------------------------------------------------------
#
# Schedules of a gather send each shard along trees that set out from its owner; those of a
# reduction, along trees that end at one; an all-reduce has one of each for every element, with a
# root between them. Shares of the data may go along different trees: the least load of the busiest
# link is a linear program.

_SHAPES = {
    "line of 2": ("v5e:2", None),
    "line of 3": ("v5e:3", None),
    "line of 5": ("v5e:5", None),
    "ring of 3": ("v5e:3", (True, False)),
    "ring of 4": ("v5e:4", (True, False)),
    "ring of 6": ("v5e:6", (True, False)),
    "grid of 2x2": ("v5e:2x2", None),
    "grid of 2x3": ("v5e:2x3", None),
    "cylinder of 3x2": ("v5e:3x2", (True, False)),
}


def _links(machine: Machine) -> list[tuple[int, int]]:
    """Every directed link, as the chips at its ends."""
    found = []
    for here in np.ndindex(machine.shape):
        for axis, (n, wrap) in enumerate(zip(machine.shape, machine.wraps, strict=True)):
            for step in (1, -1):
                there = list(here)
                there[axis] += step
                if n > 1 and (wrap or 0 <= there[axis] < n):
                    there[axis] %= n
                    ends = (np.ravel_multi_index(p, machine.shape) for p in (here, tuple(there)))
                    found.append(tuple(int(end) for end in ends))
    return found


def _trees(links: list[tuple[int, int]], members: set[int]) -> list[list[tuple[int, int]]]:
    """The trees of links that join `members`, without a leaf that is no member; as edges a < b."""
    edges = sorted({(a, b) for a, b in links if a < b})
    nodes = {end for edge in edges for end in edge}
    found = []
    for count in range(len(members) - 1, len(nodes)):
        for chosen in itertools.combinations(edges, count):
            degree = {node: sum(node in edge for edge in chosen) for node in nodes}
            reached = {min(members)}
            for _ in chosen:
                reached |= {end for edge in chosen if reached & set(edge) for end in edge}
            used = {end for edge in chosen for end in edge}
            leaves = {node for node in used if degree[node] == 1}
            if members <= reached == used and len(used) == count + 1 and leaves <= members:
                found.append(list(chosen))
    return found


def _directed(tree: list[tuple[int, int]], root: int) -> list[tuple[int, int]]:
    """A tree's links, all leading away from a root that is on it."""
    out, at = [], {root}
    while len(out) < len(tree):
        for a, b in tree:
            for source, target in ((a, b), (b, a)):
                if source in at and target not in at:
                    out.append((source, target))
                    at.add(target)
    return out


def _uses(op: str, group: list[int], links: list) -> Iterator[tuple[tuple, list]]:
    """(what must be served, links that one way to serve it loads): shards, blocks, or halves of an
    all-reduce of the group's elements with some root."""
    trees = _trees(links, set(group))
    for root in range(1 + max(max(link) for link in links)):
        for tree in trees:
            if not any(root in edge for edge in tree):
                continue
            away = _directed(tree, root)
            back = [(b, a) for a, b in away]
            if op == "all_reduce":
                yield (root, "in"), back
                yield (root, "out"), away
            elif root in group:
                yield (root,), away if op == "all_gather" else back


def _least_of(loads: Any, equal: Any, wanted: Sequence[float]) -> float:
    """The least value of the last variable: no load is above 0, and what is sent is as wanted."""
    n = len(loads[0])
    done = linprog(np.eye(n)[-1], A_ub=loads, b_ub=np.zeros(len(loads)), A_eq=equal, b_eq=wanted)
    assert done.status == 0
    return float(done.fun)


def _least_load(op: str, machine: Machine, groups: list[list[int]]) -> float:
    """The busiest link's load in the best schedule, in shards or blocks."""
    links = _links(machine)
    ways = [
        ((g, *served), loaded)
        for g, group in enumerate(groups)
        for served, loaded in _uses(op, group, links)
    ]
    demands = sorted({served for served, _ in ways}, key=str)
    size = len(groups[0])
    # Variables: the share of each way, of each root of an all-reduce, and the load.
    roots = sorted({served[:2] for served, _ in ways}) if op == "all_reduce" else []
    n = len(ways) + len(roots) + 1
    equal, wanted = [], []
    for served in demands:
        row = np.zeros(n)
        row[[i for i, (d, _) in enumerate(ways) if d == served]] = 1
        if roots:
            row[len(ways) + roots.index(served[:2])] = -1
        equal.append(row)
        wanted.append(0.0 if roots else 1.0)
    for g in range(len(groups)) if roots else ():
        row = np.zeros(n)
        row[[len(ways) + i for i, root in enumerate(roots) if root[0] == g]] = 1
        equal.append(row)
        wanted.append(float(size))  # the operand, in blocks
    loads = []
    for link in links:
        row = np.zeros(n)
        row[[i for i, (_, loaded) in enumerate(ways) if link in loaded]] = 1
        row[-1] = -1
        loads.append(row)
    return _least_of(loads, equal, wanted)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("shape", _SHAPES)
def test_no_schedule_loads_links_less(shape: str, op: str) -> None:
    name, wraps = _SHAPES[shape]
    machine = Machine.named(name, wraps)
    everyone = np.arange(machine.n_chips)
    for groups in (everyone[None], everyone.reshape(machine.shape)):
        if groups.shape[1] == 1:
            continue
        least = bound(op, machine, groups, 1e6).wire * _link(machine) / 1e6
        best = _least_load(op, machine, groups.tolist())
        assert least <= best * (1 + 1e-6)
        if len(groups) == 1:  # the bound is what the best schedule needs
            assert least == pytest.approx(best)


def _least_exchange(machine: Machine, groups: list[list[int]], sent: np.ndarray) -> float:
    """The same where each position of a group sends another its own: what comes from a source flows
    to its targets along any ways, in any shares."""
    links, sources = _links(machine), [(group, i) for group in groups for i in range(len(sent))]
    n = len(sources) * len(links) + 1
    equal, wanted, loads = [], [], np.zeros((len(links), n))
    for k, (group, i) in enumerate(sources):
        first = k * len(links)
        loads[:, first : first + len(links)] = np.eye(len(links))
        comes = dict(zip(group, sent[i], strict=True))
        for chip in set(range(machine.n_chips)) - {group[i]}:
            row = np.zeros(n)
            for link, (source, target) in enumerate(links):
                row[first + link] = (target == chip) - (source == chip)
            equal.append(row)
            wanted.append(comes.get(chip, 0.0))
    loads[:, -1] = -1
    return _least_of(loads, equal, wanted)


@pytest.mark.parametrize("op", ["all_to_all", "ragged_all_to_all", "ppermute"])
@pytest.mark.parametrize("shape", _SHAPES)
def test_no_exchange_loads_links_less(shape: str, op: str) -> None:
    name, wraps = _SHAPES[shape]
    machine = Machine.named(name, wraps)
    everyone = np.arange(machine.n_chips)
    for groups in (everyone[None], everyone.reshape(machine.shape)):
        if (n := groups.shape[1]) == 1:
            continue
        sent = {
            "all_to_all": np.ones((n, n)),
            "ragged_all_to_all": np.random.default_rng(n).integers(0, 4, (n, n)).astype(float),
            "ppermute": np.roll(np.eye(n), 1, axis=1),
        }[op]
        shard = 1e6 if op == "all_to_all" else 1e6 * sent
        least = bound(op, machine, groups, shard).wire * _link(machine) / 1e6
        best = _least_exchange(machine, groups.tolist(), sent)
        assert least <= best * (1 + 1e-6)
        if len(groups) == 1 and op == "all_to_all":
            assert least == pytest.approx(best)  # on so few chips, what the best schedule needs


@pytest.mark.parametrize(
    "n, links",
    [
        (2, "line"),
        (3, "line"),
        (3, "ring"),
        (4, "line"),
        (4, "ring"),
    ],
)
def test_no_order_of_transfers_sums_with_fewer(n: int, links: str) -> None:
    """All orders of single transfers of one element, of any sum that a device can make."""
    ends = [
        (a, b)
        for a in range(n)
        for b in range(n)
        if abs(a - b) in (1, n - 1)[: 1 + (links == "ring")]
    ]
    start = tuple(frozenset({1 << device}) for device in range(n))
    assert _transfers(start, ends, (1 << n) - 1) == 2 * (n - 1)


def _transfers(start: tuple, ends: list[tuple[int, int]], full: int) -> int:
    """The fewest transfers after which every device has the sum of all terms (bits of `full`)."""
    states, count = {start}, 0
    while not any(all(full in sums for sums in state) for state in states):
        states = {
            (*state[:b], _closed(state[b] | {sent}), *state[b + 1 :])
            for state in states
            for a, b in ends
            for sent in state[a] - state[b]
        }
        count += 1
    return count


def _closed(sums: frozenset[int]) -> frozenset[int]:
    """With all sums of disjoint ones."""
    while more := {a | b for a in sums for b in sums if not a & b} - sums:
        sums |= more
    return sums


def _first_arrivals(machine: Machine) -> np.ndarray:
    """Seconds from each chip until something of its own can be at each other, by any relays.

    A copy starts when its source has what it sends, and has heard, hop by hop, that its target has
    entered; on v5e it goes along one axis, over a power of two of chips.
    """
    g, n = machine.generation, machine.n_chips
    here, there = np.divmod(np.arange(n * n), n)
    hops = machine.distance(here, there).reshape(n, n)
    at = np.stack(np.unravel_index(np.arange(n), machine.shape))
    apart = abs(at[:, :, None] - at[:, None, :])  # (axes, source, target)
    sizes, wraps = np.array(machine.shape)[:, None, None], np.array(machine.wraps)[:, None, None]
    jumps = [apart, np.where(wraps, sizes - apart, 0)]
    powers = sum((jump > 0) & (jump & (jump - 1) == 0) for jump in jumps) > 0
    joined = ((apart > 0).sum(axis=0) == 1) & powers.any(axis=0)
    if g.reaches_all:
        joined = hops > 0
    copy = np.where(joined, g.dma_latency + hops * g.hop_latency, np.inf)
    heard = hops * g.hop_latency
    first = np.where(np.eye(n, dtype=bool), 0.0, np.inf)
    while True:
        through = np.maximum(first[:, :, None], heard[None]) + copy[None]
        sooner = np.minimum(first, through.min(axis=1))
        if (sooner == first).all():
            return first
        first = sooner


_FAR = [*_SHAPES.values(), *((name, None) for name in ("v5e:16", "v5e:7", "v5e:4x4", "v5p:4x4x4"))]


@pytest.mark.parametrize("name, wraps", _FAR)
@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "all_to_all"])
def test_no_chain_of_copies_joins_the_farthest_sooner(
    op: str, name: str, wraps: tuple[bool, ...] | None
) -> None:
    machine = Machine.named(name, wraps)
    for groups in (np.arange(machine.n_chips)[None], _rows(machine)):
        if groups.shape[1] == 1:
            continue
        least = bound(op, machine, groups, 0.0).latency - machine.generation.launch_cost
        first = _first_arrivals(machine)[np.ix_(groups[0], groups[0])].max()
        assert 0.8 * first <= least <= first * (1 + 1e-9)
