"""What replay must know of JAX's jaxprs: how each equation lays out its operands.

The only file that depends on a JAX version (0.10 to 0.12 differ). Everything is reached through an
equation's own public parameters; primitives are told apart by name. Operands are described by
`Slot`s, an equation's flat operands taken apart by its own pytree once, when the program is
compiled, so that stepping it costs no tree work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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

    ref: Slot
    transforms: tuple[Any, ...]


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
    """The program contains an equation that replay does not know how to step."""


def _slots(eqn: Any) -> list[Slot]:
    return [Slot(i) for i in range(len(eqn.invars))]


def _view(ref: Any, transforms: Sequence[Any] = ()) -> RefView:
    transforms = tuple(transforms)
    while not isinstance(ref, Slot):  # a TransformedRef, possibly of a TransformedRef
        transforms = (*ref.transforms, *transforms)
        ref = ref.ref
    return RefView(ref, tuple(_transform(t) for t in transforms if not hasattr(t, "memory_space")))


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
    if eqn.params.get("add"):
        raise UnsupportedEquation("replay does not know accumulating DMAs (add=True)")
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
    if core_index is not None:
        raise UnsupportedEquation("replay does not know signals to another core (core_index)")
    return Signal(_view(ref, transforms), value, device_id, _is_logical(eqn))


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
    ref, value, *rest = _slots(eqn)
    return Access(_view(ref, _unflatten(eqn, "tree", rest)), writes=True, value=value)


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
    "masked_load": _masked_load,
    "masked_swap": _masked_swap,
}


def operation(eqn: Any) -> Any | None:
    """The DMA, semaphore or memory operation that `eqn` is, its operands as `Slot`s, or None."""
    decode = _OPERATIONS.get(eqn.primitive.name)
    return None if decode is None else decode(eqn)


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
        debug = getattr(open_jaxpr(eqn.params["jaxpr"])[0], "debug_info", None)
        name = getattr(debug, "func_name", None)
    return str(name or "pallas_call").split(" at ")[0]


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A kernel and how it is called: on the TensorCore (`pallas_call`), or on a SparseCore
    (`pl.kernel` on a mesh of scalar subcores), where no grid and no blocks are.
    """

    jaxpr: Any
    grid: tuple[Any, ...]
    num_index_operands: int
    num_inputs: int
    num_outputs: int
    block_mappings: Sequence[Any]
    aliases: dict[int, int]  # result -> operand
    on_sparsecore: bool


def kernel_call(eqn: Any) -> KernelCall:
    """What a `pallas_call` or `mpmd_map` equation calls.

    Raises UnsupportedEquation for kernels on vector subcores or on several cores.
    """
    if eqn.primitive.name == "pallas_call":
        mapping = eqn.params["grid_mapping"]
        return KernelCall(
            eqn.params["jaxpr"],
            mapping.grid,
            mapping.num_index_operands,
            mapping.num_inputs,
            mapping.num_outputs,
            mapping.block_mappings,
            {o: i for i, o in eqn.params["input_output_aliases"]},
            on_sparsecore=False,
        )
    meshes, jaxprs = eqn.params["meshes"], eqn.params["jaxprs"]
    if len(meshes) != 1 or type(meshes[0]).__name__ != "ScalarSubcoreMesh" or meshes[0].size != 1:
        raise UnsupportedEquation("replay knows kernels on one scalar subcore of a SparseCore only")
    n_inputs, n_outputs = len(eqn.invars), len(eqn.outvars)
    aliases = {o: i for i, o in dict(eqn.params["input_output_aliases"]).items()}
    return KernelCall(jaxprs[0], (), 0, n_inputs, n_outputs, (), aliases, on_sparsecore=True)


def collective_id(eqn: Any) -> int | None:
    """The collective id that a kernel was given."""
    params = eqn.params["compiler_params"]
    if isinstance(params, dict):
        params = next(iter(params.values()), None)
    return getattr(params, "collective_id", None)


def memory_space(aval: Any) -> str:
    """'hbm', 'vmem', 'smem' or 'semaphore_mem' of a ref's type."""
    space = getattr(aval, "memory_space", None)
    if space is None:  # a kernel's ref without a memory space is in VMEM; anything else is an array
        return "vmem" if hasattr(aval, "inner_aval") else "hbm"
    name = str(space).lower().removeprefix("memoryspace.")
    return {"any": "hbm", "device": "hbm", "default": "vmem"}.get(name, name)


def block_dims(block_mapping: Any) -> list[tuple[int, bool]]:
    """A block mapping's (size, is squeezed) per dimension of the array."""
    dims = []
    for b in block_mapping.block_shape:
        size = b if isinstance(b, int) else getattr(b, "block_size", None)
        dims.append((1, True) if size is None else (int(size), False))
    return dims


def where(eqn: Any) -> str:
    """`file:line (function)` of the reader's code that made `eqn`, or of whose there is."""
    return str(lines.of(eqn))


def scope(eqn: Any) -> str:
    """The `jax.named_scope` path that `eqn` was traced under ('' outside any)."""
    return str(getattr(eqn.source_info, "name_stack", ""))


def is_literal(var: Any) -> bool:
    """Whether an equation's operand is a constant written into the jaxpr."""
    return isinstance(var, core.Literal)
