"""Steps that sum by `psum`, for `step --program=benchmarks.steps.sums:tensor` and so on."""

import functools

import jax
from jax import lax

from benchmarks.steps import programs
from benchmarks.steps.programs import Form, Program


@jax.custom_vjp
def _alike(x: jax.Array) -> jax.Array:
    """Tokens that are alike on all devices; each device's products make terms of their gradient."""
    return x


@jax.custom_vjp
def _summed(terms: jax.Array) -> jax.Array:
    """The sum of all devices' terms, whose gradient is alike on all."""
    return lax.psum(terms, "x")


_alike.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "x"),))
_summed.defvjp(lambda terms: (lax.psum(terms, "x"), None), lambda _, ct: (ct,))


def tensor(devices: int, form: Form) -> Program:
    """As the built-in program of that name, but that no device holds a part of the tokens alone.

    Products' terms are added by `psum`.
    """
    layer = functools.partial(
        programs._layer,
        into=lambda x, w: _alike(x) @ w,
        out_of=lambda x, w: _summed(x @ w),
    )
    step = programs.stepping(form, layer)
    return Program(step, (programs._weights(1, devices), programs._tokens()), {"x": devices})


def data(devices: int, form: Form) -> Program:
    """As the built-in program of that name, but that each layer's weights are arrays of their own.

    Layers are not in a scan then.
    """
    stacked = programs._weights(1, 1)
    layers = [
        {k: jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for k, w in stacked.items()}
        for _ in range(programs.LAYERS)
    ]

    step = programs.stepping(form, programs._layer, lambda gradients: lax.psum(gradients, "x"))
    return Program(step, (layers, programs._tokens()), {"x": devices})
