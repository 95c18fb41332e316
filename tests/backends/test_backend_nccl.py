"""The NCCL backend against jax.lax: on GPUs (-m gpu), and its plumbing on a wire of host memory."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conformance
import harness
import pallas_collectives as pc
import recording
from pallas_collectives import nccl
from pallas_collectives.backends import choice
from pallas_collectives.errors import AlgorithmError, DtypeError
from pallas_collectives.nccl import ffi, group

P = jax.sharding.PartitionSpec
NCCL = {"backend": "nccl"}
N = min(4, jax.device_count())  # a host may have two GPUs
OWN = min(N, jax.local_device_count())  # those of this process
MOVED = [
    "float32",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int16",
    "bool",
    "complex64",
]
SUMMED = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int16",
          "uint16", "uint32", "complex64"]  # fmt: skip


pytestmark = pytest.mark.usefixtures("by_nccl")


def both(fn, x, on=None):
    """fn(module, x, **how) on every device, by NCCL and by lax."""
    on = on or harness.mesh(N)
    ours = harness.per_device(lambda a: fn(pc, a, **NCCL), on)(x)
    return np.asarray(ours), np.asarray(harness.per_device(lambda a: fn(jax.lax, a), on)(x))


def check(fn, shape, dtype="float32", on=None, exact=True):
    on = on or harness.mesh(N)
    x = harness.random((on.size, *shape), dtype)
    if "float8" in dtype:
        x = (x.astype(np.float32) % 2).astype(x.dtype)  # sums that fp8 can hold
    got, want = both(fn, x, on)
    assert got.dtype == want.dtype
    if exact:
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", MOVED)
@pytest.mark.parametrize("axis, tiled", [(0, True), (1, True), (-1, False)])
def test_all_gather(axis, tiled, dtype):
    check(lambda m, x, **how: m.all_gather(x, "x", axis=axis, tiled=tiled, **how), (3, 5), dtype)


@pytest.mark.parametrize("dtype", SUMMED)
def test_psum(dtype):
    check(lambda m, x, **how: m.psum(x, "x", **how), (3, 5), dtype)


def test_small_sums_are_one_call():
    def fn(m, x, **how):
        leaves = m.psum([row * i for i, row in enumerate([*x, x[0, 1]])], "x", **how)
        return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])

    pc.reset_counts()
    check(fn, (6, 5))
    assert pc.counts() == {("all_reduce", "nccl", None): 1}


@pytest.mark.parametrize("dtype", SUMMED)
@pytest.mark.parametrize("axis", [0, 1])
def test_psum_scatter(axis, dtype):
    check(
        lambda m, x, **how: m.psum_scatter(x, "x", scatter_dimension=axis, tiled=True, **how),
        (N * 2, N * 3), dtype,
    )  # fmt: skip


@pytest.mark.parametrize("op", ["pmax", "pmin", "pmean"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_reductions(op, dtype):
    check(lambda m, x, **how: getattr(m, op)(x, "x", **how), (7,), dtype)


@pytest.mark.parametrize("dtype", MOVED)
@pytest.mark.parametrize("split, concat, tiled", [(0, 1, True), (1, 0, True), (0, 1, False)])
def test_all_to_all(split, concat, tiled, dtype):
    check(
        lambda m, x, **how: m.all_to_all(x, "x", split, concat, tiled=tiled, **how),
        (N, 2 * N), dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", MOVED)
@pytest.mark.parametrize(
    "perm", [[(i, (i + 1) % N) for i in range(N)], [(0, N - 2), (N - 1, 1)], [(1, 1)]], ids=str
)
def test_ppermute_and_zeros_where_nothing_comes(perm, dtype):
    check(lambda m, x, **how: m.ppermute(x, "x", perm, **how), (3, 5), dtype)


@pytest.mark.parametrize("dtype", MOVED)
def test_pbroadcast(dtype):
    x = harness.random((N, 3, 5), dtype)
    f = harness.per_device(lambda a: pc.pbroadcast(a, "x", N - 1, **NCCL), harness.mesh(N))
    assert np.asarray(f(x)).tobytes() == np.stack([x[-1]] * N).tobytes()  # lax: not on a CPU


@pytest.mark.parametrize("call", ["pshuffle", "pswapaxes"])
def test_derived(call):
    argument = {"pshuffle": [*range(1, N), 0], "pswapaxes": 0}[call]
    check(lambda m, x, **how: getattr(m, call)(x, "x", argument, **how), (N, 3))


RECORDED = json.loads(recording.FILE.read_text())


@pytest.mark.parametrize("key", recording.KEYS)
def test_conformance_rows_give_what_lax_and_the_tpu_kernels_give(key):
    """The kernels' results were recorded in interpret mode, from the same inputs."""
    row, n, dtype = recording.KEYS[key]
    if n > N:
        pytest.skip(f"needs {n} devices")
    digest = recording.digest(row, n, dtype, "nccl")
    assert digest == RECORDED.get(key, digest)
    if recording.sums_float8(row, dtype):
        row = dataclasses.replace(row, in_lax=False)  # lax on GPUs rounds at every hop
    if digest != recording.REFUSED:
        conformance.check(row, n, dtype, recording.how(row, dtype, "nccl"))


