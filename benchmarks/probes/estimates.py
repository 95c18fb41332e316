"""From the times of the probes to the figures of a `Machine`."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.probes import local, wire
from benchmarks.probes.clock import Clock, ProbeError
from benchmarks.probes.rig import DIE, LANES, TILE, TILE_BYTES, Probe, Rig
from pallas_collectives.replay import Generation, Machine


class Figure(NamedTuple):
    """A figure of the model, assumed and measured.

    Attributes:
      name: the name of `Generation`'s field, or of a figure without a field.
      assumed: the model's figure; None if it has no such field.
      measured: the measured figure; None if it could not be measured.
      unit: the unit of both.
      how: in a few words.
      error: why it could not be.
    """

    name: str
    assumed: float | None
    measured: float | None
    unit: str
    how: str
    error: str = ""


def figures(rig: Rig, clock: Clock) -> Iterator[Figure]:
    """All figures, the safe and the simple first. One that fails leaves those that need it out."""
    g = rig.machine.generation
    known: dict[str, float] = {}
    clock = _remembering(clock)
    for name, unit, how, find in _plan(rig):
        assumed = getattr(g, name, None)
        try:
            known[name] = find(known, clock)
            yield Figure(name, assumed, known[name], unit, how)
        except ProbeError as error:
            yield Figure(name, assumed, None, unit, how, str(error))
        except KeyError as error:
            yield Figure(name, assumed, None, unit, how, f"it needs {error}, which failed")
        except Exception as error:  # the next figure may be found all the same
            yield Figure(name, assumed, None, unit, how, f"{type(error).__name__}: {error}")


def _remembering(clock: Clock) -> Clock:
    """A clock that runs each probe once."""
    times: dict[str, float] = {}

    def remembered(rig: Rig, this: Probe) -> float:
        if this.name not in times:
            times[this.name] = clock(rig, this)
        return times[this.name]

    return remembered


def count(rig: Rig) -> int:
    """How many figures there will be."""
    return len(_plan(rig))


def machine(rig: Rig, found: dict[str, float]) -> Machine:
    """The slice with what was measured in place of what was assumed."""
    fields = {field.name for field in dataclasses.fields(Generation)}
    measured = {name: value for name, value in found.items() if name in fields}
    generation = dataclasses.replace(rig.machine.generation, **measured)  # type: ignore[arg-type]
    return dataclasses.replace(rig.machine, generation=generation)


_Find = Callable[[dict[str, float], Clock], float]


def _plan(rig: Rig) -> list[tuple[str, str, str, _Find]]:
    """(name, unit, how, (figures so far, clock) -> figure)."""

    def seconds(make: Callable[[], Probe]) -> _Find:
        return lambda known, clock: clock(rig, make())

    def rate(amount: float, make: Callable[[], Probe]) -> _Find:
        return lambda known, clock: amount / clock(rig, make())

    def issue(batch: Callable[[Rig, int], Probe]) -> _Find:
        def found(_: dict[str, float], clock: Clock) -> float:
            few, many = (clock(rig, batch(rig, n)) for n in (local.FEW, local.MANY))
            return _positive((many - few) / (local.MANY - local.FEW), "the difference of batches")

        return found

    def local_latency(known: dict[str, float], clock: Clock) -> float:
        whole = clock(rig, local.batch(rig, local.FEW))
        wire = TILE_BYTES / known["hbm_bandwidth"]
        return _positive(whole - local.FEW * known["issue_cost"] - wire, "the latency")

    def launch(known: dict[str, float], clock: Clock) -> float:
        inside = known["issue_cost"] + known["local_dma_latency"]
        inside += 2 * TILE_BYTES / known["hbm_bandwidth"]  # read and written
        return _positive(clock(rig, local.launch(rig)) - inside, "the launch")

    def launch_there(known: dict[str, float], clock: Clock) -> float:
        one = known["sparsecore_issue_cost"] + known["local_dma_latency"]
        inside = local.COPIES_THERE * one + 2 * TILE_BYTES / known["hbm_bandwidth"]
        return _positive(clock(rig, local.launch_there(rig)) - inside, "the launch")

    plan: list[tuple[str, str, str, _Find]] = [
        ("hbm_bandwidth", "B/s", "HBM to VMEM, 8 chunks in flight",
         rate(local.chunk_bytes(rig), lambda: local.hbm(rig))),
        ("vmem_bandwidth", "B/s", "loads and stores of 256 KiB",
         rate(local.vmem_bytes(), lambda: local.vmem(rig))),
        ("vector_rate", "1/s", "products and sums in registers",
         rate(local.vector_operations(), lambda: local.vector(rig))),
        ("issue_cost", "s", "16 DMAs against 4", issue(local.batch)),
        ("signal_cost", "s", "16 signals to itself",
         lambda known, clock: clock(rig, local.signal(rig)) / local.MANY),
        ("local_dma_latency", "s", "HBM to VMEM, 4 KiB", local_latency),
        ("launch_cost", "s", "kernels in a chain", launch),
    ]  # fmt: skip
    if not rig.machine.generation.no_sparsecore:
        plan += [
            ("sparsecore_issue_cost", "s", "16 DMAs of a SparseCore against 4", issue(local.there)),
            ("sparsecore_launch_cost", "s", "its kernels in a chain", launch_there),
            (
                "subcore_rate",
                "1/s",
                "two arrays in a vector subcore's memory",
                rate(local.loads_there(), lambda: local.subcore(rig)),
            ),
        ]
    return plan + (_on_wires(rig) if rig.axes else [])


def _on_wires(rig: Rig) -> list[tuple[str, str, str, _Find]]:
    g, axis = rig.machine.generation, _longest(rig)
    far = _far(rig, axis)

    def hop(known: dict[str, float], clock: Clock) -> float:
        near = clock(rig, wire.ping(rig, axis, 1))
        if far == 1:
            return _positive(near / 2 - known["signal_cost"], "a hop")
        return _positive((clock(rig, wire.ping(rig, axis, far)) - near) / (2 * (far - 1)), "a hop")

    def efficiency(n: int) -> _Find:
        return lambda known, clock: (
            g.devices_per_chip * _sent_rate(rig, rig.axes[:n], clock) / g.link_bandwidth
        )

    def alone(known: dict[str, float], clock: Clock) -> float:
        """Time of one block of one tile, from its start to its arrival."""
        return clock(rig, wire.stream(rig, rig.axes[:1], in_flight=1, rows=TILE))

    def latency(known: dict[str, float], clock: Clock) -> float:
        moved = TILE_BYTES * g.devices_per_chip / _link_rate(rig, known)
        whole = alone(known, clock) - moved
        return _positive(whole - known["issue_cost"] - known["hop_latency"], "the DMA's latency")

    def in_flight(known: dict[str, float], clock: Clock) -> float:
        unloaded = known["issue_cost"] + known["dma_latency"] + known["hop_latency"]
        return _link_rate(rig, known) * unloaded

    by = f"signals over {far} hops against 1" if far > 1 else "signals over 1 hop, to and fro"
    plan: list[tuple[str, str, str, _Find]] = [
        ("hop_latency", "s", by, hop),
        ("link_efficiency", "", "blocks to partners along one axis", efficiency(1)),
        *(
            (f"link_efficiency_{n}_axes", "", f"along {n} axes at once", efficiency(n))
            for n in range(2, len(rig.axes) + 1)
        ),
        ("dma_latency", "s", "4 KiB to a neighbour, without the hop", latency),
        ("bytes_in_flight", "B", "rate of a link times the latency of a DMA", in_flight),
    ]
    if g.devices_per_chip > 1:
        plan.append(
            ("die_bandwidth", "B/s", "blocks between the devices of a chip",
             lambda known, clock: _sent_rate(rig, (DIE,), clock))
        )  # fmt: skip
    return plan


def _sent_rate(rig: Rig, axes: Sequence[int], clock: Clock) -> float:
    """Bytes/s that a device sends to each partner: of blocks of two sizes, so that what passes
    between two blocks is not in it.
    """
    large = rig.block_bytes // (LANES * 4)
    small = large // 2 // TILE * TILE
    took = {rows: clock(rig, wire.stream(rig, axes, rows=rows)) for rows in (large, small)}
    sent = (large - small) * LANES * 4
    return sent / _positive(took[large] - took[small], "the difference of two sizes of block")


def _link_rate(rig: Rig, known: dict[str, float]) -> float:
    return rig.machine.generation.link_bandwidth * known["link_efficiency"]


def _longest(rig: Rig) -> int:
    return max(rig.axes, key=lambda axis: rig.machine.shape[axis])


def _far(rig: Rig, axis: int) -> int:
    """The greatest power of two that is a distance of pairs, the shorter way round."""
    return 1 << (max(1, rig.machine.shape[axis] // 2).bit_length() - 1)


def _positive(value: float, what: str) -> float:
    if value <= 0:
        raise ProbeError(f"{what} came out as {value:.3g}")
    return value
