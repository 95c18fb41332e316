"""Reductions of trees: one primitive of many operands. Small operands travel together."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from against_lax import With, check
from pallas_collectives import replay
from pallas_collectives.errors import WireError
from pallas_collectives.lowering import bundles

pytestmark = pytest.mark.usefixtures("fresh_counts")
SMALL = bundles.SMALL_BYTES // 4


def model(x: jax.Array) -> Any:
    """Leaves of several types and shapes, and one too large to go with others."""
    return {
        "kernel": jnp.tile(x, (bundles.SMALL_BYTES // x.nbytes + 1, 1)),
        "small": [x[:3, 1::2], x[:0], None, x[0, 5]],
        "weak": jnp.where(lax.axis_index("x") > 0, 1.0, 2.0),
        "narrow": (x[0].astype(jnp.bfloat16), x[:, 1].astype(jnp.bfloat16)),
        "integers": (x[1].astype(jnp.int32), x > 0),
        "constant": 4,
    }


@pytest.mark.parametrize("name, check_vma", [("pmean", True), ("pmax", False)])
def test_a_tree_is_reduced_as_lax_reduces_it(name: str, check_vma: bool) -> None:
    check(lambda m, x: getattr(m, name)(model(x), "x"), check_vma=check_vma)
    # The kernel; small ones of float32, bfloat16 and int32; a maximum also of truth values.
    assert sum(pc.counts().values()) == (5 if name == "pmax" else 4), pc.counts()


@pytest.mark.parametrize(
    "shapes, how, kernels",
    [
        ([(7,), (3, 40)] * 10, {}, 2),
        ([(SMALL,)] * (2 * bundles.BUNDLE_BYTES // bundles.SMALL_BYTES + 2), {}, 4),
        ([(SMALL + 1,)] * 4, {}, 4),
        ([(7,)] * 4, {"algorithm": "ring"}, 2),
        ([(7,)] * 4, {"algorithm": "ring:vmem"}, 4),
        ([(7,)] * 4, {"backend": "xla"}, 4),
    ],
    ids=["small", "full", "large", "named", "vmem", "lax"],
)
def test_kernels(shapes: Any, how: Any, kernels: int) -> None:
    """Leaves alternate between float32 and int32."""

    def fn(*xs: jax.Array) -> Any:
        return pc.psum([x.astype(("f4", "i4")[i % 2]) for i, x in enumerate(xs)], "x", **how)

    assert kernels_of(fn, shapes) == kernels, pc.counts()


def kernels_of(fn: Callable[..., Any], shapes: Any) -> int:
    """How many reductions are built into a program."""
    xs = [jax.ShapeDtypeStruct((2, *shape), "float32") for shape in shapes]
    jax.jit(harness.per_device(fn, harness.mesh(2))).lower(*xs)
    return sum(pc.counts().values())


def vmapped(m: Any, x: jax.Array) -> Any:
    """What is not mapped stays so: an out_axes of None takes nothing else."""
    axes = {"mapped": 1, "else": None}
    fn = jax.vmap(lambda a, b: m.psum({"mapped": a, "else": b}, "x"), (0, None), axes)
    return fn(x, x[0])


def vmapped_axis(m: Any, x: jax.Array) -> Any:
    """Over an axis of vmap, which becomes a dimension, and one of the mesh."""
    return jax.vmap(
        lambda a, b: (m.psum((a, a[:3], b), ("x", "v")), m.pmax((a, b), ("v", "x"))),
        (0, None), None, axis_name="v",
    )(x, x[0])  # fmt: skip


def derived(m: Any, x: jax.Array) -> Any:
    """Tangents of some leaves, integers among the others."""
    n = (4 * x).astype(jnp.int32)

    def fn(a: jax.Array, n: jax.Array) -> Any:
        y = m.psum({"a": a, "constant": x[0], "n": n, "b": jnp.sin(a)}, "x")
        return y.pop("n"), y

    tangent = np.zeros(n.shape, jax.dtypes.float0)
    (_, values), (_, tangents) = jax.jvp(fn, (x, n), (jnp.cos(x), tangent))
    grad = jax.grad(lambda a: jnp.sum(jnp.sin(fn(a, n)[1]["b"])))
    return values, tangents, grad(x), jax.jvp(grad, (x,), (jnp.cos(x),))


def transposed(m: Any, x: jax.Array) -> Any:
    """Transposes a sum that is linear in one leaf, times another."""

    def fn(a: jax.Array) -> jax.Array:
        y = m.psum({"a": a, "b": jnp.sin(x)}, "x")
        return y["a"] * y["b"]

    return jax.linear_transpose(fn, x)(m.psum(x, "x"))


def checkpointed(m: Any, x: jax.Array) -> Any:
    """A sum of what is known and of its tangent, both in one tree; done again where not saved."""

    @jax.custom_jvp
    def fn(x: jax.Array) -> jax.Array:
        return jnp.sin(m.psum(x, "x"))

    @fn.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        y, dy = m.psum((primals[0], tangents[0]), "x")
        return jnp.sin(y), jnp.cos(y) * dy

    def step(carry: jax.Array, scale: jax.Array) -> Any:
        return carry + jnp.mean(fn(jnp.sin(carry * scale))), None

    scan = jax.checkpoint(lambda x: jnp.sum(lax.scan(step, x, jnp.arange(1.0, 3.0))[0]))
    return jax.grad(scan)(x)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("fn", [vmapped, derived, transposed, checkpointed])
def test_each_leaf_is_transformed_on_its_own(fn: Any, check_vma: bool) -> None:
    """Our primitive, whatever serves; here without effects, which simulated kernels have."""

    def run(m: Any, x: jax.Array) -> Any:
        return fn(With(m, {"backend": "xla"}) if m is pc else m, x)

    check(run, check_vma=check_vma, kernels=False)


@pytest.mark.parametrize(
    "fn, check_vma",
    [(vmapped_axis, False), (derived, True), (checkpointed, False)],
)
def test_each_leaf_is_transformed_on_its_own_with_kernels(fn: Any, check_vma: bool) -> None:
    check(fn, check_vma=check_vma)


def test_tangents_that_are_zero_are_not_summed() -> None:
    def fn(a: jax.Array, b: jax.Array) -> Any:
        return jax.jvp(lambda a: pc.psum([a, b], "x"), (a,), (a,))

    assert kernels_of(fn, [(SMALL + 1,)] * 2) == 3


def test_what_nobody_reads_is_not_summed() -> None:
    """On a TPU. What is simulated has effects, and runs."""

    def fn(*xs: jax.Array) -> Any:
        return pc.psum(xs, "x")[:2]

    topology = harness.GENERATIONS["v5e"]
    compiled = harness.compile_for_tpu(fn, topology, (16, 128), (8, 100), (SMALL + 1,))
    assert sum(pc.counts().values()) == compiled.ops.count("custom-call") == 1, compiled.ops


def test_a_replay_takes_them_together() -> None:
    machine = replay.Machine.named("v5e:2x4")

    def seconds(leaves: int) -> float:
        spec = {"mesh": machine.mesh({"x": 8}), "in_specs": P(), "out_specs": P()}
        fn = jax.shard_map(lambda *xs: pc.psum(xs, "x"), **spec, check_vma=False)
        xs = [jax.ShapeDtypeStruct((7,), jnp.float32)] * leaves
        return float(replay.replay(fn, *xs, machine=machine).time)

    assert seconds(20) == seconds(1)


@pytest.mark.parametrize("wire", ["auto", pc.Wire("float8_e5m2", optional=True)], ids=str)
@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_a_wire_that_is_left_out_pads_nothing(backend: str, wire: Any) -> None:
    """Alone and in a tree no more bytes are summed than without a wire."""

    def text(**how: Any) -> str:
        call = lambda *xs: pc.psum(xs, "x", backend=backend, **how)  # noqa: E731
        xs = [jax.ShapeDtypeStruct((2, *shape), "float32") for shape in [(7,), (3, 40)] * 5]
        return jax.jit(harness.per_device(call, harness.mesh(2))).lower(*xs).as_text()

    without, left_out = text(), text(wire=wire)
    assert {op: wire for op, wire, _ in pc.wire_counts()} == {"all_reduce": ""}
    if backend == "xla":  # which merges lax's sums itself
        assert "pad" not in left_out and "tensor<635xf32>" in left_out
    else:
        sizes = re.compile(r"tensor<[\dx]*f32>")
        assert sizes.findall(left_out) == sizes.findall(without)


def test_a_wire_that_takes_more_bytes_than_a_bundle_is_refused() -> None:
    """By the bytes of the arrays, and not of what groups pad them to."""
    with pytest.raises(WireError, match=r"psum of float32\[70\]: .* in place of 280"):
        kernels_of(lambda *xs: pc.psum(xs, "x", wire="int8"), [(7,)] * 10)


@pytest.mark.parametrize("how", [{}, {"return_residue": True}], ids=str)
def test_over_a_wire_no_group_is_of_two_arrays(how: Any) -> None:
    """Each array has the bits that it has alone; one of them is much larger."""
    x = np.random.default_rng(0).normal(size=(2, 4, 200)).astype(np.float32)
    x[:, 1] *= 1e6
    named: Any = {"wire": "int8", "backend": "xla", **how}

    def program(x: jax.Array) -> Any:
        rows = [row[: 200 - i] for i, row in enumerate(x)]
        return pc.psum(rows, "x", **named), [pc.psum(row, "x", **named) for row in rows]

    together, apart = harness.per_device(program, harness.mesh(2))(x)
    together = [*zip(*together, strict=True)] if how else together
    for got, want in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(got, want)
    assert {wire for _, wire, _ in pc.wire_counts()} == {"int8"}
