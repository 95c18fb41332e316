"""What stands for a collective in the replay of a step: its kernel's program."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

import pallas_collectives
from benchmarks.steps.schedule import SPARSECORE, Collective
from benchmarks.steps.timeline import OnOneLink
from pallas_collectives import catalogue
from pallas_collectives.backends.plans import KernelPlan, ProductPlan
from pallas_collectives.errors import CollectiveError
from pallas_collectives.replay import Machine, steps
from pallas_collectives.replay.program import Program
from pallas_collectives.topology import ring_orders
from pallas_collectives.wires import Wire

_DTYPE = np.dtype("uint16")  # of bfloat16's width
_LARGE = 32 << 20  # bytes that a device sums or sends: from here on time grows with them alone


def programs(
    machine: Machine, placement: np.ndarray, axes: dict[str, int], plans: Iterable[Any]
) -> Callable[[Collective], Program | float]:
    """What gives a collective's program, or the seconds that its bytes take on one link.

    A kernel's plan, of those that were followed while the step was lowered, says which algorithm
    runs over which axes or groups and over which wire, and one with a product what is multiplied.
    One of XLA's own is replayed as our fastest would do it, groups in the order of the wires. What
    is no collective, or does not say over which axes it goes, takes as long as its bytes
    `OnOneLink`; a ragged exchange sends as many rows as the catalogue's example does. A sum or
    ragged exchange of more than 32 MiB would be replayed for minutes: its seconds lie on the
    straight line through those of 16 and 32 MiB, and it leaves the links to others.
    """
    plans = list(plans)
    known = [part for plan in plans if isinstance(plan, KernelPlan) for part in _kernels(plan)]
    fused = [plan for plan in plans if isinstance(plan, ProductPlan) and plan.bind]

    def program(body: Callable[..., Any], *operands: jax.ShapeDtypeStruct) -> Program:
        nothing = PartitionSpec()
        mapped = jax.shard_map(
            body,
            mesh=machine.mesh(axes),
            in_specs=nothing,
            out_specs=nothing,
            check_vma=False,
        )
        return steps.program(mapped, *operands, machine=machine, placement=placement)

    @functools.cache
    def stepped(
        op: str, over: _Over, algorithm: str | None, wire: Wire | None, block: int
    ) -> Program:
        n = over.size(axes)
        record, example = catalogue.COLLECTIVES[op], catalogue.COLLECTIVES[op].example
        unit = record.block_bytes(_nbytes(example.operand(n, 1)), n)
        rows = max(1, round(block / unit))

        def body(x: jax.Array) -> jax.Array:
            axis = over.axes if len(over.axes) > 1 else over.axes[0]
            dtype = "bfloat16" if record.adds or wire else x.dtype
            how: Any = {"backend": "pallas", "algorithm": algorithm}
            how |= {"wire": wire} if wire else {}  # which not all collectives take
            how |= {"axis_index_groups": over.groups} if over.groups else {}
            return example.call(pallas_collectives, x.astype(dtype), axis, **how)

        return program(body, jax.ShapeDtypeStruct(example.operand(n, rows), _DTYPE))

    @functools.cache
    def seconds(
        op: str, over: _Over, algorithm: str | None, wire: Wire | None, block: int
    ) -> float:
        large = large_block(op, over)
        half, whole = (
            steps.alone(stepped(op, over, algorithm, wire, size), machine, placement)
            for size in (large // 2, large)
        )
        return whole + (block / large - 1) * 2 * (whole - half)

    def large_block(op: str, over: _Over) -> int:
        """Bytes of the largest block to replay; a device sends n where sizes depend on values."""
        timed = catalogue.COLLECTIVES[op].timed
        return _LARGE if timed else _LARGE // over.size(axes)

    def on_wires(c: Collective) -> Collective:
        """One of XLA's own, with the devices of each group in the order of the wires."""
        if len({*map(len, c.groups)}) != 1:
            return c
        places = machine.places(placement)
        rows = [[places.at[device] for device in group] for group in c.groups]
        order = ring_orders.ring_order(places.torus, rows)
        groups = tuple(tuple(group[i] for i in order) for group in c.groups)
        return dataclasses.replace(c, groups=groups)

    multiplied = functools.cache(lambda plan: program(plan.bind, *plan.operands))

    @functools.cache
    def what_of(c: Collective) -> Program | float:
        on_one_link = OnOneLink(c.nbytes / machine.generation.link_bandwidth)
        if product := _product(c, fused):
            return multiplied(product)
        if c.kernel in {plan.op for plan in fused}:  # padded, or several pairs in one
            return on_one_link
        plan = _plan(c, known) if c.kernel else None
        over = _Over(plan.axes, plan.groups) if plan else _over(on_wires(c), axes)
        if c.op in catalogue.COLLECTIVES and over.axes and set(over.axes) <= set(axes):
            algorithm, wire = (plan.algorithm, plan.wire) if plan else (None, None)
            block = _block(c, plan, over.size(axes))
            try:
                timed = seconds if block > large_block(c.op, over) else stepped
                return timed(c.op, over, algorithm, wire, block)
            except CollectiveError:  # XLA's own, which ours cannot do: say, to far devices
                pass
        return on_one_link

    return what_of


