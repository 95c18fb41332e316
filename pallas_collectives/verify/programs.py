"""The function as a program over a mesh: of whole arrays, or of one device's within shard_map."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_collectives import _compat
from pallas_collectives.annotations import AnyMesh
from pallas_collectives.replay.machine import Machine
from pallas_collectives.replay.trace_program import NoShardMap, find_shard_map
from pallas_collectives.verify.asked import AskError, Axes, arguments


@dataclasses.dataclass(frozen=True)
class Asked:
    """A program over whole arrays, for one mesh. `inside`: made of a function of one device.

    `mesh`: the axes that it runs over, which may be its own and not those asked for.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Axes
    inside: bool


def of(
    function: Callable[..., Any],
    given: Sequence[Any],
    axes: Axes,
    machine: Machine,
    inside: bool | None,
) -> Asked:
    """`function` as a program over a mesh of these axes on the machine.

    A function with a parameter `mesh` is given it. One that calls `jax.shard_map` takes whole
    arrays; any other is taken as the function of one device, whose operands are one device's.
    `inside` says which, where that is not to be found out.

    Raises:
      AskError: it cannot be traced either way.
    """
    n = math.prod(axes.values())
    try:
        args = arguments(given, n)
    except AskError:
        raise
    except (Exception, SystemExit) as error:
        raise AskError(
            f"arguments for {n} devices",
            f"making them raises {type(error).__name__}: {error}",
            "let them be arrays, shapes, or a function of the number of devices",
        ) from error
    mesh = machine.mesh(axes)
    return over_mesh(function, args, mesh, axes, inside)


def over_mesh(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: AnyMesh,
    axes: Axes,
    inside: bool | None,
) -> Asked:
    """As `of`, over a mesh that is there, abstract or of devices."""
    _compat.prepare()
    whole = _with_mesh(function, mesh)
    replicated = jax.sharding.PartitionSpec()
    within = jax.shard_map(
        function, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
    )
    ways = [(False, whole), (False, _in_scope_of(mesh, whole)), (True, within)]
    errors: list[BaseException] = []
    for is_inside, candidate in ways:
        if inside is not None and is_inside != inside:
            continue
        try:
            return Asked(candidate, args, _own_mesh(candidate, args), is_inside)
        except (Exception, SystemExit) as error:
            errors.append(error)
    missing = isinstance(errors[0], (NoShardMap, NameError)) and len(errors) > 1
    told = errors[-1] if missing else errors[0]
    if isinstance(told, AskError):
        raise told
    raise AskError(
        f"{name_of(function)} of {', '.join(map(_said, jax.tree.leaves(args))) or 'no operands'}",
        f"tracing it on {_mesh_said(axes)} raises {type(told).__name__}: {_first_line(told)}"
        f"{_place(told)}",
        "mend that, or give operands that it takes (a function inside shard_map: one device's)",
    ) from told


def _with_mesh(function: Callable[..., Any], mesh: AnyMesh) -> Callable[..., Any]:
    takes_mesh = False
    with contextlib.suppress(TypeError, ValueError):  # what has no signature has no such parameter
        takes_mesh = "mesh" in inspect.signature(function).parameters

    given = isinstance(function, functools.partial) and "mesh" in function.keywords
    if given or not takes_mesh:
        return function
    return functools.partial(function, mesh=mesh)


def _in_scope_of(mesh: AnyMesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """For programs whose shard_map takes the mesh in scope."""

    def within(*args: Any) -> Any:
        abstract: Any = getattr(mesh, "abstract_mesh", mesh)
        with jax.sharding.use_abstract_mesh(abstract):
            return function(*args)

    return within


def _own_mesh(candidate: Callable[..., Any], args: tuple[Any, ...]) -> Axes:
    """The axes of the shard_map that a program calls."""
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(np.shape(a), jax.dtypes.result_type(a)), args
    )
    own = find_shard_map(jax.make_jaxpr(candidate)(*shapes)).params["mesh"]
    return dict(zip(own.axis_names, own.axis_sizes, strict=True))


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called; a `functools.partial` as what it is of."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _said(leaf: Any) -> str:
    return f"{jax.dtypes.result_type(leaf)}{list(np.shape(leaf))}"


def _mesh_said(axes: Axes) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _place(error: BaseException) -> str:
    """` (at file:line)` of the reader's code that raised."""
    place = ""
    trace = error.__traceback__
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if "site-packages" not in path and not path.startswith((package, "<")):
            place = f" (at {os.path.basename(path)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place


def described(args: tuple[Any, ...]) -> str:
    """Operands as text."""
    return ", ".join(map(_said, jax.tree.leaves(args)))
