"""Exchanges by copy engines, over a wire of host memory: what an abort leaves alone."""

import ctypes
import functools
import threading
from collections.abc import Callable

import pytest

import nccl_host
from nccl_host import Device, in_threads
from pallas_collectives.nccl import copies, group, tape
from pallas_collectives.nccl.errors import CommunicatorError


def test_after_an_abort_nothing_is_pushed_to_where_a_result_lay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank begins alone; what it knows of the other is of an exchange long done."""
    monkeypatch.setattr(copies, "_copiers", {})
    (runtime,) = nccl_host.runtimes()
    made = group.create([Device(i, 0, i) for i in range(2)], runtime=runtime)
    copier, slot = copies.slots(made, "one")[0]
    operand, result, former = (ctypes.create_string_buffer(c * 8, 8) for c in (b"o", b"r", b"f"))
    copier._meeting.results[:] = [ctypes.addressof(former)] * 4
    word = ctypes.c_uint32()
    plan = copies.PushPlan((1,), (copies.Push(1, 0, 0, 8),))

    def lonely() -> None:
        places = (ctypes.addressof(place) for place in (operand, result, word))
        copier.start(slot, plan, "alone", *places, 1)

    def abort() -> None:
        while not copier._meeting.turns[0]:
            threading.Event().wait(0.01)
        made.abort()

    waiting, _ = in_threads(lonely, abort)
    assert former.raw == b"f" * 8
    assert isinstance(waiting, CommunicatorError) and "was aborted" in str(waiting)


def test_a_watchdog_sees_an_exchange_on_xlas_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where that waits for it: counts on two streams would be lost, and in no one order."""
    monkeypatch.setattr(copies, "_copiers", {})
    (runtime,) = nccl_host.runtimes()
    made = group.create([Device(i, 0, i) for i in range(2)], runtime=runtime, watchdog=20)
    xla, told = -1, []  # no stream of the driver's

    def wait_event(stream: int, event: object) -> None:
        boards = [c.board.read() for c in made.communicators.values() if c.board]
        if stream == xla:
            told.append(max(board.begun - board.ended for board in boards))

    monkeypatch.setattr(runtime.driver, "wait_event", wait_event)
    for communicator in made.communicators.values():
        for name in ("enter", "leave"):
            write = getattr(communicator.board, name)

            def note(stream: int, *call: int, write: Callable[..., None] = write) -> None:
                told.append(stream)
                write(stream, *call)

            monkeypatch.setattr(communicator.board, name, note)

    def exchange(me: int) -> None:
        copier, slot = copies.slots(made, "one")[me]
        plan = copies.PushPlan((1 - me,), (copies.Push(1 - me, 0, 0, 8),))
        held = [ctypes.create_string_buffer(8) for _ in range(3)]
        operand, result, token = map(ctypes.addressof, held)
        copier.start(slot, plan, "one", operand, result, token, xla)
        copier.finish(slot, plan, operand, result, xla)

    assert in_threads(*(functools.partial(exchange, me) for me in range(2))) == [None] * 2
    assert sorted(told) == [xla] * 8 + [1] * 2
    made.close()


@pytest.mark.parametrize("unusable", [0, 1])
def test_a_meeting_that_is_broken_off_fails_in_c_too(unusable: int) -> None:
    meet = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 6)(tape.address("pc_meet"))
    turns, results = (ctypes.c_uint64 * 2)(0, 1 - unusable), (ctypes.c_uint64 * 4)()
    word = ctypes.c_int32(unusable)
    places = [ctypes.addressof(place) for place in (turns, results, word)]
    assert meet(places[0], places[1], 0, 2, 7, places[2]) == unusable
