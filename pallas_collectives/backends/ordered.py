"""Sums in the order of the ranks: bits that depend neither on size nor on algorithm nor on place.

With order="rank" every element is rank 0's term plus rank 1's, plus rank 2's, ..., in float32 or
wider, rounded once to its dtype. Kernels that have all terms of an element at hand add so
(`records.Algorithm.in_order`); those that add on the way cannot. For large operands two exchanges
of data, which any backend has, stand around additions on one device:

    exchange    all_to_all: block p of everyone's operand goes to device p,
                which adds the n terms that it has then;
                all_gather of the sums, for an all_reduce
    gather      all_gather of whole operands, which everyone adds: one exchange, n times the bytes

On TPUs a kernel is the gather, and `fastest` chooses between it and the exchange by time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_collectives.annotations import Interpret, Number
from pallas_collectives.backends.plans import How
from pallas_collectives.catalogue.records import PARTNERS, Algorithm
from pallas_collectives.kernels.machinery.combine import OPS, wide
from pallas_collectives.topology.groups import Group

# Where backends have no times to go by: a gather saves a call, and an exchange all but 2/n of the
# bytes. A call of NCCL takes about as long as these many bytes (four H200, see the README).
CALL_BYTES = 4 << 20

# The backends' modules by name: each enters itself, for it imports this one.
exchanges: dict[str, Any] = {}

# Terms that one pass adds. XLA's loops write their sum out after each turn.
_TERMS = 16


def reduce_scatter(x: jax.Array, group: Group, *, axis: int, how: How) -> jax.Array:
    """The sum of everyone's block `me` along `axis`, by a backend's exchanges."""
    module, plain = exchanges[how.backend], _plain(how)
    blocks = module.all_to_all(x, group, split_axis=axis, concat_axis=axis, how=plain)
    return added(blocks, group.size, axis)


def all_reduce(x: jax.Array, group: Group, *, how: How) -> jax.Array:
    """The sum, everywhere, by a backend's exchanges."""
    n, module, plain = group.size, exchanges[how.backend], _plain(how)
    if gathers(x.nbytes, n):
        stack = module.all_gather(x[None], group, axis=0, how=plain)
        return added(stack, n, 0)[0]
    flat = x.reshape(-1)
    padded = jnp.pad(flat, (0, -flat.size % n))
    block = reduce_scatter(padded, group, axis=0, how=how)
    return module.all_gather(block, group, axis=0, how=plain)[: x.size].reshape(x.shape)


def gathers(nbytes: int, n: int) -> bool:
    """Whether a gather of whole operands is quicker than an exchange, where no table has times."""
    return (n - 1) * (n - 2) * nbytes <= n * CALL_BYTES


def added(blocks: jax.Array, n: int, axis: int) -> jax.Array:
    """The n blocks side by side along `axis`, the first plus the second, plus the third, ..."""
    size, dtype = blocks.shape[axis] // n, blocks.dtype

    def term(number: Number) -> jax.Array:
        block = lax.dynamic_slice_in_dim(blocks, number * size, size, axis)
        return block.astype(wide(dtype))

    return _rounded(total(term, n), dtype)


def total(term: Callable[[Any], jax.Array], n: int, op: str = "sum") -> jax.Array:
    """term(0) + term(1) + ... + term(n - 1), in this order; "max" or "min" in place of plus."""
    combine = OPS[op]

    def several(turn: Number, so_far: jax.Array) -> jax.Array:
        for k in range(_TERMS):
            so_far = combine(so_far, term(1 + turn * _TERMS + k))
        return so_far

    turns = (n - 1) // _TERMS
    so_far = lax.fori_loop(0, turns, several, term(0)) if turns > 1 else term(0)
    for k in range(1 + turns * _TERMS if turns > 1 else 1, n):
        so_far = combine(so_far, term(k))
    return so_far


def _rounded(total: jax.Array, dtype: DTypeLike) -> jax.Array:
    """In a dtype. XLA may leave a rounding out between two types, but not one that is asked for."""
    if dtype in (jnp.bfloat16, jnp.float16):
        kept = jnp.finfo(dtype)
        rounded = lax.reduce_precision(total, kept.nexp, kept.nmant)
        # It makes subnormal numbers of narrower exponents 0.
        total = jnp.where(jnp.abs(total) < float(kept.tiny), total, rounded)
    return total.astype(dtype)


def _plain(how: How) -> How:
    """The options of the exchanges, which add nothing and whose algorithms nobody named."""
    return dataclasses.replace(how, algorithm=None, precise=False, order=None)


def _exchanged(
    x: jax.Array,
    group: Group,
    *,
    op: str,
    axis: int | None = None,
    vmem: bool,
    interpret: Interpret,
) -> jax.Array:
    """By kernels: of blocks along the first dimension for an all_reduce, else along `axis`."""
    del op, vmem  # a sum, from HBM to HBM
    how = How("pallas", interpret=interpret)
    block = reduce_scatter(x, group, axis=axis or 0, how=how)
    if axis is not None:
        return block
    return exchanges[how.backend].all_gather(block, group, axis=0, how=how)


EXCHANGE = Algorithm(
    name="exchange",
    launcher=_exchanged,
    reach=PARTNERS,  # what reaches what is asked of its exchanges
    sent="as all_to_all, and all_gather",
    steps="theirs",
    in_order=True,
)


def seconds_to_add(block_bytes: int, n: int, hbm_bandwidth: float) -> float:
    """What the additions of an exchange take: its n terms of a block are read, the sum written."""
    return (n + 1) * block_bytes / hbm_bandwidth
