"""Groups of devices that communicate: created together, used rank by rank, closed or aborted.

    with nccl.create(jax.devices(), name="demo", timeout=60, watchdog=20) as group:
        for communicator in group.communicators.values():   # this process's ranks
            communicator.all_gather(...)

One process may own one GPU or several, and a group may span hosts. Nothing is destroyed at
interpreter exit: by then the peers may be gone, and destroying waits for them.
"""

import functools
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax

from pallas_collectives.nccl import connection, rendezvous
from pallas_collectives.nccl.communicator import Communicator
from pallas_collectives.nccl.errors import CommunicatorError, NcclError, PeerError, RendezvousError
from pallas_collectives.nccl.runtime import Runtime
from pallas_collectives.nccl.watchdog import Watchdog

_log = logging.getLogger(__name__)
_ABORT_SECONDS = 10.0


class Group:
    """An ordered group of devices with a communicator for each one of this process's.

    Attributes:
      name, devices: those given to `create`; a device's rank is its place.
      key, timeout: where its processes leave word for each other, unlike any other group's, and the
        seconds for which each waits for the others.
      communicators: rank -> communicator, for the ranks of this process.
      reason: why it can no longer be used, or None.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        devices: tuple[jax.Device, ...],
        key: str,
        timeout: float,
    ):
        self.runtime = runtime
        self.name = name
        self.devices = devices
        self.key = key
        self.timeout = timeout
        self.communicators: dict[int, Communicator] = {}
        self._watchdog: Watchdog | None = None
        self.reason: CommunicatorError | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return title(self.name, self.devices)

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None and self.usable:
            self.close()
            return
        try:
            if error is None:
                self.check()
        finally:
            self.abort()  # closing waits for work that may never end

    def rank(self, device: jax.Device) -> int:
        """The rank of `device`; ValueError if it is not of this group."""
        return self.devices.index(device)

    @property
    def usable(self) -> bool:
        """Whether it is neither closed nor aborted, and no call has left NCCL half done."""
        return self.reason is None and not any(c.unusable for c in self.communicators.values())

    def check(self) -> None:
        """Raises what made this group unusable, if anything did: a PeerError, say.

        Work that the watchdog aborted ends with undefined values in its results: call this after
        waiting for results and before trusting them. Leaving `with` calls it.
        """
        if self.reason is not None:
            raise self.reason
        for communicator in self.communicators.values():
            communicator.check()

    def close(self, timeout: float = 60.0) -> None:
        """Waits for all work and frees the communicators; later calls on them raise.

        timeout: seconds. Raises CommunicatorError if a CUDA graph that replays this group's calls
        keeps them alive: drop the jitted functions first (`jax.clear_caches()`).
        """
        if not self._disable(CommunicatorError(f"{self} is closed")):
            return
        try:
            self._end(Communicator.destroy, timeout)
        except TimeoutError:
            raise CommunicatorError(
                f"{self} could not be closed in {timeout:g} s: a peer has not closed it, or a "
                "CUDA graph still refers to it: drop the jitted functions (jax.clear_caches()), "
                "or leave it to the end of the process"
            ) from None

    def abort(self, reason: CommunicatorError | None = None) -> None:
        """Ends all work at once, whoever it waits for; later calls raise `reason`."""
        if not self._disable(reason or CommunicatorError(f"{self} was aborted")):
            return
        try:
            self._end(Communicator.abort, _ABORT_SECONDS)
        except (TimeoutError, NcclError) as error:
            _log.warning("%s: aborting did not end well: %r", self, error)

    def join(self, rank: int, unique_id: bytes, watched: bool, uses: Collection[str]) -> None:
        """Makes one of this process's communicators, connected to its peers, from a new thread."""
        runtime, size = self.runtime, len(self.devices)
        ordinal = runtime.ordinal(self.devices[rank])
        where = f"rank {rank} of {size} of {self}"
        with runtime.driver.outside_captures():
            handle = runtime.init_rank(ordinal, size, rank, unique_id, where)
            communicator = Communicator(
                runtime.library, runtime.driver, handle, rank, size, ordinal, str(self)
            )
            with self._lock:  # `abort` sees it here, or we see the reason; never both
                reason = self.reason
                if reason is None:
                    self.communicators[rank] = communicator
            if reason is not None:  # the others gave up meanwhile
                communicator.abort()
                raise reason
            connection.connect(communicator, uses)
            if watched:
                communicator.board = runtime.board(ordinal)

    def watch(self, timeout: float, key: str) -> None:
        """Starts the watchdog; `create` calls it before anyone can make a call."""
        self._watchdog = Watchdog(
            boards={r: c.board for r, c in self.communicators.items() if c.board is not None},
            owners=tuple(d.process_index for d in self.devices),
            process=self.runtime.process,
            title=str(self),
            store=self.runtime.store,
            key=key,
            timeout=timeout,
            fail=self.abort,
            async_error=self._async_error,
        )
        self._watchdog.start()

    def _end(self, how: Callable[[Communicator], None], timeout: float) -> None:
        """Ends every communicator; a stream that is captured meanwhile is left alone."""

        def end(communicator: Communicator) -> None:
            with self.runtime.driver.outside_captures():
                how(communicator)

        _at_once([functools.partial(end, c) for c in list(self.communicators.values())], timeout)

    def _async_error(self) -> NcclError | None:
        for communicator in self.communicators.values():
            if (error := communicator.async_error()) is not None:
                return error
        return None

    def _disable(self, reason: CommunicatorError) -> bool:
        """Marks everything unusable; False if it already was."""
        with self._lock:
            if self.reason is not None:
                return False
            self.reason = reason
            joined = list(self.communicators.values())
        for communicator in joined:
            communicator.disable(reason)
        if self._watchdog is not None:
            self._watchdog.stop()
        return True


