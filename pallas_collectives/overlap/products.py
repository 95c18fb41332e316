"""Products fused with the collective before or after them, and the pipelines that they run on.

    all_gather_matmul        all_gather(x) @ w: blocks are multiplied while others are on the wire
    matmul_reduce_scatter    psum_scatter(x @ w): blocks are computed while others are on the wire
    gather_and_consume       the first, with your own kernel body in place of the product
    produce_and_scatter      the second, likewise

On TPUs, real or simulated, each is one kernel. On the NVIDIA GPUs of one host the first two are
products of cuBLASLt beside copies between GPUs (`nccl.products`), of bfloat16 or float16. For what
neither serves algorithm="fused" makes them pipelines of permutes and XLA's products
(`array_pipelines`), and they run unfused without it. `fusion_counts()` says what ran and why;
`explain` says it beforehand.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from pallas_collectives import validation
from pallas_collectives.backends import choice
from pallas_collectives.backends.pallas.products import Spec
from pallas_collectives.errors import AlgorithmError, CollectiveError, DtypeError
from pallas_collectives.overlap import primitives
from pallas_collectives.validation import AxisName
from pallas_collectives.wires import WireLike


def all_gather_matmul(
    x_shard: jax.Array,
    ws: Any,
    axis_name: AxisName,
    *,
    gather_axis: int = 0,
    return_gathered: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
    order: str | None = None,
    wire: WireLike = None,
    wire_backward: WireLike = None,
    backend: str | None = None,
    algorithm: str | None = None,
) -> Any:
    """Multiplies the x of all devices with weights, each block as it arrives.

    Equals `jnp.matmul(jax.lax.all_gather(x_shard, axis_name, axis=gather_axis, tiled=True), w)`.

    Args:
      x_shard: (..., s, ..., K) per device, of rank 2 or more.
      ws: the right-hand side, (K, N); or a list or tuple of them. x is gathered once for all.
      axis_name: mesh axis, or tuple of axes, of n devices together.
      gather_axis: the dimension along which blocks are concatenated. The last dimension, over which
        products are summed, is served unfused.
      return_gathered: return the gathered x as well.
      preferred_element_type: as `jnp.matmul`'s: the dtype of the products.
      precision: as `jnp.matmul`'s.
      order: "rank" to have the backward pass add in the order of the ranks, see
        `matmul_reduce_scatter`.
      wire: the numbers that x travels as, "int8" or others (see `collectives`), and
      wire_backward: those of its derivative. Products of what comes over a wire run unfused.
      backend: see `collectives`.
      algorithm: "fused", "unfused", or None: the one that a model of the chip says is faster.
        "fused" is one kernel on TPUs and products beside copies on GPUs; where neither can serve
        it is `pipelined_all_gather_and_consume`, and None is "unfused".

    Returns:
      The product (..., n * s, ..., N), or a list or tuple of them as `ws` is one; with
      `return_gathered` a pair of that and the gathered x.

    Gradients: the backward pass is `matmul_reduce_scatter`, and a product for each weight.
    float32, bfloat16, int8 (int32 products) and float8 (float32 products; not on v4) are fused on
    TPUs, bfloat16 and float16 with K and N that are multiples of 8 on GPUs. On TPUs
    operands are read in place if K and N are multiples of 128 and the dimensions from `gather_axis`
    to the last but one are, together, whole tiles (see `all_gather`). Other sizes are padded, in
    one more pass.

    Raises:
      UnboundAxisError, CollectiveError: axes, dimensions or shapes that do not fit.
      AlgorithmError: "fused" was asked for and cannot be done; the error says why.
      BackendError: see `errors`.

    Example, inside `jax.shard_map` over 8 devices:
      x: bf16[1024, 8192], w: bf16[8192, 3584] -> all_gather_matmul(x, w, "x"): bf16[8192, 3584]

    Example, with `jax.vmap` in place of a mesh:
      >>> w = jnp.ones((2, 2, 1))
      >>> jax.vmap(lambda x, w: pc.all_gather_matmul(x, w, "x"), axis_name="x")(w.mT, w).shape
      (2, 2, 1)
    """
    validation.check_flag("return_gathered", return_gathered)
    several = isinstance(ws, list | tuple)
    x = _array("x_shard", x_shard)
    weights = [_array("ws", w) for w in (ws if several else [ws])]
    contracted = validation.size_of(axis_name) * x.shape[-1] if _is_last(gather_axis, x) else None
    axis = _check_operands("gather_axis", gather_axis, x, weights, axis_name, contracted)
    over = {"wire": wire, "wire_backward": wire_backward}
    spec = _spec(
        axis_name, axis, x, weights, preferred_element_type, precision, order, backend, algorithm,
        over, keeps=return_gathered,
    )  # fmt: skip
    gathered, *products = primitives.all_gather_matmul(x, weights, spec, **over)
    result = jax.tree.unflatten(jax.tree.structure(ws), products) if several else products[0]
    return (result, gathered) if return_gathered else result


def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    axis_name: AxisName,
    *,
    scatter_axis: int = 0,
    reduce: str = "sum",
    precise: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
    order: str | None = None,
    wire: WireLike = None,
    wire_backward: WireLike = None,
    backend: str | None = None,
    algorithm: str | None = None,
) -> jax.Array:
    """Sums x @ w over devices and leaves each one block, computed just before it is sent.

    Equals `jax.lax.psum_scatter(jnp.matmul(x, w), axis_name, scatter_dimension=scatter_axis,
    tiled=True)`.

    Args:
      x: (..., n * s, ..., K) per device, of rank 2 or more.
      w: (K, N).
      axis_name: mesh axis, or tuple of axes, of n devices together.
      scatter_axis: the dimension that is cut into n blocks. The last is served unfused.
      reduce: "sum" or "mean".
      precise: sums travel in float32, whatever the result's dtype.
      preferred_element_type: as `jnp.matmul`'s: the dtype of the result, in which sums travel.
      precision: as `jnp.matmul`'s.
      order: "rank" to have products added in the order of the ranks, see `psum`; unfused, as the
        kernel adds them on their way round the ring.
      wire: the numbers that products travel as, "int8" or others (see `collectives`), and
      wire_backward: those of the derivative. Products for a wire run unfused.
      backend: see `collectives`.
      algorithm: "fused", "unfused" or None, as `all_gather_matmul`'s; the pipeline is
        `pipelined_produce_and_all_to_all`.

    Returns:
      (..., s, ..., N): device p's is block p of the sum, or mean.

    Products and sums are added up in float32 (int32 for integers) on each device, and rounded once
    per hop, or with `precise` once at the end. The order of additions is fixed.
    Gradients: the backward pass is `all_gather_matmul`, and a product for the weight.

    Raises:
      UnboundAxisError, CollectiveError: axes, dimensions or shapes that do not fit.
      DtypeError: a mean of integers.
      AlgorithmError: "fused" was asked for and cannot be done; the error says why.
      BackendError: see `errors`.

    Example, inside `jax.shard_map` over 8 devices:
      x: bf16[8192, 3584], w: bf16[3584, 8192] -> matmul_reduce_scatter(x, w, "x"): bf16[1024, 8192]

    Example, with `jax.vmap` in place of a mesh:
      >>> x, w = jnp.ones((2, 4, 3)), jnp.ones((2, 3, 5))
      >>> jax.vmap(lambda x, w: pc.matmul_reduce_scatter(x, w, "x"), axis_name="x")(x, w).shape
      (2, 2, 5)
    """
    x, w = _array("x", x), _array("w", w)
    axis = _check_operands("scatter_axis", scatter_axis, x, [w], axis_name)
    n = validation.size_of(axis_name)
    size = w.shape[1] if axis == x.ndim - 1 else x.shape[axis]
    if size % n:
        rule = f"it must be a multiple of the {n} devices"
        remedy = f"pad it to {-(-size // n) * n}"
        raise CollectiveError(f"dimension scatter_axis={axis} of size {size}", rule, remedy)
    if reduce not in ("sum", "mean"):
        raise CollectiveError(
            f"reduce={reduce!r}", "it must be 'sum' or 'mean'", "pass one of these"
        )
    validation.check_flag("precise", precise)
    over = {"wire": wire, "wire_backward": wire_backward}
    spec = _spec(
        axis_name, axis, x, [w], preferred_element_type, precision, order, backend, algorithm, over,
        precise=precise, scale=1.0 if reduce == "sum" else 1 / n,
    )  # fmt: skip
    if reduce == "mean" and not jnp.issubdtype(spec.out_dtype, jnp.inexact):
        rule = "a mean of integers is not an integer"
        raise DtypeError(f"reduce='mean' of {spec.out_dtype}", rule, "pass a floating dtype")
    return primitives.matmul_reduce_scatter([x], [w], spec, **over)


def _array(name: str, value: Any) -> jax.Array:
    """An argument as an array."""
    try:
        return jnp.asarray(value)
    except CollectiveError:
        raise  # which says more
    except (TypeError, ValueError):
        rule = "it must be an array"
        raise CollectiveError(f"{name}={value!r}", rule, "pass one of numbers") from None


def _is_last(axis: int, x: jax.Array) -> bool:
    """Whether an axis is x's last, which products are summed over."""
    return x.ndim > 1 and axis in (-1, x.ndim - 1)


