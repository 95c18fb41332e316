"""Products of a turn in one kernel with tokens' exchanges: which, what they give, and when not."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from layers_in_kernels import (
    FUSED,
    WIDTH,
    Arrays,
    Layer,
    N,
    close,
    counted,
    forward,
    gathered,
    in_full,
    like_laxs,
    loss,
    lowered,
    on_devices,
    one,
    scattered,
    weights,
)
from pallas_collectives.lowering import loops, turns
from pallas_collectives.lowering.turns import Step
from pallas_collectives.overlap import fusion
from pallas_collectives.tuning import overlaps


def gated(x: jax.Array, w: Arrays) -> jax.Array:
    """Two products read what is gathered, which is read otherwise, too."""
    seen = gathered(x)
    hidden = jnp.tanh(seen @ w["up"]) * (seen @ w["gate"])
    return x + scattered(hidden @ w["down"]) + jnp.sum(seen**2) * 1e-4


def turned(x: jax.Array, w: Arrays) -> jax.Array:
    """Weights are the other way round, and a sum of two products is scattered."""
    seen = gathered(x)
    by = functools.partial(jnp.einsum, "btk,nk->btn")
    up = by(seen, w["up"].T)
    return x + scattered(by(jnp.tanh(up), w["down"].T) + by(up, w["down"].T))


def rows(x: jax.Array, w: Arrays) -> jax.Array:
    """The dimension is the first."""
    return x + scattered(jnp.tanh(gathered(x, 0) @ w["up"]) @ w["down"], 0)


def within(x: jax.Array, w: Arrays) -> jax.Array:
    """Behind calls of several kinds."""
    return jax.jit(jax.checkpoint(jax.jit(one)))(x, w)


LAYERS = {layer.__name__: layer for layer in (one, gated, turned, rows, within)}


@pytest.fixture
def quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are quicker than products and exchanges apart, whatever their sizes."""
    monkeypatch.setattr(fusion, "cost", lambda *_: fusion.Cost(1e-6, 3e-3))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.usefixtures("quicker")
def test_a_layer_gives_what_it_gives_by_lax(layer: str, scan: bool) -> None:
    run = forward(LAYERS[layer], scan=scan)
    assert like_laxs(run) == {"gathers": 1, "scatters": 1}  # equal ones are built once


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("check_vma", [False, True], ids=["", "vma"])
@pytest.mark.usefixtures("quicker")
def test_gradients_are_in_kernels_too(layer: str, check_vma: bool) -> None:
    """Backward each kind's derivative is the other."""
    run = functools.partial(loss, forward(jax.checkpoint(LAYERS[layer]), scan=True))
    gradient = jax.grad(run, (0, 1))
    kernels = like_laxs(gradient, check_vma=check_vma)
    assert sum(kernels.values()) >= 3 and all(kernels.values())


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", harness.ADVERSARIES)
@pytest.mark.usefixtures("quicker")
def test_no_kernel_races_in_its_turn(dtype: str, mode: str) -> None:
    run = functools.partial(loss, forward(jax.checkpoint(gated), scan=True))
    want = on_devices(jax.grad(run), dtype)
    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES[mode]), counted() as kernels:
        got = on_devices(jax.grad(run), dtype)
    close(got, want, dtype)
    assert all(kernels.values())


