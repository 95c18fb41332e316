"""`python -m pallas_collectives verify`: the judge on the command line."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pallas_collectives import verify
from pallas_collectives.errors import CollectiveError
from pallas_collectives.verify.verdict import Verdict

_USE = """\
exit status: 0 sound; 1 a fault; 2 cannot be judged, or what is asked for makes no sense

"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; --help shows what there is.", file=sys.stderr)
        sys.exit(2)


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    meaning = (verify.__doc__ or "").partition("What a verdict means")[2]
    out = _Parser(
        prog="python -m pallas_collectives verify",
        description="Judges a function with Pallas TPU kernels on every schedule, without a TPU.",
        epilog=_USE + "What a verdict means" + meaning,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = out.add_argument
    add("function", help="package.module:function, or path/to/file.py:function")
    add(
        "--arg",
        action="append",
        default=[],
        metavar="TYPE",
        help="an operand: f32[1024,128], bf16[64*n,128] with n the devices; again for each",
    )
    add(
        "--args",
        metavar="FUNCTION",
        help="a function, of n if it wants it, that returns them all",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword of the function, a Python literal or else text: axis_name=x",
    )
    add(
        "--mesh",
        action="append",
        default=[],
        metavar="x=8",
        help="axes, or x=4,y=2; again for more",
    )
    add("--devices", metavar="2..8", help="how many, on one axis: 8, 2,4,8 or 2..8 (default 2,4,8)")
    add(
        "--axis-names", metavar="x,y", help="of the mesh that --devices are laid out in (default x)"
    )
    add("--machine", metavar="v5p:4x4x4", help="a pod slice, or v4, v5e, v5p (default), v6e, 7x")
    add(
        "--as",
        dest="inside",
        choices=("device", "whole"),
        help="the function of one device, or of whole arrays (default: found out)",
    )
    add("--compile", metavar="v5e,v5p", help="ask the TPU compilers of these too (needs libtpu)")
    add("--json", metavar="FILE", help="write all of it ('-': to standard output, alone)")
    add("--sarif", metavar="FILE", help="write SARIF 2.1.0, for code review")
    add("--html", metavar="FILE", help="write one page with findings and time lines")
    return out


def main(argv: Sequence[str]) -> int:
    """Runs it; the exit status."""
    given = parser().parse_args(argv)
    try:
        return _run(given)
    except CollectiveError as error:
        print(f"{parser().prog}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{parser().prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser().prog}: interrupted; nothing is judged.", file=sys.stderr)
        return 130


def _run(given: argparse.Namespace) -> int:
    from pallas_collectives.verify import asked

    _require_files(given)
    if given.mesh and given.axis_names:
        raise asked.AskError(
            "--axis-names", "--mesh names its axes itself", "leave one of them out"
        )
    meshes = [asked.parse_mesh(text) for text in given.mesh]
    devices = asked.parse_devices(given.devices) if given.devices else None
    names = tuple((given.axis_names if given.axis_names is not None else "x").split(","))
    _see_devices(asked.meshes(meshes, devices, names))
    keywords = dict(map(_keyword, given.set))
    function = asked.named(given.function)
    verdict = verify.check(
        functools.partial(function, **keywords) if keywords else function,
        *_operands(given),
        mesh=meshes,
        devices=devices,
        axis_names=names,
        machine=given.machine,
        inside=None if given.inside is None else given.inside == "device",
        compile=[] if given.compile is None else given.compile.split(","),
    )
    verdict = dataclasses.replace(verdict, name=given.function)
    if given.json != "-":
        print(verdict)
    _write(verdict, given)
    from pallas_collectives.verify.verdict import EXIT

    return EXIT[verdict.status]


def _keyword(text: str) -> tuple[str, Any]:
    from pallas_collectives.verify import asked

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise asked.AskError(f"--set={text}", "is no keyword", "write it like axis_name=x")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return name, value


def _require_files(given: argparse.Namespace) -> None:
    """Refuses what cannot be written before anything is judged."""
    from pallas_collectives.verify import asked

    flags = {flag: getattr(given, flag) for flag in ("json", "sarif", "html")}
    files = {f"--{flag}={name}": Path(name) for flag, name in flags.items() if name is not None}
    for flag, file in files.items():
        if flag == "--json=-":
            continue
        if why := _obstacle(file):
            rule = f"no file can be written there ({why})"
            raise asked.AskError(flag, rule, "name one in a folder of yours")
    if len({str(file.resolve()) for file in files.values()}) < len(files):
        raise asked.AskError(" and ".join(files), "are one file", "name a file for each")


def _obstacle(file: Path) -> str | None:
    """Why a file cannot be written; what is there stays as it is."""
    is_new = not file.exists()
    try:
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _operands(given: argparse.Namespace) -> Sequence[Any]:
    from pallas_collectives.verify import asked

    if not given.args:
        return given.arg
    if given.arg:
        raise asked.AskError("--arg and --args", "are two ways to say one thing", "use one of them")
    return [asked.Together(asked.named(given.args))]


def _see_devices(meshes: Sequence[dict[str, int]]) -> None:
    """Lets JAX see as many simulated devices, for programs that make a mesh of those there are."""
    import math

    from pallas_collectives.simulation import split_cpu

    os.environ["JAX_PLATFORMS"] = "cpu"
    split_cpu(max(math.prod(axes.values()) for axes in meshes))


def _write(verdict: Verdict, given: argparse.Namespace) -> None:
    from importlib.metadata import version

    from pallas_collectives.verify import page, written

    if given.json:
        text = json.dumps(written.as_json(verdict), indent=1)
        if given.json == "-":
            print(text)
        else:
            Path(given.json).write_text(text + "\n", encoding="utf-8")
    if given.sarif:
        log = written.as_sarif(verdict, version("pallas-collectives"))
        Path(given.sarif).write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    if given.html:
        Path(given.html).write_text(page.of(verdict), encoding="utf-8")
