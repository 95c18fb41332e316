"""Axes in tuples, groups, nested and partly automatic meshes, and those of vmap and pmap."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from against_lax import (
    CANONICAL,
    DERIVED,
    SHAPE,
    UNDIFFERENTIABLE,
    Renamed,
    With,
    both_raise,
    check,
    compare,
    loss,
    served_by_kernels,
)
from pallas_collectives.errors import BackendError

pytestmark = pytest.mark.usefixtures("fresh_counts")


@pytest.mark.parametrize(
    "op, axes",
    [(op, axes) for op in CANONICAL for axes in [("x", "y"), ("y", "x")]]
    + [("psum", ["y", "x"]), ("all_gather", ("y",))],
    ids=str,
)
def test_tuples_of_axes(op: str, axes: Any) -> None:
    perm = [(p, (p + 1) % 4) for p in range(4)]
    if op == "ppermute" and axes != ("x", "y"):
        pytest.skip("refused: see test_collectives")

    def fn(m: Any, x: jax.Array) -> jax.Array:
        renamed = Renamed(m, axes, perm)
        return jax.grad(loss(functools.partial(CANONICAL[op], renamed)))(x)

    check(fn, on=harness.mesh(2, 2))


@pytest.mark.parametrize("op", [op for op in CANONICAL if op != "ppermute"])
def test_groups(op: str) -> None:
    groups = [[0, 3], [2, 1]]

    def fn(m: Any, x: jax.Array) -> jax.Array:
        grouped = Renamed(m, "x", axis_index_groups=groups)
        call = functools.partial(CANONICAL[op], grouped)
        return call(x), jax.grad(loss(call))(x)

    check(fn, on=harness.mesh(4), check_vma=False)


@pytest.mark.parametrize("op", [op for op in CANONICAL if op != "ppermute"])
def test_groups_under_check_vma_as_lax_has_them(op: str) -> None:
    on, x = harness.mesh(4), harness.random((4, *SHAPE), "float32")

    def run(m: Any) -> Any:
        grouped = Renamed(m, "x", axis_index_groups=[[0, 3], [2, 1]])
        return harness.per_device(functools.partial(CANONICAL[op], grouped), on)(x)

    try:
        want = run(lax)
    except NotImplementedError:
        with pytest.raises(NotImplementedError):
            run(pc)
    else:
        compare(run(pc), want)


@pytest.mark.parametrize("op", CANONICAL)
def test_partly_automatic_meshes_are_left_to_lax_and_counted(op: str) -> None:
    on = harness.mesh(2, 2)
    x = harness.random((2, *SHAPE), "float32")
    spec = P("x")

    def run(m: Any, **how: Any) -> Any:
        def shard(x: jax.Array) -> jax.Array:
            grad = jax.grad(loss(lambda x: CANONICAL[op](With(m, how), x)))
            return grad(x[0])[None]

        mapped = jax.shard_map(shard, mesh=on, in_specs=spec, out_specs=spec, axis_names={"x"})
        return jax.jit(mapped)(x)

    compare(run(pc), run(lax))
    (reason,) = pc.fallback_counts()
    assert "'y' is not manual" in reason
    assert {backend for _, backend, _ in pc.counts()} == {"xla"}
    with pytest.raises(BackendError, match="'y' is not manual"):
        run(pc, backend="pallas")


@pytest.mark.parametrize("in_scope", [False, True])
@pytest.mark.parametrize("op", CANONICAL)
def test_nested_shard_map(op: str, in_scope: bool) -> None:
    """The outer one makes "y" manual, the inner one "x"; only then can a kernel serve."""
    on = harness.mesh(2, 2)
    x = harness.random((4, *SHAPE), "float32")

    def run(m: Any) -> Any:
        def inner(x: jax.Array) -> jax.Array:
            return jax.grad(loss(functools.partial(CANONICAL[op], m)))(x[0])[None]

        def outer(x: jax.Array) -> jax.Array:
            spec = P("x")
            return jax.shard_map(inner, in_specs=spec, out_specs=spec, axis_names={"x"})(x)

        spec = P("y")
        mapped = jax.shard_map(outer, mesh=on, in_specs=spec, out_specs=spec, axis_names={"y"})
        with jax.set_mesh(on) if in_scope else contextlib.nullcontext():
            return jax.jit(mapped)(x)

    if jax.__version_info__ < (0, 11):
        with pytest.raises(BackendError, match=r"nested shard_maps.*all axes manual in one"):
            run(pc)
        return
    ours = run(pc)
    assert served_by_kernels()
    compare(ours, run(lax))


@pytest.mark.parametrize("op", ["all_gather", "psum"])
def test_nested_shard_map_for_a_tpu(op: str) -> None:
    """Nothing orders compiled kernels: what XLA lacks for simulated ones before JAX 0.11."""
    pytest.importorskip("libtpu")
    on = Mesh(np.array(harness._topology("v5e:2x4").devices).reshape(2, 4), ("x", "y"))
    x = jax.ShapeDtypeStruct((8, *SHAPE), jnp.float32, sharding=NamedSharding(on, P("y")))
    grad = jax.grad(loss(functools.partial(CANONICAL[op], pc)))

    def outer(x: jax.Array) -> jax.Array:
        inner = jax.shard_map(
            lambda x: grad(x[0])[None], in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
        )
        return inner(x)

    mapped = jax.shard_map(outer, mesh=on, in_specs=P("y"), out_specs=P("y"), axis_names={"y"})
    assert "tpu_custom_call" in jax.jit(mapped).lower(x).compile().as_text()
    assert served_by_kernels()


@pytest.mark.parametrize("op", CANONICAL)
def test_vmap_of_shard_map_with_spmd_axis_name(op: str) -> None:
    on = harness.mesh(2, 2)
    x = harness.random((2, *SHAPE, 2), "float32")

    def run(m: Any) -> Any:
        spec = P("x")

        def shard(x: jax.Array) -> jax.Array:
            return jax.grad(loss(functools.partial(CANONICAL[op], m)))(x[0])[None]

        mapped = jax.shard_map(shard, mesh=on, in_specs=spec, out_specs=spec)
        return jax.jit(jax.vmap(mapped, in_axes=-1, out_axes=1, spmd_axis_name="y"))(x)

    ours = run(pc)
    assert served_by_kernels()
    compare(ours, run(lax))


@pytest.mark.parametrize("op", [*CANONICAL, *DERIVED, *UNDIFFERENTIABLE])
def test_axes_of_vmap_are_left_to_its_rules(op: str) -> None:
    call = (CANONICAL | DERIVED | UNDIFFERENTIABLE)[op]
    if op == "all_gather-invarying":
        pytest.skip("a type of shard_map's")
    x = harness.random((2, *SHAPE), "float32")

    def run(m: Any) -> Any:
        return jax.jit(jax.vmap(functools.partial(call, m), axis_name="x"))(x)

    try:
        want = run(lax)
    except Exception as error:
        with pytest.raises(type(error)):
            run(pc)
    else:
        compare(run(pc), want)
    assert not pc.counts()


@pytest.mark.parametrize("op", CANONICAL)
@pytest.mark.parametrize("axes", [("x", "v"), ("v", "x"), "x", "v"], ids=str)
def test_axes_of_vmap_and_of_a_mesh_together(op: str, axes: Any) -> None:
    n = 4 if isinstance(axes, tuple) else 2
    perm = [(p, (p + 1) % n) for p in range(n)]
    on, x = harness.mesh(2), harness.random((2, 2, *SHAPE), "float32")

    def run(m: Any) -> Any:
        call = functools.partial(CANONICAL[op], Renamed(m, axes, perm))
        return harness.per_device(jax.vmap(call, axis_name="v"), on, check_vma=False)(x)

    try:
        want = run(lax)
    except Exception:
        both_raise(run)
        return
    compare(run(pc), want)
    assert served_by_kernels() or axes == "v"


@pytest.mark.parametrize("op", CANONICAL)
def test_pmap(op: str) -> None:
    x = harness.random((2, *SHAPE), "float32")

    def run(m: Any) -> Any:
        call = functools.partial(CANONICAL[op], m)
        devices = jax.devices()[:2]
        return jax.pmap(lambda x: (call(x), jax.grad(loss(call))(x)), "x", devices=devices)(x)

    ours = run(pc)
    assert served_by_kernels()
    compare(ours, run(lax))
