"""The collectives of `jax.lax`, by the same names and with the same arguments.

Each takes two more keyword arguments:

* `backend`: "pallas", "nccl" or "xla"; None lets the mesh in scope decide (see `use_backend`);
* `algorithm`: the backend's algorithm by name; "auto" or None lets it choose by size and chip (see
  `tuning.choice` and `explain`). A name with ":vmem" appended keeps operand and result in VMEM;
  with ":sc" a SparseCore runs the kernel, beside the TensorCore, where there is one; sums by rings
  and lines alone (see `kernels.machinery.sparsecore`). "auto:sc" and the like choose the algorithm.

Those that gather, exchange, permute or sum floats can send narrower numbers (see `wires`):

* `wire`: "int8", "float8_e4m3fn", "float8_e5m2", "bfloat16" (of float32), a `Wire`, "auto" (int8
  where that is worth it), or None. Results are within half a step of each group of 128 numbers;
  sums are added in float32. A wire that would take more bytes than it saves is a WireError;
* `wire_backward`: that of derivatives, which pass straight through rounding; None for full numbers;
* `dequantize`: False to have (values, scales) of what comes, for a product of quantised numbers;
* `return_residue`: True to have (sum, residue): what this device's own term has lost, to be added
  to its next one (error feedback).

Semantics are lax's own: its function runs, with our primitives in place of its collectives (see
`lowering.primitives`). The checks here are for mistakes that lax reports later, or less clearly.
"""

import functools
import types
from typing import Any

import jax
import numpy as np
from jax import lax

from pallas_collectives import catalogue, validation
from pallas_collectives.backends import choice
from pallas_collectives.lowering import primitives, quantized
from pallas_collectives.validation import AxisName, Groups

# lax's functions as they were on import: `override_lax` may have put ours in their place since.
LAX = types.SimpleNamespace(
    **{name: getattr(lax, name) for name in catalogue.functions() if hasattr(lax, name)}
)


def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    order: str | None = None,
    wire: Any = None,
    wire_backward: Any = None,
    dequantize: bool = True,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """Gathers x from all devices along a mesh axis, as `jax.lax.all_gather` does.

    Args:
      x: array or pytree of arrays, each (..., s, ...) per device.
      axis_name: mesh axis, or tuple of axes (numbered major first), of n devices together.
      axis_index_groups: lists of device numbers that partition the axis; each gathers by itself.
      axis: the position of a new dimension of size n; if tiled, the dimension along which blocks
        are concatenated, to size n * s.
      tiled: concatenate instead of stacking.
      to: "varying", or "invarying" for a result typed as equal on all devices.
      order: "rank" to have its gradient, a `psum_scatter`, add in the order of the ranks.
      backend: see the module.
      algorithm: "bidirectional" (both ways round the ring; large arrays), "unidirectional",
        "line" (for devices whose first and last share no link), "torus" (both ways along all axes
        of the torus at once; for groups over several) or "direct" (everyone to everyone in one
        hop; small arrays).

    Returns:
      Arrays of n blocks, ordered by device number.

    Blocks that are whole tiles along `axis` (8 rows of 4-byte, 16 of 2-byte, 32 of 1-byte elements;
    128 in the last dimension; anything in dimensions before the last two) are written straight to
    their place. Others cost one extra pass over the result.

    Raises:
      UnboundAxisError: no mesh in scope has the axis.
      CollectiveError: an axis or groups that do not fit x or the mesh.
      AlgorithmError, BackendError, VmemError: see `errors`.

    Example, inside `jax.shard_map` over 8 devices:
      x: f32[256, 128] -> all_gather(x, "x", tiled=True): f32[2048, 128]
    """
    over = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, axis_index_groups, backend, algorithm, order=order, **over)
    for leaf, where in validation.leaves(x):
        validation.check_axis("axis", axis, np.ndim(leaf) + (not tiled), where)
    options = {"axis_index_groups": axis_index_groups, "axis": axis, "tiled": tiled, "to": to}
    given = quantized.sent(x, wire, axis_name, quantized.WHOLE)
    if not dequantize:
        rows: Any = {**options, "axis": 0, "tiled": True, "backend": backend}
        gather = functools.partial(all_gather, axis_name=axis_name, algorithm=algorithm, **rows)
        return quantized.gathered(given, quantized.checked(wire), gather, axis, tiled)
    return primitives.with_twins(how, lambda x: LAX.all_gather(x, axis_name, **options), given)


def psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    precise: bool = False,
    order: str | None = None,
    wire: Any = None,
    wire_backward: Any = None,
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
      backend: see the module.
      algorithm: "bidirectional", "unidirectional", "line", "torus" or "direct", as `all_gather`'s.

    Returns:
      Arrays of one block: device p's is block p of the sum.

    The order of additions is fixed by the ring, so results are bit-identical from run to run.
    Floats narrower than 32 bits are added in float32 on each device and rounded once per hop.

    Raises:
      UnboundAxisError, CollectiveError, AlgorithmError, BackendError, VmemError: see `errors`.

    Example, inside `jax.shard_map` over 8 devices:
      x: f32[2048, 128] -> psum_scatter(x, "x", tiled=True): f32[256, 128]
    """
    over = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, axis_index_groups, backend, algorithm, precise, order, **over)
    validation.check_blocks(
        "scatter_dimension", scatter_dimension, x, axis_name, axis_index_groups, tiled
    )
    validation.check_added("psum_scatter", x)
    options = {"axis_index_groups": axis_index_groups, "tiled": tiled}

    def scatter(leaf: Any) -> Any:
        dimension = scatter_dimension % np.ndim(leaf)  # JAX 0.10 takes no negative axes
        return LAX.psum_scatter(leaf, axis_name, scatter_dimension=dimension, **options)

    devices = validation.devices_of(axis_name, axis_index_groups)
    groups = quantized.Groups(scatter_dimension, devices, flat=True)
    given = quantized.sent(x, wire, axis_name, groups)
    sums = primitives.with_twins(how, lambda x: jax.tree.map(scatter, x), given)
    return (sums, quantized.residue(x, given, wire, groups)) if return_residue else sums


reduce_scatter = psum_scatter


def psum(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    precise: bool = False,
    order: str | None = None,
    wire: Any = None,
    wire_backward: Any = None,
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
      axis_index_groups: lists of device numbers that partition the axis; each sums by itself.
      precise: let sums of 16-bit and narrower floats travel as float32, at their cost on the wire.
      order: "rank" to have every element added in the order of the ranks, that of device 0 first;
        None for the order of the fastest algorithm.
      backend: see the module.
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
    """
    over = {"wire": wire, "wire_backward": wire_backward}
    given = quantized.sent(x, wire, axis_name, quantized.FLAT)
    options: Any = {"precise": precise, "order": order, **over}
    sums = _reduce("psum", given, axis_name, axis_index_groups, backend, algorithm, **options)
    return (sums, quantized.residue(x, given, wire, quantized.FLAT)) if return_residue else sums


all_reduce = psum


