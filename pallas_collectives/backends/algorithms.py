"""The algorithms of each collective on TPUs, and which serves a call."""

import itertools
import math
from typing import NamedTuple

from pallas_collectives import backends, chips, places, tables, tuning
from pallas_collectives.backends import How
from pallas_collectives.errors import AlgorithmError, ReachError
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
WRITES_TO_ALL = ("direct", "everyone", "one_shot")


class Choice(NamedTuple):
    """An algorithm, and whether operands and result are kept in VMEM while it runs."""

    name: str
    vmem: bool


def choose(op: str, how: How, block_bytes: int, group: Group, cuts: int = 1) -> Choice:
    """The algorithm asked for ("name", "name:vmem", "name:hbm"), or the one for this size and chip.

    All axes of a torus at once take part in that choice where the group lies on several, and a
    block can be cut in so many parts (`cuts`) that each link gets one, or devices are many.

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
    if not _reaches(group, name in WRITES_TO_ALL, chip):
        groups = "" if group.index_groups is None else f" in groups {group.index_groups}"
        raise unreachable(f"algorithm={name!r} for {op} over {group.size} devices{groups}", chip)
    backends.count(op, "pallas", asked)
    return Choice(name, space == "vmem")


def _chosen(op: str, block_bytes: int, group: Group, chip: chips.Chip, cuts: int) -> str:
    """The algorithm for the size, of those whose devices the chip can reach."""
    names = reachable(op, group, chip, cuts) or ALGORITHMS[op]
    return tuning.choose(op, block_bytes, group.size, chip, names, torus_of(group, chip))


# On a torus of more devices nothing is as fast as all axes at once, also for blocks that cannot be
# cut for all links: on v5p 4x4x4 a ring takes 1.3 to 5 times as long.
FEW_DEVICES = 16


def reachable(op: str, group: Group, chip: chips.Chip, cuts: float) -> tuple[str, ...]:
    """The algorithms of a collective that can serve: that write only to devices which the chip can
    reach, and of blocks that can be cut in so many parts (`cuts`).

    Of a group on several axes of a torus without a ring of single links, no ring.
    """
    unfit = {"torus"}
    enough = 2 * len(group.torus) if group.size <= FEW_DEVICES else 0
    if group.torus and "torus" in ALGORITHMS[op] and cuts >= enough:
        unfit = set(_RINGS) if group.line else set()
    return tuple(
        name
        for name in ALGORITHMS[op]
        if _reaches(group, name in WRITES_TO_ALL, chip) and name not in unfit
    )


def torus_of(group: Group, chip: chips.Chip) -> str:
    """How a group lies on the links, as tables name it: as its devices do where they are known,
    else by its size.
    """
    if group.torus:
        return tables.torus_of_axes((axis.size, axis.line) for axis in group.torus)
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
