"""The pipelines: tables, values and gradients against lax and numpy, size of programs, overlap."""

import functools
import re
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import harness
import jaxprs
import nccl_host
import pallas_collectives as pc
from pallas_collectives import checks, collectives, pipelined_products, pipelines
from pallas_collectives.errors import CollectiveError, DtypeError, UnboundAxisError

XLA = {"backend": "xla"}
gather = pc.pipelined_all_gather_and_consume
exchange = pc.pipelined_produce_and_all_to_all
add_up = functools.partial(exchange, reduce="sum")


HOPS = ["written out", "looped"]


@pytest.fixture(params=HOPS)
def hops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether every hop is an instruction of its own, as on few devices, or they are a loop."""
    if request.param == "looped":
        monkeypatch.setattr(pipelines, "UNROLLED_UP_TO", 1)
    return request.param


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
    monkeypatch.setattr(pipelines, "UNROLLED_UP_TO", 1)
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

    monkeypatch.setattr(checks, "size_of", lambda axis_name: n)
    monkeypatch.setattr(lax, "axis_index", lambda axis_name: 0)
    monkeypatch.setattr(collectives, "ppermute", ppermute)
    if function is gather:
        gather(jnp.asarray(0), consume, "x")
    else:
        function(produce, "x")
    lines = [HEADINGS[function], *(f"{' '.join(a):<12}{' '.join(b)}" for a, b in rows)]
    assert "".join(f"    {line}\n" for line in lines) in pipelines.__doc__


def by_lax(name: str, x: jax.Array) -> jax.Array:
    """The collective that a pipeline named so is built like, with weights before it or after."""
    weights = jnp.arange(1.0, 1 + lax.axis_size("x"))[:, None, None]
    match name:
        case "gather":
            return jnp.sin(lax.all_gather(x[0], "x") * weights)
        case "exchange":
            return lax.all_to_all(jnp.sin(x * weights), "x", 0, 0)
    return lax.psum_scatter(jnp.sin(x * weights), "x")


def by_pipeline(name: str, x: jax.Array, **how: Any) -> jax.Array:
    weights = jnp.arange(1.0, 1 + lax.axis_size("x"))
    match name:
        case "gather":
            return gather(x[0], lambda b, source: jnp.sin(b * weights[source]), "x", **how)
        case "exchange":
            return exchange(lambda device: jnp.sin(x[device] * weights[device]), "x", **how)
    return add_up(lambda device: jnp.sin(x[device] * weights[device]), "x", **how)


NAMES = ["gather", "exchange", "sum"]


def derivatives(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> Any:
    """Forward, backward, twice in a checkpoint, and vmapped; of a loss with no constant ones."""

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.cos(f(x)))

    twice = jnp.stack([x, 2 * x])
    return (
        jax.jvp(f, (x,), (x + 1,)),
        jax.grad(loss)(x),
        jax.grad(lambda x: jnp.vdot(jax.grad(jax.checkpoint(loss))(x), x))(x),
        jax.vmap(jax.grad(loss))(twice),
    )


@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name: str, hops: str) -> None:
    n, check_vma = (4, True) if hops == "written out" else (5, False)
    x = np.random.default_rng(0).normal(size=(n, n, 2, 3)).astype(np.float32)
    on = harness.mesh(n)
    ours, of_lax = (
        harness.per_device(functools.partial(derivatives, f), on, check_vma=check_vma)(x)
        for f in (functools.partial(by_pipeline, name, **XLA), functools.partial(by_lax, name))
    )
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(of_lax), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_by_kernels(name: str) -> None:
    pc.reset_counts()
    x = np.random.default_rng(0).normal(size=(3, 3, 2, 3)).astype(np.float32)

    def gradient(f: Callable[[jax.Array], jax.Array]) -> np.ndarray:
        run = jax.grad(lambda x: jnp.sum(jnp.cos(f(x))))
        return np.asarray(harness.per_device(run, harness.mesh(3))(x))

    got = gradient(functools.partial(by_pipeline, name))
    assert {backend for _, backend, _ in pc.counts()} == {"pallas"}
    assert not pc.fallback_counts()
    want = gradient(functools.partial(by_lax, name))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


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
        patch.setattr(pipelines, "UNROLLED_UP_TO", 1 if looped else 8)
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


@pytest.mark.parametrize("name", NAMES)
def test_programs_do_not_grow_with_the_ring(name: str) -> None:
    def permutations(n: int) -> int:
        mesh = jax.sharding.AbstractMesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = PartitionSpec("x")

        def program(x: jax.Array) -> jax.Array:
            return by_pipeline(name, x[:, :, None], **XLA).sum(0, keepdims=True)

        mapped = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec)
        x = jax.ShapeDtypeStruct((n * n, 2), "float32")
        return jaxprs.primitives_in(jax.make_jaxpr(mapped)(x))["pallas_ppermute"]

    assert permutations(8) == 7
    few, many = permutations(32), permutations(256)
    assert many == few + (2 * 3 if name == "exchange" else 0)  # 3 powers of two more either way
    assert many < 40


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


# --- products -----------------------------------------------------------------------------------

PRODUCTS = [
    ("float32", None, "float32", 1e-5),
    ("bfloat16", None, "bfloat16", 2e-2),
    ("bfloat16", "float32", "float32", 1e-5),
    ("int8", "int32", "int32", 0),
    ("float8_e4m3fn", "float32", "float32", 1e-5),
]


def close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64),
        want,
        rtol=tolerance,
        atol=tolerance * np.abs(want).max(),
    )


def normal(dtype: str, *shape: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=shape)
    return (x * 8 if "int" in dtype else x).astype(jnp.dtype(dtype))


@pytest.mark.parametrize(("dtype", "preferred", "to", "tolerance"), PRODUCTS)
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_all_gather_matmul(
    axis: int, dtype: str, preferred: str | None, to: str, tolerance: float
) -> None:
    n = 3 if axis else 4
    x = normal(dtype, n, 2, 5, 7, seed=0)
    ws = {"up": normal(dtype, n, 7, 4, seed=1), "down": normal(dtype, n, 7, 2, seed=2)}

    def program(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        return pipelined_products.pipelined_all_gather_matmul(
            x, {"up": up, "down": down}, "x", gather_axis=axis, return_gathered=True,
            preferred_element_type=preferred, **XLA,
        )  # fmt: skip

    products, gathered = harness.per_device(program, harness.mesh(n))(x, ws["up"], ws["down"])
    whole = np.concatenate(list(x), axis)
    np.testing.assert_array_equal(gathered, [whole] * n)
    for name, w in ws.items():
        assert products[name].dtype == jnp.dtype(to)
        want = np.stack([whole.astype(np.float64) @ w[d].astype(np.float64) for d in range(n)])
        close(products[name], want, tolerance)


@pytest.mark.parametrize(("dtype", "preferred", "to", "tolerance"), PRODUCTS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_matmul_reduce_scatter(
    axis: int, dtype: str, preferred: str | None, to: str, tolerance: float
) -> None:
    n = 4 if axis else 3
    x, w = normal(dtype, n, n, 2 * n, 5, seed=0), normal(dtype, n, 5, 3 * n, seed=1)

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return pipelined_products.pipelined_matmul_reduce_scatter(
            x, w, "x", scatter_axis=axis, preferred_element_type=preferred, **XLA
        )

    got = harness.per_device(program, harness.mesh(n))(x, w)
    assert got.dtype == jnp.dtype(to)
    whole = np.einsum("dabk,dkc->abc", x.astype(np.float64), w.astype(np.float64))
    close(got, np.stack(np.split(whole, n, axis)), tolerance)


def test_means_and_precise_sums_of_products() -> None:
    n = 4
    x, w = normal("bfloat16", n, n, 8, seed=0), normal("bfloat16", n, 8, 64, seed=1)

    def program(x: jax.Array, w: jax.Array) -> Any:
        run = functools.partial(
            pipelined_products.pipelined_matmul_reduce_scatter, x, w, "x", **XLA
        )
        return run(), run(precise=True), run(reduce="mean", precise=True)

    plain, precise, mean = harness.per_device(program, harness.mesh(n))(x, w)
    whole = np.einsum("dak,dkc->ac", x.astype(np.float64), w.astype(np.float64))[:, None]
    close(precise, whole, 2**-8)
    assert np.abs(plain - whole).max() > np.abs(precise - whole).max()
    np.testing.assert_array_equal(mean, precise / 4)


def test_gradients_of_products_are_laxs() -> None:
    n = 4
    x, w = normal("float32", n, n, 6, seed=0), normal("float32", n, 6, n, seed=1)

    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.sin(pipelined_products.pipelined_all_gather_matmul(x, w, "x", **XLA))
        return pipelined_products.pipelined_matmul_reduce_scatter(y, w.T, "x", **XLA)

    def of_lax(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.sin(lax.all_gather(x, "x", tiled=True) @ w)
        return lax.psum_scatter(y @ w.T, "x", tiled=True)

    def gradients(f: Callable[..., jax.Array]) -> Any:
        run = jax.grad(lambda *xw: jnp.sum(jnp.cos(f(*xw))), (0, 1))
        return harness.per_device(run, harness.mesh(n))(x, w)

    for got, want in zip(gradients(ours), gradients(of_lax), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_gradients_of_narrow_weights_are_added_in_float32() -> None:
    n = 8
    x, w = normal("bfloat16", n, n, 6, seed=0), normal("bfloat16", n, 6, n, seed=1)
    cotangent = jnp.asarray(normal("bfloat16", n, n, seed=2))

    def ours(x: jax.Array, w: jax.Array) -> Any:
        _, of_gather = jax.vjp(
            lambda w: pipelined_products.pipelined_all_gather_matmul(x[:1], w, "x", **XLA), w
        )
        _, of_scatter = jax.vjp(
            lambda w: pipelined_products.pipelined_matmul_reduce_scatter(x, w, "x", **XLA), w
        )
        return of_gather(cotangent), of_scatter(cotangent[:1])

    def exact(x: np.ndarray, w: np.ndarray) -> Any:
        wide = np.asarray(cotangent, np.float64)
        return (
            np.stack([x[:, 0].T.astype(np.float64) @ wide] * n),
            x.swapaxes(1, 2).astype(np.float64) @ np.stack([np.repeat(wide[:1], n, 0)] * n),
        )

    got = harness.per_device(ours, harness.mesh(n), check_vma=False)(x, w)
    for (gradient,), want in zip(got, exact(x, w), strict=True):
        close(gradient, want, 2**-8)


# --- on GPUs, or on the wire that stands for NCCL ------------------------------------------------


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def nccl_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many devices; 2 on the wire: with one way round every call depends on the one before.

    CPU devices run calls that do not depend on each other in any order, a stream in one.
    """
    if request.param == "host":
        nccl_host.serve(monkeypatch)
        return 2
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    return min(4, jax.device_count())


