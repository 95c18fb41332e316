"""All-gathers that pack in their kernels: each number within half a step, the same bits for all."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_torus_kernels import on_lines

import harness
import pallas_collectives as pc
import wired_calls
from benchmarks import replay_rows
from pallas_collectives.kernels.machinery.codec import Codec
from pallas_collectives.kernels.torus import all_gather_packed, sections, shares
from pallas_collectives.kernels.torus.views import View
from pallas_collectives.replay import Machine, Report
from pallas_collectives.topology import placement
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire
from wired_calls import KINDS, MOVED, WIRES, within

SLOW = pytest.mark.slow


def gathered(
    x: np.ndarray,
    wire: Wire = WIRES[0],
    sizes: tuple[int, ...] = (),
    lines: tuple[int, ...] = (),
    mode: str = "on_wait",
    axis: int = 0,
    cores: int = 1,
) -> np.ndarray:
    """Every device's result, of x: (n, *block)."""
    sizes = sizes or (len(x),)
    group = on_lines(sizes, lines) if len(sizes) > 1 else Group(("x",), sizes)
    lies = "torus" if len(sizes) > 1 else "line" if lines else "ring"
    params = harness.on_cores(mode) if cores == 2 else harness.ADVERSARIES[mode]
    how: Any = {"interpret": params}

    def program(x: jax.Array) -> jax.Array:
        codec = Codec(wire)
        return all_gather_packed.gather(x, group, axis=axis, lies=lies, codec=codec, **how)

    return np.asarray(harness.per_device(program, harness.mesh(*sizes), check_vma=False)(x))


def bound(x: np.ndarray, wire: Wire) -> np.ndarray:
    """Half a step of each number's group, as `wires` has it."""
    return np.asarray(jax.vmap(lambda x: within(x, wire))(jnp.asarray(x)))


def holds(x: np.ndarray, got: np.ndarray, wire: Wire = WIRES[0], axis: int = 0) -> bool:
    """Whether every number is within half a step everywhere, and the same on all devices."""
    want, allowed = (np.concatenate(list(part), axis=axis) for part in (x, bound(x, wire)))
    off = np.abs(got.astype(np.float64) - want)
    return bool((off <= allowed).all() and (got == got[0]).all())


def terms(n: int, rows: int, columns: int = 128, kind: str = "normal") -> np.ndarray:
    return wired_calls.data(n, kind, rows=rows, columns=columns)[:, :rows]


@pytest.mark.parametrize(
    "n, lines, mode",
    [
        (3, (), "on_wait"),
        (3, (0,), "on_wait"),
        (4, (), "eager"),
        pytest.param(4, (0,), "eager", marks=SLOW),
        pytest.param(5, (), "eager", marks=SLOW),
        pytest.param(2, (), "on_wait", marks=SLOW),
    ],
)
def test_sections_are_within_half_a_step(
    n: int, lines: tuple[int, ...], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "PACKED_SCRATCH_BYTES", 2 << 20)  # so that there are many
    x = terms(n, 16 * 128)
    assert holds(x, gathered(x, lines=lines, mode=mode))
    assert not harness.race_reported()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["on_wait", pytest.param("eager", marks=SLOW)])
def test_blocks_go_in_quarters_where_their_tiles_allow_it(mode: str) -> None:
    x = terms(3, 8 * 128)
    assert holds(x, gathered(x, mode=mode))
    assert not harness.race_reported()


