"""Bundles: small arrays of one reduction, laid behind one another and reduced in one call.

A kernel, like a call of NCCL, costs some microseconds however little it adds, and a model's
gradients may have hundreds of small leaves. XLA merges lax's small reductions for that reason, but
cannot look into ours. So the lowering of a reduction bundles its small arrays, by dtype. Tracing
does not, so that each array keeps its own batching and derivative.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_collectives import _compat, validation
from pallas_collectives.backends.plans import How

# Larger ones gain less, and being laid together costs a copy on either side.
SMALL_BYTES = 64 << 10
BUNDLE_BYTES = 1 << 20


def reduced(
    reduce: Callable[[jax.Array, How], Any], xs: Sequence[jax.Array], how: How, axes: Sequence[Any]
) -> list[Any]:
    """`reduce` of each array, elementwise; small ones together, one call a bundle.

    What it gives may be a tree of arrays of one shape. Over a wire with scales its `How` has the
    bundle's pieces.

    Nothing is bundled if lax serves, because XLA merges those, but none over a wire; if arrays are
    vmap's, or lose dimensions (numbers among `axes`), or their rows have scales; or if the caller
    wants each in VMEM, which may not hold a bundle.
    """
    apart = how.backend == "xla" and how.wire is None
    apart = apart or how.mapped > 0 or str(how.algorithm).endswith(":vmem")
    apart = apart or len(validation.named(axes)) < len(axes)
    apart = apart or (how.wire is not None and how.wire.group == "row")
    results: dict[int, Any] = {}
    for members in [[i] for i in range(len(xs))] if apart else _bundles(xs):
        if len(members) == 1:
            results[members[0]] = reduce(xs[members[0]], how)
            continue
        sizes = [xs[i].size for i in members]
        scaled = how.wire is not None and how.wire.scaled
        of_pieces = dataclasses.replace(how, pieces=tuple(sizes)) if scaled else how
        joined = reduce(jnp.concatenate([xs[i].reshape(-1) for i in members]), of_pieces)
        begins = np.cumsum([0, *sizes])
        for i, begin in zip(members, begins, strict=False):
            results[i] = jax.tree.map(functools.partial(_part, begin=begin, like=xs[i]), joined)
    return [results[i] for i in range(len(xs))]


def _part(joined: jax.Array, begin: int, like: jax.Array) -> jax.Array:
    return joined[begin : begin + like.size].reshape(like.shape)


def _bundles(xs: Sequence[jax.Array]) -> list[list[int]]:
    """The arrays' numbers; those of small ones of a type together, as many as a bundle holds."""
    bundles: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for i, x in enumerate(xs):
        kind = x.dtype, _compat.manual_type(x)
        bundle, size = filling.get(kind, ([], 0))
        if validation.symbols([x]) or x.nbytes > SMALL_BYTES:
            bundles.append([i])
            continue
        if not bundle or size + x.nbytes > BUNDLE_BYTES:
            bundle, size = [], 0
            bundles.append(bundle)
        bundle.append(i)
        filling[kind] = bundle, size + x.nbytes
    return bundles
