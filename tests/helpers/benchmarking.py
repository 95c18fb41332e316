"""`python -m benchmarks` called in this process, whose JAX has started already."""

import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import __main__, devices, settings
from benchmarks.cases import CASES

for command in __main__.COMMANDS:  # absl forgets flags that are defined while others are saved
    importlib.import_module(f"benchmarks.{command}")
REPOSITORY = Path(__file__).resolve().parents[2]
NOTHING_ELSE = ("--compile_for=", "--replay=")
ONE_ROW = ("--mesh=2", "--sizes=8K", "--algorithm=direct", *NOTHING_ELSE)


class Done(NamedTuple):
    """What a run came to."""

    status: int
    out: str
    err: str


Bench = Callable[..., Done]


def in_process(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Bench:
    """A function that takes the command line's arguments."""
    monkeypatch.setattr(devices, "prepare", lambda *_: None)

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        with flagsaver.flagsaver():
            status = __main__.run(arguments, lambda main, argv: main(flags.FLAGS(argv)))
        return Done(status, *capsys.readouterr())

    return run


def instead(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
    """Has the first collective alone, and called so; the rest of the program is the real one."""
    monkeypatch.setattr(settings, "CASES", (dataclasses.replace(CASES[0], call=call),))


def start(
    *arguments: str, env: Mapping[str, str] = {}, program: tuple[str, ...] = ("-m", "benchmarks")
) -> "subprocess.Popen[str]":
    """The same in a process of its own, on simulated devices."""
    return subprocess.Popen(
        (sys.executable, *program, *arguments),
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> Done:
    """What it came to; it does not outlive this."""
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    return Done(process.returncode, out, err)
