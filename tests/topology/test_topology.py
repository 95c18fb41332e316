"""Rings as integers."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import harness
import pallas_collectives as pc
from pallas_collectives.topology import groups as topology
from pallas_collectives.topology.groups import LEFT, RIGHT, Group

RINGS = st.tuples(st.integers(2, 64), st.booleans(), st.sampled_from([1, 2, 3, 4, 5, 16]))


@hypothesis.given(RINGS)
def test_every_chunk_reaches_every_device_exactly_once(ring: tuple[int, bool, int]) -> None:
    n, bidirectional, chunks = ring
    arrivals = [
        (chunk, (stream.direction * hop) % n)
        for stream in topology.streams(n, bidirectional=bidirectional, chunks=chunks)
        for chunk in range(chunks)
        for hop in range(1, stream.hops_of(chunk) + 1)
    ]
    assert sorted(arrivals) == [(chunk, d) for chunk in range(chunks) for d in range(1, n)]


@hypothesis.given(st.integers(2, 256), st.sampled_from([2, 3, 4, 5, 16]))
def test_both_directions_carry_the_same_load(n: int, chunks: int) -> None:
    streams = topology.streams(n, bidirectional=True, chunks=chunks)
    load = {stream.direction: sum(map(stream.hops_of, range(chunks))) for stream in streams}
    assert load[RIGHT] + load[LEFT] == chunks * (n - 1)
    assert abs(load[RIGHT] - load[LEFT]) == (chunks * (n - 1)) % 2
    assert max(stream.hops for stream in streams) == n // 2


@hypothesis.given(st.integers(1, 100), st.data())
@hypothesis.settings(deadline=None)
def test_wrap_is_modulo(n: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(-n, 2 * n - 1))
    assert topology.wrap(position, n) == position % n
    assert int(topology.wrap(np.int32(position), n)) == position % n


@hypothesis.given(st.lists(st.integers(1, 5), max_size=4), st.data())
@hypothesis.settings(deadline=None)
def test_a_number_is_where_it_is_row_major(sizes: list[int], data: st.DataObject) -> None:
    number = data.draw(st.integers(0, int(np.prod(sizes, dtype=int)) - 1))
    found = topology.unraveled(np.int32(number), sizes)
    assert tuple(map(int, found)) == np.unravel_index(number, sizes)


def table(group: Group) -> jax.Array | None:
    members = group.members()
    return None if members is None else jnp.asarray(members)


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
        ring = topology.Ring(group, table(group))
        flat = []
        for position in range(group.size):
            device = ring.device_id(position)
            value = 0
            for axis in axes:
                value = value * on.shape[axis] + device[axis]
            flat.append(value)
        own, outside = ring.me, group.position
        numbers = (own, outside, *flat)
        return jax.numpy.stack([jax.numpy.asarray(v, "int32") for v in numbers])[None]

    spec = PartitionSpec(("x", "y"))
    rows = jax.jit(jax.shard_map(names, mesh=on, in_specs=spec, out_specs=spec, check_vma=False))(
        np.zeros(6, np.float32)
    )
    for device, (own, outside, *numbers) in enumerate(np.asarray(rows)):
        coordinates = dict(zip(("x", "y"), divmod(device, 3), strict=True))
        mine = 0
        for axis in axes:
            mine = mine * on.shape[axis] + coordinates[axis]
        expected = next(g for g in groups if mine in g) if groups else tuple(range(group.size))
        assert tuple(numbers) == expected
        assert numbers[own] == mine
        assert outside == own


@pytest.mark.parametrize("axes", [("x",), ("y", "x")])
def test_an_order_moves_neighbours_and_numbers_nothing_anew(axes: tuple[str, ...]) -> None:
    on = harness.mesh(2, 3)
    n = int(np.prod([on.shape[a] for a in axes]))
    order = tuple(int(i) for i in np.random.default_rng(n).permutation(n))
    group = Group(axes, tuple(on.shape[a] for a in axes), order=order)

    def names(_: jax.Array) -> jax.Array:
        ring = topology.Ring(group, table(group))
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


@pytest.mark.parametrize("groups", [None, [[*range(k, 2048, 4)] for k in range(4)]])
@pytest.mark.parametrize("algorithm", ["direct", "bidirectional"])
def test_a_program_for_thousands_of_devices_is_no_larger_than_their_number(
    algorithm: str, groups: list[list[int]] | None
) -> None:
    """A row for each device would be 32 MiB of text, a row for each group's 8."""
    on = harness.tpu_mesh("v5p:8x16x16", {"x": 2048})
    spec = PartitionSpec("x")
    gather = jax.shard_map(
        lambda x: pc.all_gather(x, "x", axis_index_groups=groups, algorithm=algorithm)[0],
        mesh=on,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    where = jax.sharding.NamedSharding(on, spec)
    x = jax.ShapeDtypeStruct((8 * 2048, 128), "float32", sharding=where)
    assert len(jax.jit(gather).lower(x).as_text()) < 100 << 10


@hypothesis.given(RINGS)
def test_chunks_that_travel_furthest_have_the_first_turns(ring: tuple[int, bool, int]) -> None:
    n, bidirectional, chunks = ring
    for stream in topology.streams(n, bidirectional=bidirectional, chunks=chunks):
        order = [stream.chunk(turn) for turn in range(chunks)]
        assert sorted(order) == list(range(chunks))
        assert [stream.turn(chunk) for chunk in order] == list(range(chunks))
        hops = [stream.hops_of(chunk) for chunk in order]
        assert hops == sorted(hops, reverse=True)
