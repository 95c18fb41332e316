"""The same call with ours and with lax's: calls of every collective, and how to compare them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import harness
import pallas_collectives as pc

Fn = Callable[[jax.Array], Any]
SHAPE = (16, 128)


class _Reference:
    """`jax.lax`, with what it has for GPUs only, and with gradients where its own fail."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lax, name)

    def pbroadcast(self, x: jax.Array, axis_name: str, source: Any) -> jax.Array:
        everyones = lax.psum(jnp.where(lax.axis_index(axis_name) == source, x, 0), axis_name)
        return lax.pcast(everyones, axis_name, to="varying")

    def all_to_all(self, x: jax.Array, name: Any, split: int, to: int, **options: Any) -> jax.Array:
        if options.get("tiled"):
            return lax.all_to_all(x, name, split, to, **options)
        blocks = lax.all_to_all(jnp.moveaxis(x, split, 0), name, 0, 0, tiled=True, **options)
        return jnp.moveaxis(blocks, 0, to)


OF_LAX = _Reference()

# (module, x of 16 x 128) -> result, over axis "x" of two devices. A choice: the examples are all
# along the first dimension, and lax has no ragged exchange on CPUs.
CANONICAL: dict[str, Callable[..., Any]] = {
    "all_gather": lambda m, x: m.all_gather(x, "x", axis=1, tiled=True),
    "psum_scatter": lambda m, x: m.psum_scatter(x, "x", tiled=True),
    "psum": lambda m, x: m.psum(x, "x"),
    "all_to_all": lambda m, x: m.all_to_all(x, "x", 0, 1, tiled=True),
    "ppermute": lambda m, x: m.ppermute(x, "x", [(0, 1), (1, 0)]),
}
DERIVED: dict[str, Callable[..., Any]] = {
    "pmean": lambda m, x: m.pmean(x, "x"),
    "all_gather-stacked": lambda m, x: m.all_gather(x, "x", axis=-1),
    "all_gather-invarying": lambda m, x: m.all_gather(x, "x", to="invarying"),
    "psum_scatter-dropped": lambda m, x: m.psum_scatter(x.reshape(2, 8, 128), "x"),
    "all_to_all-stacked": lambda m, x: m.all_to_all(x.reshape(8, 2, 128), "x", 1, 0),
    "ppermute-partial": lambda m, x: m.ppermute(x, "x", [(1, 0)]),
    "pshuffle": lambda m, x: m.pshuffle(x, "x", [1, 0]),
    "pswapaxes": lambda m, x: m.pswapaxes(x.reshape(2, 8, 128), "x", 0),
    "pbroadcast": lambda m, x: m.pbroadcast(x, "x", 1),
}
if jax.__version_info__ >= (0, 12):
    DERIVED["pbroadcast-dynamic"] = lambda m, x: m.pbroadcast(x, "x", jnp.int32(x.size % 2))
UNDIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "pmax": lambda m, x: m.pmax(x, "x"),
    "pmin": lambda m, x: m.pmin(x, "x"),
}


def loss(f: Fn) -> Fn:
    """A scalar none of whose derivatives is constant."""
    return lambda x: jnp.sum(jnp.sin(f(x)))


def served_by_kernels() -> bool:
    """Whether there were collectives since `reset_counts`, and kernels served them all."""
    return {backend for _, backend, _ in pc.counts()} == {"pallas"} and not pc.fallback_counts()


def compare(ours: Any, of_lax: Any) -> None:
    """Equal trees, dtypes and, to rounding, values."""
    assert jax.tree.structure(ours) == jax.tree.structure(of_lax)
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(of_lax), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-6, atol=2e-6)


def check(
    fn: Callable[[Any, Any], Any],
    *args: Any,
    on: Mesh | None = None,
    check_vma: bool = True,
    kernels: bool = True,
) -> None:
    """fn(module, x of each device) gives the same with ours and with lax, and the same types."""
    on = on or harness.mesh(2)
    args = args or (harness.random((on.size, *SHAPE), "float32"),)
    types: dict[Any, Any] = {}

    def run(module: Any) -> Any:
        def shard(*args: jax.Array) -> Any:
            result = fn(module, *args)
            types[module] = jax.tree.map(type_of, result)
            return result

        return harness.per_device(shard, on, check_vma=check_vma)(*args)

    ours = run(pc)
    served = served_by_kernels()
    compare(ours, run(OF_LAX))
    assert types[pc] == types[OF_LAX]
    assert served == kernels, (pc.counts(), pc.fallback_counts())


def type_of(y: Any) -> Any:
    aval = jax.typeof(y)
    return aval.shape, aval.dtype, aval.weak_type, aval.mat


def both_raise(fn: Callable[[Any], Any]) -> None:
    """fn(module) fails with lax's and with ours, while tracing."""
    for module in (lax, pc):
        with pytest.raises(Exception):  # noqa: B017  (which, is lax's own matter)
            fn(module)


class Renamed:
    """A module whose collectives go over other axes than their caller says."""

    def __init__(self, module: Any, axes: Any, perm: Any = None, **options: Any) -> None:
        self._module, self._axes, self._perm, self._options = module, axes, perm, options

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module, name)

        def call(x: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
            if name == "ppermute":
                return function(x, self._axes, self._perm, *args[1:], **kwargs)
            return function(x, self._axes, *args, **kwargs, **self._options)

        return call


class With:
    """A module whose collectives are called with more keywords."""

    def __init__(self, module: Any, keywords: dict[str, Any]) -> None:
        self._module, self._keywords = module, keywords

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(getattr(self._module, name), **self._keywords)
