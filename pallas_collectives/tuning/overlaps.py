"""Which collectives of its own XLA runs beside compute, on which chip; and where ours can.

A collective that stops the core costs a step all of its time; one that runs beside products may
cost nothing. So where a model's step matters, and not a collective alone, lax keeps what XLA
overlaps (`override_lax`). What it overlaps is learned by compiling, for each chip, a program with
products beside each collective: `python -m benchmarks step --learn` writes `overlaps.json` anew.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from pallas_collectives import _compat
from pallas_collectives.annotations import DType
from pallas_collectives.topology.chips import Chip

# The engine of gathers that XLA fuses with products of its own, for which kernels are no products.
IN_FUSIONS = "DMA"

PATH = Path(__file__).parent / "overlaps.json"

# A SparseCore takes some us longer to launch a kernel and to start its DMAs (assumed, see
# `replay.machine`): a tenth of what takes as long as this. By `step`, `fsdp_tensor` with its
# gradient took 25.0 ms for v6e:4x4, and 25.6 with 50: the gather of 8 MiB stayed on the core.
_WORTH_US = 30.0

# What the core is taken to wait of that all the same. By `step`, of sums that barriers hold beside
# products (`lowering.chain`) it is 6 to 14%; where a turn has too few products, `lowering.loops`
# weighs its sums against them. With a half, `benchmarks.steps.large:fsdp_tensor` with its gradient
# took 96.1 ms for v5p:2x2x2, and takes 88.1: sums of 56 MiB a device over two stayed on the core.
_EXPOSED = 0.25

# The vector subcores of a SparseCore, and the words that one loads for each byte of a sum: as many
# as agree best with the replay (`adding_us`).
_SUBCORES = 16
_ADDED = 1.5
# That a hop takes longer, likewise, whose slot is in HBM and not in VMEM: of a small block, and
# the less the more is on the wire meanwhile, up to so many bytes.
_SLOT_US = 2.8
_HIDES_SLOT = (16 << 20) // 6

# Ragged exchanges of this many bytes take less time than the host takes to read their counts.
_FEW = 1 << 20

# Gathers of this many bytes are of weights, or of tokens: what products read. XLA rounds what they
# read to bfloat16 under these settings of `jax_default_matmul_precision`.
_WIDE = 4 << 20
_NARROW = (None, "default", "fastest", "bfloat16")

# What XLA runs beside compute on GPUs, of calls that are `How.awaited` so. Sums that are called by
# name are all awaited, a model's gradients and its tokens alike; permutes are not asked.
_BESIDE_ON_GPUS: dict[str, tuple[bool | None, ...]] = {
    "all_gather": (False,),
    "reduce_scatter": (False,),
    "all_reduce": (True,),
    "ppermute": (None,),
}

# A quarter of the VMEM of v5e and v6e, and of v4's CMEM: so much of what a step sums or gathers
# XLA puts there.
NEAR = 32 << 20

# Chips in whose VMEM XLA keeps less than `NEAR` of tokens between products.
_TOKENS_IN_VMEM = "v5e", "v6e", "7x"

# Chips in whose VMEM XLA keeps what products have made and it sums.
_SUMS_IN_VMEM = "v5e", "v6e"


class Learned(NamedTuple):
    """What the compiler did.

    Attributes:
      jax, libtpu: versions of JAX and of the compiler.
      engines: chip -> canonical collective -> the engine that XLA runs it on beside the core.
      near: chip -> the memory nearer than HBM to which XLA's gathers bring, and no kernel can.
    """

    jax: str
    libtpu: str
    engines: dict[str, dict[str, str]]
    near: dict[str, str]


@functools.cache
def learned() -> Learned:
    """The data that come with the package."""
    return Learned(**json.loads(PATH.read_text(encoding="utf-8")))


def engine(op: str, chip: str) -> str:
    """The engine on which XLA runs a collective beside compute; "" where it would stop the core."""
    return learned().engines.get(chip, {}).get(op, "")


def by_xla(op: str, chip: Chip) -> str:
    """Why lax keeps a collective, in a sentence; "" where ours make the step no longer."""
    if not (there := engine(op, chip.name)):
        return ""
    return f"XLA runs {op} beside compute on {chip.name} ({there}; libtpu {learned().libtpu})"


def by_xla_on_gpus(op: str, nbytes: int, awaited: bool | None) -> str:
    """Why lax keeps a collective on GPUs, in a sentence; "" where ours make the step no longer.

    XLA runs its own on a stream beside compute, and calls of ours on the stream of the products. So
    ours serve what is small, and gathers and scatters that the next product waits for. By `step` on
    two H200 with gradients, lax and all by ours, ms: `fsdp` 62.8 and 66.0, `data` unrolled 58.2 and
    60.8, `ring_attention` 42.1 and 42.8; `tensor`, whose products wait, 34.1 and 33.2.

    Args:
      op: the collective's canonical name.
      nbytes: what it brings.
      awaited: see `backends.plans.How`.
    """
    if nbytes < _WIDE or awaited not in _BESIDE_ON_GPUS.get(op, ()):
        return ""
    return f"XLA runs {op} of {_WIDE >> 20} MiB and more beside compute on GPUs"


def counted_by_xla_on_gpus(op: str, nbytes: int) -> str:
    """Why lax keeps a ragged exchange of so few bytes on GPUs; "" where ours take no longer.

    On two H200 it takes 407 us by ours and 110 by lax for 1 MiB, and 363 and 12751 for 64 MiB.
    Between processes XLA has none.
    """
    if op != "ragged_all_to_all" or nbytes > _FEW or jax.process_count() > 1:
        return ""
    return "NCCL waits until the host has read the counts, and XLA need not"


def for_its_reader(nbytes: int, dtype: DType, chip: Chip) -> str:
    """Why lax keeps a gather that brings so many bytes to what follows it; "" where it need not."""
    return _near_by_xla(nbytes, chip) or narrowed_by_xla(nbytes, dtype)


def of_tokens(op: str, nbytes: int, chip: Chip) -> str:
    """Why lax keeps an exchange of some tokens, between products; "" where it need not.

    By `step`, forward, of a layer whose tokens are gathered before its products and whose sum is
    scattered behind them, four times on v6e:4x4, of weights of 32 MiB: products whose operands XLA
    has in VMEM and scatters of 8 MiB take 919 us, with kernels that scatter 1095; of 4 MiB 597 and
    514. On v5e kernels take less, of 4 to 32 MiB: `benchmarks.steps.two_batches:tensor` 7.5 ms
    for 8.7 on v5e:4x4.
    """
    kept = {"all_gather": nbytes < NEAR, "reduce_scatter": NEAR // 4 <= nbytes < NEAR // 2}
    if chip.name != "v6e" or not kept.get(op):
        return ""
    return f"XLA has {op} of tokens in {chip.name}'s VMEM, nearer than HBM to products"


def tokens_in_vmem(nbytes: int, chip: Chip) -> bool:
    """Whether XLA has so few bytes of tokens nearer to products than kernels, which have HBM.

    By `step`, forward, the layer of `of_tokens` takes by lax and by kernels that copy weights, in
    us, of 512 tokens 459 and 513 on v6e:4x4, of 2048 1559 and 1636; of 2048 on 7x 1552 and 1821.
    """
    return chip.name in _TOKENS_IN_VMEM and nbytes < NEAR


def for_its_maker(nbytes: int, chip: Chip) -> str:
    """Why lax keeps a sum, called by name, of so many bytes; "" where it need not.

    A kernel's operand and result lie in HBM, and in one layout. By `step`, for v6e:4x4 with its
    gradient, `benchmarks.steps.sums:tensor` took 17.0 ms with kernels, for 14.9: a product whose
    result went to HBM took 72 us, for 15, and XLA copied sums.
    """
    if chip.name not in _SUMS_IN_VMEM or not _WIDE <= nbytes <= NEAR:
        return ""
    return f"XLA sums what products leave in {chip.name}'s VMEM, nearer than HBM"


def _near_by_xla(nbytes: int, chip: Chip) -> str:
    """A kernel's result lies in HBM, which v4's core reads more slowly than CMEM.

    By `step`, `benchmarks.steps.small:rows` forward took 5.02 ms for v4:2x2x2, for 4.95. One kernel
    with its products needs no such memory.
    """
    near = learned().near.get(chip.name)
    if not near or nbytes > NEAR:
        return ""
    return f"XLA gathers into {chip.name}'s {near}, nearer to products (libtpu {learned().libtpu})"


def narrowed_by_xla(nbytes: int, dtype: DType) -> str:
    """Why lax keeps such a gather, whatever reads it; "" where it need not.

    XLA turns what products of default precision read into bfloat16 before it gathers it, which is
    half the bytes of float32. A kernel's operand it leaves as it is.
    """
    precision = _compat.default_matmul_precision()
    if dtype != np.float32 or nbytes < _WIDE or precision not in _NARROW:
        return ""
    return "XLA gathers float32 as bfloat16 if products read it so (cast it before the gather)"


def no_sparsecore(chip: Chip) -> str:
    """Why no kernel is better run on a chip's SparseCores; "" if some are."""
    if chip.no_sparsecore:
        return f"{chip.name}'s SparseCores: {chip.no_sparsecore}"
    if chip.name not in learned().engines:
        return f"what XLA runs beside compute on {chip.name} is not known"
    return ""


