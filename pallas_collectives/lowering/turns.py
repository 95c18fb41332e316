"""A turn of a loop as a list of steps, whatever calls they stood within, and how long they take."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat, catalogue, validation
from pallas_collectives._compat import Aval
from pallas_collectives.backends import wire_choice
from pallas_collectives.backends.plans import MAY_BE_AHEAD, How
from pallas_collectives.lowering import barrier, remat
from pallas_collectives.topology import chips

# What runs another program in its place, by the parameter that holds it.
_CALLS = {
    **dict.fromkeys(("jit", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}

_PRODUCT = "dot_general"
CONVERT = "convert_element_type"
_LOOP = "scan"

# Products in one kernel with their collective.
_FUSED = "pallas_all_gather_matmul", "pallas_matmul_reduce_scatter"

# What may take long, though it is no such product: kernels, and products of other kinds.
_OPAQUE = frozenset(
    {
        *("pallas_call", "core_map", "ffi_call", "pure_callback", "io_callback"),
        *_FUSED,
        *("ragged_dot_general", "conv_general_dilated", "fft", "sort"),
    }
)

# All that may take long.
_COMPUTES = _OPAQUE | {_PRODUCT}

# Products are counted at the matrix unit's full rate, and with the work between them take longer:
# in the built-in steps 1.2 times as long by XLA's cycles, or more.
COUNTED = 0.8

# What writes a slice; XLA makes the first of the second, too, where it can.
_UPDATES = frozenset({"dynamic_update_slice", "scatter"})

# Sums for all devices.
_PSUMS = "pallas_psum", "pallas_psum_invariant"

# Collectives of tokens between products.
_EXCHANGES = "all_gather", "reduce_scatter", "all_reduce"


class Value(NamedTuple):
    """A value that an equation names by no variable."""

    val: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation of a turn, whatever it stood within; values have numbers.

    `eqn` is None for a barrier, which hands on what it reads once all of it has arrived.
    """

    eqn: JaxprEqn | None
    reads: tuple[Any, ...]  # numbers, or `Value`s
    writes: tuple[int, ...]
    within: tuple[JaxprEqn, ...] = ()  # the calls that it stood within

    @property
    def how(self) -> How | None:
        """What a gather that may be asked for ahead asks for; None for all others."""
        return _how(self.eqn) if self.eqn is not None else None

    @property
    def sums(self) -> bool:
        """Whether it sums gradients, scattered or for all devices, for a SparseCore."""
        return self.eqn is not None and _sums(self.eqn) and isinstance(self.reads[0], int)

    @property
    def totals(self) -> bool:
        """Whether it is a psum, of one array or several, for which the step around it matters."""
        return self.eqn is not None and _totals(self.eqn)

    @property
    def adds(self) -> bool:
        """Whether it is a psum or psum_scatter by kernels, for which the step around it matters.

        A scatter that is not tiled is followed by a reshape, which XLA moves no sum across.
        """
        adding = _twins_of("reduce_scatter") | {*_PSUMS}
        if self.eqn is None or self.eqn.primitive.name not in adding:
            return False
        if not self.eqn.params.get("tiled", True):
            return False
        how: How = self.eqn.params["how"]
        return how.beside and how.backend == "pallas" and how.wire is None

    @property
    def awaited(self) -> bool:
        """Whether it exchanges what products have made and wait for, and may be on a SparseCore."""
        return self.eqn is not None and _awaited(self.eqn) and isinstance(self.reads[0], int)

    @property
    def fuses(self) -> bool:
        """Whether it exchanges so, and may be run with a product."""
        return self.eqn is not None and _fuses(self.eqn) and isinstance(self.reads[0], int)

    def seconds(self, chip: chips.Chip) -> float:
        """What its products take at the least."""
        return _seconds(self.eqn, chip) if self.eqn is not None else 0.0

    @property
    def is_product(self) -> bool:
        """Whether it is one for the matrix unit."""
        return self.eqn is not None and self.eqn.primitive.name == _PRODUCT

    @property
    def length(self) -> int:
        """How many turns a scan has; 0 for all others."""
        if self.eqn is None or self.eqn.primitive.name != _LOOP:
            return 0
        return int(self.eqn.params["length"])

    @property
    def multiplies(self) -> bool:
        """Whether it is such a product, alone or in one kernel with its collective."""
        return self.eqn is not None and self.eqn.primitive.name in (_PRODUCT, *_FUSED)

    @property
    def is_opaque(self) -> bool:
        """Whether it computes what `seconds` does not see."""
        return self.eqn is not None and _holds(self.eqn, _OPAQUE.__contains__)

    @property
    def computes(self) -> bool:
        """Whether it may take long, within its own programs too."""
        return self.eqn is not None and _holds(self.eqn, _COMPUTES.__contains__)

    @property
    def exchanges(self) -> bool:
        """Whether it sends anything, within its own programs too."""
        return self.eqn is not None and exchanges(self.eqn)

    @property
    def has_effects(self) -> bool:
        """Whether it does more than make its results."""
        return self.eqn is not None and _compat.has_effects(self.eqn)

    @property
    def keeps_order(self) -> bool:
        """Whether it must stay behind those before it, whatever it reads; no collective must."""
        return self.eqn is not None and not self.exchanges and _compat.keeps_order(self.eqn)

    @property
    def types(self) -> dict[int, Any]:
        """Types of what an equation reads and writes."""
        assert self.eqn is not None
        pairs = zip((*self.reads, *self.writes), (*self.eqn.invars, *self.eqn.outvars), strict=True)
        return {x: _compat.type_of(v) for x, v in pairs if not isinstance(x, Value)}

    @property
    def hands_on(self) -> bool:
        """Whether it only hands on parts of what it reads."""
        return self.eqn is None or self.eqn.primitive.name in _compat.PARTS

    @property
    def updates(self) -> bool:
        """Whether it writes a slice of what it reads, within its own programs too."""
        return self.eqn is not None and _holds(self.eqn, _UPDATES.__contains__)

    def run(self, values: dict[int, Any], **wishes: Any) -> None:
        """Adds its results.

        Args:
          values: by number.
          wishes: fields of a collective's `How` that are to be others.
        """
        read = [x.val if isinstance(x, Value) else values[x] for x in self.reads]
        if self.eqn is None:
            results = barrier.barrier(read)
        else:
            primitive, params = self.eqn.primitive, _asking(self.eqn, **wishes)
            with self.eqn.ctx.manager, _compat.named_as(self.eqn, self.within):
                found = primitive.bind(*read, **primitive.get_bind_params(params))
            results = found if primitive.multiple_results else [found]
        values.update(zip(self.writes, results, strict=True))


