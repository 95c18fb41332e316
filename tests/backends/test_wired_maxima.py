"""Maxima and minima over narrower wires: within the stated bound, the same bits by everyone."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives import _compat
from pallas_collectives.errors import AlgorithmError, DtypeError, WireError
from pallas_collectives.kernels.machinery import combine
from pallas_collectives.wires import Wire
from wired_calls import BY_XLA, KINDS, PRODUCT, WIRES, data, half_steps, run

OPS = {"pmax": np.max, "pmin": np.min}


def both(x: jax.Array, **how: Any) -> list[jax.Array]:
    """A maximum and a minimum over the devices."""
    return [getattr(pc, op)(x, "x", **how) for op in OPS]


def allowed(x: np.ndarray, exact: np.ndarray, wire: Wire) -> np.ndarray:
    """How far a result may be off: half a step of the worst term, and of three half one of its own.

    In numpy alone; groups are of the flattened operand, as it lies. What is sent on is off already.
    """
    terms = np.max([half_steps(np.abs(term.astype(np.float64)), wire) for term in x], axis=0)
    return terms + (half_steps(np.abs(exact) + terms, wire) if len(x) > 2 else 0)


@pytest.mark.parametrize("wire, n", PRODUCT, ids=str)
def test_each_number_is_within_the_stated_bound(wire: Wire, n: int) -> None:
    mapped = harness.per_device(lambda x: both(x, wire=wire, **BY_XLA), harness.mesh(n))
    for kind in KINDS:
        x = data(n, kind)
        for got, exact in zip(mapped(x), (x.max(axis=0), x.min(axis=0)), strict=True):
            ours = np.asarray(got)
            assert (ours == ours[0]).all() and ours.dtype == x.dtype
            bound = allowed(x, exact, wire)
            assert (np.abs(ours[0].astype(np.float64) - exact) <= bound).all(), kind
            if kind == "normal":
                assert (ours[0] != exact).any()


def test_what_is_added_in_place_of_compared_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the test above can fail."""
    monkeypatch.setitem(combine.OPS, "max", jnp.add)
    x = data(3)
    got = run(lambda x: pc.pmax(x, "x", wire="int8", **BY_XLA), x, n=3)
    exact = x.max(axis=0)
    assert (np.abs(got[0] - exact) > allowed(x, exact, Wire("int8"))).mean() > 0.9