def on_core(there: float | None, chip: Chip, here: float | None = None) -> str:
    """Why a kernel is not better run on a SparseCore, beside compute; "" if it is.

    there: microseconds that it takes alone on a SparseCore; None where no table tells.
    here: what the TensorCore's fastest takes, where that is another: sums over several axes.
    """
    if why := no_sparsecore(chip):
        return why
    if there is None:
        return "no table has its time on a SparseCore"
    here = there if here is None else here
    if min(there, here) < _WORTH_US:
        return "it is too short to be worth a SparseCore's launch"
    if there * _EXPOSED > here:
        return f"a SparseCore would take {there:.0f} us for it, and the core takes {here:.0f}"
    return ""


def adding_us(block_bytes: int, chip: Chip, hops: int) -> float:
    """Microseconds that a sum takes longer on vector subcores than on the TensorCore.

    They add beside the wire, but the first block before it goes on, and the last one. Their slots
    are in HBM: `hops` are those that wait for it where a TensorCore's would not. By the replay, of
    4 to 256 MiB of bf16 and f32 for v5p, v6e and 7x, within 10%.
    """
    added = _ADDED * block_bytes / (_SUBCORES * chip.subcore_rate) * 1e6
    return added + _SLOT_US * hops * max(0.0, 1 - block_bytes / _HIDES_SLOT)


def gathers_on_sparsecore(chip: Chip) -> bool:
    """Whether large gathers of a step are a SparseCore's: where XLA's would stop the core."""
    return not by_xla("all_gather", chip) and not on_core(_WORTH_US, chip)
