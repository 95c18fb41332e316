"""What packing costs: cycles for 16384 numbers, by the TPU compiler and by the replay.

    python tests/helpers/codec_cycles.py             all generations
    python tests/helpers/codec_cycles.py v5e v5p     these

The compiler's are the bundles of the loop that it makes of `kernels.machinery.codec`, of which a
core does one in a cycle, if it waits for nothing. Each generation is compiled in a process of its
own, which writes what the compiler has made of the kernels to a folder.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOPOLOGIES = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "7x": "2x2x1"}
WIRES = ("int8", "float8_e4m3fn", "float8_e5m2")
DTYPES = ("bfloat16", "float32")
# What is read, and whether what is written is packed; a term is packed or plain.
FORMS = {
    "unpacked": (("packed",), False),
    "packed": (("plain",), True),
    "added and packed": (("packed", "plain"), True),
    "added at the end": (("packed", "plain"), False),
}
ROWS = 1024  # of 256 columns: 16 tiles of 16384 numbers, four in each turn of the loop
TILES = ROWS * 256 // 16384


def kernel(form: str, wire: str, dtype: str, times: int = 1) -> tuple[Any, list[Any]]:
    """A program of one such kernel, which does it so often; and the types of its operands."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from pallas_collectives.kernels.machinery.codec import Codec
    from pallas_collectives.wires import Wire

    codec, (reads, packs) = Codec(Wire(wire)), FORMS[form]
    types = {
        "plain": jax.ShapeDtypeStruct((ROWS, 256), dtype),
        "packed": jax.ShapeDtypeStruct(codec.packed_shape((ROWS, 256)), jnp.int32),
    }

    def body(*refs: Any) -> None:
        for _ in range(times):
            if reads == ("packed",):
                codec.unpack(refs[-1], refs[0])
            else:
                codec.combine((refs[-1], *refs[:-1]))

    in_vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    call = pl.pallas_call(
        body,
        out_shape=types["packed" if packs else "plain"],
        in_specs=[in_vmem] * len(reads),
        out_specs=in_vmem,
        name=_name(form, wire, dtype),
    )
    return call, [types[each] for each in reads]


def _name(form: str, wire: str, dtype: str) -> str:
    return f"{form.replace(' ', '_')}__{wire}__{dtype}"


def by_the_compiler(chip: str) -> dict[tuple[str, str, str], float]:
    """Bundles for a tile, of each (form, wire, dtype)."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = {"LIBTPU_INIT_ARGS": flags, "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__, "--compile", chip]
        subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
        files = [p for p in Path(folder).glob("*final_bundles.txt") if "schedule" not in p.name]
        return {
            row: _in_loop(next(p for p in files if f"-{_name(*row)}." in p.name)) / 4
            for row in _rows()
        }


def _rows() -> list[tuple[str, str, str]]:
    return [(form, wire, dtype) for wire in WIRES for dtype in DTYPES for form in FORMS]


def _in_loop(bundles: Path) -> int:
    """How many bundles are in the loop: those whose line is marked ">" behind the address."""
    return sum(bool(re.match(r"\s*\w+\s.*?: >", line)) for line in bundles.read_text().splitlines())


def compile_all(chip: str) -> None:
    """Compiles every kernel for a chip."""
    import jax
    from jax.experimental import topologies

    name = f"{'tpu' * (chip == '7x')}{chip}:{TOPOLOGIES[chip]}"
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    for row in _rows():
        call, types = kernel(*row)
        operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device) for x in types]
        jax.jit(lambda *xs, call=call: call(*xs)).lower(*operands).compile()


def by_the_replay(chip: str, row: tuple[str, str, str]) -> float:
    """Cycles for a tile, as the replay charges them."""
    import jax
    from jax.sharding import PartitionSpec as P

    from pallas_collectives.replay import Machine, replay

    machine = Machine.named(f"{chip}:{TOPOLOGIES[chip]}")
    mesh = machine.mesh({"x": machine.n_devices})
    specs: Any = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}

    def time(times: int) -> float:
        call, types = kernel(*row, times)
        return replay(jax.shard_map(call, **specs), *types, machine=machine).time

    return (time(2) - time(1)) * machine.generation.clock / TILES


def main(chips: list[str]) -> None:
    compiled = {chip: by_the_compiler(chip) for chip in chips}
    print(f"{'':44}" + "".join(f"{chip:>12}" for chip in chips))
    for row in _rows():
        cells = (f"{compiled[c][row]:.0f}, {by_the_replay(c, row):.0f}" for c in chips)
        print(f"{' '.join(row):44}" + "".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_all(sys.argv[2])
    else:
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
        main(sys.argv[1:] or list(TOPOLOGIES))
