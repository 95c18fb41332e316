"""What the hardware forbids: each rule's faults are named, and sound kernels are not accused.

For memories the real TPU compiler is the judge: it must refuse what replay does, and take the rest.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import harness
import judged_kernels
import replay_kernels as kernels
from pallas_collectives.replay import Machine, Report, replay
from pallas_collectives.replay.rules import Fault
from pallas_collectives.topology import chips

DMA, REGULAR = kernels.DMA, kernels.REGULAR


def check(body: Any, machine: str, n: int | None = None, *, races: bool = True) -> Report:
    """Replays `body` along an axis of n of the machine's devices, all of them by default."""
    pod = Machine.named(machine)
    n = n or pod.n_devices
    axes = {"x": n} if pod.n_devices == n else {"x": n, "y": pod.n_devices // n}
    x = jax.ShapeDtypeStruct((64 * n, 128), jnp.float32)
    return replay(kernels.sharded(body, pod.mesh(axes)), x, machine=pod, races=races)


def only(report: Report, name: str) -> list[Fault]:
    """The report's faults, after asserting that it has some, all of that rule."""
    assert {fault.name for fault in report.faults} == {name}
    assert report.ok is False
    return report.faults


# Reach ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "n", "offset", "pairs"),
    [
        ("v5e:8", 8, 1, [(7, 0)]),  # a line: the way that would close it is 7 links back
        ("v5e:8", 8, 2, [(6, 0), (7, 1)]),
        ("v5e:8", 8, 3, [(d, (d + 3) % 8) for d in range(8)]),
        ("v5e:16x16", 16, 1, []),
        ("v5e:16x16", 16, 4, []),  # a ring of 16: 4 links one way or the other
        ("v5e:16x16", 16, 12, []),
        ("v5e:16x16", 16, 5, [(d, (d + 5) % 16) for d in range(16)]),
        ("v5p:8", 8, 3, []),
        ("v6e:8", 8, 1, []),
    ],
)
def test_reach_is_that_of_the_places(
    machine: str, n: int, offset: int, pairs: list[tuple[int, int]]
) -> None:
    report = check(lambda x: kernels.shift(x, n, offset), machine, n)
    if not pairs:
        assert report.ok
        return
    copies = [fault for fault in only(report, "reach") if fault.what.startswith("a copy")]
    (copy,) = copies
    along_y = Machine.named(machine).n_devices // n
    assert copy.device // along_y == pairs[0][0]
    assert f"to device {pairs[0][1] * along_y} " in copy.what
    assert copy.others + 1 == len(pairs) * along_y
    assert "replay_kernels.py" in copy.line
    assert "power of two" in copy.rule
    assert "hops" in copy.remedy
    signals = [fault for fault in report.faults if fault.what.startswith("a signal")]
    assert signals
    assert copy.step > max(fault.step for fault in signals) > 0


def test_reach_follows_the_placement() -> None:
    """Round a square of 4x4 chips along the wires every hop is one link; in rows it is not."""
    machine = Machine.named("v5e:4x4")
    body = kernels.sharded(lambda x: kernels.ring(x, 16), machine.mesh({"x": 16}))
    x = jax.ShapeDtypeStruct((64 * 16, 128), jnp.float32)
    wires = np.array([0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4])
    assert replay(body, x, machine=machine, placement=wires, races=True).ok
    in_rows = replay(body, x, machine=machine)
    assert {fault.name for fault in in_rows.faults} == {"reach"}


# Memories -------------------------------------------------------------------------------------

_TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x4",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x4",
    "7x": "tpu7x:2x2x1",
}


def _compiles(generation: str, *scopes: Any, **how: Any) -> bool:
    pytest.importorskip("libtpu")
    vmem = chips.BY_NAME[generation].vmem_bytes
    body = lambda x: kernels.holding(x, *scopes, vmem=vmem, **how)  # noqa: E731
    try:
        harness.compile_for_tpu(body, _TOPOLOGIES[generation], (64, 128))
    except jax.errors.JaxRuntimeError as error:
        assert "RESOURCE_EXHAUSTED" in str(error)
        return False
    return True


