"""The order of a turn whose products wait for collectives: which runs beside which products.

Where tokens are exchanged between products, a SparseCore's call has beside it only what needs
nothing of it: another half of the batch, or in a backward pass the gradient of weights. XLA's
scheduler goes by how long it believes a call to be under way, and often starts it with nothing
beside. Here a turn is put in order by what each step takes (modelled): the core takes the first
step, in the program's order, whose operands are there; the SparseCore takes the calls whose results
are needed first, one after the other. Barriers hold that order (`lowering.barrier`): in front of a
product they join one of its operands with what starts or ends there.
"""

import collections
import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pallas_collectives.lowering.dataflow import Dataflow
from pallas_collectives.lowering.turns import COUNTED, Step, numbers
from pallas_collectives.topology.chips import Chip

# How many steps are tried in other orders: that is 1 to 3 seconds of the time to lower.
_TRIED = 400_000

# What of the time with all tokens' exchanges on the core may be left. The second is for turns in
# which a SparseCore serves weights, too, whose gathers XLA otherwise starts as early as it likes:
# by `step`, `fsdp_tensor` unrolled with its gradient for v6e:4x4 took 29.5 ms, for 27.2, where this
# model says 0.96; in two halves, where it says 0.88, it took 8.5 forward, for 9.2.
_WORTH, _WORTH_BESIDE_WEIGHTS = 0.97, 0.93

# And what of that without wires may be left with them: what is packed stays on the core, and stops
# it for more than its transfer. By `step`, of `tensor` for v5p:2x2x2 in two halves over int8, where
# this model says 0.96 with four layers in a turn it took 4.35 ms, for 4.06, and where it says 0.94,
# 4.5 as without.
_WORTH_WIRES = 0.95


class Timetable(NamedTuple):
    """An order of steps.

    Attributes:
      steps: with barriers.
      seconds: that they take.
      away: the collectives among them that run on the SparseCore.
      waitable: the places of products in front of which one was under way.
      unwired: the others, which stay on the core, that go without their wire.
      saves: seconds, against all tokens' collectives on the core, without wires.
    """

    steps: list[Step]
    seconds: float
    away: frozenset[Step]
    waitable: list[int]
    unwired: frozenset[Step] = frozenset()
    saves: float = 0.0


class Call(NamedTuple):
    """What a collective takes on the core, on a SparseCore, and on the core over its wire.

    In seconds; `wired` None if it takes no wire.
    """

    here: float
    away: float
    wired: float | None = None


def best(
    steps: Sequence[Step], tokens: Mapping[Step, Call], weights: Mapping[Step, Call], chip: Chip
) -> Timetable | None:
    """The order in which a turn is shortest, with some of its collectives on a SparseCore.

    Args:
      steps: in the program's order.
      tokens: the collectives that may be on either.
      weights: those that are on the SparseCore, whatever else is.
      chip: that runs them.

    Returns:
      None where the turn is no shorter than with all tokens' on the core, and weights' hidden.
    """
    works = _works(steps, chip)
    worth = _WORTH_BESIDE_WEIGHTS if weights else _WORTH
    plain = sum(works.values()) + sum(call.here for call in tokens.values())

    def within(tokens: Mapping[Step, Call]) -> tuple[float, Timetable | None]:
        """The seconds of a turn, in order or as it is."""
        on_core = sum(works.values()) + sum(call.here for call in tokens.values())
        found = _Turn(steps, works, {**tokens, **weights}).shortest()
        if found.seconds >= worth * on_core:
            return on_core, None
        return found.seconds, found._replace(saves=plain - found.seconds)

    unordered, unwired = within(tokens)
    wires = {step: call.wired for step, call in tokens.items() if call.wired is not None}
    if not wires:
        return unwired
    wired, found = within({s: c._replace(here=wires.get(s, c.here)) for s, c in tokens.items()})
    if unwired is None or wired < _WORTH_WIRES * unordered:
        return found
    return unwired._replace(unwired=frozenset(wires.keys() - unwired.away))


def hidden(steps: Sequence[Step], away: Mapping[Step, float], chip: Chip) -> float:
    """The seconds of exchanges that products hide where XLA runs these beside them, at the best.

    Args:
      steps: in the program's order.
      away: what each such exchange takes.
      chip: that runs them.
    """
    works = _works(steps, chip)
    found = _Turn(steps, works, {s: Call(math.inf, takes) for s, takes in away.items()}).shortest()
    return sum(works.values()) + sum(away.values()) - found.seconds


def _works(steps: Sequence[Step], chip: Chip) -> dict[Step, float]:
    """What each step takes the core."""
    return {step: step.seconds(chip) / COUNTED for step in steps}


