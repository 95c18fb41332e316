"""What replay must know of JAX's jaxprs: how each equation lays out its operands.

The only file that depends on a JAX version (0.10 to 0.12 differ). Everything is reached through an
equation's own public parameters; primitives are told apart by name. Operands are described by
`Slot`s, an equation's flat operands taken apart by its own pytree once, when the program is
compiled, so that stepping it costs no tree work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from pallas_collectives.replay import lines


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


class UnsupportedEquation(NotImplementedError):
    """The program contains an equation that replay does not know how to step.

    Attributes:
      primitive: the equation's, or "" where it is none's fault.
      line: `file:line (function)` of the code that made it, or "".
    """

    def __init__(self, what: str, eqn: Any = None):
        self.primitive = eqn.primitive.name if eqn is not None else ""
        self.line = where(eqn) if eqn is not None else ""
        at = f", in {self.primitive!r} at {self.line}" if self.line else ""
        super().__init__(what + at)


def _slots(eqn: Any) -> list[Slot]:
    return [Slot(i) for i in range(len(eqn.invars))]


def _view(ref: Any, transforms: Sequence[Any] = ()) -> RefView:
    transforms = tuple(transforms)
    while not isinstance(ref, (Slot, tuple, list)):  # a TransformedRef, possibly of another
        transforms = (*ref.transforms, *transforms)
        ref = ref.ref
    if not isinstance(ref, Slot):  # several, of which the first transform selects one
        select, *transforms = transforms
        ref = Select(tuple(_view(r) for r in ref), select.idx)
    return RefView(ref, tuple(_transform(t) for t in transforms if not hasattr(t, "memory_space")))


def selectors(op: Any) -> list[Slot]:
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
    raise UnsupportedEquation(f"replay does not know the ref transform {type(t).__name__}")


def _index(i: Any) -> Any:
    return (i.start, i.size, i.stride) if hasattr(i, "start") else i


def _unflatten(eqn: Any, key: str, slots: Sequence[Slot]) -> Any:
    return jax.tree_util.tree_unflatten(eqn.params[key], list(slots))


def _is_logical(eqn: Any) -> bool:
    return eqn.params["device_id_type"].name == "LOGICAL"


def _dma_start(eqn: Any) -> DmaStart:
    src, dst, dst_sem, src_sem, device_id = _unflatten(eqn, "tree", _slots(eqn))
    src_sem_view = None if src_sem is None else _view(src_sem)
    return DmaStart(
        _view(src), _view(dst), _view(dst_sem), src_sem_view, device_id, _is_logical(eqn)
    )


def _dma_wait(eqn: Any) -> DmaWait:
    _, dst, dst_sem, _, _ = _unflatten(eqn, "tree", _slots(eqn))
    return DmaWait(_view(dst_sem), _view(dst))


def _semaphore_signal(eqn: Any) -> Signal:
    ref, transforms, value, device_id, core_index = _unflatten(eqn, "args_tree", _slots(eqn))
    return Signal(_view(ref, transforms), value, device_id, core_index, _is_logical(eqn))


def _semaphore_wait(eqn: Any) -> Wait:
    ref, transforms, value, decrement = _unflatten(eqn, "args_tree", _slots(eqn))
    return Wait(_view(ref, transforms), value, decrement)


def _semaphore_read(eqn: Any) -> Read:
    ref, transforms = _unflatten(eqn, "args_tree", _slots(eqn))
    return Read(_view(ref, transforms))


def _get(eqn: Any) -> Access:
    ref, *rest = _slots(eqn)
    return Access(_view(ref, _unflatten(eqn, "tree", rest)), writes=False)


def _swap(eqn: Any) -> Access:
    ref, value, *rest = _unmasked(eqn)
    return Access(_view(ref, _unflatten(eqn, "tree", rest)), writes=True, value=value)


def _load(eqn: Any) -> Access:
    """A vector subcore's load."""
    ref, *rest = _unmasked(eqn)
    return Access(_view(ref, _unflatten(eqn, "tree", rest)), writes=False)


def _unmasked(eqn: Any) -> list[Slot]:
    return _slots(eqn)[: -1 if eqn.params.get("has_mask") else None]


def _masked_load(eqn: Any) -> Access:
    ref, transforms, *_ = _unflatten(eqn, "args_tree", _slots(eqn))
    return Access(_view(ref, transforms), writes=False)


def _masked_swap(eqn: Any) -> Access:
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


def operation(eqn: Any) -> Any | None:
    """The DMA, semaphore or memory operation that `eqn` is, its operands as `Slot`s, or None."""
    decode = _OPERATIONS.get(eqn.primitive.name)
    if decode is None:
        return None
    try:
        return decode(eqn)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedEquation(f"replay cannot read its operands ({error})", eqn) from error


def works_on_refs(eqn: Any) -> bool:
    """Whether an operand of an equation is a ref."""
    return any(hasattr(v.aval, "inner_aval") for v in eqn.invars)


def core_meshes(eqn: Any) -> list[tuple[dict[str, int], Any]]:
    """(axes with their sizes, jaxpr) of each mesh of cores that a `pl.kernel` or `core_map` runs
    on.
    """
    if eqn.primitive.name == "core_map":
        return [(dict(eqn.params["mesh"].shape), eqn.params["jaxpr"])]
    pairs = zip(eqn.params["meshes"], eqn.params["jaxprs"], strict=True)
    return [(dict(mesh.shape), jaxpr) for mesh, jaxpr in pairs]


