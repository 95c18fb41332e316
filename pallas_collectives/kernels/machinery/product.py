"""A matrix product of any size, tile by tile through VMEM, with terms added to it on the way out.

    out[a] = scale * (x[a] @ w + terms[0][a] + ...)        x: (A, rows, K), w: (K, N) or (N, K)

The grid runs over columns of w, then A, then rows, then K: a panel of w, all of K by `columns`, is
fetched once and serves all rows. Where one tile holds all of x, that is fetched once and serves all
columns. Where all of w fits VMEM it is resident: brought in once, for any number of products.
Where not even a panel fits, tiles of w are fetched with those of x. All tiles are double-buffered
by the pipeline.

The matrix unit accumulates in float32 (int32 for integers); the sum over K and the terms stay in
that until they are rounded to the result's dtype, once.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import PrecisionLike

from pallas_collectives.annotations import DType, Number, Ref
from pallas_collectives.kernels.machinery.blocks import LANES, sublanes
from pallas_collectives.topology.chips import Chip

# The compiler unrolls a product of tiles: 2^30 multiplications take it about two seconds. Deeper
# tiles are multiplied in a loop.
_MOST_VOLUME = 1 << 30
_STEP_SECONDS = 0.2e-6  # of the grid: DMAs started and waited for
_MOST_ROWS = 2048  # of a tile that has all rows: x then stays in VMEM for all columns


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one product goes through VMEM.

    Attributes:
      rows, depth, columns: one tile's share of rows, K and N. `depth` divides K; the last tile of
        rows and of columns may stick out.
      inner: of the depth, what is multiplied at once; divides it.
      keep: "all" of w stays in VMEM, a "panel" (K by columns), or a "tile" (depth by columns).
    """

    rows: int
    depth: int
    columns: int
    inner: int
    keep: str


