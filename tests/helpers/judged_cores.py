"""Kernels on meshes of cores, sound and faulty: each is a `judged.Case`."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from judged import hop
from judged_features import case
from replay_kernels import DMA, REGULAR, barrier, neighbours, signal, wait


def on_cores(body: Any, x: Any, mesh: Any, *scratch: Any, shape: Any = None) -> Any:
    """A kernel of one operand and one result on a mesh of cores."""
    new = "out_type" in inspect.signature(pl.kernel).parameters
    names = ("out_type", "scratch_types") if new else ("out_shape", "scratch_shapes")
    out = jax.ShapeDtypeStruct(shape or x.shape, x.dtype)
    params = pltpu.CompilerParams(collective_id=0)
    how = dict(zip(names, (out, list(scratch)), strict=True))
    return pl.kernel(body, mesh=mesh, compiler_params=params, **how)(x)


def tensor_cores(count: int) -> Any:
    make = getattr(pltpu, "TensorCoreMesh", None) or pltpu.create_tensorcore_mesh  # old JAX
    return make(axis_name="core", num_cores=count)


def _halves(x: Any, n: int, *, overlap: int = 0, met: bool = True) -> Any:
    """Each of two cores copies a half; then the other's, once it is there."""

    def body(x_ref: Any, o_ref: Any, ready: Any, sem: Any) -> None:
        core = lax.axis_index("core")
        rows = x.shape[0] // 2
        part = pl.ds(core * (rows - overlap), rows)
        pltpu.async_copy(x_ref.at[part], o_ref.at[part], sem).wait()
        signal(ready, 1, device_id={"core": 1 - core})
        if met:
            wait(ready, 1)
        other = pl.ds((1 - core) * rows, rows)
        again = pl.ds((1 - core) * rows + 2 * rows, rows)
        pltpu.async_copy(o_ref.at[other], o_ref.at[again], sem).wait()
        if not met:
            wait(ready, 1)

    shape = (2 * x.shape[0], 128)
    return on_cores(body, x, tensor_cores(2), REGULAR, DMA, shape=shape)


def _from_core_to_core(x: Any, n: int, *, meets: bool) -> Any:
    """Each core sends a half of x to the same core of the right neighbour."""

    def body(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
        core = lax.axis_index("core")
        _, right, left = neighbours(n)
        if meets:
            barrier(left, right)
        part = pl.ds(core * (x.shape[0] // 2), x.shape[0] // 2)
        copy = hop(x_ref.at[part], o_ref.at[part], send, recv, right)
        copy.start()
        copy.wait()

    return on_cores(body, x, tensor_cores(2), DMA, DMA)


def _scalar_subcore(x: Any, n: int, *, awaited: bool) -> Any:
    def body(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
        _, right, left = neighbours(n)
        barrier(left, right)
        copy = hop(x_ref, o_ref, send, recv, right)
        copy.start()
        copy.wait_send()
        if awaited:
            copy.wait_recv()

    return on_cores(body, x, plsc.ScalarSubcoreMesh(axis_name="core", num_cores=1), DMA, DMA)


def _vector_subcores(x: Any, n: int, *, meets: bool) -> Any:
    """Two subcores write a row block each, and then read each other's."""
    mesh = plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="sub", num_cores=1, num_subcores=2
    )

    def body(x_ref: Any, o_ref: Any, buffer: Any, sem: Any) -> None:
        own = lax.axis_index("sub")
        place = lambda i: pl.ds(4 * i, 4)  # noqa: E731
        pltpu.async_copy(x_ref.at[place(own)], buffer, sem).wait()

        @pl.loop(0, 4)
        def _(row: Any) -> None:
            buffer[row, pl.ds(0, 16)] = buffer[row, pl.ds(0, 16)] + 1

        pltpu.async_copy(buffer, o_ref.at[place(own)], sem).wait()
        if meets:
            plsc.subcore_barrier()
        pltpu.async_copy(o_ref.at[place(1 - own)], buffer, sem).wait()

    return on_cores(body, x, mesh, pltpu.VMEM((4, 128), x.dtype), DMA)


def _within_state(x: Any, n: int) -> Any:
    """A kernel on refs that the program made outside."""

    def both(refs: Any) -> None:
        x_ref, o_ref = refs

        @pl.core_map(tensor_cores(1), compiler_params=pltpu.CompilerParams(collective_id=0))
        def _() -> None:
            _, right, left = neighbours(n)

            def scoped(send: Any, recv: Any) -> None:
                barrier(left, right)
                copy = hop(x_ref, o_ref, send, recv, right)
                copy.start()
                copy.wait()

            pl.run_scoped(scoped, DMA, DMA)

    return pl.run_state(both)((x, jnp.zeros_like(x)))[1]


case("two cores, a half each", _halves, devices=(2, 3))
case("two cores that overlap", lambda x, n: _halves(x, n, overlap=8), "race", devices=(2, 3))
case("two cores that do not meet", lambda x, n: _halves(x, n, met=False), "race", devices=(2, 3))
case("from core to core", lambda x, n: _from_core_to_core(x, n, meets=True))
case(
    "from core to core, not met",
    lambda x, n: _from_core_to_core(x, n, meets=False),
    "race",
    "entry",
)
case("a scalar subcore", lambda x, n: _scalar_subcore(x, n, awaited=True))
case(
    "a scalar subcore that does not wait",
    lambda x, n: _scalar_subcore(x, n, awaited=False),
    "race",
    "left over",
)
case("vector subcores", lambda x, n: _vector_subcores(x, n, meets=True), devices=(1, 2))
case(
    "vector subcores that do not meet",
    lambda x, n: _vector_subcores(x, n, meets=False),
    "race",
    devices=(1, 2),
)
case("refs from outside", _within_state)
