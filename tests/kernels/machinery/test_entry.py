"""Barrier ids: the same in every process, few enough, and safe to share in every interleaving."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import harness
import pallas_collectives as pc
import stepped
from pallas_collectives import replay
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.kernels.machinery import entry, launch, sync
from pallas_collectives.topology.groups import Group

# Sharing, in every interleaving -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """A call on one barrier semaphore, as all devices make it.

    Attributes:
      peers: of each device, those that signal it and that it signals.
      leaves: when a device leaves: "N" once all of its set have entered; "L" once all its peers
        have passed the barrier; "" as soon as it has passed the barrier itself.
      sets: those sets; None for one of all.
    """

    peers: tuple[tuple[int, ...], ...]
    leaves: str
    sets: tuple[tuple[int, ...], ...] | None = None

    def set_of(self, device: int) -> Sequence[int]:
        """The devices of one collective with `device`."""
        sets = self.sets or (tuple(range(len(self.peers))),)
        return next(members for members in sets if device in members)


def first_unsafe_pass(calls: Sequence[Call]) -> str | None:
    """Explores all interleavings; describes a pass of a barrier that is unsafe, or None.

    Unsafe is a device that passes the barrier of call k while a peer has not entered call k. A
    state is, for each device, which call it has entered, and whether it has passed its barrier. A
    signal arrives as soon as it is sent: one that comes later is one whose receiver comes later.
    """
    n = len(calls[0].peers)
    start = ((-1, True),) * n
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        entered = [call for call, _ in state]
        for d, (call, passed) in enumerate(state):
            if not passed:
                sent = sum(
                    calls[k].peers[p].count(d) for p in range(n) for k in range(entered[p] + 1)
                )
                taken = sum(len(calls[k].peers[d]) for k in range(call))
                if sent - taken < len(calls[call].peers[d]):
                    continue
                if late := [p for p in calls[call].peers[d] if entered[p] < call]:
                    return f"device {d} passes call {call} before {late} have entered it"
                after = (call, True)
            else:
                if call + 1 == len(calls) or not _may_leave(calls, state, d):
                    continue
                after = (call + 1, False)
            following = (*state[:d], after, *state[d + 1 :])
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return None


def _may_leave(calls: Sequence[Call], state: Sequence[tuple[int, bool]], device: int) -> bool:
    number, _ = state[device]
    if number < 0 or not calls[number].leaves:
        return True
    if calls[number].leaves == "N":
        return all(state[p][0] >= number for p in calls[number].set_of(device))
    return all(state[p] >= (number, True) for p in calls[number].peers[device])


def ring(*sets: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Both neighbours of each device, on a ring for each set."""
    peers = {}
    for members in sets:
        for k, device in enumerate(members):
            peers[device] = (members[k - 1], members[(k + 1) % len(members)])
    return tuple(peers[device] for device in sorted(peers))


ALL = tuple(range(4))
EVERYONE = tuple(tuple(p for p in ALL if p != d) for d in ALL)
LINE = ((1,), (0, 2), (1, 3), (2,))
IN_REACH = ((1, 2), (0, 2, 3), (0, 1, 3), (1, 2))  # of a line of v5e
ON_TORUS = tuple((d ^ 1, d ^ 1, d ^ 2, d ^ 2) for d in ALL)
ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))

ANYWHERE = [
    Call(ring(ALL), "N"),
    Call(ring((0, 2, 3, 1)), "N"),
    Call(LINE, "N"),
    Call(ON_TORUS, "N"),
    Call(EVERYONE, "N"),
    Call(EVERYONE, ""),  # WIDE, before index groups or a permutation
]
ON_V5E = [Call(LINE, "N"), Call(IN_REACH, "L")]  # the second is WIDE there


@pytest.mark.parametrize("calls", [*itertools.product(ANYWHERE, repeat=3)][::3])
def test_calls_over_the_same_axes_may_share_an_id(calls: Sequence[Call]) -> None:
    assert first_unsafe_pass(calls) is None


@pytest.mark.parametrize("calls", [*itertools.product(ON_V5E, repeat=4)])
def test_calls_over_the_same_axes_may_share_an_id_on_v5e(calls: Sequence[Call]) -> None:
    assert first_unsafe_pass(calls) is None


