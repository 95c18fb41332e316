"""DMAs, semaphores and memory: the operations that replay steps, as equations lay them out.

Operands are described by `Slot`s, an equation's flat operands taken apart by its own pytree once,
when the program is compiled, so that stepping it costs no tree work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat
from pallas_collectives.replay import jaxprs


@dataclasses.dataclass(frozen=True)
class Slot:
    """The `index`-th flat operand of an equation."""

    index: int


@dataclasses.dataclass(frozen=True)
class RefView:
    """A ref operand and the transforms (slices, reshapes, …) applied to it, in order."""

    ref: Slot | Select
    transforms: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Select:
    """One of several refs, the `index`-th (a `Slot` or an int)."""

    refs: tuple[RefView, ...]
    index: Any


@dataclasses.dataclass(frozen=True)
class Index:
    """One `ref.at[...]`: per dimension of the view an integer or a (start, size, stride) triple, of
    `Slot`s or ints.
    """

    dims: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Reshape:
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Bitcast:
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Transpose:
    permutation: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DmaStart:
    src: RefView
    dst: RefView
    dst_sem: RefView
    src_sem: RefView | None
    device_id: Any
    logical: bool


@dataclasses.dataclass(frozen=True)
class DmaWait:
    sem: RefView
    sized_by: RefView  # the wait is for this view's size in bytes


@dataclasses.dataclass(frozen=True)
class Signal:
    sem: RefView
    value: Any
    device_id: Any
    core: Any  # the core's number on its chip, or None: as its device id says
    logical: bool


@dataclasses.dataclass(frozen=True)
class Wait:
    sem: RefView
    value: Any
    decrement: Any


@dataclasses.dataclass(frozen=True)
class Read:
    sem: RefView


@dataclasses.dataclass(frozen=True)
class Access:
    """A load (`writes=False`) or a store of a ref by the core itself."""

    view: RefView
    writes: bool
    value: Any = None  # what is stored


Operation: TypeAlias = DmaStart | DmaWait | Signal | Wait | Read | Access


def _slots(eqn: JaxprEqn) -> list[Slot]:
    return [Slot(i) for i in range(len(eqn.invars))]


def _view(ref: Any, transforms: Sequence[Any] = ()) -> RefView:
    transforms = tuple(transforms)
    while not isinstance(ref, (Slot, tuple, list)):  # a TransformedRef, possibly of another
        transforms = (*ref.transforms, *transforms)
        ref = ref.ref
    if not isinstance(ref, Slot):  # several: the first transform selects one
        select, *transforms = transforms
        ref = Select(tuple(_view(r) for r in ref), select.idx)
    return RefView(ref, tuple(_transform(t) for t in transforms if not hasattr(t, "memory_space")))


def _first(view: RefView) -> int:
    """Which operand a view is of; of several to select from, the first."""
    return view.ref.index if isinstance(view.ref, Slot) else _first(view.ref.refs[0])


def selectors(op: Operation) -> list[Slot]:
    """The operands by which an operation selects its refs."""
    found: list[Slot] = []

    def visit(item: Any) -> None:
        if isinstance(item, RefView):
            visit(item.ref)
        elif isinstance(item, Select):
            found.extend([item.index] if isinstance(item.index, Slot) else [])
            for ref in item.refs:
                visit(ref)

    for field in dataclasses.fields(op):
        visit(getattr(op, field.name))
    return found


def _transform(t: Any) -> Any:
    if hasattr(t, "indices"):
        return Index(tuple(_index(i) for i in t.indices))
    if hasattr(t, "permutation"):
        return Transpose(tuple(t.permutation))
    if hasattr(t, "dtype"):
        return Bitcast(t.dtype)
    if hasattr(t, "shape"):
        return Reshape(tuple(t.shape))
    raise jaxprs.UnsupportedEquation(f"replay does not know the ref transform {type(t).__name__}")


def _index(i: Any) -> Any:
    return (i.start, i.size, i.stride) if hasattr(i, "start") else i


def _unflatten(eqn: JaxprEqn, key: str, slots: Sequence[Slot]) -> Any:
    return jax.tree_util.tree_unflatten(eqn.params[key], list(slots))


def _is_logical(eqn: JaxprEqn) -> bool:
    return eqn.params["device_id_type"].name == "LOGICAL"


def _dma_start(eqn: JaxprEqn) -> DmaStart:
    src, dst, dst_sem, src_sem, device_id = _unflatten(eqn, "tree", _slots(eqn))
    src_sem_view = None if src_sem is None else _view(src_sem)
    for sem in (_view(dst_sem), src_sem_view):
        if sem is not None and "dma" not in str(_compat.type_of(eqn.invars[_first(sem)]).dtype):
            what = "replay does not know copies that count on other semaphores than a DMA's"
            raise jaxprs.UnsupportedEquation(what, eqn)
    return DmaStart(
        _view(src), _view(dst), _view(dst_sem), src_sem_view, device_id, _is_logical(eqn)
    )


def _dma_wait(eqn: JaxprEqn) -> DmaWait:
    _, dst, dst_sem, _, _ = _unflatten(eqn, "tree", _slots(eqn))
    return DmaWait(_view(dst_sem), _view(dst))


def _semaphore_signal(eqn: JaxprEqn) -> Signal:
    ref, transforms, value, device_id, core_index = _unflatten(eqn, "args_tree", _slots(eqn))
    return Signal(_view(ref, transforms), value, device_id, core_index, _is_logical(eqn))


def _semaphore_wait(eqn: JaxprEqn) -> Wait:
    ref, transforms, value, decrement = _unflatten(eqn, "args_tree", _slots(eqn))
    return Wait(_view(ref, transforms), value, decrement)


def _semaphore_read(eqn: JaxprEqn) -> Read:
    ref, transforms = _unflatten(eqn, "args_tree", _slots(eqn))
    return Read(_view(ref, transforms))


def _get(eqn: JaxprEqn) -> Access:
    ref, *rest = _slots(eqn)
    return Access(_view(ref, _unflatten(eqn, "tree", rest)), writes=False)


def _swap(eqn: JaxprEqn) -> Access:
    ref, value, *rest = _unmasked(eqn)
    return Access(_view(ref, _unflatten(eqn, "tree", rest)), writes=True, value=value)


def _load(eqn: JaxprEqn) -> Access:
    """A vector subcore's load."""
    ref, *rest = _unmasked(eqn)
    return Access(_view(ref, _unflatten(eqn, "tree", rest)), writes=False)


