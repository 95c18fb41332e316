"""Products with their collective on NVIDIA GPUs: copies between GPUs beside products of cuBLASLt.

One call out of the program (`nccl.products`), which XLA may capture in a CUDA graph: for the GPUs
of one process, or of several on one host.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from pallas_collectives import _compat
from pallas_collectives._compat import Aval
from pallas_collectives.annotations import AnyMesh
from pallas_collectives.backends import canonical
from pallas_collectives.backends import nccl as on_gpus
from pallas_collectives.backends.nccl import run_by
from pallas_collectives.backends.pallas.products import GATHER, ProductLayout, Spec, halves
from pallas_collectives.kernels.machinery.blocks import block_shape, whole_shape
from pallas_collectives.nccl import cublas, mailboxes, products
from pallas_collectives.nccl.products import Multiplier, ProductWork
from pallas_collectives.topology import placement
from pallas_collectives.topology.groups import Group

# Of the model, all measured on H200: products (FLOP/s) by tiles, so many at a time, and what share
# of the rate tiles reach; copies to a peer (bytes/s); and seconds that a kernel takes besides, a
# call of NCCL's, and what hands a message on; and sums (bytes/s that they read or write).
_RATE, _PROCESSORS, _TILES = 7.7e14, 132, {(128, 256): 1.0, (128, 128): 1.0, (64, 128): 0.8}
_WIRE, _KERNEL, CALL, _HAND, _SUM = 3.4e11, 2e-6, 2.2e-5, 1.2e-5, 3.9e12
_CUTS = (1, 2)  # of a block that is to be scattered; the best by the model


def obstacle(op: str, xs: Sequence[Any], ws: Sequence[Any], spec: Spec) -> str:
    """Why such operands are not multiplied beside their collective; "" if they are."""
    if spec.axis == xs[0].ndim - 1:
        return "the axis is the last, along which products are not cut into blocks"
    if spec.size == 1:
        return "there is one device"
    dtypes = {jnp.dtype(a.dtype).name for a in (*xs, *ws)}
    if len(dtypes) > 1 or not dtypes <= set(cublas.MULTIPLIED):
        return f"operands are of {', '.join(sorted(dtypes))}, not all of bfloat16 or float16"
    if jnp.dtype(spec.out_dtype).name not in (*dtypes, "float32"):
        return f"products of {min(dtypes)} are not added up in {spec.out_dtype}"
    sizes = [size for operand in (*xs, *ws) for size in operand.shape]
    if 0 in sizes:
        return "an operand is empty"
    whole = cublas.ALIGNED // 2
    if uneven := [size for w in ws for size in w.shape if size % whole]:
        return f"K and N must be multiples of {whole}, and one is {uneven[0]}"
    if (mail := work(op, xs, ws, spec).mail_bytes) > (most := mailboxes.MOST_MAIL):
        return f"{mail >> 20} MiB come from the others, more than {most >> 20} are kept for"
    return ""


def seconds(todo: ProductWork) -> tuple[float, float]:
    """Modelled time of a call, and of NCCL's collective and a product one after the other."""
    rows, columns = todo.batch * todo.rows, sum(todo.columns)
    depth = sum(todo.depths) / len(todo.depths)
    whole = _multiplied(todo.size * rows, columns, depth)
    cuts, hops = todo.cuts, todo.size - 1
    each = cuts * _multiplied(-(-rows // cuts), columns, depth)
    wire = todo.block_bytes / _WIRE
    # Of a block in parts one is on the wire while another is multiplied; a whole one is added, too.
    hidden = each if todo.whole else each * (1 - 1 / cuts)
    adds = todo.kind == products.SCATTER and todo.whole
    added = _KERNEL + 3 * todo.block_bytes / _SUM if adds else 0.0
    exposed = hops * (max(wire - hidden, 0.0) + added) + len(todo.parts()) * _HAND
    return todo.size * each + exposed, whole + hops * wire + CALL


def _multiplied(rows: int, columns: int, depth: float) -> float:
    """Modelled time of a product: whole tiles, as many at a time as there are multiprocessors."""

    def by(tile: tuple[int, int], share: float) -> float:
        waves = math.ceil(-(-rows // tile[0]) * -(-columns // tile[1]) / _PROCESSORS)
        return waves * 2 * math.prod(tile) * depth * _PROCESSORS / (_RATE * share)

    return _KERNEL + min(by(tile, share) for tile, share in _TILES.items())


def unreachable(op: str, operands: Sequence[Any], spec: Spec, mesh: AnyMesh) -> str:
    """Why the devices of a mesh cannot multiply beside copies to each other; "" if they can."""
    xs, ws = (operands[:1], operands[1:]) if op == GATHER else halves(operands)
    try:
        members = placement.device_groups(mesh, canonical.group_of(spec.axis_name))
        _multipliers(work(op, xs, ws, spec), members)
    except mailboxes.MailboxError as error:
        return str(error)
    return ""


def work(op: str, xs: Sequence[Any], ws: Sequence[Any], spec: Spec) -> ProductWork:
    """What is done for a call."""
    gathers = op == GATHER
    layout = ProductLayout(xs[0].shape, spec.axis, 1 if gathers else spec.size, 1)
    columns = [w.shape[0 if spec.transposed else 1] for w in ws]
    wide = spec.precise and not gathers
    todo = ProductWork(
        kind=products.GATHER if gathers else products.SCATTER,
        size=spec.size,
        batch=layout.batch,
        rows=layout.rows,
        depths=tuple(x.shape[-1] for x in xs),
        columns=tuple(columns),
        transposed=spec.transposed,
        dtype=jnp.dtype(xs[0].dtype).name,
        result="float32" if wide else jnp.dtype(spec.out_dtype).name,
        keeps=gathers and spec.keeps,
    )
    if gathers:
        return todo
    cut = (dataclasses.replace(todo, cuts=cuts) for cuts in _CUTS)
    return min(cut, key=lambda todo: seconds(todo)[0])


def kernel(*operands: jax.Array, op: str, spec: Spec) -> list[jax.Array]:
    """[gathered x, x @ w, ...], or [the scattered sum]; a gathered x that nobody wants is zeros."""
    group = canonical.group_of(spec.axis_name)
    xs, ws = (operands[:1], operands[1:]) if op == GATHER else halves(operands)
    todo, shape = work(op, xs, ws, spec), xs[0].shape
    flat = [x.reshape(todo.batch, -1, x.shape[-1]) for x in xs]
    results = _products_p.bind(*flat, *ws, work=todo, group=group)
    if op != GATHER:
        block = block_shape(shape, spec.axis, spec.size)
        total = results[0].reshape(*block[:-1], todo.columns[0])
        total = total if spec.scale == 1.0 else total * spec.scale
        return [total.astype(spec.out_dtype)]
    whole = whole_shape(shape, spec.axis, spec.size)
    gathered = jnp.zeros(whole, xs[0].dtype)
    if todo.keeps:
        gathered = jnp.moveaxis(results.pop(), 0, 1).reshape(whole)
    ys = zip(results, todo.columns, strict=True)
    return [gathered, *(y.reshape(*whole[:-1], columns) for y, columns in ys)]


_products_p = core.Primitive("nccl_products")
_products_p.multiple_results = True


@_products_p.def_abstract_eval
def _types(*operands: Aval, work: ProductWork, group: Group) -> list[Any]:
    del operands, group
    dtype, result = jnp.dtype(work.dtype), jnp.dtype(work.result)
    if work.kind == products.SCATTER:
        shapes = [(), (work.size - 1,)]
        return [_compat.array_type((*s, *work.block_shape), result) for s in shapes]
    rows = work.size * work.rows
    types = [_compat.array_type((work.batch, rows, c), result) for c in work.columns]
    if work.keeps:
        types.append(_compat.array_type((work.size, *work.block_shape), dtype))
    return types


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: ir.Value, work: ProductWork, group: Group
) -> Sequence[ir.Value]:
    members = placement.device_groups(_compat.mesh_of(ctx), group)
    at = _multipliers(work, members)
    ids = [[d.id for d in devices] for devices in members]
    return run_by(ctx, f"{work} of {len(operands)} over {ids}", work, at, *operands)


def _multipliers(
    work: ProductWork, members: Sequence[Sequence[jax.Device]]
) -> dict[int, Multiplier]:
    """What does the work on each of this process's devices, by ordinal."""
    return on_gpus.by_mailboxes(members, lambda group: products.ready(group, work))


_compat.register(_products_p, lowering=_lower)
