"""Which way tokens travel: the one place that chooses, by what each way puts on the links.

    exchange  who learns what               tokens travel                        buffer away, rows
    dense     all learn all choices         from everyone to everyone            n T
    slots     all learn all choices, with   to whom they are for, each to a      n T
              the tokens                    slot of its own; or to everyone
    ragged    counts first, then words      to whom they are for, in blocks      least of n T and R

Slots are for few tokens: a DMA for each, and one kernel for what takes ragged three (counts, words,
tokens), each with a launch and a barrier. For many tokens those two in front are some 30 us of 3 to
20 ms, and blocks of them need no list of rows in scalar memory: so that stays three kernels.

Where the links carry less when everyone gets all tokens, as on a ring when a token goes to many
devices (its copies then share their way), tokens go by all_gather, few or many. Answers, which
differ, come straight home: each to a slot if they are few, else in blocks. A sum on the way would
send less, but in the order of the ring, not of the ranks.
"""

import math
from collections.abc import Sequence

from pallas_collectives.backends.plans import How
from pallas_collectives.errors import AlgorithmError
from pallas_collectives.topology.groups import Group

EXCHANGES = ("ragged", "slots", "dense")
# Slots of all devices up to which rows go one by one. Each is a DMA, which takes 50 ns to start.
FEW = 1 << 14
_ON_ONE_RING = 16  # devices; a larger axis is taken for a cube of three until they are known


def visits(devices: int, experts: int, k: int) -> float:
    """To how many other devices a token goes, if it chooses k of all experts, all as likely.

    Args:
      devices: n.
      experts: E, of all devices.
      k: choices.
    """
    others = experts - experts // devices
    return (devices - 1) * (1 - math.comb(others, k) / math.comb(experts, min(k, experts)))


def gathers(n: int, axes: Sequence[tuple[int, bool]], visited: float) -> bool:
    """Whether the busiest link carries less if everyone gets all tokens than if they go one by one.

    Args:
      n: devices.
      axes: the axes of the torus that they lie on: the size of each, and whether it is a line.
      visited: to how many others a token goes.
    """
    straight = visited / (n - 1) * n * max(size / (4 if line else 8) for size, line in axes)
    return (n - 1) / sum(1 if line else 2 for _, line in axes) < straight


def gathers_on(group: Group, visited: float) -> bool:
    """`gathers`, for a group whose place on the links is known."""
    axes = [axis for axis in group.torus if not axis.chip] or [group]
    return gathers(group.size, [(axis.size, axis.line) for axis in axes], visited)


def choose(
    wanted: str,
    how: How,
    sizes: Sequence[int],
    *,
    tokens: int,
    experts: int,
    k: int,
    rows: int | None,
    reaches_all: bool,
) -> str:
    """The exchange of a call, which is settled while it is traced: devices' places are not known.

    Args:
      wanted: as the caller says.
      how: the backend that serves, and its algorithm.
      sizes: devices along the axes, or in a group.
      tokens: T.
      experts: E.
      k: choices.
      rows: as the caller says.
      reaches_all: whether the chip can write to all devices.

    Raises:
      AlgorithmError: an unknown exchange, or an algorithm for one that has no algorithms.
    """
    n = math.prod(sizes)
    if wanted not in ("auto", *EXCHANGES):
        rule = f"it must be 'auto' or one of {', '.join(EXCHANGES)}"
        raise AlgorithmError(f"exchange={wanted!r}", rule, "name one of them")
    if wanted == "slots" and how.algorithm is not None:
        rule = "exchange='slots' has no algorithms to choose from"
        raise AlgorithmError(f"algorithm={how.algorithm!r}", rule, "leave algorithm out")
    if n == 1:
        return "dense"  # nothing is exchanged
    if wanted != "auto":
        return wanted
    if how.backend != "pallas":
        return "dense"
    if how.algorithm is not None:
        return "ragged"
    if gathers(n, _guessed(sizes), visits(n, experts, k)):
        return "slots" if rows is None or rows >= n * tokens or n * tokens <= FEW else "ragged"
    return "slots" if reaches_all and n * tokens <= FEW else "ragged"


def _guessed(sizes: Sequence[int]) -> list[tuple[int, bool]]:
    """How devices lie, by the axes that the caller names: rings, and large ones as a cube."""
    several = [size for size in sizes if size > 1]
    if len(several) > 1 or several[0] <= _ON_ONE_RING:
        return [(size, False) for size in several]
    side = round(several[0] ** (1 / 3))
    return [(side, False)] * 3
