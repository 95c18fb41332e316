"""What groups and transfers stand on in this process: NCCL, CUDA, the other processes."""

import ctypes
import dataclasses
from typing import Any

import jax

from pallas_collectives.nccl import cuda, store
from pallas_collectives.nccl.library import Library, load
from pallas_collectives.nccl.progress import Board, DeviceBoard


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The libraries, and the few things done with two of them at once.

    Attributes:
      library, driver: NCCL and CUDA.
      store: the way to the other processes.
      process: this one's index.
    """

    library: Library
    driver: cuda.Driver
    store: store.Store
    process: int

    @classmethod
    def of_this_process(cls) -> "Runtime":
        """Raises LibraryError or NcclError where there is no NCCL or no driver."""
        return cls(load(), cuda.driver(), store.default(), jax.process_index())

    def ordinal(self, device: jax.Device) -> int:
        """The CUDA ordinal of one of this process's devices."""
        return device.local_hardware_id

    def init_rank(self, ordinal: int, size: int, rank: int, unique_id: bytes, where: str) -> int:
        """The handle of a new communicator on GPU `ordinal`; waits for all ranks.

        where: the communicator, for errors.
        """
        address = ctypes.create_string_buffer(unique_id, len(unique_id))
        with self.driver.device(ordinal):
            return self.library.call(
                "ncclCommInitRankScalable",
                where,
                self.library.bindings.comm_init_rank_scalable,
                size, rank, 1, ctypes.addressof(address), 0,
            )  # fmt: skip

    def board(self, ordinal: int) -> Board:
        """A board on which GPU `ordinal` can write."""
        return DeviceBoard(self.driver, ordinal)

    def lend(self, array: Any, stream: int) -> Any:
        """Makes `stream` wait, on the device, until `array` is there.

        XLA neither frees nor reuses its memory while the result lives.
        """
        return array.__dlpack__(stream=stream)

    def adopt(self, array: jax.Array, event: cuda.Event) -> jax.Array:
        """`array`, on whose memory another stream has worked until `event`, for XLA to use.

        What uses it waits for the event, on the device.
        """
        return jax.dlpack.from_dlpack(_Written(self.driver, array, event))


class _Written:
    """A producer, in DLPack's protocol, of an array that is complete once an event has passed."""

    def __init__(self, driver: cuda.Driver, array: Any, event: cuda.Event):
        self._driver = driver
        self._array = array
        self._event = event

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **kwargs: Any) -> Any:
        if stream is not None:  # the consumer's
            self._driver.wait_event(stream, self._event)
        return self._array.__dlpack__(**kwargs)
