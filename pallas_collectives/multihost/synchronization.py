"""Barriers: one that takes the devices along, and one that leaves them alone."""

import urllib.parse

import jax

from pallas_collectives.errors import CollectiveError
from pallas_collectives.multihost import votes, wire
from pallas_collectives.multihost.agreement import DEFAULT_TIMEOUT, agree, check_timeout


def sync_global_devices(name: str, *, timeout: float = DEFAULT_TIMEOUT) -> None:
    """Waits until every process has called this with the same name, and all devices have met in a
    collective: `jax.experimental.multihost_utils`' function of that name.

    TPUs and GPUs work in order, so they have then done what was given to them before; CPU devices
    may still be at it. A process that is alone does not wait.

    Args:
      name: the same on every process.
      timeout: seconds that each of the two waits may take.

    Raises:
      ProcessMismatchError: names differ; shows two that do, and the processes.
      ProcessTimeoutError: names the processes that did not come.

    Example:
      >>> pc.multihost.sync_global_devices("before the clock starts")
    """
    agreement = agree(f"sync_global_devices({name!r})", timeout=timeout)
    if jax.process_count() > 1:
        wire.wait_for_devices(agreement)


def barrier(name: str, *, timeout: float = DEFAULT_TIMEOUT) -> None:
    """Waits until every process is at the barrier of this name; touches no device.

    Safe beside other calls of this module, also on another thread: each name is a channel of its
    own, and may be used again and again.

    Args:
      name: not empty, the same on every process.
      timeout: seconds.

    Raises:
      ProcessTimeoutError: on every process, the late one included; names those that did not come.
      CollectiveError: an empty name, or a timeout that is not positive and finite.

    Example, process 0 writes what all read:
      >>> if jax.process_index() == 0:
      ...     pass  # write the file
      >>> pc.multihost.barrier("the file is there", timeout=60)
    """
    operation = f"barrier({name!r})"
    if not isinstance(name, str) or not name:
        rule = "its name must be text, and not empty"
        raise CollectiveError(operation, rule, "give it one, such as 'eval'")
    check_timeout(operation, timeout)
    if jax.process_count() > 1:
        channel = f"barrier/{urllib.parse.quote(name, safe='')}"
        with votes.round_of(channel, operation, timeout) as vote:
            vote.cast("")
