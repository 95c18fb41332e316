"""All-to-alls that pack in their kernel: each number within half a step, where it belongs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import channel_faults
import harness
import pallas_collectives as pc
import wired_calls
from pallas_collectives.kernels import all_to_all_packed
from pallas_collectives.replay import Machine, Report
from pallas_collectives.wires import Wire
from wired_calls import KINDS, MOVED, swapped, terms
from wired_calls import exchange_holds as holds

SLOW = pytest.mark.slow


@pytest.fixture
def many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one tile, few on their way: places are taken again."""
    monkeypatch.setattr(all_to_all_packed, "MOST_TILES", 1)
    monkeypatch.setattr(all_to_all_packed, "AHEAD", 2)


exchanged = functools.partial(wired_calls.exchanged, all_to_all_packed.direct)


@pytest.mark.usefixtures("many_rounds")
@pytest.mark.parametrize(
    "n, tiles, mode",
    [
        (3, 5, "on_wait"),
        pytest.param(3, 5, "eager", marks=SLOW),
        pytest.param(2, 7, "eager", marks=SLOW),
        pytest.param(4, 4, "on_wait", marks=SLOW),
        pytest.param(3, 1, "on_wait", marks=SLOW),
    ],
)
def test_what_comes_is_within_half_a_step(n: int, tiles: int, mode: str) -> None:
    x = terms(n, tiles)
    assert holds(x, exchanged(x, mode=mode))
    assert not harness.race_reported()


@pytest.mark.full
@pytest.mark.parametrize("wire, n", MOVED, ids=str)
def test_every_kind_of_numbers_is_within_half_a_step(wire: Wire, n: int) -> None:
    for kind in KINDS:
        x = terms(n, 2, 2 * int(wire.group), kind)
        got = exchanged(x, wire)
        assert holds(x, got, wire), kind
        assert kind in ("zeros", "constant") or (got != swapped(x, 0, 0)).any()


@pytest.mark.full
@pytest.mark.usefixtures("many_rounds")
@pytest.mark.parametrize("split, concat", [(0, 1), pytest.param(1, 0, marks=SLOW), (0, 2)])
def test_blocks_lie_along_any_dimension_but_the_last(split: int, concat: int) -> None:
    x = np.random.default_rng(0).normal(size=(2, 2, 2, 256, 128)).astype(np.float32)
    assert holds(x, exchanged(x, split=split, concat=concat), split=split, concat=concat)


def test_groups_with_inf_and_nan_arrive_as_nan_and_leave_others_alone() -> None:
    x = terms(2, 1)
    x[1, 3, 7], x[1, 133, 1] = np.inf, np.nan
    got = exchanged(x)
    assert np.isnan(got[0, 131]).all() and np.isnan(got[1, 133]).all()
    assert np.isnan(got).sum() == 2 * 128


