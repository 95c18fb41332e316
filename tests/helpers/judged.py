"""What a judged kernel is: a body, and what is to be found in it on any schedule.

Each body takes one block of rows and the number of devices on the axis x. `finds` are the kinds of
findings: empty for a sound kernel. On up to four devices all schedules are searched, too.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and its verdict.

    Attributes:
      name: of the kernel, and of its fault.
      body: (x, n) -> what one device returns.
      finds: kinds of findings; empty for a sound kernel.
      devices: on how many it is judged.
      machine: the generation.
    """

    name: str
    body: Callable[..., Any]
    finds: frozenset[str]
    devices: tuple[int, ...] = (2, 3, 4)
    machine: str = "v5p"


CASES: list[Case] = []


def case(name: str, body: Any, *finds: str, devices: Any = (2, 3, 4), **fields: Any) -> None:
    CASES.append(Case(name, body, frozenset(finds), devices, **fields))


def cases() -> list[Case]:
    """All that are judged."""
    for name in ("rings", "kernels", "features", "scopes", "cores", "public"):
        importlib.import_module(f"judged_{name}")
    return CASES


def hop(src: Any, dst: Any, send: Any, recv: Any, to: Any) -> Any:
    return pltpu.make_async_remote_copy(src, dst, send, recv, device_id={"x": to})


def launch(kernel: Any, x: Any, *scratch: Any, out: Any = None, number: int = 0, **how: Any) -> Any:
    """A kernel of one operand and one result in HBM."""
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(out or x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=list(scratch),
        compiler_params=pltpu.CompilerParams(collective_id=number, has_side_effects=True),
        **how,
    )(x)


def everyone(n: int) -> list[Any]:
    me = lax.axis_index("x")
    return [lax.rem(me + i, n) for i in range(1, n)]
