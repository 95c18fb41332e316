"""The kernel of visits: rows to slots and back, notes, hostile lists, faults, bytes, compilers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import harness
from pallas_collectives import replay, verify
from pallas_collectives.kernels import visits
from pallas_collectives.topology.groups import Group
from pallas_collectives.verify.verdict import FAULTY, SOUND

N, T, ROW = 4, 5, (8, 128)


@dataclasses.dataclass
class Lists:
    """What each device sends: there[p, t, q] says whether row t of device p goes to q."""

    there: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """[sender, receiver]."""
        return self.there.sum(axis=1).astype(np.int32)

    @property
    def starts(self) -> np.ndarray:
        """[sender, receiver]: where a receiver's rows begin in the sender's list."""
        return (np.cumsum(self.sizes, axis=1) - self.sizes).astype(np.int32)

    @property
    def listed(self) -> np.ndarray:
        """[sender, rows]: its rows by receiver; what is not used points nowhere."""
        n, tokens, _ = self.there.shape
        table = np.full((n, n * tokens), 10**6, np.int32)
        for sender, own in enumerate(self.there):
            rows = np.nonzero(own.T)[1]
            table[sender, : len(rows)] = rows
        return table

    def slots(self, x: np.ndarray) -> np.ndarray:
        """[receiver, sender * rows + row]: what comes; zeros where nothing does."""
        by_receiver = np.where(np.moveaxis(self.there, 2, 0)[..., None, None], x, 0)
        return by_receiver.reshape(len(x), -1, *x.shape[2:])

    @property
    def arrived(self) -> np.ndarray:
        """[receiver, slot]: which are filled."""
        return np.moveaxis(self.there, 2, 0).reshape(len(self.there), -1)


def some(seed: int = 0, n: int = N, tokens: int = T) -> Lists:
    return Lists(np.random.default_rng(seed).random((n, tokens, n)) < 0.4)


def everything(lists: Lists) -> dict[str, Lists]:
    nothing = np.zeros_like(lists.there)
    to_one, to_self = nothing.copy(), nothing.copy()
    to_one[:, :, 1] = True
    to_self[:] = np.eye(len(nothing), dtype=bool)[:, None]
    named = {"none": nothing, "to one": to_one, "to self": to_self, "all": ~nothing}
    return {"some": lists} | {name: Lists(there) for name, there in named.items()}


def noted(x: Any, listed: Any, starts: Any, sizes: Any, interpret: Any) -> Any:
    """Rows to slots, zeros where none came, and what everyone noted: ten times its number."""
    n, tokens = len(sizes), len(x)
    head = jnp.pad(sizes, (0, visits.head_lanes(n) - n))
    words = jnp.full(128, 10 * jax.lax.axis_index("x"), jnp.int32)
    note, group = jnp.concatenate([head, words]), Group(("x",), (n,))
    sent = listed, starts, sizes
    return visits.send(x, *sent, n * tokens, group, note=note, interpret=interpret)


def home_again(x: Any, lists: tuple[Any, ...], back: tuple[Any, ...], interpret: Any) -> Any:
    """To slots, by what is known, and home: what came back, in the order of the list."""
    (listed, _, sizes), (order, landings, come) = lists, back
    n, tokens = len(sizes), len(x)
    group, begin = Group(("x",), (n,)), jnp.cumsum(come) - come
    slots = visits.send(x, *lists, n * tokens, group, come=come, interpret=interpret)[0]
    there = order, begin.astype(jnp.int32), come
    known = {"landings": landings, "come": sizes}
    return visits.send(slots, *there, len(listed), group, **known, interpret=interpret)[0]


def per_device(function: Callable[..., Any], n: int = N) -> Callable[..., Any]:
    return harness.per_device(function, harness.mesh(n), check_vma=False)


@pytest.mark.parametrize("mode", harness.ADVERSARIES)
def test_rows_come_to_their_slots_with_everyones_notes(mode: str) -> None:
    x = harness.random((N, T, *ROW), "float32")
    params = harness.ADVERSARIES[mode]
    run = per_device(lambda *args: noted(*args, interpret=params))
    for name, lists in everything(some()).items():
        come, notes = map(np.asarray, run(x, lists.listed, lists.starts, lists.sizes))
        assert not harness.race_reported()
        here = lists.arrived[..., None, None]
        np.testing.assert_array_equal(np.where(here, come, 0), lists.slots(x), err_msg=name)
        for heard in notes:
            np.testing.assert_array_equal(heard[:, :N], lists.sizes)
            np.testing.assert_array_equal(
                heard[:, 128:], 10 * np.arange(N)[:, None] + np.zeros(128)
            )


@pytest.mark.parametrize("mode", harness.ADVERSARIES)
def test_rows_come_home_in_the_order_of_the_list(mode: str) -> None:
    x, params = harness.random((N, T, *ROW), "bfloat16"), harness.ADVERSARIES[mode]
    run = per_device(lambda x, *t: home_again(x, t[:3], t[3:], params))
    for name, lists in everything(some()).items():
        filled = [np.flatnonzero(slots) for slots in lists.arrived]
        slots = np.array([np.pad(own, (0, N * T - len(own))) for own in filled])
        tables = (
            *(lists.listed, lists.starts, lists.sizes),
            *(slots.astype(np.int32), lists.starts.T.copy(), lists.sizes.T.copy()),
        )
        home = np.asarray(run(x, *tables))
        assert not harness.race_reported()
        for sender in range(N):
            count = lists.sizes[sender].sum()
            want = x[sender][lists.listed[sender, :count]]
            np.testing.assert_array_equal(home[sender, :count], want, err_msg=name)


def test_no_list_leads_out_of_bounds() -> None:
    """Rows, starts and sizes of any kind: what comes says itself how much, so all ends."""
    x = harness.random((N, T, *ROW), "float32")
    run = per_device(lambda *args: noted(*args, interpret=harness.ADVERSARIES["on_wait"]))
    listed = np.tile(np.array([-5, 2**31 - 1, T, 3, -(2**31)] * N, np.int32), (N, 1))
    starts = np.tile(np.array([-7, 2**31 - 1, 0, 19], np.int32), (N, 1))
    sizes = np.tile(np.array([2, 3, -4, 1], np.int32), (N, 1))
    sizes[:, 1] = 0  # it would lie behind the list: nothing is sent, so nothing may be announced
    sizes[:, 2] = 0
    come, _ = run(x, listed, starts, sizes)
    for sender in range(N):
        # Rows -5 and 2^31 - 1 are taken for the first and the last, and -2^31 for the first.
        np.testing.assert_array_equal(come[0, sender * T], x[sender, 0])
        np.testing.assert_array_equal(come[0, sender * T + T - 1], x[sender, T - 1])
        np.testing.assert_array_equal(come[3, sender * T], x[sender, 0])
    assert not harness.race_reported()


def with_fault(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Breaks the kernel: a wait that is left out, one semaphore for all, or no barrier."""
    kernel = visits._kernel

    def faulty(ring: Any, *refs: Any, **static: Any) -> None:
        *given, scratch = refs
        if fault == "one_semaphore":
            scratch = scratch._replace(notes=scratch.notes._replace(arrived=scratch.rows.arrived))
        waits = {
            "no_arrival": scratch.rows.arrived,
            "no_hearing": scratch.notes.arrived,
            "no_reading": scratch.read_sem,
            "no_leaving": scratch.rows.sent,
        }
        if fault in waits:
            harness.drop_waits(monkeypatch, waits[fault])
        kernel(ring, *given, scratch, **static)

    monkeypatch.setattr(visits, "_kernel", faulty)
    if fault == "no_barrier":
        harness.drop_barrier(monkeypatch, "barrier_with_everyone")


