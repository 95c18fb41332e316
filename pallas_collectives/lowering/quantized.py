"""What a caller sees of a wire: draws of stochastic rounding, residues, and (values, scales).

All else is done where a collective is lowered (`backends.wired`). Keys are operands of the caller's
program, so numbers are drawn here, before: x becomes what its wire can send, and arrives as it is.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from pallas_collectives import _compat, validation, wires
from pallas_collectives.backends import wire_choice, wired
from pallas_collectives.backends.layout import blocks as blocks_of
from pallas_collectives.backends.layout import side_by_side
from pallas_collectives.backends.plans import How
from pallas_collectives.backends.wire_ways import by_kernels
from pallas_collectives.errors import CollectiveError, WireError
from pallas_collectives.tiles import SUBLANES
from pallas_collectives.validation import AxisName
from pallas_collectives.validation import Groups as IndexGroups
from pallas_collectives.wires import Wire, WireLike


@dataclasses.dataclass(frozen=True)
class Groups:
    """How a collective groups an operand for its scales.

    Attributes:
      axis: along which it is cut in blocks, that are grouped apart; None for one block.
      blocks: how many there are.
      flat: whether each block is flattened first, as for sums; but not where rows are whole groups.
      folds: whether constants are multiplied where they are, and not sent.
    """

    axis: int | None = None
    blocks: int = 1
    flat: bool = False
    folds: bool = False

    def over(self, fn: Callable[..., jax.Array], wire: Wire, *xs: jax.Array) -> jax.Array:
        """fn(*xs), fn being of arrays that a wire groups along their last dimension."""
        axis = None if self.axis is None else self.axis % xs[0].ndim

        def rows(x: jax.Array) -> jax.Array:
            apart = x[None] if axis is None else blocks_of(x, axis, self.blocks)
            flat = self.flat and isinstance(wire.group, int)
            if isinstance(wire.group, int) and apart.ndim > 2:  # rows may be whole groups
                lies = apart.shape[-1] % wire.group == apart.shape[-2] % SUBLANES == 0
                flat = flat and not lies
            return apart.reshape(len(apart), -1) if flat or not x.ndim else apart

        changed = fn(*map(rows, xs))
        if axis is None:
            return changed.reshape(xs[0].shape)
        shape = jax.eval_shape(lambda x: blocks_of(x, axis, self.blocks), xs[0]).shape
        return side_by_side(changed.reshape(shape), axis)

    def send(self, x: Any) -> bool:
        """Whether anything of an array or a number is sent."""
        return bool(np.size(x)) and (not self.folds or _compat.is_traced(x))


WHOLE, FLAT = Groups(), Groups(flat=True, folds=True)


def sent(
    x: Any, wire: WireLike, axis_name: AxisName, index_groups: IndexGroups, groups: Groups, how: How
) -> Any:
    """What a tree's arrays are where they set out: drawn, if the wire rounds stochastically.

    Raises:
      WireError: the wire draws for terms that are added up before they are sent (see `are_sent`).
    """
    wire = wires.named(wire)
    if wire is None or wire.key is None or not are_sent(axis_name, index_groups, groups):
        return x
    key = wire.key
    for axis in validation.named(axis_name):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    leaves, tree = jax.tree.flatten(x)
    given = [
        _drawn(jnp.asarray(leaf), wire, jax.random.fold_in(key, i), groups, how)
        if groups.send(leaf)
        else leaf
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, given)


def are_sent(axis_name: AxisName, index_groups: IndexGroups, groups: Groups) -> bool:
    """Whether a collective sends anything: from device to device, not within one.

    Raises:
      WireError: a sum is over axes of vmap and of a mesh at once. What travels is no term then, but
        the sum of those on one device.
    """
    mesh = jax.sharding.get_abstract_mesh().axis_names
    axes = validation.named(axis_name)
    between = tuple(axis for axis in axes if axis in mesh)
    if not between or validation.devices_of(between, index_groups) == 1:
        return False
    if groups.flat and between != (axis_name if isinstance(axis_name, tuple) else axes):
        rule = "what one device has is added up before it is sent, and no term is sent by itself"
        remedy = "sum over the axes of vmap first, apart; or round to nearest, without residues"
        raise WireError(f"residues or draws of a sum over {axes}", rule, remedy)
    return True


def _drawn(x: jax.Array, wire: Wire, key: jax.Array, groups: Groups, how: How) -> jax.Array:
    if wires.obstacle(wire, x.dtype):
        return x  # an error where the collective is bound, or left out there
    bits = jax.random.bits(key, (2,), jnp.uint32)
    words = lax.bitcast_convert_type(bits, jnp.int32)
    return groups.over(lambda rows: drawn(rows, words, wire.fixed, how), wire, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def drawn(x: jax.Array, words: jax.Array, wire: Wire, how: How) -> jax.Array:
    """Blocks (k, ...) rounded at random to what their wire can send: that arrives as it is.

    Its derivative is that of x: straight through.

    Args:
      x: the blocks.
      words: two int32, of the key.
      wire: the wire.
      how: what serves.
    """
    if format := by_kernels(x.shape, x.dtype, wire, how.backend):
        from pallas_collectives.kernels import wire_passes  # which only wires need

        return wire_passes.drawn(x, words, format, interpret=how.interpret).reshape(x.shape)
    group = wire.group
    of_groups = x.ndim == 2 and isinstance(group, int) and x.shape[1] % group == 0
    rows = x.reshape(len(x), -1, group) if of_groups else x  # as kernels have them
    from pallas_collectives import noise  # which only draws need

    return wires.as_sent(rows, wire, noise.of(words, rows.shape)).reshape(x.shape)


@drawn.defjvp
def _drawn_jvp(
    wire: Wire, how: How, primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    out = drawn(*primals, wire, how)
    return out, _compat.as_varying(tangents[0], _compat.varying(out))  # as the key does, too


def residue(
    x: Any,
    given: Any,
    wire: WireLike,
    axis_name: AxisName,
    index_groups: IndexGroups,
    groups: Groups,
    how: How,
) -> Any:
    """What a device's own arrays lose on their way: x less what arrives of `given`, drawn of x.

    That is nothing where nothing is sent.

    Raises:
      WireError: there is no wire, or one that may be left out; or see `are_sent`.
    """
    named = wires.named(wire)
    if named is None or named.optional:
        rule = "a residue needs a wire" + ("" if named is None else ", and this one is optional")
        raise WireError(f"return_residue=True with wire={wire!r}", rule, "write wire='int8'")
    wire = named
    travels = are_sent(axis_name, index_groups, groups)

    def lost(leaf: Any, given: Any) -> jax.Array:
        wires.check(wire, jnp.asarray(leaf).dtype, "a residue")
        if not travels or not groups.send(leaf):
            return _compat.as_varying(jnp.zeros_like(leaf), _compat.varying(leaf))
        lose = functools.partial(_lost, wire=wire.fixed, how=how)
        each = [leaf] if given is leaf else [leaf, given]  # as where nothing is drawn
        return groups.over(lose, wire, *(lax.stop_gradient(jnp.asarray(x)) for x in each))

    return jax.tree.map(lost, x, given)


def _lost(own: jax.Array, *given: jax.Array, wire: Wire, how: How) -> jax.Array:
    """Blocks (k, ...) less the terms that a sum has of them, or of those `given` instead."""
    format = by_kernels(own.shape, own.dtype, wire, how.backend)
    if format is None:
        arrived = wires.as_sent((given[0] if given else own).astype(jnp.float32), wire)
        term = wires.saturated(arrived, own.dtype, jnp.float32)
        return (own.astype(jnp.float32) - term).astype(own.dtype)
    from pallas_collectives.kernels import wire_passes  # which only wires need

    return wire_passes.lost(own, *given, format=format, interpret=how.interpret).reshape(own.shape)


# (values, scales) ---------------------------------------------------------------------------------

Move = Callable[[jax.Array], jax.Array]


def _moved(blocks: jax.Array, wire: Wire, how: How, move: Move) -> tuple[jax.Array, jax.Array]:
    """(k, *block) -> the values and scales of the blocks that have come; without derivatives."""
    blocks, block = lax.stop_gradient(blocks), blocks.shape[1:]
    format = by_kernels(blocks.shape, blocks.dtype, wire, how.backend, values=True)
    if format is None:
        return wired.moved(blocks, wire, move)
    from pallas_collectives.kernels import wire_passes  # which only wires need

    come = move(wire_passes.pack(blocks, format, blocks.dtype, interpret=how.interpret))
    values = wire_passes.values(come, format, interpret=how.interpret)
    scales = format.scales(come)
    return values.reshape(-1, *block), scales.reshape(len(come), *block[:-1], -1)


def gathered(x: Any, wire: Wire, how: How, move: Move, axis: int, tiled: bool) -> Any:
    """(values, scales) of everyone's x, for each array of a tree; `move` gathers along axis 0."""

    def gather(x: jax.Array) -> tuple[jax.Array, ...]:
        parts = _moved(x[None], wire, how, move)
        along = axis % (x.ndim + (not tiled))
        _check_groups("axis", along, x.ndim + (not tiled), tiled, x.shape[-1], wire)
        if tiled:
            return tuple(side_by_side(part, along) for part in parts)
        return tuple(jnp.moveaxis(part, 0, along) for part in parts)

    return _each(gather, x, wire)


