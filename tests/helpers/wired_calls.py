"""What the tests of collectives over narrower wires share: data, calls, bounds, a planted fault."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import harness
import pallas_collectives as pc
from benchmarks import replay_rows
from pallas_collectives import wires
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.kernels.machinery.codec import Codec
from pallas_collectives.kernels.torus.packed_gather import PackedGather
from pallas_collectives.replay import Machine, Report, replay
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire

BY_XLA = {"backend": "xla"}
COLUMNS = 384
WIRES = (
    Wire("int8"),
    Wire("int8", group=256, scales="power of two"),
    Wire("float8_e4m3fn"),
    Wire("float8_e5m2", group=256),
)
# Every wire with every number of devices; all but one of each are for minutes (`pytest -m slow`).
PRODUCT = [
    pytest.param(wire, n, marks=() if wire is WIRES[0] or n == 3 else pytest.mark.slow)
    for wire in WIRES
    for n in range(2, 9)
]
# The same for kernels that move alone, where one row stands for what the others share.
MOVED = [
    pytest.param(wire, n, marks=() if (wire, n) == (WIRES[0], 2) else pytest.mark.slow)
    for wire in WIRES
    for n in range(2, 9)
]
KINDS = ("normal", "heavy tails", "constant", "one outlier", "zeros")


def data(n: int, kind: str = "normal", rows: int = 2, columns: int = COLUMNS) -> np.ndarray:
    """A float32 term of each of n devices, (n, rows of each block * n, columns)."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, rows * n, columns))
    match kind:
        case "heavy tails":
            x = rng.standard_cauchy(x.shape)
        case "constant":
            x = np.full(x.shape, 0.3)
        case "one outlier":
            x[0, 0, 5] = 1e4
        case "zeros":
            x[:] = 0
    return x.astype(np.float32)


def run(program: Callable[..., Any], *operands: Any, n: int = 4, **options: Any) -> Any:
    """What each device has of a program."""
    got = harness.per_device(program, harness.mesh(n), **options)(*operands)
    return jax.tree.map(np.asarray, got)


# What moves data, of one device's (rows, columns) and the number of devices, and what adds.
MOVES: tuple[Callable[..., jax.Array], ...] = (
    lambda x, n, **how: pc.all_gather(x, "x", **how),
    lambda x, n, **how: pc.all_gather(x, "x", axis=1, tiled=True, **how),
    lambda x, n, **how: pc.all_to_all(x, "x", 0, 0, tiled=True, **how),
    lambda x, n, **how: pc.all_to_all(x, "x", 0, 1, tiled=True, **how),
    lambda x, n, **how: pc.ppermute(x, "x", [(0, n - 1), (n - 1, 0)], **how),
    lambda x, n, **how: pc.pshuffle(x, "x", [*range(1, n), 0], **how),
)
SUMS: tuple[Callable[..., jax.Array], ...] = (
    lambda x, **how: pc.psum_scatter(x, "x", tiled=True, **how),
    lambda x, **how: pc.psum(x, "x", **how),
    lambda x, **how: pc.pmean(x[:, :200], "x", **how),
)


def moves(x: jax.Array, n: int, **how: Any) -> list[jax.Array]:
    """What each of `MOVES` makes of it."""
    return [move(x, n, **how) for move in MOVES]


def sums(x: jax.Array, **how: Any) -> list[jax.Array]:
    """What each of `SUMS` makes of it."""
    return [add(x, **how) for add in SUMS]


def swapped(x: np.ndarray, split: int = 0, concat: int = 0) -> np.ndarray:
    """What each device is to have of everyone's operand, (n, *operand), by an all-to-all."""
    cut = [np.split(each, len(x), axis=split) for each in x]
    return np.stack([np.concatenate(blocks, axis=concat) for blocks in zip(*cut, strict=True)])


def within(x: jax.Array, wire: Wire) -> jax.Array:
    """How far each number of x may be off when it has been sent once."""
    return wires.error_bound(x, wires.quantize(x, wire)[1], wire)


def exact(x: np.ndarray) -> np.ndarray:
    """The sum of each block of all terms, (n, n * rows, columns): (n, rows, columns)."""
    return x.astype(np.float64).sum(axis=0).reshape(len(x), -1, x.shape[-1])


