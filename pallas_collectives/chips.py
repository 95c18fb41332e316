"""TPU generations: what kernels and the choice of algorithm need to know of them.

Sources: `pltpu.get_tpu_info_for_chip` and the vendor's pages for VMEM.
"""

import dataclasses

import jax

from pallas_collectives.errors import BackendError

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU generation, per JAX device.

    Attributes:
      name: as in topology names ("v5e").
      vmem_bytes: VMEM of one core.
      far_dma: whether a remote DMA reaches any device; v5e's reaches power-of-two offsets only.
    """

    name: str
    vmem_bytes: int
    far_dma: bool = True


# device_kind, as jax.Device reports it, begins with one of these.
_BY_KIND = {
    "TPU v4": Chip("v4", 16 * MIB),
    "TPU v5 lite": Chip("v5e", 128 * MIB, far_dma=False),
    "TPU v5e": Chip("v5e", 128 * MIB, far_dma=False),
    "TPU v5": Chip("v5p", 64 * MIB),
    "TPU v6 lite": Chip("v6e", 128 * MIB),
    "TPU v6e": Chip("v6e", 128 * MIB),
    "TPU7x": Chip("7x", 64 * MIB),
}
SIMULATED = Chip("simulated TPU", 128 * MIB)


def current() -> Chip:
    """The chip of the mesh in scope; `SIMULATED` where that mesh is not of TPUs.

    Raises:
      BackendError: a TPU of a generation that is not listed here.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or not device.device_kind.startswith("TPU"):
        return SIMULATED
    matches = [prefix for prefix in _BY_KIND if device.device_kind.startswith(prefix)]
    if not matches:
        raise BackendError(
            f"a {device.device_kind!r}",
            f"the kernels are known to run on {', '.join(_BY_KIND)}",
            "use backend='xla', or add the chip to pallas_collectives/chips.py",
        )
    return _BY_KIND[max(matches, key=len)]
