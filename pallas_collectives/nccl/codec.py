"""Numbers to narrower ones and back on a GPU: kernels that read, or write, where the wire ends.

    send   blocks of groups as they travel, written where they shall arrive: a peer's memory
    read   what has come, as numbers
    keep   what would come of numbers, if they were sent
    add    the sum of all blocks, those that have come and the own one, in the order of the ranks
    relay  that sum, written where it shall arrive, as it travels; and kept, as it comes of that
    take   nothing, but the words of what has come: what follows on the stream waits for them

A kernel goes through a table of blocks, all of them at once: neighbouring blocks of threads have
the same tile of neighbouring rows, so that all peers are sent to side by side. As it ends it sets a
word for each row, in the peer's memory: once the last of its blocks of threads has come that far,
and everything they wrote is there to be seen.

A block as it travels is its values, and its groups' scales, float32, behind them; `wires` says
what they are, and these kernels give its bits. Neighbours in a warp have neighbouring numbers, 8
each, so that whatever is loaded and stored at once is whole packets of NVLink and whole sectors of
memory; scales are gathered by a block of threads first. (On two H100 that took sending 16 Mi
numbers from 64 to 52 us, as long as a copy of the same bytes, and reading them from 31 to 16.) A
thread has four such parts at a time, to wait for them together.

A kernel is text that Python puts together from steps. In them the numbers of one part are %n0 to
%n7, float32; values of part p are %v of 2p and the next, four bytes each, and %s of p its scale.
"""

import ctypes
import dataclasses
import functools
import itertools
import struct
from collections.abc import Iterable
from math import inf

import jax.numpy as jnp

from pallas_collectives import wires
from pallas_collectives.nccl import cuda, rows
from pallas_collectives.wires import Wire

SEND, READ, KEEP, ADD, RELAY, TAKE = "send", "read", "keep", "add", "relay", "take"
THREADS = 256  # of a block
SCALE = 4  # bytes
_EACH, _PARTS = 8, 4  # numbers of a part, and parts of a thread at a time
_TILE = THREADS * _PARTS  # parts of a block of threads at a time
_NUMBERS = range(_EACH)