@pytest.mark.parametrize("name", [*NAMES, "fused", "unfused"])
def test_nccl_gives_what_lax_gives(name: str, nccl_devices: int) -> None:
    n = nccl_devices

    def program(x: jax.Array, **how: Any) -> jax.Array:
        if name in NAMES:
            return by_pipeline(name, x, **how)
        y = pc.all_gather_matmul(x[0], x[1].T, "x", algorithm=name, **how)
        return pc.matmul_reduce_scatter(jnp.sin(y), x[1], "x", algorithm=name, **how)

    def run(**how: Any) -> Any:
        def shard(x: jax.Array) -> Any:
            return jax.value_and_grad(lambda x: jnp.sum(jnp.cos(program(x, **how))))(x)

        return harness.per_device(shard, harness.mesh(n))(harness.random((n, n, 6, 6), "float32"))

    pc.reset_counts()
    ours = run(backend="nccl")
    assert {backend for _, backend, _ in pc.counts()} == {"nccl"}
    for got, want in zip(ours, run(**XLA), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


# --- what the TPU compiler makes of them --------------------------------------------------------

_OP = re.compile(r"= [^\n]*? (collective-permute-(?:start|done)|copy|fusion)\(([^\n]*)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?(%[^\s(]+) [^\n]*\{\n(.*?)^\}", re.M | re.S)


def compiled_for(topology: str, program: Callable[..., Any], *shapes: Any) -> list[list[str]]:
    """For each computation with permutes: its permutes, products and copies, in order."""
    devices = np.array(harness._topology(topology).devices)
    on, spec = Mesh(devices, ("x",)), PartitionSpec("x")

    def shard(*args: jax.Array) -> jax.Array:
        return program(*(a[0] for a in args))[None]

    mapped = jax.shard_map(shard, mesh=on, in_specs=spec, out_specs=spec, check_vma=False)
    sharding = NamedSharding(on, spec)
    xs = [jax.ShapeDtypeStruct((devices.size, *s), jnp.bfloat16, sharding=sharding) for s in shapes]
    computations = dict(_COMPUTATION.findall(jax.jit(mapped).lower(*xs).compile().as_text()))

    def name(op: str, rest: str) -> str:
        called = re.search(r"calls=(%[^\s,]+)", rest)
        product = called and " convolution(" in computations[called[1]]
        return "product" if product else op.removeprefix("collective-permute-")

    found = ([name(*op) for op in _OP.findall(body)] for body in computations.values())
    return [[op for op in ops if op != "fusion"] for ops in found if "start" in ops]


def overlapped(ops: list[str]) -> int:
    """Products between the start of a permute and the end of one."""
    under_way, products = 0, 0
    for op in ops:
        under_way += {"start": 1, "done": -1}.get(op, 0)
        products += op == "product" and under_way > 0
    return products


PRODUCTS_ON_TPU = {
    "all_gather": (pipelined_products.pipelined_all_gather_matmul, (256, 1024), (1024, 512)),
    "reduce_scatter": (
        pipelined_products.pipelined_matmul_reduce_scatter,
        (4096, 256),
        (256, 1024),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS_ON_TPU)
def test_laxs_permutes_fly_while_a_tpu_multiplies(name: str) -> None:
    function, *shapes = PRODUCTS_ON_TPU[name]
    program = functools.partial(function, axis_name="x", **XLA)
    (written_out,) = compiled_for("v5p:2x2x1", program, *shapes)  # 4 devices
    assert written_out.count("start") == 3
    assert overlapped(written_out) >= 2
    computations = compiled_for("v5e:4x4", program, *shapes)  # 16
    outside, in_loop = sorted(computations, key=lambda ops: ops.count("start"))
    assert overlapped(in_loop) >= 2 and overlapped(outside) >= 2
    assert in_loop.count("copy") <= in_loop.count("start") / 4  # of single hops, each is copied


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_in_loops_and_conditions(name: str) -> None:
    def program(x: jax.Array) -> jax.Array:
        return by_pipeline(name, x.reshape(16, 8, 128)).astype(jnp.float32).sum(0)

    pc.reset_counts()
    harness.compile_for_tpu(program, "v6e:4x4", (16 * 8, 128))
    assert {backend for _, backend, _ in pc.counts()} == {"pallas"}
    assert not pc.fallback_counts()


# --- what is refused ----------------------------------------------------------------------------


def fails(error: type[Exception], match: str, program: Callable[[jax.Array], Any]) -> None:
    x = jax.ShapeDtypeStruct((3, 3, 6, 4), "float32")
    with pytest.raises(error, match=match):
        jax.eval_shape(harness.per_device(program, harness.mesh(3), jit=False), x)


def test_what_cannot_be_is_refused_while_tracing() -> None:
    shapes = iter(range(1, 9))

    def other_each_time(*_: Any) -> jax.Array:
        return jnp.zeros(next(shapes))

    fails(UnboundAxisError, "axis name 'q'", lambda x: gather(x, of_source, "q"))
    fails(CollectiveError, r"consume=None: it is a function", lambda x: gather(x, None, "x"))
    fails(CollectiveError, r"produce=3: it is a function", lambda x: exchange(3, "x"))
    fails(CollectiveError, r"axis=4.*\[-4, 4\)", lambda x: gather(x, lambda b, _: b, "x", axis=4))
    fails(
        CollectiveError, r"axis=0 of a scalar in leaf \[1\]",
        lambda x: gather(x, lambda b, _: (b, b.sum()), "x", tiled=True),
    )  # fmt: skip
    for function in (
        lambda x: gather(x, other_each_time, "x"),
        lambda x: add_up(other_each_time, "x"),
    ):
        fails(CollectiveError, r"results of \w+: .*, and .* before", function)
    fails(CollectiveError, "reduce='max'", lambda x: exchange(lambda d: x[d], "x", reduce="max"))
    for dtype in ("int8", "bfloat16"):  # no floats; nothing to add
        options: Any = {"wire_dtype": dtype, "reduce": "sum" if dtype == "int8" else None}
        fails(DtypeError, "wire_dtype", lambda x, o=options: exchange(lambda d: x[d], "x", **o))


def test_products_that_cannot_be_are_refused_while_tracing() -> None:
    multiply, scatter = (
        pipelined_products.pipelined_all_gather_matmul,
        pipelined_products.pipelined_matmul_reduce_scatter,
    )
    w = jnp.ones((4, 5))
    for wrong in (jnp.ones((5, 4)), jnp.ones(4), jnp.ones((2, 4, 5))):
        second = r"operands of shapes .* in leaf \['b'\]"
        fails(CollectiveError, second, lambda x, b=wrong: multiply(x, {"a": w, "b": b}, "x"))
        fails(CollectiveError, "operands of shapes", lambda x, w=wrong: scatter(x, w, "x"))
    fails(CollectiveError, "contracted", lambda x: multiply(x, w, "x", gather_axis=-1))
    fails(CollectiveError, "gather_axis=3", lambda x: multiply(x, w, "x", gather_axis=3))
    fails(
        CollectiveError,
        "of size 5: it must be a multiple of the 3",
        lambda x: scatter(x, w, "x", scatter_axis=-1),
    )
    fails(CollectiveError, "reduce='max'", lambda x: scatter(x, w, "x", reduce="max"))
    fails(
        DtypeError, "mean",
        lambda x: scatter(x.astype("int8"), w.astype("int8"), "x", reduce="mean"),
    )  # fmt: skip
