"""Products beside copies between GPUs, and on a wire of the host: as lax's, derivatives too."""

import functools
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import nccl_host
import pallas_collectives as pc
from pallas_collectives import nccl
from pallas_collectives.errors import AlgorithmError
from pallas_collectives.nccl import ffi, mailboxes

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
LAX: dict[str, Any] = {"backend": "xla", "algorithm": "unfused"}
OURS: dict[str, Any] = {"backend": "nccl", "algorithm": "fused"}


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most devices; those of the host wait for each other in threads, of which it has few."""
    if request.param == "host":
        nccl_host.serve(monkeypatch)
        return 4
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    return jax.device_count()


def needs(n: int, most: int) -> None:
    """Skips a test of n devices where there are fewer, or where processes have others."""
    if n > most or (jax.process_count() > 1 and n != jax.device_count()):
        pytest.skip(f"needs {n} devices")


def operand(*shape: int, dtype: str = "bfloat16") -> np.ndarray:
    return harness.random(shape, "float32").astype(jnp.dtype(dtype))


def compare(program: Any, n: int, *operands: np.ndarray, tolerance: float = 2e-2) -> Any:
    """Runs a program of one device's operands by both; what ours gave."""
    pc.reset_counts()
    ours, lax = (
        harness.per_device(functools.partial(program, **how), harness.mesh(n))(*operands)
        for how in (OURS, LAX)
    )
    ways = {way for (_, way, _), count in pc.fusion_counts().items() if count}
    assert "fused" in ways
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(lax), strict=True):
        assert got.dtype == want.dtype
        want = np.asarray(want).astype(np.float64)
        limit = tolerance * np.abs(want).max()
        np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, atol=limit, rtol=0)
    return ours


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("dtype", "to"), [("bfloat16", None), ("float16", "float32")])
def test_gathers(axis: int, dtype: str, to: str | None, n: int, most: int) -> None:
    needs(n, most)
    x, up, down = (operand(n, *s, dtype=dtype) for s in ((2, 3, 16), (16, 8), (16, 24)))

    def program(x: Any, up: Any, down: Any, **how: Any) -> Any:
        return pc.all_gather_matmul(
            x, [up, down], "x", gather_axis=axis, return_gathered=True,
            preferred_element_type=to, **how,
        )  # fmt: skip

    _, gathered = compare(program, n, x, up, down)
    np.testing.assert_array_equal(gathered, [np.concatenate(list(x), axis)] * n)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("options", [{}, {"precise": True, "reduce": "mean"}])
def test_scatters(axis: int, rows: int, options: dict[str, Any], n: int, most: int) -> None:
    needs(n, most)
    shape = (n * rows, 2, 16) if axis == 0 else (2, n * rows, 16)
    x, w = operand(n, *shape), operand(n, 16, 8)

    def program(x: Any, w: Any, **how: Any) -> Any:
        more = options | ({"precise": False} if how == LAX else {})  # lax has no such sums
        return pc.matmul_reduce_scatter(x, w, "x", scatter_axis=axis, **more, **how)

    compare(program, n, x, w)


@pytest.mark.parametrize("name", [GATHER, SCATTER])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
def test_derivatives(name: str, wrap: Any, most: int) -> None:
    """Derivatives of operand and weights, twice; the transpose of each product is the other."""
    needs(2, most)
    x, w, dx, dw = (operand(2, *s) for s in ((4, 16), (16, 8), (4, 16), (16, 8)))

    def program(x: Any, w: Any, dx: Any, dw: Any, **how: Any) -> Any:
        @wrap
        def loss(x: Any, w: Any) -> Any:
            y = getattr(pc, name)(x, w, "x", **how)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        def slope(x: Any, w: Any) -> Any:
            return jax.grad(loss, argnums=(0, 1))(x, w)

        return slope(x, w), jax.jvp(slope, (x, w), (dx, dw))[1]

    compare(program, 2, x, w, dx, dw, tolerance=4e-2)


@pytest.mark.parametrize("axis", [0, 1])
def test_derivatives_of_products_with_weights_of_several_widths(axis: int, most: int) -> None:
    """Queries and keys, say: backwards each pair of operands has a depth of its own."""
    needs(2, most)
    x, wide, narrow = operand(2, 4, 6, 16), operand(2, 16, 24), operand(2, 16, 8)

    def program(x: Any, *ws: Any, **how: Any) -> Any:
        def loss(x: Any, *ws: Any) -> Any:
            ys = pc.all_gather_matmul(x, ws, "x", gather_axis=axis, **how)
            return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in ys)

        return jax.grad(loss, argnums=(0, 1, 2))(x, *ws)

    compare(program, 2, x, wide, narrow)


def test_in_a_scan_of_many_turns(most: int) -> None:
    """Calls use the same mailboxes one after the other: none is written before it has been read."""
    needs(2, most)
    x, w = operand(2, 8, 16), operand(2, 16, 16) / np.asarray(4, "bfloat16")

    def program(x: Any, w: Any, **how: Any) -> Any:
        def turn(x: Any, _: Any) -> Any:
            y = jnp.tanh(pc.all_gather_matmul(x, w, "x", **how))
            x = pc.matmul_reduce_scatter(y, w.T, "x", **how)
            return x, x.sum()

        return jax.lax.scan(turn, x, None, length=25)

    compare(program, 2, x, w, tolerance=8e-2)


