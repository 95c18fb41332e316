"""order="rank": bits that depend neither on size nor on place nor on who serves."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import harness
import in_order
import nccl_host
import pallas_collectives as pc
from pallas_collectives.backends import ordered
from pallas_collectives.errors import AlgorithmError, CollectiveError

N = 4
RANKED: dict[str, Any] = {"order": "rank"}
BY_XLA = {**RANKED, "backend": "xla"}
DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e5m2", "complex64")


def run(program: Callable[..., Any], *operands: np.ndarray, on: Any = None) -> Any:
    """What each device of N has of a program of its operands; no kernel of it races."""
    on = on or harness.mesh(N)
    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES["on_wait"]):
        got = harness.per_device(program, on, check_vma=False)(*operands)
        got = jax.tree.map(np.asarray, got)
    assert not harness.race_reported()
    return got


@pytest.mark.parametrize("algorithm", ["gather", "one_shot:vmem", "exchange", None])
def test_sums_have_the_documented_bits_in_every_dtype(algorithm: str | None) -> None:
    xs = [in_order.numbers((N, 33, 7), dtype, seed=i) for i, dtype in enumerate(DTYPES)]
    sums = run(lambda *xs: [pc.psum(x, "x", algorithm=algorithm, **RANKED) for x in xs], *xs)
    for x, got in zip(xs, sums, strict=True):
        np.testing.assert_array_equal(got, in_order.everywhere(x))


def test_other_orders_have_other_bits() -> None:
    """So that the tests here can fail."""
    x = in_order.numbers((N, 64, 128), "float32")
    assert not np.array_equal(in_order.added(x), in_order.added(x[::-1]))
    ring = run(lambda x: pc.psum(x, "x", algorithm="ring"), x)
    assert not np.array_equal(ring, in_order.everywhere(x))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_batch(dtype: str) -> None:
    """By kernels that are chosen for the size, by lax, in one array or in parts."""
    x = in_order.numbers((N, 1000, 128), dtype)
    want = in_order.added(x)

    def program(x: jax.Array) -> Any:
        batches = [x, x[:1], x[7:400], x[:, 3]]
        return [
            *(pc.psum(batch, "x", **RANKED) for batch in batches),
            *(pc.psum(batch, "x", **BY_XLA) for batch in batches),
            *pc.psum([x[7:8], x[8:400]], "x", **RANKED),
        ]

    several = run(program, x)
    parts = [want, want[:1], want[7:400], want[:, 3]] * 2 + [want[7:8], want[8:400]]
    for got, part in zip(several, parts, strict=True):
        np.testing.assert_array_equal(got, np.broadcast_to(part, got.shape))


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["direct", "exchange", None])
def test_scattered_sums_and_means(algorithm: str | None) -> None:
    x = in_order.numbers((N, 16 * N, 128), "bfloat16")
    want = in_order.added(x)

    def program(x: jax.Array) -> Any:
        how = {**RANKED, "algorithm": algorithm}
        rows = pc.psum_scatter(x, "x", tiled=True, **how)
        odd = pc.psum_scatter(x[:, : 3 * N], "x", scatter_dimension=1, tiled=True, **how)
        return rows, odd, pc.psum_scatter(x, "x", tiled=True, **BY_XLA), pc.pmean(x, "x", **RANKED)

    rows, odd, by_xla, mean = run(program, x)
    for got in (rows, by_xla):
        np.testing.assert_array_equal(got.reshape(want.shape), want)
    np.testing.assert_array_equal(odd, np.stack(np.split(want[:, : 3 * N], N, axis=1)))
    np.testing.assert_array_equal(mean[0], np.asarray(jnp.asarray(want) / N))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["pallas", "xla"])
def test_groups_add_in_the_order_that_they_are_given_in(backend: str) -> None:
    groups = [[2, 0, 5], [4, 3, 1]]
    x = in_order.numbers((6, 8, 128), "float32")

    def program(x: jax.Array) -> Any:
        options: Any = {"axis_index_groups": groups, "backend": backend, **RANKED}
        scattered = pc.psum_scatter(x[:6], "x", tiled=True, **options)
        return pc.psum(x, "x", **options), scattered

    sums, blocks = run(program, x, on=harness.mesh(6))
    for group in groups:
        want = in_order.added(x[group])
        for place, device in enumerate(group):
            np.testing.assert_array_equal(sums[device], want)
            np.testing.assert_array_equal(blocks[device], want[2 * place : 2 * place + 2])


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")])
def test_ranks_are_numbered_over_several_axes_as_they_are_named(axes: tuple[str, str]) -> None:
    x = in_order.numbers((N, 32, 128), "float32")

    def program(x: jax.Array) -> Any:
        names = ("gather", "one_shot", "exchange", None)
        return [
            pc.psum(x, axes, **BY_XLA),
            *(pc.psum(x, axes, algorithm=name, **RANKED) for name in names),
        ]

    ranks = [0, 1, 2, 3] if axes == ("x", "y") else [0, 2, 1, 3]
    for got in run(program, x, on=harness.mesh(2, 2)):
        np.testing.assert_array_equal(got, in_order.everywhere(x[ranks]))


def test_nccl_adds_so_by_a_gather_or_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_host.serve(monkeypatch)
    monkeypatch.setattr(ordered, "CALL_BYTES", 4096)
    how = {**RANKED, "backend": "nccl"}
    small, large = (in_order.numbers((N, rows, 12), "bfloat16") for rows in (3, 301))
    pc.reset_counts()
    sums = harness.per_device(
        lambda *xs: [pc.psum(x, "x", **how) for x in xs], harness.mesh(N), check_vma=False
    )(small, large)
    moved = {op for op, _, _ in pc.counts()}
    assert moved == {"all_reduce", "all_gather", "all_to_all"}
    for x, got in zip((small, large), sums, strict=True):
        np.testing.assert_array_equal(np.asarray(got), in_order.everywhere(x))
    with pytest.raises(AlgorithmError, match="NCCL chooses"):
        harness.per_device(lambda x: pc.psum(x, "x", algorithm="gather", **how), harness.mesh(N))(
            small
        )


def test_many_terms_are_added_in_several_passes() -> None:
    blocks = in_order.numbers((67, 2, 9), "bfloat16")
    got = jax.jit(functools.partial(ordered.added, n=67, axis=0))(blocks.reshape(134, 9))
    np.testing.assert_array_equal(np.asarray(got), in_order.added(blocks))


def test_gradients_keep_the_order() -> None:
    """A sum under check_vma=False, whose transpose is a sum, and a gather's transpose."""
    x = in_order.numbers((N, 16, 128), "float32")
    ct = in_order.numbers((N, 16, 128), "float32", seed=1)

    def program(x: jax.Array, ct: jax.Array) -> Any:
        _, back = jax.vjp(lambda x: pc.psum(x, "x", **RANKED), x)
        _, forth = jax.jvp(lambda x: pc.psum(x, "x", **RANKED), (x,), (ct,))
        many = jax.vmap(lambda x: pc.psum(x, "x", **RANKED))(jnp.stack([x, ct]))
        return back(ct)[0], forth, many

    back, forth, many = run(program, x, ct)
    np.testing.assert_array_equal(back, in_order.everywhere(ct))
    np.testing.assert_array_equal(forth, in_order.everywhere(ct))
    np.testing.assert_array_equal(many[0], np.stack([in_order.added(x), in_order.added(ct)]))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gather", "exchange"])
