"""Which device, and which core of its chip, an index or a kernel's `device_id` names.

Cores are counted as `Program` counts them: core c of device d is `d + c * n_devices`. Arrays of
these are called lanes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from pallas_collectives.replay.values import UNKNOWN, Lanes
from pallas_collectives.replay.views import DataDependent


@dataclasses.dataclass(frozen=True)
class CoreMesh:
    """Cores of each chip that run one kernel together: those from number `first`, row-major."""

    first: int
    axes: dict[str, int]

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())

    def holds(self, number: np.ndarray) -> np.ndarray:
        """Whether each of the cores is one of these."""
        return (self.first <= number) & (number < self.first + self.size)

    def strides(self) -> dict[str, int]:
        sizes = list(self.axes.values())
        return {name: math.prod(sizes[i + 1 :]) for i, name in enumerate(self.axes)}

    def coordinate(self, name: str, number: np.ndarray) -> np.ndarray:
        """Where along an axis the cores of these numbers are."""
        return (number - self.first) // self.strides()[name] % self.axes[name]


class Devices:
    """The devices of a mesh with axes of these sizes, and the cores that kernels run on.

    `cores`: those of the kernel being stepped, if it runs on meshes of cores.
    """

    def __init__(self, axes: dict[str, int]):
        self.axes = axes
        self.n_devices = math.prod(axes.values())
        self.n_cores = 1  # on each chip, of all kernels so far
        self.cores: tuple[CoreMesh, ...] = ()
        self._targets: dict[bytes, np.ndarray] = {}
        every, shape = np.arange(self.n_devices), tuple(axes.values())
        self._coordinates = dict(
            zip(axes, (c.astype(np.int32) for c in np.unravel_index(every, shape)), strict=True)
        )
        self._strides = dict(
            zip(axes, (math.prod(shape[i + 1 :]) for i in range(len(shape))), strict=True)
        )

    @property
    def n_lanes(self) -> int:
        return self.n_devices * self.n_cores

    def sizes(self) -> dict[str, int]:
        """Sizes of the axes that are in scope."""
        sizes = dict(self.axes)
        for mesh in self.cores:
            sizes |= mesh.axes
        return sizes

    def axis_index(self, name: str, lanes: np.ndarray) -> Lanes:
        if name not in self._coordinates:
            return self._core_index(name, lanes)
        coordinates = self._coordinates[name]
        if len(lanes) == 1:
            return int(coordinates[lanes[0] % self.n_devices])
        if len(lanes) == self.n_devices and self.n_cores == 1:
            return coordinates
        return coordinates[lanes % self.n_devices]

    def _core_index(self, name: str, lanes: np.ndarray) -> Lanes:
        index = np.zeros(len(lanes), np.int32)
        number = lanes // self.n_devices
        for mesh in self.cores:
            inside = mesh.holds(number)
            if name in mesh.axes:
                index[inside] = mesh.coordinate(name, number[inside])
        return int(index[0]) if (index == index[0]).all() else index

    def target(
        self,
        device_id: Any,
        logical: bool,
        lanes: np.ndarray,
        core: Lanes | None = None,
        home: CoreMesh | None = None,
    ) -> Any:
        """The device (its row-major position in the mesh) that a kernel's `device_id` names, and
        of its cores, if they are several, the one that it or `core` names.

        `home`: the cores whose memory is meant, if the memory says so.
        """
        elsewhere = home is not None and not home.holds(lanes // self.n_devices).all()
        if device_id is None and core is None and not elsewhere:
            return None
        by_axis: dict[str, Any] = {}
        if device_id is None:
            pass
        elif isinstance(device_id, dict):
            by_axis = self._by_single_axis(device_id)
        elif logical:
            if isinstance(device_id, (tuple, list)):
                raise ValueError(
                    f"device_id has {len(device_id)} indices and is LOGICAL, which is one number "
                    "and no tuple; give the number, or a dict of mesh axes"
                )
            return self._canonical(self._on_core(device_id, {}, core, lanes, home))
        else:
            ids = device_id if isinstance(device_id, (tuple, list)) else (device_id,)
            if len(ids) != len(self.axes):
                raise ValueError(
                    f"device_id has {len(ids)} of the indices along {', '.join(self.axes)}, and "
                    "a tuple has all of them; give each, or a dict of those that differ"
                )
            by_axis = dict(zip(self.axes, ids, strict=True))
        device: Any = 0
        for name, stride in self._strides.items():
            index = by_axis[name] if name in by_axis else self.axis_index(name, lanes)
            if index is UNKNOWN:
                raise DataDependent("a device id")
            first, last = np.min(index), np.max(index)
            if not 0 <= first <= last < self.axes[name]:
                outside = last if first >= 0 else first
                raise IndexError(f"device {outside} on axis {name!r} of size {self.axes[name]}")
            device = device + index * stride
        return self._canonical(self._on_core(device, by_axis, core, lanes, home))

    def _by_single_axis(self, device_id: dict[Any, Any]) -> dict[str, Any]:
        """Indices along tuples of axes, taken apart."""
        sizes = self.sizes()
        out = {}
        for names, index in device_id.items():
            *outer, last = names if isinstance(names, tuple) else (names,)
            if index is UNKNOWN:
                raise DataDependent("a device id")
            for name in (last, *reversed(outer)) if outer else ():
                out[name], index = index % sizes[name], index // sizes[name]
            if not outer:
                out[last] = index
        return out

    def _on_core(
        self,
        device: Lanes,
        by_axis: dict[str, Any],
        core: Lanes | None,
        lanes: np.ndarray,
        home: CoreMesh | None,
    ) -> Lanes:
        """The lane of a device's core."""
        if device is UNKNOWN or core is UNKNOWN:
            raise DataDependent("a device id")
        if not self.cores:
            return device
        if isinstance(device, np.ndarray) or not 0 <= device < self.n_devices:
            device = self._canonical(device)
        named = [mesh for mesh in self.cores if by_axis.keys() & mesh.axes.keys()]
        named = named if home is None else [home]
        own = lanes // self.n_devices
        if core is None and named:
            inside = [mesh for mesh in named if mesh.holds(own).all()] or named
            mesh = max(inside, key=lambda mesh: len(by_axis.keys() & mesh.axes.keys()))
            core = mesh.first
            for name, stride in mesh.strides().items():
                core = core + by_axis.get(name, self._core_index(name, lanes)) * stride
        elif core is None:
            core = own if (own != own[0]).any() else int(own[0])
        elif len(self.cores) == 1:
            core = core + self.cores[0].first
        if np.min(core) < 0 or np.max(core) >= self.n_cores:
            raise IndexError(f"core {np.max(core)} of {self.n_cores}")
        return device + self.n_devices * core

    def named(self, device: np.ndarray) -> np.ndarray:
        """The array that stands for all arrays of these devices."""
        return self._canonical(device)

    def _canonical(self, device: Any) -> Any:
        """One array object per distinct array of devices: later stages work per distinct
        pattern.
        """
        if not isinstance(device, np.ndarray):
            if not 0 <= device < self.n_lanes:
                raise IndexError(f"device id {device} of {self.n_devices}")
            return device
        if device.size and not 0 <= device.min() <= device.max() < self.n_lanes:
            raise IndexError(f"device ids {device.min()} to {device.max()} of {self.n_devices}")
        device = device.astype(np.int32, copy=False)
        return self._targets.setdefault(device.tobytes(), device)
