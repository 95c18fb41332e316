"""The permute kernel: table, faults, collective ids that run short, what the compiler makes."""

import functools
import types
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import harness
import pallas_collectives
from pallas_collectives.errors import AlgorithmError, CollectiveError, ReachError
from pallas_collectives.kernels import ppermute
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.topology.groups import Group

GIB = 1 << 30
PAIRS = ((0, 2), (2, 1), (3, 3))  # of the docstring
SHIFT = ((0, 1), (1, 2), (3, 0))


def permuted(xs: np.ndarray, perm: Any) -> np.ndarray:
    result = np.zeros_like(xs)
    for source, target in perm:
        result[target] = xs[source]
    return result


def run_caught(mode: str, *, everyone: bool, hold: int | None = None) -> bool:
    pairs = PAIRS if everyone else SHIFT
    x = harness.random((4, 8, 128), "float32")

    def program(shard: jax.Array) -> jax.Array:
        shard = shard if hold is None else harness.delayed(shard, hold)
        return ppermute.direct(
            shard,
            Group(("x",), (4,)),
            perm=pairs,
            everyone=everyone,
            vmem=False,
            interpret=harness.ADVERSARIES[mode],
        )

    run = harness.per_device(program, harness.mesh(4), check_vma=False)
    return harness.caught(lambda: run(x), permuted(x, pairs))


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("mode", harness.ADVERSARIES)
def test_sound_kernel_is_not_caught(mode: str, everyone: bool) -> None:
    assert not run_caught(mode, everyone=everyone, hold=2)


def test_dropped_barrier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    harness.drop_barrier(monkeypatch, "barrier_with_partners")
    assert run_caught("eager", everyone=False, hold=2)
    harness.drop_barrier(monkeypatch, "barrier_with_everyone")
    assert run_caught("eager", everyone=True, hold=2)


@pytest.mark.parametrize("dropped", [False, True])
def test_missing_receive_wait_is_caught(monkeypatch: pytest.MonkeyPatch, dropped: bool) -> None:
    calls: list[Any] = []

    def wait(semaphore: Any, ref: Any) -> None:
        calls.append(semaphore)  # traced for the receive, then for the send
        if not (dropped and len(calls) == 1):
            sync.wait(semaphore, ref)

    monkeypatch.setattr(ppermute, "sync", types.SimpleNamespace(**{**vars(sync), "wait": wait}))
    assert run_caught("on_wait", everyone=False) == dropped
    assert len(calls) == 2


@pytest.mark.full
def test_permutations_in_one_program_do_not_disturb_each_other() -> None:
    x = harness.random((8, 2, 5), "float32")
    perms = [
        [(p, (p + 1) % 4) for p in range(4)],
        [(p, (p + 1) % 4) for p in range(4)],
        [(0, 3), (3, 0), (1, 1)],
        [(2, 0)],
        [(p, (p + 3) % 4) for p in range(4)],
    ]

    def program(m: Any, block: jax.Array) -> jax.Array:
        block = harness.delayed(block, 1, 0.1)
        for perm in perms:
            block = m.ppermute(block, "y", perm) - 2 * m.ppermute(block, "x", [(1, 0)])
            block = block + m.pshuffle(block, "y", [1, 0, 3, 2])
        return block

    def run(m: Any) -> np.ndarray:
        mapped = harness.per_device(functools.partial(program, m), harness.mesh(2, 4))
        return np.asarray(mapped(x))

    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES["on_wait"]):
        got = run(pallas_collectives)
    assert not harness.race_reported()
    np.testing.assert_array_equal(got, run(jax.lax))


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("topology", harness.GENERATIONS.values())
def test_compiles_with_nothing_around_it(topology: str, everyone: bool) -> None:
    n = len(harness._topology(topology).devices)
    whole = compile_kernel(topology, (64, 256), rotation(n), everyone).ops
    assert whole == ("parameter", "fusion", "custom-call", "fusion")
    part = compile_kernel(topology, (64, 256), rotation(n)[:-1], everyone).ops
    assert set(part) == {*whole, "broadcast"}


