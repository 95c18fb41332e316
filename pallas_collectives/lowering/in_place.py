"""Weights that kernels read in place: of all turns of a scan, and not cut out for one.

A turn's weights are slices of what the scan has for all turns. XLA's own products read such slices
in place. A kernel's operand is an array of its own, which XLA would write each turn, and slowly:
that takes longer than most layers' exchanges. So a kernel of products with their exchange takes
what there is for all turns, and the number of the turn:

    of turn i, w = ws[i]        y = kernel(x, w)        becomes        y = kernel(x, ws, i)

A slice that barriers alone hand on is read so, too. What is converted, turned, or padded to whole
lanes is written by each turn in any case, and weights whose products are summed are laid side by
side.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_collectives import _compat
from pallas_collectives._compat import Aval
from pallas_collectives.lowering import dataflow, questions, turns
from pallas_collectives.lowering.turns import Step
from pallas_collectives.topology import chips

_LANES = 128
_BARRIERS = "optimization_barrier", "pvary"

# Chips for which XLA multiplies more quickly by a copy of what it could read in place: with its
# gradient `benchmarks.steps.sums:tensor` takes 22.6 ms on v5p:2x2x2 where kernels read in place
# what XLA's products read too, and else 21.9; on v5e:2x2 and v6e:2x2 76.1 and 77.1, 29.3 and 29.7.
_COPIED_FOR_PRODUCTS = ("v5p",)


class Slices:
    """A turn's parts of what a loop has for all turns.

    Args:
      steps: the turn's.
      slices: the numbers of these parts.

    Attributes:
      numbers: the same.
    """

    def __init__(self, steps: Iterable[Step], slices: Iterable[int]) -> None:
        self.numbers = frozenset(slices)
        self._origins = dataflow.origins(filter(_is_barrier, steps))

    def of(self, w: Any, kind: Aval) -> int | None:
        """The number of the slice that a kernel with such weights can read in place, if any."""
        found = self._origins.get(w, w) if isinstance(w, int) else None
        whole = not any(size % _LANES for size in kind.shape)
        return found if whole and found in self.numbers else None

    def read_by(self, steps: Iterable[Step]) -> frozenset[int]:
        """The numbers of the slices that any of these steps reads."""
        reads = (x for step in steps for x in turns.numbers(step.reads))
        return self.numbers.intersection(self._origins.get(x, x) for x in reads)


def _is_barrier(step: Step) -> bool:
    return step.eqn is None or step.eqn.primitive.name in _BARRIERS


class InPlace(NamedTuple):
    """A turn's steps, of which kernels read weights of all turns.

    Attributes:
      steps: in the same order.
      stacks: numbers of these weights of all turns, by those of the turn's slices.
      turn: the number of which turn it is, int32[1].
    """

    steps: list[Step]
    stacks: dict[int, int]
    turn: int


def read_in_place(steps: Sequence[Step], slices: Sequence[int], length: int) -> InPlace:
    """A turn's steps with kernels that read weights in place.

    Args:
      steps: in an order in which they can run.
      slices: the numbers of this turn's parts of what the loop has for all.
      length: how many turns there are.
    """
    of_turn = Slices(steps, slices)
    known = (x for step in steps for x in (*step.reads, *step.writes) if isinstance(x, int))
    turn = 1 + max((*known, *slices), default=0)
    places = {x: turn + k for k, x in enumerate(slices, start=1)}
    found = InPlace([], {}, turn)
    copies = chips.current().name in _COPIED_FOR_PRODUCTS
    copied = of_turn.read_by(step for step in steps if copies and step.is_product)
    for step in steps:
        read = {k: x for k, x in _read(step, of_turn).items() if x not in copied}
        found.stacks.update({x: places[x] for x in read.values()})
        stacks = {k: places[x] for k, x in read.items()}
        found.steps.append(_of_all_turns(step, stacks, turn, length) if stacks else step)
    return found


def _read(step: Step, slices: Slices) -> dict[int, int]:
    """Place of an operand of a kernel -> the slice that it can read in its place."""
    eqn = step.eqn
    if eqn is None or eqn.primitive.name not in questions.FUSED:
        return {}
    joined = eqn.primitive.name != questions.FUSED[0] and len(step.reads) > 2
    spec = eqn.params["spec"]
    if joined or eqn.params["plan"].backend != "pallas" or spec.stacked or spec.turned:
        return {}
    found = ((k, slices.of(step.reads[k], _compat.type_of(v))) for k, v in enumerate(eqn.invars))
    return {k: x for k, x in found if k and x is not None}


def _of_all_turns(step: Step, stacks: dict[int, int], turn: int, length: int) -> Step:
    """The same kernel, with these numbers in the places of operands, and the turn behind all."""
    eqn = step.eqn
    assert eqn is not None
    types = [_compat.type_of(v) for v in eqn.invars]
    types = [t.update(shape=(length, *t.shape)) if k in stacks else t for k, t in enumerate(types)]
    params = {**eqn.params, "spec": dataclasses.replace(eqn.params["spec"], stacked=True)}

    def kernel(*operands: jax.Array) -> Any:
        return eqn.primitive.bind(*operands, **params)

    with eqn.ctx.manager:
        closed = jax.make_jaxpr(kernel)(*types, jax.ShapeDtypeStruct((1,), jnp.int32))
    made = closed.jaxpr.eqns[-1].replace(ctx=eqn.ctx)
    reads = *(stacks.get(k, x) for k, x in enumerate(step.reads)), turn
    return Step(made, reads, step.writes, step.within)
