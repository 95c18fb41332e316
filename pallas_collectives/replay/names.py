"""What a kernel's author calls its refs.

JAX knows the parameters of a kernel's function. Where the function takes `*refs` and takes them
apart itself, or hands them on to another function, the names stand in its source.
"""

from __future__ import annotations

import ast
import functools
import re

from jax.extend import core

_INDEXED = re.compile(r"(\w+)\[(\d+)\](.*)", re.DOTALL)
_PLACE = re.compile(r"(\S+) at (.*):(\d+)")
_Function = ast.FunctionDef | ast.Lambda


def of_refs(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> list[str]:
    """The names of the refs that a kernel's (or a scope's) jaxpr takes; "" for those without."""
    debug = getattr(jaxpr, "debug_info", None)
    names = [str(name or "") for name in getattr(debug, "arg_names", None) or ()]
    names += [""] * (len(jaxpr.invars) - len(names))
    found = _INDEXED.fullmatch
    if any(map(found, names)):
        place = _PLACE.fullmatch(str(getattr(debug, "func_src_info", "")))
        if place:
            taken_apart = _taken_apart(place[2], int(place[3]))
            names = [_renamed(name, taken_apart) for name in names]
    return names


def _renamed(name: str, taken_apart: dict[tuple[str, int], str]) -> str:
    match = _INDEXED.fullmatch(name)
    own = taken_apart.get((match[1], int(match[2]))) if match else None
    return f"{own}{match[3]}" if match and own else name


@functools.lru_cache(maxsize=256)
def _taken_apart(path: str, line: int) -> dict[tuple[str, int], str]:
    """(parameter, index) -> the name given to it, in the function that begins at a line."""
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return {}
    out: dict[tuple[str, int], str] = {}
    for function in _functions(tree, line):
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                _assigned(node.targets[0], node.value, out)
            elif isinstance(node, ast.Call):
                _handed_on(node, tree, out)
    return out


def _functions(tree: ast.AST, line: int) -> list[_Function]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            decorators = getattr(node, "decorator_list", [])
            if min([node.lineno, *(d.lineno for d in decorators)]) == line:
                found.append(node)
    return found


def _assigned(target: ast.expr, value: ast.expr, out: dict[tuple[str, int], str]) -> None:
    """Reads `a, b, *rest = refs`, `a, b = refs[2:4]` and `a = refs[1]`."""
    first = 0
    if isinstance(value, ast.Subscript):
        index = value.slice
        if isinstance(target, ast.Name) and isinstance(index, ast.Constant):
            if isinstance(value.value, ast.Name) and isinstance(index.value, int):
                out.setdefault((value.value.id, index.value), target.id)
            return
        lower = index.lower if isinstance(index, ast.Slice) else index
        if lower is not None and not isinstance(lower, ast.Constant):
            return
        first = 0 if lower is None else int(str(lower.value))
        value = value.value
    if not isinstance(target, (ast.Tuple, ast.List)) or not isinstance(value, ast.Name):
        return
    for number, element in enumerate(target.elts):
        if not isinstance(element, ast.Name):  # a starred one: what follows counts from the end
            return
        out.setdefault((value.id, first + number), element.id)


def _handed_on(call: ast.Call, tree: ast.AST, out: dict[tuple[str, int], str]) -> None:
    """Reads `kernel(n, *refs)`, of a function in the same file."""
    starred = [n for n, arg in enumerate(call.args) if isinstance(arg, ast.Starred)]
    if len(starred) != 1 or not isinstance(call.func, ast.Name):
        return
    (first,) = starred
    refs = call.args[first]
    if not isinstance(refs, ast.Starred) or not isinstance(refs.value, ast.Name):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == call.func.id:
            for number, parameter in enumerate(node.args.args[first:]):
                out.setdefault((refs.value.id, number), parameter.arg)
