"""What a collective in two halves gives between them; `split` starts them."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.lib.mixins import NDArrayOperatorsMixin

from pallas_collectives import catalogue, wires
from pallas_collectives.annotations import DTypeLike
from pallas_collectives.backends import (
    canonical,
    choice,
    counters,
    flights,
    ordered,
    slices,
    wire_choice,
)
from pallas_collectives.backends.plans import How
from pallas_collectives.errors import CollectiveError, StartedError
from pallas_collectives.topology.groups import Group
from pallas_collectives.validation import AxisName, Groups, varying
from pallas_collectives.wires import Wire

if TYPE_CHECKING:
    _NoArray = object  # so that a type checker finds what is refused below
else:

    class _NoArray(NDArrayOperatorsMixin):
        """Refuses what arrays have, and says to call `done()` first."""

        __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__

        def __array_ufunc__(self, *_, **__):  # all operators, and numpy's functions
            raise CollectiveError(*_too_early("a collective under way, used as an array"))

        __array__ = __getitem__ = __array_ufunc__
        __bool__ = __int__ = __float__ = __complex__ = __index__ = __array_ufunc__

        @property
        def __jax_array__(self):
            # JAX asks for it before it refuses what is no array. To an AttributeError it is deaf.
            what, rule, remedy = _too_early("a collective under way, used as an array")
            ahead = "`scan_gathered` has the next turn's weights under way"
            raise CollectiveError(what, rule, f"{remedy}, in a loop in the same turn ({ahead})")

        def __getattr__(self, name):
            raise StartedError(*_too_early(f"{name} of a collective under way"))


def _too_early(what: str) -> tuple[str, str, str]:
    return what, "its result must be asked for before it is used", "call .done() first"


class Started(_NoArray):
    """A collective under way: a result that is still to come.

    Used as an array it raises a CollectiveError.

    Example:
      >>> def sum_and_square(x):
      ...     total = pc.psum_start(x, "x")
      ...     y = x * x  # while the sum is on its way
      ...     return total.done(after=y) + y
      >>> jax.vmap(sum_and_square, axis_name="x")(jnp.arange(4.0))
      Array([ 6.,  7., 10., 15.], dtype=float32)
    """

    def __init__(
        self, tree: jax.tree_util.PyTreeDef, here: Sequence[Any], under_way: Sequence["UnderWay"]
    ) -> None:
        self._tree, self._here, self._under_way = tree, here, under_way
        self._came: list[Any] | None = None
        self._kept = False  # what is neither awaited nor followed XLA takes out of the program

    def __del__(self) -> None:
        if self._kept and self._came is None:
            logging.warning(
                "pallas_collectives: a collective was started and followed, and done() was not "
                "called: its bytes may arrive in memory that XLA uses for something else; call "
                "done() in the function in which it is started"
            )

    @property
    def tokens(self) -> list[jax.Array]:
        """What to name in another's `after`, for it to come after this one's start."""
        self._kept = bool(self._under_way)
        return [leaf.token for leaf in self._under_way]

    @classmethod
    def of(cls, result: Any) -> "Started":
        """A collective whose result is there."""
        leaves, tree = jax.tree.flatten(result)
        return cls(tree, leaves, ())

    def done(self, after: Any = ()) -> Any:
        """The result.

        Args:
          after: arrays, in any pytree, that GPUs compute before they wait for the result.
            Elsewhere XLA decides.

        Asked for again, it is what came the first time.
        """
        tokens = _arrays(after)
        if self._came is None:
            self._came = [leaf.done(tokens) for leaf in self._under_way]
        return jax.tree.unflatten(self._tree, [*self._here, *self._came])

    def before(self, arrays: Any, surely: bool = False) -> Any:
        """These arrays, for use once the collective is under way: on GPUs XLA keeps that order.

        It does so for integers, from which a 0 is taken that XLA does not know, and as a rule for
        other arrays: XLA heeds a barrier, but not in all that it does.

        Args:
          surely: take a 0 from floats that have one too: a pass over them.
        """
        for token in self.tokens:
            arrays = jax.tree.map(functools.partial(_behind, token, surely), arrays)
        return arrays


def _arrays(after: Any) -> list[Any]:
    """The arrays in `after`, checked."""
    leaves = jax.tree.leaves(after)
    for leaf in leaves:
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)):
            rule = "it must be arrays, which are computed before the result is asked for"
            raise CollectiveError(f"after={leaf!r}", rule, "pass arrays of the program")
    return leaves


def _behind(token: jax.Array, surely: bool, x: jax.Array) -> jax.Array:
    """x, which is there only after the token, a 0, is."""
    dtype = jnp.result_type(x)
    surely &= jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float8_e8m0fnu  # it has no 0
    if jnp.issubdtype(dtype, jnp.integer) or surely:
        return x - token[0].astype(dtype)  # the same bits: -0.0 - 0.0 is -0.0
    return lax.optimization_barrier((x, token))[0]  # taken away before XLA merges products


class Way(NamedTuple):
    """How one array goes by copy engines.

    Attributes:
      flight: the exchange.
      operand: what it takes.
      arrive: makes the result of what comes, or of its sum.
      adds: whether the blocks that come are added up, in the order of the devices.
      wire: in what narrower numbers they go, if in any.
      dtype: of what comes over a wire, if not the operand's.
    """

    flight: flights.Flight
    operand: jax.Array
    arrive: Callable[[jax.Array], Any]
    adds: bool = False
    wire: Wire | None = None
    dtype: DTypeLike | None = None


class UnderWay:
    """One array of a collective under way."""

    def __init__(self, way: Way, after: Sequence[jax.Array] = ()) -> None:
        self._way, self._packed = way, None
        begin: Callable[..., tuple[Any, jax.Array]] = functools.partial(flights.start, way.flight)
        if way.wire is not None:
            from pallas_collectives.backends.packed_flights import Packed  # which only wires need

            dtype = jnp.dtype(way.dtype or way.operand.dtype)
            self._packed = Packed(way.flight, way.wire, dtype, way.adds)
            begin = self._packed.start
        self._started: Any
        self._started, self.token = begin(way.operand, *after)

    def done(self, after: Sequence[jax.Array] = ()) -> jax.Array:
        """The result, waited for once `after` is there."""
        way = self._way
        if self._packed is not None:
            return way.arrive(self._packed.done(self._started, *after))
        come = flights.done(way.flight, self._started, *after)
        return way.arrive(ordered.added(come, way.flight.group.size, 0)[0] if way.adds else come)


def at_once(call: "functools.partial[Any]", after: Any) -> Started:
    """A collective that is one call where it is started, by what lets the core go on, if any does.

    That is lax where XLA runs the collective beside compute on the chip, and a SparseCore where one
    can and it takes long enough (`tuning.overlaps`); but for `override_lax(everything=True)`.

    call: of the operand, its first argument: on GPUs XLA has that only when it has `after`.
    """
    if (tokens := _arrays(after)) and choice.on_gpus():
        x, *others = call.args
        x = jax.tree.map(lambda leaf: _with(leaf, tokens), x)
        call = functools.partial(call.func, x, *others, **call.keywords)
    with choice.beside_compute(choice.beside_compute.value is not False and choice.STARTED):
        return Started.of(call())


def _with(x: Any, tokens: Sequence[Any]) -> Any:
    """x, which is there only after the tokens are; a constant is there before."""
    return lax.optimization_barrier((x, tokens))[0] if isinstance(x, jax.Array) else x


def start(
    x: Any,
    axis_name: AxisName,
    groups: Groups,
    settled: How,
    call: "functools.partial[Any]",
    narrower: Mapping[str, Any],
    leave: Callable[[jax.Array, Group, Wire | None], Way],
    after: Any,
) -> Started:
    """Starts a collective by copy engines, or all of it at once (`call`) where they cannot.

    narrower: those of call's arguments that ask for narrower numbers, or that it does not know.
    leave: how an array sets out over a wire; it is typed as different on all devices of the axes.
    """
    leaves, tree = jax.tree.flatten(x)
    whole = inspect.signature(call.func).parameters
    others = narrower.keys() - {"wire"}
    left_out = all(name in whole and whole[name].default is narrower[name] for name in others)
    wire = wires.named(narrower.get("wire"))
    drawn_or_in_order = wire is not None and (wire.key is not None or settled.order is not None)
    flies = left_out and not drawn_or_in_order and flights.serve(settled)
    if not flies or not all(map(flights.moves, leaves)):
        return at_once(call, after)
    tokens, group = _arrays(after), canonical.group_of(axis_name, groups)
    leaves = [varying(jnp.asarray(leaf), axis_name) for leaf in leaves]
    if wire is None:
        ways = [leave(leaf, group, None) for leaf in leaves]
    else:
        choice.over_wires(settled, wire, None)  # which it may not be
        if wire.optional and not slices.one_host_has(group):
            return at_once(call, after)  # no copy engines serve: a wire may gain
        op = catalogue.functions()[call.func.__name__].name
        ways = [_narrowed(leaf, group, leave, op, wire, len(leaves) == 1) for leaf in leaves]
    return Started(tree, (), [UnderWay(way, tokens) for way in ways])


def _narrowed(
    leaf: jax.Array,
    group: Group,
    leave: Callable[[jax.Array, Group, Wire | None], Way],
    op: str,
    wire: Wire,
    alone: bool,
) -> Way:
    """How an array sets out over a wire; without it where nothing is sent, or it may be left out.

    So may that of a sum of small arrays among others, which the whole call adds as one.

    Raises:
      DtypeError, WireError: it cannot be had, or loses.
    """
    if group.size == 1:
        return leave(leaf, group, None)
    why = "copy engines move it beside products as it is" if wire.optional else ""
    if not why:
        wires.check(wire, leaf.dtype, counters.lax_name(op))
        way = leave(leaf, group, wire)
        blocks = way.flight.blocks(way.operand.shape)
        sent = blocks[0] * wires.packed_bytes(blocks[1:], wire)
        if alone or not way.adds or sent < leaf.nbytes:
            return way._replace(wire=wire_choice.taken(op, leaf, sent, wire))
        why = f"with scales and padding it takes {sent} bytes in place of {leaf.nbytes}"
    wire_choice.note_left_out(op, wire, why)
    return leave(leaf, group, None)
