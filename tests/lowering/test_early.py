"""Which gathers a turn asks for ahead, and when two turns become one, by faked times."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives.lowering import collective_times, loops
from turns_of_loops import fake, whole


def traced(turn: Any, weights: int, begin: Callable[[Any], Any] = lambda x: x) -> loops.Loop:
    """A loop of four turns, of that many weights each, which begins with what is made of x."""
    with pc.override_lax():
        mapped = jax.shard_map(
            lambda x, w: lax.scan(turn, begin(x), w)[0],
            mesh=harness.mesh(2),
            in_specs=(P(), P(None, "x")),
            out_specs=P(),
            check_vma=False,
        )
        square = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        stacked = [jax.ShapeDtypeStruct((4, 128, 128), jnp.float32)] * weights
        program = jax.make_jaxpr(mapped)(square, stacked)
    (outer,) = program.eqns
    (scan,) = (e for e in outer.params["jaxpr"].eqns if e.primitive.name == "scan")
    return loops.Loop.of(scan.params, len(scan.invars))


@pytest.mark.parametrize(
    "takes, ahead",
    [
        (2.4, []),  # the first product, 1.25 s long, hides more than half of it
        (2.6, [0]),
        (1.4, [1, 2]),  # the second one would begin when the first has ended
    ],
)
def test_gathers_are_asked_for_ahead_of_which_their_turn_hides_less_than_half(
    takes: float, ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One product stands before the gathers, one or three, which run one behind the other."""
    fake(takes, monkeypatch)

    def turn(x: jax.Array, weights: Any) -> Any:
        x = jnp.tanh(x @ x)
        for w in map(whole, weights[: 1 if takes > 2 else 3]):
            x = x + w * 2
        for _ in range(11):
            x = jnp.tanh(x @ x)
        return x, None

    loop = traced(turn, 3)
    gathers = [step for step in loop.steps if step.how]
    assert [gathers.index(step) for step in loop.early()] == ahead


@pytest.mark.parametrize(
    "takes, pairs", [((8.0,), False), ((14.0,), True), ((8.0, 8.0), True), ((4.0, 4.0), False)]
)
def test_turns_go_in_pairs_where_gathers_outlast_them(
    takes: tuple[float, ...], pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One behind the other, from their last readers on: eleven more products of a second each."""
    fake(takes[0], monkeypatch)

    def turn(x: jax.Array, weights: Any) -> Any:
        x = x @ sum(map(whole, weights))
        for _ in range(11):
            x = jnp.tanh(x @ x)
        return x, None

    loop = traced(turn, len(takes))
    assert loop.goes_in_pairs([step for step in loop.steps if step.how]) == pairs


def test_turns_stay_apart_where_xla_sums_once_what_they_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And runs their gathers beside products: a SparseCore's, which is ours, go in pairs."""

    def turn(state: Any, weights: Any) -> Any:
        x, *totals = state
        x = x @ whole(weights[0])
        for _ in range(11):
            x = jnp.tanh(x @ x)
        return (x, *(total + lax.psum(x, "x") for total in totals)), None

    for there, by_xla, totals, pairs in (
        (14.0, 0.0, 1, True),
        (0.0, 14.0, 0, True),
        (0.0, 14.0, 1, False),
    ):
        fake(there, monkeypatch)
        monkeypatch.setattr(collective_times, "beside_by_xla", lambda *_, of=by_xla: of)
        loop = traced(turn, 1, begin=lambda x, count=totals: (x, *[x] * count)).summed_once()
        assert loop.goes_in_pairs([step for step in loop.steps if step.how]) == pairs
