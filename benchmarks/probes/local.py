"""What a device costs by itself: to start a DMA, to wait for one, to launch a kernel; its memories.

All kernels take (count_ref, peers_ref, x_ref, o_ref, *scratch), x and o in HBM (see `rig.probe`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.probes.rig import LANES, TILE, Probe, Rig, probe
from pallas_collectives.annotations import Copy, Number, Ref, Semaphore
from pallas_collectives.kernels.machinery import sparsecore, sync
from pallas_collectives.kernels.machinery.combine import SUBCORE_COLUMNS

FEW, MANY = 4, 16  # DMAs in flight together
IN_FLIGHT = 8  # chunks of the stream from HBM
VECTOR_ROWS = 64  # 8 registers of 8 x 128
OPERATIONS = 16  # multiplications, and as many additions, in a repetition
STORED_ROWS = 512
ROWS_THERE = 64  # of a subcore
COPIES_THERE = 3  # of a launch on a SparseCore: its two tables, and a tile


def _repeat(count_ref: Ref, body: Callable[[Number], None]) -> None:
    lax.fori_loop(0, count_ref[0], lambda i, _: body(i), None)


def _copy_together(count_ref: Ref, from_ref: Ref, to_ref: Ref, sem: Semaphore) -> None:
    """As many tiles as there are semaphores: all DMAs are started, then awaited."""

    def once(_: object) -> None:
        spans = (pl.ds(i * TILE, TILE) for i in range(sem.shape[0]))
        copies = [
            pltpu.make_async_copy(from_ref.at[rows], to_ref.at[rows], sem.at[i])
            for i, rows in enumerate(spans)
        ]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

    _repeat(count_ref, once)


def batch(rig: Rig, in_flight: int) -> Probe:
    """Starts DMAs of one tile, HBM to VMEM, then waits for all: n starts and one latency."""

    def kernel(count_ref: Ref, _: Ref, x_ref: Ref, o_ref: Ref, tiles: Ref, sem: Semaphore) -> None:
        _copy_together(count_ref, x_ref, tiles, sem)
        pltpu.sync_copy(tiles, o_ref)

    rows, g = in_flight * TILE, rig.machine.generation
    return probe(
        rig,
        f"batch_of_{in_flight}",
        kernel,
        rows=rows,
        expected=lambda count, x: x,
        guess=in_flight * g.issue_cost + g.dma_latency,
        scratch=[pltpu.VMEM((rows, LANES), jnp.float32), pltpu.SemaphoreType.DMA((in_flight,))],
    )


def signal(rig: Rig) -> Probe:
    """Signals this device's own semaphore, and waits for it."""

    def kernel(count_ref: Ref, _: Ref, x_ref: Ref, o_ref: Ref, sem: Semaphore) -> None:
        def once(_: object) -> None:
            for _ in range(MANY):
                pl.semaphore_signal(sem, 1)
            pl.semaphore_wait(sem, MANY)

        _repeat(count_ref, once)
        pltpu.sync_copy(x_ref, o_ref)

    return probe(
        rig,
        "signals",
        kernel,
        rows=TILE,
        expected=lambda count, x: x,
        guess=MANY * rig.machine.generation.issue_cost,
        scratch=[pltpu.SemaphoreType.REGULAR],
    )


def launch(rig: Rig) -> Probe:
    """Launches kernels one after another, each with a DMA of one tile."""

    def kernel(_: Ref, __: Ref, x_ref: Ref, o_ref: Ref, sem: Semaphore) -> None:
        copy = pltpu.make_async_copy(x_ref, o_ref, sem)
        copy.start()
        copy.wait()

    g = rig.machine.generation
    return probe(
        rig,
        "launch",
        kernel,
        rows=TILE,
        expected=lambda count, x: x,
        guess=g.launch_cost + g.issue_cost + g.dma_latency,
        scratch=[pltpu.SemaphoreType.DMA],
        chain=True,
    )


def there(rig: Rig, in_flight: int) -> Probe:
    """As `batch`, on a SparseCore, and from HBM to HBM, as a scalar subcore has no VMEM."""

    def kernel(count_ref: Ref, _: Ref, x_ref: Ref, o_ref: Ref, sem: Semaphore) -> None:
        _copy_together(count_ref, x_ref, o_ref, sem)

    g = rig.machine.generation
    return probe(
        rig,
        f"there_batch_of_{in_flight}",
        kernel,
        rows=in_flight * TILE,
        expected=lambda count, x: x,
        guess=in_flight * g.sparsecore_issue_cost + g.dma_latency,
        scratch=[pltpu.SemaphoreType.DMA((in_flight,))],
        subcores=0,
    )


def launch_there(rig: Rig) -> Probe:
    """As `launch`, on a SparseCore."""

    def kernel(_: Ref, __: Ref, x_ref: Ref, o_ref: Ref) -> None:
        pltpu.sync_copy(x_ref, o_ref)

    g = rig.machine.generation
    return probe(
        rig,
        "launch_there",
        kernel,
        rows=TILE,
        expected=lambda count, x: x,
        guess=g.sparsecore_launch_cost + COPIES_THERE * (g.sparsecore_issue_cost + g.dma_latency),
        scratch=[],
        chain=True,
        subcores=0,
    )


