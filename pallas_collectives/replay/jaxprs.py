"""What replay must know of JAX's jaxprs: what equations hold, and what kernels are made of.

Most of what depends on how JAX 0.10 to 0.12 write jaxprs is here and in `operations`. It is reached
through an equation's own public parameters; primitives are told apart by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat
from pallas_collectives.replay import lines


class UnsupportedEquation(NotImplementedError):
    """The program contains an equation that replay does not know how to step.

    Attributes:
      primitive: the equation's, or "" if no single equation is at fault.
      line: `file:line (function)` of the code that made it, or "".
    """

    def __init__(self, what: str, eqn: JaxprEqn | None = None):
        self.primitive = eqn.primitive.name if eqn is not None else ""
        self.line = where(eqn) if eqn is not None else ""
        at = f", in {self.primitive!r} at {self.line}" if self.line else ""
        super().__init__(what + at)


def works_on_refs(eqn: JaxprEqn) -> bool:
    """Whether an operand of an equation is a ref."""
    return any(hasattr(v.aval, "inner_aval") for v in eqn.invars)


def core_meshes(eqn: JaxprEqn) -> list[tuple[dict[str, int], Any]]:
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


def open_jaxpr(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> tuple[Any, list[Any]]:
    """A jaxpr and its constants, from a closed or an open one."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, list(getattr(jaxpr, "consts", ()))


def called_jaxpr(eqn: JaxprEqn) -> Any | None:
    """The jaxpr of an equation that only calls it (jit, shard_map, custom_jvp_call, …), or None."""
    for key in ("jaxpr", "call_jaxpr"):
        if key in eqn.params:
            return eqn.params[key]
    return None


def pallas_name(eqn: JaxprEqn) -> str:
    """The kernel's name as its author wrote it, best effort."""
    name = eqn.params.get("name")
    if not name:
        body = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["jaxprs"][0]
        debug = getattr(open_jaxpr(body)[0], "debug_info", None)
        name = getattr(debug, "func_name", None)
    return str(name or "pallas_call").split(" at ")[0]


def on_sparsecore(eqn: JaxprEqn) -> bool:
    """Whether a SparseCore's subcores run a kernel, and not the TensorCore."""
    meshes = eqn.params.get("meshes") or (eqn.params.get("mesh"),)
    return all("Subcore" in type(mesh).__name__ for mesh in meshes)


def collective_id(eqn: JaxprEqn) -> int | None:
    """The collective id that a kernel was given."""
    return getattr(eqn.params.get("compiler_params"), "collective_id", None)


def skips_device_barrier(eqn: JaxprEqn) -> bool:
    """Whether a kernel asks the compiler for no barrier of all devices."""
    return bool(getattr(eqn.params.get("compiler_params"), "skip_device_barrier", False))


def equations(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> Iterator[Any]:
    """All equations of a jaxpr and of those within it."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        yield from equations_within(eqn)


def equations_within(eqn: JaxprEqn) -> Iterator[Any]:
    """All equations of the jaxprs that an equation has, and of those within them."""
    for jaxpr in _compat.jaxprs_of(eqn):
        yield from equations(jaxpr)


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


def where(eqn: JaxprEqn) -> str:
    """`file:line (function)` of the reader's code that made `eqn`, or of whose there is."""
    return str(lines.of(eqn))


def scope(eqn: JaxprEqn) -> str:
    """The `jax.named_scope` path that `eqn` was traced under ('' outside any)."""
    return str(getattr(eqn.source_info, "name_stack", ""))
