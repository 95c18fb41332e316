"""The least times of exchanges in which some devices get or send more than others."""

import numpy as np
import pytest

from pallas_collectives.replay import Machine, bound


@pytest.mark.parametrize(("receivers", "links"), [(1, 6), (2, 10), (4, 16)])
def test_neighbours_have_fewer_links_together_than_by_themselves(
    receivers: int, links: int
) -> None:
    machine, sent = Machine.named("v5p:4x4x4"), np.zeros((64, 64))
    sent[:, :receivers] = 1e6
    want = receivers * (64 - receivers) / links * 1e6 / machine.link_capacity[0]
    for each in (sent, sent.T):
        got = bound("ragged_all_to_all", machine, np.arange(64)[None], each).wire
        assert got == pytest.approx(want)


@pytest.mark.parametrize("name", ["v5p:4x4x4", "v5p:2x3x2", "v6e:4x2", "7x:2x2x1", "v5e:16"])
def test_bounds_are_never_above_what_the_straight_ways_take(name: str) -> None:
    machine, rng = Machine.named(name), np.random.default_rng(0)
    n = machine.n_devices
    routes = machine.routes(*np.divmod(np.arange(n * n), n))
    for skew in range(4):
        sent = rng.random((n, n)) ** skew * rng.random(n) ** (4 * skew)
        for each in (sent, sent.T):
            load = np.zeros(machine.n_links)
            for hop in routes:
                np.add.at(load, hop[hop >= 0], each.reshape(-1)[hop >= 0])
            least = bound("ragged_all_to_all", machine, np.arange(n)[None], each).wire
            assert 0 < least <= (1 + 1e-9) * (load / machine.link_capacity).max()
