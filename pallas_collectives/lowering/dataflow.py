"""Which step of a turn makes each value and which read it, and what is made of what through them.

A barrier joins values: each of its results waits for all that it takes, so all are its `ancestors`,
but only one of them is its origin (`origins`).
"""

import heapq
from collections.abc import Callable, Iterable, Sequence

from pallas_collectives.lowering.turns import Step, numbers

Which = Callable[[Step], bool]


class Dataflow:
    """The steps of a turn, by what they make and what they read.

    Args:
      steps: in the program's order.

    Attributes:
      places: step -> its place in that order.
      makers: value -> the step that makes it; arguments of the turn have none.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        self.places: dict[Step, int] = {}
        self.makers: dict[int, Step] = {}
        self._readers: dict[int, list[Step]] = {}
        for place, step in enumerate(steps):
            self._add(step, place)

    def readers(self, values: Iterable[int]) -> list[Step]:
        """The steps that read any of these, in the program's order."""
        return self.by_place(step for value in values for step in self._readers.get(value, ()))

    def by_place(self, steps: Iterable[Step]) -> list[Step]:
        """Each of these once, in the program's order."""
        return sorted(dict.fromkeys(steps), key=self.places.__getitem__)

    def descendants(self, values: Iterable[int], through: Which = lambda _: True) -> list[int]:
        """These, and what is made of them by steps of a kind, whatever else these read."""

        def made(value: int) -> Iterable[int]:
            readers = self._readers.get(value, ())
            return (number for step in readers if through(step) for number in step.writes)

        return _reached(values, made)

    def ancestors(self, values: Iterable[int], through: Which = lambda _: True) -> list[int]:
        """These, and all that steps of a kind read to make them."""

        def read(value: int) -> Iterable[int]:
            maker = self.makers.get(value)
            return numbers(maker.reads) if maker and through(maker) else ()

        return _reached(values, read)

    def replace(self, others: Sequence[Step], by: Iterable[Step]) -> None:
        """Puts steps in place of others, the first of which has their place."""
        place = self.places[others[0]]
        for step in others:
            del self.places[step]
            for number in {*numbers(step.reads)}:
                self._readers[number].remove(step)
        for step in by:
            self._add(step, place)

    def in_order(self) -> list[Step]:
        """The steps, each behind those that it needs, and otherwise by their places."""
        steps = self.by_place(self.places)
        order = {step: number for number, step in enumerate(steps)}
        made = {value for step in steps for value in step.writes}
        missing = [len(made.intersection(numbers(step.reads))) for step in steps]
        ready, found = [number for number, count in enumerate(missing) if not count], []
        while ready:
            found.append(steps[heapq.heappop(ready)])
            for number in (order[s] for x in found[-1].writes for s in self._readers.get(x, ())):
                missing[number] -= 1
                if not missing[number]:
                    heapq.heappush(ready, number)
        return found

    def _add(self, step: Step, place: int) -> None:
        self.places[step] = place
        self.makers.update(dict.fromkeys(step.writes, step))
        for number in {*numbers(step.reads)}:
            self._readers.setdefault(number, []).append(step)


def _reached(values: Iterable[int], following: Callable[[int], Iterable[int]]) -> list[int]:
    """Values, those that follow from them, and so on; each once, the nearest first."""
    found = dict.fromkeys(values)
    waiting = [*found]
    for value in waiting:
        new = dict.fromkeys(n for n in following(value) if n not in found)
        found |= new
        waiting += new
    return waiting


def origins(steps: Iterable[Step]) -> dict[int, int]:
    """Value -> the first that steps have handed on, one after the other, as this one."""
    found: dict[int, int] = {}
    for step in filter(lambda step: step.hands_on, steps):
        each = len(step.writes) == len(step.reads)  # as a barrier does
        reads = step.reads if each else step.reads[:1] * len(step.writes)
        pairs = zip(step.writes, reads, strict=True)
        found |= {made: found.get(x, x) for made, x in pairs if isinstance(x, int)}
    return found
