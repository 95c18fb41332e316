"""pallas_collectives.multihost against jax.experimental.multihost_utils, on real processes."""

import contextlib
import functools
import itertools
import signal
import time

import jax
import numpy as np
import pytest

import multihost_failing as failing
import multihost_inside as inside
import shared_gpu
from processes import Processes

TIMEOUT = 60.0  # of a run that should take a second or two


@contextlib.contextmanager
def pool(param):
    platform, count = param
    if platform == "gpu":
        count = min(count, shared_gpu.ranks())
        if count < 2:
            pytest.skip("needs two GPUs, or one and SHARED_GPU=2")
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with Processes(count, devices=2 if platform == "cpu" else None, env=env) as processes:
        values(processes, inside.ready)
        yield processes


POOLS = [
    ("cpu", 2),
    pytest.param(("cpu", 4), marks=pytest.mark.full),
    pytest.param(("gpu", 4), marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def pools():
    """Processes of each kind, started for the first test that wants them, whichever that is."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda param: stack.enter_context(pool(param)))


@pytest.fixture(params=POOLS, ids=lambda p: f"{p[0]}{p[1]}")
def processes(request, pools):
    return pools(request.param)


@pytest.fixture(params=POOLS, ids=lambda p: f"{p[0]}{p[1]}")
def doomed(request):
    """Processes that do not outlive their test."""
    with pool(request.param) as processes:
        yield processes


def values(processes, function, *args, timeout=TIMEOUT, **kwargs):
    outcomes = processes.run(function, *args, timeout=timeout, **kwargs)
    return [outcome.unwrap() for outcome in outcomes]


def all_the_same(results):
    assert all(result == results[0] for result in results), results
    return results[0]


def assert_same_trees(mine, reference):
    assert jax.tree.structure(mine) == jax.tree.structure(reference)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(reference), strict=True):
        assert type(a) is type(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize("source", [None, 1])
@pytest.mark.parametrize("tree", inside.TREES)
def test_broadcast_equals_jax(processes, tree, source):
    for mine, reference in values(processes, inside.broadcast, tree, source):
        assert_same_trees(mine, reference)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("tree", inside.TREES)
def test_allgather_equals_jax(processes, tree, tiled):
    for mine, reference in values(processes, inside.allgather, tree, tiled):
        assert_same_trees(mine, reference)


@pytest.mark.parametrize("spec", inside.SPECS)
def test_allgather_of_a_global_array_equals_jax(processes, spec):
    for mine, reference in values(processes, inside.allgather_global, spec):
        assert_same_trees(mine, reference)


def test_values_arrive_bit_for_bit(processes):
    n = len(processes)
    for (broadcast, stacked, tiled), draw, rbg_stacked, rbg_tiled in values(
        processes, inside.exact_values
    ):
        assert broadcast["float64"].tobytes() == np.array([np.pi, -0.0, np.nan]).tobytes()
        assert stacked["float64"].tobytes() == broadcast["float64"].tobytes() * n
        assert stacked["int64"].tolist() == [2**40 + 1] * n
        assert tiled["text"].tolist() == ["left", "right"] * n
        assert draw == float(jax.random.uniform(jax.random.key(7)))
        assert stacked["key"].tolist() == tiled["key"].tolist()  # scalars are stacked either way
        assert stacked["key"].tolist() == [[0, 7 + rank] for rank in range(n)]
        assert (rbg_stacked, rbg_tiled) == ((n, 3), (3 * n,))


@pytest.mark.parametrize("chunk_bytes", [256, 4096, 1 << 20])
def test_large_trees_travel_in_bounded_chunks(processes, chunk_bytes):
    n, size = len(processes), 4000 + 999
    for broadcast, gathered, steps in values(processes, inside.chunks, chunk_bytes):
        assert all((leaf == 0).all() for leaf in broadcast)
        for leaf in gathered:
            assert (leaf == np.arange(n).reshape(n, *[1] * (leaf.ndim - 1))).all()
        for name, total in (("broadcast", size), ("allgather", size * n)):
            done = [0] + [step[0] for step in steps[name]]
            assert {step[1] for step in steps[name]} == {total}
            assert done[-1] == total
            assert all(0 < b - a <= chunk_bytes for a, b in itertools.pairwise(done))
            assert len(done) - 1 >= total / chunk_bytes


@pytest.mark.parametrize("spec", inside.SPECS)
def test_local_to_global_and_back_equals_jax(processes, spec):
    for shapes, (whole, whole_theirs, back, back_theirs), same in values(
        processes, inside.local_to_global, spec
    ):
        assert shapes[0] == shapes[1] and shapes[2] == shapes[3]
        assert jax.tree.all(same)
        assert shapes[2] == {"a": (8, 4), "b": (4, 8)}
        for mine, reference in ((whole, whole_theirs), (back, back_theirs)):
            jax.tree.map(np.testing.assert_array_equal, mine, reference)


def test_global_to_local_reshards(processes):
    for rank, (mine, reference) in enumerate(values(processes, inside.reshard)):
        np.testing.assert_array_equal(mine, reference, strict=True)
        columns = 8 // len(processes)
        whole = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
        np.testing.assert_array_equal(mine, whole[:, rank * columns : (rank + 1) * columns])


def test_keys_become_global_and_local_again(processes):
    results = values(processes, inside.convert_keys)
    everyone = np.concatenate([keys for (keys, _, _), _ in results])
    for (keys, back, gathered), shape in results:
        assert shape == (4 * len(processes),)
        np.testing.assert_array_equal(back, keys)
        np.testing.assert_array_equal(gathered, everyone)


def test_an_array_sharded_over_processes_is_refused_where_it_means_nothing(processes):
    broadcast, equal, stacked = all_the_same(values(processes, inside.sharded))
    assert "broadcast_one_to_all of leaf ['x']" in broadcast and "tiled=True" in broadcast
    assert "assert_equal of leaf ['x']" in equal
    assert "process_allgather(tiled=False) of leaf ['x']" in stacked and "tiled=True" in stacked


@pytest.mark.full
def test_processes_may_own_unequal_numbers_of_devices():
    with Processes(2, devices=[1, 3]) as processes:
        assert values(processes, inside.chunks_alike, 64) == [True, True]


@pytest.mark.parametrize("wait", ["sync_global_devices", "barrier"])
def test_nobody_passes_before_the_last_one_comes(processes, wait):
    came, left = zip(*values(processes, inside.arrive_apart, wait), strict=True)
    assert max(came) - min(came) > 0.25
    assert min(left) >= max(came)  # one clock for all processes of a host


@pytest.mark.parametrize("processes", POOLS[2:], ids=["gpu4"], indirect=True)
def test_the_devices_are_waited_for(processes):
    before, after, given, left = zip(*values(processes, inside.sync_behind_work), strict=True)
    assert not before[1] and all(after)
    assert min(left) > given[1]


def test_another_name_raises_everywhere(processes):
    results = values(processes, inside.other_name)
    name, at_fault, message = all_the_same([mine for mine, _ in results])
    assert (name, at_fault) == ("ProcessMismatchError", (1,))
    assert "step True" in message and "step False" in message
    assert all(reference[0] == "AssertionError" for _, reference in results)


@pytest.mark.full
def test_a_late_process_is_named_everywhere(processes):
    results = values(processes, inside.late)
    late, at_barrier, gathered = all_the_same(results)
    assert late[:2] == at_barrier[:2] == ("ProcessTimeoutError", (1,))
    assert "sync_global_devices('late'): process 1 did not come" in late[2]
    assert "barrier('late'): process 1 did not come" in at_barrier[2]
    assert gathered == list(range(len(processes)))


@pytest.mark.parametrize(
    "what, differs",
    [
        ("structure", ["leaf ['c']: float64[1]", "nothing more"]),
        ("dtype", ["leaf ['b']: float32[2,2]", "leaf ['b']: int32[2,2]"]),
        ("shape", ["leaf ['a']: float32[4]", "leaf ['a']: float32[3]"]),
    ],
)
def test_disagreement_is_shown_everywhere(processes, what, differs):
    errors, gathered = all_the_same(values(processes, inside.disagree, what))
    for name, at_fault, message in errors:
        assert (name, at_fault) == ("ProcessMismatchError", (1,))
        assert f"process 1: {differs[0]}" in message
        assert f"process 0: {differs[1]}" in message
    assert gathered == list(range(len(processes)))


def test_another_function_raises_everywhere(processes):
    name, at_fault, message = all_the_same(values(processes, inside.other_function))
    assert (name, at_fault) == ("ProcessMismatchError", (1,))
    assert "process 1: process_allgather" in message
    assert "process 0: broadcast_one_to_all" in message


@pytest.mark.parametrize("count", [0, 2])
def test_a_broadcast_has_one_source(processes, count):
    message = all_the_same(values(processes, inside.sources, count))
    assert f"with {count} sources (processes {list(range(count))})" in message


@pytest.mark.parametrize("what", ["equal", "zeros", "nan"])
def test_assert_equal_accepts(processes, what):
    assert values(processes, inside.assert_equal, what) == [None] * len(processes)


@pytest.mark.parametrize(
    "what, where",
    [
        ("values", "['a']: float32[3,4]:\n  process 1: [1, 2] is 0.5 and not 6.0 (1 of 12 differ)"),
        ("later leaf", "['b']: bfloat16[5]:\n  process 1: [4] is 7.0 and not 4.0 (1 of 5 differ)"),
        ("replica", "process 1: [] is 1.0 and not 0.0 (1 of 1 differ)"),
    ],
)
def test_assert_equal_says_where(processes, what, where):
    for rank, (at_fault, message) in enumerate(values(processes, inside.assert_equal, what)):
        assert at_fault == (1,)
        assert message.startswith(f"checkpoint of {rank}: assert_equal: process 1 differed from ")
        assert where in message


def test_bytes_travel_by_the_collectives_of_this_project(processes):
    counts, fallbacks = all_the_same(values(processes, inside.everything))
    on_gpu = processes.run(jax.default_backend, timeout=TIMEOUT)[0].unwrap() == "gpu"
    backend = "nccl" if on_gpu else "xla"
    assert {served_by for _, served_by, _ in counts} == {backend}
    assert fallbacks == ([] if on_gpu else ["TPU devices are simulated within one process only"])


def test_a_backend_named_around_a_call_serves_it(processes):
    counts, fallbacks = all_the_same(values(processes, inside.everything_by_lax))
    assert {served_by for _, served_by, _ in counts} == {"xla"} and not fallbacks


def test_nothing_is_left_in_the_store(processes):
    assert values(processes, inside.keys_left) == [[]] * len(processes)


@pytest.mark.full
@pytest.mark.parametrize("how", ["dead", "stuck"])
def test_a_process_that_never_enters_is_named(doomed, how):
    alive = [rank for rank in range(len(doomed)) if rank != 1 or how == "stuck"]
    if how == "dead":
        doomed.tell(failing.hang, how, on=[1])
    outcomes = doomed.run(failing.hang, how, on=alive, timeout=TIMEOUT)
    for rank, outcome in zip(alive, outcomes, strict=True):
        if rank != 1:
            name, at_fault, message = outcome.unwrap()
            assert (name, at_fault) == ("ProcessTimeoutError", (1,))
            assert "did not answer the roll call" in message


@pytest.mark.full
def test_a_dead_process_is_named(doomed):
    doomed.signal(1, signal.SIGKILL)
    others = [rank for rank in range(len(doomed)) if rank != 1]
    for outcome in doomed.run(failing.sync, 1.0, on=others, timeout=TIMEOUT):
        name, at_fault, _ = outcome.unwrap()
        assert (name, at_fault) == ("ProcessTimeoutError", (1,))
    # Nor does it hold up those that must agree on a step to stop at, as it would in JAX.
    outcomes = doomed.run(
        failing.train_beside_the_dead,
        on=others,
        timeout=TIMEOUT,
        during=lambda: doomed.signal(0, signal.SIGTERM),
    )
    assert [outcome.unwrap() for outcome in outcomes] == [(1,)] * len(others)


@pytest.mark.full
def test_preemption_of_one_process_stops_all_at_one_step(doomed):
    stops = values(
        doomed,
        failing.train,
        during=lambda: (time.sleep(0.5), doomed.signal(1, signal.SIGTERM)),
    )
    assert len(all_the_same(stops)) == 1


@pytest.mark.full
def test_preemption_equals_jax(doomed):
    answers = all_the_same(values(doomed, failing.train_beside_jax))
    assert answers == [[False, False]] * 4 + [[True, True], [False, False]]


@pytest.mark.full
def test_live_devices_equal_jax(processes):
    assert all(all_the_same(values(processes, failing.live_beside_jax)))


@pytest.mark.full
def test_a_process_that_lives_and_does_not_come_is_named(doomed):
    for rank, error in enumerate(values(doomed, failing.live_late)):
        if rank != 1:
            name, at_fault, message = error
            assert (name, at_fault) == ("ProcessTimeoutError", (1,))
            assert "live_devices: process 1 did not come in the 1 s given" in message


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 4])
def test_the_others_go_on_without_a_process_that_dies(count):
    env = {"JAX_ENABLE_RECOVERABILITY": "1"}
    quick = {"heartbeat_timeout_seconds": 5}
    with Processes(count, devices=2, env=env, initialize=quick) as processes:
        values(processes, inside.ready)
        others = [rank for rank in range(count) if rank != 1]
        processes.tell(failing.live_through_a_death, on=[1])
        outcomes = processes.run(failing.live_through_a_death, on=others, timeout=TIMEOUT)
        for outcome in outcomes:
            (name, at_fault, message, failed), goes_on = outcome.unwrap()
            assert (name, at_fault, len(failed)) == ("ProcessFailureError", (1,), 2)
            assert "live_devices: process 1 died or started anew, with 2 devices" in message
            assert goes_on
