"""Sums of gradients for all devices, each where its gradient is made: products are beside it there.

Data parallelism sums its gradients behind the backward pass, where nothing is left to run beside
them. Most are rows that a loop's turns have made:

    as written                                 as lowered
    turn: gradients[layer] = ...               turn: gradient = ...; sums[layer] = psum(gradient)
    behind the loop: sums = psum(gradients)

So a `psum` of what a scan has stacked is done in its turns, and a `psum` of several arrays becomes
one of each, right behind what makes the array. There a SparseCore runs it beside the products to
come (`lowering.ahead`), or XLA does so where it can. Where those would hide too little of it, it
stays the core's, as it was written.
"""

import dataclasses
import itertools
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax
from jax.extend import core

from pallas_collectives import _compat
from pallas_collectives.lowering import collective_times, questions, turns
from pallas_collectives.lowering.dataflow import Dataflow
from pallas_collectives.lowering.loops import Loop
from pallas_collectives.lowering.sums_in_two import in_two
from pallas_collectives.lowering.turns import Step, numbers
from pallas_collectives.topology import chips


class _Queue:
    """What runs sums beside products, one after the other."""

    def __init__(self, products: float, busy: float):
        self._products, self._busy = products, busy

    def takes(self, made: float, times: tuple[float, float] | None) -> bool:
        """Whether it takes one more, of a gradient that is made then: products hide half of it."""
        if times is None:
            return False
        here, there = times
        done = max(made, self._busy) + there
        if done - self._products > here / 2:
            return False
        self._busy = done
        return True


def placed(loop: Loop) -> Loop:
    """The same loop, or program, with sums of gradients where they are best begun."""
    if not any(step.totals for step in loop.steps):
        return loop
    in_turns = _in_turns(loop.steps, {*numbers(loop.results)})
    found = _scattered(_one_by_one(dataclasses.replace(loop, steps=in_turns)))
    return loop if found.steps == loop.steps else found


def _one_by_one(loop: Loop) -> Loop:
    """The same with sums that products hide as calls of their own, behind what makes an array.

    A turn's sum that is but stacked may run on beside the products of the next turn.
    """
    flow = Dataflow(loop.steps)
    *elapsed, products = loop.elapsed(chips.current())
    found: list[tuple[float, int, list[Step]]] = []  # when an array is made, by which step; its sum
    for psum in (step for step in loop.steps if step.totals):
        for k, (array, number) in enumerate(zip(psum.reads, psum.writes, strict=True)):
            maker, handing_on = _made(flow, array)
            of_sums = maker is not None and (maker.sums or maker.totals)
            if isinstance(array, turns.Value) or number in loop.waited or of_sums:
                continue
            total, place = _alone(psum, k), flow.places[maker] if maker else -1
            made = 0.0 if loop.stacks(total) else elapsed[place + 1]
            found.append((made, place, [*handing_on, total]))
    queue = _Queue(products, loop.gathering)
    behind: dict[int, list[Step]] = {}
    for made, place, moved in sorted(found, key=lambda each: each[:2]):
        if queue.takes(made, _times(moved[-1])):
            behind.setdefault(place, []).extend(moved)
    early = {step: None for steps in behind.values() for step in steps}
    apart = {number for step in early for number in step.writes}
    steps = [*behind.get(-1, ())]
    for place, step in enumerate(loop.steps):
        steps += [*(() if step in early else _without(step, apart)), *behind.get(place, ())]
    return dataclasses.replace(loop, steps=list(dict.fromkeys(steps)))


def _made(flow: Dataflow, array: Any) -> tuple[Step | None, list[Step]]:
    """What makes an array, and the steps that hand it on, one after the other."""
    handing_on: list[Step] = []
    maker = None if isinstance(array, turns.Value) else flow.makers.get(array)
    while maker and maker.eqn and maker.hands_on and len({*numbers(maker.reads)}) == 1:
        handing_on.insert(0, maker)
        (array,) = {*numbers(maker.reads)}
        maker = flow.makers.get(array)
    return maker, handing_on


def _scattered(loop: Loop) -> Loop:
    """The same; a sum that is but stacked scatters, and one gather behind all turns brings all.

    What a gather brings in a turn the core would have to copy to its row of the stack.
    """
    steps, results, gathers = [], [*loop.results], dict[int, Step]()
    new = itertools.count(1 + max(n for step in loop.steps for n in step.writes))
    for step in loop.steps:
        alone = step.totals and step.sums and loop.stacks(step) and loop.to_ys(step) == [step]
        if not alone or (axis := _scatters_along(step)) is None:
            steps.append(step)
            continue
        part = next(new)
        scatter, gathers[part] = in_two(step, axis, part, rows=loop.params["length"])
        results = [part if x in step.writes else x for x in results]
        steps.append(scatter)
    return dataclasses.replace(loop, steps=steps, results=results, gathers=gathers)


def _scatters_along(total: Step) -> int | None:
    """The dimension along which a sum that a SparseCore runs is scattered; None for all others."""
    assert total.eqn is not None
    if total.eqn.params.get("axis_index_groups"):
        return None
    devices = collective_times.group(total.eqn).size
    shape = _compat.type_of(total.eqn.invars[0]).shape
    axis = next((axis for axis, size in enumerate(shape[:-1]) if size % devices == 0), None)
    return axis if collective_times.under_way(total, chips.current()) else None