def bound(x: np.ndarray, wire: Wire, line: bool = False, one_way: bool = False) -> np.ndarray:
    """How far each number of `exact` may be off: half a step of each sum that was sent.

    A sum comes from both sides, round a ring from as far as the opposite device; in sections it
    goes round `one_way`, either. Steps are those of what is sent, which is off already: so a step
    more of it than has come. And of float32.
    """
    n = len(x)
    blocks = x.astype(np.float64).reshape(n, n, -1, x.shape[-1])
    off = np.zeros(blocks.shape[1:])

    def sent(devices: list[int], block: int) -> np.ndarray:
        so_far, lost = np.zeros_like(off[0]), np.zeros_like(off[0])
        for device in devices:
            so_far = so_far + blocks[device, block]
            lost = lost + half_steps(np.abs(so_far) + lost, wire)
        return lost

    for block in range(n):
        for left in (block,) if line else (0, n - 1) if one_way else (n // 2, (n - 1) // 2):
            to_right = [(block - k) % n for k in range(left, 0, -1)]
            to_left = [(block + k) % n for k in range(n - 1 - left, 0, -1)]
            off[block] = np.maximum(off[block], sent(to_right, block) + sent(to_left, block))
    return off + 2.0**-22 * np.abs(blocks).sum(axis=0)


def bound_of_psum(x: np.ndarray, wire: Wire, line: bool = False, **how: bool) -> np.ndarray:
    """As `bound`, where the sums are sent on once they are whole."""
    allowed = bound(x, wire, line, **how)
    return allowed + half_steps(np.abs(exact(x)) + allowed, wire)


def half_steps(x: np.ndarray, wire: Wire) -> np.ndarray:
    """Half a step of each number of x, by the largest of its group of a row; in numpy alone."""
    groups = x.reshape(-1, int(wire.group))
    step = groups.max(axis=1, keepdims=True) / wire.largest
    if wire.scales == "power of two":
        step = 2.0 ** np.ceil(np.log2(np.maximum(step, 1e-300)))
    relative = {"int8": 0.0, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}[wire.dtype]
    half = np.maximum(groups * relative, step / (2 if wire.dtype == "int8" else 2.0**8))
    return (half * (1 + 2.0**-16) + 1e-37).reshape(x.shape)  # what float32 rounds off


def ragged(x: jax.Array, output: jax.Array, n: int, **how: Any) -> jax.Array:
    """One row of x (rows, columns) to each of n devices, behind the first row of their output."""
    me, each = jax.lax.axis_index("x"), jnp.ones(n, jnp.int32)
    return pc.ragged_all_to_all(
        x, output, jnp.arange(n, dtype=jnp.int32), each, jnp.full(n, 1 + me, jnp.int32), each,
        axis_name="x", **how
    )  # fmt: skip


# A choice: calls of x alone, one of them along the last dimension, as a wire's groups lie.
CALLS: dict[str, Callable[..., Any]] = {
    "all_gather": lambda x, **how: pc.all_gather(x, "x", **how),
    "psum_scatter": lambda x, **how: pc.psum_scatter(x, "x", tiled=True, **how),
    "psum": lambda x, **how: pc.psum(x, "x", **how),
    "all_to_all": lambda x, **how: pc.all_to_all(x, "x", 0, 1, tiled=True, **how),
    "ppermute": lambda x, **how: pc.ppermute(x, "x", [(0, 1), (1, 0)], **how),
}


def unpacked_before_it_has_come(
    monkeypatch: pytest.MonkeyPatch, comes: Callable[[tuple[int, ...]], bool]
) -> None:
    """A chunk is unpacked before it is waited for: numbers or scales may not be there yet.

    comes: whether semaphores of a shape are those of what comes.
    """
    unpack, wait = Codec.unpack, sync.wait
    late: list[Any] = []

    def put_off(semaphore: Any, ref: Any, times: Any = 1) -> None:
        if comes(semaphore.ref.shape):
            late.append((semaphore, ref))
        else:
            wait(semaphore, ref, times)

    def hurried(self: Codec, out: Any, packed: Any) -> None:
        unpack(self, out, packed)
        wait(*late.pop())

    monkeypatch.setattr(sync, "wait", put_off)
    monkeypatch.setattr(Codec, "unpack", hurried)


def gathered_before_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come is unpacked before it is waited for: numbers or scales may not be there yet."""
    keep, receive, take = PackedGather._keep, Channel.receive, PackedGather._take
    late: list[Any] = []

    def put_off(self: PackedGather, leg: Any, hop: Any) -> None:
        with monkeypatch.context() as within:
            within.setattr(Channel, "receive", lambda *args: late.append(args))
            take(self, leg, hop)

    def then(self: PackedGather, leg: Any, hop: Any) -> None:
        keep(self, leg, hop)
        receive(*late.pop())

    monkeypatch.setattr(PackedGather, "_take", put_off)
    monkeypatch.setattr(PackedGather, "_keep", then)


def another_tiles_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile is unpacked by the scales of the next one."""
    read, scales = Codec._read, Codec._scales

    def shifted(self: Codec, number: Any, tiles: int) -> Any:
        return scales(self, jax.lax.rem(number + 1, np.int32(tiles)), tiles)

    def wrong(self: Codec, *args: Any) -> Any:
        with monkeypatch.context() as within:
            within.setattr(Codec, "_scales", shifted)
            return read(self, *args)

    monkeypatch.setattr(Codec, "_read", wrong)


def shows(holds: Callable[[], bool]) -> bool:
    """Whether a planted fault does: as a race, or by numbers that do not hold."""
    try:
        caught = not holds()
    except Exception as error:
        caught = re.search(r"\brace", str(error).lower()) is not None  # and no leaked tracer
    finally:
        harness.forget_failures()
    return caught or harness.race_reported()


def replayed(
    program: Callable[[jax.Array], jax.Array], machine: Machine, elements: int, races: bool = False
) -> Report:
    """The replay of a program of one bfloat16 array on every device, rows of 128."""
    mesh, nothing = machine.mesh(replay_rows.mesh_axes(machine)), PartitionSpec()
    call = jax.shard_map(program, mesh=mesh, in_specs=nothing, out_specs=nothing, check_vma=False)
    shape = jax.ShapeDtypeStruct((elements // 128, 128), jnp.bfloat16)
    return replay(call, shape, machine=machine, races=races)


def terms(n: int, tiles: int, columns: int = 128, kind: str = "normal") -> np.ndarray:
    """An operand of n blocks of so many tiles for each device."""
    return data(n, kind, rows=tiles * 128, columns=columns)


def exchanged(
    kernel: Callable[..., jax.Array],
    x: np.ndarray,
    wire: Wire = WIRES[0],
    mode: str = "on_wait",
    split: int = 0,
    concat: int = 0,
) -> np.ndarray:
    """Every device's result of an all-to-all that packs, of x: (n, *operand)."""
    group = Group(("x",), (len(x),))
    how: Any = {"interpret": harness.ADVERSARIES[mode]}
    at = {"split_axis": split, "concat_axis": concat}

    def program(x: jax.Array) -> jax.Array:
        return kernel(x, group, **at, codec=Codec(wire), **how)

    return np.asarray(harness.per_device(program, harness.mesh(len(x)), check_vma=False)(x))


def exchange_holds(
    x: np.ndarray, got: np.ndarray, wire: Wire = WIRES[0], split: int = 0, concat: int = 0
) -> bool:
    """Whether every number is within half a step of what its sender had."""
    bounds = np.asarray(jax.vmap(lambda x: within(x, wire))(jnp.asarray(x)))
    want, allowed = swapped(x, split, concat), swapped(bounds, split, concat)
    return bool((np.abs(got.astype(np.float64) - want) <= allowed).all())


def check_exchange_compiled(kernel: Callable[..., jax.Array], generation: str, name: str) -> None:
    """An all-to-all that packs, over eight devices: its blocks lie in place."""
    group, how = Group(("x",), (8,)), {"interpret": False}

    def program(x: jax.Array) -> Any:
        return [
            kernel(x, group, split_axis=0, concat_axis=concat, codec=Codec(wire), **how)
            for wire, concat in ((Wire("int8"), 0), (Wire("float8_e4m3fn", group=256), 1))
        ]

    check_compiled(program, generation, (16, 2, 512, 512), name)


def check_compiled(
    program: Callable[..., Any], generation: str, shape: tuple[int, ...], name: str
) -> None:
    """The kernel is there, of bfloat16, and nothing is laid out anew for it."""
    pytest.importorskip("libtpu")
    topology = harness.GENERATIONS[generation]
    compiled = harness.compile_for_tpu(program, topology, shape, dtype=jnp.bfloat16)
    assert name in compiled.text
    assert {"copy", "transpose"}.isdisjoint(compiled.ops)
