"""`explain`: what it names, what it leaves to lax, and that it is what a call gets."""

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh

import harness
import pallas_collectives as pc
from benchmarks import replay_rows
from benchmarks.cases import CASES
from pallas_collectives.backends import serving, wire_choice
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import CollectiveError
from pallas_collectives.tuning import choice
from tables_of_times import slow_direct, written

pytestmark = pytest.mark.usefixtures("fresh_counts", "modelled_table_alone")

KIB, MIB = 1 << 10, 1 << 20


def test_explain_names_all_candidates_their_times_and_the_reason() -> None:
    small = pc.explain("psum", 4 * KIB, devices=8, chip="v5p")
    large = pc.explain("psum", shape=(4096, 4096), dtype=jnp.bfloat16, devices=8, chip="v5p")
    assert (small.algorithm, large.algorithm) == ("gather:vmem", "ring")
    assert large.nbytes == 32 * MIB
    assert "latency (hops)" in small.why and "busiest link" in large.why
    names = {c.algorithm.partition(":")[0] for c in small.candidates}
    assert names == set(ALGORITHMS["all_reduce"])
    times = [c.us for c in small.candidates if c.us is not None]
    assert times == sorted(times) and small.candidates[0].algorithm == small.algorithm
    assert all(c.source.startswith("modelled") for c in small.candidates if c.us is not None)
    assert "gather:vmem" in str(small) and "modelled" in str(small)


def test_explain_is_what_a_call_gets() -> None:
    on = harness.mesh(2, 4)
    for shape, op in itertools.product([(8, 128), (1024, 1024)], ["all_gather", "psum"]):
        call: Callable[..., Any] = getattr(pc, op)
        pc.reset_counts()
        run = harness.per_device(lambda a, call=call: call(a, "y"), on)
        jax.eval_shape(run, np.zeros((8, *shape), np.float32))
        jax.jit(run).lower(np.zeros((8, *shape), np.float32))
        (key,) = pc.counts()
        assert pc.explain(op, shape=shape, mesh=on, axis_name="y").algorithm == key[2]


def test_explain_asks_about_devices_where_a_mesh_of_others_is_in_scope() -> None:
    """A script that trains sets its mesh at the top, and asks in a step, too."""

    def told() -> list[str]:
        product = {"shape": (1024, 4096), "columns": 4096}
        asked = [("psum", {"nbytes": KIB}), ("all_gather_matmul", product)]
        return [str(pc.explain(op, **size, devices=16, chip="v5e")) for op, size in asked]

    def step(x: jax.Array) -> jax.Array:
        inside.extend(told())
        return x

    wanted, on, inside = told(), harness.mesh(4), []
    with jax.set_mesh(on):
        assert told() == wanted
    jax.eval_shape(harness.per_device(step, on), np.zeros(4))
    assert inside == wanted


AXES = ("x", "y")


@pytest.mark.parametrize(
    "op, call, shape, dtype",
    [
        ("all_gather", lambda a: pc.all_gather(a, AXES, tiled=True), (5, 129), "int8"),
        ("all_gather", lambda a: pc.all_gather(a, AXES, axis=1, tiled=True), (48, 128), "bfloat16"),
        ("psum_scatter", lambda a: pc.psum_scatter(a, AXES, tiled=True), (8, 3), "float16"),
        ("psum_scatter", lambda a: pc.psum_scatter(a, AXES, tiled=True), (4096, 128), "complex64"),
        ("psum", lambda a: pc.psum(a, AXES), (5, 3), "float32"),
        ("psum", lambda a: pc.psum(a, AXES), (100, 1000), "bool"),
        ("pmax", lambda a: pc.pmax(a, AXES), (512, 256), "uint32"),
        ("pbroadcast", lambda a: pc.pbroadcast(a, AXES, 1), (640, 128), "bfloat16"),
        ("all_to_all", lambda a: pc.all_to_all(a, AXES, 0, 0, tiled=True), (8, 5), "int8"),
    ],
)
def test_explain_is_what_a_call_gets_of_any_shape_on_several_axes(
    op: str, call: Callable[..., Any], shape: tuple[int, ...], dtype: str
) -> None:
    """Padding, packing, and the parts that a block can be cut in are the call's own."""
    on, axis = harness.mesh(2, 4), int(shape == (48, 128))
    with pc.torus("v5p:2x2x2"):
        found = pc.explain(op, shape=shape, dtype=dtype, mesh=on, axis_name=AXES, axis=axis)
        assert not pc.counts()
        jax.jit(harness.per_device(call, on)).lower(np.zeros((8, *shape), dtype))
    assert {algorithm for _, _, algorithm in pc.counts()} == {found.algorithm}


