"""What a stepped program leaves in its results, whatever its operands hold.

Each byte of each operand is a token of its own, and copies move tokens. What a core stores follows
from all that it has loaded so far, in order. So programs that leave the same tokens leave the same
values. A program without a race leaves the same on every schedule: one run of it tells.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from pallas_collectives.replay.order import Order
from pallas_collectives.replay.program import Access, Start
from schedules import bytes_of


@np.errstate(over="ignore")  # sums are modulo 2**64
def results(order: Order) -> dict[Any, np.ndarray]:
    """Per device and buffer that a kernel returns, the tokens of its bytes at the end.

    And of scalar memory that copies write: loops and waits go by it, and the steps that were taken
    hold for such numbers alone.
    """
    program = order.program
    memory: dict[Any, np.ndarray] = {}

    def held(device: int, buffer: Any) -> np.ndarray:
        place = program.home(device, buffer), buffer.id
        if place not in memory:
            first = (place[0] << 48) + (place[1] << 32)
            memory[place] = _mixed(np.arange(first, first + buffer.nbytes, dtype=np.uint64))
        return memory[place]

    known: dict[int, np.uint64] = defaultdict(lambda: np.uint64(1))  # what each core has loaded
    for event in order.events:
        column, position, device = event.column, event.position, event.device
        if isinstance(column, Start):
            src = held(device, column.src.buffer)[bytes_of(column.src, position)]
            held(event.target, column.dst.buffer)[bytes_of(column.dst, position)] = src
        elif isinstance(column, Access):
            at_bytes, tokens = bytes_of(column.view, position), held(device, column.view.buffer)
            if column.writes:
                own = known[device] + np.arange(len(at_bytes), dtype=np.uint64)
                tokens[at_bytes] = _mixed(own)
            else:
                order_of = np.arange(1, 2 * len(at_bytes), 2, dtype=np.uint64)
                known[device] = _mixed(known[device] + np.sum(tokens[at_bytes] * order_of))
    wanted = {number for kernel in program.kernels for number in kernel.results}
    copies = (column for column in program.columns if isinstance(column, Start))
    wanted |= {copy.dst.buffer.id for copy in copies if copy.dst.buffer.space == "smem"}
    buffers = {b.id: b for b in program.buffers if b.space != "semaphore_mem" and b.id in wanted}
    n_devices = program.n_devices // program.cores
    return {
        (device, number): held(device, buffer)
        for number, buffer in buffers.items()
        for device in range(n_devices)
    }


def same(a: dict[Any, np.ndarray], b: dict[Any, np.ndarray]) -> bool:
    """Whether two programs leave the same."""
    return a.keys() == b.keys() and all(np.array_equal(a[place], b[place]) for place in a)


def _mixed(x: Any) -> Any:
    """SplitMix64's finaliser."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
