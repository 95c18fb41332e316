"""Permutes that pack in their kernel: each number within half a step, zeros where none come."""

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
from benchmarks import replay_rows
from pallas_collectives.kernels import ppermute_packed
from pallas_collectives.kernels.machinery.codec import Chunks, Codec
from pallas_collectives.replay import Machine, Report
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire
from wired_calls import KINDS, MOVED, WIRES, within

SLOW = pytest.mark.slow
Pairs = tuple[tuple[int, int], ...]


def round_of(n: int) -> Pairs:
    """Each device's numbers go to the next one."""
    return tuple((device, (device + 1) % n) for device in range(n))


ROUND = round_of(3)


def permuted(
    x: np.ndarray, perm: Pairs = ROUND, mode: str = "on_wait", wire: Wire = WIRES[0]
) -> np.ndarray:
    """Every device's result, of x: (n, rows, columns)."""
    group, shift = Group(("x",), (len(x),)), perm == round_of(len(x))
    how: Any = {"interpret": harness.ADVERSARIES[mode], "everyone": not shift}

    def program(x: jax.Array) -> jax.Array:
        return ppermute_packed.direct(x, group, perm=perm, codec=Codec(wire), **how)

    return np.asarray(harness.per_device(program, harness.mesh(len(x)), check_vma=False)(x))


def holds(x: np.ndarray, got: np.ndarray, perm: Pairs = ROUND, wire: Wire = WIRES[0]) -> bool:
    """Whether what comes is within half a step, and what does not is zeros."""
    bounds = np.asarray(jax.vmap(lambda x: within(x, wire))(jnp.asarray(x)))
    want, allowed = np.zeros_like(x), np.zeros_like(bounds)
    for source, target in perm:
        want[target], allowed[target] = x[source], bounds[source]
    return bool((np.abs(got.astype(np.float64) - want) <= allowed).all())


def terms(rows: int, columns: int = 128, kind: str = "normal", n: int = 3) -> np.ndarray:
    return wired_calls.data(n, kind, rows=rows, columns=columns)[:, :rows]


@pytest.mark.parametrize(
    "perm, rows, mode",
    [
        (ROUND, 13, "on_wait"),  # 13 chunks of one tile
        (((0, 2), (1, 1)), 16, "eager"),
        pytest.param(ROUND, 96, "eager", marks=SLOW),  # 12 of eight
        pytest.param(((2, 0),), 5, "on_wait", marks=SLOW),
        pytest.param(((0, 1), (1, 0), (2, 2)), 1, "on_wait", marks=SLOW),
    ],
)
def test_what_comes_is_within_half_a_step(perm: Pairs, rows: int, mode: str) -> None:
    x = terms(rows * 128)
    assert holds(x, permuted(x, perm, mode), perm)
    assert not harness.race_reported()


@pytest.mark.full
@pytest.mark.parametrize("wire, n", MOVED, ids=str)
def test_every_kind_of_numbers_is_within_half_a_step(wire: Wire, n: int) -> None:
    for kind in KINDS:
        x, perm = terms(256, 2 * int(wire.group), kind, n), round_of(n)
        got = permuted(x, perm, wire=wire)
        assert holds(x, got, perm, wire), kind
        assert kind in ("zeros", "constant") or (got[1] != x[0]).any()


@pytest.mark.full
def test_the_largest_numbers_come_by_scales_of_powers_of_two() -> None:
    """These scales are beyond the largest number over the wire's, and what they give is clipped."""
    x = terms(128, 256)
    x[:, 5] = np.finfo(np.float32).max * np.sign(x[:, 5])
    assert holds(x, permuted(x, wire=WIRES[1]), wire=WIRES[1])


@pytest.mark.parametrize("collective", ["all_gather", "ppermute"])
def test_no_kernel_packs_rows_of_one_scale(collective: str) -> None:
    x, wire = terms(128, 256), Wire("int8", "row")
    program = functools.partial(wired_calls.CALLS[collective], wire=wire, backend="pallas")
    pc.reset_counts()
    harness.per_device(program, harness.mesh(3), check_vma=False).lower(x)
    assert pc.wire_counts() == {(collective, str(wire), ""): 1}


