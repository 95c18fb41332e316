"""A scan over layers whose weights are gathered while the layer before them computes.

Weights are cut in pieces, one a device. A scan that gathers them where it uses them waits for each
gather: XLA carries nothing over from one turn to the next. Here a turn asks for the weights of the
next, and holds what it has been brought:

    turn            gathers     computes                    scatters
    (before)        w 0
    0               w 1         layer 0
    1               w 2         layer 1
    2                           layer 2
    backward, 2     w 1         layer 2 and its derivative
    backward, 1     w 0         layer 1 ...                 gradient of w 2
    backward, 0                 layer 0 ...                 gradient of w 1
    (behind)                                                gradient of w 0

So each gather and scatter but the first and the last has a layer's products beside it. They are
started and done as split collectives are (`overlap.split`), so what lets the core go on runs them:
copy engines on the GPUs of one host, lax where XLA runs it beside compute, else a SparseCore.
Memory: the weights of two layers, and, for the gradient, each layer's input; layers are computed
again on the way back.

XLA starts its own gathers early in a turn (v5e, 7x). A SparseCore's call it starts as late as it
may: in a loop right before the turn ends, with nothing beside it, but before a product that does
not need it where the next layer is in the same turn. So there several layers go into one turn.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from pallas_collectives import validation, wires
from pallas_collectives.errors import CollectiveError, WireError
from pallas_collectives.overlap import split
from pallas_collectives.overlap.started import Started
from pallas_collectives.topology import chips
from pallas_collectives.tuning import overlaps
from pallas_collectives.validation import AxisName
from pallas_collectives.wires import Wire, WireLike

Layer = Callable[[Any, Any], Any]


# Layers of a turn where a SparseCore gathers: all gathers of a turn but one are hidden.
_UNROLLED = 8


def scan_gathered(
    layer: Layer,
    carry: Any,
    weights: Any,
    axis_name: AxisName,
    *,
    unroll: int | None = None,
    wire: WireLike = None,
    wire_backward: WireLike = None,
) -> Any:
    """A scan of layers over weights that are gathered one layer ahead, inside `jax.shard_map`.

    Equals, but for the time it takes,

        lax.scan(lambda c, w: (layer(c, gathered(w)), None), carry, weights)[0]

    where `gathered` is `lax.all_gather(w, axis_name, tiled=True)` of each leaf.

    Args:
      layer: (carry, the weights of one layer) -> carry, of equal shapes and dtypes. It closes over
        no traced value.
      carry: pytree of arrays.
      weights: pytree of arrays (layers, s, ...): this device's piece of each layer's weights.
      axis_name: mesh axis, or tuple of axes, of the n devices that hold the pieces.
      unroll: layers in one turn of the loop; by default 8 where a SparseCore gathers, else 1.
      wire: in what narrower numbers weights are gathered, also on the way back, if in any (see
        `wires`).
      wire_backward: likewise, of the sums of their gradients.

    Returns:
      The carry behind the last layer. Reverse-mode derivatives gather weights anew, one layer
      ahead, and scatter each gradient while the next one is computed.

    Raises:
      CollectiveError: no weights, or weights with different numbers of layers; a layer that returns
        more than the carry.
      UnboundAxisError: no mesh in scope has the axis.
      DtypeError, WireError: the weights cannot go over a wire that is named, or would take more
        bytes, or it rounds stochastically: turns would draw the same.

    Example, inside `jax.shard_map` over 8 devices:
      x: f32[64, 512], w: f32[12, 64, 512] ->
        scan_gathered(lambda x, w: jnp.tanh(x @ w), x, w, "x"): f32[64, 512]

    Example, with `jax.vmap` in place of a mesh:
      >>> x, layers = jnp.ones((2, 1, 2)), jnp.ones((2, 3, 1, 2))  # 3 layers of 2x2
      >>> jax.vmap(
      ...     lambda x, w: pc.scan_gathered(lambda x, w: x @ w, x, w, "x"), axis_name="x"
      ... )(x, layers).tolist()
      [[[8.0, 8.0]], [[8.0, 8.0]]]
    """
    validation.size_of(axis_name)
    _check_layers(weights)
    if unroll is None:
        unroll = _UNROLLED if overlaps.gathers_on_sparsecore(chips.current()) else 1
    if not isinstance(unroll, int | np.integer) or isinstance(unroll, bool) or unroll < 1:
        rule = "it must be a whole number of 1 or more: the layers in one turn of the loop"
        raise CollectiveError(f"unroll={unroll!r}", rule, "pass 1, for example, or leave it out")
    there, back = map(wires.named, (wire, wire_backward))
    for name, found in (("wire", there), ("wire_backward", back)):
        if found is not None and found.key is not None:
            rule = "all turns of the scan would draw from one key"
            raise WireError(f"{name}={found!r}", rule, "leave rounding and key out")
    moves = _Moves(axis_name, there, back)
    return _scan(layer, moves, unroll, carry, weights)


class _Moves(NamedTuple):
    """How weights are gathered, and gradients summed.

    Attributes:
      axis_name: of the devices.
      wire, wire_backward: as `scan_gathered`'s.
    """

    axis_name: AxisName
    wire: Wire | None
    wire_backward: Wire | None

    def gather(self, pieces: Any) -> Started:
        return split.all_gather_start(pieces, self.axis_name, tiled=True, wire=self.wire)

    def scatter(self, gradient: Any) -> Started:
        wire = self.wire_backward
        return split.psum_scatter_start(gradient, self.axis_name, tiled=True, wire=wire)


def _check_layers(weights: Any) -> None:
    """Checks that there are weights, and as many layers in all of them."""
    shapes = {where: np.shape(leaf) for leaf, where in validation.leaves(weights)}
    if not shapes:
        rule = "weights must be arrays whose first dimension counts layers, and there are no arrays"
        raise CollectiveError(f"weights={weights!r}", rule, "give arrays, or write jax.lax.scan")
    depths = {shape[:1] for shape in shapes.values()}
    if len(depths) > 1 or depths <= {(), (0,)}:
        found = ", ".join(f"{shape}{where}" for where, shape in shapes.items())
        rule = "the first dimension of each is the number of layers, equal in all and 1 or more"
        raise CollectiveError(f"weights of {found}", rule, "stack the layers of each weight")


def _at(weights: Any, layers: Any) -> Any:
    return jax.tree.map(lambda w: w[layers], weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scan(layer: Layer, moves: _Moves, unroll: int, carry: Any, weights: Any) -> Any:
    return _forward(layer, moves, unroll, carry, weights)[0]


def _forward(layer: Layer, moves: _Moves, unroll: int, carry: Any, weights: Any) -> tuple[Any, Any]:
    """The last carry; and the weights with each layer's input."""

    def turn(state: Any, following: Any) -> tuple[Any, Any]:
        carry, whole = state
        ahead = moves.gather(following)
        result = _through(layer, ahead.before(carry), whole)
        return (result, ahead.done(after=result)), carry

    first = moves.gather(_at(weights, 0)).done()
    (last, whole), inputs = lax.scan(
        turn, (carry, first), _at(weights, slice(1, None)), unroll=unroll
    )
    return _through(layer, last, whole), (weights, inputs, last)


