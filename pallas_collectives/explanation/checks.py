"""What `explain` refuses before it asks who serves."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from pallas_collectives import catalogue, collectives, examples
from pallas_collectives.annotations import AnyMesh, DType
from pallas_collectives.errors import CollectiveError, UnboundAxisError, WireError
from pallas_collectives.overlap import split
from pallas_collectives.overlap.fusion import GATHER, SCATTER
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import Group
from pallas_collectives.validation import AxisName
from pallas_collectives.wires import WireLike

PRODUCTS = (GATHER, SCATTER)


MOST_BYTES = 128 << 30  # more than any TPU has; of far larger ones chunks could not be listed


def dtype_of(dtype: DTypeLike) -> DType:
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # NumPy's of None is float64
    except TypeError:
        found = None
    kinds = (jnp.number, jnp.bool_, jax.dtypes.extended)
    if found is None or not any(jnp.issubdtype(found, kind) for kind in kinds):
        rule = "it must be a dtype of numbers"
        raise CollectiveError(f"dtype={dtype!r}", rule, "write it like 'bfloat16'")
    return found


def check_size(nbytes: int) -> None:
    """Whether a device could hold an operand."""
    if nbytes > MOST_BYTES:
        rule = f"no TPU has more than {MOST_BYTES >> 30} GiB"
        remedy = "give shape or bytes of one device's operand, not of all devices'"
        raise CollectiveError(f"an operand of {nbytes} bytes", rule, remedy)


def check_call(name: str, x: jax.ShapeDtypeStruct, group: Group, axis: int, **asked: Any) -> None:
    """What a plain call of a collective by its public name refuses: its own checks run.

    Args:
      name: of the function.
      x: the operand.
      group: the devices.
      axis: the dimension that is gathered, scattered or split.
      **asked: further arguments; None where they are left out.

    Raises:
      CollectiveError: what the call raises, or an argument that the function lacks.
    """
    function = getattr(collectives, name)
    parameters = inspect.signature(function).parameters
    given = {argument: value for argument, value in asked.items() if value is not None}
    lacks = {a: given[a] for a in given.keys() - parameters.keys()}
    if axis != 0 and not parameters.keys() & _DIMENSIONS:
        lacks["axis"] = axis
    for argument, value in lacks.items():
        rule = f"{name} has no such argument"
        raise CollectiveError(f"{argument}={value!r} for {name}", rule, f"leave {argument} out")

    def call(x: jax.Array) -> Any:
        plain = _plain(name, x, group, axis)
        return function(**{a: plain[a] for a in parameters if a in plain}, **given)

    nothing = PartitionSpec()
    run = jax.shard_map(call, in_specs=nothing, out_specs=nothing, check_vma=False)
    jax.eval_shape(run, x)


_DIMENSIONS = {"axis", "scatter_dimension", "split_axis", "concat_axis"}
_TABLES = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


def _plain(name: str, x: jax.Array, group: Group, axis: int) -> dict[str, Any]:
    """What a plain call gives parameters of public functions, by the parameters' names."""
    sources = [(target - 1) % group.size for target in range(group.size)]
    pairs = [(source, target) for target, source in enumerate(sources)]
    return {
        **dict.fromkeys(("x", "operand", "output"), x),
        **dict.fromkeys(_TABLES, examples.no_rows(group.size)),
        **dict.fromkeys(_DIMENSIONS, axis),
        "axis_name": group.axes,
        "tiled": x.ndim > 0,  # a scalar is gathered along a new dimension
        "perm": sources if name == "pshuffle" else pairs,
        "source": 0,
    }


def check_figures(op: str, wire: WireLike) -> None:
    """Products and broadcasts over a wire have no figures."""
    if wire is not None and op.removesuffix("_start") in (*PRODUCTS, "pbroadcast"):
        rule = "explain has no figures for this collective over a wire"
        raise WireError(f"wire={wire!r} for {op}", rule, "leave wire out")


