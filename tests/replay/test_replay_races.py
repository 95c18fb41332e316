"""The happens-before check: faults are named, sound kernels pass, at sizes that interpret mode does
not reach.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import replay_kernels as kernels
from pallas_collectives.kernels import all_gather
from pallas_collectives.replay import Machine, Report, replay
from pallas_collectives.topology.groups import Group


def check(body: Any, n: int, machine: str | None = None) -> Report:
    pod = Machine.named(machine or f"v5e:{n}")
    axes = {"x": n} if pod.n_devices == n else {"x": n, "y": pod.n_devices // n}
    x = jax.ShapeDtypeStruct((64 * n, 128), jnp.float32)
    return replay(kernels.sharded(body, pod.mesh(axes)), x, machine=pod, races=True)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize(
    "body",
    [
        lambda x, n: kernels.ring(x, n),
        lambda x, n: kernels.ring(x, n, unrolled=True),
        lambda x, n: kernels.relay(x, n, rounds=6),
        lambda x, n: kernels.summed(x, n),
        lambda x, n: kernels.uneven(x, n),
        lambda x, n: kernels.doubled(x),
    ],
)
def test_sound_kernels_pass(body: Any, n: int) -> None:
    assert check(lambda x: body(x, n), n).races == []


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize(
    ("fault", "first", "second"),
    [
        ("shared", "a copy's write", "a copy's read"),
        ("no_barrier", "a copy's write", "entry into"),
        ("no_wait", "a copy's write", "a copy's read"),
        ("left_over", "a copy's write", "entry into"),
    ],
)
def test_faults_are_named(fault: str, first: str, second: str, n: int) -> None:
    races = check(lambda x: kernels.ring(x, n, fault=fault), n).races
    assert races
    for race in races:
        assert "replay_kernels.py" in race.first + race.second
        assert race.buffer == "o_ref (hbm)"
    assert any({first, second} <= _kinds(race) for race in races)


def _kinds(race: Any) -> set[str]:
    words = ("a copy's write", "a copy's read", "entry into", "exit from")
    return {w for w in words if w in race.first or w in race.second}


def test_a_semaphore_shared_by_two_steps_is_safe_where_only_one_can_be_meant() -> None:
    """With two devices there is one step: sharing its semaphore is no fault."""
    assert check(lambda x: kernels.ring(x, 2, fault="shared"), 2).races == []


@pytest.mark.parametrize("n", [4, 8])
def test_a_dropped_credit_is_found(n: int) -> None:
    races = check(lambda x: kernels.relay(x, n, rounds=6, credits=False), n).races
    assert races
    assert all(race.buffer == "slots (vmem)" for race in races)


@pytest.mark.parametrize("n", [4, 16])
def test_the_all_gather_that_jax_ships_races(n: int) -> None:
    machine = Machine.named(f"v5e:{n}" if n < 16 else "v5e:16x16")
    mesh = machine.mesh({"x": 16, "y": 16} if n == 16 else {"x": n})
    x = jax.ShapeDtypeStruct((64 * n, 128), jnp.float32)
    function = lambda x: kernels.shipped_all_gather(x, mesh)  # noqa: E731
    report = replay(function, x, machine=machine, races=True)
    assert report.races
    for race in report.races:
        assert "all_gather.py" in race.first
        assert "a copy's write" in race.first
        assert "a copy's read" in race.second


@pytest.mark.parametrize("algorithm", ["unidirectional", "bidirectional", "direct"])
@pytest.mark.parametrize(("n", "machine"), [(8, "v5p:8x4x2"), (16, "v5e:16x16"), (4, "v5p:4x4x4")])
def test_our_all_gathers_are_clean(algorithm: str, n: int, machine: str) -> None:
    group = Group(("x",), (n,))

    def body(x: Any) -> Any:
        if algorithm == "direct":
            return all_gather.direct(x, group, axis=0, vmem=False, interpret=False)
        both = algorithm == "bidirectional"
        return all_gather.ring(x, group, axis=0, bidirectional=both, vmem=False, interpret=False)

    report = check(body, n, machine)
    assert report.races == []
    if (algorithm, machine) == ("direct", "v5e:16x16"):
        assert {fault.name for fault in report.faults} == {"reach"}  # it is not chosen there
    else:
        assert report.ok


@pytest.mark.slow
def test_two_hundred_and_fifty_six_devices_are_checked() -> None:
    group = Group(("x",), (256,))
    body = lambda x: all_gather.ring(  # noqa: E731
        x, group, axis=0, bidirectional=True, vmem=False, interpret=False
    )
    report = check(body, 256, "v5e:16x16")
    assert report.races == []
    faulty = check(lambda x: kernels.ring(x, 64, fault="no_barrier"), 64, "v5e:16x4")
    assert faulty.races


def test_what_leaves_two_copies_unordered_is_said() -> None:
    (early, *_) = check(lambda x: kernels.ring(x, 4, fault="no_wait"), 4, "v5p:4").races or []
    assert "never waits for that" in early.why and "wait for recv[0] before" in early.remedy
    relayed = check(lambda x: kernels.relay(x, 4, rounds=6, credits=False), 4, "v5p:4").races or []
    whys = " ".join(race.why for race in relayed)
    assert "may have brought to recv[1] by then" in whys
    assert "nothing tells device 2 that device 3 is done" in whys
    assert all(race.flights[0] or race.flights[1] for race in relayed)
