"""Races of public kernels in miniature, each written anew: kernels, all faulty (`judged`).

The page on proofs (`proving-a-kernel.md`) says which kernels have them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from judged import case, hop, launch
from replay_kernels import DMA, REGULAR, barrier, neighbours, signal, wait


def in_vmem(kernel: Any, x: Any, *scratch: Any, out: Any = None, number: int | None = None) -> Any:
    """A kernel of one operand and one result, both in VMEM as wholes."""
    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(out or x.shape, x.dtype),
        in_specs=[whole],
        out_specs=whole,
        scratch_shapes=list(scratch),
        compiler_params=pltpu.CompilerParams(collective_id=number, has_side_effects=True),
    )(x)


def two_rings(x: Any, n: int) -> Any:
    """Gathers upper halves one way round and lower ones the other, on a receive semaphore for each
    way: a later block's bytes pass for those of the block that is sent on next.
    """
    half = x.shape[0] // 2

    def kernel(x_ref: Any, o_ref: Any, sent: Any, arrived: Any, own: Any) -> None:
        me, right, left = neighbours(n)
        pltpu.async_copy(x_ref, o_ref.at[me], own).wait()
        barrier(left, right)
        for step in range(n - 1):
            copies = []
            for way, to in enumerate((right, left)):
                block = lax.rem(me + (n - step if way == 0 else step), n)
                part = o_ref.at[block, pl.ds(way * half, half)]
                copies.append(hop(part, part, sent.at[way], arrived.at[way], to))
                copies[-1].start()
            for copy in copies:
                copy.wait()

    return launch(kernel, x, DMA((2,)), DMA((2,)), DMA, out=(n, *x.shape))


def asks_one_side(x: Any, n: int) -> Any:
    """Hears from the left neighbour that it is there, and writes to the right one."""

    def kernel(x_ref: Any, o_ref: Any, ready: Any, sent: Any, arrived: Any) -> None:
        _, right, _ = neighbours(n)
        for sem in (pltpu.get_barrier_semaphore(), ready):
            signal(sem, 1, device_id={"x": right})
            wait(sem, 1)
        copy = hop(x_ref, o_ref, sent, arrived, right)
        copy.start()
        copy.wait()

    return in_vmem(kernel, x, REGULAR, DMA, DMA, number=0)


def zeroed(x: Any, n: int) -> Any:
    """Zeroes its result, in which the left neighbour's block has perhaps come already."""

    def kernel(x_ref: Any, o_ref: Any, sent: Any, arrived: Any) -> None:
        o_ref[...] = jnp.zeros_like(o_ref)
        copy = hop(x_ref, o_ref, sent, arrived, neighbours(n)[1])
        copy.start()
        copy.wait()

    return in_vmem(kernel, x, DMA, DMA)


def zeroed_by_turns(x: Any, n: int) -> Any:
    """The same with two places: devices of even number send into one, others into the other."""

    def kernel(x_ref: Any, o_ref: Any, sent: Any, arrived: Any) -> None:
        me, right, _ = neighbours(n)
        o_ref[...] = jnp.zeros_like(o_ref)
        for odd in (0, 1):

            @pl.when(lax.rem(me, 2) == odd)
            def _(place: int = 1 - odd) -> None:
                copy = hop(x_ref, o_ref.at[place], sent, arrived, right)
                copy.start()
                copy.wait()

    return in_vmem(kernel, x, DMA, DMA, out=(2, *x.shape))


def gather_in_halves(x: Any, n: int) -> Any:
    """Four devices swap blocks with both neighbours, in two chunks each, and pass on half of either
    neighbour's block, in two chunks of half the size: each when the chunk of its number has come,
    which is not where the chunk lies. The result is zeroed first.
    """
    assert n == 4
    rows = x.shape[0]
    chunk, part = rows // 2, rows // 4

    def kernel(x_ref: Any, o_ref: Any, sent: Any, arrived: Any, passed: Any, come: Any) -> None:
        me, right, left = neighbours(n)
        o_ref[...] = jnp.zeros_like(o_ref)
        sides = ((right, left, 0), (left, right, rows // 2))  # to, from, which half is passed on
        first = []
        for k in range(2):
            for side, (to, _, _) in enumerate(sides):
                mine, there = x_ref.at[pl.ds(k * chunk, chunk)], pl.ds(k * chunk, chunk)
                copy = hop(mine, o_ref.at[me, there], sent.at[side, k], arrived.at[side, k], to)
                copy.start()
                first.append(copy)
        then = []
        for k in range(2):
            for side, (to, source, half) in enumerate(sides):
                first[2 * k + side].wait()
                piece = o_ref.at[source, pl.ds(half + k * part, part)]
                copy = hop(piece, piece, passed.at[side, k], come.at[side, k], to)
                copy.start()
                then.append(copy)
        for copy in then:
            copy.wait()

    return in_vmem(kernel, x, *[DMA((2, 2))] * 4, out=(n, *x.shape))


def scatter_in_two_steps(x: Any, n: int) -> Any:
    """Four devices add up: halves of the block for the opposite device go by either neighbour. It
    adds its own and sends the sum on into the place of the first step, which may still be read.
    """
    assert n == 4
    rows = x.shape[0] // n
    half = rows // 2

    def kernel(x_ref: Any, o_ref: Any, mine: Any, theirs: Any, sent: Any, arrived: Any) -> None:
        me, right, left = neighbours(n)
        opposite = lax.rem(me + 2, n)
        for place, block in enumerate((right, left, opposite)):
            mine[place] = x_ref[pl.ds(block * rows, rows)]
        halves = pl.ds(0, half), pl.ds(half, half)
        first = [
            hop(mine.at[2, part], theirs.at[me, part], sent.at[k], arrived.at[k], to)
            for k, (part, to) in enumerate(zip(halves, (right, left), strict=True))
        ]
        for copy in first:
            copy.start()
        for copy in first:
            copy.wait()
        for place, (part, source) in enumerate(zip(halves, (left, right), strict=True)):
            mine[place, part] += theirs[source, part]
        second = [
            hop(mine.at[k], theirs.at[me], sent.at[2 + k], arrived.at[2 + k], to)
            for k, to in enumerate((right, left))
        ]
        for copy in second:
            copy.start()
        for copy in second:
            copy.wait()
        o_ref[...] = x_ref[pl.ds(me * rows, rows)] + theirs[left] + theirs[right]

    blocks = (pltpu.VMEM((places, rows, 128), x.dtype) for places in (3, n))
    return in_vmem(kernel, x, *blocks, DMA((4,)), DMA((4,)), out=(rows, 128))


case("two rings, a semaphore for each", two_rings, "race", devices=(3, 4))
case("a barrier that asks one side", asks_one_side, "race", "entry", devices=(4,))
case("zeroed while a copy comes", zeroed, "race")
case("zeroed, places by turns", zeroed_by_turns, "race", devices=(2, 4))
case("passed on by another chunk's number", gather_in_halves, "race", devices=(4,))
case("two steps into one place", scatter_in_two_steps, "race", devices=(4,))
