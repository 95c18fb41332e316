"""One call of each collective, with operands of every size, and what must come of it by numpy.

As in nccl-tests, `size` is the bytes of the full array, the largest that a device holds: what is
gathered, what is scattered, what is reduced, what is exchanged. algbw is size / time.

busbw puts collectives on one scale: the bandwidth that each device's links must have carried, so
that it can be held against the wires. It is algbw times a factor that says how many sizes each
device must send at the least, whatever the algorithm, on n devices:

    all_gather      (n-1)/n   a device receives the n-1 blocks of size/n that are not its own; what
                              all receive, all must send
    psum_scatter    (n-1)/n   an all-gather backwards: of size bytes, a device keeps one n-th and
                              must send n-1 partial blocks on their way to a sum
    psum           2(n-1)/n   the two, one after the other: each block must come together on some
                              device and go out again from there
    all_to_all      (n-1)/n   all but the block that stays
    ragged_all_to_all         as much of the n-1 blocks as is sent: of the block for the device k
                              further on, (k+1)/n; together (n+2)(n-1)/2n^2 of size
    ppermute          1       everything leaves

`count` is the number of elements in the argument that NCCL's function would be given.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

LANES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A call over n devices.

    The full array is (n, rows, 128): blocks lie along a leading dimension, which TPUs do not tile,
    so that every size runs without padding.

    Attributes:
      operand: (n, rows) -> the shape of one device's operand.
      call: (module, x, axis_name, **how) -> this device's result; module is ours or `jax.lax`.
      reference: operands of all devices, stacked -> results of all devices, stacked, by numpy.
      busbw: n -> busbw / algbw.
      whole: whether `count` is all n blocks, and not one.
      rows_sent: (source, target, n, rows) -> rows that one device sends the other, where that is
        not one block to each or a share in a sum.
      lax_everywhere: whether lax itself runs it also on CPU devices and between GPU processes.
    """

    operand: Callable[[int, int], tuple[int, ...]]
    call: Callable[..., jax.Array]
    reference: Callable[[np.ndarray], np.ndarray]
    busbw: Callable[[int], float]
    rows_sent: Callable[[Any, Any, int, int], Any] | None = None
    whole: bool = False
    lax_everywhere: bool = True


def one_block(n: int, rows: int) -> tuple[int, ...]:
    """The operand where a device gives one block."""
    return (1, rows, LANES)


def all_blocks(n: int, rows: int) -> tuple[int, ...]:
    """The operand where a device gives a block for each."""
    return (n, rows, LANES)


def everywhere(result: np.ndarray, n: int) -> np.ndarray:
    """The same result on all devices."""
    return np.broadcast_to(result, (n, *result.shape))


def no_rows(n: int) -> jax.Array:
    """A table of a ragged exchange in which nothing is sent."""
    return jnp.zeros(n, np.int32)


def _sum(xs: np.ndarray) -> np.ndarray:
    kinds = ((jnp.complexfloating, np.complex128), (jnp.floating, np.float64))
    wide: Any = next((to for kind, to in kinds if jnp.issubdtype(xs.dtype, kind)), np.int64)
    return xs.sum(axis=0, dtype=wide)


def _ring_shift(axis: Any) -> list[tuple[int, int]]:
    n = jax.lax.axis_size(axis)
    return [(source, (source + 1) % n) for source in range(n)]


def _rows_sent(source: Any, target: Any, n: int, rows: int) -> Any:
    """How much of its block for `target` a device sends in the ragged exchange."""
    return rows * (1 + (target - source) % n) // n


def _ragged_all_to_all(module: Any, x: jax.Array, axis: Any, **how: Any) -> jax.Array:
    n, rows, columns = x.shape
    me, device = jax.lax.axis_index(axis), jnp.arange(n, dtype=np.int32)
    flat = x.reshape(n * rows, columns)
    exchanged = module.ragged_all_to_all(
        flat,
        jnp.zeros_like(flat),
        device * rows,
        _rows_sent(me, device, n, rows),
        jnp.full(n, me * rows),
        _rows_sent(device, me, n, rows),
        axis_name=axis,
        **how,
    )
    return exchanged.reshape(x.shape)