def _check_operands(
    name: str,
    axis: int,
    x: jax.Array,
    ws: Sequence[jax.Array],
    axis_name: AxisName,
    contracted: int | None = None,
) -> int:
    """The axis, counted from 0; raises where operands do not fit each other or the mesh.

    `contracted` is the K of weights where it is not that of x.
    """
    validation.size_of(axis_name)
    if not ws:
        raise CollectiveError(
            "no weights", "a product needs a right-hand side", "pass one of shape (K, N)"
        )
    depth = contracted or (x.shape[-1] if x.ndim else 0)
    if x.ndim < 2 or any(w.ndim != 2 or w.shape[0] != depth for w in ws):
        shapes = ", ".join(str(operand.shape) for operand in (x, *ws))
        raise CollectiveError(
            f"operands of shapes {shapes}",
            "x must be (..., K), of two dimensions or more, and weights (K, N)",
            "reshape or transpose them",
        )
    validation.check_axis(name, axis, x.ndim)
    return axis % x.ndim


def _spec(
    axis_name: AxisName,
    axis: int,
    x: jax.Array,
    ws: Sequence[jax.Array],
    dtype: DTypeLike | None,
    precision: PrecisionLike,
    order: str | None,
    backend: str | None,
    algorithm: str | None,
    over: dict[str, Any],
    **more: Any,
) -> Spec:
    algorithm = None if algorithm == "auto" else algorithm
    if algorithm not in (None, "fused", "unfused"):
        rule = "it must be 'fused', 'unfused', 'auto' or None"
        raise AlgorithmError(f"algorithm={algorithm!r}", rule, "pass one of these")
    axes = validation.named(axis_name)
    validation.check_order_of_sum(order, axes)
    how = choice.choose(axes, backend, None, more.get("precise", False), order)
    how = dataclasses.replace(choice.over_wires(how, *over.values()), precise=False)
    try:
        out = jnp.result_type(x, *ws) if dtype is None else jnp.dtype(dtype)
    except TypeError:
        what = f"preferred_element_type={dtype!r}"
        raise DtypeError(
            what, "it must be a dtype", "pass one such as jnp.float32, or None"
        ) from None
    wish = algorithm or ""
    validation.check_precision(precision)
    return Spec(axis_name, axis, jnp.dtype(out), False, precision, how, wish, **more)
