"""Collectives over narrower wires (see `wires`): one form of each for every backend, and rings.

What a device sends is quantised once, and a backend's own function moves values and scales in one
buffer, so that scales travel with their chunk:

    all_gather, all_to_all,
    ppermute, ragged_all_to_all    values and scales move; what arrives is dequantised
    reduce_scatter                 all_to_all of the blocks; each device adds its n terms of float32
                                   in the order of the ranks
    all_reduce                     that, and an all_gather of the sums, which are quantised again;
                                   of two devices, or by name, an all_gather of the terms: each
                                   device adds them; maxima and minima likewise, not added

Sums take groups of the flattened block, or rows of it. With b_p the error bound of device p's term
(half a step, see `wires.error_bound`) and B that of the sum: a scattered sum is within
b_0 + ... + b_(n-1) of the exact one, and a psum of three or more within B more; all of it before
the result is rounded to the operand's dtype.
A sum beyond that dtype is inf; so a psum of three or more has NaN in its group, as wherever a
group holds inf.
With b the largest of these bounds, and B that of the maximum, a maximum or minimum is within b of
the exact one if its terms are gathered, else within b + B.

On GPUs kernels of one pass quantise, and dequantise or add, where `gpu_codec` serves, and write to
peers' memory where that is reached (`nccl_packed`); elsewhere, and for maxima, passes of XLA do
it: the same bits.
On TPUs kernels of one pass do it too, where `kernels.wire_format` has a format for the blocks; and
gathers, exchanges and permutes of whole tiles are packed and unpacked in their kernels instead:
other bits, within the same bound. Sums can be added on the way, round a ring,
along a line or over a torus, with the bytes of a ring: they are rounded at every hop, and a psum is
one kernel. Whether a wire is used, and in which of these ways, is settled in `wire_choice`, and
counted (`wire_counts`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives import _compat, simulation, wires
from pallas_collectives.annotations import DTypeLike, Number
from pallas_collectives.backends import counters, ordered
from pallas_collectives.backends.layout import blocks as blocks_of
from pallas_collectives.backends.layout import side_by_side
from pallas_collectives.backends.pallas import packed
from pallas_collectives.backends.plans import MOVES, How, Plan
from pallas_collectives.backends.wire_choice import by_lax, settled
from pallas_collectives.backends.wire_ways import Move, by_kernels, gathers_terms, rows_by_kernels
from pallas_collectives.tiles import SUBLANES
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire

if TYPE_CHECKING:
    from pallas_collectives.kernels.wire_format import Format


class OnWire:
    """A backend's canonical functions, with numbers that are narrower on the way."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def all_gather(self, x: jax.Array, group: Group, *, axis: int, how: How) -> jax.Array:
        """The group's blocks side by side along `axis`."""
        sent_by = functools.partial(packed.gather_bytes, x=x, axis=axis, group=group)
        wire, plain, way = settled("all_gather", x, (1, *x.shape), group, how, sent_by)
        if wire is None or not wire.scaled:
            gathered = self._module.all_gather(_cast(x, wire), group, axis=axis, how=plain)
            return gathered.astype(x.dtype)
        if way.packs:
            named = dataclasses.replace(plain, algorithm=way.algorithm)
            return packed.all_gather(x, group, axis=axis, wire=wire, how=named)
        return side_by_side(_brought(x[None], wire, self._move("gather", group, plain)), axis)

    def all_to_all(
        self, x: jax.Array, group: Group, *, split_axis: int, concat_axis: int, how: How
    ) -> jax.Array:
        """Block p goes to p and lands as block `me`."""
        at: dict[str, Any] = {"split_axis": split_axis, "concat_axis": concat_axis}
        blocks = jax.eval_shape(lambda x: blocks_of(x, split_axis, group.size), x)
        sent_by = functools.partial(packed.exchange_bytes, x=x, **at, group=group)
        wire, plain, way = settled("all_to_all", x, blocks.shape, group, how, sent_by)
        if wire is None or not wire.scaled:
            return self._module.all_to_all(_cast(x, wire), group, **at, how=plain).astype(x.dtype)
        if way.packs:
            named = dataclasses.replace(plain, algorithm=way.algorithm)
            return packed.all_to_all(x, group, **at, wire=wire, how=named)
        parts = blocks_of(x, split_axis, group.size)
        come = _brought(parts, wire, self._move("exchange", group, plain))
        return side_by_side(come, concat_axis)

    def ppermute(
        self, x: jax.Array, group: Group, *, perm: tuple[tuple[int, int], ...], how: How
    ) -> jax.Array:
        """What the source sends; zeros on devices without a source."""
        rows = x if x.ndim > how.mapped else x[..., None]
        sent_by = functools.partial(packed.permute_bytes, x=rows, perm=perm, group=group)
        wire, plain, way = settled("ppermute", x, (1, *rows.shape), group, how, sent_by)
        if wire is None or not wire.scaled:
            come = self._module.ppermute(_cast(x, wire), group, perm=perm, how=plain)
            return come.astype(x.dtype)
        if way.packs:
            named = dataclasses.replace(plain, algorithm=way.algorithm)
            return packed.ppermute(x, group, perm=perm, wire=wire, how=named)
        move = self._move("permute", group, plain, perm)
        return _brought(rows[None], wire, move).reshape(x.shape)

    def ragged_all_to_all(
        self,
        operand: jax.Array,
        output: jax.Array,
        tables: Sequence[jax.Array],
        group: Group,
        *,
        how: How,
    ) -> jax.Array:
        """Rows to each device; every row has its scales behind it. Rows that do not come stay."""
        rows = operand.reshape(*operand.shape[: 1 + how.mapped], -1)
        wire, plain, _ = settled("ragged_all_to_all", operand, rows.shape, group, how)
        exchange = self._module.ragged_all_to_all
        if wire is None:
            return exchange(operand, output, tables, group, how=plain)
        if not wire.scaled:
            bits = lax.bitcast_convert_type(operand.astype(wire.dtype), jnp.int16)
            sent = jnp.where(bits == -1, np.int16(0x7FFF), bits)  # NaN as another NaN
            come = exchange(sent, jnp.full(output.shape, -1, jnp.int16), tables, group, how=plain)
            numbers = lax.bitcast_convert_type(come, jnp.dtype(wire.dtype)).astype(output.dtype)
            return jnp.where(come == -1, output, numbers)
        if format := rows_by_kernels(rows.shape, rows.dtype, wire, plain.backend):
            from pallas_collectives.kernels import row_passes  # which other backends do not need

            apart, onto = (x.reshape(-1, rows.shape[-1]) for x in (rows, output))
            sent = row_passes.pack(apart, format, interpret=plain.interpret)
            sent = sent.reshape(len(rows), -1, *sent.shape[2:])
            blank = row_passes.blank(len(onto), format, interpret=plain.interpret)
            blank = blank.reshape(len(output), *sent.shape[1:])
            come = exchange(sent, blank, tables, group, how=plain).reshape(-1, *format.shape)
            total = row_passes.unpack(come, onto, format, interpret=plain.interpret)
            return total.reshape(output.shape)
        packed = wires.pack(*wires.quantize(rows, wire), cut=False)
        blank = jnp.full((len(output), *packed.shape[1:]), -1, jnp.int8)  # no scale is all ones
        come = exchange(packed, blank, tables, group, how=plain)
        values, scales = wires.unpack(come, rows.shape[1:], wire)
        first = lax.bitcast_convert_type(scales.reshape(len(scales), -1)[:, 0], jnp.uint32)
        received = lax.expand_dims(first != np.uint32(0xFFFFFFFF), range(1, output.ndim))
        numbers = wires.dequantize(values, scales, output.dtype)
        return jnp.where(received, numbers.reshape(output.shape), output)

    def reduce_scatter(self, x: jax.Array, group: Group, *, axis: int, how: How) -> jax.Array:
        """The sum of everyone's block `me`."""
        blocks = blocks_of(x, axis, group.size)
        flatten = functools.partial(flattened, how=how)
        at = jax.eval_shape(flatten, blocks).shape
        wire, plain, way = settled("reduce_scatter", x, at, group, how)
        if wire is None or not wire.scaled:
            summed = self._module.reduce_scatter(_cast(x, wire), group, axis=axis, how=plain)
            return summed.astype(x.dtype)
        if way.packs:
            named = dataclasses.replace(plain, algorithm=way.algorithm)
            options = {"wire": wire, "result": x.dtype, "how": named}
            if math.prod(at) == x.size:
                return self._module.requantized_scatter(x, group, axis=axis, **options)
            sums = self._module.requantized_scatter(flatten(blocks), group, axis=0, **options)
        else:
            sums = _added(flatten(blocks), wire, self._move("exchange", group, plain), x.dtype)
        return out_of_blocks(sums, blocks.shape[1:], how).astype(x.dtype)

    def all_reduce(self, x: jax.Array, group: Group, *, op: str, how: How) -> jax.Array:
        """The sum, maximum or minimum, everywhere."""
        n = group.size
        how = how if op == "sum" else dataclasses.replace(how, once=True)
        cut = functools.partial(in_blocks, how=how, n=n)
        wire, plain, way = settled("all_reduce", x, jax.eval_shape(cut, x).shape, group, how)
        if wire is None or not wire.scaled:
            return self._module.all_reduce(_cast(x, wire), group, op=op, how=plain).astype(x.dtype)
        blocks, gather = cut(x), self._move("gather", group, plain)
        if way.packs:
            rows = math.prod(x.shape[:-1])
            if blocks.size == x.size and rows % n == 0 and x.shape[-1] % int(wire.group) == 0:
                blocks = x.reshape(n, rows // n, x.shape[-1])  # as they lie
            named = dataclasses.replace(plain, algorithm=way.algorithm)
            whole = self._module.requantized_reduce(blocks, group, wire=wire, how=named)
        elif gathers_terms(n, way.algorithm):
            terms = blocks.reshape(1, -1, *blocks.shape[2:])
            whole = _added(terms, wire, gather, x.dtype, op)
        else:
            whole = _reduced(blocks, wire, self._move("exchange", group, plain), gather, op)
        return out_of_blocks(whole, x.shape, how)

    def _move(self, op: str, group: Group, how: How, perm: Sequence[tuple[int, int]] = ()) -> Move:
        """A gather or exchange of blocks, or a permute."""
        name, options = MOVES[op], {"perm": perm} if op == "permute" else {"axis": 0}
        if op == "exchange":
            options = {"split_axis": 0, "concat_axis": 0}

        def at_once(packed: jax.Array) -> jax.Array:
            module = self._module
            if why := by_lax(name, how):
                from pallas_collectives.backends import xla as module  # which others do not need

                kept: dict[str, Any] = {"op": name, "why": why, "nbytes": packed.nbytes}
                counters.note(Plan(backend="xla", beside=True, **kept))
            return getattr(module, name)(packed, group, **options, how=how)

        return Move(op, group, how, at_once, tuple(perm))


def moved(
    blocks: jax.Array, wire: Wire, move: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """(k, *block) -> the values and scales of the blocks that have come, by one collective."""
    return wires.unpack(move(wires.pack(*wires.quantize(blocks, wire))), blocks.shape[1:], wire)


def _added(
    blocks: jax.Array, wire: Wire, move: Move, result: DTypeLike, op: str = "sum"
) -> jax.Array:
    """(k, elements) -> (elements,): the sum, in float32, of everyone's terms that `move` brings.

    result: the sum's dtype.
    op: "sum"; or "max" or "min" for what is not added.
    """
    if op == "sum" and _in_one_pass(blocks, wire, move):
        return _by_kernels(blocks, wire, move, dtype=result, adds=True)
    if format := by_kernels(blocks.shape, blocks.dtype, wire, move.how.backend):
        return _by_passes(blocks, format, move, result, op).reshape(blocks.shape[1:])
    values, scales = moved(blocks, wire, move.at_once)
    limit = float(jnp.finfo(blocks.dtype).max)

    def term(number: Number) -> jax.Array:
        return jnp.clip(_term(values, scales, number), -limit, limit)

    return ordered.total(term, move.group.size, op).astype(result)


def _reduced(
    blocks: jax.Array, wire: Wire, exchange: Move, gather: Move, op: str = "sum"
) -> jax.Array:
    """(n, elements) -> the same: the sum of everyone's blocks, of which each device adds one."""
    if op == "sum" and _in_one_pass(blocks, wire, exchange):
        return _by_kernels(blocks, wire, exchange, gather, dtype=blocks.dtype, adds=False)
    sums = _added(blocks, wire, exchange, jnp.float32, op)
    return _brought(sums[None], wire, gather, blocks.dtype)


def _brought(
    blocks: jax.Array, wire: Wire, move: Move, dtype: DTypeLike | None = None
) -> jax.Array:
    """(k, *block) -> the blocks that have come, in their dtype or another.

    What overflows in that is sent as inf: the wire would bring its largest number instead, and hide
    that a sum has overflowed.
    """
    dtype = blocks.dtype if dtype is None else dtype
    if _in_one_pass(blocks, wire, move):
        come = _by_kernels(blocks, wire, move, dtype=dtype, adds=False)
        return come.reshape(-1, *blocks.shape[1:])
    format = by_kernels(blocks.shape, blocks.dtype, wire, move.how.backend, result=dtype)
    if format:
        come = _by_passes(blocks, format, move, dtype)
        return come.reshape(-1, *blocks.shape[1:])
    return wires.dequantize(*moved(wires.overflown(blocks, dtype), wire, move.at_once), dtype)


def _by_passes(
    blocks: jax.Array, format: "Format", move: Move, dtype: DTypeLike, op: str = ""
) -> jax.Array:
    """The blocks that come, or what `op` makes of them, by kernels that make the passes."""
    from pallas_collectives.kernels import wire_passes  # which other backends do not need

    simulated: Any = {"interpret": move.how.interpret}
    sent_as = blocks.dtype if op else dtype
    come = move.at_once(wire_passes.pack(blocks, format, sent_as, **simulated))
    if op:
        return wire_passes.added(come, format, blocks.dtype, dtype, op=op, **simulated)
    return wire_passes.unpack(come, format, dtype, **simulated)


def _by_kernels(
    blocks: jax.Array, wire: Wire, *moves: Move, dtype: DTypeLike, adds: bool
) -> jax.Array:
    from pallas_collectives.backends import nccl_packed  # which other backends do not need

    return nccl_packed.moved(blocks, wire, *moves, dtype=dtype, adds=adds)


def _in_one_pass(blocks: jax.Array, wire: Wire, move: Move) -> bool:
    """Whether kernels quantise and dequantise blocks in one pass each; else passes of XLA do."""
    return move.how.backend == "nccl" and on_gpus(blocks, wire, move.op, move.group)


def on_gpus(blocks: jax.Array, wire: Wire, op: str, group: Group) -> bool:
    """The same of blocks on GPUs, which a gather, exchange or permute moves."""
    from pallas_collectives.kernels import gpu_codec  # which other backends do not need

    come = 1 if op == "permute" else group.size
    return gpu_codec.serves(blocks.shape, wire, come) and _converts(wire)


def _converts(wire: Wire) -> bool:
    """Whether there is a Triton that converts to a wire's numbers: to float8_e4m3fn from Ada on."""
    if _compat.triton_params() is None:
        return False
    if wire.dtype != "float8_e4m3fn" or simulation.platform() == "cpu":
        return True
    capability = jax.local_devices()[0].compute_capability
    return tuple(map(int, capability.split("."))) >= (8, 9)


def _term(values: jax.Array, scales: jax.Array, number: Number) -> jax.Array:
    return wires.dequantize(
        *(lax.dynamic_index_in_dim(part, number, keepdims=False) for part in (values, scales))
    )


def in_blocks(x: jax.Array, how: How, n: int) -> jax.Array:
    """An operand of a sum, of any shape, as n blocks of whole groups, with padding behind it.

    Where it is of several `pieces`, there is padding behind each.
    """
    if how.pieces:
        parts = jnp.split(x, np.cumsum(how.pieces)[:-1])
        x = jnp.concatenate([jnp.pad(part, (0, -part.size % _whole(how))) for part in parts])
    flat = flattened(x[None], how, n)[0]
    unit = n * (_whole(how) if flat.ndim == 1 else 1)
    padding = [(0, -len(flat) % unit), *[(0, 0)] * (flat.ndim - 1)]
    return jnp.pad(flat, padding).reshape(n, -1, *flat.shape[1:])


def flattened(blocks: jax.Array, how: How, cut: int = 1) -> jax.Array:
    """(k, *block) -> (k, numbers), in which sums are quantised; (k, rows, columns) by rows.

    So it is where groups are rows, and where rows are whole groups and lie in whole tiles, also of
    blocks that are `cut`. Else elements of vmap's are padded, so that no group is of two.
    """
    block = blocks.shape[1:]
    if _by_rows(how) or _of_tiles(block, how, cut):
        columns = block[-1] if len(block) > how.mapped else 1
        return blocks.reshape(len(blocks), math.prod(block) // columns, columns)
    elements = math.prod(block[: how.mapped])
    size = math.prod(block) // elements
    padding = -size % _whole(how) if how.mapped else 0
    apart = blocks.reshape(len(blocks), elements, size)
    return jnp.pad(apart, ((0, 0), (0, 0), (0, padding))).reshape(len(blocks), -1)


def out_of_blocks(flat: jax.Array, shape: tuple[int, ...], how: How) -> jax.Array:
    """What `flattened` makes of one block, or `in_blocks` of all, in the shape before."""
    if how.pieces:
        padded = [size + -size % _whole(how) for size in how.pieces]
        parts = jnp.split(flat.reshape(-1), np.cumsum(padded))
        return jnp.concatenate([part[:size] for part, size in zip(parts, how.pieces, strict=False)])
    numbers, elements = math.prod(shape), math.prod(shape[: how.mapped])
    if flat.size == numbers:
        return flat.reshape(shape)
    if _by_rows(how) or not how.mapped:
        return flat.reshape(-1)[:numbers].reshape(shape)
    size = numbers // elements
    each = size + -size % _whole(how)
    return flat.reshape(-1)[: elements * each].reshape(elements, each)[:, :size].reshape(shape)


def _by_rows(how: How) -> bool:
    """Whether a sum's groups are rows."""
    return how.wire is not None and how.wire.group == "row"


def _of_tiles(block: tuple[int, ...], how: How, cut: int) -> bool:
    """Whether a block's rows are whole groups, and whole tiles after the `cut`."""
    if how.wire is None or not how.wire.scaled or len(block) < 2 + how.mapped:
        return False
    tiled = math.prod(block[:-1]) % (cut * SUBLANES) == block[-2] % SUBLANES == 0
    return tiled and block[-1] % _whole(how) == 0


def _whole(how: How) -> int:
    """In how many numbers a sum's operand is cut at the least: whole groups."""
    wire = how.wire
    return wire.group if wire is not None and wire.scaled and isinstance(wire.group, int) else 1


def _cast(x: jax.Array, wire: Wire | None) -> jax.Array:
    return x if wire is None else x.astype(wire.dtype)
