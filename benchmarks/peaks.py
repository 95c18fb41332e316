"""The bandwidth of a device's wires: what bus bandwidth is held against."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from pallas_collectives.topology import chips

# NVLink, GB/s one way per GPU, by how the device kind begins; from NVIDIA's data sheets.
_NVLINK = {
    "NVIDIA A100-SXM4": 300.0,
    "NVIDIA H100 80GB HBM3": 450.0,
    "NVIDIA H200": 450.0,
    "NVIDIA B200": 900.0,
    "NVIDIA GB200": 900.0,
}


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
    chip = chips.listed(members[0].device_kind)
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


def _links(members: Sequence[Any]) -> float:
    """ICI links of each device of the group that lead to others of it."""
    there = {tuple(device.coords) for device in members}
    extents = [len(set(along)) for along in zip(*there, strict=True)]
    links = sum(min(extent - 1, 2) for extent in extents)
    return links * len(there) / len(members)