def create(
    devices: Sequence[jax.Device],
    *,
    name: str = "default",
    timeout: float = 300.0,
    watchdog: float | None = None,
    uses: Collection[str] = connection.USES,
    runtime: Runtime | None = None,
) -> Group:
    """Creates a group over `devices`, in every process that owns one of them.

    devices: in order of rank. name: the same in all those processes; groups of other names over the
    same devices are independent. timeout: seconds for everyone to come. watchdog: seconds that a
    call may take before the group fails, or None for no watchdog. uses: what the group comes
    connected for, of "collectives" and "messages" (all-to-alls too); else first calls connect it.
    The group comes connected (`connection`), so its first call may be captured in a CUDA graph. It
    may be created while a stream is captured, on this thread or another: new threads do the work.
    Raises ValueError for devices that cannot form a group here, RendezvousError, which names who
    is missing, after `timeout`, and CallError where NCCL fails.

    Example:
      >>> with pc.nccl.create(jax.devices(), name="demo", timeout=60) as group:
      ...     sorted(group.communicators) == list(range(jax.device_count()))
      True
    """
    devices = tuple(devices)
    runtime = runtime or Runtime.of_this_process()
    local = {r: d for r, d in enumerate(devices) if d.process_index == runtime.process}
    if len(set(devices)) != len(devices) or not local:
        raise ValueError(
            f"cannot create {title(name, devices)} in process {runtime.process}: it must have "
            "distinct devices, and one of this process's; call create only where one is"
        )
    if watchdog is not None and watchdog <= 0:
        raise ValueError(f"watchdog={watchdog} must be a positive number of seconds, or None")
    if unknown := set(uses) - set(connection.USES):
        raise ValueError(f"unknown uses {sorted(unknown)}: they are {', '.join(connection.USES)}")
    deadline = time.monotonic() + timeout
    ids = ",".join(str(d.id) for d in devices)
    key = f"pallas_collectives/nccl/{name}/{hashlib.sha256(ids.encode()).hexdigest()[:16]}"
    processes = tuple(dict.fromkeys(d.process_index for d in devices))
    meeting = rendezvous.meet(
        runtime.store,
        key,
        runtime.process,
        processes,
        timeout,
        runtime.library.unique_id,
        f"devices {ids} with NCCL {runtime.library.version}, watchdog {watchdog}",
    )
    key = f"{key}/{meeting.nonce}"
    group = Group(runtime, name, devices, key, timeout)
    join = [
        functools.partial(group.join, rank, meeting.unique_id, watchdog is not None, uses)
        for rank in local
    ]
    try:
        _at_once(join, deadline - time.monotonic())  # a thread each: it waits for the other ranks
        group.communicators = {rank: group.communicators[rank] for rank in local}
        if watchdog is not None:
            group.watch(watchdog, key)
        # Until everyone is here no call may be made: one that fails now must not hang the others.
        runtime.store.barrier(key, max(deadline - time.monotonic(), 1.0), processes)
    except TimeoutError:
        group.abort()
        raise RendezvousError(
            f"{group}: every process came, but NCCL did not connect them within {timeout:g} s "
            "(NCCL_DEBUG=INFO tells what it waits for)"
        ) from None
    except BaseException:
        group.abort()
        raise
    return group


