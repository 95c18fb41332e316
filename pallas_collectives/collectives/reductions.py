"""Sums, means, maxima and minima over devices, by the names of `jax.lax` and with its arguments.

`collectives` says what `backend`, `algorithm`, `wire` and its like mean.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

import jax
import numpy as np

from pallas_collectives import validation, wires
from pallas_collectives.backends import choice
from pallas_collectives.errors import UnservedError, WireError
from pallas_collectives.lowering import primitives, quantized
from pallas_collectives.lowering.primitives import LAX
from pallas_collectives.validation import AxisName, Groups
from pallas_collectives.wires import WireLike

_P = ParamSpec("_P")


def psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    precise: bool = False,
    order: str | None = None,
    wire: WireLike = None,
    wire_backward: WireLike = None,
    return_residue: bool = False,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """Sums x over devices and leaves each one block, as `jax.lax.psum_scatter` does.

    Args:
      x: array or pytree of arrays, each (..., n * s, ...) per device; (..., n, ...) if not tiled.
      axis_name: mesh axis, or tuple of axes, of n devices together.
      scatter_dimension: the dimension that is cut into n blocks.
      axis_index_groups: lists of device numbers that partition the axis; each sums by itself.
      tiled: keep the scattered dimension, of size s, instead of dropping it.
      precise: let sums of 16-bit and narrower floats travel as float32, at their cost on the wire.
      order: "rank" to have every element added in the order of the ranks, see `psum`.
      wire, wire_backward, return_residue: see `collectives`.
      backend: see `collectives`.
      algorithm: "bidirectional", "unidirectional", "line", "torus" or "direct", as `all_gather`'s.

    Returns:
      Arrays of one block: device p's is block p of the sum.

    The order of additions is fixed by the ring, so results are bit-identical from run to run.
    Floats narrower than 32 bits are added in float32 on each device and rounded once per hop.

    Raises:
      UnboundAxisError, CollectiveError, AlgorithmError, BackendError, VmemError: see `errors`.

    Example, inside `jax.shard_map` over 8 devices:
      x: f32[2048, 128] -> psum_scatter(x, "x", tiled=True): f32[256, 128]

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.psum_scatter(x, "x"), axis_name="x")(jnp.ones((4, 4)))
      Array([4., 4., 4., 4.], dtype=float32)
    """
    both: dict[str, Any] = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, axis_index_groups, backend, algorithm, precise, order, **both)
    axis_index_groups = validation.plain_groups(axis_index_groups)
    validation.check_blocks(
        "scatter_dimension", scatter_dimension, x, axis_name, axis_index_groups, tiled
    )
    validation.check_added("psum_scatter", x)
    options = {"axis_index_groups": axis_index_groups, "tiled": tiled}

    def scatter(leaf: Any) -> Any:
        dimension = scatter_dimension % np.ndim(leaf)  # JAX 0.10 takes no negative axes
        return LAX.psum_scatter(leaf, axis_name, scatter_dimension=dimension, **options)

    validation.check_flag("return_residue", return_residue)
    how = dataclasses.replace(choice.asked(how, x, adds=True), once=how.once or return_residue)
    devices = validation.devices_of(axis_name, axis_index_groups)
    over = axis_name, axis_index_groups, quantized.Groups(scatter_dimension, devices, flat=True)
    given = quantized.sent(x, wire, *over, how)
    sums = primitives.with_twins(how, lambda x: jax.tree.map(scatter, x), given)
    return (sums, quantized.residue(x, given, wire, *over, how)) if return_residue else sums


reduce_scatter = psum_scatter


def psum(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    precise: bool = False,
    order: str | None = None,
    wire: WireLike = None,
    wire_backward: WireLike = None,
    return_residue: bool = False,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """Sums x over devices, as `jax.lax.psum` does.

    Args:
      x: array or pytree of arrays, of any shape; Python scalars and other constants fold to
        multiples of themselves, so that psum(1, axis) is the number of devices. A tree's arrays of
        at most 64 KiB travel together, by dtype and up to 1 MiB at a time, unless the algorithm is
        asked for in VMEM.
      axis_name: mesh axis, or tuple of axes.
      axis_index_groups: lists of device numbers that partition the axis; each sums by itself. lax
        serves lists of unequal length, and on TPUs raises.
      precise: let sums of 16-bit and narrower floats travel as float32, at their cost on the wire.
      order: "rank" to have every element added in the order of the ranks, that of device 0 first;
        None for the order of the fastest algorithm.
      wire, wire_backward, return_residue: see `collectives`.
      backend: see `collectives`.
      algorithm: "ring" (reduce-scatter and all-gather in one kernel; large arrays), "line" (for
        devices whose first and last share no link), "torus" (along all axes of the torus at once;
        for groups over several), "gather" (whole operands to everyone, by neighbours; small arrays)
        or "one_shot" (everyone to everyone in one hop; small arrays). With `order` "gather",
        "one_shot" or "exchange" (each device adds one block of everyone's; large arrays).

    Returns:
      Arrays of x's shape and dtype (int32 for bool), with the same bits on every device.

    With order="rank" an element's bits follow from the devices' terms of it and their ranks alone:
    not from its place, the array's size, the algorithm or the backend. Ranks are positions in the
    group. Floats narrower than 32 bits are added in float32, and rounded once. So a row's sum is
    the same bits in a large batch and alone. `explain(..., order="rank")` says what that costs.

    Raises:
      UnboundAxisError, CollectiveError, AlgorithmError, BackendError, VmemError: see `errors`.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.psum(x, "x"), axis_name="x")(jnp.arange(4.0))
      Array([6., 6., 6., 6.], dtype=float32)
    """
    options: dict[str, Any] = {"precise": precise, "order": order, "return_residue": return_residue}
    options |= {"wire": wire, "wire_backward": wire_backward}
    return _reduce("psum", x, axis_name, axis_index_groups, backend, algorithm, **options)


all_reduce = psum


def pmean(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    precise: bool = False,
    order: str | None = None,
    wire: WireLike = None,
    wire_backward: WireLike = None,
    return_residue: bool = False,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """The mean of x over devices, as `jax.lax.pmean`: `psum` divided by the number of devices.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.pmean(x, "x"), axis_name="x")(jnp.arange(4.0))
      Array([1.5, 1.5, 1.5, 1.5], dtype=float32)
    """
    options: dict[str, Any] = {"precise": precise, "order": order, "return_residue": return_residue}
    options |= {"wire": wire, "wire_backward": wire_backward}
    return _reduce("pmean", x, axis_name, axis_index_groups, backend, algorithm, **options)


def _without_derivative(function: Callable[_P, Any]) -> Callable[_P, Any]:
    """The same, which says why it takes no `wire_backward=`, and no draws."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        if (backward := kwargs.pop("wire_backward", None)) is not None:
            value = f"wire_backward={backward!r} for {function.__name__}"
            raise WireError(value, "lax has no derivative of it", "leave it out")
        wire = kwargs.get("wire")
        if isinstance(wire, wires.Wire) and wire.key is not None:
            value = f"rounding={wire.rounding!r} of a wire for {function.__name__}"
            rule = "drawn numbers are exact on average in sums alone"
            raise WireError(value, rule, "leave rounding and key out")
        return function(*args, **kwargs)

    return run


