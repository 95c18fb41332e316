"""Collectives over narrower wires between GPUs that reach each other's memory.

A kernel reads numbers, and writes what they become on the wire to a peer's mailbox: nothing is
packed in memory first, and nothing copied. Others (`nccl.codec`) make numbers of what has come, or
add it up. What a GPU keeps of its own is rounded meanwhile, by a kernel that finds room beside the
one that sends.

    side stream     to all others
    XLA's stream    own             | from all others, once it has come

    of a psum       to all others
                                    | adds what has come, sends it to all | from all others

A GPU sends to all at once, or by a permutation. (One after the other took 28% longer on four H200:
they are never in step, so two send to a third while nobody sends to a fourth.) Kernels take and
give the words, since each step of a stream that does it takes 3 us, and makes a graph slow to
launch: what sends takes `ready` and gives `come`, and what reads gives `ready`. A kernel of one
block takes `come` before: many that waited could keep what others wait for from the GPU. (Reading a
part of what comes while the rest is sent was slower in 2 parts and in 4.) Each source has a place
and a word of its own in a mailbox, so that calls of all kinds share it.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

from pallas_collectives.nccl import codec, dtypes, mailboxes, tape
from pallas_collectives.nccl.codec import ADD, KEEP, READ, RELAY, SEND, TAKE, Kernel
from pallas_collectives.nccl.group import Group
from pallas_collectives.nccl.mailboxes import Mailbox
from pallas_collectives.nccl.rank import Mailer, once
from pallas_collectives.nccl.rows import Row, table_of
from pallas_collectives.nccl.tape import Address

GATHER, EXCHANGE, PERMUTE, REDUCE = "gather", "exchange", "permute", "reduce"

# Blocks of a kernel's grid: NVLink is no quicker with more than one a multiprocessor, and what is
# kept beside has room. On two H200 64 MiB of bfloat16 are exchanged as int8 in 80 us so, and in 101
# with twice as many of both. More blocks that read cost more, as each waits in the end for what it
# wrote to be seen.
_BLOCKS = {SEND: 132, KEEP: 132, READ: 528, ADD: 528, RELAY: 264, TAKE: 1}


@dataclasses.dataclass(frozen=True)
class PackedWork:
    """What is sent, and what becomes of it; every GPU does the same.

    Attributes:
      op: GATHER, of one block; EXCHANGE, of one for each GPU; PERMUTE, of one; or REDUCE, of one
        for each GPU, whose sums are gathered.
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
        assert self.size <= codec.THREADS, f"{self}: a kernel has a thread for each rank's word"

    @property
    def groups(self) -> int:
        """A block's groups."""
        return self.numbers // self.group

    @property
    def nbytes(self) -> int:
        """Bytes of a block on the wire."""
        return self.numbers + codec.SCALE * self.groups

    @property
    def pitch(self) -> int:
        """Bytes between the places of blocks in a mailbox, which works of other sizes share."""
        return mailboxes.rounded(self.nbytes)

    @property
    def mail_bytes(self) -> int:
        """Bytes of a mailbox."""
        return self.messages * self.pitch

    @property
    def messages(self) -> int:
        """The most that come to a GPU: one from each and, behind all of these, each one's sums."""
        return self.size * (2 if self.op == REDUCE else 1)

    @property
    def purpose(self) -> str:
        """What its mailboxes are for. REDUCE has its own, for a place of sums has no `ready`.

        Who has had a term from a peer knows that it has read the sums of the call before. And who
        has had a sum knows that the terms have been read, and gives itself the `ready` for them.
        """
        return "reduced" if self.op == REDUCE else "packed"

    @property
    def blocks(self) -> int:
        """Blocks of the result, if they are not added."""
        return 1 if self.op == PERMUTE else self.size

    def to(self, rank: int) -> list[int]:
        """To whom a rank sends."""
        if self.op == PERMUTE:
            return [target for source, target in self.perm if source == rank]
        return [peer for peer in range(self.size) if peer != rank]

    def of(self, rank: int) -> list[int]:
        """From whom it receives, in order."""
        if self.op == PERMUTE:
            return [source for source, target in self.perm if target == rank]
        return [peer for peer in range(self.size) if peer != rank]

    def sent(self, peer: int) -> int:
        """Where in the operand, in bytes, the block for a peer is."""
        return (
            self.numbers * dtypes.width(self.dtype) * (peer if self.op in (EXCHANGE, REDUCE) else 0)
        )

    def there(self, peer: int) -> int:
        """Where in the result, in bytes, the block of a peer is."""
        return self.numbers * dtypes.width(self.result) * (0 if self.op == PERMUTE else peer)

    def kernel(self, kind: str) -> Kernel:
        """A kernel for it."""
        result = self.dtype if self.adds and kind == SEND else self.result  # of which a term is
        return Kernel(kind, self.dtype, result, self.wire, self.group)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Its kernels'."""
        if self.op == PERMUTE:
            return SEND, TAKE, READ
        if self.op == REDUCE:
            return SEND, TAKE, RELAY, READ
        return (SEND, TAKE, ADD) if self.adds else (SEND, KEEP, TAKE, READ)


