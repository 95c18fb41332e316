"""Which algorithms can serve a call on TPUs, which is the fastest, on which engine, and why."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from pallas_collectives import catalogue
from pallas_collectives.backends import counters, ordered
from pallas_collectives.backends.plans import UNSERVABLE, Candidate, How
from pallas_collectives.catalogue.records import (
    JUMPS,
    LINE,
    ON_SEVERAL,
    PARTNERS,
    RING,
    TORUS,
    Algorithm,
)
from pallas_collectives.errors import AlgorithmError, UnservedError
from pallas_collectives.kernels.machinery import entry
from pallas_collectives.topology import chips, placement, reach
from pallas_collectives.topology.chips import Chip
from pallas_collectives.topology.groups import Group
from pallas_collectives.tuning import choice, overlaps, tables


class Decision(NamedTuple):
    """What serves a call that names no algorithm.

    Attributes:
      algorithm: the one with the least predicted time, with the memory space behind it.
      us: that time; None where the table has nothing.
      candidates: all that were compared.
      on_sparsecore: whether a SparseCore runs it.
      engine_why: why the core does; "" if a SparseCore does.
    """

    algorithm: str
    us: float | None
    candidates: tuple[Candidate, ...]
    on_sparsecore: bool = False
    engine_why: str = ""


def decide(
    op: str,
    how: How,
    block_bytes: int,
    group: Group,
    perm: Sequence[tuple[int, int]] = (),
    *,
    by_subcores: bool = False,
) -> Decision:
    """The algorithm for a call that names none, and the engine that runs it.

    Args:
      op, how, group, perm: as `algorithms.choose`'s.
      block_bytes: of one block, as tables of times count them.
      by_subcores: it has to be one that a SparseCore's vector subcores run.
    """
    chip = chips.current()
    torus = torus_of(group, chip)
    fastest = functools.partial(_fastest, op, block_bytes, group, chip, torus, perm, how.order)
    on_core = fastest(by_subcores=by_subcores)
    if why := _asked_of_core(how) or overlaps.no_sparsecore(chip):
        return on_core._replace(engine_why=why)
    names, adds = reachable(op, group, chip), catalogue.COLLECTIVES[op].adds
    able = (a for a in in_order(op, how.order) if a.name in names)
    if not any(a.by_subcores or not adds for a in able):
        why = "a SparseCore adds along rings and lines alone, in their order"
        return on_core._replace(engine_why=why)
    there = fastest(by_subcores=adds)
    if adds and there.us is not None:  # the tables' times are those of a TensorCore
        more = added_by_subcores_us(op, there.algorithm, block_bytes, group.size)
        there = there._replace(us=there.us + more)
    if why := overlaps.on_core(there.us, chip, on_core.us):
        return on_core._replace(engine_why=why)
    return there._replace(on_sparsecore=True)


def added_by_subcores_us(op: str, algorithm: str, block_bytes: int, n: int) -> float:
    """Microseconds that a sum by an algorithm of n devices takes longer on vector subcores.

    Both ways round a ring of three or more a TensorCore's wait in VMEM (`reduce_scatter`).
    """
    added = block_bytes // n if catalogue.COLLECTIVES[op].sums_everywhere else block_bytes
    in_vmem = n > 2 and algorithm.partition(":")[0] in ("bidirectional", "ring")
    return overlaps.adding_us(added, chips.current(), hops=n // 2 if in_vmem else 0)


def decided(op: str, how: How, nbytes: int, group: Group) -> Decision | None:
    """What serves a call of an operand of so many bytes; None where lax will."""
    block = catalogue.COLLECTIVES[op].block_bytes(nbytes, group.size)
    try:
        return decide(op, how, block, placement.arranged(group))
    except UNSERVABLE:
        return None


def _asked_of_core(how: How) -> str:
    """Why no SparseCore is asked to run a call; "" if one is."""
    if not how.beside:
        return "no step is known around it"
    return "what follows waits for it" if how.awaited else ""


_EXCHANGE = ordered.EXCHANGE.name


def _exchange(
    op: str, block_bytes: int, group: Group, chip: Chip, torus: str
) -> tuple[float, Candidate] | None:
    """The time of `ordered.EXCHANGE`, of its steps one after the other; None if no table has one.

    With what there is to say of it: a figure where each step's is one.
    """
    record = catalogue.COLLECTIVES[op]
    part = block_bytes if record.of_blocks else -(-block_bytes // group.size)
    steps = []
    for step in record.ordered_steps:
        able = reachable(step, group, chip)
        found = choice.predict(step, part, group.size, chip, able, torus)
        if not found:
            return None
        steps.append(found[choice.fastest_first(step, found)[0]])
    adding = 1e6 * ordered.seconds_to_add(part, group.size, chip.hbm_bandwidth)
    us, latency = (sum(getattr(step, name) for step in steps) for name in ("us", "latency_us"))
    source = "; ".join(dict.fromkeys(map(_source, steps)))
    if not all(step.close for step in steps):
        return us + adding, Candidate(_EXCHANGE, None, None, f"{_NO_FIGURE}; order: {source}")
    return us + adding, Candidate(_EXCHANGE, us + adding, latency, source)


def _fastest(
    op: str,
    block_bytes: int,
    group: Group,
    chip: Chip,
    torus: str,
    perm: Sequence[tuple[int, int]],
    order: str | None,
    *,
    by_subcores: bool,
) -> Decision:
    """The algorithm with the least predicted time, of those that can serve; and all of them.

    Its time may be no more than an order, where the table has no such group.
    """
    algorithms, called = in_order(op, order), counters.lax_name(op)
    if by_subcores:
        algorithms = tuple(algorithm for algorithm in algorithms if algorithm.by_subcores)
    fit = {algorithm.name for algorithm in algorithms}
    names = tuple(name for name in reachable(op, group, chip) if name in fit)
    if not is_shift(group, perm):
        shifts = {a.name for a in algorithms if a.shifts_alone}
        if shifts.issuperset(names) and names:
            raise UnservedError(
                f"{called} over {described(group)}",
                "its algorithms serve shifts by one position along one axis only",
                "lax serves where backend and algorithm are unset",
            )
        names = tuple(name for name in names if name not in shifts)
    exchanges = ordered.EXCHANGE in algorithms
    if not names and not exchanges:
        raise placement.unreachable(f"{called} over {described(group)} as they are placed", chip)
    predicted = choice.predict(op, block_bytes, group.size, chip, names, torus)
    timed = [
        (predicted[name].us, _candidate(name, predicted[name]))
        for name in choice.fastest_first(op, predicted)
    ]
    others = [
        Candidate(a.name, None, None, _no_time(a, a.name in names, group, chip))
        for a in algorithms
        if a.name not in predicted and a is not ordered.EXCHANGE
    ]
    if exchanges:
        names = (*names, _EXCHANGE)
        if composed := _exchange(op, block_bytes, group, chip, torus):
            timed = sorted([*timed, composed], key=lambda entry: entry[0])
        else:
            others.append(Candidate(_EXCHANGE, None, None, _UNTIMED))
    candidates = [candidate for _, candidate in timed]
    lies = torus if torus in tables.ONE_AXIS else ON_SEVERAL
    able = (a for a in algorithms if a.name in names)
    preferred = min(able, key=lambda a: a.rank(lies, block_bytes)).name
    if not timed:
        return Decision(preferred, None, tuple(others))
    return Decision(candidates[0].algorithm, timed[0][0], (*candidates, *others))


def predicted(op: str, block_bytes: int, group: Group) -> dict[str, float]:
    """Microseconds of the algorithms that can serve a group, of those that have a time."""
    chip = chips.current()
    names = reachable(op, group, chip)
    found = choice.predict(op, block_bytes, group.size, chip, names, torus_of(group, chip))
    return {name: prediction.us for name, prediction in found.items()}


def predicted_packed(op: str, numbers: int, group: Group, names: Sequence[str]) -> dict[str, float]:
    """The same of algorithms whose kernels pack an operand of so many numbers."""
    chip, block = chips.current(), catalogue.COLLECTIVES[op].block_bytes(2 * numbers, group.size)
    packed = [f"{name}:{tables.PACKED}" for name in names]
    found = choice.predict(op, block, group.size, chip, packed, torus_of(group, chip))
    return {name.partition(":")[0]: prediction.us for name, prediction in found.items()}


_UNTIMED = "no table has it"
_NO_FIGURE = "no figure"


def why(name: str, candidates: Sequence[Candidate]) -> str:
    """Why an algorithm serves, of all that could."""
    if candidates[0].source.startswith(_NO_FIGURE):
        return "no table has a time for such a group; the order of the nearest one decides"
    timed = [c for c in candidates if c.us is not None and c.latency_us is not None]
    if not timed or name != timed[0].algorithm:
        able = [c for c in candidates if c.us is not None or c.source == _UNTIMED]
        if len(able) == 1:
            return "no other algorithm can serve"
        return "preferred by rank among those that can serve, as no table has a time for it"
    best, us, latency = timed[0], timed[0].us or 0.0, timed[0].latency_us or 0.0
    share = 100 * min(1.0, latency / us)
    rules = (
        f"latency (hops) is {share:.0f}% of it"
        if share > 50
        else f"bytes on the busiest link are {100 - share:.0f}% of it"
    )
    kind = best.source.split()[0]
    if len(timed) == 1:
        return f"{kind} {us:.1f} us, {rules}; no other has a time"
    return f"{kind} {us:.1f} us against {timed[1].us:.1f} of {timed[1].algorithm}; {rules}"


def _candidate(name: str, prediction: choice.Prediction) -> Candidate:
    if not prediction.close:
        return Candidate(name, None, None, f"{_NO_FIGURE}; order: {_source(prediction)}")
    return Candidate(name, prediction.us, prediction.latency_us, _source(prediction))


def _source(prediction: choice.Prediction) -> str:
    of = " and ".join(map(str, prediction.devices))
    table = prediction.table
    if table.measured:
        return f"measured with JAX {table.jax} on {of} devices{prediction.sizes} ({table.path})"
    return f"modelled by replay, for {of} devices{prediction.sizes}"


def _no_time(algorithm: Algorithm, can_serve: bool, group: Group, chip: Chip) -> str:
    """Why there is no prediction for an algorithm."""
    if can_serve:
        return _UNTIMED
    if not serves(algorithm, group, chip):
        return f"{chip.name} cannot write to all the devices that it must reach"
    if algorithm.reach is PARTNERS:
        return "it serves shifts by one position"
    if group.torus and algorithm.reach in outrun(chip):
        why = "over several axes what goes straight is faster"
    elif algorithm.reach is not TORUS and group.size > FEW_DEVICES:
        why = "on so many devices another is faster"
    elif algorithm.reach is not TORUS:
        why = "the devices have no ring of single links"
    else:
        why = "on one axis it is the same as a ring"
    return f"{why}; name it to use it"


def torus_of(group: Group, chip: Chip) -> str:
    """How a group lies on the links, as tables name it: as its devices do where they are known,
    else by its size.
    """
    if group.torus:
        return tables.torus_of_axes((axis.size, axis.line) for axis in group.torus)
    if placement.in_scope() is None:
        return choice.torus_of(group.size, chip)
    return "line" if group.line else "ring"


# On a torus of more devices nothing is as fast as all axes at once: on v5p 4x4x4 a ring takes 1.3
# to 5 times as long; of an all-to-all of 4 MiB a device on 7x 4x4x4 753 us, where direct takes 62
# and jumps 65.
FEW_DEVICES = 16


def reachable(op: str, group: Group, chip: Chip) -> tuple[str, ...]:
    """The algorithms of a collective that can serve: that write only to devices which the chip can
    reach.

    Of a group on several axes of a torus without a ring of single links, no ring; nor for an
    exchange among more than a few devices, whose blocks would go round all of it.
    """
    able = [a for a in catalogue.COLLECTIVES[op].algorithms if serves(a, group, chip)]
    kinds = {a.reach for a in able}
    unfit = outrun(chip) if group.torus else {TORUS}
    if group.torus and (
        (TORUS in kinds and group.line) or (JUMPS in kinds and group.size > FEW_DEVICES)
    ):
        unfit |= {RING, LINE}
    return tuple(a.name for a in able if a.reach not in unfit)


def outrun(chip: Chip) -> set[reach.Pattern]:
    """What over several axes is slower than what goes straight: `JUMPS`, if devices reach all.

    By the replay, of an all-to-all of blocks of 32 KiB on v5p 4x4 11.1 us for 10.9, on v4 4x4x4
    39.6 for 38.1. Along one axis jumps are quicker for small blocks: round 16 v5p of 4 KiB 11.4 us
    for 13.2.
    """
    return {JUMPS} if reach.everywhere(chip) else set()


def serves(algorithm: Algorithm, group: Group, chip: Chip) -> bool:
    """Whether it can serve a group: every device reaches those that it writes to."""
    if algorithm.most_devices is not None and group.size > algorithm.most_devices:
        return False
    return placement.reaches(algorithm.reach(group), group, chip)


def in_order(op: str, order: str | None) -> tuple[Algorithm, ...]:
    """The algorithms of a collective; of a sum in the order of the ranks those that add so.

    Raises:
      AlgorithmError: none of them does.
    """
    record = catalogue.COLLECTIVES[op]
    if order is None or not record.adds:
        return record.algorithms
    able = tuple(algorithm for algorithm in record.algorithms if algorithm.in_order)
    able = (*able, ordered.EXCHANGE) if record.ordered_steps else able
    if not able:
        raise AlgorithmError(
            f"order={order!r} for {counters.lax_name(op)}",
            "none of its algorithms adds in the order of the ranks",
            "leave order=None",
        )
    return able


def is_shift(group: Group, perm: Sequence[tuple[int, int]]) -> bool:
    """Whether a permutation is one that `PARTNERS` serve."""
    one_axis = sum(size > 1 for size in group.sizes) <= 1  # or ids might be too many (`entry`)
    return one_axis and entry.shift_of(perm, group) is not None


def described(group: Group) -> str:
    """A group as errors name it."""
    groups = "" if group.index_groups is None else f" in groups {group.index_groups}"
    return f"{group.size} devices{groups}"
