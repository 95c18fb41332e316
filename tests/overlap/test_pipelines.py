"""The pipelines: tables, values against lax and numpy, what sums are added and travel in."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import harness
import jaxprs
import pallas_collectives as pc
from pallas_collectives import collectives, validation
from pallas_collectives.errors import CollectiveError, DtypeError, UnboundAxisError
from pallas_collectives.overlap import array_pipelines

XLA = {"backend": "xla"}
gather = pc.pipelined_all_gather_and_consume
exchange = pc.pipelined_produce_and_all_to_all
add_up = functools.partial(exchange, reduce="sum")


def of_source(block: Any, source: Any) -> Any:
    """Something to make of a block, that tells who sent it."""
    return jax.tree.map(lambda leaf: leaf * (source + 1).astype(leaf.dtype), block), source


def all_three(*leaves: jax.Array, **how: Any) -> Any:
    tree = {"first": leaves[0], "rest": leaves[1:]}

    def produce(device: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[device], tree)

    gathered = gather(tree, of_source, "x", **how)
    return gathered, exchange(produce, "x", **how), add_up(produce, "x", **how)


def operands(n: int, **shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [harness.random((n, n, *shape), dtype) for dtype, shape in shapes.items()]


def check_all_three(results: Any, *xs: np.ndarray) -> None:
    (gathered, sources), exchanged, summed = results
    n = len(xs[0])
    np.testing.assert_array_equal(sources, [np.arange(n)] * n)
    leaves = (jax.tree.leaves(tree) for tree in (gathered, exchanged, summed))
    for x, whole, blocks, total in zip(xs, *leaves, strict=True):
        assert whole.dtype == blocks.dtype == total.dtype == x.dtype
        factor = np.arange(1, n + 1).reshape(n, *(1,) * (x.ndim - 1)).astype(x.dtype)
        np.testing.assert_array_equal(whole, [x * factor] * n)
        np.testing.assert_array_equal(blocks, x.swapaxes(0, 1))
        np.testing.assert_array_equal(total, x.astype(np.float64).sum(0).astype(x.dtype))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8])
def test_values(n: int) -> None:
    check_values(n)


@pytest.mark.parametrize("n", [2, 6, 7])
def test_values_of_looped_hops(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_pipelines, "UNROLLED_UP_TO", 1)
    check_values(n)


def check_values(n: int) -> None:
    xs = operands(n, float32=(3, 5), bfloat16=(4,), int8=())
    program = functools.partial(all_three, **XLA)
    check_all_three(harness.per_device(program, harness.mesh(n), check_vma=bool(n % 3))(*xs), *xs)


def test_kernels_serve_and_do_not_race(hops: str) -> None:
    n, mode = (4, "eager") if hops == "written out" else (5, "on_wait")
    pc.reset_counts()
    xs = operands(n, bfloat16=(2, 3))
    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES[mode]):
        run = harness.per_device(all_three, harness.mesh(n))
        permutations = jaxprs.primitives_in(jax.make_jaxpr(run)(*xs))["pallas_ppermute"]
        check_all_three(run(*xs), *xs)
    assert not harness.race_reported()
    assert {backend for _, backend, _ in pc.counts()} == {"pallas"}
    assert not pc.fallback_counts()
    if hops == "written out":
        assert permutations == 3 * (n - 1)


HEADINGS = {
    gather: "sends       meanwhile consumes",
    exchange: "sends       meanwhile produces",
    add_up: "sends sums  meanwhile produces",
}


@pytest.mark.parametrize("function", HEADINGS, ids=["gather", "exchange", "add_up"])
def test_tables_in_the_docstring_are_what_device_0_of_5_does(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]
) -> None:
    n = 5
    rows: list[tuple[list[str], list[str]]] = [([], [])]
    arriving: list[int] = []

    def ppermute(block: Any, axis_name: str, perm: Any, **how: Any) -> Any:
        offset = perm[0][1] if perm[0][1] <= n // 2 else perm[0][1] - n
        distance = str(abs(offset)) if function is exchange else ""
        if rows[-1][1]:
            rows.append(([], []))
            arriving.clear()
        rows[-1][0].append(f"{int(block)}{'>' if offset > 0 else '<'}{distance}")
        arriving.append((int(block) - offset) % n)
        return jnp.asarray(arriving[-1]) if function is gather else jnp.zeros_like(block)

    def consume(block: jax.Array, source: int) -> jax.Array:
        assert block == source
        if int(block) in arriving:  # it had to be waited for
            rows.append(([], []))
            arriving.clear()
        rows[-1][1].append(str(source))
        return block

    def produce(destination: int) -> jax.Array:
        rows[-1][1].append(str(destination))
        return jnp.asarray(destination)

    monkeypatch.setattr(validation, "size_of", lambda axis_name: n)
    monkeypatch.setattr(lax, "axis_index", lambda axis_name: 0)
    monkeypatch.setattr(collectives, "ppermute", ppermute)
    if function is gather:
        gather(jnp.asarray(0), consume, "x")
    else:
        function(produce, "x")
    lines = [HEADINGS[function], *(f"{' '.join(a):<12}{' '.join(b)}" for a, b in rows)]
    assert "".join(f"    {line}\n" for line in lines) in array_pipelines.__doc__


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_any_shape_and_place_as_lax(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([2, 3, 5]))
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    tiled = bool(shape) and data.draw(st.booleans())
    ndim = len(shape) + (not tiled)
    place: dict[str, Any] = {"axis": data.draw(st.integers(-ndim, ndim - 1)), "tiled": tiled}
    x = harness.random((n, n, *shape), data.draw(st.sampled_from(["float32", "int16", "bool"])))
    both_ways, looped = data.draw(st.booleans()), data.draw(st.booleans())

    def ours(x: jax.Array) -> Any:
        whole = gather(x[0], lambda b, _: b, "x", bidirectional=both_ways, **place, **XLA)
        return whole, exchange(lambda d: x[d], "x", **place, **XLA), add_up(lambda d: x[d], "x")

    def of_lax(x: jax.Array) -> Any:
        blocks = lax.all_to_all(x, "x", 0, 0)
        axis = place["axis"] % ndim
        laid = jnp.concatenate(list(blocks), axis) if tiled else jnp.moveaxis(blocks, 0, axis)
        total = lax.psum_scatter(x.astype(jnp.int32) if x.dtype == jnp.bool_ else x, "x")
        return lax.all_gather(x[0], "x", **place), laid, total

    on = harness.mesh(n)
    with pytest.MonkeyPatch.context() as patch, pc.use_backend("xla"):
        patch.setattr(array_pipelines, "UNROLLED_UP_TO", 1 if looped else 8)
        results = harness.per_device(ours, on, check_vma=False)(x)
    for got, want in zip(results, harness.per_device(of_lax, on, check_vma=False)(x), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_over_several_axes_of_more() -> None:
    x = harness.random((8, 4, 3), "float32")

    def program(x: jax.Array) -> Any:
        own = lax.axis_index("y").astype(x.dtype)  # what is consumed differs along "y" too
        gathered = gather(x, lambda b, s: b + own * s, ("x", "z"), **XLA)
        return gathered, exchange(lambda d: x[d] + own * d, ("x", "z"), **XLA)

    gathered, exchanged = harness.per_device(program, harness.mesh(2, 2, 2))(x)
    xs = x.reshape(2, 2, 2, 4, 3)
    device = np.arange(4)
    for i, y, j in np.ndindex(2, 2, 2):
        number, along = 4 * i + 2 * y + j, xs[:, y].reshape(4, 4, 3)
        np.testing.assert_array_equal(gathered[number], along + y * device[:, None, None])
        np.testing.assert_array_equal(exchanged[number], along[:, 2 * i + j] + y * (2 * i + j))


def test_over_an_axis_of_vmap() -> None:
    x = harness.random((3, 4), "float32")
    got = jax.vmap(lambda x: gather(x, lambda b, s: b * s, "v", **XLA), axis_name="v")(x)
    np.testing.assert_array_equal(got, [x * np.arange(3)[:, None]] * 3)


def test_operands_that_all_devices_share(hops: str) -> None:
    """They are not typed as varying, and constants of a function not at all."""
    n, x = 5, np.arange(6.0, dtype=np.float32)

    def program(x: jax.Array) -> Any:
        whole = gather(x, lambda b, _: (b, 1.5), "x", **XLA)
        return whole, exchange(lambda _: (x, 2), "x", **XLA), add_up(lambda _: x, "x", **XLA)

    spec = PartitionSpec
    out_specs = ((spec("x"), spec("x")), (spec("x"), spec("x")), spec("x"))
    run = jax.shard_map(program, mesh=harness.mesh(n), in_specs=spec(), out_specs=out_specs)
    (whole, constants), (blocks, numbers), total = jax.jit(run)(x)
    np.testing.assert_array_equal(np.asarray(whole), [x] * n**2)
    np.testing.assert_array_equal(np.asarray(blocks), [x] * n**2)
    np.testing.assert_array_equal(np.asarray(total), np.tile(n * x, n))
    assert (
        np.asarray(constants).tolist() == [1.5] * n**2
        and np.asarray(numbers).tolist() == [2] * n**2
    )


# --- in sums: what is added in, and what travels ------------------------------------------------


def test_narrow_sums_are_added_in_float32_and_rounded_once_per_hop() -> None:
    n, size = 8, 4096
    x = np.random.default_rng(0).integers(-1024, 1024, (n, n, size)) / 64  # float32 adds exactly
    bf16, f32 = jnp.bfloat16, np.float32

    def program(x: jax.Array) -> Any:
        def run(dtype: Any, **how: Any) -> jax.Array:
            return add_up(lambda d: x[d].astype(dtype), "x", **how, **XLA)

        return run(f32), run(f32, wire_dtype=bf16), run(bf16), run(bf16, wire_dtype=f32)

    exact, narrow, plain, precise = harness.per_device(program, harness.mesh(n))(x.astype(f32))
    rounded = x.astype(f32).astype(bf16).astype(f32).sum(0)
    np.testing.assert_array_equal(exact, x.sum(0))
    np.testing.assert_array_equal(precise, rounded.astype(bf16))
    assert [a.dtype for a in (exact, narrow, plain, precise)] == [f32, f32, bf16, bf16]
    # Sums of up to 4 terms, each less than 16: on each of 7 hops they are rounded by 2**-3 at most.
    for got, want in ((narrow, x.sum(0)), (plain.astype(f32), rounded)):
        assert 0 < np.abs(got - want).max() <= 8 * 2**-3


# --- what is refused ----------------------------------------------------------------------------


def test_what_cannot_be_is_refused_while_tracing() -> None:
    shapes = iter(range(1, 9))

    def other_each_time(*_: Any) -> jax.Array:
        return jnp.zeros(next(shapes))

    harness.fails(UnboundAxisError, "axis name 'q'", lambda x: gather(x, of_source, "q"))
    harness.fails(
        CollectiveError,
        r"consume=None: it must be a function; write consume=lambda block, source",
        lambda x: gather(x, None, "x"),
    )
    harness.fails(CollectiveError, r"produce=3: it must be a function", lambda x: exchange(3, "x"))
    harness.fails(
        CollectiveError, r"axis=4.*\[-4, 4\)", lambda x: gather(x, lambda b, _: b, "x", axis=4)
    )
    harness.fails(
        CollectiveError, r"axis=0 of a scalar in leaf \[1\]",
        lambda x: gather(x, lambda b, _: (b, b.sum()), "x", tiled=True),
    )  # fmt: skip
    for function in (
        lambda x: gather(x, other_each_time, "x"),
        lambda x: add_up(other_each_time, "x"),
    ):
        harness.fails(CollectiveError, r"results of \w+: .*, and .* before", function)
    harness.fails(
        CollectiveError, "reduce='max'", lambda x: exchange(lambda d: x[d], "x", reduce="max")
    )
    for dtype in ("int8", "bfloat16"):  # no floats; nothing to add
        options: Any = {"wire_dtype": dtype, "reduce": "sum" if dtype == "int8" else None}
        harness.fails(
            DtypeError, "wire_dtype", lambda x, o=options: exchange(lambda d: x[d], "x", **o)
        )
