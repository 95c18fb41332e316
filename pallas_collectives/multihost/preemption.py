"""Agreement on the step at which to stop, once some process gets notice of preemption.

JAX's own `reached_preemption_sync_point` waits inside the runtime and holds Python's lock: where a
process has died, the others freeze, whatever timeout a caller wants, until JAX kills them for the
missed heartbeats. So only the notice is JAX's here; the agreement on a step is this module's.
"""

import atexit
import threading
from typing import Any

import jax

from pallas_collectives import _compat
from pallas_collectives.errors import CollectiveError
from pallas_collectives.multihost import votes
from pallas_collectives.multihost.agreement import DEFAULT_TIMEOUT, check_timeout, check_whole

_POLL = 1.0  # seconds between looks for the notice; JAX looks for the signal as often


def reached_preemption_sync_point(step_id: int, *, timeout: float = DEFAULT_TIMEOUT) -> bool:
    """Whether this step is the one at which all processes should save and stop:
    `jax.experimental.multihost_utils`' function of that name.

    Call it at every step, on every process, from the same first step on. Some seconds after any
    process has been told that it will be preempted (by SIGTERM, as a rule), the processes settle
    on the step after the latest that any has begun. This is True there, once, and False otherwise.

    Without a notice nothing is waited for. Without `jax.distributed` the answer is False.

    Args:
      step_id: the number of the step about to begin, counting up.
      timeout: seconds that the processes may take to settle.

    Raises:
      ProcessTimeoutError: names the processes that left the others waiting.
      CollectiveError: JAX runs without its preemption service; a timeout that is not positive and
        finite.

    Example, in a training loop:
      >>> for step in range(3):
      ...     if pc.multihost.reached_preemption_sync_point(step):
      ...         break  # save and stop
      >>> step
      2
    """
    operation = f"reached_preemption_sync_point({step_id})"
    check_timeout(operation, timeout)
    check_whole("reached_preemption_sync_point", "step_id", step_id)
    client = votes.coordination_client()
    if client is None:
        return False
    config: Any = jax.config  # whose stubs do not list every option
    if not config.jax_enable_preemption_service:
        raise CollectiveError(
            operation,
            "JAX's preemption service, which takes the notice, is off",
            "set jax_enable_preemption_service before jax.distributed.initialize()",
        )
    return _watch_with(client).reached(step_id, timeout)


class _Watch:
    """Looks for the notice on a thread of its own, and settles on the step there.

    Not on the caller's: it may be blocked in the collective of a step that another process is
    still to begin, while that one waits for its vote.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._changed = threading.Condition()
        self._begun = -1  # the latest step
        self._timeout = DEFAULT_TIMEOUT
        self._settling = False  # from here on no further step begins until the outcome is there
        self._outcome: int | BaseException | None = None
        self._reached = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="preemption watch", daemon=True)
        self._thread.start()

    def reached(self, step_id: int, timeout: float) -> bool:
        """The answer at the beginning of a step."""
        with self._changed:
            if not self._settling:
                self._begun, self._timeout = step_id, timeout
                return False
            self._changed.wait_for(lambda: self._outcome is not None)  # its vote has the timeout
            if isinstance(self._outcome, BaseException):
                raise self._outcome
            assert self._outcome is not None
            if self._reached or step_id < self._outcome:
                return False
            self._reached = True
            return True

    def stop(self) -> None:
        """Ends the looking."""
        self._stop.set()
        self._thread.join(timeout=2 * _POLL)

    def _watch(self) -> None:
        outcome: int | BaseException
        try:
            while not _compat.preemption_noticed(self.client):
                if self._stop.wait(_POLL):
                    return
            with self._changed:
                self._settling = True
            outcome = self._settle()
        except BaseException as error:  # for the caller, who would wait for ever otherwise
            outcome = error
        with self._changed:
            self._settling, self._outcome = True, outcome
            self._changed.notify_all()

    def _settle(self) -> int:
        operation = f"reached_preemption_sync_point({self._begun})"
        with votes.round_of("preemption", operation, self._timeout) as vote:
            return max(int(step) for step in vote.cast(str(self._begun))) + 1


_watch: _Watch | None = None
_watch_lock = threading.Lock()


def _watch_with(client: Any) -> _Watch:
    global _watch
    with _watch_lock:
        if _watch is None or _watch.client is not client:  # or jax.distributed started anew
            _stop_watch()
            _watch = _Watch(client)
        return _watch


@atexit.register  # a thread inside JAX while Python ends would bring the process down with it
def _stop_watch() -> None:
    if _watch is not None:
        _watch.stop()