@pytest.mark.full
@pytest.mark.usefixtures("quicker")
def test_what_lax_gathers_for_its_reader_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large gathers of float32, which XLA sends as bfloat16 where products read it so."""
    monkeypatch.setattr(overlaps, "narrowed_by_xla", lambda *_: "XLA sends half the bytes")
    with counted() as kernels:
        on_devices(forward(one, scan=True))
    assert kernels == {"gathers": 0, "scatters": 1}


@pytest.mark.full
@pytest.mark.usefixtures("quicker")
def test_a_mapped_layer_is_in_kernels() -> None:
    def run(x: jax.Array, w: Arrays) -> jax.Array:
        return jax.vmap(forward(one, scan=True), (0, None))(x[:, None], w)[:, 0]

    assert like_laxs(run) == {"gathers": 1, "scatters": 1}


@pytest.mark.usefixtures("quicker")
def test_overridden_programs_have_kernels() -> None:
    run = forward(one, scan=True)
    want = on_devices(run)
    for fuse in (True, False):
        pc.reset_counts()
        close(on_devices(pc.overridden(run, fuse=fuse)), want)
        assert pc.fusion_counts().get(FUSED["gathers"], 0) == fuse


def chained(x: jax.Array, w: Arrays) -> jax.Array:
    """The second weights are made of what the first product gives."""
    seen = gathered(x)
    first = seen @ w["up"]
    return x + scattered(first @ w["down"]) + jnp.sum(seen @ (w["up"] * jnp.mean(first)))


@pytest.mark.full
@pytest.mark.usefixtures("quicker")
def test_what_a_kernel_would_wait_for_itself_stays_out_of_it() -> None:
    run = forward(chained, scan=True)
    assert like_laxs(run) == {"gathers": 1, "scatters": 1}


def read_twice(x: jax.Array, w: Arrays) -> jax.Array:
    """Something else needs the product."""
    y = jnp.tile(jnp.tanh(x), (1, N, 1)) @ w["up"] @ w["down"]
    return x + scattered(y) + jnp.sum(y)


def with_another(x: jax.Array, w: Arrays) -> jax.Array:
    """The sum is not of products alone."""
    y = jnp.tile(jnp.tanh(x), (1, N, 1))
    return x + scattered(y @ w["up"] @ w["down"] + y)


def doubled(x: jax.Array, w: Arrays) -> jax.Array:
    """A sum of one product with itself, which a kernel would compute twice."""
    y = jnp.tile(jnp.tanh(x), (1, N, 1)) @ w["up"] @ w["down"]
    return x + scattered(y + y)


def both_ways(x: jax.Array, w: Arrays) -> jax.Array:
    """Sums of products with weights that lie one way and the other."""
    y = jnp.tile(jnp.tanh(x), (1, N, 1)) @ w["up"]
    return x + scattered(y @ w["down"] + jnp.einsum("btk,nk->btn", y, 2 * w["down"].T))


def in_groups(x: jax.Array, w: Arrays) -> jax.Array:
    groups = [[i] for i in range(N)]
    seen = lax.all_gather(jnp.tanh(x), "x", axis=1, tiled=True, axis_index_groups=groups)
    return x + seen @ w["up"] @ w["down"]


def stacked(x: jax.Array, w: Arrays) -> jax.Array:
    """A gather that adds a dimension."""
    return x + (lax.all_gather(jnp.tanh(x), "x") @ w["up"] @ w["down"])[0]


def of_weights(x: jax.Array, w: Arrays) -> jax.Array:
    """What is gathered was not computed: a SparseCore, or XLA, runs it beside products."""
    return x + lax.all_gather(w["up"][:64], "x", tiled=True)[:, :1].T @ jnp.ones((WIDTH, WIDTH))


def batched(x: jax.Array, w: Arrays) -> jax.Array:
    """Each row of the batch has weights of its own."""
    square = jnp.broadcast_to(w["up"] @ w["down"], (len(x), WIDTH, WIDTH))
    return x + scattered(jnp.einsum("btk,bkn->btn", gathered(x), square))


def diagonal(x: jax.Array, w: Arrays) -> jax.Array:
    """A product for each token, with its own weights."""
    seen = gathered(x)
    of_each = jnp.broadcast_to(w["up"][:, 0], seen.shape)
    return x + jnp.sum(jnp.einsum("btk,btk->bt", seen, of_each)) * 1e-3


def split(x: jax.Array, w: Arrays) -> jax.Array:
    """Weights of three dimensions."""
    heads = w["up"].reshape(WIDTH, 2, -1)
    return x + jnp.sum(jnp.einsum("btk,khn->bthn", gathered(x), heads)) * 1e-3


APART: dict[str, tuple[Layer, dict[str, Any]]] = {
    "in groups": (in_groups, {}),
    "batched": (batched, {}),
    "diagonal": (diagonal, {}),
    "split": (split, {}),
    "read twice": (read_twice, {}),
    "with another": (with_another, {}),
    "doubled": (doubled, {}),
    "both ways": (both_ways, {}),
    "stacked": (stacked, {}),
    "of weights": (of_weights, {}),
    "fuse=False": (one, {"fuse": False}),
    "ahead=False": (one, {"ahead": False}),
    "everything": (one, {"everything": True}),
    "kept": (one, {"keep": ["all_gather", "psum_scatter"]}),
    "a cast": (one, {"wire": {"all_gather": "bfloat16", "psum_scatter": "bfloat16"}}),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.usefixtures("quicker")
def test_what_stays_apart(name: str) -> None:
    layer, how = APART[name]
    run = forward(layer, scan=True)
    want = on_devices(run)
    with counted(**how) as kernels:
        got = on_devices(run)
    close(got, want, "bfloat16" if name == "a cast" else "float32")
    assert not any(kernels.values())


def handed_on(x: jax.Array, w: Arrays) -> Any:
    """What is gathered, and a product, are results of the turn as well."""
    seen = gathered(x)
    y = seen @ w["up"] @ w["down"]
    return x + scattered(y), (seen, y)


def of_one_gather(x: jax.Array, w: Arrays) -> jax.Array:
    """Two products of it, whose weights lie otherwise: one is in the kernel."""
    seen = gathered(x)
    square = w["up"] @ w["down"]
    return x + jnp.sum(seen @ square * jnp.einsum("btk,nk->btn", seen, square)) * 1e-4


CONSTANT = np.random.default_rng(3).standard_normal((WIDTH, WIDTH)).astype("float32") / WIDTH


def by_constants(x: jax.Array, w: Arrays) -> jax.Array:
    """Weights that a jitted function closes over."""
    del w
    return x + jax.jit(lambda x: scattered(gathered(x) @ CONSTANT @ CONSTANT))(x)


def squared(x: jax.Array, w: Arrays) -> jax.Array:
    """One array on both sides."""
    square = jnp.tanh(w["up"] @ w["down"]) + x[0, 0]
    return x + scattered(square @ square, 0)[None, : x.shape[1]]


@pytest.mark.parametrize(
    "layer, gathers, scatters",
    [(of_one_gather, 1, 0), (by_constants, 1, 1), (squared, 0, 1)],
)
@pytest.mark.usefixtures("quicker")
def test_other_pairs(layer: Layer, gathers: int, scatters: int) -> None:
    run = forward(layer, scan=True)
    assert like_laxs(run) == {"gathers": gathers, "scatters": scatters}


@pytest.mark.full
@pytest.mark.usefixtures("quicker")
def test_what_a_turn_hands_on_is_tokens() -> None:
    """It is an argument of the turn, as weights are."""

    def plain(x: jax.Array, w: Arrays) -> jax.Array:
        seen = lax.all_gather(x, "x", axis=1, tiled=True)
        return x + scattered(jnp.tanh(seen @ w["up"]) @ w["down"])

    run = forward(jax.checkpoint(plain), scan=True)
    assert like_laxs(run) == {"gathers": 1, "scatters": 1}


def test_weights_pass_a_barrier_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value is what it was before."""
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(turns, "awaiting", lambda step: told.append(step.reads) or step)
    steps = [Step(None, (1, 2), (3, 4)), Step(None, (4,), (5,)), Step(None, (3,), (6,))]
    loop = loops.Loop({}, steps, (), (1,), (2,), [5, 6])
    assert loop.with_tokens() is loop
    assert told == [(1, 2), (3,)]


