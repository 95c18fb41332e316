"""TPU generations: what kernels and the choice of algorithm need to know of them.

Sources: `pltpu.get_tpu_info_for_chip` and the vendor's pages for VMEM and SMEM; the JAX scaling
book ("How to think about TPUs") and the vendor's pages for the links; for semaphores the TPU
compiler, ahead of time: the largest array of them with which a kernel of one copy compiles. They
have a memory of 512 words (7x: 4096), and the compiler keeps the rest of it. The number is the same
whether they count DMAs or signals, and with a barrier semaphore besides. libtpu 0.0.50 allows one
less than 0.0.42, whose numbers are here.
"""

import dataclasses
import re

import jax

from pallas_collectives.errors import BackendError

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU generation, per JAX device.

    Attributes:
      name: as in topology names ("v5e").
      vmem_bytes: VMEM of one core.
      semaphores: how many a kernel can have at a time, beside barrier semaphores.
      smem_bytes: SMEM of one core.
      dims: axes of the torus that chips are linked in.
      wrap_at: an axis with a multiple of so many chips is a ring, others are lines.
      wraps_alone: whether each axis wraps by itself; if not, either all axes wrap or no axis does.
      far_dma: whether a remote DMA reaches any device; v5e's reaches power-of-two offsets only.
      devices: JAX devices on a chip.
      cores: TensorCores of a device, as the pods are set up that have two (megacore).
      no_sparsecore: why no kernel can run on a SparseCore (`kernels.machinery.sparsecore`); "" if
        one can.
    """

    name: str
    vmem_bytes: int
    semaphores: int
    smem_bytes: int = 1 * MIB
    dims: int = 3
    wrap_at: int = 4
    wraps_alone: bool = False
    far_dma: bool = True
    devices: int = 1
    cores: int = 1
    no_sparsecore: str = ""

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Which axes of a slice of this many chips along each are rings."""
        fits = tuple(n > 1 and n % self.wrap_at == 0 for n in shape)
        return fits if self.wraps_alone else (all(fits),) * len(shape)


_V5E = Chip(
    "v5e",
    128 * MIB,
    442,
    dims=2,
    wrap_at=16,
    wraps_alone=True,
    far_dma=False,
    no_sparsecore="it has none",
)
_V6E = Chip("v6e", 128 * MIB, 440, dims=2, wrap_at=16, wraps_alone=True)
# device_kind, as jax.Device reports it, begins with one of these.
_BY_KIND = {
    "TPU v4": Chip(
        "v4", 16 * MIB, 434, cores=2, no_sparsecore="Pallas does not reach its SparseCores"
    ),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": Chip("v5p", 64 * MIB, 438, cores=2),
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": Chip("7x", 64 * MIB, 3832, devices=2),
}
BY_NAME = {chip.name: chip for chip in _BY_KIND.values()}
SIMULATED = Chip("simulated TPU", 128 * MIB, 442)


def current() -> Chip:
    """The chip of the mesh in scope; `SIMULATED` where that mesh is not of TPUs.

    Raises:
      BackendError: a TPU of a generation that is not listed here.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or not device.device_kind.startswith("TPU"):
        return SIMULATED
    return of_kind(device.device_kind)


def cores() -> int:
    """TensorCores of a device of the mesh in scope: as it says, or as its chip has them."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(device, "num_cores", None) or current().cores


def of_kind(device_kind: str) -> Chip:
    """The chip of a `jax.Device.device_kind`.

    Raises:
      BackendError: a generation that is not listed here.
    """
    matches = [prefix for prefix in _BY_KIND if device_kind.startswith(prefix)]
    if not matches:
        raise BackendError(
            f"a {device_kind!r}",
            f"the kernels are known to run on {', '.join(_BY_KIND)}",
            "use backend='xla', or add the chip to pallas_collectives/topology/chips.py",
        )
    return _BY_KIND[max(matches, key=len)]


def kind_of(name: str) -> str:
    """A `jax.Device.device_kind` of the chip of a name."""
    return next(kind for kind, chip in _BY_KIND.items() if chip.name == name)


def slice_of(name: str) -> tuple[Chip, tuple[int, ...]] | None:
    """Chip and chips along each torus axis of a topology's name, such as 'v5e:4x4'; None if
    unknown.

    Axes that are not named are of one chip.
    """
    match = re.fullmatch(r"(?:tpu)?(\w+):(\d+(?:x\d+)*)", name)
    if match is None or match[1] not in BY_NAME:
        return None
    chip, shape = BY_NAME[match[1]], tuple(map(int, match[2].split("x")))
    if len(shape) > chip.dims or not all(shape):
        return None
    return chip, shape + (1,) * (chip.dims - len(shape))
