"""Collectives over narrower wires: errors within the stated bound, the same bits by everyone."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import pallas_collectives as pc
from pallas_collectives import wires
from pallas_collectives.errors import AlgorithmError, CollectiveError, DtypeError, WireError
from pallas_collectives.wires import Wire

BY_XLA = {"backend": "xla"}
COLUMNS = 384
WIRES = (
    Wire("int8"),
    Wire("int8", group=256, scales="power of two"),
    Wire("float8_e4m3fn"),
    Wire("float8_e5m2", group=256),
)
KINDS = ("normal", "heavy tails", "constant", "one outlier", "zeros")


def data(n: int, kind: str = "normal", rows: int = 2) -> np.ndarray:
    """A float32 term of each of n devices, (n, rows of each block * n, columns)."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, rows * n, COLUMNS))
    match kind:
        case "heavy tails":
            x = rng.standard_cauchy(x.shape)
        case "constant":
            x = np.full(x.shape, 0.3)
        case "one outlier":
            x[0, 0, 5] = 1e4
        case "zeros":
            x[:] = 0
    return x.astype(np.float32)


def run(program: Callable[..., Any], *operands: Any, n: int = 4, **options: Any) -> Any:
    """What each device has of a program."""
    got = harness.per_device(program, harness.mesh(n), **options)(*operands)
    return jax.tree.map(np.asarray, got)


def moves(x: jax.Array, n: int, **how: Any) -> list[jax.Array]:
    """What every collective makes of one device's (rows, columns) that only moves data."""
    return [
        pc.all_gather(x, "x", **how),
        pc.all_gather(x, "x", axis=1, tiled=True, **how),
        pc.all_to_all(x, "x", 0, 0, tiled=True, **how),
        pc.all_to_all(x, "x", 0, 1, tiled=True, **how),
        pc.ppermute(x, "x", [(0, n - 1), (n - 1, 0)], **how),
        pc.pshuffle(x, "x", [*range(1, n), 0], **how),
    ]


def sums(x: jax.Array, **how: Any) -> list[jax.Array]:
    """As `moves`, of those that add."""
    return [
        pc.psum_scatter(x, "x", tiled=True, **how),
        pc.psum(x, "x", **how),
        pc.pmean(x[:, :200], "x", **how),
    ]


def within(x: jax.Array, wire: Wire) -> jax.Array:
    """How far each number of x may be off when it has been sent once."""
    return wires.error_bound(x, wires.quantize(x, wire)[1], wire)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_what_is_moved_is_within_half_a_step(wire: Wire, n: int) -> None:
    for kind in KINDS if n == 3 else ("heavy tails",):
        x = data(n, kind)

        def program(x: jax.Array) -> Any:
            bound = within(x, wire)
            return (
                moves(x, n, wire=wire, **BY_XLA),
                moves(x, n, **BY_XLA),
                moves(bound, n, **BY_XLA),
            )

        got, exact, bounds = run(program, x, n=n)
        for ours, want, bound in zip(got, exact, bounds, strict=True):
            assert ours.dtype == want.dtype and ours.shape == want.shape
            error = np.abs(ours.astype(np.float64) - want)
            assert (error <= bound).all(), (kind, (error - bound).max())


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_sums_are_within_the_stated_bound(wire: Wire, n: int) -> None:
    """Each term half a step; a psum one more, of the sum."""
    mapped = harness.per_device(lambda x: sums(x, wire=wire, **BY_XLA), harness.mesh(n))
    for kind in KINDS if n == 3 else ("heavy tails",):
        x = data(n, kind)
        got = jax.tree.map(np.asarray, mapped(x))
        exact = x.astype(np.float64).sum(axis=0)
        of_terms = sum(_flat_bound(row, wire, n) for row in x)
        of_sum = _flat_bound(exact + np.sign(exact) * of_terms, wire, n)
        rounding = 2.0**-22 * np.abs(x.astype(np.float64)).sum(axis=0)  # of float32 sums
        blocks = got[0].reshape(exact.shape)
        assert (np.abs(blocks - exact) <= of_terms + rounding).all(), kind
        whole = of_terms + rounding + 1.1 * of_sum  # of the sum as it is, not as it would be
        assert (np.abs(got[1] - exact) <= whole).all(), kind
        mean = np.abs(got[2] - exact[:, :200] / n)
        assert (mean <= (np.abs(x).max() * 2 + 1e-30)).all()
        assert all((row == got[1][0]).all() for row in got[1])  # the same on every device
        assert all((row == got[2][0]).all() for row in got[2])


