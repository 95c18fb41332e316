"""Public names are documented, and the examples in their docstrings run."""

import doctest
import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_collectives as pc

# Their examples are shapes: kernel bodies on tiles, exchanges of runtime sizes, classes.
WITHOUT = {
    *("gather_and_consume", "produce_and_scatter", "ragged_all_to_all", "pbroadcast_start"),
    *("ragged_all_to_all_start", "Started", "OverrideReport", "Wire"),
}
NAMES = [name for name in pc.PUBLIC if not inspect.ismodule(getattr(pc, name))]


@pytest.mark.parametrize("name", NAMES)
def test_examples_run_and_print_what_they_say(name: str) -> None:
    """Short ones: `jax.vmap` stands for the mesh. The kernels' values are tested elsewhere."""
    known = {"jax": jax, "jnp": jnp, "np": np, "pc": pc}
    of_name = doctest.DocTestFinder(recurse=False).find(getattr(pc, name), name, globs=known)
    examples = list(itertools.chain.from_iterable(found.examples for found in of_name))
    assert bool(examples) == (name not in WITHOUT)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for found in of_name:
        said: list[str] = []
        assert not runner.run(found, out=said.append).failed, "".join(said)


@pytest.mark.parametrize("name", ["psum", "psum_scatter", "all_gather", "all_to_all", "ppermute"])
def test_help_says_arguments_results_errors_and_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(pc, name)) or ""
    assert all(part in text for part in ("Args:", "Returns:", "Raises:", ">>> ", "jax.lax"))
    entries = re.findall(r"^  ([\w, ]+): ", text.partition("Args:")[2], re.M)
    explained = {parameter for entry in entries for parameter in entry.split(", ")}
    assert set(inspect.signature(getattr(pc, name)).parameters) <= explained
