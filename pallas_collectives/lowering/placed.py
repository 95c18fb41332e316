"""Lowerings that need to know where the devices are: a mesh is known only where XLA compiles."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend import core
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from pallas_collectives import _compat
from pallas_collectives.backends import slices
from pallas_collectives.topology import placement


@contextlib.contextmanager
def devices_known(ctx: mlir.LoweringRuleContext) -> Iterator[None]:
    """Within this context it is known where the mesh's devices are, as far as the mesh tells."""
    mesh, platforms = _compat.mesh_of(ctx), ctx.module_context.platforms
    with placement.scope(placement.of_mesh(mesh), platforms), slices.scope(mesh):
        yield


_programs: dict[str, Callable[..., Any]] = {}


def register(
    primitive: core.Primitive, program: Callable[..., Any], *, takes_mesh: bool = False
) -> None:
    """Lowers a primitive to a program, run once it is known where the devices are.

    Args:
      primitive: one result, or several.
      program: (*operands, **parameters) -> results.
      takes_mesh: it takes the devices themselves, too, as `mesh`.
    """

    def lowering(
        ctx: mlir.LoweringRuleContext, *args: ir.Value, **params: Any
    ) -> Sequence[ir.Value]:
        run = functools.partial(program, mesh=_compat.mesh_of(ctx)) if takes_mesh else program
        lowered = mlir.lower_fun(run, multiple_results=primitive.multiple_results)
        with devices_known(ctx):
            return lowered(ctx, *args, **params)

    _programs[primitive.name] = program
    _compat.register(primitive, lowering=lowering)


def program_of(name: str) -> Callable[..., Any]:
    """What a primitive of that name is lowered to: for those who look into programs."""
    return _programs[name]
