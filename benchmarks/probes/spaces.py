"""Whether data arrive whole in the memory that XLA chooses for a kernel's operands.

jax#39744 reports zeros, without an error, where XLA places in VMEM what a kernel was written to
find in HBM. So a product makes the operand, a kernel moves it, and another product reads the
result, in one program: then XLA may choose. Numbers are small and whole, so that every product is
exact, and no two rows are alike.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

import pallas_collectives as pc
from benchmarks.probes.rig import LANES, TILE_BYTES, Rig
from benchmarks.rows import Asked
from pallas_collectives.errors import CollectiveError

SIZES = (64 << 10, 1 << 20, 8 << 20)  # bytes of a device's operand
_SPACES = {"": "HBM", "S(1)": "VMEM", "S(3)": "CMEM"}


def programs(rig: Rig) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """The kernels: one that copies within the device, unconstrained, and those of the library."""
    how: dict[str, Any] = {"backend": "pallas"}
    n = rig.size

    def copy(x_ref: Any, o_ref: Any, sem: Any) -> None:
        move = pltpu.make_async_copy(x_ref, o_ref, sem)
        move.start()
        move.wait()

    def local(x: jax.Array) -> jax.Array:
        hbm = pl.BlockSpec(memory_space=pltpu.HBM)
        return pl.pallas_call(
            copy,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[hbm],
            out_specs=hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
            interpret=rig.interpret,
            name="copy",
        )(x)

    ring = [(i, (i + 1) % n) for i in range(n)]
    found: dict[str, Callable[[jax.Array], jax.Array]] = {"copy within a device": local}
    if n > 1:
        gather: Any = {"tiled": True, **how}
        found |= {
            "all_gather": lambda x: pc.all_gather(x, "x", **gather),
            "psum_scatter": lambda x: pc.psum_scatter(x, "x", **gather),
            "psum": lambda x: pc.psum(x, "x", **how),
            "all_to_all": lambda x: pc.all_to_all(x, "x", 0, 0, **gather),
            "ppermute": lambda x: pc.ppermute(x, "x", ring, **how),
        }
    return found


def sizes(rig: Rig) -> tuple[int, ...]:
    """Bytes of a device's operand; the least in whole tiles where every element is interpreted."""
    return (rig.size * TILE_BYTES,) if rig.interpret else SIZES


def rows(rig: Rig, first: int = 0) -> Iterator[Asked]:
    """A row for each kernel and size, from the number `first` on."""
    whole = [(name, size) for name in programs(rig) for size in sizes(rig)]
    for name, size in whole[first:]:
        kernel = programs(rig)[name]
        base = Asked(op=name, type="float32", devices=rig.size, size=size)
        try:
            yield row_of(rig, kernel, base)
        except CollectiveError as error:
            yield dataclasses.replace(base, refused=str(error))
        except Exception as error:  # the next one may tell more
            pltpu.reset_tpu_interpret_mode_state()
            yield dataclasses.replace(base, error=f"{type(error).__name__}: {error}")


def row_of(rig: Rig, kernel: Callable[[jax.Array], jax.Array], base: Asked) -> Asked:
    x, w = operands(rig, base.size)
    program = lowered(rig, kernel, base.size).compile()
    y = program(
        *(jax.device_put(value, _sharding(rig, split)) for value, split in ((x, 1), (w, 0)))
    )
    want = by_numpy(base.op, x.reshape(rig.size, -1, LANES))
    wrong = zeros = 0
    for shard in y.addressable_shards:
        got, there = np.asarray(shard.data), want.reshape(-1, LANES)[shard.index]
        wrong += int(np.sum(got != there))
        zeros += int(np.sum((got != there) & (got == 1)))  # what a product of zeros becomes
    answer = where(program.as_text() or "") + (
        f"; {zeros} elements were read as zero" if zeros else ""
    )
    return dataclasses.replace(base, wrong=wrong, answer=answer)


def operands(rig: Rig, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of small whole numbers, each unlike its neighbours; and twice the unit matrix."""
    count = size // (LANES * 4)
    row = np.arange(rig.size * count)[:, None] % 61 + np.arange(LANES)[None] % 7 + 1
    return row.astype(np.float32), 2 * np.eye(LANES, dtype=np.float32)


def lowered(rig: Rig, kernel: Callable[[jax.Array], jax.Array], size: int) -> jax.stages.Lowered:
    """A product, the kernel, a product."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        made = jnp.maximum(jnp.dot(x, w, precision="highest"), 0.0)
        read = jnp.dot(kernel(made), w / 2, precision="highest")
        return jnp.maximum(read, 0.0) + 1.0

    split, whole = PartitionSpec("x"), PartitionSpec()
    program = jax.shard_map(
        body, mesh=rig.mesh, in_specs=(split, whole), out_specs=split, check_vma=False
    )
    shapes = (rig.size * size // (LANES * 4), LANES), (LANES, LANES)
    return jax.jit(program).lower(
        *(
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=_sharding(rig, split))
            for shape, split in zip(shapes, (1, 0), strict=True)
        )
    )


def _sharding(rig: Rig, split: int) -> NamedSharding:
    return NamedSharding(rig.mesh, PartitionSpec("x") if split else PartitionSpec())


def by_numpy(op: str, x: np.ndarray) -> np.ndarray:
    """What each device must end with: (devices, rows, 128) of x."""
    made = 2 * x
    n = len(x)
    blocks = made.reshape(n, n, -1, LANES) if made.shape[1] % n == 0 else made
    match op:
        case "all_gather":
            moved = np.broadcast_to(made.reshape(1, -1, LANES), (n, n * made.shape[1], LANES))
        case "psum_scatter":
            moved = blocks.sum(0)
        case "psum":
            moved = np.broadcast_to(made.sum(0), made.shape)
        case "all_to_all":
            moved = blocks.swapaxes(0, 1).reshape(made.shape)
        case "ppermute":
            moved = np.roll(made, 1, 0)
        case _:
            moved = made
    return moved + np.float32(1)


def where(text: str) -> str:
    """The memories of the arrays that kernels take and give, in a compiled program."""
    types = dict(re.findall(r"^ *(?:ROOT )?%(\S+) = (\S+) ", text, re.MULTILINE))
    kernel = r"= (\S+) custom-call\((.*?)\), custom_call_target=\"tpu_custom_call\""
    found = []
    for result, operands in re.findall(kernel, text):
        taken = [types[name] for name in re.findall(r"%([^\s,)]+)", operands) if name in types]
        arrays = [of for of in taken if of.startswith("f32")]
        found.append(f"from {_memory(' '.join(arrays))} to {_memory(result)}")
    return ", ".join(dict.fromkeys(found)) or "no compiled kernel"


def _memory(types: str) -> str:
    spaces = [*re.findall(r"S\(\d\)", types)] or [""]
    return "/".join(dict.fromkeys(_SPACES.get(space, space) for space in spaces))
