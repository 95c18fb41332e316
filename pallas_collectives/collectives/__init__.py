"""The collectives of `jax.lax`, by the same names and with the same arguments.

Sums and their like are in `reductions`. Each takes two more keyword arguments:

* `backend`: "pallas", "nccl" or "xla"; None lets the mesh in scope decide (see `use_backend`);
* `algorithm`: the backend's algorithm by name; "auto" or None lets it choose by size and chip (see
  `tuning.choice` and `explain`). A name with ":vmem" appended keeps operand and result in VMEM;
  with ":sc" a SparseCore runs the kernel, beside the TensorCore, where there is one; sums by rings
  and lines alone (see `kernels.machinery.sparsecore`). "auto:sc" and the like choose the algorithm.

Those that gather, exchange, permute, sum or compare floats can send narrower numbers (see `wires`):

* `wire`: "int8", "float8_e4m3fn", "float8_e5m2", "bfloat16" (of float32), a `Wire`, "auto" (int8
  where that is worth it), or None. Results are within half a step of each group of 128 numbers;
  sums are added in float32. A wire that would take more bytes than it saves is a WireError, and so
  is one for a sum with `order="rank"` whose scales are not of rows (`Wire(..., group="row")`):
  groups of 128 make bits depend on their neighbours;
* `wire_backward`: that of derivatives, which pass straight through rounding; None for full numbers;
* `dequantize`: False to have (values, scales) of what comes, for a product of quantised numbers;
  they have no derivative: gradients through them are zero;
* `return_residue`: True to have (sum, residue): what this device has lost, of its own term and of
  what it added up for all, to be added to its next term (error feedback).

Semantics are lax's own: its function runs, with our primitives in place of its collectives (see
`lowering.primitives`). The checks are for mistakes that lax reports later, or less clearly.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_collectives import validation
from pallas_collectives.annotations import Number
from pallas_collectives.backends import choice
from pallas_collectives.backends.plans import How
from pallas_collectives.collectives.reductions import all_reduce as all_reduce
from pallas_collectives.collectives.reductions import pmax as pmax
from pallas_collectives.collectives.reductions import pmean as pmean
from pallas_collectives.collectives.reductions import pmin as pmin
from pallas_collectives.collectives.reductions import psum as psum
from pallas_collectives.collectives.reductions import psum_scatter as psum_scatter
from pallas_collectives.collectives.reductions import reduce_scatter as reduce_scatter
from pallas_collectives.lowering import primitives, quantized
from pallas_collectives.lowering.primitives import LAX as LAX
from pallas_collectives.validation import AxisName, Groups
from pallas_collectives.wires import WireLike


def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    order: str | None = None,
    wire: WireLike = None,
    wire_backward: WireLike = None,
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
      wire, wire_backward, dequantize: see the module.
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

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.all_gather(x, "x"), axis_name="x")(jnp.arange(2.0))
      Array([[0., 1.],
             [0., 1.]], dtype=float32)
    """
    over: dict[str, Any] = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, axis_index_groups, backend, algorithm, order=order, **over)
    axis_index_groups = validation.plain_groups(axis_index_groups)
    validation.check_gathered(axis, x, tiled, to)
    options = {"axis_index_groups": axis_index_groups, "axis": axis, "tiled": tiled, "to": to}
    how = choice.asked(how, x, adds=False)
    given = quantized.sent(x, wire, axis_name, axis_index_groups, quantized.WHOLE, how)
    validation.check_flag("dequantize", dequantize)
    if not dequantize:
        narrow = quantized.checked(wire, wire_backward, order)
        rows: dict[str, Any] = {**options, "axis": 0, "tiled": True, "backend": backend}
        gather = functools.partial(all_gather, axis_name=axis_name, algorithm=algorithm, **rows)
        return quantized.gathered(given, narrow, how, gather, axis, tiled)
    return primitives.with_twins(how, lambda x: LAX.all_gather(x, axis_name, **options), given)


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    wire: WireLike = None,
    wire_backward: WireLike = None,
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
      wire, wire_backward, dequantize: see the module.
      backend: see the module.
      algorithm: "direct" (n-1 sends at once), "ring" (neighbours only, both ways round), "line"
        (the same on devices whose first and last share no link) or "torus" (passed on along all
        axes of the torus at once).

    Returns:
      Arrays of as many elements as x; blocks ordered by the device they come from.

    Raises:
      UnboundAxisError, CollectiveError, AlgorithmError, BackendError, VmemError: see `errors`.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.all_to_all(x, "x", 0, 0), axis_name="x")(jnp.eye(2))
      Array([[1., 0.],
             [0., 1.]], dtype=float32)
    """
    over: dict[str, Any] = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, axis_index_groups, backend, algorithm, **over)
    axis_index_groups = validation.plain_groups(axis_index_groups)
    validation.check_blocks("split_axis", split_axis, x, axis_name, axis_index_groups, tiled)
    for leaf, where in validation.leaves(x):
        validation.check_axis("concat_axis", concat_axis, np.ndim(leaf), where)
    options = {"axis_index_groups": axis_index_groups, "tiled": tiled}

    def exchange(leaf: Any) -> Any:
        ndim = np.ndim(leaf)  # JAX 0.10 takes no negative axes
        return LAX.all_to_all(leaf, axis_name, split_axis % ndim, concat_axis % ndim, **options)

    n = validation.devices_of(axis_name, axis_index_groups)
    groups = quantized.Groups(split_axis, n)
    given = quantized.sent(x, wire, axis_name, axis_index_groups, groups, how)
    validation.check_flag("dequantize", dequantize)
    if not dequantize:
        narrow = quantized.checked(wire, wire_backward)
        rows: dict[str, Any] = {
            "axis_index_groups": axis_index_groups,
            "tiled": True,
            "backend": backend,
        }
        move = functools.partial(
            all_to_all,
            axis_name=axis_name,
            split_axis=0,
            concat_axis=0,
            algorithm=algorithm,
            **rows,
        )
        at = split_axis, concat_axis
        return quantized.exchanged(given, narrow, how, move, *at, n, tiled)
    return primitives.with_twins(how, lambda x: jax.tree.map(exchange, x), given)


def ragged_all_to_all(
    operand: ArrayLike,
    output: ArrayLike,
    input_offsets: ArrayLike,
    send_sizes: ArrayLike,
    output_offsets: ArrayLike,
    recv_sizes: ArrayLike,
    *,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
    wire: WireLike = None,
    wire_backward: WireLike = None,
    dequantize: bool = True,
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
      wire, wire_backward, dequantize: see the module.
      backend: see the module.
      algorithm: "direct" (all slices at once), "ring" (chunk by chunk, passed on by neighbours),
        "line" (the same on devices whose first and last share no link), "torus" (passed on along
        all axes of the torus at once), or "spread" (over all axes of a torus, for large and unequal
        slices); with ":vmem" behind it in VMEM.

    Returns:
      `output` with the rows received in place; with dequantize=False that is quantized, too.

    The kernel clips sizes to the rows that both arrays have, and moves a slice that lies out of
    range to where it fits, as `jax.lax.dynamic_slice` does; lax leaves both undefined.
    Only the rows sent cross the wire. Arrays of three or more dimensions whose last is a multiple
    of 128 are read and written in place; others cost one extra pass over each.

    Raises:
      UnboundAxisError, CollectiveError, AlgorithmError, BackendError, VmemError: see `errors`.

    Example, a row from each of two devices to each, inside `jax.shard_map`:
      >>> def exchange(x):
      ...     me, ones = jax.lax.axis_index("x"), jnp.ones(2, int)
      ...     tables = jnp.arange(2), ones, jnp.full(2, me), ones
      ...     return pc.ragged_all_to_all(x, 0 * x, *tables, axis_name="x")
      >>> P, mesh = jax.sharding.PartitionSpec("x"), jax.sharding.Mesh(jax.devices()[:2], ("x",))
      >>> rows = jnp.arange(4.0).repeat(128).reshape(4, 128)
      >>> jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P, out_specs=P))(rows)[:, 0]
      Array([0., 2., 1., 3.], dtype=float32)
    """
    over: dict[str, Any] = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, axis_index_groups, backend, algorithm, **over)
    axis_index_groups = validation.plain_groups(axis_index_groups)
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
    validation.check_flag("dequantize", dequantize)
    rows = quantized.Groups(0, np.shape(operand)[0], flat=bool(dequantize))
    given = quantized.sent(operand, wire, axis_name, axis_index_groups, rows, how)
    if not dequantize:
        narrow = quantized.checked(wire, wire_backward)
        by: dict[str, Any] = {**slices, **options, "backend": backend, "algorithm": algorithm}
        move = functools.partial(ragged_all_to_all, **by)
        return quantized.received(given, output, narrow, move)
    return primitives.with_twins(how, exchange, given, output, *slices.values())


