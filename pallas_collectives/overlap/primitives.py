"""The fused products as JAX primitives, so that differentiation keeps to fused kernels.

    all_gather_matmul(x, w1, w2, ...)            linear in x: its transpose is the other
    matmul_reduce_scatter(x1, w1, x2, w2, ...)   linear in each: the sum of the pairs' products

A primitive is bound only if its kernel can serve, or GPUs can copy beside products, and that is
wanted (`fusion.decide`). Otherwise the pair of collective and product runs in its place, and has
its own derivatives.

Weights' cotangents are plain products of gathered arrays, which the kernels return:
`all_gather_matmul` itself, and the transpose of `matmul_reduce_scatter`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching

from pallas_collectives import _compat, collectives
from pallas_collectives._compat import Aval
from pallas_collectives.backends import (
    canonical,
    counters,
    flights,
    nccl_products,
    serving,
)
from pallas_collectives.backends.pallas import products as pallas_fused
from pallas_collectives.backends.pallas.products import GATHER, SCATTER, Spec
from pallas_collectives.backends.plans import FUSED, PIPELINED, UNFUSED, ProductPlan
from pallas_collectives.collectives import LAX
from pallas_collectives.kernels.machinery import launch as kernels
from pallas_collectives.kernels.machinery.blocks import block_shape, whole_shape
from pallas_collectives.lowering import fusing, placed, remat
from pallas_collectives.overlap import array_products, fusion


def all_gather_matmul(
    x: jax.Array, ws: Sequence[jax.Array], spec: Spec, **wires: Any
) -> list[jax.Array]:
    """[gathered x, x @ w, ...], fused or not; wires: as `collectives.all_gather` takes them."""
    plan = fusion.decide(GATHER, [x], ws, spec)
    if plan.algorithm == FUSED:
        return _gather_p.bind(*_alike([x, *ws], spec), spec=spec, plan=plan)
    counters.note(plan)
    if plan.algorithm == PIPELINED:
        products, gathered = array_products.pipelined_all_gather_matmul(
            x,
            list(ws),
            spec.axis_name,
            gather_axis=spec.axis,
            return_gathered=True,
            preferred_element_type=spec.out_dtype,
            backend=_permutes(spec),
        )
        return [gathered, *products]
    gather = functools.partial(
        collectives.all_gather,
        axis_name=spec.axis_name,
        axis=spec.axis,
        tiled=True,
        order=spec.how.order,
        backend=_named(spec),
        **wires,
    )
    return _apart(GATHER, [x, *ws], spec, gather)


def matmul_reduce_scatter(
    xs: Sequence[jax.Array], ws: Sequence[jax.Array], spec: Spec, **wires: Any
) -> jax.Array:
    """The scattered sum of all x @ w, fused or not; wires: as `psum_scatter` takes them."""
    plan = fusion.decide(SCATTER, xs, ws, spec)
    if plan.algorithm == FUSED:
        return _scatter_p.bind(*_alike([*xs, *ws], spec), spec=spec, plan=plan)[0]
    counters.note(plan)
    if plan.algorithm == PIPELINED:
        return array_products.pipelined_matmul_reduce_scatter(
            xs[0],
            ws[0],
            spec.axis_name,
            scatter_axis=spec.axis,
            reduce="sum" if spec.scale == 1.0 else "mean",
            precise=spec.precise,
            preferred_element_type=spec.out_dtype,
            backend=_permutes(spec),
        )
    scatter = functools.partial(
        collectives.psum_scatter,
        axis_name=spec.axis_name,
        scatter_dimension=spec.axis,
        tiled=True,
        order=spec.how.order,
        backend=_named(spec),
        **wires,
    )
    return _apart(SCATTER, [*xs, *ws], spec, scatter)[0]


def _apart(
    op: str,
    operands: Sequence[jax.Array],
    spec: Spec,
    collective: Callable[[jax.Array], jax.Array],
) -> list[jax.Array]:
    """The results of `op` by XLA's products, and what gathers or scatters one array."""
    if op == GATHER:
        x, *ws = operands
        gathered = collective(x)
        return [gathered, *(product(gathered, w, spec) for w in ws)]
    narrow = jnp.issubdtype(spec.out_dtype, jnp.floating) and jnp.dtype(spec.out_dtype).itemsize < 4
    wide = dataclasses.replace(spec, out_dtype=jnp.float32) if spec.precise and narrow else spec
    pairs = zip(*pallas_fused.halves(operands), strict=True)
    scattered = collective(functools.reduce(jnp.add, (product(x, w, wide) for x, w in pairs)))
    scaled = scattered if spec.scale == 1.0 else scattered * spec.scale
    return [scaled.astype(spec.out_dtype)]