def _unmasked(eqn: JaxprEqn) -> list[Slot]:
    return _slots(eqn)[: -1 if eqn.params.get("has_mask") else None]


def _masked_load(eqn: JaxprEqn) -> Access:
    ref, transforms, *_ = _unflatten(eqn, "args_tree", _slots(eqn))
    return Access(_view(ref, transforms), writes=False)


def _masked_swap(eqn: JaxprEqn) -> Access:
    ref, transforms, value, *_ = _unflatten(eqn, "args_tree", _slots(eqn))
    return Access(_view(ref, transforms), writes=True, value=value)


_OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "dma_start": _dma_start,
    "dma_wait": _dma_wait,
    "semaphore_signal": _semaphore_signal,
    "semaphore_wait": _semaphore_wait,
    "semaphore_read": _semaphore_read,
    "get": _get,
    "swap": _swap,
    "addupdate": _swap,
    "load": _load,
    "masked_load": _masked_load,
    "masked_swap": _masked_swap,
}


def operation(eqn: JaxprEqn) -> Any | None:
    """The DMA, semaphore or memory operation that `eqn` is, its operands as `Slot`s, or None."""
    decode = _OPERATIONS.get(eqn.primitive.name)
    if decode is None:
        return None
    try:
        return decode(eqn)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise jaxprs.UnsupportedEquation(
            f"replay cannot read its operands ({error})", eqn
        ) from error


def parallel_loop(eqn: JaxprEqn) -> tuple[Any, Any, Any, Any, Any]:
    """(lower, upper, step, constants, carry) of a vector subcore's loop, as `Slot`s."""
    return _unflatten(eqn, "tree", _slots(eqn))


def read_tree(device_id: Any, operands: list[Any]) -> Any:
    """What an operation names, with slots read: trees of tuples and dicts."""
    if isinstance(device_id, dict):
        return {k: read_tree(v, operands) for k, v in device_id.items()}
    if isinstance(device_id, (tuple, list)):
        return tuple(read_tree(v, operands) for v in device_id)
    return operands[device_id.index] if isinstance(device_id, Slot) else device_id
