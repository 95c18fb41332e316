"""Sums of products as a scatter in one kernel with them, and a gather: values and limits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from layers_in_kernels import (
    Arrays,
    Layer,
    N,
    close,
    counted,
    forward,
    in_full,
    like_laxs,
    loss,
    lowered,
    on_devices,
)
from pallas_collectives.lowering import collective_times
from pallas_collectives.overlap import fusion

KERNEL = {"gathers": 0, "scatters": 1}  # equal ones are built once


def summed(x: jax.Array, w: Arrays) -> jax.Array:
    """A sum of two products, with weights the other way round."""
    by = functools.partial(jnp.einsum, "btk,nk->btn")
    up = by(x, w["up"].T)
    return x + lax.psum(by(jnp.tanh(up), w["down"].T) + by(up, w["down"].T), "x")


def mean(x: jax.Array, w: Arrays) -> jax.Array:
    return x + lax.pmean(jnp.tanh(x @ w["up"]) @ w["down"], ("x",))


def tokens(x: jax.Array, w: Arrays) -> jax.Array:
    """Tokens of all sequences in one dimension."""
    rows = x.reshape(-1, x.shape[-1])
    return x + lax.psum(jnp.tanh(rows @ w["up"]) @ w["down"], "x").reshape(x.shape)


def second(x: jax.Array, w: Arrays) -> jax.Array:
    """Sequences that the devices do not divide, of as many tokens as they do."""
    return x + jnp.sum(lax.psum(jnp.tanh(x[:1] @ w["up"]) @ w["down"], "x"))


LAYERS = {layer.__name__: layer for layer in (in_full, summed, mean, tokens, second)}


@pytest.fixture(autouse=True)
def quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are quicker than products and sums apart, whatever their sizes."""
    monkeypatch.setattr(fusion, "cost", lambda *_: fusion.Cost(1e-6, 3e-3))
    monkeypatch.setattr(collective_times, "longer_in_two", lambda _: 0.0)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("check_vma", [False, True], ids=["", "vma"])
def test_a_layer_gives_what_it_gives_by_lax(layer: str, scan: bool, check_vma: bool) -> None:
    run = forward(LAYERS[layer], scan=scan)
    assert like_laxs(run, check_vma=check_vma) == KERNEL


@pytest.mark.parametrize(
    "layer", ["in_full", *(pytest.param(name, marks=pytest.mark.full) for name in [*LAYERS][1:])]
)
@pytest.mark.parametrize("check_vma", [False, True], ids=["", "vma"])
def test_gradients_are_those_of_lax(layer: str, check_vma: bool) -> None:
    """What is computed again is in the kernel, too; no derivative here is a sum of products."""
    run = functools.partial(loss, forward(jax.checkpoint(LAYERS[layer]), scan=True))
    gradient = jax.grad(run, (0, 1))
    assert like_laxs(gradient, check_vma=check_vma) == KERNEL


@jax.custom_vjp
def alike(x: jax.Array) -> jax.Array:
    """Tokens that are alike on all devices, and multiplied by other weights on each."""
    return x


alike.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "x"),))


def test_the_sum_of_a_backward_pass_is_in_a_kernel() -> None:
    """Several products read the tokens, whose gradient is a sum of terms."""

    def gated(x: jax.Array, w: Arrays) -> jax.Array:
        seen = alike(x)
        return x + jnp.mean(jnp.tanh(seen @ w["up"]) * (seen @ w["gate"]))

    gradient = jax.grad(functools.partial(loss, forward(gated, scan=True)), (0, 1))
    assert like_laxs(gradient) == KERNEL


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", harness.ADVERSARIES)
def test_no_kernel_races_in_its_turn(dtype: str, mode: str) -> None:
    run = jax.grad(functools.partial(loss, forward(jax.checkpoint(in_full), scan=True)))
    want = on_devices(run, dtype)
    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES[mode]), counted() as kernels:
        got = on_devices(run, dtype)
    close(got, want, dtype)
    assert kernels["scatters"]


def over_both(x: jax.Array, w: Arrays) -> jax.Array:
    """Sums over what vmap maps, and over devices."""

    def each(x: jax.Array) -> jax.Array:
        return lax.pmean(jnp.tanh(x @ w["up"]) @ w["down"], ("v", "x"))

    return x + jax.vmap(each, axis_name="v")(x)


def invarying(x: jax.Array, w: Arrays) -> jax.Array:
    """A gather whose result is typed as equal on all devices."""
    seen = lax.all_gather(jnp.tanh(x), "x", axis=1, tiled=True, to="invarying")
    return x + jnp.sum(seen @ w["up"] @ w["down"])


