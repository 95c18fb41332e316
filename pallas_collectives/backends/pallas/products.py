"""Products fused with their collective on Pallas kernels: the layout, and the launch.

Kernels take (A, rows, K) with blocks along rows. Dimensions before the collective's axis are merged
into A; that axis and those up to the last are merged into rows. This needs no pass if rows, K and N
are whole tiles (8 rows of 4-byte, 16 of 2-byte, 32 of 1-byte elements; 128 of K and N). Others are
padded with zeros, in one pass over the operand, and results are cut.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike

from pallas_collectives import _compat, validation
from pallas_collectives.annotations import DType, DTypeLike, Interpret
from pallas_collectives.backends import canonical
from pallas_collectives.backends.plans import How
from pallas_collectives.kernels import collective_matmul, matmul_plan
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.kernels.machinery.blocks import LANES, sublanes, up
from pallas_collectives.topology import placement, two_rings
from pallas_collectives.topology.groups import Group
from pallas_collectives.validation import AxisName

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"


@dataclasses.dataclass(frozen=True)
class Spec:
    """The parameters that both primitives have.

    Attributes:
      axis_name: mesh axis or axes.
      axis: the dimension of x that is gathered or scattered, counted from 0.
      out_dtype: the dtype of products.
      transposed: weights are (N, K).
      precision: as `jax.lax.dot_general`'s.
      how: what the call asks for.
      wish: "fused" (or an error), "preferred" (wherever a kernel can serve), "" (where it pays), or
        "unfused".
      precise: sums travel in float32.
      scale: a factor of the scattered sum.
      keeps: whether the gathered operand is wanted; what stands in its place is not read otherwise.
      turned: x is (..., n * rows) and w (..., N), and the product (n * rows, N) sums over all other
        dimensions, as that of weights' gradients; it is scattered along its rows, `axis` 0.
      stacked: weights of three dimensions are those of all turns of a loop, each whole tiles; the
        last operand, int32[1], says which of them counts.
    """

    axis_name: AxisName
    axis: int
    out_dtype: DTypeLike
    transposed: bool
    precision: PrecisionLike
    how: How
    wish: str = ""
    precise: bool = False
    scale: float = 1.0
    keeps: bool = True
    turned: bool = False
    stacked: bool = False

    @property
    def size(self) -> int:
        """How many devices there are."""
        return validation.size_of(self.axis_name)

    def transpose(self, out_dtype: DTypeLike) -> "Spec":
        """The parameters of the transposed product, which nobody asked for by name."""
        return dataclasses.replace(
            self,
            transposed=not self.transposed,
            out_dtype=jnp.dtype(out_dtype),
            wish=self.wish and "preferred",
            scale=1.0,
        )


@dataclasses.dataclass(frozen=True)
class ProductLayout:
    """An operand of `n` blocks along `axis` as (A, n * rows, K), and back.

    Attributes:
      shape: the shape of the operand.
      axis: the collective's axis, not the last.
      n: blocks along it.
      whole: rows of a block are padded to a multiple of this.
    """

    shape: tuple[int, ...]
    axis: int
    n: int
    whole: int

    @property
    def batch(self) -> int:
        """A: everything before the axis."""
        return math.prod(self.shape[: self.axis])

    @property
    def rows(self) -> int:
        """Rows of a block, as they are."""
        return math.prod(self.shape[self.axis : -1]) // self.n

    @property
    def block(self) -> tuple[int, int, int]:
        """The shape of a block as the kernel has it."""
        return self.batch, up(self.rows, self.whole), up(self.shape[-1], LANES)

    def rows_first(self, x: jax.Array) -> jax.Array:
        """The operand as the kernel has it."""
        batch, rows, depth = self.block
        blocks = x.reshape(self.batch, self.n, self.rows, x.shape[-1])
        padding = ((0, 0), (0, 0), (0, rows - self.rows), (0, depth - x.shape[-1]))
        return jnp.pad(blocks, padding).reshape(batch, self.n * rows, depth)

    def back(self, y: jax.Array, n: int, last: int) -> jax.Array:
        """A result of n such blocks, with `last` columns, in the operand's dimensions."""
        blocks = y.reshape(self.batch, n, self.block[1], y.shape[-1])
        size = self.shape[self.axis] // self.n * n
        kept = blocks[:, :, : self.rows, :last]
        return kept.reshape(*self.shape[: self.axis], size, *self.shape[self.axis + 1 : -1], last)


