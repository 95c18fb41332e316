"""Physical ring orders from the devices' coordinates to the kernels."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

import harness
import pallas_collectives
from pallas_collectives.errors import BackendError
from pallas_collectives.kernels import all_gather
from pallas_collectives.kernels.machinery import entry
from pallas_collectives.topology import placement, ring_orders
from pallas_collectives.topology.groups import Group


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups that kernels are launched on."""
    seen: list[Group] = []
    barrier_id = entry.barrier_id

    def spy(barrier: Any, group: Group, *others: Any) -> int:
        seen.append(group)
        return barrier_id(barrier, group, *others)

    monkeypatch.setattr(entry, "barrier_id", spy)
    return seen


def everything(m: Any, x: jax.Array) -> list[jax.Array]:
    """Collectives over the 2 x 4 chips, as one axis and as two."""

    def by(algorithm: str) -> dict[str, Any]:
        return {} if m is jax.lax else {"algorithm": algorithm}

    outs = [m.all_gather(x, ("y", "x"), tiled=True, **by("bidirectional"))]
    for axis_name, ring in ((("x", "y"), "bidirectional"), ("y", "line")):
        outs += [
            m.all_gather(x, axis_name, tiled=True, **by(ring)),
            m.psum_scatter(x, axis_name, tiled=True, **by(ring)),
            m.psum(x, axis_name, **by("line" if ring == "line" else "ring")),
        ]
        outs.append(m.all_to_all(x, axis_name, 0, 0, tiled=True, **by("ring")))
    n = jax.lax.axis_size(("x", "y"))
    outs.append(m.ppermute(x, ("x", "y"), [(d, (d + 3) % n) for d in range(n)]))
    return outs


@pytest.mark.full
@pytest.mark.parametrize(
    "torus, mode",
    [
        ("v5e:2x4", "on_wait"),
        pytest.param("v5e:2x4", "eager", marks=pytest.mark.slow),
        pytest.param("7x:2x2x1", "on_wait", marks=pytest.mark.slow),
    ],
)
def test_results_are_in_laxs_order_whatever_the_torus(
    torus: str, mode: str, groups: list[Group]
) -> None:
    x, on = harness.random((8, 64, 128), "float32"), harness.mesh(2, 4)

    def run(m: Any) -> Any:
        program = harness.per_device(functools.partial(everything, m), on, check_vma=False)
        return jax.tree.map(np.asarray, program(x))

    with placement.torus(torus), pltpu.force_tpu_interpret_mode(harness.ADVERSARIES[mode]):
        got = run(pallas_collectives)
    assert not harness.race_reported()
    jax.tree.map(np.testing.assert_array_equal, got, run(jax.lax))
    assert {g.axes for g in groups if g.order} >= {("x", "y"), ("y", "x")}
    if torus == "v5e:2x4":
        assert {g.order for g in groups if g.axes == ("x", "y")} >= {(0, 1, 2, 3, 7, 6, 5, 4)}
        assert {g.line for g in groups if g.axes == ("y",)} >= {True}


@pytest.mark.full
def test_index_groups_go_round_on_the_wires(groups: list[Group]) -> None:
    """They keep the numbers that lax gives their members; both have one order, the best for both.

    The diagonals of a square of chips are two links each.
    """
    x, listed = harness.random((8, 64, 128), "float32"), [[5, 0, 4, 1], [2, 7, 6, 3]]

    def exchange(m: Any, x: jax.Array) -> list[jax.Array]:
        how: dict[str, Any] = {"axis_index_groups": listed}
        ring = {} if m is jax.lax else {"algorithm": "ring"}
        both = {} if m is jax.lax else {"algorithm": "bidirectional"}
        return [
            m.psum(x, "x", **how, **ring),
            m.psum_scatter(x, "x", tiled=True, **how, **both),
            m.all_gather(x, "x", **how, **both),
            m.all_to_all(x, "x", 0, 1, tiled=True, **how, **ring),
        ]

    def run(m: Any) -> Any:
        program = harness.per_device(
            functools.partial(exchange, m), harness.mesh(8), check_vma=False
        )
        return jax.tree.map(np.asarray, program(x))

    with placement.torus("v5p:2x4x1"):
        got = run(pallas_collectives)
    first, *others = run(jax.lax)
    np.testing.assert_allclose(got[0], first, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], others[0], rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, got[2:], others[1:])
    assert {g.order for g in groups if g.order} == {(0, 2, 1, 3)}  # without: as they are traced
    assert {g.line for g in groups if g.index_groups} == {False}


@pytest.mark.parametrize("algorithm", ["bidirectional", "unidirectional", "line", "direct"])
def test_every_algorithm_takes_an_order_of_its_own(algorithm: str) -> None:
    group = Group(("x",), (8,), order=(0, 3, 5, 1, 7, 6, 2, 4))
    x = harness.random((8, 16, 128), "float32")
    params = harness.EITHER

    def gather(block: jax.Array) -> jax.Array:
        options = {"axis": 0, "vmem": False, "interpret": params}
        if algorithm in ("line", "direct"):
            return getattr(all_gather, algorithm)(block, group, **options)
        both = algorithm == "bidirectional"
        return all_gather.ring(block, group, bidirectional=both, **options)

    run = harness.per_device(gather, harness.mesh(8), check_vma=False)
    for mode in harness.ADVERSARIES:
        got = params.under(mode, lambda: np.asarray(run(x)))
        np.testing.assert_array_equal(got[5], x.reshape(-1, 128))
        assert not harness.race_reported(), mode


