"""Whose line an instruction comes from: the reader's, not that of a function it calls.

An equation knows the stack that it was traced under, up to the jaxpr that it lies in. So what a
loop's body or a pipeline of JAX's does is looked up in the equations around it as well, up to the
kernel's call.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import jax
import jaxlib
from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_JAX = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, jaxlib))
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MACHINERY = os.path.join(_HERE, "kernels", "machinery") + os.sep
_KERNEL_CALLS = ("pallas_call", "core_map", "mpmd_map")

# Whose code a frame is, the more telling first.
READERS, OURS, OUR_MACHINERY, JAXS, JAXS_INSIDES, NOBODYS = range(6)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of code. `rank`: whose it is, one of the constants above."""

    path: str
    number: int
    function: str
    rank: int = READERS

    @property
    def file(self) -> str:
        """Its file; of a notebook the cell, as `In[3]`."""
        return _cell(self.path) or self.path

    def __str__(self) -> str:
        if self.rank == NOBODYS:
            return "unknown line"
        whose = "JAX's " if self.rank in (JAXS, JAXS_INSIDES) else ""
        return f"{whose}{os.path.basename(self.file)}:{self.number} ({self.function})"


def _cell(path: str) -> str:
    """The notebook's cell that a file stands for; "" of any other."""
    shell = sys.modules.get("IPython")
    shell = shell and shell.get_ipython()
    named = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = named(path) if named else None
    return str(found[1]) if found else ""


_UNKNOWN = Line("", 0, "", NOBODYS)


def of(eqn: JaxprEqn) -> Line:
    """The most telling line of an equation's own stack; of equals the innermost."""
    return min(_lines(eqn), key=lambda line: line.rank, default=_UNKNOWN)


class Lines:
    """The lines of a program's equations, each with those around it."""

    def __init__(self) -> None:
        self._jaxpr: dict[int, Any] = {}  # an equation's id -> the jaxpr that it lies in
        self._around: dict[int, Any] = {}  # a jaxpr's id -> the equation that runs it

    def enter(self, jaxpr: core.Jaxpr | core.ClosedJaxpr) -> None:
        """Learns of a jaxpr's equations, and of the jaxprs that they run."""
        for eqn in jaxpr.eqns:
            self._jaxpr[id(eqn)] = jaxpr
            if eqn.primitive.name not in _KERNEL_CALLS:
                for inner in _compat.jaxprs_of(eqn):
                    self._around.setdefault(id(inner), eqn)

    def of(self, eqn: JaxprEqn) -> Line:
        """The most telling line of an equation and of those around it within its kernel."""
        best, around = of(eqn), self._enclosing(eqn)
        while best.rank != READERS and around is not None:
            best = min(best, of(around), key=lambda line: line.rank)
            around = self._enclosing(around)
        return best

    def _enclosing(self, eqn: JaxprEqn) -> JaxprEqn | None:
        return self._around.get(id(self._jaxpr.get(id(eqn))))


def _lines(eqn: JaxprEqn) -> Iterator[Line]:
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()) if traceback is not None else ():
        path, function = frame.file_name, frame.function_name.rsplit(".", 1)[-1]
        yield Line(path, frame.line_num, function, _rank(path))


def _rank(path: str) -> int:
    if path.startswith(_JAX):
        if os.sep + "_src" + os.sep not in path:
            return JAXS
        return JAXS_INSIDES if path.endswith("pipeline.py") else NOBODYS
    if path.startswith(_MACHINERY):
        return OUR_MACHINERY
    if path.startswith(_HERE):
        return OURS
    return NOBODYS if path.startswith(_STDLIB) and "site-packages" not in path else READERS
