"""The fused products as JAX primitives, so that differentiation keeps to fused kernels.

    all_gather_matmul(x, w1, w2, ...)            linear in x: its transpose is the other
    matmul_reduce_scatter(x1, w1, x2, w2, ...)   linear in each: the sum of the pairs' products

A primitive is bound only where its kernel can serve and is wanted (`choose`); elsewhere the pair of
collective and product runs in its place, whose derivatives are that pair's. Every bind chooses
anew, so the backward pass of a fused product may be unfused, and says so in `fusion_counts`.

Weights' cotangents are plain products of gathered arrays: what `all_gather_matmul` has gathered on
the way, and what the transpose of `matmul_reduce_scatter` gathers for its other half.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from pallas_collectives import (
    _compat,
    backends,
    checks,
    collectives,
    fusing,
    hierarchy,
    places,
    remat,
)
from pallas_collectives.backends import How, algorithms, canonical, pallas_fused
from pallas_collectives.errors import AlgorithmError, ReachError, SliceError, VmemError
from pallas_collectives.kernels import collective_matmul

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"


@dataclasses.dataclass(frozen=True)
class Spec:
    """What both primitives have for parameters.

    Attributes:
      axis_name: mesh axis or axes.
      axis: the dimension of x that is gathered or scattered, counted from 0.
      out_dtype: of products.
      transposed: weights are (N, K).
      precision: as `jax.lax.dot_general`'s.
      how: the backend.
      wish: "fused" (or an error), "preferred" (wherever a kernel can serve), "" (where it pays), or
        "unfused".
      precise: sums travel in float32.
      scale: of the scattered sum.
    """

    axis_name: Any
    axis: int
    out_dtype: Any
    transposed: bool
    precision: Any
    how: How
    wish: str = ""
    precise: bool = False
    scale: float = 1.0

    @property
    def size(self) -> int:
        """Devices."""
        return checks.size_of(self.axis_name)

    def transpose(self, out_dtype: Any) -> "Spec":
        """Of the transposed product, which nobody asked for by name."""
        return dataclasses.replace(
            self,
            transposed=not self.transposed,
            out_dtype=jnp.dtype(out_dtype),
            wish=self.wish and "preferred",
            scale=1.0,
        )


def all_gather_matmul(x: jax.Array, ws: Sequence[jax.Array], spec: Spec) -> list[jax.Array]:
    """[gathered x, x @ w, ...], fused or not."""
    if _fuses(GATHER, [x], ws, spec):
        return _gather_p.bind(*_alike([x, *ws], spec), spec=spec)
    gathered = collectives.all_gather(
        x, spec.axis_name, axis=spec.axis, tiled=True, backend=_named(spec)
    )
    return [gathered, *(product(gathered, w, spec) for w in ws)]


def matmul_reduce_scatter(
    xs: Sequence[jax.Array], ws: Sequence[jax.Array], spec: Spec
) -> jax.Array:
    """The scattered sum of all x @ w, fused or not."""
    if _fuses(SCATTER, xs, ws, spec):
        return _scatter_p.bind(*_alike([*xs, *ws], spec), spec=spec)[0]
    wide = spec.precise and jnp.issubdtype(spec.out_dtype, jnp.floating)
    wire = dataclasses.replace(spec, out_dtype=jnp.dtype(jnp.float32) if wide else spec.out_dtype)
    total = sum(product(x, w, wire) for x, w in zip(xs[1:], ws[1:], strict=True))
    total = product(xs[0], ws[0], wire) + total
    scattered = collectives.psum_scatter(
        total, spec.axis_name, scatter_dimension=spec.axis, tiled=True, backend=_named(spec)
    )
    scattered = scattered if spec.scale == 1.0 else scattered * spec.scale
    return scattered.astype(spec.out_dtype)


def product(x: jax.Array, w: jax.Array, spec: Spec) -> jax.Array:
    """x @ w, by XLA."""
    left, right = _promoted(x, w)
    return jax.lax.dot_general(
        left,
        right,
        (((x.ndim - 1,), (1 if spec.transposed else 0,)), ((), ())),
        precision=spec.precision,
        preferred_element_type=spec.out_dtype,
    )


def _promoted(*operands: jax.Array) -> Sequence[jax.Array]:
    if len({x.dtype for x in operands}) == 1:
        return operands
    dtype = jnp.result_type(*operands)
    return [x.astype(dtype) for x in operands]


def _named(spec: Spec) -> str | None:
    return spec.how.backend if spec.how.named else None


def _alike(operands: Sequence[jax.Array], spec: Spec) -> list[jax.Array]:
    """Operands typed as varying over the same axes, the collective's among them."""
    axes = frozenset(canonical.group_of(spec.axis_name).axes)
    axes = axes.union(*(jax.typeof(x).mat.varying for x in operands))

    def typed(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - set(jax.typeof(x).mat.varying)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return [typed(x) for x in operands]


# Whether to fuse ----------------------------------------------------------------------------------


def _fuses(op: str, xs: Sequence[Any], ws: Sequence[Any], spec: Spec) -> bool:
    """Whether a kernel is to serve; counts where it does not.

    Raises:
      AlgorithmError: it is to, by name, and cannot.
    """
    reason = why_unfused(op, xs, ws, spec)
    if not reason:
        return True
    if spec.wish == "fused":
        raise AlgorithmError(
            f"algorithm='fused' for {op}", reason, "leave algorithm=None to have both run apart"
        )
    backends.count_fusion(op, "unfused", reason)
    return False


def why_unfused(op: str, xs: Sequence[Any], ws: Sequence[Any], spec: Spec) -> str:
    """Why a product and its collective are to run apart; "" if they are to be fused."""
    x_shape = (*xs[0].shape[:-1], sum(x.shape[-1] for x in xs))
    if spec.wish == "unfused":
        return "it was asked for"
    if spec.how.backend != "pallas":
        return spec.how.fallback or f"backend {spec.how.backend!r} has no kernels"
    if spec.axis == len(x_shape) - 1:
        end = "gathered" if op == GATHER else "scattered"
        what = (
            "contracted one, of which every product needs all" if op == GATHER else "weights' own"
        )
        return f"the {end} axis is the {what}"
    if spec.size == 1:
        return "there is one device"
    dtypes = [w.dtype for w in ws]
    sizes = [size for operand in (*xs, *ws) for size in operand.shape]
    mixed = {x.dtype for x in xs} if len(xs) > 1 else set()
    if len(mixed) > 1 or (len(xs) > 1 and len(set(dtypes)) > 1):
        return "pairs of operands are of different dtypes"
    found = fusing.obstacle(xs[0].dtype, dtypes, spec.out_dtype, spec.precision, sizes)
    if found:
        return found
    group = canonical.group_of(spec.axis_name)
    try:
        if hierarchy.split(group, hierarchy.slices(group, spec.how.across)) is not None:
            return "the devices lie in several slices"
        plan, wire = _plan(op, x_shape, xs[0].dtype, ws, spec)
        effects(op, spec, tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*xs, *ws)))
    except (SliceError, VmemError, *backends.UNSERVABLE) as error:
        return str(error)
    if spec.wish:
        return ""
    cost = fusing.cost(op, plan, group, wire)
    if cost.fused < cost.unfused:
        return ""
    return "by the model of the chip it takes longer in one kernel"


