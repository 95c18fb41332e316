"""Step tables of kernels' docstrings, made from the schedules that the kernels run.

Those of all-gather and reduce-scatter are in `groups`, beside their streams.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_collectives.kernels import all_reduce_line
from pallas_collectives.kernels.machinery import relay
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import LEFT, RIGHT, Stream


def all_reduce(n: int, streams: tuple[Stream, ...]) -> str:
    """The terms in the sums under way, then the blocks of the sum present; as in `all_reduce`."""
    reduced = groups.reduce_table(n, streams).splitlines()
    gathered = groups.gather_table(n, streams).splitlines()[1:]
    steps = (line.split()[1:] for line in (*reduced, *gathered))
    return _lines(((str(step), cells) for step, cells in enumerate(steps)), first=6, width=n + 4)


def line(n: int) -> str:
    """The terms in the sum of one chunk that each device holds; as in `all_reduce_line`."""
    middle = n // 2
    held = [{place} for place in range(n)]
    rows = []
    for step in range(2 * middle + 1):
        before = [set(terms) for terms in held]
        for place in range(n):
            adds, ends = all_reduce_line.steps(place, n)
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


def _lines(rows: Iterable[tuple[str, Sequence[str]]], *, first: int, width: int) -> str:
    lines = (name.ljust(first) + "".join(c.ljust(width) for c in cells) for name, cells in rows)
    return "\n".join(map(str.rstrip, lines))
