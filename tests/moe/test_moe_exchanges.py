"""Which exchange is chosen, and which way tokens then go; what that puts on the links."""

import math
from typing import Any

import jax
import numpy as np
import pytest

import harness
from pallas_collectives import moe
from pallas_collectives.backends import counters
from pallas_collectives.backends.plans import How
from pallas_collectives.errors import AlgorithmError
from pallas_collectives.moe import exchanges

PALLAS = How("pallas")


def chosen(
    sizes: tuple[int, ...],
    tokens: int,
    *,
    wanted: str = "auto",
    how: How = PALLAS,
    rows: int | None = None,
    reaches_all: bool = True,
) -> str:
    """For 8 of 256 experts."""
    options: dict[str, Any] = {"tokens": tokens, "experts": 256, "k": 8, "rows": rows}
    return exchanges.choose(wanted, how, sizes, **options, reaches_all=reaches_all)


def test_visits_are_those_that_are_drawn() -> None:
    rng, n, experts, k = np.random.default_rng(0), 8, 32, 3
    drawn = np.argsort(rng.random((4000, experts)), axis=1)[:, :k] // (experts // n)
    away = np.mean([len(set(row) - {0}) for row in drawn])
    assert exchanges.visits(n, experts, k) == pytest.approx(away, rel=0.03)


@pytest.mark.parametrize("line", [False, True])
@pytest.mark.parametrize("n", [4, 8, 16])
def test_a_gather_is_chosen_where_its_busiest_link_carries_less(n: int, line: bool) -> None:
    """Held against every link of a ring or a line, by the shorter way, of all pairs alike."""
    straight, gathered = np.zeros(n), np.zeros(n)  # on each link to the right
    for source in range(n):
        for target in range(n):
            right = (target - source) % n
            ways = [(1.0, right)] if line and target > source else []
            if not line and right and right <= n / 2:
                ways = [(0.5 if 2 * right == n else 1.0, right)]
            for share, hops in ways:
                straight[[(source + i) % n for i in range(hops)]] += share
        reach = n - 1 - source if line else (n - 1) / 2
        for i in range(math.ceil(reach)):
            gathered[(source + i) % n] += min(1.0, reach - i)
    for visited in np.linspace(0.05, n - 1, 57):
        want = gathered.max() < straight.max() * visited / (n - 1)
        if not math.isclose(gathered.max(), straight.max() * visited / (n - 1), rel_tol=0.01):
            assert exchanges.gathers(n, [(n, line)], visited) == want


@pytest.mark.parametrize(
    "sizes, tokens, options, want",
    [
        ((16,), 16, {}, "slots"),  # a ring on which copies share their way
        ((16,), 4096, {}, "slots"),
        ((16,), 4096, {"rows": 10_000}, "ragged"),  # no room for everyone's tokens
        ((16,), 64, {"rows": 1000}, "slots"),
        ((16,), 64, {"reaches_all": False}, "slots"),  # by a gather
        ((4, 4, 4), 64, {}, "slots"),
        ((64,), 64, {}, "slots"),
        ((4, 4, 4), 4096, {}, "ragged"),
        ((4, 4, 4), 64, {"reaches_all": False}, "ragged"),
        ((16,), 64, {"how": How("xla")}, "dense"),
        ((16,), 64, {"how": How("nccl")}, "dense"),
        ((16,), 64, {"how": How("pallas", algorithm="ring")}, "ragged"),
        ((1,), 64, {}, "dense"),
        ((16,), 64, {"wanted": "dense"}, "dense"),
    ],
)
def test_the_exchange(
    sizes: tuple[int, ...], tokens: int, options: dict[str, Any], want: str
) -> None:
    assert chosen(sizes, tokens, **options) == want


def test_what_is_no_exchange_is_refused() -> None:
    with pytest.raises(AlgorithmError, match="'auto' or one of ragged, slots, dense"):
        chosen((16,), 64, wanted="sparse")
    with pytest.raises(AlgorithmError, match="has no algorithms to choose from"):
        chosen((16,), 64, wanted="slots", how=How("pallas", algorithm="direct"))


def test_few_tokens_take_one_kernel_there_and_two_back() -> None:
    """No counts ahead: choices and tokens, then weights, then answers."""
    mesh, (n, tokens, k, experts) = harness.mesh(4), (4, 8, 2, 16)

    def layer(x: Any, chosen: Any, weights: Any) -> Any:
        rows, plan = moe.dispatch(x, chosen, "x", num_experts=experts, backend="pallas")
        return moe.combine(rows, weights, plan, "x", backend="pallas")

    shapes = [(n, tokens, 128), (n, tokens, k), (n, tokens, k)]
    dtypes = "float32", "int32", "float32"
    given = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True)]
    before = counters.counts()
    harness.per_device(layer, mesh).lower(*given)
    built = {k: v - before.get(k, 0) for k, v in counters.counts().items()}
    served = {(op, name and name.partition(":")[0]) for (op, _, name), v in built.items() if v}
    assert {("moe", "slots, with choices"), ("moe", "slots, back")} <= served
    assert {op for op, _ in served} == {"moe", "all_gather"}