@pytest.mark.parametrize("op", ["psum_scatter", "all_to_all", "psum"])
def test_explain_takes_less_than_a_byte_a_device(op: str) -> None:
    found, least = (pc.explain(op, nbytes, devices=8, chip="v5p") for nbytes in (1, 4 * 8))
    assert found.algorithm == least.algorithm != "nothing" and found.nbytes == 1


def test_explain_takes_nothing_of_complex_numbers() -> None:
    assert pc.explain("pbroadcast", nbytes=0, dtype="complex128", devices=8, chip="v5e")


@pytest.mark.parametrize("dtype, rows", [("bfloat16", 4096), ("float32", 2048)])
def test_explain_takes_bytes_to_be_of_the_dtype(dtype: str, rows: int) -> None:
    how: Any = {"dtype": dtype, "devices": 8, "chip": "v5p", "wire": "int8"}
    by_bytes = pc.explain("psum", nbytes=1 << 20, **how)
    assert str(by_bytes) == str(pc.explain("psum", shape=(rows, 128), **how))
    assert str(540672 if dtype == "bfloat16" else 270336) in str(by_bytes)


def test_explain_builds_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pallas_call = pl.pallas_call

    def of_no_operands(kernel: Any, **how: Any) -> Callable[[], Any]:
        built = pallas_call(kernel, **how)
        return lambda: built()  # the one that tells the interpreter's effects, once a process

    monkeypatch.setattr(pl, "pallas_call", of_no_operands)
    assert pc.explain("ragged_all_to_all", MIB, devices=8, chip="v5e").algorithm == "torus"
    assert pc.explain("psum", MIB, mesh=harness.mesh(2, 4), axis_name=("x", "y")).candidates
    assert not pc.counts()


@pytest.mark.parametrize("op, n, rows", [("psum", 2, 0), ("psum", 1, 8), ("ppermute", 1, 8)])
def test_explain_sends_nothing_where_calls_do(op: str, n: int, rows: int) -> None:
    call = {"psum": pc.psum, "ppermute": lambda a, axis: pc.ppermute(a, axis, [(0, 0)])}[op]
    on = harness.mesh(n)
    jax.jit(harness.per_device(lambda a: call(a, "x"), on)).lower(np.zeros((n, rows, 128)))
    found = pc.explain(op, shape=(rows, 128), mesh=on, axis_name="x")
    assert (found.algorithm == "nothing") == (not pc.counts()) == (op == "psum")
    assert (
        "empty" if rows == 0 else "one device" if op == "psum" else "preferred by rank"
    ) in found.why


def test_explain_says_what_cannot_serve_and_what_was_measured(tmp_path: Path) -> None:
    far = pc.explain("all_gather", 4 * KIB, devices=8, chip="v5e")
    direct = next(c for c in far.candidates if c.algorithm == "direct")
    assert direct.us is None and "cannot write" in direct.source
    with choice.use_table(written(tmp_path / "table.json", slow_direct())):
        measured = pc.explain("all_gather", 4 * KIB, devices=2)
    assert measured.algorithm == "unidirectional" and measured.why.startswith("measured 1.0 us")
    assert f"measured with JAX {jax.__version__}" in str(measured)
    ragged = pc.explain("ragged_all_to_all", MIB, devices=4, chip="v5p")
    assert ragged.algorithm == "direct" and "no table has a time" in ragged.why


def test_explain_says_the_same_whatever_was_traced_before() -> None:
    """A ragged exchange gathers its tables by a primitive, which is traced once."""
    serving._traced_effects.cache_clear()
    once, again = (pc.explain("ragged_all_to_all", MIB, devices=8, chip="v5e") for _ in range(2))
    assert once.algorithm == "torus" and str(once) == str(again)


