"""The other engine: the same kernels on a SparseCore, simulated, compiled and replayed."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives import catalogue
from pallas_collectives.errors import EngineError
from pallas_collectives.kernels.machinery import channel, combine, entry, sync
from pallas_collectives.replay import Machine, replay
from pallas_collectives.tuning import overlaps

EVERY = [
    (op, algorithm.name, record.adds and not algorithm.by_subcores)
    for op, record in catalogue.COLLECTIVES.items()
    for algorithm in record.algorithms
]
SERVED = [(op, name) for op, name, refused in EVERY if not refused]
SUMS = [(op, name) for op, name in SERVED if catalogue.COLLECTIVES[op].adds]
GENERATIONS = {name: harness.GENERATIONS[name] for name in ("v5p", "v6e", "7x")}
NONE_THERE = {"v4": "v4: Pallas does not reach", "v5e": "v5e: it has no SparseCore"}


def call_of(op: str, algorithm: str, axis: Any = "x") -> Callable[[jax.Array], jax.Array]:
    how = {"backend": "pallas", "algorithm": algorithm}
    return functools.partial(catalogue.COLLECTIVES[op].example.call, pc, axis=axis, **how)


def compiled(op: str, algorithm: str, topology: str) -> harness.Compiled:
    call, operand = call_of(op, algorithm), catalogue.COLLECTIVES[op].example.operand
    return harness.compile_for_tpu(lambda x: call(x), topology, operand(4, 64), sizes=(4, 2))


# Simulated ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op, algorithm", SERVED)
def test_the_same_kernel_gives_what_it_gives_on_the_tensorcore(op: str, algorithm: str) -> None:
    example = catalogue.COLLECTIVES[op].example
    x = harness.random((4, *example.operand(4, 16)), "float32")
    with pltpu.force_tpu_interpret_mode(harness.EITHER):
        run = harness.per_device(call_of(op, f"{algorithm}:sc"), harness.mesh(4))
        for mode in harness.ADVERSARIES:
            got = harness.EITHER.under(mode, lambda: np.asarray(run(x)))
            np.testing.assert_array_equal(got, example.reference(x))


def test_a_result_begins_with_its_operand() -> None:
    """Who is no target has zeros, which an operand brings along."""
    x = harness.random((4, 8, 128), "float32")
    fn = functools.partial(pc.ppermute, axis_name="x", perm=[(0, 1), (1, 3)])
    run = harness.per_device(functools.partial(fn, algorithm="everyone:sc"), harness.mesh(4))
    zeros = np.zeros_like(x[0])
    np.testing.assert_array_equal(run(x), np.stack([zeros, x[0], zeros, x[1]]))


@pytest.mark.parametrize("dtype", ["bfloat16", "int16", "uint32", "complex64"])
def test_subcores_add_any_dtype_and_shape_as_the_tensorcore_does(dtype: str) -> None:
    """Also blocks of odd sizes, which are padded, along any axis."""
    x = harness.random((3, 5, 21), dtype)
    fn = functools.partial(pc.psum_scatter, axis_name="x", scatter_dimension=1, tiled=True)
    there, here = (
        harness.per_device(functools.partial(fn, algorithm=f"unidirectional{engine}"), mesh)(x)
        for mesh in [harness.mesh(3)]
        for engine in (":sc", ":hbm")
    )
    np.testing.assert_array_equal(there, here)


@pytest.mark.parametrize("mode", harness.ADVERSARIES)
def test_a_tile_comes_while_another_is_added(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of several tiles, an odd number of them, of two terms and of three."""
    monkeypatch.setattr(combine, "SUBCORE_TILE_BYTES", 4096)  # of float32 the smallest
    x = harness.random((3, 3 * 48, 128), "float32")
    fn = functools.partial(pc.psum_scatter, axis_name="x", tiled=True)
    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES[mode]):
        there, here = (
            harness.per_device(functools.partial(fn, algorithm=f"bidirectional:{on}"), mesh)(x)
            for mesh in [harness.mesh(3)]
            for on in ("sc", "hbm")
        )
        np.testing.assert_array_equal(there, here)


def test_auto_is_an_algorithm_that_subcores_run() -> None:
    x = harness.random((2, 16, 128), "float32")
    pc.reset_counts()
    for fn in (functools.partial(pc.psum_scatter, tiled=True), pc.psum):
        harness.per_device(lambda x, fn=fn: fn(x, "x", algorithm="auto:sc"), harness.mesh(2))(x)
    served = {op: str(algorithm) for op, _, algorithm in pc.counts()}
    assert all((op, name.removesuffix(":sc")) in SUMS for op, name in served.items())
    assert len(served) == 2


