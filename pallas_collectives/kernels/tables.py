"""Step tables of kernels' docstrings, made from the schedules that the kernels run.

Those of all-gather and reduce-scatter are in `topology`, beside their streams.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_collectives.kernels import relay, topology
from pallas_collectives.kernels.topology import LEFT, RIGHT, Stream


def all_reduce(n: int, streams: tuple[Stream, ...]) -> str:
    """The terms in the sums under way, then the blocks of the sum present; as in `all_reduce`."""
    reduced = topology.reduce_table(n, streams).splitlines()
    gathered = topology.gather_table(n, streams).splitlines()[1:]
    steps = (line.split()[1:] for line in (*reduced, *gathered))
    return _lines(((str(step), cells) for step, cells in enumerate(steps)), first=6, width=n + 4)


def exchange_directly(n: int) -> str:
    """Whom each device sends to, in the order in which it does; as in `all_to_all`."""
    return _lines(
        (
            (str(k), [f"{device}>{topology.wrap(device + k, n)}" for device in range(n)])
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
            sender = topology.wrap(device - (int(hop) - 1), n)
            row[device].append(f"{sender}>{topology.wrap(sender + int(distance), n)}")
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