@pytest.mark.full
@pytest.mark.usefixtures("quicker")
def test_results_of_a_turn_are_there_beside_its_kernels() -> None:
    def run(x: jax.Array, w: Arrays) -> Any:
        return lax.scan(handed_on, x, w)

    want = on_devices(run)
    with counted() as kernels:
        close(on_devices(run), want)
    assert kernels["gathers"] == 1 and kernels["scatters"] == 0


@pytest.mark.usefixtures("quicker")
def test_a_long_chain_before_a_scatter_is_lowered() -> None:
    """It is no product, and no reason to look far; sums of many products are in one kernel."""

    def chain(x: jax.Array, w: Arrays) -> jax.Array:
        y = jnp.tile(x, (1, N, 1))
        for _ in range(1500):
            y = jnp.sin(y)
        return scattered(y)

    def many(x: jax.Array, w: Arrays) -> jax.Array:
        y = jnp.tile(x, (1, N, 1))
        total = y @ w["up"][0]
        for i in range(300):
            total = total + (y + i) @ w["up"][0]
        return scattered(total)

    for program, wanted in ((chain, 0), (many, 1)):
        with counted() as kernels:
            lowered_here(program)
        assert kernels["scatters"] == wanted


def lowered_here(program: Callable[..., Any]) -> None:
    spec = P(None, "x")
    mapped = jax.shard_map(
        program, mesh=harness.mesh(N), in_specs=(spec, P()), out_specs=spec, check_vma=False
    )
    jax.jit(mapped).lower(jnp.ones((2, 8 * N, WIDTH)), weights("float32"))


