"""The one place that calls `pl.pallas_call`; or, by `cores`, its like for several cores or others.

Kernels have no grid, nor anything else that could be divided between cores: on a device with two
(v4, v5p: megacore) the compiler has the second core skip the whole kernel, so that every DMA and
every signal starts once, from the first. `tests/kernels/machinery/test_megacore.py` looks at the
compiled program. Kernels that multiply, or pack, are the exception: `cores=2` runs them on both.

Two cores that shared the DMAs could at the best halve the time to start them. By the replay of v4
and v5p with half the `issue_cost` (`Machine.named("v5p:4x4x4", issue_cost=0.025e-6)`), 4 KiB to 4
MiB, that gains at most 4% on an axis of 4, from 1 MiB on 1%; on 64 devices 6%, but 10% of
all_to_all and 15% of ragged_all_to_all with 4 KiB for each device. The cores would also have to
agree at every wait, with a signal each, which this does not count. So one core starts all.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend import core
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from pallas_collectives import _compat
from pallas_collectives.annotations import Interpret, Ref, Semaphore, dma_semaphores
from pallas_collectives.errors import UnservedError, VmemError
from pallas_collectives.kernels.machinery import cores as divided
from pallas_collectives.kernels.machinery import entry, spaces, sparsecore, sync
from pallas_collectives.kernels.machinery.blocks import LANES, Chunking, padded_bytes
from pallas_collectives.topology import chips, placement
from pallas_collectives.topology.groups import Group, Ring

WHOLE = Chunking()
_told: contextvars.ContextVar[list[Chunking] | None] = contextvars.ContextVar("told", default=None)


@contextlib.contextmanager
def told() -> Iterator[list[Chunking]]:
    """In what pieces the kernels that are launched within this context send data, in their order.

    Kernels of a context within this one are that one's.
    """
    chunkings: list[Chunking] = []
    token = _told.set(chunkings)
    try:
        yield chunkings
    finally:
        _told.reset(token)


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
    scratch: Any,
    scalars: Sequence[jax.Array] = (),
    axes: Sequence[Group] = (),
    barrier: str,
    prepare: Callable[..., Callable[[], None]] | None = None,
    name: str,
    interpret: Interpret,
    vmem: bool = False,
    sharing: int = 0,
    wire_bytes: int = 0,
    flops: int = 0,
    pipeline_bytes: int = 0,
    input_output_aliases: dict[int, int] | None = None,
    cores: int = 1,
    chunking: Chunking = WHOLE,
) -> tuple[jax.Array, ...]:
    """Runs a kernel on every device of a group.

    The kernel is called with its `Ring`, refs to the scalars (SMEM), the operands and the results,
    and `scratch` with refs in the places of shapes. Its entry barrier is behind it by then.

    Args:
      kernel: as above.
      group: the devices.
      *operands: arrays.
      out_shapes: shape and dtype of each result.
      scratch: a pytree, best a `NamedTuple`, of semaphores, of memory that only this device uses
        (`pltpu.VMEM`, `pltpu.SMEM`), and of memory that other devices write to: for each such
        buffer a `jax.ShapeDtypeStruct`. Buffers lie where the operands do.
      scalars: int32 arrays of rank 1 that the kernel reads element by element.
      axes: the rings along the axes of a torus; the kernel has a tuple of these `Ring`s in the
        place of the group's own.
      barrier: the entry barrier that is run, see `sync.enter`; or `entry.WIDE`.
      prepare: called with the kernel's arguments while the barrier waits for others, to start
        copies of its own operands; what it returns waits for them, and is called behind the
        barrier. Not on a SparseCore.
      name: what profilers show.
      interpret: False to compile, or `pltpu.InterpretParams`.
      vmem: operands, results and buffers are in VMEM for the duration of the call, not in HBM.
        Operands are on their way there while the barrier waits for others.
      sharing: how many vector subcores of a SparseCore share the work; see `sparsecore.kernel`.
      wire_bytes: bytes each device sends, for XLA's scheduler.
      flops: what each device computes, likewise.
      pipeline_bytes: VMEM of the pipelines within the kernel, beside `scratch`.
      input_output_aliases: operand number -> result number: the operand with whose contents the
        result begins; it is the operand's own buffer, and the kernel gets the result's ref alone.
      cores: how many TensorCores run the kernel, each with a ring, semaphores and VMEM of its own
        (`cores`).
      chunking: in what pieces it sends data, for the plan by which it runs (`told`).

    Raises:
      CollectiveError: an operand, a result or a buffer has one element (see `spaces`).
      VmemError: the kernel needs more VMEM than the chip has.
      EngineError: no SparseCore can run it (`sparsecore`), though one is wanted.
    """
    _compat.prepare()
    if (chunkings := _told.get()) is not None:
        chunkings.append(chunking)
    along, entered = axes or (group,), entry.Entry.of(barrier, group)
    members = [ring.members() for ring in along]
    peers = entered.table
    tables = [*peers, *(table for table in members if table is not None)]
    aliases = input_output_aliases or {}
    leaves, record = jax.tree.flatten(scratch)
    spaces.check_sizes((*operands, *out_shapes, *filter(_is_buffer, leaves)), name)
    if vmem:
        leaves = [pltpu.VMEM(x.shape, x.dtype) if _is_buffer(x) else x for x in leaves]
    # A buffer in HBM is a result that nobody wants: so it has one address on every device.
    buffers = [x for x in leaves if _is_buffer(x)]
    copies = _Vmem.of(operands, out_shapes, aliases) if vmem else None
    own_shapes = jax.tree.unflatten(record, [None if _is_buffer(x) else x for x in leaves])
    allocated = copies, entered.semaphores, own_shapes  # in the record, whose names they bear

    def body(
        table_refs: Any,
        scalar_refs: Any,
        operand_refs: Any,
        result_refs: Any,
        buffer_refs: Any,
        here: _Vmem | None,
        entry_refs: Any,
        own: Any,
    ) -> None:
        left_buffers, left = iter(buffer_refs), iter(jax.tree.leaves(own))
        left_tables = iter(table_refs[len(peers) :])
        core = lax.axis_index(divided.TENSORCORES) if cores > 1 else None
        with jax.enable_x64(False):  # a TPU counts in 32 bits, whatever the program around it does
            rings = tuple(
                Ring(ring, None if table is None else next(left_tables), core)
                for ring, table in zip(along, members, strict=True)
            )
            seen = here.operands if here else operand_refs
            refs = [next(left_buffers if _is_buffer(x) else left) for x in leaves]
            given = (
                rings if axes else rings[0],
                *scalar_refs,
                *(ref for k, ref in enumerate(seen) if k not in aliases),
                *(here.results if here else result_refs),
                jax.tree.unflatten(record, refs),
            )
            arrived = here.bring(operand_refs, aliases) if here else lambda: None
            prepared: list[Callable[[], None]] = []

            def meanwhile() -> None:
                if prepare:
                    prepared.append(prepare(*given))

            wait_for_all = functools.partial(
                entered.enter, rings, scalar_refs, table_refs, entry_refs, meanwhile
            )
            sparsecore.enter(wait_for_all, sharing)
            arrived()
            for wait in prepared:
                wait()
            kernel(*given)
            if here:
                here.take_back(result_refs)
            sparsecore.on_first(lambda: entered.leave(table_refs, entry_refs), sharing)

    # Beside a pipeline's tiles the compiler keeps operands of the matrix unit: a quarter more.
    in_vmem = filter(_is_vmem, jax.tree.leaves(allocated))
    vmem_bytes = sum(map(padded_bytes, in_vmem)) + pipeline_bytes * 5 // 4
    under_way = wire_bytes
    if sparsecore.is_wanted():
        links = 2 * len(along)
        under_way = sparsecore.as_long_as(wire_bytes, chips.current(), links, sums=bool(sharing))
    options: dict[str, Any] = {
        "name": name,
        "interpret": interpret,
        "cost_estimate": pl.CostEstimate(flops, transcendentals=0, bytes_accessed=under_way),
        "compiler_params": pltpu.CompilerParams(
            collective_id=entry.barrier_id(barrier, group, interpret, sparsecore.is_wanted()),
            vmem_limit_bytes=_vmem_limit(vmem_bytes, name, vmem),
        ),
    }
    if sparsecore.is_wanted():
        sparsecore.check(name, chips.current(), adds=vmem_bytes > 0)
    if why := placement.elsewhere(interpret):
        remedy = "make the mesh of TPUs: `jax.experimental.topologies.get_topology_desc` has them"
        raise UnservedError(name, why, remedy)
    if left_out.value:
        return tuple(_stand_in.bind(out_shapes=tuple(out_shapes), interpret=interpret))
    if sparsecore.is_wanted():
        compiled = sparsecore.kernel(
            body, (list(out_shapes), buffers), allocated, aliases, sharing, **options
        )
    elif cores > 1:
        assert not aliases, "a result that begins as an operand is one core's to make"
        shapes: Any = (spaces.results(out_shapes), spaces.results(buffers))
        compiled = divided.kernel(cores, body, shapes, allocated, **options)
    else:
        smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.HBM)
        first = len(tables) + len(scalars)  # operand
        compiled = pl.pallas_call(
            body,
            out_shape=(spaces.results(out_shapes), spaces.results(buffers)),
            in_specs=([smem] * len(tables), [smem] * len(scalars), [hbm] * len(operands)),
            out_specs=([hbm] * len(out_shapes), [hbm] * len(buffers)),
            scratch_shapes=allocated,  # type: ignore[arg-type]
            input_output_aliases={first + k: result for k, result in aliases.items()},
            **options,
        )

    def run(*arrays: Any) -> Any:
        return compiled(*jax.tree.map(spaces.operand, arrays))

    read: Any = tables, [*scalars]
    if sparsecore.is_wanted():
        read = jax.tree.map(functools.partial(sparsecore.table, group.axes, sharing), read)
    results, _ = unchecked(run)(*read, list(operands))
    return tuple(results)


def apart(
    kernel: Callable[..., None],
    *operands: jax.Array,
    out_shape: jax.ShapeDtypeStruct,
    name: str,
    interpret: Interpret,
    seconds: float,
    **options: Any,
) -> jax.Array:
    """Runs a kernel of one result and a grid that sends nothing, on each device by itself.

    What simulates DMAs is not needed for it: the interpreter that makes XLA's operations of it is
    quicker.

    Args:
      kernel: called with refs to blocks of the operands and of the result, and to scratch.
      *operands: arrays.
      out_shape: shape and dtype of the result.
      name: what profilers show.
      interpret: as `call_many`'s.
      seconds: what it takes, for XLA's scheduler, which reckons with HBM's bandwidth.
      **options: grid, specs, scratch and compiler parameters of `pl.pallas_call`.
    """
    as_bytes = int(seconds * chips.current().hbm_bandwidth)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    with jax.enable_x64(False), _compat.unforced():
        compiled = pl.pallas_call(
            kernel,
            out_shape=out_shape,
            name=name,
            interpret=bool(interpret),
            cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=as_bytes),
            **options,
        )
        traced = jax.make_jaxpr(unchecked(compiled))(*shapes)
    _compat.prepare()
    return _apart_p.bind(*operands, call_jaxpr=traced)


# A kernel apart, in a program of whatever types and under vmap; the replay steps into it. It has no
# derivative.
_apart_p = core.Primitive("kernel_apart")


@_apart_p.def_abstract_eval
def _type_apart(*operands: _compat.Aval, call_jaxpr: core.ClosedJaxpr) -> _compat.Aval:
    (made,) = call_jaxpr.out_avals

    def alike(*xs: jax.Array) -> jax.Array:
        first = sum(x.reshape(-1)[0].astype(jnp.float32) for x in xs)
        return jnp.broadcast_to(jnp.asarray(first).astype(made.dtype), made.shape)

    return jax.make_jaxpr(alike)(*operands).out_avals[0]


def _lower_apart(ctx: Any, *operands: Any, call_jaxpr: core.ClosedJaxpr) -> Any:
    run = mlir.lower_fun(core.jaxpr_as_fun(call_jaxpr))
    return run(ctx.replace(avals_in=call_jaxpr.in_avals, avals_out=call_jaxpr.out_avals), *operands)


def _batch_apart(
    operands: Sequence[jax.Array], dims: Sequence[int | None], *, call_jaxpr: core.ClosedJaxpr
) -> tuple[jax.Array, int]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    each = [batching.bdim_at_front(x, d, size) for x, d in zip(operands, dims, strict=True)]
    return lax.map(lambda xs: _apart_p.bind(*xs, call_jaxpr=call_jaxpr), each), 0


_compat.register(_apart_p, lowering=_lower_apart, batch_alone=_batch_apart)


def unchecked(run: Callable[..., Any]) -> Callable[..., Any]:
    """pallas_call knows no varying types; a shard_map over no axes hides it from the checker."""
    return jax.shard_map(
        run,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        axis_names=frozenset(),
        check_vma=False,
    )


class _Vmem(NamedTuple):
    """Where a kernel's operands and results are in VMEM while it runs."""

    operands: list[Any]  # None for one that begins a result: it is copied to that result's place
    results: list[Any]
    begin_sem: Semaphore  # own; copies to where results are
    copy_sem: Semaphore  # own; the other copies in, then copies out

    @classmethod
    def of(cls, operands: Any, results: Any, aliases: dict[int, int]) -> "_Vmem":
        """What to allocate."""
        places, of_results = (
            [pltpu.VMEM(x.shape, x.dtype) for x in arrays] for arrays in (operands, results)
        )
        own = [None if k in aliases else place for k, place in enumerate(places)]
        return cls(own, of_results, dma_semaphores(), dma_semaphores())

    def bring(self, refs: Sequence[Ref], aliases: dict[int, int]) -> Callable[[], None]:
        """Sets out to copy operands here; what is returned waits until they are.

        With what results begin waited for: others may write over it as soon as we have told them,
        by the barrier's signal, that we are here; a copy still under way would undo that.
        """
        begun = sync.started(
            [refs[k] for k in aliases],
            [self.results[result] for result in aliases.values()],
            [self.begin_sem] * len(aliases),
        )
        own = [k for k in range(len(refs)) if k not in aliases]
        arrived = sync.started(
            [refs[k] for k in own], [self.operands[k] for k in own], [self.copy_sem] * len(own)
        )
        begun()
        return arrived

    def take_back(self, refs: Sequence[Ref]) -> None:
        """Copies results to where the program has them."""
        sync.started(self.results, refs, [self.copy_sem] * len(refs))()


