"""A sum over devices with what follows it in every layer of a transformer: residual and norm.

Fused it is one kernel on TPUs (`kernels.residual_norm`), apart a `psum` and XLA's passes over its
result. Which of them runs is decided while a program is lowered, when it is known where the devices
are, and counted (`fusion_counts`). Derivatives are those of the form apart.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching
from jax.typing import DTypeLike

from pallas_collectives import _compat, catalogue, collectives, validation
from pallas_collectives._compat import Aval
from pallas_collectives.backends import (
    canonical,
    choice,
    counters,
    fastest,
    serving,
    slices,
)
from pallas_collectives.backends.plans import FUSED, UNFUSED, How, ProductPlan
from pallas_collectives.collectives import LAX
from pallas_collectives.errors import AlgorithmError, CollectiveError, DtypeError
from pallas_collectives.kernels import residual_norm
from pallas_collectives.kernels.machinery.blocks import LANES, sublanes
from pallas_collectives.lowering import placed, remat
from pallas_collectives.topology import chips, placement
from pallas_collectives.topology.groups import Group
from pallas_collectives.validation import AxisName, Groups

NAME = "psum_residual_rmsnorm"
_GATHER = "gather"  # the sum that the kernel goes on with
_FUSED_DTYPES = ("float32", "bfloat16")


def psum_residual_rmsnorm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    axis_name: AxisName,
    *,
    eps: float = 1e-6,
    axis_index_groups: Groups = None,
    order: str | None = None,
    backend: str | None = None,
    algorithm: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums x over devices, adds a residual, and normalises the rows of the result.

    Equals, each result rounded once from float32:

        new = residual + jax.lax.psum(x, axis_name)
        normed = new / sqrt(mean(new**2, axis=-1) + eps) * weight

    Args:
      x: (..., D) per device, floats: its term of the sum, such as a product's with its part of K.
      residual: (..., D), floats, the same on all devices of the axis.
      weight: (D,).
      axis_name: mesh axis, or tuple of axes.
      eps: added to the mean square of a row.
      axis_index_groups: lists of device numbers that partition the axis; each sums by itself.
      order: "rank" for a sum in the order of the ranks, see `psum`. In one kernel it always is.
      backend: see `collectives`.
      algorithm: "fused" (one kernel, on TPUs), "unfused", or None for what is faster by the table
        of times and a model of the chip.

    Returns:
      normed, of x's dtype, and new, of the residual's.

    One kernel serves float32 and bfloat16, small arrays best: everyone's x is gathered in VMEM.
    Rows that are not whole tiles (8 of 4-byte, 16 of 2-byte elements; 128 columns) are padded, a
    pass over each operand.

    Raises:
      UnboundAxisError, CollectiveError: axes, shapes or an eps that do not fit.
      DtypeError: an operand whose numbers are not floats.
      AlgorithmError: "fused" cannot serve this call; the message says why.
      BackendError: see `errors`.

    Example, inside `jax.shard_map` over 8 devices:
      normed, h = psum_residual_rmsnorm(attention_out, h, weight, "x")  # bf16[64, 8192] each

    Example, with `jax.vmap` in place of a mesh:
      >>> x, weight = jnp.ones((2, 1, 4)), jnp.ones((2, 4))
      >>> _, total = jax.vmap(
      ...     lambda x, w: pc.psum_residual_rmsnorm(x, x, w, "x"), axis_name="x"
      ... )(x, weight)
      >>> total.tolist()
      [[[3.0, 3.0, 3.0, 3.0]], [[3.0, 3.0, 3.0, 3.0]]]
    """
    x, residual, weight = map(jnp.asarray, (x, residual, weight))
    _check(x, residual, weight, eps)
    size = validation.size_of(axis_name)
    axes = validation.named(axis_name)
    if axis_index_groups is not None:
        validation.check_groups(axis_index_groups, size)
    validation.check_order_of_sum(order, axes)
    algorithm = None if algorithm == "auto" else algorithm
    if algorithm not in (None, FUSED, UNFUSED):
        rule = "it must be 'fused', 'unfused', 'auto' or None"
        raise AlgorithmError(f"algorithm={algorithm!r}", rule, "pass one of these")
    groups = validation.plain_groups(axis_index_groups)
    how = choice.choose(axes, backend, None, order=order)
    return _run(x, residual, weight, Spec(axes, groups, float(eps), how, algorithm or ""))


