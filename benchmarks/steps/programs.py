"""Steps of models that are trained and served on pods: what `step` compiles.

Each program is a few layers of a transformer in bfloat16, written with `jax.lax`'s collectives
alone, forward or with its gradient (rematerialised), its layers in a scan or unrolled. They know
nothing of `pallas_collectives`, which replaces what they call; but for `experts`, whose tokens go
by its `moe`, over lax's collectives or over ours.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.settings import FlagError
from pallas_collectives import moe

WIDTH, HEADS, HIDDEN = 4096, 32, 16384
LENGTH, BATCH, LAYERS = 2048, 2, 4  # tokens of a sequence; sequences of a replica
RATE = 1e-3  # at which summed gradients move the weights
EXPERTS, CHOICES = 2, 2  # of a device; of a token

Arrays = dict[str, Any]
Multiply = Callable[[jax.Array, jax.Array], jax.Array]
Wrap = Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]  # of a layer


@dataclasses.dataclass(frozen=True)
class Program:
    """A step, as one device runs it inside `jax.shard_map`.

    Attributes:
      step: (*args) -> arrays.
      args: pytrees of `jax.ShapeDtypeStruct`: what one device holds.
      axes: mesh axis -> its size.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    axes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Form:
    """How a built-in program is run: with its gradient or without, unrolled or in a scan."""

    gradient: bool
    unrolled: bool

    def __str__(self) -> str:
        passes = "gradient" if self.gradient else "forward"
        return f"{passes}, {'unrolled' if self.unrolled else 'scan'}"


def _norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)).astype(
        x.dtype
    )


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """(batch, length, heads, 128) each."""
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k, preferred_element_type=jnp.float32)
    shares = jax.nn.softmax(scores).astype(v.dtype)
    return jnp.einsum("bhqk,bkhe->bqhe", shares, v)


def _layer(
    x: jax.Array,
    w: Arrays,
    *,
    into: Multiply = jnp.matmul,
    out_of: Multiply = jnp.matmul,
    attend: Callable[..., jax.Array] = _attend,
) -> jax.Array:
    """A layer: products that tokens go `into`, and those that terms of tokens come `out_of`."""
    seen = into(_norm(x), w["qkv"])
    q, k, v = jnp.split(seen.reshape(*seen.shape[:2], -1, 3 * 128), 3, axis=-1)
    x = x + out_of(attend(q, k, v).reshape(*seen.shape[:2], -1), w["project"])
    if "route" in w:
        return x + _answers(_norm(x), w)
    return x + out_of(jax.nn.gelu(into(_norm(x), w["up"])), w["down"])


def _answers(x: jax.Array, w: Arrays) -> jax.Array:
    """What the experts that each token chooses, all over "x", make of it."""
    tokens = x.reshape(-1, WIDTH)
    weights, chosen = lax.top_k(jax.nn.softmax((tokens @ w["route"]).astype(jnp.float32)), CHOICES)
    # Room for twice as many as come where all experts are chosen alike.
    rows, plan = moe.dispatch(
        tokens,
        chosen,
        "x",
        num_experts=w["route"].shape[1],
        rows=2 * CHOICES * len(tokens),
        exchange="ragged",
    )
    hidden = jax.nn.gelu(lax.ragged_dot(rows, w["up"], plan.group_sizes))
    y = lax.ragged_dot(hidden, w["down"], plan.group_sizes)
    return moe.combine(y, weights, plan, "x").reshape(x.shape)


