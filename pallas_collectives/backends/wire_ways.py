"""The ways of a collective over a wire, what each takes, and how far its result may be off.

A sum has these ways over a wire with scales:

    exchange        each device gets everyone's term of its block, quantised once, and adds them
    gather          of `psum`: each device gets all terms, quantised once, and adds them: n/2 times
                    the bytes of an exchange, and the least error
    bidirectional,  sums are added on the way round a ring, along a line or over a torus, and
    line, torus     quantised anew at every hop: (n-1)/n of an operand's bytes, as without a wire

The algorithms of the last are those whose record says `packed`; `psum` calls the first of them
"ring". But for the gather, a psum gathers the sums, quantised once more, and so gives everyone the
same bits; of two devices the exchange is a gather of the terms. `pmax` and `pmin` go by exchange or
gather, as sums do. What is only moved is quantised once: by passes around a collective, by an
algorithm whose record says `packed`, or on GPUs by kernels that write to the peer's memory. The
quicker way by the tables of times (`tuning`) is taken, and a gather of terms where it is named;
where no times tell, and where a draw or a residue presumes in what bits terms are quantised, it is
the exchange, or the passes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_collectives import catalogue, tiles, wires
from pallas_collectives.annotations import DType, DTypeLike
from pallas_collectives.backends import counters, fastest, ordered, slices
from pallas_collectives.backends.plans import Candidate, How
from pallas_collectives.catalogue.records import TORUS
from pallas_collectives.errors import AlgorithmError
from pallas_collectives.kernels.machinery.codec import Codec
from pallas_collectives.kernels.torus import reduce_scatter as torus
from pallas_collectives.topology import chips, placement
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire

if TYPE_CHECKING:
    from pallas_collectives.kernels.row_passes import Rows
    from pallas_collectives.kernels.wire_format import Format

EXCHANGE = ordered.EXCHANGE.name
GATHER = "gather"  # a way of psum's over a wire: everyone's terms are gathered, and added


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
      algorithm: the one that packs, or `EXCHANGE`, or `GATHER`; "" where passes do.
      sent: bytes of the operand as they travel, scales and padding included.
      passes_us: what XLA's passes take before and behind.
      us: predicted time, all passes included; None where no table tells.
    """

    algorithm: str
    sent: int
    passes_us: float
    us: float | None

    @property
    def packs(self) -> bool:
        """Whether its kernel packs: then sums are rounded at every hop."""
        return self.algorithm not in ("", EXCHANGE, GATHER)


NO_WAY = Way("", 0, 0.0, None)


