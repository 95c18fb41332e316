"""What stands in a `shard_map` outside of loops: sums held under way, and what lax keeps of it."""

import contextlib
import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import topologies
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives.errors import UnservedError
from pallas_collectives.lowering import loops
from turns_of_loops import fake, whole

Layers = list[dict[str, Any]]


def layer(x: jax.Array, w: dict[str, Any]) -> jax.Array:
    return x + jnp.tanh(x @ whole(w["up"])) @ whole(w["down"]) / 8


def unrolled(x: jax.Array, layers: Layers) -> jax.Array:
    for w in layers:
        x = jax.checkpoint(layer)(x, w)
    return jnp.sum(x**2)


def plain(x: jax.Array, layers: Layers) -> Any:
    return jax.grad(unrolled, argnums=(0, 1))(x, layers)


def jitted(x: jax.Array, layers: Layers) -> Any:
    return jax.jit(plain)(x, layers)


def updated(x: jax.Array, layers: Layers) -> Any:
    """Gradients that are scaled by the norm of all, and move the weights."""
    moved, made = plain(x, layers)
    squares = lax.psum(sum(jnp.sum(g**2) for g in jax.tree.leaves(made)), "x")
    return moved, jax.tree.map(lambda w, g: w - 0.1 * g * lax.rsqrt(squares), layers, made)


def stacked(x: jax.Array, layers: Layers) -> Any:
    """Layers' weights are rows of one array, so that gradients are put together."""

    def of_rows(x: jax.Array, rows: Any) -> jax.Array:
        return unrolled(x, [jax.tree.map(operator.itemgetter(i), rows) for i in range(len(layers))])

    rows = jax.tree.map(lambda *each: jnp.stack(each), *layers)
    moved, made = jax.grad(of_rows, argnums=(0, 1))(x, rows)
    return moved, [jax.tree.map(operator.itemgetter(i), made) for i in range(len(layers))]


def accumulated(x: jax.Array, layers: Layers) -> Any:
    """A loop that carries a moment of the gradients on; of their plain sum lax keeps the sums."""

    def turn(total: Any, part: jax.Array) -> Any:
        moved, made = plain(part, layers)
        return jax.tree.map(lambda total, g: total / 2 + g, total, made), moved

    total, moved = lax.scan(turn, jax.tree.map(jnp.zeros_like, layers), x[:, None])
    return moved[:, 0], total


def returned(x: jax.Array, layers: Layers) -> Any:
    """Results that are operands, constants, and one value twice."""
    _, (first, *others) = plain(x, layers)
    held = {"up": first["up"], "down": first["up"] + np.eye(64, 128, dtype=np.float32)}
    return x, [held, {"up": layers[0]["up"], "down": jnp.zeros_like(first["up"])}, *others[1:]]


def told(x: jax.Array, layers: Layers) -> Any:
    """A sum that a host callback reads: its order is not ours to change."""
    moved, made = plain(x, layers)
    jax.debug.print("{}", jnp.sum(made[0]["up"]) > 1e9, ordered=False)
    return moved, made


PROGRAMS = (plain, jitted, updated, stacked, accumulated, returned, told)


def run(program: Callable[..., Any], check_vma: bool = True) -> Any:
    """Its results on two devices; jitted anew."""
    x = harness.random((4, 128), "float32", 7)
    layers = [
        {k: harness.random((128, 128), "float32", 2 * i + j) for j, k in enumerate(("up", "down"))}
        for i in range(3)
    ]
    specs = P("x"), P("x")
    mapped = jax.shard_map(
        lambda *args: program(*args),
        mesh=harness.mesh(2),
        in_specs=specs,
        out_specs=specs,
        check_vma=check_vma,
    )
    return jax.tree.map(np.asarray, jax.jit(mapped)(x, layers))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sums each program held, of those whose collectives take three products' time."""
    fake(3.0, monkeypatch)
    found: list[int] = []
    sums = loops.Loop.sums

    def counted(loop: loops.Loop) -> Any:
        held = sums(loop)
        found.append(len(held))
        return held

    monkeypatch.setattr(loops.Loop, "sums", counted)
    return found


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_sums_that_are_held_have_the_same_bits(
    program: Callable[..., Any], check_vma: bool, held: list[int]
) -> None:
    by_lax = run(program, check_vma)
    with pc.override_lax(ahead=False, keep=("psum",)):  # a simulated kernel's effects have an order
        apart = run(program, check_vma)
    assert not held
    with pc.override_lax(keep=("psum",)):
        got = run(program, check_vma)
    assert max(held) == {told: 5, returned: 3}.get(program, 6)
    jax.tree.map(np.testing.assert_array_equal, got, apart)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), got, by_lax)


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_next_to_nothing_would_hide_is_lax_to_the_bit(
    program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_lax = run(program)
    fake(100.0, monkeypatch)
    with pc.override_lax(keep=("psum",)):
        got = run(program)
    report = pc.override_report()
    assert report.left and all(loops.NO_PRODUCTS in x.why for x in report.left)
    assert not report.replaced
    jax.tree.map(np.testing.assert_array_equal, got, by_lax)


def for_v6e(step: Callable[..., Any], rows: int, layers: int = 4, width: int = 4096) -> Any:
    """The lowered gradient of layers of one product, under `override_lax`."""
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
    mesh = Mesh(np.array(devices[:4]), ("x",))
    sharding = NamedSharding(mesh, P("x"))
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16, sharding=sharding)
    w = jax.ShapeDtypeStruct((width, width), jnp.bfloat16, sharding=sharding)
    specs = P("x"), P("x")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False)
    with pc.override_lax():
        return jax.jit(mapped).lower(x, [w] * layers)


