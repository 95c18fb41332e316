"""The fused kernels round two rings: values, faults, what races on some schedule.

Which devices are next to each other is the torus's matter (`two_rings`); kernels go by the orders.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import harness
from pallas_collectives.kernels import collective_matmul, matmul_plan, streams
from pallas_collectives.kernels.machinery import channel, sync
from pallas_collectives.replay import Machine, replay
from pallas_collectives.topology.groups import Group

pytestmark = pytest.mark.full

F32 = jnp.dtype(jnp.float32)
ROWS, WIDE = 32, 128
GROUPS = {
    4: Group(("x",), (4,), order=(0, 1, 2, 3), second=(0, 2, 3, 1)),
    5: Group(("x",), (5,), order=(0, 1, 2, 3, 4), second=(0, 2, 4, 1, 3)),
}


def both(x: Any, w: Any, *, n: int, interpret: Any) -> tuple[Any, Any]:
    """The gathered x with w, and that times w transposed, summed and scattered."""
    options = {"precision": None, "interpret": interpret}
    _, y = collective_matmul.all_gather_matmul(
        x, [w], GROUPS[n], out_dtype=F32, transposed=False, **options
    )
    return y, collective_matmul.matmul_reduce_scatter(
        y, w, GROUPS[n], wire_dtype=F32, scale=1.0, transposed=True, **options
    )


def program(n: int, interpret: Any) -> tuple[Callable[[], Any], list[np.ndarray]]:
    """Runs both kernels, and what they should make."""
    x, w = harness.random((n, 1, ROWS, WIDE), F32), harness.random((n, WIDE, WIDE), F32, 1)
    y = np.concatenate(x, axis=1) @ w[:, None]
    back = np.stack(np.split((y @ w[:, None].swapaxes(2, 3)).sum(axis=0), n, axis=1))
    each = functools.partial(both, n=n, interpret=interpret)
    run = harness.per_device(each, harness.mesh(n), check_vma=False)
    return lambda: run(x, w), [y, back]


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("n, cores, chunks", [(4, 1, 4), (5, 1, 2), (4, 1, 1), (4, 2, 1)])
def test_values(
    n: int, cores: int, chunks: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a block's chunks go round each ring; each of two cores goes round one."""
    monkeypatch.setattr(matmul_plan, "CHUNKS", (chunks,))
    params = harness.ADVERSARIES[mode]
    if cores > 1:
        params = dataclasses.replace(params, num_cores_or_threads=cores)
    run, wanted = program(n, params)
    for got, want in zip(run(), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)
    assert not harness.race_reported()


@pytest.mark.parametrize("kernel", [0, 1])
def test_messages_that_go_round_the_first_alone_are_caught(
    kernel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_first(ring: Any, *args: Any, **options: Any) -> channel.Channel:
        return channel.Channel(ring.of_number(0), *args, **options)

    monkeypatch.setattr(matmul_plan, "CHUNKS", (2,))
    monkeypatch.setattr(streams, "Channel", on_first)
    run, wanted = program(4, harness.ADVERSARIES["on_wait"])
    assert harness.caught(lambda: run()[kernel], wanted[kernel])


def races(n: int) -> Any:
    """What can race on some schedule."""
    machine, everywhere = Machine.named(f"v5e:{n}"), PartitionSpec()
    function = jax.shard_map(
        functools.partial(both, n=n, interpret=False),
        mesh=machine.mesh({"x": n}),
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    shapes = [jax.ShapeDtypeStruct(shape, F32) for shape in ((1, ROWS, WIDE), (WIDE, WIDE))]
    return replay(function, *shapes, machine=machine, races=True).races


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("n", GROUPS)
def test_the_replay_knows_no_race(n: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_plan, "CHUNKS", (chunks,))
    assert races(n) == []


def test_the_replay_knows_that_neighbours_on_both_are_to_enter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matmul_plan, "CHUNKS", (4,))
    enter = sync.barrier_with_neighbours

    def of_one(first: Any, *_: Any, **how: Any) -> None:
        enter(first, **how)

    monkeypatch.setattr(sync, "barrier_with_neighbours", of_one)
    assert races(5)