def exchanged(
    x: Any, wire: Wire, how: How, move: Move, split_axis: int, concat_axis: int, n: int, tiled: bool
) -> Any:
    """(values, scales) of the blocks that come; `move` exchanges along axis 0."""

    def exchange(x: jax.Array) -> tuple[jax.Array, ...]:
        split, concat = split_axis % x.ndim, concat_axis % x.ndim
        blocks = blocks_of(x, split, n)
        if not tiled:
            blocks = jnp.squeeze(blocks, split + 1)
        _check_groups("concat_axis", concat, x.ndim, tiled, blocks.shape[-1], wire)
        parts = _moved(blocks, wire, how, move)
        if tiled:
            return tuple(side_by_side(part, concat) for part in parts)
        return tuple(jnp.moveaxis(part, 0, concat) for part in parts)

    return _each(exchange, x, wire)


def permuted(x: Any, wire: Wire, how: How, move: Move) -> Any:
    """(values, scales) of what comes; `move` permutes."""
    return _each(lambda x: tuple(p[0] for p in _moved(x[None], wire, how, move)), x, wire)


def received(
    operand: ArrayLike,
    output: ArrayLike,
    wire: Wire,
    move: Callable[[jax.Array, jax.Array], jax.Array],
) -> Any:
    """(values, scales) of the rows that come, and of `output` where none do.

    `move` brings rows of its first argument to the second.
    """

    def receive(operand: jax.Array) -> tuple[jax.Array, ...]:
        onto = jnp.asarray(output)
        shape = operand.shape[1:]
        sent, held = (wires.pack(*wires.quantize(x, wire), cut=False) for x in (operand, onto))
        return wires.unpack(move(sent, held), shape, wire)

    return _each(receive, operand, wire)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4))