def subcore(rig: Rig) -> Probe:
    """Compares two arrays in a vector subcore's memory, as its sums add them; all do it at once."""

    def kernel(count_ref: Ref, _: Ref, x_ref: Ref, o_ref: Ref, first: Ref, second: Ref) -> None:
        for own in (first, second):
            pltpu.sync_copy(x_ref, own)
        rows, columns = ROWS_THERE // TILE, LANES // SUBCORE_COLUMNS

        def step(i: Any) -> None:
            row, column = lax.div(i, columns) * TILE, lax.rem(i, columns) * SUBCORE_COLUMNS
            at = 0, pl.ds(pl.multiple_of(row, TILE), TILE), pl.ds(column, SUBCORE_COLUMNS)
            first[at] = jnp.maximum(first[at], second[at])

        _repeat(count_ref, lambda _: sync.for_each(0, rows * columns, step))
        pltpu.sync_copy(first, o_ref)

    g = rig.machine.generation
    with jax.sharding.use_abstract_mesh(rig.mesh.abstract_mesh):
        subcores = sparsecore.shares(rig.interpret)
    return probe(
        rig,
        "subcore",
        kernel,
        rows=subcores * ROWS_THERE,
        expected=lambda count, x: x,
        guess=loads_there() / g.subcore_rate,
        scratch=[pltpu.VMEM((1, ROWS_THERE, LANES), jnp.float32)] * 2,
        subcores=subcores,
    )


def loads_there() -> int:
    """Numbers that a subcore loads in a repetition of `subcore`."""
    return 2 * ROWS_THERE * LANES


def hbm(rig: Rig) -> Probe:
    """Streams from HBM into VMEM, with chunks enough in flight to hide the latency."""
    slots = IN_FLIGHT
    chunk = chunk_bytes(rig) // (LANES * 4)

    def kernel(count_ref: Ref, _: Ref, x_ref: Ref, o_ref: Ref, chunks: Ref, sem: Semaphore) -> None:
        def copy(slot: Any) -> Copy:
            rows = pl.ds(pl.multiple_of(slot * chunk, TILE), chunk)
            return pltpu.make_async_copy(x_ref.at[rows], chunks.at[rows], sem.at[slot])

        for slot in range(slots):
            copy(slot).start()

        def once(i: Any) -> None:
            slot = lax.rem(i, slots)
            copy(slot).wait()
            copy(slot).start()

        _repeat(count_ref, once)
        for slot in range(slots):
            copy(slot).wait()
        pltpu.sync_copy(chunks, o_ref)

    rows = slots * chunk
    return probe(
        rig,
        "hbm_to_vmem",
        kernel,
        rows=rows,
        expected=lambda count, x: x,
        guess=chunk * LANES * 4 / rig.machine.generation.hbm_bandwidth,
        scratch=[pltpu.VMEM((rows, LANES), jnp.float32), pltpu.SemaphoreType.DMA((slots,))],
    )


def vector(rig: Rig) -> Probe:
    """Multiplies and adds in registers; both factors are read from memory, so nothing is folded."""

    def kernel(count_ref: Ref, ones_ref: Ref, x_ref: Ref, o_ref: Ref, values: Ref) -> None:
        pltpu.sync_copy(x_ref, values)
        one = jnp.full((VECTOR_ROWS, LANES), ones_ref[0], jnp.int32).astype(jnp.float32)

        def once(_: object, value: jax.Array) -> jax.Array:
            for _ in range(OPERATIONS):
                value = value * one + one
            return value

        values[...] = lax.fori_loop(0, count_ref[0], once, values[...])
        pltpu.sync_copy(values, o_ref)

    return probe(
        rig,
        "vector",
        kernel,
        rows=VECTOR_ROWS,
        expected=lambda count, x: x + np.float32(OPERATIONS * count),
        guess=vector_operations() / rig.machine.generation.vector_rate,
        scratch=[pltpu.VMEM((VECTOR_ROWS, LANES), jnp.float32)],
        peers=np.ones(1, np.int32),
    )


def vector_operations() -> int:
    """Operations on one number each in a repetition of `vector`."""
    return 2 * OPERATIONS * VECTOR_ROWS * LANES


def vmem(rig: Rig) -> Probe:
    """Loads and stores in VMEM, from one half of a buffer to the other and back."""

    def kernel(count_ref: Ref, _: Ref, x_ref: Ref, o_ref: Ref, halves: Ref) -> None:
        pltpu.sync_copy(x_ref, halves.at[0])

        def once(i: Any) -> None:
            halves[lax.rem(i + 1, 2)] = halves[lax.rem(i, 2)]

        _repeat(count_ref, once)
        pltpu.sync_copy(halves.at[lax.rem(count_ref[0], 2)], o_ref)

    return probe(
        rig,
        "vmem",
        kernel,
        rows=STORED_ROWS,
        expected=lambda count, x: x,
        guess=vmem_bytes() / rig.machine.generation.vmem_bandwidth,
        scratch=[pltpu.VMEM((2, STORED_ROWS, LANES), jnp.float32)],
    )


def vmem_bytes() -> int:
    """Bytes loaded and stored in a repetition of `vmem`."""
    return 2 * STORED_ROWS * LANES * 4


def chunk_bytes(rig: Rig) -> int:
    """Bytes of a repetition of `hbm`: half a block, so that all in flight fit the least VMEM."""
    return max(TILE, rig.block_bytes // (2 * LANES * 4)) * LANES * 4
