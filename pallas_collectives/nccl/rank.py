"""One rank's work beside NCCL's: by CUDA's driver, cuBLASLt, and functions of the tape's own.

The same method puts work on a stream and has it noted on a tape: its calls go through `Rank.call`
and `Rank.driver`, which a recorded twin hands to the recorder.
"""

import contextlib
import copy
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

from pallas_collectives.nccl import cublas, cuda, tape
from pallas_collectives.nccl.communicator import Communicator
from pallas_collectives.nccl.errors import CallError, CommunicatorError
from pallas_collectives.nccl.mailboxes import Mailbox
from pallas_collectives.nccl.meeting import Meeting, Words
from pallas_collectives.nccl.tape import Address

FLIGHTS = 512  # rows that a slot keeps: a tree may have many arrays


class Rank:
    """What `tape.record` needs of a communicator, and what work on it needs.

    Attributes:
      communicator, rank, ordinal, unusable: the communicator and what it has.
      whole: where it meets the other ranks of this process.
      call: makes the call of a C function, by its name, or notes it.
    """

    def __init__(self, communicator: Communicator, meeting: Meeting) -> None:
        self.communicator, self.whole = communicator, meeting
        self.rank, self.ordinal = communicator.rank, communicator.ordinal
        self.unusable = communicator.unusable
        self.call: Callable[..., None] = self._made_at_once

    @property
    def driver(self) -> cuda.Driver:
        """CUDA's."""
        return self.communicator.driver

    def wait(self, waiting: Address, stream: Address, event: cuda.Event) -> None:
        """`waiting` goes on once everything on `stream` so far is done."""
        self.driver.record_again(event, stream)
        self.driver.wait_event(waiting, event)

    def meet(self, meeting: Meeting, me: int, stream: Address) -> None:
        """Waits for the other threads of this process, but in a capture, in which nothing waits."""
        if meeting.size > 1:
            self.call(
                "pc_meet_if_it_runs", self.driver.address("cuStreamIsCapturing"), stream,
                meeting.turns, meeting.results, me, meeting.size, ctypes.byref(self.unusable),
            )  # fmt: skip

    @contextlib.contextmanager
    def calling(self, what: tuple[Any, ...], stream: Address) -> Iterator[None]:
        """What is put on streams of the GPU within it is one call; half of one ends all work."""
        with self.communicator.calling(what, stream), self.driver.device(self.ordinal):
            try:
                yield
            except CallError as error:
                if self.call == self._made_at_once:  # else nobody waits for what is only noted
                    self.give_up(error)
                raise

    def launch(
        self, kernel: ctypes.c_void_p, blocks: int, threads: int, stream: Address, *given: Address
    ) -> None:
        """Launches a kernel; `given` are integers of 64 bits, 8 at most."""
        launch = self.driver.address("cuLaunchKernel")
        self.call("pc_launch", launch, kernel, blocks, threads, stream, *given)

    def address(self, function: str) -> int:
        """The address of a C function."""
        if function.startswith("pc_"):
            return tape.address(function)
        if function.startswith("cublas"):
            return cublas.library().address(function)
        return self.communicator.address(function)

    def failed(self, function: str, result: int, stream: int) -> Exception:
        """What to raise for a result of a C function that is not 0."""
        if function == "pc_take":
            return CommunicatorError(
                "an array that a started collective reads or writes lies elsewhere when it is "
                "done: XLA has copied it, and bytes that had not come with it. Call done() in the "
                "function, or in the same turn of the loop, in which the collective is started"
            )
        error: Exception
        if function.startswith("cublas"):
            error = cublas.library().failed(function, result, str(self.communicator))
        else:
            error = self.communicator.failed(function, result, stream)
        self.give_up(error)
        return error

    def give_up(self, error: Exception) -> None:
        """Ends all work of this process's ranks, once a call of one of them has stopped half-way.

        Words are given that nobody would give, and no later call finds them out of step.
        """
        if self.unusable.value:
            return
        for communicator in self.whole.communicators:
            communicator.disable(CommunicatorError(f"an earlier call failed: {error}"))
        for communicator in self.whole.communicators:
            for end in communicator.before_abort:
                end()

    def recorded(self, recorder: tape.Recorder) -> Self:
        """A twin whose calls `recorder` notes."""
        twin = copy.copy(self)
        twin.communicator = self.communicator.recorded(recorder)
        twin.call = recorder.call
        return twin

    def _made_at_once(self, name: str, *args: Any) -> None:
        if not name.startswith("pc_"):
            cublas.library().call(name, *args)
            return
        if not _PYTHON[name](self.driver, *args):
            raise self.failed(name, 1, 0)


