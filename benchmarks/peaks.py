"""The bandwidth of a device's wires: what bus bandwidth is held against."""

import os
from collections.abc import Iterable, Sequence
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
    """GB/s that the bus bandwidth of a group cannot exceed; None if not known.

    On a GPU: its NVLinks, one way. On a TPU: a chip's links along the torus axes on which the group
    lies, one where it has two chips on such an axis and two where it has more. Devices of a chip
    that are in groups of their own share them. Of one group they need not: what comes over a link
    once is for both, and what one has from the other is on no link.
    """
    others = [i for i, name in enumerate(mesh.axis_names) if name not in axes]
    group = mesh.devices.transpose(*others, *map(mesh.axis_names.index, axes))
    members = group[(0,) * len(others)].reshape(-1).tolist()
    if members[0].platform == "gpu":
        hosts = {_domain(device) for device in members}
        switches_add = os.environ.get("NCCL_NVLS_ENABLE", "0") != "0"  # then wires carry less
        known = len(hosts) == 1 and not switches_add
        return nvlink(members[0].device_kind) if known else None
    chip = chips.listed(members[0].device_kind)
    return chip.link_bandwidth / 1e9 * _links(members, mesh.devices.flat) if chip else None


def nvlink(kind: str) -> float | None:
    """GB/s one way of a GPU's NVLinks; None for boards without, or with fewer than the chip has."""
    if "NVL" in kind.split():
        return None
    return next((speed for prefix, speed in _NVLINK.items() if kind.startswith(prefix)), None)


def _domain(device: Any) -> Any:
    """What GPUs that NVLink joins have in common."""
    host = getattr(device, "slice_index", None)
    return f"process {device.process_index}" if host is None else host


def _links(members: Sequence[Any], devices: Iterable[Any]) -> float:
    """ICI links that lead from a device of the group to others of it; 0 for a group on one chip."""
    there = {tuple(device.coords) for device in members}
    extents = [len(set(along)) for along in zip(*there, strict=True)]
    links = sum(min(extent - 1, 2) for extent in extents)
    groups = sum(tuple(device.coords) in there for device in devices) / len(members)
    on_links = (1 - 1 / len(there)) / (1 - 1 / len(members)) if links else 1.0
    return links / groups / on_links
