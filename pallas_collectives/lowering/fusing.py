"""A turn's products in one kernel with the exchange of tokens before or behind them.

    gathered = all_gather(x)      one kernel, `all_gather_matmul`, for all such products: it brings
    y = gathered @ w              gathered, too, if something else needs it
    y = psum_scatter(x @ w)       one kernel, `matmul_reduce_scatter`, of a sum of products as well
    y = psum(x @ w)               that kernel, and a gather

Between products no order of a turn hides tokens' exchanges. A kernel that multiplies what has come
while the rest is on the wire does; on GPUs products run beside copies. This is done behind
derivatives, so that it finds those of products, too: x's is such a gather or scatter, and w's needs
what is gathered.

`overlap.primitives` says which pairs can be one kernel, and what that saves. It stands above this
folder, so it hands its function down (`provide`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat
from pallas_collectives._compat import Aval
from pallas_collectives.annotations import DType
from pallas_collectives.backends import wire_choice
from pallas_collectives.backends.plans import How
from pallas_collectives.lowering import collective_times, in_place, questions
from pallas_collectives.lowering.dataflow import Dataflow
from pallas_collectives.lowering.sums_in_two import in_two
from pallas_collectives.lowering.turns import Step, numbers
from pallas_collectives.topology import chips
from pallas_collectives.tuning import overlaps

# The collectives, and the parameters that name the dimension.
_GATHER, _SCATTER = "pallas_all_gather", "pallas_reduce_scatter"
_DIMENSIONS = {_GATHER: "all_gather_dimension", _SCATTER: "scatter_dimension"}

_ADDITIONS = "add", "add_any"

# How many times as long as HBM is busy XLA copies a part of what a loop has for all turns, by its
# cycles for v5e, v5p and v6e; smaller ones beside other work.
_COPIED = 2.5
_WIDE = 4 << 20


class Pair(NamedTuple):
    """Products and their collective, as one kernel might run them.

    Attributes:
      gathers: whether the collective is a gather before products, or a scatter behind their sum.
      how: what it asks for.
      axis_name: its mesh axis or axes.
      axis: the dimension of x that is gathered or scattered.
      xs, ws: what is multiplied: one x for all ws where it is gathered, else one for each.
      out_dtype, transposed, precision: see `_Product`.
      keeps: whether what is gathered is wanted itself, too.
      turned: whether the product is of rows that x has as columns, see `Spec.turned`.
    """

    gathers: bool
    how: How
    axis_name: Any
    axis: int
    xs: tuple[Aval, ...]
    ws: tuple[Aval, ...]
    out_dtype: DType
    transposed: bool
    precision: Any
    keeps: bool = False
    turned: bool = False


class Kernel(NamedTuple):
    """What runs a pair: a primitive with its parameters, and the seconds that it saves."""

    primitive: core.Primitive
    params: dict[str, Any]
    saves: float

    @property
    def bound(self) -> dict[str, Any]:
        """What an equation of it has."""
        return {"primitive": self.primitive, "params": self.params}


KernelOf = Callable[[Pair], Kernel | None]
_kernel_of: list[KernelOf] = []


def provide(kernel_of: KernelOf) -> None:
    """Makes this what says by which kernel a pair runs; None where it is quicker apart."""
    _kernel_of[:] = [kernel_of]


def kernel_of(eqn: JaxprEqn, pair: Pair) -> Kernel | None:
    """By which kernel a pair with such a collective runs; None where it is quicker apart."""
    (found,) = _kernel_of
    with eqn.ctx.manager:
        return found(pair)


class FusedSteps(NamedTuple):
    """A turn's steps, kernels in place of pairs.

    Attributes:
      steps: in an order in which they can run, otherwise the program's.
      saves: the seconds that kernels save.
      unwired: the collectives in kernels that have a wire, and go without.
    """

    steps: list[Step]
    saves: float
    unwired: list[Step]


def fused(
    steps: Sequence[Step],
    results: Sequence[Any],
    carry: Sequence[Any] = (),
    slices: Sequence[int] = (),
) -> FusedSteps | None:
    """A turn with kernels in place of the pairs that are quicker so; None where no pair is.

    Args:
      steps: in the program's order.
      results: what the turn hands on.
      carry: those among them that the next turn computes with.
      slices: values that are this turn's part of what a loop has for all.
    """
    turn, saves = _Turn(steps, results, carry, slices), {}
    for step in steps:
        if step.fuses and (saved := turn.fuse(step)):
            saves[step] = saved
    if not saves:
        return None
    unwired = [step for step in saves if (collective_times.wired if step.awaited else _packs)(step)]
    return FusedSteps(turn.flow.in_order(), sum(saves.values()), unwired)


@dataclasses.dataclass(frozen=True)
class _Product:
    """A step that multiplies x, of any rank, with w, of two.

    Attributes:
      eqn: the step's.
      x, w: their numbers, or constants.
      types: those of x, w, and the product.
      transposed: whether w is (N, K), not (K, N).
      precision: as `jax.lax.dot_general`'s.
    """

    step: Step
    eqn: JaxprEqn
    x: Any
    w: Any
    types: tuple[Aval, Aval, Aval]
    transposed: bool
    precision: Any

    @classmethod
    def of(cls, step: Step) -> "_Product | None":
        """None for other steps."""
        if step.eqn is None or not step.is_product:
            return None
        left, right, out = types_of(step.eqn)
        (of_x, of_w), batches = step.eqn.params["dimension_numbers"]
        if any(batches) or right.ndim != 2 or (of_x, len(of_w)) != ((left.ndim - 1,), 1):
            return None
        precision = step.eqn.params["precision"]
        x, w = step.reads
        return cls(step, step.eqn, x, w, (left, right, out), of_w == (1,), precision)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the products of one kernel have in common."""
        return self.transposed, self.precision, self.types[2].dtype


