"""Wires: what arrives of every number, and how far from it that may be."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_collectives as pc
from pallas_collectives import noise, wires
from pallas_collectives.backends.plans import How
from pallas_collectives.errors import DtypeError, WireError
from pallas_collectives.kernels.torus.shares import Shares
from pallas_collectives.lowering import quantized
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire

SCALED = ("int8", "float8_e4m3fn", "float8_e5m2")
EACH = [
    Wire(dtype, group=group, scales=scales)  # type: ignore[arg-type]
    for dtype in SCALED
    for group, scales in ((128, "float32"), (256, "power of two"), ("row", "float32"))
]
COLUMNS = 1000  # no multiple of a group


def data(kind: str, rows: int = 4) -> np.ndarray:
    """Float32 rows of a kind."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(rows, COLUMNS))
    match kind:
        case "heavy tails":
            x = rng.standard_cauchy(x.shape)
        case "constant":
            x = np.full(x.shape, -3.7)
        case "one outlier":
            x[:, 300] = 1e5
        case "zeros":
            x[:] = 0
        case "negative":
            x = -np.abs(x)
        case "tiny":
            x *= 3e-38
        case "subnormal":
            x *= 1e-40
        case "huge":
            x = np.sign(x) * np.finfo(np.float32).max
    return x.astype(np.float32)


KINDS = ("normal", "heavy tails", "constant", "one outlier", "zeros", "negative")
KINDS += ("tiny", "subnormal", "huge")


@pytest.mark.parametrize("wire", EACH, ids=str)
def test_every_number_arrives_within_half_a_step_of_its_group(wire: Wire) -> None:
    for kind in KINDS:
        x = data(kind)
        values, scales = wires.quantize(jnp.asarray(x), wire)
        assert values.shape == x.shape and values.dtype == wire.dtype
        assert scales.shape == (len(x), wires.groups_of(COLUMNS, wire))
        got = np.asarray(wires.dequantize(values, scales), np.float64)
        bound = np.asarray(wires.error_bound(jnp.asarray(x), scales, wire), np.float64)
        error = np.abs(got - x.astype(np.float64))
        assert (error <= bound).all(), (kind, (error - bound).max())
        if kind == "zeros":
            assert (np.asarray(scales) == 0).all() and (got == 0).all()
        elif kind in ("normal", "heavy tails", "negative"):  # and no bound is idle
            assert (error > 0.9 * bound).any(), kind


@pytest.mark.parametrize("wire", EACH, ids=str)
def test_scales_are_those_of_their_group(wire: Wire) -> None:
    """By numpy, group by group, the short one at the end too."""
    x = data("heavy tails")
    scales = np.asarray(wires.quantize(jnp.asarray(x), wire)[1], np.float64)
    size = COLUMNS if wire.group == "row" else int(wire.group)
    for row, found in zip(x.astype(np.float64), scales, strict=True):
        for i, scale in enumerate(found):
            exact = np.abs(row[i * size : (i + 1) * size]).max() / wire.largest
            if wire.scales == "power of two":
                assert scale == 2.0 ** np.ceil(np.log2(exact))
            else:
                np.testing.assert_allclose(scale, exact, rtol=2e-7)


@pytest.mark.parametrize("group", [128, "row"])
@pytest.mark.parametrize("shape", [(2, 0), (0, 256)])
def test_nothing_is_sent_as_nothing(shape: tuple[int, ...], group: int | str) -> None:
    wire, x = Wire("int8", group=group), jnp.zeros(shape)
    values, scales = wires.quantize(x, wire)
    assert values.shape == shape and values.dtype == jnp.int8
    assert scales.shape == (shape[0], wires.groups_of(shape[1], wire))
    assert wires.as_sent(x, wire).shape == shape


@pytest.mark.parametrize("dtype", SCALED)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_group_with_inf_or_nan_arrives_as_nan_and_no_other_does(dtype: str, bad: float) -> None:
    x = data("normal")
    x[1, 130] = bad
    got = np.asarray(wires.as_sent(jnp.asarray(x), Wire(dtype)))
    inside = np.zeros(x.shape, bool)
    inside[1, 128:256] = True
    np.testing.assert_array_equal(np.isnan(got), inside)


@pytest.mark.parametrize("dtype", SCALED)
@pytest.mark.parametrize("operand", ["bfloat16", "float16", "float32"])
def test_the_largest_numbers_of_a_dtype_stay_finite(dtype: str, operand: str) -> None:
    x = jnp.full((1, 256), jnp.finfo(operand).max, operand)
    got = wires.as_sent(x, Wire(dtype))
    assert got.dtype == operand
    np.testing.assert_allclose(got.astype(jnp.float32), x.astype(jnp.float32), rtol=1.2e-7)


def test_only_a_wire_of_bfloat16_sends_what_is_beyond_it_as_inf() -> None:
    x = jnp.full((1, 128), 3.4e38, jnp.float32)
    assert np.isinf(wires.as_sent(x, Wire("bfloat16"))).all()
    assert np.isfinite(wires.as_sent(x, Wire("int8"))).all()


@pytest.mark.parametrize("wire", [*EACH, Wire("bfloat16")], ids=str)
def test_what_has_been_sent_once_arrives_as_it_is(wire: Wire) -> None:
    once = wires.as_sent(jnp.asarray(data("normal")), wire)
    np.testing.assert_allclose(wires.as_sent(once, wire), once, rtol=3e-7)