@pytest.mark.parametrize("topology", [*harness.GENERATIONS.values(), "v5e:16x16", "v5p:4x4x4"])
def test_a_gibibyte_needs_no_scratch(topology: str) -> None:
    n = len(harness._topology(topology).devices)
    compiled = compile_kernel(topology, (GIB // 512, 128), rotation(n)[1:], False)
    assert compiled.temp_bytes <= 2 * GIB + (1 << 20)  # operand and result
    assert compiled.seconds < 10


def rotation(n: int) -> ppermute.Pairs:
    return tuple((p, (p + 1) % n) for p in range(n))


def compile_kernel(
    topology: str, shape: tuple[int, ...], perm: ppermute.Pairs, everyone: bool
) -> harness.Compiled:
    n = len(harness._topology(topology).devices)

    def program(x: jax.Array) -> jax.Array:
        group = Group(("x",), (n,))
        return ppermute.direct(x, group, perm=perm, everyone=everyone, vmem=False, interpret=False)

    return harness.compile_for_tpu(program, topology, shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (12, 130), (3, 5, 7)], ids=str)
def test_any_shape_compiles(shape: tuple[int, ...], dtype: str) -> None:
    def program(x: jax.Array) -> jax.Array:
        y = pallas_collectives.ppermute(x.astype(dtype), "x", [(0, 1), (1, 0), (2, 3)])
        return y.real.astype("float32")

    pallas_collectives.reset_counts()
    harness.compile_for_tpu(program, "v5e:2x4", shape)
    assert set(pallas_collectives.counts()) == {("ppermute", "pallas", "everyone")}


def test_lax_serves_where_a_chip_cannot_reach_the_target() -> None:
    def program(x: jax.Array, **how: Any) -> jax.Array:
        return pallas_collectives.ppermute(x, "x", [(0, 3)], **how)

    pallas_collectives.reset_counts()
    harness.compile_for_tpu(program, "v5e:2x4", (8, 128))
    assert pallas_collectives.counts()["ppermute", "xla", None] == 1
    reasons = pallas_collectives.fallback_counts()
    assert any("power-of-two" in reason for reason in reasons)
    assert not any("leave" in reason for reason in reasons)  # lax serves as it is
    for how in ({"backend": "pallas"}, {"algorithm": "everyone"}):
        with pytest.raises(ReachError, match="power-of-two"):
            harness.compile_for_tpu(functools.partial(program, **how), "v5e:2x4", (8, 128))
    with pytest.raises(AlgorithmError, match="shifts by one"):
        partners = functools.partial(program, algorithm="partners")
        harness.compile_for_tpu(partners, "v5e:2x4", (8, 128))


def test_sharded_ppermute_of_a_whole_array() -> None:
    x = harness.random((16, 256), "float32")
    sharded = functools.partial(pallas_collectives.sharded.ppermute, x, mesh=harness.mesh(2, 4))
    got = sharded(axis_name="y", perm=[(0, 1), (2, 0)], axis=-1)
    want = np.zeros_like(x)
    want[:, 64:128], want[:, :64] = x[:, :64], x[:, 128:192]
    np.testing.assert_array_equal(np.asarray(got), want)
    assert got.sharding.spec == PartitionSpec(None, "y")
    with pytest.raises(CollectiveError, match="twice"):
        sharded(axis_name="y", perm=[(0, 1), (2, 1)])


def test_sharded_shuffle_and_broadcast_of_a_whole_array() -> None:
    x, whole = harness.random((16, 8), "float32"), pallas_collectives.sharded
    over_y = {"mesh": harness.mesh(2, 4), "axis_name": "y"}
    blocks = x.reshape(4, 4, 8)
    shuffled = whole.pshuffle(x, perm=[2, 0, 3, 1], **over_y)
    np.testing.assert_array_equal(np.asarray(shuffled), blocks[[2, 0, 3, 1]].reshape(x.shape))
    spec = PartitionSpec("x", "y")
    sent = whole.pbroadcast(x, source=3, axis=1, spec=spec, **over_y)
    np.testing.assert_array_equal(np.asarray(sent), np.tile(x[:, 6:], 4))
    assert sent.sharding.spec == spec