@pytest.mark.parametrize(
    "calls",
    [
        (Call(ring(*ROWS), "N", ROWS), Call(ring(*COLUMNS), "N", COLUMNS)),  # two axes
        (Call(((1,), (0,), (3,), (2,)), "N", ROWS), Call(EVERYONE, "N")),  # groups, then all
        (Call(((1,), (0,), (3,), (2,)), ""), Call(((2,), (3,), (0,), (1,)), "")),  # permutations
        (Call(IN_REACH, ""), Call(IN_REACH, "")),  # nobody tells that he has passed
        (Call(LINE, "L"), Call(EVERYONE, "")),  # a call whose peers are not all within that reach
    ],
)
def test_what_must_not_share_an_id_is_caught(calls: Sequence[Call]) -> None:
    assert first_unsafe_pass(calls) is not None


def followed(body: Any, *shapes: tuple[int, ...], n: int = 8) -> Any:
    """The verdict on body("x", *operands) and, behind it, a call among all devices."""

    def program(*operands: jax.Array) -> Any:
        first = body("x", *operands)
        blocks = jnp.broadcast_to(operands[0].reshape(-1)[:1], (8 * n, 128))
        return first, pc.all_to_all(blocks, "x", 0, 0, tiled=True, algorithm="direct")

    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return pc.verify.check(program, *operands, devices=(n,))


@pytest.mark.parametrize("name", [name for name in stepped.kernels() if ":sc" not in name])
def test_a_call_may_be_followed_by_one_among_all(name: str) -> None:
    kernel = stepped.kernels()[name]
    verdict = followed(kernel.body, *kernel.operands(8))
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("barrier, sound", [("neighbours", False), (entry.WIDE, True)])
def test_a_kernel_that_hears_from_its_neighbours_alone_needs_the_wide_barrier(
    barrier: str, sound: bool
) -> None:
    def kernel(ring: Any, x_ref: Any, o_ref: Any, scratch: Any) -> None:
        sent, arrived = scratch
        for k, distance in enumerate((1, -1)):
            there = ring.device_id(ring.block(distance))
            sync.remote_copy(x_ref, o_ref.at[k], sent.at[k], arrived.at[k], there)
        for k in range(2):
            sync.wait(sent.at[k], x_ref)
            sync.wait(arrived.at[k], x_ref)

    def halo(axis: str, x: jax.Array) -> jax.Array:
        return launch.call(
            kernel,
            Group((axis,), (8,)),
            x,
            out_shape=jax.ShapeDtypeStruct((2, *x.shape), x.dtype),
            scratch=(pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2,))),
            barrier=barrier,
            name="halo",
            interpret=False,
        )

    assert followed(halo, (8, 128)).ok == sound


def test_shifts_share_an_id_whatever_devices_take_part() -> None:
    """A device waits for the next one along alone: its k-th signal is of the k-th call."""
    shifts = [[(0, 1), (1, 2), (2, 3), (3, 0)], [(0, 1), (2, 3)], [(1, 2), (3, 3)], []]
    for perms in itertools.product(shifts, repeat=3):
        for device in ALL:
            signals = [
                source for perm in perms for source, target in perm if target == device != source
            ]
            assert set(signals) <= {(device - 1) % 4}


# Which id -----------------------------------------------------------------------------------------


def ids_of(sizes: Sequence[int], interpret: bool = False) -> dict[tuple[str, tuple[str, ...]], int]:
    """The ids of all patterns on all sets of axes of a mesh."""
    names = "abcdef"[: len(sizes)]
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes), tuple(names), axis_types=auto)
    found = {}
    with jax.sharding.use_abstract_mesh(mesh):
        for count in range(1, len(sizes) + 1):
            for axes in itertools.combinations(names, count):
                group = Group(axes, tuple(sizes[names.index(axis)] for axis in axes))
                shift = [(0, 1)] if len(axes) == 1 else []
                back = [(1, 0)] if shift and group.size > 2 else []
                for perm in ([], shift, back):
                    kind = str(entry.shift_of(perm, group)) if perm else "neighbours"
                    found[kind, axes] = entry.barrier_id(kind, group, interpret)
                found["everyone", axes] = entry.barrier_id("everyone", group, interpret)
    return found


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (16, 16), (4, 4, 8), (3, 5, 7), (2, 3, 4, 5)])
def test_every_set_of_axes_has_an_id_and_all_fit(sizes: tuple[int, ...]) -> None:
    ids = ids_of(sizes)
    patterns = {(kind.replace("everyone", "neighbours"), axes) for kind, axes in ids}
    assert len(set(ids.values())) == len(patterns) <= 23
    assert all(ids["everyone", axes] == ids["neighbours", axes] for _, axes in ids)
    assert all(0 <= number < 1 << 31 for number in ids.values())
    simulated = ids_of(sizes, interpret=True).values()
    assert min(simulated) >= 1 << 14, "the interpreter numbers semaphores from 2000 on"