class _Turn:
    """A turn's steps, by their places in the program."""

    def __init__(
        self, steps: Sequence[Step], works: Mapping[Step, float], calls: Mapping[Step, Call]
    ) -> None:
        self.steps = steps
        self.works = [works[step] for step in steps]
        self.calls = {place: calls[step] for place, step in enumerate(steps) if step in calls}
        flow = Dataflow(steps)
        self.made = flow.makers.keys()
        self.readers = [[flow.places[s] for s in flow.readers(step.writes)] for step in steps]
        self.missing = collections.Counter(itertools.chain.from_iterable(self.readers))
        self.nbytes = self._sizes()
        exchanged = (n for c in self.calls for n in (*steps[c].reads, *steps[c].writes))
        self.largest = max(self.nbytes[n] for n in numbers(exchanged))
        self.needed = self._needed()
        self.partners = [self._partner(place) for place in range(len(steps))]

    def _sizes(self) -> dict[int, int]:
        types = {n: kind for step in self.steps if step.eqn for n, kind in step.types.items()}
        return {n: math.prod(kind.shape) * kind.dtype.itemsize for n, kind in types.items()}

    def _needed(self) -> list[float]:
        """The place of the first product that needs each step."""
        found = [math.inf] * len(self.steps)
        for place in reversed(range(len(self.steps))):
            for reader in self.readers[place]:
                first = reader if self.works[reader] else found[reader]
                found[place] = min(found[place], first)
        return found

    def _partner(self, place: int) -> int | None:
        """The operand of a product that barriers can join: the smallest that this turn computes.

        None where even that is large: XLA would not keep it but for the barrier.
        """
        reads = [n for n in numbers(self.steps[place].reads) if n in self.made]
        found = self.joinable(reads) if self.works[place] else ()
        return min(found, key=lambda n: self.nbytes[n]) if found else None

    def joinable(self, values: Iterable[int]) -> tuple[int, ...]:
        """Those that XLA would keep also without a barrier: none larger than what is exchanged."""
        return tuple(n for n in values if self.nbytes.get(n, math.inf) <= self.largest)

    def shortest(self) -> Timetable:
        """The shortest found, by one change after the other, each kept where it shortens the turn.

        What has nothing beside it goes to the core, which is quicker; and in front of some products
        the core waits for what is under way, so that the next call has all of that product beside.
        """
        way = _Way()
        found, left = _Run(self, way).timetable(), _TRIED // len(self.steps)

        def better(*ways: _Way) -> None:
            nonlocal way, found, left
            for other in ways[:left]:
                left -= 1
                tried = _Run(self, other).timetable()
                if tried.seconds < found.seconds:
                    way, found = other, tried
                    return

        tokens = [place for place, call in self.calls.items() if math.isfinite(call.here)]
        for call in tokens:
            better(way._replace(here=way.here | {call}))
        place = -1
        while later := sorted({p for p in found.waitable if p > place}):
            place, *others = later
            waits = [{place}, *({place, other} for other in others[:3])]
            better(*(way._replace(waits=way.waits | more) for more in waits))
        for call in tokens:
            better(way._replace(here=way.here ^ {call}))
        return found


class _Way(NamedTuple):
    """A way through a turn.

    Attributes:
      here: the places of collectives that stay on the core.
      waits: those of products in front of which it waits for what is under way.
    """

    here: frozenset[int] = frozenset()
    waits: frozenset[int] = frozenset()


class _Run:
    """What happens on a way through a turn."""

    def __init__(self, turn: _Turn, way: _Way) -> None:
        self._turn, self._here, self._waits = turn, way.here, {*way.waits}
        self._waitable: list[int] = []
        self._missing = turn.missing.copy()
        self._ready: list[tuple[bool, int]] = []  # for the core: products come last; a heap
        self._waiting: list[tuple[float, int]] = []  # calls, by where they are needed: a heap
        self._flying: int | None = None
        self._last: tuple[int, ...] = ()  # what the last product made, where barriers can join it
        self._now = self._ends = 0.0  # of the core; of what is under way
        self._steps: list[Step] = []
        for place in range(len(turn.steps)):
            if not self._missing[place]:
                self._is_ready(place)

    def timetable(self) -> Timetable:
        while self._ready or self._waiting or self._flying is not None:
            if self._ready:
                self._go_on()
            elif self._flying is not None:
                self._end()
            else:
                self._start()
        calls = self._turn.calls.keys() - self._here
        away = frozenset(self._turn.steps[place] for place in calls)
        return Timetable(self._steps, self._now, away, self._waitable)

    def _go_on(self) -> None:
        """Takes the first step that is ready; what can start or end in front of it does first."""
        _, place = self._ready[0]
        work, partner = self._turn.works[place], self._turn.partners[place]
        if place in self._here:
            if self._flying is not None:  # one call at a time has the links
                return self._end()
            work = self._turn.calls[place].here
        elif partner is not None:
            if self._flying is None and self._waiting:
                return self._start(partner)
            if self._flying is not None and (self._ends <= self._now or place in self._waits):
                self._waits.discard(place)
                return self._end(partner)
            if self._flying is not None:
                self._waitable.append(place)
        heapq.heappop(self._ready)
        self._steps.append(self._turn.steps[place])
        self._now += work
        if self._turn.works[place]:
            self._last = self._turn.joinable(self._turn.steps[place].writes)
        self._made(place)
        return None

    def _start(self, *partner: int) -> None:
        _, place = heapq.heappop(self._waiting)
        step = self._turn.steps[place]
        self._join(step.reads[0], *partner)
        self._steps.append(step)
        self._flying, self._ends = place, self._now + self._turn.calls[place].away

    def _end(self, *partner: int) -> None:
        assert self._flying is not None
        self._now = max(self._now, self._ends)
        partner = partner or self._last  # so that it is held until that product is done
        self._join(*self._turn.steps[self._flying].writes, *partner)
        self._made(self._flying)
        self._flying = None

    def _join(self, *together: Any) -> None:
        distinct = tuple(dict.fromkeys(numbers(together)))
        is_there = (
            self._steps and self._steps[-1].eqn is None and {*distinct} <= {*self._steps[-1].reads}
        )
        if len(distinct) > 1 and not is_there:
            self._steps.append(Step(None, distinct, distinct))

    def _made(self, place: int) -> None:
        for reader in self._turn.readers[place]:
            self._missing[reader] -= 1
            if not self._missing[reader]:
                self._is_ready(reader)

    def _is_ready(self, place: int) -> None:
        if place in self._turn.calls and place not in self._here:
            heapq.heappush(self._waiting, (self._turn.needed[place], place))
        else:
            takes_long = place in self._here or self._turn.works[place] > 0
            heapq.heappush(self._ready, (takes_long, place))
