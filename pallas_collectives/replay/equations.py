"""Compiles single equations to steps: arithmetic, control flow, scopes, and kernels within
programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat
from pallas_collectives.annotations import DType
from pallas_collectives.kernels.machinery.blocks import LANES, sublanes
from pallas_collectives.replay import (
    control,
    cores,
    jaxprs,
    kernels,
    known,
    operations,
    refs,
    shards,
    twins,
    values,
)
from pallas_collectives.replay.operations import Operation
from pallas_collectives.replay.program import Access, CoreWork
from pallas_collectives.replay.stepper import Step, Stepper
from pallas_collectives.replay.values import UNKNOWN, Known, merge, take
from pallas_collectives.replay.views import DataDependent, View
from pallas_collectives.topology.chips import Chip

_SUBLANES = sublanes(jnp.dtype(jnp.float32))
_LARGEST_KNOWN = 1 << 16  # elements of an array that is computed on the host, outside kernels
# Primitives that move no data on a TPU core, or whose cost is that of the loads and stores around
# them.
_FREE = values.IDENTITY | {"iota", "transpose", "slice", "dynamic_slice", "concatenate", "split"}


def compile_equation(
    stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]
) -> Step | None:
    """The step of `eqn`, which reads environment slots `ins` and writes `outs`; None if there is
    nothing to do.
    """
    name = eqn.primitive.name
    special = _SPECIAL.get(name)
    if special is not None:
        return _explained(eqn, special(stepper, eqn, ins, outs))
    op = operations.operation(eqn)
    if op is not None:
        return _operation(stepper, eqn, op, ins, outs)
    if name in _NO_WORK:
        return None
    if name in values.IDENTITY and len(ins) == len(outs) == 1 and not _converts(eqn):
        return _identity(stepper, eqn, ins, outs)
    scalar = all(not getattr(v.aval, "shape", ()) for v in eqn.outvars)
    if name in values.SCALAR and scalar:
        return _scalar(eqn, values.SCALAR[name], ins, outs)
    if twins.is_twin(eqn):
        return _twin(stepper, eqn, ins, outs)
    if name == "all_gather":
        return _gathered(stepper, eqn, ins, outs, _other(stepper, eqn, ins, outs))
    called = jaxprs.called_jaxpr(eqn)
    if called is not None:
        return _call(stepper, called, ins, outs)
    return _other(stepper, eqn, ins, outs)


def _operation(
    stepper: Stepper, eqn: JaxprEqn, op: Operation, ins: list[int], outs: list[int]
) -> Step:
    selectors = [ins[slot.index] for slot in operations.selectors(op)]

    def step(env: list[Any], lanes: np.ndarray) -> None:
        for slot in selectors:
            if isinstance(env[slot], np.ndarray):  # each part of the lanes has a ref of its own
                _by_value(env, env[slot], lanes)
                return
        out = stepper.perform(eqn, op, [env[i] for i in ins], lanes)
        if outs:
            env[outs[0]] = out

    def _by_value(env: list[Any], which: np.ndarray, lanes: np.ndarray) -> None:
        stepper.flush_busy(eqn, lanes)
        parts = []
        for index in np.unique(which):
            at = np.nonzero(which == index)[0]
            part = [take(value, at) for value in env]
            for slot in selectors:
                if part[slot] is not UNKNOWN and np.all(part[slot] == np.min(part[slot])):
                    part[slot] = int(np.min(part[slot]))
            step(part, lanes[at])
            stepper.flush_busy(eqn, lanes[at])
            parts.append((at, part[outs[0]] if outs else None))
        if outs:
            env[outs[0]] = merge(parts, len(lanes))

    return _explained(eqn, step)


def _explained(eqn: JaxprEqn, step: Step) -> Step:
    """`step` with the equation's line in the errors that its operands can cause."""

    def explained(env: list[Any], lanes: np.ndarray) -> None:
        try:
            step(env, lanes)
        except DataDependent as error:
            if "\n" in str(error):
                raise
            raise DataDependent(
                f"{error} at {jaxprs.where(eqn)} depends on array data, which replay does not hold."
                "\nPass the argument that it comes from (sizes, offsets, tables) as a numpy array "
                "instead of a shape: its contents are then followed into scalar memory.\n"
                "Of collectives on the way only all_gather hands them on: in place of another "
                "gather, and take each device's part."
            ) from None
        except IndexError as error:
            if "\n" in str(error):
                raise
            raise IndexError(
                f"{error} at {jaxprs.where(eqn)}\nA TPU would halt or write elsewhere: wrap the "
                "number round, or leave the operation out there."
            ) from None

    return explained