def of_some(step: Step, wanted: Sequence[bool], **wishes: Any) -> Step | None:
    """A psum of the wanted ones of its arrays; fields of its `How` may be others."""
    assert step.eqn is not None
    part = remat.part(step.eqn, wanted)
    if part is None:
        return None
    reads, writes = (tuple(itertools.compress(of, wanted)) for of in (step.reads, step.writes))
    return Step(part.replace(params=_asking(part, **wishes)), reads, writes, step.within)


def awaiting(step: Step) -> Step:
    """The same; a gather of a step is one whose result products wait for (`How.awaited`)."""
    if step.eqn is None or step.eqn.primitive.name not in _twins_of("all_gather"):
        return step
    how: How = step.eqn.params["how"]
    return step if how.awaited is not False else asking(step, awaited=True)


def asking(step: Step, **wishes: Any) -> Step:
    """The same collective, with some fields of its `How` others."""
    assert step.eqn is not None
    return dataclasses.replace(step, eqn=step.eqn.replace(params=_asking(step.eqn, **wishes)))


def by_lax(why: str) -> dict[str, Any]:
    """What a collective asks for that lax is to serve."""
    return {"backend": "xla", "fallback": why, "ahead": ""}


def _asking(eqn: JaxprEqn, **wishes: Any) -> dict[str, Any]:
    """The parameters of an equation, with some fields of a collective's `How` others."""
    if not wishes:
        return eqn.params
    return {**eqn.params, "how": dataclasses.replace(eqn.params["how"], **wishes)}


def _how(eqn: JaxprEqn) -> How | None:
    return _wishes(eqn, "all_gather")


def _sums(eqn: JaxprEqn) -> bool:
    scatters = _wishes(eqn, "reduce_scatter") is not None
    return scatters or (_totals(eqn) and not eqn.params["how"].awaited and len(eqn.invars) == 1)


