"""Weights' gradients in one kernel with their scatter: which, what they give, and when not."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from layers_in_kernels import FUSED, Arrays, close, counted
from pallas_collectives import _compat
from pallas_collectives.lowering import collective_times
from pallas_collectives.overlap import fusion

N, WIDTH, HIDDEN, TURNS = 2, 256, 512, 2
KERNEL = FUSED["scatters"][0]

Layer = Callable[[jax.Array, Arrays], jax.Array]


@pytest.fixture
def quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are quicker than products and scatters apart, whatever their sizes."""
    monkeypatch.setattr(fusion, "cost", lambda *_: fusion.Cost(1e-6, 3e-3))


def whole(w: jax.Array, dimension: int = 0) -> jax.Array:
    return lax.all_gather(w, "x", axis=dimension, tiled=True)


def of_rows(x: jax.Array, w: Arrays) -> jax.Array:
    """Weights are cut along their rows."""
    return x + jnp.tanh(x @ whole(w["up"])) @ whole(w["down"])


def of_columns(x: jax.Array, w: Arrays) -> jax.Array:
    """And along their columns: gradients come out of kernels the other way round."""
    return x + jnp.tanh(x @ whole(w["down"].T, 1)) @ whole(w["up"].T, 1)


def turned(x: jax.Array, w: Arrays) -> jax.Array:
    """Weights are multiplied the other way round."""
    by = functools.partial(jnp.einsum, "btk,nk->btn")
    return x + by(jnp.tanh(by(x, whole(w["up"], 0).T)), whole(w["down"], 0).T)


def flat(x: jax.Array, w: Arrays) -> jax.Array:
    """Tokens have one dimension."""
    return of_rows(x.reshape(-1, WIDTH), w).reshape(x.shape)


LAYERS = {layer.__name__: layer for layer in (of_rows, of_columns, turned, flat)}


def step(layer: Layer, *, scan: bool = True, saved: bool = False) -> Callable[..., Any]:
    """The gradient of layers by their weights, and by x."""
    body = layer if saved else jax.checkpoint(layer)

    def loss(w: Arrays, x: jax.Array) -> jax.Array:
        if scan:
            x = lax.scan(lambda x, w: (body(x, w), None), x, w)[0]
        else:
            for turn in range(TURNS):
                x = body(x, {k: each[turn] for k, each in w.items()})
        return jnp.sum(x.astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1))


def on_devices(
    program: Callable[..., Any], dtype: str = "float32", *, check_vma: bool = False
) -> Any:
    """What a program makes of the weights' parts and of x, on the devices, jitted anew."""
    rng = np.random.default_rng(0)
    sizes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    w = {k: rng.standard_normal((TURNS, *s)) / np.sqrt(s[0]) for k, s in sizes.items()}
    x = rng.standard_normal((2 * N, 64, WIDTH)).astype(dtype)
    specs = {"in_specs": (P(None, "x"), P(None, "x")), "check_vma": check_vma}

    def each(w: Arrays, x: jax.Array) -> Any:
        found = program(w, x)
        return jax.tree.map(lambda y: _compat.as_varying(y, ["x"])[None], found)

    mapped = jax.shard_map(each, mesh=harness.mesh(N), out_specs=P("x"), **specs)
    found = jax.jit(mapped)(jax.tree.map(lambda w: w.astype(dtype), w), x)
    return jax.tree.map(lambda y: np.asarray(y, np.float32), found)


def like_laxs(program: Callable[..., Any], **how: Any) -> int:
    """How many kernels are built for a program, which gives what it does by lax."""
    want = on_devices(program, **how)
    with counted() as kernels:
        got = on_devices(program, **how)
    close(got, want)
    return kernels["scatters"]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.usefixtures("quicker")
def test_gradients_are_those_by_lax(layer: str, scan: bool) -> None:
    assert like_laxs(step(LAYERS[layer], scan=scan)) == 2  # equal ones are built once


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [False, True], ids=["", "vma"])
@pytest.mark.usefixtures("quicker")
def test_what_a_forward_pass_has_saved_is_multiplied(check_vma: bool) -> None:
    """It comes in slices of what the loop has for all turns."""
    assert like_laxs(step(of_rows, saved=True), check_vma=check_vma) == 2


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", harness.ADVERSARIES)
@pytest.mark.usefixtures("quicker")
def test_no_kernel_races_in_its_turn(dtype: str, mode: str) -> None:
    run = step(of_columns)
    want = on_devices(run, dtype)
    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES[mode]), counted() as kernels:
        got = on_devices(run, dtype)
    close(got, want, dtype)
    assert kernels["scatters"] == 2


