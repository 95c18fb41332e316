"""Rates of each TPU generation: what links, memories and cores do in a second, with the sources.

Sources: [SB] the JAX scaling book (jax-ml.github.io/scaling-book, "How to think about TPUs"); [V]
the vendor's pages for v4, v5e, v5p, v6e and 7x; [TI] `pltpu.get_tpu_info_for_chip`; [AOT] the TPU
compiler, asked for kernels with more and more of them (`chips`); [D] derived:
vector rate = 8·128 lanes × 4 units × clock, clock = bf16 peak / (matrix units × 2·side²), VMEM
bandwidth = two vector loads and a store per cycle; [C] fitted to measured times by
`replay.calibration`.
"""

import dataclasses
from typing import Any

from pallas_collectives.topology import chips

US = 1e-6


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TPU generation. Bandwidths in bytes/s, rates in operations/s, times in seconds; per
    device unless said.
    """

    name: str
    device_kind: str
    dims: int  # torus axes
    link_bandwidth: float  # one ICI link, one way [SB, V]
    link_efficiency: float  # of that, what a large copy attains [C]
    # [SB] gives about 1 µs for a hop of a ring; it is the sum of the next three, in shares assumed
    # here.
    hop_latency: float  # one link, one way
    dma_latency: float  # from a DMA's start to its first byte on the wire
    issue_cost: float  # core time to start a DMA or to signal
    launch_cost: float  # from a kernel's call to its first instruction, and from its last back [C]
    hbm_bandwidth: float  # [SB, V]
    vmem_bandwidth: float  # core loads and stores [D]
    vector_rate: float  # 32-bit elementwise operations [D]
    matrix_rate: float  # bf16, of all cores [V]
    vmem_bytes: int  # [TI]
    smem_bytes: int  # [TI]
    semaphores: int  # that a kernel can have at a time [AOT]
    reaches_all: bool  # a remote DMA reaches every device (v5e: power-of-two offsets only)
    devices_per_chip: int
    # A SparseCore's: assumed. Its launch is that of XLA's calls on 7x, which run there
    sparsecore_issue_cost: float = 0.1 * US
    sparsecore_launch_cost: float = 3.9 * US
    cores: int = 1  # of a device; only kernels that multiply run on more than one
    die_bandwidth: float = 0.0  # between the devices of a chip, one way [V: six times an ICI link]


def _generation(
    name: str,
    kind: str,
    link: float,
    hbm: float,
    tflops: float,
    clock_ghz: float,
    efficiency: float = 0.92,  # assumed, between the two that are fitted
    launch_us: float = 1.5,  # assumed
    **extra: Any,
) -> Generation:
    chip = chips.BY_NAME[name]
    lanes = 8 * 128 * chip.cores
    return Generation(
        name=name,
        device_kind=kind,
        dims=chip.dims,
        link_bandwidth=link * 1e9,
        link_efficiency=efficiency,
        hop_latency=0.6 * US,
        dma_latency=0.35 * US,
        issue_cost=0.05 * US,
        launch_cost=launch_us * US,
        hbm_bandwidth=hbm * 1e12,
        vmem_bandwidth=lanes * 4 * 3 * clock_ghz * 1e9,
        vector_rate=lanes * 4 * clock_ghz * 1e9,
        matrix_rate=tflops * 1e12,
        vmem_bytes=chip.vmem_bytes,
        smem_bytes=chip.smem_bytes,
        semaphores=chip.semaphores,
        reaches_all=chip.far_dma,
        devices_per_chip=chip.devices,
        cores=chip.cores,
        **extra,
    )


# name, device kind, ICI GB/s per link one way, HBM TB/s, bf16 TFLOP/s, GHz; memories, torus axes,
# wrap rules, reach, devices a chip and their cores are in `chips`
GENERATIONS: dict[str, Generation] = {
    g.name: g
    for g in (
        _generation("v4", "TPU v4", 45, 1.23, 275, 1.05),
        _generation("v5e", "TPU v5 lite", 45, 0.82, 197, 1.5, efficiency=0.95),
        _generation("v5p", "TPU v5", 90, 2.46, 459, 1.75),
        _generation("v6e", "TPU v6 lite", 90, 1.64, 920, 1.75),
        _generation(
            "7x",
            "TPU7x",
            100,
            7.40 / 2,
            2310 / 2,
            2.2,
            efficiency=0.90,
            launch_us=3.9,
            die_bandwidth=600e9,
        ),
    )
}


def of_chip(name: str) -> Generation:
    """Rates of a chip; those of v5e for a simulated one."""
    return GENERATIONS.get(name, GENERATIONS["v5e"])