@dataclasses.dataclass(frozen=True)
class Problem:
    """One product, repeated with the same w.

    Attributes:
      batch, rows, depth, columns: A, rows, K and N; K and N are whole lanes of 128.
      x_dtype, w_dtype, out_dtype: dtypes.
      terms: how many terms are added.
      transposed: w is (N, K).
    """

    batch: int
    rows: int
    depth: int
    columns: int
    x_dtype: DType
    w_dtype: DType
    out_dtype: DType
    terms: int = 0
    transposed: bool = False

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The shape of w."""
        shape = self.depth, self.columns
        return shape[::-1] if self.transposed else shape

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.rows * self.depth * self.columns


def accumulator_dtype(dtype: DType) -> Any:
    """In what products of a dtype are added up."""
    return jnp.dtype(jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32)


@functools.lru_cache(maxsize=1024)
def choose_tiles(
    problem: Problem, vmem_bytes: int, chip: Chip, cores: int = 1, times: int = 1
) -> Tiles | None:
    """The tiles with which a product takes least time, or None if none fits `vmem_bytes`.

    `cores`: of a device, how many multiply at a time; `times`: how often each does so.
    """

    def taken(tiles: Tiles) -> float:
        every = times * seconds(problem, tiles, chip, cores)
        return every + seconds_to_bring(problem, tiles, chip, cores)

    found = [
        (taken(tiles), vmem(problem, tiles), tiles)
        for tiles in _candidates(problem)
        if vmem(problem, tiles) <= vmem_bytes
    ]
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def _candidates(problem: Problem) -> list[Tiles]:
    whole = sublanes(problem.x_dtype)
    rows = {-(-problem.rows // whole) * whole} if problem.rows <= _MOST_ROWS else set()
    rows |= {size for size in (128, 256, 512, 1024) if size < problem.rows}
    columns = {problem.columns} if problem.columns <= 2048 else set()
    columns |= {size for size in range(256, 2049, 128) if size < problem.columns}
    depth = _divisors(problem.depth)
    found = []
    for tile in itertools.product(sorted(rows), depth, sorted(columns)):
        area = tile[0] * tile[2]
        inner = [d for d in _divisors(tile[1]) if d * area <= _MOST_VOLUME]
        found += [Tiles(*tile, inner[-1], keep) for keep in ("all", "panel", "tile") if inner]
    return found


def _divisors(size: int) -> list[int]:
    """The divisors of a size that are whole lanes."""
    lanes = size // LANES
    return [LANES * d for d in range(1, lanes + 1) if lanes % d == 0]


def vmem(problem: Problem, tiles: Tiles) -> int:
    """Bytes of VMEM that a product takes: two of each tile, and two sums under way."""
    p, t = problem, tiles
    weight = {
        "all": p.depth * _up(p.columns, t.columns),
        "panel": 2 * p.depth * t.columns,
        "tile": 2 * t.depth * t.columns,
    }[t.keep]
    out = t.rows * t.columns
    mixed = (t.rows + t.columns) * t.inner if p.x_dtype != p.w_dtype else 0  # in float32
    return (
        2 * t.rows * t.depth * p.x_dtype.itemsize
        + weight * p.w_dtype.itemsize
        + (2 + 2 * p.terms) * out * p.out_dtype.itemsize
        + (2 * out + mixed) * 4
    )


def seconds(problem: Problem, tiles: Tiles, chip: Chip, cores: int = 1) -> float:
    """What a product takes by the rates of a chip's core: of the matrix unit, or of HBM.

    `cores`: so many have such a product at a time, and share HBM.
    """
    p, t = problem, tiles
    down, wide = -(-p.rows // t.rows), across(p, t)
    steps = p.batch * down * wide * (p.depth // t.depth)
    adds = min(1, p.terms)  # of all products of a block's sum the last alone has more
    flops = 2 * steps * t.rows * t.depth * t.columns
    weights = {"all": 0, "panel": 1, "tile": p.batch * down}[t.keep] * p.depth * p.columns
    fetched = 1 if steps == wide else wide  # a tile that serves again is not fetched again
    traffic = (
        p.batch * p.rows * p.depth * fetched * p.x_dtype.itemsize
        + weights * p.w_dtype.itemsize
        + p.batch * p.rows * p.columns * (1 + adds) * p.out_dtype.itemsize
    )
    core = flops / (chip.matrix_rate / chip.cores)
    hbm = _hbm_rate(chip, cores)
    tile_of_x = t.rows * t.depth * p.x_dtype.itemsize
    tile_of_w = 0 if t.keep == "all" else t.columns * p.w_dtype.itemsize
    tile_of_w *= p.depth if t.keep == "panel" else t.depth
    tile_out = t.rows * t.columns * p.out_dtype.itemsize
    # While one step multiplies, the last one's result leaves, and what the next one takes comes.
    of_x = 0 if steps == wide else tile_of_x
    full = of_x + (1 + adds) * tile_out + (tile_of_w if t.keep == "tile" else 0)
    panels = wide if t.keep == "panel" else 0
    late = sum(
        count * max(0.0, moved / hbm - core / steps)
        for count, moved in (
            (p.batch * down * wide - panels, full),
            (panels, full + tile_of_w),
        )
    )
    ends = (tile_of_x + tile_of_w + (1 + adds) * tile_out) / hbm  # are waited for
    # With the first tiles comes the next of x; products of a gather are not the faster for tiles
    # that count it.
    ends += adds * of_x / hbm
    return max(core + late + steps * _STEP_SECONDS, traffic / hbm) + ends


def seconds_to_bring(problem: Problem, tiles: Tiles, chip: Chip, cores: int = 1) -> float:
    """What the first product waits for weights that stay in VMEM, tile by tile; 0 for others."""
    if tiles.keep != "all":
        return 0.0
    count = across(problem, tiles)
    a_tile = problem.depth * tiles.columns * problem.w_dtype.itemsize * cores / chip.hbm_bandwidth
    core = problem.flops / count / (chip.matrix_rate / chip.cores)
    return a_tile + (count - 1) * max(0.0, a_tile - core)


def _hbm_rate(chip: Chip, cores: int) -> float:
    """HBM's for one of such cores, while two links bring and two take what they can."""
    wire = 4 * chip.link_bandwidth * chip.link_efficiency / chip.devices_per_chip
    return (chip.hbm_bandwidth - wire) / cores


def resident_shape(problem: Problem, tiles: Tiles) -> tuple[int, int]:
    """The shape of the VMEM that holds all of w: columns up to a whole tile."""
    shape = problem.depth, _up(problem.columns, tiles.columns)
    return shape[::-1] if problem.transposed else shape


