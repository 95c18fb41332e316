"""python -m pallas_collectives: what there is; with a command, that."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any

_COMMANDS = """\
commands
  python -m pallas_collectives verify MODULE:FUNCTION   judge a kernel of yours; --help says how
  python -m benchmarks                                  check and time every collective (in a clone)
"""


def main(argv: Sequence[str]) -> int:
    """Runs a command, or prints the map."""
    if argv and argv[0] == "verify":
        return importlib.import_module("pallas_collectives.verify.cli").main(argv[1:])
    if argv and argv[0] not in ("help", "-h", "--help"):
        print(f"{argv[0]!r} is not a command.\n\n{_COMMANDS}", end="", file=sys.stderr)
        return 2
    print(_map(), end="")
    return 0


def first_sentence(documented: Any) -> str:
    """The first sentence of a docstring, on one line."""
    said = (inspect.getdoc(documented) or "").partition("\n\n")[0]
    return " ".join(said.split()).partition(". ")[0].rstrip(".")


def _map() -> str:
    """The public names, a line each, and the commands."""
    package = importlib.import_module("pallas_collectives")
    about = (package.__doc__ or "").partition("\n")[0]
    lines = [f"pallas_collectives {package.__version__}: {about}", ""]
    for name in package.PUBLIC:
        first = first_sentence(getattr(package, name))
        lines.append(f"  {name:<34}{first if len(first) <= 86 else first[:85] + '…'}")
    return "\n".join(lines) + f"\n\n{_COMMANDS}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
