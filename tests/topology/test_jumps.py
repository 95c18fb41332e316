"""Routes in jumps of 1, 2, 4, ... places: where they lead, and what links carry."""

import pytest

from pallas_collectives.topology import jumps

AXES = [(n, line) for n in (2, 3, 4, 5, 6, 7, 8, 12, 16, 28, 32) for line in (False, True)]


def places(n: int, line: bool) -> list[tuple[int, jumps.Route]]:
    """Every place with every route that begins there."""
    return [
        (place, route)
        for route in jumps.routes(n, line)
        for place in range(n)
        if route.parity in (None, place % 2)
        and (0 <= place + route.distance < n or not (line or n == 2))
    ]


@pytest.mark.parametrize("n, line", AXES)
def test_one_route_leads_from_each_place_to_each_other(n: int, line: bool) -> None:
    ends = [(place, (place + route.distance) % n) for place, route in places(n, line)]
    assert sorted(ends) == [(a, b) for a in range(n) for b in range(n) if a != b]


@pytest.mark.parametrize("n, line", AXES)
def test_jumps_are_powers_of_two_that_lead_there_straight(n: int, line: bool) -> None:
    for route in jumps.routes(n, line):
        assert sum(route.jumps) == route.distance
        assert all(abs(jump).bit_count() == 1 for jump in route.jumps)
        assert len({jump > 0 for jump in route.jumps}) == 1
        if not line and n > 2:  # half a ring would not say which way round
            assert all(2 * abs(jump) < n for jump in route.jumps)


@pytest.mark.parametrize("n, line", AXES)
def test_no_route_has_more_jumps_than_its_distance_has_powers_of_two(n: int, line: bool) -> None:
    """But that of half a ring, if one jump would lead there."""
    for route in jumps.routes(n, line):
        halves = 2 * abs(route.distance) == n and not (line or n == 2)
        least = abs(route.distance).bit_count()
        assert len(route.jumps) == (max(2, least) if halves else least)


@pytest.mark.parametrize("n, line", AXES)
def test_a_peer_is_a_jump_away_either_way_and_has_a_route_of_its_own(n: int, line: bool) -> None:
    lengths = jumps.lengths(n, line)
    assert lengths == tuple(-jump for jump in reversed(lengths))
    alone = {route.distance for route in jumps.routes(n, line) if len(route.jumps) == 1}
    assert alone == set(lengths)


@pytest.mark.parametrize("n, line", AXES)
def test_links_carry_the_least_that_they_can(n: int, line: bool) -> None:
    """n^2/8 of what a device has for one other, each way round; on a line n^2/4 in the middle."""
    straight = line or n == 2
    carried: dict[tuple[int, int], int] = {}
    for place, route in places(n, line):
        way = 1 if route.distance > 0 else -1
        for step in range(abs(route.distance)):
            link = (place + way * step) % n, way
            carried[link] = carried.get(link, 0) + 1
    least = n // 2 * (n - n // 2) if straight else -(-(n * n // 4) // 2)
    assert max(carried.values()) == least
