"""What is chosen of a turn: products in kernels with tokens' exchanges, another order, or wires."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import harness
import pallas_collectives as pc
from layers_in_kernels import Arrays, Layer, forward, gathered, lowered, one, scattered
from pallas_collectives.lowering import ahead, collective_times, loops


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