def test_mapped_operands_and_two_calls_of_a_program(most: int) -> None:
    needs(2, most)
    x, w = operand(2, 3, 4, 16), operand(2, 16, 8)

    def program(x: Any, w: Any, **how: Any) -> Any:
        call = functools.partial(pc.all_gather_matmul, axis_name="x", **how)
        return jax.vmap(call, in_axes=(0, None))(x, w), call(x[0] * 2, w)

    compare(program, 2, x, w)


# What it does not do; these need no device.


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_host.serve(monkeypatch)


@pytest.mark.parametrize(
    ("dtype", "shape", "why"),
    [
        ("float32", (16, 8), "operands are of float32, not all of bfloat16 or float16"),
        ("bfloat16", (12, 8), "K and N must be multiples of 8, and one is 12"),
        ("bfloat16", (16, 0), "an operand is empty"),
    ],
)
def test_others_run_apart_and_say_why(
    dtype: str, shape: tuple[int, int], why: str, on_host: None
) -> None:
    x, w = operand(2, 4, shape[0], dtype=dtype), operand(2, *shape, dtype=dtype)

    def program(x: Any, w: Any) -> Any:
        return pc.all_gather_matmul(x, w, "x", backend="nccl")

    pc.reset_counts()
    harness.per_device(program, harness.mesh(2))(x, w)
    assert pc.fusion_counts() == {(GATHER, "unfused", why): 1}


def test_where_gpus_do_not_reach_each_other(on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is an error, and without one both run apart."""

    def refused(*args: Any) -> Any:
        raise mailboxes.MailboxError("GPU 1 cannot reach its peers' memory")

    monkeypatch.setattr(mailboxes, "get", refused)
    x, w = operand(2, 4096, 1024), operand(2, 1024, 4096)
    program = functools.partial(pc.all_gather_matmul, axis_name="x", backend="nccl")
    pc.reset_counts()
    run = harness.per_device(program, harness.mesh(2))
    run.lower(x, w)
    assert pc.fusion_counts() == {(GATHER, "unfused", "GPU 1 cannot reach its peers' memory"): 1}
    named = functools.partial(program, algorithm="fused")
    with pytest.raises(AlgorithmError, match="cannot reach its peers' memory"):
        harness.per_device(named, harness.mesh(2)).lower(x, w)


@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_where_gpus_have_no_library_or_no_room(
    op: str, on_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise: a call that names nothing needs no more than both apart do."""

    def refused(*args: Any) -> Any:
        raise nccl.LibraryError("no libcublasLt found")

    monkeypatch.setattr(nccl_host.HostProducts, "prepare", refused)
    x, w = operand(2, 4096, 4096), operand(2, 4096, 4096)
    program = functools.partial(getattr(pc, op), axis_name="x", backend="nccl")
    pc.reset_counts()
    harness.per_device(program, harness.mesh(2)).lower(x, w)
    whys = "; ".join(f"GPU {i} cannot multiply: no libcublasLt found" for i in range(2))
    assert pc.fusion_counts() == {(op, "unfused", whys): 1}
    named = functools.partial(program, algorithm="fused")
    with pytest.raises(AlgorithmError, match="cannot multiply: no libcublasLt found"):
        harness.per_device(named, harness.mesh(2)).lower(x, w)


@pytest.mark.parametrize(("rows", "way"), [(2048, "fused"), (16, "unfused")])
def test_the_model_decides(rows: int, way: str, on_host: None) -> None:
    """Large products are worth it; a few tokens' are not."""
    x, w = operand(2, rows, 4096), operand(2, 4096, 4096)
    program = functools.partial(pc.all_gather_matmul, axis_name="x", backend="nccl")
    pc.reset_counts()
    harness.per_device(program, harness.mesh(2)).lower(x, w)
    ((_, got, _),) = pc.fusion_counts()
    assert got == way


@pytest.mark.gpu
def test_xla_captures_a_chain_of_products() -> None:
    """And replays them without a call out of the program."""
    n = jax.device_count()
    if jax.default_backend() != "gpu" or n < 2:
        pytest.skip("needs two GPUs")

    def program(x: Any, w: Any) -> Any:
        for _ in range(4):
            y = jnp.tanh(pc.all_gather_matmul(x, w, "x", **OURS))
            x = pc.matmul_reduce_scatter(y, w, "x", **OURS)
        return x

    P = jax.sharding.PartitionSpec
    spec = P("x")
    mapped = jax.shard_map(program, mesh=harness.mesh(n), in_specs=(spec, P()), out_specs=spec)
    run = jax.jit(mapped, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    x, w = operand(n * 16, 64), operand(64, 64) / np.asarray(8 * n, "bfloat16")
    on = functools.partial(jax.NamedSharding, harness.mesh(n))
    sharded = jax.device_put((x, w), (on(spec), on(P())))
    calls = []
    for _ in range(8):  # results lie where the last one's did
        result = np.asarray(run(*sharded))
        calls.append(ffi.counters.calls)
    assert calls[-1] == calls[-2] == calls[-3], calls
    want, w = x.astype(np.float32), w.astype(np.float32)
    for _ in range(4):
        want = n * (np.tanh(want @ w) @ w)
    limit = 2e-2 * np.abs(want).max()  # of bfloat16, after eight roundings
    np.testing.assert_allclose(result.astype(np.float32), want, atol=limit, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [1, 2])
def test_a_fresh_process_whose_first_call_is_captured(processes: int) -> None:
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    fresh = Path(harness.__file__).parent / "products_fresh.py"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, str(fresh), str(p), str(processes), port],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for p in range(processes)
    ]  # fmt: skip
    for process in started:
        told, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and "as lax\n" in told, told