def _ragged_exchanged(xs: np.ndarray) -> np.ndarray:
    n, rows = xs.shape[1:3]
    results = np.zeros_like(xs)
    for source, target in itertools.product(range(n), repeat=2):
        sent = _rows_sent(source, target, n, rows)
        results[target, source, :sent] = xs[source, target, :sent]
    return results


ALL_GATHER = Example(
    operand=one_block,
    call=lambda m, x, axis, **how: m.all_gather(x, axis, tiled=True, **how),
    reference=lambda xs: everywhere(xs.reshape(-1, *xs.shape[2:]), len(xs)),
    busbw=lambda n: (n - 1) / n,
)
REDUCE_SCATTER = Example(
    operand=all_blocks,
    call=lambda m, x, axis, **how: m.psum_scatter(x, axis, tiled=True, **how),
    reference=lambda xs: _sum(xs)[:, None],
    busbw=lambda n: (n - 1) / n,
)
ALL_REDUCE = Example(
    operand=all_blocks,
    call=lambda m, x, axis, **how: m.psum(x, axis, **how),
    reference=lambda xs: everywhere(_sum(xs), len(xs)),
    busbw=lambda n: 2 * (n - 1) / n,
    whole=True,
)
ALL_TO_ALL = Example(
    operand=all_blocks,
    call=lambda m, x, axis, **how: m.all_to_all(x, axis, 0, 0, tiled=True, **how),
    reference=lambda xs: xs.swapaxes(0, 1),
    busbw=lambda n: (n - 1) / n,
)
RAGGED_ALL_TO_ALL = Example(
    operand=all_blocks,
    call=_ragged_all_to_all,
    reference=_ragged_exchanged,
    busbw=lambda n: (n + 2) * (n - 1) / (2 * n * n),
    rows_sent=_rows_sent,
    lax_everywhere=False,
)
PPERMUTE = Example(
    operand=all_blocks,
    call=lambda m, x, axis, **how: m.ppermute(x, axis, _ring_shift(axis), **how),
    reference=lambda xs: np.roll(xs, 1, axis=0),
    busbw=lambda n: 1.0,
    rows_sent=lambda source, target, n, rows: n * rows * (target == (source + 1) % n),
    whole=True,
)

# How `explain` traces a call without its layout work.

# Operands and parameters of a primitive.
Bound: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
# (x, mesh axes, n, axis) -> how a primitive is bound, with x as the first operand and what is
# gathered, scattered or split along `axis`; all else as plain as can be.
Plainly: TypeAlias = Callable[[jax.Array, tuple[str, ...], int, int], Bound]


def bind_gather(x: jax.Array, axes: tuple[str, ...], n: int, axis: int) -> Bound:
    params = {"all_gather_dimension": axis, "axis_size": n, "tiled": x.ndim > 0}
    return (x,), {"axis_name": axes, **params}


def bind_scatter(x: jax.Array, axes: tuple[str, ...], n: int, axis: int) -> Bound:
    return (x,), {"axis_name": axes, "scatter_dimension": axis, "axis_size": n, "tiled": True}


def bind_reduce(x: jax.Array, axes: tuple[str, ...], n: int, axis: int) -> Bound:
    return (x,), {"axes": axes}


def bind_exchange(x: jax.Array, axes: tuple[str, ...], n: int, axis: int) -> Bound:
    return (x,), {"axis_name": axes, "split_axis": axis, "concat_axis": axis}


def bind_ragged(x: jax.Array, axes: tuple[str, ...], n: int, axis: int) -> Bound:
    return (x, x, *[no_rows(n)] * 4), {"axis_name": axes}


def bind_permute(x: jax.Array, axes: tuple[str, ...], n: int, axis: int) -> Bound:
    return (x,), {"axis_name": axes, "perm": tuple((p, (p + 1) % n) for p in range(n))}


def bind_broadcast(x: jax.Array, axes: tuple[str, ...], n: int, axis: int) -> Bound:
    return (x,), {"axis_name": axes, "source": 0}