# In one direction, and back: two numbers of 16 bits in a word.
_WIDENED = {
    "bfloat16": "shl.b32 %b0, {word}, 16; and.b32 %b1, {word}, 0xffff0000;"
    " mov.b32 %n{0}, %b0; mov.b32 %n{1}, %b1;",
    "float16": "mov.b32 {{%h0, %h1}}, {word}; cvt.f32.f16 %n{0}, %h0; cvt.f32.f16 %n{1}, %h1;",
}
_NARROWED = {
    "bfloat16": "cvt.rn.bf16x2.f32 {word}, %n{1}, %n{0};",
    "float16": "cvt.rn.f16x2.f32 {word}, %n{1}, %n{0};",
}
_FLOAT8 = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}
# Conversions to and from float8 are there from Ada on.
_TARGET = {"int8": "sm_80", **dict.fromkeys(_FLOAT8, "sm_89")}
# Addresses, and numbers: integers of 64 bits.
PARAMETERS = "source", "target", "rows", "count", "groups"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One of them.

    Attributes:
      kind: SEND, READ, KEEP, ADD, RELAY or TAKE.
      dtype: of the numbers that are sent, by name; the largest of it is the most of a term.
      result: of those that it gives, or of their sum; and for SEND, of those that READ gives.
        What overflows in it is inf before it is sent: a wire would bring the largest number.
      wire, group: as `Wire` has them.
    """

    kind: str
    dtype: str
    result: str
    wire: str
    group: int

    @property
    def name(self) -> str:
        """The entry's."""
        return f"{self.kind}_{self.dtype}_{self.result}_{self.wire}_{self.group}"

    def tiles(self, groups: int) -> int:
        """What so many groups of a block are for blocks of threads."""
        return -(-groups * self._lanes // _TILE)

    @property
    def adds(self) -> bool:
        """Whether its rows are terms of one sum."""
        return self.kind in (ADD, RELAY)

    @property
    def _lanes(self) -> int:
        """Parts of a group, each of another thread of a warp."""
        return self.group // _EACH

    def ptx(self) -> str:
        """Its text."""
        body = {
            SEND: self._sends,
            READ: self._reads,
            KEEP: self._keeps,
            ADD: self._adds,
            RELAY: self._relays,
            TAKE: tuple,
        }[self.kind]
        given = ", ".join(f".param .u64 {name}" for name in PARAMETERS)
        loads = "\n  ".join(f"ld.param.u64 %{name}, [{name}];" for name in PARAMETERS)
        wide = ", ".join(f"%{name}" for name in PARAMETERS)
        row = [] if self.adds else rows.at()
        steps = "\n  ".join(itertools.chain(row, self._places(), body()))
        takes, gives = self.kind in (SEND, TAKE), self.kind not in (KEEP, TAKE)
        # Who gives the word that SEND takes waits first for the one that it gives.
        waits = "\n  ".join(rows.taken(at_once=self.kind == TAKE) if takes else ())
        tells = "\n  ".join(rows.given(clears=self.kind == SEND) if gives else ["ret;"])
        return f"""
.version 8.1
.target {_TARGET[self.wire]}
.address_size 64
.visible .entry {self.name}({given})
{{
  .shared .align 16 .f32 scales[{_TILE // self._lanes}];
  .shared .u32 arrived;
  .reg .b64 {wide}, %parts, %first, %from, %to, %at, %word, %k, %next, %p<{_PARTS}>;
  .reg .b32 %me, %turn, %blocks, %turns, %tiles, %tile, %row;
  .reg .b32 %place, %x<{_EACH * _PARTS}>, %v<{2 * _PARTS}>;
  .reg .b32 %w, %b<4>, %most, %other;
  .reg .b16 %h0, %h1;
  .reg .f32 %n<{_EACH}>, %t<{_EACH * _PARTS}>, %s<{_PARTS}>, %inverse;
  .reg .pred %in<{_PARTS}>, %done, %holds, %usable, %begins, %left, %mine, %idle;
  {loads}
  mov.u32 %me, %tid.x;
  mov.u32 %blocks, %nctaid.x;
  {"mov.u32 %turns, 1" if self.adds else "cvt.u32.u64 %turns, %count"};
  mul.lo.u64 %parts, %groups, {self._lanes};
  add.u64 %at, %parts, {_TILE - 1}; shr.u64 %at, %at, {_TILE.bit_length() - 1};
  cvt.u32.u64 %tiles, %at;
  {waits}
  mov.u32 %turn, %ctaid.x;
turn:
  div.u32 %tile, %turn, %turns;
  setp.ge.u32 %done, %tile, %tiles;
  @%done bra behind;
  mul.wide.u32 %first, %tile, {_TILE};
  {steps}
  add.u32 %turn, %turn, %blocks;
  bra.uni turn;
behind:
  {tells}
}}"""

    def _places(self) -> Iterable[str]:
        """%p of a part is its number, and %in whether there is such a part."""
        for part in range(_PARTS):
            yield f"cvt.u64.u32 %at, %me; add.u64 %p{part}, %first, %at;"
            yield f"add.u64 %p{part}, %p{part}, {part * THREADS};"
            yield f"setp.lt.u64 %in{part}, %p{part}, %parts;"

    def _sends(self) -> Iterable[str]:
        yield from self._own()
        yield from self._send()

    def _send(self) -> Iterable[str]:
        for part in range(_PARTS):
            yield f"mad.lo.u64 %at, %p{part}, {_EACH}, %to;"
            yield f"@%in{part} st.global.v2.b32 [%at], {{%v{2 * part}, %v{2 * part + 1}}};"
        yield from self._send_scales()

    def _send_scales(self) -> Iterable[str]:
        """First to where the block of threads has them all, then as they lie."""
        scales, each = _TILE // self._lanes, self._lanes.bit_length() - 1
        yield f"and.b32 %w, %me, {self._lanes - 1}; setp.eq.u32 %begins, %w, 0;"
        yield "mov.u32 %w, scales;"
        for part in range(_PARTS):
            yield f"add.u32 %place, %me, {part * THREADS}; shr.u32 %place, %place, {each};"
            yield f"mad.lo.u32 %place, %place, {SCALE}, %w;"
            yield f"@%begins st.shared.f32 [%place], %s{part};"
        yield "bar.sync 0;"
        yield f"cvt.u64.u32 %at, %me; shr.u64 %k, %first, {each}; add.u64 %k, %k, %at;"
        yield f"setp.lt.u64 %left, %k, %groups; setp.lt.and.u32 %left, %me, {scales}, %left;"
        yield f"mad.lo.u32 %place, %me, {SCALE}, %w;"
        yield "@%left ld.shared.f32 %inverse, [%place];"
        yield f"mad.lo.u64 %at, %groups, {self.group}, %to; mad.lo.u64 %at, %k, {SCALE}, %at;"
        yield "@%left st.global.f32 [%at], %inverse;"
        yield "bar.sync 0;"

    def _reads(self) -> Iterable[str]:
        yield from self._come("%from")
        yield from self._put()

    def _keeps(self) -> Iterable[str]:
        yield from self._own()
        yield from self._put()

    def _adds(self) -> Iterable[str]:
        yield from self._sum()
        yield "mov.u64 %to, %target;"
        for part in range(_PARTS):
            yield from self._summed(part)
            yield from self._store(part)

    def _relays(self) -> Iterable[str]:
        yield from self._sum()
        for part in range(_PARTS):
            yield from self._summed(part)
            yield from self._quantise(part, wires.overflows_from(self.result))
        yield "mov.u64 %next, %rows;"
        yield "relay:"
        yield "ld.global.v2.u64 {%from, %to}, [%next]; setp.eq.u64 %mine, %from, 0;"
        yield "@%mine bra keep;"
        yield from self._send()
        yield "bra.uni relayed;"
        yield "keep:"
        yield "add.u64 %to, %to, %target;"
        yield from self._put()
        yield "relayed:"
        yield f"add.u64 %next, %next, {rows.SIZE}; mad.lo.u64 %word, %count, {rows.SIZE}, %rows;"
        yield "setp.lt.u64 %left, %next, %word;"
        yield "@%left bra relay;"

    def _summed(self, part: int) -> Iterable[str]:
        """%n of a part."""
        return (f"mov.f32 %n{i}, %t{_EACH * part + i};" for i in _NUMBERS)

    def _sum(self) -> Iterable[str]:
        """%t, in the order of the rows."""
        yield "mov.u64 %k, 0; mov.u64 %next, %rows;"
        yield "term:"
        yield "ld.global.u64 %from, [%next]; setp.eq.u64 %mine, %from, 0;"
        yield "@%mine bra mine;"
        yield from self._come("%from")
        yield "bra.uni there;"
        yield "mine:"
        yield "mov.u64 %from, %source;"
        yield from self._own()
        yield "there:"
        yield "setp.eq.u64 %begins, %k, 0;"
        for part in range(_PARTS):
            yield from self._dequantise(part, self.dtype)
            for i in _NUMBERS:
                total = f"%t{_EACH * part + i}"
                yield f"add.rn.f32 {total}, {total}, %n{i};"
                yield f"@%begins mov.f32 {total}, %n{i};"
        yield f"add.u64 %k, %k, 1; add.u64 %next, %next, {rows.SIZE};"
        yield "setp.lt.u64 %left, %k, %count;"
        yield "@%left bra term;"

    def _own(self) -> Iterable[str]:
        """Values and scales of the own block."""
        width = _EACH * jnp.dtype(self.dtype).itemsize
        words = width // 4
        for part in range(_PARTS):
            yield f"mad.lo.u64 %at, %p{part}, {width}, %from;"
            for word in range(0, words, 4):
                into = _four("x", _EACH * part + word)
                yield f"@%in{part} ld.global.v4.b32 {into}, [%at + {4 * word}];"
        for part in range(_PARTS):
            for word in range(words):
                x = f"%x{_EACH * part + word}"
                wide = _WIDENED.get(self.dtype, "mov.b32 %n{2}, {word};")
                yield wide.format(2 * word, 2 * word + 1, word, word=x)
            yield from self._quantise(part, inf if self.adds else wires.overflows_from(self.result))

    def _put(self) -> Iterable[str]:
        """What values and scales stand for, where it belongs."""
        for part in range(_PARTS):
            yield from self._dequantise(part, self.result)
            yield from self._store(part)

    def _store(self, part: int) -> Iterable[str]:
        width = _EACH * jnp.dtype(self.result).itemsize
        words = width // 4
        yield f"mad.lo.u64 %at, %p{part}, {width}, %to;"
        for word in range(words):
            narrow = _NARROWED.get(self.result, "mov.b32 {word}, %n{2};")
            yield narrow.format(2 * word, 2 * word + 1, word, word=f"%x{word}")
        for word in range(0, words, 4):
            yield f"@%in{part} st.global.v4.b32 [%at + {4 * word}], {_four('x', word)};"

    def _come(self, base: str) -> Iterable[str]:
        """Values and scales of a block that has come to `base`."""
        yield f"mad.lo.u64 %at, %groups, {self.group}, {base};"
        each = self._lanes.bit_length() - 1
        for part in range(_PARTS):
            yield f"shr.u64 %word, %p{part}, {each}; mad.lo.u64 %word, %word, {SCALE}, %at;"
            yield f"@%in{part} ld.global.f32 %s{part}, [%word];"
            yield f"mad.lo.u64 %word, %p{part}, {_EACH}, {base};"
            values = f"{{%v{2 * part}, %v{2 * part + 1}}}"
            yield f"@%in{part} ld.global.v2.b32 {values}, [%word];"

    def _quantise(self, part: int, infinite: float) -> Iterable[str]:
        """From numbers to values and their scale, as `wires.of_groups`.

        infinite: the least magnitude that counts as inf.
        """
        wire, scale = Wire(self.wire, group=self.group), f"%s{part}"
        yield "mov.u32 %most, 0;"
        for i in _NUMBERS:  # as integers, which order magnitudes alike, and NaN behind inf
            yield f"mov.b32 %w, %n{i}; and.b32 %w, %w, 0x7fffffff; max.s32 %most, %most, %w;"
        lanes = self._lanes
        while lanes := lanes // 2:
            yield f"shfl.sync.bfly.b32 %other, %most, {lanes}, 31, 0xffffffff;"
            yield "max.s32 %most, %most, %other;"
        yield f"mov.b32 {scale}, %most;"
        yield f"mul.rn.f32 {scale}, {scale}, {_float(1 / wire.largest)};"
        yield f"max.f32 {scale}, {scale}, {_float(wires.LEAST_SCALE)};"
        yield "setp.eq.s32 %holds, %most, 0;"
        yield f"selp.f32 {scale}, {_float(0.0)}, {scale}, %holds;"
        yield f"setp.lt.s32 %holds, %most, {_bits(infinite):#x};"
        yield f"selp.f32 {scale}, {scale}, {_float(float('nan'))}, %holds;"
        yield f"setp.gt.f32 %usable, {scale}, {_float(0.0)};"
        yield f"selp.f32 %inverse, {scale}, {_float(1.0)}, %usable;"
        yield "rcp.rn.f32 %inverse, %inverse;"
        for i in _NUMBERS:
            yield f"mul.rn.f32 %n{i}, %n{i}, %inverse;"
            yield f"selp.f32 %n{i}, %n{i}, {_float(0.0)}, %usable;"
            yield f"max.f32 %n{i}, %n{i}, {_float(-wire.largest)};"
            yield f"min.f32 %n{i}, %n{i}, {_float(wire.largest)};"
        for half in range(2):
            yield from self._narrow(f"%v{2 * part + half}", 4 * half)

    def _narrow(self, value: str, first: int) -> Iterable[str]:
        """Four scaled numbers to a word of values."""
        if kind := _FLOAT8.get(self.wire):
            for h, i in enumerate((first, first + 2)):
                yield f"cvt.rn.satfinite.{kind}.f32 %h{h}, %n{i + 1}, %n{i};"
            yield f"mov.b32 {value}, {{%h0, %h1}};"
            return
        for b in range(4):  # the lowest byte is the integer
            i = first + b
            yield f"add.rn.f32 %n{i}, %n{i}, {_float(float(wires.TO_INTEGER))};"
            yield f"mov.b32 %b{b}, %n{i};"
        yield "prmt.b32 %b0, %b0, %b1, 0x0040; prmt.b32 %b2, %b2, %b3, 0x0040;"
        yield f"prmt.b32 {value}, %b0, %b2, 0x5410;"

    def _dequantise(self, part: int, dtype: str) -> Iterable[str]:
        """From values and their scale to numbers; none is beyond the largest of a dtype."""
        most = float(jnp.finfo(dtype).max)
        for i in _NUMBERS:
            value = f"%v{2 * part + i // 4}"
            if kind := _FLOAT8.get(self.wire):
                if i % 4 == 0:
                    yield f"mov.b32 {{%h0, %h1}}, {value};"
                    yield f"cvt.rn.f16x2.{kind} %b0, %h0; cvt.rn.f16x2.{kind} %b1, %h1;"
                if i % 2 == 0:
                    yield f"mov.b32 {{%h0, %h1}}, %b{i % 4 // 2};"
                yield f"cvt.f32.f16 %n{i}, %h{i % 2};"
            else:
                yield f"bfe.s32 %w, {value}, {8 * (i % 4)}, 8; cvt.rn.f32.s32 %n{i}, %w;"
            yield f"mul.rn.f32 %n{i}, %n{i}, %s{part};"
            yield f"max.NaN.f32 %n{i}, %n{i}, {_float(-most)};"
            yield f"min.NaN.f32 %n{i}, %n{i}, {_float(most)};"


def _four(name: str, first: int) -> str:
    return "{" + ", ".join(f"%{name}{first + i}" for i in range(4)) + "}"


def _bits(number: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return bits


def _float(number: float) -> str:
    """A constant of float32, of which PTX takes the bits."""
    return f"0f{_bits(number):08x}"


@functools.cache
def prepared(driver: cuda.Driver, ordinal: int, kernel: Kernel) -> ctypes.c_void_p:
    """The kernel, loaded, as products are, by being run: on no groups of no rows."""
    with driver.outside_captures():
        (loaded,) = driver.load_kernels(ordinal, kernel.ptx().encode(), kernel.name)
        with driver.workspace(ordinal, THREADS) as (at, stream):
            given = map(ctypes.c_uint64, (at, at, at, 0, 0))
            driver.launch(loaded, stream, *given, threads=THREADS)
    return loaded
