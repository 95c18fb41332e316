"""Where processes leave word for each other: JAX's distributed key-value store.

Communicators meet through it and watchdogs report through it. A process that is alone uses a
dictionary with the same methods.
"""

import threading
import time
from typing import Any, Protocol

import jax

from pallas_collectives._compat import coordination_client
from pallas_collectives.nccl.errors import RendezvousError


class Store(Protocol):
    """Text under keys, seen by every process."""

    def set(self, key: str, value: str) -> None:
        """Puts `value` under `key`, in place of any before it."""

    def get(self, key: str, timeout: float) -> str:
        """The value under `key`, waiting up to `timeout` seconds; RendezvousError if none comes."""

    def delete(self, key: str) -> None:
        """Removes `key`, if it is there."""

    def entries(self, prefix: str) -> dict[str, str]:
        """Every entry now under a key that begins with `prefix`, which ends in "/"."""

    def barrier(self, key: str, timeout: float, processes: tuple[int, ...]) -> None:
        """Waits until all `processes` are here; RendezvousError after `timeout` seconds."""


class DistributedStore:
    """The store of `jax.distributed`."""

    def __init__(self, client: Any):
        self._client = client

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str, timeout: float) -> str:
        try:
            return self._client.blocking_key_value_get(key, int(timeout * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise RendezvousError(f"nothing came under {key!r} in {timeout:g} s") from error

    def delete(self, key: str) -> None:
        self._client.key_value_delete(key)

    def entries(self, prefix: str) -> dict[str, str]:
        return dict(self._client.key_value_dir_get(prefix))

    def barrier(self, key: str, timeout: float, processes: tuple[int, ...]) -> None:
        try:
            self._client.wait_at_barrier(key, int(timeout * 1000), list(processes))
        except jax.errors.JaxRuntimeError as error:
            raise RendezvousError(
                f"processes {processes} did not all come to {key!r} in {timeout:g} s"
            ) from error


class LocalStore:
    """The store of a process that is alone; its threads stand where processes would."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        with self._changed:
            while key not in self._entries:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise RendezvousError(f"nothing came under {key!r} in {timeout:g} s")
            return self._entries[key]

    def delete(self, key: str) -> None:
        with self._changed:
            self._entries.pop(key, None)

    def entries(self, prefix: str) -> dict[str, str]:
        with self._changed:
            return {k: v for k, v in self._entries.items() if k.startswith(prefix)}

    def barrier(self, key: str, timeout: float, processes: tuple[int, ...]) -> None:
        deadline = time.monotonic() + timeout
        with self._changed:
            arrived = int(self._entries.get(key, "0")) + 1
            self._entries[key] = str(arrived)
            self._changed.notify_all()
            while int(self._entries[key]) < len(processes):
                if not self._changed.wait(deadline - time.monotonic()):
                    raise RendezvousError(
                        f"processes {processes} did not all come to {key!r} in {timeout:g} s"
                    )


_LOCAL = LocalStore()


def default() -> Store:
    """JAX's store where `jax.distributed` runs, else this process's own."""
    client = coordination_client()
    return _LOCAL if client is None else DistributedStore(client)