def test_explain_across_slices_gives_the_steps() -> None:
    mesh = AbstractMesh((2, 4), ("dcn", "x"))
    with pc.across_slices("dcn"):
        steps = pc.explain("psum", MIB, mesh=mesh, axis_name=("dcn", "x"))
        assert [step.op for step in steps.inside] == ["psum_scatter", "all_gather"]
        assert [step.nbytes for step in steps.inside] == [MIB, MIB // 4]
        assert "lax between them" in str(steps)
        gather = pc.explain("all_gather", KIB, mesh=mesh, axis_name=("dcn", "x"))
        assert [step.nbytes for step in gather.inside] == [2 * KIB]
        assert (
            pc.explain("all_to_all", MIB, mesh=mesh, axis_name=("dcn", "x")).algorithm
            == "lax's own"
        )
        assert pc.explain("psum", MIB, mesh=mesh, axis_name="dcn").algorithm == "lax's own"
        assert not pc.explain("psum", MIB, mesh=mesh, axis_name="x").inside
        assert pc.explain("psum", 0, mesh=mesh, axis_name=("dcn", "x")).algorithm == "nothing"
        scalar = pc.explain("psum", shape=(), mesh=mesh, axis_name=("dcn", "x"))
        # As the call has it: a block of one tile for each of 4 devices, then one element of each.
        assert [step.nbytes for step in scalar.inside] == [4 * 4096, 4 * 128]


def test_a_tile_that_cannot_be_cut_goes_over_all_axes() -> None:
    """One tile a block, of which six links cannot each have a part: in fewest hops even so."""
    on = harness.mesh(2, 2, 2)
    axes = ("x", "y", "z")
    with pc.torus("v5p:2x2x2"):
        found = pc.explain("all_gather", shape=(8, 128), mesh=on, axis_name=axes)
        run = harness.per_device(lambda a: pc.all_gather(a, axes, tiled=True), on)
        jax.jit(run).lower(np.zeros((8, 8, 128), np.float32))
    assert set(pc.counts()) == {("all_gather", "pallas", found.algorithm)}
    (torus_row,) = (c for c in found.candidates if c.algorithm == "torus")
    assert found.algorithm == "torus"
    assert all(torus_row.us < c.us for c in found.candidates if c.us and c is not torus_row)


def test_explain_goes_over_all_axes_where_calls_do() -> None:
    on = harness.mesh(2, 4)
    with pc.torus("v5p:2x2x2"):
        found = pc.explain("all_gather", 4 * MIB, mesh=on, axis_name=("x", "y"))
        run = harness.per_device(lambda a: pc.all_gather(a, ("x", "y"), tiled=True), on)
        jax.jit(run).lower(np.zeros((8, 8192, 128), np.float32))
    assert found.algorithm == found.candidates[0].algorithm == "torus"
    assert found.torus == "2x2x2 grid" and "us against" in found.why
    assert set(pc.counts()) == {("all_gather", "pallas", "torus")}


@pytest.mark.parametrize("op", ["all_to_all", "ragged_all_to_all"])
@pytest.mark.parametrize("kind, chips", [("TPU7x", (4, 4, 8)), ("TPU v5", (4, 4, 4))])
def test_many_devices_exchange_around_no_ring(op: str, kind: str, chips: tuple[int, ...]) -> None:
    """On 7x:4x4x4 a ring of 64 takes 753 us for what goes straight in 62."""
    device = jax.sharding.AbstractDevice(kind, None, platform="tpu")
    axes = (jax.sharding.AxisType.Auto,) * 3
    mesh = AbstractMesh(chips, ("x", "y", "z"), axis_types=axes, abstract_device=device)
    found = pc.explain(op, 4 * MIB, mesh=mesh, axis_name=("x", "y", "z"))
    assert found.algorithm in ("direct", "torus", "spread")
    assert "on so many devices another is faster; name it to use it" in str(found)


def test_explain_says_between_which_sizes_of_the_table_a_time_lies() -> None:
    """A straight line between 32 and 256 KiB is not what a replay of 64 KiB gives."""
    for block, said in (
        (1 << 10, ", as blocks of 4 KiB"),
        (32 << 10, ""),
        (64 << 10, ", between blocks of 32 and 256 KiB"),
        (4 * MIB, ", on from 2048 KiB"),
    ):
        found = pc.explain("all_to_all", 8 * block, devices=8, chip="v5e")
        assert found.candidates[0].source == f"modelled by replay, for 8 devices{said}"
    found = pc.explain("psum", 64 << 10, devices=8, chip="v5e")
    assert found.candidates[0].source.endswith(", between operands of 32 and 256 KiB")


def test_what_explain_says_of_named_algorithms_holds_for_the_calls() -> None:
    """`torus` on one axis is not chosen, and serves if it is named."""
    x = harness.random((4, 8, 128), "float32")
    told = pc.explain("all_gather", 4096, devices=4, chip="v5p").candidates
    (torus,) = (c for c in told if c.algorithm == "torus")
    assert torus.us is None and torus.source.endswith("; name it to use it")
    run = harness.per_device(
        lambda a: pc.all_gather(a, "x", tiled=True, algorithm="torus"), harness.mesh(4)
    )
    np.testing.assert_array_equal(run(x)[0], x.reshape(32, 128))


@pytest.mark.parametrize("torus, lies", [("v5p:2x2x2", "2x2x2 grid"), ("v5e:2x4", "2x4 grid")])
def test_explain_says_where_one_axis_is_laid_over_several_of_the_torus(
    torus: str, lies: str
) -> None:
    with pc.torus(torus):
        found = pc.explain("all_gather", 4 * MIB, mesh=harness.mesh(8), axis_name="x")
    assert f"on a {lies} of 8" in str(found)
    assert found.algorithm == ("torus" if lies == "2x2x2 grid" else "bidirectional")
    (torus_row,) = (c for c in found.candidates if c.algorithm == "torus")
    assert (
        torus_row.us and torus_row.source == "modelled by replay, for 8 devices, on from 2048 KiB"
    )


@pytest.mark.parametrize("axis, shared", [("x", 2), ("y", 1)])
def test_explain_says_how_many_groups_share_a_link(axis: str, shared: int) -> None:
    """Devices on x, of (4, 2) on 2x4 chips, lie two apart, and those of the others between."""
    with pc.torus("v6e:2x4"):
        found = pc.explain("all_gather", 4 * MIB, mesh=harness.mesh(4, 2), axis_name=axis)
    assert found.sharing == shared
    assert (f"up to {shared} times as long" in str(found)) == (shared > 1)


@pytest.mark.parametrize(
    "dtype, served", [("float64", False), ("complex128", False), ("complex64", True)]
)
@pytest.mark.parametrize("op", ["psum", "psum_scatter", "all_gather"])
def test_explain_leaves_to_lax_what_calls_do(op: str, dtype: str, served: bool) -> None:
    found = pc.explain(op, shape=(8, 128), dtype=dtype, devices=4)
    assert (found.algorithm == "lax's own") == (not served and op != "all_gather")
    assert served or op == "all_gather" or "at most 32 bits" in found.why


def test_explain_takes_axes_in_the_order_in_which_the_call_does() -> None:
    mesh = AbstractMesh((2, 4), ("x", "y"))
    with pytest.raises(CollectiveError, match="must have its axes in the mesh's order"):
        pc.explain("ppermute", 4096, mesh=mesh, axis_name=("y", "x"))
    assert pc.explain("psum", 4096, mesh=mesh, axis_name=("y", "x")).devices == 8


def test_a_start_in_the_order_of_the_ranks_is_the_kernels_as_in_the_call() -> None:
    free, ranked = (
        pc.explain("psum_start", 64 * MIB, devices=8, chip="7x", order=order)
        for order in (None, "rank")
    )
    assert (free.algorithm, ranked.algorithm) == ("lax's own", "exchange")


SMALL_ARE_ROUGH = "small messages are good to 45%"


def test_small_times_are_said_to_rest_on_assumed_latencies() -> None:
    for nbytes, rough in ((4 * KIB, True), (64 * MIB, False)):
        told = str(pc.explain("psum", nbytes, devices=16, chip="v5e"))
        assert (SMALL_ARE_ROUGH in told) == rough


_BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    "pod, axes",
    [
        ("v5e:16x16", ("x",)),
        ("v5e:4x4", ("x", "y")),
        ("v5p:4x4x4", ("x", "y")),
        ("v5p:4x4x4", ("x", "y", "z")),
        ("7x:4x4x4", ("x", "y")),
        ("v5p:8x8x8", ("x", "y", "z")),  # larger than any
        ("v5p:4x8x4", ("x", "y")),  # of other lengths than any
        ("v5e:3x5", ("x", "y")),
        ("v5e:6x6", ("x",)),  # between those that there are
    ],
)
@pytest.mark.parametrize("name", ["all_gather", "psum_scatter", "psum", "all_to_all"])
@pytest.mark.parametrize("block", [32 * KIB, MIB])
def test_figures_are_the_replays_within_a_tenth_or_there_is_none(
    name: str, pod: str, axes: tuple[str, ...], block: int
) -> None:
    sizes = replay_rows.mesh_axes(replay_rows.Machine.named(pod))
    n = math.prod(sizes[axis] for axis in axes)
    (task,) = replay_rows.plan([pod], [_BY_NAME[name]], [n * block], axes=axes)
    operand = 4 * math.prod(task.case.operand(n, block // 512))
    mesh = task.machine.mesh(sizes)
    told = pc.explain(name, operand, mesh=mesh, axis_name=axes if len(axes) > 1 else axes[0])
    best = told.candidates[0]
    if best.us is None:
        assert "no figure" in best.source or told.algorithm == "lax's own"
        return
    assert best.us == pytest.approx(1e6 * replay_rows.run(task).time, rel=0.1)


def test_a_wire_for_what_takes_none_or_has_no_figures() -> None:
    of: dict[str, Any] = {"shape": (128, 128), "devices": 4, "chip": "v6e", "wire": "int8"}
    for op, more in (("pbroadcast_start", {}), ("all_gather_matmul", {"columns": 128})):
        with pytest.raises(
            CollectiveError, match="explain has no figures for this collective over a wire"
        ):
            pc.explain(op, **of, **more)
    said = pc.explain("pmax", **of)
    assert said.wire is not None and "in one term and in the result" in said.why


def test_wires_are_told_with_their_bytes_time_and_error() -> None:
    told = pc.explain(
        "all_gather", shape=(2048, 1024), dtype="bfloat16", devices=8, chip="v6e", wire="int8"
    )
    assert told.algorithm == "wire int8" and told.wire is not None
    assert told.wire.sent / told.wire.nbytes <= 0.52
    assert told.wire.us and told.wire.wired_us and told.wire.wired_us < told.wire.us
    assert "51.6%" in told.why and "1/254" in told.why
    assert [step.op for step in told.inside] == ["all_gather"]
    # A ring adds on the way, with a tenth of the bytes of an exchange.
    ring: dict[str, Any] = {"shape": (4096, 1024), "dtype": "bfloat16", "devices": 16}
    named = pc.explain("psum", **ring, chip="v5e", wire="int8")
    assert [(step.op, step.why) for step in named.inside] == [
        ("psum", "the way over the wire that stands above")
    ]
    assert "in the sum at each of 15 hops and in their sum" in named.why
    assert [c.algorithm for c in named.candidates] == ["exchange", "ring", "line", "gather"]
    assert named.candidates[-1].source.endswith("in each of the 16 terms")
    assert str(named).count("1/254") == 1 and "an operand goes in" in named.candidates[0].source
    auto = pc.explain("psum", **ring, chip="v5e", wire="auto")
    assert (
        auto.algorithm == "wire int8"
        and auto.why == f"auto takes int8, since it is quicker: {named.why}"
    )
    left = pc.explain("psum", **ring | {"shape": (64, 1024)}, chip="v5e", wire="auto")
    assert left.algorithm != "wire int8" and "auto leaves wire int8 out: it would" in str(left)
    assert re.search(r"would take \d+\.\d us, and \d+\.\d without", str(left))
    assert wire_choice._no_quicker(3.24, 3.16) == "it would take 3.2 us, no less than without"
    few = pc.explain("psum", 4 * MIB, devices=16, chip="v5e", wire="int8")
    assert "in place of 4194304" in few.why and few.wire.way == "ring"
    (*_, gather) = pc.explain("psum", 128 << 10, devices=4, chip="v5e", wire="int8").candidates
    assert gather.algorithm == "gather" and "taken by name alone: other" in gather.source
    padded = pc.explain("psum", 256 << 10, devices=16, chip="v5e", wire="int8")
    assert padded.wire.way == "exchange"
    more = [c.algorithm for c in padded.candidates if "no fewer than" in c.source]
    assert more == ["ring", "line"]
    slower = pc.explain("psum", **ring | {"shape": (64, 1024)}, chip="v5e", wire="int8")
    assert slower.why.startswith('slower: wire="auto" leaves it out; ')
