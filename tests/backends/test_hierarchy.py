"""Collectives over several slices: values, gradients, and who serves which step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import harness
import pallas_collectives as pc
from against_lax import check, loss
from pallas_collectives.backends import slices, wire_choice
from pallas_collectives.backends.plans import How
from pallas_collectives.backends.slices import ACROSS
from pallas_collectives.errors import AlgorithmError, SliceError, UnboundAxisError
from pallas_collectives.topology import placement
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire

ALL = ("x", "y", "z")
# (mesh, axes of the collective, axes that lead to other slices)
LAYOUTS = {
    "two-slices-of-four": ((2, 4), ("x", "y"), ("x",)),
    "inner-axis-first": ((4, 2), ("x", "y"), ("y",)),
    "named-in-another-order": ((4, 2), ("y", "x"), ("x",)),
    "four-slices-of-two": ((4, 2), ("x", "y"), ("x",)),
    "outer-axis-between": ((2, 2, 2), ALL, ("y",)),
    "two-outer-axes": ((2, 2, 2), ALL, ("x", "z")),
    "others-beside": ((2, 2, 2), ("y", "z"), ("y",)),
}
CALLS: dict[str, Callable[..., Any]] = {
    "psum": lambda m, x, axes: m.psum(x, axes),
    "all_gather": lambda m, x, axes: m.all_gather(x, axes, tiled=True),
    "psum_scatter": lambda m, x, axes: m.psum_scatter(x, axes, tiled=True),
}
MAIN = tuple(CALLS)
FORMS: dict[str, Callable[..., Any]] = {
    "psum-odd": CALLS["psum"],
    "all_gather-stacked": lambda m, x, axes: m.all_gather(x, axes, axis=1),
    "all_gather-columns": lambda m, x, axes: m.all_gather(x, axes, axis=1, tiled=True),
    "psum_scatter-columns": lambda m, x, axes: m.psum_scatter(
        x, axes, scatter_dimension=1, tiled=True
    ),
    "psum_scatter-stacked": lambda m, x, axes: m.psum_scatter(
        x.reshape(-1, jax.lax.axis_size(axes), 128), axes, scatter_dimension=1
    ),
}


@pytest.fixture(autouse=True)
def _counts_from_zero() -> None:
    pc.reset_counts()


def served() -> tuple[set[str], set[tuple[str, Any]]]:
    """What kernels served, and what else did, as (collective, how counted)."""
    counted = pc.counts()
    kernels = {op for op, backend, _ in counted if backend == "pallas"}
    return kernels, {(op, how) for op, backend, how in counted if backend != "pallas"}


def run(fn: Callable[[jax.Array], Any], on: Mesh, x: np.ndarray) -> np.ndarray:
    return np.asarray(harness.per_device(fn, on, check_vma=False)(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_laxs_by_kernels_inside_and_lax_across(layout: str) -> None:
    sizes, axes, outer = LAYOUTS[layout]
    on = harness.mesh(*sizes)
    x = harness.random((on.size, 16, 128), "float32")
    with pc.across_slices(*outer):
        check(lambda m, x: [CALLS[call](m, x, axes) for call in MAIN], x, on=on, kernels=False)
    kernels, others = served()
    assert {"reduce_scatter", "all_gather"} <= kernels
    assert others == {("psum", ACROSS), ("all_gather", ACROSS), ("psum_scatter", ACROSS)}
    assert not pc.fallback_counts()


@pytest.mark.full
@pytest.mark.parametrize("layout", ["two-slices-of-four", "outer-axis-between"])
def test_every_form_of_the_calls(layout: str) -> None:
    sizes, axes, outer = LAYOUTS[layout]
    on = harness.mesh(*sizes)
    x = harness.random((8, 8, 1024), "float32")
    operands = {"psum_scatter-columns": lambda x: x, "psum-odd": lambda x: x[:5, :77]}

    def all_forms(m: Any, x: jax.Array) -> dict[str, jax.Array]:
        cut = {name: operands.get(name, lambda x: x[:, :128])(x) for name in FORMS}
        return {name: call(m, cut[name], axes) for name, call in FORMS.items()}

    with pc.across_slices(*outer):
        check(all_forms, x, on=on, kernels=False)
    assert {how for _, how in served()[1]} == {ACROSS}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout, check_vma",
    [("two-slices-of-four", True), ("inner-axis-first", False), ("outer-axis-between", True)],
)
def test_gradients_are_laxs(layout: str, check_vma: bool) -> None:
    sizes, axes, outer = LAYOUTS[layout]

    def grads(m: Any, x: jax.Array) -> list[jax.Array]:
        return [jax.grad(loss(lambda x, n=n: CALLS[n](m, x, axes)))(x) for n in MAIN]

    with pc.across_slices(*outer):
        check(grads, on=harness.mesh(*sizes), check_vma=check_vma, kernels=False)
    assert {how for _, how in served()[1]} == {ACROSS}
    assert {"all_gather", "reduce_scatter"} <= served()[0]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "uint32", "bool", "complex64"])
def test_dtypes(dtype: str) -> None:
    x = harness.random((8, 16, 128), dtype)

    def several(m: Any, x: jax.Array) -> list[jax.Array]:
        axes, ordered = ("x", "y"), not jnp.iscomplexobj(x)
        return [m.psum(x, axes), m.all_gather(x, axes), *([m.pmax(x, axes)] if ordered else [])]

    with pc.across_slices("x"):
        check(several, x, on=harness.mesh(2, 4), kernels=False)
    assert not pc.fallback_counts()


@pytest.mark.full
def test_minima_means_and_broadcasts() -> None:
    axes = ("x", "y")

    def several(m: Any, x: jax.Array) -> list[jax.Array]:
        return [m.pmin(x, axes), m.pmax(x[0, 0], axes), m.pmean(x, axes)]

    with pc.across_slices("y"):
        check(several, on=harness.mesh(4, 2), kernels=False)
        on = harness.mesh(2, 4)
        x = harness.random((8, 8, 128), "float32")
        got = run(lambda a: pc.pbroadcast(a, axes, 5), on, x)
    np.testing.assert_array_equal(got, np.broadcast_to(x[5], x.shape))
    assert not pc.fallback_counts()


def test_precise_sums_stay_wide_across_too() -> None:
    on, x = harness.mesh(2, 4), np.full((8, 16, 128), 1 / 3).astype(jnp.bfloat16)
    x[0] = 256  # beside which bfloat16 forgets a third
    with pc.across_slices("x"):
        got = run(lambda a: pc.psum(a, ("x", "y"), precise=True), on, x)
    want = x.astype(np.float32).sum(axis=0).astype(jnp.bfloat16)
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


def test_one_axis_that_leads_within_a_slice_is_as_without() -> None:
    with pc.across_slices("x"):
        check(lambda m, x: m.psum(x, "y"), on=harness.mesh(2, 4))
    assert served()[0] == {"all_reduce"}


@pytest.mark.parametrize(
    "fn, rule",
    [
        (lambda m, x: m.psum(x, "x"), "no two of its devices are in the same slice"),
        (
            lambda m, x: m.psum(x, ("x", "y"), axis_index_groups=[[0, 1, 4, 5], [2, 3, 6, 7]]),
            "reach into several slices",
        ),
        (lambda m, x: m.all_to_all(x, ("x", "y"), 0, 0, tiled=True), "cannot be split into steps"),
        (lambda m, x: m.ppermute(x, ("x", "y"), [(0, 7)]), "cannot be split into steps"),
    ],
)
def test_what_has_no_steps_is_laxs_and_counted(fn: Callable[..., Any], rule: str) -> None:
    on = harness.mesh(2, 4)
    with pc.across_slices("x"):
        check(fn, on=on, check_vma=False, kernels=False)
        (reason,) = pc.fallback_counts()
        assert rule in reason and not served()[0]
        with pytest.raises(SliceError, match=rule), pc.use_backend("pallas"):
            run(functools.partial(fn, pc), on, harness.random((8, 16, 128), "float32"))


def test_groups_within_slices_are_served_by_kernels() -> None:
    groups = [[0, 1, 2, 3], [7, 6, 5, 4]]
    with pc.across_slices("x"):
        check(
            lambda m, x: m.psum(x, ("x", "y"), axis_index_groups=groups),
            on=harness.mesh(2, 4),
            check_vma=False,
        )


def test_algorithms_go_to_the_step_that_has_them() -> None:
    on, x = harness.mesh(2, 4), harness.random((8, 16, 128), "float32")
    with pc.across_slices("x"):
        run(lambda a: pc.all_gather(a, ("x", "y"), algorithm="unidirectional"), on, x)
        assert ("all_gather", "pallas", "unidirectional") in pc.counts()
        with pytest.raises(AlgorithmError, match="'ring' for psum across slices"):
            run(lambda a: pc.psum(a, ("x", "y"), algorithm="ring"), on, x)


def test_an_axis_that_is_not_there_is_refused() -> None:
    on, x = harness.mesh(2, 4), harness.random((8, 16, 128), "float32")
    with (
        pc.across_slices("dcn"),
        pytest.raises(UnboundAxisError, match=r"across_slices\('dcn'\): .*\('x', 'y'\)"),
    ):
        run(lambda a: pc.psum(a, "x"), on, x)


@pytest.mark.full
def test_a_jitted_function_is_traced_again_inside_and_outside() -> None:
    on, x = harness.mesh(2, 4), harness.random((8, 16, 128), "float32")
    gather = harness.per_device(lambda a: pc.all_gather(a, ("x", "y")), on)
    gather(x)
    with pc.across_slices("x"):
        gather(x)
        with pc.across_slices():
            gather(x)
    assert sum(n for (_, _, how), n in pc.counts().items() if how == ACROSS) == 1


class Device:
    """A device that says where it is."""

    def __init__(self, slice_index: int) -> None:
        self.slice_index = slice_index


def slices_of(mesh_shape: tuple[int, ...], slice_indices: list[int]) -> Any:
    """What `slices` is told while lowering: axis names and devices."""
    devices = np.array([Device(i) for i in slice_indices], object).reshape(mesh_shape)
    names = ("x", "y", "z")[: len(mesh_shape)]
    return type("Known", (), {"axis_names": names, "devices": devices})()


def test_devices_say_themselves_in_which_slice_they_are() -> None:
    known = slices_of((2, 4), [5] * 4 + [7] * 4)
    both, one = Group(("x", "y"), (2, 4)), Group(("y",), (4,))
    assert slices._of_devices(both, known).tolist() == [[0] * 4, [1] * 4]
    assert slices.split(one, slices._of_devices(one, known)) is None


def test_gpus_of_one_host_are_those_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all that the job has: along "y" each group lies in a host, along "x" in two."""
    token = slices._mesh.set(known := slices_of((2, 4), [5] * 4 + [7] * 4))
    monkeypatch.setattr(placement, "Mesh", type(known))
    pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
    wire, how, small = Wire("int8", optional=True), How("nccl"), np.zeros(1, np.float32)
    try:
        for group, of_one in (
            (Group(("y",), (4,)), True),
            (Group(("x",), (2,)), False),
            (Group(("x", "y"), (2, 4), pairs), True),
        ):
            assert slices.one_host_has(group) == of_one
            assert bool(wire_choice._linked("psum", small, wire, group, how)) == of_one  # type: ignore[arg-type]
    finally:
        slices._mesh.reset(token)


