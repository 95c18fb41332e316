"""JAX primitives for our collectives, with the rules of `jax.lax`'s own.

Every lax collective primitive has a twin here. The twin's shapes and varying types, its transpose,
its jvp and its vmap are lax's: each rule runs lax's rule, records it, and replaces every lax
collective in the recording by its twin (`with_twins`). Only the lowering differs: it asks a
backend. So ours means whatever lax's collective means in this JAX version.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import JaxprEqn
from jax.interpreters import ad, mlir

from pallas_collectives import _compat, catalogue, validation
from pallas_collectives._compat import Aval, Rule
from pallas_collectives.annotations import Dim, Tangent
from pallas_collectives.backends import choice, counters, nested, serving
from pallas_collectives.backends.plans import How
from pallas_collectives.lowering import bundles, many_operands, placed, remat
from pallas_collectives.validation import AxisName, Groups

# lax's functions as they were on import: `override_lax` may have put ours in their place since.
LAX = types.SimpleNamespace(
    **{name: getattr(lax, name) for name in catalogue.functions() if hasattr(lax, name)}
)


def _is_collective(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in catalogue.primitives()


def _is_reduction(primitive: core.Primitive) -> bool:
    """Whether it is elementwise, of one operand: its twin takes many, a tree's leaves."""
    return bool(catalogue.primitives()[primitive.name][1].reduction)


@nested.provide
def with_twins(how: How, fn: Callable[..., Any], *args: Any, op: str = "") -> Any:
    """fn(*args), with the twin in place of each lax collective that fn binds.

    Arguments and results are pytrees; leaves that are not being traced are passed to fn as they
    are, so that constants stay constants. If `op` is given, only the twin of the collective of that
    name must use `how.algorithm`.
    """
    leaves, tree = jax.tree.flatten(args, is_leaf=_is_symbolic)
    traced = [i for i, leaf in enumerate(leaves) if _compat.is_traced(leaf)]
    results: Any = None

    def recorded(*tracers: Any) -> list[Any]:
        nonlocal results
        merged = list(leaves)
        for i, tracer in zip(traced, tracers, strict=True):
            merged[i] = tracer
        out = fn(*jax.tree.unflatten(tree, merged))
        flat, out_tree = jax.tree.flatten(out, is_leaf=_is_symbolic)
        arrays = [isinstance(leaf, jax.Array) for leaf in flat]
        others = [None if a else leaf for a, leaf in zip(arrays, flat, strict=True)]
        results = others, out_tree, arrays  # no array, which would leave this trace
        return [leaf for leaf, is_array in zip(flat, arrays, strict=True) if is_array]

    with choice.meaning_lax():
        closed = jax.make_jaxpr(recorded)(*(leaves[i] for i in traced))
    if not any(map(_is_collective, closed.jaxpr.eqns)):
        return fn(*args)  # nothing to replace: psum(1, "x") is a number
    replayed = iter(_replay(closed, [leaves[i] for i in traced], how, op))
    others, out_tree, arrays = results
    merged = [next(replayed) if a else leaf for leaf, a in zip(others, arrays, strict=True)]
    return jax.tree.unflatten(out_tree, merged)


def _is_symbolic(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, ad.Zero | ad.UndefinedPrimal)


def _replay(closed: core.ClosedJaxpr, args: list[Any], how: How, op: str) -> list[Any]:
    """Evaluates a jaxpr, binding twins; one for all reductions that are alike and wait for none."""
    env: dict[Any, Any] = {}
    jaxpr = closed.jaxpr
    env.update(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    waiting: dict[Any, dict[Any, Any]] = {}  # results to operands, of each reduction

    def read(atom: core.Var | core.Literal) -> Any:
        if isinstance(atom, core.Literal):
            return atom.val
        if atom not in env:
            for (lax_p, how_here, params), operands in waiting.items():
                outs = twin(lax_p).bind(*operands.values(), how=how_here, **dict(params))
                env.update(zip(operands, outs, strict=True))
            waiting.clear()
        return env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if _is_collective(eqn) and not _within_device(eqn.params):
            same = not op or eqn.primitive.name == op
            how_here = how if same else dataclasses.replace(how, algorithm=None)
            if not same and not jnp.issubdtype(jax.typeof(operands[0]).dtype, jnp.inexact):
                how_here = dataclasses.replace(how_here, wire=None)  # a transpose's offsets
            params = dict(eqn.params)
            if _is_reduction(eqn.primitive):
                alike = eqn.primitive, how_here, tuple(params.items())
                waiting.setdefault(alike, {})[eqn.outvars[0]] = operands[0]
                continue
            if eqn.primitive.name == "all_to_all":
                # The dimension that untiled means is there already; lax's transpose adds another.
                params["tiled"] = True
            if eqn.primitive.name == "ragged_all_to_all":
                operands = _of_each_device(operands, params["axis_name"])
            outs = twin(eqn.primitive).bind(*operands, how=how_here, **params)
        else:
            outs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _of_each_device(operands: list[Any], axis_name: AxisName) -> list[jax.Array]:
    """A ragged exchange's operands, typed as different on every device that its result differs on.

    lax's result has the type of `output`. So beside zeros, which are equal on all devices, it would
    be equal on all too: its cotangent would be summed over them.
    """
    typed = validation.varying(operands, axis_name)
    axes = frozenset().union(*map(_compat.varying, typed))
    return [_compat.as_varying(x, axes) for x in typed]


def _within_device(params: dict[str, Any]) -> bool:
    """Whether all axes of a reduction are numbers: those that vmap has made dimensions."""
    return "axes" in params and not validation.named(params["axes"])


@functools.cache
def twin(lax_p: core.Primitive) -> core.Primitive:
    """Our primitive for a lax collective primitive; it takes the same params and `how`.

    A reduction's takes any number of operands, each by lax's rules for one (see `many_operands`);
    only the lowering takes them together.
    """
    primitive = core.Primitive(f"pallas_{lax_p.name}")
    many = primitive.multiple_results = _is_reduction(lax_p)

    def implementation(*args: jax.Array, how: How, **params: Any) -> Any:
        if many:
            lower = lambda x, how: serving.lower(lax_p, how, x, **params)  # noqa: E731
            return bundles.reduced(lower, args, how, params["axes"])
        return serving.lower(lax_p, how, *args, **params)

    def abstract_eval(*avals: Aval, how: How, **params: Any) -> tuple[Aval, frozenset[Any]]:
        out, of_lax = lax_p.abstract_eval(*avals, **params)
        return out, of_lax | _effects(lax_p.name, how, avals, params)

    each = functools.partial(many_operands.abstract_eval, abstract_eval)
    primitive.def_effectful_abstract_eval(each if many else abstract_eval)
    placed.register(primitive, implementation)

    def with_twins_of(rule: Callable[..., Any], table: str) -> Callable[..., Any]:
        return functools.partial(_RULES[table], rule, primitive, lax_p.name)

    if many:
        many_operands.register(primitive, lax_p, with_twins_of)
        return primitive
    remat.register(primitive)
    rules = {t: _compat.rule(lax_p, t) for t in _RULES if _compat.has_rule(lax_p, t)}
    if lax_p.name in _TRANSPOSES:
        rules["transpose"] = _TRANSPOSES[lax_p.name]
    for table, rule in rules.items():
        _compat.register(primitive, **{table: with_twins_of(rule, table)})
    return primitive


def defined(name: str, by_lax: Callable[..., jax.Array]) -> core.Primitive:
    """A primitive for a collective that lax lacks: it means what `by_lax` computes with lax's.

    `by_lax(*operands, **params)` gives the types, the derivative and the batching, and what XLA
    runs. `catalogue` says which collective serves the primitive; `with_twins` puts it to work.
    """
    primitive = core.Primitive(name)

    def abstract_eval(*avals: Aval, **params: Any) -> tuple[Aval, frozenset[Any]]:
        closed = jax.make_jaxpr(functools.partial(by_lax, **params))(*avals)
        return closed.out_avals[0], frozenset(closed.effects)

    def jvp(
        primals: Sequence[jax.Array], tangents: Sequence[Tangent], **params: Any
    ) -> tuple[jax.Array, jax.Array]:
        moving = tuple(map(ad.instantiate_zeros, tangents))
        _, moved = jax.jvp(functools.partial(by_lax, **params), tuple(primals), moving)
        return primitive.bind(*primals, **params), moved

    def batch(axis: Any, operands: Sequence[jax.Array], dims: Sequence[Dim], **params: Any) -> Any:
        each = functools.partial(by_lax, **params)
        names: dict[str, Any] = {"axis_name": axis.name, "axis_size": axis.size}
        return jax.vmap(each, in_axes=tuple(dims), **names)(*operands), 0

    primitive.def_effectful_abstract_eval(abstract_eval)
    lowering = mlir.lower_fun(by_lax, multiple_results=False)
    _compat.register(primitive, lowering=lowering, jvp=jvp, batch=batch)
    return primitive


def _pbroadcast_transpose(
    cotangent: Tangent,
    x: ad.UndefinedPrimal,
    *dynamic: jax.Array,
    axis_name: AxisName,
    source: int | None = None,
) -> list[Any]:
    """The source's cotangent is everyone's sum. lax's own rule works for scalars only."""
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval.to_ct_aval()), *(None for _ in dynamic)]
    is_source = lax.axis_index(axis_name) == (dynamic[0] if dynamic else source)
    total = lax.psum(cotangent, axis_name)
    return [jnp.where(is_source, total, jnp.zeros_like(total)), *(None for _ in dynamic)]


