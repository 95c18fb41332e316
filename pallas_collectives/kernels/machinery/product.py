"""How a matrix product of any size goes through VMEM tile by tile (`multiply`), and what it takes.

    out[a] = scale * (x[a] @ w + terms[0][a] + ...)        x: (A, rows, K), w: (K, N) or (N, K)

x may be (A, K, rows), too: then each tile of it is turned as it is multiplied.

The grid runs over columns of w, then A, then rows, then K: a panel of w, all of K by `columns`, is
fetched once and serves all rows. Where one tile holds all of x, that is fetched once and serves all
columns. Where all of w fits VMEM it is resident: brought in once, for any number of products.
Where half of it or more does, so are all panels but each so-many-th, which is fetched anew while
those before it serve. Where not even a panel fits, tiles of w are fetched with those of x. All
tiles are double-buffered.

The matrix unit accumulates in float32 (int32 for integers); the sum over K and the terms stay in
that until they are rounded to the result's dtype, once.
"""

import dataclasses
import functools
import itertools

import jax.numpy as jnp

from pallas_collectives.annotations import DType
from pallas_collectives.kernels.machinery.blocks import LANES, sublanes, up
from pallas_collectives.topology.chips import Chip

# The compiler unrolls a product of tiles: 2^30 multiplications take it about two seconds. Deeper
# tiles are multiplied in a loop.
_MOST_VOLUME = 1 << 30
_STEP_SECONDS = 0.2e-6  # of the grid: DMAs started and waited for
# Share of a product's copy time that delays other traffic: of two tilings that take the same time,
# the one that moves less is chosen.
_SHARED = 0.05
_MOST_ROWS = 2048  # of a tile that has all rows: x then stays in VMEM for all columns


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one product goes through VMEM.

    Attributes:
      rows, depth, columns: one tile's share of rows, K and N. `depth` divides K; the last tile of
        rows and of columns may stick out.
      inner: the share of the depth that is multiplied at once; divides it.
      keep: what of w stays in VMEM: "all"; "some" panels (K by columns); of one product a "panel",
        or of one step a "tile" (depth by columns).
      every: with "some", each so-many-th panel is fetched anew.
    """

    rows: int
    depth: int
    columns: int
    inner: int
    keep: str
    every: int = 1


@dataclasses.dataclass(frozen=True)
class Problem:
    """One product, repeated with the same w.

    Attributes:
      batch, rows, depth, columns: A, rows, K and N; K and N are whole lanes of 128.
      x_dtype, w_dtype, out_dtype: dtypes.
      terms: how many terms are added.
      transposed: w is (N, K).
      turned: x is (A, K, rows); rows are whole lanes, too.
      in_full: float32 is multiplied in full, in several passes: precision "highest".
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
    turned: bool = False
    in_full: bool = False

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.rows * self.depth * self.columns


def accumulator_dtype(dtype: DType) -> DType:
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
        shared = _SHARED * _traffic(problem, tiles) / _hbm_rate(chip, cores)
        every = times * (seconds(problem, tiles, chip, cores) + shared)
        return every + seconds_to_bring(problem, tiles, chip, cores)

    found = [
        (taken(tiles), vmem(problem, tiles), tiles)
        for tiles in _candidates(problem, vmem_bytes)
        if vmem(problem, tiles) <= vmem_bytes
    ]
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def _candidates(problem: Problem, vmem_bytes: int) -> list[Tiles]:
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
        if inner:
            by_panel = Tiles(*tile, inner[-1], "panel")
            found += [by_panel, *(dataclasses.replace(by_panel, keep=k) for k in ("all", "tile"))]
            found += _keeping_some(problem, by_panel, vmem_bytes)
    return found


def _keeping_some(problem: Problem, by_panel: Tiles, vmem_bytes: int) -> list[Tiles]:
    """These tiles with as many panels in VMEM as fit; none if all do, or not even half of them."""
    panel = problem.depth * by_panel.columns * problem.w_dtype.itemsize
    places = 2 + (vmem_bytes - vmem(problem, by_panel)) // panel
    wide = across(problem, by_panel)
    if not 2 < places < wide:
        return []
    every = wide // (wide + 2 - places)
    return [dataclasses.replace(by_panel, keep="some", every=every)] if every > 1 else []


