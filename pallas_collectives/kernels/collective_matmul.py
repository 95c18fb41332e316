"""Matrix products fused with the collective before or after them, on the pipelines of `pipelines`.

    all_gather_matmul        multiplies each part of a block as it arrives
    matmul_reduce_scatter    computes each partial product just before the hop that carries it

Arrays are (A, rows, K) with blocks along rows; leading dimensions and odd sizes are the backend's
matter. Steps, bytes on the wire and their order are those of the bidirectional rings in
`all_gather` and `reduce_scatter`; operands, results and what is gathered lie in HBM, and tiles of
them pass through VMEM as `product` says, within `VMEM_SHARE` of the chip's.

                             scratch in HBM                    added up in
    all_gather_matmul        none (the gathered x is a result)    float32, rounded once
    matmul_reduce_scatter    8 blocks of the result            float32, rounded once per hop
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives import chips
from pallas_collectives.errors import VmemError
from pallas_collectives.kernels import launch, pipelines, product, topology
from pallas_collectives.kernels.blocks import Blocks, sublanes
from pallas_collectives.kernels.product import Problem, Tiles
from pallas_collectives.kernels.topology import Group, Lane, Ring

# Of a chip's VMEM, what the tiles of all products together may take; the rest is the compiler's.
VMEM_SHARE = 0.7
# Parts of a block: the more, the sooner the first is consumed; but each fetches the weights anew.
MOST_PARTS = 8
_LEAST_ROWS = 1024  # of a part: the weights of v6e's products, fetched once a part, stay hidden


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a block goes in parts, and each part's products through VMEM.

    Attributes:
      blocks: the blocks of x, (A, rows, K), and their parts.
      problems: one product each, of a part.
      tiles: theirs.
    """

    blocks: Blocks
    problems: tuple[Problem, ...]
    tiles: tuple[Tiles, ...]

    def blocks_of(self, columns: int) -> Blocks:
        """The same blocks of an array of another size in its last dimension."""
        return dataclasses.replace(self.blocks, shape=(*self.blocks.shape[:2], columns))

    @property
    def vmem_bytes(self) -> int:
        """What the tiles of all products take together, at most."""
        return sum(map(product.vmem, self.problems, self.tiles))

    @property
    def seconds_per_block(self) -> float:
        """What the products of one block take by the chip's rates."""
        chip = chips.current().name
        once = sum(
            product.seconds(p, t, chip) for p, t in zip(self.problems, self.tiles, strict=True)
        )
        return once * self.blocks.parts