def _holds(generation: str, *scopes: Any, **how: Any) -> Report:
    return check(lambda x: kernels.holding(x, *scopes, **how), f"{generation}:2x2")


@pytest.mark.parametrize("generation", _TOPOLOGIES)
def test_semaphores_are_counted_as_the_compiler_does(generation: str) -> None:
    """Compilers differ by one in what they keep; a kernel of `holding` has one more of its own."""
    limit = chips.BY_NAME[generation].semaphores
    half = limit // 2
    sound = [
        ((DMA((limit - 2,)),), True),
        ((DMA((half - 2,)), REGULAR((half,))), True),
        ((DMA((limit - 2,)), DMA((limit - 2,))), False),  # one after the other
        ((DMA((7, half // 7)),), True),
    ]
    for scopes, nested in sound:
        assert _holds(generation, *scopes, nested=nested).ok
        assert _compiles(generation, *scopes, nested=nested)
    for scopes in ((DMA((limit,)),), (DMA((half,)), REGULAR((half + 1,)))):
        (fault,) = only(_holds(generation, *scopes), "memory")
        assert "semaphores at a time" in fault.what
        assert f"{generation} has {limit:,}" in fault.rule
        assert "replay_kernels.py" in fault.line
        assert "(hold)" in fault.line
        assert not _compiles(generation, *scopes)


@pytest.mark.parametrize("generation", _TOPOLOGIES)
def test_vmem_is_counted_as_scopes_nest(generation: str) -> None:
    mib = chips.BY_NAME[generation].vmem_bytes >> 20
    rows = lambda mib: pltpu.VMEM((mib * 2048, 128), jnp.float32)  # noqa: E731
    for scopes, nested, fits in [
        ((rows(mib + 1),), True, False),
        ((rows(mib - 1),), True, True),
        ((rows(mib // 2), rows(mib // 2 - 1)), True, True),
        ((rows(mib // 2), rows(mib // 2 + 1)), True, False),
        ((rows(mib // 2), rows(mib // 2 + 1)), False, True),
    ]:
        report = _holds(generation, *scopes, nested=nested)
        assert bool(report.ok) == fits == _compiles(generation, *scopes, nested=nested)
        if not fits:
            (fault,) = only(report, "memory")
            assert f"{sum(s.shape[0] for s in scopes) * 512:,} bytes of VMEM" in fault.what


@pytest.mark.parametrize("space", [pltpu.VMEM, pltpu.SMEM], ids=["vmem", "smem"])
@pytest.mark.parametrize("generation", ["v4", "v5e", "7x"])
def test_memory_is_counted_with_its_padding_to_tiles(generation: str, space: Any) -> None:
    chip = chips.BY_NAME[generation]
    limit = chip.vmem_bytes if space is pltpu.VMEM else chip.smem_bytes
    rows = limit // 512  # of 128 words
    shapes = [
        ((rows, 1), jnp.int32),  # a row takes 512 bytes
        ((rows // 8, 5, 128), jnp.int32),  # 5 rows take 8
        ((rows // 4, 3, 1), jnp.int32),  # 3 take 4
        ((limit // 4,), jnp.int32),
    ]
    if space is pltpu.VMEM:
        shapes += [((rows // 4, 5, 128), jnp.bfloat16), ((rows // 4, 9, 100), jnp.int8)]
    for (first, *rest), dtype in shapes:
        much = (space((first + first // 8, *rest), dtype),)
        (fault,) = only(_holds(generation, scratch=much), "memory")
        assert f"a core of {generation} has {limit:,}" in fault.rule
        assert not _compiles(generation, scratch=much)
        little = (space((first - first // 8, *rest), dtype),)
        assert _holds(generation, scratch=little).ok
        assert _compiles(generation, scratch=little)


# Entry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_scratch_semaphore_does_not_tell_that_a_device_is_there(n: int) -> None:
    report = check(lambda x: kernels.ring(x, n, fault="scratch"), f"v5p:{n}")
    assert report.races == []  # were the semaphore there, it would order everything
    (fault,) = only(report, "entry")
    assert "a signal to entered" in fault.what
    assert "(barrier)" in fault.line
    assert fault.step > 0
    assert "barrier semaphores alone are there at all times" in fault.rule
    assert "signal the barrier semaphore" in fault.remedy


def test_a_copy_that_nothing_precedes_is_early() -> None:
    report = check(lambda x: kernels.ring(x, 4, fault="no_barrier"), "v5p:4")
    (fault,) = only(report, "entry")
    assert "a copy to recv[0]" in fault.what
    assert "nothing tells device 0 before that device 1 has entered kernel" in fault.what


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("entry", ["double", "everyone"])
def test_barriers_that_hold_between_calls_are_sound(entry: str, calls: int, n: int) -> None:
    """A second barrier on a scratch semaphore, as JAX documents it, or one barrier with everyone.

    That the latter holds no chain of single waits tells: the first device to pass could not have
    had a signal of the next call from anybody.
    """

    def body(x: Any) -> Any:
        for _ in range(calls):
            x = kernels.shift(x, n, entry=entry)
        return x

    assert check(body, f"v5p:{n}").ok


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_barrier_in_the_first_step_of_a_grid_is_sound(n: int) -> None:
    assert check(lambda x: kernels.gridded(kernels.gridded(x, n)[0], n), f"v5p:{n}").ok


# Barriers between kernels ---------------------------------------------------------------------


def test_a_count_that_a_kernel_leaves_for_the_next_is_named() -> None:
    """Two kernels whose counts add up to 0: nobody is held up, nothing is left at the end."""
    report = check(lambda x: kernels.counting(kernels.counting(x, 3, 1), 1, 3), "v5p:4")
    assert not report.stuck
    assert not report.leftovers
    left, missing = only(report, "barrier")
    assert "is signalled 3 times there, and 1 are waited for" in left.what
    assert "counts the rest as its own" in left.what
    assert "waits for signals of the next" in missing.what
    assert left.others == missing.others == 3
    assert "replay_kernels.py" in left.line
    assert "is 0 when all devices have left it" in left.rule
    assert "wait for all" in left.remedy
    assert "wait for no more" in missing.remedy
    sound = check(lambda x: kernels.counting(kernels.counting(x, 3, 3), 1, 1), "v5p:4")
    assert sound.ok


@pytest.mark.parametrize("n", [2, 5])
def test_a_barrier_of_one_device_is_counted_from_all_that_signal_it(n: int) -> None:
    assert check(lambda x: judged_kernels.hub(judged_kernels.hub(x, n)[0], n), f"v5p:{n}").ok


@pytest.mark.parametrize("n", [3, 4, 5, 8])
def test_a_wait_that_takes_the_next_calls_signal_is_named(n: int) -> None:
    """A call is sound by itself. Of two, a device may be in the second while its neighbour's other
    neighbour but one is yet to enter the first; up to four devices, that one has been heard from.
    """

    def body(x: Any) -> Any:
        return kernels.shift(kernels.shift(x, n, entry="once"), n, entry="once")

    assert check(lambda x: kernels.shift(x, n, entry="once"), f"v5p:{n}").ok
    twice = check(body, f"v5p:{n}")
    if n <= 4:
        assert twice.ok
        return
    (fault,) = only(twice, "entry")
    assert "the barrier's wait at replay_kernels.py" in fault.what
    assert "can be satisfied by a signal of device" in fault.what
    assert "next call" in fault.what
    assert "second barrier" in fault.remedy
    assert any("next call" in race.why for race in twice.races or ())


# Parts of what is in flight ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "waits", "reads"),
    [
        ((16, 8), (16, 8), 16),  # as many bytes as the first has, but of both
        ((16, 8), (8, 16), 24),
        ((16,), (8, 8), 8),  # half of one copy: any half
        ((16, 8, 8), (24, 8), 16),
    ],
)
def test_a_wait_for_part_of_what_is_in_flight_orders_nothing(
    sizes: tuple[int, ...], waits: tuple[int, ...], reads: int
) -> None:
    def body(x: Any, reads_after: int) -> Any:
        return kernels.parts(x, 4, sizes=sizes, waits=waits, reads_after=reads_after, reads=reads)

    early = check(lambda x: body(x, len(waits) - 1), "v5p:4")
    assert not early.faults
    assert early.ok is False
    assert early.races
    for race in early.races:
        assert race.buffer == "landing (hbm)"
        assert "a copy's write" in race.first + race.second
        assert "bytes arrive in no particular order" in race.why
        assert "replay_kernels.py" in race.why
        assert f"of the {sum(sizes) * 512} bytes" in race.why
        assert "a semaphore each" in race.remedy
        writer, reader = sorted(device for device, _ in race.steps)
        assert reader in ((writer + 1) % 4, (writer + 3) % 4)
    assert check(lambda x: body(x, len(waits)), "v5p:4").ok


def test_copies_of_nothing_need_no_wait() -> None:
    rows = np.array([[0, 32], [16, 0], [24, 16], [32, 24]], np.int32)
    pod = Machine.named("v5p:4")
    body = kernels.sharded(lambda r, x: kernels.ragged(r[0], x, 4), pod.mesh({"x": 4}), n_args=2)
    x = jax.ShapeDtypeStruct((32 * 4, 128), jnp.float32)
    assert replay(body, rows, x, machine=pod, races=True).ok


# What a report says -----------------------------------------------------------------------------


def test_races_are_looked_for_up_to_a_deadlock() -> None:
    stuck = check(lambda x: kernels.ring(x, 4, fault="stuck"), "v5p:4")
    assert stuck.stuck
    assert stuck.races == []
    assert "none up to the deadlock" in str(stuck)
    assert "not looked for" not in str(stuck)

    def body(x: Any) -> Any:
        return kernels.ring(kernels.ring(x, 4, fault="shared")[0], 4, fault="stuck")

    racy = check(body, "v5p:4")
    assert racy.stuck
    assert racy.races
    unasked = check(body, "v5p:4", races=False)
    assert unasked.races is None
    assert "not looked for (races=True does)" in str(unasked)


def test_ok_is_none_where_races_were_not_asked_for() -> None:
    sound, racy = (lambda x: kernels.ring(x, 4)), (lambda x: kernels.ring(x, 4, fault="shared"))
    assert check(sound, "v5p:4").ok is True
    assert check(sound, "v5p:4", races=False).ok is None
    assert check(racy, "v5p:4").ok is False
    assert check(racy, "v5p:4", races=False).ok is None
    assert check(lambda x: x + 1, "v5p:4").ok is False
    assert "NO KERNEL" in str(check(lambda x: x + 1, "v5p:4"))


def test_a_kernel_that_reads_semaphores_is_held_to_the_rules_that_need_no_order() -> None:
    stuck = check(lambda x: kernels.polling(x, 4, needs=1), "v5e:4")
    assert len(stuck.stuck) == 4
    assert [kernel.name for kernel in stuck.kernels] == ["kernel"]
    assert {fault.name for fault in stuck.faults} == {"reach"}
    assert stuck.ok is False
    assert "not looked for (the kernel reads a semaphore" in str(stuck)


def test_findings_are_all_there_is_to_say() -> None:
    report = check(lambda x: kernels.ring(x, 4, fault="left_over"), "v5e:4")
    assert {type(finding).__name__ for finding in report.findings} >= {"Leftover", "Race", "Fault"}
    text = str(report)
    for fault in report.faults:
        assert str(fault) in text
        assert fault.rule in text and fault.remedy in text
    assert "NOT SOUND" in text