def _flat_bound(x: np.ndarray, wire: Wire, n: int) -> np.ndarray:
    """By the largest number of each group, of the flattened array, in numpy alone."""
    flat = np.abs(x.astype(np.float64)).reshape(-1, int(wire.group))
    step = flat.max(axis=1, keepdims=True) / wire.largest
    if wire.scales == "power of two":
        step = 2.0 ** np.ceil(np.log2(np.maximum(step, 1e-300)))
    relative = {"int8": 0.0, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}[wire.dtype]
    half = np.maximum(flat * relative, step / (2 if wire.dtype == "int8" else 2.0**8))
    return (half * (1 + 2.0**-15) + 1e-37 * n).reshape(x.shape)


def test_a_scale_of_another_group_or_chunk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above can fail: scales that do not travel with their chunk."""
    x, unpack = data(3, "heavy tails"), wires.unpack

    def mixed(*args: Any) -> Any:
        values, scales = unpack(*args)
        return values, jnp.roll(scales, 1, axis=0)

    monkeypatch.setattr(wires, "unpack", mixed)
    call = lambda x: pc.all_gather(x, "x", wire="int8", **BY_XLA)  # noqa: E731
    got = run(call, x, n=3)
    bound = np.asarray(jax.vmap(lambda x: within(x, Wire("int8")))(x))
    assert (np.abs(got - x[None]) > bound).mean() > 0.5


@pytest.mark.parametrize("wire", [WIRES[0], WIRES[2]], ids=str)
def test_kernels_give_the_bits_that_lax_gives(wire: Wire) -> None:
    x = data(4, rows=8)

    def program(x: jax.Array) -> Any:
        return [
            [*moves(x, 4, **how)[::2], *sums(x, **how)]
            for how in ({"wire": wire, **BY_XLA}, {"wire": wire, "backend": "pallas"})
        ]

    pc.reset_counts()
    of_lax, ours = run(program, x)
    for a, b in zip(of_lax, ours, strict=True):
        np.testing.assert_array_equal(a, b)
    assert ("all_to_all", "pallas", "ring") in pc.counts()
    assert pc.wire_counts()["all_reduce", str(wire), ""] >= 2


@pytest.mark.usefixtures("by_nccl")
def test_nccl_gives_the_bits_that_lax_gives() -> None:
    x, n = data(2), 2

    def program(x: jax.Array, **how: Any) -> Any:
        return [*moves(x, n, wire="int8", **how), *sums(x, wire="int8", **how)]

    of_lax, ours = (
        run(functools.partial(program, backend=name), x, n=n) for name in ("xla", "nccl")
    )
    for a, b in zip(of_lax, ours, strict=True):
        np.testing.assert_array_equal(a, b)


def test_ragged_rows_arrive_and_others_stay() -> None:
    n, rows = 2, 8
    x = np.random.default_rng(0).normal(size=(n, rows, 8, 128)).astype(np.float32)

    def program(x: jax.Array, **how: Any) -> Any:
        me, device = jax.lax.axis_index("x"), jnp.arange(n, dtype=jnp.int32)
        sizes = lambda source, target: 1 + (source + 2 * target) % 3  # noqa: E731
        return pc.ragged_all_to_all(
            x, jnp.full_like(x, 7.25), device * 4, sizes(me, device),
            jnp.full(n, me * 4, jnp.int32), sizes(device, me), axis_name="x", **how
        )  # fmt: skip

    both = lambda x: (program(x, wire="int8"), program(x))  # noqa: E731
    got, want = run(both, x, n=n, check_vma=False)
    untouched = want == 7.25
    assert untouched.any() and not untouched.all()
    np.testing.assert_array_equal(got == 7.25, untouched)
    assert np.abs(got - want).max() <= np.abs(x).max() / 127


def ragged(x: jax.Array, output: jax.Array, n: int, **how: Any) -> jax.Array:
    """One row of x (rows, columns) to each of n devices, behind the first row of their output."""
    me, each = jax.lax.axis_index("x"), jnp.ones(n, jnp.int32)
    return pc.ragged_all_to_all(
        x, output, jnp.arange(n, dtype=jnp.int32), each, jnp.full(n, 1 + me, jnp.int32), each,
        axis_name="x", **how
    )  # fmt: skip


def test_ragged_rows_by_bfloat16_leave_other_rows_exact() -> None:
    n = 2
    x = np.random.default_rng(0).normal(size=(n, n, 256)).astype(np.float32)
    x[0, 0, 3] = np.nan
    x.view(np.uint32)[0, 1, 3] = 0xFFFFFFFF  # NaN too
    output = np.full((n, n + 2, 256), 1 / 3, np.float32)

    def program(x: jax.Array, output: jax.Array) -> Any:
        return ragged(x, output, n, wire="bfloat16"), ragged(x, output, n)

    got, want = run(program, x, output, n=n, check_vma=False)
    np.testing.assert_array_equal(got[:, [0, -1]], output[:, [0, -1]])
    rounded = np.asarray(jnp.asarray(want).astype("bfloat16").astype("float32"))
    np.testing.assert_array_equal(got[:, 1:-1], rounded[:, 1:-1])


def test_ragged_gradients_have_a_wire_of_their_own() -> None:
    n = 2
    x = np.random.default_rng(0).normal(size=(n, n, 256)).astype(np.float32)
    weight = np.random.default_rng(1).normal(size=(n, n + 2, 256)).astype(np.float32)

    def program(x: jax.Array, weight: jax.Array) -> Any:
        def loss(x: jax.Array, **how: Any) -> jax.Array:
            return (weight * ragged(x, jnp.zeros_like(weight), n, **how)).sum()

        return jax.grad(functools.partial(loss, wire_backward="int8"))(x), jax.grad(loss)(x)

    got, exact = run(program, x, weight, n=n, check_vma=False)
    assert not np.array_equal(got, exact)
    assert np.abs(got - exact).max() <= np.abs(weight).max() / 127


@pytest.mark.parametrize("tiled", [True, False])
def test_values_and_scales_come_apart(tiled: bool) -> None:
    n, wire = 4, "int8"
    x = data(n, rows=1)

    def program(x: jax.Array) -> Any:
        how: Any = {"wire": wire, **BY_XLA}
        calls = [
            functools.partial(pc.all_gather, axis_name="x", tiled=tiled),
            functools.partial(
                pc.all_to_all, axis_name="x", split_axis=0, concat_axis=0, tiled=tiled
            ),
            functools.partial(pc.ppermute, axis_name="x", perm=[(0, 1)]),
        ]
        return [(call(x, **how), call(x, **how, dequantize=False)) for call in calls]

    for whole, (values, scales) in run(program, x, n=n):
        assert values.dtype == np.int8 and scales.dtype == np.float32
        assert values.shape == whole.shape
        np.testing.assert_array_equal(wires.dequantize(values, scales), whole)


def test_values_and_scales_along_the_last_dimension() -> None:
    x = data(2)
    call = functools.partial(
        pc.all_gather, axis_name="x", axis=1, tiled=True, wire="int8", **BY_XLA
    )
    whole, (values, scales) = run(lambda x: (call(x), call(x, dequantize=False)), x, n=2)
    np.testing.assert_array_equal(wires.dequantize(values, scales), whole)
    with pytest.raises(CollectiveError, match="whole groups"):
        run(lambda x: call(x[:, :200], dequantize=False), x, n=2)


# Derivatives and transformations ------------------------------------------------------------------


CALLS: dict[str, Callable[..., Any]] = {
    "all_gather": lambda x, **how: pc.all_gather(x, "x", **how),
    "psum_scatter": lambda x, **how: pc.psum_scatter(x, "x", tiled=True, **how),
    "psum": lambda x, **how: pc.psum(x, "x", **how),
    "all_to_all": lambda x, **how: pc.all_to_all(x, "x", 0, 1, tiled=True, **how),
    "ppermute": lambda x, **how: pc.ppermute(x, "x", [(0, 1), (1, 0)], **how),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("op", CALLS)
def test_gradients_pass_straight_through(op: str, check_vma: bool) -> None:
    """Bit for bit those without a wire; with one of their own they are quantised, by it."""
    n = 2
    x, weight = data(n), np.random.default_rng(1).normal(size=(n, 1)).astype(np.float32)
    call = CALLS[op]

    def program(x: jax.Array, weight: jax.Array) -> Any:
        def loss(x: jax.Array, **how: Any) -> jax.Array:
            y = call(x, **how, **BY_XLA)
            return (jnp.sin(jnp.arange(1.0, y.shape[-1] + 1)) * weight * y).sum()

        def gradient(**how: Any) -> jax.Array:
            return jax.grad(functools.partial(loss, **how))(x)

        def checkpointed(x: jax.Array) -> jax.Array:
            return jnp.sin(call(x, wire="int8", **BY_XLA)).sum()

        tangent = jax.jvp(lambda x: call(x, wire="int8", **BY_XLA), (x,), (x,))[1]
        kept = [jax.grad(f)(x) for f in (checkpointed, jax.checkpoint(checkpointed))]
        return (gradient(), gradient(wire="int8"), gradient(wire="int8", wire_backward="int8"),
                tangent, call(x, **BY_XLA), *kept)  # fmt: skip

    plain, straight, by_wire, tangent, exact, one, other = run(
        program, x, weight, n=n, check_vma=check_vma
    )
    np.testing.assert_array_equal(straight, plain)
    np.testing.assert_array_equal(tangent, exact)
    np.testing.assert_array_equal(one, other)
    if op == "psum" and check_vma:  # its derivative sends nothing
        np.testing.assert_array_equal(by_wire, plain)
    else:
        assert not np.array_equal(by_wire, plain)
        np.testing.assert_allclose(by_wire, plain, atol=0.05)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("where", [0, 1, 2])
def test_vmap_groups_each_element_by_itself(op: str, where: int) -> None:
    n = 2
    x = np.stack([data(n, kind, rows=4) for kind in ("normal", "heavy tails", "one outlier")])
    x = np.moveaxis(x, 0, 1)
    call = functools.partial(CALLS[op], wire="int8", **BY_XLA)

    def program(x: jax.Array) -> Any:
        mapped = jax.vmap(call, in_axes=where)(jnp.moveaxis(x, 0, where))
        return mapped, jnp.stack([call(element) for element in x])

    mapped, apart = run(program, x, n=n)
    np.testing.assert_array_equal(mapped, apart)


def test_groups_and_several_axes() -> None:
    x = data(4)
    pairs = [[0, 2], [3, 1]]

    def program(x: jax.Array) -> Any:
        how: Any = {"wire": "int8", **BY_XLA}
        in_groups = pc.psum_scatter(x, "x", tiled=True, axis_index_groups=pairs, **how)
        return in_groups, pc.psum(x, "x", **how)

    in_groups, summed = run(program, x, check_vma=False)
    for pair in pairs:
        exact = x[pair].sum(axis=0).reshape(2, -1, COLUMNS)
        for place, device in enumerate(pair):
            assert np.abs(in_groups[device] - exact[place]).max() < 0.06
    both = harness.per_device(
        lambda x: pc.psum(x, ("x", "y"), wire="int8", **BY_XLA), harness.mesh(2, 2)
    )(x)
    np.testing.assert_array_equal(np.asarray(both), summed)


@pytest.mark.parametrize("op", CALLS)
def test_vmap_mixes_no_elements_in_a_group(op: str) -> None:
    """Rows of no whole groups; an element with inf leaves the other as it is, forth and back."""
    n, columns = 2, 200
    x = np.random.default_rng(3).normal(size=(n, 2, 4, columns)).astype(np.float32)
    x[:, 1] *= 1e4
    call = functools.partial(CALLS[op], wire="int8", wire_backward="int8", **BY_XLA)
    cotangent = np.stack([np.where(np.arange(columns) == 0, np.inf, 1), np.linspace(0, 1, columns)])

    def gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        y, pull = jax.vjp(call, x)
        ct = jnp.broadcast_to(jnp.resize(cotangent, y.shape[-1]), y.shape).astype(y.dtype)
        return pull(ct)[0]

    def program(x: jax.Array) -> Any:
        mapped = jax.vmap(call)(x), jax.vmap(gradient)(x, cotangent)
        apart = [(call(one), gradient(one, ct)) for one, ct in zip(x, cotangent, strict=True)]
        y, pull = jax.vjp(jax.vmap(call), x)  # what was mapped is transposed
        cts = jax.vmap(lambda y, ct: jnp.broadcast_to(jnp.resize(ct, y.shape[-1]), y.shape))
        return (
            mapped,
            [jnp.stack(part) for part in zip(*apart, strict=True)],
            pull(cts(y, cotangent).astype(y.dtype))[0],
        )

    (mapped, back), apart, pulled = run(program, x, n=n, check_vma=False)
    np.testing.assert_array_equal(mapped, apart[0])
    np.testing.assert_array_equal(back, apart[1])
    np.testing.assert_array_equal(pulled, apart[1])
    assert np.isnan(back[:, 0]).any() and np.isfinite(back[:, 1]).all()


def test_vmap_over_a_sum_of_vmaps_own_axis_and_the_meshs() -> None:
    x = np.random.default_rng(3).normal(size=(2, 3, 2, 200)).astype(np.float32)
    x[:, :, 1, 7] = np.inf

    def one(x: jax.Array) -> jax.Array:
        return pc.psum(x, ("v", "x"), wire="int8", **BY_XLA)

    inner = jax.vmap(jax.vmap(one), axis_name="v", out_axes=None)
    outer = jax.vmap(jax.vmap(one, axis_name="v", out_axes=None), in_axes=1)
    for got in run(lambda x: (inner(x), outer(x)), x, n=2, check_vma=False):
        exact = x[:, :, 0].sum(axis=(0, 1))
        assert np.abs(got[:, 0] - exact).max() < 0.15
        assert np.isnan(got[:, 1, :128]).all() and np.isfinite(got[:, 1, 128:]).all()


def test_scalars_of_vmap_have_no_group_together() -> None:
    x = np.arange(2048, dtype=np.float32).reshape(2, 1024)
    x[0, 0] = np.inf

    def program(x: jax.Array, wire: Any) -> jax.Array:
        send = lambda x: pc.ppermute(x, "x", [(0, 1), (1, 0)], wire=wire, **BY_XLA)  # noqa: E731
        return jax.vmap(send)(x)

    with pytest.raises(WireError, match="in place of 4096"):
        run(functools.partial(program, wire="int8"), x, n=2)
    np.testing.assert_array_equal(run(functools.partial(program, wire="auto"), x, n=2), x[::-1])


@pytest.mark.parametrize("op", CALLS)
def test_gradients_of_complex_numbers_beside_a_wire_that_is_left_out(op: str) -> None:
    x = (data(2) + 1j * data(2)[::-1]).astype(np.complex64)
    call = CALLS[op]

    def program(x: jax.Array) -> Any:
        def both(x: jax.Array, **how: Any) -> Any:
            y = functools.partial(call, **how, **BY_XLA)
            tangent = jax.jvp(y, (x,), (2j * x,))[1]
            return tangent, jax.grad(lambda x: (jnp.abs(y(x)) ** 2).sum())(x)

        return both(x, wire="auto"), both(x)

    got, exact = run(program, x, n=2, check_vma=False)
    jax.tree.map(np.testing.assert_array_equal, got, exact)


# Residues, draws, trees ---------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_residues_are_what_terms_have_lost(rounding: str) -> None:
    a, b = data(2), data(2, "heavy tails")[:, :1, :200]
    key = jax.random.key(0) if rounding == "stochastic" else None
    wire = Wire("int8", rounding=rounding, key=key)

    def program(a: jax.Array, b: jax.Array) -> Any:
        how: Any = {"wire": wire, "return_residue": True, **BY_XLA}
        total, lost = pc.psum([a, b], "x", **how)
        blocks, also_lost = pc.psum_scatter(a, "x", tiled=True, **how)
        return total, lost, blocks, also_lost

    total, lost, blocks, also_lost = run(program, a, b, n=2)
    for x, sums_of_x, lost_of_x in zip((a, b), total, lost, strict=True):
        arrived = (x - lost_of_x).sum(axis=0)
        assert (lost_of_x != 0).any()
        assert np.abs(sums_of_x[0] - arrived).max() <= np.abs(arrived).max() / 127
    np.testing.assert_allclose(
        blocks.reshape(a[0].shape), (a - also_lost).sum(axis=0), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(WireError, match="must not be left out"):
        run(lambda x: pc.psum(x, "x", return_residue=True, **BY_XLA), data(2), n=2)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_nothing_is_drawn_or_lost_where_nothing_is_sent(rounding: str) -> None:
    key = jax.random.key(0) if rounding == "stochastic" else None
    how: Any = {"wire": Wire("int8", rounding=rounding, key=key), **BY_XLA}

    def program(x: jax.Array) -> Any:
        alone: Any = {"axis_index_groups": [[0], [1]], "return_residue": True}
        total, lost = pc.psum_scatter(x, "x", tiled=True, **alone, **how)
        sums = jax.vmap(lambda x: pc.psum(x, "v", return_residue=True, **how), axis_name="v")(x)
        mean = jax.vmap(lambda x: pc.pmean(x, "v", **how), axis_name="v")(x)
        return total - x, lost, sums[1], sums[0] - x.sum(axis=0), mean - x.mean(axis=0)

    for got in run(program, data(2), n=2, check_vma=False):
        np.testing.assert_allclose(got, 0, atol=1e-5)

    def on_one(x: jax.Array) -> Any:
        sums = pc.psum([x, x[:0]], "x", return_residue=True, **how)
        moved = pc.ppermute(x, "x", [(0, 0)], **how), pc.all_gather(x, "x", tiled=True, **how)
        return sums[1][0], sums[0][0] - x, *(y - x for y in moved)

    for got in run(on_one, data(1), n=1, check_vma=False):
        np.testing.assert_array_equal(got, 0)
    constant = data(1)[0]

    def on_none(x: jax.Array) -> Any:  # constants are multiplied
        sums, lost = pc.psum([constant, x], "x", return_residue=True, **how)
        return sums[0] - 2 * constant + 0 * x, lost[0] + 0 * x

    for got in run(on_none, data(2)[:, :1, :1], n=2, check_vma=False):
        np.testing.assert_array_equal(got, 0)
    mixed = lambda x: pc.psum(x, ("v", "x"), return_residue=True, **how)  # noqa: E731
    with pytest.raises(WireError, match="no term is sent by itself"):
        run(jax.vmap(mixed, axis_name="v", out_axes=(None, 0)), data(2), n=2, check_vma=False)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_residues_under_vmap_are_those_of_each_element(rounding: str) -> None:
    x = data(2)[..., :200] * np.float32([1, 1e4, 1, 1e-3])[:, None]
    key = jax.random.key(0) if rounding == "stochastic" else None
    how: Any = {"wire": Wire("int8", rounding=rounding, key=key), "return_residue": True, **BY_XLA}
    mapped = jax.vmap(lambda x: pc.psum_scatter(x, "x", tiled=True, **how))
    sums, lost = run(mapped, x, n=2)
    arrived = (x - lost).sum(axis=0).reshape(4, 2, 100)
    for device in range(2):
        np.testing.assert_allclose(sums[device], arrived[:, device], rtol=1e-5, atol=1e-6)


def test_the_mean_of_stochastic_sums_is_the_sum() -> None:
    x, draws = data(2, rows=1), 600

    def program(x: jax.Array) -> Any:
        def one(key: jax.Array) -> jax.Array:
            wire = Wire("int8", rounding="stochastic", key=key)
            return pc.psum_scatter(x, "x", tiled=True, wire=wire, **BY_XLA)

        drawn = jax.lax.map(one, jax.random.split(jax.random.key(5), draws))
        return drawn, pc.psum_scatter(x, "x", tiled=True, wire="int8", **BY_XLA)

    drawn, nearest = run(program, x, n=2, check_vma=False)
    exact = x.astype(np.float64).sum(axis=0).reshape(nearest.shape)
    step = np.abs(x).max() / 127
    five = 5 * step * np.sqrt(2) / 2 / np.sqrt(draws)
    assert (np.abs(drawn.mean(axis=1, dtype=np.float64) - exact) <= five).all()
    assert (np.abs(nearest - exact) > five).any()
    assert not np.array_equal(drawn[0, 0], drawn[0, 1])


def test_small_leaves_of_a_tree_go_together_in_groups_of_their_own() -> None:
    leaves = [data(2)[:, :1, :300], 1e4 * data(2)[:, 0, :77], data(2, rows=8)]

    def program(*leaves: jax.Array) -> Any:
        how: Any = {"wire": "int8", "backend": "pallas"}
        return pc.psum(list(leaves), "x", **how), [pc.psum(x, "x", **how) for x in leaves[::2]]

    pc.reset_counts()
    together, apart = run(program, *leaves, n=2)
    np.testing.assert_array_equal(together[0], apart[0])  # beside one of far larger numbers
    np.testing.assert_array_equal(together[2], apart[1])
    assert np.abs(together[1] - leaves[1].sum(axis=0)).max() < 1e4 * 0.06


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_a_small_leaf_goes_in_its_bundle(backend: str) -> None:
    """By itself it would take more bytes; with the others it takes fewer."""
    leaves = [data(2), data(2)[:, 0, :3]]
    how: Any = {"wire": "int8", "backend": backend}
    got = run(lambda *leaves: pc.psum(list(leaves), "x", **how), *leaves, n=2)
    for total, x in zip(got, leaves, strict=True):
        assert np.abs(total - x.sum(axis=0)).max() < 0.1
    with pytest.raises(WireError, match="in place of 12"):
        run(lambda x: pc.psum(x, "x", **how), leaves[1], n=2)


@pytest.mark.usefixtures("fresh_counts")
def test_every_padded_block_is_counted() -> None:
    """256 numbers on 8 devices are 8 groups, more than the numbers themselves."""
    x = data(8)[:, 0, :256]
    with pytest.raises(WireError, match="takes 2048 bytes in place of 1024"):
        run(lambda x: pc.psum(x, "x", wire="int8", **BY_XLA), x, n=8)
    run(lambda x: pc.psum(x[:1], "x", wire="bfloat16", **BY_XLA), x, n=8)  # needs no padding


# What is refused, left out, or stays as it is -----------------------------------------------------


def test_without_a_wire_programs_are_what_they_were() -> None:
    x = jnp.zeros((2, 16, 128))

    def text(**how: Any) -> str:
        def program(x: jax.Array) -> Any:
            return [*moves(x, 2, **how), *sums(x, **how)]

        return harness.per_device(program, harness.mesh(2)).lower(x).as_text()  # type: ignore[attr-defined]

    for backend in ("xla", "pallas"):
        assert text(wire=None, wire_backward=None, backend=backend) == text(backend=backend)
    assert "i8" not in text(backend="xla") and "i8" in text(wire="int8", backend="xla")


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda x: pc.psum(x, "x", wire="int4"), WireError, "int8"),
        (lambda x: pc.psum(x[0, :1], "x", wire="int8"), WireError, "in place of 4"),
        (lambda x: pc.all_gather(x[:, :1], "x", wire="int8"), WireError, "in place of"),
        (lambda x: pc.psum(x.astype(int), "x", wire="int8"), DtypeError, "a wire is for"),
        (lambda x: pc.psum(x.astype("bfloat16"), "x", wire="bfloat16"), DtypeError, "no narrower"),
        (lambda x: pc.psum(x, "x", wire=Wire("int8", "row")), WireError, "flattened"),
        (lambda x: pc.psum(x, "x", wire="int8", algorithm="ring"), AlgorithmError, "exchange"),
        (lambda x: pc.psum(x, "x", wire="int8", precise=True), CollectiveError, "wider"),
        (lambda x: pc.psum(x, "x", wire="int8", order="rank"), WireError, "neighbours"),
        (lambda x: pc.psum(x, "x", wire=np.ones(3)), WireError, "the name of a dtype"),
        (lambda x: pc.all_gather(x, "x", dequantize="no"), CollectiveError, "True or False"),
        (lambda x: pc.psum(x, "x", return_residue="no"), CollectiveError, "True or False"),
        (
            lambda x: pc.all_gather(x, "x", wire="int8", wire_backward="int8", dequantize=False),
            WireError,
            "no derivative",
        ),
        (
            lambda x: pc.ppermute(x[:0], "x", [(0, 1)], wire="int8", dequantize=False),
            CollectiveError,
            "without numbers",
        ),
        (lambda x: pc.all_gather(x, "x", dequantize=False), WireError, "has scales"),
        (lambda x: pc.all_gather(x, "x", wire="auto", dequantize=False), WireError, "has scales"),
    ],
)
@pytest.mark.parametrize("backend", [None, "pallas"])
def test_what_is_refused(backend: Any, call: Any, error: Any, match: str) -> None:
    x = jnp.zeros((3, 6, 4))
    with pc.use_backend(backend), pytest.raises(error, match=match):
        harness.per_device(call, harness.mesh(3)).lower(x)  # type: ignore[attr-defined]


def test_keys_are_of_the_forward_pass() -> None:
    wire = Wire("int8", rounding="stochastic", key=jax.random.key(0))
    with pytest.raises(WireError, match="nearest"):
        run(lambda x: pc.psum(x, "x", wire_backward=wire), data(2), n=2)


@pytest.mark.usefixtures("fresh_counts")
def test_an_optional_wire_gives_way_to_the_order_of_the_ranks() -> None:
    x = data(4)
    ranked = lambda x, **how: pc.psum(x, "x", order="rank", **how, **BY_XLA)  # noqa: E731
    got, exact = run(lambda x: (ranked(x, wire="auto"), ranked(x)), x)
    np.testing.assert_array_equal(got, exact)
    ((_, _, why),) = pc.wire_counts()
    assert "neighbours" in why


def test_empty_arrays_are_neither_drawn_nor_sent() -> None:
    def program(x: jax.Array) -> Any:
        for group in (128, "row"):
            wire = Wire("int8", group, rounding="stochastic", key=jax.random.key(0))
            how: Any = {"wire": wire, **BY_XLA}
            yield pc.all_gather(x[:, :0], "x", **how)
            yield pc.all_to_all(x[:0], "x", 0, 0, tiled=True, **how)
            none = jnp.zeros(2, jnp.int32)
            yield pc.ragged_all_to_all(x[:0], x, none, none, none, none, axis_name="x", **how)
            yield pc.psum_scatter(x[:, :0], "x", tiled=True, return_residue=True, **how)

    got = run(lambda x: list(program(x)), data(2), n=2, check_vma=False)
    assert [y.size for y in jax.tree.leaves(got)] == [0, 0, data(2).size, 0, 0] * 2


def test_what_is_started_takes_a_wire_as_its_whole_does() -> None:
    def program(x: jax.Array) -> Any:
        how: Any = {"wire": "int8", **BY_XLA}
        return [
            (pc.pshuffle_start(x, "x", [1, 0], **how).done(), pc.pshuffle(x, "x", [1, 0], **how)),
            (pc.pswapaxes_start(x[:2], "x", 0, **how).done(), pc.pswapaxes(x[:2], "x", 0, **how)),
        ]

    for got, want in run(program, data(2), n=2):
        np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("fresh_counts")
def test_auto_is_left_out_where_it_would_lose_and_counted() -> None:
    x = data(2)
    got, exact = run(
        lambda x: (pc.psum(x, "x", wire="auto", **BY_XLA), pc.psum(x, "x", **BY_XLA)), x, n=2
    )
    np.testing.assert_array_equal(got, exact)
    ((op, wire, why),) = pc.wire_counts()
    assert (op, wire) == ("all_reduce", "") and "smaller than 2 MiB" in why
    large = np.zeros((2, 1 << 10, 1 << 10), np.float32)
    run(lambda x: pc.psum(x, "x", wire="auto", **BY_XLA), large, n=2)
    assert ("all_reduce", "int8", "") in pc.wire_counts()


def test_bfloat16_of_float32_is_a_cast() -> None:
    x = data(2)

    def program(x: jax.Array) -> Any:
        over: Any = {"wire": "bfloat16", **BY_XLA}
        narrow = [*moves(x, 2, **over), *sums(x, **over)]
        return narrow, [*moves(x, 2, **BY_XLA), *sums(x, **BY_XLA)]

    for got, exact in zip(*run(program, x, n=2), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, exact, rtol=2**-8, atol=0.03)


@pytest.mark.parametrize("wire", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_compiles_for_every_generation(generation: str, wire: str) -> None:
    """Chips without float8 units too: XLA converts there."""

    def program(x: jax.Array) -> Any:
        values, scales = pc.all_gather(x, "x", wire=wire, dequantize=False)
        return pc.psum(x, "x", wire=wire), wires.dequantize(values, scales)

    compiled = harness.compile_for_tpu(
        program, harness.GENERATIONS[generation], (256, 512), dtype=jnp.bfloat16
    )
    assert compiled.ops.count("custom-call") == 3  # an exchange, and two gathers
