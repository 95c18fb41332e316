"""The rule of reach on places, and that every kernel which is chosen keeps to it."""

import itertools

import pytest

from pallas_collectives import chips, reach
from pallas_collectives.kernels.physical import Torus

V5E, V5P = chips.BY_NAME["v5e"], chips.BY_NAME["v5p"]


@pytest.mark.parametrize(
    ("a", "b", "reached"),
    [
        ((0, 0, 0), (0, 0, 0), True),
        ((0, 0, 0), (0, 1, 0), True),
        ((0, 0, 0), (0, 4, 0), True),
        ((0, 0, 0), (0, 3, 0), False),
        ((0, 1, 0), (0, 15, 0), True),  # two the other way round
        ((0, 0, 0), (0, 13, 0), False),
        ((0, 5, 0), (3, 5, 0), False),  # that axis does not close
        ((0, 5, 0), (2, 5, 0), True),
        ((0, 0, 0), (1, 1, 0), False),  # diagonal
        ((0, 15, 0), (1, 0, 0), False),  # one apart in device numbers, diagonal
    ],
)
def test_v5e_reaches_powers_of_two_along_one_axis(
    a: tuple[int, ...], b: tuple[int, ...], reached: bool
) -> None:
    there = Torus((4, 16), V5E.wraps((4, 16)))
    assert there.wraps == (False, True)
    assert reach.reaches(V5E, there, a, b) is reached
    assert reach.reaches(V5E, there, b, a) is reached


def test_others_reach_all() -> None:
    there = Torus((3, 3, 3), (False,) * 3)
    places = [(*chip, 0) for chip in itertools.product(range(3), repeat=3)]
    assert all(reach.reaches(V5P, there, a, b) for a, b in itertools.product(places, repeat=2))