def _through(layer: Layer, carry: Any, whole: Any) -> Any:
    """The carry behind a layer."""
    result = layer(carry, whole)
    gives: Any = jax.tree.structure(result)
    takes: Any = jax.tree.structure(carry)
    if gives != takes:
        value, rule = f"layer gives {gives}", f"it must give the carry alone, which is {takes}"
        raise CollectiveError(value, rule, "return x, and not (x, None) as for jax.lax.scan")
    return result


def _backward(
    layer: Layer, moves: _Moves, unroll: int, saved: Any, cotangent: Any
) -> tuple[Any, Any]:
    weights, inputs, last = saved

    def scattered_now(gradient: Any) -> Any:
        return moves.scatter(gradient).done()

    def derived(carry: Any, whole: Any, cotangent: Any) -> tuple[Any, Any]:
        return jax.vjp(layer, carry, whole)[1](cotangent)

    def turn(state: Any, before: Any) -> tuple[Any, Any]:
        cotangent, whole, gradient = state
        carry, piece = before
        ahead, scattered = moves.gather(piece), moves.scatter(gradient)
        carry, cotangent = scattered.before(ahead.before((carry, cotangent)))
        results = derived(carry, whole, cotangent)
        cotangent, gradient = results
        return (cotangent, ahead.done(after=results), gradient), scattered.done(after=results)

    depth = len(jax.tree.leaves(weights)[0])
    whole = moves.gather(_at(weights, depth - 1)).done()
    if depth == 1:
        cotangent, gradient = derived(last, whole, cotangent)
        return cotangent, jax.tree.map(lambda g: g[None], scattered_now(gradient))
    second = moves.gather(_at(weights, depth - 2))
    last, cotangent = second.before((last, cotangent))
    results = derived(last, whole, cotangent)
    (cotangent, gradient), ahead = results, second.done(after=results)
    # A turn computes layer i, and gathers for i - 1: so the first layer is left for afterwards.
    pieces = _at(weights, slice(0, depth - 2))
    behind = _at(inputs, slice(1, None))
    state, scattered = lax.scan(
        turn, (cotangent, ahead, gradient), (behind, pieces), reverse=True, unroll=unroll
    )
    cotangent, whole, gradient = state
    under_way = moves.scatter(gradient)
    carry, cotangent = under_way.before((_at(inputs, 0), cotangent))
    results = derived(carry, whole, cotangent)
    cotangent, gradient = results
    gradients = jax.tree.map(
        lambda a, b, others: jax.numpy.concatenate([a[None], b[None], others]),
        scattered_now(gradient),
        under_way.done(after=results),
        scattered,
    )
    return cotangent, gradients


_scan.defvjp(_forward, _backward)