@pytest.mark.full
@pytest.mark.usefixtures("quicker")
def test_overridden_programs_have_kernels() -> None:
    run = step(of_rows)
    want = on_devices(run)
    for fuse in (True, False):
        pc.reset_counts()
        close(on_devices(pc.overridden(run, fuse=fuse)), want)
        assert pc.fusion_counts().get(FUSED["scatters"], 0) == 2 * fuse


def twice_read(x: jax.Array, w: Arrays) -> jax.Array:
    """A gradient is the sum of two products."""
    up = whole(w["up"])
    return x + (jnp.tanh(x @ up) * (jnp.tanh(x) @ up)) @ lax.stop_gradient(whole(w["down"]))


def by_heads(x: jax.Array, w: Arrays) -> jax.Array:
    """A gradient is a product for each head."""
    up, down = (whole(w[k].reshape(2, -1, w[k].shape[1]), 1) for k in ("up", "down"))
    hidden = jnp.einsum("bthk,hkn->bthn", x.reshape(*x.shape[:2], 2, -1), up)
    return x + jnp.einsum("bthk,hkn->btn", jnp.tanh(hidden[..., : down.shape[1]]), down)


def masked(x: jax.Array, w: Arrays) -> jax.Array:
    """Something stands between the product and the scatter."""
    up, down = (jnp.tanh(whole(w[k])) for k in ("up", "down"))
    return x + jnp.tanh(x @ up) @ down


def untiled(x: jax.Array, w: Arrays) -> jax.Array:
    """Blocks have a dimension of their own."""
    up, down = (lax.all_gather(w[k], "x").reshape(-1, w[k].shape[1]) for k in ("up", "down"))
    return x + jnp.tanh(x @ up) @ down


def of_few(x: jax.Array, w: Arrays) -> jax.Array:
    """Tokens are not whole lanes."""
    return x + of_rows(x[:, :1], w)


APART = {layer.__name__: layer for layer in (twice_read, by_heads, masked, untiled, of_few)}


@pytest.mark.parametrize("name", APART)
@pytest.mark.usefixtures("quicker")
def test_what_stays_apart(name: str) -> None:
    assert like_laxs(step(APART[name])) == 0


@pytest.mark.usefixtures("quicker")
def test_gathers_that_xla_runs_beside_products_keep_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels hide none of XLA's, so the products that are left must be as long."""
    monkeypatch.setattr(collective_times, "beside_by_xla", lambda step, _: float(bool(step.how)))
    assert like_laxs(step(of_rows)) == 0


def test_small_gradients_stay_apart() -> None:
    assert like_laxs(step(of_rows)) == 0


@pytest.mark.full
@pytest.mark.usefixtures("quicker")
def test_a_named_wire_is_kept() -> None:
    run = step(of_rows)
    with counted(wire_backward={"all_gather": "int8"}) as kernels:
        on_devices(run)
    assert kernels["scatters"] == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "topology, kernels",
    [
        ("v4:2x2x1", True),
        ("v5e:2x2", True),
        ("v5p:2x2x1", False),  # a SparseCore adds beside products
        ("v6e:2x2", False),
        ("tpu7x:2x2x1", False),
    ],
)
@pytest.mark.usefixtures("quicker")
def test_kernels_compile_within_a_model(topology: str, kernels: bool) -> None:
    """Where no SparseCore, nor XLA, runs the sums beside products."""
    pytest.importorskip("libtpu")
    devices = len(harness._topology(topology).devices)
    on, n = harness.tpu_mesh(topology, {"x": devices}), devices
    mapped = jax.shard_map(
        step(of_rows), mesh=on, in_specs=(P(None, "x"), P("x")), out_specs=P("x"), check_vma=False
    )

    def typed(shape: tuple[int, ...], spec: P) -> Any:
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.NamedSharding(on, spec))

    sizes = {"up": (4, 4096, 16384), "down": (4, 16384, 4096)}
    weights = {k: typed(shape, P(None, "x")) for k, shape in sizes.items()}
    with pc.override_lax():
        made = jax.jit(mapped).lower(weights, typed((2 * n, 2048, 4096), P("x")))
    assert (KERNEL in made.compile().as_text()) == kernels
