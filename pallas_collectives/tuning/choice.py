"""Which algorithm serves a call that names none: the one with the least predicted time.

`predict` is the one lookup. The times are data (`tables`): those modelled by `replay`, which come
with the package, or measured ones, of these devices and this JAX version, which
`python -m benchmarks tune` writes and `use_table`, or the environment, puts in their place.

A group that lies on several axes of a torus has times of its own, among them those of all axes at
once; a ring's there are of one that follows the wires.

So small messages take the way with the fewest hops, and large ones the way that puts the fewest
bytes on the busiest link. Hops are what remains of a time at few bytes; bytes are its slope.

The table does not say in how many chunks a block travels, because one rule for each kernel serves
all chips: gathers go in up to eight chunks of whole tiles (`all_gather.MOST_CHUNKS`), sums by size
and memory (`reduce_scatter.chunks_of`). By the replay no other number of chunks gains 3% for
gathers with blocks of 32 KiB to 2 MiB on v5e and v5p; for sums in HBM another may gain 10% on one
chip and lose on others.

Bytes are those of one block, as the canonical collectives number them (see `backends.canonical`):
what a device gives to all_gather or gets from reduce_scatter, and one of the n blocks of
all_to_all's operand. For all_reduce and ppermute they are the operand's.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from pallas_collectives import catalogue
from pallas_collectives.errors import TableError
from pallas_collectives.topology.chips import SIMULATED, Chip
from pallas_collectives.tuning import tables
from pallas_collectives.tuning.tables import Entry, Table
from pallas_collectives.tuning.tables import load as load

ENVIRONMENT_VARIABLE = "PALLAS_COLLECTIVES_TUNING"

# Operands of reductions up to this size may be copied to VMEM and back (1 MiB takes about 1 us);
# larger ones would take from VMEM what XLA keeps there between operations. By the replay of 16 v6e
# a psum_scatter of 2 MiB takes 18 us so, for 22, and a psum of 128 KiB 16 for 20.
VMEM_UP_TO_BYTES = 5 << 19
# Larger blocks than this gain less than 4% by it.
VMEM_BLOCK_BYTES = 1 << 20
# Whose times stand for a chip without times: simulated devices reach each other as v5p's do.
STAND_IN = "v5p"

_table_in_scope = jax.make_user_context(None)


class Prediction(NamedTuple):
    """How long an algorithm takes.

    Attributes:
      us: microseconds of one collective.
      latency_us: the part of it that remains at the fewest bytes that the table has a time for.
      table: where it is from.
      devices: the group sizes in the table that it lies between, or the one that it is of.
      close: whether it is a figure, for this group, or on one axis between two that lie as it does,
        but for an exchange, which grows with the square; and of a sum over several axes of no more
        bytes than the table has. Else it tells no more than which algorithm is quicker: a group of
        other numbers or links can take times as long.
      sizes: in words, the sizes in the table that it lies between, or beyond; "" if it is of one.
    """

    us: float
    latency_us: float
    table: Table
    devices: tuple[int, ...]
    close: bool
    sizes: str = ""


def fastest_first(op: str, predicted: dict[str, Prediction]) -> list[str]:
    """Algorithms by their predicted times; of equal ones first those that go in one hop."""

    def key(name: str) -> tuple[float, bool]:
        algorithm = catalogue.COLLECTIVES[op].algorithm(name)
        return predicted[name].us, not (algorithm and algorithm.one_hop)

    return sorted(predicted, key=key)


def predict(
    op: str,
    block_bytes: int,
    devices: int,
    chip: Chip,
    allowed: Sequence[str],
    torus: str | None = None,
) -> dict[str, Prediction]:
    """The predicted time of each algorithm for a collective, of those in some table.

    A measured table serves the very groups that were measured. What it does not have is the
    modelled table's, which is interpolated between group sizes on as many torus axes.
    Beyond its largest group they go on as a power of the number of devices, which for some
    collectives is 1, for others 2.

    Args:
      op: the canonical collective.
      block_bytes: bytes of one device's block; see the module.
      devices: devices in the group.
      chip: the TPU generation.
      allowed: the algorithms that can serve the group.
      torus: how the group lies on the links (see `tables.Entry`); by default as an axis of so many
        devices does on this chip.

    Raises:
      TableError: the table in scope cannot be read.
    """
    torus = torus or torus_of(devices, chip)
    names = [v for name in allowed for v in _variants(op, name, block_bytes, devices)]
    for table in (measured_table(), tables.load(tables.MODELLED)):
        if table is None:
            continue
        for entries in _entries(table, op, devices, chip, torus):
            found = {v: _predict(table, entries, v, block_bytes, devices, torus) for v in names}
            if any(found.values()):
                return {name: p for name, p in found.items() if p is not None}
            own = entries[0].torus == torus and entries[0].devices == devices
            if own and not table.measured and torus in tables.ONE_AXIS:
                return {}  # all that can run there was modelled
    return {}


def measured_table() -> Table | None:
    """The table in scope: of `use_table`, or of the environment; None for the modelled one alone.

    Raises:
      TableError: the environment names a file that holds no table; or the table was measured under
        another JAX.
    """
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    table: Table | None = _table_in_scope.value or (load(path) if path else None)
    if table is not None and not table.current:
        raise TableError(
            f"table {table.path!r}",
            f"it was measured with JAX {table.jax}, and this is {jax.__version__}",
            "measure anew with `python -m benchmarks tune`, or leave it out for the modelled times",
        )
    return table


def measured_times(op: str, block_bytes: int, devices: int, device_kind: str) -> dict[str, float]:
    """The table in scope's microseconds of each backend, on devices that are not TPUs.

    Empty where they were not measured.
    """
    table = measured_table()
    if table is None or not table.measured:
        return {}
    entry = table.entries.get((op, device_kind, torus_of(devices, SIMULATED), devices))
    times = {name: _at(entry, name, block_bytes) for name in entry.us} if entry else {}
    return {name: us for name, us in times.items() if us is not None}


@contextlib.contextmanager
def use_table(table: Table | str | os.PathLike[str] | None) -> Iterator[Table | None]:
    """Within this context algorithms are chosen by a table, or by the table in a file.

    A function that is jitted already is traced again, as under another backend. None lets
    the environment decide again.

    Raises:
      TableError: the file does not exist, or does not hold a table.
    """
    chosen = table if table is None or isinstance(table, Table) else load(table)
    with _table_in_scope(chosen):
        yield chosen


def torus_of(devices: int, chip: Chip) -> str:
    """Whether an axis of so many devices closes to a ring, as far as its size alone tells."""
    return "ring" if devices % chip.wrap_at == 0 else "line"


def _variants(op: str, name: str, block_bytes: int, devices: int) -> tuple[str, ...]:
    """An algorithm; for few bytes, its variant in VMEM before it.

    Only sums gain by that: their pipeline through HBM costs three DMAs a step.
    """
    algorithm = catalogue.COLLECTIVES[op].algorithm(name)
    if algorithm is None or algorithm.in_vmem is None:
        return (name,)
    kept = algorithm.in_vmem(block_bytes, devices)
    fits = block_bytes <= VMEM_BLOCK_BYTES and kept <= VMEM_UP_TO_BYTES
    return (f"{name}:vmem", name) if fits else (name,)


def _predict(
    table: Table, entries: Sequence[Entry], name: str, block_bytes: int, devices: int, torus: str
) -> Prediction | None:
    around = tuple(entry.devices for entry in entries)
    times = [_at(entry, name, block_bytes) for entry in entries]
    least = [next(filter(None, entry.us.get(name, ())), None) for entry in entries]
    between = _line if devices <= around[-1] else _power
    us, latency = between(around, times, devices), between(around, least, devices)
    if us is None or latency is None:
        return None
    own = entries[0].torus == torus and devices in around
    alike = {entry.torus for entry in entries} == {torus}  # on several axes so are their lengths
    record = catalogue.COLLECTIVES[entries[0].op]
    # Over several axes sums wait for HBM beyond what the table has, and take longer than its line.
    bends = torus not in tables.ONE_AXIS and record.adds
    listed = not bends or block_bytes <= max(entry.bytes[-1] for entry in entries)
    squares = record.of_blocks and not record.phases  # of the devices: an exchange
    close = listed and (own or (alike and not squares and around[0] < devices < around[-1]))
    return Prediction(us, latency, table, around, close, _sizes(entries[0], block_bytes))


def _sizes(entry: Entry, nbytes: int) -> str:
    """Where an operand lies between the sizes of an entry, in words; "" if it has one of them."""
    what = "blocks" if catalogue.COLLECTIVES[entry.op].of_blocks else "operands"
    below = [size for size in entry.bytes if size < nbytes]
    above = [size for size in entry.bytes if size > nbytes]
    if len(below) + len(above) < len(entry.bytes):
        return ""
    if below and above:
        return f", between {what} of {below[-1] >> 10} and {above[0] >> 10} KiB"
    return f", as {what} of {above[0] >> 10} KiB" if above else f", on from {below[-1] >> 10} KiB"


def _entries(
    table: Table, op: str, devices: int, chip: Chip, torus: str
) -> Iterator[tuple[Entry, ...]]:
    """What a group's times can be read from: its own entry, then those of like groups.

    Each family gives its entry of as many devices, else the two entries around that number, or its
    last two. Few devices are placed alike on any torus, so families like the group's own follow it.
    """
    name = chip.name
    if not table.measured and not any(key[1] == name for key in table.families):
        name = STAND_IN
    if (own := table.entries.get((op, name, torus, devices))) is not None:
        yield (own,)
    for family in () if table.measured else tables.families_like(torus):
        there = table.families.get((op, name, family), {})
        sizes = sorted(there)
        if devices in there:
            yield (there[devices],)
        elif sizes and sizes[0] < devices:
            above = next((i for i, n in enumerate(sizes) if n > devices), len(sizes) - 1)
            yield tuple(there[n] for n in sizes[max(0, above - 1) : above + 1])


def _at(entry: Entry, name: str, nbytes: int) -> float | None:
    """An algorithm's time at `nbytes`, on straight lines through those of an entry.

    Up to the fewest bytes it stays the same, from the most on it goes on as before. None where the
    algorithm cannot run with as many bytes, or with the next larger number in the entry. Between
    bytes that are too few to be packed and enough, it stays the same, too; but packed and plain
    gathers over several axes have one ratio there.
    """
    sizes, times = entry.bytes, entry.us.get(name, ())
    if not times or nbytes <= sizes[0]:
        return times[0] if times else None
    above = next((i for i, size in enumerate(sizes) if size >= nbytes), len(sizes) - 1)
    lower, upper = times[max(0, above - 1)], times[above]
    adds, alone = catalogue.COLLECTIVES[entry.op].adds, entry.torus in tables.ONE_AXIS
    is_packed = name.endswith(f":{tables.PACKED}") and not (adds or alone)
    if is_packed and upper is not None and lower is None:
        plain = name.partition(":")[0]
        here, there = (_at(entry, plain, size) for size in (nbytes, sizes[above]))
        return upper * here / there if here and there else upper
    if above == 0 or lower is None:
        return upper
    return _line((sizes[above - 1], sizes[above]), (lower, upper), nbytes)


def _line(xs: Sequence[int], ys: Sequence[float | None], x: int) -> float | None:
    """The value at x of the line through one or two points, at least 0; None if one lacks y."""
    (x0, y0), (x1, y1) = (xs[0], ys[0]), (xs[-1], ys[-1])
    if y0 is None or y1 is None or x0 == x1:
        return y0 if x0 == x1 else None
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def _power(xs: Sequence[int], ys: Sequence[float | None], x: int) -> float | None:
    """The value at x of the power of it that goes through one point, or two; None if one lacks y.

    Through one point it is the first power.
    """
    (x0, y0), (x1, y1) = (xs[0], ys[0]), (xs[-1], ys[-1])
    if y0 is None or y1 is None:
        return None
    exponent = 1.0 if x0 == x1 else max(0.0, math.log(y1 / y0) / math.log(x1 / x0))
    return y1 * (x / x1) ** exponent
