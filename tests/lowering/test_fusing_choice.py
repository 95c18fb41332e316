"""What is chosen of a turn: products in kernels with tokens' exchanges, another order, or wires."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec as P

import harness
import nccl_host
import pallas_collectives as pc
from layers_in_kernels import Arrays, Layer, forward, gathered, lowered, one, scattered
from pallas_collectives.backends import choice
from pallas_collectives.lowering import ahead, collective_times, fusing, in_place, loops
from pallas_collectives.topology import placement


def turns_chosen(monkeypatch: pytest.MonkeyPatch, topology: str, layer: Layer, **how: Any) -> str:
    """What is chosen of the turn of a scan."""
    found = harness.results_of(ahead, "rewritten", monkeypatch)
    lowered(topology, forward(layer, scan=True), **how)
    if any(way == "fused" for _, way, _ in pc.fusion_counts()):
        return "kernels"
    return "order" if any(each and each.in_order for each in found) else "as written"


@pytest.mark.parametrize("topology", ["v5e:4x4", "v5p:2x2x2", "tpu7x:2x2x1"])
def test_a_layer_whose_products_wait_is_in_kernels(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert turns_chosen(monkeypatch, topology, one) == "kernels"


def doubled(x: jax.Array, w: Arrays) -> jax.Array:
    """Weights are computed by each turn."""
    return one(x, jax.tree.map(lambda each: 2 * each, w))


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:4x4", "tpu7x:2x2x1"])
def test_tokens_that_xla_has_in_vmem_are_left_to_it(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights that kernels cannot read in place."""
    assert turns_chosen(monkeypatch, topology, doubled, rows=512) == "as written"


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "tpu7x:2x2x1"])
def test_small_tokens_are_in_kernels_that_read_weights_in_place(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert turns_chosen(monkeypatch, topology, one, rows=512) == "kernels"


def test_what_xla_would_copy_of_a_scans_weights_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place.Slices, "of", lambda *_: None)
    assert turns_chosen(monkeypatch, "v5p:2x2x1", one, rows=1536) == "kernels"
    assert turns_chosen(monkeypatch, "v5p:2x2x1", one, rows=512) == "as written"
    monkeypatch.setattr(fusing, "_COPIED", 0.0)
    assert turns_chosen(monkeypatch, "v5p:2x2x1", one, rows=512) == "kernels"


@pytest.mark.parametrize(
    "topology, chosen", [("v5p:2x2x2", "order"), ("tpu7x:2x2x1", "as written")]
)
def test_two_halves_hide_more_than_kernels(
    topology: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On v5p in an order of ours; on 7x XLA runs an exchange beside the other half's products."""
    halves = pc.two_batch_overlap(one)
    assert turns_chosen(monkeypatch, topology, halves) == chosen


def weighted(x: jax.Array, w: Arrays) -> jax.Array:
    """A weight is gathered, too."""
    down = lax.all_gather(w["down"][: len(w["down"]) // 16], "x", tiled=True)
    return x + scattered(jnp.tanh(gathered(x) @ w["up"]) @ down)


def test_xla_fuses_weights_gathers_with_products_and_not_with_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert turns_chosen(monkeypatch, "v5e:4x4", weighted) == "as written"


@pytest.mark.full
@pytest.mark.parametrize("topology, chosen", [("v5p:2x2x2", "kernels"), ("v6e:4x4", "as written")])
def test_a_wire_is_taken_where_it_saves_more(
    topology: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is counted as left out. On v6e the wire takes longer than the products."""
    monkeypatch.setattr(loops.Loop, "in_order", lambda _: None)
    wire = {"all_gather": "int8", "psum_scatter": "int8"}
    saved = collective_times.saved_by_wire
    share = 0.5 if chosen == "kernels" else 1.0  # of what it would save
    monkeypatch.setattr(collective_times, "saved_by_wire", lambda step: share * saved(step))
    assert turns_chosen(monkeypatch, topology, one, wire=wire) == chosen
    whys = {why for _, _, why in pc.wire_counts()}
    said = "in one kernel with its product it takes less time"
    assert (said in whys) == (chosen == "kernels")


TOKENS, UP, DOWN = (2, 4096, 4096), (4096, 16384), (16384, 4096)


def awaited(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
    """Products wait for the sum."""
    return lax.psum(jnp.tanh(x @ up) @ down, "x") @ up


def in_turns(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
    """Those of the next turn do."""
    layer = lambda x, _: (x + lax.psum(jnp.tanh(x @ up) @ down, "x"), None)  # noqa: E731
    return lax.scan(layer, x, length=2)[0]


def of_gradients(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
    """Sums that nothing waits for; they are of products with the tokens' rows last."""
    x, up, down = x[0].T, up.T, down.T
    loss = lambda up, down: jnp.sum((down @ jnp.tanh(up @ x)) ** 2)  # noqa: E731
    return [lax.psum(gradient, "x") for gradient in jax.grad(loss, (0, 1))(up, down)]


@pytest.mark.parametrize(
    "program, hosts, count",
    [(awaited, 1, 1), (awaited, 2, 0), (in_turns, 1, 1), (of_gradients, 1, 0)],
)
def test_on_gpus_a_sum_is_split_where_products_wait_for_it(
    program: Any, hosts: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere XLA runs it beside compute; and no product runs beside copies between hosts."""
    nccl_host.serve(monkeypatch)
    monkeypatch.setattr(choice, "_usual", lambda _: "nccl")
    monkeypatch.setattr(placement, "are_of_one_host", lambda _: hosts == 1)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (TOKENS, UP, DOWN)]

    def traced(program: Any) -> Any:
        on = {"mesh": harness.mesh(4), "in_specs": P(), "out_specs": P(), "check_vma": False}
        (eqn,) = jax.make_jaxpr(jax.shard_map(program, **on))(*types).eqns
        return eqn.params["jaxpr"]

    with pc.override_lax():
        body = traced(program)
    found = []

    def decide(*args: jax.Array) -> jax.Array:  # where axes are bound
        scans = [eqn for eqn in body.eqns if eqn.primitive.name == "scan"]
        loop = loops.Loop.of(scans[0].params, len(scans[0].invars)) if scans else None
        loop = loop or loops.Loop.once(core.ClosedJaxpr(body, ()))
        fused = loop.with_tokens().fused()
        found.extend(fused.loop.steps if fused else ())
        return args[0]

    traced(decide)
    names = [step.eqn.primitive.name for step in found if step.eqn]
    assert names.count("pallas_matmul_reduce_scatter") == count
