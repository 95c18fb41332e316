"""How long a product and its collective take on the devices there are, in one and apart.

    fused        the product with its collective, by algorithm="fused"
    apart        one after the other in one program, by algorithm="unfused"
    product      the product alone, of all devices' rows
    collective   the gather alone, or the scatter alone of a product's result

Each is timed by itself, as a chain of calls in one program. They take turns, so that a device that
slows down as it grows warm slows all of them. The difference of two is no time of a third: `apart`
less `product` was 57 µs on two H200 for a gather that NVLink cannot carry in less than 75. Nor is a
time that of a day: H200s lower their clock under products of milliseconds (344 to 410 µs seen for
one of 4096 x 4096 x 8192), so only times of one run are to be compared.

--values=ones shows the same at full clocks, for multiplying ones takes less power than multiplying
random numbers: on two H100 that product of ones took 341 us, and of random numbers 379.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_collectives
from benchmarks import devices, timing
from benchmarks.cases import Case, named
from pallas_collectives.backends.pallas.products import GATHER

VALUES = flags.DEFINE_enum(
    "values", "normal", ["normal", "ones"], "What is multiplied on devices; ones take less power."
)

AXIS = "x"
Call = Callable[[jax.Array, jax.Array], jax.Array]
Shape = tuple[int, int, int]  # rows of one device's block, K, N


def seconds(mesh: Mesh, op: str, shape: Shape, iters: int, values: str) -> dict[str, float]:
    """The median time of one call of each form, in a chain of `iters` more than another's.

    `values`: one of those of --values.
    """
    operand = functools.partial(_operand, mesh, values)
    clocks = {}
    for form, (call, left) in forms(op, shape, mesh.size).items():
        x, w = operand(left, 1.0), operand(shape[1:], shape[1] ** -0.5)
        programs = [chain(call, mesh, 1 + more) for more in (1, 1 + iters)]
        clocks[form] = [functools.partial(timing.clocked, p, x, w) for p in programs]

    def turn() -> dict[str, float]:
        return {form: timing.difference(few, many, iters) for form, (few, many) in clocks.items()}

    turn()  # compiles, and connects peers
    turns = [turn() for _ in range(timing.SAMPLES)]
    return {form: timing.median([t[form] for t in turns]) for form in clocks}


def forms(op: str, shape: Shape, n: int) -> dict[str, tuple[Call, tuple[int, int]]]:
    """What is timed for a product of n devices, by name: (x, w) -> result, and the shape of x."""
    rows, depth, _ = shape
    whole = getattr(pallas_collectives, op)
    case, operand = collective_of(op, shape, n)
    x = (operand[0], depth)

    def collective(x: jax.Array, _: jax.Array) -> jax.Array:
        return case.call(pallas_collectives, x, AXIS)

    return {
        "fused": (functools.partial(whole, axis_name=AXIS, algorithm="fused"), x),
        "apart": (functools.partial(whole, axis_name=AXIS, algorithm="unfused"), x),
        "product": (jnp.matmul, (n * rows, depth)),
        "collective": (collective, operand),
    }


def collective_of(op: str, shape: Shape, n: int) -> tuple[Case, tuple[int, int]]:
    """The collective of a product of n devices, and the shape of its operand."""
    rows, depth, columns = shape
    gather, scatter = named("all_gather", "psum_scatter")
    return (gather, (rows, depth)) if op == GATHER else (scatter, (n * rows, columns))


def chain(call: Call, mesh: Mesh, length: int) -> Callable[..., Any]:
    """A program of `length` calls (2 or more), each after the one before.

    A call waits for one element of the last result, which it finds in its own operand. That all of
    the result is computed is seen to by the loop, which carries it, and by the program, which
    returns it: neither takes a pass.
    """

    def link(_: object, state: tuple[jax.Array, jax.Array], w: jax.Array) -> Any:
        x, y = state
        x = lax.dynamic_update_slice(x, y[:1, :1].astype(x.dtype), (0, 0))
        return lax.optimization_barrier((x, call(x, w)))

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = x[0], w[0]
        unroll = min(length - 1, timing.IN_A_ROW) if devices.kind() == "gpu" else 1
        first = (x, call(x, w))
        step = functools.partial(link, w=w)
        return lax.fori_loop(1, length, step, first, unroll=unroll)[1][None]

    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def _operand(mesh: Mesh, values: str, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Random numbers on every device, or ones."""
    whole = (mesh.size, *shape)

    def draw() -> jax.Array:
        if values == "ones":
            return jnp.ones(whole, jnp.bfloat16)
        return jax.random.normal(jax.random.key(0), whole, jnp.bfloat16) * scale

    return jax.jit(draw, out_shardings=NamedSharding(mesh, PartitionSpec(AXIS)))()
