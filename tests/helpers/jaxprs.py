"""What is in a traced program."""

import collections
from typing import Any

import jax
from jax.extend import core


def primitives_in(program: Any) -> collections.Counter[str]:
    """How often each primitive occurs in a jaxpr and in those within it."""
    found: collections.Counter[str] = collections.Counter()
    if isinstance(program, core.Jaxpr | core.ClosedJaxpr):
        for eqn in program.eqns:
            found[eqn.primitive.name] += 1
            for leaf in jax.tree.leaves(eqn.params):
                found += primitives_in(leaf)
    return found
