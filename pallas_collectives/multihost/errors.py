"""How processes fail each other: one does not come, or disagrees, or dies."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.experimental import multihost_utils


def name_processes(processes: Iterable[int]) -> str:
    """`process 3`, or `processes 0, 1 and 3`."""
    *most, last = [str(process) for process in sorted(processes)]
    return f"processes {', '.join(most)} and {last}" if most else f"process {last}"


class ProcessError(Exception):
    """What some processes did to the others.

    Attributes:
      operation: what all were doing, e.g. `sync_global_devices('eval')`.
      processes: the ones at fault.
      fault: what they did, as the message says it.
    """

    def __init__(self, operation: str, processes: Iterable[int], fault: str) -> None:
        self.operation = operation
        self.processes = tuple(sorted(processes))
        self.fault = fault
        super().__init__(f"{operation}: {name_processes(self.processes)} {fault}")

    def __reduce__(self) -> tuple[Any, ...]:  # by default an exception is rebuilt from its message
        return type(self), (self.operation, self.processes, self.fault)


class ProcessTimeoutError(ProcessError, TimeoutError):
    """A wait ran out; `processes` are those that did not come."""


class ProcessMismatchError(ProcessError, AssertionError):
    """Processes do not mean, or do not hold, the same; `processes` differ from most others.

    An AssertionError, as `jax.experimental.multihost_utils` raises.
    """


class ProcessFailureError(ProcessError, multihost_utils.ProcessFailureError):
    """Processes died, or were started anew, where `live_devices` had said that they lived.

    Attributes:
      failed_devices: theirs; none once it was pickled, which devices cannot be.
    """

    def __init__(
        self,
        operation: str,
        processes: Iterable[int],
        fault: str,
        failed_devices: Iterable[jax.Device] = (),
    ) -> None:
        super().__init__(operation, processes, fault)
        self.failed_devices = set(failed_devices)
