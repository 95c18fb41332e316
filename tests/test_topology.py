"""Rings as integers."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import harness
from pallas_collectives.kernels import topology
from pallas_collectives.kernels.topology import LEFT, RIGHT, Group

RINGS = st.tuples(st.integers(2, 64), st.booleans(), st.sampled_from([1, 2, 3, 4, 5, 16]))


@hypothesis.given(RINGS)
def test_every_part_reaches_every_device_exactly_once(ring: tuple[int, bool, int]) -> None:
    n, bidirectional, parts = ring
    arrivals = [
        (part, (lane.direction * hop) % n)
        for lane in topology.lanes(n, bidirectional=bidirectional, parts=parts)
        for part in range(parts)
        for hop in range(1, lane.hops_of(part) + 1)
    ]
    assert sorted(arrivals) == [(part, d) for part in range(parts) for d in range(1, n)]


@hypothesis.given(st.integers(2, 256), st.sampled_from([2, 3, 4, 5, 16]))
def test_both_directions_carry_the_same_load(n: int, parts: int) -> None:
    lanes = topology.lanes(n, bidirectional=True, parts=parts)
    load = {lane.direction: sum(map(lane.hops_of, range(parts))) for lane in lanes}
    assert load[RIGHT] + load[LEFT] == parts * (n - 1)
    assert abs(load[RIGHT] - load[LEFT]) == (parts * (n - 1)) % 2
    assert max(lane.hops for lane in lanes) == n // 2


@hypothesis.given(st.integers(1, 100), st.data())
@hypothesis.settings(deadline=None)
def test_wrap_is_modulo(n: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(-n, 2 * n - 1))
    assert topology.wrap(position, n) == position % n
    assert int(topology.wrap(np.int32(position), n)) == position % n


@pytest.mark.parametrize(
    "axes, groups",
    [
        (("x",), None),
        (("y",), None),
        (("x", "y"), None),
        (("y", "x"), None),
        (("x", "y"), ((5, 0, 3), (1, 4, 2))),
        (("y",), ((2,), (0,), (1,))),
    ],
)
def test_ring_positions_and_device_ids_name_the_devices_lax_means(
    axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...] | None
) -> None:
    on = harness.mesh(2, 3)
    group = Group(axes, tuple(on.shape[a] for a in axes), groups)

    def names(_: jax.Array) -> jax.Array:
        members = group.members()
        ring = topology.Ring(group, members)
        flat = []
        for position in range(group.size):
            device = ring.device_id(position)
            value = 0
            for axis in axes:
                value = value * on.shape[axis] + device[axis]
            flat.append(value)
        own = ring.me
        return jax.numpy.stack([jax.numpy.asarray(v, "int32") for v in (own, *flat)])[None]

    spec = PartitionSpec(("x", "y"))
    rows = jax.jit(jax.shard_map(names, mesh=on, in_specs=spec, out_specs=spec, check_vma=False))(
        np.zeros(6, np.float32)
    )
    for device, (own, *numbers) in enumerate(np.asarray(rows)):
        coordinates = dict(zip(("x", "y"), divmod(device, 3), strict=True))
        mine = 0
        for axis in axes:
            mine = mine * on.shape[axis] + coordinates[axis]
        expected = next(g for g in groups if mine in g) if groups else tuple(range(group.size))
        assert tuple(numbers) == expected
        assert numbers[own] == mine


@pytest.mark.parametrize("axes", [("x",), ("y", "x")])
def test_an_order_moves_neighbours_and_numbers_nothing_anew(axes: tuple[str, ...]) -> None:
    on = harness.mesh(2, 3)
    n = int(np.prod([on.shape[a] for a in axes]))
    order = tuple(int(i) for i in np.random.default_rng(n).permutation(n))
    group = Group(axes, tuple(on.shape[a] for a in axes), order=order)

    def names(_: jax.Array) -> jax.Array:
        ring = topology.Ring(group, group.members())
        flat = [ring.me, ring.place]
        for offset in range(-n + 1, n):
            right = ring.peer(offset)
            value = 0
            for axis in axes:
                value = value * on.shape[axis] + right[axis]
            flat += [ring.block(offset), value]
        return jax.numpy.stack([jax.numpy.asarray(v, "int32") for v in flat])[None]

    spec = PartitionSpec(("x", "y"))
    rows = jax.jit(jax.shard_map(names, mesh=on, in_specs=spec, out_specs=spec, check_vma=False))(
        np.zeros(6, np.float32)
    )
    for device, (me, place, *found) in enumerate(np.asarray(rows)):
        coordinates = dict(zip(("x", "y"), divmod(device, 3), strict=True))
        mine = 0
        for axis in axes:
            mine = mine * on.shape[axis] + coordinates[axis]
        assert me == mine
        assert order[place] == mine
        neighbours = [order[(place + offset) % n] for offset in range(-n + 1, n)]
        assert found == [value for number in neighbours for value in (number, number)]


@hypothesis.given(RINGS)
def test_parts_that_travel_furthest_have_the_first_turns(ring: tuple[int, bool, int]) -> None:
    n, bidirectional, parts = ring
    for lane in topology.lanes(n, bidirectional=bidirectional, parts=parts):
        order = [lane.part(turn) for turn in range(parts)]
        assert sorted(order) == list(range(parts))
        assert [lane.turn(part) for part in order] == list(range(parts))
        hops = [lane.hops_of(part) for part in order]
        assert hops == sorted(hops, reverse=True)
