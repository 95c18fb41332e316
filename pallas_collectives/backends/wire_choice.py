"""Whether a call takes its wire: settled here, and counted. `wire_ways` has the ways."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_collectives import catalogue, wires
from pallas_collectives.annotations import DType, DTypeLike
from pallas_collectives.backends import counters, fastest, slices, wire_ways
from pallas_collectives.backends.plans import How, WirePlan
from pallas_collectives.backends.wire_ways import EXCHANGE, GATHER, NO_WAY, Way
from pallas_collectives.errors import AlgorithmError, WireError
from pallas_collectives.topology import chips, placement
from pallas_collectives.topology.groups import Group
from pallas_collectives.tuning import overlaps
from pallas_collectives.wires import Wire

# From so many bytes of an operand a wire is taken where no times tell: smaller ones are latency.
AUTO_BYTES = 2 << 20
LINKED_BYTES = 32 << 20  # between GPUs of one host


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
    plain = dataclasses.replace(how, wire=None, wire_backward=None, mapped=0, once=False, pieces=())
    wire = how.wire
    if wire is None:
        return None, plain, NO_WAY
    if how.algorithm == EXCHANGE and how.order is None and wire.scaled and wire_ways.adds(op):
        plain = dataclasses.replace(plain, algorithm=None)  # it is a way of wires alone
    if group.size == 1:  # nothing is sent
        return None, plain, NO_WAY
    if not wire.optional:
        wires.check(wire, x.dtype, counters.lax_name(op))
    why = wires.obstacle(wire, x.dtype) or _unfit(op, wire, group, how)
    if why := why or _beside(op, x, group, how):
        note_left_out(op, wire, why)
        return None, plain, NO_WAY
    found = wire_ways.ways(op, x, blocks, group, how, sent_by)
    way = wire_ways.chosen(op, found, x.nbytes, how)
    if way.packs and _waits_less(op, found[0], way, group, how):
        way = found[0]
    bundled_later = catalogue.COLLECTIVES[op].sums_everywhere and placement.are_settled_later()
    if not bundled_later and (gone := lost(op, x, way.sent, wire)):
        note_left_out(op, wire, gone)
        return None, plain, NO_WAY
    us = wire_ways.plain_us(op, x.nbytes, group, how)
    if wire.optional and us is not None and way.us is not None and way.us >= us:
        note_left_out(op, wire, _no_quicker(way.us, us))
        return None, plain, NO_WAY
    if us is None and (
        why := _small(x, wire) or _ragged(op, way, wire, how) or _linked(op, x, wire, group, how)
    ):
        note_left_out(op, wire, why)
        return None, plain, NO_WAY
    several = found if len(found) > 1 or way.algorithm else ()
    told = tuple(wire_ways.told(op, w, way, wire, group.size, x.nbytes) for w in several)
    counters.note(
        WirePlan(op=op, backend=how.backend, algorithm=str(wire), wire=wire, nbytes=x.nbytes,
                 sent=way.sent, passes_us=way.passes_us, us=us, wired_us=way.us, way=way.algorithm,
                 requantizes=wire_ways.adds(op) and way.packs, candidates=told)
    )  # fmt: skip
    if wire.scaled and wire_ways.adds(op):
        plain = dataclasses.replace(plain, algorithm=None, order=None)
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
    if why := wires.obstacle(wire, x.dtype) or lost(op, x, sent, wire) or _small(x, wire):
        note_left_out(op, wire, why)
        return None
    told: dict[str, Any] = {"wire": wire, "nbytes": x.nbytes, "sent": sent}
    counters.note(WirePlan(op=op, backend="", algorithm=str(wire), **told))
    return wire


def lost(op: str, x: jax.Array, sent: int, wire: Wire) -> str:
    """What a wire that takes no fewer bytes loses; "" if it gains.

    Raises:
      WireError: it loses, and was named.
    """
    if sent < x.nbytes:
        return ""
    rule = f"with scales and padding it takes {sent} bytes in place of {x.nbytes}"
    if not wire.optional:
        # A sum's groups are of the flattened operand.
        larger = "reduce more numbers at a time" if wire_ways.adds(op) else "make rows longer"
        remedy = f"leave wire=None, or wire='auto' to have it left out; or {larger}"
        raise WireError(
            f"wire {wire} for {counters.lax_name(op)} of {x.dtype}{list(x.shape)}", rule, remedy
        )
    return rule


def _small(x: jax.Array, wire: Wire) -> str:
    """Why a wire that may be left out is, where no times tell; "" if it is taken."""
    if wire.optional and x.nbytes < AUTO_BYTES:
        return f"the operand is smaller than {AUTO_BYTES >> 20} MiB"
    return ""


def _ragged(op: str, way: Way, wire: Wire, how: How) -> str:
    """Why a wire that may be left out is for ragged rows; "" if it is taken.

    By `step` 16 MiB of bfloat16 take 739 us on v5e 4 x 4, 641 to 713 with int8, in rows of 4096 to
    1024 columns, and 1860 if XLA packs.
    """
    packed_by_xla = how.backend == "pallas" and way.passes_us > 0
    if not wire.optional or op != "ragged_all_to_all" or not packed_by_xla:
        return ""
    rule = "kernels pack rows of up to 16384 columns that 512 divides, where it takes fewer bytes"
    return f"{rule}, and XLA's passes lose"


def _linked(op: str, x: jax.Array, wire: Wire, group: Group, how: How) -> str:
    """Why a wire that may be left out is between GPUs of one host; "" if it is taken.

    On two H200 with NVLink, 64 MiB of bfloat16, us with int8 and without: all_gather 101 and 143,
    psum 188 and 249, psum_scatter 110 and 192, ppermute 154 and 218, all_to_all 103 and 126. On two
    H100 at 16 MiB, by slower kernels: 50 and 56, 76 and 84, 55 and 64, 71 and 73, 53 and 49. Ragged
    rows take XLA's passes.
    """
    if not wire.optional or how.backend != "nccl" or not slices.one_host_has(group):
        return ""
    if op == "ragged_all_to_all":
        return "between GPUs of one host the passes that quantise take longer than they save"
    least = LINKED_BYTES * (2 if op == "all_to_all" else 1)
    if x.nbytes < least:
        return f"between GPUs of one host the operand is smaller than {least >> 20} MiB"
    return ""


def _unfit(op: str, wire: Wire, group: Group, how: How) -> str:
    """Why a wire cannot serve a call; "" if it can. Raises where the wire was named."""
    if not wire_ways.adds(op) or not wire.scaled:
        return ""
    called = counters.lax_name(op)
    once = wire_ways.once(op)
    if how.algorithm not in (None, *once):
        rings = wire_ways.packing(op, group)
        able = " or ".join(map(repr, [*once, *rings]))
        why = "" if how.algorithm in rings else f"over a wire with scales it is {able} here"
        why = why or wire_ways.no_ring(op, group, how)
        if why and not wire.optional:
            alike = GATHER if how.algorithm == "one_shot" and GATHER in once else EXCHANGE
            remedy = f"leave algorithm=None, or name {alike!r}: it quantises each term once"
            raise AlgorithmError(f"algorithm={how.algorithm!r} for {called}", why, remedy)
        return why
    if how.order is None:
        return ""
    why, remedy = "", "write Wire(..., group='row')"
    if wire.optional:
        why = "whether it is taken depends on the operand's size, and so would the bits"
    elif wire.group != "row":
        why = "numbers that have a scale together may be of different rows, where bits must not"
    elif how.algorithm not in (None, EXCHANGE):
        why, remedy = "it has other bits than the exchange", "leave algorithm=None"
    if why and not wire.optional:
        raise WireError(f"wire {wire} for {called} with order={how.order!r}", why, remedy)
    return why


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
    found = fastest.decided(op, dataclasses.replace(how, wire=None), x.nbytes, group)
    return "a SparseCore runs it beside products" if found and found.on_sparsecore else ""


def _waits_less(op: str, passes: Way, way: Way, group: Group, how: How) -> bool:
    """Whether the core waits less for passes, what they pack being moved beside products.

    The kernel of another way packs on the core, which stops for it.
    """
    if how.algorithm is not None or passes.us is None:
        return False
    record = catalogue.COLLECTIVES[op]
    gathers = record.sums_everywhere and wire_ways.gathers_terms(group.size)
    step = "all_gather" if gathers else record.ordered_steps[0] if record.adds else op
    plain = dataclasses.replace(how, wire=None, order=None)
    if not by_lax(step, plain):
        moved = fastest.decided(step, plain, passes.sent, group)
        if moved is None or not moved.on_sparsecore:
            return False
    least = wire_ways.plain_us(step, passes.sent, group, plain)
    return least is not None and (way.us is None or passes.us - least < way.us)


def by_lax(op: str, how: How) -> str:
    """Why lax moves what is packed for a call; "" where a kernel does."""
    asked = how.backend == "pallas" and how.beside and not how.awaited
    return overlaps.by_xla(op, chips.current()) if asked else ""


def note_left_out(op: str, wire: Wire, why: str) -> None:
    """Counts a wire that a call does without."""
    counters.note(WirePlan(op=op, backend="", algorithm=None, why=why, wire=wire))
