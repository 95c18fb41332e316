"""Collectives over devices of several slices: kernels inside each slice, lax between slices.

A slice is what one network of links joins: a pod or a part of one. Kernels write to devices of
their own slice; XLA sends over the data-centre network between slices. So a collective over a group
that spans slices goes in steps: those "inside" are kernels, those "across" are lax's own:

    all_reduce        scatter inside, reduce across, gather inside
    all_gather        gather across, gather inside: each block crosses to a slice once
    reduce_scatter    scatter inside, scatter across: each sum crosses to a slice once

Every device exchanges across with those at its own position in the other slices. Other collectives
over such a group, groups (`axis_index_groups`) that reach into several slices, and groups that have
one device in each, are left to lax and counted (`fallback_counts`).

The devices say which of them share a slice (`slice_index`); they are known while a collective is
lowered. Or `across_slices` says it. All of this stands above a backend's canonical collectives (see
`backends.canonical`), so types and gradients are lax's.
"""

import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import all_gather as lax_all_gather  # as it is, whatever `override_lax` puts there
from jax.lax import pmax as lax_pmax
from jax.lax import pmin as lax_pmin
from jax.lax import psum as lax_psum
from jax.lax import psum_scatter as lax_psum_scatter
from jax.sharding import Mesh

from pallas_collectives.annotations import AnyMesh
from pallas_collectives.backends import counters, xla
from pallas_collectives.backends.plans import How, Plan
from pallas_collectives.errors import AlgorithmError, SliceError, UnboundAxisError
from pallas_collectives.topology import placement
from pallas_collectives.topology.groups import Group

ACROSS = "across slices"  # how `counts` names lax's part
_marked = jax.make_user_context(None)
_mesh: contextvars.ContextVar[Any] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def across_slices(*axes: str) -> Iterator[None]:
    """Within this context steps along these mesh axes lead to other slices.

    Use it where devices do not report their slice, such as simulated ones. Collectives over the
    other axes alone do not change. Contexts do not add up: only the innermost counts. Within
    `across_slices()` there is one slice, whatever the devices say.

    Example, on two slices of 4:
      mesh = jax.make_mesh((2, 4), ("dcn", "x"))
      with pallas_collectives.across_slices("dcn"):
          ...  # psum(x, ("dcn", "x")): scatter and gather over "x" by kernels, lax over "dcn"

    Raises:
      SliceError: a value that is not an axis name, or a repeated name.

    Example:
      >>> with pc.across_slices("dcn"):
      ...     pass
    """
    if len(set(map(str, axes))) < len(axes) or not all(isinstance(axis, str) for axis in axes):
        rule = "they must be different names of mesh axes"
        raise SliceError(f"across_slices{axes}", rule, "write it like across_slices('dcn')")
    with _marked(axes):
        yield


def marked() -> tuple[str, ...] | None:
    """The axes that `across_slices` names; None outside of it.

    Raises:
      UnboundAxisError: the mesh in scope lacks one of them.
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    for axis in _marked.value or ():
        if axis not in names:
            raise UnboundAxisError(
                f"across_slices({axis!r})",
                f"the mesh in scope has the axes {names}",
                "name axes of the mesh, or use across_slices() around what runs on another mesh",
            )
    return _marked.value


@contextlib.contextmanager
def scope(mesh: AnyMesh) -> Iterator[None]:
    """Within this context, a lowering, these are the mesh's devices; None if they are unknown."""
    token = _mesh.set(mesh if isinstance(mesh, Mesh) else None)
    try:
        yield
    finally:
        _mesh.reset(token)


class Split(NamedTuple):
    """A group that spans slices.

    Attributes:
      inside: the devices of each slice; each slice is a ring.
      across: the devices at one position of every slice.
      order: row `s * inside.size + j` is where lax has the device at position j of slice s.
    """

    inside: Group
    across: Group
    order: tuple[int, ...]

    @property
    def slices(self) -> int:
        """Slices that the group has devices in."""
        return self.across.size

    @property
    def minor(self) -> bool:
        """Whether neighbours in lax's order are at one position of different slices."""
        return self.order == tuple(
            np.arange(len(self.order)).reshape(-1, self.slices).T.reshape(-1).tolist()
        )


