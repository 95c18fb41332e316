"""What stands for a collective in the replay of a step: its kernel's program."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

import pallas_collectives
from benchmarks.steps.schedule import Collective
from pallas_collectives import catalogue
from pallas_collectives.backends.plans import KernelPlan
from pallas_collectives.errors import CollectiveError
from pallas_collectives.replay import Machine, steps
from pallas_collectives.replay.program import Program

_DTYPE = np.dtype("uint16")  # of bfloat16's width


def programs(
    machine: Machine, placement: np.ndarray, axes: dict[str, int], plans: Iterable[Any]
) -> Callable[[Collective], Program | float]:
    """What gives a collective's program, or the seconds that its bytes take on one link.

    A kernel's plan, of those that were followed while the step was lowered, says which algorithm
    runs over which axes. One of XLA's own is replayed as our fastest would do it. What is no
    collective, or does not say over which axes it goes, takes as long as its bytes on one link; a
    ragged exchange sends as many rows as the catalogue's example does.
    """
    known: dict[tuple[str, int], KernelPlan] = {}
    for plan in plans:
        if isinstance(plan, KernelPlan):
            known[plan.op, _result(plan)] = known[plan.op, 0] = plan

    @functools.cache
    def stepped(op: str, over: tuple[str, ...], algorithm: str | None, block: int) -> Any:
        n = int(np.prod([axes[name] for name in over]))
        example = catalogue.COLLECTIVES[op].example
        unit = catalogue.COLLECTIVES[op].block_bytes(_nbytes(example.operand(n, 1)), n)
        rows = max(1, round(block / unit))

        def body(x: jax.Array) -> jax.Array:
            axis = over if len(over) > 1 else over[0]
            dtype = "bfloat16" if example.adds else x.dtype
            how: Any = {"backend": "pallas", "algorithm": algorithm}
            return example.call(pallas_collectives, x.astype(dtype), axis, **how)

        nothing = PartitionSpec()
        mesh = machine.mesh(axes)
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=nothing, out_specs=nothing, check_vma=False
        )
        operand = jax.ShapeDtypeStruct(example.operand(n, rows), _DTYPE)
        return steps.program(mapped, operand, machine=machine, placement=placement)

    def what_of(c: Collective) -> Program | float:
        plan = (known.get((c.op, c.nbytes)) or known.get((c.op, 0))) if c.kernel else None
        over = plan.axes if plan else _over(c, axes)
        if c.op in catalogue.COLLECTIVES and over and set(over) <= set(axes):
            algorithm = plan.algorithm if plan else None
            try:
                return stepped(c.op, over, algorithm, _block(c, plan, axes, over))
            except CollectiveError:  # XLA's own, which ours cannot do: say, to far devices
                pass
        return c.nbytes / machine.generation.link_bandwidth

    return what_of


def _over(c: Collective, axes: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes that a collective of XLA's goes over."""
    if c.axes or not c.members:
        return tuple(name for name in c.axes if axes.get(name, 1) > 1)
    places = np.array(np.unravel_index(c.members, tuple(axes.values())))
    return tuple(name for name, at in zip(axes, places, strict=True) if len(set(at)) > 1)


def _nbytes(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * _DTYPE.itemsize


def _block(
    c: Collective, plan: KernelPlan | None, axes: dict[str, int], over: tuple[str, ...]
) -> int:
    """Bytes of a block, as tables count them."""
    n = int(np.prod([axes[name] for name in over]))
    if plan and c.op == "ragged_all_to_all":  # its result has room for more than comes
        return catalogue.COLLECTIVES[c.op].block_bytes(plan.nbytes, n)
    return c.nbytes // n if c.op in ("all_gather", "all_to_all") else c.nbytes


def _result(plan: KernelPlan) -> int:
    """Bytes of the result that a plan's kernel has on a device."""
    factor = {"all_gather": plan.devices, "reduce_scatter": 1 / plan.devices}
    return round(plan.nbytes * factor.get(plan.op, 1))
