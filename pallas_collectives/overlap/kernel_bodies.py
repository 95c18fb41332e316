"""Pipelines of hops and kernel bodies, for fused kernels of your own.

A body is a Pallas TPU kernel's: it reads and writes refs to tiles of rows in VMEM. Around it stands
what `all_gather_matmul` and `matmul_reduce_scatter` are built on (`kernels.pipelines`):
the ring, its semaphores and its double-buffering. Bodies run on TPUs, real or simulated;
`array_pipelines` has the same for whole arrays on any backend. vmap and differentiation raise an
error: put the pair in a `jax.custom_vjp`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core

from pallas_collectives import _compat, validation
from pallas_collectives.annotations import Interpret, Ref
from pallas_collectives.backends import canonical, choice
from pallas_collectives.errors import BackendError, CollectiveError, DtypeError
from pallas_collectives.kernels import tiled
from pallas_collectives.kernels.machinery.blocks import LANES, sublanes
from pallas_collectives.topology import placement
from pallas_collectives.topology.groups import Group
from pallas_collectives.validation import AxisName


def gather_and_consume(
    x_shard: jax.Array,
    consume: Callable[..., None],
    axis_name: AxisName,
    *,
    out: Any,
    operands: Sequence[Any] = (),
    tile: int | None = None,
    return_gathered: bool = False,
) -> Any:
    """Gathers rows from all devices and hands every tile of them to `consume` as it arrives.

    Equals consuming `jax.lax.all_gather(x_shard, axis_name, tiled=True)`, tile by tile.

    Args:
      x_shard: (rows, columns) per device: whole tiles of 8 rows of 4-byte, 16 of 2-byte or 32 of
        1-byte elements, and 128 columns.
      consume: body(x_tile, *operands, *out_tiles): reads refs to (tile, columns) of the gathered
        rows and to the operands, and writes every element of each (tile, out columns). Tiles come
        in any order.
      axis_name: mesh axis, or tuple of axes, of n devices together.
      out: `jax.ShapeDtypeStruct` of the result for one device's rows, (rows, any columns), or a
        pytree of several, whose tiles come in its order; whole tiles like x's.
      operands: arrays of two dimensions or more that stay whole in VMEM, such as scales or weights.
      tile: rows of a tile, a divisor of rows and whole tiles; None for as many as fit.
      return_gathered: return the gathered x as well.

    Returns:
      The results, (n * rows, columns) each, in out's structure; with `return_gathered` a pair of
      that and the gathered x.

    Raises:
      UnboundAxisError, CollectiveError: axes, shapes or tiles that do not fit; a body that does not
        fit its tiles, or returns something; vmap, or differentiation.
      DtypeError: a dtype that DMAs do not move.
      BackendError: no TPU, real or simulated, or axes that are not all manual.
      ReachError: the chip cannot write from each device to both neighbours on a ring of them (v5e).
      VmemError: tiles and operands exceed the chip's VMEM.

    Example, bytes that come are scaled while others are on the wire; inside `jax.shard_map`:
      >>> def scaled(x, scale):
      ...     def body(x, scale, y):
      ...         y[...] = (x[...].astype(jnp.float32) * scale[...]).astype(y.dtype)
      ...     out = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
      ...     return pc.gather_and_consume(x, body, "x", out=out, operands=[scale])
      >>> pc.verify.check(scaled, "s8[1024,1024]", "f32[1,1024]", devices=4).status
      'sound'
    """
    name, interpret = "gather_and_consume", _interpret(axis_name)
    x, *kept = (_operand(a, name) for a in (x_shard, *operands))
    outs, structure = jax.tree.flatten(out)
    _check_tiles(x, kept, outs, tile)
    if any(len(o.shape) != 2 or o.shape[0] != x.shape[0] for o in outs):
        shapes = ", ".join(str(o.shape) for o in outs)
        rule = f"each result has as many rows as x: {x.shape[0]}"
        raise CollectiveError(f"out of shapes {shapes}", rule, "give (rows, columns)")
    if validation.size_of(axis_name) == 1:
        raise _alone(axis_name)
    gathered, *results = tiled.gather_and_consume(
        x,
        kept,
        _group(name, axis_name),
        consume=_checked(consume, name),
        outs=outs,
        tile=tile,
        interpret=interpret,
    )
    gathered, results = _varying((gathered, results), axis_name)
    result = jax.tree.unflatten(structure, results)
    return (result, gathered) if return_gathered else result


def produce_and_scatter(
    x: jax.Array,
    produce: Callable[..., None],
    axis_name: AxisName,
    *,
    out: Any,
    operands: Sequence[Any] = (),
    tile: int | None = None,
    reduce: str = "sum",
) -> jax.Array:
    """Sums terms over devices; `produce` makes each tile's term just before its sum's hop.

    Equals `jax.lax.psum_scatter(terms, axis_name, tiled=True)` of all terms.

    Args:
      x: (n * rows, columns) per device: whole tiles, see `gather_and_consume`.
      produce: body(x_tile, *operands, term_tile): reads refs to (tile, columns) of x and to the
        operands, and writes every element of (tile, out columns), of float32 (int32 for integers).
        Tiles come in any order.
      axis_name: mesh axis, or tuple of axes, of n devices together.
      out: `jax.ShapeDtypeStruct` of the result, (rows, any columns); sums travel in its dtype,
        float32, bfloat16 or int32.
      operands: see `gather_and_consume`.
      tile: see `gather_and_consume`.
      reduce: "sum", or "mean" for floats.

    Returns:
      (rows, out columns): device p's is block p of the sum, or mean.

    Raises:
      UnboundAxisError, CollectiveError, DtypeError, BackendError, ReachError, VmemError: see
        `gather_and_consume`.

    Example, a product of int8 rows with scaled weights; inside `jax.shard_map`:
      >>> def product(x, w, scale):
      ...     def body(x, w, scale, term):
      ...         total = jnp.dot(x[...], w[...], preferred_element_type=jnp.int32)
      ...         term[...] = total.astype(jnp.float32) * scale[...]
      ...     out = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
      ...     return pc.produce_and_scatter(x, body, "x", out=out, operands=[w, scale])
      >>> operands = "s8[1024,256]", "s8[256,256]", "f32[1,256]"
      >>> pc.verify.check(product, *operands, devices=4).status
      'sound'
    """
    name, interpret = "produce_and_scatter", _interpret(axis_name)
    x, *kept = (_operand(a, name) for a in (x, *operands))
    n = validation.size_of(axis_name)
    _check_tiles(x, kept, [out], tile)
    if len(out.shape) != 2 or n * out.shape[0] != x.shape[0]:
        rule = f"x has {x.shape[0]} rows, which give each of {n} devices {x.shape[0] / n:g}"
        raise CollectiveError(f"out of shape {out.shape}", rule, "give (rows, columns)")
    if jnp.dtype(out.dtype).name not in ("float32", "bfloat16", "int32"):
        rule = "sums travel as float32, bfloat16 or int32"
        raise DtypeError(f"out of {out.dtype}", rule, "convert the result")
    floats = jnp.issubdtype(out.dtype, jnp.floating)
    if reduce not in ("sum", "mean") or (reduce == "mean" and not floats):
        rule = "it must be 'sum', or 'mean' for floats"
        raise CollectiveError(f"reduce={reduce!r} of {out.dtype}", rule, "pass one of these")
    if n == 1:
        raise _alone(axis_name)
    result = tiled.produce_and_scatter(
        x,
        kept,
        _group(name, axis_name),
        produce=_checked(produce, name),
        out=out,
        tile=tile,
        scale=1.0 if reduce == "sum" else 1 / n,
        interpret=interpret,
    )
    return _varying(result, axis_name)


def _group(name: str, axis_name: AxisName) -> Group:
    """The devices; raises where the chip cannot go round a ring of them."""
    group = placement.arranged(canonical.group_of(axis_name))
    placement.check_ring(name, group)
    return group


def _interpret(axis_name: AxisName) -> Interpret:
    """How kernels run here; raises where they cannot."""
    validation.size_of(axis_name)
    how = choice.choose(validation.named(axis_name), None, None)
    if how.backend != "pallas":
        rule = how.fallback or "kernel bodies run on TPUs and simulated TPUs only"
        remedy = "use pipelined_all_gather_and_consume or pipelined_produce_and_all_to_all"
        raise BackendError(f"a kernel body on backend {how.backend!r}", rule, remedy)
    return how.interpret


# What a body reads has gone through this, so that grad and vmap raise our error and not one of
# Pallas' own rules.
_operand_p = core.Primitive("pallas_pipeline_operand")
_operand_p.def_abstract_eval(lambda aval, *, name: aval)


def _operand(x: Any, name: str) -> jax.Array:
    return _operand_p.bind(jnp.asarray(x), name=name)


def _refuse_jvp(*_: Any, name: str) -> NoReturn:
    rule = "the derivative of what a kernel body computes is not known"
    remedy = "put the call in a jax.custom_vjp, with another body for the backward pass"
    raise CollectiveError(f"a derivative of {name}", rule, remedy)


def _refuse_vmap(*_: Any, name: str) -> NoReturn:
    rule = "a body takes tiles of rows, and cannot take a mapped axis"
    remedy = "put the mapped arrays side by side in rows or columns, or use jax.lax.map"
    raise CollectiveError(f"vmap of {name}", rule, remedy)


_compat.register(
    _operand_p,
    lowering=lambda ctx, x, *, name: [x],
    jvp=_refuse_jvp,
    batch_alone=_refuse_vmap,
)


def _checked(body: Callable[..., Any], name: str) -> Callable[..., None]:
    """The body, with errors that name its tiles; one that returns something is refused."""

    @functools.wraps(body)
    def run(*refs: Ref) -> None:
        tiles = ", ".join(f"{jnp.dtype(ref.dtype).name}{list(ref.shape)}" for ref in refs)
        value = f"the body of {name} on tiles {tiles}"
        remedy = "give each result ref an array of its shape and dtype, as y[...] = value"
        try:
            result = body(*refs)
        except (TypeError, ValueError) as error:
            raise CollectiveError(value, str(error).strip(" ."), remedy) from error
        if result is not None:
            rule = "it returns something, but must write its results to its last refs"
            raise CollectiveError(value, rule, remedy)

    return run


def _alone(axis_name: AxisName) -> CollectiveError:
    rule = "a pipeline needs two devices or more, and this group has one"
    return CollectiveError(f"axis_name={axis_name!r}", rule, "call the body in a pallas_call")


def _check_tiles(
    x: jax.Array, operands: Sequence[jax.Array], outs: Sequence[Any], tile: int | None
) -> None:
    """Arrays of rows are whole tiles, and the tile asked for cuts them."""
    if not outs or not all(hasattr(out, "shape") and hasattr(out, "dtype") for out in outs):
        rule = "each result must have a shape and a dtype"
        raise CollectiveError(f"out={outs}", rule, "give jax.ShapeDtypeStruct(shape, dtype)")
    for a in (x, *outs):
        rows = sublanes(a.dtype)
        if len(a.shape) != 2 or 0 in a.shape or a.shape[0] % rows or a.shape[1] % LANES:
            rule = f"it must be whole tiles: a multiple of {rows} rows and of {LANES} columns"
            raise CollectiveError(f"an array of shape {a.shape}, {a.dtype}", rule, "pad it")
    for a in (x, *operands, *outs):
        if jnp.dtype(a.dtype).itemsize > 4 or a.dtype in (jnp.float16, jnp.bool_):
            rule = "DMAs move float32, bfloat16, float8 and integers of up to 32 bits"
            raise DtypeError(f"an array of {a.dtype}", rule, "convert it to float32")
    for operand in operands:
        if operand.ndim < 2:
            rule = "operands in VMEM must have two dimensions or more"
            raise CollectiveError(f"an operand of shape {operand.shape}", rule, "write x[None]")
    whole = max(sublanes(a.dtype) for a in (x, *outs))
    fits = tile is None or (isinstance(tile, int) and tile > 0 and tile % whole == 0)
    if not fits or (tile and outs[0].shape[0] % tile):
        rule = f"it must be a multiple of {whole} that divides a block's {outs[0].shape[0]} rows"
        raise CollectiveError(f"tile={tile}", rule, "pass such a number of rows, or None")
    if outs[0].shape[0] % whole:
        rule = f"with these dtypes they must be a multiple of {whole}"
        raise CollectiveError(f"{outs[0].shape[0]} rows of a block", rule, "pad them")


def _varying(tree: Any, axis_name: AxisName) -> Any:
    """Results typed as different on every device."""
    axes = validation.named(axis_name)
    return jax.tree.map(lambda x: _compat.as_varying(x, axes), tree)