@jax.named_scope("mine")
def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ whole(w))


def products(x: jax.Array, layers: list[jax.Array]) -> Any:
    def loss(layers: list[jax.Array]) -> jax.Array:
        y = x
        for w in layers:
            y = jax.checkpoint(_product)(y, w)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.grad(loss)(layers)


def test_steps_of_few_rows_stay_as_they_are_by_lax() -> None:
    for_v6e(products, 4 * 256)
    report = pc.override_report()
    assert not report.replaced and {x.why for x in report.left} == {loops.NO_PRODUCTS}


def test_sums_of_a_compiled_step_are_joined_with_what_is_computed_later() -> None:
    barriers = for_v6e(products, 4 * 8192).as_text().count("optimization_barrier")
    assert pc.override_report().replaced
    without = for_v6e(jax.jit(products), 4 * 256).as_text().count("optimization_barrier")
    assert barriers >= without + 3  # between four sums


def test_profiles_have_the_scopes_of_the_program() -> None:
    def scopes(rows: int) -> set[str]:
        text = for_v6e(products, rows).as_text(debug_info=True)
        found = re.findall(r'loc\("([^"]*(?:dot_general|tanh))"', text)
        return {re.sub(r"\(checkpoint\)", "()", x.replace("/checkpoint", "")) for x in found}

    few, many = scopes(4 * 256), scopes(4 * 8192)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pc, "override_lax", contextlib.nullcontext)
        by_lax = scopes(4 * 256)
    assert few == many == by_lax and all("mine" in scope for scope in by_lax)


def test_what_an_equation_asks_of_xla_holds_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(100.0, monkeypatch)

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        with set_xla_metadata(mine="1"):
            x = x * 2
        return jnp.tanh(x @ whole(w))

    options: Any = {"mesh": harness.mesh(2), "in_specs": P("x"), "out_specs": P("x")}
    x, w = jnp.ones((256, 128)), jnp.ones((128, 128))

    def marked() -> int:
        mapped = jax.shard_map(lambda x, w: step(x, w), **options)
        return jax.jit(mapped).lower(x, w).as_text().count('mine = "1"')

    by_lax = marked()
    with pc.override_lax():
        assert marked() == by_lax > 0
    assert pc.override_report().left


def test_shapes_may_be_symbols() -> None:
    pytest.importorskip("libtpu")
    (rows,) = export.symbolic_shape("rows")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
    mesh = Mesh(np.array(devices[:4]), ("x",))
    options: Any = {"mesh": mesh, "in_specs": (P(), P("x")), "out_specs": P("x")}
    step = jax.grad(lambda x, w: jnp.sum(jnp.tanh(x @ whole(w)).astype(jnp.float32)), argnums=1)
    x, w = (jax.ShapeDtypeStruct((n, 4096), jnp.bfloat16) for n in (rows, 4096))
    call = export.DisabledSafetyCheck.custom_call("tpu_custom_call")
    with pc.override_lax():
        run = jax.jit(jax.shard_map(step, **options, check_vma=False))
        exported = export.export(run, platforms=["tpu"], disabled_checks=[call])(x, w)
    assert "dot_general" in exported.mlir_module()


@pytest.mark.parametrize(
    "name, op",
    [("psum", "all_reduce"), ("psum_scatter", "reduce_scatter"), ("all_gather", "all_gather")],
)
def test_lax_serves_operands_whose_sizes_are_symbols(name: str, op: str) -> None:
    """A kernel has sizes that are known; so a collective that names our backend is refused."""
    (b,) = export.symbolic_shape("b")
    rows = jax.ShapeDtypeStruct((4 * b, 128), jnp.float32)
    options: Any = {"mesh": harness.mesh(2), "in_specs": P("x"), "out_specs": P("x")}

    def exported(call: Any, **how: Any) -> Any:
        fn = jax.shard_map(lambda x: call(x, "x", **how), **options, check_vma=False)
        return export.export(jax.jit(fn), platforms=["cpu"])(rows)

    tiled = {} if name == "psum" else {"tiled": True}
    with pc.override_lax():
        there = exported(getattr(lax, name), **tiled)
    (line,) = pc.override_report().left
    assert "some may be symbols" in line.why
    assert f"stablehlo.{op}" in there.mlir_module()
    if name != "all_gather":  # what lax's primitives make of it has no kernel
        assert exported(getattr(pc, name), backend="xla", order="rank", **tiled)
    with pytest.raises(UnservedError, match="leave backend=None"):
        exported(getattr(pc, name), backend="pallas", **tiled)


def test_lax_serves_what_is_lowered_for_tpus_with_no_mesh_of_them() -> None:
    """A kernel for a mesh of CPU devices is simulated, and so one that is named is refused."""
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    options: Any = {"mesh": harness.mesh(2), "in_specs": P("x"), "out_specs": P()}

    def exported(call: Any, **how: Any) -> Any:
        fn = jax.shard_map(lambda x: call(jnp.tanh(x), "x", **how), **options)
        return export.export(jax.jit(fn), platforms=["tpu"])(x)

    with pc.override_lax():
        there = exported(lax.psum)
    (line,) = pc.override_report().left
    assert "get_topology_desc" in line.why
    assert "stablehlo.all_reduce" in there.mlir_module()
    with pytest.raises(UnservedError, match=r"lowered for tpu, .* simulated"):
        exported(pc.psum, backend="pallas")
