"""Ring orders on tori, as pure integers."""

import itertools
import math
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import pytest

from pallas_collectives.topology import chips, ring_orders
from pallas_collectives.topology.ring_orders import Place, Torus


def all_places(shape: tuple[int, ...], cores: int = 1) -> list[Place]:
    return [tuple(place) for place in itertools.product(*map(range, (*shape, cores)))]


def has_cycle(shape: tuple[int, ...], wraps: tuple[bool, ...], cores: int) -> bool:
    """Whether a ring of single links exists.

    A grid without wraps is two-coloured: a cycle alternates, so an odd number of chips has none.
    """
    long = [axis for axis, extent in enumerate(shape) if extent > 1]
    if cores == 2 or not long:
        return True
    if len(long) == 1:
        return shape[long[0]] == 2 or wraps[long[0]]
    return math.prod(shape) % 2 == 0 or any(wraps[axis] for axis in long)


def check(torus: Torus, places: list[Place], closes: bool) -> tuple[int, ...]:
    order = ring_orders.ring_order(torus, [places])
    assert sorted(order) == list(range(len(places)))
    hops = [torus.hops(places[a], places[b]) for a, b in itertools.pairwise(order)]
    assert set(hops) <= {1}
    closing = torus.hops(places[order[-1]], places[order[0]])
    assert closing <= 1 if closes else closing > 1
    assert ring_orders.cost(torus, places, order).closing == closing
    return order


@pytest.mark.parametrize("name, longest", [("v5e", 16), ("v6e", 16), ("v4", 8), ("v5p", 8)])
def test_every_slice_of_a_generation_has_a_ring_of_single_links(name: str, longest: int) -> None:
    chip = chips.BY_NAME[name]
    sides = [1, 2, 4, 8, 16][: 2 + longest.bit_length() - 2]
    for shape in itertools.combinations_with_replacement(sides, chip.dims):
        torus = Torus(shape, chip.wraps(shape))
        check(torus, all_places(shape), has_cycle(shape, torus.wraps, 1))


TORI = st.one_of(
    st.tuples(*[st.tuples(st.integers(1, 16), st.booleans())] * 2),
    st.tuples(*[st.tuples(st.integers(1, 8), st.booleans())] * 3),
)


@hypothesis.given(TORI, st.sampled_from([1, 2]))
@hypothesis.settings(deadline=None)
def test_a_torus_has_a_ring_of_single_links_where_there_can_be_one(
    sides: tuple[tuple[int, bool], ...], cores: int
) -> None:
    shape, wraps = zip(*sides, strict=True)
    check(Torus(shape, wraps), all_places(shape, cores), has_cycle(shape, wraps, cores))


def test_every_two_dimensional_torus_up_to_16_by_16() -> None:
    for shape in itertools.product(range(1, 17), repeat=2):
        for wraps in itertools.product([False, True], repeat=2):
            check(Torus(shape, wraps), all_places(shape), has_cycle(shape, wraps, 1))


@hypothesis.given(TORI, st.data())
@hypothesis.settings(deadline=None)
def test_any_box_within_a_torus_in_any_lax_order(
    sides: tuple[tuple[int, bool], ...], data: st.DataObject
) -> None:
    shape, wraps = zip(*sides, strict=True)
    ranges = []
    for extent, wrap in sides:  # where an axis wraps, a box may lie across its end
        most = extent // 2 if wrap and data.draw(st.booleans()) else extent
        size = extent if wrap and most == extent else data.draw(st.integers(1, max(1, most)))
        start = data.draw(st.integers(0, extent - 1 if wrap else extent - size))
        ranges.append([(start + i) % extent for i in range(size)])
    places = [(*chip, 0) for chip in itertools.product(*ranges)]
    places = data.draw(st.permutations(places)) if len(places) < 30 else places[::-1]
    box = tuple(map(len, ranges))
    full = tuple(w and b == s for w, b, s in zip(wraps, box, shape, strict=True))
    torus, closes = Torus(shape, wraps), has_cycle(box, full, 1)
    if closes or sum(size > 1 for size in box) == 1:
        check(torus, places, closes)
    else:  # all sides odd: a snake's ends are far apart, and any other order may do as well
        order = ring_orders.ring_order(torus, [places])
        assert sorted(order) == list(range(len(places)))
        lax_order = range(len(places))
        assert ring_orders.cost(torus, places, order) <= ring_orders.cost(torus, places, lax_order)


@pytest.mark.parametrize("shape", [(4, 4, 4), (2, 2, 1), (2, 1, 1), (8, 8, 8)])
def test_chips_of_two_devices_use_each_link_between_chips_once(shape: tuple[int, ...]) -> None:
    chip = chips.BY_NAME["7x"]
    torus, places = Torus(shape, chip.wraps(shape)), all_places(shape, 2)
    order = check(torus, places, True)
    ring = [places[i] for i in order]
    between = Counter(
        (a[:-1], b[:-1])
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)
        if a[:-1] != b[:-1]
    )
    assert set(between.values()) == {1}
    assert len(between) == math.prod(shape)


