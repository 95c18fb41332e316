"""Memory on each GPU that the others of its host write to, at addresses that stay.

Programs that hold such addresses can be captured in CUDA graphs, and the GPUs may be those of one
process or have one each: peers map a mailbox by CUDA's inter-process handles. A set of devices has
one mailbox a GPU for each purpose and size, which its programs share, and which is never freed.

Each mailbox has words beside its data, 0 or 1 each:

    ready(at, of)    on GPU `at`: it may write to the mailbox of `of`. `at` takes it: it waits
                     until it is 1 before it writes, and sets it to 0 before it gives `come`. `of`
                     gives it (sets it to 1) once it has read all that has come to it; or `at`
                     itself, once it knows that (`nccl.packed`); at first it is given, or not
    come(at, i)      on GPU `at`: message i has come to it. Its writer gives it, behind the
                     message; `at` takes it before it reads

In each call one GPU alone gives a word and one alone takes it, in turn: who gives `ready` does so
again only after it has taken the `come` that the other gives after it has taken `ready`; and the
same the other way. So no signal is lost, or passes for the next, whoever is late, if each call of a
purpose writes to the same mailboxes, and gives `ready` to all that have written to its own.
"""

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pallas_collectives.nccl.communicator import Communicator
from pallas_collectives.nccl.cuda import WORD
from pallas_collectives.nccl.errors import NcclError, RendezvousError
from pallas_collectives.nccl.group import Group
from pallas_collectives.nccl.meeting import Meeting

_LEAST = 1 << 20  # bytes of data
# What comes to a GPU in a call may take this much of its memory, beside XLA's own.
MOST_MAIL = 4 << 30
_RELEASING, _PAUSE = 60.0, 0.01  # seconds for which an abort gives words, and between two times


class MailboxError(NcclError):
    """GPUs cannot write to each other's memory, or have no room for mailboxes; all are told."""


@dataclasses.dataclass(eq=False)
class Mailbox:
    """One GPU's, and the peers' as it reaches them.

    Attributes:
      communicator: the rank whose it is.
      words, data: by rank, the addresses here of its mailbox's words and data.
      meeting, place: where the threads of this process's ranks meet, and this one's number there.
    """

    communicator: Communicator
    words: dict[int, int]
    data: dict[int, int]
    meeting: Meeting
    place: int

    def ready(self, at: int, of: int) -> int:
        """The address of a word; see the module."""
        return self.words[at] + of * WORD

    def come(self, at: int, message: int) -> int:
        """The address of a word; see the module."""
        return self.words[at] + (self.communicator.size + message) * WORD


def get(
    group: Group, purpose: str, messages: int, nbytes: int, free: bool = True
) -> dict[int, Mailbox]:
    """The mailboxes of this process's ranks of a group; made if they are not there yet.

    Args:
      purpose: calls of one purpose write to the same mailboxes, each time.
      messages: that come to a GPU in a call.
      nbytes: bytes of data.
      free: whether `ready` is given at first, and so at the end of each call; else as one begins.

    Every process of the group calls this, in the same order, while it lowers a program.

    Raises:
      MailboxError: some GPU cannot reach another's memory; in every process alike.
    """
    size = rounded(nbytes)
    key = group, purpose, messages, size
    with _making.setdefault(key, threading.Lock()):
        if key not in _made:
            name = f"{purpose} {messages} {size}"
            agree = _begun.setdefault(key, _Agreement(group, name))
            _made[key] = _make(agree, group, messages, size, free)
            del _begun[key]
        made = _made[key]
    if isinstance(made, MailboxError):
        raise made
    return made


def agreed(group: Group, name: str, step: Callable[[int], object], failing: str) -> None:
    """Has each of this process's ranks of a group take a step, the first time it is named so.

    Args:
      name: the same in every process of the group, which all call this, as they do `get`.
      step: called with the rank.
      failing: what a rank that it fails on does, "cannot ...".

    Raises:
      MailboxError: it has failed on some GPU; in every process alike.
    """
    key = group, name

    def take(rank: int) -> str:
        step(rank)
        return ""

    with _making.setdefault(key, threading.Lock()):
        if key not in _agreed:
            agree = _begun.setdefault(key, _Agreement(group, name))
            agree.begin()
            try:
                agree.on(take, failing)
            except MailboxError as error:
                _agreed[key] = error
            else:
                _agreed[key] = None
            del _begun[key]
        found = _agreed[key]
    if found is not None:
        raise found


def rounded(nbytes: int) -> int:
    """The bytes of data of the mailbox in which so many lie."""
    return max(_LEAST, 1 << (nbytes - 1).bit_length())


