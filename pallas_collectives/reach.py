"""Which devices a TPU can write to, or signal: a rule about two places on a torus.

JAX's documentation ("Distributed Computing in Pallas for TPUs", Routing): a device sends to any
other of its pod, but on v5e it can route to a power-of-two offset from itself only. It does not say
along what an offset is counted. The rule here is the strictest reading: two devices that differ in
one coordinate, by a power of two, the shorter way round where that axis of the whole slice closes.
Such pairs are at a power-of-two offset in device numbers as well, wherever the sides of the slice
are powers of two; diagonal ones are not.

Signals to another device's semaphore travel as DMAs do: the rule holds for both.
"""

from pallas_collectives.chips import Chip
from pallas_collectives.kernels.physical import Place, Torus


def reaches(chip: Chip, torus: Torus, a: Place, b: Place) -> bool:
    """Whether the device at place `a` can write to, or signal, the one at `b`; the rule is
    symmetric.

    Args:
      chip: the TPU generation.
      torus: the whole slice's, of which the devices in question may be a part.
      a, b: coordinates of the chip, then the device's number on the chip.
    """
    if chip.far_dma or a == b:
        return True
    apart = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if len(apart) > 1:
        return False
    (axis,) = apart
    distance = abs(a[axis] - b[axis])
    if axis < len(torus.shape) and torus.wraps[axis]:
        distance = min(distance, torus.shape[axis] - distance)
    return distance & (distance - 1) == 0
