"""A sum with residual and norm: values, types, gradients, what runs apart and why."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import harness
import in_order
import nccl_host
import pallas_collectives as pc
from pallas_collectives import errors
from pallas_collectives.kernels import residual_norm
from pallas_collectives.replay import Machine, replay

N = 4
EPS = 1e-5
WAYS = ("fused", "unfused")


@pytest.fixture(autouse=True)
def counted_from_zero() -> None:
    pc.reset_counts()


def ran() -> set[str]:
    return {way for _, way, _ in pc.fusion_counts()}


def operands(rows: int, depth: int, dtype: str, wide: str = "") -> tuple[np.ndarray, ...]:
    """x of every device, then residual and weight, which all have."""
    x = in_order.numbers((N, rows, depth), dtype)
    residual = in_order.numbers((rows, depth), wide or dtype, seed=1)
    weight = in_order.numbers((depth,), dtype, seed=2)
    alike = [np.broadcast_to(a, (N, *a.shape)) for a in (residual, weight)]
    return x, *alike


def expected(x: np.ndarray, residual: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, ...]:
    """normed, in float64, and new, by the bits."""
    total = in_order.added(x).astype(np.float32)
    new = (residual[0].astype(np.float32) + total).astype(residual.dtype)
    wide = new.astype(np.float64)
    mean = (wide * wide).mean(axis=-1, keepdims=True)
    return wide / np.sqrt(mean + EPS) * weight[0].astype(np.float64), new


def run(program: Any, *arrays: np.ndarray, mode: str = "on_wait", vma: bool = False) -> Any:
    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES[mode]):
        got = harness.per_device(program, harness.mesh(N), check_vma=vma)(*arrays)
        got = jax.tree.map(np.asarray, got)
    assert not harness.race_reported()
    return got


def close(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    ulp = 2.0**-8 if dtype == "bfloat16" else 2.0**-20
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2 * ulp, atol=2 * ulp)


@pytest.mark.parametrize(
    "rows, depth, dtype, wide, mode",
    [
        (32, 256, "float32", "", "eager"),
        (32, 256, "bfloat16", "float32", "on_wait"),
        (3, 70, "bfloat16", "", "on_wait"),
        (3, 700, "bfloat16", "float32", "on_wait"),  # a row at a time
    ],
)
def test_one_kernel_and_three_passes_give_the_same(
    rows: int, depth: int, dtype: str, wide: str, mode: str
) -> None:
    arrays = operands(rows, depth, dtype, wide)
    normed, new = expected(*arrays)

    def program(*arrays: jax.Array) -> Any:
        return [
            pc.psum_residual_rmsnorm(*arrays, "x", eps=EPS, order="rank", algorithm=way)
            for way in WAYS
        ]

    for got in run(program, *arrays, mode=mode):
        np.testing.assert_array_equal(got[1], np.broadcast_to(new, got[1].shape))
        close(got[0][1], normed, dtype)
        assert got[0].dtype == arrays[0].dtype
    assert ran() == set(WAYS)


@pytest.mark.full
@pytest.mark.parametrize("vma", [False, True])
def test_gradients_are_those_apart(vma: bool) -> None:
    arrays = operands(16, 128, "float32")
    cts = [in_order.numbers((N, 16, 128), "float32", seed=s) for s in (3, 4)]
    cts = [np.broadcast_to(ct[0], ct.shape) for ct in cts]

    def program(*given: jax.Array) -> Any:
        *arrays, ct0, ct1 = given

        def loss(way: str, *arrays: jax.Array) -> jax.Array:
            normed, new = pc.psum_residual_rmsnorm(*arrays, "x", eps=EPS, algorithm=way)
            return (normed * ct0 + new * ct1).sum()

        return [jax.grad(loss, argnums=(1, 2, 3))(way, *arrays) for way in WAYS]

    fused, apart = run(program, *arrays, *cts, vma=vma)
    for got, want in zip(fused, apart, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert any(np.abs(got).max() > 1 for got in fused)


def test_results_are_typed_as_equal_where_residuals_are() -> None:
    x, residual, weight = operands(8, 128, "float32")
    each, alike = PartitionSpec("x"), PartitionSpec()

    def body(x: jax.Array, residual: jax.Array, weight: jax.Array) -> Any:
        def layer(h: jax.Array, _: None) -> Any:
            normed, h = pc.psum_residual_rmsnorm(x[0], h, weight, "x", algorithm="fused")
            return h, normed

        return jax.lax.scan(layer, residual, None, length=2)

    program = jax.shard_map(
        body, mesh=harness.mesh(N), in_specs=(each, alike, alike), out_specs=alike
    )
    h, _ = jax.jit(program)(x, residual[0], weight[0])
    total = in_order.added(x)
    np.testing.assert_array_equal(np.asarray(h), residual[0] + total + total)


def test_rows_that_vmap_maps_stay_fused_and_weights_do_not() -> None:
    x, residual, weight = operands(8, 128, "float32")
    rows, weights = np.stack([x, 2 * x], axis=1), np.stack([weight, 2 * weight], axis=1)
    residuals = np.stack([residual, residual], axis=1)

    def program(x: jax.Array, residual: jax.Array, weight: jax.Array) -> Any:
        def norm(*arrays: jax.Array) -> Any:
            return pc.psum_residual_rmsnorm(*arrays, "x", eps=EPS)[0]

        return (
            jax.vmap(norm, in_axes=(0, 0, None))(x, residual, weight[0]),
            jax.vmap(norm, in_axes=(None, None, 0))(x[0], residual[0], weight),
        )

    by_rows, by_weights = run(program, rows, residuals, weights)
    close(by_rows[0, 1], expected(2 * x, residual, weight)[0], "float32")
    close(by_weights[0, 1], 2 * expected(x, residual, weight)[0], "float32")
    assert ("psum_residual_rmsnorm", "fused", "") in pc.fusion_counts()
    assert "vmap maps over the weight" in str(pc.fusion_counts())


def test_groups_sum_by_themselves() -> None:
    x, residual, weight = operands(8, 128, "float32")
    groups = [[3, 0], [1, 2]]

    def program(*arrays: jax.Array) -> Any:
        options: Any = {"axis_index_groups": groups, "algorithm": "fused"}
        return pc.psum_residual_rmsnorm(*arrays, "x", eps=EPS, **options)[1]

    got = run(program, x, residual, weight)
    for group in groups:
        np.testing.assert_array_equal(got[group[0]], residual[0] + (x[group[0]] + x[group[1]]))


@pytest.mark.parametrize("backend", ["nccl", "xla"])
def test_other_backends_run_apart(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "nccl":
        nccl_host.serve(monkeypatch)
    arrays = operands(8, 128, "float32")

    def program(*arrays: jax.Array) -> Any:
        return pc.psum_residual_rmsnorm(*arrays, "x", eps=EPS, backend=backend, order="rank")

    got = harness.per_device(program, harness.mesh(N), check_vma=False)(*arrays)
    np.testing.assert_array_equal(np.asarray(got[1])[2], expected(*arrays)[1])
    assert f"backend '{backend}' has no kernels" in str(pc.fusion_counts())
    assert (("all_reduce" if backend == "nccl" else "psum"), backend) in {
        (op, by) for op, by, _ in pc.counts()
    }


def test_devices_of_which_each_is_a_slice_run_apart() -> None:
    arrays = operands(8, 128, "float32")
    with pc.across_slices("x"):
        got = run(lambda *arrays: pc.psum_residual_rmsnorm(*arrays, "x", eps=EPS), *arrays)
    close(got[1], np.broadcast_to(expected(*arrays)[1], got[1].shape), "float32")
    assert "no two of its devices are in the same slice" in str(pc.fusion_counts())


@pytest.mark.full
def test_large_ones_run_apart_by_themselves() -> None:
    pod = Machine.named("v5e:16")

    def kernels(rows: int) -> list[str]:
        x, weight = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((rows, 8192), (8192,)))
        everywhere = PartitionSpec()
        program = jax.shard_map(
            lambda x, r, w: pc.psum_residual_rmsnorm(x, r, w, "x"),
            mesh=pod.mesh({"x": 16}),
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
        report = replay(program, x, x, weight, machine=pod, races=True)
        assert not report.findings
        return [kernel.name for kernel in report.kernels]

    assert kernels(1) == ["psum_residual_rmsnorm"]
    assert kernels(256) == ["all_reduce_ring"]


@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_compiles_to_the_kernel_alone(generation: str) -> None:
    dtype = "bfloat16" if generation in ("v5e", "7x") else "float32"

    def program(x: jax.Array, residual: jax.Array, weight: jax.Array) -> Any:
        return pc.psum_residual_rmsnorm(x, residual, weight[0], "x", algorithm="fused")

    shapes = ((64, 1024), (64, 1024), (8, 1024))
    found = harness.compile_for_tpu(
        program, harness.GENERATIONS[generation], *shapes, dtype=jnp.dtype(dtype)
    )
    assert found.ops.count("custom-call") == 1
    assert not {"transpose", "pad", "all-reduce", "reduce"} & set(found.ops)


def test_rows_that_are_left_out_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_but_the_last(*refs: Any, **options: Any) -> None:
        stack, residual, weight, normed, new = refs
        honest(stack, residual.at[: -options["high"]], weight, normed, new, **options)

    honest = residual_norm.for_each_step
    monkeypatch.setattr(residual_norm, "for_each_step", all_but_the_last)
    arrays = operands(32, 128, "float32")
    want = np.broadcast_to(expected(*arrays)[1], arrays[1].shape)

    def program(*arrays: jax.Array) -> Any:
        return pc.psum_residual_rmsnorm(*arrays, "x", eps=EPS, algorithm="fused")[1]

    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES["on_wait"]):
        broken = harness.per_device(program, harness.mesh(N), check_vma=False)
        assert harness.caught(lambda: broken(*arrays), want)


@pytest.mark.parametrize(
    "error, match, call",
    [
        (errors.CollectiveError, "weight", lambda x: pc.psum_residual_rmsnorm(x, x, x, "x")),
        (
            errors.CollectiveError,
            "eps=-1",
            lambda x: pc.psum_residual_rmsnorm(x, x, x[0, 0], "x", eps=-1),
        ),
        (
            errors.DtypeError,
            "residual of int32",
            lambda x: pc.psum_residual_rmsnorm(x, x.astype("int32"), x[0, 0], "x"),
        ),
        (
            errors.AlgorithmError,
            "algorithm='ring'",
            lambda x: pc.psum_residual_rmsnorm(x, x, x[0, 0], "x", algorithm="ring"),
        ),
        (
            errors.AlgorithmError,
            "an operand is of float16",
            lambda x: pc.psum_residual_rmsnorm(
                *2 * [x.astype("float16")], x[0, 0], "x", algorithm="fused"
            ),
        ),
        (
            errors.CollectiveError,
            "order='wire'",
            lambda x: pc.psum_residual_rmsnorm(x, x, x[0, 0], "x", order="wire"),
        ),
    ],
)
def test_what_cannot_be_is_refused(error: Any, match: str, call: Any) -> None:
    harness.fails(error, match, call)
