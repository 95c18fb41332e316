"""Breaks the kernels, one small fault at a time, and tells which tier of tests notices each.

    python tests/helpers/mutants.py --list           every place that can be broken
    python tests/helpers/mutants.py --sample 24      breaks 24, spread over faults and files
    python tests/helpers/mutants.py machinery.sync   breaks those whose name holds this

Each mutant is one change to the source of one file of `pallas_collectives/kernels`, or of
`topology/groups.py`, in a copy of the working tree. The tests of that file, of the kernels that
import it, and their rows of the conformance tests run on it until one fails: first those of the
quick tier, then, if none did, those of the full one. A process that hangs is stopped, and counts as
a failure. The exit status is 1 if a mutant survives both.
"""

import argparse
import ast
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("pallas_collectives")
TIERS = ("quick", "full")
SECONDS_A_TEST, SECONDS_A_TIER = 90, 900


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change to one file.

    Attributes:
      fault: which of `FAULTS` it is.
      path: the file, from the root of the tree.
      where: the function that is changed, as `class.method.inner`.
      line: the line on which the change starts.
      edits: what changes: (first character, character behind the last, new text), in order.
    """

    fault: str
    path: Path
    where: str
    line: int
    edits: tuple[tuple[int, int, str], ...]

    def __str__(self) -> str:
        return f"{self.fault}:{module_of(self.path)}:{self.where}:{self.line}"

    def applied(self, source: str) -> str:
        """The file's text with the fault in it."""
        for start, end, new in reversed(self.edits):
            source = source[:start] + new + source[end:]
        return source

    def change(self, source: str) -> str:
        """What becomes what, for people."""
        changes = (f"{source[start:end]} -> {new}" for start, end, new in self.edits)
        return " ".join("; ".join(changes).split())


# The edits of one mutant: each node, and the text that takes its place.
Edits = tuple[tuple[ast.AST, str], ...]


def _called(node: ast.AST) -> str:
    """The last name of what a call calls: "wait" of `copy.wait()`; "" if it is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _dropped(node: ast.AST, names: str) -> Iterator[Edits]:
    """A call of one of the names, for its effect, is left out; also where a lambda is all of it."""
    body = node.value if isinstance(node, ast.Expr) else getattr(node, "body", None)
    if isinstance(node, ast.Expr | ast.Lambda) and re.fullmatch(names, _called(body)):
        yield ((body, "None"),)


def _drop_wait(node: ast.AST) -> Iterator[Edits]:
    yield from _dropped(node, r"_?wait(_.*)?|receive|await_.*")


def _drop_credits(node: ast.AST) -> Iterator[Edits]:
    """All of a class or a function at top level: to drop one side alone would only hang."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not getattr(node, "within", ""):
        dropped = (edit for inner in ast.walk(node) for edit in _dropped(inner, r"semaphore_.*"))
        of_credits = sorted(
            (edit for (edit,) in dropped if "credit" in ast.unparse(edit[0])),
            key=lambda edit: edit[0].lineno,
        )
        if of_credits:
            yield tuple(of_credits)


def _drop_barrier(node: ast.AST) -> Iterator[Edits]:
    yield from _dropped(node, r"_?barrier_.*")


def _swap_semaphores(node: ast.AST) -> Iterator[Edits]:
    """The semaphore of what has left is that of what has come, and the other way round."""
    if _called(node) in ("remote_copy", "make_async_remote_copy") and len(node.args) > 3:
        _, _, send, receive = node.args[:4]
        yield (send, ast.unparse(receive)), (receive, ast.unparse(send))


