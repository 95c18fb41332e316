"""Exchanges between the GPUs of several processes of one host, beside what the program computes.

As `nccl.copies`, but by mailboxes, since a process does not know where another's results lie:
`start` puts pushes to the peers' mailboxes on a stream of their own, and `finish` makes XLA's
stream wait for what comes, and copies it to the result. Until then it stays in the mailbox, so one
exchange of a mailbox is under way at a time: whoever finishes one that another has followed is
told. One that is never finished harms nothing.
"""

import ctypes

from pallas_collectives.nccl import mailboxes, tape
from pallas_collectives.nccl.copies import PushPlan
from pallas_collectives.nccl.cuda import WORD
from pallas_collectives.nccl.errors import CommunicatorError
from pallas_collectives.nccl.group import Group
from pallas_collectives.nccl.mailboxes import Mailbox
from pallas_collectives.nccl.rank import Sender, once
from pallas_collectives.nccl.tape import Address

_ROOM, _MOST = 256 << 20, 256  # bytes that mailboxes of a size may have, and how many they may be
_LEAST = 4


class Post(Sender):
    """One rank's exchanges of one mailbox."""

    def __init__(self, box: Mailbox) -> None:
        super().__init__(box)
        self._under_way = (ctypes.c_uint64 * 1)()  # where the operand lies

    def start(
        self,
        plan: PushPlan,
        text: str,
        operand: Address,
        result: Address,
        token: Address,
        stream: Address,
    ) -> None:
        """As `Copier.start`; nothing is written to the result yet."""
        del result
        driver, me, side, box = self.driver, self.rank, self._side, self._box
        self.call("pc_begin", self._under_way, 1, 1)
        self.call("pc_note", self._under_way, 0, operand)
        with self.calling(("exchange", text), stream):
            driver.clear(self.ordinal, token, WORD, stream)
            self.wait(side, stream, self._there)
            # What came last is in a result, or nobody wants it.
            driver.give_words([box.ready(peer, me) for peer in plan.writers], side)
            self.meet(box.meeting, box.place, stream)
            for push in plan.pushes:
                if push.rank != me:
                    place = self._place(me, push.rank)
                    driver.take_words([box.ready(me, push.rank)], side)
                    to = box.data[push.rank] + place * push.nbytes
                    driver.copy(to, tape.behind(operand, push.source), push.nbytes, side)
                    driver.give_words([box.come(push.rank, place)], side)
            driver.take_words([box.come(me, self._place(p, me)) for p in plan.writers], side)
            driver.record_again(self._done, side)
            self.meet(box.meeting, box.place, stream)

    def finish(self, plan: PushPlan, operand: Address, result: Address, stream: Address) -> None:
        """Puts the result on `stream`, once it has come."""
        driver, me = self.driver, self.rank
        self.communicator.check()
        self.call("pc_take", self._under_way, 1, 1, 0, operand, operand)
        # What is waited for here a watchdog must see here: `start` keeps nothing on XLA's stream.
        with self.calling(("exchange done", plan.nbytes), stream):
            driver.wait_event(stream, self._done)
            if plan.clear:
                driver.clear(self.ordinal, result, plan.clear, stream)
            for push in plan.pushes:
                if push.rank == me:
                    to, source = tape.behind(result, push.target), tape.behind(operand, push.source)
                    driver.copy(to, source, push.nbytes, stream)
            for peer, target in zip(plan.writers, plan.targets, strict=True):
                come = self._box.data[me] + self._place(peer, me) * plan.nbytes
                driver.copy(tape.behind(result, target), come, plan.nbytes, stream)

    def failed(self, function: str, result: int, stream: int) -> Exception:
        """What to raise for a result of a C function that is not 0."""
        if function == "pc_take":
            return CommunicatorError(
                "a started collective is done when another has followed it in its mailbox, or XLA "
                "has copied its operand: call done() in the same turn of the loop, and before "
                f"{_LEAST} others of its size or more are started"
            )
        return super().failed(function, result, stream)

    def _place(self, source: int, target: int) -> int:
        """Which of the target's messages, and places in its mailbox, are the source's."""
        return (source - target) % self.communicator.size - 1


_post = once(Post)


def get(group: Group, number: int, nbytes: int) -> dict[int, Post]:
    """What exchanges on each of this process's GPUs, by ordinal; made if it is not there yet.

    Args:
      number: the exchange's number in its program. Exchanges that are under way at a time have
        mailboxes of their own, four or more.
      nbytes: bytes of the largest push.

    Raises:
      MailboxError: some GPU cannot reach another's memory; in every process alike.
    """
    others = len(group.devices) - 1
    slots = max(_LEAST, min(_MOST, _ROOM // mailboxes.rounded(others * nbytes)))
    boxes = mailboxes.get(group, f"exchange {number % slots}", others, others * nbytes, free=False)
    return {box.communicator.ordinal: _post(box) for box in boxes.values()}