_groups: dict[tuple[str, tuple[jax.Device, ...]], Group] = {}
_options: dict[str, Any] = {}
_creating: dict[Hashable, threading.Lock] = {}
_storing = threading.Lock()  # never for long, as those of `_creating` are


def configure(**options: Any) -> None:
    """Sets `create`'s options for the groups that transfers and collectives in jit create.

    Call it in every process, before their first use.

    Example:
      >>> pc.nccl.configure(timeout=60, watchdog=30)
    """
    if unknown := set(options) - {"timeout", "watchdog", "runtime"}:
        raise TypeError(f"unknown options {sorted(unknown)}: they are timeout, watchdog, runtime")
    _options.update(options)


def get(devices: Sequence[jax.Device], *, name: str, **options: Any) -> Group:
    """The group of this name over `devices`, created the first time and kept for the next.

    options: `create`'s, where they differ from `configure`'s. A group that has been closed or
    aborted is created anew.

    Example:
      >>> group = pc.nccl.get(jax.devices(), name="mine")
      >>> pc.nccl.get(jax.devices(), name="mine") is group
      True
    """
    key = (name, tuple(devices))
    # A lock for each: another process may make two groups in another order, or only one of them.
    with _creating.setdefault(key, threading.Lock()):
        group = _groups.get(key)
        if group is not None and not group.usable:
            group.abort()
            group = None
        if group is None:
            group = create(devices, name=name, **(_options | options))
            with _storing:
                _groups[key] = group
    return group


def check() -> None:
    """Raises the PeerError of a group that `get` has made, once, if a watchdog has failed one.

    Results that were under way are undefined then, also those of programs that ended without an
    error: call this after waiting for results and before trusting them. The next use creates the
    group anew; for collectives inside jit that is the next lowering (`jax.clear_caches()`).

    Example, after a step's results are there:
      >>> pc.nccl.check()
    """
    for key, group in list(_groups.items()):
        if not group.usable:
            group.abort()  # of a call that NCCL left half done; else it is over already
            with _storing:
                if _groups.get(key) is group:  # not one that `get` has made meanwhile
                    del _groups[key]
        if isinstance(group.reason, PeerError):
            raise group.reason


def title(name: str, devices: Sequence[jax.Device]) -> str:
    """How messages name a group."""
    return f"group {name!r} of devices {[d.id for d in devices]}"


def _at_once(functions: Sequence[Callable[[], None]], timeout: float) -> None:
    """Calls each from a thread of its own; the first error, or TimeoutError, leaves the others."""
    ended: queue.Queue[BaseException | None] = queue.Queue()

    def run(function: Callable[[], None]) -> None:
        try:
            function()
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    for function in functions:
        threading.Thread(target=run, args=(function,), daemon=True).start()
    deadline = time.monotonic() + timeout
    for _ in functions:
        try:
            error = ended.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            raise TimeoutError from None
        if error is not None:
            raise error
