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

What `moe.dispatch` and `moe.combine` launch is replayed, by the exchange that they choose: by slots
one kernel there, with choices (or two gathers, where the links then carry less), and back a gather
of weights and one kernel; ragged a gather of counts, then words, then tokens, and back weights,
then answers. Where tokens go to all, they share links, and `% wire` may be more than 100.

A row of 16 devices takes seconds to replay, one of 64 minutes. Of more than 16 devices what happens
within a thousandth of the bound's time is taken to happen at its end (`replay(..., grain=)`): times
are then too long by a few thousandths, and never told too short.

The plan's sums on small tables, and the passes over HBM that lay rows out, are not in these times.
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
from benchmarks import devices, experts_gpu, settings, timing
from benchmarks.replay_rows import mesh_axes
from benchmarks.settings import FlagError
from pallas_collectives.backends import choice
from pallas_collectives.backends.plans import How
from pallas_collectives.kernels import visits as visits_kernel
from pallas_collectives.moe import exchanges, linear, slots
from pallas_collectives.moe.wire import Sizes, Wire
from pallas_collectives.replay import Machine, MachineError, Report, bound, replay
from pallas_collectives.replay.bound import Bound

flags.adopt_module_key_flags(timing)  # on GPUs
_EXACT = 16  # devices up to which every moment is told from the next
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
    settings.check_no_arguments(argv)
    if unknown := set(_ROUTINGS.value) - set(ROUTINGS):
        rule = f"the routings are {', '.join(ROUTINGS)}"
        raise FlagError(f"--routings={min(unknown)}", rule, "use names from that list")
    if not 1 <= _CHOICES.value <= _EXPERTS.value:
        rule = f"it must be from 1 to the {_EXPERTS.value} of --experts"
        raise FlagError(f"--choices={_CHOICES.value}", rule, "choose fewer, or raise --experts")
    most = _MOST_CHOICES // _EXPERTS.value
    tokens = [settings.parse_count(text, "--tokens", most) for text in _TOKENS.value]
    devices.prepare(8)
    if devices.kind() == "gpu":
        n, each = jax.device_count(), (_EXPERTS.value, _CHOICES.value)
        if _EXPERTS.value % n:
            rule = f"it must be a multiple of the {n} GPUs"
            raise FlagError(f"--experts={_EXPERTS.value}", rule, "write such a number")
        for count in tokens:
            problem = experts_gpu.Problem(count, _WIDTH.value, *each)
            experts_gpu.run(problem, choices("balanced", n, count, *each))
        return 0
    if _WIDTH.value % 128:
        rule = "kernels move rows of 128 elements, and others would be modelled as narrower"
        raise FlagError(f"--width={_WIDTH.value}", rule, "write a multiple of 128")
    machines = [_machine(pod) for pod in _PODS.value]
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
        rule = f"it must be a multiple of the {machine.n_devices} devices of {machine}"
        raise FlagError(f"--experts={_EXPERTS.value}", rule, "write such a number")
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


def choices(name: str, n: int, tokens: int, experts: int, k: int) -> np.ndarray:
    """int[n, tokens, k]: the experts that each device's tokens choose."""
    rng = np.random.default_rng(0)
    return np.array([ROUTINGS[name](rng, tokens, experts, k) for _ in range(n)])


