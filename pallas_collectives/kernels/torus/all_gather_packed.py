"""All-gather of blocks that travel packed, round a ring, along a line or over all axes of a torus.

             steps           bytes sent per link and direction      scratch
    ring     floor(n/2)      (n-1)/2 packed blocks                  20 MiB VMEM at the most
    line     n-1             at most n-1 packed blocks              20 MiB
    torus    sum of n_a // 2 (n-1)/(2d) packed blocks               48 MiB; over three, 7/8 of VMEM

The own block comes to VMEM piece by piece, while other pieces are on the wire; each is packed there
(see `codec`) and sent, both ways round each ring; of many tiles over several axes one way, in
n_a - 1 steps. What arrives goes on packed, and is unpacked in VMEM: see `packed_gather`. Of HBM
that takes a read for each byte of the operand and a write for each byte of the result, as without
packing. Every number is quantised once, and a device unpacks its own as the others do, so that all
have the same bits.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import DType, Interpret, Number, Ref, Semaphore
from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.codec import Codec
from pallas_collectives.kernels.reduce_scatter import one_axis
from pallas_collectives.kernels.torus import devices, packed_gather, sections, timetable
from pallas_collectives.kernels.torus.devices import Field
from pallas_collectives.kernels.torus.packed_gather import PackedGather
from pallas_collectives.kernels.torus.shares import Shares
from pallas_collectives.kernels.torus.views import View
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import Group, Ring, only_if

# Of a block, times the axes, up to which all goes both ways round rings in sections, too. By the
# replay of v5p 4 x 4 16 MiB (32 tiles) take 8% less time so, and 64 MiB 1% longer; of 4 x 4 x 4
# 32 MiB (16 tiles) 4% less, and 64 MiB 20% longer. Beside a line 8 x 16 v6e always take less.
FEW_TILES = 64


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays."""

    gather: packed_gather.Scratch
    # for each bundle: VMEM (streams, piece): own pieces, on their way from HBM to be packed
    plain: list[Any]
    plain_sems: Semaphore  # (all streams): own; a piece is here

    @classmethod
    def of(cls, plan: Shares, dtype: DType, codec: Codec) -> "Scratch":
        """What to allocate."""
        return cls(
            packed_gather.Scratch.of(plan, dtype, codec),
            [
                pltpu.VMEM((bundle.streams, *plan.piece_shape(bundle, 0)), dtype)
                for bundle in plan.bundles
            ],
            pltpu.SemaphoreType.DMA((plan.streams,)),
        )


def gather(
    x: jax.Array,
    group: Group,
    *,
    axis: int,
    lies: str,
    codec: Codec,
    interpret: Interpret,
) -> jax.Array:
    """Gathers x along `axis`; its last two dimensions are whole tiles of the codec's.

    Args:
      x: the own block: in HBM.
      group: the devices.
      axis: not the last.
      lies: "ring", "line" or "torus": which way the group is gone through.
      codec: what travels.
      interpret: as `launch.call` has it.
    """
    group = _taken_for(group, lies)
    axes = devices.axes_of(group)
    view, plan = _seen_and_cut(axes, x.shape, axis, x.dtype, codec, launch.cores(interpret))
    y = launch.call(
        functools.partial(_kernel, plan=plan, codec=codec),
        group,
        view.into(x, (1,) * len(axes)),
        axes=axes,
        scalars=devices.tables(axes),
        out_shape=jax.ShapeDtypeStruct(plan.shape(devices.field_sizes(axes)), x.dtype),
        scratch=Scratch.of(plan, x.dtype, codec),
        barrier="neighbours on a torus",
        prepare=functools.partial(_prepare, plan=plan, codec=codec),
        name=f"all_gather_packed_{lies}",
        interpret=interpret,
        wire_bytes=(group.size - 1) * codec.packed_bytes(x.size),
        cores=plan.cores,
        chunking=plan.chunking,
    )
    return view.out_of(y, plan.sizes, pinned=True)


def sent_bytes(
    group: Group, shape: tuple[int, ...], axis: int, dtype: DType, codec: Codec, *, lies: str
) -> int:
    """Bytes of a block of a shape as they travel, scales included; 0 if it cannot be.

    It cannot where VMEM has no room for what that takes, nor where there are fewer tiles than axes
    to begin with.
    """
    axes = devices.axes_of(_taken_for(group, lies))
    _, plan = _seen_and_cut(axes, shape, axis, dtype, codec, chips.cores())
    tiles = math.prod(shape) // math.prod(codec.tile)
    few = tiles < _links(axes)
    room = sections.most_vmem(len(axes))
    if few or sections.vmem_bytes(Scratch.of(plan, dtype, codec)) > room:
        return 0
    pieces = [(bundle.pieces, plan.piece_shape(bundle, 0)) for bundle in plan.bundles]
    words = sum(count * math.prod(codec.packed_shape(piece)) for count, piece in pieces)
    return 4 * plan.cores * words


