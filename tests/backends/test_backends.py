"""Who serves a call, and how that is counted."""

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import harness
import pallas_collectives
from pallas_collectives.backends import serving
from pallas_collectives.backends.choice import ENVIRONMENT_VARIABLE
from pallas_collectives.errors import AlgorithmError, BackendError, DtypeError, UnservedError
from pallas_collectives.topology import placement
from pallas_collectives.topology.ring_orders import Torus

pytestmark = pytest.mark.usefixtures("fresh_counts")


def served_by(**how: str) -> set[str]:
    x = np.zeros((2, 8, 128), np.float32)
    gather = harness.per_device(
        lambda a: pallas_collectives.all_gather(a, "x", **how), harness.mesh(2)
    )
    jax.block_until_ready(gather(x))
    served = {backend for _, backend, _ in pallas_collectives.counts()}
    pallas_collectives.reset_counts()
    return served


def test_the_mesh_decides_then_environment_then_context_then_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert served_by() == {"pallas"}
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "xla")
    assert served_by() == {"xla"}
    with pallas_collectives.use_backend("pallas"):
        assert served_by() == {"pallas"}
        assert served_by(backend="xla") == {"xla"}
    assert pallas_collectives.fallback_counts() == {}
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "mpi")
    with pytest.raises(BackendError, match=f"^{ENVIRONMENT_VARIABLE}='mpi': it must be 'pallas' "):
        served_by()


def test_a_jitted_function_is_retraced_under_another_backend() -> None:
    x = np.zeros((2, 8, 128), np.float32)
    run = harness.per_device(lambda a: pallas_collectives.all_gather(a, "x"), harness.mesh(2))
    run(x)
    with pallas_collectives.use_backend("xla"):
        run(x)
    run(x)
    assert pallas_collectives.counts() == {
        ("all_gather", "pallas", "direct"): 1,
        ("all_gather", "xla", None): 1,
    }


@pytest.mark.parametrize(
    "how, error, message",
    [
        ({"backend": "mpi"}, BackendError, "backend='mpi': it must be 'pallas' "),
        ({"backend": "nccl"}, BackendError, "NCCL needs NVIDIA GPUs.*cpu devices; leave backend="),
        ({"algorithm": "tree"}, AlgorithmError, "'tree' for all_gather.*bidirectional.*name one"),
        ({"algorithm": "ring:smem"}, AlgorithmError, "':hbm' or ':sc'"),
    ],
)
def test_a_name_that_cannot_serve_is_refused_while_tracing(
    how: dict[str, str], error: type[Exception], message: str
) -> None:
    run = harness.per_device(
        lambda a: pallas_collectives.all_gather(a, "x", **how), harness.mesh(2), jit=False
    )
    with pytest.raises(error, match=message):
        jax.eval_shape(run, np.zeros((2, 8, 128), np.float32))


@pytest.mark.parametrize("others", [1, 2])
def test_partly_automatic_mesh_goes_to_lax_by_name_and_count(others: int) -> None:
    """An axis of one device, too, where kernels are simulated: XLA refuses to partition those."""
    on = harness.mesh(2, others)
    x = np.arange(2 * 8 * 128, dtype=np.float32).reshape(2, 8, 128)
    gather = jax.shard_map(
        lambda a: pallas_collectives.all_gather(a, "x", tiled=True, to="invarying"),
        mesh=on,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec(),
        axis_names={"x"},
    )
    np.testing.assert_array_equal(np.asarray(jax.jit(gather)(x)), x)
    (reason,) = pallas_collectives.fallback_counts()
    assert "mesh axis 'y' is not manual" in reason
    with pallas_collectives.use_backend("pallas"), pytest.raises(BackendError, match="not manual"):
        jax.jit(gather)(x)


