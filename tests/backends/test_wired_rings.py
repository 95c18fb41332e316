"""Sums over a wire that are added on the way: rounded at every hop, within the stated bound."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import harness
import pallas_collectives as pc
import wired_calls
from benchmarks import replay_rows
from pallas_collectives.errors import AlgorithmError
from pallas_collectives.kernels import all_reduce, all_reduce_line, reduce_scatter
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.kernels.machinery.codec import Codec
from pallas_collectives.kernels.torus import sections
from pallas_collectives.kernels.torus.packed_gather import PackedGather
from pallas_collectives.kernels.torus.scatter import Scatter
from pallas_collectives.replay import Machine, replay
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire
from wired_calls import KINDS, PRODUCT, WIRES, bound, bound_of_psum, exact

ROWS, COLUMNS = 256, 128
data = functools.partial(wired_calls.data, rows=ROWS, columns=COLUMNS)


def scattering(
    n: int, wire: Wire, mode: str = "on_wait", line: bool = False
) -> Callable[[np.ndarray], np.ndarray]:
    """What runs the kernel on (n, n * rows, columns): the sum of each block, (n, rows, columns)."""

    def program(x: jax.Array) -> jax.Array:
        return kernel(x, n, wire, harness.ADVERSARIES[mode], line)

    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    return lambda x: np.asarray(run(x))


def kernel(x: jax.Array, n: int, wire: Wire, interpret: Any, line: bool) -> jax.Array:
    """The kernel, round a ring or along a line."""
    how: Any = {"vmem": False, "interpret": interpret, "codec": Codec(wire)}
    if line:
        group = dataclasses.replace(Group(("x",), (n,)), line=True)
        return reduce_scatter.line(x, group, axis=0, op="sum", **how)
    group = Group(("x",), (n,))
    return reduce_scatter.ring(x, group, axis=0, op="sum", bidirectional=True, **how)


def reducing(
    n: int, wire: Wire, mode: str = "on_wait", line: bool = False, dtype: Any = jnp.float32
) -> Callable[[np.ndarray], np.ndarray]:
    """What runs the kernel of `psum` on (n, n * rows, columns): every device's result."""

    def program(x: jax.Array) -> jax.Array:
        blocks = x.astype(dtype).reshape(n, -1, x.shape[-1])
        whole = reduction(blocks, n, wire, harness.ADVERSARIES[mode], line)
        return whole.astype(jnp.float32)

    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    return lambda x: np.asarray(run(x))


def reduction(x: jax.Array, n: int, wire: Wire, interpret: Any, line: bool) -> jax.Array:
    """The kernel of `psum`, round a ring or along a line."""
    how: Any = {"op": "sum", "vmem": False, "interpret": interpret, "codec": Codec(wire)}
    if line:
        return all_reduce_line.line(x, dataclasses.replace(Group(("x",), (n,)), line=True), **how)
    return all_reduce.ring(x, Group(("x",), (n,)), bidirectional=True, **how)


@pytest.mark.parametrize("line", [False, True], ids=["ring", "line"])
@pytest.mark.parametrize("wire, n", PRODUCT, ids=str)
def test_sums_are_within_the_bound_that_grows_with_hops(wire: Wire, n: int, line: bool) -> None:
    run = scattering(n, wire, line=line)
    for kind in KINDS:
        x = data(n, kind, columns=int(wire.group))
        off, allowed = np.abs(run(x) - exact(x)), bound(x, wire, line)
        assert (off <= allowed).all(), (kind, (off / np.maximum(allowed, 1e-37)).max())
        assert kind in ("zeros", "constant") or (off > 0.1 * allowed).any()


@pytest.mark.parametrize("line", [False, True], ids=["ring", "line"])
@pytest.mark.parametrize("wire, n", PRODUCT, ids=str)
def test_a_psum_adds_half_a_step_and_gives_everyone_the_same_bits(
    wire: Wire, n: int, line: bool
) -> None:
    run = reducing(n, wire, line=line)
    for kind in KINDS:
        x = data(n, kind, columns=int(wire.group))
        got, allowed = run(x), bound_of_psum(x, wire, line)
        off = np.abs(got[0] - exact(x))
        assert (off <= allowed).all(), (kind, (off / np.maximum(allowed, 1e-37)).max())
        assert kind in ("zeros", "constant") or (off > 0.1 * allowed).any()
        np.testing.assert_array_equal(got, np.broadcast_to(got[0], got.shape))


@pytest.mark.full
@pytest.mark.parametrize("mode", harness.ADVERSARIES)
@pytest.mark.parametrize("line", [False, True], ids=["ring", "line"])
def test_sections_of_a_large_psum_are_safe_on_every_schedule(
    mode: str, line: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "PACKED_SCRATCH_BYTES", 1 << 20)  # so that there are many
    x = data(4, rows=2048)
    got = reducing(4, WIRES[0], mode, line)(x)
    allowed = bound_of_psum(x, WIRES[0], line, one_way=not line)
    assert (np.abs(got - exact(x)) <= allowed).all()
    np.testing.assert_array_equal(got, np.broadcast_to(got[0], got.shape))


