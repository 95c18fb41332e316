"""What would hang is refused before it starts; each case in a process with a time limit."""

import subprocess
import sys
import textwrap

import pytest

PROLOGUE = """
    import jax, numpy as np
    import pallas_collectives as pc
    from jax.sharding import PartitionSpec as P
    pc.simulate(4)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    x = np.ones((32, 128), np.float32)
    def run(f):
        shard = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        print(np.asarray(jax.jit(shard)(x)).shape)
"""

CASES = {
    "a device in no group": (
        "run(lambda a: pc.all_gather(a, 'x', axis_index_groups=[[0, 1], [2]]))",
        "CollectiveError: axis_index_groups=[[0, 1], [2]]: each of the axis's 4 device numbers",
    ),
    "groups of different sizes": (
        "run(lambda a: pc.all_gather(a, 'x', axis_index_groups=[[0, 1, 2], [3]]))",
        "groups must be of equal size",
    ),
    "a mean of groups of different sizes": (
        "run(lambda a: pc.pmean(a, 'x', axis_index_groups=[[0], [1, 2, 3]]))",
        "groups must be of equal size",
    ),
    "an empty group": (
        "run(lambda a: pc.psum(a, 'x', axis_index_groups=[[], [0, 1, 2, 3]]))",
        "no group may be empty",
    ),
    "two senders to one device": (
        "run(lambda a: pc.ppermute(a, 'x', [(0, 1), (2, 1)]))",
        "no device may be a target twice",
    ),
    "a sender that does not exist": (
        "run(lambda a: pc.ppermute(a, 'x', [(4, 1)]))",
        "a source must be a device number in [0, 4)",
    ),
    "an axis that is not there": (
        "run(lambda a: pc.all_to_all(a, 'y', 0, 0, tiled=True))",
        "UnboundAxisError: axis name 'y'",
    ),
}


# The cases one after another, and what each raises.
REFUSED = """
for name, case in {cases!r}.items():
    print("==", name, flush=True)
    try:
        exec(case)
    except Exception as error:
        print(type(error).__name__, error, sep=": ", flush=True)
"""


def test_refused_before_launch() -> None:
    cases = {name: program for name, (program, _) in CASES.items()}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROLOGUE) + REFUSED.format(cases=cases)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    said = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    assert said.keys() == CASES.keys()
    for name, (_, message) in CASES.items():
        assert message in said[name]


@pytest.mark.full
def test_too_few_threads_to_simulate_are_refused_where_that_hangs() -> None:
    program = (
        PROLOGUE
        + """
    import os
    from pallas_collectives import _compat, simulation
    os.environ["PJRT_NPROC"] = "1"
    _compat.callbacks_hold_threads = lambda: True  # as of JAX 0.10.2, the last that hangs
    print(simulation.obstacle())
    run(lambda a: pc.all_gather(a, "x", tiled=True, backend="pallas"))
    """
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "set PJRT_NPROC=" in done.stdout
    assert "BackendError" in done.stderr


@pytest.mark.parametrize("sizes, groups", [((4,), None), ((2, 2), None), ((4,), [[0, 1], [2, 3]])])
def test_rows_that_nobody_sends_are_refused_on_simulated_devices(
    sizes: tuple[int, ...], groups: list[list[int]] | None
) -> None:
    """The last device expects a row too many; clipped to what there is, 99 rows are 8."""
    program = (
        PROLOGUE
        + f"""
    names, groups = ("y", "x")[-{len(sizes)}:], {groups}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape({sizes}), names)
    n = {2 if groups else sizes[-1]}
    """
        + """
    def run(f):
        specs = {"in_specs": P(names), "out_specs": P(names)}
        print(np.asarray(jax.jit(jax.shard_map(f, mesh=mesh, check_vma=False, **specs))(x)).shape)

    def exchange(rows, more):
        me, ones = jax.lax.axis_index("x") % n, jax.numpy.ones(n, int)
        is_last = jax.lax.axis_index(names) == 3
        tables = np.arange(n), ones, jax.numpy.full(n, me), ones.at[-1].add(more * is_last)
        how = {"axis_name": "x", "axis_index_groups": groups, "algorithm": "direct"}
        return pc.ragged_all_to_all(rows, 0 * rows, *tables, **how)

    def everything(rows):
        whole, none = np.full(n, 99), np.zeros(n, np.int32)
        tables = none, whole, none, whole // 9
        return pc.ragged_all_to_all(rows, rows, *tables, axis_name="x", axis_index_groups=groups)

    run(lambda a: exchange(a, 0))
    run(everything)
    run(lambda a: exchange(a, 1))
    jax.effects_barrier()
    """
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith("(32, 128)\n(32, 128)\n") and done.returncode
    ones = [1] * (2 if groups else sizes[-1])
    wanted = f"CollectiveError: recv_sizes={[*ones[:-1], 2]} of device {len(ones) - 1}: they must"
    assert f"{wanted} be what is sent to it, {ones}" in done.stderr
