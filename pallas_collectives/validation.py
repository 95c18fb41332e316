"""Checks of a collective's arguments; each error names the value, the rule and the remedy.

lax reports these mistakes later, in the compiler or on the devices, or less clearly.
"""

import functools
import operator
from collections.abc import Hashable, Iterable, Sequence, Set
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import PrecisionLike

from pallas_collectives import _compat
from pallas_collectives.annotations import Number
from pallas_collectives.errors import CollectiveError, DtypeError, UnboundAxisError

AxisName: TypeAlias = Hashable | Sequence[Hashable]
Groups: TypeAlias = Sequence[Sequence[int]] | None


def named(axis_name: AxisName) -> tuple[Any, ...]:
    """The axes that have names; numbers are dimensions, and are left out."""
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    return tuple(axis for axis in axes if not isinstance(axis, int))


def size_of(axis_name: AxisName) -> int:
    """Devices along an axis or axes; raises if one is not bound, or is named twice."""
    size, axes = 1, named(axis_name)
    if not all(isinstance(axis, Hashable) and not isinstance(axis, Set) for axis in axes):
        rule = "it must be a name, or a tuple of names, whose order numbers the devices"
        raise CollectiveError(f"axis_name={axis_name!r}", rule, "give a name or a tuple of them")
    if len(set(axes)) < len(axes):
        rule = "no axis may occur twice"
        raise CollectiveError(f"axis_name={axis_name}", rule, "name each axis once")
    for axis in axes:
        try:
            size *= lax.axis_size(axis)
        except NameError:
            bound = jax.sharding.get_abstract_mesh().manual_axes
            raise UnboundAxisError(
                f"axis name {axis!r}",
                f"it must be bound by jax.shard_map, vmap or pmap; bound are {sorted(bound)}",
                "call inside jax.shard_map over a mesh with this axis, or use "
                "pallas_collectives.sharded",
            ) from None
    return size


def devices_of(axis_name: AxisName, groups: Groups) -> int:
    """Devices of a group."""
    return size_of(axis_name) if groups is None else len(groups[0])


def plain_groups(groups: Groups) -> tuple[tuple[int, ...], ...] | None:
    """Groups that `check_groups` takes, also of NumPy's numbers, as tuples of ints."""
    return None if groups is None else tuple(tuple(map(operator.index, row)) for row in groups)


def check_groups(groups: Sequence[Sequence[int]], size: int, alike: bool = True) -> None:
    """Checks that groups have each device of an axis once and, if `alike`, are of equal size.

    None may be empty: XLA ends a program with one by an internal error.
    """
    try:
        members = sorted(operator.index(device) for group in groups for device in group)
    except TypeError:
        members = []
    if members != list(range(size)):
        rule = f"each of the axis's {size} device numbers must be in exactly one group"
    elif alike and len({len(group) for group in groups}) > 1:
        rule = "groups must be of equal size"
    elif not all(map(len, groups)):
        rule = "no group may be empty"
    else:
        return
    remedy = f"list each number from 0 to {size - 1} once, in lists of one length"
    raise CollectiveError(f"axis_index_groups={groups!r}", rule, remedy)


def check_ragged(operand: Any, output: Any, slices: dict[str, Any], devices: int) -> None:
    """Checks that operand, output and tables of a ragged exchange fit together."""
    operand, output = jax.typeof(operand), jax.typeof(output)
    for name, of in (("operand", operand), ("output", output)):
        if not of.shape:
            rule, remedy = "it must have rows", "give it a dimension, for example with x[None]"
            raise CollectiveError(f"{name} of {of.str_short()}", rule, remedy)
    if operand.dtype != output.dtype or operand.shape[1:] != output.shape[1:]:
        raise CollectiveError(
            f"operand of {operand.str_short()}, output of {output.str_short()}",
            "both must have the same dtype and rows of the same shape",
            "convert or reshape one of them",
        )
    for name, value in slices.items():
        if not np.issubdtype(jax.typeof(value).dtype, np.integer):
            rule = "offsets and sizes are integers"
            raise CollectiveError(f"{name} of {jax.typeof(value).dtype}", rule, "give it as int32")
    lengths = {name: np.shape(value) for name, value in slices.items()}
    count = next(iter(lengths.values()))
    if len(set(lengths.values())) > 1 or len(count) != 1 or count[0] % devices:
        raise CollectiveError(
            ", ".join(f"{name} of shape {shape}" for name, shape in lengths.items()),
            f"all must be of one length, a multiple of the {devices} devices",
            "give each device as many slices, of size 0 if it gets nothing",
        )