@pytest.mark.parametrize("wire", [*WIRES, Wire("int8", group="row")], ids=str)
def test_a_group_that_holds_inf_or_nan_is_nan_and_others_are_not(wire: Wire) -> None:
    columns = 256
    x = data(3, rows=1, columns=columns)
    x[1, 0, 3], x[2, 1, 255], x[0, 2, 7] = np.inf, np.nan, -np.inf
    group = columns if wire.group == "row" else int(wire.group)
    lost = np.array([[3 // group, 255 // group, 7 // group]]).T
    lost = np.repeat(np.arange(columns // group), group) == lost
    for got in run(lambda x: both(x, wire=wire, **BY_XLA), x, n=3):
        assert (np.isnan(got) == lost).all()
        np.testing.assert_array_equal(got, got[:1].repeat(3, axis=0))


@pytest.mark.parametrize(
    "dtype, shape", [("float32", (40, 1000)), ("float16", (4096,)), ("bfloat16", (3, 32, 128))]
)
def test_backends_give_the_same_bits(dtype: str, shape: Any) -> None:
    """By passes of XLA and of kernels; a gather is rounded once."""
    x = np.random.default_rng(0).standard_cauchy((4, *shape)).astype(np.float32)
    x = np.asarray(jnp.asarray(np.clip(x, -1e4, 1e4)).astype(dtype))

    def program(x: jax.Array) -> Any:
        by: Any = {"wire": "int8", "backend": "pallas"}
        gathered = both(x, algorithm="gather", **by)
        return both(x, wire="int8", **BY_XLA), both(x, **by), gathered

    wide = x.astype(np.float64).reshape(4, -1)
    wide = np.pad(wide, ((0, 0), (0, -wide.shape[1] % 128)))
    of_lax, ours, gathered = run(program, x, check_vma=False)
    for a, b in zip(of_lax, ours, strict=True):
        assert a.dtype == x.dtype
        np.testing.assert_array_equal(a, b)
    for got, once, exact in zip(ours, gathered, (wide.max(0), wide.min(0)), strict=True):
        bound = allowed(wide, exact, Wire("int8"))
        one = np.max([half_steps(np.abs(term), Wire("int8")) for term in wide], axis=0)
        rounding = 2.0 ** -(8 if dtype == "bfloat16" else 11) * (np.abs(exact) + bound)
        for each, limit in ((got, bound), (once, one)):
            off = np.abs(each[0].astype(np.float64).reshape(-1) - exact[: each[0].size])
            assert (off <= (limit + rounding)[: off.size]).all()


def test_vmap_groups_each_element_by_itself() -> None:
    """Also of scalars, and beside an axis of vmap that is compared where it is."""
    x = data(2, rows=2, columns=300)
    x[:, 0] *= 1e4

    def program(x: jax.Array) -> Any:
        how: Any = {"wire": "int8", **BY_XLA}
        mapped = jax.vmap(lambda row: pc.pmax(row, "x", **how))(x)
        other = jax.vmap(lambda row: pc.pmax(row, "x", **how), in_axes=1, out_axes=1)(x.T).T
        each = jnp.stack([pc.pmax(row, "x", **how) for row in x])
        two = jax.vmap(lambda row: pc.pmax(row, ("v", "x"), **how), axis_name="v")(x)
        return mapped, other, each, two, pc.pmax(x.max(axis=0), "x", **how)

    mapped, other, each, two, of_all = run(program, x, n=2, check_vma=False)
    np.testing.assert_array_equal(mapped, each)
    np.testing.assert_array_equal(other, each)
    for row in range(4):
        np.testing.assert_array_equal(two[:, row], of_all)
    assert np.abs(each[:, 1:] - x.max(axis=0)[1:]).max() < 1  # the large row is not in its groups


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes, groups", [("a", None), (("b", "a"), None), ("b", [[0, 2], [3, 1]])])
def test_groups_and_several_axes(axes: Any, groups: Any, check_vma: bool) -> None:
    if groups and check_vma:
        pytest.skip("lax types no maxima of groups")
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = np.random.default_rng(1).normal(size=(2, 4, 16, 128)).astype(np.float32)

    def program(x: jax.Array) -> Any:
        how: Any = {"axis_index_groups": groups}
        pair = pc.pmin(x, axes, wire="int8", **how), pc.pmin(x, axes, **how)
        return [_compat.as_varying(y, ("a", "b")) for y in pair] if check_vma else pair

    how: Any = {"in_specs": P("a", "b"), "out_specs": P("a", "b"), "check_vma": check_vma}
    got, exact = map(np.asarray, jax.jit(jax.shard_map(program, mesh=mesh, **how))(x))
    off = np.abs(got - exact)
    assert 0 < off.max() <= np.abs(x).max() / 126  # of a term, and of the result


@pytest.mark.usefixtures("fresh_counts")
def test_override_lax_takes_a_wire_for_each() -> None:
    x = np.random.default_rng(2).normal(size=(2, 1 << 10, 1 << 10)).astype(np.float32)

    def program(x: jax.Array) -> Any:
        return lax.pmax(x, "x"), lax.pmin(x, "x"), lax.pmax(x[0], "x")

    with pc.use_backend("xla"), pc.override_lax(wire={"pmax": "int8"}):
        large, least, small = run(program, x, n=2)
    assert 0 < np.abs(large - x.max(axis=0)).max() <= np.abs(x).max() / 253
    np.testing.assert_array_equal(least[0], x.min(axis=0))
    np.testing.assert_array_equal(small[0], x[:, 0].max(axis=0))
    told = {(line.op, line.wire, bool(line.why)) for line in pc.override_report().wires}
    assert told == {("pmax", "int8", False), ("pmax", "int8", True)}
    assert pc.wire_counts()["all_reduce", "int8", ""] == 1
    refused = pytest.raises(WireError, match="functions that take one are all_gather")
    with refused, pc.override_lax(wire_backward={"pmax": "int8"}):
        pass


@pytest.mark.usefixtures("fresh_counts")
def test_auto_leaves_out_what_gains_nothing() -> None:
    x = data(2)
    got = run(lambda x: both(x, wire="auto", **BY_XLA), x, n=2)
    for ours, exact in zip(got, (x.max(axis=0), x.min(axis=0)), strict=True):
        np.testing.assert_array_equal(ours[0], exact)
    ((op, wire, why),) = pc.wire_counts()
    assert (op, wire) == ("all_reduce", "") and "smaller than 2 MiB" in why


def test_bfloat16_rounds_the_exact_result() -> None:
    x = data(3, "heavy tails")
    for ours, exact in zip(
        run(lambda x: both(x, wire="bfloat16", **BY_XLA), x, n=3),
        (x.max(axis=0), x.min(axis=0)),
        strict=True,
    ):
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours[0], jnp.asarray(exact).astype("bfloat16").astype("f4"))


@pytest.mark.usefixtures("by_nccl")
@pytest.mark.parametrize("n", [2, 3])
def test_nccl_gives_the_bits_that_lax_gives(n: int) -> None:
    if n > jax.device_count():
        pytest.skip(f"needs {n} devices")
    x = data(n, "heavy tails")
    of_lax, ours = (
        run(functools.partial(both, wire="int8", backend=by), x, n=n) for by in ("xla", "nccl")
    )
    for a, b in zip(of_lax, ours, strict=True):
        np.testing.assert_array_equal(a, b)


DRAWN = Wire("int8", rounding="stochastic", key=jax.random.key(0))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "how, error, match",
    [
        ({"wire_backward": "int8"}, WireError, "wire_backward='int8' for {op}.*no derivative"),
        ({"wire": DRAWN}, WireError, "rounding='stochastic' of a wire for {op}.*sums alone"),
        (
            {"wire": "int8", "algorithm": "ring", "backend": "pallas"},
            AlgorithmError,
            "algorithm='ring' for {op}.*maxima and minima need.*quantised once.*name 'exchange'",
        ),
        (
            {"wire": "int8", "algorithm": "one_shot", "backend": "pallas"},
            AlgorithmError,
            "algorithm='one_shot' for {op}.*'exchange' or 'gather'.*name 'gather'",
        ),
    ],
)
def test_what_is_refused(op: str, how: Any, error: Any, match: str) -> None:
    x = jnp.zeros((3, 6, 4))
    with pytest.raises(error, match=match.format(op=op)):
        harness.per_device(lambda x: getattr(pc, op)(x, "x", **how), harness.mesh(3)).lower(x)  # type: ignore[attr-defined]


def test_integers_and_what_is_too_small_are_refused_as_of_sums() -> None:
    def said(op: str, x: np.ndarray, error: Any) -> str:
        with pytest.raises(error) as refused:
            run(lambda x: getattr(pc, op)(x, "x", wire="int8"), x, n=3)
        return str(refused.value).replace(op, "")

    for x, error in ((np.zeros((3, 8), int), DtypeError), (np.zeros((3, 1), "f4"), WireError)):
        assert said("pmax", x, error) == said("psum", x, error)


def test_explain_says_bytes_time_and_error() -> None:
    large: Any = {"shape": (4096, 1024), "dtype": "float32", "devices": 16, "chip": "v5e"}
    found = pc.explain("pmax", **large, wire="int8")
    assert found.wire is not None and found.wire.way == "exchange"
    assert found.wire.sent < 0.27 * found.nbytes
    assert found.wire.us and found.wire.wired_us and found.wire.wired_us < found.wire.us
    assert found.why.endswith("of its group at most, in one term and in the result")
    assert [step.op for step in found.inside] == ["all_to_all", "all_gather"]
    auto = pc.explain("pmin", **large | {"shape": (64, 128)}, wire="auto")
    assert auto.wire is not None and not auto.wire.algorithm and "us" in auto.wire.why


@pytest.mark.full
@pytest.mark.parametrize("generation", harness.GENERATIONS)
@pytest.mark.parametrize(
    "wire",
    ["int8", *(pytest.param(w, marks=pytest.mark.slow) for w in ("float8_e4m3fn", "float8_e5m2"))],
)
def test_compiles_for_every_generation(generation: str, wire: str) -> None:
    """Chips without float8 units too: XLA converts there."""
    compiled = harness.compile_for_tpu(
        lambda x: pc.pmax(x, "x", wire=wire),
        harness.GENERATIONS[generation], (2048, 512), dtype=jnp.bfloat16,
    )  # fmt: skip
    names = re.findall(r"%(\w+)\.\d+ = .* custom_call_target=\"tpu_custom_call\"", compiled.text)
    kernels = sorted("_".join(name.split("_")[:2]) for name in names)
    assert kernels == ["all_gather", "all_to", "wire_add", "wire_pack", "wire_pack", "wire_unpack"]