_made: dict[Any, dict[int, Mailbox] | MailboxError] = {}
_agreed: dict[Any, MailboxError | None] = {}
_begun: dict[Any, "_Agreement"] = {}  # those that some process has not come to yet
_making: dict[Any, threading.Lock] = {}  # for each: what is in it waits for other processes


def _make(
    agree: "_Agreement", group: Group, messages: int, size: int, free: bool
) -> dict[int, Mailbox] | MailboxError:
    """New mailboxes, or why they cannot be made: an error with the same words on every process."""
    here, own, boxes, meeting = _host(), agree.own, agree.boxes, agree.meeting
    count = len(group.devices) + messages
    head = -(-count * WORD // 512) * 512  # bytes before the data

    def allocate(rank: int) -> str:
        c = group.communicators[rank]
        own[rank] = c.driver.allocate(c.ordinal, head + size)
        c.driver.fill_words(c.ordinal, own[rank], 0, count)
        if free:
            c.driver.fill_words(c.ordinal, own[rank], 1, len(group.devices))
        return f"{here} {c.driver.shared(c.ordinal, own[rank]).hex()}" if agree.several else ""

    def reach(rank: int) -> str:
        c = group.communicators[rank]
        c.driver.let_in(c.ordinal, [other.ordinal for other in group.communicators.values()])
        at = dict(own)
        for peer in handles.keys() - own.keys():
            host, handle = handles[peer].split()
            if host != here:  # whose handle could mean something else here
                raise NcclError(f"rank {peer} is on another host")
            at[peer] = c.driver.opened(c.ordinal, bytes.fromhex(handle))
        data = {peer: address + head for peer, address in at.items()}
        boxes[rank] = Mailbox(c, at, data, meeting, len(boxes))
        c.before_abort.append(lambda: _release(boxes[rank], count))
        return ""

    agree.begin()
    try:
        handles = agree.on(allocate, "cannot give memory to its peers")
        agree.on(reach, "cannot reach its peers' memory")
    except MailboxError as error:
        return error
    return boxes


def _host() -> str:
    """What no other host has, in one word."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class _Agreement:
    """Steps that each rank of a group takes; if one fails, all fail, and for the same reason.

    Where a process has waited for another in vain, and begins once more, each of its ranks stands
    by what it has told: the other may have come meanwhile, and gone on.

    Attributes:
      several: whether other processes have ranks of the group.
      own, boxes, meeting: what this process's ranks make in these steps.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group, self._key = group, f"{group.key}/mailboxes/{name}"
        self.several = len(group.communicators) < len(group.devices)
        self.own: dict[int, int] = {}
        self.boxes: dict[int, Mailbox] = {}
        self.meeting = Meeting(group.communicators.values())
        self._told: dict[int, dict[int, str]] = {}  # by step and rank
        self._steps = 0

    def begin(self) -> None:
        """The next step is the first."""
        self._steps = 0

    def on(self, step: Callable[[int], str], failing: str) -> dict[int, str]:
        """What the step gives, by rank; failing: what a rank that it fails on does."""
        self._steps += 1
        given = self._told.setdefault(self._steps, {})
        for rank in sorted(self._group.communicators.keys() - given.keys()):
            communicator = self._group.communicators[rank]
            try:
                with communicator.driver.outside_captures():
                    given[rank] = "+" + step(rank)
            except NcclError as error:
                given[rank] = f"-GPU {self._group.devices[rank].id} {failing}: {error}"
        if self.several:
            given = self._exchanged(given)
        if wrong := [text[1:] for text in given.values() if text.startswith("-")]:
            raise MailboxError("; ".join(wrong))
        return {rank: text[1:] for rank, text in given.items()}

    def _exchanged(self, given: dict[int, str]) -> dict[int, str]:
        store, deadline = self._group.runtime.store, time.monotonic() + self._group.timeout
        for rank, text in given.items():
            store.set(f"{self._key}/{self._steps}/{rank}", text)
        try:
            return {
                rank: store.get(
                    f"{self._key}/{self._steps}/{rank}", max(deadline - time.monotonic(), 1.0)
                )
                for rank in range(len(self._group.devices))
            }
        except RendezvousError as error:
            raise RendezvousError(
                f"{self._group}: not every process has lowered the program that needs mailboxes "
                f"within {self._group.timeout:g} s: {error}"
            ) from error


def _release(box: Mailbox, count: int) -> None:
    """Lets all that waits for a peer go on, with undefined values; queued programs wait again."""
    c, until = box.communicator, time.monotonic() + _RELEASING

    def give() -> None:
        with c.driver.outside_captures():
            while time.monotonic() < until:
                c.driver.fill_words(c.ordinal, box.words[c.rank], 1, count)
                time.sleep(_PAUSE)

    threading.Thread(target=give, daemon=True).start()
