"""Kernels for the tests of `verify`: a ring gather with one line left out or moved, and others."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

DMA = pltpu.SemaphoreType.DMA


def launched(kernel: Any, x: Any, out: Any, scratch: Any, interpret: Any = False) -> Any:
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(out, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
        interpret=interpret,
    )(x)


def greet(n: int) -> None:
    """A barrier with both neighbours."""
    me, barrier = lax.axis_index("x"), pltpu.get_barrier_semaphore()
    for other in (lax.rem(me + 1, n), lax.rem(me + n - 1, n)):
        pl.semaphore_signal(barrier, 1, device_id={"x": other})
    pl.semaphore_wait(barrier, 2)


def to_the_right(x: Any, *, fault: str = "") -> Any:
    """Sends x to the right neighbour. Faults: barrier, wait, stuck, bytes, bounds."""
    n = lax.axis_size("x")

    def kernel(x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any) -> None:
        if fault != "barrier":
            greet(n)
        right = lax.axis_index("x") + 1
        hop = pltpu.make_async_remote_copy(
            x_ref,
            o_ref,
            send_sem,
            recv_sem,
            device_id={"x": right if fault == "bounds" else lax.rem(right, n)},
        )
        hop.start()
        hop.wait_send()
        if fault == "bytes":
            part = o_ref.at[pl.ds(0, 8)]
            pltpu.make_async_copy(part, part, recv_sem).wait()
        elif fault != "wait":
            hop.wait_recv()
        if fault == "stuck":
            hop.wait_recv()

    return launched(kernel, x, x.shape, [DMA, DMA])


def without_barrier(x: Any) -> Any:
    return to_the_right(x, fault="barrier")


def stuck(x: Any) -> Any:
    return to_the_right(x, fault="stuck")


def unwaited(x: Any) -> Any:
    return to_the_right(x, fault="wait")


def half_waited(x: Any) -> Any:
    return to_the_right(x, fault="bytes")


def past_the_end(x: Any) -> Any:
    return to_the_right(x, fault="bounds")


class Semaphores(NamedTuple):
    """Semaphores of a kernel that takes its scratch as a record."""

    sent: Any
    arrived: Any


def gather(x: Any, *, shared: bool = True, interpret: Any = False) -> Any:
    """A ring gather whose steps share a receive semaphore, or do not. Its refs are `*refs`."""
    n = lax.axis_size("x")

    def kernel(*refs: Any) -> None:
        x_ref, o_ref, sems, own_sem = refs
        me = lax.axis_index("x")
        greet(n)
        pltpu.async_copy(x_ref, o_ref.at[me], own_sem).wait()
        for step in range(n - 1):
            block = o_ref.at[lax.rem(me - step + n, n)]
            arrived = sems.arrived.at[0 if shared else step]
            hop = pltpu.make_async_remote_copy(
                block, block, sems.sent, arrived, device_id={"x": lax.rem(me + 1, n)}
            )
            hop.start()
            hop.wait()

    return launched(kernel, x, (n, *x.shape), [Semaphores(DMA, DMA((n,))), DMA], interpret)


def sound_gather(x: Any, interpret: Any = False) -> Any:
    return gather(x, shared=False, interpret=interpret)


def whole(x: Any, mesh: Any) -> Any:
    """`to_the_right` on whole arrays, over the mesh that it is given."""
    spec = P(mesh.axis_names[0])
    return jax.shard_map(to_the_right, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def over_its_own_mesh(x: Any) -> Any:
    """A program that makes a mesh of the devices that there are."""
    auto = jax.sharding.AxisType.Auto
    return whole(x, jax.make_mesh((2,), ("x",), axis_types=(auto,)))


def no_kernel(x: Any) -> Any:
    return x + 1


def depends_on_data(rows: Any, x: Any) -> Any:
    """Sends as many rows as its first operand says."""
    n = lax.axis_size("x")

    def kernel(rows_ref: Any, x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any) -> None:
        greet(n)
        part = pl.ds(0, rows_ref[0])
        hop = pltpu.make_async_remote_copy(
            x_ref.at[part],
            o_ref.at[part],
            send_sem,
            recv_sem,
            device_id={"x": lax.rem(lax.axis_index("x") + 1, n)},
        )
        hop.start()
        hop.wait()

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[DMA, DMA],
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
    )(rows, x)


def operands(n: int) -> Any:
    """Operands of `depends_on_data`, on n devices."""
    return np.array([8], np.int32), jax.ShapeDtypeStruct((8 * n, 128), "float32")