def fetched_anew(problem: Problem, tiles: Tiles) -> int:
    """How many panels of w each product fetches."""
    wide = across(problem, tiles)
    return {"all": 0, "some": wide // tiles.every}.get(tiles.keep, wide)


def _divisors(size: int) -> list[int]:
    """The divisors of a size that are whole lanes."""
    lanes = size // LANES
    return [LANES * d for d in range(1, lanes + 1) if lanes % d == 0]


def vmem(problem: Problem, tiles: Tiles) -> int:
    """Bytes of VMEM: places of tiles, a sum under way, and what the compiler keeps."""
    p, t = problem, tiles
    weight = {
        "all": p.depth * up(p.columns, t.columns),
        "some": (across(p, t) - fetched_anew(p, t) + 2) * p.depth * t.columns,
        "panel": 2 * p.depth * t.columns,
        "tile": 2 * t.depth * t.columns,
    }[t.keep]
    out = t.rows * t.columns
    return (
        2 * t.rows * t.depth * p.x_dtype.itemsize
        + weight * p.w_dtype.itemsize
        + (2 + p.terms * term_places(p, t)) * out * p.out_dtype.itemsize
        + 4 * out
        + kept_by_compiler(p, t)
    )


def kept_by_compiler(problem: Problem, tiles: Tiles) -> int:
    """Bytes of VMEM for what is multiplied at once of x, in the wider of the operands' dtypes.

    So says the compiler, in what a kernel takes beside its scratch: this, or less, and at the most
    half a MiB of registers that it spills. Of float32 in full it keeps the parts that its passes
    multiply, too: 3 to 4.7 times as much on v5e, v5p and v6e, for which 5 stand.
    """
    wider = max(problem.x_dtype.itemsize, problem.w_dtype.itemsize)
    return tiles.rows * tiles.inner * wider * (5 if problem.in_full and wider == 4 else 1)


def term_places(problem: Problem, tiles: Tiles) -> int:
    """Tiles of a term in VMEM: one is enough where it comes while products of K are added up."""
    return 1 if tiles.depth < problem.depth else 2


def seconds(problem: Problem, tiles: Tiles, chip: Chip, cores: int = 1) -> float:
    """What one of many products takes by the rates of a chip's core: of the matrix unit, or of HBM.

    `cores`: so many have such a product at a time, and share HBM.
    """
    p, t = problem, tiles
    down, wide = -(-p.rows // t.rows), across(p, t)
    steps = p.batch * down * wide * (p.depth // t.depth)
    adds = _adds(p)
    flops = 2 * steps * t.rows * t.depth * t.columns
    core = flops / (chip.matrix_rate / chip.cores)
    if p.turned:  # each tile, as often as it is multiplied
        numbers = steps * t.rows * t.depth
        core += numbers * chip.turned[p.x_dtype.itemsize > 2] / chip.vector_rate
    if t.inner < p.depth:
        # Each product of slabs is added to the sum under way, in part beside the next one: by the
        # replay of v4, tiles chosen as if it were not take up to 11% longer.
        core += flops / (2 * t.inner) / (chip.vector_rate * chip.cores)
    hbm = _hbm_rate(chip, cores)
    tile_of_x, tile_of_w = _first_bytes(p, t)
    tile_out = t.rows * t.columns * p.out_dtype.itemsize
    # While one step multiplies, the last one's result leaves, and what the next one takes comes:
    # with the last step the first tiles of the next product.
    of_x = 0 if steps == wide else tile_of_x
    full = of_x + (1 + adds) * tile_out + (tile_of_w if t.keep == "tile" else 0)
    panels, stays = wide - 1 if t.keep == "panel" else 0, t.keep in ("all", "some")
    late = sum(
        count * max(0.0, moved / hbm - core / steps)
        for count, moved in (
            (p.batch * down * wide - panels - 1, full),
            (panels, full + tile_of_w),
            (1, tile_of_x + (0 if stays else tile_of_w) + (1 + adds) * tile_out),
        )
    )
    if t.keep == "some":  # each of those fetched anew has the time of all since the last one
        late += fetched_anew(p, t) * max(0.0, tile_of_w / hbm - t.every * core / wide)
    sent = adds * (tile_out / hbm + chip.dma_latency)  # a sum is sent when all of it is in HBM
    return max(core + late + steps * _STEP_SECONDS, _traffic(p, t) / hbm) + sent


def _adds(problem: Problem) -> int:
    """How many terms are added: of all products of a block's sum the last alone has more."""
    return min(1, problem.terms)


def _traffic(problem: Problem, tiles: Tiles) -> float:
    """Bytes that a product moves from and to HBM."""
    p, down, wide = problem, -(-problem.rows // tiles.rows), across(problem, tiles)
    weights = p.batch * down if tiles.keep == "tile" else fetched_anew(p, tiles) / wide
    # A tile of x that serves again is not fetched again.
    of_x = 1 if p.batch * down * (p.depth // tiles.depth) == 1 else wide
    return (
        p.batch * p.rows * p.depth * of_x * p.x_dtype.itemsize
        + weights * p.depth * p.columns * p.w_dtype.itemsize
        + p.batch * p.rows * p.columns * (1 + _adds(p)) * p.out_dtype.itemsize
    )


def seconds_to_bring(problem: Problem, tiles: Tiles, chip: Chip, cores: int = 1) -> float:
    """What the first product waits for its first tiles, and for weights that stay in VMEM."""
    hbm = chip.hbm_bandwidth / cores
    x, w = (size / hbm for size in _first_bytes(problem, tiles))
    if tiles.keep not in ("all", "some"):
        return x + w
    count = across(problem, tiles)
    core = problem.flops / count / (chip.matrix_rate / chip.cores)
    return x + w + (count - 1) * max(0.0, w - core)


def _first_bytes(problem: Problem, tiles: Tiles) -> tuple[int, int]:
    """The bytes of a tile of x and of one of w."""
    depth = tiles.depth if tiles.keep == "tile" else problem.depth
    of_x = tiles.rows * tiles.depth * problem.x_dtype.itemsize
    return of_x, depth * tiles.columns * problem.w_dtype.itemsize


def _hbm_rate(chip: Chip, cores: int) -> float:
    """HBM's for one of such cores, while two links bring and two take what they can."""
    wire = 4 * chip.link_bandwidth * chip.link_efficiency / chip.devices_per_chip
    return (chip.hbm_bandwidth - wire) / cores


def across(problem: Problem, tiles: Tiles) -> int:
    """How many tiles of columns w has."""
    return -(-problem.columns // tiles.columns)
