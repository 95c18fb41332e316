"""What the core waits for collectives at the least, in whatever order: the bound of `step`.

XLA keeps the turns of a loop apart: what a turn starts it ends. Within a turn, as within what lies
outside of loops, a collective can have beside it only what neither brings its operand nor needs its
result, and its own products. So no turn is shorter than

* the core's own work;
* chains of collectives that need one another, with the work between them, before and behind;
* what a SparseCore brings, one call after the other, with the work before and behind all of them.

What the longest of these takes beyond the core's own work is exposed in every order.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.steps.schedule import SPARSECORE, Collective, Done, Event, Loop, Start, StepWork

Needs = Mapping[str, Sequence[str]]


def exposed(
    events: Sequence[Event], needs: Needs, takes: Callable[[Collective], float], clock: float
) -> float:
    """What the core must wait, in the unit of `takes`.

    Args:
      events: the events of a computation, in any order that it can have.
      needs: instruction -> its operands.
      takes: how long a collective is under way.
      clock: cycles of the core in that unit of time.
    """
    return _Part(events, needs, takes, clock).exposed


@dataclasses.dataclass
class _Flight:
    """A collective: how long it takes, and sets of events, a bit for each."""

    takes: float
    engine: str
    before: int
    after: int = 0
    head: float = 0.0  # from the beginning to its start, at the least
    tail: float = 0.0  # from its end to the end of all


class _Part:
    """A loop's turn, or a whole program."""

    def __init__(
        self,
        events: Sequence[Event],
        needs: Needs,
        takes: Callable[[Collective], float],
        clock: float,
    ) -> None:
        self._needs = needs
        self.work = self.exposed = 0.0
        self._bits: dict[str, int] = {}  # instruction -> the bit of what ends with it
        self._works: list[tuple[int, float]] = []  # the core's work
        self._starts: set[str] = set()  # instructions whose results are there when one is done
        inner, started, flying = 0.0, {}, []
        for number, event in enumerate(events):
            bit = 1 << number
            match event:
                case StepWork(name, cycles):
                    self._bits[name] = bit
                    self._works.append((bit, cycles / clock))
                case Loop(times, body, name):
                    least = _Part(body, needs, takes, clock)
                    self._bits[name] = bit
                    self._works.append((bit, times * (least.work + least.exposed)))
                    inner += times * least.exposed
                case Start(key, collective, name):
                    started[key] = collective, name
                    self._starts.add(name)
                case Done(key, name) if key in started:
                    self._bits[name] = bit
                    collective, begun = started.pop(key)
                    self._works.append((bit, collective.cycles / clock))
                    flying.append((bit, begun, collective))
        self.work = sum(core for _, core in self._works) - inner
        self._flights: dict[int, _Flight] = {}
        for bit, begun, collective in flying:
            before = self._operands(begun)
            self._flights[bit] = _Flight(takes(collective), collective.engine, before)
        self._follow()
        self.exposed = inner + max(0.0, self._shortest() - self.work - inner)

    @functools.cache  # noqa: B019 - lives as long as its part
    def _behind(self, name: str) -> int:
        """What must be there for an instruction's result, itself included."""
        if name in self._starts and name not in self._bits:
            return self._operands(name)  # handed over to whoever carries it on
        return self._bits.get(name, 0) | self._operands(name)

    def _operands(self, name: str) -> int:
        found = 0
        for operand in self._needs.get(name, ()):
            found |= self._behind(operand)
        return found

    def _follow(self) -> None:
        """Which work and collectives come behind each."""
        befores = {bit: flight.before for bit, flight in self._flights.items()}
        befores |= {
            bit: self._operands(name) for name, bit in self._bits.items() if bit not in befores
        }
        for flight_bit, flight in self._flights.items():
            flight.after = sum(bit for bit, before in befores.items() if before & flight_bit)

    def _core(self, events: int) -> float:
        return sum(takes for bit, takes in self._works if bit & events)

    def _shortest(self) -> float:
        """No order takes less."""
        in_order = sorted(self._flights.items())
        for _, flight in in_order:
            earlier = ((b, f) for b, f in in_order if b & flight.before)
            ways = (f.head + f.takes + self._core(f.after & flight.before) for _, f in earlier)
            flight.head = max(self._core(flight.before), *ways, 0.0)
        for _, flight in reversed(in_order):
            later = ((b, f) for b, f in in_order if b & flight.after)
            ways = (self._core(flight.after & f.before) + f.takes + f.tail for _, f in later)
            flight.tail = max(self._core(flight.after), *ways, 0.0)
        alone = (f.head + f.takes + f.tail for _, f in in_order)
        return max([self._core(-1), *alone, *self._in_turn()])

    def _in_turn(self) -> Iterator[float]:
        """Bounds from the calls on a SparseCore with at least so much before and behind them."""
        there = [f for f in self._flights.values() if f.engine == SPARSECORE]
        for head, tail in itertools.product({f.head for f in there}, {f.tail for f in there}):
            if among := [f.takes for f in there if f.head >= head and f.tail >= tail]:
                yield head + sum(among) + tail