def test_a_round_has_a_chunk_for_everyone() -> None:
    """The own one in its midst."""
    for n in range(2, 70):
        stride = all_to_all_packed._stride(n)
        distances = [(number + n // 2) * stride % n for number in range(n)]
        assert sorted(distances) == list(range(n)) and distances.index(0) == n - n // 2


@pytest.mark.full
def test_calls_pack_in_the_kernel_where_blocks_lie_well() -> None:
    """Others by passes of XLA around the same exchange."""
    n, x = 2, terms(2, 2, 256).reshape(2, 4, 128, 256)
    how: Any = {"wire": "int8", "backend": "pallas", "algorithm": "direct"}

    def call(x: jax.Array, split: int = 0, concat: int = 0) -> jax.Array:
        return pc.all_to_all(x, "x", split, concat, tiled=True, **how)

    pc.reset_counts()
    got = wired_calls.run(
        lambda x: [
            call(x),
            call(x.reshape(-1)),
            call(x, 0, 1),
            call(x.reshape(64, 8, 256)),
            jax.vmap(call)(x.reshape(2, 256, 256)),
            call(x[:, :100]),
            call(x, 0, 2),
        ],
        x, n=n, check_vma=False,
    )  # fmt: skip
    step = np.abs(x).max() / 127
    wants = [
        swapped(x, 0, 0),
        swapped(x.reshape(n, -1), 0, 0),
        swapped(x, 0, 1),
        swapped(x.reshape(n, 64, 8, 256), 0, 0),
        swapped(x.reshape(n, 2, 256, 256), 1, 1),
        swapped(x[:, :, :100], 0, 0),
        swapped(x, 0, 2),
    ]
    for ours, want in zip(got, wants, strict=True):
        assert ours.shape == want.shape and 0 < np.abs(ours - want).max() <= 0.51 * step
    assert pc.counts()["all_to_all", "pallas", "direct"] == len(wants)


# Faults -------------------------------------------------------------------------------------------


def _unpacked_before_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    wired_calls.unpacked_before_it_has_come(monkeypatch, lambda shape: len(shape) == 2)


def _of_another_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes is taken for the block of the device as far ahead."""
    position = all_to_all_packed._End._position
    monkeypatch.setattr(all_to_all_packed._End, "_position", lambda end, d: position(end, abs(d)))


@pytest.mark.parametrize(
    "fault", [wired_calls.another_tiles_scale, _unpacked_before_it_has_come, _of_another_sender]
)
def test_faults_are_caught(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    x = terms(3, 2, kind="heavy tails")
    fault(monkeypatch)
    assert wired_calls.shows(lambda: holds(x, exchanged(x)))


# Pods ---------------------------------------------------------------------------------------------


def replayed(pod: str, axes: tuple[str, ...], mib: float, **how: Any) -> Report:
    """The replay of a public call in bfloat16, of so many MiB a device."""
    machine, races = Machine.named(pod), how.pop("races", False)

    def program(x: jax.Array) -> jax.Array:
        return pc.all_to_all(x, axes, 0, 0, tiled=True, backend="pallas", **how)

    return wired_calls.replayed(program, machine, int(mib * 2**19), races)


@pytest.mark.parametrize(
    "pod, axes, mib",
    [
        ("v5p:4x4x4", ("x",), 16),
        ("v5p:4x4x4", ("x", "y"), 16),
        ("v6e:8x8", ("x",), 4),
        ("7x:4x4x4", ("x",), 16),
        ("7x:4x4x4", ("x", "y"), 16),
    ],
)
def test_it_takes_sixty_hundredths_of_its_time_in_bfloat16(
    pod: str, axes: tuple[str, ...], mib: float
) -> None:
    wired = replayed(pod, axes, mib, wire="int8")
    assert wired.kernels[0].name == "all_to_all_packed"
    assert wired.time <= 0.6 * replayed(pod, axes, mib).time


@pytest.mark.usefixtures("many_rounds")
@pytest.mark.parametrize(
    "pod, axes",
    [
        ("v5p:4x4x4", ("x",)),
        pytest.param("v6e:2x4", ("x", "y"), marks=SLOW),
        pytest.param("7x:2x2x1", ("x", "core"), marks=SLOW),
    ],
)
def test_no_schedule_has_a_race(pod: str, axes: tuple[str, ...]) -> None:
    report = replayed(pod, axes, 1, races=True, wire="int8", algorithm="direct")
    assert report.kernels[0].name == "all_to_all_packed"
    assert report.ok and report.races == []


@pytest.mark.full
@pytest.mark.usefixtures("many_rounds")
def test_without_credits_some_schedule_has_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    channel_faults.no_credits(monkeypatch)  # where another chunk may still be unpacked from
    assert replayed("v5p:4x4x4", ("x",), 1, races=True, wire="int8", algorithm="direct").races


@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_compiles_for_every_generation(generation: str) -> None:
    wired_calls.check_exchange_compiled(all_to_all_packed.direct, generation, "all_to_all_packed")
