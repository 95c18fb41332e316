"""Pipelines of hops and computation: what has come is used while the next is under way.

Two functions in plain JAX, on `ppermute` alone: every backend serves them, on TPUs and GPUs.

    pipelined_all_gather_and_consume    consume(block, source) for every device's block, as it comes
    pipelined_produce_and_all_to_all    produce(destination) for every device, sent once computed

Blocks go both ways round the ring. Device 0 of 5 in a gather, an exchange, and one that adds up;
`>` to the right and `<` to the left, by one position or by as many as stand behind:

    sends       meanwhile consumes
    0> 0<       0
    4> 1<       4 1
                3 2

    sends       meanwhile produces
                1 4
    1>1 4<1     2 3
    2>2 3<2     0

    sends sums  meanwhile produces
                2 3
    2> 3<       1 4
    1> 4<       0

The backend decides whether the wire is hidden. lax's permutes (backend "xla") are asynchronous: XLA
starts them, computes, and waits for them. On the GPUs of one process blocks come by copy engines
(see `split`). Our TPU kernels hold the core until everything has arrived, and NCCL's calls queue on
XLA's stream: with these two the results are the same, but nothing overlaps.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_collectives.annotations import Number
from pallas_collectives.errors import CollectiveError, DtypeError
from pallas_collectives.overlap.ring_shifts import Places, Ring, Ways
from pallas_collectives.overlap.split import Started
from pallas_collectives.validation import AxisName

# On up to this many devices every hop is written out, for XLA to arrange. On more the hops are a
# loop: programs do not grow with the ring.
UNROLLED_UP_TO = 8

_Call = Callable[..., Any]


def pipelined_all_gather_and_consume(
    x_shard: Any,
    consume: Callable[[Any, jax.Array], Any],
    axis_name: AxisName,
    *,
    axis: int = 0,
    tiled: bool = False,
    bidirectional: bool = True,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """consume(block, source) of every device's block along a mesh axis, called as blocks arrive.

    With a `consume` that returns its block this is `jax.lax.all_gather`.

    Args:
      x_shard: array or pytree of arrays: this device's block, of any shape.
      consume: (block, source) -> array or pytree of arrays. It gets the block of device number
        `source` (an int32 scalar), of x_shard's shapes. It is traced several times, and must give
        the same shapes and dtypes each time. It may close over arrays, such as weights.
      axis_name: mesh axis, or tuple of axes in the mesh's order, of n devices together.
      axis: as `all_gather`'s: the position of a new dimension of size n for the results; if tiled,
        the dimension along which they are concatenated.
      tiled: concatenate instead of stacking.
      bidirectional: pass blocks both ways round the ring, in n/2 hops (rounded down), not in n-1.
      backend: see `collectives`.
      algorithm: `ppermute`'s.

    Returns:
      The results, ordered by source.

    Every block passes n-1 links: both ways round, a link carries n/2 blocks one way and (n-1)/2 the
    other, rounded down. A device holds up to two blocks each way beside the results.

    Raises:
      UnboundAxisError: no mesh in scope has the axis.
      CollectiveError: axes not in the mesh's order, an `axis` that results do not have, or a
        consume whose results are of other shapes or dtypes at another call.
      AlgorithmError, BackendError: see `errors`.

    Example, inside `jax.shard_map` over 8 devices, a gather and a product:
      x: f32[256, 64], w: f32[64, 32] ->
        pipelined_all_gather_and_consume(x, lambda block, _: block @ w, "x", tiled=True):
        f32[2048, 32]

    Example, with `jax.vmap` in place of a mesh:
      >>> double = lambda block, source: 2 * block
      >>> jax.vmap(
      ...     lambda x: pc.pipelined_all_gather_and_consume(x, double, "x"), axis_name="x"
      ... )(jnp.arange(2.0))
      Array([[0., 2.],
             [0., 2.]], dtype=float32)
    """
    ring = Ring(axis_name, backend, algorithm)
    places = Places(ring, axis, tiled)
    consumed = _alike_each_time("consume", consume, ring)
    ways, last, far = ring.rounds(bidirectional)

    def consume_all(blocks: list[Any], ways: Ways, distance: Number, results: Any) -> Any:
        for block, way in zip(blocks, ways, strict=True):
            source = ring.at(-way * distance)
            results = places.lay(consumed(block, source), source, results)
        return results

    def hop(distance: Number, carry: Any, ways_on: Ways = ways) -> Any:
        held, results = carry
        started = [ring.start(block, way) for block, way in zip(held, ways_on, strict=False)]
        results = consume_all(_after(started, held, surely=True), ways, distance, results)
        return [under_way.done(after=results) for under_way in started], results

    x = ring.varying(x_shard)
    started = [ring.start(x, way) for way in ways]
    own = consumed(_after(started, x, surely=True), ring.me)
    arriving = [under_way.done(after=own) for under_way in started]
    results = places.lay(own, ring.me, places.room(own))
    held, results = _loop(range(1, last), hop, (arriving, results), ring.size)
    arriving, results = hop(last, (held, results), far)
    return consume_all(arriving, far, last + 1, results)


def pipelined_produce_and_all_to_all(
    produce: Callable[[jax.Array], Any],
    axis_name: AxisName,
    *,
    axis: int = 0,
    tiled: bool = False,
    reduce: str | None = None,
    wire_dtype: DTypeLike | None = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """Sends produce(destination) to every device along a mesh axis, each as soon as it is computed.

    With a `produce` that takes a block out of an array this is `jax.lax.all_to_all`, or with
    reduce="sum" `jax.lax.psum_scatter`.

    Args:
      produce: destination -> array or pytree of arrays: this device's block for the device of that
        number, an int32 scalar. It is traced several times, to the same shapes and dtypes.
      axis_name: mesh axis, or tuple of axes in the mesh's order, of n devices together.
      axis: as `all_gather`'s: the position of a new dimension of size n for the blocks received; if
        tiled, the dimension along which they are concatenated.
      tiled: concatenate instead of stacking.
      reduce: None, or "sum" to get the sum of the blocks, added up on its way to this device.
      wire_dtype: with reduce="sum", the dtype in which sums of floats travel; None for their own.
      backend: see `collectives`.
      algorithm: `ppermute`'s.

    Returns:
      The blocks received, ordered by the device they come from; or their sum, of a block's shape
      and dtype (int32 for bool).

    On up to 8 devices a block is sent straight to its destination. On more, where a permutation for
    each distance would make long programs, it is relayed over distances that are powers of two: at
    most log2(n) - 1 permutations, over the same links as on the straight way.
    Sums pass from neighbour to neighbour, n/2 blocks one way round the ring and (n-1)/2 the other,
    rounded down, in an order that the ring fixes. Floats narrower than 32 bits are added in
    float32; sums are rounded to the wire's dtype, once per hop.

    Raises:
      UnboundAxisError: no mesh in scope has the axis.
      CollectiveError: axes not in the mesh's order, an `axis` that blocks do not have, a `reduce`
        that does not exist, or a produce whose blocks are of other shapes or dtypes at another
        call.
      DtypeError: a wire_dtype that is not a float dtype, or given without reduce="sum".
      AlgorithmError, BackendError: see `errors`.

    Example, inside `jax.shard_map` over 8 devices:
      x: f32[8, 64, 32] -> pipelined_produce_and_all_to_all(lambda device: x[device], "x"):
        f32[8, 64, 32]

    Example, with `jax.vmap` in place of a mesh:
      >>> send = lambda x: pc.pipelined_produce_and_all_to_all(lambda device: x[device], "x")
      >>> jax.vmap(send, axis_name="x")(jnp.arange(4.0).reshape(2, 2))
      Array([[0., 2.],
             [1., 3.]], dtype=float32)
    """
    ring = Ring(axis_name, backend, algorithm)
    produced = _alike_each_time("produce", produce, ring)
    if reduce not in (None, "sum"):
        raise CollectiveError(f"reduce={reduce!r}", "it must be None or 'sum'", "pass one of these")
    if wire_dtype is not None and not (reduce and jnp.issubdtype(wire_dtype, jnp.floating)):
        rule = "it must be a dtype of floats, in which sums travel"
        raise DtypeError(f"wire_dtype={wire_dtype}", rule, "leave it out, or pass reduce='sum'")
    if reduce is None:
        return _exchanged(produced, ring, Places(ring, axis, tiled))
    return _added_up(produced, ring, wire_dtype)


def _exchanged(produced: _Call, ring: Ring, places: Places) -> Any:
    """Everyone's block for this device, in its place."""
    ways, last, far = ring.rounds(bidirectional=True)

    def lay_all(blocks: list[Any], ways: Ways, distance: Number, received: Any) -> Any:
        for block, way in zip(blocks, ways, strict=True):
            received = places.lay(block, ring.at(-way * distance), received)
        return received

    def hop(distance: Number, carry: Any, ways_on: Ways = ways) -> Any:
        ready, received = carry
        started = [ring.relay(b, way, distance, last) for b, way in zip(ready, ways, strict=True)]
        ready = [produced(_after(started, ring.at(way * (distance + 1)))) for way in ways_on]
        arriving = [under_way.done(after=ready) for under_way in started]
        return ready, lay_all(arriving, ways, distance, received)

    if not ways:
        own = produced(ring.me)
        return places.lay(own, ring.me, places.room(own))
    ready = [produced(ring.at(way)) for way in ways]
    ready, received = _loop(range(1, last), hop, (ready, places.room(ready[0])), ring.size)
    ready, received = hop(last, (ready, received), far)
    started = [ring.start(block, way * (last + 1)) for block, way in zip(ready, far, strict=True)]
    own = produced(_after(started, ring.me))
    arriving = [under_way.done(after=own) for under_way in started]
    return lay_all(arriving, far, last + 1, places.lay(own, ring.me, received))