def _taken_for(group: Group, lies: str) -> Group:
    return group if lies == "torus" else one_axis(group, line=lies == "line")


def _seen_and_cut(
    axes: Sequence[Group], shape: tuple[int, ...], axis: int, dtype: DType, codec: Codec, cores: int
) -> tuple[View, Shares]:
    of = functools.partial(Scratch.of, dtype=dtype, codec=codec)
    how: Any = {"there_and_back": False, "vmem": False, "codec": codec, "cores": cores}
    links, tiles = _links(axes), math.prod(shape) // math.prod(codec.tile)
    two_ways = links == 1 or any(axis.line for axis in axes)
    how["halfway"] = two_ways or tiles * links <= FEW_TILES
    return sections.seen_and_cut(axes, shape, axis, dtype, of, **how)


def _links(axes: Sequence[Group]) -> int:
    """How many axes of links there are: blocks begin with each."""
    return sum(not axis.chip for axis in axes)


class _Own:
    """The own block's pieces: brought to VMEM, each while the one before is on its way, packed.

    The first of each bundle are packed while the barrier waits for others.
    """

    def __init__(self, plan: Shares, x_ref: Ref, scratch: Scratch, codec: Codec) -> None:
        self._plan, self._x_ref, self._s, self._codec = plan, x_ref, scratch, codec

    def bring_first(self) -> None:
        """Starts to bring those of the first section."""
        for b, bundle in enumerate(self._plan.bundles):
            first = functools.partial(self._bring, b, 0)
            sync.for_each(0, bundle.streams_in(0), first)

    def pack(self, b: int, section: Any, stream: Number, target: Ref) -> None:
        """target = a piece, packed, if it is not the first; its stream's next one sets out."""
        later = (section > 0) | (stream > 0)
        only_if(later, functools.partial(self._pack, b, section, stream, target))

    def pack_first(self, place_of: Callable[[int, int, int], Ref]) -> None:
        """Packs the first pieces to where place_of(bundle, section, stream) says."""
        for b in range(len(self._plan.bundles)):
            self._pack(b, 0, 0, place_of(b, 0, 0))

    def _pack(self, b: int, section: Any, stream: Number, target: Ref) -> None:
        place = self._s.plain[b].at[stream]
        sync.wait(self._sem(b, stream), place)
        self._codec.combine((target, place))
        follows = stream < self._plan.bundles[b].streams_in(section + 1)
        only_if(follows, functools.partial(self._bring, b, section + 1, stream))

    def _bring(self, b: int, section: Any, stream: Number) -> None:
        own = [0] * len(self._plan.sizes)
        piece = self._plan.piece(self._x_ref, own, self._plan.bundles[b], section, stream)
        target = self._s.plain[b].at[stream]
        pltpu.make_async_copy(piece, target, self._sem(b, stream)).start()

    def _sem(self, b: int, stream: Number) -> Any:
        return self._s.plain_sems.at[self._plan.stream(b, stream)]


def _prepare(*refs: Any, plan: Shares, codec: Codec) -> Callable[[], None]:
    stage, own = _stage(*refs, plan=plan, codec=codec)
    own.bring_first()
    own.pack_first(stage.own)
    return lambda: None  # the others are waited for where they are packed


def _kernel(
    rings: Sequence[Ring],  # along each axis
    *refs: Any,  # see `_stage`; pieces of the first section are on their way (`_prepare`)
    plan: Shares,
    codec: Codec,
) -> None:
    stage, _ = _stage(rings, *refs, plan=plan, codec=codec)
    timetable.run(plan.on(rings[0].core), (stage, plan.phases))
    stage.drain()


def _stage(
    rings: Sequence[Ring], *refs: Any, plan: Shares, codec: Codec
) -> tuple[PackedGather, _Own]:
    plan, (*numbers, x_ref, o_ref, scratch) = plan.on(rings[0].core), refs
    # numbers: `devices.tables`
    # x_ref: one block, with dimensions of 1 for the torus: HBM
    # o_ref: all blocks: HBM; nobody else writes to it
    # scratch: a Scratch
    field, own = Field(plan, o_ref, *numbers), _Own(plan, x_ref, scratch, codec)
    return PackedGather(plan, rings, field, scratch.gather, codec, pack=own.pack), own
