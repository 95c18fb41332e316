"""Two rings through a torus that share no link: where they are, and what fused products gain."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import pallas_collectives
from pallas_collectives.replay import Machine, replay
from pallas_collectives.topology import placement, two_rings
from pallas_collectives.topology.groups import Group


def on_torus(machine: Machine, sizes: dict[str, int]) -> Group:
    """All devices of a pod as one group, with what is known of their places."""
    mesh = machine.mesh(sizes)
    with (
        jax.sharding.use_abstract_mesh(mesh),
        placement.scope(machine.places(np.arange(mesh.size))),
    ):
        group = placement.arranged(Group(tuple(sizes), tuple(sizes.values())))
        return two_rings.of(group)


def around(ring: Sequence[int]) -> list[frozenset[int]]:
    """The hops of a ring, either way."""
    return [frozenset(hop) for hop in itertools.pairwise([*ring, ring[0]])]


def links_of(a: int, b: int) -> set[frozenset[int]]:
    """The links of a torus, whose devices are numbered row by row."""
    numbers = np.arange(a * b).reshape(a, b)
    ends = [(numbers, np.roll(numbers, -1, axis)) for axis in (0, 1)]
    return {
        frozenset(pair)
        for here, there in ends
        for pair in zip(here.ravel().tolist(), there.ravel().tolist(), strict=True)
    }


@pytest.mark.parametrize("odd", [0, 1])
def test_no_link_is_in_both_rings(odd: int) -> None:
    """All tori whose sides are both even, or both odd, up to 16."""
    sides = range(4 - odd, 17, 2)
    for a, b in itertools.product(sides, sides):
        along = Group(("x",), (a,)), Group(("y",), (b,))
        group = two_rings.of(Group(("x", "y"), (a, b), torus=along))
        assert group.order and group.second, (a, b)
        assert sorted(group.order) == sorted(group.second) == list(range(a * b))
        hops = (*around(group.order), *around(group.second))
        assert len(hops) == 2 * a * b and set(hops) == links_of(a, b)


@pytest.mark.parametrize(
    "pod, sizes",
    [
        ("v5e:16x16", {"x": 16, "y": 16}),
        ("v5e:16x16", {"x": 256}),
        ("v6e:16x16", {"x": 8, "y": 32}),
    ],
)
def test_devices_that_fill_a_torus_have_two(pod: str, sizes: dict[str, int]) -> None:
    """Whatever the axes of the mesh: every hop of both is one link."""
    machine = Machine.named(pod)
    group, places = on_torus(machine, sizes), machine.places(np.arange(256))
    assert group.order and group.second and not group.line
    for ring in (group.order, group.second):
        assert {places.torus.hops(places.at[a], places.at[b]) for a, b in around(ring)} == {1}


@pytest.mark.parametrize(
    "pod, sizes",
    [
        ("v5e:4x4", {"x": 4, "y": 4}),  # lines: a corner has two links
        ("v5e:16x4", {"x": 16, "y": 4}),
        ("v5e:16", {"x": 16}),
        ("v5p:4x4x4", {"x": 4, "y": 4, "z": 4}),
        ("7x:2x2x1", {"x": 2, "y": 2, "core": 2}),
    ],
)
def test_others_have_one(pod: str, sizes: dict[str, int]) -> None:
    assert on_torus(Machine.named(pod), sizes).second is None


@pytest.mark.parametrize(
    "pod, sizes, several",
    [
        ("v5e:16x16", {"x": 16, "y": 16}, True),
        ("v6e:16x16", {"x": 16, "y": 16}, True),
        ("v6e:4x4", {"x": 4, "y": 4}, False),  # lines
        ("v6e:8x16", {"x": 8, "y": 16}, False),
        ("v4:4x4x4", {"x": 4, "y": 4, "z": 4}, True),
        ("7x:4x4x4", {"x": 4, "y": 4, "z": 4, "core": 2}, True),
    ],
)
def test_tracing_takes_as_many_for_granted_as_there_are(
    pod: str, sizes: dict[str, int], several: bool
) -> None:
    """Whether a product is fused is decided before the devices' places are known."""
    machine = Machine.named(pod)
    group = Group(("x", "y"), (sizes["x"], sizes["y"]))
    mesh = machine.mesh(sizes)
    for places in (None, machine.places(np.arange(mesh.size))):
        with jax.sharding.use_abstract_mesh(mesh), placement.scope(places):
            assert (two_rings.of(placement.arranged(group)).second is not None) == several


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("pod", ["v4:4x4x4", "7x:4x4x4"])
def test_products_use_all_links(pod: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modelled: where the wire takes longer, two rings take little more than half the time."""
    machine = Machine.named(pod)
    axes = {"x": 4, "y": 4, "z": 4} | ({"core": 2} if pod.startswith("7x") else {})
    rows, depth, columns = (1024, 2048, 128) if op == "all_gather_matmul" else (1024, 128, 2048)
    rows_of_x = rows * (1 if op == "all_gather_matmul" else 16)

    def report() -> Any:
        function = jax.shard_map(
            lambda x, w: getattr(pallas_collectives, op)(x, w, ("x", "y"), algorithm="fused"),
            mesh=machine.mesh(axes),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        shapes = [
            jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows_of_x, depth), (depth, columns))
        ]
        return replay(function, *shapes, machine=machine)

    two = report()
    assert not two.stuck and not two.leftovers
    monkeypatch.setattr(two_rings, "of", lambda group: group)
    assert two.time < 0.6 * report().time
