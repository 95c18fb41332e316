"""What processes do together: first they agree on it, then they wait for it, but not for ever."""

import collections
import dataclasses
import hashlib
import json
import math
import numbers
import operator
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from pallas_collectives.backends import choice
from pallas_collectives.errors import CollectiveError
from pallas_collectives.multihost import votes
from pallas_collectives.multihost.errors import ProcessTimeoutError

DEFAULT_TIMEOUT = 300.0

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What the processes agreed to do, and who added which note.

    Attributes:
      operation: for messages.
      notes: note -> the processes that gave it.
      key: the channel and number of the round of votes.
      timeout: seconds that each wait of the operation may take.
    """

    operation: str
    notes: votes.Groups
    key: str
    timeout: float

    def run(self, collective: Callable[[], T]) -> T:
        """`collective()`, which all processes enter, on a thread that this one can leave behind.

        When it does not end in `timeout` seconds, or JAX fails in it, the processes call the
        roll, and ProcessTimeoutError names those that do not answer: they died, are stuck, or (of
        a collective that ends on some processes before others) had finished it.
        """
        done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        backend = choice.named_backend.value  # JAX keeps it by thread

        def work() -> None:
            try:
                with choice.named_backend(backend):
                    done.put((collective(), None))
            except BaseException as error:
                done.put((None, error))

        # A daemon: a collective that hangs for ever must not keep the process from ending.
        threading.Thread(target=work, name=self.operation, daemon=True).start()
        try:
            result, error = done.get(timeout=self.timeout)
        except queue.Empty:
            error, what = None, f"kept the others waiting for {self.timeout:g} s"
        else:
            if error is None:
                return result
            if not isinstance(error, jax.errors.JaxRuntimeError):
                raise error
            what = f"left the others with a failed collective ({str(error).splitlines()[0]})"
        if absent := self._call_roll():
            fault = f"{what}, and did not answer the roll call"
            raise ProcessTimeoutError(self.operation, absent, fault) from error
        if error is not None:
            raise error
        raise ProcessTimeoutError(
            self.operation,
            range(jax.process_count()),
            f"are all waiting: the device collective did not end in {self.timeout:g} s",
        )

    def _call_roll(self) -> list[int]:
        """The processes that do not call this roll about now."""
        client = votes.client_or_raise()
        names = [f"{votes.ROOT}/roll/{self.key}/{p}" for p in range(jax.process_count())]
        client.key_value_set(names[jax.process_index()], "", allow_overwrite=True)
        deadline = time.monotonic() + min(self.timeout, votes.GRACE)
        return [p for p, name in enumerate(names) if votes.read(client, name, deadline) is None]


def agree(
    operation: str, terms: Sequence[str] = (), *, note: str = "", timeout: float
) -> Agreement:
    """All processes are here, for the same `operation` on the same `terms`.

    note: a text that may differ between processes.
    Raises ProcessTimeoutError, or ProcessMismatchError with the first term that differs.
    """
    check_timeout(operation, timeout)
    if jax.process_count() == 1:
        return Agreement(operation, {note: [0]}, "", timeout)
    lines = [operation, *terms]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    with votes.round_of("main", operation, timeout) as vote:
        ballots = vote.cast(json.dumps([digest, note]))
        digests: votes.Groups = collections.defaultdict(list)
        notes: votes.Groups = collections.defaultdict(list)
        for ballot, processes in ballots.items():
            their_digest, their_note = json.loads(ballot)
            digests[their_digest] += processes
            notes[their_note] += processes
        if len(digests) > 1:
            raise vote.mismatch([sorted(group) for group in digests.values()], lines)
        return Agreement(operation, {n: sorted(p) for n, p in notes.items()}, vote.key, timeout)


def check_timeout(operation: str, timeout: float) -> None:
    """CollectiveError unless `timeout` is a number of seconds that can run out."""
    if not isinstance(timeout, numbers.Real) or not 0 < timeout < math.inf:
        raise CollectiveError(
            f"{operation} with timeout={timeout!r}",
            "a timeout is a positive, finite number of seconds",
            f"leave it out for the default of {DEFAULT_TIMEOUT:g}",
        )


def check_whole(operation: str, name: str, value: object) -> None:
    """CollectiveError unless an argument is a whole number."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        given, rule = f"{operation} with {name}={value!r}", f"{name} must be a whole number"
        raise CollectiveError(given, rule, "pass an int") from None
