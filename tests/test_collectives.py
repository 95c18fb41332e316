"""Signatures as lax has them, whole arrays, and refusals that take more than tracing."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives import collectives
from pallas_collectives.errors import CollectiveError, UnboundAxisError, UnservedError

OURS_ALONE = (
    *("backend", "algorithm", "precise", "order"),
    *("wire", "wire_backward", "dequantize", "return_residue"),
)


@pytest.mark.parametrize("name", vars(collectives.LAX))
def test_signature_is_laxs(name: str) -> None:
    ours = inspect.signature(getattr(pc, name)).parameters
    of_lax = inspect.signature(getattr(lax, name)).parameters
    shared = {name: p for name, p in ours.items() if name not in OURS_ALONE}
    assert list(shared) == list(of_lax)
    for parameter, want in of_lax.items():
        assert (shared[parameter].kind, shared[parameter].default) == (want.kind, want.default)
    for parameter in set(ours) - set(of_lax):
        assert ours[parameter].kind is inspect.Parameter.KEYWORD_ONLY
        plain = (True,) if parameter == "dequantize" else (None, False, "auto")
        assert ours[parameter].default in plain
    assert {"backend", "algorithm"} <= set(ours)


def test_no_collective_of_laxs_is_missing() -> None:
    """Whatever lax has in its module of collectives is ours, moves nothing, or is out of reach."""
    in_lax = {
        name
        for name in dir(lax)
        if inspect.isfunction(function := getattr(lax, name))
        and function.__module__ == lax.psum.__module__
    }
    moves_nothing = {"axis_index", "axis_size", "pcast", "pvary"}
    out_of_reach = {"psend", "precv", "psum_scatter_start"}
    assert in_lax - moves_nothing - out_of_reach == set(vars(collectives.LAX))
    assert all(f"`{name}`" in pc.override_lax.__doc__ for name in out_of_reach)


def test_each_is_there_for_whole_arrays_too() -> None:
    assert set(vars(collectives.LAX)) <= set(vars(pc.sharded))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_whole_arrays_are_summed_as_they_lie(kind: AxisType) -> None:
    """Rows that are laid over the axis, as `jax.device_put` leaves them, whatever its type."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    x = harness.random((4, 16, 128), "float32")
    laid = jax.device_put(x, NamedSharding(mesh, P("x")))
    for run in (pc.sharded.psum_scatter, pc.sharded.psum):
        total = functools.partial(run, mesh=mesh, axis_name="x")
        for got in (total(laid), jax.jit(total)(laid)):
            np.testing.assert_allclose(got, x.sum(0), rtol=1e-6, atol=1e-6)


def test_equal_calls_on_whole_arrays_are_compiled_once() -> None:
    """What a call asks for is in the program's key: also as a list, which has no hash."""
    mesh, x = harness.mesh(2), harness.random((4, 8), "float32")
    shifts = [[(0, 1), (1, 0)], [(0, 0), (1, 1)]]
    pc.reset_counts()
    for _ in range(2):
        for perm in shifts:
            got = pc.sharded.ppermute(x, mesh=mesh, axis_name="x", perm=perm)
            np.testing.assert_array_equal(got, x if perm == shifts[1] else np.roll(x, 2, axis=0))
    assert sum(pc.counts().values()) == 2


def test_whole_arrays_that_do_not_fit_the_mesh() -> None:
    on: dict[str, Any] = {"mesh": harness.mesh(2), "axis_name": "x"}
    with pytest.raises(CollectiveError, match=r"array of shape \(\): .*no more dimensions"):
        pc.sharded.psum(np.float32(1), **on)
    with pytest.raises(CollectiveError, match=r"array of shape \(2,\): .*no more dimensions"):
        pc.sharded.all_gather(np.zeros(2), spec=P("x", None), **on)
    with pytest.raises(UnboundAxisError, match="axis_name='y': the mesh has the axes x"):
        pc.sharded.pswapaxes(np.zeros((2, 2)), axis=1, **on | {"axis_name": "y"})
    with pytest.raises(CollectiveError, match=r"mesh=None: it must be a jax\.sharding\.Mesh"):
        pc.sharded.pswapaxes(np.zeros((2, 2)), axis=1, **on | {"mesh": None})


def test_names_of_their_own() -> None:
    assert pc.reduce_scatter is pc.psum_scatter
    assert pc.all_reduce is pc.psum


def test_groups_of_different_sizes_are_refused_by_lax_on_a_tpu_too() -> None:
    """On a CPU, lax sums within them."""
    groups = [[0, 1, 2], [3]]
    pytest.importorskip("libtpu")
    for module in (lax, pc):
        with pytest.raises(ValueError, match=r"same size|equal size"):
            harness.compile_for_tpu(
                lambda x, m=module: m.psum(x, "x", axis_index_groups=groups), "v5e:2x2", (8, 128)
            )


