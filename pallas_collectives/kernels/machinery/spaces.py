"""What a kernel takes for HBM lies in HBM, whatever XLA would like.

A kernel's `BlockSpec` says where the kernel looks for an array. It does not say to XLA where to put
it: XLA places operands and results of a custom call in VMEM, or in v4's CMEM, wherever they fit. So
every array of every kernel is constrained to HBM here, tables too. A kernel that works in VMEM
(`vmem=True`) copies from there, and no other device sees where XLA had the array before.

What goes wrong with such kernels on TPUs, as reported, and what keeps ours from it:

    report                what happens                        here
    jax#39744, jax#39838  a DMA from an "HBM" operand that    `operands`, `results`; every
                          lies in CMEM reads zeros; an        operand is read or aliased
                          operand that the kernel never
                          reads brought it out
    jax#39505             a DMA of one element reads zeros:   `widened`; `check_sizes` refuses
                          it comes in a register, which the   others
                          compiler stores to VMEM
    jax#24023             results in VMEM that alias          `launch` copies the operands first
                          operands begin as zeros
    jax#36770             offsets within tiles are refused,   `blocks.sliceable`: cuts fall on
                          where the compiler sees them        tiles; other arrays are moved or
                                                              padded
    jax#40847             `pl.num_programs` is that of an     no kernel has a grid, or asks for
                          earlier call with another grid      it
    jax#27963             a barrier takes a signal that is    `sync`: how each barrier counts
                          meant for the next call
    tpu-inference#1342    a device writes to another before   `sync`: a barrier among all pairs
                          that has entered the kernel         that write to each other
    sgl-jax#1024          a buffer is read while a device     `sync`: a semaphore for each
                          far away still writes to it         transfer that may be in flight
    jax#3829              XLA drops a send whose result this  all devices run one program, in
                          process does not read               which each sends and receives

XLA takes a kernel for a pure function. It drops one whose result no device reads, makes one of two
equal ones, as it does of lax's collectives, and takes one out of a loop whose turns would all call
it alike. All devices run one program, so each such change is one for all of them. It does not
repeat a kernel to save memory, nor move one into a branch, which some devices might not take.
`has_side_effects` would forbid the first changes too, and change nothing else.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.errors import CollectiveError
from pallas_collectives.kernels.machinery.blocks import LANES


def results(shapes: Iterable[jax.ShapeDtypeStruct]) -> list[Any]:
    """Types of results that XLA is to put in HBM."""
    return [pltpu.HBM(shape.shape, shape.dtype) for shape in shapes]


def operand(x: jax.Array) -> jax.Array:
    """An array that XLA is to put in HBM; give it to `pallas_call` at once."""
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)


def check_sizes(arrays: Iterable[Any], name: str) -> None:
    """Refuses an array of one element, which no DMA can be trusted with.

    Raises:
      CollectiveError: there is one.
    """
    for x in arrays:
        if x.size == 1:
            rule = "one element comes to a kernel in a register, and DMAs of it may read zeros"
            raise CollectiveError(
                f"shape {x.shape} for {name}", rule, "pad it with `spaces.widened`"
            )


def widened(x: jax.Array) -> jax.Array:
    """x; if it is of one element and any dimension, that element 128 times along the last."""
    return jnp.broadcast_to(x, (*x.shape[:-1], LANES)) if x.size == 1 else x
