"""Equations that a replay computes on the host have JAX's results, and compile nothing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pallas_collectives as pc
from pallas_collectives import catalogue
from pallas_collectives.replay import Machine, known, replay, values
from pallas_collectives.replay.values import Known

LANES = 5
X, Y = np.arange(-6, 6, dtype=np.int32).reshape(3, 4), np.full((3, 4), 2, np.int32)
EDGES = np.array([-(2**31), -7, -1, 0, 1, 7, 2**31 - 1], np.int32)
DIVIDENDS, DIVISORS = (x.reshape(-1) for x in np.meshgrid(EDGES, EDGES))
PROGRAMS: dict[str, tuple[Callable[..., Any], Any]] = {
    **{
        f.__name__: (f, (X, Y))
        for f in (
            lax.max,
            lax.min,
            lax.add,
            lax.sub,
            lax.mul,
            lax.rem,
            lax.eq,
            lax.ne,
            lax.lt,
            lax.le,
        )
    },
    **{f.__name__: (f, (X, Y)) for f in (lax.gt, lax.ge, lax.bitwise_and, lax.bitwise_or)},
    "div": (lax.div, (X, Y)),
    "div of edges": (lax.div, (DIVIDENDS, DIVISORS)),
    "rem of edges": (lax.rem, (DIVIDENDS, DIVISORS)),
    "div of unsigned": (lax.div, (DIVIDENDS.astype(np.uint32), DIVISORS.astype(np.uint32))),
    "div of bfloat16": (lax.div, (X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16))),
    "overflow": (lax.mul, (X.astype(np.float32) * 5e37, Y.astype(np.float32))),
    "not": (lax.bitwise_not, (X,)),
    "clamp": (lax.clamp, (np.int32(-1), X, np.int32(2))),
    "shift": (lambda x, y: lax.shift_right_logical(x, y), (X, Y)),
    "wraps": (lax.mul, (X * (1 << 29), X)),
    "floats": (lax.max, (X.astype(np.float32), np.where(X == 2, np.nan, Y).astype(np.float32))),
    "reduce_max": (lambda x: lax.reduce_max_p.bind(x, axes=(1,), out_sharding=None), (X,)),
    "largest": (jnp.max, (X,)),
    "least": (lambda x: jnp.min(x, axis=0), (X,)),
    "of nothing": (lambda x: lax.reduce_max_p.bind(x, axes=(1,), out_sharding=None), (X[:, :0],)),
    "by none": (lambda x, y: lax.select_n(y == 0, lax.div(x, y), x), (np.int32(-7), np.int32(0))),
    "select_n": (lambda x, y: lax.select_n(x > y, x, y), (X, Y)),
    "of three": (lambda i, x, y: lax.select_n(lax.rem(i, 3), x, y, x + y), (np.abs(X), X, Y)),
    "by a scalar": (lambda i, x, y: lax.select_n(i > 0, x, y), (np.int32(1), X, Y)),
    "iota": (lambda x: lax.broadcasted_iota(jnp.int32, (2, 3, 4), 1)[0] + x, (X,)),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (3, 2, 4), (0, 2)), (X,)),
    "of a scalar": (lambda x: lax.broadcast_in_dim(x, (2, 2), ()), (np.int32(7),)),
    "reshape": (lambda x: x.reshape(2, 6), (X,)),
    "squeeze": (lambda x: lax.squeeze(x[:1], (0,)), (X,)),
    "slice": (lambda x: x[1:3, ::2], (X,)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, i - 2), (2, 3)), (X, np.int32(2))),
    "clamped": (lambda x, i: lax.dynamic_slice(x, (i, i), (2, 3)), (X, np.int32(9))),
    "stack": (lambda x, y: jnp.stack([x, y], 1), (X, Y)),
    "unstack": (lambda x: jnp.unstack(x, axis=1)[2], (X,)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), (X, Y)),
    "by JAX": (lambda x: jnp.cumsum(x, 0), (X,)),
}


def stepped(function: Callable[..., Any], operands: Any, varies: tuple[bool, ...]) -> Any:
    """The result by `known`, equation for equation, of operands that differ by their lane."""
    jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
    values: dict[Any, Any] = {}
    for var, x, v in zip(jaxpr.invars, operands, varies, strict=True):
        x = np.stack([x + lane for lane in range(LANES)]).astype(x.dtype) if v else x
        scalar = x if v else x.item() if not x.ndim else None
        values[var] = Known(x, v) if x.ndim > v else scalar

    def run(jaxpr: Any, args: list[Any]) -> list[Any]:
        env = dict(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            given = [np.asarray(a.val).item() if hasattr(a, "val") else env[a] for a in eqn.invars]
            inner = eqn.params.get("jaxpr")
            out = run(inner.jaxpr, given) if inner is not None else known.evaluate(eqn, given)
            env |= zip(eqn.outvars, out, strict=True)
        return [env[v] for v in jaxpr.outvars]

    (out,) = run(jaxpr, [values[v] for v in jaxpr.invars])
    return out.values if isinstance(out, Known) else np.asarray(out)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("which", ["none", "first", "all"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_jax(name: str, which: str) -> None:
    function, operands = PROGRAMS[name]
    varies = tuple(which == "all" or (which == "first" and k == 0) for k in range(len(operands)))
    got = stepped(function, operands, varies)
    if which == "none":
        want = np.asarray(function(*operands))
    else:
        each = (
            [(x + lane).astype(x.dtype) if v else x for x, v in zip(operands, varies, strict=True)]
            for lane in range(LANES)
        )
        want = np.stack([np.asarray(function(*xs)) for xs in each])
    assert got.dtype == want.dtype or not want.ndim
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("function", [lax.div, lax.rem])
@pytest.mark.parametrize("a, b", [(-7, 2), (7, 0), (-7, 0), (2.5, 0.0), (-1.0, 0.5)])
def test_numbers_that_are_the_same_on_all_devices(function: Any, a: Any, b: Any) -> None:
    dtype = np.dtype(np.int32 if isinstance(a, int) else np.float32)
    got = values.settle(values.SCALAR[function.__name__](a, b), dtype)
    np.testing.assert_array_equal(got, function(dtype.type(a), dtype.type(b)))


@pytest.mark.parametrize("op", ["ragged_all_to_all", "all_gather"])
def test_tables_of_a_kernel_compile_nothing(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(eqn: Any, *_: Any) -> Any:
        raise AssertionError(f"JAX compiles {eqn.primitive}")

    monkeypatch.setattr(known, "_by_jax", refuse)
    machine, example = Machine.named("v5e:4x4"), catalogue.COLLECTIVES[op].example

    def call(x: jax.Array) -> Any:
        return example.call(pc, x, ("x", "y"), backend="pallas", algorithm="torus")

    mesh = machine.mesh({"x": 4, "y": 4})
    program = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    operand = jax.ShapeDtypeStruct(example.operand(16, 64), "float32")
    assert replay(program, operand, machine=machine, races=True).ok
