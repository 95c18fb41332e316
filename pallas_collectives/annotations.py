"""Types of what kernels are made of."""

from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike as DTypeLike

DType: TypeAlias = np.dtype

# A step, position, direction, distance or count; an array is known in the running kernel only.
Number: TypeAlias = int | np.int32 | jax.Array
Step: TypeAlias = Number

# A device by its coordinates: mesh axis -> position.
DeviceId: TypeAlias = dict[str | tuple[str, ...], int | jax.Array]

# A mesh of devices, or of none yet.
AnyMesh: TypeAlias = Mesh | AbstractMesh

# False to compile for a TPU, or how to simulate one.
Interpret: TypeAlias = bool | pltpu.InterpretParams


class Slices(Protocol):
    """`ref.at`, `semaphore.at`: of an index, the part of it."""

    def __getitem__(self, index: Any) -> Any: ...


class Ref(Protocol):
    """Memory that a kernel reads, writes or copies: HBM, VMEM or SMEM; or a part of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def at(self) -> Slices: ...
    def __getitem__(self, index: Any) -> jax.Array: ...
    def __setitem__(self, index: Any, value: Any) -> None: ...


class Semaphore(Protocol):
    """A semaphore, or an array of them."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def at(self) -> Slices: ...


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
