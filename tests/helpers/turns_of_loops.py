"""Loops whose turns begin collectives of other turns: faked times, and what reports say of them."""

import jax
import pytest
from jax import lax

import pallas_collectives as pc
from pallas_collectives.lowering import collective_times, turns

SAYS = "a loop's turn asks for it for the next one"
LEAVES = "a loop's turn leaves it to the next one"


def fake(seconds: float, patch: pytest.MonkeyPatch) -> None:
    """Products take a second each, and collectives that many."""
    patch.setattr(turns, "_seconds", lambda eqn, _: float(eqn.primitive.name == "dot_general"))
    patch.setattr(collective_times, "under_way", lambda step, chip: seconds)


def whole(w: jax.Array) -> jax.Array:
    return lax.all_gather(w, "x", tiled=True)


def asked(says: str = SAYS) -> int:
    """How many collectives of the last context another turn begins."""
    return sum(line.times for line in pc.override_report().replaced if says in line.why)
