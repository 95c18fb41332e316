"""Which devices are there still, while processes may die."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from pallas_collectives.errors import CollectiveError
from pallas_collectives.multihost import votes
from pallas_collectives.multihost.agreement import DEFAULT_TIMEOUT, check_timeout
from pallas_collectives.multihost.errors import ProcessFailureError, ProcessTimeoutError

_OPERATION = "live_devices"
_WAITING = "waiting"

Lives = dict[int, int]  # process -> the number of this life of it, new after a restart


@contextlib.contextmanager
def live_devices(
    devices: Sequence[jax.Device], *, timeout: float = DEFAULT_TIMEOUT
) -> Iterator[list[jax.Device]]:
    """Yields those of `devices` whose processes are alive, the same on all of these:
    `jax.experimental.multihost_utils`' context manager of that name.

        with live_devices(jax.devices()) as devices:
            ...  # collectives on these devices

    Every process that owns one of `devices` enters and leaves with the others that live; the dead
    are not waited for. If one died in the block, or was started anew, all others get the error as
    they leave: no live process takes for done what another does not. The next block with the same
    `devices` goes without the dead. What the block itself raises is raised only where it was.

    JAX ends the processes that are left when one dies, unless JAX_ENABLE_RECOVERABILITY=1 is set
    before `jax.distributed.initialize`. It takes a process for dead after a silence of that
    function's `heartbeat_timeout_seconds`, 100 by default. The timeout here must be longer.

    Args:
      devices: at least one of this process; the same on every process.
      timeout: seconds to wait for the others, on entry and again on leaving.

    Yields:
      The devices, by their ids. A program of one process gets all.

    Raises:
      ProcessFailureError: names the processes that died in the block, and has their
        `failed_devices`; JAX's error of that name, too.
      ProcessTimeoutError: names those that did not come, and have not been found dead.
      CollectiveError: no devices, no device of this process, or a timeout that is not positive and
        finite.

    Example, on one process:
      >>> with pc.multihost.live_devices(jax.devices()) as devices:
      ...     devices == jax.devices()
      True
    """
    check_timeout(_OPERATION, timeout)
    try:
        ordered = sorted(devices, key=lambda device: device.id)
    except (TypeError, AttributeError):
        rule = "it must be a sequence of devices"
        raise CollectiveError(f"{_OPERATION}({devices!r})", rule, "pass jax.devices()") from None
    mine = jax.process_index()
    if all(device.process_index != mine for device in ordered):
        raise CollectiveError(
            f"{_OPERATION} of {len(ordered)} devices, but not one of process {mine}",
            "a process must own at least one of the devices that it asks about",
            "pass jax.devices(), or leave the call to the processes that own the devices",
        )
    if jax.process_count() == 1:
        yield ordered
        return
    client = votes.client_or_raise()
    processes = sorted({device.process_index for device in ordered})
    known = _known(client)
    asked = tuple(device.id for device in ordered)
    if asked not in known:
        known[asked] = _alive(client, processes, timeout)
    before = known[asked]
    raised = None
    try:
        yield [device for device in ordered if device.process_index in before]
    except Exception as error:  # held back: the others wait on leaving
        raised = error
    after = known[asked] = _alive(client, processes, timeout)
    dead = {process for process, life in before.items() if after.get(process) != life}
    if dead:
        failed = {device for device in ordered if device.process_index in dead}
        fault = f"died or started anew, with {len(failed)} devices"
        raise ProcessFailureError(_OPERATION, dead, fault, failed) from raised
    if raised:
        raise raised


_last: tuple[Any, dict[tuple[int, ...], Lives]] = (None, {})


def _known(client: Any) -> dict[tuple[int, ...], Lives]:
    """Who lived when the last block with some devices was left: the next one begins with these."""
    global _last
    if _last[0] is not client:  # jax.distributed started anew
        _last = client, {}
    return _last[1]


def _alive(client: Any, processes: list[int], timeout: float) -> Lives:
    """Those of `processes` that live, once all that do have asked.

    JAX's client waits without a limit: on a thread that this one can leave behind.
    """
    place = f"{votes.ROOT}/live/{'-'.join(map(str, processes))}"
    mine = f"{place}/{jax.process_index()}"
    client.key_value_set(mine, _WAITING, allow_overwrite=True)
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            done.put((client.get_live_nodes(processes), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=ask, name=_OPERATION, daemon=True).start()
    try:
        lives, error = done.get(timeout=timeout)
    except queue.Empty:
        now = time.monotonic()
        keys = {process: f"{place}/{process}" for process in processes}
        # Mine stays, for others who look now.
        absent = [p for p, key in keys.items() if votes.read(client, key, now) != _WAITING]
        fault = f"did not come in the {timeout:g} s given; JAX has not found it dead"
        if not absent:
            absent, fault = processes, f"are all waiting: JAX did not answer in {timeout:g} s"
        raise ProcessTimeoutError(_OPERATION, absent, fault) from None
    client.key_value_delete(mine)
    if error is not None:
        raise error
    return lives