def test_meshes_of_the_same_devices_agree() -> None:
    flat, square, cube = ids_of((8,)), ids_of((2, 4)), ids_of((2, 2, 2))
    assert flat["everyone", ("a",)] == square["everyone", ("a", "b")]
    assert square["everyone", ("b",)] == cube["everyone", ("b", "c")]
    assert square["everyone", ("a",)] == cube["everyone", ("a",)]
    assert cube["everyone", ("a", "c")] not in {*flat.values(), *square.values()}
    assert ids_of((1, 2, 1, 4))["everyone", ("b",)] == square["everyone", ("a",)]


def test_a_mesh_of_very_many_divisors_has_ids_too() -> None:
    sizes = (16, 20, 28)
    assert len([d for d in range(1, math.prod(sizes)) if math.prod(sizes) % d == 0]) > 26
    ids = ids_of(sizes)
    assert len(set(ids.values())) == 7 + 6


@pytest.mark.parametrize(
    ("perm", "shift"),
    [
        ([(0, 1), (1, 2), (2, 3), (3, 0)], "shift right"),
        ([(0, 1), (2, 2)], "shift right"),
        ([(3, 2), (0, 3)], "shift left"),
        ([(0, 1), (1, 0)], None),
        ([(0, 2), (2, 0)], None),
        ([(1, 1)], "shift right"),
    ],
)
def test_shifts_by_one_are_told_from_other_permutations(
    perm: list[tuple[int, int]], shift: str | None
) -> None:
    assert entry.shift_of(perm, Group(("x",), (4,))) == shift
    assert entry.shift_of(perm, Group(("x", "y"), (2, 2))) == shift
    assert entry.shift_of(perm, Group(("x",), (4,), ((0, 1, 2, 3),))) is None


_PROGRAM = """
import json, re, sys
sys.path[:0] = ["tests/helpers", "."]
import harness, jax
import pallas_collectives as pc
SIZES = {"x": 2, "y": 4}
CALLS = {
    "gather x": lambda a: pc.all_gather(a, "x", algorithm="direct"),
    "gather y": lambda a: pc.all_gather(a, "y", algorithm="bidirectional"),
    "gather xy": lambda a: pc.all_gather(a, ("x", "y")),
    "scatter y": lambda a: pc.psum_scatter(a, "y", tiled=True),
    "psum groups": lambda a: pc.psum(a, "y", axis_index_groups=[[0, 2], [1, 3]]),
    "psum yx": lambda a: pc.psum(a, ("y", "x")),
    "exchange y": lambda a: pc.all_to_all(a, "y", 0, 0, tiled=True, algorithm="line"),
    "shift y": lambda a: pc.ppermute(a, "y", [(0, 1), (1, 2)]),
    "back y": lambda a: pc.ppermute(a, "y", [(1, 0), (2, 1)]),
    "swap y": lambda a: pc.ppermute(a, "y", [(0, 2), (2, 0)]),
}
found = {}
for name in sys.argv[1].split(","):
    mesh = harness.tpu_mesh("v6e:2x4", SIZES)
    spec = jax.sharding.PartitionSpec(tuple(SIZES))
    run = jax.jit(jax.shard_map(lambda a: CALLS[name](a).sum(keepdims=True), mesh=mesh,
                                in_specs=spec, out_specs=spec, check_vma=False))
    shape = jax.ShapeDtypeStruct((256, 128), "float32",
                                 sharding=jax.sharding.NamedSharding(mesh, spec))
    text = run.lower(shape).as_text()
    found[name] = [int(i) for i in re.findall(r'collective_id[^:]*: (\\d+)', text)]
print(json.dumps(found))
"""


def _in_a_process(calls: Sequence[str]) -> dict[str, list[int]]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, ",".join(calls)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_processes_of_different_history_agree_on_every_id() -> None:
    calls = ["gather x", "gather y", "gather xy", "scatter y", "psum groups", "psum yx"]
    calls += ["exchange y", "shift y", "back y", "swap y"]
    first, second = _in_a_process(calls), _in_a_process(calls[:2:-1])
    assert set(second) == set(calls[3:])
    assert all(first[name] for name in calls), "no id was seen in a lowered program"
    assert all(first[name] == second[name] for name in second)
    assert len({number for numbers in first.values() for number in numbers}) == 5


