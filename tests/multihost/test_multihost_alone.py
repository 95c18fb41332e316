"""pallas_collectives.multihost in a program of one process, and its answers to bad input."""

import itertools
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import multihost_utils as theirs
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_multihost import assert_same_trees

import pallas_collectives
from multihost_inside import SPECS, TREES
from pallas_collectives import multihost as ours
from pallas_collectives.errors import CollectiveError, DtypeError
from pallas_collectives.multihost import leaves, wire
from pallas_collectives.multihost.leaves import Bytes


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((1, 8), ("processes", "lanes"))


@pytest.mark.parametrize("tree", TREES)
def test_movement_equals_jax(tree):
    tree = TREES[tree](0)
    assert_same_trees(ours.broadcast_one_to_all(tree), theirs.broadcast_one_to_all(tree))
    assert_same_trees(ours.process_allgather(tree), theirs.process_allgather(tree))


def test_scalars_are_stacked_as_in_a_program_of_several_processes():
    # JAX's own gives shape () here, and (processes,) from two processes on.
    assert ours.process_allgather(3.0, tiled=True).shape == (1,)


def test_waits_end_at_once():
    ours.barrier("alone")
    ours.sync_global_devices("alone")
    ours.assert_equal({"a": np.array([np.nan, 1]), "nothing": {}})
    assert not ours.reached_preemption_sync_point(3)


def test_the_result_of_a_broadcast_is_a_copy():
    x = np.zeros(3)
    ours.broadcast_one_to_all(x)[0] = 1
    assert not x.any()


@pytest.mark.parametrize("spec", SPECS)
def test_local_to_global_equals_jax(mesh, spec):
    x = {"a": np.arange(64, dtype=np.float32).reshape(8, 8), "b": jnp.ones((16, 8), bool)}
    mine, reference = (
        u.host_local_array_to_global_array(x, mesh, SPECS[spec]) for u in (ours, theirs)
    )
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(reference), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)
    assert ours.global_array_to_host_local_array(mine, mesh, SPECS[spec])["a"] is mine["a"]


def test_pspecs_are_a_prefix(mesh):
    x = {"a": [np.zeros(8), None, np.zeros((8, 2))], "b": np.zeros(3)}
    out = ours.host_local_array_to_global_array(x, mesh, {"a": P("lanes"), "b": P()})
    assert out["a"][1] is None
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(out)] == [P("lanes"), P("lanes"), P()]
    with pytest.raises(ValueError):
        ours.host_local_array_to_global_array(x, mesh, {"a": P("lanes")})


def test_float0_becomes_bool(mesh):
    x = np.zeros(8, jax.dtypes.float0)
    assert ours.host_local_array_to_global_array(x, mesh, P("lanes")).dtype == bool


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda mesh: ours.barrier(""), CollectiveError, "give it one"),
        (lambda mesh: ours.barrier(3), CollectiveError, "barrier(3)"),
        (lambda mesh: ours.barrier(None), CollectiveError, "barrier(None)"),
        (lambda mesh: ours.barrier("a", timeout=None), CollectiveError, "timeout=None"),
        (lambda mesh: ours.barrier("a", timeout="3"), CollectiveError, "timeout='3'"),
        (lambda mesh: ours.barrier("a", timeout=0), CollectiveError, "timeout=0"),
        (lambda mesh: ours.sync_global_devices("a", timeout=-1), CollectiveError, "positive"),
        (lambda mesh: ours.assert_equal(1, timeout=float("nan")), CollectiveError, "finite"),
        (
            lambda mesh: ours.reached_preemption_sync_point(1, timeout=float("inf")),
            CollectiveError,
            "finite",
        ),
        (lambda mesh: ours.broadcast_one_to_all(1, chunk_bytes=8), CollectiveError, "32 bytes"),
        (lambda mesh: ours.process_allgather(1, chunk_bytes=0), CollectiveError, "chunk_bytes=0"),
        (lambda mesh: ours.process_allgather(1, chunk_bytes=None), CollectiveError, "whole number"),
        (lambda mesh: ours.broadcast_one_to_all(1, chunk_bytes=1e6), CollectiveError, "1000000.0"),
        (lambda mesh: ours.process_allgather(1, tiled="no"), CollectiveError, "tiled='no'"),
        (lambda mesh: ours.reached_preemption_sync_point("a"), CollectiveError, "step_id='a'"),
        (lambda mesh: ours.broadcast_one_to_all(1, False), CollectiveError, "0 sources"),
        (lambda mesh: ours.process_allgather({"x": object()}), DtypeError, "leaf ['x'], a object"),
        (
            lambda mesh: jax.jit(lambda x: ours.process_allgather(x))(1.0),
            CollectiveError,
            "outside of jit",
        ),
        (
            lambda mesh: jax.jit(
                lambda x: ours.host_local_array_to_global_array(x, mesh, P("lanes"))
            )(np.zeros(8)),
            CollectiveError,
            "outside of jit",
        ),
        (
            lambda mesh: ours.host_local_array_to_global_array(1.0, mesh, None),
            CollectiveError,
            "PartitionSpec",
        ),
        (
            lambda mesh: ours.host_local_array_to_global_array(np.zeros(8), mesh, "lanes"),
            CollectiveError,
            "'lanes' among the pspecs",
        ),
        (
            lambda mesh: ours.global_array_to_host_local_array(1.0, None, P()),
            CollectiveError,
            "global_mesh=None",
        ),
    ],
)
def test_bad_input(mesh, call, error, words):
    with pytest.raises(error) as raised:
        call(mesh)
    assert words in str(raised.value)


