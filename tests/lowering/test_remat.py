"""What jax.checkpoint saves and computes again: the same by lax, simulated and on TPUs."""

import collections
import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from jaxprs import primitives_in

DEVICES = 2
ROWS = 16
X = jax.ShapeDtypeStruct((DEVICES * ROWS, 128), jnp.float32)
ARGUMENT = "f32[32,128]"
Body = Callable[[Any, jax.Array], jax.Array]


def gathers(m: Any, x: jax.Array) -> jax.Array:
    a = checkpoint_name(m.all_gather(x, "x", tiled=True), "gathered")
    b = m.all_gather(jnp.sin(x), "x", tiled=True)
    return jnp.tanh(a) * jnp.cos(b)


def sums(m: Any, x: jax.Array) -> jax.Array:
    total = checkpoint_name(m.psum(jnp.sin(x), "x"), "sum")
    part = m.psum_scatter(jnp.tanh(x), "x", tiled=True)
    return jnp.cos(total) * jnp.sum(jnp.sin(part))


def trees(m: Any, x: jax.Array) -> jax.Array:
    a, b = m.psum((jnp.sin(x), x * x), "x")
    return jnp.sin(checkpoint_name(a, "a")) * jnp.cos(b)


def moves(m: Any, x: jax.Array) -> jax.Array:
    there = m.all_to_all(jnp.sin(x), "x", 0, 0, tiled=True)
    on = m.ppermute(jnp.cos(there), "x", [(i, (i + 1) % DEVICES) for i in range(DEVICES)])
    return jnp.sin(on) * there


def nested(m: Any, x: jax.Array) -> jax.Array:
    inner = jax.checkpoint(functools.partial(gathers, m))
    return jnp.sin(inner(jnp.sin(inner(x)[:ROWS])))


def scanned(m: Any, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def layer(h: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        w = checkpoint_name(m.all_gather(h * scale, "x", tiled=True), "gathered")
        return jnp.tanh(jnp.sin(w)[:ROWS] * h), None

    return lax.scan(layer, x, jnp.arange(1.0, 4.0))[0]


BODIES: tuple[Body, ...] = (gathers, sums, trees, moves, nested, scanned)
POLICIES: dict[str, Any] = {
    "none": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("gathered", "sum", "a"),
}


def rematerialised(body: Body, m: Any, on: Mesh, policy: Any, inside: bool) -> Callable[..., Any]:
    """The loss of a shard_map that is rematerialised as a whole, or whose body is."""
    fn: Any = functools.partial(body, m)
    options: Any = {"mesh": on, "in_specs": P("x"), "out_specs": P("x")}
    if inside:
        mapped = jax.shard_map(jax.checkpoint(fn, policy=policy), **options)
    else:
        mapped = jax.checkpoint(jax.shard_map(fn, **options), policy=policy)
    return lambda x: jnp.sum(mapped(x))


def saved(fn: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """Types of the residuals."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print_saved_residuals(fn, *args)
    return collections.Counter(line.split(" ")[0] for line in text.getvalue().splitlines())


def collectives(fn: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """How often each collective occurs in a program; a sum of two as two."""
    found = primitives_in(jax.make_jaxpr(fn)(*args))
    kinds = ("all_gather", "reduce_scatter", "psum", "all_to_all", "ppermute")
    counted: collections.Counter[str] = collections.Counter()
    for name, count in found.items():
        for kind in kinds:
            if name.removeprefix("pallas_").removesuffix("_invariant") == kind:
                counted[kind] += count
    return counted


@functools.cache
def tpu() -> Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    return Mesh(np.array(devices[:DEVICES]), ("x",))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_residuals_and_kernels_are_the_same_by_lax_simulated_and_on_tpus(
    body: Body, policy: str, inside: bool
) -> None:
    programs = [
        rematerialised(body, m, on, POLICIES[policy], inside)
        for m, on in ((lax, harness.mesh(DEVICES)), (pc, harness.mesh(DEVICES)), (pc, tpu()))
    ]
    by_lax, simulated, on_tpus = (saved(program, X) for program in programs)
    assert by_lax == simulated == on_tpus
    if policy in ("none", "nothing", "dots"):
        assert simulated == {ARGUMENT: 1}  # the argument alone
    lax_binds, simulated_binds, tpu_binds = (
        collectives(jax.grad(program), X) for program in programs
    )
    assert simulated_binds == tpu_binds
    if body is not trees:  # our one for both sums
        assert simulated_binds == lax_binds


def fused(x: jax.Array, w: jax.Array) -> jax.Array:
    (y,), gathered = pc.all_gather_matmul(
        jnp.sin(x), [w], "x", algorithm="fused", return_gathered=True
    )
    z = pc.matmul_reduce_scatter(jnp.tanh(y), w, "x", algorithm="fused")
    return jnp.sin(z) * jnp.sum(gathered)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fused_products_residuals_are_the_same_simulated_and_on_tpus(policy: str) -> None:
    w = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    found = []
    for on in (harness.mesh(DEVICES), tpu()):
        mapped = jax.shard_map(fused, mesh=on, in_specs=(P("x"), P()), out_specs=P("x"))
        whole = jax.checkpoint(mapped, policy=POLICIES[policy])
        found.append(saved(lambda x, w, whole=whole: jnp.sum(whole(x, w)), X, w))
    simulated, on_tpus = found
    assert simulated == on_tpus
    if policy in ("none", "nothing"):
        assert simulated == {ARGUMENT: 1, "f32[128,128]": 1}


@pytest.mark.parametrize("body", BODIES)
def test_gradients_of_what_is_computed_again_are_laxs(body: Body) -> None:
    on, policy = harness.mesh(DEVICES), POLICIES["names"]
    x = harness.random(X.shape, "float32")
    ours, by_lax = (
        jax.jit(jax.value_and_grad(rematerialised(body, m, on, policy, inside=False)))(x)
        for m in (pc, lax)
    )
    for got, want in zip(ours, by_lax, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_a_simulated_collective_that_nobody_reads_is_dropped_as_laxs_is() -> None:
    """From what jax.checkpoint leaves for the backward pass."""

    def unread(m: Any, x: jax.Array) -> jax.Array:
        return m.all_gather(jnp.sin(x), "x", tiled=True) + m.psum(x, "x")[:1]

    programs = [
        jax.grad(rematerialised(unread, m, harness.mesh(DEVICES), None, False)) for m in (lax, pc)
    ]
    by_lax, ours = (collectives(program, X) for program in programs)
    assert by_lax == ours