class Packer(Mailer):
    """One rank's work of one mailbox."""

    def __init__(self, box: Mailbox) -> None:
        super().__init__(box)
        self._prepared = functools.partial(codec.prepared, self.driver, self.ordinal)

    def run(
        self,
        work: PackedWork,
        text: str,
        inputs: Sequence[Address],
        outputs: Sequence[Address],
        stream: Address,
    ) -> None:
        """Puts a call on XLA's stream.

        Args:
          work, text: what it does, and its name.
          inputs: the address of the blocks that are sent.
          outputs: of the blocks that come, by source, or of their sum.
          stream: XLA's.
        """
        (x,), (y,) = inputs, outputs
        of = work.of(self.rank)
        with self.mailing((work.op, text), stream):
            self.wait(self._side, stream, self._there)
            self._run(work, SEND, x, 0, self._side)
            if KEEP in work.kinds:
                self._run(work, KEEP, x, y, stream)
            self._run(work, TAKE, 0, 0, stream)
            if work.op == REDUCE:
                self._run(work, RELAY, tape.behind(x, work.sent(self.rank)), y, stream)
                self._run(work, TAKE, 0, 0, stream, work.size)
            if work.adds:
                self._run(work, ADD, tape.behind(x, work.sent(self.rank)), y, stream)
            elif of:
                self._run(work, READ, 0, y, stream)
            else:
                self.driver.clear(self.ordinal, y, work.numbers * dtypes.width(work.result), stream)

    def _run(
        self,
        work: PackedWork,
        kind: str,
        source: Address,
        target: Address,
        stream: Address,
        first: int = 0,
    ) -> None:
        kernel, (table, rows) = work.kernel(kind), _table(self._box, work, kind, first)
        if rows:
            tiles = kernel.tiles(work.groups) * (1 if kernel.adds else rows)
            blocks, loaded = min(_BLOCKS[kind], tiles), self._prepared(kernel)
            given = source, target, table, rows, work.groups
            self.launch(loaded, blocks, codec.THREADS, stream, *given)


@once
def _table(box: Mailbox, work: PackedWork, kind: str, first: int) -> tuple[int, int]:
    """The address of one rank's table for a kernel, on its GPU, and its rows.

    first: of the messages that TAKE waits for.
    """
    me, mail, size = box.communicator.rank, box.data, work.size
    sums = size if work.op == REDUCE else 0  # the first message that is one

    def place(at: int, message: int) -> int:
        return mail[at] + message * work.pitch

    rows = {
        SEND: lambda: [
            Row(work.sent(p), place(p, me), box.ready(me, p), box.come(p, me)) for p in work.to(me)
        ],
        KEEP: lambda: [Row(work.sent(me), work.there(me))],
        TAKE: lambda: [Row(0, 0, take=box.come(me, first + p)) for p in work.of(me)],
        READ: lambda: [
            Row(place(me, sums + p), work.there(p), 0, box.ready(*((me, p) if sums else (p, me))))
            for p in work.of(me)
        ],
        ADD: lambda: [
            Row(place(me, p), 0, 0, box.ready(p, me)) if p != me else Row(0, 0) for p in range(size)
        ],
        RELAY: lambda: [
            Row(place(me, p), place(p, sums + me), 0, box.come(p, sums + me))
            if p != me
            else Row(0, work.there(me))
            for p in range(size)
        ],
    }[kind]()
    driver, ordinal = box.communicator.driver, box.communicator.ordinal
    table = table_of(rows)
    address = driver.allocate(ordinal, len(table))
    driver.put(ordinal, address, table)
    return address, len(rows)


def ready(group: Group, work: PackedWork) -> dict[int, Packer]:
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
    boxes = mailboxes.get(group, work.purpose, work.messages, work.mail_bytes)

    def direct(rank: int) -> None:
        for kind in work.kinds:
            _table(boxes[rank], work, kind, 0)
        if work.op == REDUCE:
            _table(boxes[rank], work, TAKE, work.size)

    mailboxes.agreed(group, f"{name} tables", direct, "has no room for a table")
    return {box.communicator.ordinal: _packer(box) for box in boxes.values()}


_packer = once(Packer)