def _weights(parts: int, tensor: int, width: int = WIDTH, hidden: int = HIDDEN) -> Arrays:
    """A device's part of each layer's weights, in bfloat16, layers stacked."""
    sizes = {
        "qkv": (width // parts, 3 * width // tensor),
        "project": (width // tensor // parts, width),
        "up": (width // parts, hidden // tensor),
        "down": (hidden // tensor // parts, width),
    }
    return {k: jax.ShapeDtypeStruct((LAYERS, *s), jnp.bfloat16) for k, s in sizes.items()}


def _tokens(parts: int = 1, batch: int = BATCH, width: int = WIDTH) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, LENGTH // parts, width), jnp.bfloat16)


def stepping(
    form: Form, layer: Callable[..., jax.Array], summed: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A step through all layers. `summed` adds gradients up, which then move the weights.

    Where the sum is the last of a step, what uses it belongs to the step: XLA copies what a kernel
    has written before it becomes a program's own result.
    """
    body = jax.checkpoint(layer) if form.gradient else layer

    def forward(weights: Arrays, x: jax.Array) -> jax.Array:
        if isinstance(weights, dict) and not form.unrolled:
            return lax.scan(lambda x, w: (body(x, w), None), x, weights)[0]
        for of_layer in _one_by_one(weights) if isinstance(weights, dict) else weights:
            x = body(x, of_layer)
        return x

    def loss(weights: Arrays, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(forward(weights, x).astype(jnp.float32)))

    def step(weights: Arrays, x: jax.Array) -> Any:
        if not form.gradient:
            return forward(weights, x)
        gradients = jax.grad(loss)(weights, x)
        if not summed:
            return gradients
        rate = jnp.bfloat16(RATE)
        return jax.tree.map(lambda w, g: w - rate * g, weights, summed(gradients))

    return step


def _one_by_one(stacked: Arrays) -> list[Arrays]:
    """Each layer's weights."""
    leaves, tree = jax.tree.flatten(stacked)
    return [jax.tree.unflatten(tree, of_layer) for of_layer in zip(*leaves, strict=True)]


def _gather(axis: str, dimension: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: lax.all_gather(x, axis, axis=dimension, tiled=True)


def _scatter(axis: str, dimension: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)


def fsdp(devices: int, form: Form) -> Program:
    """Weights cut in pieces, one a device, gathered layer by layer; gradients are scattered."""
    whole = _gather("x", 0)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ whole(w)

    layer = functools.partial(_layer, into=product, out_of=product)
    return Program(stepping(form, layer), (_weights(devices, 1), _tokens()), {"x": devices})


def tensor(devices: int, form: Form, wrap: Wrap = lambda layer: layer) -> Program:
    """Heads and hidden units over the devices; between products, the sequence."""
    layer, args, axes = _over_heads(devices)
    return Program(stepping(form, wrap(layer)), args, axes)


def tensor_at_once(devices: int, form: Form, wrap: Wrap = lambda layer: layer) -> Program:
    """The same, all its layers in one turn."""
    layer, (weights, tokens), axes = _over_heads(devices)

    def layers(x: jax.Array, w: Arrays) -> jax.Array:
        for i in range(LAYERS):
            x = layer(x, {k: each[i] for k, each in w.items()})
        return x

    stacked = {k: jax.ShapeDtypeStruct((1, *w.shape), w.dtype) for k, w in weights.items()}
    return Program(stepping(form, wrap(layers)), (stacked, tokens), axes)


def _over_heads(
    devices: int,
) -> tuple[Callable[..., jax.Array], tuple[Any, Any], dict[str, int]]:
    """A layer, its arguments, and its axis."""
    gathered, scattered = _gather("x", 1), _scatter("x", 1)
    layer = functools.partial(
        _layer,
        into=lambda x, w: gathered(x) @ w,
        out_of=lambda x, w: scattered(x @ w),
    )
    return layer, (_weights(1, devices), _tokens(devices)), {"x": devices}


def fsdp_tensor(
    devices: int,
    form: Form,
    wrap: Wrap = lambda layer: layer,
    width: int = WIDTH,
    hidden: int = HIDDEN,
) -> Program:
    """Both: weights gathered over "data", tokens over "model", of 4 devices."""
    if devices % 4:
        rule = f"it takes a multiple of 4 devices, and there are {devices}"
        raise FlagError("--program=fsdp_tensor", rule, "name another program")
    parts = devices // 4
    whole, gathered, scattered = _gather("data", 0), _gather("model", 1), _scatter("model", 1)
    layer = functools.partial(
        _layer,
        into=lambda x, w: gathered(x) @ whole(w),
        out_of=lambda x, w: scattered(x @ whole(w)),
    )
    args = _weights(parts, 4, width, hidden), _tokens(4, width=width)
    return Program(stepping(form, wrap(layer)), args, {"data": parts, "model": 4})


def data(devices: int, form: Form) -> Program:
    """All weights everywhere, a batch each; summed gradients move them."""
    step = stepping(form, _layer, lambda gradients: lax.psum(gradients, "x"))
    return Program(step, (_weights(1, 1), _tokens()), {"x": devices})


def experts(devices: int, form: Form) -> Program:
    """Experts over the devices, each token's answers from two; gradients of the rest are summed."""
    sizes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "project": (WIDTH, WIDTH),
        "route": (WIDTH, EXPERTS * devices),
        "up": (EXPERTS, WIDTH, HIDDEN // CHOICES),
        "down": (EXPERTS, HIDDEN // CHOICES, WIDTH),
    }
    weights = {k: jax.ShapeDtypeStruct((LAYERS, *s), jnp.bfloat16) for k, s in sizes.items()}
    everywhere = ("qkv", "project", "route")

    def summed(gradients: Arrays) -> Arrays:
        total = lax.psum({k: gradients[k] for k in everywhere}, "x")
        return gradients | total

    return Program(stepping(form, _layer, summed), (weights, _tokens()), {"x": devices})


def ring_attention(devices: int, form: Form) -> Program:
    """The sequence over the devices; keys and values go round while they are attended to."""
    shift = [(d, (d + 1) % devices) for d in range(devices)]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        total = share = jnp.float32(0)
        highest = jnp.float32(-jnp.inf)
        for step in range(devices):
            following = lax.ppermute((k, v), "x", shift) if step < devices - 1 else (k, v)
            scores = jnp.einsum("bqhe,bkhe->bqhk", q, k, preferred_element_type=jnp.float32)
            top = jnp.maximum(highest, jnp.max(scores, -1, keepdims=True))
            old, new = jnp.exp(highest - top), jnp.exp(scores - top)
            share = share * old + jnp.sum(new, -1, keepdims=True)
            total = total * old + jnp.einsum("bqhk,bkhe->bqhe", new.astype(v.dtype), v)
            highest, (k, v) = top, following
        return (total / share).astype(q.dtype)

    layer = functools.partial(_layer, attend=attend)
    # A device's part of a long sequence, of which there is one, is as long as others' whole.
    return Program(stepping(form, layer), (_weights(1, 1), _tokens(batch=1)), {"x": devices})


_REMEDY = f"write it as `fsdp` in {__name__} is"

BUILT_IN: dict[str, Callable[[int, Form], Program]] = {
    program.__name__: program
    for program in (fsdp, tensor, fsdp_tensor, experts, ring_attention, data)
}


def named(name: str) -> Callable[[int, Form], Program]:
    """A built-in program, or a function "package.module:function" of (devices, form).

    Raises:
      FlagError: no program has the name, or the function is of other arguments; when called: its
        result is no `Program`.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever a module raises while it is imported
        said = f"{type(error).__name__}: {error}"
        rule = f"it must be one of {', '.join(BUILT_IN)}, or package.module:function ({said})"
        raise FlagError(f"--program={name}", rule, "name one that can be imported") from None
    rule = f"it must take (devices, form) and return a {__name__}.Program"
    try:
        inspect.signature(found).bind(1, Form(gradient=False, unrolled=False))
    except (TypeError, ValueError) as error:
        raise FlagError(f"--program={name}", f"{rule} ({error})", _REMEDY) from None

    def checked(devices: int, form: Form) -> Program:
        program = found(devices, form)
        if not isinstance(program, Program):
            raise FlagError(f"--program={name}", f"{rule}, not {program!r:.60}", _REMEDY)
        return program

    return checked


def check(name: str, devices: int, form: Form) -> None:
    """Checks a program for so many devices; what goes wrong within it is for its rows to say.

    Raises:
      FlagError: what `named` and the program raise.
    """
    try:
        named(name)(devices, form)
    except FlagError:
        raise
    except Exception:
        return
