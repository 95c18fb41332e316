"""Times a probe: on the devices there are, or by replay on a machine whose figures are known."""

import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.probes.rig import LANES, Probe, Rig, shapes
from benchmarks.timing import clocked, difference
from pallas_collectives.replay import replay

Clock = Callable[[Rig, Probe], float]  # seconds of one repetition

_FEW, _MANY = 8, 24  # repetitions of a replay, whose times are exact
_SECONDS = 4e-3  # of the longer run on hardware: far above what a dispatch varies by
_SAMPLES = 9


class ProbeError(Exception):
    """A probe that did not run as it must: its data are wrong, or its times make no sense."""


def by_replay(rig: Rig, this: Probe) -> float:
    """By the model, whose figures an estimate must find again."""
    _, __, x = shapes(rig, this)

    def run(count: int) -> float:
        report = replay(
            this.program, np.array([count], np.int32), this.peers, x, machine=rig.machine
        )
        if report.findings:
            raise ProbeError(f"{this.name}, replayed on {rig.machine}: {report}")
        return report.time

    return (run(_MANY) - run(_FEW)) / (_MANY - _FEW)


def by_hardware(rig: Rig, this: Probe) -> float:
    """On TPUs. What comes out of the probe is compared with what must."""
    run = runner(rig, this)
    few = 16
    many = few + max(64, round(_SECONDS / this.guess))
    check(rig, this, run, few)
    short, long = (functools.partial(clocked, run, count) for count in (few, many))
    short(), long()
    samples = [difference(short, long, many - few) for _ in range(_SAMPLES)]
    seconds = statistics.median(samples)
    if seconds <= 0:
        raise ProbeError(f"{this.name}: {many} repetitions took no longer than {few}")
    return seconds


def runner(rig: Rig, this: Probe) -> Callable[[int], jax.Array]:
    """The compiled program as a function of the count."""
    count, peers, x = shapes(rig, this)
    program = jax.jit(this.program).lower(count, peers, x).compile()
    pattern = this.pattern(rig.size).reshape(x.shape)
    table, operand = _put(this.peers, peers), _put(pattern, x)

    def run(n: int) -> jax.Array:
        result: jax.Array = program(_put(np.array([n], np.int32), count), table, operand)
        return result

    return run


def check(rig: Rig, this: Probe, run: Callable[[int], jax.Array], count: int) -> None:
    """Raises ProbeError where an element differs from what must be there."""
    result = run(count)
    expected = this.expected(count, this.pattern(rig.size)).reshape(-1, LANES)
    for shard in result.addressable_shards:
        want, got = expected[shard.index], np.asarray(shard.data)
        wrong = int(np.sum((got != want) & ~np.isnan(want)))
        if wrong:
            zeros = int(np.sum((got == 0) & (want != 0)))
            raise ProbeError(
                f"{this.name}: {wrong} of {want.size} elements on {shard.device} are wrong, "
                f"{zeros} of them zero"
            )


def _put(value: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    value = np.asarray(value, jnp.dtype(like.dtype))
    return jax.make_array_from_callback(value.shape, like.sharding, lambda index: value[index])
