"""A product by tiles, by itself."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import harness
from pallas_collectives.errors import VmemError
from pallas_collectives.kernels import matmul_plan
from pallas_collectives.kernels.machinery import product
from pallas_collectives.kernels.machinery.multiply import Products, Scratch, _Panels
from pallas_collectives.kernels.machinery.product import Problem, Tiles
from pallas_collectives.topology import chips, groups
from pallas_collectives.topology.groups import Group

F32 = jnp.dtype(jnp.float32)
BF16 = jnp.dtype(jnp.bfloat16)


def multiply(
    problem: Problem,
    tiles: Tiles,
    x: Any,
    w: Any,
    *terms: Any,
    adds: bool = True,
    times: int = 2,
    when: str = "on_wait",
    **options: Any,
) -> Any:
    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        *term_refs, out_ref, again_ref, scratch = refs
        adds_here = jnp.asarray(adds)  # as kernels have it: traced

        def where(ref: Any, acts: Any = True) -> Any:
            return lambda act: groups.only_if(acts, lambda: act(ref))

        products = Products(problem, tiles, w_ref, scratch, options.pop("precision", None))
        terms = [where(ref, adds_here) for ref in term_refs]
        products.begin()
        products.fetch(where(x_ref))
        for number in range(times):
            follow = {} if number == times - 1 else {"follow": lambda: products.fetch(where(x_ref))}
            given = {"adds": adds_here, **options, **follow}
            products.multiply(where(x_ref), (out_ref, again_ref)[number % 2], *terms, **given)
        products.settle(out_ref)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    shape = problem.batch, problem.rows, problem.columns
    result = jax.ShapeDtypeStruct(shape, problem.out_dtype)
    first, second = pl.pallas_call(
        kernel,
        out_shape=[result] * 2,
        in_specs=[hbm] * (2 + len(terms)),
        out_specs=[hbm] * 2,
        scratch_shapes=[Scratch.of(problem, tiles)],
        interpret=pltpu.InterpretParams(uninitialized_memory="nan", dma_execution_mode=when),
    )(x, w, *terms)
    np.testing.assert_array_equal(first, second)
    return first


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("keep", ["all", "panel", "tile"])
def test_products_of_tiles_that_stick_out(keep: str, transposed: bool) -> None:
    """Rows and columns that are no multiple of a tile; K in several tiles, and those in slabs."""
    problem = Problem(2, 40, 512, 384, F32, F32, F32, terms=1, transposed=transposed)
    tiles = Tiles(rows=16, depth=256, columns=256, inner=128, keep=keep)
    x, w = harness.random((2, 40, 512), F32), harness.random((512, 384), F32, 1)
    term = harness.random((2, 40, 384), F32, 2)
    given = w.T if transposed else w
    adds = keep != "panel"
    got = multiply(problem, tiles, x, given, term, adds=adds, scale=0.5)
    np.testing.assert_array_equal(got, (x @ w + (term if adds else 0)) * 0.5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_x_as_columns(transposed: bool, dtype: Any) -> None:
    """The last tile of rows is a narrower one; K in several tiles, and those in slabs."""
    of = {"terms": 1, "transposed": transposed, "turned": True}
    problem = Problem(2, 384, 512, 384, dtype, dtype, F32, **of)
    tiles = Tiles(rows=256, depth=256, columns=256, inner=128, keep="panel")
    x, w = harness.random((2, 384, 512), dtype), harness.random((512, 384), dtype, 1)
    term, given = harness.random((2, 384, 384), F32, 2), w.T if transposed else w
    got = multiply(problem, tiles, np.swapaxes(x, 1, 2), given, term)
    wide = (a.astype(np.float32) for a in (x, w))
    np.testing.assert_array_equal(got, functools.reduce(np.matmul, wide) + term)


@pytest.mark.full
@pytest.mark.parametrize(
    ("columns", "every", "times"),
    [(768, 2, 3), *(pytest.param(*r, marks=pytest.mark.full) for r in ((640, 2, 2), (640, 5, 3)))],
)
def test_products_with_some_panels_that_stay(columns: int, every: int, times: int) -> None:
    """Three, two or one of five or six panels are fetched anew, to the same two places in turn."""
    problem = Problem(1, 16, 256, columns, F32, F32, F32)
    tiles = Tiles(rows=16, depth=128, columns=128, inner=128, keep="some", every=every)
    x, w = harness.random((1, 16, 256), F32), harness.random((256, columns), F32, 1)
    wide = columns // 128
    assert product.fetched_anew(problem, tiles) == wide // every
    places = Scratch.of(problem, tiles).w.tiles.shape[0]
    assert places == wide - wide // every + 2
    for when in ("on_wait", "eager"):
        np.testing.assert_array_equal(multiply(problem, tiles, x, w, times=times, when=when), x @ w)


def test_a_panel_in_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: what is fetched anew comes to where the one before it still serves."""
    problem = Problem(1, 16, 128, 640, F32, F32, F32)
    tiles = Tiles(rows=16, depth=128, columns=128, inner=128, keep="some", every=2)
    x, w = harness.random((1, 16, 128), F32), harness.random((128, 640), F32, 1)

    def place(self: Any, product: Any, step: Any) -> Any:
        panel = jax.lax.div(step, np.int32(self.serves))
        odd = jax.lax.rem(panel, np.int32(2)) == 1
        return jnp.where(odd, self.count - self.anew, panel - jax.lax.div(panel, np.int32(2)))

    monkeypatch.setattr(_Panels, "place", place)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(multiply(problem, tiles, x, w, when="eager"), x @ w)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_most_of_the_weights_stay_where_not_all_fit(chip: str) -> None:
    """So that products of few rows are not bound by HBM: each would fetch all of w anew."""
    rates, problem = chips.BY_NAME[chip], Problem(1, 256, 8192, 7168, BF16, BF16, BF16)
    budget = int(rates.vmem_bytes * chips.VMEM_SHARE)
    tiles = product.choose_tiles(problem, budget, rates, times=8)
    assert tiles is not None and tiles.keep == "some"
    assert product.vmem(problem, tiles) <= budget
    by_panel = dataclasses.replace(tiles, keep="panel", every=1)
    least = problem.flops / (rates.matrix_rate / rates.cores)
    took, before = (product.seconds(problem, t, rates) for t in (tiles, by_panel))
    assert least <= took <= 1.2 * least < before