def pmean(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    precise: bool = False,
    order: str | None = None,
    wire: Any = None,
    wire_backward: Any = None,
    return_residue: bool = False,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """The mean of x over devices, as `jax.lax.pmean`: `psum` divided by the number of devices."""
    over = {"wire": wire, "wire_backward": wire_backward}
    given = quantized.sent(x, wire, axis_name, quantized.FLAT)
    options: Any = {"precise": precise, "order": order, **over}
    sums = _reduce("pmean", given, axis_name, axis_index_groups, backend, algorithm, **options)
    return (sums, quantized.residue(x, given, wire, quantized.FLAT)) if return_residue else sums


def pmax(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """The elementwise maximum of x over devices, as `jax.lax.pmax`; arguments as `psum`'s."""
    return _reduce("pmax", x, axis_name, axis_index_groups, backend, algorithm)


def pmin(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """The elementwise minimum of x over devices, as `jax.lax.pmin`; arguments as `psum`'s."""
    return _reduce("pmin", x, axis_name, axis_index_groups, backend, algorithm)


def _reduce(
    name: str,
    x: Any,
    axis_name: AxisName,
    groups: Groups,
    backend: str | None,
    algorithm: str | None,
    **wishes: Any,
) -> Any:
    how = choice.settle(axis_name, groups, backend, algorithm, **wishes)
    if name in ("pmax", "pmin"):
        validation.check_ordered(name, x, how.backend)
    reduce = getattr(LAX, name)
    return primitives.with_twins(how, lambda x: reduce(x, axis_name, axis_index_groups=groups), x)


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    wire: Any = None,
    wire_backward: Any = None,
    dequantize: bool = True,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """Sends block p of x to device p and concatenates what comes, as `jax.lax.all_to_all` does.

    Args:
      x: array or pytree of arrays, cut into n blocks along `split_axis`.
      axis_name: mesh axis, or tuple of axes, of n devices together.
      split_axis: the dimension cut into blocks; of size n if not tiled.
      concat_axis: if tiled, the dimension along which received blocks are concatenated; else the
        position of a new dimension for them.
      axis_index_groups: lists of device numbers that partition the axis; each exchanges by itself.
      tiled: cut and concatenate, instead of dropping one dimension and adding another.
      backend: see the module.
      algorithm: "direct" (n-1 sends at once), "ring" (neighbours only, both ways round) or "line".

    Returns:
      Arrays of as many elements as x; blocks ordered by the device they come from.

    Raises:
      UnboundAxisError, CollectiveError, AlgorithmError, BackendError, VmemError: see `errors`.
    """
    over = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, axis_index_groups, backend, algorithm, **over)
    validation.check_blocks("split_axis", split_axis, x, axis_name, axis_index_groups, tiled)
    for leaf, where in validation.leaves(x):
        validation.check_axis("concat_axis", concat_axis, np.ndim(leaf), where)
    options = {"axis_index_groups": axis_index_groups, "tiled": tiled}

    def exchange(leaf: Any) -> Any:
        ndim = np.ndim(leaf)  # JAX 0.10 takes no negative axes
        return LAX.all_to_all(leaf, axis_name, split_axis % ndim, concat_axis % ndim, **options)

    n = validation.devices_of(axis_name, axis_index_groups)
    given = quantized.sent(x, wire, axis_name, quantized.Groups(split_axis, n))
    if not dequantize:
        rows: Any = {"axis_index_groups": axis_index_groups, "tiled": True, "backend": backend}
        move = functools.partial(
            all_to_all,
            axis_name=axis_name,
            split_axis=0,
            concat_axis=0,
            algorithm=algorithm,
            **rows,
        )
        at = split_axis, concat_axis
        return quantized.exchanged(given, quantized.checked(wire), move, *at, n, tiled)
    return primitives.with_twins(how, lambda x: jax.tree.map(exchange, x), given)


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
    wire: Any = None,
    wire_backward: Any = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """Sends rows of runtime-chosen counts to each device, as `jax.lax.ragged_all_to_all` does.

    Args:
      operand: (rows, ...): the rows to send.
      output: (rows', ...): what the result holds where nothing is received.
      input_offsets: int[k * n]: the first row of operand for device p; with k slices per device,
        those for device 0 come first. The next three are laid out in the same way.
      send_sizes: how many rows device p gets.
      output_offsets: the row of device p's result where ours begin.
      recv_sizes: how many rows come from device p. They must equal that device's `send_sizes`: with
        "direct" a device that waits for rows that nobody sends hangs, and no device can check this
        alone.
      axis_name: mesh axis, or tuple of axes, of n devices together.
      axis_index_groups: lists of device numbers that partition the axis; each exchanges by itself.
      backend: see the module.
      algorithm: "direct" (all slices at once), "ring" (chunk by chunk, passed on by neighbours),
        "line" (the same on devices whose first and last share no link), or "spread" (over all axes
        of a torus, for large and unequal slices); with ":vmem" behind it in VMEM.

    Returns:
      `output` with the rows received in place.

    The kernel clips sizes to the rows that both arrays have, and moves a slice that lies out of
    range to where it fits, as `jax.lax.dynamic_slice` does; lax leaves both undefined.
    Only the rows sent cross the wire. Arrays of three or more dimensions whose last is a multiple
    of 128 are read and written in place; others cost one extra pass over each.

    Raises:
      UnboundAxisError, CollectiveError, AlgorithmError, BackendError, VmemError: see `errors`.
    """
    over = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, axis_index_groups, backend, algorithm, **over)
    slices = {
        "input_offsets": input_offsets,
        "send_sizes": send_sizes,
        "output_offsets": output_offsets,
        "recv_sizes": recv_sizes,
    }
    validation.check_ragged(
        operand, output, slices, validation.size_of(axis_name) // len(axis_index_groups or [0])
    )
    options = {"axis_name": axis_name, "axis_index_groups": axis_index_groups}
    exchange = functools.partial(LAX.ragged_all_to_all, **options)
    rows = quantized.Groups(0, np.shape(operand)[0], flat=True)
    given = quantized.sent(operand, wire, axis_name, rows)
    return primitives.with_twins(how, exchange, given, output, *slices.values())


def ppermute(
    x: Any,
    axis_name: AxisName,
    perm: Any,
    *,
    wire: Any = None,
    wire_backward: Any = None,
    dequantize: bool = True,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """Sends x from each source to its target, as `jax.lax.ppermute` does.

    Args:
      x: array or pytree of arrays, of any shape.
      axis_name: mesh axis, or tuple of axes, in the mesh's order.
      perm: (source, target) pairs of device numbers. Numbers below 0 count from the last device; no
        number is a source or a target twice.
      backend: see the module.
      algorithm: "partners" (a source waits for its target alone; for shifts by one position) or
        "everyone" (a source waits for all devices within reach).

    Returns:
      What arrived, of x's shape; zeros on devices that are not a target.

    Raises:
      CollectiveError: a source or a target that occurs twice or does not exist, or axes that are
        not in the mesh's order.
      UnboundAxisError, AlgorithmError, BackendError: see `errors`.
    """
    over = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, None, backend, algorithm, **over)
    validation.check_order(axis_name)
    pairs = validation.checked_perm(perm, validation.size_of(axis_name))
    given = quantized.sent(x, wire, axis_name, quantized.WHOLE)
    if not dequantize:
        options: Any = {"perm": pairs, "backend": backend, "algorithm": algorithm}
        move = functools.partial(ppermute, axis_name=axis_name, **options)
        return quantized.permuted(given, quantized.checked(wire), move)
    return primitives.with_twins(how, lambda x: LAX.ppermute(x, axis_name, pairs), given)


def pshuffle(
    x: Any,
    axis_name: AxisName,
    perm: Any,
    *,
    wire: Any = None,
    wire_backward: Any = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """`ppermute` by sources, as `jax.lax.pshuffle`: device i gets the x of device perm[i]."""
    over = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, None, backend, algorithm, **over)
    validation.check_order(axis_name)
    validation.checked_perm(
        [(source, target) for target, source in enumerate(perm)], validation.size_of(axis_name)
    )
    given = quantized.sent(x, wire, axis_name, quantized.WHOLE)
    return primitives.with_twins(how, lambda x: LAX.pshuffle(x, axis_name, perm), given)


def pswapaxes(
    x: Any,
    axis_name: AxisName,
    axis: int,
    *,
    axis_index_groups: Groups = None,
    wire: Any = None,
    wire_backward: Any = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """Swaps a mesh axis with a dimension, as `jax.lax.pswapaxes`: `all_to_all` on one `axis`."""
    over = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, axis_index_groups, backend, algorithm, **over)
    validation.check_blocks("axis", axis, x, axis_name, axis_index_groups, tiled=False)
    options = {"axis_index_groups": axis_index_groups}
    n = validation.devices_of(axis_name, axis_index_groups)
    given = quantized.sent(x, wire, axis_name, quantized.Groups(axis, n))
    return primitives.with_twins(how, lambda x: LAX.pswapaxes(x, axis_name, axis, **options), given)


def pbroadcast(
    x: Any,
    axis_name: AxisName,
    source: Any,
    *,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """Gives every device the x of device `source`, bit for bit, as `jax.lax.pbroadcast`."""
    how = choice.settle(axis_name, None, backend, algorithm)
    validation.check_source(source, validation.size_of(axis_name))
    return primitives.with_twins(how, lambda x: LAX.pbroadcast(x, axis_name, source), x)
