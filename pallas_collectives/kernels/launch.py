"""The one place that calls `pl.pallas_call`.

Kernels have no grid, nor anything else that could be divided between cores: on a device with two
(v4, v5p: megacore) the compiler has the second core skip the whole kernel, so that every DMA and
every signal starts once, from the first (`tests/test_megacore.py` looks at the compiled program).

Two cores that shared the DMAs could at the best halve the time to start them. By the replay of v4
and v5p with half the `issue_cost` (`Machine.named("v5p:4x4x4", issue_cost=0.025e-6)`), 4 KiB to
4 MiB, that gains at most 4% on an axis of 4, from 1 MiB on 1%; on 64 devices 6%, but 10% of
all_to_all and 15% of ragged_all_to_all with 4 KiB for each device. The cores would have to agree at
every wait, at a signal each, of which that says nothing. So one core starts all.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from pallas_collectives import chips
from pallas_collectives.errors import VmemError
from pallas_collectives.kernels import entry, spaces
from pallas_collectives.kernels.blocks import LANES, sublanes
from pallas_collectives.kernels.topology import Group, Ring


def call(
    kernel: Callable[..., None],
    group: Group,
    *operands: jax.Array,
    out_shape: jax.ShapeDtypeStruct,
    **options: Any,
) -> jax.Array:
    """Runs a kernel of one result on every device of a group: `call_many`, whose options it has."""
    return call_many(kernel, group, *operands, out_shapes=(out_shape,), **options)[0]


def call_many(
    kernel: Callable[..., None],
    group: Group,
    *operands: jax.Array,
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    scratch_shapes: Sequence[Any],
    scalars: Sequence[jax.Array] = (),
    buffers: Sequence[jax.ShapeDtypeStruct] = (),
    barrier: Hashable,
    name: str,
    interpret: Any,
    vmem: bool = False,
    wire_bytes: int = 0,
    flops: int = 0,
    pipeline_bytes: int = 0,
    input_output_aliases: dict[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Runs a kernel on every device of a group.

    The kernel is called with its `Ring`, then refs to the scalars (SMEM), the operands, the
    results, the buffers, and the scratch.

    Args:
      kernel: as above.
      group: the devices.
      *operands: arrays.
      out_shapes: shape and dtype of each result.
      scratch_shapes: semaphores, and memory that only this device writes.
      scalars: int32 arrays of rank 1 that the kernel reads element by element.
      buffers: memory that other devices write to, beside the operands in HBM or VMEM.
      barrier: what the entry barrier is (see `entry`): `WIDE`, or the kernel's own.
      name: what profilers show.
      interpret: False to compile, or `pltpu.InterpretParams`.
      vmem: operands, results and buffers are in VMEM for the duration of the call, not in HBM.
      wire_bytes: bytes each device sends, for XLA's scheduler.
      flops: what each device computes, likewise.
      pipeline_bytes: VMEM of the pipelines within the kernel, beside `scratch_shapes`.
      input_output_aliases: operand number -> result number: the operand with whose contents the
        result begins; in HBM it is the operand's own buffer.

    Raises:
      CollectiveError: an operand, a result or a buffer has one element (see `spaces`).
      VmemError: what is to be in VMEM does not fit the chip's.
    """
    if _left_out.get():
        return tuple(jnp.zeros(result.shape, result.dtype) for result in out_shapes)
    spaces.check_sizes((*operands, *out_shapes, *buffers), name)
    members = group.members()
    kernel, peers, passed = entry.entered(kernel, barrier, group)
    scalars, scratch_shapes = (*peers, *scalars), [*scratch_shapes, *passed]

    def body(*refs: Any) -> None:
        if vmem:  # what aliases are the arrays in HBM, not the copies of them that kernels see
            for operand, result in aliases.items():
                pltpu.sync_copy(refs[operand], refs[len(tables) + len(operands) + result])
        with jax.enable_x64(False):  # a TPU counts in 32 bits, whatever the program around it does
            if members is None:
                kernel(Ring(group), *refs)
            else:
                kernel(Ring(group, refs[0]), *refs[1:])

    tables = (*(() if members is None else (members,)), *scalars)
    aliases = {len(tables) + k: result for k, result in (input_output_aliases or {}).items()}
    in_vmem = (*operands, *out_shapes, *buffers) if vmem else ()
    vmem_bytes = sum(map(_padded_bytes, (*in_vmem, *filter(_is_vmem, scratch_shapes))))
    # The compiler keeps operands of the matrix unit besides: a quarter more than the tiles.
    vmem_bytes += pipeline_bytes * 5 // 4
    # A buffer in HBM is a result that nobody wants: so it has one address on every device.
    unwanted = () if vmem else tuple(buffers)
    scratch_shapes = [*(pltpu.VMEM(b.shape, b.dtype) for b in buffers if vmem), *scratch_shapes]
    block = pl.BlockSpec(memory_space=pltpu.VMEM if vmem else pltpu.HBM)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    compiled = pl.pallas_call(
        body,
        out_shape=spaces.results((*out_shapes, *unwanted)),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(tables) + [block] * len(operands),
        out_specs=(*(block,) * len(out_shapes), *(hbm,) * len(unwanted)),
        scratch_shapes=scratch_shapes,
        input_output_aliases=aliases,
        interpret=interpret,
        name=name,
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=wire_bytes),
        compiler_params=pltpu.CompilerParams(
            collective_id=entry.barrier_id(barrier, group, interpret),
            vmem_limit_bytes=_vmem_limit(vmem_bytes, name),
        ),
    )

    def run(*arrays: jax.Array) -> Any:
        return compiled(*spaces.operands(arrays))

    # pallas_call knows no varying types; a shard_map over no axes hides it from the checker.
    unchecked = jax.shard_map(
        run,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        axis_names=frozenset(),
        check_vma=False,
    )
    return tuple(unchecked(*tables, *operands)[: len(out_shapes)])


_left_out = contextvars.ContextVar("left_out", default=False)


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Within this context no kernel is built: zeros stand for results, for who asks what would."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def _is_vmem(scratch: Any) -> bool:
    return getattr(scratch, "memory_space", None) == pltpu.VMEM


def _padded_bytes(x: Any) -> int:
    """Bytes of an array in VMEM, its last two dimensions rounded up to whole tiles."""
    shape = (1, 1, *x.shape)
    rows = -(-shape[-2] // sublanes(x.dtype)) * sublanes(x.dtype)
    lanes = -(-shape[-1] // LANES) * LANES
    return math.prod(shape[:-2]) * rows * lanes * jnp.dtype(x.dtype).itemsize


def _vmem_limit(needed: int, name: str) -> int | None:
    """The limit to ask the compiler for; None for its default where nothing large is kept."""
    if not needed:
        return None
    chip = chips.current()
    mib = 1 << 20
    if needed > chip.vmem_bytes:
        raise VmemError(
            f"{name} needs {needed / mib:.1f} MiB of VMEM",
            f"{chip.name} has {chip.vmem_bytes / mib:.0f} MiB",
            "leave the operands in HBM: algorithm without ':vmem'",
        )
    return min(chip.vmem_bytes, needed + 2 * mib)
