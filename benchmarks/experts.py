"""`experts`: tokens to their experts and back, on modelled pods, or timed on GPUs.

The experts are spread over all devices of a pod. Modelled, the kernels that carry the tokens there
and their answers back are replayed, for each of these routings:

    balanced    each token chooses k of all experts, all as likely
    zipf        expert e is chosen as 1 / (1 + e)
    worst       all tokens choose experts of the same device, as far as it has them

A token travels to each device once (`rows` counts that). The bound is that of this very routing:
what each device must send to each, over the wires of the pod (`replay.bound`): no link carries more
than its bandwidth, and what goes from one half of a torus to the other crosses the links between.
`% wire` is the time of the busiest cut of links, as a share of the kernel's. Of decode sizes,
with few tokens, the bound is latency, and all times are in µs.

On GPUs it times both ways, of balanced routing, beside two dense all-to-alls of all choices' bytes
and beside the same by lax: `experts_gpu`.

A row of 16 devices takes seconds to replay; one of 64 minutes, and more where most pairs' rows are
passed on.

The plan, a gather of counts and sums on small tables, and the passes over HBM that lay rows out,
are not in these times.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import PartitionSpec

import pallas_collectives
from benchmarks import devices, experts_gpu, settings
from benchmarks.replay_rows import mesh_axes
from benchmarks.settings import FlagError
from pallas_collectives.replay import Machine, MachineError, Report, bound, replay
from pallas_collectives.replay.bound import Bound

_MOST_CHOICES = 1 << 24  # tokens of a device, times experts: what a routing draws
_PODS = flags.DEFINE_list(
    "expert_pods", ["v6e:16", "v6e:4x4", "v5e:16", "v5p:4x4x4", "7x:4x4x2"], "Pods to model."
)
_TOKENS = flags.DEFINE_list("tokens", ["4096", "256", "64", "16"], "Tokens of each device.")
_WIDTH = flags.DEFINE_integer("width", 7168, "Elements of a token, in bfloat16.", 128, 1 << 20)
_EXPERTS = flags.DEFINE_integer("experts", 256, "Experts in all.", 1, 1 << 16)
_CHOICES = flags.DEFINE_integer("choices", 8, "Experts of each token.", lower_bound=1)
_ROUTINGS = flags.DEFINE_list("routings", ["balanced", "zipf", "worst"], "Which tokens choose.")


def main(argv: Sequence[str]) -> int:
    """Prints the rows."""
    if argv[1:]:
        raise FlagError(f"argument {argv[1]!r}", "there are only flags", "see --help")
    if unknown := set(_ROUTINGS.value) - set(ROUTINGS):
        rule = f"the routings are {', '.join(ROUTINGS)}"
        raise FlagError(f"--routings={min(unknown)}", rule, "name some of them")
    if not 1 <= _CHOICES.value <= _EXPERTS.value:
        rule = f"it is from 1 to the {_EXPERTS.value} experts"
        raise FlagError(f"--choices={_CHOICES.value}", rule, "correct one of them")
    most = _MOST_CHOICES // _EXPERTS.value
    tokens = [settings.parse_count(text, "--tokens", most) for text in _TOKENS.value]
    machines = [_machine(pod) for pod in _PODS.value]
    devices.prepare(8)
    if devices.kind() == "gpu":
        problem = experts_gpu.Problem(tokens[0], _WIDTH.value, _EXPERTS.value, _CHOICES.value)
        rng, sizes = np.random.default_rng(0), (problem.tokens, problem.experts, problem.choices)
        routing = [balanced(rng, *sizes) for _ in range(jax.device_count())]
        experts_gpu.run(problem, np.array(routing))
        return 0
    print(
        f"Modelled, not measured: {_WIDTH.value} elements of bfloat16 a token, {_CHOICES.value} of"
    )
    print(f"{_EXPERTS.value} experts over all devices of a pod.")
    print(HEADER)
    for machine, count, name in itertools.product(machines, tokens, _ROUTINGS.value):
        for row in rows(machine, name, count):
            print(row.line(), flush=True)
    return 0


def _machine(pod: str) -> Machine:
    try:
        machine = Machine.named(pod)
    except MachineError as error:
        raise FlagError(f"--expert_pods={pod}", str(error), "write it like v5e:16") from None
    if _EXPERTS.value % machine.n_devices:
        rule = f"they are a multiple of the {machine.n_devices} devices of {machine}"
        raise FlagError(f"--experts={_EXPERTS.value}", rule, "give another number")
    return machine


def balanced(rng: np.random.Generator, tokens: int, experts: int, k: int) -> np.ndarray:
    """int[tokens, k]: different experts, all as likely."""
    return np.argpartition(rng.random((tokens, experts)), k - 1, axis=1)[:, :k]


def zipf(rng: np.random.Generator, tokens: int, experts: int, k: int) -> np.ndarray:
    """Different experts, expert e as likely as 1 / (1 + e)."""
    keys = rng.exponential(size=(tokens, experts)) * (1 + np.arange(experts))
    return np.argpartition(keys, k - 1, axis=1)[:, :k]


def worst(rng: np.random.Generator, tokens: int, experts: int, k: int) -> np.ndarray:
    """The first k experts."""
    del rng
    return np.broadcast_to(np.arange(k), (tokens, k))


ROUTINGS = {"balanced": balanced, "zipf": zipf, "worst": worst}


def visits(name: str, n: int, tokens: int, experts: int, k: int) -> np.ndarray:
    """int32[n, n]: how many tokens of each device go to each."""
    rng = np.random.default_rng(0)
    sent = np.zeros((n, n), np.int32)
    for home in range(n):
        away = ROUTINGS[name](rng, tokens, experts, k) // (experts // n)
        there = np.zeros((tokens, n), bool)
        np.put_along_axis(there, away, True, axis=1)
        sent[home] = there.sum(axis=0)
    return sent


HEADER = (
    f"{'pod':12}{'routing':10}{'tokens':>7}{'way':>7}{'algorithm':>11}{'rows':>8}"
    f"{'us':>10}{'bound us':>10}{'latency':>9}{'% wire':>8}  sound"
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One way of one routing."""

    machine: Machine
    routing: str
    tokens: int
    way: str
    sent: np.ndarray
    report: Report
    least: Bound
    algorithm: str

    @property
    def of_wire(self) -> float:
        """The wire's bound as a share of the time."""
        return self.least.wire / self.report.time

    def line(self) -> str:
        """The row as text, under `HEADER`."""
        us = 1e6 * np.array([self.report.time, self.least.time, self.least.latency])
        remote = int(self.sent.sum() - np.trace(self.sent)) // len(self.sent)
        sound = "; ".join(map(str, self.report.findings[:1])) or "ok"
        return (
            f"{self.machine!s:12}{self.routing:10}{self.tokens:>7}{self.way:>7}"
            f"{self.algorithm:>11}{remote:>8}{us[0]:10.1f}{us[1]:10.1f}{us[2]:9.1f}"
            f"{100 * self.of_wire:8.0f}  {sound}"
        )


