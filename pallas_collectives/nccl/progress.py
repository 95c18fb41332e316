"""Which collective a GPU is in, written by the GPU itself.

Two one-thread kernels stand before and after each watched call on its stream and write to host
memory that the device reaches: how many calls began and ended, and each call's signature. So the
record is the order in which the device ran the calls, also where a CUDA graph replays them and no
Python runs; reading it asks nothing of the device.
"""

import copy
import ctypes
import dataclasses
import threading
import zlib
from typing import Protocol

from pallas_collectives.nccl.cuda import Driver
from pallas_collectives.nccl.tape import Address, Recorder

SLOTS = 8192
_PRIME = 16777619  # FNV's


class _Slot(ctypes.Structure):
    """A call: its signature, and a hash over the signatures of all calls up to it."""

    _fields_ = (("signature", ctypes.c_uint32), ("history", ctypes.c_uint32))


class Words(ctypes.Structure):
    """The memory of a board; call number n is in slot n mod SLOTS."""

    _fields_ = (
        ("begun", ctypes.c_uint64),
        ("ended", ctypes.c_uint64),
        ("history", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("slots", _Slot * SLOTS),
    )


_PTX = f"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry enter(.param .u64 board, .param .u32 signature)
{{
  .reg .b32 %history, %signature;
  .reg .b64 %board, %begun, %slot;
  ld.param.u64 %board, [board];
  ld.param.u32 %signature, [signature];
  ld.volatile.u64 %begun, [%board+{Words.begun.offset}];
  ld.volatile.u32 %history, [%board+{Words.history.offset}];
  mul.lo.u32 %history, %history, {_PRIME};
  xor.b32 %history, %history, %signature;
  and.b64 %slot, %begun, {SLOTS - 1};
  mad.lo.u64 %slot, %slot, {ctypes.sizeof(_Slot)}, %board;
  st.volatile.u32 [%slot+{Words.slots.offset}], %signature;
  st.volatile.u32 [%slot+{Words.slots.offset + _Slot.history.offset}], %history;
  st.volatile.u32 [%board+{Words.history.offset}], %history;
  membar.sys;
  add.u64 %begun, %begun, 1;
  st.volatile.u64 [%board+{Words.begun.offset}], %begun;
  ret;
}}
.visible .entry leave(.param .u64 board)
{{
  .reg .b64 %board, %ended;
  ld.param.u64 %board, [board];
  ld.volatile.u64 %ended, [%board+{Words.ended.offset}];
  add.u64 %ended, %ended, 1;
  st.volatile.u64 [%board+{Words.ended.offset}], %ended;
  ret;
}}
"""


@dataclasses.dataclass(frozen=True)
class Progress:
    """One rank's calls.

    Attributes:
      begun, ended: how many the device began and ended; equal where it is in none.
      latest: number -> signature of the last few.
      history: number -> hash over all signatures up to it, for some of those still on the board.
    """

    begun: int
    ended: int
    latest: dict[int, int]
    history: dict[int, int]


class Board(Protocol):
    """Where a device writes its progress."""

    def enter(self, stream: Address, signature: int) -> None:
        """From here on `stream` is in the call."""

    def leave(self, stream: Address) -> None:
        """From here on it is past it."""

    def read(self) -> Progress:
        """The progress so far; does not wait."""

    def recorded(self, recorder: Recorder) -> "Board":
        """A twin that makes `recorder` note the calls."""


class DeviceBoard:
    """The board of one GPU in one communicator."""

    def __init__(self, driver: Driver, ordinal: int):
        self._driver = driver
        self._ordinal = ordinal
        self._enter, self._leave = driver.load_kernels(ordinal, _PTX.encode(), "enter", "leave")
        self._address = driver.mapped_memory(ordinal, ctypes.sizeof(Words))
        self._words = Words.from_address(self._address)

    def enter(self, stream: Address, signature: int) -> None:
        arguments = ctypes.c_uint64(self._address), ctypes.c_uint32(signature)
        with self._driver.device(self._ordinal):
            self._driver.launch(self._enter, stream, *arguments)

    def leave(self, stream: Address) -> None:
        with self._driver.device(self._ordinal):
            self._driver.launch(self._leave, stream, ctypes.c_uint64(self._address))

    def read(self) -> Progress:
        return read(self._words)

    def recorded(self, recorder: Recorder) -> "DeviceBoard":
        twin = copy.copy(self)
        twin._driver = self._driver.recorded(recorder)
        return twin


def read(words: Words) -> Progress:
    """What a board says."""
    # `ended` first: read the other way round, a call that begins and ends between the two reads
    # would show more calls ended than begun.
    ended = words.ended
    begun = words.begun
    # Half of the slots: the device may be writing over the oldest ones as we read.
    oldest = max(0, begun - SLOTS // 2)
    recent = range(max(oldest, begun - 16), begun)
    sparse = range(-(-oldest // 256) * 256, begun, 256)
    return Progress(
        begun,
        ended,
        {n: words.slots[n % SLOTS].signature for n in recent},
        {n: words.slots[n % SLOTS].history for n in (*sparse, *recent)},
    )


_texts: dict[int, str] = {}
_texts_lock = threading.Lock()


def signature(text: str) -> int:
    """The 32-bit name of a call, equal in every process; `text_of` gives the text back here."""
    value = zlib.crc32(text.encode())
    if value not in _texts:
        with _texts_lock:
            _texts[value] = text
    return value


def text_of(value: int) -> str:
    """The text whose signature this is, as far as this process has named it."""
    return _texts.get(value, f"unknown call {value:#010x}")
