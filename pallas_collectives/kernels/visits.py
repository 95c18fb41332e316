"""Visits: rows to chosen devices, each to a place that is settled beforehand.

What tokens do on their way to experts and back. A device sends some of its rows, any of them to any
number of devices, by a list of row numbers ordered by receiver. Places follow from the list alone:

    there    row r of device p arrives as row p * rows + r, on whichever device: each has room for
             all rows of all, and those that nobody sends stay as they were
    back     what device p sends to q arrives from `landings[q]` on, one behind the other

With a note. The receivers need not know beforehand what comes. Ahead of the rows each device sends
everyone a note, the same for all: first how many rows come to each, then what the caller has to
say (the experts that all tokens choose). So it takes one kernel, and no exchange of counts before.
With three devices, of two rows each, `a` to devices 1 and 2, `b` to none, `d` to device 0:

    dev0                       dev1                       dev2
    note 0 1 1 to all          note 1 0 0 to all          note 0 0 0 to all             notes
    a -> row 0 of dev1, dev2   d -> row 3 of dev0                                       push
    waits for notes: 1 comes   waits for notes: 1 comes   waits for notes: 1 comes      drain

Without one, `come` says how many rows come from each device.

             hops    bytes sent per device           tables in SMEM     DMAs
    visits   1       the rows sent, and n-1 notes    list, 4 n, heads   one a row and receiver

A DMA for each row lets rows leave from where they lie, and takes no pass over HBM before. Rows of
some KiB take longer on the wire than a DMA takes to start.

Who could be ahead of whom. Nothing of notes is read before all have come, nor of rows: so one
semaphore serves all notes, and one all rows. Rows may come before notes do; they count on their own
semaphore. Sizes are clipped to what the list has room for, and row numbers to the rows that there
are: no DMA ever leaves its array. That `come` agrees with what is sent is the caller's part.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Interpret, Number, Ref, Semaphore, dma_semaphores, span
from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.blocks import LANES
from pallas_collectives.kernels.machinery.sync import PushSemaphores
from pallas_collectives.topology.groups import Group, Ring, wrap

LARGEST_TABLES = 512 << 10  # bytes, of the 1 MiB of SMEM that the smallest TPUs have


class Tables(NamedTuple):
    """What moves where: refs in SMEM, as `send` has them."""

    listed: Ref  # (most,)
    starts: Ref  # (n,)
    sizes: Ref  # (n,)
    landings: Ref | None = None  # (n,)
    come: Ref | None = None  # (n,)


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays and tables; the first three with a note."""

    notes: PushSemaphores | None = None  # PushSemaphores of notes
    read_sem: Semaphore | None = None  # own; the notes' heads on their way to SMEM
    heads: Ref | None = None  # (n * head,): SMEM: of each device how many rows it sends to each
    rows: PushSemaphores = PushSemaphores()  # of rows, from and to ourselves and others


def head_lanes(n: int) -> int:
    """Numbers with which a note begins: one for each device, in whole rows of lanes."""
    return -(-n // LANES) * LANES


def fits(listed: int, n: int, noted: bool) -> bool:
    """Whether the tables of a list of so many rows, among n devices, fit the scalar memory."""
    return 4 * (listed + (n * head_lanes(n) if noted else 0) + 4 * n) <= LARGEST_TABLES


def send(
    x: jax.Array,
    listed: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    rows: int,
    group: Group,
    *,
    landings: jax.Array | None = None,
    come: jax.Array | None = None,
    note: jax.Array | None = None,
    interpret: Interpret,
) -> tuple[jax.Array, ...]:
    """(rows, ...): the rows that come, in their places; and if noted int32[n, words]: the notes.

    Args:
      x: (rows here, ...), of three dimensions or more, so that DMAs can begin at any row.
      listed: int32[most]: the rows that leave, by receiver.
      starts: int32[n]: where each receiver's begin in the list.
      sizes: int32[n]: how many they are.
      rows: how many the result has.
      group: the devices.
      landings: int32[n]: where on each device what is sent to it begins ("back"); None for the
        places of "there".
      come: int32[n]: how many rows come from each; None with a note.
      note: int32[words], whole lanes: in front `sizes`, padded to `head_lanes`.
      interpret: see `launch`.
    """
    assert (come is None) != (note is None), "who knows what comes needs no note"
    n, head = group.size, head_lanes(group.size)
    out = [jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)]
    operands, scratch = [x], Scratch()
    if note is not None:
        operands.append(note.reshape(-1, 1, LANES))
        out.append(jax.ShapeDtypeStruct((n, *operands[1].shape), jnp.int32))
        scratch = Scratch(PushSemaphores(), dma_semaphores(), pltpu.SMEM((n * head,), jnp.int32))
    known = {"landings": landings, "come": come}
    tables = {name: table for name, table in known.items() if table is not None}
    results = launch.call_many(
        functools.partial(_kernel, known=tuple(tables), head=head),
        group,
        *operands,
        out_shapes=out,
        scalars=(listed, starts, sizes, *tables.values()),
        scratch=scratch,
        barrier="everyone",
        name="visits",
        interpret=interpret,
        wire_bytes=x.nbytes,
    )
    return results[0], *(notes.reshape(n, -1) for notes in results[1:])


