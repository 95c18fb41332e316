"""The bandwidth of a device's wires: what bus bandwidth is held against."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from pallas_collectives.replay import GENERATIONS, Generation

# NVLink, GB/s one way per GPU, by how the device kind begins; from NVIDIA's data sheets.
_NVLINK = {
    "NVIDIA A100-SXM4": 300.0,
    "NVIDIA H100 80GB HBM3": 450.0,
    "NVIDIA H200": 450.0,
    "NVIDIA B200": 900.0,
    "NVIDIA GB200": 900.0,
}
_ALSO_CALLED = {"TPU v5p": "TPU v5", "TPU v5e": "TPU v5 lite", "TPU v6e": "TPU v6 lite"}


def of_group(mesh: Mesh, axes: tuple[str, ...]) -> float | None:
    """GB/s one way that each device's wires to others of its group carry; None if not known.

    On a TPU: the links along the torus axes on which the group lies, one where it has two chips on
    such an axis and two where it has more, shared by the devices of a chip.
    """
    others = [i for i, name in enumerate(mesh.axis_names) if name not in axes]
    group = mesh.devices.transpose(*others, *map(mesh.axis_names.index, axes))
    members = group[(0,) * len(others)].reshape(-1).tolist()
    if members[0].platform == "gpu":
        hosts = {_domain(device) for device in members}
        return nvlink(members[0].device_kind) if len(hosts) == 1 else None
    chip = generation(members[0].device_kind)
    return chip.link_bandwidth / 1e9 * _links(members) if chip else None


def nvlink(kind: str) -> float | None:
    """GB/s one way of a GPU's NVLinks; None for boards without, or with fewer than the chip has."""
    if "NVL" in kind.split():
        return None
    return next((speed for prefix, speed in _NVLINK.items() if kind.startswith(prefix)), None)


def _domain(device: Any) -> Any:
    """What GPUs that NVLink joins have in common."""
    host = getattr(device, "slice_index", None)
    return f"process {device.process_index}" if host is None else host


def generation(kind: str) -> Generation | None:
    """The TPU generation of a device kind, as the model knows it."""
    known = {g.device_kind: g for g in GENERATIONS.values()}
    known |= {other: known[name] for other, name in _ALSO_CALLED.items()}
    found = [prefix for prefix in known if kind.startswith(prefix)]
    return known[max(found, key=len)] if found else None


def _links(members: Sequence[Any]) -> float:
    """ICI links of each device of the group that lead to others of it."""
    chips = {tuple(device.coords) for device in members}
    extents = [len(set(along)) for along in zip(*chips, strict=True)]
    links = sum(min(extent - 1, 2) for extent in extents)
    return links * len(chips) / len(members)