def test_lax_order_is_kept_where_none_is_better() -> None:
    for shape, wraps in (
        ((16, 1), (True, False)),
        ((1, 8), (False, False)),
        ((2, 1), (False,) * 2),
    ):
        n = math.prod(shape)
        assert ring_orders.ring_order(Torus(shape, wraps), [all_places(shape)]) == tuple(range(n))
    torus = Torus((4, 4), (False, False))
    snake = [(0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0)]
    assert ring_orders.ring_order(torus, [snake]) == (0, 1, 2, 3)
    scattered = [(0, 0, 0), (2, 3, 0), (1, 1, 0), (3, 3, 0)]  # no box
    assert ring_orders.ring_order(torus, [scattered]) == (0, 1, 2, 3)


def test_a_line_is_told_from_a_ring_by_its_closing_hop() -> None:
    def is_line(shape: tuple[int, ...], wraps: tuple[bool, ...]) -> bool:
        torus, places = Torus(shape, wraps), all_places(shape)
        order = ring_orders.ring_order(torus, [places])
        return ring_orders.cost(torus, places, order).line

    assert is_line((4, 1), (False, False))
    assert is_line((1, 8), (False, False))
    assert not is_line((16, 1), (True, False))
    assert not is_line((4, 4), (False, False))
    assert not is_line((3, 3), (False, False))  # closes over 4 links: less than half of 9
    assert not is_line((2, 1), (False, False))


def test_strides_close_where_the_axis_does() -> None:
    torus = Torus((16, 1), (True, False))
    fourth = [(x, 0, 0) for x in (8, 0, 12, 4)]
    order = ring_orders.ring_order(torus, [fourth])
    cost = ring_orders.cost(torus, fourth, order)
    assert (cost.longest, cost.closing, cost.total) == (4, 4, 16)
    assert not cost.line
    third = [(x, 0, 0) for x in (0, 2, 4, 6)]
    assert ring_orders.cost(torus, third, ring_orders.ring_order(torus, [third])).line


def test_groups_share_the_order_that_is_best_for_the_worst() -> None:
    torus = Torus((4, 4), (False, False))
    left = [(x, y, 0) for x in range(4) for y in (0, 1)]
    right = [(x, y, 0) for x in range(4) for y in (2, 3)]
    order = ring_orders.ring_order(torus, [left, right])
    assert {ring_orders.cost(torus, group, order).longest for group in (left, right)} == {1}
    turned = [right[i] for i in (1, 0, 2, 3, 4, 5, 6, 7)]
    shared = ring_orders.ring_order(torus, [left, turned])
    worst = max(ring_orders.cost(torus, group, shared) for group in (left, turned))
    for other in (order, ring_orders.ring_order(torus, [turned]), tuple(range(8))):
        assert worst <= max(ring_orders.cost(torus, group, other) for group in (left, turned))


@pytest.mark.parametrize("wraps, stride, shared", [(True, 1, 1), (True, 2, 2), (False, 4, 4)])
def test_groups_whose_devices_lie_apart_share_the_links_between(
    wraps: bool, stride: int, shared: int
) -> None:
    """Each `stride`th of 8 chips in a row is in a group; as many groups pass over each link."""
    torus = Torus((8, 1), (wraps, False))
    groups = [[(i, 0, 0) for i in range(first, 8, stride)] for first in range(stride)]
    assert ring_orders.sharing(torus, groups, range(8 // stride)) == shared
    assert ring_orders.sharing(torus, groups[:1], range(8 // stride)) == 1
    cores = [[(*chip, core) for *chip, _ in groups[0]] for core in range(2)]
    assert ring_orders.sharing(torus, cores, range(8 // stride)) == 1, "as the tables have it"


def test_the_pictures_in_the_docstring_are_the_orders() -> None:
    torus = Torus((4, 4), (False, False))
    order = ring_orders.ring_order(torus, [all_places((4, 4))])
    rows = ["".join(f"{order.index(4 * x + y):4}" for y in range(4)).rstrip() for x in range(4)]
    assert all(row in (ring_orders.__doc__ or "") for row in rows), "\n".join(rows)
    torus = Torus((2, 2), (False, False))
    order = ring_orders.ring_order(torus, [all_places((2, 2), 2)])
    rows = [
        "   ".join(
            f"{order.index(4 * x + 2 * y)},{order.index(4 * x + 2 * y + 1)}" for y in range(2)
        )
        for x in range(2)
    ]
    assert all(row in (ring_orders.__doc__ or "") for row in rows), "\n".join(rows)
