"""What `override_lax` replaces, for whom, and for how long."""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import psum as bound_before
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives import collectives
from pallas_collectives.backends import overrides
from pallas_collectives.errors import CollectiveError, WireError

NAMES = sorted(vars(collectives.LAX))


@pytest.fixture(autouse=True)
def fresh_counts() -> Iterator[None]:
    pc.reset_counts()
    yield
    assert untouched(), "lax's functions are back after every test"


def untouched() -> bool:
    return all(getattr(jax.lax, name) is getattr(collectives.LAX, name) for name in NAMES)


def doubled_sum(x: jax.Array) -> jax.Array:
    return 2 * jax.lax.psum(x, "x")


def run(fn: Any = doubled_sum) -> np.ndarray:
    x = harness.random((2, 8, 128), "float32")
    return np.asarray(harness.per_device(fn, harness.mesh(2))(x))


def built() -> set[tuple[str, str]]:
    return {(op, backend) for op, backend, _ in pc.counts()}


def test_every_collective_of_ours_is_replaced() -> None:
    ours = {name for name in dir(collectives) if callable(getattr(lax, name, None))}
    assert ours == set(NAMES)
    with pc.override_lax():
        assert not any(getattr(jax.lax, name) is getattr(collectives.LAX, name) for name in NAMES)
        assert lax.psum is jax.lax.psum


def test_kernels_serve_inside_and_lax_outside() -> None:
    want = run()
    assert not pc.counts()
    with pc.override_lax():
        np.testing.assert_array_equal(run(), want)
    assert built() == {("all_reduce", "pallas")}


def test_jitted_functions_are_traced_again_inside_and_not_mixed_up() -> None:
    on, x = harness.mesh(2), harness.random((2, 8, 128), "float32")
    jitted = harness.per_device(doubled_sum, on)
    want = jitted(x)
    with pc.override_lax():
        np.testing.assert_array_equal(jitted(x), want)
        assert built() == {("all_reduce", "pallas")}
    program = str(jax.make_jaxpr(jitted)(x))
    assert "pallas_" not in program
    with pc.override_lax():
        assert "pallas_psum" in str(jax.make_jaxpr(jitted)(x))


def test_it_nests() -> None:
    with pc.override_lax():
        with pc.override_lax():
            assert not untouched()
        assert not untouched()
        run()
    assert built() == {("all_reduce", "pallas")}


def test_it_ends_on_an_exception() -> None:
    with pytest.raises(RuntimeError, match="from within"), pc.override_lax(), pc.override_lax():
        raise RuntimeError("from within")
    assert untouched()
    run()
    assert not pc.counts()


def test_as_a_decorator() -> None:
    @pc.override_lax()
    def model() -> np.ndarray:
        return run()

    np.testing.assert_array_equal(model(), model())
    assert built() == {("all_reduce", "pallas")}


def test_another_thread_keeps_laxs() -> None:
    programs: dict[str, str] = {}
    x = harness.random((2, 8, 128), "float32")
    inside, done = threading.Event(), threading.Event()

    def trace() -> str:
        return str(jax.make_jaxpr(harness.per_device(doubled_sum, harness.mesh(2)))(x))

    def in_context() -> None:
        with pc.override_lax():
            inside.set()
            assert done.wait(60)
            programs["inside"] = trace()

    thread = threading.Thread(target=in_context)
    thread.start()
    assert inside.wait(60)
    programs["outside"] = trace()
    with pc.override_lax():
        programs["both"] = trace()
    assert not untouched(), "the other thread's context is open"
    done.set()
    thread.join()
    assert "pallas_psum" in programs["inside"]
    assert "pallas_psum" not in programs["outside"]
    assert "pallas_psum" in programs["both"]


def test_many_threads_enter_and_leave() -> None:
    failures: list[BaseException] = []

    def enter_and_leave() -> None:
        try:
            for _ in range(200):
                with pc.override_lax():
                    assert not untouched()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=enter_and_leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_use_backend_within() -> None:
    with pc.override_lax(), pc.use_backend("xla"):
        run()
    assert built() == {("psum_invariant", "xla")}
    assert not pc.fallback_counts()
    assert not pc.override_report().unreached, "our own code has lax serve"


