"""Every collective and algorithm has a record here; whatever lists them reads these.

Dispatch and tuning (`backends`, `tuning.choice`), `explain`, the README's table, the conformance
rows, the compile tests and the benchmarks hold no list of their own. So an algorithm is a kernel
file and a record here; a collective is these, one public function, and one canonical function in
each backend (see `backends.canonical`). Records take effect below, and within `added`; `records`
says what they hold.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from pallas_collectives import examples
from pallas_collectives.catalogue.records import (
    EVERYONE,
    JUMPS,
    LINE,
    NEIGHBOURS,
    ON_LINE,
    ON_RING,
    ON_SEVERAL,
    PARTNERS,
    RING,
    TORUS,
    Algorithm,
    Collective,
    Kernel,
    Primitive,
)

# Devices on a line over which messages are relayed: each of the n-1 distances takes four semaphores
# per direction (`kernels.machinery.relay`), of `topology.chips.Chip.kernel_semaphores`.
LONGEST_LINE = 32


def _gather_or_scatter(
    module: str, torus: str, direct: Kernel, whole: Callable[[int, int], int] | None
) -> Iterator[Algorithm]:
    """Algorithms that gathers and scatters share."""

    def packed(lies: str) -> Kernel | bool:
        gather = Kernel("torus.all_gather_packed", "gather", {"lies": lies})
        return gather if module == "all_gather" else True

    yield Algorithm(
        name="bidirectional",
        launcher=Kernel(module, "ring", {"bidirectional": True}),
        packed=packed("ring"),
        reach=RING,
        sent="(n−1)/2 blocks",
        steps="⌊n/2⌋",
        by_subcores=True,
        in_vmem=whole,
    )
    yield Algorithm(
        name="unidirectional",
        launcher=Kernel(module, "ring", {"bidirectional": False}),
        reach=RING,
        sent="n−1 blocks, one way",
        steps="n−1",
        lies=(ON_RING, ON_LINE),
        by_subcores=True,
        in_vmem=whole,
    )
    yield Algorithm(
        name="line",
        launcher=Kernel(module, "line"),
        packed=packed("line"),
        reach=LINE,
        sent="n−1 blocks at the most",
        steps="n−1",
        lies=(ON_LINE,),
        by_subcores=True,
        in_vmem=whole,
    )
    yield Algorithm(
        name="torus",
        launcher=Kernel(f"torus.{module}", torus),
        packed=packed("torus"),
        reach=TORUS,
        sent="(n−1)/2d blocks, on d axes at once",
        steps="the axes' together",
        lies=(ON_SEVERAL,),
        in_vmem=whole,
    )
    yield Algorithm(
        name="direct",
        launcher=direct,
        reach=EVERYONE,
        sent="as the wires lie",
        steps="1",
        in_order=True,
        # Everyone's term is kept, beside operand and result.
        in_vmem=whole and (lambda block, n: block * (2 * n + 1)),
    )


_ALL_GATHER = tuple(
    _gather_or_scatter("all_gather", "all_axes", Kernel("all_gather", "direct"), None)
)
_REDUCE_SCATTER = tuple(
    _gather_or_scatter(
        "reduce_scatter",
        "reduce_scatter",
        Kernel("one_hop", "reduce_scatter"),
        lambda block, n: block * n,
    )
)
_ALL_REDUCE = (
    Algorithm(
        name="ring",
        launcher=Kernel("all_reduce", "ring", {"bidirectional": True}),
        packed=True,
        reach=RING,
        sent="(n−1)/n of the operand",
        steps="2⌊n/2⌋",
        by_subcores=True,
        in_vmem=lambda block, n: block,
    ),
    Algorithm(
        name="line",
        launcher=Kernel("all_reduce_line", "line"),
        packed=True,
        reach=LINE,
        sent="the operand",
        steps="2⌊n/2⌋, and one for each chunk",
        lies=(ON_LINE,),
        most_devices=64,  # some 55 + 4 n semaphores
        takes_whole=True,
        in_vmem=lambda block, n: block,
    ),
    Algorithm(
        name="torus",
        launcher=Kernel("torus.reduce_scatter", "all_reduce"),
        packed=True,
        reach=TORUS,
        sent="(n−1)/dn of the operand, on d axes at once",
        steps="the axes' together",
        lies=(ON_SEVERAL,),
        in_vmem=lambda block, n: block,
    ),
    Algorithm(
        name="gather",
        launcher=Kernel("all_reduce_gather", "gather"),
        reach=NEIGHBOURS,
        sent="as all_gather, of whole operands",
        steps="as all_gather",
        in_order=True,
        takes_whole=True,
        # Everyone's operand is kept, beside the own and the result.
        in_vmem=lambda block, n: block * (n + 2),
    ),
    Algorithm(
        name="one_shot",
        launcher=Kernel("one_hop", "all_reduce"),
        reach=EVERYONE,
        sent="as the wires lie",
        steps="1",
        in_order=True,
        takes_whole=True,
        # Everyone's operand is kept, beside the own and the result.
        in_vmem=lambda block, n: block * (n + 2),
    ),
)
_ALL_TO_ALL = (
    Algorithm(
        name="direct",
        launcher=Kernel("all_to_all", "direct"),
        packed=Kernel("all_to_all_packed", "direct"),
        reach=EVERYONE,
        sent="as the wires lie",
        steps="1",
    ),
    Algorithm(
        name="ring",
        launcher=Kernel("all_to_all", "ring"),
        packed=Kernel("all_to_all_packed_ring", "ring"),
        reach=RING,
        sent="n²/8 blocks",
        steps="⌊n/2⌋",
    ),
    Algorithm(
        name="line",
        launcher=Kernel("all_to_all", "line"),
        reach=LINE,
        sent="n²/4 blocks at the most",
        steps="n−1",
        lies=(ON_LINE,),
        most_devices=LONGEST_LINE,
    ),
    Algorithm(
        name="torus",
        launcher=Kernel("torus.all_to_all", "all_axes"),
        reach=JUMPS,
        sent="n·nₐ/8 blocks along an axis of nₐ, on all at once",
        steps="log₂ of each axis, added up",
    ),
)
_RAGGED_ALL_TO_ALL = (
    Algorithm(
        name="direct",
        launcher=Kernel("ragged_all_to_all", "direct"),
        reach=EVERYONE,
        sent="the rows that are sent",
        steps="1",
    ),
    Algorithm(
        name="torus",
        launcher=Kernel("torus.ragged_jumps", "all_axes"),
        reach=JUMPS,
        sent="those, and what is passed on, on all axes at once",
        steps="log₂ of each axis, added up",
        lies=(ON_LINE, ON_SEVERAL),  # on a ring it is 2% slower than the ring's
        takes_everyones=True,
    ),
    Algorithm(
        name="ring",
        launcher=Kernel("ragged_all_to_all", "ring"),
        reach=RING,
        sent="those, and what is passed on",
        steps="⌊n/2⌋",
        takes_everyones=True,
    ),
    Algorithm(
        name="line",
        launcher=Kernel("ragged_all_to_all", "line"),
        reach=LINE,
        sent="those, and what is passed on",
        steps="n−1",
        takes_everyones=True,
        most_devices=LONGEST_LINE,
    ),
    Algorithm(
        name="spread",
        launcher=Kernel("torus.ragged_spread", "spread"),
        reach=EVERYONE,
        sent="those, and what is passed on, on all axes",
        steps="2",
        lies=(ON_SEVERAL,),
        takes_everyones=True,
        tables=lambda group: 7 * len(group.torus) - 3,
        first_from=1 << 19,
    ),
)
_PPERMUTE = tuple(
    Algorithm(
        name=name,
        launcher=Kernel("ppermute", "direct", {"everyone": everyone}),
        packed=Kernel("ppermute_packed", "direct", {"everyone": everyone}),
        reach=PARTNERS,
        shifts_alone=not everyone,
        sent="the operand",
        steps="1",
    )
    for name, everyone in (("partners", False), ("everyone", True))
)


_records = {
    record.name: record
    for record in (
        Collective(
            name="all_gather",
            functions={"all_gather": ("all_gather", examples.bind_gather)},
            primitives=tuple(
                Primitive(name, "all_gather")
                for name in ("all_gather", "all_gather_invariant", "all_gather_reduced")
            ),
            algorithms=_ALL_GATHER,
            example=examples.ALL_GATHER,
            phases=("gather",),
        ),
        Collective(
            name="reduce_scatter",
            functions={
                "psum_scatter": ("reduce_scatter", examples.bind_scatter),
                "reduce_scatter": ("reduce_scatter", examples.bind_scatter),
            },
            primitives=(
                Primitive("reduce_scatter", "reduce_scatter"),
                Primitive("unreduced_reduce_scatter", "reduce_scatter"),
            ),
            algorithms=_REDUCE_SCATTER,
            example=examples.REDUCE_SCATTER,
            of_blocks=True,
            phases=("scatter",),
            adds=True,
            ordered_steps=("all_to_all",),
        ),
        Collective(
            name="all_reduce",
            functions={
                "psum": ("psum", examples.bind_reduce),
                "all_reduce": ("psum", examples.bind_reduce),
                "pmean": ("psum", examples.bind_reduce),
                "pmax": ("pmax", examples.bind_reduce),
                "pmin": ("pmin", examples.bind_reduce),
                "pbroadcast": ("pbroadcast", examples.bind_broadcast),
            },
            primitives=(
                Primitive("psum", "all_reduce", "sum"),
                Primitive("psum_invariant", "all_reduce", "sum"),
                Primitive("unreduced_psum", "all_reduce", "sum"),
                Primitive("pmax", "all_reduce", "max"),
                Primitive("unreduced_pmax", "all_reduce", "max"),
                Primitive("pmin", "all_reduce", "min"),
                Primitive("unreduced_pmin", "all_reduce", "min"),
                Primitive("pbroadcast", "pbroadcast"),
                Primitive("pbroadcast_dynamic", "pbroadcast"),
            ),
            algorithms=_ALL_REDUCE,
            example=examples.ALL_REDUCE,
            is_cut=True,
            phases=("scatter", "gather"),
            adds=True,
            ordered_steps=("all_to_all", "all_gather"),
        ),
        Collective(
            name="all_to_all",
            functions={
                "all_to_all": ("all_to_all", examples.bind_exchange),
                "pswapaxes": ("all_to_all", examples.bind_exchange),
            },
            primitives=(Primitive("all_to_all", "all_to_all"),),
            algorithms=_ALL_TO_ALL,
            example=examples.ALL_TO_ALL,
            of_blocks=True,
        ),
        Collective(
            name="ragged_all_to_all",
            functions={"ragged_all_to_all": ("ragged_all_to_all", examples.bind_ragged)},
            primitives=(Primitive("ragged_all_to_all", "ragged_all_to_all"),),
            algorithms=_RAGGED_ALL_TO_ALL,
            example=examples.RAGGED_ALL_TO_ALL,
            of_blocks=True,
            timed=False,
        ),
        Collective(
            name="ppermute",
            functions={
                "ppermute": ("ppermute", examples.bind_permute),
                "pshuffle": ("ppermute", examples.bind_permute),
            },
            primitives=(Primitive("ppermute", "ppermute"),),
            algorithms=_PPERMUTE,
            example=examples.PPERMUTE,
        ),
    )
}
COLLECTIVES: Mapping[str, Collective] = MappingProxyType(_records)  # by their canonical names


class _Names(Mapping[str, tuple[str, ...]]):
    """Canonical name -> names of the algorithms, as the records are at the time of asking."""

    def __getitem__(self, op: str) -> tuple[str, ...]:
        return tuple(algorithm.name for algorithm in _records[op].algorithms)

    def __iter__(self) -> Iterator[str]:
        return iter(_records)

    def __len__(self) -> int:
        return len(_records)


ALGORITHMS: Mapping[str, tuple[str, ...]] = _Names()


@functools.cache
def functions() -> dict[str, Collective]:
    """The collective of each public function, by the function's name."""
    return {name: record for record in _records.values() for name in record.functions}


