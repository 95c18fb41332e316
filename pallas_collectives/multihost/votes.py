"""How processes agree: a vote over the key-value store of JAX's coordination service.

In a round of votes, every process leaves a text under `…/value/<process>`; process 0 collects them
and leaves the outcome under `…/outcome`, which all read. Who waits too long leaves an outcome that
says who is missing. The store keeps the first outcome only, so all processes leave a round with the
same one, a late process included: it finds out at once that it is late, and in the next round all
are in step again.

Rounds are counted per channel, on each process for itself: no name is needed to meet, and processes
that call different functions meet too, and see that they differ.
"""

import collections
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from pallas_collectives._compat import coordination_client as coordination_client
from pallas_collectives.errors import CollectiveError
from pallas_collectives.multihost.errors import (
    ProcessMismatchError,
    ProcessTimeoutError,
    name_processes,
)

ROOT = "pallas_collectives/multihost"
# Seconds for what must come soon once the others have come or have failed: clocks start apart.
GRACE = 10.0

Groups = dict[str, list[int]]  # text -> the processes that said so, ascending


class Vote:
    """One round on a channel, seen from this process."""

    def __init__(self, client: Any, key: str, operation: str, timeout: float) -> None:
        self._client = client
        self.key = key
        self._place = f"{ROOT}/{key}"
        self._operation = operation
        self._timeout = timeout
        self._me = jax.process_index()
        self._processes = range(jax.process_count())

    def cast(self, value: str) -> Groups:
        """Gives this process's value; returns every distinct value, with who gave it."""
        deadline = time.monotonic() + self._timeout
        self._client.key_value_set(f"{self._place}/value/{self._me}", value)
        outcome = self._count(deadline) if self._me == 0 else self._await_outcome(deadline)
        if missing := outcome.get("missing"):
            raise ProcessTimeoutError(
                self._operation, missing, f"did not come in the {outcome['timeout']:g} s given"
            )
        return outcome["groups"]

    def mismatch(self, groups: list[list[int]], lines: list[str]) -> ProcessMismatchError:
        """The error that shows where the terms of two groups part.

        Only a digest of the terms was voted on. The first process of the largest group and the
        first of those that differ now leave their terms in full, for all to read.
        """
        most, *others = sorted(groups, key=lambda group: (-len(group), group[0]))
        different = sorted(process for group in others for process in group)
        deadline = time.monotonic() + self._timeout
        pair = (most[0], different[0])
        if self._me in pair:
            self._client.key_value_set(f"{self._place}/terms/{self._me}", json.dumps(lines))
        terms = []
        for process in pair:
            text = read(self._client, f"{self._place}/terms/{process}", deadline)
            if text is None:
                raise ProcessTimeoutError(
                    self._operation, [process], "came, and then stopped answering"
                )
            terms.append(json.loads(text))
        expected, found = next(
            (a, b) for a, b in itertools.zip_longest(*terms, fillvalue="nothing more") if a != b
        )
        return ProcessMismatchError(
            terms[0][0],
            different,
            f"disagreed with {name_processes(most)}.\n"
            f"  process {pair[1]}: {found}\n  process {pair[0]}: {expected}\n"
            "Every process must call the same functions in the same order, with the same names and "
            "with trees of the same structure, shapes and dtypes.",
        )

    def leave(self) -> None:
        """The last process to leave a round clears it away."""
        if self._client.key_value_increment(f"{self._place}/left", 1) == len(self._processes):
            self._client.key_value_delete(self._place)

    def _count(self, deadline: float) -> dict[str, Any]:
        groups: Groups = collections.defaultdict(list)
        missing = []
        for process in self._processes:
            value = read(self._client, f"{self._place}/value/{process}", deadline)
            missing.append(process) if value is None else groups[value].append(process)
        return self._settle({"missing": missing} if missing else {"groups": groups})

    def _await_outcome(self, deadline: float) -> dict[str, Any]:
        if text := read(self._client, f"{self._place}/outcome", deadline):
            return json.loads(text)
        came = {key for key, _ in self._client.key_value_dir_get(f"{self._place}/value")}
        missing = [p for p in self._processes if f"{self._place}/value/{p}" not in came]
        if not missing:  # The last one came just now; process 0 is about to say so, if it lives.
            if text := read(self._client, f"{self._place}/outcome", time.monotonic() + GRACE):
                return json.loads(text)
            missing = [0]
        return self._settle({"missing": missing})

    def _settle(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Leaves `outcome`, unless another process was first; returns the one that stands."""
        key = f"{self._place}/outcome"
        # Who finds an outcome there before it leaves its own takes that one.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(key, json.dumps(outcome | {"timeout": self._timeout}))
        return json.loads(self._client.blocking_key_value_get(key, int(GRACE * 1000)))


_rounds: collections.Counter[str] = collections.Counter()  # channel -> rounds begun
_rounds_client: Any = None  # the client that they were counted with
_rounds_lock = threading.Lock()


@contextlib.contextmanager
def round_of(channel: str, operation: str, timeout: float) -> Iterator[Vote]:
    """The next round on `channel`. The last process to leave it clears its keys away."""
    client = client_or_raise()
    global _rounds_client
    with _rounds_lock:
        if client is not _rounds_client:  # jax.distributed started anew, and so does the count
            _rounds.clear()
            _rounds_client = client
        number = _rounds[channel]
        _rounds[channel] += 1
    vote = Vote(client, f"{channel}/{number}", operation, timeout)
    try:
        yield vote
    finally:
        vote.leave()


def client_or_raise() -> Any:
    client = coordination_client()
    if client is None:
        raise CollectiveError(
            f"{jax.process_count()} processes without a coordination service",
            "processes agree through the service that jax.distributed starts",
            "call jax.distributed.initialize() in every process, before anything else",
        )
    return client


def read(client: Any, key: str, deadline: float) -> str | None:
    """The text under `key`, or None if nothing is there by the deadline."""
    milliseconds = int((deadline - time.monotonic()) * 1000)
    try:
        if milliseconds > 0:
            return client.blocking_key_value_get(key, milliseconds)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("DEADLINE_EXCEEDED"):
            raise
    # The last look takes no deadline: an answer may be slower than the time that was left, and who
    # is missing must not make those seem so that are asked for after it.
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("NOT_FOUND"):
            raise
        return None
