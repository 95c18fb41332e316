"""The algorithms of each collective on TPUs, and which serves a call."""

import itertools
import math
from typing import NamedTuple

from pallas_collectives import backends, chips, places, tuning
from pallas_collectives.backends import How
from pallas_collectives.errors import AlgorithmError, ReachError
from pallas_collectives.kernels import torus
from pallas_collectives.kernels.topology import Group

ALGORITHMS = {
    "all_gather": ("bidirectional", "unidirectional", "line", "torus", "direct"),
    "reduce_scatter": ("bidirectional", "unidirectional", "line", "torus", "direct"),
    "all_reduce": ("ring", "line", "torus", "one_shot"),
    "all_to_all": ("direct", "ring"),
    "ragged_all_to_all": ("direct", "ring"),
    "ppermute": ("partners", "everyone"),
}
_RINGS = ("bidirectional", "unidirectional", "line", "ring")
_WRITES_TO_ALL = ("direct", "everyone", "one_shot")


class Choice(NamedTuple):
    """An algorithm, and whether operands and result are kept in VMEM while it runs."""

    name: str
    vmem: bool


def choose(op: str, how: How, block_bytes: int, group: Group, cuts: int = 1) -> Choice:
    """The algorithm asked for ("name", "name:vmem", "name:hbm"), or the one for this size and chip.

    Where the group lies on a torus of several axes, that is all of them at once in place of a ring,
    if a block can be cut in so many parts (`cuts`) that each link gets one.

    Raises:
      AlgorithmError: there is no such algorithm.
      ReachError: it writes to devices that the chip cannot reach.
    """
    chip = chips.current()
    if how.algorithm is not None and not isinstance(how.algorithm, str):
        raise AlgorithmError(f"algorithm={how.algorithm!r}", "it is a name", "see its docstring")
    asked = how.algorithm or _chosen(op, block_bytes, group, chip, cuts)
    name, _, space = asked.partition(":")
    if name not in ALGORITHMS[op] or space not in ("", "vmem", "hbm"):
        names = ", ".join(ALGORITHMS[op])
        raise AlgorithmError(
            f"algorithm={asked!r} for {op}",
            f"it is one of {names}, alone or with ':vmem' or ':hbm' behind it",
            "name one of them, or 'auto' to have it chosen",
        )
    if not _reaches(group, name in _WRITES_TO_ALL, chip):
        groups = "" if group.index_groups is None else f" in groups {group.index_groups}"
        raise unreachable(f"algorithm={name!r} for {op} over {group.size} devices{groups}", chip)
    backends.count(op, "pallas", asked)
    return Choice(name, space == "vmem")


def _chosen(op: str, block_bytes: int, group: Group, chip: chips.Chip, cuts: int) -> str:
    """The algorithm for the size, of those whose devices the chip can reach."""
    names = reachable(op, group, chip) or ALGORITHMS[op]
    chosen = tuning.choose(op, block_bytes, group.size, chip, names, torus_of(group, chip))
    return on_torus(chosen, group, op, block_bytes) if cuts >= 2 * len(group.torus) else chosen


# By the replay: sums of smaller blocks on fewer devices take longer over all axes at once, for more
# streams to add; more so where the operand comes block by block (`kernels.torus.numbers`).
_TORUS_SUMS_FROM_BYTES = 1 << 20
_TORUS_SUMS_IN_PIECES_FROM_BYTES = 4 << 20
_TORUS_SUMS_FROM_DEVICES = 64


def on_torus(name: str, group: Group, op: str, block_bytes: int) -> str:
    """An algorithm, or where it is a ring over several axes of a torus, all of them at once.

    That has no more hops and fewer bytes on each link, but where a corner of the torus has no more
    than two links: a ring, where there is one on the wires, uses both of them all the time.
    """
    ring, _, space = name.partition(":")
    if not group.torus or ring not in _RINGS:
        return name
    if op != "all_gather" and group.size < _TORUS_SUMS_FROM_DEVICES:
        shard = block_bytes // group.size if op == "all_reduce" else block_bytes
        whole = torus.numbers(group.torus) is None
        if shard < (_TORUS_SUMS_FROM_BYTES if whole else _TORUS_SUMS_IN_PIECES_FROM_BYTES):
            return name
    corner_links = sum(1 if axis.line or axis.size == 2 else 2 for axis in group.torus)
    if corner_links <= 2 and places.in_scope() is not None and not group.line:
        return name
    return f"torus:{space}" if space else "torus"


def reachable(op: str, group: Group, chip: chips.Chip) -> tuple[str, ...]:
    """The algorithms of a collective that write only to devices that the chip can reach.

    Rings stand for the way over several axes as well (see `on_torus`).
    """
    return tuple(
        name
        for name in ALGORITHMS[op]
        if _reaches(group, name in _WRITES_TO_ALL, chip) and name != "torus"
    )


def torus_of(group: Group, chip: chips.Chip) -> str:
    """How a group lies on the links: as its devices do where they are known, else by its size."""
    if places.in_scope() is None or group.index_groups is not None:
        return tuning.torus_of(group.size, chip)
    return "line" if group.line else "ring"


def _reaches(group: Group, all_pairs: bool, chip: chips.Chip) -> bool:
    """Whether the chip can write between all devices of a group, or between neighbours."""
    if group.index_groups is None:
        return tuning.reaches_all(group.size, chip) or not all_pairs
    devices = math.prod(group.sizes)
    return all(
        tuning.reaches(b - a, devices, chip)
        for members in group.index_groups
        for a, b in (
            itertools.combinations(members, 2)
            if all_pairs
            else zip(members, (*members[1:], members[0]), strict=True)
        )
    )


def unreachable(what: str, chip: chips.Chip) -> ReachError:
    """The error for devices that cannot write to one another."""
    return ReachError(
        what,
        f"{chip.name} writes to devices at power-of-two offsets only",
        "leave backend and algorithm to be chosen: another algorithm, or else lax, then serves",
    )