def going(chosen: np.ndarray, n: int, experts: int) -> np.ndarray:
    """bool[n, tokens, n]: whether a token of a device goes to each."""
    there = np.zeros((*chosen.shape[:2], n), bool)
    np.put_along_axis(there, chosen // (experts // n), True, axis=2)
    return there


def visits(name: str, n: int, tokens: int, experts: int, k: int) -> np.ndarray:
    """int32[n, n]: how many tokens of each device go to each."""
    there = going(choices(name, n, tokens, experts, k), n, experts)
    return there.sum(axis=1, dtype=np.int32)


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
    n, width = machine.n_devices, _WIDTH.value
    chosen = choices(name, n, tokens, _EXPERTS.value, _CHOICES.value)
    there = going(chosen, n, _EXPERTS.value)
    sent = there.sum(axis=1, dtype=np.int32)
    how = How("pallas", algorithm=None if algorithm == "auto" else algorithm)
    exchange = exchanges.choose(
        "auto",
        how,
        tuple(mesh_axes(machine).values()),
        tokens=tokens,
        experts=_EXPERTS.value,
        k=_CHOICES.value,
        rows=None,
        reaches_all=machine.generation.reaches_all,
    )
    for way, matrix in (("there", sent), ("back", np.ascontiguousarray(sent.T))):
        least = bound("ragged_all_to_all", machine, np.arange(n)[None], 2.0 * width * matrix)
        how_replayed = {"races": races, "grain": least.time / 1000 if n > _EXACT else 0.0}
        if exchange == "slots":
            report = by_slots(machine, chosen, _EXPERTS.value, width, way, **how_replayed)
        else:
            lists = words_of(chosen, n, _EXPERTS.value)
            lists = lists if way == "there" else np.ascontiguousarray(lists.T)
            before: dict[str, Any] = {"lists": lists, "counted": way == "there"} | how_replayed
            report = replayed(machine, matrix, width, algorithm=algorithm, **before)
        served = report.kernels[-1].name.removeprefix("ragged_all_to_all_")
        served = "gather" if served.startswith("all_gather") else served
        yield Row(machine, name, tokens, way, matrix, report, least, served)


def words_of(chosen: np.ndarray, n: int, experts: int) -> np.ndarray:
    """int32[n, n]: rows of 128 words on choices, from each device to each."""
    away = chosen.reshape(n, -1) // (experts // n)
    count = np.array([np.bincount(own, minlength=n) for own in away])
    return -(-count // 128).astype(np.int32)


def by_slots(
    machine: Machine,
    chosen: np.ndarray,
    experts: int,
    width: int,
    way: str,
    **how: Any,
) -> Report:
    """The exchange by slots of int[n, tokens, k] choices, one way; `how`: see `replay`."""
    axes, (n, tokens, k) = mesh_axes(machine), chosen.shape
    numbers = np.arange(n * tokens, dtype=np.int32)

    def exchange(x: jax.Array, tables: Any, note: jax.Array, weights: jax.Array) -> Any:
        how = choice.choose(tuple(axes), "pallas", None)
        wire = Wire(tuple(axes), None, how, "pallas")
        ways = wire.ways(Sizes(tokens, k, n, experts // n, n * tokens, "slots"))
        if way == "there":
            return slots.arrive(x, note, tables.tokens, tables.home, ways)
        return wire.everyones(weights), slots.back(x, tables, ways)

    there = going(chosen, n, experts)
    sent = there.sum(axis=1, dtype=np.int32)
    most = tokens * min(k, n)
    tables = slots.Tables(
        tokens=np.array([_padded(np.nonzero(own.T)[1], most, tokens) for own in there]),
        places=np.zeros((n, tokens, min(k, n)), np.int32),
        order=np.array([_padded(numbers[there[..., q].ravel()], n * tokens, 0) for q in range(n)]),
        ranks=np.zeros((n, n * tokens), np.int32),
        home=_ends(sent),
        away=_ends(sent.T),
    )
    head = visits_kernel.head_lanes(n)
    words = head + -(-tokens * k // 128) * 128
    note = np.zeros((n, words), np.int32)
    note[:, :n] = sent
    own = PartitionSpec(tuple(axes))
    everywhere = PartitionSpec()
    whole = jax.tree.map(lambda table: table.reshape(-1, *table.shape[2:]), tables)
    function = jax.shard_map(
        exchange,
        mesh=machine.mesh(axes),
        in_specs=(everywhere, jax.tree.map(lambda _: own, whole), own, everywhere),
        out_specs=everywhere,
        check_vma=False,
    )
    rows = tokens if way == "there" else n * tokens
    x = jax.ShapeDtypeStruct((rows, width // 128, 128), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((tokens, k), jnp.float32)
    return replay(function, x, whole, note.reshape(-1), weights, machine=machine, **how)


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    return np.pad(values, (0, size - len(values)), constant_values=fill).astype(np.int32)


def _ends(sent: np.ndarray) -> linear.Side:
    """Where blocks of sent[p, q] rows start at p, where they land at q, and their sizes."""
    starts, lands = np.cumsum(sent, 1) - sent, np.cumsum(sent, 0) - sent
    return linear.Side(starts.astype(np.int32), lands.astype(np.int32), sent.astype(np.int32))


def replayed(
    machine: Machine,
    sent: np.ndarray,
    width: int,
    *,
    algorithm: str,
    lists: np.ndarray | None = None,
    counted: bool = False,
    **how: Any,
) -> Report:
    """The exchange of sent[p, q] rows from each device p to each q, one behind the other.

    With `lists`, so many rows of 128 words, these go before it; if `counted`, and a gather of
    counts before them. `how`: see `replay`.
    """
    axes, n = mesh_axes(machine), machine.n_devices
    by: dict[str, Any] = {"axis_name": tuple(axes), "backend": "pallas", "algorithm": algorithm}

    def exchange(counts: jax.Array, *exchanged: Any) -> Any:
        told = []
        if counted:
            told.append(pallas_collectives.all_gather(counts, tuple(axes), backend="pallas"))
        return told, [pallas_collectives.ragged_all_to_all(*each, **by) for each in exchanged]

    everywhere, own = PartitionSpec(), PartitionSpec(tuple(axes))
    parts = [] if lists is None else [_exchanged(lists, (1, 128), jnp.int32)]
    parts.append(_exchanged(sent, (width // 128, 128), jnp.bfloat16))
    function = jax.shard_map(
        exchange,
        mesh=machine.mesh(axes),
        in_specs=(everywhere, *[(everywhere, everywhere, *(own,) * 4)] * len(parts)),
        out_specs=everywhere,
        check_vma=False,
    )
    counts = jax.ShapeDtypeStruct((2, n), jnp.int32)
    return replay(function, counts, *parts, machine=machine, **how)


def _exchanged(sent: np.ndarray, row: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    """The arguments of an exchange of sent[p, q] rows."""
    most = int(sent.sum(1).max()), int(sent.sum(0).max())
    operands = [jax.ShapeDtypeStruct((max(1, size), *row), dtype) for size in most]
    ends = _ends(sent)
    tables = ends.starts, ends.sizes, ends.landings, np.ascontiguousarray(sent.T)
    return *operands, *(table.astype(np.int32).reshape(-1) for table in tables)
