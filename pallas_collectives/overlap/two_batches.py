"""Two halves of a batch, so that one's collectives run beside the other's products.

In a layer whose tokens are cut over devices each product awaits its tokens, and each collective the
product before it: no order of the layer hides anything. Two halves of a batch need nothing of each
other. So the layer is run for both, the second half one phase behind the first:

    core         products 1 of A   products 1 of B   products 2 of A   products 2 of B
    wire     A   gather of B       sum of A,         sum of B,         sum of A          sum of B
                                   next gather of A  next gather of B

The layer is traced once, on one half, and its equations are sorted by what needs what: phases that
compute and phases that exchange take turns. What stands between collectives and holds no product,
as a norm, belongs to their phase. A barrier behind each pair (an exchange, and the products beside
it) keeps that order; XLA alone runs both halves in step, and has much less beside each exchange.
What depends on no batch, as gathers of weights, is computed once, for both halves.

The derivative of such a layer is one, too: barriers pass cotangents in the opposite order.

References: Wang et al., "Domino: Eliminating communication in LLM training via generic tensor
slicing and overlapping" (2024); DeepSeek-AI, "DeepSeek-V3 technical report" (2024), section 3.4.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives import validation
from pallas_collectives.errors import CollectiveError
from pallas_collectives.lowering import questions
from pallas_collectives.lowering.barrier import barrier
from pallas_collectives.lowering.turns import Flat, Step, Value, numbers


def two_batch_overlap(layer: Callable[..., Any], *, axis: int = 0) -> Callable[..., Any]:
    """The same function, run on two halves of its first argument's batch, one behind the other.

    Equals, but for the time it takes and the rounding of what adds over the batch,

        lambda x, *rest: concatenate([layer(half, *rest) for half in split(x, 2, axis)], axis)

    Collectives of one half run beside products of the other: by lax where XLA does so on the chip,
    under `override_lax` by a SparseCore on v5p and v6e. It is for the inside of `jax.shard_map`,
    with `jax.lax`'s collectives or those of this package. For several layers to go on without a
    wait between them let `layer` be several layers.

    Args:
      layer: (x, *rest, **options) -> results. Rows of a batch must not depend on one another, nor
        on how many there are. Its collectives stand outside of `jax.checkpoint` and of loops: put
        these around the function that this one returns. What is no array goes by keyword.
      axis: the dimension of x, and of each result, that counts rows of the batch: an even number,
        and for the results those of x.

    Returns:
      A function of the same arguments, where x, the first by position, is a pytree of arrays. A
      result that does not depend on x, nor its shape on x's, is given as it is. Gradients of `rest`
      are sums of those of both halves.

    Raises:
      CollectiveError: by that function: a batch that is no even number, a result that has no batch,
        effects whose order would be lost, or collectives only where nothing can be beside them.

    Example, inside `jax.shard_map` over 8 devices, tokens cut over "x" between products:
      def layer(x, w):  # x: bf16[2, 256, 4096]
          y = jax.nn.gelu(pc.all_gather(x, "x", axis=1, tiled=True) @ w["up"])
          return x + pc.psum_scatter(y @ w["down"], "x", scatter_dimension=1, tiled=True)

      y = jax.lax.scan(lambda x, w: (pc.two_batch_overlap(layer)(x, w), None), x, weights)[0]

    Example, with `jax.vmap` in place of a mesh:
      >>> layer = lambda x, w: pc.psum(x @ w, "x")
      >>> x, w = jnp.ones((2, 4, 3)), jnp.ones((2, 3, 1))  # 4 rows on each of 2
      >>> jax.vmap(pc.two_batch_overlap(layer), axis_name="x")(x, w)[0, :, 0].tolist()
      [6.0, 6.0, 6.0, 6.0]
    """

    @functools.wraps(layer)
    def run(x: Any, /, *rest: Any, **options: Any) -> Any:
        rows = _rows(x, axis)
        half = functools.partial(lax.slice_in_dim, axis=axis)
        first = jax.tree.map(lambda leaf: half(leaf, 0, rows // 2), x)
        second = jax.tree.map(lambda leaf: half(leaf, rows // 2, rows), x)
        traced = jax.make_jaxpr(functools.partial(layer, **options), return_shape=True)
        closed, shapes = traced(first, *rest)
        given, tree = [*map(jax.tree.leaves, (first, second, rest))], jax.tree.structure(shapes)
        found = _Layer.of(closed, len(given[0]))
        of_all = jax.tree.leaves(jax.eval_shape(functools.partial(layer, **options), x, *rest))
        has_batch = []
        for result, whole, part in zip(found.results, of_all, jax.tree.leaves(shapes), strict=True):
            depends = not isinstance(result, Value) and result in found.at
            has_batch.append(depends or whole.shape != part.shape)
            if has_batch[-1]:
                _check_result(part.shape, axis, rows)
        both = zip(has_batch, found.run(*given), strict=True)
        joined = [jnp.concatenate(halves, axis) if has else halves[0] for has, halves in both]
        return jax.tree.unflatten(tree, joined)

    return run


def _rows(x: Any, axis: int) -> int:
    """How many rows the batch has."""
    shapes = {where: np.shape(leaf) for leaf, where in validation.leaves(x)}
    for where, shape in shapes.items():
        validation.check_axis("axis", axis, len(shape), where)
    counts = {shape[axis] for shape in shapes.values()}
    if len(counts) != 1 or (rows := counts.pop()) % 2 or not rows:
        found = ", ".join(f"{shape}{where}" for where, shape in shapes.items()) or "no arrays"
        rule = f"dimension {axis} is the batch, equal in all and an even number of 2 or more"
        raise CollectiveError(f"x of {found}", rule, "pad the batch, or call the layer itself")
    return rows


def _check_result(shape: tuple[int, ...], axis: int, rows: int) -> None:
    there = -len(shape) <= axis < len(shape)
    if not there or shape[axis] != rows // 2:
        rule = f"dimension {axis} of what depends on x must be its batch, {rows // 2} in each half"
        remedy = "return it row by row, and add up, or reshape, outside"
        raise CollectiveError(f"a result of {shape} of half a batch", rule, remedy)


class _Layer(NamedTuple):
    """A layer's equations.

    Attributes:
      x: the numbers of the batch's arrays.
      rest: those of the others.
      results: those of a half's results.
      at: what depends on a batch -> the phase that makes it.
      shared: the steps that depend on no batch.
      phases: the steps of each phase: it computes, then exchanges, then computes ...
      handed_on: what later phases, or the results, need of each.
    """

    x: tuple[int, ...]
    rest: tuple[int, ...]
    results: list[Any]
    at: dict[int, int]
    shared: list[Step]
    phases: list[list[Step]]
    handed_on: list[list[int]]

    @classmethod
    def of(cls, closed: core.ClosedJaxpr, n_x: int) -> "_Layer":
        flat = Flat(opens=_opens)
        reads = flat.numbers(len(closed.jaxpr.invars))
        results = flat.add(closed, reads)
        _check_effects(flat.steps)
        _check_exchanges(flat.steps)
        at = dict.fromkeys(reads[:n_x], 0)
        shared: list[Step] = []
        phases: list[list[Step]] = [[]]
        read_at: dict[int, int] = {}  # by the last phase that reads it
        for step in flat.steps:
            made = [at[number] for number in numbers(step.reads) if number in at]
            if not made:
                shared.append(step)
                continue
            phase = max(made)
            if (step.computes and phase % 2) or (_only_exchanges(step) and not phase % 2):
                phase += 1
                phases += [[] for _ in range(phase + 1 - len(phases))]
            phases[phase].append(step)
            at |= dict.fromkeys(step.writes, phase)
            read_at |= {n: max(phase, read_at.get(n, 0)) for n in numbers(step.reads)}
        read_at |= dict.fromkeys(numbers(results), len(phases))
        handed_on: list[list[int]] = [[] for _ in phases]
        for number in at.keys() - {*reads}:
            if read_at.get(number, 0) > at[number]:
                handed_on[at[number]].append(number)
        return cls(reads[:n_x], reads[n_x:], results, at, shared, phases, handed_on)

    def run(self, first: Sequence[Any], second: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        """Each result of both halves."""
        values = dict(zip(self.rest, rest, strict=True))
        for step in self.shared:
            step.run(values)
        ahead, behind = (values | dict(zip(self.x, x, strict=True)) for x in (first, second))
        for phase in range(len(self.phases) + 1):
            self._beside((ahead, phase), (behind, phase - 1))
        return [
            (x.val, x.val) if isinstance(x, Value) else (ahead[x], behind[x]) for x in self.results
        ]

    def _beside(self, *pair: tuple[dict[int, Any], int]) -> None:
        """Runs a phase of one half, and the one before it of the other."""
        there = [(values, phase) for values, phase in pair if 0 <= phase < len(self.phases)]
        for values, phase in there:
            for step in self.phases[phase]:
                step.run(values)
        if len(there) < len(pair) or not self._computes(max(phase for _, phase in there)):
            return
        keys = [(values, n) for values, phase in there for n in self.handed_on[phase]]
        held = barrier([values[n] for values, n in keys])
        for (values, n), value in zip(keys, held, strict=True):
            values[n] = value

    def _computes(self, phase: int) -> bool:
        """Whether a phase, or the one before it, holds products."""
        both = self.phases[phase - 1 : phase + 1]
        return any(step.computes for steps in both for step in steps)


def _opens(eqn: JaxprEqn, inner: core.ClosedJaxpr) -> bool:
    """Whether a call's equations can stand in its place before derivatives are taken."""
    return eqn.primitive.name == "jit" and any(map(questions.exchanges, inner.jaxpr.eqns))


def _only_exchanges(step: Step) -> bool:
    return step.exchanges and not step.computes


def _check_effects(steps: Iterable[Step]) -> None:
    """Checks that nothing but values says what comes first."""
    if found := {step.eqn.primitive.name for step in steps if step.eqn and step.keeps_order}:
        rule = "values alone must say what comes first, since two halves run in turn"
        remedy = "write to references, and call back in order, outside of the layer"
        raise CollectiveError(f"a layer with effects in order: {sorted(found)}", rule, remedy)


def _check_exchanges(steps: Iterable[Step]) -> None:
    """Checks that collectives are where they can run beside another half's products."""
    exchanging = [step for step in steps if step.exchanges]
    within = {step.eqn.primitive.name for step in exchanging if step.eqn is not None}
    if within and not any(map(_only_exchanges, exchanging)):
        rule = "they must stand beside products, not within what holds products, too"
        remedy = "wrap the function that is within, as jax.checkpoint(two_batch_overlap(layer))"
        raise CollectiveError(f"a layer with collectives in {sorted(within)}", rule, remedy)