def _identity(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    """Hands on what stays as it is; known arrays of another shape take the general way."""
    general = _other(stepper, eqn, ins, outs)
    before, after = (
        (getattr(v.aval, "shape", None), getattr(v.aval, "dtype", None))
        for v in (*eqn.invars, *eqn.outvars)
    )
    scalar, dtype = not after[0], after[1]
    numeric = isinstance(dtype, np.dtype) and dtype.kind in "iubf"

    def step(env: list[Any], lanes: np.ndarray) -> None:
        value = env[ins[0]]
        if before == after or isinstance(value, View) or value is UNKNOWN:
            env[outs[0]] = value
        elif scalar and numeric and not isinstance(value, Known):
            env[outs[0]] = values.settle(value, np.dtype(dtype))
        else:
            general(env, lanes)

    return step


def _scalar(eqn: JaxprEqn, function: Callable[..., Any], ins: list[int], outs: list[int]) -> Step:
    dtype = np.dtype(_compat.type_of(eqn.outvars[0]).dtype)
    (o,) = outs
    if eqn.primitive.name == "select_n":

        def select(env: list[Any], lanes: np.ndarray) -> None:
            which, *cases = (env[i] for i in ins)
            out = UNKNOWN if which is UNKNOWN else function(which, *cases)
            env[o] = out if out is UNKNOWN else values.settle(out, dtype)

        return select

    def step(env: list[Any], lanes: np.ndarray) -> None:
        args = [env[i] for i in ins]
        for a in args:
            if a is UNKNOWN:
                env[o] = UNKNOWN
                return
        env[o] = values.settle(function(*args), dtype)

    return step


def _call(
    stepper: Stepper, called: core.Jaxpr | core.ClosedJaxpr, ins: list[int], outs: list[int]
) -> Step:
    def step(env: list[Any], lanes: np.ndarray) -> None:
        results = stepper.run(called, [env[i] for i in ins], lanes)
        for o, value in zip(outs, results, strict=True):
            env[o] = value

    return step


def _twin(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    """One of our collectives: its kernels and, of an all-gather of known arrays, its result."""
    call = _call(stepper, twins.expand(eqn, stepper.mesh), ins, outs)
    if eqn.primitive.name != "pallas_all_gather":
        return call
    return _gathered(stepper, eqn, ins, outs, call)


def _gathered(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int], call: Step) -> Step:
    """An all-gather: what `call` does and, if what is gathered is known, the result."""

    def step(env: list[Any], lanes: np.ndarray) -> None:
        operand = env[ins[0]]
        call(env, lanes)
        small = math.prod(_compat.type_of(eqn.outvars[0]).shape) <= _LARGEST_KNOWN
        if small and isinstance(operand, Known):
            env[outs[0]] = twins.gathered(operand, stepper.devices.axes, **eqn.params)

    return step


def _other(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    """Any other equation: computed on the host where all operands are known and small, else priced
    and unknown.
    """
    if jaxprs.works_on_refs(eqn):
        raise jaxprs.UnsupportedEquation("replay does not know this primitive on refs", eqn)
    seconds = _price(stepper, eqn)
    spend = stepper.multiply if eqn.primitive.name == "dot_general" else stepper.compute
    size = max((math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars), default=0)
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    local = not eqn.effects and "axis_name" not in eqn.params  # no collective of lax's
    local &= all(isinstance(getattr(aval, "dtype", None), np.dtype) for aval in avals)  # no keys

    def step(env: list[Any], lanes: np.ndarray) -> None:
        args = [env[i] for i in ins]
        largest = _LARGEST_KNOWN if stepper.kernel is None else 1
        handed_on = [
            a for a in args if isinstance(a, View)
        ]  # of a kernel that goes on: see kernels
        for view in handed_on:
            stepper.emit(Access(lanes, 0.0, stepper.source(eqn), view, writes=False))
        follows = local and stepper.inside and not handed_on
        if not follows or size > largest or any(a is UNKNOWN for a in args):
            spend(seconds)
            if stepper.kernel is None and stepper.inside:
                stepper.unmodelled[eqn.primitive.name] += 1
            for o in outs:
                env[o] = UNKNOWN
            return
        for o, value in zip(outs, known.evaluate(eqn, args), strict=True):
            env[o] = value

    return step


def _price(stepper: Stepper, eqn: JaxprEqn) -> float:
    """Seconds of a core's vector or matrix unit for an equation on arrays."""
    generation = stepper.generation
    name = eqn.primitive.name
    numbers = math.prod if stepper.on_sparsecore else _in_registers
    size: float = max((numbers(getattr(v.aval, "shape", ())) for v in eqn.outvars), default=0)
    if name == "convert_element_type":
        size *= (_of_conversion_there if stepper.on_sparsecore else _of_conversion)(generation, eqn)
    elif name == "transpose" and stepper.kernel is not None:
        of_16, of_32 = generation.turned
        size *= of_32 if _compat.type_of(eqn.outvars[0]).dtype.itemsize >= 4 else of_16
    elif name in _FREE:
        return 0.0
    elif name == "dot_general":
        size = max(math.prod(_compat.type_of(v).shape) for v in eqn.outvars)
        (contract, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(_compat.type_of(eqn.invars[0]).shape[d] for d in contract)
        return 2.0 * size * depth * generation.cores / generation.matrix_rate
    elif name.startswith("reduce_") or name in ("argmax", "argmin"):
        shape = _compat.type_of(eqn.invars[0]).shape
        size = math.prod(shape)
        if len(shape) - 1 in eqn.params["axes"]:
            size *= generation.across_lanes
    return size / stepper.vector_rate


def _in_registers(shape: tuple[int, ...]) -> int:
    """Numbers that are computed with an array of a shape: registers hold 8 rows of 128."""
    if len(shape) < 2:
        return math.prod(shape)
    *leading, rows, lanes = shape
    return math.prod(leading) * -(-rows // _SUBLANES) * _SUBLANES * -(-lanes // LANES) * LANES


def _converts(eqn: JaxprEqn) -> bool:
    """Whether it converts an array to numbers of another width, which a vector unit has to do."""
    if eqn.primitive.name != "convert_element_type" or not _compat.type_of(eqn.outvars[0]).shape:
        return False
    before, after = (_compat.type_of(v).dtype for v in (*eqn.invars, *eqn.outvars))
    return bool(before.itemsize != after.itemsize) and jnp.bool_ not in (before, after)


def _of_conversion(chip: Chip, eqn: JaxprEqn) -> float:
    """Elementwise operations of converting a number."""
    before, after = (_compat.type_of(v).dtype for v in (*eqn.invars, *eqn.outvars))
    if before.itemsize == 1:
        return _narrowed(chip, before)[0]
    return _narrowed(chip, after)[1] if after.itemsize == 1 else 1.0


def _of_conversion_there(_: Chip, eqn: JaxprEqn) -> float:
    """Operations of converting a number on a vector subcore: one for a register of what is made."""
    return min(1.0, _compat.type_of(eqn.outvars[0]).dtype.itemsize / 4)


def _narrowed(chip: Chip, dtype: DType) -> tuple[float, float]:
    """What it takes to convert from numbers of one byte, and to them."""
    integers = jnp.issubdtype(dtype, jnp.integer)
    return chip.narrowed.get("int8" if integers else str(dtype), chip.narrowed["float8_e4m3fn"])


# Places and kernels -------------------------------------------------------------------------------


def _axis_index(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    axis = eqn.params["axis_name"]
    names = axis if isinstance(axis, (tuple, list)) else (axis,)

    def step(env: list[Any], lanes: np.ndarray) -> None:
        sizes = stepper.devices.sizes()
        index: Any = 0
        for name in names:
            if name not in sizes:
                raise jaxprs.UnsupportedEquation(f"{name!r} is no axis of {sizes}", eqn)
            index = index * sizes[name] + stepper.devices.axis_index(name, lanes)
        env[outs[0]] = index

    return step


def _program_id(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    which = 0 if eqn.primitive.name == "program_id" else 1

    def step(env: list[Any], lanes: np.ndarray) -> None:
        env[outs[0]] = stepper.grid[eqn.params["axis"]][which]

    return step


def _delay(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    def step(env: list[Any], lanes: np.ndarray) -> None:
        nanoseconds = env[ins[0]]
        if nanoseconds is UNKNOWN:
            raise DataDependent("a delay")
        if not isinstance(nanoseconds, np.ndarray):
            stepper.work(nanoseconds * 1e-9)
            return
        stepper.flush_busy(eqn, lanes)
        for duration in np.unique(nanoseconds):
            at = lanes[nanoseconds == duration]
            stepper.emit(CoreWork(at, duration * 1e-9, stepper.source(eqn)))

    return step


_SPECIAL: dict[str, Any] = {
    "cond": control.cond,
    "scan": control.scan,
    "while": control.while_loop,
    "parallel_loop": control.parallel_loop,
    "run_scoped": refs.run_scoped,
    "run_state": refs.run_state,
    "new_ref": refs.new_ref,
    "empty_ref": refs.new_ref,
    "freeze": refs.freeze,
    "free_ref": refs.freeze,
    "get_global": refs.get_global,
    "axis_index": _axis_index,
    "program_id": _program_id,
    "num_programs": _program_id,
    "get_barrier_semaphore": refs.barrier_semaphore,
    "shard_map": shards.shard_map,
    "pallas_call": kernels.compile_kernel,
    "mpmd_map": cores.compile_kernel,
    "core_map": cores.compile_kernel,
    "barrier": cores.compile_barrier,
    "delay": _delay,
}
_NO_WORK = frozenset({"debug_callback", "debug_print", "trace_value", "add_dependency"})
