"""The judge: every size asked for, replayed; what was found, what could not be judged, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pallas_collectives.replay import api, lines
from pallas_collectives.replay.jaxprs import UnsupportedEquation
from pallas_collectives.replay.lines import Line
from pallas_collectives.replay.machine import Machine, MachineError
from pallas_collectives.replay.program import Read
from pallas_collectives.replay.trace_program import NoShardMap
from pallas_collectives.replay.views import DataDependent
from pallas_collectives.topology import placement
from pallas_collectives.verify import asked, compiled, findings, programs
from pallas_collectives.verify.verdict import Case, Verdict


@placement.no_mesh()
def check(
    function: Callable[..., Any] | str,
    *args: Any,
    mesh: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None,
    devices: int | Iterable[int] | None = None,
    axis_names: Sequence[str] = ("x",),
    machine: Machine | str | None = None,
    inside: bool | None = None,
    compile: Sequence[str] = (),
) -> Verdict:
    """Judges `function(*args)` on every mesh asked for, on all schedules.

    Args:
      function: calls Pallas TPU kernels; or its name, "package.module:function". One that calls
        `jax.shard_map` takes whole arrays. Any other is taken as the function of one device, as it
        stands inside shard_map, and its operands as one device's. A parameter `mesh` is given the
        mesh.
      *args: pytrees of arrays, of `jax.ShapeDtypeStruct`s, of text like "f32[64*n,128]", or
        functions of the number of devices n that return one. Arrays' contents (sizes, tables) are
        followed.
      mesh: the axes, name to size; or several such. By default one axis "x" of `devices`.
      devices: a number of them, or several; by default 2, 4 and 8.
      axis_names: the names of the axes of the mesh that `devices` are laid out in.
      machine: a pod slice as in `replay`, or a generation; by default the smallest v5p that fits.
      inside: True: it is the function of one device; False: of whole arrays; None: find out.
      compile: generations whose compiler is asked as well, where libtpu is installed.

    Raises:
      AskError: what is asked for makes no sense, with what to ask instead.

    Example:
      >>> def kernel(block):  # what stands inside shard_map
      ...     return pc.all_gather(block, "x", tiled=True)
      >>> verdict = pc.verify.check(kernel, "f32[64,128]", devices=(2, 4))
      >>> verdict.status, len(verdict.cases)
      ('sound', 2)
    """
    target = asked.named(function) if isinstance(function, str) else function
    compiled.require_known(compile)
    cases: list[Case] = []
    taken_as, operands = "", ""
    for axes in asked.meshes(mesh, devices, axis_names):
        pod = asked.machine_for(machine, math.prod(axes.values()))
        program = programs.of(target, args, axes, pod, inside)
        if any(case.axes == program.mesh for case in cases):
            continue  # a function with a mesh of its own
        if math.prod(program.mesh.values()) > pod.n_devices:
            pod = asked.machine_for(machine, math.prod(program.mesh.values()))
        cases.append(_judged(program, pod))
        taken_as = "the function of one device" if program.inside else "a program of whole arrays"
        operands = operands or programs.described(program.args)
    for number, case in enumerate(cases if compile else ()):
        asked_of = (compiled.ask(g, case.axes, target, args, inside) for g in compile)
        cases[number] = dataclasses.replace(case, compilations=tuple(asked_of))
    name = function if isinstance(function, str) else programs.name_of(target)
    return Verdict(name, taken_as, operands, tuple(cases))


def _judged(program: programs.Asked, pod: Machine) -> Case:
    case = Case(program.mesh, pod)
    try:
        report = api.replay(program.function, *program.args, machine=pod, races=True, quick=True)
    except (NoShardMap, MachineError) as error:
        return dataclasses.replace(case, unjudged=str(error))
    except Exception as error:
        primitive, line = culprit(error)
        if isinstance(error, IndexError) and "\n" in str(error):  # explained: the kernel's own
            return dataclasses.replace(case, findings=(findings.of_index_error(error, line),))
        reason = _unknown(error, primitive, line)
        return dataclasses.replace(case, unjudged=reason, line=line)
    found = tuple(findings.of_report(report))
    unjudged, line = "", None
    if not report.kernels:
        unjudged = "there is no Pallas TPU kernel in it"
    elif report.races is None:
        reads = (c.source for c in report.engine.program.columns if isinstance(c, Read))
        line = next((source.place for source in reads), None)
        unjudged = f"races were not looked for: {report.unsought} ('semaphore_read', at {line})"
    return dataclasses.replace(case, findings=found, report=report, unjudged=unjudged, line=line)


def _unknown(error: Exception, primitive: str, line: Line | None) -> str:
    """Why the replay could not go on, in a sentence."""
    told = [line.strip() for line in str(error).strip().splitlines()]
    said = (told or [type(error).__name__])[0]
    if not isinstance(error, (UnsupportedEquation, DataDependent, ValueError)):
        said = f"the replay failed with {type(error).__name__}: {said}"
    if primitive and repr(primitive) not in said:
        said += f" (in the primitive {primitive!r})"
    if line is not None and str(line) not in said:
        said += f", at {line}"
    return said + (f" {told[1]}" if isinstance(error, DataDependent) and told[1:] else "")


def culprit(error: BaseException) -> tuple[str, Line | None]:
    """The primitive, and its line, at which stepping a program raised."""
    found: list[Any] = []
    trace = error.__traceback__
    while trace is not None:
        eqn = trace.tb_frame.f_locals.get("eqn")
        if hasattr(eqn, "primitive") and hasattr(eqn, "source_info"):
            found.append(eqn)
        trace = trace.tb_next
    if not found:
        return "", None
    told = [line for line in map(lines.of, reversed(found)) if line.rank <= lines.OURS]
    return found[-1].primitive.name, next(iter(told), lines.of(found[-1]))
