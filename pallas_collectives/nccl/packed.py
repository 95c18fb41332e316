"""Collectives over narrower wires between GPUs that reach each other's memory.

A kernel reads numbers, and writes what they become on the wire to a peer's mailbox: nothing is
packed in memory first, and nothing copied. Others (`nccl.codec`) make numbers of what has come, or
add it up. What a GPU keeps of its own is rounded meanwhile, by a kernel that finds room beside the
ones that send: both have few blocks of threads, and NVLink is no quicker with more.

    side stream     to me-1 | to me-2 | ...
    XLA's stream    own     | from me+1 | from me+2 | ...       each once it has come

A GPU sends to all, or by a permutation. Meetings and words are those of `nccl.products`. Each
source has a place and a word of its own in a mailbox, so that calls of all kinds share it.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_collectives.nccl import codec, mailboxes, tape
from pallas_collectives.nccl.codec import ADD, KEEP, READ, SEND, Kernel
from pallas_collectives.nccl.group import Group
from pallas_collectives.nccl.mailboxes import Mailbox
from pallas_collectives.nccl.rank import Mailer

GATHER, EXCHANGE, PERMUTE = "gather", "exchange", "permute"

# Blocks of a kernel's grid. On two H100 16 Mi numbers of bfloat16 are sent as int8 in 52 us by any
# number of blocks from 132 on, and kept in 23. With so few both take 55, and 70 if more keep.
_BLOCKS = {SEND: 264, KEEP: 264, READ: 4096, ADD: 4096}


@dataclasses.dataclass(frozen=True)
class Work:
    """What is sent, and what becomes of it; every GPU does the same.

    Attributes:
      op: GATHER, of one block; EXCHANGE, of one for each GPU; or PERMUTE, of one.
      size: GPUs.
      numbers: of a block: whole groups, their number a multiple of 8, so that blocks are aligned.
      dtype, result: of numbers that are sent, and of the result, by name.
      wire, group: as `Wire` has them.
      adds: whether the result is the sum of what comes and of the own block.
      perm: (source, target) pairs of a permutation.
    """

    op: str
    size: int
    numbers: int
    dtype: str
    result: str
    wire: str
    group: int
    adds: bool = False
    perm: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        assert self.groups % 8 == 0 and self.numbers == self.groups * self.group, self

    @property
    def groups(self) -> int:
        """Of a block."""
        return self.numbers // self.group

    @property
    def nbytes(self) -> int:
        """Of a block on the wire."""
        return self.numbers + codec.SCALE * self.groups

    @property
    def pitch(self) -> int:
        """Bytes between the places of blocks in a mailbox, which works of other sizes share."""
        return mailboxes.rounded(self.nbytes)

    @property
    def mail_bytes(self) -> int:
        """Of a mailbox."""
        return self.size * self.pitch

    @property
    def blocks(self) -> int:
        """Of the result, if they are not added."""
        return 1 if self.op == PERMUTE else self.size

    def to(self, rank: int) -> list[int]:
        """To whom a rank sends, in order."""
        if self.op == PERMUTE:
            return [target for source, target in self.perm if source == rank]
        return [(rank - distance) % self.size for distance in range(1, self.size)]

    def of(self, rank: int) -> list[int]:
        """From whom it receives, in order."""
        if self.op == PERMUTE:
            return [source for source, target in self.perm if target == rank]
        return [(rank + distance) % self.size for distance in range(1, self.size)]

    def sent(self, x: Any, peer: int) -> Any:
        """The address of what goes to a peer, in the blocks at x."""
        block = peer if self.op == EXCHANGE else 0
        return tape.behind(x, block * self.numbers * _width(self.dtype))

    def there(self, y: Any, peer: int) -> Any:
        """The address of what a peer has sent, in the result at y."""
        block = 0 if self.op == PERMUTE else peer
        return tape.behind(y, block * self.numbers * _width(self.result))

    def kernel(self, kind: str) -> Kernel:
        """A kernel for it."""
        return Kernel(kind, self.dtype, self.result, self.wire, self.group)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its kernels."""
        if self.op == PERMUTE:
            return SEND, READ
        return (SEND, ADD) if self.adds else (SEND, KEEP, READ)


class Packer(Mailer):
    """One rank's work of one mailbox."""

    def __init__(self, box: Mailbox) -> None:
        super().__init__(box)
        self._prepared = functools.partial(codec.prepared, self.driver, self.ordinal)

    def run(
        self, work: Work, text: str, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any
    ) -> None:
        """Puts a call on XLA's stream.

        Args:
          work, text: what it does, and its name.
          inputs: the address of the blocks that are sent.
          outputs: of the blocks that come, by source, or of their sum.
          stream: XLA's.
        """
        (x,), (y,) = inputs, outputs
        driver, box, me = self.driver, self._box, self.rank
        with self.mailing((work.op, text), work.of(me), stream):
            self.wait(self._side, stream, self._there)
            for peer in work.to(me):
                driver.take_word(box.ready(me, peer), self._side)
                to = box.data[peer] + me * work.pitch
                self._run(work, SEND, self._side, work.sent(x, peer), to)
                driver.give_word(box.come(peer, me), self._side)
            if KEEP in work.kinds:
                self._run(work, KEEP, stream, work.sent(x, me), work.there(y, me))
            self._receive(work, x, y, stream)

    def _receive(self, work: Work, x: Any, y: Any, stream: Any) -> None:
        """Makes numbers of what comes, each block once it is there, or adds all up."""
        me, come = self.rank, self._box.data[self.rank]
        for peer in work.of(me):
            self.driver.take_word(self._box.come(me, peer), stream)
            if not work.adds:
                block = come + peer * work.pitch
                self._run(work, READ, stream, block, work.there(y, peer))
        if work.adds:
            self._run(work, ADD, stream, work.sent(x, me), come, work.pitch, me, work.size, y)
        elif not work.of(me):
            self.driver.clear(self.ordinal, y, work.numbers * _width(work.result), stream)

    def _run(self, work: Work, kind: str, stream: Any, *given: Any) -> None:
        kernel = work.kernel(kind)
        blocks = min(_BLOCKS[kind], kernel.blocks(work.groups))
        self.launch(self._prepared(kernel), blocks, codec.THREADS, stream, *given, work.groups)


def ready(group: Group, work: Work) -> dict[int, Packer]:
    """What does the work on each of this process's GPUs, by ordinal, with its kernels loaded.

    Raises:
      MailboxError: some GPU cannot reach another's memory, has no room, or cannot run a kernel; in
        every process alike.
    """

    def load(rank: int) -> None:
        c = group.communicators[rank]
        for kind in work.kinds:
            codec.prepared(c.driver, c.ordinal, work.kernel(kind))

    name = f"packed {hashlib.sha256(str(work).encode()).hexdigest()[:16]}"
    mailboxes.agreed(group, name, load, "cannot quantise")
    boxes = mailboxes.get(group, "packed", work.size, work.mail_bytes)
    return {box.communicator.ordinal: _packer(box) for box in boxes.values()}


_packer = functools.cache(Packer)


def _width(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize
