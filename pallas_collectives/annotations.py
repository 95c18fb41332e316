"""Types of what kernels are made of."""

from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.interpreters import ad
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike as DTypeLike

DType: TypeAlias = np.dtype

# A step, position, direction, distance or count; an array is known in the running kernel only.
Number: TypeAlias = int | np.int32 | jax.Array
Step: TypeAlias = Number

# Whether something holds; an array is known in the running kernel only.
Flag: TypeAlias = bool | np.bool_ | jax.Array

# A device by its coordinates: mesh axis -> position.
DeviceId: TypeAlias = dict[str | tuple[str, ...], int | jax.Array]

# A mesh of devices, or of none yet.
AnyMesh: TypeAlias = Mesh | AbstractMesh

# False to compile for a TPU, or how to simulate one.
Interpret: TypeAlias = bool | pltpu.InterpretParams


Part = TypeVar("Part", covariant=True)


# In the rules of primitives: a derivative, which is known to be 0 or is an array; the dimension
# that vmap maps, if any.
Tangent: TypeAlias = jax.Array | ad.Zero
Dim: TypeAlias = int | None


class Slices(Protocol[Part]):
    """`ref.at`, `semaphore.at`: of an index, the part of it."""

    def __getitem__(self, index: Any) -> Part: ...


class Ref(Protocol):
    """Memory that a kernel reads, writes or copies: HBM, VMEM or SMEM; or a part of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def at(self) -> "Slices[Ref]": ...
    def __getitem__(self, index: Any) -> jax.Array: ...
    def __setitem__(self, index: Any, value: Any) -> None: ...


class Semaphore(Protocol):
    """A semaphore, or an array of them."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def at(self) -> "Slices[Semaphore]": ...


class Copy(Protocol):
    """A copy by a DMA engine."""

    def start(self) -> None: ...
    def wait(self) -> None: ...


# What a ref is indexed with, for one dimension.
Index: TypeAlias = Number | slice | pl.Slice


def span(start: Number, size: Number) -> Index:
    """`pl.ds`, which takes numpy's numbers too, though its type says otherwise."""
    ds: Any = pl.ds
    return ds(start, size)


def buffer(shape: tuple[int, ...], dtype: DTypeLike) -> Ref:
    """What to allocate: memory that other devices write to; in the kernel a ref is in its place."""
    room: Any = jax.ShapeDtypeStruct(shape, dtype)
    return room


def dma_semaphores(*shape: int) -> Semaphore:
    """What to allocate: semaphores that count bytes; in the kernel a ref is in their place."""
    kind: Any = pltpu.SemaphoreType.DMA
    return kind(shape) if shape else kind


def regular_semaphores(*shape: int) -> Semaphore:
    """What to allocate: semaphores that count signals; in the kernel a ref is in their place."""
    kind: Any = pltpu.SemaphoreType.REGULAR
    return kind(shape) if shape else kind