def test_small_products_stay_apart() -> None:
    """By the model of the chip, which nothing stands in for here."""
    run = forward(one, scan=True)
    with counted() as kernels:
        on_devices(run)
    assert not any(kernels.values())


@pytest.mark.full
@pytest.mark.usefixtures("quicker")
def test_effects_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn with some that are ordered is left as it is; others do not matter."""

    def told(x: jax.Array, w: Arrays) -> jax.Array:
        jax.debug.print("{}", jnp.sum(x) > 1e9)
        return one(x, w)

    for ordered in (False, True):
        if ordered:
            monkeypatch.setattr(Step, "keeps_order", property(lambda step: step.is_product))
        with counted() as kernels:
            on_devices(forward(told, scan=True))
        assert bool(kernels["gathers"]) != ordered


@pytest.mark.usefixtures("quicker")
def test_an_exported_program_of_any_size_has_none() -> None:
    """`jax.export` with symbols: a kernel's sizes must be known."""
    (size,) = export.symbolic_shape("b")
    mapped = jax.shard_map(
        forward(one, scan=True),
        mesh=harness.mesh(N),
        in_specs=(P(None, "x"), P()),
        out_specs=P(None, "x"),
        check_vma=False,
    )
    args = jax.ShapeDtypeStruct((size, 8 * N, WIDTH), jnp.float32), weights("float32")
    with counted() as kernels:
        export.export(jax.jit(mapped))(*args)
    assert not any(kernels.values())


@pytest.mark.full
@pytest.mark.usefixtures("quicker")
def test_the_report_says_what_runs_in_a_kernel() -> None:
    with counted():
        on_devices(forward(one, scan=True))
    lines = {line.op: line for line in pc.override_report().replaced}
    assert set(lines) == {op for op, _, _ in FUSED.values()}
    for line in lines.values():
        assert line.by == "pallas fused" and "in one kernel" in line.why
        assert line.before_us is line.after_us is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layer, kernels", [(one, FUSED), (in_full, {"scatters"})], ids=["scattered", "in full"]
)
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_on_gpus_products_run_beside_copies(layer: Layer, kernels: set[str], scan: bool) -> None:
    """Captured or not, forward and with its gradient; large enough for the model to want it."""
    if (n := jax.device_count()) < 2:
        pytest.skip("needs two GPUs")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sizes = {"up": (2, 4096, 8192 // n), "down": (2, 8192 // n, 4096)}
    key = jax.random.key(0)
    w = {k: jax.random.normal(key, s, jnp.bfloat16) * s[1] ** -0.5 for k, s in sizes.items()}
    x = jax.random.normal(key, (2, 4096, 4096), jnp.bfloat16)
    run = functools.partial(loss, forward(jax.checkpoint(layer), scan=scan))
    specs = {"in_specs": (P(None, "x"), P()), "out_specs": (P(None, "x"), P("x"))}

    def gradients(x: jax.Array, w: Arrays) -> Any:
        moved, made = jax.grad(run, (0, 1))(x, w)
        return moved, jax.tree.map(lambda y: y[None], made)

    def results() -> Any:
        mapped = jax.shard_map(gradients, mesh=mesh, check_vma=False, **specs)
        found = jax.jit(lambda *args: mapped(*args))(x, w)
        return jax.tree.map(lambda y: np.asarray(y, np.float32), found)

    want = results()
    for fuse in (True, False):
        with counted(fuse=fuse) as built:
            got = results()
        close(got, want, "bfloat16")
        assert {kind for kind in built if built[kind]} == ({*kernels} if fuse else set())


@pytest.mark.full
@pytest.mark.parametrize(
    "topology, kernels",
    [
        ("v4:2x2x1", [*FUSED]),
        ("v5e:2x2", [*FUSED]),
        ("v5p:2x2x2", [*FUSED]),
        ("v6e:2x2", [*FUSED]),
        ("tpu7x:2x2x1", [*FUSED]),
    ],
)
@pytest.mark.usefixtures("quicker")
def test_kernels_compile_within_a_model(topology: str, kernels: list[str]) -> None:
    run = functools.partial(loss, forward(jax.checkpoint(one), scan=True))
    text = lowered(topology, jax.grad(run)).compile().as_text()
    assert [kind for kind, (kernel, _, _) in FUSED.items() if kernel in text] == kernels