@functools.cache
def primitives() -> dict[str, tuple[Collective, Primitive]]:
    """What serves each of lax's primitives, by the primitive's name."""
    return {p.name: (record, p) for record in _records.values() for p in record.primitives}


@contextlib.contextmanager
def added(*records: Collective | tuple[str, Algorithm]) -> Iterator[None]:
    """Within this context these are in the catalogue too, for tests and for trying things out.

    Args:
      *records: collectives, and algorithms with the canonical name of the collective each is of.

    Raises:
      ValueError: a name that is taken.
    """
    before = dict(_records)
    try:
        for record in records:
            _add(record)
        yield
    finally:
        _put(before)


def _add(record: Collective | tuple[str, Algorithm]) -> None:
    if isinstance(record, Collective):
        taken = {*_records, *primitives(), *functions()}
        names = {record.name, *record.functions, *(p.name for p in record.primitives)}
        if names & taken:
            raise ValueError(f"{min(names & taken)!r} is in the catalogue already; name it anew.")
        _put(_records | {record.name: record})
        return
    op, algorithm = record
    if algorithm.name in ALGORITHMS[op]:
        raise ValueError(f"{op} has an algorithm {algorithm.name!r} already; name it anew.")
    algorithms = (*_records[op].algorithms, algorithm)
    _put(_records | {op: dataclasses.replace(_records[op], algorithms=algorithms)})


def _put(records: dict[str, Collective]) -> None:
    """Makes these the catalogue."""
    _records.clear()
    _records.update(records)
    functions.cache_clear()
    primitives.cache_clear()
