"""Matrix products whose operand, or whose result, moves between GPUs meanwhile.

A large product holds all multiprocessors until it ends; copies from GPU to GPU are made by copy
engines, at once. So the wire is hidden if products are cut in blocks, and each block is copied, on
a stream of its own, while another is multiplied. Blocks go to peers' mailboxes, where products read
them, and write their results where these belong: nothing is laid anew.

Gather, then multiply; n GPUs, block p of x from GPU p:

    side stream     block to me-1 | to me-2 | ...
    XLA's stream    own block @ w | me+1's block @ w | me+2's ...

Multiply, then scatter: sums go round the ring, and each GPU adds its term. A whole block is on the
wire while the next is multiplied, and a pass of its own adds what came:

    side stream                block me-1   |              block me-2 ...
    XLA's stream    block me-1 | block me-2 | + what came | block me-3 ...

Or blocks are cut in parts, and products add what came themselves: that saves the pass, but products
of fewer rows take longer. Two parts:

    side stream                         block me-1, part 0 | part 1 | block me-2, part 0 ...
    XLA's stream    block me-1, part 0 | part 1 | block me-2, part 0, + what came | part 1 ...

The last is the GPU's own. Sums are rounded to the dtype of the result once a hop, and whole blocks
besides before what came is added.

The threads of a process meet (`nccl.meeting`) before any of them has a stream wait for a peer, and
again once all words of the call have been given on their streams. Between the two CUDA holds none
of them, for products' kernels are loaded as they are made ready. Processes need not meet: whoever
is held waits for its own GPU alone, and that waits for nothing that has not been enqueued.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence

from pallas_collectives.nccl import cublas, dtypes, mailboxes, sums, tape
from pallas_collectives.nccl.cublas import Product
from pallas_collectives.nccl.group import Group
from pallas_collectives.nccl.mailboxes import Mailbox
from pallas_collectives.nccl.rank import Mailer, once
from pallas_collectives.nccl.tape import Address

GATHER, SCATTER = "gather", "scatter"


@dataclasses.dataclass(frozen=True)
class ProductWork:
    """What is multiplied and moved; every GPU does the same.

    Attributes:
      kind: `GATHER` or `SCATTER`.
      size: GPUs.
      batch, rows, depths: a block of x is (batch, rows, depth); the whole x is (batch, size * rows,
        depth). `depths` has one for the x that is gathered, or one for each pair's x.
      columns: those of each w that x is multiplied with, or of each pair's w if it is scattered.
      transposed: each w is (columns, depth).
      dtype, result: the dtypes of operands and products.
      keeps: whether the gathered x is a result, too.
      cuts: into how many parts a block that is scattered is cut.
    """

    kind: str
    size: int
    batch: int
    rows: int
    depths: tuple[int, ...]
    columns: tuple[int, ...]
    transposed: bool
    dtype: str
    result: str
    keeps: bool = False
    cuts: int = 1

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Shape of what a message brings, all parts of it together."""
        gathers = self.kind == GATHER
        return self.batch, self.rows, self.depths[0] if gathers else self.columns[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of what a message brings, all parts of it together."""
        dtype = self.dtype if self.kind == GATHER else self.result
        return math.prod(self.block_shape) * dtypes.width(dtype)

    @property
    def mail_bytes(self) -> int:
        """What comes to a GPU in a call."""
        return (self.size - 1) * self.block_bytes

    @property
    def messages(self) -> int:
        """How many of them."""
        return (self.size - 1) * len(self.parts())

    @property
    def whole(self) -> bool:
        """Whether blocks are scattered whole, and passes of their own add what came."""
        return self.cuts == 1

    @property
    def operands(self) -> int:
        """How many `Multiplier.run` takes."""
        return 1 + len(self.columns) if self.kind == GATHER else 2 * len(self.depths)

    @property
    def results(self) -> int:
        """How many it fills."""
        return len(self.columns) + self.keeps if self.kind == GATHER else 2

    def parts(self) -> list[tuple[int, int]]:
        """(first row, rows) of the parts of a block."""
        each = -(-self.rows // self.cuts)
        return [(first, min(each, self.rows - first)) for first in range(0, self.rows, each)]

    def gathered(self, columns: int) -> Product:
        """The product of a block of x, one's own or from a mailbox."""
        to, (depth,) = self.size * self.rows * columns, self.depths
        return self._product(self.rows, depth, columns, (self.rows * depth, to, to))

    def scattered(self, rows: int, depth: int, last: bool, adds: bool) -> Product:
        """That of rows of x, of a part; last: for the result; adds: to what is there, not came."""
        each, whole = rows * self.columns[0], self.rows * self.columns[0]
        to = whole if last else each
        pitches = self.size * self.rows * depth, to if adds else each, to
        return self._product(rows, depth, self.columns[0], pitches)

    def _product(
        self, rows: int, depth: int, columns: int, pitches: tuple[int, int, int]
    ) -> Product:
        return Product(
            self.batch, rows, depth, columns, self.transposed, self.dtype, self.result, pitches
        )


class Multiplier(Mailer):
    """One rank's products of a kind."""

    def __init__(self, box: Mailbox) -> None:
        super().__init__(box)
        self._prepared = functools.partial(cublas.prepared, self.driver, self.ordinal)
        self._adds = functools.partial(sums.prepared, self.driver, self.ordinal)

    def run(
        self,
        work: ProductWork,
        text: str,
        inputs: Sequence[Address],
        outputs: Sequence[Address],
        stream: Address,
    ) -> None:
        """Puts a call on XLA's stream.

        Args:
          work, text: what it does, and its name.
          inputs: addresses: x and each w; or, to be scattered, each x and then each w.
          outputs: each product (batch, size * rows, columns), and the gathered x as (size, batch,
            rows, depth) if it is kept; or the scattered sum (batch, rows, columns), and room for
            all blocks but one.
          stream: XLA's.
        """
        with self.mailing((work.kind, text), stream):
            if work.kind == GATHER:
                self._gather(work, inputs, outputs, stream)
            else:
                self._scatter(work, inputs, outputs, stream)
            read = [self._box.ready(peer, self.rank) for peer in self._writers(work)]
            self.driver.give_words(read, stream)

    def _writers(self, work: ProductWork) -> list[int]:
        others = [(self.rank + distance) % work.size for distance in range(1, work.size)]
        return others if work.kind == GATHER else others[-1:]

    def _gather(
        self,
        work: ProductWork,
        inputs: Sequence[Address],
        outputs: Sequence[Address],
        stream: Address,
    ) -> None:
        driver, box, me, size = self.driver, self._box, self.rank, work.size
        own, *ws = inputs
        nbytes = work.block_bytes
        self.wait(self._side, stream, self._there)
        for distance in range(1, size):
            to = (me - distance) % size
            driver.take_words([box.ready(me, to)], self._side)
            place = box.data[to] + (distance - 1) * nbytes
            driver.copy(place, own, nbytes, self._side)
            driver.give_words([box.come(to, distance - 1)], self._side)
        for distance in range(size):
            source = (me + distance) % size
            block: Address = own
            if distance:
                block = box.data[me] + (distance - 1) * nbytes
                driver.take_words([box.come(me, distance - 1)], stream)
            for w, columns, y in zip(ws, work.columns, outputs, strict=False):
                product = tape.behind(y, source * work.rows * columns * dtypes.width(work.result))
                self._multiply(work.gathered(columns), block, w, None, product, stream)
            if work.keeps:
                driver.copy(tape.behind(outputs[-1], source * nbytes), block, nbytes, stream)

    def _scatter(
        self,
        work: ProductWork,
        inputs: Sequence[Address],
        outputs: Sequence[Address],
        stream: Address,
    ) -> None:
        driver, box, me, size = self.driver, self._box, self.rank, work.size
        right = (me + 1) % size
        result, room = outputs
        row, parts = work.columns[0] * dtypes.width(work.result), work.parts()
        for hop in range(size):
            last = hop == size - 1
            for part, (first, rows) in enumerate(parts):
                message, behind = hop * len(parts) + part, work.batch * first * row
                to = tape.behind(room, hop * work.block_bytes + behind)
                if last:
                    to = tape.behind(result, first * row)
                start = (me - 1 - hop) % size * work.rows + first
                before = message - len(parts), (hop - 1) * work.block_bytes + behind
                came = self._came(*before, stream) if hop and not work.whole else None
                self._term(work, inputs, start, rows, last, came, to, stream)
                if hop and work.whole:
                    self._add(work, self._came(*before, stream), to, stream)
                if last:
                    continue
                self.wait(self._side, stream, self._there)
                if message == 0:
                    driver.take_words([box.ready(me, right)], self._side)
                place = box.data[right] + hop * work.block_bytes + behind
                driver.copy(place, to, work.batch * rows * row, self._side)
                driver.give_words([box.come(right, message)], self._side)

    def _came(self, message: int, behind: int, stream: Address) -> int:
        """Where a message to a scatter is, once it has come."""
        self.driver.take_words([self._box.come(self.rank, message)], stream)
        return self._box.data[self.rank] + behind

    def _term(
        self, work: ProductWork, inputs: Sequence[Address], start: int, rows: int, last: bool,
        c: Address | None, to: Address, stream: Address,
    ) -> None:  # fmt: skip
        """The products of rows of each x from `start` on, added up, and to c if that is given."""
        pairs = zip(inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :], strict=True)
        for i, ((x, w), depth) in enumerate(zip(pairs, work.depths, strict=True)):
            x = tape.behind(x, start * depth * dtypes.width(work.dtype))
            product = work.scattered(rows, depth, last, adds=i > 0)
            self._multiply(product, x, w, to if i else c, to, stream)

    def _add(self, work: ProductWork, came: int, to: Address, stream: Address) -> None:
        """Adds a whole block that has come to what is there."""
        words = work.block_bytes // sums.WORD
        blocks = -(-words // sums.THREADS)
        self.launch(self._adds(work.result), blocks, sums.THREADS, stream, came, to, words)

    def _multiply(
        self,
        product: Product,
        x: Address,
        w: Address,
        c: Address | None,
        d: Address,
        stream: Address,
    ) -> None:
        self._prepared(product).multiply(self.call, x, w, c, d, stream)


def multipliers(group: Group, work: ProductWork) -> dict[int, Multiplier]:
    """What does the work on each of this process's GPUs, by ordinal; made if it is not there yet.

    Raises:
      MailboxError: some GPU cannot reach another's memory; in every process alike.
    """
    boxes = mailboxes.get(group, work.kind, work.messages, work.mail_bytes)
    return {box.communicator.ordinal: _multiplier(box) for box in boxes.values()}


def ready(group: Group, work: ProductWork) -> dict[int, Multiplier]:
    """The same, once the kernels of all products are loaded.

    Raises:
      MailboxError: or some GPU has no kernel, or no room to load it; likewise.
    """
    made = multipliers(group, work)

    def load(rank: int) -> None:
        given = tape.inputs(work.operands), tape.outputs(work.results)
        multiplier = made[group.communicators[rank].ordinal]
        tape.record(multiplier, lambda twin: twin.run(work, "", *given, tape.STREAM))

    name = f"products {hashlib.sha256(str(work).encode()).hexdigest()[:16]}"
    mailboxes.agreed(group, name, load, "cannot multiply")
    return made


_multiplier = once(Multiplier)
