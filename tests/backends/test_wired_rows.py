"""Sums whose scales are of rows: within the bound, and in the order of the ranks the same alone."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import pallas_collectives as pc
from pallas_collectives.errors import AlgorithmError, WireError
from pallas_collectives.kernels import row_passes, wire_passes
from pallas_collectives.wires import Wire
from wired_calls import BY_XLA, KINDS, data, ragged, run

ROWS = Wire("int8", "row")
COLUMNS = 300  # no multiple of 128: a row is a group whatever its length


def steps(x: np.ndarray) -> np.ndarray:
    """Half a step of each row of x, in numpy alone."""
    return np.abs(x).max(axis=-1, keepdims=True) / 254 * (1 + 2.0**-15) + 1e-37


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_sums_are_within_half_a_step_of_each_row(n: int, backend: str) -> None:
    how: Any = {"wire": ROWS, "backend": backend}
    scatter = harness.per_device(
        lambda x: pc.psum_scatter(x, "x", tiled=True, **how), harness.mesh(n)
    )
    add = harness.per_device(lambda x: pc.psum(x, "x", **how), harness.mesh(n))
    for kind in KINDS:
        x = data(n, kind, rows=3, columns=COLUMNS)
        scattered, whole = np.asarray(scatter(x)), np.asarray(add(x))
        terms = x.astype(np.float64)
        exact, of_terms = terms.sum(axis=0), steps(terms).sum(axis=0)
        off = 2.0**-22 * np.abs(terms).sum(axis=0) + of_terms
        assert (np.abs(scattered.reshape(exact.shape) - exact) <= off).all(), kind
        off = off + (0 if n == 2 else steps(np.abs(exact) + off))
        assert (np.abs(whole - exact) <= off).all(), kind
        assert (whole == whole[0]).all(), kind
        assert kind != "normal" or (whole[0] != exact).any()


@pytest.mark.parametrize("n", [2, 3])
def test_in_order_a_row_has_the_same_bits_alone(n: int) -> None:
    """In another place, of a larger array, mapped, scattered apart, and by another backend."""
    x = data(n, "heavy tails", rows=4, columns=COLUMNS)

    def total(x: jax.Array, backend: str = "xla") -> jax.Array:
        return pc.psum(x, "x", wire=ROWS, order="rank", backend=backend)

    def block(x: jax.Array, backend: str) -> jax.Array:
        return pc.psum_scatter(x, "x", tiled=True, wire=ROWS, order="rank", backend=backend)

    # One to a program: threads of a CPU start what is ready, on each device in an order of its own.
    whole = run(total, x, n=n)
    others: list[Callable[[jax.Array], jax.Array]] = [
        lambda x: total(x[::-1])[::-1],
        lambda x: jax.vmap(total)(x.reshape(2, -1, COLUMNS)),
        functools.partial(total, backend="pallas"),
        lambda x: pc.psum(x, "x", wire=ROWS, **BY_XLA),
    ]
    for other in others:
        np.testing.assert_array_equal(run(other, x, n=n).reshape(whole.shape), whole)
    np.testing.assert_array_equal(run(lambda x: total(x[:n]), x, n=n), whole[:, :n])
    of_lax, ours = (run(functools.partial(block, backend=by), x, n=n) for by in ("xla", "pallas"))
    np.testing.assert_array_equal(of_lax, ours)


def test_residues_and_draws_are_of_rows() -> None:
    n, key = 3, jax.random.key(0)
    x = data(n, rows=2, columns=COLUMNS)

    drawn = Wire("int8", "row", rounding="stochastic", key=key)
    how: Any = {"return_residue": True, **BY_XLA}
    sums, residue = run(lambda x: pc.psum(x, "x", wire=ROWS, **how), x, n=n)
    _, lost = run(lambda x: pc.psum_scatter(x, "x", tiled=True, wire=drawn, **how), x, n=n)
    own = np.repeat(np.eye(n, dtype=bool), 2, axis=1)[..., None]  # rows whose sum a device adds
    assert (np.abs(residue) <= steps(x) + own * steps(sums)).all()
    assert (np.abs(residue) > steps(x))[own[..., 0]].any() and residue.any()
    assert (np.abs(lost) <= 2 * steps(x)).all() and (np.abs(lost) > steps(x)).any()


@pytest.mark.parametrize("backward", [None, ROWS])
def test_gradients_pass_or_have_rows_of_their_own(backward: Wire | None) -> None:
    n, weights = 2, np.arange(COLUMNS, dtype=np.float32)
    x = data(n, rows=2, columns=COLUMNS)

    def loss(x: jax.Array) -> jax.Array:
        total = pc.psum(x, "x", wire=ROWS, wire_backward=backward, **BY_XLA)
        return (total * weights).sum()

    off = np.abs(run(jax.grad(loss), x, n=n, check_vma=False) - n * weights).max()
    if backward is None:
        assert not off
    else:
        assert 0 < off <= n * steps(weights[None]).max()


@pytest.mark.parametrize(
    "call, error, match",
    [
        # Of one row all but one device would have a row of padding.
        (lambda x: pc.psum(x[:1], "x", wire=ROWS), WireError, "reduce more numbers at a time"),
        (lambda x: pc.psum(x[0, 0], "x", wire=ROWS), WireError, "in place of 4"),
        (lambda x: pc.psum(x, "x", wire=ROWS, algorithm="ring"), AlgorithmError, "128 and 256"),
        (
            lambda x: pc.psum(x, "x", wire=ROWS, order="rank", algorithm="gather"),
            WireError,
            "other bits than the exchange",
        ),
        (lambda x: pc.psum(x, "x", wire="int8", order="rank"), WireError, "group='row'"),
    ],
)
def test_what_is_refused(call: Any, error: Any, match: str) -> None:
    with pc.use_backend("pallas"), pytest.raises(error, match=match):
        run(call, data(8, columns=COLUMNS), n=8)


def test_the_time_is_compared_with_that_of_a_sum_in_the_same_order() -> None:
    """One by a ring, that adds on the way, is quicker than what keeps the order of the ranks."""
    asked: Any = {"shape": (4096, 4096), "devices": 16, "chip": "v5e", "wire": ROWS}
    found = r"modelled ([\d.]+) us in place of ([\d.]+)"
    told = (str(pc.explain("psum", **asked, order=order)) for order in (None, "rank"))
    ((us, plain),), ((same, in_order),) = (re.findall(found, each) for each in told)
    assert float(us) == float(same) < float(plain) < float(in_order)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_that_make_the_passes_have_the_bits_of_passes_of_xla(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a whole program, types checked: each collective, where blocks are whole tiles."""
    wire = Wire("int8", group="row")
    residue: Any = {"wire": "int8", "return_residue": True}

    def program(x: jax.Array) -> Any:
        def loss(x: jax.Array) -> jax.Array:
            y = pc.all_gather(x, "x", tiled=True, wire=wire)
            return (pc.psum_scatter(y, "x", tiled=True, wire=wire) ** 2).sum()

        def turn(x: jax.Array, _: None) -> Any:
            x = pc.ppermute(x, "x", [(0, 1), (1, 0)], wire=wire)
            return pc.all_to_all(x, "x", 0, 0, tiled=True, wire=wire), None

        y, _ = jax.lax.scan(turn, x, length=2)
        apart = jax.vmap(lambda x: pc.all_gather(x, "x", wire=wire, dequantize=False))
        in_order = pc.psum(x, "x", order="rank", wire=wire)
        parts = apart(x.reshape(2, 64, 1024)), pc.psum(x, "x", **residue)
        return jax.grad(loss)(x), y, in_order, *jax.tree.leaves(parts)

    x = jnp.asarray(data(2, rows=64, columns=1024), dtype)
    with pc.use_backend("pallas"):
        packed = harness.results_of(wire_passes, "pack", monkeypatch)
        lost = harness.results_of(wire_passes, "lost", monkeypatch)
        ours = run(program, x, n=2)
    with pc.use_backend("xla"):
        theirs = run(program, x, n=2)
    assert len(packed) >= 13 and len(lost) == 1, "each sum of a psum is packed besides its terms"
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.full
@pytest.mark.parametrize("wire", [Wire("int8"), Wire("float8_e4m3fn", group="row")], ids=str)
def test_ragged_rows_by_kernels_have_the_bits_of_xlas(
    monkeypatch: pytest.MonkeyPatch, wire: Wire
) -> None:
    n = 3
    x = data(n, "heavy tails", rows=1, columns=2 * 1024).reshape(n, n, 2, 1024)
    output = np.full((n, n + 2, *x.shape[2:]), 1 / 3, np.float32)

    def program(x: jax.Array, output: jax.Array) -> Any:
        def both(backend: str) -> Any:
            how: Any = {"wire": wire, "wire_backward": wire, "backend": backend}
            come, back = jax.vjp(lambda x, output: ragged(x, output, n, **how), x, output)
            return come, back(come)

        return both("pallas"), both("xla")

    packed = harness.results_of(row_passes, "pack", monkeypatch)
    got, want = run(program, x, output, n=n, check_vma=False)
    assert len(packed) >= 2, "tokens, and their cotangents"
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != 0).any()


@pytest.mark.parametrize("columns, taken", [(4096, True), (4224, False)])
def test_ragged_rows_that_no_kernel_packs_are_left_as_they_are(columns: int, taken: bool) -> None:
    over: Any = {"shape": (2048, columns), "dtype": "bfloat16", "devices": 4, "chip": "v5e"}
    told = str(pc.explain("ragged_all_to_all", **over, wire="auto"))
    assert ("auto takes int8" in told) is taken
    assert ("XLA's passes lose" in told) is not taken