def test_gathers_gradient_is_the_tensorcores_scatter() -> None:
    x = harness.random((2, 8, 128), "float32")
    program = harness.per_device(
        jax.grad(lambda x: jnp.sum(pc.all_gather(x, "x", algorithm="auto:sc") ** 2)),
        harness.mesh(2),
    )
    pc.reset_counts()
    np.testing.assert_array_equal(program(x), 4 * x)
    served = {(op, str(algorithm).endswith(":sc")) for op, _, algorithm in pc.counts()}
    assert served == {("all_gather", True), ("reduce_scatter", False)}


def no_barrier(*_: Any) -> None:
    pltpu.get_barrier_semaphore()


@pytest.mark.parametrize(
    "mode, name, fault",
    [("eager", "enter", no_barrier), ("on_wait", "wait", lambda *_, **__: None)],
)
def test_a_fault_is_caught(
    mode: str, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = harness.random((3, 8, 128), "float32")

    def caught() -> bool:
        def gather(x: jax.Array) -> jax.Array:
            return pc.all_gather(harness.delayed(x, 1), "x", algorithm="direct:sc")

        run = harness.per_device(gather, harness.mesh(3), check_vma=False)
        with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES[mode]):
            return harness.caught(lambda: run(x), np.stack([x] * 3))

    assert not caught()
    monkeypatch.setattr(sync, name, fault)
    assert caught()


def adds_nothing(op: str, out: Any, terms: Any) -> None:
    pltpu.sync_copy(terms[0], out)


def slots_freed_early(self: Any, number: Any) -> None:
    RELEASE(self, number + 1)


RELEASE = channel.Channel.release


@pytest.mark.parametrize(
    "mode, owner, name, fault",
    [
        ("eager", sync, "enter", no_barrier),
        ("on_wait", sync, "wait", lambda *_, **__: None),
        ("eager", combine, "_on_a_subcore", adds_nothing),
        ("on_wait", channel.Channel, "release", slots_freed_early),
    ],
    ids=["no barrier", "no wait", "nothing added", "slots freed early"],
)
def test_a_fault_in_a_sum_is_caught(
    mode: str, owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 6 if name == "release" else 3  # slots serve again
    x = harness.random((n, 8 * n, 128), "float32")

    def caught() -> bool:
        def scatter(x: jax.Array) -> jax.Array:
            held = harness.delayed(x, 1)
            return pc.psum_scatter(held, "x", tiled=True, algorithm="unidirectional:sc")

        run = harness.per_device(scatter, harness.mesh(n), check_vma=False)
        with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES[mode]):
            return harness.caught(lambda: run(x), x.sum(0).reshape(n, 8, 128))

    assert not caught()
    monkeypatch.setattr(owner, name, fault)
    assert caught()


# Compiled -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("op, algorithm", SERVED)
def test_compiles_to_an_asynchronous_call(op: str, algorithm: str, generation: str) -> None:
    pytest.importorskip("libtpu")
    text = compiled(op, f"{algorithm}:sc", GENERATIONS[generation]).text
    call = [line for line in text.splitlines() if re.search(r"call-(start|update)\(", line)]
    assert any('async_execution_thread="sparsecore"' in line for line in call)
    for line in call:
        arrays = re.findall(r"\w+\[[\d,]*\]\{[^}]*\}", line.partition(" call-")[0])
        # Semaphores are S(2); what the kernel reads and writes is in HBM.
        assert not [array for array in arrays if re.search(r"S\([13456]\)", array)]


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("op, algorithm", [served for served in SERVED if served not in SUMS])
def test_what_only_updates_a_slice_compiles(op: str, algorithm: str, generation: str) -> None:
    """As keys and values that go to a cache: XLA must not fuse a call with such an update.

    And in a loop tables are constants.
    """
    pytest.importorskip("libtpu")
    call, operand = call_of(op, f"{algorithm}:sc"), catalogue.COLLECTIVES[op].example.operand

    def program(xs: jax.Array) -> jax.Array:
        return jax.lax.map(call, xs)  # a loop whose turns write what they stack

    topology = GENERATIONS[generation]
    shape = (3, *operand(4, 64))
    text = harness.compile_for_tpu(program, topology, shape, sizes=(4, 2)).text
    assert 'async_execution_thread="sparsecore"' in text


@pytest.mark.parametrize("algorithm", ["everyone", "partners"])
def test_tables_in_loops_compile_where_an_axis_has_one_device(algorithm: str) -> None:
    pytest.importorskip("libtpu")
    pairs = [(d, (d + 1) % 8) for d in range(8)]

    def shift(x: jax.Array) -> jax.Array:
        return pc.ppermute(x, ("x", "y"), pairs, algorithm=f"{algorithm}:sc", backend="pallas")

    def program(xs: jax.Array) -> jax.Array:
        return jax.lax.map(shift, xs)

    text = harness.compile_for_tpu(program, "v5p:2x2x2", (3, 64, 128), sizes=(1, 8)).text
    assert 'async_execution_thread="sparsecore"' in text