def test_64_mib(algorithm: str) -> None:
    x = in_order.numbers((2, 1 << 17, 128), "float32")
    program = functools.partial(pc.psum, axis_name="x", algorithm=algorithm, **RANKED)
    got = harness.per_device(program, harness.mesh(2))(x)
    np.testing.assert_array_equal(np.asarray(got), in_order.everywhere(x))


@pytest.mark.parametrize(
    "error, match, call",
    [
        (CollectiveError, r"order='ring': .*'rank'", lambda x: pc.psum(x, "x", order="ring")),
        (CollectiveError, r"order=True", lambda x: pc.psum_scatter(x, "x", order=True)),
        (
            AlgorithmError,
            r"algorithm='ring' for psum in order='rank': it must be one of gather, one_shot, exch",
            lambda x: pc.psum(x, "x", algorithm="ring", **RANKED),
        ),
        (
            AlgorithmError,
            r"algorithm='exchange:vmem' for psum",
            lambda x: pc.psum(x, "x", algorithm="exchange:vmem", **RANKED),
        ),
        (
            AlgorithmError,
            r"algorithm='exchange' for psum: it must be one of ring",
            lambda x: pc.psum(x, "x", algorithm="exchange"),
        ),
        (
            CollectiveError,
            r"'b' is an axis of vmap",
            lambda x: jax.vmap(lambda x: pc.psum(x, ("b", "x"), **RANKED), axis_name="b")(x),
        ),
    ],
)
def test_what_cannot_be_is_refused(error: Any, match: str, call: Callable[..., Any]) -> None:
    harness.fails(error, match, call)