def _check(x: jax.Array, residual: jax.Array, weight: jax.Array, eps: float) -> None:
    for name, operand in (("x", x), ("residual", residual), ("weight", weight)):
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            raise DtypeError(
                f"{name} of {operand.dtype}", "rows must be floats", "convert it to float32"
            )
    if x.ndim < 1 or residual.shape != x.shape or weight.shape != x.shape[-1:]:
        raise CollectiveError(
            f"x of shape {x.shape}, residual {residual.shape}, weight {weight.shape}",
            "x and residual must be (..., D), and the weight (D,)",
            "reshape them to share D and all other dimensions",
        )
    if not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise CollectiveError(f"eps={eps!r}", "it must be a number of 0 or more", "write 1e-6")


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the primitive has for parameters.

    Attributes:
      axes: mesh axes.
      groups: `axis_index_groups`.
      eps: the eps of the norm.
      how: the backend.
      wish: "fused" (or an error), "" (where it pays) or "unfused".
    """

    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] | None
    eps: float
    how: How
    wish: str

    @property
    def group(self) -> Group:
        """The devices."""
        return canonical.group_of(self.axes, self.groups)


def _run(
    x: jax.Array, residual: jax.Array, weight: jax.Array, spec: Spec
) -> tuple[jax.Array, jax.Array]:
    """(normed, new), bound as one primitive wherever a kernel might serve."""
    plan = _as_they_are(x, residual, spec)
    if plan is None:
        return tuple(_norm_p.bind(x, residual, weight, spec=spec))
    counters.note(plan)
    return _apart(x, residual, weight, spec, _psum(x, spec))


def _psum(x: jax.Array, spec: Spec) -> jax.Array:
    how: dict[str, Any] = {
        "order": spec.how.order,
        "backend": spec.how.backend if spec.how.named else None,
    }
    return collectives.psum(x, spec.axes, axis_index_groups=spec.groups, **how)


def _apart(
    x: jax.Array, residual: jax.Array, weight: jax.Array, spec: Spec, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    new = residual_norm.added(residual, total)
    return _normed(new, weight, spec).astype(x.dtype), new


def _normed(new: jax.Array, weight: jax.Array, spec: Spec) -> jax.Array:
    return residual_norm.normalised(new, weight, spec.eps, new.shape[-1])


# Fused or apart -----------------------------------------------------------------------------------


def _as_they_are(
    x: jax.Array | jax.ShapeDtypeStruct, residual: jax.Array | jax.ShapeDtypeStruct, spec: Spec
) -> ProductPlan | None:
    """What runs apart on any devices; None where a kernel might serve, by `_as_devices_lie`.

    Raises:
      AlgorithmError: "fused" was asked for by name, and cannot be.
    """
    how = spec.how
    if spec.wish == UNFUSED:
        return _plan(spec, UNFUSED, "it was asked for")
    if how.backend != "pallas":
        return _refused(spec, how.fallback or f"backend {how.backend!r} has no kernels")
    if unknown := sorted({x.dtype.name, residual.dtype.name} - set(_FUSED_DTYPES)):
        served = " and ".join(_FUSED_DTYPES)
        return _refused(spec, f"the kernel adds {served}, and an operand is of {unknown[0]}")
    if spec.group.size == 1:
        return _refused(spec, "there is one device")
    return _refused(spec, "an operand is empty") if x.size == 0 else None


def _refused(spec: Spec, why: str) -> ProductPlan:
    if spec.wish == FUSED:
        remedy = "leave algorithm=None to have sum and norm run apart"
        raise AlgorithmError(f"algorithm='fused' for {NAME}", why, remedy)
    return _plan(spec, UNFUSED, why)


def _plan(spec: Spec, way: str, why: str) -> ProductPlan:
    return ProductPlan(op=NAME, backend=spec.how.backend, algorithm=way, why=why)


def _as_devices_lie(
    x: jax.Array | jax.ShapeDtypeStruct, residual: jax.Array | jax.ShapeDtypeStruct, spec: Spec
) -> ProductPlan:
    """How operands that a kernel takes run on these devices.

    Raises:
      AlgorithmError: "fused" was asked for by name, and the devices lie so that it cannot be.
    """
    group, chip = spec.group, chips.current()
    if reason := slices.obstacle(group, spec.how.across) or placement.elsewhere(spec.how.interpret):
        return _refused(spec, reason)
    group = placement.arranged(group)
    gather = catalogue.COLLECTIVES["all_reduce"].algorithm(_GATHER)
    if gather is None or not fastest.serves(gather, group, chip):
        return _refused(spec, f"{chip.name} cannot write to all the devices that it would have to")
    tiles = _Tiles.of(x, residual)
    kept = (group.size + 2) * tiles.nbytes(x.dtype) + 2 * tiles.nbytes(residual.dtype)
    if kept > chip.vmem_bytes * 3 // 4:
        return _refused(spec, f"it needs {kept / chips.MIB:.1f} MiB of {chip.name}'s VMEM")
    if spec.wish == FUSED or _pays(x, residual, group):
        return _plan(spec, FUSED, "")
    return _refused(spec, "by the table of times, and what XLA's passes take, it is slower fused")


def _pays(
    x: jax.Array | jax.ShapeDtypeStruct, residual: jax.Array | jax.ShapeDtypeStruct, group: Group
) -> bool:
    """Whether the gather takes no longer than the quickest sum and the passes that it saves."""
    nbytes = _Tiles.of(x, residual).nbytes(x.dtype)
    sums = fastest.predicted("all_reduce", nbytes, group)
    gathered = [us for name, us in sums.items() if name.partition(":")[0] == _GATHER]
    x_bytes, residual_bytes = (math.prod(a.shape) * a.dtype.itemsize for a in (x, residual))
    passes = seconds_of_passes(x_bytes, residual_bytes, chips.current())
    return bool(gathered) and min(gathered) <= min(sums.values()) + 1e6 * passes


def seconds_of_passes(x_bytes: int, residual_bytes: int, chip: chips.Chip) -> float:
    """What XLA's one pass over the sum takes at least: it reads both operands, writes both results.

    That is two DMAs, one after the other, at HBM's rate. What it takes to start the pass is left
    out, in favour of the form apart.
    """
    return 2 * chip.dma_latency + 2 * (x_bytes + residual_bytes) / chip.hbm_bandwidth


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Rows as the kernel takes them: (steps, high, wide), whole tiles of both dtypes.

    Attributes:
      rows: how many there are.
      columns: how many a row has.
      shape: several rows at a time, or one as several tiles: whichever takes less padding.
    """

    rows: int
    columns: int
    shape: tuple[int, int, int]

    @classmethod
    def of(
        cls, x: jax.Array | jax.ShapeDtypeStruct, residual: jax.Array | jax.ShapeDtypeStruct
    ) -> "_Tiles":
        """Those of two operands of one shape."""
        rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
        high, lines = max(sublanes(x.dtype), sublanes(residual.dtype)), -(-columns // LANES)
        together = (-(-rows // high), high, lines * LANES)
        alone = (rows, -(-lines // high) * high, LANES)
        least = min(together, alone, key=math.prod) if columns > LANES else together
        return cls(rows, columns, least)

    def nbytes(self, dtype: DTypeLike) -> int:
        """Bytes of an operand laid out so."""
        return math.prod(self.shape) * jnp.dtype(dtype).itemsize

    def weight(self, weight: jax.Array) -> jax.Array:
        """For one row, or for each of those at a time."""
        long = self.shape[1] * LANES if self.shape[2] < self.columns else self.shape[2]
        return jnp.pad(weight, (0, long - self.columns)).reshape(-1, self.shape[2])

    def into(self, x: jax.Array) -> jax.Array:
        """An operand so laid out."""
        steps, high, wide = self.shape
        one_row = wide < self.columns
        rows, columns = (steps, high * wide) if one_row else (steps * high, wide)
        flat = x.reshape(self.rows, self.columns)
        padding = ((0, rows - self.rows), (0, columns - self.columns))
        return jnp.pad(flat, padding).reshape(steps * high, wide)

    def out_of(self, y: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `into`."""
        steps, high, wide = self.shape
        flat = y.reshape(*((steps, high * wide) if wide < self.columns else (steps * high, wide)))
        return flat[: self.rows, : self.columns].reshape(shape)


def _kernel(x: jax.Array, residual: jax.Array, weight: jax.Array, spec: Spec) -> list[jax.Array]:
    """By the kernel."""
    tiles = _Tiles.of(x, residual)
    results = residual_norm.psum_residual_rmsnorm(
        tiles.into(x),
        tiles.into(residual),
        tiles.weight(weight.astype(jnp.float32)),
        placement.arranged(spec.group),
        high=tiles.shape[1],
        eps=spec.eps,
        columns=tiles.columns,
        interpret=spec.how.interpret,
    )
    return [tiles.out_of(y, x.shape) for y in results]


# The primitive ------------------------------------------------------------------------------------


def _by_lax(
    x: jax.Array, residual: jax.Array, weight: jax.Array, *, spec: Spec
) -> tuple[jax.Array, jax.Array]:
    """What the primitive means: types follow from this."""
    groups = spec.groups and [list(row) for row in spec.groups]
    total = LAX.psum(x, spec.axes, axis_index_groups=groups)
    return _apart(x, residual, weight, spec, total)


def _abstract_eval(*avals: Aval, spec: Spec) -> tuple[list[Aval], frozenset[Any]]:
    with choice.meaning_lax():
        outs = jax.make_jaxpr(functools.partial(_by_lax, spec=spec))(*avals).out_avals
    return outs, serving.effects(_kernel, avals, otherwise=_sum, spec=spec)


def _sum(x: jax.Array, *_: jax.Array, spec: Spec) -> jax.Array:
    """The sum alone, within a lowering."""

    def by_lax(x: jax.Array, **params: Any) -> jax.Array:
        return LAX.psum(x, params["axes"], axis_index_groups=params["axis_index_groups"])

    params = {"axes": spec.axes, "axis_index_groups": spec.groups}
    return serving.served("psum", spec.how, by_lax, x, **params)


def _lowered(
    x: jax.Array, residual: jax.Array, weight: jax.Array, *, spec: Spec
) -> Sequence[jax.Array]:
    """What a program computes in its place, once it is known where the devices are."""
    plan = _as_devices_lie(x, residual, spec)
    operands = x, residual, weight
    types = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands)
    bind = functools.partial(_norm_p.bind, spec=spec)
    counters.note(dataclasses.replace(plan, bind=bind, operands=types))
    if plan.algorithm == FUSED:
        return _kernel(x, residual, weight, spec)
    return list(_apart(x, residual, weight, spec, _sum(x, spec=spec)))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec) -> tuple[Any, Any]:
    """d new = d residual + psum(dx); the norm's, of that."""
    x, _, weight = primals
    outs = _norm_p.bind(*primals, spec=spec)
    dx, d_residual, d_weight = map(ad.instantiate_zeros, tangents)
    total = jnp.zeros_like(x) if isinstance(tangents[0], ad.Zero) else _psum(dx, spec)
    d_new = residual_norm.added(d_residual, total)
    normed = functools.partial(_normed, spec=spec)
    _, d_normed = jax.jvp(normed, (outs[1], weight), (d_new, d_weight))
    return outs, [d_normed.astype(x.dtype), d_new]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, spec: Spec) -> tuple[Any, Any]:
    """Mapped rows are more rows; with mapped weights sum and norm run apart."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    if dims[2] is None:
        first = functools.partial(batching.bdim_at_front, size=size)
        x, residual = first(args[0], dims[0]), first(args[1], dims[1])
        return _run(x, residual, args[2], spec), (0, 0)
    counters.note(_refused(spec, "vmap maps over the weight"))
    with counters.uncounted():
        apart = functools.partial(_run, spec=dataclasses.replace(spec, wish=UNFUSED))
        return jax.vmap(apart, in_axes=tuple(dims))(*args), (0, 0)


def _primitive() -> core.Primitive:
    primitive = core.Primitive(f"pallas_{NAME}")
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(_abstract_eval)
    placed.register(primitive, _lowered)
    _compat.register(primitive, jvp=_jvp, batch_alone=_batch)
    remat.register(primitive)
    return primitive


_norm_p = _primitive()
