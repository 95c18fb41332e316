"""Kernels that use what Pallas TPU programs may use, sound and faulty: grids, index maps, scalar
tables, pipelines, refs of other kinds, several kernels that share semaphores.

Each is a `judged.Case`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import judged
from judged import hop, launch
from replay_kernels import DMA, barrier, neighbours

TILE = pl.BlockSpec((8, 128), lambda i: (i, 0))


def case(name: str, body: Any, *finds: str, devices: Any = (2, 3), **fields: Any) -> None:
    judged.case(name, body, *finds, devices=devices, **fields)


def gridded(x: Any, kernel: Any, *, grid: Any, index: Any = None, tables: Any = (), **how: Any):
    """A kernel over blocks of 8 rows, with tables that index maps may read."""
    block = pl.BlockSpec((8, 128), index or (lambda i, *_: (i, 0)))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=grid,
            in_specs=[block],
            out_specs=pl.BlockSpec((8, 128), lambda i, *_: (i, 0)),
            **how,
        ),
    )(*tables, x)


def _double(*refs: Any) -> None:
    *_, x_ref, o_ref = refs
    o_ref[...] = x_ref[...] * 2


# Grids, tables, pipelines -------------------------------------------------------------------------


def _tables(x: Any, n: int) -> Any:
    """Blocks in another order on each device."""
    order = lax.rem(jnp.arange(2, dtype=jnp.int32) + lax.axis_index("x"), jnp.int32(2))
    return gridded(x, _double, grid=(2,), index=lambda i, t: (t[i], 0), tables=(order,))


def _dynamic(x: Any, n: int) -> Any:
    """A grid of another size on each device."""
    return gridded(x, _double, grid=(1 + lax.axis_index("x") % 2,))


def _outside(x: Any, n: int) -> Any:
    return gridded(x, _double, grid=(2,), index=lambda i, *_: (i + x.shape[0] // 8, 0))


def _by_element(x: Any, n: int) -> Any:
    block = pl.BlockSpec((pl.Element(8), 128), lambda i: (8 * i, 0))
    return pl.pallas_call(
        _double,
        grid=(2,),
        in_specs=[block],
        out_specs=TILE,
        out_shape=jax.ShapeDtypeStruct((16, 128), x.dtype),
    )(x)


def _added_up(x: Any, n: int) -> Any:
    """Sums over the inner dimension of a grid, which alone must be gone through in order."""

    def kernel(x_ref: Any, o_ref: Any, total: Any) -> None:
        first, last = pl.program_id(1) == 0, pl.program_id(1) == pl.num_programs(1) - 1
        total[...] = jnp.where(first, 0.0, total[...]) + x_ref[...]

        @pl.when(last)
        def _() -> None:
            o_ref[...] = total[...]

    return pl.pallas_call(
        kernel,
        grid=(2, 2),
        in_specs=[pl.BlockSpec((8, 128), lambda i, j: (lax.rem(i + j, 2), 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((16, 128), x.dtype),
        scratch_shapes=[pltpu.VMEM((8, 128), x.dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )(x)


def _looped(x: Any, n: int, *, through_hbm: bool, turns: int = 2, early: bool = False) -> Any:
    """As many turns as a table says, which lies in scalar memory, or is brought there; read
    `early`, before it has come.
    """

    def kernel(t_ref: Any, x_ref: Any, o_ref: Any, table: Any, sem: Any) -> None:
        brought = pltpu.make_async_copy(t_ref, table, sem)
        if through_hbm:
            brought.start()
        if through_hbm and not early:
            brought.wait()
        count = (table if through_hbm else t_ref)[1]
        if through_hbm and early:
            brought.wait()

        def turn(i: Any) -> Any:
            part = pl.ds(8 * i, 8)
            copy = pltpu.make_async_copy(x_ref.at[part], o_ref.at[part], sem)
            copy.start()
            copy.wait()
            return i + 1

        lax.while_loop(lambda i: i < count, turn, 0)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    where = anywhere if through_hbm else pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[where, anywhere],
        out_specs=anywhere,
        scratch_shapes=[pltpu.SMEM((2,), jnp.int32), DMA],
    )(jnp.array([7, turns], jnp.int32), x)


def _pipelined(x: Any, n: int, *, early: bool, buffers: int = 2) -> Any:
    """Adds what comes to x by a pipeline; `early`, before it has come."""

    def kernel(x_ref: Any, o_ref: Any, landing: Any, send: Any, recv: Any) -> None:
        _, right, left = neighbours(n)
        barrier(left, right)
        copy = hop(x_ref, landing, send, recv, right)
        copy.start()
        if not early:
            copy.wait()

        def add(a: Any, b: Any, c: Any) -> None:
            c[...] = a[...] + b[...]

        tile = pl.BlockSpec(
            (8, 128), lambda i: (i, 0), pipeline_mode=pl.Buffered(buffer_count=buffers)
        )
        grid = (x.shape[0] // 8,)
        add_all = pltpu.emit_pipeline(add, grid=grid, in_specs=[tile, tile], out_specs=[TILE])
        add_all(x_ref, landing, o_ref)
        if early:
            copy.wait()

    return launch(kernel, x, pltpu.HBM(x.shape, x.dtype), DMA, DMA)


case("blocks by a table", _tables)
case("a dynamic grid", _dynamic)
case("a block outside", _outside, "bounds", devices=(2,))
case("blocks by element", _by_element, devices=(2,))
case("sums over a grid", _added_up, devices=(2,))
case("a loop by a table", lambda x, n: _looped(x, n, through_hbm=False), devices=(2,))
case("a loop by a table from HBM", lambda x, n: _looped(x, n, through_hbm=True), devices=(2,))
case(
    "a loop by a table read early",
    lambda x, n: _looped(x, n, through_hbm=True, early=True),
    "race",
    devices=(2,),
)
case(
    "a loop beyond the operand",
    lambda x, n: _looped(x, n, through_hbm=True, turns=1000),
    "bounds",
    devices=(2,),
)
case("a pipeline", lambda x, n: _pipelined(x, n, early=False))
case("a pipeline of three buffers", lambda x, n: _pipelined(x, n, early=False, buffers=3))
case("a pipeline too early", lambda x, n: _pipelined(x, n, early=True), "race")


# Refs ---------------------------------------------------------------------------------------------


def _seen_as_integers(x: Any, n: int, *, apart: bool) -> Any:
    """Sends half of x as integers, reshaped; and writes the same half, or the other, as floats."""
    rows = x.shape[0] // 2

    def kernel(x_ref: Any, o_ref: Any, own: Any, come: Any, send: Any, recv: Any) -> None:
        _, right, left = neighbours(n)
        barrier(left, right)
        pltpu.sync_copy(x_ref, own)
        view = own.reshape(2, rows, 128).bitcast(jnp.int32).at[0]
        copy = hop(view, come, send, recv, right)
        copy.start()
        own[pl.ds(rows if apart else 0, 8)] = jnp.zeros((8, 128), x.dtype)
        copy.wait()
        pltpu.sync_copy(own, o_ref)

    return launch(
        kernel, x, pltpu.VMEM(x.shape, x.dtype), pltpu.VMEM((rows, 128), jnp.int32), DMA, DMA
    )


def _selected(x: Any, n: int, *, by_turns: bool) -> Any:
    """Two hops, each into a buffer and on a semaphore of its own, or both into the first."""

    def kernel(x_ref: Any, o_ref: Any, a: Any, b: Any, send: Any, recv: Any) -> None:
        me = lax.axis_index("x")
        _, right, left = neighbours(n)
        barrier(left, right)
        copies = []
        for i in range(2):
            which = lax.rem(me + i, 2) if by_turns else lax.rem(me + i, 1)
            goal = pl.select_ref(which, a, b)
            copies.append(hop(x_ref, goal, send.at[i], recv.at[i], right))
            copies[-1].start()
        for copy in copies:
            copy.wait()
        pltpu.sync_copy(a, o_ref)

    buffer = pltpu.VMEM(x.shape, x.dtype)
    return launch(kernel, x, buffer, buffer, DMA((2,)), DMA((2,)))


def _branching(x: Any, n: int) -> Any:
    """Other copies by `switch`, on other devices, after a delay that differs."""

    def kernel(x_ref: Any, o_ref: Any, sem: Any) -> None:
        me = lax.axis_index("x")
        getattr(pl, "delay", getattr(pltpu, "delay", None))(100 * me)
        pl.debug_print("device {}", me)

        def copied(first: int) -> None:
            part = pl.ds(first, 8)
            copy = pltpu.make_async_copy(x_ref.at[part], o_ref.at[part], sem)
            copy.start()
            copy.wait()

        lax.switch(me, [lambda: copied(0), lambda: copied(8)])

    return launch(kernel, x, DMA)


case("seen as integers", lambda x, n: _seen_as_integers(x, n, apart=True))
case("seen as integers, one overwritten", lambda x, n: _seen_as_integers(x, n, apart=False), "race")
case("refs selected by turns", lambda x, n: _selected(x, n, by_turns=True), devices=(2, 4))
case("refs selected twice", lambda x, n: _selected(x, n, by_turns=False), "race")
case("branches", _branching)


# Without a barrier of its own ---------------------------------------------------------------------


def _unmet(x: Any, n: int, **params: Any) -> Any:
    """A hop without a barrier: the compiler puts one before it unless it is told not to."""

    def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
        _, right, _ = neighbours(n)
        copy = hop(x_ref, o_ref, send, recv, right)
        copy.start()
        copy.wait()

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        in_specs=[anywhere],
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[DMA, DMA],
        compiler_params=pltpu.CompilerParams(has_side_effects=True, **params),
    )(x)


case("the compiler's barrier", _unmet, devices=(2, 3, 5))
case("the compiler's barrier, twice", lambda x, n: _unmet(_unmet(x, n), n), devices=(2, 3, 5))
case(
    "the compiler's barrier, not wanted",
    lambda x, n: _unmet(x, n, skip_device_barrier=True),
    "race",
    "entry",
)


# Semaphores that kernels hand on ------------------------------------------------------------------


def _split(x: Any, n: int, *, awaited: bool = True, kept: bool = True) -> Any:
    """One kernel starts a copy, another awaits it."""
    anywhere, sem = (pl.BlockSpec(memory_space=space) for space in (pl.ANY, pltpu.SEMAPHORE))
    array, semaphore = jax.ShapeDtypeStruct(x.shape, x.dtype), pltpu.SemaphoreType.DMA(())
    params = pltpu.CompilerParams(collective_id=0, has_side_effects=True)

    def start(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
        _, right, left = neighbours(n)
        barrier(left, right)
        hop(x_ref, o_ref, send, recv, right).start()

    def done(o_ref: Any, send: Any, recv: Any, result_ref: Any) -> None:
        if awaited:
            hop(o_ref, o_ref, send, recv, 0).wait()

    y, sent, come = pl.pallas_call(
        start,
        in_specs=[anywhere],
        out_specs=(anywhere, sem, sem),
        out_shape=(array, semaphore, semaphore),
        compiler_params=params,
    )(x)
    if not kept:
        y = y + 1.0
    return pl.pallas_call(
        done,
        in_specs=[anywhere, sem, sem],
        out_specs=anywhere,
        out_shape=array,
        input_output_aliases={0: 0},
        compiler_params=pltpu.CompilerParams(has_side_effects=True),
    )(y, sent, come)


case("a split pair", _split)
case("a split pair, not awaited", lambda x, n: _split(x, n, awaited=False), "race", "left over")
case("a split pair, read in between", lambda x, n: _split(x, n, kept=False), "race")


# Reshaped refs ------------------------------------------------------------------------------------


def _reshaped(x: Any, n: int, *, overlap: int = 0) -> Any:
    """Each device writes its rows to all; the rows of one are two of the result's dimension 1."""
    rows = x.shape[0]

    def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
        me, out = lax.axis_index("x"), o_ref.reshape(n * rows, 128)
        barrier(*range(n))

        def copy(origin: Any, to: Any) -> Any:
            goal = out.at[pl.ds(jnp.maximum(origin * rows - overlap, 0), rows)]
            return hop(x_ref, goal, send, recv.at[origin], to)

        for to in range(n):
            copy(me, to).start()
        for origin in range(n):
            copy(origin, 0).wait()

    return launch(kernel, x, DMA, pltpu.SemaphoreType.DMA((n,)), out=(1, 2 * n, rows // 2, 128))


case("a gather into a reshaped ref", _reshaped)
case("a gather into a reshaped ref, one row off", lambda x, n: _reshaped(x, n, overlap=1), "race")