def checked_perm(perm: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The pairs, counted from 0; each source and each target is a device, and occurs once.

    As with lax, numbers below 0 count from the last device.
    """
    try:
        pairs = [(operator.index(source), operator.index(target)) for source, target in perm]
    except (TypeError, ValueError):
        rule = "it must be a list of pairs of device numbers"
        raise CollectiveError(f"perm={perm!r}", rule, "give (source, target) pairs") from None
    roles = {"source": [source for source, _ in pairs], "target": [target for _, target in pairs]}
    for role, devices in roles.items():
        if not all(-size <= device < size for device in devices):
            rule = f"a {role} must be a device number in [0, {size}), or below 0 from the last"
        elif len({device % size for device in devices}) < len(devices):
            rule = f"no device may be a {role} twice"
        else:
            continue
        remedy = "name each device at most once as a source and at most once as a target"
        raise CollectiveError(f"perm={perm}", rule, remedy)
    return [(source % size, target % size) for source, target in pairs]


def shuffled(perm: Sequence[int], size: int) -> list[tuple[int, int]]:
    """The pairs of a permutation that names each device's source."""
    try:
        sources = [operator.index(source) for source in perm]
    except TypeError:
        sources = []
    if sorted(sources) != list(range(size)):
        rule = f"it must be the numbers of all {size} devices, each once"
        raise CollectiveError(f"perm={perm!r}", rule, "name for each device where its x comes from")
    return [(source, target) for target, source in enumerate(sources)]


def checked_source(source: Number, size: int) -> Number:
    """A source, as an int if tracing knows it: it exists then. Before JAX 0.12 it has to."""
    if isinstance(source, jax.Array) and (source.shape, source.dtype) != ((), np.int32):
        rule = "a computed source must be one device number, an int32"
        remedy = "convert it, for example with .astype(jnp.int32)"
        raise CollectiveError(f"source of {jax.typeof(source).str_short()}", rule, remedy)
    if isinstance(source, jax.Array) and not _compat.takes_computed_sources():
        rule = f"with JAX {jax.__version__} it must be an int, as for lax's"
        remedy = "give a number that is known, or take JAX 0.12"
        raise CollectiveError(f"source={source}", rule, remedy)
    if isinstance(source, jax.Array):
        return source
    try:
        number = -1 if isinstance(source, bool | np.bool_) else operator.index(source)
    except TypeError:
        number = -1
    if not 0 <= number < size:
        rule = f"it must be a device number in [0, {size})"
        raise CollectiveError(f"source={source!r}", rule, "name a device of the axis")
    return number


def check_order(axis_name: AxisName) -> None:
    """Checks that axes are in the mesh's order, as lax does from 0.11 on for permutations."""
    mesh = jax.sharding.get_abstract_mesh()
    given = [axis for axis in named(axis_name) if axis in mesh.axis_names]
    ordered = sorted(given, key=mesh.axis_names.index)
    if given != ordered:
        raise CollectiveError(
            f"axis_name={axis_name}",
            f"a permutation must have its axes in the mesh's order, {tuple(ordered)}",
            "give them in that order, and number the devices of perm by it",
        )


def leaves(x: Any) -> list[tuple[Any, str]]:
    """The leaves of a tree; each with words that say where it is, if there are several."""
    found = jax.tree_util.tree_leaves_with_path(x)
    if len(found) == 1:
        return [(found[0][1], "")]
    return [(leaf, f" in leaf {jax.tree_util.keystr(path)}") for path, leaf in found]


def check_ordered(name: str, x: Any, backend: str) -> None:
    """Checks that no leaf is complex, which lax leaves XLA to refuse."""
    for leaf, where in leaves(x):
        if backend != "xla" and np.iscomplexobj(leaf):
            rule = "complex numbers have no order"
            raise DtypeError(
                f"{name} of {jax.typeof(leaf).dtype}{where}", rule, "reduce its magnitude"
            )


def check_added(name: str, x: Any) -> None:
    """Checks that no leaf is bool, which lax leaves the compiler to refuse."""
    for leaf, where in leaves(x):
        if jax.dtypes.result_type(leaf) == np.bool_:
            rule = "bools are not added"
            raise DtypeError(
                f"{name} of bool{where}", rule, "convert it, for example to int32 as psum does"
            )


def check_flag(name: str, value: object) -> None:
    """Checks that `value` is True or False, and not merely truthy or falsy."""
    if not isinstance(value, bool | np.bool_):
        raise CollectiveError(f"{name}={value!r}", "it must be True or False", "pass one of them")


def check_order_of_sum(order: object, axes: tuple[Any, ...]) -> None:
    """Refuses an `order` other than None and "rank", and "rank" over an axis without devices."""
    if order not in (None, "rank"):
        rule = "it must be 'rank', the order of the ranks, or None, the quickest order"
        raise CollectiveError(f"order={order!r}", rule, "pass one of them")
    beside = [axis for axis in axes if axis not in jax.sharding.get_abstract_mesh().axis_names]
    if order is not None and beside:
        rule = f"{beside[0]!r} is an axis of vmap, whose terms lie on one device"
        raise CollectiveError(f"order={order!r}", rule, "sum over it by jnp.sum, apart")


def check_precision(precision: PrecisionLike) -> None:
    """Checks that lax's products know a precision."""
    one = jax.ShapeDtypeStruct((1,), np.float32)
    try:
        jax.eval_shape(functools.partial(lax.dot, precision=precision), one, one)
    except (TypeError, ValueError) as error:
        rule, remedy = (
            "jax.lax.dot does not know this precision",
            "pass one that it knows, such as 'highest', or None",
        )
        raise CollectiveError(f"precision={precision!r}", rule, remedy) from error


def check_blocks(
    name: str, axis: int, x: Any, axis_name: AxisName, groups: Groups, tiled: bool
) -> None:
    """Checks that every leaf has a block for each device along `axis`."""
    check_flag("tiled", tiled)
    devices = devices_of(axis_name, groups)
    for leaf, where in leaves(x):
        check_axis(name, axis, np.ndim(leaf), where)
        size = np.shape(leaf)[axis]
        if tiled and size % devices:
            rule = f"tiled, it must be a multiple of the {devices} devices"
            remedy = f"pad it to {-(-size // devices) * devices}"
        elif not tiled and size != devices:
            rule = f"untiled, it must be the number of devices, {devices}"
            remedy = "pass tiled=True, or reshape the operand"
        else:
            continue
        raise CollectiveError(f"dimension {name}={axis} of size {size}{where}", rule, remedy)


def check_gathered(axis: int, x: Any, tiled: bool, to: object) -> None:
    """Checks that blocks of every leaf can lie along `axis`, new if not tiled, and what `to` is."""
    check_flag("tiled", tiled)
    if to not in ("varying", "invarying", "reduced"):
        rule = "it must be 'varying', 'invarying' or 'reduced', as lax calls types of results"
        raise CollectiveError(f"to={to!r}", rule, "leave it out for 'varying'")
    for leaf, where in leaves(x):
        check_axis("axis", axis, np.ndim(leaf) + (not tiled), where)


def check_axis(name: str, axis: int, ndim: int, where: str = "") -> None:
    """Checks that `axis` is one of an array's `ndim` dimensions; the array is `where` in a tree."""
    if not ndim:
        rule, remedy = "a scalar has no dimensions", "give it one, for example with x[None]"
        raise CollectiveError(f"{name}={axis} of a scalar{where}", rule, remedy)
    if not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        raise CollectiveError(
            f"{name}={axis}{where}",
            f"it must be a whole number in [{-ndim}, {ndim}) for this operand",
            "count dimensions from 0, or from -1 backwards; a new dimension counts too",
        )


def varying(tree: Any, axis_name: AxisName) -> Any:
    """Arrays typed as different on every device along the axes."""
    axes = set(named(axis_name))
    axes &= set(jax.sharding.get_abstract_mesh().axis_names)  # vmap's axes have no such types

    return jax.tree.map(lambda leaf: _compat.as_varying(jnp.asarray(leaf), axes), tree)


def symbols(xs: Iterable[jax.Array]) -> tuple[Any, ...]:
    """The first shape of which not every size is known, as with `jax.export`; or ()."""
    return next((x.shape for x in xs if not all(isinstance(n, int) for n in x.shape)), ())
