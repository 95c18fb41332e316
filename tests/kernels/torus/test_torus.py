"""All axes of a torus at once, as integers: the split, the timetable, the devices' numbers."""

import collections
import itertools
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import step_tables
from pallas_collectives.kernels.torus import all_gather, balance, devices, sections, timetable
from pallas_collectives.kernels.torus import shares as torus
from pallas_collectives.kernels.torus.shares import Shares
from pallas_collectives.kernels.torus.views import View
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import RIGHT, Group

NAMES = ("x", "y", "z")
SIZES = st.lists(st.sampled_from([2, 3, 4, 5, 8, 16]), min_size=1, max_size=3).map(tuple)
LINES = st.lists(st.booleans(), min_size=3, max_size=3)
ROWS = st.integers(1, 600)


def plan_of(
    sizes: tuple[int, ...],
    lines: list[bool],
    rows: int,
    streams: int = 2,
    both: bool = False,
    chip: int = -1,
    halfway: bool = True,
) -> Shares:
    axes = [
        Group((name,), (n,), line=line, chip=k == chip)
        for k, (name, n, line) in enumerate(zip(NAMES, sizes, lines, strict=False))
    ]
    return Shares.of(axes, (8 * rows, 128), 0, "float32", streams, both, halfway=halfway)


@hypothesis.given(SIZES, LINES, ROWS, st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_streams_cover_a_block_without_overlap(
    sizes: tuple[int, ...], lines: list[bool], rows: int, streams: int, both: bool
) -> None:
    plan = plan_of(sizes, lines, rows, streams, both)
    cuts = [
        (bundle.start + stream * bundle.size, bundle.size)
        for bundle in plan.bundles
        for stream in range(bundle.streams)
    ]
    assert all(start % plan.grain == 0 for start, _ in cuts)
    ends = list(itertools.accumulate(size for _, size in cuts))
    assert [start for start, _ in cuts] == [0, *ends[:-1]]
    assert ends[-1] == plan.block[plan.cut] == 8 * rows


@hypothesis.given(SIZES, LINES, st.booleans())
def test_all_links_carry_the_same_load(
    sizes: tuple[int, ...], lines: list[bool], both: bool
) -> None:
    """Bytes by axis and direction over the axis' links: equal, and (n-1)/(2d) blocks on a torus."""
    plan = plan_of(sizes, lines, 48 * 1024, 2 + 2 * both, both)
    load = link_loads(plan)
    assert load.max() <= 1.01 * load.min()
    if set(plan.sharing) == {1}:
        least = (math.prod(sizes) - 1) * plan.block[plan.cut] / (2 * len(sizes))
        assert load.max() <= 1.01 * least


@pytest.mark.parametrize("sizes, chip", [((2, 2, 2), 2), ((2, 4, 4), 0), ((4, 2, 8), 1)])
def test_what_a_chips_devices_want_comes_in_once(sizes: tuple[int, ...], chip: int) -> None:
    """Both of its devices' links together carry the blocks of the other chips' devices."""
    plan = plan_of(sizes, [False] * 3, 48 * 1024, chip=chip)
    load, axes = link_loads(plan), [axis for axis in range(3) if axis != chip]
    others = math.prod(sizes) - 2
    links = 2 * sum(1 / plan.sharing[axis] for axis in axes)
    assert load[axes].max() <= 1.01 * others * plan.block[plan.cut] / (2 * links)
    assert all(bundle.order[-1] == chip for bundle in plan.bundles)


def link_loads(plan: Shares) -> np.ndarray:
    """What a device sends along each axis, in each direction, over the links it has there."""
    sizes = plan.sizes
    load = np.zeros((len(sizes), 2))
    for bundle in plan.bundles:
        met = 1
        for axis in bundle.order:
            for stream in range(bundle.streams):
                for _, to, hops in torus.ways_round(plan, sizes[axis], stream):
                    load[axis, int(to == RIGHT)] += bundle.size * met * hops
            met *= sizes[axis]
    return load * np.array(plan.sharing, float)[:, None]


@pytest.mark.parametrize(
    "sizes, sharing", [((2, 2, 18), (2, 2, 2)), ((3, 3, 32), (1, 1, 2)), ((2, 2, 2, 16), (2,) * 4)]
)
def test_a_long_axis_beside_short_ones_has_no_more_orders(
    sizes: tuple[int, ...], sharing: tuple[int, ...]
) -> None:
    """In both orders some parts would be less than nothing."""
    orders, exact, _ = balance.ways(sizes, sharing, both=True)
    assert len(orders) == len(sizes) and (exact >= 0).all() and exact.sum() == pytest.approx(1)
    axes = tuple(Group((name,), (n,)) for name, n in zip("xyzw", sizes, strict=False))
    plan = Shares.of(axes, (256, 128), 0, "float32", streams=4, both=True)
    assert sum(bundle.size * bundle.streams for bundle in plan.bundles) == 256


@pytest.mark.parametrize("of_chips", [False, True])
def test_a_gather_leaves_semaphores_to_a_step(of_chips: bool) -> None:
    """Over three axes of links that differ, and the two devices of a chip."""
    least = min(generation.kernel_semaphores for generation in chips.BY_NAME.values())
    for sizes in [(32, 32, 32), (4, 4, 8), (8, 16, 32), (3, 5, 16)]:
        for lines in itertools.product([False, True], repeat=3):
            each = zip(NAMES, sizes, lines, strict=True)
            axes = [Group((name,), (n,), line=line) for name, n, line in each]
            axes[:0] = [Group(("chip",), (2,), chip=True)] * of_chips
            plan = all_gather.plan_of(axes, View.of((4096, 128), 0), jnp.dtype("float32"))
            assert 0 < sections.semaphores(all_gather.way(plan).scratch) <= least


@pytest.mark.parametrize("units", [64, 256, 340, 1024])
@pytest.mark.parametrize(
    "sizes, sharing", [((2, 4), (2, 2)), ((2, 2, 4), (2, 2, 2)), ((8, 16), (2, 1))]
)
def test_uneven_shares_can_be_cut_into_good_tiles(
    sizes: tuple[int, ...], sharing: tuple[int, ...], units: int
) -> None:
    """213 of 256 units are added in 71 tiles of 3: ten times as long as 212, in 4 of 53."""
    _, exact, load = balance.ways(sizes, sharing)
    shares = balance.shares(exact, load, units)
    assert sum(shares) == units
    for share in shares:
        assert max(n for n in range(1, 65) if share % n == 0) >= min(share, 10)


def test_the_table_in_the_docstring_is_the_course() -> None:
    table = step_tables.torus(plan_of((4, 4), [False] * 2, 16))
    assert all(line in (torus.__doc__ or "") for line in table.splitlines()), f"\n{table}"


@pytest.mark.parametrize("shape, units", [((4096, 256), 512), ((8, 100), 1)])
def test_blocks_are_cut_as_finely_as_their_tiles(shape: tuple[int, int], units: int) -> None:
    axes = [Group((name,), (4,)) for name in NAMES[:2]]
    plan = Shares.of(axes, shape, 0, "float32", 2)
    assert plan.extent // plan.grain == units


# The timetable.


@hypothesis.given(SIZES, LINES, st.integers(1, 5000), st.booleans(), st.booleans())
@hypothesis.settings(deadline=None)
def test_the_timetable_has_every_hop_once_and_in_order(
    sizes: tuple[int, ...], lines: list[bool], rows: int, back: bool, both: bool
) -> None:
    plan = plan_of(sizes, lines, rows, 2 + 2 * both, both)
    phases = range(len(sizes))
    course = [*phases[::-1], *phases] if back else list(phases)
    segments = timetable.timetable(plan, course)
    for b, bundle in enumerate(plan.bundles):
        spans = [segment[b] for segment in segments if segment[b] is not None]
        hops = [(s.number, hop) for s in spans for hop in range(s.start, s.stop)]
        assert hops == [(k, t) for k, p in enumerate(course) for t in range(plan.hops(bundle, p))]
    alike = len({*sizes}) == len({*plan.sharing}) == 1
    alike &= sorted(bundle.order[0] for bundle in plan.bundles) == [*phases]
    shares = [bundle.size for bundle in plan.bundles]
    apart = (sizes[0] - 1) * (1 - min(shares) / max(shares))  # hops, at the end of a phase
    if alike and apart < 0.249:
        assert len(segments) == len(course)


@pytest.mark.parametrize("sizes", [(7,), (2, 16), (4, 4), (4, 8, 5)])
def test_rounds_have_every_hop_once(sizes: tuple[int, ...]) -> None:
    plan = plan_of(sizes, [False] * 3, 101)
    begun: dict[tuple[int, int, int], list[int]] = {}

    class Record(timetable.Stage):
        def begin(self, b: int, phase: int, section: Any, stream: Any) -> None:
            begun.setdefault((b, phase, int(stream)), []).append(0)

        def take(self, b: int, phase: int, hop: Any, section: Any, stream: Any) -> None:
            assert len(begun[b, phase, int(stream)]) == hop

        def go_on(self, b: int, phase: int, hop: Any, section: Any, stream: Any) -> None:
            begun[b, phase, int(stream)].append(int(hop))

        def end(self, b: int, section: Any, stream: Any) -> None:
            begun[b, -1, int(stream)] = []

    with jax.disable_jit(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(timetable.lax, "fori_loop", _python_loop)
        timetable.run(plan, (Record(), range(len(sizes))))
    assert begun == {
        (b, phase, stream): list(range(plan.hops(bundle, phase))) if phase >= 0 else []
        for b, bundle in enumerate(plan.bundles)
        for phase in range(-1, len(sizes))
        for stream in range(bundle.streams)
    }


@pytest.mark.parametrize(
    "sizes, lines",
    [((2, 3), [False] * 2), ((4, 3), [True, False]), ((3, 2, 4), [False] * 3)],
)
def test_in_sections_each_phase_comes_in_its_turn(
    sizes: tuple[int, ...], lines: list[bool]
) -> None:
    """Every hop of every piece once and in order; and what a section leaves is taken in time."""
    plan = plan_of(sizes, lines, 30, halfway=False).in_sections(16, 4)
    seen: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    taken: dict[tuple[int, int, int], list[tuple[int, int]]] = collections.defaultdict(list)

    class Record(timetable.Stage):
        def begin(self, b: int, phase: int, section: Any, stream: Any) -> None:
            seen.setdefault((b, int(section), int(stream)), []).append((phase, 0))
            before = (b, int(section) - 1, int(stream))
            assert section == 0 or len(seen[before]) > len(seen[b, int(section), int(stream)])

        def take(self, b: int, phase: int, hop: Any, section: Any, stream: Any) -> None:
            taken[b, int(section), int(stream)].append((phase, int(hop)))

        def go_on(self, b: int, phase: int, hop: Any, section: Any, stream: Any) -> None:
            assert taken[b, int(section), int(stream)][-1] == (phase, int(hop))
            if not any(lines):  # neither of a pair sends before both have taken what has come
                assert taken[b, int(section), int(stream) ^ 1][-1] == (phase, int(hop))
            seen[b, int(section), int(stream)].append((phase, int(hop)))

        def end(self, b: int, section: Any, stream: Any) -> None:
            seen[b, int(section), int(stream)].append((-1, 0))

    with jax.disable_jit(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(timetable.lax, "fori_loop", _python_loop)
        course = range(len(sizes))
        timetable.run(plan, (Record(), course[::-1]), (Record(), course))
    assert len(seen) == sum(bundle.pieces for bundle in plan.bundles)
    for (b, section, stream), hops in seen.items():
        assert stream < plan.bundles[b].streams_in(section)
        ways = [(p, t) for p in course[::-1] for t in range(plan.hops(plan.bundles[b], p))]
        back = [(p, t) for p in course for t in range(plan.hops(plan.bundles[b], p))]
        assert hops == [*ways, (-1, 0), *back, (-1, 0)]


@hypothesis.given(SIZES, LINES, ROWS, st.integers(1, 9), st.sampled_from([2, 4]))
def test_sections_cover_a_block_without_overlap(
    sizes: tuple[int, ...], lines: list[bool], rows: int, size: int, streams: int
) -> None:
    plan = plan_of(sizes, lines, rows, halfway=False).in_sections(8 * size, streams)
    at = 0
    for bundle in plan.bundles:
        assert bundle.start == at
        assert sum(map(bundle.streams_in, range(bundle.sections))) == bundle.pieces
        assert sum(map(bundle.sections_of, range(bundle.streams))) == bundle.pieces
        at += bundle.pieces * bundle.size
    assert at == 8 * rows


@hypothesis.given(SIZES, LINES, ROWS, st.integers(1, 9))
def test_sections_leave_all_links_about_the_same_load(
    sizes: tuple[int, ...], lines: list[bool], rows: int, size: int
) -> None:
    """What is over is shared out as evenly as tiles allow, in pairs."""
    plan = plan_of(sizes, lines, rows, halfway=False).in_sections(8 * size, 6)
    _, exact, load = balance.ways(plan.sizes, plan.sharing)
    least = float((load @ exact)[0]) * 8 * rows
    assert least * (1 - 1e-6) <= plan.busiest <= least + 3 * 8 * float(load.max())


def _python_loop(start: Any, stop: Any, body: Callable[..., Any], _: None) -> None:
    for i in range(int(start), int(stop)):
        body(np.int32(i), None)


# The devices.


def test_numbers_are_those_of_the_places() -> None:
    rows = (((4, 1), (2, 3), (0, 5)), ((4, 2, 0), (1, 3, 5)))
    axes = tuple(Group(("x",), (6,), along) for along in rows)
    found = devices.numbers(axes)
    assert found is not None and found.tolist() == [4, 2, 0, 1, 3, 5]
    assert devices.field_sizes(axes) == (6, 1)
    straight = tuple(Group(("x",), (4,), along) for along in (((0, 2), (1, 3)), ((0, 1), (2, 3))))
    assert devices.numbers(straight) is None
    assert devices.field_sizes(straight) == (2, 2)
