"""The collectives as the benchmarks run them: the catalogue's examples, by lax's names.

What `size`, `count` and busbw are is said in `pallas_collectives.examples`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, overload

import jax
import numpy as np

import pallas_collectives
from pallas_collectives import catalogue
from pallas_collectives.catalogue.records import Collective
from pallas_collectives.examples import LANES as LANES
from pallas_collectives.examples import Example, everywhere
from pallas_collectives.validation import AxisName


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Example):
    """A collective's example, and its names.

    Attributes:
      name: lax's name for it, and ours.
      op: the canonical collective.
      adds: whether values are summed, and must be small for the sum to be exact.
    """

    name: str
    op: str
    adds: bool

    def by_lax(self, x: jax.Array, axis: AxisName) -> jax.Array:
        """The same by lax; a collective that lax lacks is ours, served by XLA."""
        if hasattr(jax.lax, self.name.partition(",")[0]):
            return self.call(jax.lax, x, axis)
        return self.call(pallas_collectives, x, axis, backend="xla")

    @classmethod
    def of(cls, collective: Collective) -> "Case":
        """The case of a record."""
        name = next(iter(collective.functions))
        names: dict[str, Any] = {"name": name, "op": collective.name, "adds": collective.adds}
        return cls(**names, **vars(collective.example))


class _Cases(Sequence[Case]):
    """A case for each record of the catalogue, as they are at the time of asking."""

    @overload
    def __getitem__(self, which: int) -> Case: ...
    @overload
    def __getitem__(self, which: slice) -> tuple[Case, ...]: ...
    def __getitem__(self, which: Any) -> Any:
        return tuple(map(Case.of, catalogue.COLLECTIVES.values()))[which]

    def __len__(self) -> int:
        return len(catalogue.COLLECTIVES)


CASES: Sequence[Case] = _Cases()


def named(*names: str) -> tuple[Case, ...]:
    """The cases of these names; KeyError if there is no such case."""
    by_name = {case.name: case for case in CASES}
    return tuple(by_name[name] for name in names)


def chosen(case: Case, named: Sequence[str]) -> tuple[str | None, ...]:
    """Those of the named algorithms that a case has; without names, the library's choice."""
    offered = catalogue.ALGORITHMS[case.op]
    return tuple(a for a in named if a.partition(":")[0] in offered) if named else (None,)


def layouts() -> tuple[Case, ...]:
    """The same, and some along the last dimension: where results are laid out, compilers differ."""
    gather, exchange = named("all_gather", "all_to_all")
    return (
        *CASES,
        dataclasses.replace(
            gather,
            name="all_gather, axis=-1",
            call=lambda m, x, axis, **how: m.all_gather(x, axis, axis=-1, tiled=True, **how),
            reference=lambda xs: everywhere(np.concatenate(xs, axis=-1), len(xs)),
        ),
        dataclasses.replace(
            exchange,
            name="all_to_all, 0 to -1",
            call=lambda m, x, axis, **how: m.all_to_all(x, axis, 0, 2, tiled=True, **how),
            reference=lambda xs: np.concatenate(xs[:, :, None], axis=-1),
        ),
    )
