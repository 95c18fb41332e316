"""Mailboxes between processes, for which threads stand: agreement, words, and aborts."""

import ctypes
import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import nccl_host
from nccl_host import Device, in_threads
from pallas_collectives.nccl import copies, cublas, group, mailboxes, posts, products, tape
from pallas_collectives.nccl.errors import CallError, CommunicatorError, NcclError, RendezvousError
from pallas_collectives.nccl.mailboxes import MailboxError
from pallas_collectives.nccl.products import GATHER, SCATTER, ProductWork

SIZE = 3


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host = nccl_host.HostProducts()
    monkeypatch.setattr(mailboxes, "_made", {})
    monkeypatch.setattr(cublas, "library", lambda: host)


def groups(processes: int = SIZE, **options: Any) -> list[group.Group]:
    """One of each process, which has one device of SIZE."""
    devices = [Device(i, i, 0) for i in range(processes)]
    options = {"timeout": 20} | options
    make = functools.partial(group.create, devices, name="all", uses=(), **options)
    made = in_threads(*(functools.partial(make, runtime=r) for r in nccl_host.runtimes(processes)))
    assert all(isinstance(g, group.Group) for g in made), made
    return made


def in_each(made: list[group.Group], call: Any) -> list[Any]:
    return in_threads(*(functools.partial(call, g) for g in made))


def box(g: group.Group, **options: Any) -> Any:
    (found,) = mailboxes.get(g, "one", 2, 100, **options).values()
    return found


def test_processes_reach_each_others_mailboxes() -> None:
    boxes = in_each(groups(), box)
    for me, mine in enumerate(boxes):
        assert mine.data == {rank: boxes[rank].data[rank] for rank in range(SIZE)}
        ready = [ctypes.c_uint32.from_address(mine.ready(me, of)).value for of in range(SIZE)]
        assert ready == [1] * SIZE
    assert len({*boxes[0].data.values()}) == SIZE


def test_they_are_made_once_for_each_purpose_and_size() -> None:
    made = groups(2)

    def several(g: group.Group) -> Any:
        sizes = (1, 1 << 20, (1 << 20) + 1)
        same, also, larger = (mailboxes.get(g, "a", 1, size) for size in sizes)
        return same is also, larger is same, mailboxes.get(g, "b", 1, 1) is same

    assert in_each(made, several) == [(True, False, False)] * 2


