"""Kernels with a hole each, which an exercise fills in: of notebooks 00, 02 and 11."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.topology.groups import Group, Ring

DMA, REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR


def _call(
    kernel: Any,
    x: jax.Array,
    shape: Sequence[int],
    scratch: Any,
    collective_id: int = 0,
    interpret: Any = False,
) -> jax.Array:
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(tuple(shape), x.dtype),
        in_specs=[anywhere],
        out_specs=anywhere,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, has_side_effects=True),
        interpret=interpret,
    )(x)


def greet(devices: Iterable[Any]) -> None:
    """Tells the devices that we are here, and waits until as many have told us."""
    barrier, told = pltpu.get_barrier_semaphore(), 0
    for device in devices:
        pl.semaphore_signal(barrier, 1, device_id={"x": device})
        told += 1
    pl.semaphore_wait(barrier, told)


def pushed(body: Callable[..., None]) -> Callable[..., jax.Array]:
    """body(ring, x_ref, o_ref, send_sem, recv_sem), behind a barrier with everyone."""

    def run(x: jax.Array, interpret: Any = False) -> jax.Array:
        n = lax.axis_size("x")

        def kernel(*refs: Any) -> None:
            ring = Ring(Group(("x",), (n,)))
            greet(lax.rem(ring.me + distance, n) for distance in range(1, n))
            body(ring, *refs)

        # The refs are called what the reader calls them.
        _, *names = inspect.signature(body).parameters.values()
        kernel.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        return _call(kernel, x, x.shape, [DMA, DMA], interpret=interpret)

    return run


def dispatch(all_are_here: Callable[[Any, int], None]) -> Callable[[jax.Array], jax.Array]:
    """Block d of every device goes to device d, all at once."""

    def run(x: jax.Array) -> jax.Array:
        n = lax.axis_size("x")

        def kernel(x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any, own_sem: Any) -> None:
            me = lax.axis_index("x")
            all_are_here(me, n)
            hops = []
            for distance in range(1, n):
                peer = lax.rem(me + distance, n)
                hop = pltpu.make_async_remote_copy(
                    x_ref.at[peer], o_ref.at[me], send_sem, recv_sem, device_id={"x": peer}
                )
                hop.start()
                hops.append(hop)
            pltpu.async_copy(x_ref.at[me], o_ref.at[me], own_sem).wait()
            for hop in hops:
                hop.wait()

        return _call(kernel, x, x.shape, [DMA, DMA, DMA])

    return run


def butterfly(whom_to_greet: Callable[[Any, int], Any]) -> Callable[[jax.Array], jax.Array]:
    """In step k each device exchanges with the one whose number differs in bit k."""

    def run(x: jax.Array) -> jax.Array:
        n = lax.axis_size("x")
        steps = n.bit_length() - 1

        def kernel(x_ref: Any, o_ref: Any, send_sem: Any, recv_sems: Any) -> None:
            me = lax.axis_index("x")
            greet(whom_to_greet(me, n))
            for step in range(steps):
                hop = pltpu.make_async_remote_copy(
                    x_ref,
                    o_ref.at[step],
                    send_sem,
                    recv_sems.at[step],
                    device_id={"x": me ^ (1 << step)},
                )
                hop.start()
                hop.wait()

        return _call(kernel, x, (steps, *x.shape), [DMA, DMA((steps,))])

    return run


def shifts(
    offsets: Sequence[int], collective_ids: Sequence[int]
) -> Callable[[jax.Array], jax.Array]:
    """A call for each offset, one after the other."""

    def shifted(x: jax.Array, offset: int, collective_id: int) -> jax.Array:
        n = lax.axis_size("x")

        def kernel(x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any) -> None:
            me = lax.axis_index("x")
            to, source = lax.rem(me + offset, n), lax.rem(me + n - offset, n)
            greet((to, source))
            hop = pltpu.make_async_remote_copy(
                x_ref, o_ref, send_sem, recv_sem, device_id={"x": to}
            )
            hop.start()
            hop.wait()

        return _call(kernel, x, x.shape, [DMA, DMA], collective_id)

    def run(x: jax.Array) -> jax.Array:
        for offset, number in zip(offsets, collective_ids, strict=True):
            x = shifted(x, offset, number)
        return x

    return run


def windowed(semaphore_of: Callable[[int, int], Any], window: int) -> Any:
    """A ring gather whose steps use `window` receive semaphores in turn, by credits."""

    def run(x: jax.Array) -> jax.Array:
        n = lax.axis_size("x")

        def kernel(
            x_ref: Any, o_ref: Any, send_sem: Any, recv_sems: Any, credit: Any, own_sem: Any
        ) -> None:
            me = lax.axis_index("x")
            left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
            greet((left, right))
            pltpu.async_copy(x_ref, o_ref.at[me], own_sem).wait()
            for step in range(n - 1):
                if step >= window:
                    pl.semaphore_wait(credit, 1)
                block = o_ref.at[lax.rem(me - step + n, n)]
                arrived = recv_sems.at[semaphore_of(np.int32(step), window)]
                hop = pltpu.make_async_remote_copy(
                    block, block, send_sem, arrived, device_id={"x": right}
                )
                hop.start()
                hop.wait()
                if step + window < n - 1:
                    pl.semaphore_signal(credit, 1, device_id={"x": left})

        return _call(kernel, x, (n, *x.shape), [DMA, DMA((window,)), REGULAR, DMA])

    return run