def rows(
    machine: Machine, name: str, tokens: int, *, races: bool = False, algorithm: str = "auto"
) -> Iterator[Row]:
    """There, and back."""
    sent = visits(name, machine.n_devices, tokens, _EXPERTS.value, _CHOICES.value)
    for way, matrix in (("there", sent), ("back", np.ascontiguousarray(sent.T))):
        report = replayed(machine, matrix, _WIDTH.value, races=races, algorithm=algorithm)
        served = report.kernels[-1].name.removeprefix("ragged_all_to_all_")
        group = np.arange(machine.n_devices)[None]
        least = bound("ragged_all_to_all", machine, group, 2.0 * _WIDTH.value * matrix)
        yield Row(machine, name, tokens, way, matrix, report, least, served)


def replayed(
    machine: Machine, sent: np.ndarray, width: int, *, races: bool, algorithm: str
) -> Report:
    """The exchange of sent[p, q] rows from each device p to each q, one behind the other."""
    axes = mesh_axes(machine)
    starts, lands = np.cumsum(sent, 1) - sent, np.cumsum(sent, 0) - sent
    tables = (starts, sent, lands, np.ascontiguousarray(sent.T))
    leaving, coming = int(sent.sum(1).max()), int(sent.sum(0).max())

    def exchange(x: jax.Array, out: jax.Array, *tables: jax.Array) -> jax.Array:
        return pallas_collectives.ragged_all_to_all(
            x, out, *tables, axis_name=tuple(axes), backend="pallas", algorithm=algorithm
        )

    everywhere, own = PartitionSpec(), PartitionSpec(tuple(axes))
    function = jax.shard_map(
        exchange,
        mesh=machine.mesh(axes),
        in_specs=(everywhere, everywhere, *(own,) * 4),
        out_specs=everywhere,
        check_vma=False,
    )
    operands: list[Any] = [
        jax.ShapeDtypeStruct((max(1, size), width // 128, 128), jnp.bfloat16)
        for size in (leaving, coming)
    ]
    words = (table.astype(np.int32).reshape(-1) for table in tables)
    return replay(function, *operands, *words, machine=machine, races=races)
