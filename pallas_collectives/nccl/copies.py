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

One thread enqueues for each GPU. They meet in each exchange (`nccl.meeting`), between its first
half and its second, and tell each other where their results lie, which copies must know as they
are enqueued. After the meeting a stream waits only for what has been enqueued.
"""

import ctypes
import dataclasses
import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

from pallas_collectives.nccl import cuda, tape
from pallas_collectives.nccl.communicator import Communicator
from pallas_collectives.nccl.cuda import WORD
from pallas_collectives.nccl.errors import ProcessError
from pallas_collectives.nccl.group import Group
from pallas_collectives.nccl.meeting import Meeting
from pallas_collectives.nccl.rank import FLIGHTS, Rank
from pallas_collectives.nccl.tape import Address

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
class PushPlan:
    """What one rank does in an exchange.

    Attributes:
      writers: the other ranks that push to its result.
      pushes: what goes, at most once to each rank.
      targets: the first byte of what each of them writes there.
      nbytes: bytes of each push.
      clear: bytes to set to zero in the result first.
    """

    writers: tuple[int, ...]
    pushes: tuple[Push, ...]
    targets: tuple[int, ...] = ()
    nbytes: int = 0
    clear: int = 0


class Slot:
    """What one rank needs for one exchange at a time.

    Attributes:
      words: the address of each rank's words.
      began, kept, arrived: events: the operand is there, and the result may be written; the own
        part of the result is there; all of it is, and the operand has been read.
      flights: where operand and result lie of the last exchanges, each in a row. A slot's
        exchanges go one after the other, yet a second may start before the first is done: one of
        tangents beside that of values, say, or a function that is called twice.
    """

    def __init__(self, driver: cuda.Driver, ordinal: int, size: int) -> None:
        self.size = size
        self.own_words = driver.allocate(ordinal, 2 * size * WORD)
        driver.fill_words(ordinal, self.own_words, 0, 2 * size)
        self.words: dict[int, int] = {}
        self.began = driver.new_event(ordinal)
        self.kept = driver.new_event(ordinal)
        self.arrived = driver.new_event(ordinal)
        self.flights = (ctypes.c_uint64 * (FLIGHTS * _IN_A_ROW))()

    def ready(self, at: int, of: int) -> int:
        """The address of rank `at`'s word that says that `of`'s result may be written."""
        return self.words[at] + of * WORD

    def come(self, at: int, by: int) -> int:
        """The address of rank `at`'s word that says that `by` has written to its result."""
        return self.words[at] + (self.size + by) * WORD


class Copier(Rank):
    """One rank's exchanges."""

    def __init__(self, communicator: Communicator, meeting: Meeting) -> None:
        super().__init__(communicator, meeting)
        self.stream = self.driver.new_stream(self.ordinal, urgent=True)
        self._keeping = self.driver.new_stream(self.ordinal)
        self.slots: dict[Any, Slot] = {}
        self._meeting = meeting
        communicator.before_abort.append(self._release)

    def start(
        self,
        slot: Slot,
        plan: PushPlan,
        text: str,
        operand: Address,
        result: Address,
        token: Address,
        stream: Address,
    ) -> None:
        """Puts an exchange beside `stream`, once what is on that so far is done.

        token: the address of 32 bits, which will be 0.
        """
        driver, me, beside, call = self.driver, self.rank, self.stream, self.call
        call("pc_begin", slot.flights, FLIGHTS, _IN_A_ROW)
        for i, address in enumerate((operand, result)):
            call("pc_note", slot.flights, i, address)
        # On one stream: two would count calls on the board at a time, and in each GPU's own order.
        with self.calling(("exchange", text), stream):
            self.wait(beside, stream, slot.began)
            driver.wait_event(self._keeping, slot.began)
            driver.clear(self.ordinal, token, WORD, stream)
            driver.give_words([slot.ready(peer, me) for peer in plan.writers], beside)
            turns, results = self._meeting.turns, self._meeting.results
            size = self._meeting.size
            call("pc_meet", turns, results, me, size, result, ctypes.byref(self.unusable))
            if plan.clear:
                driver.clear(self.ordinal, result, plan.clear, beside)
            for push in plan.pushes:
                on = self._keeping if push.rank == me else beside
                if push.rank != me:
                    driver.take_words([slot.ready(me, push.rank)], beside)
                call(
                    "pc_push", driver.address("cuMemcpyDtoDAsync_v2"), turns, results, me, size,
                    push.rank, push.target, tape.behind(operand, push.source), push.nbytes, on,
                )  # fmt: skip
                if push.rank != me:
                    driver.give_words([slot.come(push.rank, me)], beside)
            driver.take_words([slot.come(me, peer) for peer in plan.writers], beside)
            self.wait(beside, self._keeping, slot.kept)
            driver.record_again(slot.arrived, beside)

    def finish(
        self, slot: Slot, plan: PushPlan, operand: Address, result: Address, stream: Address
    ) -> None:
        """Has `stream` wait for the result of the exchange in `slot`."""
        self.communicator.check()
        self.call("pc_take", slot.flights, FLIGHTS, _IN_A_ROW, 1, operand, result)
        with self.calling(("exchange done", plan.nbytes), stream):
            self.driver.wait_event(stream, slot.arrived)

    def _release(self) -> None:
        """Lets all that waits for a peer go on, with undefined values."""
        for slot in self.slots.values():
            self.driver.fill_words(self.ordinal, slot.own_words, 1, 2 * slot.size)


_copiers: dict[Group, dict[int, Copier]] = {}
_making = threading.Lock()


def slots(group: Group, key: Hashable) -> dict[int, tuple[Copier, Slot]]:
    """The slot that `key` names of each rank of the group; made if it is not there yet.

    Raises:
      ProcessError: some GPUs of the group are another process's.
    """
    communicators = group.communicators
    if len(communicators) < len(group.devices):
        raise ProcessError(f"{group}: copy engines serve the GPUs of one process")
    with _making, group.runtime.driver.outside_captures():
        if group not in _copiers:
            ordinals = [c.ordinal for c in communicators.values()]
            for c in communicators.values():
                c.driver.let_in(c.ordinal, ordinals)
            meeting = Meeting(communicators.values())
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