@pytest.mark.full
@pytest.mark.parametrize("mode", harness.ADVERSARIES)
@pytest.mark.parametrize("line", [False, True], ids=["ring", "line"])
def test_sections_of_a_large_sum_are_safe_on_every_schedule(mode: str, line: bool) -> None:
    x = data(4, rows=2048)  # along a line eight sections
    got = scattering(4, WIRES[0], mode, line)(x)
    assert (np.abs(got - exact(x)) <= bound(x, WIRES[0], line)).all()


def test_groups_with_inf_and_nan_arrive_as_nan_and_leave_others_alone() -> None:
    x = data(2)
    x[1, 3, 7], x[1, 5, 1] = np.inf, np.nan  # of what device 1 sends for block 0
    got = scattering(2, WIRES[0])(x)[0]
    assert np.isnan(got[[3, 5]]).all() and np.isfinite(np.delete(got, [3, 5], axis=0)).all()


# Faults -------------------------------------------------------------------------------------------


def is_caught(run: Callable[[np.ndarray], np.ndarray], allowed: Any) -> bool:
    """Whether a faulty kernel is found out: by what it gives, or by the race detector.

    Of five devices: both ways round, a sum goes on once, and three blocks have two places.
    """
    x = data(5, "heavy tails", rows=2048)  # pieces of two tiles
    return wired_calls.shows(
        lambda: bool((np.abs(run(x) - exact(x)) <= allowed(x, WIRES[0])).all())
    )


def _another_slots_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of a chunk go out with its numbers, and the scales of the term it came with."""
    write = Codec._write

    def wrong(self: Codec, ref: Any, number: Any, tiles: int, *rest: Any) -> None:
        packed = self._is_packed(ref)
        before = ref[self._scales(number, tiles), :] if packed else None
        write(self, ref, number, tiles, *rest)
        if packed:
            ref[self._scales(number, tiles), :] = before

    monkeypatch.setattr(Codec, "_write", wrong)


def _before_its_scales_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come is added before it is waited for: numbers or scales may not be there yet."""
    receive, take, add = Channel.receive, Scatter._take, Scatter._add
    late: list[Any] = []

    def put_off(self: Channel, number: Any, place: Any) -> None:
        late.append((self, number, place))

    def hurried(self: Scatter, leg: Any, comes: Any, goes: Any) -> None:
        with monkeypatch.context() as within:
            within.setattr(Channel, "receive", put_off)
            take(self, leg, comes, goes)

    def then(self: Scatter, leg: Any, comes: Any, goes: Any) -> None:
        combined = self._combine

        def combine(*sums: Any) -> None:
            combined(*sums)
            receive(*late.pop())

        self._combine = combine
        add(self, leg, comes, goes)
        self._combine = combined

    monkeypatch.setattr(Scatter, "_take", hurried)
    monkeypatch.setattr(Scatter, "_add", then)


