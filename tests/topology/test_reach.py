"""The rule of reach on places, and that every kernel which is chosen keeps to it."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import pallas_collectives as pc
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import AlgorithmError
from pallas_collectives.replay import trace_program
from pallas_collectives.replay.machine import Machine
from pallas_collectives.replay.program import Program, Signal, Start
from pallas_collectives.topology import chips, reach
from pallas_collectives.topology.ring_orders import Torus

V5E, V5P = chips.BY_NAME["v5e"], chips.BY_NAME["v5p"]


@pytest.mark.parametrize(
    ("a", "b", "reached"),
    [
        ((0, 0, 0), (0, 0, 0), True),
        ((0, 0, 0), (0, 1, 0), True),
        ((0, 0, 0), (0, 4, 0), True),
        ((0, 0, 0), (0, 3, 0), False),
        ((0, 1, 0), (0, 15, 0), True),  # two the other way round
        ((0, 0, 0), (0, 13, 0), False),
        ((0, 5, 0), (3, 5, 0), False),  # that axis does not close
        ((0, 5, 0), (2, 5, 0), True),
        ((0, 0, 0), (1, 1, 0), False),  # diagonal
        ((0, 15, 0), (1, 0, 0), False),  # one apart in device numbers, diagonal
    ],
)
def test_v5e_reaches_powers_of_two_along_one_axis(
    a: tuple[int, ...], b: tuple[int, ...], reached: bool
) -> None:
    there = Torus((4, 16), V5E.wraps((4, 16)))
    assert there.wraps == (False, True)
    assert reach.reaches(V5E, there, a, b) is reached
    assert reach.reaches(V5E, there, b, a) is reached


def test_others_reach_all() -> None:
    there = Torus((3, 3, 3), (False,) * 3)
    places = [(*chip, 0) for chip in itertools.product(range(3), repeat=3)]
    assert all(reach.reaches(V5P, there, a, b) for a, b in itertools.product(places, repeat=2))


# Every remote DMA and signal of a kernel ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective on a v5e slice.

    Attributes:
      shape: of the slice.
      sizes: of the mesh's axes "a", "b", ...
      axes: those of the collective.
      placement: the device numbers of the mesh's positions; None for 0, 1, ...
      groups: `axis_index_groups`, or a permutation's pairs.
    """

    op: str
    algorithm: str | None
    shape: tuple[int, int]
    sizes: tuple[int, ...]
    axes: str
    placement: tuple[int, ...] | None = None
    groups: Any = None

    @property
    def n(self) -> int:
        """Devices of the axes."""
        return math.prod(self.sizes["abcd".index(axis)] for axis in self.axes)

    def __call__(self, x: jax.Array) -> Any:
        name: Any = tuple(self.axes) if len(self.axes) > 1 else self.axes
        how: dict[str, Any] = {"algorithm": self.algorithm, "backend": "pallas"}
        if self.op == "ppermute":
            return pc.ppermute(x, name, self.groups, **how)
        if self.op == "ragged_all_to_all":
            n, rows = self.n, jnp.arange(self.n, dtype=jnp.int32)
            ones = jnp.ones(n, jnp.int32)
            me = jnp.full(n, jax.lax.axis_index(name), jnp.int32)
            flat = x[0, :n]
            return pc.ragged_all_to_all(flat, flat, rows, ones, me, ones, axis_name=name, **how)
        how["axis_index_groups"] = self.groups
        match self.op:
            case "all_gather":
                return pc.all_gather(x, name, **how)
            case "reduce_scatter":
                return pc.psum_scatter(x, name, scatter_dimension=0, tiled=True, **how)
            case "all_reduce":
                return pc.psum(x, name, **how)
        return pc.all_to_all(x, name, 0, 0, tiled=True, **how)