class _Row(NamedTuple):
    """What a scan's turns make and a psum sums, stacked.

    Attributes:
      place: of the stack, among the scan's results.
      converts: the conversions between the two, the last one first.
      total: the psum of one row.
    """

    place: int
    converts: Sequence[Step]
    total: Step


def _in_turns(steps: Sequence[Step], results: Set[int]) -> list[Step]:
    """The steps, with sums of stacked results in the turns that make these."""
    flow, rows = Dataflow(steps), dict[Step, list[_Row]]()
    for psum in (step for step in steps if step.totals):
        for k in range(len(psum.writes)):
            if found := _stacked(flow, results, psum, k):
                scan, row = found
                rows.setdefault(scan, []).append(row)
    changed, moved, converted = dict[Step, Step](), set[int](), set[Step]()
    for scan, able in rows.items():
        queue = _Queue(scan.seconds(chips.current()) / scan.length, 0.0)
        if chosen := [row for row in able if queue.takes(0.0, _times(row.total))]:
            changed[scan] = _summing(scan, chosen)
            moved.update(row.total.writes[0] for row in chosen)
            converted.update(step for row in chosen for step in row.converts)
    kept = (changed.get(step, step) for step in steps if step not in converted)
    return [each for step in kept for each in _without(step, moved)]


def _stacked(flow: Dataflow, results: Set[int], psum: Step, k: int) -> tuple[Step, _Row] | None:
    """The scan that stacks what a psum sums, where nothing else reads it; and what a row is."""
    array, reader, converts = psum.reads[k], psum, list[Step]()
    while _alone_reads(flow, results, reader, array) and array in flow.makers:
        maker = flow.makers[array]
        if maker.eqn is None:
            break
        if maker.length > 1:
            place = maker.writes.index(array)
            _, carried = _compat.scan_parts(maker.eqn.params, len(maker.reads))
            if place < carried:
                return None
            return maker, _Row(place, converts, _of_row(_alone(psum, k)))
        if maker.eqn.primitive.name != questions.CONVERT:
            break
        converts.append(maker)
        array, reader = maker.reads[0], maker
    return None


def _alone_reads(flow: Dataflow, results: Set[int], reader: Step, array: Any) -> bool:
    """Whether a step reads an array, once, and nothing else does."""
    if isinstance(array, turns.Value) or array in results:
        return False
    return flow.readers([array]) == [reader] and [*numbers(reader.reads)].count(array) == 1


def _alone(psum: Step, k: int) -> Step:
    """A psum of one array of several, for which no product waits."""
    total = turns.of_some(psum, [i == k for i in range(len(psum.writes))], awaited=False)
    assert total is not None
    return total


def _of_row(total: Step) -> Step:
    """A psum of one row of what it sums."""
    eqn = total.eqn
    assert eqn is not None
    stack = _compat.type_of(eqn.invars[0])
    with eqn.ctx.manager:
        closed = jax.make_jaxpr(lambda x: _bound(total, x[0]))(stack)
    return dataclasses.replace(total, eqn=closed.jaxpr.eqns[-1].replace(ctx=eqn.ctx))


def _summing(scan: Step, rows: Sequence[_Row]) -> Step:
    """A scan that sums some rows in the turn that makes each."""
    assert scan.eqn is not None
    primitive, params = scan.eqn.primitive, scan.eqn.params
    program: core.ClosedJaxpr = params["jaxpr"]
    writes = [*scan.writes]

    def turn(*args: jax.Array) -> list[jax.Array]:
        results = core.jaxpr_as_fun(program)(*args)
        for place, converts, total in rows:
            for step in reversed(converts):
                assert step.eqn is not None
                results[place] = results[place].astype(step.eqn.params["new_dtype"])
            results[place] = _bound(total, results[place])
        return results

    def loop(*args: jax.Array) -> Any:
        summing = {**params, "jaxpr": jax.make_jaxpr(turn)(*program.in_avals)}
        return primitive.bind(*args, **primitive.get_bind_params(summing))

    with scan.eqn.ctx.manager:
        closed = jax.make_jaxpr(loop)(*map(_compat.type_of, scan.eqn.invars))
    for place, _, total in rows:
        writes[place] = total.writes[0]
    (eqn,) = closed.jaxpr.eqns
    return dataclasses.replace(scan, eqn=eqn.replace(ctx=scan.eqn.ctx), writes=tuple(writes))


def _bound(total: Step, x: jax.Array) -> jax.Array:
    assert total.eqn is not None
    (result,) = total.eqn.primitive.bind(x, **total.eqn.params)
    return result


def _without(step: Step, results: Set[int]) -> list[Step]:
    """A psum without what is summed apart, by the results' numbers; others as they are."""
    if not step.totals or results.isdisjoint(step.writes):
        return [step]
    kept = turns.of_some(step, [number not in results for number in step.writes])
    return [kept] if kept else []


def _times(total: Step) -> tuple[float, float] | None:
    """For how long a sum stops the core, and what it takes beside products (modelled); None if it
    cannot run beside any.
    """
    chip = chips.current()
    if by_xla := collective_times.beside_by_xla(total, chip):
        return by_xla, by_xla
    found = collective_times.on_either(total, chip)
    return found and found[:2]
