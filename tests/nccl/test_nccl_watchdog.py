"""Who is missing, who disagrees, and that the group ends within its time."""

import ctypes
import time

import numpy as np
import pytest

import nccl_host
from nccl_host import Device, HostBoard, in_threads
from nccl_wire import WireError
from pallas_collectives.nccl import group, progress, watchdog
from pallas_collectives.nccl.communicator import Messages, exchange
from pallas_collectives.nccl.errors import CallError, CommunicatorError, PeerError
from pallas_collectives.nccl.watchdog import RankReport


def report(calls, ended=None):
    """The report of a rank that made `calls`; all have ended but for the last, unless told."""
    board = HostBoard()
    for call in calls:
        board.enter(0, progress.signature(call))
        board.leave(0)
    board.words.ended = len(calls) if ended is None else ended
    return watchdog._report(board)


def test_the_board_keeps_the_latest_calls_and_a_hash_of_all():
    board = HostBoard()
    for i in range(20000):
        board.enter(0, i)
        board.leave(0)
    seen = board.read()
    assert (seen.begun, seen.ended) == (20000, 20000)
    assert seen.latest == {n: n for n in range(19984, 20000)}
    assert min(seen.history) >= 20000 - progress.SLOTS // 2
    assert {n for n in seen.history if n < 19984} == set(range(16128, 19984, 256))


def test_words_have_the_layout_that_the_kernels_write():
    assert ctypes.sizeof(progress.Words) == 24 + 8 * progress.SLOTS
    assert progress.Words.history.offset == 16 and progress.Words.slots.offset == 24


def test_equal_histories_agree_and_so_does_one_that_is_behind():
    calls = ["a", "b", "c"]
    assert watchdog.disagreement({0: report(calls), 1: report(calls), 2: report(calls[:2])}) is None


def test_disagreement_names_the_first_different_call_and_who_made_which():
    finding = watchdog.disagreement(
        {0: report(["a", "b"]), 1: report(["a", "c", "d"]), 2: report(["a", "b"])}
    )
    assert finding.sequence == 1 and finding.missing == ()
    assert "number 1: b by ranks [0, 2]; c by ranks [1]" in finding.what


def test_an_early_difference_still_shows_after_many_equal_calls():
    many = [f"call {i % 7}" for i in range(1000)]
    finding = watchdog.disagreement({0: report(["a", *many]), 1: report(["b", *many])})
    assert finding is not None and finding.sequence <= 256


def test_absence_names_who_has_not_come_and_who_is_silent():
    stuck = report(["a", "b"], ended=1)
    reports = {0: stuck, 1: report(["a"]), 2: stuck}
    finding = watchdog.absence(stuck, reports, 4, silent={3})
    assert (finding.call, finding.sequence, finding.missing) == ("b", 1, (1, 3))
    assert "ranks [1] have not come" in finding.what
    assert "ranks [3] no longer answer" in finding.what


def test_absence_where_all_came_blames_no_rank():
    stuck = report(["a"], ended=0)
    finding = watchdog.absence(stuck, {0: stuck, 1: stuck}, 2, set())
    assert finding.missing == () and "all ranks came" in finding.what


def test_a_stall_is_one_call_for_long_not_many_calls():
    stall = watchdog.Stall()
    assert stall.age(0, 1, 0, now=0.0) == 0
    assert stall.age(0, 1, 0, now=5.0) == 5
    assert stall.age(0, 2, 1, now=6.0) == 0, "another call: begin anew"
    assert stall.age(0, 2, 1, now=8.0) == 2
    assert stall.age(0, 2, 2, now=9.0) == 0
    assert stall.age(0, 3, 2, now=10.0) == 0


def test_a_rank_that_ended_more_calls_than_it_began_is_in_none():
    """Two of its streams may begin calls at once, and only one be counted."""
    stall = watchdog.Stall()
    assert [stall.age(0, 1, 2, now) for now in (0.0, 9.0)] == [0, 0]


def test_reports_survive_the_store():
    import dataclasses
    import json

    mine = report(["a", "b"], ended=1)
    fields = json.loads(json.dumps(dataclasses.asdict(mine)))
    assert watchdog._parsed(fields) == mine and isinstance(mine, RankReport)


def groups_of_processes(n, seconds):
    runtimes = nccl_host.runtimes(n)
    devices = [Device(i, i, 0) for i in range(n)]
    return in_threads(
        *(
            lambda p=p: group.create(devices, runtime=runtimes[p], timeout=10, watchdog=seconds)
            for p in range(n)
        )
    )


def gather(g, count=1, dtype="int32"):
    ((rank, c),) = g.communicators.items()
    x, y = np.full(count, rank, dtype), np.zeros((c.size, count), dtype)
    c.all_gather(x.ctypes.data, y.ctypes.data, count, dtype, 0)
    return y


