"""`explain`: which algorithm a call would get, and why."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec
from jax.typing import DTypeLike

from pallas_collectives import catalogue
from pallas_collectives.annotations import AnyMesh, DType
from pallas_collectives.backends import canonical, choice, counters, fastest, serving, wire_ways
from pallas_collectives.backends import slices as hierarchy
from pallas_collectives.backends.plans import UNFUSED, How, KernelPlan, Plan, ProductPlan, WirePlan
from pallas_collectives.backends.plans import Candidate as Candidate
from pallas_collectives.catalogue.records import Collective
from pallas_collectives.explanation import checks
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.kernels.machinery.blocks import LANES, Chunking
from pallas_collectives.overlap import fusion, primitives, products, split
from pallas_collectives.topology import chips, placement
from pallas_collectives.topology.groups import Group
from pallas_collectives.topology.placement import Places
from pallas_collectives.topology.ring_orders import Torus
from pallas_collectives.validation import AxisName
from pallas_collectives.wires import WireLike

# In place of an algorithm: where lax serves, and where there is nothing to send.
LAX, NOTHING = "lax's own", "nothing"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a collective would be served by, and why; printable.

    Attributes:
      op: the collective, as asked for.
      nbytes: bytes of one device's operand.
      devices: devices in the group.
      chip: the TPU generation.
      torus: how the group lies on the links: "ring", "line", or on several axes "4x4 torus",
        "2x4 grid" where none closes to a ring, "8x16 cylinder" where some do.
      algorithm: the one that is chosen; "lax's own" where lax serves, "nothing" where nothing is
        sent, "" across slices. Of a product "fused" (one kernel), "pipelined" or "unfused".
      why: in a sentence.
      candidates: all algorithms, the fastest first; over a wire its ways.
      inside: the steps of what is served in several, one after the other: across slices, in the
        order of the ranks; of an unfused product, what serves its collective; over a wire, what
        moves its numbers.
      wire: in what numbers it sends, and why; None if none was asked for.
      chunking: in what pieces each kernel sends data; empty where no kernel serves by itself.
      sharing: how many hops go over the busiest link, each way, while all groups of the mesh call;
        times are of one.
    """

    op: str
    nbytes: int
    devices: int
    chip: str
    torus: str
    algorithm: str
    why: str
    candidates: tuple[Candidate, ...]
    inside: tuple["Explanation", ...] = ()
    wire: WirePlan | None = None
    chunking: tuple[Chunking, ...] = ()
    sharing: int = 1

    def __str__(self) -> str:
        on = f"a {self.torus} of {self.devices} x {self.chip}"
        lines = [f"{self.op} of {self.nbytes} bytes a device on {on}: {self.algorithm or 'steps'}"]
        lines.append(f"  {self.why}")
        if self.sharing > 1:
            lines.append(
                f"  while all groups call, {self.sharing} hops go over one link each way: it takes "
                f"up to {self.sharing} times as long"
            )
        if self.chunking:
            lines.append(f"  {', then '.join(map(str, self.chunking))}")
        if self.wire is not None and self.wire.algorithm is None:
            lines.append(f"  auto leaves wire {self.wire.wire} out: {self.wire.why}")
        if self.candidates:
            lines.append(f"  {'algorithm':<22}{'us':>9}{'latency':>9}   source")
        for c in self.candidates:
            us, latency = ("-" if t is None else f"{t:.1f}" for t in (c.us, c.latency_us))
            lines.append(f"  {c.algorithm:<22}{us:>9}{latency:>9}   {c.source}")
        if (best := self.candidates[:1]) and _is_latency(best[0]):
            lines.append("  Modelled times of small messages are good to 45%: they rest on launch,")
            lines.append("  hop and DMA costs that nobody has measured alone.")
        for step in self.inside:
            lines += [f"  {line}" for line in str(step).splitlines()]
        return "\n".join(lines)


def _is_latency(best: Candidate) -> bool:
    """Whether most of a modelled time is what assumed latencies make it."""
    if best.us is None or best.latency_us is None:
        return False
    return best.source.startswith("modelled") and 2 * best.latency_us > best.us