def ways(
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
    sent, in_terms, format = 2 * x.size, adds(op) and wire.scaled, None
    if wire.scaled:
        ragged = op == "ragged_all_to_all"
        format = (rows_by_kernels if ragged else by_kernels)(blocks, x.dtype, wire, how.backend)
        each = format.nbytes if format else wires.packed_bytes(blocks[1:], wire, cut=not ragged)
        sent = blocks[0] * each
    names = once(op) if in_terms else ("",)
    moved = tuple(_moved(op, name, x, blocks, sent, format, group, how) for name in names)
    if not wire.scaled or no_ring(op, group, how):
        return moved
    if in_terms:
        return moved[0], *_packed_sums(op, x, blocks, group, wire), *moved[1:]
    return *moved, *(() if sent_by is None else _packed_moves(op, x, group, wire, sent_by))


def _moved(
    op: str,
    name: str,
    x: jax.Array,
    blocks: tuple[int, ...],
    sent: int,
    format: "Format | Rows | None",
    group: Group,
    how: How,
) -> Way:
    """That of a name by passes around collectives of what is packed."""
    n = group.size
    record = catalogue.COLLECTIVES[op]
    steps: tuple[str, ...] = (op,)
    part = record.block_bytes(sent, n)
    if name and record.sums_everywhere and gathers_terms(n, name):
        steps, part = ("all_gather",), sent
    elif name:
        steps, part = record.ordered_steps, sent // n
    seconds = seconds_to_cast(op, x.nbytes, n)
    if how.wire is not None and how.wire.scaled:
        seconds = seconds_of_passes(op, x, blocks, n, name, format)
    us = _in_all([_least(step, part, group) for step in steps], 1e6 * seconds, how.backend)
    return Way(name, sent, 0.0 if format else 1e6 * seconds, us)


def _packed_sums(
    op: str, x: jax.Array, blocks: tuple[int, ...], group: Group, wire: Wire
) -> Iterator[Way]:
    """Those of a sum whose kernels pack."""
    n, numbers, codec = group.size, math.prod(blocks[1:]), Codec(wire)
    tile = math.prod(codec.tile)
    tiles = -(-numbers // tile)
    passes = 1e6 * seconds_to_pad(op, x.nbytes) if tiles * tile > numbers else 0.0
    rings = [
        name for name in packing(op, group) if name != "torus" or _fits(op, x, tiles, group, codec)
    ]
    us = fastest.predicted_packed(op, n * tiles * tile, placement.arranged(group), rings)
    sent, least = n * codec.packed_bytes(numbers), 1e6 * seconds_to_pack(op, x.size, n, wire)
    for name in rings:
        yield Way(name, sent, passes, max(us[name], least) + passes if name in us else None)


def _packed_moves(
    op: str, x: jax.Array, group: Group, wire: Wire, sent_by: Callable[[str, Wire], int]
) -> Iterator[Way]:
    """Those of what is only moved, whose kernels pack."""
    rings = packing(op, group)
    us = fastest.predicted_packed(op, x.size, placement.arranged(group), rings)
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


def chosen(op: str, found: tuple[Way, ...], nbytes: int, how: How) -> Way:
    """The way that is named, or the quickest of those that save bytes."""
    if how.algorithm is not None and len(found) > 1:
        named = [way for way in found if way.algorithm == how.algorithm]
        if not named and not adds(op):
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


def once(op: str) -> tuple[str, ...]:
    """The ways of a sum whose terms are quantised once."""
    return (EXCHANGE, GATHER) if catalogue.COLLECTIVES[op].sums_everywhere else (EXCHANGE,)


def adds(op: str) -> bool:
    collective = catalogue.COLLECTIVES.get(op)  # a broadcast is not one: it becomes a gather
    return collective is not None and collective.adds


def packing(op: str, group: Group) -> tuple[str, ...]:
    """The algorithms whose kernels pack that can serve these devices."""
    there, chip = placement.arranged(group), chips.current()
    able = (a for a in catalogue.COLLECTIVES[op].algorithms if a.packed)
    able = (a for a in able if a.reach is not TORUS or there.torus)
    return tuple(a.name for a in able if fastest.serves(a, there, chip))


def no_ring(op: str, group: Group, how: How) -> str:
    """Why sums over a group cannot be added on the way; "" if they can."""
    if how.backend != "pallas":
        return f"backend {how.backend!r} adds where it has all terms"
    if adds(op) and how.wire is not None and how.wire.group == "row":
        return "kernels that add on the way know groups of 128 and 256"
    if how.once:
        return "draws, residues, maxima and minima need terms that are quantised once"
    if slices.split(group, slices.slices(group, how.across)) is not None:
        return "the devices are in several slices"
    if not packing(op, group):
        return f"{chips.current().name} cannot write to all the devices that it must reach"
    return ""


def plain_us(op: str, nbytes: int, group: Group, how: How) -> float | None:
    """Microseconds of a collective without its wire; None where no table tells."""
    if how.backend != "pallas":
        return None
    if how.order is not None and adds(op):
        plain = dataclasses.replace(how, wire=None, algorithm=None)
        found = fastest.decided(op, plain, nbytes, group)
        return found.us if found else None
    return _least(op, catalogue.COLLECTIVES[op].block_bytes(nbytes, group.size), group)


def _in_all(steps: list[float | None], passes_us: float, backend: str) -> float | None:
    """Microseconds of successive steps and of passes; None where no table tells."""
    if backend != "pallas" or None in steps:
        return None
    return sum(filter(None, steps)) + passes_us


def _least(op: str, block_bytes: int, group: Group) -> float | None:
    times = fastest.predicted(op, block_bytes, placement.arranged(group))
    return min(times.values(), default=None)


def told(op: str, way: Way, taken: Way, wire: Wire, n: int, nbytes: int) -> Candidate:
    """A way as `explain` prints it, of an operand of so many bytes; beside the one that is taken.

    How far a number is off stands with that one: here only where numbers are rounded.
    """
    more = f", no fewer than its own {nbytes}" if way.sent >= nbytes else ""
    off = ""
    if wire.scaled:
        off = off_in(op, n, way.packs, way=way.algorithm, called=counters.lax_name(op))
    source = "no table has it" if way.us is None else "modelled"
    said = f"{source}, an operand goes in {way.sent} bytes{more}{'; off ' if off else ''}{off}"
    if way.us is not None and (taken.us is None or way.us < taken.us) and not more:
        gathers = way.algorithm == GATHER
        why = "no table has the first way" if taken.us is None else "the core would stop for it"
        why = "other backends have other bits" if gathers else why
        said = f"{said}; taken by name alone: {why}"
    return Candidate(way.algorithm or "passes", way.us, None, said)


def gathers_terms(n: int, way: str = "") -> bool:
    """Whether a psum gathers its terms; of two devices the exchange does: it has no more bytes."""
    return n == 2 or way == GATHER


def error_in_words(
    op: str, wire: Wire, n: int, requantizes: bool = False, *, way: str = "", called: str = ""
) -> str:
    """How far a result may be from the exact one, before it is rounded to the operand's dtype."""
    if not wire.scaled:
        return "rounded to bfloat16, 2^-9 of each number, at every hop"
    shares = {"int8": "1/254 of the largest number of its group", "float8_e4m3fn": "1/16 of itself"}
    half = shares.get(wire.dtype, "1/8 of itself")
    if wire.scales != "float32" and wire.dtype == "int8":
        half = "1/127 of the largest number of its group"
    off = off_in(op, n, requantizes, way=way, called=called)
    return f"each number is off by {half} at most{', ' if off else ''}{off}"


def off_in(op: str, n: int, requantizes: bool = False, *, way: str = "", called: str = "") -> str:
    """Where the numbers of a sum are rounded, or of pmax or pmin by name; "" of what only moves."""
    record = catalogue.COLLECTIVES.get(op)  # a broadcast is none: a gather is made of it
    if record is None or not record.adds:
        return ""
    terms = f"in the sum at each of {n - 1} hops" if requantizes else f"in each of the {n} terms"
    gathers_sums = record.sums_everywhere and (requantizes or not gathers_terms(n, way))
    if called in ("pmax", "pmin"):
        return f"in one term{' and in the result' if gathers_sums else ''}"
    return f"{terms}{' and in their sum' if gathers_sums else ''}"


def by_kernels(
    blocks: tuple[int, ...],
    dtype: DType,
    wire: Wire,
    backend: str,
    *,
    result: DTypeLike | None = None,
    values: bool = False,
) -> "Format | None":
    """How kernels of our own make the passes; None where XLA does.

    result: the dtype of what comes, if it is another.
    """
    if backend != "pallas" or (result and jnp.dtype(result) == jnp.float16):
        return None
    from pallas_collectives.kernels.wire_format import Format  # which only wires need

    return Format.of(blocks[1:], dtype, wire, values=values)


def rows_by_kernels(
    blocks: tuple[int, ...], dtype: DType, wire: Wire, backend: str
) -> "Rows | None":
    """The same of ragged blocks, (k, ..., columns), whose rows are packed one by one."""
    if backend != "pallas":
        return None
    from pallas_collectives.kernels.row_passes import Rows  # which only wires need

    return Rows.of(blocks[1:], dtype, wire)


def seconds_of_passes(
    op: str, x: jax.Array, blocks: tuple[int, ...], n: int, way: str, format: "Format | Rows | None"
) -> float:
    """What passes take that quantise an operand and dequantise what comes, on the chip here.

    By the cycles that the compiler reckons for them: those of our own kernels, or XLA's
    (`Chip.passed`). Where blocks are no whole tiles XLA moves each number besides, in about eight
    times as many; ragged rows take twice.

    Args:
      op: the canonical collective.
      x: the operand.
      blocks: as `wire_choice.settled`.
      n: devices.
      way: `GATHER` for a psum that gathers; else sums are by the exchange.
      format: of `by_kernels`, or `rows_by_kernels`.
    """
    record, chip, k = catalogue.COLLECTIVES[op], chips.current(), blocks[0]
    if record.sums_everywhere and not gathers_terms(n, way):
        passes = [(k, k), (1, k)]  # terms are added, the sums quantised, and all dequantised
    else:
        everywhere = "gather" in record.phases and (record.sums_everywhere or not record.adds)
        passes = [(k, n * k if everywhere else k)]
    if format:
        sizes = (x.dtype.itemsize, 4)  # of terms, and of their float32 sums
        each = zip(passes, sizes, strict=False)
        return sum(
            format.seconds_to_pack(packed, size) + format.seconds_to_unpack(come, size)
            for (packed, come), size in each
        )
    spread = 2 if op == "ragged_all_to_all" else 1 if tiles.are_whole(blocks[1:]) else 8
    numbers = sum(4 * packed + come for packed, come in passes) * math.prod(blocks[1:])
    return numbers * spread * chip.passed / chip.vector_rate


def seconds_to_cast(op: str, nbytes: int, n: int) -> float:
    """What passes take that round to bfloat16 and widen what comes, in HBM, at the least."""
    brought = n if "gather" in catalogue.COLLECTIVES[op].phases else 1
    return (1 + brought) * 1.5 * nbytes / chips.current().hbm_bandwidth


def seconds_to_pack(op: str, numbers: int, n: int, wire: Wire) -> float:
    """What kernels that pack take where the vector unit is busier than the wire, on the chip here.

    The modelled times are of int8, and others differ where they take longer to convert. A third of
    the time is what kernels wait for besides: by the replay float8_e4m3fn takes 1.3 to 1.6 times
    what the vector unit does in sums on v4, and over two axes of v6e.

    Args:
      op: the canonical collective.
      numbers: how many the operand has.
      n: devices.
      wire: with scales.
    """
    chip = chips.current()
    turned, (widen, narrow) = chip.turned[0], chip.narrowed[wire.dtype]
    pack, unpack, add = turned + narrow + 10, turned + widen + 4.5, turned + narrow + widen + 13
    record = catalogue.COLLECTIVES[op]
    if record.adds:
        each = (n - 1) / n * (add + unpack if record.sums_everywhere else add) / chip.cores
    elif "gather" in record.phases:
        each = n * unpack / chip.cores
    else:
        each = pack + unpack
    return 4 / 3 * numbers * each / chip.vector_rate


def seconds_to_pad(op: str, nbytes: int) -> float:
    """What a pass takes that pads a sum's operand, and, of a psum, one that cuts the result."""
    passes = 2 if catalogue.COLLECTIVES[op].sums_everywhere else 1
    return passes * 2 * nbytes / chips.current().hbm_bandwidth
