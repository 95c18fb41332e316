"""All orders in which GPUs may take the steps of calls by mailboxes: nothing hangs or is torn.

The steps are the code's own: what `Multiplier`, `Packer` and `Post` put on streams is noted, rank
by rank, and then gone through in every order that streams, events and words allow (two ranks), or
in many (more). Copies and kernels last: others may come between their beginning and their end.
"""

import ctypes
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import nccl_host
import nccl_kernels
from nccl_host import Device, in_threads
from pallas_collectives.nccl import (
    codec,
    copies,
    cublas,
    group,
    mailboxes,
    packed,
    posts,
    products,
    sums,
)
from pallas_collectives.nccl.products import GATHER, SCATTER, ProductWork

MAIN, X, ROOM, W, Y, TOKEN = 0, *(n << 60 for n in range(1, 6))
_RANK = 1 << 50
Step = tuple[str, Any]
Calls = Callable[[group.Group, "Noting"], None]


class Noting(nccl_host.Driver):
    """A driver that notes what each stream is to do."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[int, list[Step]] = {}
        self._events = itertools.count()
        self.call = 0

    def new_event(self, ordinal: int) -> Any:
        return [None]

    def record_again(self, event: Any, stream: int) -> None:
        event[0] = id(self), next(self._events)
        self._note(stream, "record", event[0])

    def wait_event(self, stream: int, event: Any) -> None:
        self._note(stream, "wait", event[0])

    def give_words(self, addresses: Sequence[int], stream: int) -> None:
        for address in addresses:
            self._note(stream, "give", address)

    def take_words(self, addresses: Sequence[int], stream: int) -> None:
        for address in addresses:
            self._note(stream, "take", address)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self.lasts("read", source, stream)
        self.lasts("write", target, stream)

    def clear(self, *_: Any) -> None:
        pass

    def launch(self, kernel: Any, stream: int, *given: Any, **sizes: int) -> None:
        """A kernel of `sums`, which adds what has come to what is there; or one of `codec`."""
        source, target, *more = (number.value or 0 for number in given)
        if kernel is None:
            self.lasts("read", source, stream)
            self.lasts("write", target, stream)
            return
        table = nccl_kernels.table(*more[:2])
        self.take_words([row.take for row in table if row.take], stream)
        for row in table if kernel.kind != codec.TAKE else ():
            behind = not (kernel.adds and row.source)  # the kernel's own source and target
            self.lasts("read", row.source + behind * source, stream)
            self.lasts("write", row.target + behind * target, stream)
        self.give_words([row.give for row in table if row.give], stream)

    def lasts(self, what: str, address: int | None, stream: int) -> None:
        """Notes what is done with a place in a mailbox, with an operand, or a block to be sent."""
        if address is not None and address < W:
            for when in ("begins", "ends"):
                self._note(stream, f"{what} {when}", (address, self.call))

    def _note(self, stream: int, what: str, which: Any) -> None:
        self.streams.setdefault(stream, []).append((what, which))


class _Noted:
    """cuBLASLt that multiplies nothing."""

    def prepare(self, driver: Noting, ordinal: int, product: Any) -> Any:
        twin = _Noted()
        twin._driver = driver  # type: ignore[attr-defined]
        return twin

    def call(self, *_: Any) -> None:
        pass

    def multiply(self, call: Any, x: Any, w: Any, c: Any, d: Any, stream: int) -> None:
        for what, address in (("read", x), ("read", c), ("write", d)):
            self._driver.lasts(what, address, stream)  # type: ignore[attr-defined]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Calls], "Machine"]:
    """(ranks, what each does) -> the machine before the first step."""
    monkeypatch.setattr(mailboxes, "_made", {})
    monkeypatch.setattr(cublas, "library", _Noted)
    monkeypatch.setattr(sums, "prepared", lambda *_: None)
    monkeypatch.setattr(codec, "prepared", lambda driver, ordinal, kernel: kernel)

    def run(n: int, calls: Calls) -> "Machine":
        runtimes, devices = nccl_host.runtimes(n), [Device(i, i, 0) for i in range(n)]
        drivers = [Noting() for _ in runtimes]
        for runtime, driver in zip(runtimes, drivers, strict=True):
            object.__setattr__(runtime, "driver", driver)
        make = functools.partial(group.create, devices, uses=(), timeout=20)
        made = in_threads(*(functools.partial(make, runtime=r) for r in runtimes))
        each = zip(made, drivers, strict=True)
        assert in_threads(*(functools.partial(calls, *pair) for pair in each)) == [None] * n
        return Machine([steps for driver in drivers for steps in driver.streams.values()])

    return run


def multiplied(kinds: str, n: int) -> Calls:
    """Calls of products, one after the other: "gsg" of a gather, a scatter and a gather.

    "s" cuts blocks in two parts, "w" scatters whole ones.
    """

    def calls(g: group.Group, driver: Noting) -> None:
        ((me, _),) = g.communicators.items()
        x, room = X + me * _RANK, ROOM + me * _RANK
        for kind in kinds:
            driver.call += 1
            gathers = kind == "g"
            cuts = 2 if kind == "s" else 1
            for part in range(1 if gathers else cuts * n):
                driver.lasts("write", x + part * 32 // cuts, MAIN)
            of = GATHER if gathers else SCATTER, n, 1, 2, (8,), (8,), False, "float16", "float16"
            work = ProductWork(*of, cuts=cuts)
            (multiplier,) = products.multipliers(g, work).values()
            multiplier.run(work, "products", [x, W], [Y] if gathers else [Y, room], MAIN)

    return calls


OVER_A_WIRE = {
    "x": packed.EXCHANGE,
    "+": packed.EXCHANGE,
    "a": packed.GATHER,
    "p": packed.PERMUTE,
    "r": packed.REDUCE,
}


def quantised(kinds: str, n: int) -> Calls:
    """Calls over a wire: exchanges, those whose blocks are added, gathers, permutes, sums."""

    def calls(g: group.Group, driver: Noting) -> None:
        ((me, _),) = g.communicators.items()
        x = X + me * _RANK
        for kind in kinds:
            driver.call += 1
            op = OVER_A_WIRE[kind]
            ring = tuple((i, (i + 1) % n) for i in range(n)) if op == packed.PERMUTE else ()
            of = op, n, 1024, "float16", "float16", "int8", 128, kind == "+", ring
            work = packed.PackedWork(*of)
            for block in range(n if op in (packed.EXCHANGE, packed.REDUCE) else 1):
                driver.lasts("write", x + block * work.numbers * 2, MAIN)
            (packer,) = packed.ready(g, work).values()
            packer.run(work, "over a wire", [x], [Y], MAIN)

    return calls


def exchanged(steps: str, n: int) -> Calls:
    """Exchanges of one mailbox: "s" starts one, "f" finishes the last."""

    def calls(g: group.Group, driver: Noting) -> None:
        ((me, _),) = g.communicators.items()
        others = tuple((me + distance) % n for distance in range(1, n))
        plan = copies.PushPlan(others, tuple(copies.Push(p, 0, 0, 8) for p in others), others, 8)
        (post,) = posts.get(g, 0, 8).values()
        x = X + me * _RANK
        for step in steps:
            if step == "s":
                driver.call += 1
                x += 16
                driver.lasts("write", x, MAIN)
                post.start(plan, "exchange", x, Y, TOKEN, MAIN)
            else:
                post.finish(plan, x, Y, MAIN)
                x -= 16  # whose memory may be another's from here on

    return calls


def test_tables_are_there_before_a_call_is_recorded(noted: Any) -> None:
    """All processes have agreed that there is room; one that failed later would be alone."""

    def calls(g: group.Group, driver: Noting) -> None:
        ((me, _),) = g.communicators.items()
        for op, adds in [(packed.REDUCE, False), (packed.EXCHANGE, True), (packed.GATHER, False)]:
            work = packed.PackedWork(op, 2, 1024, "float16", "float16", "int8", 128, adds)
            (packer,) = packed.ready(g, work).values()
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(driver, "put", None)
                packer.run(work, "over a wire", [X + me * _RANK], [Y], MAIN)

    noted(2, calls)


class Torn(AssertionError):
    """Something was read that had not come, or written while it was read."""


class Machine:
    """Where all streams are, and what words, events and mailboxes hold."""

    def __init__(self, streams: list[list[Step]]) -> None:
        self.streams, self.at = streams, [0] * len(streams)
        words = {which for steps in streams for what, which in steps if what == "take"}
        self.true = {w for w in words if ctypes.c_uint32.from_address(w).value}  # words and events
        self.held: dict[
            int, int
        ] = {}  # of a place: the call that wrote it, or minus that meanwhile
        self.reading: dict[int, int] = {}

    def after(self, i: int) -> "Machine":
        """The machine once stream i has taken its next step."""
        other = Machine.__new__(Machine)
        other.streams, other.at, other.true = self.streams, [*self.at], {*self.true}
        other.held, other.reading = {**self.held}, {**self.reading}
        other._take(i)
        return other

    def key(self) -> Any:
        return tuple(self.at), frozenset(self.true), tuple(sorted(self.held.items()))

    def ready(self) -> list[int]:
        """The streams whose next step can be taken."""
        follow = [i for i, at in enumerate(self.at) if at < len(self.streams[i])]
        waits = ("take", "wait")
        steps = [(i, *self.streams[i][self.at[i]]) for i in follow]
        return [i for i, what, which in steps if what not in waits or which in self.true]

    def check_over(self) -> None:
        over = all(at == len(steps) for at, steps in zip(self.at, self.streams, strict=True))
        assert over, [steps[at : at + 1] for at, steps in zip(self.at, self.streams, strict=True)]

    def _take(self, i: int) -> None:
        what, which = self.streams[i][self.at[i]]
        self.at[i] += 1
        if what == "give":
            if which in self.true:
                raise Torn(f"word {which} is given that nobody has taken")
            self.true.add(which)
        elif what == "record":
            self.true.add(which)
        elif what == "take":
            self.true.remove(which)
        elif what != "wait":
            self._touch(what, *which)

    def _touch(self, what: str, place: int, call: int) -> None:
        begins = what.endswith("begins")
        if what.startswith("write"):
            if self.reading.get(place):
                raise Torn(f"call {call} writes what is being read")
            self.held[place] = -call if begins else call
            return
        if self.held.get(place) != call:
            raise Torn(f"call {call} reads what holds {self.held.get(place)}")
        self.reading[place] = self.reading.get(place, 0) + (1 if begins else -1)


def check_every_order(machine: Machine) -> int:
    """Goes through all; how many states there are."""
    seen, following = {machine.key()}, [machine]
    while following:
        machine = following.pop()
        ready = machine.ready()
        if not ready:
            machine.check_over()
        for after in map(machine.after, ready):
            if (key := after.key()) not in seen:
                seen.add(key)
                following.append(after)
    return len(seen)


def check_some_orders(machine: Machine, count: int) -> None:
    """In each some streams are slow."""
    for seed in range(count):
        draw, now = random.Random(seed), machine
        slow = draw.sample(range(len(now.at)), len(now.at) // 2)
        while ready := now.ready():
            quick = [i for i in ready if i not in slow or draw.random() < 0.05]
            now = now.after(draw.choice(quick or ready))
        now.check_over()


PRODUCTS, EXCHANGES = ["ggg", "sss", "www", "gsg", "gwg", "ssgg"], ["sfsfsf", "ssf", "sfss"]
WIRES = ["xxx", "+++", "aaa", "ppp", "x+ap", "rr", "rxr", "arr"]


def made(calls: str, n: int) -> Calls:
    """What letters stand for."""
    if set(calls) <= OVER_A_WIRE.keys():
        return quantised(calls, n)
    return (exchanged if "f" in calls else multiplied)(calls, n)


@pytest.mark.parametrize("calls", [*PRODUCTS, *EXCHANGES, *WIRES])
def test_two_gpus_in_every_order(calls: str, noted: Any) -> None:
    """Products, exchanges that are finished or not, and what goes over a wire."""
    assert check_every_order(noted(2, made(calls, 2))) > 100


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("calls", [*PRODUCTS, *EXCHANGES, *WIRES])
def test_more_gpus_in_many_orders(calls: str, n: int, noted: Any) -> None:
    check_some_orders(noted(n, made(calls, n)), 60)


@pytest.mark.parametrize("fault", ["take_words", "give_words", "wait_event"])
@pytest.mark.parametrize(
    "calls",
    ["gg", "sfsf", "ww", "xx", "++", "pp", "rr", pytest.param("ss", marks=pytest.mark.full)],
)
def test_a_step_that_is_left_out_is_noticed(
    calls: str, fault: str, noted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults: each word and event but those that nothing follows, left out once."""
    whole = getattr(Noting, fault)
    missed = 0
    for number in itertools.count():
        count = itertools.count()

        def faulty(
            self: Noting, *args: Any, number: int = number, count: Iterator[int] = count
        ) -> None:
            nothing = args[0] == []  # no words
            if self.first and not nothing and next(count) == number:  # type: ignore[attr-defined]
                return
            whole(self, *args)

        monkeypatch.setattr(Noting, fault, faulty)

        def run(g: group.Group, driver: Noting) -> None:
            driver.first = 0 in g.communicators  # type: ignore[attr-defined]
            made(calls, 2)(g, driver)

        machine = noted(2, run)
        if next(count) <= number:
            break  # all have been left out
        try:
            check_every_order(machine)
            missed += 1
        except AssertionError:
            pass
    assert number > 2 and missed <= 2
