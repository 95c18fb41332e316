"""What `override_lax` replaces, for whom, and for how long."""

import functools
import threading
from collections.abc import Iterator
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
from overriding import NAMES, build, doubled_sum, run, untouched
from pallas_collectives import collectives
from pallas_collectives.errors import CollectiveError, WireError


@pytest.fixture(autouse=True)
def fresh_counts() -> Iterator[None]:
    pc.reset_counts()
    yield
    assert untouched(), "lax's functions are back after every test"


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


def test_what_others_have_put_into_lax_is_back_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(*args: Any, **kwargs: Any) -> Any:
        return bound_before(*args, **kwargs)

    monkeypatch.setattr(jax.lax, "psum", counted)
    with pc.override_lax():
        assert jax.lax.psum is not counted
    assert jax.lax.psum is counted
    monkeypatch.undo()


def test_the_report_is_of_a_context_that_an_exception_ended() -> None:
    """A step that was built, and then failed, is what the report is read for."""
    with pc.override_lax():
        pass
    with pytest.raises(RuntimeError, match="from within"), pc.override_lax():
        run()
        raise RuntimeError("from within")
    assert [line.op for line in pc.override_report().replaced] == ["psum"]


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


# What is replaced, and what is lax's -------------------------------------------------------------


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

    def turns() -> Iterator[int]:
        yield 3

    async def later() -> int:
        return 3

    class Turns:
        __call__ = turns

    for lazy in (turns, later, Turns(), functools.partial(turns)):
        with pytest.raises(CollectiveError, match="runs after its call"):
            pc.overridden(lazy)
    for wrong in ("", [], 0):
        with pytest.raises(WireError, match="map names of functions"), pc.override_lax(wire=wrong):  # type: ignore[arg-type]
            pass


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
    assert left.why and f"1 x psum of 4 bytes without its wire int8: {left.why}" in str(left)
    assert pc.override_report().unused == ()


def test_wires_that_no_function_takes() -> None:
    for wrong, match in (
        ({"axis_index": "int8"}, "take one are all_gather"),
        ({"psum": "int5"}, "int8"),
        ({"psum": pc.Wire("int8", 128, "stochastic", jax.random.key(0))}, "round to nearest"),
        ({"axis_index": None}, "take one are all_gather"),
    ):
        with pytest.raises(WireError, match=match), pc.override_lax(wire=wrong):
            pass
    with pc.override_lax(wire={"psum": None}, wire_backward={"psum": None}):
        pass
    assert pc.override_report().unused == ()
    for options in ({"only": ["all_gather"]}, {"keep": ["psum"]}):
        with (
            pytest.raises(WireError, match="lax keeps that function"),
            pc.override_lax(wire={"psum": "int8"}, **options),
        ):
            pass
