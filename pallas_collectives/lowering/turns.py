"""A turn of a loop as a list of steps, whatever calls they stood within, and how long they take."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat
from pallas_collectives.backends.plans import How
from pallas_collectives.lowering import barrier, questions, remat
from pallas_collectives.topology import chips

# Products are counted at the matrix unit's full rate, and with the work between them take longer:
# in the built-in steps 1.2 times as long by XLA's cycles, or more.
COUNTED = 0.8


class Value(NamedTuple):
    """A value that an equation names by no variable."""

    val: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation of a turn, whatever it stood within; values have numbers.

    `eqn` is None for a barrier, which hands on what it reads once all of it has arrived.
    """

    eqn: JaxprEqn | None
    reads: tuple[Any, ...]  # numbers, or `Value`s
    writes: tuple[int, ...]
    within: tuple[JaxprEqn, ...] = ()  # the calls that it stood within

    @property
    def how(self) -> How | None:
        """What a gather that may be asked for ahead asks for; None for all others."""
        return questions.asked_ahead(self.eqn) if self.eqn is not None else None

    @property
    def sums(self) -> bool:
        """Whether it sums gradients, scattered or for all devices, for a SparseCore."""
        return self.eqn is not None and questions.sums(self.eqn) and isinstance(self.reads[0], int)

    @property
    def totals(self) -> bool:
        """Whether it is a psum, of one array or several, for which the step around it matters."""
        return self.eqn is not None and questions.totals(self.eqn)

    @property
    def adds(self) -> bool:
        """Whether it is a psum or psum_scatter by kernels, for which the step around it matters.

        A scatter that is not tiled is followed by a reshape, which XLA moves no sum across.
        """
        return self.eqn is not None and questions.adds(self.eqn)

    @property
    def awaited(self) -> bool:
        """Whether it exchanges what products have made and wait for, and may be on a SparseCore."""
        return (
            self.eqn is not None and questions.awaited(self.eqn) and isinstance(self.reads[0], int)
        )

    @property
    def fuses(self) -> bool:
        """Whether it exchanges so, and may be run with a product."""
        return self.eqn is not None and questions.fuses(self.eqn) and isinstance(self.reads[0], int)

    def seconds(self, chip: chips.Chip) -> float:
        """What its products take at the least."""
        return questions.seconds(self.eqn, chip) if self.eqn is not None else 0.0

    @property
    def is_product(self) -> bool:
        """Whether it is one for the matrix unit."""
        return self.eqn is not None and self.eqn.primitive.name == questions.PRODUCT

    @property
    def length(self) -> int:
        """How many turns a scan has; 0 for all others."""
        if self.eqn is None or self.eqn.primitive.name != questions.LOOP:
            return 0
        return int(self.eqn.params["length"])

    @property
    def multiplies(self) -> bool:
        """Whether it is such a product, alone or in one kernel with its collective."""
        return self.eqn is not None and self.eqn.primitive.name in (
            questions.PRODUCT,
            *questions.FUSED,
        )

    @property
    def is_opaque(self) -> bool:
        """Whether it computes what `seconds` does not see."""
        return self.eqn is not None and questions.holds(self.eqn, questions.OPAQUE.__contains__)

    @property
    def computes(self) -> bool:
        """Whether it may take long, within its own programs too."""
        return self.eqn is not None and questions.holds(self.eqn, questions.COMPUTES.__contains__)

    @property
    def exchanges(self) -> bool:
        """Whether it sends anything, within its own programs too."""
        return self.eqn is not None and questions.exchanges(self.eqn)

    @property
    def has_effects(self) -> bool:
        """Whether it does more than make its results."""
        return self.eqn is not None and _compat.has_effects(self.eqn)

    @property
    def keeps_order(self) -> bool:
        """Whether it must stay behind those before it, whatever it reads; no collective must."""
        return self.eqn is not None and not self.exchanges and _compat.keeps_order(self.eqn)

    @property
    def types(self) -> dict[int, Any]:
        """Types of what an equation reads and writes."""
        assert self.eqn is not None
        pairs = zip((*self.reads, *self.writes), (*self.eqn.invars, *self.eqn.outvars), strict=True)
        return {x: _compat.type_of(v) for x, v in pairs if not isinstance(x, Value)}

    @property
    def hands_on(self) -> bool:
        """Whether it only hands on parts of what it reads."""
        return self.eqn is None or self.eqn.primitive.name in _compat.PARTS

    @property
    def updates(self) -> bool:
        """Whether it writes a slice of what it reads, within its own programs too."""
        return self.eqn is not None and questions.holds(self.eqn, questions.UPDATES.__contains__)

    def run(self, values: dict[int, Any], **wishes: Any) -> None:
        """Adds its results.

        Args:
          values: by number.
          wishes: fields of a collective's `How` that are to be others.
        """
        read = [x.val if isinstance(x, Value) else values[x] for x in self.reads]
        if self.eqn is None:
            results = barrier.barrier(read)
        else:
            primitive, params = self.eqn.primitive, _asking(self.eqn, **wishes)
            with self.eqn.ctx.manager, _compat.named_as(self.eqn, self.within):
                found = primitive.bind(*read, **primitive.get_bind_params(params))
            results = found if primitive.multiple_results else [found]
        values.update(zip(self.writes, results, strict=True))