def test_a_peer_that_does_not_come_becomes_an_error_that_names_it_everywhere():
    groups = groups_of_processes(3, 0.6)
    assert all(
        isinstance(y, np.ndarray) for y in in_threads(*(lambda g=g: gather(g) for g in groups))
    )
    begin = time.monotonic()
    results = in_threads(lambda: gather(groups[0]), lambda: gather(groups[1]))
    assert time.monotonic() - begin < 6
    for error in results:
        assert isinstance(error, PeerError)
        assert error.missing == (2,) and error.sequence == 1
        assert error.call == "all_gather int32 1"
        assert "group 'default' of devices [0, 1, 2]" in str(error)
    deadline = time.monotonic() + 5  # the one that slept hears of it from the others
    while groups[2].usable and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(PeerError, match="ranks \\[2\\] have not come"):
        gather(groups[2])
    aborted = groups[0].runtime.library.bindings.aborted
    while len(aborted) < 3 and time.monotonic() < deadline:  # marked first, aborted next
        time.sleep(0.05)
    assert len(aborted) == 3


@pytest.mark.parametrize(
    ("count", "dtype", "named"),
    [(2, "int32", "all_gather int32 2"), (1, "float32", "all_gather float32 1")],
)
def test_another_count_or_dtype_is_named(count, dtype, named):
    groups = groups_of_processes(2, 2.0)
    results = in_threads(lambda: gather(groups[0]), lambda: gather(groups[1], count, dtype))
    time.sleep(1.0)  # the wire moves another dtype of equal size without complaint: found after
    for g, result in zip(groups, results, strict=True):
        with pytest.raises(PeerError, match="different calls as number 0"):
            g.check()
        assert named in str(g.reason), (result, g.reason)


def test_another_op_is_named():
    groups = groups_of_processes(2, 2.0)

    def reduce(g):
        ((_, c),) = g.communicators.items()
        x = np.zeros(1, "int32")
        c.all_reduce(x.ctypes.data, x.ctypes.data, 1, "int32", "sum", 0)

    in_threads(lambda: gather(groups[0]), lambda: reduce(groups[1]))
    time.sleep(1.0)
    with pytest.raises(
        PeerError, match=r"all_gather int32 1 by ranks \[0\]; all_reduce sum int32 1 by ranks \[1\]"
    ):
        groups[0].check()


def test_a_process_that_dies_is_silent_and_named():
    groups = groups_of_processes(2, 0.6)
    groups[1]._watchdog.stop()  # as death would
    (error,) = in_threads(lambda: gather(groups[0]))
    assert isinstance(error, PeerError) and error.missing == (1,)
    assert "no longer answer" in str(error)


def test_ncclls_own_asynchronous_error_fails_the_group():
    groups = groups_of_processes(2, 5.0)
    wire = groups[0].runtime.library.bindings
    wire.async_status[groups[0].communicators[0].handle] = 6
    deadline = time.monotonic() + 5
    while any(g.usable for g in groups) and time.monotonic() < deadline:
        time.sleep(0.05)
    for g in groups:
        with pytest.raises(PeerError, match="remote process exited"):
            g.check()


def boarded():
    """A group of two ranks of one process, whose boards no watchdog reads."""
    (runtime,) = nccl_host.runtimes()
    g = group.create([Device(i, 0, i) for i in range(2)], runtime=runtime)
    for c in g.communicators.values():
        c.board = HostBoard()
    return g


@pytest.mark.parametrize("status, ended", [(5, 1), (6, 0)])
@pytest.mark.parametrize("function", ["all_gather", "send", "group_end"])
def test_a_call_that_nccl_refuses_is_over_and_one_left_half_done_is_not(
    function, status, ended, monkeypatch
):
    def refuse(*_):
        raise WireError(status)

    with pytest.raises(CallError, match=f"returned {status}"), boarded() as g:
        calling = list(g.communicators.values())
        monkeypatch.setattr(g.runtime.library.bindings, function, refuse)
        if function == "all_gather":
            del calling[1:]
            calling[0].all_gather(0, 0, 1, "int8", 0)
        else:
            exchange([Messages(c, [(0, 0, 1 - c.rank)], [], 0) for c in calling], "int8", "both")
    progresses = [c.board.read() for c in calling]
    assert [(p.begun, p.ended) for p in progresses] == [(1, ended)] * len(calling)


def test_an_exchange_begins_on_all_communicators_or_on_none():
    with pytest.raises(CommunicatorError, match="gone"), boarded() as g:
        first, second = g.communicators.values()
        second.disable(CommunicatorError("gone"))
        exchange([Messages(c, [], [], 0) for c in (first, second)], "int8", "both")
    assert first.board.read().begun == 0


def test_new_groups_work_after_one_failed_and_a_quiet_one_is_left_alone():
    runtimes = nccl_host.runtimes(2)
    devices = [Device(i, i, 0) for i in range(2)]

    def create(p):
        return group.create(devices, runtime=runtimes[p], timeout=10, watchdog=0.3)

    first = in_threads(lambda: create(0), lambda: create(1))
    (error,) = in_threads(lambda: gather(first[0]))
    assert isinstance(error, PeerError)
    second = in_threads(lambda: create(0), lambda: create(1))
    time.sleep(1.0)
    for y in in_threads(lambda: gather(second[0]), lambda: gather(second[1])):
        np.testing.assert_array_equal(y, [[0], [1]])
    assert all(g.usable for g in second)
    in_threads(*(g.close for g in second))


def test_off_it_costs_nothing():
    (runtime,) = nccl_host.runtimes()
    g = group.create([Device(0, 0, 0)], runtime=runtime)
    assert g._watchdog is None and g.communicators[0].board is None
    g.close()
