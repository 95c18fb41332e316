"""Every collective in two halves, and the whole one by lax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import harness
import pallas_collectives as pc

N = min(4, jax.device_count())  # a host may have two GPUs
SHIFT = [(d, (d + 1) % N) for d in range(N)]

# A choice: the forms of a call that are laid out each in its own way.
FORMS = {
    "all_gather": lambda x, **o: ("all_gather", (x, "x"), {"tiled": True, **o}),
    "all_gather stacked": lambda x, **o: ("all_gather", (x, "x"), {"axis": -1, **o}),
    "psum_scatter": lambda x, **o: ("psum_scatter", (x, "x"), {"tiled": True, **o}),
    "psum_scatter 1": lambda x, **o: (
        "psum_scatter",
        (x, "x"),
        {"tiled": True, "scatter_dimension": 1, **o},
    ),
    "psum_scatter stacked": lambda x, **o: ("psum_scatter", (x[:N], "x"), o),
    "psum_scatter in order": lambda x, **o: (
        "psum_scatter",
        (x, "x"),
        {"tiled": True, "scatter_dimension": -1, "precise": True, "order": "rank", **o},
    ),
    "psum": lambda x, **o: ("psum", (x, "x"), o),
    "pmean": lambda x, **o: ("pmean", (x, "x"), o),
    "all_to_all": lambda x, **o: ("all_to_all", (x, "x", 0, 1), {"tiled": True, **o}),
    "all_to_all stacked": lambda x, **o: ("all_to_all", (x[:N], "x", 0, 1), o),
    "pswapaxes": lambda x, **o: ("pswapaxes", (x[:N], "x", 0), o),
    "ppermute": lambda x, **o: ("ppermute", (x, "x", SHIFT), o),
    "ppermute in part": lambda x, **o: ("ppermute", (x, "x", SHIFT[:-1]), o),
    "pshuffle": lambda x, **o: ("pshuffle", (x, "x", [s for s, _ in SHIFT][::-1]), o),
}
# What copy engines do not do: one call, where it is started.
AT_ONCE = {
    "pmax": lambda x, **o: ("pmax", (x, "x"), o),
    "pmin": lambda x, **o: ("pmin", (x, "x"), o),
    "pbroadcast": lambda x, **o: ("pbroadcast", (x, "x", 1), o),
}
EVERY = {**FORMS, **AT_ONCE}


def split(form, x, **options):
    """The collective in two halves, with work between them."""
    name, args, kwargs = EVERY[form](x, **options)
    started = getattr(pc, f"{name}_start")(*args, **kwargs)
    between = jnp.tanh(started.before(x))
    return started.done(after=between), between


def whole(form, x):
    if form == "pbroadcast":  # lax has it on GPUs alone
        return jax.lax.all_gather(x, "x")[1]
    if form == "psum_scatter stacked":  # lax's batching of it fails
        return jax.lax.psum_scatter(x[:N], "x", tiled=True)[0]
    if form == "all_to_all stacked":  # lax's transpose of it fails
        return jnp.moveaxis(jax.lax.pswapaxes(x[:N], "x", 0), 0, 1)
    name, args, kwargs = EVERY[form](x)
    for ours in ("order", "precise"):
        kwargs.pop(ours, None)
    if "scatter_dimension" in kwargs:  # JAX 0.10 takes no negative ones
        kwargs["scatter_dimension"] %= x.ndim
    return getattr(jax.lax, name)(*args, **kwargs)


def on_devices(fn: Callable[[Any], Any], x: Any) -> np.ndarray:
    """What `fn` makes of each device's part of x."""
    return np.asarray(harness.per_device(fn, harness.mesh(N))(x))