def explain(
    op: str,
    nbytes: int | None = None,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: DTypeLike = jnp.float32,
    mesh: AnyMesh | None = None,
    axis_name: AxisName = None,
    devices: int | None = None,
    chip: str | None = None,
    torus: str | None = None,
    axis: int = 0,
    order: str | None = None,
    columns: int | Sequence[int] | None = None,
    wire: WireLike = None,
) -> Explanation:
    """Which algorithm a collective would get with `algorithm="auto"`, and why.

    For the two products it says whether they would run in one kernel.

    This is the call's own decision, made as the call makes it; no kernel is run or compiled. Times
    are the tables' (see `tuning.choice`), and say whether they are modelled or measured.

    Args:
      op: a collective, by lax's name or this library's ("psum", "all_gather", ...); its start
        ("psum_start", ...); or a product ("all_gather_matmul", "matmul_reduce_scatter").
      nbytes: bytes of one device's operand, what is given to the function; or
      shape: its shape.
      dtype: its dtype. lax serves a dtype that no kernel adds.
      mesh: the mesh, with its devices or abstract, and
      axis_name: the axis of it, or tuple of axes; or
      devices, chip: how many devices, of what TPU generation ("v5e"); simulated ones by default.
      torus: "ring" or "line", where devices are given by number; by default what an axis of so
        many devices is on that chip.
      axis: the dimension of the operand that is gathered, scattered or split.
      order: "rank" for a sum in the order of the ranks, as `psum` takes it.
      wire: the wire, as for `psum`; the result then gives bytes, modelled time and error.
      columns: products only, required: columns of the right-hand matrix on each device; a tuple for
        several matrices (all_gather_matmul). Their rows follow from `shape`.

    Raises:
      CollectiveError: an unknown collective, chip or torus, a missing argument, or one that the
        function lacks.
      DtypeError, WireError, ...: what the call raises.
      TableError: a table that cannot be read.

    Example:
      print(explain("psum", 32 << 10, devices=8, chip="v5p"))

    Example:
      >>> found = pc.explain("psum", 32 << 10, devices=8, chip="v5p")
      >>> found.torus, len(found.candidates) > 1
      ('ring', True)
      >>> sizes = {"shape": (1024, 4096), "columns": 4096}  # (1024, 4096) by (4096, 4096)
      >>> pc.explain("all_gather_matmul", **sizes, devices=16, chip="v5e").algorithm
      'fused'
    """
    chip = chip.removeprefix("tpu") if isinstance(chip, str) else chip
    checks.check(op, nbytes, shape, mesh, axis_name, devices, chip, torus)
    checks.check_columns(op, shape, columns)
    checks.check_figures(op, wire)
    if mesh is None:
        mesh, axis_name = _mesh_of(devices or 0, chip), "x"
    where = _places(devices or 0, torus) if torus else placement.of_mesh(mesh)
    of = checks.dtype_of(dtype)
    checks.check_size(nbytes or 0 if shape is None else math.prod(map(int, shape)) * of.itemsize)
    if columns is not None:
        x = jax.ShapeDtypeStruct(tuple(shape or ()), of)
        widths = (columns,) if isinstance(columns, int | np.integer) else tuple(columns)
        return _product(op, mesh, where, axis_name, x, widths, axis, order)
    with _on(mesh, where):
        group = canonical.group_of(axis_name)
        collective = catalogue.functions()[_whole(op)]
        if shape is None:
            operand = _operand(collective, nbytes or 0, of, group.size)
        else:
            operand = jax.ShapeDtypeStruct(tuple(shape), of)
        with _enough_bits(of):
            checks.check_call(_whole(op), operand, group, axis, order=order, wire=wire)
        size = nbytes if nbytes is not None else _bytes(operand)
        plans = _planned(op, operand, group, axis, order, wire)
        return _explained(op, size, placement.arranged(group), plans)


def _mesh_of(devices: int, chip: str | None) -> AbstractMesh:
    """So many devices of a chip on one axis, "x"."""
    kind = None if chip is None else chips.BY_NAME[chip].device_kind
    device = kind and jax.sharding.AbstractDevice(kind, None, platform="tpu")
    auto = (jax.sharding.AxisType.Auto,)
    return AbstractMesh((devices,), ("x",), axis_types=auto, abstract_device=device)


def _places(devices: int, torus: str) -> Places:
    """So many devices in a row, whose ends are linked on a "ring"."""
    there = Torus((devices,), (torus == "ring",))
    return Places(there, tuple(there.place(number) for number in range(devices)))


@contextlib.contextmanager
def _traced_on(mesh: AnyMesh) -> Iterator[None]:
    """Within this context decisions are those of tracing on a mesh, and are not counted."""
    abstract: Any = getattr(mesh, "abstract_mesh", mesh)
    on = jax.sharding.use_abstract_mesh(abstract)
    with placement.no_mesh(), on, counters.uncounted():
        yield


