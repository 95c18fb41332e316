"""Exchanges between a process's GPUs by their copy engines, beside what the program computes.

NCCL's kernels run on multiprocessors, and a large matrix product holds all of those until it ends:
on two H200 no gather by NCCL is hidden beside products, whatever its channels and its stream's
priority. Neither is any copy within a GPU, by whichever function of CUDA: multiprocessors make it.
Copies from one GPU to another are made by copy engines, at once, beside a product as alone. So an
exchange has two halves. `start` puts its copies on a stream of their own, on which each GPU pushes
to its peers, and `finish` makes XLA's stream wait for what they push. (32 MiB each way at a time
take 90 us pushed, 97 pulled, and 93 in two halves side by side.) What a GPU keeps of its own goes
on a second stream: it may have to wait for multiprocessors, and no push for it.

Each GPU has two words for each peer, 0 at first:

    the result may be written
    sets the peer's `ready` to 1       ->   waits until it is 1, sets it to 0
                                            copies from its operand to the result
    waits until `come` is 1, sets it to 0   <-   sets the owner's `come` to 1

A word is set to 1 by one GPU alone and to 0 by the other alone, in turn: who sets `ready` does so
again only once it has seen `come`, which the peer sets after it has seen `ready` and set it to 0;
and the same the other way. So no signal is lost, or passes for the next, whoever is late. Streams
write and await the words by themselves (CUDA's stream memory operations).

One thread enqueues for each GPU. They meet in each exchange, between its first half and its second:

  * They tell each other where their results lie, which copies must know as they are enqueued.
  * CUDA may hold a thread, and with it all others, until a GPU is idle: when a kernel is first
    loaded, say. If that GPU waited for a word that another thread has yet to put on its stream,
    that would be for ever. After the meeting a stream waits only for what has been enqueued.
"""

import copy
import ctypes
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_collectives.nccl import tape
from pallas_collectives.nccl.communicator import Communicator
from pallas_collectives.nccl.errors import CommunicatorError, ProcessError
from pallas_collectives.nccl.group import Group

_WORD = 4  # bytes
_FLIGHTS = 512  # that a slot keeps: a tree may have many arrays
_IN_A_ROW = 2  # the addresses of an operand and its result


class Push(NamedTuple):
    """Bytes of the operand that go to a rank's result.

    Attributes:
      rank: whose result; it may be the own one.
      source, target: the first byte in the operand, and there.
      nbytes: how many.
    """

    rank: int
    source: int
    target: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one rank does in an exchange.

    Attributes:
      writers: the other ranks that push to its result.
      pushes: what goes, at most once to each rank.
      clear: bytes to set to zero in the result first.
    """

    writers: tuple[int, ...]
    pushes: tuple[Push, ...]
    clear: int = 0


class Slot:
    """What one rank needs for one exchange at a time.

    Attributes:
      words: of each rank, the address of its words.
      began, kept, arrived: events: the operand is there, and the result may be written; the own
        part of the result is there; all of it is, and the operand has been read.
      flights: where operand and result lie of the last exchanges, each in a row. A slot's
        exchanges go one after the other, yet a second may start before the first is done: one of
        tangents beside that of values, say, or a function that is called twice.
    """

    def __init__(self, driver: Any, ordinal: int, size: int) -> None:
        self.size = size
        self.own_words = driver.allocate(ordinal, 2 * size * _WORD)
        driver.fill_words(ordinal, self.own_words, 0, 2 * size)
        self.words: dict[int, int] = {}
        self.began = driver.new_event(ordinal)
        self.kept = driver.new_event(ordinal)
        self.arrived = driver.new_event(ordinal)
        self.flights = (ctypes.c_uint64 * (_FLIGHTS * _IN_A_ROW))()

    def ready(self, at: int, of: int) -> int:
        """The address of rank `at`'s word that says that `of`'s result may be written."""
        return self.words[at] + of * _WORD

    def come(self, at: int, by: int) -> int:
        """The address of rank `at`'s word that says that `by` has written to its result."""
        return self.words[at] + (self.size + by) * _WORD


class _Meeting:
    """Where a process's threads meet, one for each rank; tape.c has the same functions.

    Attributes:
      turns: how often each has come.
      results: where each one's result lies, of even turns and of odd ones: a thread that is a turn
        ahead does not overwrite what another has yet to read.
    """

    def __init__(self, size: int) -> None:
        self.turns = (ctypes.c_uint64 * size)()
        self.results = (ctypes.c_uint64 * (2 * size))()


