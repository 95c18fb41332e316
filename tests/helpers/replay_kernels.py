"""Small kernels for replay's tests: sound ones, and ones with a fault that replay must name."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

signal = getattr(pl, "semaphore_signal", None) or pltpu.semaphore_signal
wait = getattr(pl, "semaphore_wait", None) or pltpu.semaphore_wait
read = getattr(pl, "semaphore_read", None) or pltpu.semaphore_read
DMA, REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR


def sharded(body: Any, mesh: Any, n_args: int = 1) -> Any:
    """`body` on the mesh's devices, every operand and result split over its axis x."""
    specs = (P("x"),) * n_args
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False)


def launch(
    kernel: Any, *xs: Any, out: Any, scratch: Any, spaces: Any = None, interpret: Any = False
) -> Any:
    """One call of `kernel` with operands and result in HBM unless `spaces` says otherwise."""
    spaces = spaces or [pl.ANY] * len(xs)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        in_specs=[pl.BlockSpec(memory_space=s) for s in spaces],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=scratch,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
    )(*xs)


def neighbours(n: int) -> tuple[Any, Any, Any]:
    me = lax.axis_index("x")
    return me, lax.rem(me + 1, n), lax.rem(me + n - 1, n)


def barrier(*devices: Any, expect: int | None = None, sem: Any = None) -> None:
    sem = pltpu.get_barrier_semaphore() if sem is None else sem
    for device in devices:
        signal(sem, 1, device_id={"x": device})
    wait(sem, len(devices) if expect is None else expect)


def ring(
    x: Any,
    n: int,
    *,
    fault: str | None = None,
    unrolled: bool = False,
    interpret: Any = False,
) -> Any:
    """An all-gather around a ring. Faults: shared (one receive semaphore), no_barrier, no_wait,
    stuck, left_over, scratch (a barrier on a semaphore of the kernel's own).
    """

    def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any, copy: Any, entered: Any) -> None:
        me, right, left = neighbours(n)
        if fault == "scratch":
            barrier(left, right, sem=entered)
        elif fault != "no_barrier":
            barrier(left, right, expect={"stuck": 3, "left_over": 1}.get(str(fault)))
        own = pltpu.make_async_copy(x_ref, o_ref.at[me], copy)
        own.start()
        own.wait()

        def step(i: Any, _: Any) -> None:
            block = o_ref.at[lax.rem(me - i + n, n)]
            sem = recv.at[0 if fault == "shared" else i]
            hop = pltpu.make_async_remote_copy(block, block, send, sem, device_id={"x": right})
            hop.start()
            if fault == "no_wait":
                hop.wait_send()
            else:
                hop.wait()

        if unrolled:
            for i in range(n - 1):
                step(i, None)
        else:
            lax.fori_loop(0, n - 1, step, None)

    return launch(
        kernel,
        x,
        out=jax.ShapeDtypeStruct((n, *x.shape), x.dtype),
        scratch=[DMA, DMA((max(n - 1, 1),)), DMA, REGULAR],
        interpret=interpret,
    )


