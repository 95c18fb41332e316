"""Collectives over narrower wires: errors within the stated bound, the same bits by everyone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import pallas_collectives as pc
from pallas_collectives import wires
from pallas_collectives.backends import nccl_packed
from pallas_collectives.errors import CollectiveError, WireError
from pallas_collectives.kernels import gpu_codec
from pallas_collectives.nccl import mailboxes, packed
from pallas_collectives.wires import Wire
from wired_calls import (
    BY_XLA,
    KINDS,
    MOVES,
    PRODUCT,
    SUMS,
    WIRES,
    data,
    moves,
    ragged,
    run,
    sums,
    within,
)  # fmt: skip


@pytest.mark.parametrize("wire, n", PRODUCT, ids=str)
def test_what_is_moved_is_within_half_a_step(wire: Wire, n: int) -> None:
    def rows(x: jax.Array) -> jax.Array:
        """What `ragged` brings; XLA has it on CPUs over a wire alone."""
        come = pc.all_to_all(x[:n], "x", 0, 0, tiled=True, **BY_XLA)
        return jnp.pad(come, ((1, 0), (0, 0)))

    def program(x: jax.Array) -> Any:
        bound, how = within(x, wire), {"wire": wire, **BY_XLA}
        come = ragged(x, jnp.zeros((n + 1, x.shape[1]), x.dtype), n, **how)
        return [
            [*moves(x, n, **how), come],
            *([*moves(x, n, **BY_XLA), rows(x)] for x in (x, bound)),
        ]

    mapped = harness.per_device(program, harness.mesh(n))
    for kind in KINDS:
        got, exact, bounds = jax.tree.map(np.asarray, mapped(data(n, kind)))
        for ours, want, bound in zip(got, exact, bounds, strict=True):
            assert ours.dtype == want.dtype and ours.shape == want.shape
            error = np.abs(ours.astype(np.float64) - want)
            assert (error <= bound).all(), (kind, (error - bound).max())


@pytest.mark.parametrize("wire, n", PRODUCT, ids=str)
def test_sums_are_within_the_stated_bound(wire: Wire, n: int) -> None:
    """Each term half a step; a psum one more, of the sum."""
    mapped = harness.per_device(lambda x: sums(x, wire=wire, **BY_XLA), harness.mesh(n))
    for kind in KINDS:
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


@pytest.mark.full
@pytest.mark.parametrize("wire", [*WIRES, "bfloat16"], ids=str)
def test_a_broadcast_brings_everyone_the_same_bits_within_half_a_step(
    wire: Any,
) -> None:
    n, source, columns = 3, 1, 300

    def program(x: jax.Array) -> Any:
        def loss(x: jax.Array) -> Any:
            come = pc.pbroadcast(x, "x", source, wire=wire)
            return (come * jnp.arange(columns)).sum(), come

        bound = jnp.abs(x) / 256 if wire == "bfloat16" else within(x, wire)
        return jax.grad(loss, has_aux=True)(x), bound

    x = data(n, "heavy tails", columns=columns)
    (slope, come), bound = run(program, x, n=n)
    assert (come == come[0]).all()
    assert (np.abs(come[0].astype(np.float64) - x[source]) <= bound[source]).all()
    assert (come[0] != x[source]).any()
    others = [d for d in range(n) if d != source]
    assert (slope[source] == n * np.arange(columns)).all() and not slope[others].any()


@pytest.mark.full
@pytest.mark.parametrize("wire", [None, "int8"])
def test_gradients_of_a_broadcast_have_a_wire_of_their_own(wire: Any) -> None:
    """Reverse mode, also of what is mapped and of a derivative; tangents are not rounded."""
    n, source, columns = 2, 1, 256

    def program(x: jax.Array) -> Any:
        def loss(x: jax.Array) -> Any:
            come = pc.pbroadcast(x, "x", source, wire=wire, wire_backward="int8")
            return (jnp.sin(come) * jnp.arange(columns)).sum()

        def tangent(x: jax.Array, wire_backward: Any) -> jax.Array:
            how: Any = {"wire": wire, "wire_backward": wire_backward}
            return jax.jvp(lambda x: pc.pbroadcast(x, "x", source, **how), (x,), (x,))[1]

        slope, mapped = jax.grad(loss)(x), jax.vmap(jax.grad(loss))(x)
        second = jax.grad(lambda x: jax.grad(loss)(x).sum())(x)
        come = pc.pbroadcast(x, "x", source, wire=wire)
        return come, slope, mapped, second, tangent(x, "int8"), tangent(x, None)

    pc.reset_counts()
    x = data(n, columns=columns)
    come, slope, mapped, second, narrow, plain = run(program, x, n=n)
    assert ("all_reduce", "int8") in {(op, name) for op, name, _ in pc.wire_counts()}
    weights = n * np.arange(columns)
    for got, exact in ((slope, np.cos), (mapped, np.cos), (second, lambda x: -np.sin(x))):
        off = np.abs(got[source] - weights * exact(come[source].astype(np.float64)))
        # Of the terms, which are n times less, and of their sum.
        assert 0 < off.max() <= weights.max() / 254 * 2.02
        assert not got[1 - source].any()
    assert (narrow == plain).all() and (plain == x[source]).all()


def test_a_broadcast_that_a_wire_makes_larger_is_refused() -> None:
    with pytest.raises(WireError, match="in place of 12"):
        run(lambda x: pc.pbroadcast(x[:1, :3], "x", 1, wire="int8"), data(2), n=2)
    pc.reset_counts()
    got = run(lambda x: pc.pbroadcast(x, "x", 1, wire="auto"), data(2), n=2)
    assert (got == data(2)[1]).all()
    (left,) = pc.wire_counts()
    assert left[:2] == ("pbroadcast", "") and "smaller than 2 MiB" in left[2]


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


@pytest.mark.full
@pytest.mark.parametrize("how", [{}, {"return_residue": True}], ids=str)
def test_a_psum_of_gathered_terms_is_quantised_once(how: Any) -> None:
    """Within half a step of each term, and the same on all devices; an exchange is not."""
    n, x, wire = 3, data(3, rows=1, columns=256), WIRES[0]
    named: Any = {"wire": wire, "backend": "pallas", **how}

    def program(x: jax.Array) -> Any:
        both = [pc.psum(x, "x", algorithm=name, **named) for name in ("gather", "exchange")]
        return [each[0] if how else each for each in both], within(x, wire)

    pc.reset_counts()
    (gathered, exchanged), bounds = run(program, x, n=n, check_vma=False)
    exact, bound = x.astype(np.float64).sum(axis=0), bounds.astype(np.float64).sum(axis=0)
    rounding = 2.0**-22 * np.abs(x).sum(axis=0)
    assert (np.abs(gathered - exact) <= bound + rounding).all()
    assert (gathered == gathered[0]).all() and (gathered != exact).any()
    assert np.abs(gathered - exact).mean() < np.abs(exchanged - exact).mean()
    built = [op for (op, *_), times in pc.counts().items() for _ in range(times)]
    assert sorted(built) == ["all_gather", "all_gather", "all_to_all"]


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
    assert ("all_to_all", "pallas", "torus") in pc.counts()
    assert pc.wire_counts()["all_reduce", str(wire), ""] >= 2


@pytest.mark.full
def test_sums_that_overflow_are_seen() -> None:
    """As where a term is inf: their group is NaN. A sum that is the largest number stays.

    Of two devices everyone adds the terms, and the sum alone is inf.
    """
    largest = float(jnp.finfo("float16").max)
    x = np.zeros((3, 3 * 128, 128), np.float16)  # a ring's whole tiles
    x[:2, 0, 5] = largest * 0.75
    x[0, 1, 5] = largest
    x[:2, 2, 5] = -largest * 0.49

    def program(x: jax.Array) -> Any:
        on_the_way = {"backend": "pallas", "algorithm": "ring"}
        return [pc.psum(x, "x", wire="int8", **how) for how in (BY_XLA, on_the_way)]

    for got in run(program, x, n=3, check_vma=False):
        assert np.isnan(got[:, 0]).all() and np.isfinite(got[:, 1:]).all()
        assert (got[:, 1, 5] == largest).all()
    of_two, on_the_way = run(program, x[:2, :256], n=2, check_vma=False)
    assert np.isnan(on_the_way[:, 0]).all() and np.isfinite(on_the_way[:, 1:]).all()
    assert np.isinf(of_two[:, 0, 5]).all() and np.isinf(of_two).sum() == 2
    assert np.isfinite(of_two[:, 1:]).all() and (of_two[:, 1, 5] == largest).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_largest_number_alone_is_no_overflow(dtype: str) -> None:
    """A power of two brings it as more than it is, up or down: it saturates, as where it moves."""
    largest = float(jnp.finfo(dtype).max)
    x = np.zeros((2, 4, 128), dtype)
    x[0, 0, 5], x[0, 2, 7] = largest, -largest
    wire = Wire("int8", scales="power of two")
    scattered, whole = run(
        lambda x: (
            pc.psum_scatter(x, "x", tiled=True, wire=wire, **BY_XLA),
            pc.psum(x, "x", wire=wire, **BY_XLA),
        ),
        x,
        n=2,
    )
    np.testing.assert_array_equal(scattered.reshape(4, 128), x[0])
    np.testing.assert_array_equal(whole, np.stack([x[0]] * 2))


@pytest.mark.usefixtures("by_nccl")
@pytest.mark.parametrize(
    "n, rows, wire, by",
    [
        (2, 2, "int8", "passes"),
        (2, 8, "int8", "kernels"),
        (2, 8, "float8_e4m3fn", "kernels"),
        (3, 16, "int8", "kernels"),
        (3, 16, "int8", "kernels and NCCL"),
        (2, 8, "float8_e4m3fn", "kernels and NCCL"),
    ],
)
def test_nccl_gives_the_bits_that_lax_gives(
    n: int, rows: int, wire: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By passes of XLA, by kernels, for which 8 rows are enough, or by these and NCCL."""
    if n > jax.device_count():
        pytest.skip(f"needs {n} devices")
    x, pack, went = data(n, "heavy tails", rows), gpu_codec.pack, set()
    packers = nccl_packed._packers

    def noted(format: gpu_codec.Format, blocks: jax.Array, left_out: jax.Array) -> jax.Array:
        if blocks.ndim > 2:  # sums are of flat blocks, of which kernels serve smaller ones
            went.add("kernels and NCCL")
        return pack(format, blocks, left_out)

    def found(work: packed.PackedWork, members: Any) -> Any:
        if by == "kernels and NCCL":
            raise mailboxes.MailboxError("GPU 0 cannot reach its peers' memory")
        if work.numbers % (rows * x.shape[-1]) == 0:
            went.add("kernels")
        return packers(work, members)

    monkeypatch.setattr(gpu_codec, "pack", noted)
    monkeypatch.setattr(nccl_packed, "_packers", found)

    # One to a program: threads of a CPU start what is ready, on each device in an order of its own.
    calls = [*(functools.partial(move, n=n, wire=wire) for move in MOVES)]
    calls += [functools.partial(add, wire=wire) for add in SUMS]
    of_lax = [run(functools.partial(call, backend="xla"), x, n=n) for call in calls]
    assert not went
    ours = [run(functools.partial(call, backend="nccl"), x, n=n) for call in calls]
    assert went == {by} - {"passes"}
    for a, b in zip(of_lax, ours, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("by_nccl")
def test_rows_of_one_group_are_permuted() -> None:
    x, wire = data(2, rows=8, columns=256), Wire("int8", group=256)

    def program(x: jax.Array, backend: str) -> Any:
        return pc.ppermute(x, "x", [(0, 1)], wire=wire, backend=backend)

    of_lax, ours = (run(functools.partial(program, backend=b), x, n=2) for b in ("xla", "nccl"))
    np.testing.assert_array_equal(of_lax, ours)


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
    apart = functools.partial(program, wire="int8", dequantize=False)
    values, scales = run(apart, x, n=n, check_vma=False)
    assert values.shape == x.shape and scales.shape == (*x.shape[:-1], 1)
    np.testing.assert_array_equal(wires.dequantize(values, scales), got)
    assert np.abs(got - want).max() <= np.abs(x).max() / 127


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


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_ragged_rows_go_over_lax_s_wire_on_cpus_too(wire: str) -> None:
    """XLA has no ragged exchange there: rows travel in padded blocks, several for each device."""
    n, slices, rows = 4, 2, 12
    x = np.random.default_rng(0).normal(size=(n, rows, 256)).astype(np.float32)
    sizes = np.arange(n * n * slices).reshape(n, n, slices) % 3  # [source, target, slice]
    places = (np.cumsum(sizes.reshape(n, -1), 1) - sizes.reshape(n, -1)).astype(np.int32)
    landings = np.zeros_like(sizes)
    for target in range(n):
        come = sizes[:, target].reshape(-1)
        landings[:, target] = (1 + np.cumsum(come) - come).reshape(n, slices)
    sent, come = (a.reshape(n, -1).astype(np.int32) for a in (sizes, sizes.transpose(1, 0, 2)))
    tables = places, sent, landings.reshape(n, -1).astype(np.int32), come

    def program(x: jax.Array, *tables: jax.Array) -> Any:
        blank = jnp.full((3 * rows, 256), 7.25)
        return pc.ragged_all_to_all(x, blank, *tables, axis_name="x", wire=wire, **BY_XLA)

    want = np.full((n, 3 * rows, 256), 7.25, np.float32)
    for source, target, j in np.ndindex(n, n, slices):
        size, at = sizes[source, target, j], landings[source, target, j]
        begin = places[source, target * slices + j]
        want[target, at : at + size] = x[source, begin : begin + size]
    got = run(program, x, *tables, n=n)
    np.testing.assert_array_equal(got == 7.25, want == 7.25)
    assert 0 < np.abs(got - want).max() <= np.abs(x).max() / 127


@pytest.mark.full
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
            functools.partial(pc.pshuffle, axis_name="x", perm=[1, 2, 3, 0]),
            functools.partial(pc.pswapaxes, axis_name="x", axis=0),
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