@_without_derivative
def pmax(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    wire: WireLike = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """The elementwise maximum of x over devices, as `jax.lax.pmax`; arguments as `psum`'s.

    Over a wire terms go as those of a sum, by "exchange" or "gather": the result may be off by as
    much as one term, half a step of its group, and by an exchange among three devices or more by
    half a step of the result's group besides. All get the same bits.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.pmax(x, "x"), axis_name="x")(jnp.arange(4.0))
      Array([3., 3., 3., 3.], dtype=float32)
    """
    return _reduce("pmax", x, axis_name, axis_index_groups, backend, algorithm, wire=wire)


@_without_derivative
def pmin(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    wire: WireLike = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """The elementwise minimum of x over devices, as `jax.lax.pmin`; arguments as `psum`'s.

    Over a wire as `pmax`.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.pmin(x, "x"), axis_name="x")(jnp.arange(4.0))
      Array([0., 0., 0., 0.], dtype=float32)
    """
    return _reduce("pmin", x, axis_name, axis_index_groups, backend, algorithm, wire=wire)


def _reduce(
    name: str,
    x: Any,
    axis_name: AxisName,
    groups: Groups,
    backend: str | None,
    algorithm: str | None,
    return_residue: bool = False,
    **wishes: Any,
) -> Any:
    # What lax has no arguments for is added by gathers, which take groups of one size; and lax's
    # means divide by the first group's.
    asks = any(wishes.get(wish) is not None for wish in ("order", "wire", "wire_backward"))
    alike = asks or name == "pmean"
    how = choice.settle(axis_name, groups, backend, algorithm, **wishes, alike=alike)
    groups = validation.plain_groups(groups)
    validation.check_flag("return_residue", return_residue)
    how = dataclasses.replace(choice.asked(how, x, adds=True), once=how.once or return_residue)
    if name in ("pmax", "pmin"):
        validation.check_ordered(name, x, how.backend)
    reduce = getattr(LAX, name)
    wire, over = wishes.get("wire"), (axis_name, groups, quantized.FLAT)

    def at_once(x: Any) -> tuple[Any, Any]:
        given = quantized.sent(x, wire, *over, how)
        sums = primitives.with_twins(
            how, lambda x: reduce(x, axis_name, axis_index_groups=groups), given
        )
        return sums, quantized.residue(x, given, wire, *over, how) if return_residue else None

    with _typed(name, groups):
        narrow = wires.named(wire)
        if how.once and narrow is not None:
            from pallas_collectives.collectives import averaged  # which other sums do not need

            two = averaged.Averaged(axis_name, groups, narrow, how, name == "pmean", return_residue)
            sums, residues = two.sums(x, at_once) if two.serves else at_once(x)
        else:
            sums, residues = at_once(x)
    return (sums, residues) if return_residue else sums


@contextlib.contextmanager
def _typed(name: str, groups: Groups) -> Iterator[None]:
    """Says what to pass where lax has no type for a sum, for which it raises without a word."""
    try:
        yield
    except NotImplementedError as error:
        if groups is None or str(error):
            raise
        raise UnservedError(
            f"{name} with axis_index_groups={groups!r}",
            "lax has no type for what is equal within groups alone, as check_vma=True asks for",
            "pass check_vma=False to jax.shard_map",
        ) from error