@pytest.mark.parametrize("sizes, name", [((8,), "x"), ((2, 4), ("x", "y"))])
def test_an_order_is_of_the_devices_of_the_mesh(
    sizes: tuple[int, ...], name: Any, groups: list[Group]
) -> None:
    """A mesh may list devices in any order: what counts is where they are."""
    x = harness.random((8, 8, 128), "float32")
    snake = [0, 1, 2, 3, 7, 6, 5, 4]
    on = Mesh(np.array(jax.devices())[snake].reshape(sizes), ("x", "y")[: len(sizes)])

    def program(block: jax.Array) -> jax.Array:
        return pallas_collectives.all_gather(block, name, algorithm="bidirectional")

    with placement.torus("v5e:2x4"):
        got = harness.per_device(program, on)(x)
    np.testing.assert_array_equal(np.asarray(got)[3], x)
    assert {g.order for g in groups} == {None}  # lax's order is the ring


@pytest.mark.full
def test_a_torus_is_part_of_what_jit_remembers(groups: list[Group]) -> None:
    x = harness.random((8, 8, 128), "float32")
    run = harness.per_device(
        lambda a: pallas_collectives.all_gather(a, "x", algorithm="bidirectional"), harness.mesh(8)
    )
    orders = []
    for name in (None, "v5e:2x4", "v6e:4x2"):
        groups.clear()
        with placement.torus(name) if name else placement.scope(None):
            np.testing.assert_array_equal(np.asarray(run(x))[0], x)
        orders.append([g.order for g in groups if g.order])
    plain, wide, tall = orders
    assert not plain
    assert set(wide) == {(0, 1, 2, 3, 7, 6, 5, 4)}
    assert set(tall) == {(0, 1, 3, 5, 7, 6, 4, 2)}


@pytest.mark.full
def test_gradients_without_jit(groups: list[Group]) -> None:
    x = harness.random((8, 8, 128), "float32")

    def loss(m: Any, block: jax.Array) -> jax.Array:
        how = {} if m is jax.lax else {"algorithm": "bidirectional"}
        return jax.grad(lambda a: (m.all_gather(a, "x", **how) ** 2).sum())(block)

    def run(m: Any, **how: Any) -> Any:
        program = functools.partial(loss, m)
        return np.asarray(harness.per_device(program, harness.mesh(8), check_vma=False, **how)(x))

    with placement.torus("v5e:2x4"):
        got = run(pallas_collectives, jit=False)
    np.testing.assert_allclose(got, run(jax.lax))
    assert {g.order for g in groups} >= {(0, 1, 2, 3, 7, 6, 5, 4)}


def test_what_torus_refuses() -> None:
    for name in ("v9:2x4", "v5e:2x2x2", "v5e:", "2x4", "v5e:0x4", None):
        with pytest.raises(BackendError, match="GENERATION:AxBxC"), placement.torus(name):
            pass
    x = harness.random((8, 8, 128), "float32")
    run = harness.per_device(lambda a: pallas_collectives.psum(a, "x"), harness.mesh(8))
    with placement.torus("v5e:2x2"), pytest.raises(BackendError, match="has 4 devices"):
        run(x)


@pytest.mark.parametrize("topology", harness.GENERATIONS.values())
def test_real_coordinates_make_a_ring_of_single_links(topology: str) -> None:
    pytest.importorskip("libtpu")
    devices = harness._topology(topology).devices
    found = placement.of_mesh(Mesh(np.array(devices), ("x",)))
    assert found is not None
    assert math.prod(found.torus.shape) * (2 if topology[:2] in ("v4", "tp") else 1) == 8
    order = ring_orders.ring_order(found.torus, [found.at])
    assert ring_orders.cost(found.torus, found.at, order).longest == 1


def test_each_slice_has_its_own_torus() -> None:
    """Inside two slices of 2 x 4 chips rings follow the wires; over both there is no ring."""
    pytest.importorskip("libtpu")
    mesh = Mesh(np.array(harness._topology("v5e:2x4", 2).devices).reshape(2, 8), ("dcn", "x"))
    both, inside = Group(("dcn", "x"), (2, 8)), Group(("x",), (8,))
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        placement.scope(placement.of_mesh(mesh)),
    ):
        found, there = placement.arranged(inside), placement.in_scope()
        assert placement.arranged(both) == both
    assert there is not None and there.torus.shape == (2, 4) and found.order is not None
    assert ring_orders.cost(there.torus, there.at[:8], found.order).longest == 1
    assert [(axis.size, axis.line) for axis in found.torus] == [(4, True), (2, False)]


@pytest.mark.parametrize("topology, sizes", [("v5e:4x4", (16,)), ("v5p:4x4x4", (64,))])
def test_compiled_kernels_get_the_order(
    topology: str, sizes: tuple[int, ...], groups: list[Group]
) -> None:
    pytest.importorskip("libtpu")

    def program(x: jax.Array) -> Any:
        gathered = pallas_collectives.all_gather(x, "x", algorithm="bidirectional")
        return gathered, pallas_collectives.psum(jnp.cos(x), "x", algorithm="ring")

    harness.compile_for_tpu(program, topology, (8, 128), sizes=sizes)
    assert {len(g.order) for g in groups if g.order} == set(sizes)


def test_an_abstract_mesh_keeps_laxs_order() -> None:
    assert placement.of_mesh(harness.mesh(8).abstract_mesh) is None
    assert placement.of_mesh(harness.mesh(8)) is None  # simulated, and no torus in scope
    assert placement.in_scope() is None
    group = Group(("x",), (8,))
    seen = []

    def look(x: jax.Array) -> jax.Array:
        seen.append(placement.arranged(group))
        return x

    spec = PartitionSpec("x")
    jax.make_jaxpr(jax.shard_map(look, mesh=harness.mesh(8), in_specs=spec, out_specs=spec))(
        np.zeros(8)
    )
    assert seen == [group]