def _share_semaphore(node: ast.AST) -> Iterator[Edits]:
    """Steps, slots or parts that have a semaphore each share the first."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "at"
        and re.search(r"sems?$", ast.unparse(node.value.value))
    ):
        last = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) else node.slice
        if not isinstance(last, ast.Constant):
            yield ((last, "0"),)


def _one_step_less(node: ast.AST) -> Iterator[Edits]:
    """The last turn of a loop, or the last of several waits, does not happen."""
    if _called(node) in ("fori_loop", "for_each") and len(node.args) >= 3:
        yield ((node.args[1], f"({ast.unparse(node.args[1])}) - 1"),)
    for keyword in getattr(node, "keywords", ()):
        if keyword.arg == "times":
            yield ((keyword.value, f"({ast.unparse(keyword.value)}) - 1"),)


def _wrong_neighbour(node: ast.AST) -> Iterator[Edits]:
    """What is meant for one side goes to the other."""
    if _called(node) == "peer" and len(node.args) == 1:
        yield ((node.args[0], f"-({ast.unparse(node.args[0])})"),)


def _wrong_step(node: ast.AST) -> Iterator[Edits]:
    """The block, slot or semaphore of the step after."""
    if _called(node) in ("wrap_step", "_place", "place", "slot", "_slot") and node.args:
        yield ((node.args[0], f"({ast.unparse(node.args[0])}) + 1"),)


FAULTS: dict[str, Callable[[ast.AST], Iterator[Edits]]] = {
    "drop-wait": _drop_wait,
    "drop-credits": _drop_credits,
    "drop-barrier": _drop_barrier,
    "swap-semaphores": _swap_semaphores,
    "share-semaphore": _share_semaphore,
    "one-step-less": _one_step_less,
    "wrong-neighbour": _wrong_neighbour,
    "wrong-step": _wrong_step,
}


# Mutants that are the same program by another name, and why.
_EITHER_ORDER = "each side gets a signal, in either order"
EQUIVALENT = {
    "wrong-neighbour:ragged_all_to_all:_ring_kernel": _EITHER_ORDER,
    "swap-semaphores:machinery.sync:push_to_everyone.push": (
        "as many leave as come; both are waited for last"
    ),
    "share-semaphore:pipelines:gather_and_consume.own_copy": (
        "own chunks are copied one at a time, or all waited for last"
    ),
    "wrong-step:streams:ring_number": "of a core's two rings each is named as the other",
    "wrong-step:reduce_scatter:add_on_the_way.wait_sent": (
        "a wait takes a slot's size alone, and all slots are as large"
    ),
}


def mutants_of(path: Path, source: str) -> Iterator[Mutant]:
    """Every mutant of a file."""
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))

    def place(line: int, column: int) -> int:  # columns are counted in bytes
        text = source[starts[line - 1] :].partition("\n")[0]
        return starts[line - 1] + len(text.encode()[:column].decode())

    def edit(node: ast.AST, new: str) -> tuple[int, int, str]:
        start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        return place(*start), place(*end), new

    def visit(node: ast.AST, inside: tuple[str, ...]) -> Iterator[Mutant]:
        node.within = ".".join(inside)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = (*inside, node.name)
        for fault, edits_of in FAULTS.items():
            for edits in edits_of(node):
                changes = tuple(edit(old, new) for old, new in edits)
                yield Mutant(fault, path, ".".join(inside), edits[0][0].lineno, changes)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), ())


def _sources(root: Path) -> list[Path]:
    """The files that are broken, from the root of the tree."""
    kernels = (path for path in (root / PACKAGE / "kernels").rglob("*.py") if path.stem[0] != "_")
    found = [*kernels, root / PACKAGE / "topology" / "groups.py"]
    return sorted(path.relative_to(root) for path in found)


def module_of(path: Path) -> str:
    """A file's module, within `kernels` where it is of that: "torus.all_gather"."""
    return ".".join(path.with_suffix("").parts).removeprefix("pallas_collectives.kernels.")


def every_mutant(root: Path = ROOT) -> list[Mutant]:
    """Every mutant of every kernel, in the order of the files, but for what is `EQUIVALENT`."""
    found = (m for path in _sources(root) for m in mutants_of(path, (root / path).read_text()))
    return [m for m in found if str(m).rpartition(":")[0] not in EQUIVALENT]


def sample(mutants: list[Mutant], count: int) -> list[Mutant]:
    """So many of them: of each fault in turn, from a file that has given least so far."""
    chosen: list[Mutant] = []
    taken: dict[Path, int] = {}
    left = {fault: [m for m in mutants if m.fault == fault] for fault in FAULTS}
    while len(chosen) < min(count, len(mutants)):
        for of_fault in left.values():
            if of_fault and len(chosen) < count:
                mutant = min(of_fault, key=lambda m: taken.get(m.path, 0))
                taken[mutant.path] = taken.get(mutant.path, 0) + 1
                of_fault.remove(mutant)
                chosen.append(mutant)
    return chosen