def _after(started: list[Started], x: Any, surely: bool = False) -> Any:
    """x, for what is computed once these are under way; see `Started.before`."""
    for under_way in started:
        x = under_way.before(x, surely)
    return x


def _added_up(produced: _Call, ring: Ring, wire_dtype: DTypeLike | None) -> Any:
    """The sum of everyone's block for this device; each starts where that is furthest away."""
    ways, last, far = ring.rounds(bidirectional=True)

    def terms(destination: Number) -> Any:
        def counted(leaf: jax.Array) -> jax.Array:
            return leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf

        return jax.tree.map(counted, produced(destination))

    def on_wire(dtype: DTypeLike) -> DTypeLike:
        floats = jnp.issubdtype(dtype, jnp.floating)
        return wire_dtype if floats and wire_dtype is not None else dtype

    def add(to: Callable[[Any], Any], own: jax.Array, *arrived: jax.Array) -> jax.Array:
        floats = jnp.issubdtype(own.dtype, jnp.floating)
        wide = jnp.promote_types(own.dtype, jnp.float32) if floats else own.dtype
        return sum((a.astype(wide) for a in arrived), own.astype(wide)).astype(to(own.dtype))

    def start_all(sums: list[Any], ways: Ways) -> list[Started]:
        return [ring.start(total, way) for total, way in zip(sums, ways, strict=True)]

    def add_own(started: list[Started], places: list[Any], to: Callable[[Any], Any]) -> list[Any]:
        """The own blocks for these places, each with the sum that arrives for it, if one does."""
        own = [terms(_after(started, place)) for place in places]
        arriving = [[under_way.done(after=own)] for under_way in started]
        arriving += [[]] * (len(own) - len(started))
        added = functools.partial(add, to)
        return [jax.tree.map(added, o, *a) for o, a in zip(own, arriving, strict=True)]

    def hop(distance: Number, sums: list[Any]) -> list[Any]:
        return add_own(start_all(sums, ways), at(ways, distance), on_wire)

    def at(ways: Ways, distance: Number) -> list[Any]:
        return [ring.at(way * distance) for way in ways]

    if not ways:
        return add_own([], [ring.me], lambda own: own)[0]
    sums = add_own([], at(far, last + 1), on_wire)
    sums = add_own(start_all(sums, far), at(ways, last), on_wire)
    started = start_all(_loop(range(last - 1, 0, -1), hop, sums, ring.size), ways)
    own = terms(_after(started, ring.me))
    arriving = [under_way.done(after=own) for under_way in started]
    return jax.tree.map(functools.partial(add, lambda own: own), own, *arriving)


