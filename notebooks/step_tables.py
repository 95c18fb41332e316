"""Step tables of kernels' docstrings, made from the schedules that the kernels run.

Notebooks print them, and tests compare them with the docstrings.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from pallas_collectives.kernels import all_reduce_line as line_kernel
from pallas_collectives.kernels.machinery import relay
from pallas_collectives.kernels.torus import shares
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import LEFT, RIGHT, Stream


def all_gather(n: int, streams: tuple[Stream, ...]) -> str:
    """Which blocks each device of a ring holds after every step, as printed in `all_gather`."""
    whole = frozenset(range(streams[0].chunks))
    held = [[whole if b == device else frozenset() for b in range(n)] for device in range(n)]
    lines = [_table_line(0, held, whole)]
    for step in range(max(stream.hops for stream in streams)):
        before = [row.copy() for row in held]
        for stream in streams:
            moving = {chunk for chunk in whole if step < stream.hops_of(chunk)}
            for device in range(n):
                block = groups.wrap(device - stream.direction * step, n)
                assert moving <= before[device][block], "a device sends on what it does not hold"
                held[groups.wrap(device + stream.direction, n)][block] |= moving
        lines.append(_table_line(step + 1, held, whole))
    return "\n".join(lines)


def all_gather_line(n: int) -> str:
    """`all_gather` of a line: what is not there cannot be passed on."""
    lines = []
    for step in range(n):
        rows = ([b if abs(b - device) <= step else "." for b in range(n)] for device in range(n))
        lines.append(f"{step:<6}" + "  ".join(f"[{''.join(map(str, row))}]" for row in rows))
    return "\n".join(lines)


def reduce_scatter(n: int, streams: tuple[Stream, ...]) -> str:
    """How many terms the sums under way to each device hold, as printed in `reduce_scatter`.

    Columns are devices; a digit for each chunk of a device's own block: from 1, its own, to n.
    """
    terms = [1] * streams[0].chunks
    lines = []
    for step in range(max(stream.hops for stream in streams) + 1):
        lines.append(f"{step:<6}" + "  ".join([f"[{''.join(map(str, terms))}]"] * n))
        for stream in streams:
            for chunk in range(stream.chunks):
                terms[chunk] += bool(step < stream.hops_of(chunk))  # one more term on its way
    return "\n".join(lines)


def _table_line(step: int, held: list[list[Any]], whole: Any) -> str:
    rows = ("".join(str(b) if h == whole else "." for b, h in enumerate(row)) for row in held)
    return f"{step:<6}" + "  ".join(f"[{row}]" for row in rows)


def all_reduce(n: int, streams: tuple[Stream, ...]) -> str:
    """The terms in the sums under way, then the blocks of the sum present; as in `all_reduce`."""
    reduced = reduce_scatter(n, streams).splitlines()
    gathered = all_gather(n, streams).splitlines()[1:]
    steps = (line.split()[1:] for line in (*reduced, *gathered))
    return _lines(((str(step), cells) for step, cells in enumerate(steps)), first=6, width=n + 4)


def all_reduce_line(n: int) -> str:
    """The terms in the sum of one chunk that each device holds; as in `all_reduce_line`."""
    middle = n // 2
    held = [{place} for place in range(n)]
    rows = []
    for step in range(2 * middle + 1):
        before = [set(terms) for terms in held]
        for place in range(n):
            adds, ends = line_kernel.steps(place, n)
            sides = [s for s in (LEFT, RIGHT) if s * (place - middle) >= 0 and 0 <= place + s < n]
            if step == adds:
                held[place].update(*(before[place + side] for side in sides))
            if step == ends and place != middle:
                held[place] = before[place + (RIGHT if place < middle else LEFT)]
        cells = ("".join(str(d) if d in terms else "." for d in range(n)) for terms in held)
        rows.append((str(step), [f"[{cell}]" for cell in cells]))
    return _lines(rows, first=6, width=n + 4)


def exchange_directly(n: int) -> str:
    """Whom each device sends to, in the order in which it does; as in `all_to_all`."""
    return _lines(
        (
            (str(k), [f"{device}>{groups.wrap(device + k, n)}" for device in range(n)])
            for k in range(1, n)
        ),
        first=5,
        width=11,
    )


def exchange_round_a_ring(n: int) -> str:
    """What each device of an odd ring passes to its right in each hop; as in `all_to_all`."""
    farthest = (n - 1) // 2
    passed: dict[int, list[list[str]]] = {}

    def move(
        _: Any, number: Any, hop: Any, distance: Any, counts: Any, first: bool, last: bool
    ) -> Any:
        row = passed.setdefault(int(hop), [[] for _ in range(n)])
        for device in range(n):
            sender = groups.wrap(device - (int(hop) - 1), n)
            row[device].append(f"{sender}>{groups.wrap(sender + int(distance), n)}")
        return counts

    with jax.disable_jit():
        schedule = relay.Schedule((RIGHT, LEFT), 1, farthest, width=farthest)
        relay.for_each_move([schedule], np.int32(1), move, [np.int32(0)])
    rows = ((str(hop), [" ".join(cell) for cell in row]) for hop, row in passed.items())
    return _lines(rows, first=5, width=3 + 4 * farthest)


def permute(n: int, pairs: Sequence[tuple[int, int]]) -> str:
    """Who waits for whom, who sends to whom, and whose array each ends with; as in `ppermute`."""
    to, source_of = dict(pairs), {target: source for source, target in pairs}
    rows: dict[str, list[str]] = {"ready": [], "copy": [], "result": []}
    for device in range(n):
        source = source_of.get(device)
        waits = source is not None and source != device
        rows["ready"].append(f"{device}>{source}" if waits else ".")
        rows["copy"].append(f"{device}>{to[device]}" if device in to else ".")
        rows["result"].append("0" if source is None else f"[{source}]")
    return _lines(rows.items(), first=8, width=8)


def torus(plan: shares.Shares) -> str:
    """Which way each stream of a gather goes, as `shares` prints it."""
    phases = range(len(plan.sizes))
    lines = ["stream  part  " + "  ".join(f"phase {phase}   " for phase in phases)]
    for bundle in plan.bundles:
        for stream in range(bundle.streams):
            hops = (
                f"{'xyz'[bundle.order[p]]} {_hops(plan, plan.sizes[bundle.order[p]], stream)} x "
                f"{math.prod(plan.sizes[axis] for axis in bundle.order[:p])}"
                for p in phases
            )
            part = Fraction(bundle.size, plan.block[plan.cut])
            lines.append(f"{len(lines) - 1:<8}{part!s:<6}" + "  ".join(hops))
    return "\n".join(line.rstrip() for line in lines)


def _hops(plan: shares.Shares, size: int, stream: int) -> str:
    """How many to the right and to the left, as +2-1."""
    signs = {RIGHT: "+", LEFT: "-"}
    ways = shares.ways_round(plan, size, stream)
    return "".join(f"{signs[to]}{hops}" for _, to, hops in ways)


def _lines(rows: Iterable[tuple[str, Sequence[str]]], *, first: int, width: int) -> str:
    lines = (name.ljust(first) + "".join(c.ljust(width) for c in cells) for name, cells in rows)
    return "\n".join(map(str.rstrip, lines))