def kernel_dtype(out_dtype: DTypeLike) -> DType:
    """The dtype in which a kernel writes results of `out_dtype`: 8-bit results are written wide."""
    if jnp.dtype(out_dtype).itemsize > 1 and out_dtype not in (jnp.float16, jnp.int16):
        return jnp.dtype(out_dtype)
    integer = jnp.issubdtype(out_dtype, jnp.integer)
    return jnp.dtype(jnp.int32 if integer else jnp.float32)


def wire_dtype(out_dtype: DTypeLike, precise: bool) -> DType:
    """The dtype in which sums of products travel: the results', or a wide one on request."""
    dtype = kernel_dtype(out_dtype)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return jnp.dtype(jnp.float32) if precise and is_float else dtype


def settled_precision(precision: PrecisionLike) -> Any:
    """The precision that a kernel multiplies with: the caller's, or JAX's default."""
    chosen = one_precision(precision)
    return one_precision(_compat.default_matmul_precision()) if chosen is None else chosen


def one_precision(precision: Any) -> Any:
    """One precision for both operands, as jax.lax's; an unknown one is returned as it is."""
    if isinstance(precision, tuple) and len(set(precision)) == 1:
        return one_precision(precision[0])
    names = {"default": lax.Precision.DEFAULT, "highest": lax.Precision.HIGHEST}
    return names.get(precision, precision) if isinstance(precision, str) else precision


def gather_layout(
    shape: tuple[int, ...], axis: int, x_dtype: DType, out_dtype: DTypeLike
) -> ProductLayout:
    """The layout of `all_gather_matmul`'s x."""
    return ProductLayout(shape, axis, 1, max(sublanes(x_dtype), sublanes(kernel_dtype(out_dtype))))


def scatter_layout(
    shape: tuple[int, ...], axis: int, n: int, x_dtype: DType, wire: DType
) -> ProductLayout:
    """The layout of `matmul_reduce_scatter`'s x."""
    return ProductLayout(shape, axis, n, max(sublanes(x_dtype), sublanes(wire)))


def rows_and_depth(turned: Sequence[int]) -> tuple[int, int]:
    """What an x is seen as that is `Spec.turned`: (n * rows, K)."""
    return turned[-1], math.prod(turned[:-1])


def plan(
    op: str, x_shape: tuple[int, ...], x_dtype: DType, ws: Sequence[Any], spec: Spec, group: Group
) -> tuple[matmul_plan.ProductTiling, int]:
    """How the products of one block go, and the bytes of a block on the wire."""
    columns = [up(w.shape[-2 if spec.transposed else -1], 128) for w in ws]
    if op == GATHER:
        layout = gather_layout(x_shape, spec.axis, x_dtype, spec.out_dtype)
        weights = list(zip(columns, (w.dtype for w in ws), strict=True))
        out, terms, wire, width = kernel_dtype(spec.out_dtype), 0, x_dtype, layout.block[2]
    else:
        wire = wire_dtype(spec.out_dtype, spec.precise)
        x_shape = rows_and_depth(x_shape) if spec.turned else x_shape
        layout = scatter_layout(x_shape, spec.axis, spec.size, x_dtype, wire)
        weights, out, terms, width = [(columns[0], ws[0].dtype)], wire, 2, columns[0]
    block_bytes = math.prod(layout.block[:2]) * width * jnp.dtype(wire).itemsize
    found = matmul_plan.plan(
        layout.block,
        weights,
        x_dtype,
        out,
        group=group,
        block_bytes=block_bytes,
        cores=launch.cores(spec.how.interpret),
        terms=terms,
        transposed=spec.transposed,
        turned=spec.turned,
        precision=settled_precision(spec.precision),
    )
    return found, block_bytes


