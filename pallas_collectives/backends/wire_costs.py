"""What a wire costs: passes over memory, and how far a result may be from the exact one."""

from pallas_collectives import catalogue
from pallas_collectives.topology import chips
from pallas_collectives.wires import Wire

GATHER = "gather"  # a way of psum's over a wire: everyone's terms are gathered, and added


def gathers_terms(n: int, way: str = "") -> bool:
    """Whether a psum gathers its terms; of two devices the exchange does: it has no more bytes."""
    return n == 2 or way == GATHER


def error_in_words(op: str, wire: Wire, n: int, requantizes: bool = False, *, way: str = "") -> str:
    """How far a result may be from the exact one, before it is rounded to the operand's dtype."""
    if not wire.scaled:
        return "rounded to bfloat16, 2^-9 of each number, at every hop"
    shares = {"int8": "1/254 of the largest number of its group", "float8_e4m3fn": "1/16 of itself"}
    half = shares.get(wire.dtype, "1/8 of itself")
    if wire.scales != "float32" and wire.dtype == "int8":
        half = "1/127 of the largest number of its group"
    off = off_in(op, n, requantizes, way=way)
    return f"each number is off by {half} at most{', ' if off else ''}{off}"


def off_in(op: str, n: int, requantizes: bool = False, *, way: str = "") -> str:
    """Where the numbers of a sum are rounded; "" of what is only moved."""
    record = catalogue.COLLECTIVES.get(op)  # a broadcast is none: a gather is made of it
    if record is None or not record.adds:
        return ""
    terms = f"in the sum at each of {n - 1} hops" if requantizes else f"in each of the {n} terms"
    gathers_sums = record.sums_everywhere and (requantizes or not gathers_terms(n, way))
    return f"{terms}{' and in their sum' if gathers_sums else ''}"


def seconds_of_passes(op: str, nbytes: int, sent: int, n: int, way: str = "") -> float:
    """What quantising an operand and dequantising what comes takes at the least, on the chip here.

    Args:
      op: the canonical collective.
      nbytes: bytes of the operand.
      sent: its bytes on the wire.
      n: devices.
      way: `GATHER` for a psum that gathers; else sums are by the exchange.
    """
    record = catalogue.COLLECTIVES[op]
    moved_bytes = nbytes + sent  # read and written
    if not record.adds:
        moved_bytes += (n if "gather" in record.phases else 1) * (sent + nbytes)
    elif not record.sums_everywhere:
        moved_bytes += sent + nbytes // n
    elif gathers_terms(n, way):
        moved_bytes += n * sent + nbytes
    else:  # terms are added, the sums quantised, and all of them dequantised
        moved_bytes += sent + sent // n + sent + nbytes
    return moved_bytes / chips.current().hbm_bandwidth


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
