"""What serves the collectives of a turn, and what they take: on each engine, and over a wire."""

import dataclasses
from typing import Any

from jax.extend.core import JaxprEqn

from pallas_collectives import _compat
from pallas_collectives.backends import (
    canonical,
    counters,
    fastest,
    nccl_products,
    serving,
    slices,
    wire_choice,
)
from pallas_collectives.backends.plans import UNSERVABLE, WirePlan
from pallas_collectives.kernels import matmul_plan
from pallas_collectives.lowering import questions
from pallas_collectives.lowering.turns import Step
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import Group
from pallas_collectives.tuning import overlaps


def under_way(step: Step, chip: chips.Chip) -> float:
    """What a gather or scatter takes on a SparseCore (modelled); 0 if it does not run there."""
    assert step.eqn is not None
    if _for_its_reader(step, chip) or overlaps.by_xla(questions.collective_of(step.eqn), chip):
        return 0.0
    found = _decided(step)
    return (found.us or 0.0) * 1e-6 if found and found.on_sparsecore else 0.0


def ahead_by_xla(step: Step, chip: chips.Chip) -> float:
    """What a gather takes that XLA may run beside products of the turn before; 0 for others."""
    beside = step.how is not None and step.how.beside
    return beside_by_xla(step, chip) if beside and not _for_its_reader(step, chip) else 0.0


def _for_its_reader(step: Step, chip: chips.Chip) -> str:
    """Why lax keeps a gather right before what reads it; "" where it need not, and for sums."""
    assert step.eqn is not None
    brought = _compat.type_of(step.eqn.outvars[0])
    dtype = wire_choice.moved_dtype(step.eqn.params["how"], brought.dtype)
    nbytes = brought.size * dtype.itemsize
    return overlaps.for_its_reader(nbytes, dtype, chip) if step.how else ""


def on_core(step: Step) -> float:
    """What a gather or scatter takes on the core (modelled); 0 where no table tells."""
    found = _decided(step, awaited=True)
    return (found.us or 0.0) * 1e-6 if found else 0.0


def by_xla(step: Step, chip: chips.Chip) -> float:
    """What a gather or scatter takes (modelled) that goes over its wire unless XLA can hide it.

    0 for others.
    """
    return beside_by_xla(step, chip) if wired(step) else 0.0


def beside_by_xla(step: Step, chip: chips.Chip) -> float:
    """What an exchange takes (modelled) that XLA runs beside products; 0 for others."""
    assert step.eqn is not None
    if not overlaps.by_xla(questions.collective_of(step.eqn), chip):
        return 0.0
    found = _decided(step, beside=False)
    return (found.us or 0.0) * 1e-6 if found else 0.0


def on_either(step: Step, chip: chips.Chip) -> tuple[float, float, float | None] | None:
    """What an exchange that products wait for takes on the core, on a SparseCore, and over a wire.

    In seconds (modelled); over a wire it goes on the core, and without one that is None. None for
    all if it does not run on a SparseCore. XLA's own do on 7x: those with wires are in order there.
    """
    assert step.eqn is not None
    over = wired(step)
    if overlaps.by_xla(questions.collective_of(step.eqn), chip) and not over:
        return None
    here, there = on_core(step), _decided(step, awaited=False)
    if not here or not there or not there.us or not there.on_sparsecore:
        return None
    return here, there.us * 1e-6, over.wired_us * 1e-6 if over and over.wired_us else None


def wired(step: Step) -> WirePlan | None:
    """The plan of the wire that a collective takes where nothing hides it; None if it has none."""
    assert step.eqn is not None
    how = dataclasses.replace(step.eqn.params["how"], awaited=True)
    types = [_compat.type_of(v) for v in step.eqn.invars]
    if not wire_choice.packs(how, types[0].dtype):
        return None
    params = {k: v for k, v in step.eqn.params.items() if k != "how"}
    op = step.eqn.primitive.name.removeprefix("pallas_")
    try:
        with step.eqn.ctx.manager:
            plan = serving.over_wire(op, how, *types, **params)
    except UNSERVABLE:
        return None
    return plan if plan and plan.algorithm else None


def saved_by_wire(step: Step) -> float:
    """The seconds that a collective's wire saves on the core (modelled); 0 for others."""
    plan = wired(step)
    assert step.eqn is not None
    if plan is None or plan.us is None or plan.wired_us is None:
        return 0.0
    return (plan.us - plan.wired_us) * 1e-6 * matmul_plan.sharing(group(step.eqn))


def longer_in_two(total: Step) -> float | None:
    """The seconds that a scatter and a gather take longer on the core than their psum (modelled).

    None where lax must serve any of them. On GPUs of one host the bytes are a psum's round a ring,
    in one call more; of several, products and a scatter run apart.
    """
    assert total.eqn is not None
    operand, devices = _compat.type_of(total.eqn.invars[0]), group(total.eqn)
    how = dataclasses.replace(total.eqn.params["how"], wire=None, algorithm=None, beside=False)
    if how.backend == "nccl":
        return nccl_products.CALL if slices.one_host_has(devices) else None
    nbytes = operand.size * operand.dtype.itemsize
    sizes = {"reduce_scatter": nbytes, "all_gather": nbytes // devices.size, "all_reduce": nbytes}
    found = (fastest.decided(op, how, size, devices) for op, size in sizes.items())
    times = [decision.us for decision in found if decision and decision.us]
    if len(times) < len(sizes):
        return None
    scatter, gather, psum = times
    return (scatter + gather - psum) * 1e-6 * matmul_plan.sharing(devices)


def leave_out(step: Step, why: str) -> None:
    """Counts the wire of a collective as left out."""
    assert step.eqn is not None
    op, operand = questions.collective_of(step.eqn), _compat.type_of(step.eqn.invars[0])
    with counters.calling(counters.lax_name(op), operand.size * operand.dtype.itemsize):
        wire_choice.note_left_out(op, step.eqn.params["how"].wire, why)


def _decided(step: Step, **wishes: Any) -> fastest.Decision | None:
    """What would serve a collective, with some fields of its `How` others; None if lax must."""
    assert step.eqn is not None
    params, operand = step.eqn.params, _compat.type_of(step.eqn.invars[0])
    op, how = questions.collective_of(step.eqn), dataclasses.replace(params["how"], **wishes)
    devices = group(step.eqn)
    if not wire_choice.gives_way(how) or (step.totals and slices.obstacle(devices, how.across)):
        return None
    nbytes = operand.size * wire_choice.moved_dtype(how, operand.dtype).itemsize
    return fastest.decided(op, how, nbytes, devices)


def group(eqn: JaxprEqn) -> Group:
    """The devices of a collective."""
    params = eqn.params
    axes = params["axis_name"] if "axis_name" in params else params["axes"]
    return canonical.group_of(axes, params.get("axis_index_groups"))