@dataclasses.dataclass(frozen=True)
class _Over:
    """The mesh axes that a collective goes over, and its `axis_index_groups` among them, if any."""

    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] | None = None

    def size(self, axes: dict[str, int]) -> int:
        """Devices that take part together, on a mesh with axes of these sizes."""
        return len(self.groups[0]) if self.groups else math.prod(axes[name] for name in self.axes)


def _over(c: Collective, axes: dict[str, int]) -> _Over:
    """What a collective of XLA's goes over."""
    if c.axes or len({*map(len, c.groups)}) != 1:
        return _Over(tuple(name for name in c.axes if axes.get(name, 1) > 1))
    places = dict(zip(axes, np.unravel_index(c.groups, tuple(axes.values())), strict=True))
    over = tuple(name for name, at in places.items() if len({*at[0]}) > 1)
    pair = sum(map(len, c.groups)) < math.prod(axes.values())
    if pair or math.prod(axes[name] for name in over) == len(c.groups[0]):
        return _Over(over)
    sizes = tuple(axes[name] for name in over)
    numbers = np.ravel_multi_index(tuple(places[name] for name in over), sizes)
    return _Over(over, tuple(dict.fromkeys(map(tuple, numbers.tolist()))))


def _nbytes(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * _DTYPE.itemsize


def _block(c: Collective, plan: KernelPlan | None, n: int) -> int:
    """Bytes of a block of n devices together, as tables count them."""
    record = catalogue.COLLECTIVES[c.op]
    if plan and not record.timed:  # its result may have room for more than comes
        return record.block_bytes(plan.nbytes, n)
    return record.block_bytes(c.nbytes * n // record.result_bytes(n, n), n)


def _kernels(plan: KernelPlan) -> list[KernelPlan]:
    """The plans of a plan's kernels: on a SparseCore a sum is scattered by one, gathered by one."""
    if not plan.on_sparsecore or not catalogue.COLLECTIVES[plan.op].sums_everywhere:
        return [plan]
    scatters = catalogue.COLLECTIVES["reduce_scatter"].algorithms
    alike = next(a.name for a in scatters if a.by_subcores and a.reach is plan.record.reach)
    scatter = dataclasses.replace(plan, op="reduce_scatter", algorithm=f"{alike}:sc")
    part = plan.nbytes // plan.devices
    return [scatter, dataclasses.replace(scatter, op="all_gather", nbytes=part, shape=())]


def _plan(c: Collective, plans: Sequence[KernelPlan]) -> KernelPlan | None:
    """The plan of a kernel: of those for its collective the one that fits it best.

    A SparseCore's sums have shapes of their own: a plan's engine tells them from the core's.
    """
    of_op = [plan for plan in plans if plan.op == c.op]
    there = [
        plan
        for plan in of_op
        if plan.on_sparsecore == (c.engine == SPARSECORE)
        and (plan.wire is not None) == ("packed" in c.kernel)
    ]
    by_bytes = [plan for plan in there if _result(plan) == c.nbytes]
    by_shape = [plan for plan in by_bytes if _fits(plan, c.shape)]
    likely = by_shape or by_bytes or there or of_op
    named = [plan for plan in likely if c.kernel.endswith(f"_{plan.record.name}")]
    return next(iter(named or likely), None)


def _product(c: Collective, plans: Sequence[ProductPlan]) -> ProductPlan | None:
    """The plan of a kernel that multiplies or adds beside its collective."""
    sizes = [math.prod(shape) for shape in c.operands]

    def fits(plan: ProductPlan) -> bool:
        return sizes[-len(plan.operands) :] == [x.size for x in plan.operands]

    return next((plan for plan in plans if plan.op == c.kernel and fits(plan)), None)


def _fits(plan: KernelPlan, shape: tuple[int, ...]) -> bool:
    """Whether a result has an operand's dimensions, but for the one that the collective changes."""
    if len(plan.shape) != len(shape):
        return False
    changed = sum(a != b for a, b in zip(plan.shape, shape, strict=True))
    return changed == (_result(plan) != plan.nbytes)


def _result(plan: KernelPlan) -> int:
    """Bytes of the result that a plan's kernel has on a device."""
    return catalogue.COLLECTIVES[plan.op].result_bytes(plan.nbytes, plan.devices)
