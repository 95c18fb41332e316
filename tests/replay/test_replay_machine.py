"""The machine model: names, wrap rules, routes, and fair sharing of links."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pallas_collectives.replay import GENERATIONS, Machine, MachineError
from pallas_collectives.replay.network import Network


@pytest.mark.parametrize(
    ("name", "shape", "wraps"),
    [
        ("v5e:4x4", (4, 4), (False, False)),
        ("v5e:8x16", (8, 16), (False, True)),
        ("v5e:16x16", (16, 16), (True, True)),
        ("v6e:16x4", (16, 4), (True, False)),
        ("v5p:4x4x4", (4, 4, 4), (True, True, True)),
        ("v5p:2x2x4", (2, 2, 4), (False, False, False)),
        ("v4:4x4x8", (4, 4, 8), (True, True, True)),
        ("tpu7x:4x4x4", (4, 4, 4), (True, True, True)),
        ("v5p:8", (8, 1, 1), (False, False, False)),
    ],
)
def test_names_and_wrap_rules(name: str, shape: tuple[int, ...], wraps: tuple[bool, ...]) -> None:
    machine = Machine.named(name)
    assert machine.shape == shape
    assert machine.wraps == wraps


@pytest.mark.parametrize(
    ("name", "keywords", "words"),
    [
        ("v3:4x4", {}, "v3:4x4.*generation of"),
        ("v5e", {}, "GENERATION:AxBxC"),
        ("v5e:4x4x4", {}, "2 torus axes"),
        ("v5e:4x4", {"hop": 1.0}, "'hop'.*hop_latency"),
        ("v5e:4x4", {"wraps": (True,)}, "one for each of the 2"),
    ],
)
def test_impossible_machines_are_refused(name: str, keywords: dict, words: str) -> None:
    with pytest.raises(MachineError, match=words):
        Machine.named(name, **keywords)


def test_constants_can_be_overridden() -> None:
    machine = Machine.named("v5e:4x4", link_bandwidth=50e9, hop_latency=2e-6)
    assert machine.generation.link_bandwidth == 50e9
    assert machine.generation.hop_latency == 2e-6
    assert GENERATIONS["v5e"].link_bandwidth == 45e9


def test_a_mesh_says_which_chip_it_is_of() -> None:
    mesh = Machine.named("v5p:4x4x4").mesh({"a": 16, "b": 4})
    assert mesh.abstract_device.device_kind == "TPU v5"
    assert mesh.axis_sizes == (16, 4)
    with pytest.raises(MachineError, match="more devices"):
        Machine.named("v5e:4x4").mesh({"a": 17})


def _path(machine: Machine, src: int, dst: int) -> list[str]:
    hops = machine.routes(np.array([src]), np.array([dst]))
    return [machine.link_name(int(h[0])) for h in hops if h[0] >= 0]


def test_routes_go_axis_by_axis_the_shorter_way() -> None:
    torus = Machine.named("v5e:16x16")
    assert _path(torus, 0, 16) == ["chip (0, 0) +x"]
    assert _path(torus, 0, 15 * 16) == ["chip (0, 0) -x"]
    assert _path(torus, 0, 2 * 16 + 15) == ["chip (0, 0) +x", "chip (1, 0) +x", "chip (2, 0) -y"]
    grid = Machine.named("v5e:4x4")
    assert _path(grid, 12, 0) == ["chip (3, 0) -x", "chip (2, 0) -x", "chip (1, 0) -x"]


def test_routes_halfway_round_use_both_directions_alike() -> None:
    torus = Machine.named("v5p:4x4x4")
    devices = np.arange(64)
    opposite = (devices + 32) % 64
    load = np.zeros(torus.n_links)
    for hop in torus.routes(devices, opposite):
        np.add.at(load, hop[hop >= 0], 1)
    used = load[load > 0]
    assert len(used) == 2 * 64
    assert set(used) == {1.0}


def test_dies_of_a_chip_share_its_links_and_have_their_own() -> None:
    machine = Machine.named("7x:4x4x4")
    assert machine.n_devices == 128
    assert _path(machine, 0, 1) == ["chip (0, 0, 0) die 0 to its neighbour"]
    assert _path(machine, 0, 2) == ["chip (0, 0, 0) +z"]
    assert _path(machine, 1, 3) == ["chip (0, 0, 0) +z"]


def test_every_route_arrives() -> None:
    machine = Machine.named("v5p:4x4x8")
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, machine.n_devices, (2, 500))
    ends = np.stack(np.unravel_index(src, machine.shape))
    for hop in machine.routes(src, dst):
        chip_axis, backwards = hop // 2, hop % 2
        chip, axis = chip_axis // 3, chip_axis % 3
        moving = np.nonzero(hop >= 0)[0]
        here = np.ravel_multi_index(ends[:, moving], machine.shape)
        assert (chip[moving] == here).all()
        ends[axis[moving], moving] += 1 - 2 * backwards[moving]
        ends %= np.array(machine.shape)[:, None]
    assert (np.ravel_multi_index(ends, machine.shape) == dst).all()


@dataclasses.dataclass
class _Device:
    coords: list[int]
    core_on_chip: int = 0


def test_placement_follows_the_devices_coordinates() -> None:
    # The order in which an ahead-of-time v5e:4x4 lists its first row of hosts: 2x2 chips a host.
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    devices = [_Device([x, y, 0]) for x, y in order]
    placement = Machine.named("v5e:4x4").placement_of(devices)
    assert placement.tolist() == [4 * x + y for x, y in order]
    dies = [_Device([0, 0, 0], die) for die in (0, 1)] + [_Device([1, 0, 0], die) for die in (0, 1)]
    assert Machine.named("7x:2x2x1").placement_of(dies).tolist() == [0, 1, 4, 5]


# Sharing ------------------------------------------------------------------------------------------


def _rates(capacity: list[float], flows: list[list[tuple[int, float]]]) -> list[float]:
    network = Network(np.array(capacity))
    added = [network.add(None, 1.0, uses, 0.0) for uses in flows]
    network.resolve(0.0)
    return [flow.rate for flow in added]


@pytest.mark.parametrize(
    ("capacity", "flows", "rates"),
    [
        ([10.0], [[(0, 1.0)]], [10.0]),
        ([10.0], [[(0, 1.0)], [(0, 1.0)]], [5.0, 5.0]),
        # the textbook case: the flow over both links gets what the tighter link leaves it, the
        # other takes the rest
        ([10.0, 4.0], [[(0, 1.0), (1, 1.0)], [(0, 1.0)], [(1, 1.0)]], [2.0, 8.0, 2.0]),
        # one flow stands for three on the shared resource
        ([12.0, 100.0], [[(0, 3.0)], [(0, 1.0), (1, 1.0)]], [3.0, 3.0]),
        ([10.0, 3.0], [[(0, 1.0), (1, 1.0)], [(0, 1.0)]], [3.0, 7.0]),
    ],
)
def test_rates_are_max_min_fair(
    capacity: list[float], flows: list[list[tuple[int, float]]], rates: list[float]
) -> None:
    assert _rates(capacity, flows) == pytest.approx(rates)


def test_incremental_rates_equal_rates_from_scratch() -> None:
    rng = np.random.default_rng(1)
    capacity = rng.uniform(5, 20, 12)
    network = Network(capacity)
    live = []
    for step in range(200):
        if live and rng.random() < 0.45:
            network.remove(live.pop(int(rng.integers(len(live)))))
        else:
            used = rng.choice(12, size=int(rng.integers(1, 4)), replace=False)
            live.append(network.add(None, 1.0, [(int(r), 1.0) for r in used], float(step)))
        network.resolve(float(step))
        fresh = _rates(capacity.tolist(), [flow.uses for flow in live])
        assert [flow.rate for flow in live] == pytest.approx(fresh, rel=1e-6)


def test_a_machine_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "pod.json"
    machine = Machine.named("7x:2x2x1", hop_latency=0.9e-6, reaches_all=False)
    machine.save(path, "measured")
    assert Machine.load(path) == Machine.named(str(path)) == machine
    assert json.loads(path.read_text())["about"] == "measured"
    assert Machine.named(str(path), issue_cost=1e-9).generation.issue_cost == 1e-9
    wraps = (True, False, False)
    assert Machine.named(str(path), wraps).wraps == wraps


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda c: c.pop("generation"), "KeyError"),
        (lambda c: c["generation"].pop("hop_latency"), "must have exactly the fields"),
        (lambda c: c["generation"].update(hop_latency="1 us"), "hop_latency is '1 us'"),
        (
            lambda c: c["generation"].update(hop_latency=-1.0),
            "hop_latency is -1.0, and must be a number of 0 or more",
        ),
        (lambda c: c["generation"].update(hop_latency=float("nan")), "hop_latency is nan"),
        (lambda c: c["generation"].update(reaches_all=1), "reaches_all is 1"),
        (lambda c: c["generation"].update(name="v99"), "KeyError: 'v99'"),
        (lambda c: c.update(shape=[2, 2]), "shape"),
        (lambda c: c.update(shape=[2, 0, 1]), "shape"),
    ],
)
def test_a_file_that_is_no_machine_is_refused(tmp_path: Path, change: Any, told: str) -> None:
    path = tmp_path / "pod.json"
    Machine.named("v5p:2x2x1").save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(MachineError, match=r"pod\.json holds no machine") as raised:
        Machine.load(path)
    assert told in str(raised.value)


def test_no_file_and_no_json_are_refused(tmp_path: Path) -> None:
    for text in (None, "not JSON", "[]"):
        path = tmp_path / "pod.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(MachineError, match=r"holds no machine .*Machine\.save"):
            Machine.load(path)