@pytest.mark.parametrize("dtype", [*SCALED, "bfloat16"])
def test_stochastic_rounding_is_unbiased_and_takes_either_neighbour(dtype: str) -> None:
    """The mean of many draws is the number, within five deviations of such a mean."""
    x = jnp.asarray(data("normal", rows=1)[:, :256])
    wire, draws = Wire(dtype, rounding="stochastic", key=jax.random.key(0)), 2000
    keys = jax.random.split(jax.random.key(3), draws)
    words = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys).astype(jnp.int32)
    drawn = jax.vmap(lambda two: wires.as_sent(x, wire, noise.of(two, x.shape)))(words)
    drawn = np.asarray(drawn, np.float64)
    if wire.scaled:
        scales = wires.quantize(x, wire)[1]
        step = np.asarray(wires.error_bound(x, scales, wire), np.float64)
    else:
        step = np.abs(np.asarray(x, np.float64)) * 2.0**-7
    assert (np.abs(drawn - np.asarray(x)) <= step).all()
    deviation = step / 2 / np.sqrt(draws)  # at most, of a mean of two neighbours
    assert (np.abs(drawn.mean(axis=0) - np.asarray(x)) <= 5 * deviation).all()
    nearest = np.asarray(wires.as_sent(x, wire.fixed), np.float64)
    assert (np.abs(nearest - np.asarray(x)) > 5 * deviation).any()  # so that this can fail
    assert len({row.tobytes() for row in drawn[:10]}) == 10


@pytest.mark.parametrize("shape", [(2, 8, 256), (1, 3, 200)], ids=str)
def test_what_is_drawn_is_on_the_wires_grid_and_passes_gradients_straight(
    shape: tuple[int, ...],
) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    wire, how, words = Wire("int8"), How("xla"), jnp.array([3, -4], jnp.int32)
    drawn = quantized.drawn(x, words, wire, how)
    np.testing.assert_allclose(wires.as_sent(drawn, wire), drawn, rtol=3e-7)
    gradient = jax.grad(lambda x: (quantized.drawn(x, words, wire, how) ** 2).sum())(x)
    np.testing.assert_array_equal(gradient, 2 * drawn)


@pytest.mark.parametrize("wire", [*EACH[:2], Wire("float8_e5m2", group="row")], ids=str)
@pytest.mark.parametrize("shape", [(1000,), (3, 5, 256), (2, 1)])
def test_one_buffer_has_values_and_scales(wire: Wire, shape: tuple[int, ...]) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, *shape)).astype(np.float32))
    values, scales = wires.quantize(x, wire)
    packed = wires.pack(values, scales)
    assert packed.shape[-1] == 128
    assert packed.nbytes == 4 * wires.packed_bytes(shape, wire)
    again = wires.unpack(packed, shape, wire)
    np.testing.assert_array_equal(again[0].astype(jnp.float32), values.astype(jnp.float32))
    np.testing.assert_array_equal(again[1], scales)


@pytest.mark.full
@pytest.mark.parametrize("numbers, units", [(8 << 10, 10), (32 << 10, 34), (64 << 10, 66)])
def test_small_blocks_can_be_cut_for_all_links(numbers: int, units: int) -> None:
    wire = Wire("int8")
    packed = wires.pack(*wires.quantize(jnp.ones((2, numbers)), wire))
    assert packed.shape == (2, units, 8, 128)
    axes = [Group((name,), (4,)) for name in "xy"]
    plan = Shares.of(axes, packed.shape[1:], 0, packed.dtype, streams=2)
    assert plan.extent // plan.grain == units
    rows = wires.pack(*wires.quantize(jnp.ones((2, numbers)), wire), cut=False)
    assert rows.nbytes == 2 * wires.packed_bytes((numbers,), wire, cut=False)
    assert rows.nbytes == 2 * numbers * 33 // 32, "rows of a ragged exchange, which nothing cuts"


def test_bytes_are_those_promised() -> None:
    shape = (1024, 1024)
    for group, most in ((128, 0.516), (256, 0.508), ("row", 0.504)):
        nbytes = wires.packed_bytes(shape, Wire("int8", group=group))
        assert nbytes / (2 * 1024 * 1024) <= most


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"dtype": "int4"}, "int8"),
        ({"dtype": "int8", "group": 64}, "128, 256, 'row'"),
        ({"dtype": "int8", "group": True}, "128, 256, 'row'"),
        ({"dtype": "int8", "rounding": "up"}, "nearest"),
        ({"dtype": "int8", "rounding": "stochastic"}, "key"),
        ({"dtype": "int8", "key": 3}, "key"),
        ({"dtype": "int8", "rounding": "stochastic", "key": 3}, "one key"),
        ({"dtype": "int8", "rounding": "stochastic", "key": np.uint32([[1, 2]])}, "one key"),
        ({"dtype": "int8", "scales": "float16"}, "power of two"),
        ({"dtype": "bfloat16", "group": "row"}, "no scales"),
    ],
)
def test_wires_that_are_none(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(WireError, match=match):
        Wire(**wrong)


def test_dtypes_are_names_of_wires() -> None:
    for dtype in (jnp.int8, np.int8, np.dtype("int8")):
        assert wires.named(dtype) == Wire("int8")
    assert wires.named(jnp.bfloat16) == Wire("bfloat16")
    assert wires.named(jnp.float8_e5m2) == Wire("float8_e5m2")


def test_names_of_wires() -> None:
    assert wires.named(None) is None
    assert wires.named("int8") == Wire("int8") == pc.Wire("int8")
    auto = wires.named("auto")
    assert auto is not None and auto.optional
    for wrong in (8, np.ones(3)):
        with pytest.raises(WireError, match="write it like"):
            wires.named(wrong)
    with pytest.raises(DtypeError, match="no narrower"):
        wires.check(Wire("bfloat16"), "bfloat16", "psum")
    with pytest.raises(DtypeError, match="float32"):
        wires.check(Wire("int8"), "int32", "psum")
