"""Which collectives of a step a SparseCore runs, and which the core."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives.backends import counters
from pallas_collectives.backends.plans import KernelPlan
from pallas_collectives.errors import VmemError
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.topology import chips
from pallas_collectives.tuning import overlaps


def engines(step: Any, *shapes: tuple[int, ...]) -> dict[tuple[str, int], set[bool]]:
    """Whether a SparseCore of a v6e serves each collective of so many bytes."""
    pytest.importorskip("libtpu")
    on = harness.tpu_mesh("v6e:4x4", {"x": 16})
    run = jax.shard_map(step, mesh=on, in_specs=P(), out_specs=P(), check_vma=False)
    given = jax.NamedSharding(on, P())
    with counters.recorded(built=True) as plans:
        jax.jit(run).lower(*(jax.ShapeDtypeStruct(s, "bfloat16", sharding=given) for s in shapes))
    found: dict[tuple[str, int], set[bool]] = {}
    for plan in plans:
        if isinstance(plan, KernelPlan):
            found.setdefault((plan.op, plan.nbytes), set()).add(plan.on_sparsecore)
    return found


W, X, WHOLE = 256 * 4096 * 2, 1024 * 4096 * 2, 16 * 256 * 4096 * 2


@pytest.mark.parametrize(
    "by", [pc.override_lax(), pc.overridden], ids=["override_lax", "overridden"]
)
def test_a_sparsecore_is_left_to_what_is_asked_for_ahead(by: Any) -> None:
    """Weights, or a part of them, and sums of gradients; tokens are awaited at once, both ways."""

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        weights = jax.lax.all_gather(w[0], "x", tiled=True)
        tokens = jax.lax.all_gather(jnp.tanh(x), "x", tiled=True)
        return jax.lax.psum_scatter(jnp.sin(tokens @ weights), "x", tiled=True)

    def step(w: jax.Array, x: jax.Array) -> Any:
        return jax.grad(lambda w, x: jnp.sum(layer(w, x) ** 2).astype("float32"), (0, 1))(w, x)

    found = engines(by(step), (1, 256, 4096), (1024, 4096))
    assert found.pop(("all_gather", W)) == found.pop(("reduce_scatter", WHOLE)) == {True}
    assert found == {("all_gather", X): {False}, ("reduce_scatter", 16 * X): {False}}


def test_what_is_worth_a_sparsecores_time() -> None:
    """Enough for its launch, and not more than four times what the core's fastest takes."""
    v6e, v5e = chips.BY_NAME["v6e"], chips.BY_NAME["v5e"]
    assert overlaps.on_core(40.0, v6e) == "" and "it has no SparseCore" in overlaps.on_core(
        60.0, v5e
    )
    assert "too short" in overlaps.on_core(20.0, v6e) and "no table" in overlaps.on_core(None, v6e)
    assert overlaps.on_core(300.0, v6e, 80.0) == ""
    assert "too short" in overlaps.on_core(40.0, v6e, 20.0)
    assert "300 us for it, and the core takes 70" in overlaps.on_core(300.0, v6e, 70.0)


def served(topology: str, fn: Any, *sizes: int) -> list[str]:
    """The backends that serve what a program of arrays of so many bytes calls."""
    pytest.importorskip("libtpu")
    mesh, given = harness.tpu_mesh(topology, {"x": len(harness._topology(topology).devices)}), P()
    placed = jax.NamedSharding(mesh, given)
    shapes = (jax.ShapeDtypeStruct((n // 256, 128), "bfloat16", sharding=placed) for n in sizes)
    run = jax.shard_map(fn, mesh=mesh, in_specs=given, out_specs=given, check_vma=False)
    with counters.recorded(built=True) as plans, pc.override_lax():
        jax.jit(run).lower(*shapes)
    return [plan.backend for plan in plans]


@pytest.mark.full
def test_what_xla_gathers_into_cmem_stays_laxs() -> None:
    """In a step; what is started by name is as it was, and what is more than CMEM has room for."""
    by, small, large = functools.partial(served, "v4:2x2x1"), 1 << 20, 8 << 20

    def step(*weights: jax.Array) -> Any:
        return [lax.all_gather(w, "x", tiled=True) for w in weights]

    def started(w: jax.Array) -> Any:
        return pc.all_gather_start(w, "x", tiled=True).done()

    assert by(step, small, large) == ["xla", "pallas"]
    assert by(started, small) == ["pallas"]


@pytest.mark.parametrize(
    "topology, kept", [("v5e:2x2", True), ("v6e:2x2", True), ("v5p:2x2x1", False)]
)
def test_what_xla_sums_in_vmem_stays_laxs(topology: str, kept: bool) -> None:
    """Small sums, whose latency counts, and larger ones than VMEM has room for are kernels'."""

    def step(*terms: jax.Array) -> Any:
        return [lax.psum(jnp.tanh(x), "x") for x in terms]

    sizes = [1 << 20, 8 << 20, 64 << 20]
    assert served(topology, step, *sizes) == ["pallas", "xla" if kept else "pallas", "pallas"]


@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_what_xla_exchanges_in_vmem_between_products_stays_laxs(topology: str) -> None:
    """On v6e: gathers for products, and of the sums that these leave those that are neither short
    nor large. On v5e XLA has gathers in fusions.
    """

    def scattered(*terms: jax.Array) -> Any:
        return [lax.psum_scatter(jnp.tanh(x), "x", tiled=True) for x in terms]

    def gathered(*rows: jax.Array) -> Any:
        return [lax.all_gather(jnp.tanh(x), "x", tiled=True) for x in rows]

    near = "xla" if topology.startswith("v6e") else "pallas"
    assert served(topology, scattered, 4 << 20, 8 << 20, 16 << 20) == ["pallas", near, "pallas"]
    if topology.startswith("v6e"):
        assert served(topology, gathered, 1 << 20, 16 << 20) == ["xla", "pallas"]


@pytest.mark.full
def test_sums_by_name_are_the_cores_but_for_those_that_are_started() -> None:
    """Activations' are awaited; of gradients, at the end of a step, nothing is beside."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return jnp.sum(jax.lax.psum(y, "x").astype("float32"))

    def step(w: jax.Array, x: jax.Array) -> Any:
        return jax.lax.psum(jax.grad(loss)(w, x), "x")

    def started(w: jax.Array, x: jax.Array) -> Any:
        return pc.psum_start(jax.grad(loss)(w, x), "x").done()

    def in_order(w: jax.Array, x: jax.Array) -> Any:
        return pc.psum_start(jax.grad(loss)(w, x), "x", order="rank").done()

    for fn, there in ((step, False), (started, True), (in_order, False)):
        with pc.override_lax():
            found = engines(fn, (2, 2048, 2048), (1024, 2048))
        of_gradients = [on for (_, nbytes), on in found.items() if nbytes == 2 * 2048 * 2048 * 2]
        assert of_gradients == [{there}] or (not there and {True} not in of_gradients)


def test_lax_serves_what_finds_no_room_in_vmem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody named an algorithm; a step of a user's must not fail for ours."""
    monkeypatch.setattr(launch, "_vmem_limit", no_room)

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sin(x), "x")

    pc.reset_counts()
    with pc.override_lax():
        assert not engines(step, (1024, 1024))
    assert any("no room" in reason for reason in pc.fallback_counts())
    with pytest.raises(VmemError, match="no room"):
        engines(lambda x: pc.psum(x, "x", algorithm="ring"), (2048, 2048))


def no_room(needed: int, name: str, of_operands: bool) -> int:
    raise VmemError(f"{name} of {needed}", "no room", "leave it")