def weights_of(step: Step) -> int | None:
    """What a product multiplies tokens with, if a value of its turn; None of other steps."""
    product = _Product.of(step)
    return product.w if product and isinstance(product.w, int) else None


class _Turn:
    """Steps, some of them in kernels."""

    def __init__(
        self,
        steps: Sequence[Step],
        results: Sequence[Any],
        carry: Sequence[Any],
        slices: Sequence[int],
    ) -> None:
        self.flow, self._slices = Dataflow(steps), in_place.Slices(steps, slices)
        self._results, self._carry = {*numbers(results)}, {*numbers(carry)}
        self._count = 1 + max(self.flow.makers, default=0)

    def fuse(self, collective: Step) -> float:
        """Puts a kernel in place of a collective and its products; the seconds that this saves."""
        eqn = collective.eqn
        assert eqn is not None
        (x, *_), name = types_of(eqn), eqn.primitive.name
        if eqn.params.get("axis_index_groups") or not eqn.params.get("tiled", True):
            return 0.0
        if wire_choice.moved_dtype(eqn.params["how"], x.dtype) != x.dtype:
            return 0.0  # a cast: no kernel has it
        if name in _DIMENSIONS:
            return (self._gathered if name == _GATHER else self._scattered)(collective, eqn)
        # No kernel's gather gives what is typed as equal on all devices.
        return (
            self._summed(collective, eqn) if questions.collective_of(eqn) == "all_reduce" else 0.0
        )

    def _gathered(self, gather: Step, eqn: JaxprEqn) -> float:
        (whole,), brought = gather.writes, types_of(eqn)[-1]
        nbytes = brought.size * brought.dtype.itemsize
        if _on_tpus(eqn) and overlaps.narrowed_by_xla(nbytes, brought.dtype):
            return 0.0  # lax keeps it
        readers = [*map(_Product.of, self.flow.readers(gather.writes))]
        found = [p for p in readers if p and whole not in self.flow.ancestors(numbers([p.w]))]
        found = [p for p in found if p.kind == found[0].kind]
        keeps = whole in self._results or len(found) < len(readers)
        kernel = self._kernel(eqn, found, types_of(eqn)[:1], keeps=keeps)
        if kernel is None or (saves := kernel.saves) <= 0:
            return 0.0
        if not keeps:  # nothing reads it, so it need have no number of its own
            whole, self._count = self._count, self._count + 1
        reads = *gather.reads, *(p.w for p in found)
        writes = whole, *(p.step.writes[0] for p in found)
        invars = eqn.invars[0], *(p.eqn.invars[1] for p in found)
        outvars = eqn.outvars[0], *(p.eqn.outvars[0] for p in found)
        made = eqn.replace(invars=[*invars], outvars=[*outvars], **kernel.bound)
        kernels = [Step(made, reads, writes, gather.within)]
        self.flow.replace([gather, *(p.step for p in found)], kernels)
        return saves

    def _scattered(self, scatter: Step, eqn: JaxprEqn) -> float:
        return self._multiplied(self._terms(scatter.reads[0]), scatter, scatter)

    def _summed(self, total: Step, eqn: JaxprEqn) -> float:
        """A scatter with its products in one kernel, and a gather, in place of a sum.

        GPUs run sums beside compute, as of gradients: there it must be what products wait for.
        """
        if eqn.params["how"].backend == "nccl" and not self._feeds_products(total):
            return 0.0
        (*rows, _), devices = types_of(eqn)[0].shape or (0,), collective_times.group(eqn).size
        axis = next((axis for axis, size in enumerate(rows) if size % devices == 0), None)
        terms = self._terms(total.reads[0]) if len(eqn.invars) == 1 else []
        longer = collective_times.longer_in_two(total) if terms and axis is not None else None
        if axis is None or longer is None:
            return 0.0
        scatter, gather = in_two(total, axis, self._count)
        self._count += 1
        return self._multiplied(terms, total, scatter, gather, longer=longer)

    def _multiplied(
        self, terms: Sequence[Step], total: Step, scatter: Step, *behind: Step, longer: float = 0.0
    ) -> float:
        """Products and a scatter of their sum in one kernel, in place of a total and these terms.

        behind: what follows that kernel; longer: the seconds that it takes, less the total's.
        """
        found = [p for p in map(_Product.of, terms) if p is not None]
        if any(p.kind != found[0].kind for p in found):
            return 0.0
        assert scatter.eqn is not None
        kernel = self._kernel(scatter.eqn, found, [p.types[0] for p in found])
        if kernel is None or (saves := kernel.saves - longer) <= 0:
            return 0.0
        reads = *(p.x for p in found), *(p.w for p in found)
        invars = [p.eqn.invars[i] for i in (0, 1) for p in found]
        made = scatter.eqn.replace(invars=invars, **kernel.bound)
        fused = Step(made, reads, scatter.writes, scatter.within)
        self.flow.replace([total, *terms], [fused, *behind])
        return saves

    def _kernel(
        self, eqn: JaxprEqn, products: Sequence[_Product], xs: Sequence[Aval], keeps: bool = False
    ) -> Kernel | None:
        """The kernel of products with a collective, and what it saves; None where none serves.

        XLA has small tokens nearer than HBM, where kernels have them. Those whose weights are not
        read in place are left to it. By `step`, forward, four layers of weights of 32 MiB and 1024
        tokens take 919 us in kernels that do and 984 by lax on v6e:4x4, 2160 and 2500 on v5e:4x4,
        962 and 1164 on v5p:2x2x2.
        """
        joined = eqn.primitive.name != _GATHER and len(products) > 1
        in_slices = [self._slices.of(p.w, p.types[1]) for p in products]
        reads_in_place = _on_tpus(eqn) and not joined and None not in in_slices
        chip, moved = chips.current(), _tokens(eqn)
        near = _on_tpus(eqn) and overlaps.tokens_in_vmem(moved, chip)
        if near and not reads_in_place:
            return None
        kernel = _kernel(eqn, products, xs, keeps=keeps)
        written = [p for p, x in zip(products, in_slices, strict=True) if joined or x is None]
        return kernel and kernel._replace(saves=kernel.saves - self._to_slice(written, eqn))

    def _to_slice(self, products: Sequence[_Product], collective: JaxprEqn) -> float:
        """Seconds to copy weights out of those of all turns, where XLA's own products read them.

        Of weights that are multiplied as they are, and are not read in place (`in_place`): those
        whose products are summed, or that are not of whole lanes. What a turn converts is written
        in any case.

        Of large tokens that counts for nothing: in HBM, they take XLA's own products as long. But
        v5e has VMEM for them, and for as much again.
        """
        chip, large = chips.current(), _tokens(collective) >= overlaps.NEAR
        if not _on_tpus(collective) or (large and chip.name != "v5e"):
            return 0.0
        weights = {p.w: p.types[1] for p in products if {*numbers([p.w])} & self._slices.numbers}
        nbytes = sum(w.size * w.dtype.itemsize for w in weights.values())
        copied = 0 if nbytes < _WIDE else _COPIED * 2 * nbytes / chip.hbm_bandwidth
        return 2 * copied if large else copied

    def _feeds_products(self, step: Step) -> bool:
        """Whether products of this turn, or the next one, need what a step makes."""
        made = {*self.flow.descendants(step.writes)}
        reads = self.flow.readers(made)
        return bool(made & self._carry) or any(s.multiplies or s.is_opaque for s in reads)

    def _terms(self, total: int) -> list[Step]:
        """The products, and additions of two of them, that make a value and nothing else.

        None where it is made of something else, too, or where something else needs any of them.
        """
        values = self.flow.ancestors([total], adds_two)
        alone = (value for value in values if len(self.flow.readers([value])) == 1)
        makers = (self.flow.makers.get(value) for value in alone)
        found = [step for step in makers if step and (adds_two(step) or _Product.of(step))]
        return found if len(found) == len(values) and self._results.isdisjoint(values) else []


