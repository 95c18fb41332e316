"""The algorithms of each collective on TPUs, and which serves a call."""

from collections.abc import Sequence
from typing import NamedTuple

from pallas_collectives import backends, chips, places, reach, tables, tuning
from pallas_collectives.backends import How
from pallas_collectives.errors import AlgorithmError, ReachError
from pallas_collectives.kernels import entry, physical, relay
from pallas_collectives.kernels.topology import Group

ALGORITHMS = {
    "all_gather": ("bidirectional", "unidirectional", "line", "torus", "direct"),
    "reduce_scatter": ("bidirectional", "unidirectional", "line", "torus", "direct"),
    "all_reduce": ("ring", "line", "torus", "one_shot"),
    "all_to_all": ("direct", "ring", "line"),
    "ragged_all_to_all": ("direct", "ring", "line"),
    "ppermute": ("partners", "everyone"),
}
_RINGS = ("bidirectional", "unidirectional", "line", "ring")
# Which devices write to each other, or signal, in an algorithm of that name.
PATTERNS: dict[str, reach.Pattern] = {
    "bidirectional": reach.ring,
    "unidirectional": reach.ring,
    "ring": reach.ring,
    "line": reach.line,
    "torus": reach.torus,
    "direct": reach.everyone,
    "one_shot": reach.everyone,
    "partners": reach.alone,  # but a permutation's own pairs, which `choose` is given
    "everyone": reach.alone,
}
# Whose lines are no longer than this.
_RELAYED = ("all_to_all", "ragged_all_to_all")


# The torus of a slice, and the places of a group's devices on it (see `places.lying`).
Lying = tuple[physical.Torus, Sequence[Sequence[physical.Place]]]


class Choice(NamedTuple):
    """An algorithm, and whether operands and result are kept in VMEM while it runs."""

    name: str
    vmem: bool


def choose(
    op: str, how: How, block_bytes: int, group: Group, cuts: int = 1, perm: reach.Pairs = ()
) -> Choice:
    """The algorithm asked for ("name", "name:vmem", "name:hbm"), or the one for this size and chip.

    All axes of a torus at once take part in that choice where the group lies on several, and a
    block can be cut in so many parts (`cuts`) that each link gets one, or devices are many. `perm`
    is a permutation's.

    Raises:
      AlgorithmError: there is no such algorithm, or it is not for this group or permutation.
      ReachError: it writes to devices that the chip cannot reach, or none is without that.
    """
    chip = chips.current()
    if how.algorithm is not None and not isinstance(how.algorithm, str):
        raise AlgorithmError(f"algorithm={how.algorithm!r}", "it is a name", "see its docstring")
    if not reaches(perm, group, chip):
        raise unreachable(f"perm={list(perm)} over {group.size} devices", chip)
    asked = how.algorithm or _chosen(op, block_bytes, group, chip, cuts, perm)
    name, _, space = asked.partition(":")
    if name not in ALGORITHMS[op] or space not in ("", "vmem", "hbm"):
        names = ", ".join(ALGORITHMS[op])
        raise AlgorithmError(
            f"algorithm={asked!r} for {op}",
            f"it is one of {names}, alone or with ':vmem' or ':hbm' behind it",
            "name one of them, or 'auto' to have it chosen",
        )
    if name == "partners" and entry.shift_of(tuple(perm), group) is None:
        raise AlgorithmError(
            f"algorithm={asked!r} for perm={list(perm)} over {group.size} devices",
            "it is for shifts by one position: others would each take one of a TPU's few barriers",
            "name 'everyone', or leave it to be chosen",
        )
    if not serves(op, name, group, chip):
        groups = "" if group.index_groups is None else f" in groups {group.index_groups}"
        raise unreachable(f"algorithm={name!r} for {op} over {group.size} devices{groups}", chip)
    backends.count(op, "pallas", asked)
    return Choice(name, space == "vmem")


def _chosen(
    op: str, block_bytes: int, group: Group, chip: chips.Chip, cuts: int, perm: reach.Pairs
) -> str:
    """The algorithm for the size, of those whose devices the chip can reach."""
    names = reachable(op, group, chip, cuts)
    one_axis = sum(size > 1 for size in group.sizes) <= 1  # or ids might be too many (`entry`)
    if not one_axis or entry.shift_of(tuple(perm), group) is None:
        names = tuple(name for name in names if name != "partners")
    if not names:
        raise unreachable(f"{op} over {group.size} devices as they lie", chip)
    return tuning.choose(op, block_bytes, group.size, chip, names, torus_of(group, chip))


# On a torus of more devices nothing is as fast as all axes at once, also for blocks that cannot be
# cut for all links: on v5p 4x4x4 a ring takes 1.3 to 5 times as long.
FEW_DEVICES = 16


def reachable(
    op: str, group: Group, chip: chips.Chip, cuts: float, lying: Lying | None = None
) -> tuple[str, ...]:
    """The algorithms of a collective that can serve: that write only to devices which the chip can
    reach, and of blocks that can be cut in so many parts (`cuts`).

    Of a group on several axes of a torus without a ring of single links, no ring. `lying` is where
    the devices are; by default as `places` has it.
    """
    unfit = {"torus"}
    enough = 2 * len(group.torus) if group.size <= FEW_DEVICES else 0
    fits = "torus" in ALGORITHMS[op] and cuts >= enough
    if group.torus and fits and serves(op, "torus", group, chip, lying):
        unfit = set(_RINGS) if group.line else set()
    return tuple(
        name
        for name in ALGORITHMS[op]
        if name not in unfit and serves(op, name, group, chip, lying)
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


def serves(op: str, name: str, group: Group, chip: chips.Chip, lying: Lying | None = None) -> bool:
    """Whether an algorithm can serve a group: every device reaches those that it writes to."""
    if name == "line" and op in _RELAYED and group.size > relay.LONGEST_LINE:
        return False
    return reaches(PATTERNS[name](group), group, chip, lying)


def check_ring(what: str, group: Group) -> None:
    """Raises ReachError for a kernel round a ring that the chip's devices cannot go round."""
    chip = chips.current()
    if not reaches(reach.ring(group), group, chip):
        raise unreachable(f"{what} over {group.size} devices as they lie", chip)


def reaches(pairs: reach.Pairs, group: Group, chip: chips.Chip, lying: Lying | None = None) -> bool:
    """Whether devices of a group, by their numbers, reach each other, as far as is known here."""
    if reach.everywhere(chip) or (lying is None and places.are_settled_later()):
        return True
    return reach.all_reach(chip, *(lying or places.lying(group, chip)), pairs)


def unreachable(what: str, chip: chips.Chip) -> ReachError:
    """The error for devices that cannot write to one another."""
    return ReachError(
        what,
        f"{chip.name} writes to devices at power-of-two offsets along one torus axis only",
        "leave backend and algorithm to be chosen: another algorithm, or else lax, then serves",
    )
