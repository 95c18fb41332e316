"""The store, and what stands on it, between real processes and within one."""

import time

import jax
import pytest

from nccl_host import HostBoard
from pallas_collectives.nccl import progress, rendezvous, store
from pallas_collectives.nccl.errors import NcclError, RendezvousError
from pallas_collectives.nccl.watchdog import Watchdog
from processes import Processes

ALL = (0, 1, 2)


@pytest.fixture(scope="module")
def processes():
    with Processes(3) as started:
        yield started


def unwrapped(outcomes):
    return [outcome.unwrap() for outcome in outcomes]


def exercise(key, processes):
    """Every method, between all processes; returns what this one saw."""
    s, me = store.default(), jax.process_index()
    s.set(f"{key}/{me}", "old")
    s.set(f"{key}/{me}", f"from {me}")
    s.barrier(f"{key} written", 20, processes)
    seen = s.entries(f"{key}/")
    s.barrier(f"{key} read", 20, processes)
    s.delete(f"{key}/{me}")
    s.delete(f"{key}/never there")
    s.barrier(f"{key} deleted", 20, processes)
    return type(s).__name__, seen, s.entries(f"{key}/")


def test_every_process_sees_what_the_others_set(processes):
    want = {f"k/{p}": f"from {p}" for p in ALL}
    for kind, seen, left in unwrapped(processes.run(exercise, "k", ALL, timeout=60)):
        assert (kind, seen, left) == ("DistributedStore", want, {})


def test_a_lone_process_has_the_same():
    assert exercise("k", (0,)) == ("LocalStore", {"k/0": "from 0"}, {})


def wait_in_vain():
    s, begin = store.default(), time.monotonic()
    with pytest.raises(RendezvousError, match=r"nothing came under 'nowhere' in 0\.3 s"):
        s.get("nowhere", 0.3)
    if jax.process_index() < 2:
        with pytest.raises(RendezvousError, match="did not all come to 'lonely'"):
            s.barrier("lonely", 0.5, ALL)
    return time.monotonic() - begin


def test_waiting_ends_in_time(processes):
    assert all(seconds < 10 for seconds in unwrapped(processes.run(wait_in_vain, timeout=60)))


def meet(key, terms):
    me = jax.process_index()
    return rendezvous.meet(store.default(), key, me, ALL, 20, lambda: bytes([7]) * 128, terms[me])


def test_processes_meet_again_and_again(processes):
    first = unwrapped(processes.run(meet, "group", ["t"] * 3, timeout=60))
    second = unwrapped(processes.run(meet, "group", ["t"] * 3, timeout=60))
    assert {m.unique_id for m in first + second} == {bytes([7]) * 128}
    assert len({m.nonce for m in first}) == 1 and len({m.nonce for m in first + second}) == 2


def test_processes_with_other_terms_are_told(processes):
    outcomes = processes.run(
        meet, "terms", ["NCCL 2.28.9", "NCCL 2.29.1", "NCCL 2.28.9"], timeout=60
    )
    for outcome in outcomes:
        assert isinstance(outcome.error, RendezvousError)
        assert "in processes {1: 'NCCL 2.29.1'}" in str(outcome.error)


def watched(key, calls, seconds, end=True):
    """Makes `calls[me]` under a watchdog; unless `end`, 0 and 1 stay in their last one."""
    me, board, errors = jax.process_index(), HostBoard(), []
    watchdog = Watchdog(
        boards={me: board}, owners=ALL, process=me, title="group 'g'", store=store.default(),
        key=key, timeout=1.0, fail=errors.append, async_error=lambda: None,
    )  # fmt: skip
    watchdog.start()
    for call in calls[me]:
        board.enter(0, progress.signature(call))
        board.leave(0)
    if not end and me != 2:
        board.words.ended -= 1
    deadline = time.monotonic() + seconds
    while not errors and time.monotonic() < deadline:
        time.sleep(0.05)
    watchdog.stop()
    return [(str(e), e.sequence, e.missing) for e in errors]


def test_watchdogs_name_the_absent_process_in_every_process(processes):
    calls = [["a", "b"], ["a", "b"], ["a"]]
    for error in unwrapped(processes.run(watched, "absent", calls, 15, False, timeout=60)):
        ((text, sequence, missing),) = error
        assert (sequence, missing) == (1, (2,))
        assert "group 'g', call 1 (b): ranks [2] have not come to it" in text


def test_watchdogs_compare_calls_that_all_ended(processes):
    calls = [["a", "b"], ["a", "c"], ["a", "b"]]
    for error in unwrapped(processes.run(watched, "differ", calls, 15, timeout=60)):
        ((text, sequence, missing),) = error
        assert (sequence, missing) == (1, ())
        assert "c by ranks [1]" in text and "b by ranks [" in text  # as soon as two differ


@pytest.mark.full
def test_watchdogs_of_a_group_that_is_well_say_nothing(processes):
    calls = [["a", "b"]] * 3
    assert unwrapped(processes.run(watched, "well", calls, 3, timeout=60)) == [[], [], []]


class Gone(store.LocalStore):
    """A store whose host has died."""

    def set(self, *_):
        raise ConnectionError("the coordinator is gone")

    delete = set


@pytest.mark.full
def test_a_store_that_is_gone_fails_the_group_and_not_the_watchdog():
    errors: list[NcclError] = []

    def fail(error):
        watchdog.stop()  # as a group does
        errors.append(error)

    watchdog = Watchdog(
        boards={0: HostBoard()}, owners=(0,), process=0, title="group 'g'", store=Gone(), key="k",
        timeout=0.5, fail=fail, async_error=lambda: None,
    )  # fmt: skip
    watchdog.start()
    deadline = time.monotonic() + 5
    while not errors and time.monotonic() < deadline:
        time.sleep(0.02)
    (error,) = errors
    assert "cannot reach the other processes: the coordinator is gone" in str(error)
