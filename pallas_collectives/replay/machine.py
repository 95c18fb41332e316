"""TPU pods as replay models them: torus shape, wrap rules, routes; rates are `topology.chips`'s."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_collectives.topology import chips
from pallas_collectives.topology.chips import BY_NAME as GENERATIONS
from pallas_collectives.topology.chips import Chip
from pallas_collectives.topology.placement import Places
from pallas_collectives.topology.ring_orders import Torus


class MachineError(ValueError):
    """A machine, mesh or placement that cannot be."""


Generation = Chip

# What a machine overrides and saves; the others are rules of the generation, and never measured.
_RULES = {"largest", "wrap_at", "wraps_alone", "no_sparsecore", "clock", "turned", "narrowed"}
_FIGURES = tuple(f.name for f in dataclasses.fields(Chip) if f.name not in _RULES)


def _overridden(generation: Chip, overrides: dict[str, float]) -> Chip:
    if unknown := set(overrides) - set(_FIGURES):
        named = ", ".join(sorted(_FIGURES))
        raise MachineError(f"override {min(unknown)!r}: it must be one of a Generation's {named}")
    return dataclasses.replace(generation, **overrides)  # type: ignore[arg-type]


def _generation_of(fields: dict[str, Any]) -> Chip:
    """A generation from what a file says of it; ValueError if something is missing or wrong."""
    known = GENERATIONS[fields["name"]]
    wanted = {name: getattr(known, name) for name in _FIGURES}
    if set(fields) != set(wanted):
        raise ValueError(f"a generation must have exactly the fields {', '.join(wanted)}")
    for name, value in fields.items():
        kinds = {float: (float, int)}.get(type(wanted[name]), (type(wanted[name]),))
        if type(value) not in kinds or not (isinstance(value, str) or 0 <= value < math.inf):
            wants = "text" if str in kinds else "a number of 0 or more"
            raise ValueError(f"{name} is {value!r}, and must be {wants}")
    return dataclasses.replace(known, **fields)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A slice of a pod: `shape` chips of one generation, joined as a torus where the generation
    wraps.
    """

    generation: Chip
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]

    @staticmethod
    def named(name: str, wraps: tuple[bool, ...] | None = None, **overrides: float) -> Machine:
        """The machine of a topology name such as 'v5e:16x16' or 'v5p:4x4x4'.

        `wraps` overrides the wrap rule per torus axis; further keywords override fields of
        `Generation`, e.g. `link_bandwidth=50e9` (bytes/s) or `hop_latency=0.8e-6` (seconds). A name
        that ends in .json is a file that `save` has written, and is loaded as it is. Raises
        MachineError for a name it does not know.

        Example:
          >>> pc.replay.Machine.named("v5e:16x16").n_chips
          256
          >>> pc.replay.Machine.named("v5p:4x4x4", link_bandwidth=50e9).generation.link_bandwidth
          50000000000.0
        """
        if str(name).endswith(".json"):
            there = Machine.load(name)
            generation = _overridden(there.generation, overrides)
            return Machine(generation, there.shape, there.wraps if wraps is None else wraps)
        found = chips.slice_of(str(name))
        if found is None:
            known = ", ".join(
                f"{g.name} ({g.dims} torus axes, {g.largest} chips at the most)"
                for g in GENERATIONS.values()
            )
            raise MachineError(
                f"machine {str(name)[:40]!r}: want GENERATION:AxBxC, chips along each axis, with a "
                f"generation of {known}"
            )
        generation, shape = _overridden(found[0], overrides), found[1]
        if wraps is None:
            wraps = generation.wraps(shape)
        if len(wraps) != len(shape):
            raise MachineError(f"wraps {wraps}: one for each of the {len(shape)} torus axes")
        return Machine(generation, shape, wraps)

    def save(self, path: str | Path, about: str = "") -> None:
        """Writes the machine, with its figures, to a JSON file for `load`; `about` is a note."""
        content = {"about": about, **dataclasses.asdict(self)}
        content["generation"] = {name: getattr(self.generation, name) for name in _FIGURES}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Machine:
        """The machine in a file that `save` has written.

        Raises MachineError if the file does not exist, or does not hold a machine.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            generation = _generation_of(content["generation"])
            shape, wraps = tuple(content["shape"]), tuple(content["wraps"])
            whole = [isinstance(n, int) and n >= 1 for n in shape]
            if not all(whole) or len(shape) != generation.dims or len(wraps) != len(shape):
                raise ValueError(f"shape {shape} and wraps {wraps}, of {generation.dims} axes")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MachineError(
                f"{path} holds no machine ({type(error).__name__}: {error}); "
                "name a file that Machine.save or `python -m benchmarks certify` has written"
            ) from None
        return Machine(generation, shape, tuple(map(bool, wraps)))

    def __str__(self) -> str:
        return f"{self.generation.name}:{'x'.join(map(str, self.shape))}"

    @property
    def n_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def n_devices(self) -> int:
        return self.n_chips * self.generation.devices_per_chip

    def mesh(self, axes: dict[str, int]) -> jax.sharding.AbstractMesh:
        """An abstract mesh on this machine to trace with: the kernels' tracing then sees this
        chip.
        """
        if math.prod(axes.values()) > self.n_devices:
            raise MachineError(f"mesh {axes} has more devices than {self} ({self.n_devices})")
        kind = self.generation.device_kind
        device = jax.sharding.AbstractDevice(kind, self.generation.cores, platform="tpu")
        auto = (jax.sharding.AxisType.Auto,) * len(axes)
        return jax.sharding.AbstractMesh(
            tuple(axes.values()), tuple(axes), axis_types=auto, abstract_device=device
        )

    def default_placement(self, n: int) -> np.ndarray:
        """The chip of each of `n` mesh positions: row-major over chips, the devices of a chip next
        to each other.

        A mesh whose axes are the torus axes (and, on chips of two devices, the die last) then lies
        on the torus as it is.
        """
        if n > self.n_devices:
            raise MachineError(
                f"{n} mesh positions do not fit on {self} ({self.n_devices} devices)"
            )
        return np.arange(n)

    def placement_of(self, devices: Iterable[Any]) -> np.ndarray:
        """The device number of each device of a mesh of real or ahead-of-time devices, from their
        coordinates.
        """
        numbers = []
        for d in np.asarray(devices).reshape(-1):
            coords = tuple(d.coords[: len(self.shape)])
            chip = int(np.ravel_multi_index(coords, self.shape))
            numbers.append(
                chip * self.generation.devices_per_chip
                + (d.core_on_chip if self.generation.devices_per_chip > 1 else 0)
            )
        return np.array(numbers)

    def places(self, placement: np.ndarray) -> Places:
        """The coordinates of the devices of a placement."""
        there = Torus(self.shape, self.wraps)
        per_chip = self.generation.devices_per_chip
        return Places(there, tuple(there.place(int(number), per_chip) for number in placement))

    # Links: 2·dims a chip (axis, direction), then one a device towards the other device of its chip

    @property
    def n_links(self) -> int:
        return 2 * len(self.shape) * self.n_chips + self.n_devices

    @functools.cached_property
    def link_capacity(self) -> np.ndarray:
        """Bytes/s that each link attains."""
        g = self.generation
        capacity = np.full(self.n_links, g.link_bandwidth * g.link_efficiency)
        capacity[2 * len(self.shape) * self.n_chips :] = g.die_bandwidth or math.inf
        return capacity

    def link_name(self, link: int) -> str:
        """A link as 'chip (0,1) +y'."""
        n_ici = 2 * len(self.shape) * self.n_chips
        if link >= n_ici:
            chip, die = divmod(link - n_ici, self.generation.devices_per_chip)
            return f"chip {self._coords(chip)} die {die} to its neighbour"
        rest, backwards = divmod(link, 2)
        chip, axis = divmod(rest, len(self.shape))
        return f"chip {self._coords(chip)} {'-' if backwards else '+'}{'xyz'[axis]}"

    def _coords(self, chip: int) -> tuple[int, ...]:
        return tuple(int(c) for c in np.unravel_index(chip, self.shape))

    def routes(self, src: np.ndarray, dst: np.ndarray) -> list[np.ndarray]:
        """The links of each route from device `src[i]` to `dst[i]`, hop by hop: arrays of link
        numbers, -1 where none.

        Dimension by dimension, the shorter way round; where both ways are equally long, devices at
        even positions go up and at odd positions down, so that neither direction carries all of
        them.
        """
        per_chip = self.generation.devices_per_chip
        n_dims = len(self.shape)
        src_chip, dst_chip = src // per_chip, dst // per_chip
        here = list(np.unravel_index(src_chip, self.shape))
        goal = np.unravel_index(dst_chip, self.shape)
        hops: list[np.ndarray] = []
        for axis, (n, wrap) in enumerate(zip(self.shape, self.wraps, strict=True)):
            delta = goal[axis] - here[axis]
            if wrap:
                up = delta % n
                down = n - up
                go_up = (up < down) | ((up == down) & (here[axis] % 2 == 0))
                delta = np.where(up == 0, 0, np.where(go_up, up, -down))
            steps = np.abs(delta)
            direction = np.sign(delta)
            for hop in range(int(steps.max(initial=0))):
                moving = hop < steps
                chip = np.ravel_multi_index(here, self.shape)
                link = (chip * n_dims + axis) * 2 + (direction < 0)
                hops.append(np.where(moving, link, -1))
                here[axis] = np.where(moving, (here[axis] + direction) % n, here[axis])
        if per_chip > 1:
            crosses = (src % per_chip) != (dst % per_chip)  # the die is crossed at the destination
            last = 2 * n_dims * self.n_chips + dst_chip * per_chip + src % per_chip
            hops.append(np.where(crosses, last, -1))
        return hops

    def distance(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """ICI hops (and half a hop for the step between dies, which is on one package) of each
        route.
        """
        total = np.zeros(len(src))
        n_ici = 2 * len(self.shape) * self.n_chips
        for hop in self.routes(src, dst):
            total += np.where(hop < 0, 0.0, np.where(hop < n_ici, 1.0, 0.5))
        return total