@pytest.mark.parametrize(
    "fault, mode",
    [
        *[("none", mode) for mode in harness.ADVERSARIES],
        *[("no_arrival", "on_wait"), ("no_barrier", "eager")],
    ],
)
def test_a_fault_is_caught(monkeypatch: pytest.MonkeyPatch, fault: str, mode: str) -> None:
    with_fault(monkeypatch, fault)
    lists, x = Lists(np.ones((N, T, N), bool)), harness.random((N, T, *ROW), "float32")

    def program(x: Any, *tables: Any) -> Any:
        held = harness.delayed(x, 1) if fault in ("none", "no_barrier") else x
        return noted(held, *tables, interpret=harness.ADVERSARIES[mode])[0]

    run = per_device(program)
    want = lists.slots(x)
    caught = harness.caught(lambda: run(x, lists.listed, lists.starts, lists.sizes), want)
    assert caught == (fault != "none")


def replayed(lists: Lists) -> replay.Report:
    machine, n = replay.Machine.named("v5p:4x4x4"), 4

    def shard(x: jax.Array, *tables: jax.Array) -> Any:
        return noted(x, *tables, interpret=False)

    spec = PartitionSpec("x")
    on = machine.mesh({"x": n, "y": 4, "z": 4})
    mapped = jax.shard_map(shard, mesh=on, in_specs=spec, out_specs=spec, check_vma=False)
    array = jax.ShapeDtypeStruct((n * T, *ROW), jnp.float32)
    tables = (table.reshape(-1) for table in (lists.listed, lists.starts, lists.sizes))
    return replay.replay(mapped, array, *tables, machine=machine, races=True)