def test_two_calls_in_flight_and_the_tensorcores_have_ids_that_differ() -> None:
    pytest.importorskip("libtpu")

    def program(x: jax.Array) -> Any:
        n = jax.lax.axis_size("x")
        shift = [(d, (d + 1) % n) for d in range(n)]
        return [
            step(x + k, algorithm=algorithm)
            for k, engine in enumerate(("", ":sc"))
            for step, algorithm in (
                (functools.partial(pc.all_gather, axis_name="x"), f"direct{engine}"),
                (functools.partial(pc.ppermute, axis_name="x", perm=shift), f"partners{engine}"),
            )
        ]

    text = harness.compile_for_tpu(program, "v6e:2x4", (64, 128)).text
    found = list(map(int, re.findall(r'"collective_id":"(\d+)"', text)))
    if not found:  # the text of JAX 0.10 does not have them
        pytest.skip("this compiler does not print ids")
    assert len(found) == len(set(found)) == 4
    assert sum(number >= 1 << 29 for number in found) == 2


def test_ids_of_the_two_engines_never_meet() -> None:
    group = pc.topology.groups.Group(("x",), (8,))
    kinds = ("everyone", "shift right", "shift left")
    ids = {
        (kind, simulated, on_sparsecore): entry.barrier_id(kind, group, simulated, on_sparsecore)
        for kind in kinds
        for simulated in (False, True)
        for on_sparsecore in (False, True)
    }
    assert len(set(ids.values())) == len(ids)
    assert all(number < 1 << 15 for (_, simulated, _), number in ids.items() if simulated)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_narrow_sums_and_groups_compile(generation: str, dtype: str) -> None:
    pytest.importorskip("libtpu")

    def program(x: jax.Array) -> Any:
        groups: Any = [[0, 2], [3, 1]]
        how: Any = {"tiled": True, "algorithm": "unidirectional:sc", "backend": "pallas"}
        return pc.psum_scatter(x, "x", axis_index_groups=groups, **how)

    shape, topology = (4096, 512), GENERATIONS[generation]
    text = harness.compile_for_tpu(program, topology, shape, dtype=dtype, sizes=(4, 2)).text
    assert 'async_execution_thread="sparsecore"' in text


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", NONE_THERE)
def test_a_chip_without_one_is_refused_by_name(generation: str) -> None:
    pytest.importorskip("libtpu")
    with pytest.raises(EngineError, match=f"'direct:sc' for all_gather.*{NONE_THERE[generation]}"):
        compiled("all_gather", "direct:sc", harness.GENERATIONS[generation])


@pytest.mark.parametrize("op, algorithm", [row[:2] for row in EVERY if row[2]])
def test_sums_but_rings_and_lines_are_refused(op: str, algorithm: str) -> None:
    message = "it adds, and on a SparseCore only ring and line sums can; leave ':sc' out"
    harness.fails(EngineError, message, lambda x: call_of(op, f"{algorithm}:sc")(x))


def test_sums_in_order_are_refused() -> None:
    call = functools.partial(pc.psum, axis_name="x", order="rank", algorithm="auto:sc")
    harness.fails(EngineError, "it adds", lambda x: call(x))