def test_a_dtype_no_kernel_takes_goes_to_lax_unless_the_backend_is_named() -> None:
    def reduce(**how: str) -> np.ndarray:
        run = harness.per_device(lambda a: pallas_collectives.psum(a, "x", **how), harness.mesh(2))
        return np.asarray(run(np.full((2, 8, 128), 1 / 3)))

    with jax.enable_x64(True):
        np.testing.assert_array_equal(reduce(), np.full((2, 8, 128), 2 / 3))
        (reason,) = pallas_collectives.fallback_counts()
        assert reason.startswith("sum of float64")
        with pytest.raises(DtypeError, match=r"sum of float64: .* at most 32 bits"):
            reduce(backend="pallas")


@pytest.mark.full
def test_kernels_count_in_32_bits_inside_a_64_bit_program() -> None:
    x = harness.random((3, 6, 128), "float32")

    def program(a: jax.Array) -> jax.Array:
        scattered = pallas_collectives.psum_scatter(a, "x", tiled=True)
        gathered = pallas_collectives.all_gather(scattered, "x", tiled=True)
        return gathered + pallas_collectives.psum(a.sum(), "x", algorithm="ring")

    with jax.enable_x64(True):
        got = np.asarray(harness.per_device(program, harness.mesh(3), check_vma=False)(x))
    np.testing.assert_array_equal(got[0], x.sum(axis=0) + x.sum())
    assert pallas_collectives.fallback_counts() == {}


def test_the_callers_interpret_params_are_honoured() -> None:
    seen = []
    params = pltpu.InterpretParams(
        grid_point_recorder=lambda token, *_: seen.append(1) or token  # type: ignore[func-returns-value]
    )
    with pltpu.force_tpu_interpret_mode(params):
        assert served_by() == {"pallas"}
    assert seen


def test_simulating_too_late_or_too_little_is_refused() -> None:
    with pytest.raises(BackendError, match="64 simulated devices: JAX has started with 8"):
        pallas_collectives.simulate(64)


def test_effects_are_traced_once_for_each_placement() -> None:
    traced = []

    def run(x: jax.Array) -> jax.Array:
        traced.append(placement.in_scope())
        return x

    x = jax.ShapeDtypeStruct((8, 128), np.float32)
    line, back = (
        placement.Places(Torus((2,), (False,)), tuple((k, 0) for k in order))
        for order in ((0, 1), (1, 0))
    )
    for places in (None, line, None, back, line):
        with placement.scope(places):
            assert serving.effects(run, [x]) == frozenset()
    assert traced == [None, line, back]


def test_what_no_kernel_serves_has_the_effects_of_what_does() -> None:
    def run(x: jax.Array) -> jax.Array:
        raise UnservedError("a kernel", "it cannot", "leave it")

    x = jax.ShapeDtypeStruct((8, 128), np.float32)
    assert serving.effects(run, [x], otherwise=lambda _: ()) == frozenset()
    with pytest.raises(UnservedError):
        serving.effects(run, [x])


@pytest.mark.parametrize("rows", [8, 16, 256])
@pytest.mark.parametrize("op", ["psum", "all_gather", "psum_scatter"])
def test_what_is_said_of_bytes_alone_serves_their_array(op: str, rows: int) -> None:
    """What is asked of bytes alone, for an array that is yet to be, is what will serve it."""
    mesh, spec = harness.tpu_mesh("v6e:4x4", {"x": 4, "y": 4}), PartitionSpec(("x", "y"))
    tiled = {} if op == "psum" else {"tiled": True}
    call = jax.shard_map(
        lambda x: getattr(pallas_collectives, op)(x, ("x", "y"), **tiled)[:1],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    whole = 16 * rows * (16 if op == "psum_scatter" else 1)
    where = jax.sharding.NamedSharding(mesh, spec)
    pallas_collectives.reset_counts()
    jax.jit(call).lower(jax.ShapeDtypeStruct((whole, 128), "float32", sharding=where))
    said = pallas_collectives.explain(op, whole // 16 * 512, mesh=mesh, axis_name=("x", "y"))
    ((_, _, served),) = pallas_collectives.counts()
    assert served == said.algorithm
