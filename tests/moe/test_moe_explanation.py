"""`moe.explain`: its figures are those of routings that are counted."""

import numpy as np
import pytest

from benchmarks import experts
from pallas_collectives import moe
from pallas_collectives.errors import CollectiveError


@pytest.mark.parametrize("n, total, k", [(2, 16, 2), (8, 64, 4), (16, 256, 8)])
def test_visits_are_those_of_a_balanced_routing(n: int, total: int, k: int) -> None:
    tokens, width = 2000, 512
    sent = experts.visits("balanced", n, tokens, total, k)
    found = moe.explain(tokens=tokens, width=width, k=k, num_experts=total, devices=n)
    remote = (sent.sum() - np.trace(sent)) / n
    assert found.visits * tokens == pytest.approx(remote, rel=0.03)
    assert found.ragged_rows == pytest.approx(sent.sum() / n, rel=0.03)
    words = 4 * tokens * k
    rows_alone = found.ragged_bytes - words * (n - 1) / n
    assert rows_alone == pytest.approx(found.visits * tokens * 2 * width)
    assert found.dense_bytes == (n - 1) * (tokens * 2 * width + words)
    assert f"{found.ratio:.2f} times" in str(found)


@pytest.mark.parametrize(
    "chip, n, tokens, chosen",
    [("v5e", 16, 4096, "slots"), ("v5p", 64, 4096, "ragged"), ("v5p", 64, 64, "slots")],
)
def test_it_says_what_is_chosen(chip: str, n: int, tokens: int, chosen: str) -> None:
    sizes = {"width": 7168, "k": 8, "num_experts": 256}
    found = moe.explain(tokens=tokens, devices=n, chip=chip, **sizes)
    assert f"on {chip}, along one axis, {chosen} is chosen" in str(found)
    assert found.slots_bytes - found.ragged_bytes == (n - 1) ** 2 / n * 4 * tokens * 8


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(CollectiveError, match="it must be one of v4"):
        moe.explain(tokens=8, width=8, k=2, num_experts=8, devices=4, chip="v3")
    with pytest.raises(CollectiveError, match="devices divides num_experts"):
        moe.explain(tokens=8, width=8, k=2, num_experts=10, devices=4)