def cores_of(aval: Any) -> dict[str, int] | None:
    """The axes of the mesh of cores whose memory a ref is said to be in, or None."""
    mesh = getattr(getattr(aval, "memory_space", None), "mesh", None)
    return None if mesh is None else dict(mesh.shape)


def parallel_loop(eqn: Any) -> tuple[Any, Any, Any, Any, Any]:
    """(lower, upper, step, constants, carry) of a vector subcore's loop, as `Slot`s."""
    return _unflatten(eqn, "tree", _slots(eqn))


def scan_parts(eqn: Any, operands: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """A scan's operands as (constants, initial carry, scanned arrays)."""
    if "ft_in" in eqn.params:  # JAX 0.12
        consts, carry, xs = eqn.params["ft_in"].update(operands).unpack()
        return list(consts), list(carry), list(xs)
    n_consts, n_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    return (
        operands[:n_consts],
        operands[n_consts : n_consts + n_carry],
        operands[n_consts + n_carry :],
    )


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """A jaxpr and its constants, from a closed or an open one."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, list(getattr(jaxpr, "consts", ()))


def called_jaxpr(eqn: Any) -> Any | None:
    """The jaxpr of an equation that only calls it (jit, shard_map, custom_jvp_call, …), or None."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return eqn.params[key]
    return None


def pallas_name(eqn: Any) -> str:
    """The kernel's name as its author wrote it, best effort."""
    name = eqn.params.get("name") or getattr(eqn.params.get("name_and_src_info"), "name", None)
    if not name:
        body = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["jaxprs"][0]
        debug = getattr(open_jaxpr(body)[0], "debug_info", None)
        name = getattr(debug, "func_name", None)
    return str(name or "pallas_call").split(" at ")[0]


def on_sparsecore(eqn: Any) -> bool:
    """Whether a SparseCore's subcores run a kernel, and not the TensorCore."""
    meshes = eqn.params.get("meshes") or (eqn.params.get("mesh"),)
    return all("Subcore" in type(mesh).__name__ for mesh in meshes)


def collective_id(eqn: Any) -> int | None:
    """The collective id that a kernel was given."""
    return getattr(_compiler_params(eqn), "collective_id", None)


def _compiler_params(eqn: Any) -> Any:
    params = eqn.params.get("compiler_params")
    return next(iter(params.values()), None) if isinstance(params, dict) else params


def has_default_barrier(eqn: Any) -> bool:
    """Whether the compiler begins a kernel with a barrier of all devices: see `meetings`."""
    params = _compiler_params(eqn)
    if collective_id(eqn) is not None or getattr(params, "skip_device_barrier", False):
        return False
    bodies = [eqn.params["jaxpr"]] if "jaxpr" in eqn.params else eqn.params["jaxprs"]
    inside = [inner for body in bodies for inner in equations(body)]
    if any(inner.primitive.name == "get_barrier_semaphore" for inner in inside):
        return False
    return any(_communicates(inner) for inner in inside)


def _communicates(eqn: Any) -> bool:
    """Whether an operation names a device."""
    op = operation(eqn)
    return isinstance(op, (DmaStart, Signal)) and op.device_id is not None


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of those within it."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(open_jaxpr(inner)[0], "eqns"):
                    yield from equations(inner)


def memory_space(aval: Any) -> str:
    """'hbm', 'vmem', 'smem' or 'semaphore_mem' of a ref's type."""
    space = getattr(aval, "memory_space", None)
    if space is None:  # a kernel's ref without a memory space is in VMEM; anything else is an array
        return "vmem" if hasattr(aval, "inner_aval") else "hbm"
    space = getattr(space, "memory_space", space)  # of a named mesh of cores
    name = str(space).lower().removeprefix("memoryspace.")
    return {"any": "hbm", "device": "hbm", "default": "vmem"}.get(name, name)


@dataclasses.dataclass(frozen=True)
class BlockDim:
    """One dimension of a block: its size; whether the kernel does not see it; whether its index
    counts elements instead of blocks.
    """

    size: int
    squeezed: bool = False
    by_element: bool = False


def block_dims(block_mapping: Any) -> list[BlockDim]:
    """A block mapping's blocks, per dimension of the array."""
    dims = []
    for b in block_mapping.block_shape:
        size = b if isinstance(b, int) else getattr(b, "block_size", None)
        by_element = type(b).__name__ == "Element"
        dims.append(BlockDim(1, True) if size is None else BlockDim(int(size), False, by_element))
    return dims


def buffer_count(block_mapping: Any) -> int:
    """How many blocks of an operand Pallas holds at a time."""
    return getattr(getattr(block_mapping, "pipeline_mode", None), "buffer_count", 2)


def where(eqn: Any) -> str:
    """`file:line (function)` of the reader's code that made `eqn`, or of whose there is."""
    return str(lines.of(eqn))


def scope(eqn: Any) -> str:
    """The `jax.named_scope` path that `eqn` was traced under ('' outside any)."""
    return str(getattr(eqn.source_info, "name_stack", ""))


def is_literal(var: Any) -> bool:
    """Whether an equation's operand is a constant written into the jaxpr."""
    return isinstance(var, core.Literal)