def _kernel(ring: Ring, *refs: Any, known: tuple[str, ...], head: int) -> None:
    *given, scratch = refs
    tables = Tables(*given[:3], **dict(zip(known, given[3:], strict=False)))
    arrays = given[3 + len(known) :]
    if tables.come is None:
        x_ref, note_ref, o_ref, notes_ref = arrays
    else:
        x_ref, o_ref = arrays
    # x_ref: (rows, ...): HBM
    # o_ref: (rows', ...): HBM; rows that nobody sends are as they were
    # note_ref: (words, 1, 128): HBM
    # notes_ref: (n, words, 1, 128): HBM
    rows = Rows(ring, tables, x_ref, o_ref, scratch.rows)
    if (come_ref := tables.come) is not None:
        rows.push()
        rows.drain(lambda peer: come_ref[peer])
        return
    notes = Notes(ring, note_ref, notes_ref, scratch.notes, scratch.read_sem, scratch.heads, head)
    notes.push()
    rows.push()
    notes.read()
    rows.drain(lambda peer: scratch.heads[peer * head + ring.me])
    notes.drain()


class Notes(NamedTuple):
    """The note that a device sends to all, and those that come."""

    ring: Ring
    note_ref: Ref
    notes_ref: Ref
    sems: PushSemaphores
    read_sem: Semaphore
    heads: Ref
    head: int

    def push(self) -> None:
        """Sends ours."""
        sems, own = self.sems, self.notes_ref.at[self.ring.me]

        def one(distance: Number) -> None:
            to = self.ring.device_id(wrap(self.ring.me + distance, self.ring.size))
            sync.remote_copy(self.note_ref, own, sems.sent, sems.arrived, to)

        with jax.named_scope("tell"):
            sync.for_each(1, self.ring.size, one)
            pltpu.make_async_copy(self.note_ref, own, sems.copy).start()

    def read(self) -> None:
        """Waits for all, and brings their heads to scalar memory."""
        n, sems, own = self.ring.size, self.sems, self.notes_ref.at[self.ring.me]

        def one(sender: Number) -> None:
            for k in range(self.head // LANES):
                place: Number = sender * self.head + k * LANES
                head_ref = self.notes_ref.at[sender, k, 0]
                here_ref = self.heads.at[span(place, LANES)]
                pltpu.make_async_copy(head_ref, here_ref, self.read_sem).start()

        with jax.named_scope("hear"):
            sync.wait(sems.arrived, own, times=n - 1)
            sync.wait(sems.copy, own)
            sync.for_each(0, n, one)
            sync.wait(self.read_sem, self.heads)

    def drain(self) -> None:
        """Waits until ours have left."""
        sync.wait(self.sems.sent, self.note_ref, times=self.ring.size - 1)


class Rows(NamedTuple):
    """The rows that a device sends, and those that come."""

    ring: Ring
    tables: Tables
    x_ref: Ref
    o_ref: Ref
    semaphores: PushSemaphores

    def push(self) -> None:
        """Sends all, the next device's first."""
        n, me, sems = self.ring.size, self.ring.me, self.semaphores

        def send(distance: Number) -> None:
            peer = wrap(me + distance, n)
            to = self.ring.device_id(peer)
            self._for_each(
                peer, lambda here, there: sync.remote_copy(here, there, sems.sent, sems.arrived, to)
            )

        with jax.named_scope("push"):
            sync.for_each(1, n, send)
            self._for_each(
                me, lambda here, there: pltpu.make_async_copy(here, there, sems.copy).start()
            )

    def drain(self, come: Callable[[Number], Any]) -> None:
        """Waits for all that leave, and for come(sender) rows of each."""
        n, me, sems = self.ring.size, self.ring.me, self.semaphores
        most = np.int32(self.o_ref.shape[0])

        def one(distance: Number) -> None:
            peer = wrap(me + distance, n)
            self._wait(sems.arrived, lax.clamp(np.int32(0), come(peer), most))
            self._wait(sems.sent, self._size(peer))

        with jax.named_scope("drain"):
            sync.for_each(1, n, one)
            self._wait(sems.copy, self._size(me))

    def _for_each(self, peer: Number, body: Callable[[Ref, Ref], None]) -> None:
        """body(row here, its place there) for those that go to a device."""
        rows, places = (np.int32(ref.shape[0]) for ref in (self.x_ref, self.o_ref))

        def one(number: Number) -> None:
            listed = self.tables.listed[self._start(peer) + number]
            row = lax.clamp(np.int32(0), listed, rows - 1)
            if self.tables.landings is None:
                place = self.ring.me * rows + row
            else:
                place = self.tables.landings[peer] + number
            there = lax.clamp(np.int32(0), place, places - 1)
            body(self.x_ref.at[row], self.o_ref.at[there])

        sync.for_each(0, self._size(peer), one)

    def _start(self, peer: Number) -> Number:
        most = np.int32(self.tables.listed.shape[0])
        return lax.clamp(np.int32(0), self.tables.starts[peer], most)

    def _size(self, peer: Number) -> Number:
        left = np.int32(self.tables.listed.shape[0]) - self._start(peer)
        return lax.clamp(np.int32(0), self.tables.sizes[peer], left)

    def _wait(self, semaphore: Semaphore, rows: Number) -> None:
        """Waits for so many rows, if there are any: some pieces of x's size, and what is left."""
        most = min(self.x_ref.shape[0], self.o_ref.shape[0])
        whole = lax.div(rows, np.int32(most))
        sync.wait(semaphore, self.o_ref.at[pl.ds(0, most)], times=whole)
        left = rows - whole * most
        pl.when(left > 0)(lambda: sync.wait(semaphore, self.o_ref.at[span(0, left)]))
