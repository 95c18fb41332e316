"""The algorithms of each collective on TPUs, and which serves a call."""

import itertools
import math
from typing import NamedTuple

from pallas_collectives import backends, chips, tuning
from pallas_collectives.backends import How
from pallas_collectives.errors import AlgorithmError, ReachError
from pallas_collectives.kernels.topology import Group

ALGORITHMS = {
    "all_gather": ("bidirectional", "unidirectional", "direct"),
    "reduce_scatter": ("bidirectional", "unidirectional"),
    "all_reduce": ("ring", "one_shot"),
    "all_to_all": ("direct", "ring"),
    "ragged_all_to_all": ("direct",),
    "ppermute": ("partners", "everyone"),
}
_WRITES_TO_ALL = ("direct", "everyone", "one_shot")


class Choice(NamedTuple):
    """An algorithm, and whether operands and result are kept in VMEM while it runs."""

    name: str
    vmem: bool


def choose(op: str, how: How, block_bytes: int, group: Group) -> Choice:
    """The algorithm asked for ("name", "name:vmem", "name:hbm"), or the one for this size and chip.

    Raises:
      AlgorithmError: there is no such algorithm.
      ReachError: it writes to devices that the chip cannot reach.
    """
    chip = chips.current()
    if how.algorithm is not None and not isinstance(how.algorithm, str):
        raise AlgorithmError(f"algorithm={how.algorithm!r}", "it is a name", "see its docstring")
    asked = how.algorithm or tuning.choose(op, block_bytes, group.size, chip)
    name, _, space = asked.partition(":")
    if name not in ALGORITHMS[op] or space not in ("", "vmem", "hbm"):
        names = ", ".join(ALGORITHMS[op])
        raise AlgorithmError(
            f"algorithm={asked!r} for {op}",
            f"it is one of {names}, alone or with ':vmem' or ':hbm' behind it",
            "name one of them, or None to have it chosen",
        )
    if not _reaches(group, name in _WRITES_TO_ALL, chip):
        groups = "" if group.index_groups is None else f" in groups {group.index_groups}"
        raise unreachable(f"algorithm={name!r} for {op} over {group.size} devices{groups}", chip)
    backends.count(op, "pallas", asked)
    return Choice(name, space == "vmem")


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