@pytest.mark.parametrize(
    "fault", [wired_calls.another_tiles_scale, _another_slots_scale, _before_its_scales_have_come]
)
def test_faults_are_caught(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert is_caught(scattering(5, WIRES[0]), bound)


def _unpacked_over_what_is_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is unpacked over one that is still on its way to the result."""
    end, end_copy = PackedGather.end, PackedGather._end_copy

    def in_the_end(self: PackedGather, b: int, section: Any, stream: Any) -> None:
        end(self, b, section, stream)
        for leg in self._legs(b, 0, section, stream):
            for count in range(leg.unpacks_in_all):
                end_copy(self, leg, count)

    monkeypatch.setattr(PackedGather, "_end_copy", lambda *_: None)
    monkeypatch.setattr(PackedGather, "end", in_the_end)


def _another_blocks_place(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = PackedGather._unpack

    def wrong(self: PackedGather, leg: Any, hop: Any, packed: Any, number: Any) -> None:
        unpack(self, leg, hop, packed, jax.lax.rem(number + 1, np.int32(5)))

    monkeypatch.setattr(PackedGather, "_unpack", wrong)


@pytest.mark.parametrize(
    "fault",
    [
        wired_calls.gathered_before_it_has_come,
        _unpacked_over_what_is_leaving,
        _another_blocks_place,
    ],
)
def test_faults_of_a_psum_are_caught(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert is_caught(reducing(5, WIRES[0]), bound_of_psum)


# Calls --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_calls_that_name_a_ring_add_on_the_way() -> None:
    x = np.random.default_rng(0).normal(size=(2, 512, 200)).astype(np.float32)

    def program(x: jax.Array) -> Any:
        how: Any = {"wire": "int8", "backend": "pallas"}
        scattered = [
            pc.psum_scatter(x, "x", tiled=True, algorithm="bidirectional", **how),
            pc.psum_scatter(
                x, "x", scatter_dimension=1, tiled=True, algorithm="bidirectional", **how
            ),
        ]
        mapped = jax.vmap(
            lambda x: pc.psum_scatter(x, "x", tiled=True, algorithm="bidirectional", **how)
        )
        return scattered, pc.psum(x, "x", algorithm="ring", **how), mapped(x.reshape(2, 256, 200))

    pc.reset_counts()
    (rows, columns), whole, mapped = jax.tree.map(
        np.asarray, harness.per_device(program, harness.mesh(2), check_vma=False)(x)
    )
    want = x.astype(np.float64).sum(axis=0)
    step = np.abs(x).max() / 127
    assert np.abs(rows.reshape(want.shape) - want).max() <= step
    assert np.abs(np.concatenate(list(columns), axis=1) - want).max() <= step
    assert np.abs(whole - want).max() <= 2.5 * step and np.abs(whole - want).max() > 0
    np.testing.assert_array_equal(whole[0], whole[1])
    assert np.abs(mapped - want.reshape(2, 2, 128, 200).swapaxes(0, 1)).max() <= step
    assert ("reduce_scatter", "pallas", "bidirectional") in pc.counts()
    assert ("all_reduce", "pallas", "ring") in pc.counts()
    assert ("all_to_all", "pallas", "ring") not in pc.counts()


@pytest.mark.parametrize(
    "why, how",
    [
        ("quantised once", {"return_residue": True}),
        ("quantised once", {"wire": Wire("int8", rounding="stochastic", key=jax.random.key(0))}),
        ("'exchange' or 'gather'", {"algorithm": "one_shot"}),
        ("backend 'xla'", {"backend": "xla", "algorithm": None}),
    ],
)
def test_what_a_ring_does_not_add_on_the_way(why: str, how: Any) -> None:
    asked: Any = {"wire": "int8", "algorithm": "ring", "backend": "pallas", **how}
    program = lambda x: pc.psum(x, "x", **asked)  # noqa: E731
    lower = harness.per_device(program, harness.mesh(2), check_vma=False).lower  # type: ignore[attr-defined]
    x = jax.ShapeDtypeStruct((2, 512, 128), jnp.float32)
    if asked["algorithm"] is None:
        assert "custom_call" not in lower(x).as_text()
        return
    with pytest.raises(AlgorithmError, match=why):
        lower(x)


@pytest.mark.parametrize("devices, chip", [(16, "v5e"), (4, "v5p"), (16, "v6e"), (4, "7x")])
def test_large_sums_are_added_on_the_way_and_explained(devices: int, chip: str) -> None:
    of: Any = {"shape": (1 << 16, 512), "dtype": "bfloat16", "devices": devices, "chip": chip}
    for op, name, most in (("psum_scatter", "bidirectional", 0.6), ("psum", "ring", 0.62)):
        told = pc.explain(op, **of, wire="int8")
        assert told.wire is not None and told.wire.way == name
        assert told.wire.us and told.wire.wired_us and told.wire.wired_us <= most * told.wire.us
        assert told.wire.sent <= 0.52 * told.wire.nbytes
        assert [c.algorithm for c in told.candidates][:2] == ["exchange", name]
        assert f"in the sum at each of {devices - 1} hops" in str(told)


@pytest.mark.full
@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_compiles_for_every_generation(generation: str, wire: Wire) -> None:
    def program(x: jax.Array) -> Any:
        blocks = x.reshape(8, -1, 256)
        return [
            run(operand, 8, wire, False, line)
            for run, operand in ((kernel, x), (reduction, blocks))
            for line in (False, True)
        ]

    compiled = harness.compile_for_tpu(
        program, harness.GENERATIONS[generation], (8192, 256), dtype=jnp.bfloat16
    )
    kernels = ("reduce_scatter_bidirectional", "reduce_scatter_line", "all_reduce_ring")
    assert all(f"%{name}_packed" in compiled.text for name in (*kernels, "all_reduce_line"))
    assert {"copy", "transpose"}.isdisjoint(compiled.ops)


@pytest.mark.full
@pytest.mark.parametrize(
    "pod, mib", [("v5e:16x16", 16), ("v5p:4x4x4", 64), ("v6e:16x16", 64), ("7x:4x4x4", 64)]
)
@pytest.mark.parametrize("op, most", [("psum_scatter", 0.6), ("psum", 0.62)])
def test_a_sum_takes_sixty_hundredths_of_its_time_in_bfloat16(
    op: str, most: float, pod: str, mib: int
) -> None:
    how = {"psum_scatter": {"tiled": True}, "psum": {}}[op]
    machine = Machine.named(pod)
    mesh = machine.mesh(replay_rows.mesh_axes(machine))

    def seconds(**over: Any) -> float:
        def program(x: jax.Array) -> jax.Array:
            return getattr(pc, op)(x, "x", backend="pallas", **how, **over)

        nothing = PartitionSpec()
        mapped = jax.shard_map(
            program, mesh=mesh, in_specs=nothing, out_specs=nothing, check_vma=False
        )
        shape = jax.ShapeDtypeStruct((mib << 12, 128), jnp.bfloat16)
        report = replay(mapped, shape, machine=machine)
        assert report.ok is not False
        return report.time

    assert seconds(wire="int8") <= most * seconds()
