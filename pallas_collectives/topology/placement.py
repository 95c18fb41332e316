"""The placement of the mesh in scope: where each device is on its torus, and the ring order.

The devices are known while a collective is lowered, and not before. Simulated ones have no
coordinates; `torus(...)` places them.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from pallas_collectives.annotations import AnyMesh, Interpret
from pallas_collectives.errors import BackendError, ReachError
from pallas_collectives.topology import chips, reach, ring_orders, torus_axes
from pallas_collectives.topology.groups import Group
from pallas_collectives.topology.ring_orders import Place, Torus


@dataclasses.dataclass(frozen=True)
class Places:
    """The devices of a mesh, row-major over its axes, on their torus."""

    torus: Torus
    at: tuple[Place, ...]


_in_scope: contextvars.ContextVar[Places | None] = contextvars.ContextVar("places", default=None)
_platforms: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("for", default=())
_simulated = jax.make_user_context(None)


@contextlib.contextmanager
def torus(name: str) -> Iterator[None]:
    """Within this context simulated devices are placed as a TPU slice's; values stay the same.

    Nothing else changes: what the chip can do, and the times by which algorithms are chosen, are
    still those of simulated devices. To see a chip's own, give `explain` a mesh of that chip.

    Device k is the k-th of the slice, row-major over its chips, a chip's devices side by side.

    Args:
      name: generation and chips along each axis of the torus: "v5e:2x4", "7x:2x2x1".

    Raises:
      BackendError: an unknown slice.

    Example:
      `with torus("v5e:2x4"): gathered = jax.jit(gather)(x)` goes round the 2 x 4 chips.

    Example:
      >>> with pc.torus("v5e:2x4"):
      ...     pass
    """
    if not isinstance(name, str) or chips.slice_of(name) is None:
        known = ", ".join(chips.BY_NAME)
        raise BackendError(
            f"torus {name!r}",
            f"it must be GENERATION:AxBxC, a slice of one of {known}",
            "name a slice, such as 'v5e:2x4'",
        )
    with _simulated(name):
        yield


@contextlib.contextmanager
def scope(places: Places | None, platforms: Sequence[str] = ()) -> Iterator[None]:
    """Within this context the mesh's devices are at these places; None if they are unknown.

    platforms: for which a program is lowered, if that is known.
    """
    tokens = _in_scope.set(places), _platforms.set((*platforms,))
    try:
        yield
    finally:
        _in_scope.reset(tokens[0])
        _platforms.reset(tokens[1])


def elsewhere(interpret: Interpret) -> str:
    """Why a kernel, if it is simulated, cannot run where a program is lowered for; "" if it can."""
    others = {*_platforms.get()} - {"cpu"}
    if not interpret or not others:
        return ""
    return (
        f"it is lowered for {', '.join(sorted(others))}, and kernels for a mesh of CPU devices, or "
        "of none, are simulated, which only CPUs can run"
    )


def only_on_cpus() -> bool:
    """Whether a program is being lowered, for CPUs and nothing else."""
    return {*_platforms.get()} == {"cpu"}


_settled_later: contextvars.ContextVar[bool] = contextvars.ContextVar("later", default=False)


@contextlib.contextmanager
def settled_later() -> Iterator[None]:
    """Within this context a collective is only traced; its lowering asks who reaches whom."""
    token = _settled_later.set(True)
    try:
        yield
    finally:
        _settled_later.reset(token)


def are_settled_later() -> bool:
    """Whether a lowering asks later who reaches whom."""
    return _settled_later.get()


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """Within this context no mesh is in scope: JAX exchanges one for none, not for one of another
    size.
    """
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


def in_scope() -> Places | None:
    """Where the devices of the mesh in scope are; None where that is not known."""
    return _in_scope.get()


def of_mesh(mesh: AnyMesh) -> Places | None:
    """Where a mesh's devices are, each on the torus of its slice; slices of a job are alike.

    None for an abstract mesh, and for devices without coordinates.

    Raises:
      BackendError: more simulated devices than the slice that `torus` names has.
    """
    return _of_mesh(mesh, _simulated.value) if isinstance(mesh, Mesh) else None


@functools.lru_cache(maxsize=64)
def _of_mesh(mesh: Mesh, simulated: str | None) -> Places | None:
    devices = mesh.devices.reshape(-1).tolist()
    if devices[0].platform == "cpu" and simulated is not None:
        return _on_slice(simulated, [d.id for d in devices])
    if devices[0].platform != "tpu":
        return None
    chip = chips.of_kind(devices[0].device_kind)
    coordinates = [d.coords[: chip.dims] for d in devices[0].client.devices()]
    shape = tuple(1 + max(along) for along in zip(*coordinates, strict=True))
    there = Torus(shape, chip.wraps(shape))
    return Places(there, tuple((*d.coords[: chip.dims], d.core_on_chip) for d in devices))


def _on_slice(name: str, numbers: Sequence[int]) -> Places:
    found = chips.slice_of(name)
    assert found is not None, name
    chip, shape = found
    there = Torus(shape, chip.wraps(shape))
    if max(numbers) >= math.prod(shape) * chip.devices_per_chip:
        raise BackendError(
            f"a mesh with simulated device {max(numbers)}",
            f"torus {name!r} has {math.prod(shape) * chip.devices_per_chip} devices",
            "use fewer devices or a larger torus",
        )
    return Places(there, tuple(there.place(number, chip.devices_per_chip) for number in numbers))


def are_of_one_host(devices: Sequence[jax.Device]) -> bool:
    """Whether GPUs are, by JAX's numbers for what boots apart; simulated devices are."""
    return len({getattr(device, "slice_index", 0) for device in devices}) == 1


