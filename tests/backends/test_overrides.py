"""What `override_report` tells of a context, and what is warned of as one ends."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.lax import psum as bound_before
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from overriding import build, doubled_sum, run, untouched
from pallas_collectives.backends import overrides
from pallas_collectives.backends.report import Line, OnWire, OverrideReport


@pytest.fixture(autouse=True)
def laxs_own_again() -> Iterator[None]:
    yield
    assert untouched(), "lax's functions are back after every test"


@pytest.mark.parametrize(
    "us, said",
    [
        ((None, None), ""),
        ((0.0, 0.0), ", does not stop the core (modelled)"),
        ((6.2, 6.2), ", stops the core for 6 us, as long as lax's (modelled)"),
        ((80.0, 0.0), ", stops the core 80 -> 0 us (modelled)"),
    ],
)
def test_a_line_says_for_how_long_the_core_is_stopped(
    us: tuple[float | None, float | None], said: str
) -> None:
    report = OverrideReport((Line("psum", "ours", "so", 1, 4, *us),))
    assert f"\n  1 x psum of 4 bytes by ours{said}: so\n" in str(report)


def test_sums_over_calls_are_told_from_what_one_takes_and_whose_times_they_are() -> None:
    two = Line("psum", "ours", "modelled 4.8 us", 2, 8, 9.6, 9.6)
    of_two = functools.partial(OnWire, "psum", "int8", times=2, nbytes=8)
    wires = of_two(why="", sent=6), of_two(why="so", sent=0)
    of_v5e = str(OverrideReport((two,), wires=wires, chip="v5e")).splitlines()
    assert of_v5e[1:] == [
        "  2 x psum of 8 bytes in all by ours, stops the core for 10 us in all, as long as lax's"
        " (modelled); each: modelled 4.8 us",
        "  2 x psum over wire int8: 6 bytes in place of 8 in all",
        "  2 x psum of 8 bytes in all without its wire int8; each: so",
        "  a call in a loop counts once, with the time of one turn; modelled times are of v5e",
    ]


def test_simulated_devices_are_compared_with_nothing_and_a_chip_stands_for_them() -> None:
    with pc.override_lax():
        run(lambda x: jax.lax.psum(x, "x") + jax.lax.psum(2 * x, "x"))
    _, line, note = str(pc.override_report()).splitlines()
    assert line.startswith("  1 x psum of 4096 bytes by pallas ") and "stops" not in line
    assert note.endswith("; modelled times are of v5p, which stands for simulated devices")


@pytest.mark.full
def test_the_report_says_what_is_exposed_before_and_after() -> None:
    """A SparseCore's gather stops the core no longer; one that XLA would have hidden, now does."""
    for line in build("v6e:4x4").replaced:
        assert line.before_us is None or line.before_us > 50  # None of more than the table has
        assert line.after_us == (0 if line.by.endswith(":sc") else line.before_us) or (
            line.before_us is line.after_us is None
        )
    left = {line.op: line for line in build("v5e:4x4").left}
    assert (left["all_gather"].before_us, left["all_gather"].after_us) == (0, 0)
    forced = build("v5e:4x4", everything=True)
    lines = [line for line in forced.replaced if line.op == "all_gather"]
    assert lines  # one for each algorithm
    for line in lines:
        assert line.before_us == 0 and line.after_us and line.after_us > 50
    assert "stops the core 0 -> " in str(forced)


@pytest.fixture
def warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """What is warned of as a function runs under `override_lax`, in a process that is new to it."""
    monkeypatch.setattr(overrides, "_ever_replaced", False)
    monkeypatch.setattr(overrides, "_told", set())

    def warned(fn: Callable[[], Any], **options: Any) -> list[str]:
        caplog.clear()
        with pc.override_lax(**options):
            fn()
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    return warned


def test_bytes_are_the_callers_and_not_those_of_whole_tiles() -> None:
    with pc.override_lax():
        run(lambda x: jax.lax.psum_scatter(x[:, :3], "x", tiled=True))
    (line,) = pc.override_report().replaced
    assert (line.op, line.nbytes) == ("psum_scatter", 8 * 3 * 4)