@pytest.mark.parametrize(
    "x_dtype, w_dtype, out_dtype",
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("int8", "int8", "int32"),
        ("float8_e4m3fn", "float8_e4m3fn", "float32"),
    ],
)
def test_products_are_added_up_wide(x_dtype: str, w_dtype: str, out_dtype: str) -> None:
    x_dtype, w_dtype, out_dtype = map(jnp.dtype, (x_dtype, w_dtype, out_dtype))
    problem = Problem(1, 32, 256, 128, x_dtype, w_dtype, out_dtype)
    tiles = Tiles(rows=32, depth=128, columns=128, inner=128, keep="tile")
    x, w = harness.random((1, 32, 256), x_dtype), harness.random((256, 128), w_dtype, 1)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    got = np.asarray(multiply(problem, tiles, x, w))
    np.testing.assert_array_equal(got, exact.astype(out_dtype))  # rounded once


@pytest.mark.parametrize("chip", chips.BY_NAME)
@pytest.mark.parametrize("columns", [8192, 11008, 28672, 29568])
def test_tiles_fit_and_feed_the_matrix_unit(chip: str, columns: int) -> None:
    problem = Problem(1, 2048, 8192, columns, BF16, BF16, BF16)
    budget = int(chips.BY_NAME[chip].vmem_bytes * chips.VMEM_SHARE)
    tiles = product.choose_tiles(problem, budget, chips.BY_NAME[chip])
    assert tiles is not None
    assert product.vmem(problem, tiles) <= budget
    assert problem.depth % tiles.depth == tiles.depth % tiles.inner == 0
    rates = chips.BY_NAME[chip]
    least = problem.flops * rates.cores / rates.matrix_rate
    assert least <= product.seconds(problem, tiles, rates) <= 1.25 * least


