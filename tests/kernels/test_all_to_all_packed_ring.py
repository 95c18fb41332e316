"""All-to-alls that pack and go round a ring: each number within half a step, where it belongs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import channel_faults
import harness
import pallas_collectives as pc
import wired_calls
from pallas_collectives.kernels import all_to_all, all_to_all_packed_ring
from pallas_collectives.kernels.all_to_all_packed_ring import _Packed
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.kernels.machinery.codec import Codec
from pallas_collectives.replay import Machine, Report
from pallas_collectives.topology.groups import only_if
from pallas_collectives.wires import Wire
from wired_calls import KINDS, MOVED, terms
from wired_calls import exchange_holds as holds

SLOW = pytest.mark.slow


@pytest.fixture
def many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one tile: places of what leaves are taken again."""
    monkeypatch.setattr(all_to_all_packed_ring, "MOST_TILES", 1)


exchanged = functools.partial(wired_calls.exchanged, all_to_all_packed_ring.ring)


@pytest.mark.usefixtures("many_rounds")
@pytest.mark.parametrize(
    "n, tiles, mode",
    [
        (4, 4, "on_wait"),  # to the opposite device half goes each way
        (3, 3, "on_wait"),  # nothing is passed on
        pytest.param(4, 4, "eager", marks=SLOW),
        pytest.param(5, 4, "on_wait", marks=SLOW),
        pytest.param(5, 3, "eager", marks=SLOW),
        pytest.param(6, 4, "on_wait", marks=SLOW),
        pytest.param(8, 2, "on_wait", marks=SLOW),
    ],
)
def test_what_comes_is_within_half_a_step(n: int, tiles: int, mode: str) -> None:
    x = terms(n, tiles)
    assert holds(x, exchanged(x, mode=mode))
    assert not harness.race_reported()


@pytest.mark.full
@pytest.mark.parametrize("wire, n", [each for each in MOVED if each.values[1] > 2], ids=str)
def test_every_kind_of_numbers_is_within_half_a_step(wire: Wire, n: int) -> None:
    for kind in KINDS:
        x = terms(n, 2, 2 * int(wire.group), kind)
        got = exchanged(x, wire)
        assert holds(x, got, wire), kind
        assert kind in ("zeros", "constant") or (got != wired_calls.swapped(x)).any()


@pytest.mark.full
@pytest.mark.usefixtures("many_rounds")
@pytest.mark.parametrize("split, concat", [(0, 1), pytest.param(1, 0, marks=SLOW)])
def test_blocks_lie_along_any_dimension_but_the_last(split: int, concat: int) -> None:
    x = np.random.default_rng(0).normal(size=(3, 3, 3, 256, 128)).astype(np.float32)
    assert holds(x, exchanged(x, split=split, concat=concat), split=split, concat=concat)


def test_blocks_that_cannot_go_in_halves_are_left_to_others() -> None:
    """Nor can those of two devices, who have no ring, nor of so many that they go in batches."""
    how: Any = {"dtype": jnp.bfloat16, "codec": Codec(Wire("int8"))}
    sent = [
        all_to_all_packed_ring.sent_bytes((tiles * 128, 128), n, **how)
        for n, tiles in ((4, 2), (3, 1), (4, 1), (2, 2), (36, 2))
    ]
    each = 4 * 33 * 128
    assert sent == [8 * each, 3 * each, 0, 0, 0]


# Faults -------------------------------------------------------------------------------------------


def _one_semaphore_for_all_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    come = _Packed._come

    def of_the_nearest(self: Any, message: Any, sender: Any) -> Any:
        nearest = message._replace(distance=np.int32(1))
        return come(self, message, sender)[0], come(self, nearest, sender)[1]

    monkeypatch.setattr(_Packed, "_come", of_the_nearest)


def _packed_before_its_place_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = _Packed.leave

    def late(self: Any, message: Any) -> Any:
        waits: list[Any] = []
        with monkeypatch.context() as within:
            within.setattr(sync, "wait", lambda *args: waits.append(args))
            left = leave(self, message)
        only_if(message.number > 0, lambda: sync.wait(*waits[0]))
        return left

    monkeypatch.setattr(_Packed, "leave", late)


def _of_another_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes is kept as the block of the device as far ahead of who makes the last hop."""

    def ahead(message: Any, ring: Any) -> Any:
        return ring.block(message.schedule.directions[message.way] * (message.hop - 1))

    monkeypatch.setattr(all_to_all.Message, "sender", ahead)


@pytest.mark.usefixtures("many_rounds")
@pytest.mark.parametrize(
    "fault",
    [
        wired_calls.another_tiles_scale,
        _one_semaphore_for_all_distances,
        _of_another_sender,
    ],
)
def test_faults_are_caught(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    x = terms(5, 2 if fault is wired_calls.another_tiles_scale else 3, kind="heavy tails")
    if fault is wired_calls.another_tiles_scale:
        monkeypatch.setattr(all_to_all_packed_ring, "MOST_TILES", 2)
    fault(monkeypatch)
    assert wired_calls.shows(lambda: holds(x, exchanged(x)))


# Pods ---------------------------------------------------------------------------------------------


def replayed(pod: str, mib: float, **how: Any) -> Report:
    """The replay of a public call in bfloat16 along one axis, of so many MiB a device."""
    machine, races = Machine.named(pod), how.pop("races", False)

    def program(x: jax.Array) -> jax.Array:
        return pc.all_to_all(x, "x", 0, 0, tiled=True, backend="pallas", **how)

    return wired_calls.replayed(program, machine, int(mib * 2**19), races)


@pytest.mark.parametrize("pod, mib", [("v5e:16x16", 4), ("v5e:16x16", 64), ("v6e:16x16", 4)])
def test_it_takes_sixty_hundredths_of_its_time_in_bfloat16(pod: str, mib: float) -> None:
    wired = replayed(pod, mib, wire="int8")
    assert wired.kernels[0].name == "all_to_all_packed_ring"
    assert wired.time <= 0.6 * replayed(pod, mib).time


@pytest.mark.full
@pytest.mark.usefixtures("many_rounds")
@pytest.mark.parametrize("pod", ["v5p:4x4x4", pytest.param("v5e:16x16", marks=SLOW)])
def test_no_schedule_has_a_race(pod: str) -> None:
    report = replayed(pod, 1, races=True, wire="int8", algorithm="ring")
    assert report.kernels[0].name == "all_to_all_packed_ring"
    assert report.ok and report.races == []


@pytest.mark.full
@pytest.mark.usefixtures("many_rounds")
def test_what_is_packed_before_its_place_is_free_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all schedules: what has not left yet, a simulated one may have sent by then."""
    _packed_before_its_place_is_free(monkeypatch)
    assert replayed("v5p:4x4x4", 1, races=True, wire="int8", algorithm="ring").races


@pytest.mark.full
@pytest.mark.usefixtures("many_rounds")
def test_without_credits_some_schedule_has_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    channel_faults.no_credits(monkeypatch)  # where another message may still be passed on from
    assert replayed("v5p:8x8x8", 2, races=True, wire="int8", algorithm="ring").races


@pytest.mark.full
@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_compiles_for_every_generation(generation: str) -> None:
    wired_calls.check_exchange_compiled(
        all_to_all_packed_ring.ring, generation, "all_to_all_packed_ring"
    )