def check_columns(
    op: str, shape: tuple[int, ...] | None, columns: int | Sequence[int] | None
) -> None:
    """Products have right-hand sides; collectives do not."""
    if op not in PRODUCTS:
        if columns is not None:
            rule = "a collective has no right-hand side"
            raise CollectiveError(f"columns={columns!r} for {op}", rule, "leave columns out")
        return
    if shape is None:
        rule = "the time of a product depends on more than bytes"
        raise CollectiveError(f"shape=None for {op}", rule, "give shape and dtype of x")
    numbers = (columns,) if isinstance(columns, int | np.integer) else columns
    if (
        not isinstance(numbers, list | tuple)
        or not numbers
        or not all(isinstance(n, int | np.integer) and n > 0 for n in numbers)
        or (op == SCATTER and len(numbers) > 1)
    ):
        rule = "must be the number of columns of the matrix that x is multiplied with"
        several = "" if op == SCATTER else ", or (4096, 1024) for two matrices"
        remedy = f"write columns=4096{several}"
        raise CollectiveError(f"columns={columns!r} for {op}", rule, remedy)


def check(
    op: str,
    nbytes: int | None,
    shape: tuple[int, ...] | None,
    mesh: AnyMesh | None,
    axis_name: AxisName,
    devices: int | None,
    chip: str | None,
    torus: str | None,
) -> None:
    known = sorted([*catalogue.functions(), *split.NAMES, *PRODUCTS])
    if op not in known:
        remedy = "name one of them, or ask pallas_collectives.moe.explain about moe"
        raise CollectiveError(f"op={op!r}", f"it must be one of {', '.join(known)}", remedy)
    if (nbytes is None) == (shape is None):
        rule = "the operand's size is given either as nbytes or as shape and dtype"
        raise CollectiveError(f"nbytes={nbytes}, shape={shape}", rule, "give one of them")
    if (mesh is None) == (devices is None) or (mesh is None) != (axis_name is None):
        raise CollectiveError(
            f"mesh={mesh}, axis_name={axis_name!r}, devices={devices}",
            "the group is given either by mesh and axis_name or by a number of devices",
            "give one of them",
        )
    several = "write it like devices=8, or mesh= and axis_name= for devices on several axes"
    each = "give the bytes of one device's operand"
    for name, number, least, remedy in (
        ("devices", devices, 2, several),
        ("nbytes", nbytes, 0, each),
    ):
        whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if number is not None and (not whole or number < least):
            rule = f"it must be a whole number of {least} or more"
            raise CollectiveError(f"{name}={number!r}", rule, remedy)
    if shape is not None and not (
        isinstance(shape, list | tuple)
        and all(isinstance(size, int | np.integer) and size >= 0 for size in shape)
        and not any(isinstance(size, bool) for size in shape)
    ):
        rule = "it must be a tuple of sizes, whole numbers of 0 or more"
        raise CollectiveError(f"shape={shape!r}", rule, "write it like (8, 128)")
    if mesh is not None and not hasattr(mesh, "axis_names"):
        rule = "it must be a jax.sharding.Mesh or AbstractMesh"
        raise CollectiveError(f"mesh={mesh!r}", rule, "give one, or a number of devices")
    if mesh is not None:
        names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        known_names = [name for name in names if name in mesh.axis_names]
        if len(known_names) < len(names) or len(set(names)) < len(names):
            rule = (
                f"it must be one axis of the mesh, or a tuple of different ones: {mesh.axis_names}"
            )
            raise UnboundAxisError(f"axis_name={axis_name!r}", rule, "name axes of this mesh")
    if mesh is not None and (chip, torus) != (None, None):
        name, value = ("torus", torus) if chip is None else ("chip", chip)
        rule = "it goes with a number of devices, and those of a mesh are known"
        raise CollectiveError(f"{name}={value!r} with a mesh", rule, f"leave {name} out")
    if chip is not None and chip not in chips.BY_NAME:
        rule = f"it must be one of {', '.join(chips.BY_NAME)}"
        raise CollectiveError(f"chip={chip!r}", rule, "name one of them")
    if torus not in (None, "ring", "line"):
        rule = "it must be 'ring' or 'line'"
        raise CollectiveError(f"torus={torus!r}", rule, "name one of the two, or leave torus out")
