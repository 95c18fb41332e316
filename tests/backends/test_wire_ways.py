"""The times by which a way over a wire is chosen are near those of the replay."""

from typing import Any

import jax
import pytest

import pallas_collectives as pc
import wired_calls
from pallas_collectives.backends import counters
from pallas_collectives.backends.plans import WirePlan
from pallas_collectives.replay import Machine

# Collective, pod, axes, MiB of bfloat16, ways: between sizes that the table has, of few tiles too.
TABLE = [
    ("psum", "v5p:4x4x4", "x", 1, ("exchange", "ring")),
    ("psum", "v5p:4x4x4", "x,y", 1, ("exchange", "torus")),
    ("psum", "v5p:4x4x4", "x,y", 4, ("exchange", "torus")),
    ("psum_scatter", "v5p:4x4x4", "x,y", 4, ("exchange", "torus")),
    ("psum", "7x:4x4x4", "x,y", 4, ("exchange", "torus")),
    ("psum", "v6e:4x4", "x,y", 4, ("exchange", "torus")),
    ("psum", "v5e:16x16", "x", 2, ("exchange", "ring")),
    ("psum", "v5e:16x16", "x", 4, ("exchange", "ring")),
    ("psum", "v5e:4x4", "x", 4, ("exchange", "line")),
    ("psum_scatter", "v6e:4x4", "x", 1, ("exchange", "line")),
    ("all_gather", "v6e:4x4", "x", 1, ("line",)),
    ("all_to_all", "v6e:8x8", "x", 4, ("direct",)),
]


def timed(op: str, pod: str, axes: str, mib: float, way: str | None) -> tuple[float, WirePlan]:
    """Microseconds by the replay, passes of XLA included, and the plan."""
    how: dict[str, Any] = {"wire": "int8", "backend": "pallas", "algorithm": way}
    calls = {
        "psum": pc.psum,
        "psum_scatter": lambda x, axes, **how: pc.psum_scatter(x, axes, tiled=True, **how),
        "all_gather": lambda x, axes, **how: pc.all_gather(x, axes, tiled=True, **how),
        "all_to_all": lambda x, axes, **how: pc.all_to_all(x, axes, 0, 0, tiled=True, **how),
    }

    def program(x: jax.Array) -> jax.Array:
        return calls[op](x, tuple(axes.split(",")), **how)

    with counters.recorded() as plans:
        report = wired_calls.replayed(program, Machine.named(pod), int(mib * 2**19))
    plan, *_ = (plan for plan in plans if isinstance(plan, WirePlan))
    return 1e6 * report.time + plan.passes_us, plan


@pytest.mark.full
@pytest.mark.parametrize("op, pod, axes, mib, ways", TABLE)
def test_predictions_are_near_the_replay_and_the_quickest_way_is_taken(
    op: str, pod: str, axes: str, mib: float, ways: tuple[str, ...]
) -> None:
    replayed = {way: timed(op, pod, axes, mib, way) for way in ways}
    for way, (us, plan) in replayed.items():
        assert plan.way == way and plan.wired_us == pytest.approx(us, rel=0.15), (way, us)
    us, _ = timed(op, pod, axes, mib, None)
    assert us <= 1.1 * min(us for us, _ in replayed.values())
