"""Which torus a group lies on, and when its collectives take all axes at once."""

import jax
import numpy as np
import pytest

from pallas_collectives.backends.fastest import reachable, torus_of
from pallas_collectives.replay import Machine
from pallas_collectives.topology import chips, placement, torus_axes
from pallas_collectives.topology.groups import Group
from tables_of_times import fastest

NAMES = ("x", "y", "z")


@pytest.mark.parametrize(
    "name, sizes, axes, found",
    [
        ("v5e:4x4", (16,), ("x",), [(4, True), (4, True)]),
        ("v5e:4x4", (2, 8), ("x", "y"), [(4, True), (4, True)]),
        ("v5e:16x16", (16, 16), ("x", "y"), [(16, False), (16, False)]),
        ("v5e:8x16", (8, 16), ("x", "y"), [(8, True), (16, False)]),
        ("v5e:4x4", (4, 4), ("x",), []),
        ("v5p:4x4x4", (4, 4, 4), ("y", "z"), [(4, False), (4, False)]),
        ("v5p:2x2x2", (8,), ("x",), [(2, False), (2, False), (2, False)]),
        ("7x:2x2x1", (8,), ("x",), [(2, False), (2, False), (2, False)]),
        ("v5e:4x4", (4, 4), ("y", "x"), [(4, True), (4, True)]),
    ],
)
def test_the_axes_of_a_torus_are_found(
    name: str, sizes: tuple[int, ...], axes: tuple[str, ...], found: list[tuple[int, bool]]
) -> None:
    machine = Machine.named(name)
    mesh = machine.mesh(dict(zip(NAMES, sizes, strict=False)))
    on = dict(zip(NAMES, sizes, strict=False))
    with (
        jax.sharding.use_abstract_mesh(mesh),
        placement.scope(machine.places(np.arange(mesh.size))),
    ):
        group = placement.arranged(Group(axes, tuple(on[a] for a in axes)))
    assert [(axis.size, axis.line) for axis in group.torus] == found


@pytest.mark.parametrize(
    "chip, sizes, lines",
    [
        (chips.SIMULATED, (4, 1, 3), [False, False]),
        (chips.BY_NAME["v6e"], (4, 1, 16), [True, False]),
        (chips.BY_NAME["v5p"], (4, 2, 8), [False, False, False]),
        (chips.BY_NAME["v5p"], (3, 1, 4), [True, True]),  # all axes close, or none
    ],
)
def test_without_places_mesh_axes_are_the_torus(
    chip: chips.Chip, sizes: tuple[int, ...], lines: list[bool]
) -> None:
    found = torus_axes.of_mesh(Group(NAMES, sizes), chip)
    assert [axis.axes for axis in found] == [
        (name,) for name, size in zip(NAMES, sizes, strict=True) if size > 1
    ]
    assert [axis.line for axis in found] == lines
    assert torus_axes.of_mesh(Group(("x",), (8,)), chip) == ()
    assert torus_axes.of_mesh(Group(("x", "y"), (2, 2), ((0, 1), (2, 3))), chip) == ()


@pytest.mark.parametrize(
    "name, op, nbytes, chosen",
    [
        ("v5e:16x16", "all_gather", 1 << 16, True),
        ("v5e:4x4", "all_gather", 1 << 20, False),  # a ring uses both links of a corner as well
        ("v5p:2x2x2", "all_gather", 1 << 20, True),
        ("v5p:2x2x2", "all_reduce", 4 << 10, False),  # latency
        ("v5p:2x2x2", "all_reduce", 8 << 16, True),  # 64 KiB a block
        ("v5p:2x2x2", "all_reduce", 8 << 20, True),
    ],
)
def test_when_all_axes_are_chosen(name: str, op: str, nbytes: int, chosen: bool) -> None:
    machine = Machine.named(name)
    sizes = {name: n for name, n in zip(NAMES, machine.shape, strict=False) if n > 1}
    mesh = machine.mesh(sizes)
    with (
        jax.sharding.use_abstract_mesh(mesh),
        placement.scope(machine.places(np.arange(mesh.size))),
    ):
        group, chip = (
            placement.arranged(Group(tuple(sizes), tuple(sizes.values()))),
            chips.current(),
        )
        reach = reachable(op, group, chip)
        on = torus_of(group, chip)
        best = fastest(op, nbytes, group.size, chip, reach, on)
    assert (best.partition(":")[0] == "torus") == chosen