def product(x: jax.Array, w: jax.Array, spec: Spec) -> jax.Array:
    """x @ w, by XLA."""
    left, right = _promoted(x, w)
    rows = tuple(range(x.ndim - 1))
    summed = (rows, rows) if spec.turned else ((x.ndim - 1,), (1 if spec.transposed else 0,))
    return jax.lax.dot_general(
        left,
        right,
        (summed, ((), ())),
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


def _permutes(spec: Spec) -> str:
    """The backend of a pipeline's permutes: NCCL's calls are not asynchronous, XLA's are."""
    return spec.how.backend if spec.how.named or flights.in_place(spec.how) else "xla"


def _alike(operands: Sequence[jax.Array], spec: Spec) -> list[jax.Array]:
    """Operands typed as varying over the same axes, the collective's among them."""
    axes = frozenset(canonical.group_of(spec.axis_name).axes)
    axes = axes.union(*map(_compat.varying, operands))
    return [_compat.as_varying(x, axes) for x in operands]


# Primitives ---------------------------------------------------------------------------------------


def _collective(op: str, spec: Spec, x: jax.Array) -> jax.Array:
    """The collective alone, within a lowering that finds no kernel for devices so placed."""
    how = dataclasses.replace(spec.how, algorithm=None)
    axis: dict[str, Any] = {"axis_name": spec.axis_name, "tiled": True}
    if op == GATHER:
        name, along = "all_gather", {"all_gather_dimension": spec.axis}
        lax_call = functools.partial(LAX.all_gather, axis=spec.axis, **axis)
    else:
        name, along = "reduce_scatter", {"scatter_dimension": spec.axis}
        lax_call = functools.partial(LAX.psum_scatter, **along, **axis)

    def by_lax(x: jax.Array, **_: Any) -> Any:
        return lax_call(x)

    return serving.served(name, how, by_lax, x, axis_size=spec.size, **along, **axis)


def lowered(
    op: str, *operands: jax.Array, spec: Spec, plan: ProductPlan, mesh: Any = None
) -> list[jax.Array]:
    """What a program computes for a primitive, once the devices' places are known.

    mesh: the devices themselves, which GPUs need.
    """
    on_gpus = plan.backend == "nccl"
    if on_gpus:
        plan = fusion.as_gpus_reach(plan, nccl_products.unreachable(op, operands, spec, mesh), spec)
    else:
        plan = fusion.as_devices_lie(plan, spec)
    if plan.algorithm == UNFUSED:
        counters.note(plan)
        xs, ws, turn = pallas_fused.parts(operands, op, spec)
        of_turn = [
            w
            if w.ndim == 2 or not spec.stacked
            else jax.lax.dynamic_index_in_dim(w, turn[0][0], keepdims=False)
            for w in ws
        ]
        operands = *xs, *of_turn
        return _apart(op, operands, spec, functools.partial(_collective, op, spec))
    with kernels.told() as chunking:
        results = (nccl_products if on_gpus else pallas_fused).kernel(*operands, op=op, spec=spec)
    primitive = _gather_p if op == GATHER else _scatter_p
    arrays = operands[:-1] if spec.stacked else operands
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)

    def bind(*arrays: jax.Array) -> Any:
        turn = [jnp.zeros(1, jnp.int32)] if spec.stacked else []  # each takes as long
        return primitive.bind(*arrays, *turn, spec=spec, plan=plan)

    bound: Any = {"bind": bind, "operands": types}
    counters.note(dataclasses.replace(plan, chunking=tuple(chunking), **bound))
    return results


def _primitive(op: str, shapes: Callable[..., list[Any]]) -> core.Primitive:
    """A primitive whose results are like its first operand, but for shape and dtype."""
    primitive = core.Primitive(f"pallas_{op}")
    primitive.multiple_results = True

    def abstract_eval(
        *avals: Aval, spec: Spec, plan: ProductPlan
    ) -> tuple[list[Aval], frozenset[Any]]:
        outs = [
            avals[0].update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)
            for shape, dtype in shapes(*avals, spec=spec)
        ]
        if plan.backend != "pallas":
            return outs, frozenset()
        return outs, serving.effects(pallas_fused.kernel, avals, op=op, spec=spec)

    primitive.def_effectful_abstract_eval(abstract_eval)

    placed.register(primitive, functools.partial(lowered, op), takes_mesh=True)
    remat.register(primitive)
    return primitive