@pytest.mark.parametrize("chip", chips.BY_NAME)
def test_weights_stay_in_vmem_where_they_fit(chip: str) -> None:
    budget = int(chips.BY_NAME[chip].vmem_bytes * chips.VMEM_SHARE)

    def kept(depth: int, columns: int) -> str:
        problem = Problem(1, 1024, depth, columns, BF16, BF16, BF16)
        tiles = product.choose_tiles(problem, budget, chips.BY_NAME[chip], times=16)
        assert tiles is not None
        return tiles.keep

    assert kept(1024, 2048) == "all"
    assert kept(8192, 11008) != "all"


def test_what_no_tile_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chips, "SIMULATED", dataclasses.replace(chips.SIMULATED, vmem_bytes=1 << 16)
    )
    with pytest.raises(VmemError, match="MiB of VMEM"):
        matmul_plan.plan(
            (1, 64, 1024),
            [(1024, BF16)],
            BF16,
            BF16,
            group=Group(("x",), (4,)),
            block_bytes=1 << 17,
            cores=1,
        )


@pytest.mark.parametrize(
    "chip, shape, narrower",
    [
        *(("7x", (2048, 4096, 4096), True), ("v6e", (1024, 4096, 2048), True)),
        ("v6e", (16384, 1024, 8192), False),
    ],
)
def test_tiles_of_sums_count_what_the_first_waits_for(
    chip: str, shape: tuple[int, int, int], narrower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The narrower the tile, the sooner its weights are there, and the first sum can set out."""
    monkeypatch.setattr(chips, "SIMULATED", chips.BY_NAME[chip])
    (rows, depth, columns), n = shape, 16
    plan = matmul_plan.plan(
        (1, rows, depth), [(columns, BF16)], BF16, BF16,
        group=Group(("x",), (n,)), block_bytes=2 * rows * columns, cores=1, terms=2,
    )  # fmt: skip
    (problem,), (tiles,), rates = plan.problems, plan.tiles, chips.current()
    budget = int(rates.vmem_bytes * chips.VMEM_SHARE)
    steady = product.choose_tiles(problem, budget, rates, times=n * plan.chunks)
    assert steady is not None and tiles.keep == steady.keep == "all"
    assert (tiles.columns < steady.columns) == narrower
    late = [product.seconds_to_bring(problem, each, rates) for each in (tiles, steady)]
    assert (late[0] < late[1]) == narrower


@pytest.mark.parametrize(
    "chip, n, cores, shape, chunks",
    [("v5e", 16, 1, (16384, 1024, 8192), 1), ("v5p", 4, 2, (1024, 4096, 4096), 4)],
)
def test_a_gather_has_chunks_where_a_hop_outlasts_the_own_products(
    chip: str,
    n: int,
    cores: int,
    shape: tuple[int, int, int],
    chunks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere the products never wait for the wire, and a chunk more is a fetch more."""
    monkeypatch.setattr(chips, "SIMULATED", chips.BY_NAME[chip])
    (rows, depth, columns), group = shape, Group(("x",), (n,))
    plan = matmul_plan.plan(
        (1, rows, depth), [(columns, BF16)], BF16, BF16,
        group=group, block_bytes=2 * rows * depth, cores=cores,
    )  # fmt: skip
    hop = matmul_plan.wire_seconds(group, 2 * rows * depth) * 2 / (n - 1)
    assert plan.chunks == chunks
    assert (hop > plan.seconds_per_block) == (chunks > 1)


@pytest.mark.parametrize(
    "chip, n, cores, shape, chunks",
    [
        ("v4", 16, 2, (1024, 4096, 4096), 2),
        ("v4", 16, 2, (4096, 4096, 11008), 2),
        ("v5e", 16, 1, (2048, 4096, 4096), 2),
    ],
)
def test_a_scatter_has_chunks_for_what_its_last_sums_make_wait(
    chip: str,
    n: int,
    cores: int,
    shape: tuple[int, int, int],
    chunks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two or more there are products to do while the last sums come."""
    monkeypatch.setattr(chips, "SIMULATED", chips.BY_NAME[chip])
    (rows, depth, columns), order = shape, tuple(range(n))
    second = order if cores > 1 else None  # v4's row is over two axes
    plan = matmul_plan.plan(
        (1, rows, depth), [(columns, BF16)], BF16, BF16,
        group=Group(("x",), (n,), order=order, second=second),
        block_bytes=2 * rows * columns, cores=cores, terms=2,
    )  # fmt: skip
    assert plan.chunks == chunks
