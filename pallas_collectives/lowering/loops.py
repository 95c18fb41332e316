"""What a loop's turn can ask for in the turn before, and what it can leave to the one behind.

A gather can be asked for so where its operand is a part of the scan's `xs`: nothing that the turn
before computes. It is where a SparseCore runs it, or XLA beside products, and the products before
its first use would hide less than half of it (modelled); the others find enough beside them within
their turn. A scatter can be left for the next turn where its result goes to the scan's stacked
results alone. It is where a SparseCore runs it, the products behind it take less time than what is
then under way (modelled), and what all turns would wait is more than the last one's scatter takes,
which has nothing beside.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from pallas_collectives import _compat
from pallas_collectives.lowering import (
    collective_times,
    dataflow,
    fusing,
    fusing_gradients,
    in_place,
    order,
    questions,
    turns,
)
from pallas_collectives.lowering.dataflow import Dataflow
from pallas_collectives.lowering.order import Call, Timetable
from pallas_collectives.lowering.turns import Flat, Step, numbers
from pallas_collectives.topology import chips
from pallas_collectives.tuning import overlaps

# The share of a turn's products that is worth compiling a second turn with it.
_WORTH = 0.1

# How many times as long as a turn's products its collectives may take for a SparseCore to be worth
# it, and what is said of others.
_BARE = 4.0
NO_PRODUCTS = "the products of its step, or of its loop's turn, would hide too little of it"

# What is said of sums whose results turns only add up.
ADDED_UP = "XLA adds up what its loop's turns sum, and sums it once behind them"

_HANDS_ON = operator.attrgetter("hands_on")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan; the values of a turn have numbers."""

    params: dict[str, Any]
    steps: list[Step]
    consts: tuple[int, ...]
    carry: tuple[int, ...]
    x: tuple[int, ...]
    results: list[Any]  # the new carry, and y
    gathers: dict[int, Step] = dataclasses.field(default_factory=dict)  # behind all turns, by y
    in_place: dict[int, int] = dataclasses.field(default_factory=dict)  # all turns' x, by x
    turn: int | None = None  # which it is, int32[1], where kernels read those
    apart: bool = False  # whether no two turns may be one: XLA sums behind them all

    @classmethod
    def of(cls, params: dict[str, Any], count: int) -> "Loop":
        """The scan of a primitive with so many operands."""
        return cls._of(params["jaxpr"], params, *_compat.scan_parts(params, count))

    @classmethod
    def once(cls, program: core.ClosedJaxpr) -> "Loop":
        """A program as the one turn of a loop that carries nothing on."""
        return cls._of(program, {"length": 1}, 0, 0)

    @classmethod
    def _of(
        cls, turn: core.ClosedJaxpr, params: dict[str, Any], n_consts: int, n_carry: int
    ) -> "Loop":
        flat = Flat.of(turn)
        reads = flat.numbers(len(turn.jaxpr.invars))
        results = flat.add(turn, reads)
        carry_to = n_consts + n_carry
        parts = reads[:n_consts], reads[n_consts:carry_to], reads[carry_to:]
        return cls(params, flat.steps, *parts, results)

    def with_tokens(self) -> "Loop":
        """The same, whose gathers of what the last turn hands on are awaited, as those of tokens.

        While a turn is traced, that is an operand like weights (`choice.asked`). Weights it is
        where a product takes it for that, as where a loop's turns are steps of training.
        """
        origins, handed = dataflow.origins(self.steps), {*self.carry}
        weights = {origins.get(w, w) for w in map(fusing.weights_of, self.steps) if w is not None}
        steps = []
        for step in self.steps:
            first = [origins.get(x, x) for x in numbers(step.reads[:1])]  # others may be places
            tokens = not handed.isdisjoint(first) and weights.isdisjoint(step.writes)
            steps.append(turns.awaiting(step) if tokens else step)
        same = all(a is b for a, b in zip(steps, self.steps, strict=True))
        return self if same else dataclasses.replace(self, steps=steps)

    def summed_once(self) -> "Loop":
        """The same, with lax's sums where turns do no more than add up their results.

        XLA has the turns add up the terms, and sums over devices once, behind the loop; but not
        where each turn of its loop is several of the scan's.
        """
        if (length := self.params["length"]) == 1 or 1 < self.params["unroll"] < length:
            return self
        added_up = [s for s in self.steps if s.adds and all(self._adds_up(s, x) for x in s.writes)]
        early = self.early()
        ours = all(map(self._takes.get, early))  # XLA's own gathers are worth less than its one sum
        if not added_up or (ours and self.goes_in_pairs(early)):
            return self
        by_lax = turns.by_lax(ADDED_UP) | {"fuses": False}
        steps = [turns.asking(s, **by_lax) if s in added_up else s for s in self.steps]
        return dataclasses.replace(self, steps=steps, apart=True)

    def _adds_up(self, step: Step, total: int) -> bool:
        """Whether a step's result, as it is or converted, goes to a sum in the carry alone."""
        results = [*numbers(self.results)]
        while results.count(total) == 0:
            readers = self._flow.readers([total])
            if len(readers) != 1 or (reader := readers[0]).eqn is None:
                return False
            step, (total, *_) = reader, reader.writes
            if fusing.adds_two(reader):
                ends = zip(self.carry, self.carried, strict=True)
                into = [x for x, end in ends if end == total and x in step.reads]
                alone = self._flow.readers(into) == [step] and not self._flow.readers([total])
                return alone and results.count(total) == 1 and into[0] not in results
            if reader.eqn.primitive.name != questions.CONVERT:
                return False
        return False

    @functools.cached_property
    def _flow(self) -> Dataflow:
        return Dataflow(self.steps)

    @functools.cached_property
    def _away(self) -> dict[Step, float]:
        """What gathers and scatters take on a SparseCore; first read where devices are known."""
        chip = chips.current()
        return {s: collective_times.under_way(s, chip) for s in self.steps if s.how or s.sums}

    @functools.cached_property
    def crowded_out(self) -> frozenset[Step]:
        """The sums that the core adds in less time than it would wait for all on a SparseCore.

        That adds along a ring alone, where the core uses all links of a torus.
        """
        if any(step.is_opaque and not step.multiplies for step in self.steps):
            return frozenset()
        waits = sum(self._away.values()) - self.elapsed(chips.current())[-1] / turns.COUNTED
        if waits <= 0:
            return frozenset()
        here = {s: collective_times.on_core(s) for s, there in self._away.items() if there}
        found = set()
        for step, takes in sorted(here.items(), key=lambda pair: pair[1] / self._away[pair[0]]):
            if step.sums and 0 < takes < min(waits, self._away[step]):
                found.add(step)
                waits -= self._away[step]
        return frozenset(found)

    @functools.cached_property
    def _takes(self) -> dict[Step, float]:
        """The same; 0 of what is left to the core."""
        return {s: 0.0 if s in self.crowded_out else there for s, there in self._away.items()}

    @functools.cached_property
    def _beside(self) -> dict[Step, float]:
        """What gathers take beside products: on a SparseCore, or by XLA.

        XLA puts v5e's into fusions with products. One whose weights a turn reads twice, as in a
        backward pass, it then carries on in all that lie between, which takes longer: by `step`,
        `fsdp` with its gradient took 286.2 ms for v5e:4x4, for 271.9.
        """
        chip = chips.current()
        once = overlaps.engine("all_gather", chip.name) == overlaps.IN_FUSIONS

        def by_xla(step: Step) -> float:
            able = not once or len(self._uses(step)) == 1
            return collective_times.ahead_by_xla(step, chip) if able else 0.0

        return {step: self._takes[step] or by_xla(step) for step in self.steps if step.how}

    @property
    def gathering(self) -> float:
        """What the gathers of weights take on a SparseCore."""
        return sum(seconds for step, seconds in self._takes.items() if step.how)

    def bare(self) -> list[Step]:
        """The gathers and scatters of a turn with too few products to run beside them.

        Where no product fills a turn, or more than plain ones, what it takes is not known.
        """
        products = self.elapsed(chips.current())[-1]
        if not products or any(step.is_opaque for step in self.steps):
            return []
        chip = chips.current()
        takes = {s: there or collective_times.by_xla(s, chip) for s, there in self._away.items()}
        bare = _BARE * products < sum(takes.values())
        return [step for step, there in takes.items() if there] if bare else []

    def fused(self) -> "Fused | None":
        """The same with products in one kernel with tokens' exchanges; None where it is no shorter.

        So it is where XLA for TPUs hides more of them beside products than kernels do, and where
        it puts gathers of weights into fusions with products, which kernels are not: by `step`,
        `fsdp_tensor` with its gradient for v5e:4x4 took 82.4 ms with kernels, for 81.7.
        """
        in_fusions = overlaps.engine("all_gather", chips.current().name) == overlaps.IN_FUSIONS
        if any(step.keeps_order or (in_fusions and step.how) for step in self.steps):
            return None
        slices = self.x if self.params["length"] > 1 else ()
        found = fusing.fused(self.steps, self.results, self.carried, slices)
        if not found:
            return None
        steps, stacks, number = in_place.read_in_place(found.steps, slices, self.params["length"])
        turn = number if stacks else None
        loop = dataclasses.replace(self, steps=steps, in_place=stacks, turn=turn)
        saves = found.saves - self._hidden_by_xla()
        return Fused(loop, saves, found.unwired) if saves > 0 else None

    def with_gradients(self) -> "Loop":
        """The same with weights' gradients in one kernel with scatters that would stop the core.

        Products must be left to hide the gathers that XLA runs beside them.
        """
        chip = chips.current()
        sums = (step for step in self.steps if step.sums and not self._away[step])
        scatters = [step for step in sums if not collective_times.beside_by_xla(step, chip)]
        if not scatters or any(step.keeps_order for step in self.steps):
            return self
        gathers = sum(collective_times.beside_by_xla(step, chip) for step in self.steps if step.how)
        products = sum(step.seconds(chip) for step in self.steps if step.is_product)
        spare = products - turns.COUNTED * gathers
        found = fusing_gradients.fused(self.steps, scatters, self.results, spare)
        return dataclasses.replace(self, steps=found) if found else self

    def _hidden_by_xla(self) -> float:
        """The seconds of tokens' exchanges that XLA can run beside other products."""
        chip = chips.current()
        takes = {s: collective_times.beside_by_xla(s, chip) for s in self.steps if s.awaited}
        away = {s: seconds for s, seconds in takes.items() if seconds}
        return order.hidden(self.steps, away, chip) if away else 0.0

    def in_order(self) -> Timetable | None:
        """The quickest order of a turn whose products wait for exchanges, some on a SparseCore.

        Beside them it runs what weights need, in this turn. None where all exchanges stay on the
        core; where kernels fill the turn, of which it is not known what they take; and where
        effects have an order of their own.
        """
        if any(step.is_opaque or step.keeps_order for step in self.steps):
            return None
        chip = chips.current()
        found = {s: collective_times.on_either(s, chip) for s in self.steps if s.awaited}
        tokens = {step: Call(*seconds) for step, seconds in found.items() if seconds is not None}
        weights = {s: Call(math.inf, takes) for s, takes in self._takes.items() if takes}
        return order.best(self.steps, tokens, weights, chip) if tokens else None

    def early(self) -> list[Step]:
        """The gathers to ask for a turn ahead: their own turn would hide less than half of them.

        On a SparseCore one runs behind the other. Nothing hides those of the first turn, which must
        be less than all turns save.
        """
        *elapsed, total = (each / turns.COUNTED for each in self.elapsed(chips.current()))
        gathers = [(elapsed[self._uses(s)[0]], s) for s in self.steps if s.how]
        found, busy = [], 0.0
        for needed, step in sorted(gathers, key=lambda pair: pair[0]):
            takes = self._beside[step]
            hidden = min(takes, max(0.0, needed - busy))
            saves = self.params["length"] * (min(takes, total) - hidden)
            asks = needed < total and 2 * hidden < takes < saves
            if asks and not self._is_kept(step) and self.of_xs([step]):
                found.append(step)
            else:
                busy += self._takes[step]
        return found

    def goes_in_pairs(self, early: Iterable[Step]) -> bool:
        """Whether two turns are to be one turn of the loop, for what is asked for ahead.

        What is brought for the next turn has the place of what was brought for this one, so XLA
        begins behind the last product that reads this. Two turns in one have a place for each.
        """
        if self.apart:
            return False
        ends = self.elapsed(chips.current())
        read = sorted((ends[self._uses(step)[-1] + 1], self._beside[step]) for step in early)
        busy = 0.0
        for begins, takes in read:
            busy = max(begins, busy) + takes
        return busy - ends[-1] > _WORTH * ends[-1]

    def sums(self) -> dict[Step, float]:
        """The sums that a SparseCore runs and no product waits for: what each takes."""
        takes = ((s, seconds) for s, seconds in self._takes.items() if s.sums and seconds)
        return {s: seconds for s, seconds in takes if self.waited.isdisjoint(s.writes)}

    @functools.cached_property
    def waited(self) -> set[int]:
        """What is needed by what takes long; first read where devices are known."""
        chip = chips.current()
        long = [
            step
            for step in self.steps
            if self._takes.get(step) or step.is_opaque or step.has_effects or step.seconds(chip)
        ]
        return {*self._flow.ancestors(x for step in long for x in numbers(step.reads))}

    def behind(self, scatters: Iterable[Step]) -> set[Step]:
        """The steps that need what scatters bring."""
        brought = (number for scatter in scatters for number in scatter.writes)
        return {*self._flow.readers(self._flow.descendants(brought))}

    def late(self) -> list[Step]:
        """The scatters to leave for the next turn."""
        found = []
        *elapsed, total = self.elapsed(chips.current())
        busy = self.gathering
        for made, step in zip(elapsed, self.steps, strict=True):
            if not step.sums:
                continue
            takes = self._takes[step]
            done = max(busy, made) + takes
            if takes and (done - total) * self.params["length"] > takes and self.to_ys(step):
                found.append(step)
            else:
                busy = done
        return found

    def elapsed(self, chip: chips.Chip) -> list[float]:
        """What products take before each step, and in all."""
        each = (step.seconds(chip) for step in self.steps)
        return [*itertools.accumulate(each, initial=0.0)]

    def _handed_on(self, step: Step) -> set[int]:
        """What a step brings, and what steps that only hand on make of it."""
        return {*self._flow.descendants(step.writes, _HANDS_ON)}

    def _uses(self, gather: Step) -> list[int]:
        """The numbers of the steps that compute with what a gather brings."""
        readers = self._flow.readers(self._handed_on(gather))
        uses = [self._flow.places[step] for step in readers if not step.hands_on]
        return uses or [len(self.steps) - 1]

    def feeds_products(self, gather: Step) -> bool:
        """Whether products alone read what a gather, of weights or of tokens, brings."""
        if not (gather.how or gather.awaited) or self._is_kept(gather):
            return False
        return all(self.steps[k].multiplies for k in self._uses(gather))

    def _is_kept(self, gather: Step) -> bool:
        """Whether what a gather brings is a result, too: of a turn, or kept for derivatives.

        Or it updates what is carried on, as keys and values do a cache.
        """
        brought = self._handed_on(gather)
        updates = any(step.updates for step in self._flow.readers(brought))
        return updates or not brought.isdisjoint(numbers(self.results))

    def of_xs(self, gathers: Iterable[Step]) -> list[Step]:
        """The steps that bring gathers' operands, and these; none where they need more."""
        wanted = {*gathers}
        reads = (x for gather in wanted for x in numbers(gather.reads))
        needed = {*self._flow.ancestors(reads, lambda step: step.hands_on or step in wanted)}
        makers = {self._flow.makers[x] for x in needed & self._flow.makers.keys()} - wanted
        able = all(map(_HANDS_ON, makers)) and needed.isdisjoint(self.carry)
        return self._flow.by_place(wanted | makers) if able and needed.intersection(self.x) else []

    @property
    def carried(self) -> list[Any]:
        """What the next turn has as its carry."""
        return self.results[: len(self.carry)]

    @property
    def ys(self) -> list[Any]:
        return self.results[len(self.carry) :]

    def stacks(self, total: Step) -> bool:
        """Whether a sum is needed behind several turns alone."""
        return self.params["length"] > 1 and bool(self.to_ys(total))

    def to_ys(self, scatter: Step) -> list[Step]:
        """A scatter and the steps that hand its result on to y; none where others need it."""
        brought = self._handed_on(scatter)
        readers = self._flow.readers(brought)
        if not all(s.eqn and s.hands_on and brought.issuperset(numbers(s.reads)) for s in readers):
            return []
        in_carry = brought.intersection(numbers(self.carried))
        chain = [scatter, *readers]
        return chain if self.in_ys(chain) and not in_carry else []

    def gradients_of(self, scatters: Iterable[Step]) -> set[int]:
        """What these read, and what steps that only hand on make it of."""
        return {*self._flow.ancestors((scatter.reads[0] for scatter in scatters), _HANDS_ON)}

    def in_ys(self, steps: Sequence[Step]) -> list[int]:
        """What these write of y."""
        ys = {*numbers(self.ys)}
        return [number for step in steps for number in step.writes if number in ys]


class Fused(NamedTuple):
    """A loop with products in one kernel with their collectives.

    Attributes:
      loop: that is so.
      saves: seconds, against all tokens' collectives on the core without wires; less what XLA would
        have hidden.
      unwired: the collectives in kernels that have a wire, and go without.
    """

    loop: Loop
    saves: float
    unwired: Sequence[Step]

    @property
    def lost(self) -> float:
        """The seconds that these wires would have saved."""
        return sum(collective_times.saved_by_wire(step) for step in self.unwired if step.awaited)