def test_errors_can_be_sent_to_another_process():
    for kind in (ours.ProcessTimeoutError, ours.ProcessMismatchError):
        error = pickle.loads(pickle.dumps(kind("sync", [3, 1], "did not come")))
        assert type(error) is kind
        assert (error.processes, str(error)) == ((1, 3), "sync: processes 1 and 3 did not come")
    assert issubclass(ours.ProcessTimeoutError, TimeoutError)
    assert issubclass(ours.ProcessMismatchError, AssertionError)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), max_size=5),
    step=st.integers(1, 30),
)
def test_bytes_read_and_write_the_same_places(sizes, step):
    whole = np.random.default_rng(0).integers(256, size=sum(sizes)).astype(np.uint8)
    cuts = np.cumsum([0, *sizes])
    source = [whole[a:b].copy() for a, b in itertools.pairwise(cuts)]
    target = [np.zeros_like(part) for part in source]
    for start in range(0, len(whole), step):
        chunk = np.full(step, 255, np.uint8)
        Bytes(source).read(start, chunk)
        np.testing.assert_array_equal(chunk[: len(whole) - start], whole[start : start + step])
        Bytes(target).write(start, chunk)
    np.testing.assert_array_equal(np.concatenate([whole[:0], *target]), whole)


def test_a_piece_looks_at_its_own_arrays_alone(monkeypatch):
    """Python writes each piece of each process's part, and a model has many arrays."""
    looked = []
    monkeypatch.setattr(leaves, "max", lambda *x: looked.append(x) or max(x), raising=False)
    data = Bytes([np.zeros(8, np.uint8)] * 100)
    for start in range(0, data.size, 8):
        data.write(start, np.ones(8, np.uint8))
    assert len(looked) <= 2 * 100


@pytest.mark.parametrize("topology", ["v4:2x2x2", "v5e:4x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x2"])
@pytest.mark.parametrize("program", [wire.all_gather_program, wire.psum_program])
def test_the_bytes_travel_by_kernels_on_a_tpu(topology, program):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = wire.mesh_of(devices)
    processes = mesh.shape["processes"]
    assert processes > 1
    for row in mesh.devices:
        assert len({device.process_index for device in row}) == 1
    words = jax.ShapeDtypeStruct(
        (*mesh.devices.shape, 4096),
        np.uint32,
        sharding=NamedSharding(mesh, P("processes", "lanes")),
    )
    pallas_collectives.reset_counts()
    compiled = program(mesh).lower(words).compile()
    assert "tpu_custom_call" in compiled.as_text()
    assert {served_by for _, served_by, _ in pallas_collectives.counts()} == {"pallas"}


PROGRAM = """
import jax, signal, os, socket, sys, time
from pallas_collectives import multihost
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
jax.distributed.initialize(address, 1, 0)
assert not multihost.reached_preemption_sync_point(0)
if sys.argv[1:] == ["noticed"]:
    os.kill(os.getpid(), signal.SIGTERM)
    step = 1
    while not multihost.reached_preemption_sync_point(step):
        step += 1
        time.sleep(0.01)
"""


def run_program(*args, **env):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *args],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.full
@pytest.mark.parametrize("args", [[], ["noticed"]])
def test_the_watch_for_preemption_does_not_disturb_the_end_of_the_process(args):
    ended = run_program(*args)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.full
def test_without_the_preemption_service_there_is_an_error():
    ended = run_program(JAX_ENABLE_PREEMPTION_SERVICE="0")
    assert ended.returncode == 1
    assert "CollectiveError: reached_preemption_sync_point(0)" in ended.stderr


def test_live_devices_alone_are_all_and_bad_input_is_refused():
    with ours.live_devices(jax.devices()[::-1]) as devices:
        assert devices == jax.devices()
    for devices, options, told in (
        ([], {}, "not one of process 0"),
        ([0, 1], {}, "a sequence of devices"),
        (jax.devices()[0], {}, "a sequence of devices"),
        (jax.devices(), {"timeout": 0}, "a timeout is a positive, finite number"),
    ):
        with pytest.raises(CollectiveError, match=told), ours.live_devices(devices, **options):
            pass


def test_a_failure_is_jaxs_too_and_can_be_pickled():
    error = ours.ProcessFailureError("live_devices", [0], "died", jax.devices()[:2])
    assert isinstance(error, theirs.ProcessFailureError)
    assert error.failed_devices == set(jax.devices()[:2])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.processes) == (str(error), (0,))
