"""Every transformation of every collective, against the same transformation of lax's."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

import harness
import pallas_collectives as pc
from against_lax import (
    CANONICAL,
    DERIVED,
    SHAPE,
    UNDIFFERENTIABLE,
    Fn,
    both_raise,
    check,
    compare,
    loss,
)
from jaxprs import primitives_in


def _batch(x: jax.Array, axis: int) -> jax.Array:
    return jnp.stack([x, x * 2, x - 1], axis)


def _scanned(f: Fn) -> Fn:
    def step(carry: jax.Array, scale: jax.Array) -> tuple[jax.Array, Any]:
        y = f(carry * scale)
        return carry + jnp.mean(y), jnp.sum(y)

    return lambda x: lax.scan(step, x, jnp.arange(1.0, 3.0))


def _while(f: Fn) -> Fn:
    def body(state: tuple[int, jax.Array]) -> tuple[int, jax.Array]:
        return state[0] + 1, state[1] + jnp.mean(f(state[1]))

    return lambda x: lax.while_loop(lambda state: state[0] < 2, body, (0, x))[1]


def _linearized(f: Fn) -> Fn:
    def run(x: jax.Array) -> Any:
        y, linear = jax.linearize(f, x)
        return y, linear(x), linear(jnp.cos(x))

    return run


def _grad_of_grad(f: Fn) -> Fn:
    return jax.grad(lambda x: jnp.sum(jax.grad(loss(f))(x) ** 2))


TRANSFORMATIONS: dict[str, Callable[[Fn], Fn]] = {
    "value": lambda f: f,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "grad": lambda f: jax.grad(loss(f)),
    "grad_of_grad": _grad_of_grad,
    "linearize": _linearized,
    "checkpoint": lambda f: jax.grad(jax.checkpoint(loss(f))),
    "vmap_middle": lambda f: lambda x: jax.vmap(f, 1, 0)(_batch(x, 1)),
    "vmap_last": lambda f: lambda x: jax.vmap(f, -1, -1)(_batch(x, -1)),
    "vmap_vmap": lambda f: lambda x: jax.vmap(jax.vmap(f, 1), 0)(_batch(_batch(x, 0), 2)),
    "grad_of_vmap": lambda f: jax.grad(lambda x: loss(jax.vmap(f))(_batch(x, 0))),
    "vmap_of_grad": lambda f: lambda x: jax.vmap(jax.grad(loss(f)))(_batch(x, 0)),
    "grad_of_scan": lambda f: jax.grad(lambda x: jnp.sum(_scanned(f)(x)[0])),
    "while_loop": _while,
    "grad_of_cond": lambda f: jax.grad(
        lambda x: lax.cond(jnp.int32(1) > 0, loss(f), lambda x: loss(f)(2 * x), x)
    ),
}
FEW = ("value", "grad", "vmap_middle")


pytestmark = pytest.mark.usefixtures("fresh_counts")


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("op", CANONICAL)
def test_transformation(op: str, transformation: str) -> None:
    transform = TRANSFORMATIONS[transformation]
    # Nobody reads the sums in the gradient of a sum in a scan: ours are left out, as lax's are.
    unread = (op, transformation) == ("psum", "grad_of_scan")
    check(lambda m, x: transform(functools.partial(CANONICAL[op], m))(x), kernels=not unread)


@pytest.mark.full
@pytest.mark.parametrize("transformation", ["grad_of_grad", "vmap_of_grad"])
@pytest.mark.parametrize("op", CANONICAL)
def test_transformation_without_check_vma(op: str, transformation: str) -> None:
    transform = TRANSFORMATIONS[transformation]
    check(lambda m, x: transform(functools.partial(CANONICAL[op], m))(x), check_vma=False)


@pytest.mark.parametrize("scattered, mapped", [(0, 1), (0, 2), (1, 2)])
def test_an_untiled_psum_scatter_is_mapped_behind_its_dimension(
    scattered: int, mapped: int
) -> None:
    """lax's rule raises IndexError there: what it gives for a first dimension is compared."""

    def mapping(m: Any, x: jax.Array) -> jax.Array:
        ours = m is pc
        return jax.vmap(
            lambda y: m.psum_scatter(y, "x", scatter_dimension=scattered, tiled=False),
            in_axes=mapped if ours else 0,
        )(x if ours else jnp.moveaxis(x, mapped, 0))

    shape = [2, 4]
    shape[scattered] = 2
    shape.insert(mapped, 3)
    check(mapping, harness.random((2, *shape), "float32"))


@pytest.mark.parametrize("transformation", FEW)
@pytest.mark.parametrize("op", DERIVED)
def test_derived(op: str, transformation: str) -> None:
    transform = TRANSFORMATIONS[transformation]
    check(lambda m, x: transform(functools.partial(DERIVED[op], m))(x))