# Replayed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, algorithm, name",
    [
        pytest.param(op, algorithm, name, marks=() if (i - k) % 3 == 0 else pytest.mark.slow)
        for k, (op, algorithm) in enumerate(SERVED)
        for i, name in enumerate(("v5p:4x4x4", "v6e:4x4", "7x:4x4x4"))
    ],
)
def test_replayed_as_a_second_engine(op: str, algorithm: str, name: str) -> None:
    """The same DMAs, later by what the engine's launch and starts take longer.

    Not by all of it: what starts later meets less on its link. At the core's rates it is as quick.
    Sums are added by sixteen subcores, at a rate of their own.
    """
    if (op, algorithm) in SUMS:  # each of their subcores is stepped
        name = {"v5p:4x4x4": "v5p:2x2x2", "v6e:4x4": "v6e:2x4", "7x:4x4x4": "7x:2x2x1"}[name]
    machine, example = Machine.named(name), catalogue.COLLECTIVES[op].example
    mesh = machine.mesh({"y": machine.n_devices // 4, "x": 4})
    shape = jax.ShapeDtypeStruct(example.operand(4, 512), "float32")

    def report(suffix: str, **rates: float) -> Any:
        call = call_of(op, algorithm + suffix)
        nothing = {"in_specs": P(), "out_specs": P(), "check_vma": False}
        mapped = jax.shard_map(lambda x: call(x), mesh=mesh, **nothing)
        return replay(mapped, shape, machine=Machine.named(name, **rates), races=True)

    if op == "ragged_all_to_all" and algorithm != "direct":
        pytest.skip("sizes hang on the device, and so does the loop")
    there, here = report(":sc"), report(":hbm")
    assert there.ok and here.ok
    g = machine.generation
    more = g.sparsecore_launch_cost - g.launch_cost
    if (op, algorithm) in SUMS:  # by other additions, in other chunks, and a psum by two kernels
        assert here.time < there.time < 2 * here.time + 2 * more
        slowly = report(":sc", subcore_rate=g.subcore_rate / 64)
        assert slowly.time > 1.2 * there.time
        return
    assert 0.5 * more < there.time - here.time < more + 0.5 * here.time
    assert report(":sc", sparsecore_launch_cost=g.launch_cost).time < there.time or not more
    like_the_core = {"sparsecore_launch_cost": g.launch_cost, "sparsecore_issue_cost": g.issue_cost}
    if op != "ragged_all_to_all":  # there its result begins as a copy, which the core need not make
        assert report(":sc", **like_the_core).time <= 1.1 * here.time


@pytest.mark.parametrize("rows, dtype", [(256, "bfloat16"), (2048, "bfloat16"), (2048, "float32")])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("v6e:4x4", {"x": 16}), ("v5p:2x2x2", {"x": 8}), ("7x:2x2x1", {"x": 8})],
)
def test_what_subcores_add_is_reckoned(
    name: str, sizes: dict[str, int], rows: int, dtype: str
) -> None:
    """A sum's time there is the TensorCore's, and what its subcores add that nothing hides."""
    machine, shape = Machine.named(name), jax.ShapeDtypeStruct((rows, 8192), dtype)
    nothing = {"in_specs": P(), "out_specs": P(), "check_vma": False}

    def us(algorithm: str) -> float:
        def scatter(x: jax.Array) -> jax.Array:
            return pc.psum_scatter(x, "x", tiled=True, algorithm=algorithm)

        mapped = jax.shard_map(scatter, mesh=machine.mesh(sizes), **nothing)
        return replay(mapped, shape, machine=machine).time * 1e6

    block = rows * 8192 * jnp.dtype(dtype).itemsize // sizes["x"]
    adding = overlaps.adding_us(block, machine.generation, sizes["x"] // 2)
    assert us("bidirectional:hbm") + adding == pytest.approx(us("bidirectional:sc"), rel=0.1)


@pytest.mark.full
def test_a_subcore_adds_beside_its_loads() -> None:
    """A sum of float32 loads each term; converting numbers takes more than loading them."""
    nothing = {"in_specs": P(), "out_specs": P(), "check_vma": False}

    def us(dtype: str, **rates: Any) -> float:
        def scatter(x: jax.Array) -> jax.Array:
            return pc.psum_scatter(x, "x", tiled=True, algorithm="unidirectional:sc")

        slow = Machine.named("v6e:2x4", subcore_rate=8e7, **rates)  # so that it adds all the time
        mapped = jax.shard_map(scatter, mesh=slow.mesh({"y": 2, "x": 4}), **nothing)
        return replay(mapped, jax.ShapeDtypeStruct((512, 1024), dtype), machine=slow).time

    assert us("float32") == pytest.approx(us("float32", subcore_operations=1), rel=0.01)
    halves, slower = us("bfloat16"), us("bfloat16", subcore_operations=1)
    assert slower == pytest.approx(3 * halves, rel=0.1)
    assert halves == pytest.approx(3.5 / 3 / 2 * us("float32"), rel=0.1)


def test_xla_is_told_how_long_a_call_is_on_links() -> None:
    """On v6e a link has an 18th of HBM's bandwidth, and a ring two of them; XLA reckons by 4, for
    sums by 12.
    """
    pytest.importorskip("libtpu")

    def told(op: str, algorithm: str) -> int:
        text = compiled(op, algorithm, GENERATIONS["v6e"]).text
        return int(re.findall(r'bytes_accessed"?[^0-9]+(\d+)', text)[0])

    for op, times in ("all_gather", 4), ("reduce_scatter", 12):
        core, there = told(op, "bidirectional:hbm"), told(op, "bidirectional:sc")
        assert there == pytest.approx(times * core * 1640 / (2 * 90), rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("algorithm", ["bidirectional:sc", "line:sc"])
def test_large_sums_have_semaphores_enough(generation: str, algorithm: str) -> None:
    """32 MiB, which would not compile for v5p in as many chunks as on a TensorCore."""

    def scatter(x: jax.Array) -> jax.Array:
        return pc.psum_scatter(x, "x", tiled=True, algorithm=algorithm)

    there = harness.compile_for_tpu(
        scatter, GENERATIONS[generation], (4 * 4096, 4096), sizes=(4, 2)
    )
    assert "call-start" in there.text