def split(group: Group, slice_of: np.ndarray) -> Split | None:
    """The parts of a group whose devices lie in slices; None where it lies within one.

    Args:
      group: the devices.
      slice_of: the slice of each device, an array over the group's axes.

    Raises:
      SliceError: the group cannot be served in two steps: see the module.
    """
    numbers = slice_of.reshape(-1)
    rows = group.index_groups or (tuple(range(numbers.size)),)
    if all(len(set(numbers[list(row)])) == 1 for row in rows):
        return None
    if group.index_groups is not None:
        raise _not_in_steps(group, "its axis_index_groups reach into several slices")
    members = [np.flatnonzero(numbers == s).tolist() for s in dict.fromkeys(numbers.tolist())]
    count = len(members[0])
    if len({len(row) for row in members}) > 1:
        raise _not_in_steps(group, "it has more devices in one slice than in another")
    if count == 1:
        raise _not_in_steps(group, "no two of its devices are in the same slice")
    order = tuple(itertools.chain(*members))
    within = [bool(np.all(np.diff(slice_of, axis=a) == 0)) for a in range(slice_of.ndim)]
    if math.prod(n for n, same in zip(group.sizes, within, strict=True) if same) == count:
        inside, across = _along(group, within), _along(group, [not same for same in within])
    else:
        inside = Group(group.axes, group.sizes, tuple(map(tuple, members)))
        across = Group(group.axes, group.sizes, tuple(zip(*members, strict=True)))
    return Split(inside, across, order)


def obstacle(group: Group, axes: tuple[str, ...] | None) -> str:
    """Why no kernel by itself serves a group, its slices as of `slices`; "" if one does."""
    try:
        within = split(group, slices(group, axes)) is None
    except SliceError as error:
        return str(error)
    return "" if within else "the devices lie in several slices"


def _along(group: Group, wanted: list[bool]) -> Group:
    """The group over some of its axes."""
    kept = [i for i, w in enumerate(wanted) if w]
    return Group(tuple(group.axes[i] for i in kept), tuple(group.sizes[i] for i in kept))


def _not_in_steps(group: Group, rule: str) -> SliceError:
    return SliceError(
        f"a group over {group.axes}, across slices",
        f"{rule}; only XLA's own collectives go between slices",
        "lax serves where backend and algorithm are unset",
    )


