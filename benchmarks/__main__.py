"""Verifies, times, compiles or replays every collective.

python -m benchmarks [flags]                  all of that, on the devices there are
python -m benchmarks certify [flags]          what to run first on new TPUs or GPUs: one report file
python -m benchmarks tune [flags]             which algorithm is fastest, for the library's choice
python -m benchmarks fused [flags]            products with their collective: what is hidden
python -m benchmarks norms [flags]            a sum with residual and norm: one kernel or apart
python -m benchmarks experts [flags]          tokens to their experts and back
python -m benchmarks step [flags]             a model's step: which collectives the core waits for
python -m benchmarks host [flags]             what a small call costs the host, on GPUs
python -m benchmarks layers [flags]           weights gathered one layer ahead, on GPUs
python -m benchmarks report A.json ...        a Markdown page and plots of results
python -m benchmarks compare A.json B.json    what became slower, beyond noise
python -m benchmarks readme                   the tables of the READMEs, made anew

COMMAND --help shows the flags of a command.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from absl import app, flags, logging

from benchmarks import interrupt
from benchmarks.compiled import CompilerError
from benchmarks.settings import FlagError
from pallas_collectives.errors import CollectiveError

# A command is a module with a function `main(argv) -> exit status`.
COMMANDS = (
    *("sweep", "certify", "tune", "fused", "norms", "experts", "step", "host", "layers"),
    *("report", "compare", "readme"),
)


def main(argv: Sequence[str]) -> int:
    """Runs a command: `argv` is its name, then what absl left of its arguments."""
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    module = importlib.import_module(f"benchmarks.{argv[0]}")
    try:
        _refuse_others(module)
        _refuse_empty(module)
        return module.main(argv)
    except (CollectiveError, CompilerError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, CollectiveError) else 1
    except KeyboardInterrupt:
        return interrupt.STATUS


def _refuse_others(module: ModuleType) -> None:
    """Refuses flags of other commands: absl knows those of all modules that are imported."""
    its = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(module)}
    for command in COMMANDS:
        others = sys.modules.get(f"benchmarks.{command}")
        for flag in flags.FLAGS.get_key_flags_for_module(others) if others else ():
            if flag.present and flag.name not in its:
                rule = "this command has no such flag"
                raise FlagError(f"--{flag.name}", rule, "leave it out; --help shows those it has")


def _refuse_empty(module: ModuleType) -> None:
    """Refuses flags with nothing behind their "="; a list whose default is None may be empty."""
    for flag in flags.FLAGS.get_key_flags_for_module(module):
        if flag.present and (flag.value == "" or (flag.value == [] and flag.default is not None)):
            raise FlagError(f"--{flag.name}=", "nothing is named", "name it, or leave the flag out")


def _parsed(arguments: list[str]) -> list[str]:
    try:
        return flags.FLAGS(["--help" if a == "-h" else a for a in arguments])
    except flags.Error as error:
        print(f"{error} (see --help)", file=sys.stderr)
        sys.exit(2)
    except SystemExit:  # --help has been shown; absl calls that a failure
        sys.exit(0)


def _start(main: Callable[..., Any], arguments: Sequence[str]) -> Any:
    return app.run(main, list(arguments), flags_parser=_parsed)


def run(arguments: Sequence[str], start: Callable[..., Any] = _start) -> Any:
    """Runs the command line's arguments; `start` parses the flags among them and calls `main`."""
    named = bool(arguments) and arguments[0] in COMMANDS
    command = arguments[0] if named else "sweep"
    module = importlib.import_module(f"benchmarks.{command}")
    if command == "tune":  # has a parser of its own
        sys.exit(module.main(arguments[1:]))
    flags.adopt_module_key_flags(module)  # so that --help shows them
    if named:
        sys.modules["__main__"].__doc__ = module.__doc__  # and what the command is
    flags.FLAGS.set_gnu_getopt(True)  # flags may follow arguments
    return start(main, [command, *arguments[named:]])


if __name__ == "__main__":
    run(sys.argv[1:])
