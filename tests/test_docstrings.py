"""Public names are documented, and the examples in their docstrings run."""

import contextlib
import doctest
import functools
import inspect
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nccl_host
import pallas_collectives as pc
from pallas_collectives import catalogue
from pallas_collectives.backends import ordered
from pallas_collectives.nccl import group, runtime

# Modules whose functions are public, and a method that users begin with.
MODULES = ("sharded", "moe", "verify", "replay", "multihost", "nccl")
METHODS = ("replay.Machine.named",)
# By lax here, with the same results; what lax has not on a CPU is simulated.
BY_LAX = ("sharded", "moe")
SIMULATED = ("sharded.ragged_all_to_all", "sharded.pbroadcast")


def functions_of(module: str) -> list[str]:
    of = getattr(pc, module)
    names = dir(of) if module == "verify" else vars(of)  # imported when it is asked for
    found = [name for name in names if not name.startswith("_")]
    return [
        f"{module}.{name}"
        for name in sorted(found)
        if inspect.isfunction(getattr(of, name)) and _is_ours(getattr(of, name), of)
    ]


def _is_ours(function: Any, module: Any) -> bool:
    return function.__module__.startswith(module.__name__)


NAMES = [
    *(name for name in pc.PUBLIC if not inspect.ismodule(getattr(pc, name))),
    *itertools.chain.from_iterable(map(functions_of, MODULES)),
    *METHODS,
]


@pytest.mark.parametrize("name", NAMES)
def test_each_has_an_example_that_prints_what_it_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones: `jax.vmap` stands for the mesh, or lax serves. Kernels are tested elsewhere.

    NCCL's run over a wire of host memory; those that are skipped say what they need.
    """
    if name.startswith("nccl."):
        nccl_host.serve(monkeypatch)
        on_host = group._options["runtime"]
        monkeypatch.setattr(runtime.Runtime, "of_this_process", lambda: on_host)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    known = {"jax": jax, "jnp": jnp, "np": np, "pc": pc, "mesh": mesh}
    of = functools.reduce(getattr, name.split("."), pc)
    found = doctest.DocTestFinder(recurse=False).find(of, name, globs=known)
    examples = list(itertools.chain.from_iterable(each.examples for each in found))
    assert examples, "it shows nothing that runs"
    skips = any(example.options.get(doctest.SKIP) for example in examples)
    assert not skips or "which needs " in inspect.getdoc(of), "it does not say why it is skipped"
    by_lax = name.split(".")[0] in BY_LAX and name not in SIMULATED
    how = pc.use_backend("xla") if by_lax else contextlib.nullcontext()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for each in found:
        said: list[str] = []
        with how:
            assert not runner.run(each, out=said.append).failed, "".join(said)


def test_functions_of_modules_are_among_them() -> None:
    assert {"sharded.psum", "moe.dispatch", "verify.check", "replay.replay"} <= set(NAMES)
    assert {"multihost.assert_equal", "nccl.send_or_recv"} <= set(NAMES)
    assert len(NAMES) > 85


@pytest.mark.parametrize("name", ["psum", "psum_scatter", "all_gather", "all_to_all", "ppermute"])
def test_help_says_arguments_results_errors_and_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(pc, name)) or ""
    assert all(part in text for part in ("Args:", "Returns:", "Raises:", ">>> ", "jax.lax"))
    entries = re.findall(r"^  ([\w, ]+): ", text.partition("Args:")[2], re.M)
    explained = {parameter for entry in entries for parameter in entry.split(", ")}
    assert set(inspect.signature(getattr(pc, name)).parameters) <= explained


def _algorithms_in(docstring: str) -> set[str]:
    """The names in quotes in the paragraph on `algorithm`, if there is one."""
    found = re.search(r"^ +algorithm: (.*?)\n\n", inspect.cleandoc(docstring) + "\n\n", re.M | re.S)
    return set(re.findall(r'"(\w+)"', found[1])) if found else set()


@pytest.mark.parametrize("op", catalogue.COLLECTIVES)
def test_docstrings_name_the_algorithms_that_there_are(op: str) -> None:
    """At least one function of each collective does; others refer to it."""
    record = catalogue.COLLECTIVES[op]
    told = {name: _algorithms_in(getattr(pc, name).__doc__) for name in record.functions}
    known = {*catalogue.ALGORITHMS[op], *([ordered.EXCHANGE.name] if op == "all_reduce" else [])}
    assert any(told.values())
    assert [name for name, names in told.items() if names not in (set(), known)] == []