class InSlices:
    """A backend module of kernels, for groups that may span slices; the same functions.

    Those that go in steps across slices are methods; the others serve groups within one slice only.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, op: str) -> Callable[..., jax.Array]:
        function = getattr(self._kernels, op)

        def serve(*args: Any, how: How, **params: Any) -> jax.Array:
            group = next(a for a in args if isinstance(a, Group))
            if _parts(group, how) is not None:
                raise _not_in_steps(
                    group,
                    "this collective cannot be split into steps inside slices and across them",
                )
            return function(*args, how=how, **params)

        return serve

    def all_gather(self, x: jax.Array, group: Group, *, axis: int, how: How) -> jax.Array:
        """Sends each block to the same position in the other slices, then gathers all inside."""
        parts = _parts(group, how)
        if parts is None:
            return self._kernels.all_gather(x, group, axis=axis, how=how)
        blocks = _by_lax("all_gather", lax_all_gather, parts, axis=axis)(x)  # a new axis of slices
        if parts.minor:
            blocks = _merged(blocks, axis)
            return self._kernels.all_gather(blocks, parts.inside, axis=axis, how=how)
        blocks = self._kernels.all_gather(blocks, parts.inside, axis=axis + 1, how=how)
        return _merged(_reordered(blocks, axis, np.argsort(parts.order)), axis)

    def reduce_scatter(self, x: jax.Array, group: Group, *, axis: int, how: How) -> jax.Array:
        """Sums inside the blocks for this position in every slice, then sums them across."""
        parts = _parts(group, how)
        if parts is None:
            return self._kernels.reduce_scatter(x, group, axis=axis, how=how)
        _check_order(group, how)
        wire = _wide(x, how)
        if parts.minor:
            sums = self._kernels.reduce_scatter(wire, parts.inside, axis=axis, how=how)
            sums = _split(sums, axis, parts.slices)
        else:
            blocks = _split(wire, axis, parts.slices)
            blocks = _reordered(blocks, axis, np.array(parts.order))
            sums = self._kernels.reduce_scatter(blocks, parts.inside, axis=axis + 1, how=how)
        scatter = _by_lax("psum_scatter", lax_psum_scatter, parts, scatter_dimension=axis)
        return scatter(sums).astype(x.dtype)

    def all_reduce(self, x: jax.Array, group: Group, *, op: str, how: How) -> jax.Array:
        """Reduces inside to a block a device, reduces each block across, and gathers inside.

        For a maximum or minimum each device gets the slice's whole result, and takes its block.
        """
        parts = _parts(group, how)
        if parts is None:
            return self._kernels.all_reduce(x, group, op=op, how=how)
        _check_order(group, how)
        if how.algorithm is not None:
            raise AlgorithmError(
                f"algorithm={how.algorithm!r} for {counters.lax_name('all_reduce')} across slices",
                "inside a slice psum_scatter and all_gather serve, with their own algorithms",
                "leave algorithm=None",
            )
        n = parts.inside.size
        wire = _wide(x, how)
        axis = next((a for a, size in enumerate(x.shape) if size % n == 0), None)
        if axis is None:  # no dimension can be cut into blocks
            axis, wire = 0, wire.reshape(-1)
            wire = jnp.pad(wire, (0, -wire.size % n))
        if op == "sum":
            block = self._kernels.reduce_scatter(wire, parts.inside, axis=axis, how=how)
            block = _by_lax("psum", lax_psum, parts)(block)
        else:
            whole = self._kernels.all_reduce(wire, parts.inside, op=op, how=how)
            block = _own_block(whole, parts.inside, axis)
            block = _by_lax(f"p{op}", {"max": lax_pmax, "min": lax_pmin}[op], parts)(block)
        whole = self._kernels.all_gather(block, parts.inside, axis=axis, how=how)
        if whole.shape != x.shape:
            whole = whole[: x.size].reshape(x.shape)
        return whole.astype(x.dtype)


def _check_order(group: Group, how: How) -> None:
    """Sums inside slices first are in another order than that of the ranks."""
    if how.order is not None:
        raise _not_in_steps(group, f"its sum must be in order={how.order!r}")


def _parts(group: Group, how: How) -> Split | None:
    return split(group, slices(group, how.across))


def slices(group: Group, axes: tuple[str, ...] | None) -> np.ndarray:
    """The slice of each device, an array over the group's axes.

    Args:
      group: the devices.
      axes: the mesh axes that lead to other slices; None to ask the devices, where they are known.

    Raises:
      SliceError: groups side by side on the mesh lie in slices in different ways.
    """
    if axes is None and _mesh.get() is not None:
        return _of_devices(group, _mesh.get())
    return _numbered(group, axes or ())


def one_host_has(group: Group) -> bool:
    """Whether GPUs are of one host, in each group like this one on the mesh in scope.

    Where no devices are known, whether all GPUs are.
    """
    mesh = _mesh.get()
    groups = [jax.devices()] if mesh is None else placement.device_groups(mesh, group)
    return all(map(placement.are_of_one_host, groups))


def _numbered(group: Group, axes: tuple[str, ...]) -> np.ndarray:
    number = np.zeros(group.sizes, int)
    for axis, size, coordinate in zip(
        group.axes, group.sizes, np.indices(group.sizes), strict=True
    ):
        number = number * size + coordinate if axis in axes else number
    return number


@functools.lru_cache(maxsize=256)
def _of_devices(group: Group, mesh: Mesh) -> np.ndarray:
    order = [mesh.axis_names.index(axis) for axis in group.axes]
    order += [i for i, axis in enumerate(mesh.axis_names) if axis not in group.axes]
    devices = np.transpose(mesh.devices, order).reshape(math.prod(group.sizes), -1)
    ways = set()
    for beside in devices.T:
        slices = [getattr(device, "slice_index", 0) for device in beside]
        numbers = {s: number for number, s in enumerate(dict.fromkeys(slices))}
        ways.add(tuple(numbers[s] for s in slices))
    if len(ways) > 1:
        raise _not_in_steps(group, "groups along the same axes lie in slices in different ways")
    return np.array(ways.pop()).reshape(group.sizes)


def _by_lax(
    name: str, function: Callable[..., Any], parts: Split, **options: Any
) -> Callable[[jax.Array], jax.Array]:
    """lax's collective across slices, uninterpreted by shard_map's types, and counted."""
    counters.note(Plan(op=name, backend="xla", algorithm=ACROSS))
    return xla.by_lax(function, parts.across, **options)


def _wide(x: jax.Array, how: How) -> jax.Array:
    """x in the dtype in which its sums travel: float32 if that was asked for."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow and how.precise else x


def _own_block(x: jax.Array, group: Group, axis: int) -> jax.Array:
    """The block of this device, of those that a group cuts x into along `axis`."""
    size = x.shape[axis] // group.size
    return lax.dynamic_slice_in_dim(x, group.position * size, size, axis)


def _merged(x: jax.Array, axis: int) -> jax.Array:
    """Dimensions `axis` and the next as one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _split(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Dimension `axis` as two, the first of `size`."""
    return x.reshape(*x.shape[:axis], size, -1, *x.shape[axis + 1 :])


def _reordered(x: jax.Array, axis: int, order: np.ndarray) -> jax.Array:
    """Blocks along dimensions `axis` and the next, in another order."""
    if np.array_equal(order, np.arange(order.size)):
        return x
    blocks = _split(_merged(x, axis), axis, order.size)
    return _merged(jnp.take(blocks, order, axis=axis), axis).reshape(x.shape)