def plan(
    shape: tuple[int, int, int],
    weights: Sequence[tuple[int, Any]],  # N and dtype of each
    x_dtype: Any,
    out_dtype: Any,
    *,
    terms: int = 0,
    transposed: bool = False,
) -> Plan:
    """How the products of blocks of this shape go.

    Raises:
      VmemError: no tiles fit the chip's VMEM.
    """
    batch, rows, depth = shape
    most = min(MOST_PARTS, max(2, pl.next_power_of_2(rows // _LEAST_ROWS + 1) // 2))
    least_rows = max(sublanes(x_dtype), sublanes(out_dtype))
    found = most
    while found > 1 and rows % (found * least_rows):
        found //= 2
    blocks = Blocks(shape, axis=1, cut=1, parts=found)
    problems = tuple(
        Problem(
            batch=batch,
            rows=rows // found,
            depth=depth,
            columns=columns,
            x_dtype=x_dtype,
            w_dtype=w_dtype,
            out_dtype=out_dtype,
            terms=terms,
            transposed=transposed,
        )
        for columns, w_dtype in weights
    )
    chip = chips.current()
    budget = int(chip.vmem_bytes * VMEM_SHARE) // len(problems)
    tiles = [product.choose_tiles(problem, budget, chip.name) for problem in problems]
    if None in tiles:
        raise VmemError(
            f"products of {shape} with {len(problems)} weights",
            f"no tiles of them fit {chip.name}'s {chip.vmem_bytes >> 20} MiB of VMEM",
            "use algorithm='unfused', or fewer weights at once",
        )
    return Plan(blocks, problems, tuple(t for t in tiles if t is not None))


def all_gather_matmul(
    x: jax.Array,
    ws: Sequence[jax.Array],
    group: Group,
    *,
    out_dtype: Any,
    transposed: bool,
    precision: Any,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """The gathered x, (A, n * rows, K), and its products with every w, (A, n * rows, N).

    Args:
      x: (A, rows, K): rows whole tiles, K whole lanes.
      ws: each (K, N), or (N, K) if `transposed`; N whole lanes.
      group: the devices.
      out_dtype: of the products.
      transposed: see ws.
      precision: as `jax.lax.dot_general`'s.
      interpret: see `launch.call`.

    Raises:
      VmemError: no tiles fit the chip's VMEM.
    """
    n, (batch, rows, depth) = group.size, x.shape
    columns = [w.shape[0 if transposed else 1] for w in ws]
    weights = [(size, w.dtype) for size, w in zip(columns, ws, strict=True)]
    how = plan((batch, rows, depth), weights, x.dtype, out_dtype, transposed=transposed)
    lanes = topology.lanes(n, bidirectional=True, parts=how.blocks.parts)
    shapes = [jax.ShapeDtypeStruct((batch, n * rows, depth), x.dtype)]
    shapes += [jax.ShapeDtypeStruct((batch, n * rows, size), out_dtype) for size in columns]
    kernel = functools.partial(_gather_kernel, how=how, lanes=lanes, precision=precision)
    scratch = _vmem_scratch(how)
    return launch.call_many(
        kernel,
        group,
        x,
        *ws,
        out_shapes=shapes,
        scratch_shapes=[*pipelines.gather_semaphores(lanes), *scratch],
        barrier="neighbours",
        name="all_gather_matmul",
        interpret=interpret,
        wire_bytes=(n - 1) * x.nbytes,
        flops=n * how.blocks.parts * sum(problem.flops for problem in how.problems),
        pipeline_bytes=_pipeline_bytes(how, scratch),
    )


def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    group: Group,
    *,
    wire_dtype: Any,
    scale: float,
    transposed: bool,
    precision: Any,
    interpret: Any,
) -> jax.Array:
    """The block of rows `me` of `scale` times the sum of everyone's x @ w.

    Args:
      x: (A, n * rows, K): rows whole tiles, K whole lanes.
      w: (K, N), or (N, K) if `transposed`; N whole lanes.
      group: the devices.
      wire_dtype: in which sums travel, and of the result.
      scale: of the result, before it is rounded.
      transposed: see w.
      precision: as `jax.lax.dot_general`'s.
      interpret: see `launch.call`.

    Raises:
      VmemError: no tiles fit the chip's VMEM.
    """
    n, (batch, all_rows, depth) = group.size, x.shape
    columns, rows = w.shape[0 if transposed else 1], all_rows // n
    how = plan(
        (batch, rows, depth),
        [(columns, w.dtype)],
        x.dtype,
        wire_dtype,
        terms=2,
        transposed=transposed,
    )
    lanes = topology.lanes(n, bidirectional=True, parts=how.blocks.parts)
    out = how.blocks_of(columns)
    kernel = functools.partial(
        _scatter_kernel, how=how, lanes=lanes, scale=scale, precision=precision
    )
    scratch = _vmem_scratch(how)
    return launch.call_many(
        kernel,
        group,
        x,
        w,
        out_shapes=[jax.ShapeDtypeStruct(out.shape, wire_dtype)],
        buffers=[pipelines.sum_slots(lanes, out, wire_dtype)],
        scratch_shapes=[*pipelines.scatter_semaphores(lanes), *scratch],
        barrier="neighbours",
        name="matmul_reduce_scatter",
        interpret=interpret,
        wire_bytes=(n - 1) * out.nbytes(wire_dtype),
        flops=n * how.blocks.parts * how.problems[0].flops,
        pipeline_bytes=_pipeline_bytes(how, scratch),
    )[0]


def _vmem_scratch(how: Plan) -> list[Any]:
    """A sum under way for each product, then a place for each w that stays in VMEM, and its sem."""
    sums, resident = [], []
    for problem, tiles in zip(how.problems, how.tiles, strict=True):
        sums.append(
            pltpu.VMEM(product.sum_shape(tiles), product.accumulator_dtype(problem.x_dtype))
        )
        if tiles.keep == "all":
            shape = product.resident_shape(problem, tiles)
            resident += [pltpu.VMEM(shape, problem.w_dtype), pltpu.SemaphoreType.DMA]
    return [*sums, *resident]


def _pipeline_bytes(how: Plan, scratch: Sequence[Any]) -> int:
    """VMEM of the tiles, beside the scratch."""
    allotted = sum(
        math.prod(s.shape) * s.dtype.itemsize
        for s in scratch
        if hasattr(s, "memory_space") and s.memory_space == pltpu.VMEM
    )
    return how.vmem_bytes - allotted


class _Weights:
    """The weights of a kernel, where its products find them."""

    def __init__(self, how: Plan, w_refs: Sequence[Any], scratch: Sequence[Any]) -> None:
        self.how = how
        self.sums = scratch[: len(w_refs)]
        self.refs = list(w_refs)
        self._copies = []
        resident = iter(scratch[len(w_refs) :])
        for i, tiles in enumerate(how.tiles):
            if tiles.keep == "all":
                vmem_ref, sem = next(resident), next(resident)
                target = product.resident(how.problems[i], vmem_ref)
                self._copies.append(pltpu.make_async_copy(w_refs[i], target, sem))
                self.refs[i] = vmem_ref

    def bring(self) -> None:
        """Copies the weights that stay in VMEM there."""
        for copy in self._copies:
            copy.start()
        for copy in self._copies:
            copy.wait()

    def multiply(self, i: int, x_ref: Any, out_ref: Any, *terms: Any, **options: Any) -> None:
        """out = x @ w[i] + terms."""
        how = self.how
        product.multiply(
            x_ref,
            self.refs[i],
            out_ref,
            *terms,
            sum_ref=self.sums[i],
            problem=how.problems[i],
            tiles=how.tiles[i],
            **options,
        )


def _gather_kernel(
    ring: Ring,
    x_ref: Any,  # (A, rows, K): HBM
    *refs: Any,  # the ws; the gathered x, (A, n * rows, K), and the products, (A, n * rows, N):
    # HBM; then semaphores, see pipelines.gather_and_consume; then VMEM, see _vmem_scratch
    how: Plan,
    lanes: tuple[Lane, ...],
    precision: Any,
) -> None:
    count = len(how.problems)
    w_refs, gathered_ref, out_refs = refs[:count], refs[count], refs[count + 1 : 2 * count + 1]
    semaphores, scratch = refs[2 * count + 1 : 2 * count + 5], refs[2 * count + 5 :]
    weights = _Weights(how, w_refs, scratch)

    def consume(block: Any, part: Any) -> None:
        arrived = how.blocks.at(gathered_ref, block, part)
        for i, out_ref in enumerate(out_refs):
            target = how.blocks_of(out_ref.shape[2]).at(out_ref, block, part)
            weights.multiply(i, arrived, target, precision=precision)

    pipelines.gather_and_consume(
        ring,
        x_ref,
        gathered_ref,
        *semaphores,
        consume=consume,
        blocks=how.blocks,
        lanes=lanes,
        prepare=weights.bring,
    )


def _scatter_kernel(
    ring: Ring,
    x_ref: Any,  # (A, n * rows, K): HBM
    w_ref: Any,  # (K, N) or (N, K): HBM
    o_ref: Any,  # (A, rows, N): HBM
    slots_ref: Any,  # see pipelines.sum_slots: HBM
    *refs: Any,  # semaphores, see pipelines.produce_and_scatter; then VMEM, see _vmem_scratch
    how: Plan,
    lanes: tuple[Lane, ...],
    scale: float,
    precision: Any,
) -> None:
    semaphores, scratch = refs[:3], refs[3:]
    weights = _Weights(how, [w_ref], scratch)

    def produce(block: Any, part: Any, sum_ref: Any, adds: Any) -> None:
        own = how.blocks.at(x_ref, block, part)
        weights.multiply(0, own, sum_ref, sum_ref, adds=adds, precision=precision)

    def finish(part: Any, target_ref: Any, *sum_refs: Any) -> None:
        own = how.blocks.at(x_ref, ring.me, part)
        weights.multiply(0, own, target_ref, *sum_refs, scale=scale, precision=precision)

    pipelines.produce_and_scatter(
        ring,
        o_ref,
        slots_ref,
        *semaphores,
        produce=produce,
        finish=finish,
        blocks=how.blocks_of(o_ref.shape[2]),
        lanes=lanes,
        prepare=weights.bring,
    )