def cores(interpret: Interpret) -> int:
    """TensorCores of a device, real or simulated, between which a kernel can be divided."""
    return getattr(interpret, "num_cores_or_threads", 1) if interpret else chips.cores()


def _is_buffer(shape: Any) -> bool:
    return isinstance(shape, jax.ShapeDtypeStruct)


# Within this context no kernel is built, for who asks what would: `_stand_in` gives the results.
# What cannot be launched is refused all the same. JAX's caches keep what is traced so apart.
left_out = jax.make_user_context(False)

_stand_in = core.Primitive("kernel_left_out")
_stand_in.multiple_results = True


@_stand_in.def_effectful_abstract_eval
def _(*, out_shapes: Sequence[jax.ShapeDtypeStruct], interpret: Interpret) -> Any:
    types = [_compat.array_type(result.shape, result.dtype) for result in out_shapes]
    return types, _effects_of_a_kernel(interpret)


@functools.cache
def _effects_of_a_kernel(interpret: Interpret) -> frozenset[Any]:
    """The effects of any kernel that runs so."""
    shape = jax.ShapeDtypeStruct((8, LANES), jnp.float32)
    empty = pl.pallas_call(lambda _: None, out_shape=shape, interpret=interpret)
    with left_out(False):
        return frozenset(jax.make_jaxpr(unchecked(empty))().effects)