@pytest.mark.parametrize("call", [pc.ppermute, pc.pshuffle])
def test_permutations_take_axes_in_the_meshs_order(call: Callable[..., Any]) -> None:
    """lax numbers by the mesh's order whatever the tuple's, up to JAX 0.10, and refuses later."""
    perm = [1, 2, 3, 0] if call is pc.pshuffle else [(0, 1)]
    x = jax.ShapeDtypeStruct((4, 8, 128), jnp.float32)
    with pytest.raises(CollectiveError, match=r"axis_name=\('y', 'x'\).*\('x', 'y'\).*number"):
        jax.eval_shape(
            harness.per_device(lambda x: call(x, ("y", "x"), perm), harness.mesh(2, 2)), x
        )


def test_an_unbound_axis_is_a_name_error_as_lax_has_it() -> None:
    for module in (lax, pc):
        with pytest.raises(NameError):
            module.psum(jnp.ones(3), "x")


@pytest.mark.parametrize("how", [{}, {"wire": {"all_gather": "int8", "ppermute": "bfloat16"}}])
def test_random_keys_are_moved_in_a_step(how: dict[str, Any]) -> None:
    """Keys of devices, as layers with dropout have them; they take no wire."""
    keys = jax.random.split(jax.random.key(3), 8)

    def step(keys: jax.Array) -> Any:
        def turn(carry: jax.Array, key: jax.Array) -> Any:
            return carry + 1.0, lax.all_gather(key[None], "x", tiled=True)

        swapped = lax.ppermute(keys, "x", [(0, 1), (1, 0)])
        return swapped, lax.all_to_all(keys, "x", 0, 0, tiled=True), lax.scan(turn, 0.0, keys)[1]

    def moved() -> Any:
        options: Any = {"mesh": harness.mesh(2), "in_specs": P("x"), "out_specs": P("x")}
        run = jax.jit(lambda keys: jax.shard_map(step, **options)(keys))
        return jax.tree.map(jax.random.key_data, run(keys))

    want = moved()
    with pc.override_lax(**how):
        got = moved()
    jax.tree.map(np.testing.assert_array_equal, got, want)


GROUPS = ((0, 1), (2, 3))


@pytest.mark.parametrize("groups", [np.array(GROUPS), [*np.array(GROUPS)]], ids=["array", "arrays"])
def test_groups_may_be_of_numpys_numbers(groups: Any) -> None:
    def each(x: Any, groups: Any) -> Any:
        within: Any = {"axis_index_groups": groups}
        return (
            *(pc.psum(x, "x", **within), pc.pmax(x, "x", **within)),
            pc.psum_scatter(x, "x", tiled=True, **within),
            pc.all_gather(x, "x", **within),
            pc.all_to_all(x, "x", 0, 1, tiled=True, **within),
            pc.pswapaxes(x[:2], "x", 0, **within),
        )

    x = jax.ShapeDtypeStruct((4, 16, 128), jnp.float32)
    programs = [
        jax.make_jaxpr(
            harness.per_device(lambda x, g=g: each(x, g), harness.mesh(4), check_vma=False)
        )(x)
        for g in (groups, GROUPS)
    ]
    assert str(programs[0]) == str(programs[1])


@pytest.mark.parametrize("name", ["psum", "pmean"])
def test_a_sum_within_groups_has_no_type(name: str) -> None:
    """Where lax has one, as without check_vma or for constants, so have we."""
    x = jax.ShapeDtypeStruct((4, 16, 128), jnp.float32)
    call = functools.partial(getattr(pc, name), axis_name="x", axis_index_groups=GROUPS)
    typed = harness.per_device(call, harness.mesh(4))
    lost = functools.partial(call, wire="int8", return_residue=True)
    for each in (typed, harness.per_device(lost, harness.mesh(4))):
        with pytest.raises(UnservedError, match=rf"{name} with .* no type .* pass check_vma=False"):
            jax.eval_shape(each, x)
    jax.eval_shape(harness.per_device(call, harness.mesh(4), check_vma=False), x)
    jax.eval_shape(harness.per_device(lambda x: x * call(1.0), harness.mesh(4)), x)


def test_a_source_may_be_a_number_of_numpys() -> None:
    x = harness.random((2, 8, 128), "float32")
    for source in (np.int8(1), np.array(1)):
        got = harness.per_device(lambda x, s=source: pc.pbroadcast(x, "x", s), harness.mesh(2))(x)
        np.testing.assert_array_equal(got, x[[1, 1]])


def test_what_xla_has_not_for_cpus_is_refused_before_it_compiles() -> None:
    calls = {
        "pbroadcast": lambda x: pc.pbroadcast(x, "x", 1, backend="xla"),
        "ragged_all_to_all": lambda x: pc.ragged_all_to_all(
            x, x, *[jnp.zeros(4, jnp.int32)] * 4, axis_name="x", backend="xla"
        ),
    }
    x = jax.ShapeDtypeStruct((4, 16, 128), jnp.float32)
    for name, call in calls.items():
        program = harness.per_device(call, harness.mesh(4), check_vma=False)
        with pytest.raises(UnservedError, match=f"jax.lax.{name} on CPU .* name backend='pallas'"):
            program.lower(x)  # type: ignore[attr-defined]
