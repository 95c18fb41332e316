"""The small arrays of a tree, reduced as one.

A reduction of a few bytes takes a message's latency, whatever it adds: a model's hundred biases
take a hundred. XLA merges lax's small reductions for that reason, but cannot look into a kernel's
or NCCL's; so those of one tree are laid behind one another first. On four H200, a process each, a
hundred leaves of 4 KiB took 1200 µs one by one, 109 so, and lax 313.
"""

import collections
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# A reduction of so many bytes takes about a latency's time, on TPUs and on GPUs: more is not worth
# the pass over the operand and the one over the result.
SMALL_BYTES = 64 << 10


def reduced(reduce: Callable[[list[Any]], list[Any]], tree: Any) -> Any:
    """`reduce` of a tree's leaves, elementwise and from list to list, with the small ones merged.

    Only arrays of the same dtype that vary over the same mesh axes go together. What is no array of
    the program being traced, a Python number say, goes as it is.
    """
    leaves, treedef = jax.tree.flatten(tree)
    alike = collections.defaultdict(list)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.core.Tracer) and 0 < _bytes(leaf) <= SMALL_BYTES:
            kind = jax.typeof(leaf)
            alike[kind.dtype, kind.weak_type, kind.manual_axis_type].append(i)
    bundles = [members for members in alike.values() if len(members) > 1]
    bundled = {i for members in bundles for i in members}
    alone = [i for i in range(len(leaves)) if i not in bundled]
    flat = [jnp.concatenate([leaves[i].ravel() for i in members]) for members in bundles]
    results = reduce([leaves[i] for i in alone] + flat)
    out = dict(zip(alone, results, strict=False))
    for members, result in zip(bundles, results[len(alone) :], strict=True):
        parts = lax.split(result, [leaves[i].size for i in members])
        out |= {i: part.reshape(leaves[i].shape) for i, part in zip(members, parts, strict=True)}
    return jax.tree.unflatten(treedef, [out[i] for i in range(len(leaves))])


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