@pytest.mark.parametrize(
    "shape, chunk, across",
    [
        ((1024, 128), (1024, 128), 1),
        ((128, 1024), (128, 1024), 1),
        ((13 * 128, 128), (128, 128), 1),
        ((7 * 128, 512), (7 * 128, 128), 4),
        ((512, 1280), (512, 256), 5),
    ],
)
def test_chunks_are_as_large_as_go(
    shape: tuple[int, int], chunk: tuple[int, int], across: int
) -> None:
    chunks = Chunks.of(shape, Codec(Wire("int8")))
    size = chunks.shape[0] * chunks.shape[1]
    assert size >= chunk[0] * chunk[1] and chunks.count * size == shape[0] * shape[1]
    assert shape[1] == across * chunks.shape[1]


@pytest.mark.full
def test_calls_pack_in_the_kernel_where_operands_lie_well() -> None:
    """Others by passes of XLA around the same permute."""
    n, x = 2, wired_calls.data(2, rows=128, columns=256)[:, :256]
    how: Any = {"wire": "int8", "backend": "pallas", "algorithm": "everyone"}
    perm = [(0, 1), (1, 0)]

    def program(x: jax.Array) -> Any:
        permute = functools.partial(pc.ppermute, axis_name="x", perm=perm, **how)
        return [
            permute(x),
            permute(x.reshape(-1)),
            permute(x.reshape(2, 2, 64, 256)),
            jax.vmap(permute)(x.reshape(2, 128, 256)),
            permute(x[:100]),
        ]

    pc.reset_counts()
    got = wired_calls.run(program, x, n=n, check_vma=False)
    step = np.abs(x).max() / 127
    for ours in got:
        want = x[::-1].reshape(n, -1)[:, : ours[0].size].reshape(ours.shape)
        assert 0 < np.abs(ours - want).max() <= 0.51 * step
    assert pc.counts()["ppermute", "pallas", "everyone"] == 5


# Faults -------------------------------------------------------------------------------------------


def _unpacked_before_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    window = (ppermute_packed.WINDOW,)
    wired_calls.unpacked_before_it_has_come(monkeypatch, lambda shape: shape == window)


@pytest.mark.parametrize("fault", [wired_calls.another_tiles_scale, _unpacked_before_it_has_come])
def test_faults_are_caught(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    x = terms(26 * 128, kind="heavy tails")  # chunks of two tiles
    fault(monkeypatch)
    assert wired_calls.shows(lambda: holds(x, permuted(x)))


# Pods ---------------------------------------------------------------------------------------------


def replayed(pod: str, mib: float, **how: Any) -> Report:
    """The replay of a public call in bfloat16, by one position along an axis."""
    machine = Machine.named(pod)
    sizes = replay_rows.mesh_axes(machine)
    perm, races = [(i, (i + 1) % sizes["x"]) for i in range(sizes["x"])], how.pop("races", False)

    def program(x: jax.Array) -> jax.Array:
        return pc.ppermute(x, "x", perm, backend="pallas", **how)

    return wired_calls.replayed(program, machine, int(mib * 2**19), races)


@pytest.mark.parametrize("pod", ["v5e:16x16", "v5p:4x4x4", "v6e:16x16", "7x:4x4x4"])
def test_it_takes_sixty_hundredths_of_its_time_in_bfloat16(pod: str) -> None:
    assert replayed(pod, 4, wire="int8").time <= 0.6 * replayed(pod, 4).time


@pytest.mark.full
@pytest.mark.parametrize("pod, mib", [("v5p:4x4x4", 4), ("v6e:8x8", 4)])
def test_no_schedule_has_a_race(pod: str, mib: float) -> None:
    report = replayed(pod, mib, races=True, wire="int8")
    assert report.ok and report.races == []


@pytest.mark.full
def test_without_credits_some_schedule_has_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    channel_faults.no_credits(monkeypatch)  # where another chunk may still be unpacked from
    assert replayed("v5p:4x4x4", 4, races=True, wire="int8").races


@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_compiles_for_every_generation(generation: str) -> None:
    group, how = Group(("x",), (8,)), {"interpret": False}

    def program(x: jax.Array) -> Any:
        return [
            ppermute_packed.direct(x, group, perm=perm, everyone=True, codec=Codec(wire), **how)
            for wire, perm in (
                (Wire("int8"), tuple((i, (i + 1) % 8) for i in range(8))),
                (Wire("float8_e4m3fn", group=256), ((0, 1), (3, 3))),
            )
        ]

    wired_calls.check_compiled(program, generation, (2048, 512), "ppermute_packed")