def _ragged_transpose(
    cotangent: Tangent,
    operand: jax.Array | ad.UndefinedPrimal,
    output: jax.Array | ad.UndefinedPrimal,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: AxisName,
    axis_index_groups: Groups,
) -> list[Any]:
    """Rows' cotangents go back to where the rows came from; `output` keeps those of other rows.

    lax's own rule mistakes rows beside an empty slice, and does not support axis_index_groups.
    """
    wanted = [isinstance(x, ad.UndefinedPrimal) for x in (operand, output)]

    def answer(*cotangents: Any) -> list[Any]:
        pairs = zip(cotangents, wanted, strict=True)
        return [*(c if want else None for c, want in pairs), *[None] * 4]

    types = [
        x.aval if want else jax.typeof(x) for x, want in zip((operand, output), wanted, strict=True)
    ]
    if isinstance(cotangent, ad.Zero):
        return answer(*(ad.Zero(aval.to_ct_aval()) for aval in types))
    axis: dict[str, Any] = {"axis_name": axis_name, "axis_index_groups": axis_index_groups}
    came_from, went_to = (
        lax.all_to_all(x, split_axis=0, concat_axis=0, tiled=True, **axis)
        for x in (input_offsets, output_offsets)
    )
    nothing = ad.zeros_like_aval(types[0])
    back = lax.ragged_all_to_all(
        cotangent, nothing, went_to, recv_sizes, came_from, send_sizes, **axis
    )
    rows = len(cotangent)
    sizes = jnp.clip(recv_sizes, 0, min(rows, len(nothing)))  # as the kernels do
    first = jnp.clip(went_to, 0, rows - sizes)
    steps = jnp.zeros(rows + 1, jnp.int32).at[first].add(1).at[first + sizes].add(-1)
    received = lax.expand_dims(jnp.cumsum(steps)[:-1] > 0, range(1, cotangent.ndim))
    return answer(back, jnp.where(received, jnp.zeros_like(cotangent), cotangent))


# In place of rules of lax's that are wrong.
_TRANSPOSES: dict[str, Callable[..., Any]] = {
    "pbroadcast": _pbroadcast_transpose,
    "pbroadcast_dynamic": _pbroadcast_transpose,
    "ragged_all_to_all": _ragged_transpose,
}


def _rule(lax_rule: Rule, _: core.Primitive, op: str, *args: Any, how: How, **params: Any) -> Any:
    """A rule of lax's for `op`, with twins: a gather's transpose is our scatter."""
    return with_twins(how, functools.partial(lax_rule, **params), *args, op=op)


def _transpose(*args: Any, how: How, **params: Any) -> Any:
    """lax's, over the wire of derivatives."""
    return _rule(*args, how=how.differentiated, **params)


def _batch(
    lax_rule: Rule,
    primitive: core.Primitive,
    op: str,
    axis: Any,
    operands: Sequence[jax.Array],
    dims: Sequence[Dim],
    **params: Any,
) -> Any:
    """lax's; over a wire what is mapped comes first, so that no group is of several elements.

    So it does where a psum_scatter drops its dimension: lax's rule counts that dimension still, and
    what is mapped behind it is out of range.
    """
    how = params["how"]
    wired = how.wire is not None or how.wire_backward is not None
    if wired or (op == "reduce_scatter" and not params["tiled"]):
        pairs = zip(operands, dims, strict=True)
        operands = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]
        dims = [d if d is None else 0 for d in dims]
        over = validation.named(params.get("axes", params.get("axis_name", ())))
        mapped = axis.name not in over and any(d is not None for d in dims)  # else it is reduced
        if wired and mapped and op != "ragged_all_to_all":  # of which lax's makes more rows
            params["how"] = how.once_more_mapped
    return _rule(lax_rule, primitive, op, axis, operands, dims, **params)


def _jvp(
    lax_rule: Rule,
    primitive: core.Primitive,
    op: str,
    primals: Sequence[jax.Array],
    tangents: Sequence[Tangent],
    how: How,
    **params: Any,
) -> Any:
    """lax's; over a wire the derivative of a collective is the collective, by its own wire."""
    if how.wire is how.wire_backward is None:
        return _rule(lax_rule, primitive, op, primals, tangents, how=how, **params)
    out = primitive.bind(*primals, how=how, **params)
    if all(isinstance(t, ad.Zero) for t in tangents):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    moving = [
        ad.instantiate_zeros(t) if jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact) else x
        for x, t in zip(primals, tangents, strict=True)
    ]
    return out, primitive.bind(*moving, how=how.differentiated, **params)


_RULES: dict[str, Rule] = {"batch": _batch, "jvp": _jvp, "transpose": _transpose}


def _effects(op: str, how: How, avals: Sequence[Aval], params: dict[str, Any]) -> frozenset[Any]:
    """The effects of a lowering: those of TPU interpret mode. Raises what the lowering raises."""
    mesh = jax.sharding.get_abstract_mesh()
    names = validation.named(params.get("axes", params.get("axis_name", ())))
    vmapped = [name for name in names if name not in mesh.axis_names]
    if how.backend == "xla" or vmapped:  # vmap's rule will bind anew, without its axis
        return frozenset()
    by_lax = None if how.strict else _by_lax
    return serving.effects(_by_kernels, avals, otherwise=by_lax, op=op, how=how, **params)


def _by_kernels(*operands: jax.Array, op: str, how: How, **params: Any) -> jax.Array:
    with counters.calling(catalogue.primitives()[op][0].function_of(op)):
        return serving.run(op, how, *operands, **params)


def _by_lax(*_: jax.Array, **__: Any) -> tuple[()]:
    return ()