def test_each_device_is_numbered_once() -> None:
    """Also in a pod, at each collective."""
    hashed: list[int] = []

    class Index(int):
        def __hash__(self) -> int:
            hashed.append(self)
            return int(self)

    known = slices_of((64,), [Index(i // 8) for i in range(64)])
    group = Group(("x",), (64,))
    for _ in range(2):
        assert slices._of_devices(group, known).tolist() == [i // 8 for i in range(64)]
    assert len(hashed) <= 3 * 64


def test_an_axis_over_two_slices_is_split_by_groups() -> None:
    group = Group(("x",), (8,))
    known = slices_of((8,), [0, 0, 1, 1, 0, 0, 1, 1])
    parts = slices.split(group, slices._of_devices(group, known))
    assert parts is not None
    assert parts.inside.index_groups == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert parts.across.index_groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert parts.order == (0, 1, 4, 5, 2, 3, 6, 7)


@pytest.mark.parametrize(
    "shape, slice_indices, rule",
    [
        ((8,), [0, 0, 0, 1, 1, 1, 1, 1], "more devices in one slice"),
        ((2, 4), [0, 1, 0, 1, 0, 1, 1, 0], "in different ways"),
    ],
)
def test_slices_that_cannot_be_split_into_steps(
    shape: tuple[int, ...], slice_indices: list[int], rule: str
) -> None:
    group = Group(("x",), shape[:1])
    with pytest.raises(SliceError, match=rule):
        slices.split(group, slices._of_devices(group, slices_of(shape, slice_indices)))


@pytest.mark.full
@pytest.mark.parametrize("call", ["psum", "all_gather", "psum_scatter"])
@pytest.mark.parametrize("places", [[0, 0, 1, 1, 0, 0, 1, 1], [0, 1] * 4])
def test_an_axis_over_two_slices_as_its_devices_lie(
    monkeypatch: pytest.MonkeyPatch, call: str, places: list[int]
) -> None:
    on, x = harness.mesh(8), harness.random((8, 64, 128), "float32")
    monkeypatch.setattr(slices, "_of_devices", lambda group, mesh: np.array(places))
    jax.clear_caches()
    got = run(lambda a: CALLS[call](pc, a, ("x",)), on, x)
    kernels, others = served()
    assert kernels and {how for _, how in others} == {ACROSS}
    monkeypatch.undo()
    np.testing.assert_array_equal(got, run(lambda a: CALLS[call](jax.lax, a, ("x",)), on, x))


def test_a_wrong_order_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    on, x = harness.mesh(2, 2, 2), harness.random((8, 8, 128), "float32")
    monkeypatch.setattr(slices, "_reordered", lambda x, axis, order: x)

    def gather(m: Any, x: jax.Array) -> jax.Array:
        return m.all_gather(x, ALL)

    with pc.across_slices("y"):
        got = run(functools.partial(gather, pc), on, x)
    assert not np.array_equal(got, run(functools.partial(gather, jax.lax), on, x))


@pytest.mark.parametrize("call", ["psum", "all_gather", "psum_scatter"])
def test_two_slices_of_a_tpu_are_found_and_compiled_for(call: str) -> None:
    compiled = harness.compile_for_tpu(
        lambda x: CALLS[call](pc, x, ("x", "y")),
        "v5e:2x2",
        (1024, 256),
        sizes=(2, 4),
        slices=2,
    )
    kernels, others = served()
    assert kernels and {how for _, how in others} == {ACROSS}
    assert not pc.fallback_counts()
    assert {"custom-call", "send", "recv"} <= set(compiled.ops)


def test_an_abstract_mesh_says_nothing_of_slices() -> None:
    with slices.scope(AbstractMesh((2, 4), ("x", "y"))):
        group = Group(("x", "y"), (2, 4))
        assert slices.split(group, slices.slices(group, None)) is None
