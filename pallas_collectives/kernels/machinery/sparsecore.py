"""The other engine: kernels that run on a SparseCore while the TensorCore computes.

v5p, v6e and 7x have SparseCores beside each TensorCore. The scalar subcore of one starts DMAs,
signals, waits and loops as a TensorCore does, so the very same kernel runs there: the engine is a
property of the launch. XLA makes of it an asynchronous call (`call-start`, `call-done`, execution
thread "sparsecore"), and moves what does not need the result in between.

What differs from a launch on the TensorCore:

* operands are in HBM alone, so tables are copied to the core's scalar memory first;
* there is no VMEM that a scalar subcore can use, so nothing is added there, but by the sixteen
  vector subcores: each runs the kernel of the ring or line on its share of every block, with slots
  and semaphores of its own, and adds in its own memory (`machinery.combine`). The first of them
  runs the entry barrier for all;
* a result that begins with an operand's contents is a copy of it, made before the barrier: another
  device may write over it as soon as we have signalled that we are here.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from pallas_collectives.annotations import Interpret, Ref
from pallas_collectives.errors import EngineError
from pallas_collectives.kernels.machinery.blocks import LANES as TILE_LANES
from pallas_collectives.kernels.machinery.blocks import sublanes
from pallas_collectives.topology.chips import Chip

# The name of a SparseCore among a device's, an axis of size 1 within kernels.
_CORES = "sparsecores"
_SUBCORES = "subcores"  # the vector subcores of one

LANES = 16  # numbers of 32 bits in a vector subcore's register

# For copies and for sums (see `as_long_as`).
_AS_XLA_RECKONS, _AS_XLA_RECKONS_SUMS = 4.0, 12.0

# A second result, which nobody writes or reads. XLA fuses a call's only result with a
# `dynamic_update_slice` that alone reads it, keeps that fusion on the TensorCore, and aborts. By
# `step`, with it `fsdp_tensor` with its gradient took 26.4 ms for v6e:4x4, for 25.6.
_NOT_ALONE = jax.ShapeDtypeStruct((LANES,), jnp.int32)

_wanted = contextvars.ContextVar("on_sparsecore", default=False)
_for_products = contextvars.ContextVar("for_products", default=False)


@contextlib.contextmanager
def wanted(here: bool = True, *, for_products: bool = False) -> Iterator[None]:
    """Within this context kernels are launched on a SparseCore, if `here`.

    for_products: products alone read their results.
    """
    tokens = _wanted.set(here), _for_products.set(for_products)
    try:
        yield
    finally:
        _wanted.reset(tokens[0])
        _for_products.reset(tokens[1])


def is_wanted() -> bool:
    """Whether kernels are launched on a SparseCore."""
    return _wanted.get()


def shares(interpret: Interpret) -> int:
    """How many vector subcores share a sum: those of one SparseCore.

    Simulated it is one, as the interpreter has no barrier among subcores.
    """
    return 1 if interpret else plsc.get_sparse_core_info().num_subcores


def cut(x: jax.Array, axis: int, n: int, sharing: int) -> jax.Array:
    """n blocks along `axis` as (n, sharing, rows, columns): each subcore's share of each.

    As they lie, where shares are whole tiles; else in one pass, padded with zeros.
    """
    blocks = x.reshape(*x.shape[:axis], n, x.shape[axis] // n, *x.shape[axis + 1 :])
    blocks = jnp.moveaxis(blocks, axis, 0)
    rows, whole = blocks.shape[-2], sublanes(x.dtype)
    if blocks.shape[-1] % TILE_LANES == 0 and rows % whole == 0:
        rows *= math.prod(blocks.shape[1:-2])
        if rows % (sharing * whole) == 0:
            return blocks.reshape(n, sharing, rows // sharing, blocks.shape[-1])
    flat = blocks.reshape(n, -1)
    padded = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % (sharing * whole * TILE_LANES))))
    return padded.reshape(n, sharing, -1, TILE_LANES)


def on_first(action: Callable[[], None], sharing: int) -> None:
    """Has the first of so many subcores do something."""
    if sharing > 1:
        pl.when(lax.axis_index(_SUBCORES) == 0)(action)
    else:
        action()


def enter(barrier: Callable[[], None], sharing: int) -> None:
    """Runs an entry barrier on the first of so many subcores.

    All of this device's have entered by then, for others write to each of them once it has
    signalled; and all wait for it.
    """
    if sharing > 1:
        plsc.subcore_barrier()
    on_first(barrier, sharing)
    if sharing > 1:
        plsc.subcore_barrier()


def check(what: str, chip: Chip, *, adds: bool) -> None:
    """Refuses what no SparseCore can run.

    Raises:
      EngineError: Pallas reaches no SparseCore of the chip, or the kernel adds what none adds.
    """
    remedy = "leave ':sc' out: the TensorCore then runs it"
    if chip.no_sparsecore:
        raise EngineError(f"{what} on a SparseCore", f"{chip.name}: {chip.no_sparsecore}", remedy)
    if adds:
        rule = "it adds, and on a SparseCore only ring and line sums can"
        raise EngineError(f"{what} on a SparseCore", rule, remedy)


def as_long_as(wire_bytes: int, chip: Chip, links: int, *, sums: bool) -> int:
    """Bytes of HBM that take as long as these on so many links.

    XLA reckons how long a call is under way from its bytes, and knows nothing of links. Told of the
    time on links, it starts calls earlier. It takes bytes to pass quicker than HBM lets them, so it
    is told of `_AS_XLA_RECKONS` times as many: by `step`, fsdp forward on v6e:4x4, the core then
    waits 0.7 ms. With half of these it waits 2.9, since calls start too late, and with 1.75 times
    them 4.0, since a call that is needed later is in the way. On v5p 2 to 7 times are alike.

    Sums also add, and only barriers keep them under way (`lowering.chain`): XLA is told of 3 times
    as many bytes as for copies. By `step`, fsdp_tensor with gradient on v6e:4x4, the core waits
    12.5 ms with 1 time as many, 11.5 with 2, 10.8 with 4 and no less with 8; on v5p:2x2x2 3 times
    are best.
    """
    time_on_links = wire_bytes / (links * chip.link_bandwidth)
    times = _AS_XLA_RECKONS_SUMS if sums else _AS_XLA_RECKONS
    return round(times * time_on_links * chip.hbm_bandwidth)


def table(axes: tuple[str, ...], sharing: int, values: jax.Array) -> jax.Array:
    """A table, or scalars, as a kernel there reads them.

    XLA keeps a constant that a loop's turns read where no SparseCore finds it, and ends with an
    error. So constants are added to what it does not know to be 0. Args: `axes`, of the mesh, have
    more than one device together.
    """
    values = values + jnp.minimum(lax.axis_index(axes), 0)
    return _whole_registers(values) if sharing else values


def _whole_registers(table: jax.Array) -> jax.Array:
    """A table for scalar memory of a vector subcore, which reads register by register."""
    return jnp.pad(table, (0, -table.size % LANES))


def _by_registers(source: Ref, target: Any) -> None:
    """Copies a table to scalar memory, whither a vector subcore can copy nothing."""

    def through(tile: Ref) -> None:
        pltpu.sync_copy(source, tile)

        def some(turn: jax.Array, _: None) -> None:
            start = turn * LANES
            register = tile[pl.ds(start, LANES)]
            for k in range(LANES):
                target[start + k] = register[k]

        lax.fori_loop(0, target.size // LANES, some, None)

    pl.run_scoped(through, pltpu.VMEM(target.shape, target.dtype))


def kernel(
    body: Callable[..., None],
    results: tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]],
    scratch: Any,
    aliases: Mapping[int, int],
    sharing: int,
    **options: Any,
) -> Callable[..., Any]:
    """A `pl.pallas_call` of such a body as `launch` makes, for a SparseCore.

    Args:
      body: takes refs to (tables, scalars, operands, results, buffers, *scratch).
      results: shapes of results and of buffers; XLA keeps those of such calls in HBM.
      scratch: what to allocate.
      aliases: operand number -> result number: the result begins as a copy of the operand.
      sharing: so many vector subcores run it, each with its part of operands and results, number
        [:, i], and of buffers, [i]; 0 for the scalar subcore.
      **options: options of `pl.kernel`.

    Returns:
      Takes lists of tables, scalars and operands; gives lists of results and of buffers.
    """

    of_body, buffers = results
    alone = len(of_body) + len(buffers) == 1 and not _for_products.get()
    results = of_body, [*buffers, *([_NOT_ALONE] if alone else [])]

    def run(tables: Sequence[Any], scalars: Sequence[Any], operands: Sequence[Any]) -> Any:
        read = [*tables, *scalars]

        def on_core(sources: Any, operand_refs: Any, result_refs: Any, *rest: Any) -> None:
            (*buffer_refs,), table_refs, *own = rest
            del buffer_refs[len(buffers) :]
            for source, target in zip(sources, table_refs, strict=True):
                (_by_registers if sharing else pltpu.sync_copy)(source, target)
            for k, result in aliases.items():
                pltpu.sync_copy(operand_refs[k], result_refs[result])
            if sharing:
                i = lax.axis_index(_SUBCORES)
                operand_refs = [ref.at[:, i] for ref in operand_refs]
                result_refs = [ref.at[:, i] for ref in result_refs]
                buffer_refs = [ref.at[i] for ref in buffer_refs]
            of_tables, of_scalars = table_refs[: len(tables)], table_refs[len(tables) :]
            body(of_tables, of_scalars, operand_refs, result_refs, buffer_refs, *own)

        mesh: Any = plsc.ScalarSubcoreMesh(axis_name=_CORES, num_cores=1)
        if sharing:
            mesh = plsc.VectorSubcoreMesh(
                core_axis_name=_CORES,
                subcore_axis_name=_SUBCORES,
                num_cores=1,
                num_subcores=sharing,
            )
        return pl.kernel(
            on_core,
            out_type=results,
            mesh=mesh,
            scratch_types=([pltpu.SMEM(x.shape, x.dtype) for x in read], *scratch),
            **options,
        )(read, list(operands))

    return run