def across(problem: Problem, tiles: Tiles) -> int:
    """How many tiles of columns w has."""
    return -(-problem.columns // tiles.columns)


def columns_of(problem: Problem, w_ref: Ref, start: Number, size: int) -> Any:
    """So many columns of w, in HBM or in that VMEM."""
    cut = pl.ds(_aligned(start, LANES), size), pl.ds(0, problem.depth)
    return w_ref.at[cut if problem.transposed else cut[::-1]]


def multiply(
    x_ref: Ref,  # (A, rows, K): HBM
    w_ref: Ref,  # (K, N) or (N, K): HBM; VMEM of `resident_shape` if tiles.keep is "all"
    out_ref: Ref,  # (A, rows, N): HBM
    *term_refs: Ref,  # each as out_ref, which may be one of them
    sum_ref: Ref,  # (tiles.rows, tiles.columns), of `accumulator_dtype`: VMEM
    problem: Problem,
    tiles: Tiles,
    adds: Any = True,
    scale: float = 1.0,
    precision: PrecisionLike = None,
    begins: Callable[[Number], None] | None = None,
) -> None:
    """out = scale * (x @ w + terms), as the module says; `adds` says whether terms count.

    begins(j) is called before the first use of columns j * tiles.columns and up of w.
    """
    t, keep = tiles, tiles.keep
    deep, slabs = problem.depth // t.depth, t.depth // t.inner

    def weights(w: Any, column: Number, k: Number, slab: Number) -> Any:
        """A slab of the tile at (k, column), of what the pipeline or the kernel holds of w."""
        start = slab * t.inner if keep == "tile" else k * t.depth + slab * t.inner
        depths = pl.ds(_aligned(start, t.inner), t.inner)
        columns = pl.ds(_aligned(column * t.columns, t.columns) if keep == "all" else 0, t.columns)
        return w[(columns, depths) if problem.transposed else (depths, columns)]

    def body(x: Any, *refs: Ref) -> None:
        w, *terms, out = (w_ref, *refs) if keep == "all" else refs
        column, k = pl.program_id(0), pl.program_id(3)
        if begins is not None:
            at_first = (pl.program_id(1) == 0) & (pl.program_id(2) == 0) & (k == 0)
            pl.when(at_first)(lambda: begins(column))
        contract = ((1,), (1 if problem.transposed else 0,)), ((), ())

        def multiplied(slab: Number) -> jax.Array:
            left = x[:, pl.ds(_aligned(slab * t.inner, t.inner), t.inner)]
            right = weights(w, column, k, slab)
            if left.dtype != right.dtype:
                left, right = left.astype(jnp.float32), right.astype(jnp.float32)
            return lax.dot_general(
                left, right, contract, precision=precision, preferred_element_type=sum_ref.dtype
            )

        def add(slab: Number, _: None) -> None:
            sum_ref[...] += multiplied(slab)

        def finish(total: Any) -> None:
            for term in terms:
                value = term[...].astype(total.dtype)
                total += value if adds is True else jnp.where(adds, value, 0)
            out[...] = (total if scale == 1.0 else total * scale).astype(out.dtype)

        if deep == slabs == 1:
            finish(multiplied(0))
            return

        @pl.when(k == 0)
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        lax.fori_loop(0, slabs, add, None)

        @pl.when(k == deep - 1)
        def _() -> None:
            finish(sum_ref[...])

    shape = (problem.depth, t.columns) if keep == "panel" else (t.depth, t.columns)

    def place(j: Number, a: Any, i: Number, k: Number) -> tuple[Any, Any]:
        index = 0 if keep == "panel" else k, j
        return index[::-1] if problem.transposed else index

    w_spec = pl.BlockSpec(shape[::-1] if problem.transposed else shape, place)
    x_spec = pl.BlockSpec((None, t.rows, t.depth), lambda j, a, i, k: (a, i, k))
    out_spec = pl.BlockSpec((None, t.rows, t.columns), lambda j, a, i, k: (a, i, j))
    batch, rows, _ = x_ref.shape
    pltpu.emit_pipeline(
        body,
        grid=(across(problem, t), batch, pl.cdiv(rows, t.rows), deep),
        in_specs=[x_spec, *([] if keep == "all" else [w_spec]), *[out_spec] * len(term_refs)],
        out_specs=[out_spec],
    )(x_ref, *([] if keep == "all" else [w_ref]), *term_refs, out_ref)


def sum_shape(tiles: Tiles) -> tuple[int, int]:
    """The shape of the VMEM in which a product is summed up."""
    return tiles.rows, tiles.columns


def _aligned(start: Any, size: int) -> Any:
    return start if isinstance(start, int) else pl.multiple_of(start, size)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