def test_calls_out_of_reach_are_told_each_time(warnings: Callable[..., list[str]]) -> None:
    """Also where an earlier context has replaced some, as in a notebook."""

    def both(x: jax.Array) -> jax.Array:
        return bound_before(x, "x") + jax.lax.pmax(x, "x")

    for _ in range(2):
        (warning,) = warnings(lambda: run(lambda x: bound_before(x, "x")))
        assert "0 replaced, 0 left to lax" in warning and "pallas_collectives.overridden" in warning
        assert "out of reach: psum, by a name bound before (`from jax.lax import psum`)" in warning
        assert pc.override_report().unreached == ("psum",)
        assert not warnings(lambda: run(doubled_sum))
        assert pc.override_report().unreached == ()
    (line,) = pc.override_report().replaced
    assert (line.op, line.times, line.nbytes) == ("psum", 1, 8 * 128 * 4)
    assert not warnings(lambda: run(both)), "others were replaced"
    told = str(pc.override_report())
    assert "1 replaced, 0 left to lax" in told and "out of reach: psum, by" in told


def test_what_a_kept_function_is_hides_no_other(warnings: Callable[..., list[str]]) -> None:
    def program(x: jax.Array) -> jax.Array:
        return bound_before(x, "x") + jax.lax.pmax(x, "x")

    with pc.override_lax():
        with pc.override_lax(keep=["pmax"]):
            run(program)
        kept = pc.override_report()
        run(lambda x: jax.lax.pmin(x, "x"))
    assert (kept.kept, kept.unreached) == (("pmax",), ("psum",))
    outer = pc.override_report()
    assert (outer.kept, outer.unreached) == ((), ("psum",))


def mapped_sum(x: jax.Array) -> jax.Array:
    return jax.vmap(lambda row: jax.lax.psum(row, "v"), axis_name="v")(x) + jax.lax.psum(x, "x")


def sum_and_norm(x: jax.Array) -> jax.Array:
    return pc.psum_residual_rmsnorm(x, x, x[0], "x")[0]


def ragged(x: jax.Array) -> jax.Array:
    me, ones = jax.lax.axis_index("x"), jnp.ones(2, int)
    tables = jnp.arange(2), ones, jnp.full(2, me), ones
    return jax.lax.ragged_all_to_all(x, 0 * x, *tables, axis_name="x")


@pytest.mark.parametrize("program", [mapped_sum, sum_and_norm, ragged])
def test_nothing_is_out_of_reach_that_our_own_code_or_vmap_binds(program: Any) -> None:
    """Nor is told what nobody called."""
    unchecked = program is mapped_sum  # JAX itself does not take it under `check_vma=True`
    specs: dict[str, Any] = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": not unchecked}
    mapped = jax.shard_map(program, mesh=harness.mesh(2), **specs)
    with pc.override_lax(everything=True):
        jax.jit(lambda x: mapped(x))(harness.random((16, 128), "float32"))
    report = pc.override_report()
    assert report.unreached == () and sum(line.times for line in report.replaced) == 1


def test_sums_that_jax_adds_without_lax_are_told(warnings: Callable[..., list[str]]) -> None:
    """With `check_vma=False`, those of operands that `in_specs` replicate."""
    x = harness.random((2, 8, 128), "float32")
    specs: dict[str, Any] = {"in_specs": (P(), P("x")), "out_specs": P(), "check_vma": False}
    loss = jax.shard_map(
        lambda w, x: jax.lax.pmean(jnp.sum(w * x), "x"), mesh=harness.mesh(2), **specs
    )
    assert not warnings(lambda: jax.jit(jax.grad(loss))(x[0], x))
    report = pc.override_report()
    assert "out of reach: psum, by" in str(report) and "or by JAX in a derivative" in str(report)
    assert report.replaced


def test_programs_without_calls_are_warned_of_until_some_were_replaced(
    warnings: Callable[..., list[str]],
) -> None:
    def sharded() -> None:
        jax.jit(lambda x: x + 1)(np.ones(3))

    (warning,) = warnings(sharded)
    assert "programs built: 1, calls in them that it replaces: none" in warning
    assert "under jax.jit with shardings XLA makes the collectives" in warning
    assert "Calls over one device, or of nothing, need no kernel" in warning
    assert "jax.experimental.custom_partitioning knows no mesh" in warning
    assert not warnings(sharded), "told already"
    warnings(lambda: run(doubled_sum))
    overrides._told.clear()
    assert not warnings(sharded), "a step that is compiled already may hold ours"


