"""Which algorithm serves a call on TPUs: one plan, made here, launched, counted and explained."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from pallas_collectives import catalogue
from pallas_collectives.backends import counters, fastest, ordered
from pallas_collectives.backends.plans import Candidate, How, KernelPlan
from pallas_collectives.errors import AlgorithmError
from pallas_collectives.kernels.machinery import entry, sparsecore
from pallas_collectives.kernels.machinery import launch as kernels
from pallas_collectives.topology import chips, placement
from pallas_collectives.topology.groups import Group


def choose(
    op: str,
    how: How,
    operand: jax.Array,
    group: Group,
    perm: Sequence[tuple[int, int]] = (),
) -> KernelPlan:
    """The plan for the algorithm asked for ("name", "name:vmem", ...), or for the fastest.

    "auto:sc" is the fastest with ":sc" behind it; so with the other suffixes.

    Args:
      op: the canonical collective.
      how: the caller's wishes.
      operand: as it is laid out for the kernel.
      group: the devices.
      perm: a permutation's pairs.

    Raises:
      AlgorithmError: an unknown algorithm, or one that cannot serve this group or permutation.
      ReachError: it, or every algorithm, writes to devices that the chip cannot reach.
    """
    chip, record, called = chips.current(), catalogue.COLLECTIVES[op], counters.lax_name(op)
    able = {algorithm.name: algorithm for algorithm in fastest.in_order(op, how.order)}
    if how.algorithm is not None and not isinstance(how.algorithm, str):
        raise _no_algorithm(how.algorithm, op, how, able)
    if not placement.reaches(perm, group, chip):
        raise placement.unreachable(f"perm={list(perm)} over {group.size} devices", chip)
    torus, name = fastest.torus_of(group, chip), how.algorithm or "auto"
    candidates: tuple[Candidate, ...] = ()
    engine_why = "it was asked for by name"
    base, _, suffix = name.partition(":")
    if base == "auto":
        block = record.block_bytes(operand.nbytes, group.size)
        by_subcores = record.adds and suffix == "sc" and how.order is None
        found = fastest.decide(op, how, block, group, perm, by_subcores=by_subcores)
        base, candidates, engine_why = found.algorithm, found.candidates, found.engine_why
        suffix = "sc" if found.on_sparsecore else suffix
        name = f"{base.partition(':')[0]}:{suffix}" if suffix else base
        suffix = name.partition(":")[2]
    algorithm = able.get(name.partition(":")[0])
    suffixes = ("", "hbm") if algorithm is ordered.EXCHANGE else ("", "vmem", "hbm", "sc")
    if algorithm is None or suffix not in suffixes:
        raise _no_algorithm(name, op, how, able)
    if algorithm.shifts_alone and entry.shift_of(perm, group) is None:
        raise AlgorithmError(
            f"algorithm={name!r} for perm={list(perm)} over {group.size} devices",
            "it serves only shifts by one; other permutations would need a barrier semaphore each",
            "name 'everyone', or leave algorithm=None",
        )
    if algorithm.most_devices is not None and group.size > algorithm.most_devices:
        raise AlgorithmError(
            f"algorithm={name!r} for {called} over {fastest.described(group)}",
            f"it has semaphores for at most {algorithm.most_devices} devices",
            "leave algorithm=None",
        )
    if not fastest.serves(algorithm, group, chip):
        raise placement.unreachable(
            f"algorithm={algorithm.name!r} for {called} over {fastest.described(group)}", chip
        )
    if suffix == "sc":
        adds = record.adds and not algorithm.by_subcores
        sparsecore.check(f"algorithm={name!r} for {called}", chip, adds=adds)
    why = fastest.why(base, candidates) if candidates else "it was asked for by name"
    return KernelPlan(
        op=op,
        backend="pallas",
        algorithm=name,
        why=why,
        turn=how.told_turn(record.larger_bytes(operand.nbytes, group.size)),
        record=algorithm,
        vmem=suffix == "vmem",
        on_sparsecore=suffix == "sc",
        engine_why="" if suffix == "sc" else engine_why,
        for_products=how.for_products,
        shape=operand.shape,
        nbytes=operand.nbytes,
        devices=group.size,
        axes=group.axes,
        groups=group.index_groups,
        chip=chip.name,
        torus=torus,
        candidates=candidates,
    )


def launch(plan: KernelPlan, *operands: Any, **options: Any) -> jax.Array:
    """Runs a plan's kernel, on its engine; with a `codec` that which packs.

    What is noted is the plan with the kernel's own word on how it cuts data.
    """
    codec = options.get("codec")
    packed = plan.record.packed if codec else True
    if packed is True:
        launcher, where = plan.record.launcher, {"vmem": plan.vmem}
    else:  # packs on the way from HBM
        assert packed and not plan.vmem, f"{plan.algorithm} packs nothing"
        launcher, where = packed, {}
    engine = sparsecore.wanted(plan.on_sparsecore, for_products=plan.for_products)
    with engine, kernels.told() as chunking:
        y: jax.Array = launcher(*operands, **where, **options)
    wire = codec.wire if codec else None
    counters.note(dataclasses.replace(plan, chunking=tuple(chunking), wire=wire))
    return y


def _no_algorithm(name: object, op: str, how: How, able: Iterable[str]) -> AlgorithmError:
    """The error for an algorithm that is not one of those that are able."""
    so = "" if how.order is None else f" in order={how.order!r}"
    return AlgorithmError(
        f"algorithm={name!r} for {counters.lax_name(op)}{so}",
        f"it must be one of {', '.join(able)}, alone or with ':vmem', ':hbm' or ':sc' behind it",
        "name one of them, or 'auto' to have it chosen",
    )
