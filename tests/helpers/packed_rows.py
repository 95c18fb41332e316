"""What is packed by kernels in tests: wires, numbers, and a device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_collectives.wires import Wire
from wired_calls import run

WIRES = [
    Wire("int8"),
    Wire("int8", group=256, scales="power of two"),
    Wire("int8", group="row"),
    Wire("float8_e4m3fn"),
    Wire("float8_e5m2", group="row"),
    Wire("float8_e4m3fn", group=256),
]


def numbers(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Numbers of all sizes, with zeros, largest numbers, inf and NaN."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(shape[0], np.prod(shape[1:])))
    x *= np.exp(4 * rng.normal(size=x.shape))
    x[:, :512] = 0
    x[0, 1100], x[0, 4097], x[-1, 5] = np.nan, -np.inf, -0.0
    x[0, 8000:8128] = np.sign(x[0, 8000:8128]) * float(jnp.finfo(dtype).max)
    with np.errstate(over="ignore"):
        return jnp.asarray(x.astype(np.float32).astype(dtype)).reshape(shape)


def on_one(fn: Any, *args: jax.Array, vma: bool = False) -> Any:
    return jax.tree.map(lambda y: y[0], run(fn, *(x[None] for x in args), n=1, check_vma=vma))