def ppermute(
    x: Any,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    wire: WireLike = None,
    wire_backward: WireLike = None,
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
      wire, wire_backward, dequantize: see the module.
      backend: see the module.
      algorithm: "partners" (a source waits for its target alone; for shifts by one position) or
        "everyone" (a source waits for all devices within reach).

    Returns:
      What arrived, of x's shape; zeros on devices that are not a target.

    Raises:
      CollectiveError: a source or a target that occurs twice or does not exist, or axes that are
        not in the mesh's order.
      UnboundAxisError, AlgorithmError, BackendError: see `errors`.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.ppermute(x, "x", [(0, 1), (1, 0)]), axis_name="x")(jnp.arange(2.0))
      Array([1., 0.], dtype=float32)
    """
    over: dict[str, Any] = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, None, backend, algorithm, **over)
    validation.check_order(axis_name)
    pairs = validation.checked_perm(perm, validation.size_of(axis_name))
    given = quantized.sent(x, wire, axis_name, None, quantized.WHOLE, how)
    validation.check_flag("dequantize", dequantize)
    if not dequantize:
        narrow = quantized.checked(wire, wire_backward)
        options: dict[str, Any] = {"perm": pairs, "backend": backend, "algorithm": algorithm}
        move = functools.partial(ppermute, axis_name=axis_name, **options)
        return quantized.permuted(given, narrow, how, move)
    return primitives.with_twins(how, lambda x: LAX.ppermute(x, axis_name, pairs), given)


def pshuffle(
    x: Any,
    axis_name: AxisName,
    perm: Sequence[int],
    *,
    wire: WireLike = None,
    wire_backward: WireLike = None,
    dequantize: bool = True,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """`ppermute` by sources, as `jax.lax.pshuffle`: device i gets the x of device perm[i].

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.pshuffle(x, "x", [1, 2, 3, 0]), axis_name="x")(jnp.arange(4.0))
      Array([1., 2., 3., 0.], dtype=float32)
    """
    over: dict[str, Any] = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, None, backend, algorithm, **over)
    validation.check_order(axis_name)
    pairs = validation.shuffled(perm, validation.size_of(axis_name))
    if dequantize is not True:
        by: dict[str, Any] = {**over, "backend": backend, "algorithm": algorithm}
        return ppermute(x, axis_name, pairs, dequantize=dequantize, **by)
    given = quantized.sent(x, wire, axis_name, None, quantized.WHOLE, how)
    return primitives.with_twins(how, lambda x: LAX.pshuffle(x, axis_name, perm), given)


def pswapaxes(
    x: Any,
    axis_name: AxisName,
    axis: int,
    *,
    axis_index_groups: Groups = None,
    wire: WireLike = None,
    wire_backward: WireLike = None,
    dequantize: bool = True,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """Swaps a mesh axis with a dimension, as `jax.lax.pswapaxes`: `all_to_all` on one `axis`.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.pswapaxes(x, "x", 0), axis_name="x")(jnp.arange(4.0).reshape(2, 2))
      Array([[0., 2.],
             [1., 3.]], dtype=float32)
    """
    over: dict[str, Any] = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, axis_index_groups, backend, algorithm, **over)
    axis_index_groups = validation.plain_groups(axis_index_groups)
    validation.check_blocks("axis", axis, x, axis_name, axis_index_groups, tiled=False)
    options = {"axis_index_groups": axis_index_groups}
    if dequantize is not True:
        by: dict[str, Any] = {**over, **options, "backend": backend, "algorithm": algorithm}
        return all_to_all(x, axis_name, axis, axis, dequantize=dequantize, **by)
    n = validation.devices_of(axis_name, axis_index_groups)
    groups = quantized.Groups(axis, n)
    given = quantized.sent(x, wire, axis_name, axis_index_groups, groups, how)
    return primitives.with_twins(how, lambda x: LAX.pswapaxes(x, axis_name, axis, **options), given)


def pbroadcast(
    x: Any,
    axis_name: AxisName,
    source: Number,
    *,
    wire: WireLike = None,
    wire_backward: WireLike = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> Any:
    """Gives every device the x of device `source`, bit for bit, as `jax.lax.pbroadcast`.

    Over a wire all get the same bits, the source too. A gradient is the sum of everyone's, which
    goes by `wire_backward`; tangents travel as they are.

    Example:
      >>> mesh = jax.make_mesh((2,), ("x",))
      >>> pc.sharded.pbroadcast(np.float32([0, 1]), mesh=mesh, axis_name="x", source=1).tolist()
      [1.0, 1.0]
    """
    how = choice.settle(axis_name, None, backend, algorithm)
    over = choice.over_wires(how, wire, wire_backward)
    devices = validation.size_of(axis_name)
    source = validation.checked_source(source, devices)

    def move(how: How, x: Any) -> Any:
        return primitives.with_twins(how, lambda x: LAX.pbroadcast(x, axis_name, source), x)

    if wire is wire_backward is None or devices == 1:
        return move(how, x)
    given = quantized.sent(x, wire, axis_name, None, quantized.WHOLE, how)
    tangents = functools.partial(move, dataclasses.replace(over, wire=None))
    ways: dict[str, Any] = {
        "how": how,
        "move": functools.partial(move, how),
        "derivative": tangents,
    }
    each = functools.partial(quantized.broadcast, wire=over.wire, **ways)
    return jax.tree.map(lambda leaf: each(jnp.asarray(leaf)), given)