_ARGUMENTS = {"consume": ("block", "source"), "produce": ("destination",)}


def _alike_each_time(name: str, function: Callable[..., Any], ring: Ring) -> _Call:
    """The caller's function, its results typed as varying, and checked to be alike at each call."""
    if not callable(function):
        remedy = f"write {name}=lambda {', '.join(_ARGUMENTS[name])}: x"
        raise CollectiveError(f"{name}={function!r}", "it must be a function", remedy)
    first: Any = None

    def call(*args: Any) -> Any:
        nonlocal first
        with jax.named_scope(name):
            results = ring.varying(function(*args))
        leaves, tree = jax.tree.flatten(results)
        types = tree, [(leaf.shape, leaf.dtype) for leaf in leaves]
        first = first or types
        if types != first:
            raise CollectiveError(
                f"results of {name}: {types[1]} in {tree}, and {first[1]} in {first[0]} before",
                "structure, shapes and dtypes must be the same for every device",
                "choose shapes that do not depend on the device's number",
            )
        return results

    return call


def _loop(distances: range, hop: _Call, carry: Any, devices: int) -> Any:
    """hop(distance, carry) -> carry for every distance."""
    if devices <= UNROLLED_UP_TO or not distances:
        for distance in distances:
            carry = hop(distance, carry)
        return carry
    steps = np.array(distances, np.int32)
    # By twos, for what has come to take the place of what has left: XLA copies it otherwise.
    return lax.scan(lambda carry, d: (hop(d, carry), None), carry, steps, unroll=2)[0]
