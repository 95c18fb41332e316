"""The simulation: times that can be worked out by hand, equality of devices alike, deadlocks,
leftovers.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import pallas_collectives as pc
import replay_kernels as kernels
from judged_cores import on_cores, tensor_cores
from pallas_collectives.replay import DataDependent, Machine, MachineError, Report, replay
from pallas_collectives.replay.trace_program import NoShardMap


def shape(n: int, rows: int = 64) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows * n, 128), jnp.float32)


def run(body: Any, machine: Machine, n: int, *args: Any, **keywords: Any) -> Report:
    axes = {"x": n} if machine.n_devices == n else {"x": n, "y": machine.n_devices // n}
    function = kernels.sharded(body, machine.mesh(axes), len(args) or 1)
    return replay(function, *(args or (shape(n),)), machine=machine, **keywords)


def one_ring(machine: Machine, n: int, rows: int = 64, **keywords: Any) -> Report:
    return run(lambda x: kernels.ring(x, n), machine, n, shape(n, rows), **keywords)


@pytest.mark.parametrize("rows", [8, 512, 65536])
def test_ring_takes_the_time_worked_out_by_hand(rows: int) -> None:
    n, machine = 16, Machine.named("v5p:16x16x16")
    g = machine.generation
    nbytes = rows * 512
    barrier = 2 * g.issue_cost + g.hop_latency
    own = g.issue_cost + g.dma_latency + nbytes * 2 / g.hbm_bandwidth
    wire = nbytes / (g.link_bandwidth * g.link_efficiency)
    step = g.issue_cost + g.dma_latency + wire + g.hop_latency
    report = one_ring(machine, n, rows)
    assert report.time == pytest.approx(g.launch_cost + barrier + own + (n - 1) * step, rel=1e-9)
    assert not report.findings
    assert report.devices_modelled == 1
    name, carried, _ = report.busiest_link
    assert carried == (n - 1) * nbytes
    assert name.endswith("+x")
    in_use = report.link_use[report.link_bytes > 0]
    assert in_use == pytest.approx((n - 1) * wire / report.time)


@pytest.mark.parametrize("cores", [1, 2])
def test_cores_of_a_device_share_its_hbm(cores: int) -> None:
    """Each copies its part; two take as long as one, but for their meeting."""

    def body(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any, sem: Any) -> None:
            rows = x.shape[0] // cores
            part = pl.ds(jax.lax.axis_index("core") * rows, rows)
            pltpu.async_copy(x_ref.at[part], o_ref.at[part], sem).wait()

        return on_cores(kernel, x, tensor_cores(cores), pltpu.SemaphoreType.DMA)

    machine, nbytes = Machine.named("v5p:4"), 65536 * 512
    g = machine.generation
    report = run(body, machine, 4, shape(4, 65536))
    copy = g.issue_cost + g.dma_latency + 2 * nbytes / g.hbm_bandwidth
    assert g.launch_cost + copy <= report.time * (1 + 1e-9) <= 1.01 * (g.launch_cost + copy)
    assert report.devices_modelled == cores


def test_the_hop_that_closes_a_line_is_routed_back_over_it() -> None:
    n, machine = 4, Machine.named("v5p:4")
    report = one_ring(machine, n, 65536)
    carried = {machine.link_name(i): b for i, b in enumerate(report.link_bytes) if b}
    nbytes = 3 * 65536 * 512
    ups = {f"chip ({i}, 0, 0) +x": nbytes for i in range(3)}
    downs = {f"chip ({i}, 0, 0) -x": nbytes for i in (1, 2, 3)}
    assert carried == ups | downs


def test_copies_that_share_a_link_share_its_bandwidth() -> None:
    """All of a line of 3's devices send to device 0's side at once: the link next to it carries two
    copies.
    """

    def body(x: Any) -> Any:
        from jax import lax
        from jax.experimental.pallas import tpu as pltpu

        def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
            me = lax.axis_index("x")
            hop = pltpu.make_async_remote_copy(
                x_ref, o_ref.at[me], send, recv, device_id={"x": me * 0}
            )
            hop.start()
            hop.wait_send()

            @kernels.pl.when(me == 0)
            def _() -> None:
                for i in range(3):
                    pltpu.make_async_copy(x_ref, o_ref.at[i], recv).wait()

        out = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
        return kernels.launch(kernel, x, out=out, scratch=[kernels.DMA, kernels.DMA])

    machine = Machine.named("v5p:3")
    g = machine.generation
    rows = 65536
    report = run(body, machine, 3, shape(3, rows))
    link = g.link_bandwidth * g.link_efficiency
    expected = g.launch_cost + g.issue_cost + g.dma_latency + 2 * rows * 512 / link
    assert report.time == pytest.approx(expected + 2 * g.hop_latency, rel=1e-3)


_ALIKE: dict[str, Any] = {
    "ring": lambda x, n: kernels.ring(x, n),
    "relay": lambda x, n: kernels.relay(x, n, rounds=5),
    "uneven": lambda x, n: kernels.uneven(x, n),
    "summed": lambda x, n: kernels.summed(x, n),
    "doubled": lambda x, n: kernels.doubled(x),
}


@pytest.mark.parametrize("machine", ["v5e:16x4", "v5e:8x4", "v5p:4x4x4", "v5p:2x4x3", "7x:4x4x4"])
@pytest.mark.parametrize("name", _ALIKE)
def test_stepping_devices_alike_once_changes_nothing(name: str, machine: str) -> None:
    pod = Machine.named(machine)
    n = pod.shape[0]
    body = lambda x: _ALIKE[name](x, n)  # noqa: E731
    once = run(body, pod, n)
    every = run(body, pod, n, symmetric=False)
    assert every.devices_modelled == pod.n_devices
    assert once.devices_modelled <= n
    assert once.time == pytest.approx(every.time, rel=1e-12)
    np.testing.assert_allclose(once.link_bytes, every.link_bytes)
    ends = {c.device: c.time for c in every.engine.cores}
    of_device = once.engine.classes.of_device
    for device, end in ends.items():
        assert once.engine.cores[of_device[device]].time == pytest.approx(end, rel=1e-12)


def test_devices_that_differ_are_told_apart() -> None:
    machine = Machine.named("v5p:8x4x4")
    report = run(lambda x: kernels.uneven(x, 8), machine, 8)
    assert report.devices_modelled == 8
    g = machine.generation
    copies = [len(c.messages) for c in report.engine.cores]
    assert sorted(copies) == [1, 1, 2, 3, 4, 5, 6, 7]
    one = g.issue_cost + g.dma_latency + 64 * 512 * 2 / g.hbm_bandwidth
    assert report.time == pytest.approx(g.launch_cost + 7 * one)


def test_a_deadlock_names_who_waits_where_for_whom() -> None:
    report = run(lambda x: kernels.ring(x, 8, fault="stuck"), Machine.named("v5e:8"), 8)
    assert not report.ok
    assert [s.device for s in report.stuck] == list(range(8))
    stuck = report.stuck[3]
    assert (stuck.has, stuck.needs) == (2, 3)
    assert stuck.semaphore == "barrier[collective_id=0]"
    assert "replay_kernels.py" in stuck.line
    assert "(barrier)" in stuck.line
    text = str(stuck)
    assert "device 2 has signalled it" in text
    assert "device 4 has signalled it" in text
    assert "deadlock" in str(report)


def test_leftover_counts_are_reported() -> None:
    report = run(lambda x: kernels.ring(x, 4, fault="left_over"), Machine.named("v5e:4"), 4)
    assert {(x.device, x.semaphore, x.value) for x in report.leftovers} == {
        (d, "barrier[collective_id=0]", 1) for d in range(4)
    }
    report = run(lambda x: kernels.ring(x, 4, fault="no_wait"), Machine.named("v5e:4"), 4)
    assert len(report.leftovers) == 4 * 3
    assert not report.ok


def test_block_copies_over_a_grid_overlap_the_body() -> None:
    machine = Machine.named("v5e:4")
    rows = 8 * 64
    report = run(lambda x: kernels.doubled(x), machine, 4, shape(4, rows))
    g = machine.generation
    moved = 2 * rows * 512
    assert report.time > moved / g.hbm_bandwidth
    assert report.vmem_bytes == 4 * 8 * 512  # two blocks in, two out
    one_by_one = (rows // 8) * 2 * (g.dma_latency + 8 * 512 / g.hbm_bandwidth)
    assert report.time < one_by_one


def test_scratch_is_counted() -> None:
    report = run(lambda x: kernels.summed(x, 4), Machine.named("v5e:4"), 4)
    assert report.hbm_scratch_bytes == 64 * 512
    assert report.vmem_bytes == 6 * 8 * 512  # three operands, two buffers each


def test_a_kernel_that_reads_a_semaphore_is_stepped_in_time() -> None:
    machine = Machine.named("v5p:4x4x4")
    report = run(lambda x: kernels.polling(x, 4), machine, 4, races=True)
    assert not report.findings
    assert report.ok is None  # races cannot be looked for
    assert "not looked for (the kernel reads a semaphore" in str(report)
    assert report.devices_modelled == 64
    g = machine.generation
    polls = g.hop_latency / g.issue_cost
    counts = [sum(type(c).__name__ == "Read" for c in report.engine.program.columns)]
    assert counts[0] == pytest.approx(64 * polls, rel=0.2)


def test_the_critical_path_adds_up_to_the_time() -> None:
    report = one_ring(Machine.named("v5e:8x4"), 8, 512)
    path = report.critical_path
    assert path[0].start == 0.0
    assert path[-1].end == pytest.approx(report.time)
    for before, after in itertools.pairwise(path):
        assert after.start == pytest.approx(before.end, abs=1e-11)
    assert sum(report.critical_time().values()) == pytest.approx(report.time)


def test_waits_name_their_cause() -> None:
    report = one_ring(Machine.named("v5e:16x16"), 16)
    longest = report.held[0]
    assert longest.cause.startswith("for a copy from replay_kernels.py")
    assert longest.seconds < report.time


def test_calls_follow_each_other_on_each_device() -> None:
    machine = Machine.named("v5e:16x16")
    once = one_ring(machine, 16)
    twice = run(lambda x: kernels.ring(kernels.ring(x, 16)[0], 16), machine, 16)
    assert twice.time == pytest.approx(2 * once.time, rel=1e-6)
    assert len(twice.kernels) == 2
    assert not twice.findings


def test_sizes_given_as_data_are_followed_and_shapes_are_refused() -> None:
    machine = Machine.named("v5p:4")
    x = jax.ShapeDtypeStruct((32 * 4, 128), jnp.float32)
    rows = np.array([[8, 32], [16, 8], [24, 16], [32, 24]], np.int32)
    body = lambda rows, x: kernels.ragged(rows[0], x, 4)  # noqa: E731
    report = run(body, machine, 4, rows, x)
    assert not report.findings
    link = {machine.link_name(i): b for i, b in enumerate(report.link_bytes)}
    assert [link[f"chip ({i}, 0, 0) +x"] for i in range(3)] == [8 * 512, 16 * 512, 24 * 512]
    with pytest.raises(DataDependent, match=r"replay_kernels.py.*\n.*numpy array"):
        run(body, machine, 4, jax.ShapeDtypeStruct(rows.shape, jnp.int32), x)


def test_sizes_that_the_program_gathers_are_followed_as_its_refusal_says() -> None:
    machine, x = Machine.named("v5p:4"), jax.ShapeDtypeStruct((32 * 4, 128), jnp.float32)
    rows = np.array([[8, 32], [16, 8], [24, 16], [32, 24]], np.int32)

    def body(gather: Any, row: Any, x: Any) -> Any:
        everyones = gather(row[0], "x")
        mine = jax.lax.dynamic_index_in_dim(everyones, jax.lax.axis_index("x"), keepdims=False)
        return kernels.ragged(mine, x, 4)

    def by_sum(row: Any, axis: str) -> Any:
        places = jnp.zeros((4, 2), jnp.int32).at[jax.lax.axis_index(axis)].set(row)
        return jax.lax.psum(places, axis)

    with pytest.raises(DataDependent, match="only all_gather hands them on"):
        run(functools.partial(body, by_sum), machine, 4, rows, x)
    for gather in (jax.lax.all_gather, pc.all_gather):
        assert not run(functools.partial(body, gather), machine, 4, rows, x).findings


def test_a_table_in_the_program_is_followed_however_large() -> None:
    """As that of a ring with an order of its own: n rows, of which each device takes its own."""
    machine = Machine.named("v5p:4")
    table = np.zeros((1 << 18, 8), np.int32)
    table[:4, :2] = [[8, 32], [16, 8], [24, 16], [32, 24]]

    def body(x: Any) -> Any:
        rows = jax.lax.dynamic_index_in_dim(table, jax.lax.axis_index("x"), keepdims=False)
        return kernels.ragged(rows, x, 4)

    report = run(body, machine, 4, shape(4, 32))
    link = {machine.link_name(i): b for i, b in enumerate(report.link_bytes)}
    assert not report.findings
    assert [link[f"chip ({i}, 0, 0) +x"] for i in range(3)] == [8 * 512, 16 * 512, 24 * 512]


def test_what_cannot_be_replayed_is_refused() -> None:
    machine = Machine.named("v5e:4")
    with pytest.raises(NoShardMap, match="shard_map"):
        replay(lambda x: x + 1, shape(4), machine=machine)
    function = kernels.sharded(lambda x: kernels.ring(x, 4), machine.mesh({"x": 4}))
    with pytest.raises(MachineError, match="4 mesh positions do not fit"):
        replay(function, shape(4), machine="v5e:2")
    with pytest.raises(MachineError, match="machine '4': want GENERATION"):
        replay(function, shape(4), machine=4)  # type: ignore[arg-type]
    with pytest.raises(MachineError, match="all different"):
        replay(function, shape(4), machine=machine, placement=np.array([0, 1, 1, 2]))
    with pytest.raises(MachineError, match="device -1"):
        replay(function, shape(4), machine=machine, placement=np.array([0, 1, 2, -1]))


def test_what_would_touch_other_memory_is_refused() -> None:
    from jax.experimental.pallas import tpu as pltpu

    def body(x: Any, index: Any, to: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
            me = jax.lax.axis_index("x")
            hop = pltpu.make_async_remote_copy(
                x_ref.at[kernels.pl.ds(index(me), 8)], o_ref, send, recv, device_id={"x": to(me)}
            )
            hop.start()
            hop.wait()

        out = jax.ShapeDtypeStruct((8, 128), x.dtype)
        return kernels.launch(kernel, x, out=out, scratch=[kernels.DMA, kernels.DMA])

    machine = Machine.named("v5p:4")
    report = run(lambda x: body(x, lambda me: 8 * me, lambda me: 3 - me), machine, 4, shape(4))
    assert not report.findings
    with pytest.raises(IndexError, match=r"indices 0 to 79 of 64 of x_ref at test_replay_engine"):
        run(lambda x: body(x, lambda me: 24 * me, lambda me: 3 - me), machine, 4, shape(4))
    with pytest.raises(IndexError, match=r"device 4 on axis 'x' of size 4 at test_replay_engine"):
        run(lambda x: body(x, lambda me: 8 * me, lambda me: me + 1), machine, 4, shape(4))


def test_what_surrounds_a_kernel_may_be_anything() -> None:
    """Random keys, lax's collectives, tables under varying types, debug prints, plain numbers."""
    machine = Machine.named("v5e:4")
    table = np.arange(8, dtype=np.int32).reshape(4, 2)

    def body(x: Any, rows: Any, factor: Any) -> Any:
        rows = jax.lax.dynamic_index_in_dim(table, jax.lax.axis_index("x")) + rows
        noise = jax.random.normal(jax.random.key(0), x.shape) * jax.lax.psum(rows.sum(), "x")
        return kernels.doubled(x + noise * factor)

    def kernel(x_ref: Any, o_ref: Any) -> None:
        jax.debug.print("never printed")
        kernels.pl.delay(5000)
        o_ref[...] = x_ref[...]

    spec = jax.sharding.PartitionSpec
    everything = jax.shard_map(
        body,
        mesh=machine.mesh({"x": 4}),
        in_specs=(spec("x"), spec("x"), spec()),
        out_specs=spec("x"),
        check_vma=False,
    )
    rows = np.zeros((4, 2), np.int32)
    report = replay(everything, shape(4), rows, 2, machine=machine)
    plain = run(lambda x: kernels.doubled(x), machine, 4, shape(4))
    assert report.time == pytest.approx(plain.time)
    assert {"psum", "random_bits"} <= set(report.unmodelled)
    late = run(lambda x: kernels.pl.pallas_call(kernel, out_shape=x)(x), machine, 4, shape(4))
    assert plain.time < 5e-6 < late.time

    def varying(x: Any) -> Any:
        return x + jnp.asarray(table)[jax.lax.axis_index("x")].sum()

    spec_of_x = {"in_specs": spec("x"), "out_specs": spec("x")}
    checked = jax.shard_map(varying, mesh=machine.mesh({"x": 4}), check_vma=True, **spec_of_x)
    report = replay(checked, shape(4), machine=machine, races=True)
    assert not report.findings
    assert report.ok is False
    assert "NO KERNEL" in str(report)


def test_placement_decides_which_links_are_used() -> None:
    """A ring laid along a snake over 4x4 uses single hops only; in row-major order it does not."""
    machine = Machine.named("v5e:4x4")
    cycle = [
        0,
        1,
        2,
        3,
        7,
        6,
        5,
        9,
        10,
        11,
        15,
        14,
        13,
        12,
        8,
        4,
    ]  # a Hamiltonian cycle of the grid
    function = kernels.sharded(lambda x: kernels.ring(x, 16), machine.mesh({"x": 16}))
    naive = replay(function, shape(16), machine=machine)
    along = replay(function, shape(16), machine=machine, placement=np.array(cycle))
    assert along.devices_modelled == 1
    assert along.time < naive.time
    assert set(along.link_bytes[along.link_bytes > 0]) == {15 * 64 * 512}