@pytest.mark.parametrize("step", ["allocate", "opened"])
def test_if_one_fails_all_fail_and_say_where(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = groups()
    driver = made[1].communicators[1].driver

    def fails(*args: Any) -> Any:
        raise NcclError("no room")

    monkeypatch.setattr(driver, step, fails)
    what = "give memory to its peers" if step == "allocate" else "reach its peers' memory"
    for _ in range(2):  # and remember it
        for error in in_each(made, box):
            assert isinstance(error, MailboxError)
            assert str(error) == f"GPU 1 cannot {what}: no room"


@pytest.mark.parametrize("late", [0, 1])
def test_who_has_waited_in_vain_stands_by_what_it_told(late: int) -> None:
    """The late process has gone on with that, and may have written to what it was told of."""
    made = groups(2, timeout=3)
    early = made[1 - late]
    with pytest.raises(RendezvousError, match="not every process has lowered"):
        box(early)

    def again() -> Any:
        time.sleep(0.5)  # the other comes between
        return box(early)

    own, other = in_threads(again, functools.partial(box, made[late]))
    assert own.data == other.data and own.words == other.words
    assert len(early.communicators[1 - late].before_abort) == 1


def test_mailboxes_of_a_group_are_made_while_others_wait_for_a_process() -> None:
    waiting, *_ = groups(2, timeout=2)
    (alone,) = groups(1)

    def made() -> float:
        time.sleep(0.2)
        begin = time.monotonic()
        mailboxes.agreed(alone, "step", lambda rank: None, "cannot")
        box(alone)
        return time.monotonic() - begin

    waited, seconds = in_threads(functools.partial(box, waiting), made)
    assert isinstance(waited, RendezvousError) and seconds < 1


def test_exchanges_of_a_size_have_mailboxes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of the mailbox, not of the exchange: two that share one do so at one number."""
    monkeypatch.setattr(posts, "_ROOM", 5 << 20)
    made = groups(2)

    def of(g: group.Group) -> list[Any]:
        return [next(iter(posts.get(g, n, size).values())) for n in (0, 5) for size in (1, 1 << 20)]

    for found in in_each(made, of):
        assert len({*found}) == 1


def test_gpus_of_another_host_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their handles could mean other memory here."""
    hosts = iter(["here", "here", "there"])
    monkeypatch.setattr(mailboxes, "_host", lambda: next(hosts))
    told = {str(error) for error in in_each(groups(), box)}
    (why,) = told
    assert why.count("cannot reach its peers' memory: rank") == 3 and "on another host" in why


def run_products(kind: str, made: list[group.Group], calls: int, cuts: int = 1) -> list[np.ndarray]:
    """The results of the last of some calls, by rank; each call has operands of its own."""
    rows, depth, columns = 4, 8, 16
    work = ProductWork(
        kind, SIZE, 1, rows, (depth,), (columns,), False, "float16", "float16", cuts=cuts
    )
    gathers = kind == GATHER

    def multiply(g: group.Group) -> np.ndarray:
        ((rank, _),) = g.communicators.items()
        (multiplier,) = products.multipliers(g, work).values()
        for call in range(calls):
            x, w = operands(rank, call, rows * (1 if gathers else SIZE), depth, columns)
            y = np.zeros((SIZE * rows if gathers else rows, columns), np.float16)
            room = np.zeros((SIZE, rows, columns), np.float16)
            outputs = [y] if gathers else [y, room]
            addresses = ([a.ctypes.data for a in some] for some in ((x, w), outputs))
            multiplier.run(work, "products", *addresses, 1)
        return y

    return in_each(made, multiply)


def operands(rank: int, call: int, rows: int, depth: int, columns: int) -> list[np.ndarray]:
    draw = np.random.default_rng([rank, call])
    shapes = (rows, depth), (depth, columns)
    return [draw.integers(-4, 5, size=shape).astype(np.float16) for shape in shapes]


def test_products_between_processes() -> None:
    made, calls = groups(), 5
    gathered = run_products(GATHER, made, calls)
    x = np.concatenate([operands(rank, calls - 1, 4, 8, 16)[0] for rank in range(SIZE)])
    for rank, got in enumerate(gathered):
        np.testing.assert_array_equal(got, x @ operands(rank, calls - 1, 4, 8, 16)[1])
    terms = (operands(rank, calls - 1, 4 * SIZE, 8, 16) for rank in range(SIZE))
    total = sum(x @ w for x, w in terms)
    for cuts in (1, 2):
        scattered = np.concatenate(run_products(SCATTER, made, calls, cuts))
        np.testing.assert_array_equal(scattered, total)


def test_if_one_cannot_multiply_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process alike: one that ran the collective apart would wait for the others."""
    made, prepared = groups(), cublas.prepared

    def without_room(driver: Any, ordinal: int, product: cublas.Product) -> Any:
        if driver is made[1].communicators[1].driver:
            raise NcclError("no room")
        return prepared(driver, ordinal, product)

    monkeypatch.setattr(cublas, "prepared", without_room)
    work = ProductWork(GATHER, SIZE, 1, 4, (8,), (16,), False, "float16", "float16")
    for _ in range(2):
        for error in in_each(made, lambda g: products.ready(g, work)):
            assert isinstance(error, MailboxError)
            assert str(error) == "GPU 1 cannot multiply: no room"


def test_exchanges_between_processes() -> None:
    """Two mailboxes in turn; the operand of each exchange is another."""
    made, n = groups(), SIZE

    def exchange(g: group.Group) -> np.ndarray:
        ((me, _),) = g.communicators.items()
        others = [(me + distance) % n for distance in range(1, n)]
        pushes = tuple(copies.Push(p, 8 * p, 8 * me, 8) for p in range(n))
        plan = copies.PushPlan(tuple(others), pushes, tuple(8 * p for p in others), 8)
        token, results = np.ones(1, np.int32), np.zeros((6, n), np.int64)
        for number, result in enumerate(results):
            (post,) = posts.get(g, number % 2, 8).values()
            operand = np.arange(n) * 100 + 10 * me + number
            address = operand.ctypes.data
            post.start(plan, "exchange", address, result.ctypes.data, token.ctypes.data, 1)
            post.finish(plan, address, result.ctypes.data, 1)
        assert token[0] == 0
        return results

    for me, results in enumerate(in_each(made, exchange)):
        want = [[100 * me + 10 * p + number for p in range(n)] for number in range(6)]
        np.testing.assert_array_equal(results, want)


def test_a_watchdog_sees_where_xla_waits_for_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only where it is started, which waits on a stream of its own."""
    made, waits = groups(2, watchdog=20), []

    def exchange(g: group.Group) -> None:
        ((me, communicator),) = g.communicators.items()
        peer, board = 1 - me, communicator.board
        wait_event = communicator.driver.wait_event

        def wait(stream: int, event: Any) -> None:
            if stream == xla:
                seen = board.read()
                waits.append(seen.begun - seen.ended)
            wait_event(stream, event)

        plan = copies.PushPlan((peer,), (copies.Push(peer, 0, 8 * me, 8),), (8 * peer,), 8)
        token, operand, result = np.ones(1, np.int32), np.arange(1), np.zeros(2, np.int64)
        addresses = operand.ctypes.data, result.ctypes.data
        (post,) = posts.get(g, 0, 8).values()
        xla = -1  # no stream of the driver's
        monkeypatch.setattr(communicator.driver, "wait_event", wait)
        post.start(plan, "exchange", *addresses, token.ctypes.data, xla)
        post.finish(plan, *addresses, xla)
        assert board.read().begun == board.read().ended

    assert in_each(made, exchange) == [None] * 2
    assert waits == [1, 1]


@pytest.mark.parametrize("recorded", [False, True])
def test_work_that_stops_half_way_ends_all_unless_it_is_only_noted(
    recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would give the words that others wait for, nor tell the watchdog that it is over."""
    (runtime,) = nccl_host.runtimes()
    with pytest.raises(CallError), group.create([Device(0, 0, 0)], runtime=runtime) as made:
        (post,) = posts.get(made, 0, 8).values()

        def no_room(*_: Any) -> None:
            raise CallError("cuMemsetD8Async", 2, "out of memory")

        def start(post: Any) -> None:
            monkeypatch.setattr(post.driver, "clear", no_room)
            post.start(copies.PushPlan((), ()), "exchange", 0, 0, 0, 1)

        try:
            tape.record(post, start) if recorded else start(post)
        finally:
            assert made.usable == recorded


def test_an_abort_ends_what_waits_for_a_peer() -> None:
    """One rank begins alone; its program ends with an error, and does not hang."""
    made = groups(2)
    boxes = in_each(made, functools.partial(box, free=False))
    driver = made[0].communicators[0].driver

    def lonely() -> None:
        driver.take_words([boxes[0].ready(0, 1)], 1)  # which the other never gives
        made[0].communicators[0].check()

    waiting, _ = in_threads(lonely, made[0].abort)
    assert isinstance(waiting, CommunicatorError) and "was aborted" in str(waiting)


def test_a_word_that_is_not_awaited_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: who does not wait for what comes multiplies what was there before."""
    made = groups()
    slow = made[2].communicators[2].driver
    copy, take = slow.copy, nccl_host.Driver.take_words

    def late(*args: Any) -> None:
        time.sleep(0.2)
        copy(*args)

    def hasty(self: Any, addresses: Sequence[int], stream: int) -> None:
        if all(ctypes.c_uint32.from_address(address).value for address in addresses):
            take(self, addresses, stream)

    monkeypatch.setattr(slow, "copy", late)
    monkeypatch.setattr(
        made[0].communicators[0].driver, "take_words", functools.partial(hasty, slow)
    )
    got = run_products(GATHER, made, 1)[0]
    x = np.concatenate([operands(rank, 0, 4, 8, 16)[0] for rank in range(SIZE)])
    assert (got != x @ operands(0, 0, 4, 8, 16)[1]).any()
