"""Whether data arrive whole in the memory that XLA chooses for a kernel's operands.

jax#39744 reports zeros, without an error, where XLA places in VMEM what a kernel was written to
find in HBM. So a product makes the operand, a kernel moves it, and another product reads the
result, in one program: then XLA may choose. Numbers are small and whole, so that every product is
exact, and no two rows are alike.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

import pallas_collectives
from benchmarks.cases import CASES
from benchmarks.probes.rig import LANES, TILE_BYTES, Rig
from benchmarks.rows import Asked
from pallas_collectives.errors import CollectiveError
from pallas_collectives.examples import Example, one_block

SIZES = (64 << 10, 1 << 20, 8 << 20)  # bytes of a device's operand
_SPACES = {"": "HBM", "S(1)": "VMEM", "S(3)": "CMEM"}


def programs(rig: Rig) -> dict[str, Example]:
    """The kernels: one that copies within the device, unconstrained, and those of the library."""

    def copy(x_ref: Any, o_ref: Any, sem: Any) -> None:
        move = pltpu.make_async_copy(x_ref, o_ref, sem)
        move.start()
        move.wait()

    def local(_: Any, x: jax.Array, *__: Any, **___: Any) -> jax.Array:
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

    copied = Example(operand=one_block, call=local, reference=lambda xs: xs, busbw=lambda n: 0.0)
    of_ours = {case.name: case for case in CASES} if rig.size > 1 else {}
    return {"copy within a device": copied, **of_ours}


def sizes(rig: Rig) -> tuple[int, ...]:
    """Bytes of a device's operand; the least in whole tiles where every element is interpreted."""
    return (rig.size * TILE_BYTES,) if rig.interpret else SIZES


def rows(rig: Rig, first: int = 0) -> Iterator[Asked]:
    """A row for each kernel and size, from the number `first` on."""
    whole = [(name, size) for name in programs(rig) for size in sizes(rig)]
    for name, size in whole[first:]:
        example = programs(rig)[name]
        base = Asked(op=name, type="float32", devices=rig.size, size=size)
        try:
            yield row_of(rig, example, base)
        except CollectiveError as error:
            yield dataclasses.replace(base, refused=str(error))
        except Exception as error:  # the next one may tell more
            pltpu.reset_tpu_interpret_mode_state()
            yield dataclasses.replace(base, error=f"{type(error).__name__}: {error}")


def row_of(rig: Rig, example: Example, base: Asked) -> Asked:
    shape = _operand(rig, example, base.size)
    x, w = operands(rig, shape)
    program = lowered(rig, example, base.size).compile()
    y = program(
        *(jax.device_put(value, _sharding(rig, split)) for value, split in ((x, 1), (w, 0)))
    )
    want = example.reference(2 * x.reshape(rig.size, *shape))
    wrong = zeros = 0
    for shard in y.addressable_shards:
        got = np.asarray(shard.data)
        there = want[(shard.index[0].start or 0) // len(got)].reshape(got.shape) + 1
        wrong += int(np.sum(got != there))
        zeros += int(np.sum((got != there) & (got == 1)))  # what a product of zeros becomes
    answer = where(program.as_text() or "") + (
        f"; {zeros} elements were read as zero" if zeros else ""
    )
    return dataclasses.replace(base, wrong=wrong, answer=answer)


def _operand(rig: Rig, example: Example, size: int) -> tuple[int, ...]:
    """The shape of a device's operand of so many bytes."""
    row = math.prod(example.operand(rig.size, 1)) * 4
    return example.operand(rig.size, size // row)


def operands(rig: Rig, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of small whole numbers, each unlike its neighbours; and twice the unit matrix."""
    count = math.prod(shape) // LANES
    row = np.arange(rig.size * count)[:, None] % 61 + np.arange(LANES)[None] % 7 + 1
    return row.astype(np.float32), 2 * np.eye(LANES, dtype=np.float32)


def lowered(rig: Rig, example: Example, size: int) -> jax.stages.Lowered:
    """A product, the kernel, a product."""
    shape = _operand(rig, example, size)

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        made = jnp.maximum(jnp.dot(x, w, precision="highest"), 0.0)
        moved = example.call(pallas_collectives, made.reshape(shape), "x", backend="pallas")
        read = jnp.dot(moved.reshape(-1, LANES), w / 2, precision="highest")
        return jnp.maximum(read, 0.0) + 1.0

    split, whole = PartitionSpec("x"), PartitionSpec()
    program = jax.shard_map(
        body, mesh=rig.mesh, in_specs=(split, whole), out_specs=split, check_vma=False
    )
    shapes = (rig.size * math.prod(shape) // LANES, LANES), (LANES, LANES)
    return jax.jit(program).lower(
        *(
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=_sharding(rig, split))
            for shape, split in zip(shapes, (1, 0), strict=True)
        )
    )


def _sharding(rig: Rig, split: int) -> NamedSharding:
    return NamedSharding(rig.mesh, PartitionSpec("x") if split else PartitionSpec())


def where(text: str) -> str:
    """The memories of the arrays that kernels take and give, in a compiled program."""
    types = dict(re.findall(r"^ *(?:ROOT )?%(\S+) = (\S+) ", text, re.MULTILINE))
    kernel = r"= \(?(\S+).*? custom-call\((.*?)\), custom_call_target=\"tpu_custom_call\""
    found = []
    for result, operands in re.findall(kernel, text):
        taken = [types[name] for name in re.findall(r"%([^\s,)]+)", operands) if name in types]
        arrays = [of for of in taken if of.startswith("f32")]
        found.append(f"from {_memory(' '.join(arrays))} to {_memory(result)}")
    return ", ".join(dict.fromkeys(found)) or "no compiled kernel"


def _memory(types: str) -> str:
    spaces = [*re.findall(r"S\(\d\)", types)] or [""]
    return "/".join(dict.fromkeys(_SPACES.get(space, space) for space in spaces))
