"""What a loop's turn needs first, asked for in the turn before; what it makes last, summed behind.

XLA keeps the turns of a loop apart: what a turn starts it ends. So of the gathers of a layer's
weights, those that its first products need have nothing beside them, though a SparseCore, or XLA
itself on v5e and 7x, could run them beside the products of the layer before; and in a backward pass
the scatter of the gradient that a turn makes last has nothing left to run beside, though the next
turn has:

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
of a second layer, and for its last gradients before they are summed (`override_report` says how
much). `lowering.loops` says which gathers and scatters these are, and when two turns become one, so
that the weights of both have places of their own; then what a turn computes is held twice.

Barriers keep each scatter of a turn under way beside products (`lowering.chain`): first the turn's
own, then those that the turn before has left to it; or these first, where there are no gathers and
they end before the turn has made a gradient.
"""

import functools
import itertools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, mlir
from jax.interpreters.mlir import ir

from pallas_collectives import _compat
from pallas_collectives.annotations import Number
from pallas_collectives.backends.plans import IN_PAIRS, IS_AHEAD, IS_BEHIND
from pallas_collectives.lowering import collective_times, gradient_sums, placed, questions, turns
from pallas_collectives.lowering.chain import Chain, Sum
from pallas_collectives.lowering.loops import NO_PRODUCTS, Loop
from pallas_collectives.lowering.order import Timetable
from pallas_collectives.lowering.turns import Step, Value, numbers
from pallas_collectives.topology import chips

Values = dict[int, Any]  # by their numbers in a `Loop`

# How many times as much kernels of products and exchanges are to save as another order does, or
# wires: by `step`, of `tensor` with its gradient for v5p:2x2x2, where the models say 1.21 of an
# order, a backward pass took 0.3 ms longer so.
_BEYOND = 1.25


@functools.cache
def register() -> None:
    """Has scans lowered so."""
    scan = _compat.ruled(["scan"])["scan"]
    by_jax = _compat.lowering(scan)

    def lowering(
        ctx: mlir.LoweringRuleContext, *args: ir.Value, **params: Any
    ) -> Sequence[ir.Value]:
        length, symbols = params["length"], ctx.dim_var_values  # symbols as in `jax.export`
        if symbols or not length or not questions.holds_any(params["jaxpr"]):
            return by_jax(ctx, *args, **params)
        with placed.devices_known(ctx):
            found = rewritten(Loop.of(params, len(args)))
        if found is None:
            return by_jax(ctx, *args, **params)
        return mlir.lower_fun(found.run, multiple_results=True)(ctx, *args)

    _compat.register(scan, lowering=lowering)


def rewritten(loop: Loop) -> "Rewritten | None":
    """A loop as it is best lowered, where it is known where devices are; None for as written.

    What has but one turn asks for nothing ahead and leaves nothing.
    """
    written, loop = loop, gradient_sums.placed(loop.with_tokens().summed_once())
    if bare := loop.bare():
        return Rewritten(loop, lax_keeps=bare)
    loop = loop.with_gradients()
    in_order, fused = loop.in_order(), loop.fused()
    if fused and fused.saves < _BEYOND * max(in_order.saves if in_order else 0.0, fused.lost):
        fused = None
    if fused:
        loop = fused.loop
        for step in fused.unwired:
            collective_times.leave_out(step, "in one kernel with its product it takes less time")
    elif in_order:
        return Rewritten(loop, in_order=in_order)
    early, late = (loop.early(), loop.late()) if loop.params["length"] > 1 else ([], [])
    sums = loop.sums()
    as_written = loop is written and not early and not sums
    return None if as_written else Rewritten(loop, early, late, sums)