@pytest.mark.parametrize(
    "sizes, lines, mode, tiles",
    [
        ((3,), (), "on_wait", 4),
        pytest.param((3,), (0,), "eager", 4, marks=SLOW),
        pytest.param((2, 3), (1,), "on_wait", 16, marks=SLOW),
        pytest.param((3,), (), "eager", 5, marks=SLOW),
    ],
)
def test_both_cores_of_a_device_take_half_of_each_block(
    sizes: tuple[int, ...],
    lines: tuple[int, ...],
    mode: str,
    tiles: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the first core all, if that is an odd number of tiles."""
    monkeypatch.setattr(shares, "UNITS_FOR_A_CORE", 1)
    x = terms(math.prod(sizes), tiles * 128)
    assert holds(x, gathered(x, sizes=sizes, lines=lines, mode=mode, cores=2))
    assert not harness.race_reported()


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes, lines, mode",
    [
        ((2, 2), (), "on_wait"),
        pytest.param((4, 2), (), "eager", marks=SLOW),
        pytest.param((2, 3), (1,), "on_wait", marks=SLOW),
        pytest.param((3, 2), (0, 1), "eager", marks=SLOW),
        pytest.param((2, 2, 2), (), "on_wait", marks=SLOW),
    ],
)
def test_several_axes_are_within_half_a_step(
    sizes: tuple[int, ...], lines: tuple[int, ...], mode: str
) -> None:
    x = terms(math.prod(sizes), 8 * 128)
    assert holds(x, gathered(x, sizes=sizes, lines=lines, mode=mode))
    assert not harness.race_reported()


@pytest.mark.parametrize(
    "sizes, lines, mode, tiles",
    [
        ((4, 2), (), "on_wait", 2),
        pytest.param((2, 4), (), "eager", 3, marks=SLOW),
        pytest.param((2, 4), (1,), "on_wait", 2, marks=SLOW),
        pytest.param((2, 2, 2), (), "eager", 3, marks=SLOW),
    ],
)
def test_few_tiles_are_within_half_a_step(
    sizes: tuple[int, ...], lines: tuple[int, ...], mode: str, tiles: int
) -> None:
    x = terms(math.prod(sizes), tiles * 128)
    assert holds(x, gathered(x, sizes=sizes, lines=lines, mode=mode))
    assert not harness.race_reported()


@pytest.mark.parametrize("sizes", [(4, 4), (16, 16), (3, 5)])
def test_few_tiles_begin_with_each_axis(sizes: tuple[int, ...]) -> None:
    """One stream with each, which goes both ways: no link idles."""
    codec, view = Codec(WIRES[0]), View.of_lanes((2 * 128, 128), 0)
    assert view is not None
    of = functools.partial(all_gather_packed.Scratch.of, dtype=jnp.float32, codec=codec)
    how: Any = {"there_and_back": False, "vmem": False, "codec": codec, "halfway": True}
    axes = [Group((name,), (n,)) for name, n in zip("xy", sizes, strict=True)]
    plan = sections.plan_of(axes, view.block, view.at, jnp.dtype("float32"), of, **how)
    assert [(bundle.order, bundle.streams) for bundle in plan.bundles] == [((0, 1), 1), ((1, 0), 1)]
    assert plan.halfway and plan.ways == 2


@pytest.mark.full
@pytest.mark.parametrize("wire, n", MOVED, ids=str)
def test_every_kind_of_numbers_is_within_half_a_step(wire: Wire, n: int) -> None:
    for kind in KINDS:
        x = terms(n, 4 * 128, int(wire.group), kind)
        got = gathered(x, wire)
        assert holds(x, got, wire), kind
        assert kind in ("zeros", "constant") or (got != np.concatenate(list(x))).any()


def test_groups_with_inf_and_nan_arrive_as_nan_and_leave_others_alone() -> None:
    x = terms(2, 4 * 128)
    x[1, 3, 7], x[1, 5, 1] = np.inf, np.nan
    got = gathered(x)[0].reshape(2, -1, 128)
    assert np.isnan(got[1, [3, 5]]).all() and np.isfinite(got[0]).all()
    assert np.isfinite(np.delete(got[1], [3, 5], axis=0)).all()


# Calls --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_calls_pack_in_the_kernel_where_blocks_lie_well() -> None:
    """Along any dimension but the last; other shapes are packed by passes of XLA."""
    n, x = 2, terms(2, 256, 256).reshape(2, 2, 128, 256)
    how: Any = {"wire": "int8", "backend": "pallas", "algorithm": "bidirectional"}

    def program(x: jax.Array) -> Any:
        return [
            pc.all_gather(x, "x", **how),
            pc.all_gather(x, "x", axis=1, tiled=True, **how),
            pc.all_gather(x.reshape(-1), "x", tiled=True, **how),
            pc.all_gather(x.reshape(16, 16, 256), "x", tiled=True, **how),
            jax.vmap(lambda x: pc.all_gather(x, "x", tiled=True, **how))(x),
            pc.all_gather(x, "x", axis=2, tiled=True, **how),
            pc.all_gather(x[:, :100], "x", **how),
        ]

    pc.reset_counts()
    got = wired_calls.run(program, x, n=n, check_vma=False)
    step = np.abs(x).max() / 127
    wants = [
        x,
        np.concatenate(list(x), axis=1),
        x.reshape(-1),
        x.reshape(32, 16, 256),
        np.concatenate(list(x), axis=1),
        np.concatenate(list(x), axis=2),
        x[:, :, :100],
    ]
    for ours, want in zip(got, wants, strict=True):
        off = np.abs(ours - want)
        assert off.shape[1:] == want.shape and 0 < off.max() <= 0.51 * step
    assert pc.counts()["all_gather", "pallas", "bidirectional"] == 7


def test_draws_and_residues_are_quantised_as_they_were_foretold() -> None:
    """By passes of XLA, in whose bits a draw arrives as it is."""
    x = terms(2, 256)

    def program(x: jax.Array) -> Any:
        wire = Wire("int8", rounding="stochastic", key=jax.random.key(0))
        return pc.all_gather(x, "x", wire=wire, backend="pallas", algorithm="bidirectional")

    mapped = harness.per_device(program, harness.mesh(2), check_vma=False)
    text = mapped.lower(x).as_text()  # type: ignore[attr-defined]
    assert "all_gather_packed" not in text


@pytest.mark.parametrize("devices, chip", [(16, "v5e"), (4, "v5p"), (16, "v6e"), (4, "7x")])
def test_a_large_gather_packs_in_its_kernel_and_is_explained(devices: int, chip: str) -> None:
    of: Any = {"shape": (1 << 14, 512), "dtype": "bfloat16", "devices": devices, "chip": chip}
    told = pc.explain("all_gather", **of, wire="int8")
    assert told.wire is not None and told.wire.way == "bidirectional"
    assert told.wire.us and told.wire.wired_us and told.wire.wired_us <= 0.6 * told.wire.us
    assert told.wire.sent <= 0.52 * told.wire.nbytes
    assert "hop" not in str(told.why) and "1/254" in str(told)


# Faults -------------------------------------------------------------------------------------------


def _packed_before_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of the own block is packed while it is on its way from HBM."""

    def hurried(self: Any, b: int, section: Any, stream: Any, target: Any) -> None:
        place = self._s.plain[b].at[stream]
        self._codec.combine((target, place))
        all_gather_packed.sync.wait(self._sem(b, stream), place)
        follows = stream < self._plan.bundles[b].streams_in(section + 1)
        all_gather_packed.only_if(follows, lambda: self._bring(b, section + 1, stream))

    monkeypatch.setattr(all_gather_packed._Own, "_pack", hurried)


def _the_next_piece_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section's piece sets out for where the one before is still being packed from."""
    pack = all_gather_packed._Own._pack

    def early(self: Any, b: int, section: Any, stream: Any, target: Any) -> None:
        combine = self._codec.combine

        class Late:
            def combine(self, *sums: Any) -> None:
                late.append(sums)

        late: list[Any] = []
        codec, self._codec = self._codec, Late()
        pack(self, b, section, stream, target)
        self._codec = codec
        combine(*late.pop())

    monkeypatch.setattr(all_gather_packed._Own, "_pack", early)
    monkeypatch.setattr(sections, "PACKED_SCRATCH_BYTES", 2 << 20)


@pytest.mark.parametrize(
    "fault, mode",
    [
        (wired_calls.another_tiles_scale, "on_wait"),
        (_packed_before_it_is_here, "on_wait"),
        (_the_next_piece_too_early, "eager"),
        (wired_calls.gathered_before_it_has_come, "on_wait"),
    ],
)
def test_faults_are_caught(
    fault: Callable[..., None], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = terms(3, 16 * 128, kind="heavy tails")
    fault(monkeypatch)
    assert wired_calls.shows(lambda: holds(x, gathered(x, mode=mode)))


@pytest.mark.full
def test_the_opposite_device_that_hears_from_neither_side_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = terms(4, 4 * 128)
    assert not wired_calls.shows(lambda: holds(x, gathered(x, mode="eager")))
    legs = shares.legs

    def shorter(*of: Any) -> list[Any]:
        return [(*way[:2], jnp.int32(1), jnp.int32(1)) for way in legs(*of)]

    monkeypatch.setattr(shares, "legs", shorter)
    assert wired_calls.shows(lambda: holds(x, gathered(x, mode="eager")))


# Pods ---------------------------------------------------------------------------------------------


def replayed(pod: str, axes: tuple[str, ...], mib: float, **how: Any) -> Report:
    """The replay of a public call in bfloat16; the gathered array has so many MiB."""
    machine = Machine.named(pod)
    sizes = replay_rows.mesh_axes(machine)
    n, races = math.prod(sizes[axis] for axis in axes), how.pop("races", False)

    def program(x: jax.Array) -> jax.Array:
        return pc.all_gather(x, axes, tiled=True, backend="pallas", **how)

    return wired_calls.replayed(program, machine, int(mib * 2**19) // n, races)


@pytest.mark.parametrize(
    "pod, axes, mib, most",
    [
        ("v5e:16x16", ("x",), 16, 0.6),
        ("v5e:16x16", ("x",), 4, 0.6),
        ("v5p:4x4x4", ("x",), 4, 0.63),
        ("v6e:16x16", ("x",), 4, 0.64),
        ("7x:4x4x4", ("x",), 4, 0.6),
        ("v5p:4x4x4", ("x",), 64, 0.6),
        ("v6e:8x8", ("x",), 16, 0.6),
        ("7x:4x4x4", ("x",), 16, 0.6),
        ("7x:4x4x4", ("x", "y"), 16, 0.6),
    ],
)
def test_it_takes_sixty_hundredths_of_its_time_in_bfloat16(
    pod: str, axes: tuple[str, ...], mib: float, most: float
) -> None:
    assert replayed(pod, axes, mib, wire="int8").time <= most * replayed(pod, axes, mib).time


@pytest.mark.full
@pytest.mark.parametrize(
    "pod, axes, mib",
    [
        ("v5p:4x4x4", ("x",), 4),
        pytest.param("v5e:16x16", ("x",), 4, marks=SLOW),
        pytest.param("v5p:4x4x8", ("z",), 8, marks=SLOW),
        pytest.param("v6e:4x4", ("x",), 4, marks=SLOW),
        pytest.param("v5p:4x4x4", ("x", "y", "z"), 64, marks=SLOW),
        pytest.param("v5e:4x4", ("x", "y"), 8, marks=SLOW),
        pytest.param("7x:4x4x4", ("x", "core"), 8, marks=SLOW),
    ],
)
def test_no_schedule_has_a_race(
    pod: str, axes: tuple[str, ...], mib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "PACKED_TORUS_BYTES", 8 << 20)
    monkeypatch.setattr(sections, "PACKED_SCRATCH_BYTES", 4 << 20)
    report = replayed(pod, axes, mib, races=True, wire="int8")
    assert report.ok and report.races == []


@pytest.mark.parametrize("topology, sizes", harness.TORI)
def test_compiles_for_every_generation(topology: str, sizes: tuple[int, ...]) -> None:
    pytest.importorskip("libtpu")
    names = ("x", "y", "z")[: len(sizes)]
    options: Any = {"interpret": False, "axis": 0}

    def program(x: jax.Array) -> Any:
        groups = [
            ("torus", placement.arranged(Group(names, sizes))),
            ("ring", Group(names[:1], sizes[:1])),
            ("line", dataclasses.replace(Group(names[:1], sizes[:1]), line=True)),
        ]
        return [
            all_gather_packed.gather(
                x, group, lies=lies, codec=Codec(Wire("float8_e4m3fn")), **options
            )
            for lies, group in groups
        ]

    compiled = harness.compile_for_tpu(
        program, topology, (2048, 128), dtype=jnp.bfloat16, sizes=sizes
    )
    assert "custom-call" in compiled.ops
    assert not {"copy", "transpose", "pad"} & set(compiled.ops)


def test_xla_may_fuse_what_a_packed_gather_brings_into_its_readers() -> None:
    """A barrier behind it made the products of a step over int8 a tenth longer on v5e."""

    def of(pinned: bool) -> str:
        view = View.of((64, 256), 1)
        seen = jax.ShapeDtypeStruct((2, *view.block), jnp.float32)
        return str(jax.make_jaxpr(lambda y: view.out_of(y, (2,), pinned=pinned))(seen))

    assert "optimization_barrier" in of(False) and "optimization_barrier" not in of(True)
