"""The fused products as users call them: values, layouts, gradients, fallbacks, errors."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import in_order
import pallas_collectives as pc
from benchmarks.settings import FlagError
from pallas_collectives import errors
from pallas_collectives.backends import slices
from pallas_collectives.backends.pallas.products import GATHER, SCATTER
from pallas_collectives.overlap import fusion
from products import N, gathered, multiplied, per_device, ran, reasons, scattered


@pytest.fixture(autouse=True)
def counted_from_zero() -> None:
    pc.reset_counts()


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, axis, widths",
    [
        ((16, 128), 0, (128, 256)),  # in place; two weights in one gather
        ((2, 8, 128), 1, (128,)),  # in place, behind a batch
        ((3, 2, 5, 70), 1, (33,)),  # nothing whole: padded and cut
        ((4, 3, 20), -3, (7,)),  # a negative axis
    ],
)
def test_all_gather_matmul_of_any_layout(
    shape: tuple[int, ...], axis: int, widths: tuple[int, ...]
) -> None:
    x = harness.random((N, *shape), "float32")
    ws = [harness.random((N, shape[-1], size), "float32", i) for i, size in enumerate(widths)]

    def run(x: jax.Array, *ws: jax.Array) -> Any:
        options: dict[str, Any] = {"gather_axis": axis, "return_gathered": True}
        return pc.all_gather_matmul(x, ws, "x", algorithm="fused", **options)

    *got, whole = per_device(run, x, *ws)
    want = gathered(x, axis % len(shape))
    np.testing.assert_array_equal(whole, want)
    for y, w in zip(got, ws, strict=True):
        np.testing.assert_array_equal(y, multiplied(want, w))
    assert ran(GATHER) == {"fused"}


@pytest.mark.parametrize(
    "shape, axis, reduce",
    [
        ((N * 16, 128), 0, "sum"),
        ((2, N * 8, 128), 1, "mean"),
        ((3, N * 2, 5, 70), 1, "sum"),
        ((N * 4, 3, 20), -3, "mean"),
    ],
)
def test_matmul_reduce_scatter_of_any_layout(
    shape: tuple[int, ...], axis: int, reduce: str
) -> None:
    x = harness.random((N, *shape), "float32")
    w = harness.random((N, shape[-1], 33), "float32", 1)

    def run(x: jax.Array, w: jax.Array) -> Any:
        options: dict[str, Any] = {"scatter_axis": axis, "reduce": reduce}
        return pc.matmul_reduce_scatter(x, w, "x", algorithm="fused", **options)

    (got,) = per_device(run, x, w)
    want = scattered(x, w, axis % len(shape)) / (N if reduce == "mean" else 1)
    np.testing.assert_array_equal(got, want)
    assert ran(SCATTER) == {"fused"}


@pytest.mark.parametrize(
    "op, dtype, preferred, result",
    [
        (GATHER, "bfloat16", None, "bfloat16"),
        (SCATTER, "bfloat16", "float32", "float32"),
        (SCATTER, "int8", "int32", "int32"),
        (GATHER, "int8", None, "int8"),
        (GATHER, "float8_e4m3fn", "float32", "float32"),
    ],
)
def test_dtypes_are_those_of_matmul(
    op: str, dtype: str, preferred: str | None, result: str
) -> None:
    x, w = harness.random((N, 64, 128), dtype), harness.random((N, 128, 128), dtype, 1)

    def run(x: jax.Array, w: jax.Array) -> Any:
        options: dict[str, Any] = {"preferred_element_type": preferred, "algorithm": "fused"}
        return getattr(pc, op)(x, w, "x", **options)

    (got,) = per_device(run, x, w)
    want = multiplied(gathered(x, 0), w) if op == GATHER else scattered(x, w, 0)
    assert got.dtype == jnp.dtype(result)
    exact = want.astype(np.int64) if result.startswith("int") else want
    np.testing.assert_array_equal(got, exact.astype(jnp.dtype(result)))


@pytest.mark.parametrize("precise, hops", [(True, 0), (False, 2)])
def test_bfloat16_sums_round_once_per_hop_and_precise_ones_once(precise: bool, hops: int) -> None:
    n = 4
    rng = np.random.default_rng(1)
    x = rng.standard_normal((n, n * 16, 128)).astype(jnp.bfloat16)
    w = rng.standard_normal((n, 128, 128)).astype(jnp.bfloat16)
    run = functools.partial(
        pc.matmul_reduce_scatter, axis_name="x", precise=precise, algorithm="fused"
    )
    (got,) = per_device(run, x, w, n=n)
    exact = scattered(x, w, 0)
    error = np.abs(got.astype(np.float64) - exact)
    assert (error <= 2.0**-8 * np.abs(exact).max() * (hops + 1)).all()
    assert (error <= 2.0**-8 * np.abs(exact) + 1e-3).all() == precise


# Derivatives --------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("result", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_gradients_of_8_bit_floats_that_are_added_up_wide(op: str, result: str) -> None:
    """JAX multiplies such a cotangent with 8-bit floats by itself, and promotes none for a call."""
    x, w = (
        harness.random((N, 8, 8), "int8", i).clip(-1, 1).astype("float8_e4m3fn") for i in (0, 1)
    )

    def gradients(how: str) -> Any:
        call = functools.partial(getattr(pc, op), axis_name="x", preferred_element_type=result)
        loss = jax.grad(lambda x, w: call(x, w, algorithm=how).astype("float32").sum(), (0, 1))
        return per_device(loss, x, w)

    for got, want in zip(gradients("fused"), gradients("unfused"), strict=True):
        assert got.dtype == want.dtype == x.dtype
        np.testing.assert_array_equal(got.astype("float32"), want.astype("float32"))


def layer(x: jax.Array, up: jax.Array, gate: jax.Array, down: jax.Array, how: str) -> jax.Array:
    """A transformer's feed-forward layer, sequence and weights sharded."""
    (a, b), whole = pc.all_gather_matmul(
        x, (up, gate), "x", gather_axis=1, return_gathered=True, algorithm=how
    )
    y = pc.matmul_reduce_scatter(jnp.sin(a) * b, down, "x", scatter_axis=1, algorithm=how)
    return (y * y).sum() + jnp.cos(whole).sum()


