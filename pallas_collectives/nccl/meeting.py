"""Where the threads of a process meet, one for each of its ranks, as they enqueue a call.

CUDA may hold a thread, and with it all others, until a GPU is idle: when a kernel is first loaded,
say. If that GPU waited for a word that another thread has yet to put on its stream, that would be
for ever. So threads meet before any of them puts such a wait on a stream, and from there to where
all words are given they do nothing for which CUDA might hold them.
"""

import ctypes
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from pallas_collectives.nccl.communicator import Communicator

# A table of integers of 64 bits.
Words: TypeAlias = "ctypes.Array[ctypes.c_uint64]"


class Meeting:
    """Where a thread for each communicator meets the others; tape.c has the same functions.

    Attributes:
      communicators: whose threads meet.
      turns: how often each has come.
      results: where each one's result lies, of even turns and of odd ones: a thread that is a turn
        ahead does not overwrite what another has yet to read.
    """

    def __init__(self, communicators: Collection["Communicator"]) -> None:
        self.communicators = communicators
        self.size = size = len(communicators)
        self.turns = (ctypes.c_uint64 * size)()
        self.results = (ctypes.c_uint64 * (2 * size))()

    @classmethod
    def of(cls, turns: Words, results: Words) -> "Meeting":
        """The meeting that has these."""
        meeting = cls.__new__(cls)
        meeting.size, meeting.turns, meeting.results = len(turns), turns, results
        return meeting

    def come(self, me: int, result: int, unusable: ctypes.c_int32) -> bool:
        """Leaves word where a result lies, and waits for the others; False if they may not come."""
        mine = self.turns[me] + 1
        self.results[mine % 2 * self.size + me] = result
        self.turns[me] = mine
        while min(self.turns[: self.size]) < mine and not unusable.value:
            time.sleep(0)
        return not unusable.value
