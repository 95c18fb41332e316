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
    known = not argv or argv[0] in ("help", "-h", "--help")
    if not known:
        print(f"{argv[0]!r} is no command; there is verify.\n", file=sys.stderr)
    print(_map(), end="", file=sys.stdout if known else sys.stderr)
    return 0 if known else 2


def first_sentence(documented: Any) -> str:
    """Of a docstring, on one line."""
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
