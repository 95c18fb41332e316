"""Groups on simulated tori."""

from pallas_collectives.topology import chips, torus_axes
from pallas_collectives.topology.groups import Group

NAMES = ("x", "y", "z")


def group_of(*sizes: int) -> Group:
    """All devices of a torus of these sizes."""
    plain = Group(NAMES[: len(sizes)], sizes)
    return Group(plain.axes, sizes, torus=torus_axes.of_mesh(plain, chips.SIMULATED))
