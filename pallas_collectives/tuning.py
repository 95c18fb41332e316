"""Which algorithm serves a call whose caller names none."""

from pallas_collectives.chips import Chip

# Below this many bytes a block, a hop costs more than the bytes that `direct` sends over and over
# the same links: one hop takes about 1 us, in which a link of 45 GB/s moves 45 KB.
_DIRECT_UP_TO_BYTES = 32 << 10
# Operands of reductions up to this size are copied to VMEM and back: 1 MiB takes about 1 us.
_VMEM_UP_TO_BYTES = 1 << 20


def choose(op: str, block_bytes: int, devices: int, chip: Chip) -> str:
    """The algorithm for a collective.

    Args:
      op: the canonical collective.
      block_bytes: bytes of one device's block; for all_reduce of its operand.
      devices: devices in the group.
      chip: the TPU generation.
    """
    direct = block_bytes <= _DIRECT_UP_TO_BYTES and reaches_all(devices, chip)
    match op:
        case "all_gather":
            return "direct" if direct else "bidirectional"
        case "reduce_scatter":
            return _with_operands("bidirectional", block_bytes * devices)
        case "all_reduce":
            if direct:  # everyone's operand is kept, beside the own and the result
                return _with_operands("one_shot", block_bytes * (devices + 2))
            return _with_operands("ring", block_bytes)
        case "all_to_all":
            return "direct" if reaches_all(devices, chip) else "ring"
        case "ragged_all_to_all":
            return "direct"
        case "ppermute":
            return "partners"
    raise AssertionError(op)


def _with_operands(name: str, operand_bytes: int) -> str:
    """Small operands are added in VMEM: the pipeline through HBM costs three DMAs a step."""
    return f"{name}:vmem" if operand_bytes <= _VMEM_UP_TO_BYTES else name


def reaches_all(devices: int, chip: Chip) -> bool:
    """Whether a device can write to every other of its group in one DMA.

    v5e's remote DMAs reach offsets that are powers of two, so it takes a group of at most three.
    """
    return chip.far_dma or devices <= 3


def reaches(offset: int, devices: int, chip: Chip) -> bool:
    """Whether a device can write to the one `offset` positions away in one DMA (see `reaches_all`).

    First and last device of a ring are neighbours.
    """
    distance = abs(offset)
    return chip.far_dma or distance & (distance - 1) == 0 or distance == devices - 1
