"""Collectives over narrower wires (see `wires`): one form of each, for every backend.

What a device sends is quantised once, and a backend's own function moves values and scales in one
buffer, so that scales travel with their chunk:

    all_gather, all_to_all,
    ppermute, ragged_all_to_all    values and scales move; what arrives is dequantised
    reduce_scatter                 all_to_all of the blocks; each device adds its n terms of float32
                                   in the order of the ranks
    all_reduce                     that, and an all_gather of the sums, which are quantised again

Sums take groups of the flattened block. With b_p the error bound of device p's term (half a step,
see `wires.error_bound`) and B that of the sum: a scattered sum is within b_0 + ... + b_(n-1) of the
exact one, and a psum within B more; all of it before the result is rounded to the operand's dtype.

Whether a wire is used is settled in `_settled`, and counted (`wire_counts`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives import catalogue, wires
from pallas_collectives.backends import algorithms, counters, ordered
from pallas_collectives.backends.layout import blocks as blocks_of
from pallas_collectives.backends.layout import side_by_side
from pallas_collectives.backends.plans import How, WirePlan
from pallas_collectives.errors import AlgorithmError, WireError
from pallas_collectives.topology import chips, placement
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire

# From so many bytes of an operand a wire is taken where no times tell: smaller ones are latency.
AUTO_BYTES = 2 << 20

Move = Callable[[jax.Array], jax.Array]  # one collective, of what is packed


class OnWire:
    """A backend's canonical functions, with numbers that are narrower on the way."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def all_gather(self, x: jax.Array, group: Group, *, axis: int, how: How) -> jax.Array:
        """The group's blocks side by side along `axis`."""
        wire, plain = _settled("all_gather", x, (1, *x.shape), group, how)

        def move(packed: jax.Array) -> jax.Array:
            return self._module.all_gather(packed, group, axis=0, how=plain)

        if wire is None or not wire.scaled:
            gathered = self._module.all_gather(_cast(x, wire), group, axis=axis, how=plain)
            return gathered.astype(x.dtype)
        return side_by_side(_dequantized(moved(x[None], wire, move), x.dtype), axis)

    def all_to_all(
        self, x: jax.Array, group: Group, *, split_axis: int, concat_axis: int, how: How
    ) -> jax.Array:
        """Block p goes to p and lands as block `me`."""
        blocks = jax.eval_shape(lambda x: blocks_of(x, split_axis, group.size), x)
        wire, plain = _settled("all_to_all", x, blocks.shape, group, how)
        if wire is None or not wire.scaled:
            at = {"split_axis": split_axis, "concat_axis": concat_axis}
            return self._module.all_to_all(_cast(x, wire), group, **at, how=plain).astype(x.dtype)
        come = moved(blocks_of(x, split_axis, group.size), wire, self._exchange(group, plain))
        return side_by_side(_dequantized(come, x.dtype), concat_axis)

    def ppermute(
        self, x: jax.Array, group: Group, *, perm: Sequence[tuple[int, int]], how: How
    ) -> jax.Array:
        """What the source sends; zeros on devices without a source."""
        rows = x if x.ndim > how.mapped else x[..., None]
        wire, plain = _settled("ppermute", x, (1, *rows.shape), group, how)

        def move(packed: jax.Array) -> jax.Array:
            return self._module.ppermute(packed, group, perm=perm, how=plain)

        if wire is None or not wire.scaled:
            return move(_cast(x, wire)).astype(x.dtype)
        return _dequantized(moved(rows[None], wire, move), x.dtype).reshape(x.shape)

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
        rows = operand.reshape(len(operand), -1)
        wire, plain = _settled("ragged_all_to_all", operand, rows.shape, group, how)
        exchange = self._module.ragged_all_to_all
        if wire is None:
            return exchange(operand, output, tables, group, how=plain)
        if not wire.scaled:
            bits = lax.bitcast_convert_type(operand.astype(wire.dtype), jnp.int16)
            sent = jnp.where(bits == -1, np.int16(0x7FFF), bits)  # NaN as another NaN
            come = exchange(sent, jnp.full(output.shape, -1, jnp.int16), tables, group, how=plain)
            numbers = lax.bitcast_convert_type(come, jnp.dtype(wire.dtype)).astype(output.dtype)
            return jnp.where(come == -1, output, numbers)
        packed = wires.pack(*wires.quantize(rows, wire))
        blank = jnp.full((len(output), *packed.shape[1:]), -1, jnp.int8)  # no scale is all ones
        come = exchange(packed, blank, tables, group, how=plain)
        values, scales = wires.unpack(come, rows.shape[1:], wire)
        received = lax.bitcast_convert_type(scales[:, :1], jnp.uint32) != np.uint32(0xFFFFFFFF)
        numbers = wires.dequantize(values, scales, output.dtype)
        kept = jnp.where(received, numbers, output.reshape(numbers.shape))
        return kept.reshape(output.shape)

    def reduce_scatter(self, x: jax.Array, group: Group, *, axis: int, how: How) -> jax.Array:
        """The sum of everyone's block `me`."""
        blocks = blocks_of(x, axis, group.size)
        shape = blocks.shape[1:]
        elements = math.prod(shape[: how.mapped])
        size = math.prod(shape) // elements
        padded = _padded(size, how)
        wire, plain = _settled("reduce_scatter", x, (group.size, elements * padded), group, how)
        if wire is None or not wire.scaled:
            summed = self._module.reduce_scatter(_cast(x, wire), group, axis=axis, how=plain)
            return summed.astype(x.dtype)
        flat = blocks.reshape(group.size, elements, size)
        flat = jnp.pad(flat, ((0, 0), (0, 0), (0, padded - size))).reshape(group.size, -1)
        sums = self._scattered(flat, wire, group, plain)
        return sums.reshape(elements, padded)[:, :size].reshape(shape).astype(x.dtype)

    def all_reduce(self, x: jax.Array, group: Group, *, op: str, how: How) -> jax.Array:
        """The sum, everywhere."""
        assert op == "sum", "maxima have no wire"
        n = group.size
        elements = math.prod(x.shape[: how.mapped])
        size = x.size // elements
        padded = _padded(size, how)
        each = -(-elements * padded // n)
        if how.wire is not None and how.wire.scaled and isinstance(how.wire.group, int):
            each = -(-each // how.wire.group) * how.wire.group  # no group lies in two blocks
        wire, plain = _settled("all_reduce", x, (n, each), group, how)
        if wire is None or not wire.scaled:
            return self._module.all_reduce(_cast(x, wire), group, op=op, how=plain).astype(x.dtype)

        def gather(packed: jax.Array) -> jax.Array:
            return self._module.all_gather(packed, group, axis=0, how=plain)

        flat = jnp.pad(x.reshape(elements, size), ((0, 0), (0, padded - size))).reshape(-1)
        blocks = jnp.pad(flat, (0, n * each - flat.size)).reshape(n, each)
        sums = self._scattered(blocks, wire, group, plain)
        whole = _dequantized(moved(sums[None], wire, gather), x.dtype).reshape(-1)[: flat.size]
        return whole.reshape(elements, padded)[:, :size].reshape(x.shape)

    def _scattered(self, blocks: jax.Array, wire: Wire, group: Group, plain: How) -> jax.Array:
        """(n, elements) -> (elements,): everyone's terms for this device, added in float32."""
        values, scales = moved(blocks, wire, self._exchange(group, plain))
        return ordered.total(lambda p: _term(values, scales, p), group.size)

    def _exchange(self, group: Group, plain: How) -> Move:
        at = {"split_axis": 0, "concat_axis": 0}
        return lambda packed: self._module.all_to_all(packed, group, **at, how=plain)


def moved(blocks: jax.Array, wire: Wire, move: Move) -> tuple[jax.Array, jax.Array]:
    """(k, *block) -> the values and scales of the blocks that have come, by one collective."""
    return wires.unpack(move(wires.pack(*wires.quantize(blocks, wire))), blocks.shape[1:], wire)


def _dequantized(come: tuple[jax.Array, jax.Array], dtype: Any) -> jax.Array:
    return wires.dequantize(*come, dtype)


def _term(values: jax.Array, scales: jax.Array, number: Any) -> jax.Array:
    return wires.dequantize(
        *(lax.dynamic_index_in_dim(part, number, keepdims=False) for part in (values, scales))
    )


def _padded(size: int, how: How) -> int:
    """Numbers of an element of vmap's, with so much padding that no group is of two elements."""
    wire = how.wire
    if not how.mapped or wire is None or not wire.scaled or not isinstance(wire.group, int):
        return size
    return -(-size // wire.group) * wire.group


def _cast(x: jax.Array, wire: Wire | None) -> jax.Array:
    return x if wire is None else x.astype(wire.dtype)


# Whether a wire is used ---------------------------------------------------------------------------


def _settled(
    op: str, x: jax.Array, blocks: tuple[int, ...], group: Group, how: How
) -> tuple[Wire | None, How]:
    """The wire that a call takes, and what is asked of the backend then; counted.

    Args:
      op: the canonical collective.
      x: the operand.
      blocks: how many blocks or rows are quantised, each by itself, and then the shape of one.
      group: the devices.
      how: the caller's wishes.

    Raises:
      DtypeError, WireError, AlgorithmError: a wire that was named cannot be had, or loses.
    """
    plain = dataclasses.replace(how, wire=None, wire_backward=None, mapped=0)
    wire = how.wire
    if wire is None or group.size == 1:  # nothing is sent
        return None, plain
    if not wire.optional:
        wires.check(wire, x.dtype, op)
    if why := wires.obstacle(wire, x.dtype) or _unfit(op, wire, how):
        _note_left_out(op, wire, why)
        return None, plain
    sent = 2 * x.size
    if wire.scaled:
        sent = blocks[0] * wires.packed_bytes(blocks[1:], wire)
    bundled_later = op == "all_reduce" and placement.are_settled_later()
    if sent >= x.nbytes and not bundled_later:
        lost = f"with scales and padding it takes {sent} bytes in place of {x.nbytes}"
        if not wire.optional:
            remedy = "leave wire=None, or wire='auto' to have it left out; or make rows longer"
            raise WireError(f"wire {wire} for {op} of {x.dtype}{list(x.shape)}", lost, remedy)
        _note_left_out(op, wire, lost)
        return None, plain
    passes_us = 1e6 * seconds_of_passes(op, x.nbytes, sent, group.size)
    us, wired_us = predicted(op, x.nbytes, sent, group, how.backend, passes_us)
    if wire.optional and us is not None and wired_us is not None and wired_us >= us:
        _note_left_out(op, wire, f"it would take {wired_us:.0f} us in place of {us:.0f}")
        return None, plain
    if wire.optional and us is None and x.nbytes < AUTO_BYTES:
        _note_left_out(op, wire, f"the operand is smaller than {AUTO_BYTES >> 20} MiB")
        return None, plain
    counters.note(
        WirePlan(op=op, backend=how.backend, algorithm=str(wire), wire=wire, nbytes=x.nbytes,
                 sent=sent, passes_us=passes_us, us=us, wired_us=wired_us)
    )  # fmt: skip
    return wire, plain


def _unfit(op: str, wire: Wire, how: How) -> str:
    """What of a call a wire cannot be had with; raises where the wire was named."""
    adds = catalogue.COLLECTIVES[op].example.adds
    if adds and wire.group == "row" and wire.scaled:
        why = "a sum's groups are of the flattened operand, which has no rows"
        if not wire.optional:
            raise WireError(f"wire {wire} for {op}", why, "take groups of 128 or 256")
        return why
    if adds and wire.scaled and how.algorithm is not None:
        why = "over a wire with scales it is an exchange and additions"
        if not wire.optional:
            remedy = "leave algorithm=None"
            raise AlgorithmError(f"algorithm={how.algorithm!r} for {op}", why, remedy)
        return why
    if adds and wire.scaled and how.order is not None:
        why = "groups have a scale together, so that bits depend on an element's neighbours"
        if not wire.optional:
            raise WireError(f"wire {wire} for {op} with order={how.order!r}", why, "leave one out")
        return why
    return ""


def _note_left_out(op: str, wire: Wire, why: str) -> None:
    counters.note(WirePlan(op=op, backend="", algorithm=None, why=why, wire=wire))


def predicted(
    op: str, nbytes: int, sent: int, group: Group, backend: str, passes_us: float
) -> tuple[float | None, float | None]:
    """Microseconds of a collective without a wire and with one; None where no table tells.

    The passes that quantise and dequantise are XLA's, before and behind, at HBM's rate.
    """
    if backend != "pallas":
        return None, None
    group = placement.arranged(group)
    n, record = group.size, catalogue.COLLECTIVES[op]
    plain = _least(op, record.block_bytes(nbytes, n), group)
    if record.example.adds:
        steps = [_least(step, sent // n, group) for step in ordered.STEPS[op]]
    else:
        steps = [_least(op, record.block_bytes(sent, n), group)]
    if plain is None or None in steps:
        return plain, None
    return plain, sum(filter(None, steps)) + passes_us


def error_in_words(op: str, wire: Wire, n: int) -> str:
    """How far a result may be from the exact one, before it is rounded to the operand's dtype."""
    if not wire.scaled:
        return "rounded to bfloat16, 2^-9 of each number, at every hop"
    shares = {"int8": "1/254 of the largest number of its group", "float8_e4m3fn": "1/16 of itself"}
    half = shares.get(wire.dtype, "1/8 of itself")
    if wire.scales != "float32" and wire.dtype == "int8":
        half = "1/127 of the largest number of its group"
    once = f"each number is off by {half} at most"
    match op:
        case "reduce_scatter":
            return f"{once}, in each of the {n} terms"
        case "all_reduce":
            return f"{once}, in each of the {n} terms and in their sum"
    return once


def _least(op: str, block_bytes: int, group: Group) -> float | None:
    times = algorithms.predicted(op, block_bytes, group, cuts=max(1, block_bytes >> 12))
    return min(times.values(), default=None)


def seconds_of_passes(op: str, nbytes: int, sent: int, n: int) -> float:
    """What quantising an operand and dequantising what comes takes at the least, on the chip here.

    Args:
      op: the canonical collective.
      nbytes: of the operand.
      sent: its bytes on the wire.
      n: devices.
    """
    copies = n if op == "all_gather" else 1
    moved_bytes = nbytes + sent  # read and written
    match op:
        case "reduce_scatter":
            moved_bytes += sent + nbytes // n
        case "all_reduce":  # terms are added, the sums quantised, and all of them dequantised
            moved_bytes += sent + sent // n + sent + nbytes
        case _:
            moved_bytes += copies * (sent + nbytes)
    return moved_bytes / chips.current().hbm_bandwidth