@functools.cache
def _importers(root: Path) -> dict[str, frozenset[str]]:
    """For each file, by its module: itself and all that import it, at any distance."""
    named = {module_of(path): _imports(root / path) for path in _sources(root)}
    reached = {module: {module} for module in named}
    for _ in named:
        for found in reached.values():
            found |= {other for other, imported in named.items() if imported & found}
    return {module: frozenset(found) for module, found in reached.items()}


def _imports(path: Path) -> set[str]:
    """The modules, as `module_of` has them, that a file may import: also names within modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name.removeprefix("pallas_collectives.kernels.") for name in found}


def arguments_of(mutant: Mutant, root: Path, tier: str) -> list[str]:
    """What pytest is to run: the file's own tests, rows of conformance, then the tests that import
    the file, or a kernel that does; if there are no such tests, all.
    """
    module = module_of(mutant.path)
    importers = _importers(root)[module] - {module}
    tests = {path: _imports(path) for path in root.glob("tests/**/test_*.py")}
    near = sorted(path for path, names in tests.items() if module in names)
    far = sorted(path for path, names in tests.items() if importers & names)
    conformance = [path for path in tests if path.stem == "test_conformance"]
    own = [path for path in near if path.stem == f"test_{module.replace('torus.', 'torus_')}"]
    chosen = (*own, *conformance, *near, *far) if near or far else tests
    files = dict.fromkeys(map(str, chosen))
    rows = " or ".join(sorted({name.rpartition(".")[2] for name in (module, *importers)}))
    return [
        *("-x", "-q", "-p", "no:cacheprovider", "-m", tier),
        *(f"--timeout={SECONDS_A_TEST}", "--timeout-method=thread"),
        *("-k", f"not test_conformance or {rows}"),
        *files,
    ]


def caught_by(mutant: Mutant, root: Path, tier: str) -> str:
    """The test of the tier that fails on the tree at `root`; "" if every one passes.

    Raises:
      RuntimeError: pytest itself was at a loss, or had no test to run.
    """
    command = [sys.executable, "-m", "pytest", *arguments_of(mutant, root, tier)]
    environment = os.environ | {"PYTHONPATH": str(root)}  # for processes that tests start, too
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_A_TIER,
        )
    except subprocess.TimeoutExpired:
        return f"a hang of {SECONDS_A_TIER} s"
    if done.returncode >= 3:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    if not done.returncode:
        return ""
    if found := re.search(r"^(?:FAILED|ERROR) (\S+::.*)", done.stdout, re.MULTILINE):
        return found[1][:160]
    hung = re.search(r"/(test_\w+.py)\", line \d+, in (test_\w+)", done.stdout + done.stderr)
    where = " in {}::{}".format(*hung.groups()) if hung else ""
    return f"a hang, or an end with status {done.returncode}{where}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="*", help="break those whose name holds one of these")
    parser.add_argument("--list", action="store_true", help="print them, and break nothing")
    parser.add_argument("--sample", type=int, default=0, help="break so many, of all kinds")
    parser.add_argument(
        "--tier", choices=TIERS, action="append", help="run the tests of this alone"
    )
    asked = parser.parse_args(arguments)
    mutants = every_mutant()
    if asked.name:
        mutants = [m for m in mutants if any(name in str(m) for name in asked.name)]
    if asked.sample:
        mutants = sample(mutants, asked.sample)
    if asked.list:
        print(*(f"{m}  {m.change((ROOT / m.path).read_text())}" for m in mutants), sep="\n")
        return 0
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "tree")
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__"))
        for mutant in mutants:
            source = (root / mutant.path).read_text()
            (root / mutant.path).write_text(mutant.applied(source))
            found = ((tier, caught_by(mutant, root, tier)) for tier in asked.tier or TIERS)
            tier, test = next((f for f in found if f[1]), ("survives", ""))
            (root / mutant.path).write_text(source)
            survivors += tier == "survives"
            print(mutant, mutant.change(source), tier, test, sep="\t", flush=True)
    print(f"{len(mutants)} mutants, {survivors} of them survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