def test_names_bound_before_are_out_of_reach() -> None:
    with pc.override_lax():
        run(lambda x: bound_before(x, "x"))
    assert not pc.counts()


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_sums_that_differentiation_adds_are_ours(where: str) -> None:
    """The gradient of a weight that is equal everywhere is a sum that nobody wrote."""
    on, x = harness.mesh(2), harness.random((2, 8, 128), "float32")
    w = harness.random((8, 128), "float32", 1)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(jnp.sum(jnp.sin(w * x)), "x")

    def gradient() -> np.ndarray:
        specs: dict[str, Any] = {"mesh": on, "in_specs": (P(), P("x")), "out_specs": P()}
        if where == "inside":
            mapped = jax.shard_map(jax.grad(loss), **specs)
        else:
            mapped = jax.grad(jax.shard_map(loss, **specs))
        program = str(jax.make_jaxpr(mapped)(w, x))
        programs.append((program.count(" psum_invariant["), program.count("pallas_psum_inv")))
        return np.asarray(jax.jit(mapped)(w, x))

    programs: list[tuple[int, int]] = []
    want = gradient()
    with pc.override_lax():
        np.testing.assert_allclose(gradient(), want, rtol=1e-6)
    (of_lax, none), (left, ours) = programs
    assert of_lax == ours > 0
    assert none == left == 0
    assert {backend for _, backend, _ in pc.counts()} == {"pallas"}
    assert not pc.fallback_counts()


# What is replaced, and what is said of it ---------------------------------------------------------


def build(topology: str, **options: Any) -> pc.OverrideReport:
    """A gather, a scatter and a permute, with gradients, under `override_lax` for TPUs."""
    pytest.importorskip("libtpu")
    on = harness.tpu_mesh(topology, {"x": len(harness._topology(topology).devices)})
    n = on.size

    def loss(x: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(x, "x", tiled=True)
        part = jax.lax.psum_scatter(jnp.sin(whole).astype("float32"), "x", tiled=True)
        return jnp.sum(jax.lax.ppermute(part, "x", [(d, (d + 1) % n) for d in range(n)]) ** 2)

    spec = P("x")
    run = jax.shard_map(jax.grad(loss), mesh=on, in_specs=spec, out_specs=spec, check_vma=False)
    sharding = jax.NamedSharding(on, spec)
    x = jax.ShapeDtypeStruct((n * 2048, 1024), "bfloat16", sharding=sharding)
    with pc.override_lax(**options):
        jax.jit(run).lower(x)
    return pc.override_report()


def served(report: pc.OverrideReport) -> dict[str, set[str]]:
    by: dict[str, set[str]] = {}
    for line in (*report.replaced, *report.left):
        by.setdefault(line.op, set()).add(line.by)
    return by


def test_what_xla_runs_beside_compute_stays_laxs() -> None:
    """On v5e gathers, also the one that is a scatter's transpose, and permutes."""
    report = build("v5e:4x4")
    by = served(report)
    assert by["all_gather"] == by["ppermute"] == {"lax"}
    assert {name.partition(" ")[0] for name in by["psum_scatter"]} == {"pallas"}
    assert sum(line.times for line in report.left if line.op == "all_gather") == 2
    assert all("beside compute on v5e" in line.why for line in report.left)
    assert "2 replaced, 4 left to lax" in str(report)
    assert {line.by for line in build("tpu7x:2x2x1").replaced} == set()


def test_a_sparsecore_runs_what_moves_much_where_xla_would_stop_the_core() -> None:
    by = served(build("v6e:4x4"))
    assert any(name.endswith(":sc") for name in by["all_gather"])
    assert any(name.endswith(":sc") for name in by["psum_scatter"])


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
    report = overrides.OverrideReport((overrides.Line("psum", "ours", "so", 1, 4, *us),))
    assert f"\n  1 x psum of 4 bytes by ours{said}: so\n" in str(report)


def test_sums_over_calls_are_told_from_what_one_takes_and_whose_times_they_are() -> None:
    two = overrides.Line("psum", "ours", "modelled 4.8 us", 2, 8, 9.6, 9.6)
    of_two = functools.partial(overrides.OnWire, "psum", "int8", times=2, nbytes=8)
    wires = of_two(why="", sent=6), of_two(why="so", sent=0)
    of_v5e = str(overrides.OverrideReport((two,), wires=wires, chip="v5e")).splitlines()
    assert of_v5e[1:] == [
        "  2 x psum of 8 bytes in all by ours, stops the core for 10 us in all, as long as lax's"
        " (modelled); each: modelled 4.8 us",
        "  2 x psum over wire int8: 6 bytes in place of 8 in all",
        "  2 x psum without its wire int8; each: so",
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


def test_everything_is_replaced_on_request() -> None:
    for topology in ("v6e:4x4", "tpu7x:2x2x1"):
        report = build(topology, everything=True)
        assert not report.left
        assert not any(line.by.endswith(":sc") for line in report.replaced)


def test_functions_can_be_named() -> None:
    # A transpose goes with the call that it belongs to.
    by = served(build("v6e:4x4", keep=["ppermute", "psum_scatter"], everything=True))
    assert set(by) == {"all_gather", "psum_scatter"}
    assert served(build("v6e:4x4", only="ppermute", everything=True)).keys() == {"ppermute"}
    with pytest.raises(CollectiveError, match=r"'all_gathr'.*use names from that list"):
        build("v6e:4x4", only=["all_gathr"])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"ahead": "no"}, "ahead='no': it must be True or False"),
    ({"everything": 1}, "everything=1: it must be True or False"),
    ({"only": 3}, r"only=3: .*write it like only=\['psum'\]"),
    ({"keep": None}, "keep=None: it must name one or more of lax's"),
    ({"keep": [3]}, r"keep=\[3\]: 3 is not one of lax's collectives \(all_g"),
    ({"only": "x"}, "only='x': 'x' is not one of lax's collectives \\(all_gather"),
    ({"only": []}, r"only=\[\]: with keep=\(\) no function is left to replace"),
    ({"only": "psum", "keep": "psum"}, "only='psum': with keep='psum' no function is left"),
    ({"only": [["psum"]]}, r"only=\[\['psum'\]\]: \['psum'\] is not one of lax's"),
]