class Copier:
    """One rank's exchanges. It is what `tape.record` needs of a communicator."""

    def __init__(self, communicator: Communicator, meeting: _Meeting) -> None:
        self.communicator = communicator
        self.rank, self.ordinal = communicator.rank, communicator.ordinal
        self.unusable = communicator.unusable
        self.stream = communicator.driver.new_stream(self.ordinal)
        self._keeping = communicator.driver.new_stream(self.ordinal)
        self.slots: dict[Any, Slot] = {}
        self._meeting = meeting
        self._calls: Any = _InPython(self)
        communicator.before_abort.append(self._release)

    def start(
        self,
        slot: Slot,
        plan: Plan,
        text: str,
        operand: Any,
        result: Any,
        token: Any,
        stream: Any,
    ) -> None:
        """Puts an exchange beside `stream`, once what is on that so far is done.

        token: the address of 32 bits, which will be 0.
        """
        driver, me, beside, calls = self.communicator.driver, self.rank, self.stream, self._calls
        calls.pc_begin(slot.flights, _FLIGHTS, _IN_A_ROW)
        for i, address in enumerate((operand, result)):
            calls.pc_note(slot.flights, i, address)
        with driver.device(self.ordinal):
            driver.record_again(slot.began, stream)
            for waiting in (beside, self._keeping):
                driver.wait_event(waiting, slot.began)
            driver.clear(self.ordinal, token, _WORD, stream)
        self.communicator.begin(("exchange", text), beside)
        with driver.device(self.ordinal):
            for peer in plan.writers:
                driver.give_word(slot.ready(peer, me), beside)
            turns, results = self._meeting.turns, self._meeting.results
            size = len(turns)
            calls.pc_meet(turns, results, me, size, result, ctypes.byref(self.unusable))
            if plan.clear:
                driver.clear(self.ordinal, result, plan.clear, beside)
            for push in plan.pushes:
                on = self._keeping if push.rank == me else beside
                if push.rank != me:
                    driver.take_word(slot.ready(me, push.rank), beside)
                calls.pc_push(
                    driver.address("cuMemcpyDtoDAsync_v2"), turns, results, me, size,
                    push.rank, push.target, tape.behind(operand, push.source), push.nbytes, on,
                )  # fmt: skip
                if push.rank != me:
                    driver.give_word(slot.come(push.rank, me), beside)
            for peer in plan.writers:
                driver.take_word(slot.come(me, peer), beside)
            driver.record_again(slot.kept, self._keeping)
            driver.wait_event(beside, slot.kept)
            driver.record_again(slot.arrived, beside)
        self.communicator.end(beside)

    def finish(self, slot: Slot, operand: Any, result: Any, stream: Any) -> None:
        """Has `stream` wait for the result of the exchange in `slot`."""
        self.communicator.check()
        self._calls.pc_take(slot.flights, _FLIGHTS, _IN_A_ROW, 1, operand, result)
        with self.communicator.driver.device(self.ordinal):
            self.communicator.driver.wait_event(stream, slot.arrived)

    def address(self, function: str) -> int:
        """The address of a C function of the driver's, or of the tape's own."""
        own = function.startswith("pc_")
        return tape.address(function) if own else self.communicator.address(function)

    def failed(self, function: str, result: int) -> Exception:
        """What to raise for a result of a C function that is not 0."""
        if function == "pc_take":
            return CommunicatorError(
                "an array that a started collective reads or writes lies elsewhere when it is "
                "done: XLA has copied it, and bytes that had not come with it. Call done() in the "
                "function, or in the same turn of the loop, in which the collective is started"
            )
        return self.communicator.failed(function, result)

    def recorded(self, recorder: tape.Recorder) -> "Copier":
        """A twin whose calls `recorder` notes."""
        twin = copy.copy(self)
        twin.communicator = self.communicator.recorded(recorder)
        twin._calls = _Recorded(recorder)
        return twin

    def _release(self) -> None:
        """Lets all that waits for a peer go on, with undefined values."""
        for slot in self.slots.values():
            self.communicator.driver.fill_words(self.ordinal, slot.own_words, 1, 2 * slot.size)


class _Recorded:
    """The tape's own functions, noted."""

    def __init__(self, recorder: tape.Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Callable[..., None]:
        return functools.partial(self._recorder.call, name)


class _InPython:
    """The tape's own functions where no compiler has made them."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier

    def pc_begin(self, rows: Any, count: int, width: int) -> None:
        rows[:] = [0] * width + rows[: (count - 1) * width]

    def pc_note(self, rows: Any, i: int, address: int) -> None:
        rows[i] = address

    def pc_take(self, rows: Any, count: int, width: int, i: int, operand: int, result: int) -> None:
        for row in range(0, count * width, width):
            if (rows[row], rows[row + i]) == (operand, result):
                rows[row + i] = 0
                return
        raise self._copier.failed("pc_take", 1)

    def pc_meet(
        self, turns: Any, results: Any, me: int, size: int, result: int, unusable: Any
    ) -> None:
        mine = turns[me] + 1
        results[mine % 2 * size + me] = result
        turns[me] = mine
        while min(turns[:size]) < mine and not self._copier.unusable.value:
            time.sleep(0)
        if self._copier.unusable.value:  # where the others' results lie is not known
            raise self._copier.failed("pc_meet", 1)

    def pc_push(
        self, copy: int, turns: Any, results: Any, me: int, size: int, rank: int, offset: int,
        source: int, nbytes: int, stream: int,
    ) -> None:  # fmt: skip
        target = results[turns[me] % 2 * size + rank] + offset
        self._copier.communicator.driver.copy(target, source, nbytes, stream)


_copiers: dict[Group, dict[int, Copier]] = {}
_making = threading.Lock()


def slots(group: Group, key: Any) -> dict[int, tuple[Copier, Slot]]:
    """The slot that `key` names of each rank of the group; made if it is not there yet.

    Raises:
      ProcessError: some GPUs of the group are another process's.
    """
    communicators = group.communicators
    if len(communicators) < len(group.devices):
        raise ProcessError(f"{group}: copy engines serve the GPUs of one process")
    with _making:
        if group not in _copiers:
            ordinals = [c.ordinal for c in communicators.values()]
            for c in communicators.values():
                c.driver.let_in(c.ordinal, ordinals)
            meeting = _Meeting(len(ordinals))
            _copiers[group] = {rank: Copier(c, meeting) for rank, c in communicators.items()}
        copiers = _copiers[group]
        if any(key not in copier.slots for copier in copiers.values()):
            made = {
                rank: Slot(c.communicator.driver, c.ordinal, len(copiers))
                for rank, c in copiers.items()
            }
            for rank, slot in made.items():
                slot.words = {peer: other.own_words for peer, other in made.items()}
                copiers[rank].slots[key] = slot
        return {rank: (copier, copier.slots[key]) for rank, copier in copiers.items()}
