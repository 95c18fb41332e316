"""Imports point down, from what users touch to the ground, and close no circles.

A layer is a row of `LAYERS`. A module may import from its own row and from rows below it. Imports
inside functions, under TYPE_CHECKING and by `importlib.import_module` count like any other.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import pallas_collectives

ROOT = Path(pallas_collectives.__file__).parent
PACKAGE = "pallas_collectives"

# From the top; a folder stands for all its modules but those of a folder that is named itself.
LAYERS = (
    (PACKAGE, "__main__", "replay", "verify"),
    ("explanation", "multihost", "override", "sharded"),
    ("moe", "overlap"),
    ("collectives", "lowering"),
    ("backends",),
    ("nccl", "tuning"),
    ("catalogue",),
    ("kernels",),
    ("kernels.machinery", "topology"),
    (
        "_compat",
        "annotations",
        "errors",
        "examples",
        "laying",
        "noise",
        "simulation",
        "tiles",
        "validation",
        "wires",
    ),
)

# Imports inside functions count too.
MODULES_IN_A_CHAIN = 27
FOLDERS_IN_A_CHAIN = 10

Graph = dict[str, set[str]]


def sources() -> dict[str, str]:
    """The package's modules, by their names within it."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(parts) or PACKAGE] = path.read_text()
    return found


def graph_of(texts: dict[str, str]) -> Graph:
    """What each module imports of the others, anywhere in it."""
    return {
        name: {m for node in _imports(text) for m in _imported(node, texts)} - {name}
        for name, text in texts.items()
    }


@functools.cache
def _imports(text: str) -> list[ast.AST]:
    kinds = ast.Import, ast.ImportFrom, ast.Call
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def _imported(node: ast.AST, known: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            whole, module = (_within(f"{node.module}.{alias.name}"), _within(node.module))
            yield from [m for m in (whole, module) if m in known][:1]
    elif isinstance(node, ast.Import):
        yield from (m for alias in node.names if (m := _within(alias.name)) in known)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        # A name that is put together while running may be any that begins so.
        constants = [n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)]
        first = constants[0] if constants else ""  # a module that the caller names
        start = _within(str(first))
        yield from (m for m in known if start != str(first) and m.startswith(start))


def _within(name: str) -> str:
    return name if name == PACKAGE else name.removeprefix(f"{PACKAGE}.")


def circles(graph: Graph) -> list[list[str]]:
    """Chains of imports that end where they begin; one for each module that closes one."""
    done: set[str] = set()
    found: list[list[str]] = []

    def visit(name: str, chain: list[str]) -> None:
        if name in chain:
            found.append([*chain[chain.index(name) :], name])
        elif name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, [*chain, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return found


def folder(name: str) -> str:
    """The entry of `LAYERS` that a module belongs to; "" if none."""
    parts = name.split(".")
    named = {entry for layer in LAYERS for entry in layer}
    return next((e for i in range(len(parts), 0, -1) if (e := ".".join(parts[:i])) in named), "")


def upward(graph: Graph) -> list[tuple[str, str]]:
    """Imports from a layer above."""
    row = {entry: i for i, layer in enumerate(LAYERS) for entry in layer}
    edges = ((name, other) for name, others in graph.items() for other in others)
    return [(a, b) for a, b in edges if row[folder(a)] > row[folder(b)]]


def longest(graph: Graph) -> list[str]:
    """The longest chain of imports, of a graph without circles."""

    @functools.cache
    def chain(name: str) -> tuple[str, ...]:
        return (name, *max(map(chain, graph[name]), key=len, default=()))

    return list(max(map(chain, graph), key=len))


def folders_of(graph: Graph) -> Graph:
    """What the entries of `LAYERS` import of one another."""
    found: Graph = {}
    for name, others in graph.items():
        there = found.setdefault(folder(name), set())
        there |= {folder(other) for other in others} - {folder(name)}
    return found


def test_every_module_is_in_one_layer() -> None:
    modules = sources()
    assert len(modules) > 100
    assert [name for name in modules if not folder(name)] == []
    entries = [entry for layer in LAYERS for entry in layer]
    assert len(entries) == len(set(entries)) == len({folder(name) for name in modules})


def test_imports_point_down_and_close_no_circle() -> None:
    graph = graph_of(sources())
    assert sum(map(len, graph.values())) > 300
    assert upward(graph) == []
    assert circles(graph) == []
    assert circles(folders_of(graph)) == []


def test_chains_of_imports_become_no_longer() -> None:
    """Rows import sideways, so that ten rows are more levels; cut a chain rather than add one."""
    graph = graph_of(sources())
    chain, levels = longest(graph), longest(folders_of(graph))
    assert len(chain) <= MODULES_IN_A_CHAIN, " > ".join(chain)
    assert len(levels) <= FOLDERS_IN_A_CHAIN, " > ".join(levels)


def test_the_longest_chain_is_found() -> None:
    assert longest({"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"c"}}) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "module, text",
    [
        ("kernels.all_gather", "from pallas_collectives.replay.machine import Machine"),
        ("kernels.all_gather", "def f():\n    from pallas_collectives import collectives"),
        ("validation", "if TYPE_CHECKING:\n    from pallas_collectives.backends.plans import How"),
        ("topology.chips", "importlib.import_module(f'pallas_collectives.kernels.{name}')"),
        ("errors", "import pallas_collectives.topology.chips"),
    ],
)
def test_an_import_that_points_up_is_found(module: str, text: str) -> None:
    planted = {**sources(), module: text}
    assert {name for name, _ in upward(graph_of(planted))} == {module}


def test_a_circle_within_a_layer_is_found() -> None:
    planted = {**sources(), "topology.ring_orders": "from pallas_collectives.topology import reach"}
    graph = graph_of(planted)
    assert upward(graph) == []
    assert any("topology.ring_orders" in chain for chain in circles(graph))