@pytest.mark.parametrize("options, message", WRONG)
def test_arguments_of_a_wrong_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CollectiveError, match=message), pc.override_lax(**options):
        pass
    with pytest.raises(CollectiveError, match=message):
        pc.overridden(abs, **options)


def test_what_is_no_function_has_no_collectives() -> None:
    with pytest.raises(CollectiveError, match="fn=3: it must be a function"):
        pc.overridden(3)  # type: ignore[arg-type]
    for wrong in ("", [], 0):
        with pytest.raises(WireError, match="map names of functions"), pc.override_lax(wire=wrong):  # type: ignore[arg-type]
            pass


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
    assert not warnings(sharded), "told already"
    warnings(lambda: run(doubled_sum))
    overrides._told.clear()
    assert not warnings(sharded), "a step that is compiled already may hold ours"


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
    monkeypatch.setattr(overrides, "_last", overrides.OverrideReport(ended=False))
    assert "no context has ended yet" in str(pc.override_report())
    step = harness.per_device(doubled_sum, harness.mesh(2))
    x = harness.random((2, 8, 128), "float32")
    warnings(lambda: step(x))
    assert pc.override_report().replaced
    for nothing_new in (lambda: step(x), lambda: jax.jit(doubled_sum)):
        assert not warnings(nothing_new)
        assert "no program was built: each was compiled before" in str(pc.override_report())


def test_wires_of_functions_by_name() -> None:
    x = np.random.default_rng(0).normal(size=(2, 1024, 512)).astype(np.float32)

    def program(x: jax.Array) -> Any:
        return jax.lax.psum(x, "x"), jax.lax.psum(jnp.float32(1) * x[0, 0], "x")

    def sums(**options: Any) -> list[np.ndarray]:
        with pc.override_lax(**options), pc.use_backend("xla"):
            return [np.asarray(y) for y in harness.per_device(program, harness.mesh(2))(x)]

    exact, narrow = sums(), sums(wire={"psum": "int8"})
    error = np.abs(exact[0] - narrow[0])
    assert 0 < error.max() < 0.1
    np.testing.assert_array_equal(exact[1], narrow[1])  # too small: left out, and counted
    assert ("all_reduce", "int8", "") in pc.wire_counts()
    assert any(wire == "" for _, wire, _ in pc.wire_counts())
    used, left = pc.override_report().wires
    assert (used.op, used.wire, used.why, used.times) == ("psum", "int8", "", 1)
    assert 0.25 < used.sent / used.nbytes < 0.27
    assert f"1 x psum over wire int8: {used.sent} bytes in" in str(pc.override_report())
    assert left.why and f"1 x psum without its wire int8: {left.why}" in str(left)
    assert pc.override_report().unused == ()


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
    assert "wire= for all_gather was unused: no all_gather was built" in str(report)


def test_wires_that_no_function_takes() -> None:
    for wrong, match in (
        ({"pmax": "int8"}, "take one are all_gather"),
        ({"psum": "int5"}, "int8"),
        ({"psum": None}, "round to nearest"),
    ):
        with pytest.raises(WireError, match=match), pc.override_lax(wire=wrong):
            pass
    for options in ({"only": ["all_gather"]}, {"keep": ["psum"]}):
        with (
            pytest.raises(WireError, match="lax keeps that function"),
            pc.override_lax(wire={"psum": "int8"}, **options),
        ):
            pass
