"""How blocks of a torus' sums are cut: into sections whose scratch fits."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import DType
from pallas_collectives.kernels.machinery.blocks import LANES, padded_bytes
from pallas_collectives.kernels.machinery.codec import Codec
from pallas_collectives.kernels.torus.shares import Shares
from pallas_collectives.kernels.torus.views import View
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import Group

# A stream that begins along an axis goes in halves, so that adding one hides behind sending the
# other. By the replay of v5e and v5p smaller ones, and those in VMEM, take less time whole.
# Where blocks travel packed it goes in quarters, if their tiles can be dealt out to all streams: a
# piece's hop takes less than its way. By the replay of v5e 16 x 16 4 MiB along an axis take 16% to
# 19% less time.
HALVES_FROM_BYTES = 256 << 10

SCRATCH_BYTES = 16 << 20  # of VMEM, and at most half of a core's
# Where sums travel packed: by the replay of v5e, v5p and v6e 16 MiB take 5% to 12% longer.
PACKED_SCRATCH_BYTES = 20 << 20
# The same over two axes, where pieces are of all that the axis before has met: with 20 MiB
# v5e 16 x 16 takes up to 30% longer.
PACKED_TORUS_BYTES = 48 << 20

# Streams of a bundle of operands in sections: several pairs, so that while what one has sent is on
# the wire others are seen to; one where room is short; two on lines, where each goes both ways.
STREAMS = ((6, 4), (2,))
STREAMS_ON_LINES = ((4,), (2,))

# Where sums travel packed in sections, pieces may have as many tiles as this, if they fit, however
# many sections that leaves: by the replay of v6e 4 x 4, whose axes are lines, 16 MiB take up to 13%
# longer in smaller ones.
LEAST_TILES = 8

# Over three axes they have one tile, and go in four streams: the phases of one section hide behind
# those of another. By the replay of v5p 4 x 4 x 4 a gather of 64 MiB takes 91 us so, 98 in one
# section of six streams, and 114 in one of larger pieces.
LEAST_TILES_ON_THREE = 1

# Round three rings messages along the last axis have half of the blocks (`Shares.parts`). Slots and
# terms take half of the VMEM so, and as many streams go as fit: by the replay of v5p 4 x 4 x 4 and
# 64 MiB a gather takes 84 us in six, 89 in four without parts; a psum 167, and 208 in two.
PARTS = 2
STREAMS_IN_PARTS = ((6,), (4,), (2,))

# As many sections at least where their phases load links unevenly; of what is not packed fewer, if
# all streams together would have less than so many bytes in one. By the replay of v6e 4 x 4 a
# psum_scatter of 6 MiB takes 43 us so, and 103 in pieces of a tile; 8 MiB on v5e 4 x 4 99 and 106.
SECTIONS, SECTION_BYTES = 8, 192 << 10

# What a link carries in the time that a section costs round rings: by the replay of v5p 4 x 4 x 8,
# where twice as many sections of half the size took 4 to 5 us more each.
TICK_BYTES = 256 << 10


def seen_and_cut(
    axes: Sequence[Group],
    shape: tuple[int, ...],
    axis: int,
    dtype: DType,
    scratch_of: Callable[[Shares], Any],
    **how: Any,
) -> tuple[View, Shares]:
    """How blocks of a shape along an axis are seen, and cut: see `plan_of`."""
    if codec := how["codec"]:
        packed = of_whole_tiles(shape, axis, codec)
        assert packed is not None, f"{shape} is to be whole tiles of {codec.tile}"
        return packed, plan_of(axes, packed.block, packed.at, dtype, scratch_of, **how)
    view = View.of(shape, axis)
    plan = plan_of(axes, view.block, view.at, dtype, scratch_of, **how)
    if not how["vmem"] and vmem_bytes(scratch_of(plan)) > _room(None, len(axes)):
        view = View.of_tiles(shape, axis) or view  # rows of tiles are too wide to be cut between
        plan = plan_of(axes, view.block, view.at, dtype, scratch_of, **how)
    return view, plan


def of_whole_tiles(shape: tuple[int, ...], axis: int, codec: Codec) -> View | None:
    """How blocks along an axis are seen as whole tiles of a codec's; None if they cannot be.

    Where its groups are a tile's width, they can be cut between any two tiles.
    """
    rows, columns = codec.tile
    if axis >= len(shape) - 1:
        return None
    if columns == LANES and (view := View.of_lanes(shape, axis)) and view.block[-2] % rows == 0:
        return view
    whole = shape[-2] % rows == shape[-1] % columns == 0
    return View.of(shape, axis) if whole else None


def plan_of(
    axes: Sequence[Group],
    block: tuple[int, ...],
    at: int,
    dtype: DType,
    scratch_of: Callable[[Shares], Any],
    *,
    there_and_back: bool,
    vmem: bool,
    codec: Codec | None,
    cores: int = 1,
    halfway: bool = False,
) -> Shares:
    """How blocks are cut: in one section if its scratch fits, else in as many as it takes.

    halfway: whether streams go both ways round rings in several sections, too, as they do in one.
    """
    nbytes = math.prod(block) * jnp.dtype(dtype).itemsize
    stream_bytes = nbytes // (2 * len(axes) * cores)
    halves = not vmem and (stream_bytes >= HALVES_FROM_BYTES or codec is not None)
    chip, uneven = chips.current(), any(axis.line or axis.chip for axis in axes)
    room = _room(codec, len(axes))

    def in_streams(streams: int, both_ways: bool) -> Shares:
        how: Any = {"there_and_back": there_and_back, "tile": codec and codec.tile}
        return Shares.of(axes, block, at, dtype, streams, cores=cores, halfway=both_ways, **how)

    def fits(plan: Shares) -> bool:
        scratch = scratch_of(plan)
        enough = semaphores(scratch) <= chip.kernel_semaphores
        return enough and (vmem or vmem_bytes(scratch) <= room)

    def coarsest(streams: int, most: int) -> list[Shares]:
        """Plans with pieces of up to so many units: of those that fit, the largest ones."""
        found: list[Shares] = []
        # No larger one fits: of what a piece takes, two thirds and more grow with its size.
        taken = vmem_bytes(scratch_of(cut_in(max(1, most) * whole.grain, streams)))
        for size in range(min(most, 1 + 3 * most * room // (2 * taken)), 0, -1):
            if found and 2 * size * whole.grain <= found[0].bundles[0].size:
                break
            plans = [cut_in(size * whole.grain, streams, even=even) for even in (True, False)]
            found += [plan for plan in plans if fits(plan)]
        return found

    orders = len(axes) - any(axis.chip for axis in axes)
    on_three = codec is not None and orders > 2
    in_eighths = codec is not None and _tiles(block, codec) % (8 * len(axes) * cores) == 0
    counts_of_whole = (8, 4, 2, 1)[not in_eighths :] if halves else (2, 1)
    # One way round takes half as many slots. What is packed is best in one section even so.
    ways = (True, False) if codec and not halfway else (True,)
    for streams, both_ways in itertools.product(counts_of_whole, ways):
        whole = in_streams(streams, both_ways)
        if streams > 1 and len(whole.bundles) == 1 < orders:
            continue  # too few tiles for so many streams in two orders: an axis would idle
        if codec and streams > 2 and orders == 1 and _is_short(whole, codec):
            continue
        # Over three axes pieces of a tile take least time, if they go in more than one order.
        of_a_tile = len(whole.bundles) > 1 and all(b.size == whole.grain for b in whole.bundles)
        if fits(whole) and not (uneven and halves) and (of_a_tile or not on_three):
            return whole
    whole = in_streams(2, halfway)
    in_parts = on_three and not any(axis.chip or axis.line or axis.size % PARTS for axis in axes)
    cut_in = functools.partial(whole.in_sections, parts=PARTS if in_parts else 1)
    units = whole.extent // whole.grain
    fewest = SECTIONS if codec else max(1, min(SECTIONS, nbytes // (orders * SECTION_BYTES)))
    share = units // (orders * (fewest if uneven else 1))
    # On lines both ways need several sections (see above).
    least = LEAST_TILES // 2 if there_and_back and any(whole.lines) else LEAST_TILES
    least = min(LEAST_TILES_ON_THREE if on_three else least, units // 2) if codec else 0
    on_lines = STREAMS_ON_LINES if on_three or any(whole.lines) else STREAMS
    for counts in STREAMS_IN_PARTS if in_parts else on_lines:
        sizes = {count: least if in_parts else max(least, share // count) for count in counts}
        fitting = [plan for streams, most in sizes.items() for plan in coarsest(streams, most)]
        if fitting:
            return min(fitting, key=lambda plan: _cost(plan, dtype))
    # Blocks that are too coarse to be cut so finely: as finely as they go.
    return whole if vmem else whole.in_sections(whole.grain, streams=2)


def _is_short(plan: Shares, codec: Codec) -> bool:
    """Whether a piece is on the wire for less time than a core takes to see to it, both ways.

    It starts two sends and two copies, and gives two credits. By the replay of v6e 16 x 16 4 MiB
    along an axis take 17 us in pieces of two tiles, and 22 in pieces of one.
    """
    chip, piece = chips.current(), plan.piece_shape(plan.bundles[0], 0)
    rate = chip.link_bandwidth * chip.link_efficiency / chip.devices_per_chip / plan.cores
    return 4 * math.prod(codec.packed_shape(piece)) / rate < 6 * chip.issue_cost


def _tiles(block: tuple[int, ...], codec: Codec) -> int:
    return math.prod(block) // math.prod(codec.tile)


def _room(codec: Codec | None, axes: int) -> int:
    """Bytes of VMEM that scratch may take, unless blocks are kept there."""
    if codec and axes > 1:
        return most_vmem(axes) if axes > 2 else min(PACKED_TORUS_BYTES, most_vmem(axes))
    return min(PACKED_SCRATCH_BYTES if codec else SCRATCH_BYTES, chips.current().vmem_bytes // 2)


def most_vmem(axes: int) -> int:
    """Bytes of VMEM that scratch of packed blocks may take over so many axes."""
    return int((chips.VMEM_SHARE if axes > 2 else 3 / 4) * chips.current().vmem_bytes)


def _cost(plan: Shares, dtype: DType) -> float:
    """What a plan's time goes by: the busiest links' load, and what its sections cost besides.

    A tick takes some time of its own; in a last section that not all streams have links idle. With
    two pairs of streams v5e 16 x 16 takes 0.4% to 3% longer than with three.
    """
    idle = max(bundle.sections * bundle.streams / bundle.pieces - 1 for bundle in plan.bundles)
    along = math.prod(plan.block) // plan.block[plan.cut] * jnp.dtype(dtype).itemsize
    ticks = 0 if any(plan.lines) else 2 * TICK_BYTES * plan.sections / along
    few = 0.01 * (plan.bundles[0].streams < STREAMS[0][0])
    return plan.busiest * (1 + 0.002 * plan.sections + 0.1 * idle + few) + ticks


def semaphores(scratch: Any) -> int:
    """How many there are in what is to be allocated."""
    return sum(math.prod(x.shape) for x in _allocated(scratch, pltpu.SEMAPHORE))


def vmem_bytes(scratch: Any) -> int:
    """Bytes of VMEM in it."""
    return sum(map(padded_bytes, _allocated(scratch, pltpu.VMEM)))


def _allocated(scratch: Any, space: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(scratch) if getattr(x, "memory_space", None) == space]
