"""Whether a call takes its wire, and in which way a sum goes over it: settled here, and counted.

A sum has these ways over a wire with scales:

    exchange        each device gets everyone's term of its block, quantised once, and adds them
    gather          of `psum`: each device gets all terms, quantised once, and adds them: n/2 times
                    the bytes of an exchange, and the least error
    bidirectional,  sums are added on the way round a ring, along a line or over a torus, and
    line, torus     quantised anew at every hop: (n-1)/n of an operand's bytes, as without a wire

The algorithms of the last are those whose record says `packed`; `psum` calls the first of them
"ring". But for the gather, a psum gathers the sums, quantised once more, and so gives everyone the
same bits; of two devices the exchange is a gather of the terms. What is only moved is quantised
once: by passes around a collective, by an algorithm whose record says `packed`, or on GPUs by
kernels that write to the peer's memory. The quicker way by the tables of times (`tuning`) is taken,
and a gather of terms where it is named; where no times tell, and where a draw or a residue presumes
in what bits terms are quantised, it is the exchange, or the passes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_collectives import catalogue, wires
from pallas_collectives.annotations import DType, DTypeLike
from pallas_collectives.backends import algorithms, counters, ordered, slices
from pallas_collectives.backends.plans import Candidate, How, WirePlan
from pallas_collectives.backends.wire_costs import (
    GATHER,
    gathers_terms,
    off_in,
    seconds_of_passes,
    seconds_to_pack,
    seconds_to_pad,
)
from pallas_collectives.catalogue.records import TORUS
from pallas_collectives.errors import AlgorithmError, WireError
from pallas_collectives.kernels.machinery.codec import Codec
from pallas_collectives.kernels.torus import reduce_scatter as torus
from pallas_collectives.topology import chips, placement
from pallas_collectives.topology.groups import Group
from pallas_collectives.tuning import overlaps
from pallas_collectives.wires import Wire

# From so many bytes of an operand a wire is taken where no times tell: smaller ones are latency.
AUTO_BYTES = 2 << 20
LINKED_BYTES = 32 << 20  # between GPUs of one host

EXCHANGE = ordered.EXCHANGE.name


class Move(NamedTuple):
    """One collective of what is packed.

    Attributes:
      op: "gather", (1, ...) to (n, ...); "exchange", (n, ...) to (n, ...); or "permute".
      group: the devices.
      how: how its backend serves it.
      at_once: it, as a function.
      perm: (source, target) pairs, of a permute.
    """

    op: str
    group: Group
    how: How
    at_once: Callable[[jax.Array], jax.Array]
    perm: tuple[tuple[int, int], ...] = ()


class Way(NamedTuple):
    """One way of a collective over a wire.

    Attributes:
      algorithm: the one that packs, or `EXCHANGE`, or `GATHER`; "" where passes of XLA do.
      sent: bytes of the operand as they travel, scales and padding included.
      passes_us: what XLA's passes over HBM take before and behind, at the least.
      us: predicted time, these included; None where no table tells.
    """

    algorithm: str
    sent: int
    passes_us: float
    us: float | None

    @property
    def packs(self) -> bool:
        """Whether its kernel packs: then sums are rounded at every hop."""
        return self.algorithm not in ("", EXCHANGE, GATHER)


_NO_WAY = Way("", 0, 0.0, None)


def gives_way(how: How) -> bool:
    """Whether a call has no wire, or one that may be left out where that is better for its step."""
    return how.wire is None or how.wire.optional


def packs(how: How, dtype: DTypeLike) -> bool:
    """Whether numbers of a dtype may be packed for a wire; without scales it is but a cast."""
    wire = how.wire
    return wire is not None and wire.scaled and not wires.obstacle(wire, dtype)


def moved_dtype(how: How, dtype: DType) -> DType:
    """The dtype of what a call moves on any engine: its own, or that of a wire without scales."""
    wire = how.wire
    casts = wire is not None and not wire.scaled and not wires.obstacle(wire, dtype)
    return jnp.dtype(wire.dtype) if wire is not None and casts else dtype


def settled(
    op: str,
    x: jax.Array,
    blocks: tuple[int, ...],
    group: Group,
    how: How,
    sent_by: Callable[[str, Wire], int] | None = None,
) -> tuple[Wire | None, How, Way]:
    """The wire that a call takes, what is asked of the backend then, and the way; counted.

    Args:
      op: the canonical collective.
      x: the operand.
      blocks: how many blocks or rows are quantised, each by itself, and then the shape of one.
      group: the devices.
      how: the caller's wishes.
      sent_by: for what is only moved, (algorithm, wire) -> bytes of the operand as they travel, if
        its kernel packs; 0 if it cannot.

    Raises:
      DtypeError, WireError, AlgorithmError: a wire that was named cannot be had, or loses.
    """
    plain = dataclasses.replace(how, wire=None, wire_backward=None, mapped=0, once=False)
    wire = how.wire
    if wire is None:
        return None, plain, _NO_WAY
    if how.algorithm == EXCHANGE and how.order is None and wire.scaled:
        plain = dataclasses.replace(plain, algorithm=None)  # it is a way of wires alone
    if group.size == 1:  # nothing is sent
        return None, plain, _NO_WAY
    if not wire.optional:
        wires.check(wire, x.dtype, counters.lax_name(op))
    why = wires.obstacle(wire, x.dtype) or _unfit(op, wire, group, how)
    if why := why or _beside(op, x, group, how):
        note_left_out(op, wire, why)
        return None, plain, _NO_WAY
    found = _ways(op, x, blocks, group, how, sent_by)
    way = _chosen(op, found, x.nbytes, how)
    bundled_later = catalogue.COLLECTIVES[op].sums_everywhere and placement.are_settled_later()
    if not bundled_later and (lost := _lost(op, x, way.sent, wire)):
        note_left_out(op, wire, lost)
        return None, plain, _NO_WAY
    us = _plain_us(op, x.nbytes, group, how.backend)
    if wire.optional and us is not None and way.us is not None and way.us >= us:
        note_left_out(op, wire, _no_quicker(way.us, us))
        return None, plain, _NO_WAY
    if us is None and (why := _small(x, wire) or _linked(op, x, wire, how)):
        note_left_out(op, wire, why)
        return None, plain, _NO_WAY
    several = found if len(found) > 1 or way.algorithm else ()
    told = tuple(_told(op, w, way, wire, group.size, x.nbytes) for w in several)
    counters.note(
        WirePlan(op=op, backend=how.backend, algorithm=str(wire), wire=wire, nbytes=x.nbytes,
                 sent=way.sent, passes_us=way.passes_us, us=us, wired_us=way.us, way=way.algorithm,
                 requantizes=_adds(op) and way.packs, candidates=told)
    )  # fmt: skip
    if wire.scaled and _adds(op):
        plain = dataclasses.replace(plain, algorithm=None)
    return wire, plain, way


def _no_quicker(wired_us: float, us: float) -> str:
    """Why a wire is left out that takes as long as nothing, or longer, in a sentence."""
    wired, plain = f"{wired_us:.1f}", f"{us:.1f}"
    without = "no less than without" if wired == plain else f"and {plain} without"
    return f"it would take {wired} us, {without}"


def taken(op: str, x: jax.Array, sent: int, wire: Wire) -> Wire | None:
    """The wire that an array takes in `sent` bytes, if any, where no table tells; counted.

    Raises:
      DtypeError, WireError: it was named and cannot be had, or loses.
    """
    if not wire.optional:
        wires.check(wire, x.dtype, counters.lax_name(op))
    if why := wires.obstacle(wire, x.dtype) or _lost(op, x, sent, wire) or _small(x, wire):
        note_left_out(op, wire, why)
        return None
    told: dict[str, Any] = {"wire": wire, "nbytes": x.nbytes, "sent": sent}
    counters.note(WirePlan(op=op, backend="", algorithm=str(wire), **told))
    return wire


def _lost(op: str, x: jax.Array, sent: int, wire: Wire) -> str:
    """What a wire that takes no fewer bytes loses; "" if it gains. Raises where it was named."""
    if sent < x.nbytes:
        return ""
    lost = f"with scales and padding it takes {sent} bytes in place of {x.nbytes}"
    if not wire.optional:
        # A sum's groups are of the flattened operand.
        larger = "sum more numbers at a time" if _adds(op) else "make rows longer"
        remedy = f"leave wire=None, or wire='auto' to have it left out; or {larger}"
        raise WireError(
            f"wire {wire} for {counters.lax_name(op)} of {x.dtype}{list(x.shape)}", lost, remedy
        )
    return lost


def _small(x: jax.Array, wire: Wire) -> str:
    """Why a wire that may be left out is, where no times tell; "" if it is taken."""
    if wire.optional and x.nbytes < AUTO_BYTES:
        return f"the operand is smaller than {AUTO_BYTES >> 20} MiB"
    return ""


def _linked(op: str, x: jax.Array, wire: Wire, how: How) -> str:
    """Why a wire that may be left out is between GPUs of one host; "" if it is taken.

    On two H200 with NVLink, 64 MiB of bfloat16, us with int8 and without: all_gather 101 and 143,
    psum 188 and 249, psum_scatter 110 and 192, ppermute 154 and 218, all_to_all 103 and 126. On two
    H100 at 16 MiB, by slower kernels: 50 and 56, 76 and 84, 55 and 64, 71 and 73, 53 and 49. Ragged
    rows take XLA's passes.
    """
    if not wire.optional or how.backend != "nccl" or not placement.are_of_one_host(jax.devices()):
        return ""
    if op == "ragged_all_to_all":
        return "between GPUs of one host the passes that quantise take longer than they save"
    least = LINKED_BYTES * (2 if op == "all_to_all" else 1)
    if x.nbytes < least:
        return f"between GPUs of one host the operand is smaller than {least >> 20} MiB"
    return ""


def _ways(
    op: str,
    x: jax.Array,
    blocks: tuple[int, ...],
    group: Group,
    how: How,
    sent_by: Callable[[str, Wire], int] | None,
) -> tuple[Way, ...]:
    """The ways that there are."""
    wire = how.wire
    assert wire is not None
    sent, in_terms = 2 * x.size, _adds(op) and wire.scaled
    if wire.scaled:
        cut = op != "ragged_all_to_all"
        sent = blocks[0] * wires.packed_bytes(blocks[1:], wire, cut=cut)
    names = _once(op) if in_terms else ("",)
    moved = tuple(_moved(op, name, x.nbytes, sent, group, how.backend) for name in names)
    if not wire.scaled or _no_ring(op, group, how):
        return moved
    if in_terms:
        return moved[0], *_packed_sums(op, x, blocks, group, wire), *moved[1:]
    return *moved, *(() if sent_by is None else _packed_moves(op, x, group, wire, sent_by))


def _moved(op: str, name: str, nbytes: int, sent: int, group: Group, backend: str) -> Way:
    """That of a name by passes of XLA around collectives of what is packed."""
    n = group.size
    record = catalogue.COLLECTIVES[op]
    steps: tuple[str, ...] = (op,)
    part = record.block_bytes(sent, n)
    if name and record.sums_everywhere and gathers_terms(n, name):
        steps, part = ("all_gather",), sent
    elif name:
        steps, part = record.ordered_steps, sent // n
    passes = 1e6 * seconds_of_passes(op, nbytes, sent, n, name)
    us = _in_all([_least(step, part, group) for step in steps], passes, backend)
    return Way(name, sent, passes, us)


def _packed_sums(
    op: str, x: jax.Array, blocks: tuple[int, ...], group: Group, wire: Wire
) -> Iterator[Way]:
    """Those of a sum whose kernels pack."""
    n, numbers, codec = group.size, math.prod(blocks[1:]), Codec(wire)
    tile = math.prod(codec.tile)
    tiles = -(-numbers // tile)
    passes = 1e6 * seconds_to_pad(op, x.nbytes) if tiles * tile > numbers else 0.0
    rings = [
        name for name in _rings(op, group) if name != "torus" or _fits(op, x, tiles, group, codec)
    ]
    us = algorithms.predicted_packed(op, n * tiles * tile, placement.arranged(group), rings)
    sent, least = n * codec.packed_bytes(numbers), 1e6 * seconds_to_pack(op, x.size, n, wire)
    for name in rings:
        yield Way(name, sent, passes, max(us[name], least) + passes if name in us else None)


def _packed_moves(
    op: str, x: jax.Array, group: Group, wire: Wire, sent_by: Callable[[str, Wire], int]
) -> Iterator[Way]:
    """Those of what is only moved, whose kernels pack."""
    rings = _rings(op, group)
    us = algorithms.predicted_packed(op, x.size, placement.arranged(group), rings)
    least = 1e6 * seconds_to_pack(op, x.size, group.size, wire)
    for name in rings:
        if sent := sent_by(name, wire):
            yield Way(name, sent, 0.0, max(us[name], least) if name in us else None)


def _fits(op: str, x: jax.Array, tiles: int, group: Group, codec: Codec) -> bool:
    """Whether VMEM has room for what a sum over several axes takes, of so many tiles a block."""
    there, (rows, columns) = placement.arranged(group), codec.tile
    dtype = jnp.float32 if x.dtype == "float16" else x.dtype  # as kernels have it
    how = {"back": catalogue.COLLECTIVES[op].sums_everywhere}
    return torus.fits_packed(there, (tiles * rows, columns), 0, jnp.dtype(dtype), codec, **how)


def _chosen(op: str, found: tuple[Way, ...], nbytes: int, how: How) -> Way:
    """The way that is named, or the quickest of those that save bytes."""
    if how.algorithm is not None and len(found) > 1:
        named = [way for way in found if way.algorithm == how.algorithm]
        if not named and not _adds(op):
            return found[0]  # it moves what is packed
        if not named:
            what = f"algorithm={how.algorithm!r} over a wire"
            why = "the partial sums over several axes need more VMEM than the chip has"
            raise AlgorithmError(what, why, "leave algorithm=None, or name 'exchange'")
        return named[0]
    # A gather of terms has other bits than the exchange, which lax and NCCL have too.
    able = [way for way in found if way.algorithm != GATHER and way.sent < nbytes]
    if found[0].us is None or not able:
        return found[0]
    return min(able, key=lambda way: math.inf if way.us is None else way.us)


def _once(op: str) -> tuple[str, ...]:
    """The ways of a sum whose terms are quantised once."""
    return (EXCHANGE, GATHER) if catalogue.COLLECTIVES[op].sums_everywhere else (EXCHANGE,)


def _adds(op: str) -> bool:
    collective = catalogue.COLLECTIVES.get(op)  # a broadcast is not one: it becomes a gather
    return collective is not None and collective.adds


def _rings(op: str, group: Group) -> tuple[str, ...]:
    """The algorithms whose kernels pack that can serve these devices."""
    there, chip = placement.arranged(group), chips.current()
    able = (a for a in catalogue.COLLECTIVES[op].algorithms if a.packed)
    able = (a for a in able if a.reach is not TORUS or there.torus)
    return tuple(a.name for a in able if algorithms.serves(a, there, chip))


def _no_ring(op: str, group: Group, how: How) -> str:
    """Why sums over a group cannot be added on the way; "" if they can."""
    if how.backend != "pallas":
        return f"backend {how.backend!r} adds where it has all terms"
    if how.once:
        return "stochastic rounding and residues need terms that are quantised once"
    if slices.split(group, slices.slices(group, how.across)) is not None:
        return "the devices are in several slices"
    if not _rings(op, group):
        return f"{chips.current().name} cannot write to all the devices that it must reach"
    return ""


def _unfit(op: str, wire: Wire, group: Group, how: How) -> str:
    """Why a wire cannot serve a call; "" if it can. Raises where the wire was named."""
    if not _adds(op) or not wire.scaled:
        return ""
    called = counters.lax_name(op)
    if wire.group == "row":
        why = "a sum's scale groups are cut from the flattened operand, which has no rows"
        if not wire.optional:
            raise WireError(f"wire {wire} for {called}", why, "take groups of 128 or 256")
        return why
    once = _once(op)
    if how.algorithm not in (None, *once):
        rings = _rings(op, group)
        able = " or ".join(map(repr, [*once, *rings]))
        why = "" if how.algorithm in rings else f"over a wire with scales it is {able} here"
        why = why or _no_ring(op, group, how)
        if why and not wire.optional:
            alike = GATHER if how.algorithm == "one_shot" and GATHER in once else EXCHANGE
            remedy = f"leave algorithm=None, or name {alike!r}: it quantises each term once"
            raise AlgorithmError(f"algorithm={how.algorithm!r} for {called}", why, remedy)
        return why
    if how.order is not None:
        why = "groups have a scale together, so that bits depend on an element's neighbours"
        if not wire.optional:
            raise WireError(
                f"wire {wire} for {called} with order={how.order!r}", why, "leave one out"
            )
        return why
    return ""


def _beside(op: str, x: jax.Array, group: Group, how: How) -> str:
    """Why a call does not need its wire: what it moves is moved beside products; else "".

    Kernels that pack run on the core. In `fsdp` for v6e:4x4 with int8 a step took 26.9 ms, for 19.0
    with its gathers on a SparseCore as they are.
    """
    assert how.wire is not None
    able = how.wire.optional and packs(how, x.dtype) and how.backend == "pallas"
    if not able or not how.beside or how.awaited is not False:
        return ""
    chip, whole = chips.current(), catalogue.COLLECTIVES[op].result_bytes(x.nbytes, group.size)
    if why := overlaps.by_xla(op, chip):
        return why
    if op == "all_gather" and overlaps.for_its_reader(whole, x.dtype, chip):
        return ""
    found = algorithms.decided(op, dataclasses.replace(how, wire=None), x.nbytes, group)
    return "a SparseCore runs it beside products" if found and found.on_sparsecore else ""


def note_left_out(op: str, wire: Wire, why: str) -> None:
    """Counts a wire that a call does without."""
    counters.note(WirePlan(op=op, backend="", algorithm=None, why=why, wire=wire))


# What it takes ------------------------------------------------------------------------------------


def _plain_us(op: str, nbytes: int, group: Group, backend: str) -> float | None:
    """Microseconds of a collective without a wire; None where no table tells."""
    if backend != "pallas":
        return None
    return _least(op, catalogue.COLLECTIVES[op].block_bytes(nbytes, group.size), group)


def _in_all(steps: list[float | None], passes_us: float, backend: str) -> float | None:
    """Microseconds of successive steps and XLA's passes; None where no table tells."""
    if backend != "pallas" or None in steps:
        return None
    return sum(filter(None, steps)) + passes_us


def _least(op: str, block_bytes: int, group: Group) -> float | None:
    cuts = max(1, block_bytes >> 12)
    times = algorithms.predicted(op, block_bytes, placement.arranged(group), cuts=cuts)
    return min(times.values(), default=None)


def _told(op: str, way: Way, taken: Way, wire: Wire, n: int, nbytes: int) -> Candidate:
    """A way as `explain` prints it, of an operand of so many bytes; beside the one that is taken.

    How far a number is off stands with that one: here only where numbers are rounded.
    """
    more = f", no fewer than its own {nbytes}" if way.sent >= nbytes else ""
    off = off_in(op, n, way.packs, way=way.algorithm) if wire.scaled else ""
    source = "no table has it" if way.us is None else "modelled"
    said = f"{source}, an operand goes in {way.sent} bytes{more}{'; off ' if off else ''}{off}"
    if way.us is not None and (taken.us is None or way.us < taken.us) and not more:
        gathers = way.algorithm == GATHER
        why = "other backends have other bits" if gathers else "no table has the first way"
        said = f"{said}; taken by name alone: {why}"
    return Candidate(way.algorithm or "passes of XLA", way.us, None, said)