def weights_and_rows() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(N, 1, 16, 128), (N, 128, 128), (N, 128, 128), (N, 128, 128)]
    return [0.1 * rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_training_is_fused_in_both_directions(check_vma: bool) -> None:
    """Gradients are the unfused pair's, through one of each kernel forward and backward."""

    def grads(how: str) -> list[np.ndarray]:
        run = jax.grad(functools.partial(layer, how=how), argnums=(0, 1, 2, 3))
        return per_device(run, *weights_and_rows(), check_vma=check_vma)

    for a, b in zip(grads("fused"), grads("unfused"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    counts = pc.fusion_counts()
    assert counts[GATHER, "fused", ""] == counts[SCATTER, "fused", ""] == 2


def test_gradients_of_replicated_weights_are_summed() -> None:
    """Under check_vma a weight that is equal everywhere has everyone's cotangent."""
    x, _, _, w = weights_and_rows()

    def run(x: jax.Array, how: str) -> Any:
        w_everywhere = jnp.asarray(w[0])
        loss = lambda w: pc.all_gather_matmul(x[0], w, "x", algorithm=how).sum()  # noqa: E731
        return jax.grad(loss)(w_everywhere)

    fused, unfused = (per_device(functools.partial(run, how=h), x)[0] for h in ("fused", "unfused"))
    np.testing.assert_allclose(fused, unfused, rtol=1e-5)


@pytest.mark.full
def test_forward_mode_and_vmap_over_rows() -> None:
    x, w, _, dw = weights_and_rows()

    def run(how: str, x: jax.Array, w: jax.Array, dw: jax.Array) -> Any:
        gather = functools.partial(pc.all_gather_matmul, axis_name="x", algorithm=how)
        tangent = jax.jvp(lambda x, w: gather(x[0], w), (x, w), (x, dw))[1]
        return tangent, jax.vmap(lambda x: gather(x, w))(jnp.concatenate([x, 2 * x]))

    fused, apart = (
        per_device(functools.partial(run, how), x, w, dw) for how in ("fused", "unfused")
    )
    for a, b in zip(fused, apart, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert pc.fusion_counts()[GATHER, "fused", ""] >= 2


def test_vmap_over_weights_runs_apart_and_says_so() -> None:
    x, w = harness.random((N, 16, 128), "float32"), harness.random((N, 2, 128, 128), "float32", 1)

    def run(x: jax.Array, ws: jax.Array, algorithm: str | None) -> Any:
        gather = functools.partial(pc.all_gather_matmul, axis_name="x", algorithm=algorithm)
        return jax.vmap(lambda w: gather(x, w))(ws)

    with pytest.raises(errors.AlgorithmError, match="vmap maps over the weights"):
        per_device(functools.partial(run, algorithm="fused"), x, w)
    (got,) = per_device(functools.partial(run, algorithm=None), x, w)
    want = np.stack([multiplied(gathered(x, 0), w[:, i]) for i in range(2)], axis=1)
    np.testing.assert_array_equal(got, want)
    assert ran(GATHER) == {"unfused"}


# Who serves ---------------------------------------------------------------------------------------


def call(op: str, x: Any, w: Any, **options: Any) -> Any:
    run = functools.partial(getattr(pc, op), axis_name="x", **options)
    return per_device(run, x, w)[0]


@pytest.mark.parametrize(
    "op, shape, dtype, options, reason",
    [
        (GATHER, (16, 64), "float32", {"gather_axis": 1}, "contracted"),
        (SCATTER, (16, 64), "float32", {"scatter_axis": 1}, "weights' own"),
        (GATHER, (16, 64), "float16", {}, "float16"),
        (SCATTER, (16, 64), "int8", {"preferred_element_type": "float32"}, "added up in float32"),
        (GATHER, (16, 64), "float32", {"precision": "high"}, "precision='high'"),
        (SCATTER, (16, 64), "float32", {"backend": "xla"}, "xla"),
        (GATHER, (16, 64), "float32", {}, "by the model"),
        (SCATTER, (16, 64), "float32", {"algorithm": "unfused"}, "asked for"),
    ],
)
def test_what_is_not_fused_runs_apart_and_says_why(
    op: str, shape: tuple[int, ...], dtype: str, options: dict[str, Any], reason: str
) -> None:
    x = harness.random((N, *shape), dtype)
    contracted = options.get("gather_axis") == 1
    w = harness.random((N, N * shape[1] if contracted else shape[1], 32), dtype, 1)
    got = call(op, x, w, **options)
    axis = options.get("gather_axis", options.get("scatter_axis", 0))
    want = multiplied(gathered(x, axis), w) if op == GATHER else scattered(x, w, axis)
    np.testing.assert_array_equal(got, want)
    assert ran(op) == {"unfused"}
    assert reason in reasons()
    if "by the model" not in reason and "algorithm" not in options and "backend" not in options:
        with pytest.raises(errors.AlgorithmError, match="algorithm='fused'"):
            call(op, x, w, **options, algorithm="fused")


@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_elsewhere_the_same_function_is_a_pipeline(op: str) -> None:
    """What GPUs run: permutes and products of XLA's."""
    x, w = harness.random((N, 16, 64), "float32"), harness.random((N, 64, 32), "float32", 1)
    got = call(op, x, w, backend="xla", algorithm="fused")
    want = multiplied(gathered(x, 0), w) if op == GATHER else scattered(x, w, 0)
    np.testing.assert_array_equal(got, want)
    assert ran(op) == {"pipelined"}


@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.parametrize(
    "places, said", [([0, 0, 1, 1], "in several slices"), ([0, 1, 2, 3], "no two of its devices")]
)
def test_devices_that_lie_in_slices_run_apart_as_if_it_was_asked_for(
    op: str, places: list[int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is known while lowering. A precise sum of bfloat16 is rounded once then, too."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 64, 128)).astype(jnp.bfloat16)
    w = rng.standard_normal((4, 128, 128)).astype(jnp.bfloat16)
    options: Any = {"reduce": "mean", "precise": True} if op == SCATTER else {}

    def run(algorithm: str | None) -> np.ndarray:
        return per_device(
            lambda x, w: getattr(pc, op)(x, w, "x", algorithm=algorithm, **options), x, w, n=4
        )[0]

    monkeypatch.setattr(fusion, "cost", lambda *_: fusion.Cost(fused=0.0, unfused=1.0))
    monkeypatch.setattr(slices, "_of_devices", lambda group, mesh: np.array(places))
    jax.clear_caches()
    got = run(None)
    assert ran(op) == {"unfused"} and said in reasons()
    np.testing.assert_array_equal(got, run("unfused"))


def test_large_products_are_fused_where_it_pays() -> None:
    """By the model of the chip, on both cores where a device has two; small ones stay apart."""
    from jax.sharding import PartitionSpec

    from pallas_collectives.replay import Machine

    def way(machine: str, width: int, rows: int = 4096) -> set[str]:
        pc.reset_counts()
        pod = Machine.named(machine)
        mesh = pod.mesh({"x": 4})
        function = jax.shard_map(
            lambda x, w: pc.all_gather_matmul(x, w, "x"),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, 8192), (8192, width))]
        jaxpr = str(jax.make_jaxpr(function)(*shapes))
        return {"fused" if "pallas_all_gather_matmul" in jaxpr else "unfused"}

    assert way("v5e:4x4", 2048) == way("v6e:4x4", 8192) == way("v5p:4x4x4", 512) == {"fused"}
    assert way("v5p:4x4x4", 16384) == {"fused"}
    assert way("v5p:4x4x4", 16384, rows=256) == {"unfused"}


@pytest.mark.parametrize(
    "op, shapes, options, error",
    [
        (GATHER, ((16,), (16, 8)), {}, errors.CollectiveError),
        (GATHER, ((16, 8), (16, 8)), {}, errors.CollectiveError),
        (GATHER, ((16, 8), (8, 8)), {"gather_axis": 2}, errors.CollectiveError),
        (GATHER, ((16, 8), (8, 8)), {"algorithm": "ring"}, errors.AlgorithmError),
        (GATHER, ((16, 8), (8, 8)), {"preferred_element_type": "float33"}, errors.DtypeError),
        (GATHER, ((16, 8), (8, 8)), {"precision": "bogus"}, errors.CollectiveError),
        (SCATTER, ((16, 8), (8, 8)), {"precision": ("high", 3)}, errors.CollectiveError),
        (GATHER, ((16, 8), (8, 8)), {"return_gathered": "no"}, errors.CollectiveError),
        (SCATTER, ((16, 8), (8, 8)), {"precise": "bogus"}, errors.CollectiveError),
        (SCATTER, ((15, 8), (8, 8)), {}, errors.CollectiveError),
        (SCATTER, ((16, 8), (8, 8)), {"reduce": "max"}, errors.CollectiveError),
        (SCATTER, ((16, 8), (8, 8)), {"reduce": "mean", "dtype": "int8"}, errors.DtypeError),
        (SCATTER, ((16, 8), (8, 8)), {"axis_name": "y"}, errors.UnboundAxisError),
    ],
)
def test_errors_name_value_rule_and_remedy(
    op: str, shapes: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    dtype = options.pop("dtype", "float32") if "dtype" in options else "float32"
    operands = [harness.random((N, *shape), dtype) for shape in shapes]
    if op == GATHER and shapes[0] == (16, 8) and shapes[1] == (16, 8):
        operands[1] = harness.random((N, 16, 8), dtype)
    run = functools.partial(getattr(pc, op), **{"axis_name": "x", **options})
    with pytest.raises(error):
        per_device(run, *operands)


@pytest.mark.parametrize(
    "op, operands, name",
    [
        (GATHER, (None, jnp.ones((8, 8))), "x_shard=None"),
        (GATHER, (jnp.ones((16, 8)), None), "ws=None"),
        (GATHER, (jnp.ones((16, 8)), [jnp.ones((8, 8)), "w"]), "ws='w'"),
        (SCATTER, (None, jnp.ones((8, 8))), "x=None"),
        (SCATTER, (jnp.ones((16, 8)), {}), "w={}"),
    ],
)
def test_errors_name_the_operand_that_is_no_array(op: str, operands: Any, name: str) -> None:
    with pytest.raises(errors.CollectiveError, match=f"^{name}: it must be an array; "):
        getattr(pc, op)(*operands, "x")


def test_the_benchmark_says_what_is_hidden() -> None:
    """On v5e nearly all of the shorter of product and collective; a row says if a bound forbids."""
    from benchmarks import fused

    (row,) = fused.modelled(["v5e:16x1"], ["all_gather_matmul"], [(1024, 4096, 4096)])
    assert row.least < row.fused <= fused.LONGER * row.longer
    assert fused.HIDDEN <= row.overlap <= 1.1 and not row.verdict
    assert len(row.line()) == len(fused.header("least us"))
    late = dataclasses.replace(row, fused=row.product + row.collective)
    assert late.overlap == 0 and late.line().endswith("below what is wanted")
    bound = dataclasses.replace(late, least=late.fused)
    assert bound.line().endswith("forbidden by the least")
    with pytest.raises(FlagError, match="has not been asked"):
        next(fused.modelled(["v5e:16x1"], ["all_gather_matmul"], [(1024, 128, 128)]))


@pytest.mark.full
def test_products_in_the_order_of_the_ranks_run_apart_forward_and_backward() -> None:
    n = 4
    x = in_order.numbers((n, 16 * n, 128), "float32")
    w = np.stack([2 * np.eye(128, dtype="float32")] * n)  # products are exact
    ct = in_order.numbers((n, 16, 128), "float32", seed=1)
    rank: Any = {"order": "rank"}

    def program(x: jax.Array, w: jax.Array, ct: jax.Array) -> Any:
        scattered = pc.matmul_reduce_scatter(x, w, "x", **rank)
        _, back = jax.vjp(lambda y: pc.all_gather_matmul(y, w, "x", **rank), ct)
        (d_ct,) = back(x)
        return scattered, d_ct

    want = np.stack(np.split(in_order.added(2 * x), n))
    for got in per_device(program, x, w, ct, n=n, check_vma=False):
        np.testing.assert_array_equal(got, want)
    assert "adds in no order='rank'" in reasons()
    with pytest.raises(errors.AlgorithmError, match="order='rank'"):
        per_device(
            lambda x, w: pc.matmul_reduce_scatter(x, w, "x", algorithm="fused", **rank), x, w, n=n
        )


@pytest.mark.parametrize("name", ["product", "norm"])
def test_simulated_kernels_are_left_out_of_what_is_lowered_for_tpus(name: str) -> None:
    calls = {
        "product": lambda x, w: pc.all_gather_matmul(x, w, "x")[: len(x)],
        "norm": lambda x, w: pc.psum_residual_rmsnorm(x[:64], x[:64], w[0], "x")[0],
    }
    auto = (jax.sharding.AxisType.Auto,)
    run = jax.shard_map(
        calls[name],
        mesh=jax.sharding.AbstractMesh((4,), ("x",), axis_types=auto),
        in_specs=(jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()),
        out_specs=jax.sharding.PartitionSpec("x"),
        check_vma=False,
    )
    x, w = (jax.ShapeDtypeStruct((rows, 1024), jnp.float32) for rows in (8192, 1024))
    traced = jax.jit(run).trace(x, w)
    for platform, way in (("cpu", "fused"), ("tpu", "unfused")):
        pc.reset_counts()
        traced.lower(lowering_platforms=(platform,))
        assert [ran for _, ran, _ in pc.fusion_counts()] == [way]