def adds_two(step: Step) -> bool:
    """Whether it adds two values of its turn."""
    adds = step.eqn is not None and step.eqn.primitive.name in _ADDITIONS
    return adds and len({*numbers(step.reads)}) == 2


def _kernel(
    eqn: JaxprEqn, products: Sequence[_Product], xs: Sequence[Aval], *, keeps: bool
) -> Kernel | None:
    """The kernel of products with a collective; None where they are quicker apart, or none."""
    if not products:
        return None
    params, name, first = eqn.params, eqn.primitive.name, products[0]
    ws = tuple(p.types[1] for p in products)
    where = name == _GATHER, params["how"], params["axis_name"], params[_DIMENSIONS[name]]
    kind = first.types[2].dtype, first.transposed, first.precision
    return kernel_of(eqn, Pair(*where, tuple(xs), ws, *kind, keeps))


def _packs(collective: Step) -> bool:
    """Whether it has a wire for which its numbers would be packed, as far as GPUs' plans tell."""
    assert collective.eqn is not None
    return wire_choice.packs(collective.eqn.params["how"], types_of(collective.eqn)[0].dtype)


def _on_tpus(eqn: JaxprEqn) -> bool:
    how: How = eqn.params["how"]
    return how.backend == "pallas"


def _tokens(eqn: JaxprEqn) -> int:
    """Bytes of what a gather brings, or a scatter sums."""
    return max(kind.size * kind.dtype.itemsize for kind in types_of(eqn))


def types_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The types of what an equation reads and writes."""
    return tuple(map(_compat.type_of, (*eqn.invars, *eqn.outvars)))