def _gather_shapes(*operands: Aval, spec: Spec) -> list[Any]:
    (x,), ws, _ = pallas_fused.parts(operands, GATHER, spec)
    gathered = whole_shape(x.shape, spec.axis, spec.size)
    columns = [w.shape[-2 if spec.transposed else -1] for w in ws]
    return [(gathered, x.dtype), *(((*gathered[:-1], size), spec.out_dtype) for size in columns)]


def _scatter_shapes(*operands: Aval, spec: Spec) -> list[Any]:
    xs, ws, _ = pallas_fused.parts(operands, SCATTER, spec)
    whole = pallas_fused.rows_and_depth(xs[0].shape) if spec.turned else xs[0].shape
    block = block_shape(whole, spec.axis, spec.size)
    return [((*block[:-1], ws[0].shape[-2 if spec.transposed else -1]), spec.out_dtype)]


_gather_p = _primitive(GATHER, _gather_shapes)
_scatter_p = _primitive(SCATTER, _scatter_shapes)


def in_one_kernel(pair: fusing.Pair) -> fusing.Kernel | None:
    """By what a pair of a turn runs as one, once the devices' places are known."""
    op, primitive = (GATHER, _gather_p) if pair.gathers else (SCATTER, _scatter_p)
    how = dataclasses.replace(
        pair.how, wire=None, wire_backward=None, awaited=None, fuses=False, ahead=""
    )
    spec = Spec(
        pair.axis_name,
        pair.axis,
        pair.out_dtype,
        pair.transposed,
        pair.precision,
        how,
        precise=how.precise,
        keeps=pair.keeps,
        turned=pair.turned,
    )
    plan = fusion.decide(op, pair.xs, pair.ws, spec)
    if plan.algorithm == FUSED and plan.backend == "pallas":  # on GPUs `lowered` knows the devices
        plan = fusion.as_devices_lie(plan, spec)
    if plan.algorithm != FUSED:
        return None
    fused, apart = (candidate.us or 0.0 for candidate in plan.candidates)
    return fusing.Kernel(primitive, {"spec": spec, "plan": plan}, (apart - fused) * 1e-6)


# Differentiation ----------------------------------------------------------------------------------