def kernels_of(call: Call) -> Program:
    """What all devices do.

    Raises:
      AlgorithmError: no kernel serves.
    """
    machine = Machine.named(f"v5e:{'x'.join(map(str, call.shape))}")
    placed = np.arange(math.prod(call.sizes)) if call.placement is None else call.placement
    axes = dict(zip("abcd", call.sizes, strict=False))
    everywhere = PartitionSpec()
    function = jax.shard_map(
        call,
        mesh=machine.mesh(axes),
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    operand = jax.ShapeDtypeStruct((call.n, 8 * call.n, 128), jnp.float32)
    there = machine.places(np.asarray(placed))
    generation = machine.generation
    program, _ = trace_program.trace(
        function, operand, generation=generation, where=lambda mesh: there
    )
    return program


def remote_pairs(program: Program) -> set[tuple[int, int]]:
    """Who writes to whom, or signals whom, in mesh positions."""
    found: set[tuple[int, int]] = set()
    for column in program.columns:
        if isinstance(column, Start | Signal) and column.target is not None:
            targets = np.broadcast_to(column.target, column.lanes.shape)
            found |= set(zip(column.lanes.tolist(), targets.tolist(), strict=True))
    return {(a, b) for a, b in found if a != b}


def beyond_reach(call: Call) -> list[tuple[Any, Any]] | None:
    """Pairs of places that the kernels of a call ought not to join; None if none serves it."""
    try:
        program = kernels_of(call)
    except AlgorithmError:  # a ReachError, or a permutation that is no shift by partners
        return None
    pairs = remote_pairs(program)
    assert pairs or call.n == 1 or call.op == "ppermute", f"no kernel was seen: {call}"
    there = Torus(call.shape, V5E.wraps(call.shape))
    at = call.placement or range(math.prod(call.sizes))
    places = [there.place(number) for number in at]
    ends = [(places[a], places[b]) for a, b in sorted(pairs)]
    return [(a, b) for a, b in ends if not reach.reaches(V5E, there, a, b)]


SLICES = [(1, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]  # those there are
ODD = [(1, 3), (1, 5), (3, 3), (2, 3), (1, 9), (3, 5), (1, 16), (2, 16), (6, 6)]


def _layouts(shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """One axis of the torus, the other, both, all as one; parts of the slice; devices shuffled."""
    n = math.prod(shape)
    yield {"sizes": (n,), "axes": "a"}
    if min(shape) == 1:
        return
    yield from ({"sizes": shape, "axes": axes} for axes in ("a", "b", "ab"))
    numbers = np.arange(n).reshape(shape)
    part = numbers[: max(2, shape[0] // 2), : max(2, shape[1] // 2)]
    yield {"sizes": part.shape, "axes": "b", "placement": tuple(part.reshape(-1).tolist())}
    yield {"sizes": (part.size,), "axes": "a", "placement": tuple(part.reshape(-1).tolist())}
    shuffled = np.random.default_rng(n).permutation(n)
    yield {"sizes": (n,), "axes": "a", "placement": tuple(shuffled.tolist())}


def _divided(call: Call) -> Iterator[Call]:
    """All devices of its axes; halves side by side and interleaved; permutations."""
    n = call.n
    numbers = list(range(n))
    if call.op == "ragged_all_to_all" and n > 128:
        return  # their tables are more than the replay follows
    if call.op == "ppermute":
        shift = [(p, (p + 1) % n) for p in numbers]
        swaps = [(p, p ^ 1) for p in numbers if p ^ 1 < n]
        far = [(p, (p + n // 2) % n) for p in numbers]
        reverse = [(p, n - 1 - p) for p in numbers]
        for perm in (shift, shift[:-1], [(b, a) for a, b in shift], swaps, far, reverse, [(0, 0)]):
            yield dataclasses.replace(call, groups=tuple(perm))
        return
    yield call
    if n % 2 == 0 and n > 2 and call.op != "ragged_all_to_all":
        for halves in ((numbers[: n // 2], numbers[n // 2 :]), (numbers[::2], numbers[1::2])):
            yield dataclasses.replace(call, groups=halves)


def _calls(shapes: Sequence[tuple[int, int]], *ops: str) -> Iterator[Call]:
    for shape, op in itertools.product(shapes, ops or ALGORITHMS):
        for algorithm, layout in itertools.product((None, *ALGORITHMS[op]), _layouts(shape)):
            yield from _divided(Call(op, algorithm, shape, **layout))


def _sampled(op: str, most: int, slices: int) -> list[Call]:
    """A call of each algorithm on each of a few slices, of at most so many devices."""
    rng, found = np.random.default_rng(0), []
    for algorithm in (None, *ALGORITHMS[op]):
        shapes = rng.permutation([shape for shape in SLICES + ODD if math.prod(shape) <= most])
        for shape in map(tuple, shapes[: slices * (1 + (algorithm is None))].tolist()):
            calls = [call for call in _calls([shape], op) if call.algorithm == algorithm]
            found.append(calls[rng.integers(len(calls))])
    return found


def _refused_never_broken(calls: Sequence[Call]) -> None:
    broken = {call: found for call in calls if (found := beyond_reach(call))}
    assert not broken


@pytest.mark.parametrize("most, slices", [(16, 2), (64, 3)])
@pytest.mark.parametrize("op", ALGORITHMS)
def test_no_kernel_writes_or_signals_beyond_reach(op: str, most: int, slices: int) -> None:
    _refused_never_broken(_sampled(op, most, slices))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SLICES + ODD, ids=str)
def test_no_kernel_writes_or_signals_beyond_reach_anywhere(shape: tuple[int, int]) -> None:
    _refused_never_broken(list(_calls([shape])))


def test_a_kernel_that_is_sent_beyond_reach_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("reduce_scatter", "unidirectional", (4, 4), (4, 4), "b")
    assert beyond_reach(call) is None
    monkeypatch.setattr(reach, "everywhere", lambda chip: True)
    assert ((0, 0, 0), (0, 3, 0)) in (beyond_reach(call) or [])


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("axes", ["b", "ab"])
@pytest.mark.parametrize("shape", [(4, 4), (4, 8)], ids=str)
def test_some_kernel_serves_every_axis_of_a_slice(
    op: str, axes: str, shape: tuple[int, int]
) -> None:
    assert beyond_reach(Call(op, None, shape, shape, axes)) == []


@pytest.mark.parametrize(
    ("op", "algorithm", "shape", "axes", "served"),
    [
        ("reduce_scatter", "unidirectional", (4, 4), "b", False),  # ends of a line, 3 apart
        ("reduce_scatter", "line", (4, 4), "b", True),
        ("all_to_all", "ring", (4, 4), "b", False),
        ("all_to_all", "line", (4, 4), "b", True),
        ("ragged_all_to_all", "ring", (4, 4), "b", False),
        ("ragged_all_to_all", "line", (4, 4), "b", True),
        ("all_gather", "torus", (4, 4), "ab", True),  # along lines, no closing hop
        ("all_reduce", "torus", (4, 4), "ab", True),
        ("all_gather", "torus", (16, 16), "ab", True),
        ("all_gather", "bidirectional", (4, 4), "ab", True),  # a ring over both
        ("all_to_all", "ring", (8, 16), "b", True),  # this axis closes
        ("all_to_all", "ring", (8, 16), "a", False),
        ("all_gather", "bidirectional", (1, 9), "b", True),  # ends 8 apart
        ("all_gather", "direct", (1, 3), "b", True),
        ("all_gather", "direct", (2, 2), "ab", False),  # diagonals
    ],
)
def test_what_serves_on_v5e(
    op: str, algorithm: str, shape: tuple[int, int], axes: str, served: bool
) -> None:
    assert beyond_reach(Call(op, algorithm, shape, shape, axes)) == ([] if served else None)