@pytest.mark.usefixtures("fresh_counts")
def test_a_custom_partition_knows_no_mesh() -> None:
    """Its collectives are lax's; JAX 0.10 traces them outside of all contexts, besides."""
    on = harness.mesh(2)
    rows = jax.NamedSharding(on, P("x"))
    x = jax.device_put(np.arange(4.0), rows)
    for module, told in ((jax.lax, None), (pc, "no mesh is known here: ('x',) are axes of vmap")):
        swap = functools.partial(module.ppermute, axis_name="x", perm=[(0, 1), (1, 0)])
        swapped = custom_partitioning(lambda x: x)
        swapped.def_partition(
            partition=lambda mesh, *_, swap=swap: (mesh, swap, rows, (rows,)),
            infer_sharding_from_operands=lambda *_: rows,
            sharding_rule="i -> i",
        )
        with pc.override_lax():
            np.testing.assert_array_equal(jax.jit(swapped)(x), [2, 3, 0, 1])
        assert not pc.override_report().replaced
        if told:
            assert {why[: len(told)] for why in pc.fallback_counts()} == {told}


def test_what_only_and_keep_leave_is_told_and_not_warned_of(
    warnings: Callable[..., list[str]],
) -> None:
    for options in ({"keep": ["psum"]}, {"only": ["pmax"]}):
        assert not warnings(lambda: run(doubled_sum), **options)
        assert pc.override_report().kept == ("psum",), "and no function that nobody called"
        assert pc.override_report().unreached == ()
        assert "left to lax by only= or keep=, and not counted: psum" in str(pc.override_report())


def test_a_context_without_programs_says_why(
    warnings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overrides, "_last", OverrideReport(ended=False))
    assert "no context has ended yet" in str(pc.override_report())
    step = harness.per_device(doubled_sum, harness.mesh(2))
    x = harness.random((2, 8, 128), "float32")
    warnings(lambda: step(x))
    assert pc.override_report().replaced
    for nothing_new in (lambda: step(x), lambda: jax.jit(doubled_sum)):
        assert not warnings(nothing_new)
        assert "no program was built: each was compiled before" in str(pc.override_report())


@pytest.mark.parametrize(
    "wire, taken", [({"psum": "int8"}, True), ({"psum": "int8", "pmean": None}, False)]
)
def test_the_wire_of_sums_is_that_of_means_unless_these_are_named(
    wire: dict[str, Any], taken: bool
) -> None:
    x = np.ones((4, 2048, 128), np.float32)
    run = harness.per_device(lambda x: jax.lax.pmean(x, "x"), harness.mesh(4))
    with pc.override_lax(wire=wire):
        run.lower(x)
    report = pc.override_report()
    assert [bool(each.sent) for each in report.wires] == [True] * taken
    assert report.unused == (() if taken else ("psum",))
    with pc.override_lax(only=["psum"], wire={"psum": "int8"}):
        run.lower(x)
    assert not pc.override_report().wires  # lax keeps means


def test_calls_over_a_wire_are_counted_as_calls_and_named_as_lax_names_them() -> None:
    """An exchange is an all-to-all and a gather, and one psum all the same."""

    def program(x: jax.Array) -> Any:
        wide = jax.lax.pmean(x, "x"), jax.lax.pmax(x[:8], "x")
        return *wide, jax.lax.psum_scatter(x, "x", tiled=True)

    wire = {"pmean": pc.Wire("int8", group=256), "all_gather": "int8", "psum": "int8"}
    run = harness.per_device(program, harness.mesh(4))
    with pc.override_lax(wire=wire):
        run.lower(np.ones((4, 2048, 128), np.float32))
    report = pc.override_report()
    assert [(line.op, line.times) for line in report.replaced] == [
        ("psum", 1), ("pmax", 1), ("psum_scatter", 1)
    ]  # fmt: skip
    assert report.unused == ("all_gather",)
    assert "wire= for all_gather was unused: no call has this name" in str(report)
