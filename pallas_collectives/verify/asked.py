"""What is to be judged: a function, its arguments, and the meshes and machines to judge it on."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np

from pallas_collectives import _compat
from pallas_collectives.annotations import DType
from pallas_collectives.errors import CollectiveError
from pallas_collectives.replay.machine import GENERATIONS, Machine, MachineError

DEFAULT_GENERATION = "v5p"
Axes = dict[str, int]

_DTYPES = {
    "f": "float",
    "bf": "bfloat",
    "s": "int",
    "i": "int",
    "u": "uint",
    "c": "complex",
    "pred": "bool",
}
_LARGEST = 2**48  # elements of an operand
_MOST_DEVICES = 8192  # of the largest slice
_ARGUMENT = re.compile(r"(\w+?)\[([^\]]*)\]")
_SHORT = re.compile(r"(bf|f|s|i|u|c)(\d+)")


class AskError(CollectiveError):
    """A target, argument, mesh or machine that makes no sense."""


# A function by its name ------------------------------------------------------------------------


def named(target: str) -> Callable[..., Any]:
    """The function that "package.module:function" names; a dotted path within the module may follow
    the colon, and "path/to/file.py:function" names one in a file.

    Raises:
      AskError: not of this form, the module or function does not exist, or the module raises.
    """
    module_name, colon, attribute = target.rpartition(":")
    if not colon or not module_name or not attribute:
        raise AskError(
            f"{target!r}",
            "a function must be named with its module",
            "write package.module:function, or path/to/file.py:function",
        )
    module = _module(module_name)
    try:
        found = operator.attrgetter(attribute)(module)
    except AttributeError:
        functions = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise AskError(
            f"{target!r}",
            f"{module_name} has no {attribute!r}",
            f"it has {', '.join(functions[:8]) or 'no functions'}"
            + (f" and {len(functions) - 8} more" if len(functions) > 8 else ""),
        ) from None
    if not callable(found):
        raise AskError(
            f"{target!r}", f"is a {type(found).__name__}", "name a function that can be called"
        )
    return found


def _module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        folder, file = os.path.split(os.path.abspath(name))
        if not os.path.exists(name):
            raise ModuleNotFoundError(f"there is no file {name}")
        sys.path.insert(0, folder)
        return importlib.import_module(file.removesuffix(".py"))
    except (Exception, SystemExit) as error:
        raise AskError(
            f"module {name!r}",
            f"importing it raises {type(error).__name__}: {error}",
            "run from the folder in which it can be imported, or name its file",
        ) from error


# Arguments -------------------------------------------------------------------------------------


def shape_of(text: str, n: int) -> jax.ShapeDtypeStruct:
    """The array type that "f32[1024,128]" names.

    A dimension may be an expression of `n`, the number of devices: "bf16[64*n,128]".

    Raises:
      AskError: not of this form.
    """
    match = _ARGUMENT.fullmatch(text.replace(" ", ""))
    try:
        if match is None:
            raise ValueError
        dims = [_dimension(dim, n) for dim in match[2].split(",") if dim]
        if math.prod(dims) > _LARGEST:
            raise ValueError
        return jax.ShapeDtypeStruct(tuple(dims), _dtype(match[1]))
    except (ValueError, TypeError, SyntaxError, KeyError, RecursionError, MemoryError):
        raise AskError(
            f"argument {text[:80]!r}",
            "it must be a type with its dimensions in brackets, of at most 2**48 elements",
            "write it like f32[1024,128], bf16[64*n,128] (n: the devices) or s32[]",
        ) from None


def _dtype(name: str) -> DType:
    short = _SHORT.fullmatch(name)
    return jax.numpy.dtype(_DTYPES[short[1]] + short[2] if short else _DTYPES.get(name, name))


def _power(base: int, exponent: int) -> int:
    if not 0 <= exponent <= 48 or abs(base) > _LARGEST:
        raise ValueError
    return int(base**exponent)


_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: _power,
}


def _dimension(text: str, n: int) -> int:
    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and node.id == "n":
            return n
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(text)

    size = value(ast.parse(re.sub(r"(\d)n", r"\1*n", text), mode="eval").body)
    if size < 0:
        raise ValueError(text)
    return size


@dataclasses.dataclass(frozen=True)
class Together:
    """All arguments at once: a function, of n or of nothing, that returns one or a tuple."""

    function: Callable[..., Any]

    def made(self, n: int) -> tuple[Any, ...]:
        wants_n = any(
            p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            for p in inspect.signature(self.function).parameters.values()
        )
        made = self.function(n) if wants_n else self.function()
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def arguments(given: Sequence[Any], n: int) -> tuple[Any, ...]:
    """The arguments for n devices.

    Each is a pytree of arrays or `jax.ShapeDtypeStruct`s, of text like "f32[64*n,128]", or a
    function of n that returns one.
    """

    def settled(leaf: Any) -> Any:
        if isinstance(leaf, str):
            return shape_of(leaf, n)
        if isinstance(leaf, jax.Array) and not _compat.is_traced(leaf):
            return np.asarray(leaf)
        return leaf

    out: list[Any] = []
    for arg in given:
        if isinstance(arg, Together):
            out += arg.made(n)
        else:
            out.append(arg(n) if callable(arg) else arg)
    return tuple(jax.tree.map(settled, arg) for arg in out)


# Meshes and machines ---------------------------------------------------------------------------


def parse_mesh(text: str) -> Axes:
    """The axes of "x=8" or "x=4,y=2"."""
    if not re.fullmatch(r"[A-Za-z_]\w*=[1-9]\d*(,[A-Za-z_]\w*=[1-9]\d*)*", text):
        raise AskError(
            f"--mesh={text}",
            "a mesh must be NAME=SIZE, one for each axis",
            "write it like x=8 or x=4,y=2",
        )
    pairs = [part.split("=") for part in text.split(",")]
    axes = {name: int(size) for name, size in pairs}
    if len(axes) < len(pairs):
        raise AskError(f"--mesh={text}", "names an axis twice", "name each once")
    return axes


def parse_devices(text: str) -> tuple[int, ...]:
    """The numbers of "8", "2,4,8" or "2..8"."""
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d{0,5})(?:\.\.([1-9]\d{0,5}))?", part.strip())
        last = 0 if match is None else int(match[2] or match[1])
        if match is None or not int(match[1]) <= last <= _MOST_DEVICES:
            raise AskError(
                f"--devices={text}",
                f"numbers of devices are whole, from 1 to {_MOST_DEVICES}, a range goes upwards",
                "write them like 8, 2,4,8 or 2..8",
            )
        sizes += range(int(match[1]), last + 1)
    return tuple(dict.fromkeys(sizes))


def meshes(
    mesh: Mapping[str, int] | Sequence[Mapping[str, int]] | None,
    devices: int | Iterable[int] | None,
    names: Sequence[str] = ("x",),
) -> list[Axes]:
    """The axes of every mesh that is asked for.

    Raises:
      AskError: a mesh of several axes together with numbers of devices; or neither of the two.
    """
    if not names or len(set(names)) < len(names) or not all(map(str.isidentifier, names)):
        raise AskError(
            f"axis names {list(names)}",
            "they must be different identifiers",
            'give ("x",) or ("x", "y")',
        )
    given = [mesh] if isinstance(mesh, Mapping) else list(mesh or [])
    for axes in given:
        _require_axes(axes)
    if devices is None:
        return [dict(axes) for axes in given] or [_split(n, names) for n in (2, 4, 8)]
    sizes = list(devices) if isinstance(devices, Iterable) else [devices]
    if not sizes or not all(map(_is_size, sizes)):
        rule = "it must be a whole number above 0, or several"
        raise AskError(f"devices={devices!r}", rule, "give 8, or (2, 4, 8)")
    if not given:
        return [_split(n, names) for n in sizes]
    if len(given) > 1 or len(given[0]) > 1:
        raise AskError(
            f"meshes {given} and devices {sizes}",
            "numbers of devices are for a mesh of one axis",
            "give the meshes alone, one by one",
        )
    (name,) = given[0]
    return [{name: n} for n in sizes]


def _require_axes(axes: Any) -> None:
    if not isinstance(axes, Mapping) or not axes or not all(map(_is_size, axes.values())):
        raise AskError(f"mesh {axes}", "a mesh must be axes with sizes above 0", 'give {"x": 8}')


def _is_size(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and bool(value > 0)


def _split(n: int, names: Sequence[str]) -> Axes:
    """n devices over the axes, as evenly as they divide."""
    axes: Axes = {}
    for left in range(len(names), 1, -1):
        size = max(d for d in range(1, n + 1) if n % d == 0 and d**left <= n)
        axes[names[left - 1]] = size
        n //= size
    return {name: axes.get(name, n) for name in names}


# Chips of the slices that are sold, for tori of two axes and of three.
_SLICES = {
    2: ("1x1", "2x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: (
        *("1x1x1", "2x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
        *("8x8x8", "8x8x16", "8x16x16", "16x16x16"),
    ),
}


def slices(generation: str) -> Iterable[str]:
    """The slices of a generation, smallest first, as names of topologies."""
    return (f"{generation}:{shape}" for shape in _SLICES[GENERATIONS[generation].dims])


def machine_for(machine: Machine | str | None, n: int) -> Machine:
    """The machine asked for; of a generation alone the smallest slice that holds n devices.

    Raises:
      AskError: the machine does not exist, or has fewer devices.
    """
    if machine is None or (isinstance(machine, str) and machine in GENERATIONS):
        for name in slices(machine or DEFAULT_GENERATION):
            found = Machine.named(name)
            if found.n_devices >= n:
                return found
        of = machine or DEFAULT_GENERATION
        raise AskError(f"{n} devices", f"no slice of {of} has so many", "ask for fewer")
    try:
        found = Machine.named(machine) if isinstance(machine, str) else machine
    except MachineError as error:
        raise AskError(
            f"machine {machine!r}", str(error), "write it like v5p:4x4x4, or v5p alone"
        ) from None
    if found.n_devices < n:
        raise AskError(
            f"{n} devices on {found}", f"it has {found.n_devices}", "ask for a larger machine"
        )
    return found