def _plan(
    op: str, x_shape: tuple[int, ...], x_dtype: Any, ws: Sequence[Any], spec: Spec
) -> tuple[collective_matmul.Plan, Any]:
    """How the products of one block go, and the dtype of what travels."""
    columns = [pallas_fused.up(w.shape[0 if spec.transposed else 1], 128) for w in ws]
    if op == GATHER:
        layout = pallas_fused.gather_layout(x_shape, spec.axis, x_dtype, spec.out_dtype)
        weights = list(zip(columns, (w.dtype for w in ws), strict=True))
        out, terms, wire = pallas_fused.kernel_dtype(spec.out_dtype), 0, x_dtype
    else:
        wire = pallas_fused.wire_dtype(spec.out_dtype, spec.precise)
        layout = pallas_fused.scatter_layout(x_shape, spec.axis, spec.size, x_dtype, wire)
        weights, out, terms = [(columns[0], ws[0].dtype)], wire, 2
    plan = collective_matmul.plan(
        layout.block, weights, x_dtype, out, terms=terms, transposed=spec.transposed
    )
    return plan, wire


# Primitives ---------------------------------------------------------------------------------------


def kernel(op: str, *operands: jax.Array, spec: Spec) -> list[jax.Array]:
    """The kernel's results."""
    group = places.arranged(canonical.group_of(spec.axis_name))
    options: dict[str, Any] = {
        "axis": spec.axis,
        "out_dtype": spec.out_dtype,
        "transposed": spec.transposed,
        "precision": fusing.settled_precision(spec.precision),
        "interpret": spec.how.interpret,
    }
    if op == GATHER:
        x, *ws = operands
        return pallas_fused.all_gather_matmul(x, ws, group, **options)
    xs, ws = halves(operands)
    options |= {"precise": spec.precise, "scale": spec.scale}
    return [pallas_fused.matmul_reduce_scatter(xs, ws, group, **options)]


