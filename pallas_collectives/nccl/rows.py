"""A kernel's table: the blocks that it goes through, and the words by which GPUs wait for it.

The steps are PTX, as `nccl.codec` puts kernels together. In them %me is a thread's number in its
block of threads, %turn that block's turn, and %rows, %count, %source and %target are parameters.
"""

import dataclasses
import struct
from collections.abc import Iterable

_FORMAT, _COUNTER = struct.Struct("<4Q"), 8  # bytes
SIZE = _FORMAT.size  # of a row, in bytes


@dataclasses.dataclass(frozen=True)
class Row:
    """What a kernel does with one block.

    Attributes:
      source, target: where the block is, behind the kernel's own `source`; and where what becomes
        of it, behind `target`. ADD has one target, and its rows are terms: each has its address, or
        0 for the own one. RELAY's are terms, too; each has the address that the sum is sent to, but
        the own one, where it is kept.
      take: the address of a word that the kernel waits for before it begins, and sets to 0 as it
        ends; or 0.
      give: the address of a word that it sets to 1 as it ends; or 0.
    """

    source: int
    target: int
    take: int = 0
    give: int = 0


def table_of(rows: Iterable[Row]) -> bytes:
    """Rows as a kernel reads them, and behind them the counter by which its blocks meet."""
    return b"".join(_FORMAT.pack(*dataclasses.astuple(row)) for row in rows) + bytes(_COUNTER)


def at() -> Iterable[str]:
    """%from and %to, where the block and what becomes of it are."""
    yield f"rem.u32 %row, %turn, %turns; mad.wide.u32 %at, %row, {SIZE}, %rows;"
    yield "ld.global.v2.u64 {%from, %to}, [%at];"
    yield "add.u64 %from, %from, %source; add.u64 %to, %to, %target;"


def taken(at_once: bool) -> Iterable[str]:
    """A thread for each row waits for its word; at_once: and sets it to 0."""
    yield "cvt.u32.u64 %row, %count; setp.ge.u32 %idle, %me, %row;"
    yield "@%idle bra taken;"
    yield f"mad.wide.u32 %at, %me, {SIZE}, %rows; ld.global.u64 %word, [%at + 16];"
    yield "taking:"
    yield "ld.acquire.sys.global.u32 %row, [%word]; setp.ne.u32 %idle, %row, 1;"
    yield "@%idle bra taking;"
    if at_once:
        yield "st.relaxed.sys.global.u32 [%word], 0;"
    yield "taken:"
    yield "bar.sync 0;"


def given(clears: bool) -> Iterable[str]:
    """Who comes last has a thread for each row give its word; clears: and set the other to 0."""
    yield "bar.sync 0;"
    yield "setp.ne.u32 %idle, %me, 0; setp.eq.u32 %done, %tiles, 0;"
    yield "@%done ret;"
    yield f"mad.lo.u64 %at, %count, {SIZE}, %rows;"
    yield "@%idle bra told;"
    yield "fence.acq_rel.sys;"
    yield "atom.relaxed.gpu.global.add.u32 %row, [%at], 1;"
    yield "fence.acq_rel.sys;"
    yield "st.shared.u32 [arrived], %row;"
    yield "told:"
    yield "bar.sync 0;"
    yield "ld.shared.u32 %row, [arrived]; add.u32 %row, %row, 1;"
    yield "setp.ne.u32 %left, %row, %blocks;"
    yield "@%left ret;"
    yield "@!%idle st.global.u32 [%at], 0;"
    yield "cvt.u32.u64 %row, %count; setp.ge.u32 %idle, %me, %row;"
    yield "@%idle ret;"
    yield f"mad.wide.u32 %at, %me, {SIZE}, %rows;"
    yield "ld.global.v2.u64 {%word, %next}, [%at + 16];"
    yield "fence.acq_rel.sys;"
    if clears:
        yield "st.relaxed.sys.global.u32 [%word], 0;"
    yield "setp.ne.u64 %mine, %next, 0;"
    yield "@%mine st.release.sys.global.u32 [%next], 1;"
    yield "ret;"
