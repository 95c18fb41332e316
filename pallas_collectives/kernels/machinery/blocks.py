"""How an array is cut into blocks that DMAs can address without copying anything first."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_collectives.annotations import DType, Index, Number, Ref
from pallas_collectives.tiles import LANES as LANES


def sublanes(dtype: DType) -> int:
    """Rows of one (rows x 128 lanes) tile of a dtype: 8 for 4 bytes, 16 for 2, 32 for 1."""
    return 8 * max(1, 4 // jnp.dtype(dtype).itemsize)


def up(size: int, step: int) -> int:
    """`size`, rounded up to a multiple of `step`."""
    return -(-size // step) * step


def padded_bytes(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of an array in VMEM, its last two dimensions rounded up to whole tiles."""
    shape = (1, 1, *x.shape)
    rows = up(shape[-2], sublanes(x.dtype))
    return math.prod(shape[:-2]) * rows * up(shape[-1], LANES) * jnp.dtype(x.dtype).itemsize


def block_shape(shape: tuple[int, ...], axis: int, n: int) -> tuple[int, ...]:
    """The shape of one of n equal blocks along `axis`."""
    return (*shape[:axis], shape[axis] // n, *shape[axis + 1 :])


def whole_shape(block: tuple[int, ...], axis: int, n: int) -> tuple[int, ...]:
    """The shape of n such blocks, one behind the other along `axis`."""
    return (*block[:axis], n * block[axis], *block[axis + 1 :])


def sliceable(size: int, axis: int, ndim: int, dtype: DType) -> bool:
    """Whether cuts every `size` elements along `axis` fall on tile boundaries.

    The last two dimensions of an array in HBM or VMEM are tiled; those before them are free.
    """
    match ndim - axis:
        case 1:
            return ndim > 1 and size % LANES == 0
        case 2:
            return size % sublanes(dtype) == 0
        case _:
            return True


@dataclasses.dataclass(frozen=True)
class Chunking:
    """In what pieces a kernel sends data; as a string, in a clause.

    Attributes:
      chunks: pieces that are sent one by one; 1 if it goes whole.
      sections: turns that they go in, where scratch has no room for all of them at once.
      of: what is cut.
      at_most: whether values decide, up to so many.
    """

    chunks: int = 1
    sections: int = 1
    of: str = "a block"
    at_most: bool = False

    def __str__(self) -> str:
        if self.chunks == 1:
            return f"{self.of} goes whole"
        count = f"{'at most ' if self.at_most else ''}{self.chunks} chunks"
        turns = f", in {self.sections} sections" if self.sections > 1 else ""
        return f"{self.of} goes in {count}{turns}"


@dataclasses.dataclass(frozen=True)
class Blocks:
    """An array made of equal blocks side by side along `axis`, each cut in equal chunks.

    Attributes:
      shape: the shape of one block.
      axis: the dimension along which blocks lie.
      cut: the dimension along which a block is cut.
      chunks: how many chunks a block is cut into.
      first: the chunk that is number 0 here; a core that sees to a part of each block counts from
        the first of its own.
    """

    shape: tuple[int, ...]
    axis: int
    cut: int
    chunks: int
    first: Number = 0

    @classmethod
    def of(cls, shape: tuple[int, ...], axis: int, dtype: DType, chunks: int = 1) -> "Blocks":
        """Blocks in at most `chunks` chunks: as many as some dimension has free.

        Halves of a block can go either way to the opposite device of an even ring: so an odd number
        is taken only where every even one is less than half of it.
        """
        numbers = range(1, chunks + 1)
        for count in sorted(numbers, key=lambda n: n / (1 + n % 2), reverse=True):
            for cut, size in enumerate(shape):
                if size % count == 0 and sliceable(size // count, cut, len(shape), dtype):
                    return cls(shape, axis, cut, count)
        return cls(shape, axis, 0, 1)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of one chunk of a block."""
        size = self.shape[self.cut] // self.chunks
        return (*self.shape[: self.cut], size, *self.shape[self.cut + 1 :])

    def at(self, ref: Ref, block: Number | None = None, chunk: Number | None = None) -> Ref:
        """The part of `ref` that is one block (all of it if None), or one chunk of that block."""
        starts: list[Any] = [0] * len(self.shape)
        sizes = list(self.shape)
        if block is not None:
            starts[self.axis] = block * self.shape[self.axis]
        if chunk is not None and self.chunks > 1:
            sizes[self.cut] //= self.chunks
            starts[self.cut] += (self.first + chunk) * sizes[self.cut]
        return ref.at[tuple(map(_span, starts, sizes))]

    @property
    def chunking(self) -> Chunking:
        """In what pieces a block goes."""
        return Chunking(self.chunks)

    def nbytes(self, dtype: DType) -> int:
        """Bytes of one block, without padding."""
        return math.prod(self.shape) * jnp.dtype(dtype).itemsize


def _span(start: int | jax.Array, size: int) -> Index:
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, size), size)