def test_every_conformance_row_is_recorded():
    assert set(recording.KEYS) == set(RECORDED), "run python tests/helpers/recording.py"


GROUPS = [[0, 3], [2, 1]] if N == 4 else [[1, 0]]


@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x, **how: m.all_gather(x, "x", axis_index_groups=GROUPS, **how),
        lambda m, x, **how: m.psum_scatter(x, "x", tiled=True, axis_index_groups=GROUPS, **how),
        lambda m, x, **how: m.all_to_all(x, "x", 0, 1, tiled=True, axis_index_groups=GROUPS, **how),
    ],
    ids=["all_gather", "psum_scatter", "all_to_all"],
)
def test_index_groups(fn):
    check(fn, (4, 3))


@pytest.mark.parametrize("axes", ["x", "y", ("x", "y"), ("y", "x")], ids=str)
def test_axes_of_a_two_dimensional_mesh(axes):
    check(lambda m, x, **how: m.all_gather(x, axes, **how), (3,), on=harness.mesh(2, N // 2))
    check(lambda m, x, **how: m.psum(x, axes, **how), (3,), on=harness.mesh(2, N // 2))


def ragged_case():
    """Rows of every device; how many go from device i to j; where they begin and land."""
    sizes = np.array([[1, 2, 0, 3], [0, 1, 4, 0], [2, 2, 2, 2], [0, 0, 0, 5]])[:N, :N]
    starts = np.cumsum(sizes, 1) - sizes
    lands = np.cumsum(sizes, 0) - sizes
    operand = np.arange(N * 9 * 2, dtype=np.float32).reshape(N, 9, 2)
    output = np.full((N, 12, 2), -1, np.float32)
    want = output.copy()
    for i in range(N):
        for j in range(N):
            rows = operand[i, starts[i, j] :][: sizes[i, j]]
            want[j, lands[i, j] :][: sizes[i, j]] = rows
    return (operand, output, starts, sizes, lands, sizes.T), want


def test_ragged_all_to_all():
    arguments, want = ragged_case()
    on = harness.mesh(N)
    f = harness.per_device(lambda *a: pc.ragged_all_to_all(*a, axis_name="x", **NCCL), on)
    np.testing.assert_array_equal(f(*(jnp.asarray(a) for a in arguments)), want)


def test_ragged_sizes_that_leave_the_arrays_fail_the_program(by_nccl):
    if by_nccl == "gpu":
        pytest.skip("the peers would wait: see the watchdog's tests")
    arguments, _ = ragged_case()
    arguments[3][:] += 7
    f = harness.per_device(
        lambda *a: pc.ragged_all_to_all(*a, axis_name="x", **NCCL), harness.mesh(N)
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="would send rows outside"):
        jax.block_until_ready(f(*(jnp.asarray(a) for a in arguments)))


def test_gradients_and_vmap():
    def loss(m, x, **how):
        y = m.all_gather(x, "x", tiled=True, **how)
        z = m.psum_scatter(y * y, "x", tiled=True, **how)
        return m.psum((z * jnp.sin(x)).sum(), "x", **how)

    check(lambda m, x, **how: jax.grad(lambda a: loss(m, a, **how))(x), (3,), exact=False)
    check(lambda m, x, **how: jax.vmap(lambda a: loss(m, a, **how))(x), (2, 3), exact=False)
    check(
        lambda m, x, **how: jax.vmap(jax.grad(lambda a: loss(m, a, **how)))(x), (2, 3), exact=False
    )
    check(
        lambda m, x, **how: jax.jvp(lambda a: loss(m, a, **how), (x,), (x,))[1], (3,), exact=False
    )


def test_inside_scan_and_checkpoint():
    def fn(m, x, **how):
        @jax.checkpoint
        def step(carry, _):
            return m.ppermute(
                jnp.cos(carry), "x", [(i, (i + 1) % N) for i in range(N)], **how
            ), None

        return jax.grad(lambda a: jax.lax.scan(step, a, None, length=5)[0].sum())(x)

    check(fn, (3,), exact=False)


def test_precise_sums_of_bf16_are_float32_sums_rounded_once():
    x = np.random.default_rng(0).normal(size=(N, 64)).astype(jnp.bfloat16)
    f = harness.per_device(lambda a: pc.psum(a, "x", precise=True, **NCCL), harness.mesh(N))
    want = x.astype(np.float32).sum(0).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(f(x))[0], want)


def test_calls_are_counted_by_backend():
    pc.reset_counts()
    both(lambda m, x, **how: m.all_gather(x, "x", **how), np.ones((N, 2), np.float32))
    assert pc.counts() == {("all_gather", "nccl", None): 1}
    assert not pc.fallback_counts()


def test_what_nccl_cannot_do_is_refused():
    on = harness.mesh(N)
    x = np.ones((N, 4), np.float32)
    with pytest.raises(AlgorithmError, match=r"NCCL chooses its algorithms itself.*NCCL_ALGO"):
        harness.per_device(lambda a: pc.psum(a, "x", algorithm="ring", **NCCL), on)(x)
    with pytest.raises(DtypeError, match="not whole bytes"):
        harness.per_device(lambda a: pc.all_gather(a.astype("int4"), "x", **NCCL), on)(x)


def test_a_failed_group_fails_the_program_and_lowering_anew_mends_it(monkeypatch):
    monkeypatch.setattr(group, "_groups", {})
    on = harness.mesh(N)
    x = np.ones((N, 2), np.float32)

    def program():
        return harness.per_device(lambda a: pc.all_gather(a, "x", **NCCL), on)

    first = program()
    first(x)
    (g,) = group._groups.values()
    g.abort(nccl.PeerError("rank 3 is lost", group=str(g), call="", sequence=0, missing=(3,)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="PeerError: rank 3 is lost"):
        jax.block_until_ready(first(x))
    with pytest.raises(nccl.PeerError, match="rank 3 is lost"):
        nccl.check()
    nccl.check()
    np.testing.assert_array_equal(program()(x), np.ones((N, N, 2)))
    np.testing.assert_array_equal(first(x), np.ones((N, N, 2)))


def calls_out(by_nccl, f, x, runs=10):
    """How often each of `runs` runs called out of the program."""
    if by_nccl != "gpu":
        pytest.skip("graphs are a matter of GPUs")
    counts = []
    for _ in range(runs):
        before = ffi.counters.calls
        jax.block_until_ready(f(x))
        counts.append(ffi.counters.calls - before)
    return counts


@pytest.mark.parametrize("by", ["override_lax", "overridden"])
def test_lax_keeps_of_a_step_what_xla_runs_beside_compute(by, monkeypatch):
    """Large gathers of weights with their gradients' sums, psums and permutes, of 4 MiB or more."""
    monkeypatch.setattr(choice, "_usual", lambda platform: "nccl")

    def loss(w, x):
        x = jnp.tanh(x @ jax.lax.all_gather(w, "x", tiled=True))
        x = jax.lax.ppermute(x, "x", [(i, (i + 1) % N) for i in range(N)])
        awaited = jax.lax.all_gather(x, "x", tiled=True)
        return jnp.sum(awaited**2) + jnp.sum(jax.lax.psum(x, "x"))

    step = jax.grad(loss)
    on, specs = harness.mesh(N), (P("x"), P("x"))
    w, x = harness.random((1024, 1024), "float32"), harness.random((1024 * N, 1024), "float32", 1)
    how = {"mesh": on, "in_specs": specs, "out_specs": P("x"), "check_vma": False}
    want = jax.jit(jax.shard_map(lambda *args: step(*args), **how))(w, x)
    if by == "overridden":
        pc.reset_counts()
        got = jax.jit(pc.overridden(jax.shard_map(step, **how)))(w, x)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)
        assert {op: n for (op, by, _), n in pc.counts().items() if by == "nccl"} == {
            "all_gather": 1, "reduce_scatter": 1,
        }  # fmt: skip
        return
    with pc.override_lax():
        got = jax.jit(jax.shard_map(step, **how))(w, x)
    report = pc.override_report()
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)
    assert {line.op for line in report.left} == {"all_gather", "psum_scatter", "psum", "ppermute"}
    assert all("beside compute on GPUs" in line.why for line in report.left)
    assert {line.op: line.times for line in report.replaced} == {"all_gather": 1, "psum_scatter": 1}
    with pc.override_lax(everything=True):
        jax.jit(jax.shard_map(lambda *args: step(*args), **how)).lower(w, x)
    assert not pc.override_report().left


@pytest.mark.parametrize("by", ["override_lax", "overridden"])
def test_lax_keeps_large_sums_that_check_vma_adds(by, monkeypatch):
    monkeypatch.setattr(choice, "_usual", lambda platform: "nccl")

    def loss(weights, x):
        return sum(jnp.sum(x[0, 0] * w) for w in weights)

    specs = {"in_specs": (P(), P("x")), "out_specs": P(), "check_vma": True}
    step = jax.shard_map(lambda *args: jax.grad(loss)(*args), mesh=harness.mesh(N), **specs)
    weights = [jax.ShapeDtypeStruct((n, 1024), jnp.float32) for n in (8, 1024)]
    pc.reset_counts()
    with pc.override_lax() if by == "override_lax" else contextlib.nullcontext():
        fn = pc.overridden(step) if by == "overridden" else step
        jax.jit(fn).lower(weights, jax.ShapeDtypeStruct((N, 1024), jnp.float32))
    assert sorted((by, n) for (_, by, _), n in pc.counts().items()) == [("nccl", 1), ("xla", 1)]


def test_a_step_keeps_the_order_of_sums(monkeypatch):
    monkeypatch.setattr(choice, "_usual", lambda platform: "nccl")
    x = harness.random((N * 1024, 1024), "float32")
    total = lambda x: pc.psum(x, "x", order="rank")  # noqa: E731
    with pc.override_lax():
        jax.jit(jax.shard_map(total, mesh=harness.mesh(N), in_specs=P("x"), out_specs=P()))(x)
    report = pc.override_report()
    assert report.replaced and not report.left


@pytest.mark.gpu
def test_a_chain_in_one_process_is_captured_too(by_nccl):
    """Calls are made at capture only, in a single process with all GPUs as well."""

    def chain(x):
        for i in range(20):
            x = x + pc.all_gather(x, "x", **NCCL)[i % N] * 0.5
        return x

    f = harness.per_device(chain, harness.mesh(N))
    counts = calls_out(by_nccl, f, np.ones((N, 1024), np.float32))
    assert counts[-5:] == [0] * 5 and sum(counts) <= 4 * 20 * N, counts


@pytest.mark.gpu
def test_one_collective_alone_is_captured_where_graphs_may_be_that_small(by_nccl):
    """XLA makes no graph of fewer than five operations unless told to."""
    on = harness.mesh(N)
    gather = jax.shard_map(
        lambda x: pc.all_gather(x, "x", tiled=True, **NCCL),
        mesh=on, in_specs=P("x"), out_specs=P(), check_vma=False,
    )  # fmt: skip
    x = jax.device_put(np.ones((N, 1024), np.float32), jax.NamedSharding(on, P("x")))
    assert calls_out(by_nccl, jax.jit(gather), x)[-1] == OWN
    small = jax.jit(gather, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    assert calls_out(by_nccl, small, x)[-5:] == [0] * 5


@pytest.mark.gpu
def test_graphs_can_be_turned_off(by_nccl):
    """Programs that XLA must not capture call out every time, and are right."""
    options = {"xla_gpu_enable_command_buffer": ""}
    f = jax.jit(jax.shard_map(
        lambda x: pc.psum(pc.psum(x, "x", **NCCL), "x", **NCCL),
        mesh=harness.mesh(N), in_specs=P("x"), out_specs=P("x"), check_vma=False,
    ), compiler_options=options)  # fmt: skip
    x = np.ones((N, 8), np.float32)
    python = ffi.counters.python
    assert calls_out(by_nccl, f, x) == [2 * OWN] * 10
    assert ffi.counters.python == python, "calls are made from tapes, not by Python"
    np.testing.assert_array_equal(f(x), np.full((N, 8), N * N))


@pytest.mark.parametrize("rows, by", [(512, "lax"), (8192, "nccl")])
def test_lax_keeps_ragged_exchanges_of_few_bytes(rows: int, by: str, monkeypatch) -> None:
    """NCCL waits for the host to read the counts."""
    monkeypatch.setattr(choice, "_usual", lambda platform: "nccl")

    def exchange(x: jax.Array) -> jax.Array:
        ones, me = jnp.ones(N, jnp.int32), jax.lax.axis_index("x")
        tables = jnp.arange(N, dtype=jnp.int32), ones, jnp.full(N, me, jnp.int32), ones
        return jax.lax.ragged_all_to_all(x, 0 * x, *tables, axis_name="x")

    specs = {"mesh": harness.mesh(N), "in_specs": P("x"), "out_specs": P("x")}
    program = jax.jit(jax.shard_map(exchange, **specs))
    with pc.override_lax():
        traced = program.trace(jnp.zeros((N * rows, 256)))
        traced.lower(lowering_platforms=("cuda",))  # XLA has none on CPUs
    report = pc.override_report()
    (line,) = report.left if by == "lax" else report.replaced
    assert line.op == "ragged_all_to_all" and ("read the counts" in line.why) == (by == "lax")