def _zero(primal: ad.UndefinedPrimal) -> ad.Zero:
    """The zero tangent of a primal."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _gather_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec, plan: ProductPlan
) -> tuple[Any, Any]:
    """d(gather(x) @ w) = gather(dx) @ w + gather(x) @ dw."""
    (x, *ws), (dx, *dws) = primals, tangents
    if not all(isinstance(dw, ad.Zero) for dw in dws):
        spec = dataclasses.replace(spec, keeps=True)
    outs = _gather_p.bind(x, *ws, spec=spec, plan=plan)
    d_outs: list[Any] = [_zero(out) for out in outs]
    if not isinstance(dx, ad.Zero):
        d_outs = all_gather_matmul(dx, ws, spec)
    for i, dw in enumerate(dws, start=1):
        if not isinstance(dw, ad.Zero):
            d_out = product(outs[0], dw, spec)
            d_outs[i] = d_out if isinstance(d_outs[i], ad.Zero) else d_outs[i] + d_out
    return outs, d_outs


def _gather_transpose(
    cts: Sequence[Any], x: ad.UndefinedPrimal, *ws: Any, spec: Spec, plan: ProductPlan
) -> list[Any]:
    """The scattered sum of the products' cotangents, each times its own w, and x's own."""
    dx = None
    pairs = [(ct, w) for ct, w in zip(cts[1:], ws, strict=True) if not isinstance(ct, ad.Zero)]
    if pairs:
        ys, kept = zip(*((ct, _as_wide(w, ct)) for ct, w in pairs), strict=True)
        dx = matmul_reduce_scatter(ys, kept, spec.transpose(x.aval.dtype))
    if not isinstance(cts[0], ad.Zero):
        own = collectives.psum_scatter(
            cts[0],
            spec.axis_name,
            scatter_dimension=spec.axis,
            tiled=True,
            order=spec.how.order,
            backend=_named(spec),
        )
        dx = own if dx is None else dx + own
    return [ad.Zero(x.aval.to_ct_aval()) if dx is None else dx, *(None for _ in ws)]


def _scatter_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec, plan: ProductPlan
) -> tuple[Any, Any]:
    """d(x @ w) = dx @ w + x @ dw, in one kernel, so that the transpose gathers once for both."""
    (xs, ws), (dxs, dws) = pallas_fused.halves(primals), pallas_fused.halves(tangents)
    (out,) = _scatter_p.bind(*primals, spec=spec, plan=plan)
    pairs = [(dx, w) for dx, w in zip(dxs, ws, strict=True) if not isinstance(dx, ad.Zero)]
    pairs += [(x, dw) for x, dw in zip(xs, dws, strict=True) if not isinstance(dw, ad.Zero)]
    if not pairs:
        return [out], [_zero(out)]
    lefts, rights = zip(*pairs, strict=True)
    return [out], [matmul_reduce_scatter(lefts, rights, spec)]


def _scatter_transpose(
    cts: Sequence[Any], *operands: Any, spec: Spec, plan: ProductPlan
) -> list[Any]:
    """x's cotangent is gather(ct) @ w transposed; w's is x transposed @ gather(ct)."""
    xs, ws = pallas_fused.halves(operands)
    (ct,) = cts
    if isinstance(ct, ad.Zero):
        return [
            ad.Zero(o.aval.to_ct_aval()) if ad.is_undefined_primal(o) else None for o in operands
        ]
    ct = ct if spec.scale == 1.0 else ct * jnp.asarray(spec.scale, ct.dtype)
    wanted = [ad.is_undefined_primal(x) for x in xs]
    kept = [_as_wide(w, ct) for w, want in zip(ws, wanted, strict=True) if want]
    dtype = next((x.aval.dtype for x in xs if ad.is_undefined_primal(x)), ct.dtype)
    keeps = any(ad.is_undefined_primal(w) for w in ws)
    transposed = dataclasses.replace(spec.transpose(dtype), keeps=keeps)
    gathered, *products = all_gather_matmul(ct, kept, transposed)
    found = iter(products)
    dxs = [next(found) if want else None for want in wanted]
    dws = [
        _weight_cotangent(x, gathered, w.aval, spec) if ad.is_undefined_primal(w) else None
        for x, w in zip(xs, ws, strict=True)
    ]
    return [*dxs, *dws]


def _as_wide(x: jax.Array, ct: jax.Array) -> jax.Array:
    """x, to be multiplied with a cotangent; JAX promotes no 8-bit floats to a wider one's dtype."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1 < ct.dtype.itemsize
    return x.astype(ct.dtype) if narrow else x


def _weight_cotangent(x: jax.Array, ct: jax.Array, w: Aval, spec: Spec) -> jax.Array:
    """x transposed @ ct, summed over all dimensions but the last."""
    x = _as_wide(x, ct)
    left, right = (ct, x) if spec.transposed else (x, ct)
    return product(left, right, dataclasses.replace(spec, turned=True, out_dtype=w.dtype))


_compat.register(_gather_p, jvp=_gather_jvp, transpose=_gather_transpose)
_compat.register(_scatter_p, jvp=_scatter_jvp, transpose=_scatter_transpose)


# vmap ---------------------------------------------------------------------------------------------


def _batch(
    op: str, args: Sequence[Any], dims: Sequence[Any], *, spec: Spec, plan: ProductPlan
) -> tuple[Any, Sequence[int]]:
    """A mapped x is an x with one more dimension; mapped weights make separate products."""
    count = 1 if op == GATHER else len(args) // 2
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    run: Callable[..., Any] = all_gather_matmul if op == GATHER else matmul_reduce_scatter

    def call(operands: Sequence[Any], how: Spec) -> list[Any]:
        first = operands[0] if op == GATHER else operands[:count]
        out = run(first, operands[count:], how)
        return list(out) if op == GATHER else [out]

    if all(dim is None for dim in dims[count:]):
        xs = [batching.bdim_at_front(x, d, size) for x, d in zip(args, dims[:count], strict=False)]
        outs = call([*xs, *args[count:]], dataclasses.replace(spec, axis=spec.axis + 1))
        return outs, [0] * len(outs)
    counters.note(fusion.refused(op, spec, "vmap maps over the weights"))
    apart = dataclasses.replace(spec, wish=UNFUSED)
    with counters.uncounted():
        outs = jax.vmap(lambda *operands: call(operands, apart), in_axes=tuple(dims))(*args)
    return outs, [0] * len(outs)


for _op, _p in ((GATHER, _gather_p), (SCATTER, _scatter_p)):
    _compat.register(_p, batch_alone=functools.partial(_batch, _op))