def _totals(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in _PSUMS:
        return False
    how: How = eqn.params["how"]
    return how.ahead == MAY_BE_AHEAD and _by_name(eqn) and how.wire is None


def _wishes(eqn: JaxprEqn, collective: str) -> How | None:
    """What a collective that may be moved to another turn asks for; None for all others."""
    if eqn.primitive.name not in _twins_of(collective):
        return None
    how: How = eqn.params["how"]
    return how if how.ahead == MAY_BE_AHEAD and not how.awaited else None


def _awaited(eqn: JaxprEqn) -> bool:
    if len(eqn.invars) != 1 or not any(eqn.primitive.name in _twins_of(op) for op in _EXCHANGES):
        return False
    how: How = eqn.params["how"]
    able = how.ahead == MAY_BE_AHEAD and _by_name(eqn) and wire_choice.gives_way(how)
    return able and how.awaited is True


def _fuses(eqn: JaxprEqn) -> bool:
    if not any(eqn.primitive.name in _twins_of(op) for op in _EXCHANGES):
        return False
    how: How = eqn.params["how"]
    able = how.fuses and _by_name(eqn) and wire_choice.gives_way(how)
    return able and how.awaited is True


def _by_name(eqn: JaxprEqn) -> bool:
    """Whether all axes are the mesh's; numbers are dimensions that vmap made."""
    axes = tuple(eqn.params.get("axes", ()))
    return validation.named(axes) == axes


@functools.cache
def _twins_of(collective: str) -> frozenset[str]:
    known = catalogue.primitives().items()
    return frozenset(
        f"pallas_{name}"
        for name, (record, primitive) in known
        if record.name == collective and primitive.reduction in ("", "sum")
    )


def _inner(eqn: JaxprEqn) -> core.ClosedJaxpr | None:
    """The program that an equation runs in its place, closed; None for all others."""
    inner = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
    if isinstance(inner, core.ClosedJaxpr) or inner is None:  # from JAX 0.12 on all are
        return inner
    return core.ClosedJaxpr(inner, ())


def holds_any(closed: core.ClosedJaxpr) -> bool:
    """Whether a turn has collectives that another turn may begin, or that this one may reorder.

    Or that may run with a product.
    """
    return any(
        _how(eqn)
        or _sums(eqn)
        or _totals(eqn)
        or _awaited(eqn)
        or _fuses(eqn)
        or (x is not None and holds_any(x))
        for eqn, x in ((eqn, _inner(eqn)) for eqn in closed.jaxpr.eqns)
    )


def _asked_for(closed: core.ClosedJaxpr) -> list[bool]:
    """Which operands of a program such gathers bring."""
    wanted: set[Any] = set()
    for eqn in reversed(closed.jaxpr.eqns):
        operands = [v for v in eqn.invars if isinstance(v, core.Var)]
        inner = _inner(eqn)
        if inner is not None:
            pairs = zip(eqn.invars, _asked_for(inner), strict=True)
            wanted |= {v for v, asked in pairs if asked and isinstance(v, core.Var)}
        elif _how(eqn) or (eqn.primitive.name in _compat.PARTS and wanted & {*eqn.outvars}):
            wanted |= {*operands}
    return [v in wanted for v in closed.jaxpr.invars]


class Flat:
    """The equations of a turn, and in place of some calls those within them.

    Args:
      opens: whether such a call is, by its equation and program.
    """

    def __init__(self, opens: Callable[[JaxprEqn, core.ClosedJaxpr], bool]) -> None:
        self.steps: list[Step] = []
        self._opens = opens
        self._new = itertools.count()

    @classmethod
    def of(cls, closed: core.ClosedJaxpr) -> "Flat":
        """One that opens what `holds_any`; where a turn sums by psum, what makes gradients, too."""
        sums = any(_holds(eqn, _PSUMS.__contains__) for eqn in closed.jaxpr.eqns)
        makes = {*_COMPUTES, _LOOP}.__contains__
        return cls(lambda eqn, inner: holds_any(inner) or (sums and _holds(eqn, makes)))

    def numbers(self, count: int) -> tuple[int, ...]:
        """Numbers of so many new values."""
        return tuple(itertools.islice(self._new, count))

    def add(
        self, closed: core.ClosedJaxpr, args: Sequence[Any], within: tuple[JaxprEqn, ...] = ()
    ) -> list[Any]:
        """Adds the equations of a program within so many calls; the numbers of its results."""
        jaxpr = closed.jaxpr
        known = dict(zip(jaxpr.constvars, map(Value, closed.consts), strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return known[atom] if isinstance(atom, core.Var) else Value(atom.val)

        for eqn in jaxpr.eqns:
            reads = tuple(map(read, eqn.invars))
            inner = _inner(eqn)
            if inner is not None and self._opens(eqn, inner):
                if eqn.params.get("differentiated"):
                    reads = self._behind_barriers(reads, _asked_for(inner), eqn)
                writes: Sequence[Any] = self.add(inner, reads, (*within, eqn))
            else:
                writes = self.numbers(len(eqn.outvars))
                self.steps.append(Step(eqn, reads, tuple(writes), within))
            known.update(zip(eqn.outvars, writes, strict=True))
        return list(map(read, jaxpr.outvars))

    def _behind_barriers(
        self, reads: Sequence[Any], asked: Sequence[bool], checkpoint: JaxprEqn
    ) -> tuple[Any, ...]:
        """What a checkpoint computes from, kept apart from the forward pass where it says so.

        What gathers bring has a barrier of its own, so that it waits for nothing else.
        """
        apart = checkpoint.params["prevent_cse"]  # of all operands, or of each
        apart = apart if isinstance(apart, tuple) else (apart,) * len(reads)
        behind = list(reads)
        own = [[i] for i, alone in enumerate(asked) if alone and apart[i]]
        others = [i for i, alone in enumerate(asked) if not alone and apart[i]]
        for together in filter(None, [*own, others]):
            numbers = self.numbers(len(together))
            self.steps.append(Step(None, tuple(reads[i] for i in together), numbers))
            for i, number in zip(together, numbers, strict=True):
                behind[i] = number
        return tuple(behind)


def numbers(values: Iterable[Any]) -> Iterator[int]:
    return (x for x in values if not isinstance(x, Value))


def collective_of(eqn: JaxprEqn) -> str:
    """The collective that one of `_EXCHANGES` is."""
    return next(op for op in _EXCHANGES if eqn.primitive.name in _twins_of(op))


def _nbytes(aval: Aval) -> int:
    return int(aval.size * aval.dtype.itemsize)


def _seconds(eqn: JaxprEqn, chip: chips.Chip) -> float:
    """What an equation's products take at the least, in those of loops as often as these turn."""
    if eqn.primitive.name == _PRODUCT:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        types = [_compat.type_of(v) for v in (*eqn.invars, *eqn.outvars)]
        flops = 2.0 * types[-1].size * math.prod(types[0].shape[d] for d in contracted)
        nbytes = sum(map(_nbytes, types))
        return max(flops / chip.matrix_rate, nbytes / chip.hbm_bandwidth)
    if eqn.primitive.name in _FUSED:
        xs, outs = ([_compat.type_of(v) for v in vs] for vs in (eqn.invars, eqn.outvars))
        if eqn.primitive.name == _FUSED[0]:  # x, weights; gathered x, products
            flops = sum(2.0 * out.size * xs[0].shape[-1] for out in outs[1:])
        else:  # xs, weights; the sum's block
            flops = sum(2.0 * x.size * outs[0].shape[-1] for x in xs[: len(xs) // 2])
        return flops / chip.matrix_rate
    if eqn.primitive.name in _OPAQUE:
        return 0.0
    each = sum(_seconds(e, chip) for jaxpr in _compat.jaxprs_of(eqn) for e in jaxpr.eqns)
    return each * eqn.params["length"] if eqn.primitive.name == _LOOP else each


def exchanges(eqn: JaxprEqn) -> bool:
    """Whether an equation or one within it is a collective, lax's or ours."""
    known = catalogue.primitives()
    return _holds(eqn, lambda name: name.removeprefix("pallas_") in known)


def _holds(eqn: JaxprEqn, wanted: Callable[[str], bool]) -> bool:
    """Whether an equation's primitive, or that of one within it, is wanted, by name."""
    inner = (e for jaxpr in _compat.jaxprs_of(eqn) for e in jaxpr.eqns)
    return wanted(eqn.primitive.name) or any(_holds(e, wanted) for e in inner)
