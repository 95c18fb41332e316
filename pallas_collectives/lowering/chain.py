"""Sums of a loop's turn on a SparseCore, one behind the other, each beside products.

XLA's scheduler orders a turn from its end, and what only writes a row of a scan's results it places
as it was found. So it ends a sum where it began, and the core waits. A barrier that joins a sum's
result with a value made later keeps the sum under way until then. That value is the next sum's
gradient, and the result of the product behind which that sum starts; for the last sum of a turn it
is what the turn hands on. Values pass barriers as they are.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from pallas_collectives.lowering.turns import COUNTED, Step


@dataclasses.dataclass(frozen=True)
class Sum:
    """A scatter of a gradient."""

    gradient: int  # its number
    results: list[int]  # the numbers of the stacked results that come of it
    seconds: float  # that it takes (modelled)
    run: Callable[[], None]


class Chain:
    """The sums of a turn.

    Args:
      values: the turn's, by number.
      ends: when its last product ends, from the turn's start.
    """

    def __init__(self, values: dict[int, Any], ends: float):
        self._values, self._ends = values, ends
        self._latest: list[int] = []  # the results of the sum that was started last
        self._done = 0.0  # when that ends, from the turn's start
        self._waiting: list[Sum] = []
        self._largest = 0  # bytes of a gradient

    def add(self, new: Sum, now: float) -> None:
        """Starts a sum, or has it wait for those before it."""
        self._largest = max(self._largest, self._values[new.gradient].nbytes)
        if self._waiting or now < self._done:
            self._waiting.append(new)
        else:
            self._start(new, now)

    def passed(self, product: Step, now: float) -> None:
        """A product, or a kernel of some, has been traced, which ends now: a sum may start by then.

        It does not start behind a result that is larger than all gradients, which XLA might keep
        for the barrier alone, nor where the products to come take less time than the sum.
        """
        made = min(product.writes, key=lambda number: self._values[number].nbytes)
        fits = self._values[made].nbytes <= self._largest
        if self._waiting and self._done <= now <= self._ends - self._waiting[0].seconds and fits:
            self._start(self._waiting.pop(0), now, made)

    def end(self, handed_on: Iterable[int]) -> None:
        """Starts those that still wait, and holds the last until what is handed on is there."""
        for each in self._waiting:
            self._start(each, self._done)
        if self._latest:
            self._join([*handed_on, *self._latest])

    def _start(self, which: Sum, now: float, *behind: int) -> None:
        self._join([which.gradient, *self._latest, *behind])
        which.run()
        self._latest = which.results
        self._done = max(now, self._done) + COUNTED * which.seconds

    def _join(self, numbers: Iterable[int]) -> None:
        together = tuple(dict.fromkeys(numbers))
        if len(together) > 1:
            Step(None, together, together).run(self._values)