class Sender(Rank):
    """A rank that writes to peers' mailboxes, from a stream beside XLA's.

    Events: what it sends is there; its stream has done it all.
    """

    def __init__(self, box: Mailbox) -> None:
        super().__init__(box.communicator, box.meeting)
        self._box = box
        self._side = self.driver.new_stream(self.ordinal, urgent=True)
        self._there, self._done = (self.driver.new_event(self.ordinal) for _ in range(2))


class Mailer(Sender):
    """One whose calls end with what it has sent."""

    @contextlib.contextmanager
    def mailing(self, what: tuple[Any, ...], stream: Address) -> Iterator[None]:
        """What is put on streams within it is one call, that has taken all that has come.

        Args:
          what: names the call to a watchdog.
          stream: XLA's.
        """
        box = self._box
        with self.calling(what, stream):
            self.meet(box.meeting, box.place, stream)
            yield
            self.wait(stream, self._side, self._done)
            self.meet(box.meeting, box.place, stream)


# The tape's own functions where no compiler has made them; whether all is well.


def _begin(driver: cuda.Driver, rows: Any, count: int, width: int) -> bool:
    rows[:] = [0] * width + rows[: (count - 1) * width]
    return True


def _note(driver: cuda.Driver, rows: Words, i: int, address: int) -> bool:
    rows[i] = address
    return True


def _take(
    driver: cuda.Driver,
    rows: Words,
    count: int,
    width: int,
    i: int,
    operand: int,
    result: int,
) -> bool:
    for row in range(0, count * width, width):
        if (rows[row], rows[row + i]) == (operand, result):
            rows[row + i] = 0
            return True
    return False


def _meet(
    driver: cuda.Driver,
    turns: Words,
    results: Words,
    me: int,
    size: int,
    result: int,
    unusable: Any,
) -> bool:
    return Meeting.of(turns, results).come(me, result, unusable._obj)


def _meet_if_it_runs(
    driver: cuda.Driver, capturing: int, stream: int, turns: Words, results: Words, me: int,
    size: int, unusable: Any,
) -> bool:  # fmt: skip
    return driver.captures(stream) or _meet(driver, turns, results, me, size, 0, unusable)


def _push(
    driver: cuda.Driver, copy: int, turns: Words, results: Words, me: int, size: int, rank: int,
    offset: int, source: int, nbytes: int, stream: int,
) -> bool:  # fmt: skip
    target = results[turns[me] % 2 * size + rank] + offset
    driver.copy(target, source, nbytes, stream)
    return True


def _launch(
    driver: cuda.Driver,
    launch: int,
    kernel: ctypes.c_void_p,
    blocks: int,
    threads: int,
    stream: int,
    *given: int,
) -> bool:
    driver.launch(kernel, stream, *map(ctypes.c_uint64, given), blocks=blocks, threads=threads)
    return True


_PYTHON: dict[str, Callable[..., bool]] = {
    "pc_begin": _begin,
    "pc_note": _note,
    "pc_take": _take,
    "pc_meet": _meet,
    "pc_meet_if_it_runs": _meet_if_it_runs,
    "pc_push": _push,
    "pc_launch": _launch,
}


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.cache`, and threads that lower at a time get one and the same.

    Two of one mailbox would each put work on a stream of its own, which nothing orders.
    """
    cached, lock = functools.cache(make), threading.Lock()

    def made(*args: Any) -> Any:
        with lock:
            return cached(*args)

    return made