def of_some(step: Step, wanted: Sequence[bool], **wishes: Any) -> Step | None:
    """A psum of the wanted ones of its arrays; fields of its `How` may be others."""
    assert step.eqn is not None
    part = remat.part(step.eqn, wanted)
    if part is None:
        return None
    reads, writes = (tuple(itertools.compress(of, wanted)) for of in (step.reads, step.writes))
    return Step(part.replace(params=_asking(part, **wishes)), reads, writes, step.within)


def awaiting(step: Step) -> Step:
    """The same; a gather of a step is one whose result products wait for (`How.awaited`)."""
    if step.eqn is None or step.eqn.primitive.name not in questions.twins_of("all_gather"):
        return step
    how: How = step.eqn.params["how"]
    return step if how.awaited is not False else asking(step, awaited=True)


def asking(step: Step, **wishes: Any) -> Step:
    """The same collective, with some fields of its `How` others."""
    assert step.eqn is not None
    return dataclasses.replace(step, eqn=step.eqn.replace(params=_asking(step.eqn, **wishes)))


def by_lax(why: str) -> dict[str, Any]:
    """What a collective asks for that lax is to serve."""
    return {"backend": "xla", "fallback": why, "ahead": ""}


def _asking(eqn: JaxprEqn, **wishes: Any) -> dict[str, Any]:
    """The parameters of an equation, with some fields of a collective's `How` others."""
    if not wishes:
        return eqn.params
    return {**eqn.params, "how": dataclasses.replace(eqn.params["how"], **wishes)}


class Flat:
    """The equations of a turn, and in place of some calls those within them.

    Args:
      opens: whether such a call is, by its equation and program.
    """

    def __init__(self, opens: Callable[[JaxprEqn, core.ClosedJaxpr], bool]) -> None:
        self.steps: list[Step] = []
        self._opens = opens
        self._new = itertools.count()

    @classmethod
    def of(cls, closed: core.ClosedJaxpr) -> "Flat":
        """One that opens what `holds_any`; where a turn sums by psum, what makes gradients, too."""
        sums = any(questions.holds(eqn, questions.PSUMS.__contains__) for eqn in closed.jaxpr.eqns)
        makes = {*questions.COMPUTES, questions.LOOP}.__contains__
        return cls(
            lambda eqn, inner: questions.holds_any(inner) or (sums and questions.holds(eqn, makes))
        )

    def numbers(self, count: int) -> tuple[int, ...]:
        """Numbers of so many new values."""
        return tuple(itertools.islice(self._new, count))

    def add(
        self, closed: core.ClosedJaxpr, args: Sequence[Any], within: tuple[JaxprEqn, ...] = ()
    ) -> list[Any]:
        """Adds the equations of a program within so many calls; the numbers of its results."""
        jaxpr = closed.jaxpr
        known = dict(zip(jaxpr.constvars, map(Value, closed.consts), strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return known[atom] if isinstance(atom, core.Var) else Value(atom.val)

        for eqn in jaxpr.eqns:
            reads = tuple(map(read, eqn.invars))
            inner = questions.program_of(eqn)
            if inner is not None and self._opens(eqn, inner):
                if eqn.params.get("differentiated"):
                    reads = self._behind_barriers(reads, questions.asked_for(inner), eqn)
                writes: Sequence[Any] = self.add(inner, reads, (*within, eqn))
            else:
                writes = self.numbers(len(eqn.outvars))
                self.steps.append(Step(eqn, reads, tuple(writes), within))
            known.update(zip(eqn.outvars, writes, strict=True))
        return list(map(read, jaxpr.outvars))

    def _behind_barriers(
        self, reads: Sequence[Any], asked: Sequence[bool], checkpoint: JaxprEqn
    ) -> tuple[Any, ...]:
        """What a checkpoint computes from, kept apart from the forward pass where it says so.

        What gathers bring has a barrier of its own, so that it waits for nothing else.
        """
        apart = checkpoint.params["prevent_cse"]  # of all operands, or of each
        apart = apart if isinstance(apart, tuple) else (apart,) * len(reads)
        behind = list(reads)
        own = [[i] for i, alone in enumerate(asked) if alone and apart[i]]
        others = [i for i, alone in enumerate(asked) if not alone and apart[i]]
        for together in filter(None, [*own, others]):
            numbers = self.numbers(len(together))
            self.steps.append(Step(None, tuple(reads[i] for i in together), numbers))
            for i, number in zip(together, numbers, strict=True):
                behind[i] = number
        return tuple(behind)


def numbers(values: Iterable[Any]) -> Iterator[int]:
    return (x for x in values if not isinstance(x, Value))
