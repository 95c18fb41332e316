"""Steps of eight layers of one product, whose weights are gathered: what hides a gather is scarce.

For `step --program=benchmarks.steps.small:rows` and the like; they are no models, and show what
`override_lax` does where a step is as short as that.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.steps import programs
from benchmarks.steps.programs import WIDTH, Arrays, Form, Program

LAYERS = 8


def _layer(x: jax.Array, w: Arrays) -> jax.Array:
    return jnp.tanh(x @ lax.all_gather(w["one"], "x", tiled=True))


def _of(tokens: int) -> Callable[[int, Form], Program]:
    """The step of so many rows a device."""

    def program(devices: int, form: Form) -> Program:
        weights = {"one": jax.ShapeDtypeStruct((LAYERS, WIDTH // devices, WIDTH), jnp.bfloat16)}
        args = weights, jax.ShapeDtypeStruct((tokens, WIDTH), jnp.bfloat16)
        return Program(programs.stepping(form, _layer), args, {"x": devices})

    return program


few_rows, rows, many_rows = map(_of, (256, 2048, 16384))
