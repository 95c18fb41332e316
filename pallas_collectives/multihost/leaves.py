"""Trees as the host sees them: named leaves of plain bytes, and the way back."""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_collectives import _compat
from pallas_collectives.errors import CollectiveError, DtypeError


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a tree.

    Attributes:
      name: where it is in the tree, e.g. `['params'][0]`.
      data: its value, a `jax.Array` only if its shards lie on several processes; for a key array,
        the integers behind it.
      shape: its logical shape: that of the keys for a key array.
      key_impl: the generator of a key array, otherwise None.
    """

    name: str
    data: np.ndarray | jax.Array
    shape: tuple[int, ...]
    key_impl: Any = None

    @property
    def terms(self) -> str:
        """What processes must agree on before they move it."""
        dtype = self.data.dtype if self.key_impl is None else f"key<{self.key_impl}>"
        where = f" on {self.data.sharding}" if isinstance(self.data, jax.Array) else ""
        return f"leaf {self.name}: {dtype}[{','.join(map(str, self.shape))}]{where}"

    def local(self, operation: str) -> np.ndarray:
        """The value that this process holds; CollectiveError if it holds only a part of it."""
        if not isinstance(self.data, jax.Array):
            return self.data
        if not self.data.is_fully_replicated:
            raise CollectiveError(
                f"{operation} of leaf {self.name} on {self.data.sharding}",
                "its shards lie on several processes, and no process holds it whole",
                "call process_allgather(tree, tiled=True) to make it whole on each process",
            )
        return np.asarray(self.data.addressable_data(0))

    def wrap(self, data: np.ndarray) -> Any:
        """`data`, moved here for this leaf, as what this leaf was: an array, or keys."""
        if self.key_impl is None:
            return data
        return jax.random.wrap_key_data(jnp.asarray(data), impl=self.key_impl)


def flatten(tree: Any, operation: str) -> tuple[list[Leaf], Any]:
    """The leaves of `tree`, and its structure for `jax.tree.unflatten`."""
    named, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [_leaf(jax.tree_util.keystr(path), x, operation) for path, x in named], structure


def _leaf(name: str, value: Any, operation: str) -> Leaf:
    if _compat.is_traced(value):
        raise CollectiveError(
            f"{operation} of leaf {name}: {value.aval}",
            "data moves between processes outside of jit, grad and vmap",
            "call it with concrete arrays, or use pallas_collectives.all_gather inside jit",
        )
    if isinstance(value, jax.Array):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        bare = jax.random.key_data(value) if is_key else value
        return Leaf(
            name,
            np.asarray(bare) if bare.is_fully_addressable else bare,
            value.shape,
            jax.random.key_impl(value) if is_key else None,
        )
    data = np.asarray(value)
    if data.dtype.hasobject:
        raise DtypeError(
            f"{operation} of leaf {name}, a {type(value).__name__}",
            "only arrays of numbers, bools, keys or fixed-width text move between processes",
            "turn it into an array, or take it out of the tree",
        )
    return Leaf(name, data, data.shape)


class Bytes:
    """Arrays end to end as one run of bytes, read and written in pieces: no copy of the whole."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._runs = [_flat_bytes(array) for array in arrays]
        self._begins = [*itertools.accumulate((run.size for run in self._runs), initial=0)]
        self.size = self._begins[-1]

    def read(self, start: int, into: np.ndarray) -> None:
        """Fills `into` from `start` on, as far as there are bytes."""
        for ours, theirs in self._overlaps(start, into):
            theirs[:] = ours

    def write(self, start: int, data: np.ndarray) -> None:
        """Puts `data` at `start`; what lies beyond the end is padding."""
        for ours, theirs in self._overlaps(start, data):
            ours[:] = theirs

    def _overlaps(self, start: int, other: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        first = max(bisect.bisect_right(self._begins, start) - 1, 0)
        last = bisect.bisect_left(self._begins, start + other.size)
        for at, run in zip(self._begins[first:last], self._runs[first:last], strict=False):
            low, high = max(start, at), min(start + other.size, at + run.size)
            if low < high:
                yield run[low - at : high - at], other[low - start : high - start]


def _flat_bytes(array: np.ndarray) -> np.ndarray:
    if not array.nbytes:
        return np.empty(0, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