def halves(operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The xs and the ws of `matmul_reduce_scatter`'s operands."""
    return list(operands[: len(operands) // 2]), list(operands[len(operands) // 2 :])


def _apart(op: str, *operands: jax.Array, spec: Spec) -> list[jax.Array]:
    """The same where devices turn out, while lowering, to lie so that no kernel can serve."""
    how = dataclasses.replace(spec.how, algorithm=None)
    options = {"axis_name": spec.axis_name, "axis_size": spec.size, "tiled": True}
    if op == GATHER:
        x, *ws = operands
        gathered = backends.run("all_gather", how, x, all_gather_dimension=spec.axis, **options)
        return [gathered, *(product(gathered, w, spec) for w in ws)]
    xs, ws = halves(operands)
    total: Any = sum(product(x, w, spec) for x, w in zip(xs, ws, strict=True))
    how = dataclasses.replace(how, precise=spec.precise)
    total = backends.run("reduce_scatter", how, total, scatter_dimension=spec.axis, **options)
    return [(total if spec.scale == 1.0 else total * spec.scale).astype(spec.out_dtype)]


def lowered(op: str, *operands: jax.Array, spec: Spec) -> list[jax.Array]:
    if reason := _why_apart(op, spec):
        if spec.wish == "fused":
            raise AlgorithmError(f"algorithm='fused' for {op}", reason, "leave algorithm=None")
        backends.count_fusion(op, "unfused", reason)
        return _apart(op, *operands, spec=spec)
    backends.count_fusion(op, "fused", "")
    return kernel(op, *operands, spec=spec)


def _why_apart(op: str, spec: Spec) -> str:
    """What shows, once it is known where the devices are, to keep them from serving; "" if none."""
    group = canonical.group_of(spec.axis_name)
    if hierarchy.split(group, hierarchy.slices(group, spec.how.across)) is not None:
        return "the devices lie in several slices"
    try:
        algorithms.check_ring(op, places.arranged(group))
    except ReachError as error:
        return str(error)
    return ""


def effects(op: str, spec: Spec, shapes: Any) -> frozenset[Any]:
    """The effects of a kernel, TPU interpret mode's or none; raises what its tracing raises."""
    return _traced_effects(op, spec, shapes, jax.sharding.get_abstract_mesh())


@functools.lru_cache(maxsize=1024)
def _traced_effects(op: str, spec: Spec, shapes: Any, mesh: Any) -> frozenset[Any]:
    del mesh  # part of the key: axis sizes and chip are in scope
    with backends.uncounted():
        run = functools.partial(kernel, op, spec=spec)
        return frozenset(jax.make_jaxpr(run)(*shapes).effects)


def _primitive(op: str, shapes: Callable[..., list[Any]]) -> core.Primitive:
    """A primitive whose results are like its first operand, but for shape and dtype."""
    primitive = core.Primitive(f"pallas_{op}")
    primitive.multiple_results = True

    def abstract_eval(*avals: Any, spec: Spec) -> Any:
        operands = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
        outs = [
            avals[0].update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)
            for shape, dtype in shapes(*avals, spec=spec)
        ]
        return outs, effects(op, spec, operands)

    primitive.def_effectful_abstract_eval(abstract_eval)
    lower = mlir.lower_fun(functools.partial(lowered, op), multiple_results=True)

    def lowering(ctx: Any, *args: Any, **params: Any) -> Any:
        mesh = _compat.mesh_of(ctx)
        with places.scope(places.of_mesh(mesh)), hierarchy.scope(mesh):
            return lower(ctx, *args, **params)

    mlir.register_lowering(primitive, lowering)
    remat.register(primitive)
    return primitive


def _gather_shapes(x: Any, *ws: Any, spec: Spec) -> list[Any]:
    gathered = canonical.resized(x.shape, spec.axis, spec.size * x.shape[spec.axis])
    columns = [w.shape[0 if spec.transposed else 1] for w in ws]
    return [(gathered, x.dtype), *(((*gathered[:-1], size), spec.out_dtype) for size in columns)]


def _scatter_shapes(*operands: Any, spec: Spec) -> list[Any]:
    xs, ws = halves(operands)
    block = canonical.resized(xs[0].shape, spec.axis, xs[0].shape[spec.axis] // spec.size)
    return [((*block[:-1], ws[0].shape[0 if spec.transposed else 1]), spec.out_dtype)]


_gather_p = _primitive(GATHER, _gather_shapes)
_scatter_p = _primitive(SCATTER, _scatter_shapes)


# Differentiation ----------------------------------------------------------------------------------


def _zero(primal: Any) -> ad.Zero:
    """No tangent of a primal."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _gather_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec) -> Any:
    """d(gather(x) @ w) = gather(dx) @ w + gather(x) @ dw."""
    (x, *ws), (dx, *dws) = primals, tangents
    outs = _gather_p.bind(x, *ws, spec=spec)
    d_outs: list[Any] = [_zero(out) for out in outs]
    if not isinstance(dx, ad.Zero):
        d_outs = all_gather_matmul(dx, ws, spec)
    for i, dw in enumerate(dws, start=1):
        if not isinstance(dw, ad.Zero):
            d_out = product(outs[0], dw, spec)
            d_outs[i] = d_out if isinstance(d_outs[i], ad.Zero) else d_outs[i] + d_out
    return outs, d_outs


def _gather_transpose(cts: Sequence[Any], x: Any, *ws: Any, spec: Spec) -> list[Any]:
    """The scattered sum of the products' cotangents, each times its own w, and x's own."""
    dx = None
    pairs = [(ct, w) for ct, w in zip(cts[1:], ws, strict=True) if not isinstance(ct, ad.Zero)]
    if pairs:
        ys, kept = zip(*pairs, strict=True)
        dx = matmul_reduce_scatter(ys, kept, spec.transpose(x.aval.dtype))
    if not isinstance(cts[0], ad.Zero):
        own = collectives.psum_scatter(
            cts[0],
            spec.axis_name,
            scatter_dimension=spec.axis,
            tiled=True,
            precise=False,
            backend=_named(spec),
        )
        dx = own if dx is None else dx + own
    return [ad.Zero(x.aval.to_ct_aval()) if dx is None else dx, *(None for _ in ws)]


def _scatter_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec) -> Any:
    """d(x @ w) = dx @ w + x @ dw, in one kernel, so that the transpose gathers once for both."""
    (xs, ws), (dxs, dws) = halves(primals), halves(tangents)
    (out,) = _scatter_p.bind(*primals, spec=spec)
    pairs = [(dx, w) for dx, w in zip(dxs, ws, strict=True) if not isinstance(dx, ad.Zero)]
    pairs += [(x, dw) for x, dw in zip(xs, dws, strict=True) if not isinstance(dw, ad.Zero)]
    if not pairs:
        return [out], [_zero(out)]
    lefts, rights = zip(*pairs, strict=True)
    return [out], [matmul_reduce_scatter(lefts, rights, spec)]


def _scatter_transpose(cts: Sequence[Any], *operands: Any, spec: Spec) -> list[Any]:
    """x's cotangent is gather(ct) @ w transposed; w's is x transposed @ gather(ct)."""
    xs, ws = halves(operands)
    (ct,) = cts
    if isinstance(ct, ad.Zero):
        return [
            ad.Zero(o.aval.to_ct_aval()) if ad.is_undefined_primal(o) else None for o in operands
        ]
    ct = ct if spec.scale == 1.0 else ct * jnp.asarray(spec.scale, ct.dtype)
    wanted = [ad.is_undefined_primal(x) for x in xs]
    kept = [w for w, want in zip(ws, wanted, strict=True) if want]
    dtype = next((x.aval.dtype for x in xs if ad.is_undefined_primal(x)), ct.dtype)
    gathered, *products = all_gather_matmul(ct, kept, spec.transpose(dtype))
    found = iter(products)
    dxs = [next(found) if want else None for want in wanted]
    dws = [
        _weight_cotangent(x, gathered, w.aval, spec) if ad.is_undefined_primal(w) else None
        for x, w in zip(xs, ws, strict=True)
    ]
    return [*dxs, *dws]


def _weight_cotangent(x: jax.Array, ct: jax.Array, w: Any, spec: Spec) -> jax.Array:
    """x transposed @ ct, summed over all dimensions but the last."""
    lead = tuple(range(x.ndim - 1))
    left, right = _promoted(*((ct, x) if spec.transposed else (x, ct)))
    return jax.lax.dot_general(
        left,
        right,
        ((lead, lead), ((), ())),
        precision=spec.precision,
        preferred_element_type=w.dtype,
    )


ad.primitive_jvps[_gather_p] = _gather_jvp
ad.primitive_transposes[_gather_p] = _gather_transpose
ad.primitive_jvps[_scatter_p] = _scatter_jvp
ad.primitive_transposes[_scatter_p] = _scatter_transpose


# vmap ---------------------------------------------------------------------------------------------


def _batch(
    op: str, args: Sequence[Any], dims: Sequence[Any], *, spec: Spec
) -> tuple[Any, Sequence[int]]:
    """A mapped x is an x of one dimension more; mapped weights are products apart."""
    count = 1 if op == GATHER else len(args) // 2
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    run: Any = all_gather_matmul if op == GATHER else matmul_reduce_scatter

    def call(operands: Sequence[Any], how: Spec) -> list[Any]:
        first = operands[0] if op == GATHER else operands[:count]
        out = run(first, operands[count:], how)
        return list(out) if op == GATHER else [out]

    if all(dim is None for dim in dims[count:]):
        xs = [batching.bdim_at_front(x, d, size) for x, d in zip(args, dims[:count], strict=False)]
        outs = call([*xs, *args[count:]], dataclasses.replace(spec, axis=spec.axis + 1))
        return outs, [0] * len(outs)
    reason = "vmap maps over the weights"
    if spec.wish == "fused":
        raise AlgorithmError(f"algorithm='fused' for {op}", reason, "leave algorithm=None")
    backends.count_fusion(op, "unfused", reason)
    apart = dataclasses.replace(spec, wish="unfused")
    with backends.uncounted():
        outs = jax.vmap(lambda *operands: call(operands, apart), in_axes=tuple(dims))(*args)
    return outs, [0] * len(outs)


for _op, _p in ((GATHER, _gather_p), (SCATTER, _scatter_p)):
    batching.primitive_batchers[_p] = functools.partial(_batch, _op)