def device_groups(mesh: AnyMesh, group: Group) -> list[list[jax.Device]]:
    """The devices of each group that a collective over `group` has on a mesh, in order of rank."""
    if not isinstance(mesh, Mesh):
        raise BackendError(
            "backend='nccl'",
            "communicators need the devices, and the program is lowered for an abstract mesh",
            "lower it with shardings over a concrete mesh",
        )
    others = [a for a in mesh.axis_names if a not in group.axes]
    order = [mesh.axis_names.index(a) for a in (*others, *group.axes)]
    rows = np.transpose(mesh.devices, order).reshape(-1, math.prod(group.sizes))
    if group.index_groups is None:
        return [list(row) for row in rows]
    return [[row[i] for i in indices] for row in rows for indices in group.index_groups]


def arranged(group: Group) -> Group:
    """A group with the order in which its rings follow the wires of the mesh in scope.

    It also gets the torus axes that it lies on (see `torus_axes`), but not in `axis_index_groups`.
    A group does not change if it spans slices. It keeps lax's order, or that of its members in
    `axis_index_groups`, if that follows single links already, or if places are unknown; only on
    chips that reach some devices and not others it then gets the order of the torus that `lying`
    assumes.
    """
    places, mesh = in_scope(), jax.sharding.get_abstract_mesh()
    if places is not None and len(places.at) == mesh.size:
        return _arranged(group, places, tuple(mesh.shape.items()))
    if group.index_groups is not None:
        return group
    if reach.everywhere(chip := chips.current()):
        return dataclasses.replace(group, torus=torus_axes.of_mesh(group, chip))
    return _on(group, *lying(group, chip))


def lying(group: Group, chip: chips.Chip) -> tuple[Torus, Sequence[Sequence[Place]]]:
    """The torus of the whole slice, and the places of the devices that a group's axes join.

    Places are by number, a row for each group of the mesh in scope. If they are unknown, the mesh
    axes are taken for torus axes, each a ring or a line as an axis of so many devices is on the
    chip.
    """
    places, mesh = in_scope(), jax.sharding.get_abstract_mesh()
    if places is not None and len(places.at) == mesh.size:
        return places.torus, _rows(group.axes, places, tuple(mesh.shape.items()))
    there = Torus(group.sizes, chip.wraps(group.sizes))
    return there, [[there.place(number) for number in range(math.prod(group.sizes))]]


def sharing(group: Group, chip: chips.Chip) -> int:
    """How many hops go over the busiest link, each way, while all groups of the mesh go round."""
    if group.index_groups is not None or (group.torus and len(group.torus) > 1):
        return 1
    torus, rows = lying(group, chip)
    return ring_orders.sharing(torus, rows, group.order or range(group.size))


@functools.lru_cache(maxsize=256)
def _rows(
    joined: tuple[str, ...], places: Places, axes: tuple[tuple[str, int], ...]
) -> list[list[Place]]:
    names, sizes = zip(*axes, strict=True)
    others = [i for i, name in enumerate(names) if name not in joined]
    inner = [names.index(name) for name in joined]
    positions = np.arange(len(places.at)).reshape(sizes).transpose(*others, *inner)
    size = math.prod(sizes[i] for i in inner)
    return [[places.at[p] for p in row] for row in positions.reshape(-1, size).tolist()]


@functools.lru_cache(maxsize=256)
def _arranged(group: Group, places: Places, axes: tuple[tuple[str, int], ...]) -> Group:
    return _on(group, places.torus, _rows(group.axes, places, axes))


def _on(group: Group, torus: Torus, rows: Sequence[Sequence[Place]]) -> Group:
    if any(len(set(row)) < len(row) for row in rows):  # two slices have a place each of that name
        return group
    if group.index_groups is not None:
        rows = [[row[i] for i in members] for row in rows for members in group.index_groups]
    order = ring_orders.ring_order(torus, rows)
    cost = max(ring_orders.cost(torus, row, order) for row in rows)
    return dataclasses.replace(
        group,
        order=None if order == tuple(range(group.size)) else order,
        line=cost.line,
        torus=() if group.index_groups else torus_axes.on_wires(group, torus, rows),
    )


def reaches(pairs: reach.Pairs, group: Group, chip: chips.Chip) -> bool:
    """Whether devices of a group, by their numbers, reach each other, as far as is known here."""
    if reach.everywhere(chip) or are_settled_later():
        return True
    return reach.all_reach(chip, *lying(group, chip), pairs)


def check_ring(what: str, group: Group) -> None:
    """Raises ReachError for a kernel round a ring that the chip's devices cannot go round."""
    chip = chips.current()
    if not reaches(reach.ring(group), group, chip):
        raise unreachable(f"{what} over {group.size} devices as they are placed", chip)


def unreachable(what: str, chip: chips.Chip) -> ReachError:
    """The error for devices that cannot write to one another."""
    return ReachError(
        what,
        f"{chip.name} writes to devices at power-of-two offsets along one torus axis only",
        "another algorithm, or lax, serves where backend and algorithm are unset",
    )


def nearest(group: Group) -> reach.Pattern:
    """Who writes to whom where all goes from neighbour to neighbour: along all axes of the torus
    that a group lies on, where that can be; else along its line, or round its ring.
    """
    if group.torus and reaches(reach.torus(group), group, chips.current()):
        return reach.torus
    return reach.line if group.line else reach.ring