@pytest.mark.parametrize("layer, check_vma", [(over_both, False), (invarying, True)])
def test_what_no_kernel_gives_is_lowered(layer: Layer, check_vma: bool) -> None:
    run = forward(layer, scan=False)
    assert not any(like_laxs(run, check_vma=check_vma).values())


@pytest.mark.full
def test_a_mapped_layer_is_in_kernels() -> None:
    def run(x: jax.Array, w: Arrays) -> jax.Array:
        return jax.vmap(forward(in_full, scan=True), (0, None))(x[:, None], w)[:, 0]

    assert like_laxs(run) == KERNEL


def odd(x: jax.Array, w: Arrays) -> jax.Array:
    """The devices divide neither sequences nor tokens."""
    return x + jnp.sum(lax.psum(x[:3, :7] @ w["up"] @ w["down"], "x"))


def in_groups(x: jax.Array, w: Arrays) -> jax.Array:
    groups = [[i] for i in range(N)]
    return x + lax.psum(x @ w["up"] @ w["down"], "x", axis_index_groups=groups)


def greatest(x: jax.Array, w: Arrays) -> jax.Array:
    return x + lax.pmax(x @ w["up"] @ w["down"], "x")


def with_another(x: jax.Array, w: Arrays) -> jax.Array:
    """The sum is not of products alone."""
    return x + lax.psum(x @ w["up"] @ w["down"] + x, "x")


def of_one(x: jax.Array, w: Arrays) -> jax.Array:
    """A row, whose only dimension is the columns of the weights."""
    return x + lax.psum(x[0, 0] @ w["up"] @ w["down"], "x")


APART: dict[str, tuple[Layer, dict[str, Any]]] = {
    "odd": (odd, {}),
    "in groups": (in_groups, {}),
    "greatest": (greatest, {}),
    "with another": (with_another, {}),
    "of one": (of_one, {}),
    "fuse=False": (in_full, {"fuse": False}),
    "everything": (in_full, {"everything": True}),
    "kept": (in_full, {"keep": ["psum"]}),
    "a cast": (in_full, {"wire": {"psum": "bfloat16"}}),
}


@pytest.mark.parametrize("name", APART)
def test_what_stays_apart(name: str) -> None:
    layer, how = APART[name]
    run = forward(layer, scan=True)
    want = on_devices(run)
    with counted(**how) as kernels:
        got = on_devices(run)
    close(got, want, "bfloat16" if name == "a cast" else "float32")
    assert not any(kernels.values())


def test_a_sum_that_is_quicker_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By more than its kernel saves; or by lax, which must serve one of the three."""
    for longer in (3e-3, None):
        monkeypatch.setattr(collective_times, "longer_in_two", lambda _, longer=longer: longer)
        with counted() as kernels:
            on_devices(forward(in_full, scan=True))
        assert not any(kernels.values())


@pytest.mark.full
def test_the_report_says_what_runs_in_a_kernel() -> None:
    with counted():
        on_devices(forward(in_full, scan=True))
    lines = {line.op: line for line in pc.override_report().replaced}
    assert "in one kernel" in lines["matmul_reduce_scatter"].why


@pytest.mark.full
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x2", "v6e:2x2", "tpu7x:2x2x1"])
def test_they_compile_within_a_model(topology: str) -> None:
    run = functools.partial(loss, forward(jax.checkpoint(in_full), scan=True))
    text = lowered(topology, jax.grad(run), rows=16384).compile().as_text()
    assert "matmul_reduce_scatter" in text


@pytest.mark.parametrize("topology, less", [("v5p:2x2x2", False), ("v6e:4x4", True)])
def test_a_sum_over_corners_takes_less_than_its_two_parts(
    topology: str, less: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chips at the corners of 4 x 4 have two links, which a scatter and a gather fill twice."""
    pytest.importorskip("libtpu")
    monkeypatch.undo()  # as it is
    found = harness.results_of(collective_times, "longer_in_two", monkeypatch)
    on = harness.tpu_mesh(topology, {"x": len(harness._topology(topology).devices)})
    given = jax.NamedSharding(on, P())
    shapes = (2, 2048, 256), (256, 4096)
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=given) for shape in shapes]
    mapped = jax.shard_map(
        lambda x, w: lax.psum(jnp.tanh(x) @ w, "x"),
        mesh=on,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    with pc.override_lax():
        jax.jit(mapped).lower(*arrays)
    (longer,) = found
    assert (longer > 5e-5) == less