@pytest.mark.parametrize("transformation", ["value", "vmap_last"])
@pytest.mark.parametrize("op", UNDIFFERENTIABLE)
def test_undifferentiable(op: str, transformation: str) -> None:
    transform = TRANSFORMATIONS[transformation]
    check(lambda m, x: transform(functools.partial(UNDIFFERENTIABLE[op], m))(x))


def test_no_tracer_leaks() -> None:
    with jax.checking_leaks():
        check(
            lambda m, x: (m.psum(x, "x"), jax.grad(loss(lambda x: m.ppermute(x, "x", [(0, 1)])))(x))
        )


def test_no_kernel_leaks_but_where_a_kernel_of_two_lines_does() -> None:
    """JAX 0.12's `run_scoped`, of which pipelines are made, leaks what its body closes over."""

    def leaks(fn: Callable[..., Any]) -> bool:
        try:
            with jax.checking_leaks():
                jax.make_jaxpr(fn)(harness.random((2, *SHAPE), "float32"))
        except Exception as error:
            if "Leaked" not in str(error):
                raise
            return True
        return False

    def two_lines(x_ref: Any, o_ref: Any) -> None:
        pl.run_scoped(lambda s: o_ref.set(x_ref[...] + s.shape[0]), pltpu.VMEM(SHAPE, jnp.float32))

    gather = loss(lambda x: pc.all_gather(x, "x", tiled=True))
    ours = leaks(harness.per_device(jax.grad(gather), harness.mesh(2)))
    shape = jax.ShapeDtypeStruct((2, *SHAPE), jnp.float32)
    assert not ours or leaks(lambda x: pl.pallas_call(two_lines, out_shape=shape)(x))


def test_what_lax_cannot_differentiate_ours_cannot_either() -> None:
    on = harness.mesh(2)
    x = harness.random((2, *SHAPE), "float32")

    def run(call: Callable[..., Any], m: Any) -> Any:
        return harness.per_device(jax.grad(loss(functools.partial(call, m))), on)(x)

    for call in UNDIFFERENTIABLE.values():
        both_raise(functools.partial(run, call))


@pytest.mark.parametrize(
    "saves, gathers",
    [
        (jax.checkpoint_policies.nothing_saveable, 2),
        (jax.checkpoint_policies.everything_saveable, 1),
        (jax.checkpoint_policies.save_only_these_names("gathered"), 1),
        (lambda primitive, *_, **__: primitive.name == "pallas_all_gather", 1),
        (lambda primitive, *_, **__: primitive.name == "all_gather", 2),
    ],
    ids=["nothing", "everything", "named", "gathers", "gathers_of_lax"],
)
def test_checkpoint_policies_see_the_collective(saves: Any, gathers: int) -> None:
    def model(m: Any, x: jax.Array) -> jax.Array:
        gathered = checkpoint_name(m.all_gather(x, "x", tiled=True), "gathered")
        return jnp.sum(jnp.sin(jnp.cos(gathered)))

    def grad(model: Fn, on: Mesh) -> Callable[..., Any]:
        return harness.per_device(jax.value_and_grad(model), on)

    ours = jax.checkpoint(functools.partial(model, pc), policy=saves)
    on, x = harness.mesh(2), harness.random((2, *SHAPE), "float32")
    compare(grad(ours, on)(x), grad(functools.partial(model, lax), on)(x))

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    program = jax.make_jaxpr(grad(ours, Mesh(np.array(devices), ("x",))))(np.repeat(x, 2, 0))
    found = primitives_in(program)
    assert (found["pallas_all_gather"], found["pallas_reduce_scatter"]) == (gathers, 1)


@pytest.mark.parametrize("op", CANONICAL)
def test_the_backward_pass_runs_kernels(op: str) -> None:
    """With check_vma on, psum's transpose is a change of type, and all others' a kernel."""
    backward = {  # by the rules of calculus, not by ours
        "all_gather": {"all_gather": 1, "reduce_scatter": 1},
        "psum_scatter": {"reduce_scatter": 1, "all_gather": 1},
        "psum": {"all_reduce": 1},
        "all_to_all": {"all_to_all": 2},
        "ppermute": {"ppermute": 2},
    }
    grad = jax.grad(loss(functools.partial(CANONICAL[op], pc)))
    x = harness.random((2, *SHAPE), "float32")
    harness.per_device(grad, harness.mesh(2))(x).block_until_ready()
    built: dict[str, int] = {}
    for (name, _, _), count in pc.counts().items():
        built[name] = built.get(name, 0) + count
    assert built == backward[op]


def test_what_surrounds_a_kernel_bears_the_collectives_name() -> None:
    """In profiles, and for `benchmarks.steps.packing`, which takes it for the program's else."""

    def exchange(x: jax.Array) -> jax.Array:
        return 2 * pc.all_to_all(x, "x", 1, 0, tiled=True, backend="pallas")

    lowered = harness.per_device(exchange, harness.mesh(2)).lower(np.ones((2, 6, 6), np.float32))
    assert '"all_to_all/transpose"' in lowered.as_text(debug_info=True)
