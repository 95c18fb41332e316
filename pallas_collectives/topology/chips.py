"""TPU generations: one record each of what kernels, choice and replay know of a chip.

Sources: [SB] the JAX scaling book (jax-ml.github.io/scaling-book, "How to think about TPUs"); [V]
the vendor's pages for v4, v5e, v5p, v6e and 7x; [TI] `pltpu.get_tpu_info_for_chip`; [AOT] the TPU
compiler, ahead of time: the largest array of semaphores with which a kernel of one copy compiles;
or the cycles of a loop (`tests/helpers/codec_cycles.py` compares them with the model's; a vector
subcore's are written by libtpu's flag --xla_sc_dump_bundles_to).
They have a memory of 512 words (7x: 4096), and the compiler keeps the rest of it. The number is the
same whether they count DMAs or signals, and with a barrier semaphore besides. libtpu 0.0.50 allows
one less than 0.0.42, whose numbers are here. [D] is derived: vector rate = 8·128 lanes × 4 units ×
clock, clock = bf16 peak / (matrix units × 2·side²), VMEM bandwidth = two vector loads and a store
per cycle. [C] is fitted to measured times by `replay.calibration`.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax

from pallas_collectives.errors import BackendError

MIB = 1 << 20
# Of a chip's VMEM, what a kernel's scratch and what the compiler keeps beside it may take together;
# the rest is for registers that it spills.
VMEM_SHARE = 7 / 8
US = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One TPU generation. Bandwidths in bytes/s, rates in operations/s, times in seconds; per
    device unless said.
    """

    name: str  # as in topology names ("v5e")
    device_kind: str  # as jax.Device reports it, or the start of that
    dims: int = 3  # axes of the torus that chips are linked in
    largest: int  # chips of a pod, the most that links join [V]
    wrap_at: int = 4  # an axis with a multiple of so many chips is a ring, others are lines
    wraps_alone: bool = False  # each axis wraps by itself; else all axes do, or no axis does
    link_bandwidth: float  # one ICI link, one way [SB, V]
    link_efficiency: float = 0.92  # of that, what a large copy attains [C]; between the two fitted
    # [SB] gives about 1 µs for a hop of a ring; it is the sum of the next three, in shares assumed
    # here.
    hop_latency: float = 0.6 * US  # one link, one way
    dma_latency: float = 0.35 * US  # from a DMA's start to its first byte on the wire
    issue_cost: float = 0.05 * US  # core time to start a DMA or to signal
    # From a kernel's call to its first instruction, and from its last back [C]; assumed but for 7x
    launch_cost: float = 1.5 * US
    hbm_bandwidth: float  # [SB, V]
    clock: float  # cycles a second [D]
    vmem_bandwidth: float  # what one core loads and stores [D]
    vector_rate: float  # 32-bit elementwise operations of one core [D]
    # What a number takes of a core's vector unit, in 32-bit elementwise operations [AOT]; the last
    # two fitted to the loops that the compiler makes of `kernels.machinery.codec`
    across_lanes: float  # a reduction along the lanes of a register
    turned: tuple[float, float]  # a transposition, of 16 bits and of 32
    # a conversion from and to numbers of one byte
    narrowed: Mapping[str, tuple[float, float]] = dataclasses.field(hash=False)
    # what XLA's passes take to dequantise one in whole tiles; four times that to quantise it
    passed: float
    matrix_rate: float  # bf16, of all cores [V]
    vmem_bytes: int  # of one core [TI, V]
    smem_bytes: int = 1 * MIB  # of one core [TI, V]
    semaphores: int  # that a kernel can have at a time, beside barrier semaphores [AOT]
    reaches_all: bool = True  # a remote DMA reaches every device (v5e: power-of-two offsets only)
    devices_per_chip: int = 1
    # A SparseCore's: assumed, and measured by `certify`. Its launch is that of XLA's calls on 7x,
    # which run there; its clock is 1 GHz
    sparsecore_issue_cost: float = 0.1 * US
    sparsecore_launch_cost: float = 3.9 * US
    # 32-bit numbers a second of a vector subcore: its registers' [TI], one of which it loads in a
    # cycle, while it stores another and does some operations. The compiler's loops of sums of two
    # and three terms take at most 1.2 times as long as this says [AOT]
    subcore_rate: float = 8e9
    subcore_operations: int = 3
    no_sparsecore: str = ""  # why no kernel can run on one (`kernels.machinery.sparsecore`)
    cores: int = 1  # of a device; only kernels that multiply run on more than one
    die_bandwidth: float = 0.0  # between the devices of a chip, one way [V: six times an ICI link]

    @property
    def kernel_semaphores(self) -> int:
        """How many a kernel takes at the most: XLA's own calls need some while it is under way."""
        return self.semaphores - _OF_XLA

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Which axes of a slice of this many chips along each are rings."""
        fits = tuple(n > 1 and n % self.wrap_at == 0 for n in shape)
        return fits if self.wraps_alone else (all(fits),) * len(shape)


# A v5p has 438 semaphores; a kernel that took 414 left too few for an experts step [AOT].
_OF_XLA = 56


_V5: dict[str, Any] = {
    "across_lanes": 8.5,
    "passed": 70.0,
    "turned": (7.5, 10.0),
    "narrowed": {"int8": (0.0, 0.5), "float8_e4m3fn": (3.5, 11.0), "float8_e5m2": (0.0, 2.0)},
}


def _chip(*, clock: float, **figures: Any) -> Chip:
    """A chip with the figures that follow from its clock."""
    lanes = 8 * 128  # of a vector register; a core does 4 operations on each in a cycle
    rate = 4 * lanes * clock
    return Chip(clock=clock, vector_rate=rate, vmem_bandwidth=3 * rate, **figures)


_V5E = _chip(
    name="v5e",
    device_kind="TPU v5 lite",
    largest=256,
    dims=2,
    wrap_at=16,
    wraps_alone=True,
    link_bandwidth=45e9,
    link_efficiency=0.95,
    hbm_bandwidth=0.82e12,
    matrix_rate=197e12,
    vmem_bytes=128 * MIB,
    semaphores=442,
    reaches_all=False,
    no_sparsecore="it has no SparseCore",
    clock=1.5e9,
    **_V5,
)
BY_NAME = {
    chip.name: chip
    for chip in (
        _chip(
            name="v4",
            device_kind="TPU v4",
            largest=4096,
            link_bandwidth=45e9,
            hbm_bandwidth=1.23e12,
            matrix_rate=275e12,
            across_lanes=7.5,
            passed=75.0,
            turned=(10.0, 12.5),
            narrowed={
                "int8": (18.0, 31.5),
                "float8_e4m3fn": (45.0, 65.0),
                "float8_e5m2": (50.0, 65.0),
            },
            vmem_bytes=16 * MIB,
            semaphores=434,
            no_sparsecore="Pallas does not reach its SparseCores",
            clock=1.05e9,
            cores=2,
        ),
        _V5E,
        _chip(
            name="v5p",
            device_kind="TPU v5",
            largest=8960,
            link_bandwidth=90e9,
            hbm_bandwidth=2.46e12,
            matrix_rate=459e12,
            vmem_bytes=64 * MIB,
            semaphores=438,
            clock=1.75e9,
            cores=2,
            **{**_V5, "passed": 49.0},
        ),
        _chip(
            name="v6e",
            device_kind="TPU v6 lite",
            largest=256,
            dims=2,
            wrap_at=16,
            wraps_alone=True,
            link_bandwidth=90e9,
            hbm_bandwidth=1.64e12,
            matrix_rate=920e12,
            across_lanes=6.5,
            passed=70.0,
            turned=(4.5, 6.5),
            narrowed={
                "int8": (0.0, 0.0),
                "float8_e4m3fn": (4.0, 19.0),
                "float8_e5m2": (0.0, 1.5),
            },
            vmem_bytes=128 * MIB,
            semaphores=440,
            clock=1.75e9,
        ),
        _chip(
            name="7x",
            device_kind="TPU7x",
            largest=9216,
            link_bandwidth=100e9,
            link_efficiency=0.90,
            launch_cost=3.9 * US,
            hbm_bandwidth=7.40e12 / 2,
            matrix_rate=2310e12 / 2,
            across_lanes=6.5,
            passed=41.0,
            turned=(4.0, 7.0),
            narrowed={
                "int8": (0.0, 0.0),
                "float8_e4m3fn": (0.0, 0.5),
                "float8_e5m2": (0.0, 0.5),
            },
            vmem_bytes=64 * MIB,
            semaphores=3832,
            devices_per_chip=2,
            subcore_rate=16e9,
            die_bandwidth=600e9,
            clock=2.2e9,
        ),
    )
}
# A simulated device: v5e's memories and rates, and no limit to whom it reaches.
SIMULATED = dataclasses.replace(
    _V5E,
    name="simulated TPU",
    dims=3,
    wrap_at=4,
    wraps_alone=False,
    reaches_all=True,
    no_sparsecore="",
)
# jax.Device.device_kind begins with one of these.
_BY_KIND = {chip.device_kind: chip for chip in BY_NAME.values()}
_BY_KIND |= {"TPU v5e": _V5E, "TPU v6e": BY_NAME["v6e"]}


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
    chip = listed(device_kind)
    if chip is None:
        raise BackendError(
            f"a {device_kind!r}",
            f"the kernels are known to run on {', '.join(_BY_KIND)}",
            "use backend='xla', or add the chip to pallas_collectives/topology/chips.py",
        )
    return chip


def listed(device_kind: str) -> Chip | None:
    """The chip of a `jax.Device.device_kind`; None if no chip of that kind is listed here."""
    matches = [prefix for prefix in _BY_KIND if device_kind.startswith(prefix)]
    return _BY_KIND[max(matches, key=len)] if matches else None


def slice_of(name: str) -> tuple[Chip, tuple[int, ...]] | None:
    """Chip and chips along each torus axis of a topology's name, such as 'v5e:4x4'; None if
    unknown.

    Axes that are not named are of one chip.
    """
    match = re.fullmatch(r"(?:tpu)?(\w+):(\d{1,4}(?:x\d{1,4})*)", name)
    if match is None or match[1] not in BY_NAME:
        return None
    chip, shape = BY_NAME[match[1]], tuple(map(int, match[2].split("x")))
    if len(shape) > chip.dims or not 0 < math.prod(shape) <= chip.largest:
        return None
    return chip, shape + (1,) * (chip.dims - len(shape))


def compilers_name(name: str) -> str:
    """A topology's name as the TPU compiler has it: 'tpu7x:2x2x1' for '7x:2x2x1'."""
    bare = name.removeprefix("tpu")
    return f"tpu{bare}" if bare.startswith("7x") else bare
