"""What a loop's turn needs first, asked for in the turn before; what it makes last, summed behind.

XLA keeps the turns of a loop apart: what a turn starts it ends. So of the gathers of a layer's
weights, those that its first products need have nothing beside them, though a SparseCore could run
them beside the products of the layer before; and in a backward pass the scatter of the gradient
that a turn makes last has nothing left to run beside, though the next turn has:

    turn      gathers                                         computes   scatters gradients
    (before)  the first weights of layer 0
    0         the other weights of 0, the first ones of 1     layer 0    the first of 0
    1         the other weights of 1, the first ones of 2     layer 1    the last of 0, first of 1
    ...
    n - 1     the others; the first ones of n - 1 once more   layer n-1  the last of n - 2, ...
    (behind)                                                             the last of n - 1

This is done while a scan is lowered, which is behind derivatives, vmap and remat: they see the scan
as it was written, a backward pass is a scan of its own, and nothing more is saved for one. Values
are the same to the last bit. What is carried on from turn to turn is memory: for the first weights
of a second layer, and for its last gradients before they are summed (`explain` says how much).

XLA's scheduler allows for the time of a sum on a SparseCore (libtpu 0.0.50, by its log). But it
orders a turn from its end, and where nothing else decides, as it found the instructions. What reads
a gather is a product, so that the gather's end comes late. What reads a scatter only writes a row
of the scan's results: where that was found just behind the scatter, the scatter's end comes at
once, and the core waits. Barriers move its end (`lowering.chain`).

A turn's program can also say which products are to run beside each scatter: groups, which XLA
schedules together (`sparsecore.scheduled`). It refuses to compile some (`x = tanh(x @ w)` alone in
a turn, for one), so scatters have groups, and no barriers, only if a caller says so
(`override_lax(ahead="grouped")`).

A gather can be asked for so where its operand is a part of the scan's `xs`: nothing that the turn
before computes. It is where a SparseCore runs it, and the products before its first use take less
time than it does (modelled); the others find enough beside them within their turn. A scatter can be
left for the next turn where its result goes to the scan's stacked results alone. It is where a
SparseCore runs it, the products behind it take less time than what is then under way (modelled),
and what all turns would wait is more than the last one's scatter takes, which has nothing beside.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, mlir
from jax.interpreters.mlir import ir

from pallas_collectives import _compat
from pallas_collectives.annotations import Number
from pallas_collectives.backends import slices
from pallas_collectives.backends.plans import IS_AHEAD, IS_BEHIND
from pallas_collectives.lowering import turns
from pallas_collectives.lowering.chain import Chain, Sum
from pallas_collectives.lowering.turns import Flat, Step, Value, numbers
from pallas_collectives.topology import chips, placement


@functools.cache
def register() -> None:
    """Has scans lowered so."""
    scan = _compat.ruled(["scan"])["scan"]
    by_jax = _compat.lowering(scan)

    def lowering(
        ctx: mlir.LoweringRuleContext, *args: ir.Value, **params: Any
    ) -> Sequence[ir.Value]:
        length = params["length"]  # a symbol in `jax.export`, where it may be any
        if not isinstance(length, int) or length < 2 or not turns.holds_any(params["jaxpr"]):
            return by_jax(ctx, *args, **params)
        loop, mesh = Loop.of(params, len(args)), _compat.mesh_of(ctx)
        with placement.scope(placement.of_mesh(mesh)), slices.scope(mesh):
            early, late, sums = loop.early(), loop.late(), loop.sums()
        if not early and not late and not sums:
            return by_jax(ctx, *args, **params)
        run = functools.partial(loop.run, early, late)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *args)

    _compat.register(scan, lowering=lowering)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan; the values of a turn have numbers."""

    params: dict[str, Any]
    steps: list[Step]
    consts: tuple[int, ...]
    carry: tuple[int, ...]
    x: tuple[int, ...]
    results: list[Any]  # the new carry, and y

    @classmethod
    def of(cls, params: dict[str, Any], count: int) -> "Loop":
        """The scan of a primitive with so many operands."""
        n_consts, n_carry = _compat.scan_parts(params, count)
        flat = Flat()
        reads = flat.numbers(count)
        results = flat.add(params["jaxpr"], reads)
        carry_to = n_consts + n_carry
        parts = reads[:n_consts], reads[n_consts:carry_to], reads[carry_to:]
        return cls(params, flat.steps, *parts, results)

    def early(self) -> list[Step]:
        """The gathers to ask for a turn ahead."""
        chip = chips.current()
        found, busy = [], 0.0
        *elapsed, total = self._elapsed(chip)
        gathers = [(elapsed[self._first_use(s)], s) for s in self.steps if s.how]
        for needed, step in sorted(gathers, key=lambda pair: pair[0]):
            takes, waits = turns.under_way(step, chip), total > needed
            waits = waits and busy + takes > needed and not self._is_kept(step)
            if takes and waits and self._of_xs([step]):
                found.append(step)
            else:
                busy += takes
        return found

    def sums(self) -> list[Step]:
        """The scatters that a SparseCore runs, and whose results are results of the turn alone."""
        chip = chips.current()
        found = (step for step in self.steps if step.scatters and turns.under_way(step, chip))
        return [step for step in found if self._to_ys(step)]

    def late(self) -> list[Step]:
        """The scatters to leave for the next turn."""
        chip = chips.current()
        found = []
        *elapsed, total = self._elapsed(chip)
        busy = sum(turns.under_way(step, chip) for step in self.steps if step.how)
        for made, step in zip(elapsed, self.steps, strict=True):
            if not step.scatters:
                continue
            takes = turns.under_way(step, chip)
            done = max(busy, made) + takes
            if takes and (done - total) * self.params["length"] > takes and self._to_ys(step):
                found.append(step)
            else:
                busy = done
        return found

    @property
    def _grouped(self) -> bool:
        return any(step.is_grouped for step in self.steps)

    def _elapsed(self, chip: chips.Chip) -> list[float]:
        """What products take before each step, and in all."""
        each = (step.seconds(chip) for step in self.steps)
        return [*itertools.accumulate(each, initial=0.0)]

    def _first_use(self, gather: Step) -> int:
        """The number of the first step that computes with what a gather brings."""
        brought = {*gather.writes}
        for number, step in enumerate(self.steps):
            if brought.intersection(numbers(step.reads)):
                if not step.hands_on:
                    return number
                brought |= {*step.writes}
        return len(self.steps) - 1

    def _is_kept(self, gather: Step) -> bool:
        """Whether what a gather brings is a result, too: of a turn, or kept for derivatives."""
        brought = {*gather.writes}
        for step in self.steps:
            if step.hands_on and brought.intersection(numbers(step.reads)):
                brought |= {*step.writes}
        return not brought.isdisjoint(numbers(self.results))

    def _of_xs(self, gathers: Iterable[Step]) -> list[Step]:
        """The steps that bring gathers' operands, and these; none where they need more."""
        wanted = {*gathers}
        needed = {x for gather in wanted for x in numbers(gather.reads)}
        chain = []
        for step in reversed(self.steps):
            if step in wanted or needed.intersection(step.writes):
                if step not in wanted and not step.hands_on:
                    return []
                chain.append(step)
                needed |= {*numbers(step.reads)}
        of_xs = needed.intersection(self.x) and not needed.intersection(self.carry)
        return chain[::-1] if of_xs else []

    @property
    def _ys(self) -> list[Any]:
        return self.results[len(self.carry) :]

    def _to_ys(self, scatter: Step) -> list[Step]:
        """A scatter and the steps that hand its result on to y; none where others need it."""
        brought, chain = {*scatter.writes}, [scatter]
        for step in self.steps:
            read = {*numbers(step.reads)}
            if step.hands_on and step.eqn is not None and read and read <= brought:
                brought |= {*step.writes}
                chain.append(step)
            elif read & brought:
                return []
        in_carry = brought.intersection(numbers(self.results[: len(self.carry)]))
        return [] if in_carry or not self._in_ys(chain) else chain

    def _in_ys(self, steps: Sequence[Step]) -> list[int]:
        """What these write of y."""
        ys = {*numbers(self._ys)}
        return [number for step in steps for number in step.writes if number in ys]

    def groups(self, late: Sequence[Step]) -> dict[Step, int]:
        """Numbers of what XLA is to run together: a scatter, and the products beside it.

        Products of a group follow one another, none needs another of it, and they stand behind what
        makes the gradient that is scattered. So groups have an order.
        """
        if self.params["unroll"] != 1 or not self._grouped:
            return {}  # unrolled, a group would hold products of several turns
        chip, place = chips.current(), {step: k for k, step in enumerate(self.steps)}
        own = [self._first_use(step) for step in self.steps if step.how]
        moved = dict.fromkeys(late, max(own, default=0))  # behind the turn's own gathers
        runs = self._runs()
        found: dict[Step, int] = {}

        def seconds(run: Sequence[Step]) -> float:
            return sum(step.seconds(chip) for step in run)

        for scatter in [*late, *(s for s in self.steps if s.scatters and s not in moved)]:
            takes, first = turns.under_way(scatter, chip), moved.get(scatter, place[scatter])
            # What makes the gradient that takes the place of a late one's has to come behind it.
            makes = self._makes(scatter) if scatter in moved else None
            behind = [
                [step for step in run if step is not makes]
                for run in runs
                if place[run[0]] >= first and run != [makes]
            ]
            if takes and behind and self._to_ys(scatter):
                enough = (run for run in behind if seconds(run) >= takes)
                chosen = next(enough, max(behind, key=seconds))
                runs = [run for run in runs if chosen[0] not in run]
                found |= dict.fromkeys([scatter, *chosen], len(found))
        return found

    def _makes(self, scatter: Step) -> Step | None:
        """The product that makes what is scattered, if it is handed on alone."""
        wanted = {scatter.reads[0]}
        for step in reversed(self.steps):
            if wanted.intersection(step.writes):
                if step.is_product:
                    return step
                wanted |= {*numbers(step.reads)} if step.hands_on else set()
        return None

    def _runs(self) -> list[list[Step]]:
        """Products that follow one another and do not need one another; all in order."""
        found: list[list[Step]] = []
        made: set[int] = set()  # what comes of a run's products
        for step in self.steps:
            needs = not made.isdisjoint(numbers(step.reads))
            if step.is_product:
                if needs or not found:
                    found.append([])
                    made, needs = set(), True
                found[-1].append(step)
            if needs or step.is_product:
                made |= {*step.writes}
        return found

    def run(self, early: Sequence[Step], late: Sequence[Step], *args: jax.Array) -> list[jax.Array]:
        """The results, of consts, carry and xs, with these gathers asked for a turn ahead, and
        these scatters left for the next turn.
        """
        n_consts, n_carry = len(self.consts), len(self.carry)
        consts = dict(zip(self.consts, args[:n_consts], strict=True))
        xs = dict(zip(self.x, args[n_consts + n_carry :], strict=True))
        chain, length = self._of_xs(early), self.params["length"]
        needed = {x for step in chain for x in numbers(step.reads)}
        brought = [number for step in early for number in step.writes]
        asked = [-1 - k for k in range(len(brought))]  # the numbers of those of the next turn
        left = [-1 - len(brought) - k for k in range(len(late))]  # of the turn before's gradients
        behind = [step for scatter in late for step in self._to_ys(scatter)]
        types = {number: kind for step in behind for number, kind in step.types.items()}
        made = [scatter.reads[0] for scatter in late]
        summed_up = {number for step in behind for number in step.writes}
        shifted = [n for n in dict.fromkeys(numbers(self._ys)) if n in summed_up]
        groups = self.groups(late)

        def ask(turn: Number) -> list[jax.Array]:
            values = consts | {
                number: lax.dynamic_index_in_dim(x, turn, keepdims=False)
                for number, x in xs.items()
                if number in needed
            }
            for step in chain:
                step.run(values, IS_AHEAD if step in early else None)
            return [values[number] for number in brought]

        def sum_up(
            which: Sequence[Step], gradients: Sequence[jax.Array], groups: Mapping[Step, int]
        ) -> dict[int, jax.Array]:
            """What gradients of these, of one turn, are as a part of the results; by number."""
            values = {s.reads[0]: g for s, g in zip(which, gradients, strict=True)}
            for step in (step for scatter in which for step in self._to_ys(scatter)):
                step.run(values, IS_BEHIND if step in late else None, groups.get(step))
            return {number: values[number] for number in shifted if number in values}

        def written(stacks: Sequence[jax.Array], rows: Sequence[jax.Array], turn: Number) -> Any:
            pairs = zip(stacks, rows, strict=True)
            return [lax.dynamic_update_index_in_dim(s, row, turn, 0) for s, row in pairs]

        def turn(state: Any, x: Any) -> Any:
            (carry, whole, gradients, stacks), (before, following, here) = state, x
            values = consts | dict(zip(self.carry, carry, strict=True)) | here
            values.update(zip(brought, whole, strict=True))
            values.update(zip(asked, ask(following), strict=True))
            rest = [step for step in self.steps if step not in early and step not in behind]
            if self._grouped:
                values |= sum_up(late, gradients, groups)
                for step in rest:
                    step.run(values, "" if step.how or step.scatters else None, groups.get(step))
            else:
                chained(rest, values, gradients)
            summed = [values[number] for number in shifted]
            results = [
                x.val if isinstance(x, Value) else None if x in shifted else values[x]
                for x in self.results
            ]
            state = (
                results[:n_carry],
                [values[k] for k in asked],
                [values[k] for k in made],
                written(stacks, summed, before),
            )
            return state, results[n_carry:]

        def chained(
            rest: Sequence[Step], values: dict[int, Any], gradients: Sequence[jax.Array]
        ) -> None:
            """Runs a turn's steps, with its sums and those left to it one behind the other."""
            chip, chain, now = chips.current(), Chain(values), 0.0
            own = {s: self._to_ys(s) for s in self.sums() if s not in late}
            values.update(zip(left, gradients, strict=True))
            to_come = len(own)

            def add(scatter: Step, gradient: int, run: Callable[[], None]) -> None:
                takes = turns.under_way(scatter, chip)
                chain.add(Sum(gradient, self._in_ys(self._to_ys(scatter)), takes, run), now)

            def add_late() -> None:
                for scatter, gradient in zip(late, left, strict=True):

                    def run(scatter: Step = scatter, gradient: int = gradient) -> None:
                        values.update(sum_up([scatter], [values[gradient]], {}))

                    add(scatter, gradient, run)

            def run_all(steps: Sequence[Step]) -> None:
                for step in steps:
                    step.run(values, "" if step.how or step.scatters else None)

            if not own:
                add_late()
            handed_on = {step for steps in own.values() for step in steps}
            for step in rest:
                if step in own:
                    add(step, step.reads[0], functools.partial(run_all, own[step]))
                    to_come -= 1
                    if not to_come:
                        add_late()
                elif step not in handed_on:
                    run_all([step])
                    now += step.seconds(chip)
                    if step.is_product:
                        chain.passed(step, now)
            computed = {number for step in rest for number in step.writes}
            chain.end(n for n in [*numbers(self.results[:n_carry]), *made] if n in computed)

        backwards = self.params["reverse"]
        all_turns = jnp.arange(length, dtype=jnp.int32)
        step = -1 if backwards else 1
        before, following = (jnp.clip(all_turns + k, 0, length - 1) for k in (-step, step))
        first, last = (length - 1, 0) if backwards else (0, length - 1)
        state = (
            [*args[n_consts : n_consts + n_carry]],
            ask(jnp.int32(first)),
            [ad.zeros_like_aval(types[number]) for number in made],
            [
                jnp.broadcast_to(ad.zeros_like_aval(types[n]), (length, *types[n].shape))
                for n in shifted
            ],
        )
        (carry, _, gradients, stacks), ys = lax.scan(
            turn,
            state,
            (before, following, xs),
            length=length,
            reverse=backwards,
            unroll=self.params["unroll"],
        )
        summed = sum_up(late, gradients, {})
        stacks = written(stacks, [summed[n] for n in shifted], jnp.int32(last))
        stacked = dict(zip(shifted, stacks, strict=True))
        pairs = zip(self._ys, ys, strict=True)
        return [*carry, *(stacked[n] if y is None else y for n, y in pairs)]