def on_wires(group: Group) -> Group:
    """A group in the order of its ring, or of two on links of their own (see `placement`)."""
    return two_rings.of(placement.arranged(group))


def kernel(*operands: jax.Array, op: str, spec: Spec) -> list[jax.Array]:
    """The kernel's results."""
    group = on_wires(canonical.group_of(spec.axis_name))
    xs, ws, turn = parts(operands, op, spec)
    options: dict[str, Any] = {
        "turn": turn,
        "axis": spec.axis,
        "out_dtype": spec.out_dtype,
        "transposed": spec.transposed,
        "precision": settled_precision(spec.precision),
        "interpret": spec.how.interpret,
    }
    if op == GATHER:
        return all_gather_matmul(xs[0], ws, group, **options)
    options |= {"precise": spec.precise, "scale": spec.scale, "turned": spec.turned}
    return [matmul_reduce_scatter(xs, ws, group, **options)]


def parts(
    operands: Sequence[Any], op: str, spec: Spec
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """The xs, the ws, and a loop's turn or nothing, of a primitive's operands."""
    count = len(operands) - spec.stacked
    xs = 1 if op == GATHER else count // 2
    return operands[:xs], operands[xs:count], operands[count:]


def halves(operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The xs and the ws of `matmul_reduce_scatter`'s operands."""
    return list(operands[: len(operands) // 2]), list(operands[len(operands) // 2 :])


def all_gather_matmul(
    x: jax.Array,
    ws: Sequence[jax.Array],
    group: Group,
    *,
    axis: int,
    out_dtype: DTypeLike,
    transposed: bool,
    precision: PrecisionLike,
    interpret: Interpret,
    turn: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """The gathered x, and its product with each w."""
    layout = gather_layout(x.shape, axis, x.dtype, out_dtype)
    gathered, *products = collective_matmul.all_gather_matmul(
        layout.rows_first(x),
        [_whole_lanes(w) for w in ws],
        group,
        out_dtype=kernel_dtype(out_dtype),
        transposed=transposed,
        precision=precision,
        interpret=interpret,
        turn=turn,
    )
    sizes = [w.shape[-2 if transposed else -1] for w in ws]
    results = [
        layout.back(y, group.size, size).astype(out_dtype)
        for y, size in zip(products, sizes, strict=True)
    ]
    return [layout.back(gathered, group.size, x.shape[-1]), *results]


def matmul_reduce_scatter(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    group: Group,
    *,
    axis: int,
    out_dtype: DTypeLike,
    precise: bool,
    scale: float,
    transposed: bool,
    precision: PrecisionLike,
    interpret: Interpret,
    turned: bool,
    turn: Sequence[jax.Array] = (),
) -> jax.Array:
    """Block `me` along `axis` of `scale` times everyone's sum of x @ w, of one pair or several.

    Several pairs are multiplied side by side, as one product with a longer K: one more pass.
    """
    x = xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis=-1)
    w = ws[0] if len(ws) == 1 else jnp.concatenate(ws, axis=1 if transposed else 0)
    wire = wire_dtype(out_dtype, precise)
    seen = rows_and_depth(x.shape) if turned else x.shape
    layout = scatter_layout(seen, axis, group.size, x.dtype, wire)
    y = collective_matmul.matmul_reduce_scatter(
        x.reshape(1, *seen[::-1]) if turned else layout.rows_first(x),
        w.reshape(-1, w.shape[-1]) if turned else _whole_lanes(w),
        group,
        wire_dtype=wire,
        scale=scale,
        transposed=transposed,
        precision=precision,
        interpret=interpret,
        turned=turned,
        turn=turn,
    )
    return layout.back(y, 1, w.shape[-2 if transposed else -1]).astype(out_dtype)


def _whole_lanes(w: jax.Array) -> jax.Array:
    padding = [(0, -size % LANES) for size in w.shape]
    return w if w.ndim > 2 else jnp.pad(w, padding)  # those of all turns are whole