def test_explain_says_what_the_order_costs() -> None:
    free = pc.explain("psum", 64 << 20, devices=16, chip="v5p")
    small, large = (
        pc.explain("psum", nbytes, devices=16, chip="v5p", order="rank")
        for nbytes in (8 << 10, 64 << 20)
    )
    assert small.algorithm.partition(":")[0] in ("gather", "one_shot")
    assert large.algorithm == "exchange"
    assert [step.op for step in large.inside] == ["all_to_all", "all_gather"]
    assert free.candidates[0].us is not None and large.candidates[0].us is not None
    assert 1 < large.candidates[0].us / free.candidates[0].us < 4
    assert "exchange" in str(large) and "all_to_all of" in str(large)
    steps = sum(step.candidates[0].us or 0.0 for step in large.inside)
    assert large.candidates[0].us == pytest.approx(steps, rel=0.05)  # and the additions
    on_v5e = pc.explain("psum_scatter", 16 << 20, devices=16, chip="v5e", order="rank")
    assert on_v5e.algorithm == "exchange"


def test_across_slices_lax_adds_so() -> None:
    x = in_order.numbers((N, 8, 128), "float32")
    pc.reset_counts()

    def program(x: jax.Array) -> Any:
        with pc.across_slices("x"):
            scattered = pc.psum_scatter(x, ("x", "y"), tiled=True, **RANKED)
            return pc.psum(x, ("x", "y"), **RANKED), scattered

    sums, blocks = run(program, x, on=harness.mesh(2, 2))
    np.testing.assert_array_equal(sums, in_order.everywhere(x))
    np.testing.assert_array_equal(blocks.reshape(8, 128), in_order.added(x))
    assert {backend for _, backend, _ in pc.counts()} == {"xla"}
    assert "order='rank'" in str(pc.fallback_counts())


def test_on_a_mesh_that_is_only_partly_manual_lax_adds_so() -> None:
    x = in_order.numbers((2, 8, 128), "float32")
    spec = jax.sharding.PartitionSpec("x")
    program = jax.shard_map(
        lambda x: pc.psum(x[0], "x", **RANKED),
        mesh=harness.mesh(2, 2),
        in_specs=spec,
        out_specs=jax.sharding.PartitionSpec(),
        axis_names={"x"},
    )
    np.testing.assert_array_equal(np.asarray(jax.jit(program)(x)), in_order.added(x))


def test_subnormal_sums_are_kept() -> None:
    x = np.array([[0.00269, 6.294e-05, -3e-5], [-0.00268, -1.717e-05, 3e-5]], "float16")
    want = (x[0].astype("float32") + x[1].astype("float32")).astype("float16")
    assert 0 < abs(want[0]) < np.finfo("float16").tiny
    call = lambda a: pc.psum(a, "x", order="rank", backend="xla")  # noqa: E731
    got = np.asarray(harness.per_device(call, harness.mesh(2))(x))
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape), strict=True)