def gridded(x: Any, n: int) -> Any:
    """An all-gather around a ring as a grid of n-1 steps, the first of which has the barrier."""

    def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
        me, right, left = neighbours(n)
        i = pl.program_id(0)

        @pl.when(i == 0)
        def _() -> None:
            barrier(left, right)
            pltpu.sync_copy(x_ref, o_ref.at[me])

        block = o_ref.at[lax.rem(me - i + n, n)]
        hop = pltpu.make_async_remote_copy(
            block, block, send.at[i], recv.at[i], device_id={"x": right}
        )
        hop.start()
        hop.wait()

    return pl.pallas_call(
        kernel,
        grid=(n - 1,),
        out_shape=jax.ShapeDtypeStruct((n, *x.shape), x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[DMA((n - 1,)), DMA((n - 1,))],
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
    )(x)


def relay(x: Any, n: int, *, rounds: int, credits: bool = True, interpret: Any = False) -> Any:
    """Passes a block around the ring through two slots, reused under credits (or, faulty, not)."""

    def kernel(x_ref: Any, o_ref: Any, slots: Any, send: Any, recv: Any, credit: Any, copy: Any):
        _, right, left = neighbours(n)
        barrier(left, right)
        first = pltpu.make_async_copy(x_ref, slots.at[0], copy)
        first.start()
        first.wait()
        for i in range(rounds):
            here, there = i % 2, (i + 1) % 2
            if credits and i > 0:
                wait(credit, 1)  # our right neighbour has sent on what lay in the slot we write to
            hop = pltpu.make_async_remote_copy(
                slots.at[here], slots.at[there], send, recv.at[there], device_id={"x": right}
            )
            hop.start()
            hop.wait()
            if credits and i < rounds - 1:
                signal(credit, 1, device_id={"x": left})
        last = pltpu.make_async_copy(slots.at[rounds % 2], o_ref, copy)
        last.start()
        last.wait()

    return launch(
        kernel,
        x,
        out=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch=[pltpu.VMEM((2, *x.shape), x.dtype), DMA, DMA((2,)), REGULAR, DMA],
        interpret=interpret,
    )


def uneven(x: Any, n: int, *, interpret: Any = False) -> Any:
    """Devices that differ: device 0 takes another branch, device d goes d times round a loop."""

    def kernel(x_ref: Any, o_ref: Any, copy: Any) -> None:
        me = lax.axis_index("x")

        @pl.when(me == 0)
        def _() -> None:
            done = pltpu.make_async_copy(x_ref, o_ref.at[n], copy)
            done.start()
            done.wait()

        def body(i: Any) -> Any:
            one = pltpu.make_async_copy(x_ref, o_ref.at[i], copy)
            one.start()
            one.wait()
            return i + 1

        lax.while_loop(lambda i: i < me, body, 0)

    out = jax.ShapeDtypeStruct((n + 1, *x.shape), x.dtype)
    return launch(kernel, x, out=out, scratch=[DMA], interpret=interpret)


def ragged(rows: Any, x: Any, n: int, *, interpret: Any = False) -> Any:
    """Sends `rows[0]` rows (read from SMEM; a multiple of 8) to the right."""

    def kernel(rows_ref: Any, x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
        _, right, left = neighbours(n)
        barrier(left, right)
        part = pl.ds(0, rows_ref[0])
        pltpu.make_async_remote_copy(
            x_ref.at[part], o_ref.at[part], send, recv, device_id={"x": right}
        ).start()
        pltpu.make_async_copy(x_ref.at[part], x_ref.at[part], send).wait()
        due = pl.ds(0, rows_ref[1])
        pltpu.make_async_copy(x_ref.at[due], x_ref.at[due], recv).wait()

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    spaces = [pltpu.SMEM, pl.ANY]
    return launch(kernel, rows, x, out=out, scratch=[DMA, DMA], spaces=spaces, interpret=interpret)


def doubled(x: Any, *, interpret: Any = False) -> Any:
    """x + x by blocks over a grid: copies made by Pallas, no communication."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] + x_ref[...]

    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // 8,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=interpret,
    )(x)


def summed(x: Any, n: int, *, interpret: Any = False) -> Any:
    """Adds what the left neighbour sends to our block, tile by tile through VMEM."""

    def kernel(x_ref: Any, o_ref: Any, landing: Any, send: Any, recv: Any) -> None:
        _, right, left = neighbours(n)
        barrier(left, right)
        hop = pltpu.make_async_remote_copy(x_ref, landing, send, recv, device_id={"x": right})
        hop.start()
        hop.wait()

        def add(a: Any, b: Any, c: Any) -> None:
            c[...] = a[...] + b[...]

        tile = pl.BlockSpec((8, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(add, grid=(x.shape[0] // 8,), in_specs=[tile, tile], out_specs=[tile])(
            x_ref, landing, o_ref
        )

    return launch(
        kernel,
        x,
        out=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch=[pltpu.HBM(x.shape, x.dtype), DMA, DMA],
        interpret=interpret,
    )


def polling(x: Any, n: int, *, needs: int = 0, interpret: Any = False) -> Any:
    """Waits for its left neighbour by reading a semaphore until it is 1, and then for `needs`."""

    def kernel(x_ref: Any, o_ref: Any, arrived: Any, copy: Any) -> None:
        _, right, left = neighbours(n)
        barrier(left, right)
        signal(arrived, 1, device_id={"x": right})
        seen = lax.while_loop(lambda seen: seen < 1, lambda _: read(arrived), jnp.int32(0))
        wait(arrived, seen + needs)
        done = pltpu.make_async_copy(x_ref, o_ref, copy)
        done.start()
        done.wait()

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch(kernel, x, out=out, scratch=[REGULAR, DMA], interpret=interpret)


def shift(x: Any, n: int, offset: int = 1, *, entry: str = "double") -> Any:
    """Sends x to the device `offset` to the right.

    Entered "once", a device may begin its next call before all have begun this one. "double", as in
    JAX's documentation: nobody leaves before both neighbours have passed the barrier. "everyone":
    nobody passes it before all are there.
    """

    def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
        me = lax.axis_index("x")
        to, source = lax.rem(me + offset, n), lax.rem(me + n - offset, n)
        if entry == "everyone":
            barrier(*(lax.rem(me + i, n) for i in range(1, n)))
        else:
            barrier(to, source)
        if entry == "double":
            pl.run_scoped(lambda second: barrier(to, source, sem=second), REGULAR)
        hop = pltpu.make_async_remote_copy(x_ref, o_ref, send, recv, device_id={"x": to})
        hop.start()
        hop.wait()

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch(kernel, x, out=out, scratch=[DMA, DMA])


def parts(x: Any, n: int, *, sizes: Any, waits: Any, reads_after: int, reads: int) -> Any:
    """Sends rows to the right in copies of so many rows each, all on one receive semaphore; waits
    for so many rows at a time, and reads the first `reads` of them after `reads_after` waits.
    """

    def kernel(x_ref: Any, o_ref: Any, landing: Any, send: Any, recv: Any) -> None:
        _, right, left = neighbours(n)
        barrier(left, right)
        start = 0
        for size in sizes:
            part = pl.ds(start, size)
            pltpu.make_async_remote_copy(
                x_ref.at[part], landing.at[part], send, recv, device_id={"x": right}
            ).start()
            start += size
        for number, size in enumerate(waits):
            if number == reads_after:
                pltpu.sync_copy(landing.at[pl.ds(0, reads)], o_ref)
            come = landing.at[pl.ds(0, size)]
            pltpu.make_async_copy(come, come, recv).wait()
        if reads_after == len(waits):
            pltpu.sync_copy(landing.at[pl.ds(0, reads)], o_ref)
        whole = x_ref.at[pl.ds(0, sum(sizes))]
        pltpu.make_async_copy(whole, whole, send).wait()

    rows = sum(sizes)
    out = jax.ShapeDtypeStruct((reads, *x.shape[1:]), x.dtype)
    landing = pltpu.HBM((rows, *x.shape[1:]), x.dtype)
    return launch(kernel, x, out=out, scratch=[landing, DMA, DMA])


def counting(x: Any, added: int, taken: int) -> Any:
    """Signals its own barrier semaphore `added` times and waits for `taken` of them."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        signal(pltpu.get_barrier_semaphore(), added)
        wait(pltpu.get_barrier_semaphore(), taken)
        pltpu.sync_copy(x_ref, o_ref)

    return launch(kernel, x, out=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch=[])


def holding(
    x: Any, *scopes: Any, nested: bool = True, scratch: Any = (), vmem: int | None = None
) -> Any:
    """Copies x while it holds each of the allocations, all at once or one after the other.

    `scopes`: of semaphores, or of rows of 128 floats in VMEM; `scratch`: held all the time.
    """

    def kernel(x_ref: Any, o_ref: Any, copy: Any, *_: Any) -> None:
        def hold(rest: Any) -> None:
            def inside(ref: Any) -> None:
                if ref.dtype == x_ref.dtype:  # the compiler drops what nothing touches
                    pltpu.sync_copy(x_ref.at[pl.ds(0, 8)], ref.at[pl.ds(0, 8)])
                hold(rest[1:])

            if rest:
                pl.run_scoped(inside, rest[0])
            else:
                done = pltpu.make_async_copy(x_ref, o_ref, copy)
                done.start()
                done.wait()

        for together in (scopes,) if nested else [(scope,) for scope in scopes]:
            hold(together)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[hbm],
        out_specs=hbm,
        scratch_shapes=[DMA, *scratch],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem),
    )(x)


def shipped_all_gather(x: Any, mesh: Any) -> Any:
    """The all-gather that JAX ships."""
    from jax.experimental.pallas.ops.tpu import all_gather

    return all_gather.all_gather(x, mesh=mesh, axis_name="x", memory_space=pl.ANY)