@pytest.mark.parametrize(
    "fault", ["no_arrival", "no_hearing", "no_reading", "no_leaving", "one_semaphore", "no_barrier"]
)
def test_replay_names_a_fault(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Also where the kernel would wait for ever, for what it read too early."""
    with_fault(monkeypatch, fault)
    assert replayed(some(3)).findings


def test_only_what_is_sent_crosses_the_wire_and_nothing_races() -> None:
    lists, n = some(3), 4
    report = replayed(lists)
    assert not report.findings
    hops = np.array([[min((r - s) % n, (s - r) % n) for r in range(n)] for s in range(n)])
    note = 4 * (visits.head_lanes(n) + 128)
    want = 16 * (4096 * (lists.sizes * hops).sum() + note * hops.sum())
    assert sum(report.link_bytes) == want


def judged(x: jax.Array) -> Any:
    """Some of the rows of x to each device, and everyone's notes."""
    n, me = jax.lax.axis_size("x"), jax.lax.axis_index("x")
    sizes = (jnp.arange(n, dtype=jnp.int32) + me) % 3
    starts, listed = 3 * jnp.arange(n, dtype=jnp.int32), jnp.arange(3 * n, dtype=jnp.int32) % len(x)
    return noted(x, listed, starts, sizes, False)


@pytest.mark.parametrize("fault", ["none", "no_hearing"])
def test_the_judge_finds_it_sound_and_broken_ones_not(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with_fault(monkeypatch, fault)
    verdict = verify.check(judged, "f32[5,8,128]", devices=(2, 4))
    assert verdict.status == (SOUND if fault == "none" else FAULTY), verdict


@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_compiles_for_every_generation(generation: str) -> None:
    def call(x: jax.Array) -> Any:
        n = jax.lax.axis_size("x")
        sizes = jnp.full(n, 2, jnp.int32) + x[0, 0, 0].astype(jnp.int32)
        starts, listed = jnp.arange(n, dtype=jnp.int32), jnp.arange(n * len(x), dtype=jnp.int32)
        come, notes = noted(x, listed, starts, sizes, False)
        known = {"landings": starts, "come": notes[:, 0]}
        group = Group(("x",), (n,))
        return visits.send(come, listed, starts, sizes, 64, group, **known, interpret=False)[0]

    topology = harness.GENERATIONS[generation]
    compiled = harness.compile_for_tpu(call, topology, (16, 56, 128), dtype=jnp.bfloat16)
    assert compiled.ops.count("custom-call") == 2