def effects(run: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> frozenset[Any]:
    """The effects of what launches kernels: those of TPU interpret mode, or none.

    Builds no kernel, which takes most of the time that a call takes to trace. Raises what
    launching raises.
    """
    with left_out(True):
        return frozenset(jax.make_jaxpr(run)(*shapes).effects)


def _is_vmem(scratch: Any) -> bool:
    return getattr(scratch, "memory_space", None) == pltpu.VMEM


# What a kernel that asks for no limit has at the least, on all chips; and what the compiler needs
# besides what is counted.
_BY_DEFAULT = 16 << 20
_BESIDES = 2 << 20


def _vmem_limit(needed: int, name: str, of_operands: bool) -> int | None:
    """The limit to ask the compiler for; None for its default where that is enough.

    Where one kernel asks for a limit, XLA reserves its default for every other operation of the
    program, and keeps less in VMEM: on v5e, v5p and v6e. By XLA's cycles the products of a layer of
    GPT-J with its gradient took 3% longer so for v6e:4x4.
    """
    if needed + _BESIDES <= _BY_DEFAULT:
        return None
    chip = chips.current()
    mib = 1 << 20
    if needed > chip.vmem_bytes:
        raise VmemError(
            f"{name} needs {needed / mib:.1f} MiB of VMEM",
            f"{chip.name} has {chip.vmem_bytes / mib:.0f} MiB",
            "leave the operands in HBM: algorithm without ':vmem'"
            if of_operands
            else "name another algorithm, or pass the operand in parts",
        )
    return min(chip.vmem_bytes, needed + _BESIDES)