@contextlib.contextmanager
def _on(mesh: AnyMesh, where: Places | None) -> Iterator[None]:
    """Within this context decisions are those of a lowering for a mesh, and are not counted."""
    with _traced_on(mesh), placement.scope(where), hierarchy.scope(mesh), launch.left_out(True):
        yield


def _enough_bits(dtype: DTypeLike) -> contextlib.AbstractContextManager[Any]:
    """Within this context there are arrays of the dtype: 64-bit ones need x64."""
    wide = jax.dtypes.canonicalize_dtype(dtype) != dtype
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def _operand(collective: Collective, nbytes: int, dtype: DType, n: int) -> jax.ShapeDtypeStruct:
    """An operand of so many bytes, in whole rows of lanes if that is possible."""
    elements = -(-nbytes // (dtype.itemsize * (n if collective.of_blocks else 1)))
    block = (elements // LANES, LANES) if elements % LANES == 0 else (elements,)
    shape = (n, *block) if collective.of_blocks else block
    return jax.ShapeDtypeStruct(shape, dtype)


def _whole(op: str) -> str:
    """The collective that is started."""
    return op.removesuffix("_start") if op in split.NAMES else op


def _planned(
    op: str,
    operand: jax.ShapeDtypeStruct,
    group: Group,
    axis: int,
    order: str | None = None,
    wire: WireLike = None,
) -> list[Plan]:
    """The plans that a call makes: its own code runs, with nothing to launch at its end."""
    primitive, plainly = catalogue.functions()[_whole(op)].functions[_whole(op)]
    with choice.beside_compute(op in split.NAMES and choice.STARTED):
        how = choice.in_step(How("pallas", across=hierarchy.marked(), order=order))
    how = choice.over_wires(how, wire, None)

    def call(x: jax.Array) -> jax.Array:
        operands, params = plainly(x, group.axes, group.size, axis)
        return serving.served(primitive, how, lambda *_, **__: x, *operands, **params)

    nothing = PartitionSpec()
    run = jax.shard_map(call, in_specs=nothing, out_specs=nothing, check_vma=False)
    with counters.recorded() as plans, _enough_bits(operand.dtype):
        jax.eval_shape(run, operand)
    return plans


def _explained(op: str, nbytes: int, group: Group, plans: list[Plan]) -> Explanation:
    chip = chips.current()
    about, torus = (op, nbytes, group.size, chip.name), fastest.torus_of(group, chip)
    over = next((plan for plan in plans if isinstance(plan, WirePlan)), None)
    by_lax = [plan for plan in plans if plan.backend == "xla" and plan.why]
    packed = over is not None and over.algorithm is not None
    if by_lax and not packed:
        return Explanation(*about, torus, LAX, by_lax[0].why, ())

    def step(p: Plan) -> Explanation:
        if not isinstance(p, KernelPlan):
            name = counters.lax_name(p.op)
            return Explanation(name, p.nbytes, group.size, chip.name, torus, LAX, p.why, ())
        return Explanation(
            counters.lax_name(p.op, p.call),
            p.nbytes,
            p.devices,
            p.chip,
            p.torus,
            str(p.algorithm),
            _why(op, p, over),
            p.candidates,
            chunking=p.chunking,
        )

    told = (p for p in plans if isinstance(p, KernelPlan) or p in by_lax)
    steps = tuple(map(step, counters.whole_first(told)))
    if not steps:
        why = "the operand is empty" if nbytes == 0 else "the group is one device"
        return Explanation(*about, torus, NOTHING, why, ())
    first = steps[0]
    if over is not None and packed:
        said = _over_wire(over, group.size)
        return Explanation(
            *about, torus, f"wire {over.algorithm}", said, over.candidates, steps, over
        )
    first = dataclasses.replace(first, wire=over)
    if first.devices == group.size:
        sharing = placement.sharing(group, chip)
        return dataclasses.replace(first, op=op, nbytes=nbytes, inside=steps[1:], sharing=sharing)
    slices = group.size // first.devices
    why = f"kernels inside each of {slices} slices, lax between them"
    return Explanation(*about, first.torus, "", why, (), steps)


def _why(op: str, step: KernelPlan, over: WirePlan | None) -> str:
    """Why a step is served so; one that packs goes the wire's way."""
    if over is not None and over.way == step.algorithm:
        return "the way over the wire that stands above"
    if op not in split.NAMES:
        return step.why
    if step.on_sparsecore:
        return f"a SparseCore runs it, beside compute; {step.why}"
    return f"the core stops for it, where it is started ({step.engine_why}); {step.why}"


def _over_wire(plan: WirePlan, devices: int) -> str:
    """Bytes, time and error of a collective over a wire, in a sentence."""
    share = f"{plan.sent} bytes in place of {plan.nbytes} ({100 * plan.sent / plan.nbytes:.1f}%)"
    of: dict[str, Any] = {"way": plan.way, "called": counters.lax_name(plan.op, plan.call)}
    error = wire_ways.error_in_words(plan.op, plan.wire, devices, plan.requantizes, **of)
    if plan.us is None or plan.wired_us is None:
        taken = (
            f"auto takes {plan.wire}, since the operand is large: " if plan.wire.optional else ""
        )
        return f"{taken}{share}; no table has its time; {error}"
    time = f"modelled {plan.wired_us:.1f} us in place of {plan.us:.1f}, passes included"
    return f"{_verdict(plan, plan.us, plan.wired_us)}{share}; {time}; {error}"


def _verdict(plan: WirePlan, us: float, wired_us: float) -> str:
    """What wire="auto" decides, where it is not what was asked for too."""
    if plan.wire.optional:
        return f"auto takes {plan.wire}, since it is quicker: "
    return "" if wired_us < us else 'slower: wire="auto" leaves it out; '


_PRODUCTS: dict[str, Callable[..., Any]] = {
    fusion.GATHER: lambda x, ws, name, axis, order: products.all_gather_matmul(
        x, ws, name, gather_axis=axis, order=order
    ),
    fusion.SCATTER: lambda x, ws, name, axis, order: products.matmul_reduce_scatter(
        x, ws[0], name, scatter_axis=axis, order=order
    ),
}


def _product(
    op: str,
    mesh: AnyMesh,
    where: Places | None,
    axis_name: AxisName,
    x: jax.ShapeDtypeStruct,
    widths: tuple[int, ...],
    axis: int,
    order: str | None,
) -> Explanation:
    """What a call of a product gets: it is traced, and what is left to its lowering asked then."""
    with _traced_on(mesh):
        group = canonical.group_of(axis_name)
        gathers_last = op == fusion.GATHER and axis % max(1, len(x.shape)) == len(x.shape) - 1
        depth = x.shape[-1] * (group.size if gathers_last else 1) if x.shape else 0
        ws = [jax.ShapeDtypeStruct((depth, width), x.dtype) for width in widths]
        nothing = PartitionSpec()
        call = jax.shard_map(
            lambda x, ws: _PRODUCTS[op](x, ws, group.axes, axis, order),
            in_specs=nothing,
            out_specs=nothing,
            check_vma=False,
        )
        with counters.recorded() as plans, _enough_bits(x.dtype):
            (traced,) = jax.make_jaxpr(call)(x, ws).jaxpr.eqns
    bound = [eqn for eqn in traced.params["jaxpr"].eqns if "plan" in eqn.params]
    with _on(mesh, where):
        for eqn in bound:  # its lowering's own code runs, with nothing to launch at its end
            run = jax.shard_map(
                functools.partial(primitives.lowered, op, **eqn.params),
                in_specs=nothing,
                out_specs=nothing,
                check_vma=False,
            )
            operands = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
            with counters.recorded() as plans, _enough_bits(x.dtype):
                jax.eval_shape(run, *operands)
        (plan,) = [p for p in plans if isinstance(p, ProductPlan)]
        inside: tuple[Explanation, ...] = ()
        lies = placement.arranged(group)
        if plan.algorithm == UNFUSED and plan.backend == "pallas":
            gathers = op == fusion.GATHER
            sent = x if gathers else jax.ShapeDtypeStruct((*x.shape[:-1], *widths), x.dtype)
            collective = "all_gather" if gathers else "psum_scatter"
            steps = _planned(collective, sent, group, axis, order)
            inside = (_explained(collective, _bytes(sent), lies, steps),)
        chip = chips.current()
        return Explanation(
            op,
            _bytes(x),
            group.size,
            chip.name,
            fastest.torus_of(lies, chip),
            str(plan.algorithm),
            plan.why,
            plan.candidates,
            inside,
            chunking=plan.chunking,
        )


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * x.dtype.itemsize