class Rewritten:
    """A loop whose turns ask for some gathers a turn ahead, and leave some scatters to the next.

    Args:
      loop: as it was written.
      early: the gathers to ask for ahead.
      late: the scatters to leave.
      sums: seconds that each scatter takes which a SparseCore runs; those of `late` are among them.
      lax_keeps: what lax is to serve.
      in_order: a turn's steps in another order than they were written.
    """

    def __init__(
        self,
        loop: Loop,
        early: Sequence[Step] = (),
        late: Sequence[Step] = (),
        sums: Mapping[Step, float] = types.MappingProxyType({}),
        lax_keeps: Sequence[Step] = (),
        in_order: Timetable | None = None,
    ):
        self.loop, self.early, self.seconds, self.lax_keeps = loop, early, sums, lax_keeps
        self.in_order = in_order
        self.in_pairs = loop.goes_in_pairs(early)
        self.late = {scatter: loop.to_ys(scatter) for scatter in late}  # and what hands them on
        self.own = {s: loop.to_ys(s) or [s] for s in sums if s not in late}
        # By number: what a turn does for the next one, and what it leaves to it.
        self.brought = [number for step in early for number in step.writes]
        self.asked = [-1 - k for k in range(len(self.brought))]
        self.made = [scatter.reads[0] for scatter in late]
        self.left = [-1 - len(self.brought) - k for k in range(len(late))]
        behind = [step for steps in self.late.values() for step in steps]
        self.types = {number: kind for step in behind for number, kind in step.types.items()}
        summed = {*loop.in_ys(behind)}
        self.shifted = [n for n in dict.fromkeys(numbers(loop.ys)) if n in summed]

    def once(self, *args: jax.Array) -> list[Any]:
        """The results of a loop of one turn that carries nothing on, of its xs."""
        values = dict(zip(self.loop.x, args, strict=True))
        self._compute(values)
        return [x.val if isinstance(x, Value) else values[x] for x in self.loop.results]

    def run(self, *args: jax.Array) -> list[jax.Array]:
        """The results, of consts, carry and xs."""
        loop, length = self.loop, self.loop.params["length"]
        n_consts, n_carry = len(loop.consts), len(loop.carry)
        consts = dict(zip(loop.consts, args[:n_consts], strict=True))
        xs = dict(zip(loop.x, args[n_consts + n_carry :], strict=True))

        def turn(state: Any, x: Any) -> Any:
            (carry, whole, gradients, stacks), (before, here, following, own) = state, x
            values = consts | dict(zip(loop.carry, carry, strict=True)) | own
            values |= {stack: xs[slice_] for slice_, stack in loop.in_place.items()}
            if loop.turn is not None:
                values[loop.turn] = here[None]
            values.update(zip(self.brought, whole, strict=True))
            values.update(zip(self.left, gradients, strict=True))
            values.update(zip(self.asked, self._ask(consts, xs, following), strict=True))
            self._compute(values)
            results = [
                x.val if isinstance(x, Value) else None if x in self.shifted else values[x]
                for x in loop.results
            ]
            state = (
                results[:n_carry],
                [values[number] for number in self.asked],
                [values[number] for number in self.made],
                self._written(stacks, values, before),
            )
            return state, results[n_carry:]

        backwards = loop.params["reverse"]
        first, last, step = (length - 1, 0, -1) if backwards else (0, length - 1, 1)
        all_turns = jnp.arange(length, dtype=jnp.int32)
        before, following = (jnp.clip(all_turns + k, 0, length - 1) for k in (-step, step))
        rows = [self.types[number] for number in self.shifted]
        state = (
            [*args[n_consts : n_consts + n_carry]],
            self._ask(consts, xs, jnp.int32(first)),
            [ad.zeros_like_aval(self.types[number]) for number in self.made],
            [jnp.broadcast_to(ad.zeros_like_aval(row), (length, *row.shape)) for row in rows],
        )
        options = {name: loop.params[name] for name in ("length", "reverse", "unroll")}
        if self.in_pairs:
            options["unroll"] = max(2, options["unroll"])
        state, ys = lax.scan(turn, state, (before, all_turns, following, xs), **options)
        carry, _, gradients, stacks = state
        summed: Values = {}
        for scatter, gradient in zip(self.late, gradients, strict=True):
            summed |= self._sum(scatter, gradient)
        stacks = self._written(stacks, summed, jnp.int32(last))
        stacked = dict(zip(self.shifted, stacks, strict=True))
        pairs = zip(loop.ys, ys, strict=True)
        whole = [stacked[n] if y is None else y for n, y in pairs]
        return [*carry, *map(self._gathered, loop.ys, whole)]

    def _gathered(self, y: Any, stack: jax.Array) -> jax.Array:
        """What all turns have made of a result, where they have scattered it."""
        gather = None if isinstance(y, Value) else self.loop.gathers.get(y)
        if gather is None:
            return stack
        values = {y: stack}
        gather.run(values)
        return values[gather.writes[0]]

    def _ask(self, consts: Values, xs: Values, turn: Number) -> list[jax.Array]:
        """What the gathers to ask for ahead bring, of a turn."""
        asking = self.loop.of_xs(self.early)
        needed = {x for step in asking for x in numbers(step.reads)}
        values = consts | {
            number: lax.dynamic_index_in_dim(x, turn, keepdims=False)
            for number, x in xs.items()
            if number in needed
        }
        asks = {"ahead": IN_PAIRS if self.in_pairs else IS_AHEAD}
        for step in asking:
            step.run(values, **(asks | self._read(step) if step in self.early else {}))
        return [values[number] for number in self.brought]

    def _compute(self, values: Values) -> None:
        """Runs the rest of a turn, its sums and those left to it one behind the other."""
        if self.in_order:
            for step in self.in_order.steps:
                step.run(values, **self._here(step))
            return
        elapsed = self.loop.elapsed(chips.current())
        chain = Chain(values, elapsed[-1])
        gradients = self.loop.gradients_of([*self.late, *self.own])
        late = {step for steps in self.late.values() for step in steps}
        handed_on = {step for steps in self.own.values() for step in steps}
        tail = self.loop.behind(self.own) - handed_on
        computed: set[int] = set()
        # A SparseCore without gathers is free until the turn has made its first gradient.
        first = next(
            (now for step, now in zip(self.loop.steps, elapsed, strict=False) if step in self.own),
            0.0,
        )
        left = sum(self.seconds[scatter] for scatter in self.late)
        at_first = not self.own or (not self.loop.gathering and left <= first)
        last = None if at_first else next(reversed(self.own))

        def add(scatter: Step, gradient: int, run: Callable[[], None], now: float) -> None:
            brought = self.own.get(scatter) or self.late[scatter]
            results = self.loop.in_ys(brought) or [*scatter.writes]
            chain.add(Sum(gradient, results, self.seconds[scatter], run), now)

        def add_late(now: float) -> None:
            for scatter, gradient in zip(self.late, self.left, strict=True):

                def run(scatter: Step = scatter, gradient: int = gradient) -> None:
                    values.update(self._sum(scatter, values[gradient]))

                add(scatter, gradient, run, now)

        def run_all(steps: Iterable[Step]) -> None:
            for step in steps:
                step.run(values, **self._here(step))

        if at_first:
            add_late(elapsed[0])
        for step, (now, then) in zip(self.loop.steps, itertools.pairwise(elapsed), strict=True):
            if step in self.own:
                add(step, step.reads[0], functools.partial(run_all, self.own[step]), now)
                if step is last:
                    add_late(now)
            elif not any(step in others for others in (handed_on, late, self.early, tail)):
                run_all([step])
                computed.update(step.writes)
                if step.multiplies and gradients.isdisjoint(step.writes):
                    chain.passed(step, then)
        ends = [*numbers(self.loop.carried), *self.made]
        chain.end(number for number in ends if number in computed)
        run_all(step for step in self.loop.steps if step in tail)

    def _here(self, step: Step) -> dict[str, Any]:
        """What a collective that stays in its turn asks for, otherwise than it did.

        JAX lowers the new loop as it would any other: what has been decided is not so twice.
        """
        return self._otherwise(step) | ({"fuses": False} if step.fuses or step.sums else {})

    def _otherwise(self, step: Step) -> dict[str, Any]:
        """The same, but for whether it runs with a product."""
        if step in self.lax_keeps and collective_times.wired(step):
            return {"ahead": "", "awaited": True}
        if step in self.lax_keeps:
            return turns.by_lax(NO_PRODUCTS)
        there = {"ahead": "", **self._read(step)}
        if step in self.loop.crowded_out:
            return there | {"awaited": True}
        if self.in_order and step.awaited:
            plain = {"wire": None} if step in self.in_order.unwired else {}
            if plain:
                collective_times.leave_out(step, "the order of its turn is as short without")
            return {"awaited": step not in self.in_order.away, **there, **plain}
        return there if step.how or step.sums or step.awaited else {}

    def _read(self, step: Step) -> dict[str, Any]:
        """What a collective is told of those that read its result."""
        return {"for_products": self.loop.feeds_products(step)}

    def _sum(self, scatter: Step, gradient: jax.Array) -> Values:
        """What a scatter that was left makes of its gradient, as a part of y."""
        values = {scatter.reads[0]: gradient}
        for step in self.late[scatter]:
            step.run(values, **({"ahead": IS_BEHIND} if step is scatter else {}))
        return {number: values[number] for number in self.shifted if number in values}

    def _written(
        self, stacks: Sequence[jax.Array], values: Values, turn: Number
    ) -> list[jax.Array]:
        """The stacked results with what was summed of this turn."""
        pairs = zip(stacks, self.shifted, strict=True)
        return [lax.dynamic_update_index_in_dim(s, values[n], turn, 0) for s, n in pairs]
