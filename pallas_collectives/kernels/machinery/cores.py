"""Kernels on both TensorCores of a device.

Each core runs the same body. Operands, results and buffers are in HBM, which they share; semaphores
and other scratch are each core's own. A copy or a signal to another device goes to the core of the
same number there (`sync`): so the cores of a number form a ring of their own, and those of a device
need not wait for each other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives import _compat

# The name of a device's TensorCores, an axis within kernels that are divided between them.
TENSORCORES = "tensorcores"


def kernel(
    count: int,
    body: Callable[..., None],
    results: tuple[list[Any], list[Any]],
    scratch: Any,
    **options: Any,
) -> Callable[..., Any]:
    """A `pl.pallas_call` of such a body as `launch` makes, for so many TensorCores.

    Args:
      count: the number of cores.
      body: takes refs to (tables, scalars, operands, results, buffers, *scratch).
      results: types of results and of buffers.
      scratch: what to allocate.
      **options: options of `pl.kernel`.

    Returns:
      Takes lists of tables, scalars and operands; gives lists of results and of buffers.
    """

    def run(tables: Sequence[Any], scalars: Sequence[Any], operands: Sequence[Any]) -> Any:
        read = [*tables, *scalars]

        def on_core(sources: Any, operand_refs: Any, result_refs: Any, *rest: Any) -> None:
            buffer_refs, table_refs, *own = rest
            for source, target in zip(sources, table_refs, strict=True):
                pltpu.sync_copy(source, target)
            of_tables, of_scalars = table_refs[: len(tables)], table_refs[len(tables) :]
            body(of_tables, of_scalars, operand_refs, result_refs, buffer_refs, *own)

        launched = pl.kernel(
            on_core,
            out_type=results,
            mesh=_compat.tensorcore_mesh(TENSORCORES, count),
            scratch_types=([pltpu.SMEM(x.shape, x.dtype) for x in read], *scratch),
            **options,
        )
        return jax.tree.map(_compat.plain, launched(read, list(operands)))

    return run