def broadcast(x: jax.Array, wire: Wire | None, how: How, move: Move, derivative: Move) -> jax.Array:
    """What `move`, a broadcast, brings of x over a wire.

    `derivative` moves tangents: it is linear, so that its transpose is the sum of cotangents, which
    may go over a wire of its own.

    Raises:
      DtypeError, WireError: as `wire_choice.taken`.
    """
    if wire is None or not x.size:
        return move(x)
    rows = x if x.ndim else x[None]
    taken = wire_choice.taken("pbroadcast", x, wires.packed_bytes(rows.shape, wire), wire)
    if taken is None:
        return move(x)
    if not wire.scaled:
        return move(x.astype(jnp.bfloat16)).astype(x.dtype)
    come = _moved(rows[None], wire, how, move)
    return wires.dequantize(*come, x.dtype).reshape(x.shape)


@broadcast.defjvp
def _broadcast_jvp(
    wire: Wire | None,
    how: How,
    move: Move,
    derivative: Move,
    primals: Sequence[jax.Array],
    tangents: Sequence[jax.Array],
) -> Any:
    return broadcast(primals[0], wire, how, move, derivative), derivative(tangents[0])


def checked(wire: WireLike, wire_backward: WireLike, order: str | None = None) -> Wire:
    """The wire of a call with dequantize=False.

    Raises:
      WireError: the wire has no scales or may be left out; or an argument is about the derivative,
        which values and scales do not have.
    """
    if wire_backward is not None or order is not None:
        value = f"dequantize=False with wire_backward={wire_backward!r}, order={order!r}"
        rule = "values and scales have no derivative"
        raise WireError(value, rule, "leave both out, or leave dequantize=True")
    found = wires.named(wire)
    if found is None or found.optional or not found.scaled:
        rule = "values and scales need a wire that is named and has scales"
        raise WireError(f"dequantize=False with wire={wire!r}", rule, "name one like 'int8'")
    return found


def _each(fn: Callable[[jax.Array], tuple[jax.Array, ...]], x: Any, wire: Wire) -> Any:
    def one(leaf: Any) -> tuple[jax.Array, ...]:
        wires.check(wire, jnp.asarray(leaf).dtype, "values and scales")
        validation.check_axis("the last dimension", -1, jnp.ndim(leaf))
        if not jnp.size(leaf):
            value = f"dequantize=False for an array of shape {jnp.shape(leaf)}"
            raise CollectiveError(value, "an empty array has no scales", "leave dequantize=True")
        return fn(jnp.asarray(leaf))

    return jax.tree.map(one, x)


def _check_groups(name: str, axis: int, ndim: int, tiled: bool, columns: int, wire: Wire) -> None:
    """Scales stand for groups along the last dimension, also of the result."""
    whole = tiled and isinstance(wire.group, int) and columns % wire.group == 0
    if axis == ndim - 1 and not whole:
        raise CollectiveError(
            f"{name}={axis}, the last dimension, of blocks of {columns} with dequantize=False",
            "groups of scales lie along it, and blocks there must be whole groups side by side",
            "take another dimension, or leave dequantize=True",
        )