@pytest.mark.slow
def test_ids_do_not_run_out() -> None:
    """Eight algorithms over an axis of 8, the inner axis of 2 x 4, and both, in one process."""
    axes_of = {(8,): ("x",), (2, 4): ("y", ("x", "y"))}
    pc.reset_counts()
    for sizes, names in axes_of.items():
        mesh = harness.tpu_mesh("v6e:2x4", dict(zip("xy", sizes, strict=False)))
        spec = jax.sharding.PartitionSpec(mesh.axis_names)
        where = jax.sharding.NamedSharding(mesh, spec)
        for name, op in itertools.product(names, ("all_gather", "all_reduce")):
            for algorithm in ALGORITHMS[op]:

                def call(a: jax.Array, op: str = op, name: object = name, by: str = algorithm):  # type: ignore[no-untyped-def]
                    run = pc.all_gather if op == "all_gather" else pc.psum
                    return run(a, name, algorithm=by)

                if algorithm == "torus" and not isinstance(name, tuple):
                    continue
                mapped = jax.shard_map(
                    call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
                )
                shape = jax.ShapeDtypeStruct((256, 128), "float32", sharding=where)
                jax.jit(mapped).lower(shape).compile()
    assert not pc.fallback_counts()


@pytest.mark.parametrize("op", ["swaps", "groups", "ragged"])
def test_a_barrier_among_all_within_reach_has_no_fault_on_any_schedule(op: str) -> None:
    machine = replay.Machine.named("v5e:4x4")

    def body(x: jax.Array) -> jax.Array:
        for _ in range(2):
            if op == "swaps":
                x = pc.ppermute(x, "x", [(0, 2), (2, 0), (1, 1)], backend="pallas")
            elif op == "groups":
                groups = [[0, 2], [1, 3]]
                x = pc.psum(x, "x", axis_index_groups=groups, backend="pallas")
            else:
                ones = np.ones(4, np.int32)
                me = jnp.full(4, jax.lax.axis_index("x"))
                x = pc.ragged_all_to_all(
                    x, x, np.arange(4, dtype=np.int32), ones, me, ones, axis_name="x"
                )
        return x

    spec = PartitionSpec()
    mapped = jax.shard_map(
        body, mesh=machine.mesh({"x": 4, "y": 4}), in_specs=spec, out_specs=spec, check_vma=False
    )
    x = jax.ShapeDtypeStruct((8, 8, 128), jnp.float32)
    report = replay.replay(mapped, x, machine=machine, races=True)
    assert report.ok, str(report)


_PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    "topology, groups", [("v5e:2x2", _PAIRS), ("v5p:2x2x1", _PAIRS), ("v5p:2x2x1", None)]
)
def test_no_barrier_reaches_another_slice(
    monkeypatch: pytest.MonkeyPatch, topology: str, groups: list[list[int]] | None
) -> None:
    """Two slices on one mesh axis: kernels run inside each, and so do their barriers."""
    devices = np.array(harness._topology(topology, 2).devices)
    slices = [device.slice_index for device in devices]
    mesh = jax.sharding.Mesh(devices, ("x",))
    spec = jax.sharding.PartitionSpec("x")
    made: list[entry.Entry] = []
    of = entry.Entry.of

    def recorded(*args: Any) -> entry.Entry:
        made.append(of(*args))
        return made[-1]

    monkeypatch.setattr(entry.Entry, "of", recorded)
    mapped = jax.shard_map(
        lambda a: pc.psum(a[0], "x", axis_index_groups=groups)[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    where = jax.sharding.NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((8, 16, 128), "float32", sharding=where)
    jax.jit(mapped).lower(x).compile()
    wide = [each for each in made if each.among is not None]
    assert wide
    # What was built last is what was lowered, where it is known how devices lie.
    among, peers = wide[-1].among, wide[-1].peers
    assert among is not None
    if topology.startswith("v5p"):  # each reaches all of its slice: a row for each slice is enough
        assert among.index_groups is not None
        assert {slices[members[0]] for members in among.index_groups} == {*slices}
        assert all(len({slices[device] for device in row}) == 1 for row in among.index_groups)
        return
    assert peers is not None
    for device, (count, *others) in enumerate(peers.tolist()):
        assert count > 0
        assert {slices[other] for other in others[:count]} == {slices[device]}
